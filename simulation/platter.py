"""The bytes of a simulated disk: as read now, and as a crash would leave them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from p2pstore.ssd_tier.disk_protocol import SECTOR_BYTES


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
        bit = 1 << self._rng.randrange(8)
        self.visible[position] ^= bit
        self._durable[position] ^= bit

    def put(self, position: int, data: bytes) -> None:
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
