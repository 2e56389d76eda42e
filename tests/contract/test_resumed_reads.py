"""A holder that fails in the middle of an object: the next one is asked only for what is missing. And whole peers read
large objects from several holders at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from p2pstore import Peer, blocking
from p2pstore.local import local_messages as local
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.reading.arriving import ALONE, PARTS_AHEAD, Arriving, Destination, resumable
from p2pstore.transfer.reading.span_reads import Span, SpanQueue
from p2pstore.transfer.transfer_trace import FetchTrace, ReadWatch
from p2pstore.transfer.transport import BufferDestination, PullReport, RemoteCopy, pull_with_failover
from p2pstore.wire import Code
from tests.cluster.peers import cluster
from tests.contract.sides import Side
from tests.contract.small_peer import small_peer
from tests.contract.test_transport import (
    READER,
    TcpHarness,
    _buffers,
    grant,
    owner_process,
    pattern,
    put,
    segment_of,
)
from tests.waiting import until

HEADS_BYTES = 16 * 1024
"""Headers, slots and trailers of a few answers."""


@contextlib.asynccontextmanager
async def holder(data_bytes: int, value: bytes, clock: int = 1) -> AsyncIterator[TcpHarness]:
    segment = segment_of(data_bytes)
    put(segment, "key", value, clock)
    async with TcpHarness.open(segment) as harness:
        yield harness


DIGEST = put(segment_of(24 * MIB), "key", b"")


@contextlib.contextmanager
def damaged(harness: TcpHarness, data_bytes: int, chunk: int) -> Iterator[None]:
    entry = harness.segment.find(DIGEST, time.time())
    assert entry is not None
    at = entry.offset + chunk * MIB + 7
    _buffers[data_bytes][at] ^= 1
    yield
    _buffers[data_bytes][at] ^= 1


async def read(
    side: Side, harness: TcpHarness, copies: list[RemoteCopy], destination: Destination
) -> PullReport:
    transport = harness.transport(side.driver)
    return await side.run(lambda: pull_with_failover(copies, [transport], DIGEST, destination))


@pytest.mark.parametrize(("length", "chunk"), [(5 * MIB + 3, 3), (5 * MIB, 0), (70 * MIB + 1, 66)])
async def test_only_missing_chunks_are_read_from_the_next_holder(
    side: Side, length: int, chunk: int
) -> None:
    value, room = pattern(length), 80 * MIB
    buffer = bytearray(len(value))
    async with holder(room, value) as first, holder(room + 8 * MIB, value) as second:
        copies = [first.copy(), replace(second.copy(), peer_id=READER.peer_id, member=2)]
        with damaged(first, room, chunk):
            report = await read(side, first, copies, BufferDestination(buffer))
        assert report.copy is copies[1]
        assert [(each.member, each.code) for each in report.failures] == [(1, Code.STALE)]
        assert buffer == value
        missing = len(value) - chunk * MIB
        await until(lambda: second.server.traffic.bytes >= missing)  # it counts what it has sent
        assert second.server.traffic.bytes < missing + HEADS_BYTES


async def test_several_holders_with_damage_in_different_places(side: Side) -> None:
    """None of them has all of it; together they have."""
    value, room = pattern(6 * MIB), 24 * MIB
    buffer = bytearray(len(value))
    async with holder(room, value) as first, holder(room + 8 * MIB, value) as second:
        copies = [first.copy(), replace(second.copy(), peer_id=READER.peer_id, member=2)]
        with damaged(first, room, 4), damaged(second, room + 8 * MIB, 1):
            report = await read(side, first, copies, BufferDestination(buffer))
        assert report.copy is copies[1]
        assert buffer == value


async def test_versions_are_never_mixed(side: Side) -> None:
    old, new, room = pattern(5 * MIB), pattern(4 * MIB + 9, seed=1), 24 * MIB
    for first_value, second_value in ((old, new), (new, old), (old, pattern(100)), (old, b"")):
        buffer = bytearray(len(old))
        async with (
            holder(room, first_value, clock=2) as first,
            holder(room + 8 * MIB, second_value, clock=3) as second,
        ):
            copies = [first.copy(), replace(second.copy(), peer_id=READER.peer_id, member=2)]
            with damaged(first, room, 3):
                report = await read(side, first, copies, BufferDestination(buffer))
            assert report.unwrap().slot.version.clock == 3
            assert buffer[: len(second_value)] == second_value


async def test_what_its_only_holder_replaces_meanwhile_is_read_anew(side: Side) -> None:
    old, new = pattern(6 * MIB), pattern(5 * MIB + 9, seed=1)
    async with holder(24 * MIB, old) as only:

        def replace_it(done_bytes: int, all_bytes: int) -> None:
            if all_bytes == len(old) and done_bytes == 3 * MIB:
                put(only.segment, "key", new, clock=2)

        buffer = bytearray(len(old))
        watch = ReadWatch(time.perf_counter, replace_it, None)
        destination = resumable(BufferDestination(buffer, watch))
        destination.share(replace(ALONE, slice_chunks=2, ahead_chunks=0))
        report = await read(side, only, [only.copy()], destination)
        assert report.unwrap().length == len(new)
        assert buffer[: len(new)] == new


async def test_other_memory_is_filled_from_the_beginning(side: Side) -> None:
    given: list[bytearray] = []

    class Moving:
        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            given.append(bytearray(slot.length))
            return memoryview(given[-1])

    value, room = pattern(5 * MIB), 24 * MIB
    async with holder(room, value) as first, holder(room + 8 * MIB, value) as second:
        copies = [first.copy(), replace(second.copy(), peer_id=READER.peer_id, member=2)]
        with damaged(first, room, 3):
            await read(side, first, copies, Moving())
        assert given[-1] == value
        assert len(given) > 1


async def test_an_owner_killed_in_the_middle_is_not_read_anew(side: Side) -> None:
    """Progress goes on where it was."""
    value = pattern(16 * MIB)
    done: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        done.append(done_bytes)
        if done_bytes == 3 * MIB:
            process.kill()
            process.wait()

    buffer = bytearray(len(value))
    destination = BufferDestination(buffer, ReadWatch(time.perf_counter, progress))
    async with owner_process() as (process, first), holder(24 * MIB, value) as second:
        other = replace(second.copy(), peer_id=READER.peer_id, member=2)
        report = await read(side, second, [first, other], destination)
        assert report.copy is other
        assert [failure.code for failure in report.failures] == [Code.UNAVAILABLE]
        assert buffer == value
        assert done == [(number + 1) * MIB for number in range(16)]
        assert second.server.traffic.bytes < 13 * MIB + HEADS_BYTES


@pytest.mark.parametrize("into", [True, False], ids=["get_into", "get"])
async def test_a_client_keeps_what_came_when_its_peer_names_other_holders(
    into: bool, tmp_path: Path
) -> None:
    value, room = pattern(5 * MIB), 24 * MIB

    def planned(member: int, harness: TcpHarness) -> local.PlanItem:
        granted = grant()
        ticket = granted.ticket.claims, granted.ticket.signature, granted.secret
        where = bytes([member]), "", [harness.address], "", False
        version = Version(1, 1, root_checksum(len(value), chunk_sums(value)))
        said = 0, 1280, version.clock, version.writer, 0
        return local.PlanItem([local.Holder(member, *where, *said, *ticket, root=version.root)])

    def read(path: str) -> bytes:
        with blocking.connect(path) as client:
            if not into:
                return client.get("key")
            buffer = bytearray(len(value))
            client.get_into("key", buffer)
            return bytes(buffer)

    with small_peer(tmp_path / "peer.sock") as peer:
        async with holder(room, value) as first, holder(room + 8 * MIB, value) as second:
            peer.backend.planned[DIGEST] = [planned(1, first), planned(2, second)]
            with damaged(first, room, 3):
                got = await trio.to_thread.run_sync(read, str(peer.path))
            assert got == value
            assert peer.backend.excluded == [[], [1]]
            assert second.server.traffic.bytes < 2 * MIB + HEADS_BYTES


VALUE = np.random.default_rng(5).integers(0, 256, 66 * MIB + 5, np.uint8).tobytes()


def hits(*holders: Peer) -> int:
    """How often the value was read there, as eviction sees it."""
    entries = [each.node.core.objects.find(key_digest("k"), each.node.now) for each in holders]
    return sum(entry.hits for entry in entries if entry is not None)


async def test_clients_and_peers_read_a_large_object_from_all_its_holders(tmp_path: Path) -> None:
    async with cluster(tmp_path, memory="160MiB", transport="tcp") as (first, second, third):
        result = await first.put("k", VALUE, replicas=2)
        assert result.copies == 2
        (has,) = [
            each
            for each in (second, third)
            if each.node.core.segment.find(key_digest("k"), 0.0) is not None
        ]
        (lacks,) = {second, third} - {has}
        directory = lacks.node.core.gossip.directory
        await until(lambda: len(directory.holders(key_digest("k"))) == 2)
        names = sorted([first.node.config.name, has.node.config.name])

        def read() -> tuple[int, FetchTrace]:
            """A holder may be done before the other is connected: then again."""
            reads = 1
            with blocking.connect(str(lacks.socket_path)) as client:
                for _ in range(20):
                    reads += 1
                    trace, buffer = FetchTrace(), bytearray(len(VALUE))
                    client.get_into("k", buffer, wait=5, trace=trace)
                    assert buffer == VALUE
                    if "," in trace.source:
                        break
                assert client.get("k") == VALUE
            return reads, trace

        before = hits(first, has)
        reads, trace = await trio.to_thread.run_sync(read)
        assert hits(first, has) == before + reads  # in however many requests
        assert sorted(trace.source.split(", ")) == names
        assert [each.outcome for each in trace.tries if each.tried] == ["delivered"] * 2
        assert sum(each.length_bytes for each in trace.tries) == len(VALUE)

        small = bytearray(10)
        await first.put("small", b"small")
        await until(lambda: lacks.contains_nowait("small"))
        traffic = lacks.node.watch.traffic
        read_before = [traffic.used(each.node.core.member)["tcp"].bytes for each in (first, has)]

        def read_batch() -> bytearray:
            buffer = bytearray(len(VALUE))
            with blocking.connect(str(lacks.socket_path)) as client:
                results = client.get_many_into([("small", small), ("k", buffer)])
            assert [each.value for each in results] == [5, len(VALUE)]
            return buffer

        def read_from_both() -> bool:
            return all(
                traffic.used(each.node.core.member)["tcp"].bytes > bytes_before + 5
                for each, bytes_before in zip((first, has), read_before, strict=True)
            )

        for _ in range(20):
            assert await trio.to_thread.run_sync(read_batch) == VALUE
            with trio.move_on_after(2):  # clients report now and then
                await until(read_from_both)
                break
        assert read_from_both()

        async with lacks.lease("k", here=True) as view:  # the peer itself brings it here
            assert view == VALUE
        assert lacks.node.core.objects.find(key_digest("k"), lacks.node.now) is not None
        for holder in (first, has):  # the clients' reads count as well
            use = lacks.node.watch.traffic.used(holder.node.core.member)["tcp"]
            assert use.bytes > 0
            assert use.failures == 0


CHUNKS = 12


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(32 * MIB)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("slice_chunks", "ahead_chunks", "left"),
    [
        (1, 4, [0, 1, 2, 3, *[4] * 8]),
        (2, 4, [0, 2, 4, 4, 4, 4]),
        (4, 1, [0, 1, 1]),
        (3, 0, [0, 0, 0, 0]),
    ],
)
async def test_so_much_is_asked_for_ahead(
    tcp: TcpHarness,
    monkeypatch: pytest.MonkeyPatch,
    slice_chunks: int,
    ahead_chunks: int,
    left: list[int],
) -> None:
    """The reader asks for more as soon as few of the requested chunks are left."""
    left_chunks = 0
    left_when_asked: list[int] = []
    next_spans = SpanQueue.next

    def watched_next(self: SpanQueue) -> list[Span]:
        nonlocal left_chunks
        spans = next_spans(self)
        for _, item in spans:
            left_when_asked.append(left_chunks)
            left_chunks += min(item.chunk_count, CHUNKS - item.first_chunk)
        return spans

    verify = Arriving.verify

    def watched_verify(self: Arriving, *arguments: object, **options: object) -> None:
        nonlocal left_chunks
        verify(self, *arguments, **options)  # type: ignore[arg-type] # passed on
        left_chunks -= 1

    monkeypatch.setattr(SpanQueue, "next", watched_next)
    monkeypatch.setattr(Arriving, "verify", watched_verify)
    value, buffer = pattern(CHUNKS * MIB - 5), bytearray(CHUNKS * MIB - 5)
    digest = put(tcp.segment, "key", value)
    destination = resumable(BufferDestination(buffer))
    destination.share(replace(ALONE, slice_chunks=slice_chunks, ahead_chunks=ahead_chunks))
    await tcp.transport(TrioDriver()).pull(tcp.copy(digest), digest, destination)
    assert buffer == value
    assert left_when_asked == left


def test_who_reads_alone_has_several_parts_asked_for() -> None:
    assert ALONE.ahead_chunks == PARTS_AHEAD * ALONE.slice_chunks
