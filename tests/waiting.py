"""Waiting until a condition holds, which other tasks, threads or processes bring about. For tests."""

import time
from collections.abc import Callable

import trio

LONGEST_PAUSE_SECONDS = 0.02
SECONDS = 60.0
"""Upper bound of every wait, however busy the machine is."""


def eventually(
    condition: Callable[[], object], seconds: float = SECONDS, explain: Callable[[], object] = lambda: ""
) -> float:
    """The seconds that it took; fails after `seconds`, with what `explain` says."""
    begin, pause = time.monotonic(), 0.004
    while not condition():
        assert time.monotonic() < begin + seconds, f"not within {seconds:g} s: {explain()}"
        time.sleep(pause := min(1.3 * pause, LONGEST_PAUSE_SECONDS))
    return time.monotonic() - begin


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)
