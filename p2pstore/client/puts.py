"""The putting half of a client, without its requests: sizes of reservations, copying and checksums."""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from p2pstore.errors import GpuCopyFailed
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import MAX_ITEMS
from p2pstore.objects import MIB, chunk_bounds, chunk_count
from p2pstore.runtime.side_by_side import PIECE_BYTES, side_by_side, step_bytes, threads_for
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.values import SMALL_COPY_BYTES, Source

_pack_sum: Final = struct.Struct("<Q").pack

AHEAD_MAX_BYTES: Final = MIB
"""Beyond this a round trip is little beside the copy, and the idle reservation much."""
AHEAD_SHARE: Final = 256
"""A reservation made ahead takes at most this fraction of the peer's memory."""
MAX_AHEAD: Final = 4
WINDOW_ITEMS: Final = MAX_ITEMS[LocalKind.COMMIT]
FIRST_ITEMS: Final = 64
"""Of the first window: the peer has something to do while the next one is written."""
WINDOW_BYTES: Final = 16 * MIB
MIN_WINDOW_BYTES: Final = 4 * MIB
COPIED_WINDOW_BYTES: Final = 32 * MIB
"""Of those that other peers copy, from the second one on: each takes these 1 ms beside the copy."""
WINDOW_SHARE: Final = 16
"""A window takes at most this fraction of the peer's memory: up to three have room at a time."""

Room = tuple[int, int]
"""Number and offset of a reservation."""
RoomSize = tuple[int, int, int]
"""A row of RESERVE: length, trailer length, count."""

IN_CACHE_BYTES: Final = 256 * 1024
"""Copied, then summed: of a whole chunk the beginning has left the second-level cache by then, which costs 10 %."""

_TRAILER_FIXED_BYTES: Final = 96
"""Prefix, msgpack headers and numbers of a trailer, generously."""


def trailer_bound(named_bytes: int, length: int, dtype: str, rank: int) -> int:
    """Upper bound of an object's trailer in bytes; `named_bytes`: length of its key and namespace together. A multiple
    of 64, so that puts of values of one size ask for the same whatever their keys."""
    needed = _TRAILER_FIXED_BYTES + named_bytes + 8 * chunk_count(length) + len(dtype) + 9 * rank
    return -(-needed // 64) * 64


def copy_and_sum(target: memoryview, source: memoryview) -> bytes:
    """Copy, and sum each chunk of the copy while it is still in the cache. Packed u64 sums.

    The sums are of what lies in `target`, whatever the caller does to `source` meanwhile.
    """
    if len(source) <= SMALL_COPY_BYTES:
        target[:] = source
        return _pack_sum(xxh3_64_intdigest(target)) if source else b""
    into = np.frombuffer(target, np.uint8)
    out_of = np.frombuffer(source, np.uint8)
    sums = []
    for start, end in chunk_bounds(len(source)):
        summed = xxh3_64()
        for at in range(start, end, IN_CACHE_BYTES):
            stop = min(at + IN_CACHE_BYTES, end)
            np.copyto(into[at:stop], out_of[at:stop])
            summed.update(target[at:stop])
        sums.append(summed.intdigest())
    return np.array(sums, "<u8").tobytes()


async def fill(
    driver: Driver,
    target: memoryview,
    source: Source,
    check: Callable[[], None],
    progress: Progress | None = None,
) -> bytes:
    """`copy_and_sum`. Over 4 MiB, it runs on a thread in steps of 4 MiB, or of up to 64 MiB with several threads, and
    can be cancelled between steps: after that nothing writes to `target` any more. `check` is called before each 4 MiB,
    and raises once `target` is not ours any more; `progress` hears of each step."""
    length = len(source)
    if length <= PIECE_BYTES:
        return _copy_part(target, source, 0)
    threads = threads_for(length) if isinstance(source, memoryview) else source.threads

    def copy_piece(start: int) -> bytes:
        check()
        return _copy_part(target[start : min(start + PIECE_BYTES, length)], source, start)

    sums: list[bytes] = []
    for start in range(0, length, step_bytes(threads)):
        end = min(start + step_bytes(threads), length)
        pieces = range(start, end, PIECE_BYTES)
        sums += await driver.run_in_thread(partial(side_by_side, threads, copy_piece, pieces))
        if progress is not None:
            progress(end, length)
    return b"".join(sums)


async def fill_many(
    driver: Driver, targets: Sequence[memoryview], sources: Sequence[Source], check: Callable[[], None]
) -> list[bytes | GpuCopyFailed]:
    """`fill` of each; where they are much together, several threads share them. In place of sums: a GPU failed."""
    threads = threads_for(sum(map(len, sources)))
    if threads == 1 or not all(isinstance(source, memoryview) for source in sources):
        made: list[bytes | GpuCopyFailed] = []
        for target, source in zip(targets, sources, strict=True):
            if type(source) is memoryview and len(source) <= PIECE_BYTES:
                made.append(copy_and_sum(target, source))
                continue
            try:
                made.append(await fill(driver, target, source, check))
            except GpuCopyFailed as error:
                made.append(error)
        return made

    def copy_piece(piece: tuple[int, int]) -> bytes:
        place, start = piece
        check()
        return _copy_part(targets[place][start : start + PIECE_BYTES], sources[place], start)

    pieces = [
        (place, start)
        for place, source in enumerate(sources)
        for start in range(0, len(source), PIECE_BYTES)
    ]
    parts = await driver.run_in_thread(partial(side_by_side, threads, copy_piece, pieces))
    sums = [b""] * len(sources)
    for (place, _), part in zip(pieces, parts, strict=True):
        sums[place] += part
    return list(sums)


def _copy_part(target: memoryview, source: Source, start: int) -> bytes:
    if isinstance(source, memoryview):
        return copy_and_sum(target, source[start : start + len(target)])
    return source.copy_and_sum(target, start)


def windows(
    sizes: Sequence[int], most_bytes: int = WINDOW_BYTES, *, is_copied: bool = False
) -> list[range]:
    """Cut a batch into runs of at most 256 items (the first: 64) and `most_bytes` (or one item). Reserved memory cannot
    be evicted, so a run is small; and while the peer publishes one run, the client writes the next. Large values: a run
    has at most half of the bytes that are left, so that little remains to be published behind the last copy.
    `is_copied`: other peers copy each run; runs are few."""
    cuts: list[range] = []
    ends = list(accumulate(sizes, initial=0))
    start = 0
    while start < len(sizes):
        left = ends[-1] - ends[start]
        limit = max(MIN_WINDOW_BYTES, left // 2)
        if is_copied:
            limit = most_bytes if cuts else WINDOW_BYTES
        most_items = WINDOW_ITEMS if cuts or is_copied else FIRST_ITEMS
        fitting = bisect_right(ends, ends[start] + min(most_bytes, limit)) - 1
        stop = max(start + 1, min(fitting, start + most_items))
        cuts.append(range(start, stop))
        start = stop
    return cuts


class GrantedAhead:
    """Reservations that came with earlier commits, for puts of the same size to come: one for a put, those of the first
    window for a batch.

    They are asked for only when two puts, or two batches, in a row had that size; all are given back when the size
    changes or no put came for a while. To make them, the peer may have to evict: so they take at most `max_bytes`, or
    a room each for a few puts.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rooms: list[Room] = []
        self._size = self._last = (-1, -1)
        """Length and trailer length: of these rooms, and of the last put."""
        self._used = False

    def take(self, item: RoomSize) -> tuple[list[Room], list[int]]:
        """Rooms for as many of these values as there are, in order; and the numbers to give back, because
        they are of another size."""
        *size, count = item
        with self._lock:
            self._used = True
            if self._size != tuple(size):
                return [], self._drop()
            taken, self._rooms = self._rooms[:count], self._rooms[count:]
            return taken, []

    def wanted(self, item: RoomSize) -> list[RoomSize]:
        """The reservations to request along with the commit of a put, or of the last values of a batch, which would
        take `item` if it came again."""
        length, trailer, count = item
        with self._lock:
            is_repeated, self._last = self._last == (length, trailer), (length, trailer)
            if not is_repeated or length > self._max_bytes:
                return []
            count = min(count, MAX_AHEAD * self._max_bytes // max(1, length))
            count = min(count, max(count, MAX_AHEAD) - len(self._rooms))
            return [(length, trailer, count)] if count > 0 else []

    def granted(self, item: RoomSize, rooms: Sequence[Room]) -> list[int]:
        """Keep what was granted; returns the numbers to give back, because the size has changed."""
        size = item[:2]
        with self._lock:
            if size != self._last:
                return [number for number, _ in rooms]
            dropped = [] if self._size == size else self._drop()
            self._size = size
            self._rooms += rooms
            return dropped

    def drop(self) -> list[int]:
        """Forget all; returns the numbers to give back."""
        with self._lock:
            return self._drop()

    def _drop(self) -> list[int]:
        dropped, self._rooms = self._rooms, []
        return [number for number, _ in dropped]

    def drop_unused(self) -> list[int]:
        """`drop` when no put came since the last call."""
        used, self._used = self._used, False
        return [] if used else self.drop()

    @property
    def held(self) -> bool:
        return bool(self._rooms)
