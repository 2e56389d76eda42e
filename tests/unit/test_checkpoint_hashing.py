"""Publishing a directory: which files, their hashes, and files that change meanwhile."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import trio

from p2pstore.checkpoint.client.checkpoint_calls import plan_image, write_image
from p2pstore.checkpoint.content import hashing
from p2pstore.checkpoint.content import hashing as bulk_reading
from p2pstore.checkpoint.content.hashing import (
    BLOCK_BYTES,
    BulkReader,
    cached_blocks,
    hash_source,
    is_local,
    is_local_directory,
)
from p2pstore.checkpoint.content.manifest import FileHashes, Manifest, hash_of
from p2pstore.checkpoint.content.pieces import MIN_PIECE_BYTES, SMALLEST_USUAL
from p2pstore.checkpoint.content.sources import SourceDirectory, SourceMemory
from p2pstore.checkpoint.peer.piece_flow import FIRST_IN_THREADS, InlineOrThread
from p2pstore.errors import CheckpointChanged, CheckpointRefused
from p2pstore.objects import KIB, MIB

PIECE = MIN_PIECE_BYTES
FILES = {
    "config.json": b"{}",
    "empty": b"",
    "model/1.safetensors": os.urandom(5 * PIECE + 17),
    "model/2.safetensors": os.urandom(2 * PIECE),
    "model/tokenizer.json": os.urandom(PIECE - 1),
    "vocabulary.txt": b"words",
}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def pieces_of(manifest: Manifest, files: dict[str, bytes]) -> list[bytes]:
    return [
        b"".join(
            files[manifest.files[file].path][offset : offset + length]
            for file, offset, length in manifest.layout.extents(piece)
        )
        for piece in range(manifest.layout.count)
    ]


@pytest.mark.parametrize("threads", [1, 4])
async def test_the_manifest_of_a_directory(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a piece takes several blocks, and a file several steps.
    monkeypatch.setattr(bulk_reading, "BLOCK_BYTES", PIECE // 2)
    monkeypatch.setattr(hashing, "STEP_BYTES", 2 * PIECE)
    write(tmp_path, FILES)
    (tmp_path / "config.json").chmod(0o600)
    (tmp_path / "vocabulary.txt").chmod(0o4755)
    source = SourceDirectory(tmp_path)
    hashed: list[int] = []
    manifest = await hash_source(
        source, "model", piece_bytes=PIECE, threads=threads, progress=hashed.append
    )
    assert [file.path for file in manifest.files] == sorted(FILES)
    for file in manifest.files:
        assert file.size == len(FILES[file.path])
        content = FILES[file.path]
        pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
        whole = b"".join(map(hash_of, pieces)) if len(content) >= PIECE else content
        assert file.hash == hash_of(whole)
    assert manifest.file_hashes == FileHashes.OF_PIECES
    modes = {file.path: file.mode for file in manifest.files}
    assert modes["config.json"] == 0o600
    assert modes["vocabulary.txt"] == 0o755
    assert manifest.layout.count == 6 + 2 + 3
    for piece, data in enumerate(pieces_of(manifest, FILES)):
        assert manifest.is_piece(piece, data)
        assert source.read_piece(manifest, piece) == data
    assert sum(hashed) == source.total_bytes == sum(map(len, FILES.values()))


async def test_pieces_have_the_usual_length_or_that_of_the_version_before(tmp_path: Path) -> None:
    source = SourceDirectory(write(tmp_path, FILES))
    assert (await hash_source(source, "m")).piece_bytes == SMALLEST_USUAL
    kept = await hash_source(source, "m", previous_piece_bytes=2 * SMALLEST_USUAL)
    assert kept.piece_bytes == 2 * SMALLEST_USUAL


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        ([], [], sorted(FILES)),
        (["*.safetensors"], [], ["model/1.safetensors", "model/2.safetensors"]),
        (["*.json"], ["model/*"], ["config.json"]),
        ([], ["*.safetensors", "empty"], ["config.json", "model/tokenizer.json", "vocabulary.txt"]),
    ],
)
def test_which_files_are_published(
    tmp_path: Path, include: list[str], exclude: list[str], wanted: list[str]
) -> None:
    source = SourceDirectory(write(tmp_path, FILES), include, exclude)
    assert [file.path for file in source.files] == wanted


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    write(tmp_path, {"blobs/abc": b"content", "snapshot/other": b""})
    (tmp_path / "snapshot/model").symlink_to("../blobs/abc")
    source = SourceDirectory(tmp_path / "snapshot")
    assert [(file.path, file.size) for file in source.files] == [("model", 7), ("other", 0)]


def to_nothing(root: Path) -> None:
    (root / "x").symlink_to("nowhere")


def to_itself(root: Path) -> None:
    (root / "x").symlink_to("x")


def to_a_directory(root: Path) -> None:
    (root / "x").symlink_to("..")


def a_pipe(root: Path) -> None:
    os.mkfifo(root / "x")


def not_utf8(root: Path) -> None:
    Path(os.fsdecode(os.fsencode(root) + b"/x\xff")).write_bytes(b"")


def with_a_line_end(root: Path) -> None:
    (root / "x\n").write_bytes(b"")


@pytest.mark.parametrize(
    "make",
    [to_nothing, to_itself, to_a_directory, a_pipe, not_utf8, with_a_line_end],
    ids=lambda f: f.__name__,
)
def test_what_cannot_be_published_is_refused_unless_it_is_excluded(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    write(tmp_path, {"a": b"1"})
    make(tmp_path)
    with pytest.raises(CheckpointRefused):
        SourceDirectory(tmp_path)
    assert [file.path for file in SourceDirectory(tmp_path, exclude=["x*"]).files] == ["a"]


def test_a_directory_without_files_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="no file"):
        SourceDirectory(tmp_path)
    with pytest.raises(FileNotFoundError):
        SourceDirectory(tmp_path / "nowhere")


def written_to(path: Path) -> None:
    path.write_bytes(bytes(5 * PIECE + 17))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shorter(path: Path) -> None:
    os.truncate(path, 100)


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(FILES["model/1.safetensors"])
    path.with_name("new").rename(path)


def removed(path: Path) -> None:
    path.unlink()


CHANGES = [written_to, longer, shorter, replaced, removed]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_file_that_changes_while_it_is_hashed_ends_the_publication(
    tmp_path: Path, change: Callable[[Path], None], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is read, in the middle of it, and when only its end is left."""
    monkeypatch.setattr(hashing, "STEP_BYTES", 2 * PIECE)
    source = SourceDirectory(write(tmp_path, FILES), include=["model/1*"])
    steps = 0

    def progress(count: int) -> None:
        nonlocal steps
        steps += 1
        if steps == after:
            change(tmp_path / "model/1.safetensors")

    if not after:
        change(tmp_path / "model/1.safetensors")
    with trio.fail_after(10), pytest.raises(CheckpointChanged):
        await hash_source(source, "model", piece_bytes=PIECE, threads=1, progress=progress)


async def test_a_piece_of_a_file_that_changed_later_is_not_sent(tmp_path: Path) -> None:
    source = SourceDirectory(write(tmp_path, FILES))
    manifest = await hash_source(source, "model", piece_bytes=PIECE)
    place = tmp_path / "model/1.safetensors"
    before = place.stat()
    with place.open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(CheckpointChanged, match="changed"):
        source.read_piece(manifest, 0)
    # Even when the times say that nothing has changed.
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointChanged, match="bytes are not those"):
        source.read_piece(manifest, 0)
    assert source.read_piece(manifest, 1) == FILES["model/1.safetensors"][PIECE : 2 * PIECE]


async def test_a_disk_that_gives_a_little_at_a_time_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceDirectory(write(tmp_path, FILES))
    whole = await hash_source(source, "m", piece_bytes=PIECE)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:999]], at))
    assert await hash_source(source, "m", piece_bytes=PIECE) == whole


async def test_hashing_can_be_cancelled_and_leaves_no_thread_behind(tmp_path: Path) -> None:
    source = SourceDirectory(write(tmp_path, FILES))
    with trio.CancelScope() as scope:
        await hash_source(
            source, "m", piece_bytes=PIECE, threads=2, progress=lambda count: scope.cancel()
        )
    assert scope.cancelled_caught


# --- memory ----------------------------------------------------------------------------------


async def test_a_file_in_memory_is_published_piece_by_piece() -> None:
    image = plan_image({"w": np.arange(3 * PIECE, dtype=np.float32).reshape(3, PIECE)})
    descriptor = write_image(image)
    content = image.header + b"".join(image.tensors)
    source = SourceMemory(descriptor, "model.safetensors")
    os.close(descriptor)
    manifest = await hash_source(source, "policy", piece_bytes=PIECE)
    (file,) = manifest.files
    assert (file.path, file.size, file.mode) == ("model.safetensors", len(content), 0o644)
    assert file.hash == hash_of(manifest.piece_hashes)
    pieces = [source.read_piece(manifest, piece) for piece in range(manifest.layout.count)]
    assert b"".join(pieces) == content
    source.close()


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


MOUNTS = """\
22 28 0:20 / /proc rw,nosuid shared:13 - proc proc rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 28 0:40 / /models rw,relatime shared:2 master:7 - nfs4 storage:/models rw
32 28 0:41 / /dev/shm rw - tmpfs tmpfs rw
a line that is no mount
"""


def test_small_pieces_on_this_machine_are_done_at_once() -> None:
    at_once = InlineOrThread(is_local=True)
    assert at_once.may(512 * KIB)
    assert at_once.may(MIB)
    assert not at_once.may(MIB + 1)
    assert not InlineOrThread(is_local=False).may(1)


def test_after_a_step_that_waited_long_many_are_left_to_threads_and_then_twice_as_many() -> None:
    at_once = InlineOrThread(is_local=True)
    at_once.took(0.004, waited=True)
    at_once.took(0.5, waited=False)  # others had the core
    assert at_once.may(1)
    for rounds in (1, 2, 4):
        at_once.took(0.006, waited=True)
        answers = [at_once.may(1) for _ in range(rounds * FIRST_IN_THREADS + 1)]
        assert answers == [False] * (rounds * FIRST_IN_THREADS) + [True]


@pytest.mark.parametrize(
    ("device", "local"),
    [((254, 0), True), ((0, 41), True), ((0, 40), False), ((0, 20), False), ((9, 9), False)],
)
def test_disks_and_memory_of_this_machine_are_told_from_what_may_not_answer(
    device: tuple[int, int], local: bool
) -> None:
    assert is_local(MOUNTS, os.makedev(*device)) is local


def test_what_the_kernel_makes_up_is_no_disk() -> None:
    assert not is_local_directory(Path("/proc"))
