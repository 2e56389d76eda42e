"""Getting an object: from the mapped segment, through the local peer, or from other peers, as its `ReadPlan` says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from p2pstore.client.answers import raise_for, tier_name
from p2pstore.client.holder_reads import HolderReads
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.read_plan import (
    AFTER_HERE,
    FIRST_PLACES,
    WATCHED_PLACES,
    OnlyHolder,
    ReadPlace,
    ReadPlan,
)
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
from p2pstore.local.local_messages import (
    OWN_COPY,
    HolderFailure,
    Lease,
    Leased,
    Plan,
    PlanItem,
    Planned,
    Prefetch,
)
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import Cuts
from p2pstore.objects import CHUNK_BYTES, namespace_digest
from p2pstore.transfer.data_messages import SMALL_OBJECT_BYTES
from p2pstore.transfer.reading.arriving import Destination, resumable, watch_of
from p2pstore.transfer.reading.segment_reader import Copied
from p2pstore.transfer.reading.shm_transport import RoomsFor, copy_into, copy_many, read_mapped
from p2pstore.transfer.transport import BufferDestination, Pulled, PullReport
from p2pstore.wire import Code, Empty

if TYPE_CHECKING:
    from p2pstore.client.destinations import NewMemory

LEASED_READS: Final = 4
FEW_LISTED: Final = 16
"""Up to this number of objects is looked up one by one: numpy takes 10 to 25 us for any."""
FIRST_PAUSE_SECONDS: Final = 0.05
LAST_PAUSE_SECONDS: Final = 0.5
"""Between two reads of a key that is waited for and that no named holder delivered."""
FETCH_SECONDS: Final = 60.0
"""Time that the peer may take to bring an object here. It watches over the progress itself."""


class Fetcher:
    """Reads objects for one client. Delivers only bytes that were verified."""

    def __init__(self, link: PeerLink, namespace: str, *, in_threads: bool) -> None:
        """`in_threads`: see `HolderReads`."""
        self._link = link
        self._namespace = namespace_digest(namespace)
        self.holders = HolderReads(link, in_threads=in_threads)
        self._known = self.holders.known

    def close(self) -> None:
        """Close the connections to other peers."""
        self.holders.close()

    # --- one object --------------------------------------------------------------------------

    async def fetch(
        self, key: str, digest: bytes, destination: Destination, wait_seconds: float = 0.0
    ) -> Copied | Pulled:
        """Bring the object to the destination. Raises `NoSuchKey` or `Unavailable` when it is still so after
        `wait_seconds`; at once what the destination raises, `DeadlineExceeded`, `StoreClosed`."""
        if watch_of(destination) is not None:
            plan = ReadPlan(key, WATCHED_PLACES)
            return await self._fetch_patiently(key, digest, destination, plan, wait_seconds)
        if (copied := await self.read_here(digest, destination)) is not None:
            return copied
        only = self._known.only_holder(digest)
        return await self._fetch_elsewhere(key, digest, destination, only, wait_seconds)

    async def fetch_into(
        self, key: str, digest: bytes, view: memoryview, wait_seconds: float = 0.0
    ) -> int:
        """`fetch` to the beginning of a buffer: the object's length. Raises as `fetch`, and `BufferTooSmall`.

        Own memory, and the only holder of a chunk, are tried without a destination. Measured with 4 KiB: 7 us of CPU
        instead of 12 from own memory, 37 instead of 60 from another peer."""
        length = await copy_into(self._link.driver, self._link.readers, digest, view)
        if length is not None:
            self._link.ledger.read(digest, length)
            return length
        only, failed = self._known.only_holder(digest), None
        if only is not None and not (only.is_far and only.expected_bytes > CHUNK_BYTES):
            outcome = await self.holders.pull_chunk(only, key, digest, view)
            if isinstance(outcome, int):
                return outcome
            only, failed = None, outcome
        room = BufferDestination(view)
        return (await self._fetch_elsewhere(key, digest, room, only, wait_seconds, failed)).length

    async def fetch_new(self, key: str, digest: bytes, room: NewMemory, wait: float = 0.0) -> int:
        """`fetch` to memory that is made for the value: its length. Raises as `fetch`.

        A small value is read into scratch memory, as `fetch_into` reads."""
        if (copied := await self.read_here(digest, room)) is not None:
            return copied.length
        only, failed = self._known.only_holder(digest), None
        if only is not None and 0 < only.expected_bytes <= SMALL_OBJECT_BYTES:
            view = memoryview(bytearray(only.expected_bytes))
            with suppress(BufferTooSmall):  # replaced meanwhile by a longer one
                outcome = await self.holders.pull_chunk(only, key, digest, view)
                if isinstance(outcome, int):
                    room.take(view[:outcome])
                    return outcome
                failed = outcome
            only = None
        return (await self._fetch_elsewhere(key, digest, room, only, wait, failed)).length

    async def _fetch_elsewhere(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        only: OnlyHolder | None,
        wait_seconds: float,
        failed: PullReport | None = None,
    ) -> Copied | Pulled:
        """From the only holder, unless that was asked and `failed`; then as a plan says."""
        destination = resumable(destination)
        # A local object that could not be read just now is left to the local peer.
        if only is not None and not self._link.seems_here(digest):
            outcome = await self.holders.pull_only(only, key, digest, destination)
            if isinstance(outcome, Pulled):
                return outcome
            failed = outcome
        plan = ReadPlan(key, AFTER_HERE)
        if failed is not None:
            plan.failed(failed)
        return await self._fetch_patiently(key, digest, destination, plan, wait_seconds)

    async def _fetch_patiently(
        self, key: str, digest: bytes, destination: Destination, plan: ReadPlan, wait_seconds: float
    ) -> Copied | Pulled:
        """`fetch_planned`, again and again while the object is waited for."""
        wait_until = time.monotonic() + wait_seconds
        pause_seconds = FIRST_PAUSE_SECONDS
        destination = resumable(destination)
        while True:
            left_seconds = max(0.0, wait_until - time.monotonic())
            try:
                return await self.fetch_planned(key, digest, destination, plan, left_seconds)
            except (NoSuchKey, Unavailable) as error:  # each holder just dropped it, or died
                left_seconds = wait_until - time.monotonic()
                if left_seconds <= 0:
                    self.count_miss(error)
                    raise
            await self._link.driver.sleep(min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, LAST_PAUSE_SECONDS)
            plan = ReadPlan(key, WATCHED_PLACES if destination.watch else FIRST_PLACES)

    async def fetch_planned(
        self,
        key: str,
        digest: bytes,
        destination: Destination,
        plan: ReadPlan,
        wait_seconds: float = 0.0,
    ) -> Copied | Pulled:
        """Read from the places of the plan, in turn. `wait_seconds`: for the first answer of the local peer. Raises
        what the last place failed with."""
        destination = resumable(destination)
        while (place := plan.next()) is not None:
            done: Copied | Pulled | None = None
            match place:
                case ReadPlace.HERE:
                    done = await self._read_here_watched(digest, destination)
                case ReadPlace.OWN_PLAN:
                    # A local object that could not be read just now is left to the local peer.
                    own = None if self._link.seems_here(digest) else self._known.plan(digest)
                    if own is not None:
                        plan.planned(own)
                case ReadPlace.PLAN:
                    plan.planned(await self._plan_watched(key, digest, destination, wait_seconds, plan))
                    wait_seconds = 0.0
                case ReadPlace.UNDER_LEASE:
                    done = await self._read_under_lease(digest, destination, plan)
                case ReadPlace.THROUGH_PEER | ReadPlace.KEPT:
                    done = await self._read_through_peer(key, digest, destination, plan, place)
                case ReadPlace.HOLDERS:
                    report = await self.holders.pull(key, digest, destination, plan)
                    done = report.pulled
                    if done is None:
                        plan.failed(report)
            if done is not None:
                return done
        raise plan.error or Unavailable(f"{key!r} changed or moved while it was read: try again")

    def count_miss(self, error: Exception) -> None:
        """Count a miss of the statistics where a read of one object failed because the object is not there."""
        if isinstance(error, NoSuchKey | Unavailable):
            self._link.ledger.missed()

    # --- where objects are -------------------------------------------------------------------

    def which_are_here(self, digests: Sequence[bytes]) -> list[int]:
        """The places of those objects that the local peer seems to have."""
        if len(digests) <= FEW_LISTED:
            seems_here = self._link.seems_here
            return [place for place, digest in enumerate(digests) if seems_here(digest)]
        packed = b"".join(digests)
        here = np.zeros(len(digests), np.bool_)
        for reader in self._link.readers:
            here |= reader.contains_many(packed)
        places: list[int] = here.nonzero()[0].tolist()
        return places

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

    async def _plan_watched(
        self, key: str, digest: bytes, destination: Destination, wait_seconds: float, plan: ReadPlan
    ) -> PlanItem:
        watch = watch_of(destination)
        began = 0.0 if watch is None else watch.clock()
        planned = await self._plan(key, [digest], wait_seconds, plan.failed_members)
        item = planned.items[0]
        if watch is not None:
            holders = {each.member: (each.name, tier_name(each.tier)) for each in item.holders}
            watch.looked_up(watch.clock() - began, holders, item.known_unreachable, planned.homes_asked)
        return item

    # --- in the local peer's memory ----------------------------------------------------------

    async def read_here(
        self, digest: bytes, destination: Destination, *, leased: bool = False
    ) -> Copied | None:
        """A verified copy out of the local peer's segment, or None when it has none. The peer is told of
        it, unless it has seen the lease."""
        for reader in self._link.readers:
            copied = await read_mapped(self._link.driver, reader, digest, destination)
            if copied is not None:
                if not leased:
                    self._link.ledger.read(digest, copied.length)
                return copied
        return None

    async def copy_many_here(self, digests: Sequence[bytes], rooms_for: RoomsFor) -> list[int]:
        """Verified copies of what the local peer holds, which is told of them: see `copy_many`."""
        began = time.monotonic()
        lengths = await copy_many(self._link.driver, self._link.readers, digests, rooms_for)
        if lengths.count(-1) < len(lengths):
            self._link.ledger.read_many(digests, lengths)
            length_bytes = sum(lengths) + lengths.count(-1)
            self._link.ledger.timed(OWN_COPY, length_bytes, time.monotonic() - began)
        return lengths

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

    async def _read_under_lease(
        self, digest: bytes, destination: Destination, plan: ReadPlan
    ) -> Copied | None:
        """A copy that nothing can change meanwhile, for objects that keep moving in the segment."""
        reply = await self._link.request(
            LocalKind.LEASE, Lease(digest, fetch=False), Leased, on_late_reply=self._link.give_back
        )
        try:
            if any(grant.error.code for grant in reply.items):
                return None
            copied = await self._copy_leased(digest, destination)
        finally:
            self._link.give_back(reply)
        if copied is None:  # the bytes under the lease are spoilt
            plan.spoilt()
            self._link.ledger.failed([HolderFailure(digest, OWN_COPY, int(Code.STALE))])
        return copied

    async def _read_through_peer(
        self, key: str, digest: bytes, destination: Destination, plan: ReadPlan, place: ReadPlace
    ) -> Copied | None:
        """Have the local peer bring the object to its memory and hold it there, and copy it. None when it cannot and
        other places are left; otherwise raises its reason."""
        item = plan.item if place is ReadPlace.THROUGH_PEER else None
        left_to_others: tuple[type[Exception], ...] = ()
        if item is None:
            left_to_others = CapacityExceeded, LeaseLimitExceeded, NoSuchKey, Unavailable
        elif plan.has_other_ways:
            left_to_others = CapacityExceeded, LeaseLimitExceeded, Unavailable
        try:
            return await self._copy_fetched(key, digest, destination, item)
        except left_to_others:
            return None

    async def _copy_fetched(
        self, key: str, digest: bytes, destination: Destination, item: PlanItem | None
    ) -> Copied | None:
        watch = watch_of(destination)
        if watch is not None and item is not None:
            watch.attempt(item.holders[0].member, "ssd" if item.on_ssd else "rdma")
        began = time.monotonic()
        reply = await self._lease_fetched(key, digest)
        full = reply.items[0].error.code == Code.LEASE_LIMIT_EXCEEDED
        if full and self._link.give_back_idle():  # leases of the reads before this one
            reply = await self._lease_fetched(key, digest)
        try:
            grant = reply.items[0]
            if watch is not None and grant.error.code:
                watch.failed(grant.error.text)
            raise_for(key, grant.error)
            copied = await self._copy_leased(digest, destination)
            on_ssd = item is not None and item.on_ssd
            if copied is not None and (on_ssd or grant.source):
                member, seconds = OWN_COPY if on_ssd else grant.source, time.monotonic() - began
                self._link.ledger.timed(member, copied.length, seconds, on_ssd=on_ssd)
            if watch is not None and copied is not None and grant.transport:
                watch.brought(grant.source, grant.transport, copied.length)
            return copied
        finally:
            self._link.give_back(reply)

    async def _lease_fetched(self, key: str, digest: bytes) -> Leased:
        reply = await self._link.request(
            LocalKind.LEASE,
            Lease(digest, deadline_ms=deadline_ms(self._link.timeout_seconds), key=key),
            Leased,
            extra_seconds=FETCH_SECONDS,
            on_late_reply=self._link.give_back,
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

    async def prefetch(self, digests: bytes) -> None:
        """Have the local peer bring objects (packed digests) to its memory; does not wait for them."""
        if digests:
            await self._link.request(LocalKind.PREFETCH, Prefetch(digests), Empty)


def deadline_ms(timeout_seconds: float) -> int:
    """The deadline that the peer is told: a little less than what the client waits, so that its answer arrives."""
    return max(1, round(timeout_seconds * 900))
