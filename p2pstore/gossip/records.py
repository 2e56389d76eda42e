"""Records that peers gossip: location records, peer records, cluster records. Pure codecs.

A location record is 42 bytes and says "I hold this version of this key, with this root". A peer record says who a
peer is and what it offers; a cluster record says something about the whole cluster (a floor, a
checkpoint's head or switch). Peer and cluster records are signed by the peer that wrote them;
location logs are vouched for by the set hash in their owner's signed record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
import xxhash

from p2pstore.errors import ProtocolError
from p2pstore.location_table import LOCATION
from p2pstore.location_table import LOCATION_BYTES as LOCATION_BYTES
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.objects import format_peer_id as format_peer_id
from p2pstore.wire import Message, Signer, Verifier, decode_body, encode_body

# --- who -------------------------------------------------------------------------------------

PeerId = bytes
"""A libp2p peer id (identity multihash of the ed25519 public key), as raw bytes."""

Member = int
"""A peer's short name in digests and records: the first 8 bytes of BLAKE2b of its peer id."""

PARTITION_COUNT: Final = 1_024
"""Operation numbers within one travel in 32 bits: 100 changes a second fill them in 1,300 years."""

ED25519_PREFIX: Final = bytes.fromhex("002408011220")
"""Multihash and protobuf header before the 32 public key bytes of an ed25519 peer id."""

_MEMBER_PERSON: Final = b"p2pstore.peer.1"
_REMEMBERED_NAMES: Final = 4096
"""Names of peers: holders look up that of a reader with each read."""


@lru_cache(_REMEMBERED_NAMES)
def member_of(peer_id: PeerId) -> Member:
    """The peer's 64-bit short name."""
    return int.from_bytes(
        hashlib.blake2b(peer_id, digest_size=8, person=_MEMBER_PERSON).digest(), "little"
    )


def partition_of(digest: bytes) -> int:
    """The partition of a key: the first ten bits, as a number."""
    return digest[0] << 2 | digest[1] >> 6


def writer_of(peer_id: PeerId) -> int:
    """The 16-bit hash that a version carries."""
    return writer_of_member(member_of(peer_id))


def writer_of_member(member: Member) -> int:
    """`writer_of` the peer with this short name."""
    return member & 0xFFFF


def peer_id_from_public_key(public_key: bytes) -> PeerId:
    """The libp2p peer id of a 32-byte ed25519 public key."""
    return ED25519_PREFIX + public_key


def public_key_from_peer_id(peer_id: PeerId) -> bytes:
    """The ed25519 public key inside a peer id. Raises `ProtocolError` for another kind of id."""
    if len(peer_id) != len(ED25519_PREFIX) + 32 or not peer_id.startswith(ED25519_PREFIX):
        raise ProtocolError("a peer id that holds no ed25519 key")
    return peer_id[len(ED25519_PREFIX) :]


# --- location records ------------------------------------------------------------------------

_REMOVED: Final = 0x80


class Tier(IntEnum):
    DRAM = 0
    SSD = 1
    BOTH = 2


class LocationRecord(msgspec.Struct, frozen=True, gc=False):
    """One peer's word that it holds (or, `removed`, no longer holds) a version of a key.

    flags byte: bits 0-1 tier, bit 2 soft, bits 3-4 replicas wanted (1, 2, 3, 4 or more),
    bits 5-6 pin, bit 7 removed. `size_units` is the length in 4 KiB units, rounded up.
    """

    digest: bytes
    version: Version
    slot: int
    size_units: int
    tier: Tier = Tier.DRAM
    soft: bool = False
    replicas: int = 1
    pin: int = 0
    removed: bool = False

    def encode(self) -> bytes:
        """42 bytes."""
        flags = self.tier | care_flags(self.replicas, self.pin)
        flags |= (4 if self.soft else 0) | (_REMOVED if self.removed else 0)
        size = self.size_units.to_bytes(3, "little")
        return LOCATION.pack(self.digest, *self.version, self.slot, size, flags)

    @property
    def identity(self) -> tuple[bytes, int, int]:
        """The identity of a record among its owner's: digest and version."""
        return self.digest, self.version.clock, self.version.writer


def care_flags(replicas: int, pin: int) -> int:
    """The flags of a location record that say how many copies are wanted, and how firmly they are pinned."""
    return (min(max(replicas, 1), 4) - 1) << 3 | (pin & 3) << 5


def decode_location(packed: bytes | memoryview, offset: int = 0) -> LocationRecord:
    """The record at `offset`. Every 42 bytes are a record; unknown tiers read as DRAM."""
    digest, clock, writer, root, slot, size, flags = LOCATION.unpack_from(packed, offset)
    tier = flags & 3
    return LocationRecord(
        digest,
        Version(clock, writer, root),
        slot,
        int.from_bytes(size, "little"),
        Tier(tier) if tier <= Tier.BOTH else Tier.DRAM,
        bool(flags & 4),
        (flags >> 3 & 3) + 1,
        flags >> 5 & 3,
        bool(flags & _REMOVED),
    )


def location_hash(packed: bytes) -> int:
    """One held record's part (by XOR) of its log's set hash; the removed flag does not occur."""
    return xxhash.xxh3_64_intdigest(packed)


# --- signed records --------------------------------------------------------------------------

PEER_RECORD_FORMAT: Final = 1
CLUSTER_RECORD_FORMAT: Final = 1
MAX_RECORD_BYTES: Final = 16 * 1024

_PEER_CONTEXT: Final = b"p2pstore peer record 1\0"
_CLUSTER_CONTEXT: Final = b"p2pstore cluster record 1\0"


class SignedRecord(Message, frozen=True):
    """A record's exact bytes and the signature over context and bytes."""

    body: bytes
    signature: bytes


class TransportOffer(Message, frozen=True):
    """A way to read this peer's segments: `tcp`, `shm`, `rdma`; `parameters` belong to the transport."""

    name: str
    parameters: bytes = b""


class SegmentOffer(Message, frozen=True):
    segment_id: bytes
    data_bytes: int


class LogHead(Message, frozen=True):
    """Where the peer's location log stands: its last sequence, and count and XOR hash of what it holds."""

    sequence: int = 0
    count: int = 0
    set_hash: int = 0


class TakesPart(IntEnum):
    """How a peer takes part in a version of a checkpoint, or in none yet."""

    FOLLOWING = 0
    """It waits, for a version or to fetch it."""
    FETCHING = 1
    VERIFIED = 2
    """It has all of it, verified and on its disk, but gives none of it away."""
    SEEDING = 3
    """As VERIFIED, and others may have it from here."""
    PUBLISHING = 4
    FAILED = 5


class Participation(Message, frozen=True):
    """A peer's part in one checkpoint. `name` is `checkpoint_digest` of what it is called and who publishes it, or
    empty; `version` the first 8 bytes of a version, empty for a follower that knows of none yet. `state` is a
    `TakesPart`; one that is not known means that it takes no part in moving pieces. `current` are the first 8 bytes of
    the version that a follower has switched to. `why` says why it failed. `needs_permille`: how much of the version it
    has, or wants to have, in the end; the done part is of that."""

    name: bytes
    version: bytes
    state: int
    done_permille: int = 0
    follows: bool = False
    current: bytes = b""
    why: str = ""
    needs_permille: int = 1000


MAX_PARTICIPATIONS: Final = 16
"""Of one peer; of a record with more, the first count."""
MAX_WHY_BYTES: Final = 120


class PeerRecord(Message, frozen=True):
    """Identity, addresses and offers of a peer. `sequence` grows with every change within an incarnation.

    `control` and `data` are `host:port` addresses (`[v6]:port`), `socket` the local socket's path on
    the host that `host_id` names. Sizes in bytes, `load_permille` of one core. `floors_horizon` is a
    hash of the floors' horizon that the peer has taken in (`floor_stamps`), 0 while there is none.
    `directory` is a `KeptDirectory`. `checkpoints` are those that the peer takes part in.
    `floors_end`, `floors_hash`, `floors_seen`: see `floor_sync`; an end of 0 comes from an older peer, which does not
    know floors of several keys. `memory_coldest`: when the object that would be evicted first was used last, in Unix
    seconds, as its policy has it; 0: not told.
    """

    format: int
    peer_id: bytes
    cluster: str
    name: str
    incarnation: int
    sequence: int
    host_id: bytes
    control: list[str]
    data: list[str]
    socket: str
    transports: list[TransportOffer]
    segments: list[SegmentOffer]
    memory_capacity: int
    memory_used: int
    ssd_capacity: int
    ssd_used: int
    load_permille: int
    head: LogHead
    leaving: bool = False
    software: str = ""
    min_protocol: int = 1
    max_protocol: int = 1
    topology: bytes = b""
    floors_horizon: int = 0
    directory: int = 0
    checkpoints: list[Participation] = []  # noqa: RUF012  # msgspec copies it
    floors_end: int = 0
    floors_hash: int = 0
    floors_seen: int = 0
    memory_coldest: int = 0


class ClusterRecordKind(IntEnum):
    FLOOR = 1
    CHECKPOINT_HEAD = 2
    CHECKPOINT_SWITCH = 3


SCOPE_KEY: Final = 0
SCOPE_NAMESPACE: Final = 1
SCOPE_KEYS: Final = 2
MAX_KEYS_OF_FLOOR: Final = 64
"""Keys of one floor record: forbidding them takes its receiver about as long as checking the signature."""


class ClusterRecord(Message, frozen=True):
    """Something the whole cluster keeps, whatever becomes of its writer. Highest version per (kind, name) wins.

    A floor's name is the digest of a key, of a namespace, or of the keys in its body (`scope` 0, 1, 2); its version
    forbids all copies that it covers. That of a checkpoint's head or switch is made of its publisher, too: see
    `checkpoints`.
    """

    format: int
    kind: int
    name: bytes
    clock: int
    writer: int
    signer: bytes
    scope: int = 0
    body: bytes = b""

    @property
    def version(self) -> Version:
        return Version(self.clock, self.writer)


class FloorBody(Message, frozen=True):
    """The body of a floor of keys: their namespace's digest, and with `SCOPE_KEYS` up to 64 digests."""

    namespace: bytes = b""
    keys: bytes = b""


def floor_of_keys(
    digests: Sequence[bytes], namespace: bytes, version: Version, signer: PeerId
) -> ClusterRecord:
    """A floor for at most 64 keys of one namespace; for one key in the form that older peers know, too."""
    keys = b"".join(digests)
    alone = len(digests) == 1
    return ClusterRecord(
        CLUSTER_RECORD_FORMAT,
        int(ClusterRecordKind.FLOOR),
        keys if alone else hashlib.blake2b(keys, digest_size=DIGEST_BYTES).digest(),
        version.clock,
        version.writer,
        signer,
        SCOPE_KEY if alone else SCOPE_KEYS,
        encode_body(FloorBody(namespace, b"" if alone else keys)),
    )


def keys_of_floor(record: ClusterRecord) -> tuple[bytes, ...]:
    """The digests that a floor forbids: of keys, or of one namespace with `SCOPE_NAMESPACE`. Raises `ProtocolError` for
    a list of keys that is empty, too long, or not whole."""
    if record.scope != SCOPE_KEYS:
        return (record.name,)
    keys = decode_body(FloorBody, record.body).keys
    count, rest = divmod(len(keys), DIGEST_BYTES)
    if rest or not 1 <= count <= MAX_KEYS_OF_FLOOR:
        raise ProtocolError(f"a floor with {len(keys):,} bytes of keys")
    return tuple(keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES))


class NewerFormat(ProtocolError):
    """A record of a format that this version does not know: left alone, and no reason to refuse what came with it."""


def read_peer_record(signed: SignedRecord) -> PeerRecord:
    """Decode without checking the signature. Raises `NewerFormat`, and `ProtocolError` for a long or malformed one."""
    return _read(signed, PeerRecord, PEER_RECORD_FORMAT)


def read_cluster_record(signed: SignedRecord) -> ClusterRecord:
    """Decode without checking the signature. Raises `NewerFormat`, and `ProtocolError` for a long or malformed one."""
    return _read(signed, ClusterRecord, CLUSTER_RECORD_FORMAT)


_Record = TypeVar("_Record", PeerRecord, ClusterRecord)


class _FormatOnly(Message, frozen=True):
    format: int


def _read(signed: SignedRecord, kind: type[_Record], known_format: int) -> _Record:
    if len(signed.body) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a record of {len(signed.body):,} bytes")
    number = decode_body(_FormatOnly, signed.body).format
    if number > known_format:
        raise NewerFormat(f"a record of format {number}; this version knows up to {known_format}")
    return decode_body(kind, signed.body)


def sign_peer_record(record: PeerRecord, signer: Signer) -> SignedRecord:
    """The record as it travels."""
    body = encode_body(record)
    return SignedRecord(body, signer.sign(_PEER_CONTEXT + body))


def open_peer_record(signed: SignedRecord, verifier: Verifier) -> PeerRecord:
    """`read_peer_record` and check the signature. Raises `ProtocolError` when its peer did not sign it."""
    record = read_peer_record(signed)
    public_key_from_peer_id(record.peer_id)
    if not verifier.verify(record.peer_id, _PEER_CONTEXT + signed.body, signed.signature):
        raise ProtocolError(f"a peer record that {format_peer_id(record.peer_id)} did not sign")
    return record


def sign_cluster_record(record: ClusterRecord, signer: Signer) -> SignedRecord:
    """The record as it travels; `record.signer` must be the signer."""
    body = encode_body(record)
    return SignedRecord(body, signer.sign(_CLUSTER_CONTEXT + body))


def open_cluster_record(signed: SignedRecord, verifier: Verifier) -> ClusterRecord:
    """`read_cluster_record`, and check the signature and the keys of a floor. Raises `ProtocolError` when its signer
    did not sign it, or the keys are no list of keys."""
    record = read_cluster_record(signed)
    public_key_from_peer_id(record.signer)
    if record.kind == ClusterRecordKind.FLOOR:
        keys_of_floor(record)
    if not verifier.verify(record.signer, _CLUSTER_CONTEXT + signed.body, signed.signature):
        raise ProtocolError("a cluster record with a wrong signature")
    return record
