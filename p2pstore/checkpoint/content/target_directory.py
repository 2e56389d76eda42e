"""Where a version is put when it is fetched. Shell; blocking, for worker threads.

    DIR/VERSION/...           a complete version; VERSION is 32 hexadecimal digits
                              or some files of it: then DIR/.p2pstore/VERSION.part says which
    DIR/current               a link to the one that counts, switched at once when another is complete
    DIR/.p2pstore/            manifests, what is fetched, which pieces of it are there, a lock

What is fetched grows in `.p2pstore/VERSION.partial` and is called DIR/VERSION when it is complete and on the disk: so
no directory of a version is ever half. With `flat` the files go to DIR itself in the end, each at once, and there are
no versions. Before the first piece comes, everything that could fail is done: directories, permissions, room on the
disk.

Files that were not asked for and share a piece with those that were lie in `.p2pstore/VERSION.rest`: a piece that is
here is here whole, and can be verified again and passed on. When more files of a version are fetched later, they join
those that are there, each at once; then the record of them changes.

What is there already is not fetched: pieces of the same version from an earlier, interrupted time; files and pieces
that an older version in DIR has as well, or, with `flat`, DIR itself. All of that is verified by hash before it counts,
but pieces written since the machine was started, which were.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.bulk_reading import BulkReader
from p2pstore.checkpoint.content.content_paths import CURRENT
from p2pstore.checkpoint.content.directory_versions import (
    STATE,
    forgetting_versions,
    part_of,
    removing_tree,
    switch_current,
    sync,
    versions_in,
    write_part,
)
from p2pstore.checkpoint.content.hashing import STEP_BYTES, PieceHashes, neighbours
from p2pstore.checkpoint.content.local_disks import is_local_directory
from p2pstore.checkpoint.content.manifest import (
    Manifest,
    SignedManifest,
    format_version,
    unchanged_pieces,
)
from p2pstore.checkpoint.content.piece_map import PieceMap, full_map, map_of, pieces_in
from p2pstore.checkpoint.content.piece_record import PieceRecord, boot_id
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.errors import (
    CapacityExceeded,
    CheckpointRefused,
    ConfigError,
    P2PStoreError,
    ProtocolError,
)
from p2pstore.state.folder import SAFELY, Folder, read_regular_file
from p2pstore.wire import decode_body, encode_body

DEFAULT_KEEP: Final = 2
FILES_A_STEP: Final = 32
"""So that a disk that needs a second for each still shows progress twice a minute."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class DirectoryInUse(ConfigError):
    """Another fetch goes to this directory now."""


class TargetDirectory:
    """One version on its way into a directory. Use: `for _ in target.prepare(): ...`, then `write` pieces, then
    `commit`; `close` in any case. `write` and `read` may be called from several threads."""

    def __init__(
        self,
        directory: Path,
        signed: SignedManifest,
        *,
        flat: bool = False,
        chosen: Collection[int] | None = None,
    ) -> None:
        """`signed` must have been verified. `chosen`: the files that are wanted, by number; None: all. Raises
        `ConfigError` when the directory cannot be used: it says why (`DirectoryInUse`: at present), and
        `CapacityExceeded` when the disk is full."""
        self.manifest = signed.manifest
        self.version = signed.version
        self.directory = directory
        self._flat = flat
        self._signed = signed
        self._name = format_version(self.version)
        self._state = directory / STATE
        self._partial = self._state / f"{self._name}.partial"
        self._rest = self._state / f"{self._name}.rest"
        self._complete = directory if flat else directory / self._name
        self._root = self._partial
        self._switch = threading.Lock()
        self._record: PieceRecord | None = None
        self._all = frozenset(range(len(self.manifest.files)))
        self._chosen = self._all if chosen is None else frozenset(chosen)
        self._there: frozenset[int] = frozenset()
        """Files of the version that were in their place before."""
        self._moved: set[int] = set()
        """Files that are in their place since."""
        self._durable: set[Path] = set()
        self.copies: Mapping[int, Sequence[Extent]] = {}
        """Of the pieces that are needed, those to be made of others. Known when it is prepared."""
        self._find_needed()
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            if self._state.is_symlink():
                raise ConfigError(f"{self._state} is a link: put a directory in its place")
            self.is_local = is_local_directory(self._state)
            """Whether it is on a disk or in memory of this machine."""
            with Folder(self._state) as state:
                self._lock = state.open("lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    @property
    def have(self) -> PieceMap:
        """The pieces that are here and verified."""
        return self.needed if self._record is None else self._record.have

    @property
    def whole(self) -> bool:
        """Whether all files are wanted, or were there before."""
        return self._chosen == self._all

    @property
    def committed(self) -> bool:
        """Whether the version is in its place."""
        return self._root == self._complete

    def prepare(self) -> Iterator[None]:
        """All that comes before the first piece, in steps of a fraction of a second, so that whoever runs them may
        stop between two.

        Raises `CapacityExceeded` when the disk has no room, `ConfigError` when something cannot be written, and
        `OSError` for other failures.
        """
        if self.committed:
            return
        try:
            yield from self._prepare()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CapacityExceeded(f"{self.directory}: {error.strerror}") from error
            if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                raise ConfigError(
                    f"{error.filename}: cannot be written: {error.strerror}"
                ) from error
            raise

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a piece and keep it. False when these are not its bytes. Raises `OSError`."""
        record = self._require_record()
        if not self.manifest.is_piece(piece, data):
            return False
        view = memoryview(data)
        for extent in self.manifest.layout.extents(piece):
            if extent.file not in self._there:
                _write_fully(self._place(extent.file), view[: extent.length], extent.offset)
            view = view[extent.length :]
        record.add(piece)
        return True

    def read(self, piece: int, room: memoryview | None = None) -> memoryview:
        """A piece that is here, for others; in `room` where there is some. Raises `OSError`."""
        return self.read_extents(self.manifest.layout.extents(piece), room)

    def read_extents(self, extents: Sequence[Extent], room: memoryview | None = None) -> memoryview:
        """Ranges of files, one behind the other, in pieces that are here; in `room` where there is some. Raises
        `OSError`."""
        return _read_extents(self._read_own, extents, room)

    def opened(self, file: int) -> AbstractContextManager[int]:
        """A file of a version that is in its place, open for the time of a block. Raises `OSError`."""
        return _opened(self._place(file))

    def commit(self, keep: int = DEFAULT_KEEP) -> None:
        """Everything is here: make it durable, put it in its place, and have `current` name it. Of complete versions
        `keep` stay, the newest, and this one. Nothing more is written here: another version may be fetched to the
        directory. Raises `ValueError` when a piece is missing, and `OSError`."""
        for _ in self.finishing(keep):
            pass

    def place(self, keep: int = DEFAULT_KEEP) -> None:
        """As `commit`, but `current` stays: `switch_current` is to follow, some time. What `current` names stays, too.
        Raises `ValueError` when a piece is missing, and `OSError`."""
        for _ in self.finishing(keep, use=False):
            pass

    def finishing(self, keep: int = DEFAULT_KEEP, *, use: bool = True) -> Iterator[None]:
        """`commit`, or, without `use`, `place`, in steps of some files each. `make_durable` may be called before, by
        several threads: one file after the other takes as long as the disk needs for each. Raises like `commit`."""
        yield from self._finish(keep)
        if use and not self._flat:
            switch_current(self.directory, self.version)
            yield from forgetting_versions(self.directory, keep)
        self._let_go()

    def unsynced(self) -> list[Path]:
        """The files and folders that `commit` has to make durable."""
        if self.committed:
            return []
        folders = {self._partial: None}
        for place in self._numbers:
            folder = place.parent
            while folder not in folders and folder.is_relative_to(self._state):
                folders[folder] = None
                folder = folder.parent
        return [place for place in (*self._numbers, *folders) if place not in self._durable]

    def make_durable(self, places: Sequence[Path]) -> int:
        """Have some of `unsynced` be on the disk, files with their permissions; returns their bytes. May be called
        by several threads. Raises `OSError`."""
        total = 0
        for place in places:
            number = self._numbers.get(place)
            if number is not None:
                place.chmod(self.manifest.files[number].mode | 0o400)
                total += self.manifest.files[number].size
            sync(place)
            self._durable.add(place)
        return total

    @cached_property
    def _numbers(self) -> dict[Path, int]:
        """The files that come, by the place where they are written."""
        return {self._place(number): number for number in sorted(self._held - self._there)}

    def _finish(self, keep: int) -> Iterator[None]:
        if not self.committed:
            record = self._require_record()
            if self.needed & ~record.have:
                raise ValueError("pieces are missing")
            for places in in_steps(self.unsynced()):
                self.make_durable(places)
                yield
            if self._flat or self._there:
                yield from self._move_files()
            with self._switch:
                if not self._flat and not self._there:
                    self._say_which()
                    self._partial.rename(self._complete)
                self._root = self._complete
            if self._there:
                self._say_which()
            sync(self.directory)
            record.close()
            self._record = None
            self._state_file("pieces").unlink()
        os.utime(self._state_file("manifest"))  # the newest
        if not self._flat:
            yield from forgetting_versions(self.directory, keep, self._name)
        yield from self._forget_partials()

    def _say_which(self) -> None:
        """Which files are in their place, unless all of them are."""
        part = None if self._chosen == self._all else self._chosen
        write_part(self.directory, self.version, part, len(self._all))

    def close(self) -> None:
        """Let go of the directory; what is there stays, and the next one goes on with it."""
        if self._record is not None:
            self._record.close()
            self._record = None
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- preparing ---------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryInUse(
                f"{self.directory}: another fetch goes to it now: wait for it, or choose another directory"
            ) from error
        current = self.directory / CURRENT
        if not self._flat and current.exists() and not current.is_symlink():
            raise ConfigError(f"{current} is not a link: choose another directory, or --flat")
        if not self._flat and self._complete.is_dir():
            part = part_of(self.directory, self.version, len(self._all))
            self._there = self._all if part is None else part
            self._chosen |= self._there
            self._find_needed()
            if not all(map(self._is_whole, self._there)):
                raise ConfigError(f"{self._complete}: was changed; remove it to fetch it again")
            if self._chosen == self._there:
                self._root = self._complete
                _replace_file(self._state_file("manifest"), encode_body(self._signed))
                return
        try:
            self._partial.mkdir(exist_ok=True)
            _replace_file(self._state_file("manifest"), encode_body(self._signed))
            self._record = PieceRecord(
                self._state_file("pieces"), self.version, self.manifest.layout.count, boot_id()
            )
        except OSError as error:
            raise _unusable(self.directory, error) from error

    def _find_needed(self) -> None:
        """The pieces of the files that are wanted, and all files that are in them."""
        layout = self.manifest.layout
        if self._chosen == self._all:
            self.needed, self._held = full_map(layout.count), self._all
            return
        pieces = {piece for number in self._chosen for piece in layout.pieces_of(number)}
        self.needed = map_of(pieces)
        self._held = self._chosen | {
            extent.file for piece in pieces for extent in layout.extents(piece)
        }

    def _prepare(self) -> Iterator[None]:
        record = self._require_record()
        self._drop_what_is_not_needed(record)
        self._drop_what_is_gone(record)
        self._add_what_is_there(record)
        if not record.is_certain:
            for piece in pieces_in(record.have):
                if not self.manifest.is_piece(piece, self.read(piece)):
                    record.remove(1 << piece)
                yield
            record.now_certain()
        older = [(self.directory, self.manifest)] if self._flat else list(self._older_versions())
        for root, manifest in older:
            yield from self._link_files(root, manifest)
        yield
        yield from self._allocate()
        for root, manifest in older:
            yield from self._copy_pieces(root, manifest)
        self.copies = self.manifest.copies_among(self.needed, self.have)

    def _drop_what_is_not_needed(self, record: PieceRecord) -> None:
        """Of an earlier fetch of other files, which was interrupted."""
        if record.have & ~self.needed:
            record.remove(record.have & ~self.needed)
        kept = {self._place(number) for number in self._chosen}
        for folder, _, names in os.walk(self._partial):
            for found in (Path(folder, name) for name in names):
                if found not in kept:
                    found.unlink()

    def _add_what_is_there(self, record: PieceRecord) -> None:
        """Pieces of the files that are in their place, and of those beside them."""
        if not self._there:
            return
        for number in self._chosen - self._there:
            rest, place = self._rest / self.manifest.files[number].path, self._place(number)
            if rest.is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(rest, place)
        layout = self.manifest.layout
        for piece in {each for number in self._there for each in layout.pieces_of(number)}:
            if all(self._is_whole(extent.file) for extent in layout.extents(piece)):
                record.add(piece)

    def _drop_what_is_gone(self, record: PieceRecord) -> None:
        """A file that was removed or cut takes its pieces with it."""
        gone = 0
        for number in self._held - self._there:
            pieces = map_of(self.manifest.layout.pieces_of(number))
            place = self._place(number)
            if not self._is_whole(number):
                gone |= pieces
            elif pieces & ~record.have and place.stat().st_nlink > 1:
                place.unlink()  # to write to it would be to write to another version
                gone |= pieces
        if gone & record.have:
            record.remove(gone)

    def _older_versions(self) -> Iterator[tuple[Path, Manifest]]:
        """Complete versions in the directory whose manifests are there, the newest first."""
        for name in reversed(versions_in(self.directory)):
            try:
                signed = decode_body(
                    SignedManifest, read_regular_file(self._state_file("manifest", name))
                )
                yield self.directory / name, signed.manifest
            except (CheckpointRefused, ProtocolError, ConfigError):
                continue  # of a newer format, or damaged: it is of no use here

    def _link_files(self, root: Path, manifest: Manifest) -> Iterator[None]:
        """Large files that are the same elsewhere need no room of their own."""
        record = self._require_record()
        layout = self.manifest.layout
        if manifest.piece_bytes != layout.piece_bytes:
            return
        known = {
            (file.size, manifest.hashes_of(number)): number
            for number, file in enumerate(manifest.files)
            if file.size >= layout.piece_bytes
        }
        for number in sorted(self._held - self._there):
            file = self.manifest.files[number]
            if file.size < layout.piece_bytes:
                continue
            pieces = map_of(layout.pieces_of(number))
            other = known.get((file.size, self.manifest.hashes_of(number)))
            if other is None or record.have & pieces:
                continue
            if manifest.files[other].mode != file.mode:
                continue  # a file has one mode, whatever it is called
            found = root / manifest.files[other].path
            if not (yield from self._is_file(found, number)):
                continue
            place = self._place(number)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            try:
                os.link(found, place)
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EXDEV):
                    raise
                continue  # this file system has no links; the pieces are copied
            for piece in pieces_in(pieces):
                record.add(piece)

    def _is_file(self, found: Path, number: int) -> Generator[None, None, bool]:
        """Whether a file of another version, as large as one of this, has the same bytes."""
        if found.is_symlink() or not found.is_file():
            return False
        layout = self.manifest.layout
        pieces = layout.pieces_of(number)
        hashes = PieceHashes(layout, lambda _: _opened(found), BulkReader())
        try:
            for run in neighbours(layout, pieces, STEP_BYTES):
                hashes.hash_run(run)
                yield
        except (EOFError, FileNotFoundError):
            return False
        return hashes.of(pieces) == self.manifest.hashes_of(number)

    def _allocate(self) -> Iterator[None]:
        """Room for all files, in directories of their own."""
        coming = sorted(self._held - self._there)
        files = [self.manifest.files[number] for number in coming]
        places = [self._place(number) for number in coming]
        needed = 0
        for file, place in zip(files, places, strict=True):
            with suppress(FileNotFoundError):
                needed -= min(file.size, 512 * place.stat().st_blocks)
            needed += file.size
        room = os.statvfs(self._partial)
        if needed > room.f_bavail * room.f_frsize:
            raise CapacityExceeded(
                f"{self.directory}: {needed:,} bytes are needed, and {room.f_bavail * room.f_frsize:,} are free"
            )
        for count, (file, place) in enumerate(zip(files, places, strict=True)):
            place.parent.mkdir(parents=True, exist_ok=True)
            _allocate_file(place, file.size)
            if count % FILES_A_STEP == 0:
                yield

    def _copy_pieces(self, root: Path, manifest: Manifest) -> Iterator[None]:
        """Pieces that are the same elsewhere."""
        for piece, other in unchanged_pieces(manifest, self.manifest).items():
            if not self.needed & ~self.have & 1 << piece:
                continue
            with suppress(FileNotFoundError, EOFError):
                self.write(
                    piece, _read_extents(_reader(root, manifest), manifest.layout.extents(other))
                )
            yield

    # --- the end -----------------------------------------------------------------------------

    def _move_files(self) -> Iterator[None]:
        """Each at once; their folders are on the disk when it ends."""
        folders: dict[Path, None] = {}
        for count, number in enumerate(sorted(self._chosen - self._there)):
            place = self._complete / self.manifest.files[number].path
            place.parent.mkdir(parents=True, exist_ok=True)
            with self._switch:
                self._place(number).replace(place)
                self._moved.add(number)
            folder = place.parent
            while folder not in folders and folder.is_relative_to(self._complete):
                folders[folder] = None
                folder = folder.parent
            if count % FILES_A_STEP == 0:
                yield
        for folder in folders:
            sync(folder)
            yield

    def _forget_partials(self) -> Iterator[None]:
        """What was begun of other versions, or is left of one that was being removed."""
        for left in [*self._state.glob("*.partial"), *self._state.glob("*.going")]:
            yield from removing_tree(left)
        rests = set() if self._flat else {f"{name}.rest" for name in versions_in(self.directory)}
        rests.add(self._rest.name)
        if self._chosen == self._all:
            rests.remove(self._rest.name)
        for left in self._state.glob("*.rest"):
            if left.name not in rests:
                yield from removing_tree(left)
        for left in [*self._state.glob("*.pieces"), *self._state.glob(f"{CURRENT}.*.new")]:
            left.unlink()
        if not self._flat:
            complete = {self._name, *versions_in(self.directory)}
            for left in self._state.glob("*.manifest"):
                if left.name.removesuffix(".manifest") not in complete:
                    left.unlink()

    # --- files -------------------------------------------------------------------------------

    def _state_file(self, kind: str, name: str | None = None) -> Path:
        return self._state / f"{name or self._name}.{kind}"

    def _place(self, number: int) -> Path:
        path = self.manifest.files[number].path
        if number in self._there or number in self._moved:
            return self._complete / path
        if number not in self._chosen:
            return self._rest / path
        return self._root / path

    def _read_own(self, number: int, view: memoryview, offset: int) -> None:
        """Some bytes of a file, which may be moved to its place at this moment."""
        try:
            _read_fully(self._place(number), view, offset)
        except FileNotFoundError:
            with self._switch:
                place = self._place(number)
            _read_fully(place, view, offset)

    def _is_whole(self, number: int) -> bool:
        """Whether the file is one, and as long as it should be."""
        place = self._place(number)
        if place.is_symlink() or not place.is_file():
            return False
        return place.stat().st_size == self.manifest.files[number].size

    def _require_record(self) -> PieceRecord:
        if self._record is None:
            raise ValueError("the version is complete, or the directory was closed")
        return self._record


def _unusable(directory: Path, error: OSError) -> P2PStoreError:
    kind = CapacityExceeded if error.errno in _NO_ROOM else ConfigError
    return kind(f"{directory}: cannot be written to: {error.strerror}")


def in_steps(places: Sequence[Path]) -> Iterator[Sequence[Path]]:
    """`FILES_A_STEP` of them at a time."""
    for start in range(0, len(places), FILES_A_STEP):
        yield places[start : start + FILES_A_STEP]


def _read_extents(
    read: Callable[[int, memoryview, int], None],
    extents: Sequence[Extent],
    room: memoryview | None = None,
) -> memoryview:
    """The bytes of ranges of files, one behind the other; in `room` where there is some. `read` fills a view with a
    file's bytes from an offset on."""
    length = sum(extent.length for extent in extents)
    data = memoryview(bytearray(length)) if room is None else room[:length]
    view = data
    for file, offset, count in extents:
        read(file, view[:count], offset)
        view = view[count:]
    return data


def _reader(root: Path, manifest: Manifest) -> Callable[[int, memoryview, int], None]:
    """Reads files of a version that is in a directory."""

    def read(file: int, view: memoryview, offset: int) -> None:
        _read_fully(root / manifest.files[file].path, view, offset)

    return read


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_fully(path: Path, view: memoryview, offset: int) -> None:
    with _opened(path) as descriptor:
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


def _allocate_file(path: Path, size: int) -> None:
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


def _replace_file(path: Path, content: bytes) -> None:
    with Folder(path.parent) as folder:
        try:
            if folder.read(path.name) == content:
                return
        except (FileNotFoundError, ConfigError):  # a link or a pipe is replaced
            pass
        folder.replace(path.name, content, 0o666)
