"""Where a value goes that its own peer has no room for."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from p2pstore.core.puts.placing import MAX_HOLDERS, MAX_TARGETS, OfferedMemory, choose_rooms, place
from p2pstore.errors import CapacityExceeded
from p2pstore.objects import MIB
from tests.unit.core_harness import Harness, Other, digest_of, remote_object

HOST = b"h" * 16


def room(name: str, capacity: int = 100, free: int = 100, **rest: bool) -> OfferedMemory:
    return OfferedMemory(name.encode(), capacity, free, **rest)


def chosen(rooms: list[OfferedMemory], length: int = 10, count: int = 8, seed: int = 1) -> list[str]:
    return [each.peer_id.decode() for each in choose_rooms(rooms, length, count, Random(seed))]


def test_only_rooms_that_could_hold_the_value() -> None:
    rooms = [room("small", capacity=9, free=9), room("good")]
    assert chosen(rooms) == ["good"]
    assert chosen(rooms, length=100) == ["good"]
    assert chosen(rooms, length=101) == []


def test_doubtful_ones_last_then_those_that_must_evict_and_this_host_first() -> None:
    rooms = [
        room("doubtful", doubtful=True, same_host=True),
        room("full here", free=5, same_host=True),
        room("full", free=5),
        room("free"),
        room("here", free=10, same_host=True),
    ]
    for seed in range(20):
        order = ["here", "free", "full here", "full", "doubtful"]
        assert chosen(rooms, seed=seed) == order
    assert chosen(rooms, count=2) == ["here", "free"]


def test_two_random_choices_prefer_the_emptier_and_spread() -> None:
    rooms = [room(f"{free}", free=free) for free in range(10, 101, 10)]
    rng = Random(3)
    first = Counter(choose_rooms(rooms, 10, 1, rng)[0].free_bytes for _ in range(3000))
    assert 0.17 < first[100] / 3000 < 0.23, "the emptiest is in 1 of 5 pairs, and wins there"
    assert 10 not in first, "the fullest of a pair is not taken"
    assert first[90] > first[50] > first[20] > 0
    assert sorted(chosen(rooms, count=99)) == sorted(f"{free}" for free in range(10, 101, 10))


# --- with what gossip knows --------------------------------------------------------------------

ROOMY: dict[str, Any] = {"memory_capacity": 64 * MIB}


def offer(world: Harness, other: Other, **facts: Any) -> None:
    """The other has room and takes values, but for these facts."""
    world.offer(other, **{**ROOMY, **facts})


def places(world: Harness, length: int = MIB) -> list[bytes]:
    return place(world.core, digest_of("k"), length, HOST, world.now)


def test_live_peers_with_room_that_take_values() -> None:
    world = Harness(others=4)
    roomy, small, leaving, here = world.others
    offer(world, roomy)
    offer(world, small, memory_capacity=MIB - 1)
    offer(world, leaving, leaving=True)
    offer(world, here, host_id=HOST)
    assert places(world) == [here.peer_id, roomy.peer_id]


def test_a_dead_peer_is_no_place_and_a_doubtful_one_the_last() -> None:
    world = Harness(others=3)
    for other in world.others:
        offer(world, other)
    dead, doubtful, good = world.others
    world.die(dead)
    world.core.holders.peer_failed(doubtful.peer_id, world.now)
    assert places(world) == [good.peer_id, doubtful.peer_id]


def test_at_most_so_many() -> None:
    world = Harness(others=MAX_TARGETS + 5)
    for other in world.others:
        offer(world, other)
    assert len(set(places(world))) == len(places(world)) == MAX_TARGETS


def test_a_holder_is_asked_first_even_when_it_is_full_or_far() -> None:
    world = Harness(others=3)
    for other in world.others[:2]:
        offer(world, other, host_id=HOST)
    holder = world.others[2]
    offer(world, holder, memory_capacity=MIB - 1)
    world.push(holder, remote_object("k", b"value"))
    assert places(world)[0] == holder.peer_id
    assert len(places(world)) == 3
    offer(world, holder, leaving=True)
    assert holder.peer_id not in places(world)


def test_many_holders_leave_room_for_others() -> None:
    world = Harness(others=MAX_TARGETS + 1)
    *holders, roomy = world.others
    for other in holders:
        offer(world, other, memory_capacity=MIB - 1)
        world.push(other, remote_object("k", b"value"))
    offer(world, roomy)
    assert places(world)[MAX_HOLDERS:] == [roomy.peer_id]


def test_this_peer_is_asked_when_it_holds_the_key() -> None:
    world = Harness(others=1)
    offer(world, world.others[0])
    world.stored("k", b"value")
    assert places(world) == [world.core.peer_id, world.others[0].peer_id]


def test_nobody_says_the_largest_room_and_where() -> None:
    world = Harness(others=2)
    first, second = world.others
    offer(world, first, memory_capacity=3 * MIB)
    offer(world, second, memory_capacity=5 * MIB, name="roomy")
    with pytest.raises(CapacityExceeded, match=r"can hold 6\.0 MiB.*5\.0 MiB, on roomy"):
        places(world, 6 * MIB)


def test_nobody_at_all() -> None:
    world = Harness(others=1)
    offer(world, world.others[0], memory_capacity=0)
    with pytest.raises(CapacityExceeded, match="no other live peer takes values"):
        places(world)
    with pytest.raises(CapacityExceeded, match="no other live peer takes values"):
        places(Harness())
