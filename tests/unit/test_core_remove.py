"""Removing: floors above the newest version, told to whom they concern; and what floors then forbid."""

import pytest

from p2pstore.core import remove as removing
from p2pstore.core.operation import AskPeer, SaveClusterRecord
from p2pstore.core.remove import RemoveOperation
from p2pstore.errors import CapacityExceeded, NoSuchKey, ProtocolError
from p2pstore.gossip.gossip_messages import ControlKind, Delta
from p2pstore.gossip.records import SCOPE_NAMESPACE, SignedRecord, keys_of_floor, open_cluster_record
from p2pstore.home_messages import Holding
from p2pstore.objects import Version, namespace_digest
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ClusterRecords, Locations, Replicate
from p2pstore.wire import Empty
from simulation.signer import SimulatedVerifier
from tests.unit.core_harness import (
    NAMESPACE,
    OTHER_INCARNATION,
    Harness,
    clock_at,
    digest_of,
    digests_asked,
    remote_object,
)


def remove(world: Harness, *keys: str) -> RemoveOperation:
    operation = RemoveOperation(world.core, NAMESPACE, list(keys))
    world.start(operation)
    return operation


def answer_lookups(world: Harness) -> None:
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[] for _ in digests_asked(ask)]))


def bodies_in(ask: AskPeer) -> list[bytes]:
    """The records in a push."""
    assert isinstance(ask.request, ClusterRecords)
    return ask.request.bodies


def floors_in(ask: AskPeer) -> dict[bytes, Version]:
    """The keys that a push forbids, and up to which version."""
    request = ask.request
    assert isinstance(request, ClusterRecords)
    records = [
        open_cluster_record(SignedRecord(body, signature), SimulatedVerifier())
        for body, signature in zip(request.bodies, request.signatures, strict=True)
    ]
    return {digest: record.version for record in records for digest in keys_of_floor(record)}


def finish_pushes(world: Harness) -> list[AskPeer]:
    asks = world.asks(DataKind.CLUSTER_RECORDS)
    for ask in asks:
        world.answer(ask, Empty())
    return asks


def test_removing_writes_a_floor_above_the_newest_version_and_drops_the_copy_here() -> None:
    world = Harness()
    entry = world.stored("k", b"value")
    assert remove(world, "k").result == [True]
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert floor.covers(entry.version)
    assert floor.clock > entry.version.clock
    assert floor.writer == world.writer
    assert world.find("k") is None
    assert world.announced("k") is None
    assert [effect.signed for effect in world.effects(SaveClusterRecord)], "it must survive"
    assert world.core.counters["objects_removed"] == 1
    world.check_idle()


@pytest.mark.parametrize("ahead_seconds", [-60.0, 9.0])
def test_the_floor_is_above_the_newest_of_all_known_copies(ahead_seconds: float) -> None:
    world = Harness(others=3)
    world.hold(world.others[0], "k", b"old", clock=clock_at(-70.0))
    newest = world.hold(world.others[1], "k", b"new", clock=clock_at(ahead_seconds), writer=0xFFFF)
    remove(world, "k")
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert floor.clock > newest.version.clock
    assert world.core.copies.known(digest_of("k"), world.now) == []


def test_what_is_doubted_now_is_forbidden_as_well() -> None:
    """A peer that has just come back believes no other yet: an object removed by it must not return a minute later."""
    world = Harness(others=2)
    doubted = world.hold(world.others[0], "k", b"value", clock=clock_at(-70.0))
    gossip, member = world.gossip, world.others[0].member
    gossip.cluster_records.floors.raise_horizon({member: clock_at(-60.0)})
    gossip.floors.came(member, world.now)
    assert not world.core.copies.known(digest_of("k"), world.now)
    operation = remove(world, "k")
    answer_lookups(world)
    finish_pushes(world)
    assert operation.result == [True]
    assert gossip.cluster_records.floors.floor_for(digest_of("k")).covers(doubted.version)
    again = remove(world, "k")
    answer_lookups(world)
    assert again.result == [False], "it is forbidden already"


def test_what_only_a_peer_holds_that_is_not_known_yet_is_forbidden() -> None:
    """A peer that has just begun has not heard of every member: the copies of those would be seen a moment later."""
    world = Harness(others=2)
    thing = remote_object("k", b"value", clock=clock_at(-5.0))
    operation = remove(world, "k")
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[Holding(77, OTHER_INCARNATION, 1, world.location(thing))]]))
    finish_pushes(world)
    assert operation.result == [True]
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert floor.covers(thing.version)


@pytest.mark.parametrize("answer", ["sure", "unsure", "silent"])
def test_unless_a_home_vouches_that_it_is_nowhere_a_key_may_be_somewhere(answer: str) -> None:
    world = Harness(others=2)
    operation = remove(world, "k")
    asks = world.asks(DataKind.LOOKUP)
    assert len(asks) == 2
    for ask in asks:
        unsure = [0] if answer == "unsure" else []
        world.answer(ask, None if answer == "silent" else Locations([[]], unsure))
    finish_pushes(world)
    assert operation.result == [False]
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert floor.covers(Version(clock_at(0.0), 0)) == (answer != "sure")


@pytest.mark.parametrize("alone", [False, True])
def test_a_peer_that_waits_for_others_cannot_tell_that_a_key_is_nowhere(alone: bool) -> None:
    world = Harness()
    if not alone:
        world.gossip.contacts.add(["10.0.0.1:1"])
    assert remove(world, "k").result == [False]
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert floor.covers(Version(clock_at(0.0), 0)) == (not alone)


def test_holders_and_homes_are_told_at_once_and_others_are_not() -> None:
    world = Harness(others=8)
    homes = set(world.core.homes(digest_of("k")))
    holders = [other for other in world.others if other.peer_id not in homes][:2]
    thing = world.hold(holders[0], "k", b"value")
    world.push(holders[1], thing)
    world.die(holders[1])
    operation = remove(world, "k")
    asks = world.asks(DataKind.CLUSTER_RECORDS)
    concerned = homes | {holders[0].peer_id}
    assert {ask.peer_id for ask in asks} == concerned
    assert len(asks) == len(concerned)
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert all(floors_in(ask) == {digest_of("k"): floor} for ask in asks)
    for ask in asks[:-1]:
        world.answer(ask, Empty())
    assert not operation.done
    world.answer(asks[-1], None)  # it will hear by gossip
    assert operation.result == [True]
    world.check_idle()


def test_each_key_s_floor_goes_to_its_own_peers_in_one_message_each() -> None:
    world = Harness(others=6)
    keys = [f"k{number}" for number in range(10)]
    for key in keys:
        world.stored(key, b"value")
    operation = remove(world, *keys)
    asks = finish_pushes(world)
    assert len({ask.peer_id for ask in asks}) == len(asks)
    for key in keys:
        told = {ask.peer_id for ask in asks if digest_of(key) in floors_in(ask)}
        assert told == set(world.core.homes(digest_of(key)))
    assert operation.result == [True] * 10
    assert world.segment.object_count == 0


def test_the_result_tells_which_existed_and_what_did_not_gets_no_floor() -> None:
    world = Harness(others=2)
    world.stored("here", b"1")
    world.hold(world.others[0], "there", b"2")
    world.hold(world.others[1], "held by the dead", b"3")
    world.others.reverse()
    world.die(world.others[0])
    operation = remove(world, "absent", "here", "there", "held by the dead")
    answer_lookups(world)
    finish_pushes(world)
    assert operation.result == [False, True, True, True]
    records = world.gossip.cluster_records
    assert not records.floors.floor_for(digest_of("absent")).clock
    assert records.floors.floor_for(digest_of("held by the dead")).clock, "it must not come back with it"


def test_a_copy_that_only_a_home_knows_is_removed_too() -> None:
    world = Harness(others=3)
    operation = remove(world, "k")
    thing = remote_object("k", b"value")
    first, *_ = world.asks(DataKind.LOOKUP)

    holder = world.others[0]
    world.answer(first, Locations([[Holding(holder.member, 7, 1, world.location(thing))]]))
    assert holder.peer_id in {ask.peer_id for ask in finish_pushes(world)}
    assert operation.result == [True]


def test_removing_nothing_ends_at_once() -> None:
    world = Harness(others=2)
    assert remove(world).result == []


def test_cancelling_leaves_what_was_written() -> None:
    world = Harness(others=3)
    world.stored("k", b"value")
    operation = remove(world, "k")
    world.core.operations.cancel(operation, world.now)
    assert operation.done
    assert world.find("k") is None
    finish_pushes(world)
    world.check_idle()


def test_cancelling_while_it_looks_up_writes_nothing() -> None:
    world = Harness(others=3)
    operation = remove(world, "k")
    world.core.operations.cancel(operation, world.now)
    world.hold(world.others[0], "k", b"value")
    answer_lookups(world)
    assert not len(world.gossip.cluster_records)
    assert not world.asks(DataKind.CLUSTER_RECORDS)
    world.check_idle()


def test_a_later_put_is_above_the_floor() -> None:
    world = Harness(others=1)
    world.stored("k", b"value")
    remove(world, "k")
    operation = world.put("k", b"value")
    assert operation.result.status == PutStatus.CREATED
    assert world.value("k") == b"value"
    floor = world.gossip.cluster_records.floors.floor_for(digest_of("k"))
    assert not floor.covers(operation.result.version)


# --- what a floor forbids --------------------------------------------------------------------


def test_a_floor_from_elsewhere_drops_what_it_covers() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    other = world.stored("other", b"value")
    world.learn_floor(world.others[0], digest_of("k"), entry.version)
    assert world.find("k") is None
    assert world.announced("k") is None
    assert world.find("other") is other
    assert len(world.effects(SaveClusterRecord)) == 1


def test_a_floor_below_a_version_leaves_it() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    version = entry.version
    world.learn_floor(world.others[0], digest_of("k"), Version(version.clock - 1, 0xFFFF))
    world.learn_floor(world.others[0], digest_of("k"), Version(version.clock, version.writer - 1))
    assert world.find("k") is entry


def test_a_floor_by_gossip_does_the_same() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    signed = world.floor_from(world.others[0], digest_of("k"), entry.version)
    world.gossip.serve(
        world.others[0].peer_id, ControlKind.DELTA, Delta([], [], [signed], []), world.now
    )
    world.core.gossip_arrived(world.now)
    assert world.find("k") is None
    assert [effect.signed for effect in world.effects(SaveClusterRecord)] == [signed]


def test_a_lower_floor_after_a_higher_one_changes_nothing() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    world.learn_floor(world.others[0], digest_of("k"), entry.version)
    world.learn_floor(world.others[0], digest_of("k"), Version(entry.version.clock - 5, 1))
    assert world.gossip.cluster_records.floors.floor_for(digest_of("k")) == Version(
        entry.version.clock, entry.version.writer
    )


def test_a_floor_from_the_future_is_refused() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    latest = world.core.clock.latest
    with pytest.raises(ProtocolError, match="clocks"):
        world.learn_floor(world.others[0], digest_of("k"), Version(clock_at(10.5), 1))
    assert world.find("k") is entry
    assert world.core.clock.latest == latest
    assert not len(world.gossip.cluster_records)


def test_a_copy_from_the_future_does_not_spoil_this_peer_s_clock() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value", clock=clock_at(3600.0))
    operation = remove(world, "k")
    answer_lookups(world)
    finish_pushes(world)
    assert operation.result == [False]
    assert world.stored("other", b"1").version.clock < clock_at(1.0)


def test_a_floor_with_a_wrong_signature_is_refused() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    signed = world.floor_from(world.others[0], digest_of("k"), entry.version)
    with pytest.raises(ProtocolError, match="signature"):
        world.serve(
            world.others[0], DataKind.CLUSTER_RECORDS, ClusterRecords([signed.body], [bytes(64)])
        )
    assert world.find("k") is entry


def test_a_removed_version_is_refused_by_a_pull_a_replica_and_a_push() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    world.learn_floor(world.others[1], digest_of("k"), thing.version)
    version = thing.version
    world.core.proofs.believe(digest_of("k"), version)
    operation = world.serve(
        world.others[0],
        DataKind.REPLICATE,
        Replicate(digest_of("k"), version.clock, version.writer, 5, root=version.root),
    )
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey):
        destination.prepare(thing.slot, thing.trailer)
    world.core.operations.cancel(operation, world.now)
    world.push(world.others[0], thing)
    assert world.core.copies.known(digest_of("k"), world.now) == []
    world.check_idle()


# --- namespaces ------------------------------------------------------------------------------


def test_a_namespace_s_floor_drops_all_its_keys_and_no_others() -> None:
    world = Harness(others=1)
    for key in ("a", "b"):
        world.stored(key, b"value")
    elsewhere = world.put("a", b"value", namespace="elsewhere")
    floor = world.core.version_above(Version(0, 0), world.now)
    later = world.stored("later", b"value")
    world.learn_floor(world.others[0], namespace_digest(NAMESPACE), floor, SCOPE_NAMESPACE)
    assert [entry.digest for entry in world.segment.entries()] == [elsewhere.digest, later.digest]
    assert world.announced("a") is None
    world.check_idle()


def test_a_namespace_s_floor_refuses_older_arrivals() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    world.learn_floor(world.others[0], namespace_digest(NAMESPACE), thing.version, SCOPE_NAMESPACE)
    world.core.operations.fetch(digest_of("k"), world.now)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    with pytest.raises(NoSuchKey):
        destination.prepare(thing.slot, thing.trailer)


# --- newer versions of what is here ----------------------------------------------------------


@pytest.mark.parametrize(("later", "writer_above"), [(1, -1), (0, 1)], ids=["clock", "writer"])
def test_a_newer_version_elsewhere_drops_the_older_one_here(later: int, writer_above: int) -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    clock, writer = entry.version.clock + later, entry.version.writer + writer_above
    world.hold(world.others[0], "k", b"newer", clock=clock, writer=writer)
    assert world.find("k") is entry
    world.core.gossip_arrived(world.now)
    assert world.find("k") is None
    assert world.announced("k") is None


def test_an_equal_or_older_version_elsewhere_drops_nothing() -> None:
    world = Harness(others=2)
    entry = world.stored("k", b"value")
    clock, writer = entry.version.clock, entry.version.writer
    world.hold(world.others[0], "k", b"older", clock=clock, writer=writer - 1)
    world.hold(world.others[1], "k", b"value", clock=clock, writer=writer)
    world.core.gossip_arrived(world.now)
    assert world.find("k") is entry


# --- what is evicted -------------------------------------------------------------------------


def test_an_evicted_object_is_withdrawn_before_its_memory_is_written() -> None:
    world = Harness(memory_bytes=64 * 1024)
    world.stored("k", bytes(50_000))
    reservation = world.segment.reserve(50_000, 100, session="x", now=world.core.unix(world.now))
    world.core.objects.announce_withdrawn(world.now)
    assert world.announced("k") is None
    assert world.core.counters["objects_withdrawn"] == 1
    assert world.core.counters["gone_last_copy"] == 1
    world.segment.abort(reservation.number, session="x")
    world.core.objects.announce_withdrawn(world.now)
    assert world.core.counters["objects_withdrawn"] == 1
    world.check_idle()


@pytest.mark.parametrize(("holder_leaves", "why"), [(False, "soft_copy"), (True, "last_copy")])
def test_a_soft_copy_that_was_the_last_one_counts_as_such(holder_leaves: bool, why: str) -> None:
    world = Harness(others=2, memory_bytes=64 * 1024)
    thing = world.hold(world.others[0], "k", bytes(50_000))
    world.core.operations.fetch(digest_of("k"), world.now)
    world.deliver(world.pull_wanted(), thing)
    if holder_leaves:
        world.push(world.others[0], thing, removed=True)
    world.segment.reserve(50_000, 100, session="x", now=world.core.unix(world.now))
    world.core.objects.announce_withdrawn(world.now)
    assert world.core.counters[f"gone_{why}"] == 1
    assert world.core.counters["last_copies_dropped"] == holder_leaves


def test_a_withdrawal_of_an_old_version_leaves_the_new_one_announced() -> None:
    world = Harness()
    world.stored("k", b"old")
    new = world.put("k", b"new", overwrite=True).result.version
    record = world.announced("k")
    assert record is not None
    assert record.version == new
    assert not world.segment.objects.take_withdrawn(), "announced with the put, not some time later"


def known_keys(world: Harness, count: int) -> list[str]:
    keys = [f"k{number}" for number in range(count)]
    for key in keys:
        world.hold(world.others[0], key, b"value")
    return keys


def test_many_keys_are_removed_in_steps_with_one_signature_for_64() -> None:
    world = Harness(others=1)
    world.offer(world.others[0], floors_end=1)
    keys = known_keys(world, 150)
    operation = remove(world, *keys)
    assert len(world.effects(SaveClusterRecord)) == 1, "one step: others want the loop, too"
    world.pass_time(0.01)
    world.pass_time(0.01)
    assert len(world.effects(SaveClusterRecord)) == 2, "two more"
    (push,) = finish_pushes(world)
    assert floors_in(push).keys() == {digest_of(key) for key in keys}
    assert len(bodies_in(push)) == 3
    assert operation.result == [True] * 150
    world.check_idle()


def test_pushes_are_no_larger_than_their_receiver_takes_in_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removing, "KEYS_PER_PUSH", 128)
    world = Harness(others=1)
    world.offer(world.others[0], floors_end=1)
    operation = remove(world, *known_keys(world, 300))
    for _ in range(5):
        world.pass_time(0.01)
    assert [len(floors_in(ask)) for ask in finish_pushes(world)] == [128, 128, 44]
    assert operation.result == [True] * 300


@pytest.mark.parametrize("good", [0, 600])
def test_a_key_that_is_none_ends_the_removal_of_all(good: int) -> None:
    world = Harness()
    operation = remove(world, *[f"k{number}" for number in range(good)], "")
    world.pass_time(0.1)
    assert isinstance(operation.result, ValueError)
    world.check_idle()


def test_an_older_peer_is_told_of_each_key_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removing, "RECORDS_PER_PUSH", 4)
    world = Harness(others=2)
    world.offer(world.others[1], floors_end=1)
    keys = known_keys(world, 10)
    operation = remove(world, *keys)
    answer_lookups(world)
    world.pass_time(0.01)
    told = [ask for ask in finish_pushes(world) if ask.peer_id == world.others[0].peer_id]
    assert [len(bodies_in(ask)) for ask in told] == [4, 4, 2]
    assert {name for ask in told for name in floors_in(ask)} == {digest_of(key) for key in keys}
    assert operation.result == [True] * 10


def test_cancelling_a_removal_of_many_keys_leaves_the_rest() -> None:
    world = Harness(others=1)
    world.offer(world.others[0], floors_end=1)
    operation = remove(world, *known_keys(world, 200))
    removed = world.gossip.cluster_records.floors.count
    assert 0 < removed < 200, "the first steps"
    world.core.operations.cancel(operation, world.now)
    world.pass_time(0.1)
    assert world.gossip.cluster_records.floors.count == removed
    world.check_idle()


# --- too many removals -----------------------------------------------------------------------


def test_crowded_floors_slow_removals_down_and_then_end_them_with_an_error() -> None:
    world = Harness(others=1)
    world.offer(world.others[0], floors_end=1)
    world.gossip.cluster_records.floors.limit = 100
    operation = remove(world, *known_keys(world, 120))
    begun = world.now
    while not operation.done:
        world.pass_time(0.1)
        finish_pushes(world)
    floors = world.gossip.cluster_records.floors
    assert 80 <= floors.count < 100, "what was made before, and some one by one"
    assert world.now < begun + 5.0, "clients wait for ten seconds, however many keys they name"
    (note,) = world.notes("floors")
    assert "removals are slowed down" in note
    assert world.core.counters["removals_slowed"]
    assert isinstance(operation.result, CapacityExceeded)
    assert "until all living" in str(operation.result)
    assert floors.count <= 100, "the limit holds"
    floors.limit = floors.count
    put = world.put("other", b"value", overwrite=True)
    assert not put.done, "an overwrite writes a floor, and waits as a removal does"
    world.pass_time(4.2)
    assert isinstance(put.result, CapacityExceeded)
    assert world.put("third", b"value").done, "a new key needs none"
    world.check_idle()


def test_removals_go_on_when_floors_have_gone() -> None:
    world = Harness(others=1)
    world.offer(world.others[0], floors_end=1)
    floors = world.gossip.cluster_records.floors
    floors.limit = 100
    operation = remove(world, *known_keys(world, 95))
    world.pass_time(0.5)
    assert not operation.done
    floors.raise_horizon({world.core.member: world.core.clock.latest})
    while floors.purging:
        world.gossip.cluster_records.purge()
    for _ in range(60):
        world.pass_time(0.1)
        finish_pushes(world)
    assert operation.result == [True] * 95
