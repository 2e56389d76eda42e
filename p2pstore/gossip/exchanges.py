"""Exchanges: with whom and when this peer compares what they know, and what each side says. Pure.

A question carries digests; its answer what the asker lacks, and the other's digests; what that one
lacks goes back. Between exchanges there are 67 ms while there are differences, up to a second else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Final

from p2pstore.gossip.anti_entropy import Digest, Knowledge, pack_buckets, read_buckets, read_digest
from p2pstore.gossip.asking import Asked, Questions
from p2pstore.gossip.config import GossipConfig
from p2pstore.gossip.effects import Ask
from p2pstore.gossip.floor_stamps import pack_stamps, unpack_stamps
from p2pstore.gossip.floor_sync import FloorAnswer, FloorSync
from p2pstore.gossip.messages import ControlKind, Delta, Exchange, ExchangeReply
from p2pstore.gossip.records import PeerId

MAX_IN_FLIGHT_EXCHANGES: Final = 3


@dataclass(frozen=True, slots=True)
class Theirs:
    """What the other side of an exchange says that it knows."""

    digest: Digest
    buckets: list[int] | None
    floors: FloorAnswer = field(default_factory=FloorAnswer)


def read_request(request: Exchange) -> Theirs:
    """Raises `ProtocolError` for nonsense."""
    return Theirs(read_digest(request.digest), read_buckets(request.cluster_buckets))


def read_reply(reply: ExchangeReply) -> Theirs:
    """Raises `ProtocolError` for nonsense."""
    floors = FloorAnswer(
        reply.floors_epoch, unpack_stamps(reply.floors_seen), unpack_stamps(reply.floors_horizon)
    )
    return Theirs(read_digest(reply.digest), read_buckets(reply.cluster_buckets), floors)


class Exchanges:
    """See the module's docstring. The machine takes in what the messages bring."""

    def __init__(
        self,
        config: GossipConfig,
        knowledge: Knowledge,
        floors: FloorSync,
        questions: Questions,
        rng: Random,
    ) -> None:
        self._config = config
        self._knowledge = knowledge
        self._membership = knowledge.membership
        self._records = knowledge.cluster_records
        self._floors = floors
        self._questions = questions
        self._rng = rng
        self._pause_seconds = config.exchange_seconds
        self._last_at = -math.inf
        self._wanted: dict[PeerId, None] = {}
        self._records_differ: set[PeerId] = set()

    # --- when --------------------------------------------------------------------------------

    def want(self, peer_id: PeerId) -> None:
        """Exchange with this peer at the next tick."""
        self._wanted[peer_id] = None

    def hurry(self) -> None:
        """There is news."""
        self._pause_seconds = self._config.exchange_seconds

    def forget(self, peer_id: PeerId) -> None:
        """The peer is gone."""
        self._records_differ.discard(peer_id)

    def due(self) -> float:
        """When `start` has something to do; minus infinity for at once."""
        if self._wanted:
            return -math.inf
        return self._next_at() if self._membership.others() else math.inf

    def start(self, now: float) -> list[Ask]:
        """The exchanges that are due: with whom one is wanted, else with a random member."""
        wanted, self._wanted = self._wanted, {}
        under_way = set(self._questions.asked(ControlKind.EXCHANGE)) if wanted else set()
        asks = [
            self._ask(peer_id, now, wanted=True) for peer_id in wanted if peer_id not in under_way
        ]
        others = self._membership.others()
        if not asks and others and now >= self._next_at():
            asks.append(self._ask(self._rng.choice(others).peer_id, now))
        return asks

    def _next_at(self) -> float:
        if len(self._questions.asked(ControlKind.EXCHANGE)) >= MAX_IN_FLIGHT_EXCHANGES:
            return math.inf
        if self._membership.has_rumors:
            return self._last_at + self._config.exchange_seconds
        return self._last_at + self._pause_seconds

    # --- what --------------------------------------------------------------------------------

    def _ask(self, peer_id: PeerId, now: float, *, wanted: bool = False) -> Ask:
        self._last_at = now
        buckets = b""
        if peer_id in self._records_differ:
            buckets = pack_buckets(self._records.bucket_hashes)
        epoch, epoch_hash = self._floors.question(
            now, at_once=wanted, soon=self._shows_other_horizon(peer_id)
        )
        request = Exchange(
            self._knowledge.digest(),
            self._records.hash,
            buckets,
            self._membership.claims((peer_id,)),
            epoch,
            epoch_hash,
        )
        return self._questions.ask(peer_id, ControlKind.EXCHANGE, request, now, floors_epoch=epoch)

    def answer(self, request: Exchange, theirs: Theirs, now: float) -> ExchangeReply:
        """What the asker lacks, and what this peer knows."""
        floors = self._floors.answer(request.floors_epoch, request.floors_hash, now)
        differs = request.cluster_hash != self._records.hash
        delta = self._delta_for(theirs, differs)
        if has_news(delta):
            self.hurry()
        return ExchangeReply(
            delta,
            self._knowledge.digest(),
            self._records.hash,
            pack_buckets(self._records.bucket_hashes) if differs else b"",
            floors.epoch_end,
            pack_stamps(floors.seen),
            pack_stamps(floors.horizon),
        )

    def learn(self, asked: Asked, reply: ExchangeReply, theirs: Theirs, now: float) -> None:
        """Compare cluster records with those of a reply whose delta was taken in."""
        differs = reply.cluster_hash != self._records.hash
        self._floors.learn(theirs.floors, asked.floors_epoch, now, same_now=not differs)
        (self._records_differ.add if differs else self._records_differ.discard)(asked.peer_id)

    def follow_up(self, peer_id: PeerId, theirs: Theirs, now: float, *, news: bool) -> list[Ask]:
        """Tell the sender of a reply what it lacks. `news`: the reply brought some."""
        delta = self._delta_for(theirs, peer_id in self._records_differ)
        if news or has_news(delta):
            self.hurry()
        else:
            longest = self._config.idle_exchange_seconds
            self._pause_seconds = min(1.5 * self._pause_seconds, longest)
        if has_news(delta) or delta.claims:
            return [self._questions.ask(peer_id, ControlKind.DELTA, delta, now)]
        return []

    def _delta_for(self, theirs: Theirs, differs: bool) -> Delta:
        buckets = theirs.buckets if differs else None
        return self._knowledge.delta_for(theirs.digest, self._config.delta_bytes, buckets)

    def _shows_other_horizon(self, peer_id: PeerId) -> bool:
        state = self._membership.get(peer_id)
        return (
            state is not None
            and state.record is not None
            and state.record.floors_horizon != self._records.horizon_hash
        )


def has_news(delta: Delta) -> bool:
    """Whether a delta says anything besides claims."""
    return bool(delta.records or delta.logs or delta.cluster_records)
