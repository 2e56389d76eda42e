"""Records left out because they are stamped too far ahead are remembered, within bounds."""

from __future__ import annotations

from p2pstore.gossip.exchange.delta_checks import MAX_FLOORS, FutureRecords
from p2pstore.gossip.records import SCOPE_KEY, SCOPE_NAMESPACE, ClusterRecord, ClusterRecordKind


def record(
    name: bytes, clock: int, kind: int = ClusterRecordKind.FLOOR, scope: int = 0
) -> ClusterRecord:
    return ClusterRecord(1, int(kind), name, clock, 1, b"", scope)


def test_floors_are_known_by_their_names() -> None:
    future = FutureRecords()
    future.note_record(record(b"key", 50, scope=SCOPE_KEY))
    future.note_record(record(b"key", 40, scope=SCOPE_KEY))
    future.note_record(record(b"space", 60, scope=SCOPE_NAMESPACE))
    future.note_record(record(b"head", 70, ClusterRecordKind.CHECKPOINT_HEAD))
    assert future.newest == 70
    assert future.has_floor_of(b"key", b"", 49)
    assert not future.has_floor_of(b"key", b"", 50), "the clock has reached it"
    assert not future.has_floor_of(b"head", b"", 0)
    assert future.has_floor_of(b"other", b"space", 59)
    assert not future.has_floor_of(b"space", b"key", 0)


def test_of_too_many_floors_every_key_may_be_one() -> None:
    future = FutureRecords()
    for number in range(MAX_FLOORS + 1):
        future.note_record(record(b"%d" % number, 100 + number))
    assert future.has_floor_of(b"another", b"", 100)
    assert not future.has_floor_of(b"another", b"", 100 + MAX_FLOORS)
