"""The store for asyncio programs that call it as Mooncake's: `await store.async_get(key)`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from p2pstore.integrations.mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """`async_NAME(...)` is method NAME, run in the event loop's threads. A call that is cancelled goes on there to its
    end, so memory that was passed by address must be left alone until then. New programs take `p2pstore.aio`, which
    needs no threads."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = (
            getattr(self, name.removeprefix("async_"), None) if name.startswith("async_") else None
        )
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(method)
        async def call(*arguments: Any, **named: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **named)

        return call
