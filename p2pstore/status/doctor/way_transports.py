"""The way to a peer's data port: hello, round trips, clock, and bytes per second both ways. Shell (trio)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import trio

from p2pstore.addresses import is_loopback
from p2pstore.config import PeerConfig
from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
)
from p2pstore.gossip.records import PeerId, PeerRecord
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access
from p2pstore.objects import DEFAULT_NAMESPACE, KIB, MIB
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.status.doctor import way_rules
from p2pstore.status.doctor.finding import Failure, Finding, fine, skipped, warning
from p2pstore.status.doctor.way_rules import judge_data_failure
from p2pstore.transfer.data_messages import (
    MAX_MEASURE_BYTES,
    DataKind,
    Measure,
    Measured,
    Ping,
    split_data_address,
)
from p2pstore.transfer.rdma.rdma_serving import device_names, open_devices
from p2pstore.transfer.rdma.rdma_staging import Staging
from p2pstore.transfer.rdma.rdma_transport import RdmaTransport, open_rdma_reading
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.connection_pool import ConnectionPool, open_connection
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.transport import RemoteCopy

PINGS: Final = 20
CLOCK_READINGS: Final = 5
FIRST_BYTES: Final = 256 * KIB
"""The first measurement's; the next ones are as large as fits into a tenth of a second."""
STEP_SECONDS: Final = 0.1


async def examine_data_address(
    address: str,
    peer_id: bytes,
    granted: GrantedTicket,
    seconds: float,
    timeout_seconds: float,
    report: Callable[[Finding], None],
    *,
    same_host: bool,
) -> None:
    """Examine one data address; each direction is measured for `seconds`."""
    name = f"data {address}"
    stream, elsewhere = None, False
    try:
        at = split_data_address(address)
        elsewhere = not same_host and is_loopback(at.host)
        begin = time.monotonic()
        stream = await TrioDriver().connect_tcp(at.host, at.port, timeout_seconds)
        stream.progress_seconds = timeout_seconds
        connection = await open_connection(stream, at, peer_id, granted)
    except (P2PStoreError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        failure = _failure(error, connected=stream is not None)
        report(judge_data_failure(name, address, reason, failure, loopback_elsewhere=elsewhere))
        return
    try:
        opened = way_rules.format_seconds(time.monotonic() - begin)
        over = " over TLS" if at.tls else ""
        report(fine(name, f"admitted in {opened}{over}, protocol {connection.version}"))
        await _measure_tcp(connection, name, seconds, timeout_seconds, report)
    finally:
        connection.close()


def _failure(error: Exception, *, connected: bool) -> Failure:
    if isinstance(error, AuthenticationFailed | ProtocolMismatch | ProtocolError | ValueError):
        return Failure.BROKEN
    if isinstance(error, DeadlineExceeded) and connected:
        return Failure.DEADLINE
    return Failure.UNREACHABLE


async def _measure_tcp(
    connection: DataConnection,
    name: str,
    seconds: float,
    timeout_seconds: float,
    report: Callable[[Finding], None],
) -> None:
    try:
        report(way_rules.judge_round_trip("data round trip", await _round_trips(connection)))
    except (P2PStoreError, OSError) as error:
        report(judge_data_failure(name, "", str(error), _failure(error, connected=True)))
        return
    try:
        report(await _clock_skew(connection))
        for direction, upwards in (("from it", False), ("to it", True)):
            report(await _rate(connection, f"tcp {direction}", seconds, upwards=upwards))
    except DeadlineExceeded:
        report(way_rules.stalled("tcp", timeout_seconds))
    except (OSError, ProtocolError) as error:
        report(judge_data_failure(name, "", str(error), Failure.BROKEN))
    except P2PStoreError:
        report(skipped("tcp", "the peer runs a version that cannot be measured"))


async def _round_trips(connection: DataConnection) -> list[float]:
    seconds = []
    for _ in range(PINGS):
        begin = time.monotonic()
        await connection.request(DataKind.PING, Ping())
        seconds.append(time.monotonic() - begin)
    return seconds


async def _clock_skew(connection: DataConnection) -> Finding:
    """Of the quickest of a few readings: its answer says the time at most half a round trip off."""
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_READINGS):
        begin, begin_unix = time.monotonic(), time.time()
        reply = await connection.request(DataKind.MEASURE, Measure())
        elapsed = time.monotonic() - begin
        assert isinstance(reply, Measured)
        offset = reply.unix_ms / 1000 - (begin_unix + elapsed / 2)
        best = min(best or (elapsed, offset), (elapsed, offset))
    assert best is not None
    return way_rules.judge_clock_skew(best[1], best[0] / 2 + 0.0005)


async def _rate(connection: DataConnection, name: str, seconds: float, *, upwards: bool) -> Finding:
    """One direction, for about `seconds`, with requests of a size that suits the speed."""
    memory, nothing = memoryview(bytearray(MAX_MEASURE_BYTES)), memoryview(b"")
    moved, size, begin = 0, FIRST_BYTES, time.monotonic()
    end = begin + seconds
    while (now := time.monotonic()) < end:
        piece = memory[:size]
        some, _ = await connection.measure(
            piece if upwards else nothing,
            nothing if upwards else piece,
            partial(_is_over, min(end, now + STEP_SECONDS)),
        )
        moved += some
        wanted = some / (time.monotonic() - now) * STEP_SECONDS / 4
        size = max(FIRST_BYTES, min(MAX_MEASURE_BYTES, int(wanted)))
    return way_rules.judge_rate(name, moved, time.monotonic() - begin, "one connection")


def _is_over(end: float) -> bool:
    return time.monotonic() >= end


RDMA_NAME: Final = "rdma from it"
STAGING_BYTES: Final = 8 * MIB


async def examine_rdma(
    record: PeerRecord, granted: GrantedTicket, seconds: float, report: Callable[[Finding], None]
) -> None:
    """Read from the peer's memory for `seconds`. Peers only read each other's, so there is no other direction."""
    names = device_names(PeerConfig())
    if all(offer.name != RdmaTransport.name for offer in record.transports):
        report(skipped(RDMA_NAME, "the peer does not let others read it by RDMA"))
    elif not names:
        why = "the peer lets others read it by RDMA, but this machine has no device"
        report(skipped(RDMA_NAME, why))
    else:
        copy = RemoteCopy(record.peer_id, tuple(record.data), granted, rdma=True)
        try:
            device, moved, elapsed = await _measure_rdma(names, copy, seconds)
        except P2PStoreError as error:
            cause = f"both ends have a device, but: {error}"
            cure = "let UDP port 4791 pass, and see this command's findings about rdma on both machines"
            report(warning(RDMA_NAME, "does not work", cause, cure))
        else:
            report(way_rules.judge_rate(RDMA_NAME, moved, elapsed, f"through {device}"))


async def _measure_rdma(
    names: Sequence[str], copy: RemoteCopy, seconds: float
) -> tuple[str, int, float]:
    """(device, bytes, seconds)."""
    pool = ConnectionPool(TrioDriver())
    try:
        (device,) = open_devices(names, most=1)
        with device:
            staging = Staging.on([device], STAGING_BYTES)
            async with open_rdma_reading([device]) as (engines, lines):
                transport = RdmaTransport(engines, pool, lines, staging=staging)
                return device.name, *await transport.measure(copy, seconds)
    finally:
        pool.close()


COPY_BYTES: Final = 64 * MIB
SHM_NAME: Final = "shm from it"


async def examine_shared_memory(
    socket: str,
    peer_id: PeerId,
    seconds: float,
    timeout_seconds: float,
    report: Callable[[Finding], None],
) -> None:
    """Map the peer's memory as a reader does, and copy from it. There is no other direction: peers only read."""
    reason = f"no answer within {timeout_seconds:g} s"
    driver = TrioDriver()
    with trio.move_on_after(timeout_seconds + seconds):
        try:
            connection = await LocalConnection.open(
                driver, socket, Opening(DEFAULT_NAMESPACE, Access.READ), timeout_seconds
            )
        except (P2PStoreError, OSError) as error:
            reason = str(error)
        else:
            try:
                if connection.hello.peer_id == peer_id:
                    moved, elapsed = await driver.run_in_thread(
                        partial(_copy, connection.segments[0], seconds)
                    )
                    report(way_rules.judge_rate(SHM_NAME, moved, elapsed, "one thread"))
                    return
                reason = f"another peer serves at {socket} now"
            finally:
                connection.close()
    cause = f"the peer is on this machine, but its memory cannot be mapped: {reason}"
    cure = "run as the peer's user, or give its socket a mode and group (--socket-mode, --socket-group)"
    report(warning(SHM_NAME, socket, cause, cure))


def _copy(segment: memoryview, seconds: float) -> tuple[int, float]:
    """(bytes, seconds) of copies out of the segment into memory of our own."""
    source = np.frombuffer(segment, dtype=np.uint8)[:COPY_BYTES]
    target = np.ones(len(source), dtype=np.uint8)
    np.copyto(target, source)  # both sides are paged in afterwards
    moved, begin = 0, time.monotonic()
    while True:
        np.copyto(target, source)
        moved += len(source)
        elapsed = time.monotonic() - begin
        if elapsed >= seconds:
            return moved, elapsed
