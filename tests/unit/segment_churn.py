"""Steady churn in a segment: values come, older ones are evicted for them. For tests and `bench_segment`."""

import mmap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from p2pstore.memory.areas import NO_QUOTAS
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import TrailerBody, plan_geometry
from p2pstore.objects import KIB, MIB, chunk_count
from tests.stored import stored

SMALLEST_BYTES: Final = 4 * KIB
LARGEST_BYTES: Final = 64 * MIB
SECONDS_PER_PUT: Final = 0.001
READ_SHARE: Final = 0.5
"""Share of the puts after which some of the recent values are read."""
RECENT: Final = 2000

S = TypeVar("S", bound=Segment)
Sizes = Callable[[Random], int]


def every_magnitude(rng: Random) -> int:
    """Bytes of a value: as many between 4 and 8 KiB as between 32 and 64 MiB."""
    return int(SMALLEST_BYTES * (LARGEST_BYTES / SMALLEST_BYTES) ** rng.random())


def every_size(rng: Random) -> int:
    """Bytes of a value: each size as likely as any other, so nearly all are large."""
    return rng.randrange(SMALLEST_BYTES, LARGEST_BYTES + 1)


def few_blocks(rng: Random) -> int:
    """Bytes of a value: blocks of a model's cache, a few sizes, rarely something large."""
    sizes = (4 * KIB, 64 * KIB, MIB, 2 * MIB, 16 * MIB, LARGEST_BYTES)
    return rng.choices(sizes, (40, 20, 20, 15, 4, 1))[0]


LOADS: Final[dict[str, Sizes]] = {
    "every magnitude": every_magnitude,
    "every size": every_size,
    "few blocks": few_blocks,
}


@dataclass
class Churned:
    """How full the segment was after each put once it had been full: shares of its data area."""

    used: list[float] = field(default_factory=list)
    """Extents that are taken, whole granules."""
    payload: list[float] = field(default_factory=list)
    """Values alone, without trailers, padding and the rest of granules."""
    evicted: int = 0


def segment_for(data_bytes: int, kind: type[S], quotas: Mapping[str, int] = NO_QUOTAS) -> S:
    """A segment of that class in memory that costs what is written: values are reserved and never filled."""
    geometry = plan_geometry(data_bytes)
    view = memoryview(mmap.mmap(-1, geometry.total_bytes))
    return kind(view, segment_id=b"s" * 16, incarnation=1, geometry=geometry, quotas=quotas)


def churn(
    segment: Segment, sizes: Sizes, puts: int, seed: int, namespaces: Sequence[str] = ("default",)
) -> Churned:
    """Put until something had to go, then half as many values again as `puts` to reach a steady
    state, then `puts` that count. Each value is of one of the namespaces."""
    rng = Random(seed)
    done = Churned()
    recent: deque[bytes] = deque(maxlen=RECENT)
    payload_bytes = number = full_for = 0
    while full_for < puts + puts // 2:
        number += 1
        now = number * SECONDS_PER_PUT
        length = sizes(rng)
        namespace = namespaces[number % len(namespaces)]
        recent.append(_put(segment, namespace, f"key {number}", length, number, now))
        withdrawn = segment.objects.take_withdrawn()
        payload_bytes += length - sum(entry.length for entry in withdrawn)
        if rng.random() < READ_SHARE:
            for _ in range(3):
                segment.objects.touch(rng.choice(recent), 1, now)
        full_for += bool(full_for or withdrawn)
        if full_for > puts // 2:
            done.evicted += len(withdrawn)
            done.used.append(segment.used_bytes / segment.data_bytes)
            done.payload.append(payload_bytes / segment.data_bytes)
    return done


def _put(segment: Segment, namespace: str, key: str, length: int, clock: int, now: float) -> bytes:
    """Reserve and commit a value without writing its bytes; returns its digest."""
    trailer = TrailerBody(namespace, key, bytes(8 * chunk_count(length)))
    return stored(segment, trailer, length, clock=clock, now=now).digest
