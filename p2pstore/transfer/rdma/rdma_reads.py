"""One-sided reads under way: posted, counted, told to their waiters. Under trio.

All queue pairs of a device share one completion queue. One task at a time sleeps on its descriptor and hands out what
arrived: the only waiter where there is one, else `ReadEngine.run`. Memory that is read into
belongs to the device until the read has ended: by its completion, or because its queue pair was destroyed. A reader
that is cancelled sees to that (`settle`, `Read.when_ended`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import trio

from p2pstore.errors import DeadlineExceeded, Unavailable
from p2pstore.memory.segment_layout import SLOT_BYTES, Geometry
from p2pstore.transfer.rdma.rdma_rules import (
    Meaning,
    RemoteMemory,
    WorkRoom,
    describe_status,
    meaning_of,
    split_read,
)
from p2pstore.transfer.rdma.rdma_staging import Registered
from p2pstore.transfer.rdma.rdma_verbs import Completion, Device, QueuePair, ReadWork

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
        self.line = line
        self._left = requests
        self._failed = False
        self._event: trio.Event | None = None
        self._waiting: trio.CancelScope | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether nothing writes to the memory any more."""
        return not self._left

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once nothing writes to the memory any more: at once if that is so."""
        if self.ended:
            callback()
        else:
            self._callbacks.append(callback)
            self.line.engine.expect()

    async def wait(self, seconds: float) -> None:
        """Wait for the end. Raises `ReadFailed`, and `DeadlineExceeded` when it does not come in time: then the
        memory still belongs to the device."""
        if self._left:
            with trio.move_on_after(seconds) as self._waiting:
                if self.line.engine.has_nobody:
                    await self.line.engine.look_until(self)
                else:
                    await self.sleep()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self._left:
            text = f"a read over RDMA did not end within {seconds:g} s"
            self.line.stop(Meaning.GONE, text)
            raise DeadlineExceeded(text)
        if self._failed:
            self.line.check()

    async def sleep(self) -> None:
        """Sleep until the end, however it went."""
        if self._event is None:
            self._event = trio.Event()
        if self._left:
            self.line.engine.expect()
            await self._event.wait()

    def look_again(self) -> None:
        """It ended without a completion, which would have woken its waiter."""
        if self._waiting is not None:
            self._waiting.cancel()

    def request_ended(self, *, failed: bool) -> None:
        """One of the work requests did."""
        self._failed = self._failed or failed
        self._left -= 1
        if self._left == 0:
            if self._event is not None:
                self._event.set()
            for callback in self._callbacks:
                callback()


class Line:
    """A queue pair, and the memory at its other end: none until it is connected."""

    def __init__(self, engine: ReadEngine, pair: QueuePair, requests: int) -> None:
        self.engine = engine
        self.pair = pair
        self.memory = RemoteMemory(0, 0, 0)
        self.geometry = NO_GEOMETRY
        self.seen = SeenSlots(NO_GEOMETRY)
        self.room = WorkRoom(requests)
        self.failure: ReadFailed | None = None
        self.used_at = trio.current_time()
        self.idle = trio.lowlevel.ParkingLot()
        """Set for waiters when nothing is under way."""
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
            except Unavailable as error:  # a lost device: other reads end with the queue pair
                logger.warning("%s", error)


class Piece(NamedTuple):
    """Bytes (above 0) at `offset` of the other side's memory, and the address that they are read to."""

    offset: int
    length_bytes: int
    address: int


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
        self._under_way: dict[int, Read] = {}
        self._numbers = itertools.count(1)
        self._freed = trio.lowlevel.ParkingLot()
        self._armed = False
        """Whether the descriptor will tell of the next completion."""
        self._looking = False
        """Whether a task sleeps on the descriptor, or is about to."""
        self._expecting = False
        """Whether a read under way needs `run`."""
        self._called = trio.lowlevel.ParkingLot()

    @property
    def under_way(self) -> int:
        """Work requests whose end was not seen yet."""
        return len(self._under_way)

    @property
    def has_nobody(self) -> bool:
        """Whether no task hands out completions, and none needs that they are handed out."""
        return not (self._looking or self._expecting)

    async def run(self) -> None:
        """Hand out completions that others count on until cancelled, or until the device is lost: then every read has
        failed, and `lost` says why."""
        while not self.lost:
            if self._expecting and not self._looking:
                await self._look_while(lambda: bool(self._under_way))
                self._expecting = False
            else:
                await self._called.park()

    async def look_until(self, read: Read) -> None:
        """Hand out completions until this read has ended. For a reader that finds that this `has_nobody`: woken by
        `run`, it would go on a turn of the event loop later."""
        try:
            await self._look_while(lambda: not read.ended)
        finally:
            if self._expecting:
                self._called.unpark_all()

    async def _look_while(self, wanted: Callable[[], bool]) -> None:
        assert not self._looking
        self._looking = True
        try:
            while wanted() and not self.lost:
                if self._arm():
                    continue
                await trio.lowlevel.wait_readable(self.completions.descriptor)
                try:
                    self.completions.acknowledge()
                except Unavailable as error:
                    self._lose(error)
                self._armed = False
                self._take()
        finally:
            self._looking = False

    def expect(self) -> bool:
        """Have completions handed out until nothing is under way, before a task sleeps. Those there are taken now:
        True if there were any, or the device is lost, so that the task looks again before it sleeps."""
        self._expecting = True
        if not self._looking:
            self._called.unpark_all()
        return self._arm()

    def _arm(self) -> bool:
        """Have the descriptor tell of the next completion. It does not tell of what came before, so that is taken now:
        whether something was, or the device is lost."""
        if self.lost:
            return True
        if self._armed:
            return False
        try:
            self.completions.arm()
        except Unavailable as error:
            self._lose(error)
            return True
        self._armed = True
        return self._take()

    def _take(self) -> bool:
        """Hand out the completions that are there; whether there were any, or the device is lost."""
        before = len(self._under_way)
        found = POLL_COMPLETIONS
        while found == POLL_COMPLETIONS and not self.lost:
            try:
                completions = self.completions.poll(POLL_COMPLETIONS)
            except Unavailable as error:
                self._lose(error)
                return True
            for each in completions:
                self._ended(each)
            found = len(completions)
        if len(self._under_way) == before:
            return False
        self._freed.unpark_all()
        return True

    def _lose(self, error: Unavailable) -> None:
        """The device is of no use any more."""
        logger.error("%s: nothing is read through it until this peer is started again", error)
        self.lost = str(error)
        for line in {read.line for read in self._under_way.values()}:
            line.fail(Meaning.BROKEN, self.lost)
            self._destroy(line)
        self.when_lost()

    def _ended(self, completion: Completion) -> None:
        read = self._under_way.pop(completion.work_id, None)
        if read is None:  # of a queue pair that was destroyed
            return
        meaning = meaning_of(completion.status)
        if meaning is not Meaning.DONE:
            text = f"a read over RDMA failed: {describe_status(completion.status)}"
            read.line.fail(meaning, text)
        self._give_back(read, failed=meaning is not Meaning.DONE)

    def _give_back(self, read: Read, *, failed: bool) -> None:
        line = read.line
        self._room.give_back()
        line.room.give_back()
        if not line.room.taken:
            line.idle.unpark_all()
        read.request_ended(failed=failed)

    async def read(self, line: Line, piece: Piece, memory: Registered, *, soon: int = 0) -> Read:
        """`read_pieces`, of one."""
        (read,) = await self.read_pieces(line, [piece], memory, soon=soon)
        return read

    async def read_pieces(
        self, line: Line, pieces: Sequence[Piece], memory: Registered, *, soon: int = 0
    ) -> list[Read]:
        """Begin to read into addresses inside `memory`, in this order. Waits while too much is under way; nothing has
        begun when that is cancelled. The end of the first `soon` is looked for a few times at once: a small read takes
        microseconds, waking two tasks ten times as long.

        Raises `ReadFailed` for a line that failed, `ProtocolError` for bytes outside of the other side's memory.
        """
        region = memory.regions[self.number]
        max_message_bytes = self.device.limits.max_message_bytes
        reads: list[Read] = []
        works: list[ReadWork] = []
        of_works: dict[int, Read] = {}
        for offset, length_bytes, address in pieces:
            start = line.memory.at(offset, length_bytes)
            assert region.holds(address, length_bytes)
            read = Read(line, -(-length_bytes // max_message_bytes))
            reads.append(read)
            for at, size in split_read(length_bytes, max_message_bytes):
                work_id = next(self._numbers)
                works.append(ReadWork(work_id, address + at, size, start + at))
                of_works[work_id] = read
        await self._room_for(line, len(works))
        line.used_at = trio.current_time()
        self._room.take(len(works))
        line.room.take(len(works))
        self._under_way.update(of_works)
        try:
            line.pair.read(works, region, line.memory.key)
        except Unavailable as error:  # some of them may have begun
            line.fail(Meaning.BROKEN, str(error))
            self._destroy(line)
        for _ in range(SOON_LOOKS if soon else 0):
            if reads[soon - 1].ended:
                break
            self._take()
        return reads

    def most_pieces(self, line: Line, piece_bytes: int) -> int:
        """How many pieces of such a size may be begun without waiting for others, at least 1."""
        requests = -(-piece_bytes // self.device.limits.max_message_bytes)
        return max(1, min(line.room.left, self._room.left) // requests)

    async def _room_for(self, line: Line, requests: int) -> None:
        """Wait until `requests` more may be posted. Raises `ReadFailed`."""
        if requests > min(line.room.places, self._room.places):
            raise ReadFailed(Meaning.BROKEN, "the RDMA device takes too few or too small requests")
        while True:
            line.check()
            if self.lost:
                raise ReadFailed(Meaning.BROKEN, self.lost)
            if requests <= min(line.room.left, self._room.left):
                return
            if not self.expect():
                await self._freed.park()

    async def settle(self, line: Line, reads: Iterable[Read]) -> None:
        """Return when nothing writes for these reads any more. Not cancelled; takes seconds at the most."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(DRAIN_SECONDS):
                for read in reads:
                    await read.sleep()
                return
            line.stop(Meaning.GONE, "reads over RDMA did not end")
            await self.retire(line)

    async def retire(self, line: Line) -> None:
        """End a line: whatever is under way has ended when this returns. Not cancelled."""
        with trio.CancelScope(shield=True):
            line.stop(Meaning.GONE, "the RDMA connection was closed")
            with trio.move_on_after(DRAIN_SECONDS):
                while line.room.taken and not self.lost:
                    if not self.expect():
                        await line.idle.park()
        self._destroy(line)

    def _destroy(self, line: Line) -> None:
        """Destroy a queue pair: the device touches nothing for it after that."""
        line.pair.close()
        for number, read in list(self._under_way.items()):
            if read.line is line:
                del self._under_way[number]
                self._give_back(read, failed=True)
                read.look_again()
        self._freed.unpark_all()

    def close(self) -> None:
        """Close the completion queue; all lines must be retired."""
        assert not self._under_way
        self.completions.close()


SLOTS_TOGETHER: Final = 16
"""Read at once: 1 KiB, which is one packet on most paths."""
MAX_KEPT: Final = 256
"""Of what was read at once."""


class SeenSlots:
    """Those of one segment; the oldest are forgotten first."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._rows: dict[int, bytes] = {}

    def extent(self, number: int) -> tuple[int, int]:
        """Where the slots that are read with this one lie in the segment, and how long they are together."""
        first = number - number % SLOTS_TOGETHER
        count = min(SLOTS_TOGETHER, self._geometry.slots - first)
        return self.offset(first), count * SLOT_BYTES

    def offset(self, number: int) -> int:
        """Where a slot lies in the segment."""
        return self._geometry.slots_offset + number * SLOT_BYTES

    def take_in(self, number: int, packed: bytes) -> None:
        """The slots of `extent(number)` were read."""
        row = number // SLOTS_TOGETHER
        self._rows.pop(row, None)
        self._rows[row] = packed
        if len(self._rows) > MAX_KEPT:
            del self._rows[next(iter(self._rows))]

    def find(self, number: int) -> bytes:
        """A slot as it was seen last, empty when it was not."""
        row, at = divmod(number, SLOTS_TOGETHER)
        return self._rows.get(row, b"")[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]
