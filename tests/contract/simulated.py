"""An owner and its readers in virtual time, for the contract suite: the simulator's transport.

A pulling reader turns the kernel, one event between any two checkpoints of its driver. So readers of any world meet
each other, and the test beside them, at every moment of a read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from p2pstore.memory.segment import Segment
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver
from p2pstore.transfer.data_messages import ObjectReply, ObjectStatus
from p2pstore.transfer.reading.arriving import Destination
from p2pstore.transfer.transport import Pulled, RemoteCopy
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from simulation.tasks import Task
from simulation.transport import SimulatedTransport

READ_SECONDS = 0.002


@dataclass
class SimulatedOwner:
    """A host with one segment. It stands for its process: `end` ends that."""

    number: int
    segment: Segment
    memory: memoryview
    life: int = 1
    running: bool = True

    def sending_seconds(self, size_bytes: int) -> float:
        return 0.0

    def look(self, digest: bytes) -> ObjectReply | None:
        if not self.running:
            return None
        entry = self.segment.find(digest, time.time())
        if entry is None:
            return ObjectReply(ObjectStatus.NOT_FOUND, incarnation=7, sequence=42)
        return ObjectReply(
            ObjectStatus.OK,
            self.segment.table.slot_bytes(entry),
            self.segment.table.trailer_bytes(entry),
        )

    def end(self) -> None:
        """The process is gone, and its memory with it."""
        self.running = False
        self.life += 1
        self.memory[:] = bytes(len(self.memory))


class SimulatedHarness:
    """A `Harness`: host 0 reads, the others own objects."""

    def __init__(self, segment: Segment, memory: memoryview, faults: Faults | None = None) -> None:
        self.segment = segment
        self.kernel = Kernel(1)
        self.network = FaultyNetwork(self.kernel, faults or Faults())
        self.owners: dict[bytes, SimulatedOwner] = {}
        self.under_way = 0
        self.add_owner(segment, memory)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, segment: Segment, memory: memoryview) -> AsyncIterator[SimulatedHarness]:
        harness = cls(segment, memory)
        yield harness
        assert harness.under_way == 0
        assert harness.in_flight() == 0

    def add_owner(self, segment: Segment, memory: memoryview) -> SimulatedOwner:
        """One more host that owns objects; the first is host 1."""
        owner = SimulatedOwner(len(self.owners) + 1, segment, memory)
        self.owners[bytes([owner.number]) * 32] = owner
        return owner

    def transport(
        self, driver: Driver, progress_seconds: float = DEFAULT_PROGRESS_SECONDS
    ) -> SimulatedTransport:
        return _TurningTransport(self, driver, progress_seconds)

    def copy(self, digest: bytes = b"", member: int = 1) -> RemoteCopy:
        return RemoteCopy(bytes([member]) * 32, member=member)

    def in_flight(self) -> int:
        self.kernel.run_until(self.kernel.now + 10.0)  # whatever is on its way arrives
        return self.segment.leased_bytes

    def turn(self) -> None:
        """One event of the kernel."""
        before = self.kernel.events
        self.kernel.run_until(self.kernel.now + 10.0, stop=lambda: self.kernel.events > before)


class _TurningTransport(SimulatedTransport):
    """The simulator's transport for callers that are not part of the simulation."""

    def __init__(self, harness: SimulatedHarness, driver: Driver, progress_seconds: float) -> None:
        super().__init__(harness.network, 0, harness.owners, READ_SECONDS, progress_seconds)
        self._harness = harness
        self._driver = driver

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        pull = super().pull
        task = Task(self._harness.kernel, lambda: pull(copy, digest, destination))
        self._harness.under_way += 1
        try:
            while not task.ended:
                self._harness.turn()
                await self._driver.sleep(0)
        finally:
            task.cancel()
            self._harness.under_way -= 1
        return task.result()
