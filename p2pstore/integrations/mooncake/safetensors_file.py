"""One tensor in a safetensors file: u64 length of the JSON header, the header, the elements."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from p2pstore.folder import Folder

_LENGTH: Final = struct.Struct("<Q")
MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
"""What the safetensors library allows."""
_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES: Final = {short: name for name, short in _DTYPES.items()}


def write_one(path: str, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> None:
    """A file with one tensor; appears when it is complete. Raises `OSError`, and `ValueError` for a dtype that such
    files do not have."""
    if dtype not in _DTYPES:
        raise ValueError(f"safetensors files have no {dtype}")
    entry = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [0, len(data)]}
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
        try:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            found = (
                name
                if name in entries
                else min(entries, key=lambda each: entries[each]["data_offsets"])
            )
            entry = entries[found]
            start, end = entry["data_offsets"]
            dtype: Any = getattr(torch, _NAMES[entry["dtype"]])
            shape = [int(each) for each in entry["shape"]]
            if end - start != math.prod(shape) * dtype.itemsize or start < 0:
                raise ValueError("shape and length do not fit")
        except (struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            room = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            file.seek(_LENGTH.size + length + start)
            if file.readinto(room) != len(room):
                raise ValueError(f"{path} is no safetensors file: it ends too soon")
    return tensor, found
