"""Holders that deliver a byte now and then: a reader goes on elsewhere when the best other holder would be done, and
where there is no other one, it waits for a slow link but not for these.

The holders are real servers behind relays that pass on some bytes of the answers at once, and then some now and then.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
import trio

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import KIB, MIB
from p2pstore.transfer import transport
from p2pstore.transfer.data_messages import DataKind, Ping
from p2pstore.transfer.failover import PullFailed, TooSlow
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.transport import (
    BufferDestination,
    RemoteCopy,
    pull_with_failover,
    with_alternatives,
)
from p2pstore.wire import Code
from tests.contract.sides import DRIVERS, Side
from tests.contract.test_storing import Stores, store_request, writer
from tests.contract.test_transport import TcpHarness, pattern, put, segment_of
from tests.waiting import until

HASTE_SECONDS = 0.3
"""For each wait, where others have the object."""
PROGRESS_SECONDS = 0.6
SPARE_SECONDS = 3.0
"""For a busy machine."""
LENGTH = 3 * MIB
NEVER = float("inf")


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HOLDER_ANSWER_SECONDS", HASTE_SECONDS)


@dataclass
class Trickle:
    """A way to a server: of each connection's answers it passes on `first_bytes` at once, after those that shake hands
    unless `all_slow`, then `piece` bytes every `seconds`. `taken`: the same for bytes that are sent there."""

    first_bytes: int = 0
    piece: int = 1
    every_seconds: float = 0.05
    all_slow: bool = False
    taken: bool = False
    target: str = ""
    address: str = ""
    passed_bytes: int = 0
    attacks: int = 0

    def attack(self, first_bytes: int) -> None:
        """From now on no more than that at once; connections of before are slow at once."""
        self.first_bytes = first_bytes
        self.attacks += 1

    @contextlib.asynccontextmanager
    async def open(self, target: str) -> AsyncIterator[Trickle]:
        self.target = target
        async with trio.open_nursery() as nursery:
            listener = trio.socket.socket()
            # Little waits in the kernel, or a sender would be done before anything is slow.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
            await listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
            nursery.start_soon(trio.serve_listeners, self._serve, [trio.SocketListener(listener)])
            yield self
            nursery.cancel_scope.cancel()

    async def _serve(self, client: trio.SocketStream) -> None:
        host, _, port = self.target.rpartition(":")
        server = await trio.open_tcp_stream(host, int(port))
        try:
            async with server, client, trio.open_nursery() as nursery:
                nursery.start_soon(self._pass, client, server, self.taken, nursery.cancel_scope)
                await self._pass(server, client, not self.taken, nursery.cancel_scope)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _pass(
        self, source: trio.SocketStream, target: trio.SocketStream, slow: bool, scope: trio.CancelScope
    ) -> None:
        at_once, attacks = 0 if self.all_slow else self.first_bytes, self.attacks
        if slow and not self.all_slow:  # the other side's first words
            await target.send_all(await source.receive_some(4096))
        while data := await source.receive_some(64 * KIB):
            if not slow:
                await target.send_all(data)
                continue
            if attacks != self.attacks:
                at_once, attacks = self.first_bytes, self.attacks
            while data:
                if at_once <= 0:
                    await trio.sleep(self.every_seconds)
                some = data[: at_once if at_once > 0 else self.piece]
                at_once -= len(some)
                await target.send_all(some)
                self.passed_bytes += len(some)
                data = data[len(some) :]
        scope.cancel()


ATTACKS = {
    "a byte now and then": Trickle(),
    "a byte just in time": Trickle(every_seconds=0.7 * HASTE_SECONDS),
    "a head and then nothing": Trickle(400, every_seconds=NEVER),
    "nothing": Trickle(every_seconds=NEVER),
    "all but the end": Trickle(LENGTH, every_seconds=0.05),
    "fast until nine tenths": Trickle(9 * LENGTH // 10, every_seconds=0.05),
    "slow hands to shake": Trickle(all_slow=True),
    "more than nothing": Trickle(piece=2000, every_seconds=0.02),
}


@dataclass
class Holders:
    """One value at some holders, behind ways of their own; members 1, 2 and so on."""

    digest: bytes
    copies: list[RemoteCopy]
    ways: list[Trickle]
    harness: TcpHarness

    def pool(self, side: Side) -> ConnectionPool:
        return self.harness.pool(side.driver, PROGRESS_SECONDS)


@contextlib.asynccontextmanager
async def holders(value: bytes, *ways: Trickle | None) -> AsyncIterator[Holders]:
    segment = segment_of(24 * MIB)
    digest = put(segment, "key", value)
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(TcpHarness.open(segment))
        opened = [
            await stack.enter_async_context(replace(way).open(harness.address))
            for way in ways
            if way is not None
        ]
        relays = iter(opened)
        copies = [
            replace(
                harness.copy(),
                peer_id=bytes([number]),
                member=number,
                data=(harness.address if way is None else next(relays).address,),
            )
            for number, way in enumerate(ways, 1)
        ]
        yield Holders(digest, copies, opened, harness)


async def seconds_of(action: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    await action()
    return time.monotonic() - began


# --- beside a good holder --------------------------------------------------------------------


async def test_a_reader_goes_on_elsewhere_whatever_the_slow_one_does(side: Side) -> None:
    """All attacks at once, each on a reader of its own."""
    value = pattern(LENGTH)

    async def attack(name: str, way: Trickle) -> None:
        buffer = bytearray(LENGTH)
        async with holders(value, way, None) as there:
            transports = [TcpTransport(there.pool(side))]
            began = time.monotonic()
            report = await side.run(
                lambda: pull_with_failover(
                    there.copies, transports, there.digest, BufferDestination(buffer)
                )
            )
            seconds = time.monotonic() - began
        assert report.pulled is not None, name
        assert report.copy is there.copies[1], name
        assert [(each.member, each.code) for each in report.failures] == [(1, Code.DEADLINE_EXCEEDED)], (
            name
        )
        assert buffer == value
        assert seconds < 3 * HASTE_SECONDS + SPARE_SECONDS, name

    async with trio.open_nursery() as nursery:
        for name, way in ATTACKS.items():
            nursery.start_soon(attack, name, way)


async def test_what_came_is_kept(side: Side) -> None:
    value, buffer = pattern(LENGTH), bytearray(LENGTH)
    good = Trickle(first_bytes=1 << 40)
    async with holders(value, ATTACKS["all but the end"], good) as there:
        transports = [TcpTransport(there.pool(side))]
        report = await side.run(
            lambda: pull_with_failover(there.copies, transports, there.digest, BufferDestination(buffer))
        )
        assert report.copy is there.copies[1]
        assert buffer == value
        assert there.ways[1].passed_bytes < MIB + 16 * KIB


async def test_batches(side: Side) -> None:
    """Of small and of large objects: the rest fails as silent at once."""
    values = [pattern(300, seed) for seed in range(40)]
    async with holders(b"", Trickle(2000), None) as there:
        segment = there.harness.segment
        digests = [put(segment, f"k{number}", value) for number, value in enumerate(values)]
        pool = there.pool(side)
        copy = with_alternatives(there.copies[0], [there.copies[1].peer_id])

        async def small() -> None:
            views = [memoryview(bytearray(300)) for _ in values]
            lengths, failure = await side.run(lambda: pool.pull_small(copy, digests, views))
            assert failure is not None
            assert failure.code is Code.DEADLINE_EXCEEDED
            assert len(lengths) < len(values)
            assert all(
                bytes(view) == value for view, value, _ in zip(views, values, lengths, strict=False)
            )

        async def many() -> None:
            items = [(digest, BufferDestination(bytearray(300))) for digest in digests]
            outcomes = await side.run(lambda: pool.pull_many(copy, items))
            assert isinstance(outcomes[-1], PullFailed)
            assert outcomes[-1].code is Code.DEADLINE_EXCEEDED

        for action in (small, many):
            assert await seconds_of(action) < 3 * HASTE_SECONDS + SPARE_SECONDS


async def test_a_large_object_of_which_helpers_are_slow(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SLICED_BYTES", MIB)
    value = pattern(20 * MIB)

    async def read(*ways: Trickle | None) -> None:
        buffer = bytearray(len(value))
        async with holders(value, *ways) as there:
            copies = [replace(copy, length_bytes=len(value)) for copy in there.copies]
            transports = [TcpTransport(there.pool(side))]
            report = await side.run(
                lambda: pull_with_failover(copies, transports, there.digest, BufferDestination(buffer))
            )
            assert report.pulled is not None
            assert buffer == value

    for ways in ((Trickle(400), None, Trickle()), (None, Trickle(2 * MIB), Trickle(300_000))):
        began = time.monotonic()
        await read(*ways)
        assert time.monotonic() - began < 4 * HASTE_SECONDS + SPARE_SECONDS


@pytest.mark.parametrize("name", ["trio", "blocking"])  # tasks of asyncio would need one loop
async def test_a_queue_for_the_connections_to_a_slow_holder(name: str) -> None:
    """Reads that must wait for others that the holder keeps waiting are made elsewhere."""
    side = Side(name, DRIVERS[name]())
    value = pattern(100 * KIB)
    async with holders(value, Trickle(piece=6000, every_seconds=0.05), None) as there:
        pool = ConnectionPool(side.driver, max_places=1, progress_seconds=20.0)
        there.harness._pools.append(pool)
        slow, good = there.copies

        async def read_alone() -> None:
            await side.run(
                lambda: pool.pull(slow, there.digest, BufferDestination(bytearray(len(value))))
            )

        async def read_elsewhere() -> None:
            with pytest.raises(PullFailed, match="in use") as failed:
                await side.run(
                    lambda: pool.pull(
                        with_alternatives(slow, [good.peer_id]),
                        there.digest,
                        BufferDestination(bytearray(len(value))),
                    )
                )
            assert failed.value.code is Code.BUSY

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_alone)
            await until(lambda: there.ways[0].passed_bytes, SPARE_SECONDS)
            assert await seconds_of(read_elsewhere) < HASTE_SECONDS + 1.0


# --- where no other holder has it -------------------------------------------------------------


async def test_a_slow_link_delivers_where_there_is_no_other_way(side: Side) -> None:
    value, buffer = pattern(110 * KIB), bytearray(110 * KIB)
    async with holders(value, Trickle(piece=5000, every_seconds=0.05)) as there:
        pool = there.pool(side)
        pulled = await side.run(
            lambda: pool.pull(there.copies[0], there.digest, BufferDestination(buffer))
        )
        assert pulled.length == len(value)
        assert buffer == value


async def test_two_slow_links_of_which_each_is_tried(side: Side) -> None:
    """Each is left once for the other; then the better one delivers the rest."""
    value, buffer = pattern(1200 * KIB), bytearray(1200 * KIB)
    slow = Trickle(piece=80_000, every_seconds=0.05)
    async with holders(value, slow, slow) as there:
        transports = [TcpTransport(there.pool(side))]
        report = await side.run(
            lambda: pull_with_failover(there.copies, transports, there.digest, BufferDestination(buffer))
        )
        assert report.pulled is not None
        assert buffer == value
        assert len(report.failures) <= 2  # once each, and on a quiet machine only the first
        assert sum(way.passed_bytes for way in there.ways) < 2 * len(value)


async def test_the_slow_one_is_asked_again_when_the_other_is_dead(side: Side) -> None:
    value, buffer = pattern(600 * KIB), bytearray(600 * KIB)
    async with holders(value, Trickle(piece=80_000, every_seconds=0.05), None) as there:
        slow, dead = there.copies
        copies = [slow, replace(dead, data=("127.0.0.1:1",))]
        transports = [TcpTransport(there.pool(side))]
        report = await side.run(
            lambda: pull_with_failover(copies, transports, there.digest, BufferDestination(buffer))
        )
        assert report.copy is slow
        assert buffer == value
        assert {each.member for each in report.failures} == {1, 2}


async def test_the_only_holder_is_given_up(side: Side) -> None:
    async def attack(way: Trickle) -> None:
        async with holders(pattern(LENGTH), way) as there:
            pool, copy = there.pool(side), there.copies[0]

            async def read() -> None:
                with pytest.raises(PullFailed, match=r"progress|not answer") as failed:
                    await side.run(
                        lambda: pool.pull(copy, there.digest, BufferDestination(bytearray(LENGTH)))
                    )
                assert failed.value.code is Code.DEADLINE_EXCEEDED
                assert not isinstance(failed.value, TooSlow)

            assert await seconds_of(read) < 3 * PROGRESS_SECONDS + SPARE_SECONDS

    async with trio.open_nursery() as nursery:
        for name, way in ATTACKS.items():
            if name != "more than nothing":  # which is a slow link
                nursery.start_soon(attack, way)


async def test_every_other_request_is_given_up_too(side: Side) -> None:
    async with holders(b"", Trickle()) as there:
        pool, copy = there.pool(side), there.copies[0]

        async def ask() -> None:
            with pytest.raises(DeadlineExceeded, match="next to no progress"):
                await side.run(lambda: pool.request(copy, DataKind.PING, Ping(), PROGRESS_SECONDS))

        assert await seconds_of(ask) < 2 * PROGRESS_SECONDS + SPARE_SECONDS


async def test_a_peer_that_takes_a_value_byte_by_byte_is_given_up(side: Side) -> None:
    value = pattern(12 * MIB)
    segment = segment_of(24 * MIB)
    async with (
        TcpHarness.open(segment, stores=Stores(segment)) as harness,
        Trickle(2000, taken=True).open(harness.address) as way,
    ):
        pool = harness.pool(side.driver, PROGRESS_SECONDS)
        peer = replace(writer(harness), data=(way.address,))

        async def store() -> None:
            with pytest.raises(DeadlineExceeded):
                await side.run(lambda: pool.store(peer, store_request(value), memoryview(value)))

        assert await seconds_of(store) < 3 * PROGRESS_SECONDS + SPARE_SECONDS
