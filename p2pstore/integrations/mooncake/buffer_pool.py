"""Registered memory that is lent, given back and lent again."""

from __future__ import annotations

import mmap
import threading
import time
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, Self
from weakref import ref

import numpy as np

from p2pstore.integrations.mooncake.base import StoreBase

DEFAULT_CLASS_BYTES: Final = 64 * 1024
DEFAULT_ALIGNMENT: Final = 8 * 1024 * 1024
MIN_ALIGNMENT: Final = 8
LOOK_SECONDS: Final = 0.05
"""Interval at which a waiting caller looks for collected leases: a destructor takes no lock, so it cannot wake it."""


class _Region:
    """Memory of one size, registered with the store."""

    def __init__(self, size: int, alignment: int) -> None:
        spare = alignment if alignment > mmap.PAGESIZE else 0
        whole = np.frombuffer(mmap.mmap(-1, size + spare), np.uint8)
        start = -int(whole.ctypes.data) % alignment
        self.memory = whole[start : start + size]
        self.address = int(self.memory.ctypes.data)
        self.size = size


class _Export(np.ndarray[Any, Any]):
    """The array behind a `memoryview` of a lease. It keeps the lease, and can be watched."""

    lease: Any


class BufferLease:
    """Memory lent by a pool: `ptr`, `size`, and `buffer`, a writable view. `release()`, or the end of a `with` block,
    gives it back; so does the end of the last reference to it and its views."""

    def __init__(self, pool: BufferPool, region: _Region, size: int) -> None:
        self._pool = pool
        self._region: _Region | None = region
        self._size = size
        self._views: list[ref[_Export]] = []

    @property
    def ptr(self) -> int:
        """The address. Raises `RuntimeError` after `release`."""
        if self._region is None:
            raise RuntimeError("buffer lease is closed")
        return self._region.address

    @property
    def size(self) -> int:
        """How many bytes were asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """A view of these bytes. Raises `BufferError` after `release`."""
        if self._region is None:
            raise BufferError("buffer lease is closed")
        export = self._region.memory[: self._size].view(_Export)
        export.lease = self
        self._views = [each for each in self._views if each() is not None] + [ref(export)]
        return export.data

    def release(self) -> None:
        """Give the memory back; may be called twice. Raises `RuntimeError` while a view of it is there."""
        if self._region is not None and any(each() is not None for each in self._views):
            raise RuntimeError("cannot release buffer while exported views exist")
        region, self._region = self._region, None
        if region is not None:
            self._pool._take_back(region)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._region is not None:
            self._pool._collected.put(self._region)


class BufferPool:
    """Lends registered memory of a store, and keeps returned memory for the next caller. Any thread may use it.

    It has at most `max_bytes` (by default what `setup` was told as `local_buffer_size`), lent and kept together, in at
    most `max_regions` pieces: of `min_size_class` bytes, then powers of two up to `alignment`, then multiples of it;
    larger pieces than `max_size_class` are not kept. A call that finds none waits, for `default_timeout` seconds or
    until one comes back; or is refused when `block_on_exhaustion` is False. A pool is closed with its store. Everything
    that is refused is a `RuntimeError`, as in Mooncake."""

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = DEFAULT_CLASS_BYTES,
        max_size_class: int | None = None,
        alignment: int = DEFAULT_ALIGNMENT,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        base = store.current if isinstance(store, StoreBase) else None
        settings = None if base is None else base._settings
        if base is None or settings is None:
            raise RuntimeError("MooncakeDistributedStore is not initialized")
        if min_size_class <= 0 or alignment <= 0:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment < MIN_ALIGNMENT or alignment & (alignment - 1):
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        self._store = base
        self._max_bytes = max_bytes or settings.local_buffer_bytes
        if self._max_bytes <= 0:
            raise RuntimeError("max_bytes must be positive")
        self._least = min_size_class
        self._largest = min(max_size_class or self._max_bytes, self._max_bytes)
        self._alignment = alignment
        self._blocks = block_on_exhaustion
        self._timeout = default_timeout
        self._max_regions = max_regions
        self._changed = threading.Condition()
        self._collected: SimpleQueue[_Region] = SimpleQueue()
        self._kept: list[_Region] = []
        self._lent: set[int] = set()
        self._bytes = 0
        self._closed = False
        base._add_pool(self)
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Borrow `size` bytes. Raises `RuntimeError` for more than the pool may have, when there is nothing left and
        `block` is False, after `timeout` seconds, and once the pool is closed."""
        if size < 0:
            raise TypeError(f"a size is not negative: {size}")
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and seconds < 0:
            raise RuntimeError("timeout must be non-negative")
        if size > self._max_bytes:
            raise RuntimeError("requested buffer size exceeds pool capacity")
        deadline = None if seconds is None else time.monotonic() + seconds
        wanted = self._class_of(size)
        with self._changed:
            while True:
                self._check_open()
                region = self._take(wanted)
                if region is not None:
                    self._lent.add(region.address)
                    return BufferLease(self, region, size)
                if not (self._blocks if block is None else block):
                    raise RuntimeError("buffer pool is exhausted")
                left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError("timed out waiting for buffer")
                self._changed.wait(min(left, LOOK_SECONDS))

    buffer = acquire

    def prewarm(self, size: int, count: int) -> None:
        """Have `count` pieces for `size` bytes ready. Raises `RuntimeError` for more than the pool may have."""
        wanted = self._class_of(size)
        with self._changed:
            self._check_open()
            for _ in range(count):
                if not self._has_room(wanted):
                    raise RuntimeError("buffer pool capacity exceeded")
                self._kept.append(self._make(wanted))
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back; may be called twice. Raises `RuntimeError` while something is lent."""
        with self._changed:
            self._take_collected()
            if self._lent:
                raise RuntimeError("cannot close buffer pool with active leases")
            self.store_closed()

    def store_closed(self) -> None:
        """The store was closed: lent memory stays until it is given back, and no more is lent."""
        with self._changed:
            self._closed = True
            while self._kept:
                self._drop(self._kept.pop())
            self._changed.notify_all()

    # --- under the lock --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("buffer pool is closed")

    def _class_of(self, size: int) -> int:
        if size <= self._least:
            wanted = self._least
        elif size <= min(self._alignment, self._largest):
            wanted = 1 << (size - 1).bit_length()
        else:
            wanted = -(-size // self._alignment) * self._alignment
        return max(1, min(wanted, max(size, self._max_bytes)))

    def _take(self, wanted: int) -> _Region | None:
        self._take_collected()
        for place in reversed(range(len(self._kept))):
            if self._kept[place].size == wanted:
                return self._kept.pop(place)
        while self._kept and not self._has_room(wanted):
            self._drop(self._kept.pop(0))
        return self._make(wanted) if self._has_room(wanted) else None

    def _has_room(self, wanted: int) -> bool:
        regions = len(self._kept) + len(self._lent)
        fits = self._bytes + wanted <= self._max_bytes
        return fits and (self._max_regions is None or regions < self._max_regions)

    def _make(self, size: int) -> _Region:
        try:
            region = _Region(size, self._alignment)
        except (OSError, OverflowError) as error:
            raise RuntimeError(f"there is no memory for {size} bytes: {error}") from error
        if self._store._buffers.add(region.address, size):
            self._store._pooled[region.address] = region
        self._bytes += size
        return region

    def _drop(self, region: _Region) -> None:
        self._bytes -= region.size
        if self._store._pooled.pop(region.address, None) is region:  # a closed store forgot it
            self._store._buffers.drop(region.address)

    def _take_collected(self) -> None:
        """Take back the memory of leases that were collected without a release."""
        while True:
            try:
                self._keep(self._collected.get_nowait())
            except Empty:
                return

    def _keep(self, region: _Region) -> None:
        self._lent.discard(region.address)
        if region.size > self._largest or self._closed:
            self._drop(region)
        else:
            self._kept.append(region)

    # ---------------------------------------------------------------------------------------------

    def _take_back(self, region: _Region) -> None:
        with self._changed:
            self._keep(region)
            self._changed.notify_all()


RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
