"""The files of a directory that is published: which, and their pieces. Shell; blocking, for worker threads.

What a name leads to is published, so symbolic links to files are followed (model caches are full of them); what would
be left out silently, or never end, is refused: links to directories, pipes, devices, names that are not UTF-8. Size and
time of each file are taken in the beginning. One that is not the same later is `CheckpointChanged`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2pstore.checkpoint.content.content_paths import CURRENT, RESERVED_PREFIX, check_path
from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.swarm.choosing import bookkeeping_in, is_asked_for, is_chosen, nearest
from p2pstore.errors import CheckpointChanged, CheckpointRefused


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was found."""

    path: str
    size: int
    mode: int
    stamp: tuple[int, int, int]
    """Time of the last change of its content (ns), device and inode."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of tensors; a file has none."""


class SourceDirectory:
    """The files below a directory, in the order of their paths."""

    def __init__(
        self, root: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        """`include` and `exclude` are patterns for whole relative paths, in which `*` matches anything, `/` too; what
        matches no `include` (if there are any) or some `exclude` is left out, and so is what belongs to a download
        (`bookkeeping_in`), unless `include` names it. Raises `OSError`, and `CheckpointRefused` for what cannot be
        published."""
        self.root = root
        self._include = include
        self._exclude = exclude
        self.left_out: list[str] = []
        """What belongs to a download: files, and folders, which end with a slash."""
        self.excluded: list[str] = []
        """What `exclude` leaves out."""
        self.not_included: list[str] = []
        self.empty_folders: list[str] = []
        """A version has none of them."""
        self.files = sorted(self._find(root, ""), key=lambda file: file.path)
        self.total_bytes = sum(file.size for file in self.files)
        """Of all files together."""
        if not self.files:
            which = " that matches" if include or exclude else ""
            which += nearest(include[0], self.not_included) if self.not_included else ""
            left = f" (left out: {', '.join(self.left_out[:4])})" if self.left_out else ""
            raise CheckpointRefused(f"{root}: there is no file to publish{which}{left}")

    @classmethod
    def as_it_was(
        cls, root: Path, manifest: Manifest, times: Sequence[tuple[int, int]]
    ) -> SourceDirectory:
        """The directory that a manifest was made of, perhaps long ago: `times` are the time of the last change (ns) and
        the inode of each file then. Raises `CheckpointChanged` when anything is not what it was, and `OSError`."""
        source = cls.__new__(cls)
        source.root, source._include, source._exclude = root, (), ()
        source.left_out, source.excluded, source.not_included = [], [], []
        source.empty_folders = []
        if len(times) != len(manifest.files):
            raise CheckpointChanged("there were other files")
        source.files = []
        for entry, (changed_ns, inode) in zip(manifest.files, times, strict=True):
            try:
                found = (root / entry.path).stat()
            except FileNotFoundError:
                raise CheckpointChanged(f"{entry.path}: is gone") from None
            if (found.st_size, found.st_mtime_ns, found.st_ino) != (entry.size, changed_ns, inode):
                raise CheckpointChanged(f"{entry.path}: changed since it was published")
            source.files.append(SourceFile(entry.path, entry.size, entry.mode, _stamp(found)))
        source.total_bytes = sum(file.size for file in source.files)
        return source

    def read(self, extents: Sequence[Extent]) -> bytearray:
        """The bytes of these ranges, one behind the other. Raises `CheckpointChanged` when a file is not what it
        was."""
        data = bytearray(sum(extent.length for extent in extents))
        view = memoryview(data)
        for extent in extents:
            file = self.files[extent.file]
            part, view = view[: extent.length], view[extent.length :]
            with self._open(file) as descriptor:
                _read_fully(descriptor, part, extent.offset, file)
                _check_unchanged(os.fstat(descriptor), file)
        return data

    @contextmanager
    def opened(self, file: int) -> Iterator[int]:
        """A file, open for the time of the block. Raises `CheckpointChanged` when it is not what it was, before or
        after that."""
        found = self.files[file]
        with self._open(found) as descriptor:
            try:
                yield descriptor
            except EOFError:
                raise _became_shorter(found) from None
            _check_unchanged(os.fstat(descriptor), found)

    def check(self) -> None:
        """Raises `CheckpointChanged` when any file is not what it was."""
        for file in self.files:
            with self._open(file):
                pass

    def read_piece(self, manifest: Manifest, piece: int) -> bytearray:
        """A piece of the manifest that was made of this directory. Raises `CheckpointChanged` rather than give other
        bytes: a change within the same tick of the clock shows in the hash only."""
        data = self.read(manifest.layout.extents(piece))
        if not manifest.is_piece(piece, data):
            names = ", ".join(
                self.files[each.file].path for each in manifest.layout.extents(piece)[:3]
            )
            raise CheckpointChanged(f"{names}: not the bytes that were published")
        return data

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

    def _open(self, file: SourceFile) -> _Descriptor:
        try:
            descriptor = os.open(self.root / file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CheckpointChanged(f"{file.path}: is gone") from error
        try:
            _check_unchanged(os.fstat(descriptor), file)
        except BaseException:
            os.close(descriptor)
            raise
        return _Descriptor(descriptor)


class _Descriptor:
    """An open file, closed when its block ends."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> int:
        return self._number

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


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
        raise CheckpointRefused(f"{path}: a link to nothing; --exclude it") from error
    if not stat.S_ISREG(found.st_mode):
        what = "a link to a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise CheckpointRefused(f"{path}: {what}; --exclude it")
    mode = stat.S_IMODE(found.st_mode) & 0o777
    return SourceFile(path, found.st_size, mode, _stamp(found))


def _way_out(path: str) -> str:
    """What to do about a path that cannot be published."""
    if path.startswith(RESERVED_PREFIX):
        return (
            f"they belong to whoever fetched to this directory: publish its `{CURRENT}`, or --exclude "
            f"'{RESERVED_PREFIX}*'"
        )
    return "rename or --exclude it"


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_dev, found.st_ino


def _check_unchanged(found: os.stat_result, file: SourceFile) -> None:
    if found.st_size != file.size or _stamp(found) != file.stamp:
        raise CheckpointChanged(
            f"{file.path}: changed while it was published; publish again when nobody writes to it"
        )


def _became_shorter(file: SourceFile) -> CheckpointChanged:
    return CheckpointChanged(f"{file.path}: became shorter while it was published")


def _read_fully(descriptor: int, view: memoryview, offset: int, file: SourceFile) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise _became_shorter(file)
        view = view[count:]
        offset += count
