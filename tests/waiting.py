"""Waiting until a condition holds, which other tasks, threads or processes bring about. For tests."""

import time
from collections.abc import Callable

import trio

SECONDS = 60.0
"""Upper bound of every wait, however busy the machine is."""


def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.005)


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)
