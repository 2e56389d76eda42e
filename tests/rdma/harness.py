"""An owner and readers over RDMA, on the devices at both ends of a cable or two (one device is both ends)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from p2pstore.addresses import join_address
from p2pstore.memory.segment import Segment
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.rdma.rdma_reads import ReadEngine
from p2pstore.transfer.rdma.rdma_serving import RdmaServer
from p2pstore.transfer.rdma.rdma_staging import Registered, Staging
from p2pstore.transfer.rdma.rdma_transport import RdmaTransport, open_rdma_reading
from p2pstore.transfer.rdma.rdma_verbs import Completion, CompletionQueue, Device, device_names
from p2pstore.transfer.serving.data_server import DataServer, open_data_listeners
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import RemoteCopy
from tests.contract.test_transport import OWNER, RING, Backend, TcpHarness, Verifier, _buffers, grant
from tests.waiting import until

STAGING_BYTES = 4 << 20


def cables() -> list[tuple[str, str]]:
    """The devices at both ends of each cable: in the VM neighbours by name."""
    names = sorted(device_names())
    pairs = list(zip(names[::2], names[1::2], strict=False))
    return pairs or [(name, name) for name in names]


class SomeCompletions:
    """In place of `CompletionQueue.poll`: hands out a number of completions, one at a time, then those of `after`."""

    def __init__(
        self, queue: CompletionQueue, count: int, after: Callable[[], list[Completion]]
    ) -> None:
        self._poll = queue.poll
        self._left = count
        self._after = after

    def __call__(self, _: int) -> list[Completion]:
        if not self._left:
            return self._after()
        found = self._poll(1)
        self._left -= len(found)
        return found


class RdmaHarness(TcpHarness):
    """A `Harness`, for the contract suite and for what only RDMA does."""

    devices: list[Device]
    reading_devices: list[Device]
    memory: Registered
    rdma: RdmaServer
    engines: list[ReadEngine]
    staging: Staging
    lines: trio.Nursery

    @property
    def engine(self) -> ReadEngine:
        """That of the first device."""
        return self.engines[0]

    @classmethod
    @contextlib.asynccontextmanager
    async def open_rdma(
        cls, segment: Segment, limits: ServerLimits | None = None, *, cables_used: int = 1
    ) -> AsyncIterator[RdmaHarness]:
        harness = cls(segment)
        used = cables()[:cables_used]
        (listener,) = await open_data_listeners(["127.0.0.1:0"])
        harness.address = join_address(*listener.getsockname()[:2])
        with contextlib.ExitStack() as stack:
            harness.devices = [stack.enter_context(Device(name)) for name, _ in used]
            harness.reading_devices = [stack.enter_context(Device(name)) for _, name in used]
            memory = _buffers[segment.geometry.data_bytes]
            harness.memory = Registered.with_all(harness.devices, memory, remote_read=True)
            harness.rdma = RdmaServer(harness.devices, harness.memory)
            harness.server = DataServer(
                harness.backend,
                ring=RING,
                signer=OWNER,
                verifier=Verifier(),
                incarnation=7,
                limits=limits,
                rdma=harness.rdma,
            )
            harness.staging = Staging.on(harness.reading_devices, STAGING_BYTES)

            async def serve() -> None:
                with harness.stop:
                    await harness.server.serve([listener])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                async with open_rdma_reading(harness.reading_devices) as reading:
                    harness.engines, harness.lines = reading
                    yield harness
                assert not any(engine.under_way for engine in harness.engines)
                assert (harness.staging.small.taken, harness.staging.large.taken) == (0, 0)
                for pool in harness._pools:
                    pool.close()
                await until(lambda: harness.rdma.readers == 0)
                harness.stop.cancel()
            harness.rdma.close()
        assert harness.server.connections == 0
        assert harness.in_flight() == 0

    def transport(  # type: ignore[override]  # mypy: another transport than its base class's
        self,
        driver: Driver,
        progress_seconds: float = 5.0,
        registered: Sequence[Registered] = (),
        preferred: int | None = None,
    ) -> RdmaTransport:
        return RdmaTransport(
            self.engines,
            self.pool(driver, progress_seconds),
            self.lines,
            staging=self.staging,
            preferred=preferred,
            registered=registered,
            progress_seconds=progress_seconds,
        )

    def registered(self, memory: memoryview) -> Registered:
        """Memory to read into directly."""
        return Registered.with_all(self.reading_devices, memory, remote_read=False)

    def copy(self, digest: bytes = b"") -> RemoteCopy:
        entry = self.segment.find(digest, 0.0) if digest else None
        number = entry.slot if entry is not None else 0
        return RemoteCopy(OWNER.peer_id, (self.address,), grant(), member=1, slot=number, rdma=True)


__all__ = ["Backend", "RdmaHarness"]
