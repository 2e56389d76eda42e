"""A file or a block device as a `Disk`: direct I/O, small reads by the kernel, all else by threads of its own."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Final

import trio

from p2pstore.ssd_tier.aligned_memory import aligned_buffer, fast_address
from p2pstore.ssd_tier.disk_protocol import (
    ALIGNMENT_BYTES,
    SECTOR_BYTES,
    Check,
    Waits,
    checked_bytes,
    cut,
    refuse_closed,
)
from p2pstore.ssd_tier.io_threads import IoThreads
from p2pstore.ssd_tier.kernel_aio import KernelAio
from p2pstore.ssd_tier.opening import OpenPlace, open_place, why_misplaced

logger = logging.getLogger("p2pstore.ssd_tier")

READ_PIECE_BYTES: Final = 4 * 1024 * 1024
WRITE_PIECE_BYTES: Final = 1024 * 1024
WRITE_PIECE_BESIDE_READS_BYTES: Final = 256 * 1024
"""Larger requests are cut: the pieces are done side by side. Those of writes are smaller, because a read waits in the
disk for writes that came before it."""

READ_THREADS: Final = 16
WRITE_THREADS: Final = 8
MAX_SPARE_PAGES: Final = 64

WRITES_BESIDE_READS: Final = 2
QUIET_SECONDS: Final = 0.02
"""After this time without a read, writes are limited by the number of threads only."""


class WriteGate:
    """Limits concurrent writes beside reads, because a read waits in the disk for the writes before it. `clock` gives
    seconds. Measured p99 of reads of 64 KiB, against an idle disk: 11 x beside 8 writes of 1 MiB, 2.8 x beside 2,
    1.4 x beside 2 of 256 KiB, which still write 40 % as fast."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._writing = 0
        self._last_read = -inf
        self._open = False

    @property
    def is_reading(self) -> bool:
        """Whether a read began within `QUIET_SECONDS`."""
        return not self._open and self._clock() - self._last_read < QUIET_SECONDS

    def read(self) -> None:
        self._last_read = self._clock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The block writes; it begins when its turn has come."""
        with self._condition:
            while self.is_reading and self._writing >= WRITES_BESIDE_READS:
                self._condition.wait(QUIET_SECONDS)
            self._writing += 1
        try:
            yield
        finally:
            with self._condition:
                self._writing -= 1
                self._condition.notify()

    def open_for_good(self) -> None:
        """Let all waiting writes pass, from now on."""
        with self._condition:
            self._open = True
            self._condition.notify_all()


def open_disk(
    path: str | os.PathLike[str],
    capacity_bytes: int | None,
    direct: bool = True,
    *,
    overwrite: bool = False,
) -> FileDisk:
    """Open the disk at `path`: a directory, in which the file `cold.log` gets `capacity_bytes` set aside, or a block
    device, as a whole or its first `capacity_bytes`. An existing file may grow, not shrink.

    `direct=False` goes through the page cache, for file systems without direct I/O, with a warning in the log.
    `overwrite` takes a file or device that holds something else than a log of this kind. May take seconds: call it in
    a thread. Raises `ConfigError`, which says what to do, when the disk cannot be used, another peer has it, or there
    is too little space.
    """
    return FileDisk(open_place(path, capacity_bytes, direct=direct, overwrite=overwrite))


class FileDisk:
    """`Disk` on what `open_place` opened. A cancelled request waits until no thread uses its memory any more."""

    def __init__(self, place: OpenPlace) -> None:
        self.path = place.path
        self.size_bytes = place.size_bytes
        self._descriptor = place.descriptor
        self._closed = False
        self._spare_pages: deque[memoryview] = deque(maxlen=MAX_SPARE_PAGES)
        """For headers: fresh memory takes the kernel as long as the rest of a small write."""
        self._failed_syncs = 0
        self._told_of_failed_syncs = 0
        self._write_gate = WriteGate()
        self.misplaced = ""
        self._inspecting = trio.CapacityLimiter(1)
        self._threads = IoThreads("p2pstore-ssd", READ_THREADS, WRITE_THREADS, place.close)
        self._small_reads = _kernel_aio(place)

    async def read_into(
        self, position: int, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        refuse_closed(self._closed)
        length = checked_bytes(position, buffers, self.size_bytes, fast_address, reading=True)
        if not length:
            await trio.lowlevel.checkpoint()
            if check is not None:
                check()
            return
        self._write_gate.read()
        if self._small_reads and await self._small_reads.read(position, buffers, length):
            if check is not None:
                check()
            return
        await self._threads.read(
            [
                partial(_transfer, os.preadv, self._descriptor, at, parts)
                for at, parts in cut(position, buffers, READ_PIECE_BYTES)
            ],
            check,
        )

    async def write_from(self, position: int, buffers: Sequence[memoryview | bytes]) -> None:
        refuse_closed(self._closed)
        if not checked_bytes(position, buffers, self.size_bytes, fast_address, reading=False):
            await trio.lowlevel.checkpoint()
            return
        piece_bytes = (
            WRITE_PIECE_BESIDE_READS_BYTES if self._write_gate.is_reading else WRITE_PIECE_BYTES
        )
        await self._threads.write(
            [partial(self._write, at, parts) for at, parts in cut(position, buffers, piece_bytes)]
        )

    def _write(self, position: int, parts: list[memoryview]) -> None:
        with self._write_gate.writing():
            if any(isinstance(part.obj, bytes) for part in parts):
                _write_copied(self._spare_pages, self._descriptor, position, parts)
            else:
                _transfer(os.pwritev, self._descriptor, position, parts)

    async def sync(self) -> None:
        refuse_closed(self._closed)
        told = self._told_of_failed_syncs
        try:
            await self._threads.sync(self._sync_now)
        except OSError:
            self._told_of_failed_syncs = self._failed_syncs
            raise
        if self._failed_syncs != told:
            self._told_of_failed_syncs = self._failed_syncs
            raise OSError(errno.EIO, f"a sync of {self.path} failed beside or before this one")

    def _sync_now(self) -> None:
        """The kernel reports an error once; counting it here keeps it for the next caller after a cancelled one."""
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self._failed_syncs += 1
            raise
        self._inspect_now()  # a durable put must be found by the next start

    @property
    def waits(self) -> Waits:
        begun, ended = self._threads.oldest_begin, self._threads.last_end
        if self._small_reads:
            begun = min(begun, self._small_reads.oldest_begin)
            ended = max(ended, self._small_reads.last_end)
        if begun == inf:
            return Waits()
        now = time.monotonic()
        return Waits(now - begun, now - max(begun, ended))

    async def inspect(self) -> None:
        """In a thread: a path may hang."""
        await trio.to_thread.run_sync(
            self._inspect_now, abandon_on_cancel=True, limiter=self._inspecting
        )

    def _inspect_now(self) -> None:
        with suppress(OSError):  # closed meanwhile
            self.misplaced = why_misplaced(self.path, self._descriptor, self.size_bytes)

    def close(self) -> None:
        """Waits at most a second for work under way: until that has ended the file stays open,
        and locked."""
        self._closed = True
        self._write_gate.open_for_good()
        if self._small_reads:
            self._small_reads.close()
        self._threads.close()

    def abandon(self) -> None:
        """`close`, for a disk that does not answer: pending calls raise `StoreClosed` or `Cancelled` now. The disk may
        still read and write their memory, which must not be reused."""
        self._closed = True
        if self._small_reads:
            self._small_reads.abandon()
        self._threads.abandon()


def _kernel_aio(place: OpenPlace) -> KernelAio | None:
    """None: small reads go through threads as well, which takes more CPU time."""
    if not place.direct:  # the page cache answers at once, or blocks the caller
        return None
    try:
        return KernelAio(place.descriptor)
    except OSError as error:
        logger.warning(
            "small reads of %s take more CPU time: the kernel gives no asynchronous I/O (%s); see fs.aio-max-nr",
            place.path,
            error.strerror,
            extra={"event": "ssd_no_aio", "path": str(place.path)},
        )
        return None


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    position: int,
    parts: list[memoryview],
) -> None:
    """`os.preadv` or `os.pwritev`, again and again until all is done. In a thread."""
    while parts:
        done = call(descriptor, parts, position)
        if len(parts) == 1 and done == len(parts[0]):  # most of the time
            return
        if done <= 0 or done % SECTOR_BYTES:
            raise OSError(errno.EIO, f"short: the disk ends at {position + done}")
        position += done
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if done:
            parts[0] = parts[0][done:]


def _write_copied(
    spare_pages: deque[memoryview], descriptor: int, position: int, parts: list[memoryview]
) -> None:
    """Write what was given as `bytes`, which lie at any address, and what lies between them. In a thread."""
    pages: list[memoryview] = []
    for number, part in enumerate(parts):
        if isinstance(part.obj, bytes):
            try:
                copy = spare_pages.pop() if len(part) == ALIGNMENT_BYTES else aligned_buffer(len(part))
            except IndexError:
                copy = aligned_buffer(ALIGNMENT_BYTES)
            copy[:] = part
            parts[number] = copy
            if len(copy) == ALIGNMENT_BYTES:
                pages.append(copy)
    _transfer(os.pwritev, descriptor, position, parts)
    spare_pages.extend(pages)
