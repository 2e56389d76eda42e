"""The interface of disks to the tier, and the rules that all disks keep: alignment, bounds, pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from p2pstore.errors import StoreClosed

ALIGNMENT_BYTES: Final = 4096
"""Positions, lengths and addresses in memory are multiples of this: direct I/O wants it of every disk in use."""

SECTOR_BYTES: Final = 512
"""The unit that a disk writes whole or not at all."""

MAX_BUFFERS: Final = 1024
"""As many pieces of memory one system call takes (IOV_MAX)."""

Check: TypeAlias = Callable[[], object]

Piece: TypeAlias = tuple[int, list[memoryview]]
"""A position, and the memory for what lies from there on."""


class Waits(NamedTuple):
    """How long callers of a disk have waited: 0 when it has nothing to do."""

    longest_seconds: float = 0.0
    """Since what it has been doing for longest began. A queued request has not begun."""
    silent_seconds: float = 0.0
    """The same, or since anything ended, if that is less: a disk that is slow is not silent."""


class Disk(Protocol):
    """One address space of bytes. Requests run side by side, in any order; reads go before writes.

    All of them raise `ValueError` for what is not aligned or beyond the end, `StoreClosed` after `close`, and
    `OSError` when the disk failed. A failed or cancelled request may be done, done in part, or not at all; its
    memory is free to be reused when the exception is raised.
    """

    @property
    def size_bytes(self) -> int:
        """All positions are below it. A multiple of `ALIGNMENT_BYTES`."""

    async def read_into(
        self, position: int, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        """Fill all buffers, one after the other, with what lies from `position` on. `check` is called once they are
        full, in any thread, so that checking does not hold up the loop; its exceptions are raised here."""

    async def write_from(self, position: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write all buffers, one after the other, from `position` on: they keep still until this returns.

        `bytes` have no alignment in memory, so they are copied: for headers, not for values. Written
        data is read from now on, and survives a crash of the process; a crash of the machine only after `sync`.
        """

    async def sync(self) -> None:
        """Returns when every write that returned before this call began survives a crash of the machine. After
        an error it is unknown which of them do, for ever: a later `sync` says nothing about them, and one that
        was under way fails as well."""

    @property
    def waits(self) -> Waits:
        """How long it has been at what it does now."""

    @property
    def misplaced(self) -> str:
        """Why what is written now would be lost although no request fails, such as that the file was deleted; empty
        as far as the last `inspect` or `sync` knew."""

    async def inspect(self) -> None:
        """Look now whether it is `misplaced`. Raises nothing, not even when it is closed."""

    def close(self) -> None:
        """No more requests. Those that wait raise `StoreClosed`; those that began end as they would have."""


def memory_address(buffer: memoryview) -> int:
    """Where its bytes begin in memory; it must have some."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


def checked_bytes(
    position: int,
    buffers: Sequence[memoryview | bytes],
    size_bytes: int,
    address: Callable[[memoryview], int] = memory_address,
    *,
    reading: bool,
) -> int:
    """The length of a request to a disk of that size. Raises `ValueError`, as `Disk` says."""
    length = 0
    for buffer in buffers:
        own_length = len(buffer)
        if own_length % ALIGNMENT_BYTES:
            raise ValueError(f"{own_length} bytes are no multiple of {ALIGNMENT_BYTES}")
        length += own_length
        if isinstance(buffer, bytes):
            if reading:
                raise ValueError("bytes cannot be read into")
            continue
        if buffer.itemsize != 1 or not buffer.contiguous:
            raise ValueError("a buffer is contiguous memory, in bytes")
        if reading and buffer.readonly:
            raise ValueError("read-only memory cannot be read into")
        if own_length and address(buffer) % ALIGNMENT_BYTES:
            raise ValueError(f"a buffer's address is no multiple of {ALIGNMENT_BYTES}")
    if position % ALIGNMENT_BYTES:
        raise ValueError(f"position {position} is no multiple of {ALIGNMENT_BYTES}")
    if position < 0 or position + length > size_bytes:
        raise ValueError(f"{length} bytes at {position}: the disk has {size_bytes} bytes")
    return length


def refuse_closed(closed: bool) -> None:
    """Raises `StoreClosed` if so."""
    if closed:
        raise StoreClosed("the disk was closed")


def cut(position: int, buffers: Sequence[memoryview | bytes], piece_bytes: int) -> list[Piece]:
    """The same request as pieces of about `piece_bytes`, in order, all alike but for the last: at most half as long
    again, so that what is a page longer than one piece does not become two."""
    length = sum(map(len, buffers))
    count = max(1, round(length / piece_bytes))
    piece_bytes = -(-length // (count * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    if count == 1 and len(buffers) <= MAX_BUFFERS:  # most requests
        return [(position, [memoryview(buffer) for buffer in buffers if buffer])]
    pieces: list[Piece] = []
    room = 0
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            if room == 0 or len(pieces[-1][1]) == MAX_BUFFERS:
                pieces.append((position, []))
                room = piece_bytes
            part = rest[:room]
            pieces[-1][1].append(part)
            rest = rest[len(part) :]
            position += len(part)
            room -= len(part)
    return pieces
