"""Exchanges: which peers compare their knowledge, when, and what each side says. Pure.

A request carries digests; the reply carries what the sender lacks, and the replier's digests; a delta with what the
replier lacks goes back. Between two exchanges there are 67 ms while there are differences, otherwise up to a second,
and more where the message budget is spent.

Under load one other peer at a time is told what to send: while a reply or a delta is on its way here, this peer sends
no request, and replies without a digest. Otherwise several peers would send the same.

Digests are in full until the other side has named a hash of its members; from then on numbers alone are sent as
long as the last peer that was asked knew the same members (`digests`). Where cluster records differ, another
exchange with the same peer follows, and compares cells (`cluster_records`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from msgspec.structs import replace

from p2pstore.gossip.exchange.anti_entropy import SEND_RECORDS, Knowledge, OperationRate
from p2pstore.gossip.exchange.digests import (
    Digest,
    DigestTable,
    pack_digest,
    pack_positions,
    pack_record_positions,
    unpack_digest,
    unpack_positions,
)
from p2pstore.gossip.exchange.open_requests import OpenRequest, OpenRequests
from p2pstore.gossip.floors.cluster_records import (
    COMPARED_BUCKETS,
    TheirRecords,
    differing_buckets,
    pack_buckets,
    pack_cells,
    read_buckets,
    read_cells,
)
from p2pstore.gossip.floors.floor_comparison import FloorAnswer
from p2pstore.gossip.floors.floor_stamps import pack_stamps, unpack_stamps
from p2pstore.gossip.floors.floor_sync import FloorSync
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Ask, ControlKind, Delta, Exchange, ExchangeReply
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.records import PeerId, member_of

MAX_IN_FLIGHT_EXCHANGES: Final = 3
SLOW_SECONDS: Final = 0.5
"""A peer that has not answered for longer keeps no other from being asked ..."""
MAX_UNANSWERED: Final = 16
"""... as long as there are no more of these."""
INVITED_SECONDS: Final = 0.1
"""Others wait this long for a peer that was told what to send."""
EXCHANGE_MESSAGES: Final = 4
"""Question, answer, delta and its acknowledgement."""
FAST_COMPARISONS: Final = 2
"""How much faster exchanges follow each other while they bring cluster records by the dozen."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """Knowledge of the other side of an exchange. `digest` is None when it wants nothing, or spoke
    of members that this peer does not know as it does."""

    digest: Digest | None
    members_hash: int
    records: TheirRecords
    floors: FloorAnswer = field(default_factory=FloorAnswer)


def read_request(request: Exchange, table: DigestTable) -> Theirs:
    """Raises `ProtocolError` for nonsense."""
    return _read(request, table, FloorAnswer())


def read_reply(reply: ExchangeReply, table: DigestTable) -> Theirs:
    """Raises `ProtocolError` for nonsense."""
    floors = FloorAnswer(
        reply.floors_epoch, unpack_stamps(reply.floors_seen), unpack_stamps(reply.floors_horizon)
    )
    return _read(reply, table, floors)


def _read(message: Exchange | ExchangeReply, table: DigestTable, floors: FloorAnswer) -> Theirs:
    digest: Digest | None = None
    if message.digest or not message.members_hash:  # a reader that knows no members wants all records
        digest = unpack_digest(message.digest)
    elif message.positions:
        of = table.known_set(message.members_hash)
        digest = None if of is None else unpack_positions(message.positions, of)
    records = TheirRecords(read_buckets(message.cluster_buckets), read_cells(message.cluster_cells))
    return Theirs(digest, message.members_hash, records, floors)


class Exchanges:
    """See the module's docstring. The machine takes in what the messages bring."""

    def __init__(
        self,
        config: GossipConfig,
        knowledge: Knowledge,
        floors: FloorSync,
        questions: OpenRequests,
        view: ActiveView,
        rng: Random,
        rate: OperationRate,
    ) -> None:
        self._config = config
        self._knowledge = knowledge
        self._membership = knowledge.membership
        self._records = knowledge.cluster_records
        self._floors = floors
        self._questions = questions
        self._view = view
        self._rng = rng
        self._rate = rate
        self.unix_ms: Callable[[float], int] = lambda now: 0
        """This peer's wall clock; 0 says nothing."""
        self._pause_seconds = config.exchange_seconds
        self._digest_seconds = 0.0
        """Shortest time between two exchanges that the size of the last digest leaves."""
        self._last_at = -math.inf
        self._wanted: dict[PeerId, None] = {}
        self.agreed = False
        """Whether the last peer that was heard of knew the same members."""
        self._differing: dict[PeerId, list[int]] = {}
        """Peers whose cluster records differ from this peer's, with the buckets where they are known."""
        self._invited: dict[PeerId, float] = {}
        """Peers that were told in an answer what to send, and until when each is waited for."""
        self._unreliable: set[PeerId] = set()
        """Peers that were waited for in vain: not again before they send something."""
        self._continue_with: PeerId | None = None
        self._hastens = False

    def want(self, peer_id: PeerId) -> None:
        """Exchange with this peer at the next tick."""
        self._wanted[peer_id] = None

    def hurry(self) -> None:
        self._pause_seconds = self._config.exchange_seconds

    def forget(self, peer_id: PeerId) -> None:
        self._differing.pop(peer_id, None)
        self._unreliable.discard(peer_id)

    def delta_came(self, peer_id: PeerId) -> None:
        """Unasked, or as an answer told the peer to."""
        self._invited.pop(peer_id, None)
        self._unreliable.discard(peer_id)

    def due(self) -> float:
        """When `start` has something to do; minus infinity for at once."""
        if self._wanted:
            return -math.inf
        return self._next_at() if self._membership.others() else math.inf

    def start(self, now: float) -> list[Ask]:
        """The exchanges that are due: with a member that wants one, else with a random member."""
        wanted, self._wanted = self._wanted, {}
        for peer_id in [peer_id for peer_id, until in self._invited.items() if until <= now]:
            del self._invited[peer_id]
            self._unreliable.add(peer_id)
        under_way = set(self._questions.asked(ControlKind.EXCHANGE)) if wanted else set()
        asks = [self._ask(peer_id, now, wanted=True) for peer_id in wanted if peer_id not in under_way]
        if not asks and now >= self._next_at() and (chosen := self._choose()) is not None:
            asks.append(self._ask(chosen, now))
        return asks

    def _choose(self) -> PeerId | None:
        peer_id, self._continue_with = self._continue_with, None
        if peer_id is None:
            state = self._view.choose()
            return None if state is None else state.peer_id
        return peer_id

    def _next_at(self) -> float:
        unanswered = self._questions.open_count(ControlKind.EXCHANGE)
        if unanswered >= MAX_UNANSWERED:
            return math.inf
        pause = self._pause_seconds
        if self._membership.has_rumors:
            pause = min(pause, self._config.exchange_seconds)
        if self._hastens:
            pause = self._config.exchange_seconds / FAST_COMPARISONS
        at = max(
            self._last_at + max(pause, self._digest_seconds),
            self._questions.budget.ready_at(EXCHANGE_MESSAGES),
        )
        if unanswered >= MAX_IN_FLIGHT_EXCHANGES:
            sent_at = self._questions.newest_sent_at(ControlKind.EXCHANGE, MAX_IN_FLIGHT_EXCHANGES)
            at = max(at, sent_at + SLOW_SECONDS)
        if self._rate.is_high and self._invited:
            at = max(at, *self._invited.values())
        return at

    def _ask(self, peer_id: PeerId, now: float, *, wanted: bool = False) -> Ask:
        self._last_at = now
        self._hastens = False
        buckets = cells = b""
        if peer_id in self._differing:
            buckets = pack_buckets(self._records.bucket_hashes)
            differing = self._differing[peer_id]
            some = self._rng.sample(differing, min(COMPARED_BUCKETS, len(differing)))
            cells = pack_cells(self._records, some)
        epoch, epoch_hash = self._floors.question(
            member_of(peer_id), now, at_once=wanted, soon=self._shows_other_horizon(peer_id)
        )
        in_full = wanted or not self.agreed
        digest, positions, members_hash = self._digest(in_full=in_full)
        request = Exchange(
            digest,
            self._records.hash,
            buckets,
            self._membership.claims((peer_id,), peer_id),
            epoch,
            epoch_hash,
            members_hash,
            positions,
            cells,
            unix_ms=self.unix_ms(now),
        )
        return self._questions.ask(peer_id, ControlKind.EXCHANGE, request, now, floors_epoch=epoch)

    def _digest(self, *, in_full: bool) -> tuple[bytes, bytes, int]:
        """(digest, positions, hash of the members)."""
        table = self._knowledge.table
        digest = table.told()
        positions = None
        if not in_full:
            logs = table.follows_logs or table.logs_are_read
            positions = pack_positions(digest) if logs else pack_record_positions(digest)
        packed = pack_digest(digest) if positions is None else b""
        if not table.follows_logs:
            self._digest_seconds = len(packed or positions or b"") / (
                self._config.partitioned_digest_bytes_per_second
            )
        return packed, positions or b"", digest.of.hash

    def answer(self, sender: PeerId, request: Exchange, theirs: Theirs, now: float) -> ExchangeReply:
        """The delta for the asker, and this peer's digest."""
        floors = self._floors.answer(request.floors_epoch, request.floors_hash, now, member_of(sender))
        differs = request.cluster_hash != self._records.hash
        agrees = self._note_members(theirs)
        delta = self._delta_for(sender, theirs, differs)
        if has_news(delta):
            self.hurry()
        digest, positions, members_hash = self._digest(in_full=not agrees)
        if self._rate.is_high and self._is_expecting(now):
            digest = positions = b""
        elif theirs.digest is not None and self._knowledge.lacks(theirs.digest):
            self._invite(sender, now)
        told = self._told(delta, floors, theirs, differs, now)
        return replace(told, digest=digest, positions=positions, members_hash=members_hash)

    def answer_reader(
        self, sender: PeerId, request: Exchange, theirs: Theirs, now: float
    ) -> ExchangeReply:
        """The delta for a reader. Nothing is wanted of it, and none of its knowledge is remembered."""
        floors = self._floors.answer(request.floors_epoch, request.floors_hash, now, None)
        differs = request.cluster_hash != self._records.hash
        delta = self._delta_for(sender, theirs, differs, rumors=False)
        return self._told(delta, floors, theirs, differs, now)

    def _told(
        self, delta: Delta, floors: FloorAnswer, theirs: Theirs, differs: bool, now: float
    ) -> ExchangeReply:
        """An answer that wants nothing."""
        return ExchangeReply(
            delta,
            b"",
            self._records.hash,
            pack_buckets(self._records.bucket_hashes) if differs else b"",
            floors.epoch_end,
            pack_stamps(floors.seen),
            pack_stamps(floors.horizon),
            self._knowledge.table.told().of.hash,
            b"",
            pack_cells(self._records, theirs.records.cells) if differs else b"",
            unix_ms=self.unix_ms(now),
        )

    def _invite(self, peer_id: PeerId, now: float) -> None:
        """A member is told what to send. A peer that asks again meanwhile is not waited for any longer."""
        if self._is_member(peer_id) and peer_id not in self._unreliable:
            self._invited.setdefault(peer_id, now + INVITED_SECONDS)

    def _is_expecting(self, now: float) -> bool:
        """Whether a peer was told what to send, and has not sent it yet."""
        newest = self._questions.newest_sent_at(ControlKind.EXCHANGE)
        return newest + INVITED_SECONDS > now or any(until > now for until in self._invited.values())

    def learn(
        self, asked: OpenRequest, reply: ExchangeReply, theirs: Theirs, now: float, *, new_records: int
    ) -> None:
        """Compare members and cluster records with a reply whose delta brought `new_records` new cluster records."""
        peer_id = asked.peer_id
        self._note_members(theirs)
        differs = reply.cluster_hash != self._records.hash
        self._floors.learn(
            theirs.floors, asked.floors_epoch, now, sender=member_of(peer_id), same_now=not differs
        )
        if not differs:
            self._differing.pop(peer_id, None)
            return
        if not self._is_member(peer_id):
            return  # yet: nothing is kept of a peer that may never be one
        buckets = theirs.records.buckets
        news = not self._differing.get(peer_id)
        self._differing[peer_id] = [] if buckets is None else differing_buckets(self._records, buckets)
        # A member whose horizon is behind offers what was dropped here, and would be asked all the time.
        dozens = new_records >= SEND_RECORDS // 2
        if news or dozens:
            self._continue_with, self._hastens = peer_id, dozens

    def follow_up(self, peer_id: PeerId, theirs: Theirs, now: float, *, news: bool) -> list[Ask]:
        """Tell the sender of a reply what it lacks. `news`: the reply brought some."""
        delta = self._delta_for(peer_id, theirs, peer_id in self._differing)
        if news or has_news(delta):
            self.hurry()
        else:
            longest = self._config.idle_exchange_seconds
            self._pause_seconds = min(1.5 * self._pause_seconds, longest)
        if has_news(delta) or delta.claims:
            return [self._questions.ask(peer_id, ControlKind.DELTA, delta, now)]
        return []

    def _delta_for(
        self, peer_id: PeerId, theirs: Theirs, differs: bool, *, rumors: bool = True
    ) -> Delta:
        if theirs.digest is None:
            return Delta([], [], [], self._membership.claims(to=peer_id) if rumors else [])
        return self._knowledge.delta_for(
            theirs.digest,
            self._config.delta_bytes,
            theirs.records if differs else None,
            as_runs=theirs.members_hash == self._knowledge.table.current().of.hash,
            to=peer_id,
            rumors=rumors,
        )

    def _note_members(self, theirs: Theirs) -> bool:
        """Whether the other side of an exchange knows the same members."""
        self.agreed = theirs.members_hash == self._knowledge.table.current().of.hash
        return self.agreed

    def _is_member(self, peer_id: PeerId) -> bool:
        state = self._membership.get(peer_id)
        return state is not None and state.alive

    def _shows_other_horizon(self, peer_id: PeerId) -> bool:
        state = self._membership.get(peer_id)
        return (
            state is not None
            and state.signed is not None
            and state.floors_horizon != self._records.floors.horizon_hash
        )


def has_news(delta: Delta) -> bool:
    """Whether a delta says anything besides claims."""
    return bool(delta.records or delta.logs or delta.runs or delta.cluster_records)
