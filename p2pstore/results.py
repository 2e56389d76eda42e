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
    ) -> PutResult: ...

    async def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, replicas: int = 1, overwrite: bool = False
    ) -> list[ItemResult]: ...

    async def get(self, key: str, *, wait: float = 0.0) -> bytes: ...

    async def get_into(self, key: str, buffer: Buffer, *, wait: float = 0.0) -> int: ...

    async def get_many_into(self, items: Sequence[tuple[str, Buffer]]) -> list[ItemResult]: ...

    def lease(self, key: str, *, wait: float = 0.0) -> AbstractAsyncContextManager[memoryview]: ...

    async def contains(self, key: str) -> bool: ...

    async def contains_many(self, keys: Sequence[str]) -> list[bool]: ...

    async def locate(self, key: str) -> list[Location]: ...

    async def match_prefix(self, keys: Sequence[str]) -> int: ...

    async def remove(self, key: str) -> bool: ...

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult]: ...

    async def list_keys(
        self, prefix: str = "", *, after: str = "", limit: int = 1000, local: bool = False
    ) -> KeyPage: ...

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]: ...

    async def statistics(self) -> dict[str, Any]: ...
