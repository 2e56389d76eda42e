"""Values and destinations of callers as plain views of bytes; and tensors back again.

Nothing is copied here. numpy arrays are recognised by the buffer protocol where they have one, and
torch tensors only when torch was imported already: this module never imports it for others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from p2pstore.errors import P2PStoreError
from p2pstore.objects import chunk_bounds, chunk_sum
from p2pstore.results import Framework
from p2pstore.runtime.side_by_side import threads_for

TORCH_PREFIX: Final = "torch."
"""How the stored dtype of a torch tensor begins: `torch.bfloat16`. numpy's are `float32`, `>i4`."""

HUGE_PAGES_FROM_BYTES: Final = 4 * 1024 * 1024
SMALL_BYTES: Final = 16 * 1024

_LAYOUT_OF: Final = attrgetter("format", "ndim", "contiguous", "readonly")
_WRITABLE_BYTES: Final = ("B", 1, True, False)
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: have the kernel provide pages for writing, without changing what is in them."""
SMALL_COPY_BYTES: Final = 64 * 1024
"""Up to here a plain copy, which holds the interpreter's lock for a few microseconds, is quicker."""


def source_view(value: Any) -> memoryview:
    """The bytes of `value` in place. Raises `ValueError` when they are not contiguous or not in
    this host's memory, and `TypeError` for what has no bytes of its own."""
    if type(value) is bytes:
        return memoryview(value)
    if type(value) is memoryview and value.format == "B" and value.ndim == 1 and value.contiguous:
        return value if value.nbytes else memoryview(b"")
    if type(value) is RegisteredBuffer:
        return value.view
    if _is_torch_tensor(value):
        return _tensor_bytes(value)
    if isinstance(value, np.ndarray):
        value = _array_bytes(value)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"a value is bytes, a buffer, a numpy array or a torch tensor, not {type(value).__name__}"
        ) from error
    if not view.c_contiguous:
        raise ValueError("the value is not contiguous: copy it first, or pass its parts")
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def destination_view(buffer: Any) -> memoryview:
    """The writable bytes of `buffer` in place. Raises `ValueError` when it is read-only or not
    contiguous, `TypeError` when it is no buffer."""
    view = source_view(buffer)
    if view.nbytes == 0:
        return memoryview(bytearray())
    if view.readonly:
        raise ValueError("the destination is read-only: pass a bytearray, an array or a tensor")
    return view


def destination_views(buffers: Sequence[Any]) -> list[memoryview]:
    """`destination_view` of each. Raises as that for the first that is none."""
    if set(map(type, buffers)) == {memoryview} and set(map(_LAYOUT_OF, buffers)) == {_WRITABLE_BYTES}:
        return list(buffers)  # a call for each takes more than twice as long
    return list(map(destination_view, buffers))


def describe_tensor(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype's name and the shape that are stored with a tensor. Raises `TypeError` for what is
    none, `ValueError` for elements that are not plain numbers or text."""
    if _is_torch_tensor(tensor):
        try:
            return str(tensor.dtype), tuple(tensor.shape)
        except Exception as error:  # nested ones have no shape, and a subclass may raise anything
            raise ValueError(f"the tensor does not say its dtype and shape ({error!r})") from error
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"a tensor is a numpy array or a torch tensor, not {type(tensor).__name__}")
    dtype = tensor.dtype
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize:
        raise ValueError(
            f"an array of {dtype} cannot be stored as a tensor: its elements are not plain numbers "
            "or text; store its fields as arrays of their own"
        )
    return _dtype_name(dtype), tensor.shape


def empty_tensor(dtype: str, shape: tuple[int, ...], length: int, framework: Framework | None) -> Any:
    """Memory for a tensor that was stored as `length` bytes: `torch.*` comes back as torch, the rest
    as numpy.

    `framework` asks for the other one. Raises `P2PStoreError` when this process cannot make it, or
    when dtype and shape do not make `length` bytes; nothing was allocated then.
    """
    wants_torch = framework == "torch" if framework else dtype.startswith(TORCH_PREFIX)
    name = dtype.removeprefix(TORCH_PREFIX)
    kind = torch_dtype(dtype, name) if wants_torch else numpy_dtype(name)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != length:
        raise P2PStoreError(
            f"a tensor of {dtype} and shape {shape} does not have the {length:,} bytes that were "
            "stored: its put described it wrongly; read it with get"
        )
    if not wants_torch:
        return np.empty(shape, kind)
    import torch

    return torch.empty(shape, dtype=kind)


def torch_dtype(dtype: str, name: str) -> Any:
    """torch's dtype `name`, for a value of `dtype`. Raises `P2PStoreError` where there is none, or no torch."""
    try:
        import torch
    except ImportError as error:
        raise P2PStoreError(
            f"the value is to come back as a torch tensor ({dtype}) and torch is not installed: "
            'install it, or pass framework="numpy"'
        ) from error
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise P2PStoreError(f'torch has no dtype {name!r}: pass framework="numpy"')
    return kind


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of that name, or that of ml_dtypes (bfloat16, float8...). Never one whose elements
    are Python objects: stored dtypes are not trusted that far."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        dtype = _ml_dtype(name)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise P2PStoreError(f"{name!r} is no dtype of plain numbers or text: read it with get")
    return dtype


def _ml_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise P2PStoreError(
            f'numpy has no dtype {name!r}: install ml_dtypes, or pass framework="torch"'
        ) from error
    kind = getattr(ml_dtypes, name, None)
    if not isinstance(kind, type) or not issubclass(kind, np.generic):
        raise P2PStoreError(f'neither numpy nor ml_dtypes has a dtype {name!r}: pass framework="torch"')
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """The plain name where it says everything, else numpy's code with byte order and width."""
    try:
        if np.dtype(dtype.name) == dtype:
            return dtype.name
    except TypeError:
        if dtype.isbuiltin == 2:  # bfloat16 and its like: only their module knows the name
            return dtype.name
    return dtype.str


def _is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dense_bytes(tensor: Any) -> Any:
    """The elements of a torch tensor as one row of `uint8`, in place, outside of any graph of gradients. Raises
    `ValueError` unless they lie one after the other in memory of their own, and says what to do."""
    import torch

    try:
        if problem := _why_not_dense(tensor):
            raise ValueError(problem)
        return tensor.detach().reshape(-1).view(torch.uint8)
    except ValueError:
        raise
    except Exception as error:  # what a subclass of Tensor raises, it alone knows
        raise ValueError(
            f"the tensor has no plain memory of its own ({error}): pass an ordinary dense tensor"
        ) from error


def _why_not_dense(tensor: Any) -> str | None:
    import torch

    if tensor.layout is not torch.strided:
        return f"the tensor is {tensor.layout}: call .to_dense() first"
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return "the tensor is nested, quantized or on 'meta': pass an ordinary dense tensor"
    if not tensor.is_contiguous():
        return "the tensor is not contiguous: call .contiguous() first"
    if tensor.is_conj() or tensor.is_neg():
        return "the tensor is a lazy view: call .resolve_conj().resolve_neg() first"
    if memory_was_freed(tensor):
        return "the memory of the tensor was freed (a sharded parameter, say): gather it first"
    return None


def memory_was_freed(tensor: Any) -> bool:
    """Whether elements of a strided torch tensor lie behind the end of its memory, where torch itself would read them:
    so it is with a parameter whose storage was resized to nothing."""
    if not tensor.numel():
        return False
    last = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() < end)


def device_type(tensor: Any) -> str:
    """The kind of device a torch tensor is on: `cpu`, `cuda`, `meta`... Raises `ValueError` where it does not say."""
    try:
        return str(tensor.device.type)
    except Exception as error:  # what a subclass of Tensor raises, it alone knows
        raise ValueError(f"the tensor does not say where it is ({error!r})") from error


def _tensor_bytes(tensor: Any) -> memoryview:
    if (kind := device_type(tensor)) != "cpu":
        raise ValueError(f"a tensor on {kind} cannot be used here: call .cpu() first")
    flat = dense_bytes(tensor)
    if not flat.numel():
        return memoryview(b"")
    try:
        return memoryview(flat.numpy())
    except (RuntimeError, TypeError) as error:  # fake and wrapped tensors
        raise ValueError(
            f"the tensor has no plain memory of its own ({error}): pass an ordinary dense tensor"
        ) from error


def _array_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects has no bytes of its own")
    if np.ma.getmask(array) is not np.ma.nomask:
        raise ValueError("the array is masked, and its mask would be lost: call .filled() first")
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous: call numpy.ascontiguousarray first")
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    return array.reshape(-1).view(np.uint8)


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_new_bytes.restype = ctypes.py_object
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.argtypes = (ctypes.py_object,)
_bytes_address.restype = ctypes.c_void_p
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fresh_bytes(length: int) -> tuple[memoryview, Callable[[], bytes]]:
    """Writable memory of `length` bytes, and what turns it into `bytes` once it is filled.

    A large value is written straight into the `bytes` object that the caller will get (the C API
    allows it while the object is unknown to other code), on huge pages if there are any. For 64
    MiB that takes 14 ms; filling fresh small pages takes 36 and one more copy 48. A small value
    is cheaper to copy than to set up.
    """
    if length <= SMALL_BYTES:
        scratch = bytearray(length)
        return memoryview(scratch), lambda: bytes(scratch)
    value: bytes = _new_bytes(None, length)
    address: int = _bytes_address(value)
    if length >= HUGE_PAGES_FROM_BYTES:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)  # advice: failing is fine
    memory = (ctypes.c_ubyte * length).from_address(address)
    return memoryview(memory).cast("B"), lambda: value


class RegisteredBuffer:
    """A buffer that a store was told of: `store.register(buffer)`. Usable wherever a buffer is.

    What registering does today: the buffer was checked once (writable, contiguous, in this host's
    memory), so that puts and gets with it need not look again; its pages are provided, so that the
    first get into it does not wait for the kernel; and while it is registered it can be neither
    resized nor freed. Network cards are not told of it yet: transports that need that will do it
    here, and callers will not have to change anything.

    `view` is all of it, as writable bytes; a slice (`registered[start:stop]`) is such a view of a
    part. Close it, or use it as a context manager, or close the store: then it can be resized
    again, once views of it are gone too.
    """

    __slots__ = ("__weakref__", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        _provide_pages(view)

    @property
    def view(self) -> memoryview:
        """The registered bytes. Raises `ValueError` after `close`."""
        if self._view is None:
            raise ValueError("the registered buffer was closed: register it again")
        return self._view

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> memoryview:
        """A view of a part; `part` counts bytes. Raises `TypeError` for anything but a slice."""
        if not isinstance(part, slice):
            raise TypeError("a registered buffer is cut into parts by slices: registered[start:stop]")
        return self.view[part]

    def close(self) -> None:
        """Let go of the buffer; may be called twice."""
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _provide_pages(view: memoryview) -> None:
    """Fault in every page of the buffer. Releases the interpreter lock. An older kernel, or one that has
    no more memory, does not do it: then pages come when they are first touched, as always."""
    if not view.nbytes:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + view.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.madvise(start, end - start, _MADV_POPULATE_WRITE)


class PutSource(ABC):
    """A value that is no buffer, whose bytes are copied to where they belong when it is put."""

    @abstractmethod
    def __len__(self) -> int:
        """The length in bytes."""

    @property
    def nbytes(self) -> int:
        """The same."""
        return len(self)

    @property
    def threads(self) -> int:
        """How many may copy side by side."""
        return threads_for(len(self))

    @abstractmethod
    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        """Copy the bytes from `start` on, as many as `target` has; the sums of its chunks, packed u64s. `start` is the
        beginning of a chunk."""

    @abstractmethod
    def joined(self) -> memoryview:
        """All of it in memory of its own. May take its time."""


class Gathered(PutSource):
    """Buffers that are one value, one after the other. Raises as `source_view` for what is none. The caller may change
    them meanwhile: the sums are of what was copied."""

    def __init__(self, parts: Sequence[Any]) -> None:
        views = [view for view in map(self._part_of, parts) if view.nbytes]
        self._parts = views
        self._ends = list(accumulate(map(len, views)))
        self._length = self._ends[-1] if views else 0

    def __len__(self) -> int:
        return self._length

    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        sums = []
        for at, end in chunk_bounds(len(target)):
            place = at
            for piece in self.between(start + at, start + end):
                copy_bytes(target[place : place + len(piece)], piece)
                place += len(piece)
            sums.append(chunk_sum(target[at:end]))
        return np.array(sums, "<u8").tobytes()

    @staticmethod
    def _part_of(part: Any) -> Any:
        return source_view(part)

    def between(self, start: int, end: int) -> list[memoryview]:
        """The pieces of the parts that make up these bytes of the value."""
        pieces = []
        place = bisect_right(self._ends, start)
        while start < end:
            part = self._parts[place]
            offset = start - (self._ends[place] - len(part))
            piece = part[offset : offset + end - start]
            pieces.append(piece)
            start += len(piece)
            place += 1
        return pieces

    def joined(self) -> memoryview:
        return self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `target` has; large ones without the interpreter's lock."""
    if len(source) <= SMALL_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


Source = memoryview | PutSource
"""The source of the bytes of a put."""


def value_of(value: Any) -> Source:
    """`source_view`, for what may lie elsewhere."""
    if type(value) is not memoryview and isinstance(value, PutSource):
        return value
    return source_view(value)
