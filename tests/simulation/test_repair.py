"""The replication factor is kept: lost copies are made again, each exactly once, by whole peers in virtual time."""

from collections.abc import Callable, Iterable

import pytest

from p2pstore.core.copies.repair import RepairTiming
from p2pstore.core.operation import AskPeer, PutEnd
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.partition_homes import DirectorySetting
from p2pstore.objects import MIB, key_digest
from p2pstore.transfer.data_messages import DataKind
from simulation.cluster import NAMESPACE, SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from tests.present import present

TIMING = RepairTiming()
DETECTED_SECONDS = 20.0
"""By then all know of a death."""
REPAIRED_SECONDS = DETECTED_SECONDS + TIMING.delay_seconds + TIMING.jitter_seconds + 2.0
VALUE = bytes(20_000)


class World:
    """Peers with objects of two and three copies."""

    def __init__(
        self,
        seed: int,
        peers: int,
        *,
        hosts: Iterable[int] = (),
        faults: Faults | None = None,
        directory: DirectorySetting = "auto",
        memory_bytes: int = 4 * MIB,
    ) -> None:
        self.kernel = Kernel(seed)
        self.network = FaultyNetwork(self.kernel, Faults())
        self.cluster = SimulatedCluster(self.kernel, self.network, peers, memory_bytes)
        self.cluster.gossip_config = GossipConfig(cluster="sim", directory_setting=directory)
        for peer, host in zip(self.cluster.peers, hosts, strict=False):
            peer.host_id = host.to_bytes(16, "big")
        self.wanted: dict[str, int] = {}
        self.replications = 0
        for peer in self.cluster.peers:
            self._count(peer)
        self.cluster.boot_all()
        self.run(5.0)
        self.network.faults = faults or Faults()

    def _count(self, peer: SimulatedPeer) -> None:
        ask = peer._ask_data

        def counted(effect: AskPeer) -> None:
            self.replications += effect.kind == DataKind.REPLICATE
            ask(effect)

        peer._ask_data = counted  # type: ignore[method-assign,assignment]

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        self.kernel.run_until(self.kernel.now + seconds, stop)

    def peer(self, number: int) -> SimulatedPeer:
        return self.cluster.peers[number]

    def put(self, number: int, key: str, replicas: int) -> PutEnd:
        self.wanted[key] = replicas
        operation = self.peer(number).put(key, VALUE, replicas=replicas)
        assert operation is not None
        self.run(20.0, lambda: operation.done)
        assert isinstance(operation.result, PutEnd), operation.result
        return operation.result

    def put_many(self, count: int) -> None:
        for number in range(count):
            peers = self.cluster.running
            self.put(peers[number % len(peers)].number, f"key-{number}", 2 + number % 2)
        self.run(2.0)
        self.replications = 0

    def holders(self, key: str) -> list[SimulatedPeer]:
        """The peers with a firm copy."""
        digest = key_digest(key, NAMESPACE)
        found = []
        for peer in self.cluster.running:
            assert peer.core is not None
            entry = peer.core.objects.find(digest, self.kernel.now)
            if entry is not None and not entry.soft:
                found.append(peer)
        return found

    def missing(self) -> int:
        """How many copies are lacking."""
        return sum(max(0, wanted - len(self.holders(key))) for key, wanted in self.wanted.items())

    def lost_with(self, *numbers: int) -> int:
        return sum(peer.number in numbers for key in self.wanted for peer in self.holders(key))

    def counted(self, counter: str) -> int:
        return sum(peer.core.counters[counter] for peer in self.cluster.running if peer.core)

    def check_whole(self) -> None:
        assert {key: len(self.holders(key)) for key in self.wanted} == self.wanted
        assert all(peer.core.repair.lacking == 0 for peer in self.cluster.running if peer.core)


@pytest.mark.parametrize("directory", ["full", "partitioned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_crash_each_lost_copy_is_made_again_exactly_once(
    seed: int, directory: DirectorySetting
) -> None:
    world = World(seed, 6, directory=directory)
    world.put_many(40)
    lost = world.lost_with(5)
    assert lost > 5
    world.peer(5).crash()
    assert world.missing() == lost
    world.run(TIMING.delay_seconds)
    assert world.missing() == lost, "it may still come back"
    world.run(REPAIRED_SECONDS - TIMING.delay_seconds)
    world.run(TIMING.turn_seconds + 2.0)  # for who had to wait for others
    world.check_whole()
    assert world.replications == lost
    assert world.counted("repairs") == lost
    assert world.counted("repaired_bytes") == lost * len(VALUE)
    world.run(100.0)
    assert world.replications == lost, "and that was all"


def test_copies_are_there_when_the_first_in_turn_had_time_for_it() -> None:
    """No peer waits for a turn that no other takes."""
    world = World(4, 5)
    world.put_many(30)
    world.peer(2).crash()
    world.run(REPAIRED_SECONDS)
    assert world.missing() == 0


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_two_deaths_at_once(seed: int) -> None:
    world = World(seed, 7)
    world.put_many(60)
    survivors = {
        key: [peer for peer in world.holders(key) if peer.number not in (1, 4)] for key in world.wanted
    }
    for key, peers in survivors.items():
        if not peers:
            del world.wanted[key]
    lost = world.lost_with(1, 4)
    world.peer(1).crash()
    world.peer(4).crash()
    world.run(REPAIRED_SECONDS + TIMING.turn_seconds)
    world.check_whole()
    assert world.replications == lost


def test_a_second_death_meanwhile_has_a_time_of_its_own() -> None:
    world = World(21, 7)
    world.put_many(60)
    world.peer(1).crash()
    world.run(25.0)
    lost = world.lost_with(4)
    world.peer(4).crash()
    world.run(REPAIRED_SECONDS - 25.0)
    assert world.missing() >= lost - 5, "the second one may still come back"
    world.run(60.0)
    assert world.missing() == sum(not world.holders(key) for key in world.wanted)


def test_nothing_happens_when_the_peer_comes_back_in_time_with_what_it_held() -> None:
    world = World(31, 5)
    for peer in world.cluster.peers:
        peer.keeps_cold = True
    world.put_many(20)
    world.peer(3).crash()
    world.run(DETECTED_SECONDS)
    assert world.peer(3).signer.peer_id not in world.peer(0).core.live_peers()  # type: ignore[union-attr]
    world.peer(3).boot([world.peer(0).address])
    world.run(200.0)
    assert world.replications == 0
    world.check_whole()


def test_a_peer_that_comes_back_empty_at_once_lost_its_copies_all_the_same() -> None:
    world = World(32, 5)
    world.put_many(20)
    lost = world.lost_with(3)
    world.peer(3).crash()
    world.peer(3).boot([world.peer(0).address])
    world.run(REPAIRED_SECONDS + TIMING.turn_seconds)
    world.check_whole()
    assert world.replications == lost


def test_after_a_restart_of_all_who_did_not_return_is_replaced_though_nobody_saw_it_die() -> None:
    world = World(34, 5)
    for peer in world.cluster.peers:
        peer.keeps_cold = True
    world.put_many(20)
    lost = world.lost_with(3)
    for peer in world.cluster.peers:
        peer.crash()
    for number in (0, 1, 2, 4):
        world.peer(number).boot([world.peer(4 if number == 0 else 0).address])
    world.run(REPAIRED_SECONDS + 2 * TIMING.turn_seconds)
    world.check_whole()
    assert world.replications == lost


def test_a_peer_that_left_is_replaced_like_one_that_died() -> None:
    world = World(33, 5)
    world.put_many(20)
    lost = world.lost_with(3)
    world.peer(3).stop()
    world.run(TIMING.delay_seconds - 1.0)
    assert world.missing() == lost
    world.run(TIMING.jitter_seconds + TIMING.turn_seconds + 5.0)
    world.check_whole()
    assert world.replications == lost


def test_no_host_has_two_copies_while_another_has_none() -> None:
    hosts = [0, 0, 0, 1, 1, 1, 2, 2, 3]
    world = World(41, 9, hosts=hosts)
    world.put_many(60)

    def check() -> None:
        for key in world.wanted:
            used = [hosts[peer.number] for peer in world.holders(key)]
            assert len(set(used)) == len(used), (key, used)

    check()
    for number in (0, 8):
        world.peer(number).crash()
        world.run(REPAIRED_SECONDS + TIMING.turn_seconds)
        world.check_whole()
        check()


def test_a_cluster_that_is_too_small_waits_until_it_has_grown() -> None:
    world = World(51, 4)
    world.peer(3).stop()
    world.run(10.0)
    for number in range(10):
        world.put(number % 3, f"key-{number}", 3)
    world.replications = 0
    world.peer(2).crash()
    world.run(300.0)
    assert world.replications == 0, "there is nobody to ask"
    assert world.missing() == 10
    assert all(peer.core.repair.lacking == 10 for peer in world.cluster.running if peer.core)
    world.peer(3).boot([world.peer(0).address])
    world.run(REPAIRED_SECONDS + TIMING.turn_seconds)
    world.check_whole()
    assert world.replications == 10


def test_copies_that_a_cluster_never_had_are_not_called_lost() -> None:
    world = World(54, 4)
    assert world.put(0, "k", 9).copies == 4
    world.peer(3).stop()
    world.run(100.0)
    repairs = [peer.core.repair for peer in world.cluster.running if peer.core]
    assert [(each.lacking, each.limited) for each in repairs] == [(0, 1)] * 3
    world.peer(2).crash()
    world.run(100.0)
    repairs = [peer.core.repair for peer in world.cluster.running if peer.core]
    assert [(each.lacking, each.limited) for each in repairs] == [(1, 0)] * 2


def test_a_put_whose_target_died_under_it_is_completed_later() -> None:
    world = World(53, 2)
    world.peer(1).crash()
    end = world.put(0, "k", 2)  # before any peer knows of the crash
    assert end.copies == 1
    world.peer(1).boot([world.peer(0).address])
    world.run(TIMING.delay_seconds + TIMING.jitter_seconds + TIMING.turn_seconds + 5.0)
    world.check_whole()


@pytest.mark.parametrize("seed", [61, 62])
def test_over_a_lossy_network_copies_are_restored_as_well(seed: int) -> None:
    world = World(seed, 6, faults=Faults(loss=0.05, duplication=0.02, slow=0.05, slow_latency=0.4))
    world.put_many(30)
    world.peer(5).crash()
    world.run(400.0, lambda: world.kernel.now > 100 and world.missing() == 0)
    world.run(60.0)
    assert world.missing() == 0


def test_it_takes_no_more_of_the_link_than_it_may() -> None:
    world = World(71, 4)
    slow = RepairTiming(bytes_per_second=2 * len(VALUE))
    for peer in world.cluster.peers:
        assert peer.core is not None
        peer.core.repair._timing = slow
    world.put_many(40)
    lost = world.lost_with(3)
    world.peer(3).crash()
    world.run(300.0, lambda: world.replications > 0)
    world.run(4.0)
    assert world.missing() > 0
    assert world.replications <= 3 * (2 * 4 + 2)
    world.run(lost)
    world.check_whole()


def test_holders_that_heard_of_another_number_act_by_the_highest() -> None:
    world = World(81, 5)
    world.put(0, "k", 2)
    holder = next(peer for peer in world.holders("k") if peer.number != 0)
    assert holder.core is not None
    entry = present(holder.core.objects.find(key_digest("k", NAMESPACE), world.kernel.now))
    assert entry.replicas == 2
    world.wanted["k"] = 3
    holder.core.objects.strengthen(entry, entry.pin, 3, world.kernel.now)
    holder.settle()
    unrelated = next(peer for peer in world.cluster.peers if peer not in world.holders("k"))
    unrelated.crash()
    world.run(REPAIRED_SECONDS + TIMING.turn_seconds)
    world.check_whole()
