"""Making copies on other peers, from the side of the peer that asks."""

from typing import Any

import pytest

from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.operation import AskPeer, PutEnd
from p2pstore.errors import CapacityExceeded, DeadlineExceeded
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.gossip.records import SignedRecord, open_peer_record
from p2pstore.objects import Version
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Replicate, Replicated
from p2pstore.wire import Code, Failure
from simulation.signer import SimulatedVerifier
from tests.unit.core_harness import Harness, digest_of, remote_object


def replicate(world: Harness, key: str, wanted: int) -> ReplicateOperation:
    entry = world.find(key)
    assert entry is not None
    operation = ReplicateOperation(world.core, entry, wanted)
    world.start(operation)
    return operation


def asks_of(world: Harness) -> list[AskPeer]:
    return world.asks(DataKind.REPLICATE)


DONE = Replicated(1, 1)
FULL = Failure(int(Code.CAPACITY_EXCEEDED), "no room")


def test_targets_are_asked_in_rendezvous_order_with_all_they_need() -> None:
    world = Harness(others=5)
    entry = world.stored("k", b"value")
    operation = replicate(world, "k", 3)
    asks = asks_of(world)
    assert [ask.peer_id for ask in asks] == world.core.gossip.rank(digest_of("k"))[:2]
    for ask in asks:
        request = ask.request
        assert isinstance(request, Replicate)
        assert (request.digest, request.length, request.soft) == (entry.digest, 5, False)
        assert (request.clock, request.writer) == (entry.version.clock, entry.version.writer)
        me = SignedRecord(request.record_body, request.record_signature)
        assert open_peer_record(me, SimulatedVerifier()).peer_id == world.core.peer_id
    for ask in asks:
        assert not operation.done
        world.answer(ask, DONE)
    assert operation.result == 3
    world.check_idle()


def test_a_peer_that_offers_no_memory_is_not_asked() -> None:
    world = Harness(others=3)
    world.stored("k", b"value")
    first, second, third = map(world.other, world.core.gossip.rank(digest_of("k")))
    world.offer(second, memory_capacity=0)
    operation = replicate(world, "k", 4)
    asks = asks_of(world)
    assert [ask.peer_id for ask in asks] == [first.peer_id, third.peer_id]
    for ask in asks:
        world.answer(ask, DONE)
    assert operation.result == 3


def test_one_copy_is_the_one_that_is_here() -> None:
    world = Harness(others=3)
    world.stored("k", b"value")
    assert replicate(world, "k", 1).result == 1
    assert not asks_of(world)
    world.check_idle()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_with_too_few_peers_it_makes_what_it_can_and_says_so(others: int) -> None:
    world = Harness(others=others)
    world.stored("k", b"value")
    operation = replicate(world, "k", 4)
    asks = asks_of(world)
    assert len(asks) == others
    for ask in asks:
        world.answer(ask, DONE)
    assert operation.result == 1 + others
    world.check_idle()


@pytest.mark.parametrize("reply", [FULL, None], ids=["refuses", "silent"])
def test_a_target_that_fails_is_replaced_by_the_next(reply: Any) -> None:
    world = Harness(others=4)
    world.stored("k", b"value")
    operation = replicate(world, "k", 3)
    ranked = world.core.gossip.rank(digest_of("k"))
    first, second = asks_of(world)
    world.answer(first, reply)
    (third,) = asks_of(world)
    assert third.peer_id == ranked[2]
    assert bool(world.effects(Ask)) is (reply is None), "only silence makes a peer suspicious"
    world.answer(second, DONE)
    assert not asks_of(world), "no more than are wanted"
    world.answer(third, DONE)
    assert operation.result == 3
    world.check_idle()


def test_hosts_without_a_copy_come_first() -> None:
    world = Harness(others=6)
    entry = world.stored("k", b"value")
    ranked = [world.other(peer_id) for peer_id in world.core.gossip.rank(digest_of("k"))]
    for other, host in zip(ranked, [0, 1, 1, 0, 2, 2], strict=True):  # 0 is this peer's own
        world.offer(other, host_id=bytes([host] * 16), memory_capacity=1)
    held = remote_object("k", b"value", clock=entry.version.clock, writer=entry.version.writer)
    world.push(ranked[2], held)
    operation = replicate(world, "k", 5)
    asks = asks_of(world)
    expected = [ranked[4].peer_id, ranked[0].peer_id, ranked[1].peer_id]
    assert [ask.peer_id for ask in asks] == expected
    for ask in asks:
        world.answer(ask, DONE)
    assert operation.result == 5


def test_a_soft_copy_is_kept_rather_than_another_one_made() -> None:
    world = Harness(others=4)
    entry = world.stored("k", b"value")
    held = remote_object("k", b"value", clock=entry.version.clock, writer=entry.version.writer)
    ranked = [world.other(peer_id) for peer_id in world.core.gossip.rank(digest_of("k"))]
    world.push(ranked[3], held, soft=True)
    older = remote_object("k", b"other", clock=entry.version.clock - 1, writer=3)
    world.push(ranked[2], older, soft=True)
    replicate(world, "k", 3)
    asked = [ask.peer_id for ask in asks_of(world)]
    assert asked == [ranked[3].peer_id, ranked[0].peer_id]
    for other, host in zip(ranked, [1, 2, 2, 0], strict=True):  # 0 is this peer's own
        world.offer(other, host_id=bytes([host] * 16), memory_capacity=1)
    replicate(world, "k", 3)
    asked = [ask.peer_id for ask in asks_of(world)]
    assert asked == [ranked[0].peer_id, ranked[1].peer_id], "another host is worth a copy"


def test_a_host_whose_only_target_failed_is_tried_again_before_others() -> None:
    world = Harness(others=3)
    world.stored("k", b"value")
    ranked = [world.other(peer_id) for peer_id in world.core.gossip.rank(digest_of("k"))]
    for other, host in zip(ranked, [1, 0, 1], strict=True):
        world.offer(other, host_id=bytes([host] * 16), memory_capacity=1)
    replicate(world, "k", 2)
    for expected in (ranked[0], ranked[2], ranked[1]):
        (ask,) = asks_of(world)
        assert ask.peer_id == expected.peer_id
        world.answer(ask, FULL)


def test_holders_that_heard_of_fewer_copies_are_told() -> None:
    world = Harness(others=4)
    entry = world.stored("k", b"value")
    held = remote_object("k", b"value", clock=entry.version.clock, writer=entry.version.writer)
    for other in world.others[:2]:
        world.push(other, held)
    world.core.objects.strengthen(entry, entry.pin, 3, world.now)
    operation = replicate(world, "k", 3)
    asks = asks_of(world)
    assert {ask.peer_id for ask in asks} == {other.peer_id for other in world.others[:2]}
    for ask in asks:
        assert isinstance(ask.request, Replicate)
        assert ask.request.replicas == 3
        world.answer(ask, DONE)
    assert operation.result == 3


def test_soft_older_and_unreachable_copies_do_not_count() -> None:
    world = Harness(others=4)
    entry = world.stored("k", b"value")
    clock, writer = entry.version.clock, entry.version.writer
    same = remote_object("k", b"value", clock=clock, writer=writer)
    world.push(world.others[0], same, soft=True)
    world.push(world.others[1], remote_object("k", b"other", clock=clock - 1, writer=writer))
    world.push(world.others[2], same)
    world.die(world.others[2])
    operation = replicate(world, "k", 2)
    (ask,) = asks_of(world)
    assert ask.peer_id != world.others[2].peer_id
    world.answer(ask, DONE)
    assert operation.result == 2


def test_more_copies_than_wanted_are_told_as_they_are() -> None:
    world = Harness(others=3)
    entry = world.stored("k", b"value")
    held = remote_object("k", b"value", clock=entry.version.clock, writer=entry.version.writer)
    for other in world.others:
        world.push(other, held)
    assert replicate(world, "k", 2).result == 4


def test_the_source_is_not_evicted_while_it_is_copied() -> None:
    world = Harness(others=1, memory_bytes=64 * 1024)
    entry = world.stored("k", bytes(40_000))
    replicate(world, "k", 2)
    (ask,) = asks_of(world)
    assert entry.references == 1
    with pytest.raises(CapacityExceeded):
        world.reserve("other", bytes(40_000))
    world.answer(ask, DONE)
    assert entry.references == 0
    world.reserve("other", bytes(40_000))
    assert world.find("k") is None


def test_cancelling_lets_the_source_go() -> None:
    world = Harness(others=2)
    world.stored("k", b"value")
    operation = replicate(world, "k", 3)
    first, second = asks_of(world)
    world.answer(first, DONE)
    world.core.operations.cancel(operation, world.now)
    assert isinstance(operation.result, DeadlineExceeded)
    world.check_idle()
    world.answer(second, DONE)
    world.core.operations.cancel(operation, world.now)
    world.check_idle()


def test_a_source_that_is_removed_meanwhile_stays_readable_until_the_end() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    replicate(world, "k", 2)
    (ask,) = asks_of(world)
    world.learn_floor(world.others[0], digest_of("k"), entry.version)
    assert world.find("k") is None
    assert world.segment.used_bytes == entry.extent_bytes
    world.answer(ask, Failure(int(Code.NO_SUCH_KEY), "gone"))
    assert world.segment.used_bytes == 0
    world.check_idle()


def test_a_longer_object_has_more_time() -> None:
    world = Harness(others=1, memory_bytes=4 * 1024 * 1024)
    world.stored("short", b"1")
    world.stored("long", bytes(2_000_000))
    replicate(world, "short", 2)
    replicate(world, "long", 2)
    short, long = asks_of(world)
    assert 5.0 <= short.timeout_seconds < 5.01
    assert long.timeout_seconds == pytest.approx(5.04)


# --- through a put ---------------------------------------------------------------------------


def test_a_put_with_replicas_ends_when_they_exist() -> None:
    world = Harness(others=3)
    operation = world.put("k", b"value", replicas=3)
    assert world.value("k") == b"value"
    first, second = asks_of(world)
    world.answer(first, DONE)
    assert not operation.done
    world.answer(second, DONE)
    end = operation.result
    assert isinstance(end, PutEnd)
    assert (end.status, end.copies, end.wanted) == (PutStatus.CREATED, 3, 3)
    assert operation.number in world.finished()
    world.check_idle()


def test_a_put_whose_replicas_fail_says_how_many_copies_there_are() -> None:
    world = Harness(others=1)
    operation = world.put("k", b"value", replicas=3)
    (ask,) = asks_of(world)
    world.answer(ask, None)
    assert (operation.result.copies, operation.result.wanted) == (1, 3)


def test_a_second_put_of_the_same_bytes_makes_the_missing_copies() -> None:
    world = Harness(others=2)
    entry = world.stored("k", b"value")
    operation = world.put("k", b"value", replicas=2)
    (ask,) = asks_of(world)
    world.answer(ask, DONE)
    version = Version(entry.version.clock, entry.version.writer, entry.version.root)
    assert operation.result == PutEnd(PutStatus.UNCHANGED, 2, 2, version)
    assert entry.replicas == 2
