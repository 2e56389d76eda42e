"""A peer's statistics of its clients' reports."""

import logging

import pytest

from p2pstore.checkpoint.checkpoint_messages import AskNews
from p2pstore.core.operation import AskPeer, LoadObject, PullObject
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import Access, LocalClient, LocalKind
from p2pstore.memory.segment_layout import Slot, SlotState, TrailerBody
from p2pstore.objects import Version, key_digest
from p2pstore.put_facts import PutOptions
from p2pstore.runtime.histograms import Histogram
from p2pstore.status import operation_watch
from p2pstore.status.measures import NamespaceUse
from p2pstore.status.operation_watch import PeerWatch
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.transport import Pulled, PullReport, RemoteCopy
from p2pstore.wire import Code, Empty, Failure
from tests.unit.core_harness import Harness

CLIENT = LocalClient(1, "default", Access.WRITE, 7, "")


@pytest.fixture
def watch() -> PeerWatch:
    return PeerWatch(Harness().core, threshold_seconds=0.1)


def take(watch: PeerWatch, report: local.Report) -> None:
    watch.answered(CLIENT, LocalKind.REPORT, report, None, 0.0, None)


def test_fallbacks_of_clients_are_counted_and_told_once(
    watch: PeerWatch, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = local.Report([], fallbacks=[local.TransportFallback(9, "shm", 3, "refused")])
    works = local.Report([], pulls=[local.PullCount(9, "shm", 1, 10)])
    with caplog.at_level(logging.WARNING, "p2pstore.peer"):
        take(watch, fallback)
        take(watch, fallback)
        assert len(caplog.records) == 1
        take(watch, works)
        take(watch, fallback)
    assert watch._counters["transport_fallbacks"] == 9
    assert len(caplog.records) == 2
    assert "shm to" in caplog.text
    assert "(refused)" in caplog.text


def test_what_was_told_of_transports_is_bounded(
    watch: PeerWatch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_watch, "MAX_REMEMBERED", 2)
    for member in (1, 2, 3, 3, 1):
        take(watch, local.Report([], fallbacks=[local.TransportFallback(member, "shm", 1, "refused")]))
    assert len(caplog.records) == 4, "what was forgotten is told again"


def test_transports_that_a_client_makes_up_count_as_one(watch: PeerWatch) -> None:
    for number in range(100):
        take(watch, local.Report([], pulls=[local.PullCount(1, f"t{number}", 1, 10)]))
    take(watch, local.Report([], pulls=[local.PullCount(1, "tcp", 1, 10)]))
    document = watch.traffic.document()
    assert {name: use["objects"] for name, use in document.items()} == {"other": 100, "tcp": 1}


def counted(watch: PeerWatch) -> dict[str, int]:
    return {name: count for name, count in watch._counters.items() if count}


def test_reads_elsewhere_are_counted_when_they_have_ended(watch: PeerWatch) -> None:
    """However many plans they took."""
    digest = key_digest("k")
    plan = local.Plan(digest, key="k")
    for _ in range(3):
        watch.answered(CLIENT, LocalKind.PLAN, plan, local.Planned([]), 0.0, None)
    assert counted(watch) == {}
    take(watch, local.Report([], pulls=[local.PullCount(1, "tcp", 2, 10, 4)], misses=3))
    assert counted(watch) == {"client_reads_elsewhere": 2, "client_misses": 3}


def test_leases_are_counted_by_where_the_object_was(watch: PeerWatch) -> None:
    digest = key_digest("k")
    good = local.Leased([local.LeaseGrant(1, 0, 0, 1, 1)])
    nobody = local.ItemError(int(Code.NO_SUCH_KEY), "no")
    missing = local.Leased([local.LeaseGrant(0, 0, 0, 0, 0, error=nobody)])

    def answered(fetch: bool, answer: local.Leased) -> None:
        watch.answered(CLIENT, LocalKind.LEASE, local.Lease(digest, fetch=fetch), answer, 0.0, None)

    answered(False, good)
    answered(False, missing)  # the client asks again, with fetch
    answered(True, missing)
    answered(True, good)
    assert counted(watch) == {"client_leases": 1, "client_misses": 1, "client_reads_elsewhere": 1}


def put_of(namespace: str, count: int, lengths: list[int]) -> local.Commit:
    return local.Commit(namespace, ["k"] * count, [(1, count)], lengths, b"", [PutOptions()])


def test_what_was_kept_was_not_put(watch: PeerWatch) -> None:
    outcomes = [
        (2, local.PutOutcome(0, 1, 1, 1, 1)),
        (1, local.PutOutcome(2, 2, 1, 1, 1)),
        (3, local.PutOutcome(0, 0, 0, 0, 0, local.ItemError(int(Code.UNAVAILABLE), "no"))),
    ]
    commit, committed = put_of("default", 6, [100, 7, 9, 9, 9, 9]), local.Committed(outcomes)
    watch.answered(CLIENT, LocalKind.COMMIT, commit, committed, 0.0, None)
    assert counted(watch) == {
        "client_puts": 2,
        "client_put_bytes": 107,
        "client_puts_kept_existing": 1,
        "client_puts_failed": 3,
    }


def test_what_its_holders_gave_is_measured(watch: PeerWatch) -> None:
    pull = PullObject(1, b"d" * 16, (), 1.0)
    slot = Slot(SlotState.LIVE, b"d" * 16, Version(1, 2), 0, 100, 0)
    pulled = Pulled(slot, TrailerBody("default", "k", b""), 100, "tcp")
    watch.pulled(pull, PullReport(pulled, RemoteCopy(b"peer", member=2), ()), None, 0.003)
    assert watch.traffic.used(2)["tcp"].durations.total == 3000
    assert (watch.measures.reads["tcp"].total, watch.measures.read_bytes["tcp"].total) == (3000, 100)
    watch.loaded(LoadObject(1, b"d" * 16), 70, 0.002)
    watch.loaded(LoadObject(1, b"d" * 16), -1, 0.002)
    assert (watch.measures.reads["ssd"].total, watch.measures.read_bytes["ssd"].count) == (2000, 1)


def test_what_clients_do_is_measured_by_namespace(watch: PeerWatch) -> None:
    client = LocalClient(1, "tenant", Access.WRITE, 7, "")
    commit = put_of("another", 1, [100])
    committed = local.Committed([(1, local.PutOutcome(0, 1, 2, 1, 1))])
    watch.answered(client, LocalKind.COMMIT, commit, committed, 0.002, None)
    told = Histogram()
    told.add_seconds(0.001)
    report = local.Report(
        [local.AccessCount(key_digest("k"), 2, 300)],
        pulls=[local.PullCount(1, "tcp", 1, 50, 0, told.trimmed(), told.total, [0, 0, 0, 1])],
        misses=4,
    )
    watch.answered(client, LocalKind.REPORT, report, None, 0.0, None)
    leased = local.Leased([local.LeaseGrant(1, 0, 0, 7, 1)])
    watch.answered(client, LocalKind.LEASE, local.Lease(b"d" * 16, fetch=False), leased, 0.001, None)
    measures = watch.measures
    assert measures.namespaces() == {
        "another": NamespaceUse(puts=1, put_bytes=100),
        "tenant": NamespaceUse(reads=4, read_bytes=357, misses=4),
    }
    assert measures.put_bytes.total == 100
    assert watch._counters["client_puts_short_of_copies"] == 1
    assert measures.reads["tcp"].total == told.total
    assert (measures.read_bytes["local"].count, measures.read_bytes["local"].total) == (3, 307)
    assert measures.read_bytes["tcp"].total == 50
    assert {name: each.count for name, each in measures.requests.items()} == {"commit": 1, "lease": 1}


def test_waiting_that_a_client_asked_for_is_not_measured(watch: PeerWatch) -> None:
    waits = local.Plan(key_digest("k"), wait_ms=5000)
    watch.answered(CLIENT, LocalKind.PLAN, waits, local.Planned([]), 4.0, None)
    takes_its_time = AskNews(1)
    watch.answered(CLIENT, LocalKind.CHECKPOINT_PROGRESS, takes_its_time, None, 4.0, None)
    assert watch.measures.requests == {}


def test_requests_to_other_peers_are_measured(watch: PeerWatch) -> None:
    push = AskPeer(0, 0, b"peer", DataKind.PUSH, Empty(), 1.0)
    for reply in (Empty(), Failure(int(Code.BUSY), "busy"), None):
        watch.asked(push, reply, 0.01)
    assert watch.measures.asked["push"].count == 1
    assert watch.measures.asked_in_vain == {"push": 2}


@pytest.mark.parametrize("said", ["the key", "another key", "x" * 5000, ""])
def test_a_slow_read_is_shown_by_its_key_when_the_client_says_the_right_one(
    watch: PeerWatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    digest = key_digest("the key")
    shown = said if said == "the key" else digest.hex()
    with caplog.at_level(logging.INFO, "p2pstore.peer"):
        take(watch, local.Report([], slow=[local.SlowRead(digest, 1, "tcp", 2.0, key=said)]))
    assert f"slow get of {shown}:" in caplog.text
    plan = local.Plan(digest, key=said)
    watch.answered(CLIENT, LocalKind.PLAN, plan, local.Planned([]), 1.0, None)
    kept = watch.slow.document()["operations"]
    assert [each["key"] for each in kept] == [shown, shown]
