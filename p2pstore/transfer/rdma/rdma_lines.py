"""The lines to one holder and another: a queue pair through each device of this machine that is of use. Under trio.

A line is set up over a data connection of its own (RDMA_CONNECT), on which it lives: each end that closes it, or dies,
takes the queue pairs with it. Lines through the devices near the memory that is read into are used together; those
through the others when none of these works.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from p2pstore.errors import DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.memory.segment_layout import SEGMENT_HEADER_BYTES, Geometry, decode_segment_header
from p2pstore.transfer.data_messages import DataKind, Ping, RdmaConnect, RdmaConnected
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma.rdma_hardware import wake_neighbour
from p2pstore.transfer.rdma.rdma_payload import read_bytes
from p2pstore.transfer.rdma.rdma_reads import Line, ReadEngine, ReadFailed, SeenSlots
from p2pstore.transfer.rdma.rdma_rules import (
    MAX_PACKET_NUMBER,
    Endpoint,
    Meaning,
    Path,
    RemoteMemory,
    agree,
)
from p2pstore.transfer.rdma.rdma_staging import BlockPool
from p2pstore.transfer.rdma.rdma_verbs import LinkDown, QueuePair
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import Code

logger = logging.getLogger("p2pstore.transfer")

REQUESTS_PER_LINE: Final = 64
RETRY_CONNECT_SECONDS: Final = 10.0
PING_SECONDS: Final = 60.0
"""Between signs of life on the connection that a queue pair in use lives on; the holder ends a silent one."""
IDLE_SECONDS: Final = 300.0


@dataclass(slots=True)
class _Way:
    """The way to one holder through one device: a line, or when to try again."""

    number: int
    lock: trio.Lock = field(default_factory=trio.Lock)
    line: Line | None = None
    retry_at: float = 0.0
    reason: str = ""

    def usable(self) -> Line | None:
        """The line, unless it failed and is about to be closed, or its device was lost."""
        line = self.line
        return line if line is not None and not line.failure and not line.engine.lost else None

    def demote(self, reason: str) -> None:
        """Do not try again for a while."""
        self.reason = reason
        self.retry_at = trio.current_time() + RETRY_CONNECT_SECONDS


@dataclass(slots=True)
class Holder:
    """The ways to one holder."""

    ways: list[_Way]
    devices: int = 1
    """Through how many of its devices at once it wants to be read."""
    retry_at: float = 0.0
    reason: str = ""

    def lines(self) -> list[Line]:
        """Those that work."""
        return [line for way in self.ways if (line := way.usable()) is not None]


class Lines:
    """Lines through `engines`, of which the first `preferred` are near the memory that is read into. `nursery` and
    engines are those of `open_rdma_reading`; headers are read into blocks of `small`."""

    def __init__(
        self,
        engines: Sequence[ReadEngine],
        preferred: int,
        pool: ConnectionPool,
        nursery: trio.Nursery,
        small: BlockPool,
        progress_seconds: float,
    ) -> None:
        assert 0 < preferred <= len(engines)
        self._engines = engines
        self._preferred = preferred
        self._pool = pool
        self._nursery = nursery
        self._small = small
        self._progress_seconds = progress_seconds
        self._holders: dict[bytes, Holder] = {}

    def of(self, peer_id: bytes) -> Holder:
        """The ways to a holder, made at first use."""
        holder = self._holders.get(peer_id)
        if holder is None:
            holder = Holder([_Way(engine.number) for engine in self._engines])
            self._holders[peer_id] = holder
        return holder

    def why_not(self, peer_id: bytes) -> str:
        """Why no line to a holder is to be had now; nothing when there is one, or one may be tried."""
        lost = [engine.lost for engine in self._engines if engine.lost]
        if len(lost) == len(self._engines):
            return lost[0]
        holder = self._holders.get(peer_id)
        if holder is None or holder.lines():
            return ""
        if trio.current_time() < holder.retry_at:
            return holder.reason
        reasons = [self._why_not_through(way) for way in holder.ways]
        return "" if not all(reasons) else "; ".join(dict.fromkeys(reasons))

    def _why_not_through(self, way: _Way) -> str:
        engine = self._engines[way.number]
        return engine.lost or (way.reason if trio.current_time() < way.retry_at else "")

    # --- choosing ----------------------------------------------------------------------------

    def in_use(self, holder: Holder, without: Collection[int] = ()) -> list[Line]:
        """Lines to read through: those through preferred devices, else the others. None through devices `without`."""
        lines = [line for line in holder.lines() if line.engine.number not in without]
        return [line for line in lines if line.engine.number < self._preferred] or lines

    async def connected(self, copy: RemoteCopy, without: Collection[int] = ()) -> Line:
        """The line to the copy's holder with the least under way, connected now if there is none. Raises
        `PullFailed`, retriable, when there is none to be had but through devices `without`."""
        holder = self.of(copy.peer_id)
        seconds = min(self._progress_seconds, copy.answer_seconds)
        deadline = trio.current_time() + seconds
        failure: PullFailed | None = None
        while True:
            lines = self.in_use(holder, without)
            if lines:
                line = min(lines, key=lambda each: each.room.taken)
                if line.engine.number >= self._preferred:  # the near ones may be back
                    self.widen(copy)
                return line
            if reason := self.why_not(copy.peer_id):  # found out by now, perhaps by another read
                raise failure or PullFailed(Code.UNAVAILABLE, reason, retriable=True)
            way = self._next(holder, without)
            if way is None:
                text = "no other RDMA device leads to the holder"
                raise failure or PullFailed(Code.UNAVAILABLE, text, retriable=True)
            try:
                await self._connect(holder, way, copy, deadline, seconds)
            except PullFailed as error:
                if (
                    trio.current_time() >= deadline
                ):  # the next way would be blamed for the time that this one took
                    raise
                failure = error

    def _next(self, holder: Holder, without: Collection[int] = ()) -> _Way | None:
        """The best way to try that there is no line by."""
        if trio.current_time() < holder.retry_at:
            return None
        tried = [way for way in holder.ways if way.number not in without and not way.usable()]
        return next((way for way in tried if not self._why_not_through(way)), None)

    def widen(self, copy: RemoteCopy) -> None:
        """Connect further lines in the background: through preferred devices, as many as the holder has."""
        holder = self.of(copy.peer_id)
        near = holder.ways[: self._preferred]
        wanted = min(self._preferred, holder.devices) - sum(way.usable() is not None for way in near)
        for way in near:
            if wanted > 0 and not way.usable() and not self._why_not_through(way):
                wanted -= 1
                if not way.lock.locked():
                    self._nursery.start_soon(self._connect_more, holder, way, copy)

    async def _connect_more(self, holder: Holder, way: _Way, copy: RemoteCopy) -> None:
        seconds = self._progress_seconds
        try:
            await self._connect(holder, way, copy, trio.current_time() + seconds, seconds)
        except PullFailed as failure:
            logger.debug("no further line: %s", failure)

    def give_up(self, line: Line, holder: Holder, reason: str) -> None:
        """A line failed in the middle of a read that goes on by others: its device is not tried again at once."""
        name = line.engine.device.name
        holder.ways[line.engine.number].demote(f"rdma device {name}: {reason}")
        logger.warning("reading through rdma device %s failed: %s", name, reason)

    # --- connecting --------------------------------------------------------------------------

    async def _connect(
        self, holder: Holder, way: _Way, copy: RemoteCopy, deadline: float, seconds: float
    ) -> None:
        """Have a line that way, unless it was tried meanwhile. Raises `PullFailed`."""
        async with way.lock:
            if way.usable() or self._why_not_through(way):
                return
            engine = self._engines[way.number]
            reached = False
            try:
                engine.device.check_link()
                with trio.fail_at(deadline):
                    connection = await self._pool.dial(copy)
                    reached = True
                    line, devices = await self._open(engine, connection)
            except trio.TooSlowError as error:
                text = f"the holder did not connect over RDMA within {seconds:g} s"
                raise self._failed(holder, way, reached, text, error) from error
            except LinkDown as error:
                raise self._failed(holder, way, True, str(error), error) from error
            except (P2PStoreError, OSError, ReadFailed) as error:
                text = str(error) or type(error).__name__
                raise self._failed(holder, way, reached, text, error) from error
            way.line, holder.devices = line, devices
        self._nursery.start_soon(self._keep, way, line, connection)

    def _failed(
        self, holder: Holder, way: _Way, reached: bool, text: str, error: Exception
    ) -> PullFailed:
        """A holder that was not even reached is not to be had through other devices either."""
        text = f"connecting over RDMA failed: {text}"
        way.demote(text)
        if not reached:
            holder.reason, holder.retry_at = way.reason, way.retry_at
        late = isinstance(error, trio.TooSlowError | DeadlineExceeded)
        code = Code.DEADLINE_EXCEEDED if late else Code.UNAVAILABLE
        return PullFailed(code, text, retriable=True)

    async def _open(self, engine: ReadEngine, connection: DataConnection) -> tuple[Line, int]:
        """Connect, and read the segment's header to see that it works: the line, and how many of its devices the
        holder wants to be read through."""
        line = None
        try:
            requests = min(REQUESTS_PER_LINE, engine.device.limits.max_work_requests)
            pair = engine.device.queue_pair(
                engine.completions,
                secrets.randbelow(MAX_PACKET_NUMBER),
                requests=requests,
                may_be_read=False,
            )
            line = Line(engine, pair, requests)
            line.memory, devices = await self._introduce(engine, pair, connection)
            seconds = self._progress_seconds
            read = await read_bytes(line, self._small, 0, SEGMENT_HEADER_BYTES, seconds)
            line.geometry = self._checked(read, line.memory)
            line.seen = SeenSlots(line.geometry)
        except BaseException:
            connection.close()
            if line is not None:
                await engine.retire(line)
            raise
        return line, devices

    def _checked(self, header: bytes, memory: RemoteMemory) -> Geometry:
        geometry = decode_segment_header(header).geometry
        if geometry.total_bytes > memory.length_bytes:
            raise ProtocolError("the holder's segment is longer than what it lets others read")
        return geometry

    async def _introduce(
        self, engine: ReadEngine, pair: QueuePair, connection: DataConnection
    ) -> tuple[RemoteMemory, int]:
        """Connect both queue pairs; the memory to read at the other end, and through how many devices."""
        own = pair.endpoint
        request = RdmaConnect(own.queue_pair, own.packet_number, own.gid, own.path_mtu_bytes, own.reads)
        reply = await connection.request(DataKind.RDMA_CONNECT, request)
        assert isinstance(reply, RdmaConnected)
        other = Endpoint(
            reply.queue_pair, reply.packet_number, reply.gid, reply.path_mtu_bytes, reply.reads
        )
        path: Path = agree(own, other)
        await wake_neighbour(engine.device.interface, other.gid, trio.sleep)
        pair.connect(other, path)
        return RemoteMemory(reply.address, reply.length_bytes, reply.key), reply.devices

    # --- keeping -----------------------------------------------------------------------------

    async def _keep(self, way: _Way, line: Line, connection: DataConnection) -> None:
        """Watch over a line until one of its ends has enough of it."""
        try:
            with trio.CancelScope() as scope:
                line.when_broken = scope.cancel
                if line.failure is None:
                    await self._watch(line, connection)
        except (P2PStoreError, OSError) as error:
            line.stop(Meaning.GONE, f"the connection to the holder broke: {error}")
        finally:
            line.when_broken = lambda: None
            if way.line is line:
                way.line = None
            line.stop(Meaning.GONE, "the holder ended the RDMA connection")
            await line.engine.retire(line)
            connection.close()

    async def _watch(self, line: Line, connection: DataConnection) -> None:
        """Return when the holder closes, or nothing was read for long."""
        while True:
            with trio.move_on_after(PING_SECONDS):
                await trio.lowlevel.wait_readable(connection.stream.fileno())
                return
            idle_seconds = trio.current_time() - line.used_at
            if idle_seconds > IDLE_SECONDS:
                return
            if idle_seconds < PING_SECONDS:
                await connection.request(DataKind.PING, Ping())


class ChosenLines:
    """Which line to read each chunk of one object through."""

    def __init__(self, lines: Lines, copy: RemoteCopy) -> None:
        self._lines = lines
        self._copy = copy
        self._holder = lines.of(copy.peer_id)
        self._given_up: set[int] = set()

    def count(self) -> int:
        """How many lines work, at least 1."""
        return max(1, len(self._lines.in_use(self._holder, self._given_up)))

    async def line(self) -> Line:
        """The one to use next. Raises `PullFailed` when there is none."""
        return await self._lines.connected(self._copy, self._given_up)

    async def another(self, line: Line, reason: str) -> bool:
        """Whether there is a line to use instead of this one, which failed for that reason."""
        number = line.engine.number
        if number in self._given_up:  # several reads of it fail
            return True
        self._given_up.add(number)
        try:
            await self._lines.connected(self._copy, self._given_up)
        except PullFailed:
            return False
        self._lines.give_up(line, self._holder, reason)
        return True
