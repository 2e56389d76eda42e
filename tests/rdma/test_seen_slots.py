"""Slots that were seen before: a round trip less, and never what is not there any more."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from p2pstore.memory.segment_layout import SLOT_BYTES
from p2pstore.objects import KIB, MIB, key_digest
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma.rdma_reads import SLOTS_TOGETHER
from p2pstore.transfer.rdma.rdma_transport import RdmaTransport
from p2pstore.transfer.rdma.rdma_verbs import QueuePair, ReadWork, Region
from p2pstore.transfer.transport import BufferDestination, RemoteCopy
from p2pstore.wire import Code
from tests.contract.test_transport import SEGMENT_BYTES, pattern, put, segment_of
from tests.rdma.harness import RdmaHarness, cables

pytestmark = pytest.mark.skipif(not cables(), reason="needs RDMA devices")

TURNS = 300
LENGTHS = (100, 64 * KIB + 5, 700_000, MIB, MIB + 1)


async def read(transport: RdmaTransport, copy: RemoteCopy, digest: bytes) -> bytes | None:
    """The value, None when the holder does not have it."""
    buffer = bytearray(max(LENGTHS))
    try:
        pulled = await transport.pull(copy, digest, BufferDestination(buffer))
    except PullFailed as failure:
        if failure.code is Code.NO_SUCH_KEY:
            return None
        raise
    return bytes(buffer[: pulled.length])


@pytest.fixture
async def rdma() -> AsyncIterator[RdmaHarness]:
    async with RdmaHarness.open_rdma(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the reads of each post."""
    posts: list[list[int]] = []
    read = QueuePair.read

    def noted(self: QueuePair, works: Sequence[ReadWork], into: Region, remote_key: int) -> None:
        posts.append([work.length_bytes for work in works])
        read(self, works, into, remote_key)

    monkeypatch.setattr(QueuePair, "read", noted)
    return posts


async def test_a_neighbour_takes_one_round_trip(rdma: RdmaHarness, posted: list[list[int]]) -> None:
    digests = [put(rdma.segment, f"key {each}", pattern(MIB, each)) for each in range(3)]
    transport = rdma.transport(TrioDriver())
    for number, digest in enumerate(digests):
        posted.clear()
        assert await read(transport, rdma.copy(digest), digest) == pattern(MIB, number)
        if number:
            ((slot, _, *payload),) = posted
            assert (slot, sum(payload)) == (SLOT_BYTES, MIB)
        else:
            assert posted[-2] == [SLOTS_TOGETHER * SLOT_BYTES]


async def test_a_slot_that_has_another_object_now(rdma: RdmaHarness, posted: list[list[int]]) -> None:
    """Objects that it had are asked for and not there; those that it has are read after another look."""
    old = put(rdma.segment, "old", pattern(3000))
    transport = rdma.transport(TrioDriver())
    copy = rdma.copy(old)
    assert await read(transport, copy, old) == pattern(3000)
    rdma.segment.remove(old)
    new = put(rdma.segment, "new", pattern(3000, 1))
    assert rdma.copy(new).slot == copy.slot
    posted.clear()
    assert await read(transport, copy, old) is None
    assert len(posted) == 2, "as it was seen, and the row of slots again"
    assert await read(transport, rdma.copy(new), new) == pattern(3000, 1)
    assert len(posted) == 3


async def test_what_was_removed_is_not_delivered(rdma: RdmaHarness) -> None:
    """Though its bytes are there still: they are leased."""
    digest = put(rdma.segment, "key", pattern(700_000))
    transport = rdma.transport(TrioDriver())
    copy = rdma.copy(digest)
    assert await read(transport, copy, digest) == pattern(700_000)
    entry = rdma.segment.find(digest, 0.0)
    assert entry is not None
    rdma.segment.references.acquire(entry)
    try:
        rdma.segment.remove(digest)
        assert await read(transport, copy, digest) is None
    finally:
        rdma.segment.references.let_go(entry)


@pytest.mark.parametrize("seed", range(2))
async def test_objects_that_come_and_go(rdma: RdmaHarness, seed: int) -> None:
    """With hints that may be of any age, a read delivers what its key has now, or says that it has nothing."""
    rng = random.Random(seed)
    transport = rdma.transport(TrioDriver())
    there: dict[str, bytes] = {}
    hints: dict[str, int] = {}
    for turn in range(TURNS):
        key = f"key {rng.randrange(6)}"
        digest = key_digest(key)
        match rng.randrange(4):
            case 0:
                there[key] = pattern(rng.choice(LENGTHS), turn)
                put(rdma.segment, key, there[key], clock=turn + 1)
                hints.setdefault(key, rdma.copy(digest).slot)
            case 1:
                rdma.segment.remove(digest)
                there.pop(key, None)
            case _ if key in hints:
                hint = rng.choice([hints[key], rdma.copy(digest).slot])
                hints[key] = rdma.copy(digest).slot
                copy = replace(rdma.copy(digest), slot=hint)
                assert await read(transport, copy, digest) == there.get(key)
