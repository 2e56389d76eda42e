"""Memory of NVIDIA's GPUs by address, through the driver library that the program has loaded.

Nothing is linked, and no library is loaded: without `libcuda.so.1` in the process no address can be a GPU's. Copies
are in the calling thread's default stream, so they follow what torch's default stream was asked for. Work in other
streams is the caller's to wait for, as with Mooncake.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, cast

import numpy as np

from p2pstore.errors import GpuCopyFailed
from p2pstore.objects import chunk_sums
from p2pstore.values import Gathered, Source, copy_bytes

LIBRARY: Final = "libcuda.so.1"
_CONTEXT, _MEMORY_TYPE, _ORDINAL = 1, 2, 9
"""Attributes of a pointer (CUpointer_attribute)."""
_ON_DEVICE: Final = 2
_PORTABLE: Final = 1
"""A flag of cuMemHostAlloc: pinned for all GPUs."""
_THREAD_STREAM: Final = 2
"""CU_STREAM_PER_THREAD."""

Copy = tuple[int, int, int]
"""Target and source by address, and the length in bytes."""


class CudaDriver:
    """The few functions of CUDA's driver that memory by address needs. Any thread may use it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._primary: dict[int, int] = {}

    def memory_at(self, address: int, size: int) -> DeviceMemory | None:
        """The `size` bytes at `address`, where first and last byte are in the memory of one GPU; else None."""
        ends = {self._gpu_of(address), self._gpu_of(address + size - 1)}
        gpu = ends.pop()
        if gpu is None or ends:
            return None
        context = self._attribute(_CONTEXT, address, ctypes.c_void_p) or self._primary_of(gpu)
        return DeviceMemory(self, context, address, size)

    def copy(self, context: int, copies: Sequence[Copy]) -> None:
        """Make all copies and wait for them, also after an error or an interrupt. Raises `GpuCopyFailed`."""
        stream = ctypes.c_void_p(_THREAD_STREAM)
        with self._current(context):
            try:
                for target, source, size in copies:
                    places = ctypes.c_uint64(target), ctypes.c_uint64(source)
                    self._check("cuMemcpyAsync", *places, ctypes.c_size_t(size), stream)
            finally:
                try:
                    self._check("cuStreamSynchronize", stream)
                except BaseException:  # interrupted: once more
                    self._check("cuStreamSynchronize", stream)
                    raise

    def pinned(self, context: int, size: int) -> memoryview:
        """New page-locked memory of this host, freed with its last view. Raises `GpuCopyFailed` where there is none."""
        address = ctypes.c_void_p()
        with self._current(context):
            room = ctypes.c_size_t(size)
            self._check("cuMemHostAlloc", ctypes.byref(address), room, ctypes.c_uint(_PORTABLE))
        assert address.value is not None
        memory = (ctypes.c_ubyte * size).from_address(address.value)
        weakref.finalize(memory, self._free, context, address, os.getpid()).atexit = False
        return memoryview(memory).cast("B")

    def _free(self, context: int, address: ctypes.c_void_p, process_id: int) -> None:
        if os.getpid() == process_id:  # a forked child has no part in what the driver does
            with suppress(GpuCopyFailed), self._current(context):
                self._check("cuMemFreeHost", address)

    def _gpu_of(self, address: int) -> int | None:
        if self._attribute(_MEMORY_TYPE, address, ctypes.c_uint) != _ON_DEVICE:
            return None
        return self._attribute(_ORDINAL, address, ctypes.c_int)

    def _attribute(self, which: int, address: int, kind: Any) -> int | None:
        """None where the driver does not know the address, or was not begun."""
        value = kind()
        place = ctypes.c_uint64(address)
        code = self._library.cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(which), place)
        return None if code else value.value

    def _primary_of(self, gpu: int) -> int:
        """The primary context of a GPU, for memory that is of no single context (pools, virtual memory)."""
        if gpu not in self._primary:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._check("cuDeviceGet", ctypes.byref(device), ctypes.c_int(gpu))
            self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._primary[gpu] = context.value or 0
        return self._primary[gpu]

    @contextmanager
    def _current(self, context: int) -> Iterator[None]:
        """Within this, a context is the calling thread's."""
        self._check("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _check(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            said = (text.value or b"unknown error").decode(errors="replace")
            raise GpuCopyFailed(f"the GPU's driver failed: {function}: {said} ({code})")


@cache
def _driver() -> CudaDriver:
    return CudaDriver(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD))


def loaded_driver() -> CudaDriver | None:
    """The driver, where the program uses CUDA."""
    try:
        return _driver()
    except OSError:
        return None


class DeviceMemory:
    """Bytes of a GPU's memory. A slice is the memory of a part."""

    __slots__ = ("address", "context", "driver", "nbytes")

    def __init__(self, driver: CudaDriver, context: int, address: int, nbytes: int) -> None:
        self.driver, self.context, self.address, self.nbytes = driver, context, address, nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceMemory:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceMemory(self.driver, self.context, self.address + start, stop - start)


Place = memoryview | DeviceMemory
"""Memory of a caller: of this process, or of a GPU."""


def copy_all(pairs: Iterable[tuple[Place, Place]]) -> None:
    """Copy each second to its first, of which one may be a GPU's. After `GpuCopyFailed` any may have been copied."""
    by_context: dict[tuple[CudaDriver, int], list[Copy]] = defaultdict(list)
    for target, source in pairs:
        if isinstance(target, DeviceMemory):
            copy = target.address, _address_of(source), len(source)
            by_context[target.driver, target.context].append(copy)
        elif isinstance(source, DeviceMemory):
            copy = _address_of(target), source.address, len(source)
            by_context[source.driver, source.context].append(copy)
        else:
            copy_bytes(target, source)
    for (driver, context), copies in by_context.items():
        driver.copy(context, copies)


def _address_of(place: Place) -> int:
    if isinstance(place, DeviceMemory):
        return place.address
    return int(np.frombuffer(place, np.uint8).ctypes.data)


class GatheredAnywhere(Gathered):
    """A value whose parts are in the memory of this process or of GPUs, which copy theirs."""

    @staticmethod
    def _part_of(part: Place) -> Place:
        return part

    @property
    def threads(self) -> int:
        return 1  # a GPU copies for one after the other

    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        at, pairs = 0, []
        for piece in self.between(start, start + len(target)):
            pairs.append((target[at : at + len(piece)], piece))
            at += len(piece)
        copy_all(pairs)
        return chunk_sums(target)

    def joined(self) -> memoryview:
        whole = np.empty(len(self), np.uint8).data
        self.copy_and_sum(whole, 0)
        return whole


def value_in(parts: Sequence[Place]) -> Source:
    if len(parts) == 1 and type(parts[0]) is memoryview:  # nearly always
        return parts[0]
    if any(isinstance(part, DeviceMemory) for part in parts):
        return GatheredAnywhere(parts)
    return Gathered(cast(Sequence[memoryview], parts))
