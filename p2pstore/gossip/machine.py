"""Gossip as one state machine: membership, logs, directory and cluster records kept alike
everywhere. Pure.

How it is driven: whatever happens is fed in (`serve`, `answered`, `contacted`, `hold`, ...), then
`tick` does what is due. Feeding in may make something due at once, so ask `next_tick` again after
every event; and feed in everything that has arrived before `tick`, which judges timeouts. Each
`Ask`, `FetchSnapshot` and `Contact` is answered exactly once, by `answered`, `snapshot_fetched`,
and `contacted` or `contact_failed`.

How news travels. A new operation, member or cluster record goes to three random members at once,
and those for whom it is new do the same. What that misses, one exchange with one random member
brings: every 67 ms while there are differences, once a second when there are none. A reader behind
everybody's ring fetches a snapshot from the log's owner. A key's home peers are told of its
locations directly (`pushes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec

from p2pstore.errors import ProtocolError
from p2pstore.gossip.anti_entropy import (
    Knowledge,
    News,
    check_claims,
    pack_buckets,
    read_buckets,
    read_digest,
)
from p2pstore.gossip.catch_up import CatchUp
from p2pstore.gossip.cluster_records import (
    DEFAULT_KEPT_SECONDS,
    DEFAULT_LIMIT,
    ClusterRecords,
)
from p2pstore.gossip.contacts import Contacts
from p2pstore.gossip.directory import Directory, DirectoryConfig
from p2pstore.gossip.effects import (
    Ask,
    Contact,
    Duplicate,
    Effect,
    FetchSnapshot,
    Push,
    SnapshotHead,
)
from p2pstore.gossip.floor_stamps import pack_stamps, unpack_stamps
from p2pstore.gossip.floor_sync import FloorAnswer, FloorSync
from p2pstore.gossip.fresh_news import FreshNews
from p2pstore.gossip.log import DEFAULT_RING_LIMIT, OwnLog
from p2pstore.gossip.membership import (
    MAX_INCARNATION,
    MemberChange,
    Membership,
    MembershipConfig,
    MemberState,
)
from p2pstore.gossip.messages import (
    Ack,
    Claim,
    ControlKind,
    Delta,
    Exchange,
    ExchangeReply,
    Leave,
    Ping,
    Status,
)
from p2pstore.gossip.placement import batch_by_home, homes, rank
from p2pstore.gossip.records import (
    ClusterRecord,
    LocationRecord,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    Signer,
    Verifier,
    format_peer_id,
    sign_peer_record,
)
from p2pstore.objects import Version
from p2pstore.wire import Code, Empty, Failure, Message

__all__ = [
    "Ask",
    "Contact",
    "Duplicate",
    "Effect",
    "FetchSnapshot",
    "Gossip",
    "GossipConfig",
    "Push",
    "SnapshotHead",
]

MAX_IN_FLIGHT_EXCHANGES: Final = 3
MAX_PUSHED_AT_ONCE: Final = 8192
"""Operations in one batch of home pushes; the rest goes with the next."""
HOUSEKEEPING_SECONDS: Final = 0.25
LOST_ANSWER_SECONDS: Final = 120.0
"""An effect that was not answered for this long is taken as failed."""


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """Timing, fan-out and bounds of one peer's gossip."""

    cluster: str = "default"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    ring_limit: int = DEFAULT_RING_LIMIT
    cluster_record_limit: int = DEFAULT_LIMIT
    floor_kept_seconds: float = DEFAULT_KEPT_SECONDS
    exchange_seconds: float = 0.067
    idle_exchange_seconds: float = 1.0
    exchange_timeout_seconds: float = 5.0
    delta_bytes: int = 160 * 1024
    eager_fanout: int = 3
    eager_seconds: float = 0.05
    """Shortest time between two eager messages to the same number of members."""
    eager_bytes: int = 128 * 1024
    push_seconds: float = 0.02
    head_seconds: float = 0.2
    """Shortest time between two signatures made only because the log moved on."""
    behind_seconds: float = 1.0
    """How long a view may stand still behind its owner's head before a snapshot is fetched."""
    snapshot_timeout_seconds: float = 60.0
    forget_seconds: float = 60.0
    """How long a dead member's locations are kept, hidden."""
    leave_fanout: int = 8
    leave_timeout_seconds: float = 1.0
    defence_margin: int = 16
    """A record of this peer's identity whose incarnation (ms of its start) is less than this above its
    own is an older process defending itself: this one gives way."""


@dataclass(slots=True)
class _Asked:
    kind: ControlKind | None
    """None for a snapshot."""
    peer_id: PeerId
    member: Member
    sent_at: float
    floors_epoch: int = 0
    """Of an exchange: the epoch that it asks about."""


class Gossip:
    """See the module's docstring.

    `describe` returns what this peer offers now; the machine fills in incarnation, sequence, head,
    horizon and leaving, and signs. `incarnation` is that of this start: wall-clock ms, above the last one
    used. `wall_clock(now)` is the hybrid clock's reading of the wall clock at the monotonic time `now`.
    """

    def __init__(
        self,
        signer: Signer,
        verifier: Verifier,
        incarnation: int,
        describe: Callable[[], PeerRecord],
        config: GossipConfig,
        rng: Random,
        *,
        wall_clock: Callable[[float], int],
        accepts_clock: Callable[[int, float], bool] = lambda clock, now: True,
        accepts_peer: Callable[[PeerId], bool] = lambda peer_id: True,
    ) -> None:
        self.peer_id: PeerId = signer.peer_id
        self.config = config
        self.membership = Membership(signer.peer_id, incarnation, config.membership, rng)
        self.member: Member = self.membership.own.member
        self.log = OwnLog(incarnation, config.ring_limit)
        self.directory = Directory(config.directory)
        self.cluster_records = ClusterRecords(
            config.cluster_record_limit, kept_seconds=config.floor_kept_seconds
        )
        self.floors = FloorSync(self.member, self.cluster_records, accepts_clock, wall_clock)
        self.contacts = Contacts(rng)
        self.leaving = False
        self.knowledge = Knowledge(
            config.cluster,
            self.membership,
            self.directory,
            self.log,
            self.cluster_records,
            verifier,
            accepts_clock,
            rng,
            accepts_peer,
        )
        self._signer = signer
        self._describe = describe
        self._rng = rng
        self._tokens = 0
        self._asked: dict[int, _Asked] = {}
        self._offer_changed = True
        self._signed_at = -math.inf
        self._defended = False
        self._duplicate: PeerRecord | None = None

        self._probe_at = -math.inf
        self._recontact_at = -math.inf
        self._housekeeping_at = -math.inf
        self._exchange_seconds = config.exchange_seconds
        self._exchanged_at = -math.inf
        self._exchange_with: dict[PeerId, None] = {}
        self._cluster_differs: set[PeerId] = set()

        self._eager_at = -math.inf
        self._fresh = FreshNews(self.knowledge)
        self._catch_up = CatchUp(self.directory, config.ring_limit, config.behind_seconds)
        self._pushed_at = -math.inf
        self._to_push: list[tuple[int, bytes]] = []
        self._forget_at: dict[Member, float] = {}
        self._changes: list[MemberChange] = []
        self._arrived: list[tuple[ClusterRecord, SignedRecord]] = []
        self._placement: tuple[int, list[Member]] = (-1, [])

    # --- this peer ---------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Of this peer's log and record. Normally that of the start; see `defence_margin`."""
        return self.log.incarnation

    @property
    def joined(self) -> bool:
        """Whether a contact has answered since the start."""
        return self.contacts.succeeded_once

    @property
    def alone_by_configuration(self) -> bool:
        """Whether there is nobody else: no member, none that was, and no address to try."""
        return self.contacts.is_empty and len(self.membership) == 1

    def offer_changed(self) -> None:
        """`describe` would say something else now: sign a new record before the next is sent."""
        self._offer_changed = True

    def hold(self, record: LocationRecord, now: float) -> None:
        """This peer holds a version of a key from now on."""
        self._note_operation(self.log.add(record))

    def release(self, digest: bytes, version: Version, now: float) -> None:
        """This peer no longer holds that version."""
        self._note_operation(self.log.remove(digest, version))

    def record(self, now: float) -> SignedRecord:
        """This peer's own record, signed anew when something changed."""
        own = self.membership.own
        known = own.record
        interval = max(self.config.head_seconds, 0.01 * len(self.membership.live()))
        moved = known is not None and (
            known.head.sequence != self.log.sequence
            or known.floors_horizon != self.cluster_records.horizon_hash
        )
        if self._offer_changed or (moved and now >= self._signed_at + interval):
            record = msgspec.structs.replace(
                self._describe(),
                peer_id=self.peer_id,
                cluster=self.config.cluster,
                incarnation=self.incarnation,
                sequence=known.sequence + 1 if known else 1,
                head=self.log.head,
                leaving=self.leaving,
                floors_horizon=self.cluster_records.horizon_hash,
            )
            self.membership.observe_record(record, sign_peer_record(record, self._signer), now)
            self._offer_changed, self._signed_at = False, now
        assert own.signed is not None
        return own.signed

    def pushes(self, now: float) -> list[Push]:
        """This peer's fresh operations for the keys' homes: at once, then at most every 20 ms."""
        if not self._to_push or now < self._pushed_at + self.config.push_seconds:
            return []
        self._pushed_at = now
        fresh = self._to_push[:MAX_PUSHED_AT_ONCE]
        del self._to_push[:MAX_PUSHED_AT_ONCE]
        pushes = []
        for member, (sequences, operations) in batch_by_home(fresh, self._members()).items():
            state = self.membership.resolve(member)
            if state is not None and state is not self.membership.own:
                pushes.append(Push(state.peer_id, self.incarnation, sequences, operations))
        return pushes

    def offer_cluster_record(self, record: ClusterRecord, signed: SignedRecord, now: float) -> bool:
        """Keep and spread a verified cluster record. Whether it was new."""
        return self.cluster_records.offer(record, signed)

    def take_cluster_records(self) -> list[tuple[ClusterRecord, SignedRecord]]:
        """New cluster records that gossip brought since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_changes(self) -> list[MemberChange]:
        """Status changes of members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def leave(self, now: float) -> list[Effect]:
        """Tell up to eight members that this peer goes. After it, `tick` starts nothing new."""
        self.leaving = self._offer_changed = True
        signed = self.record(now)
        others = self.membership.others()
        self.membership.leave(now)
        return [
            self._ask(state.peer_id, ControlKind.LEAVE, Leave(signed), now)
            for state in self._sample(others, self.config.leave_fanout)
        ]

    # --- what is known -----------------------------------------------------------------------

    def doubts(self, member: Member, version: Version, now: float) -> bool:
        """Whether the member's copy of this version may have been removed while it was away."""
        state = self.membership.resolve(member)
        return self.floors.doubts(member, state.record if state else None, version, now)

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, best first; this one may be among them."""
        return self._peer_ids(homes(digest, self._members()))

    def rank(self, digest: bytes) -> list[PeerId]:
        """The other live members in rendezvous order for a key."""
        return [p for p in self._peer_ids(rank(digest, self._members())) if p != self.peer_id]

    def name_of(self, peer_id: PeerId) -> str:
        """The peer's name, or the end of its id where the name is not known."""
        state = self.membership.get(peer_id)
        if state is not None and state.record is not None and state.record.name:
            return state.record.name
        return format_peer_id(peer_id)[-8:]

    def addresses_of(self, peer_id: PeerId) -> list[str]:
        """Control addresses of a peer, from its record or the address book."""
        state = self.membership.get(peer_id)
        if state is not None and state.record is not None:
            return list(state.record.control)
        return list(self.contacts.book().get(peer_id, ()))

    def snapshot(self, member: Member) -> tuple[SnapshotHead, bytes] | None:
        """A member's whole location set as known here, packed; None when nothing is known."""
        if member == self.member:
            head = self.log.head
            return SnapshotHead(self.incarnation, head.sequence, head.set_hash), self.log.snapshot()
        known = self.directory.snapshot(member)
        return None if known is None else (SnapshotHead(*known[:3]), known[3])

    def address_book(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Where the members (dead ones too) were last, for the state directory."""
        book = self.contacts.book()
        for state in self.membership.states():
            if state.record is not None and state.record.control and state.peer_id != self.peer_id:
                book[state.peer_id] = tuple(state.record.control)
        book.pop(self.peer_id, None)
        return list(book.items())

    def load_address_book(self, book: Iterable[tuple[PeerId, Sequence[str]]]) -> None:
        """Peers of an earlier run, tried while this peer knows nobody."""
        for peer_id, addresses in book:
            self.contacts.add(addresses, peer_id, bootstrap=False)

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Addresses to join through, each of another peer."""
        for address in addresses:
            self.contacts.add((address,))

    def expel(self) -> list[PeerId]:
        """Forget the members, and what they hold, that `accepts_peer` does not accept any more."""
        accepts = self.knowledge.accepts_peer
        gone = [s for s in self.membership.states() if not accepts(s.peer_id)]
        for state in gone:
            self.membership.expel(state.peer_id)
            self.directory.drop(state.member)
            self._forget_at.pop(state.member, None)
        return [state.peer_id for state in gone]

    # --- events ------------------------------------------------------------------------------

    def serve(
        self, sender: PeerId, kind: int, request: Message, now: float
    ) -> tuple[Message, list[Effect]]:
        """Answer a peer's request. Raises `ProtocolError`, and changes nothing, for nonsense."""
        match request:
            case Ping():
                reply = self._serve_ping(sender, request, now)
            case Exchange():
                reply = self._serve_exchange(sender, request, now)
            case Delta():
                self._take_delta(sender, request, now)
                self._heard(sender, now)
                reply = Empty()
            case Leave():
                pair = self.knowledge.check_record(request.record)
                if pair is not None and (pair[0].peer_id != sender or not pair[0].leaving):
                    raise ProtocolError("a farewell that is not the sender's own")
                self._take_delta(sender, Delta([request.record], [], [], []), now)
                reply = Empty()
            case _:
                reply = Failure(int(Code.UNSUPPORTED), f"requests of kind {kind} are not answered")
        return reply, self._consequences(now)

    def answered(self, token: int, reply: Message | None, now: float) -> list[Effect]:
        """The outcome of an `Ask`: its reply, a `Failure`, or None when nothing came in time.

        Raises `ProtocolError`, having taken nothing in, when the reply is nonsense.
        """
        asked = self._asked.pop(token, None)
        if asked is None:
            return []
        if reply is None:
            if asked.kind == ControlKind.PING:
                self.membership.on_probe_failed(asked.peer_id, asked.sent_at)
                return []
            return self.connection_lost(asked.peer_id, now)
        if isinstance(reply, Ack):
            check_claims(reply.claims)
            self._heard(asked.peer_id, now)
            self.membership.on_ack(asked.peer_id, now)
            self.membership.observe_claims(
                [*reply.claims, self._self_claim(asked.peer_id, reply.incarnation)], now
            )
        elif isinstance(reply, ExchangeReply):
            return self._exchanged(asked, reply, now) + self._consequences(now)
        else:
            self.membership.heard(asked.peer_id, now)
        return self._consequences(now)

    def snapshot_fetched(
        self, token: int, head: SnapshotHead | None, packed: bytes, now: float
    ) -> list[Effect]:
        """The outcome of a `FetchSnapshot`; `head` None when it failed.

        Raises `ProtocolError`, and changes nothing, for a snapshot that its owner did not sign; it
        is fetched again after a while.
        """
        asked = self._asked.pop(token, None)
        if asked is None:
            return []
        # A success ends this when the view is seen to have caught up.
        self._catch_up.failed(asked.member, now)
        if head is None:
            return []
        if not 0 <= head.sequence < MAX_INCARNATION:
            raise ProtocolError(f"a snapshot at sequence {head.sequence}")
        if self.directory.install_snapshot(
            asked.member, head.incarnation, head.sequence, head.set_hash, packed
        ):
            self.floors.heard_of(packed, now)
            self._hurry()
        return []

    def contacted(self, peer_id: PeerId, addresses: Sequence[str], now: float) -> list[Effect]:
        """A peer answered (and was admitted) at these addresses: exchange everything with it."""
        self.contacts.succeeded(addresses, peer_id, now)
        if peer_id != self.peer_id:
            self._exchange_with[peer_id] = None
        return []

    def contact_failed(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Nobody answered at these addresses (exactly those of the `Contact`)."""
        self.contacts.failed(addresses, now)
        return []

    def connection_lost(self, peer_id: PeerId, now: float) -> list[Effect]:
        """A connection to the peer failed: no verdict, but a reason to probe it at once."""
        state = self.membership.get(peer_id)
        probing = any(
            a.peer_id == peer_id and a.kind == ControlKind.PING for a in self._asked.values()
        )
        if state is None or state.status != Status.ALIVE or probing or self.leaving:
            return []
        return [self._ping(state, now)]

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Do what is due, after all that arrived was fed in. Timeouts are judged here only."""
        if self.leaving:
            return []
        self.membership.tick(now)
        self.record(now)
        effects: list[Effect] = self._consequences(now)
        effects += self._probe(now)
        effects += self._start_exchanges(now)
        effects += self._spread_fresh(now)
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + HOUSEKEEPING_SECONDS
            effects += self._housekeep(now)
        alone = not self.membership.others()
        for addresses in self.contacts.due(now, self._is_live, alone):
            effects.append(Contact(addresses))
        return effects

    def next_tick(self, now: float) -> float:
        """When `tick`, or `pushes`, has something to do next."""
        if self.leaving:
            return math.inf
        due = min(
            self.membership.next_tick(),
            self._probe_at,
            self._recontact_at,
            self._housekeeping_at,
            self.contacts.next_due(),
        )
        if self._to_push:
            due = min(due, self._pushed_at + self.config.push_seconds)
        if self.membership.others():
            due = min(due, self._exchange_due())
            if self._fresh:
                due = min(due, self._eager_at)
        if self._exchange_with:
            due = now
        return max(due, now)

    # --- requests of others ------------------------------------------------------------------

    def _serve_ping(self, sender: PeerId, ping: Ping, now: float) -> Message:
        check_claims(ping.claims)
        if not 0 <= ping.incarnation < MAX_INCARNATION:
            raise ProtocolError(f"a ping for incarnation {ping.incarnation}")
        claims = list(ping.claims)
        if ping.incarnation > self.membership.own.incarnation:
            # Somebody made it up, or this peer's clock went back: be above it, or nobody listens.
            claims.append(Claim(self.peer_id, ping.incarnation, int(Status.SUSPECT), self.member))
        self._heard(sender, now)
        self.membership.observe_claims(claims, now)
        return Ack(self.membership.own.incarnation, self._claims_for(sender))

    def _serve_exchange(self, sender: PeerId, request: Exchange, now: float) -> Message:
        theirs = read_digest(request.digest)
        buckets = read_buckets(request.cluster_buckets)
        check_claims(request.claims)
        self._heard(sender, now)
        self.membership.observe_claims(request.claims, now)
        self.record(now)
        floors = self.floors.answer(request.floors_epoch, request.floors_hash, now)
        differs = request.cluster_hash != self.cluster_records.hash
        delta = self.knowledge.delta_for(
            theirs, self.config.delta_bytes, buckets if differs else None
        )
        if has_news(delta):
            self._hurry()
        return ExchangeReply(
            delta,
            self.knowledge.digest(),
            self.cluster_records.hash,
            pack_buckets(self.cluster_records.bucket_hashes) if differs else b"",
            floors.epoch_end,
            pack_stamps(floors.seen),
            pack_stamps(floors.horizon),
        )

    def _exchanged(self, asked: _Asked, reply: ExchangeReply, now: float) -> list[Effect]:
        peer_id = asked.peer_id
        theirs = read_digest(reply.digest)
        buckets = read_buckets(reply.cluster_buckets)
        floors = FloorAnswer(
            reply.floors_epoch,
            unpack_stamps(reply.floors_seen),
            unpack_stamps(reply.floors_horizon),
        )
        news = self._take_delta(peer_id, reply.delta, now)
        differs = reply.cluster_hash != self.cluster_records.hash
        self.floors.learn(floors, asked.floors_epoch, now, same_now=not differs)
        (self._cluster_differs.add if differs else self._cluster_differs.discard)(peer_id)
        self.record(now)
        delta = self.knowledge.delta_for(
            theirs, self.config.delta_bytes, buckets if differs else None
        )
        if news.anything or has_news(delta):
            self._hurry()
        else:
            self._exchange_seconds = min(
                1.5 * self._exchange_seconds, self.config.idle_exchange_seconds
            )
        if has_news(delta) or delta.claims:
            return [self._ask(peer_id, ControlKind.DELTA, delta, now)]
        return []

    def _take_delta(self, sender: PeerId, delta: Delta, now: float) -> News:
        checked = self.knowledge.check(delta, now)
        news = self.knowledge.apply(checked, now)
        self.membership.heard(sender, now)
        for chunk in checked.logs:
            self.floors.heard_of(chunk.operations, now)
        for record in news.own:
            self._own_record_seen(record, now)
        self._fresh.add(news, sender)
        self._arrived += news.cluster_records
        if news.anything:
            self._hurry()
        return news

    def _heard(self, peer_id: PeerId, now: float) -> None:
        """Something came unasked, or a probe was answered: never the reply to an exchange."""
        self.membership.heard(peer_id, now)
        state = self.membership.get(peer_id)
        if not self._is_live(peer_id) and not (state is not None and state.leaving):
            # It lives: its record is missing here, or it should hear that it is held dead.
            self._exchange_with[peer_id] = None

    def _own_record_seen(self, record: PeerRecord, now: float) -> None:
        """A record that this peer's key signed but this process did not: its identity is used
        twice.

        Records of a past life are lower and never get here. The newer process is to go, but at
        first it sees lower records only. So the older one makes itself just higher: then the newer
        one sees that somebody alive signs with its key. Each defends itself once, so one of them
        goes.
        """
        defended = record.incarnation < self.incarnation + self.config.defence_margin
        if self._defended or defended:
            self._duplicate = record
            return
        if record.incarnation + 1 >= MAX_INCARNATION:
            return
        self._defended = self._offer_changed = True
        # Just above the other record, and not above what refutations have raised the claims to: by that
        # little the other one tells a defence from a third process.
        self.log.restart(record.incarnation + 1)
        self._to_push.clear()

    # --- what tick starts --------------------------------------------------------------------

    def _probe(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        config = self.config.membership
        if now >= self._probe_at:
            self._probe_at = now + config.probe_interval_seconds
            state = self.membership.next_probe()
            if state is not None:
                effects.append(self._ping(state, now))
        if now >= self._recontact_at:
            self._recontact_at = now + config.recontact_interval_seconds
            state = self.membership.recontact()
            if state is not None:
                effects.append(self._ping(state, now))
        return effects

    def _exchange_due(self) -> float:
        in_flight = sum(a.kind == ControlKind.EXCHANGE for a in self._asked.values())
        if in_flight >= MAX_IN_FLIGHT_EXCHANGES:
            return math.inf
        if self.membership.has_rumors:
            return self._exchanged_at + self.config.exchange_seconds
        return self._exchanged_at + self._exchange_seconds

    def _start_exchanges(self, now: float) -> list[Effect]:
        wanted, self._exchange_with = self._exchange_with, {}
        under_way = {a.peer_id for a in self._asked.values() if a.kind == ControlKind.EXCHANGE}
        effects: list[Effect] = [
            self._exchange(peer_id, now, wanted=True)
            for peer_id in wanted
            if peer_id not in under_way
        ]
        if not effects and now >= self._exchange_due():
            others = self.membership.others()
            if others:
                effects.append(self._exchange(self._rng.choice(others).peer_id, now))
        return effects

    def _exchange(self, peer_id: PeerId, now: float, *, wanted: bool = False) -> Effect:
        self._exchanged_at = now
        buckets = b""
        if peer_id in self._cluster_differs:
            buckets = pack_buckets(self.cluster_records.bucket_hashes)
        epoch, epoch_hash = self.floors.question(
            now, at_once=wanted, soon=self._shows_other_horizon(peer_id)
        )
        request = Exchange(
            self.knowledge.digest(),
            self.cluster_records.hash,
            buckets,
            self._claims_for(peer_id),
            epoch,
            epoch_hash,
        )
        ask = self._ask(peer_id, ControlKind.EXCHANGE, request, now)
        self._asked[ask.token].floors_epoch = epoch
        return ask

    def _shows_other_horizon(self, peer_id: PeerId) -> bool:
        state = self.membership.get(peer_id)
        return (
            state is not None
            and state.record is not None
            and state.record.floors_horizon != self.cluster_records.horizon_hash
        )

    def _spread_fresh(self, now: float) -> list[Effect]:
        if now < self._eager_at or not self._fresh:
            return []
        others = self.membership.others()
        if not others:
            self._fresh.clear()
            return []
        self._eager_at = now + self.config.eager_seconds
        effects: list[Effect] = []
        for state in self._sample(others, len(others)):
            claims = self._claims_for(state.peer_id)
            delta = self._fresh.delta_for(state.peer_id, self.config.eager_bytes, claims)
            if delta is not None:
                effects.append(self._ask(state.peer_id, ControlKind.DELTA, delta, now))
                if len(effects) == self.config.eager_fanout:
                    break
        self._fresh.clear()
        return effects

    def _housekeep(self, now: float) -> list[Effect]:
        for state in self.membership.expire(now):
            self.directory.drop(state.member)
        self.directory.expire_early(now)
        for member in [m for m, due in self._forget_at.items() if due <= now]:
            del self._forget_at[member]
            self.directory.forget(member)
        self.floors.housekeep(now, alone=self.alone_by_configuration, shown=self._shown_horizon)
        lost = [t for t, a in self._asked.items() if a.sent_at + LOST_ANSWER_SECONDS < now]
        for token in lost:
            del self._asked[token]
        return self._fetch_snapshots(now)

    def _fetch_snapshots(self, now: float) -> list[Effect]:
        fetching = {a.member for a in self._asked.values() if a.kind is None}
        timeout = self.config.snapshot_timeout_seconds
        return [
            FetchSnapshot(
                self._token(None, state.peer_id, state.member, now),
                state.peer_id,
                state.member,
                timeout,
            )
            for state in self._catch_up.due(self.membership.others(), fetching, now)
        ]

    # --- inside ------------------------------------------------------------------------------

    def _react(self, now: float) -> None:
        """Follow members' changes: hide what the dead hold, show what the living do."""
        for change in self.membership.take_changes():
            self._changes.append(change)
            if change.new > Status.SUSPECT:
                self.floors.went(change.member)
                self.directory.hide(change.member)
                self._forget_at[change.member] = now + self.config.forget_seconds
                self._cluster_differs.discard(change.peer_id)
            else:
                if change.old is None or change.old > Status.SUSPECT:
                    self.floors.came(change.member)
                self.directory.show(change.member)
                self._forget_at.pop(change.member, None)
        del self._changes[: -self.config.membership.max_members]

    def _consequences(self, now: float) -> list[Effect]:
        """What every event may have caused: members changed, this peer's identity used twice."""
        self._react(now)
        if self._duplicate is None:
            return []
        duplicate, self._duplicate = self._duplicate, None
        return [Duplicate(duplicate)]

    def _note_operation(self, operation: bytes | None) -> None:
        if operation is None:
            return
        sequence = self.log.sequence
        self._to_push.append((sequence, operation))
        self._fresh.add_own(sequence)
        self._hurry()

    def _hurry(self) -> None:
        self._exchange_seconds = self.config.exchange_seconds

    def _claims_for(self, peer_id: PeerId) -> list[Claim]:
        return self.membership.claims((peer_id,))

    def _self_claim(self, peer_id: PeerId, incarnation: int) -> Claim:
        """What a peer's own acknowledgement says: it is alive, at this incarnation."""
        state = self.membership.get(peer_id)
        bounded = incarnation if 0 <= incarnation < MAX_INCARNATION else 0
        return Claim(
            peer_id, bounded, int(Status.ALIVE), state.member if state is not None else self.member
        )

    def _ping(self, state: MemberState, now: float) -> Ask:
        request = Ping(state.incarnation, self._claims_for(state.peer_id))
        return self._ask(state.peer_id, ControlKind.PING, request, now)

    def _ask(self, peer_id: PeerId, kind: ControlKind, request: Message, now: float) -> Ask:
        timeout = self.config.exchange_timeout_seconds
        if kind == ControlKind.PING:
            timeout = self.config.membership.probe_timeout_seconds
        elif kind == ControlKind.LEAVE:
            timeout = self.config.leave_timeout_seconds
        return Ask(self._token(kind, peer_id, 0, now), peer_id, kind, request, timeout)

    def _token(self, kind: ControlKind | None, peer_id: PeerId, member: Member, now: float) -> int:
        self._tokens += 1
        self._asked[self._tokens] = _Asked(kind, peer_id, member, now)
        return self._tokens

    def _sample(self, states: list[MemberState], count: int) -> list[MemberState]:
        return self._rng.sample(states, min(count, len(states)))

    def _is_live(self, peer_id: PeerId) -> bool:
        if peer_id == self.peer_id:
            return True
        state = self.membership.get(peer_id)
        return state is not None and state.alive and state.record is not None

    def _shown_horizon(self, member: Member) -> int:
        state = self.membership.resolve(member)
        return state.record.floors_horizon if state is not None and state.record is not None else 0

    def _members(self) -> list[Member]:
        version, members = self._placement
        if version != self.membership.version:
            members = [state.member for state in self.membership.live()]
            self._placement = (self.membership.version, members)
        return members

    def _peer_ids(self, members: Iterable[Member]) -> list[PeerId]:
        states = (self.membership.resolve(member) for member in members)
        return [state.peer_id for state in states if state is not None]


def has_news(delta: Delta) -> bool:
    """Whether a delta says anything besides claims."""
    return bool(delta.records or delta.logs or delta.cluster_records)
