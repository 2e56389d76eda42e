"""Named tensors as a safetensors file in sealed memory, from which the local peer publishes. They are copied once: the
peer reads the same memory, which stays as long as it is published."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from p2pstore.checkpoint.content.safetensors import DTYPES, MAX_HEADER_BYTES
from p2pstore.checkpoint.content.sources import SEALS
from p2pstore.errors import CapacityExceeded, CheckpointRefused
from p2pstore.memory.mapped.mapped_memory import available_memory
from p2pstore.objects import format_bytes
from p2pstore.values import TORCH_PREFIX, describe_tensor, source_view

FILE_NAME: Final = "model.safetensors"
ALIGNMENT: Final = 8
_NAMES: Final = {name: short for short, name in DTYPES.items()}


class TensorImage(NamedTuple):
    """The file's header, and the bytes of its tensors in order."""

    header: bytes
    tensors: list[memoryview]

    @property
    def total_bytes(self) -> int:
        """Of the file."""
        return len(self.header) + sum(view.nbytes for view in self.tensors)


def plan_image(tensors: Mapping[Any, Any]) -> TensorImage:
    """The layout of the file. The largest elements come first, so that all are aligned; then by name, so that equal
    tensors always have the same place, and versions share unchanged pieces.

    Raises `CheckpointRefused` without tensors and for a dtype outside the format, `TypeError` and `ValueError` for what
    is no contiguous tensor in this host's memory.
    """
    if not tensors:
        raise CheckpointRefused("there is no tensor to publish")
    described = []
    for name, tensor in tensors.items():
        dtype, shape = describe_tensor(tensor)
        short = _NAMES.get(dtype.removeprefix(TORCH_PREFIX))
        if short is None or not isinstance(name, str) or name == "__metadata__":
            raise CheckpointRefused(
                f"{name!r} of {dtype} cannot be published: names are text, dtypes one of {', '.join(_NAMES)}"
            )
        view = source_view(tensor)
        items = 1
        for length in shape:
            items *= length
        described.append((-(view.nbytes // items if items else 1), name, short, shape, view))
    described.sort(key=lambda each: each[:2])
    header: dict[str, Any] = {}
    views, at = [], 0
    for _, name, short, shape, view in described:
        header[name] = {"dtype": short, "shape": list(shape), "data_offsets": [at, at + view.nbytes]}
        at += view.nbytes
        views.append(view)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointRefused(f"{len(tensors):,} tensors are too many for one file: publish fewer")
    return TensorImage(len(text).to_bytes(8, "little") + text, views)


def write_image(image: TensorImage) -> int:
    """A descriptor of sealed memory with the file, to be closed. Raises `CapacityExceeded` without room."""
    room, where = available_memory()
    if image.total_bytes > room:
        raise CapacityExceeded(
            f"{format_bytes(image.total_bytes)} of tensors have no room in memory: {format_bytes(room)} are left of "
            f"{where}; publish them from files"
        )
    descriptor = os.memfd_create("p2pstore-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for view in (memoryview(image.header), *image.tensors):
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
