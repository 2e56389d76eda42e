"""Values between files, pipes and memory: what a failed transfer leaves, and how sources differ."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_p2p import files_and_pipes as transfers
from mooncake_p2p.output import CommandFailed, ExitCode
from p2pstore.errors import ObjectTooLarge
from p2pstore.objects import MIB


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
        feeder.join(10)
        assert not feeder.is_alive()


@pytest.mark.parametrize("length", [0, 1, 4096, 3 * MIB + 17])
def test_a_file_and_a_pipe_give_the_same_value(length: int, tmp_path: Path) -> None:
    content = os.urandom(length)
    path = tmp_path / "value"
    path.write_bytes(content)
    with transfers.open_source(str(path)) as source, transfers.value_of(source) as value:
        assert value == content
    with pipe_with(content) as source, transfers.value_of(source) as value:
        assert value == content


def test_a_redirected_file_is_read_from_its_position(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        os.lseek(file.fileno(), 4, os.SEEK_SET)
        with transfers.value_of(file.fileno()) as value:
            assert bytes(value) == b"456789"


def test_files_that_claim_to_be_empty_are_read() -> None:
    with transfers.open_source("/proc/self/cmdline") as source:
        assert os.fstat(source).st_size == 0
        with transfers.value_of(source) as value:
            assert bytes(value) == Path("/proc/self/cmdline").read_bytes()


def test_a_value_outlives_an_error_that_still_looks_at_it(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"x" * 100)
    kept = []
    with transfers.open_source(str(path)) as source, transfers.value_of(source) as value:
        kept.append(value[10:20])
    assert kept[0] == b"x" * 10


def test_an_endless_pipe_is_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "MAX_OBJECT_BYTES", 2 * MIB)
    monkeypatch.setattr("p2pstore.objects.MAX_OBJECT_BYTES", 2 * MIB)
    with pipe_with(bytes(3 * MIB)) as source, pytest.raises(ObjectTooLarge), transfers.value_of(source):
        pass


def test_what_cannot_be_a_source(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="is a directory"), transfers.open_source(str(tmp_path)):
        pass
    with pytest.raises(FileNotFoundError), transfers.open_source(str(tmp_path / "none")):
        pass


@pytest.mark.parametrize("length", [0, 1, 3 * MIB])
def test_memory_can_be_filled_and_outlives_its_maker(length: int) -> None:
    view = transfers.memory_for(length)[:length]
    gc.collect()
    view[:] = b"x" * length
    assert view == b"x" * length


def test_devices_are_streams_and_files_are_not(tmp_path: Path) -> None:
    assert transfers.is_stream("/dev/null")
    assert not transfers.is_stream(str(tmp_path))
    assert not transfers.is_stream(str(tmp_path / "new"))


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
    transfers.write_all(writing, memoryview(content), counts.append)
    os.close(writing)
    reader.join(10)
    os.close(reading)
    assert received == content
    assert sum(counts) == len(content)


def test_binary_stays_off_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(primary, "rb", buffering=0), os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with pytest.raises(CommandFailed, match="-o FILE") as refused:
            transfers.standard_output(binary_to_terminal=False)
        assert refused.value.code == ExitCode.USAGE
        assert transfers.standard_output(binary_to_terminal=True) == terminal.fileno()
        monkeypatch.undo()


def test_a_terminal_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(primary, "rb", buffering=0), os.fdopen(secondary, "r") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with pytest.raises(CommandFailed, match="terminal"), transfers.open_source("-"):
            pass
        monkeypatch.undo()
