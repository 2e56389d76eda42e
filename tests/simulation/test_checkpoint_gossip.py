"""Names, followers and switches of checkpoints in whole simulated clusters, over a network that loses messages."""

from typing import Any

import pytest

from p2pstore.checkpoint.swarm.group import (
    Follower,
    FollowerState,
    GroupUpdate,
    Heard,
    Prepare,
    Prepared,
    Stage,
    Switched,
    SwitchTo,
    Tick,
    Verdict,
)
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.checkpoint_records import Head, HeadBody, short_version
from p2pstore.gossip.records import Participation, TakesPart
from simulation.cluster import SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork

LOSSY = Faults(loss=0.05, duplication=0.02, slow=0.05, slow_latency=0.4)
STEP_SECONDS = 0.1
V1, V2 = b"1" * 16, b"2" * 16
TOLD = {Stage.VERIFIED: TakesPart.VERIFIED, Stage.CURRENT: TakesPart.VERIFIED}
STAGES = {int(TakesPart.VERIFIED): Stage.VERIFIED}


class World:
    """Peers, of which the first publishes and the others follow."""

    def __init__(self, seed: int, peers: int) -> None:
        self.kernel = Kernel(seed)
        self.network = FaultyNetwork(self.kernel, LOSSY)
        self.cluster = SimulatedCluster(self.kernel, self.network, peers)
        self.cluster.boot_all()
        self.kernel.run_until(60.0, stop=lambda: self.now > 5.0 and self.all_are_there)
        assert self.all_are_there
        self.publisher = self.cluster.peers[0]
        self.followers = [Following(self, peer) for peer in self.cluster.peers[1:]]

    @property
    def now(self) -> float:
        return self.kernel.now

    @property
    def all_are_there(self) -> bool:
        """Whether all know each other."""
        count = len(self.cluster.peers) - 1
        return all(
            peer.core is not None and len(peer.core.live_peers()) == count for peer in self.cluster.peers
        )

    def run(self, seconds: float) -> None:
        self.kernel.run_until(self.kernel.now + seconds)

    def step(self) -> None:
        self.run(STEP_SECONDS)
        for follower in self.followers:
            follower.step()

    def publish(self, version: bytes) -> Head:
        head = core_of(self.publisher).checkpoints.publish(
            HeadBody("sim", "model", version, 1, 1, 1, 1), self.now
        )
        self.publisher.settle()
        return head

    def update(self, head: Head, seconds: float = 60.0) -> Verdict:
        """As the publisher's peer does it."""
        core = core_of(self.publisher)
        known, parts = core.checkpoints, core.participations
        update = GroupUpdate(short_version(head.version), self.now + seconds)
        while True:
            living = {
                member: FollowerState(part.version, STAGES.get(part.state, Stage.FETCHING), part.current)
                for member, part in parts.followers(head.digest).items()
            }
            gone = parts.gone_from(head.digest, update.members)
            verdict = update.judge(short_version(head.version), living, gone, self.now)
            if verdict is Verdict.SWITCH:
                known.switch("sim", "model", head.version, self.now)
                self.publisher.settle()
            if verdict is not Verdict.WAIT:
                return verdict
            self.step()

    def until_all_use(self, version: bytes, seconds: float) -> float:
        """How long it takes."""
        begin = self.now
        while any(each.follower.current != version for each in self.followers):
            assert self.now < begin + seconds, [each.follower.current for each in self.followers]
            self.step()
        return self.now - begin


class Following:
    """A follower that has each version a second after it began."""

    def __init__(self, world: World, peer: SimulatedPeer) -> None:
        self.world, self.peer = world, peer
        self.follower = Follower(b"", ())
        self.prepares: list[tuple[float, bytes]] = []

    def step(self) -> None:
        if self.peer.core is None:
            return
        known, now = self.peer.core.checkpoints, self.world.now
        heads = known.heads("sim", "model")
        if not heads:
            return
        head = heads[0]
        switch = known.switched(head.digest)
        events: list[Heard | Prepared | Tick] = [
            Heard(head.version, switch.version if switch is not None else b"")
        ]
        events += [Prepared(version) for due, version in self.prepares if due <= now]
        self.prepares = [(due, version) for due, version in self.prepares if due > now]
        for event in events:
            for effect in self.follower.handle(event, now):
                if isinstance(effect, Prepare):
                    self.prepares.append((now + 1.0, effect.version))
                elif isinstance(effect, SwitchTo):
                    assert switch is not None
                    assert self.follower.handle(Switched(effect.version), now) == []
        said = self.follower.state
        state = TOLD.get(said.stage, TakesPart.FOLLOWING)
        self.peer.core.participations.follow(head.digest, said.version, state, said.current, now)
        self.peer.settle()


def core_of(peer: SimulatedPeer) -> PeerCore:
    assert peer.core is not None
    return peer.core


@pytest.mark.parametrize("seed", range(2))
def test_a_group_updates_again_and_again(seed: int) -> None:
    world = World(seed, 10)
    for version in (V1, V2, V1):
        before = {each.follower.current for each in world.followers}
        head = world.publish(version)
        world.run(1.0)
        for peer in world.cluster.peers:
            assert core_of(peer).checkpoints.find("sim", "model").version == version, (
                "a second is enough"
            )
        assert {each.follower.current for each in world.followers} == before
        assert world.update(head) is Verdict.SWITCH
        assert world.until_all_use(version, 10.0) < 2.0


def test_how_far_many_are_costs_few_messages() -> None:
    """As long as any two differ in anything, all compare all they know: so all tell it at the same moments."""
    world = World(5, 16)
    sent = 0
    send = world.network.send

    def count(*what: Any) -> None:
        nonlocal sent
        sent += 1
        send(*what)

    world.network.send = count  # type: ignore[method-assign, assignment]
    world.run(20.0)
    idle, sent = sent, 0
    for step in range(120):
        if step == 40:  # all have begun, one after the other
            sent = 0
        for peer in world.cluster.peers:
            if step > peer.number:
                part = Participation(b"n" * 16, V1[:8], int(TakesPart.FETCHING), 8 * step)
                core_of(peer).participations.take_part(part, world.now)
                peer.settle()
        world.run(0.25)
    assert idle < sent < 2 * idle
    for peer in world.cluster.peers:
        parts = core_of(peer).participations.participants(V1)
        assert len(parts) == 16
        assert min(part.done_permille for part in parts.values()) > 600


def test_a_follower_that_is_cut_off_or_dead_and_a_publisher_that_dies() -> None:
    world = World(99, 6)
    first = world.publish(V1)
    assert world.update(first) is Verdict.SWITCH
    world.until_all_use(V1, 10.0)

    # One is cut off before it has the next version: no follower switches.
    lost = world.followers[-1]
    world.network.partition(set(range(5)), {lost.peer.number})
    second = world.publish(V2)
    assert world.update(second, 3.0) is Verdict.TOO_LATE
    assert {each.follower.current for each in world.followers} == {V1}

    # When it counts as dead, an update does without it; the publisher dies in the same moment.
    for _ in range(600):
        world.step()
    assert world.update(second) is Verdict.SWITCH
    world.step()
    world.publisher.crash()
    for _ in range(50):
        world.step()
    assert {each.follower.current for each in world.followers[:-1]} == {V2}
    assert lost.follower.current == V1

    # It is back, and hears it from the others. So does the publisher, whose name it still is.
    world.network.heal()
    world.publisher.boot([world.cluster.peers[1].address])
    world.until_all_use(V2, 120.0)
    own = core_of(world.publisher).checkpoints.own("sim", "model")
    assert (own.version, own.body.previous) == (V2, V1)
    assert world.update(world.publish(V1)) is Verdict.SWITCH
    world.until_all_use(V1, 10.0)
