"""Everything a client does, written once for all drivers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from p2pstore.checkpoint.client.checkpoint_calls import Checkpoints
from p2pstore.client import arguments
from p2pstore.client.device_memory import GpuMapping, usable_gpu
from p2pstore.client.key_calls import AskCalls, ChangeCalls
from p2pstore.client.leasing import take_many
from p2pstore.client.transfers import TransferBatch
from p2pstore.client.value_calls import GetCalls, PutCalls
from p2pstore.client.values import (
    RegisteredBuffer,
    destination_view,
)
from p2pstore.results import (
    Buffer,
    ItemResult,
    TransferRequest,
)


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
        """Have GPUs copy straight out of the local peer's memory, and into it, from now on: values that are read into
        tensors on a GPU, or put from them, and is or goes there, is not copied by a processor any more. The memory is
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
