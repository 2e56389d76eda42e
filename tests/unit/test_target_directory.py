"""Target directories: resuming, reusing, switching, keeping; failures before the first piece."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from p2pstore.checkpoint.content import directory_versions as piece_record
from p2pstore.checkpoint.content import target_directory
from p2pstore.checkpoint.content.directory_versions import (
    FILES_A_STEP,
    current_version,
    kept_versions,
    removing_tree,
    switch_current,
    versions_with,
)
from p2pstore.checkpoint.content.manifest import (
    FileEntry,
    Manifest,
    SignedManifest,
    format_version,
    hash_of,
    make_manifest,
    sign_manifest,
    version_of,
)
from p2pstore.checkpoint.content.pieces import (
    MIN_PIECE_BYTES,
    Extent,
    PieceLayout,
    full_map,
    map_of,
    pieces_in,
)
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.errors import CapacityExceeded, ConfigError
from p2pstore.gossip.links.identity import Identity
from p2pstore.state.folder import Folder

PIECE = MIN_PIECE_BYTES
PUBLISHER = Identity(bytes(32))
Files = dict[str, bytes]
BASE: Files = {
    "config.json": b"{}",
    "empty": b"",
    "deep/er/a.safetensors": bytes(range(256)) * (3 * PIECE // 256) + b"end",
    "b.safetensors": b"b" * PIECE + b"c" * PIECE + b"d" * PIECE,
}


def signed(files: Files, modes: dict[str, int] | None = None) -> SignedManifest:
    paths = sorted(files)
    layout = PieceLayout([len(files[path]) for path in paths], PIECE)
    hashes = b"".join(
        hash_of(b"".join(files[paths[file]][at : at + size] for file, at, size in layout.extents(p)))
        for p in range(layout.count)
    )
    entries = [
        FileEntry(path, len(files[path]), (modes or {}).get(path, 0o644), hash_of(files[path]))
        for path in paths
    ]
    return sign_manifest(make_manifest("model", entries, PIECE, hashes), PUBLISHER)


def name_of(manifest: SignedManifest) -> str:
    return format_version(version_of(manifest.body))


def piece_of(manifest: Manifest, files: Files, piece: int) -> bytes:
    return b"".join(
        files[manifest.files[file].path][at : at + size]
        for file, at, size in manifest.layout.extents(piece)
    )


def prepared(directory: Path, manifest: SignedManifest, *, flat: bool = False) -> TargetDirectory:
    target = TargetDirectory(directory, manifest, flat=flat)
    try:
        for _ in target.prepare():
            pass
    except BaseException:
        target.close()
        raise
    return target


def finish(target: TargetDirectory, keep: int = 2, *, use: bool = True) -> None:
    for _ in target.finishing(keep, use=use):
        pass


def fetch(directory: Path, files: Files, *, flat: bool = False, keep: int = 2) -> list[int]:
    """All of it; the pieces that were not there already."""
    target = prepared(directory, signed(files), flat=flat)
    count = target.manifest.layout.count
    missing = pieces_in(full_map(count) & ~target.have)
    for piece in missing:
        assert target.write(piece, piece_of(target.manifest, files, piece))
    finish(target, keep)
    assert target.committed
    for piece in range(count):
        assert target.read(piece) == piece_of(target.manifest, files, piece)
    target.close()
    return missing


def tree(root: Path) -> Files:
    """All files below; the target's own left out."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".p2pstore" not in path.parts
    }


def state(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".p2pstore").iterdir())


def changed(files: Files, path: str, at: int) -> Files:
    content = bytearray(files[path])
    content[at] ^= 1
    return {**files, path: bytes(content)}


# --- a version -------------------------------------------------------------------------------


def test_a_version_appears_when_it_is_complete_and_current_names_it(tmp_path: Path) -> None:
    manifest = signed(BASE, {"config.json": 0o600, "b.safetensors": 0o040})
    target = prepared(tmp_path / "new" / "models", manifest)
    root = tmp_path / "new" / "models"
    count = target.manifest.layout.count
    assert count == 4 + 3 + 1
    for piece in range(count):
        assert target.have == full_map(piece)
        assert not (root / name_of(manifest)).exists()
        assert target.write(piece, piece_of(target.manifest, BASE, piece))
        assert target.read(piece) == piece_of(target.manifest, BASE, piece)
    assert tree(root) == {}
    finish(target)
    target.close()
    assert tree(root / name_of(manifest)) == BASE
    assert os.readlink(root / "current") == name_of(manifest)
    assert tree(root / "current") == BASE
    assert (root / "current/config.json").stat().st_mode & 0o777 == 0o600
    assert (root / "current/b.safetensors").stat().st_mode & 0o777 == 0o440
    assert state(root) == [f"{name_of(manifest)}.manifest", "lock"]


def test_bytes_that_are_not_the_piece_are_not_kept(tmp_path: Path) -> None:
    target = prepared(tmp_path, signed(BASE))
    for wrong in (bytes(PIECE), b"", piece_of(target.manifest, BASE, 1)):
        assert not target.write(0, wrong)
    assert target.have == 0
    with pytest.raises(ValueError, match="missing"):
        finish(target)
    target.close()
    assert not (tmp_path / "current").exists()


def test_a_version_that_is_there_is_not_fetched_again_and_one_that_was_changed_is_refused(
    tmp_path: Path,
) -> None:
    fetch(tmp_path, BASE)
    assert fetch(tmp_path, BASE) == []
    os.truncate(tmp_path / "current/config.json", 1)
    with pytest.raises(ConfigError, match="was changed"):
        TargetDirectory(tmp_path, signed(BASE))


def test_going_back_to_an_older_version_is_a_switch(tmp_path: Path) -> None:
    other = changed(BASE, "b.safetensors", 0)
    fetch(tmp_path, BASE)
    fetch(tmp_path, other)
    assert fetch(tmp_path, BASE) == []
    assert tree(tmp_path / "current") == BASE
    # The version last in use counts as newer than the one last fetched.
    fetch(tmp_path, changed(BASE, "b.safetensors", 1))
    assert (tmp_path / name_of(signed(BASE))).exists()
    assert not (tmp_path / name_of(signed(other))).exists()


def test_a_reader_of_current_never_sees_half_a_version(tmp_path: Path) -> None:
    versions = [{"a": b"%d" % n, "b": b"%d" % n} for n in range(12)]
    fetch(tmp_path, versions[0], keep=20)
    seen: list[tuple[bytes, bytes]] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            root = os.open(tmp_path / "current", os.O_RDONLY | os.O_DIRECTORY)
            found = []
            for name in ("a", "b"):
                file = os.open(name, os.O_RDONLY, dir_fd=root)
                found.append(os.read(file, 10))
                os.close(file)
            os.close(root)
            seen.append((found[0], found[1]))

    reader = threading.Thread(target=read)
    reader.start()
    for files in versions[1:]:
        fetch(tmp_path, files, keep=20)
    over.set()
    reader.join(60)
    assert seen
    assert all(first == second for first, second in seen)


def placed(root: Path, files: Files, keep: int = 2) -> bytes:
    """Fetch it, and leave `current` as it is."""
    manifest = signed(files)
    target = prepared(root, manifest)
    for piece in pieces_in(full_map(target.manifest.layout.count) & ~target.have):
        assert target.write(piece, piece_of(target.manifest, files, piece))
    finish(target, keep, use=False)
    target.close()
    return target.version


def test_a_version_can_be_put_in_its_place_first_and_switched_to_later(tmp_path: Path) -> None:
    assert (current_version(tmp_path), versions_with(tmp_path)) == (b"", [])
    first = placed(tmp_path, {"a": b"1"})
    assert current_version(tmp_path) == b""
    assert not (tmp_path / "current").exists()
    assert versions_with(tmp_path) == [first]
    switch_current(tmp_path, first)
    assert current_version(tmp_path) == first
    held = prepared(tmp_path, signed({"a": b"1"}))  # as who passes a version on does
    finish(held, use=False)
    second = placed(tmp_path, {"a": b"2"})
    assert bytes(held.read(0)) == b"1"
    held.close()
    assert current_version(tmp_path) == first
    assert versions_with(tmp_path) == [first, second]
    target = prepared(tmp_path, signed({"a": b"3"}))  # a third one is fetched meanwhile
    switch_current(tmp_path, second)
    assert tree(tmp_path / "current") == {"a": b"2"}
    target.close()
    with pytest.raises(FileNotFoundError):
        switch_current(tmp_path, bytes(16))
    assert current_version(tmp_path) == second
    assert not list((tmp_path / ".p2pstore").glob("*.new"))


def test_versions_that_were_never_switched_to_do_not_pile_up(tmp_path: Path) -> None:
    used = placed(tmp_path, {"a": b"used"})
    switch_current(tmp_path, used)
    for number in range(4):
        newest = placed(tmp_path, {"a": bytes([number])})
    assert versions_with(tmp_path) == [used, newest]
    only = placed(tmp_path, {"a": b"only"}, keep=1)
    assert versions_with(tmp_path) == [used, only], "the version in use stays, and the placed one"


def test_a_link_that_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    fetch(tmp_path, BASE)
    (tmp_path / ".p2pstore/current.0123.new").symlink_to("nowhere")
    fetch(tmp_path, changed(BASE, "b.safetensors", 1))
    assert not list((tmp_path / ".p2pstore").glob("*.new"))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_versions_are_kept(tmp_path: Path, keep: int) -> None:
    versions = [{"a": bytes([number])} for number in range(5)]
    for files in versions:
        fetch(tmp_path, files, keep=keep)
    kept = {name_of(signed(files)) for files in versions[-keep:]}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "current", ".p2pstore"}
    assert state(tmp_path) == sorted([f"{name}.manifest" for name in kept] + ["lock"])


def test_a_removal_that_was_killed_does_not_stop_the_next(tmp_path: Path) -> None:
    """Whatever is left of it: the folder that was going, or a manifest without a version."""
    fetch(tmp_path, BASE, keep=1)
    first = name_of(signed(BASE))
    left = tmp_path / ".p2pstore" / f"{first}.going" / "deep"
    left.mkdir(parents=True)
    (left / "file").write_bytes(b"x")
    (tmp_path / ".p2pstore" / f"{'0' * 32}.manifest").write_bytes(b"")
    second = changed(BASE, "b.safetensors", 0)
    fetch(tmp_path, second, keep=1)
    assert [path.name for path in tmp_path.iterdir() if len(path.name) == 32] == [
        name_of(signed(second))
    ]
    assert state(tmp_path) == [f"{name_of(signed(second))}.manifest", "lock"]


def test_what_else_is_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / ("0" * 32)).mkdir()
    for number in range(4):
        fetch(tmp_path, {"a": bytes([number])}, keep=1)
    assert (tmp_path / "mine").is_dir()
    assert (tmp_path / ("0" * 32)).is_dir()


# --- what is there already -------------------------------------------------------------------


def test_unchanged_files_and_pieces_of_an_older_version_are_not_fetched(tmp_path: Path) -> None:
    fetch(tmp_path, BASE)
    after = changed(BASE, "b.safetensors", PIECE + 7)
    after["c.safetensors"] = b"e" * (2 * PIECE)
    fetched = fetch(tmp_path, after)
    # One piece of b, the two of c; nothing of a and of what is small.
    assert len(fetched) == 3
    assert tree(tmp_path / "current") == after
    assert tree(tmp_path / name_of(signed(BASE))) == BASE
    whole = tmp_path / "current/deep/er/a.safetensors"
    assert whole.samefile(tmp_path / name_of(signed(BASE)) / "deep/er/a.safetensors")


def test_an_older_version_is_not_believed_but_verified(tmp_path: Path) -> None:
    fetch(tmp_path, BASE)
    old = tmp_path / name_of(signed(BASE))
    for path in ("deep/er/a.safetensors", "b.safetensors"):
        with (old / path).open("r+b") as file:
            file.write(b"spoilt")
    (old / "config.json").unlink()
    after = changed(BASE, "b.safetensors", 3 * PIECE - 1)
    fetched = fetch(tmp_path, after)
    # Two pieces of b and the small file; of a all whole pieces are the same, so any copy of one will do.
    assert len(fetched) == 2 + 1
    assert tree(tmp_path / "current") == after


def test_a_file_with_another_mode_is_a_file_of_its_own(tmp_path: Path) -> None:
    fetch(tmp_path, BASE)
    target = prepared(tmp_path, signed(BASE, {"b.safetensors": 0o600}))
    assert target.have == full_map(target.manifest.layout.count)
    finish(target)
    target.close()
    assert (tmp_path / "current/b.safetensors").stat().st_mode & 0o777 == 0o600
    old = tmp_path / name_of(signed(BASE)) / "b.safetensors"
    assert old.stat().st_mode & 0o777 == 0o644


def test_where_there_are_no_hard_links_pieces_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(tmp_path, BASE)

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert len(fetch(tmp_path, changed(BASE, "b.safetensors", 0))) == 1


def test_a_plain_directory_has_the_files_and_no_versions(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    fetch(tmp_path, BASE, flat=True)
    assert tree(tmp_path) == {**BASE, "mine": b"mine"}
    after = changed(BASE, "b.safetensors", 2 * PIECE)
    after["config.json"] = b"{1}"
    assert len(fetch(tmp_path, after, flat=True)) == 2
    assert tree(tmp_path) == {**after, "mine": b"mine"}
    assert fetch(tmp_path, after, flat=True) == []
    assert not list((tmp_path / ".p2pstore").glob("*.partial"))


def test_files_that_were_in_a_plain_directory_before_are_reused(tmp_path: Path) -> None:
    """As another tool left them: no manifest says what they are."""
    for path, content in BASE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    (tmp_path / "b.safetensors").write_bytes(b"b" * PIECE + b"x" * PIECE)
    assert len(fetch(tmp_path, BASE, flat=True)) == 2
    assert tree(tmp_path) == BASE


# --- interrupted -----------------------------------------------------------------------------


def test_an_interrupted_fetch_goes_on_where_it_was(tmp_path: Path) -> None:
    target = prepared(tmp_path, signed(BASE))
    for piece in (0, 3, 7):
        target.write(piece, piece_of(target.manifest, BASE, piece))
    target.close()
    assert fetch(tmp_path, BASE) == [1, 2, 4, 5, 6]
    assert tree(tmp_path / "current") == BASE


def test_after_a_crash_of_the_machine_pieces_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = prepared(tmp_path, signed(BASE))
    for piece in (0, 1, 2):
        target.write(piece, piece_of(target.manifest, BASE, piece))
    (partial,) = (tmp_path / ".p2pstore").glob("*.partial")
    place = partial / target.manifest.files[target.manifest.layout.extents(1)[0].file].path
    offset = target.manifest.layout.extents(1)[0].offset
    target.close()
    with place.open("r+b") as file:
        file.seek(offset)
        file.write(b"never reached the disk")
    monkeypatch.setattr(target_directory, "boot_id", lambda: b"another".ljust(36, b"-"))
    # Stopped while it verifies, it verifies again.
    target = TargetDirectory(tmp_path, signed(BASE))
    assert target.have == map_of([0, 1, 2])
    next(target.prepare())
    target.close()
    target = prepared(tmp_path, signed(BASE))
    assert target.have == map_of([0, 2])
    target.close()
    target = TargetDirectory(tmp_path, signed(BASE))
    assert target._require_record().is_certain
    target.close()


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"P2PSPCS\0"])
def test_a_record_that_is_damaged_counts_for_nothing(tmp_path: Path, damage: bytes) -> None:
    target = prepared(tmp_path, signed(BASE))
    target.write(0, piece_of(target.manifest, BASE, 0))
    target.close()
    (record,) = (tmp_path / ".p2pstore").glob("*.pieces")
    record.write_bytes(damage)
    assert fetch(tmp_path, BASE) == list(range(8))
    assert piece_record.boot_id() == piece_record.boot_id()


def test_files_that_were_removed_or_cut_meanwhile_are_fetched_again(tmp_path: Path) -> None:
    target = prepared(tmp_path, signed(BASE))
    for piece in range(8):
        target.write(piece, piece_of(target.manifest, BASE, piece))
    target.close()
    (partial,) = (tmp_path / ".p2pstore").glob("*.partial")
    (partial / "config.json").unlink()
    os.truncate(partial / "b.safetensors", 10)
    missing = fetch(tmp_path, BASE)
    assert len(missing) == 3 + 1
    assert tree(tmp_path / "current") == BASE


def test_what_is_left_of_other_versions_goes_when_one_is_complete(tmp_path: Path) -> None:
    prepared(tmp_path, signed({"a": b"never completed"})).close()
    fetch(tmp_path, BASE)
    assert state(tmp_path) == [f"{name_of(signed(BASE))}.manifest", "lock"]


WRITER = """
import sys
from pathlib import Path
from tests.unit.test_target_directory import big, finish, piece_of, prepared, signed

files = big()
target = prepared(Path(sys.argv[1]), signed(files))
for piece in range(target.manifest.layout.count):
    if not target.have >> piece & 1:
        target.write(piece, piece_of(target.manifest, files, piece))
        print(piece, flush=True)
finish(target)
print("complete", flush=True)
"""


def big() -> Files:
    return {f"{number}.safetensors": hash_of(b"%d" % number) * (40 * PIECE // 32) for number in range(5)}


def test_after_kill_9_no_verified_piece_is_fetched_again(tmp_path: Path) -> None:
    """Killed repeatedly in the middle: pieces reported as written are never requested again."""
    root = Path(__file__).parents[2]
    written: list[str] = []
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(25)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines(keepends=True)
        writer.wait(60)
        writer.stdout.close()
        written += [line.strip() for line in lines if line.endswith("\n")]
    pieces = [int(piece) for piece in written if piece != "complete"]
    assert len(pieces) == len(set(pieces)) >= 100
    if "complete" not in written:
        missing = fetch(tmp_path, big())
        assert not set(missing) & set(pieces)
    assert tree(tmp_path / "current") == big()


# --- what fails before the first piece -------------------------------------------------------


def test_a_disk_without_room_is_said_before_the_first_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = FileEntry("huge", 1 << 40, 0o644, bytes(32))
    manifest = sign_manifest(make_manifest("m", [huge], 1 << 28, bytes(32 << 12)), PUBLISHER)
    with pytest.raises(CapacityExceeded, match="are needed"):
        prepared(tmp_path / "huge", manifest)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityExceeded, match="No space left"):
            prepared(tmp_path / "full", signed(BASE))
    monkeypatch.setattr(Folder, "replace", full)
    with pytest.raises(CapacityExceeded, match="cannot be written to: No space left"):
        TargetDirectory(tmp_path / "no room for a manifest", signed(BASE))


def test_room_that_is_taken_already_is_not_needed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path, signed(BASE)).close()
    room = os.statvfs(tmp_path)
    none_free = os.statvfs_result((*room[:4], 0, *room[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: none_free)
    prepared(tmp_path, signed(BASE)).close()
    with pytest.raises(CapacityExceeded):
        prepared(tmp_path / "other", signed(BASE))


def test_where_nothing_can_be_written_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(ConfigError, match="cannot be written"):
            TargetDirectory(place, signed(BASE))

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(os, "posix_fallocate", denied)
    with pytest.raises(ConfigError, match="Permission denied"):
        prepared(tmp_path / "other", signed(BASE))


def test_a_file_system_that_cannot_allocate_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    fetch(tmp_path, BASE)
    assert tree(tmp_path / "current") == BASE


def test_a_disk_that_takes_and_gives_a_little_at_a_time_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:5000], at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:5000]], at))
    fetch(tmp_path, BASE)
    assert tree(tmp_path / "current") == BASE
    assert len(fetch(tmp_path, changed(BASE, "b.safetensors", 0))) == 1


def test_no_descriptors_are_left_open(tmp_path: Path) -> None:
    fetch(tmp_path, BASE)
    before = len(os.listdir("/proc/self/fd"))
    fetch(tmp_path, changed(BASE, "b.safetensors", 0))
    fetch(tmp_path / "flat", BASE, flat=True)
    with pytest.raises(ConfigError):
        TargetDirectory(Path("/proc/nowhere"), signed(BASE))
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_processes_do_not_fetch_to_one_directory(tmp_path: Path) -> None:
    target = TargetDirectory(tmp_path, signed(BASE))
    with pytest.raises(ConfigError, match="another fetch"):
        TargetDirectory(tmp_path, signed({"a": b"1"}))
    target.close()
    target.close()
    TargetDirectory(tmp_path, signed({"a": b"1"})).close()


def test_current_that_is_a_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "followed/current").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not a link"):
        current_version(tmp_path / "followed")
    (tmp_path / "current").mkdir()
    with pytest.raises(ConfigError, match="not a link"):
        TargetDirectory(tmp_path, signed(BASE))
    fetch(tmp_path, BASE, flat=True)


def test_several_threads_write_and_read(tmp_path: Path) -> None:
    files = big()
    target = prepared(tmp_path, signed(files))
    count = target.manifest.layout.count
    turn = iter(range(count))
    lock = threading.Lock()
    bad: list[int] = []

    def work() -> None:
        while True:
            with lock:
                piece = next(turn, None)
            if piece is None:
                return
            data = piece_of(target.manifest, files, piece)
            if not target.write(piece, data) or target.read(piece) != data:
                bad.append(piece)

    threads = [threading.Thread(target=work) for _ in range(4)]
    deadline = time.monotonic() + 30
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not bad
    assert target.have == full_map(count)
    target.close()
    assert fetch(tmp_path, files) == []


# --- some files only -------------------------------------------------------------------------

SMALL: Files = {**BASE, "deep/tokenizer.json": b"t" * 900, "z.json": b"z" * 50}
"""Three small files share a piece."""


def fetch_some(directory: Path, files: Files, *paths: str, flat: bool = False) -> list[int]:
    """These files; the pieces that were not there already."""
    chosen = [number for number, path in enumerate(sorted(files)) if path in paths]
    target = TargetDirectory(directory, signed(files), flat=flat, chosen=chosen)
    for _ in target.prepare():
        pass
    missing = pieces_in(target.needed & ~target.have)
    for piece in missing:
        assert target.write(piece, piece_of(target.manifest, files, piece))
    finish(target)
    for piece in pieces_in(target.have):
        assert target.read(piece) == piece_of(target.manifest, files, piece), "to be passed on"
    target.close()
    return missing


def some_of(files: Files, *paths: str) -> Files:
    return {path: files[path] for path in paths}


def test_some_files_are_there_and_are_not_taken_for_the_version(tmp_path: Path) -> None:
    version = version_of(signed(SMALL).body)
    place = tmp_path / version.hex()
    fetched = fetch_some(tmp_path, SMALL, "b.safetensors", "z.json")
    assert len(fetched) == 3 + 1
    assert tree(place) == some_of(SMALL, "b.safetensors", "z.json")
    assert current_version(tmp_path) == version
    assert kept_versions(tmp_path) == [version]
    assert versions_with(tmp_path) == []
    assert fetch_some(tmp_path, SMALL, "z.json") == [], "and nothing goes"
    assert tree(place) == some_of(SMALL, "b.safetensors", "z.json")

    inode = (place / "b.safetensors").stat().st_ino
    assert fetch_some(tmp_path, SMALL, "config.json", "empty") == [], "it came with z.json"
    assert tree(place) == some_of(SMALL, "b.safetensors", "z.json", "config.json", "empty")
    assert versions_with(tmp_path) == []

    assert len(fetch(tmp_path, SMALL)) == 4, "the file that is missing"
    assert tree(place) == SMALL
    assert versions_with(tmp_path) == [version]
    assert (place / "b.safetensors").stat().st_ino == inode
    assert state(tmp_path) == sorted(["lock", f"{version.hex()}.manifest"])
    assert fetch_some(tmp_path, SMALL, "z.json") == []
    assert tree(place) == SMALL


def test_a_file_of_some_that_was_changed_is_said(tmp_path: Path) -> None:
    fetch_some(tmp_path, SMALL, "z.json")
    place = tmp_path / name_of(signed(SMALL))
    (place / "z.json").write_bytes(b"other")
    with pytest.raises(ConfigError, match="was changed; remove it to fetch it again"):
        fetch_some(tmp_path, SMALL, "z.json", "empty")
    shutil.rmtree(place)
    assert fetch_some(tmp_path, SMALL, "empty") == []
    assert tree(place) == {"empty": b""}


def test_a_record_of_some_files_that_is_damaged_is_said(tmp_path: Path) -> None:
    fetch_some(tmp_path, SMALL, "z.json")
    (tmp_path / ".p2pstore" / f"{name_of(signed(SMALL))}.part").write_bytes(b"\x92\x02\xc4\x00")
    with pytest.raises(ConfigError, match=r"format 2; remove it and .* to fetch it again"):
        fetch(tmp_path, SMALL)


def test_an_interrupted_fetch_of_other_files_leaves_nothing_in_these(tmp_path: Path) -> None:
    target = prepared(tmp_path, signed(SMALL))
    for piece in range(2):
        assert target.write(piece, piece_of(target.manifest, SMALL, piece))
    target.close()
    assert len(fetch_some(tmp_path, SMALL, "z.json", "config.json")) == 1
    assert tree(tmp_path / name_of(signed(SMALL))) == some_of(SMALL, "z.json", "config.json")


def test_some_files_resume_and_older_versions_give_what_they_have(tmp_path: Path) -> None:
    fetch_some(tmp_path, SMALL, "b.safetensors")
    newer = changed(SMALL, "deep/er/a.safetensors", 5)
    chosen = [number for number, path in enumerate(sorted(newer)) if path.endswith("safetensors")]
    for expected in (4, 2):
        target = TargetDirectory(tmp_path, signed(newer), chosen=chosen)
        for _ in target.prepare():
            pass
        missing = pieces_in(target.needed & ~target.have)
        assert len(missing) == expected
        for piece in missing[:2]:
            assert target.write(piece, piece_of(target.manifest, newer, piece))
        target.close()
    assert fetch_some(tmp_path, newer, "b.safetensors", "deep/er/a.safetensors") == []
    assert fetch(tmp_path, newer) != []
    assert tree(tmp_path / name_of(signed(newer))) == newer
    fetch(tmp_path, changed(newer, "z.json", 1), keep=1)
    assert len(kept_versions(tmp_path)) == 1
    assert not list((tmp_path / ".p2pstore").glob("*.part"))
    assert not list((tmp_path / ".p2pstore").glob("*.rest"))


def test_some_files_in_a_flat_directory(tmp_path: Path) -> None:
    assert len(fetch_some(tmp_path, SMALL, "z.json", "b.safetensors", flat=True)) == 4
    assert tree(tmp_path) == some_of(SMALL, "b.safetensors", "z.json")
    fetch(tmp_path, SMALL, flat=True)
    assert tree(tmp_path) == SMALL
    assert not list((tmp_path / ".p2pstore").glob("*.rest"))


# --- equal files, and steps --------------------------------------------------------------------

EQUAL: Files = {
    "a.bin": BASE["b.safetensors"],
    "b.json": b"j" * 9000,
    "c.json": b"k" * 9000,
    "d.bin": BASE["b.safetensors"],
    "e.json": b"j" * 9000,
    "f.json": b"m" * 9000,
}


def test_pieces_of_equal_files_are_copies_of_what_comes_first_or_is_here() -> None:
    manifest = signed(EQUAL).manifest
    # a.bin 0 to 2, d.bin 3 to 5; the small ones do not fit together: 6 b, 7 c, 8 e, 9 f
    assert sorted(manifest.copies) == [3, 4, 5, 8]
    assert manifest.copies[8] == [Extent(1, 0, 9000)]
    assert manifest.copies[4] == [Extent(0, PIECE, PIECE)]
    assert sorted(manifest.copies_among(map_of([3, 4, 8]))) == []
    assert sorted(manifest.copies_among(full_map(10), map_of([3, 8]))) == [0, 4, 5, 6]
    assert not signed({"a": b"1" * 20_000, "b": b"2"}).manifest.copies


def test_copies_are_made_of_what_is_here_and_verified(tmp_path: Path) -> None:
    target = prepared(tmp_path, signed(EQUAL))
    manifest = target.manifest
    for piece in pieces_in(target.needed & ~map_of(target.copies)):
        assert target.write(piece, piece_of(manifest, EQUAL, piece))
    for piece, extents in target.copies.items():
        assert target.write(piece, target.read_extents(extents))
    finish(target)
    assert tree(tmp_path / "current") == EQUAL
    target.close()


@pytest.mark.parametrize("flat", [False, True])
def test_the_end_goes_in_steps_and_all_can_be_read_meanwhile(tmp_path: Path, flat: bool) -> None:
    files = {f"{number % 3}/{number:03}.bin": bytes([number]) * 100 for number in range(100)}
    fetch(tmp_path, {"old": b"x", "deep/old": b"y"}, flat=flat)
    target = prepared(tmp_path, signed(files), flat=flat)
    for piece in range(target.manifest.layout.count):
        assert target.write(piece, piece_of(target.manifest, files, piece))
    places = target.unsynced()
    assert len(places) == 100 + 3 + 1
    assert target.make_durable(places[:50]) == 5000
    assert target.unsynced() == places[50:]
    steps = 0
    for _ in target.finishing(keep=1):
        steps += 1
        for piece in range(target.manifest.layout.count):
            assert target.read(piece) == piece_of(target.manifest, files, piece)
    assert steps >= 100 // FILES_A_STEP
    assert target.unsynced() == []
    target.close()
    found = tree(tmp_path if flat else tmp_path / "current")
    assert {path: found[path] for path in files} == files


def test_a_tree_is_removed_without_what_its_links_name(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "gone/deep/er").mkdir(parents=True)
    (tmp_path / "gone/deep/file").touch()
    (tmp_path / "gone/deep/link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone/dangling").symlink_to("nowhere")
    assert sum(1 for _ in removing_tree(tmp_path / "gone")) >= 3
    assert list(removing_tree(tmp_path / "gone")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept/file").exists()
