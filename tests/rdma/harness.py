"""An owner and readers over RDMA, on two devices of this machine (or one, where there is no other)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import trio

from p2pstore.streams import Driver
from p2pstore.transfer.data_server import (
    DataServer,
    ServerLimits,
    listener_address,
    open_data_listeners,
)
from p2pstore.transfer.rdma import RdmaTransport, open_rdma_reading
from p2pstore.transfer.rdma_reads import ReadEngine
from p2pstore.transfer.rdma_serving import RdmaServer
from p2pstore.transfer.rdma_staging import Staging, address_of
from p2pstore.transfer.rdma_verbs import Device, Region, device_names
from p2pstore.transfer.segment import Segment
from p2pstore.transfer.transport import RemoteCopy
from tests.contract.test_transport import (
    OWNER,
    RING,
    Backend,
    TcpHarness,
    Verifier,
    _buffers,
    grant,
    until,
)

STAGING_BYTES = 4 << 20


class RdmaHarness(TcpHarness):
    """A `Harness`, for the contract suite and for what only RDMA does."""

    device: Device
    reading_device: Device
    region: Region
    rdma: RdmaServer
    engine: ReadEngine
    staging: Staging
    lines: trio.Nursery

    @classmethod
    @contextlib.asynccontextmanager
    async def open_rdma(
        cls, segment: Segment, limits: ServerLimits | None = None
    ) -> AsyncIterator[RdmaHarness]:
        harness = cls(segment)
        names = device_names()
        (listener,) = await open_data_listeners(["127.0.0.1:0"])
        harness.address = listener_address(listener)
        with Device(names[0]) as harness.device, Device(names[-1]) as harness.reading_device:
            memory = _buffers[segment.geometry.data_bytes]
            harness.region = harness.device.register(
                address_of(memory), len(memory), remote_read=True
            )
            harness.rdma = RdmaServer(harness.device, harness.region)
            harness.server = DataServer(
                harness.backend,
                ring=RING,
                signer=OWNER,
                verifier=Verifier(),
                incarnation=7,
                limits=limits,
                rdma=harness.rdma,
            )
            harness.staging = Staging.on(harness.reading_device, STAGING_BYTES)

            async def serve() -> None:
                with harness.stop:
                    await harness.server.serve([listener])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                async with open_rdma_reading(harness.reading_device) as reading:
                    harness.engine, harness.lines = reading
                    yield harness
                assert harness.engine.under_way == 0
                assert (harness.staging.small.taken, harness.staging.large.taken) == (0, 0)
                for pool in harness._pools:
                    pool.close()
                await until(lambda: harness.rdma.readers == 0)
                harness.stop.cancel()
            harness.rdma.close()
        assert harness.server.connections == 0
        assert harness.in_flight() == 0

    def transport(  # type: ignore[override]  # mypy: another transport than its base class's
        self, driver: Driver, progress_seconds: float = 5.0, registered: Sequence[Region] = ()
    ) -> RdmaTransport:
        return RdmaTransport(
            self.reading_device,
            self.pool(driver, progress_seconds),
            self.lines,
            self.engine,
            staging=self.staging,
            registered=registered,
            progress_seconds=progress_seconds,
        )

    def copy(self, digest: bytes = b"") -> RemoteCopy:
        entry = self.segment.find(digest, 0.0) if digest else None
        number = entry.slot if entry is not None else 0
        return RemoteCopy(OWNER.peer_id, (self.address,), grant(), member=1, slot=number, rdma=True)


__all__ = ["Backend", "RdmaHarness"]
