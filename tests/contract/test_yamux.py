"""The own yamux and libp2p's understand each other: the wire is libp2p's."""

import struct
from contextlib import suppress
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import Yamux

from p2pstore.errors import ProtocolError
from p2pstore.gossip.links.multiplexer import Multiplexer, MuxedStream
from tests.waiting import until

SECONDS = 20.0


class Pipe:
    """One end of a connection in memory, as both implementations want it."""

    def __init__(self, stream: trio.StapledStream[Any, Any], initiator: bool) -> None:
        self._stream = stream
        self._rest = b""
        self.is_initiator = initiator

    async def read(self, n: int | None = None) -> bytes:
        while not self._rest:
            self._rest = bytes(await self._stream.receive_some(7_001))
            if not self._rest:
                raise ConnectionResetError("closed")
        count = len(self._rest) if n is None else n
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> None:
        return None


async def echo(stream: Any, count: int) -> None:
    left = count
    while left:
        data = await stream.read(100_000)
        left -= len(data)
        await stream.write(data)


async def told(stream: Any, data: bytes) -> bytes:
    """The answer of an echo to `data`, sent while it is read."""
    received = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, data)
        while len(received) < len(data):
            received += await stream.read(1_000_000)
    return received


@pytest.mark.parametrize("ours_dials", [True, False])
@pytest.mark.parametrize("length_bytes", [1, 300_000, 3_000_000])
async def test_both_ways_between_the_two_implementations(ours_dials: bool, length_bytes: int) -> None:
    one, two = trio.testing.memory_stream_pair()
    data = bytes(range(251)) * (length_bytes // 251 + 1)
    data = data[:length_bytes]
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            ours = Multiplexer(
                Pipe(one, ours_dials),
                initiator=ours_dials,
                max_incoming=4,
                accept=lambda stream: nursery.start_soon(served, stream),
            )

            async def served(stream: MuxedStream) -> None:
                await stream.lift_allowance()
                await echo(stream, length_bytes)

            library = Yamux(Pipe(two, not ours_dials), ID(b"p"), is_initiator=not ours_dials)  # type: ignore[arg-type]
            nursery.start_soon(ours.run)
            nursery.start_soon(library.start)
            await library.event_started.wait()

            theirs = await library.open_stream()
            assert await told(theirs, data) == data

            async def library_serves() -> None:
                await echo(await library.accept_stream(), length_bytes)

            nursery.start_soon(library_serves)
            mine = await ours.open_stream()
            await mine.lift_allowance()
            assert await told(mine, data) == data

            await mine.close()
            await theirs.reset()
            await until(lambda: ours.session.streams[theirs.stream_id].ended is not None)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ours_says_it", [True, False])
async def test_a_farewell_is_understood(ours_says_it: bool) -> None:
    one, two = trio.testing.memory_stream_pair()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            ours = Multiplexer(Pipe(one, True), initiator=True, max_incoming=4, accept=lambda _: None)
            library = Yamux(Pipe(two, False), ID(b"p"), is_initiator=False)  # type: ignore[arg-type]
            nursery.start_soon(run, ours)
            nursery.start_soon(library.start)
            await library.event_started.wait()
            if ours_says_it:
                await ours.say_goodbye()
                await library.event_closed.wait()
            else:
                nursery.start_soon(library.close)
                await until(lambda: ours.session.said_goodbye)
            nursery.cancel_scope.cancel()


async def run(multiplexer: Multiplexer) -> None:
    with suppress(OSError):  # the pipe was closed
        await multiplexer.run()


async def test_when_the_connection_ends_all_streams_do() -> None:
    """Tasks that read or wait for room to write are told, and so are later ones."""
    one, two = trio.testing.memory_stream_pair()
    ended: list[str] = []
    multiplexer = Multiplexer(Pipe(one, True), initiator=True, max_incoming=4, accept=lambda _: None)

    async def use(way: str, stream: MuxedStream) -> None:
        with pytest.raises(OSError, match="ended"):
            await (stream.read() if way == "read" else stream.write(bytes(300_000)))
        ended.append(way)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, multiplexer)
            for way in ("read", "write"):
                nursery.start_soon(use, way, await multiplexer.open_stream())
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not ended
            await two.aclose()
        assert sorted(ended) == ["read", "write"]
        with pytest.raises(OSError, match="ended"):
            await multiplexer.open_stream()


async def test_who_asks_and_does_not_read_costs_one_task() -> None:
    """Pings in message after message, while nothing can be sent: their answers wait together, and not for ever."""
    gone = trio.Event()

    class Blocked:
        async def read(self, n: int | None = None) -> bytes:
            await trio.lowlevel.checkpoint()
            return struct.pack("!BBHII", 0, 2, 1, 0, 7)

        async def write(self, data: bytes) -> None:
            await gone.wait()

    multiplexer = Multiplexer(Blocked(), initiator=False, max_incoming=4, accept=lambda stream: None)
    most = 0

    class Tasks(trio.abc.Instrument):
        alive = 0

        def task_spawned(self, task: trio.lowlevel.Task) -> None:
            nonlocal most
            self.alive += 1
            most = max(most, self.alive)

        def task_exited(self, task: trio.lowlevel.Task) -> None:
            self.alive -= 1

    instrument = Tasks()
    trio.lowlevel.add_instrument(instrument)
    try:
        with trio.fail_after(SECONDS), pytest.raises(ProtocolError, match="does not read"):
            await multiplexer.run()
    finally:
        trio.lowlevel.remove_instrument(instrument)
    assert most <= 2
