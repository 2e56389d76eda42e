"""Values and destinations in the memory of a GPU: tensors of torch, whose bytes pass through this host's pinned memory.

A value that is put is copied to pinned memory by the GPU and from there, like any other, into the peer's memory; what
is read is received and verified in pinned memory, and the GPU copies it from there. So each byte is moved once by a
processor. torch (the extra `gpu`) does the copying and keeps pinned memory for the next time; it is never imported for
programs that did not.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from p2pstore.client.leasing import shared_view
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import GpuCopyFailed, P2PStoreError
from p2pstore.objects import CHUNK_BYTES, KIB, MIB, check_object_length, chunk_count, chunk_sums
from p2pstore.runtime.side_by_side import PIECE_BYTES, side_by_side, threads_for
from p2pstore.runtime.streams import Driver
from p2pstore.values import PutSource, dense_bytes, device_type, source_view

T = TypeVar("T")

DEVICE_TYPES: Final = frozenset({"cuda"})
"""torch's name of NVIDIA's and of AMD's."""
AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Copies up to this are waited for where they were begun: they take less than what a thread costs."""

_PORTABLE: Final = 1
"""A flag of cudaHostRegister: for all GPUs."""
MIN_BYTES: Final = 64 * KIB
"""Smaller tensors are read by way of pinned memory: a lease takes longer than the copy."""
ALONE_BYTES: Final = 16 * MIB
"""Up to this length one thread verifies: more threads take as long to start."""


class OnDevice:
    """The bytes of a tensor on a GPU, `nbytes` of them, and the stream that was current when this was made: work that
    was asked of it before comes before our copies, whichever thread makes them. Raises `ValueError` for a tensor whose
    elements do not lie one after the other."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self.bytes = dense_bytes(tensor)
        self.nbytes: int = self.bytes.numel()
        check_object_length(self.nbytes)
        device = self.bytes.device
        try:
            self.stream = torch.cuda.current_stream(device) if device.type != "cpu" else None
        except (RuntimeError, AssertionError) as error:  # a fake tensor, where there is no GPU
            raise ValueError(f"the GPU of the tensor cannot be used ({error})") from error


def on_device(value: Any) -> OnDevice | None:
    """These bytes, if they are of a tensor on a GPU. Raises as `OnDevice`."""
    if type(value) is OnDevice:
        return value
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return OnDevice(value) if device_type(value) in DEVICE_TYPES else None


class Copy(NamedTuple):
    """Bytes that a GPU is to copy from one tensor to the other, in `stream`; that is None where no GPU has a part in
    it."""

    stream: Any
    target: Any
    source: Any


class PinnedStaging:
    """Pinned memory for the bytes of a tensor on a GPU: `host`. Raises `P2PStoreError` when there is none."""

    def __init__(self, device: OnDevice) -> None:
        import torch

        self._device = device
        try:
            self._host = torch.empty(
                device.nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.stream is not None
            )
        except RuntimeError as error:
            raise P2PStoreError(f"no pinned memory for a tensor on a GPU: {error}") from error
        self.host = source_view(self._host)

    def to_take(self) -> Copy:
        """Of the tensor to `host`."""
        return Copy(self._device.stream, self._host, self._device.bytes)

    def to_give(self, length_bytes: int) -> Copy:
        """The copy of the first `length` bytes of `host` to the beginning of the tensor."""
        target, source = self._device.bytes[:length_bytes], self._host[:length_bytes]
        return Copy(self._device.stream, target, source)


def copy_all(copies: Sequence[Copy], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Begin all copies, do something `meanwhile`, and wait for the copies, also after an error or an interrupt: what
    they read and write may be reused then. Raises `GpuCopyFailed`, and then any of them may have been made."""
    import torch

    try:
        try:
            # Tensors of a caller in inference mode may be written in that mode alone, which is a thread's own.
            with torch.inference_mode():
                for copy in copies:
                    with _current(copy.stream):
                        copy.target.copy_(copy.source, non_blocking=True)
            meanwhile()
        finally:
            try:
                _await_all(copies)
            except BaseException:  # interrupted: once more
                _await_all(copies)
                raise
    except RuntimeError as error:
        raise GpuCopyFailed(f"a tensor on a GPU could not be copied: {error}") from error


def _await_all(copies: Sequence[Copy]) -> None:
    failures: list[RuntimeError] = []
    for stream in {copy.stream for copy in copies} - {None}:
        try:
            stream.record_event().synchronize()
        except RuntimeError as error:
            failures.append(error)
    if failures:
        raise failures[0]


async def await_computed(driver: Driver, devices: Iterable[OnDevice]) -> None:
    """Return when what was asked of GPUs before these tensors were named is done. Raises `GpuCopyFailed`."""
    try:
        for stream in {device.stream for device in devices if device.stream is not None}:
            event = stream.record_event()
            if not event.query():
                await driver.run_in_thread(event.synchronize)
    except RuntimeError as error:
        raise GpuCopyFailed(f"a tensor on a GPU could not be computed: {error}") from error


def _current(stream: Any) -> AbstractContextManager[Any]:
    """Within this, `stream` is the current one."""
    import torch

    if stream is None or stream == torch.cuda.current_stream(stream.device):
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


Staging = dict[int, PinnedStaging | Exception]
"""Of the items of a batch that are on a GPU, by their numbers; or why that cannot be."""


async def take(driver: Driver, device: OnDevice) -> memoryview:
    """The bytes, in pinned memory. Raises `P2PStoreError`."""

    def step() -> PinnedStaging:
        staged = PinnedStaging(device)
        copy_all([staged.to_take()])
        return staged

    return (await run(driver, device.nbytes, step)).host


async def make_room(driver: Driver, device: OnDevice) -> PinnedStaging:
    """Pinned memory to read into; fresh memory takes milliseconds to make. Raises `P2PStoreError`."""
    return await run(driver, device.nbytes, partial(PinnedStaging, device))


async def give(driver: Driver, staged: PinnedStaging, length_bytes: int) -> None:
    """Copy what was read to where it is to go. Raises `P2PStoreError`."""
    await give_all(driver, [(staged, length_bytes)])


async def give_all(driver: Driver, those: Sequence[tuple[PinnedStaging, int]]) -> None:
    """`give` for many, each with its length: the GPU copies one after the other, and all are waited for together.
    Raises `P2PStoreError`, and then any of them may have been copied."""
    copies = [staged.to_give(length) for staged, length in those]
    await run(driver, sum(length for _, length in those), partial(copy_all, copies))


async def stage_all(
    driver: Driver, values: Sequence[Any], *, take_them: bool
) -> tuple[list[Any], Staging]:
    """The values of a batch, with pinned memory in place of tensors on a GPU: with `take_them`, it has their bytes.
    In place of what cannot be staged is None, which fails as a value."""
    views = list(values)
    if "torch" not in sys.modules:  # then none of them is a tensor
        return views, {}
    staging: Staging = {}
    devices: dict[int, OnDevice] = {}
    for number, value in enumerate(views):
        try:
            device = on_device(value)
        except (P2PStoreError, ValueError) as error:
            staging[number] = error
        else:
            if device is not None:
                devices[number] = device
    if devices:
        total_bytes = sum(device.nbytes for device in devices.values())
        step = partial(_stage, devices, take_them=take_them)
        staging |= await run(driver, total_bytes, step)
    for number, staged in staging.items():
        views[number] = staged.host if isinstance(staged, PinnedStaging) else None
    return views, staging


def _stage(devices: Mapping[int, OnDevice], *, take_them: bool) -> Staging:
    staging: Staging = {}
    for number, device in devices.items():
        try:
            staging[number] = PinnedStaging(device)
        except P2PStoreError as error:
            staging[number] = error
    taken = {number: each for number, each in staging.items() if isinstance(each, PinnedStaging)}
    if take_them and taken:
        try:
            copy_all([each.to_take() for each in taken.values()])
        except GpuCopyFailed as error:
            staging |= {number: GpuCopyFailed(str(error)) for number in taken}
    return staging


async def run(driver: Driver, length_bytes: int, step: Callable[[], T]) -> T:
    """Do a step that copies `length_bytes`, in a thread where that takes longer than a thread costs. It is never left
    half done."""
    return step() if length_bytes <= AT_ONCE_BYTES else await driver.run_in_thread(step)


class GpuMapping:
    """The mapped segment of the local peer, page-locked for all GPUs while this is in use; `gpu` is the
    number of one that this process uses anyway. Raises `P2PStoreError` when the driver refuses."""

    def __init__(self, segment: memoryview, gpu: int) -> None:
        import torch

        memory = np.frombuffer(segment, np.uint8)
        self.address: int = memory.ctypes.data
        self._length = len(segment)
        lock = _PageLock(self.address, segment, gpu)
        weakref.finalize(self, lock.end).atexit = False
        lock.begin()
        self._bytes = torch.from_numpy(memory)

    def at(self, offset: int, length: int) -> Any:
        """These bytes, as a tensor in page-locked memory."""
        return self._bytes[offset : offset + length]

    def offset_of(self, view: memoryview) -> int | None:
        """Where a view lies in the segment; None for one that does not."""
        offset = np.frombuffer(view, np.uint8).ctypes.data - self.address
        inside = 0 <= offset <= self._length - len(view)
        return int(offset) if inside else None


class _PageLock:
    """A segment's pages, which the GPU's driver keeps where they are from `begin` to `end`. The segment is kept mapped
    for as long."""

    def __init__(self, address: int, segment: memoryview, gpu: int) -> None:
        self._address, self._segment, self._gpu = address, segment, gpu
        self._process_id = os.getpid()
        self._is_locked = False

    def begin(self) -> None:
        """Raises `P2PStoreError`."""
        import torch

        # In a thread that has used none yet, the driver would begin to use the first GPU, which takes memory there.
        with torch.cuda.device(self._gpu):
            runtime = torch.cuda.cudart()
            self._is_locked = True  # an interrupt may come right behind what the driver does
            error = runtime.cudaHostRegister(self._address, len(self._segment), _PORTABLE)
            if int(error):
                self._is_locked = False
                _forget_error(torch)
                raise P2PStoreError(
                    f"the GPU's driver does not page-lock the local peer's {len(self._segment):,} bytes of memory "
                    f"({runtime.cudaGetErrorString(error)}), as of memory in a file that is not on /dev/shm. Copies go "
                    "by way of pinned memory, as without register_gpu"
                )

    def end(self) -> None:
        """May be called by a finalizer, in whatever thread. A forked child has no part in what the driver does."""
        if self._is_locked and os.getpid() == self._process_id:
            import torch

            with suppress(RuntimeError), torch.cuda.device(self._gpu):
                if int(torch.cuda.cudart().cudaHostUnregister(self._address)):
                    _forget_error(torch)


def _forget_error(torch: Any) -> None:
    """CUDA keeps an error for the next launch of a kernel to report: here, not where this program computes."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def usable_gpu() -> int:
    """The number of the GPU that is current in this thread. Raises `P2PStoreError` where torch knows none."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise P2PStoreError(
                f"torch {torch.__version__} knows no GPU on this machine: install a build of it that does, or leave "
                "register_gpu out"
            )
        number: int = torch.cuda.current_device()
    except ImportError as error:
        raise P2PStoreError("register_gpu needs torch: pip install p2pstore[gpu]") from error
    except (OSError, RuntimeError) as error:
        raise P2PStoreError(f"torch cannot use a GPU here: {error}") from error
    return number


@dataclass(slots=True)
class _Leased:
    """An object under a lease, and where it is to go. `view` is all of it; without it the lease ends."""

    device: OnDevice
    view: memoryview
    offset: int
    sums: bytes


async def read_in_place(
    driver: Driver, link: PeerLink, mapping: GpuMapping, items: Sequence[tuple[bytes, OnDevice]]
) -> list[int | None]:
    """Have GPUs copy objects (by digest) out of the segment, each to the beginning of its tensor: the lengths. None for
    an object that is not there, does not fit, or did not match its sums: its tensor is undefined then. Raises
    `GpuCopyFailed`, and `StoreClosed` when the session ended before all was copied."""
    found = [_leased(link, mapping, *item) for item in items]
    leased = [each for each in found if each is not None]
    if not leased:
        return [None] * len(items)
    total_bytes = sum(len(each.view) for each in leased)
    try:
        verified = iter(await run(driver, total_bytes, partial(_copy_verified, mapping, leased)))
        link.connection.peer_is_gone()  # asked now: a lease may have ended with the session
        link.connection.check_usable()
        lengths = [len(each.view) if each is not None and next(verified) else None for each in found]
    finally:
        found.clear()
        leased.clear()
        link.leases.end_unasked()  # the memory may be wanted by the next call of another client
    for (digest, _), length in zip(items, lengths, strict=True):
        if length is not None:
            link.ledger.read(digest, length)
    return lengths


def _leased(link: PeerLink, mapping: GpuMapping, digest: bytes, device: OnDevice) -> _Leased | None:
    view = shared_view(link, digest) if device.nbytes >= MIN_BYTES else None
    if not view or len(view) > device.nbytes:
        return None
    offset, seen = mapping.offset_of(view), link.leases.sighting(digest)
    # Another thread may have seen another version meanwhile.
    if seen is None or (seen.slot.offset, seen.slot.length) != (offset, len(view)):
        return None
    return _Leased(device, view, seen.slot.offset, seen.sums)


def _copy_verified(mapping: GpuMapping, leased: Sequence[_Leased]) -> list[bool]:
    """Copy them all; which of them match their sums. They are verified while GPUs copy."""
    verified: list[bool] = []

    def verify() -> None:
        verified.extend(_match(leased))

    copies = [
        Copy(
            each.device.stream,
            each.device.bytes[: len(each.view)],
            mapping.at(each.offset, len(each.view)),
        )
        for each in leased
    ]
    copy_all(copies, meanwhile=verify)
    return verified


def _match(leased: Sequence[_Leased]) -> list[bool]:
    numbers, views, sums = [], [], []
    for number, each in enumerate(leased):
        for start in range(0, len(each.view), PIECE_BYTES):
            numbers.append(number)
            views.append(each.view[start : start + PIECE_BYTES])
            first = start // CHUNK_BYTES
            sums.append(each.sums[8 * first : 8 * (first + chunk_count(len(views[-1])))])
    total_bytes = sum(map(len, views))
    threads = threads_for(total_bytes) if total_bytes > ALONE_BYTES else 1
    made = side_by_side(threads, chunk_sums, views)
    wrong = {number for number, one, other in zip(numbers, made, sums, strict=True) if one != other}
    return [number not in wrong for number in range(len(leased))]


class GpuSource(PutSource):
    """A tensor on a GPU, which copies it into the room that was reserved for it in the segment. Its computation is to
    be done by then (`await_computed`): that may take longer than the room is ours."""

    def __init__(self, mapping: GpuMapping, device: OnDevice) -> None:
        self._mapping, self._device = mapping, device

    def __len__(self) -> int:
        return self._device.nbytes

    @property
    def threads(self) -> int:
        return 1  # of four, each waits for what the GPU copies for the others: 4.8 to 10 GB/s instead of 10 to 12

    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        offset = self._mapping.offset_of(target)
        if offset is None:
            raise P2PStoreError("the room for a tensor on a GPU is not in memory that it knows")
        source = self._device.bytes[start : start + len(target)]
        copy_all([Copy(self._device.stream, self._mapping.at(offset, len(target)), source)])
        return chunk_sums(target)

    def joined(self) -> memoryview:
        staged = PinnedStaging(self._device)
        copy_all([staged.to_take()])
        return staged.host
