"""Carrying out work that is done in steps (`stepping`) so that others have their turn. Under trio."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Final

import trio

from p2pstore.stepping import Result, Steps

TURN_SECONDS: Final = 0.002
"""For so long steps follow each other before others have their turn."""


def in_turns(steps: Steps[Result]) -> Result | Awaitable[Result]:
    """The result, when it takes no longer than a turn; else the rest of the work to await, under trio. Cancellation and
    errors close the steps."""
    ended, result = _turn(steps)
    return result if ended else _go_on(steps)  # type: ignore[return-value]  # None until it ended


async def take_turns(steps: Steps[Result]) -> Result:
    """`in_turns`, awaited where there is something to await."""
    result = in_turns(steps)
    return await result if isinstance(result, Awaitable) else result


async def _go_on(steps: Steps[Result]) -> Result:
    try:
        while True:
            await trio.lowlevel.checkpoint()
            ended, result = _turn(steps)
            if ended:
                return result  # type: ignore[return-value]  # None until it ended
    finally:
        steps.close()


def _turn(steps: Steps[Result]) -> tuple[bool, Result | None]:
    """Steps for the length of a turn: whether that was all, and the result."""
    end = time.monotonic() + TURN_SECONDS
    try:
        next(steps)
        while time.monotonic() < end:
            next(steps)
    except StopIteration as stop:
        return True, stop.value
    return False, None
