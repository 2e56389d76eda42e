"""Reads of a client without requests, for its peer's eviction and statistics; and holders that failed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from p2pstore.local.local_messages import (
    MAX_BATCH,
    AccessCount,
    HolderFailure,
    PullCount,
    ReadTiming,
    Report,
    SlowRead,
    TransportFallback,
    UnseenRead,
)
from p2pstore.local.local_requests import MAX_REPORTED_FAILURES
from p2pstore.runtime.histograms import Histogram
from p2pstore.transfer.failover import HolderReport, is_silence
from p2pstore.transfer.reading.shm_transport import ShmTransport
from p2pstore.transfer.transport import PullReport

MAX_HOLDERS: Final = 1024
MAX_REPORTED_KEYS: Final = MAX_BATCH
MAX_SLOW_READS: Final = 16
"""In one report."""
SLOW_SECONDS: Final = 0.05
"""Duration from which on the peer is told of a read; it keeps those above its own threshold."""
MAX_FALLBACKS: Final = 64
MAX_REASON_LETTERS: Final = 200
MAX_UNSEEN: Final = 4096


class _Pulls:
    """Counts of one holder and transport."""

    __slots__ = ("bytes", "durations", "failures", "lengths", "objects")

    def __init__(self) -> None:
        self.objects = 0
        self.bytes = 0
        self.failures = 0
        self.durations = Histogram()
        self.lengths = Histogram()

    def took(self, seconds: float, length_bytes: int) -> None:
        """One object was read in this time."""
        self.durations.add_seconds(seconds)
        self.lengths.add(length_bytes)

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


class ReadLedger:
    """Counts until `take`. `wake` is called when there is something to tell; it never waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._reads: dict[bytes, list[int]] = {}
        """Of the local peer's memory, by digest: how often, how long, and how often as a view."""
        self._failures: deque[HolderFailure] = deque(maxlen=MAX_REPORTED_FAILURES)
        self._counts: dict[tuple[int, str], _Pulls] = {}
        self._slow: list[SlowRead] = []
        self._fallbacks: dict[tuple[int, str], TransportFallback] = {}
        self._misses = 0
        self._unseen: dict[int, Counter[bytes]] = {}
        self._timings: dict[tuple[int, bool], list[int]] = {}
        """By holder, and whether from its SSD: requests, bytes and microseconds."""

    def __bool__(self) -> bool:
        return bool(
            self._reads
            or self._failures
            or self._counts
            or self._slow
            or self._fallbacks
            or self._misses
            or self._timings
        )

    @property
    def is_urgent(self) -> bool:
        """Whether the peer is to be told before anything else is asked: a holder failed."""
        return bool(self._failures)

    def read(self, digest: bytes, length: int, *, is_view: bool = False) -> None:
        """One object was read from the local peer's memory without a request."""
        counted = self._reads.get(digest)
        if counted is not None:
            counted[0] += 1
            counted[2] += is_view
        elif len(self._reads) < MAX_REPORTED_KEYS:
            self._reads[digest] = [1, length, int(is_view)]
            self._wake()

    def read_many(self, digests: Sequence[bytes], lengths: Sequence[int]) -> None:
        """`read` of a batch; length -1 for what was not read."""
        reads = self._reads
        for digest, length in zip(digests, lengths, strict=True):
            counted = reads.get(digest)
            if counted is not None:
                counted[0] += length >= 0
            elif length >= 0 and len(reads) < MAX_REPORTED_KEYS:
                reads[digest] = [1, length, 0]
        if reads:
            self._wake()

    def touched(self, digests: Sequence[bytes]) -> None:
        """Objects of the local peer's memory are in use elsewhere: they count as recent, and as read 0 times."""
        for digest in digests[: MAX_REPORTED_KEYS - len(self._reads)]:
            self._reads.setdefault(digest, [0, 0, 0])
        self._wake()

    def timed(
        self, member: int, length_bytes: int, seconds: float, *, requests: int = 1, on_ssd: bool = False
    ) -> None:
        """A holder (or OWN_COPY) delivered these bytes in that time. The peer learns its speed from that."""
        if length_bytes <= 0:
            return
        self._wake()
        timing = self._timings.get((member, on_ssd))
        if timing is None:
            if len(self._timings) >= MAX_HOLDERS:
                return
            timing = self._timings[member, on_ssd] = [0, 0, 0]
        timing[0] += requests
        timing[1] += length_bytes
        timing[2] += ceil(seconds * 1e6)

    def failed(self, failures: Sequence[HolderFailure]) -> None:
        """Holders did not deliver."""
        self._failures.extend(failures)

    def missed(self) -> None:
        """A read ended without the value: no reachable peer has it."""
        self._misses += 1
        self._wake()

    def pulled(self, key: str, digest: bytes, report: PullReport, seconds: float) -> None:
        """One object was read from its holders, or was not."""
        self._wake()
        for failure in report.failures:
            self._counted(failure.member, failure.transport).failures += 1
        for fallback in report.fallbacks:
            self._fell_back(fallback)
        if report.pulled is not None and report.copy is not None:
            transport, member, code = report.pulled.transport, report.copy.member, 0
            if transport == ShmTransport.name:
                self._unseen_by(member, [digest])
            for share in report.brought():
                counted = self._counted(share.member, transport)
                counted.objects += share.member == member
                counted.bytes += share.length_bytes
            self._counted(member, transport).took(seconds, report.pulled.length)
            if not report.failures and len(report.brought()) == 1:
                self.timed(member, report.pulled.length, seconds, on_ssd=report.copy.on_ssd)
            for (
                failure
            ) in report.failures:  # a holder that was left: most of the time was the wait for it
                if is_silence(failure):
                    self._was_slow(
                        key, digest, failure.member, failure.transport, seconds, int(failure.code)
                    )
        elif report.failures:
            last = report.failures[-1]
            transport, member, code = last.transport, last.member, int(last.code)
        else:
            return
        self._was_slow(key, digest, member, transport, seconds, code)

    def _was_slow(
        self, key: str, digest: bytes, member: int, transport: str, seconds: float, code: int = 0
    ) -> None:
        """Tell of a read if it was slow, by how long all of it took."""
        if seconds >= SLOW_SECONDS and len(self._slow) < MAX_SLOW_READS:
            self._slow.append(SlowRead(digest, member, transport, seconds, code, key))

    def pulled_only(
        self, key: str, digest: bytes, member: int, transport: str, length_bytes: int, seconds: float
    ) -> None:
        """`pulled`, for an object that came from its only holder at once."""
        self._wake()
        counted = self._counts.get((member, transport)) or self._counted(member, transport)
        counted.objects += 1
        counted.bytes += length_bytes
        counted.took(seconds, length_bytes)
        self.timed(member, length_bytes, seconds)
        if transport == ShmTransport.name:
            self._unseen_by(member, [digest])
        if seconds >= SLOW_SECONDS:
            self._was_slow(key, digest, member, transport, seconds)

    def _unseen_by(self, member: int, digests: Sequence[bytes]) -> None:
        """The holder did not see that it was read; its eviction needs to know."""
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
        self._wake()
        if unseen:
            self._unseen_by(member, unseen)
        counted = self._counted(member, transport)
        counted.objects += objects
        counted.bytes += length_bytes
        counted.failures += failures
        if objects:
            counted.lengths.add(length_bytes // objects, objects)

    def _counted(self, member: int, transport: str) -> _Pulls:
        """The counts of a holder; those of no one where there are too many holders to keep apart."""
        counted = self._counts.get((member, transport))
        if counted is None:
            counted = _Pulls()
            if len(self._counts) < MAX_HOLDERS:
                self._counts[member, transport] = counted
        return counted

    def take(self) -> Report:
        """The counts since the last call."""
        reads, self._reads = self._reads, {}
        failures = []
        while self._failures:
            failures.append(self._failures.popleft())
        pulls, self._counts = self._counts, {}
        slow, self._slow = self._slow, []
        fallbacks, self._fallbacks = self._fallbacks, {}
        misses, self._misses = self._misses, 0
        unseen, self._unseen = self._unseen, {}
        timings, self._timings = self._timings, {}
        return Report(
            [
                AccessCount(digest, count, count * length, views)
                for digest, (count, length, views) in list(reads.items())
            ],
            failures,
            [counted.message(*where) for where, counted in list(pulls.items())],
            slow,
            list(fallbacks.values()),
            misses,
            [
                UnseenRead(digest, member, count)
                for member, counts in list(unseen.items())
                for digest, count in list(counts.items())
            ],
            [ReadTiming(*where, *timing) for where, timing in list(timings.items())],
        )
