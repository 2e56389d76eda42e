"""Values and destinations in the memory of a GPU: tensors of torch, whose bytes pass through this host's pinned memory.

A value that is put is copied to pinned memory by the GPU and from there, like any other, into the peer's memory; what
is read is received and verified in pinned memory, and the GPU copies it from there. So each byte is moved once by a
processor. torch (the extra `gpu`) does the copying and keeps pinned memory for the next time; it is never imported for
programs that did not.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from p2pstore.client.values import check_dense, source_view
from p2pstore.streams import Driver

DEVICE_TYPES: Final = frozenset({"cuda"})
"""torch's name of NVIDIA's and of AMD's."""
AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Copies up to this are waited for where they were begun: they take less than what a thread costs."""


def is_on_device(value: Any) -> bool:
    """Whether these are the bytes of a tensor on a GPU."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and isinstance(value, torch.Tensor) and value.device.type in DEVICE_TYPES
    )


class Staged:
    """A tensor on a GPU, and pinned memory for as many bytes: `host`. Raises `ValueError` for a tensor that is not
    dense and contiguous."""

    def __init__(self, tensor: Any) -> None:
        import torch

        check_dense(tensor)
        self._device = tensor.detach().reshape(-1).view(torch.uint8)
        pinned = torch.cuda.is_available()
        self._host = torch.empty(self._device.numel(), dtype=torch.uint8, pin_memory=pinned)
        self.host = source_view(self._host)

    def begin_taking(self) -> Callable[[], None]:
        """Have the GPU copy the tensor to `host`, after what was asked of the current stream before. What is returned
        waits until that is done; it may be called in another thread."""
        self._host.copy_(self._device, non_blocking=True)
        return self._end_of_copies()

    def begin_giving(self, length_bytes: int) -> Callable[[], None]:
        """Have the GPU copy so many bytes of `host` to the beginning of the tensor, likewise."""
        self._device[:length_bytes].copy_(self._host[:length_bytes], non_blocking=True)
        return self._end_of_copies()

    def _end_of_copies(self) -> Callable[[], None]:
        import torch

        if self._device.device.type == "cpu":  # in tests
            return lambda: None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device.device))
        wait: Callable[[], None] = copied.synchronize
        return wait


async def staged(driver: Driver, tensor: Any) -> Staged:
    """`Staged`: pinned memory that was not used before takes milliseconds to make."""
    made: Staged = await _run(driver, tensor.nbytes, partial(Staged, tensor))
    return made


async def taken(driver: Driver, tensor: Any) -> memoryview:
    """The bytes of a tensor on a GPU, in pinned memory."""
    staging = await staged(driver, tensor)
    await _run(driver, len(staging.host), staging.begin_taking())
    return staging.host


async def taken_where_need_be(
    driver: Driver, items: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any]]:
    """Items of a batch to put, with `taken` in place of tensors on a GPU; what cannot be taken stays, and fails as what
    it is."""
    if not any(is_on_device(value) for _, value in items):
        return list(items)
    ends: list[Callable[[], None]] = []
    found: list[tuple[str, Any]] = []
    for key, value in items:
        source = value
        if is_on_device(value):
            with suppress(ValueError):
                staging = await staged(driver, value)
                ends.append(staging.begin_taking())
                source = staging.host
        found.append((key, source))
    total_bytes = sum(value.nbytes for _, value in items if is_on_device(value))
    await _run(driver, total_bytes, lambda: [end() for end in ends])
    return found


async def staged_where_need_be(
    driver: Driver, items: Sequence[tuple[str, Any]]
) -> tuple[list[Any], dict[int, Staged]]:
    """Buffers of a batch to get, with the pinned memory of `Staged` in place of tensors on a GPU; and these, by their
    numbers. What cannot be staged stays, and fails as what it is."""
    buffers, staging = [], {}
    for number, (_, buffer) in enumerate(items):
        if is_on_device(buffer):
            with suppress(ValueError):
                staging[number] = await staged(driver, buffer)
        buffers.append(staging[number].host if number in staging else buffer)
    return buffers, staging


async def give(driver: Driver, lengths: Sequence[tuple[Staged, int]]) -> None:
    """Copy so many bytes of the pinned memory of each to its GPU."""
    ends = [staging.begin_giving(length) for staging, length in lengths]
    await _run(driver, sum(length for _, length in lengths), lambda: [end() for end in ends])


def _run(driver: Driver, length_bytes: int, step: Callable[[], Any]) -> Awaitable[Any]:
    if length_bytes <= AT_ONCE_BYTES:
        return _at_once(step)
    return driver.run_in_thread(step)


async def _at_once(step: Callable[[], Any]) -> Any:
    return step()
