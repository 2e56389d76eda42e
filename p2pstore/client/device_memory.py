"""Values and destinations in the memory of a GPU: tensors of torch, whose bytes pass through this host's pinned memory.

A value that is put is copied to pinned memory by the GPU and from there, like any other, into the peer's memory; what
is read is received and verified in pinned memory, and the GPU copies it from there. So each byte is moved once by a
processor. torch (the extra `gpu`) does the copying and keeps pinned memory for the next time; it is never imported for
programs that did not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from p2pstore.errors import P2PStoreError
from p2pstore.objects import check_object_length
from p2pstore.runtime.streams import Driver
from p2pstore.values import dense_bytes, device_type, source_view

T = TypeVar("T")

DEVICE_TYPES: Final = frozenset({"cuda"})
"""torch's name of NVIDIA's and of AMD's."""
AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Copies up to this are waited for where they were begun: they take less than what a thread costs."""


class GpuCopyFailed(P2PStoreError):
    """A GPU did not copy. Its driver may be telling of what was asked of it before."""


class OnDevice:
    """The bytes of a tensor on a GPU, `nbytes` of them, and the stream that was current when this was made: what was
    asked of it before comes before our copies, whichever thread makes them. Raises `ValueError` for a tensor whose
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


class Staged:
    """Pinned memory for the bytes of a tensor on a GPU: `host`. Raises `P2PStoreError` when there is none."""

    def __init__(self, device: OnDevice) -> None:
        import torch

        self._device = device
        try:
            self._host = torch.empty(
                device.nbytes,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=device.stream is not None,
            )
        except RuntimeError as error:
            raise P2PStoreError(f"no pinned memory for a tensor on a GPU: {error}") from error
        self.host = source_view(self._host)

    def to_take(self) -> Copy:
        """Of the tensor to `host`."""
        return Copy(self._device.stream, self._host, self._device.bytes)

    def to_give(self, length_bytes: int) -> Copy:
        """Of so many bytes of `host` to the beginning of the tensor."""
        target, source = self._device.bytes[:length_bytes], self._host[:length_bytes]
        return Copy(self._device.stream, target, source)


def copy_all(copies: Sequence[Copy], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Begin all copies, do something `meanwhile`, and wait for the copies, also after an error or an interrupt: what
    they read and write may be somebody else's then. Raises `GpuCopyFailed`, and then any of them may have been made."""
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


Staging = dict[int, Staged | Exception]
"""Of the items of a batch that are on a GPU, by their numbers; or why that cannot be."""


async def take(driver: Driver, device: OnDevice) -> memoryview:
    """The bytes, in pinned memory. Raises `P2PStoreError`."""

    def step() -> Staged:
        staged = Staged(device)
        copy_all([staged.to_take()])
        return staged

    return (await run(driver, device.nbytes, step)).host


async def make_room(driver: Driver, device: OnDevice) -> Staged:
    """Pinned memory to read into: what was not used before takes milliseconds to make. Raises `P2PStoreError`."""
    return await run(driver, device.nbytes, partial(Staged, device))


async def give(driver: Driver, staged: Staged, length_bytes: int) -> None:
    """Copy what was read to where it is to go. Raises `P2PStoreError`."""
    await give_all(driver, [(staged, length_bytes)])


async def give_all(driver: Driver, those: Sequence[tuple[Staged, int]]) -> None:
    """`give` for many, so many bytes of each: the GPU copies one after the other, and all are waited for together.
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
        views[number] = staged.host if isinstance(staged, Staged) else None
    return views, staging


def _stage(devices: Mapping[int, OnDevice], *, take_them: bool) -> Staging:
    staging: Staging = {}
    for number, device in devices.items():
        try:
            staging[number] = Staged(device)
        except P2PStoreError as error:
            staging[number] = error
    taken = {number: each for number, each in staging.items() if isinstance(each, Staged)}
    if take_them and taken:
        try:
            copy_all([each.to_take() for each in taken.values()])
        except GpuCopyFailed as error:
            staging |= {number: GpuCopyFailed(str(error)) for number in taken}
    return staging


async def run(driver: Driver, length_bytes: int, step: Callable[[], T]) -> T:
    """Do a step that copies so many bytes, in a thread where that takes longer than a thread costs. It is never left
    half done."""
    return step() if length_bytes <= AT_ONCE_BYTES else await driver.run_in_thread(step)
