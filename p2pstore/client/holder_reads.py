"""Reading from other peers: by connections and mappings of the client's own, each read reported to the local peer."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, compress, pairwise
from random import Random
from typing import Final

from p2pstore.client.known_holders import KnownHolders
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.read_plan import OnlyHolder, ReadPlan, blamed, remote_copy
from p2pstore.local.local_messages import HolderFailure
from p2pstore.objects import CHUNK_BYTES, Version
from p2pstore.runtime.side_by_side import Work, together
from p2pstore.runtime.streams import Driver, Event
from p2pstore.transfer.data_messages import SMALL_OBJECT_BYTES
from p2pstore.transfer.failover import PullFailed, is_silence
from p2pstore.transfer.reading.arriving import Destination, ResumableDestination
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.shm_transport import RoomsFor, ShmTransport, copy_into, copy_many
from p2pstore.transfer.reading.small_reads import Part
from p2pstore.transfer.reading.span_reads import BatchItem, ItemOutcome
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.transport import (
    SLICED_BYTES,
    Pulled,
    PullReport,
    RemoteCopy,
    Transport,
    failed_report,
    pull_with_failover,
    with_alternatives,
)

MAX_HOLDERS: Final = 8
"""Holders that one batch is read from at once."""
MAX_ALONE: Final = 4
"""Concurrent single reads from one holder: as many as idle connections are kept. A smaller batch is slower."""
MANY: Final = 8
"""After a batch of this size, at most one read is alone: the next batch begins when it has ended."""
GATHER_SECONDS: Final = 5e-3
"""Minimum time between two yields of a lone reader. A yield costs about 10 us."""
MAX_TOGETHER: Final = 256
"""Reads in one batch."""
Came = tuple[int, PullFailed | None]
"""The length of an object, or -1 when it takes another way of reading; and how the connection failed."""
PullSmall = Callable[
    [RemoteCopy, Sequence[bytes], Sequence[memoryview]], Awaitable[tuple[list[int], PullFailed | None]]
]
"""See `ConnectionPool.pull_small`."""


class HolderReads:
    """The ways of one client to other peers."""

    def __init__(self, link: PeerLink, *, in_threads: bool) -> None:
        """`in_threads`: concurrent reads run in threads, and do not share requests: a wake-up between threads costs
        more than a request."""
        self._link = link
        self._shm = ShmTransport(link.driver, link.timeout_seconds)
        link.mapped.append(self._shm)
        self._pool = ConnectionPool(link.driver, progress_seconds=link.timeout_seconds)
        self._transports: list[Transport] = [self._shm, TcpTransport(self._pool)]
        self._together = None if in_threads else ReadingTogether(link.driver, self._pool.pull_small)
        self.known = KnownHolders(link.elsewhere, Random())
        self._batches: set[object] = set()
        """Batches that are being read from other hosts."""

    def close(self) -> None:
        """Close the connections to other peers."""
        self.known.close()
        self._shm.close()
        self._pool.close()

    # --- one object --------------------------------------------------------------------------

    async def pull_chunk(
        self, only: OnlyHolder, key: str, digest: bytes, view: memoryview
    ) -> int | PullReport | None:
        """An object of at most one chunk from its only holder, into the beginning of `view`: its length, or how that
        failed. None: the holder says that another way of reading is to tell more."""
        copy = only.copy
        if not only.is_far:
            return await self._copy_mapped(key, digest, view, copy)
        view = view[: min(only.expected_bytes, CHUNK_BYTES)]
        if not view:
            return None
        began = time.monotonic()
        if self._together is not None and len(view) <= SMALL_OBJECT_BYTES:
            length, failure = await self._together.read(copy, digest, view)
        else:
            lengths, failure = await self._pool.pull_small(copy, (digest,), (view,))
            length = lengths[0] if lengths else -1
        seconds = time.monotonic() - began
        if failure is not None:
            report = failed_report(copy, self._transports, failure)
            self._note(key, digest, report, seconds, own=True)
            return report
        if length < 0:
            return None
        self._link.ledger.pulled_only(key, digest, copy.member, TcpTransport.name, length, seconds)
        return length

    async def _copy_mapped(
        self, key: str, digest: bytes, view: memoryview, copy: RemoteCopy
    ) -> int | None:
        """Out of the memory of a peer of this host, where that is mapped already."""
        began = time.monotonic()
        readers = self._shm.mapped(copy)
        length = await copy_into(self._link.driver, readers, digest, view, copy.announced)
        if length is not None:
            seconds = time.monotonic() - began
            self._link.ledger.pulled_only(key, digest, copy.member, self._shm.name, length, seconds)
        return length

    async def pull_only(
        self, only: OnlyHolder, key: str, digest: bytes, destination: ResumableDestination
    ) -> Pulled | PullReport | None:
        """An object of any length from its only holder, or how that failed. None where a plan may tell a faster way:
        to a peer of this host, and to an object that several holders could bring."""
        copy, is_far, slot_hint, expected_bytes = only
        if not is_far or expected_bytes >= SLICED_BYTES:
            return None
        began = time.monotonic()
        destination.announced = copy.announced
        try:
            pulled = await self._pool.pull(copy, digest, destination, slot_hint, expected_bytes)
            report = PullReport(pulled, copy, ())
        except PullFailed as failure:
            report = failed_report(copy, self._transports, failure)
        finally:
            destination.announced = None
        self._note(key, digest, report, time.monotonic() - began, own=True)
        return report.pulled or report

    async def pull(
        self, key: str, digest: bytes, destination: Destination, plan: ReadPlan
    ) -> PullReport:
        """An object from the holders that the plan names now."""
        copies = [remote_copy(holder) for holder in plan.holders]
        if plan.keeps is not None:
            copies = [replace(copy, keeps=plan.keeps) for copy in copies]
        began = time.monotonic()
        report = await pull_with_failover(copies, self._transports, digest, destination)
        self._note(key, digest, report, time.monotonic() - began, own=plan.is_own)
        return report

    def _note(self, key: str, digest: bytes, report: PullReport, seconds: float, *, own: bool) -> None:
        """Count a read that ended, and tell the local peer of holders that failed."""
        self._link.ledger.pulled(key, digest, report, seconds)
        failures = [each for each in report.failures if not each.keep]
        if failures:
            self.known.forget(each.member for each in failures)
            self._link.ledger.failed(
                [
                    HolderFailure(digest, each.member, int(each.code), each.incarnation, each.sequence)
                    for each in blamed(report, own=own)
                ]
            )

    # --- many objects of one holder ----------------------------------------------------------

    async def side_by_side(self, far: Sequence[Work], near: Sequence[Work]) -> None:
        """Do reads of several holders at once, each with its own connection; this task does all that copy from this
        host."""

        async def copy() -> None:
            for each in near:
                await each()

        reads = [*far, copy] if near or not far else far
        if len(reads) == 1:
            await reads[0]()
        else:
            await together(self._link.driver, reads, MAX_HOLDERS)

    async def map_nearby(self, copy: RemoteCopy, others: Collection[bytes]) -> PullFailed | None:
        """Map the memory of a peer of this host, for `copy_many_nearby`. Returns the failure, if any."""
        try:
            await self._shm.open(_with_alternatives(copy, others))
        except PullFailed as failure:
            return failure
        return None

    async def copy_many_nearby(
        self,
        copy: RemoteCopy,
        digests: Sequence[bytes],
        rooms_for: RoomsFor,
        versions: Sequence[Version],
    ) -> list[int]:
        """Copies from a peer of this host whose memory is mapped already: see `copy_many`."""
        readers = self._shm.mapped(copy) if copy.same_host else ()
        began = time.monotonic()
        lengths = await copy_many(
            self._link.driver, readers, digests, rooms_for, copy.announced, versions
        )
        missing = lengths.count(-1)
        if missing < len(lengths):
            self._link.ledger.count(
                copy.member,
                self._shm.name,
                objects=len(lengths) - missing,
                length_bytes=sum(lengths) + missing,
                unseen=list(compress(digests, [length >= 0 for length in lengths]))
                if missing
                else digests,
            )
            self._link.ledger.timed(copy.member, sum(lengths) + missing, time.monotonic() - began)
        return lengths

    async def pull_many(
        self, copy: RemoteCopy, items: Sequence[BatchItem], others: Collection[bytes]
    ) -> list[ItemOutcome]:
        """Many objects over one connection; per item what came, or why not. `others`: peers that hold each of them as
        well, or none."""
        with self._share_of_time() as seconds:
            outcomes = await self._pool.pull_many(_with_alternatives(copy, others), items)
            lengths = [each.length for each in outcomes if isinstance(each, Pulled)]
            failures = sum(isinstance(each, PullFailed) for each in outcomes)
            self._batch_ended(copy, lengths, len(items), failures, seconds())
        return outcomes

    async def pull_small(
        self, copy: RemoteCopy, wanted: Part, others: Collection[bytes]
    ) -> tuple[list[int], PullFailed | None]:
        """`pull_many` of objects of at most one chunk each, in fewer steps: their lengths, -1 where `pull_many` is to
        say more; and the failure that left the rest open."""
        with self._share_of_time() as seconds:
            lengths, failure = await self._pool.pull_small_parts(
                _with_alternatives(copy, others), wanted
            )
            came = lengths if lengths.count(-1) == 0 else [each for each in lengths if each >= 0]
            self._batch_ended(copy, came, len(wanted.views), len(wanted.views) - len(lengths), seconds())
        return lengths, failure

    @contextmanager
    def _share_of_time(self) -> Iterator[Callable[[], float]]:
        """The time that one batch took, divided by the number of those read at once: they share this host's link, and
        an estimate adds the times of all holders up."""
        began, batch = time.monotonic(), object()
        self._batches.add(batch)
        at_once = len(self._batches)
        try:
            yield lambda: (time.monotonic() - began) / max(at_once, len(self._batches))
        finally:
            self._batches.discard(batch)

    def _batch_ended(
        self, copy: RemoteCopy, lengths: Sequence[int], asked: int, failures: int, seconds: float
    ) -> None:
        """Objects of these lengths came, of this number that were asked for. A batch is one request, but an SSD is read
        for each of its objects."""
        length_bytes = sum(lengths)
        if failures:
            self.known.forget([copy.member])
        self._link.ledger.count(
            copy.member,
            TcpTransport.name,
            objects=len(lengths),
            length_bytes=length_bytes,
            failures=failures,
        )
        if len(lengths) == asked:
            requests = asked if copy.on_ssd else 1
            self._link.ledger.timed(
                copy.member, length_bytes, seconds, requests=requests, on_ssd=copy.on_ssd
            )


def _with_alternatives(copy: RemoteCopy, others: Collection[bytes]) -> RemoteCopy:
    return with_alternatives(copy, others, soon=True) if others else copy


class _Waiting:
    """A read that waits for its turn. A batch is read into `room`: the task may be cancelled meanwhile, and reuse its
    own memory."""

    __slots__ = (
        *("digest", "event", "failure", "is_alone", "is_gone", "leads"),
        *("length", "room", "room_bytes"),
    )

    def __init__(self, digest: bytes, room_bytes: int, event: Event) -> None:
        self.digest = digest
        self.room_bytes = room_bytes
        self.event = event
        self.is_alone = False
        """It has left the queue and reads alone."""
        self.leads = False
        """It reads for all that are in the queue."""
        self.is_gone = False
        self.room = memoryview(b"")
        self.length = -1
        self.failure: PullFailed | None = None


class _Holder:
    """The readers of one holder: `alone` of at most `most_alone`. `leads`: a reader gathers or reads a batch, or is
    called to do so; no other begins then."""

    __slots__ = ("alone", "gathered_at", "leads", "most_alone", "queue")

    def __init__(self) -> None:
        self.alone = 0
        self.gathered_at = -math.inf
        self.most_alone = MAX_ALONE
        self.leads = False
        self.queue: list[_Waiting] = []

    @property
    def is_to_gather(self) -> bool:
        """Whether the next reader yields first."""
        return not self.alone and (
            self.most_alone < MAX_ALONE or time.monotonic() - self.gathered_at >= GATHER_SECONDS
        )


class ReadingTogether:
    """Small reads of many tasks of one event loop from one holder, in batches. From 5 concurrent reads on, tasks wait
    for each other and one reads for all; otherwise each read costs both ends a turn of their event loops.

    Measured with 32 tasks that get 4 KiB over TCP: 124 us per get instead of 311, and 10 us of the holder's CPU instead
    of 42; with 8 tasks 73 us instead of 151. Up to 4 tasks read alone. That is why this second way exists.

    On a fast network an answer arrives while its request is still being sent: a lone task would never yield, and the
    others could not ask. So the first reader yields now and then, and always while there are many.
    """

    def __init__(self, driver: Driver, pull_small: PullSmall) -> None:
        self._driver = driver
        self._pull_small = pull_small
        self._holders: dict[int, _Holder] = {}
        """By member: few, as only known holders are read from."""

    async def read(self, copy: RemoteCopy, digest: bytes, view: memoryview) -> Came:
        """Read an object into the beginning of `view`, which is not empty, alone or with others."""
        holder = self._holders.get(copy.member)
        if holder is None:
            holder = self._holders[copy.member] = _Holder()
        gathers = False
        if holder.alone < holder.most_alone and not (holder.queue or holder.leads):
            gathers = holder.is_to_gather
            if not gathers:
                holder.alone += 1
                return await self._read_alone(holder, copy, digest, view)
        waiting = _Waiting(digest, len(view), self._driver.event())
        holder.queue.append(waiting)
        try:
            if gathers:
                await self._gather(holder, waiting)
            else:
                await waiting.event.wait(math.inf)  # the read has a deadline
        except BaseException:
            _leave(holder, waiting)
            raise
        if waiting.is_alone:
            return await self._read_alone(holder, copy, digest, view)
        if waiting.leads:
            await self._lead(copy, holder)
        if waiting.length > 0:
            view[: waiting.length] = waiting.room[: waiting.length]
        return waiting.length, waiting.failure

    async def _read_alone(
        self, holder: _Holder, copy: RemoteCopy, digest: bytes, view: memoryview
    ) -> Came:
        try:
            lengths, failure = await self._pull_small(copy, (digest,), (view,))
            if failure is not None:
                _fail_if_silent(holder, failure)
            return (lengths[0] if lengths else -1), failure
        finally:
            holder.alone -= 1
            _call_next(holder)

    async def _gather(self, holder: _Holder, first: _Waiting) -> None:
        """Yield; then `first` leads, or the few readers read alone."""
        first.leads = holder.leads = True
        await self._driver.sleep(0)
        if holder.most_alone < MAX_ALONE:
            # The others of the last batch were called when `first` was, and their turn may come after it.
            await self._driver.sleep(0)
        holder.gathered_at = time.monotonic()
        if first.leads and len(holder.queue) <= MAX_ALONE:
            first.leads = holder.leads = False
            holder.most_alone = MAX_ALONE
            _call_next(holder)

    async def _lead(self, copy: RemoteCopy, holder: _Holder) -> None:
        """Read for those that wait, the caller first. When cancelled, the next one leads the others."""
        some = holder.queue[:MAX_TOGETHER]
        del holder.queue[:MAX_TOGETHER]
        holder.most_alone = 1 if len(some) >= MANY else MAX_ALONE
        try:
            ends = list(accumulate((each.room_bytes for each in some), initial=0))
            memory = memoryview(bytearray(ends[-1]))
            for each, (start, end) in zip(some, pairwise(ends), strict=True):
                each.room = memory[start:end]
            lengths, failure = await self._pull_small(
                copy, [each.digest for each in some], [each.room for each in some]
            )
            for each, length in zip(some, lengths, strict=False):
                each.length = length
            if failure is not None:
                for each in some[len(lengths) :]:
                    each.failure = failure
                _fail_if_silent(holder, failure)
            for each in some:
                each.event.set()
        except BaseException:
            holder.queue[:0] = [each for each in some[1:] if not each.is_gone]
            raise
        finally:
            holder.leads = False
            _call_next(holder)


def _leave(holder: _Holder, waiting: _Waiting) -> None:
    """The task was cancelled while it waited, or just as it was called."""
    waiting.is_gone = True
    if waiting in holder.queue:
        holder.queue.remove(waiting)
    if waiting.leads:
        holder.leads = False
    elif waiting.is_alone:
        holder.alone -= 1
    _call_next(holder)


def _call_next(holder: _Holder) -> None:
    """Call the next readers: each alone where they are few, else one for all."""
    queue = holder.queue
    if holder.leads or not queue:
        return
    if len(queue) > holder.most_alone - holder.alone:
        holder.leads = True
        queue[0].leads = True
        queue[0].event.set()
        return
    for each in queue:
        holder.alone += 1
        each.is_alone = True
        each.event.set()
    queue.clear()


def _fail_if_silent(holder: _Holder, failure: PullFailed) -> None:
    """Fail the waiting reads when the holder did not answer: they do not wait for it once more."""
    if is_silence(failure):
        for each in holder.queue:
            if each.leads:  # called just now
                each.leads = holder.leads = False
            each.failure = failure
            each.event.set()
        holder.queue.clear()
