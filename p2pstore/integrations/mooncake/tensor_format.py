"""Tensors as Mooncake stores them: a header of 304 bytes, then the elements.

Header: `u32 magic | u16 version=1 | u16 304 | u32 dtype | u32 rank | u32 sharded | u32 0 | u64 304 | u64 data bytes`,
the whole tensor's shape and this one's (8 i64 each, -1 where there is no dimension), then for a shard
`u32 axes | u32 0`, for each axis `i32 kind | i32 its place | i32 rank | i32 of | i32 dimension | i32 number |
i64 its length there`, and zeros.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from p2pstore.checkpoint.content.safetensors import DTYPES as SAFETENSORS_DTYPES
from p2pstore.checkpoint.content.safetensors import (
    HEAD_BYTES,
    BrokenFile,
    Header,
    header_end,
    read_header,
)
from p2pstore.state.folder import Folder
from p2pstore.values import memory_was_freed

HEADER_BYTES: Final = 304
MAX_RANK: Final = 8
MAGIC: Final = 0x4D4F4F4E
VERSION: Final = 1

_HEAD: Final = struct.Struct("<IHHIIIIQQ8q8q")
_AXES: Final = struct.Struct("<II")
_AXIS: Final = struct.Struct("<iiiiiiq")
MAX_AXES: Final = 4
TP: Final = 1
MAX_SHARDS: Final = 65_536

DTYPES: Final = {
    "float32": 0,
    "float64": 1,
    "int8": 2,
    "uint8": 3,
    "int16": 4,
    "uint16": 5,
    "int32": 6,
    "uint32": 7,
    "int64": 8,
    "uint64": 9,
    "bool": 10,
    "float16": 11,
    "bfloat16": 12,
    "float8_e4m3fn": 13,
    "float8_e5m2": 14,
}
"""Name of a dtype in torch -> its number in a header."""
_NAMES: Final = {number: name for name, number in DTYPES.items()}
_LENGTH: Final = struct.Struct("<Q")
_SHORT: Final = {name: short for short, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LayoutAxis:
    """Which part of a whole: number `rank` of `count` along dimension `split_dim` (None: not cut). `kind` is 0 dp, 1
    tp, 2 ep, 3 pp; `number` that of the expert or stage."""

    kind: int
    rank: int
    count: int
    split_dim: int | None = None
    number: int = 0


def tp_shard(rank: int, count: int, dimension: int) -> tuple[LayoutAxis, ...]:
    """The axes of a tensor that is cut and nothing else."""
    return (LayoutAxis(TP, rank, count, dimension),)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A decoded header. `whole`: the shape of the tensor that this is a shard of, by its `axes`; or its own."""

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    whole: tuple[int, ...]
    axes: tuple[LayoutAxis, ...] = ()

    @property
    def total_bytes(self) -> int:
        return HEADER_BYTES + self.data_bytes


def encode_header(header: TensorHeader) -> bytes:
    """The 304 bytes. Raises `ValueError` for a rank that the format does not have."""
    if len(header.shape) > MAX_RANK:
        raise ValueError(f"a tensor has at most {MAX_RANK} dimensions, not {len(header.shape)}")
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        DTYPES[header.dtype],
        len(header.shape),
        bool(header.axes),
        0,
        HEADER_BYTES,
        header.data_bytes,
        *_padded(header.whole),
        *_padded(header.shape),
    )
    if header.axes:
        head += _AXES.pack(len(header.axes), 0)
    for place, axis in enumerate(header.axes):
        split = -1 if axis.split_dim is None else axis.split_dim
        length = 0 if axis.split_dim is None else header.shape[axis.split_dim]
        head += _AXIS.pack(axis.kind, place, axis.rank, axis.count, split, axis.number, length)
    return head.ljust(HEADER_BYTES, b"\0")


def decode_header(data: memoryview | bytes) -> TensorHeader:
    """Decode the header of a value. Raises `ValueError` for a value that is no tensor."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are no tensor: its header has {HEADER_BYTES}")
    fields = _HEAD.unpack_from(data)
    magic, version, length, number, rank, sharded, _, offset, data_bytes = fields[:9]
    if (magic, version, length, offset) != (MAGIC, VERSION, HEADER_BYTES, HEADER_BYTES):
        raise ValueError("the value was not put as a tensor")
    if rank > MAX_RANK or number not in _NAMES:
        raise ValueError(f"a tensor of dtype {number} with {rank} dimensions is not known")
    whole, shape = tuple(fields[9 : 9 + rank]), tuple(fields[17 : 17 + rank])
    if min(shape, default=0) < 0:
        raise ValueError(f"a tensor cannot have the shape {shape}")
    axes = _decode_axes(data) if sharded else ()
    return TensorHeader(_NAMES[number], shape, data_bytes, whole, axes)


def _decode_axes(data: memoryview | bytes) -> tuple[LayoutAxis, ...]:
    count, _ = _AXES.unpack_from(data, _HEAD.size)
    if count > MAX_AXES:
        raise ValueError(f"a tensor is not spread along {count} axes")
    axes = []
    for place in range(count):
        kind, _, rank, of, split, number, _ = _AXIS.unpack_from(
            data, _HEAD.size + _AXES.size + place * _AXIS.size
        )
        if not (0 <= rank < of <= MAX_SHARDS):
            raise ValueError(f"a tensor cannot be shard {rank} of {of}")
        axes.append(LayoutAxis(kind, rank, of, None if split < 0 else split, number))
    return tuple(axes)


def describe(
    tensor: Any, whole: tuple[int, ...] | None = None, axes: tuple[LayoutAxis, ...] = ()
) -> TensorHeader:
    """The header of a torch tensor. Raises `ValueError` for what is none, and for one without elements that lie in
    memory: sparse, nested, fake or on `meta`."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a tensor is a torch tensor, not {type(tensor).__name__}")
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            raise ValueError(
                f"a tensor that is {tensor.layout}, nested or on {tensor.device} cannot be used: "
                "make it dense on the host or a GPU first"
            )
        if memory_was_freed(tensor):
            raise ValueError("the memory of the tensor was freed: gather a sharded parameter first")
        shape = tuple(tensor.shape)
        name = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
    except (ValueError, TypeError):
        raise
    except Exception as error:  # what a subclass of Tensor raises, it alone knows
        raise ValueError(f"the tensor does not say what it is ({error!r})") from error
    if name not in DTYPES:
        raise ValueError(f"Mooncake's tensors cannot be of {name}")
    return TensorHeader(name, shape, size, shape if whole is None else whole, axes)


def elements_of(tensor: Any) -> Any:
    """The elements of a tensor that was described, one after the other on this host: copied where they are not, or are
    a lazy view. Raises `ValueError` when torch cannot do that."""
    try:
        return tensor.detach().cpu().resolve_neg().contiguous()
    except Exception as error:  # a fake tensor, no memory, an error of the GPU
        raise ValueError(f"the elements of the tensor cannot be had: {error}") from error


def fill_tensor(tensor: Any, values: Any) -> None:
    """Copy elements into a tensor of the caller that was described, on whatever device; one that requires a gradient
    is filled as well. Raises `ValueError` when several of its elements share memory, or torch cannot copy."""
    import torch

    if shares_memory(tuple(tensor.shape), tensor.stride()):
        raise ValueError("several elements of the tensor share memory: pass .contiguous() ones")
    try:
        # Tensors of a caller in inference mode may be written in that mode alone, which is a thread's own.
        with torch.inference_mode():
            tensor.copy_(values)
    except Exception as error:
        raise ValueError(f"the tensor cannot be written to: {error}") from error


def shares_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of a tensor may lie in the same place, as when it was expanded, or by unusual strides."""
    reach = 0
    for stride, length in sorted(
        (stride, length) for stride, length in zip(strides, shape, strict=True) if length > 1
    ):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (length - 1)
    return False


def tensor_in(header: TensorHeader, memory: memoryview) -> Any:
    """The torch tensor in `memory`, which it keeps and shares. Raises `ValueError` when header and length differ."""
    import torch

    dtype = getattr(torch, header.dtype)
    if math.prod(header.shape) * dtype.itemsize != header.data_bytes or len(memory) < header.total_bytes:
        raise ValueError(
            f"a tensor of {header.dtype} and shape {header.shape} is not {header.data_bytes} bytes"
        )
    if not header.data_bytes:
        try:
            return torch.empty(header.shape, dtype=dtype)
        except RuntimeError as error:  # other lengths than the 0 are too large
            raise ValueError(f"a tensor cannot have the shape {header.shape}") from error
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=header.data_bytes, offset=HEADER_BYTES)
    return flat.view(dtype).reshape(header.shape)


def cut(tensor: Any, count: int, dimension: int) -> list[Any]:
    """A tensor in `count` equal shards. Raises `ValueError` when that cannot be."""
    if not 1 <= count <= MAX_SHARDS:
        raise ValueError(f"a tensor is not cut in {count} shards")
    return [part_of(tensor, rank, count, dimension) for rank in range(count)]


def part_of(tensor: Any, rank: int, count: int, dimension: int) -> Any:
    """Shard `rank` of `count` equal ones, in place. Raises `ValueError` when that cannot be."""
    if not 0 <= dimension < tensor.dim():
        raise ValueError(f"no {count} shards along dimension {dimension} of {tensor.dim()}")
    length = tensor.shape[dimension]
    if length % count:
        raise ValueError(f"{length} cannot be divided by {count}: shards are equal")
    try:
        return tensor.narrow(dimension, length // count * rank, length // count)
    except RuntimeError as error:
        raise ValueError(f"the tensor cannot be cut: {error}") from error


def item_bytes(dtype: str) -> int:
    """The size of one element, by torch's name of its dtype."""
    import torch

    return int(getattr(torch, dtype).itemsize)


def _padded(shape: tuple[int, ...]) -> list[int]:
    return [*shape, *[-1] * (MAX_RANK - len(shape))]


def write_one(path: str, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> None:
    """A file with one tensor; appears when complete. Raises `OSError`, `ValueError` for a dtype that files lack."""
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
    """The torch tensor of that name, or the first in the file; and its name. Raises `OSError` and `ValueError`."""
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
        dtype: Any = getattr(torch, SAFETENSORS_DTYPES.get(entry.dtype, ""), None)
        if dtype is None:
            raise ValueError(f"{path}: tensor {found!r} is {entry.dtype}, which torch does not have")
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
