"""Files that appear when they are complete, and values between files, pipes and memory."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_p2p import files_and_pipes as files
from mooncake_p2p.files_and_pipes import NewFile
from mooncake_p2p.output import CommandFailed, ExitCode
from p2pstore.errors import ObjectTooLarge
from p2pstore.objects import MIB

REAL_OPEN = os.open


def without_unnamed_files(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")
    return REAL_OPEN(path, flags, *arguments, **options)


@pytest.fixture(params=["unnamed", "named"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Once as this file system does it, once as one without unnamed files."""
    if request.param == "named":
        monkeypatch.setattr(os, "open", without_unnamed_files)
    yield request.param
    monkeypatch.undo()


def write(file: NewFile, content: bytes) -> None:
    file.resize(len(content))
    assert os.write(file.descriptor, content) == len(content)


def complete(file: NewFile, content: bytes) -> None:
    write(file, content)
    file.commit()
    file.close()


def current_umask() -> int:
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


@pytest.mark.parametrize("content", [b"", b"new value"])
@pytest.mark.parametrize("before", [None, b"old"])
def test_it_takes_its_name_at_the_end(
    before: bytes | None, content: bytes, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    if before is not None:
        path.write_bytes(before)
    file = NewFile(str(path))
    write(file, content)
    assert len(list(tmp_path.iterdir())) == (before is not None) + (kind == "named")
    assert path.exists() == (before is not None)
    file.commit()
    file.close()
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def test_without_commit_nothing_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    file = NewFile(str(path))
    write(file, b"new value")
    file.close()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_keeps_the_mode_and_the_link(kind: str, tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    complete(NewFile(str(link)), b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_long_name_is_no_problem(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    for content in (b"one", b"two"):
        complete(NewFile(str(path)), content)
        assert path.read_bytes() == content


def test_an_impossible_place_is_refused_before_anything_moves(kind: str, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    for path in (blocker / "below", tmp_path / "none" / "out"):
        with pytest.raises(CommandFailed, match="cannot write"):
            NewFile(str(path))
    with pytest.raises(CommandFailed, match="is a directory"):
        NewFile(str(tmp_path))
    with pytest.raises(CommandFailed, match="no such directory"):
        NewFile(f"{tmp_path}/new/")
    assert not list(tmp_path.glob("new*"))


def test_room_is_certain_before_anything_moves(kind: str, tmp_path: Path) -> None:
    file = NewFile(str(tmp_path / "out"))
    with pytest.raises((CommandFailed, OSError), match=r"room|too large"):
        file.resize(1 << 60)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_the_name_meanwhile(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = NewFile(str(path))
    write(file, b"v")
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        file.commit()
    file.close()
    assert list(tmp_path.iterdir()) == [path]


def killed_writer(path: Path, *, unnamed: bool) -> None:
    """A process that makes a new file and is killed before it is complete."""
    script = (
        "import os, sys; from mooncake_p2p.files_and_pipes import NewFile;"
        "from tests.unit.test_cli_new_file import without_unnamed_files;"
        f"os.open = os.open if {unnamed} else without_unnamed_files;"
        f"file = NewFile({str(path)!r}); os.write(file.descriptor, b'half');"
        "print('written', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    killed_writer(tmp_path / "out", unnamed=True)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    killed_writer(path, unnamed=False)
    assert [each.suffix for each in tmp_path.iterdir()] == [".part"]
    monkeypatch.setattr(os, "open", without_unnamed_files)
    complete(NewFile(str(path)), b"v")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"v"


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", without_unnamed_files)
    path = tmp_path / "out"
    first = NewFile(str(path))
    with pytest.raises(CommandFailed, match="another get is writing"):
        NewFile(str(path))
    complete(first, b"first")
    assert path.read_bytes() == b"first"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "open", without_unnamed_files)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "out"
    leftover = NewFile(str(path))
    complete(NewFile(str(path)), b"v")
    os.close(leftover.descriptor)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_a_leftover_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", without_unnamed_files)
    path, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_bytes(b"precious")
    probe = NewFile(str(path))
    part = next(each for each in tmp_path.iterdir() if each.suffix == ".part")
    probe.close()
    part.symlink_to(victim)
    with pytest.raises(CommandFailed, match="cannot write"):
        NewFile(str(path))
    assert victim.read_bytes() == b"precious"


@contextlib.contextmanager
def pipe_with(content: bytes) -> Iterator[int]:
    """The reading end of a pipe that carries `content`."""
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(content)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield reading
    finally:
        os.close(reading)
        feeder.join(60)
        assert not feeder.is_alive()


@pytest.mark.parametrize("length", [0, 1, 4096, 3 * MIB + 17])
def test_a_file_and_a_pipe_give_the_same_value(length: int, tmp_path: Path) -> None:
    content = os.urandom(length)
    path = tmp_path / "value"
    path.write_bytes(content)
    with files.open_source(str(path)) as source, files.value_of(source) as value:
        assert value == content
    with pipe_with(content) as source, files.value_of(source) as value:
        assert value == content


def test_a_redirected_file_is_read_from_its_position(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        os.lseek(file.fileno(), 4, os.SEEK_SET)
        with files.value_of(file.fileno()) as value:
            assert bytes(value) == b"456789"


def test_files_that_claim_to_be_empty_are_read() -> None:
    with files.open_source("/proc/self/cmdline") as source:
        assert os.fstat(source).st_size == 0
        with files.value_of(source) as value:
            assert bytes(value) == Path("/proc/self/cmdline").read_bytes()


def test_a_value_outlives_an_error_that_still_looks_at_it(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"x" * 100)
    kept = []
    with files.open_source(str(path)) as source, files.value_of(source) as value:
        kept.append(value[10:20])
    assert kept[0] == b"x" * 10


def test_an_endless_pipe_is_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_OBJECT_BYTES", 2 * MIB)
    monkeypatch.setattr("p2pstore.objects.MAX_OBJECT_BYTES", 2 * MIB)
    with pipe_with(bytes(3 * MIB)) as source, pytest.raises(ObjectTooLarge), files.value_of(source):
        pass


def test_what_cannot_be_a_source(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="is a directory"), files.open_source(str(tmp_path)):
        pass
    with pytest.raises(FileNotFoundError), files.open_source(str(tmp_path / "none")):
        pass


@pytest.mark.parametrize("length", [0, 1, 3 * MIB])
def test_memory_can_be_filled_and_outlives_its_maker(length: int) -> None:
    view = files.memory_for(length)[:length]
    gc.collect()
    view[:] = b"x" * length
    assert view == b"x" * length


def test_devices_are_streams_and_files_are_not(tmp_path: Path) -> None:
    assert files.is_stream("/dev/null")
    assert not files.is_stream(str(tmp_path))
    assert not files.is_stream(str(tmp_path / "new"))


def test_everything_is_written_to_a_pipe_that_does_not_block() -> None:
    content = os.urandom(2 * MIB)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received = bytearray()

    def read() -> None:
        while piece := os.read(reading, 65536):
            received.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    counts: list[int] = []
    files.write_all(writing, memoryview(content), counts.append)
    os.close(writing)
    reader.join(60)
    os.close(reading)
    assert received == content
    assert sum(counts) == len(content)


def test_binary_stays_off_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(primary, "rb", buffering=0), os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with pytest.raises(CommandFailed, match="-o FILE") as refused:
            files.standard_output(binary_to_terminal=False)
        assert refused.value.code == ExitCode.USAGE
        assert files.standard_output(binary_to_terminal=True) == terminal.fileno()
        monkeypatch.undo()


def test_a_terminal_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(primary, "rb", buffering=0), os.fdopen(secondary, "r") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with pytest.raises(CommandFailed, match="terminal"), files.open_source("-"):
            pass
        monkeypatch.undo()
