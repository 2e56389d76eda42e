"""Stands for CUDA's driver library: memory that no processor reads, copied when a stream is waited for."""

import ctypes
import mmap
import os
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from p2pstore.integrations.mooncake.cuda_memory import CudaDriver

OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, ILLEGAL_ADDRESS = 0, 1, 2, 201, 700
CONTEXT, PRIMARY = 0xC0DE, 0xBA5E

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def hidden_memory(size: int, file: int = -1) -> int:
    """The address of pages that this process has and may not touch."""
    flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, size, 0, flags, file, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


class FakeCuda:
    """The functions of `libcuda.so.1` that `CudaDriver` calls, and a program's own: `memory`, `read` and `write`."""

    def __init__(self) -> None:
        self.gpu: dict[int, mmap.mmap] = {}
        self.contexts: dict[int, int | None] = {}
        self.pinned: dict[int, mmap.mmap] = {}
        self.asked_to_copy = 0
        self.fails = OK
        self._thread = threading.local()
        self._streams: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)

    # --- what a program does ---------------------------------------------------------------------

    def driver(self) -> CudaDriver:
        return CudaDriver(self)

    def memory(self, size: int, *, context: int | None = CONTEXT) -> int:
        file = os.memfd_create("gpu")
        os.ftruncate(file, size)
        address = hidden_memory(size, file)
        self.gpu[address] = mmap.mmap(file, size)
        self.contexts[address] = context
        os.close(file)
        return address

    def write(self, address: int, data: bytes) -> None:
        base, offset = self._found(address)
        self.gpu[base][offset : offset + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        base, offset = self._found(address)
        return self.gpu[base][offset : offset + size]

    def _found(self, address: int) -> tuple[int, int]:
        for base, pages in self.gpu.items():
            if 0 <= address - base < len(pages):
                return base, address - base
        return 0, 0

    # --- the library -----------------------------------------------------------------------------

    def cuPointerGetAttribute(self, value: Any, which: Any, address: Any) -> int:
        base, _ = self._found(address.value)
        if not base:
            if address.value in self.pinned and which.value == 2:
                value._obj.value = 1
                return OK
            return INVALID_VALUE
        value._obj.value = {1: self.contexts[base], 2: 2, 9: 0}[which.value]
        return OK

    def cuDeviceGet(self, device: Any, number: Any) -> int:
        device._obj.value = number.value
        return OK

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = PRIMARY + device.value
        return OK

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        if context.value not in (CONTEXT, PRIMARY):
            return INVALID_CONTEXT
        self._stack().append(context.value)
        return OK

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self._stack().pop()
        return OK

    def _stack(self) -> list[int]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[int] = self._thread.stack
        return stack

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        if not self._stack():
            return INVALID_CONTEXT
        self.asked_to_copy += 1
        if not size.value:
            return INVALID_VALUE
        self._streams[threading.get_ident(), stream.value].append(
            (target.value, source.value, size.value)
        )
        return OK

    def cuStreamSynchronize(self, stream: Any) -> int:
        if not self._stack():
            return INVALID_CONTEXT
        copies = self._streams.pop((threading.get_ident(), stream.value), [])
        if copies and self.fails:
            return self.fails
        for target, source, size in copies:
            if any(self._found(each)[0] != self._found(each + size - 1)[0] for each in (target, source)):
                return ILLEGAL_ADDRESS
            ctypes.memmove(self._of_processor(target), self._of_processor(source), size)
        return OK

    def _of_processor(self, address: int) -> int:
        base, offset = self._found(address)
        if not base:
            return address
        return int(np.frombuffer(self.gpu[base], np.uint8).ctypes.data) + offset

    def cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> int:
        if not self._stack() or flags.value != 1:
            return INVALID_CONTEXT
        if self.fails == OUT_OF_MEMORY:
            return OUT_OF_MEMORY
        pages = mmap.mmap(-1, size.value)
        address._obj.value = int(np.frombuffer(pages, np.uint8).ctypes.data)
        self.pinned[address._obj.value] = pages
        return OK

    def cuMemFreeHost(self, address: Any) -> int:
        return INVALID_VALUE if self.pinned.pop(address.value, None) is None else OK

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = b"as a fake driver says"
        return OK


class RealCuda:
    """A program that uses a GPU by the driver library alone."""

    def __init__(self) -> None:
        """Raises `OSError` where there is no library, or no GPU."""
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if self._library.cuInit(0) or self._library.cuDeviceGet(ctypes.byref(device), 0):
            raise OSError("no GPU")
        assert not self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._context = context

    def driver(self) -> CudaDriver:
        return CudaDriver(self._library)

    def _call(self, function: str, *arguments: Any) -> None:
        assert not self._library.cuCtxPushCurrent_v2(self._context)
        assert not getattr(self._library, function)(*arguments)
        assert not self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def memory(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        room = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", room, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return room.raw
