"""The manifest of a checkpoint: what it is made of, signed. Pure.

A manifest is a msgpack array with a format number. Its version is the first 16 bytes of the BLAKE3 of its bytes, so
the same files under the same name are the same version, whoever publishes them and when. The publisher signs the
whole BLAKE3 (32 bytes) with its ed25519 key. Pieces have BLAKE3 of 32 bytes each: a piece is what arrives and is
verified. A file that has pieces of its own has the BLAKE3 of their hashes, a smaller one that of its bytes (what
`b3sum` prints): so each byte is hashed once, and parts of one file by several cores. (Older versions hashed all bytes
of each file a second time; such manifests say so by saying nothing.)

Whoever reads a manifest checks, in this order: length, version, signature, form, names and sizes. So nobody but the
publisher gets as far as the parser, and what the publisher may have wrong is refused before anything is created.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Final, Protocol

import msgspec
from blake3 import blake3

from p2pstore.checkpoint.content.content_paths import check_checkpoint_name, check_paths
from p2pstore.checkpoint.content.pieces import (
    NO_PIECES,
    Extent,
    PieceLayout,
    PieceMap,
    full_map,
    pieces_in,
)
from p2pstore.errors import CheckpointRefused, ProtocolError
from p2pstore.objects import format_peer_id
from p2pstore.wire import Message, decode_body, encode_body

MANIFEST_FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024
MAX_FILES: Final = 131_072
MAX_DIMENSIONS: Final = 32
HASH_BYTES: Final = 32
VERSION_BYTES: Final = 16

_CONTEXT: Final = b"p2pstore checkpoint manifest 1\0"
_PERMISSIONS: Final = 0o777


class Signer(Protocol):
    """Signs with this peer's identity."""

    @property
    def peer_id(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes: ...


class Verifier(Protocol):
    """Checks signatures of other peers."""

    def verify(self, peer_id: bytes, message: bytes, signature: bytes) -> bool: ...


class FileHashes(IntEnum):
    """What the hash of a file is, of at least a piece; that of a smaller one is always the BLAKE3 of its bytes."""

    OF_BYTES = 0
    OF_PIECES = 1
    """The BLAKE3 of its pieces' hashes, one behind the other."""


class FileEntry(Message, frozen=True, gc=False):
    """One file, or one named tensor (then with dtype and shape). `mode` has permission bits only: there are no links,
    devices or set-user-id files. `hash`: see `FileHashes`."""

    path: str
    size: int
    mode: int
    hash: bytes
    dtype: str = ""
    shape: Annotated[list[int], msgspec.Meta(max_length=MAX_DIMENSIONS)] = []  # noqa: RUF012  # msgspec copies it


class Manifest(Message, frozen=True, dict=True):
    """What a version of a checkpoint is made of. `files` are in the order of their paths; `piece_hashes` are those of
    all pieces, one behind the other. `file_hashes`: a number of `FileHashes`."""

    format: int
    name: str
    piece_bytes: int
    files: Annotated[list[FileEntry], msgspec.Meta(max_length=MAX_FILES)]
    piece_hashes: bytes
    file_hashes: int = FileHashes.OF_BYTES

    @cached_property
    def layout(self) -> PieceLayout:
        """Where each piece is. Raises `CheckpointRefused` for sizes that are not allowed."""
        return PieceLayout([file.size for file in self.files], self.piece_bytes)

    def piece_hash(self, piece: int) -> bytes:
        """What the piece's bytes have to hash to."""
        return self.piece_hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES]

    def hashes_of(self, file: int) -> bytes:
        """The hashes of all pieces that a file has bytes in. Of two files that share no piece with others and are as
        long, in pieces of one length: the same when the files are."""
        pieces = self.layout.pieces_of(file)
        return self.piece_hashes[pieces.start * HASH_BYTES : pieces.stop * HASH_BYTES]

    @cached_property
    def copies(self) -> dict[int, list[Extent]]:
        """Pieces whose bytes other pieces have as well, as equal files do: which ranges to copy, in their order. The
        pieces that have these ranges are no copies. A publisher may have false hashes of files: verify the result."""
        return self.copies_among(full_map(self.layout.count))

    def copies_among(self, pieces: PieceMap, have: PieceMap = NO_PIECES) -> dict[int, list[Extent]]:
        """As `copies`, when these pieces are wanted, and some are here."""
        if not self._has_equal_ones:
            return {}
        copies: dict[int, list[Extent]] = {}
        first: dict[tuple[int, bytes], Extent] = {}
        for piece in [*pieces_in(have), *pieces_in(pieces & ~have)]:
            extents, keys = self.layout.extents(piece), self._contents_of(piece)
            if not have >> piece & 1 and all(key in first for key in keys):
                copies[piece] = [first[key] for key in keys]
                continue
            for key, extent in zip(keys, extents, strict=True):
                first.setdefault(key, extent)
        return copies

    @cached_property
    def _has_equal_ones(self) -> bool:
        keys = [key for piece in range(self.layout.count) for key in self._contents_of(piece)]
        return len(set(keys)) < len(keys)

    def _contents_of(self, piece: int) -> list[tuple[int, bytes]]:
        """What its ranges are: their lengths and hashes."""
        if not self.layout.is_shared(piece):
            return [(self.layout.size(piece), self.piece_hash(piece))]
        return [(each.length, self.files[each.file].hash) for each in self.layout.extents(piece)]

    def is_piece(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether these are the bytes of the piece. Takes 0.13 s for 1 GB, without the interpreter's lock."""
        return hash_of(data) == self.piece_hash(piece)


class SignedManifest(Message, frozen=True, dict=True):
    """A manifest as it travels and is kept: its exact bytes, who signed it, and the signature."""

    body: bytes
    signer: bytes
    signature: bytes

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, read once. The first access takes up to a second: leave it to a worker thread, as
        `open_manifest` and `sign_manifest` do. Raises `CheckpointRefused`."""
        return read_manifest(self.body)

    @cached_property
    def version(self) -> bytes:
        """The version that the bytes are."""
        return version_of(self.body)


def hash_of(data: bytes | bytearray | memoryview) -> bytes:
    """The BLAKE3 of a piece or a small file."""
    return blake3(data).digest()


def version_of(body: bytes) -> bytes:
    """The version that a manifest's bytes are."""
    return hash_of(body)[:VERSION_BYTES]


def format_version(version: bytes) -> str:
    """32 hexadecimal digits: how a version is written, and its directory called."""
    return version.hex()


def make_manifest(
    name: str,
    files: Sequence[FileEntry],
    piece_bytes: int,
    piece_hashes: bytes,
    file_hashes: FileHashes = FileHashes.OF_BYTES,
) -> Manifest:
    """A manifest that others will accept; files in any order are refused like everything else that they would
    refuse: raises `CheckpointRefused`."""
    manifest = Manifest(MANIFEST_FORMAT, name, piece_bytes, list(files), piece_hashes, file_hashes)
    _check(manifest)
    return manifest


def sign_manifest(manifest: Manifest, signer: Signer) -> SignedManifest:
    """The manifest as it travels. For worker threads. Raises `CheckpointRefused` when it is too long."""
    body = encode_body(manifest)
    if len(body) > MAX_MANIFEST_BYTES:
        raise CheckpointRefused(
            f"a manifest of {len(body):,} bytes; at most {MAX_MANIFEST_BYTES:,} are allowed: publish fewer files"
        )
    signed = SignedManifest(body, signer.peer_id, signer.sign(_CONTEXT + hash_of(body)))
    signed.__dict__["manifest"] = manifest  # it was checked when it was made
    return signed


def open_manifest(
    signed: SignedManifest, *, version: bytes, publisher: bytes, verifier: Verifier
) -> Manifest:
    """The manifest of `version`, which the peer `publisher` must have signed. For worker threads. Raises
    `CheckpointRefused` saying what is wrong with it."""
    if len(signed.body) > MAX_MANIFEST_BYTES:
        raise CheckpointRefused(f"a manifest of {len(signed.body):,} bytes")
    whole = hash_of(signed.body)
    if not hmac.compare_digest(whole[:VERSION_BYTES], version):
        raise CheckpointRefused("a manifest of another version than was asked for")
    if signed.signer != publisher:
        raise CheckpointRefused(
            f"a manifest of another publisher, {format_peer_id(signed.signer)}, than the one that is trusted, "
            f"{format_peer_id(publisher)}: if that one is gone for good, trust the other (--publisher), or forget it "
            "(`checkpoint rm --forget`)"
        )
    if not verifier.verify(publisher, _CONTEXT + whole, signed.signature):
        raise CheckpointRefused("a manifest that its publisher did not sign")
    return signed.manifest


def read_manifest(body: bytes) -> Manifest:
    """The manifest in these bytes, whoever wrote them. Takes 0.5 s for 100,000 files, in steps of microseconds between
    which other threads run: for worker threads. Raises `CheckpointRefused`."""
    if len(body) > MAX_MANIFEST_BYTES:
        raise CheckpointRefused(f"a manifest of {len(body):,} bytes")
    try:
        number = decode_body(_FormatOnly, body).format
        if number != MANIFEST_FORMAT:
            raise CheckpointRefused(
                f"a manifest of format {number}; this version knows {MANIFEST_FORMAT}"
            )
        manifest = _decode(body)
    except ProtocolError as error:
        raise CheckpointRefused(f"not a manifest: {error}") from error
    _check(manifest)
    return manifest


def unchanged_pieces(old: Manifest, new: Manifest) -> dict[int, int]:
    """Pieces of `new` that `old` has as well, by hash, wherever they lie: number in `new` -> number in `old`."""
    known = {old.piece_hash(piece): piece for piece in range(old.layout.count)}
    return {
        piece: known[new.piece_hash(piece)]
        for piece in range(new.layout.count)
        if new.piece_hash(piece) in known
    }


class _FormatOnly(Message, frozen=True):
    format: int


class _FilesApart(Message, frozen=True):
    """A `Manifest` whose files are not decoded yet: to decode them in one call would keep the interpreter's lock, and
    so the event loop, for 200 ms."""

    format: int
    name: str
    piece_bytes: int
    files: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_FILES)]
    piece_hashes: bytes
    file_hashes: int = FileHashes.OF_BYTES


def _decode(body: bytes) -> Manifest:
    """Raises `ProtocolError`."""
    apart = decode_body(_FilesApart, body)
    files = [decode_body(FileEntry, each) for each in apart.files]
    return Manifest(
        apart.format, apart.name, apart.piece_bytes, files, apart.piece_hashes, apart.file_hashes
    )


def _check(manifest: Manifest) -> None:
    """Names, sizes and numbers. Raises `CheckpointRefused`."""
    check_checkpoint_name(manifest.name)
    if not 1 <= len(manifest.files) <= MAX_FILES:
        raise CheckpointRefused(f"{len(manifest.files):,} files; 1 to {MAX_FILES:,} are allowed")
    check_paths([file.path for file in manifest.files])
    for file in manifest.files:
        if file.mode != file.mode & _PERMISSIONS:
            raise CheckpointRefused(f"mode {file.mode:o} of {file.path[:80]!r}: permissions only")
        if len(file.hash) != HASH_BYTES:
            raise CheckpointRefused(f"a hash of {len(file.hash)} bytes for {file.path[:80]!r}")
        if len(file.dtype) > 32 or any(not 0 <= size < 1 << 44 for size in file.shape):
            raise CheckpointRefused(f"no such tensor: {file.path[:80]!r}")
    if len(manifest.piece_hashes) != HASH_BYTES * len(manifest.layout.sizes):
        raise CheckpointRefused(
            f"{len(manifest.piece_hashes):,} bytes of hashes for {manifest.layout.count:,} pieces"
        )
    manifest.copies  # noqa: B018  # found here, where a worker thread has time for it
