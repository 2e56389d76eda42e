"""All that precedes the first piece of a fetch: reuse of pieces that are there, and room on the disk. Shell; blocking,
for worker threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

from p2pstore.checkpoint.content.directory_versions import (
    FILES_A_STEP,
    PieceRecord,
    VersionFiles,
    allocate_file,
    opened,
    read_extents,
    reader,
    versions_in,
)
from p2pstore.checkpoint.content.hashing import STEP_BYTES, BulkReader, PieceHashes, neighbours
from p2pstore.checkpoint.content.manifest import Manifest, SignedManifest, unchanged_pieces
from p2pstore.checkpoint.content.pieces import map_of, pieces_in
from p2pstore.errors import CapacityExceeded, CheckpointRefused, ConfigError, ProtocolError
from p2pstore.state.folder import read_regular_file
from p2pstore.wire import decode_body


class Preparation:
    """Brings a directory and the record of its pieces into agreement, and takes what is there already."""

    def __init__(
        self, files: VersionFiles, record: PieceRecord, write: Callable[[int, memoryview], bool]
    ) -> None:
        """`write` verifies and stores a piece."""
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
