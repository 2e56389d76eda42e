"""`get_into` with a trace and with progress, and waiting: every driver, real sockets, real segments."""

import os
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.errors import NoSuchKey
from p2pstore.local import local_messages as local
from p2pstore.objects import MIB, key_digest
from p2pstore.transfer.reading.shm_transport import ShmTransport
from p2pstore.transfer.transfer_trace import FetchTrace, ReadWatch
from p2pstore.transfer.transport import BufferDestination, Transport, pull_with_failover
from p2pstore.wire import Code
from tests.contract.sides import Side
from tests.contract.small_peer import PEER_ID, SmallPeer, small_peer
from tests.contract.test_transport import TcpHarness, pattern, put, segment_of

VALUE = random.Random(7).randbytes(9 * MIB + 5)
NOTHING = local.PlanItem([], error=local.ItemError(int(Code.NO_SUCH_KEY), "no holder"))


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(24 * MIB)) as opened:
        yield opened


async def test_a_pull_over_tcp_is_timed_and_tells_its_progress(tcp: TcpHarness, side: Side) -> None:
    value = pattern(3 * MIB + 5)
    digest = put(tcp.segment, "key", value)
    calls: list[tuple[int, int]] = []
    watch = ReadWatch(time.perf_counter, lambda done, total: calls.append((done, total)))
    watch.looked_up(0.0, {1: ("owner", "dram")}, 0, 0)
    buffer = bytearray(len(value))
    transports: list[Transport] = [ShmTransport(side.driver), tcp.transport(side.driver)]
    report = await side.run(
        lambda: pull_with_failover(
            [tcp.copy(digest)], transports, digest, BufferDestination(buffer, watch)
        )
    )
    assert report.unwrap().transport == "tcp"
    assert buffer == value
    total = len(value)
    assert calls == [(MIB, total), (2 * MIB, total), (3 * MIB, total), (total, total)]
    trace = watch.trace
    assert [(each.transport, each.tried, each.outcome) for each in trace.tries] == [
        ("shm", False, "on another host"),
        ("tcp", True, "delivered"),
    ]
    assert (trace.source, trace.tier, trace.transport) == ("owner", "dram", "tcp")
    assert trace.verify_seconds is not None
    spent = trace.queue_seconds + trace.transfer_seconds + trace.verify_seconds
    assert min(trace.queue_seconds, trace.transfer_seconds, trace.verify_seconds) > 0
    assert spent == pytest.approx(trace.tries[1].seconds)


# --- clients ------------------------------------------------------------------------------------


def read(peer: SmallPeer, key: str, wait: float = 0.0) -> tuple[bytes, FetchTrace, list[Any]]:
    """A value, how it came, and the progress that was told."""
    trace, calls, buffer = FetchTrace(), [], bytearray(len(VALUE) + 100)

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    with blocking.connect(str(peer.path)) as client:
        length = client.get_into(key, buffer, wait=wait, progress=progress, trace=trace)
    return bytes(buffer[:length]), trace, calls


def holder(member: int, path: Path) -> local.Holder:
    return local.Holder(
        *(member << 16 | 7, PEER_ID, f"peer {member}", ["127.0.0.1:1"], str(path), True, 0, 1, 1, 7, 0),
        *(b"claims", b"signature", b"secret"),
    )


def test_what_is_here_is_read_from_the_mapping(tmp_path: Path) -> None:
    with small_peer(tmp_path / "peer.sock") as peer:
        with blocking.connect(str(peer.path)) as client:
            put_calls: list[tuple[int, int]] = []
            client.put("k", VALUE, progress=lambda *each: put_calls.append(each))
        value, trace, calls = read(peer, "k")
    assert value == VALUE
    total = len(VALUE)
    assert put_calls == [(4 * MIB, total), (8 * MIB, total), (total, total)]
    assert calls == [(4 * MIB, total), (8 * MIB, total), (total, total)]
    assert (trace.local, trace.source, trace.transport) == (True, "small", "mapping")
    assert (trace.length_bytes, trace.tries) == (total, [])


def test_nothing_is_told_of_an_empty_value(tmp_path: Path) -> None:
    """Programs divide by its length."""
    with small_peer(tmp_path / "peer.sock") as peer:
        with blocking.connect(str(peer.path)) as client:
            client.put("k", b"")
        value, trace, calls = read(peer, "k")
    assert (value, trace.local, calls) == (b"", True, [])


def test_what_another_peer_of_this_host_has_is_read_over_shm(tmp_path: Path) -> None:
    with small_peer(tmp_path / "peer.sock") as peer, small_peer(tmp_path / "other.sock") as other:
        with blocking.connect(str(other.path)) as client:
            client.put("k", VALUE)
        peer.backend.planned[key_digest("k")] = [
            local.PlanItem([holder(11, tmp_path / "nobody"), holder(12, other.path)])
        ]
        value, trace, _ = read(peer, "k")
    assert value == VALUE
    assert (trace.source, trace.tier, trace.transport) == ("peer 12", "dram", "shm")
    assert trace.lookup_seconds > 0
    assert trace.copies_known == 2
    tries = [(each.peer, each.transport, each.outcome == "delivered") for each in trace.tries]
    assert tries == [("peer 11", "shm", False), ("peer 11", "tcp", False), ("peer 12", "shm", True)]
    assert "no peer listens" in trace.tries[0].outcome


def test_a_miss_leaves_a_trace_too(tmp_path: Path) -> None:
    trace = FetchTrace()
    with (
        small_peer(tmp_path / "peer.sock") as peer,
        blocking.connect(str(peer.path)) as client,
        pytest.raises(NoSuchKey),
    ):
        client.get_into("none", bytearray(1), trace=trace)
    assert trace.lookup_seconds > 0
    assert (trace.source, trace.tries) == ("", [])


@pytest.mark.parametrize("kind", ["blocking", "trio"])
async def test_waiting_goes_on_when_the_holder_turns_out_to_have_dropped_it(
    kind: str, tmp_path: Path
) -> None:
    value = os.urandom(1000)
    with small_peer(tmp_path / "peer.sock") as peer, small_peer(tmp_path / "empty.sock") as empty:
        peer_id_of_empty = holder(12, empty.path)
        stale = local.PlanItem([peer_id_of_empty])
        peer.backend.planned[key_digest("k")] = [stale, NOTHING, NOTHING]

        def put_later() -> None:
            peer.wait_until(lambda: len(peer.backend.excluded) >= 3)
            with blocking.connect(str(peer.path)) as client:
                client.put("k", value)

        thread = threading.Thread(target=put_later)
        thread.start()
        try:
            if kind == "trio":
                async with p2pstore.connect(str(peer.path)) as client:
                    assert await client.get("k", wait=20) == value
            else:
                with blocking.connect(str(peer.path)) as plain:
                    assert plain.get("k", wait=20) == value
        finally:
            await trio.to_thread.run_sync(thread.join)
