"""Tensors of a checkpoint in the local peer's memory: views, without a copy.

Files in the safetensors format, and tensors that were published as such, are tensors by name; every file can be had as
bytes. The memory is mapped read-only and stays as long as a view of it does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import numpy as np

from p2pstore.checkpoint.choosing import is_chosen
from p2pstore.checkpoint.manifest import Manifest, read_manifest
from p2pstore.checkpoint.memory_layout import plan_memory
from p2pstore.checkpoint.piece_map import NO_PIECES, PieceMap, map_of
from p2pstore.client.values import numpy_dtype
from p2pstore.errors import CheckpointRefused, ProtocolError
from p2pstore.local.connection import LocalConnection

DTYPES: Final[Mapping[str, str]] = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
}
"""What safetensors calls them, and numpy or ml_dtypes."""
INDEX_SUFFIX: Final = ".safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000
"""As the format has it."""


class Place(NamedTuple):
    """Where a tensor is: from `begin` to `end` of a file, which is given by its number."""

    dtype: str
    shape: tuple[int, ...]
    file: int
    begin: int
    end: int


class MappedVersion:
    """A version in the local peer's memory, or as much of it as was fetched."""

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
        """Some bytes of a file."""
        size = self.manifest.files[file].size
        at = self._begins[file]
        return self._view[at + begin : at + (size if end is None else end)]

    def close(self) -> None:
        """Let go of it; may be called twice."""
        self._connection.close()


class CheckpointTensors(Mapping[str, Any]):
    """The tensors of one version, by name: read-only numpy arrays. Close it, or use it as a context manager: then the
    peer may use the memory for something else; arrays that are still there stay what they are."""

    def __init__(
        self, version: MappedVersion, places: Mapping[str, Place], files: Collection[int]
    ) -> None:
        """`files`: the numbers of those that are there whole."""
        self._version = version
        self._places = places
        self._files = {version.manifest.files[number].path: number for number in files}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        place = self._places[name]
        view = self._version.bytes_of(place.file, place.begin, place.end)
        flat = np.frombuffer(view, numpy_dtype(place.dtype))
        return flat.reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def files(self) -> list[str]:
        """The paths of the files that are there: all, unless some tensors only were fetched."""
        return list(self._files)

    def file(self, path: str) -> memoryview:
        """The bytes of a file, such as `config.json`. Raises `KeyError` for one that is not there."""
        return self._version.bytes_of(self._files[path])

    def close(self) -> None:
        """Tell the peer that nobody looks at it any more; may be called twice."""
        self._version.close()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Rows = Callable[[str, tuple[int, ...]], slice | None]
"""Which rows (of the first dimension) of a tensor are wanted, by its name and shape; None for all."""


class TensorsWanted:
    """Which pieces of a version some tensors are in. That stands in the files themselves: so `look` at what is there,
    fetch `pieces`, and look again, until it finds nothing more. Raises `CheckpointRefused` for files that are not what
    they are called."""

    def __init__(
        self, names: Sequence[str] = (), files: Sequence[str] = (), rows: Rows | None = None
    ) -> None:
        """`names` and `files` are patterns; all tensors, and no other files, when there are none."""
        self.pieces: PieceMap = NO_PIECES
        self.places: dict[str, Place] = {}
        self.files: set[int] = set()
        self._names, self._patterns, self._rows = names, files, rows
        self._steps = [self._ask_indexes, self._ask_headers, self._ask_long_headers, self._ask_rows]
        self._headed: list[int] = []

    def look(self, version: MappedVersion) -> bool:
        """Whether more is to be fetched now."""
        before = self.pieces
        while self._steps and self.pieces == before:
            self._steps.pop(0)(version)
        return self.pieces != before

    def take_all(self, version: MappedVersion) -> None:
        """Everything is there."""
        self.files = set(range(len(version.manifest.files)))
        self._headed = self._safetensors(version.manifest)
        self._ask_rows(version)

    def _ask(
        self, version: MappedVersion, file: int, begin: int = 0, end: int | None = None
    ) -> None:
        self.pieces |= map_of(version.manifest.layout.pieces_of(file, begin, end))

    def _ask_indexes(self, version: MappedVersion) -> None:
        """What says which file has which tensor; and other files that are wanted."""
        for number, file in enumerate(version.manifest.files):
            chosen = self._patterns and is_chosen(file.path, self._patterns, ())
            if file.path.endswith(INDEX_SUFFIX) or chosen:
                self.files.add(number)
                self._ask(version, number)

    def _ask_headers(self, version: MappedVersion) -> None:
        """The beginnings of files that may have wanted tensors."""
        useful: set[str] = set()
        useless: set[str] = set()
        for number in self.files:
            path = version.manifest.files[number].path
            if path.endswith(INDEX_SUFFIX):
                for file, is_wanted in self._files_in_index(path, version.bytes_of(number)):
                    (useful if is_wanted else useless).add(file)
        for number in self._safetensors(version.manifest):
            if version.manifest.files[number].path not in useless - useful:
                self._headed.append(number)
                self._ask(version, number, 0, 8)

    def _files_in_index(self, path: str, content: memoryview) -> Iterator[tuple[str, bool]]:
        folder = path.rpartition("/")[0]
        try:
            for name, file in json.loads(bytes(content))["weight_map"].items():
                yield f"{folder}/{file}" if folder else str(file), self._is_wanted(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointRefused(f"{path} is no index of safetensors files: {error}") from error

    def _ask_long_headers(self, version: MappedVersion) -> None:
        """Their headers, where these are longer than what came with their beginnings."""
        for number in self._headed:
            length = int.from_bytes(version.bytes_of(number, 0, 8), "little")
            self._ask(version, number, 0, 8 + min(length, MAX_HEADER_BYTES))

    def _ask_rows(self, version: MappedVersion) -> None:
        """The tensors themselves."""
        for number, file in enumerate(version.manifest.files):
            if file.dtype:
                self._place(
                    version, file.path, Place(file.dtype, tuple(file.shape), number, 0, file.size)
                )
        for number in self._headed:
            try:
                found = list(_in_safetensors(version.bytes_of(number), number))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                path = version.manifest.files[number].path
                raise CheckpointRefused(
                    f"{path} is not in the safetensors format: {error}"
                ) from error
            for name, place in found:
                self._place(version, name, place)

    def _place(self, version: MappedVersion, name: str, place: Place) -> None:
        if not self._is_wanted(name):
            return
        if self._rows is not None and (rows := self._rows(name, place.shape)) is not None:
            place = _rows_of(name, place, rows)
        self.places[name] = place
        self._ask(version, place.file, place.begin, place.end)

    def _is_wanted(self, name: str) -> bool:
        return not self._names or any(fnmatchcase(name, pattern) for pattern in self._names)

    @staticmethod
    def _safetensors(manifest: Manifest) -> list[int]:
        return [
            number
            for number, file in enumerate(manifest.files)
            if file.path.endswith(".safetensors") and not file.dtype
        ]


def _rows_of(name: str, place: Place, rows: slice) -> Place:
    """Some rows of a tensor: they lie one behind the other."""
    if not place.shape:
        raise ValueError(f"{name} has no rows: it is one number")
    begin, end, step = rows.indices(place.shape[0])
    if step != 1:
        raise ValueError(f"{name}: rows one behind the other, please, not every {step}th")
    end = max(begin, end)
    row_bytes = (place.end - place.begin) // place.shape[0] if place.shape[0] else 0
    return place._replace(
        shape=(end - begin, *place.shape[1:]),
        begin=place.begin + begin * row_bytes,
        end=place.begin + end * row_bytes,
    )


def _in_safetensors(view: memoryview, file: int) -> Iterator[tuple[str, Place]]:
    """The tensors in a file, whose bytes these are, its header at least. Raises `ValueError`, `KeyError`, `TypeError`
    and `AttributeError` for what is no such file."""
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError("its header is longer than it")
    data = 8 + length
    for name, told in json.loads(bytes(view[8:data])).items():
        if name == "__metadata__":
            continue
        first, last = told["data_offsets"]
        shape, dtype = tuple(told["shape"]), DTYPES[told["dtype"]]
        if not 0 <= first <= last <= len(view) - data or min(shape, default=0) < 0:
            raise ValueError(f"{name} lies outside of it")
        if math.prod(shape) * numpy_dtype(dtype).itemsize != last - first:
            raise ValueError(f"{name} has not the length of its shape")
        yield name, Place(dtype, shape, file, data + first, data + last)
