"""A segment's memory in a file: made, locked, removed, and refused where it would do harm."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped import kept_file as memory_file
from p2pstore.memory.mapped.kept_file import create_file_memory
from p2pstore.memory.mapped.mapped_memory import map_read_only, map_writable, prefault
from p2pstore.memory.segment_layout import SEGMENT_MAGIC
from p2pstore.objects import GIB, MIB


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    before = descriptors()
    yield tmp_path / "segment"
    assert descriptors() <= before
    assert os.listdir(tmp_path) in ([], ["segment"])


def test_what_one_side_writes_the_other_reads(path: Path) -> None:
    memory = create_file_memory(path, 3 * MIB + 1)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size >= 3 * MIB + 1
    assert status.st_blocks * 512 >= 3 * MIB, "the file system was not asked for room"
    assert not os.get_inheritable(memory.descriptor)
    descriptor = memory.read_only_descriptor()
    reading = map_read_only(descriptor, memory.length)
    writing = map_writable(memory.descriptor, memory.length)
    assert prefault(memory.view, lambda: False, lambda: None) == 3 * MIB + 1
    memory.view[-1] = 1
    writing[100] = 2
    assert (reading[-1], reading[100]) == (1, 2)
    with pytest.raises(ConfigError, match="Permission denied"):
        map_writable(descriptor, memory.length)
    os.close(descriptor)
    memory.close()
    memory.close()
    assert not path.exists()
    assert (reading[-1], reading[100]) == (1, 2)


def test_a_file_in_use_is_refused(path: Path) -> None:
    memory = create_file_memory(path, MIB)
    with pytest.raises(ConfigError, match="is the memory of another peer"):
        create_file_memory(path, MIB)
    memory.close()
    create_file_memory(path, MIB).close()


def test_what_a_dead_peer_left_is_replaced_and_who_maps_it_keeps_it(path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from p2pstore.memory.mapped import kept_file as memory_file\n"
        "memory = memory_file.create_file_memory(Path(sys.argv[1]), 1 << 20)\n"
        "memory.view[5000] = 7; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as dead:
        assert dead.stdout is not None
        assert dead.stdout.readline() == b"\n"
        with path.open("r+b") as file:
            client = map_writable(file.fileno(), MIB)  # as one that puts: it has the descriptor
        with pytest.raises(ConfigError, match="is the memory of another peer"):
            create_file_memory(path, MIB)
        dead.kill()
    assert path.exists()
    memory = create_file_memory(path, MIB)
    assert memory.view[5000] == 0
    memory.view[5000] = 9
    assert client[5000] == 7
    memory.close()


def test_an_empty_file_is_taken(path: Path) -> None:
    path.touch(0o644)
    memory = create_file_memory(path, MIB)
    assert path.stat().st_mode & 0o777 == 0o600
    memory.close()


@pytest.mark.parametrize("content", [b"precious", bytes(MIB), SEGMENT_MAGIC[:-1]])
def test_a_file_with_something_in_it_stays(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"memory_path: .* holds something that no peer put"):
        create_file_memory(path, MIB)
    assert path.read_bytes() == content


def test_another_file_of_that_name_stays_when_it_is_closed(path: Path) -> None:
    memory = create_file_memory(path, MIB)
    path.unlink()
    path.write_bytes(b"somebody else's")
    memory.close()
    assert path.read_bytes() == b"somebody else's"


def test_what_is_no_regular_file_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Is a directory.*: name a file"):
        create_file_memory(tmp_path, MIB)
    with pytest.raises(ConfigError, match=r"is not a regular file.*daxctl"):
        create_file_memory(Path("/dev/zero"), MIB)
    path.symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        create_file_memory(path, MIB)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a regular file"):
        create_file_memory(path, MIB)


def test_places_where_no_file_can_be(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        create_file_memory(path / "below", MIB)
    with pytest.raises(ConfigError, match=r"memory_path: /proc/segment cannot be made"):
        create_file_memory(Path("/proc/segment"), MIB)


def test_a_file_system_without_room_is_told_of_and_not_filled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("some of it was taken"))
    free = shutil.disk_usage(path.parent).free
    with pytest.raises(ConfigError, match=r"memory_path: .* its file system has .* free"):
        create_file_memory(path, free + 1024 * GIB)
    assert not path.exists()


def test_memory_that_a_cgroup_does_not_let_this_process_have_is_not_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tmpfs; a disk's pages are not memory. A process that allocates above its cgroup's limit is killed."""
    left = (MIB, "the cgroup (limit 2.0 GiB)")
    monkeypatch.setattr(memory_file, "available_memory", lambda: left)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        on_tmpfs = Path(folder) / "segment"
        create_file_memory(on_tmpfs, MIB).close()
        complaint = r"needs 2\.0 MiB of memory, the cgroup \(limit 2\.0 GiB\) has 1\.0 MiB left"
        with pytest.raises(ConfigError, match=complaint):
            create_file_memory(on_tmpfs, 2 * MIB)
        assert os.listdir(folder) == []
    monkeypatch.setattr(memory_file, "_is_on_tmpfs", lambda descriptor: False)
    create_file_memory(path, 2 * MIB).close()


def test_what_is_on_tmpfs() -> None:
    for name, expected in (("/dev/shm", True), ("/proc", False), ("/sys", False)):
        descriptor = os.open(name, os.O_RDONLY)
        assert memory_file._is_on_tmpfs(descriptor) is expected
        os.close(descriptor)


def test_who_takes_the_new_file_for_a_left_over_gets_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start at once: the other one locks the empty file between its making and its lock."""
    thief = -1
    real_lock = fcntl.flock

    def stolen(descriptor: int, operation: int) -> None:
        nonlocal thief
        if thief < 0:
            thief = os.open(path, os.O_RDWR)
            real_lock(thief, operation)
        real_lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", stolen)
    with pytest.raises(ConfigError, match="is the memory of another peer"):
        create_file_memory(path, MIB)
    os.close(thief)


def test_two_that_start_at_once_never_share_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one takes the new file for a left-over, removes it and has its own there before the lock."""
    others: list[int] = []
    real_lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not others:
            path.unlink()
            others.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            real_lock(others[0], operation)
        real_lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(ConfigError, match="is the memory of another peer"):
        create_file_memory(path, MIB)
    assert os.path.samestat(path.stat(), os.fstat(others[0])), "the other's stays"
    assert path.stat().st_size == 0
    os.close(others[0])
