"""A disk that goes wrong in every way that disks do, from one seed: a `Disk` of `p2pstore.ssd_tier`.

Its methods wait for nothing but `pause`, which the caller passes in: `trio.sleep` in tests under trio, the
simulator's own `sleep` there, or none; then `at_once` runs them without any loop. With a pause, requests overlap
and can be cancelled, memory that a read fills holds rubbish until the read returns, and a write whose memory
changed meanwhile is a `RuntimeError`.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from p2pstore.ssd_tier.disk_protocol import (
    ALIGNMENT_BYTES,
    SECTOR_BYTES,
    Check,
    Waits,
    checked_bytes,
    refuse_closed,
)

T = TypeVar("T")

RUBBISH = bytes(range(1, 256))


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes and where they go: whole sectors."""

    position: int
    data: bytes

    @property
    def sectors(self) -> range:
        """Where each of its sectors begins, in `data`."""
        return range(0, len(self.data), SECTOR_BYTES)


class Platter:
    """Both contents of a disk, and the writes that make the difference.

    Twice the size in memory, and a copy of what was not synced: for disks of some MiB.
    """

    def __init__(self, rng: Random, size_bytes: int) -> None:
        self.visible = bytearray(size_bytes)
        self.written = 0
        """The number of writes, ever."""
        self._pending: list[Write] = []
        """The last of them: those that were not synced."""
        self._durable = bytearray(size_bytes)
        self._rng = rng

    def write(self, write: Write) -> None:
        """It is read from now on, and lost or torn by a crash until it is synced."""
        self._put(self.visible, write)
        self._pending.append(write)
        self.written += 1

    def write_some(self, write: Write) -> None:
        """Only some of its sectors, as it comes."""
        for part in self._some_sectors(write):
            self.write(part)

    def sync(self, covered: int) -> None:
        """The first `count` writes ever are durable."""
        for write in self._take_pending(covered):
            self._put(self._durable, write)

    def sync_failed(self, covered: int) -> None:
        """Of the first `count` writes ever, those that were pending are durable in part. The rest of them may still
        be read, or not, and no later sync makes it durable: the kernel has marked it clean."""
        failed = self._take_pending(covered)
        for write in failed:
            self._land(write)
        for write in failed:
            if self._rng.random() < 0.5:
                span = slice(write.position, write.position + len(write.data))
                self.visible[span] = self._durable[span]
        for write in self._pending:
            self._put(self.visible, write)

    def crash(self, under_way: list[Write]) -> None:
        """The power fails. Each write that is pending or under way is lost, there, or torn."""
        for write in [*self._pending, *under_way]:
            self._land(write)
        self._pending = []
        self.visible[:] = self._durable

    def flip_bit(self, position: int) -> None:
        """Some bit of this byte, for good."""
        bit = 1 << self._rng.randrange(8)
        self.visible[position] ^= bit
        self._durable[position] ^= bit

    def put(self, position: int, data: bytes) -> None:
        """As if it had always been there."""
        write = Write(position, data)
        self._put(self.visible, write)
        self._put(self._durable, write)

    def _take_pending(self, covered: int) -> list[Write]:
        """Those among the first `count` writes ever that are pending still: they are not any more."""
        kept = max(0, self.written - covered)
        taken = self._pending[: max(0, len(self._pending) - kept)]
        del self._pending[: len(taken)]
        return taken

    def _land(self, write: Write) -> None:
        """Durable as a whole, in part, or not at all."""
        match self._rng.randrange(3):
            case 0:
                self._put(self._durable, write)
            case 1:
                for part in self._some_sectors(write):
                    self._put(self._durable, part)

    def _some_sectors(self, write: Write) -> list[Write]:
        """A beginning, an end, or any: some of what a request writes, as it may be left by a failure."""
        sectors, rng = list(write.sectors), self._rng
        middle = rng.randrange(len(sectors) + 1)
        kept = rng.choice(
            [sectors[:middle], sectors[middle:], [each for each in sectors if rng.random() < 0.5]]
        )
        return [Write(write.position + at, write.data[at : at + SECTOR_BYTES]) for at in kept]

    @staticmethod
    def _put(content: bytearray, write: Write) -> None:
        content[write.position : write.position + len(write.data)] = write.data


@dataclass(slots=True)
class DiskFaults:
    """Faults, each as the probability of one request. Change it at any time; 1.0 makes it permanent."""

    read_error: float = 0.0
    """EIO; some of the memory was filled."""
    short_read: float = 0.0
    """EIO, as `Disk` has it: the disk gave less than was asked for."""
    misdirected_read: float = 0.0
    """A read returns bytes of another place; the next read may be right."""
    rot: float = 0.0
    """A bit of what is read has flipped, for good."""
    write_error: float = 0.0
    """EIO; some sectors were written."""
    no_space: float = 0.0
    """ENOSPC; some sectors were written."""
    read_only: float = 0.0
    """EROFS; nothing was written."""
    lost_write: float = 0.0
    """Nothing was written, and no error is reported."""
    misdirected_write: float = 0.0
    """Written elsewhere, and no error is reported."""
    sync_error: float = 0.0
    """EIO; of the writes before it, any sectors survive a crash, and no later sync changes that."""
    latency_seconds: float = 0.0
    """How long a request takes on average."""
    hang: float = 0.0
    """It takes `hang_seconds`, then it is done as if nothing had been."""
    hang_seconds: float = 3600.0


class FaultyDisk:
    """`size_bytes` (some MiB: it is held in memory twice) of zeros, at first."""

    def __init__(
        self,
        seed: int,
        size_bytes: int,
        faults: DiskFaults | None = None,
        pause: Callable[[float], Awaitable[object]] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if size_bytes <= 0 or size_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"a disk's size is a multiple of {ALIGNMENT_BYTES}, not {size_bytes}")
        self.faults = DiskFaults() if faults is None else faults
        self.happened: Counter[str] = Counter()
        """How often each fault came, by the names of `DiskFaults`; also `reads`, `writes`, `syncs`, `bytes_read`,
        `bytes_written` and `crashes`."""
        self._rng = Random(seed)
        self._platter = Platter(self._rng, size_bytes)
        self._now = now
        self._begun: dict[object, float] = {}
        self._last_end = 0.0
        self.pause = pause
        """What a request waits for, told for how many seconds."""
        self._under_way: list[Write] = []
        self._life = 0
        self.misplaced = ""
        """As `Disk` has it; to be set by tests."""
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return len(self._platter.visible)

    async def read_into(
        self, position: int, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        refuse_closed(self._closed)
        length = checked_bytes(position, buffers, self.size_bytes, reading=True)
        self.happened["reads"] += 1
        if self.pause is not None:
            _fill(buffers, RUBBISH * (length // len(RUBBISH) + 1))
        await self._wait()
        if length and self._comes("rot", self.faults.rot):
            self._platter.flip_bit(position + self._rng.randrange(length))
        if self._comes("misdirected_read", self.faults.misdirected_read):
            position = self._elsewhere(length)
        for fault, chance in (
            ("read_error", self.faults.read_error),
            ("short_read", self.faults.short_read),
        ):
            if self._comes(fault, chance):
                length = self._rng.randrange(0, max(1, length), SECTOR_BYTES)
                _fill(buffers, bytes(self._platter.visible[position : position + length]))
                raise OSError(errno.EIO, f"simulated {fault} at {position}")
        _fill(buffers, bytes(self._platter.visible[position : position + length]))
        self.happened["bytes_read"] += length
        if check is not None:
            check()

    async def write_from(self, position: int, buffers: Sequence[memoryview | bytes]) -> None:
        refuse_closed(self._closed)
        length = checked_bytes(position, buffers, self.size_bytes, reading=False)
        self.happened["writes"] += 1
        write = Write(position, b"".join(buffers))
        self._under_way.append(write)
        life = self._life
        try:
            await self._wait()
        except BaseException:
            if life == self._life:
                self._platter.write_some(write)
            raise
        finally:
            if life == self._life:
                self._under_way.remove(write)
        if b"".join(buffers) != write.data:
            raise RuntimeError(f"memory was changed while it was written to {position}")
        self._land(write)
        self.happened["bytes_written"] += length

    def _land(self, write: Write) -> None:
        """A write that was not cancelled, with its faults."""
        faults = self.faults
        if self._comes("read_only", faults.read_only):
            raise OSError(errno.EROFS, "simulated: the disk is read-only")
        for fault, chance, error in (
            ("write_error", faults.write_error, errno.EIO),
            ("no_space", faults.no_space, errno.ENOSPC),
        ):
            if self._comes(fault, chance):
                self._platter.write_some(write)
                raise OSError(error, f"simulated {fault} at {write.position}")
        if self._comes("lost_write", faults.lost_write):
            return
        if self._comes("misdirected_write", faults.misdirected_write):
            write = Write(self._elsewhere(len(write.data)), write.data)
        self._platter.write(write)

    async def sync(self) -> None:
        refuse_closed(self._closed)
        self.happened["syncs"] += 1
        covered, failures = self._platter.written, self.happened["sync_error"]
        await self._wait()
        # One that failed meanwhile has taken writes away that this one covers as well.
        if failures != self.happened["sync_error"]:
            raise OSError(errno.EIO, "simulated: another sync failed")
        if self._comes("sync_error", self.faults.sync_error):
            self._platter.sync_failed(covered)
            raise OSError(errno.EIO, "simulated sync_error")
        self._platter.sync(covered)

    @property
    def waits(self) -> Waits:
        """As `Disk` has it, in the time of `now`: without one, no time passes."""
        if not self._begun:
            return Waits()
        begun, now = min(self._begun.values()), self._now()
        return Waits(now - begun, now - max(begun, self._last_end))

    async def inspect(self) -> None:
        if self.pause is not None:
            await self.pause(self.faults.latency_seconds)

    def close(self) -> None:
        self._closed = True

    def reopen(self) -> None:
        """All written bytes are there, synced or not."""
        self._closed = False

    def crash(self) -> None:
        """The machine loses its power, and starts again: each write since the last sync, and each under way, is
        there, lost or torn at a sector. Requests under way end with EIO and change nothing any more."""
        self.happened["crashes"] += 1
        self._life += 1
        self._platter.crash(self._under_way)
        self._under_way = []
        self._closed = False

    def damage(self, position: int, length: int = 1) -> None:
        """Flip a bit in each of these bytes, for good."""
        for each in range(position, position + length):
            self._platter.flip_bit(each)

    def peek(self, position: int, length: int) -> bytes:
        """The bytes there, read without faults. Any position, any length."""
        return bytes(self._platter.visible[position : position + length])

    def poke(self, position: int, data: bytes) -> None:
        self._platter.put(position, data)

    async def _wait(self) -> None:
        """The time that a request takes. Raises `OSError` when the machine crashed meanwhile."""
        life, request = self._life, object()
        self._begun[request] = self._now()
        try:
            if self.pause is not None:
                await self.pause(self.faults.latency_seconds * self._rng.expovariate(1.0))
                if self._comes("hang", self.faults.hang):
                    await self.pause(self.faults.hang_seconds)
        finally:
            del self._begun[request]
            self._last_end = self._now()
        if life != self._life:
            raise OSError(errno.EIO, "simulated: the machine has crashed")

    def _comes(self, fault: str, chance: float) -> bool:
        if chance <= 0.0 or self._rng.random() >= chance:
            return False
        self.happened[fault] += 1
        return True

    def _elsewhere(self, length: int) -> int:
        """Any place with room for this much."""
        return self._rng.randrange(0, self.size_bytes - length + 1, ALIGNMENT_BYTES)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing, such as the methods of a `FaultyDisk` without a pause, to its end and return its
    result. Raises what it raises, and `RuntimeError` when it waits after all."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("it waits for something")


def _fill(buffers: Sequence[memoryview], data: bytes) -> None:
    """As far as the data goes."""
    start = 0
    for buffer in buffers:
        part = data[start : start + len(buffer)]
        buffer[: len(part)] = part
        start += len(part)
