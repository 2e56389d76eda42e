"""The simulated disk fails as real ones do, and in no other way."""

import errno

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk_protocol import SECTOR_BYTES
from simulation.faulty_disk import DiskFaults, FaultyDisk, at_once

PAGE = 4096
SIZE = 64 * PAGE
SEEDS = range(50)


def filled(byte: int, pages: int = 1) -> memoryview:
    buffer = aligned_buffer(pages * PAGE)
    buffer[:] = bytes([byte]) * len(buffer)
    return buffer


def write(disk: FaultyDisk, position: int, byte: int, pages: int = 1) -> None:
    at_once(disk.write_from(position, [filled(byte, pages)]))


def read(disk: FaultyDisk, position: int, pages: int = 1) -> bytes:
    buffer = aligned_buffer(pages * PAGE)
    at_once(disk.read_into(position, [buffer]))
    return bytes(buffer)


def sectors(data: bytes) -> list[bytes]:
    return [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]


def test_a_crash_keeps_what_was_synced() -> None:
    for seed in SEEDS:
        disk = FaultyDisk(seed, SIZE)
        write(disk, 0, 1, pages=4)
        at_once(disk.sync())
        write(disk, 8 * PAGE, 2)
        disk.crash()
        assert read(disk, 0, pages=4) == bytes([1]) * 4 * PAGE


def test_a_crash_loses_keeps_or_tears_what_was_not_synced() -> None:
    fates = set()
    for seed in SEEDS:
        disk = FaultyDisk(seed, SIZE)
        write(disk, 0, 1, pages=2)
        assert read(disk, 0, pages=2) == bytes([1]) * 2 * PAGE
        disk.crash()
        left = sectors(read(disk, 0, pages=2))
        assert all(sector in (bytes(SECTOR_BYTES), bytes([1]) * SECTOR_BYTES) for sector in left)
        assert disk.peek(2 * PAGE, SIZE) == bytes(SIZE - 2 * PAGE)
        whole = {sector[0] for sector in left}
        fates.add("torn" if len(whole) == 2 else "kept" if whole == {1} else "lost")
    assert fates == {"torn", "kept", "lost"}


def test_after_a_failed_sync_nothing_before_it_becomes_durable_any_more() -> None:
    """The kernel marks pages clean whose writing failed, so a second fsync that succeeds proves nothing."""
    lost = torn = hidden = 0
    for seed in SEEDS:
        disk = FaultyDisk(seed, SIZE, DiskFaults(sync_error=1.0))
        write(disk, 0, 1)
        with pytest.raises(OSError, match="sync_error") as caught:
            at_once(disk.sync())
        assert caught.value.errno == errno.EIO
        before = read(disk, 0)
        disk.faults = DiskFaults()
        write(disk, PAGE, 2)
        at_once(disk.sync())
        disk.crash()
        after = read(disk, 0)
        lost += after == bytes(PAGE)
        torn += len(set(after)) == 2
        hidden += before != after
        assert read(disk, PAGE) == bytes([2]) * PAGE
    assert lost
    assert torn
    assert hidden, "what is read after a failed sync is not always what a crash leaves"


async def test_a_sync_does_not_cover_what_is_written_while_it_runs() -> None:
    kept = 0
    for seed in SEEDS:
        goes_on = trio.Event()
        disk = FaultyDisk(seed, SIZE)
        write(disk, 0, 1)
        disk.pause = lambda _, event=goes_on: event.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.sync)
            await wait_all_tasks_blocked()
            disk.pause = None
            write(disk, PAGE, 2)
            goes_on.set()
        disk.crash()
        assert read(disk, 0) == bytes([1]) * PAGE
        kept += read(disk, PAGE) == bytes([2]) * PAGE
    assert 0 < kept < len(SEEDS)
