"""Tensors of a checkpoint in the local peer's memory: views, without a copy.

Files in the safetensors format, and tensors that were published as such, are tensors by name; every file can be had as
bytes. The memory is mapped read-only and stays as long as a view of it does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import numpy as np

from p2pstore.checkpoint.manifest import FileEntry, read_manifest
from p2pstore.checkpoint.memory_layout import plan_memory
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
MAX_HEADER_BYTES: Final = 100_000_000
"""As the format has it."""


class _Place(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class CheckpointTensors(Mapping[str, Any]):
    """The tensors of one version, by name: read-only numpy arrays. Close it, or use it as a context manager: then the
    peer may use the memory for something else; arrays that are still there stay what they are."""

    def __init__(self, connection: LocalConnection, names: tuple[str, ...] = ()) -> None:
        """`names` are patterns of the tensors that are wanted; all, when there are none. Raises `CheckpointRefused` for
        files that are not what they are called."""
        if connection.checkpoint is None:
            raise ProtocolError("the local peer did not pass the checkpoint: it is too old")
        self._connection = connection
        self._view = connection.checkpoint
        manifest = read_manifest(bytes(self._view[connection.hello.checkpoint_manifest :]))
        sizes = [file.size for file in manifest.files]
        begins = plan_memory(sizes, 0).files
        self._files = {
            file.path: (begin, file.size)
            for begin, file in zip(begins, manifest.files, strict=True)
        }
        self._places: dict[str, _Place] = {}
        for begin, file in zip(begins, manifest.files, strict=True):
            for name, place in self._tensors_of(file, begin):
                if not names or any(fnmatchcase(name, pattern) for pattern in names):
                    self._places[name] = place

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        place = self._places[name]
        flat = np.frombuffer(self._view[place.begin : place.end], numpy_dtype(place.dtype))
        return flat.reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def files(self) -> list[str]:
        """The paths of all files."""
        return list(self._files)

    def file(self, path: str) -> memoryview:
        """The bytes of a file, such as `config.json`. Raises `KeyError`."""
        begin, size = self._files[path]
        return self._view[begin : begin + size]

    def close(self) -> None:
        """Tell the peer that nobody looks at it any more; may be called twice."""
        self._connection.close()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensors_of(self, file: FileEntry, begin: int) -> Iterator[tuple[str, _Place]]:
        if file.dtype:
            yield file.path, _Place(file.dtype, tuple(file.shape), begin, begin + file.size)
        elif file.path.endswith(".safetensors"):
            try:
                yield from _in_safetensors(self._view[begin : begin + file.size], begin)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointRefused(
                    f"{file.path} is not in the safetensors format: {error}"
                ) from error


def _in_safetensors(view: memoryview, begin: int) -> Iterator[tuple[str, _Place]]:
    """The tensors in a file's bytes, which begin at `begin` of the memory. Raises `ValueError`, `KeyError`, `TypeError`
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
        yield name, _Place(dtype, shape, begin + data + first, begin + data + last)
