"""The bytes on the local socket, held still: clients and peers of different versions meet there."""

import pytest

from p2pstore.checkpoint import checkpoint_messages as checkpoints
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local import older_put_messages as older
from p2pstore.local.local_protocol import LocalKind
from p2pstore.put_facts import PutOptions
from p2pstore.wire import ONE_WAY, PREFACE_LOCAL, REPLY, Message, decode_body, encode_frame
from tests.unit.golden_bytes import golden

GOLDEN = golden("local")
DIGEST = bytes(range(16))
HOLDER = local.Holder(*(1, b"\x01\x02", "n", ["h:1"], "/s", True, 2, 3, 4, 5, 0, b"c", b"s", b"k", 0, 6))
ITEM = older.CommitRow(7, "k", 3, b"\x01" * 8, 9, 2, 1, 60_000, True, False, "float32", (3,), DIGEST)
OPTIONS = PutOptions(2, 1, 60_000, True, False, "float32", (3,))

MESSAGES: dict[str, tuple[int, int, Message]] = {
    "hello": (
        LocalKind.HELLO,
        0,
        local_protocol.Hello(1, 1, "default", 1, 4242, "test", True, hazards=True),
    ),
    "hello reply": (
        LocalKind.HELLO,
        REPLY,
        local_protocol.HelloReply(
            *(1, b"\x01", "n", 5, [local_protocol.SegmentInfo(DIGEST, 4096)], 6, "v", 4096), hazards=True
        ),
    ),
    "reserve": (LocalKind.RESERVE, 0, local.Reserve([(4096, 128, 64)], "default")),
    "reserved": (
        LocalKind.RESERVE,
        REPLY,
        local.Reserved(
            [local.Span(2, 7, 4096, bytes(16)), local.Span(1, error=local.ItemError(11, "no"))]
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
    ),
    "committed": (
        LocalKind.COMMIT,
        REPLY,
        local.Committed([(2, local.PutOutcome(0, 1, 2, 3, 4))], [local.Span(1, 8, 4096, bytes(8))]),
    ),
    "reserve in rows": (LocalKind.RESERVE_ROWS, 0, older.ReserveRows([(4096, 128)], "default")),
    "reserved in rows": (
        LocalKind.RESERVE_ROWS,
        REPLY,
        older.ReservedRows([(7, 0, 8192, 4096, local.OK)]),
    ),
    "commit in rows": (
        LocalKind.COMMIT_ROWS,
        0,
        older.CommitRows("default", [ITEM], 4500, [(4096, 128)]),
    ),
    "committed in rows": (
        LocalKind.COMMIT_ROWS,
        REPLY,
        older.CommittedRows([local.PutOutcome(0, 1, 2, 3, 4)], [(8, 0, 4096, 4096, local.OK)]),
    ),
    "place": (LocalKind.PLACE, 0, local.Place(DIGEST, 4096, "n", 1)),
    "placed": (
        LocalKind.PLACE,
        REPLY,
        local.Placed([local.Target(b"p", "n", ["h:1"], b"c", b"s", b"k")], 5),
    ),
    "stored": (LocalKind.STORED, 0, local.StoredElsewhere(b"p", 7, 42, b"record")),
    "flush": (LocalKind.FLUSH, 0, local.Flush("n", 5000)),
    "checkpoint publish": (
        LocalKind.CHECKPOINT_PUBLISH,
        0,
        checkpoints.Publish("n", "m", ["a*"], ["b"], 65_536, True, "/d", "f"),
    ),
    "checkpoint published": (
        LocalKind.CHECKPOINT_PUBLISH,
        REPLY,
        checkpoints.Published(b"v" * 2, 1, 2, 3, 4),
    ),
    "checkpoint fetch": (
        LocalKind.CHECKPOINT_FETCH,
        0,
        checkpoints.Fetch("n", "m", "ab", b"p", True, 2, 7, True, 9, "/d", False, ["i"], ["e"], b"\x05"),
    ),
    "checkpoint fetched": (
        LocalKind.CHECKPOINT_FETCH,
        REPLY,
        checkpoints.Fetched(b"v" * 2, "d", 2, 1, False, ["p"]),
    ),
    "checkpoint progress": (LocalKind.CHECKPOINT_PROGRESS, 0, checkpoints.AskNews(3, 250)),
    "checkpoint progress reply": (
        LocalKind.CHECKPOINT_PROGRESS,
        REPLY,
        checkpoints.ProgressReply(4, "fetching", 5, 6, True, 7, b"v"),
    ),
    "checkpoint follow": (
        LocalKind.CHECKPOINT_FOLLOW,
        0,
        checkpoints.Follow("n", "m", b"p", 2, "/d", ["a"], ["b"]),
    ),
    "checkpoint follow news": (LocalKind.CHECKPOINT_FOLLOW_NEWS, 0, checkpoints.AskNews(3, 250)),
    "checkpoint follow news reply": (
        LocalKind.CHECKPOINT_FOLLOW_NEWS,
        REPLY,
        checkpoints.FollowNewsReply(4, b"p", "pn", b"v", "failed", b"c", 1, 2, "w", True),
    ),
    "checkpoint update": (LocalKind.CHECKPOINT_UPDATE, 0, checkpoints.Update("n", "m", 5000, 2)),
    "checkpoint updated": (
        LocalKind.CHECKPOINT_UPDATE,
        REPLY,
        checkpoints.Updated(
            b"v", True, False, 3, 2, 1, [checkpoints.FollowerEntry(b"p", "pn", "failed", 4, "w", True)]
        ),
    ),
    "checkpoint update news": (LocalKind.CHECKPOINT_UPDATE_NEWS, 0, checkpoints.AskNews(3, 250)),
    "checkpoint update news reply": (
        LocalKind.CHECKPOINT_UPDATE_NEWS,
        REPLY,
        checkpoints.UpdateNewsReply(4, b"v", 3, 2, 1, True, [], True),
    ),
    "checkpoint list": (LocalKind.CHECKPOINT_LIST, 0, checkpoints.ListCheckpoints("n", "m")),
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
    ),
    "checkpoint remove": (LocalKind.CHECKPOINT_REMOVE, 0, checkpoints.RemoveCheckpoint("n", "m", b"p")),
    "checkpoint removed": (LocalKind.CHECKPOINT_REMOVE, REPLY, checkpoints.CheckpointRemoved(b"v")),
    "flushed": (LocalKind.FLUSH, REPLY, local.Flushed(2, ["p"])),
    "abort": (LocalKind.ABORT, ONE_WAY, local.Abort([7])),
    "lease": (LocalKind.LEASE, 0, local.Lease(DIGEST, True, 10, 4500, "k")),
    "leased": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(1, 0, 4096, 3, 64, 5, 6, 7, source=8, transport="rdma")]),
    ),
    "refused": (
        LocalKind.LEASE,
        REPLY,
        local.Leased([local.LeaseGrant(0, 0, 0, 0, 0, error=local.ItemError(6, "no", 0))]),
    ),
    "release": (LocalKind.RELEASE, ONE_WAY, local.Release([1, 300])),
    "plan": (LocalKind.PLAN, 0, local.Plan(DIGEST, 0, 4500, [1], b"", "k")),
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
    ),
    "estimated": (
        LocalKind.ESTIMATE,
        REPLY,
        local.Estimated([local.ExpectedFetch(b"p", "n", 2, 3, 4096, 0.5, 0.25)], [0, -1]),
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
    ),
}


def test_the_preface() -> None:
    assert PREFACE_LOCAL == b"P2PSTORL"


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes(name: str) -> None:
    kind, flags, message = MESSAGES[name]
    frame = encode_frame(kind, 0x01020304, message, flags=flags)
    assert frame.hex() == GOLDEN[name]
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
