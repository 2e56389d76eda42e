"""Stores of pieces, which a swarm reads and writes: published files, target directories, memory for clients. Shell;
stores block, for worker threads."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from p2pstore.checkpoint.content.directory_versions import read_extents
from p2pstore.checkpoint.content.manifest import Manifest, SignedManifest
from p2pstore.checkpoint.content.pieces import NO_PIECES, Extent, PieceMap, full_map, plan_memory
from p2pstore.checkpoint.content.sources import PublishedFiles, SourceMemory
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.errors import CapacityExceeded, ConfigError, P2PStoreError, StoreClosed
from p2pstore.memory.mapped.mapped_memory import available_memory, create_table_memory
from p2pstore.objects import format_bytes
from p2pstore.runtime.streams import BytesLike

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LEAVING_SECONDS: Final = 1.0
"""How long a new version waits for memory of a client that is leaving; that is noticed within some ms."""


class PieceStore(Protocol):
    """The pieces of one version: `TargetDirectory`, `MemoryTarget`, `PublishedPieces`."""

    @property
    def have(self) -> PieceMap:
        """Verified pieces that are here."""
        ...

    @property
    def needed(self) -> PieceMap:
        """Pieces to have in the end."""
        ...

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        """Needed pieces that are made of earlier ones (`Manifest.copies`)."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the store is known to be in memory or on a disk of this machine."""
        ...

    def read(self, piece: int, room: memoryview | None = None) -> BytesLike:
        """A piece that is here, perhaps in `room`. Raises `OSError`, and `CheckpointChanged` for a changed file."""
        ...

    def write(self, piece: int, data: memoryview) -> bool:
        """Verify a piece and store it. False for wrong bytes. Raises `OSError`."""
        ...

    def close(self) -> None: ...


class PublishedPieces:
    """The `PieceStore` of a publisher, which has every piece."""

    def __init__(self, source: PublishedFiles, manifest: Manifest) -> None:
        self.is_local = False  # links may lead anywhere, and files may be cold
        self.have = self.needed = full_map(manifest.layout.count)
        self._source = source
        self._manifest = manifest

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        return self._manifest.copies

    def read(self, piece: int, room: memoryview | None = None) -> BytesLike:
        return self._source.read_piece(self._manifest, piece)

    def write(self, piece: int, data: memoryview) -> bool:
        """Raises `ValueError`: a publisher fetches nothing."""
        raise ValueError("a published version is never written")

    def close(self) -> None:
        """There is nothing to release."""


class HeldDirectory:
    """A directory that a client opened and passed: a duplicate descriptor, and a path through it. So it stays the
    directory that the user means, even when it is moved or this process sees another one under its name."""

    def __init__(self, descriptor: int, shown: str) -> None:
        """`shown` is the user's name for it. Raises `ConfigError` when the descriptor is not that of a directory."""
        status = os.fstat(descriptor) if descriptor >= 0 else None
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise ConfigError("the request came without a directory")
        self.identity = status.st_dev, status.st_ino
        self.shown = shown or "the directory"
        self._descriptor = os.dup(descriptor)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def place(self) -> Path | None:
        """Its path, if that leads to it in this process; else None."""
        place = self.path.readlink()
        try:
            found = place.stat()
        except OSError:
            return None
        return place if (found.st_dev, found.st_ino) == self.identity else None

    def again(self) -> HeldDirectory:
        """A second handle of the same directory, with its own `close`."""
        return HeldDirectory(self._descriptor, self.shown)

    def hand_over(self) -> HeldDirectory:
        """Move the descriptor to a new handle: `close` of this one has no effect any more."""
        other = object.__new__(HeldDirectory)
        other.shown, other.path, other.identity = self.shown, self.path, self.identity
        other._descriptor = self._descriptor
        self._descriptor = -1
        return other

    def with_shown_name(self, text: str) -> str:
        """A message with the user's name for the directory."""
        return text.replace(str(self.path), self.shown)

    @contextmanager
    def users_words(self) -> Iterator[None]:
        """Raise what fails in the block in the user's words: `OSError` as an error of the store, with known paths."""
        try:
            yield
        except P2PStoreError as error:
            raise type(error)(self.with_shown_name(str(error))) from error
        except OSError as error:
            text = self.with_shown_name(f"{error.filename or self.shown}: {error.strerror or error}")
            kind = CapacityExceeded if error.errno in FULL else ConfigError
            raise kind(text) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MemoryTarget:
    """A `Target` in a memfd, where only written pages take memory."""

    def __init__(self, signed: SignedManifest, needed: PieceMap | None = None) -> None:
        """`signed` was verified. `needed`: wanted pieces; None: all. Raises `ConfigError` without memfds."""
        self.manifest = signed.manifest
        self.signed = signed
        self.version = signed.version
        sizes = [file.size for file in self.manifest.files]
        self.layout = plan_memory(sizes, len(signed.body))
        self._memory = create_table_memory(self.layout.total_bytes, "p2pstore-checkpoint")
        self._memory.view[self.layout.manifest : self.layout.total_bytes] = signed.body
        self.is_local = True
        self.have = NO_PIECES
        self.needed = full_map(self.manifest.layout.count) if needed is None else needed
        """Pieces that clients want; grows with further orders."""
        self.copies = self.manifest.copies_among(self.needed)
        self._lock = threading.Lock()
        self.closed = False
        """Whether the memory was freed."""
        self.descriptor = self._memory.read_only_descriptor()
        """For clients; valid until `close`."""

    @property
    def used_bytes(self) -> int:
        """Memory in use when all wanted pieces are here."""
        layout = self.manifest.layout
        if self.needed == full_map(layout.count):
            return self.layout.total_bytes
        return layout.size_of(self.needed) + self.layout.total_bytes - self.layout.manifest

    def bytes_more(self, pieces: PieceMap) -> int:
        return self.manifest.layout.size_of(pieces & ~self.needed)

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a piece and store it; False for wrong bytes. One that is here stays: clients have it mapped."""
        if not self.manifest.is_piece(piece, data):
            return False
        with self._lock:
            if self.have >> piece & 1:
                return True
            view = memoryview(data)
            for file, offset, length in self.manifest.layout.extents(piece):
                at = self.layout.files[file] + offset
                self._open_view[at : at + length] = view[:length]
                view = view[length:]
            self.have |= 1 << piece
        return True

    def read(self, piece: int, room: memoryview | None = None) -> memoryview:
        """A piece that is here; in `room` if given."""
        return self.read_extents(self.manifest.layout.extents(piece), room)

    def read_extents(self, extents: Sequence[Extent], room: memoryview | None = None) -> memoryview:
        """Concatenated ranges of files, in pieces that are here; in `room` if given."""
        with self._lock:
            return read_extents(self._read_file, extents, room)

    def _read_file(self, file: int, view: memoryview, offset: int) -> None:
        at = self.layout.files[file] + offset
        view[:] = self._open_view[at : at + len(view)]

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                os.close(self.descriptor)
                self._memory.close()

    @property
    def _open_view(self) -> memoryview:
        if self.closed:
            raise StoreClosed("the memory of this version was freed")
        return self._memory.view


Target = TargetDirectory | MemoryTarget
"""A store that is being filled."""


class Memories:
    """Versions in memory, and the clients that use them; a version without clients is freed. At most `limit_bytes` in
    all; None: half of what is available at the time."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._targets: dict[bytes, MemoryTarget] = {}
        self._users: dict[bytes, set[int]] = {}
        """Clients, by version."""
        self._coming: dict[bytes, int] = {}
        self._turns: dict[bytes, trio.Lock] = {}
        self._given_back = trio.Event()
        self.published: dict[bytes, int] = {}
        """Bytes of versions that are published from memory."""

    @property
    def used_bytes(self) -> int:
        """Of all versions together, with those that are being fetched."""
        there = sum(target.used_bytes for target in self._targets.values())
        return there + sum(self._coming.values()) + sum(self.published.values())

    async def until_room(self, length_bytes: int) -> None:
        """Wait up to `LEAVING_SECONDS` for room: a client may just be closing an older version."""
        with trio.move_on_after(LEAVING_SECONDS):
            while self._targets and self._room < length_bytes <= (self._limit_bytes or 0):
                await self._given_back.wait()

    @property
    def _room(self) -> int:
        if self._limit_bytes is None:
            return available_memory()[0] // 2 - sum(self._coming.values())
        return self._limit_bytes - self.used_bytes

    @contextmanager
    def room_for(self, version: bytes, length_bytes: int) -> Iterator[None]:
        """Reserve room for a version that is fetched in this block. Raises `CapacityExceeded`."""
        room = self._room
        if length_bytes > room:
            raise CapacityExceeded(
                f"a checkpoint of {format_bytes(length_bytes)} has no room in memory: {format_bytes(max(0, room))} "
                "may be used (--checkpoint-memory)"
            )
        self._coming[version] = length_bytes
        try:
            yield
        finally:
            del self._coming[version]

    def check_published(self, length_bytes: int) -> None:
        """Raises `CapacityExceeded` when a version published from memory exceeds the limit, if there is one."""
        if self._limit_bytes is not None and self.used_bytes + length_bytes > self._limit_bytes:
            room = self._limit_bytes - self.used_bytes
            raise CapacityExceeded(
                f"tensors of {format_bytes(length_bytes)} have no room in memory: {format_bytes(max(0, room))} may be "
                "used (--checkpoint-memory); publish them from files"
            )

    @asynccontextmanager
    async def turn(self, version: bytes) -> AsyncIterator[None]:
        """Serialize the fetches of one version: the first brings it, the others share it."""
        lock = self._turns.setdefault(version, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._turns.pop(version, None)

    def add(self, target: MemoryTarget, user: int) -> None:
        """Add a complete version, with its first client."""
        self._targets[target.version] = target
        self._users[target.version] = {user}

    def use(self, version: bytes, user: int) -> MemoryTarget | None:
        """The version, with one client more; None when it is not here."""
        target = self._targets.get(version)
        if target is not None and target.closed:  # this peer takes no part in it any more
            del self._targets[version], self._users[version]
            return None
        if target is not None:
            self._users[version].add(user)
        return target

    def left(self, user: int) -> list[MemoryTarget]:
        """Remove a client; returns the versions without clients, to be closed."""
        unused = []
        for version, users in list(self._users.items()):
            users.discard(user)
            if not users:
                del self._users[version]
                unused.append(self._targets.pop(version))
        if unused:
            self._given_back.set()
            self._given_back = trio.Event()
        return unused

    def close(self) -> None:
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self._users.clear()


class HeldStore:
    """A store that keeps its directory open."""

    def __init__(self, store: PieceStore, directory: HeldDirectory) -> None:
        self._store = store
        self._directory = directory
        self.is_local = store.is_local
        self.read = store.read
        self.write = store.write

    @property
    def have(self) -> int:
        return self._store.have

    @property
    def needed(self) -> int:
        return self._store.needed

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        return self._store.copies

    def fetched_to(self, directory: HeldDirectory) -> bool:
        fetched = isinstance(self._store, TargetDirectory)
        return fetched and self._directory.identity == directory.identity

    def close(self) -> None:
        self._store.close()
        self._directory.close()


class PublishedMemory(PublishedPieces):
    """Pieces published from memory, which count as long as they are there."""

    def __init__(
        self, source: SourceMemory, manifest: Manifest, version: bytes, memories: Memories
    ) -> None:
        super().__init__(source, manifest)
        self._memory, self._version, self._memories = source, version, memories
        self.is_local = True
        memories.published[version] = source.total_bytes

    def close(self) -> None:
        self._memories.published.pop(self._version, None)
        self._memory.close()
