"""Published files: directories, sealed memory, and checks of their content. Shell; blocking, for worker threads.

Symbolic links to files are followed (model caches are full of them). Links to directories, pipes, devices and names
that are not UTF-8 are refused: publishing them would leave files out silently, or never end. Size and mtime of each
file are taken at the beginning; a difference later is `CheckpointChanged`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.directory_versions import read_extents, read_fully
from p2pstore.checkpoint.content.manifest import (
    CURRENT,
    RESERVED_PREFIX,
    WILDCARDS,
    Manifest,
    bookkeeping_in,
    check_path,
    is_asked_for,
    is_chosen,
    nearest,
    unmatched,
)
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.safetensors import (
    HEAD_BYTES,
    INDEX_SUFFIX,
    SUFFIX,
    BrokenFile,
    header_end,
    likely_cause,
    path_in_index,
    read_header,
    read_weight_map,
)
from p2pstore.errors import CheckpointChanged, CheckpointRefused
from p2pstore.objects import listed


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was found."""

    path: str
    size: int
    mode: int
    stamp: tuple[int, int, int]
    """mtime (ns), device and inode."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of a tensor; empty for a file."""


class PublishedFiles(ABC):
    """Files to be published, in a directory or in memory, read where they are."""

    files: list[SourceFile]
    total_bytes: int
    """Of all files together."""

    @abstractmethod
    def opened(self, file: int) -> AbstractContextManager[int]:
        """A file, open during the block."""

    @abstractmethod
    def check(self) -> None:
        """Raises `CheckpointChanged` when any file was changed."""

    def read_piece(self, manifest: Manifest, piece: int) -> memoryview:
        """A piece of the manifest that was made of these files. Raises `CheckpointChanged` rather than return other
        bytes: a change within one tick of the clock shows in the hash only."""
        data = self.read(manifest.layout.extents(piece))
        if not manifest.is_piece(piece, data):
            names = ", ".join(self.files[each.file].path for each in manifest.layout.extents(piece)[:3])
            raise CheckpointChanged(f"{names}: its bytes are not those that were published")
        return data

    def read(self, extents: Sequence[Extent]) -> memoryview:
        """The concatenated bytes of these ranges. Raises `CheckpointChanged` for a changed file."""
        return read_extents(self._read_file, extents)

    def _read_file(self, file: int, view: memoryview, offset: int) -> None:
        with self.opened(file) as descriptor:
            read_fully(descriptor, view, offset)


class FilesAsFound(PublishedFiles):
    """Files below a directory, in the order of their paths, as they were found."""

    def __init__(self, root: Path, files: list[SourceFile]) -> None:
        self.root = root
        self.files = files
        self.total_bytes = sum(file.size for file in files)

    @contextmanager
    def opened(self, file: int) -> Iterator[int]:
        """A file, open during the block. Raises `CheckpointChanged` for a change before or during it."""
        found = self.files[file]
        try:
            descriptor = os.open(self.root / found.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CheckpointChanged(f"{found.path}: is gone") from error
        try:
            _check_unchanged(os.fstat(descriptor), found)
            try:
                yield descriptor
            except EOFError:
                raise CheckpointChanged(f"{found.path}: became shorter while it was published") from None
            _check_unchanged(os.fstat(descriptor), found)
        finally:
            os.close(descriptor)

    def check(self) -> None:
        for number in range(len(self.files)):
            with self.opened(number):
                pass


def files_as_they_were(root: Path, manifest: Manifest, times: Sequence[tuple[int, int]]) -> FilesAsFound:
    """The files that a manifest was made of, perhaps by an earlier process: `times` are the mtime (ns) and the inode of
    each then. Raises `CheckpointChanged` for any difference, and `OSError`."""
    if len(times) != len(manifest.files):
        raise CheckpointChanged("there were other files")
    files = []
    for entry, (changed_ns, inode) in zip(manifest.files, times, strict=True):
        try:
            found = (root / entry.path).stat()
        except FileNotFoundError:
            raise CheckpointChanged(f"{entry.path}: is gone") from None
        if (found.st_size, found.st_mtime_ns, found.st_ino) != (entry.size, changed_ns, inode):
            raise CheckpointChanged(f"{entry.path}: changed since it was published")
        files.append(SourceFile(entry.path, entry.size, entry.mode, _stamp(found)))
    return FilesAsFound(root, files)


class SourceDirectory(FilesAsFound):
    """The chosen files below a directory, and what was left out."""

    def __init__(self, root: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """`include` and `exclude` are patterns for whole relative paths (`*` matches `/` too). Files that match no
        `include` (if given) or some `exclude` are left out, and bookkeeping of downloads (`bookkeeping_in`) that
        `include` does not name. Raises `OSError`, and `CheckpointRefused` for what cannot be published."""
        self._include = include
        self._exclude = exclude
        self.left_out: list[str] = []
        """Bookkeeping of downloads: files, and folders, which end with a slash."""
        self.excluded: list[str] = []
        """Files that `exclude` leaves out."""
        self.not_included: list[str] = []
        self.empty_folders: list[str] = []
        """Not part of a version."""
        super().__init__(root, sorted(self._find(root, ""), key=lambda file: file.path))
        if not self.files:
            which = " that matches" if include or exclude else ""
            which += nearest(include[0], self.not_included) if self.not_included else ""
            left = f" (left out: {', '.join(self.left_out[:4])})" if self.left_out else ""
            raise CheckpointRefused(f"{root}: there is no file to publish{which}{left}")

    def _find(self, folder: Path, prefix: str) -> list[SourceFile]:
        found = []
        entry = None
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if self._leaves_out(path, is_folder):
                    self.left_out.append(path + "/" * is_folder)
                elif is_folder:
                    found += self._find(folder / entry.name, path + "/")
                elif is_chosen(path, self._include, self._exclude):
                    found.append(_source_file(folder / entry.name, path))
                elif is_chosen(path, self._include, ()):
                    self.excluded.append(path)
                else:
                    self.not_included.append(path)
        if entry is None and prefix:
            self.empty_folders.append(prefix)
        return found

    def _leaves_out(self, path: str, is_folder: bool) -> bool:
        mark = bookkeeping_in(path)
        if not mark:
            return False
        if is_folder:
            return not any(mark in pattern for pattern in self._include)
        return not is_asked_for(path, mark, self._include)


def _source_file(place: Path, path: str) -> SourceFile:
    try:
        check_path(path)
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{error}; {_way_out(path)}") from None
    try:
        found = place.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise CheckpointRefused(f"{path}: a dangling link; --exclude it") from error
    if not stat.S_ISREG(found.st_mode):
        what = "a link to a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise CheckpointRefused(f"{path}: {what}; --exclude it")
    mode = stat.S_IMODE(found.st_mode) & 0o777
    return SourceFile(path, found.st_size, mode, _stamp(found))


def _way_out(path: str) -> str:
    if path.startswith(RESERVED_PREFIX):
        return (
            f"they belong to a fetch to this directory: publish its `{CURRENT}`, or --exclude "
            f"'{RESERVED_PREFIX}*'"
        )
    return "rename or --exclude it"


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_dev, found.st_ino


def _check_unchanged(found: os.stat_result, file: SourceFile) -> None:
    if found.st_size != file.size or _stamp(found) != file.stamp:
        raise CheckpointChanged(
            f"{file.path}: changed while it was published; publish again when no process writes to it"
        )


MODE: Final = 0o644
"""Of the fetched file."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SourceMemory(PublishedFiles):
    """One file in sealed memory. Close it when it is not published any more."""

    def __init__(self, descriptor: int, path: str) -> None:
        """`descriptor` stays the caller's. Raises `CheckpointRefused` for unsealed memory, and for an invalid path."""
        check_path(path)
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except (OSError, ValueError):  # no descriptor, or none of memory
            seals = 0
        if seals & SEALS != SEALS:
            raise CheckpointRefused(f"{path}: it is not in sealed memory")
        found = os.fstat(descriptor)
        self.files = [SourceFile(path, found.st_size, MODE, (0, found.st_dev, found.st_ino))]
        self.total_bytes = found.st_size
        self._descriptor = os.dup(descriptor)

    def opened(self, file: int) -> AbstractContextManager[int]:
        return nullcontext(self._descriptor)

    def check(self) -> None:
        """Does nothing: sealed memory cannot change."""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


MAX_LOOKED_INTO: Final = 4096
"""Files checked in one directory."""
MAX_NOTES: Final = 32
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
MAX_HEADER_READ: Final = 8 * 1024 * 1024
"""Only the length of a longer header is checked."""
POINTER_BYTES: Final = 4096
"""Upper bound of git-LFS pointers and error pages."""
INDEXES: Final = (SUFFIX + INDEX_SUFFIX, ".bin" + INDEX_SUFFIX)
"""Names of tensor indexes."""
UNFINISHED: Final = (".incomplete", ".part", ".tmp", ".download", ".crdownload", ".aria2")
"""Suffixes of files that are being downloaded."""
HUB_DOWNLOADS: Final = ".cache/huggingface/download"
SUSPECTED: Final = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|npz|model|json)$", re.IGNORECASE
)
NAMED: Final = 4
"""Paths listed in one text."""


def inspect(source: SourceDirectory, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Notes about the chosen files, a sentence each. Raises `CheckpointRefused` for a name in `include` that is no
    file, and for an index of files that the directory lacks; `OSError`."""
    paths = {file.path for file in source.files}
    notes = []
    if source.left_out:
        notes.append(f"left out, as it belongs to a download: {listed(source.left_out, NAMED)}")
    if source.empty_folders:
        notes.append(f"empty folders are left out: {listed(source.empty_folders, NAMED)}")
    for pattern in unmatched(paths, include):
        if not WILDCARDS & set(pattern):
            raise CheckpointRefused(
                f"{source.root}: there is no file {pattern!r} to publish"
                f"{nearest(pattern, [*paths, *source.not_included])}"
            )
        notes.append(f"no file matches --include {pattern!r}")
    for pattern in unmatched([*source.excluded, *source.left_out], exclude):
        notes.append(f"no file matches --exclude {pattern!r}")
    looked_into = [file for file in source.files if SUSPECTED.search(file.path)][:MAX_LOOKED_INTO]
    found = [note for file in looked_into for note in _look_into(source, file, paths)]
    notes += found[:MAX_NOTES]
    if len(found) > MAX_NOTES:
        notes.append(f"{len(found) - MAX_NOTES:,} more files are not what they are called")
    return notes


def _look_into(source: SourceDirectory, file: SourceFile, paths: set[str]) -> Iterator[str]:
    try:
        if file.path.endswith(INDEXES):
            yield from _check_index(source, file, paths)
        elif file.path.endswith(SUFFIX):
            header = _check_tensors(source.root / file.path, file.size)
            if header:
                yield f"{file.path}: {header}"
        elif file.size < POINTER_BYTES or file.path.endswith(".json"):
            _check_head(source.root / file.path, file.size)
    except BrokenFile as error:
        yield f"{file.path} is not what it is called, and is published as it is: {error}"


def _check_head(place: Path, size: int) -> None:
    """Raises `BrokenFile` for a file of a known other kind."""
    if cause := likely_cause(_read(place, HEAD_BYTES), size):
        raise BrokenFile(cause)


def _check_tensors(place: Path, size: int) -> str:
    """The faults of single tensors; empty for most files. Raises `BrokenFile`."""
    end = header_end(_read(place, HEAD_BYTES), size)
    if end > MAX_HEADER_READ:
        return ""
    bad = read_header(_read(place, end), size).bad
    listed = [f"{name!r} ({why})" for name, why in list(bad.items())[:NAMED]]
    return f"{len(bad):,} tensors cannot be read from it: {', '.join(listed)}" if bad else ""


def _check_index(source: SourceDirectory, file: SourceFile, paths: set[str]) -> Iterator[str]:
    """Raises `CheckpointRefused` for files that the directory lacks, and `BrokenFile`."""
    if file.size > MAX_INDEX_BYTES:
        raise BrokenFile(f"an index of {file.size:,} bytes; at most {MAX_INDEX_BYTES:,} are read")
    weight_map = read_weight_map(_read(source.root / file.path, file.size))
    folder = file.path.rpartition("/")[0]
    named = {path_in_index(folder, each) for each in set(weight_map.values())}
    missing = sorted(named - paths)
    absent = sorted(named - paths - {*source.excluded, *source.not_included})
    if absent:
        raise CheckpointRefused(
            f"{source.root}: {file.path} names {listed(absent, NAMED)}, and there is no such file"
            f"{_why(source, absent[0])}; complete the directory, or leave out the index (--exclude {file.path!r})"
        )
    if missing:
        yield f"{file.path} names {listed(missing, NAMED)}, which --include and --exclude leave out"


def _why(source: SourceDirectory, absent: str) -> str:
    paths = [file.path for file in source.files]
    around = [*source.left_out, *source.excluded, *source.not_included, *paths]
    if any(path.startswith(f"{absent}.") and path.endswith(UNFINISHED) for path in around):
        return " (its download is not finished)"
    if any((source.root / HUB_DOWNLOADS).glob("**/*.incomplete")):
        return f" (a download is not finished, by {HUB_DOWNLOADS})"
    return " (perhaps the download or copy was not finished, or chose other files)"


def _read(place: Path, count: int) -> bytes:
    with open(place, "rb") as file:
        found: bytes = os.pread(file.fileno(), count, 0)
    return found
