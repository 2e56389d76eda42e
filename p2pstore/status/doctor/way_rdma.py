"""The way to a peer by RDMA: from its memory, through a device of this machine. Shell (trio)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from p2pstore.config import PeerConfig
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import PeerRecord
from p2pstore.objects import MIB
from p2pstore.peer.peer_rdma import device_names, open_devices
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.status.doctor import way_rules
from p2pstore.status.doctor.finding import Finding, skipped, warning
from p2pstore.transfer.rdma.rdma_staging import Staging
from p2pstore.transfer.rdma.rdma_transport import RdmaTransport, open_rdma_reading
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemoteCopy

NAME: Final = "rdma from it"
STAGING_BYTES: Final = 8 * MIB


async def examine_rdma(
    record: PeerRecord, granted: GrantedTicket, seconds: float, report: Callable[[Finding], None]
) -> None:
    """Read from the peer's memory for `seconds`. Peers only read each other's memory, so there is no other
    direction."""
    names = device_names(PeerConfig())
    if all(offer.name != RdmaTransport.name for offer in record.transports):
        report(skipped(NAME, "the peer does not let others read it by RDMA"))
    elif not names:
        report(
            skipped(NAME, "the peer lets others read it by RDMA, but this machine has no device")
        )
    else:
        copy = RemoteCopy(record.peer_id, tuple(record.data), granted, rdma=True)
        try:
            device, moved, elapsed = await _measure(names, copy, seconds)
        except P2PStoreError as error:
            report(
                warning(
                    NAME,
                    "does not work",
                    f"both ends have a device, but: {error}",
                    "let UDP port 4791 pass, and see this command's findings about rdma on both machines",
                )
            )
        else:
            report(way_rules.judge_rate(NAME, moved, elapsed, f"through {device}"))


async def _measure(
    names: Sequence[str], copy: RemoteCopy, seconds: float
) -> tuple[str, int, float]:
    """(device, bytes, seconds)."""
    pool = DataPool(TrioDriver())
    try:
        (device,) = open_devices(names, most=1)
        with device:
            staging = Staging.on([device], STAGING_BYTES)
            async with open_rdma_reading([device]) as (engines, lines):
                transport = RdmaTransport(engines, pool, lines, staging=staging)
                return device.name, *await transport.measure(copy, seconds)
    finally:
        pool.close()
