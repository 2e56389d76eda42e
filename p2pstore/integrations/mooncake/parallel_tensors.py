"""Tensors that are spread over ranks: each writes its part, and each read says which part it wants, or the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from p2pstore.errors import NoSuchKey
from p2pstore.integrations.mooncake.mooncake_types import (
    DEFAULT_CONFIG,
    ReplicateConfig,
    alike,
    put_and_upsert,
)
from p2pstore.integrations.mooncake.object_calls import FAILURES, INVALID
from p2pstore.integrations.mooncake.parallelism import (
    Manifest,
    alike_but_for_tp,
    axes_of,
    decode_manifest,
    encode_manifest,
    mode_of,
    parallelism_manifest_key,
    shard_key,
    tp_axis,
    with_rank,
    writer_axis,
    writer_key,
    writer_manifest_key,
)
from p2pstore.integrations.mooncake.tensor_format import (
    HEADER_BYTES,
    LayoutAxis,
    TensorHeader,
    decode_header,
    describe,
    encode_header,
    item_bytes,
    part_of,
    tensor_in,
    tp_shard,
)
from p2pstore.integrations.mooncake.tensors import (
    Place,
    Tensor,
    TensorCalls,
    fresh_memory,
    tensor_in_answer,
)
from p2pstore.objects import encode_key

Axes = Sequence[LayoutAxis]


@dataclass(frozen=True)
class _Stored:
    """Shards of one tensor, and where each of them is."""

    layout: Manifest
    key_of: Callable[[int], str]
    axes_of: Callable[[int], Axes]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        layout = self.layout
        length = layout.whole[layout.split_dim] // layout.count
        return _with_length(layout.whole, layout.split_dim, length)

    def header(self, rank: int) -> TensorHeader:
        return _header(self.layout.dtype, self.shard_shape, self.layout.whole, tuple(self.axes_of(rank)))


class ParallelTensorCalls(TensorCalls):
    """Calls that say how a tensor is spread, by `TensorParallelism` or a writer's partition, and how it is to be read.

    A shard is an object of its own, whose key says which one it is, beside a manifest of the whole. With one axis `tp`
    what is put is the caller's shard; with more axes, and with a `writer_partition`, it is the whole tensor, of which
    the caller's part is stored; without `tp` it is stored as it is. The calls `..._from` store all shards.

    A read finds the shard that was stored as it is asked for, else puts it together from shards of another size along
    the same dimension. An impossible combination is None, never another shard (as Mooncake sometimes answers).
    """

    # --- put -----------------------------------------------------------------------------------

    def _put_tensor_with_parallelism(
        self,
        overwrite: bool,
        key: str,
        tensor: Tensor,
        parallelism: Any = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: Any = None,
    ) -> int:
        """Store the caller's part of a tensor: 0, and what exists stays; -600 for one that cannot be divided so."""
        if parallelism is None and writer_partition is None:
            return self._pub_tensor(overwrite, key, tensor, config)
        try:
            encode_key(key)
            shape = describe(tensor).shape
            axes = _one_of(parallelism, writer_partition)
            cut = tp_axis(axes)
            if cut is None:
                shards = [(shard_key(key, axes), tensor, shape, tuple(axes))]
                return self._put_all(shards, config, overwrite=overwrite)
            assert cut.split_dim is not None
            if writer_partition is None and len(axes) == 1:
                whole = _with_length(shape, cut.split_dim, cut.count, times=True)
                part = tensor
            else:
                whole, part = shape, part_of(tensor, cut.rank, cut.count, cut.split_dim)
            keys = (shard_key(key, axes), parallelism_manifest_key(key))
            if writer_partition is not None:
                keys = (writer_key(key, cut), writer_manifest_key(key))
            where, about = keys
            code = self._put_all([(where, part, whole, tuple(axes))], config, overwrite=overwrite)
            if code:
                return code
            manifest = Manifest(describe(tensor).dtype, whole, cut.split_dim, cut.count)
            return self._store(about, encode_manifest(manifest), config, overwrite=overwrite)
        except FAILURES as error:
            return self._code(error)

    put_tensor_with_parallelism, upsert_tensor_with_parallelism = put_and_upsert(
        _put_tensor_with_parallelism
    )

    def _batch_put_tensor_with_parallelism(
        self,
        overwrite: bool,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: Sequence[Any] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        """`put_tensor_with_parallelism` for many; a code for each."""
        put = partial(self._put_tensor_with_parallelism, overwrite)
        return self._each(put, config, keys, [tensors_list], parallelisms, writer_partitions)

    batch_put_tensor_with_parallelism, batch_upsert_tensor_with_parallelism = put_and_upsert(
        _batch_put_tensor_with_parallelism
    )

    def _put_tensor_with_parallelism_from(
        self,
        overwrite: bool,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: Any = None,
    ) -> int:
        """Store a whole tensor that lies in memory, header and elements: all of its shards along `tp`, or the part of
        `writer_partition`; -600 for a value that is no tensor."""
        try:
            encode_key(key)
            header, memory = self._packed_at(buffer_ptr, size)
            if parallelism is None and writer_partition is None:
                return self._store(key, memory, config, overwrite=overwrite)
            tensor = tensor_in(header, memory)
            axes = _one_of(parallelism, writer_partition)
            cut = tp_axis(axes)
            if cut is None or writer_partition is not None:
                return self._put_tensor_with_parallelism(
                    overwrite, key, tensor, parallelism, config, writer_partition
                )
            assert cut.split_dim is not None
            shards = []
            for rank in range(cut.count):
                own = with_rank(axes, rank, cut.count)
                part = part_of(tensor, rank, cut.count, cut.split_dim)
                shards.append((shard_key(key, own), part, header.shape, tuple(own)))
            return self._put_all(shards, config, overwrite=overwrite)
        except FAILURES as error:
            return self._code(error)

    put_tensor_with_parallelism_from, upsert_tensor_with_parallelism_from = put_and_upsert(
        _put_tensor_with_parallelism_from
    )

    def _batch_put_tensor_with_parallelism_from(
        self,
        overwrite: bool,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[Any] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[Any] | None = None,
    ) -> list[int]:
        """`put_tensor_with_parallelism_from` for many; a code for each."""
        put = partial(self._put_tensor_with_parallelism_from, overwrite)
        return self._each(put, config, keys, [buffer_ptrs, sizes], parallelisms, writer_partitions)

    batch_put_tensor_with_parallelism_from, batch_upsert_tensor_with_parallelism_from = put_and_upsert(
        _batch_put_tensor_with_parallelism_from
    )

    # --- get -----------------------------------------------------------------------------------

    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Tensor | None:
        """A new tensor as the `ReadTarget` says, or None. Raises `RuntimeError` for a mode that there is not."""
        return self._read_parallel(key, target, None)

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[Any] | None = None
    ) -> list[Tensor | None]:
        """`get_tensor_with_parallelism` for many."""
        return self._read_batch(keys, targets, [None] * len(keys))

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Any = None
    ) -> Tensor | None:
        """Write header and elements to an address; returns the tensor that they are there, or None, and then there may
        be anything. It is the caller's memory and must outlive the tensor."""
        return self._read_parallel(key, target, (buffer_ptr, size))

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[Any] | None = None,
    ) -> list[Tensor | None]:
        """`get_tensor_with_parallelism_into` for many."""
        if not alike(keys, buffer_ptrs, sizes):
            return [None] * len(keys)
        return self._read_batch(keys, targets, list(zip(buffer_ptrs, sizes, strict=True)))

    def _each(
        self,
        put: Callable[..., int],
        config: ReplicateConfig,
        keys: Sequence[str],
        values: Sequence[Sequence[Any]],
        parallelisms: Sequence[Any] | None,
        partitions: Sequence[Any] | None,
    ) -> list[int]:
        """A put for each key; -600 for all of them when lists differ in length, or both kinds of division are given."""
        nothing = [None] * len(keys)
        if parallelisms is not None and partitions is not None:
            return [INVALID] * len(keys)
        each_by = nothing if parallelisms is None else parallelisms
        each_of = nothing if partitions is None else partitions
        if not alike(keys, *values, each_by, each_of):
            return [INVALID] * len(keys)
        codes = []
        for key, *value, by, of in zip(keys, *values, each_by, each_of, strict=True):
            try:
                codes.append(put(key, *value, by, config, of))
            except TypeError as error:
                self._warn(f"{key!r} is not stored: {error}")
                codes.append(INVALID)
        return codes

    # --- reading -------------------------------------------------------------------------------

    def _read_batch(
        self, keys: Sequence[str], targets: Sequence[Any] | None, places: Sequence[Place]
    ) -> list[Tensor | None]:
        """`_read_parallel` for many: when one raises, the others are read as well."""
        found: list[Tensor | None] = [None] * len(keys)
        wanted = [None] * len(keys) if targets is None else targets
        if not alike(keys, wanted):
            return found
        for number, (key, target, place) in enumerate(zip(keys, wanted, places, strict=True)):
            try:
                found[number] = self._read_parallel(key, target, place)
            except (RuntimeError, TypeError) as error:
                self._warn(f"{key!r} is not read: {error}")
        return found

    def _read_parallel(self, key: str, target: Any, place: Place) -> Tensor | None:
        try:
            mode, axes = mode_of(target)
            if axes is None:
                if mode == "shard":
                    return None
                stored = self._of_writers(key) if mode == "full" else None
                if stored is None:
                    return self._tensor_at(key, place)
                return self._put_together(stored, None, place)
            if mode == "as_stored":
                return None
            if mode == "shard":
                exact = self._as_asked(key, axes, place)
                if exact is not None:
                    return exact
            wanted = axes if mode == "shard" else None
            for stored in self._layouts(key, axes):
                found = self._put_together(stored, wanted, place)
                if found is not None:
                    return found
            if mode == "shard" and _is_whole(axes):
                return self._tensor_at(key, place)
        except FAILURES as error:
            self._read_code(error)
        return None

    def _tensor_at(self, key: str, place: Place) -> Tensor | None:
        return tensor_in_answer(self._read_tensor(key, place))

    def _as_asked(self, key: str, axes: Axes, place: Place) -> Tensor | None:
        """The shard that was stored with these very axes."""
        keys = [shard_key(key, axes)]
        cut = tp_axis(axes)
        if cut is not None and len(axes) == 1:
            keys.append(writer_key(key, cut))
        for each in keys:
            found = self._read_tensor(each, place)
            if not isinstance(found, int) and set(found[0].axes) == set(axes):
                return found[1]
        return None

    def _layouts(self, key: str, axes: Axes) -> Iterator[_Stored]:
        """How the tensor may have been cut along the dimension that the axes name: as the manifest says, and as the
        header of its first shard says."""
        cut = tp_axis(axes)
        if cut is None:
            return
        seen = []
        for layout in (
            self._manifest(parallelism_manifest_key(key)),
            self._layout_in_header(shard_key(key, with_rank(axes, 0, cut.count)), axes),
        ):
            if layout is None or layout in seen or layout.split_dim != cut.split_dim:
                continue
            seen.append(layout)
            if _divides(layout.whole, layout.split_dim, layout.count, cut.count):
                yield _shards(key, layout, axes)

    def _of_writers(self, key: str) -> _Stored | None:
        """The partitions that writers stored, if there are any."""
        layout = self._manifest(writer_manifest_key(key))
        if layout is None or not _divides(layout.whole, layout.split_dim, layout.count):
            return None

        def axes(rank: int) -> Axes:
            return tp_shard(rank, layout.count, layout.split_dim)

        return _Stored(layout, lambda rank: writer_key(key, axes(rank)[0]), axes)

    def _manifest(self, key: str) -> Manifest | None:
        try:
            return decode_manifest(self._live.get(key))
        except (NoSuchKey, ValueError):
            return None

    def _layout_in_header(self, key: str, axes: Axes) -> Manifest | None:
        """How a tensor was cut, by the header of one of its shards. It is read in place; a read of the
        shards compares their headers with it, on its copy."""
        [held] = self._wholes([key])
        if isinstance(held, int):
            return None
        try:
            header = decode_header(held)
        except ValueError:
            return None
        cut = tp_axis(header.axes)
        if cut is None or cut.split_dim is None or not alike_but_for_tp(header.axes, axes):
            return None
        if cut.split_dim >= len(header.whole):
            return None
        return Manifest(header.dtype, header.whole, cut.split_dim, cut.count)

    def _put_together(self, stored: _Stored, wanted: Axes | None, place: Place) -> Tensor | None:
        """The whole tensor, or the shard of the `wanted` axes. None when a part is missing, or not what it should be,
        or when there is no room."""
        layout = stored.layout
        split, length = layout.split_dim, layout.whole[layout.split_dim]
        start, end = 0, length
        if wanted is not None:
            cut = tp_axis(wanted)
            assert cut is not None
            start, end = length // cut.count * cut.rank, length // cut.count * (cut.rank + 1)
        shape = _with_length(layout.whole, split, end - start)
        header = _header(layout.dtype, shape, layout.whole, tuple(wanted or ()))
        each = stored.shard_shape[split]
        ranks = range(start // each, -(-end // each)) if each else range(0)
        if any(self.get_size(stored.key_of(rank)) != stored.header(rank).total_bytes for rank in ranks):
            return None
        if place is not None and place[1] < header.total_bytes:
            return None
        memory = (
            fresh_memory(header.total_bytes)
            if place is None
            else self._buffers.host(*place, writes=True)
        )
        memory = memory[: header.total_bytes]
        memory[:HEADER_BYTES] = encode_header(header)
        target = _by_rows(memory, shape, split)
        for rank in ranks:
            first, last = max(start, rank * each), min(end, (rank + 1) * each)
            part = stored.header(rank)
            with self._scratch.room(part.total_bytes) as room:
                if self._live.get_into(stored.key_of(rank), room) != part.total_bytes:
                    return None
                if not _same(decode_header(room), part):
                    return None
                source = _by_rows(room, part.shape, split)
                rows = source[:, first - rank * each : last - rank * each]
                np.copyto(target[:, first - start : last - start], rows)
        return tensor_in(header, memory)


def _one_of(parallelism: Any, partition: Any) -> list[LayoutAxis]:
    """The axes of the one that is given. Raises `ValueError` when both are."""
    if partition is None:
        return axes_of(parallelism)
    if parallelism is not None:
        raise ValueError("writer_partition cannot be combined with parallelism")
    return [writer_axis(partition)]


def _is_whole(axes: Axes) -> bool:
    """Whether the one shard of one is asked for, which is the tensor itself."""
    cut = tp_axis(axes)
    return cut is not None and len(axes) == 1 and cut.count == 1


def _shards(key: str, layout: Manifest, axes: Axes) -> _Stored:
    return _Stored(
        layout,
        lambda rank: shard_key(key, with_rank(axes, rank, layout.count)),
        lambda rank: with_rank(axes, rank, layout.count),
    )


def _divides(whole: tuple[int, ...], split: int, *counts: int) -> bool:
    return all(whole[split] % count == 0 for count in counts)


def _with_length(
    shape: tuple[int, ...], dimension: int, length: int, *, times: bool = False
) -> tuple[int, ...]:
    """The shape with another length (or `length` times as long) in one dimension. Raises `ValueError` without it."""
    if dimension >= len(shape):
        raise ValueError(f"a tensor with {len(shape)} dimensions has no dimension {dimension}")
    changed = shape[dimension] * length if times else length
    return (*shape[:dimension], changed, *shape[dimension + 1 :])


def _header(
    dtype: str, shape: tuple[int, ...], whole: tuple[int, ...], axes: tuple[LayoutAxis, ...]
) -> TensorHeader:
    return TensorHeader(dtype, shape, math.prod(shape) * item_bytes(dtype), whole, axes)


def _same(found: TensorHeader, wanted: TensorHeader) -> bool:
    """Whether a shard is the one that it should be; its axes may stand in any order."""
    return (found.dtype, found.shape, found.whole, found.data_bytes, set(found.axes)) == (
        *(wanted.dtype, wanted.shape, wanted.whole, wanted.data_bytes),
        set(wanted.axes),
    )


def _by_rows(memory: memoryview, shape: tuple[int, ...], split: int) -> np.ndarray[Any, Any]:
    """The elements behind a header as bytes in three dimensions: those before the cut, the cut one, the rest."""
    before = math.prod(shape[:split])
    data = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES)
    total = before * shape[split]
    return data.reshape(before, shape[split], len(data) // total if total else 0)
