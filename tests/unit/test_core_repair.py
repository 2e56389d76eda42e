"""When a core has lost copies made again, and whom it leaves that to; what it hands over when its peer leaves. Whole
clusters: `tests/simulation/test_repair.py` and `test_hand_over.py`."""

from collections.abc import Sequence
from functools import partialmethod
from typing import TypeVar

import pytest
from msgspec.structs import replace

import p2pstore.core.copies.hand_over as hand_over_module
from p2pstore.core.copies.hand_over import SPREAD_SECONDS, HandedOver, HandOverOperation
from p2pstore.core.copies.own_copies import LOOKED_AT, OwnCopies
from p2pstore.core.copies.repair import MAX_FAILURES, RepairTiming
from p2pstore.core.operation import AskPeer, LoadObject
from p2pstore.gossip.gossip_messages import Ack, Ask, ControlKind
from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.home_messages import Push
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.eviction import KNOWN_SECONDS
from p2pstore.memory.segment_layout import Pin
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Replicate, Replicated
from p2pstore.wire import Code, Failure
from tests.present import present
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import OTHER_INCARNATION, Harness, Other, digest_of, remote_object

TIMING = RepairTiming()
DONE = Replicated(1, 1)
FULL = Failure(int(Code.CAPACITY_EXCEEDED), "no room")
VALUE = b"v" * 9_000
DELAY_SECONDS = TIMING.delay_seconds + TIMING.jitter_seconds + 1.0

World = TypeVar("World", bound=Harness)


def live(world: Harness, seconds: float) -> None:
    """Let time pass while the others answer pings."""
    until = world.now + seconds
    while world.now < until:
        world.pass_time(min(0.2, until - world.now))
        for ask in world.effects(Ask):
            ping = ask.kind == ControlKind.PING
            world.gossip.answered(ask.token, Ack(OTHER_INCARNATION, []) if ping else None, world.now)


def replications(world: Harness) -> list[AskPeer]:
    return world.asks(DataKind.REPLICATE)


def hold_as_well(world: Harness, other: Other, key: str) -> None:
    """The other announces a copy in memory of what this peer has."""
    record = present(world.announced(key))
    version = record.version
    thing = remote_object(key, VALUE, version.clock, version.writer, replicas=record.replicas)
    world.push(other, thing)


def with_others(world: World, count: int) -> World:
    """More members from now on."""
    world.others += [world.join(len(world.others) + number) for number in range(1, count + 1)]
    return world


# --- repair ----------------------------------------------------------------------------------


def test_what_is_on_the_ssd_alone_is_brought_to_memory_for_others_to_copy() -> None:
    world = ColdWorld()
    world.cool("k", VALUE, replicas=2)
    with_others(world, 1)
    live(world, TIMING.delay_seconds - 1.0)
    assert not world.effects(LoadObject)
    live(world, 1.0 + TIMING.jitter_seconds)
    assert not replications(world)
    assert world.load() == ["k"]
    (ask,) = replications(world)
    assert isinstance(ask.request, Replicate)
    assert ask.request.digest == digest_of("k")
    world.answer(ask, DONE)
    assert world.core.counters["repairs"] == 1
    assert world.core.counters["repaired_bytes"] == len(VALUE)
    live(world, 1.0)
    assert world.core.repair.lacking == 0


def test_a_load_that_fails_is_a_failure_like_any_other() -> None:
    world = ColdWorld()
    world.cool("k", VALUE, replicas=2)
    with_others(world, 1)
    live(world, DELAY_SECONDS)
    world.load(fail=True)
    live(world, 1.0)
    assert world.core.repair.lacking == 1
    live(world, TIMING.delay_seconds)
    assert world.load() == ["k"]


def test_who_has_it_in_memory_goes_before_who_has_it_on_an_ssd() -> None:
    world = ColdWorld()
    world.cool("k", VALUE, replicas=3)
    with_others(world, 2)
    digest, me = digest_of("k"), world.core.member
    holder = min(world.others, key=lambda other: weight(other.member, digest))
    assert any(weight(other.member, digest) != weight(me, digest) for other in world.others)
    hold_as_well(world, holder, "k")
    live(world, DELAY_SECONDS)
    assert not world.effects(LoadObject), "it is the other's turn"
    live(world, TIMING.turn_seconds)
    assert world.load() == ["k"], "which did nothing"


def test_who_comes_first_acts_at_once_and_others_wait_for_their_turn() -> None:
    waits = []
    for number in range(8):
        world = Harness()
        key = f"k{number}"
        world.stored(key, VALUE, replicas=4)
        with_others(world, 3)
        for other in world.others[:2]:
            hold_as_well(world, other, key)
        before = sum(
            weight(other.member, digest_of(key)) > weight(world.core.member, digest_of(key))
            for other in world.others[:2]
        )
        began = world.now
        asked: list[AskPeer] = []
        while not asked:
            live(world, 0.5)
            asked = replications(world)
            assert world.now < began + 100.0
        waited = world.now - began - before * TIMING.turn_seconds
        assert TIMING.delay_seconds <= waited <= DELAY_SECONDS, before
        waits.append(before)
    assert {0, 1, 2} == set(waits), "the keys do not tell all turns apart"


def test_the_highest_number_of_copies_that_a_holder_heard_of_counts() -> None:
    world = Harness()
    world.stored("k", VALUE, replicas=2)
    with_others(world, 2)
    record = present(world.announced("k"))
    packed = replace(record, replicas=3).encode()
    world.serve(world.others[0], DataKind.PUSH, Push(OTHER_INCARNATION, [1], packed))
    live(world, DELAY_SECONDS + TIMING.turn_seconds)
    (ask,) = replications(world)
    assert ask.peer_id == world.others[1].peer_id


def test_nobody_acts_when_somebody_else_did_meanwhile() -> None:
    world = Harness()
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        world.stored(key, VALUE, replicas=3)
    with_others(world, 2)
    for key in keys:
        hold_as_well(world, world.others[0], key)
    live(world, DELAY_SECONDS)
    for key in keys:
        hold_as_well(world, world.others[1], key)
    asked = replications(world)
    assert len({ask.request.digest for ask in asked}) == 1, "one at a time"  # type: ignore[attr-defined]
    for ask in asked:
        world.answer(ask, DONE)
    live(world, 100.0)
    assert not replications(world)
    assert world.core.repair.lacking == 0


def test_what_nobody_takes_is_tried_less_and_less_often() -> None:
    world = Harness(others=1)
    operation = world.put("k", b"value", replicas=2)
    world.answer(replications(world)[0], FULL)
    assert operation.result.copies == 1
    times, last = [], world.now
    for _ in range(6):
        asked: list[AskPeer] = []
        while not asked:
            live(world, 0.5)
            asked = replications(world)
        world.answer(asked[0], FULL)
        times.append(world.now - last)
        last = world.now
    delay = TIMING.delay_seconds
    for waited, expected in zip(times[1:], [delay, 2 * delay, 4 * delay, 8 * delay], strict=False):
        assert expected <= waited <= expected + 2.0
    assert delay <= times[0] <= DELAY_SECONDS
    assert world.core.repair.lacking == 1


def test_when_nobody_takes_anything_a_pass_ends() -> None:
    world = Harness(memory_bytes=8 << 20)
    for number in range(3 * LOOKED_AT):
        world.stored(f"k{number}", b"value", replicas=2)
    with_others(world, 1)
    refused = 0
    for _ in range(int(DELAY_SECONDS + 5.0) * 10):
        live(world, 0.1)
        for ask in replications(world):
            world.answer(ask, FULL)
            refused += 1
    assert refused == MAX_FAILURES


def test_a_peer_that_leaves_repairs_nothing() -> None:
    world = Harness()
    world.stored("k", b"value", replicas=2)
    with_others(world, 1)
    world.core.closing = True
    live(world, DELAY_SECONDS)
    assert not replications(world)


def test_evicted_soft_and_removed_copies_are_not_looked_for() -> None:
    world = Harness()
    world.stored("gone", b"value", replicas=2)
    entry = present(world.find("gone"))
    world.core.objects.withdraw(entry, world.now)
    world.stored("one", b"value", replicas=1)
    with_others(world, 1)
    thing = world.hold(world.others[0], "soft", b"value", replicas=3)
    world.core.operations.fetch(digest_of("soft"), world.now)
    world.deliver(world.pull_wanted(), thing)
    live(world, DELAY_SECONDS)
    assert not replications(world)
    assert world.core.repair.lacking == 0


def test_a_walk_misses_nothing_that_stays() -> None:
    world = Harness(memory_bytes=1024 * 1024)
    for number in range(60):
        world.stored(f"k{number}", b"value", replicas=1 + number % 2)
    walk = OwnCopies(world.core, replicated_only=True)
    met: list[bytes] = []
    for number in range(0, 60, 3):
        met += walk.step(3)
        entry = present(world.find(f"k{number}"))
        world.core.objects.withdraw(entry, world.now)
    while not walk.done:
        met += walk.step(7)
    stayed = {digest_of(f"k{number}") for number in range(1, 60, 2) if number % 3}
    assert stayed <= set(met)
    assert set(met) <= {digest_of(f"k{number}") for number in range(1, 60, 2)}


# --- handing over ----------------------------------------------------------------------------


def hand_over(world: Harness) -> HandOverOperation:
    operation = HandOverOperation(world.core)
    world.start(operation)
    world.pass_time(0.01)
    return operation


def test_whom_to_give_objects_to_is_looked_for_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Harness(others=2, memory_bytes=1 << 20)
    for number in range(30):
        world.stored(f"k{number}", b"v")
    chosen: list[bytes] = []

    def choose(rooms: object, digest: bytes, *facts: object, **more: object) -> list[bytes]:
        chosen.append(digest)
        return []

    monkeypatch.setattr(hand_over_module.MemberRooms, "choose", choose)
    operation = HandOverOperation(world.core)
    world.core.operations.start(operation, world.now)
    while not operation.done:
        before = len(chosen)
        world.now += 0.001
        world.core.tick(world.now)
        assert len(chosen) - before <= hand_over_module.BEGUN_PER_STEP
    assert len(chosen) == 30


def answer_all(world: Harness) -> list[bytes]:
    """Have all that is asked for done, to the end; digests in the order in which they were asked for."""
    order = []
    while asked := replications(world):
        for ask in asked:
            assert isinstance(ask.request, Replicate)
            order.append(ask.request.digest)
            world.answer(ask, DONE)
    return order


def offering(world: Harness, *free: int) -> None:
    for other, free_bytes in zip(world.others, free, strict=True):
        world.offer(other, memory_capacity=1 << 20, memory_used=(1 << 20) - free_bytes)


def test_pinned_objects_go_first_then_those_that_are_asked_for_most() -> None:
    world = Harness(others=1, memory_bytes=1024 * 1024)
    offering(world, 1 << 20)
    for key in ("seldom", "often", "soft", "hard", "now"):
        world.stored(key, b"value", pin=Pin({"soft": 1, "hard": 2}.get(key, 0)))
        world.now += 10.0
    unix = world.core.unix(world.now)
    for key, hits, ago in (("seldom", 1, 50.0), ("often", 30, 20.0), ("now", 1, 0.5)):
        entry = present(world.find(key))
        world.segment.objects.used(entry, hits, unix - ago)
    operation = hand_over(world)
    order = answer_all(world)
    assert order == [digest_of(key) for key in ("hard", "soft", "often", "now", "seldom")]
    assert not operation.done
    world.pass_time(SPREAD_SECONDS)
    assert operation.result == HandedOver(5, 25, 0, 0)
    world.check_idle()


def test_of_very_many_objects_the_first_in_order_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over_module, "MAX_ORDERED", 5)
    monkeypatch.setattr(OwnCopies, "step", partialmethod(OwnCopies.step, 3))
    world = Harness(others=1, memory_bytes=1024 * 1024)
    offering(world, 1 << 20)
    for number in range(40):
        entry = world.stored(f"k{number}", b"value")
        world.segment.objects.used(entry, number * 7 % 40, world.core.unix(world.now))
    operation = hand_over(world)
    order = answer_all(world)
    by_hits = sorted(range(40), key=lambda number: -(number * 7 % 40))
    assert order[:5] == [digest_of(f"k{number}") for number in by_hits[:5]]
    world.pass_time(1.0)
    assert len(order) <= 10
    assert operation.result == HandedOver(
        len(order), 5 * len(order), 40 - len(order), 5 * (40 - len(order))
    )


def test_a_target_that_refuses_is_replaced_and_what_all_refuse_is_left() -> None:
    world = Harness(others=3)
    offering(world, 1 << 20, 1 << 20, 1 << 20)
    world.stored("k", b"value")
    world.stored("other", b"other value")
    operation = hand_over(world)
    refused = 0
    while asked := replications(world):
        for ask in asked:
            assert isinstance(ask.request, Replicate)
            refuses = ask.request.digest == digest_of("k")
            refused += refuses
            world.answer(ask, FULL if refuses else DONE)
    assert refused == 3
    world.pass_time(1.0)
    assert operation.result == HandedOver(1, 11, 1, 5)
    world.check_idle()


def test_what_is_on_the_ssd_alone_goes_last_and_pushes_out_nothing() -> None:
    world = ColdWorld()
    world.cool("cold", VALUE)
    for entry in world.segment.entries():
        world.core.objects.withdraw(entry, world.now)
    world.stored("warm", VALUE)
    with_others(world, 2)
    offering(world, 100, 20_000)
    operation = hand_over(world)
    (warm,) = replications(world)
    assert isinstance(warm.request, Replicate)
    assert (warm.peer_id, warm.request.digest) == (world.others[1].peer_id, digest_of("warm"))
    assert not world.effects(LoadObject), "there is no room left for it"
    world.answer(warm, DONE)
    world.pass_time(1.0)
    assert operation.result.objects == 1
    assert operation.result.left_bytes >= len(VALUE)

    offering(world, 100, 1 << 20)
    again = hand_over(world)
    assert "cold" in world.load()
    assert digest_of("cold") in answer_all(world)
    world.pass_time(1.0)
    assert again.result.objects >= 1


def test_cancelling_leaves_nothing_under_way() -> None:
    world = Harness(others=2)
    offering(world, 1 << 20, 1 << 20)
    for number in range(12):
        world.stored(f"k{number}", b"value")
    operation = hand_over(world)
    asked = replications(world)
    world.answer(asked[0], DONE)
    world.core.operations.cancel(operation, world.now)
    assert operation.result == HandedOver(1, 5, 11, 55)
    world.check_idle()
    for ask in asked[1:]:
        world.answer(ask, DONE)
    assert operation.result == HandedOver(1, 5, 11, 55)


def test_a_peer_that_leaves_takes_no_copies() -> None:
    world = Harness(others=1)
    world.core.closing = True
    thing = remote_object("k", b"value")
    request = Replicate(thing.slot.digest, thing.version.clock, thing.version.writer, 5)
    reply = world.serve(world.others[0], DataKind.REPLICATE, request)
    assert isinstance(reply, Failure)
    assert reply.code == Code.UNAVAILABLE


LAST_VALUE = bytes(20_000)


def announced_by(world: Harness, other: Other, entry: ObjectEntry, *, soft: bool = False) -> None:
    """The other has a copy of the same version, too."""
    thing = world.hold(other, entry.key, LAST_VALUE, entry.version.clock, entry.version.writer)
    if soft:
        world.push(other, thing, soft=True)


def fill(world: Harness) -> list[ObjectEntry]:
    """As many objects as there is room for; the first one is the coldest."""
    entries: list[ObjectEntry] = []
    while world.segment.free_bytes > 2 * len(LAST_VALUE):
        entries.append(world.stored(f"k{len(entries)}", LAST_VALUE))
        world.pass_time(0.01)
    return entries


def evicted(world: Harness, entries: list[ObjectEntry]) -> set[str]:
    """Which of them go when room is needed for a few more."""
    for number in range(3):
        world.stored(f"new{number}", LAST_VALUE)
    return {entry.key for entry in entries if world.find(entry.key) is None}


def first_in_order(world: Harness, key: str) -> Other:
    """Another peer that comes before this one in rendezvous order."""
    digest = digest_of(key)
    mine = weight(world.core.member, digest)
    able = [each for each in world.others[:-1] if weight(each.member, digest) > mine]
    return able[0]  # the last of the others may be needed to tell of a death


def test_the_coldest_goes_first_where_all_are_alone() -> None:
    world = Harness(others=8)
    entries = fill(world)
    assert "k0" in evicted(world, entries)


def test_what_another_peer_keeps_goes_before_colder_last_copies() -> None:
    world = Harness(others=8)
    entries = fill(world)
    kept = {"k2", "k4", "k5"}
    for entry in entries:
        if entry.key in kept:
            announced_by(world, first_in_order(world, entry.key), entry)
    gone = evicted(world, entries)
    assert gone
    assert gone <= kept
    assert world.core.counters["gone_copy_elsewhere"] == len(gone)
    assert world.core.counters["gone_last_copy"] == 0


def test_one_of_two_holders_keeps_its_copy() -> None:
    """Each sees the other's copy: if both relied on it, there would be none."""
    world = Harness(others=8)
    entries = fill(world)
    for entry in entries[1:4]:
        digest = digest_of(entry.key)
        mine = weight(world.core.member, digest)
        for other in world.others:
            if weight(other.member, digest) < mine:
                announced_by(world, other, entry)
    assert "k0" in evicted(world, entries)


@pytest.mark.parametrize("how", ["dead", "soft"])
def test_copies_that_may_be_gone_do_not_count(how: str) -> None:
    world = Harness(others=8)
    entries = fill(world)
    for entry in entries[1:4]:
        other = first_in_order(world, entry.key)
        announced_by(world, other, entry, soft=how == "soft")
        if how == "dead":
            world.die(other)
    assert "k0" in evicted(world, entries)


def test_who_keeps_an_object_is_not_asked_each_time() -> None:
    world = Harness(others=1)
    entry = world.stored("k", LAST_VALUE)
    asked: list[str] = []

    def ask(weighed: Sequence[ObjectEntry], now: float) -> list[bool]:
        asked.extend(entry.key for entry in weighed)
        return [False] * len(weighed)

    world.segment.room.ask_who_keeps(ask)
    order = world.segment.objects.order
    unix = world.core.unix(world.now)
    order.cost_at(entry.offset, unix)
    order.cost_at(entry.offset, unix + 1)
    assert asked == ["k"]
    order.cost_at(entry.offset, unix + KNOWN_SECONDS)
    assert asked == ["k", "k"]
