"""The bytes on the local socket, held still: clients and peers of different versions meet there."""

import pytest

from p2pstore.checkpoint import checkpoint_messages as checkpoints
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local import older_put_messages as older
from p2pstore.local.local_protocol import LocalKind
from p2pstore.put_facts import PutFacts, PutOptions
from p2pstore.wire import ONE_WAY, PREFACE_LOCAL, REPLY, Message, decode_body, encode_frame

DIGEST = bytes(range(16))
HOLDER = local.Holder(*(1, b"\x01\x02", "n", ["h:1"], "/s", True, 2, 3, 4, 5, 0, b"c", b"s", b"k", 0, 6))
ITEM = PutFacts(7, "k", 3, b"\x01" * 8, 9, 2, 1, 60_000, True, False, "float32", (3,), DIGEST)
OPTIONS = PutOptions(2, 1, 60_000, True, False, "float32", (3,))


GOLDEN: dict[str, tuple[int, int, Message, str]] = {
    "hello": (
        LocalKind.HELLO,
        0,
        local_protocol.Hello(1, 1, "default", 1, 4242, "test", True, hazards=True),
        "010000000403020119000000000000009a0101a764656661756c7401cd1092a474657374c3c2c400c3",
    ),
    "hello reply": (
        LocalKind.HELLO,
        REPLY,
        local_protocol.HelloReply(
            *(1, b"\x01", "n", 5, [local_protocol.SegmentInfo(DIGEST, 4096)], 6, "v", 4096), hazards=True
        ),
        (
            "01000100040302012a000000000000009c01c40101a16e059193c410000102030405060708090a0b"
            "0c0d0e0fcd10009006a176cd10000000c301"
        ),
    ),
    "reserve": (
        LocalKind.RESERVE,
        0,
        local.Reserve([(4096, 128, 64)], "default"),
        ("26000000040302011100000000000000929193cd1000cc8040a764656661756c74"),
    ),
    "reserved": (
        LocalKind.RESERVE,
        REPLY,
        local.Reserved(
            [local.Span(2, 7, 4096, bytes(16)), local.Span(1, error=local.ItemError(11, "no"))]
        ),
        (
            "26000100040302012a000000000000009192950207cd1000c410000000000000000000000000000000009300"
            "a00095010000c400930ba26e6f00"
        ),
    ),
    "commit": (
        LocalKind.COMMIT,
        0,
        local.Commit(
            "default",
            ["k"],
            [(7, 1)],
            [3],
            b"\x01" * 8,
            [OPTIONS],
            DIGEST,
            [(4096, 128, 1)],
            at_hand=True,
        ),
        (
            "27000000040302014a0000000000000099a764656661756c7491a16b919207019103c4080101010101010101"
            "91970201cdea60c3c2a7666c6f617433329103c410000102030405060708090a0b0c0d0e0f9193cd1000cc80"
            "01c3"
        ),
    ),
    "committed": (
        LocalKind.COMMIT,
        REPLY,
        local.Committed([(2, local.PutOutcome(0, 1, 2, 3, 4))], [local.Span(1, 8, 4096, bytes(8))]),
        (
            "27000100040302012300000000000000929192029600010203049300a00091950108cd1000c4080000000000"
            "0000009300a000"
        ),
    ),
    "reserve in rows": (
        LocalKind.RESERVE_ROWS,
        0,
        older.ReserveRows([(4096, 128)], "default"),
        ("10000000040302011000000000000000929192cd1000cc80a764656661756c74"),
    ),
    "reserved in rows": (
        LocalKind.RESERVE_ROWS,
        REPLY,
        older.ReservedRows([(7, 0, 8192, 4096, local.OK)]),
        ("10000100040302010f000000000000009191950700cd2000cd10009300a000"),
    ),
    "commit in rows": (
        LocalKind.COMMIT_ROWS,
        0,
        older.CommitRows("default", [ITEM], 4500, [(4096, 128)]),
        (
            "1100000004030201480000000000000095a764656661756c74919d07a16b03c40801010101010101"
            "01090201cdea60c3c2a7666c6f617433329103c410000102030405060708090a0b0c0d0e0fcd1194"
            "9192cd1000cc80c2"
        ),
    ),
    "committed in rows": (
        LocalKind.COMMIT_ROWS,
        REPLY,
        older.CommittedRows([local.PutOutcome(0, 1, 2, 3, 4)], [(8, 0, 4096, 4096, local.OK)]),
        ("11000100040302011a0000000000000092919600010203049300a00091950800cd1000cd10009300a000"),
    ),
    "place": (
        LocalKind.PLACE,
        0,
        local.Place(DIGEST, 4096, "n", 1),
        ("2400000004030201190000000000000094c410000102030405060708090a0b0c0d0e0fcd1000a16e01"),
    ),
    "placed": (
        LocalKind.PLACE,
        REPLY,
        local.Placed([local.Target(b"p", "n", ["h:1"], b"c", b"s", b"k")], 5),
        ("24000100040302011b00000000000000939196c40170a16e91a3683a31c40163c40173c4016b059300a000"),
    ),
    "stored": (
        LocalKind.STORED,
        0,
        local.StoredElsewhere(b"p", 7, 42, b"record"),
        ("25000000040302010e0000000000000094c40170072ac4067265636f7264"),
    ),
    "flush": (
        LocalKind.FLUSH,
        0,
        local.Flush("n", 5000),
        ("2000000004030201060000000000000092a16ecd1388"),
    ),
    "checkpoint publish": (
        LocalKind.CHECKPOINT_PUBLISH,
        0,
        checkpoints.Publish("n", "m", ["a*"], ["b"], 65_536, True, "/d", "f"),
        ("3000000004030201170000000000000098a16ea16d91a2612a91a162ce00010000c3a22f64a166"),
    ),
    "checkpoint published": (
        LocalKind.CHECKPOINT_PUBLISH,
        REPLY,
        checkpoints.Published(b"v" * 2, 1, 2, 3, 4),
        ("3000010004030201090000000000000095c402767601020304"),
    ),
    "checkpoint fetch": (
        LocalKind.CHECKPOINT_FETCH,
        0,
        checkpoints.Fetch("n", "m", "ab", b"p", True, 2, 7, True, 9, "/d", False, ["i"], ["e"], b"\x05"),
        ("31000000040302011d000000000000009ea16ea16da26162c40170c30207c309a22f64c291a16991a165c40105"),
    ),
    "checkpoint fetched": (
        LocalKind.CHECKPOINT_FETCH,
        REPLY,
        checkpoints.Fetched(b"v" * 2, "d", 2, 1, False, ["p"]),
        ("31000100040302010d0000000000000096c4027676a1640201c291a170"),
    ),
    "checkpoint progress": (
        LocalKind.CHECKPOINT_PROGRESS,
        0,
        checkpoints.AskNews(3, 250),
        ("320000000403020104000000000000009203ccfa"),
    ),
    "checkpoint progress reply": (
        LocalKind.CHECKPOINT_PROGRESS,
        REPLY,
        checkpoints.ProgressReply(4, "fetching", 5, 6, True, 7, b"v"),
        ("320001000403020112000000000000009704a86665746368696e670506c307c40176"),
    ),
    "checkpoint follow": (
        LocalKind.CHECKPOINT_FOLLOW,
        0,
        checkpoints.Follow("n", "m", b"p", 2, "/d", ["a"], ["b"]),
        ("3800000004030201120000000000000097a16ea16dc4017002a22f6491a16191a162"),
    ),
    "checkpoint follow news": (
        LocalKind.CHECKPOINT_FOLLOW_NEWS,
        0,
        checkpoints.AskNews(3, 250),
        ("390000000403020104000000000000009203ccfa"),
    ),
    "checkpoint follow news reply": (
        LocalKind.CHECKPOINT_FOLLOW_NEWS,
        REPLY,
        checkpoints.FollowNewsReply(4, b"p", "pn", b"v", "failed", b"c", 1, 2, "w", True),
        ("39000100040302011a000000000000009a04c40170a2706ec40176a66661696c6564c401630102a177c3"),
    ),
    "checkpoint update": (
        LocalKind.CHECKPOINT_UPDATE,
        0,
        checkpoints.Update("n", "m", 5000, 2),
        ("3a00000004030201090000000000000094a16ea16dcd138802"),
    ),
    "checkpoint updated": (
        LocalKind.CHECKPOINT_UPDATE,
        REPLY,
        checkpoints.Updated(
            b"v", True, False, 3, 2, 1, [checkpoints.FollowerEntry(b"p", "pn", "failed", 4, "w", True)]
        ),
        ("3a000100040302011c0000000000000097c40176c3c20302019196c40170a2706ea66661696c656404a177c3"),
    ),
    "checkpoint update news": (
        LocalKind.CHECKPOINT_UPDATE_NEWS,
        0,
        checkpoints.AskNews(3, 250),
        ("3b0000000403020104000000000000009203ccfa"),
    ),
    "checkpoint update news reply": (
        LocalKind.CHECKPOINT_UPDATE_NEWS,
        REPLY,
        checkpoints.UpdateNewsReply(4, b"v", 3, 2, 1, True, [], True),
        ("3b000100040302010b000000000000009804c40176030201c390c3"),
    ),
    "checkpoint list": (
        LocalKind.CHECKPOINT_LIST,
        0,
        checkpoints.ListCheckpoints("n", "m"),
        ("3c00000004030201050000000000000092a16ea16d"),
    ),
    "checkpoints": (
        LocalKind.CHECKPOINT_LIST,
        REPLY,
        checkpoints.ListedCheckpoints(
            [
                checkpoints.CheckpointEntry(
                    *("n", "m", b"p", "pn", b"v", 1, 2, 3, 4, 5, b"o", b"s", True, True, True),
                    [
                        checkpoints.MemberEntry(
                            b"p", "pn", b"v", "seeding", 6, True, b"c", "w", 7, True, 500
                        )
                    ],
                )
            ]
        ),
        (
            "3c000100040302013f000000000000009191dc0010a16ea16dc40170a2706ec401760102030405c4016fc40173"
            "c3c3c3919bc40170a2706ec40176a773656564696e6706c3c40163a17707c3cd01f4"
        ),
    ),
    "checkpoint remove": (
        LocalKind.CHECKPOINT_REMOVE,
        0,
        checkpoints.RemoveCheckpoint("n", "m", b"p"),
        ("3d00000004030201080000000000000093a16ea16dc40170"),
    ),
    "checkpoint removed": (
        LocalKind.CHECKPOINT_REMOVE,
        REPLY,
        checkpoints.CheckpointRemoved(b"v"),
        ("3d00010004030201040000000000000091c40176"),
    ),
    "flushed": (
        LocalKind.FLUSH,
        REPLY,
        local.Flushed(2, ["p"]),
        ("20000100040302010500000000000000920291a170"),
    ),
    "abort": (LocalKind.ABORT, ONE_WAY, local.Abort([7]), ("12000400040302010300000000000000919107")),
    "lease": (
        LocalKind.LEASE,
        0,
        local.Lease(DIGEST, True, 10, 4500, "k"),
        ("13000000040302011a0000000000000095c410000102030405060708090a0b0c0d0e0fc30acd1194a16b"),
    ),
    "leased": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(1, 0, 4096, 3, 64, 5, 6, 7, source=8, transport="rdma")]),
        ("1300010004030201170000000000000091919b0100cd100003400506079300a00008a472646d61"),
    ),
    "refused": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(0, 0, 0, 0, 0, error=local.ItemError(6, "no", 0))]),
        ("1300010004030201130000000000000091919b00000000000000009306a26e6f0000a0"),
    ),
    "release": (
        LocalKind.RELEASE,
        ONE_WAY,
        local.Release([1, 300]),
        ("14000400040302010600000000000000919201cd012c"),
    ),
    "plan": (
        LocalKind.PLAN,
        0,
        local.Plan(DIGEST, 0, 4500, [1], b"", "k"),
        ("15000000040302011d0000000000000096c410000102030405060708090a0b0c0d0e0f00cd11949101c400a16b"),
    ),
    "planned": (
        LocalKind.PLAN,
        REPLY,
        local.Planned(
            [
                local.PlanItem([HOLDER], False, 1, through_peer=True, on_ssd=True),
                local.PlanItem([], True),
            ],
            3,
        ),
        (
            "15000100040302013a0000000000000092929691dc001001c4020102a16e91a3683a31a22f73c3020304"
            "0500c40163c40173c4016b0006c2019300a000c3c39690c3009300a000c2c203"
        ),
    ),
    "report": (
        LocalKind.REPORT,
        ONE_WAY,
        local.Report(
            [local.AccessCount(DIGEST, 2, 8192, 1)],
            [local.HolderFailure(DIGEST, 1, 7, 2, 3)],
            [local.PullCount(1, "tcp", 2, 300, 1, [0, 2], 3, [0, 0, 1])],
            [local.SlowRead(DIGEST, 1, "tcp", 0.5, 7, "k")],
            [local.TransportFallback(1, "shm", 2, "no")],
            3,
            [local.UnseenRead(DIGEST, 1, 2)],
            [local.ReadTiming(1, True, 2, 300, 9)],
        ),
        (
            "16000400040302019600000000000000989194c410000102030405060708090a0b0c0d0e0f02cd20"
            "00019195c410000102030405060708090a0b0c0d0e0f01070203919801a374637002cd012c01920002"
            "03930000019196c410000102030405060708090a0b0c0d0e0f01a3746370cb3fe000000000000007"
            "a16b919401a373686d02a26e6f039193c410000102030405060708090a0b0c0d0e0f0102"
            "919501c302cd012c09"
        ),
    ),
    "estimated": (
        LocalKind.ESTIMATE,
        REPLY,
        local.Estimated([local.ExpectedFetch(b"p", "n", 2, 3, 4096, 0.5, 0.25)], [0, -1]),
        "23000100040302012200000000000000929197c40170a16e0203cd1000cb3fe0000000000000cb3fd00000000000009200ff",
    ),
    "peers": (
        LocalKind.PEERS,
        REPLY,
        local.PeersReply(
            [
                local.PeerEntry(
                    *(b"\x01", "n", "alive", 5, ["h:1"], ["h:2"], 6, 7, 8, False, "v", 0.5, 0.25),
                    [local.TransportUse("tcp", 1, 2, 3, 4, 5)],
                    "full",
                    900,
                    True,
                )
            ]
        ),
        (
            "1b0001000403020147000000000000009191dc0011c40101a16ea5616c6976650591a3683a3191a3"
            "683a32060708c2a176cb3fe0000000000000cb3fd00000000000009196a37463700102030405a466"
            "756c6ccd0384c3"
        ),
    ),
}


def test_the_preface() -> None:
    assert PREFACE_LOCAL == b"P2PSTORL"


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes(name: str) -> None:
    kind, flags, message, expected = GOLDEN[name]
    frame = encode_frame(kind, 0x01020304, message, flags=flags)
    assert frame.hex() == expected
    assert decode_body(type(message), frame[16:]) == message


def test_the_numbers_of_the_kinds() -> None:
    assert {kind.name: kind.value for kind in LocalKind} == {
        "HELLO": 1,
        **{
            name: number
            for number, name in enumerate(
                (
                    *("RESERVE_ROWS", "COMMIT_ROWS", "ABORT", "LEASE", "RELEASE", "PLAN", "REPORT"),
                    *("CONTAINS", "LOCATE", "REMOVE", "LIST", "PEERS", "STATISTICS", "LEAVE"),
                    *("REPLICATE", "PIN", "FLUSH", "PREFETCH", "MATCH_PREFIX", "ESTIMATE"),
                ),
                16,
            )
        },
        "PLACE": 36,
        "STORED": 37,
        "RESERVE": 38,
        "COMMIT": 39,
        "CHECKPOINT_PUBLISH": 48,
        "CHECKPOINT_FETCH": 49,
        "CHECKPOINT_PROGRESS": 50,
        "CHECKPOINT_FOLLOW": 56,
        "CHECKPOINT_FOLLOW_NEWS": 57,
        "CHECKPOINT_UPDATE": 58,
        "CHECKPOINT_UPDATE_NEWS": 59,
        "CHECKPOINT_LIST": 60,
        "CHECKPOINT_REMOVE": 61,
    }
