"""The simulator's foundations: virtual time in order, and a network that fails as it is told to."""

from __future__ import annotations

import errno

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk_protocol import SECTOR_BYTES
from simulation.faulty_disk import DiskFaults, FaultyDisk, at_once
from simulation.kernel import Kernel

# --- time ------------------------------------------------------------------------------------
from simulation.network import Faults, FaultyNetwork

# --- time ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20)))
def test_events_run_in_order_of_time_and_ties_in_order_of_calling(times: list[int]) -> None:
    kernel = Kernel(1)
    ran: list[tuple[int, int]] = []
    for number, when in enumerate(times):

        def action(number: int = number, when: int = when) -> None:
            assert kernel.now == when
            ran.append((when, number))

        kernel.at(when, action)
    kernel.run_until(30.0)
    assert ran == sorted((when, number) for number, when in enumerate(times))
    assert kernel.now == 30.0
    assert kernel.events == len(times)


# --- the network -----------------------------------------------------------------------------


def network(faults: Faults | None = None, seed: int = 1) -> FaultyNetwork:
    return FaultyNetwork(Kernel(seed), faults or Faults())


def arrivals(net: FaultyNetwork, count: int, source: int = 0, target: int = 1) -> list[float]:
    """Latencies of what arrives of `count` messages, one sent each second."""
    seen: list[float] = []
    kernel = net.kernel
    begin = kernel.now
    for number in range(count):
        sent_at = begin + number

        def send(sent_at: float = sent_at) -> None:
            net.send(source, target, 10, lambda: seen.append(kernel.now - sent_at))

        kernel.at(sent_at, send)
    kernel.run_until(begin + count + 10.0)
    return seen


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_loss_has_its_rate(rate: float) -> None:
    seen = arrivals(network(Faults(loss=rate)), 4000)
    assert len(seen) / 4000 == pytest.approx(1.0 - rate, abs=0.03)


def test_a_partition_cuts_every_link_between_groups_and_none_within() -> None:
    net = network()
    net.partition({0, 1}, {2}, {3})
    reached = {(a, b) for a in range(4) for b in range(4) if a != b and arrivals(net, 1, a, b)}
    assert reached == {(0, 1), (1, 0)}
    net.heal()
    assert all(arrivals(net, 1, a, b) for a in range(4) for b in range(4) if a != b)


def test_the_same_seed_fails_alike_and_another_differently() -> None:
    def run(seed: int) -> tuple[list[float], str]:
        net = network(Faults(loss=0.2, duplication=0.2, slow=0.2), seed)
        return arrivals(net, 300), net.kernel.trace_hash

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]


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
