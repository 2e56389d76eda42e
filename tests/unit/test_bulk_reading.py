"""Reading files to hash them: through the page cache and past it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.checkpoint.content import hashing as bulk_reading
from p2pstore.checkpoint.content.hashing import (
    BLOCK_BYTES,
    BulkReader,
    cached_blocks,
    is_local_directory,
)

CONTENT = os.urandom(5 * BLOCK_BYTES + 12345)


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[int]:
    """A file that is on the disk, and not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if not is_local_directory(tmp_path) or all(cached_blocks(descriptor, 0, len(CONTENT))):
        os.close(descriptor)
        pytest.skip("temporary files are in memory, or on another machine")
    yield descriptor
    os.close(descriptor)


def read(reader: BulkReader, descriptor: int, offset: int, length: int) -> bytes:
    return b"".join(map(bytes, reader.blocks(descriptor, offset, length)))


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_is_read_whole_and_fills_the_page_cache_only_if_it_may(
    cold: int, past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_reading, "CACHE_SECONDS_PER_BYTE", 1.0)
    reader = BulkReader(past_cache=past_cache)
    assert read(reader, cold, 0, len(CONTENT)) == CONTENT
    assert all(cached_blocks(cold, 0, len(CONTENT))) == (not past_cache)
    assert not fcntl.fcntl(cold, fcntl.F_GETFL) & os.O_DIRECT
    start = BLOCK_BYTES + 8192
    assert read(reader, cold, start, 999) == CONTENT[start : start + 999]


def test_what_the_page_cache_has_is_taken_from_it(cold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(cold, BLOCK_BYTES, BLOCK_BYTES)
    past: list[int] = []
    read_past = bulk_reading._read_past

    def seen(file: int, whole: memoryview, view: memoryview, offset: int) -> bool:
        past.append(offset)
        return read_past(file, whole, view, offset)

    monkeypatch.setattr(bulk_reading, "_read_past", seen)
    assert read(BulkReader(past_cache=True), cold, 0, len(CONTENT)) == CONTENT
    assert 0 in past
    assert BLOCK_BYTES not in past


def test_when_the_page_cache_costs_too_much_the_rest_is_read_past_it(
    cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.thread_time
    dear = 100 * bulk_reading.CACHE_SECONDS_PER_BYTE * BLOCK_BYTES
    looks = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: clock() + dear * next(looks))
    reader = BulkReader()
    assert read(reader, cold, 0, len(CONTENT)) == CONTENT
    assert reader.past_cache


def test_where_direct_io_is_impossible_the_cache_is_used(
    cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refusing(descriptor: int, command: int, value: int = 0) -> int:
        if value & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return control(descriptor, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    assert read(BulkReader(past_cache=True), cold, 0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_that_ends_too_early_is_said(cold: int, past_cache: bool) -> None:
    with pytest.raises(EOFError):
        read(BulkReader(past_cache=past_cache), cold, 0, len(CONTENT) + 1)
