"""A network of gossip machines in virtual time, with cheap signatures. For tests."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from random import Random

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import (
    REPLIES,
    REQUESTS,
    Answer,
    Ask,
    Claim,
    Contact,
    ControlKind,
    Duplicate,
    Effect,
    FetchSnapshot,
    HomePush,
    Later,
    Status,
)
from p2pstore.gossip.locations.log import SIGNATURE_BYTES, OwnLog, SignedRun
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import (
    ED25519_PREFIX,
    LOCATION_BYTES,
    LocationRecord,
    LogHead,
    PeerId,
    PeerRecord,
)
from p2pstore.objects import Version, clock_from_unix_seconds
from p2pstore.wire import Failure, Message, decode_body, encode_body
from simulation.gossip_data import log_snapshot, take_push, view_snapshot
from simulation.signer import SimulatedVerifier, simulated_signature
from tests.present import present

UNIX = 1_800_000_000.0
"""Wall-clock time at the beginning of the virtual one."""


def peer_id_of(number: int) -> PeerId:
    return ED25519_PREFIX + hashlib.sha256(b"peer %d" % number).digest()


FakeVerifier = SimulatedVerifier


class FakeSigner:
    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self.signed = 0

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def sign(self, message: bytes) -> bytes:
        self.signed += 1
        return simulated_signature(self._peer_id, message)


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


def address_of(number: int) -> str:
    return f"10.0.0.{number}:17946"


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
        log.sign(FakeSigner(peer_id_of(0)))
    runs = log.since(sequence, 1 << 40)
    if not runs:
        return b""
    start = (sequence + 1 - runs[0].first_sequence) * LOCATION_BYTES
    operations = b"".join(run.operations for run in runs)
    return operations[start : start + limit_bytes // LOCATION_BYTES * LOCATION_BYTES]


def run_at(first_sequence: int, operations: bytes) -> SignedRun:
    """A run for a directory, which leaves it to others to check signatures."""
    return SignedRun(first_sequence, operations, bytes(SIGNATURE_BYTES))


class Node:
    """One process: its machine and what it should hold."""

    def __init__(self, network: Network, number: int, incarnation: int) -> None:
        self.number = number
        self.peer_id = peer_id_of(number)
        self.signer = FakeSigner(self.peer_id)
        self.gossip = Gossip(
            self.signer,
            FakeVerifier(),
            incarnation,
            lambda: peer_record(number),
            network.config,
            Random(network.rng.random()),
            wall_clock=lambda now: clock_from_unix_seconds(UNIX + now),
        )
        self.held: dict[bytes, LocationRecord] = {}
        self.answered_later: dict[int, Callable[[Message], None]] = {}
        self.duplicate = False
        self.running = True
        self.wake_at = 0.0

    def hold(self, record: LocationRecord, now: float) -> None:
        self.held[record.digest] = record
        self.gossip.hold(record, now)

    def release(self, digest: bytes, now: float) -> None:
        record = self.held.pop(digest)
        self.gossip.release(digest, record.version, now)

    def knows(self, other: Node) -> bool:
        """Whether it holds exactly what the other holds, at the other's place of its log."""
        directory = self.gossip.directory
        position = directory.position(other.gossip.member)
        if position != (other.gossip.incarnation, other.gossip.log.sequence):
            return False
        snapshot = view_snapshot(directory, other.gossip.member)
        packed = snapshot[3] if snapshot else b""
        records = {packed[i : i + 42] for i in range(0, len(packed), 42)}
        return records == {record.encode() for record in other.held.values()}


class Network:
    """Delivers in virtual time, with delay, loss and partitions. Messages really are encoded."""

    def __init__(self, seed: int, config: GossipConfig | None = None) -> None:
        self.rng = Random(seed)
        self.config = config or GossipConfig()
        self.now = 0.0
        self.loss = 0.0
        self.delay_seconds = 0.002
        self.nodes: dict[int, Node] = {}
        self.groups: dict[int, int] = {}
        self.messages = 0
        self.pushes = 0
        self.snapshots = 0
        self.refused: list[ProtocolError] = []
        self.tamper: Callable[[Node, Node, Message], Message] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._incarnation = 1000

    # --- processes ---------------------------------------------------------------------------

    def start(self, number: int, bootstrap: int | None = 0) -> Node:
        self._incarnation += 1000
        node = Node(self, number, self._incarnation)
        if bootstrap is not None and bootstrap != number:
            node.gossip.addresses.add_bootstrap([address_of(bootstrap)])
        self.nodes[number] = node
        return node

    def start_all(self, count: int) -> list[Node]:
        return [self.start(number) for number in range(count)]

    def stop(self, number: int) -> None:
        self.nodes.pop(number).running = False

    def partition(self, *groups: set[int]) -> None:
        self.groups = {n: index for index, group in enumerate(groups) for n in group}

    def heal(self) -> None:
        self.groups = {}
        self.loss = 0.0

    # --- time --------------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Run for `seconds`, or until the condition holds. Returns whether it did."""
        end = self.now + seconds
        while True:
            if until is not None and until():
                return True
            wake = min((node.wake_at for node in self.nodes.values()), default=end)
            arrive = self._events[0][0] if self._events else end
            step = min(wake, arrive)
            if step >= end:
                self.now = end
                return until is not None and until()
            self.now = max(self.now, step)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for node in list(self.nodes.values()):
                if node.wake_at <= self.now:
                    self.do(node, node.gossip.tick(self.now))
                    self._push(node)
                self.rest(node)

    def rest(self, node: Node) -> None:
        due = node.gossip.next_tick(self.now)
        # A machine that is always due would not let time pass.
        node.wake_at = due if due > self.now else self.now + 0.0005

    def converged(self) -> bool:
        nodes = list(self.nodes.values())
        ids = {node.peer_id for node in nodes}
        return all(
            {state.peer_id for state in node.gossip.membership.live()} == ids
            and all(node.knows(other) for other in nodes if other is not node)
            for node in nodes
        )

    # --- effects -----------------------------------------------------------------------------

    def do(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask():
                    self._ask(node, effect)
                case FetchSnapshot():
                    self._fetch(node, effect)
                case Contact():
                    self._contact(node, effect)
                case Answer():
                    node.answered_later.pop(effect.token)(effect.reply)
                case Duplicate():
                    node.duplicate = True
                    if self.nodes.get(node.number) is node:
                        self.stop(node.number)

    def reachable(self, source: Node, peer_id: PeerId) -> Node | None:
        for target in self.nodes.values():
            if target.peer_id == peer_id and target is not source:
                same = self.groups.get(source.number) == self.groups.get(target.number)
                return target if same and self.rng.random() >= self.loss else None
        return None

    def _delay(self) -> float:
        return self.rng.uniform(0.5, 1.5) * self.delay_seconds

    def _ask(self, node: Node, ask: Ask) -> None:
        self.messages += 1
        token = ask.token
        answered = [False]

        def finish(reply: Message | None) -> None:
            if answered[0] or not node.running:
                return
            answered[0] = True
            try:
                self.do(node, node.gossip.answered(token, reply, self.now))
            except ProtocolError as error:
                self.refused.append(error)
            self.rest(node)

        def arrive() -> None:
            target = self.reachable(node, ask.peer_id)
            if target is None:
                return

            def answer(reply: Message) -> None:
                if self.reachable(target, node.peer_id) is node:
                    self.later(self._delay(), lambda: finish(self._carried(target, node, ask, reply)))

            reply = self.serve(node, target, ask.kind, ask.request)
            if isinstance(reply, Later):
                target.answered_later[reply.token] = answer
            elif reply is not None:
                answer(reply)

        self.later(self._delay(), arrive)
        self.later(ask.timeout_seconds, lambda: finish(None))

    def serve(
        self, source: Node, target: Node, kind: ControlKind, request: Message
    ) -> Message | Later | None:
        if self.tamper is not None:
            request = self.tamper(source, target, request)
        request = decode_body(REQUESTS[kind], encode_body(request))
        try:
            reply, effects = target.gossip.serve(source.peer_id, kind, request, self.now)
        except ProtocolError as error:
            self.refused.append(error)
            return None
        self.do(target, effects)
        self.rest(target)
        return reply

    def _carried(self, target: Node, source: Node, ask: Ask, reply: Message) -> Message:
        """A reply as it arrives."""
        if isinstance(reply, Failure):
            return reply
        if self.tamper is not None:
            reply = self.tamper(target, source, reply)
        return decode_body(REPLIES[ask.kind], encode_body(reply))

    def _fetch(self, node: Node, fetch: FetchSnapshot) -> None:
        def arrive() -> None:
            if not node.running:
                return
            target = self.reachable(node, fetch.peer_id)
            known = log_snapshot(target.gossip, fetch.member) if target else None
            head, packed = known if known else (None, b"")
            self.snapshots += head is not None
            try:
                self.do(node, node.gossip.snapshot_fetched(fetch.token, head, packed, self.now))
            except ProtocolError as error:
                self.refused.append(error)
            self.rest(node)

        self.later(self._delay(), arrive)

    def _contact(self, node: Node, contact: Contact) -> None:
        def arrive() -> None:
            if not node.running:
                return
            for other in list(self.nodes.values()):
                if address_of(other.number) in contact.addresses:
                    target = self.reachable(node, other.peer_id)
                    if target is not None:
                        self.do(node, node.gossip.contacted(target.peer_id, contact.addresses, self.now))
                        self.rest(node)
                        return
            node.gossip.contact_failed(contact.addresses, self.now)
            self.rest(node)

        self.later(self._delay(), arrive)

    def _push(self, node: Node) -> None:
        for push in node.gossip.partitions.take_pushes(self.now):
            self._push_one(node, push)

    def _push_one(self, node: Node, push: HomePush) -> None:
        answered = [False]

        def finish(behind: list[int] | None, rivals: Sequence[Location]) -> None:
            if not answered[0] and node.running:
                answered[0] = True
                node.gossip.partitions.pushed(push.token, behind, rivals, self.now)
                self.rest(node)

        def arrive() -> None:
            target = self.reachable(node, push.peer_id)
            if target is not None:
                taken = take_push(target.gossip, node.gossip.member, push.message, self.now)
                self.rest(target)
                if self.reachable(target, node.peer_id) is node:
                    self.later(self._delay(), lambda: finish(*taken))

        self.pushes += 1
        self.later(self._delay(), arrive)
        self.later(push.timeout_seconds, lambda: finish(None, ()))
