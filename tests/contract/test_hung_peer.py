"""Calls of a client that fails fast, while its peer is stopped: none waits, and late answers touch nothing."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import DeadlineExceeded
from p2pstore.local.local_requests import Silence
from tests.contract.small_peer import SmallPeer
from tests.contract.worlds import peer_process
from tests.waiting import eventually

LONG = 10_000_000
CALL_SECONDS = 600.0
"""Of a call that waits for its peer: none of these does."""


def test_a_peer_hangs_that_answers_no_probe() -> None:
    silence = Silence()
    assert not silence.wants_probe(0.0, 1e9), "unless it is told to"
    silence.patience_seconds = 1.0
    silence.heard(10.0)
    assert not silence.wants_probe(10.2, 10.6)
    assert silence.wants_probe(10.2, 10.7)
    silence.probed(10.7)
    assert not silence.wants_probe(10.2, 20.0), "one is enough"
    assert not silence.lasts(10.2, 11.6)
    silence.heard(11.65)
    assert not silence.lasts(10.2, 11.7), "whatever came"
    assert not silence.wants_probe(10.2, 12.1)
    assert silence.wants_probe(10.2, 12.2)
    silence.probed(12.2)
    assert not silence.lasts(13.0, 13.9), "each request has its time"
    assert silence.lasts(12.2, 13.2)
    assert silence.hangs
    assert silence.lasts(13.2, 13.2), "later ones have none"
    silence.heard(14.0)
    assert not silence.hangs


@contextmanager
def hung(folder: Path) -> Iterator[tuple[BlockingClient, BlockingClient, Callable[[], None]]]:
    """Two clients of a peer that is stopped, the first of which fails fast; and a function that has it go on."""
    with peer_process(folder, "hung") as peer:
        impatient, patient = (blocking.connect(peer.socket, timeout=CALL_SECONDS) for _ in range(2))
        impatient.fail_fast(0.1)
        with impatient, patient:
            impatient.put("here", b"value")
            peer.process.send_signal(signal.SIGSTOP)
            try:
                yield impatient, patient, lambda: peer.process.send_signal(signal.SIGCONT)
            finally:
                peer.process.send_signal(signal.SIGCONT)


def taken_bytes(client: BlockingClient) -> int:
    """By objects, reservations and leases."""
    figures = client.statistics(cluster=False)["peer"]
    taken: int = figures["memory_used_bytes"] + figures["leased_bytes"]
    return taken


def test_what_was_given_up_takes_and_writes_nothing_when_the_peer_goes_on(tmp_path: Path) -> None:
    with hung(tmp_path) as (client, other, go_on):
        room, buffers = bytearray(b"\xee" * 16), [bytearray(b"\xee" * 16) for _ in range(3)]
        with pytest.raises(DeadlineExceeded):
            client.put("new", bytes(LONG))
        with pytest.raises(DeadlineExceeded):
            client.take_lease("late", wait=60)
        with pytest.raises(DeadlineExceeded):
            client.get_into("late", room, wait=60)
        assert client.get_into("here", room) == 5
        outcomes = client.get_many_into(list(zip(["late", "here", "new"], buffers, strict=True)))
        assert [type(each.error) for each in outcomes] == [
            DeadlineExceeded,
            type(None),
            DeadlineExceeded,
        ]
        go_on()
        other.put("late", b"another")
        eventually(lambda: client.contains("late"))
        eventually(lambda: not client._session._link.connection.awaits_late_replies)
        # Nothing came late, neither into these nor as a reservation or lease without an owner.
        assert room == b"value" + b"\xee" * 11
        assert [bytes(each) for each in buffers] == [b"\xee" * 16, bytes(room), b"\xee" * 16]
        assert not client.contains("new")
        eventually(lambda: taken_bytes(other) < LONG / 2)
        assert client.get("late") == b"another"
        client.put("new", bytes(LONG))


def test_one_connection_serves_many_threads_before_and_after(tmp_path: Path) -> None:
    with hung(tmp_path) as (client, _, go_on), ThreadPoolExecutor(8) as pool:
        failed = [pool.submit(client.put, f"k{number}", b"value") for number in range(32)]
        assert all(isinstance(each.exception(CALL_SECONDS), DeadlineExceeded) for each in failed)
        with pytest.raises(DeadlineExceeded):
            client.hear(0.01)
        go_on()
        client.hear(CALL_SECONDS)
        stored = [pool.submit(client.put, f"k{number}", b"value") for number in range(32)]
        assert all(each.exception(CALL_SECONDS) is None for each in stored)


def test_a_peer_that_takes_its_time_is_waited_for(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it answers probes. The gate opens after several."""
    probes = threading.Semaphore(0)
    contains = peer.backend._contains

    def noted(client: Any, message: Any) -> Any:
        probes.release()
        return contains(client, message)

    monkeypatch.setattr(peer.backend, "_contains", noted, raising=False)
    with blocking.connect(str(peer.path), timeout=CALL_SECONDS) as client, ThreadPoolExecutor() as pool:
        client.fail_fast(0.1)
        gate = peer.backend.gate = peer.call(trio.Event)
        located = pool.submit(client.locate, "k")
        for _ in range(5):
            assert probes.acquire(timeout=60)
        peer.call(gate.set)
        assert located.exception(60) is None
