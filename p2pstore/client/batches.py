"""Getting many objects: what is here from the mapping, the rest in one batch per holder."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from p2pstore.client.answers import plain_error
from p2pstore.client.fetcher import Fetcher
from p2pstore.client.known_holders import DRAM, is_far, remote_copy
from p2pstore.errors import P2PStoreError, StoreClosed
from p2pstore.local.local_messages import PlanItem
from p2pstore.objects import CHUNK_BYTES, KIB, SIZE_UNIT_BYTES, Version
from p2pstore.transfer.failover import SilentHolders, is_silence
from p2pstore.transfer.reading.arriving import Announced, announcing, too_small
from p2pstore.transfer.reading.small_reads import (
    PARTS_TOGETHER,
    Part,
    in_parts,
    part_items,
    part_slices,
)
from p2pstore.transfer.transport import (
    SLICED_BYTES,
    BufferDestination,
    Destination,
    Pulled,
    PullFailed,
    RemoteCopy,
)
from p2pstore.values import destination_views

R = TypeVar("R")

BROUGHT_AHEAD: Final = 8
COPIED_BYTES: Final = 16 * KIB
"""Values up to this are received together and copied to memory of their own: that is less than each takes apart."""
MOST_COPIED: Final = 1024

Outcome = int | P2PStoreError | ValueError
"""The length, or why there is none."""
_UNDER_WAY: Final = -1
_NO_ROOM: Final = memoryview(b"")


class _SmallRooms(NamedTuple):
    """Items that may be asked for by GET_SMALL, and room for each, none empty and none of more than `most_bytes`."""

    numbers: Sequence[int]
    views: Sequence[memoryview]
    most_bytes: int


class NewMemory(Destination, Protocol):
    """A destination that makes its memory when it is told how long the value is."""

    def make(self, length: int) -> memoryview:
        """Memory for a value of that length, made once for it."""
        ...

    def take(self, value: memoryview) -> None:
        """Copy a verified value that came elsewhere."""
        ...


D = TypeVar("D", bound=NewMemory)


DigestsOf = Callable[[Sequence[str]], list[bytes]]
"""The digests of many keys. Raises `ValueError` or `TypeError` for one that is no key."""
RoomsOf = Callable[[Sequence[Any]], Sequence[R]]
"""The rooms in many places. Raises `ValueError` or `TypeError` for a place that is none."""


async def fetch_many(
    fetcher: Fetcher,
    keys: Sequence[str],
    buffers: Sequence[Any],
    digests_of: DigestsOf,
    *,
    are_views: bool = False,
) -> list[Outcome]:
    """Write each key's value to the beginning of its buffer; per item the length, or the error. `are_views`: the
    buffers are writable views of bytes."""
    rooms_of = None if are_views else destination_views
    return await _IntoBuffers(fetcher, keys, digests_of, buffers, rooms_of).fetch()


async def fetch_many_new(
    fetcher: Fetcher, keys: Sequence[str], destinations: Sequence[D], digests_of: DigestsOf
) -> list[Outcome]:
    """`fetch_many` to new memory."""
    return await _IntoNewMemory[D](fetcher, keys, digests_of, destinations, None).fetch()


class _Batch(ABC, Generic[R]):
    """Many reads at once, each to a room of its own. Each step settles some of the items, which are known by their
    numbers. `rooms_of` None: the places are rooms."""

    def __init__(
        self,
        fetcher: Fetcher,
        keys: Sequence[str],
        digests_of: DigestsOf,
        places: Sequence[Any],
        rooms_of: RoomsOf[R] | None,
    ) -> None:
        if len(places) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(places)} places for their values")
        self.outcomes: list[Outcome] = [_UNDER_WAY] * len(keys)
        self._fetcher = fetcher
        self._keys = keys
        self._digests_of_keys = digests_of
        self._places = places
        self._rooms_in_places = rooms_of
        self._digests: list[bytes] = []
        self._rooms: list[R] = []
        """Of the items that were looked at. What was asked for wrongly has none, but something in its place."""
        self._wanted: dict[int, None] = {}
        """The items that were looked at and are not settled, in order."""
        self._plans: dict[int, PlanItem] = {}
        self._silent = SilentHolders()
        self._hot: set[int] = set()
        """Items that the local peer is to bring and keep."""
        self._here: list[int] | None = None
        """Items that the local peer seems to have; None until that was looked up."""
        self._only: list[RemoteCopy | None] = [None] * len(keys)
        """The one other peer that is known to hold each of the rest, where there is just one."""

    async def fetch(self) -> list[Outcome]:
        """What became of each item."""
        if len(self._keys) == 1:
            await self._fetch_alone()
            return self.outcomes
        await self.pull_ahead()
        self._prepare(len(self._keys))
        if self._wanted:
            await self.read_here()
        if self._wanted:
            if self._here is None:
                self._look_up()
            await self.pull_from_only_holders()
        if self._wanted:
            await self.pull_as_planned()
            await self.fetch_the_rest()
        return self.outcomes

    async def _fetch_alone(self) -> None:
        """One object is got as if there were no batches, which take several times as long to begin and to end."""
        self._prepare(1)
        if not self._wanted:
            return
        try:
            length = await self._fetch_one(self._keys[0], self._digests[0], self._rooms[0])
        except StoreClosed:  # the local peer is gone: not this object's fault
            raise
        except (P2PStoreError, ValueError) as error:
            self._settle(0, plain_error(error))
        else:
            self._settle(0, length)

    @abstractmethod
    async def _fetch_one(self, key: str, digest: bytes, room: R) -> int:
        """`Fetcher.fetch`, whatever it takes: the length."""

    @abstractmethod
    def _destination(self, room: R) -> Destination:
        """The room as transports fill it."""

    @abstractmethod
    def _room_for(self, room: R, length: int) -> memoryview:
        """The room for a value of that length, as bytes. Raises `ValueError` or `P2PStoreError` where there is none."""

    def _small_rooms(self, numbers: Sequence[int]) -> _SmallRooms:
        """Which of these may be asked for by GET_SMALL, and room for each of them."""
        return _SmallRooms((), (), 0)

    def _filled(
        self, numbers: Sequence[int], views: Sequence[memoryview], lengths: Sequence[int]
    ) -> None:
        """Small rooms have got their values: so long, or -1."""

    def _prepare(self, stop: int) -> None:
        """Look at the items before number `stop`, and settle what was asked for wrongly."""
        start = len(self._digests)
        if start >= stop:
            return
        keys, places = self._keys[start:stop], self._places[start:stop]
        try:
            self._take_up(keys, places)
        except (P2PStoreError, ValueError, TypeError):
            for key, place in zip(keys, places, strict=True):
                try:
                    self._take_up([key], [place])
                except (P2PStoreError, ValueError, TypeError) as error:
                    self.outcomes[len(self._digests)] = plain_error(error)
                    self._digests.append(b"")
                    self._rooms.append(place)

    def _take_up(self, keys: Sequence[str], places: Sequence[Any]) -> None:
        digests = self._digests_of_keys(keys)
        rooms = places if self._rooms_in_places is None else self._rooms_in_places(places)
        start = len(self._digests)
        self._digests += digests
        self._rooms += rooms
        self._wanted.update(dict.fromkeys(range(start, start + len(digests))))

    def _digests_of(self, numbers: Sequence[int]) -> list[bytes]:
        """Of items in order."""
        if len(numbers) == len(self._digests):
            return self._digests
        return list(map(self._digests.__getitem__, numbers))

    def _rooms_of(self, numbers: Sequence[int]) -> list[R]:
        """Of items in order."""
        if len(numbers) == len(self._rooms):
            return self._rooms
        return list(map(self._rooms.__getitem__, numbers))

    async def pull_ahead(self) -> None:
        """Ask the likely holder of all for the first ones, and look up meanwhile what is where."""

    def _look_up(self, most_bytes: float = math.inf) -> None:
        """Find out what is here, and which of the rest one other peer alone is known to hold. No value that is longer
        than that is wanted."""
        wanted = list(self._wanted)
        digests = self._digests_of(wanted)
        copies = self._fetcher.only_holders(digests, most_bytes)
        if len(wanted) == len(self._only):
            self._only = copies
        else:
            for number, copy in zip(wanted, copies, strict=True):
                self._only[number] = copy
        self._here = [wanted[place] for place in self._fetcher.which_are_here(digests)]
        for number in self._here:
            self._only[number] = None

    def _is_only_holder_of_all(self, copy: RemoteCopy) -> bool:
        return self._only.count(copy) == len(self._only)

    async def read_here(self) -> None:
        """What the local peer holds."""
        numbers = list(self._wanted) if self._here is None else self._here
        lengths = await self._fetcher.copy_many_here(
            self._digests_of(numbers), partial(self._rooms_for, numbers)
        )
        self._settle_lengths(numbers, lengths)

    def _rooms_for(
        self, numbers: Sequence[int], places: Sequence[int], lengths: Sequence[int]
    ) -> list[memoryview]:
        """`RoomsFor` of a batch of items. One without room is settled, and has an empty one."""
        rooms: list[memoryview] = []
        for place, length in zip(places, lengths, strict=True):
            number = numbers[place]
            try:
                rooms.append(self._room_for(self._rooms[number], length))
            except (P2PStoreError, ValueError) as error:
                self._settle(number, plain_error(error))
                rooms.append(_NO_ROOM)
        return rooms

    async def pull_from_only_holders(self) -> None:
        """What one other peer alone is known to hold, without a plan."""
        copies = [self._only[number] for number in self._wanted]
        if copies and (first := copies[0]) is not None and copies.count(first) == len(copies):
            await self._pull_only(first, list(self._wanted))
            return
        batches: dict[int, tuple[RemoteCopy, list[int]]] = {}
        for number, copy in zip(self._wanted, copies, strict=True):
            if copy is not None:
                batches.setdefault(copy.member, (copy, []))[1].append(number)
        for copy, some in batches.values():
            await self._pull_only(copy, some)

    async def _pull_only(self, copy: RemoteCopy, numbers: Sequence[int]) -> None:
        if is_far(copy):
            await self._pull(copy, numbers)
        else:
            await self._copy_from_neighbour(copy, numbers)

    async def _copy_from_neighbour(
        self, copy: RemoteCopy, numbers: Sequence[int], versions: Sequence[Version] = ()
    ) -> None:
        """Those in the memory of a peer of this host, where that is mapped already."""
        lengths = await self._fetcher.copy_many_nearby(
            copy, self._digests_of(numbers), partial(self._rooms_for, numbers), versions
        )
        self._settle_lengths(numbers, lengths)

    async def pull_as_planned(self) -> None:
        """The rest by one plan for all, in a batch for each holder."""
        numbers = list(self._wanted)
        digests = self._digests_of(numbers)
        plans = await self._fetcher.plan(self._keys[numbers[0]], digests)
        self._plans = dict(zip(numbers, plans, strict=True))
        batches: dict[tuple[int, bool], list[int]] = {}
        for number, plan in self._plans.items():
            if number not in self._hot and (_is_nearby(plan) or _in_batches(plan)):
                which = plan.holders[0].member, len(plan.holders) > 1
                batches.setdefault(which, []).append(number)
        for some in batches.values():
            holder = self._plans[some[0]].holders[0]
            if self._silent.last([holder]):
                others = {
                    each.peer_id for number in some for each in self._plans[number].holders[1:]
                }
                if holder.same_host:
                    await self._copy_nearby_as_planned(remote_copy(holder), some, others)
                else:
                    await self._pull(remote_copy(holder), some, others)

    async def _copy_nearby_as_planned(
        self, copy: RemoteCopy, numbers: Sequence[int], others: Collection[bytes]
    ) -> None:
        """Those in the memory of a peer of this host, which is mapped for that."""
        failure = await self._fetcher.map_nearby(copy, others)
        if failure is None:
            versions = [version_of(self._plans[number]) for number in numbers]
            await self._copy_from_neighbour(copy, numbers, versions)
        elif is_silence(failure):
            self._silent.add(copy.member, hurried=bool(others))

    async def fetch_the_rest(self) -> None:
        """One by one, what did not come in a batch; what is large from all its holders. What is on the local peer's
        SSD, and what is hot, is brought ahead of that."""
        wanted = list(self._wanted)
        ahead = deque(
            self._digests[number]
            for number in wanted
            if number in self._hot or self._plans[number].on_ssd
        )
        await self._bring(ahead, 2 * BROUGHT_AHEAD)
        for place, number in enumerate(wanted, start=1):
            if place % BROUGHT_AHEAD == 0:
                await self._bring(ahead, BROUGHT_AHEAD)
            key = self._keys[number]
            plan, destination = self._plans[number], self._destination(self._rooms[number])
            try:
                done = await self._fetcher.fetch_planned(
                    key,
                    self._digests[number],
                    destination,
                    plan,
                    self._silent,
                    hot=number in self._hot,
                )
            except (P2PStoreError, ValueError) as error:
                self._fetcher.ended(error)
                self._settle(number, plain_error(error))
            else:
                self._settle(number, done.length)

    async def _bring(self, ahead: deque[bytes], count: int) -> None:
        """Have the local peer read the next ones from its SSD, side by side."""
        some = [ahead.popleft() for _ in range(min(count, len(ahead)))]
        await self._fetcher.prefetch(b"".join(some))

    async def _pull(
        self, copy: RemoteCopy, numbers: Sequence[int], others: Collection[bytes] = ()
    ) -> None:
        """Those of one holder. `others`: peers that hold each of them as well, or none."""
        small, views, most_bytes = self._small_rooms(numbers)
        if small:
            versions = [version_of(self._plans[number]) for number in small if self._plans]
            parts = in_parts(self._digests_of(small), views, most_bytes, versions)
            lengths, failure = await self._fetcher.pull_small(copy, parts, small, others)
            self._filled(small, views, lengths)
            self._settle_lengths(small, lengths)
            numbers = self._not_tried(numbers, small, copy, lengths, failure, others)
        await self._pull_many(copy, numbers, others)

    async def _pull_many(
        self, copy: RemoteCopy, numbers: Sequence[int], others: Collection[bytes] = ()
    ) -> None:
        if not numbers:
            return
        asked = [
            (
                self._digests[number],
                announcing(self._destination(self._rooms[number]), self._announced(number, copy)),
            )
            for number in numbers
        ]
        outcomes = await self._fetcher.pull_many(copy, asked, others)
        if any(is_silence(outcome) for outcome in outcomes):
            self._silent.add(copy.member, hurried=bool(others))
        for number, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, int):
                self._settle(number, outcome)
            elif isinstance(outcome, Pulled):
                self._settle(number, outcome.length)
            elif isinstance(outcome, PullFailed) and outcome.keep:
                self._hot.add(number)
            elif not isinstance(outcome, PullFailed):  # the buffer is too small, whoever fills it
                self._settle(number, plain_error(outcome))

    def _announced(self, number: int, copy: RemoteCopy) -> Announced | None:
        """What this holder may send of an item: what was planned, or else what it wrote."""
        plan = self._plans.get(number)
        if plan is None or copy.announced is None:
            return copy.announced
        return Announced(copy.announced.writer, version_of(plan))

    def _settle_lengths(self, numbers: Sequence[int], lengths: list[int]) -> None:
        """These items have got their values: so long, or -1."""
        if len(lengths) == len(self._wanted) == len(self.outcomes) and min(lengths) >= 0:
            self.outcomes[:] = lengths
            self._wanted.clear()
            return
        if lengths.count(-1) < len(lengths):
            for number, length in zip(numbers, lengths, strict=False):
                if length >= 0 and number in self._wanted:
                    self._settle(number, length)

    def _not_tried(
        self,
        numbers: Sequence[int],
        small: Sequence[int],
        copy: RemoteCopy,
        lengths: Sequence[int],
        failure: PullFailed | None,
        others: Collection[bytes] = (),
    ) -> Sequence[int]:
        """Which of the numbers are still to be asked for at the holder, after these were asked for as small ones."""
        if failure is None:
            return [number for number in numbers if number in self._wanted]
        if is_silence(failure):
            self._silent.add(copy.member, hurried=bool(others))
            return ()
        failed = set(small[len(lengths) :])
        return [number for number in numbers if number in self._wanted and number not in failed]

    def _settle(self, number: int, outcome: Outcome) -> None:
        del self._wanted[number]
        self.outcomes[number] = outcome


class _IntoBuffers(_Batch[memoryview]):
    """The rooms are the callers' buffers."""

    async def _fetch_one(self, key: str, digest: bytes, room: memoryview) -> int:
        return await self._fetcher.fetch_into(key, digest, room)

    def _destination(self, room: memoryview) -> Destination:
        return BufferDestination(room)

    def _room_for(self, room: memoryview, length: int) -> memoryview:
        if length > len(room):
            raise too_small(length, room)
        return room

    def _small_rooms(self, numbers: Sequence[int]) -> _SmallRooms:
        views = self._rooms_of(numbers)
        sizes = list(map(len, views))
        most_bytes = max(sizes, default=0)
        if most_bytes <= CHUNK_BYTES and min(sizes, default=0) > 0:
            return _SmallRooms(numbers, views, most_bytes)
        small = [
            number for number, size in zip(numbers, sizes, strict=True) if 0 < size <= CHUNK_BYTES
        ]
        views = self._rooms_of(small)
        return _SmallRooms(small, views, max(map(len, views), default=0))

    async def pull_ahead(self) -> None:
        """What a batch asks for is at one holder nearly always: so who has the first object is asked for the first part
        of all before anything is known of the others. What turns out to be elsewhere, too, is read anew."""
        items = part_items(len(self._keys))
        self._prepare(min(items, len(self._keys)))
        begin = self._small_rooms(list(self._wanted))
        if not begin.numbers:
            return
        copy = self._fetcher.likely_holder(self._digests[begin.numbers[0]], begin.most_bytes)
        if copy is None:
            return
        first = part_slices(begin.views, begin.most_bytes, items)[0]
        asked: list[int] = []

        def steps() -> Iterator[Sequence[Part]]:
            asked[:] = begin.numbers[first]
            yield [Part(self._digests_of(asked), begin.views[first], begin.most_bytes)]
            rest = self._look_up_all_but(asked, copy)
            slices = part_slices(rest.views, rest.most_bytes, items)
            digests = self._digests_of(rest.numbers)
            for at in range(0, len(slices), PARTS_TOGETHER):
                some = slices[at : at + PARTS_TOGETHER]
                asked.extend(rest.numbers[some[0].start : some[-1].stop])
                yield [Part(digests[part], rest.views[part], rest.most_bytes) for part in some]

        lengths, failure = await self._fetcher.pull_small(copy, steps, asked, ())
        if not self._is_only_holder_of_all(copy):
            for place, number in enumerate(asked[first][: len(lengths)]):
                if self._only[number] != copy:
                    lengths[place] = -1
        self._settle_lengths(asked, lengths)
        if not self._wanted:
            return
        again = [number for number in asked if self._only[number] == copy]
        left = self._not_tried(again, asked, copy, lengths, failure)
        await self._pull_many(copy, left)
        for number in asked if failure is None else range(len(self._only)):
            if self._only[number] == copy:  # it has been asked there
                self._only[number] = None

    def _look_up_all_but(self, asked: Sequence[int], copy: RemoteCopy) -> _SmallRooms:
        """Find out what is where, and which small ones are to be asked for at that holder after the first."""
        self._prepare(len(self._keys))
        numbers, views, most_bytes = self._small_rooms(list(self._wanted))
        self._look_up(most_bytes if len(numbers) == len(self._wanted) else math.inf)
        numbers, views = numbers[len(asked) :], views[len(asked) :]  # they come first
        if not self._is_only_holder_of_all(copy):
            numbers = [number for number in numbers if self._only[number] == copy]
            views = self._rooms_of(numbers)
        return _SmallRooms(numbers, views, most_bytes)


class _IntoNewMemory(_Batch[D]):
    """The rooms are made when it is known how long the values are."""

    async def _fetch_one(self, key: str, digest: bytes, room: D) -> int:
        fetcher = self._fetcher
        if (copied := await fetcher.read_here(digest, room)) is not None:
            return copied.length
        pulled = await fetcher.pull_small_value(key, digest)
        if isinstance(pulled, bytes):
            room.take(memoryview(pulled))
            return len(pulled)
        return (await fetcher.fetch(key, digest, room, before=pulled)).length

    def _destination(self, room: D) -> Destination:
        return room

    def _room_for(self, room: D, length: int) -> memoryview:
        return room.make(length)

    def _small_rooms(self, numbers: Sequence[int]) -> _SmallRooms:
        """Where the first one is small, all of them are likely to be: in memory that they share."""
        if not 0 < self._fetcher.expected_bytes(self._digests[numbers[0]]) <= COPIED_BYTES:
            return _SmallRooms((), (), 0)
        small = numbers[:MOST_COPIED]
        shared = np.empty(len(small) * COPIED_BYTES, np.uint8).data
        starts = range(0, len(shared), COPIED_BYTES)
        views = [shared[start : start + COPIED_BYTES] for start in starts]
        return _SmallRooms(small, views, COPIED_BYTES)

    def _filled(
        self, numbers: Sequence[int], views: Sequence[memoryview], lengths: Sequence[int]
    ) -> None:
        for number, view, length in zip(numbers, views, lengths, strict=False):
            if length >= 0:
                self._rooms[number].take(view[:length])


def version_of(plan: PlanItem) -> Version:
    """What is planned to be read first."""
    holder = plan.holders[0]
    return Version(holder.clock, holder.writer, holder.root)


def _is_nearby(plan: PlanItem) -> bool:
    """Whether the object is in the memory of a peer of this host."""
    if not plan.holders or plan.through_peer:
        return False
    return plan.holders[0].same_host and plan.holders[0].tier == DRAM


def _in_batches(plan: PlanItem) -> bool:
    """Whether the object comes best with others of its holder."""
    if not plan.holders or plan.holders[0].same_host or plan.through_peer:
        return False
    return plan.holders[0].size_units * SIZE_UNIT_BYTES < SLICED_BYTES
