"""Large payloads over slow links: the event loop is woken in steps, and never waits for more than there will be."""

from typing import cast

import pytest

from p2pstore.runtime.blocking_streams import run_blocking
from p2pstore.runtime.streams import ByteStream
from p2pstore.transfer.reading.data_requests import Inbox


class Link:
    """Brings this number of bytes at a time, but never fewer than are waited for: with less, it would wait forever."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data = data
        self.most = most
        self.low_water = 1
        self.receives = 0

    async def receive_into(self, view: memoryview) -> int:
        assert self.low_water <= len(self.data), "it waits for more than there will be"
        count = min(len(view), len(self.data), max(self.low_water, self.most))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        self.receives += 1
        return count

    def wake_after(self, length_bytes: int) -> None:
        self.low_water = length_bytes


@pytest.mark.parametrize("most", [1, 7_000, 131_073, 1 << 20])
@pytest.mark.parametrize("size", [1, 4096, 131_072, 524_288, 524_289])
def test_steps(most: int, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    link = Link(data[:size], most)
    inbox = Inbox(cast("ByteStream", link))
    view = memoryview(bytearray(size))
    run_blocking(inbox.read_in_steps(view, 131_072, link.wake_after))
    assert view == data[:size]
    assert link.low_water == 1, "what comes next may be short"
    assert link.receives <= size // 131_072 + 1
