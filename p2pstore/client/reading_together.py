"""Small reads of many tasks from one holder, gathered: where so many are under way that the next one would queue for a
connection, those that come wait for each other, and then one of them reads for all. A request of its own for each would
cost both ends a turn of their event loops.

On one machine, or a fast network, an answer is there when its request has gone out: then a task would read on and on,
while the others have not even asked. So who begins lets them ask now and then, and each time where there are many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from p2pstore.runtime.streams import Driver, Event
from p2pstore.transfer.failover import PullFailed, is_silence
from p2pstore.transfer.transport import RemoteCopy

MOST_ALONE: Final = 4
"""Reads under way from one holder, each by itself: so many connections are kept, and a batch of few takes longer."""
MANY: Final = 8
"""After a batch of so many at least, it is one at most: the next batch begins when that is over."""
GATHER_SECONDS: Final = 5e-3
"""So seldom who reads alone lets others ask first: some 10 us where nobody does."""
MOST_TOGETHER: Final = 256
"""Reads in one batch."""

Came = tuple[int, PullFailed | None]
"""The length of an object, or -1 when it takes another way of reading; and how the connection failed."""
PullSmall = Callable[
    [RemoteCopy, Sequence[bytes], Sequence[memoryview]],
    Awaitable[tuple[list[int], PullFailed | None]],
]
"""See `DataPool.pull_small`."""


class _Waiting:
    """A read that waits for its turn. A batch is read into `room`: whoever asked may be cancelled meanwhile, and use
    its own memory for something else."""

    __slots__ = (
        *("digest", "event", "failure", "is_alone", "is_gone", "leads"),
        *("length", "room", "room_bytes"),
    )

    def __init__(self, digest: bytes, room_bytes: int, event: Event) -> None:
        self.digest = digest
        self.room_bytes = room_bytes
        self.event = event
        self.is_alone = False
        """It is its turn, and it is not in the queue any more."""
        self.leads = False
        """It is its turn, and that of all behind it in the queue."""
        self.is_gone = False
        self.room = memoryview(b"")
        self.length = -1
        self.failure: PullFailed | None = None


class _Holder:
    """Who reads there: `alone` of at most `most_alone`. `leads`: one reads a batch, is called to do that, or gathers
    it; then nobody else begins."""

    __slots__ = ("alone", "gathered_at", "leads", "most_alone", "queue")

    def __init__(self) -> None:
        self.alone = 0
        self.gathered_at = -math.inf
        self.most_alone = MOST_ALONE
        self.leads = False
        self.queue: list[_Waiting] = []

    @property
    def is_to_gather(self) -> bool:
        """Whether the next one lets others ask first."""
        return not self.alone and (
            self.most_alone < MOST_ALONE or time.monotonic() - self.gathered_at >= GATHER_SECONDS
        )


class ReadingTogether:
    """For the tasks of one event loop."""

    def __init__(self, driver: Driver, pull_small: PullSmall) -> None:
        self._driver = driver
        self._pull_small = pull_small
        self._holders: dict[int, _Holder] = {}
        """By member: few, as somebody who knows them says how to get there."""

    async def read(self, copy: RemoteCopy, digest: bytes, view: memoryview) -> Came:
        """Read an object into the beginning of `view`, which is not empty, alone or with others."""
        holder = self._holders.get(copy.member)
        if holder is None:
            holder = self._holders[copy.member] = _Holder()
        gathers = False
        if holder.alone < holder.most_alone and not (holder.queue or holder.leads):
            gathers = holder.is_to_gather
            if not gathers:
                holder.alone += 1
                return await self._read_alone(holder, copy, digest, view)
        waiting = _Waiting(digest, len(view), self._driver.event())
        holder.queue.append(waiting)
        try:
            if gathers:
                await self._gather(holder, waiting)
            else:
                await waiting.event.wait(math.inf)  # whoever reads has a deadline
        except BaseException:
            _leave(holder, waiting)
            raise
        if waiting.is_alone:
            return await self._read_alone(holder, copy, digest, view)
        if waiting.leads:
            await self._lead(copy, holder)
        if waiting.length > 0:
            view[: waiting.length] = waiting.room[: waiting.length]
        return waiting.length, waiting.failure

    async def _read_alone(
        self, holder: _Holder, copy: RemoteCopy, digest: bytes, view: memoryview
    ) -> Came:
        try:
            lengths, failure = await self._pull_small(copy, (digest,), (view,))
            if failure is not None:
                _fail_if_silent(holder, failure)
            return (lengths[0] if lengths else -1), failure
        finally:
            holder.alone -= 1
            _call_next(holder)

    async def _gather(self, holder: _Holder, first: _Waiting) -> None:
        """Let others ask; then `first` leads, or it and the few others read by themselves."""
        first.leads = holder.leads = True
        await self._driver.sleep(0)
        if holder.most_alone < MOST_ALONE:
            # The others of the last batch were called when `first` was, and their turn may come after it.
            await self._driver.sleep(0)
        holder.gathered_at = time.monotonic()
        if first.leads and len(holder.queue) <= MOST_ALONE:
            first.leads = holder.leads = False
            holder.most_alone = MOST_ALONE
            _call_next(holder)

    async def _lead(self, copy: RemoteCopy, holder: _Holder) -> None:
        """Read for those that wait, the caller first. Cancelled, it leaves the others to the next one."""
        some = holder.queue[:MOST_TOGETHER]
        del holder.queue[:MOST_TOGETHER]
        holder.most_alone = 1 if len(some) >= MANY else MOST_ALONE
        try:
            ends = list(accumulate((each.room_bytes for each in some), initial=0))
            memory = memoryview(bytearray(ends[-1]))
            for each, (start, end) in zip(some, pairwise(ends), strict=True):
                each.room = memory[start:end]
            lengths, failure = await self._pull_small(
                copy, [each.digest for each in some], [each.room for each in some]
            )
            for each, length in zip(some, lengths, strict=False):
                each.length = length
            if failure is not None:
                for each in some[len(lengths) :]:
                    each.failure = failure
                _fail_if_silent(holder, failure)
            for each in some:
                each.event.set()
        except BaseException:
            holder.queue[:0] = [each for each in some[1:] if not each.is_gone]
            raise
        finally:
            holder.leads = False
            _call_next(holder)


def _leave(holder: _Holder, waiting: _Waiting) -> None:
    """It was cancelled while it waited, or in the moment in which it was called."""
    waiting.is_gone = True
    if waiting in holder.queue:
        holder.queue.remove(waiting)
    if waiting.leads:
        holder.leads = False
    elif waiting.is_alone:
        holder.alone -= 1
    _call_next(holder)


def _call_next(holder: _Holder) -> None:
    """Whose turn it is now: each by itself where they are few, else one for all."""
    queue = holder.queue
    if holder.leads or not queue:
        return
    if len(queue) > holder.most_alone - holder.alone:
        holder.leads = True
        queue[0].leads = True
        queue[0].event.set()
        return
    for each in queue:
        holder.alone += 1
        each.is_alone = True
        each.event.set()
    queue.clear()


def _fail_if_silent(holder: _Holder, failure: PullFailed) -> None:
    """Nobody who came while a holder did not answer waits for it once more."""
    if is_silence(failure):
        for each in holder.queue:
            if each.leads:  # called just now
                each.leads = holder.leads = False
            each.failure = failure
            each.event.set()
        holder.queue.clear()
