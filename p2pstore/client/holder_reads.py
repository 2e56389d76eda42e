"""Reading from other peers: by connections and mappings of the client's own, each read reported to the local peer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence, Sized
from dataclasses import replace
from itertools import compress
from random import Random

from p2pstore.client.known_holders import KnownHolders
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.read_plan import OnlyHolder, ReadPlan, blamed, remote_copy
from p2pstore.client.reading_together import ReadingTogether
from p2pstore.local.local_messages import HolderFailure
from p2pstore.objects import CHUNK_BYTES, Version
from p2pstore.transfer.data_messages import SMALL_OBJECT_BYTES
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.reading.shm import RoomsFor, ShmTransport, copy_into, copy_many
from p2pstore.transfer.reading.small_reads import Parts
from p2pstore.transfer.reading.span_reads import BatchItem, ItemOutcome
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.transport import (
    SLICED_BYTES,
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
)


class HolderReads:
    """The ways of one client to other peers."""

    def __init__(self, link: PeerLink, *, in_threads: bool) -> None:
        """`in_threads`: concurrent reads run in threads, and do not share requests: a wake-up between threads costs
        more than a request."""
        self._link = link
        self._shm = ShmTransport(link.driver, link.timeout_seconds)
        link.mapped.append(self._shm)
        self._pool = DataPool(link.driver, progress_seconds=link.timeout_seconds)
        self._transports: list[Transport] = [self._shm, TcpTransport(self._pool)]
        self._together = None if in_threads else ReadingTogether(link.driver, self._pool.pull_small)
        self.known = KnownHolders(link.elsewhere, Random())

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

    def _note(
        self, key: str, digest: bytes, report: PullReport, seconds: float, *, own: bool
    ) -> None:
        """Count a read that ended, and tell the local peer of holders that failed."""
        self._link.ledger.pulled(key, digest, report, seconds)
        failures = [each for each in report.failures if not each.keep]
        if failures:
            self.known.forget(each.member for each in failures)
            self._link.ledger.failed(
                [
                    HolderFailure(
                        digest, each.member, int(each.code), each.incarnation, each.sequence
                    )
                    for each in blamed(report, own=own)
                ]
            )

    # --- many objects of one holder ----------------------------------------------------------

    async def map_nearby(self, copy: RemoteCopy, others: Collection[bytes]) -> PullFailed | None:
        """Map the memory of a peer of this host, for `copy_many_nearby`. Returns the failure, if any."""
        try:
            await self._shm.open(_hurried(copy, others))
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
        return lengths

    async def pull_many(
        self, copy: RemoteCopy, items: Sequence[BatchItem], others: Collection[bytes]
    ) -> list[ItemOutcome]:
        """Many objects over one connection; per item what came, or why not. `others`: peers that hold each of them as
        well, or none."""
        outcomes = await self._pool.pull_many(_hurried(copy, others), items)
        lengths = [
            each if isinstance(each, int) else each.length
            for each in outcomes
            if isinstance(each, (int, Pulled))
        ]
        failures = sum(isinstance(each, PullFailed) for each in outcomes)
        if failures:
            self.known.forget([copy.member])
        self._link.ledger.count(
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
        -1 where `pull_many` is to say more; and the failure that left the rest open. `asked` has as many items as the
        parts that were taken, once the read has ended."""
        lengths, failure = await self._pool.pull_small_parts(_hurried(copy, others), parts)
        if failure is not None:
            self.known.forget([copy.member])
        missing = lengths.count(-1)
        self._link.ledger.count(
            copy.member,
            TcpTransport.name,
            objects=len(lengths) - missing,
            length_bytes=sum(lengths) + missing,
            failures=len(asked) - len(lengths),
        )
        return lengths, failure


def _hurried(copy: RemoteCopy, others: Collection[bytes]) -> RemoteCopy:
    return hurried(copy, others) if others else copy
