"""Files of one version in a directory: their places while it is fetched, and reading and writing them. Shell; blocking,
for worker threads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.directory_versions import STATE, sync
from p2pstore.checkpoint.content.manifest import Manifest, format_version
from p2pstore.checkpoint.content.pieces import Extent, PieceMap, full_map, map_of
from p2pstore.errors import ConfigError
from p2pstore.state.folder import Folder
from p2pstore.state.regular_file import SAFELY

FILES_A_STEP: Final = 32
"""A disk that takes a second a file still shows progress twice a minute."""
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

ReadFile = Callable[[int, memoryview, int], None]
"""Fills a view with a file's bytes from an offset on; files by number."""


class VersionFiles:
    """Places of a version's files, by their numbers in the manifest.

    `chosen` files are wanted. `held` are those and others that share a piece with them. `there` were in their place
    before this fetch. `needed` are the pieces of the chosen files.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        version: bytes,
        *,
        flat: bool,
        chosen: Collection[int] | None,
    ) -> None:
        """`chosen`: None for all."""
        self.directory = directory
        self.manifest = manifest
        self.flat = flat
        self.name = format_version(version)
        self.state = directory / STATE
        self.partial = self.state / f"{self.name}.partial"
        self.rest = self.state / f"{self.name}.rest"
        self.complete = directory if flat else directory / self.name
        self.all = frozenset(range(len(manifest.files)))
        self.chosen = self.all if chosen is None else frozenset(chosen)
        self.there: frozenset[int] = frozenset()
        self.held = self.chosen
        self.needed: PieceMap = 0
        self.committed = False
        """Whether the version is in its place."""
        self._moved: set[int] = set()
        """Files that this fetch has put in their place."""
        self._switch = threading.Lock()
        self._find_needed()

    @property
    def coming(self) -> list[int]:
        """Files to be fetched, in order."""
        return sorted(self.held - self.there)

    def add_there(self, there: Collection[int]) -> None:
        """Set the files that were in their place before."""
        self.there = frozenset(there)
        self.chosen |= self.there
        self._find_needed()

    def _find_needed(self) -> None:
        layout = self.manifest.layout
        if self.chosen == self.all:
            self.needed, self.held = full_map(layout.count), self.all
            return
        pieces = {piece for number in self.chosen for piece in layout.pieces_of(number)}
        self.needed = map_of(pieces)
        self.held = self.chosen | {
            extent.file for piece in pieces for extent in layout.extents(piece)
        }

    def state_file(self, kind: str, name: str | None = None) -> Path:
        """A file about a version, by default this one."""
        return self.state / f"{name or self.name}.{kind}"

    def place(self, number: int) -> Path:
        """Where a file is now."""
        path = self.manifest.files[number].path
        if number in self.there or number in self._moved:
            return self.complete / path
        if number not in self.chosen:
            return self.rest / path
        return (self.complete if self.committed else self.partial) / path

    def is_whole(self, number: int) -> bool:
        """Whether the file is a regular one of the right length."""
        place = self.place(number)
        if place.is_symlink() or not place.is_file():
            return False
        return place.stat().st_size == self.manifest.files[number].size

    def read(self, extents: Sequence[Extent], room: memoryview | None = None) -> memoryview:
        """Concatenated ranges of files, in `room` if given; files may be moved meanwhile. Raises `OSError`."""
        return read_extents(self._read_file, extents, room)

    def _read_file(self, number: int, view: memoryview, offset: int) -> None:
        try:
            _read_fully(self.place(number), view, offset)
        except FileNotFoundError:
            with self._switch:
                place = self.place(number)
            _read_fully(place, view, offset)

    def write(self, piece: int, data: memoryview) -> None:
        """Write a piece to its files, but for those in their place. Raises `OSError`."""
        for extent in self.manifest.layout.extents(piece):
            if extent.file not in self.there:
                _write_fully(self.place(extent.file), data[: extent.length], extent.offset)
            data = data[extent.length :]

    def moving(self) -> Iterator[None]:
        """Move the fetched files to their places one by one, in steps; their folders are durable at the end."""
        folders: dict[Path, None] = {}
        for count, number in enumerate(sorted(self.chosen - self.there)):
            place = self.complete / self.manifest.files[number].path
            place.parent.mkdir(parents=True, exist_ok=True)
            with self._switch:
                self.place(number).replace(place)
                self._moved.add(number)
            folder = place.parent
            while folder not in folders and folder.is_relative_to(self.complete):
                folders[folder] = None
                folder = folder.parent
            if count % FILES_A_STEP == 0:
                yield
        for folder in folders:
            sync(folder)
            yield

    def commit(self, before: Callable[[], None] | None = None) -> None:
        """Put the version in its place. `before`: the whole folder is moved, after this; None: its files were."""
        with self._switch:
            if before is not None:
                before()
                self.partial.rename(self.complete)
            self.committed = True


def read_extents(
    read: ReadFile, extents: Sequence[Extent], room: memoryview | None = None
) -> memoryview:
    """Concatenated ranges of files, in `room` if given."""
    length = sum(extent.length for extent in extents)
    data = memoryview(bytearray(length)) if room is None else room[:length]
    view = data
    for file, offset, count in extents:
        read(file, view[:count], offset)
        view = view[count:]
    return data


def reader(root: Path, manifest: Manifest) -> ReadFile:
    """Reads files of a complete version in a folder."""

    def read(file: int, view: memoryview, offset: int) -> None:
        _read_fully(root / manifest.files[file].path, view, offset)

    return read


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read the file with."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_fully(path: Path, view: memoryview, offset: int) -> None:
    with opened(path) as descriptor:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise EOFError(f"{path} is shorter than it should be")
            view = view[count:]
            offset += count


def _write_fully(path: Path, view: memoryview, offset: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | SAFELY)
    try:
        while view:
            count = os.pwrite(descriptor, view, offset)
            view = view[count:]
            offset += count
    finally:
        os.close(descriptor)


def allocate_file(path: Path, size: int) -> None:
    """Make a file of this length, with its blocks allocated where the file system can. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | SAFELY, 0o666)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        if size:
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                if error.errno not in _CANNOT_ALLOCATE:
                    raise
    finally:
        os.close(descriptor)


def replace_if_changed(path: Path, content: bytes) -> None:
    """Replace a file, a link or a pipe, unless it has this content. Raises `OSError`."""
    with Folder(path.parent) as folder:
        try:
            if folder.read(path.name) == content:
                return
        except (FileNotFoundError, ConfigError):  # a link or a pipe is replaced
            pass
        folder.replace(path.name, content, 0o666)
