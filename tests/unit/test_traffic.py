"""Counting what came from other peers and what clients did: totals, members, histograms and namespaces."""

import pytest

from p2pstore.client import read_ledger as pull_ledger
from p2pstore.client.read_ledger import (
    MAX_FALLBACKS,
    MAX_HOLDERS,
    MAX_SLOW_READS,
    MAX_UNSEEN,
    SLOW_SECONDS,
    ReadLedger,
)
from p2pstore.local.local_messages import PullCount, SlowRead, TransportFallback, UnseenRead
from p2pstore.memory.segment_layout import Slot, SlotState, TrailerBody
from p2pstore.objects import Version
from p2pstore.runtime.histograms import Histogram
from p2pstore.status import measures as traffic
from p2pstore.status.measures import (
    IN_PLACE,
    MAX_NAMESPACES,
    OTHERS,
    ROUND_TRIPS,
    Came,
    Measures,
    NamespaceUse,
    Traffic,
)
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.transport import Pulled, PullReport, RemoteCopy
from p2pstore.wire import Code

DIGEST = b"d" * 16


def report(*failed: str, pulled: str = "", length: int = 100) -> PullReport:
    """Attempts by these transports failed at member 1; then `pulled` delivered from member 2."""
    failures = tuple(HolderReport(1, Code.UNAVAILABLE, "gone", name) for name in failed)
    if not pulled:
        return PullReport(None, None, failures)
    slot = Slot(SlotState.LIVE, DIGEST, Version(1, 2), 0, length, 0)
    trailer = TrailerBody("default", "k", b"")
    copy = RemoteCopy(b"peer", member=2)
    return PullReport(Pulled(slot, trailer, length, pulled), copy, failures)


def test_uses_are_counted_by_member_and_in_all() -> None:
    counted = Traffic()
    counted.came(1, "tcp", Came(objects=2, length_bytes=300))
    counted.came(1, "tcp", Came(failures=1))
    counted.came(2, "shm", Came(objects=1, length_bytes=50))
    (use,) = counted.used(1).values()
    assert use.document() == {"objects": 2, "bytes": 300, "failures": 1}
    assert counted.used(3) == {}
    assert counted.document() == {
        "shm": {"objects": 1, "bytes": 50, "failures": 0},
        "tcp": {"objects": 2, "bytes": 300, "failures": 1},
    }


def test_how_long_reads_took_is_kept_by_member_and_in_all() -> None:
    counted, told = Traffic(), Histogram()
    told.add(1000, 5)
    counted.came(1, "tcp", Came(objects=5, durations=told.trimmed(), microseconds=told.total))
    counted.came(1, "tcp", Came(objects=1))
    counted.took(1, "tcp", 0.5)
    counted.took(2, "tcp", 0.5)  # nothing came from it
    durations = counted.used(1)["tcp"].durations
    assert (durations.quantile(0.5), durations.quantile(0.99)) == (1024, 1 << 19)
    assert counted.totals["tcp"].durations.count == 7
    assert counted.used(2) == {}


def test_the_round_trip_is_the_shortest_of_the_latest() -> None:
    counted = Traffic()
    assert counted.round_trip_seconds(b"p") is None
    for seconds in (0.02, 0.001, 0.5):
        counted.pinged(b"p", seconds)
    assert counted.round_trip_seconds(b"p") == 0.001
    for _ in range(ROUND_TRIPS):
        counted.pinged(b"p", 0.003)
    assert counted.round_trip_seconds(b"p") == 0.003


def test_strangers_cannot_make_it_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_PEERS", 3)
    counted = Traffic()
    for member in range(10):
        counted.came(member, "tcp", Came(objects=1))
        counted.pinged(bytes([member]), 1.0)
    assert [member for member in range(10) if counted.used(member)] == [7, 8, 9]
    assert counted.round_trip_seconds(b"\0") is None
    assert counted.totals["tcp"].objects == 10


def test_a_client_tells_what_it_read_and_what_was_slow() -> None:
    ledger = ReadLedger(lambda: None)
    assert not ledger
    ledger.pulled("k", DIGEST, report("shm", pulled="tcp"), SLOW_SECONDS / 2)
    ledger.pulled("k", DIGEST, report(pulled="tcp"), SLOW_SECONDS)
    ledger.pulled("k", DIGEST, report("tcp"), 2.0)
    assert ledger
    told = ledger.take()
    counts, slow = told.pulls, told.slow
    twice, took = Histogram(), Histogram()
    twice.add(100, 2)
    took.add_seconds(SLOW_SECONDS / 2)
    took.add_seconds(SLOW_SECONDS)
    assert counts == [
        PullCount(1, "shm", 0, 0, 1),
        PullCount(2, "tcp", 2, 200, 0, took.trimmed(), took.total, twice.trimmed()),
        PullCount(1, "tcp", 0, 0, 1),
    ]
    assert slow == [
        SlowRead(DIGEST, 2, "tcp", SLOW_SECONDS, 0, "k"),
        SlowRead(DIGEST, 1, "tcp", 2.0, int(Code.UNAVAILABLE), "k"),
    ]
    assert not ledger


def test_a_batch_counts_as_objects_of_its_mean_length() -> None:
    ledger = ReadLedger(lambda: None)
    ledger.count(1, "tcp", objects=3, length_bytes=3000)
    ledger.count(1, "tcp", failures=1)
    expected = Histogram()
    expected.add(1000, 3)
    counts = ledger.take().pulls
    assert counts == [PullCount(1, "tcp", 3, 3000, 1, [], 0, expected.trimmed())]


def test_a_report_is_bounded() -> None:
    ledger = ReadLedger(lambda: None)
    for member in range(MAX_HOLDERS + 5):
        ledger.count(member, "tcp", objects=1)
    for _ in range(MAX_SLOW_READS + 5):
        ledger.pulled("k", DIGEST, report(pulled="tcp"), 1.0)
    told = ledger.take()
    counts, slow = told.pulls, told.slow
    assert len(counts) == MAX_HOLDERS
    assert len(slow) == MAX_SLOW_READS
    assert pull_ledger.SLOW_SECONDS < 0.1  # below the peer's default threshold


def test_a_client_tells_which_transports_gave_way() -> None:
    ledger = ReadLedger(lambda: None)
    for text in ("refused", "x" * 1000):
        fallback = HolderReport(2, Code.UNAVAILABLE, text, "shm")
        ledger.pulled("k", DIGEST, report(pulled="tcp")._replace(fallbacks=(fallback,)), 0.0)
    assert ledger.take().fallbacks == [TransportFallback(2, "shm", 2, "x" * 200)]
    assert not ledger
    for member in range(MAX_FALLBACKS + 5):
        fallback = HolderReport(member, Code.UNAVAILABLE, "refused", "shm")
        ledger.pulled("k", DIGEST, report()._replace(fallbacks=(fallback,)), 0.0)
    assert len(ledger.take().fallbacks) == MAX_FALLBACKS


def test_a_client_tells_how_many_reads_found_nothing() -> None:
    ledger = ReadLedger(lambda: None)
    ledger.missed()
    ledger.missed()
    assert ledger
    assert ledger.take().misses == 2
    assert not ledger


def test_a_client_tells_of_reads_that_their_holder_did_not_see() -> None:
    ledger = ReadLedger(lambda: None)
    for _ in range(2):
        ledger.pulled("k", DIGEST, report(pulled="shm"), 0.0)
    ledger.pulled("k", DIGEST, report(pulled="tcp"), 0.0)
    ledger.pulled_only("k", DIGEST, 2, "shm", 100, 0.0)
    ledger.pulled_only("k", DIGEST, 2, "tcp", 100, 0.0)
    assert ledger.take().unseen == [UnseenRead(DIGEST, 2, 3)]
    assert not ledger
    for number in range(MAX_UNSEEN + 5):
        ledger.pulled("k", number.to_bytes(16, "little"), report(pulled="shm"), 0.0)
    assert len(ledger.take().unseen) == MAX_UNSEEN


def test_only_so_many_namespaces_are_kept_apart() -> None:
    measures = Measures()
    for number in range(MAX_NAMESPACES + 3):
        measures.put(f"n{number:02}", 10)
    measures.put("n00", 5)
    uses = measures.namespaces()
    assert len(uses) == MAX_NAMESPACES + 1
    assert uses["n00"] == NamespaceUse(puts=2, put_bytes=15)
    assert uses[OTHERS] == NamespaceUse(puts=3, put_bytes=30)
    measures.missed("never before", 2)
    measures.was_read("nor this one", IN_PLACE, 2, 80)
    assert uses[OTHERS] == NamespaceUse(3, 30, 2, 80, 2)


def test_a_namespace_of_which_nothing_is_told_takes_no_place() -> None:
    measures = Measures()
    measures.missed("n", 0)
    measures.was_read("n", IN_PLACE, 0, 0)
    measures.was_read("n", IN_PLACE, -3, 100)
    assert measures.namespaces() == {}


def test_reads_of_clients_come_in_bulk() -> None:
    measures, durations, lengths = Measures(), Histogram(), Histogram()
    for length in (5000, 7000):
        durations.add_seconds(0.001)
        lengths.add(length)
    told = PullCount(1, "tcp", 2, 12000, 0, durations.trimmed(), durations.total, lengths.trimmed())
    measures.client_pulled("tcp", told)
    assert measures.reads["tcp"].document() == durations.document()
    assert measures.read_bytes["tcp"].document() == lengths.document()


def test_an_older_client_tells_no_durations() -> None:
    measures = Measures()
    measures.client_pulled("tcp", PullCount(1, "tcp", 2, 12000))
    assert measures.reads == {}
    assert measures.read_bytes["tcp"].count == 2
    assert measures.read_bytes["tcp"].total == 12000


def test_requests_that_failed_are_counted_apart() -> None:
    measures = Measures()
    measures.answered("push", 0.002, served=True)
    measures.answered("push", 2.0, served=False)
    assert measures.asked["push"].count == 1
    assert measures.asked_in_vain == {"push": 1}
