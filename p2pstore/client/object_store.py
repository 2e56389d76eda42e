"""The protocol class that every store satisfies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from p2pstore.results import (
    Buffer,
    FetchEstimate,
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

if TYPE_CHECKING:
    from p2pstore.client.transfers import TransferBatch
    from p2pstore.transfer.transfer_trace import FetchTrace, Progress
    from p2pstore.values import RegisteredBuffer


class ObjectReads(Protocol):
    """The half of `ObjectStore` that changes nothing."""

    # --- get ---------------------------------------------------------------------------------

    async def get(self, key: str, *, wait: float = 0.0) -> bytes:
        """The value. `wait` seconds for a key that may still be on its way. Raises `NoSuchKey`, or
        `Unavailable` when copies are known and none can be reached, or no peer that would know of any can."""

    async def get_into(
        self,
        key: str,
        buffer: Buffer,
        *,
        wait: float = 0.0,
        progress: Progress | None = None,
        trace: FetchTrace | None = None,
    ) -> int:
        """Write the value to the beginning of `buffer`; returns its length in bytes. Raises as `get`, and
        `BufferTooSmall`, whose `needed` says how long the value is, before any byte is written; after any other error
        the buffer may hold anything. `progress` is called with the bytes done and the bytes in all; `trace` is filled
        with where the value came from and what took how long."""

    async def get_tensor(
        self, key: str, *, wait: float = 0.0, framework: Framework | None = None
    ) -> Any:
        """The tensor that was put by `put_tensor`, as numpy or torch as it was put, or as `framework`
        says. Raises as `get`, and `P2PStoreError` for what is no tensor, or cannot be made here."""

    async def get_many(self, keys: Sequence[str]) -> list[ItemResult[bytes]]:
        """`get` for many; one result per key, in order. Never raises for one key. Where there is memory for the values
        already, `get_many_into` is faster."""

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult[int]]:
        """`get_into` for many; one result per item (the length), in order. Never raises for one item."""

    def lease(
        self, key: str, *, wait: float = 0.0, here: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        """A read-only view of the value in the memory of the local peer, or of another one on this host that
        has it, which stays in place until the last view is collected. With `here`, the local peer is to hold
        it. Raises as `get`, `LeaseLimitExceeded`, and `CapacityExceeded` or `ObjectTooLarge` when the value
        has to be brought to the local peer's memory and does not fit."""

    async def take_leases(
        self, keys: Sequence[str], *, here: bool = False
    ) -> list[ItemResult[memoryview]]:
        """Views of many values, as `lease` gives one, with at most one request to each peer that gives some; one result
        per key, in order. Never raises for one key. Each value stays in place until its last view is collected."""

    # --- asking ------------------------------------------------------------------------------

    async def contains(self, key: str) -> bool:
        """Whether some live peer is known to hold the key. A claim is not verified, and the answer may lag: `get` may
        say `NoSuchKey` for a key whose holder just dropped it, or claims it without proof."""

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys; False for one that no object can have (empty, or above 1,024 bytes)."""

    async def locate(self, key: str) -> list[Location]:
        """The known copies; none for an unknown key."""

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold. One that no object can have
        (empty, or above 1,024 bytes) ends them."""

    async def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
        """For each live peer that holds the first of these keys, how many it holds from there on; the longest run
        first."""

    async def estimate(self, keys: Sequence[str]) -> FetchEstimate:
        """Expected time to bring these objects here in one batch, from what their holders delivered lately: to fetch
        them, or to compute them again. Those that no peer holds are left out."""

    async def list_keys(
        self,
        prefix: str = "",
        *,
        after: str = "",
        limit: int = 1000,
        local: bool = False,
        pinned: bool = False,
    ) -> KeyPage:
        """A page of the namespace's keys in order, of all peers or of the local one, of all keys or of the
        pinned ones."""

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        """The members of the cluster; with `everyone` also those that died or left within the last 24 hours."""

    async def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        """The counters of the peer and (with `cluster`) of the cluster: `{"peer": {...}, "cluster": {...}}`."""


@runtime_checkable
class ObjectStore(ObjectReads, Protocol):
    """The methods of `Peer`, `Client` (trio) and `AioClient` (asyncio), all async but `register`.

    `BlockingClient` has the same methods, plain. Keys are `str`, 1 to 1,024 bytes of UTF-8, in the
    store's namespace. Deadlines are seconds without progress (default 5). Every method may raise
    `StoreClosed` once the peer is gone, `DeadlineExceeded`, `ClientForked` in a forked child, and
    `TypeError` or `ValueError` for an argument that cannot be, before anything is sent. After return,
    error or cancellation nothing writes to a caller's buffer any more.
    """

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
        may both succeed: the higher version stays. A tensor of another dtype or shape conflicts, too.
        Where the key has these bytes (`unchanged`), a `ttl` replaces the object's, on all its copies that are reached;
        without one it stays. Pin and replicas are only ever raised.
        With `replicas`, returns when that number of copies exists, or no more can be made. `ttl` in seconds. Where the
        local peer has no room, another one stores the value: the result's `location` says which. Raises
        `CapacityExceeded` when neither the local peer nor another one has room and `ObjectTooLarge` above
        4 GiB, both before any byte is copied, and `ValueError` for a value that is not contiguous.
        `durable` returns when the object is on the local peer's SSD and survives a crash of its machine. Raises
        `ValueError` when the peer has no SSD, and `CapacityExceeded` when that does not take it: it is in memory then.
        `progress` is called with the bytes copied so far and the bytes in all; the replicas are made after that."""

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
        kept by default, as `on_conflict` says. Raises `ValueError` for
        one that is not contiguous, not in this host's memory, or not of plain numbers or text."""

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
        """`put` for many; keys that exist with other bytes are kept by default. One result per item, in order. Never
        raises for one item: with `on_conflict="error"` a conflict is that item's `KeyExists`."""

    def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> AbstractAsyncContextManager[TransferBatch]:
        """A batch of gets and puts that run side by side, `limit` at once (1 to 256), for the length of the block:
        `submit` more, `status` to poll, `wait` and `results` to await, `cancel`. The block ends when all of them have
        ended; when it raises, or is cancelled, they are cancelled."""

    def register(self, buffer: Buffer) -> RegisteredBuffer:
        """Prepare memory for many puts from it and gets into it; see `RegisteredBuffer`. For memory that was never
        touched it takes about a second per GiB: do it at the start, or in a thread. Raises `ValueError` for memory that
        is read-only or not contiguous."""

    async def register_gpu(self) -> None:
        """Have GPUs copy straight out of the local peer's memory, and into it, from now on, when tensors on a GPU are
        read into or put. That page-locks the memory, some 0.1 s a GiB, in which other work with the GPU may wait: do it
        at the start. Raises `P2PStoreError` where torch knows no GPU, or its driver refuses; then all is as without
        it."""

    # --- changing ----------------------------------------------------------------------------

    async def remove(self, key: str) -> bool:
        """Remove the object everywhere. Whether any copy was known."""

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
        """`remove` for many keys; one result per key, in order. Where a request fails, its keys and those after it
        carry the error; raises `StoreClosed` once the peer is gone."""

    async def pin(
        self, key: str, pin: PinName = "soft", *, ttl: float | None = None, fetch: bool = True
    ) -> PinResult:
        """Keep an object in the local peer's memory, and in that of all that hold it as far as they can be told: a
        soft pin (30 minutes unless `ttl` says otherwise) is evicted last, a hard one not at all. An object that only
        other peers hold is brought here first; without `fetch` it is pinned where it is. Raises `NoSuchKey`, and
        what a lease raises when it cannot be brought here."""

    async def unpin(self, key: str) -> PinResult:
        """Undo `pin`, wherever the object is. Raises `NoSuchKey`."""

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Have the peer bring these objects into local memory; does not wait for them. Keys that no object can have
        are passed over."""

    async def replicate(self, key: str, copies: int) -> PutResult:
        """Have `copies` copies of the object, as far as there are peers. Raises `NoSuchKey`."""

    async def flush(self) -> None:
        """Remove everything in this namespace, everywhere."""
