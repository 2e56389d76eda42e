"""A peer's SSD: carries out what the core decides to write and to load, and tells it what became of that."""

from __future__ import annotations

import contextlib
import logging
import shutil
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.config import PeerConfig
from p2pstore.core.cold_return import ColdObject, ColdSorted
from p2pstore.core.copy_destination import CopyDestination
from p2pstore.core.effects import LoadObject, PullOutcome, WriteObject
from p2pstore.errors import CapacityExceeded, ConfigError, NoSuchKey, P2PStoreError
from p2pstore.objects import MIB, chunk_count, format_bytes, namespace_digest
from p2pstore.ssd_tier.admission import AdmissionPolicy, Refusal
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.health import TierState
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.layout import SEGMENT_BYTES, ColdFacts
from p2pstore.ssd_tier.misses import ColdMiss
from p2pstore.ssd_tier.opening import FILE_NAME
from p2pstore.ssd_tier.tier import SsdTier, open_tier
from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.layout import (
    MAX_TRAILER_BYTES,
    SLOT_FLAG_SOFT,
    Slot,
    SlotState,
    TrailerBody,
    decode_trailer,
    encode_trailer,
)

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

NAME: Final = "ssd"
"""As what brought an object, beside the transports."""
SOON_SECONDS: Final = 0.5
LATER_SECONDS: Final = 60.0
"""When an object that the tier refused is offered again: soon, when it is a matter of time."""
KEPT_AT_ONCE: Final = 8
"""Objects that are written side by side when the peer leaves."""
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
    disk = await trio.to_thread.run_sync(_open_disk, config)
    try:
        ssd = PeerSsd(node)
        policy = AdmissionPolicy(write_bytes_per_day=config.ssd_bytes_per_day)
        async with open_tier(
            disk,
            policy,
            withdraw=ssd.withdraw,
            is_last_copy=ssd.is_last_copy,
            state_changed=ssd.state_changed,
            segment_bytes=segment_bytes_for(disk.size_bytes),
        ) as tier:
            ssd.begin(tier)
            logger.info(
                "ssd: %s of %s, %s objects of earlier",
                format_bytes(tier.live_bytes),
                format_bytes(tier.capacity_bytes),
                f"{len(tier):,}",
                extra={"event": "ssd_open", "path": str(disk.path)},
            )
            yield
    except OSError as error:
        raise ConfigError(f"ssd: {config.ssd} fails: {error}") from error
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(disk.close)


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
    for a whole device."""
    place = Path(path)
    if not place.is_dir():
        return None
    with contextlib.suppress(FileNotFoundError):
        return (place / FILE_NAME).stat().st_size
    return shutil.disk_usage(place).free // 2


class PeerSsd:
    """The shell between a peer's core and its SSD tier."""

    tier: SsdTier

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core

    def begin(self, tier: SsdTier) -> None:
        """From now on there is an SSD. What is on it is shown when that is known to be good."""
        core = self._core
        self.tier = tier
        self._node.ssd, core.cold.store = self, tier
        core.floors.return_with(self._of_an_earlier_life(), tier.newest_clock, self._node.now)

    def _of_an_earlier_life(self) -> Iterator[ColdObject]:
        for digest in self.tier.digests(None):
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
            refusal = self.tier.admit(entry.digest, entry.length, entry.hits)
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
            destination = core.copy_destination(effect.operation, node.now)
        except NoSuchKey:
            return  # whoever wanted it has gone
        began = node.now
        length, error = -1, None
        try:
            length = await self._load_into(destination, effect.digest)
        except ColdMiss as miss:
            logger.debug("not read from the SSD: %s", miss)
        except (P2PStoreError, ValueError) as problem:
            error = problem
        finally:
            destination.abort()
        node.watch.loaded(effect, length, node.now - began)
        outcome = PullOutcome(length >= 0, (), error, core.member, NAME)
        core.pulled(effect.operation, outcome, node.now)
        node.process()

    async def _load_into(self, destination: CopyDestination, digest: bytes) -> int:
        """The length of what was read and published."""
        spare_bytes = SPARE_TRAILER_BYTES

        def prepare(facts: ColdFacts) -> memoryview:
            # Its dtype and shape come with its bytes, and its sums have as many bytes as these.
            trailer = _trailer_of(facts, bytes(8 * chunk_count(facts.length)))
            destination.prepare(_slot_of(facts, trailer, spare_bytes), trailer)
            return destination.pages

        facts = await self.tier.load(digest, prepare)
        trailer = _trailer_of(facts, _packed(facts.chunk_sums))
        try:
            destination.describe(trailer)
        except ValueError:  # the shape of a tensor with very many dimensions: now it is known
            spare_bytes = MAX_TRAILER_BYTES // 2
            facts = await self.tier.load(digest, prepare)
            destination.describe(trailer)
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
        entries = [
            entry for entry in self._core.segment.entries() if not entry.on_ssd and not entry.soft
        ]
        left = deque(sorted(entries, key=lambda entry: -entry.last_access))

        async def write_some() -> None:
            while left:
                entry = left.popleft()
                if entry.state is SlotState.LIVE:
                    await self._keep(entry)

        async with trio.open_nursery() as nursery:
            for _ in range(KEPT_AT_ONCE):
                nursery.start_soon(write_some)

    async def _keep(self, entry: ObjectEntry) -> None:
        segment = self._core.segment
        if self.tier.admit(entry.digest, entry.length, entry.hits) is not None:
            return
        segment.acquire(entry)
        try:
            if await self._store(entry):
                self._core.cold.written(entry, self._node.now)
        finally:
            segment.let_go(entry, was_used=False)

    # --- what clients ask for ----------------------------------------------------------------

    async def make_durable(self, digest: bytes) -> None:
        """Have what a client put on the SSD before this returns, so that it survives a crash of the machine.
        Raises `CapacityExceeded` when the tier does not take it."""
        segment = self._core.segment
        entry = self._core.find(digest, self._node.now)
        if entry is None:
            raise CapacityExceeded(
                "durable: the object was removed or evicted before it was on the SSD"
            )
        segment.acquire(entry)
        try:
            if not await self._store(entry, durable=True):
                why = self.tier.why or "it is full, or the object too large for it"
                raise CapacityExceeded(
                    f"durable: the object is in memory, but the SSD does not take it: {why}; see `mooncake-p2p stats`"
                )
            self._core.cold.written(entry, self._node.now)
        finally:
            segment.let_go(entry)
            self._node.process()

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

    def state_changed(self, state: TierState, why: str) -> None:
        """The SSD failed. This peer goes on with what it has in memory, and the others are told."""
        if state is TierState.READ_ONLY:
            logger.error(
                "nothing more is written to the SSD, only read: %s. Replace it, or free space, and start this peer "
                "again",
                why,
                extra={"event": "ssd_read_only"},
            )
        else:
            logger.error(
                "the SSD is not used any more: %s. This peer goes on with its memory alone; replace the SSD, and "
                "start this peer again",
                why,
                extra={"event": "ssd_off"},
            )
            self._core.cold.lose_store()
        self._core.gossip.own_record.changed()
        self._node.stir()

    def is_last_copy(self, digest: bytes) -> bool:
        """Whether nobody else that is alive is known to hold the object."""
        return all(holding.hidden for holding in self._core.gossip.holders(digest, self._node.now))

    async def _store(self, entry: ObjectEntry, *, durable: bool = False) -> bool:
        segment = self._core.segment
        trailer = decode_trailer(segment.trailer_bytes(entry))
        if trailer is None:
            raise RuntimeError(f"the trailer of {entry.key!r} is damaged in this peer's own memory")
        payload = segment.payload_pages(entry)
        return await self.tier.store(_facts_of(entry, trailer), payload, durable=durable)


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
