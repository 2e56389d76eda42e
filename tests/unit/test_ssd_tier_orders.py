"""Orders of steps that the SSD tier must keep, so that nothing comes back: each by the failure that would show it. And
objects of several parts, in a real file."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, PART_BYTES, key_digest
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.disk_protocol import Check
from p2pstore.ssd_tier.health import ColdMiss, Miss
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES, PAGE_BYTES, record_position
from simulation.faulty_disk import FaultyDisk
from tests.present import present
from tests.unit.cold_harness import (
    NAMESPACE,
    SEGMENT_BYTES,
    Harness,
    UntilCrash,
    facts_of,
    running,
    simulated_disk,
    value_of,
)

VALUE = value_of("a", 1, 100_000)


def place_of(harness: Harness, key: str) -> int:
    entry = harness.tier.find(key_digest(key, NAMESPACE))
    assert entry is not None
    return record_position(entry.places[0], SEGMENT_BYTES)


def misread(disk: FaultyDisk, page: int, how: str) -> None:
    """From now on this page is read wrong, or not at all."""
    original = disk.read_into

    async def read_into(
        position: int, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        inside = page - position
        length = sum(map(len, buffers))
        if 0 <= inside < length and how == "not at all":
            raise OSError(errno.EIO, "unreadable")
        await original(position, buffers)
        if 0 <= inside < length:
            buffers[0][inside] ^= 1
        if check is not None:
            check()

    disk.read_into = read_into  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["wrong", "not at all"])
@pytest.mark.parametrize("what", ["segment header", "record header"])
@pytest.mark.parametrize(("sealed", "alone"), [(False, True), (False, False), (True, False)])
async def test_what_is_unreadable_for_one_start_never_comes_back(
    what: str, how: str, sealed: bool, alone: bool, autojump_clock: object
) -> None:
    """Meanwhile it may have been discarded, and could not be marked."""
    disk = simulated_disk()
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        assert alone or await harness.store("b", 1, VALUE, durable=True)
        position = place_of(harness, "a")
        if sealed:
            for number in range(20):
                assert await harness.store(str(number), 1, VALUE)
            assert harness.tier.statistics()["segments"]["sealed"]
        until.gone = True
    segment = (position - LOG_START_BYTES) // SEGMENT_BYTES
    start = LOG_START_BYTES + segment * SEGMENT_BYTES
    original = disk.read_into
    misread(disk, start if what == "segment header" else position, how)
    async with running(disk) as harness:
        if what == "segment header" or not sealed:
            assert not harness.holds("a")
        harness.discard("a", 1)
        await harness.tier.discards_durable()
    disk.read_into = original  # type: ignore[method-assign]
    async with running(disk) as harness:
        assert not harness.holds("a")


async def test_a_store_into_a_segment_that_is_retired_meanwhile_fails(autojump_clock: object) -> None:
    disk = simulated_disk()
    original, go_on = disk.write_from, trio.Event()
    results: list[bool] = []

    async def slow_write(position: int, buffers: Any) -> None:
        await original(position, buffers)
        if sum(map(len, buffers)) > 150_000:
            await go_on.wait()

    async with running(disk) as harness:
        assert await harness.store("first", 1, VALUE)
        await trio.sleep(1)
        disk.write_from = slow_write  # type: ignore[method-assign]

        async def store() -> None:
            results.append(await harness.store("slow", 1, value_of("slow", 1, 200_000)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store)
            await trio.sleep(1)
            disk.faults.sync_error = 1.0
            assert not await harness.store("durable", 1, VALUE, durable=True)
            disk.faults.sync_error = 0.0
            go_on.set()
        assert results == [False]
        assert harness.keys() == {}


async def test_marks_are_durable_before_a_segment_gets_its_next_generation(
    autojump_clock: object,
) -> None:
    """Else what was evicted, then discarded, could come back: the start of the new generation may be lost."""
    disk = simulated_disk(segments=6)
    happened: list[tuple[str, int]] = []
    write_from, sync = disk.write_from, disk.sync

    async def write(position: int, buffers: Any) -> None:
        inside = (position - LOG_START_BYTES) % SEGMENT_BYTES
        segment = (position - LOG_START_BYTES) // SEGMENT_BYTES
        await write_from(position, buffers)
        if inside in (0, PAGE_BYTES):
            happened.append(("marks" if inside else "start", segment))

    async def synced() -> None:
        await sync()
        happened.append(("sync", -1))

    async with running(disk) as harness:
        disk.write_from, disk.sync = write, synced  # type: ignore[method-assign]
        for number in range(60):
            assert await harness.store(str(number), 1, value_of(str(number), 1, 200_000))
        await trio.sleep(5)
    seen: dict[int, int] = {}
    checked = 0
    for at, (what, segment) in enumerate(happened):
        if what == "start" and segment in seen:
            since = happened[seen[segment] : at]
            assert ("marks", segment) in since
            marks = len(since) - 1 - since[::-1].index(("marks", segment))
            assert ("sync", -1) in since[marks:]
            checked += 1
        if what == "start":
            seen[segment] = at
    assert checked >= 5


async def test_marks_made_while_others_are_written_wait_for_the_next_sync(
    autojump_clock: object,
) -> None:
    """A version that supersedes a durable object while marks are on their way may be lost by a crash; its victim must
    not."""
    for seed in range(20):
        disk = simulated_disk(seed)
        until = UntilCrash(disk)
        write_from, sync = disk.write_from, disk.sync
        superseding: list[Harness] = []

        async def sync_amid_a_store(
            disk: FaultyDisk = disk, sync: Any = sync, superseding: list[Harness] = superseding
        ) -> None:
            disk.sync = sync  # type: ignore[method-assign]
            await sync()
            assert await superseding[0].store("a", 2, value_of("a", 2, 5000))

        async def write_and_crash(
            position: int,
            buffers: Any,
            disk: FaultyDisk = disk,
            until: UntilCrash = until,
            write_from: Any = write_from,
        ) -> None:
            await write_from(position, buffers)
            if len(buffers) == 1:  # dead marks
                until.gone = True
                disk.crash()

        async with running(until) as harness:
            superseding.append(harness)
            assert await harness.store("a", 1, VALUE, durable=True)
            assert await harness.store("b", 1, VALUE)
            await trio.sleep(3)
            disk.sync = sync_amid_a_store  # type: ignore[method-assign]
            disk.write_from = write_and_crash  # type: ignore[method-assign]
            harness.discard("b", 1)
            await trio.sleep(3)
            assert until.gone
        disk.write_from, disk.sync = write_from, sync  # type: ignore[method-assign]
        async with running(disk) as harness:
            assert harness.holds("a")


SEGMENT = 66 * MIB
CAPACITY = LOG_START_BYTES + 4 * SEGMENT  # as few as a log may have


@pytest.fixture
def disk(tmp_path: Path) -> FileDisk:
    try:
        return open_disk(tmp_path, CAPACITY)
    except ConfigError as error:
        pytest.skip(f"no direct I/O for temporary files here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("compressible", ["none", "the first part", "all"])
async def test_parts_are_written_and_read(disk: FileDisk, compressible: str) -> None:
    value = value_of("a", 1, PART_BYTES, compressible=compressible != "none")
    value += value_of("b", 1, MIB + 5, compressible=compressible == "all")
    async with running(disk, segment_bytes=SEGMENT) as harness:
        assert await harness.store("a", 1, value, durable=True)
        facts, loaded = await harness.load("a")
        assert loaded == value
        assert facts == facts_of("a", 1, value)
        parts = {"none": 0, "the first part": 1, "all": 2}[compressible]
        assert harness.tier.statistics()["compressed_parts"] == parts
    async with running(disk) as harness:
        assert (await harness.load("a"))[1] == value
    disk.close()


@pytest.mark.slow
async def test_an_object_without_one_of_its_parts_is_a_miss(disk: FileDisk) -> None:
    value = value_of("a", 1, PART_BYTES + 100)
    async with running(disk, segment_bytes=SEGMENT) as harness:
        assert await harness.store("a", 1, value)
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        assert len(entry.places) == 2
        position = record_position(entry.places[1], SEGMENT)
        await disk.write_from(position, [bytes(PAGE_BYTES)])
        with pytest.raises(ColdMiss) as caught:
            await harness.load("a")
        assert caught.value.reason is Miss.DAMAGED
        assert harness.tier.statistics()["live_bytes"] == 0
        assert await harness.store("a", 2, value)
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        await disk.write_from(record_position(entry.places[0], SEGMENT), [bytes(PAGE_BYTES)])
    async with running(disk) as harness:
        assert harness.keys() == {}
        await harness.tier.discards_durable()
        assert harness.tier.statistics()["records"] == 0
    disk.close()


@pytest.mark.slow
async def test_a_store_of_parts_is_cancelled(disk: FileDisk) -> None:
    value = value_of("a", 1, PART_BYTES + 100)
    async with running(disk, segment_bytes=SEGMENT) as harness:
        for milliseconds in (0, 1, 5, 20, 50):
            with trio.move_on_after(milliseconds / 1000) as scope:
                await harness.store("a", 1, value)
            if scope.cancelled_caught:
                assert harness.keys() == {}
            harness.discard("a", 1)
        assert await harness.store("a", 2, value)
        assert (await harness.load("a"))[1] == value
    async with running(disk) as harness:
        assert harness.keys() == {"a": 2}
    disk.close()
