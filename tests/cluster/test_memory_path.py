"""Peers whose memory is in a file: clients use it as any other, a second peer does not, and it goes with its peer."""

import signal
import sys
from pathlib import Path

import pytest

from p2pstore import blocking
from tests.commands import ran
from tests.contract.worlds import peer_process

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
