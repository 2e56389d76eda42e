"""The safetensors format: reading headers and indexes, and naming the faults of broken files. Pure.

A file is a u64 (little-endian), as many bytes of JSON, then the bytes of its tensors. A wrongly described tensor does
not affect others. An unknown dtype keeps its name, and its bytes can be read.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".index.json"
DTYPES: Final[Mapping[str, str]] = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "C64": "complex64"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
}
"""Dtypes of the format with whole bytes, and their names in numpy, ml_dtypes or torch."""
BITS: Final[Mapping[str, int]] = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Bits of an element, where known."""
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The format's limit."""
MAX_DIMENSIONS: Final = 64
"""The limit of numpy and torch."""
HEAD_BYTES: Final = 512
"""Beginning of a file that shows its kind."""
_METADATA: Final = "__metadata__"
_LFS: Final = b"version https://git-lfs"
_PAGES: Final = (b"<!doctype html", b"<html", b"<?xml")
_UNFINISHED: Final = ": perhaps an unfinished download, or a full disk"


class BrokenFile(ValueError):
    """The file is not of the format; the text says why."""


class Entry(NamedTuple):
    """A tensor: bytes `begin` to `end` of its file. `dtype` is the format's name."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors of a file by name, and the faults of others."""

    entries: dict[str, Entry]
    bad: dict[str, str]


def header_end(head: bytes | memoryview, file_bytes: int) -> int:
    """End of the header of a file with this beginning. Raises `BrokenFile`."""
    if file_bytes < LENGTH_BYTES:
        raise BrokenFile(likely_cause(head, file_bytes) or f"it has {file_bytes} bytes only")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length <= file_bytes - LENGTH_BYTES and length <= MAX_HEADER_BYTES:
        return LENGTH_BYTES + length
    if cause := likely_cause(head, file_bytes):
        raise BrokenFile(cause)
    if bytes(head[LENGTH_BYTES : LENGTH_BYTES + 1]) != b"{":
        raise BrokenFile("it does not begin like a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise BrokenFile(f"its header would have {length:,} bytes; {MAX_HEADER_BYTES:,} are allowed")
    raise BrokenFile(f"it ends inside its header{_UNFINISHED}")


def read_header(content: bytes | memoryview, file_bytes: int) -> Header:
    """The header of a file, given its beginning up to the header's end at least. Raises `BrokenFile`."""
    data = header_end(content[:HEAD_BYTES], file_bytes)
    try:
        told = json.loads(
            str(content[LENGTH_BYTES:data], "utf-8"),
            object_pairs_hook=_each_once,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        cause = likely_cause(content[:HEAD_BYTES], file_bytes)
        raise BrokenFile(cause or f"its header is not JSON of the format: {error}") from None
    if not isinstance(told, dict):
        raise BrokenFile("its header is not a JSON object")
    header = Header({}, {})
    for name, fields in told.items():
        if name == _METADATA:
            continue
        try:
            header.entries[name] = _entry(fields, data, file_bytes)
        except ValueError as error:
            header.bad[name] = str(error)
    _set_overlapping_apart(header)
    return header


def likely_cause(head: bytes | memoryview, file_bytes: int) -> str:
    """The likely kind of a file with this beginning that is not of the format; empty when unknown."""
    start = bytes(head[:HEAD_BYTES])
    if not file_bytes:
        return f"it is empty{_UNFINISHED}"
    if start.startswith(_LFS):
        return "it is a git-LFS pointer, not the file itself: run `git lfs pull` where it came from"
    if start.lstrip().lower().startswith(_PAGES):
        return "it is an HTML page, not the file itself: the download was answered with an error or a login page"
    if not start.strip(b"\0"):
        return f"it begins with zeros{_UNFINISHED}"
    return ""


def read_weight_map(content: bytes | memoryview) -> dict[str, str]:
    """The file of each tensor, by an index (`*.index.json`). Raises `BrokenFile`."""
    try:
        told = json.loads(str(content, "utf-8"))
        shards: dict[str, str] = told["weight_map"]
        if all(isinstance(file, str) for file in shards.values()):
            return shards
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    cause = likely_cause(content[:HEAD_BYTES], len(content))
    raise BrokenFile(cause or 'it is no index of tensors: JSON with a "weight_map" of names and files')


def path_in_index(folder: str, file: str) -> str:
    """The path of a file that an index in a folder names, perhaps as `./NAME`."""
    return posixpath.normpath(posixpath.join(folder, file))


def _entry(fields: Any, data: int, file_bytes: int) -> Entry:
    """Raises `ValueError`."""
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        first, last = fields["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("the header lacks its dtype, shape or offsets") from None
    numbers = (*shape, first, last)
    if (
        not isinstance(dtype, str)
        or len(shape) > MAX_DIMENSIONS
        or any(type(each) is not int or not 0 <= each < 1 << 63 for each in numbers)
    ):
        raise ValueError("its dtype, shape or offsets are invalid")
    if first > last:
        raise ValueError(f"it would end, at {last}, before it begins, at {first}")
    if data + last > file_bytes:
        raise ValueError(
            f"its file has {file_bytes:,} bytes, and it would end at {data + last:,}{_UNFINISHED}"
        )
    bits = BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (last - first):
        raise ValueError(f"{last - first:,} bytes are not those of shape {shape} and {dtype}")
    return Entry(dtype, shape, data + first, data + last)


def _set_overlapping_apart(header: Header) -> None:
    """Move tensors that share bytes to the faults: none can be trusted."""
    order = sorted(
        (entry.begin, entry.end, name)
        for name, entry in header.entries.items()
        if entry.end > entry.begin
    )
    reach, widest = 0, ""
    for begin, end, name in order:
        if begin < reach:
            for each, other in ((name, widest), (widest, name)):
                header.bad[each] = f"its bytes are those of {other!r} as well"
        if end > reach:
            reach, widest = end, name
    for name in header.bad:
        header.entries.pop(name, None)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(first for first, second in pairwise(names) if first == second)
        raise ValueError(f"{twice[:80]!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
