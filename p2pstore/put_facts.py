"""Records that core and clients exchange: facts of a value that is put, the outcome, a listed key. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from p2pstore.wire import Message

MAX_REPLICAS: Final = 64
MAX_TTL_MS: Final = 100 * 365 * 86_400_000


class PutOptions(Message, frozen=True):
    """The caller's choice for a value that is put. `ttl_ms` 0 means no end."""

    replicas: int = 1
    pin: int = 0
    ttl_ms: int = 0
    overwrite: bool = False
    durable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise `ValueError` for what no put may have."""
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas must be 1 to {MAX_REPLICAS}, not {self.replicas}")
        if self.pin not in (0, 1, 2) or not 0 <= self.ttl_ms <= MAX_TTL_MS:
            raise ValueError("pin or ttl out of range")


class PutFacts(msgspec.Struct, frozen=True, gc=False):
    """A value that lies in a reservation, and its caller's choice: made of a COMMIT or a STORE.

    `reservation` 0: its bytes are not here, and what can be decided without them is. `sums` are packed u64, one per
    chunk; `root` is made of them. `follows` is the digest of the block before it, where the client knows of a chain of
    prefix blocks.
    """

    reservation: int
    key: str
    digest: bytes
    length: int
    sums: bytes
    root: int
    options: PutOptions
    follows: bytes = b""


class PutStatus(IntEnum):
    """Outcome of a put."""

    CREATED = 0
    UNCHANGED = 1
    KEPT_EXISTING = 2


class KeyEntry(Message, frozen=True):
    """One key of a listing: its newest version, and the peers with a copy."""

    key: str
    length: int
    copies: int
    peers: list[str]
    pin: int
    soft: bool
    expires_unix_ms: int
    clock: int = 0
    writer: int = 0
