"""A peer's SSD: carries out what the core decides to write and to load, and tells it what became of that."""

from __future__ import annotations

import contextlib
import heapq
import logging
import shutil
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.config import MINIMUM_SSD_BYTES, PeerConfig
from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.core_effects import (
    ColdObject,
    ColdSorted,
    LoadObject,
    PullFailure,
    PullOutcome,
    WriteObject,
)
from p2pstore.errors import CapacityExceeded, ConfigError, NoSuchKey, P2PStoreError, Unavailable
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
from p2pstore.objects import MIB, chunk_count, format_bytes, namespace_digest
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.health import PATIENCE_SECONDS as ALONE_SECONDS
from p2pstore.ssd_tier.health import ColdMiss, Health, Miss, TierState
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import SEGMENT_BYTES, ColdFacts
from p2pstore.ssd_tier.opening import FILE_NAME
from p2pstore.ssd_tier.tier import SsdTier, open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy, Refusal, Share
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
OPENING_SECONDS: Final = 30.0
"""A disk may be silent for so long while its log is opened."""
ENDING_SECONDS: Final = 3.0
"""What is under way when the peer ends has so long; then a disk that hangs is left alone."""
KEPT_AT_ONCE: Final = 8
"""Objects that are written side by side when the peer leaves."""
SLOTS_PER_STEP: Final = 2_000
"""Passed in a millisecond."""
SEGMENTS_WANTED: Final = 16
LEAST_SEGMENT_BYTES: Final = 16 * MIB
SPARE_TRAILER_BYTES: Final = 512
"""Room for what belongs to a tensor, which is not known before it is read."""
_FOR_NOW: Final = (Refusal.QUEUE_FULL, Refusal.WRITE_BUDGET_SPENT, Refusal.NO_ROOM)


@asynccontextmanager
async def open_ssd(config: PeerConfig, node: Node) -> AsyncIterator[None]:
    """The node's SSD tier, if it is to have one, for as long as the block runs. Call it before the node runs. Raises
    `ConfigError` when the SSD cannot be used."""
    if config.ssd is None:
        yield
        return
    disk = await _open_in_thread(config)
    ssd = PeerSsd(node)
    policy = AdmissionPolicy(write_bytes_per_day=config.ssd_bytes_per_day)
    try:
        async with (
            open_background_nursery() as guards,
            _opening(disk, config, guards) as opened,
            open_tier(
                disk,
                policy,
                TierHooks(
                    withdraw=ssd.withdraw,
                    is_last_copy=ssd.is_last_copy,
                    state_changed=ssd.state_changed,
                    shares=ssd.shares,
                ),
                segment_bytes=segment_bytes_for(disk.size_bytes),
                cluster=config.cluster,
            ) as tier,
        ):
            opened.set()
            guards.start_soon(_leave_alone_what_hangs, ssd, disk)
            ssd.begin(tier)
            logger.info(
                "ssd: %s of %s, %s objects of earlier",
                format_bytes(tier.live_bytes),
                format_bytes(tier.capacity_bytes),
                f"{len(tier):,}",
                extra={"event": "ssd_open", "path": str(disk.path)},
            )
            try:
                yield
            finally:
                ssd.ending.set()
    except OSError as error:
        raise ConfigError(f"ssd: {config.ssd} fails: {error}") from error
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(disk.close)


@asynccontextmanager
async def _opening(
    disk: FileDisk, config: PeerConfig, guards: trio.Nursery
) -> AsyncIterator[trio.Event]:
    """Raises `ConfigError` when the disk hangs before the event is set; others then say which disk it was."""
    opened, abandoned = trio.Event(), trio.Event()

    async def guard() -> None:
        while not opened.is_set():
            with trio.move_on_after(LOOK_SECONDS):
                await opened.wait()
            if not opened.is_set() and disk.waits.silent_seconds >= OPENING_SECONDS:
                abandoned.set()
                disk.abandon()
                return

    guards.start_soon(guard)
    try:
        yield opened
    except Exception as error:
        if isinstance(error, ConfigError) and not opened.is_set():
            raise ConfigError(f"ssd: {disk.path}: {error}") from error
        if not abandoned.is_set():
            raise
        raise ConfigError(
            f"ssd: {config.ssd} does not answer: nothing came from it for {OPENING_SECONDS:g} s. Look at the kernel's "
            "log for that disk, or start this peer without it"
        ) from error


async def _leave_alone_what_hangs(ssd: PeerSsd, disk: FileDisk) -> None:
    """There is no way to end I/O that hangs, and the tasks that wait for it would keep this peer from ending."""
    await ssd.ending.wait()
    await trio.sleep(ENDING_SECONDS)
    while True:
        if disk.waits.longest_seconds >= ENDING_SECONDS:
            break
        await trio.sleep(LOOK_SECONDS)
    logger.warning(
        "the SSD has not answered for %.0f s: this peer ends without what is under way there",
        disk.waits.longest_seconds,
        extra={"event": "ssd_left_alone"},
    )
    ssd.tier.stop()
    disk.abandon()


async def _open_in_thread(config: PeerConfig) -> FileDisk:
    """A path that hangs can be cancelled: what is opened after that is closed at once."""
    wanted = [True]  # whoever takes it has the disk
    opened: list[FileDisk] = []

    def open_it() -> None:
        disk = _open_disk(config)
        opened.append(disk)
        try:
            wanted.pop()
        except IndexError:
            disk.close()

    try:
        await trio.to_thread.run_sync(open_it, abandon_on_cancel=True)
    except trio.Cancelled:
        try:
            wanted.pop()
        except IndexError:  # it was opened in this moment
            opened[0].close()
        raise
    return opened[0]


def _open_disk(config: PeerConfig) -> FileDisk:
    path = config.ssd
    assert path is not None
    return open_disk(path, config.ssd_capacity_bytes or default_capacity(path))


def segment_bytes_for(capacity_bytes: int) -> int:
    """A power of two: 256 MiB, or on a small disk what makes some sixteen of them. Reclaim goes by whole segments, and
    parts of large objects are 64 MiB."""
    wanted = max(LEAST_SEGMENT_BYTES, capacity_bytes // SEGMENTS_WANTED)
    return min(SEGMENT_BYTES, 1 << (wanted.bit_length() - 1))


def default_capacity(path: str) -> int | None:
    """What is taken when nobody says how much: of a directory what was taken before, else half of what is free; None
    for a whole device. Raises `ConfigError` when that is too little."""
    place = Path(path)
    if not place.is_dir():
        return None
    with contextlib.suppress(OSError):  # what is wrong there is said when it is opened
        if taken := (place / FILE_NAME).stat().st_size:
            return taken
    half = shutil.disk_usage(place).free // 2
    if half < MINIMUM_SSD_BYTES:
        raise ConfigError(
            f"ssd: half of what is free in {path} is {format_bytes(half)}, and the SSD tier needs "
            f"{format_bytes(MINIMUM_SSD_BYTES)}: make room there, name another directory, or say how much to take "
            "(--ssd-capacity)"
        )
    return half


def _least_unused(entry: ObjectEntry) -> float:
    return -entry.last_access


class PeerSsd:
    """The shell between a peer's core and its SSD tier."""

    tier: SsdTier

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self.ending = trio.Event()
        """This peer ends: what is under way there is waited for no longer than it takes a disk that works."""

    def begin(self, tier: SsdTier) -> None:
        """From now on there is an SSD. What is on it is shown when that is known to be good."""
        core = self._core
        self.tier = tier
        self._node.ssd, core.cold.store = self, tier
        core.floors.return_with(self._of_an_earlier_life(), tier.newest_clock, self._node.now)

    def _of_an_earlier_life(self) -> Iterator[ColdObject]:
        for digest in chain.from_iterable(self.tier.digests(None)):
            entry = self.tier.find(digest)
            if entry is not None:
                yield ColdObject(digest, namespace_digest(entry.namespace), entry.version)

    # --- what the core asks for --------------------------------------------------------------

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
        """Bring an object to memory."""
        core, node = self._core, self._node
        try:
            destination = core.operations.copy_destination(effect.operation, node.now)
        except NoSuchKey:
            return  # whoever wanted it has gone
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
        """The length of what was read and published; -1 when nobody waited for it any more."""
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
        trailer = _trailer_of(facts, _packed(facts.chunk_sums))
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
            core.floors.cold_settled()

    # --- leaving -----------------------------------------------------------------------------

    async def keep_memory(self) -> None:
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
        """What is neither on the SSD nor a soft copy, in runs, each in the order in which it is to be written: all of
        a million in order would hold the event loop for a second."""
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
        if await self._stored(entry, durable=False):
            self._core.cold.written(entry, self._node.now)

    # --- what clients ask for ----------------------------------------------------------------

    async def make_durable(self, digest: bytes) -> None:
        """Have what a client put on the SSD before this returns, so that it survives a crash of the machine.
        Raises `CapacityExceeded` when the tier does not take it, and `Unavailable` when it does not answer."""
        segment = self._core.segment
        entry = self._core.objects.find(digest, self._node.now)
        if entry is None:
            raise CapacityExceeded(
                "durable: the object was removed or evicted before it was on the SSD"
            )
        segment.references.acquire(entry)
        if not await self._stored(entry, durable=True):
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

    async def _stored(self, entry: ObjectEntry, *, durable: bool) -> bool:
        """`_store` of what was acquired, and let go of it. The disk may hang, so that goes on in the background: who
        waits can be called off, and raises `Unavailable` when nothing moves."""
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

    # --- what others are told ----------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """What it can take; 0 when the SSD has failed."""
        return self.tier.capacity_bytes if self.tier.state is TierState.OK else 0

    @property
    def used_bytes(self) -> int:
        """What of that is alive."""
        return self.tier.live_bytes

    # --- what the tier asks ------------------------------------------------------------------

    def withdraw(self, entries: Sequence[ColdEntry]) -> None:
        """These are about to leave the SSD, or were found to be damaged."""
        self._core.cold.lost(entries, self._node.now)
        self._node.stir()

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
        self._node.stir()

    def shares(self) -> dict[str, Share]:
        """What namespaces with a quota may count on and take, as both count what they have in memory as well."""
        return {
            namespace: Share(
                max(0, use.quota_bytes - use.kept_bytes),
                None if use.cap_bytes is None else max(0, use.cap_bytes - use.used_bytes),
            )
            for namespace, use in self._core.segment.quotas.items()
        }

    def is_last_copy(self, digest: bytes) -> bool:
        """Whether nobody else that is alive says to hold the object."""
        known = self._core.gossip.holders(digest, self._node.now)
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
    """A load that somebody waits for, until it ends or is overdue. What comes after that goes nowhere."""

    def __init__(self, node: Node, effect: LoadObject) -> None:
        self._node = node
        self._effect = effect
        self._began = node.now
        self.is_over = False

    def overdue(self, why: str) -> None:
        """The disk hangs: others are to be asked. The memory stays reserved until the disk has done with it."""
        logger.warning(
            "%s: an object is looked for elsewhere", why, extra={"event": "ssd_load_overdue"}
        )
        self.ended(-1, None, why)

    def ended(self, length: int, error: Exception | None, silent: str) -> None:
        """-1 bytes: nothing was brought, for this `error`, or because the disk is `silent`, as far as is known."""
        if self.is_over:
            return
        self.is_over = True
        node, core = self._node, self._node.core
        node.watch.loaded(self._effect, length, node.now - self._began)
        code = int(Code.DEADLINE_EXCEEDED)
        failures = (PullFailure(core.member, code, silent),) if silent else ()
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
        chunk_sums=struct.unpack(f"<{len(trailer.sums) // 8}Q", trailer.sums),
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


def _packed(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)
