"""Values between files, pipes and memory, copied as few times as the kind of file allows."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mooncake_p2p.exit_errors import CommandFailed, ExitCode
from mooncake_p2p.output import progress
from p2pstore.objects import MAX_OBJECT_BYTES, MIB, check_object_length
from p2pstore.runtime.linux import is_ready

PIECE_BYTES: Final = MIB

SMALL_PAGES_BYTES: Final = 2 * MIB

Advance = Callable[[int], None]
"""Says that so many more bytes are done."""


@contextmanager
def open_source(path: str | None) -> Iterator[int]:
    """A descriptor to read the value from; `None` and `-` mean standard input."""
    if path is None or path == "-":
        if sys.stdin is None:
            raise CommandFailed("standard input is closed; name a file", ExitCode.USAGE)
        if sys.stdin.isatty():
            raise CommandFailed(
                "standard input is a terminal; name a file or pipe the value in", ExitCode.USAGE
            )
        yield sys.stdin.fileno()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise CommandFailed(f"{path}: is a directory; put its files one by one")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def value_of(descriptor: int) -> Iterator[memoryview]:
    """All bytes from the descriptor's position to its end.

    A regular file is mapped, not read. Anything else has no length to reserve memory for, so it is
    first spooled to a temporary file. Raises `ObjectTooLarge` above 4 GiB. When somebody shortens
    the file meanwhile, the process ends (SIGBUS) and nothing is stored.
    """
    status = os.fstat(descriptor)
    # Files of /proc and the like say 0 and have content.
    if stat.S_ISREG(status.st_mode) and status.st_size:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        with mapped(descriptor, status.st_size, mmap.PROT_READ) as view:
            check_object_length(len(view) - start)
            yield view[start:]
        return
    with tempfile.TemporaryFile(prefix="mooncake-p2p-") as spool:
        with progress("reading") as bar:
            length = _spool(descriptor, spool.fileno(), bar.advance)
        with mapped(spool.fileno(), length, mmap.PROT_READ) as view:
            yield view


def _spool(source: int, spool: int, advance: Advance) -> int:
    length = 0
    while piece := _read(source):
        length += len(piece)
        if length > MAX_OBJECT_BYTES:
            check_object_length(length)
        try:
            write_all(spool, memoryview(piece))
        except OSError as error:
            raise CommandFailed(
                f"standard input does not fit into {tempfile.gettempdir()} ({error.strerror}): "
                "set TMPDIR to a place with room, or put a file"
            ) from error
        advance(len(piece))
    return length


def _read(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, PIECE_BYTES)
        except BlockingIOError:  # a pipe that its other users made non-blocking
            is_ready(descriptor, None)


def memory_for(length: int) -> memoryview:
    """`length` bytes of new memory, of which only what is written to costs anything. Behind the first
    2 MiB in large pages where the kernel has them: a quarter of the time of filling small ones.
    Freed with the last view."""
    if not length:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length > SMALL_PAGES_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES_BYTES)
    return memoryview(memory)


@contextmanager
def mapped(descriptor: int, length: int, protection: int) -> Iterator[memoryview]:
    """`length` bytes of a file as memory, let go at the end."""
    if not length:
        yield memoryview(bytearray())
        return
    mapping = mmap.mmap(descriptor, length, prot=protection)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # An error's traceback may still hold slices of the view; the map then goes with them.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()


def write_all(descriptor: int, view: memoryview, advance: Advance = lambda count: None) -> None:
    """Write everything, in pieces, also to pipes that are not in blocking mode."""
    position = 0
    while position < len(view):
        try:
            count = os.write(descriptor, view[position : position + PIECE_BYTES])
        except BlockingIOError:
            is_ready(descriptor, None, to_write=True)
            continue
        position += count
        advance(count)


def is_stream(path: str) -> bool:
    """Whether a path must be written to as it is: it exists and is no regular file or directory."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def standard_output(*, binary_to_terminal: bool) -> int:
    """The descriptor of stdout. Raises `CommandFailed` when binary must not go there."""
    if sys.stdout.isatty() and not binary_to_terminal:
        raise CommandFailed(
            "stdout is a terminal and the value may be binary; use -o FILE, or -o - to see it",
            ExitCode.USAGE,
        )
    return sys.stdout.fileno()
