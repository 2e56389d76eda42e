"""The active view of a peer: bounded, alive, uniformly chosen, and all views together one connected graph."""

import time
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Claim, Delta, Exchange, Status
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.members.member_table import MembershipConfig, MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import PeerId, SignedRecord, member_of
from p2pstore.wire import Message
from simulation.gossip_peer import GossipPeer
from simulation.signer import peer_id_of
from tests.present import present
from tests.unit.gossip_network import Network, bury, peer_record

SIGNED = SignedRecord(b"", b"")


class Peer:
    """One peer's membership and view, fed by hand."""

    def __init__(self, number: int, limit: int = 32, view: type[ActiveView] = ActiveView) -> None:
        self.number = number
        self.rng = Random(number)
        self.membership = Membership(peer_id_of(number), 1, MembershipConfig())
        self.view = view(self.membership, self.rng, limit, 10.0)
        self.meet([number])

    def meet(self, numbers: Iterable[int], incarnation: int = 1) -> None:
        for number in numbers:
            record = peer_record(number, incarnation=incarnation)
            self.membership.observe_record(record, SIGNED, 0.0)
        self.follow()

    def claim(self, number: int, status: Status, incarnation: int = 1) -> None:
        peer_id = peer_id_of(number)
        if status is Status.DEAD:
            bury(self.membership, [number], 1.0, incarnation)
        elif status is Status.LEFT:
            record = peer_record(number, incarnation=incarnation, sequence=9, leaving=True)
            self.membership.observe_record(record, SignedRecord(b"", b""), 1.0)
        else:
            claim = Claim(peer_id, incarnation, int(status), member_of(peer_id))
            self.membership.observe_claims([claim], 1.0)
        self.follow()

    def follow(self) -> None:
        for change in self.membership.take_changes():
            self.view.follow(change)

    @property
    def neighbours(self) -> set[PeerId]:
        neighbours = self.view.neighbours()
        assert len(neighbours) == len(set(neighbours))
        return set(neighbours)


def ids(numbers: Iterable[int]) -> set[PeerId]:
    return {peer_id_of(number) for number in numbers}


def test_up_to_the_limit_everybody_else_is_a_neighbour() -> None:
    peer = Peer(0)
    assert peer.neighbours == set()
    assert peer.view.choose() is None
    assert peer.view.sample(3) == []
    for number in range(1, 33):
        peer.meet([number])
        assert peer.neighbours == ids(range(1, number + 1))
    assert peer.view.due() == float("inf")
    peer.view.tick(0.0)
    peer.view.tick(100.0)
    assert peer.neighbours == ids(range(1, 33))


def test_a_view_is_never_larger_than_its_limit_and_holds_only_live_members() -> None:
    rng = Random(4)
    peer = Peer(0, limit=5)
    incarnation = dict.fromkeys(range(1, 40), 1)
    alive: set[int] = set()
    for step in range(2_000):
        number = rng.randint(1, 39)
        if number not in alive:
            incarnation[number] += 1
            peer.meet([number], incarnation[number])
            alive.add(number)
        elif rng.random() < 0.3:
            peer.claim(number, Status.SUSPECT, incarnation[number])
        else:
            verdict = rng.choice([Status.DEAD, Status.LEFT])
            peer.claim(number, verdict, incarnation[number])
            alive.discard(number)
        peer.view.tick(3.0 * step)
        assert peer.neighbours <= ids(alive)
        assert len(peer.neighbours) == min(5, len(alive))


def test_who_dies_is_replaced_at_once_and_who_is_suspected_stays() -> None:
    peer = Peer(0, limit=4)
    peer.meet(range(1, 20))
    numbers = {peer_id_of(number): number for number in range(1, 20)}
    victim, doubted, *others = (numbers[peer_id] for peer_id in peer.view.neighbours())
    before = peer.view.version
    peer.claim(victim, Status.DEAD)
    peer.claim(doubted, Status.SUSPECT)
    assert ids([doubted, *others]) < peer.neighbours
    assert peer_id_of(victim) not in peer.neighbours
    assert len(peer.neighbours) == 4
    assert peer.view.version > before
    gone = present(peer.membership.get(peer_id_of(doubted)))
    peer.membership.forget(gone)
    assert peer_id_of(doubted) not in peer.neighbours
    assert len(peer.neighbours) == 4


def test_one_neighbour_is_turned_over_every_ten_seconds() -> None:
    peer = Peer(0)
    peer.meet(range(1, 101))
    peer.view.tick(0.0)
    assert 0 < peer.view.due() <= 10
    seen = peer.neighbours
    now = peer.view.due()
    for _ in range(300):
        before = peer.neighbours
        peer.view.tick(now - 0.001)
        assert peer.neighbours == before
        peer.view.tick(now)
        assert len(peer.neighbours - before) == 1
        assert peer.view.due() == now + 10
        seen |= peer.neighbours
        now += 10
    assert len(seen) > 95


def test_views_are_uniform_whenever_a_member_came() -> None:
    """A newcomer is told news as soon as any other: each peer takes it in with probability limit / others."""
    counts: Counter[PeerId] = Counter()
    for number in range(1_000, 1_300):
        peer = Peer(number)
        peer.meet(range(1, 34))
        for late in range(34, 129):
            peer.meet([late])
        counts.update(peer.neighbours)
    expected = 300 * 32 / 128
    early = sum(counts[peer_id] for peer_id in ids(range(1, 34))) / 33
    last = sum(counts[peer_id] for peer_id in ids(range(109, 129))) / 20
    assert early == pytest.approx(expected, rel=0.1)
    assert last == pytest.approx(expected, rel=0.1)


def test_those_that_may_be_gone_are_chosen_seldom_but_not_never() -> None:
    peer = Peer(0)
    peer.meet(range(1, 9))
    peer.claim(1, Status.SUSPECT)
    peer.membership.heard(peer_id_of(2), 5.0)
    peer.view.failed(peer_id_of(2), 6.0)
    counts: Counter[PeerId] = Counter()
    for _ in range(4_000):
        state = present(peer.view.choose())
        counts[state.peer_id] += 1
    for doubtful in (1, 2):
        assert 20 < counts[peer_id_of(doubtful)] < 250  # 4,000 / 8 / 4 = 125
    assert {s.peer_id for s in peer.view.sample(6)} == ids(range(3, 9))
    assert {s.peer_id for s in peer.view.sample(8)} == ids(range(1, 9))

    peer.membership.heard(peer_id_of(2), 7.0)
    assert any(peer_id_of(2) in {s.peer_id for s in peer.view.sample(3)} for _ in range(50))


# --- the graph of all views ------------------------------------------------------------------


class Cluster:
    """Peers that come and die; the news of it reaches the others late, each at another moment."""

    def __init__(self, seed: int, count: int, limit: int, view: type[ActiveView]) -> None:
        self.rng = Random(seed)
        self.limit = limit
        self.view = view
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self.untold: list[tuple[int, int, bool]] = []
        self.next_number = 0
        for _ in range(count):
            self.join()
        self.tell_all()

    def join(self) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        newcomer = Peer(1_000_000 + number, self.limit, self.view)
        newcomer.meet(1_000_000 + other for other in self.peers)
        self.untold += [(other, number, True) for other in self.peers]
        self.peers[number] = newcomer

    def die(self, number: int) -> None:
        del self.peers[number]
        self.untold += [(other, number, False) for other in self.peers]

    def tell_all(self, fraction: float = 1.0) -> None:
        self.rng.shuffle(self.untold)
        kept = int(len(self.untold) * (1 - fraction))
        told, self.untold = self.untold[kept:], self.untold[:kept]
        for listener, subject, came in told:
            peer = self.peers.get(listener)
            if peer is not None and came:
                peer.meet([1_000_000 + subject])
            elif peer is not None:
                peer.claim(1_000_000 + subject, Status.DEAD)

    def rotate(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 10.0
            for peer in self.peers.values():
                peer.view.tick(self.now)

    def parts(self) -> int:
        """In how many pieces the graph of live peers and their neighbours falls."""
        alive = {peer.membership.me: peer for peer in self.peers.values()}
        edges: dict[PeerId, set[PeerId]] = {peer_id: set() for peer_id in alive}
        for peer_id, peer in alive.items():
            for neighbour in peer.neighbours & alive.keys():
                edges[peer_id].add(neighbour)
                edges[neighbour].add(peer_id)
        found, parts = set[PeerId](), 0
        for start in alive:
            parts += start not in found
            stack = [start]
            while stack:
                if (peer_id := stack.pop()) not in found:
                    found.add(peer_id)
                    stack += edges[peer_id]
        return parts


class NeverMended(ActiveView):
    """Keeps whom it chose first; dead neighbours just drop out. Must fall apart."""

    was_full = False

    def _fill(self, others: list[MemberState], missing: int) -> None:
        if not self.was_full:
            super()._fill(others, missing)
            self.was_full = len(self._neighbours) == self._limit

    def tick(self, now: float) -> None:
        pass

    def follow(self, change: object) -> None:
        pass


def parts_under_churn(seed: int, view: type[ActiveView], limit: int) -> int:
    """The most pieces seen within three rotations after any of many faults, deaths of most peers included."""
    cluster = Cluster(seed, 60, limit, view)
    worst = 1
    for _ in range(12):
        match cluster.rng.randrange(4) if len(cluster.peers) > 8 else 0:
            case 0:
                for _ in range(cluster.rng.randrange(10, 40)):
                    cluster.join()
            case 1:
                for number in cluster.rng.sample(sorted(cluster.peers), len(cluster.peers) // 4):
                    cluster.die(number)
            case 2:  # nearly all
                survivors = min(len(cluster.peers), cluster.rng.randrange(2, 8))
                dying = len(cluster.peers) - survivors
                for number in cluster.rng.sample(sorted(cluster.peers), dying):
                    cluster.die(number)
            case 3:
                cluster.rotate()
        cluster.tell_all(0.5)  # half of the news: the others still believe in the dead
        cluster.rotate()
        cluster.tell_all()
        cluster.rotate(2)
        worst = max(worst, cluster.parts())
    return worst


@pytest.mark.slow
def test_the_graph_of_neighbours_stays_connected_under_any_churn() -> None:
    """With four neighbours each, where chance has much more say than with 32."""
    assert max(parts_under_churn(seed, ActiveView, limit=4) for seed in range(6)) == 1
    assert parts_under_churn(0, NeverMended, limit=4) > 1


def test_a_change_costs_no_time_in_proportion_to_the_cluster() -> None:
    """At 5,000 members: apart from the list of live members, which is made once for each change."""
    peer = Peer(0)
    peer.meet(range(1, 5_000))
    view = peer.view
    begin = time.process_time()
    for step in range(2_000):
        view.tick(10.0 * step)
        view.choose()
        view.sample(3)
    assert time.process_time() - begin < 1.0  # some 40 us a step


def test_a_machine_exchanges_and_relays_with_neighbours_only() -> None:

    network = Network(3, GossipConfig(active_view=3, view_rotation_seconds=1_000_000.0))
    nodes = network.start_all(12)
    network.run(20.0, network.converged)
    network.run(2.0)
    asked: dict[int, set[PeerId]] = {}

    def record(source: GossipPeer, target: GossipPeer, message: Message) -> Message:
        if isinstance(message, Exchange | Delta):
            asked.setdefault(source.number, set()).add(target.peer_id)
        return message

    network.tamper = record
    neighbours = {node.number: set(node.gossip.view.neighbours()) for node in nodes}
    network.run(5.0)
    gossips: list[Gossip] = [node.gossip for node in nodes]
    assert all(len(gossip.view.neighbours()) == 3 for gossip in gossips)
    for number, peers in asked.items():
        assert peers <= neighbours[number]
    assert len(asked) == 12
