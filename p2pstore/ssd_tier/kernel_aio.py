"""Small reads without a thread: Linux's asynchronous I/O (io_submit), as far as it never waits.

A thread that wakes up for each read costs several times what the read costs, and all of them want the interpreter
lock. So small reads are handed to the kernel by the loop itself, with RWF_NOWAIT: what cannot begin at once, or
fails, is left to the threads. The kernel tells of those that ended through an eventfd that the loop watches.
(io_uring does the same with fewer system calls; most containers forbid it.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import Final, NoReturn

import trio

from p2pstore.objects import KIB
from p2pstore.ssd_tier.aligned_memory import fast_address

MAX_READS: Final = 128
"""Under way at a time."""
MAX_READ_BYTES: Final = 256 * KIB
"""Submitting a larger read would take the loop longer than waking a thread."""
USUAL_COMMAND_BYTES: Final = 128 * KIB
"""Bytes that almost every device reads in one command."""
MAX_BUFFERS: Final = 4

_NUMBERS: Final = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""System calls io_setup, io_destroy, io_submit, io_getevents."""

_REQUEST: Final = struct.Struct("<QIIHhIQQqQII")
"""struct iocb: what the event returns, 0, flags of the read, operation, priority, file, iovecs, how many, position,
0, IOCB_FLAG_RESFD, eventfd."""
_EVENT: Final = struct.Struct("<QQqq")
"""struct io_event: what the request said, its address, the result, 0."""
_IOVEC: Final = struct.Struct("<QQ")
_PREADV: Final = 7
_RWF_NOWAIT: Final = 8
_IOCB_FLAG_RESFD: Final = 1

# Without giving up the interpreter lock, for calls that wait for nothing; and giving it up.
_syscall: Final = ctypes.PyDLL(None, use_errno=True).syscall
_waiting_syscall: Final = ctypes.CDLL(None, use_errno=True).syscall
for _call in (_syscall, _waiting_syscall):
    _call.restype = ctypes.c_long
    _call.argtypes = [ctypes.c_long] * 6


class _Read:
    """One read under way, and who waits for it."""

    __slots__ = ("abandoned", "begun", "buffers", "raise_cancel", "result", "task")

    def __init__(self, buffers: Sequence[memoryview], task: trio.lowlevel.Task) -> None:
        self.buffers = buffers  # the kernel writes there: they live as long as this
        self.task = task
        self.begun = time.monotonic()
        self.abandoned = False
        self.result = 0
        self.raise_cancel: Callable[[], NoReturn] | None = None

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """The kernel does not call reads off: they are waited for."""
        self.raise_cancel = raise_cancel
        return trio.lowlevel.Abort.FAILED


class KernelAio:
    """Reads of one file, for one trio run at a time. Raises `OSError` where the kernel has no such thing to give."""

    def __init__(self, descriptor: int) -> None:
        if platform.machine() not in _NUMBERS:
            raise OSError(errno.ENOSYS, f"unknown system calls of {platform.machine()}")
        self._setup, self._destroy, self._submit, self._get_events = _NUMBERS[platform.machine()]
        self._descriptor = descriptor
        self._largest = min(MAX_READ_BYTES, command_bytes(os.fstat(descriptor)))
        self._reads: dict[int, _Read] = {}
        """By number, which is that of their place in `_memory`."""
        self._free = list(range(MAX_READS))
        self._closed = False
        self._refused = False
        """Whether the kernel cannot read this file so."""
        self._reaped_in: trio.lowlevel.TrioToken | None = None
        self.last_end = 0.0
        """When a read ended, at last (`time.monotonic`)."""
        self._lay_out_memory()
        context = ctypes.c_ulong(0)
        _check(_syscall(self._setup, MAX_READS, ctypes.addressof(context), 0, 0, 0))
        self._context = context.value
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _lay_out_memory(self) -> None:
        """Requests, pointers to each of them, their iovecs, and room for events."""
        sizes = (_REQUEST.size, 8, MAX_BUFFERS * _IOVEC.size, _EVENT.size)
        self._memory = mmap.mmap(-1, MAX_READS * sum(sizes))
        view = memoryview(self._memory)
        base, starts = fast_address(view), [0]
        for size in sizes:
            starts.append(starts[-1] + MAX_READS * size)
        self._requests, self._pointers, self._iovecs, self._events = (
            view[start:end] for start, end in pairwise(starts)
        )
        self._pointers_address, self._iovecs_address, self._events_address = (
            base + start for start in starts[1:4]
        )
        for number in range(MAX_READS):
            struct.pack_into("<Q", self._pointers, number * 8, base + number * _REQUEST.size)

    @trio.lowlevel.enable_ki_protection
    async def read(self, position: int, buffers: Sequence[memoryview], length: int) -> bool:
        """Whether all of the buffers, of this length together, were filled. If not, nothing is known of why, or of
        what is in them: they are to be read in another way."""
        if length > self._largest or len(buffers) > MAX_BUFFERS or self._refused:
            return False
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed or not self._free:
            return False
        self._begin_reaping()
        number = self._free.pop()
        self._describe(number, position, buffers)
        pointer = self._pointers_address + number * 8
        if _syscall(self._submit, self._context, 1, pointer, 0, 0) != 1:
            self._refused = ctypes.get_errno() != errno.EAGAIN
            self._free.append(number)
            return False
        read = self._reads[number] = _Read(buffers, trio.lowlevel.current_task())
        await trio.lowlevel.wait_task_rescheduled(read.abort)
        if read.raise_cancel is not None:
            read.raise_cancel()
        return read.result == length

    def _describe(self, number: int, position: int, buffers: Sequence[memoryview]) -> None:
        start = number * MAX_BUFFERS * _IOVEC.size
        at = start
        for buffer in buffers:
            _IOVEC.pack_into(self._iovecs, at, fast_address(buffer), len(buffer))
            at += _IOVEC.size
        _REQUEST.pack_into(
            self._requests,
            number * _REQUEST.size,
            number,
            0,
            _RWF_NOWAIT,
            _PREADV,
            0,
            self._descriptor,
            self._iovecs_address + start,
            len(buffers),
            position,
            0,
            _IOCB_FLAG_RESFD,
            self._eventfd,
        )

    def _begin_reaping(self) -> None:
        token = trio.lowlevel.current_trio_token()
        if token is not self._reaped_in:
            self._reaped_in = token
            trio.lowlevel.spawn_system_task(self._reap)

    async def _reap(self) -> None:
        """Wake those whose reads have ended: as long as this trio run lasts, or until the last one after `close`."""
        try:
            while self._reads or not self._closed:
                await trio.lowlevel.wait_readable(self._eventfd)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._eventfd)
                self._wake_readers()
        finally:
            self._reaped_in = None
            if self._closed:
                self._give_back()

    def _wake_readers(self) -> None:
        ended = _syscall(self._get_events, self._context, 0, MAX_READS, self._events_address, 0)
        _check(ended)
        if ended:
            self.last_end = time.monotonic()
        for number, _, result, _ in _EVENT.iter_unpack(self._events[: ended * _EVENT.size]):
            read = self._reads.pop(number)
            self._free.append(number)
            if not read.abandoned:
                read.result = result
                trio.lowlevel.reschedule(read.task)

    @property
    def oldest_begin(self) -> float:
        """When the read began that has been under way for longest (`time.monotonic`); infinite when there is none."""
        return next((read.begun for read in self._reads.values()), inf)

    def abandon(self) -> None:
        """`close`, and end all pending calls at once, as not read or cancelled. The kernel may still write to their
        memory, which must not be reused."""
        self.close()
        for read in self._reads.values():
            if not read.abandoned:
                read.abandoned = True
                trio.lowlevel.reschedule(read.task)

    def close(self) -> None:
        """No more reads. Those under way end as they would have."""
        if self._closed:
            return
        self._closed = True
        if self._reaped_in is None:
            self._give_back()
        else:
            os.eventfd_write(self._eventfd, 1)

    def _give_back(self) -> None:
        os.close(self._eventfd)
        # The kernel takes tens of milliseconds for it, and a loop has no time for that.
        arguments = (self._destroy, self._context, 0, 0, 0, 0)
        threading.Thread(target=_waiting_syscall, args=arguments, daemon=True).start()


def command_bytes(status: os.stat_result, devices: str = "/sys/dev/block") -> int:
    """How much the device below a file, or a block device, reads in one command. A longer read would have to be
    split, which the kernel does not do without waiting."""
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    device = f"{devices}/{os.major(number)}:{os.minor(number)}"
    for queue in ("queue", "../queue"):  # of a partition it is that of its disk
        with suppress(OSError, ValueError), open(f"{device}/{queue}/max_sectors_kb") as file:
            return int(file.read()) * KIB
    return USUAL_COMMAND_BYTES  # several devices below one file system, or hidden from this container


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
