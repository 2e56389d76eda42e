"""Tensors of a checkpoint in the local peer's memory: views, without a copy.

Tensors of safetensors files, and tensors published as such, have names; every file can be read as bytes. The memory is
mapped read-only and stays as long as a view of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from p2pstore.checkpoint.content.manifest import (
    WILDCARDS,
    Manifest,
    is_chosen,
    matches,
    nearest,
    read_manifest,
    unmatched,
)
from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, map_of, plan_memory
from p2pstore.checkpoint.content.safetensors import (
    DTYPES,
    HEAD_BYTES,
    INDEX_SUFFIX,
    SUFFIX,
    BrokenFile,
    header_end,
    path_in_index,
    read_header,
    read_weight_map,
)
from p2pstore.errors import CheckpointRefused, NoSuchKey, P2PStoreError, ProtocolError
from p2pstore.local.local_connection import LocalConnection
from p2pstore.values import numpy_dtype, torch_dtype

logger = logging.getLogger("p2pstore.client")

LOGGED_PROBLEMS: Final = 8
_PLAIN_NAMES: Final = frozenset(DTYPES.values())


class TensorPlace(NamedTuple):
    """A tensor's bytes `begin` to `end` in a file, by number. `dtype` is the file's name for it."""

    dtype: str
    shape: tuple[int, ...]
    file: int
    begin: int
    end: int


class MappedVersion:
    """A version in the local peer's memory, or as much as was fetched."""

    def __init__(self, connection: LocalConnection, version: bytes) -> None:
        """Raises `ProtocolError` when the peer did not pass it."""
        if connection.checkpoint is None:
            raise ProtocolError("the local peer did not pass the checkpoint: it is too old")
        self._connection = connection
        self.version = version
        self._view = connection.checkpoint
        self.manifest = read_manifest(bytes(self._view[connection.hello.checkpoint_manifest :]))
        self._begins = plan_memory([file.size for file in self.manifest.files], 0).files

    def bytes_of(self, file: int, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes of a file, as far as it has them."""
        size = self.manifest.files[file].size
        at = self._begins[file]
        return self._view[at + min(begin, size) : at + (size if end is None else min(end, size))]

    def close(self) -> None:
        """Release it; idempotent."""
        self._connection.close()


class CheckpointTensors(Mapping[str, Any]):
    """The tensors of one version, by name: read-only numpy arrays, or `torch` views, or `raw` bytes. Close it, or use
    it as a context manager: then the peer may free the memory; arrays that are still in use stay valid."""

    def __init__(
        self,
        version: MappedVersion,
        places: Mapping[str, TensorPlace],
        files: Collection[int],
        problems: Problems | None = None,
    ) -> None:
        """`files`: numbers of the files that are there whole."""
        self._version = version
        self._places = places
        self._files = {version.manifest.files[number].path: number for number in files}
        self._problems = problems or Problems({}, {})

    @property
    def broken(self) -> dict[str, str]:
        """Broken files of the version, by path, with the reason: their tensors are missing."""
        return dict(self._problems.files)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view. Raises `NoSuchKey` for a missing tensor, `CheckpointRefused` for a wrongly described one,
        and `P2PStoreError` for a dtype that numpy does not have here."""
        place = self._place(name)
        try:
            kind = numpy_dtype(_plain_name(place.dtype))
        except P2PStoreError as error:
            raise _unknown(name, place, "numpy", error) from error
        view = self._version.bytes_of(place.file, place.begin, place.end)
        with _as_shaped(name, place, "numpy"):
            if view.nbytes:
                return np.frombuffer(view, kind).reshape(place.shape)
            empty = np.empty(place.shape, kind)
        empty.flags.writeable = False
        return empty

    def torch(self, name: str) -> Any:
        """A torch tensor, also of dtypes that numpy lacks (bfloat16): a view without a copy. The memory is read-only,
        which torch does not know: writing in place ends the process. Raises as `[]`, and `P2PStoreError` where torch is
        not installed."""
        place = self._place(name)
        try:
            kind = torch_dtype(place.dtype, _plain_name(place.dtype))
        except P2PStoreError as error:
            raise _unknown(name, place, "torch", error) from error
        import torch

        view = self._version.bytes_of(place.file, place.begin, place.end)
        with _as_shaped(name, place, "torch"), warnings.catch_warnings():
            if not view.nbytes:
                return torch.empty(place.shape, dtype=kind)
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(view, dtype=kind).reshape(place.shape)

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes in the file, of any dtype. Raises as `[]`, except for a dtype."""
        place = self._place(name)
        return self._version.bytes_of(place.file, place.begin, place.end)

    def dtype(self, name: str) -> str:
        """The file's name for the tensor's dtype, such as `BF16` or `F4`. Raises like `raw`."""
        return self._place(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor, or of its wanted rows. Raises like `raw`."""
        return self._place(name).shape

    def _place(self, name: str) -> TensorPlace:
        place = self._places.get(name)
        if place is None:
            raise self._problems.why_not(name, self._places)
        return place

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def files(self) -> list[str]:
        """Paths of the files that are there: all, unless only some tensors were fetched."""
        return list(self._files)

    def file(self, path: str) -> memoryview:
        """The bytes of a file, such as `config.json`. Raises `KeyError` for one that is not there."""
        return self._version.bytes_of(self._files[path])

    def close(self) -> None:
        """Let the peer free the memory; idempotent."""
        self._version.close()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Problems(NamedTuple):
    """Faults of a version: of files, by path, and of tensors, by name."""

    files: dict[str, str]
    tensors: dict[str, str]

    def why_not(self, name: str, known: Collection[str]) -> P2PStoreError:
        """The error for a tensor that is not there."""
        if name in self.tensors:
            return CheckpointRefused(f"tensor {name!r}: {self.tensors[name]}")
        return NoSuchKey(f"there is no tensor {name!r} here{nearest(name, known)}{self.said()}")

    def said(self) -> str:
        """The broken files, to be appended to an error."""
        listed = [f"{path}: {why}" for path, why in self.files.items()]
        more = len(listed) - LOGGED_PROBLEMS
        shown = "; ".join(listed[:LOGGED_PROBLEMS]) + (f" and {more} more files" if more > 0 else "")
        return f"; broken, and left out: {shown}" if listed else ""


Rows = Callable[[str, tuple[int, ...]], slice | None]
"""The wanted rows (of the first dimension) of a tensor, by its name and shape; None for all."""


class TensorsWanted:
    """The pieces that wanted tensors are in. That stands in the files themselves: `look` at what is there, fetch
    `pieces`, and repeat until `look` finds no more; then `check`. A broken file affects only itself: see `problems`."""

    def __init__(
        self, names: Sequence[str] = (), files: Sequence[str] = (), rows: Rows | None = None
    ) -> None:
        """`names` and `files` are patterns; without any, all tensors and no other files."""
        self.pieces: PieceMap = NO_PIECES
        self.places: dict[str, TensorPlace] = {}
        self.files: set[int] = set()
        self.problems = Problems({}, {})
        self._names, self._patterns, self._rows = names, files, rows
        self._exact = frozenset(names)
        self._wild = [pattern for pattern in names if WILDCARDS & set(pattern)]
        self._steps = [self._ask_indexes, self._ask_headers, self._ask_long_headers, self._ask_rows]
        self._headed: list[int] = []
        self._by_index: dict[str, str] = {}
        """The file of a tensor by an index, which counts when several files have it."""
        self._known: set[str] = set()
        """Names of all tensors, wanted or not."""

    def look(self, version: MappedVersion) -> bool:
        """Whether more pieces are to be fetched now."""
        before = self.pieces
        while self._steps and self.pieces == before:
            self._steps.pop(0)(version)
        return self.pieces != before

    def take_all(self, version: MappedVersion) -> None:
        """All pieces are there."""
        self.files = set(range(len(version.manifest.files)))
        self._ask_headers(version)
        self._ask_long_headers(version)
        self._ask_rows(version)

    def check(self, manifest: Manifest) -> None:
        """Raises `NoSuchKey` for a name without a match, `CheckpointRefused` for a broken one. Logs other faults."""
        called = f"checkpoint {manifest.name!r}"
        for pattern in self._names:
            if not unmatched(self.places, (pattern,)):
                continue
            for name, why in self.problems.tensors.items():
                if matches(name, (pattern,)):
                    raise CheckpointRefused(f"{called}: tensor {name!r}: {why}")
            raise NoSuchKey(
                f"no tensor of {called} matches {pattern!r}{nearest(pattern, self._known)}{self.problems.said()}"
            )
        paths = [file.path for file in manifest.files]
        for pattern in unmatched(paths, self._patterns):
            raise NoSuchKey(f"no file of {called} matches {pattern!r}{nearest(pattern, paths)}")
        if not self.places and not self._patterns and (self.problems.files or self.problems.tensors):
            bad = [
                f"{path} is not in the safetensors format: {why}"
                for path, why in self.problems.files.items()
            ]
            bad += [f"tensor {name!r}: {why}" for name, why in self.problems.tensors.items()]
            raise CheckpointRefused(f"{called}: {'; '.join(bad[:LOGGED_PROBLEMS])}")
        self._log(called)

    def _log(self, called: str) -> None:
        problems = [*self.problems.files.items(), *self.problems.tensors.items()]
        for what, why in problems[:LOGGED_PROBLEMS]:
            logger.warning("%s: %s is left out: %s", called, what, why)
        if len(problems) > LOGGED_PROBLEMS:
            logger.warning("%s: %d more are left out", called, len(problems) - LOGGED_PROBLEMS)

    def _ask(self, version: MappedVersion, file: int, begin: int = 0, end: int | None = None) -> None:
        self.pieces |= map_of(version.manifest.layout.pieces_of(file, begin, end))

    def _ask_indexes(self, version: MappedVersion) -> None:
        for number, file in enumerate(version.manifest.files):
            chosen = self._patterns and is_chosen(file.path, self._patterns, ())
            if file.path.endswith(SUFFIX + INDEX_SUFFIX) or chosen:
                self.files.add(number)
                self._ask(version, number)

    def _ask_headers(self, version: MappedVersion) -> None:
        """Ask for the beginnings of files that may have wanted tensors."""
        useful: set[str] = set()
        useless: set[str] = set()
        there = {file.path for file in version.manifest.files}
        for number in sorted(self.files):
            path = version.manifest.files[number].path
            if not path.endswith(SUFFIX + INDEX_SUFFIX):
                continue
            for name, file in self._files_in_index(path, version.bytes_of(number)):
                self._known.add(name)
                self._by_index[name] = file
                (useful if self._is_wanted(name) else useless).add(file)
                if file not in there:
                    self.problems.tensors[name] = f"{path} says that it is in {file}, and there is none"
        for number, entry in enumerate(version.manifest.files):
            is_safetensors = entry.path.endswith(SUFFIX) and not entry.dtype
            if is_safetensors and entry.path not in useless - useful:
                self._headed.append(number)
                self._ask(version, number, 0, HEAD_BYTES)

    def _files_in_index(self, path: str, content: memoryview) -> Iterator[tuple[str, str]]:
        folder = path.rpartition("/")[0]
        try:
            for name, file in read_weight_map(content).items():
                yield name, path_in_index(folder, file)
        except BrokenFile as error:
            self.problems.files[path] = str(error)

    def _ask_long_headers(self, version: MappedVersion) -> None:
        good = []
        for number in self._headed:
            file = version.manifest.files[number]
            try:
                end = header_end(version.bytes_of(number, 0, HEAD_BYTES), file.size)
            except BrokenFile as error:
                self.problems.files[file.path] = str(error)
                continue
            good.append(number)
            self._ask(version, number, 0, end)
        self._headed = good

    def _ask_rows(self, version: MappedVersion) -> None:
        for number, file in enumerate(version.manifest.files):
            if file.dtype:
                self._place(
                    version, file.path, TensorPlace(file.dtype, tuple(file.shape), number, 0, file.size)
                )
        for number in self._headed:
            file = version.manifest.files[number]
            try:
                header = read_header(version.bytes_of(number), file.size)
            except BrokenFile as error:
                self.problems.files[file.path] = str(error)
                continue
            for name, entry in header.entries.items():
                if name in self.places and self._by_index.get(name) != file.path:
                    continue
                self._place(version, name, TensorPlace(*entry[:2], number, *entry[2:]))
            for name, why in header.bad.items():
                self._known.add(name)
                self.problems.tensors[name] = f"{file.path}: {why}"
        self._find_missing()

    def _find_missing(self) -> None:
        for name, path in self._by_index.items():
            if self._is_wanted(name) and name not in self.places:
                why = self.problems.files.get(path, "it has no such tensor")
                self.problems.tensors.setdefault(name, f"by its index it is in {path}: {why}")

    def _place(self, version: MappedVersion, name: str, place: TensorPlace) -> None:
        self._known.add(name)
        self.problems.tensors.pop(name, None)
        if not self._is_wanted(name):
            return
        if self._rows is not None and (rows := self._rows(name, place.shape)) is not None:
            place = _rows_of(name, place, rows)
        self.places[name] = place
        self._ask(version, place.file, place.begin, place.end)

    def _is_wanted(self, name: str) -> bool:
        return not self._names or name in self._exact or matches(name, self._wild)


def _plain_name(dtype: str) -> str:
    """The name of a dtype in numpy, ml_dtypes or torch. An accidental namesake does not count: U4 of the format
    would be text to numpy. Raises `P2PStoreError`."""
    if dtype not in DTYPES and dtype not in _PLAIN_NAMES:
        raise P2PStoreError(f"{dtype!r} is not known here")
    return DTYPES.get(dtype, dtype)


@contextmanager
def _as_shaped(name: str, place: TensorPlace, library: str) -> Iterator[None]:
    """Raise a shape that an array cannot have, such as an empty one of (0, 2**62), as a `P2PStoreError`."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise P2PStoreError(
            f"tensor {name!r} of dtype {place.dtype} and shape {place.shape} cannot be an array of {library}: {error}; "
            f"its bytes: raw({name!r})"
        ) from error


def _unknown(name: str, place: TensorPlace, library: str, error: P2PStoreError) -> P2PStoreError:
    other = f"torch({name!r})" if library == "numpy" else f"[{name!r}]"
    return P2PStoreError(
        f"tensor {name!r} has dtype {place.dtype} and shape {place.shape}, and {library} has no such dtype here "
        f"({error}): try {other}, or take its bytes: raw({name!r})"
    )


def _rows_of(name: str, place: TensorPlace, rows: slice) -> TensorPlace:
    if not place.shape:
        raise ValueError(f"{name} has no rows: it is a scalar")
    begin, end, step = rows.indices(place.shape[0])
    if step != 1:
        raise ValueError(f"{name}: rows must be consecutive, not every {step}th")
    end = max(begin, end)
    whole, count = place.end - place.begin, place.shape[0]
    if count and whole % count:
        raise ValueError(f"{name}: its rows are not whole bytes ({place.dtype}): take all of it")
    row_bytes = whole // count if count else 0
    return place._replace(
        shape=(end - begin, *place.shape[1:]),
        begin=place.begin + begin * row_bytes,
        end=place.begin + end * row_bytes,
    )
