"""Three real peers, of which one has a wall clock that is wrong for a while, and then right again."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstore.errors import P2PStoreError, Unavailable
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.commands import ran
from tests.waiting import eventually

SECONDS = 30.0
SITE = '''
"""A wall clock that is ahead by what a file beside this one says, in seconds."""
import pathlib, sys, time
_true, _file = time.time, pathlib.Path(__file__).with_name("ahead")
_ours = "--name" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--name") + 1] == "p2"
if _ours:
    time.time = lambda: _true() + float(_file.read_text())
'''


class WrongClock:
    """That of p2."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(SITE)
        self._file = folder / "ahead"
        self.set(0.0)

    def set(self, ahead_seconds: float) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(str(ahead_seconds))
        fresh.replace(self._file)


@pytest.fixture(scope="module")
def wrong_clock(module_path: Path) -> WrongClock:
    return WrongClock(module_path)


@pytest.fixture(scope="module")
def cluster(wrong_clock: WrongClock) -> Iterator[ProcessCluster]:
    with new_cluster(3, halves=False) as made:
        made.environment = {**made.environment, "PYTHONPATH": str(wrong_clock._file.parent)}
        made.start_first()
        yield made


def peer_document(peer: PeerProcess) -> dict[str, Any]:
    document: dict[str, Any] = peer.client.statistics(cluster=False)["peer"]
    return document


def problems(peer: PeerProcess) -> list[str]:
    return [each["name"] for each in peer_document(peer)["problems"]]


def clock_is_told(peers: list[PeerProcess]) -> bool:
    return all(peer_document(peer)["clock_ahead_seconds"] is not None for peer in peers)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_nothing_is_lost_by_a_clock_that_was_wrong(
    cluster: ProcessCluster, wrong_clock: WrongClock, ahead: float
) -> None:
    right, _, wrong = cluster.peers
    name = f"{ahead:+.0f}"
    eventually(lambda: clock_is_told(cluster.peers), SECONDS)
    right.client.put(f"{name} theirs", b"theirs")
    eventually(lambda: wrong.client.contains(f"{name} theirs"), SECONDS)
    since = [peer.log_size() for peer in cluster.peers]
    wrong_clock.set(ahead)
    eventually(lambda: peer_document(wrong)["clock_problem"], SECONDS)
    client = wrong.client
    refused: list[Callable[[], object]] = [
        lambda: client.put(f"{name} new", b"new"),
        lambda: client.put(f"{name} new", b"new", replicas=2),
        lambda: client.put(f"{name} theirs", b"mine", overwrite=True),
        lambda: client.remove(f"{name} theirs"),
        lambda: client.flush(),
        lambda: client.pin(f"{name} theirs"),
        lambda: client.checkpoints.remove("none"),
    ]
    for attempt in refused[:-1]:
        with pytest.raises(Unavailable, match=r"60 min (ahead of|behind) the other peers'"):
            attempt()
    with pytest.raises(P2PStoreError):
        refused[-1]()
    assert client.get(f"{name} theirs") == b"theirs", "reads go on"
    right.client.put(f"{name} fine", b"fine", replicas=2)
    assert "clock" in problems(wrong)
    eventually(lambda: "other clocks" in problems(right), SECONDS)
    doctor = ran(
        [sys.executable, "-m", "mooncake_p2p", "doctor", "--socket", str(wrong.socket)],
        SECONDS,
        env=cluster.environment,
    )
    assert "60 min" in doctor.stdout, doctor.stdout + doctor.stderr
    time_of_trouble = time.monotonic()
    eventually(lambda: time.monotonic() > time_of_trouble + 0.5, SECONDS)
    for peer, at in zip(cluster.peers, since, strict=True):
        assert len(peer.logged("WARNING", at)) <= 2, peer.logged("WARNING", at)
    refusal = "nothing can be written through this peer"
    eventually(lambda: bool(wrong.logged(refusal, since[2])), SECONDS)
    assert len(wrong.logged(refusal, since[2])) == 1
    wrong_clock.set(0.0)
    eventually(lambda: not peer_document(wrong)["clock_problem"], SECONDS)
    assert client.put(f"{name} new", b"new", replicas=2).copies == 2
    assert right.client.get(f"{name} new") == b"new"
    client.put(f"{name} theirs", b"mine", overwrite=True)
    eventually(lambda: right.client.get(f"{name} theirs") == b"mine", SECONDS)
    assert client.remove(f"{name} fine")
    eventually(lambda: not right.client.contains(f"{name} fine"), SECONDS)
    eventually(lambda: "other clocks" not in problems(right) and "clock" not in problems(wrong), SECONDS)


@pytest.mark.parametrize("clock", ["-1", str((1 << 63) - 1)])
def test_a_saved_clock_that_was_edited_is_said_and_does_no_harm(
    cluster: ProcessCluster, clock: str
) -> None:
    right, _, edited = cluster.peers
    edited.signal(signal.SIGTERM)
    eventually(lambda: not edited.running, SECONDS)
    edited.kill()
    path = edited.state / "state.json"
    path.write_text(re.sub(r'"clock":\d+', f'"clock":{clock}', path.read_text()))
    since = edited.log_size()
    edited.start("--bootstrap", right.control)
    edited.wait_until_ready()
    cluster.wait_until_whole()
    assert edited.client.put(f"edited {clock}", b"value", replicas=2).copies == 2
    assert right.client.get(f"edited {clock}") == b"value"
    said = "no usable clock" if clock == "-1" else "the clock that was saved is"
    assert edited.logged(said, since), edited.log.read_text()
    assert not peer_document(edited)["clock_problem"]
