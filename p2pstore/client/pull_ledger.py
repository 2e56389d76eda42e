"""What a client read from other peers by itself, for its own peer's statistics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from p2pstore.local.local_messages import PullCount, SlowRead, TransportFallback, UnseenRead
from p2pstore.runtime.histograms import Histogram
from p2pstore.transfer.failover import HolderReport, is_silence
from p2pstore.transfer.reading.shm import ShmTransport
from p2pstore.transfer.transport import PullReport

MAX_HOLDERS: Final = 1024
MAX_SLOW_READS: Final = 16
"""In one report: who reads slowly all the time says so often enough."""
SLOW_SECONDS: Final = 0.05
"""Reads that the peer is told of; it keeps those above its own threshold."""
MAX_FALLBACKS: Final = 64
MAX_REASON_LETTERS: Final = 200
MAX_UNSEEN: Final = 4096


class _Pulls:
    """What came from one holder by one transport."""

    __slots__ = ("bytes", "durations", "failures", "lengths", "objects")

    def __init__(self) -> None:
        self.objects = 0
        self.bytes = 0
        self.failures = 0
        self.durations = Histogram()
        self.lengths = Histogram()

    def message(self, member: int, transport: str) -> PullCount:
        """For the peer."""
        return PullCount(
            member,
            transport,
            self.objects,
            self.bytes,
            self.failures,
            self.durations.trimmed(),
            self.durations.total,
            self.lengths.trimmed(),
        )


class PullLedger:
    """Counts until `take`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], _Pulls] = {}
        self._slow: list[SlowRead] = []
        self._fallbacks: dict[tuple[int, str], TransportFallback] = {}
        self._misses = 0
        self._unseen: dict[int, Counter[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts or self._slow or self._fallbacks or self._misses)

    def missed(self) -> None:
        """A read ended without the value."""
        self._misses += 1

    def pulled(self, key: str, digest: bytes, report: PullReport, seconds: float) -> None:
        """One object was read, or was not."""
        for failure in report.failures:
            self._add(failure.member, failure.transport, failures=1)
        for fallback in report.fallbacks:
            self._fell_back(fallback)
        if report.pulled is not None and report.copy is not None:
            transport, member = report.pulled.transport, report.copy.member
            if transport == ShmTransport.name:
                self._unseen_by(member, [digest])
            for share in report.brought():
                whole = int(share.member == member)
                self._add(share.member, transport, objects=whole, length_bytes=share.length_bytes)
            self._took(member, transport, seconds, report.pulled.length)
            for failure in report.failures:
                if is_silence(failure):
                    self._was_slow(key, digest, failure, seconds)
            code = 0
        elif report.failures:
            last = report.failures[-1]
            transport, member, code = last.transport, last.member, int(last.code)
        else:
            return
        if seconds >= SLOW_SECONDS and len(self._slow) < MAX_SLOW_READS:
            self._slow.append(SlowRead(digest, member, transport, seconds, code, key))

    def _was_slow(self, key: str, digest: bytes, failure: HolderReport, seconds: float) -> None:
        """A holder was left for others: all of the read's time is told, as most of it was waited for that one."""
        if seconds >= SLOW_SECONDS and len(self._slow) < MAX_SLOW_READS:
            self._slow.append(
                SlowRead(digest, failure.member, failure.transport, seconds, int(failure.code), key)
            )

    def pulled_only(
        self,
        key: str,
        digest: bytes,
        member: int,
        transport: str,
        length_bytes: int,
        seconds: float,
    ) -> None:
        """`pulled`, for an object that came from its only holder at once."""
        counted = self._counts.get((member, transport)) or self._counted(member, transport)
        if counted is not None:
            counted.objects += 1
            counted.bytes += length_bytes
            counted.durations.add_seconds(seconds)
            counted.lengths.add(length_bytes)
        if transport == ShmTransport.name:
            self._unseen_by(member, [digest])
        if seconds >= SLOW_SECONDS and len(self._slow) < MAX_SLOW_READS:
            self._slow.append(SlowRead(digest, member, transport, seconds, 0, key))

    def _unseen_by(self, member: int, digests: Sequence[bytes]) -> None:
        """Nobody but this client knows that the holder was read; its eviction is to know as well."""
        counts = self._unseen.setdefault(member, Counter())
        room = MAX_UNSEEN - sum(map(len, self._unseen.values()))
        if len(digests) > room:
            digests = [digest for digest in digests if digest in counts]
        counts.update(digests)

    def _fell_back(self, report: HolderReport) -> None:
        where = report.member, report.transport
        before = self._fallbacks.get(where)
        if before is None and len(self._fallbacks) >= MAX_FALLBACKS:
            return
        count = 1 if before is None else before.count + 1
        self._fallbacks[where] = TransportFallback(*where, count, report.text[:MAX_REASON_LETTERS])

    def count(
        self,
        member: int,
        transport: str,
        *,
        objects: int = 0,
        length_bytes: int = 0,
        failures: int = 0,
        unseen: Sequence[bytes] = (),
    ) -> None:
        """Objects came together from one holder: how long each of them is counts as their mean. `unseen`: the digests
        of what the holder did not see read."""
        if unseen:
            self._unseen_by(member, unseen)
        counted = self._add(
            member, transport, objects=objects, length_bytes=length_bytes, failures=failures
        )
        if counted is not None and objects:
            counted.lengths.add(length_bytes // objects, objects)

    def _add(
        self,
        member: int,
        transport: str,
        *,
        objects: int = 0,
        length_bytes: int = 0,
        failures: int = 0,
    ) -> _Pulls | None:
        counted = self._counted(member, transport)
        if counted is not None:
            counted.objects += objects
            counted.bytes += length_bytes
            counted.failures += failures
        return counted

    def _took(self, member: int, transport: str, seconds: float, length: int) -> None:
        """One object was read in so much time."""
        counted = self._counted(member, transport)
        if counted is not None:
            counted.durations.add_seconds(seconds)
            counted.lengths.add(length)

    def _counted(self, member: int, transport: str) -> _Pulls | None:
        """None where there are too many holders to keep apart."""
        counted = self._counts.get((member, transport))
        if counted is None and len(self._counts) < MAX_HOLDERS:
            counted = self._counts[member, transport] = _Pulls()
        return counted

    def take(
        self,
    ) -> tuple[list[PullCount], list[SlowRead], list[TransportFallback], int, list[UnseenRead]]:
        """What was counted since the last time."""
        counts, self._counts = self._counts, {}
        slow, self._slow = self._slow, []
        fallbacks, self._fallbacks = self._fallbacks, {}
        misses, self._misses = self._misses, 0
        unseen, self._unseen = self._unseen, {}
        pulls = [counted.message(*where) for where, counted in list(counts.items())]
        reads = [
            UnseenRead(digest, member, count)
            for member, counts in list(unseen.items())
            for digest, count in list(counts.items())
        ]
        return pulls, slow, list(fallbacks.values()), misses, reads
