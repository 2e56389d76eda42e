"""Memory that a program puts from and gets into again and again."""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType
from typing import Final, Self

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: have the kernel provide pages for writing, without changing what is in them."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RegisteredBuffer:
    """A buffer that a store was told of: `store.register(buffer)`. Usable wherever a buffer is.

    What registering does today: the buffer was checked once (writable, contiguous, in this host's
    memory), so that puts and gets with it need not look again; its pages are provided, so that the
    first get into it does not wait for the kernel; and while it is registered it can be neither
    resized nor freed. Network cards are not told of it yet: transports that need that will do it
    here, and callers will not have to change anything.

    `view` is all of it, as writable bytes; a slice (`registered[start:stop]`) is such a view of a
    part. Close it, or use it as a context manager, or close the store: then it can be resized
    again, once views of it are gone too.
    """

    __slots__ = ("__weakref__", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        _provide_pages(view)

    @property
    def view(self) -> memoryview:
        """The registered bytes. Raises `ValueError` after `close`."""
        if self._view is None:
            raise ValueError("the registered buffer was closed: register it again")
        return self._view

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> memoryview:
        """A view of a part; `part` counts bytes. Raises `TypeError` for anything but a slice."""
        if not isinstance(part, slice):
            raise TypeError(
                "a registered buffer is cut into parts by slices: registered[start:stop]"
            )
        return self.view[part]

    def close(self) -> None:
        """Let go of the buffer; may be called twice."""
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _provide_pages(view: memoryview) -> None:
    """Fault in every page of the buffer. Releases the interpreter lock. An older kernel, or one that has
    no more memory, does not do it: then pages come when they are first touched, as always."""
    if not view.nbytes:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + view.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.madvise(start, end - start, _MADV_POPULATE_WRITE)
