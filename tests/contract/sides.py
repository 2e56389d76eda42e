"""The ways to drive a reader: by trio, by asyncio, and without an event loop. For tests."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from p2pstore.runtime.asyncio_streams import AsyncioDriver
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.runtime.streams import Driver
from p2pstore.runtime.trio_streams import TrioDriver

T = TypeVar("T")


@dataclass
class Side:
    """One way to drive a reader."""

    name: str
    driver: Driver

    async def run(self, action: Callable[[], Awaitable[T]]) -> T:
        if self.name == "trio":
            return await action()
        run: Callable[..., Any] = run_blocking if self.name == "blocking" else asyncio.run
        result: T = await trio.to_thread.run_sync(lambda: run(action()))
        return result


DRIVERS: dict[str, Callable[[], Driver]] = {
    "trio": TrioDriver,
    "blocking": BlockingDriver,
    "asyncio": AsyncioDriver,
}


def in_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in a loop of asyncio, not of trio."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def started(task: asyncio.Task[Any]) -> None:
    """Let a task run until it waits for a socket."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
