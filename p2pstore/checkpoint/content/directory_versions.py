"""The versions in a directory: which are there, which have some files only, which one `current` names, and the record
of an unfinished one's pieces. Shell; blocking.

Followers ignore a version with some files only, and it is not passed on as a whole: `DIR/.p2pstore/VERSION.part` names
its files, and is written before them.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.manifest import (
    CURRENT,
    RESERVED_PREFIX,
    VERSION_BYTES,
    Manifest,
    SignedManifest,
    choose_files,
    format_version,
)
from p2pstore.checkpoint.content.pieces import (
    NO_PIECES,
    Extent,
    PieceMap,
    full_map,
    map_of,
    pack_map,
    pieces_in,
    unpack_map,
)
from p2pstore.errors import CheckpointRefused, ConfigError, ProtocolError
from p2pstore.state.folder import SAFELY, Folder, read_regular_file, replace_file
from p2pstore.wire import Message, decode_body, encode_body

STATE: Final = RESERVED_PREFIX
_VERSION_DIGITS: Final = 32
FILES_A_STEP: Final = 32
"""A disk that takes a second a file still shows progress twice a minute."""
REMOVED_A_STEP: Final = 256
"""Files to unlink between two looks at a cancellation."""
_PART_FORMAT: Final = 1
MAGIC: Final = b"P2PSPCS\0"
FORMAT: Final = 1
_HEADER: Final = struct.Struct(f"<8sII{VERSION_BYTES}s36s")
"""Magic, format, pieces, version, boot id."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class _Part(Message, frozen=True):
    """The files of a version that are there: a bit a file, lowest first."""

    format: int
    files: bytes


def current_version(directory: Path) -> bytes:
    """The version that `current` names; empty for none. Raises `ConfigError` when it is no link, and `OSError`."""
    current = directory / CURRENT
    if current.exists() and not current.is_symlink():
        raise ConfigError(f"{current} is not a link: choose another directory")
    try:
        name = os.readlink(current)
    except FileNotFoundError:
        return b""
    return bytes.fromhex(name) if _is_version(name) and (directory / name).is_dir() else b""


def versions_with(
    directory: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[bytes]:
    """The versions with all files that are chosen. Raises `ConfigError` for a damaged record, and `OSError`."""
    return [
        version
        for version in kept_versions(directory)
        if not _part_file(directory, format_version(version)).exists()
        or _has_chosen(directory, version, include, exclude)
    ]


def _has_chosen(directory: Path, version: bytes, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a version with some files only has the chosen ones."""
    signed = kept_manifest(directory, version)
    if signed is None:
        return False
    try:
        manifest = signed.manifest
        chosen = choose_files(manifest, include, exclude)
    except (CheckpointRefused, ValueError):  # a format of later, or it has no such file
        return False
    there = part_of(directory, version, len(manifest.files))
    return there is None or (chosen is not None and chosen <= there)


def kept_versions(directory: Path) -> list[bytes]:
    """All versions in the directory, also those with some files only. Raises `OSError`."""
    return [bytes.fromhex(name) for name in versions_in(directory)]


def kept_manifest(directory: Path, version: bytes) -> SignedManifest | None:
    """The signed manifest of a version; None for none. Verify it: any writer may have changed it. Raises `OSError`."""
    name = format_version(version)
    try:
        return decode_body(SignedManifest, read_regular_file(directory / STATE / f"{name}.manifest"))
    except (FileNotFoundError, ProtocolError, ConfigError):
        return None


def switch_current(directory: Path, version: bytes) -> None:
    """Have `current` name a version, at once and durably; allowed while another version is fetched. Raises
    `FileNotFoundError` when the version is not there, and `OSError`."""
    name = format_version(version)
    if not (directory / name).is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory / name))
    link = directory / STATE / f"{CURRENT}.{secrets.token_hex(8)}.new"
    link.symlink_to(name)
    try:
        link.replace(directory / CURRENT)
    except OSError:
        link.unlink()
        raise
    sync(directory)
    with suppress(FileNotFoundError):
        os.utime(directory / STATE / f"{name}.manifest")  # the newest


def part_of(directory: Path, version: bytes, count: int) -> frozenset[int] | None:
    """The files, by number, of a version with `count` files; None when it is not recorded as incomplete. Raises
    `ConfigError` for a damaged record, and `OSError`."""
    path = _part_file(directory, format_version(version))
    try:
        part = decode_body(_Part, read_regular_file(path))
        if part.format != _PART_FORMAT:
            raise ProtocolError(f"format {part.format}")
        return frozenset(pieces_in(unpack_map(part.files, count)))
    except FileNotFoundError:
        return None
    except ProtocolError as error:
        whole = directory / format_version(version)
        raise ConfigError(f"{path}: {error}; remove it and {whole} to fetch it again") from error


def write_part(directory: Path, version: bytes, files: Collection[int] | None, count: int) -> None:
    """Record which files of a version are there; None: all. Durable on return. Raises `OSError`."""
    path = _part_file(directory, format_version(version))
    if files is None:
        path.unlink(missing_ok=True)
    else:
        replace_file(path, encode_body(_Part(_PART_FORMAT, pack_map(map_of(files), count))))
    sync(path.parent)


def versions_in(directory: Path) -> list[str]:
    """Names of the versions in the directory, in the order of their first fetch or last use."""
    found = []
    for manifest in (directory / STATE).glob("*.manifest"):
        name = manifest.name.removesuffix(".manifest")
        if _is_version(name) and (directory / name).is_dir():
            with suppress(FileNotFoundError):
                found.append((manifest.stat().st_mtime_ns, name))
    return [name for _, name in sorted(found)]


def forgetting_versions(directory: Path, keep: int, placed: str = "") -> Iterator[None]:
    """Remove versions, in steps, until `keep` are left; never the one that `current` names, nor the one just placed."""
    current = format_version(current_version(directory))
    staying = {current, placed} - {""}
    others = [name for name in versions_in(directory) if name not in staying]
    for name in others[: max(0, len(others) + len(staying) - max(1, keep))]:
        state = directory / STATE
        going = state / f"{name}.going"
        yield from removing_tree(going)  # left by an interrupted removal
        (directory / name).rename(going)  # so that no half version is found
        (state / f"{name}.manifest").unlink()
        _part_file(directory, name).unlink(missing_ok=True)
        yield from removing_tree(going)
        yield from removing_tree(state / f"{name}.rest")


def removing_tree(root: Path) -> Iterator[None]:
    """Remove a folder and its content, if there, in steps of some files. No link is followed. Raises `OSError`."""
    for folder, folders, files in os.walk(root, topdown=False):
        for count, name in enumerate(files):
            os.unlink(os.path.join(folder, name))
            if count % REMOVED_A_STEP == 0:
                yield
        for name in folders:
            inner = os.path.join(folder, name)
            if os.path.islink(inner):
                os.unlink(inner)
        os.rmdir(folder)
        yield


def sync(path: Path) -> None:
    """Make a file or a directory durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _part_file(directory: Path, name: str) -> Path:
    return directory / STATE / f"{name}.part"


def _is_version(name: str) -> bool:
    return len(name) == _VERSION_DIGITS and set(name) <= set("0123456789abcdef")


def boot_id() -> bytes:
    """36 bytes that differ after each start of the machine."""
    return BOOT_ID.read_bytes().strip()


class PieceRecord:
    """The pieces of one unfinished version, in a file; a record of anything else is replaced. For several threads."""

    def __init__(self, path: Path, version: bytes, count: int, boot: bytes) -> None:
        """Raises `OSError`, and `ConfigError` for what is not a regular file."""
        self._count = count
        self._lock = threading.Lock()
        with Folder(path.parent) as folder:
            self._descriptor = folder.open(path.name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            header = self._header = _HEADER.pack(MAGIC, FORMAT, count, version, boot)
            found = os.pread(self._descriptor, _HEADER.size + -(-count // 8), 0)
            self.have = NO_PIECES
            """Pieces written."""
            self.is_certain = found[: _HEADER.size] == header
            """Whether all of them were written since the machine was started; others are to be verified."""
            if found[: _HEADER.size - 36] == header[:-36]:
                self.have = int.from_bytes(found[_HEADER.size :], "little") & full_map(count)
            else:
                os.ftruncate(self._descriptor, 0)
                self.remove(NO_PIECES)
                self.now_certain()
        except BaseException:
            os.close(self._descriptor)
            raise

    def add(self, piece: int) -> None:
        with self._lock:
            self.have |= 1 << piece
            place = piece // 8
            byte = self.have >> 8 * place & 0xFF
            os.pwrite(self._descriptor, bytes([byte]), _HEADER.size + place)

    def now_certain(self) -> None:
        """All remaining pieces were verified, or there are none."""
        os.pwrite(self._descriptor, self._header, 0)
        self.is_certain = True

    def remove(self, pieces: PieceMap) -> None:
        with self._lock:
            self.have &= ~pieces
            os.pwrite(self._descriptor, pack_map(self.have, self._count), _HEADER.size)

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._descriptor)


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
        self.held = self.chosen | {extent.file for piece in pieces for extent in layout.extents(piece)}

    def state_file(self, kind: str, name: str | None = None) -> Path:
        """A file about a version, by default this one."""
        return self.state / f"{name or self.name}.{kind}"

    def place(self, number: int) -> Path:
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
            _read_file(self.place(number), view, offset)
        except FileNotFoundError:
            with self._switch:
                place = self.place(number)
            _read_file(place, view, offset)

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
    def read(file: int, view: memoryview, offset: int) -> None:
        _read_file(root / manifest.files[file].path, view, offset)

    return read


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read the file with."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_fully(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill a view with a file's bytes from an offset on. Raises `OSError`, and `EOFError` for a short file."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file ends before byte {offset:,}")
        view, offset = view[count:], offset + count


def _read_file(path: Path, view: memoryview, offset: int) -> None:
    with opened(path) as descriptor:
        read_fully(descriptor, view, offset)


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
