"""Getting many objects: local ones from the mapping, the rest in one batch per holder."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from p2pstore.client.answers import plain_error
from p2pstore.client.destinations import (
    BatchDestinations,
    BufferDestinations,
    DigestsOf,
    NewMemory,
    NewMemoryDestinations,
)
from p2pstore.client.fetcher import Fetcher
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
from p2pstore.runtime.side_by_side import Work
from p2pstore.transfer.failover import PullFailed, SilentHolders, is_silence
from p2pstore.transfer.reading.small_reads import Part
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
    return await _Batch(fetcher, BufferDestinations(keys, digests_of, buffers, rooms_of)).fetch()


async def fetch_many_new(
    fetcher: Fetcher, keys: Sequence[str], destinations: Sequence[D], digests_of: DigestsOf
) -> list[Outcome]:
    """`fetch_many` to new memory."""
    return await _Batch(fetcher, NewMemoryDestinations[D](keys, digests_of, destinations)).fetch()


class _Batch:
    """Many reads at once, each to a room of its own. Each step settles some of the items, which are known by their
    numbers."""

    def __init__(self, fetcher: Fetcher, rooms: BatchDestinations[Any]) -> None:
        self.outcomes: list[Outcome] = [_UNDER_WAY] * len(rooms.keys)
        self._fetcher = fetcher
        self._holders = fetcher.holders
        self._rooms = rooms
        self._wanted: dict[int, None] = {}
        """The items that were looked at and are not settled, in order."""
        self._plans: dict[int, PlanItem] = {}
        self._silent = SilentHolders()
        self._hot: set[int] = set()
        """Items that the local peer is to bring and keep."""

    async def fetch(self) -> list[Outcome]:
        """The outcome of each item. The places of `read_plan`, in columns where that is of use:

        1. HERE;
        2. the only holder;
        3. one plan for all, and its HOLDERS in groups;
        4. the rest object by object.
        """
        wrong = self._rooms.prepare()
        self._wanted.update(dict.fromkeys(range(len(self.outcomes))))
        for number, error in wrong.items():
            self._settle(number, error)
        if len(self.outcomes) == 1:
            await self._fetch_alone()
            return self.outcomes
        if self._wanted:
            await self._read_here()
        if self._wanted:
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

    async def _read_here(self) -> None:
        """Read the objects that the local peer holds."""
        numbers = list(self._wanted)
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
        """Read the objects that one other peer alone is known to hold, and the local one does not, without a plan."""
        wanted = list(self._wanted)
        digests = self._rooms.digests_of(wanted)
        copies = self._holders.known.only_many(digests, self._rooms.most_bytes(wanted))
        for place in self._fetcher.which_are_here(digests):  # could not be read just now
            copies[place] = None
        groups: dict[int, tuple[RemoteCopy, list[int]]] = {}
        if (first := copies[0]) is not None and copies.count(first) == len(copies):  # nearly always
            groups[first.member] = first, wanted
        else:
            for number, copy in zip(wanted, copies, strict=True):
                if copy is not None:
                    groups.setdefault(copy.member, (copy, []))[1].append(number)
        await self._holders.side_by_side(
            [partial(self._pull, *group) for group in groups.values() if is_far(group[0])],
            [partial(self._copy_nearby, *group) for group in groups.values() if not is_far(group[0])],
        )

    async def _copy_nearby(
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
            reads: dict[bool, list[Work]] = {True: [], False: []}
            for group in groups_by_holder(lukewarm):
                reads[group.holder.same_host].append(partial(self._pull_group, group))
            await self._holders.side_by_side(reads[False], reads[True])
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
            await self._copy_nearby(copy, group.numbers, versions)
        elif is_silence(failure):
            self._silent.add(copy.member, has_alternatives=bool(group.others))

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
                self._fetcher.count_miss(error)
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
            wanted = Part(self._rooms.digests_of(small), rooms.views, rooms.most_bytes, versions)
            lengths, failure = await self._holders.pull_small(copy, wanted, others)
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
            self._silent.add(copy.member, has_alternatives=bool(others))
        for number, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, Pulled):
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
            self._silent.add(copy.member, has_alternatives=bool(others))
            return ()
        failed = set(small[len(lengths) :])
        return [number for number in numbers if number in self._wanted and number not in failed]

    def _settle(self, number: int, outcome: Outcome) -> None:
        del self._wanted[number]
        self.outcomes[number] = outcome
