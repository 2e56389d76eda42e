"""One-sided reads under way: posted, counted, told to whoever waits for them. Under trio.

All queue pairs of a device share one completion queue. One task (`ReadEngine.run`) sleeps on its descriptor and hands
out what arrived. Memory that is read into belongs to the device until the read has ended: by its completion, or
because its queue pair was destroyed. A reader that is cancelled sees to that (`settle`, `Read.when_ended`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from p2pstore.errors import DeadlineExceeded, Unavailable
from p2pstore.transfer.layout import Geometry
from p2pstore.transfer.rdma_rules import (
    Meaning,
    RemoteMemory,
    WorkRoom,
    describe_status,
    meaning_of,
    split_read,
)
from p2pstore.transfer.rdma_staging import Registered
from p2pstore.transfer.rdma_verbs import Completion, Device, QueuePair

logger = logging.getLogger("p2pstore.transfer")

POLL_COMPLETIONS: Final = 64
SOON_LOOKS: Final = 10
MAX_UNDER_WAY: Final = 4096
"""Work requests of all queue pairs together."""
NO_GEOMETRY: Final = Geometry(0, 0, 0, 0, 0, 0, 0)
DRAIN_SECONDS: Final = 2.0
"""For reads to end by themselves, and again for a stopped queue pair to flush them."""


class ReadFailed(Exception):
    """A read did not end well; its queue pair is of no use any more."""

    def __init__(self, meaning: Meaning, text: str) -> None:
        super().__init__(text)
        self.meaning = meaning
        self.text = text


class Read:
    """One read: of one or more work requests."""

    def __init__(self, line: Line, requests: int) -> None:
        self.ended = trio.Event()
        self._line = line
        self._left = requests
        self._failed = False
        self._callbacks: list[Callable[[], None]] = []

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once nothing writes to the memory any more: at once if that is so."""
        if self.ended.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def wait(self, seconds: float) -> None:
        """Wait for the end. Raises `ReadFailed`, and `DeadlineExceeded` when it does not come in time: then the
        memory still belongs to the device."""
        if self.ended.is_set():
            await trio.lowlevel.checkpoint()
        else:
            with trio.move_on_after(seconds):
                await self.ended.wait()
        if not self.ended.is_set():
            text = f"a read over RDMA did not end within {seconds:g} s"
            self._line.stop(Meaning.GONE, text)
            raise DeadlineExceeded(text)
        if self._failed:
            self._line.check()

    def request_ended(self, *, failed: bool) -> None:
        """One of the work requests did."""
        self._failed = self._failed or failed
        self._left -= 1
        if self._left == 0:
            self.ended.set()
            for callback in self._callbacks:
                callback()


class Line:
    """A queue pair, and the memory at its other end: none until it is connected."""

    def __init__(self, engine: ReadEngine, pair: QueuePair, requests: int) -> None:
        self.engine = engine
        self.pair = pair
        self.memory = RemoteMemory(0, 0, 0)
        self.geometry = NO_GEOMETRY
        self.room = WorkRoom(requests)
        self.failure: ReadFailed | None = None
        self.used_at = trio.current_time()
        self.idle = trio.Event()
        self.idle.set()
        self.when_broken: Callable[[], None] = lambda: None

    def check(self) -> None:
        """Raise `ReadFailed` when the queue pair failed or was stopped."""
        if self.failure is not None:
            raise ReadFailed(self.failure.meaning, self.failure.text)

    def fail(self, meaning: Meaning, text: str) -> None:
        """It is of no use any more; the first reason counts."""
        if self.failure is None:
            self.failure = ReadFailed(meaning, text)
            self.when_broken()

    def stop(self, meaning: Meaning, text: str) -> None:
        """Have everything that is under way end soon."""
        self.fail(meaning, text)
        if self.room.taken and not self.pair.closed:
            try:
                self.pair.fail()
            except Unavailable as error:  # a lost device: what is left ends with the queue pair
                logger.warning("%s", error)


@dataclass(frozen=True, slots=True)
class _Work:
    line: Line
    read: Read


class ReadEngine:
    """The reads of one device, the `number`th of those used together. `run` must be running for any to end."""

    def __init__(self, device: Device, number: int = 0) -> None:
        self.device = device
        self.number = number
        entries = min(MAX_UNDER_WAY, device.limits.max_completions)
        self.completions = device.completion_queue(entries)
        self.lost = ""
        self.when_lost: Callable[[], None] = lambda: None
        self._room = WorkRoom(entries)
        self._under_way: dict[int, _Work] = {}
        self._numbers = itertools.count(1)
        self._freed = trio.lowlevel.ParkingLot()
        self._armed = False
        """Whether `run` will be told of the next completion."""

    @property
    def under_way(self) -> int:
        """Work requests whose end was not seen yet."""
        return len(self._under_way)

    async def run(self) -> None:
        """Hand out completions until cancelled, or until the device is lost: then every read has failed, and
        `lost` says why."""
        while not self.lost:
            await trio.lowlevel.wait_readable(self.completions.descriptor)
            try:
                self.completions.acknowledge()
            except Unavailable as error:
                self._lose(error)
            self._armed = False
            self._take()
            if self._under_way:
                self._expect()

    def _expect(self) -> None:
        """Have `run` told of the next completion. No event tells of what came before, so that is taken now."""
        if self._armed or self.lost:
            return
        try:
            self.completions.arm()
        except Unavailable as error:
            self._lose(error)
            return
        self._armed = True
        self._take()

    def _take(self) -> None:
        """Hand out the completions that are there."""
        found = POLL_COMPLETIONS
        while found == POLL_COMPLETIONS and not self.lost:
            try:
                completions = self.completions.poll(POLL_COMPLETIONS)
            except Unavailable as error:
                self._lose(error)
                return
            for each in completions:
                self._ended(each)
            found = len(completions)
            if found:
                self._freed.unpark_all()

    def _lose(self, error: Unavailable) -> None:
        """The device is of no use any more."""
        logger.error("%s: nothing is read through it until this peer is started again", error)
        self.lost = str(error)
        for line in {work.line for work in self._under_way.values()}:
            line.fail(Meaning.BROKEN, self.lost)
            self._destroy(line)
        self.when_lost()

    def _ended(self, completion: Completion) -> None:
        work = self._under_way.pop(completion.work_id, None)
        if work is None:  # of a queue pair that was destroyed
            return
        meaning = meaning_of(completion.status)
        if meaning is not Meaning.DONE:
            text = f"a read over RDMA failed: {describe_status(completion.status)}"
            work.line.fail(meaning, text)
        self._give_back(work, failed=meaning is not Meaning.DONE)

    def _give_back(self, work: _Work, *, failed: bool) -> None:
        line = work.line
        self._room.give_back()
        line.room.give_back()
        if not line.room.taken:
            line.idle.set()
        work.read.request_ended(failed=failed)

    async def read(
        self,
        line: Line,
        offset: int,
        length_bytes: int,
        memory: Registered,
        address: int,
        *,
        soon: bool = False,
    ) -> Read:
        """Begin to read so many bytes (above 0) at `offset` of the other side's memory to `address`, which is
        inside `memory`. Waits while too much is under way; nothing has begun when that is cancelled. With `soon`,
        its end is looked for a few times at once: a small read takes microseconds, waking two tasks ten times as long.

        Raises `ReadFailed` for a line that failed, `ProtocolError` for bytes outside of the other side's memory.
        """
        start = line.memory.at(offset, length_bytes)
        region = memory.regions[self.number]
        assert region.holds(address, length_bytes)
        parts = list(split_read(length_bytes, self.device.limits.max_message_bytes))
        if len(parts) > min(line.room.places, self._room.places):
            raise ReadFailed(Meaning.BROKEN, "the RDMA device takes too small messages")
        line.check()
        if self.lost:
            raise ReadFailed(Meaning.BROKEN, self.lost)
        while not self._has_room(line, len(parts)):
            await self._freed.park()
            line.check()
        read = Read(line, len(parts))
        line.used_at = trio.current_time()
        for place, (part, size) in enumerate(parts):
            number = next(self._numbers)
            self._room.take()
            line.room.take()
            line.idle = trio.Event() if line.idle.is_set() else line.idle
            self._under_way[number] = work = _Work(line, read)
            try:
                line.pair.read(number, region, address + part, size, start + part, line.memory.key)
            except Unavailable as error:
                del self._under_way[number]
                line.stop(Meaning.BROKEN, str(error))
                for _ in range(place + 1, len(parts)):
                    read.request_ended(failed=True)  # never posted
                self._give_back(work, failed=True)
                break
        for _ in range(SOON_LOOKS if soon else 0):
            if read.ended.is_set():
                return read
            self._take()
        self._expect()
        return read

    def _has_room(self, line: Line, requests: int) -> bool:
        return all(room.places - room.taken >= requests for room in (line.room, self._room))

    async def settle(self, line: Line, reads: Iterable[Read]) -> None:
        """Return when nothing writes for these reads any more. Not cancelled; takes seconds at the most."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(DRAIN_SECONDS):
                for read in reads:
                    await read.ended.wait()
                return
            line.stop(Meaning.GONE, "reads over RDMA did not end")
            await self.retire(line)

    async def retire(self, line: Line) -> None:
        """End a line: whatever is under way has ended when this returns. Not cancelled."""
        with trio.CancelScope(shield=True):
            line.stop(Meaning.GONE, "the RDMA connection was closed")
            with trio.move_on_after(DRAIN_SECONDS):
                await line.idle.wait()
        self._destroy(line)

    def _destroy(self, line: Line) -> None:
        """Destroy a queue pair: the device touches nothing for it after that."""
        line.pair.close()
        for number, work in list(self._under_way.items()):
            if work.line is line:
                del self._under_way[number]
                self._give_back(work, failed=True)
        self._freed.unpark_all()

    def close(self) -> None:
        """Close the completion queue; all lines must be retired."""
        assert not self._under_way
        self.completions.close()
