"""How a peer speaks of the objects it holds."""

from __future__ import annotations

from p2pstore.gossip.records import (
    LocationRecord,
)
from p2pstore.objects import Version
from p2pstore.transfer.layout import (
    GRANULE_BYTES,
    round_up,
)
from p2pstore.transfer.messages import (
    KeyInfo,
)
from p2pstore.transfer.segment import ObjectEntry


def location_of(entry: ObjectEntry) -> LocationRecord:
    """What the peer announces of an object it holds."""
    return LocationRecord(
        entry.digest,
        Version(entry.version.clock, entry.version.writer),
        entry.slot,
        round_up(entry.length, GRANULE_BYTES) // GRANULE_BYTES,
        soft=entry.soft,
        replicas=entry.replicas,
        pin=entry.pin,
    )


def key_info(entry: ObjectEntry) -> KeyInfo:
    """An object as `ls` shows it."""
    return KeyInfo(
        entry.key,
        entry.length,
        entry.version.clock,
        entry.version.writer,
        0,
        entry.pin,
        entry.soft,
        entry.expires_unix_ms,
        entry.references > 0,
    )
