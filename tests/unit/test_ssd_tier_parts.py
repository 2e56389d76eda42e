"""Objects of several parts, in a real file."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, PART_BYTES, key_digest
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.health import ColdMiss, Miss
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES, PAGE_BYTES, record_position
from tests.present import present
from tests.unit.cold_harness import NAMESPACE, facts_of, running, value_of

SEGMENT = 66 * MIB
CAPACITY = LOG_START_BYTES + 6 * SEGMENT


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
