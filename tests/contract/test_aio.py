"""The asyncio client's own ways: its loop, its end, and cancellation, which in asyncio is an exception
thrown in from outside. What it has in common with the others is in `test_store`."""

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import aio
from p2pstore.errors import DeadlineExceeded, NoLocalPeer, StoreClosed
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import MIB
from p2pstore.runtime.asyncio_streams import AsyncioDriver, AsyncioStream
from tests.commands import ran
from tests.contract.sides import in_asyncio, started
from tests.contract.small_peer import SmallPeer
from tests.threads import in_threads


@contextlib.asynccontextmanager
async def stream_pair() -> AsyncIterator[tuple[AsyncioStream, socket.socket]]:
    """Our end, with little room to send, and theirs."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setblocking(False)
    stream = AsyncioStream(ours)
    try:
        yield stream, theirs
    finally:
        stream.close()
        theirs.close()


async def drain(sock: socket.socket, length: int) -> bytes:
    """The next bytes that arrive."""
    received = b""
    loop = asyncio.get_running_loop()
    while len(received) < length:
        data = await asyncio.wait_for(loop.sock_recv(sock, length - len(received)), 60)
        assert data, "the connection ended"
        received += data
    return received


# --- streams ------------------------------------------------------------------------------------


@in_asyncio
async def test_a_whole_send_is_not_cancelled_in_the_middle() -> None:
    async with stream_pair() as (stream, theirs):
        frame = os.urandom(3 * MIB)
        sending = asyncio.create_task(stream.send_whole(frame[:5], frame[5:]))
        await started(sending)
        sending.cancel()
        await started(sending)
        sending.cancel()
        assert await drain(theirs, len(frame)) == frame
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert stream.fileno() >= 0
        await stream.send_whole(b"next")
        assert await drain(theirs, 4) == b"next"


@in_asyncio
async def test_a_whole_send_that_fails_closes_the_stream() -> None:
    async with stream_pair() as (stream, _):
        stream.progress_seconds = 0.05
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await stream.send_whole(bytes(MIB))
        assert stream.fileno() == -1


@in_asyncio
async def test_a_timeout_around_a_whole_send_stays_a_timeout() -> None:
    async with stream_pair() as (stream, theirs):
        frame = bytes(MIB)
        sending = asyncio.create_task(_send_within(stream, frame, 0.01))
        await asyncio.sleep(0.05)
        assert await drain(theirs, len(frame)) == frame
        with pytest.raises(TimeoutError):
            await sending


async def _send_within(stream: AsyncioStream, frame: bytes, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await stream.send_whole(frame)


@in_asyncio
async def test_a_cancelled_receive_loses_no_bytes() -> None:
    """On a shared connection they may be the answer to another request."""
    async with stream_pair() as (stream, theirs):
        received = bytearray(8)
        receiving = asyncio.create_task(stream.receive_into(memoryview(received)))
        await started(receiving)
        theirs.send(b"answer")
        await asyncio.sleep(0)  # the loop sees that the socket is readable...
        receiving.cancel()  # ...and this comes before the task runs
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert received == bytes(8)
        assert await stream.receive_into(memoryview(received)) == 6
        assert received[:6] == b"answer"
        theirs.send(b"more")
        receiving = asyncio.create_task(stream.receive_into(memoryview(received)))
        await asyncio.sleep(0)
        assert not receiving.cancel(), "it waits with bytes in its hands"
        assert await receiving == 4


@in_asyncio
async def test_closing_a_stream_ends_its_waits_and_forgets_its_number() -> None:
    async with stream_pair() as (stream, _):
        number = stream.fileno()
        receiving = asyncio.create_task(stream.receive_into(memoryview(bytearray(8))))
        sending = asyncio.create_task(stream.send(bytes(MIB)))
        await started(receiving)
        await started(sending)
        stream.close()
        stream.close()
        for task in (receiving, sending):
            with pytest.raises(ConnectionAbortedError, match="closed by this side"):
                await task
        other, far = socket.socketpair()
        with other, far:
            assert number in (other.fileno(), far.fileno())
            for _ in range(3):  # the loop must not look at a socket that took the number
                far.send(b"x")
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            assert not loop.remove_reader(number)
        with pytest.raises(OSError, match=r"descriptor|closed"):
            await stream.receive_into(memoryview(bytearray(8)))


@in_asyncio
async def test_connecting_has_a_deadline(tmp_path: Path) -> None:
    driver = AsyncioDriver()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        first = await driver.connect_unix(str(tmp_path / "s"), 1)
        with pytest.raises(DeadlineExceeded, match="did not answer within"):
            await driver.connect_unix(str(tmp_path / "s"), 0.05)
        first.close()
    with pytest.raises(FileNotFoundError):
        await driver.connect_unix(str(tmp_path / "none"), 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        stream = await driver.connect_tcp("localhost", port, 5)
        stream.close()
    with pytest.raises(ConnectionRefusedError):
        await driver.connect_tcp("127.0.0.1", port, 1)


@in_asyncio
async def test_a_thread_is_waited_for_when_its_caller_is_cancelled() -> None:
    go, ended = threading.Event(), []

    def work() -> None:
        assert go.wait(60)
        ended.append(True)
        raise ValueError("nobody asks for it any more")

    running = asyncio.create_task(AsyncioDriver().run_in_thread(work))
    await started(running)
    running.cancel()
    await started(running)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended


# --- the client ---------------------------------------------------------------------------------


def test_it_is_awaited_or_entered(peer: SmallPeer) -> None:
    async def main() -> None:
        client = await aio.connect(peer.path, namespace="n")
        await client.put("k", b"value")
        async with aio.connect(str(peer.path), namespace="n") as entered:
            assert await entered.get("k") == b"value"
            assert await entered is entered
        with pytest.raises(StoreClosed):
            await entered.get("k")
        async with client as same:
            assert same is client
        with pytest.raises(StoreClosed):
            await client.get("k")
        unopened = aio.connect(str(peer.path))
        with pytest.raises(RuntimeError, match=r"not connected.*await p2pstore\.aio"):
            await unopened.get("k")
        with pytest.raises(NoLocalPeer):
            await aio.connect(str(peer.path) + "no")

    asyncio.run(main(), debug=True)


@in_asyncio
async def test_whoever_is_left_waiting_receives_next(peer: SmallPeer) -> None:
    """A call that ends hands the receiving on, to one that may be cancelled before it knows."""
    async with aio.connect(peer.path, timeout=30) as client:
        calls: list[asyncio.Task[Any]] = []

        async def call_and_cancel_the_next() -> list[Any]:
            found = await client.locate("k")
            calls[1].cancel()
            return found

        gates = []
        for number in range(3):
            peer.backend.gate = peer.call(trio.Event)
            gates.append(peer.backend.gate)
            call = client.locate("k") if number else call_and_cancel_the_next()
            calls.append(asyncio.create_task(call))
            await eventually(peer, lambda wanted=number: locates(peer) == wanted + 1)
        peer.call(gates[0].set)
        assert await asyncio.wait_for(calls[0], 60) == []
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        peer.call(gates[2].set)
        assert await asyncio.wait_for(calls[2], 60) == []
        peer.call(gates[1].set)


def locates(peer: SmallPeer) -> int:
    return peer.backend.requests.count(LocalKind.LOCATE)


async def eventually(peer: SmallPeer, condition: Any) -> None:
    await asyncio.to_thread(peer.wait_until, condition)


@in_asyncio
async def test_leases_are_given_back_without_another_call(peer: SmallPeer) -> None:
    async with aio.connect(peer.path) as client:
        await client.put("k", b"value")
        async with client.lease("k") as view:
            assert bytes(view) == b"value"
        del view
        await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)
        await eventually(peer, lambda: peer.backend.gone == [])
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "p2pstore-janitor" not in names


@pytest.mark.parametrize("error", [KeyError("mine"), DeadlineExceeded("mine")])
def test_what_a_signal_handler_raises_within_a_step_comes_out_as_itself(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def strike(*_: object) -> None:
        raise error

    async def in_asyncio() -> None:
        async with aio.connect(peer.path) as client:
            monkeypatch.setattr(client._link.connection, "_dispatch", strike)
            with pytest.raises(type(error)) as came:
                await client.get("absent")
            assert came.value is error

    async def in_trio() -> None:
        async with p2pstore.connect(peer.path) as client:
            monkeypatch.setattr(client._link.connection, "_dispatch", strike)
            with pytest.raises(type(error)) as came:
                await client.get("absent")
            assert came.value is error

    asyncio.run(in_asyncio())
    trio.run(in_trio)


def test_each_loop_connects_for_itself(peer: SmallPeer) -> None:
    async def use(value: bytes) -> aio.AioClient:
        client = await aio.connect(peer.path)
        await client.put("k", value, overwrite=True)
        assert await client.get("k") == value
        return client

    first = asyncio.run(use(b"one"))

    async def misuse() -> None:
        with pytest.raises(RuntimeError, match="connect once in each loop"):
            await first.get("k")

    asyncio.run(misuse())
    first.close()
    in_threads(4, lambda _: asyncio.run(use(b"two")))
    assert asyncio.run(_get(peer)) == b"two"


async def _get(peer: SmallPeer) -> bytes:
    async with aio.connect(peer.path) as client:
        return await client.get("k")


def test_a_dropped_client_ends_its_connection(peer: SmallPeer) -> None:
    async def main() -> Any:
        client = await aio.connect(peer.path)
        await client.put("k", b"value")
        return weakref.ref(client), await client.take_lease("k")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client, view = asyncio.run(main())
        gc.collect()
    assert client() is None
    peer.wait_until(lambda: len(peer.backend.gone) == 1)
    assert view == b"value"


@in_asyncio
async def test_a_task_group_with_a_failure_cancels_the_others_cleanly(peer: SmallPeer) -> None:
    async with aio.connect(peer.path) as client:
        peer.backend.gate = peer.call(trio.Event)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(client.locate("k"))
                group.create_task(client.get("none"))
        assert len(caught.value.exceptions) == 1
        peer.call(peer.backend.gate.set)
        assert [each.name for each in await client.peers()] == ["small"]


TEARDOWN = """
import asyncio, sys
import p2pstore
from p2pstore import aio
kept = []

async def forever(client):
    while True:
        view = await client.take_lease("k")
        await client.put("big", bytes(5_000_000), overwrite=True)
        del view

async def main(closes):
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is nothing to warn of
    client = await aio.connect(sys.argv[1])
    await client.put("k", b"value")
    kept.append(await client.take_lease("k"))
    tasks = [asyncio.create_task(forever(client)) for _ in range(3)]
    await asyncio.sleep(0.05)
    if closes:
        await client.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

for closes in (True, False):
    asyncio.run(main(closes), debug=sys.argv[2] == "debug")
assert "trio" not in sys.modules and "libp2p" not in sys.modules, "trio was imported"
print("done")
"""


@pytest.mark.parametrize("mode", ["debug", "plain"])
def test_the_loop_ends_without_warnings(mode: str, peer: SmallPeer) -> None:
    """Whether the client was closed or not, and whatever was under way."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", TEARDOWN, str(peer.path), mode]
    done = ran(command)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
    peer.wait_until(lambda: len(peer.backend.gone) == 2)


def test_what_each_world_imports() -> None:
    code = """
import importlib, sys
importlib.import_module(sys.argv[1])
mine = {name for name in sys.modules if name.startswith("p2pstore")}
print(sorted({"trio", "asyncio", "libp2p"} & set(sys.modules)),
    any("asyncio" in name or "aio" in name for name in mine))
"""
    wanted = {
        "p2pstore.aio": "['asyncio'] True",
        "p2pstore.blocking": "[] False",
        "p2pstore.client.trio_client": "['trio'] False",
    }
    for module, output in wanted.items():
        done = ran([sys.executable, "-c", code, module], check=True)
        assert done.stdout.strip() == output, module
