"""What operations return, and the protocol class that every store satisfies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from p2pstore.errors import P2PStoreError

PutStatusName = Literal["created", "unchanged", "kept_existing"]
PinName = Literal["none", "soft", "hard"]
Buffer = Any
"""Anything with the buffer protocol (contiguous), or a CPU torch tensor."""


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
    """`copies` exist now, `wanted` were asked for; fewer copies than wanted are repaired later.

    `location` is the peer that holds the first copy; `version` is (hybrid clock, writer hash).
    """

    key: str
    status: PutStatusName
    copies: int
    wanted: int
    location: str
    version: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item of a batch: `value` when it worked, `error` when it did not (and then no value)."""

    key: str
    value: Any = None
    error: P2PStoreError | ValueError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


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


@runtime_checkable
class ObjectStore(Protocol):
    """What `Peer` and `Client` both offer, all of it async (`blocking` has the same names, plain).

    Keys are `str`, namespaces are the store's. Deadlines are seconds without progress (default 5).
    """

    async def put(
        self,
        key: str,
        value: Buffer,
        *,
        replicas: int = 1,
        pin: PinName = "none",
        ttl: float | None = None,
        overwrite: bool = False,
    ) -> PutResult:
        """Store a value; with `replicas`, returns when so many copies exist. `ttl` in seconds. Raises
        `CapacityExceeded`, `ObjectTooLarge`, and `ValueError` for a value that is not contiguous."""
        ...

    async def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, replicas: int = 1, overwrite: bool = False
    ) -> list[ItemResult]:
        """`put` for many; one result per item, in order. Never raises for one item."""
        ...

    async def get(self, key: str, *, wait: float = 0.0) -> bytes:
        """The value. `wait` seconds for a key that may still be on its way. Raises `NoSuchKey`, or
        `Unavailable` when copies are known and none can be reached."""
        ...

    async def get_into(self, key: str, buffer: Buffer, *, wait: float = 0.0) -> int:
        """Write the value to the beginning of `buffer`; returns its length in bytes. Raises as `get`, and
        `BufferTooSmall`."""
        ...

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult]:
        """`get_into` for many; one result per item, in order. Never raises for one item."""
        ...

    def lease(self, key: str, *, wait: float = 0.0) -> AbstractAsyncContextManager[memoryview]:
        """A read-only view of the value in the peer's memory, which stays in place until the last view is
        collected. Raises as `get`, and `LeaseLimitExceeded`."""
        ...

    async def contains(self, key: str) -> bool:
        """Whether some live peer is known to hold the key. May lag behind by a moment."""
        ...

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys."""
        ...

    async def locate(self, key: str) -> list[Location]:
        """The known copies."""
        ...

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        ...

    async def remove(self, key: str) -> bool:
        """Remove the object everywhere. Whether any copy was known."""
        ...

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult]:
        """`remove` for many keys; one result per key, in order."""
        ...

    async def list_keys(
        self, prefix: str = "", *, after: str = "", limit: int = 1000, local: bool = False
    ) -> KeyPage:
        """A page of the namespace's keys in order, of all peers or of the local one."""
        ...

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        """The members of the cluster; with `everyone` also those that are gone."""
        ...

    async def statistics(self) -> dict[str, Any]:
        """What the peer and the cluster count: `{"peer": {...}, "cluster": {...}}`."""
        ...
