"""What a peer counts for its metrics."""

from __future__ import annotations

from p2pstore.local.local_messages import PullCount
from p2pstore.runtime.histograms import Histogram
from p2pstore.status.measures import IN_PLACE, MAX_NAMESPACES, OTHERS, Measures, NamespaceUse


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
