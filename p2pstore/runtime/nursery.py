"""A nursery for the background of an `async with` block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


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
    """A nursery for what serves an `async with` block; its tasks are cancelled when the block has ended.

    Cancellation from outside reaches the block alone: its last words (a peer's farewell, a connection's
    orderly end) still have the background running. What the block or a task raises comes out as itself,
    not inside an exception group: who writes `except NoSuchKey` around the block must catch it.
    """
    try:
        async with trio.open_nursery() as outer:
            with trio.CancelScope(shield=True):  # else a task that nobody can cancel stays behind
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
