"""RDMA of one peer: a device of this machine, the segment registered with it, reading and being read.

Where there is no device, nothing of pyverbs is imported. Registering memory holds the interpreter lock, so it happens
before the peer serves anybody, and after the kernel has provided the pages, which takes most of the time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError, P2PStoreError, Unavailable
from p2pstore.objects import CHUNK_BYTES
from p2pstore.peer.prefaulting import provide_pages
from p2pstore.transfer.data_pool import DataPool
from p2pstore.transfer.memory import SharedMemory
from p2pstore.transfer.rdma_serving import RdmaServer
from p2pstore.transfer.rdma_verbs import Device

if TYPE_CHECKING:
    from p2pstore.transfer.rdma import RdmaTransport
    from p2pstore.transfer.rdma_reads import ReadEngine

logger = logging.getLogger("p2pstore.peer")

DEVICES: Final = Path("/sys/class/infiniband")
STAGING_BYTES: Final = 2 * CHUNK_BYTES
"""Little: what a peer reads goes to its segment, which is registered."""


@dataclass(frozen=True, slots=True)
class PeerRdma:
    """What a peer has of RDMA."""

    server: RdmaServer
    transport: RdmaTransport
    engine: ReadEngine

    @property
    def works(self) -> bool:
        """False once the device is lost."""
        return not self.engine.lost


@asynccontextmanager
async def open_rdma(
    config: PeerConfig, memory: SharedMemory, pool: DataPool
) -> AsyncIterator[PeerRdma | None]:
    """RDMA for the length of the block; None when this peer is not to use it, or has no device.

    Raises `ConfigError` when the settings ask for RDMA (transport rdma, or a device by name) and it does not work. Else
    a device that does not work is only logged.
    """
    names = device_names(config)
    if not names:
        yield None
        return
    # What most machines have no use for is not imported there.
    from p2pstore.transfer.rdma import RdmaTransport, open_rdma_reading
    from p2pstore.transfer.rdma_staging import Staging, address_of

    with ExitStack() as stack:
        try:
            device = open_first(names)
            stack.callback(device.close)
            await provide_pages(memory)
            region = device.register(address_of(memory.view), len(memory.view), remote_read=True)
            staging = Staging.on(device, STAGING_BYTES)
            server = RdmaServer(device, region)
        except P2PStoreError as error:
            if config.transport == "rdma" or config.rdma_device:
                raise ConfigError(f"transport: {error}") from error
            logger.warning("rdma is not used: %s", error, extra={"event": "rdma_unusable"})
            stack.close()
            yield None
            return
        stack.callback(server.close)
        async with open_rdma_reading(device) as (engine, lines):
            transport = RdmaTransport(
                device, pool, lines, engine, staging=staging, registered=[region]
            )
            logger.info(
                "rdma through %s (%s)",
                device.name,
                device.interface or "InfiniBand",
                extra={"event": "rdma", "device": device.name},
            )
            yield PeerRdma(server, transport, engine)


def device_names(config: PeerConfig, folder: Path = DEVICES) -> Sequence[str]:
    """The devices to try, best first; none when this peer is not to use RDMA, or nobody asked for it and there is
    none. Raises `ConfigError` when there is none of those that it must use."""
    if config.transport not in ("auto", "rdma") or config.data_tls == "on":
        return ()
    found = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    if config.rdma_device:
        missing = [name for name in config.rdma_device if name not in found]
        if missing:
            raise ConfigError(
                f"rdma_device: this machine has no RDMA device {missing[0]}; it has "
                f"{', '.join(found) or 'none'}"
            )
        return config.rdma_device
    if config.transport == "rdma" and not found:
        raise ConfigError(
            "transport: rdma needs an RDMA device, and this machine has none (nothing under "
            f"{folder}): load its driver, or use auto"
        )
    return found


def open_first(names: Sequence[str]) -> Device:
    """The first device that works. Raises `Unavailable` that says of each why it does not."""
    problems = []
    for name in names:
        try:
            return Device(name)
        except Unavailable as error:
            problems.append(str(error))
    raise Unavailable("; ".join(dict.fromkeys(problems)))
