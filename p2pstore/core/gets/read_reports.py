"""Reports of reads that a holder does not see.

A read through a mapping or by RDMA sends the holder no request, so the holder would evict objects in constant use.
Readers count these reads and report them in batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from p2pstore.core.core_effects import AskPeer
from p2pstore.gossip.records import Member
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_READ_COUNTS, ReadCount, Reads

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

UNSEEN_TRANSPORTS: Final = frozenset({"shm", "rdma"})
"""By which the holder does nothing."""
REPORT_SECONDS: Final = 0.25
"""Between two reports to all holders: eviction looks at most objects far less often."""
MAX_NOTED: Final = 16 * MAX_READ_COUNTS
"""Objects counted between two reports; reads of further ones are not reported."""
MAX_COUNT: Final = 1_000_000
ANSWER_SECONDS: Final = 5.0


class ReadReports:
    """Counts of reads by this peer and its clients elsewhere, until reported; and the reports of other peers."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._counts: dict[Member, dict[bytes, int]] = {}
        self._noted = 0
        self._due_at = math.inf

    def note(self, member: Member, digest: bytes, count: int, now: float) -> None:
        """Count `count` reads of the object in the memory of this member, which did not see them."""
        counts = self._counts.setdefault(member, {})
        if digest not in counts:
            if self._noted >= MAX_NOTED:
                return
            self._noted += 1
        counts[digest] = counts.get(digest, 0) + max(0, min(count, MAX_COUNT))
        self._due_at = min(self._due_at, now + REPORT_SECONDS)

    def next_tick(self) -> float:
        """When `tick` has something to do."""
        return self._due_at

    def tick(self, now: float) -> None:
        """Tell the holders what is due."""
        if now < self._due_at:
            return
        told, self._counts = self._counts, {}
        self._noted, self._due_at = 0, math.inf
        for member, counts in told.items():
            state = self._core.gossip.membership.resolve(member)
            if state is None or self._core.holders.is_avoided(member, now):
                continue
            items = [ReadCount(digest, count) for digest, count in counts.items()]
            for start in range(0, len(items), MAX_READ_COUNTS):
                request = Reads(items[start : start + MAX_READ_COUNTS])
                self._core.emit(AskPeer(0, 0, state.peer_id, DataKind.READS, request, ANSWER_SECONDS))

    def heard(self, items: Sequence[ReadCount], now: float) -> None:
        """Others read these objects here."""
        for item in items:
            self._core.segment.objects.touch(
                item.digest, max(0, min(item.count, MAX_COUNT)), self._core.unix(now)
            )
