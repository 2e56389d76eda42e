"""The client for trio."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import trio

from p2pstore.client.peer_link import LOOK_SECONDS, TIDY_SECONDS, PeerLink
from p2pstore.client.session import ClientSession
from p2pstore.errors import P2PStoreError
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS
from p2pstore.runtime.trio_streams import TrioDriver

C = TypeVar("C", bound="Client")


class Client(ClientSession):
    """A client of the local peer, for trio. Satisfies `p2pstore.ObjectStore`.

    Connected inside its `async with` block, which is to be entered under trio. Pickles as its socket
    path and namespace; the copy is to be connected by an `async with` of its own.
    """

    how_to_connect = (
        "use it inside `async with p2pstore.connect() as client:`. Under asyncio: `client = await "
        "p2pstore.aio.connect()`; in plain code: `client = p2pstore.blocking.connect()`"
    )

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        super().__init__(TrioDriver(), socket=socket, namespace=namespace, timeout=timeout)
        self._running: AbstractAsyncContextManager[None] | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        restore, (_, *rest) = super().__reduce__()
        return restore, (Client, *rest)  # a peer in this process comes back as a client of it

    def __enter__(self) -> NoReturn:
        """Raises `TypeError`: this client is asynchronous."""
        raise TypeError(
            "this client is for trio: `async with p2pstore.connect() as client:`. In plain code: "
            "`with p2pstore.blocking.connect() as client:`"
        )

    def __exit__(self, *_: object) -> None:
        """Never reached; without it Python would not get as far as `__enter__`."""

    async def __aenter__(self) -> Self:
        require_trio(
            "p2pstore.connect()",
            "or use p2pstore.aio.connect() under asyncio, p2pstore.blocking.connect() in plain code",
        )
        running = self._run()
        await running.__aenter__()
        self._running = running
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._running is not None
        return await self._running.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        await self.open()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_keep_tidy, self._link)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            self.close()


def require_trio(what: str, instead: str) -> None:
    """Raise `RuntimeError` when this is not called in a task of trio."""
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(f"{what} needs trio: call it under `trio.run(...)`, {instead}")


async def _keep_tidy(link: PeerLink) -> None:
    """Send releases and the like within 50 ms, as long as there are any; let go of dead neighbours within a second."""
    stirred = trio.Event()
    link.on_busy = lambda: stirred.set()
    try:
        while True:
            with trio.move_on_after(LOOK_SECONDS if link.maps_others else math.inf) as looking:
                await stirred.wait()
            if looking.cancelled_caught:
                link.let_go_of_the_dead()
                continue
            while link.needs_tidying:
                await trio.sleep(TIDY_SECONDS)
                await link.tidy()
            stirred = trio.Event()
            link.end_tidying()
    except P2PStoreError:
        return  # the next call raises it


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    timeout: float = DEFAULT_PROGRESS_SECONDS,
) -> Client:
    """A client of the local peer, to be used as `async with p2pstore.connect() as client:`.

    `socket` is the peer's local socket: by default `MOONCAKE_P2P_SOCKET`, else the only live one.
    All keys are in `namespace`. `timeout` is the deadline of every call, in seconds without
    progress. Entering the block raises `NoLocalPeer` or `AmbiguousLocalPeer`, and `RuntimeError` when
    it is not trio that runs.
    """
    return Client(socket=socket, namespace=namespace, timeout=timeout)


@asynccontextmanager
async def open_client(
    kind: type[C], socket: str | None = None, namespace: str = DEFAULT_NAMESPACE
) -> AsyncIterator[C]:
    """`connect` for a subclass of `Client`."""
    async with kind(socket=socket, namespace=namespace) as client:
        yield client
