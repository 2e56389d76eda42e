"""The simulator's gossip, for tests of single rules; records and logs to feed machines with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Ask, Claim, ControlKind, Status
from p2pstore.gossip.locations.log import SIGNATURE_BYTES, OwnLog, SignedRun
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord, LogHead, PeerId, PeerRecord
from p2pstore.objects import Version
from p2pstore.wire import Message, encode_body
from simulation.gossip_cluster import GossipCluster, view_of
from simulation.gossip_peer import GossipPeer, address_of
from simulation.network import Faults
from simulation.signer import SimulatedSigner, peer_id_of
from tests.present import present


def peer_record(number: int, **fields: object) -> PeerRecord:
    values: dict[str, object] = {
        "format": 1,
        "peer_id": peer_id_of(number),
        "cluster": "default",
        "name": f"peer-{number}",
        "incarnation": 1,
        "sequence": 1,
        "host_id": b"host",
        "control": [address_of(number)],
        "data": [],
        "socket": "",
        "transports": [],
        "segments": [],
        "memory_capacity": 0,
        "memory_used": 0,
        "ssd_capacity": 0,
        "ssd_used": 0,
        "load_permille": 0,
        "head": LogHead(),
    }
    return PeerRecord(**(values | fields))  # type: ignore[arg-type]  # fields by name


def bury(membership: Membership, numbers: Iterable[int], now: float, incarnation: int = 0) -> None:
    """These members are dead: another one says so (of the incarnation that is known, or a higher one), and this
    peer's own probes of them failed."""
    for number in numbers:
        state = present(membership.get(peer_id_of(number)))
        inform_of_death(membership, state.peer_id, now, incarnation)


def inform_of_death(membership: Membership, peer_id: PeerId, now: float, incarnation: int = 0) -> None:
    """`bury` for one of any name."""
    state = present(membership.get(peer_id))
    claimed = max(incarnation, state.incarnation)
    if not state.alive:
        return
    membership.observe_claims([Claim(peer_id, claimed, int(Status.DEAD), 7)], now)
    membership.suspect(peer_id, now)
    membership._judge(state, membership.suspects._suspicions[peer_id], now)
    assert state.status is Status.DEAD


def digest_of(number: int) -> bytes:
    return hashlib.blake2b(b"key %d" % number, digest_size=16).digest()


def location(number: int, clock: int = 1, writer: int = 1) -> LocationRecord:
    return LocationRecord(digest_of(number), Version(clock, writer), number & 0xFFFF, 1)


def operations_after(log: OwnLog, sequence: int, limit_bytes: int = 1 << 40) -> bytes:
    """The operations in a log after `sequence`, packed; none when the log is cut behind there."""
    while log.signed < log.sequence:
        log.sign(SimulatedSigner(peer_id_of(0)))
    runs = log.since(sequence, 1 << 40)
    if not runs:
        return b""
    start = (sequence + 1 - runs[0].first_sequence) * LOCATION_BYTES
    operations = b"".join(run.operations for run in runs)
    return operations[start : start + limit_bytes // LOCATION_BYTES * LOCATION_BYTES]


def run_at(first_sequence: int, operations: bytes) -> SignedRun:
    """A run for a directory, which leaves it to others to check signatures."""
    return SignedRun(first_sequence, operations, bytes(SIGNATURE_BYTES))


class Node(GossipPeer):
    """A peer whose clock is that of the network."""

    cluster: Network

    @property
    def _started_clock_at(self) -> float:
        return 0.0

    def choose_incarnation(self) -> int:
        return self.cluster.incarnation

    def rest(self) -> None:
        """Have it act on what a test told its machine."""
        self._next_tick = None
        self.settle()

    def knows(self, other: GossipPeer) -> bool:
        """Whether it holds exactly what the other holds, at the other's place of its log."""
        position = self.gossip.directory.position(other.member)
        held = {record.encode() for record in other.held.values()}
        known = view_of(self.gossip, other)
        return position == (other.gossip.incarnation, other.gossip.log.sequence) and known == held


class Network(GossipCluster):
    """The simulator's peers, with one clock; they start and stop by number, and keep nothing for their next life."""

    def __init__(self, seed: int, config: GossipConfig | None = None) -> None:
        faults = Faults(minimum_latency=0.001, maximum_latency=0.003)
        super().__init__(seed, 0, config=config, faults=faults, make_peer=Node)
        self.keeps_truth = False
        self.incarnation = 1000

    @property
    def now(self) -> float:
        return self.kernel.now

    @now.setter
    def now(self, now: float) -> None:
        self.kernel.now = now

    @property
    def nodes(self) -> dict[int, Node]:
        return self.by_number  # type: ignore[return-value]  # made by make_peer

    def start(self, number: int, bootstrap: int | None = 0) -> Node:
        self.incarnation += 1000
        self._numbers = number
        self.add_peer().boot([] if bootstrap is None else [address_of(bootstrap)])
        return self.nodes[number]

    def start_all(self, count: int) -> list[Node]:
        return [self.start(number) for number in range(count)]

    def stop(self, number: int) -> None:
        """Its host goes as well: nothing refuses connections."""
        node = self.nodes[number]
        node.crash(silent=True)
        self.remove_peer(node)

    def heal(self) -> None:
        self.network.heal()
        self.network.faults.loss = 0.0

    def converged(self) -> bool:
        """Whether all know the same, record by record, and that is the truth."""
        return not self.disagreements(1)

    def serve(self, source: Node, target: Node, kind: ControlKind, request: Message) -> None:
        """A request that the source's machine did not ask for."""
        ask = Ask(-1, target.peer_id, kind, request, 1.0)
        target.control.serve(source.control, ask, encode_body(request))
        target.rest()
