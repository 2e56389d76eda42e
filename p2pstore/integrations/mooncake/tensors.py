"""Tensors of torch, in Mooncake's format: each side reads the other's. Whole ones, and ones in equal shards along one
dimension, each an object of its own whose key ends in _tp_RANK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from p2pstore.integrations.mooncake.addresses import AddressCalls
from p2pstore.integrations.mooncake.memory import in_groups
from p2pstore.integrations.mooncake.mooncake_types import (
    DEFAULT_CONFIG,
    ErrorCode,
    ReplicateConfig,
    alike,
    put_and_upsert,
)
from p2pstore.integrations.mooncake.object_calls import FAILURES, INVALID, ITEM_FAILURES, filled
from p2pstore.integrations.mooncake.tensor_format import (
    LayoutAxis,
    TensorHeader,
    cut,
    decode_header,
    describe,
    elements_of,
    encode_header,
    fill_tensor,
    read_one,
    tensor_in,
    tp_shard,
    write_one,
)
from p2pstore.objects import encode_key
from p2pstore.values import Gathered, source_view

Tensor = Any
Place = tuple[int, int] | None
"""An address and how much room there is; None for new memory."""
Found = tuple[TensorHeader, Tensor] | int
"""A tensor that was read and its header, or the code that says why there is none."""
Shard = tuple[str, Tensor, tuple[int, ...], tuple[LayoutAxis, ...]]
"""Key, elements, shape of the whole, axes."""
SMALL_BYTES: Final = 2**16


class TensorCalls(AddressCalls):
    """Calls about tensors. Torch is imported with the first of them. Tensors on a GPU are copied to the host first."""

    # --- put -----------------------------------------------------------------------------------

    def _pub_tensor(
        self, overwrite: bool, key: str, tensor: Tensor, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """Store a tensor: 0, and the first one stays; -600 for a value that is none."""
        return self._store_tensors([key], [tensor], config, overwrite=overwrite)[0]

    pub_tensor, upsert_pub_tensor = put_and_upsert(_pub_tensor)

    def _put_tensor(self, overwrite: bool, key: str, tensor: Tensor) -> int:
        """`pub_tensor` without a config."""
        return self._pub_tensor(overwrite, key, tensor)

    put_tensor, upsert_tensor = put_and_upsert(_put_tensor)

    def _batch_pub_tensor(
        self,
        overwrite: bool,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """`pub_tensor` for many; a code for each."""
        return self._store_tensors(keys, tensors_list, config, overwrite=overwrite)

    batch_pub_tensor, batch_upsert_pub_tensor = put_and_upsert(_batch_pub_tensor)

    def _batch_put_tensor(
        self, overwrite: bool, keys: Sequence[str], tensors_list: Sequence[Tensor]
    ) -> list[int]:
        """`put_tensor` for many; a code for each."""
        return self._batch_pub_tensor(overwrite, keys, tensors_list)

    batch_put_tensor, batch_upsert_tensor = put_and_upsert(_batch_put_tensor)

    def _put_tensor_from(self, overwrite: bool, key: str, buffer_ptr: int, size: int) -> int:
        """Store a tensor that lies in memory as this format has it, header and elements: -600 when it does not."""
        return self._batch_put_tensor_from(overwrite, [key], [buffer_ptr], [size])[0]

    put_tensor_from, upsert_tensor_from = put_and_upsert(_put_tensor_from)

    def _batch_put_tensor_from(
        self, overwrite: bool, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`put_tensor_from` for many; a code for each."""
        if not alike(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        places = zip(buffer_ptrs, sizes, strict=True)
        codes, good = self._sorted_out(places, lambda place: self._packed_at(*place)[1])
        some, values = [keys[number] for number in good], list(good.values())
        return filled(codes, good, self._store_some(some, values, DEFAULT_CONFIG, overwrite=overwrite))

    batch_put_tensor_from, batch_upsert_tensor_from = put_and_upsert(_batch_put_tensor_from)

    # --- get -----------------------------------------------------------------------------------

    def get_tensor(self, key: str) -> Tensor | None:
        """A new tensor, or None: for an unknown key, for a value that is no tensor, after any failure."""
        return tensor_in_answer(self._read_tensor(key, None))

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """`get_tensor` for many, in one go."""
        return [tensor_in_answer(each) for each in self._read_tensors(keys)]

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Write header and elements to an address; returns the tensor that they are there, or None as `get_tensor`. It
        is the caller's memory and must outlive the tensor."""
        return tensor_in_answer(self._read_tensor(key, (buffer_ptr, size)))

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """`get_tensor_into` for many; lists of different lengths: -600 for each."""
        if not alike(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        places = list(zip(buffer_ptrs, sizes, strict=True))
        return [tensor_in_answer(each) for each in self._read_tensors(keys, places)]

    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Copy the elements, by way of the host, into a tensor of the same dtype and shape: 0, -704, or -600."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: Sequence[Tensor]
    ) -> list[int]:
        """`get_tensor_into_cuda` for many; a code for each."""
        if not alike(keys, tensors_list):
            return [INVALID] * len(keys)
        codes, headers = self._sorted_out(tensors_list, describe, FAILURES)
        lengths = {number: header.data_bytes for number, header in headers.items()}
        for some in in_groups(lengths):  # limits the host memory in use
            got = self._read_tensors([keys[number] for number in some])
            pairs = zip(some, got, strict=True)
            filled(codes, some, [self._copy_to(tensors_list[number], found) for number, found in pairs])
        return codes

    # --- files ---------------------------------------------------------------------------------

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write a tensor to a safetensors file (by default named as the key), in which it is called as the key: 0, or
        -1100 when there is no such tensor or the file cannot be written."""
        tensor = self.get_tensor(key)
        if tensor is None:
            return int(ErrorCode.FILE_NOT_FOUND)
        try:
            header = describe(tensor)
            write_one(file_name or key, key, header.dtype, header.shape, source_view(tensor))
        except (OSError, ValueError) as error:
            self._warn(str(error))
            return int(ErrorCode.FILE_NOT_FOUND)
        return 0

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Tensor | None:
        """Read a tensor from a safetensors file, store it, and return it: the one called as the key (by default the
        file's name), else the first one in the file. None when that fails."""
        name = key or file_name
        try:
            tensor, found = read_one(file_name, name)
        except (OSError, ValueError) as error:
            self._warn(str(error))
            return None
        if found != name:
            self._warn(f"{file_name} has no {name!r}: {found!r} is taken")
        return tensor if self.put_tensor(name, tensor) == 0 else None

    # -------------------------------------------------------------------------------------------

    def _packed_at(self, address: int, size: int) -> tuple[TensorHeader, memoryview]:
        """A tensor in memory of the caller: its header, and all of it. Raises `ValueError` for anything else."""
        memory = self._buffers.host(address, size)
        header = decode_header(memory)
        if header.total_bytes != size:
            raise ValueError(f"the tensor has {header.total_bytes:,} bytes, not {size:,}")
        return header, memory

    def _read_tensor(self, key: str, place: Place) -> Found:
        """The tensor in memory of its own, or in that of the caller, and its header; or the code that says why not."""
        [found] = self._read_tensors([key], None if place is None else [place])
        return found

    def _read_tensors(
        self, keys: Sequence[str], places: Sequence[tuple[int, int]] | None = None
    ) -> list[Found]:
        if places is None:
            return self._read_new_tensors(keys)
        codes, rooms = self._sorted_out(places, lambda each: self._buffers.host(*each, writes=True))
        found: list[Found] = [*codes]
        lengths = self._get_many_into([keys[number] for number in rooms], list(rooms.values()))
        for (number, room), length in zip(rooms.items(), lengths, strict=True):
            found[number] = length if length < 0 else self._decoded(room[:length])
        return found

    def _read_new_tensors(self, keys: Sequence[str]) -> list[Found]:
        try:
            values = self._live.get_new_views(keys, fresh_memory)
        except FAILURES as error:
            return [self._read_code(error)] * len(keys)
        return [
            self._read_code(each) if isinstance(each, Exception) else self._decoded(each)
            for each in values
        ]

    def _decoded(self, value: memoryview) -> Found:
        try:
            header = decode_header(value)
            return header, tensor_in(header, value)
        except ValueError as error:
            return self._code(error)

    def _copy_to(self, tensor: Tensor, found: Found) -> int:
        """Copy what was read into a tensor of the caller, which stays as it is unless all of it comes."""
        if isinstance(found, int):
            return found
        try:
            got = found[1]
            if got.dtype != tensor.dtype or got.shape != tensor.shape:
                raise ValueError(
                    f"the object is {got.dtype} {tuple(got.shape)}, not {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
            fill_tensor(tensor, got)
        except ValueError as error:
            return self._code(error)
        return 0

    def _store_tensors(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig,
        *,
        overwrite: bool = False,
        headers: Sequence[TensorHeader] | None = None,
    ) -> list[int]:
        """Store tensors, as many at a time as 64 MiB; a code for each."""
        if not alike(keys, tensors):
            return [INVALID] * len(keys)
        codes, about = [0] * len(keys), dict(enumerate(headers or ()))
        if headers is None:
            codes, about = self._sorted_out(tensors, describe, FAILURES)
        for some in in_groups({number: header.total_bytes for number, header in about.items()}):
            pairs = [(about[number], tensors[number]) for number in some]
            failed, made = self._sorted_out(
                pairs, lambda pair: Gathered([encode_header(pair[0]), elements_of(pair[1])]), FAILURES
            )
            filled(codes, some, failed)
            packed = {some[place]: value for place, value in made.items()}
            keys_of, values = [keys[number] for number in packed], list(packed.values())
            filled(codes, packed, self._store_some(keys_of, values, config, overwrite=overwrite))
        return codes

    def _put_all(
        self, shards: Sequence[Shard], config: ReplicateConfig, *, overwrite: bool = False
    ) -> int:
        """Put shards: 0, or the first error."""
        keys, parts, _, _ = zip(*shards, strict=True)
        headers = [describe(part, whole, axes) for _, part, whole, axes in shards]
        codes = self._store_tensors(keys, parts, config, overwrite=overwrite, headers=headers)
        return next((code for code in codes if code), 0)

    def _store_some(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig, *, overwrite: bool
    ) -> list[int]:
        """Put values, one alone in fewer steps; a code for each."""
        if len(keys) != 1:
            return self._store_many(keys, values, config, overwrite=overwrite)
        try:
            return [self._store(keys[0], values[0], config, overwrite=overwrite)]
        except ITEM_FAILURES as error:
            return [self._item_code(error)]


def tensor_in_answer(found: Found) -> Tensor | None:
    return None if isinstance(found, int) else found[1]


def fresh_memory(size: int) -> memoryview:
    """New writable memory; a large one is not cleared first."""
    import torch

    if size < SMALL_BYTES:
        return memoryview(bytearray(size))
    return memoryview(torch.empty(size, dtype=torch.uint8).numpy())


class ShardCalls(TensorCalls):
    """The calls `..._with_tp`."""

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Store all `tp_size` equal shards of a whole tensor along a dimension (`tp_rank` does not matter); with one
        shard, the tensor under its own key. -600 when it cannot be divided so."""
        return self._put_shards(key, tensor, tp_size, split_dim, DEFAULT_CONFIG)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: ReplicateConfig = DEFAULT_CONFIG,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """`put_tensor_with_tp` with a config."""
        return self._put_shards(key, tensor, tp_size, split_dim, config)

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`put_tensor_with_tp` for many; a code for each."""
        return self.batch_pub_tensor_with_tp(
            base_keys, tensors_list, DEFAULT_CONFIG, tp_rank, tp_size, split_dim
        )

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        config: ReplicateConfig = DEFAULT_CONFIG,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`pub_tensor_with_tp` for many; a code for each."""
        if not alike(base_keys, tensors_list):
            return [INVALID] * len(base_keys)
        return [
            self._put_shards(key, tensor, tp_size, split_dim, config)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]

    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """`put_tensor_with_tp` of a whole tensor that lies in memory, header and elements."""
        try:
            tensor = tensor_in(*self._packed_at(buffer_ptr, size))
        except ITEM_FAILURES as error:
            return self._item_code(error)
        return self._put_shards(key, tensor, tp_size, split_dim, DEFAULT_CONFIG)

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`put_tensor_with_tp_from` for many; a code for each."""
        if not alike(base_keys, buffer_ptrs, sizes):
            return [INVALID] * len(base_keys)
        return [
            self.put_tensor_with_tp_from(*each, tp_rank, tp_size, split_dim)
            for each in zip(base_keys, buffer_ptrs, sizes, strict=True)
        ]

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """The shard of a rank, as it was put; None when there is none. It is not cut out of a whole tensor."""
        return self.get_tensor(_shard_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """`get_tensor_with_tp` for many."""
        return self.batch_get_tensor([_shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Tensor | None:
        """`get_tensor_into` for the shard of a rank."""
        return self.get_tensor_into(_shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """`get_tensor_with_tp_into` for many."""
        keys = [_shard_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    # -------------------------------------------------------------------------------------------

    def _put_shards(
        self, key: str, tensor: Tensor, count: int, dimension: int, config: ReplicateConfig
    ) -> int:
        try:
            encode_key(key)
            whole = describe(tensor).shape
            if count == 1:
                return self.pub_tensor(key, tensor, config)
            shards = [
                (f"{key}_tp_{rank}", part, whole, tp_shard(rank, count, dimension))
                for rank, part in enumerate(cut(tensor, count, dimension))
            ]
            return self._put_all(shards, config)
        except ITEM_FAILURES as error:
            return self._item_code(error)


def _shard_key(key: str, rank: int, count: int) -> str:
    return key if count <= 1 else f"{key}_tp_{rank}"
