"""Formats that peers exchange and keep: these bytes never change. A new format gets a new number."""

import pytest
from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.checkpoint_records import HeadBody, SwitchBody, checkpoint_digest
from p2pstore.gossip.exchange.digests import (
    Run,
    check_runs,
    pack_digest,
    pack_positions,
    pack_record_positions,
    pack_runs,
    read_runs,
    unpack_digest,
    unpack_positions,
)
from p2pstore.gossip.floors.cluster_records import ClusterRecords, pack_cells, read_cells
from p2pstore.gossip.floors.floor_stamps import hash_stamps, pack_stamps
from p2pstore.gossip.gossip_messages import Ack, Claim, Delta, Exchange, ExchangeReply, LogChunk, Status
from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.gossip.locations.log import SignedRun
from p2pstore.gossip.records import (
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    LocationRecord,
    LogHead,
    Participation,
    PeerRecord,
    SegmentOffer,
    Tier,
    TransportOffer,
    decode_location,
    floor_of_keys,
    format_peer_id,
    keys_of_floor,
    location_hash,
    member_of,
    peer_id_from_public_key,
    sign_cluster_record,
    sign_peer_record,
)
from p2pstore.objects import Version
from p2pstore.wire import decode_body, encode_body
from tests.unit.digest_rows import digest_from

PEER = peer_id_from_public_key(bytes(range(32)))
LOCATION = LocationRecord(
    bytes(range(16)),
    Version(0x0102030405060708, 0x090A, 0x1112131415161718),
    0x0B0C0D0E,
    0x0F1011,
    Tier.SSD,
    True,
    3,
    2,
)


class RecordingSigner:
    """Keeps what it was asked to sign."""

    def __init__(self) -> None:
        self.message = b""
        self.peer_id = PEER

    def sign(self, message: bytes) -> bytes:
        self.message = message
        return b"s" * 64


def test_names() -> None:
    assert format_peer_id(PEER) == "12D3KooW9pP4Seg3kZYhySpuVjn1RPdQBsUFZKiFxGMGQN5MeL6A"
    assert member_of(PEER) == 0x53A79C3110A99FBD
    assert weight(1, bytes(16)) == 0x15E0E6A489CC380E


def test_location_record() -> None:
    assert (
        LOCATION.encode().hex()
        == "000102030405060708090a0b0c0d0e0f08070605040302010a0918171615141312110e0d0c0b11100f55"
    )
    assert decode_location(LOCATION.encode()) == LOCATION
    removed = LocationRecord(bytes(16), Version(1, 2), 3, 4, removed=True)
    assert (
        removed.encode().hex()
        == "000000000000000000000000000000000100000000000000020000000000000000000300000004000080"
    )
    assert location_hash(LOCATION.encode()) == 0xB62047C50D3887AC


def test_digest_entry() -> None:
    packed = pack_digest(digest_from([(1, 2, 3, 4)]))
    assert packed.hex() == "01000000000000000200000000000000030000000400000000000000"
    assert pack_digest(unpack_digest(packed)) == packed


def test_what_those_say_who_know_the_same_members() -> None:
    digest = digest_from([(2, 5, 6, 7), (1, 2, 3, 0x0405060708)])
    assert digest.of.hash == 0x91F5CB63FC36CDE5
    packed = pack_positions(digest)
    assert packed is not None
    assert packed.hex() == "030000000807060504060000000700000000"
    assert pack_positions(unpack_positions(packed, digest.of)) == packed
    packed = pack_record_positions(digest)
    assert packed.hex() == "0300000006000000"
    assert unpack_positions(packed, digest.of).record_sequences.tolist() == [3, 6]
    assert unpack_positions(packed, digest.of).log_sequences.tolist() == [(1 << 40) - 1] * 2
    runs, operations, signatures = pack_runs(
        [
            Run(1, SignedRun(0x0908070605, bytes(84), b"\2" * 64)),
            Run(0, SignedRun(1, b"\1" * 42, b"\3" * 64)),
        ]
    )
    assert runs.hex() == "010002000506070809000001000100000000"
    assert operations == bytes(84) + b"\1" * 42
    assert signatures == b"\2" * 64 + b"\3" * 64
    rows, plain = check_runs(runs, operations, signatures)
    assert list(read_runs(rows, plain, signatures, digest.of)) == [
        LogChunk(2, 5, 0x0908070605, bytes(84), b"\2" * 64),
        LogChunk(1, 2, 1, b"\1" * 42, b"\3" * 64),
    ]


def test_cells() -> None:
    records = ClusterRecords()
    record = ClusterRecord(1, int(ClusterRecordKind.FLOOR), b"\x43\x42" + bytes(14), 5, 2, PEER)
    records.offer(record, sign_cluster_record(record, RecordingSigner()))
    packed = pack_cells(records, [3])
    assert len(packed) == 513
    assert packed[0] == 3
    assert packed[1 + 8 * 2 : 1 + 8 * 3].hex() == "446adc0822bb1d56"
    assert not any(packed[1 : 1 + 8 * 2] + packed[1 + 8 * 3 :])
    assert read_cells(packed) == {3: tuple(records.cell_hashes(3))}


def test_claim() -> None:
    claim = Claim(PEER, 1_700_000_000_000, int(Status.SUSPECT), 7)
    assert encode_body(claim).hex() == (
        "94c426002408011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
        "1fcf0000018bcfe568000107"
    )
    assert decode_body(Claim, encode_body(claim)) == claim


def test_ack() -> None:
    ack = Ack(7, [Claim(b"p" * 4, 1, 2, 3)], 1_795_399_088_000)
    golden = "93079194c40470707070010203cf000001a2061ff780"
    assert encode_body(ack).hex() == golden
    assert decode_body(Ack, bytes.fromhex(golden)) == ack
    older = bytes.fromhex("92079194c40470707070010203")
    assert decode_body(Ack, older) == replace(ack, unix_ms=0)


def test_peer_record() -> None:
    record = PeerRecord(
        format=1,
        peer_id=PEER,
        cluster="default",
        name="node",
        incarnation=1_700_000_000_000,
        sequence=2,
        host_id=b"h",
        control=["10.0.0.1:17946"],
        data=["10.0.0.1:17947"],
        socket="/s",
        transports=[TransportOffer("tcp", b"p")],
        segments=[SegmentOffer(b"seg", 4096)],
        memory_capacity=3,
        memory_used=4,
        ssd_capacity=5,
        ssd_used=6,
        load_permille=7,
        head=LogHead(8, 9, 10),
        leaving=True,
        software="x",
        topology=b"t",
        floors_horizon=11,
        directory=1,
        checkpoints=[Participation(b"n", b"v", 1, 500, True, b"c", "w", 7)],
        floors_end=12,
        floors_hash=13,
        floors_seen=14,
        memory_coldest=15,
    )
    signer = RecordingSigner()
    signed = sign_peer_record(record, signer)
    assert signed.body.hex() == (
        "dc001e01c426002408011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1fa764656661756c74a46e6f6465cf0000018bcfe5680002c4016891ae31302e302e302e31"
        "3a313739343691ae31302e302e302e313a3137393437a22f739192a3746370c401709192c4037365"
        "67cd100003040506079308090ac3a1780101c401740b019198c4016ec4017601cd01f4c3c40163a177070c0d0e0f"
    )
    assert signer.message == b"p2pstore peer record 1\0" + signed.body
    assert decode_body(PeerRecord, signed.body) == record


def test_a_peer_record_of_an_earlier_version() -> None:
    """It ends before `floors_horizon`, and so before `directory` and `checkpoints`."""
    earlier = bytes.fromhex(
        "dc001701c426002408011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1fa764656661756c74a46e6f6465cf0000018bcfe5680002c4016891ae31302e302e302e31"
        "3a313739343691ae31302e302e302e313a3137393437a22f739192a3746370c401709192c4037365"
        "67cd100003040506079308090ac3a1780101c40174"
    )
    record = decode_body(PeerRecord, earlier)
    assert (record.topology, record.floors_horizon, record.directory) == (b"t", 0, 0)
    assert record.checkpoints == []


def test_checkpoint_head_and_switch() -> None:
    head = HeadBody("space", "name", b"v" * 16, 1, 2, 3, 4, b"p" * 16, True)
    switch = SwitchBody("space", "name", b"v" * 16)
    assert encode_body(head).hex() == (
        "99a57370616365a46e616d65c4107676767676767676767676767676767601020304c41070707070"
        "707070707070707070707070c3"
    )
    assert encode_body(switch).hex() == ("93a57370616365a46e616d65c41076767676767676767676767676767676")
    assert checkpoint_digest("space", "name", PEER).hex() == "ad67362e6d9e130e1ccf852bda174eb4"


def test_exchange() -> None:
    exchange = Exchange(
        *(b"digest", 5, b"buckets", [], 1 << 56, 6, 7, b"positions", b"cells", b"hot"), 1_795_399_088_000
    )
    fields = (
        "c40664696765737405c4076275636b65747390cf01000000000000000607c409706f736974696f6e73c40563656c6c73"
        "c403686f74"
    )
    assert encode_body(exchange).hex() == "9b" + fields + "cf000001a2061ff780"
    assert decode_body(Exchange, encode_body(exchange)) == exchange
    before_unix_ms = bytes.fromhex("9a" + fields)
    assert decode_body(Exchange, before_unix_ms) == replace(exchange, unix_ms=0)
    before_positions = bytes.fromhex("96c40664696765737405c4076275636b65747390cf010000000000000006")
    assert decode_body(Exchange, before_positions) == Exchange(b"digest", 5, b"buckets", [], 1 << 56, 6)
    earlier = bytes.fromhex("94c40664696765737405c4076275636b65747390")
    assert decode_body(Exchange, earlier) == Exchange(b"digest", 5, b"buckets", [])


def test_exchange_reply() -> None:
    stamps = pack_stamps({2: 3, 1: 1 << 56})
    assert stamps.hex() == "0100000000000000000000000000000102000000000000000300000000000000"
    delta = Delta([], [], [], [], 9, b"runs", b"operations", b"s")
    reply = ExchangeReply(
        *(delta, b"digest", 5, b"buckets", 7, stamps, b"h", 8, b"positions", b"c", b"hot"),
        1_795_399_088_000,
    )
    fields = (
        "989090909009c40472756e73c40a6f7065726174696f6e73c40173c40664696765737405c4076275636b65747307c420"
        + stamps.hex()
        + "c4016808c409706f736974696f6e73c40163c403686f74"
    )
    assert encode_body(reply).hex() == "9c" + fields + "cf000001a2061ff780"
    assert decode_body(ExchangeReply, encode_body(reply)) == reply
    before_unix_ms = bytes.fromhex("9b" + fields)
    assert decode_body(ExchangeReply, before_unix_ms) == replace(reply, unix_ms=0)
    before_positions = bytes.fromhex(
        "979490909090c40664696765737405c4076275636b65747307c420" + stamps.hex() + "c40168"
    )
    delta = Delta([], [], [], [])
    assert decode_body(ExchangeReply, before_positions) == ExchangeReply(
        delta, b"digest", 5, b"buckets", 7, stamps, b"h"
    )
    earlier = bytes.fromhex("949490909090c40664696765737405c4076275636b657473")
    assert decode_body(ExchangeReply, earlier) == ExchangeReply(delta, b"digest", 5, b"buckets")


def test_horizon_hash() -> None:
    assert hash_stamps({2: 3, 1: 1 << 56}) == 977_694_753_469_879_511


def test_what_floors_of_keys_say() -> None:
    space, keys = bytes(range(16)), [b"a" * 16, b"b" * 16]
    alone = floor_of_keys(keys[:1], space, Version(1, 2), PEER)
    assert alone == ClusterRecord(
        1, int(ClusterRecordKind.FLOOR), keys[0], 1, 2, PEER, 0, encode_body(FloorBody(space))
    )
    assert alone.body.hex() == "92c410000102030405060708090a0b0c0d0e0fc400"
    assert decode_body(FloorBody, bytes.fromhex("91c410" + space.hex())) == FloorBody(space)
    both = floor_of_keys(keys, space, Version(1, 2), PEER)
    assert (both.scope, both.name.hex()) == (2, "3106330ede3673ae78e9b017358c794a")
    assert both.body.hex() == f"92c410{space.hex()}c420{b''.join(keys).hex()}"
    assert keys_of_floor(alone) == (keys[0],)
    assert keys_of_floor(both) == tuple(keys)
    for nonsense in (b"", bytes(15), bytes(16 * 65)):
        with pytest.raises(ProtocolError):
            keys_of_floor(replace(both, body=encode_body(FloorBody(space, nonsense))))


def test_cluster_record() -> None:
    record = ClusterRecord(
        1, int(ClusterRecordKind.FLOOR), bytes(range(16)), 1 << 60, 7, PEER, 1, b"body"
    )
    signer = RecordingSigner()
    signed = sign_cluster_record(record, signer)
    assert signed.body.hex() == (
        "980101c410000102030405060708090a0b0c0d0e0fcf100000000000000007c42600240801122000"
        "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f01c404626f6479"
    )
    assert signer.message == b"p2pstore cluster record 1\0" + signed.body
    assert decode_body(ClusterRecord, signed.body) == record
