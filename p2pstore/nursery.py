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
    """A nursery whose tasks are cancelled at the end of the block.

    What the block or a task raises comes out as itself, not inside an exception group: who writes
    `except NoSuchKey` around the block must catch it.
    """
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        cause = sole_cause(group)
        if cause is group:
            raise
        raise cause from None
