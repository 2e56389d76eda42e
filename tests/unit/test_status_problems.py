"""The problems that the status page names, and their words."""

from typing import Any

import pytest

from p2pstore.objects import GIB
from p2pstore.status.doctor.finding import MAX_TEXT_LETTERS, Finding, Status
from p2pstore.status.doctor.network_rules import SsdReading
from p2pstore.status.problems import Facts, FailedCheckpoint, TakenPlaces, problem_document, problems


def only(**facts: Any) -> Finding:
    (finding,) = problems(Facts(**{"seconds": 1200.0, **facts}))
    assert finding.cause
    assert finding.cure
    return finding


def ssd(state: str = "ok", why: str = "", damaged: int = 0) -> SsdReading:
    return SsdReading(state, why, 100 * GIB, 40 * GIB, 1234, damaged, 2.0)


def test_nothing_is_wrong() -> None:
    assert problems(Facts()) == []
    assert problems(Facts(bootstrap_count=2, joined=False, live=3, ssd=ssd(), versions=["1"])) == []


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({"leaving": True}, "warning", "This peer is leaving"),
        ({"bootstrap_count": 2, "joined": False}, "broken", "This peer is alone"),
        ({"bootstrap_count": 2}, "warning", "This peer is alone"),  # the others have gone
        ({"load_permille": 1400}, "warning", "busier than it can be"),
        ({"live": 9, "dead": ["x"], "dead_count": 1}, "warning", "1 member is dead: x"),
        ({"dead": ["x", "y"], "dead_count": 2}, "broken", "Of 3 members this peer reaches 1"),
        ({"suspect": ["x"], "suspect_count": 1}, "warning", "1 member does not answer: x"),
        ({"members_refused": 3}, "broken", "3 members were left out"),
        ({"versions": ["0.1", "0.2"]}, "warning", "different versions: 0.1, 0.2"),
        (
            {"lately": {"last_copies_dropped": 1300}, "memory_share": 0.95},
            *("warning", "1,300 objects that no other peer"),
        ),
        ({"lately": {"refused_by_members": 1}}, "broken", "do not let this peer in"),
        ({"clock_ahead_seconds": 1.25}, "warning", "clock is 1.2 s ahead of the others"),
        ({"clock_ahead_seconds": -11.0}, "warning", "clock is 11.0 s behind the others"),
        (
            {"clock_problem": "it is 11 s behind", "clock_ahead_seconds": -11.0},
            "broken",
            "Nothing can be written through this peer",
        ),
        (
            {"stamps_ahead_seconds": 3600.0},
            "warning",
            "stamps of this peer are 3,600 s ahead of its own clock",
        ),
        ({"wrong_clocks": ["b (+60 s)"]}, "warning", "The clock of b (+60 s) is wrong"),
        ({"lately": {"stalls": 250, "looks": 24_000}}, "warning", "stalled 250 times"),
        ({"local_health": 5}, "warning", "does not trust its own view"),
        ({"lately": {"in_failures": 150, "in_objects": 999}}, "warning", "150 of 1,149 reads"),
        ({"leased_share": 0.95}, "warning", "95 % of this peer's memory are leased"),
        ({"lost_rdma_devices": 1}, "warning", "1 RDMA device of this peer failed"),
        ({"lacking": 1}, "warning", "1 object here has fewer copies than wanted"),
        ({"lately": {"client_puts_failed": 2}}, "warning", "2 puts failed in the last 20 minutes"),
        ({"lately": {"objects_spoilt": 1}}, "broken", "1 object was spoilt"),
        ({"state_problem": "No space left"}, "broken", "cannot be written: No space left"),
        ({"memory_restored": 1}, "warning", "that only the peer may write"),
        ({"state_damage": ["floors.bin"]}, "warning", "was damaged when it started"),
        ({"kept_damaged": 2}, "warning", "2 objects of the kept memory were damaged"),
        ({"spoilt": 3}, "warning", "3 objects were spoilt in this peer's memory since it started"),
        ({"lately": {"client_puts_failed": 11}, "puts": 1000}, "warning", "11 puts failed"),
        ({"lately": {"transport_fallbacks": 12}}, "warning", "gave way to a worse one 12 times"),
        (
            {"places": [TakenPlaces("data", 1000, 1024, 0, "greedy", 900, "10.0.0.1", 950)]},
            *("warning", "1,000 of 1,024 places for data connections are taken"),
        ),
        (
            {"places": [TakenPlaces("control", 200, 256, 3, "greedy", 190)]},
            *("broken", "; 3 were refused in the last 20 minutes"),
        ),
        ({"lately": {"hoarders_ended": 2}}, "warning", "2 connections were cut"),
        ({"ssd": ssd("off", "it is gone")}, "broken", "The SSD of this peer is not used any more"),
        ({"ssd": ssd("read_only", "worn out")}, "broken", "The SSD of this peer is only read"),
        ({"ssd": ssd(damaged=2)}, "warning", "2 objects on the SSD of this peer were damaged"),
    ],
)
def test_each_problem_has_its_words(facts: dict[str, Any], status: str, words: str) -> None:
    finding = only(**facts)
    assert finding.status == status
    assert words in finding.value


@pytest.mark.parametrize(
    "facts",
    [
        {"lately": {"last_copies_dropped": 1300}},  # there is room: they expired, or were moved
        {"lately": {"last_copies_dropped": 1100}, "memory_share": 1.0},
        {"lately": {"in_failures": 150, "in_objects": 9_999}},
        {"lately": {"in_failures": 100}},
        {"lately": {"stalls": 99, "looks": 2_000}},
        {"lately": {"stalls": 200, "looks": 24_000}},
        {"lately": {"transport_fallbacks": 9}},
        {"lately": {"client_puts_failed": 10}, "puts": 1000},
        {"clock_ahead_seconds": -0.9},
        {"local_health": 3},
        {"places": [TakenPlaces("data", 900, 1024, 0, "x", 800)]},
        {"load_permille": 999},
    ],
)
def test_normal_events_of_a_cluster_are_no_problem(facts: dict[str, Any]) -> None:
    assert problems(Facts(**{"seconds": 1200.0, **facts})) == []


def test_where_a_lonely_peer_looks_is_told_to_the_users_of_its_machine() -> None:
    lonely: dict[str, Any] = {"bootstrap_count": 2, "joined": False}
    stranger = only(**lonely)
    assert "doctor --peer HOST:PORT` with a bootstrap address" in stranger.cure
    user = only(**lonely, bootstrap=["h:1", "i:2"], unreached=["cannot reach h:1: refused"])
    assert user.cause == f"{stranger.cause}: cannot reach h:1: refused"
    assert "doctor --peer h:1`" in user.cure
    assert problems(Facts(bootstrap_count=2, joined=False, live=2)) == []  # others found it


def test_of_many_names_some_are_named() -> None:
    names = [f"p{number}" for number in range(60)]
    text = only(live=900, dead=names, dead_count=400).value
    assert text == "400 members are dead: p0, p1, p2, p3, p4 and 395 more"


def test_checkpoints_are_told_by_name_and_the_worst_comes_first() -> None:
    failed = [FailedCheckpoint("model", name, "disk full") for name in ("a", "b")]
    found = problems(Facts(failed_checkpoints=failed, lately={"objects_spoilt": 1}))
    assert [each.status for each in found] == [Status.BROKEN, Status.WARNING]
    assert found[1].value == "Checkpoint model failed on 2 members: a, b"
    assert found[1].cause == "disk full"


def test_texts_of_others_are_cut() -> None:
    finding = only(failed_checkpoints=[FailedCheckpoint("n", "m", "\u202e<b>" + "x" * 9999)])
    document = problem_document(finding)
    assert len(document["cause"]) <= MAX_TEXT_LETTERS
    assert document["cause"].startswith("\\u202e<b>xxx")


def test_the_member_with_most_places_is_named() -> None:
    finding = only(places=[TakenPlaces("data", 1024, 1024, 0, "greedy", 900, "10.0.0.1", 950)])
    assert finding.cause == "greedy has 900 of them; one host at 10.0.0.1 has 950"
