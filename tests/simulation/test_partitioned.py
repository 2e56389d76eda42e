"""Whole peers that keep a part of the directory each: no read misses a key that a peer has held for a while."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import PutEnd
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.partition_homes import DirectorySetting, ModeLimits
from p2pstore.objects import key_digest
from simulation.cluster import NAMESPACE, SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork


class World:
    """A cluster under work and faults, and what must be found in it."""

    def __init__(
        self,
        seed: int,
        peers: int,
        setting: Callable[[int], DirectorySetting],
        *,
        limits: ModeLimits | None = None,
        loss: float = 0.0,
    ) -> None:
        self.kernel = Kernel(seed)
        self.rng = Random(seed)
        self.faults = Faults(loss=loss)
        self.cluster = SimulatedCluster(
            self.kernel, FaultyNetwork(self.kernel, self.faults), peers, memory_bytes=1 << 20
        )
        self._base = GossipConfig(cluster="sim", mode_limits=limits or ModeLimits())
        self._setting = setting
        self.keys: dict[str, tuple[SimulatedPeer, int, float]] = {}
        """Key -> who put it, in which life, and when."""
        self.asked = self.missed = self.homes_asked = 0
        self._next_key = 0
        for peer in self.cluster.peers:
            self.boot(peer)

    def boot(self, peer: SimulatedPeer) -> None:
        self.cluster.gossip_config = replace(self._base, directory_setting=self._setting(peer.number))
        others = [other.address for other in self.cluster.peers if other is not peer]
        peer.boot(others[:3])

    def run(self, seconds: float) -> None:
        self.kernel.run_until(self.kernel.now + seconds)

    def run_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = self.kernel.now + seconds
        while not condition():
            assert self.kernel.now < deadline, "it did not come to that in time"
            self.run(0.1)

    def put(self, peer: SimulatedPeer) -> None:
        key = f"key {self._next_key}"
        self._next_key += 1
        life = peer.life
        operation = peer.put(key, self.rng.randbytes(20))
        if operation is None:
            return

        def done() -> None:  # it asks a home first, and that may just have died
            if peer.life == life and isinstance(operation.result, PutEnd):
                self.keys[key] = (peer, life, self.kernel.now)

        peer.when_done(operation, done)

    def look(self, asker: SimulatedPeer, key: str) -> None:
        """Ask, and count a miss when there is a holder and the answer names none."""
        core = asker.core
        assert core is not None
        holder, life, _ = self.keys[key]
        digest = key_digest(key, NAMESPACE)
        operation = LookupOperation(core, [digest])
        core.operations.start(operation, self.kernel.now)

        def done() -> None:
            if holder.life != life or asker.core is not core:
                return
            self.asked += 1
            self.homes_asked += operation.homes_asked
            copies: list[Any] = operation.result[0]
            if not any(copy.reachable and copy.peer_id == holder.signer.peer_id for copy in copies):
                self.missed += 1

        asker.when_done(operation, done)
        asker.settle()

    def expected(self, age: float) -> list[str]:
        """Keys that have been held for this long, by peers that still run."""
        return [
            key
            for key, (peer, life, since) in self.keys.items()
            if peer.core is not None and peer.life == life and self.kernel.now - since >= age
        ]

    def look_around(self, count: int) -> None:
        """Have random peers look for random keys. A push to a home that is lost is sent again after 0.15 s, and then
        after half a second."""
        running = self.cluster.running
        keys = self.expected(1.5 if self.faults.loss else 1.0)
        for _ in range(count if keys else 0):
            self.look(self.rng.choice(running), self.rng.choice(keys))

    def modes(self) -> set[str]:
        return {
            peer.core.gossip.partitions.mode.phase.value
            for peer in self.cluster.running
            if peer.core is not None
        }

    def locations(self, part: str) -> int:
        """How many all peers together know of others, in views of logs or of partitions."""
        running = [peer.core.gossip for peer in self.cluster.running if peer.core]
        in_parts = sum(gossip.partitions.views.record_count for gossip in running)
        if part == "partitions":
            return in_parts
        return sum(gossip.directory.record_count for gossip in running) - in_parts

    def work(self, seconds: float, puts_per_second: float, looks_per_second: float) -> None:
        until = self.kernel.now + seconds
        while self.kernel.now < until:
            self.run(0.1)
            for _ in range(int(puts_per_second / 10)):
                self.put(self.rng.choice(self.cluster.running))
            self.look_around(int(looks_per_second / 10))


SETTINGS: dict[str, Callable[[int], DirectorySetting]] = {
    "partitioned": lambda number: "partitioned",
    "mixed": lambda number: "partitioned" if number % 2 else "full",
}


@pytest.mark.parametrize(("setting", "loss"), [("partitioned", 0.0), ("mixed", 0.05)])
def test_every_key_is_found_a_second_after_it_was_put(setting: str, loss: float) -> None:
    world = World(1, 8, SETTINGS[setting], loss=loss)
    world.run(6.0)
    world.work(6.0, puts_per_second=40, looks_per_second=150)
    world.run(3.0)
    assert world.asked > 300
    assert world.missed == 0
    if not loss:
        assert 0 < world.homes_asked <= world.asked, "one home each, at most"


@pytest.mark.parametrize(("setting", "seed"), [("partitioned", 0), ("mixed", 1)])
def test_no_key_is_missed_while_homes_come_and_go(setting: str, seed: int) -> None:
    world = World(seed, 8, SETTINGS[setting], loss=0.02)
    world.run(6.0)
    world.work(2.0, puts_per_second=60, looks_per_second=10)
    for absence in (3.0, 0.2, 0.2, 0.2, 0.2):
        victim = world.rng.choice(world.cluster.running)
        victim.crash()
        world.work(absence, puts_per_second=30, looks_per_second=100)
        world.boot(victim)
        world.work(1.5, puts_per_second=30, looks_per_second=500)
    world.run(3.0)
    assert world.asked > 700
    assert world.missed == 0


def test_no_key_is_missed_while_modes_change_under_load() -> None:
    limits = ModeLimits(index_bytes=40 * 150, dwell_seconds=3.0)
    world = World(4, 6, lambda number: "auto", limits=limits)
    world.run(3.0)
    assert world.modes() == {"full"}
    world.work(6.0, puts_per_second=40, looks_per_second=100)
    world.run_until(lambda: world.modes() == {"partitioned"}, 20.0)
    world.run_until(lambda: world.locations("logs") == 0, 5.0)
    world.work(2.0, puts_per_second=10, looks_per_second=100)
    world.run(1.0)  # no lookup is to be under way
    world.cluster.peers[0].flush(NAMESPACE)
    world.keys.clear()
    world.work(6.0, puts_per_second=10, looks_per_second=50)
    world.run_until(lambda: world.modes() == {"full"}, 30.0)
    world.work(2.0, puts_per_second=10, looks_per_second=50)
    world.run(3.0)
    assert world.asked > 700
    assert world.missed == 0
    assert world.locations("partitions") == 0, "what only partitioned peers need is gone"
