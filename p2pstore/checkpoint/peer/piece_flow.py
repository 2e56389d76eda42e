"""Members of a swarm that neighbours tell of: gossip takes a second to say who came. Pure.

Who links tells the others, and is told of them. Only members that gossip knows to be alive are ever dialed, so that
who tells nonsense makes others try in vain at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from p2pstore.checkpoint.swarm.swarm_messages import MAX_INTRODUCED, Members
from p2pstore.objects import MIB

Member = int

GATHER_SECONDS: Final = 0.05
"""News of so long is told together."""
BELIEVED_SECONDS: Final = 10.0
"""By then, gossip says it."""
MAX_BELIEVED: Final = 1024


class Introductions:
    """What is to be told, and what is believed."""

    def __init__(self) -> None:
        self._linked: list[Member] = []
        self._fresh: list[Member] = []
        self._believed: dict[Member, float] = {}

    def linked(self, member: Member) -> None:
        """There is a link to it now."""
        self._fresh.append(member)

    def unlinked(self, member: Member) -> None:
        """There is none any more."""
        self._linked = [each for each in self._linked if each != member]
        self._fresh = [each for each in self._fresh if each != member]

    @property
    def due(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._fresh) and len(self._linked) + len(self._fresh) > 1

    def take(self) -> list[tuple[list[Member], Members]]:
        """What to tell whom: those who came, of all; the others, of those who came."""
        fresh, known = self._fresh, self._linked
        self._fresh, self._linked = [], known + fresh
        told = [(fresh, Members((fresh + known[::-1])[:MAX_INTRODUCED]))]
        if known:
            told.append((known, Members(fresh[:MAX_INTRODUCED])))
        return told

    def hear(self, members: Iterable[Member], now: float) -> bool:
        """A neighbour tells of these. Whether any is new."""
        self._believed = {each: until for each, until in self._believed.items() if until > now}
        before = len(self._believed)
        for member in members:
            if len(self._believed) < MAX_BELIEVED:
                self._believed.setdefault(member, now + BELIEVED_SECONDS)
        return len(self._believed) > before

    @property
    def believed(self) -> frozenset[Member]:
        """All that neighbours told of lately."""
        return frozenset(self._believed)


MOST_BYTES: Final = MIB
MOST_FILES: Final = 8
"""To open and close a file takes 20 us; a piece may have ten thousand of them."""
SLOW_SECONDS: Final = 0.005
FIRST_IN_THREADS: Final = 64
"""Steps that are left to threads after a slow one; twice as many after the next."""
MOST_IN_THREADS: Final = 16_384


class AtOnce:
    """Ask `may` before each step, and say how long it `took`."""

    def __init__(self, is_local: bool) -> None:
        """`is_local`: the pieces are in memory, or on a disk of this machine."""
        self._is_local = is_local
        self._in_threads = 0
        self._after_slow = FIRST_IN_THREADS

    def may(self, length_bytes: int, files: int = 1) -> bool:
        """Whether the next step, with so many bytes of so many files, is to be done at once."""
        if not self._is_local or length_bytes > MOST_BYTES or files > MOST_FILES:
            return False
        if self._in_threads:
            self._in_threads -= 1
            return False
        return True

    def took(self, seconds: float, waited: bool) -> None:
        """A step was done at once, in so many seconds; `waited`: for something, not only for a core that others had."""
        if waited and seconds > SLOW_SECONDS:
            self._in_threads = self._after_slow
            self._after_slow = min(2 * self._after_slow, MOST_IN_THREADS)


MOST_KEPT_BYTES: Final = 256 * MIB


class PieceBuffers:
    """All of one size. Those that nobody uses are kept while somebody uses another one, up to `MOST_KEPT_BYTES`."""

    def __init__(self, length_bytes: int) -> None:
        """`length_bytes`: of each of them."""
        self._length_bytes = length_bytes
        self._most_kept = MOST_KEPT_BYTES // max(length_bytes, 1)
        self._kept: list[bytearray] = []
        self._used = 0

    @property
    def kept(self) -> int:
        """How many nobody uses."""
        return len(self._kept)

    def take(self) -> bytearray:
        """A buffer, with whatever is in it. `give_back` follows."""
        self._used += 1
        return self._kept.pop() if self._kept else bytearray(self._length_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Nobody reads or writes it any more."""
        self._used -= 1
        if not self._used:
            self._kept.clear()
        elif len(self._kept) < self._most_kept:
            self._kept.append(buffer)


BURST_SECONDS: Final = 0.25
"""So much of what was not used may be used later at once."""


class TokenBucket:
    """How long to wait before so many more bytes may move. What is larger than the bucket waits for it to be full, and
    those who come next wait for what it owes."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self._rate = bytes_per_second
        self._free_at = now
        """When all that was taken so far has been paid for."""

    def take(self, length_bytes: int, now: float) -> float:
        """Take so many bytes; seconds to wait before they may move."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + length_bytes / self._rate
        return max(0.0, begin - now)

    def give_back(self, length_bytes: int) -> None:
        """So many bytes did not move after all."""
        self._free_at -= length_bytes / self._rate


Part = tuple[int, bytes]
"""(member, version)."""


@dataclass(slots=True)
class _Pace:
    began_at: float
    began_permille: int
    changed_at: float
    permille: int


class Paces:
    """Remembers those that fetch something now, and no others."""

    def __init__(self) -> None:
        self._paces: dict[Part, _Pace] = {}

    def look(self, fetching: Mapping[Part, int], now: float) -> None:
        """So much, in permille, has each of those who fetch."""
        for part in [each for each in self._paces if each not in fetching]:
            del self._paces[part]
        for part, permille in fetching.items():
            pace = self._paces.get(part)
            if pace is None or permille < pace.permille:
                self._paces[part] = _Pace(now, permille, now, permille)
            elif permille > pace.permille:
                pace.permille, pace.changed_at = permille, now

    def permille_per_second(self, part: Part) -> float:
        """Since it was seen first; 0 where that is not known yet."""
        pace = self._paces.get(part)
        if pace is None or pace.changed_at <= pace.began_at:
            return 0.0
        return (pace.permille - pace.began_permille) / (pace.changed_at - pace.began_at)
