"""Deciding parts of a swarm's shell: introductions, event loop or thread, buffers, rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from p2pstore.checkpoint.swarm.swarm_messages import MAX_INTRODUCED, Members
from p2pstore.objects import MIB

Member = int

GATHER_SECONDS: Final = 0.05
"""Introductions of this period are told together."""
BELIEVED_SECONDS: Final = 10.0
"""By then, gossip knows a member that neighbours told of."""
MAX_BELIEVED: Final = 1024
MAX_BYTES: Final = MIB
MAX_FILES: Final = 8
"""Opening and closing a file takes 20 us; a piece may have ten thousand."""
SLOW_SECONDS: Final = 0.005
FIRST_IN_THREADS: Final = 64
"""Steps left to threads after a slow one; twice as many after the next."""
MAX_IN_THREADS: Final = 16_384
MAX_KEPT_BYTES: Final = 256 * MIB
BURST_SECONDS: Final = 0.25
"""Unused bytes of this period may be used later at once."""


class Introductions:
    """Members that neighbours tell of, as gossip takes a second to announce a new one. A new link is told to the
    others, and they to it. Only members that gossip knows to be alive are dialed: a lie costs vain attempts at most."""

    def __init__(self) -> None:
        self._linked: list[Member] = []
        self._fresh: list[Member] = []
        self._believed: dict[Member, float] = {}

    def linked(self, member: Member) -> None:
        self._fresh.append(member)

    def unlinked(self, member: Member) -> None:
        self._linked = [each for each in self._linked if each != member]
        self._fresh = [each for each in self._fresh if each != member]

    @property
    def due(self) -> bool:
        return bool(self._fresh) and len(self._linked) + len(self._fresh) > 1

    def take(self) -> list[tuple[list[Member], Members]]:
        """Messages and their receivers: new links hear of all, old links of the new ones."""
        fresh, known = self._fresh, self._linked
        self._fresh, self._linked = [], known + fresh
        told = [(fresh, Members((fresh + known[::-1])[:MAX_INTRODUCED]))]
        if known:
            told.append((known, Members(fresh[:MAX_INTRODUCED])))
        return told

    def hear(self, members: Iterable[Member], now: float) -> bool:
        """A neighbour tells of members. Whether any is new."""
        self._believed = {each: until for each, until in self._believed.items() if until > now}
        before = len(self._believed)
        for member in members:
            if len(self._believed) < MAX_BELIEVED:
                self._believed.setdefault(member, now + BELIEVED_SECONDS)
        return len(self._believed) > before

    @property
    def believed(self) -> frozenset[Member]:
        """Members that neighbours told of lately."""
        return frozenset(self._believed)


class InlineOrThread:
    """Whether the event loop reads or writes a piece itself, or a thread does. Ask `may` before each step, and report
    with `took`.

    A small piece is hashed and copied to or from the page cache in a fraction of a millisecond; handing it to a thread
    costs as much. A slow disk, or a network file system, would stall the loop: so the loop only works on memory and
    local disks, and after a slow step many are left to threads.
    """

    def __init__(self, is_local: bool) -> None:
        """`is_local`: the pieces are in memory, or on a disk of this machine."""
        self._is_local = is_local
        self._in_threads = 0
        self._after_slow = FIRST_IN_THREADS

    def may(self, length_bytes: int, files: int = 1) -> bool:
        """Whether to do the next step, with these bytes and files, in the event loop."""
        if not self._is_local or length_bytes > MAX_BYTES or files > MAX_FILES:
            return False
        if self._in_threads:
            self._in_threads -= 1
            return False
        return True

    def took(self, seconds: float, waited: bool) -> None:
        """A step was done in the event loop. `waited`: for I/O, not only for a core in use by others."""
        if waited and seconds > SLOW_SECONDS:
            self._in_threads = self._after_slow
            self._after_slow = min(2 * self._after_slow, MAX_IN_THREADS)


class PieceBuffers:
    """Buffers of one size, reused: a fresh one costs a page fault each 4 KiB, which takes longer than reading the piece
    into it. Free ones are kept, up to `MAX_KEPT_BYTES`, while any is in use."""

    def __init__(self, length_bytes: int) -> None:
        """`length_bytes`: of each buffer."""
        self._length_bytes = length_bytes
        self._most_kept = MAX_KEPT_BYTES // max(length_bytes, 1)
        self._kept: list[bytearray] = []
        self._used = 0

    @property
    def kept(self) -> int:
        return len(self._kept)

    def take(self) -> bytearray:
        """A buffer with arbitrary content. `give_back` follows."""
        self._used += 1
        return self._kept.pop() if self._kept else bytearray(self._length_bytes)

    def give_back(self, buffer: bytearray) -> None:
        self._used -= 1
        if not self._used:
            self._kept.clear()
        elif len(self._kept) < self._most_kept:
            self._kept.append(buffer)


class TokenBucket:
    """A limit on bytes a second. A request larger than the bucket waits until it is full, later ones for its debt."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self._rate = bytes_per_second
        self._free_at = now
        """When all that was taken so far is paid for."""

    def take(self, length_bytes: int, now: float) -> float:
        """Take bytes; returns the seconds to wait before they may move."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + length_bytes / self._rate
        return max(0.0, begin - now)

    def give_back(self, length_bytes: int) -> None:
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
    """Rates of members that fetch now, from their announcements."""

    def __init__(self) -> None:
        self._paces: dict[Part, _Pace] = {}

    def look(self, fetching: Mapping[Part, int], now: float) -> None:
        """Take a sample: permille done of each fetching member and version."""
        for part in [each for each in self._paces if each not in fetching]:
            del self._paces[part]
        for part, permille in fetching.items():
            pace = self._paces.get(part)
            if pace is None or permille < pace.permille:
                self._paces[part] = _Pace(now, permille, now, permille)
            elif permille > pace.permille:
                pace.permille, pace.changed_at = permille, now

    def permille_per_second(self, part: Part) -> float:
        """Mean rate since the first sample; 0 when unknown."""
        pace = self._paces.get(part)
        if pace is None or pace.changed_at <= pace.began_at:
            return 0.0
        return (pace.permille - pace.began_permille) / (pace.changed_at - pace.began_at)
