"""Getting an object: from the mapped segment, else from holders that the local peer names."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import replace
from itertools import compress
from random import Random
from typing import Final

import numpy as np

from p2pstore.client.answers import error_in, name_key, raise_for, tier_name
from p2pstore.client.known_holders import KnownHolders, OnlyHolder, OwnPlan, is_far, remote_copy
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains
from p2pstore.client.reading_together import ReadingTogether
from p2pstore.errors import (
    AnswerTooLarge,
    BufferTooSmall,
    CapacityExceeded,
    LeaseLimitExceeded,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
    Unavailable,
)
from p2pstore.local.batching import Cuts
from p2pstore.local.local_messages import (
    OWN_COPY,
    Holder,
    HolderFailure,
    Lease,
    Leased,
    LocalKind,
    Plan,
    PlanItem,
    Planned,
    Prefetch,
)
from p2pstore.objects import CHUNK_BYTES, Version, namespace_digest
from p2pstore.transfer.data_messages import SMALL_OBJECT_BYTES, Keeps
from p2pstore.transfer.failover import HolderReport, SilentHolders
from p2pstore.transfer.reading.arriving import Announced, too_small
from p2pstore.transfer.reading.data_pool import DataPool, TcpTransport
from p2pstore.transfer.reading.segment_reader import Copied, SegmentReader
from p2pstore.transfer.reading.shm import ShmTransport, copy_spots, read_mapped
from p2pstore.transfer.reading.small_reads import Parts
from p2pstore.transfer.reading.span_reads import TRANSPORT_NAME, ItemOutcome
from p2pstore.transfer.transport import (
    SLICED_BYTES,
    BufferDestination,
    Destination,
    Pulled,
    PullFailed,
    PullReport,
    RemoteCopy,
    ResumableDestination,
    Transport,
    failed_report,
    hurried,
    pull_with_failover,
    resumable,
    watch_of,
)
from p2pstore.wire import Code, Empty

LEASED_READS: Final = 4
PLANS: Final = 2
"""How often the local peer is asked for holders: again after all that it named have failed."""
FEW_LISTED: Final = 16
"""Up to so many are looked for one after the other: numpy takes 10 to 25 us for any."""
FIRST_PAUSE_SECONDS: Final = 0.05
LAST_PAUSE_SECONDS: Final = 0.5
"""Between two plans for a key that is waited for and that no named holder delivered."""
_OF_THE_HOLDER: Final = (Code.NO_SUCH_KEY, Code.STALE, Code.DEADLINE_EXCEEDED)
"""Failures that mean the same wherever the holder is by now."""
FETCH_SECONDS: Final = 60.0
"""How long the peer may take to bring an object here. It watches over the progress itself."""

RoomsFor = Callable[[Sequence[int], Sequence[int]], Sequence[memoryview]]
"""Gives rooms for the values with these places in a batch and these lengths, one each. One that is too short for its
value gets nothing."""


class Fetcher:
    """Reads objects for one client. Delivers only bytes that were verified."""

    def __init__(
        self, link: PeerLink, namespace: str, chains: PrefixChains, *, in_threads: bool
    ) -> None:
        """`in_threads`: what runs side by side runs in threads, which would have to wake each other."""
        self._link = link
        self._chains = chains
        self._namespace = namespace_digest(namespace)
        self._shm = ShmTransport(link.driver, link.timeout_seconds)
        link.mapped.append(self._shm)
        self._pool = DataPool(link.driver, progress_seconds=link.timeout_seconds)
        self._transports: list[Transport] = [self._shm, TcpTransport(self._pool)]
        self._known = KnownHolders(link.elsewhere, Random())
        self._together = None if in_threads else ReadingTogether(link.driver, self._pool.pull_small)

    def close(self) -> None:
        """Close the connections to other peers."""
        self._known.close()
        self._shm.close()
        self._pool.close()

    async def fetch(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        wait_seconds: float = 0.0,
        before: PullReport | None = None,
        only: OnlyHolder | None = None,
    ) -> Copied | Pulled:
        """Bring the object to the destination. `before`: how it failed a moment ago to read it from its only holder;
        `only`: what was found out about that just now, when the local peer listed nothing of it. Raises, when it is
        still so after `wait_seconds`, `NoSuchKey` or `Unavailable`; at once what the destination raises,
        `DeadlineExceeded`, `StoreClosed`."""
        destination = resumable(destination)
        if before is None:
            first = await self._pull_from_only_holder(key, digest, destination, only)
            if isinstance(first, Pulled):
                return first
            before = first
        wait_until = time.monotonic() + wait_seconds
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            copied = await self._read_here_watched(digest, destination)
            if copied is not None:
                return copied
            left_seconds = max(0.0, wait_until - time.monotonic())
            plan: PlanItem | None = self._own_plan(digest, destination)
            if plan is None:
                failed = [] if before is None else _blamed_members(before, own=True)
                plan = await self._plan_watched(key, digest, destination, left_seconds, failed)
            try:
                return await self.fetch_planned(key, digest, destination, plan, before=before)
            except (NoSuchKey, Unavailable) as error:  # whoever had it just dropped it, or died
                before = None
                left_seconds = wait_until - time.monotonic()
                if left_seconds <= 0:
                    self.ended(error)
                    raise
            await self._link.driver.sleep(min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, LAST_PAUSE_SECONDS)

    async def fetch_into(
        self, key: str, digest: bytes, view: memoryview, wait_seconds: float = 0.0
    ) -> int:
        """`fetch` to the beginning of a buffer, the shortest way there is: the object's length. Raises as `fetch`, and
        `BufferTooSmall`."""
        length = await self._copy_mapped_into(self._link.readers, digest, view)
        if length is not None:
            self._link.note_read(digest, length)
            return length
        outcome: int | PullReport | None = None
        only = self._known.only(digest)
        if only is not None:
            if not is_far(only.copy):
                outcome, only = await self._copy_from_neighbour(key, digest, view, only.copy), None
            elif only.expected_bytes <= CHUNK_BYTES:
                outcome, only = await self._pull_chunk_of(only, key, digest, view), None
        if isinstance(outcome, int):
            return outcome
        if self._link.lists(digest):  # and could not be read just now: all ways are tried
            only = None
        destination = BufferDestination(view)
        return (await self.fetch(key, digest, destination, wait_seconds, outcome, only)).length

    async def _read_here_watched(
        self, digest: bytes, destination: Destination, *, leased: bool = False
    ) -> Copied | None:
        watch = watch_of(destination)
        if watch is None:
            return await self.read_here(digest, destination, leased=leased)
        began = watch.clock()
        copied = await self.read_here(digest, destination, leased=leased)
        if copied is not None:
            watch.was_here(self._link.connection.hello.name, copied.length, watch.clock() - began)
        return copied

    async def _pull_from_only_holder(
        self, key: str, digest: bytes, destination: ResumableDestination, only: OnlyHolder | None
    ) -> Pulled | PullReport | None:
        """The shortest way to what one other host is known to hold: no plan, no list of attempts. Otherwise how
        that failed, or None when it is not the case; then all that there is to try is tried."""
        if watch_of(destination) is not None:
            return None
        if only is None:
            only = self._known.only(digest)
            if only is None or not is_far(only.copy):
                return None
            if self._link.lists(digest):
                return None
        copy, slot_hint, expected_bytes = only
        if (
            expected_bytes >= SLICED_BYTES
        ):  # a plan is a small part of that, and there may be a faster way
            return None
        began = time.monotonic()
        destination.announced = copy.announced
        try:
            pulled = await self._pool.pull(copy, digest, destination, slot_hint, expected_bytes)
        except PullFailed as failure:
            report = failed_report(copy, self._transports, failure)
            self._note_pull(key, digest, report, time.monotonic() - began, own=True)
            return report
        finally:
            destination.announced = None
        report = PullReport(pulled, copy, ())
        self._link.note_pull(key, digest, report, time.monotonic() - began)
        return pulled

    def expected_bytes(self, digest: bytes) -> int:
        """How long an object is at most that one other peer is known to hold; 0 where that is not known."""
        only = self._known.only(digest)
        return 0 if only is None else only.expected_bytes

    async def pull_small_value(self, key: str, digest: bytes) -> bytes | PullReport | None:
        """What one other peer is known to hold, of 64 KiB at most: the value. Otherwise how that failed, or None when
        there is no such way."""
        only = self._known.only(digest)
        if only is None or not 0 < only.expected_bytes <= SMALL_OBJECT_BYTES:
            return None
        view = memoryview(bytearray(only.expected_bytes))
        try:
            if is_far(only.copy):
                outcome = await self._pull_chunk_of(only, key, digest, view)
            else:
                outcome = await self._copy_from_neighbour(key, digest, view, only.copy)
        except BufferTooSmall:  # replaced meanwhile by a longer one
            return None
        return bytes(view[:outcome]) if isinstance(outcome, int) else outcome

    async def _copy_from_neighbour(
        self, key: str, digest: bytes, view: memoryview, copy: RemoteCopy
    ) -> int | None:
        """Out of the memory of a peer of this host, where that is mapped already."""
        began = time.monotonic()
        readers = self._shm.mapped(copy)
        length = await self._copy_mapped_into(readers, digest, view, copy.announced)
        if length is not None:
            seconds = time.monotonic() - began
            self._link.note_only(key, digest, copy.member, self._shm.name, length, seconds)
        return length

    async def copy_many_here(self, digests: Sequence[bytes], rooms_for: RoomsFor) -> list[int]:
        """Verified copies of what the local peer holds, which is told of them: the lengths, -1 for what is not here.
        `rooms_for` gives the rooms once it is known what is here, and how long that is."""
        lengths = await self._copy_many(self._link.readers, digests, rooms_for)
        if lengths.count(-1) < len(lengths):
            self._link.note_reads(digests, lengths)
        return lengths

    async def copy_many_nearby(
        self,
        copy: RemoteCopy,
        digests: Sequence[bytes],
        rooms_for: RoomsFor,
        versions: Sequence[Version],
    ) -> list[int]:
        """`copy_many_here` from a peer of this host, where that is mapped already. `versions`: those that were planned,
        one a digest; without them, what that peer wrote itself."""
        readers = self._shm.mapped(copy) if copy.same_host else ()
        lengths = await self._copy_many(readers, digests, rooms_for, copy.announced, versions)
        missing = lengths.count(-1)
        if missing < len(lengths):
            self._link.note_pulls(
                copy.member,
                self._shm.name,
                objects=len(lengths) - missing,
                length_bytes=sum(lengths) + missing,
                failures=0,
                unseen=list(compress(digests, [length >= 0 for length in lengths]))
                if missing
                else digests,
            )
        return lengths

    async def map_nearby(self, copy: RemoteCopy, others: Collection[bytes]) -> PullFailed | None:
        """Map the memory of a peer of this host, for `copy_many_nearby`: what kept it from that, if anything."""
        try:
            await self._shm.open(hurried(copy, others) if others else copy)
        except PullFailed as failure:
            return failure
        return None

    async def _copy_many(
        self,
        readers: Sequence[SegmentReader],
        digests: Sequence[bytes],
        rooms_for: RoomsFor,
        announced: Announced | None = None,
        versions: Sequence[Version] = (),
    ) -> list[int]:
        lengths = [-1] * len(digests)
        for reader in readers:
            spots = reader.spots(digests, announced, versions)
            if not spots.places:
                continue
            rooms = rooms_for(spots.places, spots.lengths)
            good = await copy_spots(self._link.driver, reader, spots, rooms)
            if len(spots.places) == len(digests) and all(good):
                return spots.lengths
            for place, length, fine in zip(spots.places, spots.lengths, good, strict=True):
                if fine:
                    lengths[place] = length
        return lengths

    async def copy_mapped(
        self, readers: Sequence[SegmentReader], digest: bytes, destination: Destination
    ) -> Copied | None:
        """A verified copy out of mapped memory, or None when it is not there."""
        for reader in readers:
            copied = await read_mapped(self._link.driver, reader, digest, destination)
            if copied is not None:
                return copied
        return None

    async def _copy_mapped_into(
        self,
        readers: Sequence[SegmentReader],
        digest: bytes,
        view: memoryview,
        announced: Announced | None = None,
    ) -> int | None:
        """A verified copy in the beginning of a buffer, which may be longer than the object: the length. None when it
        is not there. Raises `BufferTooSmall`."""
        for reader in readers:
            spots = reader.spots([digest], announced)
            if spots.places:
                length = spots.lengths[0]
                if len(view) < length:
                    raise too_small(length, view)
                if (await copy_spots(self._link.driver, reader, spots, [view]))[0]:
                    return length
        return None

    async def _pull_chunk_of(
        self, only: OnlyHolder, key: str, digest: bytes, view: memoryview
    ) -> int | PullReport | None:
        """An object of one chunk of another host; small ones together with other tasks that read there."""
        copy = only.copy
        view = view[: min(only.expected_bytes, CHUNK_BYTES)]
        if not view:
            return None
        began = time.monotonic()
        if self._together is not None and len(view) <= SMALL_OBJECT_BYTES:
            length, failure = await self._together.read(copy, digest, view)
        else:
            lengths, failure = await self._pool.pull_small(copy, (digest,), (view,))
            length = lengths[0] if lengths else -1
        if failure is not None:
            report = failed_report(copy, self._transports, failure)
            self._note_pull(key, digest, report, time.monotonic() - began, own=True)
            return report
        if length < 0:
            return None
        seconds = time.monotonic() - began
        self._link.note_only(key, digest, copy.member, TRANSPORT_NAME, length, seconds)
        return length

    def _own_plan(self, digest: bytes, destination: Destination) -> OwnPlan | None:
        """A plan without asking the peer. Not for who wants to see how a read goes, nor for what is here and only
        could not be read just now."""
        if watch_of(destination) is not None:
            return None
        if self._link.lists(digest):
            return None
        return self._known.plan(digest)

    async def _plan_watched(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        wait_seconds: float = 0.0,
        exclude: Sequence[int] = (),
    ) -> PlanItem:
        watch = watch_of(destination)
        began = 0.0 if watch is None else watch.clock()
        planned = await self._plan(key, [digest], wait_seconds, exclude)
        plan = planned.items[0]
        if watch is not None:
            holders = {each.member: (each.name, tier_name(each.tier)) for each in plan.holders}
            watch.looked_up(
                watch.clock() - began, holders, plan.known_unreachable, planned.homes_asked
            )
        return plan

    async def read_here(
        self, digest: bytes, destination: Destination, *, leased: bool = False
    ) -> Copied | None:
        """A verified copy out of the local peer's segment, or None when it has none. The peer is told of
        it, unless it has seen the lease."""
        copied = await self.copy_mapped(self._link.readers, digest, destination)
        if copied is not None and not leased:
            self._link.note_read(digest, copied.length)
        return copied

    async def plan(
        self, first_key: str, digests: Sequence[bytes], wait_seconds: float = 0.0
    ) -> list[PlanItem]:
        """Where these objects can be read, one item each; `first_key` is the text of the first one."""
        plans: list[PlanItem | None] = [self._known.plan(digest) for digest in digests]
        unplanned = [number for number, plan in enumerate(plans) if plan is None]
        if unplanned:
            asked = await self._plan(
                first_key if unplanned[0] == 0 else "",
                [digests[number] for number in unplanned],
                wait_seconds,
            )
            for number, plan in zip(unplanned, asked.items, strict=True):
                plans[number] = plan
        return [plan for plan in plans if plan is not None]

    async def _plan(
        self,
        first_key: str,
        digests: Sequence[bytes],
        wait_seconds: float = 0.0,
        exclude: Sequence[int] = (),
    ) -> Planned:
        """All items, and how many home peers were asked at most by one request."""
        items: list[PlanItem] = []
        homes_asked = 0
        cuts = Cuts(LocalKind.PLAN, len(digests))
        for some in cuts:
            request = Plan(
                b"".join(digests[some.start : some.stop]),
                round(wait_seconds * 1000),
                deadline_ms(self._link.timeout_seconds),
                list(exclude),
                self._namespace,
                "" if some.start else first_key,
            )
            try:
                reply = await self._link.request(
                    LocalKind.PLAN, request, Planned, extra_seconds=wait_seconds
                )
            except AnswerTooLarge as error:
                cuts.ask_again(some, error)
                continue
            if len(reply.items) != len(some):
                raise P2PStoreError("the local peer answered for another number of keys")
            items += reply.items
            self._known.note(reply.items)
            homes_asked = max(homes_asked, reply.homes_asked)
        return Planned(items, homes_asked)

    async def fetch_planned(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        plan: PlanItem,
        silent: SilentHolders | None = None,
        before: PullReport | None = None,
        hot: bool = False,
    ) -> Copied | Pulled:
        """Read from the holders of a plan; when all of them fail, from those of a second plan. `silent` are
        those that did not answer in time, which reads of one batch share; `before` is how an attempt without a
        plan failed. `hot`: a holder wants the local peer to keep the object."""
        silent = silent or SilentHolders()
        destination = resumable(destination)
        failed: list[int] = []
        error: P2PStoreError | ValueError | None = None
        insists = False
        if before is not None and before.error is not None:
            silent.learn(before.failures)
            failed = _blamed_members(before, own=True)
            error = name_key(key, before.error)
            hot = hot or _is_hot(before)
        if hot:
            kept = await self._kept(key, digest, destination)
            if kept is not None:
                return kept
            insists = True
        attempts = PLANS + isinstance(plan, OwnPlan)
        for attempt in range(attempts):
            if plan.local:
                copied, leased = await self._read_under_lease(digest, destination)
                if copied is not None:
                    return copied
                if leased:  # nothing could change it meanwhile: its bytes are spoilt
                    failed.append(OWN_COPY)
                    self._link.note_failures([HolderFailure(digest, OWN_COPY, int(Code.STALE))])
            elif plan.error.code:
                planned = error_in(key, plan.error)
                # That no other holder is known says nothing of those that could not be reached.
                raise error if isinstance(error, Unavailable) and error is not None else planned
            elif (
                plan.through_peer
                and (brought := await self._brought(key, digest, destination, plan)) is not None
            ):
                return brought
            elif not plan.through_peer or _has_ways(plan):
                holders = silent.last(plan.holders)
                if not holders and not isinstance(plan, OwnPlan):
                    raise error or Unavailable(
                        f"{key!r}: the peers that hold it did not answer a moment ago. Retry, or see "
                        "`mooncake-p2p peers`"
                    )
                if holders:
                    report = await self._pull(key, digest, destination, plan, holders, insists)
                    silent.learn(report.failures)
                    if report.pulled is not None:
                        return report.pulled
                    if _is_hot(report):
                        kept = await self._kept(key, digest, destination)
                        if kept is not None:
                            return kept
                        insists = True
                    failed += _blamed_members(report, own=isinstance(plan, OwnPlan))
                    assert report.error is not None
                    error = name_key(key, report.error)
            if attempt + 1 < attempts:
                plan = await self._plan_watched(key, digest, destination, exclude=failed)
        raise error or Unavailable(f"{key!r} changed or moved while it was read: try again")

    def ended(self, error: Exception) -> None:
        """A read of one object failed for good: that may be a miss, for the statistics."""
        if isinstance(error, NoSuchKey | Unavailable):
            self._link.note_miss()

    async def _pull(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        plan: PlanItem,
        holders: Sequence[Holder],
        insists: bool,
    ) -> PullReport:
        copies = [remote_copy(holder) for holder in holders]
        if insists:
            copies = [replace(copy, keeps=Keeps.NO) for copy in copies]
        began = time.monotonic()
        report = await pull_with_failover(copies, self._transports, digest, destination)
        seconds = time.monotonic() - began
        self._note_pull(key, digest, report, seconds, own=isinstance(plan, OwnPlan))
        return report

    def _note_pull(
        self, key: str, digest: bytes, report: PullReport, seconds: float, *, own: bool
    ) -> None:
        """Keep in mind how a read ended, and have the local peer told, of the holders that failed too."""
        self._link.note_pull(key, digest, report, seconds)
        failures = [each for each in report.failures if not each.keep]
        if failures:
            self._known.forget(each.member for each in failures)
            self._link.note_failures(
                [
                    HolderFailure(
                        digest, each.member, int(each.code), each.incarnation, each.sequence
                    )
                    for each in _blamed(report, own=own)
                ]
            )

    def which_are_here(self, digests: Sequence[bytes]) -> list[int]:
        """The places of those objects that the local peer seems to have."""
        if len(digests) <= FEW_LISTED:
            lists = self._link.lists
            return [place for place, digest in enumerate(digests) if lists(digest)]
        packed = b"".join(digests)
        here = np.zeros(len(digests), np.bool_)
        for reader in self._link.readers:
            here |= reader.contains_many(packed)
        places: list[int] = here.nonzero()[0].tolist()
        return places

    def likely_holder(self, digest: bytes, most_bytes: float) -> RemoteCopy | None:
        """The one peer of another host that is known to hold an object which is not here; None where there is no such
        one, or several, or objects of up to that length are not best asked for there."""
        only = self._known.only(digest, most_bytes)
        if only is None or not is_far(only.copy):
            return None
        return None if self._link.lists(digest) else only.copy

    def only_holders(self, digests: Sequence[bytes], most_bytes: float) -> list[RemoteCopy | None]:
        """Of each object the one other peer that is known to hold it, where there is just one, and objects of up to
        that length are best asked for there."""
        return self._known.only_many(digests, most_bytes)

    async def pull_many(
        self,
        copy: RemoteCopy,
        items: Sequence[tuple[bytes, Destination]],
        others: Collection[bytes],
    ) -> list[ItemOutcome]:
        """Many objects from one holder, over one connection; per item what came, or why not. `others`:
        peers that hold each of them as well, or none."""
        outcomes = await self._pool.pull_many(hurried(copy, others) if others else copy, items)
        lengths = [
            each if isinstance(each, int) else each.length
            for each in outcomes
            if isinstance(each, (int, Pulled))
        ]
        failures = sum(isinstance(each, PullFailed) for each in outcomes)
        if failures:
            self._known.forget([copy.member])
        self._link.note_pulls(
            copy.member,
            TcpTransport.name,
            objects=len(lengths),
            length_bytes=sum(lengths),
            failures=failures,
        )
        return outcomes

    async def pull_small(
        self, copy: RemoteCopy, parts: Parts, asked: Sized, others: Collection[bytes]
    ) -> tuple[list[int], PullFailed | None]:
        """`pull_many` of objects of at most one chunk each, in fewer steps: their lengths, in the order of the parts,
        -1 where `pull_many` is to say more; and what kept it from telling of the rest. `asked` has as many items as the
        parts that were taken, once it is over."""
        lengths, failure = await self._pool.pull_small_parts(
            hurried(copy, others) if others else copy, parts
        )
        if failure is not None:
            self._known.forget([copy.member])
        missing = lengths.count(-1)
        self._link.note_pulls(
            copy.member,
            TcpTransport.name,
            objects=len(lengths) - missing,
            length_bytes=sum(lengths) + missing,
            failures=len(asked) - len(lengths),
        )
        return lengths, failure

    async def read_ahead(self, digest: bytes) -> None:
        """An object is read from the local peer's SSD: have it bring what is likely to be read next, too."""
        await self.prefetch(self._chains.after(digest))

    async def prefetch(self, digests: bytes) -> None:
        """Have the local peer bring objects (packed digests) to its memory; does not wait for them."""
        if digests:
            await self._link.request(LocalKind.PREFETCH, Prefetch(digests), Empty)

    async def _read_under_lease(
        self, digest: bytes, destination: Destination
    ) -> tuple[Copied | None, bool]:
        """A copy that nothing can change meanwhile, for objects that keep moving in the segment; and
        whether there was a lease."""
        reply = await self._link.request(
            LocalKind.LEASE, Lease(digest, fetch=False), Leased, on_late_reply=self.give_back
        )
        try:
            if any(grant.error.code for grant in reply.items):
                return None, False
            return await self._copy_leased(digest, destination), True
        finally:
            self.give_back(reply)

    async def _kept(self, key: str, digest: bytes, destination: Destination) -> Copied | None:
        """A hot object, which the local peer brings and keeps. None when it cannot."""
        try:
            return await self._read_through_peer(key, digest, destination)
        except (CapacityExceeded, LeaseLimitExceeded, NoSuchKey, Unavailable):
            return None

    async def _brought(
        self, key: str, digest: bytes, destination: Destination, plan: PlanItem
    ) -> Copied | None:
        """`_read_through_peer`; None also when there are other ways than that one, which failed."""
        if plan.on_ssd:
            await self.read_ahead(digest)
        try:
            return await self._read_through_peer(key, digest, destination, plan)
        except (CapacityExceeded, LeaseLimitExceeded, Unavailable):
            if not _has_ways(plan):
                raise
            return None

    async def _read_through_peer(
        self, key: str, digest: bytes, destination: Destination, plan: PlanItem | None = None
    ) -> Copied | None:
        """Have the local peer bring the object to its memory and hold it there, and copy it. Raises what kept it
        from that."""
        watch = watch_of(destination)
        if watch is not None and plan is not None:
            way = "ssd" if plan.on_ssd else "rdma"
            watch.attempt(plan.holders[0].member, way)
        reply = await self._lease_fetched(key, digest)
        full = reply.items[0].error.code == Code.LEASE_LIMIT_EXCEEDED
        if full and self._link.make_room():  # leases of the reads before this one
            reply = await self._lease_fetched(key, digest)
        try:
            grant = reply.items[0]
            if watch is not None and grant.error.code:
                watch.failed(grant.error.text)
            raise_for(key, grant.error)
            copied = await self._copy_leased(digest, destination)
            if watch is not None and copied is not None and grant.transport:
                watch.brought(grant.source, grant.transport, copied.length)
            return copied
        finally:
            self.give_back(reply)

    async def _lease_fetched(self, key: str, digest: bytes) -> Leased:
        reply = await self._link.request(
            LocalKind.LEASE,
            Lease(digest, deadline_ms=deadline_ms(self._link.timeout_seconds), key=key),
            Leased,
            extra_seconds=FETCH_SECONDS,
            on_late_reply=self.give_back,
        )
        if len(reply.items) != 1:
            raise ProtocolError(f"{len(reply.items)} answers about one lease")
        return reply

    async def _copy_leased(self, digest: bytes, destination: Destination) -> Copied | None:
        for _ in range(LEASED_READS):  # the index may move under a reader, the object cannot
            copied = await self._read_here_watched(digest, destination, leased=True)
            if copied is not None:
                return copied
        return None

    def give_back(self, reply: Leased) -> None:
        """End leases that nobody will look at."""
        self._link.give_back(reply)


def _has_ways(plan: PlanItem) -> bool:
    """Whether the client itself can get to a holder."""
    return any(holder.data or holder.socket for holder in plan.holders)


def _is_hot(report: PullReport) -> bool:
    """Whether a holder wants the local peer to keep the object."""
    return any(each.keep for each in report.failures)


def _blamed(report: PullReport, *, own: bool) -> list[HolderReport]:
    """Of the holders that did not deliver, those of whom that says something; `own`: the client chose them itself."""
    return [
        each
        for each in report.failures
        if not each.keep and (not own or each.code in _OF_THE_HOLDER)
    ]


def _blamed_members(report: PullReport, *, own: bool) -> list[int]:
    return [each.member for each in _blamed(report, own=own)]


def deadline_ms(timeout_seconds: float) -> int:
    """What the peer is told: a little less than what the client waits, so that its answer
    arrives."""
    return max(1, round(timeout_seconds * 900))
