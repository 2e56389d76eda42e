"""News on its way: what this peer learnt lately and passes on at once, and to whom it need not. Pure."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.anti_entropy import Knowledge, News
from p2pstore.gossip.messages import Claim, Delta, LogChunk
from p2pstore.gossip.records import Member, PeerId

MAX_RECORDS: Final = 64
MAX_CLUSTER_RECORDS: Final = 64


class FreshNews:
    """Collects news between two eager messages. Exchanges bring what these miss or had no room for."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._logs: dict[Member, tuple[int, set[PeerId]]] = {}
        """Member -> first fresh operation, and who knows of it already."""
        self._records: dict[PeerId, set[PeerId]] = {}

    def __bool__(self) -> bool:
        return bool(self._logs or self._records or self._knowledge.cluster_records.has_rumors)

    def add_own(self, sequence: int) -> None:
        """This peer's own log has a new operation."""
        own = self._knowledge.membership.own
        self._logs.setdefault(own.member, (sequence, {own.peer_id}))

    def add(self, news: News, sender: PeerId) -> None:
        """`sender` brought news of others."""
        for peer_id in news.records:
            self._records.setdefault(peer_id, {peer_id}).add(sender)
        for member, first in news.logs.items():
            known_first, known_by = self._logs.get(member, (first, set()))
            owner = self._knowledge.membership.resolve(member)
            known_by |= {sender, owner.peer_id} if owner else {sender}
            self._logs[member] = (min(first, known_first), known_by)

    def clear(self) -> None:
        """It has been passed on. Cluster records count for themselves how often they were."""
        self._logs.clear()
        self._records.clear()

    def delta_for(self, peer_id: PeerId, limit_bytes: int, claims: list[Claim]) -> Delta | None:
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
        for member, (first, known_by) in self._logs.items():
            state = membership.resolve(member)
            if peer_id in known_by or state is None or state.record is None:
                continue
            operations = self._knowledge.operations_since(member, first - 1, limit_bytes)
            if operations:
                limit_bytes -= len(operations)
                logs.append(LogChunk(member, state.record.incarnation, first, operations))
        rumors = self._knowledge.cluster_records.rumors(
            MAX_CLUSTER_RECORDS, limit_bytes, membership.retransmit_limit()
        )
        if not (records or logs or rumors):
            return None
        return Delta(records[:MAX_RECORDS], logs, rumors, claims)
