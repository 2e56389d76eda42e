"""One tensor in a safetensors file: u64 length of the JSON header, the header, the elements."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from p2pstore.checkpoint.content.safetensors import (
    DTYPES,
    HEAD_BYTES,
    BrokenFile,
    Header,
    header_end,
    read_header,
)
from p2pstore.state.folder import Folder

_LENGTH: Final = struct.Struct("<Q")
_SHORT: Final = {name: short for short, name in DTYPES.items()}


def write_one(path: str, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> None:
    """A file with one tensor; appears when it is complete. Raises `OSError`, and `ValueError` for a dtype that such
    files do not have."""
    if dtype not in _SHORT:
        raise ValueError(f"safetensors files have no {dtype}")
    entry = {"dtype": _SHORT[dtype], "shape": list(shape), "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    unfinished = Path(f"{path}.part")
    try:
        with Folder(unfinished.parent) as folder:
            descriptor = folder.create(unfinished.name, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_LENGTH.pack(len(header)) + header)
            file.write(data)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_one(path: str, name: str) -> Any:
    """The torch tensor of that name, or the first one in the file; and the name it has there. Raises `OSError`, and
    `ValueError` for what is no such file."""
    import torch

    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            end = header_end(file.read(HEAD_BYTES), size)
            file.seek(0)
            header = read_header(file.read(end), size)
        except BrokenFile as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        found = name if name in header.entries or name in header.bad else _first(header, path)
        if found in header.bad:
            raise ValueError(f"{path}: tensor {found!r}: {header.bad[found]}")
        entry = header.entries[found]
        dtype: Any = getattr(torch, DTYPES.get(entry.dtype, ""), None)
        if dtype is None:
            raise ValueError(
                f"{path}: tensor {found!r} is {entry.dtype}, which torch does not have"
            )
        try:
            tensor = torch.empty(entry.shape, dtype=dtype)
        except RuntimeError as error:  # there is no memory, or lengths beside a 0 are too large
            raise ValueError(f"{path}: tensor {found!r}: {error}") from error
        if tensor.numel():
            room = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            file.seek(entry.begin)
            if file.readinto(room) != len(room):
                raise ValueError(f"{path} is no safetensors file: it ends too soon")
    return tensor, found


def _first(header: Header, path: str) -> str:
    """The tensor that comes first in the file. Raises `ValueError` when there is none."""
    if not header.entries:
        raise ValueError(f"{path} has no tensor that can be read")
    return min(header.entries, key=lambda each: header.entries[each].begin)
