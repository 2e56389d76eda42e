"""A file that appears when it is complete: what it leaves when it is not, on every kind of file system."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_p2p.files_and_pipes import NewFile
from mooncake_p2p.output import CommandFailed

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
    file = NewFile(str(link))
    write(file, b"new")
    file.commit()
    file.close()
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_long_name_is_no_problem(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    for content in (b"one", b"two"):
        file = NewFile(str(path))
        write(file, content)
        file.commit()
        file.close()
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
    file = NewFile(str(path))
    write(file, b"v")
    file.commit()
    file.close()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"v"


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", without_unnamed_files)
    path = tmp_path / "out"
    first = NewFile(str(path))
    with pytest.raises(CommandFailed, match="another get is writing"):
        NewFile(str(path))
    write(first, b"first")
    first.commit()
    first.close()
    assert path.read_bytes() == b"first"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "open", without_unnamed_files)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "out"
    leftover = NewFile(str(path))
    file = NewFile(str(path))
    write(file, b"v")
    file.commit()
    file.close()
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
