"""Objects from and into memory of the caller by address: whole, in ranges, or layer by layer in sessions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import cast

import numpy as np

from p2pstore.blocking import BlockingClient
from p2pstore.errors import P2PStoreError
from p2pstore.integrations.mooncake.cuda_memory import DeviceMemory, Place, copy_all, value_in
from p2pstore.integrations.mooncake.memory import MooncakeHostMemAllocator, Scratch, in_groups, scattered
from p2pstore.integrations.mooncake.mooncake_types import (
    DEFAULT_CONFIG,
    ErrorCode,
    ReplicateConfig,
    alike,
    put_and_upsert,
)
from p2pstore.integrations.mooncake.object_calls import (
    FAILURES,
    INVALID,
    ITEM_FAILURES,
    ObjectCalls,
    filled,
    is_key,
)


class AddressCalls(ObjectCalls):
    """Calls that move each byte once, between the caller's memory and a peer's. A GPU copies its own memory: straight
    to the peer's when it is put, by way of pinned memory when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Scratch(self._buffers.pinned)
        self._allocator = MooncakeHostMemAllocator()

    # --- registering -------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Tell the store of memory that is used again and again, of this process or of an NVIDIA GPU: its pages are
        provided. Returns 0, or -600 when a part of it is registered already, or is neither's. Memory that is not
        registered may be used as well, for 1 to 3 us more a place. With the first of a GPU and where the program uses
        torch, the peer's memory is page-locked: some 0.1 s a GiB."""
        try:
            client = self._live
            region = self._buffers.add(buffer_ptr, size)
        except FAILURES as error:
            return self._code(error)
        if isinstance(region, DeviceMemory) and "torch" in sys.modules:
            try:
                client.register_gpu()
            except P2PStoreError as error:
                self._warn_once(f"puts from GPUs are slower than they might be: {error}")
        return INVALID if region is None else 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo `register_buffer`: 0, or -600 when no registered buffer begins there."""
        return 0 if self._buffers.drop(buffer_ptr) else INVALID

    def alloc_from_mem_pool(self, size: int) -> int:
        """The address of `size` new bytes, freed when the store is closed; 0 when there is no store or no memory."""
        try:
            self._live  # noqa: B018 - raises when there is no connection
            return self._allocator.alloc(size)
        except (*FAILURES, OSError) as error:
            self._code(error)
            return 0

    # --- one object --------------------------------------------------------------------------

    def _put_from(
        self,
        overwrite: bool,
        key: str,
        buffer_ptr: int,
        size: int,
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """Store `size` bytes from an address. An object that exists stays; size 0 is 0, and stores nothing."""
        try:
            if not size:
                self._live  # noqa: B018 - raises when there is no connection
                return 0
            value = value_in([self._buffers.place(buffer_ptr, size)])
            return self._store(key, value, config, overwrite=overwrite)
        except FAILURES as error:
            return self._code(error)

    put_from, upsert_from = put_and_upsert(_put_from)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """Store metadata and value as one object; size 0 stores nothing. As in Mooncake, errors are *positive* here."""
        try:
            if not size:
                return 0
            value = self._buffers.place(buffer_ptr, size)
            if not metadata_size:
                return -self._put_from(False, key, buffer_ptr, size, config)
            parts = [self._buffers.place(metadata_buffer_ptr, metadata_size), value]
            return self._store(key, value_in(parts), config)
        except FAILURES as error:
            return -self._code(error)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Write the value to an address where `size` bytes have room. Returns its length, -704 for an unknown
        key, -600 for one that has no room there, -800 when none of its holders could be read."""
        try:
            place = self._buffers.place(buffer_ptr, size, writes=True)
            if isinstance(place, DeviceMemory):
                return self._get_many_into([key], [place])[0]
            return self._live.get_into(key, place)
        except FAILURES as error:
            return self._read_code(error)

    # --- many objects ------------------------------------------------------------------------

    def _batch_put_from(
        self,
        overwrite: bool,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """`put_from` for many, in few requests; a code for each. Size 0 is -600 here."""
        if not alike(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        codes, places = self._places(buffer_ptrs, sizes)
        values = {
            number: place if type(place) is memoryview else value_in([place])
            for number, place in places.items()
            if len(place)
        }
        good = [keys[number] for number in values]
        stored = self._store_many(good, list(values.values()), config, overwrite=overwrite)
        return filled(codes, values, stored)

    batch_put_from, batch_upsert_from = put_and_upsert(_batch_put_from)

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`get_into` for many, in few requests; a length or code for each. Lists of different lengths: -600 each."""
        if not alike(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        codes, places = self._places(buffer_ptrs, sizes, writes=True)
        got = self._get_many_into([keys[number] for number in places], list(places.values()))
        return filled(codes, places, got)

    def _batch_put_from_multi_buffers(
        self,
        overwrite: bool,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Store objects of which each lies in several places, one after the other; a code for each."""
        if not alike(keys, all_buffer_ptrs, all_sizes):
            return [INVALID] * len(keys)
        good = self._buffers.several(all_buffer_ptrs, all_sizes)
        some, values = [keys[number] for number in good], [value_in(each) for each in good.values()]
        stored = self._store_many(some, values, config, overwrite=overwrite, same_node=True)
        return filled([INVALID] * len(keys), good, stored)

    batch_put_from_multi_buffers, batch_upsert_from_multi_buffers = put_and_upsert(
        _batch_put_from_multi_buffers
    )

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Write each value to several places, one after the other; a length or a code for each. Places with more room
        than the value has are filled as far as it goes (Mooncake: -800). Copies on this host are preferred in any
        case, whatever `prefer_alloc_in_same_node` says."""
        if not alike(keys, all_buffer_ptrs, all_sizes):
            return [INVALID] * len(keys)
        good = self._buffers.several(all_buffer_ptrs, all_sizes, writes=True)
        return self._get_scattered(keys, good)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Copy ranges of objects to places in buffers: for each buffer its keys, for each of these offsets in the
        buffer, offsets in the object and sizes. The answer has that shape: bytes copied, or a code, -600 for a range
        that the object or the registered buffer does not have. Where lists differ in length nothing is copied: -600
        for each range, or once for a key without ranges. An object that is not on this machine is brought to its peer's
        memory as a whole."""
        lists = all_keys, all_dst_offsets, all_src_offsets, all_sizes
        if not alike(buffer_ptrs, *lists):
            return [
                [[INVALID] for _ in (all_keys[number] if number < len(all_keys) else [""])]
                for number in range(len(buffer_ptrs))
            ]
        client = self._client
        wanted = list(dict.fromkeys(key for keys in all_keys for key in keys))
        objects = dict(zip(wanted, self._wholes(wanted), strict=True))
        answer = []
        for pointer, keys, *columns in zip(buffer_ptrs, *lists, strict=True):
            if alike(keys, *columns):
                ranges = zip(keys, *columns, strict=True)
                answer.append([self._copy_ranges(objects[key], pointer, *each) for key, *each in ranges])
            else:
                answer.append([[INVALID] for _ in keys])
        if self._client is not client:  # its leases have ended: the bytes may be another object's
            lost = int(ErrorCode.RPC_FAIL)
            return [[[lost for _ in codes] for codes in keys] for keys in answer]
        return answer

    # --- for the other calls -----------------------------------------------------------------

    def _copy_ranges(
        self,
        value: memoryview | int,
        pointer: int,
        into: Sequence[int],
        out_of: Sequence[int],
        lengths: Sequence[int],
    ) -> list[int]:
        try:
            if not alike(into, out_of, lengths):
                return [INVALID] * max(1, len(into))
            room = self._buffers.size_at(pointer)
        except TypeError:
            return [INVALID]
        if isinstance(value, int):
            return [value] * len(lengths)
        codes: list[int] = []
        pairs: list[tuple[Place, Place]] = []
        for target, source, length in zip(into, out_of, lengths, strict=True):
            try:
                inside = min(source, length) >= 0 and source + length <= len(value)
                if not inside or target < 0 or (room is not None and target + length > room):
                    codes.append(INVALID)
                    continue
                place = self._buffers.place(pointer + target, length, writes=True)
                pairs.append((place, value[source : source + length]))
            except (ValueError, TypeError):
                codes.append(INVALID)
            else:
                codes.append(length)
        failed = self._copied(pairs)
        return [failed if failed and code >= 0 else code for code in codes]

    def _copied(self, pairs: Iterable[tuple[Place, Place]]) -> int:
        """`copy_all`: 0, or the code of the GPU's failure."""
        try:
            copy_all(pairs)
        except P2PStoreError as error:
            return self._code(error)
        return 0

    def _places(
        self, pointers: Sequence[int], sizes: Sequence[int], *, writes: bool = False
    ) -> tuple[list[int], dict[int, Place]]:
        """The places of a batch, by their numbers, without those that cannot be; and a code for each of these."""
        codes = [INVALID] * len(pointers)
        try:
            return codes, dict(enumerate(self._buffers.places(pointers, sizes, writes=writes)))
        except ITEM_FAILURES:
            items = zip(pointers, sizes, strict=True)
            return self._sorted_out(items, lambda each: self._buffers.place(*each, writes=writes))

    def _get_many_into(self, keys: Sequence[str], places: Sequence[Place]) -> list[int]:
        on_gpu = {
            number: [place] for number, place in enumerate(places) if isinstance(place, DeviceMemory)
        }
        if on_gpu:
            codes = self._get_scattered(keys, on_gpu)
            left = [number for number in range(len(keys)) if number not in on_gpu]
            got = self._get_many_into([keys[n] for n in left], [places[n] for n in left])
            return filled(codes, left, got)
        try:
            outcomes = self._live.get_into_views(keys, cast(Sequence[memoryview], places))
        except (P2PStoreError, ValueError) as error:
            return [self._read_code(error)] * len(keys)
        return [self._read_code(each) if isinstance(each, Exception) else each for each in outcomes]

    def _get_scattered(self, keys: Sequence[str], places_of: Mapping[int, Sequence[Place]]) -> list[int]:
        """Read the values of some keys, by their numbers, to their places by way of scratch memory; a length or a code
        for each key, -600 for the others."""
        codes = [INVALID] * len(keys)
        sizes = {number: sum(map(len, places)) for number, places in places_of.items()}
        for_gpu = any(isinstance(each, DeviceMemory) for some in places_of.values() for each in some)
        for group in in_groups(sizes):
            with self._scratch.room(sum(sizes[n] for n in group), for_gpu=for_gpu) as room:
                ends = list(accumulate(sizes[n] for n in group))
                values = [room[end - sizes[n] : end] for n, end in zip(group, ends, strict=True)]
                got = self._get_many_into([keys[number] for number in group], values)
                pairs = [
                    pair
                    for number, code, value in zip(group, got, values, strict=True)
                    for pair in scattered(value[: max(code, 0)], places_of[number])
                ]
                failed = self._copied(pairs)
            filled(codes, group, [failed if failed and code >= 0 else code for code in got])
        return codes


MAX_BYTES = 2**32
"""An object has at most 4 GiB."""


class SessionCalls(AddressCalls):
    """Calls that read or write parts of objects. An object that is written is in this program's memory until its
    session ends, and is then stored as a whole: a reader never sees half of it."""

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
        for key, *parts in zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True):
            held = self._read.get(key) if is_key(key) else None
            pairs = self._buffers.pairs(held, *parts, writes=True)
            codes.append(INVALID if pairs is None else self._copied(pairs) or sum(parts[1]))
        if self._client is not client:  # its leases have ended: the bytes may be another object's
            return [int(ErrorCode.RPC_FAIL)] * len(keys)
        return codes

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = DEFAULT_CONFIG
    ) -> list[int]:
        """Begin objects of these sizes: 0 for each, -705 for one that exists or was begun, -600 without bytes."""
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
        for key, *parts in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True):
            begun = self._written.get(key) if is_key(key) else None
            pairs = self._buffers.pairs(begun and begun[0], *parts)
            turned = [(inside, outside) for outside, inside in pairs or ()]
            codes.append(INVALID if pairs is None else self._copied(turned) or sum(parts[1]))
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
            filled(
                codes, numbers, self._store_many([keys[number] for number in numbers], values, config)
            )
        return codes

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Forget what was begun: 0 for each, -600 for what was not."""
        return [
            0 if is_key(key) and self._written.pop(key, None) is not None else INVALID for key in keys
        ]
