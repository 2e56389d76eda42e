"""The client for threads and plain scripts. Imports no event loop."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from p2pstore.checkpoint.client.checkpoint_calls import (
    Checkpoints,
    CheckpointWatch,
    FetchOptions,
    VersionOptions,
)
from p2pstore.checkpoint.client.group_calls import (
    UPDATE_SECONDS,
    FollowWatch,
    StatusWatch,
    UpdateWatch,
)
from p2pstore.client.peer_link import LOOK_SECONDS, TIDY_SECONDS, PeerLink
from p2pstore.client.session import ClientSession
from p2pstore.client.transfers import TransferBatch
from p2pstore.errors import P2PStoreError
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.registered import RegisteredBuffer
from p2pstore.results import (
    Buffer,
    CheckpointInfo,
    CheckpointUpdate,
    FetchedCheckpoint,
    Framework,
    ItemResult,
    KeyPage,
    Location,
    OnConflict,
    PeerInfo,
    PinName,
    PinResult,
    PrefixHolder,
    PublishedCheckpoint,
    PutResult,
    TransferRequest,
    TransferStatus,
)
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, BlockingDriver, run_blocking
from p2pstore.transfer.transfer_trace import FetchTrace, Progress

if TYPE_CHECKING:
    from p2pstore.checkpoint.client.checkpoint_tensors import CheckpointTensors, Rows

T = TypeVar("T")

_connected: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


class _ThreadedSession(ClientSession):
    in_threads = True


class BlockingTransfers:
    """Transfers of one blocking client, in threads of their own; made by its `transfers()`. Any thread may use it.

    The methods are those of `TransferBatch`, plain.
    """

    def __init__(self, batch: TransferBatch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def submit(self, requests: Iterable[TransferRequest]) -> list[int]:
        return self._batch.submit(requests)

    def status(self, number: int) -> TransferStatus:
        return self._batch.status(number)

    def statuses(self) -> list[TransferStatus]:
        return self._batch.statuses()

    def wait(self, number: int) -> ItemResult[int | PutResult]:
        return run_blocking(self._batch.wait(number))

    def results(self) -> list[ItemResult[int | PutResult]]:
        return run_blocking(self._batch.results())

    def cancel(self, *numbers: int) -> None:
        self._batch.cancel(*numbers)


class BlockingCheckpoints:
    """The checkpoints of one blocking client. The methods are those of `Checkpoints`, plain."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def publish(
        self,
        name: str,
        directory: str | os.PathLike[str] | Mapping[str, Any],
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        piece_bytes: int = 0,
        wait_seeded: bool = False,
        progress: CheckpointWatch | None = None,
    ) -> PublishedCheckpoint:
        return run_blocking(
            self._checkpoints.publish(
                name,
                directory,
                include=include,
                exclude=exclude,
                piece_bytes=piece_bytes,
                wait_seeded=wait_seeded,
                progress=progress,
            )
        )

    def fetch(
        self, name: str, directory: str | os.PathLike[str], **options: Unpack[FetchOptions]
    ) -> FetchedCheckpoint:
        return run_blocking(self._checkpoints.fetch(name, directory, **options))

    def follow(
        self,
        name: str,
        directory: str | os.PathLike[str],
        changed: FollowWatch,
        *,
        publisher: str | None = None,
        keep: int = 2,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        run_blocking(
            self._checkpoints.follow(
                name,
                directory,
                changed,
                publisher=publisher,
                keep=keep,
                include=include,
                exclude=exclude,
            )
        )

    def update(
        self,
        name: str,
        *,
        quorum: int | None = None,
        timeout: float = UPDATE_SECONDS,
        progress: UpdateWatch | None = None,
    ) -> CheckpointUpdate:
        return run_blocking(
            self._checkpoints.update(name, quorum=quorum, timeout=timeout, progress=progress)
        )

    def names(self, *, everywhere: bool = False) -> list[CheckpointInfo]:
        return run_blocking(self._checkpoints.names(everywhere=everywhere))

    def status(self, name: str) -> list[CheckpointInfo]:
        return run_blocking(self._checkpoints.status(name))

    def wait_followers(
        self,
        name: str,
        version: str,
        count: int,
        *,
        timeout: float = UPDATE_SECONDS,
        progress: StatusWatch | None = None,
    ) -> None:
        run_blocking(
            self._checkpoints.wait_followers(
                name, version, count, timeout=timeout, progress=progress
            )
        )

    def remove(self, name: str) -> str:
        return run_blocking(self._checkpoints.remove(name))

    def forget(self, name: str, publisher: str) -> str:
        return run_blocking(self._checkpoints.forget(name, publisher))

    def fetch_tensors(
        self,
        name: str,
        names: Sequence[str] = (),
        *,
        files: Sequence[str] = (),
        rows: Rows | None = None,
        **options: Unpack[VersionOptions],
    ) -> CheckpointTensors:
        return run_blocking(
            self._checkpoints.fetch_tensors(name, names, files=files, rows=rows, **options)
        )


class BlockingClient:
    """A connected client of the local peer; the methods are those of `p2pstore.ObjectStore`, plain.

    Their documentation is that of the `ObjectStore` methods of the same names; `help` shows it.

    Any number of threads may use it at once. Close it, or use it as a context manager. Pickles as
    its socket path and namespace, and connects again where it is unpickled.
    """

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self._session = _ThreadedSession(
            BlockingDriver(), socket=socket, namespace=namespace, timeout=timeout
        )
        run_blocking(self._session.open())
        self._janitor = _Janitor(self._session._link)
        _connected.add(self)

    @property
    def namespace(self) -> str:
        return self._session.namespace

    @property
    def socket_path(self) -> str:
        """The socket this client is connected to."""
        return self._session.socket_path

    @property
    def peer_name(self) -> str:
        """The name of the local peer, which `PutResult.location` is where a value is stored there."""
        return self._session.peer_name

    def close(self) -> None:
        """Disconnect; may be called twice. Views stay readable, but their leases have ended."""
        self._session.close()
        self._janitor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_janitor"):
            self.close()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _reconnect, (self.socket_path, self.namespace, self._session.timeout)

    def put(
        self,
        key: str,
        value: Buffer,
        *,
        replicas: int = 1,
        pin: PinName = "none",
        ttl: float | None = None,
        overwrite: bool = False,
        on_conflict: OnConflict | None = None,
        durable: bool = False,
        progress: Progress | None = None,
    ) -> PutResult:
        return run_blocking(
            self._session.put(
                key,
                value,
                replicas=replicas,
                pin=pin,
                ttl=ttl,
                overwrite=overwrite,
                on_conflict=on_conflict,
                durable=durable,
                progress=progress,
            )
        )

    def put_tensor(
        self,
        key: str,
        tensor: Any,
        *,
        replicas: int = 1,
        pin: PinName = "none",
        ttl: float | None = None,
        overwrite: bool = False,
        on_conflict: OnConflict | None = None,
        durable: bool = False,
    ) -> PutResult:
        return run_blocking(
            self._session.put_tensor(
                key,
                tensor,
                replicas=replicas,
                pin=pin,
                ttl=ttl,
                overwrite=overwrite,
                on_conflict=on_conflict,
                durable=durable,
            )
        )

    def put_many(
        self,
        items: Sequence[tuple[str, Buffer]],
        *,
        replicas: int = 1,
        pin: PinName = "none",
        ttl: float | None = None,
        overwrite: bool = False,
        on_conflict: OnConflict | None = None,
        durable: bool = False,
    ) -> list[ItemResult[PutResult]]:
        return run_blocking(
            self._session.put_many(
                items,
                replicas=replicas,
                pin=pin,
                ttl=ttl,
                overwrite=overwrite,
                on_conflict=on_conflict,
                durable=durable,
            )
        )

    def get(self, key: str, *, wait: float = 0.0) -> bytes:
        return run_blocking(self._session.get(key, wait=wait))

    def get_into(
        self,
        key: str,
        buffer: Buffer,
        *,
        wait: float = 0.0,
        progress: Progress | None = None,
        trace: FetchTrace | None = None,
    ) -> int:
        return run_blocking(
            self._session.get_into(key, buffer, wait=wait, progress=progress, trace=trace)
        )

    def get_tensor(self, key: str, *, wait: float = 0.0, framework: Framework | None = None) -> Any:
        return run_blocking(self._session.get_tensor(key, wait=wait, framework=framework))

    def get_many(self, keys: Sequence[str]) -> list[ItemResult[bytes]]:
        return run_blocking(self._session.get_many(keys))

    def get_new_views(
        self, keys: Sequence[str], allocate: Callable[[int], memoryview]
    ) -> list[memoryview | P2PStoreError | ValueError]:
        return run_blocking(self._session.get_new_views(keys, allocate))

    def get_into_views(
        self, keys: Sequence[str], views: Sequence[memoryview]
    ) -> list[int | P2PStoreError | ValueError]:
        return run_blocking(self._session.get_into_views(keys, views))

    def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult[int]]:
        return run_blocking(self._session.get_many_into(items))

    @contextmanager
    def lease(self, key: str, *, wait: float = 0.0, here: bool = False) -> Iterator[memoryview]:
        """A view of the value in place. A view that is still in use after the block, or anything
        made from it, keeps its lease."""
        view = self.take_lease(key, wait=wait, here=here)
        try:
            yield view
        finally:
            del view

    def take_lease(self, key: str, *, wait: float = 0.0, here: bool = False) -> memoryview:
        return run_blocking(self._session.take_lease(key, wait=wait, here=here))

    def take_leases(
        self, keys: Sequence[str], *, here: bool = False
    ) -> list[ItemResult[memoryview]]:
        return run_blocking(self._session.take_leases(keys, here=here))

    @contextmanager
    def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> Iterator[BlockingTransfers]:
        """A batch of gets and puts that run side by side in threads, `limit` at once (1 to 256), for the length of the
        block: `submit` more, `status` to poll, `wait` and `results` to wait, `cancel`; see `TransferBatch`. The block
        ends when all of them have ended; when it raises, they are cancelled."""
        manager = self._session.transfers(requests, limit=limit)
        batch = run_blocking(_enter(manager))
        try:
            yield BlockingTransfers(batch)
        except BaseException as error:
            run_blocking(_leave(manager, error))
            raise
        run_blocking(_leave(manager, None))

    @property
    def checkpoints(self) -> BlockingCheckpoints:
        """Directories that are published and fetched as a whole; see `Checkpoints`."""
        return BlockingCheckpoints(self._session.checkpoints)

    def register(self, buffer: Buffer) -> RegisteredBuffer:
        return self._session.register(buffer)

    def register_gpu(self) -> None:
        run_blocking(self._session.register_gpu())

    def contains(self, key: str) -> bool:
        return run_blocking(self._session.contains(key))

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return run_blocking(self._session.contains_many(keys))

    def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
        return run_blocking(self._session.match_prefix_by_peer(keys))

    def locate(self, key: str) -> list[Location]:
        return run_blocking(self._session.locate(key))

    def match_prefix(self, keys: Sequence[str]) -> int:
        return run_blocking(self._session.match_prefix(keys))

    def remove(self, key: str) -> bool:
        return run_blocking(self._session.remove(key))

    def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
        return run_blocking(self._session.remove_many(keys))

    def list_keys(
        self,
        prefix: str = "",
        *,
        after: str = "",
        limit: int = 1000,
        local: bool = False,
        pinned: bool = False,
    ) -> KeyPage:
        return run_blocking(
            self._session.list_keys(prefix, after=after, limit=limit, local=local, pinned=pinned)
        )

    def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        return run_blocking(self._session.peers(everyone=everyone))

    def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        return run_blocking(self._session.statistics(cluster=cluster))

    def pin(
        self, key: str, pin: PinName = "soft", *, ttl: float | None = None, fetch: bool = True
    ) -> PinResult:
        return run_blocking(self._session.pin(key, pin, ttl=ttl, fetch=fetch))

    def unpin(self, key: str) -> PinResult:
        return run_blocking(self._session.unpin(key))

    def replicate(self, key: str, copies: int) -> PutResult:
        return run_blocking(self._session.replicate(key, copies))

    def prefetch(self, keys: Sequence[str]) -> None:
        run_blocking(self._session.prefetch(keys))

    def flush(self) -> None:
        run_blocking(self._session.flush())

    def leave(self, *, drain: float = 0.0) -> None:
        run_blocking(self._session.leave(drain=drain))


for _plain, _original in ((BlockingClient, ClientSession), (BlockingTransfers, TransferBatch)):
    for _name, _method in vars(_plain).items():
        if not _name.startswith("_") and callable(_method) and not _method.__doc__:
            _method.__doc__ = getattr(_original, _name).__doc__


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Any], error: BaseException | None) -> None:
    kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
    await manager.__aexit__(kind, error, traceback)


class _Janitor:
    """Tidies up behind a client: a thread that runs only while there is something to tidy, or memory of another peer
    is mapped."""

    def __init__(self, link: PeerLink) -> None:
        self._link = weakref.ref(link)
        # No Event: `stop` may run anywhere (in `__del__`, while the interpreter ends) and must wait for nobody, and an
        # Event has a lock, which a thread that was waiting for it takes with it when the interpreter ends.
        self._running = threading.Lock()
        self._running.acquire()
        self._watching = threading.Lock()
        link.on_busy = self._start

    def _start(self) -> None:
        threading.Thread(target=self._run, name="p2pstore-janitor", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._is_stopped_within(TIDY_SECONDS):
                link = self._link()
                if link is None:
                    return
                if not link.needs_tidying:
                    link.rest()
                    del link
                    self._watch()
                    return
                run_blocking(link.tidy())
                del link
        except P2PStoreError:
            return  # who uses the client next is told

    def _watch(self) -> None:
        """Let go of dead neighbours within a second, as long as there are any. In one thread at a time: this one."""
        if not self._watching.acquire(blocking=False):
            return
        try:
            while (link := self._link()) is not None and link.maps_others:
                link.let_go_of_the_dead()
                del link
                if self._is_stopped_within(LOOK_SECONDS):
                    return
        finally:
            self._watching.release()

    def _is_stopped_within(self, seconds: float) -> bool:
        stopped = self._running.acquire(timeout=seconds)
        if stopped:
            self.stop()  # for whoever else waits
        return stopped

    def stop(self) -> None:
        with suppress(RuntimeError):  # somebody else did
            self._running.release()


def _close_all() -> None:
    """At the end of the program: its peers are told what it still held, and need not find out."""
    for client in list(_connected):
        if not client._session._link.connection.is_inherited:  # that is the parent's
            client.close()


atexit.register(_close_all)


def _reconnect(socket: str, namespace: str, timeout: float) -> BlockingClient:
    return BlockingClient(socket=socket, namespace=namespace, timeout=timeout)
