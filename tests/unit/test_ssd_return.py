"""A peer comes back to what its SSD has: the real tier, on a disk that crashes, and a core with the shell between."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio

from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.operation import ColdSorted, LoadObject, WriteObject
from p2pstore.errors import CapacityExceeded, NoSuchKey
from p2pstore.gossip.records import SCOPE_NAMESPACE, Tier
from p2pstore.objects import Version, namespace_digest
from p2pstore.peer.node import Node
from p2pstore.peer.peer_ssd import PeerSsd
from p2pstore.peer.segment_memory import CopyChecks
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.tier import open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy
from simulation.faulty_disk import FaultyDisk
from tests.present import present
from tests.unit.cold_harness import SEGMENT_BYTES, simulated_disk
from tests.unit.core_harness import NAMESPACE, Harness, clock_at, digest_of

VALUE = b"v" * 30_000
SOON_SECONDS = 20.0


class _Watch:
    def loaded(self, *_: object) -> None:
        pass


class Life:
    """One life of a peer. Stands in for its node."""

    def __init__(self, nursery: trio.Nursery, others: int, began: float) -> None:
        self.world = Harness(others, 512 * 1024, new_memory=aligned_buffer)
        self.world.now = began
        self.core = self.world.core
        self.watch = _Watch()
        self.ssd: PeerSsd | None = None
        self.copy_checks = CopyChecks(cast("Any", self))
        self._nursery = nursery

    @property
    def now(self) -> float:
        return self.world.now

    def process(self) -> None:
        """Begin what the core wants of the SSD."""
        assert self.ssd is not None
        for kind in (LoadObject, WriteObject, ColdSorted):
            for effect in self.world.effects(cast("type[Any]", kind)):
                self._nursery.start_soon(self.ssd.carry_out, effect)

    async def make_room(self, length: int, namespace: str = "") -> None:
        """There is room."""

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(function)

    def tick_soon(self) -> None:
        pass  # the test lets the core go on

    async def go_on(self, seconds: float) -> None:
        """Let that time pass for the core, and give the tier its turns."""
        self.world.pass_time(seconds)
        self.process()
        await trio.testing.wait_all_tasks_blocked(0.02)

    async def put(self, key: str, **options: Any) -> None:
        """An object that is on the SSD."""
        self.world.stored(key, VALUE + key.encode(), **options)
        assert self.ssd is not None
        await self.ssd.make_durable(digest_of(key))

    async def get(self, key: str) -> bytes | None:
        """Through memory, from the SSD if it is there."""
        operation = self.core.operations.fetch(digest_of(key), self.now, only_here=True)
        self.process()
        with trio.fail_after(SOON_SECONDS):
            while not operation.done:
                await trio.sleep(0.001)
        assert isinstance(operation, FetchOperation)
        if isinstance(operation.result, NoSuchKey):
            return None
        assert not isinstance(operation.result, Exception), operation.result
        return self.world.value(key)

    async def settled(self) -> bool:
        """Whether what was on the SSD is known to be good, or gone, and that is durable."""
        for _ in range(100):
            await self.go_on(0.5)
            if self.core.earlier_life._seen_before_cold is None:
                return True
        return False


@asynccontextmanager
async def life(disk: FaultyDisk, others: int = 0, began: float = 100.0) -> AsyncIterator[Life]:
    async with trio.open_nursery() as nursery:
        node = Life(nursery, others, began)
        ssd = PeerSsd(cast(Node, node))
        async with open_tier(
            disk,
            AdmissionPolicy(min_bytes=0),
            TierHooks(
                withdraw=ssd.withdraw,
                is_last_copy=ssd.is_last_copy,
                unix=lambda: node.core.unix(node.now),
            ),
            segment_bytes=SEGMENT_BYTES,
            max_records=1024,
        ) as tier:
            node.ssd = ssd
            ssd.begin(tier)
            yield node
            nursery.cancel_scope.cancel()


async def test_after_a_shutdown_of_all_it_is_back_with_everything() -> None:
    disk = simulated_disk(1)
    async with life(disk) as first:
        for number in range(10):
            await first.put(f"k{number}", dtype="float32", shape=(3, 4))
    disk.crash()
    async with life(disk, began=200.0) as second:
        assert await second.settled()
        for number in range(10):
            record = present(second.world.announced(f"k{number}"))
            assert record.tier is Tier.SSD
            assert await second.get(f"k{number}") == VALUE + b"k%d" % number
            entry = present(second.world.find(f"k{number}"))
            assert (entry.dtype, entry.shape, entry.on_ssd) == ("float32", (3, 4), True)


async def test_what_was_removed_does_not_come_back_though_all_floors_are_forgotten() -> None:
    disk = simulated_disk(2)
    async with life(disk, others=1) as first:
        for number in range(6):
            await first.put(f"k{number}")
        world = first.world
        world.learn_floor(world.others[0], digest_of("k1"), Version(clock_at(5.0), 0))
        assert first.ssd is not None
        await first.ssd.tier.discards_durable()
        world.learn_floor(
            world.others[0], namespace_digest(NAMESPACE), Version(clock_at(5.0), 0), SCOPE_NAMESPACE
        )
        await first.put("young")  # above the floor
        await first.go_on(2.0)
        await first.ssd.tier.discards_durable()
    disk.crash()
    async with life(disk, began=200.0) as second:  # knows of no floor
        assert await second.settled()
        assert [await second.get(f"k{number}") for number in range(6)] == [None] * 6
        assert await second.get("young") == VALUE + b"young"


async def test_floors_heard_of_before_it_shows_anything_count() -> None:
    disk = simulated_disk(3)
    async with life(disk) as first:
        for key in ("removed", "kept"):
            await first.put(key)
    disk.crash()
    async with life(disk, others=1, began=200.0) as second:
        world = second.world
        assert await second.get("kept") is None, "nothing is shown before the others were asked"
        world.learn_floor(world.others[0], digest_of("removed"), Version(clock_at(50.0), 0))
        world.gossip.floors.synchronised = True
        assert await second.settled()
        assert await second.get("removed") is None
        assert await second.get("kept") == VALUE + b"kept"
    disk.crash()
    async with life(disk, began=300.0) as third:
        assert await third.settled()
        assert await third.get("removed") is None, "it was discarded for good"


async def test_after_a_long_absence_nothing_old_is_shown_and_it_stays_discarded() -> None:
    disk = simulated_disk(4)
    async with life(disk) as first:
        for number in range(6):
            await first.put(f"k{number}")
    disk.crash()
    async with life(disk, began=200.0) as second:
        await second.put("young")
        second.core.floors._distrust(
            clock_at(90.0), second.now
        )  # others have dropped floors up to there
        assert await second.settled()
        await second.go_on(1.0)
        assert [await second.get(f"k{number}") for number in range(6)] == [None] * 6
        assert await second.get("young") is not None
        assert second.ssd is not None
        await second.ssd.tier.discards_durable()
    disk.crash()
    async with life(disk, began=300.0) as third:
        assert await third.settled()
        assert [await third.get(f"k{number}") for number in range(6)] == [None] * 6


async def test_what_the_time_to_drain_was_too_short_for_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with life(simulated_disk(1)) as first:
        assert first.ssd is not None
        for number in range(20):
            first.world.stored(f"k{number}", VALUE)
        with trio.move_on_after(0.0) as scope:
            await first.ssd.write_memory()
        assert scope.cancelled_caught
        assert "16 objects were not written to the SSD before this peer left" in caplog.text
        caplog.clear()
        await first.ssd.write_memory()
        assert "not written" not in caplog.text


async def test_an_object_with_false_checksums_is_not_written() -> None:
    disk = simulated_disk(9)
    async with life(disk) as first:
        entry = first.world.stored("k", VALUE)
        first.world.segment._buffer[entry.offset] ^= 1
        assert first.ssd is not None
        with pytest.raises(CapacityExceeded, match="spoilt"):
            await first.ssd.make_durable(digest_of("k"))
        assert first.world.find("k") is None
        assert first.ssd.tier.find(digest_of("k")) is None
        await first.put("k")
        assert first.ssd.tier.find(digest_of("k")) is not None
