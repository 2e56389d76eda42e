"""Large objects from several holders at once: shares, failures, and that nothing stays behind.

The holders are real servers; those that are slow, hang or die are behind a relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import trio

from p2pstore.errors import BufferTooSmall
from p2pstore.objects import MIB, key_digest
from p2pstore.runtime.blocking_streams import run_blocking
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer import transport
from p2pstore.transfer.reading import arriving, tcp_transport
from p2pstore.transfer.reading.arriving import Destination
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import BufferDestination, PullReport, RemoteCopy, pull_with_failover
from p2pstore.wire import Code
from tests.contract.sides import DRIVERS, Side
from tests.contract.test_transport import (
    CancellingDriver,
    TcpHarness,
    _buffers,
    pattern,
    put,
    segment_of,
)
from tests.waiting import until

DIGEST = key_digest("key")
VALUE = pattern(24 * MIB + 5)
SLICE = 2 * MIB
ROOM = [(32 + 8 * number) * MIB for number in range(4)]
HEADS_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transport, tcp_transport):
        monkeypatch.setattr(module, "SLICED_BYTES", 4 * MIB)
    monkeypatch.setattr(tcp_transport, "SLICE_CHUNKS", SLICE // MIB)
    monkeypatch.setattr(tcp_transport, "AHEAD_CHUNKS", 1)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name == "p2pstore-helper"]


@dataclass
class Relay:
    """A way to a holder: slow (`seconds` for each MiB, on the first `slow_connections`), and after `limit_bytes` of
    answers it hangs or ends."""

    target: str
    seconds: float = 0.0
    limit_bytes: float = float("inf")
    ends: bool = False
    slow_connections: float = float("inf")
    address: str = ""
    passed_bytes: int = 0
    connections: int = 0
    most_connections: int = 0
    all_connections: int = 0
    streams: list[trio.SocketStream] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            yield self
            nursery.cancel_scope.cancel()

    async def _serve(self, client: trio.SocketStream) -> None:
        host, _, port = self.target.rpartition(":")
        server = await trio.open_tcp_stream(host, int(port))
        self.connections += 1
        self.all_connections += 1
        self.most_connections = max(self.most_connections, self.connections)
        try:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with server, client, trio.open_nursery() as nursery:
                    nursery.start_soon(self._requests, client, server, nursery.cancel_scope)
                    await self._answers(server, client)
                    nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.connections -= 1

    async def _requests(
        self, client: trio.SocketStream, server: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        while data := await client.receive_some(65536):
            await server.send_all(data)
        scope.cancel()

    async def _answers(self, server: trio.SocketStream, client: trio.SocketStream) -> None:
        seconds = self.seconds if self.all_connections <= self.slow_connections else 0.0
        while data := await server.receive_some(256 * 1024):
            if self.passed_bytes >= self.limit_bytes:
                if self.ends:
                    return
                await trio.sleep_forever()
            self.passed_bytes += len(data)
            await client.send_all(data)
            if seconds and len(data) > 1000:
                await trio.sleep(seconds * len(data) / MIB)


@dataclass
class Cluster:
    """Holders of the value, members 1, 2 and so on, and what they have served."""

    harnesses: list[TcpHarness]
    relays: list[Relay]
    pools: list[ConnectionPool] = field(default_factory=list)

    def copies(self) -> list[RemoteCopy]:
        return [
            replace(
                harness.copy(),
                peer_id=bytes([number]),
                member=number,
                data=(relay.address,),
                length_bytes=len(VALUE),
            )
            for number, (harness, relay) in enumerate(zip(self.harnesses, self.relays, strict=True), 1)
        ]

    def served_bytes(self) -> int:
        return sum(relay.passed_bytes for relay in self.relays)

    def in_flight(self) -> int:
        return sum(harness.in_flight() for harness in self.harnesses)

    async def read(
        self,
        side: Side,
        destination: Destination,
        copies: Sequence[RemoteCopy] | None = None,
        progress_seconds: float = 20.0,
    ) -> PullReport:
        pool = ConnectionPool(side.driver, progress_seconds=progress_seconds, connect_seconds=20.0)
        self.pools.append(pool)
        transports = [TcpTransport(pool)]
        return await side.run(
            lambda: pull_with_failover(copies or self.copies(), transports, DIGEST, destination)
        )


@contextlib.asynccontextmanager
async def cluster(
    *ways: dict[str, float], values: Sequence[bytes] = (), uploads: int = 16
) -> AsyncIterator[Cluster]:
    """A holder for each way."""
    async with contextlib.AsyncExitStack() as stack:
        made = Cluster([], [])
        for number, way in enumerate(ways):
            segment = segment_of(ROOM[number])
            value = values[number] if values else VALUE
            put(segment, "key", value, clock=1 + (value != VALUE))
            harness = await stack.enter_async_context(
                TcpHarness.open(segment, ServerLimits(uploads=uploads))
            )
            made.harnesses.append(harness)
            relay = Relay(harness.address, **way)  # type: ignore[arg-type]  # mypy: `ends` is a number here
            made.relays.append(await stack.enter_async_context(relay.open()))
        try:
            yield made
        finally:
            for pool in made.pools:
                pool.close()


STEADY = {"seconds": 0.015}
"""70 MB/s: all of them are read at once, by any world, before one alone has brought everything."""
SLOW = {"seconds": 0.4}
HANGS = {**STEADY, "limit_bytes": 3.5 * MIB}
ENDS = {**HANGS, "ends": True}

KINDS: dict[str, dict[str, float]] = {"steady": STEADY, "slow": SLOW, "hangs": HANGS, "ends": ENDS}


@contextlib.contextmanager
def damaged(holder: int, chunk: int, harness: TcpHarness) -> Iterator[None]:
    entry = harness.segment.find(DIGEST, time.time())
    assert entry is not None
    at = entry.offset + chunk * MIB + 7
    _buffers[ROOM[holder]][at] ^= 1
    yield
    _buffers[ROOM[holder]][at] ^= 1


async def test_every_holder_brings_a_part_and_nothing_comes_twice(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "is_outrun", lambda *_: False)  # a busy machine makes any of them late
    buffer = bytearray(len(VALUE) + 10)
    async with cluster(*[STEADY] * 4) as holders:
        report = await holders.read(side, BufferDestination(buffer))
        assert buffer == VALUE + bytes(10)
        assert report.failures == ()
        assert {share.member for share in report.shares} == {1, 2, 3, 4}
        assert sum(share.length_bytes for share in report.shares) == len(VALUE)
        assert report.copy is not None
        assert report.copy.member == report.shares[0].member
        assert holders.served_bytes() < len(VALUE) + HEADS_BYTES
        assert [relay.most_connections for relay in holders.relays] == [1] * 4


@pytest.mark.parametrize("dying", [0, 1])
async def test_one_that_dies_leaves_its_slices_to_the_others(side: Side, dying: int) -> None:
    ways: list[dict[str, float]] = [STEADY, STEADY, STEADY]
    ways[dying] = ENDS
    buffer = bytearray(len(VALUE))
    async with cluster(*ways) as holders:
        report = await holders.read(side, BufferDestination(buffer))
        assert buffer == VALUE
        assert [(each.member, each.code) for each in report.failures] == [(dying + 1, Code.UNAVAILABLE)]
        brought = {share.member: share.length_bytes for share in report.shares}
        assert sum(brought.values()) == len(VALUE)
        assert 0 < brought[dying + 1] < 5 * MIB
        assert holders.served_bytes() < len(VALUE) + 2 * SLICE + HEADS_BYTES


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("way", [SLOW, HANGS], ids=["slow", "hangs"])
async def test_a_slow_one_is_overtaken(side: Side, slow: int, way: dict[str, float]) -> None:
    """The others do not wait for its last slice, nor is it to blame."""
    ways: list[dict[str, float]] = [STEADY, STEADY]
    ways[slow] = way
    buffer = bytearray(len(VALUE))
    async with cluster(*ways) as holders:
        with trio.fail_after(10):  # alone it takes that long, or 20 s
            report = await holders.read(side, BufferDestination(buffer))
        assert buffer == VALUE
        assert report.failures == ()
        assert report.brought()[0].member == 2 - slow
        assert report.brought()[0].length_bytes > 0.7 * len(VALUE)
        assert holders.served_bytes() < len(VALUE) + 2 * SLICE + HEADS_BYTES


@pytest.mark.parametrize("bad", [0, 1])
async def test_what_arrives_damaged_is_read_from_the_others(side: Side, bad: int) -> None:
    buffer = bytearray(len(VALUE))
    async with cluster(STEADY, STEADY) as holders:
        with contextlib.ExitStack() as stack:
            for chunk in range(2 * bad, 25, 2):
                stack.enter_context(damaged(bad, chunk, holders.harnesses[bad]))
            report = await holders.read(side, BufferDestination(buffer))
        assert buffer == VALUE
        assert [(each.member, each.code) for each in report.failures] == [(bad + 1, Code.STALE)]


async def test_damage_everywhere_but_in_different_places(side: Side) -> None:
    buffer = bytearray(len(VALUE))
    async with cluster(STEADY, STEADY, STEADY) as holders:
        with (
            damaged(0, 2, holders.harnesses[0]),
            damaged(1, 20, holders.harnesses[1]),
            damaged(2, 9, holders.harnesses[2]),
        ):
            report = await holders.read(side, BufferDestination(buffer))
        if report.pulled is not None:
            assert buffer == VALUE
        else:  # each met its own
            assert {each.code for each in report.failures} == {Code.STALE}


async def test_the_next_holder_joins_for_one_that_fails(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transport, "MAX_READERS", 2)
    buffer = bytearray(len(VALUE))
    async with cluster(STEADY, STEADY, STEADY) as holders:
        copies = holders.copies()
        copies[1] = replace(copies[1], data=("127.0.0.1:1",))
        report = await holders.read(side, BufferDestination(buffer), copies)
        assert buffer == VALUE
        assert [(each.member, each.code) for each in report.failures] == [(2, Code.UNAVAILABLE)]
        assert {share.member for share in report.shares} == {1, 3}


async def test_versions_are_never_mixed(side: Side) -> None:
    newer = pattern(len(VALUE), seed=1)
    for values in ((VALUE, newer), (newer, VALUE)):
        buffer = bytearray(len(VALUE))
        async with cluster(STEADY, STEADY, values=values) as holders:
            report = await holders.read(side, BufferDestination(buffer))
            assert buffer == values[0]
            assert report.failures == ()  # to have another version is no failure


async def test_one_with_another_version_is_asked_when_the_first_fails(side: Side) -> None:
    newer = pattern(len(VALUE), seed=1)
    buffer = bytearray(len(VALUE))
    async with cluster(ENDS, STEADY, values=(VALUE, newer)) as holders:
        report = await holders.read(side, BufferDestination(buffer))
        assert buffer == newer
        assert [each.member for each in report.failures] == [1]


async def test_one_that_was_overtaken_is_asked_again_when_the_others_fail(side: Side) -> None:
    """The second one stops the first in the middle of its first slice, and has damage just there."""
    buffer = bytearray(len(VALUE))
    async with cluster({"seconds": 5.0, "slow_connections": 1}, STEADY) as holders:
        with damaged(1, 1, holders.harnesses[1]):
            report = await holders.read(side, BufferDestination(buffer))
        assert buffer == VALUE
        assert [(each.member, each.code) for each in report.failures] == [(2, Code.STALE)]
        assert report.copy is not None
        assert report.copy.member == 1
        assert holders.served_bytes() < len(VALUE) + 2 * SLICE + HEADS_BYTES


async def test_a_busy_holder_does_not_help(side: Side) -> None:
    buffer = bytearray(len(VALUE))
    async with cluster(STEADY, STEADY, uploads=1) as holders:
        uploads = holders.harnesses[1].server.traffic.uploads
        uploads.begin(0.0)  # of another reader
        report = await holders.read(side, BufferDestination(buffer))
        uploads.end(0.0, 0.0)
        assert buffer == VALUE
        assert report.failures == ()
        assert report.shares == ()
        assert report.copy is not None
        assert report.copy.member == 1
        assert holders.harnesses[1].server.traffic.busy == 1


def deaf() -> socket.socket:
    """It takes connections and says nothing."""
    return socket.create_server(("127.0.0.1", 0))


def unreachable() -> socket.socket:
    """It does not even take connections: one waits to be taken already."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    return listener


@pytest.mark.parametrize("kind", [deaf, unreachable])
async def test_nobody_waits_for_a_helper_that_is_still_connecting(
    side: Side, kind: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HOLDER_ANSWER_SECONDS", 20.0)
    buffer = bytearray(len(VALUE))
    with contextlib.closing(kind()) as silent, contextlib.closing(socket.socket()) as waiting:
        if kind is unreachable:
            waiting.connect(silent.getsockname())
        async with cluster({"seconds": 0.0}) as holders:
            (copy,) = holders.copies()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            hung = replace(copy, peer_id=b"hung", member=9, data=(address,))
            began = time.monotonic()
            report = await holders.read(side, BufferDestination(buffer), [copy, hung])
            assert time.monotonic() - began < 10  # it would be given 20 s
            assert buffer == VALUE
            assert report.failures == ()


async def test_a_lone_holder_of_another_host_is_read_over_two_connections(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = bytearray(len(VALUE))
    for two in (False, True):
        if two:
            monkeypatch.setattr(tcp_transport, "may_use_two", lambda copy: True)
        async with cluster(STEADY) as holders:
            report = await holders.read(side, BufferDestination(buffer))
            assert buffer == VALUE
            assert (report.failures, report.shares) == ((), ())
            assert holders.relays[0].most_connections == 1 + two
            assert holders.served_bytes() < len(VALUE) + HEADS_BYTES
        buffer[:] = bytes(len(VALUE))


def test_which_holders_may_be_read_over_two_connections() -> None:
    copy = RemoteCopy(b"x", ("10.0.0.1:1",))
    assert tcp_transport.may_use_two(copy)
    assert tcp_transport.may_use_two(replace(copy, data=("tls://[2001:db8::1]:5",)))
    assert tcp_transport.may_use_two(replace(copy, data=("node7:5",)))
    assert not tcp_transport.may_use_two(replace(copy, same_host=True))
    assert not tcp_transport.may_use_two(replace(copy, data=("127.0.0.1:1", "tls://[::1]:2")))
    assert not tcp_transport.may_use_two(replace(copy, data=("localhost:1",)))


async def test_who_looks_on_sees_who_brought_what(side: Side) -> None:
    done: list[int] = []
    watch = ReadWatch(time.perf_counter, lambda done_bytes, total: done.append(done_bytes))
    watch.looked_up(0.0, {1: ("one", "dram"), 2: ("two", "dram"), 3: ("three", "dram")}, 0, 0)
    async with cluster(STEADY, STEADY, ENDS) as holders:
        report = await holders.read(side, BufferDestination(bytearray(len(VALUE)), watch))
    assert done == sorted(done)
    assert done[-1] == len(VALUE)
    assert len(done) == 25
    trace = watch.trace
    shares = {share.member: share.length_bytes for share in report.shares}
    assert [(each.peer, each.tried, each.length_bytes) for each in trace.tries] == [
        ("one", True, shares[1]),
        ("two", True, shares[2]),
        ("three", True, shares[3]),
    ]
    assert [each.outcome for each in trace.tries[:2]] == ["delivered", "delivered"]
    assert "closed" in trace.tries[2].outcome
    assert sorted(trace.source.split(", ")) == ["one", "three", "two"]
    assert all(each.seconds > 0 for each in trace.tries)


class Stop(Exception):
    """An error raised by a callback."""


@pytest.mark.parametrize("at", [1, 7, 20])
async def test_what_a_callback_raises_ends_all_readers(side: Side, at: int) -> None:
    calls = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Stop

    buffer = bytearray(len(VALUE))
    watch = ReadWatch(time.perf_counter, progress)
    async with cluster(STEADY, STEADY, STEADY) as holders:
        with pytest.raises(Stop):
            await holders.read(side, BufferDestination(buffer, watch))
        after = bytes(buffer)
        await until(lambda: holders.in_flight() == 0)
        assert bytes(buffer) == after


async def test_a_buffer_that_is_too_small_is_the_callers_matter(side: Side) -> None:
    async with cluster(STEADY, STEADY) as holders:
        with pytest.raises(BufferTooSmall):
            await holders.read(side, BufferDestination(bytearray(5)))


async def test_a_small_object_that_was_announced_as_large(side: Side) -> None:
    small = b"small"
    buffer = bytearray(10)
    async with cluster(STEADY, STEADY, values=(small, small)) as holders:
        report = await holders.read(side, BufferDestination(buffer))
        assert report.unwrap().length == len(small)
        assert buffer[:5] == small
        assert holders.relays[1].most_connections == 0


async def test_a_reader_cancelled_at_each_call_leaves_nothing() -> None:
    at, delivered = 0, False
    async with cluster({}, {}, {}) as holders:
        while not delivered:
            at += 1 if at < 40 else 17
            driver = CancellingDriver()
            driver.at = at
            pool = ConnectionPool(driver)
            buffer = bytearray(len(VALUE))
            with driver.scope:
                report = await pull_with_failover(
                    holders.copies(), [TcpTransport(pool)], DIGEST, BufferDestination(buffer)
                )
                delivered = driver.calls < at
                assert report.failures == ()
                assert buffer == VALUE
            after = bytes(buffer)
            await until(lambda: holders.in_flight() == 0)
            assert bytes(buffer) == after
            pool.close()
            await until(lambda: not any(relay.connections for relay in holders.relays))
    assert at > 60


async def test_a_reader_of_asyncio_that_is_cancelled_leaves_no_task() -> None:
    side = Side("asyncio", DRIVERS["asyncio"]())
    async with cluster(STEADY, STEADY, STEADY) as holders:
        left: list[int] = []
        for chunk in (1, 5, 12):
            buffer = bytearray(len(VALUE))

            async def main(chunk: int = chunk, buffer: bytearray = buffer) -> None:
                pool = ConnectionPool(side.driver)
                calls = 0

                def progress(done_bytes: int, total_bytes: int) -> None:
                    nonlocal calls
                    calls += 1
                    if calls == chunk:
                        reading.cancel()

                destination = BufferDestination(buffer, ReadWatch(time.perf_counter, progress))
                reading = asyncio.ensure_future(
                    pull_with_failover(holders.copies(), [TcpTransport(pool)], DIGEST, destination)
                )
                with contextlib.suppress(asyncio.CancelledError):
                    await reading
                    raise AssertionError("it was not cancelled")
                left.append(len(asyncio.all_tasks()) - 1)
                pool.close()

            await trio.to_thread.run_sync(lambda main=main: asyncio.run(main()))  # type: ignore[misc]  # mypy: defaults of a lambda
            assert left.pop() == 0
            after = bytes(buffer)
            await until(lambda: holders.in_flight() == 0)
            assert bytes(buffer) == after


async def test_an_interrupt_in_a_thread_ends_all_readers() -> None:
    """Ctrl-C strikes in the thread that called; the others must not write on."""
    side = Side("blocking", DRIVERS["blocking"]())
    buffer = bytearray(len(VALUE))
    caller: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        if threading.get_ident() == caller[0] and done_bytes > 5 * MIB:
            raise KeyboardInterrupt

    def read(holders: Cluster) -> None:
        caller.append(threading.get_ident())
        pool = ConnectionPool(side.driver)
        destination = BufferDestination(buffer, ReadWatch(time.perf_counter, progress))
        with contextlib.suppress(KeyboardInterrupt):
            run_blocking(pull_with_failover(holders.copies(), [TcpTransport(pool)], DIGEST, destination))
            raise AssertionError("it was not interrupted")
        assert not [each for each in threading.enumerate() if each.name == "p2pstore-helper"]
        pool.close()

    async with cluster(STEADY, STEADY, STEADY) as holders:
        await trio.to_thread.run_sync(read, holders)
        after = bytes(buffer)
        await until(lambda: holders.in_flight() == 0)
        assert bytes(buffer) == after


@pytest.mark.parametrize("seed", range(8))
async def test_one_good_holder_is_enough_whatever_the_others_do(
    side: Side, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are slow, hang or end somewhere, have damage or another version, or nothing at all."""
    rng = random.Random(seed)
    monkeypatch.setattr(tcp_transport, "MAX_READERS", rng.choice([2, 3, 4]))
    monkeypatch.setattr(arriving, "is_outrun", lambda *_: False)  # a busy machine makes any of them late
    good, newer = rng.randrange(4), pattern(len(VALUE), seed=1)
    ways, values, damage = [], [], []
    for number in range(4):
        kind = "steady" if number == good else rng.choice([*KINDS, "damaged", "newer"])
        limit_bytes = rng.randrange(20 * MIB)
        ways.append(
            {**KINDS.get(kind, STEADY), "limit_bytes": limit_bytes}
            if kind in ("hangs", "ends")
            else KINDS.get(kind, STEADY)
        )
        values.append(newer if kind == "newer" else VALUE)
        chunks = rng.sample(range(25), 3) if kind == "damaged" else []
        damage += [(number, chunk) for chunk in chunks]
    buffer = bytearray(len(VALUE))
    async with cluster(*ways, values=values) as holders:
        with contextlib.ExitStack() as stack:
            for number, chunk in damage:
                stack.enter_context(damaged(number, chunk, holders.harnesses[number]))
            report = await holders.read(side, BufferDestination(buffer), progress_seconds=3.0)
        assert buffer == (newer if report.unwrap().slot.version.clock == 2 else VALUE)
        assert report.copy is not None
        assert good + 1 not in {each.member for each in report.failures}


async def test_many_reads_of_one_pool_at_once() -> None:
    driver = TrioDriver()
    buffers = [bytearray(len(VALUE)) for _ in range(6)]
    async with cluster({}, {}, {}) as holders:
        pool = ConnectionPool(driver, max_places=2)
        holders.pools.append(pool)

        async def read(buffer: bytearray) -> None:
            report = await pull_with_failover(
                holders.copies(), [TcpTransport(pool)], DIGEST, BufferDestination(buffer)
            )
            assert report.failures == ()

        async with trio.open_nursery() as nursery:
            for buffer in buffers:
                nursery.start_soon(read, buffer)
        assert all(buffer == VALUE for buffer in buffers)
        assert max(relay.most_connections for relay in holders.relays) == 2
