"""Last copies are offered to peers with room before they are evicted."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.core.copies.hand_over import (
    LOOK_SECONDS,
    MAX_OFFERED,
    MAX_OFFERED_BYTES,
    MUCH_OLDER,
    READY_PART,
    SPREAD_SECONDS,
    PeerMemories,
    PeerMemory,
    choose_offers,
)
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.policies.interface import LeastRecentlyUsed
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import MIB
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Replicate, Replicated
from p2pstore.wire import Code, Failure
from tests.unit.core_harness import UNIX, Harness
from tests.unit.eviction_entries import entry as make_entry

VALUE = bytes(8_000)
NOW = 10_000.0

rooms = st.lists(
    st.builds(
        lambda capacity, free, coldest: PeerMemory(0, capacity, min(free, capacity), coldest),
        st.integers(1, 64 * MIB),
        st.integers(0, 64 * MIB),
        st.one_of(st.just(0.0), st.floats(1.0, NOW)),
    ),
    max_size=8,
)
objects = st.lists(st.tuples(st.integers(1, 8 * MIB), st.floats(0.0, NOW), st.booleans()), max_size=100)


@given(rooms, objects, st.integers(0, 64 * MIB), st.integers(0, 99))
def test_offers_keep_to_what_the_rooms_have(
    told: list[PeerMemory[int]], things: list[tuple[int, float, bool]], short_bytes: int, seed: int
) -> None:
    for number, room in enumerate(told):
        room.peer = number
    spare = [max(0, room.spare_bytes) for room in told]
    older = [room.older_bytes for room in told]
    coldest = [
        make_entry(number, bytes_=size, now=used) for number, (size, used, _) in enumerate(things)
    ]
    last = {entry for entry, (_, _, is_last) in zip(coldest, things, strict=True) if is_last}
    policy = LeastRecentlyUsed()
    chosen = choose_offers(
        coldest, short_bytes, last.__contains__, PeerMemories(told, Random(seed)), policy, NOW
    )
    entries = [entry for entry, _ in chosen]
    assert entries == [entry for entry in coldest if entry in set(entries)], "the coldest first"
    assert set(entries) <= last
    assert len(entries) <= MAX_OFFERED
    assert sum(entry.extent_bytes for entry in entries[1:]) <= MAX_OFFERED_BYTES
    before = (
        sum(entry.extent_bytes for entry in coldest[: coldest.index(entries[-1])]) if entries else -1
    )
    assert before < short_bytes, "what would not go is not offered"
    for number, room in enumerate(told):
        given = [entry for entry, target in chosen if target is room]
        assert sum(entry.extent_bytes for entry in given) <= spare[number] + older[number]
        for entry in given:
            displaces = NOW - room.coldest >= MUCH_OLDER * (NOW - entry.last_access)
            assert spare[number] >= entry.extent_bytes or (room.coldest and displaces)


def test_a_peer_that_refused_gets_nothing_before_it_tells_anew() -> None:
    room = PeerMemory("other", 64 * MIB, 32 * MIB, coldest=1.0)
    entry = make_entry(0, bytes_=MIB, now=NOW)
    room.refused()
    told = PeerMemories([room], Random(1))
    assert not told
    assert choose_offers([entry], MIB, lambda each: True, told, LeastRecentlyUsed(), NOW) == []


# --- a core, by hand -------------------------------------------------------------------------


def world_with(free_bytes: int, coldest: int = 0) -> Harness:
    world = Harness(others=1, memory_bytes=MIB)
    world.offer(
        world.others[0],
        memory_capacity=4 * MIB,
        memory_used=4 * MIB - free_bytes,
        memory_coldest=coldest,
    )
    return world


def fill(world: Harness) -> list[ObjectEntry]:
    """Until memory is short of free room; the first one is the coldest."""
    entries: list[ObjectEntry] = []
    while world.segment.free_bytes >= world.segment.data_bytes // READY_PART:
        entries.append(world.stored(f"k{len(entries)}", VALUE))
        world.now += 0.001
    return entries


def offered(world: Harness) -> list[Replicate]:
    return [ask.request for ask in world.asks(DataKind.REPLICATE)]  # type: ignore[misc]


def take_all(world: Harness, *, announces: bool = True) -> list[bytes]:
    """The other peer takes what it is offered: the digests."""
    asks = world.asks(DataKind.REPLICATE)
    for ask in asks:
        request = ask.request
        assert isinstance(request, Replicate)
        world.answer(ask, Replicated(request.clock, request.writer))
        found = [each.key for each in world.segment.entries() if each.digest == request.digest]
        for key in found if announces else ():
            world.hold(world.others[0], key, VALUE, request.clock, request.writer)
    return [ask.request.digest for ask in asks]  # type: ignore[attr-defined]


def test_the_coldest_is_offered_before_memory_is_full_and_is_a_soft_copy_then() -> None:
    world = world_with(free_bytes=2 * MIB)
    entries = fill(world)
    world.pass_time(2 * LOOK_SECONDS)
    digests = take_all(world)
    assert not any(entry.soft for entry in entries), "not all have heard of the other copy"
    world.pass_time(SPREAD_SECONDS)
    assert digests == [entry.digest for entry in entries[: len(digests)]] != []
    assert [entry.soft for entry in entries[: len(digests) + 1]] == [*[True] * len(digests), False]
    announced = world.announced("k0")
    assert announced is not None
    assert announced.soft
    assert world.core.counters["offers_taken"] == len(digests)
    world.pass_time(10.0)
    assert offered(world) == [], "enough is ready"
    world.check_idle()
    for number in range(len(digests)):
        world.stored(f"new{number}", VALUE)
    assert all(world.find(entry.key) is None for entry in entries[: len(digests) - 1])
    assert world.find(entries[len(digests)].key) is not None


@pytest.mark.parametrize("reply", [None, Failure(int(Code.CAPACITY_EXCEEDED), "full")])
def test_an_offer_that_was_not_taken_changes_nothing(reply: Failure | None) -> None:
    world = world_with(free_bytes=2 * MIB)
    entries = fill(world)
    world.pass_time(2 * LOOK_SECONDS)
    for ask in world.asks(DataKind.REPLICATE):
        world.answer(ask, reply)
    assert not any(entry.soft for entry in entries)
    assert world.core.counters["offers_refused"] == world.core.counters["copies_offered"] > 0
    assert next(world.segment.room.coldest()) is entries[0]
    world.pass_time(10.0)
    assert offered(world) == [], "it has told nothing new"
    world.check_idle()


def test_a_copy_that_is_never_announced_does_not_count() -> None:
    world = world_with(free_bytes=2 * MIB)
    entries = fill(world)
    world.pass_time(2 * LOOK_SECONDS)
    assert take_all(world, announces=False)
    world.pass_time(SPREAD_SECONDS)
    assert not any(entry.soft for entry in entries)
    assert world.core.counters["offers_taken"] == 0 < world.core.counters["offers_refused"]


def test_full_peers_are_offered_only_what_is_much_younger_than_theirs() -> None:
    unix = int(UNIX)
    for age, is_offered in ((3600, True), (-50, False)):
        world = world_with(free_bytes=0, coldest=unix - age)
        world.now += 100.0
        fill(world)
        world.now += 60.0
        world.core.tick(world.now)
        assert bool(offered(world)) is is_offered


def test_what_is_kept_elsewhere_or_pinned_or_in_use_or_came_unread_is_not_offered() -> None:
    world = world_with(free_bytes=2 * MIB)
    entries = fill(world)
    kept, pinned, used, came, read = entries[:5]
    world.hold(world.others[0], kept.key, VALUE, kept.version.clock, kept.version.writer)
    world.core.objects.set_pin(pinned, Pin.SOFT, 60.0, world.now)
    world.segment.references.acquire(used)
    for entry in (came, read):  # as if another peer had written them
        entry.version = entry.version._replace(writer=9)
    read.hits = 1
    is_last = world.core.offers._is_last
    assert [is_last(entry, world.now) for entry in entries[:6]] == [False] * 4 + [True] * 2
    world.segment.references.let_go(used)


@pytest.mark.parametrize("change", ["removed", "pinned"])
def test_what_changed_meanwhile_is_not_made_soft(change: str) -> None:
    world = world_with(free_bytes=2 * MIB)
    first = fill(world)[0]
    world.pass_time(2 * LOOK_SECONDS)
    if change == "removed":
        world.core.objects.withdraw(first, world.now)
    else:
        world.core.objects.set_pin(first, Pin.HARD, 0.0, world.now)
    assert first.digest in take_all(world)
    world.pass_time(SPREAD_SECONDS)
    assert not first.soft
    assert (world.find("k0") is None) is (change == "removed")
    take_all(world)  # in place of the pinned one another is offered
    world.check_idle()


def test_a_peer_alone_or_leaving_offers_nothing() -> None:
    world = Harness(memory_bytes=MIB)
    fill(world)
    world.pass_time(5.0)
    assert offered(world) == []
    world = world_with(free_bytes=2 * MIB)
    world.core.closing = True
    fill(world)
    world.pass_time(5.0)
    assert offered(world) == []


def test_offers_stay_within_the_share_of_the_link() -> None:
    world = world_with(free_bytes=2 * MIB)
    world.core.offers._bytes_per_second = len(VALUE)
    fill(world)
    world.pass_time(2 * LOOK_SECONDS)
    count = len(take_all(world))
    world.pass_time(SPREAD_SECONDS)
    world.stored("more", VALUE)
    world.pass_time(count - 1.0)
    assert offered(world) == []
    world.pass_time(1.5)
    assert offered(world)
