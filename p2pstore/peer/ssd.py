"""A peer's SSD: carries out what the core decides to write and to load, and tells it what became of that."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from p2pstore.core.cold_return import ColdSorted
from p2pstore.core.effects import LoadObject, PullOutcome, WriteObject
from p2pstore.errors import CapacityExceeded, NoSuchKey, P2PStoreError
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.layout import ColdFacts
from p2pstore.ssd_tier.tier import ColdMiss, Refusal, SsdTier
from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.layout import (
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
_FOR_NOW: Final = (Refusal.QUEUE_FULL, Refusal.WRITE_BUDGET_SPENT, Refusal.NO_ROOM)


class PeerSsd:
    """The shell between a peer's core and its SSD tier."""

    def __init__(self, node: Node, tier: SsdTier) -> None:
        self._node = node
        self._core = node.core
        self.tier = tier

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
            refusal = await self._store(entry, durable=False)
            written = refusal is None
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

        def prepare(facts: ColdFacts) -> memoryview:
            trailer = _trailer_of(facts)
            destination.prepare(_slot_of(facts, trailer), trailer)
            return destination.pages

        began, error, length = node.now, None, -1
        try:
            length = (await self.tier.load(effect.digest, prepare)).length
            destination.commit(node.now)
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
            refusal = await self._store(entry, durable=True)
            if refusal is not None:
                raise CapacityExceeded(
                    f"durable: the object is in memory, but its SSD does not take it ({refusal.value}): see "
                    "`mooncake-p2p stats`"
                )
            self._core.cold.written(entry, self._node.now)
        finally:
            segment.let_go(entry)
            self._node.process()

    # --- what the tier asks ------------------------------------------------------------------

    def withdraw(self, entries: Sequence[ColdEntry]) -> None:
        """These are about to leave the SSD, or were found to be damaged."""
        self._core.cold.lost(entries, self._node.now)
        self._node.process()

    def is_last_copy(self, digest: bytes) -> bool:
        """Whether nobody else that is alive is known to hold the object."""
        return all(holding.hidden for holding in self._core.gossip.holders(digest, self._node.now))

    async def _store(self, entry: ObjectEntry, *, durable: bool) -> Refusal | None:
        segment = self._core.segment
        trailer = decode_trailer(segment.trailer_bytes(entry))
        if trailer is None:
            raise RuntimeError(f"the trailer of {entry.key!r} is damaged in this peer's own memory")
        return await self.tier.store(
            _facts_of(entry, trailer),
            segment.payload_pages(entry),
            hits=entry.hits,
            durable=durable,
        )


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


def _trailer_of(facts: ColdFacts) -> TrailerBody:
    return TrailerBody(
        facts.namespace,
        facts.key,
        struct.pack(f"<{len(facts.chunk_sums)}Q", *facts.chunk_sums),
        facts.expires_unix_ms,
        facts.replicas,
        facts.pin,
        facts.dtype,
        facts.shape,
    )


def _slot_of(facts: ColdFacts, trailer: TrailerBody) -> Slot:
    flags = SLOT_FLAG_SOFT if facts.soft else 0
    return Slot(
        SlotState.LIVE,
        facts.digest,
        facts.version,
        0,
        facts.length,
        len(encode_trailer(trailer)),
        flags,
    )
