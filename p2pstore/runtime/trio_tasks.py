"""Background nurseries, work in steps (`stepping`) that gives others their turn, waits for an account's room. Trio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import asynccontextmanager
from typing import Final

import trio

from p2pstore.runtime.byte_budget import Account
from p2pstore.runtime.stepping import Result

FIRST_TURN_SECONDS: Final = 0.001
"""Time in which steps follow each other where the work was asked for, after the time that this took itself."""
TURN_SECONDS: Final = 0.002
"""Time in which they do later, before others have their turn."""
_turns: Final[trio.lowlevel.RunVar[trio.StrictFIFOLock]] = trio.lowlevel.RunVar("turns")


def in_turns(steps: Generator[object, None, Result]) -> Result | Awaitable[Result]:
    """The result, if it takes no longer than a turn, else the rest to await. Errors close the steps."""
    ended, result = _turn(steps, FIRST_TURN_SECONDS)
    return result if ended else _go_on(steps)  # type: ignore[return-value]  # None until it ended


async def take_turns(steps: Generator[object, None, Result]) -> Result:
    """`in_turns`, awaited where there is something to await."""
    result = in_turns(steps)
    return await result if isinstance(result, Awaitable) else result


async def wait_room(account: Account) -> None:
    """Return when more may be read for the account's owner. No deadline of its own."""
    while not account.has_room:
        woken = trio.Event()
        account.when_room(woken.set)
        try:
            await woken.wait()
        finally:
            account.give_up(woken.set)


async def _go_on(steps: Generator[object, None, Result]) -> Result:
    """The rest, turn by turn: of all that is worked on, one piece has a turn between two looks at what has come."""
    try:
        while True:
            async with _one_at_a_time():
                await trio.lowlevel.checkpoint()
                ended, result = _turn(steps, TURN_SECONDS)
            if ended:
                # The next work, such as encoding it, is a step of its own.
                await trio.lowlevel.checkpoint()
                return result  # type: ignore[return-value]  # None until it ended
    finally:
        steps.close()


def _one_at_a_time() -> trio.StrictFIFOLock:
    try:
        return _turns.get()
    except LookupError:
        lock = trio.StrictFIFOLock()
        _turns.set(lock)
        return lock


def _turn(steps: Generator[object, None, Result], seconds: float) -> tuple[bool, Result | None]:
    """Steps for `seconds`: whether that was all, and the result."""
    end = time.monotonic() + seconds
    try:
        next(steps)
        while time.monotonic() < end:
            next(steps)
    except StopIteration as stop:
        return True, stop.value
    return False, None


def sole_cause(error: BaseException) -> BaseException:
    """The one exception inside nested groups, cancellations left out; the group when there are several."""
    while isinstance(error, BaseExceptionGroup):
        causes = [each for each in error.exceptions if not isinstance(each, trio.Cancelled)]
        if len(causes) != 1:
            return error
        error = causes[0]
    return error


@asynccontextmanager
async def open_background_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for what serves an `async with` block; its tasks are cancelled when the block has ended. Cancellation
    from outside reaches the block alone: its last words (a farewell, an orderly end) still have the background running.
    Errors come out as themselves, not in an exception group: `except NoSuchKey` around the block must catch them."""
    try:
        async with trio.open_nursery() as outer:
            with trio.CancelScope(shield=True):  # else a task that cannot be cancelled stays behind
                background: trio.Nursery = await outer.start(_run_shielded)
            try:
                yield background
            finally:
                background.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        cause = sole_cause(group)
        if cause is group:
            raise
        raise cause from None


async def _run_shielded(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
