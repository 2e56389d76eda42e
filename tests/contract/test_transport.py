"""The duties of every transport, against real sockets and real memory, and in virtual time.

To add a transport: write a `Harness`, and add it to `HARNESSES`. Everything that takes the `harness`
fixture then runs over it, under trio, under asyncio and with blocking sockets. Below that come the tests of TCP alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import trio

from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import join_address
from p2pstore.errors import (
    AuthenticationFailed,
    BufferTooSmall,
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
    StoreClosed,
    Unavailable,
)
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.home_messages import Push, Pushed
from p2pstore.memory.entries import SmallObjectsLent
from p2pstore.memory.references import Loan
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    Slot,
    SlotState,
    TrailerBody,
    encode_slot,
    encode_trailer,
    plan_geometry,
)
from p2pstore.objects import (
    CHUNK_BYTES,
    KIB,
    MIB,
    Announced,
    Version,
    chunk_sums,
    key_digest,
    root_checksum,
)
from p2pstore.runtime.streams import BytesLike, ByteStream, Driver
from p2pstore.runtime.trio_streams import TrioDriver, TrioStream
from p2pstore.transfer import transport as transport_module
from p2pstore.transfer.data_messages import (
    MAX_SMALL_BULK_BYTES,
    MIN_DATA_VERSION,
    DataKind,
    Get,
    GetItem,
    GetSmall,
    Hello,
    HelloReply,
    ObjectReply,
    Objects,
    ObjectStatus,
    Ping,
    Pong,
    Proof,
    over_tls,
)
from p2pstore.transfer.failover import PullFailed, Unannounced
from p2pstore.transfer.peer_messages import (
    ClusterRecords,
    Lookup,
    Replicate,
    Replicated,
    Snapshot,
    SnapshotReply,
)
from p2pstore.transfer.read_tickets import (
    GrantedTicket,
    Scope,
    TicketClaims,
    issue_ticket,
    open_ticket,
    prove,
)
from p2pstore.transfer.reading.arriving import Destination
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.span_reads import ItemOutcome
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.serving.data_server import DataServer, open_data_listeners
from p2pstore.transfer.serving.read_answers import LentObject
from p2pstore.transfer.serving.serving_backends import StoreBackend
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import (
    BufferDestination,
    Pulled,
    RemoteCopy,
    RemotePeer,
    Transport,
    announcing,
    pull_with_failover,
    with_alternatives,
)
from p2pstore.wire import (
    HEADER,
    HEADER_BYTES,
    PREFACE_DATA,
    REPLY,
    Code,
    Message,
    decode_body,
    encode_frame,
)
from tests.contract.sides import Side
from tests.contract.simulated import SimulatedHarness
from tests.present import present
from tests.stored import stored
from tests.waiting import until

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
RING = KeyRing([b"k" * 32])
SEGMENT_BYTES = 24 * MIB
_buffers: dict[int, memoryview] = {}

Verifier = Ed25519Verifier
OWNER, READER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)


def grant(
    scope: Scope = Scope.READ | Scope.PEER,
    *,
    ring: KeyRing = RING,
    audience: bytes = OWNER.peer_id,
    now: float | None = None,
) -> GrantedTicket:
    return issue_ticket(
        signer=READER,
        ring=ring,
        audience=audience,
        now_unix=time.time() if now is None else now,
        ticket_id=bytes(16),
        scope=scope,
    )


def segment_of(data_bytes: int) -> Segment:
    """A fresh segment; the pages under it are used again and again."""
    geometry = plan_geometry(data_bytes)
    if data_bytes not in _buffers:
        _buffers[data_bytes] = memoryview(mmap.mmap(-1, geometry.total_bytes))
    return Segment(_buffers[data_bytes], segment_id=bytes(16), incarnation=7, geometry=geometry)


def pattern(length: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + length).randbytes(length)


def put(segment: Segment, key: str, value: bytes, clock: int = 1) -> bytes:
    """An object in the segment; its digest."""
    trailer = TrailerBody("default", key, chunk_sums(value))
    return stored(segment, trailer, value, clock=clock, now=time.time()).digest


# --- harnesses -------------------------------------------------------------------------------


class Harness(Protocol):
    """An owner with objects, and a way to read them. One per transport."""

    segment: Segment

    def transport(self, driver: Driver) -> Transport:
        """A reader's end; the harness closes it."""
        ...

    def copy(self, digest: bytes) -> RemoteCopy:
        """The owner's copy of an object."""
        ...

    def in_flight(self) -> int:
        """Bytes that the owner holds for readers."""
        ...


class Backend:
    """Objects of one segment, and answers to the other requests that show what was asked."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.release = trio.Event()
        self.waiting = 0
        self.most_waiting = 0
        self.pushes: list[tuple[bytes, Push]] = []
        self.noted: list[bytes] = []

    def must_bring(self, items: Sequence[GetItem]) -> bool:
        return False  # all of it is in memory

    async def bring(self, items: Sequence[GetItem]) -> None:
        raise AssertionError("nothing is to be brought")

    def lend(
        self, item: GetItem, reader: bytes, keeps: int, *, decides: bool
    ) -> LentObject | ObjectReply | None:
        segment = self._segment
        lent = segment.leases.lend(item.digest, time.time())
        if lent is None:
            absent = ObjectReply(ObjectStatus.NOT_FOUND, incarnation=7, sequence=42)
            return absent if decides else None
        loan, entry = lent
        slot, trailer = segment.table.slot_bytes(entry), segment.table.trailer_bytes(entry)
        return LentObject(slot, trailer, segment.payload(entry), loan)

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        return self._segment.leases.lend_small(
            asked.digests, min(asked.most_bytes, CHUNK_BYTES), MAX_SMALL_BULK_BYTES, time.time()
        )

    def end_loan(self, handle: Loan) -> None:
        self._segment.leases.end_loan(handle)

    def note_reads(self, counts: Mapping[bytes, int]) -> None:
        self.noted += Counter(counts).elements()

    def answered(self) -> None:
        pass

    async def handle(
        self, kind: DataKind, message: Message, claims: TicketClaims
    ) -> tuple[Message, Sequence[BytesLike]]:
        match message:
            case Ping():
                return Pong(7, 42), ()
            case Snapshot():
                return SnapshotReply(message.member, 7, 42, 99), (b"a" * 34, memoryview(b"b" * 34))
            case Push():
                self.pushes.append((claims.issuer, message))
                return Pushed([5]), ()
            case Replicate():
                self.waiting += 1
                self.most_waiting = max(self.most_waiting, self.waiting)
                try:
                    await self.release.wait()
                finally:
                    self.waiting -= 1
                return Replicated(message.clock, message.writer), ()
            case ClusterRecords():
                raise RuntimeError("a bug of the other peer")
            case Lookup():
                raise CapacityExceeded("no room, for a test")
        raise AssertionError(kind)


class TcpHarness:
    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.backend = Backend(segment)
        self.address = ""
        self.server: DataServer
        self.stop = trio.CancelScope()
        self._pools: list[ConnectionPool] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        segment: Segment,
        limits: ServerLimits | None = None,
        stores: StoreBackend | None = None,
        *,
        tls: bool = False,
    ) -> AsyncIterator[TcpHarness]:
        harness = cls(segment)
        (listener,) = await open_data_listeners(["127.0.0.1:0"])
        address = join_address(*listener.getsockname()[:2])
        harness.address = over_tls(address) if tls else address
        harness.server = DataServer(
            harness.backend,
            ring=RING,
            signer=OWNER,
            verifier=Verifier(),
            incarnation=7,
            limits=limits,
            stores=stores,
            tls=tls,
        )

        async def serve() -> None:
            with harness.stop:
                await harness.server.serve([listener])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield harness
            for pool in harness._pools:
                pool.close()
            harness.stop.cancel()
        assert harness.server.connections == 0
        assert harness.in_flight() == 0

    def pool(self, driver: Driver, progress_seconds: float = 5.0) -> ConnectionPool:
        pool = ConnectionPool(driver, progress_seconds=progress_seconds)
        self._pools.append(pool)
        return pool

    def transport(self, driver: Driver) -> TcpTransport:
        return TcpTransport(self.pool(driver))

    def copy(self, digest: bytes = b"") -> RemoteCopy:
        return RemoteCopy(OWNER.peer_id, (self.address,), grant(), member=1)

    def in_flight(self) -> int:
        return self.segment.leased_bytes


HARNESSES: dict[str, Callable[[Segment], contextlib.AbstractAsyncContextManager[Harness]]] = {
    "simulated": lambda segment: SimulatedHarness.open(segment, _buffers[segment.geometry.data_bytes]),
    "tcp": TcpHarness.open,
    "tls": partial(TcpHarness.open, tls=True),
}


@pytest.fixture(params=sorted(HARNESSES))
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with HARNESSES[request.param](segment_of(SEGMENT_BYTES)) as opened:
        yield opened


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


class Unprepared:
    """A destination that must not be asked."""

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        raise AssertionError("asked for room for an object that was not verified")


# --- every transport -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [0, 1, 4095, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB], ids=lambda length: f"{length}B"
)
async def test_pull_delivers_exactly_the_value(harness: Harness, side: Side, length: int) -> None:
    value = pattern(length)
    digest = put(harness.segment, "key", value)
    buffer = bytearray(b"\xaa") * (length + 10)
    transport = harness.transport(side.driver)
    pulled = await side.run(
        lambda: transport.pull(harness.copy(digest), digest, BufferDestination(buffer))
    )
    assert buffer[:length] == value
    assert buffer[length:] == b"\xaa" * 10
    assert (pulled.length, pulled.slot.length) == (length, length)
    assert (pulled.trailer.key, pulled.trailer.namespace) == ("key", "default")
    assert pulled.transport == transport.name


@pytest.mark.parametrize("name", sorted(HARNESSES))
async def test_pull_of_several_parts(name: str, side: Side) -> None:
    segment = segment_of(160 * MIB)
    value = pattern(65 * MIB + 3)
    digest = put(segment, "key", value)
    buffer = bytearray(len(value))
    async with HARNESSES[name](segment) as harness:
        transport = harness.transport(side.driver)
        await side.run(lambda: transport.pull(harness.copy(digest), digest, BufferDestination(buffer)))
    assert buffer == value


async def test_concurrent_pulls(harness: Harness) -> None:
    values = [pattern(size, seed) for seed, size in enumerate([10, 5000, MIB + 7, 300_000] * 4)]
    digests = [put(harness.segment, f"key {i}", value) for i, value in enumerate(values)]
    transport = harness.transport(TrioDriver())
    buffers = [bytearray(len(value)) for value in values]

    async def pull(index: int) -> None:
        digest = digests[index]
        await transport.pull(harness.copy(digest), digest, BufferDestination(buffers[index]))

    async with trio.open_nursery() as nursery:
        for index in range(len(values)):
            nursery.start_soon(pull, index)
    assert buffers == values


async def test_a_key_that_the_holder_lacks(harness: Harness, side: Side) -> None:
    transport = harness.transport(side.driver)
    digest = key_digest("absent")
    with pytest.raises(PullFailed) as caught:
        await side.run(lambda: transport.pull(harness.copy(digest), digest, Unprepared()))
    assert caught.value.code is Code.NO_SUCH_KEY
    assert not caught.value.retriable


@pytest.mark.parametrize("size", [1000, 3 * MIB])
async def test_a_buffer_that_is_too_small_stays_untouched(
    harness: Harness, side: Side, size: int
) -> None:
    transport = harness.transport(side.driver)
    value = pattern(size)
    digest = put(harness.segment, "key", value)

    def pull(buffer: bytearray) -> Awaitable[Pulled]:
        copy = harness.copy(digest)
        return side.run(lambda: transport.pull(copy, digest, BufferDestination(buffer)))

    short, whole = bytearray(size - 1), bytearray(size)
    with pytest.raises(BufferTooSmall) as caught:
        await pull(short)
    assert caught.value.needed == size
    assert not any(short)
    await pull(whole)
    assert whole == value


@pytest.mark.parametrize("position", [0, MIB + 5, 3 * MIB - 1])
async def test_a_flipped_byte_in_the_owners_memory_is_refused(
    harness: Harness, side: Side, position: int
) -> None:
    digest = put(harness.segment, "key", pattern(3 * MIB))
    entry = present(harness.segment.find(digest, time.time()))
    memory = _buffers[SEGMENT_BYTES]
    memory[entry.offset + position] ^= 1
    transport = harness.transport(side.driver)
    buffer = bytearray(3 * MIB)

    def pull() -> Awaitable[Pulled]:
        return transport.pull(harness.copy(digest), digest, BufferDestination(buffer))

    with pytest.raises(PullFailed) as caught:
        await side.run(pull)
    assert caught.value.code is Code.STALE
    memory[entry.offset + position] ^= 1
    await side.run(pull)
    assert buffer == pattern(3 * MIB)


@pytest.mark.parametrize("what", ["slot", "trailer"])
async def test_a_damaged_slot_or_trailer_is_refused(harness: Harness, side: Side, what: str) -> None:
    digest = put(harness.segment, "key", pattern(5000))
    entry = present(harness.segment.find(digest, time.time()))
    slot = harness.segment.geometry.slots_offset + 64 * entry.slot
    position = slot + 20 if what == "slot" else entry.offset + 5000 + 30
    _buffers[SEGMENT_BYTES][position] ^= 1
    transport = harness.transport(side.driver)
    with pytest.raises(PullFailed) as caught:
        await side.run(lambda: transport.pull(harness.copy(digest), digest, Unprepared()))
    assert caught.value.code in (Code.STALE, Code.NO_SUCH_KEY)


async def test_a_destination_may_refuse_a_version(harness: Harness) -> None:
    class Newer:
        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            raise NoSuchKey("too old")

    class Full:
        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            raise CapacityExceeded("full")

    digest = put(harness.segment, "key", pattern(5000))
    transport = harness.transport(TrioDriver())
    with pytest.raises(PullFailed) as caught:
        await transport.pull(harness.copy(digest), digest, Newer())
    assert caught.value.code is Code.NO_SUCH_KEY
    report = await pull_with_failover([harness.copy(digest)], [transport], digest, Newer())
    assert isinstance(report.error, NoSuchKey)
    with pytest.raises(CapacityExceeded):
        await pull_with_failover([harness.copy(digest)], [transport], digest, Full())


async def test_memory_reused_under_the_reader_is_refused_or_exact(harness: Harness) -> None:
    """The owner breaks its promise and overwrites what it is sending."""
    value = pattern(16 * MIB)
    digest = put(harness.segment, "key", value)
    entry = present(harness.segment.find(digest, time.time()))
    transport = harness.transport(TrioDriver())
    memory = _buffers[SEGMENT_BYTES]
    outcomes = set()
    rng = random.Random(5)
    for _ in range(8):
        buffer = bytearray(len(value))
        done = trio.Event()

        async def overwrite(done: trio.Event = done) -> None:
            for _ in range(rng.randrange(20)):
                await trio.lowlevel.checkpoint()
            start = entry.offset + rng.randrange(15 * MIB)
            kept = bytes(memory[start : start + 100])
            memory[start : start + 100] = bytes(100)
            await done.wait()
            memory[start : start + 100] = kept

        async with trio.open_nursery() as nursery:
            nursery.start_soon(overwrite)
            try:
                await transport.pull(harness.copy(digest), digest, BufferDestination(buffer))
                assert buffer == value
                outcomes.add("exact")
            except PullFailed as failure:
                outcomes.add(failure.code.name)
            finally:
                done.set()
    assert outcomes in ({"STALE"}, {"STALE", "exact"})


class CancellingStream:
    """Cancels its reader just before the given call of `send` or `receive_into`."""

    def __init__(self, stream: ByteStream, count: Callable[[], None]) -> None:
        self._stream = stream
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, *parts: BytesLike) -> None:
        self._count()
        await self._stream.send(*parts)

    async def receive_into(self, view: memoryview) -> int:
        self._count()
        return await self._stream.receive_into(view)

    async def receive_soon(self, view: memoryview) -> int:
        self._count()
        return await self._stream.receive_soon(view)


class CancellingDriver(TrioDriver):
    """Cancels `scope` before the call number `at`."""

    def __init__(self) -> None:
        self.at = 0
        self.calls = 0
        self.scope = trio.CancelScope()

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.scope.cancel()

    async def sleep(self, seconds: float) -> None:
        self._count()
        await super().sleep(seconds)

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> Any:
        self._count()
        stream = await super().connect_tcp(host, port, timeout_seconds)
        return CancellingStream(stream, self._count)

    async def connect_unix(self, path: str, timeout_seconds: float) -> Any:
        self._count()
        stream = await super().connect_unix(path, timeout_seconds)
        return CancellingStream(stream, self._count)


async def test_a_reader_cancelled_at_each_checkpoint_leaves_nothing(harness: Harness) -> None:
    value = pattern(2 * MIB + 5)
    digest = put(harness.segment, "key", value)
    for at in itertools.count(1):
        driver = CancellingDriver()
        driver.at = at
        transport = harness.transport(driver)
        buffer = bytearray(len(value))
        delivered = False
        with driver.scope:
            await transport.pull(harness.copy(digest), digest, BufferDestination(buffer))
            delivered = True
        if delivered and driver.calls < at:
            break
        after = bytes(buffer)
        await until(lambda: harness.in_flight() == 0)
        assert bytes(buffer) == after, "something wrote to the buffer after cancellation"
        driver.scope = trio.CancelScope()
        driver.at = 0
        await transport.pull(harness.copy(digest), digest, BufferDestination(buffer))
        assert buffer == value
    assert at > 4


class StepCounter(trio.abc.Instrument):
    """Cancels `scope` before the given step of any task whose name holds `part`."""

    def __init__(self, part: str, at: int, scope: trio.CancelScope) -> None:
        self.part, self.at, self.scope, self.steps = part, at, scope, 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.part in task.name:
            self.steps += 1
            if self.steps == self.at:
                self.scope.cancel()


@contextlib.contextmanager
def cancelled_at_step(part: str, at: int, scope: trio.CancelScope) -> Iterator[StepCounter]:
    counter = StepCounter(part, at, scope)
    trio.lowlevel.add_instrument(counter)
    try:
        yield counter
    finally:
        trio.lowlevel.remove_instrument(counter)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_an_owner_stopped_at_each_checkpoint_lets_everything_go(tls: bool) -> None:
    segment = segment_of(SEGMENT_BYTES)
    value = pattern(6 * MIB + 5)
    digest = put(segment, "key", value)
    delivered = False
    outcomes = set()
    at = 0
    while not delivered:
        at += 1
        async with TcpHarness.open(segment, tls=tls) as harness:
            with cancelled_at_step("_run_connection", at, harness.stop) as counter:
                try:
                    buffer = bytearray(len(value))
                    await harness.transport(TrioDriver()).pull(
                        harness.copy(digest), digest, BufferDestination(buffer)
                    )
                    delivered = counter.steps < at
                    assert buffer == value
                except PullFailed as failure:
                    outcomes.add(failure.retriable)
        assert segment.leased_bytes == 0
    assert outcomes == {True}
    assert at > 4


# --- tcp: many at once, and other requests ---------------------------------------------------


async def test_many_objects_in_one_frame(tcp: TcpHarness, side: Side) -> None:
    values = [pattern(size, seed) for seed, size in enumerate([0, 1, 4096, 40_000] * 300)]
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    pool = tcp.pool(side.driver)
    buffers = [bytearray(len(value)) for value in values]
    items: list[tuple[bytes, Destination]] = [
        (digest, BufferDestination(buffer)) for digest, buffer in zip(digests, buffers, strict=True)
    ]
    items[5] = (key_digest("absent"), Unprepared())
    items[7] = (digests[7], BufferDestination(bytearray(10)))
    entry = present(tcp.segment.find(digests[11], time.time()))
    _buffers[SEGMENT_BYTES][entry.offset] ^= 1
    results = await side.run(lambda: pool.pull_many(tcp.copy(), items))
    failed = {number: result for number, result in enumerate(results) if not isinstance(result, Pulled)}
    assert sorted(failed) == [5, 7, 11]
    assert isinstance(failed[5], PullFailed)
    assert (failed[5].code, failed[5].incarnation, failed[5].sequence) == (Code.NO_SUCH_KEY, 7, 42)
    assert isinstance(failed[7], BufferTooSmall)
    assert isinstance(failed[11], PullFailed)
    assert failed[11].code is Code.STALE
    for number, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
        if number not in failed:
            assert buffer == value


async def test_larger_objects_in_one_frame(tcp: TcpHarness, side: Side) -> None:
    """Received in place; a damaged item costs no other its result."""
    sizes = [64 * KIB + 1, 300_000, MIB, MIB + 1, 3 * MIB] * 2
    values = [pattern(size, seed) for seed, size in enumerate(sizes)]
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    buffers = [bytearray(size) for size in sizes]
    items = [(d, BufferDestination(b)) for d, b in zip(digests, buffers, strict=True)]
    damaged = range(3, 8)
    for number in damaged:
        entry = present(tcp.segment.find(digests[number], time.time()))
        _buffers[SEGMENT_BYTES][entry.offset + entry.length - 1] ^= 1
    pool = tcp.pool(side.driver)
    results = await side.run(lambda: pool.pull_many(tcp.copy(), items))
    for number, (result, buffer, value) in enumerate(zip(results, buffers, values, strict=True)):
        if number in damaged:
            assert isinstance(result, PullFailed)
            assert result.code is Code.STALE
        else:
            assert isinstance(result, Pulled)
            assert result.length == len(value)
            assert buffer == value


async def test_a_buffer_too_small_for_one_large_item_costs_no_other_its_result(side: Side) -> None:
    """Its bytes are on their way when that shows, and so are the next one's."""
    segment = segment_of(SEGMENT_BYTES)
    values = [pattern(3 * MIB, seed) for seed in range(4)]
    digests = [put(segment, f"key {i}", value) for i, value in enumerate(values)]
    async with TcpHarness.open(segment, ServerLimits(reply_bulk_bytes=4 * MIB)) as harness:
        buffers = [bytearray(10 if i == 2 else len(value)) for i, value in enumerate(values)]
        pool = harness.pool(side.driver)
        first, second, small, last = await side.run(
            lambda: pool.pull_many(
                harness.copy(),
                [(d, BufferDestination(b)) for d, b in zip(digests, buffers, strict=True)],
            )
        )
        assert pool.open_connections == 1
    assert all(isinstance(each, Pulled) for each in (first, second, last))
    assert [buffers[at] == values[at] for at in range(4)] == [True, True, False, True]
    assert isinstance(small, BufferTooSmall)


@pytest.mark.parametrize("length", [100, 100_000, MIB, 3 * MIB])
async def test_a_version_that_was_not_announced_is_not_delivered(side: Side, length: int) -> None:
    """Of whatever length, alone and with others; its writer vouches for what it holds."""
    async with TcpHarness.open(segment_of(SEGMENT_BYTES)) as harness:
        value = pattern(length)
        digest = put(harness.segment, "key", value)  # by writer 1
        pool = harness.pool(side.driver)

        async def read(announced: Announced) -> tuple[list[ItemOutcome], list[bytearray]]:
            copy = replace(harness.copy(), announced=announced)
            buffers = [bytearray(length) for _ in range(4)]
            rooms = [announcing(BufferDestination(each), announced) for each in buffers]
            items = [(digest, room) for room in rooms[:3]]
            outcomes = await side.run(lambda: pool.pull_many(copy, items))
            try:
                outcomes.append(await side.run(lambda: pool.pull(copy, digest, rooms[3])))
            except PullFailed as failure:
                outcomes.append(failure)
            view = memoryview(bytearray(length))[:MIB]
            (told,), _ = await side.run(lambda: pool.pull_small(copy, [digest], [view]))
            assert (told == length) == (announced.writer == 1 and length <= MIB)
            return outcomes, buffers

        outcomes, buffers = await read(Announced(1))
        assert all(isinstance(each, Pulled) for each in outcomes)
        assert buffers == [value] * 4
        outcomes, buffers = await read(Announced(2))
        assert [type(each) for each in outcomes] == [Unannounced] * 4
        assert not any(map(any, buffers))


async def test_what_does_not_fit_into_a_reply_is_said_to_be_too_large() -> None:
    segment = segment_of(SEGMENT_BYTES)
    digests = [put(segment, f"key {i}", pattern(3 * MIB, i)) for i in range(2)]
    async with TcpHarness.open(segment, ServerLimits(reply_bulk_bytes=4 * MIB)) as harness:
        stream = await authenticated(harness.address)
        await stream.send(encode_frame(DataKind.GET, 1, Get([GetItem(d) for d in digests])))
        *_, body, bulk = await read_frame(stream)
        statuses = [item.status for item in decode_body(Objects, body).items]
        assert statuses == [ObjectStatus.OK, ObjectStatus.TOO_LARGE]
        assert bulk == pattern(3 * MIB, 0)
        stream.close()


async def test_pull_many_of_nothing(tcp: TcpHarness, side: Side) -> None:
    pool = tcp.pool(side.driver)
    assert await side.run(lambda: pool.pull_many(tcp.copy(), [])) == []


async def test_requests_and_their_failures(tcp: TcpHarness, side: Side) -> None:
    pool = tcp.pool(side.driver)
    peer = tcp.copy()

    def ask(kind: DataKind, message: Message) -> Awaitable[Message]:
        return side.run(lambda: pool.request(peer, kind, message))

    assert await ask(DataKind.PING, Ping()) == Pong(7, 42)
    with pytest.raises(CapacityExceeded, match="no room"):
        await ask(DataKind.LOOKUP, Lookup(bytes(16)))
    with caught_log(), pytest.raises(P2PStoreError, match="internal error"):
        await ask(DataKind.CLUSTER_RECORDS, ClusterRecords([], []))
    reply, bulk = await side.run(lambda: pool.request_bulk(peer, DataKind.SNAPSHOT, Snapshot(3), 1000))
    assert reply == SnapshotReply(3, 7, 42, 99)
    assert bulk == b"a" * 34 + b"b" * 34
    assert pool.open_connections == 1  # refusals do not cost the connection
    with pytest.raises(ProtocolError, match="68 bytes"):
        await side.run(lambda: pool.request_bulk(peer, DataKind.SNAPSHOT, Snapshot(3), 67))
    assert await ask(DataKind.PUSH, Push(1, [1], b"")) == Pushed([5])
    assert tcp.backend.pushes == [(READER.peer_id, Push(1, [1], b""))]


@contextlib.contextmanager
def caught_log() -> Iterator[list[str]]:
    """The data plane's log lines, kept out of the test's output."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("p2pstore.transfer")
    handler = Keep()
    log.addHandler(handler)
    log.propagate = False
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.propagate = True


async def test_a_slow_request_does_not_hold_up_the_others(tcp: TcpHarness) -> None:
    stream = await authenticated(tcp.address)
    replicate = Replicate(bytes(16), 5, 6, 7)
    for number in range(70):
        await stream.send(encode_frame(DataKind.REPLICATE, number, replicate))
    await stream.send(encode_frame(DataKind.PING, 100, Ping()))
    refused = [await read_frame(stream) for _ in range(7)]
    assert {(kind, flags) for kind, flags, *_ in refused[:6]} == {(DataKind.REPLICATE, 3)}
    await until(lambda: tcp.backend.most_waiting == 64)
    assert refused[6][:3] == (DataKind.PING, 3, 100)  # 64 under way: BUSY for everything but GET
    digest = put(tcp.segment, "key", b"value")
    await stream.send(encode_frame(DataKind.GET, 101, Get([GetItem(digest)])))
    assert (await read_frame(stream))[4] == b"value"
    tcp.backend.release.set()
    answered = {(await read_frame(stream))[2] for _ in range(64)}
    assert answered == set(range(64))
    stream.close()


async def test_handlers_end_with_their_connection(tcp: TcpHarness) -> None:
    stream = await authenticated(tcp.address)
    await stream.send(encode_frame(DataKind.REPLICATE, 1, Replicate(bytes(16), 5, 6, 7)))
    await until(lambda: tcp.backend.waiting == 1)
    stream.close()
    await until(lambda: tcp.backend.waiting == 0 and tcp.server.connections == 0)


async def test_pipelined_gets_are_answered_in_order(tcp: TcpHarness) -> None:
    values = [pattern(4096, seed) for seed in range(300)]
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    stream = await authenticated(tcp.address)
    frames = [encode_frame(DataKind.GET, i, Get([GetItem(d)])) for i, d in enumerate(digests)]
    await stream.send(b"".join(frames))
    for number, value in enumerate(values):
        kind, flags, request_id, body, bulk = await read_frame(stream)
        assert (kind, flags, request_id, bulk) == (DataKind.GET, REPLY, number, value)
        assert decode_body(Objects, body).items[0].status == ObjectStatus.OK
    stream.close()


async def test_ranges_of_chunks(tcp: TcpHarness) -> None:
    value = pattern(3 * MIB + 9)
    digest = put(tcp.segment, "key", value)
    stream = await authenticated(tcp.address)
    for first, count, expected in [
        (1, 1, value[MIB : 2 * MIB]),
        (2, 0, value[2 * MIB :]),
        (3, 64, value[3 * MIB :]),
        (0xFFFF_FFFF, 0, b""),
        (-1, -1, value),
    ]:
        await stream.send(encode_frame(DataKind.GET, 1, Get([GetItem(digest, first, count)])))
        *_, body, bulk = await read_frame(stream)
        assert decode_body(Objects, body).items[0].status == ObjectStatus.OK
        assert bulk == expected
    stream.close()


# --- tcp: strangers --------------------------------------------------------------------------


async def connect(address: str) -> Any:
    host, _, port = address.rpartition(":")
    return await TrioDriver().connect_tcp(host, int(port), 5.0)


async def authenticated(address: str, granted: GrantedTicket | None = None) -> Any:
    """A raw stream after a good hello."""
    stream = await connect(address)
    granted = granted or grant()
    nonce = os.urandom(32)
    hello = Hello(MIN_DATA_VERSION, MIN_DATA_VERSION, granted.ticket, nonce)
    await stream.send(PREFACE_DATA + encode_frame(DataKind.HELLO, 0, hello))
    *_, body, _ = await read_frame(stream)
    reply = decode_body(HelloReply, body)
    proof = Proof(prove(granted.secret, b"client", nonce, reply.nonce))
    await stream.send(encode_frame(DataKind.PROOF, 0, proof))
    return stream


async def read_exactly(stream: Any, length: int) -> bytes:
    data = bytearray(length)
    position = 0
    while position < length:
        count = await stream.receive_into(memoryview(data)[position:])
        if count == 0:
            raise ConnectionResetError
        position += count
    return bytes(data)


async def read_frame(stream: Any) -> tuple[int, int, int, bytes, bytes]:
    kind, flags, request_id, body, bulk = HEADER.unpack(await read_exactly(stream, HEADER_BYTES))
    return (kind, flags, request_id, await read_exactly(stream, body), await read_exactly(stream, bulk))


async def assert_closed(stream: Any) -> None:
    """The other side ends the connection, perhaps after saying why."""
    with trio.fail_after(60), contextlib.suppress(ConnectionError):
        while await stream.receive_into(memoryview(bytearray(4096))):
            pass
    stream.close()


REFUSED_TICKETS: dict[str, Callable[[], GrantedTicket]] = {
    "for another peer": lambda: grant(audience=READER.peer_id),
    "has expired": lambda: grant(now=time.time() - 200),
    "lasts too long": lambda: grant(now=time.time() + 1000),
    "does not hold": lambda: grant(ring=KeyRing([b"x" * 32])),
    "not signed by": lambda: replace(
        grant(), ticket=type(grant().ticket)(grant().ticket.claims, bytes(64))
    ),
    "malformed": lambda: replace(grant(), ticket=type(grant().ticket)(b"\xc1", bytes(64))),
    "too long": lambda: replace(grant(), ticket=type(grant().ticket)(bytes(513), bytes(64))),
}


@pytest.mark.parametrize("reason", sorted(REFUSED_TICKETS))
async def test_a_bad_ticket_is_refused_with_the_reason(tcp: TcpHarness, side: Side, reason: str) -> None:
    pool = tcp.pool(side.driver)
    copy = replace(tcp.copy(), ticket=REFUSED_TICKETS[reason]())
    with caught_log() as lines:
        with pytest.raises(AuthenticationFailed, match=reason):
            await side.run(lambda: pool.request(copy, DataKind.PING, Ping()))
        with pytest.raises(PullFailed) as caught:
            await side.run(lambda: pool.pull(copy, bytes(16), Unprepared()))
        await until(lambda: tcp.server.connections == 0)
    assert caught.value.code is Code.AUTHENTICATION_FAILED
    assert 1 <= len(lines) <= 2  # one line, unless over a second lies between the refusals
    assert reason in lines[0]


async def test_a_stolen_ticket_is_of_no_use_without_its_secret(tcp: TcpHarness, side: Side) -> None:
    stolen = replace(grant(), secret=os.urandom(32))
    pool = tcp.pool(side.driver)
    with pytest.raises(AuthenticationFailed, match="did not prove"):  # the thief trusts no ticket either
        await side.run(lambda: pool.request(replace(tcp.copy(), ticket=stolen), DataKind.PING, Ping()))
    with caught_log() as lines:
        stream = await authenticated(tcp.address, stolen)
        await stream.send(encode_frame(DataKind.PING, 1, Ping()))
        with contextlib.suppress(ConnectionError):
            kind, flags, *_, body, _ = await read_frame(stream)
            assert (kind, flags & 2) == (DataKind.PROOF, 2)
            assert b"without its secret" in body
        await assert_closed(stream)
        await until(lambda: tcp.server.connections == 0)
    assert len(lines) == 1


async def test_scopes(tcp: TcpHarness, side: Side) -> None:
    pool = tcp.pool(side.driver)
    reader = replace(tcp.copy(), ticket=grant(Scope.READ))
    digest = put(tcp.segment, "key", b"value")
    buffer = bytearray(5)
    await side.run(lambda: pool.pull(reader, digest, BufferDestination(buffer)))
    assert buffer == b"value"
    for kind, message in [
        (DataKind.PUSH, Push(1, [], b"")),
        (DataKind.REPLICATE, Replicate(digest, 1, 1, 5)),
        (DataKind.SNAPSHOT, Snapshot(1)),
        (DataKind.CLUSTER_RECORDS, ClusterRecords([], [])),
    ]:
        with pytest.raises(AuthenticationFailed, match="does not allow"):
            await side.run(lambda k=kind, m=message: pool.request(reader, k, m))  # type: ignore[misc]  # mypy: defaults of a lambda
    assert tcp.backend.pushes == []
    assert (await side.run(lambda: pool.request(reader, DataKind.PING, Ping()))) == Pong(7, 42)


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "huge body": HEADER.pack(DataKind.GET, 0, 1, 0xFFFF_FFFF, 0),
    "huge bulk": HEADER.pack(DataKind.PING, 0, 1, 0, 0xFFFF_FFFF),
    "bulk in a request": HEADER.pack(DataKind.PING, 0, 1, 0, 100) + bytes(100),
    "second hello": encode_frame(DataKind.HELLO, 1, Ping()),
    "short nonce": encode_frame(DataKind.HELLO, 1, Hello(3, 4, grant().ticket, b"short")),
    "reply": encode_frame(DataKind.PING, 1, Ping(), flags=REPLY),
    "malformed body": HEADER.pack(DataKind.GET, 0, 1, 3, 0) + b"\xc1\xc1\xc1",
    "no items": encode_frame(DataKind.GET, 1, Get([])),
    "too many items": encode_frame(DataKind.GET, 1, Get([GetItem(bytes(16))] * 1025)),
    "random": random.Random(3).randbytes(3000),
}


@pytest.mark.parametrize("stage", ["before the preface", "before the hello", "after the hello"])
@pytest.mark.parametrize("name", sorted(GARBAGE))
async def test_garbage_ends_its_connection_only(tcp: TcpHarness, stage: str, name: str) -> None:
    good = await authenticated(tcp.address)
    with caught_log() as lines:
        if stage == "after the hello":
            stream = await authenticated(tcp.address)
        else:
            stream = await connect(tcp.address)
            if stage == "before the hello":
                await stream.send(PREFACE_DATA)
        await stream.send(GARBAGE[name])
        await assert_closed(stream)
        await until(lambda: tcp.server.connections == 1)
    assert len(lines) == 1, lines
    await good.send(encode_frame(DataKind.PING, 9, Ping()))
    assert (await read_frame(good))[:3] == (DataKind.PING, REPLY, 9)
    good.close()


async def test_a_kind_from_the_future_is_unsupported_and_nothing_else_happens(tcp: TcpHarness) -> None:
    stream = await authenticated(tcp.address)
    await stream.send(HEADER.pack(999, 0, 1, 2, 0) + b"xx")
    kind, flags, *_, body, _ = await read_frame(stream)
    assert (kind, flags) == (999, 3)
    assert b"unknown" in body
    await stream.send(encode_frame(DataKind.PING, 2, Ping()))
    assert (await read_frame(stream))[0] == DataKind.PING
    stream.close()


async def test_protocol_versions_that_do_not_meet(tcp: TcpHarness) -> None:
    stream = await connect(tcp.address)
    hello = Hello(7, 9, grant().ticket, bytes(32))
    with caught_log():
        await stream.send(PREFACE_DATA + encode_frame(DataKind.HELLO, 0, hello))
        *_, body, _ = await read_frame(stream)
        assert b"upgrade" in body
        await assert_closed(stream)


async def test_connections_are_limited() -> None:
    limits = ServerLimits(connections=4, unproved_per_address=2, hello_seconds=0.15)
    async with TcpHarness.open(segment_of(SEGMENT_BYTES), limits) as harness:
        with caught_log() as lines:
            silent = [await connect(harness.address) for _ in range(3)]
            await assert_closed(silent[2])  # the third unproved one from this address
            assert harness.server.connections == 2
            for stream in silent[:2]:
                await assert_closed(stream)  # no hello in time
            await until(lambda: harness.server.connections == 0)
            good = [await authenticated(harness.address) for _ in range(4)]
            await until(lambda: harness.server.places.taken == 4)
            good.append(await authenticated(harness.address))
            await assert_closed(good[0])  # the longest unused one made room
            await until(lambda: harness.server.connections == 4)
            for stream in good:
                stream.close()
            await until(lambda: harness.server.connections == 0)
        assert any("without a valid hello" in line for line in lines)
        assert any("no hello within" in line for line in lines)


async def test_idle_connections_are_closed() -> None:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES), ServerLimits(idle_seconds=0.05)) as harness:
        stream = await authenticated(harness.address)
        await assert_closed(stream)


async def test_a_reader_that_does_not_read_is_cut() -> None:
    segment = segment_of(SEGMENT_BYTES)
    digest = put(segment, "key", pattern(16 * MIB))
    async with TcpHarness.open(segment, ServerLimits(progress_seconds=0.1)) as harness:
        with caught_log() as lines:
            stream = await authenticated(harness.address)
            await stream.send(encode_frame(DataKind.GET, 1, Get([GetItem(digest)])))
            await until(lambda: segment.leased_bytes > 0)
            await until(lambda: segment.leased_bytes == 0 and harness.server.connections == 0)
            stream.close()
        assert any("no progress" in line for line in lines)


async def test_half_a_request_is_waited_for_only_so_long() -> None:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES), ServerLimits(progress_seconds=0.1)) as harness:
        with caught_log():
            stream = await authenticated(harness.address)
            await stream.send(encode_frame(DataKind.PING, 1, Ping())[:-1])
            await assert_closed(stream)


# --- tcp: holders that misbehave -------------------------------------------------------------

Script = Callable[[Any, Callable[[], Awaitable[tuple[int, int, int, bytes, bytes]]]], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(script: Callable[[TrioStream], Awaitable[None]]) -> AsyncIterator[str]:
    """Runs `script` on each connection; yields the server's address."""
    (listener,) = await open_data_listeners(["127.0.0.1:0"])

    async def serve_one(sock: socket.socket) -> None:
        stream = TrioStream(sock)
        with contextlib.closing(stream), contextlib.suppress(OSError):
            await script(stream)

    async def serve() -> None:
        while True:
            await trio.lowlevel.wait_readable(listener.fileno())
            sock, _ = listener.accept()
            nursery.start_soon(serve_one, sock)

    with listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield join_address(*listener.getsockname()[:2])
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def scripted_owner(script: Script) -> AsyncIterator[RemoteCopy]:
    """A peer that shakes hands as it should and then does what `script` says."""

    async def serve(stream: TrioStream) -> None:
        assert await read_exactly(stream, 8) == PREFACE_DATA
        *_, body, _ = await read_frame(stream)
        hello = decode_body(Hello, body)
        _, secret = open_ticket(
            hello.ticket, audience=OWNER.peer_id, ring=RING, verifier=Verifier(), now_unix=time.time()
        )
        proof = prove(secret, b"server", hello.nonce, bytes(32))
        reply = HelloReply(MIN_DATA_VERSION, bytes(32), proof, 7)
        await stream.send(encode_frame(DataKind.HELLO, 0, reply, flags=REPLY))
        await read_frame(stream)
        await script(stream, lambda: read_frame(stream))

    async with raw_server(serve) as address:
        yield RemoteCopy(OWNER.peer_id, (address,), grant(), member=1)


def object_reply(value: bytes, key: str = "key", **changes: Any) -> ObjectReply:
    sums = chunk_sums(value)
    trailer = encode_trailer(TrailerBody("default", key, sums))
    slot = Slot(
        SlotState.LIVE,
        key_digest(key),
        Version(1, 1, root_checksum(len(value), sums)),
        1 << 20,
        len(value),
        len(trailer),
    )
    fields: dict[str, Any] = {"bulk_bytes": len(value), **changes}
    return ObjectReply(ObjectStatus.OK, encode_slot(slot), trailer, **fields)


VALUE = pattern(2 * MIB)


def answer(*parts: Callable[[int], bytes], then: float = 0.0) -> Script:
    async def script(stream: Any, read: Any) -> None:
        while True:
            _, _, request_id, _, _ = await read()
            for part in parts:
                await stream.send(part(request_id))
            if then:
                await trio.sleep(then)

    return script


def objects_frame(*replies: ObjectReply, bulk_length: int | None = None) -> Callable[[int], bytes]:
    size = sum(reply.bulk_bytes for reply in replies) if bulk_length is None else bulk_length
    return lambda request_id: encode_frame(
        DataKind.GET, request_id, Objects(list(replies)), flags=REPLY, bulk_length=size
    )


MISBEHAVIOUR: dict[str, tuple[Script, set[Code]]] = {
    "stops before the answer": (answer(then=30), {Code.DEADLINE_EXCEEDED}),
    "stops in the middle": (
        answer(objects_frame(object_reply(VALUE)), lambda _: VALUE[:MIB], then=30),
        {Code.DEADLINE_EXCEEDED},
    ),
    "text": (answer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n"), {Code.MALFORMED}),
    "huge body": (answer(lambda i: HEADER.pack(16, 1, i, 0xFFFF_FFFF, 0)), {Code.MALFORMED}),
    "another id": (answer(lambda i: objects_frame(object_reply(VALUE))(i + 1)), {Code.MALFORMED}),
    "malformed body": (answer(lambda i: HEADER.pack(16, 1, i, 1, 0) + b"\xc1"), {Code.MALFORMED}),
    "no items": (answer(objects_frame()), {Code.MALFORMED}),
    "two items": (answer(objects_frame(object_reply(b"a"), object_reply(b"b"))), {Code.MALFORMED}),
    "bulk does not add up": (
        answer(objects_frame(object_reply(VALUE), bulk_length=5)),
        {Code.MALFORMED},
    ),
    "negative bulk": (
        answer(objects_frame(object_reply(VALUE, bulk_bytes=-5), bulk_length=0)),
        {Code.MALFORMED},
    ),
    "another range": (
        answer(objects_frame(object_reply(VALUE, bulk_bytes=5)), lambda _: VALUE[:5]),
        {Code.MALFORMED},
    ),
    "another object": (
        answer(objects_frame(object_reply(VALUE, "other")), lambda _: VALUE),
        {Code.STALE},
    ),
    "wrong bytes": (answer(objects_frame(object_reply(VALUE)), lambda _: bytes(2 * MIB)), {Code.STALE}),
    "status from the future": (answer(objects_frame(ObjectReply(77))), {Code.UNSUPPORTED}),
    "busy": (answer(objects_frame(ObjectReply(ObjectStatus.BUSY))), {Code.BUSY}),
}


class ImpatientPool(ConnectionPool):
    """Waits for some peers for a moment only, and for others for as long as a busy machine may take."""

    impatient_with: set[bytes]

    async def _use(self, peer: RemotePeer, progress_seconds: float, *rest: Any, **more: Any) -> Any:
        if peer.peer_id in self.impatient_with:
            progress_seconds = 0.15
        return await super()._use(peer, progress_seconds, *rest, **more)


@pytest.mark.parametrize("name", sorted(MISBEHAVIOUR))
async def test_a_holder_that_misbehaves_fails_the_pull_and_nothing_else(
    side: Side, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, codes = MISBEHAVIOUR[name]
    monkeypatch.setattr(transport_module, "HOLDER_ANSWER_SECONDS", 60.0)
    good_segment = segment_of(SEGMENT_BYTES)
    digest = put(good_segment, "key", VALUE)
    async with scripted_owner(script) as bad, TcpHarness.open(good_segment) as good:
        pool = ImpatientPool(side.driver, progress_seconds=60, connect_seconds=60)
        good._pools.append(pool)  # closed with the others
        pool.impatient_with = {bad.peer_id} if "stops" in name else set()
        buffer = bytearray(len(VALUE))
        with pytest.raises(PullFailed) as caught:
            await side.run(lambda: pool.pull(bad, digest, BufferDestination(buffer)))
        assert caught.value.code in codes
        if name not in ("busy", "status from the future"):
            assert pool.open_connections == 0
        copies = [bad, replace(good.copy(), peer_id=READER.peer_id, member=2)]
        report = await side.run(
            lambda: pull_with_failover(copies, [TcpTransport(pool)], digest, BufferDestination(buffer))
        )
        assert report.unwrap().length == len(VALUE)
        assert report.copy is not None
        assert report.copy.member == 2
        assert [(failure.member, failure.code) for failure in report.failures] == (
            [] if name == "busy" else [(1, caught.value.code)]
        )
        assert buffer == VALUE


async def test_a_slow_answer_to_a_request_is_a_deadline(side: Side) -> None:
    async with scripted_owner(answer(then=30)) as peer:
        pool = ConnectionPool(side.driver)
        with pytest.raises(DeadlineExceeded):
            await side.run(lambda: pool.request(peer, DataKind.PING, Ping(), 0.1))
        assert pool.open_connections == 0
        pool.close()


@pytest.mark.parametrize("says_hello", [False, True])
async def test_a_holder_that_is_hurried_is_given_up_early(side: Side, says_hello: bool) -> None:
    """Not for long over the connection, at each of its addresses, nor for the answer; others go on."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        silence = f"127.0.0.1:{deaf.getsockname()[1]}"
        async with scripted_owner(answer(then=30)) as peer:
            data = peer.data if says_hello else (silence, silence)
            hung = replace(peer, data=data, answer_seconds=0.2)
            pool = ConnectionPool(side.driver, progress_seconds=15, connect_seconds=15)
            with pytest.raises(PullFailed) as caught:
                await side.run(lambda: pool.pull(hung, bytes(16), Unprepared()))
            (outcome,) = await side.run(lambda: pool.pull_many(hung, [(bytes(16), Unprepared())]))
            for failure in (caught.value, outcome):
                assert isinstance(failure, PullFailed)
                assert failure.code is Code.DEADLINE_EXCEEDED
                [*waits] = re.findall(r" ([\d.e-]+) s", failure.text)
                assert waits
                assert all(float(seconds) <= 0.2 for seconds in waits), failure.text
            pool.close()


async def test_a_hurried_read_hurries_no_other_one(tcp: TcpHarness, side: Side) -> None:
    digest = put(tcp.segment, "key", VALUE)
    pool = tcp.pool(side.driver)
    for copy, seconds in ((with_alternatives(tcp.copy(), ()), 1.5), (tcp.copy(), None)):
        buffer = bytearray(len(VALUE))
        await side.run(
            lambda copy=copy, buffer=buffer: pool.pull(  # type: ignore[misc]  # mypy: defaults of a lambda
                copy, digest, BufferDestination(buffer)
            )
        )
        assert buffer == VALUE
        (places,) = pool._peers.values()
        assert places[0].connection is not None
        assert places[0].connection.stream.receive_seconds == seconds


async def test_an_impostor_without_the_cluster_key(side: Side) -> None:
    async with scripted_owner(answer()) as peer:
        pool = ConnectionPool(side.driver)
        other = replace(peer, ticket=replace(grant(), secret=bytes(32)))
        with pytest.raises(AuthenticationFailed, match="did not prove"):
            await side.run(lambda: pool.request(other, DataKind.PING, Ping()))
        pool.close()


# --- tcp: the pool ---------------------------------------------------------------------------


async def test_a_restarted_peer_costs_a_silent_reconnect(side: Side) -> None:
    segment = segment_of(SEGMENT_BYTES)
    value = pattern(5000)
    pool = ConnectionPool(side.driver)
    for _ in range(3):
        digest = put(segment, "key", value)
        async with TcpHarness.open(segment) as harness:
            here = replace(harness.copy(), peer_id=OWNER.peer_id)
            buffer = bytearray(len(value))
            await side.run(lambda: pool.pull(here, digest, BufferDestination(buffer)))  # noqa: B023  # awaited at once
            assert buffer == value
            assert pool.open_connections == 1
    pool.close()


async def test_every_address_is_tried(tcp: TcpHarness, side: Side) -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    pool = tcp.pool(side.driver)
    peer = replace(tcp.copy(), data=(nobody, tcp.address))
    assert await side.run(lambda: pool.request(peer, DataKind.PING, Ping())) == Pong(7, 42)
    for alone in (replace(peer, peer_id=b"x", data=(nobody,)), replace(peer, peer_id=b"y", data=())):
        with pytest.raises(Unavailable):
            await side.run(lambda alone=alone: pool.request(alone, DataKind.PING, Ping()))  # type: ignore[misc]  # mypy: defaults of a lambda
        with pytest.raises(PullFailed) as caught:
            await side.run(lambda alone=alone: pool.pull(alone, bytes(16), Unprepared()))  # type: ignore[misc]  # mypy: defaults of a lambda
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.retriable


async def replicate(pool: ConnectionPool, peer: RemotePeer) -> None:
    """A request that takes until the owner's `release`."""
    await pool.request(peer, DataKind.REPLICATE, Replicate(bytes(16), 1, 1, 1))


async def test_connections_to_one_peer_are_limited_and_surplus_idle_ones_close(tcp: TcpHarness) -> None:
    pool = ConnectionPool(TrioDriver(), max_places=5, idle_per_peer=2)
    peer = tcp.copy()

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(replicate, pool, peer)
        await until(lambda: tcp.backend.waiting == 5)
        assert tcp.server.connections == 5
        tcp.backend.release.set()
    assert tcp.backend.most_waiting == 5
    assert pool.open_connections == 2
    await until(lambda: tcp.server.connections == 2)
    pool.close()
    await until(lambda: tcp.server.connections == 0)
    with pytest.raises(StoreClosed):
        await pool.request(peer, DataKind.PING, Ping())


async def test_connections_of_a_burst_close_when_fewer_are_enough(
    tcp: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ConnectionPool(TrioDriver())
    peer = tcp.copy()

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(replicate, pool, peer)
        await until(lambda: tcp.backend.waiting == 4)
        tcp.backend.release.set()
    await pool.request(peer, DataKind.PING, Ping())
    assert tcp.server.connections == pool.open_connections == 4
    monkeypatch.setattr("p2pstore.transfer.reading.connection_places.SPARE_SECONDS", 0.0)
    for left in (3, 2, 1, 1):
        await pool.request(peer, DataKind.PING, Ping())
        assert pool.open_connections == left
    await until(lambda: tcp.server.connections == 1)
    pool.close()


async def test_brief_reads_share_the_connections_that_are_kept(tcp: TcpHarness) -> None:
    """Others open more; and who gives up leaves the queue, or passes his turn on."""
    pool = ConnectionPool(TrioDriver(), idle_per_peer=2)
    digest = put(tcp.segment, "key", VALUE)
    peer = tcp.copy()

    async def read(task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED) -> None:
        buffer = bytearray(len(VALUE))
        with trio.CancelScope() as scope:
            task_status.started(scope)
            await pool.pull(peer, digest, BufferDestination(buffer), 0, len(VALUE))
            assert buffer == VALUE

    async with trio.open_nursery() as nursery:
        nursery.start_soon(replicate, pool, peer)
        await until(lambda: tcp.backend.waiting == 1)
        scopes = [await nursery.start(read) for _ in range(20)]
        for scope in scopes[:5] + scopes[10:15]:  # those that read, and those that queue
            scope.cancel()
        await until(lambda: len(nursery.child_tasks) == 1)
        assert pool.open_connections == 3
        await until(lambda: tcp.server.connections == 3)
        tcp.backend.release.set()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read)
    assert pool.open_connections == 2
    pool.close()


async def test_who_queues_for_a_hung_peer_does_not_wait_for_it_once_more() -> None:
    pool = ConnectionPool(TrioDriver(), idle_per_peer=1, progress_seconds=0.5)
    accepted: list[trio.SocketStream] = []
    failed: list[PullFailed] = []

    async def read(copy: RemoteCopy) -> None:
        with pytest.raises(PullFailed) as caught:
            await pool.pull(copy, bytes(16), BufferDestination(bytearray(10)), 0, 10)
        failed.append(caught.value)

    async def hang(stream: trio.SocketStream) -> None:
        accepted.append(stream)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, hang, [listener])
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        copy = RemoteCopy(OWNER.peer_id, (address,), grant(), member=1)
        async with trio.open_nursery() as readers:
            for _ in range(30):
                readers.start_soon(read, copy)
        nursery.cancel_scope.cancel()
    assert len(accepted) == 1
    assert {each.code for each in failed} == {Code.DEADLINE_EXCEEDED}
    pool.close()


async def test_closing_the_pool_fails_what_is_under_way(tcp: TcpHarness) -> None:
    pool = ConnectionPool(TrioDriver())
    with pytest.RaisesGroup(P2PStoreError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replicate, pool, tcp.copy())
            await until(lambda: tcp.backend.waiting == 1)
            pool.close()


async def test_listeners_name_the_address_they_cannot_have() -> None:
    (listener,) = await open_data_listeners(["[::1]:0"])
    address = join_address(*listener.getsockname()[:2])
    assert address.startswith("[::1]:")
    with pytest.raises(ConfigError, match=r"\[::1\]:\d+: is already in use"):
        await open_data_listeners(["127.0.0.1:0", address])
    listener.close()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        await open_data_listeners(["nonsense"])
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        await open_data_listeners(["192.0.2.1:0"])


# --- tcp: a real process ---------------------------------------------------------------------


def run_owner() -> None:
    """A process that owns one object of 16 MiB and says where."""

    async def main() -> None:
        segment = segment_of(SEGMENT_BYTES)
        put(segment, "key", pattern(16 * MIB))
        async with TcpHarness.open(segment) as harness:
            print(harness.address, flush=True)
            await trio.sleep_forever()

    trio.run(main)


@contextlib.asynccontextmanager
async def owner_process() -> AsyncIterator[tuple[subprocess.Popen[str], RemoteCopy]]:
    """`run_owner` in a process of its own, and its copy."""
    program = "from tests.contract.test_transport import run_owner; run_owner()"
    with subprocess.Popen(  # starting it takes a moment
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            address = (await trio.to_thread.run_sync(present(process.stdout).readline)).strip()
            yield process, RemoteCopy(OWNER.peer_id, (address,), grant(), member=1)
        finally:
            process.kill()


class KillingDestination(BufferDestination):
    """Kills the owner when the first bytes are about to move."""

    def __init__(self, buffer: bytearray, process: subprocess.Popen[str]) -> None:
        super().__init__(buffer)
        self._process = process

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return super().prepare(slot, trailer)


async def test_an_owner_killed_in_the_middle_fails_over(side: Side) -> None:
    segment = segment_of(SEGMENT_BYTES)
    value = pattern(16 * MIB)
    digest = put(segment, "key", value)
    async with owner_process() as (process, first), TcpHarness.open(segment) as second:
        other = replace(second.copy(), peer_id=READER.peer_id, member=2)
        buffer = bytearray(len(value))
        transport = second.transport(side.driver)
        report = await side.run(
            lambda: pull_with_failover(
                [first, other], [transport], digest, KillingDestination(buffer, process)
            )
        )
        assert report.copy is other
        assert [failure.code for failure in report.failures] == [Code.UNAVAILABLE]
        assert buffer == value
