"""The store in each of its worlds, behind one plain face, over one real cluster of two peers.

The peers run in a trio loop in a thread of its own; so do the trio client and the peer used as a
store. The asyncio client runs in a loop in another thread, the blocking one in the caller's. A test
calls `store.put(...)` and the like as if they were plain, whatever the world.
"""

import asyncio
import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import trio

import p2pstore
from p2pstore import PeerConfig, aio, blocking, open_peer
from tests.forked import COMMAND, ready_document, start
from tests.waiting import eventually

T = TypeVar("T")
Call = tuple[Any, ...]
"""The name of a method, and its arguments."""

WORLDS = ("peer", "trio", "blocking", "asyncio")
ASYNC_WORLDS = ("peer", "trio", "asyncio")
CALL_SECONDS = 60.0
MEMORY = "192MiB"


class TrioThread:
    """A trio loop in a thread. Its main task leaves its contexts when it stops."""

    def __init__(self) -> None:
        self._entrances, self._arrivals = trio.open_memory_channel[tuple[Any, Future[Any]]](16)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="trio world")
        self._thread.start()
        assert self._ready.wait(CALL_SECONDS)

    async def _main(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        async with AsyncExitStack() as stack:
            self._ready.set()
            async for manager, entered in self._arrivals:
                try:
                    entered.set_result(await stack.enter_async_context(manager))
                except Exception as error:
                    entered.set_exception(error)

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        async def limited() -> T:
            with trio.fail_after(CALL_SECONDS):
                return await function(*args)

        return trio.from_thread.run(limited, trio_token=self.token)

    def enter(self, manager: Any) -> Any:
        """Enter an async context manager in the loop's main task."""
        entered: Future[Any] = Future()
        trio.from_thread.run_sync(self._entrances.send_nowait, (manager, entered), trio_token=self.token)
        return entered.result(CALL_SECONDS)

    def stop(self) -> None:
        trio.from_thread.run_sync(self._entrances.close, trio_token=self.token)
        self._thread.join(CALL_SECONDS)
        assert not self._thread.is_alive()


class AsyncioThread:
    """An asyncio loop in a thread."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), name="asyncio world")
        self._thread.start()
        assert self._ready.wait(CALL_SECONDS)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        async def limited() -> T:
            async with asyncio.timeout(CALL_SECONDS):
                return await function(*args)

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result(CALL_SECONDS + 1)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CALL_SECONDS)
        assert not self._thread.is_alive()


class Store:
    """One store in its world."""

    def __init__(self, world: str, real: Any, loop: TrioThread | AsyncioThread | None) -> None:
        self.world = world
        self.real = real
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """A method, plain."""
        method = getattr(self.real, name)
        if self._loop is None or not callable(method) or name in ("register", "close"):
            return method
        loop = self._loop

        def call(*args: Any, **options: Any) -> Any:
            async def make() -> Any:
                return await method(*args, **options)

            return loop.run(make)

        return call

    @contextlib.contextmanager
    def lease(self, key: str, **options: Any) -> Iterator[memoryview]:
        """`lease`, as a plain context manager."""
        manager = self.real.lease(key, **options)
        if self._loop is None:
            with manager as view:
                yield view
            return
        loop = self._loop
        view = loop.run(manager.__aenter__)
        try:
            yield view
        finally:
            del view
            loop.run(manager.__aexit__, None, None, None)

    def together(self, calls: Sequence[Call]) -> list[Any]:
        """The results, or errors, of many calls that are made at once."""
        if self._loop is None:
            with ThreadPoolExecutor(len(calls)) as threads:
                running = [threads.submit(self._outcome, call) for call in calls]
                return [each.result(CALL_SECONDS) for each in running]
        return self._loop.run(self._together, calls)

    async def _together(self, calls: Sequence[Call]) -> list[Any]:
        if self.world == "asyncio":
            return list(
                await asyncio.gather(*(self._awaited(each) for each in calls), return_exceptions=True)
            )
        results: list[Any] = [None] * len(calls)

        async def run(index: int) -> None:
            try:
                results[index] = await self._awaited(calls[index])
            except Exception as error:
                results[index] = error

        async with trio.open_nursery() as nursery:
            for index in range(len(calls)):
                nursery.start_soon(run, index)
        return results

    def cancelled_after(self, seconds: float, name: str, *args: Any, **options: Any) -> bool:
        """Make a call and cancel it after a while. Whether that was before its end."""
        assert self._loop is not None
        return self._loop.run(self._cancelled_after, seconds, name, args, options)

    async def _cancelled_after(
        self, seconds: float, name: str, args: Sequence[Any], options: dict[str, Any]
    ) -> bool:
        if self.world == "asyncio":
            try:
                async with asyncio.timeout(seconds):
                    await getattr(self.real, name)(*args, **options)
            except TimeoutError:
                return True
            return False
        with trio.move_on_after(seconds) as scope:
            await getattr(self.real, name)(*args, **options)
        return scope.cancelled_caught

    async def _awaited(self, call: Call) -> Any:
        name, *args = call
        return await getattr(self.real, name)(*args)

    def _outcome(self, call: Call) -> Any:
        name, *args = call
        try:
            return getattr(self.real, name)(*args)
        except Exception as error:
            return error


class Cluster:
    """Two peers, `near` and `far`, and a store of `near` in every world."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.trio = TrioThread()
        stack.callback(self.trio.stop)
        self.asyncio = AsyncioThread()
        stack.callback(self.asyncio.stop)
        self.near = self.trio.enter(open_peer(self.config("near")))
        self.far = self.trio.enter(open_peer(self.config("far", bootstrap=[self.near.control])))
        self.distant = blocking.connect(self.far.socket)
        stack.callback(self.distant.close)
        self.stores = {world: self.store(world) for world in WORLDS}
        stack.callback(self.stores["blocking"].close)
        stack.callback(self.stores["asyncio"].aclose)
        eventually(lambda: len(self.near.node.core.live_peers()) == 1)
        eventually(lambda: len(self.far.node.core.live_peers()) == 1)

    def config(self, name: str, **settings: Any) -> PeerConfig:
        return PeerConfig(
            **{
                "name": name,
                "memory": MEMORY,
                "listen": "127.0.0.1:0",
                "socket": str(self.folder / f"{name}.sock"),
                **settings,
            }
        )

    def store(self, world: str, socket: str | None = None, **settings: Any) -> Store:
        """A store in that world, of the near peer unless another one's socket is given."""
        path = socket or self.near.socket
        if world == "peer":
            assert path == self.near.socket
            return Store(world, self.near, self.trio)
        if world == "trio":
            client = self.trio.enter(p2pstore.connect(path, **settings))
            return Store(world, client, self.trio)
        if world == "blocking":
            return Store(world, blocking.connect(path, **settings), None)

        async def connect() -> Any:
            return await aio.connect(path, **settings)

        return Store(world, self.asyncio.run(connect), self.asyncio)

    def on_near(self, function: Callable[[], T]) -> T:
        """Look at something in the near peer's own loop."""
        result: T = trio.from_thread.run_sync(function, trio_token=self.trio.token)
        return result


@contextlib.contextmanager
def open_cluster() -> Iterator[Cluster]:
    """A cluster for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="p2p") as folder, ExitStack() as stack:
        yield Cluster(Path(folder), stack)


@dataclass(frozen=True)
class PeerProcess:
    """A peer in a process of its own, to be stopped and killed."""

    process: subprocess.Popen[bytes]
    socket: str
    control: str


@contextlib.contextmanager
def peer_process(
    folder: Path, name: str, *options: str, sources: Path | None = None
) -> Iterator[PeerProcess]:
    """A peer in a process of its own for the length of the block. `sources`: of another version."""
    command = [*COMMAND, "join", "--name", name]
    command += ["--socket", str(folder / f"{name}.sock"), "--state-dir", str(folder / name)]
    command += ["--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--memory", "64MiB"]
    log_path = folder / f"{name}.log"
    paths = {} if sources is None else {"PYTHONPATH": f"{sources}:{sources / 'cli'}"}
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("wb"))
        process = stack.enter_context(
            start(
                [*command, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={**os.environ, **paths},
            )
        )
        stack.callback(process.kill)
        ready = ready_document(process.stdout, log_path)
        yield PeerProcess(process, ready["socket"], ready["control"])
