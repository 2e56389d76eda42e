"""Opening a file or a block device for the SSD tier, and what happens when it fails while it is in use."""

import errno
import fcntl
import logging
import os
import re
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore.errors import ConfigError
from p2pstore.runtime.linux import file_system
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES as PAGE
from p2pstore.ssd_tier.disk_protocol import memory_address
from p2pstore.ssd_tier.log_layout import SUPERBLOCK_MAGIC
from tests.contract.disks import MIB, loop_device, opened

SIZE = 4 * MIB
PATIENCE_SECONDS = 20.0


@contextmanager
def opened_here(path: Path, capacity_bytes: int | None = SIZE) -> Iterator[FileDisk]:
    disk = opened(path, capacity_bytes)
    try:
        yield disk
    finally:
        disk.close()


def page_of(byte: int, pages: int = 1) -> memoryview:
    buffer = aligned_buffer(pages * PAGE)
    buffer[:] = bytes([byte]) * len(buffer)
    return buffer


# --- a file --------------------------------------------------------------------------------------


def test_a_new_file_has_all_its_blocks_and_is_private(tmp_path: Path) -> None:
    with opened_here(tmp_path) as disk:
        status = (tmp_path / "cold.log").stat()
        assert disk.path == tmp_path / "cold.log"
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == disk.size_bytes == SIZE
        assert status.st_blocks * 512 >= SIZE
        assert fcntl.fcntl(disk._descriptor, fcntl.F_GETFL) & os.O_DIRECT
        assert not os.get_inheritable(disk._descriptor)


def test_a_capacity_is_cut_to_whole_pages(tmp_path: Path) -> None:
    with opened_here(tmp_path, SIZE + 5000) as disk:
        assert disk.size_bytes == SIZE + PAGE


@pytest.mark.parametrize("capacity_bytes", [None, 0, -1, 100])
def test_a_capacity_is_needed(tmp_path: Path, capacity_bytes: int | None) -> None:
    with pytest.raises(ConfigError, match="needs a capacity"):
        open_disk(tmp_path, capacity_bytes)
    assert not list(tmp_path.iterdir())


async def test_a_file_can_grow(tmp_path: Path) -> None:
    with opened_here(tmp_path) as disk:
        await disk.write_from(0, [SUPERBLOCK_MAGIC.ljust(PAGE, b"\0")])
        await disk.write_from(SIZE - PAGE, [page_of(1)])
    with opened_here(tmp_path, 2 * SIZE) as disk:
        assert disk.size_bytes == 2 * SIZE
        buffer = aligned_buffer(2 * PAGE)
        await disk.read_into(SIZE - PAGE, [buffer])
        assert bytes(buffer) == bytes([1]) * PAGE + bytes(PAGE)
    assert (tmp_path / "cold.log").stat().st_blocks * 512 >= 2 * SIZE


def test_a_file_does_not_shrink(tmp_path: Path) -> None:
    opened(tmp_path, SIZE).close()
    with pytest.raises(ConfigError, match=r"4\.0 MiB, more than the 2\.0 MiB .* cannot shrink"):
        open_disk(tmp_path, SIZE // 2)
    assert (tmp_path / "cold.log").stat().st_size == SIZE


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """`cold.log` may be the log of something else."""
    file = tmp_path / "cold.log"
    file.write_text("it was freezing\n")
    with pytest.raises(ConfigError, match="no log of p2pstore"):
        open_disk(tmp_path, SIZE)
    assert file.read_text() == "it was freezing\n"
    open_disk(tmp_path, SIZE, overwrite=True).close()
    assert file.stat().st_size == SIZE


def test_a_file_that_others_may_read_becomes_private(tmp_path: Path) -> None:
    opened(tmp_path, SIZE).close()
    (tmp_path / "cold.log").chmod(0o644)
    opened(tmp_path, SIZE).close()
    assert (tmp_path / "cold.log").stat().st_mode & 0o777 == 0o600


def test_a_second_peer_is_told_whom_to_ask(tmp_path: Path) -> None:
    program = f"""
import sys
from p2pstore.ssd_tier.disk import open_disk
disk = open_disk({str(tmp_path)!r}, {SIZE})
print("open", flush=True)
sys.stdin.read()
"""
    opened(tmp_path, SIZE).close()
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"in use by process {other.pid} \(.*python") as caught:
            open_disk(tmp_path, SIZE)
        assert "directory of its own" in str(caught.value)
        other.communicate()
    opened(tmp_path, SIZE).close()


def test_in_one_process_as_well(tmp_path: Path) -> None:
    with opened_here(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        open_disk(tmp_path, SIZE)


def test_too_little_space_is_said_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is full for a moment fails other programs."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("some of it was taken"))
    free = os.statvfs(tmp_path)
    too_much = free.f_bavail * free.f_frsize + (1 << 40)
    with pytest.raises(ConfigError, match=r"needs .* more to have .* free: choose a smaller"):
        open_disk(tmp_path, too_much)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_grow_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took the room meanwhile, or there is a quota."""

    def grow_some(descriptor: int, start: int, length: int) -> None:
        os.ftruncate(descriptor, SIZE + PAGE)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    opened(tmp_path, SIZE).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", grow_some)
        with pytest.raises(ConfigError, match="choose a smaller"):
            open_disk(tmp_path, 2 * SIZE)
    assert (tmp_path / "cold.log").stat().st_size == SIZE
    opened(tmp_path, SIZE).close()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE + PAGE, hard))
    try:
        with pytest.raises(ConfigError, match="choose a smaller"):
            open_disk(tmp_path, 2 * SIZE)
        opened(tmp_path, SIZE).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it"):
        open_disk(tmp_path / "absent", SIZE)
    with pytest.raises(ConfigError, match="no directory and no block device"):
        open_disk("/dev/null", SIZE)
    (tmp_path / "cold.log").mkdir()
    with pytest.raises(ConfigError, match="cannot use"):
        open_disk(tmp_path, SIZE)
    (tmp_path / "cold.log").rmdir()
    os.mkfifo(tmp_path / "cold.log")
    with pytest.raises(ConfigError, match="no file"):
        open_disk(tmp_path, SIZE)
    (tmp_path / "cold.log").unlink()
    (tmp_path / "cold.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot use"):
        open_disk(tmp_path, SIZE)


def test_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a file system that refuses it: said clearly, and buffered when that is asked for."""
    set_flags = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(ConfigError, match=r"no direct I/O .* ext4 or XFS"):
        open_disk(tmp_path, SIZE)
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING, "p2pstore.ssd_tier"):
        disk = open_disk(tmp_path, SIZE, direct=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "page cache" in caplog.text
    assert disk._small_reads is None, "the kernel does those at once that are in the page cache"

    async def use() -> None:
        await disk.write_from(PAGE, [page_of(1, 3)])
        await disk.sync()
        buffer = aligned_buffer(3 * PAGE)
        await disk.read_into(PAGE, [buffer])
        assert buffer == page_of(1, 3)

    trio.run(use)
    disk.close()


def test_a_place_that_is_refused_is_closed_and_unlocked(tmp_path: Path) -> None:
    opened(tmp_path, SIZE).close()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError, match="shrink"):
            open_disk(tmp_path, PAGE)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_closed_disk_leaves_nothing_open(tmp_path: Path) -> None:
    opened(tmp_path, SIZE).close()
    files, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    opened(tmp_path, SIZE).close()
    assert set(os.listdir("/proc/self/fd")) == files
    deadline = time.monotonic() + PATIENCE_SECONDS
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- a block device ------------------------------------------------------------------------------


def test_a_device_as_a_whole_or_in_part(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE) as device:
        for capacity, size in ((None, SIZE), (SIZE // 2, SIZE // 2)):
            with opened_here(device, capacity) as disk:
                assert disk.size_bytes == size
        with pytest.raises(ConfigError, match=r"has 4\.0 MiB, less than the 8\.0 MiB"):
            open_disk(device, 2 * SIZE)


def test_a_device_in_use_is_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE) as device:
        with opened_here(device, None), pytest.raises(ConfigError, match=f"process {os.getpid()} "):
            open_disk(device, None)
        link = tmp_path / "link"
        link.symlink_to(device)
        with opened_here(link, None), pytest.raises(ConfigError, match=f"process {os.getpid()} "):
            open_disk(device, None)


@pytest.mark.parametrize("position", [0, 1024, 65536, -PAGE])
async def test_a_device_with_something_on_it_is_refused(tmp_path: Path, position: int) -> None:
    """Where ext4, btrfs and a backup partition table sign; and anything else at the ends."""
    with loop_device(tmp_path, SIZE) as device:
        with device.open("r+b", buffering=0) as file:
            file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
            file.write(b"somebody's data".ljust(512, b"\0"))
        with pytest.raises(ConfigError, match="no log of p2pstore"):
            open_disk(device, None)
        disk = open_disk(device, None, overwrite=True)
        await disk.write_from(0, [SUPERBLOCK_MAGIC.ljust(PAGE, b"\0")])
        disk.close()
        with opened_here(device, None):
            pass


@contextmanager
def small_file_system(folder: Path, size_bytes: int = 16 * MIB) -> Iterator[Path]:
    """An ext4 of its own."""
    with loop_device(folder, size_bytes) as device:
        made = subprocess.run(["mkfs.ext4", "-q", str(device)], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        where = folder / "mounted"
        where.mkdir()
        mounted = subprocess.run(["mount", str(device), str(where)], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
        try:
            yield where
        finally:
            subprocess.run(["umount", "--lazy", str(where)], check=True)


def test_a_mounted_device_is_refused(tmp_path: Path) -> None:
    with small_file_system(tmp_path) as where:
        [device] = [
            line.split()[0]
            for line in Path("/proc/mounts").read_text().splitlines()
            if line.split()[1] == str(where)
        ]
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=f"mounted at {where}"):
                open_disk(device, None, overwrite=overwrite)


def test_a_file_system_that_is_too_small(tmp_path: Path) -> None:
    with small_file_system(tmp_path) as where:
        with pytest.raises(ConfigError, match=r"needs 32\.0 MiB more to have 32\.0 MiB, .* free"):
            open_disk(where, 32 * MIB)
        assert not (where / "cold.log").exists()
        with opened_here(where, 8 * MIB):
            pass
        with pytest.raises(ConfigError, match=r"more to have 32\.0 MiB, .* free"):
            open_disk(where, 32 * MIB)
        assert (where / "cold.log").stat().st_size == 8 * MIB


# --- failing while in use ------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Until its file system has no room."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(MIB))


async def test_a_full_file_system_under_a_sparse_file(tmp_path: Path) -> None:
    """Its blocks were punched out behind our back: writing says ENOSPC, what is there is read."""
    with small_file_system(tmp_path) as where, opened_here(where, 8 * MIB) as disk:
        await disk.write_from(0, [page_of(1)])
        punch = ["fallocate", "--punch-hole", "--offset", str(MIB), "--length", str(7 * MIB)]
        await trio.run_process([*punch, str(where / "cold.log")])
        fill(where / "filler")
        with pytest.raises(OSError, match="No space left") as caught:
            await disk.write_from(MIB, [page_of(2, 1000)])
        assert caught.value.errno == errno.ENOSPC
        buffer = aligned_buffer(PAGE)
        await disk.read_into(0, [buffer])
        assert buffer == page_of(1)


async def test_a_file_system_that_turns_read_only(tmp_path: Path) -> None:
    """As after an error of the disk below it."""
    with small_file_system(tmp_path) as where, opened_here(where, 8 * MIB) as disk:
        await disk.write_from(0, [page_of(1)])
        await disk.sync()
        await trio.run_process(
            ["mount", "-o", "remount,abort", str(where)], check=False, capture_stderr=True
        )
        with pytest.raises(OSError) as caught:  # noqa: PT011  # any of several messages
            await disk.write_from(2 * MIB, [page_of(2, 100)])
            await disk.sync()
        assert caught.value.errno in (errno.EROFS, errno.EIO, errno.ESHUTDOWN)
        buffer = aligned_buffer(PAGE)
        await disk.read_into(0, [buffer])
        assert buffer == page_of(1)


async def test_a_removed_directory_is_served_on(tmp_path: Path) -> None:
    where = tmp_path / "ssd"
    where.mkdir()
    with opened_here(where) as disk:
        await disk.write_from(0, [page_of(1)])
        (where / "cold.log").unlink()
        where.rmdir()
        await disk.write_from(PAGE, [page_of(2)])
        await disk.sync()
        buffer = aligned_buffer(2 * PAGE)
        await disk.read_into(0, [buffer])
        assert bytes(buffer) == bytes(page_of(1)) + bytes(page_of(2))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "belongs to .*; give it to the user that runs this peer"),
        (errno.EROFS, "mount it for writing"),
        (errno.ELOOP, "symbolic link"),
        (errno.EIO, "must be there to be read and written"),
    ],
)
def test_what_cannot_be_opened_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=said):
        open_disk(tmp_path, SIZE)


@pytest.mark.parametrize("name", ["unlink", "close"])
def test_what_fails_while_it_gives_up_does_not_hide_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)

    def failing(*arguments: int | str | Path) -> None:
        real(*arguments)
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:

        def failing_read(*arguments: object) -> int:
            patch.setattr(os, name, failing)
            raise OSError(errno.EINVAL, "Invalid argument")

        patch.setattr(os, "preadv", failing_read)
        with pytest.raises(ConfigError, match="no direct I/O"):
            open_disk(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_in_memory_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = Path("/dev/shm")
    if file_system(shared.stat().st_dev) != "tmpfs":
        pytest.skip("no file system in memory here")
    with (
        TemporaryDirectory(dir=shared) as folder,
        suppress(ConfigError),
    ):  # there is no direct I/O in older kernels
        open_disk(folder, SIZE).close()
    assert "is in memory, not on a disk" in caplog.text
    caplog.clear()
    if file_system(tmp_path.stat().st_dev) != "tmpfs":
        opened(tmp_path, SIZE).close()
        assert "in memory" not in caplog.text


def delete(where: Path) -> None:
    (where / "cold.log").unlink()


def delete_all(where: Path) -> None:
    delete(where)
    where.rmdir()


def move(where: Path) -> None:
    (where / "cold.log").rename(where / "hot.log")


def move_all(where: Path) -> None:
    where.rename(where.with_name("elsewhere"))


def replace(where: Path) -> None:
    (where / "other").write_bytes(bytes(SIZE))
    (where / "other").rename(where / "cold.log")


def exchange(where: Path) -> None:
    move(where)
    (where / "cold.log").write_bytes(bytes(SIZE))


def cut_short(where: Path) -> None:
    os.truncate(where / "cold.log", SIZE // 2)


@pytest.mark.parametrize("how", ["inspect", "sync"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (delete, "deleted"),
        (delete_all, "deleted"),
        (move, "not there any more"),
        (move_all, "not there any more"),
        (replace, "deleted"),
        (exchange, "another file"),
        (cut_short, r"cut to 2\.0 MiB of 4\.0 MiB"),
    ],
)
async def test_what_nobody_will_find_again_is_noticed(
    tmp_path: Path, change: Callable[[Path], None], said: str, how: str
) -> None:
    where = tmp_path / "ssd"
    where.mkdir()
    with opened_here(where) as disk:
        look = disk.inspect if how == "inspect" else disk.sync
        await look()
        assert disk.misplaced == ""
        change(where)
        await look()
        assert re.search(said, disk.misplaced), disk.misplaced


async def test_who_may_look_says_nothing_of_what_is_there(tmp_path: Path) -> None:
    where = tmp_path / "ssd"
    where.mkdir()
    with opened_here(where) as disk:
        where.chmod(0o500)
        await disk.inspect()
        assert disk.misplaced == ""
        os.utime(where / "cold.log")
        os.link(where / "cold.log", tmp_path / "second name")
        await disk.inspect()
        assert disk.misplaced == ""


async def test_a_device_node_that_went_is_noticed(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE) as device:
        node = tmp_path / "node"
        os.mknod(node, stat.S_IFBLK | 0o600, device.stat().st_rdev)
        with opened_here(node, None) as disk:
            await disk.inspect()
            assert disk.misplaced == ""
            node.unlink()
            await disk.inspect()
            assert "not there any more" in disk.misplaced
            os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(1, 0))
            await disk.inspect()
            assert "another device" in disk.misplaced


async def test_a_file_system_that_is_unmounted_or_covered_is_noticed(tmp_path: Path) -> None:
    with small_file_system(tmp_path) as where, opened_here(where, 8 * MIB) as disk:
        await disk.inspect()
        assert disk.misplaced == ""
        covered = ["mount", "-t", "tmpfs", "none", str(where)]
        await trio.run_process(covered)
        try:
            await disk.inspect()
            assert "not there any more" in disk.misplaced
        finally:
            await trio.run_process(["umount", str(where)])


async def test_a_file_cut_short_is_a_short_read(tmp_path: Path) -> None:
    with opened_here(tmp_path) as disk:
        os.truncate(tmp_path / "cold.log", SIZE // 2)
        for position in (SIZE // 2 - PAGE, SIZE // 2, SIZE - 4 * PAGE):
            with pytest.raises(OSError, match="short") as caught:
                await disk.read_into(position, [aligned_buffer(4 * PAGE)])
            assert caught.value.errno == errno.EIO


async def test_short_transfers_go_on_where_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.preadv, os.pwritev

    def short(buffers: list[memoryview]) -> list[memoryview]:
        """At most three sectors of it."""
        return [buffers[0][: 3 * 512]]

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, short(buffers), at))
        patch.setattr(os, "pwritev", lambda fd, buffers, at: write(fd, short(buffers), at))
        disk = open_disk(tmp_path, SIZE, direct=False)
        await disk.write_from(PAGE, [page_of(1), page_of(2, 2), bytes([3]) * PAGE])
        one, other = aligned_buffer(PAGE), aligned_buffer(3 * PAGE)
        await disk.read_into(PAGE, [one, other])
        disk.close()
    expected = bytes(page_of(1)) + bytes(page_of(2, 2)) + bytes([3]) * PAGE
    assert bytes(one) + bytes(other) == expected
    assert (tmp_path / "cold.log").read_bytes()[PAGE : 5 * PAGE] == expected


async def test_of_a_header_and_a_value_only_the_header_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[int]] = []
    write = os.pwritev

    def record(descriptor: int, parts: list[memoryview], position: int) -> int:
        written.append([memory_address(part) for part in parts])
        return write(descriptor, parts, position)

    with opened_here(tmp_path) as disk:
        monkeypatch.setattr(os, "pwritev", record)
        value = page_of(1, 3)
        for _ in range(2):
            await disk.write_from(0, [bytes(PAGE), value, bytes(PAGE)])
    first, second = written
    assert first[1] == second[1] == memory_address(value)
    assert {first[0], first[2]} == {second[0], second[2]}, "its memory is used again"


class FailingSync:
    """Stands in for `os.fdatasync`: fails when told to, and waits when told to."""

    def __init__(self) -> None:
        self.fails = False
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, descriptor: int) -> None:
        fails = self.fails
        self.begun.set()
        assert self.may_end.wait(PATIENCE_SECONDS)
        if fails:
            raise OSError(errno.EIO, "Input/output error")

    async def wait_begun(self) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            while not self.begun.is_set():
                await trio.sleep(0.001)


@pytest.fixture
def syncing(monkeypatch: pytest.MonkeyPatch) -> FailingSync:
    failing = FailingSync()
    monkeypatch.setattr(os, "fdatasync", failing)
    return failing


async def test_a_failed_sync_is_told_once(tmp_path: Path, syncing: FailingSync) -> None:
    with opened_here(tmp_path) as disk:
        await disk.sync()
        syncing.fails = True
        with pytest.raises(OSError, match="Input/output"):
            await disk.sync()
        syncing.fails = False
        await disk.sync()


async def test_a_failed_sync_fails_those_that_wait_behind_it(
    tmp_path: Path, syncing: FailingSync
) -> None:
    """The kernel tells one of them only, and has dropped the data of all."""
    failed: list[int] = []

    async def sync() -> None:
        with pytest.raises(OSError, match=r"sync|Input"):
            await disk.sync()
        failed.append(1)

    with opened_here(tmp_path) as disk:
        syncing.fails = True
        syncing.may_end.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync)
            await syncing.wait_begun()
            syncing.fails = False
            nursery.start_soon(sync)
            nursery.start_soon(sync)
            await wait_all_tasks_blocked()
            syncing.may_end.set()
        assert len(failed) == 3
        await disk.sync()


async def test_a_failed_sync_that_was_cancelled_is_told_to_the_next(
    tmp_path: Path, syncing: FailingSync
) -> None:
    with opened_here(tmp_path) as disk:
        syncing.fails = True
        syncing.may_end.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.sync)
            await syncing.wait_begun()
            nursery.cancel_scope.cancel()
            syncing.may_end.set()
        syncing.fails = False
        with pytest.raises(OSError, match="before this one"):
            await disk.sync()
        await disk.sync()
