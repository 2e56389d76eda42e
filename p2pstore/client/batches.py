"""Getting many objects: local ones from the mapping, the rest in one batch per holder."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from p2pstore.client.answers import plain_error
from p2pstore.client.destinations import (
    BufferRooms,
    DigestsOf,
    NewMemory,
    NewMemoryRooms,
    Rooms,
    SmallRooms,
)
from p2pstore.client.fetcher import Fetcher
from p2pstore.client.holder_reads import HolderReads
from p2pstore.client.read_plan import (
    HolderGroup,
    ReadPlan,
    groups_by_holder,
    is_far,
    remote_copy,
    version_of,
)
from p2pstore.errors import DeadlineExceeded, P2PStoreError, StoreClosed
from p2pstore.local.local_messages import PlanItem
from p2pstore.objects import Announced, Version
from p2pstore.runtime.streams import Work
from p2pstore.transfer.failover import PullFailed, SilentHolders, is_silence
from p2pstore.transfer.reading.small_reads import PARTS_TOGETHER, Part, in_parts, part_items, part_slices
from p2pstore.transfer.transport import Pulled, RemoteCopy, announcing
from p2pstore.values import destination_views

D = TypeVar("D", bound=NewMemory)

BROUGHT_AHEAD: Final = 8

Outcome = int | P2PStoreError | ValueError
"""The length, or why there is none."""
_UNDER_WAY: Final = -1
_NO_ROOM: Final = memoryview(b"")


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
    return await _Batch(fetcher, BufferRooms(keys, digests_of, buffers, rooms_of)).fetch()


async def fetch_many_new(
    fetcher: Fetcher, keys: Sequence[str], destinations: Sequence[D], digests_of: DigestsOf
) -> list[Outcome]:
    """`fetch_many` to new memory."""
    return await _Batch(fetcher, NewMemoryRooms[D](keys, digests_of, destinations)).fetch()


class _Batch:
    """Many reads at once, each to a room of its own. Each step settles some of the items, which are known by their
    numbers."""

    def __init__(self, fetcher: Fetcher, rooms: Rooms[Any]) -> None:
        count = len(rooms.keys)
        self.outcomes: list[Outcome] = [_UNDER_WAY] * count
        self._fetcher = fetcher
        self._holders = fetcher.holders
        self._rooms = rooms
        self._wanted: dict[int, None] = {}
        """The items that were looked at and are not settled, in order."""
        self._plans: dict[int, PlanItem] = {}
        self._silent = SilentHolders()
        self._hot: set[int] = set()
        """Items that the local peer is to bring and keep."""
        self._here: list[int] | None = None
        """Items that the local peer seems to have; None until that was looked up."""
        self._only: list[RemoteCopy | None] = [None] * count
        """The one other peer that is known to hold each of the rest, where there is just one."""

    async def fetch(self) -> list[Outcome]:
        """The outcome of each item. The places of `read_plan`, in columns where that is of use:

        1. ONLY_HOLDER for the first part, when all seem to be at one far holder, while the rest is looked up;
        2. HERE;
        3. ONLY_HOLDER;
        4. one plan for all, and its HOLDERS in groups;
        5. the rest object by object.
        """
        count = len(self.outcomes)
        if count == 1:
            await self._fetch_alone()
            return self.outcomes
        if self._rooms.are_buffers:
            await self._pull_ahead()
        self._prepare(count)
        if self._wanted:
            await self._read_here()
        if self._wanted:
            if self._here is None:
                self._look_up()
            await self._pull_from_only_holders()
        if self._wanted:
            try:
                await self._pull_as_planned()
                await self._fetch_the_rest()
            except DeadlineExceeded as error:  # the items read so far stay of use
                for number in list(self._wanted):
                    self._settle(number, plain_error(error))
        return self.outcomes

    async def _fetch_alone(self) -> None:
        """One object is read without a batch. Measured with 4 KiB: 12 us of CPU instead of 22 from own memory, 46
        instead of 91 from another peer."""
        self._prepare(1)
        if not self._wanted:
            return
        try:
            length = await self._rooms.fetch_one(self._fetcher, 0)
        except StoreClosed:  # the local peer is gone: not this object's fault
            raise
        except (P2PStoreError, ValueError) as error:
            self._settle(0, plain_error(error))
        else:
            self._settle(0, length)

    def _prepare(self, stop: int) -> None:
        """Look at the items before number `stop`, and settle the wrong ones."""
        start = len(self._rooms.digests)
        if start >= stop:
            return
        wrong = self._rooms.prepare(stop)
        self._wanted.update(dict.fromkeys(range(start, stop)))
        for number, error in wrong.items():
            self._settle(number, error)

    async def _pull_ahead(self) -> None:
        """Ask the holder of the first objects for the first part of the batch, before the rest is looked up: nearly
        always all objects of a batch are at one holder. What the rest says is elsewhere is read there meanwhile."""
        items = part_items(len(self.outcomes))
        self._prepare(min(items, len(self.outcomes)))
        begin = self._rooms.small(list(self._wanted), self._fetcher)
        if not begin.numbers:
            return
        first = part_slices(begin.views, begin.most_bytes, items)[0]
        some = begin.numbers[first]
        samples = [some[0], some[1 % len(some)], some[len(some) // 2], some[-1]]
        digests = [self._rooms.digests[number] for number in samples]
        copy = self._fetcher.likely_holder(digests, begin.most_bytes)
        if copy is not None:
            async with self._holders.together() as start:
                await self._pull_first(copy, begin, first, start)

    async def _pull_first(
        self, copy: RemoteCopy, begin: SmallRooms, first: slice, start: Callable[[Work], None]
    ) -> None:
        asked: list[int] = []
        rest: SmallRooms | None = None

        def steps() -> Iterator[Sequence[Part]]:
            nonlocal rest
            asked[:] = begin.numbers[first]
            yield [Part(self._rooms.digests_of(asked), begin.views[first], begin.most_bytes)]
            if rest is None:
                rest = self._look_up_all_but(asked, copy)
                if not self._is_only_holder_of_all(copy):
                    elsewhere = [
                        number for number in self._wanted.keys() - asked if self._only[number] != copy
                    ]
                    for work in self._at_only_holders(sorted(elsewhere)):
                        start(work)
            slices = part_slices(rest.views, rest.most_bytes, part_items(len(self.outcomes)))
            digests = self._rooms.digests_of(rest.numbers)
            for at in range(0, len(slices), PARTS_TOGETHER):
                some = slices[at : at + PARTS_TOGETHER]
                asked.extend(rest.numbers[some[0].start : some[-1].stop])
                yield [Part(digests[part], rest.views[part], rest.most_bytes) for part in some]

        lengths, failure = await self._holders.pull_small(copy, steps, asked, ())
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

    def _look_up_all_but(self, asked: Sequence[int], copy: RemoteCopy) -> SmallRooms:
        """Find out what is where, and which small ones are to be asked for at that holder after the first."""
        self._prepare(len(self.outcomes))
        numbers, views, most_bytes = self._rooms.small(list(self._wanted), self._fetcher)
        self._look_up(most_bytes if len(numbers) == len(self._wanted) else math.inf)
        numbers, views = numbers[len(asked) :], views[len(asked) :]  # they come first
        if not self._is_only_holder_of_all(copy):
            numbers = [number for number in numbers if self._only[number] == copy]
            views = self._rooms.rooms_at(numbers)
        return SmallRooms(numbers, views, most_bytes)

    def _look_up(self, most_bytes: float = math.inf) -> None:
        """Find out what is here, and which of the rest one other peer alone is known to hold. No value that is longer
        than that is wanted."""
        wanted = list(self._wanted)
        digests = self._rooms.digests_of(wanted)
        copies = self._holders.known.only_many(digests, most_bytes)
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

    async def _read_here(self) -> None:
        """Read the objects that the local peer holds."""
        numbers = list(self._wanted) if self._here is None else self._here
        lengths = await self._fetcher.copy_many_here(
            self._rooms.digests_of(numbers), partial(self._rooms_for, numbers)
        )
        self._settle_lengths(numbers, lengths)

    def _rooms_for(
        self, numbers: Sequence[int], places: Sequence[int], lengths: Sequence[int]
    ) -> list[memoryview]:
        """`RoomsFor` of a batch of items. One without room is settled, and has an empty one."""
        rooms: list[memoryview] = []
        room_for = self._rooms.room_for
        for place, length in zip(places, lengths, strict=True):
            number = numbers[place]
            try:
                rooms.append(room_for(number, length))
            except (P2PStoreError, ValueError) as error:
                self._settle(number, plain_error(error))
                rooms.append(_NO_ROOM)
        return rooms

    async def _pull_from_only_holders(self) -> None:
        """Read the objects that one other peer alone is known to hold, without a plan."""
        copies = [self._only[number] for number in self._wanted]
        if copies and (first := copies[0]) is not None and copies.count(first) == len(copies):
            await self._pull_only(first, list(self._wanted))
        else:
            await _side_by_side(self._holders, self._at_only_holders(list(self._wanted)))

    def _at_only_holders(self, numbers: Sequence[int]) -> list[Work]:
        """The reads of these from their only holders, each of which is asked once; far holders come first."""
        groups: dict[int, tuple[RemoteCopy, list[int]]] = {}
        for number in numbers:
            if (copy := self._only[number]) is not None:
                groups.setdefault(copy.member, (copy, []))[1].append(number)
                self._only[number] = None
        ordered = sorted(groups.values(), key=lambda group: not is_far(group[0]))
        return [partial(self._pull_only, *group) for group in ordered]

    async def _pull_only(self, copy: RemoteCopy, numbers: Sequence[int]) -> None:
        if is_far(copy):
            await self._pull(copy, numbers)
        else:
            await self._copy_from_neighbour(copy, numbers)

    async def _copy_from_neighbour(
        self, copy: RemoteCopy, numbers: Sequence[int], versions: Sequence[Version] = ()
    ) -> None:
        """Those in the memory of a peer of this host, where that is mapped already."""
        lengths = await self._holders.copy_many_nearby(
            copy, self._rooms.digests_of(numbers), partial(self._rooms_for, numbers), versions
        )
        self._settle_lengths(numbers, lengths)

    async def _pull_as_planned(self) -> None:
        """The rest by one plan for all, in a batch for each holder."""
        numbers = list(self._wanted)
        plans = await self._fetcher.plan(self._rooms.keys[numbers[0]], self._rooms.digests_of(numbers))
        self._plans = dict(zip(numbers, plans, strict=True))
        asked = self._plans
        for _ in range(2):  # what a silent holder did not bring comes from the next one
            lukewarm = {number: plan for number, plan in asked.items() if number not in self._hot}
            groups = sorted(groups_by_holder(lukewarm), key=lambda group: group.holder.same_host)
            await _side_by_side(self._holders, [partial(self._pull_group, group) for group in groups])
            asked = self._without_silent()
            self._plans |= asked

    def _without_silent(self) -> dict[int, PlanItem]:
        """Plans for the items whose first holder was silent, and not the others."""
        changed: dict[int, PlanItem] = {}
        for number in self._wanted:
            before = self._plans[number].holders
            after = self._silent.last(before)
            if after and after[0] is not before[0]:
                changed[number] = replace(self._plans[number], holders=after)
        return changed

    async def _pull_group(self, group: HolderGroup) -> None:
        """Those of one holder, as planned. The memory of a peer of this host is mapped for that."""
        if not self._silent.last([group.holder]):
            return
        copy = remote_copy(group.holder)
        if not copy.same_host:
            await self._pull(copy, group.numbers, group.others)
            return
        failure = await self._holders.map_nearby(copy, group.others)
        if failure is None:
            versions = [version_of(self._plans[number]) for number in group.numbers]
            await self._copy_from_neighbour(copy, group.numbers, versions)
        elif is_silence(failure):
            self._silent.add(copy.member, hurried=bool(group.others))

    async def _fetch_the_rest(self) -> None:
        """Read the remaining objects one by one, large ones from all their holders. Objects on the local peer's SSD,
        and hot ones, are brought ahead of that."""
        wanted = list(self._wanted)
        ahead = deque(
            self._rooms.digests[number]
            for number in wanted
            if number in self._hot or self._plans[number].on_ssd
        )
        await self._bring(ahead, 2 * BROUGHT_AHEAD)
        for place, number in enumerate(wanted, start=1):
            if place % BROUGHT_AHEAD == 0:
                await self._bring(ahead, BROUGHT_AHEAD)
            key = self._rooms.keys[number]
            plan = ReadPlan(key, silent=self._silent, hot=number in self._hot)
            plan.planned(self._plans[number])
            try:
                done = await self._fetcher.fetch_planned(
                    key, self._rooms.digests[number], self._rooms.destination(number), plan
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
        rooms = self._rooms.small(numbers, self._fetcher)
        small = rooms.numbers
        if small:
            versions = [version_of(self._plans[number]) for number in small if self._plans]
            parts = in_parts(self._rooms.digests_of(small), rooms.views, rooms.most_bytes, versions)
            lengths, failure = await self._holders.pull_small(copy, parts, small, others)
            self._rooms.filled(rooms, lengths)
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
                self._rooms.digests[number],
                announcing(self._rooms.destination(number), self._announced(number, copy)),
            )
            for number in numbers
        ]
        outcomes = await self._holders.pull_many(copy, asked, others)
        if any(is_silence(outcome) for outcome in outcomes):
            self._silent.add(copy.member, hurried=bool(others))
        for number, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, int):
                self._settle(number, outcome)
            elif isinstance(outcome, Pulled):
                self._settle(number, outcome.length)
            elif isinstance(outcome, PullFailed) and outcome.keep:
                self._hot.add(number)
            elif not isinstance(outcome, PullFailed):  # the buffer is too small for every holder
                self._settle(number, plain_error(outcome))

    def _announced(self, number: int, copy: RemoteCopy) -> Announced | None:
        """The versions that this holder may send of an item: the planned one, or else its own."""
        plan = self._plans.get(number)
        if plan is None or copy.announced is None:
            return copy.announced
        return Announced(copy.announced.writer, version_of(plan))

    def _settle_lengths(self, numbers: Sequence[int], lengths: list[int]) -> None:
        """These items have got values of these lengths; -1 for none."""
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


async def _side_by_side(holders: HolderReads, reads: Sequence[Work]) -> None:
    """Read from several holders at once, from the last one by this task."""
    if len(reads) > 1:
        async with holders.together() as start:
            for read in reads[:-1]:
                start(read)
            await reads[-1]()
    elif reads:
        await reads[0]()
