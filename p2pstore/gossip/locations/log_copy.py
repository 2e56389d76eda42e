"""Copying what a log holds while it changes, in steps that hold nobody up. Pure.

Records are copied from the last position to the first; one that takes the place of another comes from behind, so
none is left out, though it may come twice. What is said of a digest meanwhile is noted. At the end those records
are taken as they are then, in place of what was copied of them: that is the set at one place of the log. (Databases
call it a fuzzy snapshot, made whole by the log.)
"""

from __future__ import annotations

from typing import Final

import numpy as np

from p2pstore.gossip.locations.location_index import LocationIndex
from p2pstore.gossip.records import LOCATION_BYTES, LogHead
from p2pstore.location_table import RECORD, WHOLE
from p2pstore.objects import DIGEST_BYTES

STEP_RECORDS: Final = 16_384
"""Copied in one step, of half a millisecond."""


class LogCopy:
    """A copy under way: `step` until that says that it is done, then `head` and `parts`. Made by `OwnLog.copying`."""

    def __init__(self, records: LocationIndex, slot: int) -> None:
        self.incarnation = 0
        self.head = LogHead()
        """Where the log stands that the parts add up to."""
        self.parts: list[bytes] = []
        """Packed records, in no particular order."""
        self._records = records
        self._slot = slot
        self._left = records.count(slot)
        self._to_filter = 0
        self._noted: set[bytes] = set()
        self._sealed = False

    @property
    def copied(self) -> bool:
        """Whether only `seal` is missing: the log calls it then, in the same step."""
        return self._left == 0 and not self._sealed

    def note(self, digest: bytes) -> None:
        """Something is about to be said of this digest, or its record about to be moved."""
        if not self._sealed:
            self._noted.add(digest)

    def step(self) -> None:
        """Copy some records, or leave out some that are not what they were when they were copied."""
        if self._sealed:
            self._to_filter -= 1
            self.parts[self._to_filter] = self._without_noted(self.parts[self._to_filter])
            return
        stop = min(self._left, self._records.count(self._slot))
        start = max(0, stop - STEP_RECORDS)
        if stop:
            self.parts.append(self._records.records(self._slot, start, stop))
        self._left = start

    def seal(self, incarnation: int, head: LogHead) -> None:
        """All was copied, and the log stands at `head` now."""
        self._sealed = True
        self.incarnation, self.head = incarnation, head
        self._to_filter = len(self.parts) if self._noted else 0
        held = (self._records.get(self._slot, digest) for digest in self._noted)
        self.parts.append(b"".join(record for record in held if record is not None))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._sealed and not self._to_filter

    def _without_noted(self, part: bytes) -> bytes:
        fields = np.frombuffer(part, RECORD)
        first = np.frombuffer(b"".join(digest[:8] for digest in self._noted), "<u8")
        kept = np.ones(fields.size, np.bool_)
        for place in np.flatnonzero(np.isin(fields["first"], first)).tolist():
            start = place * LOCATION_BYTES
            kept[place] = part[start : start + DIGEST_BYTES] not in self._noted
        return part if kept.all() else np.frombuffer(part, WHOLE)[kept].tobytes()
