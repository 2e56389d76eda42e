"""Fetching one object into this peer's memory: one fetch for all who want it, and every way it can fail."""

from typing import Any

import pytest

from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.operation import AskPeer, KnownCopy, Operation, PullObject, PullOutcome
from p2pstore.errors import CapacityExceeded, DeadlineExceeded, NoSuchKey, Unavailable
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.gossip.records import decode_location
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import Locations
from p2pstore.wire import Code
from tests.present import present
from tests.unit.core_harness import (
    NAMESPACE,
    OTHER_INCARNATION,
    Harness,
    RemoteObject,
    clock_at,
    digest_of,
    digests_asked,
    remote_object,
)


def fetch(world: Harness, key: str = "k", **options: Any) -> Operation:
    return world.core.operations.fetch(digest_of(key), world.now, **options)


def answer_lookups(world: Harness) -> None:
    """All homes know nothing."""
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[] for _ in digests_asked(ask)]))


def test_a_fetched_object_is_a_soft_copy_of_the_same_version() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    pull = world.pull_wanted()
    assert (pull.operation, pull.digest) == (operation.number, digest_of("k"))
    assert [copy.peer_id for copy in pull.copies] == [world.others[0].peer_id]
    entry = world.deliver(pull, thing)
    assert operation.result is entry is world.find("k")
    assert entry is not None
    assert (entry.version, entry.soft) == (thing.version, True)
    assert world.value("k") == b"value"
    record = present(world.announced("k"))
    assert record.soft
    assert world.finished() >= {operation.number}
    world.check_idle()


def test_replicas_and_pin_travel_with_the_object() -> None:
    world = Harness(others=1)
    thing = remote_object("k", b"value", replicas=3, pin=2)
    world.push(world.others[0], thing)
    fetch(world)
    entry = present(world.deliver(world.pull_wanted(), thing))
    assert (entry.replicas, entry.pin) == (3, 2)


def test_a_copy_ends_when_the_object_does() -> None:
    world = Harness(others=1)
    ends = int((world.core.unix(world.now) + 5.0) * 1000)
    thing = remote_object("k", b"value", expires_unix_ms=ends)
    world.push(world.others[0], thing)
    fetch(world)
    entry = present(world.deliver(world.pull_wanted(), thing))
    assert (entry.expires_unix_ms, world.find("k")) == (ends, entry)
    world.now += 5.0
    assert world.find("k") is None
    assert world.core.copies.own_location(digest_of("k"), world.now) is None


def test_a_copy_that_is_fetched_is_within_its_namespaces_quota() -> None:
    world = Harness(others=1, quotas={NAMESPACE: 64 * 1024})
    thing = world.hold(world.others[0], "k", b"value")
    fetch(world)
    world.deliver(world.pull_wanted(), thing)
    assert world.segment.quotas[NAMESPACE].kept_bytes == 4096


def test_the_version_that_arrived_raises_the_clock() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value", clock=clock_at(8.0))
    fetch(world)
    world.deliver(world.pull_wanted(), thing)
    assert world.stored("other", b"1").version.clock > clock_at(8.0)


def test_what_is_here_needs_no_pull() -> None:
    world = Harness()
    entry = world.stored("k", b"value")
    assert fetch(world).result is entry
    world.check_idle()


# --- one fetch for all -----------------------------------------------------------------------


def test_many_that_want_one_object_share_one_fetch() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    operations = [fetch(world) for _ in range(20)]
    assert len({id(operation) for operation in operations}) == 1
    entry = world.deliver(world.pull_wanted(), thing)
    assert all(operation.result is entry for operation in operations)
    assert fetch(world) is not operations[0], "a finished fetch is not joined"


def test_a_shared_fetch_goes_on_while_anybody_wants_it() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    assert fetch(world) is fetch(world) is operation
    pull = world.pull_wanted()
    world.core.operations.cancel(operation, world.now)
    world.core.operations.cancel(operation, world.now)
    assert not operation.done
    world.deliver(pull, thing)
    assert isinstance(operation.result, ObjectEntry)


def test_a_fetch_that_nobody_wants_any_more_ends() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    assert fetch(world) is fetch(world) is operation
    pull = world.pull_wanted()
    for _ in range(3):
        world.core.operations.cancel(operation, world.now)
    assert isinstance(operation.result, DeadlineExceeded)
    with pytest.raises(NoSuchKey):
        world.core.operations.copy_destination(pull.operation, world.now)
    world.fail(pull, Code.UNAVAILABLE)  # its outcome comes too late
    again = fetch(world)
    assert again is not operation
    assert world.pull_wanted().operation == again.number


def test_a_fetch_that_is_cancelled_while_it_looks_up_pulls_nothing() -> None:
    world = Harness(others=1)
    operation = fetch(world)
    world.core.operations.cancel(operation, world.now)
    (ask,) = world.asks(DataKind.LOOKUP)
    world.hold(world.others[0], "k", b"value")
    world.answer(ask, Locations([[]]))
    assert not world.effects(PullObject)
    world.check_idle()


def test_a_firm_copy_is_made_as_soon_as_one_wants_it() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    fetch(world)
    fetch(world, soft=False)
    fetch(world)
    entry = present(world.deliver(world.pull_wanted(), thing))
    assert not entry.soft


# --- holders that fail -----------------------------------------------------------------------


def test_reachable_holders_are_handed_over_best_first() -> None:
    world = Harness(others=4)
    old = world.hold(world.others[0], "k", b"old", clock=clock_at(-90.0))
    new = world.hold(world.others[1], "k", b"new", clock=clock_at(-30.0))
    world.push(world.others[2], new)
    world.die(world.others[2])
    fetch(world)
    copies = world.pull_wanted().copies
    assert [copy.record.version.clock for copy in copies] == [new.version.clock, old.version.clock]


def test_a_failed_holder_is_avoided_and_the_next_one_delivers() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    world.push(world.others[1], thing)
    operation = fetch(world)
    pull = world.pull_wanted()
    failed = pull.copies[0]
    world.deliver(pull, thing, HolderReport(failed.member, int(Code.UNAVAILABLE)))
    assert isinstance(operation.result, ObjectEntry)
    assert world.core.copies.known(digest_of("k"), world.now)[-1].member == failed.member
    assert [ask.peer_id for ask in world.effects(Ask)] == [failed.peer_id]


def test_who_is_too_slow_again_and_again_is_avoided_for_longer() -> None:
    world = Harness(others=2)
    slow, other = world.others
    world.push(other, world.hold(slow, "k", b"value"))

    def first() -> int:
        return world.core.copies.known(digest_of("k"), world.now)[0].member

    avoided: list[float] = []
    for _ in range(7):
        for _ in range(8):  # reads side by side
            failure = HolderReport(slow.member, int(Code.DEADLINE_EXCEEDED))
            world.core.holders.failed(digest_of("k"), failure, world.now)
        began = world.now
        while world.core.holders.is_avoided(slow.member, world.now):
            assert first() == other.member
            world.now += 0.5
        avoided.append(world.now - began)
    assert avoided == [3, 6, 12, 24, 48, 60, 60]
    assert world.core.counters["holders_too_slow"] == 56
    world.now += 61.0
    world.core.tick(world.now)
    assert not world.core.holders._slow


def test_a_holder_that_sent_wrong_bytes_is_not_taken_for_dead() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    fetch(world)
    world.deliver(world.pull_wanted(), thing, HolderReport(world.others[0].member, int(Code.STALE)))
    assert not world.effects(Ask)


def test_after_a_failed_round_others_are_looked_for_once() -> None:
    world = Harness(others=3)
    thing = world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    world.fail(world.pull_wanted(), Code.UNAVAILABLE)
    asks = world.asks(DataKind.LOOKUP)
    homes = set(world.core.homes(digest_of("k")))
    assert {ask.peer_id for ask in asks} == homes - {world.others[0].peer_id} != homes
    world.push(world.others[1], thing)
    world.answer(asks[0], Locations([[]]))
    pull = world.pull_wanted()
    assert [copy.peer_id for copy in pull.copies] == [world.others[1].peer_id]
    world.fail(pull, Code.UNAVAILABLE)
    assert isinstance(operation.result, Unavailable)
    assert "2 copies" in str(operation.result)
    assert not world.asks(DataKind.LOOKUP), "two rounds, no more"
    for ask in asks[1:]:
        world.answer(ask, Locations([[]]))
    world.check_idle()


def test_a_key_that_nobody_knows_does_not_exist() -> None:
    world = Harness(others=2)
    operation = fetch(world)
    answer_lookups(world)
    assert isinstance(operation.result, NoSuchKey)
    world.check_idle()


@pytest.mark.parametrize(
    ("second", "error"), [(Code.NO_SUCH_KEY, NoSuchKey), (Code.DEADLINE_EXCEEDED, Unavailable)]
)
def test_a_key_that_all_holders_have_lost_does_not_exist(second: Code, error: type[Exception]) -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    world.push(world.others[1], thing)
    operation = fetch(world)
    world.fail(world.pull_wanted(), Code.NO_SUCH_KEY, second)
    answer_lookups(world)
    assert isinstance(operation.result, error)
    known = world.core.copies.known(digest_of("k"), world.now)
    assert (known == []) == (error is NoSuchKey), "who denies it is believed"


def test_a_location_that_was_denied_counts_again_when_its_owner_has_moved_on() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    fetch(world)
    world.fail(world.pull_wanted(), Code.NO_SUCH_KEY)
    world.others[0].sequence = 1000
    world.push(world.others[0], thing)
    assert len(world.core.copies.known(digest_of("k"), world.now)) == 1


def test_a_client_s_report_counts_like_a_failure_of_one_s_own() -> None:

    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value")
    failure = HolderReport(
        world.others[0].member, int(Code.NO_SUCH_KEY), "", "", OTHER_INCARNATION, 1000
    )
    world.core.holders.failed(digest_of("k"), failure, world.now)
    assert world.core.copies.known(digest_of("k"), world.now) == []


def test_a_holder_that_cannot_give_it_now_is_quoted() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    failure = HolderReport(world.others[0].member, int(Code.BUSY), "its memory is full of pins")
    pull = world.pull_wanted()
    world.core.operations.pulled(pull.operation, PullOutcome(False, (failure,)), world.now)
    answer_lookups(world)
    assert isinstance(operation.result, Unavailable)
    assert "its memory is full of pins" in str(operation.result)


def test_copies_of_the_dead_are_unavailable() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value")
    world.die(world.others[0])
    operation = fetch(world)
    answer_lookups(world)
    assert isinstance(operation.result, Unavailable)
    assert "1 copy is" in str(operation.result)


def test_no_room_here_is_no_holder_s_fault() -> None:
    world = Harness(others=1, memory_bytes=64 * 1024)
    world.stored("pinned", bytes(50_000), pin=2)
    thing = world.hold(world.others[0], "k", bytes(30_000))
    operation = fetch(world)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(CapacityExceeded) as caught:
        destination.prepare(thing.slot, thing.trailer)
    world.fail(pull, Code.STALE, error=caught.value)
    assert operation.result is caught.value
    assert not world.asks(DataKind.LOOKUP), "another holder would not help"
    world.check_idle()


# --- what may arrive -------------------------------------------------------------------------


def begin(world: Harness) -> PullObject:
    world.hold(world.others[0], "k", b"value")
    fetch(world)
    return world.pull_wanted()


def arriving() -> tuple[Harness, PullObject, RemoteObject, CopyDestination]:
    world = Harness(others=1)
    pull = begin(world)
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    return world, pull, remote_object("k", b"value"), destination


def test_a_version_that_is_too_old_is_refused_on_arrival() -> None:
    world = Harness(others=3)
    old = remote_object("k", b"value", clock=clock_at(-90.0))
    record = decode_location(world.location(remote_object("k", b"new", clock=clock_at(-20.0))))
    other = world.others[0]
    operation = FetchOperation(
        world.core,
        digest_of("k"),
        source=KnownCopy(other.member, other.peer_id, record, reachable=True),
        minimum=record.version,
    )
    world.start(operation)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey, match="older version"):
        destination.prepare(old.slot, old.trailer)
    world.fail(pull, Code.STALE)
    assert isinstance(operation.result, Unavailable)
    (doubt,) = world.effects(AskPeer)
    assert doubt.kind == DataKind.CHECK_COPY, "with a source, nobody else is asked"
    world.check_idle()


def test_a_trailer_of_another_key_is_refused() -> None:
    world = Harness(others=1)
    pull = begin(world)
    thing, other = remote_object("k", b"value"), remote_object("other", b"value")
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey, match="another key"):
        destination.prepare(thing.slot, other.trailer)


def test_what_was_removed_before_it_arrives_is_refused() -> None:
    world = Harness(others=1)
    pull = begin(world)
    thing = remote_object("k", b"value")
    world.learn_floor(world.others[0], digest_of("k"), thing.version)
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey, match="removed"):
        destination.prepare(thing.slot, thing.trailer)


def test_what_is_removed_while_it_arrives_is_not_published() -> None:
    world, pull, thing, destination = arriving()
    destination.prepare(thing.slot, thing.trailer)[:] = thing.value
    world.learn_floor(world.others[0], digest_of("k"), thing.version)
    assert destination.commit(world.now) is None
    assert world.find("k") is None
    world.core.operations.pulled(pull.operation, PullOutcome(True), world.now)
    world.check_idle()


def test_delivered_and_gone_again_is_no_such_key() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    operation = fetch(world)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    destination.prepare(thing.slot, thing.trailer)[:] = thing.value
    destination.commit(world.now)
    world.learn_floor(world.others[0], digest_of("k"), thing.version)
    world.core.operations.pulled(pull.operation, PullOutcome(True), world.now)
    assert isinstance(operation.result, NoSuchKey)
    assert "removed" in str(operation.result)


def test_a_second_holder_of_the_version_goes_on_in_the_same_room() -> None:
    world, _, thing, destination = arriving()
    first = destination.prepare(thing.slot, thing.trailer)
    first[:2] = b"va"
    used = world.segment.used_bytes
    second = destination.prepare(thing.slot, thing.trailer)
    assert address_of(second) == address_of(first)
    assert bytes(second[:2]) == b"va"
    assert world.segment.used_bytes == used
    second[2:] = thing.value[2:]
    assert destination.commit(world.now) is world.find("k")
    assert world.value("k") == b"value"


def test_room_of_a_version_that_is_refused_meanwhile_is_given_back() -> None:
    world, _, thing, destination = arriving()
    destination.prepare(thing.slot, thing.trailer)
    world.learn_floor(world.others[0], digest_of("k"), thing.version)
    with pytest.raises(NoSuchKey, match="removed"):
        destination.prepare(thing.slot, thing.trailer)
    assert world.segment.used_bytes == 0


def test_a_second_holder_of_another_version_starts_over_with_fresh_room() -> None:
    world = Harness(others=1)
    pull = begin(world)
    old = remote_object("k", b"older", clock=clock_at(-1.0))
    thing = remote_object("k", b"value")
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    destination.prepare(old.slot, old.trailer)[:2] = b"xx"
    used = world.segment.used_bytes
    destination.prepare(thing.slot, thing.trailer)[:] = thing.value
    assert world.segment.used_bytes == used, "the first room was given back"
    assert destination.commit(world.now) is world.find("k")
    destination.abort()  # after a commit there is nothing to give back
    assert world.value("k") == b"value"


def test_an_aborted_arrival_gives_its_room_back() -> None:
    world, _, thing, destination = arriving()
    destination.prepare(thing.slot, thing.trailer)
    destination.abort()
    destination.abort()
    assert world.segment.used_bytes == 0
    with pytest.raises(RuntimeError):
        destination.commit(world.now)


def test_a_newer_version_that_was_put_meanwhile_stays() -> None:
    world, pull, thing, destination = arriving()
    destination.prepare(thing.slot, thing.trailer)[:] = thing.value
    mine = world.stored("k", b"newer", overwrite=True)
    assert destination.commit(world.now) is mine
    assert world.value("k") == b"newer"
    world.core.operations.pulled(pull.operation, PullOutcome(True), world.now)
    world.check_idle()


def test_an_older_version_here_is_replaced_by_what_arrives() -> None:
    world = Harness(others=1)
    pull = begin(world)
    newer = remote_object("k", b"newer", clock=clock_at(5.0))
    world.stored("k", b"older", overwrite=True)
    present(world.deliver(pull, newer))
    assert world.value("k") == b"newer"
    record = present(world.announced("k"))
    assert record.version == newer.version
    world.check_idle()


def test_a_newer_version_that_gossip_told_of_meanwhile_drops_what_arrived() -> None:
    world = Harness(others=2)
    pull = begin(world)
    thing = remote_object("k", b"value")
    world.push(world.others[1], remote_object("k", b"newer", clock=clock_at(1.0)))
    world.core.gossip_arrived(world.now)  # nothing is here yet
    world.deliver(pull, thing)
    world.core.gossip_arrived(world.now)
    assert world.find("k") is None


def test_a_version_from_the_future_is_refused() -> None:
    """Its clock would make every version that this peer writes one from the future, too."""
    world = Harness(others=1)
    pull = begin(world)
    thing = remote_object("k", b"value", clock=clock_at(30.0))
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey, match="future"):
        destination.prepare(thing.slot, thing.trailer)
    assert world.core.clock.latest < clock_at(1.0)
    world.fail(pull, Code.STALE)


def test_bringing_something_here_evicts_and_says_so_first() -> None:
    world = Harness(others=1, memory_bytes=64 * 1024)
    world.stored("old", bytes(50_000))
    thing = world.hold(world.others[0], "k", bytes(30_000))
    fetch(world)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    view = destination.prepare(thing.slot, thing.trailer)
    assert world.announced("old") is None, "withdrawn before a byte of it is overwritten"
    view[:] = thing.value
    assert destination.commit(world.now) is not None
