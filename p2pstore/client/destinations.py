"""Where fetched bytes go when the caller did not bring a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pstore.client.values import (
    destination_view,
    empty_tensor,
    fresh_bytes,
)
from p2pstore.errors import P2PStoreError
from p2pstore.results import Framework
from p2pstore.transfer.layout import Slot, TrailerBody


class BytesDestination:
    """A new `bytes` object, `value()` once it is filled."""

    def __init__(self) -> None:
        self.value: Callable[[], bytes] = bytes

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        view, self.value = fresh_bytes(slot.length)
        return view


class TensorDestination:
    """A new tensor of the dtype and shape that were stored."""

    def __init__(self, framework: Framework | None) -> None:
        self.tensor: Any = None
        self._framework = framework

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        if not trailer.dtype:
            raise P2PStoreError(
                f"{trailer.key!r} is not a tensor: it was put as plain bytes; use get or get_into"
            )
        shape = tuple(trailer.shape)
        self.tensor = empty_tensor(trailer.dtype, shape, slot.length, self._framework)
        return destination_view(self.tensor)
