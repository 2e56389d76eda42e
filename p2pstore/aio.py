"""The store for asyncio: `client = await p2pstore.aio.connect()`. Imports no trio."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Generator
from types import TracebackType
from typing import Any, NoReturn, Self

from p2pstore.client.peer_link import LOOK_SECONDS, TIDY_SECONDS, PeerLink
from p2pstore.client.session import ClientSession
from p2pstore.errors import P2PStoreError
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.runtime.asyncio_streams import AsyncioDriver
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS

__all__ = ["AioClient", "connect"]


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    timeout: float = DEFAULT_PROGRESS_SECONDS,
) -> AioClient:
    """A client of the local peer: `client = await connect()`, or `async with connect() as client`.

    `socket` is the peer's local socket: by default `MOONCAKE_P2P_SOCKET`, else the only live one.
    All keys are in `namespace`. `timeout` is the deadline of every call, in seconds without
    progress. Awaiting it, or entering the block, raises `NoLocalPeer` or `AmbiguousLocalPeer`.
    """
    return AioClient(socket=socket, namespace=namespace, timeout=timeout)


class AioClient(ClientSession):
    """A client of the local peer, for asyncio. Satisfies `p2pstore.ObjectStore`.

    `client = await connect()`, and `await client.aclose()` when it is no longer needed; or
    `async with connect() as client`. It belongs to the event loop in which it was connected; each
    loop connects for itself. Pickles as its socket path and namespace; the copy is to be
    awaited, or entered, where it is unpickled.
    """

    how_to_connect = (
        "`client = await p2pstore.aio.connect()`, or `async with p2pstore.aio.connect() as client:`"
    )

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        super().__init__(AsyncioDriver(), socket=socket, namespace=namespace, timeout=timeout)
        self._janitor: _Janitor | None = None

    async def open(self) -> None:
        """Connect; `await` and `async with` do it. Raises as `ClientSession.open`, and `RuntimeError` when
        it is not asyncio that runs."""
        if _running_loop() is None:
            raise RuntimeError(
                "p2pstore.aio.connect() needs asyncio: call it under `asyncio.run(...)`, or use "
                "`async with p2pstore.connect()` under trio, p2pstore.blocking.connect() in plain code"
            )
        await super().open()
        self._janitor = _Janitor(super()._link)

    def close(self) -> None:
        """Disconnect at once; may be called twice. Calls that are under way raise `StoreClosed`."""
        super().close()
        if self._janitor is not None:
            self._janitor.stop()

    async def aclose(self) -> None:
        """`close`, and wait until nothing of this client runs any more."""
        self.close()
        if self._janitor is not None:
            await self._janitor.stopped()

    @property
    def _link(self) -> PeerLink:
        if self._janitor is not None and _running_loop() not in (self._janitor.loop, None):
            raise RuntimeError(
                "this client was connected in another event loop: connect once in each loop"
            )
        return super()._link

    def __enter__(self) -> NoReturn:
        """Raises `TypeError`: this client is asynchronous."""
        raise TypeError(
            "this client is for asyncio: `async with p2pstore.aio.connect() as client:`. In plain code: "
            "`with p2pstore.blocking.connect() as client:`"
        )

    def __exit__(self, *_: object) -> None:
        """Never reached; without it Python would not get as far as `__enter__`."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._janitor is None:
            await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_janitor", None) is not None:
            self.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread; None in a thread without one, where memory may be registered."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Janitor:
    """Tidies up behind a client, for as long as there is something to tidy. A timer waits, not a task: a
    loop that ends before its client is closed leaves no pending task behind."""

    def __init__(self, link: PeerLink) -> None:
        self.loop = asyncio.get_running_loop()
        self._link = weakref.ref(link)
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        link.on_busy = self._wait

    def _wait(self) -> None:
        if not self._stopped:
            self._timer = self.loop.call_later(TIDY_SECONDS, self._look)

    def _look(self) -> None:
        link = self._link()
        if link is None:
            return
        if link.needs_tidying:
            self._task = self.loop.create_task(self._tidy(link), name="p2pstore-janitor")
        else:
            link.end_tidying()
            self._watch(link)

    def _watch(self, link: PeerLink) -> None:
        """Let go of dead neighbours within a second, as long as there are any."""
        if link.maps_others and self._watching is None and not self._stopped:
            self._watching = self.loop.call_later(LOOK_SECONDS, self._look_at_others)

    def _look_at_others(self) -> None:
        self._watching = None
        link = self._link()
        if link is not None:
            link.let_go_of_the_dead()
            self._watch(link)

    async def _tidy(self, link: PeerLink) -> None:
        try:
            await link.tidy()
        except P2PStoreError:
            return  # the next call raises it
        self._wait()

    def stop(self) -> None:
        self._stopped = True
        for timer in (self._timer, self._watching):
            if timer is not None:
                timer.cancel()
        if self._task is not None and not self.loop.is_closed():
            self._task.cancel()

    async def stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
