"""The exact bytes of data connections. A change here breaks peers of the version before."""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from p2pstore.access.keyring import KeyRing, writer_key_of
from p2pstore.gossip.links.identity import Identity
from p2pstore.home_messages import Holding, PartitionSet, Push, Pushed
from p2pstore.memory.segment_layout import Slot, SlotState, TrailerBody, encode_slot, encode_trailer
from p2pstore.objects import KIB, MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.transfer.data_messages import (
    DataKind,
    Get,
    GetItem,
    GetManifest,
    GetPiece,
    GetSmall,
    Hello,
    HelloReply,
    Keeps,
    ManifestReply,
    Measure,
    Measured,
    ObjectReply,
    Objects,
    ObjectStatus,
    PieceReply,
    PieceStatus,
    PieceTaken,
    Ping,
    Pong,
    Proof,
    RdmaConnect,
    RdmaConnected,
    SmallObjects,
    Store,
    Stored,
    StorePart,
    StoreReply,
    SwarmLink,
    SwarmLinked,
    Ticket,
    over_tls,
)
from p2pstore.transfer.peer_messages import (
    CheckCopy,
    CopyChecked,
    ExpiryItem,
    ExpirySet,
    Flush,
    Flushed,
    Locations,
    Lookup,
    Named,
    Names,
    PinItem,
    PinsSet,
    Proofs,
    Prove,
    ReadCount,
    Reads,
    ReadsTaken,
    Remove,
    Removed,
    Replicate,
    ReplicatedMany,
    ReplicateMany,
    SetExpiry,
    SetPins,
)
from p2pstore.transfer.read_tickets import Scope, TicketClaims, issue_ticket, prove, ticket_secret
from p2pstore.transfer.tls_streams import bound_secret, make_certificate
from p2pstore.wire import (
    ERROR,
    HEADER,
    ONE_WAY,
    PREFACE_DATA,
    REPLY,
    Code,
    Message,
    decode_body,
    encode_failure,
    encode_frame,
)
from tests.unit.golden_bytes import golden


class Signer:
    peer_id = b"issuer"

    def sign(self, message: bytes) -> bytes:
        return b"signed " + message[:24]


VALUE = b"hello, world"
DIGEST = key_digest("key")
SUMS = chunk_sums(VALUE)
TRAILER = encode_trailer(TrailerBody("default", "key", SUMS))
SLOT = encode_slot(
    Slot(
        SlotState.LIVE,
        DIGEST,
        Version(5, 6, root_checksum(len(VALUE), SUMS)),
        8192,
        len(VALUE),
        len(TRAILER),
    )
)
TICKET = Ticket(b"claims", b"signature")
STORED = Stored(1, 2, 3, 5, 6, 7, 42, b"record")

FRAMES: dict[str, tuple[int, int, Message, int, int]] = {
    "hello": (DataKind.HELLO, 0, Hello(1, 1, TICKET, b"n" * 4, "sw"), 0, 0),
    "hello reply": (DataKind.HELLO, 0, HelloReply(1, b"m" * 4, b"p" * 4, 9, "sw"), REPLY, 0),
    "proof": (DataKind.PROOF, 0, Proof(b"p" * 4), 0, 0),
    "get": (DataKind.GET, 1, Get([GetItem(DIGEST), GetItem(DIGEST, 64, 64, 7)]), 0, 0),
    "get elsewhere": (DataKind.GET, 1, Get([GetItem(DIGEST)], may_refuse=True), 0, 0),
    "get small": (DataKind.GET_SMALL, 1, GetSmall(DIGEST + b"d" * 16, MIB, 1), 0, 0),
    "get small reply": (DataKind.GET_SMALL, 1, SmallObjects(SLOT + bytes(64)), REPLY, 12),
    "get reply": (
        DataKind.GET,
        1,
        Objects(
            [
                ObjectReply(ObjectStatus.OK, SLOT, TRAILER, len(VALUE)),
                ObjectReply(ObjectStatus.NOT_FOUND, incarnation=7, sequence=42),
                ObjectReply(ObjectStatus.BUSY, others=[3, 4]),
            ]
        ),
        REPLY,
        len(VALUE),
    ),
    "lookup": (DataKind.LOOKUP, 2, Lookup(DIGEST), 0, 0),
    "push": (
        DataKind.PUSH,
        3,
        Push(7, [42], b"op", b"numb", 8, [PartitionSet(1023, 3, 4, b"set")], b"audit", 10),
        ONE_WAY,
        0,
    ),
    "pushed": (DataKind.PUSH, 3, Pushed([1023], [Holding(1, 2, 3, b"record")]), REPLY, 0),
    "locations": (DataKind.LOOKUP, 2, Locations([[Holding(1, 2, 3, b"r")], []], [1]), REPLY, 0),
    "replicate": (DataKind.REPLICATE, 4, Replicate(DIGEST, 5, 6, 12, True, replicas=3), 0, 0),
    "replicate many": (
        *(DataKind.REPLICATE_MANY, 14),
        ReplicateMany(b"s" * 64, [b"trailer"], b"signature", b"record", b"its signature"),
        *(0, 0),
    ),
    "replicated many": (DataKind.REPLICATE_MANY, 14, ReplicatedMany(b"\0\x0b"), REPLY, 0),
    "prove": (DataKind.PROVE, 9, Prove(DIGEST), 0, 0),
    "proofs": (DataKind.PROVE, 9, Proofs([b"proof", b""]), REPLY, 0),
    "ping": (DataKind.PING, 5, Ping(), 0, 0),
    "pong": (DataKind.PING, 5, Pong(7, 42), REPLY, 0),
    "measure": (DataKind.MEASURE, 8, Measure(1 << 20), 0, 3),
    "measured": (DataKind.MEASURE, 8, Measured(3, 1_800_000_000_000), REPLY, 1 << 20),
    "reads": (DataKind.READS, 13, Reads([ReadCount(DIGEST, 3)]), 0, 0),
    "reads taken": (DataKind.READS, 13, ReadsTaken(), REPLY, 0),
    "set pins": (DataKind.SET_PINS, 10, SetPins([PinItem(DIGEST, 5, 6)], 1, 1000), 0, 0),
    "pins set": (DataKind.SET_PINS, 10, PinsSet(b"\1\0"), REPLY, 0),
    "set expiry": (
        DataKind.SET_EXPIRY,
        16,
        SetExpiry([ExpiryItem(DIGEST, 5, 6, 1_800_000_000_000)]),
        0,
        0,
    ),
    "expiry set": (DataKind.SET_EXPIRY, 16, ExpirySet(b"\1\0"), REPLY, 0),
    "check copy": (DataKind.CHECK_COPY, 17, CheckCopy(DIGEST, True), 0, 0),
    "copy checked": (DataKind.CHECK_COPY, 17, CopyChecked(False, 7, 8), REPLY, 0),
    "store": (
        DataKind.STORE,
        6,
        Store("default", "key", 12, SUMS, 9, 5, 2, 1, 60_000, True, "float32", (3, 4)),
        0,
        0,
    ),
    "store: send": (DataKind.STORE, 6, StoreReply(True), REPLY, 0),
    "store: unchanged": (DataKind.STORE, 6, StoreReply(False, STORED), REPLY, 0),
    "store part": (DataKind.STORE_PART, 7, StorePart(0), ONE_WAY, 16 * 1024 * 1024),
    "stored": (DataKind.STORE_PART, 7, STORED, REPLY, 0),
    "rdma connect": (DataKind.RDMA_CONNECT, 9, RdmaConnect(17, 99, b"g" * 16, 4096, 16), 0, 0),
    "rdma connected": (
        DataKind.RDMA_CONNECT,
        9,
        RdmaConnected(18, 98, b"h" * 16, 1024, 8, 1 << 46, 1 << 30, 7, 2),
        REPLY,
        0,
    ),
    "get manifest": (DataKind.GET_MANIFEST, 10, GetManifest(b"v" * 16), 0, 0),
    "manifest": (DataKind.GET_MANIFEST, 10, ManifestReply(b"me", b"signature"), REPLY, 7),
    "get piece": (DataKind.GET_PIECE, 11, GetPiece(b"v" * 16, 300), 0, 0),
    "piece": (DataKind.GET_PIECE, 11, PieceReply(), REPLY, 9),
    "piece: busy": (DataKind.GET_PIECE, 11, PieceReply(PieceStatus.BUSY, 3), REPLY, 0),
    "piece taken": (DataKind.PIECE_TAKEN, 0, PieceTaken(), ONE_WAY, 0),
    "swarm link": (DataKind.SWARM_LINK, 12, SwarmLink(b"v" * 16), 0, 0),
    "swarm linked": (DataKind.SWARM_LINK, 12, SwarmLinked(), REPLY, 0),
    "remove": (DataKind.REMOVE, 18, Remove("default", ["key"]), 0, 0),
    "removed": (DataKind.REMOVE, 18, Removed([True]), REPLY, 0),
    "flush": (DataKind.FLUSH, 19, Flush("default", 2000), 0, 0),
    "flushed": (DataKind.FLUSH, 19, Flushed(2, ["b"]), REPLY, 0),
    "names": (DataKind.NAMES, 20, Names("default", DIGEST), 0, 0),
    "named": (DataKind.NAMES, 20, Named(["key"]), REPLY, 0),
}
GOLDEN = golden("data")
FAILURE = "10000300060000000900000000000000930ea56c6174657201"
CLAIMS = (
    "9801c404a3093ce5c406697373756572c40861756469656e6365cf000001a3185e24c0c410696969"
    "6969696969696969696969696901a0"
)
OLDER_CLAIMS = "97" + CLAIMS[2:-2]
SECRET = "917ce48944983eb313981ead9bf169b65774d41f4255c952a2fd24b56b546efd"
CLIENT_PROOF = "4b1beb44de538831af837a90b4e3f0cc0e61291b9554a76c5f9c6c256b90865d"
SERVER_PROOF = "63c8ebed5ca3e5e1282a9aeb6175b2d5f5c931d35cd8d2d29491993392419831"
OLDER_SECRET = "a9efde98dcaec9ad8b69c852f3590255b70079a81a3f7b7af6b73c7a85c4c8b5"
WRITER_KEY = "a6eedd033d5c1fdff796e37cb30f780153e59ca4efaa476f58df729834b3a0b8"


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_frames(name: str) -> None:
    kind, request_id, message, flags, bulk_length = FRAMES[name]
    frame = encode_frame(kind, request_id, message, flags=flags, bulk_length=bulk_length)
    assert frame.hex() == GOLDEN[name]


def test_a_small_read_of_an_earlier_version() -> None:
    """It ends after the digests, and is answered with what has up to 64 KiB."""
    asked = decode_body(GetSmall, bytes.fromhex("91c410") + DIGEST)
    assert asked == GetSmall(DIGEST, 64 * KIB, Keeps.NO)


def test_a_push_of_an_earlier_version() -> None:
    """It ends before `numbers`; and what answered it was empty."""
    assert decode_body(Push, bytes.fromhex("9307912ac4026f70")) == Push(7, [42], b"op")
    assert decode_body(Pushed, bytes.fromhex("90")) == Pushed()
    assert decode_body(Locations, bytes.fromhex("919190")) == Locations([[]])


def test_reads_of_an_earlier_version() -> None:
    """A GET ends before `keeps`, and an answer before `keep`."""
    get = "929194c410dccec363d9fb256bb2d52a0704475a00000000c3"
    assert decode_body(Get, bytes.fromhex(get)) == Get([GetItem(DIGEST)], True, int(Keeps.NO))
    busy = decode_body(Objects, bytes.fromhex("9191" + "9702c400c400000000920304"))
    assert busy == Objects([ObjectReply(ObjectStatus.BUSY, others=[3, 4])])
    assert not busy.items[0].keep


def test_header_preface_and_failure() -> None:
    assert PREFACE_DATA == b"P2PSTORD"
    assert HEADER.size == 16
    failure = encode_failure(DataKind.GET, 6, Code.BUSY, "later", 1)
    assert failure.hex() == FAILURE
    assert REPLY | ERROR == 3


def test_ticket_secret_and_proof() -> None:
    granted = issue_ticket(
        signer=Signer(),
        ring=KeyRing([b"k" * 32]),
        audience=b"audience",
        now_unix=1_800_000_000.0,
        ticket_id=b"i" * 16,
        scope=Scope.READ,
    )
    assert granted.ticket.claims.hex() == CLAIMS
    assert granted.ticket.signature == b"signed p2pstore ticket claims 1"[:31]
    assert granted.secret.hex() == SECRET
    assert prove(granted.secret, b"client", b"c" * 32, b"s" * 32).hex() == CLIENT_PROOF
    assert prove(granted.secret, b"server", b"c" * 32, b"s" * 32).hex() == SERVER_PROOF
    assert writer_key_of(b"k" * 32, "a").hex() == WRITER_KEY


def test_a_ticket_of_an_earlier_version() -> None:
    """It ends before the namespace, and its secret is that of what it has."""
    claims = bytes.fromhex(OLDER_CLAIMS)
    assert decode_body(TicketClaims, claims).namespace == ""
    assert ticket_secret(b"k" * 32, claims).hex() == OLDER_SECRET


# --- TLS -----------------------------------------------------------------------------------------


def test_tls() -> None:
    """The peer's signature over a certificate's key and times, the name of its place, and a ticket's secret."""
    key = ec.derive_private_key(12345, ec.SECP256R1())
    made = make_certificate(Identity(bytes([1]) * 32), 1_800_000_000, key)
    certificate = x509.load_der_x509_certificate(made.der)
    assert certificate.not_valid_before_utc.timestamp() == 1_800_000_000 - 3600
    assert certificate.not_valid_after_utc.timestamp() == 1_800_000_000 + 7 * 86_400
    (extension,) = certificate.extensions
    assert extension.oid.dotted_string == "2.25.330051757334202964865493182548981595895"
    assert isinstance(extension.value, x509.UnrecognizedExtension)
    assert extension.value.value.hex() == (
        "791d7ac31359063d4fbe7a0e9e4953eb32135803d7083c4d3c7a334952530e21"
        "9f45a9d624f851f678cc4e544e984780c8165cd3edd4b1b927a83a854c53e90f"
    )
    assert (
        bound_secret(b"secret", b"certificate").hex()
        == "3e36efcce5b7188dd97f6289e152d8c51f540de1d845f0a072a9a42d2ae99ccc"
    )
    assert over_tls("10.0.0.1:17947") == "tls://10.0.0.1:17947"
