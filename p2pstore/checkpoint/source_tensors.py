"""Named tensors in memory that are published, as a trainer has them. Pure.

Each tensor is what a file is otherwise: its name is a path, its bytes are the content, and dtype and shape travel with
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.checkpoint.manifest import Manifest
from p2pstore.checkpoint.pieces import Extent
from p2pstore.errors import CheckpointChanged, CheckpointRefused

TENSOR_MODE: Final = 0o644
"""Of the file that a tensor becomes where it is fetched to a directory."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor's bytes, in C order, with what they mean."""

    data: bytes | bytearray | memoryview
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a manifest says of a tensor, but its hash."""

    path: str
    size: int
    mode: int
    dtype: str
    shape: tuple[int, ...]


class SourceTensors:
    """Tensors by name, in the order of their names. The caller leaves them as they are while they are published."""

    def __init__(self, tensors: Mapping[str, NamedTensor]) -> None:
        """Raises `CheckpointRefused` when there is none, and `ValueError` for memory that is not contiguous."""
        if not tensors:
            raise CheckpointRefused("there is no tensor to publish")
        self._data: list[memoryview] = []
        self.files: list[TensorEntry] = []
        for name, tensor in sorted(tensors.items()):
            view = memoryview(tensor.data)
            if not view.c_contiguous:
                raise ValueError(f"{name}: its memory is not contiguous; make a copy that is")
            self._data.append(view.cast("B"))
            self.files.append(
                TensorEntry(name, view.nbytes, TENSOR_MODE, tensor.dtype, tuple(tensor.shape))
            )

    def read(self, extents: Sequence[Extent]) -> bytearray:
        """The bytes of these ranges, one behind the other."""
        data = bytearray()
        for file, offset, length in extents:
            data += self._data[file][offset : offset + length]
        return data

    def check(self) -> None:
        """Memory has no time of its last change: only a piece's hash tells, when it is sent."""

    def read_piece(self, manifest: Manifest, piece: int) -> bytearray:
        """A piece of the manifest that was made of these tensors. Raises `CheckpointChanged` when they are others."""
        data = self.read(manifest.layout.extents(piece))
        if not manifest.is_piece(piece, data):
            name = self.files[manifest.layout.extents(piece)[0].file].path
            raise CheckpointChanged(f"{name}: not the bytes that were published")
        return data
