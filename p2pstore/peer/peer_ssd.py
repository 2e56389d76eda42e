"""A peer's SSD: carries out what the core decides to write and to load, and tells it what became of that."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.operation import ColdObject, ColdSorted, LoadObject, PullOutcome, WriteObject
from p2pstore.errors import CapacityExceeded, NoSuchKey, P2PStoreError, Unavailable
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import (
    MAX_TRAILER_BYTES,
    SLOT_FLAG_SOFT,
    Slot,
    SlotState,
    TrailerBody,
    decode_trailer,
    encode_trailer,
)
from p2pstore.objects import chunk_count, namespace_digest
from p2pstore.ssd_tier.health import PATIENCE_SECONDS as ALONE_SECONDS
from p2pstore.ssd_tier.health import ColdMiss, Health, Miss, TierState
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import ColdFacts
from p2pstore.ssd_tier.tier import SsdTier
from p2pstore.ssd_tier.write_admission import Share, WriteRefusal
from p2pstore.transfer.failover import HolderReport
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

NAME: Final = "ssd"
"""As what brought an object, beside the transports."""
SOON_SECONDS: Final = 0.5
LATER_SECONDS: Final = 60.0
"""When an object that the tier refused is offered again: soon, when it is a matter of time."""
HURRIED_SECONDS: Final = 1.0
"""How long a read waits for a disk that hangs when others hold the object: less than the 1.5 s for which readers do."""
LOOK_SECONDS: Final = 0.5
KEPT_AT_ONCE: Final = 8
"""Objects that are written side by side when the peer leaves."""
SLOTS_PER_STEP: Final = 2_000
"""Passed in a millisecond."""
SPARE_TRAILER_BYTES: Final = 512
"""Room for what belongs to a tensor, which is not known before it is read."""
_FOR_NOW: Final = (WriteRefusal.QUEUE_FULL, WriteRefusal.WRITE_BUDGET_SPENT, WriteRefusal.NO_ROOM)


def _least_unused(entry: ObjectEntry) -> float:
    return -entry.last_access


class PeerSsd:
    """The shell between a peer's core and its SSD tier."""

    tier: SsdTier

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self.ending = trio.Event()
        """Set when this peer ends: I/O under way then has the time that a working disk takes."""

    def begin(self, tier: SsdTier) -> None:
        """Attach the SSD. Its objects are announced once they are known to be good."""
        core = self._core
        self.tier = tier
        self._node.ssd, core.cold.store = self, tier
        core.earlier_life.return_with(self._of_an_earlier_life(), tier.newest_clock, self._node.now)

    def _of_an_earlier_life(self) -> Iterator[ColdObject]:
        for digest in chain.from_iterable(self.tier.digests(None)):
            entry = self.tier.find(digest)
            if entry is not None:
                yield ColdObject(digest, namespace_digest(entry.namespace), entry.version)

    async def carry_out(self, effect: LoadObject | WriteObject | ColdSorted) -> None:
        """Do what the core decided."""
        if isinstance(effect, LoadObject):
            await self._load(effect)
        elif isinstance(effect, WriteObject):
            await self._write_back(effect)
        else:
            await self._take_back(effect)

    async def _write_back(self, effect: WriteObject) -> None:
        """Write what memory may soon need the room of."""
        entry = effect.entry
        written, retry_seconds = False, LATER_SECONDS
        try:
            refusal = self.tier.admit(entry.digest, entry.length, entry.hits, entry.namespace)
            if refusal is None:
                written = await self._store(entry)
            retry_seconds = SOON_SECONDS if refusal in _FOR_NOW else LATER_SECONDS
        finally:
            self._core.write_back.ended(entry, written, retry_seconds, self._node.now)
            self._node.process()

    async def _load(self, effect: LoadObject) -> None:
        core, node = self._core, self._node
        try:
            destination = core.operations.copy_destination(effect.operation, node.now)
        except NoSuchKey:
            return  # its requester has gone
        load = _Load(node, effect)
        length, error, silent = -1, None, ""
        try:
            length = await self._load_into(destination, effect.digest, load)
        except ColdMiss as miss:
            logger.debug("not read from the SSD: %s", miss)
            silent = str(miss) if miss.reason is Miss.SILENT else ""
        except (P2PStoreError, ValueError) as problem:
            error = problem
        finally:
            destination.abort()
        load.ended(length, error, silent)

    async def _load_into(self, destination: CopyDestination, digest: bytes, load: _Load) -> int:
        """The length of what was read and published; -1 when its waiters have gone."""
        spare_bytes = SPARE_TRAILER_BYTES
        patience = ALONE_SECONDS if self.is_last_copy(digest) else HURRIED_SECONDS

        def prepare(facts: ColdFacts) -> memoryview:
            # Its dtype and shape come with its bytes, and its sums have as many bytes as these.
            trailer = _trailer_of(facts, bytes(8 * chunk_count(facts.length)))
            destination.prepare(_slot_of(facts, trailer, spare_bytes), trailer)
            return destination.pages

        cold = self.tier.find(digest)
        if cold is not None:
            await self._node.make_room(cold.length, cold.namespace)
        facts = await self.tier.load(digest, prepare, load.overdue, patience)
        trailer = _trailer_of(facts, facts.sums)
        try:
            destination.describe(trailer)
        except ValueError:  # the shape of a tensor with very many dimensions: now it is known
            spare_bytes = MAX_TRAILER_BYTES // 2
            facts = await self.tier.load(digest, prepare, load.overdue, patience)
            destination.describe(trailer)
        if load.is_over:
            return -1
        destination.commit(self._node.now)
        return facts.length

    async def _take_back(self, effect: ColdSorted) -> None:
        """Of the objects of an earlier life, announce those that are good, and destroy the others."""
        core, now = self._core, self._node.now
        for cold in effect.discarded:
            self.tier.discard(cold.digest, cold.version)
        for cold in effect.good:
            core.cold.announce(cold.digest, now)
        core.counters["cold_objects_returned"] += len(effect.good)
        core.counters["cold_objects_discarded"] += len(effect.discarded)
        self._node.process()
        if effect.last:
            await self.tier.discards_durable()
            core.earlier_life.cold_settled()

    async def write_memory(self) -> None:
        """Write what is in memory only, the most recently used first, for the next life of this peer."""
        runs = await self._only_in_memory()
        left: Iterator[ObjectEntry] = heapq.merge(*runs, key=_least_unused)
        unwritten = sum(map(len, runs))

        async def write_some() -> None:
            nonlocal left, unwritten
            while (entry := next(left, None)) is not None:
                try:
                    if entry.state is SlotState.LIVE:
                        await self._keep(entry)
                except Unavailable as error:  # the disk hangs
                    logger.debug("not kept: %s", error)
                    left = iter(())
                    return
                unwritten -= 1

        try:
            async with trio.open_nursery() as nursery:
                for _ in range(KEPT_AT_ONCE):
                    nursery.start_soon(write_some)
        finally:
            if unwritten:
                logger.warning(
                    "%s objects were not written to the SSD before this peer left: it took too long, or hangs",
                    f"{unwritten:,}",
                    extra={"event": "ssd_not_drained"},
                )

    async def _only_in_memory(self) -> list[list[ObjectEntry]]:
        """Firm objects that are not on the SSD, in runs, each in the order of writing: a sort of a million objects
        would hold the event loop for a second."""
        segment, runs = self._core.segment, []
        for first in range(0, segment.geometry.slots, SLOTS_PER_STEP):
            some = segment.objects.in_slots(first, SLOTS_PER_STEP)
            wanted = [entry for entry in some if not entry.on_ssd and not entry.soft]
            runs.append(sorted(wanted, key=_least_unused))
            with trio.CancelScope(shield=True):  # how many are left unwritten is said in any case
                await trio.lowlevel.checkpoint()
        return runs

    async def _keep(self, entry: ObjectEntry) -> None:
        segment = self._core.segment
        if self.tier.admit(entry.digest, entry.length, entry.hits, entry.namespace) is not None:
            return
        segment.references.acquire(entry)
        if await self._store_in_background(entry, durable=False):
            self._core.cold.written(entry, self._node.now)

    async def make_durable(self, digest: bytes) -> None:
        """Have what a client put on the SSD before this returns, so that it survives a crash of the machine.
        Raises `CapacityExceeded` when the tier does not take it, and `Unavailable` when it does not answer."""
        segment = self._core.segment
        entry = self._core.objects.find(digest, self._node.now)
        if entry is None:
            raise CapacityExceeded("durable: the object was removed or evicted before it was on the SSD")
        segment.references.acquire(entry)
        if not await self._store_in_background(entry, durable=True):
            if entry.state is not SlotState.LIVE:
                raise CapacityExceeded(
                    "durable: the object was removed, or its bytes were spoilt, before it was on the SSD: put it again"
                )
            why = self.tier.why or "it is full, or the object too large for it"
            raise CapacityExceeded(
                f"durable: the object is in memory, but the SSD does not take it: {why}; see `mooncake-p2p stats`"
            )
        self._core.cold.written(entry, self._node.now)
        self._node.process()

    async def _store_in_background(self, entry: ObjectEntry, *, durable: bool) -> bool:
        """Run `_store` in a task of its own, as a hung disk cannot be cancelled, and release the caller's reference at
        its end. Raises `Unavailable` after `ALONE_SECONDS` without progress."""
        ended = trio.Event()
        outcome: list[bool | Exception] = []

        async def store() -> None:
            try:
                outcome.append(await self._store(entry, durable=durable))
            except Exception as error:
                outcome.append(error)
            finally:
                self._core.segment.references.let_go(entry, was_used=durable)
                ended.set()

        began = self._node.now
        self._node.start_soon(store)
        while not ended.is_set():
            with trio.move_on_after(LOOK_SECONDS):
                await ended.wait()
            if min(self._node.now - began, self.tier.waits.longest_seconds) >= ALONE_SECONDS:
                raise Unavailable(
                    f"durable: the object is in memory, but the SSD did not answer within {ALONE_SECONDS:g} s; "
                    "see `mooncake-p2p stats` and `mooncake-p2p doctor`"
                )
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    @property
    def capacity_bytes(self) -> int:
        """Capacity in bytes; 0 when the SSD has failed."""
        return self.tier.capacity_bytes if self.tier.state is TierState.OK else 0

    def withdraw(self, entries: Sequence[ColdEntry]) -> None:
        """These are about to leave the SSD, or were found to be damaged."""
        self._core.cold.lost(entries, self._node.now)
        self._node.tick_soon()

    def state_changed(self, health: Health) -> None:
        """The SSD failed. This peer goes on with what it has in memory, and the others are told."""
        if health.state is TierState.READ_ONLY:
            logger.error(
                "nothing more is written to the SSD, only read: %s; %s",
                health.why,
                health.cure,
                extra={"event": "ssd_read_only"},
            )
        else:
            logger.error(
                "the SSD is not used any more: %s. This peer goes on with its memory alone; %s",
                health.why,
                health.cure,
                extra={"event": "ssd_off"},
            )
            self._core.cold.lose_store()
        self._core.gossip.own_record.changed()
        self._node.tick_soon()

    def shares(self) -> dict[str, Share]:
        """Shares of namespaces with a quota or cap, less their use of memory."""
        return {
            namespace: Share(
                max(0, use.quota_bytes - use.kept_bytes),
                None if use.cap_bytes is None else max(0, use.cap_bytes - use.used_bytes),
            )
            for namespace, use in self._core.segment.quotas.items()
        }

    def is_last_copy(self, digest: bytes) -> bool:
        """Whether no other live peer announces the object."""
        known = self._core.gossip.directory.holders(digest)
        return all(holding.hidden or holding.hearsay for holding in known)

    async def _store(self, entry: ObjectEntry, *, durable: bool = False) -> bool:
        segment = self._core.segment
        if not await self._node.copy_checks.are_good(entry):  # it would be kept, and never be read
            return False
        trailer = decode_trailer(segment.table.trailer_bytes(entry))
        if trailer is None:
            raise RuntimeError(f"the trailer of {entry.key!r} is damaged in this peer's own memory")
        payload = segment.payload_pages(entry)
        return await self.tier.store(_facts_of(entry, trailer), payload, durable=durable)


class _Load:
    """A load with waiters, until it ends or is overdue. A later result is dropped."""

    def __init__(self, node: Node, effect: LoadObject) -> None:
        self._node = node
        self._effect = effect
        self._began = node.now
        self.is_over = False

    def overdue(self, why: str) -> None:
        """The disk hangs: others are to be asked. The memory stays reserved until the disk has done with it."""
        logger.warning("%s: an object is looked for elsewhere", why, extra={"event": "ssd_load_overdue"})
        self.ended(-1, None, why)

    def ended(self, length: int, error: Exception | None, silent: str) -> None:
        """-1 bytes: nothing was brought, for this `error`, or because the disk is `silent`, as far as is known."""
        if self.is_over:
            return
        self.is_over = True
        node, core = self._node, self._node.core
        node.watch.loaded(self._effect, length, node.now - self._began)
        code = int(Code.DEADLINE_EXCEEDED)
        failures = (HolderReport(core.member, code, silent),) if silent else ()
        outcome = PullOutcome(length >= 0, failures, error, core.member, NAME)
        core.operations.pulled(self._effect.operation, outcome, node.now)
        node.process()


def _facts_of(entry: ObjectEntry, trailer: TrailerBody) -> ColdFacts:
    return ColdFacts(
        digest=entry.digest,
        version=entry.version,
        length=entry.length,
        namespace=entry.namespace,
        key=entry.key,
        sums=trailer.sums,
        expires_unix_ms=entry.expires_unix_ms,
        replicas=entry.replicas,
        pin=int(entry.pin),
        soft=entry.soft,
        dtype=entry.dtype,
        shape=entry.shape,
        proof=trailer.proof,
    )


def _trailer_of(facts: ColdFacts, sums: bytes) -> TrailerBody:
    return TrailerBody(
        facts.namespace,
        facts.key,
        sums,
        facts.expires_unix_ms,
        facts.replicas,
        facts.pin,
        facts.dtype,
        facts.shape,
        facts.proof,
    )


def _slot_of(facts: ColdFacts, trailer: TrailerBody, spare_bytes: int) -> Slot:
    return Slot(
        SlotState.LIVE,
        facts.digest,
        facts.version,
        0,
        facts.length,
        min(MAX_TRAILER_BYTES, len(encode_trailer(trailer)) + spare_bytes),
        SLOT_FLAG_SOFT if facts.soft else 0,
    )
