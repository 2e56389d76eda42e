"""Clients, blocking and under trio, against a real local server with a real segment."""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import p2pstore
from p2pstore import aio, blocking, wire
from p2pstore.client import answers, leasing, peer_link
from p2pstore.client import lease_book as leases_module
from p2pstore.client.lease_book import LeaseBook
from p2pstore.errors import (
    AmbiguousLocalPeer,
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    LeaseLimitExceeded,
    NoLocalPeer,
    ObjectTooLarge,
    StoreClosed,
    Unavailable,
)
from p2pstore.local import listener, local_connection, local_protocol
from p2pstore.local import local_messages as local
from p2pstore.local import local_requests as requests
from p2pstore.local import socket_paths as paths
from p2pstore.local.listener import MAX_CONNECTIONS, listen_at
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.local.server import MAX_IN_FLIGHT
from p2pstore.memory import hazards
from p2pstore.objects import MIB, Version, key_digest
from p2pstore.runtime import blocking_streams, polling, streams
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.runtime.trio_streams import TrioDriver, TrioStream
from p2pstore.wire import HEADER, PREFACE_LOCAL, Code, Empty, Message, encode_frame
from tests.contract.small_peer import PEER_ID, SmallPeer, small_peer
from tests.interrupts import interrupted_after_each_call, interrupted_at_each_line
from tests.threads import in_threads, with_threads


class PlainStore:
    """A blocking client with async methods that never suspend, so that one suite serves both."""

    def __init__(self, client: blocking.BlockingClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if not callable(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call


@pytest.fixture
def peer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallPeer]:
    gives_pages = getattr(request, "param", False)
    with small_peer(tmp_path / "peer.sock", gives_pages=gives_pages) as running:
        yield running


@pytest.fixture(params=["blocking", "trio"])
async def store(request: pytest.FixtureRequest, peer: SmallPeer) -> AsyncIterator[Any]:
    async with connected(request.param, peer) as opened:
        yield opened


def connected(kind: str, peer: SmallPeer, **settings: Any) -> Any:
    """A client of either kind as an async context manager."""
    if kind == "trio":
        return p2pstore.connect(str(peer.path), **settings)
    return Plain(blocking.connect(str(peer.path), **settings))


class Plain:
    def __init__(self, client: blocking.BlockingClient) -> None:
        self.client = client

    async def __aenter__(self) -> PlainStore:
        return PlainStore(self.client)

    async def __aexit__(self, *_: object) -> None:
        self.client.close()


both = pytest.mark.parametrize("kind", ["blocking", "trio"])
asked_or_not = pytest.mark.parametrize("peer", [False, True], indirect=True, ids=["asked", "not"])
"""Leases that are asked for, and those that clients take by themselves."""
gives_pages = pytest.mark.parametrize("gives_pages", [False, True], ids=["asked", "not"])


async def eventually(peer: SmallPeer, condition: Any) -> None:
    """Wait, without stopping this test's own loop, until the peer sees it."""
    await trio.to_thread.run_sync(peer.wait_until, condition)


# --- what the store does -----------------------------------------------------------------------


async def test_keys_at_their_limits(store: Any) -> None:
    for key in ("k", "k" * 1024, "\N{SNOWMAN}" * 341, "a/b c\n"):
        await store.put(key, key.encode())
        assert await store.get(key) == key.encode()
    for key in ("", "k" * 1025, "\udc80"):
        for call in (store.put(key, b"v"), store.get(key), store.contains(key)):
            with pytest.raises(ValueError, match="key"):
                await call
    with pytest.raises(TypeError):
        await store.get(7)


async def test_what_does_not_fit(store: Any, peer: SmallPeer) -> None:
    with pytest.raises(CapacityExceeded, match=r"16,777,216.* there is no other peer"):
        await store.put("k", np.zeros(17 * MIB, np.uint8))
    views = []
    for number in range(3):
        await store.put(f"k{number}", np.full(4 * MIB, number, np.uint8))
        views.append(await store.take_lease(f"k{number}"))
    with pytest.raises(CapacityExceeded, match=r"leased.* there is no other peer"):
        await store.put("big", np.zeros(8 * MIB, np.uint8))
    del views
    assert (await store.put("big", np.zeros(8 * MIB, np.uint8))).status == "created"
    await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)


async def test_a_peer_of_the_version_before_says_itself_that_it_is_full(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(local_protocol.REQUESTS, local_protocol.LocalKind.PLACE)
    with pytest.raises(ObjectTooLarge, match="give it more --memory"):
        await store.put("k", np.zeros(17 * MIB, np.uint8))


@both
async def test_namespaces_are_apart(kind: str, peer: SmallPeer) -> None:
    async with connected(kind, peer, namespace="a") as a, connected(kind, peer) as b:
        await a.put("k", b"in a")
        assert not await b.contains("k")
        await b.put("k", b"in default")
        assert (await a.get("k"), await b.get("k")) == (b"in a", b"in default")
        assert [each.length for each in (await a.list_keys()).keys] == [4]
        await b.remove("k")
        assert await a.contains("k")
    with pytest.raises(ValueError, match="namespace"):
        connected(kind, peer, namespace="")


async def test_steady_puts_cost_one_request_each(store: Any, peer: SmallPeer) -> None:
    for number in range(20):
        await store.put(f"k{number:02}", bytes([number]) * 4096)
    requests = [each for each in peer.backend.requests if each is not LocalKind.REPORT]
    assert requests.count(LocalKind.COMMIT) == 20
    assert requests.count(LocalKind.RESERVE) == 2
    assert await store.get("k07") == b"\x07" * 4096
    await store.put("other", b"another size")
    await eventually(peer, lambda: LocalKind.ABORT in peer.backend.requests)
    assert peer.used_bytes() == 20 * 8192 + 4096


async def test_reads_from_the_mapping_ask_nobody_and_are_reported(store: Any, peer: SmallPeer) -> None:
    await store.put("k", b"value")
    before = len(peer.backend.requests)
    for _ in range(50):
        assert await store.contains("k")
        assert await store.get("k") == b"value"
    assert set(peer.backend.requests[before:]) <= {LocalKind.REPORT}

    def reported() -> list[local.AccessCount]:
        return [access for report in peer.backend.reports for access in report.accesses]

    await eventually(peer, lambda: sum(each.count for each in reported()) == 50)
    assert {each.digest for each in reported()} == {key_digest("k")}
    assert sum(each.bytes_read for each in reported()) == 250
    assert len(peer.backend.reports) < 20


# --- leases ------------------------------------------------------------------------------------


async def a_later_lease_ended(store: Any, peer: SmallPeer) -> None:
    """Releases are held back for a while: when one that began and ended now has arrived, so have those of all
    that ended before."""
    length = 3 * MIB
    await store.put("later", bytes(length))
    view = await store.take_lease("later")
    assert peer.call(lambda: peer.backend.segment.leased_bytes) >= length
    del view
    await eventually(peer, lambda: peer.backend.segment.leased_bytes < length)


@asked_or_not
async def test_a_lease_lasts_as_long_as_any_view(store: Any, peer: SmallPeer) -> None:
    await store.put("k", b"0123456789" * 1000)
    segment = peer.backend.segment
    view = await store.take_lease("k")
    part = np.frombuffer(view[10:20], np.uint8)
    await store.remove("k")
    del view
    await a_later_lease_ended(store, peer)
    assert peer.call(lambda: segment.leased_bytes) > 0
    await store.put_many([(f"o{number}", bytes([number]) * MIB) for number in range(30)])
    assert bytes(part) == b"0123456789"
    del part
    await eventually(peer, lambda: segment.leased_bytes == 0)


@asked_or_not
async def test_a_lease_that_ends_in_the_garbage_collector(store: Any, peer: SmallPeer) -> None:
    await store.put("k", b"value")
    loop: list[Any] = [await store.take_lease("k")]
    loop.append(loop)
    del loop
    gc.collect()
    await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)


@asked_or_not
async def test_one_lease_serves_many_views_of_a_version(store: Any, peer: SmallPeer) -> None:
    await store.put("k", b"first")
    views = [await store.take_lease("k") for _ in range(10)]
    asked = not peer.backend.gives_pages
    assert peer.backend.requests.count(LocalKind.LEASE) == asked
    await store.put("k", b"other", overwrite=True)
    newer = await store.take_lease("k")
    assert (views[0], newer) == (b"first", b"other")
    assert peer.backend.requests.count(LocalKind.LEASE) == 2 * asked
    del views, newer
    revived = await store.take_lease("k")
    assert revived == b"other"
    await a_later_lease_ended(store, peer)  # only the revived one may stay
    assert peer.call(lambda: peer.backend.segment.leased_bytes) == 4096
    del revived
    await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)


@asked_or_not
async def test_leases_of_many_take_one_request(store: Any, peer: SmallPeer) -> None:
    items = [(f"k{number}", bytes([number]) * number) for number in range(100)]
    await store.put_many(items)
    kept = await store.take_lease("k7")
    asked = peer.backend.requests.count(LocalKind.LEASE)
    views = await store.take_leases([*(key for key, _ in items), "k1"])
    in_all = asked + (not peer.backend.gives_pages)
    assert peer.backend.requests.count(LocalKind.LEASE) == in_all
    assert [bytes(each.unwrap()) for each in views] == [*(value for _, value in items), b"\x01"]
    assert all(each.unwrap().readonly for each in views)
    again = await store.take_leases([key for key, _ in items])
    assert peer.backend.requests.count(LocalKind.LEASE) == in_all
    await store.remove_many([key for key, _ in items])
    await store.put_many([(f"new{number}", bytes(9000)) for number in range(100)])
    assert [bytes(each.unwrap()) for each in again] == [value for _, value in items]
    del views, again, kept
    await a_later_lease_ended(store, peer)
    await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)


@both
@gives_pages
async def test_the_cap_on_leased_bytes_among_many(kind: str, tmp_path: Path, gives_pages: bool) -> None:
    with small_peer(tmp_path / "s", max_leased_bytes=2 * MIB, gives_pages=gives_pages) as peer:
        async with connected(kind, peer) as store:
            keys = [f"k{number}" for number in range(4)]
            for key in keys:
                await store.put(key, bytes(MIB))
            first = await store.take_leases(keys[:2])
            del first  # kept for a moment, until there is another use for the room
            views = await store.take_leases(keys)
            assert sum(each.ok for each in views) == 2
            assert {type(each.error) for each in views if not each.ok} == {LeaseLimitExceeded}
            with pytest.raises(LeaseLimitExceeded):
                await store.take_lease(keys[-1])
            del views
            assert len(await store.take_lease(keys[-1])) == MIB
            assert all(each.ok for each in await store.take_leases(keys[2:]))
            assert all(each.ok for each in await store.take_leases(keys[:2] * 10))


@both
@gives_pages
async def test_views_stay_readable_after_the_client_and_the_peer(
    kind: str, tmp_path: Path, gives_pages: bool
) -> None:
    with small_peer(tmp_path / "s", gives_pages=gives_pages) as peer:
        async with connected(kind, peer) as store:
            await store.put("k", b"value" * 5000)
            view = await store.take_lease("k")
        await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)
        assert bytes(view) == b"value" * 5000
        with pytest.raises(StoreClosed):
            await store.get("k")
    assert bytes(view) == b"value" * 5000


# --- never wrong bytes, other holders -----------------------------------------------------------


async def test_damaged_bytes_are_not_delivered(store: Any, peer: SmallPeer) -> None:
    await store.put("k", bytes(3 * MIB))
    entry = peer.call(lambda: peer.backend.segment.find(key_digest("k"), time.time()))
    assert entry is not None
    peer.backend.memory.view[entry.offset + 2 * MIB + 5] ^= 1
    for call in (store.get("k"), store.get_into("k", bytearray(3 * MIB))):
        with pytest.raises(Unavailable):
            await call
    peer.backend.memory.view[entry.offset + 2 * MIB + 5] ^= 1
    assert await store.get("k") == bytes(3 * MIB)


def holder(member: int, path: Path, peer_id: bytes = PEER_ID) -> local.Holder:
    return local.Holder(
        *(member << 16 | 7, peer_id, "other", ["127.0.0.1:1"], str(path), True, 0, 1, 1, 7, 0),
        *(b"claims", b"signature", b"secret"),
    )


async def test_reading_another_peer_of_this_host(store: Any, peer: SmallPeer, tmp_path: Path) -> None:
    value = random.Random(4).randbytes(5 * MIB)
    with small_peer(tmp_path / "other.sock") as other:
        with blocking.connect(str(other.path)) as writer:
            writer.put("far", value)
            writer.put("forged", b"not by whom it was said to be")
            writer.put("near", b"by")
        for key in ("far", "near"):
            plan = local.PlanItem([holder(11, tmp_path / "nobody"), holder(12, other.path)])
            peer.backend.planned[key_digest(key)] = [plan, plan]
        forged = local.PlanItem([holder(13, other.path, peer_id=bytes(38))])
        peer.backend.planned[key_digest("forged")] = [forged, forged]
        with pytest.raises(Unavailable):
            await store.get("forged")
        assert await store.get("far") == value
        buffer = bytearray(2)
        results = await store.get_many_into([("near", buffer)])
        assert (results[0].value, bytes(buffer)) == (2, b"by")
        await store.contains("far")  # sends what is to be reported
        await eventually(peer, lambda: any(each.failures for each in peer.backend.reports))
        failures = [each for report in peer.backend.reports for each in report.failures]
        assert {each.member >> 16 for each in failures} == {11, 13}
        assert all(each.code == Code.UNAVAILABLE for each in failures)
    peer.backend.planned[key_digest("far")] = [plan, plan]
    with pytest.raises(Unavailable):  # the other peer is gone
        await store.get("far")


async def test_when_all_holders_fail(store: Any, peer: SmallPeer, tmp_path: Path) -> None:
    digest = key_digest("k")
    nobody = tmp_path / "nobody"
    nothing = local.PlanItem([], error=local.ItemError(int(Code.NO_SUCH_KEY), "no holder"))
    peer.backend.planned[digest] = [
        local.PlanItem([holder(1, nobody), holder(2, nobody)]),
        local.PlanItem([holder(3, nobody)]),
    ]
    with pytest.raises(Unavailable, match="1 known copies"):
        await store.get("k")
    assert peer.backend.excluded[-2:] == [[], [1 << 16 | 7, 2 << 16 | 7]]
    peer.backend.planned[digest] = [local.PlanItem([holder(1, nobody)]), nothing]
    with pytest.raises(Unavailable):  # not NoSuchKey: an unreachable peer may have a copy
        await store.get("k")


# --- failures, cancellation, many at once -------------------------------------------------------


@both
async def test_slow_requests_hold_up_nobody(kind: str, peer: SmallPeer) -> None:
    async with connected(kind, peer, timeout=60) as store:
        await store.put("k", b"value")
        peer.backend.gate = peer.call(trio.Event)
        found: list[int] = []

        async def slow() -> None:
            if kind == "trio":
                found.append(len(await store.locate("k")))
            else:
                where = await trio.to_thread.run_sync(store.client.locate, "k")
                found.append(len(where))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(slow)
            await eventually(peer, lambda: peer.backend.requests.count(LocalKind.LOCATE) == 8)
            with trio.fail_after(60):
                assert [each.name for each in await store.peers()] == ["small"]
            assert not found
            peer.call(peer.backend.gate.set)
        assert found == [1] * 8


async def test_too_many_requests_in_flight_wait(peer: SmallPeer) -> None:
    async with p2pstore.connect(str(peer.path), timeout=60) as store:
        peer.backend.gate = peer.call(trio.Event)
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_IN_FLIGHT + 5):
                nursery.start_soon(store.locate, "k")
            await eventually(
                peer, lambda: peer.backend.requests.count(LocalKind.LOCATE) > MAX_IN_FLIGHT + 4
            )
            peer.call(peer.backend.gate.set)


@both
async def test_a_deadline_leaves_the_client_usable(kind: str, peer: SmallPeer) -> None:
    async with connected(kind, peer, timeout=0.2) as store:
        await store.put("k", b"value")
        peer.backend.gate = peer.call(trio.Event)
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            await store.locate("k")
        assert await store.get("k") == b"value"
        peer.call(peer.backend.gate.set)
        assert [each.name for each in await store.peers()] == ["small"]


async def test_a_cancelled_receive_loses_no_bytes() -> None:
    """On a shared connection they may be the answer to another request."""
    ours, theirs = socket.socketpair()
    stream = TrioStream(ours)
    received = bytearray(8)
    try:
        theirs.sendall(b"answer")
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.receive_into(memoryview(received))
        assert scope.cancelled_caught
        assert await stream.receive_into(memoryview(received)) == 6
        assert received[:6] == b"answer"
    finally:
        stream.close()
        theirs.close()


@both
@pytest.mark.parametrize("what", ["lease", "reserve", "commit"])
async def test_what_is_granted_too_late_is_given_back(kind: str, what: str, peer: SmallPeer) -> None:
    async with connected(kind, peer, timeout=0.1) as store:
        await store.put("k", b"value")
        if what == "commit":  # the next one asks for a reservation ahead
            await store.put("s1", bytes(4096))
            await store.put("s2", bytes(4096))
        peer.backend.requests.clear()
        call = store.take_lease("k") if what == "lease" else store.put("s3", bytes(4096))
        with peer.standing_still(), pytest.raises(DeadlineExceeded):
            await call
        await eventually(peer, lambda: LocalKind[what.upper()] in peer.backend.requests)
        segment = peer.backend.segment
        await eventually(peer, lambda: segment.leased_bytes == 0)
        kept = 4096 + (3 * 8192 if what == "commit" else 0)
        await eventually(peer, lambda: segment.used_bytes == kept)


def test_who_closes_waits_for_no_peer_that_stands_still(peer: SmallPeer) -> None:
    """Not even to say farewell, when its socket takes no more."""
    client = blocking.connect(peer.path, timeout=600)
    client.put("k", b"value")
    assert client.get("k") == b"value"
    connection = client._session._link.connection
    with peer.standing_still(), socket.socket(fileno=os.dup(connection._stream.fileno())) as sock:
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


async def test_whoever_is_left_waiting_receives_next(peer: SmallPeer) -> None:
    """The thread that receives for others leaves with its own answer; theirs come later."""
    with blocking.connect(str(peer.path), timeout=30) as client:
        gates = [peer.call(trio.Event), peer.call(trio.Event)]
        threads = []
        for number, gate in enumerate(gates):
            peer.backend.gate = gate
            thread = threading.Thread(target=client.locate, args=("k",), daemon=True)
            thread.start()
            threads.append(thread)
            await eventually(peer, lambda wanted=number + 1: len(peer.backend.requests) == wanted)
        for gate, thread in zip(gates, threads, strict=True):
            peer.call(gate.set)
            await trio.to_thread.run_sync(thread.join, 5)
            assert not thread.is_alive()


async def test_threads_share_one_client(peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:

        def work(number: int) -> None:
            rng = random.Random(number)
            for turn in range(40):
                key, value = f"{number}-{turn}", rng.randbytes(rng.choice([10, 5000]))
                assert client.put(key, value).status == "created"
                assert client.get(key) == value
                with client.lease(key) as view:
                    assert view == value
                assert [each.peer for each in client.locate(key)] == ["small"]
                assert client.remove(key)

        await trio.to_thread.run_sync(in_threads, 8, work)
        await eventually(peer, lambda: peer.backend.segment.leased_bytes == 0)
    await eventually(peer, lambda: peer.backend.segment.used_bytes == 0)
    assert peer.used_bytes() == 0


@both
async def test_the_peer_stops_under_a_client(kind: str, tmp_path: Path) -> None:
    with small_peer(tmp_path / "s") as peer:
        async with connected(kind, peer) as store:
            await store.put("k", b"value")
            peer.backend.gate = peer.call(trio.Event)

            async def locate() -> Any:
                if kind == "trio":
                    return await store.locate("k")
                return await trio.to_thread.run_sync(store.client.locate, "k")

            async def waits() -> None:
                with pytest.raises(StoreClosed):
                    await locate()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(waits)
                nursery.start_soon(waits)
                await eventually(peer, lambda: peer.backend.requests.count(LocalKind.LOCATE) == 2)
                await trio.to_thread.run_sync(peer.stop)
            for call in (store.put("k", b"v"), store.get("k"), store.contains("k")):
                with pytest.raises(StoreClosed):
                    await call
            gc.disable()
            try:
                for keys in (["k"], ["k", "l"]):  # one or more: it is no fault of theirs
                    buffers = [bytearray(5) for _ in keys]
                    for batch in (
                        store.put_many(list(zip(keys, buffers, strict=True))),
                        store.get_many(keys),
                        store.get_many_into(list(zip(keys, buffers, strict=True))),
                    ):
                        with pytest.raises(StoreClosed):
                            await batch
                    for buffer in buffers:
                        buffer.append(0)  # BufferError while there is a view of it
            finally:
                gc.enable()
    assert not (tmp_path / "s").exists()


CLIENT_THAT_DIES = """
import os, sys, time
from p2pstore import aio, blocking, wire
from p2pstore.runtime.blocking_streams import run_blocking
client = blocking.connect(sys.argv[1])
client.put("k", b"x" * 5000)
view = client.take_lease("k")
run_blocking(client._session._live.writer.reserve([(3_000_000, 1000, 2)], 2))
for number in range(4):
    client.put(f"s{number}", b"y" * 5000)
child = os.fork() if sys.argv[2] == "fork" else 0
if child == 0 and sys.argv[2] == "fork":
    time.sleep(60)
    os._exit(0)
print("ready", child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_a_client_that_is_killed_leaves_nothing_behind(fork: str, peer: SmallPeer) -> None:
    """Not even when a child that it forked lives on, with the socket it inherited."""
    command = [sys.executable, "-W", "ignore", "-c", CLIENT_THAT_DIES, str(peer.path), fork]
    child = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            word, number = process.stdout.readline().split()
            child = int(number)
            assert word == b"ready"
            assert peer.used_bytes() > 6_000_000
            assert peer.call(lambda: peer.backend.segment.leased_bytes) > 0
            process.kill()
            process.wait()
            peer.wait_until(lambda: len(peer.backend.gone) == 1)
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)
    assert peer.used_bytes() == 5 * 8192
    assert peer.call(lambda: peer.backend.segment.leased_bytes) == 0


async def test_a_client_that_was_not_open_pickles_as_such(peer: SmallPeer) -> None:
    unopened = pickle.loads(pickle.dumps(p2pstore.connect(str(peer.path), namespace="n")))
    with pytest.raises(RuntimeError, match=r"not connected.*async with"):
        await unopened.get("k")


def test_a_dropped_client_ends_its_connection(peer: SmallPeer) -> None:
    client = blocking.connect(str(peer.path))
    client.put("k", b"value")
    view = client.take_lease("k")
    del client
    gc.collect()
    peer.wait_until(lambda: len(peer.backend.gone) == 1)
    assert bytes(view) == b"value"


async def test_a_wait_that_is_nearly_over_does_not_cut_off_who_sends(peer: SmallPeer) -> None:
    """Of two tasks on one connection, one gives up soon, while the other's request is still being taken."""
    driver = TrioDriver()
    connection = await LocalConnection.open(driver, str(peer.path), Opening("n", Access.READ))
    request = local.Locate(bytes(16))
    large = local.Contains(bytes(2 * MIB))  # more than the socket holds

    async def give_up_soon() -> None:
        with pytest.raises(DeadlineExceeded):
            await connection.request(LocalKind.LOCATE, request, local.Located, progress_seconds=0.3)

    gate = peer.backend.gate = peer.call(trio.Event)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up_soon)
            await eventually(peer, lambda: LocalKind.LOCATE in peer.backend.requests)
            peer.stall(0.6)
            reply = await connection.request(LocalKind.CONTAINS, large, local.ContainsReply)
        assert len(reply.present) == 2 * MIB // 16
    finally:
        peer.call(gate.set)
        connection.close()


def test_threads_come_and_go_while_others_wait(peer: SmallPeer) -> None:
    """An ending transfer wakes its waiters while others are added and removed."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with blocking.connect(str(peer.path), timeout=20) as client:

            def work(_: int) -> None:
                for _ in range(60):
                    client.contains_many(["a", "b"])

            in_threads(24, work)
    finally:
        sys.setswitchinterval(interval)


def test_a_put_ends_when_its_client_is_closed(peer: SmallPeer) -> None:
    """The peer may give the room to another client then: nothing more is written to it."""
    pieces: list[int] = []
    client = blocking.connect(str(peer.path))

    def close_after_the_first(done_bytes: int, total_bytes: int) -> None:
        pieces.append(done_bytes)
        client.close()

    with pytest.raises(StoreClosed, match="client is closed"):
        client.put("k", bytes(12 * MIB), progress=close_after_the_first)
    assert pieces == [4 * MIB]


# --- the socket ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backlog_is_full", [False, True], ids=["no answer", "full backlog"])
@pytest.mark.parametrize("world", ["trio", "asyncio", "blocking"])
def test_a_peer_that_hangs_is_given_up_after_the_timeout(
    world: str, backlog_is_full: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")

    async def by_trio() -> None:
        async with p2pstore.connect(path, timeout=0.2):
            pass

    async def by_asyncio() -> None:
        async with aio.connect(path, timeout=0.2):
            pass

    ways: dict[str, Callable[[], object]] = {
        "trio": lambda: trio.run(by_trio),
        "asyncio": lambda: asyncio.run(by_asyncio()),
        "blocking": lambda: blocking.connect(path, timeout=0.2),
    }
    with contextlib.ExitStack() as stack:
        hung = stack.enter_context(socket.socket(socket.AF_UNIX))
        hung.bind(path)
        hung.listen(0)
        if backlog_is_full:
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="hangs or was stopped"):
            ways[world]()
        assert 0.15 < time.monotonic() - begin < 3


def test_a_thousand_clients(peer: SmallPeer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    driver = BlockingDriver()

    def connect() -> LocalConnection:
        return run_blocking(LocalConnection.open(driver, str(peer.path), Opening("n", Access.READ)))

    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            last = connect()
            stack.callback(last.close)
        reply = run_blocking(last.request(LocalKind.PEERS, local.Peers(), local.PeersReply))
        assert [each.name for each in reply.items] == ["small"]
        for _ in range(MAX_CONNECTIONS - 1000):
            stack.callback(connect().close)
        with pytest.raises(Unavailable, match="1,024"):
            connect()
    peer.wait_until(lambda: len(peer.backend.gone) == MAX_CONNECTIONS)
    connect().close()


HELLO = PREFACE_LOCAL + encode_frame(LocalKind.HELLO, 0, local_protocol.Hello(1, 1, "n", 1, 1))
GARBAGE = {
    "noise": random.Random(1).randbytes(3000),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no hello": PREFACE_LOCAL + encode_frame(LocalKind.PEERS, 0, local.Peers()),
    "hello that is none": PREFACE_LOCAL + HEADER.pack(1, 0, 0, 3, 0) + b"abc",
    "long hello": PREFACE_LOCAL + HEADER.pack(1, 0, 0, 5000, 0) + bytes(5000),
    "version": PREFACE_LOCAL + encode_frame(1, 0, local_protocol.Hello(99, 99, "n", 1, 1)),
    "namespace": PREFACE_LOCAL + encode_frame(1, 0, local_protocol.Hello(1, 1, "", 1, 1)),
    "access": PREFACE_LOCAL + encode_frame(1, 0, local_protocol.Hello(1, 1, "n", 9, 1)),
    "second hello": HELLO + HELLO[8:],
    "reply": HELLO + encode_frame(LocalKind.PEERS, 0, local.Peers(), flags=1),
    "huge body": HELLO + HEADER.pack(25, 0, 0, 1 << 30, 0),
    "bulk": HELLO + HEADER.pack(25, 0, 0, 0, 5),
    "malformed": HELLO + HEADER.pack(25, 0, 1, 4, 0) + b"\xc1\xc1\xc1\xc1",
    "half a hello": HELLO[:20],
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_costs_only_its_own_connection(
    garbage: bytes, peer: SmallPeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with blocking.connect(str(peer.path)) as bystander:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(str(peer.path))
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            try:
                while stranger.recv(65536):
                    pass
            except ConnectionResetError:
                pass
        bystander.put("k", b"value")
        assert bystander.get("k") == b"value"
    assert [record.name for record in caplog.records] == ["p2pstore.local"]
    assert "\n" not in caplog.records[0].getMessage()


@pytest.mark.parametrize("what", ["on_handled", "on_made_ready", "on_answered"])
def test_answers_go_out_before_what_else_is_to_be_done(what: str, peer: SmallPeer) -> None:
    received = threading.Event()
    in_time: list[bool] = []

    def waits_for_the_answer() -> None:
        if peer.backend.requests:
            in_time.append(received.wait(5))

    setattr(peer.backend, what, waits_for_the_answer)
    with blocking.connect(str(peer.path)) as client:
        client.peers()
        received.set()
        peer.wait_until(lambda: in_time)
    assert in_time[0]


def test_what_requests_gave_to_do_is_done_also_before_garbage(peer: SmallPeer) -> None:
    asked: list[int] = []
    peer.backend.on_handled = lambda: asked.append(len(peer.backend.requests))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(peer.path))
        stranger.sendall(HELLO + encode_frame(LocalKind.PEERS, 7, local.Peers()) + b"x" * 64)
        peer.wait_until(lambda: peer.backend.gone)
    assert 1 in asked


def test_a_client_with_read_access_cannot_write(peer: SmallPeer) -> None:
    with contextlib.closing(
        run_blocking(LocalConnection.open(BlockingDriver(), str(peer.path), Opening("n", Access.READ)))
    ) as connection:
        assert connection.segments[0].readonly
        requests: dict[LocalKind, Message] = {
            LocalKind.RESERVE: local.Reserve([(1, 100, 1)]),
            LocalKind.COMMIT: local.Commit("n", [], [], [], b"", []),
            LocalKind.ABORT: local.Abort([1]),
            LocalKind.PLACE: local.Place(bytes(16), 1),
            LocalKind.STORED: local.StoredElsewhere(b"p", 1, 1, b""),
            LocalKind.REMOVE: local.Remove("n", ["k"]),
            LocalKind.REPLICATE: local.Replicate(bytes(16), 2),
            LocalKind.PIN: local.SetPin(bytes(16), 1),
            LocalKind.FLUSH: local.Flush("n"),
            LocalKind.LEAVE: local.Leave(0.0),
        }
        for kind, request in requests.items():
            with pytest.raises(ValueError, match="only to read"):
                run_blocking(connection.request(kind, request, Empty))
        assert peer.backend.requests == []


async def test_a_socket_that_cannot_be_given_to_its_group_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    path = tmp_path / "s"
    with pytest.raises(ConfigError, match=r"socket_group: this user .* be a member"):
        await listen_at(path, 0o660, "root")
    assert not path.exists()
    with pytest.raises(ConfigError, match="no group 'nobody-has-this'"):
        await listen_at(path, 0o660, "nobody-has-this")
    assert not path.exists()


async def test_a_lock_that_somebody_holds_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may have it who can read the directory."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with trio.move_on_after(0.1) as stopping:  # as SIGTERM does
            await listen_at(tmp_path / "s", 0o600, None)
        assert stopping.cancelled_caught
        monkeypatch.setattr(listener, "LOCK_SECONDS", 0.1)
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} .*flock.*{tmp_path}.*end it"):
            await listen_at(tmp_path / "s", 0o600, None)
        assert not (tmp_path / "s").exists()
    finally:
        os.close(descriptor)
    (await listen_at(tmp_path / "s", 0o600, None)).close()


def test_an_unknown_request_is_unsupported(peer: SmallPeer) -> None:
    with socket.socket(socket.AF_UNIX) as newer:
        newer.settimeout(5)
        newer.connect(str(peer.path))
        newer.sendall(HELLO + encode_frame(999, 7, local.Peers()))
        received = b""
        while b"too old" not in received:
            data, descriptors, _, _ = socket.recv_fds(newer, 65536, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            assert data
            received += data


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.exists()
    with small_peer(path) as peer:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ExceptionGroup) as caught:
            SmallPeer(path)
        assert caught.group_contains(ConfigError, match="another peer already serves")
        with blocking.connect(str(peer.path)) as client:
            client.put("k", b"v")
    assert not path.exists()


def test_what_is_no_socket_is_said_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path, what in ((file, "a file"), (tmp_path, "a directory")):
        with pytest.raises(NoLocalPeer, match=f"{path} is {what}, not a peer's socket"):
            blocking.connect(str(path))
        with pytest.raises(ConfigError, match=f"socket: {path} is {what}"):
            trio.run(listen_at, path, 0o600, None)
    assert file.read_text() == "mine"


def test_finding_the_local_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(paths.SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(NoLocalPeer, match="join"):
        paths.find_socket()
    first, second = paths.default_socket_path("a"), paths.default_socket_path("b")
    assert first == tmp_path / "mooncake-p2p" / "a.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(second))
    with small_peer(first):
        assert paths.find_socket() == first
        with blocking.connect() as client:
            assert client.socket_path == str(first)
        with small_peer(second):
            with pytest.raises(AmbiguousLocalPeer, match=r"a\.sock.*b\.sock"):
                paths.find_socket()
            assert paths.find_socket(second) == second
            monkeypatch.setenv(paths.SOCKET_VARIABLE, str(first))
            assert paths.find_socket() == first
    with pytest.raises(NoLocalPeer):
        blocking.connect()


def test_a_directory_that_others_could_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "no" / "such")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = paths.default_socket_path("a")
    assert path.parent.stat().st_mode & 0o777 == 0o755
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="open to other users"):
        paths.default_socket_path("a")


class Struck:
    """A lock at which Ctrl-C strikes, right after it was taken or right before it is released."""

    def __init__(self, real: Any, moment: str) -> None:
        self.real, self._moment = real, moment

    def acquire(self) -> None:
        self.real.acquire()
        if self._moment == "taken":
            self._moment = ""
            raise KeyboardInterrupt

    def release(self) -> None:
        if self._moment == "released":
            self._moment = ""
            raise KeyboardInterrupt
        self.real.release()


@pytest.mark.parametrize("moment", ["taken", "released"])
def test_an_interrupted_caller_leaves_no_lock_taken(moment: str, peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:
        client.put("k", b"value")
        connection: Any = client._session._link.connection
        struck = Struck(connection._sending._lock, moment)
        connection._sending._lock = struck
        with pytest.raises(KeyboardInterrupt):
            client.locate("k")
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.append(client.locate("k")), daemon=True)
        thread.start()
        thread.join(60)
        assert len(others) == 1
        assert client.locate("k") == others[0]


LEASING = (
    *(leasing, leases_module, answers, peer_link, hazards),
    *(local_connection, requests, wire, polling, blocking_streams, streams),
)
SENDING = ("local_connection.py", "blocking_streams.py", "streams.py")


@asked_or_not
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("strike", [interrupted_at_each_line, interrupted_after_each_call])
def test_a_lease_that_is_interrupted_anywhere_is_given_back(
    peer: SmallPeer, strike: Callable[..., Iterator[str]]
) -> None:
    """The session goes on, but for an interrupt in the middle of sending."""
    places: list[str] = []
    client = blocking.connect(str(peer.path))
    client.put("k", bytes(10_000))
    client.put("other", bytes(10))

    def lease() -> None:
        client.take_lease("other")  # to be given back along with the next request
        client._session._link.give_back_idle()
        client.take_lease("k")

    for place in strike(lease, *LEASING):
        places.append(place)
        if client._session._link.connection.peer_is_gone():
            assert place.startswith(SENDING), place
            client = blocking.connect(str(peer.path))
        link = client._session._link
        deadline = time.monotonic() + 10
        while True:
            client.locate("k")  # answered after what was asked before
            if not (link.leases.outstanding or peer.call(lambda: peer.backend.segment.leased_bytes)):
                break
            assert time.monotonic() < deadline, f"lost when it was interrupted at {place}"
            gc.collect()
            link.give_back_idle()  # at once, not after the usual 50 ms
        if link.connection.awaits_late_replies:  # of what was about to be sent, for ever
            client = blocking.connect(str(peer.path))
    client.close()
    assert len(places) >= 15


def test_leases_that_another_thread_gave_back_meanwhile() -> None:
    book = LeaseBook()

    class Awaited:
        """The book's lock, for which this thread waits while another gives back all there is."""

        def __enter__(self) -> None:
            book._ended.clear()
            book._unused.clear()

        def __exit__(self, *_: object) -> None:
            pass

    book._lock = Awaited()  # type: ignore[assignment]
    for end in (book.give_back, book.forsake):
        for everything in (False, True):
            end(1)
            assert book.take_ended([], everything=everything) == []


def test_leases_without_a_view_are_given_back_at_once() -> None:
    """A loop of copies keeps no object in the peer's memory."""
    book = LeaseBook()
    view = book.view(1, b"1" * 16, memoryview(b"value"), (0, 5, Version(1, 1, 1)))
    book.give_back(2)
    assert book.keeps
    assert book.take_ended([], everything=False) == [2]
    assert book.take_ended([], everything=True) == []
    del view
    book.give_back(3)
    assert book.take_ended([], everything=False) == [3]
    assert book.take_ended([], everything=True) == [1]
    assert not book.outstanding


def test_the_blocking_client_needs_no_event_loop() -> None:
    code = (
        "import sys, p2pstore; light = set(sys.modules); import p2pstore.blocking; "
        "assert not {'numpy', 'msgspec', 'trio'} & light; "
        "assert not {'trio', 'asyncio', 'libp2p', 'p2pstore.peer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@both
async def test_large_values_by_several_threads(
    kind: str, peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_threads(monkeypatch, 3)
    value = np.random.default_rng(5).integers(0, 256, 13 * MIB + 7, np.uint8)
    done: list[tuple[int, int]] = []

    def note(done_bytes: int, total_bytes: int) -> None:
        done.append((done_bytes, total_bytes))

    async with connected(kind, peer) as client:
        await client.put("k", value, progress=note)
        assert done[-1] == (len(value), len(value))
        into = np.zeros_like(value)
        assert await client.get_into("k", into) == len(value)
        assert np.array_equal(into, value)
        into[:] = 0
        assert await client.get_into("k", into, progress=note) == len(value)
        assert np.array_equal(into, value)
        assert await client.get("k") == value.tobytes()


# --- the version before ------------------------------------------------------------------------


def test_clients_and_peers_of_version_1_put_in_rows(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two is older: neither can tell which."""
    monkeypatch.setattr("p2pstore.wire.LOCAL_MAX_VERSION", 1)
    frames: list[int] = []
    decode_header = wire.decode_header

    def noted(*arguments: Any) -> wire.FrameHeader:
        header = decode_header(*arguments)
        frames.append(header.kind)
        return header

    monkeypatch.setattr(wire, "decode_header", noted)
    with blocking.connect(str(peer.path)) as client:
        for number in range(4):
            assert client.put(f"k{number}", b"one by one").status == "created"
        items = [(f"many {number}", bytes([number % 256]) * (number % 5)) for number in range(300)]
        assert all(each.unwrap().status == "created" for each in client.put_many(items))
        assert all(each.unwrap().status == "unchanged" for each in client.put_many(items))
        assert [each.unwrap() for each in client.get_many([key for key, _ in items])] == [
            value for _, value in items
        ]
    assert {LocalKind.RESERVE_ROWS, LocalKind.COMMIT_ROWS} <= set(frames)
    assert not {LocalKind.RESERVE, LocalKind.COMMIT} & set(frames)
