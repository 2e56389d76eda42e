"""The manifest of a checkpoint: its content, signed. Pure.

A manifest is a msgpack array with a format number. Its version is the first 16 bytes of the BLAKE3 of its bytes: the
same files under the same name are the same version, from any publisher, at any time. The publisher signs the whole
BLAKE3 (32 bytes) with its ed25519 key. Each piece, which arrives and is verified as a unit, has a BLAKE3 of 32 bytes. A
file with pieces of its own has the BLAKE3 of their hashes, a smaller one that of its bytes (the output of b3sum): so
each byte is hashed once, and several cores hash one file. (Manifests of older versions, without `file_hashes`, have the
BLAKE3 of each file's bytes.)

A reader checks in this order: length, version, signature, form, names and sizes. So only the publisher's bytes reach
the parser, and its errors are refused before a file is made.

A manifest's paths are created below a directory of the fetching peer, so they are plain: relative, without `..`. A
manifest has no links. A pattern is for a whole relative path, and `*` in it matches anything, `/` too.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from p2pstore.checkpoint.content.pieces import (
    NO_PIECES,
    Extent,
    PieceLayout,
    PieceMap,
    full_map,
    pieces_in,
)
from p2pstore.errors import CheckpointRefused, ProtocolError
from p2pstore.objects import check_checkpoint_name, format_peer_id, listed
from p2pstore.wire import Message, Signer, Verifier, decode_body, encode_body

MANIFEST_FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024
MAX_FILES: Final = 131_072
MAX_DIMENSIONS: Final = 32
HASH_BYTES: Final = 32
VERSION_BYTES: Final = 16

_CONTEXT: Final = b"p2pstore checkpoint manifest 1\0"
_PERMISSIONS: Final = 0o777
NAMED_FILES: Final = 8
NEAREST: Final = 3
"""Names suggested by an error."""
MAX_COMPARED: Final = 5_000
"""Names compared letter by letter; 0.3 s."""
WILDCARDS: Final = frozenset("*?[")

BOOKKEEPING_FOLDERS: Final = (".git", ".cache/huggingface", ".locks", ".hg", ".svn")
BOOKKEEPING_SUFFIXES: Final = (".incomplete", ".lock", ".crdownload", ".aria2")


class FileHashes(IntEnum):
    """How a large file's hash is computed; that of a file below one piece is always the BLAKE3 of its bytes."""

    OF_BYTES = 0
    OF_PIECES = 1
    """The BLAKE3 of the concatenated hashes of its pieces."""


class FileEntry(Message, frozen=True, gc=False):
    """One file, or one named tensor (then with dtype and shape). `mode` has permission bits only: there are no links,
    devices or set-user-id files. `hash`: see `FileHashes`."""

    path: str
    size: int
    mode: int
    hash: bytes
    dtype: str = ""
    shape: Annotated[list[int], msgspec.Meta(max_length=MAX_DIMENSIONS)] = []  # noqa: RUF012  # msgspec copies it


class Manifest(Message, frozen=True, dict=True, gc=True):
    """The content of a version. `files` are in the order of their paths; `piece_hashes` are the concatenated hashes of
    all pieces. `file_hashes`: a number of `FileHashes`."""

    format: int
    name: str
    piece_bytes: int
    files: Annotated[list[FileEntry], msgspec.Meta(max_length=MAX_FILES)]
    piece_hashes: bytes
    file_hashes: int = FileHashes.OF_BYTES

    @cached_property
    def layout(self) -> PieceLayout:
        """The places of all pieces. Raises `CheckpointRefused` for invalid sizes."""
        return PieceLayout([file.size for file in self.files], self.piece_bytes)

    def piece_hash(self, piece: int) -> bytes:
        return self.piece_hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES]

    def hashes_of(self, file: int) -> bytes:
        """The hashes of all pieces with bytes of a file. Equal for equal files that share no piece with others."""
        pieces = self.layout.pieces_of(file)
        return self.piece_hashes[pieces.start * HASH_BYTES : pieces.stop * HASH_BYTES]

    @cached_property
    def copies(self) -> dict[int, list[Extent]]:
        """Pieces with the same bytes as earlier pieces, such as those of equal files: the ranges to copy. Pieces with
        these ranges are no copies themselves. A publisher may give false hashes of files: verify the result."""
        return self.copies_among(full_map(self.layout.count))

    def copies_among(self, pieces: PieceMap, have: PieceMap = NO_PIECES) -> dict[int, list[Extent]]:
        """`copies` when these pieces are wanted, and some are here."""
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
        if not self.layout.is_shared(piece):
            return [(self.layout.sizes[piece], self.piece_hash(piece))]
        return [(each.length, self.files[each.file].hash) for each in self.layout.extents(piece)]

    def is_piece(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether these are the bytes of the piece. Takes 0.13 s for 1 GB, without the GIL."""
        return hash_of(data) == self.piece_hash(piece)


class SignedManifest(Message, frozen=True, dict=True, gc=True):
    """A manifest as it travels and is stored: its exact bytes, the signer, and the signature."""

    body: bytes
    signer: bytes
    signature: bytes

    @cached_property
    def manifest(self) -> Manifest:
        """The decoded manifest. The first access takes up to 1 s: in a worker thread, as `open_manifest` and
        `sign_manifest` do. Raises `CheckpointRefused`."""
        return read_manifest(self.body)

    @cached_property
    def version(self) -> bytes:
        return version_of(self.body)


def hash_of(data: bytes | bytearray | memoryview) -> bytes:
    """The BLAKE3 of a piece or a small file."""
    return blake3(data).digest()


def version_of(body: bytes) -> bytes:
    return hash_of(body)[:VERSION_BYTES]


def format_version(version: bytes) -> str:
    """32 hexadecimal digits: the name of a version, and of its directory."""
    return version.hex()


def make_manifest(
    name: str,
    files: Sequence[FileEntry],
    piece_bytes: int,
    piece_hashes: bytes,
    file_hashes: FileHashes = FileHashes.OF_BYTES,
) -> Manifest:
    """A valid manifest. Raises `CheckpointRefused` for files out of order, and for all that others would refuse."""
    manifest = Manifest(MANIFEST_FORMAT, name, piece_bytes, list(files), piece_hashes, file_hashes)
    _check(manifest)
    return manifest


def sign_manifest(manifest: Manifest, signer: Signer) -> SignedManifest:
    """Encode and sign; for worker threads. Raises `CheckpointRefused` when it is too long."""
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
    """Verify the manifest of `version`, signed by `publisher`; for worker threads. Raises `CheckpointRefused`."""
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
    """Decode and check a manifest. Takes 0.5 s for 100,000 files, in steps of microseconds between which other threads
    run: for worker threads. Raises `CheckpointRefused`."""
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
    """Pieces of `new` that `old` has as well, by hash, at any place: number in `new` -> number in `old`."""
    known = {old.piece_hash(piece): piece for piece in range(old.layout.count)}
    return {
        piece: known[new.piece_hash(piece)]
        for piece in range(new.layout.count)
        if new.piece_hash(piece) in known
    }


class _FormatOnly(Message, frozen=True):
    format: int


class _FilesApart(Message, frozen=True):
    """A `Manifest` with its files not decoded: in one call that would keep the GIL, and the event loop, for 200 ms."""

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
    """Check names, sizes and numbers. Raises `CheckpointRefused`."""
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


# --- names of files, and patterns that choose files ----------------------------------------------

MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
"""Of one part of a path, as in file systems."""
MAX_DEPTH: Final = 32
CURRENT: Final = "current"
"""The link to the version in use, where versions are kept."""
RESERVED_PREFIX: Final = ".p2pstore"
"""Prefix of the fetching peer's own files beside the published ones."""

_PLAIN_PART: Final = r"[\w\-+=,@~ ][\w.\-+=,@~ ]*"
_PLAIN: Final = re.compile(f"{_PLAIN_PART}(?:/{_PLAIN_PART})*", re.ASCII)
"""Short paths of these characters need no further check."""


def check_path(path: str) -> None:
    """Raises `CheckpointRefused` for a path that is not plain and relative, with the reason."""
    if len(path) <= MAX_NAME_BYTES and path.count("/") < MAX_DEPTH and _PLAIN.fullmatch(path):
        return
    if not path or len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise CheckpointRefused(f"a path is 1 to {MAX_PATH_BYTES:,} bytes long: {path[:80]!r}")
    if path.startswith("/"):
        raise CheckpointRefused(f"an absolute path: {path[:80]!r}")
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        raise CheckpointRefused(f"a path of {len(parts)} parts; at most {MAX_DEPTH} are allowed")
    for part in parts:
        _check_part(part, path)
    if parts[0].startswith(RESERVED_PREFIX):
        raise CheckpointRefused(f"names in {RESERVED_PREFIX}* are reserved: {path[:80]!r}")


def check_paths(paths: Sequence[str]) -> None:
    """Check each path; and that they are in order, each once, none below another. Raises `CheckpointRefused`."""
    files = set(paths)
    for path in paths:
        check_path(path)
        end = path.rfind("/")
        while end > 0:
            if path[:end] in files:
                raise CheckpointRefused(f"{path[:end]!r} is a file, and {path[:80]!r} is below it")
            end = path.rfind("/", 0, end)
    for first, second in pairwise(paths):
        if first >= second:
            raise CheckpointRefused(f"paths are in order, each once: {second[:80]!r} comes too late")


def _check_part(part: str, path: str) -> None:
    if part in ("", ".", ".."):
        raise CheckpointRefused(f"a path with the part {part!r}: {path[:80]!r}")
    if len(part.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise CheckpointRefused(f"a part of a path is at most {MAX_NAME_BYTES} bytes: {part[:80]!r}")
    if any(ord(character) < 32 or ord(character) == 127 for character in part) or "\\" in part:
        raise CheckpointRefused(f"control characters or backslashes in a path: {path[:80]!r}")
    if any("\ud800" <= character <= "\udfff" for character in part):
        raise CheckpointRefused(f"a path that is not UTF-8: {path[:80]!r}")


def bookkeeping_in(path: str) -> str:
    """The folder or suffix that marks a path as bookkeeping of a download or version control; empty for others."""
    around = f"/{path}/"
    for folder in BOOKKEEPING_FOLDERS:
        if f"/{folder}/" in around:
            return folder
    return next((suffix for suffix in BOOKKEEPING_SUFFIXES if path.endswith(suffix)), "")


def is_asked_for(path: str, mark: str, include: Sequence[str]) -> bool:
    """Whether a pattern with such a mark matches the path: then the file is wanted."""
    return any(mark in pattern and fnmatchcase(path, pattern) for pattern in include)


def is_chosen(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a path matches some `include`, if there are any, and no `exclude`."""
    if matches(path, exclude):
        return False
    return not include or matches(path, include)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name equals or matches one of these patterns (it may contain brackets itself)."""
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def choose_files(
    manifest: Manifest, include: Sequence[str], exclude: Sequence[str]
) -> frozenset[int] | None:
    """Numbers of the chosen files; None for all. Raises `ValueError` when no file is chosen, naming some that exist."""
    chosen = frozenset(
        number for number, file in enumerate(manifest.files) if is_chosen(file.path, include, exclude)
    )
    if not chosen:
        named = listed([repr(file.path) for file in manifest.files], NAMED_FILES)
        raise ValueError(f"no file of checkpoint {manifest.name!r} matches; it has {named}")
    return None if len(chosen) == len(manifest.files) else chosen


def unmatched(paths: Collection[str], patterns: Sequence[str]) -> list[str]:
    found = []
    for pattern in patterns:
        if pattern in paths:
            continue
        if not WILDCARDS & set(pattern) or not any(fnmatchcase(path, pattern) for path in paths):
            found.append(pattern)
    return found


def nearest(wanted: str, known: Collection[str]) -> str:
    """Suggestions for a name or pattern without a match, to be appended to an error."""
    plain = wanted.strip("*?").lower()
    like = [name for name in known if plain and plain in name.lower()]
    if not like:
        last = plain.rpartition(".")[2]
        pool = known
        if len(known) > MAX_COMPARED:
            pool = [name for name in known if last and last in name.lower()][:MAX_COMPARED]
        lowered = {name.lower(): name for name in pool}
        like = [lowered[each] for each in get_close_matches(plain, lowered, NEAREST, 0.4)]
    if like:
        shown = sorted(like, key=lambda name: (abs(len(name) - len(plain)), name))[:NEAREST]
        return f"; nearest: {', '.join(map(repr, shown))}"
    if not known:
        return "; there is none at all"
    return f"; there are {listed(list(map(repr, sorted(known))), NEAREST)}"
