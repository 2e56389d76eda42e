"""Nothing removed comes back: peers that were away, cut off, killed or shut down together; and a cluster in
touch loses nothing. Single courses of events first, then long random lives."""

from collections.abc import Iterable

import pytest

from p2pstore.core.operation import PutEnd
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.objects import key_digest
from simulation.absences import AbsenceScenario, run_absences
from simulation.cluster import NAMESPACE, SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from simulation.removals import RemovalScenario, run_removals
from tests.present import present

LIMIT = 24
COMPACTED_SECONDS = 420.0
"""Long enough that the floors from before are gone, and every peer in touch has seen them."""


class World:
    """A few peers with an SSD each, or with memory that is kept, whose floors are compacted above half of `limit`."""

    def __init__(
        self,
        peers: int,
        skews: Iterable[float] = (),
        *,
        keeps_memory: bool = False,
        limit: int = LIMIT,
        booted: int | None = None,
    ) -> None:
        self.kernel = Kernel(7)
        self.network = FaultyNetwork(self.kernel, Faults())
        self.cluster = SimulatedCluster(self.kernel, self.network, peers)
        self.cluster.gossip_config = GossipConfig(
            cluster="sim", cluster_record_limit=limit, floor_kept_seconds=30.0
        )
        for peer in self.cluster.peers:
            peer.keeps_cold = not keeps_memory
            peer.keeps_memory = keeps_memory
        for peer, skew in zip(self.cluster.peers, skews, strict=False):
            peer.clock_skew_seconds = skew
        if booted is None:
            self.cluster.boot_all()
        else:
            for number in range(booted):
                self.peer(number).boot([self.peer(0).address] if number else [])
        self.churned = 0
        self.run(5.0)

    def peer(self, number: int) -> SimulatedPeer:
        return self.cluster.peers[number]

    def run(self, seconds: float) -> None:
        self.kernel.run_until(self.kernel.now + seconds)

    def put(self, number: int, key: str, value: bytes, **options: object) -> None:
        operation = self.peer(number).put(key, value, **options)  # type: ignore[arg-type]  # by name
        assert operation is not None
        self.run(1.0)
        self.kernel.run_until(self.kernel.now + 5.0, stop=lambda: operation.done)
        assert isinstance(operation.result, PutEnd), operation.result

    def read(self, number: int, key: str, namespace: str = NAMESPACE) -> bytes | Exception:
        results: list[bytes | Exception] = []
        self.peer(number).get(key_digest(key, namespace), results.append)
        self.kernel.run_until(self.kernel.now + 10.0, stop=lambda: bool(results))
        return results[0]

    def remove(self, number: int, key: str) -> None:
        operation = self.peer(number).remove(key)
        self.kernel.run_until(self.kernel.now + 5.0, stop=lambda: operation.done)
        assert operation.result == [True]

    def churn(self, number: int, seconds: float = COMPACTED_SECONDS) -> None:
        """Puts and removes of other keys, one in 12 s: more than the floors that are kept."""
        until = self.kernel.now + seconds
        while self.kernel.now < until:
            self.churned += 1
            key = f"churn {self.churned}"
            self.put(number, key, key.encode())
            self.remove(number, key)
            self.run(10.0)

    def back(self, number: int, through: int) -> None:
        self.peer(number).boot([self.peer(through).address])

    def never_again(self, key: str) -> None:
        """From now on the key cannot be read anywhere, nor when all know of all floors."""
        numbers = [peer.number for peer in self.cluster.running]
        self.never(key, numbers, 10.0)
        self.settle()
        self.never(key, numbers, 1.0)

    def never(self, key: str, readers: Iterable[int], seconds: float) -> None:
        """All the time: the key cannot be read."""
        until = self.kernel.now + seconds
        while self.kernel.now < until:
            for number in readers:
                result = self.read(number, key)
                assert isinstance(result, Exception), (
                    f"{result!r} came back, read at {number} at {self.kernel.now:.2f} s"
                )
            self.run(0.05)

    def settle(self) -> None:
        """Wait until the running peers agree, in their horizons as well, and hold nothing back."""
        until = self.kernel.now + 200.0
        while self.problems():
            assert self.kernel.now < until, self.problems()
            self.run(1.0)

    def problems(self) -> list[str]:
        problems = self.cluster.disagreements()
        cores = [peer.core for peer in self.cluster.running if peer.core is not None]
        hashes = {core.gossip.cluster_records.floors.horizon_hash for core in cores}
        waiting = not all(core.gossip.floors.synchronised for core in cores)
        return problems + ["horizons differ"] * (len(hashes) > 1) + ["copies are held back"] * waiting

    def horizon(self, number: int) -> int:
        core = present(self.peer(number).core)
        return core.gossip.cluster_records.floors.compacted_before

    def distrusted(self) -> int:
        """How often running peers distrusted what they held."""
        return sum(p.core.counters["horizons_missed"] for p in self.cluster.running if p.core)

    def has_floor(self, number: int, key: str) -> bool:
        core = present(self.peer(number).core)
        return core.gossip.cluster_records.floors.floor_for(key_digest(key, NAMESPACE)).clock > 0


KEEPING = pytest.mark.parametrize("keeps_memory", [False, True], ids=["ssd", "memory"])


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("compacted", [False, True], ids=["floor kept", "floor gone"])
@KEEPING
def test_what_was_removed_meanwhile_does_not_come_back(
    killed: bool, compacted: bool, keeps_memory: bool
) -> None:
    world = World(4, keeps_memory=keeps_memory)
    world.put(3, "kept", b"kept")
    world.put(3, "k", b"value")
    world.run(70.0)
    (world.peer(3).crash if killed else world.peer(3).stop)()
    world.run(10.0)
    world.put(3 - 1, "k", b"another", overwrite=True)
    world.remove(0, "k")
    world.churn(0, COMPACTED_SECONDS if compacted else 30.0)
    assert world.has_floor(0, "k") is not compacted
    world.back(3, through=1)
    world.never_again("k")
    assert world.read(0, "kept") == b"kept" or compacted


@KEEPING
def test_copies_that_were_not_removed_return_when_floors_were_kept(keeps_memory: bool) -> None:
    world = World(3, keeps_memory=keeps_memory)
    world.put(2, "k", b"value")
    world.run(70.0)
    world.peer(2).crash()
    world.churn(0, 60.0)
    world.back(2, through=0)
    assert isinstance(world.read(2, "k"), Exception), "held back until floors were compared"
    world.run(10.0)
    assert world.read(2, "k") == b"value"
    assert world.read(0, "k") == b"value"
    assert world.distrusted() == 0


@KEEPING
def test_a_flush_and_an_overwrite_while_a_peer_is_away(keeps_memory: bool) -> None:
    world = World(3, keeps_memory=keeps_memory)
    world.put(2, "flushed", b"1", namespace="other")
    world.put(2, "k", b"old")
    world.run(5.0)
    world.peer(2).crash()
    world.run(10.0)
    flush = world.peer(0).flush("other")
    world.put(1, "k", b"new", overwrite=True)
    assert flush.done
    world.back(2, through=1)
    for _ in range(200):
        assert isinstance(world.read(2, "flushed", "other"), Exception)
        assert world.read(0, "k") == b"new"
        assert world.read(2, "k") != b"old"
        world.run(0.05)
    world.put(2, "flushed", b"1", namespace="other")
    assert world.read(0, "flushed", "other") == b"1"


def test_a_cluster_that_is_in_touch_discards_nothing() -> None:
    world = World(4, skews=(0.0, 8.0, 3.0, 5.0))
    for number in range(4):
        world.put(number, f"kept {number}", b"%d" % number)
    world.churn(0, 450.0)
    world.settle()
    assert world.horizon(0), "nothing was compacted: the test has lost its power"
    assert world.distrusted() == 0
    for number in range(4):
        assert world.read((number + 1) % 4, f"kept {number}") == b"%d" % number


def test_nor_one_with_a_member_that_died_long_ago() -> None:
    world = World(4)
    world.put(0, "kept", b"value")
    world.peer(3).crash()
    world.churn(1, 450.0)
    world.settle()
    assert world.horizon(0)
    assert world.distrusted() == 0
    assert world.read(2, "kept") == b"value"


def test_a_short_absence_costs_nothing() -> None:
    world = World(3)
    world.put(2, "kept", b"value")
    world.churn(0, COMPACTED_SECONDS)
    assert world.horizon(0)
    world.peer(2).crash()
    world.run(20.0)
    world.back(2, through=0)
    world.run(60.0)
    assert world.read(1, "kept") == b"value"
    assert world.distrusted() == 0


def put_on_both_sides(world: World, *sides: set[int]) -> None:
    """A key that both sides of a split have, and a removal of it by the first peer of the first side."""
    first = min(sides[0])
    world.put(max(sides[1]), "k", b"value", replicas=2)
    world.run(70.0)
    world.network.partition(*sides)
    world.run(40.0)
    for key in ("k", *(f"n{number}" for number in range(3))):
        world.put(first, key, b"there", overwrite=True)
    world.remove(first, "k")


def test_the_smaller_side_of_a_long_split_distrusts_what_the_other_may_have_removed() -> None:
    """Each side is in perfect agreement within: only writer by writer can it be told what it missed."""
    world = World(5)
    put_on_both_sides(world, {0, 1, 2}, {3, 4})
    world.peer(4).stop()
    world.back(4, through=3)
    world.run(5.0)
    world.read(4, "k")  # a peer that has joined meanwhile gets a copy of what was removed
    world.churn(0)
    assert not world.has_floor(1, "k")
    world.network.heal()
    world.never("k", (0, 1), 20.0)
    world.never_again("k")
    distrusting = {
        p.number for p in world.cluster.running if p.core and p.core.counters["horizons_missed"]
    }
    assert distrusting == {3, 4}, "who was with more than half of all missed nothing"


def test_the_smaller_side_of_a_split_keeps_its_floors_and_says_for_whom() -> None:
    """The others would not believe it that floors are gone, and might still hold what they forbade."""
    world = World(5)
    put_on_both_sides(world, {0, 1}, {2, 3, 4})
    names = "sim:[234], sim:[234], sim:[234]"
    with pytest.raises(AssertionError, match=rf"CapacityExceeded.*{names} did not confirm"):
        for number in range(LIMIT):
            world.put(0, f"churn {number}", b"1")
            world.remove(0, f"churn {number}")
            world.run(5.0)
    assert world.has_floor(0, "k")
    world.network.heal()
    world.never("k", (0, 1), 20.0)
    world.never_again("k")
    assert world.distrusted() == 0


def test_both_halves_of_a_long_split_distrust_what_the_other_may_have_removed() -> None:
    world = World(4, limit=60)
    put_on_both_sides(world, {0, 1}, {2, 3})
    world.churn(0, 700.0)
    assert not world.has_floor(1, "k")
    world.network.heal()
    world.never("k", (0, 1), 20.0)
    world.never_again("k")


def test_a_remove_that_nobody_heard_of_counts_when_its_peer_is_back() -> None:
    """The others have dropped floors that are younger than this one."""
    world = World(3)
    world.put(1, "k", b"value", replicas=3)
    world.run(70.0)
    world.network.partition({2}, {0, 1})
    world.run(30.0)
    world.remove(2, "k")
    world.run(1.0)
    world.peer(2).crash()
    world.network.heal()
    world.churn(0)
    assert world.read(0, "k") == b"value"
    world.back(2, through=0)
    world.run(10.0)
    world.never_again("k")


@KEEPING
def test_a_horizon_outlives_all_processes(keeps_memory: bool) -> None:
    world = World(3, keeps_memory=keeps_memory)
    world.put(2, "k", b"value")
    world.run(70.0)
    world.peer(2).crash()
    world.run(5.0)
    world.put(0, "k", b"newer", overwrite=True)
    world.remove(0, "k")
    world.churn(0)
    assert not world.has_floor(0, "k")
    world.run(250.0)  # no floor is left that would have them raise a horizon again
    for number in (0, 1):
        world.peer(number).crash()
    world.run(1.0)
    world.back(1, through=0)
    world.back(0, through=1)
    world.run(30.0)
    world.back(2, through=1)
    world.never_again("k")


def test_a_peer_killed_while_its_copies_are_held_back_is_no_wiser_afterwards() -> None:
    world = World(3)
    world.put(2, "k", b"value")
    world.run(70.0)
    world.peer(2).crash()
    world.run(5.0)
    world.put(0, "k", b"newer", overwrite=True)
    world.remove(0, "k")
    world.churn(0)
    peer = world.peer(2)

    def die() -> None:
        assert peer.core is not None
        peer.disk.write_all(peer.core)
        peer.crash()

    peer.on_cold_sorted = die
    world.back(2, through=0)
    world.run(100.0)
    assert peer.core is None
    assert peer.disk.state.floors_horizon, "it had taken in the horizon, and written that down"
    peer.on_cold_sorted = lambda: None
    world.back(2, through=0)
    world.never_again("k")


@KEEPING
def test_a_peer_alone_by_configuration_has_its_objects_at_once(keeps_memory: bool) -> None:
    world = World(1, keeps_memory=keeps_memory)
    world.put(0, "k", b"value")
    world.remove(0, "k")
    world.put(0, "k", b"again")
    world.run(1.0)
    world.peer(0).crash()
    world.peer(0).boot([])
    world.run(1.0)
    assert world.read(0, "k") == b"again"


@KEEPING
def test_a_peer_that_knows_of_others_waits_for_one(keeps_memory: bool) -> None:
    world = World(2, keeps_memory=keeps_memory)
    world.put(1, "k", b"value")
    world.run(20.0)
    world.peer(1).crash()
    world.peer(0).crash()
    world.back(1, through=0)
    world.run(100.0)
    assert isinstance(world.read(1, "k"), Exception)
    world.back(0, through=1)
    world.run(30.0)
    assert world.read(1, "k") == b"value"


def test_clocks_an_hour_wrong_harm_only_their_own_peers() -> None:
    world = World(5, skews=(0.0, 4.0, 8.0, 3600.0, -3600.0), limit=80)
    world.put(0, "kept", b"value")
    world.put(1, "k", b"value", replicas=2)
    world.remove(2, "k")
    world.churn(1, 900.0)
    world.run(30.0)
    right = [world.peer(number).core for number in range(3)]
    hashes = {core.gossip.cluster_records.floors.horizon_hash for core in right if core is not None}
    assert hashes != {0}
    assert len(hashes) == 1
    assert [core.counters["horizons_missed"] for core in right if core] == [0, 0, 0]
    for number in range(3):
        assert world.read(number, "kept") == b"value"
        assert isinstance(world.read(number, "k"), Exception)
        core = present(world.peer(number).core)
        assert len(core.gossip.cluster_records) <= 80


# --- long random lives -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(400, 403))
def test_absences_splits_and_shutdowns(seed: int) -> None:
    outcome = run_absences(seed)
    assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"
    assert outcome.delivered > 30, f"seed {seed}: hardly anything was read"


@pytest.mark.parametrize("seed", range(460, 462))
def test_memory_that_outlives_its_peers(seed: int) -> None:
    scenario = AbsenceScenario(keeps_memory=True, absences=8, shutdowns=2, seconds=600.0)
    outcome = run_absences(seed, scenario)
    assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"
    assert outcome.cold_returned > 20, f"seed {seed}: hardly anything came back"


@pytest.mark.parametrize("seed", range(420, 421))
def test_absences_on_a_lossy_network(seed: int) -> None:
    faults = Faults(loss=0.02, duplication=0.02, slow=0.05, slow_latency=0.4)
    outcome = run_absences(seed, AbsenceScenario(peers=5, seconds=700.0, faults=faults))
    assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"


@pytest.mark.parametrize("seed", range(440, 442))
def test_short_absences_and_shutdowns_lose_nothing(seed: int) -> None:
    scenario = AbsenceScenario(
        absences=6, longest_absence_seconds=25.0, splits=0, shutdowns=1, seconds=600.0
    )
    outcome = run_absences(seed, scenario)
    assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"
    assert outcome.horizons_missed == 0, f"seed {seed}: copies were distrusted without need"
    assert outcome.cold_returned > 20, f"seed {seed}: hardly anything was held back"


# --- removals all day ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        RemovalScenario(seconds=120.0, removals_per_second=200.0, limit=3_000),
        RemovalScenario(seconds=250.0, removals_per_second=60.0, limit=6_000, crash_every_seconds=100.0),
        RemovalScenario(
            seconds=120.0,
            removals_per_second=60.0,
            limit=6_000,
            faults=Faults(loss=0.02, duplication=0.02, slow=0.05, slow_latency=0.4),
        ),
    ],
    ids=["crowded", "killed one by one", "lossy"],
)
def test_what_is_not_removed_stays_however_many_removals_there_are(scenario: RemovalScenario) -> None:
    outcome = run_removals(1, scenario)
    assert not outcome.problems
    assert outcome.removed > outcome.most_floors, "no floor has gone: the test has lost its power"
    assert outcome.longest_wait_seconds < 4.0, "removals would have failed"
