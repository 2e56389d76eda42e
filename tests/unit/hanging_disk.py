"""A file as a disk whose reads and writes hang when they are told to, and nothing calls them off."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from p2pstore.ssd_tier import disk as disk_module
from p2pstore.ssd_tier.kernel_aio import KernelAio


class Hang:
    """Whether requests that begin now hang, and how many do."""

    def __init__(self) -> None:
        self.on = False
        self.hung = 0
        self.answers = threading.Event()

    def end(self) -> None:
        """All that hang go on, and none hangs any more."""
        self.on = False
        self.answers.set()

    def wrapped(self, call: Callable[..., None]) -> Callable[..., None]:
        def hanging(*arguments: object) -> None:
            if self.on:
                self.hung += 1
                assert self.answers.wait(120)
            call(*arguments)

        return hanging


@contextmanager
def hanging_disks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """All files as disks of this process, which do nothing without a thread."""
    hang = Hang()

    async def by_a_thread(*arguments: object) -> bool:
        return False

    monkeypatch.setattr(KernelAio, "read", by_a_thread)
    for name in ("_transfer", "_write_copied"):
        monkeypatch.setattr(disk_module, name, hang.wrapped(getattr(disk_module, name)))
    try:
        yield hang
    finally:
        hang.end()
