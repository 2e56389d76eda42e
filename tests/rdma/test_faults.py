"""Faults of RDMA alone: connections, memory that devices write to, and the end of both."""

import mmap
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from p2pstore.errors import Unavailable
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.memory.segment_layout import Slot, TrailerBody, decode_slot, encode_slot
from p2pstore.objects import MIB, chunk_sums
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, RdmaConnect, RdmaConnected
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma import rdma_lines, rdma_reads, rdma_serving
from p2pstore.transfer.rdma.rdma_payload import WHOLE_BYTES
from p2pstore.transfer.rdma.rdma_reads import Piece
from p2pstore.transfer.rdma.rdma_rules import Endpoint, RemoteMemory, agree
from p2pstore.transfer.rdma.rdma_staging import Staging
from p2pstore.transfer.rdma.rdma_transport import RdmaTransport, open_rdma_reading
from p2pstore.transfer.rdma.rdma_verbs import Device, ReadWork, Region, device_names, load_verbs
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import BufferDestination, pull_with_failover
from p2pstore.wire import Code
from tests.contract.test_transport import (
    OWNER,
    ROOT,
    SEGMENT_BYTES,
    TcpHarness,
    Unprepared,
    cancelled_at_step,
    grant,
    pattern,
    put,
    segment_of,
)
from tests.present import present
from tests.rdma.harness import STAGING_BYTES, RdmaHarness, SomeCompletions, cables
from tests.rdma.owner import Owner
from tests.stored import stored
from tests.waiting import until


def first_line(transport: RdmaTransport) -> rdma_reads.Line | None:
    """The line to the owner through the first device."""
    return transport.lines.of(OWNER.peer_id).ways[0].line


@pytest.fixture
async def rdma() -> AsyncIterator[RdmaHarness]:
    async with RdmaHarness.open_rdma(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


@pytest.mark.parametrize(
    "length", [0, 100, WHOLE_BYTES, WHOLE_BYTES + 1, MIB - 3, MIB, MIB + 1, 2 * MIB + 5]
)
async def test_no_object_goes_over_tcp(rdma: RdmaHarness, length: int) -> None:
    value = pattern(length)
    put(rdma.segment, "other", b"x")
    digest = put(rdma.segment, "key", value)
    buffer = bytearray(length)
    transport = rdma.transport(TrioDriver())
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert buffer == value
    assert rdma.server.traffic.objects == 0
    assert rdma.rdma.readers == 1


async def test_a_way_is_measured(rdma: RdmaHarness) -> None:
    transport = rdma.transport(TrioDriver())
    moved, seconds = await transport.measure(rdma.copy(), 0.5)
    assert moved >= rdma.staging.large.block_bytes
    assert seconds >= 0.5
    await until(lambda: rdma.engine.under_way == rdma.staging.large.taken == 0)


@pytest.mark.parametrize("hint", [1, 77, 1 << 22, -1])
async def test_a_wrong_hint_costs_a_question(rdma: RdmaHarness, hint: int) -> None:
    digest = put(rdma.segment, "key", pattern(3000))
    put(rdma.segment, "other", pattern(3000, 1))
    copy = rdma.copy(digest)
    assert copy.slot != hint
    buffer = bytearray(3000)
    transport = rdma.transport(TrioDriver())
    await transport.pull(replace(copy, slot=hint), digest, BufferDestination(buffer))
    assert buffer == pattern(3000)
    assert rdma.server.traffic.bytes < 1000  # slot and trailer, without the value


async def test_a_slot_that_leads_out_of_the_segment(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(rdma.segment, "key", pattern(3000))
    entry = present(rdma.segment.find(digest, 0.0))
    slot = present(decode_slot(rdma.segment.table.slot_bytes(entry)))
    beyond = msgspec.structs.replace(slot, offset=rdma.segment.geometry.total_bytes - 4096)
    monkeypatch.setattr(rdma.segment.table, "slot_bytes", lambda _: encode_slot(beyond))
    copy = replace(rdma.copy(digest), slot=-1)
    longer = put(rdma.segment, "longer", pattern(3000))
    transport = rdma.transport(TrioDriver())
    with pytest.raises(PullFailed) as caught:
        await transport.pull(copy, digest, BufferDestination(bytearray(3000)))
    assert caught.value.code is Code.STALE  # it is not there: the bytes do not match
    beyond = msgspec.structs.replace(slot, offset=rdma.segment.geometry.total_bytes)
    with pytest.raises(PullFailed, match="outside") as caught:
        await transport.pull(copy, digest, BufferDestination(bytearray(3000)))
    assert (caught.value.code, caught.value.retriable) == (Code.MALFORMED, True)
    monkeypatch.undo()
    copy = rdma.copy(longer)
    await transport.pull(copy, longer, BufferDestination(bytearray(3000)))  # still connected


async def test_a_line_in_use_stays_and_one_out_of_use_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner ends connections on which nothing is asked, and one-sided reads ask nothing."""
    monkeypatch.setattr("p2pstore.transfer.rdma.rdma_lines.PING_SECONDS", 0.3)
    monkeypatch.setattr("p2pstore.transfer.rdma.rdma_lines.IDLE_SECONDS", 1.0)
    segment = segment_of(8 * MIB)
    limits = ServerLimits(idle_seconds=1.5)
    async with RdmaHarness.open_rdma(segment, limits) as rdma:
        digest = put(segment, "key", pattern(3000))
        transport = rdma.transport(TrioDriver())
        lines = set()
        until_seconds = trio.current_time() + 4.0
        while trio.current_time() < until_seconds:
            await transport.pull(rdma.copy(digest), digest, BufferDestination(bytearray(3000)))
            lines.add(first_line(transport))
        assert len(lines) == 1
        await until(lambda: first_line(transport) is None)
        await until(lambda: rdma.rdma.readers == 0)


async def test_an_expired_object_is_not_delivered(rdma: RdmaHarness) -> None:
    value = pattern(3000)
    sums = chunk_sums(value)
    trailer = TrailerBody("default", "key", sums, expires_unix_ms=int(time.time() * 1000) - 1)
    digest = stored(rdma.segment, trailer, value).digest
    transport = rdma.transport(TrioDriver())
    with pytest.raises(PullFailed) as caught:
        await transport.pull(rdma.copy(digest), digest, Unprepared())
    assert (caught.value.code, caught.value.sequence) == (Code.NO_SUCH_KEY, 42)


async def test_a_registered_destination_is_read_into_directly(rdma: RdmaHarness) -> None:
    value = pattern(9 * MIB + 5)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(mmap.mmap(-1, 10 * MIB))
    transport = rdma.transport(TrioDriver(), registered=[rdma.registered(memory)])
    taken = []
    rdma.staging.large.take_nowait = lambda: taken.append(1)  # type: ignore[method-assign]  # mypy: to be seen
    rdma.staging.large.take = None  # type: ignore[method-assign,assignment]  # mypy: must not be called
    destination = BufferDestination(memory[4096:])
    await transport.pull(rdma.copy(digest), digest, destination)
    assert memory[4096 : 4096 + len(value)] == value
    assert not any(memory[:4096])
    assert not any(memory[4096 + len(value) :])
    assert not taken


@pytest.mark.parametrize(
    ("length", "direct"), [(3 * MIB + 5, False), (3 * MIB + 5, True), (700_000, True)]
)
async def test_a_reader_cancelled_at_each_step_leaves_nothing(
    rdma: RdmaHarness, length: int, direct: bool
) -> None:
    value = pattern(length)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(mmap.mmap(-1, 4 * MIB))[: len(value)]
    registered = [rdma.registered(memory)] if direct else []
    delivered, at = False, 0
    transport = rdma.transport(TrioDriver(), registered=registered)
    await transport.lines.connected(rdma.copy())

    async def pull_here() -> None:
        await transport.pull(rdma.copy(digest), digest, BufferDestination(memory))

    while not delivered:
        at += 1
        memory[:] = bytes(len(memory))
        with trio.CancelScope() as scope, cancelled_at_step("pull_here", at, scope):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pull_here)
            delivered = True
        after = bytes(memory)
        await until(lambda: rdma.engine.under_way == 0)
        assert memory == after, "something wrote to the destination after cancellation"
        assert (rdma.staging.small.taken, rdma.staging.large.taken) == (0, 0)
    assert memory == value
    assert at > 2


@pytest.mark.parametrize("direct", [False, True])
async def test_memory_that_is_written_to_stays_taken(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """A reader is cancelled while it is unknown yet whether its reads have ended."""
    value = pattern(3 * MIB + 5)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(mmap.mmap(-1, 4 * MIB))[: len(value)]
    registered = [rdma.registered(memory)] if direct else []
    transport = rdma.transport(TrioDriver(), registered=registered)
    queue, ended = rdma.engine.completions, trio.Event()
    poll = queue.poll
    scope = trio.CancelScope()

    async def pull() -> None:
        with scope:
            await transport.pull(rdma.copy(digest), digest, Holding(memory))
        ended.set()

    class Holding(BufferDestination):
        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            monkeypatch.setattr(queue, "poll", lambda count: [])
            return super().prepare(slot, trailer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull)
        await until(lambda: rdma.engine.under_way == 4)
        scope.cancel()
        if direct:
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert not ended.is_set(), "the caller got its memory back while it was written to"
        else:
            await ended.wait()
            assert rdma.staging.large.taken == 4
        monkeypatch.setattr(queue, "poll", poll)
        while rdma.engine.under_way:  # its task sleeps: what woke it before was taken from it
            rdma.engine._take()
            await trio.lowlevel.checkpoint()
        await ended.wait()
    assert scope.cancelled_caught
    assert rdma.staging.large.taken == 0
    line = present(first_line(transport))
    assert line.failure is None


async def test_an_object_of_one_chunk_that_is_waited_for_no_more(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is cancelled while its payload comes: its memory is free at once, the block when nothing writes."""
    value = pattern(700_000)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(bytearray(len(value)))
    transport = rdma.transport(TrioDriver())
    queue, prepared, ended = rdma.engine.completions, trio.Event(), trio.Event()
    poll = queue.poll
    scope = trio.CancelScope()

    class Told(BufferDestination):
        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            prepared.set()
            return super().prepare(slot, trailer)

    async def pull() -> None:
        with scope:
            await transport.pull(rdma.copy(digest), digest, Told(memory))
        ended.set()

    header_slot_trailer = SomeCompletions(queue, 3, list)
    monkeypatch.setattr(queue, "poll", header_slot_trailer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull)
        await prepared.wait()
        scope.cancel()
        await ended.wait()
        assert (rdma.engine.under_way, rdma.staging.large.taken) == (2, 1)
        assert not any(memory)
        monkeypatch.setattr(queue, "poll", poll)
        while rdma.engine.under_way:  # its task sleeps: what woke it before was taken from it
            rdma.engine._take()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert (rdma.staging.small.taken, rdma.staging.large.taken) == (0, 0)
    line = present(first_line(transport))
    assert line.failure is None


@pytest.mark.parametrize("length", [700_000, 3 * MIB])
async def test_a_device_that_takes_no_request(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Once, the last of those posted together: the line is given up, and the next read has another one."""
    value = pattern(length)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    buffer = bytearray(length)
    await transport.lines.connected(rdma.copy())
    line = present(first_line(transport))
    read = line.pair.read
    taken = ["slot", "trailer"] if length > MIB else ["slot"]

    def refuse(works: Sequence[ReadWork], into: Region, key: int) -> None:
        if not taken:
            read(works[:-1], into, key)
            raise Unavailable("no room in the queue")
        taken.pop()
        read(works, into, key)

    monkeypatch.setattr(line.pair, "read", refuse)
    with pytest.raises(PullFailed, match="no room in the queue") as caught:
        await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert caught.value.retriable
    assert line.pair.closed
    await until(lambda: rdma.engine.under_way == 0)
    assert (rdma.staging.small.taken, rdma.staging.large.taken) == (0, 0)
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert buffer == value


async def test_a_device_that_is_lost(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value = pattern(8 * MIB)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    real, failures = rdma.reading_devices[0].attempt, []
    told: list[str] = []
    rdma.engine.when_lost = lambda: told.append(rdma.engine.lost)

    def attempt(what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        def lost(*_: Any) -> None:
            raise load_verbs().error("the card fell out")

        return real(what, lost if what == "polling" else action, *arguments)

    async def pull() -> None:
        with pytest.raises(PullFailed) as caught:
            await transport.pull(rdma.copy(digest), digest, BufferDestination(bytearray(8 * MIB)))
        failures.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull)
        await until(lambda: rdma.staging.large.taken > 0)
        monkeypatch.setattr(rdma.reading_devices[0], "attempt", attempt)
    monkeypatch.undo()
    assert failures[0].retriable
    assert "the card fell out" in failures[0].text
    assert "the card fell out" in transport.why_not(rdma.copy(digest))
    assert "started again" in caplog.text
    assert told == [rdma.engine.lost]
    assert rdma.engine.under_way == 0


async def test_memory_that_the_owner_took_back(rdma: RdmaHarness) -> None:
    """The key of the memory is good no more: the reader goes on over TCP."""
    value = pattern(2 * MIB)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    buffer = bytearray(len(value))
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    rdma.memory.regions[0].close()
    with pytest.raises(PullFailed) as caught:
        await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert (caught.value.code, caught.value.retriable) == (Code.STALE, True)
    buffer = bytearray(len(value))
    tcp = TcpTransport(rdma.pool(TrioDriver()))
    report = await pull_with_failover(
        [rdma.copy(digest)], [tcp, transport], digest, BufferDestination(buffer)
    )
    assert report.unwrap().transport == "tcp"
    assert [each.transport for each in report.fallbacks] == ["rdma"]
    assert buffer == value
    assert "connecting over RDMA failed" in transport.why_not(rdma.copy(digest))


async def test_an_owner_that_ends_the_connection_in_the_middle(rdma: RdmaHarness) -> None:
    digest = put(rdma.segment, "key", pattern(16 * MIB))
    transport = rdma.transport(TrioDriver())
    failures: list[PullFailed] = []

    async def pull() -> None:
        with pytest.raises(PullFailed) as caught:
            await transport.pull(rdma.copy(digest), digest, BufferDestination(bytearray(16 * MIB)))
        failures.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull)
        await until(lambda: rdma.staging.large.taken > 0)
        rdma.stop.cancel()
    assert (failures[0].code, failures[0].retriable) == (Code.UNAVAILABLE, True)
    await until(lambda: rdma.engine.under_way == 0)
    assert rdma.rdma.readers == 0


async def test_a_reader_connects_again_after_the_owner_ended_it(rdma: RdmaHarness) -> None:
    digest = put(rdma.segment, "key", pattern(300_000))
    transport = rdma.transport(TrioDriver())
    buffer = bytearray(300_000)
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    for session in list(rdma.server._sessions):
        session.retire()
    await until(lambda: rdma.rdma.readers == 0)
    await until(lambda: first_line(transport) is None)
    buffer = bytearray(300_000)
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert buffer == pattern(300_000)
    assert rdma.rdma.readers == 1


async def test_the_right_to_read_ends_with_the_connection(rdma: RdmaHarness) -> None:
    """Whatever the reader does: the owner destroys its own end."""
    put(rdma.segment, "key", pattern(3000))
    connection = await rdma.pool(TrioDriver()).dial(rdma.copy())
    pair = rdma.reading_devices[0].queue_pair(rdma.engine.completions, 5, requests=4, may_be_read=False)
    line = rdma_reads.Line(rdma.engine, pair, 4)
    own = pair.endpoint
    reply = await connection.request(
        DataKind.RDMA_CONNECT,
        RdmaConnect(*(own.queue_pair, own.packet_number, own.gid, own.path_mtu_bytes, own.reads)),
    )
    assert isinstance(reply, RdmaConnected)
    other = Endpoint(
        *(reply.queue_pair, reply.packet_number, reply.gid, reply.path_mtu_bytes, reply.reads)
    )
    pair.connect(other, agree(own, other))
    line.memory = RemoteMemory(reply.address, reply.length_bytes, reply.key)
    block = await rdma.staging.small.take()
    memory = rdma.staging.small.memory
    read = await rdma.engine.read(line, Piece(0, 64, block.address), memory)
    await read.wait(5.0)
    assert bytes(block.view[:8]) == b"P2PSSEG\0"
    block.view[:64] = bytes(64)
    connection.close()
    await until(lambda: rdma.rdma.readers == 0)
    read = await rdma.engine.read(line, Piece(0, 64, block.address), memory)
    with pytest.raises(rdma_reads.ReadFailed, match="retries exceeded"):
        await read.wait(30.0)
    assert not any(block.view[:64])
    await rdma.engine.retire(line)
    block.give_back()


async def test_room_that_is_free_already(rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the reads that took the room was not seen yet: a waiting reader looks before it sleeps."""
    monkeypatch.setattr(rdma_lines, "REQUESTS_PER_LINE", 1)
    transport = rdma.transport(TrioDriver())
    line = await transport.lines.connected(rdma.copy())
    small = rdma.staging.small
    block = await small.take()
    piece = Piece(0, 64, block.address)
    while (
        rdma.engine._armed
    ):  # since before the last completion: the next one wakes the task that takes them
        await (await rdma.engine.read(line, piece, small.memory)).wait(5.0)
    block.view[:8] = bytes(8)
    await rdma.engine.read(line, piece, small.memory)
    await until(lambda: bytes(block.view[:8]) == b"P2PSSEG\0")
    assert (rdma.engine.under_way, rdma.engine._armed) == (1, False)
    with trio.fail_after(10.0):
        read = await rdma.engine.read(line, piece, small.memory)
    await read.wait(5.0)
    block.give_back()


async def test_posts_never_exceed_the_completion_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-RoCE loses completions of a full queue without a word."""
    monkeypatch.setattr(rdma_reads, "MAX_UNDER_WAY", 3)
    values = [pattern(2 * MIB + seed, seed) for seed in range(6)]
    async with RdmaHarness.open_rdma(segment_of(SEGMENT_BYTES)) as rdma:
        digests = [put(rdma.segment, f"key {seed}", value) for seed, value in enumerate(values)]
        buffers = [bytearray(len(value)) for value in values]
        transport = rdma.transport(TrioDriver())
        most = 0

        async def pull(index: int) -> None:
            digest = digests[index]
            await transport.pull(rdma.copy(digest), digest, BufferDestination(buffers[index]))

        class Watcher(trio.abc.Instrument):
            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal most
                most = max(most, rdma.engine.under_way)

        watcher = Watcher()
        trio.lowlevel.add_instrument(watcher)
        async with trio.open_nursery() as nursery:
            for index in range(len(values)):
                nursery.start_soon(pull, index)
        trio.lowlevel.remove_instrument(watcher)
        assert most == 3
    assert buffers == values


async def test_too_many_connections_of_one_peer(
    rdma: RdmaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_serving, "MAX_READERS_PER_PEER", 1)
    digest = put(rdma.segment, "key", pattern(3000))
    first, second = rdma.transport(TrioDriver()), rdma.transport(TrioDriver())
    await first.pull(rdma.copy(digest), digest, BufferDestination(bytearray(3000)))
    with pytest.raises(PullFailed, match="too many") as caught:
        await second.pull(rdma.copy(digest), digest, Unprepared())
    assert caught.value.retriable
    assert second.why_not(rdma.copy(digest))
    assert not first.why_not(rdma.copy(digest))


async def test_a_queue_pair_that_cannot_be_leaves_nothing(rdma: RdmaHarness) -> None:
    pool = rdma.pool(TrioDriver())
    good = RdmaConnect(17, 1, bytes(10) + b"\xff\xff\x0a\x4d\x00\x09", 4096, 16)
    wrong = [replaced(good, queue_pair=0), replaced(good, gid=b"short"), replaced(good, reads=0)]
    for request in wrong:
        with pytest.raises(Exception, match="cannot be"):
            await pool.request(rdma.copy(), DataKind.RDMA_CONNECT, request)
    assert rdma.rdma.readers == 0


def replaced(message: RdmaConnect, **fields: Any) -> RdmaConnect:
    known = {name: getattr(message, name) for name in message.__struct_fields__}
    return RdmaConnect(**{**known, **fields})


async def test_readers_without_the_scope_of_peers_may_not(rdma: RdmaHarness) -> None:
    digest = put(rdma.segment, "key", pattern(3000))
    copy = replace(rdma.copy(digest), ticket=grant(Scope.READ))
    transport = rdma.transport(TrioDriver())
    with pytest.raises(PullFailed, match="does not allow RDMA_CONNECT") as caught:
        await transport.pull(copy, digest, Unprepared())
    assert caught.value.retriable
    assert rdma.rdma.readers == 0


async def test_a_holder_without_rdma_is_left_to_tcp(rdma: RdmaHarness) -> None:
    segment = segment_of(8 * MIB)
    digest = put(segment, "key", pattern(3000))
    transport = rdma.transport(TrioDriver())
    async with TcpHarness.open(segment) as tcp:
        with pytest.raises(PullFailed, match="does not let others read") as caught:
            await transport.pull(tcp.copy(digest), digest, Unprepared())
    assert caught.value.retriable
    assert transport.why_not(tcp.copy(digest))


OWNED_BYTES = 24 * MIB


@pytest.fixture
def owner() -> Iterator[Owner]:
    """Forked: to import everything anew takes half a minute in the VM."""
    with Owner.forked(OWNED_BYTES) as owner:
        yield owner


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_an_owner_killed_in_the_middle(owner: Owner) -> None:
    ((copy, digest),) = await trio.to_thread.run_sync(owner.copies)
    pool = ConnectionPool(TrioDriver())
    with Device(cables()[0][1]) as device:
        staging = Staging.on([device], STAGING_BYTES)
        async with open_rdma_reading([device]) as ([engine], lines):
            transport = RdmaTransport([engine], pool, lines, staging=staging)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_kill_when, owner, staging)
                with pytest.raises(PullFailed) as caught:
                    buffer = BufferDestination(bytearray(OWNED_BYTES))
                    await transport.pull(copy, digest, buffer)
            assert caught.value.retriable
            await until(lambda: engine.under_way == 0)
            assert (staging.small.taken, staging.large.taken) == (0, 0)
    pool.close()
    assert await trio.to_thread.run_sync(owner.exit_status) == -signal.SIGKILL


async def _kill_when(owner: Owner, staging: Staging) -> None:
    await until(lambda: staging.large.taken > 0, 30.0)
    owner.kill()


def test_everything_is_closed_once() -> None:
    memory = memoryview(mmap.mmap(-1, MIB))
    device = Device(device_names()[0])
    region = device.register(address_of(memory), len(memory), remote_read=True)
    queue = device.completion_queue(4)
    pair = device.queue_pair(queue, 1, requests=1, may_be_read=True)
    pair.close()
    pair.close()
    device.close()
    device.close()
    region.close()
    queue.close()
    assert region.remote_key  # pyverbs would end the process here


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match="nope"):
        Device("nope")


LOCKING = """
import mmap, os, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.transfer.rdma.rdma_verbs import Device, device_names
memory = memoryview(mmap.mmap(-1, 8 << 20))
try:
    Device(device_names()[0]).register(address_of(memory), len(memory), remote_read=True)
except ConfigError as error:
    print(error)
"""


def test_memory_that_may_not_be_locked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ulimit -l" in done.stdout, done.stderr
