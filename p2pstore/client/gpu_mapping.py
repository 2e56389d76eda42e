"""The local peer's memory as GPUs see it: page-locked, so that they copy from it and into it in place.

No processor of this host moves these bytes any more: a value is read by the GPU while its bytes are verified where they
lie, under a lease that keeps them there; and a value that is put is written by the GPU into the room that was reserved.
What is not in that memory, or changes meanwhile, goes by way of pinned memory as ever (`device_memory`).
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from p2pstore.client.device_memory import Copy, OnDevice, Staged, copy_all, run
from p2pstore.client.gathered import PutSource
from p2pstore.client.leasing import shared_view
from p2pstore.client.link import PeerLink
from p2pstore.errors import P2PStoreError
from p2pstore.objects import CHUNK_BYTES, KIB, MIB, chunk_count, chunk_sums
from p2pstore.side_by_side import PIECE_BYTES, side_by_side, threads_for
from p2pstore.streams import Driver

_PORTABLE: Final = 1
_READ_ONLY: Final = 8
"""Flags of cudaHostRegister: for all GPUs; memory that this process may not write."""
LEAST_BYTES: Final = 64 * KIB
"""What has room for less is read by way of pinned memory: to have it under a lease takes longer than to copy it."""
ALONE_BYTES: Final = 16 * MIB
"""Up to so many bytes are verified by one thread, which takes as long as others take to begin."""


class GpuMapping:
    """The mapped segment of the local peer, page-locked until nobody uses this any more, for all GPUs; `gpu` is the
    number of one that this process uses anyway. Raises `P2PStoreError` when the driver refuses."""

    def __init__(self, segment: memoryview, gpu: int) -> None:
        import torch

        memory = np.frombuffer(segment, np.uint8)
        self.address: int = memory.ctypes.data
        self._length = len(segment)
        # In a thread that has used none yet, the driver would begin to use the first one, which takes memory there.
        with torch.cuda.device(gpu):
            _page_lock(torch, self.address, segment)
        undo = partial(_unlock, self.address, segment, gpu, os.getpid())
        weakref.finalize(self, undo).atexit = False
        with warnings.catch_warnings():  # of memory that may not be written, which nobody does
            warnings.simplefilter("ignore", UserWarning)
            self._bytes = torch.from_numpy(memory)

    def at(self, offset: int, length: int) -> Any:
        """These bytes, as a tensor in page-locked memory."""
        return self._bytes[offset : offset + length]

    def offset_of(self, view: memoryview) -> int | None:
        """Where a view lies in the segment; None for one that does not."""
        offset = np.frombuffer(view, np.uint8).ctypes.data - self.address
        inside = 0 <= offset <= self._length - len(view)
        return int(offset) if inside else None


def usable_gpu() -> int:
    """The number of the GPU that is current in this thread. Raises `P2PStoreError` where torch knows none."""
    try:
        import torch
    except ImportError as error:
        raise P2PStoreError("register_gpu needs torch: pip install p2pstore[gpu]") from error
    if not torch.cuda.is_available():
        raise P2PStoreError(
            f"torch {torch.__version__} knows no GPU on this machine: install a build of it that does, or leave "
            "register_gpu out"
        )
    number: int = torch.cuda.current_device()
    return number


def _page_lock(torch: Any, address: int, segment: memoryview) -> None:
    runtime = torch.cuda.cudart()
    flags = _PORTABLE | (_READ_ONLY if segment.readonly else 0)
    error = runtime.cudaHostRegister(address, len(segment), flags)
    if int(error):
        _forget_error(torch)
        raise P2PStoreError(
            f"the GPU's driver does not page-lock the local peer's {len(segment):,} bytes of memory "
            f"({runtime.cudaGetErrorString(error)}), as of memory in a file that is not on /dev/shm. Copies go by way "
            "of pinned memory, as without register_gpu"
        )


def _forget_error(torch: Any) -> None:
    """CUDA keeps an error for the next launch of a kernel to report: here, not where this program computes."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _unlock(address: int, segment: memoryview, gpu: int, process_id: int) -> None:
    """Nobody uses the mapping any more. `segment` was kept mapped until now."""
    if os.getpid() == process_id:  # a forked child has no part in what the GPU's driver does
        import torch

        with suppress(RuntimeError), torch.cuda.device(gpu):
            torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(slots=True)
class _InPlace:
    """An object under a lease, and where it is to go. `view` is all of it; without it the lease ends."""

    device: OnDevice
    view: memoryview
    offset: int
    sums: bytes


async def read_in_place(
    driver: Driver, link: PeerLink, mapping: GpuMapping, items: Sequence[tuple[bytes, OnDevice]]
) -> list[int | None]:
    """Have GPUs copy objects (by digest) out of the segment, each to the beginning of its tensor: the lengths. None for
    what is not there, does not fit, or did not match its sums: what its tensor has then means nothing. Raises
    `P2PStoreError` when a GPU does not copy."""
    found = [_in_place(link, mapping, *item) for item in items]
    those = [each for each in found if each is not None]
    total_bytes = sum(len(each.view) for each in those)
    right = iter(await run(driver, total_bytes, partial(_copy_verified, mapping, those)))
    return [len(each.view) if each is not None and next(right) else None for each in found]


def _in_place(
    link: PeerLink, mapping: GpuMapping, digest: bytes, device: OnDevice
) -> _InPlace | None:
    view = shared_view(link, digest) if device.nbytes >= LEAST_BYTES else None
    if not view or len(view) > device.nbytes:
        return None
    offset, seen = mapping.offset_of(view), link.leases.sighting(digest)
    # Another thread may have seen another version meanwhile.
    if seen is None or (seen.slot.offset, seen.slot.length) != (offset, len(view)):
        return None
    link.note_read(digest, len(view))
    return _InPlace(device, view, seen.slot.offset, seen.sums)


def _copy_verified(mapping: GpuMapping, those: Sequence[_InPlace]) -> list[bool]:
    """Copy them all; which of them match their sums. They are verified while GPUs copy."""
    right: list[bool] = []

    def verify() -> None:
        right.extend(_match(those))

    copies = [
        Copy(
            each.device.stream,
            each.device.bytes[: len(each.view)],
            mapping.at(each.offset, len(each.view)),
        )
        for each in those
    ]
    copy_all(copies, meanwhile=verify)
    return right


def _match(those: Sequence[_InPlace]) -> list[bool]:
    numbers, views, sums = [], [], []
    for number, each in enumerate(those):
        for start in range(0, len(each.view), PIECE_BYTES):
            numbers.append(number)
            views.append(each.view[start : start + PIECE_BYTES])
            first = start // CHUNK_BYTES
            sums.append(each.sums[8 * first : 8 * (first + chunk_count(len(views[-1])))])
    total_bytes = sum(map(len, views))
    threads = threads_for(total_bytes) if total_bytes > ALONE_BYTES else 1
    made = side_by_side(threads, chunk_sums, views)
    wrong = {number for number, one, other in zip(numbers, made, sums, strict=True) if one != other}
    return [number not in wrong for number in range(len(those))]


class GpuSource(PutSource):
    """A tensor on a GPU, which copies it into the room that was reserved for it in the segment."""

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
        staged = Staged(self._device)
        copy_all([staged.to_take()])
        return staged.host
