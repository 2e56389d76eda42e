"""How a peer speaks of the objects it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pstore.gossip.records import LocationRecord, Tier, care_flags
from p2pstore.location_table import LOCATION
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import GRANULE_BYTES, round_up
from p2pstore.transfer.peer_messages import KeyInfo

if TYPE_CHECKING:
    from p2pstore.ssd_tier.index import ColdEntry


def location_of(entry: ObjectEntry) -> LocationRecord:
    """What the peer announces of an object it holds."""
    return LocationRecord(
        entry.digest,
        entry.version,
        entry.slot,
        round_up(entry.length, GRANULE_BYTES) // GRANULE_BYTES,
        tier=_tier_of(entry),
        soft=entry.soft,
        replicas=entry.replicas,
        pin=entry.pin,
    )


def packed_locations(entries: Sequence[ObjectEntry]) -> list[bytes]:
    """`location_of` each, packed: of new objects, which are firm and in memory alone."""
    pack = LOCATION.pack
    return [
        pack(
            entry.digest,
            *entry.version,
            entry.slot,
            (-(-entry.length // GRANULE_BYTES)).to_bytes(3, "little"),
            care_flags(entry.replicas, entry.pin),
        )
        for entry in entries
    ]


def location_on_ssd(entry: ColdEntry) -> LocationRecord:
    """What the peer announces of an object that is on its SSD alone."""
    return LocationRecord(
        entry.digest,
        entry.version,
        0,
        min(round_up(entry.length, GRANULE_BYTES) // GRANULE_BYTES, 0xFFFFFF),
        tier=Tier.SSD,
        soft=entry.soft,
        replicas=entry.replicas,
        pin=entry.pin,
    )


def key_info(entry: ObjectEntry | ColdEntry) -> KeyInfo:
    """An object as `ls` shows it."""
    return KeyInfo(
        entry.key,
        entry.length,
        entry.version.clock,
        entry.version.writer,
        int(_tier_of(entry)),
        entry.pin,
        entry.soft,
        entry.expires_unix_ms,
        isinstance(entry, ObjectEntry) and entry.references > 0,
    )


def _tier_of(entry: ObjectEntry | ColdEntry) -> Tier:
    if not isinstance(entry, ObjectEntry):
        return Tier.SSD
    return Tier.BOTH if entry.on_ssd else Tier.DRAM
