"""The bytes on the local socket, held still: clients and peers of different versions meet there."""

from __future__ import annotations

import pytest

from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.wire import ONE_WAY, PREFACE_LOCAL, REPLY, Message, decode_body, encode_frame

DIGEST = bytes(range(16))
HOLDER = local.Holder(*(1, b"\x01\x02", "n", ["h:1"], "/s", True, 2, 3, 4, 5, 0, b"c", b"s", b"k"))
ITEM = local.CommitItem(7, "k", 3, b"\x01" * 8, 9, 2, 1, 60_000, True, False, "float32", (3,))

GOLDEN: dict[str, tuple[int, int, Message, str]] = {
    "hello": (
        LocalKind.HELLO,
        0,
        local.Hello(1, 1, "default", 1, 4242, "test"),
        ("01000000040302011400000000000000960101a764656661756c7401cd1092a474657374"),
    ),
    "hello reply": (
        LocalKind.HELLO,
        REPLY,
        local.HelloReply(1, b"\x01", "n", 5, [local.SegmentInfo(DIGEST, 4096)], 6, "v"),
        (
            "010001000403020122000000000000009701c40101a16e059192c410000102030405060708090a0b"
            "0c0d0e0fcd100006a176"
        ),
    ),
    "reserve": (
        LocalKind.RESERVE,
        0,
        local.Reserve([local.ReserveItem(4096, 128)]),
        ("10000000040302010800000000000000919192cd1000cc80"),
    ),
    "reserved": (
        LocalKind.RESERVE,
        REPLY,
        local.Reserved([local.Reservation(7, 0, 8192, 4096)]),
        ("10000100040302010f000000000000009191950700cd2000cd10009300a000"),
    ),
    "commit": (
        LocalKind.COMMIT,
        0,
        local.Commit("default", [ITEM], 4500, [local.ReserveItem(4096, 128)]),
        (
            "1100000004030201350000000000000094a764656661756c74919c07a16b03c40801010101010101"
            "01090201cdea60c3c2a7666c6f617433329103cd11949192cd1000cc80"
        ),
    ),
    "committed": (
        LocalKind.COMMIT,
        REPLY,
        local.Committed([local.PutOutcome(0, 1, 2, 3, 4)], [local.Reservation(8, 0, 4096, 4096)]),
        ("11000100040302011a0000000000000092919600010203049300a00091950800cd1000cd10009300a000"),
    ),
    "abort": (
        LocalKind.ABORT,
        ONE_WAY,
        local.Abort([7]),
        ("12000400040302010300000000000000919107"),
    ),
    "lease": (
        LocalKind.LEASE,
        0,
        local.Lease(DIGEST, True, 10, 4500),
        ("1300000004030201180000000000000094c410000102030405060708090a0b0c0d0e0fc30acd1194"),
    ),
    "leased": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(1, 0, 4096, 3, 64, 5, 6, 7)]),
        ("130001000403020111000000000000009191990100cd100003400506079300a000"),
    ),
    "refused": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(0, 0, 0, 0, 0, error=local.ItemError(6, "no", 0))]),
        ("1300010004030201110000000000000091919900000000000000009306a26e6f00"),
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
        local.Plan(DIGEST, 0, 4500, [1]),
        ("1500000004030201190000000000000094c410000102030405060708090a0b0c0d0e0f00cd11949101"),
    ),
    "planned": (
        LocalKind.PLAN,
        REPLY,
        local.Planned([local.PlanItem([HOLDER], False, 1), local.PlanItem([], True)]),
        (
            "15000100040302013100000000000000919294919e01c4020102a16e91a3683a31a22f73c3020304"
            "0500c40163c40173c4016bc2019300a0009490c3009300a000"
        ),
    ),
    "report": (
        LocalKind.REPORT,
        ONE_WAY,
        local.Report(
            [local.AccessCount(DIGEST, 2, 8192)], [local.HolderFailure(DIGEST, 1, 7, 2, 3)]
        ),
        (
            "16000400040302013100000000000000929193c410000102030405060708090a0b0c0d0e0f02cd20"
            "009195c410000102030405060708090a0b0c0d0e0f01070203"
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
                    *("RESERVE", "COMMIT", "ABORT", "LEASE", "RELEASE", "PLAN", "REPORT"),
                    *("CONTAINS", "LOCATE", "REMOVE", "LIST", "PEERS", "STATISTICS", "LEAVE"),
                    *("REPLICATE", "PIN", "FLUSH", "PREFETCH", "MATCH_PREFIX"),
                ),
                16,
            )
        },
    }
