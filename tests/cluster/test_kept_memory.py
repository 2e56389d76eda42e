"""A peer whose memory outlives it, as real processes: killed and stopped, with clients that stay."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.errors import ConfigError, NoSuchKey, P2PStoreError
from tests.cluster.processes import PeerProcess, new_cluster
from tests.commands import ran
from tests.contract.worlds import peer_process
from tests.waiting import eventually

MIB = 1024 * 1024
WAIT_SECONDS = 60.0


def value_of(name: str, length: int = MIB) -> bytes:
    return (name.encode() + b" ") * (length // (len(name) + 1)) + b"." * (length % (len(name) + 1))


@pytest.fixture
def file() -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix="p2pstore-test-", dir="/dev/shm")
    os.close(handle)
    yield Path(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


def has_returned(peer: PeerProcess) -> bool:
    returning: int = peer.client.statistics()["peer"]["objects_returning"]
    return returning == 0


def counters(peer: PeerProcess) -> dict[str, int]:
    found: dict[str, int] = peer.client.statistics()["peer"]["counters"]
    return found


def test_memory_outlives_its_peer_however_that_ends(file: Path) -> None:
    options = ("--memory-path", str(file), "--keep-memory", "--max-leased", "100%")
    with new_cluster(2, halves=False) as cluster:
        keeper, other = cluster.peers
        cluster.start([keeper], *options)
        cluster.start([other], "--bootstrap", keeper.control)
        cluster.wait_until_whole()
        again = (*options, "--bootstrap", other.control)

        for number in range(6):
            keeper.client.put(f"k{number}", value_of(f"k{number}"))
        keeper.client.put("removed", value_of("removed"))
        keeper.client.remove("removed")
        keeper.client.put("small", b"x", pin="hard")
        client = blocking.connect(str(keeper.socket), timeout=WAIT_SECONDS)
        view = client.take_lease("k0")
        eventually(lambda: other.client.contains("k5"), WAIT_SECONDS)

        # Killed. Meanwhile one object is removed and one replaced.
        keeper.kill()
        assert view == value_of("k0")
        other.client.remove("k1")
        other.client.put("k2", value_of("newer"), overwrite=True)
        cluster.start([keeper], *again)
        eventually(lambda: has_returned(keeper), WAIT_SECONDS)
        assert counters(keeper)["kept_objects_returned"] == 5, counters(keeper)
        eventually(lambda: bool(keeper.logged("of what was kept, 5 objects")), WAIT_SECONDS)
        for reader in (keeper, other):
            eventually(lambda reader=reader: reader.client.contains("k5"), WAIT_SECONDS)  # type: ignore[misc]  # bound now
            for key in ("k0", "k3", "k4", "k5"):
                assert reader.client.get(key) == value_of(key)
            assert reader.client.get("k2") == value_of("newer")
            for key in ("removed", "k1"):
                with pytest.raises(NoSuchKey):
                    reader.client.get(key)

        # Views of a client of the earlier life stay, whatever becomes of the object and its neighbours.
        keeper.client.remove("k0")
        for number in range(40):
            keeper.client.put(f"new {number}", value_of(f"new {number}"))
        assert view == value_of("k0")
        assert keeper.client.statistics()["peer"]["leased_bytes"] > MIB
        with pytest.raises((P2PStoreError, OSError)):
            client.get("k3")
        client.close()
        del view, client
        gc.collect()  # only then is it unmapped
        eventually(lambda: keeper.client.statistics()["peer"]["leased_bytes"] == 0, WAIT_SECONDS)
        assert keeper.client.get("small") == b"x"

        # Stopped, as for an upgrade: quickly, and nothing is handed over. Others may not have the file meanwhile.
        held = [key.key for key in keeper.client.list_keys(local=True).keys]
        assert len(held) > 8
        keeper.signal(signal.SIGTERM)
        eventually(lambda: not keeper.running, WAIT_SECONDS)
        assert keeper.exit_status == 0
        assert keeper.logged("objects (")[-1].endswith(f"{file} for the next start path={file}")
        assert not keeper.logged("handed over")
        keeper.kill()
        config = p2pstore.PeerConfig(
            memory=cluster.memory, memory_path=str(file), keep_memory=True, cluster="another"
        )
        with pytest.raises(ConfigError, match="without a state directory"):
            trio.run(_open, config)
        config.state_dir = str(cluster.folder / "another")
        with pytest.raises(ConfigError, match="kept memory that this peer cannot use: it is of a"):
            trio.run(_open, config)
        cluster.start([keeper], *again)
        eventually(lambda: has_returned(keeper), WAIT_SECONDS)
        assert [key.key for key in keeper.client.list_keys(local=True).keys] == held
        for key in held:
            if key.startswith("new"):
                assert keeper.client.get(key) == value_of(key)

        # Asked to leave: for good.
        keeper.client.leave(drain=5.0)
        eventually(lambda: not keeper.running, WAIT_SECONDS)
        assert not file.exists()
        assert keeper.logged("handed over")


async def _open(config: p2pstore.PeerConfig) -> None:
    async with p2pstore.open_peer(config):
        pass


VALUE = bytes(range(256)) * 4096
END_SECONDS = 30.0


def refused(folder: Path, *options: str) -> str:
    """The message of a peer with these options that does not start."""
    command = [sys.executable, "-m", "mooncake_p2p", "join", "--name", "refused", "--memory", "16MiB"]
    command += ["--state-dir", str(folder / "refused"), "--socket", str(folder / "refused.sock")]
    done = ran([*command, *options], END_SECONDS)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_clients_use_it_and_a_second_peer_does_not(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    options = ("--memory-path", str(file))
    with peer_process(tmp_path, "owner", *options) as peer:
        with blocking.connect(peer.socket) as client:
            client.put("key", VALUE)
            assert client.get("key") == VALUE
            view = client.take_lease("key")
            assert f"--memory-path: {file} is the memory of another peer" in refused(tmp_path, *options)
        peer.process.kill()
        peer.process.wait(END_SECONDS)
    assert view == VALUE
    with peer_process(tmp_path, "owner", *options) as peer:  # takes the place of what was left
        with blocking.connect(peer.socket) as client:
            assert not client.contains("key")
            client.put("other", VALUE[::-1])
            assert client.get("other") == VALUE[::-1]
        assert view == VALUE, "memory under a view of a dead peer changed"
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(END_SECONDS) == 0
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--memory-path", "/nowhere/file"), "--memory-path: /nowhere/file cannot be made"),
        (("--numa-node", "77"), "--numa-node: this machine has no NUMA node 77"),
        (("--memory-path", "/dev/shm/x", "--numa-node", "0"), "--numa-node: memory in a file is"),
        (("--memory", "1000TiB", "--huge-pages", "require"), "--huge-pages: 1000.0 TiB of huge"),
    ],
)
def test_what_cannot_be_is_told_by_the_options_name(
    tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in " ".join(refused(tmp_path, *options).split())


def test_memory_of_several_kinds_is_used_as_one(tmp_path: Path) -> None:
    file = tmp_path / "more"
    more = ("--more-memory", "8MiB@node:0", "--more-memory", f"8MiB@{file}")
    options = ("--memory", "8MiB", "--max-leased", "100%", *more)
    values = {f"k{number}": bytes([number]) * 3_000_000 for number in range(7)}  # over 16 MiB
    with peer_process(tmp_path, "owner", *options) as peer:
        with blocking.connect(peer.socket) as client:
            for key, value in values.items():
                assert client.put(key, value, pin="hard").status == "created"
            views = {key: client.take_lease(key) for key in values}
        with blocking.connect(peer.socket) as reader:
            for key, value in values.items():
                assert reader.get(key) == value
                assert views[key] == value
            assert reader.statistics()["peer"]["memory_capacity_bytes"] == 24 * 1024 * 1024
        assert f"--more-memory: {file} is the memory of another peer" in refused(tmp_path, *more)
        assert "--more-memory: this machine has no NUMA node 77" in refused(
            tmp_path, "--more-memory", "1MiB@node:77"
        )
        del views
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(END_SECONDS) == 0
    assert not file.exists()
