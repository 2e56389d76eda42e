"""Objects moved layer by layer: a session holds an object while its ranges are read, or written."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from p2pstore.blocking import BlockingClient
from p2pstore.integrations.mooncake.addresses import AddressCalls
from p2pstore.integrations.mooncake.memory import copy, view_at
from p2pstore.integrations.mooncake.mooncake_types import (
    DEFAULT_CONFIG,
    ErrorCode,
    ReplicateConfig,
    alike,
)
from p2pstore.integrations.mooncake.objects import FAILURES, INVALID, is_key

MAX_BYTES = 2**32
"""An object has at most 4 GiB."""


class SessionCalls(AddressCalls):
    """Calls that read or write parts of objects. An object that is written is in this program's memory until its
    session ends, and is then stored as a whole: so nobody ever sees half of it."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[str, memoryview] = {}
        self._written: dict[str, tuple[memoryview, ReplicateConfig]] = {}

    def close(self) -> int:
        """End all sessions with the store."""
        code = super().close()
        self._read.clear()
        self._written.clear()
        return code

    def _lost(self, client: BlockingClient) -> None:
        super()._lost(client)
        self._read.clear()  # the peer that held them has gone

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Hold objects for reading parts of them: 0, or a code, for each."""
        codes, client = [], self._client
        for key, held in zip(keys, self._wholes(keys), strict=True):
            if isinstance(held, memoryview):
                self._read[key] = held
            codes.append(held if isinstance(held, int) else 0)
        if self._client is not client:  # closed meanwhile: these leases have ended
            self._read.clear()
            return [int(ErrorCode.RPC_FAIL)] * len(keys)
        return codes

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Let go of them. Returns 0."""
        for key in filter(is_key, keys):
            self._read.pop(key, None)
        return 0

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy parts of held objects, from `all_src_offsets` on, to places in memory; for each key how many bytes, or
        -600: when it is not held, or has no such part."""
        if not alike(keys, all_buffer_ptrs, all_sizes, all_src_offsets):
            return [INVALID] * len(keys)
        codes, client = [], self._client
        for key, pointers, sizes, offsets in zip(
            keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True
        ):
            held = self._read.get(key) if is_key(key) else None
            places = None if held is None else _places(held, pointers, sizes, offsets)
            if places is None:
                codes.append(INVALID)
                continue
            for outside, inside in places:
                copy(outside, inside)
            codes.append(sum(sizes))
        if self._client is not client:  # its leases have ended: the bytes may be another object's
            return [int(ErrorCode.RPC_FAIL)] * len(keys)
        return codes

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = DEFAULT_CONFIG
    ) -> list[int]:
        """Begin objects of these sizes: 0 for each, -705 for one that exists or was begun, -600 for one without
        bytes."""
        if not alike(keys, sizes):
            return [INVALID] * len(keys)
        try:
            self._put_options(config)
            exist = self._live.contains_many([key for key in keys if is_key(key)])
        except FAILURES as error:
            return [self._code(error)] * len(keys)
        codes, there = [], iter(exist)
        for key, size in zip(keys, sizes, strict=True):
            if not is_key(key):
                codes.append(INVALID)
            elif next(there) or key in self._written:
                codes.append(int(ErrorCode.OBJECT_ALREADY_EXISTS))
            else:
                codes.append(self._begin_writing(key, size, config))
        return codes

    def _begin_writing(self, key: str, size: int, config: ReplicateConfig) -> int:
        try:
            if not 0 < size <= MAX_BYTES:
                return INVALID
            self._written[key] = np.zeros(operator.index(size), np.uint8).data, config
        except TypeError:
            return INVALID
        except MemoryError:
            return int(ErrorCode.NO_AVAILABLE_HANDLE)
        return 0

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy memory to parts of objects that were begun, from `all_dst_offsets` on; for each key how many bytes, or
        -600: when it was not begun, or has no such part."""
        if not alike(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
            return [INVALID] * len(keys)
        codes = []
        for key, pointers, sizes, offsets in zip(
            keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True
        ):
            begun = self._written.get(key) if is_key(key) else None
            places = None if begun is None else _places(begun[0], pointers, sizes, offsets)
            if places is None:
                codes.append(INVALID)
                continue
            for outside, inside in places:
                copy(inside, outside)
            codes.append(sum(sizes))
        return codes

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Store what was begun: 0 for each, or a code; -600 for what was not begun."""
        codes = [INVALID] * len(keys)
        by_config: dict[int, list[tuple[int, memoryview, ReplicateConfig]]] = {}
        for number, key in enumerate(keys):
            begun = self._written.pop(key, None) if is_key(key) else None
            if begun is not None:
                value, config = begun
                by_config.setdefault(id(config), []).append((number, value, config))
        for some in by_config.values():
            numbers, values, (config, *_) = zip(*some, strict=True)
            stored = self._store_many([keys[number] for number in numbers], values, config)
            for number, code in zip(numbers, stored, strict=True):
                codes[number] = code
        return codes

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Forget what was begun: 0 for each, -600 for what was not."""
        return [
            0 if is_key(key) and self._written.pop(key, None) is not None else INVALID
            for key in keys
        ]


def _places(
    whole: memoryview, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> list[tuple[memoryview, memoryview]] | None:
    """Pairs of the caller's memory and the object's part. None when one of them cannot be."""
    pairs = []
    try:
        for pointer, size, offset in zip(pointers, sizes, offsets, strict=True):
            if offset < 0 or size < 0 or offset + size > len(whole):
                return None
            pairs.append((view_at(pointer, size), whole[offset : offset + size]))
    except (ValueError, TypeError):  # also lists of different lengths
        return None
    return pairs
