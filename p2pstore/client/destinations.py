"""Where fetched bytes go when the caller did not bring a buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from p2pstore.errors import P2PStoreError
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.results import Framework
from p2pstore.values import (
    destination_view,
    empty_tensor,
    fresh_bytes,
)


class BytesDestination:
    """A new `bytes` object, `value()` once it is filled."""

    def __init__(self) -> None:
        self.value: Callable[[], bytes] = bytes
        self._view: memoryview | None = None

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        return self.make(slot.length)

    def make(self, length: int) -> memoryview:
        """Memory for a value of that length, made once for it."""
        if self._view is None or len(self._view) != length:
            self._view, self.value = fresh_bytes(length)
        return self._view

    def take(self, value: memoryview) -> None:
        """Copy a verified value that came elsewhere."""
        self.value = partial(_same, bytes(value))


class NewMemoryDestination:
    """Memory that `allocate(length)` makes; `view` is of its bytes once it is filled."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self.view = memoryview(b"")
        self._allocate = allocate
        self._made = False

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        return self.make(slot.length)

    def make(self, length: int) -> memoryview:
        """Memory for a value of that length, made once for it."""
        if not self._made or len(self.view) != length:
            self.view = self._allocate(length)
            self._made = True
        return self.view

    def take(self, value: memoryview) -> None:
        """Copy a verified value that came elsewhere."""
        self.view = self._allocate(len(value))
        self.view[:] = value


class TensorDestination:
    """A new tensor of the dtype and shape that were stored."""

    def __init__(self, framework: Framework | None) -> None:
        self.tensor: Any = None
        self._framework = framework
        self._kind: tuple[str, tuple[int, ...], int] | None = None

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        if not trailer.dtype:
            raise P2PStoreError(
                f"{trailer.key!r} is not a tensor: it was put as plain bytes; use get or get_into"
            )
        kind = trailer.dtype, tuple(trailer.shape), slot.length
        if kind != self._kind:
            self.tensor, self._kind = empty_tensor(*kind, self._framework), kind
        return destination_view(self.tensor)


def _same(value: bytes) -> bytes:
    return value
