"""Last copies go to peers with room before they are evicted: whole peers in virtual time."""

from collections import Counter

import pytest

from p2pstore.core.copies.coldest import READY_PART
from p2pstore.gossip.homes.partition_homes import DirectorySetting
from simulation.kernel import Faults
from simulation.peer import MEMORY_BYTES
from tests.simulation.test_hand_over import VALUE, World

FIT: int = MEMORY_BYTES // len(VALUE)
WINDOW: int = MEMORY_BYTES // READY_PART // len(VALUE)


def put_many(world: World, count: int, pause: float = 1.0) -> None:
    """At the first peer, no faster than what it keeps ready is made ready again."""
    for number in range(count):
        world.put(f"k{number}")
        if number % WINDOW == 0:
            world.run(pause)


def counted(world: World, what: str) -> int:
    return sum((peer.core.counters for peer in world.cluster.running if peer.core), Counter())[what]


@pytest.mark.parametrize("directory", ["full", "partitioned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_last_copy_is_dropped_while_there_is_room(seed: int, directory: DirectorySetting) -> None:
    world = World(seed, 3, directory=directory)
    count = 2 * FIT
    put_many(world, count)
    world.run(5.0)
    assert counted(world, "last_copies_dropped") == 0
    for number in range(count):
        assert world.get(world.cluster.peers[number % 3], f"k{number}") == VALUE
    assert counted(world, "offers_taken") == counted(world, "copies_offered")
    assert counted(world, "copies_offered") <= 1.2 * (count - FIT), "none travelled twice"


def test_peers_that_are_all_full_leave_one_another_alone() -> None:
    world = World(3, 3)
    for number in range(4 * FIT):
        world.cluster.peers[number % 3].put(f"k{number}", VALUE)
        world.run(0.2)
    before = counted(world, "copies_offered")
    assert before <= FIT
    world.run(60.0)
    assert counted(world, "copies_offered") == before


def test_a_dead_target_is_replaced() -> None:
    world = World(4, 3)
    put_many(world, FIT + 2 * WINDOW)
    world.cluster.peers[1].crash()
    for number in range(FIT // 2):
        world.put(f"later-{number}")
        world.run(2.0)
    world.run(30.0)
    survivor = world.cluster.peers[2].core
    assert survivor is not None
    assert survivor.segment.object_count >= FIT // 2
    assert world.leaver.core is not None
    assert world.leaver.core.operations_under_way == 0


def test_lost_messages_lose_no_copy_of_what_was_offered() -> None:
    world = World(5, 3)
    world.network.faults = Faults(loss=0.1, maximum_latency=0.05)
    put_many(world, FIT + FIT // 2, pause=6.0)
    world.network.faults = Faults()
    world.run(30.0)
    assert counted(world, "offers_taken") > 0
    kept = sum(bool(world.holders(f"k{number}")) for number in range(FIT + FIT // 2))
    assert kept == FIT + FIT // 2 - counted(world, "last_copies_dropped")
