"""Messages on data connections between peers, and from clients to remote peers. Pure.

The connecting side sends the preface `P2PSTORD`, then:

    client                                      server
    HELLO Hello(ticket, nonce)        ------->
                                      <-------  HELLO|REPLY HelloReply(nonce, proof)
    PROOF Proof(proof), requests ...  ------->
                                      <-------  replies, in any order

See `p2pstore.transfer.read_tickets` for what a ticket proves. A client may pipeline requests right after
its proof; a wrong proof closes the connection. Replies to GET and SNAPSHOT carry bulk bytes.

Since version 2 requests may carry bulk bytes as well, and a value can be stored. No byte of it moves
before there is room for it:

    STORE Store(key, sums, ...)       ------->  room is reserved
                                      <-------  STORE|REPLY StoreReply(), or what became of it without
    STORE_PART StorePart, bulk ...    ------->  every part but the last one-way
                                      <-------  STORE_PART|REPLY Stored

Until its last part came, a store has the connection for itself.

A connection on which SWARM_LINK was answered is a link between two peers of a swarm from then on: both sides send
frames of `p2pstore.checkpoint.swarm.swarm_messages`, one-way, at any time. Pieces are asked for on other connections.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from p2pstore.objects import CHUNK_BYTES, DIGEST_BYTES
from p2pstore.wire import Message

MIN_DATA_VERSION: Final = 1
MAX_DATA_VERSION: Final = 4
"""Versions of the data protocol. 2: requests with bulk bytes. 3: GET_SMALL. 4: REPLICATE_MANY."""
STORE_VERSION: Final = 2
"""The first version in which values can be stored."""
SMALL_VERSION: Final = 3
"""The first version with GET_SMALL."""
REPLICATE_MANY_VERSION: Final = 4
"""The first version with REPLICATE_MANY; older peers are asked to REPLICATE each object."""


class DataKind(IntEnum):
    HELLO = 1
    PROOF = 2
    GET = 16
    LOOKUP = 17
    PUSH = 18
    REPLICATE = 19
    SNAPSHOT = 20
    CLUSTER_RECORDS = 21
    LIST = 22
    STATISTICS = 23
    PING = 24
    STORE = 25
    STORE_PART = 26
    READS = 28
    SET_PINS = 27
    GET_SMALL = 29
    SET_EXPIRY = 30
    CHECK_COPY = 31
    MEASURE = 32
    RDMA_CONNECT = 33
    GET_MANIFEST = 34
    GET_PIECE = 35
    SWARM_LINK = 36
    PIECE_TAKEN = 37
    PROVE = 38
    REMOVE = 39
    FLUSH = 40
    REPLICATE_MANY = 41


class Ticket(Message, frozen=True):
    """Packed `TicketClaims` and the issuing peer's ed25519 signature over them."""

    claims: bytes
    signature: bytes


class Hello(Message, frozen=True):
    min_version: int
    max_version: int
    ticket: Ticket
    nonce: bytes
    software: str = ""


class HelloReply(Message, frozen=True):
    version: int
    nonce: bytes
    proof: bytes
    incarnation: int
    software: str = ""


class Proof(Message, frozen=True):
    proof: bytes


class GetItem(Message, frozen=True):
    """Chunks of one object. `chunk_count` 0 means to the end; `slot` is a hint, not trusted."""

    digest: bytes
    first_chunk: int = 0
    chunk_count: int = 0
    slot: int = 0

    def of(self, value: memoryview) -> memoryview:
        """What is asked for of an object's bytes; nothing when it begins beyond their end (which asks for slot and
        trailer)."""
        start = max(0, self.first_chunk) * CHUNK_BYTES
        if self.chunk_count <= 0:
            return value[start:]
        return value[start : start + self.chunk_count * CHUNK_BYTES]


MAX_GET_ITEMS: Final = 1024
"""Like all caps on lists here, checked before anything is done per element."""


class Get(Message, frozen=True):
    """Objects, or chunks of them; the reply's bulk is their bytes one after the other. `may_refuse`: the answer
    may be BUSY, because others have the object as well. `keeps` (see `Keeps`): it may also be BUSY because the object
    is hot."""

    items: Annotated[list[GetItem], Meta(max_length=MAX_GET_ITEMS)]
    may_refuse: bool = False
    keeps: int = 0


SMALL_OBJECT_BYTES: Final = 64 * 1024
"""Objects up to this are small; what GET_SMALL is answered with at most, unless it says otherwise."""
MAX_SMALL_ITEMS: Final = 512
MAX_SMALL_BULK_BYTES: Final = 4 * 1024 * 1024


class GetSmall(Message, frozen=True):
    """Many objects of one chunk, of 1 to `most_bytes` bytes. `digests` are packed, at most 512. `keeps` as for GET.
    Peers that know only of the digests answer with what has up to 64 KiB."""

    digests: Annotated[
        bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES * MAX_SMALL_ITEMS)
    ]
    most_bytes: int = SMALL_OBJECT_BYTES
    keeps: int = 0


class SmallObjects(Message, frozen=True):
    """A slot (64 bytes) for each, exactly as in the owner's memory, and all zero for what GET has to say more of: it is
    not there, is larger, is on the SSD, is hot, the values before it were 4 MiB, or it has more than 64 KiB and the
    holder has much to send already. The bulk is the values of the others, one after the other. Without trailers: of an
    object of one chunk, length and value give the slot's root."""

    slots: bytes


MAX_OTHERS: Final = 64


class Keeps(IntEnum):
    """What becomes of an object that is asked for."""

    NO = 0
    """It is not kept, or whoever asks insists."""
    BY_PEER = 1
    """A client's own peer could bring it, and keep a copy."""
    YES = 2
    """A peer asks, which keeps a copy."""


_KEEPS: Final = {int(each): each for each in Keeps}


def keeps_of(number: int) -> Keeps:
    """As sent; what a newer version made up counts as not keeping."""
    return _KEEPS.get(number, Keeps.NO)


class ObjectStatus(IntEnum):
    OK = 0
    NOT_FOUND = 1
    BUSY = 2
    TOO_LARGE = 3
    """The item's bytes did not fit into this reply: ask for it alone or for fewer chunks."""


class ObjectReply(Message, frozen=True):
    """`slot` (64 bytes) and `trailer` exactly as in the owner's memory; `bulk_bytes` of the reply's bulk
    belong to this item. NOT_FOUND says how far the owner's log was: (`incarnation`, `sequence`).
    BUSY may name other peers (short names) that have the object, or are fetching it now. With `keep` the object is hot:
    a client's peer is to bring it and keep it."""

    status: int
    slot: bytes = b""
    trailer: bytes = b""
    bulk_bytes: int = 0
    incarnation: int = 0
    sequence: int = 0
    others: Annotated[list[int], Meta(max_length=MAX_OTHERS)] = []
    keep: bool = False


class Objects(Message, frozen=True):
    items: list[ObjectReply]


class Lookup(Message, frozen=True):
    """Who holds these keys? `digests` are packed, 16 bytes each."""

    digests: bytes


class Holding(Message, frozen=True):
    """One holder: its short name, its log's (incarnation, sequence) at that time, a location record."""

    member: int
    incarnation: int
    sequence: int
    record: bytes


MAX_LOOKUP_DIGESTS: Final = 4_096


class Locations(Message, frozen=True):
    """The holders of each key. Of the keys in `unsure` (their places in the question) there may be others that
    the answering peer has not heard of."""

    items: list[list[Holding]]
    unsure: Annotated[list[int], Meta(max_length=MAX_LOOKUP_DIGESTS)] = []


MAX_PUSHED_OPERATIONS: Final = 32_768
MAX_PUSHED_RECORDS: Final = 256
"""Each costs the receiver a signature check."""


MAX_PUSHED_SETS: Final = 1_024
MAX_RIVALS: Final = 64


class PartitionSet(Message, frozen=True):
    """All that the sender holds of a partition after its operation `number`: packed location records."""

    partition: int
    number: int
    set_hash: int
    records: bytes


class Push(Message, frozen=True):
    """What the receiver should know, as a home of some partitions, of the sender's log.

    Fresh operations: sequences in the log and records. For peers in partitioned mode also `numbers`, packed
    u32, one an operation, in the log of its partition (0: the receiver is no home of it); whole partitions;
    and now and then an `audit`: `u16 partition | u32 number | u64 set hash` of each that the receiver should
    have, the next of which comes within `audit_seconds`. `sequence` is where the log is, when there are sets
    or an audit.
    """

    incarnation: int
    sequences: Annotated[list[int], Meta(max_length=MAX_PUSHED_OPERATIONS)]
    operations: bytes
    numbers: bytes = b""
    sequence: int = 0
    sets: Annotated[list[PartitionSet], Meta(max_length=MAX_PUSHED_SETS)] = []
    audit: bytes = b""
    audit_seconds: int = 0


class Pushed(Message, frozen=True):
    """Partitions that the receiver has not, and wants whole; and other versions, at others, of keys that were
    pushed."""

    behind: Annotated[list[int], Meta(max_length=MAX_PUSHED_SETS)] = []
    rivals: Annotated[list[Holding], Meta(max_length=MAX_RIVALS)] = []


class Replicate(Message, frozen=True):
    """Fetch this object from me and keep a copy of at least this version.

    The sender's signed peer record comes along: a fresh peer may ask before gossip has told of it. `replicas`: how
    many copies are wanted in all, for who holds it already and has heard of fewer; 0 says nothing. `proof`: that the
    version's writer wrote it with this root (`gossip.version_proofs`), which the copy keeps.
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


MAX_REPLICATED: Final = 64
"""Objects of one REPLICATE_MANY: as many as one signature proves."""


class ReplicateMany(Message, frozen=True):
    """Fetch these objects from me, who wrote them, and keep a copy of each: 1 to 64, all of one namespace.

    `slots` (64 bytes each) and `trailers` exactly as in the sender's memory. `signature`: the sender's, of the tree of
    all these versions (`gossip.version_proofs`), of which the receiver makes the proofs that the copies keep. The
    sender's signed peer record comes along as with REPLICATE.
    """

    slots: bytes
    trailers: Annotated[list[bytes], Meta(max_length=MAX_REPLICATED)]
    signature: bytes
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
    """A proof for each key, empty where there is none: see `gossip.version_proofs`."""

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
    """Packed signed cluster records, pushed to those whom they concern at once."""

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


class Ping(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    incarnation: int
    sequence: int


MAX_MEASURE_BYTES: Final = 16 * 1024 * 1024
"""Bulk bytes of one MEASURE, each way."""


class Measure(Message, frozen=True):
    """For `mooncake-p2p doctor`: send this many bytes of bulk; take those that came along (version 2)."""

    reply_bytes: int = 0


class Measured(Message, frozen=True):
    """The bulk is `reply_bytes` without meaning. `unix_ms` is the clock when the answer was made."""

    received_bytes: int
    unix_ms: int


class Store(Message, frozen=True):
    """Room for this value, please: its parts follow once there is. `sums` are packed u64, `root` is made
    of them; `clock` is the highest hybrid clock that the putting peer has seen."""

    namespace: str
    key: str
    length: int
    sums: bytes
    root: int
    clock: int
    replicas: int = 1
    pin: int = 0
    ttl_ms: int = 0
    overwrite: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Stored(Message, frozen=True):
    """How a put ended. `status` is a `p2pstore.local.local_messages.PutStatus`; the location `record` in the
    owner's log at (`incarnation`, `sequence`), empty when the object is elsewhere."""

    status: int
    copies: int
    wanted: int
    clock: int
    writer: int
    incarnation: int = 0
    sequence: int = 0
    record: bytes = b""


class StoreReply(Message, frozen=True):
    """With `send`, there is room: the parts are waited for. Otherwise what became of the put without
    them."""

    send: bool
    stored: Stored = Stored(0, 0, 0, 0, 0)


class StorePart(Message, frozen=True):
    """The value's bytes from `offset` on are the bulk: whole chunks, except at the value's end. Parts come
    in order; the one that completes the value is answered with `Stored`."""

    offset: int


class RdmaConnect(Message, frozen=True):
    """Let my queue pair read the memory that you share. It may as long as this connection lasts. The fields
    are `p2pstore.transfer.rdma.rdma_rules.Endpoint`: the end of the one who asks."""

    queue_pair: int
    packet_number: int
    gid: bytes
    path_mtu_bytes: int
    reads: int


class RdmaConnected(Message, frozen=True):
    """The other end, which is connected already, and the memory that it lets read: a whole segment, from its
    header on. `devices`: through how many of its devices at once it wants to be read, by a connection each."""

    queue_pair: int
    packet_number: int
    gid: bytes
    path_mtu_bytes: int
    reads: int
    address: int
    length_bytes: int
    key: int
    devices: int = 1


class GetManifest(Message, frozen=True):
    """The manifest of this version of a checkpoint."""

    version: bytes


class ManifestReply(Message, frozen=True):
    """The bulk is the manifest's bytes; who signed them, and the signature."""

    signer: bytes
    signature: bytes


class GetPiece(Message, frozen=True):
    """A piece of this version. Only peers that are linked are answered with one."""

    version: bytes
    piece: int


class PieceStatus(IntEnum):
    OK = 0
    BUSY = 1
    """No upload slot is free: a grant will come, over the link."""
    LACKS = 2
    NOT_LINKED = 3
    """There is no link to the one who asks, or no such version."""


class PieceReply(Message, frozen=True):
    """With status OK the bulk is the piece. `waiting`: how many wait for a slot."""

    status: int = PieceStatus.OK
    waiting: int = 0


class PieceTaken(Message, frozen=True):
    """One way: the piece that was sent last on this connection is here. Only that frees its slot, as a kernel takes
    whole pieces long before a slow link has sent them."""


class SwarmLink(Message, frozen=True):
    """Make this connection a link of the swarm of this version."""

    version: bytes


class SwarmLinked(Message, frozen=True):
    """It is one now."""


REQUESTS: Final[dict[int, type[Message]]] = {
    DataKind.HELLO: Hello,
    DataKind.PROOF: Proof,
    DataKind.GET: Get,
    DataKind.GET_SMALL: GetSmall,
    DataKind.LOOKUP: Lookup,
    DataKind.PUSH: Push,
    DataKind.REPLICATE: Replicate,
    DataKind.REPLICATE_MANY: ReplicateMany,
    DataKind.SNAPSHOT: Snapshot,
    DataKind.CLUSTER_RECORDS: ClusterRecords,
    DataKind.LIST: ListKeys,
    DataKind.STATISTICS: Statistics,
    DataKind.PING: Ping,
    DataKind.READS: Reads,
    DataKind.STORE: Store,
    DataKind.STORE_PART: StorePart,
    DataKind.SET_PINS: SetPins,
    DataKind.SET_EXPIRY: SetExpiry,
    DataKind.CHECK_COPY: CheckCopy,
    DataKind.MEASURE: Measure,
    DataKind.RDMA_CONNECT: RdmaConnect,
    DataKind.GET_MANIFEST: GetManifest,
    DataKind.GET_PIECE: GetPiece,
    DataKind.SWARM_LINK: SwarmLink,
    DataKind.PIECE_TAKEN: PieceTaken,
    DataKind.PROVE: Prove,
    DataKind.REMOVE: Remove,
    DataKind.FLUSH: Flush,
}
REPLIES: Final[dict[int, type[Message]]] = {
    DataKind.HELLO: HelloReply,
    DataKind.GET: Objects,
    DataKind.GET_SMALL: SmallObjects,
    DataKind.LOOKUP: Locations,
    DataKind.PUSH: Pushed,
    DataKind.REPLICATE: Replicated,
    DataKind.REPLICATE_MANY: ReplicatedMany,
    DataKind.SNAPSHOT: SnapshotReply,
    DataKind.CLUSTER_RECORDS: RecordsTaken,
    DataKind.LIST: Keys,
    DataKind.STATISTICS: StatisticsReply,
    DataKind.PING: Pong,
    DataKind.READS: ReadsTaken,
    DataKind.STORE: StoreReply,
    DataKind.STORE_PART: Stored,
    DataKind.SET_PINS: PinsSet,
    DataKind.SET_EXPIRY: ExpirySet,
    DataKind.CHECK_COPY: CopyChecked,
    DataKind.MEASURE: Measured,
    DataKind.RDMA_CONNECT: RdmaConnected,
    DataKind.GET_MANIFEST: ManifestReply,
    DataKind.GET_PIECE: PieceReply,
    DataKind.SWARM_LINK: SwarmLinked,
    DataKind.PROVE: Proofs,
    DataKind.REMOVE: Removed,
    DataKind.FLUSH: Flushed,
}
READ_KINDS: Final = frozenset(
    {
        DataKind.GET,
        DataKind.GET_SMALL,
        DataKind.LOOKUP,
        DataKind.LIST,
        DataKind.STATISTICS,
        DataKind.PING,
    }
)
"""What a ticket of scope READ allows."""
READER_KINDS: Final = READ_KINDS | {DataKind.SNAPSHOT, DataKind.RDMA_CONNECT, DataKind.MEASURE}
"""What a ticket made with a reader's key allows at most, whatever its scope: nothing that changes anything."""
WRITE_KINDS: Final = frozenset(
    {DataKind.STORE, DataKind.STORE_PART, DataKind.REMOVE, DataKind.FLUSH}
)
"""What a ticket of scope WRITE allows; the rest needs scope PEER. One made with a writer's key allows no more than
these and `READER_KINDS`."""
