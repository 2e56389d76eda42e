"""Small reads that the kernel does without a thread: which these are, and what becomes of the others."""

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore.errors import StoreClosed
from p2pstore.ssd_tier import kernel_aio
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES as PAGE
from p2pstore.ssd_tier.kernel_aio import MAX_BUFFERS, MAX_READ_BYTES, MAX_READS, KernelAio, command_bytes
from tests.contract.disks import KIB, MIB, opened
from tests.present import present

SIZE = 4 * MIB
System = Callable[..., int]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FileDisk]:
    disk = opened(tmp_path, SIZE)
    if disk._small_reads is None:
        disk.close()
        pytest.skip("this kernel gives no asynchronous I/O here")
    yield disk
    disk.close()


@pytest.fixture
def by_threads(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces each request had that threads read."""
    counted: list[int] = []
    read = disk._threads.read

    async def counting(pieces: list[Callable[[], object]], last: Callable[[], object] | None) -> None:
        counted.append(len(pieces))
        await read(pieces, last)

    monkeypatch.setattr(disk._threads, "read", counting)
    return counted


def intercept(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, System, tuple[int, ...]], int]
) -> None:
    """Have `answer` stand in for all system calls: told the number, the real call, and its arguments."""
    real = kernel_aio._syscall
    monkeypatch.setattr(
        kernel_aio, "_syscall", lambda number, *arguments: answer(number, real, (number, *arguments))
    )


async def check_reading(disk: FileDisk, size: int = 8 * PAGE) -> None:
    """Reads return the bytes that were written."""
    value = aligned_buffer(size)
    value[:] = os.urandom(size)
    await disk.write_from(PAGE, [value])
    copy = aligned_buffer(size)
    await disk.read_into(PAGE, [copy])
    assert copy == value


async def test_small_reads_need_no_thread(disk: FileDisk, by_threads: list[int]) -> None:
    assert disk._small_reads is not None
    largest = disk._small_reads._largest
    assert largest <= MAX_READ_BYTES
    for size in (PAGE, 64 * KIB, largest):
        await check_reading(disk, size)
    assert by_threads == []
    await check_reading(disk, largest + PAGE)
    assert by_threads == [1]


def test_what_a_device_reads_in_one_command(tmp_path: Path) -> None:
    disk, partition = tmp_path / "disk", tmp_path / "disk" / "part1"
    partition.mkdir(parents=True)
    status = tmp_path.stat()
    link = tmp_path / f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    assert command_bytes(status, str(tmp_path)) == 128 * KIB
    link.symlink_to(disk)
    (disk / "queue").mkdir()
    (disk / "queue" / "max_sectors_kb").write_text("512\n")
    assert command_bytes(status, str(tmp_path)) == 512 * KIB
    link.unlink()
    link.symlink_to(partition)
    assert command_bytes(status, str(tmp_path)) == 512 * KIB


async def test_into_several_buffers(disk: FileDisk, by_threads: list[int]) -> None:
    value = aligned_buffer(5 * PAGE)
    value[:] = os.urandom(len(value))
    await disk.write_from(0, [value])
    for pages in ([1, 4], [2, 1, 1, 1], [1, 1, 1, 1, 1]):
        buffers = [aligned_buffer(each * PAGE) for each in pages]
        await disk.read_into(0, buffers)
        assert b"".join(buffers) == value
    assert len(pages) > MAX_BUFFERS
    assert by_threads == [1]


async def test_more_at_a_time_than_the_kernel_was_asked_for(disk: FileDisk) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for _ in range(3 * MAX_READS):
                nursery.start_soon(disk.read_into, 0, [aligned_buffer(PAGE)])
    assert disk._small_reads is not None
    assert len(disk._small_reads._free) == MAX_READS


@pytest.mark.parametrize(("error", "tries"), [(errno.EAGAIN, 2), (errno.EOPNOTSUPP, 1)])
async def test_what_the_kernel_does_not_take_goes_to_threads(
    disk: FileDisk, by_threads: list[int], monkeypatch: pytest.MonkeyPatch, error: int, tries: int
) -> None:
    """For now, when it has too much to do; for good, when the file system cannot do it."""
    assert disk._small_reads is not None
    submit, submitted = disk._small_reads._submit, 0

    def refuse(number: int, real: System, arguments: tuple[int, ...]) -> int:
        nonlocal submitted
        if number != submit:
            return real(*arguments)
        submitted += 1
        ctypes.set_errno(error)
        return -1

    intercept(monkeypatch, refuse)
    await check_reading(disk)
    await check_reading(disk)
    assert by_threads == [1, 1]
    assert submitted == tries


async def test_what_could_not_begin_at_once_goes_to_threads(
    disk: FileDisk, by_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so in the event; short and failed reads are done again as well, and judged there."""
    aio = present(disk._small_reads)

    for result in (-errno.EAGAIN, -errno.EIO, PAGE, 0):

        def spoil(number: int, real: System, arguments: tuple[int, ...], result: int = result) -> int:
            ended = real(*arguments)
            if number == aio._get_events:
                for at in range(0, ended * kernel_aio._EVENT.size, kernel_aio._EVENT.size):
                    event = kernel_aio._EVENT.unpack_from(aio._events, at)
                    kernel_aio._EVENT.pack_into(aio._events, at, event[0], event[1], result, 0)
            return ended

        with monkeypatch.context() as patch:
            intercept(patch, spoil)
            by_threads.clear()
            await check_reading(disk)
            assert by_threads == [1]


class HeldEvents:
    """The kernel tells of no read that has ended until it is released."""

    def __init__(self, disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        assert disk._small_reads is not None
        self._aio = disk._small_reads
        self._held = True
        intercept(monkeypatch, self._answer)

    def _answer(self, number: int, real: System, arguments: tuple[int, ...]) -> int:
        return 0 if number == self._aio._get_events and self._held else real(*arguments)

    def release(self) -> None:
        self._held = False
        os.eventfd_write(self._aio._eventfd, 1)


async def test_cancelling_waits_for_the_kernel(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ended = HeldEvents(disk, monkeypatch), False

    async def read() -> None:
        nonlocal ended
        try:
            await disk.read_into(0, [aligned_buffer(PAGE)])
        finally:
            ended = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert not ended
            held.release()
    assert nursery.cancel_scope.cancelled_caught


async def test_closing_lets_reads_end(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    held = HeldEvents(disk, monkeypatch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disk.read_into, 0, [aligned_buffer(PAGE)])
        await wait_all_tasks_blocked()
        disk.close()
        with pytest.raises(StoreClosed):
            await disk.read_into(0, [aligned_buffer(PAGE)])
        await wait_all_tasks_blocked()
        held.release()
    with trio.fail_after(20):
        while len(os.listdir("/proc/self/fd")) > len(before) - 2:  # the file, and the eventfd
            await trio.sleep(0.001)


def test_one_trio_run_after_the_other(disk: FileDisk, by_threads: list[int]) -> None:
    for _ in range(3):
        trio.run(check_reading, disk)
    assert by_threads == []


def test_closing_after_the_run_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    disk = opened(tmp_path, SIZE)
    trio.run(check_reading, disk)
    disk.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_closing_an_idle_disk_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    disk = opened(tmp_path, SIZE)
    await check_reading(disk)
    disk.close()
    with trio.fail_after(20):
        while len(os.listdir("/proc/self/fd")) > len(before):
            await trio.sleep(0.001)


async def test_ctrl_c_does_not_come_in_between(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between handing over memory and waiting for it."""
    protected: list[bool] = []

    def look(number: int, real: System, arguments: tuple[int, ...]) -> int:
        protected.append(trio.lowlevel.currently_ki_protected())
        return real(*arguments)

    intercept(monkeypatch, look)
    await disk.read_into(0, [aligned_buffer(PAGE)])
    assert protected
    assert all(protected)


def test_without_it_threads_do_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(descriptor: int) -> KernelAio:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    opened(tmp_path, SIZE).close()
    monkeypatch.setattr("p2pstore.ssd_tier.disk.KernelAio", none_left)
    with caplog.at_level(logging.WARNING, "p2pstore.ssd_tier"):
        disk = open_disk(tmp_path, SIZE)
    assert "fs.aio-max-nr" in caplog.text
    trio.run(check_reading, disk)
    disk.close()


async def test_reads_that_never_end_are_waited_for_no_more_once_abandoned(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    aio = present(disk._small_reads)
    intercept(
        monkeypatch, lambda number, real, arguments: 0 if number == aio._get_events else real(*arguments)
    )
    told: list[StoreClosed] = []

    async def read(scope: trio.CancelScope) -> None:
        with scope:
            try:
                await disk.read_into(0, [aligned_buffer(PAGE)])
            except StoreClosed as error:
                told.append(error)

    cancelled = trio.CancelScope()
    with trio.fail_after(20.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, trio.CancelScope())
            nursery.start_soon(read, cancelled)
            while len(aio._reads) < 2:
                await trio.sleep(0.001)
            cancelled.cancel()
            await wait_all_tasks_blocked()
            assert not told
            assert disk.waits.longest_seconds > 0
            disk.abandon()
    assert len(told) == 1
    assert cancelled.cancelled_caught
