"""A directory that a version is fetched to. Shell; blocking, for worker threads.

    DIR/VERSION/...           a complete version, 32 hexadecimal digits; or some of its files, which
                              DIR/.p2pstore/VERSION.part names
    DIR/current               a link to the version in use, switched at once when another is complete
    DIR/.p2pstore/            manifests, unfinished versions, records of their pieces, a lock

An unfinished version grows in `.p2pstore/VERSION.partial` and becomes DIR/VERSION when it is complete and durable, so
no directory of a version is ever half. With `flat` the files move to DIR itself in the end, one by one, and there are
no versions. All that can fail precedes the first piece (`Preparation`): directories, permissions, room on the disk.

Files that were not chosen but share a piece with chosen ones lie in `.p2pstore/VERSION.rest`: each piece is whole, so
that it can be verified again and passed on. Files of the version that are fetched later join those that are there one
by one; then the record of them changes.

Pieces that are there are not fetched: those of an interrupted fetch, and files and pieces of older versions in DIR or,
with `flat`, of DIR itself. All are verified by hash, except pieces written since the machine was started, which were.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.directory_versions import (
    FILES_A_STEP,
    PieceRecord,
    VersionFiles,
    allocate_file,
    boot_id,
    forgetting_versions,
    opened,
    part_of,
    read_extents,
    reader,
    removing_tree,
    replace_if_changed,
    switch_current,
    sync,
    versions_in,
    write_part,
)
from p2pstore.checkpoint.content.hashing import (
    STEP_BYTES,
    BulkReader,
    PieceHashes,
    is_local_directory,
    neighbours,
)
from p2pstore.checkpoint.content.manifest import CURRENT, Manifest, SignedManifest, unchanged_pieces
from p2pstore.checkpoint.content.pieces import Extent, PieceMap, map_of, pieces_in
from p2pstore.errors import (
    CapacityExceeded,
    CheckpointRefused,
    ConfigError,
    P2PStoreError,
    ProtocolError,
)
from p2pstore.state.folder import Folder, read_regular_file
from p2pstore.wire import decode_body, encode_body

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DirectoryInUse(ConfigError):
    """Another fetch has the directory now."""


class TargetDirectory:
    """One version on its way into a directory. Use: `for _ in target.prepare(): ...`, `write` pieces, `finishing`, and
    `close` in any case. `write` and `read` may be called from several threads."""

    def __init__(
        self,
        directory: Path,
        signed: SignedManifest,
        *,
        flat: bool = False,
        chosen: Collection[int] | None = None,
    ) -> None:
        """`signed` was verified. `chosen`: numbers of the wanted files; None: all. Raises `ConfigError` when the
        directory cannot be used (`DirectoryInUse`: at present), and `CapacityExceeded` when the disk is full."""
        self.manifest = signed.manifest
        self.version = signed.version
        self.directory = directory
        self._signed = signed
        files = self._files = VersionFiles(
            directory, self.manifest, self.version, flat=flat, chosen=chosen
        )
        self._record: PieceRecord | None = None
        self._durable: set[Path] = set()
        self.copies: Mapping[int, Sequence[Extent]] = {}
        """Needed pieces to be made of others. Known after `prepare`."""
        try:
            files.state.mkdir(parents=True, exist_ok=True)
            if files.state.is_symlink():
                raise ConfigError(f"{files.state} is a link: put a directory in its place")
            self.is_local = is_local_directory(files.state)
            """Whether it is on a disk or in memory of this machine."""
            with Folder(files.state) as state:
                self._lock = state.open("lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        """Lock the directory, and look at what it has of the version."""
        files = self._files
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryInUse(
                f"{self.directory}: another fetch goes to it now: wait for it, or choose another directory"
            ) from error
        current = self.directory / CURRENT
        if not files.flat and current.exists() and not current.is_symlink():
            raise ConfigError(f"{current} is not a link: choose another directory, or --flat")
        if not files.flat and files.complete.is_dir():
            part = part_of(self.directory, self.version, len(files.all))
            files.add_there(files.all if part is None else part)
            if not all(map(files.is_whole, files.there)):
                raise ConfigError(f"{files.complete}: was changed; remove it to fetch it again")
            if files.chosen == files.there:
                files.commit()
                replace_if_changed(files.state_file("manifest"), encode_body(self._signed))
                return
        try:
            files.partial.mkdir(exist_ok=True)
            replace_if_changed(files.state_file("manifest"), encode_body(self._signed))
            self._record = PieceRecord(
                files.state_file("pieces"), self.version, self.manifest.layout.count, boot_id()
            )
        except OSError as error:
            raise _unusable(self.directory, error) from error

    @property
    def needed(self) -> PieceMap:
        return self._files.needed

    @property
    def have(self) -> PieceMap:
        """Verified pieces that are here."""
        return self.needed if self._record is None else self._record.have

    @property
    def whole(self) -> bool:
        """Whether all files are wanted, or were there before."""
        return self._files.chosen == self._files.all

    @property
    def committed(self) -> bool:
        return self._files.committed

    def prepare(self) -> Iterator[None]:
        """All that precedes the first piece, in steps of a fraction of a second.

        Raises `CapacityExceeded` when the disk has no room, `ConfigError` when something cannot be written, and
        `OSError` for other failures.
        """
        if self.committed:
            return
        try:
            yield from Preparation(self._files, self._require_record(), self.write).run()
            self.copies = self.manifest.copies_among(self.needed, self.have)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CapacityExceeded(f"{self.directory}: {error.strerror}") from error
            if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
            raise

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a piece and store it. False for wrong bytes. Raises `OSError`."""
        record = self._require_record()
        if not self.manifest.is_piece(piece, data):
            return False
        self._files.write(piece, memoryview(data))
        record.add(piece)
        return True

    def read(self, piece: int, room: memoryview | None = None) -> memoryview:
        """A piece that is here; in `room` if given. Raises `OSError`."""
        return self._files.read(self.manifest.layout.extents(piece), room)

    def read_extents(self, extents: Sequence[Extent], room: memoryview | None = None) -> memoryview:
        """Concatenated ranges of files, in pieces that are here; in `room` if given. Raises `OSError`."""
        return self._files.read(extents, room)

    def opened(self, file: int) -> AbstractContextManager[int]:
        """A file of a version in its place, open during a block. Raises `OSError`."""
        return opened(self._files.place(file))

    # --- the end ---------------------------------------------------------------------------------

    def finishing(self, keep: int, *, use: bool = True) -> Iterator[None]:
        """Make the complete version durable, put it in its place, and with `use` have `current` name it; in steps of
        some files. The newest `keep` complete versions stay, this one, and the one that `current` names. Another
        version may be fetched to the directory afterwards. Several threads may call `make_durable` before: one file
        after the other takes a sync each. Raises `ValueError` when a piece is missing, and `OSError`."""
        yield from self._finish(keep)
        if use and not self._files.flat:
            switch_current(self.directory, self.version)
            yield from forgetting_versions(self.directory, keep)
        self._let_go()

    def unsynced(self) -> list[Path]:
        """The files and folders that `finishing` has yet to make durable."""
        if self.committed:
            return []
        files = self._files
        folders = {files.partial: None}
        for place in self._numbers:
            folder = place.parent
            while folder not in folders and folder.is_relative_to(files.state):
                folders[folder] = None
                folder = folder.parent
        return [place for place in (*self._numbers, *folders) if place not in self._durable]

    def make_durable(self, places: Sequence[Path]) -> int:
        """Sync some of `unsynced`, files with their permissions; returns their bytes. For threads. Raises `OSError`."""
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
        """Files to be fetched, by their places during the fetch."""
        return {self._files.place(number): number for number in self._files.coming}

    def _finish(self, keep: int) -> Iterator[None]:
        files = self._files
        if not self.committed:
            record = self._require_record()
            if self.needed & ~record.have:
                raise ValueError("pieces are missing")
            for places in in_steps(self.unsynced()):
                self.make_durable(places)
                yield
            if files.flat or files.there:
                yield from files.moving()
                files.commit()
            else:
                files.commit(self._say_which)
            if files.there:
                self._say_which()
            sync(self.directory)
            record.close()
            self._record = None
            files.state_file("pieces").unlink()
        os.utime(files.state_file("manifest"))  # the newest
        if not files.flat:
            yield from forgetting_versions(self.directory, keep, files.name)
        yield from self._forget_partials()

    def _say_which(self) -> None:
        part = None if self.whole else self._files.chosen
        write_part(self.directory, self.version, part, len(self._files.all))

    def _forget_partials(self) -> Iterator[None]:
        """Remove unfinished versions, interrupted removals, and state of versions that are gone."""
        files = self._files
        for left in [*files.state.glob("*.partial"), *files.state.glob("*.going")]:
            yield from removing_tree(left)
        rests = set() if files.flat else {f"{name}.rest" for name in versions_in(self.directory)}
        rests.add(files.rest.name)
        if self.whole:
            rests.remove(files.rest.name)
        for left in files.state.glob("*.rest"):
            if left.name not in rests:
                yield from removing_tree(left)
        for left in [*files.state.glob("*.pieces"), *files.state.glob(f"{CURRENT}.*.new")]:
            left.unlink()
        if not files.flat:
            complete = {files.name, *versions_in(self.directory)}
            for left in files.state.glob("*.manifest"):
                if left.name.removesuffix(".manifest") not in complete:
                    left.unlink()

    def close(self) -> None:
        """Release the directory; a later fetch goes on with what is there."""
        if self._record is not None:
            self._record.close()
            self._record = None
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _require_record(self) -> PieceRecord:
        if self._record is None:
            raise ValueError("the version is complete, or the directory was closed")
        return self._record


def _unusable(directory: Path, error: OSError) -> P2PStoreError:
    kind = CapacityExceeded if error.errno in _NO_ROOM else ConfigError
    return kind(f"{directory}: cannot be written to: {error.strerror}")


def in_steps(places: Sequence[Path]) -> Iterator[Sequence[Path]]:
    for start in range(0, len(places), FILES_A_STEP):
        yield places[start : start + FILES_A_STEP]


class Preparation:
    """Brings a directory and the record of its pieces into agreement, and takes what is there already."""

    def __init__(
        self, files: VersionFiles, record: PieceRecord, write: Callable[[int, memoryview], bool]
    ) -> None:
        self._files = files
        self._record = record
        self._write = write
        self._manifest = files.manifest
        self._layout = files.manifest.layout

    def run(self) -> Iterator[None]:
        """Do it in steps of a fraction of a second. Raises `CapacityExceeded` and `OSError`."""
        files, record = self._files, self._record
        self._drop_not_needed()
        self._drop_gone()
        self._add_there()
        if not record.is_certain:
            for piece in pieces_in(record.have):
                data = files.read(self._layout.extents(piece))
                if not self._manifest.is_piece(piece, data):
                    record.remove(1 << piece)
                yield
            record.now_certain()
        older = [(files.directory, self._manifest)] if files.flat else list(self._older_versions())
        for root, manifest in older:
            yield from self._link_files(root, manifest)
        yield
        yield from self._allocate()
        for root, manifest in older:
            yield from self._copy_pieces(root, manifest)

    def _drop_not_needed(self) -> None:
        """Drop pieces and files of an interrupted fetch that had chosen others."""
        files, record = self._files, self._record
        if record.have & ~files.needed:
            record.remove(record.have & ~files.needed)
        kept = {files.place(number) for number in files.chosen}
        for folder, _, names in os.walk(files.partial):
            for found in (Path(folder, name) for name in names):
                if found not in kept:
                    found.unlink()

    def _drop_gone(self) -> None:
        """Drop the pieces of files that were removed or cut."""
        files, record = self._files, self._record
        gone = 0
        for number in files.held - files.there:
            pieces = map_of(self._layout.pieces_of(number))
            place = files.place(number)
            if not files.is_whole(number):
                gone |= pieces
            elif pieces & ~record.have and place.stat().st_nlink > 1:
                place.unlink()  # writing to it would write to another version
                gone |= pieces
        if gone & record.have:
            record.remove(gone)

    def _add_there(self) -> None:
        files = self._files
        if not files.there:
            return
        for number in files.chosen - files.there:
            rest, place = files.rest / self._manifest.files[number].path, files.place(number)
            if rest.is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(rest, place)
        for piece in {each for number in files.there for each in self._layout.pieces_of(number)}:
            if all(files.is_whole(extent.file) for extent in self._layout.extents(piece)):
                self._record.add(piece)

    def _older_versions(self) -> Iterator[tuple[Path, Manifest]]:
        """Other complete versions in the directory with readable manifests, newest first."""
        files = self._files
        for name in reversed(versions_in(files.directory)):
            try:
                body = read_regular_file(files.state_file("manifest", name))
                yield files.directory / name, decode_body(SignedManifest, body).manifest
            except (CheckpointRefused, ProtocolError, ConfigError):
                continue  # of a newer format, or damaged

    def _link_files(self, root: Path, manifest: Manifest) -> Iterator[None]:
        """Link large files that an older version has as well: they need no room of their own."""
        files, layout = self._files, self._layout
        if manifest.piece_bytes != layout.piece_bytes:
            return
        known = {
            (file.size, manifest.hashes_of(number)): number
            for number, file in enumerate(manifest.files)
            if file.size >= layout.piece_bytes
        }
        for number in files.coming:
            file = self._manifest.files[number]
            if file.size < layout.piece_bytes:
                continue
            pieces = map_of(layout.pieces_of(number))
            other = known.get((file.size, self._manifest.hashes_of(number)))
            if other is None or self._record.have & pieces:
                continue
            if manifest.files[other].mode != file.mode:
                continue  # all links of a file have one mode
            found = root / manifest.files[other].path
            if not (yield from self._is_file(found, number)):
                continue
            place = files.place(number)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            try:
                os.link(found, place)
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EXDEV):
                    raise
                continue  # this file system has no links; the pieces are copied
            for piece in pieces_in(pieces):
                self._record.add(piece)

    def _is_file(self, found: Path, number: int) -> Generator[None, None, bool]:
        """Whether a file of another version, of the same length as one of this, has the same bytes."""
        if found.is_symlink() or not found.is_file():
            return False
        pieces = self._layout.pieces_of(number)
        hashes = PieceHashes(self._layout, lambda _: opened(found), BulkReader())
        try:
            for run in neighbours(self._layout, pieces, STEP_BYTES):
                hashes.hash_run(run)
                yield
        except (EOFError, FileNotFoundError):
            return False
        return hashes.of(pieces) == self._manifest.hashes_of(number)

    def _allocate(self) -> Iterator[None]:
        """Allocate all files. Raises `CapacityExceeded`."""
        files = self._files
        coming = [(self._manifest.files[number], files.place(number)) for number in files.coming]
        needed = 0
        for file, place in coming:
            with suppress(FileNotFoundError):
                needed -= min(file.size, 512 * place.stat().st_blocks)
            needed += file.size
        room = os.statvfs(files.partial)
        if needed > room.f_bavail * room.f_frsize:
            raise CapacityExceeded(
                f"{files.directory}: {needed:,} bytes are needed, and {room.f_bavail * room.f_frsize:,} are free"
            )
        for count, (file, place) in enumerate(coming):
            place.parent.mkdir(parents=True, exist_ok=True)
            allocate_file(place, file.size)
            if count % FILES_A_STEP == 0:
                yield

    def _copy_pieces(self, root: Path, manifest: Manifest) -> Iterator[None]:
        for piece, other in unchanged_pieces(manifest, self._manifest).items():
            if not self._files.needed & ~self._record.have & 1 << piece:
                continue
            with suppress(FileNotFoundError, EOFError):
                extents = manifest.layout.extents(other)
                self._write(piece, read_extents(reader(root, manifest), extents))
            yield
