"""Having copies of an object made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import (
    Reply,
)
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId, member_of
from p2pstore.objects import Version
from p2pstore.transfer.messages import (
    DataKind,
    Replicate,
    Replicated,
)

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.transfer.segment import ObjectEntry

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A target that copies slower than this is given up for the next candidate."""


class ReplicateOperation(Operation):
    """Have `wanted` copies of a local object made; the result is how many there are.

    Targets pull. They are asked in rendezvous order; one that fails is replaced by the next.
    """

    def __init__(
        self,
        core: PeerCore,
        entry: ObjectEntry,
        wanted: int,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self._entry = entry
        self._wanted = wanted
        self._copies = 1
        self._pending: dict[int, PeerId] = {}
        self._candidates: list[PeerId] = []
        self._next_tag = 0

    def start(self, now: float) -> None:
        entry = self._entry
        holding = {
            copy.member
            for copy in self.core.known_copies(entry.digest, now)
            if copy.reachable
            and not copy.local
            and not copy.record.soft
            and copy.record.version == Version(entry.version.clock, entry.version.writer)
        }
        self._copies += len(holding)
        self._candidates = [
            peer_id
            for peer_id in self.core.ranked_peers(entry.digest)
            if member_of(peer_id) not in holding and self._offers_memory(peer_id)
        ]
        self.core.segment.acquire(entry)  # the source of copies is not evicted before they are made
        self._proceed(now)

    def _offers_memory(self, peer_id: PeerId) -> bool:
        state = self.core.gossip.membership.get(peer_id)
        return state is not None and state.memory_capacity > 0

    def _proceed(self, now: float) -> None:
        entry = self._entry
        timeout = 5.0 + entry.length / REPLICATE_BYTES_PER_SECOND
        me = self.core.gossip.record(now)
        request = Replicate(
            entry.digest,
            entry.version.clock,
            entry.version.writer,
            entry.length,
            record_body=me.body,
            record_signature=me.signature,
        )
        while self._copies + len(self._pending) < self._wanted and self._candidates:
            target = self._candidates.pop(0)
            self._next_tag += 1
            self._pending[self._next_tag] = target
            self.ask(self._next_tag, target, DataKind.REPLICATE, request, timeout)
        if not self._pending:
            self.core.segment.let_go(entry)
            self.finish(self._copies, now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        target = self._pending.pop(tag)
        if isinstance(reply, Replicated):
            self._copies += 1
        elif reply is None:
            self.core.peer_failed(target, now)
        self._proceed(now)

    def cancel(self, now: float) -> None:
        if not self.done:
            self.core.segment.let_go(self._entry)
        super().cancel(now)
