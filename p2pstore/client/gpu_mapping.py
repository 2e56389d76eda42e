"""The local peer's memory as GPUs see it: page-locked, so that they copy from it and into it in place.

No processor of this host moves these bytes any more: a value is read by the GPU while its bytes are verified where they
lie, under a lease that keeps them there; and a value that is put is written by the GPU into the room that was reserved.
What is not in that memory, or changes meanwhile, goes by way of pinned memory as ever (`device_memory`). As with views,
all of this holds as long as the session does: so a read counts only when the session had not ended by its end.
"""

from __future__ import annotations

import os
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
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import P2PStoreError
from p2pstore.objects import CHUNK_BYTES, KIB, MIB, chunk_count, chunk_sums
from p2pstore.runtime.side_by_side import PIECE_BYTES, side_by_side, threads_for
from p2pstore.runtime.streams import Driver

_PORTABLE: Final = 1
"""A flag of cudaHostRegister: for all GPUs."""
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
    what is not there, does not fit, or did not match its sums: what its tensor has then means nothing. Raises
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
        lengths = [
            len(each.view) if each is not None and next(verified) else None for each in found
        ]
    finally:
        found.clear()
        leased.clear()
        link.leases.end_unasked()  # the memory may be wanted by the next call of another client
    for (digest, _), length in zip(items, lengths, strict=True):
        if length is not None:
            link.note_read(digest, length)
    return lengths


def _leased(link: PeerLink, mapping: GpuMapping, digest: bytes, device: OnDevice) -> _Leased | None:
    view = shared_view(link, digest) if device.nbytes >= LEAST_BYTES else None
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
    """A tensor on a GPU, which copies it into the room that was reserved for it in the segment. What computes it is to
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
        staged = Staged(self._device)
        copy_all([staged.to_take()])
        return staged.host
