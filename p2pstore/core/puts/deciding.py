"""What a put of a key that exists comes to, wherever the copy is: one table. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from p2pstore.core.operation import KnownCopy
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import Version
from p2pstore.put_facts import PutFacts

if TYPE_CHECKING:
    from p2pstore.ssd_tier.index import ColdEntry


class Likeness(Enum):
    """How a copy compares with the value that is put. A tensor has its dtype and shape, too."""

    SAME = auto()
    BYTES = auto()
    """The bytes are the same; the copy has to come here for its dtype, shape or end."""
    OTHER = auto()


class Verdict(Enum):
    """What the put does about a copy."""

    CREATE = auto()
    """Go on, to a version above it."""
    KEEP = auto()
    """The copy stays, the put is `unchanged`."""
    JOIN = auto()
    """The value becomes one more copy of that version; the put is `unchanged`."""
    BRING = auto()
    """Bring that copy here, and decide anew."""
    REFUSE = auto()
    """The copy stays, the put is `kept_existing`."""
    NEED_BYTES = auto()
    """The put came without its bytes, which have to come."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A copy under the put's key: `entry` in this peer's memory, `copy` at another peer, or neither: on this peer's
    SSD. `soft`, `expires_unix_ms`: of a copy that joins it."""

    version: Version
    likeness: Likeness
    expires_unix_ms: int = 0
    soft: bool = False
    entry: ObjectEntry | None = None
    copy: KnownCopy | None = None


def decide(facts: PutFacts, standing: Standing | None) -> Verdict:
    """The table: without a copy, by its likeness, by its place, and by whether the bytes have come."""
    options = facts.options
    if standing is None:
        return Verdict.CREATE
    if standing.likeness is Likeness.OTHER:
        return Verdict.CREATE if options.overwrite else Verdict.REFUSE
    if standing.likeness is Likeness.BYTES:
        return Verdict.BRING
    if standing.entry is not None:
        return Verdict.KEEP
    if facts.reservation:
        return Verdict.JOIN
    wants_memory = options.pin or options.ttl_ms or options.replicas > 1
    return Verdict.NEED_BYTES if wants_memory else Verdict.KEEP


def in_memory(entry: ObjectEntry, facts: PutFacts) -> Standing:
    """The object of this key in this peer's memory."""
    same = _has_bytes(entry.version, entry.length, facts) and _is_described(entry, facts)
    likeness = Likeness.SAME if same else Likeness.OTHER
    return Standing(entry.version, likeness, entry=entry)


def on_ssd(cold: ColdEntry, facts: PutFacts) -> Standing:
    """The object of this key on this peer's SSD alone, whose index knows neither dtype nor shape."""
    likeness = Likeness.OTHER
    if _has_bytes(cold.version, cold.length, facts):
        is_asked = bool(facts.options.dtype or (cold.described and facts.reservation))
        likeness = Likeness.BYTES if is_asked else Likeness.SAME
    return Standing(cold.version, likeness, cold.expires_unix_ms, cold.soft)


def elsewhere(copy: KnownCopy, slot: Slot, trailer: TrailerBody | None, facts: PutFacts) -> Standing:
    """A copy at another peer. One that joins it is kept for speed alone, unless it is pinned here."""
    if not _has_bytes(slot.version, slot.length, facts):
        likeness = Likeness.OTHER
    elif trailer is None or (trailer.dtype and not facts.options.dtype):
        likeness = Likeness.BYTES
    else:
        likeness = Likeness.SAME if _is_described(trailer, facts) else Likeness.OTHER
    expires_unix_ms = trailer.expires_unix_ms if trailer is not None else 0
    return Standing(slot.version, likeness, expires_unix_ms, soft=True, copy=copy)


def _has_bytes(version: Version, length: int, facts: PutFacts) -> bool:
    return version.root == facts.root and length == facts.length


def _is_described(known: ObjectEntry | TrailerBody, facts: PutFacts) -> bool:
    """Whether an object has the dtype and shape of the put's tensor, if it is one."""
    options = facts.options
    described = (known.dtype, tuple(known.shape)) == (options.dtype, tuple(options.shape))
    return described or not options.dtype
