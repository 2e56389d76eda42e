"""Destinations of fetched bytes: new memory of each kind, and those of a batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from p2pstore.client.answers import plain_error
from p2pstore.client.fetcher import Fetcher
from p2pstore.errors import P2PStoreError
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.results import Framework
from p2pstore.transfer.reading.arriving import Destination
from p2pstore.transfer.transport import BufferDestination, too_small
from p2pstore.values import destination_view, empty_tensor, fresh_bytes

R = TypeVar("R")
D = TypeVar("D", bound="NewMemory")

COPIED_BYTES: Final = 16 * KIB
"""Values up to this length are received together and copied to memory of their own: that costs less than a request
each."""
MAX_COPIED: Final = 1024

DigestsOf = Callable[[Sequence[str]], list[bytes]]
ViewsOf = Callable[[Sequence[Any]], Sequence[R]]


class NewMemory(ABC):
    """A destination that makes its memory when it is told how long the value is."""

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        return self.make(slot.length)

    @abstractmethod
    def make(self, length: int) -> memoryview:
        """Memory for a value of that length, made once for it."""

    @abstractmethod
    def take(self, value: memoryview) -> None:
        """Copy a verified value that was read elsewhere."""


class BytesDestination(NewMemory):
    """A new `bytes` object, `value()` once it is filled."""

    def __init__(self) -> None:
        self.value: Callable[[], bytes] = bytes
        self._view: memoryview | None = None

    def make(self, length: int) -> memoryview:
        if self._view is None or len(self._view) != length:
            self._view, self.value = fresh_bytes(length)
        return self._view

    def take(self, value: memoryview) -> None:
        self.value = partial(_same, bytes(value))


class NewMemoryDestination(NewMemory):
    """Memory that `allocate(length)` makes; `view` is of its bytes once it is filled."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self.view = memoryview(b"")
        self._allocate = allocate
        self._made = False

    def make(self, length: int) -> memoryview:
        if not self._made or len(self.view) != length:
            self.view = self._allocate(length)
            self._made = True
        return self.view

    def take(self, value: memoryview) -> None:
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


class SmallDestinations(NamedTuple):
    """Items that may be asked for by GET_SMALL, and room for each, none empty and none of more than `most_bytes`."""

    numbers: Sequence[int]
    views: Sequence[memoryview]
    most_bytes: int


class BatchDestinations(ABC, Generic[R]):
    """The keys of a batch, and a room for the value of each; items are known by their numbers. `rooms_of` makes rooms
    of `places`; None: these are rooms. Both raise `ValueError` or `TypeError` for no place, or no key."""

    def __init__(
        self,
        keys: Sequence[str],
        digests_of: DigestsOf,
        places: Sequence[Any],
        rooms_of: ViewsOf[R] | None = None,
    ) -> None:
        if len(places) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(places)} places for their values")
        self.keys = keys
        self._digests_of_keys = digests_of
        self._places = places
        self._rooms_in_places = rooms_of
        self.digests: list[bytes] = []
        self._rooms: list[R] = []
        """A wrong item has something in its place."""

    def prepare(self) -> dict[int, P2PStoreError | ValueError]:
        """Look at the items: the errors of the wrong ones."""
        errors: dict[int, P2PStoreError | ValueError] = {}
        try:
            self._take_up(self.keys, self._places)
        except (P2PStoreError, ValueError, TypeError):
            for key, place in zip(self.keys, self._places, strict=True):
                try:
                    self._take_up([key], [place])
                except (P2PStoreError, ValueError, TypeError) as error:
                    errors[len(self.digests)] = plain_error(error)
                    self.digests.append(b"")
                    self._rooms.append(place)
        return errors

    def _take_up(self, keys: Sequence[str], places: Sequence[Any]) -> None:
        digests = self._digests_of_keys(keys)
        self._rooms += places if self._rooms_in_places is None else self._rooms_in_places(places)
        self.digests += digests

    def digests_of(self, numbers: Sequence[int]) -> list[bytes]:
        """Of items in order."""
        if len(numbers) == len(self.digests):
            return self.digests
        return list(map(self.digests.__getitem__, numbers))

    def rooms_at(self, numbers: Sequence[int]) -> list[R]:
        """Of items in order."""
        if len(numbers) == len(self._rooms):
            return self._rooms
        return list(map(self._rooms.__getitem__, numbers))

    @abstractmethod
    async def fetch_one(self, fetcher: Fetcher, number: int) -> int:
        """Read one item as if there were no batch: its length."""

    @abstractmethod
    def destination(self, number: int) -> Destination:
        """The room as transports fill it."""

    @abstractmethod
    def room_for(self, number: int, length: int) -> memoryview:
        """The room for a value of that length, as bytes. Raises `ValueError` or `P2PStoreError` where there is none."""

    def most_bytes(self, numbers: Sequence[int]) -> float:
        """No value of these that is longer than that is wanted."""
        return math.inf

    @abstractmethod
    def small(self, numbers: Sequence[int], fetcher: Fetcher) -> SmallDestinations:
        """The items among these that may be asked for by GET_SMALL, and room for each of them."""

    def filled(self, small: SmallDestinations, lengths: Sequence[int]) -> None:
        """Small rooms have got their values, of these lengths; -1 for none."""


class BufferDestinations(BatchDestinations[memoryview]):
    """The rooms are the callers' buffers."""

    async def fetch_one(self, fetcher: Fetcher, number: int) -> int:
        return await fetcher.fetch_into(self.keys[number], self.digests[number], self._rooms[number])

    def destination(self, number: int) -> Destination:
        return BufferDestination(self._rooms[number])

    def room_for(self, number: int, length: int) -> memoryview:
        room = self._rooms[number]
        if length > len(room):
            raise too_small(length, room)
        return room

    def most_bytes(self, numbers: Sequence[int]) -> float:
        return max(map(len, self.rooms_at(numbers)))

    def small(self, numbers: Sequence[int], fetcher: Fetcher) -> SmallDestinations:
        views = self.rooms_at(numbers)
        sizes = list(map(len, views))
        most_bytes = max(sizes, default=0)
        if most_bytes <= CHUNK_BYTES and min(sizes, default=0) > 0:
            return SmallDestinations(numbers, views, most_bytes)
        small = [number for number, size in zip(numbers, sizes, strict=True) if 0 < size <= CHUNK_BYTES]
        views = self.rooms_at(small)
        return SmallDestinations(small, views, max(map(len, views), default=0))


class NewMemoryDestinations(BatchDestinations[D]):
    """The rooms are made when it is known how long the values are."""

    async def fetch_one(self, fetcher: Fetcher, number: int) -> int:
        return await fetcher.fetch_new(self.keys[number], self.digests[number], self._rooms[number])

    def destination(self, number: int) -> Destination:
        return self._rooms[number]

    def room_for(self, number: int, length: int) -> memoryview:
        return self._rooms[number].make(length)

    def small(self, numbers: Sequence[int], fetcher: Fetcher) -> SmallDestinations:
        """Where the first one is small, all of them are likely to be: in memory that they share."""
        if not 0 < fetcher.holders.known.expected_bytes(self.digests[numbers[0]]) <= COPIED_BYTES:
            return SmallDestinations((), (), 0)
        small = numbers[:MAX_COPIED]
        shared = np.empty(len(small) * COPIED_BYTES, np.uint8).data
        starts = range(0, len(shared), COPIED_BYTES)
        views = [shared[start : start + COPIED_BYTES] for start in starts]
        return SmallDestinations(small, views, COPIED_BYTES)

    def filled(self, small: SmallDestinations, lengths: Sequence[int]) -> None:
        for number, view, length in zip(small.numbers, small.views, lengths, strict=False):
            if length >= 0:
                self._rooms[number].take(view[:length])
