"""A peer that leaves hands over what it alone holds: whole peers in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from p2pstore.core.copies.hand_over import READY_PART, SPREAD_SECONDS, HandedOver, HandOverOperation
from p2pstore.core.operation import PutEnd
from p2pstore.errors import Unavailable
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.partition_homes import DirectorySetting
from p2pstore.objects import MIB, key_digest
from simulation.cluster import NAMESPACE, SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from simulation.peer import MEMORY_BYTES
from tests.present import present

VALUE = bytes(50_000)


class World:
    """A few peers; the first one is to leave."""

    def __init__(
        self, seed: int, peers: int, *, directory: DirectorySetting = "auto", latency: float = 0.001
    ) -> None:
        self.kernel = Kernel(seed)
        self.network = FaultyNetwork(self.kernel, Faults())
        self.cluster = SimulatedCluster(self.kernel, self.network, peers, 4 * MIB)
        self.cluster.gossip_config = GossipConfig(cluster="sim", directory_setting=directory)
        self.cluster.boot_all()
        self.run(5.0)
        self.network.faults = Faults(maximum_latency=latency)
        self.leaver = self.cluster.peers[0]

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        self.kernel.run_until(self.kernel.now + seconds, stop)

    def put(self, key: str, *, replicas: int = 1, value: bytes = VALUE) -> None:
        operation = self.leaver.put(key, value, replicas=replicas)
        assert operation is not None
        self.run(20.0, lambda: operation.done)
        assert isinstance(operation.result, PutEnd), operation.result

    def hand_over(self, seconds: float = 60.0) -> tuple[HandOverOperation, float]:
        """The operation when it is done or was cancelled, and how long it took."""
        began = self.kernel.now
        operation = self.leaver.hand_over()
        self.run(seconds, lambda: operation.done)
        took = self.kernel.now - began
        operation.cancel(self.kernel.now)
        assert operation.result == operation.handed_over
        return operation, took

    def get(self, peer: SimulatedPeer, key: str) -> bytes | Exception:
        found: list[bytes | Exception] = []
        peer.get(key_digest(key, NAMESPACE), found.append)
        self.run(30.0, lambda: bool(found))
        return found[0]

    def holders(self, key: str) -> list[SimulatedPeer]:
        digest = key_digest(key, NAMESPACE)
        return [
            peer
            for peer in self.cluster.running
            if peer.core is not None and peer.core.objects.find(digest, self.kernel.now) is not None
        ]


@pytest.mark.parametrize("directory", ["full", "partitioned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_last_copy_is_found_at_once_after_the_leave(
    seed: int, directory: DirectorySetting
) -> None:
    world = World(seed, 5, directory=directory)
    for number in range(40):
        world.put(f"lone-{number}")
        world.put(f"kept-{number}", replicas=2, value=b"small")
    world.run(1.0)  # so that it knows of the copies that it had made
    operation, _ = world.hand_over()
    assert operation.handed_over == HandedOver(40, 40 * len(VALUE), 0, 0)
    world.leaver.stop()
    for number in range(40):
        for key in (f"lone-{number}", f"kept-{number}"):
            peer = world.cluster.running[number % 4]
            assert not isinstance(world.get(peer, key), Exception), key
    spread = {world.holders(f"lone-{number}")[0].number for number in range(40)}
    assert len(spread) > 1


def test_what_others_hold_stays_where_it_is() -> None:
    world = World(4, 3)
    for number in range(5):
        world.put(f"k{number}", replicas=2)
    world.run(1.0)
    before = {number: world.holders(f"k{number}") for number in range(5)}
    operation, took = world.hand_over()
    assert operation.handed_over == HandedOver()
    assert took < SPREAD_SECONDS
    assert {number: world.holders(f"k{number}") for number in range(5)} == before


def test_a_soft_copy_elsewhere_becomes_a_firm_one() -> None:
    world = World(5, 2)
    world.put("k")
    world.run(1.0)
    world.get(world.cluster.peers[1], "k")
    core = present(world.cluster.peers[1].core)
    entry = present(core.objects.find(key_digest("k", NAMESPACE), world.kernel.now))
    assert entry.soft
    operation, _ = world.hand_over()
    assert operation.handed_over == HandedOver(1, len(VALUE), 0, 0)
    assert not entry.soft


def test_with_nobody_to_take_it_everything_is_left_at_once() -> None:
    world = World(6, 1)
    world.put("k")
    operation, took = world.hand_over()
    assert operation.handed_over.objects == 0
    assert operation.handed_over.left_objects == 1
    assert operation.handed_over.left_bytes >= len(VALUE)
    assert took == 0.0


def test_peers_that_leave_as_well_take_nothing() -> None:
    world = World(7, 3)
    world.put("k")
    leaving = world.cluster.peers[1]
    assert leaving.core is not None
    leaving.core.closing = True
    operation, _ = world.hand_over()
    assert operation.handed_over.objects == 1
    assert [peer.number for peer in world.holders("k") if peer.number] == [2]
    both = World(7, 2)
    both.put("k")
    other = present(both.cluster.peers[1].core)
    other.closing = True
    operation, _ = both.hand_over()
    assert operation.handed_over == HandedOver(0, 0, 1, len(VALUE))


def test_at_the_deadline_it_says_what_is_left() -> None:
    world = World(8, 3, latency=1.0)
    for number in range(60):
        world.put(f"k{number}")
    operation, _ = world.hand_over(seconds=8.0)
    handed = operation.handed_over
    assert 0 < handed.objects < 60
    assert handed.objects + handed.left_objects == 60
    assert handed.bytes + handed.left_bytes == 60 * len(VALUE)
    core = present(world.leaver.core)
    assert core.operations_under_way == 0
    assert core.segment.leased_bytes == 0


def test_peers_with_free_memory_are_filled_before_anything_is_evicted() -> None:
    world = World(9, 4)
    full = world.cluster.peers[1]
    for number in range(60):
        present(full.put(f"filler-{number}", bytes(64_000)))
    world.run(2.0)
    assert full.core is not None
    evicted = full.core.counters["objects_withdrawn"]
    for number in range(40):
        world.put(f"k{number}")
    operation, _ = world.hand_over()
    assert operation.handed_over.objects == 40
    assert full.core.counters["objects_withdrawn"] == evicted
    room = full.core.segment.data_bytes - 60 * 64_000
    assert sum(full in world.holders(f"k{number}") for number in range(40)) <= room / len(VALUE)


def test_a_target_that_died_is_replaced() -> None:
    world = World(10, 4)
    for number in range(20):
        world.put(f"k{number}")
    world.cluster.peers[2].crash()
    operation, _ = world.hand_over()
    assert operation.handed_over.objects == 20


@pytest.mark.parametrize("directory", ["full", "partitioned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_on_a_slow_network_what_others_hold_is_not_said_to_be_nowhere(
    seed: int, directory: DirectorySetting
) -> None:
    """The writer has died, so each reader asks a holder for a proof, and most answers take over half a second."""
    world = World(seed, 5, directory=directory)
    keys = [f"kept-{number}" for number in range(10)]
    for key in keys:
        world.put(key, replicas=2, value=b"small")
    world.run(1.0)
    world.leaver.crash()
    world.network.faults = Faults(slow=0.7, slow_latency=1.2)
    read = [
        world.get(peer, key)
        for key in keys
        for peer in world.cluster.running
        if peer not in world.holders(key)
    ]
    assert {type(each) for each in read} <= {bytes, Unavailable}
    assert read.count(b"small") >= 0.9 * len(read)


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
