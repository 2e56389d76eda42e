"""Two machines with two devices each, on two cables: both are used, and either does when the other fails."""

import mmap
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from p2pstore.objects import MIB
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma import rdma_lines
from p2pstore.transfer.rdma.rdma_reads import ReadEngine
from p2pstore.transfer.rdma.rdma_transport import STRIPED_BYTES, RdmaTransport
from p2pstore.transfer.rdma.rdma_verbs import LinkDown, QueuePair, ReadWork, Region
from p2pstore.transfer.transport import BufferDestination
from tests.contract.test_transport import OWNER, pattern, put, segment_of
from tests.rdma.harness import RdmaHarness, SomeCompletions, cables
from tests.waiting import until

LARGE_BYTES = 64 * MIB
SECONDS = 60.0

pytestmark = pytest.mark.skipif(
    len(cables()) < 2 and "P2PSTORE_RDMA_VM" not in os.environ, reason="needs two cables"
)


@pytest.fixture
async def rdma() -> AsyncIterator[RdmaHarness]:
    segment = segment_of(LARGE_BYTES + 16 * MIB)
    async with RdmaHarness.open_rdma(segment, cables_used=2) as opened:
        yield opened


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that were asked for by each device."""
    counted: Counter[str] = Counter()
    real = QueuePair.read

    def read(pair: QueuePair, works: Sequence[ReadWork], into: Region, key: int) -> None:
        counted[pair._device.name] += sum(work.length_bytes for work in works)
        real(pair, works, into, key)

    monkeypatch.setattr(QueuePair, "read", read)
    return counted


@contextmanager
def cut(number: int) -> Iterator[None]:
    """No packet passes on that cable in this block."""
    interface = f"veth{2 * number}"
    subprocess.run(["ip", "link", "set", interface, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)


async def connect_all(transport: RdmaTransport, rdma: RdmaHarness) -> None:
    """Have a line through each preferred device."""
    holder = transport.lines.of(OWNER.peer_id)
    await transport.lines.connected(rdma.copy())
    transport.lines.widen(rdma.copy())
    await until(lambda: len(holder.lines()) == 2, SECONDS)


@pytest.mark.parametrize("direct", [False, True])
async def test_a_large_object_comes_by_both(
    rdma: RdmaHarness, posted: Counter[str], direct: bool
) -> None:
    value = pattern(24 * MIB + 5)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(mmap.mmap(-1, 25 * MIB))[: len(value)]
    transport = rdma.transport(TrioDriver(), registered=[rdma.registered(memory)] if direct else [])
    await connect_all(transport, rdma)
    posted.clear()
    await transport.pull(rdma.copy(digest), digest, BufferDestination(memory))
    assert memory == value
    for _, name in cables()[:2]:
        assert posted[name] > len(value) // 4
    assert rdma.rdma.readers == 2
    assert rdma.server.traffic.objects == 0


async def test_a_small_object_comes_by_one(rdma: RdmaHarness, posted: Counter[str]) -> None:
    value = pattern(STRIPED_BYTES - 1)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    buffer = bytearray(len(value))
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert buffer == value
    assert list(posted) == [cables()[0][1]]
    assert rdma.rdma.readers == 1


@pytest.mark.parametrize(("length", "direct"), [(LARGE_BYTES, True), (24 * MIB, False)])
async def test_a_cable_is_cut_in_the_middle(
    rdma: RdmaHarness,
    posted: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    length: int,
    direct: bool,
) -> None:
    """Reads in flight on it are read again by the other one; when it is back, it is used again."""
    monkeypatch.setattr(rdma_lines, "RETRY_CONNECT_SECONDS", 0.5)
    value = pattern(length)
    digest = put(rdma.segment, "key", value)
    memory = memoryview(mmap.mmap(-1, length))
    transport = rdma.transport(
        TrioDriver(), registered=[rdma.registered(memory)] if direct else [], progress_seconds=30.0
    )
    await connect_all(transport, rdma)
    (_, first), (_, second) = cables()[:2]
    posted.clear()
    with trio.fail_after(2 * SECONDS):
        async with trio.open_nursery() as nursery:
            pulling = BufferDestination(memory)
            nursery.start_soon(transport.pull, rdma.copy(digest), digest, pulling)
            await until(lambda: posted[first] >= 4 * MIB, SECONDS)
            with cut(0):
                assert posted[first] + posted[second] < length
                await until(lambda: nursery.child_tasks == frozenset(), 2 * SECONDS)
    assert memory == value
    assert posted[second] > length // 2
    assert posted[first] + posted[second] > length  # something was read twice
    assert f"reading through rdma device {first} failed" in caplog.text
    assert rdma.server.traffic.objects == 0

    def widened() -> bool:
        transport.lines.widen(rdma.copy())
        return len(transport.lines.of(OWNER.peer_id).lines()) == 2

    await until(widened, SECONDS)


async def test_the_fallback_is_used_when_nothing_else_works(
    rdma: RdmaHarness, posted: Counter[str]
) -> None:
    values = [pattern(length, length) for length in (100, 9 * MIB)]
    digests = [put(rdma.segment, f"{len(value)}", value) for value in values]
    transport = rdma.transport(TrioDriver(), preferred=1)

    async def pull_both() -> None:
        for value, digest in zip(values, digests, strict=True):
            buffer = bytearray(len(value))
            await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
            assert buffer == value

    (_, near), (_, far) = cables()[:2]
    await pull_both()
    assert list(posted) == [near]
    posted.clear()
    with cut(0):
        await pull_both()
        assert posted[far] > sum(map(len, values))
        transport.lines.of(OWNER.peer_id).ways[0].retry_at = 0.0
        with pytest.raises(PullFailed, match=f"rdma device {near}: port 1 is not active"):
            await transport.lines.connected(rdma.copy(), without=[1])
    assert rdma.server.traffic.objects == 0


async def test_all_cables_are_cut(rdma: RdmaHarness) -> None:
    digest = put(rdma.segment, "key", pattern(9 * MIB))
    transport = rdma.transport(TrioDriver(), preferred=1)
    with cut(0), cut(1):
        with pytest.raises(PullFailed, match="port 1 is not active") as caught:
            await transport.pull(rdma.copy(digest), digest, BufferDestination(bytearray(9 * MIB)))
        assert caught.value.retriable
        assert "connecting over RDMA failed" in transport.why_not(rdma.copy(digest))


async def test_one_device_is_lost(
    rdma: RdmaHarness, posted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = pattern(24 * MIB)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    await connect_all(transport, rdma)
    lost: ReadEngine = rdma.engines[0]

    def fail(count: int) -> list[Any]:
        raise LinkDown("the card fell out")

    posted.clear()
    buffer = bytearray(len(value))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.pull, rdma.copy(digest), digest, BufferDestination(buffer))
        await until(lambda: posted[lost.device.name] > 0, SECONDS)
        monkeypatch.setattr(lost.completions, "poll", fail)
    assert buffer == value
    assert "the card fell out" in lost.lost
    assert not transport.why_not(rdma.copy(digest))


async def test_a_device_is_lost_between_a_trailer_and_its_payload(
    rdma: RdmaHarness, posted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of one chunk is asked for at once; what did not come is read again through the other device."""
    value = pattern(700_000)
    digest = put(rdma.segment, "key", value)
    transport = rdma.transport(TrioDriver())
    await connect_all(transport, rdma)
    lost: ReadEngine = rdma.engines[0]

    def fail() -> list[Any]:
        raise LinkDown("the card fell out")

    slot_and_trailer = SomeCompletions(lost.completions, 2, fail)
    monkeypatch.setattr(lost.completions, "poll", slot_and_trailer)
    posted.clear()
    buffer = bytearray(len(value))
    await transport.pull(rdma.copy(digest), digest, BufferDestination(buffer))
    assert buffer == value
    assert "the card fell out" in lost.lost
    assert posted[lost.device.name] > len(value)
    assert posted[rdma.engines[1].device.name] == len(value)
    assert rdma.staging.large.taken == 0
