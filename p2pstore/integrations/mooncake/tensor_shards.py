"""Tensors in equal shards along one dimension: each is an object of its own, `KEY_tp_RANK`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pstore.integrations.mooncake.mooncake_types import DEFAULT_CONFIG, ReplicateConfig, alike
from p2pstore.integrations.mooncake.object_calls import INVALID, ITEM_FAILURES
from p2pstore.integrations.mooncake.tensor_format import (
    cut,
    decode_header,
    describe,
    tensor_in,
    tp_shard,
)
from p2pstore.integrations.mooncake.tensors import Tensor, TensorCalls
from p2pstore.objects import encode_key


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
            memory = self._buffers.host(buffer_ptr, size)
            header = decode_header(memory)
            if header.total_bytes != size:
                return INVALID
            tensor = tensor_in(header, memory)
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
            parts = list(cut(tensor, count, dimension))
            headers = [
                describe(part, whole, tp_shard(rank, count, dimension))
                for rank, part in enumerate(parts)
            ]
        except ITEM_FAILURES as error:
            return self._item_code(error)
        keys = [f"{key}_tp_{rank}" for rank in range(count)]
        codes = self._store_tensors(keys, parts, config, headers=headers)
        return next((code for code in codes if code), 0)


def _shard_key(key: str, rank: int, count: int) -> str:
    return key if count <= 1 else f"{key}_tp_{rank}"
