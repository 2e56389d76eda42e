"""Everything a client does, written once for all drivers."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from p2pstore import arguments
from p2pstore.checkpoint.client.checkpoint_calls import Checkpoints
from p2pstore.client import answers, device_memory
from p2pstore.client.answers import plain_error
from p2pstore.client.batches import fetch_many, fetch_many_new
from p2pstore.client.destinations import (
    BytesDestination,
    NewMemoryDestination,
    TensorDestination,
)
from p2pstore.client.device_memory import GpuCopyFailed
from p2pstore.client.fetcher import FETCH_SECONDS, Fetcher, deadline_ms
from p2pstore.client.gathered import Source, value_of
from p2pstore.client.gpu_mapping import GpuMapping, GpuSource, read_in_place, usable_gpu
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.lease_batches import take_many
from p2pstore.client.leasing import Leaser
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.prefix_chains import PrefixChains
from p2pstore.client.presence_calls import Presence
from p2pstore.client.transfers import TransferBatch
from p2pstore.client.writing import Writer, put_options
from p2pstore.errors import AnswerTooLarge, NoSuchKey, P2PStoreError, ProtocolError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.batching import MOST_ITEMS, Cuts, text_bytes
from p2pstore.local.local_messages import Access, LocalKind
from p2pstore.local.socket_paths import find_socket
from p2pstore.objects import (
    DEFAULT_NAMESPACE,
    batch_key_hasher,
    encode_key,
    key_hasher,
)
from p2pstore.registered import RegisteredBuffer
from p2pstore.results import (
    Buffer,
    Framework,
    ItemResult,
    KeyPage,
    Location,
    OnConflict,
    PeerInfo,
    PinName,
    PinResult,
    PrefixHolder,
    PutResult,
    TransferRequest,
)
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver
from p2pstore.transfer.transfer_trace import FetchTrace, Progress, ReadWatch
from p2pstore.transfer.transport import BufferDestination
from p2pstore.values import describe_tensor, destination_view
from p2pstore.wire import Empty, Message

M = TypeVar("M", bound=Message)

REMOVE_SECONDS: Final = 5.0
"""What removing and listing may take on top, as other peers are asked."""


class _Parts:
    """What an open connection is used by."""

    def __init__(
        self,
        link: PeerLink,
        namespace: str,
        digests_of: Callable[[Sequence[str]], list[bytes]],
        *,
        in_threads: bool,
    ) -> None:
        self.link = link
        chains = PrefixChains()
        self.fetcher = Fetcher(link, namespace, chains, in_threads=in_threads)
        self.writer = Writer(link, namespace, chains)
        self.neighbours = Neighbours(link, namespace)
        self.leaser = Leaser(link, self.fetcher, self.neighbours)
        self.presence = Presence(link, digests_of, chains)
        self.gpus: GpuMapping | None = None
        self.registering = link.driver.lock()

    def close(self) -> None:
        """Close what this process opened; what a forked child inherited is its parent's."""
        self.gpus = None
        self.neighbours.close()
        self.link.close()
        if not self.link.connection.is_inherited:
            self.fetcher.close()
            self.writer.close()


class ClientSession:
    """One client of the local peer: `open` it, use it, `close` it.

    Any number of tasks (or threads, with a blocking driver) may use it at once. Deadlines are
    `timeout` seconds without progress. Every method may raise `StoreClosed` once the peer is gone,
    `ClientForked` in a forked child, `DeadlineExceeded`, and `ValueError` for a bad key;
    `RuntimeError` before it is open.
    """

    how_to_connect: ClassVar[str] = "open() it first"
    """For people who have not."""
    in_threads: ClassVar[bool] = False
    """Whether what runs side by side runs in threads, which cannot be cancelled from outside."""

    def __init__(
        self,
        driver: Driver,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self.namespace = arguments.text("namespace", namespace)
        self.timeout = arguments.seconds("timeout", timeout, above_zero=True)
        self._driver = driver
        self._wanted_socket = None if socket is None else os.fspath(socket)
        self._digest = key_hasher(namespace)
        self._digests = batch_key_hasher(namespace)
        self._parts: _Parts | None = None
        self._registered: weakref.WeakSet[RegisteredBuffer] = weakref.WeakSet()

    async def open(self) -> None:
        """Connect. Raises `NoLocalPeer`, `AmbiguousLocalPeer`, `ProtocolMismatch`."""
        path = str(find_socket(self._wanted_socket))
        link = await PeerLink.open(
            self._driver,
            path,
            namespace=self.namespace,
            access=Access.WRITE,
            timeout_seconds=self.timeout,
        )
        try:
            self._parts = _Parts(link, self.namespace, self._digests, in_threads=self.in_threads)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        """Disconnect; may be called twice. What was reserved, leased or registered ends with it.

        In a forked child it only lets go: what is open belongs to the parent, which goes on using it.
        """
        for registered in list(self._registered):
            registered.close()
        if self._parts is not None:
            self._parts.close()

    @property
    def socket_path(self) -> str:
        """The socket this client is connected to."""
        return self._link.connection.path

    @property
    def peer_name(self) -> str:
        """The name of the local peer, which `PutResult.location` is where a value is stored there."""
        return self._link.connection.hello.name

    @property
    def _link(self) -> PeerLink:
        """The connection, which may have ended. Raises `RuntimeError` before there was one."""
        if self._parts is None:
            raise RuntimeError(f"this client is not connected: {self.how_to_connect}")
        return self._parts.link

    @property
    def _live(self) -> _Parts:
        """What does the work. Raises `StoreClosed` once the peer is gone, `ClientForked` in a forked child."""
        self._link.check()
        assert self._parts is not None
        return self._parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        socket = self._wanted_socket if self._parts is None else self.socket_path
        return _restore, (type(self), socket, self.namespace, self.timeout)

    # --- put ---------------------------------------------------------------------------------

    async def put(
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
        """Store a value under a key; a key that exists with other bytes is kept by default (`kept_existing`).
        `on_conflict` says what to do with such a key: "keep" it, "overwrite" it with a new version, or raise
        `KeyExists` ("error"). `overwrite=True` is short for "overwrite". Two first puts on two peers at the same moment
        may both succeed: the higher version stays. Where the key has these bytes (`unchanged`), a `ttl` replaces the
        object's, and pin and replicas are raised if need be.
        `ttl` in seconds. With `replicas`, returns when so many copies exist or no more can be made. On another peer
        when the local one has no room: the result's `location` says where. Raises `CapacityExceeded` when no peer has
        room, and `ObjectTooLarge` above 4 GiB, before any byte is copied; `ValueError` for a value that is not
        contiguous. `progress` is called with the bytes copied so far and the bytes in all; the replicas are made
        after that."""
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        source = await self._source(key, value)
        result = await self._live.writer.put(key, source, options, progress)
        return answers.accepted(result, policy)

    async def _source(self, key: str, value: Any) -> Source:
        """What is to be put. The bytes of a tensor on a GPU are in pinned memory, unless the GPU copies them itself."""
        device = device_memory.on_device(value)
        if device is None:
            return value_of(value)
        gpus = self._live.gpus
        encode_key(key)  # before anything is copied
        if gpus is not None:
            await device_memory.await_computed(self._link.driver, [device])
            return GpuSource(gpus, device)
        return await device_memory.take(self._link.driver, device)

    async def put_tensor(
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
        """`put` for a numpy array or torch tensor, with its dtype and shape; a key that exists with another value is
        kept by default, as `on_conflict` says."""
        dtype, shape = describe_tensor(tensor)
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        source = await self._source(key, tensor)
        described = options | {"dtype": dtype, "shape": shape}
        return answers.accepted(await self._live.writer.put(key, source, described), policy)

    async def put_many(
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
        """Store many values in few requests; keys that exist with other bytes are kept by default, as
        `on_conflict` says. One result per item, in order. Never raises for one item that fails: its result carries the
        error, `KeyExists` for a conflict with `on_conflict="error"`."""
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        (keys, values), live = arguments.item_columns(items), self._live
        sources, staging = await self._sources(values)
        results = await live.writer.put_many(list(zip(keys, sources, strict=True)), options)
        for number, staged in staging.items():
            if isinstance(staged, Exception):
                results[number] = ItemResult(keys[number], error=plain_error(staged))
        return answers.accepted_items(results, policy)

    async def _sources(self, values: Sequence[Any]) -> tuple[list[Any], device_memory.Staging]:
        """`_source` for the values of a batch, and what was staged for it."""
        gpus, driver = self._live.gpus, self._link.driver
        if gpus is None:
            return await device_memory.stage_all(driver, values, take_them=True)
        values = list(values)
        devices: list[device_memory.OnDevice] = []
        for number, value in enumerate(values):
            with suppress(P2PStoreError, ValueError):  # raised again where it is staged
                device = device_memory.on_device(value)
                if device is not None:
                    devices.append(device)
                    values[number] = GpuSource(gpus, device)
        with suppress(GpuCopyFailed):  # which each of them will say
            await device_memory.await_computed(driver, devices)
        return await device_memory.stage_all(driver, values, take_them=True)

    # --- get ---------------------------------------------------------------------------------

    async def get(self, key: str, *, wait: float = 0.0) -> bytes:
        """The value. `wait` seconds for a key that may still be on its way. Raises `NoSuchKey`, or
        `Unavailable` when copies are known and none can be reached, or nobody who would know of any."""
        destination, digest, fetcher = BytesDestination(), self._digest(key), self._live.fetcher
        wait = arguments.seconds("wait", wait)
        if await fetcher.read_here(digest, destination) is not None:
            return destination.value()
        pulled = await fetcher.pull_small_value(key, digest)
        if isinstance(pulled, bytes):
            return pulled
        await fetcher.fetch(key, digest, destination, wait, pulled)
        return destination.value()

    async def get_into(
        self,
        key: str,
        buffer: Buffer,
        *,
        wait: float = 0.0,
        progress: Progress | None = None,
        trace: FetchTrace | None = None,
    ) -> int:
        """Write the value to the beginning of `buffer` and return its length in bytes. Raises
        `BufferTooSmall`, whose `needed` says how long the value is, before any byte is written.
        After any other error the buffer may hold anything.

        `progress` is called with the bytes done and the bytes in all while they arrive; `trace` is
        filled with where the value came from and what took how long."""
        device = device_memory.on_device(buffer)
        wait = arguments.seconds("wait", wait)
        if device is not None:
            if trace is None:
                (done,) = await self._read_in_place([(self._digest(key), device)])
                if done is not None:
                    if progress is not None:
                        progress(done, done)
                    return done
            driver = self._link.driver
            staged = await device_memory.make_room(driver, device)
            length = await self.get_into(
                key, staged.host, wait=wait, progress=progress, trace=trace
            )
            await device_memory.give(driver, staged, length)
            return length
        view, digest, fetcher = destination_view(buffer), self._digest(key), self._live.fetcher
        if progress is not None or trace is not None:
            watch = ReadWatch(time.perf_counter, progress, trace)
            watched = BufferDestination(view, watch)
            return (await fetcher.fetch(key, digest, watched, wait)).length
        return await fetcher.fetch_into(key, digest, view, wait)

    async def _read_in_place(
        self, items: Sequence[tuple[bytes, device_memory.OnDevice]]
    ) -> list[int | None]:
        """The lengths of what GPUs copied from the local peer's memory; None for what is to be read in another way."""
        parts = self._live
        if parts.gpus is None:
            return [None] * len(items)
        return await read_in_place(parts.link.driver, parts.link, parts.gpus, items)

    async def get_tensor(
        self, key: str, *, wait: float = 0.0, framework: Framework | None = None
    ) -> Any:
        """The tensor as it was put: numpy or torch, unless `framework` asks for one of them. Raises as
        `get`, and `P2PStoreError` for what was put by `put`, or cannot be had in that framework."""
        destination = TensorDestination(arguments.framework(framework))
        wait = arguments.seconds("wait", wait)
        await self._live.fetcher.fetch(key, self._digest(key), destination, wait)
        return destination.tensor

    async def get_many(self, keys: Sequence[str]) -> list[ItemResult[bytes]]:
        """`get` for many keys; one result (the value, or the error) per key, in order. Never raises for one
        key that fails. Where the caller has memory for the values, `get_many_into` is faster."""
        keys = arguments.key_list(keys)
        values = [BytesDestination() for _ in keys]
        outcomes = await fetch_many_new(self._live.fetcher, keys, values, self._digests)
        return answers.item_results(
            keys,
            [
                outcome if isinstance(outcome, Exception) else value.value()
                for value, outcome in zip(values, outcomes, strict=True)
            ],
        )

    async def get_new_views(
        self, keys: Sequence[str], allocate: Callable[[int], memoryview]
    ) -> list[memoryview | P2PStoreError | ValueError]:
        """`get_many` for programs that make the memory for each value themselves: `allocate` is called with its length
        and returns a writable view of so many bytes. Per key the filled view, or the error."""
        rooms = [NewMemoryDestination(allocate) for _ in keys]
        outcomes = await fetch_many_new(self._live.fetcher, keys, rooms, self._digests)
        return [
            outcome if isinstance(outcome, Exception) else room.view
            for room, outcome in zip(rooms, outcomes, strict=True)
        ]

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult[int]]:
        """`get_into` for many keys; one result (the length, or the error) per item, in order. Never
        raises for one item that fails."""
        keys, places = arguments.item_columns(items)
        if self._live.gpus is None:
            outcomes = await self._fetch_many_staged(keys, places)
        else:
            done = await self._read_many_in_place(keys, places)
            left = [number for number in range(len(keys)) if number not in done]
            fetched = await self._fetch_many_staged(
                [keys[number] for number in left], [places[number] for number in left]
            )
            by_number = done | dict(zip(left, fetched, strict=True))
            outcomes = [by_number[number] for number in range(len(keys))]
        return answers.item_results(keys, outcomes)

    async def _read_many_in_place(
        self, keys: Sequence[str], places: Sequence[Any]
    ) -> dict[int, int | P2PStoreError | ValueError]:
        """`_read_in_place` for those places of a batch that are on a GPU: by numbers the lengths of what was read, or
        that the GPU failed."""
        items: dict[int, tuple[bytes, device_memory.OnDevice]] = {}
        for number, (key, place) in enumerate(zip(keys, places, strict=True)):
            with suppress(P2PStoreError, ValueError, TypeError):  # raised again where it is staged
                device = device_memory.on_device(place)
                if device is not None:
                    items[number] = self._digest(key), device
        try:
            done = await self._read_in_place(list(items.values()))
        except GpuCopyFailed as error:
            return {number: GpuCopyFailed(str(error)) for number in items}
        return {
            number: length for number, length in zip(items, done, strict=True) if length is not None
        }

    async def _fetch_many_staged(
        self, keys: Sequence[str], places: Sequence[Any]
    ) -> list[int | P2PStoreError | ValueError]:
        """Per key the length of what was read, or the error; by way of pinned memory to tensors on a GPU."""
        fetcher, driver = self._live.fetcher, self._link.driver
        buffers, staging = await device_memory.stage_all(driver, places, take_them=False)
        outcomes = await fetch_many(fetcher, keys, buffers, self._digests)
        if staging:
            await self._give_staged(staging, outcomes)
        return outcomes

    async def _give_staged(
        self, staging: device_memory.Staging, outcomes: list[int | P2PStoreError | ValueError]
    ) -> None:
        """Have what a batch read for tensors on a GPU copied there; what fails is put in place of its outcome."""
        read: dict[int, tuple[device_memory.Staged, int]] = {}
        for number, staged in staging.items():
            length = outcomes[number]
            if isinstance(staged, Exception):
                outcomes[number] = plain_error(staged)
            elif isinstance(length, int):
                read[number] = staged, length
        try:
            await device_memory.give_all(self._link.driver, list(read.values()))
        except P2PStoreError as error:
            for number in read:
                outcomes[number] = plain_error(error)

    async def get_into_views(
        self, keys: Sequence[str], views: Sequence[memoryview]
    ) -> list[int | P2PStoreError | ValueError]:
        """`get_many_into` for programs that have their buffers as writable views of bytes already, one for each key:
        per key the length, or the error."""
        return await fetch_many(self._live.fetcher, keys, views, self._digests, are_views=True)

    async def take_lease(self, key: str, *, wait: float = 0.0, here: bool = False) -> memoryview:
        """A read-only view of the value in place: in the local peer's memory, or in that of another peer of
        this host; after bringing it into the local peer's if need be, or, with `here`, in any case.

        The memory is not reused until the last view derived from it is collected or this client is
        closed. Raises `LeaseLimitExceeded` when this client holds too much already.
        """
        wait, here = arguments.seconds("wait", wait), arguments.flag("here", here)
        return await self._live.leaser.take(key, self._digest(key), wait, here=here)

    async def take_leases(
        self, keys: Sequence[str], *, here: bool = False
    ) -> list[ItemResult[memoryview]]:
        """`take_lease` for many keys, with at most one request to each peer that gives some; one result (the view, or
        the error) per key, in order. Never raises for one key that fails."""
        here = arguments.flag("here", here)
        keys = arguments.key_list(keys)
        parts = self._live
        views = await take_many(
            parts.link, parts.fetcher, parts.neighbours, keys, self._digests, here=here
        )
        return [
            ItemResult(key, view) if isinstance(view, memoryview) else ItemResult(key, None, view)
            for key, view in zip(keys, views, strict=True)
        ]

    @asynccontextmanager
    async def lease(
        self, key: str, *, wait: float = 0.0, here: bool = False
    ) -> AsyncIterator[memoryview]:
        """`take_lease` as a context manager. A view that is still in use after the block, or
        anything made from it, keeps its lease."""
        view = await self.take_lease(key, wait=wait, here=here)
        try:
            yield view
        finally:
            del view

    @asynccontextmanager
    async def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> AsyncIterator[TransferBatch]:
        """A batch of gets and puts that run side by side, `limit` at once (1 to 256), for the length of the block:
        `submit` more, `status` to poll, `wait` and `results` to await, `cancel`; see `TransferBatch`. The block ends
        when all of them have ended; when it raises, or is cancelled, they are cancelled."""
        self._link.check()
        async with self._driver.helpers() as start:
            batch = TransferBatch(self, self._driver, start, limit, in_threads=self.in_threads)
            try:
                batch.submit(requests)
                yield batch
                await batch.finish()
            finally:
                batch.close()

    def register(self, buffer: Buffer) -> RegisteredBuffer:
        """Prepare memory for many puts from it and gets into it; see `RegisteredBuffer`. For memory that
        was never touched it takes about a second per GiB: do it at the start, or in a thread. Raises
        `ValueError` for memory that is read-only or not contiguous."""
        self._link.check()
        registered = RegisteredBuffer(destination_view(buffer))
        self._registered.add(registered)
        return registered

    async def register_gpu(self) -> None:
        """Have GPUs copy straight out of the local peer's memory, and into it, from now on: what is read into tensors
        on a GPU, or put from them, and is or goes there, is not copied by a processor any more. The memory is
        page-locked for that, some 0.1 s a GiB in which other work with the GPU may have to wait: do it at the start.
        Raises `P2PStoreError` where torch knows no GPU, or its driver refuses; then all is as without it."""
        parts = self._live
        async with parts.registering:
            if parts.gpus is None:
                step = partial(GpuMapping, parts.link.connection.segment(0), usable_gpu())
                gpus = await parts.link.driver.run_in_thread(step)
                parts.link.check()  # closed meanwhile, it is to have none
                parts.gpus = gpus

    @property
    def checkpoints(self) -> Checkpoints:
        """Directories that are published and fetched as a whole; see `Checkpoints`."""
        return Checkpoints(self._driver, self._link.connection.path, self.namespace, self.timeout)

    # --- asking ------------------------------------------------------------------------------

    async def contains(self, key: str) -> bool:
        """Whether some live peer is known to hold the key. May lag behind by a moment."""
        return await self._live.presence.contains(self._digest(key))

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys, in at most one request per 4,096."""
        return await self._live.presence.contains_many(arguments.key_list(keys))

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        return await self._live.presence.match_prefix(arguments.key_list(keys))

    async def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
        """For each live peer that holds the first of these keys, how many it holds from there on; the longest run
        first. May lag behind by a moment."""
        known = arguments.key_list(keys)[: await self.match_prefix(keys)]
        runs = answers.PrefixRuns()
        cuts = Cuts(LocalKind.LOCATE, len(known))
        for some in cuts:
            request = local.Locate(b"".join(self._digests(known[some.start : some.stop])))
            try:
                reply = await self._link.request(LocalKind.LOCATE, request, local.Located)
            except AnswerTooLarge as error:
                cuts.ask_again(some, error)
                continue
            if not runs.go_on(reply.items):
                break
        return runs.holders()

    async def locate(self, key: str) -> list[Location]:
        """The known copies of an object, after asking its home peers."""
        request = local.Locate(self._digest(key))
        reply = await self._link.request(LocalKind.LOCATE, request, local.Located)
        return [answers.location(copy) for copy in reply.items[0]] if reply.items else []

    async def list_keys(
        self,
        prefix: str = "",
        *,
        after: str = "",
        limit: int = 1000,
        local: bool = False,
        pinned: bool = False,
    ) -> KeyPage:
        """A page of this namespace's keys in order, of all peers or of the local one.

        The peer answers in pages of at most 2,000 keys; this one is made of as many as it takes.
        """
        prefix, after = arguments.text("prefix", prefix), arguments.text("after", after)
        limit = arguments.whole_number("limit", limit)
        local, pinned = arguments.flag("local", local), arguments.flag("pinned", pinned)
        whole = KeyPage([], True)
        most = MOST_ITEMS[LocalKind.LIST]
        while whole.more and len(whole.keys) < limit:
            request = _ListKeys(
                self.namespace,
                prefix,
                whole.keys[-1].key if whole.keys else after,
                min(most, limit - len(whole.keys)),
                local,
                pinned,
                deadline_ms(self.timeout),
            )
            try:
                reply = await self._link.request(
                    LocalKind.LIST, request, _Keys, extra_seconds=REMOVE_SECONDS
                )
            except AnswerTooLarge:
                if most == 1:
                    raise
                most //= 2
                continue
            page = answers.key_page(reply)
            whole = KeyPage(
                whole.keys + page.keys,
                page.more and bool(page.keys),
                sorted({*whole.silent_peers, *page.silent_peers}),
            )
        return whole

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        """The members of the cluster; with `everyone` also those that died or left within the last 24 hours."""
        request = local.Peers(arguments.flag("everyone", everyone))
        reply = await self._link.request(LocalKind.PEERS, request, local.PeersReply)
        return answers.peer_infos(reply)

    async def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        """What the peer counts: `{"peer": {...}, "cluster": {...}}`."""
        request = local.Statistics(arguments.flag("cluster", cluster))
        reply = await self._link.request(LocalKind.STATISTICS, request, local.StatisticsReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document

    # --- changing ----------------------------------------------------------------------------

    async def remove(self, key: str) -> bool:
        """Remove the object everywhere. Whether any copy of it was known."""
        encode_key(key)
        return (await self.remove_many([key]))[0].unwrap()

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
        """`remove` for many keys; one result per key, in order. Where a request fails, its keys and those after it
        carry the error; raises `StoreClosed` once the peer is gone."""
        keys = arguments.key_list(keys)
        self._link.check()
        results: dict[int, ItemResult[bool]] = {}
        for index, key in enumerate(keys):
            try:
                encode_key(key)
            except (ValueError, TypeError) as error:
                results[index] = ItemResult(key, error=plain_error(error))
        good = [index for index in range(len(keys)) if index not in results]
        for some in Cuts(LocalKind.REMOVE, len(good), [text_bytes(keys[index]) for index in good]):
            numbers = good[some.start : some.stop]
            try:
                removed = await self._remove([keys[number] for number in numbers])
            except StoreClosed:
                raise
            except P2PStoreError as error:
                failed = plain_error(error)
                left = good[some.start :]
                results.update({number: ItemResult(keys[number], error=failed) for number in left})
                break
            for number, existed in zip(numbers, removed.existed, strict=True):
                results[number] = ItemResult(keys[number], existed)
        return [results[index] for index in range(len(keys))]

    async def _remove(self, keys: list[str]) -> local.Removed:
        request = local.Remove(self.namespace, keys, deadline_ms(self.timeout))
        reply = await self._link.request(
            LocalKind.REMOVE, request, local.Removed, extra_seconds=REMOVE_SECONDS
        )
        if len(reply.existed) != len(keys):
            raise ProtocolError("the local peer answered for another number of keys")
        return reply

    async def pin(
        self, key: str, pin: PinName = "soft", *, ttl: float | None = None, fetch: bool = True
    ) -> PinResult:
        """Keep an object in the local peer's memory, and in that of all that hold it as far as they can be told: a
        soft pin (30 minutes unless `ttl` says otherwise) is evicted last, a hard one not at all. An object that only
        other peers hold is brought here first; without `fetch` it is pinned where it is. Raises `NoSuchKey`, and
        what a lease raises when it cannot be brought here."""
        fetch = arguments.flag("fetch", fetch) and pin != "none"
        request = local.SetPin(
            self._digest(key), arguments.pin_number(pin), arguments.milliseconds("ttl", ttl)
        )
        reply = await self._set_pin(request)
        if fetch and not _is_done(reply):
            view = await self.take_lease(key, here=True)  # which keeps it here until it is pinned
            try:
                reply = await self._set_pin(request)
            finally:
                del view
        if not (_is_done(reply) or (not fetch and any(reply.copies))):
            for error in reply.items:
                answers.raise_for(key, error)
        return PinResult(key, pin, sum(reply.copies) or 1, sum(reply.known) or 1)

    async def _set_pin(self, request: local.SetPin) -> local.Pinned:
        return await self._link.request(
            LocalKind.PIN, request, local.Pinned, extra_seconds=REMOVE_SECONDS
        )

    async def unpin(self, key: str) -> PinResult:
        """Undo `pin`, wherever the object is. Raises `NoSuchKey`."""
        return await self.pin(key, "none")

    async def replicate(self, key: str, copies: int) -> PutResult:
        """Have `copies` copies of the object, as far as there are peers. Raises `NoSuchKey`."""
        copies = arguments.whole_number("copies", copies)
        request = local.Replicate(self._digest(key), copies, deadline_ms(self.timeout))
        try:
            outcome = await self._link.request(
                LocalKind.REPLICATE, request, local.PutOutcome, extra_seconds=FETCH_SECONDS
            )
        except NoSuchKey as error:
            raise answers.name_key(key, error) from None
        return answers.put_result(key, outcome, self.peer_name)

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Have the peer bring these objects into local memory; does not wait for them."""
        digests, _ = arguments.possible_keys(arguments.key_list(keys), self._digests)
        self._link.check()
        for some in Cuts(LocalKind.PREFETCH, len(digests)):
            request = local.Prefetch(b"".join(digests[some.start : some.stop]))
            await self._link.request(LocalKind.PREFETCH, request, Empty)

    async def flush(self) -> None:
        """Remove everything in this namespace, everywhere."""
        request = local.Flush(self.namespace, deadline_ms(self.timeout))
        await self._link.request(
            LocalKind.FLUSH, request, local.Flushed, extra_seconds=REMOVE_SECONDS
        )

    async def leave(self, *, drain: float = 0.0) -> None:
        """Ask the peer to leave the cluster, after up to `drain` seconds in which it hands over to others what it
        alone holds. Does not wait for it: as long as the peer is there, `statistics()` says under `leaving` how far
        that is."""
        request = local.Leave(arguments.seconds("drain", drain))
        await self._link.request(LocalKind.LEAVE, request, Empty)


_ListKeys = local.ListKeys  # `list_keys` has a parameter named `local`, as its users call it
_Keys = local.Keys


def _restore(
    kind: type[ClientSession], socket: str | None, namespace: str, timeout: float
) -> ClientSession:
    return kind(socket=socket, namespace=namespace, timeout=timeout)  # type: ignore[call-arg]


def _is_done(reply: local.Pinned) -> bool:
    return not any(error.code for error in reply.items)
