"""The trace of a read, which `get --explain` shows, and its progress."""

import itertools

import pytest

from mooncake_p2p.commands.put_get import document, explanation
from p2pstore.objects import MIB
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import watch_of
from p2pstore.transfer.transfer_trace import FetchTrace, ReadWatch
from p2pstore.transfer.transport import BufferDestination
from p2pstore.wire import Code


def ticking(step: float = 0.001) -> ReadWatch:
    """A watch whose clock goes on by `step` seconds with each reading."""
    ticks = itertools.count()
    return ReadWatch(lambda: next(ticks) * step)


def test_the_course_of_a_read_over_two_holders() -> None:
    watch = ticking()
    watch.looked_up(0.5, {1: ("alpha", "dram"), 2: ("beta", "ssd")}, 3, 2)
    watch.passed_over(1, [("shm", "on another host")])
    watch.attempt(1, "tcp")  # tick 0
    watch.failed("refused")  # tick 1
    watch.attempt(2, "tcp")  # tick 2
    watch.connected()  # tick 3
    watch.verified(0.0005)
    watch.verified(0.0005)
    watch.clock()  # tick 4
    watch.delivered(2, 4096)  # tick 5
    trace = watch.trace
    assert [(each.peer, each.transport, each.tried, each.outcome) for each in trace.tries] == [
        ("alpha", "shm", False, "on another host"),
        ("alpha", "tcp", True, "refused"),
        ("beta", "tcp", True, "delivered"),
    ]
    assert [each.seconds for each in trace.tries] == pytest.approx([0.0, 0.001, 0.003])
    assert (trace.source, trace.tier, trace.transport) == ("beta", "ssd", "tcp")
    assert trace.queue_seconds == pytest.approx(0.001)
    assert trace.verify_seconds == pytest.approx(0.001)
    assert trace.transfer_seconds == pytest.approx(0.001)
    assert (trace.copies_known, trace.copies_unreachable, trace.homes_asked) == (2, 3, 2)
    assert explanation(trace) == [
        "lookup    500.0 ms, 2 copies and 3 that cannot be reached; home peers asked: 2",
        "tried     alpha over shm: not tried, on another host",
        "tried     alpha over tcp: refused after 1.0 ms",
        "tried     beta over tcp: delivered after 3.0 ms",
        "tried     rdma: not tried, only peers read by it, for large gets, leases and copies",
        "source    beta, ssd, over tcp",
        "queue     1.0 ms until connected",
        "transfer  1.0 ms for 4.0 KiB (4.10 MB/s)",
        "verify    1.0 ms for the checksums",
    ]
    assert document(trace)["tries"][2]["peer"] == "beta"


def test_a_second_plan_adds_to_the_first() -> None:
    watch = ticking()
    watch.looked_up(0.1, {1: ("alpha", "dram")}, 0, 0)
    watch.attempt(1, "shm")
    watch.failed("gone")
    watch.looked_up(0.2, {2: ("beta", "dram")}, 0, 3)
    watch.attempt(2, "tcp")
    watch.delivered(2, 1)
    assert watch.trace.lookup_seconds == pytest.approx(0.3)
    assert (watch.trace.homes_asked, watch.trace.source) == (3, "beta")
    assert [each.peer for each in watch.trace.tries] == ["alpha", "beta"]
    assert watch.trace.verify_seconds is None


def test_several_holders_at_once() -> None:
    watch = ticking()
    watch.looked_up(0.1, {1: ("alpha", "dram"), 2: ("beta", "ssd"), 3: ("gamma", "dram")}, 0, 0)
    watch.attempt(1, "tcp")
    helpers = [watch.joined(member, "tcp") for member in (2, 3)]
    watch.left(helpers[1], "", 0)
    watch.left(helpers[0], "", 3 * MIB)
    watch.delivered(1, 4 * MIB, MIB, [2, 1])
    trace = watch.trace
    assert (trace.source, trace.tier, trace.length_bytes) == ("beta, alpha", "ssd", 4 * MIB)
    shown = explanation(trace)[1:5]
    assert [line.partition("after")[0] for line in shown[:3]] == [
        "tried     alpha over tcp: delivered ",
        "tried     beta over tcp: delivered ",
        "tried     gamma over tcp: not needed ",
    ]
    assert [line.rpartition(", ")[2] for line in shown[:2]] == ["1.0 MiB", "3.0 MiB"]


def test_what_the_first_failed_to_bring_others_did() -> None:
    watch = ticking()
    watch.looked_up(0.1, {1: ("alpha", "dram"), 2: ("beta", "ssd")}, 0, 0)
    watch.attempt(1, "tcp")
    helper = watch.joined(2, "tcp")
    watch.failed("gone")
    watch.left(helper, "", MIB)
    watch.delivered(1, MIB, 0, [2])
    assert [each.outcome for each in watch.trace.tries] == ["gone", "delivered"]
    assert watch.trace.source == "beta"


def test_what_the_local_peer_brought() -> None:
    watch = ticking()
    watch.looked_up(0.1, {1: ("alpha", "dram"), 2: ("beta", "ssd")}, 0, 0)
    watch.attempt(1, "rdma")
    watch.was_here("own", 4096, 0.5)
    watch.brought(2, "rdma", 4096)
    trace = watch.trace
    assert (trace.local, trace.source, trace.tier, trace.transport) == (*(False, "beta", "ssd", "rdma"),)
    lines = explanation(trace)
    assert lines[1] == "tried     beta over rdma: delivered after 1.0 ms"
    assert lines[2] == "source    beta, ssd, over rdma"
    assert document(trace)["not_tried"] == {}


def test_what_the_local_peer_had() -> None:
    watch = ticking()
    watch.was_here("me", 10, 0.002)
    assert watch.trace.local
    assert explanation(watch.trace) == [
        "lookup    in the local peer's memory; no peer was asked",
        "source    me, dram, over mapping",
        "transfer  2.0 ms for 10 B (0.01 MB/s)",
        "verify    in the same pass as the copy",
    ]


def test_an_interrupted_read_says_where_it_was() -> None:
    watch = ticking()
    watch.looked_up(0.0, {1: ("alpha\x1b", "dram")}, 0, 0)
    watch.attempt(1, "tcp")
    shown = explanation(watch.trace)
    assert r"tried     alpha\x1b over tcp: interrupted after 0.0 ms" in shown
    assert not [line for line in shown if line.startswith("source")]


def test_a_key_that_nobody_has() -> None:
    trace = FetchTrace(lookup_seconds=0.001, homes_asked=3)
    assert explanation(trace) == ["lookup    1.0 ms, 0 copies; home peers asked: 3"]


def test_progress_is_called_and_may_end_the_read() -> None:
    calls: list[tuple[int, int]] = []
    watch = ReadWatch(lambda: 0.0, lambda done, total: calls.append((done, total)))
    watch.advanced(5, 10)
    assert calls == [(5, 10)]

    def stop(done: int, total: int) -> None:
        raise PullFailed(Code.BUSY, "enough")

    with pytest.raises(PullFailed):
        ReadWatch(lambda: 0.0, stop).advanced(1, 2)


def test_a_destination_carries_its_watch_or_none() -> None:
    watch = ticking()
    assert watch_of(BufferDestination(bytearray(1), watch)) is watch
    assert watch_of(BufferDestination(bytearray(1))) is None
