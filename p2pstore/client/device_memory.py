"""Values and destinations in the memory of a GPU: tensors of torch, whose bytes pass through this host's pinned memory.

A value that is put is copied to pinned memory by the GPU and from there, like any other, into the peer's memory; what
is read is received and verified in pinned memory, and the GPU copies it from there. So each byte is moved once by a
processor. torch (the extra `gpu`) does the copying and keeps pinned memory for the next time; it is never imported for
programs that did not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from p2pstore.client.values import check_dense, source_view
from p2pstore.errors import P2PStoreError
from p2pstore.objects import check_object_length
from p2pstore.streams import Driver

DEVICE_TYPES: Final = frozenset({"cuda"})
"""torch's name of NVIDIA's and of AMD's."""
AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Copies up to this are waited for where they were begun: they take less than what a thread costs."""


class OnDevice:
    """The bytes of a tensor on a GPU, `nbytes` of them, and the stream that was current when this was made: what was
    asked of it before comes before our copies, whichever thread makes them. Raises `ValueError` for a tensor whose
    elements do not lie one after the other."""

    def __init__(self, tensor: Any) -> None:
        import torch

        check_dense(tensor)
        try:
            self.bytes = tensor.detach().reshape(-1).view(torch.uint8)
        except (RuntimeError, TypeError) as error:  # quantized, fake and wrapped tensors
            raise ValueError(f"the tensor has no plain memory of its own ({error})") from error
        self.nbytes: int = self.bytes.numel()
        check_object_length(self.nbytes)
        device = self.bytes.device
        self.stream = torch.cuda.current_stream(device) if device.type != "cpu" else None


def on_device(value: Any) -> OnDevice | None:
    """These bytes, if they are of a tensor on a GPU. Raises as `OnDevice`."""
    if type(value) is OnDevice:
        return value
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return OnDevice(value) if value.device.type in DEVICE_TYPES else None


class Staged:
    """Pinned memory for the bytes of a tensor on a GPU: `host`. Raises `P2PStoreError` when there is none."""

    def __init__(self, device: OnDevice) -> None:
        import torch

        self._device = device
        pinned = torch.cuda.is_available()
        try:
            self._host = torch.empty(
                device.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
        except RuntimeError as error:
            raise P2PStoreError(f"no pinned memory for a tensor on a GPU: {error}") from error
        self.host = source_view(self._host)

    def take(self) -> None:
        """Copy the tensor to `host`."""
        self._copy(self._host, self._device.bytes)

    def give(self, length_bytes: int) -> None:
        """Copy so many bytes of `host` to the beginning of the tensor."""
        self._copy(self._device.bytes[:length_bytes], self._host[:length_bytes])

    def _copy(self, target: Any, source: Any) -> None:
        import torch

        stream = self._device.stream
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            if stream is not None:
                stream.record_event().synchronize()
        except RuntimeError as error:
            raise P2PStoreError(f"a tensor on a GPU could not be copied: {error}") from error


Staging = dict[int, Staged | Exception]
"""Of the items of a batch that are on a GPU, by their numbers; or why that cannot be."""


def _taken(device: OnDevice) -> Staged:
    staged = Staged(device)
    staged.take()
    return staged


async def take(driver: Driver, device: OnDevice) -> memoryview:
    """The bytes, in pinned memory."""
    return (await _run(driver, device, _taken)).host


async def make_room(driver: Driver, device: OnDevice) -> Staged:
    """Pinned memory to read into: what was not used before takes milliseconds to make."""
    return await _run(driver, device, Staged)


async def give(driver: Driver, staged: Staged, length_bytes: int) -> None:
    """Copy what was read to where it is to go."""
    step = partial(staged.give, length_bytes)
    if length_bytes <= AT_ONCE_BYTES:
        step()
    else:
        await driver.run_in_thread(step)


async def stage_all(
    driver: Driver, values: Sequence[Any], *, take_them: bool
) -> tuple[list[Any], Staging]:
    """The values of a batch, with pinned memory in place of tensors on a GPU: with `take_them`, it has their bytes.
    In place of what cannot be staged is None, which fails as a value."""
    if "torch" not in sys.modules:  # then none of them is a tensor
        return list(values), {}
    views: list[Any] = []
    staging: Staging = {}
    for number, value in enumerate(values):
        view = value
        try:
            device = on_device(value)
            if device is not None:
                view = None
                made = await _run(driver, device, _taken if take_them else Staged)
                staging[number], view = made, made.host
        except (P2PStoreError, ValueError) as error:
            staging[number] = error
        views.append(view)
    return views, staging


async def _run(driver: Driver, device: OnDevice, step: Callable[[OnDevice], Staged]) -> Staged:
    """Never left half done: a thread's step is waited for."""
    if device.nbytes <= AT_ONCE_BYTES:
        return step(device)
    return await driver.run_in_thread(partial(step, device))
