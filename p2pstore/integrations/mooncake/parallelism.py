"""How a tensor is spread over ranks: the descriptions of callers, and the keys and manifests that follow from them.
Pure.

Callers pass these classes or anything with the same attributes, as in Mooncake.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from p2pstore.integrations.mooncake.tensor_format import DTYPES, MAX_RANK, MAX_SHARDS, LayoutAxis

KINDS: Final = ("dp", "tp", "ep", "pp")
"""By their numbers in a header, and in the order in which they stand in a key."""
MODES: Final = ("as_stored", "shard", "full")

_MANIFEST: Final = struct.Struct("<IHHiiiiii8q")
_MANIFEST_MAGIC: Final = 0x574D414E
_MANIFEST_VERSION: Final = 1


@dataclass
class ParallelAxis:
    """One way of spreading: part `rank` of `size`. `kind` is `tp` (cut along `split_dim`), `dp` (the same everywhere),
    `ep` (an expert's, `expert_id`) or `pp` (a stage's, `stage_id`)."""

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass
class TensorParallelism:
    """All axes along which a tensor is spread, each kind once."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass
class ReadTarget:
    """A read request: `as_stored`, the `shard` of a rank, or the `full` tensor, put together from its shards."""

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None


@dataclass(frozen=True)
class WriterPartition:
    """Which part of a full tensor its writer stores: number `rank` of `size` along `split_dim`."""

    rank: int
    size: int
    split_dim: int


@dataclass(frozen=True)
class Manifest:
    """The record beside shards: dtype and shape of the full tensor, and how it was cut."""

    dtype: str
    whole: tuple[int, ...]
    split_dim: int
    count: int


def axes_of(parallelism: Any) -> list[LayoutAxis]:
    """The checked axes. Raises `ValueError` for axes that cannot be, `TypeError` for numbers that are none."""
    said = getattr(parallelism, "axes", None)
    if not isinstance(said, Iterable):
        raise ValueError(f"a TensorParallelism has axes; this is {type(parallelism).__name__}")
    axes = [_axis(each) for each in said]
    if not axes:
        raise ValueError("a TensorParallelism has at least one axis")
    if len({axis.kind for axis in axes}) != len(axes):
        raise ValueError("a TensorParallelism has one axis of each kind at most")
    return axes


def _axis(said: Any) -> LayoutAxis:
    kind = str(getattr(said, "kind", "")).lower()
    if kind not in KINDS:
        raise ValueError(f"a parallel axis is of kind {', '.join(KINDS)}, not {kind!r}")
    if not hasattr(said, "rank") or not hasattr(said, "size"):
        raise ValueError("a ParallelAxis has kind, rank and size")
    rank, size = operator.index(said.rank), operator.index(said.size)
    if not 0 <= rank < size <= MAX_SHARDS:
        raise ValueError(f"axis {kind}: there is no rank {rank} of {size}")
    split, expert, stage = (
        None if (value := getattr(said, name, None)) is None else operator.index(value)
        for name in ("split_dim", "expert_id", "stage_id")
    )
    if (split is None) == (kind == "tp") or (split is not None and split < 0):
        raise ValueError(f"axis {kind}: split_dim is for tp, which needs one, not {split}")
    if kind == "ep" and expert is None:
        raise ValueError("axis ep needs expert_id")
    if kind == "pp" and stage is None:
        raise ValueError("axis pp needs stage_id")
    number = {"ep": expert, "pp": stage}.get(kind) or 0
    return LayoutAxis(KINDS.index(kind), rank, size, split, number)


def writer_axis(partition: Any) -> LayoutAxis:
    """A writer's partition as an axis. Raises `ValueError` for what is none."""
    try:
        rank, size, split = (
            operator.index(getattr(partition, name)) for name in ("rank", "size", "split_dim")
        )
    except AttributeError:
        raise ValueError("a writer_partition has rank, size and split_dim") from None
    if not 0 <= rank < size <= MAX_SHARDS or split < 0:
        raise ValueError(f"there is no part {rank} of {size} along dimension {split}")
    return LayoutAxis(KINDS.index("tp"), rank, size, split)


def mode_of(target: Any) -> tuple[str, list[LayoutAxis] | None]:
    """The mode and axes of a read target. Raises `RuntimeError` for a mode that there is not (as Mooncake
    does), `ValueError` for axes that cannot be."""
    if target is None:
        return "as_stored", None
    if not hasattr(target, "mode") or not hasattr(target, "parallelism"):
        raise ValueError("a ReadTarget has mode and parallelism")
    mode = str(target.mode).lower()
    if mode not in MODES:
        raise RuntimeError("Unsupported ReadTarget mode")
    return mode, None if target.parallelism is None else axes_of(target.parallelism)


def tp_axis(axes: Sequence[LayoutAxis]) -> LayoutAxis | None:
    """The axis along which the tensor is cut, if there is one."""
    return next((axis for axis in axes if KINDS[axis.kind] == "tp"), None)


def with_rank(axes: Sequence[LayoutAxis], rank: int, count: int) -> list[LayoutAxis]:
    return [replace(axis, rank=rank, count=count) if KINDS[axis.kind] == "tp" else axis for axis in axes]


def alike_but_for_tp(some: Sequence[LayoutAxis], others: Sequence[LayoutAxis]) -> bool:
    """Whether two layouts are shards of one tensor, cut along one dimension, however finely."""
    one, other = (sorted(with_rank(axes, 0, 1), key=_order) for axes in (some, others))
    return one == other


def shard_key(key: str, axes: Sequence[LayoutAxis]) -> str:
    if len(axes) == 1 and KINDS[axes[0].kind] == "tp":
        return f"{key}_tp_{axes[0].rank}"
    return key + "".join(f"__{_text(axis)}" for axis in sorted(axes, key=_order))


def writer_key(key: str, axis: LayoutAxis) -> str:
    """Where a writer's partition is stored."""
    return f"{key}__writer_{axis.rank}of{axis.count}_sd{axis.split_dim}"


def parallelism_manifest_key(key: str) -> str:
    return f"{key}__parallelism_manifest"


def writer_manifest_key(key: str) -> str:
    return f"{key}__writer_manifest"


def _order(axis: LayoutAxis) -> int:
    return axis.kind


def _text(axis: LayoutAxis) -> str:
    kind = KINDS[axis.kind]
    text = f"{kind}_{axis.rank}of{axis.count}"
    if axis.split_dim is not None:
        text += f"_sd{axis.split_dim}"
    if kind == "ep":
        text += f"_eid{axis.number}"
    if kind == "pp":
        text += f"_sid{axis.number}"
    return text


def encode_manifest(manifest: Manifest) -> bytes:
    """`u32 magic | u16 version | u16 96 | i32 dtype | i32 rank | i32 split | i32 count | i64 0 | 8 i64 shape`."""
    shape = [*manifest.whole, *[-1] * (MAX_RANK - len(manifest.whole))]
    return _MANIFEST.pack(
        _MANIFEST_MAGIC,
        _MANIFEST_VERSION,
        _MANIFEST.size,
        DTYPES[manifest.dtype],
        len(manifest.whole),
        manifest.split_dim,
        manifest.count,
        0,
        0,
        *shape,
    )


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """Decode a manifest. Raises `ValueError` for other values."""
    if len(data) < _MANIFEST.size:
        raise ValueError(f"{len(data)} bytes are no manifest: it has {_MANIFEST.size}")
    magic, version, size, dtype, rank, split, count, _, _, *shape = _MANIFEST.unpack_from(data)
    names = {number: name for name, number in DTYPES.items()}
    if (magic, version, size) != (_MANIFEST_MAGIC, _MANIFEST_VERSION, _MANIFEST.size):
        raise ValueError("the value was not put as a manifest")
    if not (0 <= rank <= MAX_RANK and 0 <= split < rank and 0 < count <= MAX_SHARDS and dtype in names):
        raise ValueError("the manifest contradicts itself")
    whole = tuple(shape[:rank])
    if min(whole) < 0:
        raise ValueError(f"a tensor cannot have the shape {whole}")
    return Manifest(names[dtype], whole, split, count)
