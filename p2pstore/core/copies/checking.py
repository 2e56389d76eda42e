"""Finding out whether objects in memory have the bytes that their checksums say.

Local clients write into this peer's memory and compute the checksums: the peer takes them on trust, so that a put costs
no second pass over its bytes. That trust ends where it would cost others something: when another put meets the object,
when the SSD is to keep it, and when a reader found it spoilt. Then the peer compares once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.core_effects import CheckObject
from p2pstore.core.operation import Operation
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import KIB, chunk_sums, root_checksum
from p2pstore.transfer.peer_messages import CopyChecked

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry

INLINE_BYTES: Final = 4 * KIB
"""Values up to this are compared at once, in about 3 us; longer ones by the shell, in a thread."""
MAX_NOTED: Final = 16
"""Spoilt objects that the log is told of at a time; a counter has all of them."""


class CheckOperation(Operation):
    """Compare an object's bytes in this peer's memory with its checksums, and withdraw it when they differ.

    The result is `CopyChecked`: whether this peer has a copy that is good. A copy on the SSD alone counts as good: it
    was compared when it was written, and is again when it is read. An object that was found good is not compared anew,
    unless `again`.
    """

    def __init__(
        self,
        core: PeerCore,
        digest: bytes,
        on_finish: Callable[[Any, float], None] | None = None,
        *,
        again: bool = False,
    ) -> None:
        super().__init__(core, on_finish)
        self._digest = digest
        self._again = again

    def start(self, now: float) -> None:
        entry = self.core.objects.find(self._digest, now)
        if entry is None or (entry.verified and not self._again):
            self.checked(now)
            return
        self._again = False
        self.core.checks.begin(self, entry, now)

    def checked(self, now: float) -> None:
        """The comparison has ended; what was wrong is gone."""
        core = self.core
        good = core.copies.own_location(self._digest, now) is not None
        self.finish(CopyChecked(good, core.incarnation, core.gossip.log.sequence), now)


class Checks:
    """Comparisons under way. Each object is compared by one at a time, however many wait for it."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._waiting: dict[int, list[CheckOperation]] = {}
        """By slot number: the object in it is held until it is compared."""
        self._spoilt: list[str] = []

    def begin(self, operation: CheckOperation, entry: ObjectEntry, now: float) -> None:
        """Compare; `operation.checked` is called at the end."""
        if entry.length <= INLINE_BYTES:
            payload = self._core.segment.payload(entry)
            self.judge(entry, chunk_sums(payload), now)
            operation.checked(now)
            return
        waiting = self._waiting.get(entry.slot)
        if waiting is not None:
            waiting.append(operation)
            return
        self._waiting[entry.slot] = [operation]
        self._core.segment.references.acquire(entry)
        self._core.emit(CheckObject(entry))

    def ended(self, entry: ObjectEntry, sums: bytes, now: float) -> None:
        """The outcome of a `CheckObject`: the checksums that the bytes give."""
        self._core.segment.references.let_go(entry, was_used=False)
        self.judge(entry, sums, now)
        for operation in self._waiting.pop(entry.slot):
            if not operation.done:
                operation.checked(now)

    def judge(self, entry: ObjectEntry, sums: bytes, now: float) -> None:
        """The object's bytes give these checksums: it is good, and what is published of it is restored where a client
        wrote over that; or it is withdrawn."""
        live = entry.state is SlotState.LIVE
        good = root_checksum(entry.length, sums) == entry.version.root
        if good and (not live or self._core.segment.restoring.object(entry, sums)):
            entry.verified = True
        elif live:
            if len(self._spoilt) < MAX_NOTED:
                self._spoilt.append(entry.key)
            self._core.objects.drop_spoilt(entry, now)

    def take_spoilt(self) -> list[str]:
        """The keys of objects that were found spoilt since the last call, for the log."""
        spoilt, self._spoilt = self._spoilt, []
        return spoilt
