"""Messages on data connections between peers, and from clients to remote peers. Pure.

The connecting side sends the preface `P2PSTORD`, then:

    client                                      server
    HELLO Hello(ticket, nonce)        ------->
                                      <-------  HELLO|REPLY HelloReply(nonce, proof)
    PROOF Proof(proof), requests ...  ------->
                                      <-------  replies, in any order

See `p2pstore.transfer.read_tickets` for what a ticket proves. A client may pipeline requests right after
its proof; a wrong proof closes the connection. Replies to GET and SNAPSHOT carry bulk bytes.

Requests may carry bulk bytes as well, and a value can be stored. No byte of it moves before there is room for it:

    STORE Store(key, sums, ...)       ------->  room is reserved
                                      <-------  STORE|REPLY StoreReply(), or what became of it without
    STORE_PART StorePart, bulk ...    ------->  every part but the last one-way
                                      <-------  STORE_PART|REPLY Stored

Until its last part came, a store has the connection for itself.

A connection on which SWARM_LINK was answered is a link between two peers of a swarm from then on: both sides send
frames of `p2pstore.checkpoint.swarm.swarm_messages`, one-way, at any time. Pieces are asked for on other connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from p2pstore.addresses import split_address
from p2pstore.home_messages import Push, Pushed
from p2pstore.objects import CHUNK_BYTES, DIGEST_BYTES
from p2pstore.transfer import peer_messages as peer
from p2pstore.wire import Code, Message, encode_failure

MIN_DATA_VERSION: Final = 3
MAX_DATA_VERSION: Final = 4
"""Versions of the data protocol. 3: clients of the release before; its peers do not join. 4: REPLICATE_MANY."""


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
    NAMES = 42


class Refused(Exception):
    """The connection ends: `frame`, with the code and the text, is sent, and one line is logged."""

    def __init__(self, kind: int, request_id: int, code: Code, text: str) -> None:
        super().__init__(text)
        self.frame = encode_failure(kind, request_id, code, text)


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
        """The wanted bytes of an object; none when it begins beyond their end (which asks for slot and
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
    """Many objects of one chunk, of 1 to `most_bytes` bytes. `digests` are packed, at most 512. `keeps` as for GET."""

    digests: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES * MAX_SMALL_ITEMS)]
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
    """Whether the reader keeps a copy of the object."""

    NO = 0
    """It is not kept, or the reader insists."""
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
    """How a put ended. `status` is a `p2pstore.put_facts.PutStatus`; the location `record` in the
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
    are `p2pstore.transfer.rdma.rdma_rules.Endpoint`: the end of the asking side."""

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
    """The bulk is the manifest's bytes; their signer, and the signature."""

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
    """There is no link to the asking peer, or no such version."""


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


MESSAGES: Final[dict[int, tuple[type[Message], type[Message] | None]]] = {
    DataKind.HELLO: (Hello, HelloReply),
    DataKind.PROOF: (Proof, None),
    DataKind.GET: (Get, Objects),
    DataKind.GET_SMALL: (GetSmall, SmallObjects),
    DataKind.LOOKUP: (peer.Lookup, peer.Locations),
    DataKind.PUSH: (Push, Pushed),
    DataKind.REPLICATE: (peer.Replicate, peer.Replicated),
    DataKind.REPLICATE_MANY: (peer.ReplicateMany, peer.ReplicatedMany),
    DataKind.SNAPSHOT: (peer.Snapshot, peer.SnapshotReply),
    DataKind.CLUSTER_RECORDS: (peer.ClusterRecords, peer.RecordsTaken),
    DataKind.LIST: (peer.ListKeys, peer.Keys),
    DataKind.NAMES: (peer.Names, peer.Named),
    DataKind.STATISTICS: (peer.Statistics, peer.StatisticsReply),
    DataKind.PING: (Ping, Pong),
    DataKind.READS: (peer.Reads, peer.ReadsTaken),
    DataKind.STORE: (Store, StoreReply),
    DataKind.STORE_PART: (StorePart, Stored),
    DataKind.SET_PINS: (peer.SetPins, peer.PinsSet),
    DataKind.SET_EXPIRY: (peer.SetExpiry, peer.ExpirySet),
    DataKind.CHECK_COPY: (peer.CheckCopy, peer.CopyChecked),
    DataKind.MEASURE: (Measure, Measured),
    DataKind.RDMA_CONNECT: (RdmaConnect, RdmaConnected),
    DataKind.GET_MANIFEST: (GetManifest, ManifestReply),
    DataKind.GET_PIECE: (GetPiece, PieceReply),
    DataKind.SWARM_LINK: (SwarmLink, SwarmLinked),
    DataKind.PIECE_TAKEN: (PieceTaken, None),
    DataKind.PROVE: (peer.Prove, peer.Proofs),
    DataKind.REMOVE: (peer.Remove, peer.Removed),
    DataKind.FLUSH: (peer.Flush, peer.Flushed),
}
"""Request and reply of each kind; None where there is no reply."""
REQUESTS: Final = {kind: request for kind, (request, _) in MESSAGES.items()}
REPLIES: Final = {kind: reply for kind, (_, reply) in MESSAGES.items() if reply is not None}
READ_KINDS: Final = frozenset(
    {
        DataKind.GET,
        DataKind.GET_SMALL,
        DataKind.LOOKUP,
        DataKind.LIST,
        DataKind.NAMES,
        DataKind.STATISTICS,
        DataKind.PING,
    }
)
"""Requests that a ticket of scope READ allows."""
READER_KINDS: Final = READ_KINDS | {DataKind.SNAPSHOT, DataKind.RDMA_CONNECT, DataKind.MEASURE}
"""The most that a ticket made with a reader's key allows, whatever its scope: no request that changes anything."""
WRITE_KINDS: Final = frozenset({DataKind.STORE, DataKind.STORE_PART, DataKind.REMOVE, DataKind.FLUSH})
"""Requests that a ticket of scope WRITE allows; the rest needs scope PEER. One made with a writer's key allows no more
than these and `READER_KINDS`."""

TLS_SCHEME: Final = "tls://"


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where to connect to, and whether TLS is spoken there: `HOST:PORT` (`[v6]:PORT`) is a peer that takes plain
    connections, `tls://HOST:PORT` one that takes TLS alone. A version that does not know a form takes it for an address
    that cannot be reached, and tries the next.
    """

    host: str
    port: int
    tls: bool = False


def over_tls(address: str) -> str:
    """The data address of a `HOST:PORT` where TLS is spoken."""
    return TLS_SCHEME + address


def split_data_address(address: str) -> DataAddress:
    """Raises `ConfigError` for a form that this version does not know."""
    tls = address.startswith(TLS_SCHEME)
    host, port = split_address(address.removeprefix(TLS_SCHEME), "data address")
    return DataAddress(host, port, tls)
