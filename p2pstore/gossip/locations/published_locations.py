"""The table of locations that clients of this peer look up by themselves. Pure.

The table has the records of all views. Beside them it says whose count, between which clocks versions are
believed, and of which keys something else is known as well: of those, and while something is being changed,
clients ask. So they never have to know how gossip comes to its answers.
"""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.records import Member
from p2pstore.location_table import (
    MAX_COUNTED_SLOTS,
    LocationTable,
    Word,
    apart_counter,
    floor_clock,
)
from p2pstore.objects import DIGEST_BYTES

_FULL: Final = 255
"""A counter that came so far stays there."""


class ApartKeys:
    """Keys of which more is known than the table says: a counting Bloom filter with one hash (Fan et al. 2000).
    Without `counters`, no client asks for it and nothing is kept."""

    def __init__(self, counters: memoryview | None = None) -> None:
        self._counters = counters

    def add(self, digest: bytes) -> None:
        """Something more is known. As often as this is said, `remove` takes it back. Names that are no digests are
        left out."""
        counters = self._counters
        if counters is None or len(digest) != DIGEST_BYTES:
            return
        if counters[at := apart_counter(digest)] < _FULL:
            counters[at] += 1

    def remove(self, digest: bytes) -> None:
        """One of the things that were `add`ed is known no more."""
        counters = self._counters
        if counters is None or len(digest) != DIGEST_BYTES:
            return
        if counters[at := apart_counter(digest)] < _FULL:
            counters[at] -= 1

    def close(self) -> None:
        """No client asks any more."""
        self._counters = None


class PublishedLocations:
    """See the module's docstring. `table` is in memory that clients may map."""

    def __init__(self, table: LocationTable) -> None:
        self.table = table
        self.apart = ApartKeys(table.apart)
        self._words = table.words
        self._forbidden_up_to = 0

    def begin(self) -> None:
        """Rows or links are about to be changed."""
        self._words[Word.CHANGES] += 1

    def end(self) -> None:
        """They are as they should be again."""
        self._words[Word.CHANGES] += 1

    def count(self, slot: int, member: Member, counts: bool) -> None:
        """A member's records are in a slot; whether they count."""
        if slot < MAX_COUNTED_SLOTS:
            self.table.members[slot] = member
            self.table.counted[slot] = counts

    def forbid_up_to(self, clock: int) -> None:
        """Versions up to this clock may be forbidden: of those, clients ask."""
        self._forbidden_up_to = max(self._forbidden_up_to, clock)
        self._words[Word.BELIEVED_AFTER] = max(self._words[Word.BELIEVED_AFTER], clock)

    def doubt_up_to(self, clock: int) -> None:
        """As `forbid_up_to`, until the next call: a member's copies of versions up to this clock are not believed."""
        self._words[Word.BELIEVED_AFTER] = max(self._forbidden_up_to, clock)

    def forbid_key_up_to(self, digest: bytes, clock: int) -> None:
        """`forbid_up_to` for one key. It is not taken back: newer versions count all the same. Names that are no
        digests are left out."""
        if len(digest) == DIGEST_BYTES:
            at, floors = floor_clock(digest), self.table.floors
            floors[at] = max(floors[at], clock)

    def vouch(self, now: float, newest_clock: int) -> None:
        """At this monotonic time the table says all that is known here. Versions above `newest_clock` are
        not believed yet."""
        self._words[Word.BELIEVED_BEFORE] = newest_clock + 1
        self._words[Word.ALIVE_AT] = max(1, int(now * 1e9))

    def withdraw(self) -> None:
        """Clients are to ask about everything."""
        self._words[Word.ALIVE_AT] = 0

    def close(self) -> None:
        """`withdraw` for good, and let go of the memory. Nothing else may be called after that."""
        self.withdraw()
        self.apart.close()
        del self.table, self._words
