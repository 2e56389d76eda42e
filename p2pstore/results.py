"""What operations return, and the protocol class that every store satisfies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, runtime_checkable

from p2pstore.errors import P2PStoreError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from p2pstore.client.transfers import TransferBatch
    from p2pstore.registered import RegisteredBuffer
    from p2pstore.transfer.transfer_trace import FetchTrace, Progress

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

PutStatusName = Literal["created", "unchanged", "kept_existing"]
PinName = Literal["none", "soft", "hard"]
OnConflict = Literal["keep", "overwrite", "error"]
"""What a put does with a key that exists with other bytes."""
Framework = Literal["numpy", "torch"]
"""Which library a tensor comes back in."""
Buffer = Any
"""Anything with the buffer protocol (contiguous), a dense torch tensor on the CPU or a GPU, or a `RegisteredBuffer`."""


@dataclass(frozen=True, slots=True)
class Location:
    """One known copy of an object. `tier` is `dram`, `ssd` or `both`; `reachable` whether its peer is
    believed alive; `size_hint` the length rounded up to 4 KiB."""

    peer_id: str
    peer: str
    tier: str
    size_hint: int
    version: tuple[int, int]
    soft: bool
    pin: PinName
    local: bool
    reachable: bool


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did. A key that exists with other bytes is kept by default: `status` is then `kept_existing`, and
    nothing of the put was stored or applied.

    `status` is `created` for a new object, and `unchanged` where the key had these bytes: the put's pin and replicas
    were applied where they ask for more, and its `ttl`, where it gave one, replaced the object's.
    `copies` are known to exist now, `wanted` were asked for; fewer copies than wanted are repaired later.
    `location` is the peer that holds the first copy; `version` is (hybrid clock, writer hash).
    """

    key: str
    status: PutStatusName
    copies: int
    wanted: int
    location: str
    version: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """How much of a chain of blocks one peer has: the first `blocks` of them without a gap, `memory_blocks` of these in
    its memory, the others on its SSD. `local`: the local peer."""

    peer_id: str
    peer: str
    blocks: int
    memory_blocks: int
    local: bool


class ItemResult(NamedTuple, Generic[T_co]):
    """One item of a batch: `value` when it worked, `error` when it did not (and then no value)."""

    key: str
    value: T_co | None = None
    error: P2PStoreError | ValueError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> T_co:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        value: T_co = self.value  # type: ignore[assignment] # there is one where there is no error
        return value


TransferOperation = Literal["get", "put"]
TransferState = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, eq=False)
class TransferRequest:
    """One transfer of a batch: the value of `key` into `buffer`, or with `operation="put"` what is in `buffer` under
    `key`. `wait` (seconds) is for gets, `replicas`, `overwrite` and `on_conflict` for puts, as in `get_into` and
    `put`: a key that exists with other bytes is kept by default. The buffer is the batch's until the transfer has
    ended."""

    key: str
    buffer: Buffer = field(repr=False)
    operation: TransferOperation = "get"
    wait: float = field(default=0.0, kw_only=True)
    replicas: int = field(default=1, kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)
    on_conflict: OnConflict | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """How a transfer fares. `moved_bytes` grows while it runs, from 4 MiB of buffer on; else it is told at the end.
    `error` says why it failed, or that it was cancelled (`TransferCancelled`)."""

    key: str
    state: TransferState
    moved_bytes: int
    error: P2PStoreError | ValueError | None = None


@dataclass(frozen=True, slots=True)
class PinResult:
    """What `pin` or `unpin` did: `copies` have that pin now, of `known` that there are."""

    key: str
    pin: PinName
    copies: int
    known: int


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One key of `list_keys`: `copies` among the peers that answered, `peers` their names."""

    key: str
    length: int
    copies: int
    peers: list[str]
    pin: PinName
    soft: bool
    expires_unix: float | None


@dataclass(frozen=True, slots=True)
class KeyPage:
    """A page of keys in order. `more`: ask again with `after` the last key. `silent_peers` did not answer."""

    keys: list[ListedKey]
    more: bool
    silent_peers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A member of the cluster as this peer sees it. `status`: alive, suspect, dead or left."""

    peer_id: str
    name: str
    status: str
    incarnation: int
    control: list[str]
    data: list[str]
    memory_capacity: int
    memory_used: int
    objects: int
    me: bool
    software: str
    heard_seconds_ago: float
    round_trip_seconds: float | None = None
    """Of a ping; None where none was answered yet."""
    transports: dict[str, dict[str, int]] = field(default_factory=dict)
    """What this peer and its clients read from it by which transport: objects, bytes, failures; and how long those took
    that were read one by one, half of them at most `median_microseconds`, 99 % at most `p99_microseconds` (powers of
    two; 0 where there were none)."""
    directory: str = ""
    """How much it knows of where objects are: `full` or `partitioned`."""
    load: float = 0.0
    """What it takes of a core, or its large answers of its upload slots, whichever is more, as it said some seconds
    ago. From 1 on, who asks it for more is late, or sent elsewhere."""
    leaving: bool = False
    """It hands over what only it has, and takes nothing new."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far a publish or fetch is. `phase`: waiting, hashing, seeding, checking, fetching, finishing, done. `members`
    are the peers with whom pieces are exchanged."""

    phase: str
    done_bytes: int
    total_bytes: int
    members: int


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A version that others can fetch now: 32 hexadecimal digits."""

    version: str
    files: int
    total_bytes: int
    pieces: int
    piece_bytes: int
    notes: tuple[str, ...] = ()
    """What is to be known of the files: what was left out, what is broken, patterns that match none."""


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """A version that is in `directory`: `whole`, or the files of it that were asked for. Of `total_bytes`,
    `fetched_bytes` came over the network; the others were there, on this host, or in equal files. `unmatched`: patterns
    that match no file of it."""

    version: str
    directory: str
    total_bytes: int
    fetched_bytes: int
    whole: bool = True
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowedCheckpoint:
    """How a follow is. `stage`: waiting, fetching, verified (it will be used when the publisher says so), current,
    failed (`why`; it is tried again). `version` is the one to be used next, or in use, `current` the one in use: 32
    hexadecimal digits, or nothing. `publisher` is a peer id, empty as long as nobody publishes the name."""

    stage: str
    version: str
    current: str
    done_bytes: int
    total_bytes: int
    publisher: str
    publisher_name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFollower:
    """A follower that an update waits for. `stage`: waiting, fetching, verified, failed (`why`). `dead`: nothing is
    heard of its peer any more."""

    peer_id: str
    name: str
    stage: str
    done: float
    why: str = ""
    dead: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointUpdate:
    """How an update is: of `followers`, so many have the version (`ready`), and use it (`using`). `laggards` are those
    that are waited for: that do not have it, or, once it is `switched`, do not use it yet."""

    version: str
    switched: bool
    followers: int
    ready: int
    using: int
    laggards: tuple[CheckpointFollower, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointMember:
    """What a peer has of a name. `state`: following (it waits), fetching, verified, seeding, publishing, failed
    (`why`). `version` and `current` (what a follower uses) are the first 16 hexadecimal digits, or nothing. It `needs`
    a share of the version, most often all of it: 1; `done` is a share of that. `bytes_per_second` is what it fetched at
    so far, 0 where that is not known yet."""

    peer_id: str
    name: str
    state: str
    version: str
    done: float
    follows: bool
    current: str
    why: str
    bytes_per_second: int
    me: bool
    needs: float = 1.0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A name that somebody publishes. `switched` is the version that followers are to use, empty when none was named.
    `trusted`: this peer takes the name from this publisher; `mine`: it is the publisher; `alive`: the publisher is.
    `published` is in seconds since 1970."""

    namespace: str
    name: str
    publisher: str
    publisher_name: str
    version: str
    published: float
    total_bytes: int
    files: int
    pieces: int
    previous: str
    switched: str
    trusted: bool
    mine: bool
    alive: bool
    members: tuple[CheckpointMember, ...] = ()


@runtime_checkable
class ObjectStore(Protocol):
    """What `Peer`, `Client` (trio) and `AioClient` (asyncio) offer, all of it async but `register`.

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
        With `replicas`, returns when so many copies exist. `ttl` in seconds. Raises
        `CapacityExceeded` when neither the local peer nor another one has room and `ObjectTooLarge` above
        4 GiB, both before any byte is copied, and `ValueError` for a value that is not contiguous.
        `durable` returns when the object is on the local peer's SSD and survives a crash of its machine. Raises
        `ValueError` when the peer has no SSD, and `CapacityExceeded` when that does not take it: it is in memory then.
        `progress` is called with the bytes copied so far and the bytes in all."""
        ...

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
        ...

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
        ...

    # --- get ---------------------------------------------------------------------------------

    async def get(self, key: str, *, wait: float = 0.0) -> bytes:
        """The value. `wait` seconds for a key that may still be on its way. Raises `NoSuchKey`, or
        `Unavailable` when copies are known and none can be reached, or nobody who would know of any."""
        ...

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
        `BufferTooSmall`. `progress` is called with the bytes done and the bytes in all; `trace` is
        filled with where the value came from and what took how long."""
        ...

    async def get_tensor(
        self, key: str, *, wait: float = 0.0, framework: Framework | None = None
    ) -> Any:
        """The tensor that was put by `put_tensor`, as numpy or torch as it was put, or as `framework`
        says. Raises as `get`, and `P2PStoreError` for what is no tensor, or cannot be made here."""
        ...

    async def get_many(self, keys: Sequence[str]) -> list[ItemResult[bytes]]:
        """`get` for many; one result per key, in order. Never raises for one key. Where there is memory for the values
        already, `get_many_into` is faster."""
        ...

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult[int]]:
        """`get_into` for many; one result per item (the length), in order. Never raises for one item."""
        ...

    def lease(
        self, key: str, *, wait: float = 0.0, here: bool = False
    ) -> AbstractAsyncContextManager[memoryview]:
        """A read-only view of the value in the memory of the local peer, or of another one on this host that
        has it, which stays in place until the last view is collected. With `here`, the local peer is to hold
        it. Raises as `get`, `LeaseLimitExceeded`, and `CapacityExceeded` or `ObjectTooLarge` when the value
        has to be brought to the local peer's memory and does not fit."""
        ...

    async def take_leases(
        self, keys: Sequence[str], *, here: bool = False
    ) -> list[ItemResult[memoryview]]:
        """Views of many values, as `lease` gives one; one result per key, in order. Never raises for one key. Each
        value stays in place until its last view is collected."""
        ...

    def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> AbstractAsyncContextManager[TransferBatch]:
        """A batch of gets and puts that run side by side, `limit` at once (1 to 256), for the length of the block:
        `submit` more, `status` to poll, `wait` and `results` to await, `cancel`. The block ends when all of them have
        ended; when it raises, or is cancelled, they are cancelled."""
        ...

    def register(self, buffer: Buffer) -> RegisteredBuffer:
        """Prepare memory for many puts from it and gets into it; see `RegisteredBuffer`."""
        ...

    async def register_gpu(self) -> None:
        """Have GPUs copy straight out of the local peer's memory, and into it, from now on, when tensors on a GPU are
        read into or put. That page-locks the memory, some 0.1 s a GiB, in which other work with the GPU may wait: do it
        at the start. Raises `P2PStoreError` where torch knows no GPU, or its driver refuses."""
        ...

    # --- asking ------------------------------------------------------------------------------

    async def contains(self, key: str) -> bool:
        """Whether some live peer is known to hold the key. May lag behind by a moment."""
        ...

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys; False for one that no object can have (empty, or above 1,024 bytes)."""
        ...

    async def locate(self, key: str) -> list[Location]:
        """The known copies; none for a key that nobody has."""
        ...

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold. One that no object can have
        (empty, or above 1,024 bytes) ends them."""
        ...

    async def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
        """For each live peer that holds the first of these keys, how many it holds from there on; the longest run
        first."""
        ...

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
        ...

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        """The members of the cluster; with `everyone` also those that died or left within the last 24 hours."""
        ...

    async def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        """What the peer and (with `cluster`) the cluster count: `{"peer": {...}, "cluster": {...}}`."""
        ...

    # --- changing ----------------------------------------------------------------------------

    async def remove(self, key: str) -> bool:
        """Remove the object everywhere. Whether any copy was known."""
        ...

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
        """`remove` for many keys; one result per key, in order."""
        ...

    async def pin(
        self, key: str, pin: PinName = "soft", *, ttl: float | None = None, fetch: bool = True
    ) -> PinResult:
        """Keep an object in the local peer's memory, and in that of all that hold it as far as they can be told: a
        soft pin (30 minutes unless `ttl` says otherwise) is evicted last, a hard one not at all. An object that only
        other peers hold is brought here first; without `fetch` it is pinned where it is. Raises `NoSuchKey`, and
        what a lease raises when it cannot be brought here."""
        ...

    async def unpin(self, key: str) -> PinResult:
        """Undo `pin`, wherever the object is. Raises `NoSuchKey`."""
        ...

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Have the peer bring these objects into local memory; does not wait for them. Keys that no object can have
        are passed over."""
        ...

    async def replicate(self, key: str, copies: int) -> PutResult:
        """Have `copies` copies of the object, as far as there are peers. Raises `NoSuchKey`."""
        ...

    async def flush(self) -> None:
        """Remove everything in this namespace, everywhere."""
        ...
