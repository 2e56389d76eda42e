"""Eager relay: recent news is passed on at once to members that may not know it. Pure.

It brings a single put to all members within tens of milliseconds, at about four copies of everything. Under load
the copies cost more than the time is worth: operations are left to exchanges then (`operation_rate`). New
members and cluster records are few, and always passed on.
"""

from __future__ import annotations

import math
from typing import Final

from p2pstore.gossip.exchange.anti_entropy import Knowledge, News
from p2pstore.gossip.exchange.asking import MessageBudget, Questions
from p2pstore.gossip.exchange.delta_checks import chunk_of
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Ask, ControlKind, Delta
from p2pstore.gossip.homes.partition_homes import KeptDirectory
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.records import Member, PeerId

MAX_RECORDS: Final = 40
MAX_CLUSTER_RECORDS: Final = 40
"""In one message; as many as a receiver checks the signatures of (`anti_entropy`)."""
BUDGET_SHARE: Final = 0.2
"""Of the messages a second, that eager ones and their acknowledgements may be; others send as many here."""
BURST_RELAYS: Final = 4


class FreshNews:
    """Collects news between two eager messages. Exchanges bring what these miss or had no room for."""

    def __init__(
        self,
        config: GossipConfig,
        knowledge: Knowledge,
        view: ActiveView,
        questions: Questions,
        rate: OperationRate,
    ) -> None:
        self._config = config
        self._knowledge = knowledge
        self._view = view
        self._questions = questions
        messages = 2 * config.eager_fanout
        self._budget = MessageBudget(BUDGET_SHARE * config.messages_per_second, BURST_RELAYS * messages)
        self._rate = rate
        self._spread_at = -math.inf
        self._logs: dict[Member, tuple[int, set[PeerId]]] = {}
        """Member -> first fresh operation, and who knows of it already."""
        self._records: dict[PeerId, set[PeerId]] = {}

    def __bool__(self) -> bool:
        return bool(self._logs or self._records or self._knowledge.cluster_records.has_rumors)

    def add_own(self, sequence: int, count: int) -> None:
        """This peer's own log has `count` new operations, the first one with this number."""
        self._rate.add(count)
        if not self._rate.is_high:
            own = self._knowledge.membership.own
            self._logs.setdefault(own.member, (sequence, {own.peer_id}))

    def add(self, news: News, sender: PeerId) -> None:
        """`sender` brought news of others."""
        self._rate.add(news.operations)
        for peer_id in news.records:
            self._records.setdefault(peer_id, {peer_id}).add(sender)
        if self._rate.is_high:
            return
        for member, first in news.logs.items():
            known_first, known_by = self._logs.get(member, (first, set()))
            owner = self._knowledge.membership.resolve(member)
            known_by |= {sender, owner.peer_id} if owner else {sender}
            self._logs[member] = (min(first, known_first), known_by)

    # --- passing it on -----------------------------------------------------------------------

    def due(self) -> float:
        """When `spread` has something to send."""
        if not self or not self._knowledge.membership.others():
            return math.inf
        return max(self._spread_at, self._budget.ready_at(2 * self._config.eager_fanout))

    def spread(self, now: float) -> list[Ask]:
        """Tell a few random neighbours, each what it may not know."""
        self._rate.judge(now)
        if self._rate.is_high:
            self._logs.clear()
        if not self._knowledge.membership.others():
            self._clear()
        if now < self.due():
            return []
        self._spread_at = now + self._config.eager_seconds
        asks: list[Ask] = []
        for state in self._view.sample(self._config.active_view):
            delta = self._delta_for(state.peer_id, self._config.eager_bytes)
            if delta is not None:
                asks.append(self._questions.ask(state.peer_id, ControlKind.DELTA, delta, now))
                if len(asks) == self._config.eager_fanout:
                    break
        self._budget.take(2 * len(asks), now)
        self._clear()
        return asks

    def _clear(self) -> None:
        """It was passed on, but for own unsigned operations. Cluster records count themselves how often they were."""
        self._logs.clear()
        self._records.clear()
        log = self._knowledge.log
        if log.signed < log.sequence and not self._rate.is_high:
            own = self._knowledge.membership.own
            self._logs[own.member] = log.signed + 1, {own.peer_id}

    def _delta_for(self, peer_id: PeerId, limit_bytes: int) -> Delta | None:
        """What of it a member may not know; None when there is nothing."""
        membership = self._knowledge.membership
        records = [
            state.signed
            for fresh, known_by in self._records.items()
            if peer_id not in known_by
            and (state := membership.get(fresh)) is not None
            and state.signed is not None
        ]
        logs = []
        to = membership.get(peer_id)
        follows = to is None or to.signed is None or to.directory == KeptDirectory.FULL
        for member, (first, known_by) in self._logs.items():
            state = membership.resolve(member)
            if peer_id in known_by or not follows or state is None or state.signed is None:
                continue
            for run in self._knowledge.operations_since(member, first - 1, limit_bytes):
                limit_bytes -= len(run.operations)
                logs.append(chunk_of(member, state.record_incarnation, run))
        rumors = self._knowledge.cluster_records.rumors(
            MAX_CLUSTER_RECORDS, limit_bytes, membership.retransmit_limit()
        )
        if not (records or logs or rumors):
            return None
        # Not before it is sure that they go: each is told a bounded number of times.
        claims = membership.claims((peer_id,), peer_id)
        return Delta(records[:MAX_RECORDS], logs, rumors, claims)


RATE_SECONDS: Final = 0.25
"""Time between two judgements of the rate ..."""
RATE_MEMORY_SECONDS: Final = 1.0
"""... which is averaged over about this time."""


class OperationRate:
    """Whether operations come faster than `limit` a second; once they did, until there are less than half as many."""

    def __init__(self, limit: float) -> None:
        self.is_high = False
        self._limit = limit
        self._count = 0
        self._rate = 0.0
        self._since = -math.inf

    def add(self, count: int) -> None:
        """This number of operations was seen."""
        self._count += count

    def judge(self, now: float) -> None:
        """Call it a few times a second."""
        elapsed = now - self._since
        if elapsed < RATE_SECONDS:
            return
        self._since = now
        if math.isfinite(elapsed):
            weight = 1.0 - math.exp(-elapsed / RATE_MEMORY_SECONDS)
            self._rate += weight * (self._count / elapsed - self._rate)
        self._count = 0
        self.is_high = self._rate > (self._limit / 2 if self.is_high else self._limit)
