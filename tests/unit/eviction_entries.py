"""Entries of objects that are in no segment, for tests of what is evicted; and single extents."""

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.extent_allocator import ExtentAllocator
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import Version


def entry(number: int, *, bytes_: int = 4096, now: float = 0.0, soft: bool = False) -> ObjectEntry:
    """The entry number `number`: its slot, offset and digest are all made of that."""
    return ObjectEntry(
        digest=number.to_bytes(16, "big"),
        version=Version(1, 1),
        slot=number,
        offset=number << 32,
        length=bytes_,
        trailer_length=0,
        extent_bytes=bytes_,
        namespace="tests",
        key=f"k{number}",
        expires_unix_ms=0,
        replicas=1,
        pin=Pin.NONE,
        pin_until=0.0,
        soft=soft,
        dtype="",
        shape=(),
        last_access=now,
    )


def allocate(allocator: ExtentAllocator, size_bytes: int) -> int | None:
    """Offset of a new extent, or None when no free extent is long enough."""
    return next(iter(allocator.allocate_many(size_bytes, 1)), None)
