"""Reads that their holder did not see, and what it makes of being told."""

from __future__ import annotations

import pytest

from p2pstore.core.core_effects import PullOutcome
from p2pstore.core.gets import reads as read_reports
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.reads import ANSWER_SECONDS, REPORT_SECONDS
from p2pstore.errors import ProtocolError
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_READ_COUNTS, ReadCount, Reads, ReadsTaken
from tests.unit.core_harness import Harness, digest_of


def told(world: Harness) -> dict[bytes, dict[bytes, int]]:
    """The reports since the last call: read counts by member and object."""
    found: dict[bytes, dict[bytes, int]] = {}
    for ask in world.asks(DataKind.READS):
        assert isinstance(ask.request, Reads)
        assert ask.timeout_seconds == ANSWER_SECONDS
        counts = found.setdefault(ask.peer_id, {})
        counts |= {item.digest: item.count for item in ask.request.items}
    return found


def test_reads_are_told_to_their_holders_together_and_once() -> None:
    world = Harness(others=2)
    first, second = world.others
    reports = world.core.read_reports
    for _ in range(3):
        reports.note(first.member, digest_of("a"), 1, world.now)
    reports.note(first.member, digest_of("b"), 5, world.now)
    reports.note(second.member, digest_of("a"), -1, world.now)
    reports.note(12345, digest_of("a"), 1, world.now)  # no member
    world.pass_time(REPORT_SECONDS / 2)
    assert told(world) == {}
    world.pass_time(REPORT_SECONDS)
    assert told(world) == {
        first.peer_id: {digest_of("a"): 3, digest_of("b"): 5},
        second.peer_id: {digest_of("a"): 0},
    }
    world.pass_time(10 * REPORT_SECONDS)
    assert told(world) == {}


def test_what_is_read_elsewhere_stays_there_when_room_is_made() -> None:
    world = Harness(others=1)
    value = bytes(20_000)
    keys = [f"k{number}" for number in range(12)]
    for key in keys:
        world.stored(key, value)
        world.pass_time(1.0)
    items = [ReadCount(digest_of(keys[0]), 2), ReadCount(digest_of("absent"))]
    assert isinstance(world.serve(world.others[0], DataKind.READS, Reads(items)), ReadsTaken)
    world.stored("new", value)
    assert world.find(keys[0]) is not None
    assert world.find(keys[1]) is None


def test_a_pull_that_its_holder_did_not_see_is_told_and_others_are_not() -> None:
    world = Harness(others=1)
    holder = world.others[0]
    for key, transport in (("shm", "shm"), ("rdma", "rdma"), ("tcp", "tcp")):
        thing = world.hold(holder, key, b"value")
        world.start(FetchOperation(world.core, digest_of(key)))
        pull = world.pull_wanted()
        destination = world.core.operations.copy_destination(pull.operation, world.now)
        destination.prepare(thing.slot, thing.trailer)[:] = thing.value
        destination.commit(world.now)
        outcome = PullOutcome(True, source=holder.member, transport=transport)
        world.core.operations.pulled(pull.operation, outcome, world.now)
    world.pass_time(2 * REPORT_SECONDS)
    assert told(world) == {holder.peer_id: {digest_of("shm"): 1, digest_of("rdma"): 1}}


def test_reports_are_bounded_and_those_who_do_not_answer_get_none() -> None:
    world = Harness(others=2)
    first, second = world.others
    reports = world.core.read_reports
    for number in range(read_reports.MAX_NOTED + 10):
        reports.note(first.member, number.to_bytes(16, "little"), 1, world.now)
    reports.note(second.member, digest_of("a"), 1, world.now)
    world.core.holders.peer_failed(second.peer_id, world.now)
    world.pass_time(REPORT_SECONDS)
    asks = world.asks(DataKind.READS)
    assert {ask.peer_id for ask in asks} == {first.peer_id}
    assert [len(ask.request.items) for ask in asks if isinstance(ask.request, Reads)] == (
        [MAX_READ_COUNTS] * (read_reports.MAX_NOTED // MAX_READ_COUNTS)
    )
    too_many = [ReadCount(digest_of("a"))] * (MAX_READ_COUNTS + 1)
    with pytest.raises(ProtocolError):
        world.serve(first, DataKind.READS, Reads(too_many))
