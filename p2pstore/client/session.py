"""Everything a client does, written once for all drivers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from p2pstore import arguments
from p2pstore.client import answers, device_memory
from p2pstore.client.answers import plain_error
from p2pstore.client.batches import fetch_many, fetch_many_new
from p2pstore.client.destinations import BytesDestination, NewMemoryDestination, TensorDestination
from p2pstore.client.device_memory import GpuMapping, GpuSource, read_in_place, usable_gpu
from p2pstore.client.open_session import AskCalls, ChangeCalls, OpenSession
from p2pstore.client.transfers import TransferBatch
from p2pstore.client.writing import put_options
from p2pstore.errors import GpuCopyFailed, P2PStoreError
from p2pstore.objects import encode_key
from p2pstore.results import (
    Buffer,
    Framework,
    ItemResult,
    OnConflict,
    PinName,
    PutResult,
    TransferRequest,
)
from p2pstore.transfer.transfer_trace import FetchTrace, Progress, ReadWatch
from p2pstore.transfer.transport import BufferDestination
from p2pstore.values import RegisteredBuffer, Source, describe_tensor, destination_view, value_of

if TYPE_CHECKING:
    from p2pstore.checkpoint.client.checkpoint_calls import Checkpoints

_PLAIN: Final = frozenset({bytes, bytearray, memoryview, np.ndarray})
"""Types that are never on a GPU."""


class PutCalls(OpenSession):
    """Puts of one client."""

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
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        source = await self._source(key, value)
        result = await self._live.writer.put(key, source, options, progress)
        return answers.accepted(result, policy)

    async def _source(self, key: str, value: Any) -> Source:
        """The source of a put. Tensors on a GPU are in pinned memory, unless the GPU copies them itself."""
        device = None if type(value) in _PLAIN else device_memory.on_device(value)
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
        dtype, shape = describe_tensor(tensor)
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        source = await self._source(key, tensor)
        described = msgspec.structs.replace(options, dtype=dtype, shape=shape)
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
        policy = arguments.conflict_policy(overwrite, on_conflict)
        options = put_options(replicas, pin, ttl, policy, durable)
        (keys, values), live = arguments.item_columns(items), self._live
        sources, staging = await self._sources(values)
        results = await live.writer.put_many(keys, sources, options)
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


class GetCalls(OpenSession):
    """Gets of one client."""

    async def get(self, key: str, *, wait: float = 0.0) -> bytes:
        destination, digest, fetcher = BytesDestination(), self._digest(key), self._live.fetcher
        await fetcher.fetch_new(key, digest, destination, arguments.seconds("wait", wait))
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
        device = None if type(buffer) in _PLAIN else device_memory.on_device(buffer)
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
            length = await self.get_into(key, staged.host, wait=wait, progress=progress, trace=trace)
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
        destination = TensorDestination(arguments.framework(framework))
        wait = arguments.seconds("wait", wait)
        await self._live.fetcher.fetch(key, self._digest(key), destination, wait)
        return destination.tensor

    async def get_many(self, keys: Sequence[str]) -> list[ItemResult[bytes]]:
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
        and returns a writable view of that length. Per key the filled view, or the error."""
        rooms = [NewMemoryDestination(allocate) for _ in keys]
        outcomes = await fetch_many_new(self._live.fetcher, keys, rooms, self._digests)
        return [
            outcome if isinstance(outcome, Exception) else room.view
            for room, outcome in zip(rooms, outcomes, strict=True)
        ]

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult[int]]:
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
        return {number: length for number, length in zip(items, done, strict=True) if length is not None}

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
        """Copy the values of a batch to tensors on a GPU; an error replaces its outcome."""
        read: dict[int, tuple[device_memory.PinnedStaging, int]] = {}
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


class ClientSession(PutCalls, GetCalls, AskCalls, ChangeCalls):
    """One client of the local peer: `open` it, use it, `close` it.

    Any number of tasks (or threads, with a blocking driver) may use it at once. Deadlines are
    `timeout` seconds without progress. Every method may raise `StoreClosed` once the peer is gone,
    `ClientForked` in a forked child, `DeadlineExceeded`, and `ValueError` for a bad key;
    `RuntimeError` before it is open.
    """

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
        here = arguments.flag("here", here)
        keys = arguments.key_list(keys)
        views = await self._live.leaser.take_many(keys, self._digests, here=here)
        return [
            ItemResult(key, view) if isinstance(view, memoryview) else ItemResult(key, None, view)
            for key, view in zip(keys, views, strict=True)
        ]

    @asynccontextmanager
    async def lease(
        self, key: str, *, wait: float = 0.0, here: bool = False
    ) -> AsyncIterator[memoryview]:
        view = await self.take_lease(key, wait=wait, here=here)
        try:
            yield view
        finally:
            del view

    @asynccontextmanager
    async def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> AsyncIterator[TransferBatch]:
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
        self._link.check()
        registered = RegisteredBuffer(destination_view(buffer))
        self._registered.add(registered)
        return registered

    async def register_gpu(self) -> None:
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
        from p2pstore.checkpoint.client.checkpoint_calls import Checkpoints

        return Checkpoints(self._driver, self._link.connection.path, self.namespace, self.timeout)
