"""The parts of the status page: members in their order, recent counts, checkpoints, the page itself."""

import json
import re
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from p2pstore.gossip.checkpoint_records import Head, HeadBody, short_version
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Participation, TakesPart, member_of, sign_peer_record
from p2pstore.objects import GIB
from p2pstore.runtime.histograms import Histogram
from p2pstore.status.checkup import (
    MAX_SHOWN,
    MAX_WRONG,
    RecentCounts,
    failures,
    member_document,
    name_of,
    progress,
    progress_document,
    survey,
    versions_of,
)
from p2pstore.status.doctor.finding import MAX_NAME_LETTERS, shown
from p2pstore.status.measures import Request, SlowOperation, SlowOperations, Stage
from p2pstore.status.metrics import histograms
from p2pstore.status.status_page import StatusSource, page_bytes, page_headers, slow_document
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.gossip_network import peer_record

HOSTILE = "<script>alert(1)</script>\u202e\n\x1b[2J"


def member(number: int, status: Status = Status.ALIVE, since: float = 0.0, **said: Any) -> MemberState:
    fields = {"name": f"p{number:04}", "memory_capacity": GIB, "memory_used": GIB // 4, **said}
    record = peer_record(number, **fields)
    state = MemberState(record.peer_id, member_of(record.peer_id), status, 1, since)
    state.note(record, sign_peer_record(record, SimulatedSigner(record.peer_id)))
    return state


def test_missing_members_come_first_the_latest_at_the_top() -> None:
    states = [member(number) for number in (5, 1, 3)]
    states += [member(7, Status.DEAD, 10.0), member(8, Status.DEAD, 90.0)]
    states += [member(6, Status.SUSPECT), member(4, leaving=True), member(9, Status.LEFT)]
    unknown = MemberState(peer_id_of(11), member_of(peer_id_of(11)), Status.DEAD, 1, 0.0)
    found = survey([*states, unknown], me=peer_id_of(3))
    names = [(state, name_of(each)) for state, each in found.shown]
    assert names == [
        *(("dead", "p0008"), ("dead", "p0007"), ("suspect", "p0006"), ("leaving", "p0004")),
        *(("alive", "p0003"), ("alive", "p0001"), ("alive", "p0005")),
    ]
    assert found.counts == {"dead": 2, "suspect": 1, "leaving": 1, "alive": 3, "left": 1}
    assert found.live == 5
    assert (found.memory_capacity, found.memory_used) == (5 * GIB, 5 * GIB // 4)


def test_of_thousands_of_members_some_are_shown_and_all_are_counted() -> None:
    """And it takes a few milliseconds of processor time, whatever they call themselves."""
    states = [member(number, name=HOSTILE + "n" * 200) for number in range(1500)]
    for each in states[:500]:
        each.status = Status.DEAD
    began = time.process_time()
    found = survey(states, me=peer_id_of(1400))
    assert time.process_time() - began < 0.05  # 1 to 2 ms on a quiet machine
    assert (found.counts["dead"], found.counts["alive"]) == (500, 1000)
    assert len(found.shown) == MAX_SHOWN
    assert [state for state, _ in found.shown].count("dead") == MAX_WRONG
    assert peer_id_of(1400) in {each.peer_id for _, each in found.shown}
    document = [member_document(each, state, 100.0, None) for state, each in found.shown]
    assert len(json.dumps(document)) < 64_000


def test_a_member_says_nothing_that_steers_and_no_address() -> None:
    document = member_document(member(1, name=HOSTILE, control=["10.9.8.7:1"]), "dead", 30.0, 0.001)
    assert document["name"] == "<script>alert(1)</script>\\u202e\\n\\x1b[2J"
    assert document["state_seconds"] == 30.0
    assert document["round_trip_seconds"] == 0.001
    assert "10.9.8.7" not in json.dumps(document)
    assert len(shown("x" * 500)) == MAX_NAME_LETTERS
    assert versions_of([member(1, software="b"), member(2, software="a")]) == ["a", "b"]


def test_recent_counts_are_kept_for_a_while() -> None:
    recent = RecentCounts(intervals=3)
    assert recent.document(["gets"]) == {"seconds": [], "grown": {"gets": []}}
    for step in range(6):
        recent.sample({"gets": step * step, "puts": 0}, now=10.0 * step)
    assert recent.document(["gets"]) == {"seconds": [10.0, 10.0, 10.0], "grown": {"gets": [5, 7, 9]}}
    seconds, grown = recent.since({"gets": 30, "puts": 2}, now=55.0)
    assert (seconds, grown) == (35.0, {"gets": 26, "puts": 2})


def head(number: int, version: bytes, clock: int) -> Head:
    body = HeadBody("default", f"model {number}", version, 1, 600 * GIB, 3, 100)
    return Head(number.to_bytes(16, "big"), peer_id_of(1), clock, body)


def test_how_far_checkpoints_are() -> None:
    quiet, busy = head(1, b"q" * 16, 5 << 40), head(2, b"b" * 16, 4 << 40)
    newest = short_version(busy.version)

    def takes(state: TakesPart, permille: int = 0, **more: Any) -> Participation:
        return Participation(busy.digest, newest, int(state), permille, **more)

    members = [
        member(1, checkpoints=[takes(TakesPart.PUBLISHING)]),
        member(2, checkpoints=[takes(TakesPart.FETCHING, 250, follows=True)]),
        member(3, checkpoints=[takes(TakesPart.FETCHING, 9999, follows=True, current=b"older")]),
        member(4, checkpoints=[takes(TakesPart.FAILED, why="no room " + HOSTILE)]),
        member(5, checkpoints=[takes(TakesPart.SEEDING, 1000, follows=True, current=newest)]),
        member(6, checkpoints=[replace_part(takes(TakesPart.FETCHING), b"of before")]),
    ]
    found = progress([quiet, busy], members)
    assert [each.head for each in found] == [busy, quiet]  # the one in progress comes first
    document = progress_document(found[0], "p1", is_switched_to=False)
    assert document["name"] == "model 2"
    assert (document["complete"], document["fetching"], document["failed"]) == (2, 2, 1)
    assert (document["done_permille"], document["slowest_permille"]) == (625, 250)
    assert (document["followers"], document["switched"]) == (3, 1)
    (failed,) = failures(found)
    assert (failed.name, failed.member) == ("model 2", "p0004")
    assert failed.why.startswith("no room <script>")
    assert "\x1b" not in failed.why
    assert progress_document(found[1], "p1", is_switched_to=True)["slowest_permille"] is None


def replace_part(part: Participation, version: bytes) -> Participation:
    return Participation(part.name, version[:8], part.state, part.done_permille)


def test_the_page_is_one_file_and_may_run_nothing_but_its_own() -> None:
    page, headers = page_bytes().decode(), dict(page_headers())
    assert not re.search(r"""(src|href)=["'](?!data:|status\.json)""", page)
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write", page)
    assert "/*" not in re.sub(r"(?s)<script>.*</script>", "", page)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert len(page) < 64_000


def test_slow_operations_without_their_keys() -> None:
    slow = SlowOperations(0.1)
    assert slow_document(slow, with_keys=False) == {"threshold_seconds": 0.1, "latest": []}
    stages = tuple(Stage(f"pull {n}", n / 10, HOSTILE, "tcp", "a secret key") for n in range(8))
    for number in range(9):
        what = f"get {number}"
        request = Request(what, "a secret key", 1, "c", 5.0, "a secret key")
        slow.add(SlowOperation(request, 1.5, 0.2, stages))
    document = slow_document(slow, with_keys=False)
    assert "secret" not in json.dumps(document)
    assert [each["what"] for each in document["latest"]] == [f"get {n}" for n in (8, 7, 6, 5, 4)]
    assert [each["what"] for each in document["latest"][0]["stages"]] == ["pull 7", "pull 6", "pull 5"]
    assert document["latest"][0]["failed"]
    assert "\x1b" not in document["latest"][0]["stages"][0]["peer"]
    assert slow_document(slow, with_keys=True)["latest"][0]["key"] == "a secret key"


class Counted(StatusSource):
    """Counts how often its document is made."""

    made = 0

    def document(self) -> dict[str, Any]:
        self.made += 1
        return {"made": self.made}


@pytest.mark.parametrize(("takes_seconds", "times"), [(0.002, 60), (0.04, 15)])
def test_the_document_is_made_once_a_second_for_all_who_look(takes_seconds: float, times: int) -> None:
    """Or less often, where it takes more than a hundredth of that time."""
    peer: Any = None
    clock, now = count(0, step=takes_seconds), 100.0
    source = Counted(peer, with_keys=False, cpu_seconds=lambda: next(clock), now=lambda: now)
    for tick in range(300):  # ten viewers that each ask every two seconds, for a minute
        now = 100.0 + tick / 5
        assert json.loads(source.document_bytes())["made"] == source.made
    assert source.made == times


@pytest.mark.parametrize("text", ["", "plain", "\u00fc\u4e2d"])
def test_plain_text_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


def written(*families: Metric) -> list[str]:
    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry).decode().splitlines()


def test_a_histogram_has_its_buckets_in_the_metrics_unit() -> None:
    counted = Histogram()
    for seconds in (0.00005, 0.001, 0.001025, 90.0):
        counted.add_seconds(seconds)
    lines = written(histograms("x_seconds", "X.", "by", {"tcp": counted}, (6, 10)))
    assert lines[2:] == [
        'p2pstore_x_seconds_bucket{by="tcp",le="6.4e-05"} 1.0',
        'p2pstore_x_seconds_bucket{by="tcp",le="0.001024"} 2.0',
        'p2pstore_x_seconds_bucket{by="tcp",le="+Inf"} 4.0',
        'p2pstore_x_seconds_count{by="tcp"} 4.0',
        'p2pstore_x_seconds_sum{by="tcp"} 90.002075',
    ]


def test_a_histogram_without_labels() -> None:
    counted = Histogram()
    counted.add(5000, 2)
    lines = written(histograms("x_bytes", "X.", "", {"": counted}, (12, 30)))
    assert lines[2:5] == [
        'p2pstore_x_bytes_bucket{le="4096"} 0.0',
        'p2pstore_x_bytes_bucket{le="1073741824"} 2.0',
        'p2pstore_x_bytes_bucket{le="+Inf"} 2.0',
    ]
