"""Checkpoints as an operator has them: commands and peers as processes that are stopped and killed on the way."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2pstore.objects import MIB
from tests.cluster.machines import Peer, done, failed, new_machine
from tests.contract.swarm_world import make_files, same_files
from tests.forked import COMMAND, start
from tests.waiting import eventually

SECONDS = 90.0
PIECE = 128 * 1024
FILES = {"model.safetensors": 6 * MIB + 5, "config.json": 300, "deep/tokenizer.json": 200_000}


@contextmanager
def fetching(peer: Peer, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A slow fetch that has brought some pieces, and not all."""
    arguments = ["checkpoint", "fetch", "model", str(directory), "--limit-rate", "1MiB"]
    process = start(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**peer.machine.environment, "MOONCAKE_P2P_SOCKET": peer.ready["socket"]},
    )
    try:
        eventually(lambda: pieces_of(directory) >= 3, SECONDS)
        yield process
    finally:
        process.kill()
        process.communicate()


def pieces_of(directory: Path) -> int:
    """How many pieces are noted as verified in a directory that is being fetched to."""
    notes = list((directory / ".p2pstore").glob("*.pieces"))
    return sum(byte.bit_count() for note in notes for byte in note.read_bytes()[68:])


def fetch(peer: Peer, directory: Path, *options: str) -> int:
    """Fetch it; how many bytes came over the network."""
    result = done(
        peer.run("checkpoint", "fetch", "model", str(directory), "--wait", "30", "--json", *options)
    )
    document = json.loads(result.stdout)
    assert document["bytes"] == sum(FILES.values())
    fetched: int = document["fetched_bytes"]
    return fetched


def test_ctrl_c_kill_9_and_a_source_that_goes() -> None:
    with new_machine() as machine:
        folder, total = machine.folder, sum(FILES.values())
        make_files(folder / "from", FILES)
        source = machine.join("source")
        bootstrap = ("--bootstrap", source.ready["control"])
        b, c = machine.join("b", *bootstrap), machine.join("c", *bootstrap)
        publish = ("checkpoint", "publish", "model", str(folder / "from"), "--piece-size")
        version = done(source.run(*publish, str(PIECE))).stdout.decode().strip().split("@")[1]
        eventually(lambda: b.run("checkpoint", "list").stdout.count(b"model") == 1, SECONDS)

        with fetching(b, folder / "b") as command:
            command.send_signal(signal.SIGINT)
            _, said = command.communicate(timeout=SECONDS)
            assert command.returncode == 130
            assert b"the same command goes on with what is there" in said
        had = pieces_of(folder / "b")
        assert had >= 3

        with fetching(b, folder / "b") as command:  # and now its peer is killed
            eventually(lambda: pieces_of(folder / "b") >= had + 3, SECONDS)
            had = pieces_of(folder / "b")
            b.stop(signal.SIGKILL)
            _, said = command.communicate(timeout=SECONDS)
            assert command.returncode == 4, said
        b = machine.join("b", *bootstrap)
        small = 3  # pieces: the rests of the large files, and the small one
        assert fetch(b, folder / "b") <= total - (had - small) * PIECE
        assert same_files(folder / "from", folder / "b" / "current")

        # The source goes once others have everything; a later peer gets it from them.
        done(source.run(*publish, str(PIECE), "--wait-seeded"))
        source.stop(signal.SIGKILL)
        assert fetch(c, folder / "c") == total
        assert same_files(folder / "from", folder / "c" / version)

        # A file that is spoilt on the disk is seen when it is looked at.
        spoilt = folder / "c" / version / "config.json"
        spoilt.write_bytes(b"x" * 300)
        complaint = failed(c.run("checkpoint", "fetch", "model", str(folder / "c"), "--verify"), 2)
        assert f"{folder}/c: config.json was changed; remove it to fetch it" in complaint
