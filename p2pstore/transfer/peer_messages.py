"""Messages by which peers tell and ask each other about copies: where they are, make them, pin, prove, remove. Pure."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from p2pstore.home_messages import Holding
from p2pstore.objects import DIGEST_BYTES
from p2pstore.wire import Message


class Lookup(Message, frozen=True):
    """Ask for the holders of these keys. `digests` are packed, 16 bytes each."""

    digests: bytes


MAX_LOOKUP_DIGESTS: Final = 4_096


class Locations(Message, frozen=True):
    """The holders of each key. Of the keys in `unsure` (their places in the question) there may be others that
    the answering peer has not heard of."""

    items: list[list[Holding]]
    unsure: Annotated[list[int], Meta(max_length=MAX_LOOKUP_DIGESTS)] = []


MAX_PUSHED_RECORDS: Final = 256
"""Each costs the receiver a signature check."""


class Replicate(Message, frozen=True):
    """Fetch this object from me and keep a copy of at least this version.

    The sender's signed peer record comes along: a fresh peer may ask before gossip has told of it. `replicas`: how
    many copies are wanted in all, for a holder that has heard of fewer; 0 says nothing. `proof`: that the
    version's writer wrote it with this root (`core.copies.proofs`), which the copy keeps.
    """

    digest: bytes
    clock: int
    writer: int
    length: int
    soft: bool = False
    record_body: bytes = b""
    record_signature: bytes = b""
    replicas: int = 0
    root: int = 0
    proof: bytes = b""


MAX_REPLICATED: Final = 256
"""Objects of one REPLICATE_MANY: a window of a batch of puts."""


class ReplicateMany(Message, frozen=True):
    """Fetch these objects from me, who wrote them, and keep a copy of each: 1 to 256, all of one
    namespace.

    `slots` (64 bytes each) and `trailers` exactly as in the sender's memory. `signatures`: the sender's, 64 bytes for
    the tree of each 64 versions (`core.copies.proofs`), of which the receiver makes the proofs that the copies keep.
    The sender's signed peer record comes along as with REPLICATE.
    """

    slots: bytes
    trailers: Annotated[list[bytes], Meta(max_length=MAX_REPLICATED)]
    signatures: bytes
    record_body: bytes = b""
    record_signature: bytes = b""


class ReplicatedMany(Message, frozen=True):
    """A byte per object: 0 where the receiver now holds that version or a higher one, else a `wire.Code`."""

    codes: bytes


MAX_PROVED: Final = 64


class Prove(Message, frozen=True):
    """Prove who wrote the versions that you hold of these keys: packed digests, at most 64."""

    digests: bytes


class Proofs(Message, frozen=True):
    """A proof for each key, empty where there is none: see `core.copies.proofs`."""

    items: Annotated[list[bytes], Meta(max_length=MAX_PROVED)]


class Replicated(Message, frozen=True):
    """The receiver now holds `clock`, `writer` (the version asked for or a higher one)."""

    clock: int
    writer: int


class PinItem(Message, frozen=True):
    """An object in one version."""

    digest: bytes
    clock: int
    writer: int


class SetPins(Message, frozen=True):
    """Pin your copies of these objects, or unpin them. `soft_ms`: how long a soft pin lasts; 0 for as long as usual."""

    items: list[PinItem]
    pin: int
    soft_ms: int = 0


class PinsSet(Message, frozen=True):
    """A byte per item: 1 where the receiver has it and did so."""

    done: bytes


class ExpiryItem(Message, frozen=True):
    """An object in one version, and when it is to end: Unix milliseconds, 0 for never."""

    digest: bytes
    clock: int
    writer: int
    expires_unix_ms: int


class SetExpiry(Message, frozen=True):
    """Have your copies of these objects end at other times."""

    items: list[ExpiryItem]


class ExpirySet(Message, frozen=True):
    """A byte per item: 1 where the receiver has that version, and did so."""

    done: bytes


class CheckCopy(Message, frozen=True):
    """Compare the bytes of your copy with its checksums, and drop it if they differ: a reader, or a put of another
    value, doubts it. `again`: even if it was found good before."""

    digest: bytes
    again: bool = False


class CopyChecked(Message, frozen=True):
    """Whether the receiver has a copy whose bytes are good. If not, how far its log was: (`incarnation`,
    `sequence`)."""

    good: bool
    incarnation: int = 0
    sequence: int = 0


class Snapshot(Message, frozen=True):
    """The whole current set of location records of the receiver, which `member` names."""

    member: int


class SnapshotReply(Message, frozen=True):
    """The bulk is packed location records; they are the set at (incarnation, sequence)."""

    member: int
    incarnation: int
    sequence: int
    set_hash: int


class ClusterRecords(Message, frozen=True):
    """Packed signed cluster records, pushed at once to the peers that they concern."""

    bodies: Annotated[list[bytes], Meta(max_length=MAX_PUSHED_RECORDS)]
    signatures: Annotated[list[bytes], Meta(max_length=MAX_PUSHED_RECORDS)]


class RecordsTaken(Message, frozen=True):
    """The answer to CLUSTER_RECORDS, once what they forbid is gone. `newest_clock` is the highest stamp that
    the peer had seen before it heard of them."""

    newest_clock: int = 0


class ListKeys(Message, frozen=True):
    """Keys held here that begin with `prefix`, in order, after `after`."""

    namespace: str
    prefix: str
    after: str
    limit: int
    pinned: bool = False


MAX_NAMED: Final = 256


class Names(Message, frozen=True):
    """The keys of what is held here of a namespace: packed digests, 1 to 256."""

    namespace: str
    digests: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES * MAX_NAMED)]


class Named(Message, frozen=True):
    """The key of each digest; empty where none of that namespace is held under it."""

    keys: Annotated[list[str], Meta(max_length=MAX_NAMED)]


class KeyInfo(Message, frozen=True):
    key: str
    length: int
    clock: int
    writer: int
    tier: int
    pin: int
    soft: bool
    expires_unix_ms: int
    leased: bool = False


class Keys(Message, frozen=True):
    items: list[KeyInfo]
    more: bool


class Statistics(Message, frozen=True):
    pass


class StatisticsReply(Message, frozen=True):
    """A JSON document (see `p2pstore.peer.statistics`): for people and dashboards, it only grows."""

    document: bytes


MAX_READ_COUNTS: Final = 1024


class ReadCount(Message, frozen=True):
    """How often an object was read."""

    digest: bytes
    count: int = 1


class Reads(Message, frozen=True):
    """Objects that were read here through a mapping or by RDMA, which this peer did not see."""

    items: Annotated[list[ReadCount], Meta(max_length=MAX_READ_COUNTS)]


class ReadsTaken(Message, frozen=True):
    """The answer to READS."""


MAX_REMOVED_KEYS: Final = 512


class Remove(Message, frozen=True):
    """Remove these keys everywhere, for a writer, whose own word does not count."""

    namespace: str
    keys: Annotated[list[str], Meta(max_length=MAX_REMOVED_KEYS)]


class Removed(Message, frozen=True):
    """Per key whether any copy was known."""

    existed: list[bool]


class Flush(Message, frozen=True):
    """Remove all of the namespace everywhere, likewise."""

    namespace: str
    deadline_ms: int = 10_000


class Flushed(Message, frozen=True):
    """`told` other peers have dropped what they held; those in `not_told` (names) will when they hear of it."""

    told: int = 0
    not_told: list[str] = []
