"""Records that core and clients exchange: facts of a value that is put, the outcome, a listed key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from p2pstore.wire import Message


class PutOptions(Message, frozen=True):
    """The caller's choice for a value that is put. `ttl_ms` 0 means no end."""

    replicas: int = 1
    pin: int = 0
    ttl_ms: int = 0
    overwrite: bool = False
    durable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()


class PutFacts(Message, frozen=True):
    """A value that lies in a reservation, and what its caller wants of it.

    `reservation` 0: its bytes are not here, and what can be decided without them is. `sums` are packed u64, one per
    chunk; `root` is made of them. `ttl_ms` 0 means no end. `follows` is the digest of the block before it, where the
    client knows of a chain of prefix blocks.
    """

    reservation: int
    key: str
    length: int
    sums: bytes
    root: int
    replicas: int = 1
    pin: int = 0
    ttl_ms: int = 0
    overwrite: bool = False
    durable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    follows: bytes = b""


class PutColumns(msgspec.Struct, frozen=True, gc=False):
    """`PutFacts` of many values, in columns. `digests` are those of the keys, `options` one for all or one each; sums
    and roots are those of values of the lengths."""

    reservations: Sequence[int]
    keys: Sequence[str]
    digests: Sequence[bytes]
    lengths: Sequence[int]
    sums: Sequence[bytes]
    roots: Sequence[int]
    follows: Sequence[bytes]
    options: Sequence[PutOptions]

    def part(self, rows: slice) -> PutColumns:
        """Some of the rows."""
        cut = {name: getattr(self, name)[rows] for name in self.__struct_fields__}
        if len(self.options) == 1:
            cut["options"] = self.options
        return PutColumns(**cut)

    def facts(self, row: int) -> PutFacts:
        """Those of one value."""
        options = self.options[row if len(self.options) > 1 else 0]
        return PutFacts(
            self.reservations[row],
            self.keys[row],
            self.lengths[row],
            self.sums[row],
            self.roots[row],
            follows=self.follows[row],
            **msgspec.structs.asdict(options),
        )


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
