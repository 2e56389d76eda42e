"""The problems that the status page names, and their words."""

from dataclasses import fields
from typing import Any

import pytest

from p2pstore.objects import GIB
from p2pstore.status.doctor.finding import MAX_TEXT_LETTERS, Finding, Status
from p2pstore.status.problems import Facts, FailedCheckpoint, problem_document, problems


def facts_with(**changes: Any) -> Facts:
    """A peer without problems, but for these facts and these parts of its statistics document."""
    names = {each.name for each in fields(Facts)}
    beside = {name: value for name, value in changes.items() if name in names}
    quiet = {"taken": 0, "limit": 1024, "largest": {"name": "", "places": 0, "host_places": 0}}
    numbers = (
        "load_permille",
        "members_refused",
        "memory_used_bytes",
        "leased_bytes",
        "floors_permille",
    )
    lists = ("wrong_clocks", "floors_wait_for", "floors_disbelieved", "state_damage")
    peer: dict[str, Any] = {
        **{"state": "ready", "joined": True, "bootstrap_addresses": 0, "bootstrap_silent": True},
        **{"clock_ahead_seconds": None, "stamps_ahead_seconds": 0.0, "memory_capacity_bytes": 100},
        **{"gossip": {"local_health": 0}, "repair": {"lacking": 0}, "counters": {}},
        **dict.fromkeys(numbers, 0),
        **dict.fromkeys(lists, ()),
        **dict.fromkeys(("clock_problem", "state_problem"), ""),
        **{"places": {"control": quiet, "data": quiet} | changes.pop("places", {})},
        **{name: value for name, value in changes.items() if name not in names},
    }
    return Facts(peer, **{"seconds": 1200.0, **beside})


def only(**changes: Any) -> Finding:
    (finding,) = problems(facts_with(**changes))
    assert finding.cause
    assert finding.cure
    return finding


def ssd(state: str = "ok", why: str = "", damaged: int = 0) -> dict[str, Any]:
    sizes = {"capacity_bytes": 100 * GIB, "live_bytes": 40 * GIB, "objects": 1234}
    return {**sizes, "state": state, "why": why, "damaged": damaged, "read_latency": {"p99_ms": 2.0}}


def places(kind: str, taken: int, limit: int, most: int, **more: Any) -> dict[str, Any]:
    largest = {"name": "greedy", "places": most, "host_places": 950, **more}
    return {kind: {"taken": taken, "limit": limit, "largest": largest}}


ALONE: dict[str, Any] = {"bootstrap_addresses": 2, "joined": False}


def test_nothing_is_wrong() -> None:
    assert problems(facts_with()) == []
    assert problems(facts_with(**ALONE, live=3, ssd=ssd(), versions=["1"])) == []
    assert problems(facts_with(**ALONE, bootstrap_silent=False)) == []  # it still looks


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({"state": "leaving"}, "warning", "This peer is leaving"),
        (ALONE, "broken", "This peer is alone"),
        ({"bootstrap_addresses": 2}, "warning", "This peer is alone"),  # the others have gone
        ({"load_permille": 1400}, "warning", "busier than it can be"),
        ({"live": 9, "dead": ["x"], "dead_count": 1}, "warning", "1 member is dead: x"),
        ({"dead": ["x", "y"], "dead_count": 2}, "broken", "Of 3 members this peer reaches 1"),
        ({"suspect": ["x"], "suspect_count": 1}, "warning", "1 member does not answer: x"),
        ({"members_refused": 3}, "broken", "3 members were left out"),
        ({"versions": ["0.1", "0.2"]}, "warning", "different versions: 0.1, 0.2"),
        (
            {"lately": {"last_copies_dropped": 1300}, "memory_used_bytes": 95},
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
        ({"gossip": {"local_health": 5}}, "warning", "does not trust its own view"),
        ({"lately": {"in_failures": 150, "in_objects": 999}}, "warning", "150 of 1,149 reads"),
        ({"leased_bytes": 95}, "warning", "95 % of this peer's memory are leased"),
        ({"rdma": {"lost_devices": 1}}, "warning", "1 RDMA device of this peer failed"),
        ({"repair": {"lacking": 1}}, "warning", "1 object here has fewer copies than wanted"),
        ({"lately": {"client_puts_failed": 2}}, "warning", "2 puts failed in the last 20 minutes"),
        ({"lately": {"objects_spoilt": 1}}, "broken", "1 object was spoilt"),
        ({"state_problem": "No space left"}, "broken", "cannot be written: No space left"),
        ({"counters": {"memory_restored": 1}}, "warning", "that only the peer may write"),
        ({"state_damage": ["floors.bin"]}, "warning", "was damaged when it started"),
        (
            {"counters": {"kept_objects_damaged": 2}},
            "warning",
            "2 objects of the kept memory were damaged",
        ),
        (
            {"counters": {"objects_spoilt": 3}},
            "warning",
            "3 objects were spoilt in this peer's memory since it started",
        ),
        ({"lately": {"client_puts_failed": 11, "client_puts": 1000}}, "warning", "11 puts failed"),
        ({"lately": {"transport_fallbacks": 12}}, "warning", "gave way to a worse one 12 times"),
        (
            {"places": places("data", 1000, 1024, 900)},
            *("warning", "1,000 of 1,024 places for data connections are taken"),
        ),
        (
            {"places": places("control", 200, 256, 190), "lately": {"control_refused": 3}},
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
        {"lately": {"last_copies_dropped": 1100}, "memory_used_bytes": 100},
        {"lately": {"in_failures": 150, "in_objects": 9_999}},
        {"lately": {"in_failures": 100}},
        {"lately": {"stalls": 99, "looks": 2_000}},
        {"lately": {"stalls": 200, "looks": 24_000}},
        {"lately": {"transport_fallbacks": 9}},
        {"lately": {"client_puts_failed": 10, "client_puts": 1000}},
        {"clock_ahead_seconds": -0.9},
        {"gossip": {"local_health": 3}},
        {"places": places("data", 900, 1024, 800)},
        {"load_permille": 999},
    ],
)
def test_normal_events_of_a_cluster_are_no_problem(facts: dict[str, Any]) -> None:
    assert problems(facts_with(**facts)) == []


def test_where_a_lonely_peer_looks_is_told_to_the_users_of_its_machine() -> None:
    stranger = only(**ALONE)
    assert "doctor --peer HOST:PORT` with a bootstrap address" in stranger.cure
    user = only(**ALONE, bootstrap=["h:1", "i:2"], unreached=["cannot reach h:1: refused"])
    assert user.cause == f"{stranger.cause}: cannot reach h:1: refused"
    assert "doctor --peer h:1`" in user.cure
    assert problems(facts_with(**ALONE, live=2)) == []  # others found it


def test_of_many_names_some_are_named() -> None:
    names = [f"p{number}" for number in range(60)]
    text = only(live=900, dead=names, dead_count=400).value
    assert text == "400 members are dead: p0, p1, p2, p3, p4 and 395 more"


def test_checkpoints_are_told_by_name_and_the_worst_comes_first() -> None:
    failed = [FailedCheckpoint("model", name, "disk full") for name in ("a", "b")]
    found = problems(facts_with(failed_checkpoints=failed, lately={"objects_spoilt": 1}))
    assert [each.status for each in found] == [Status.BROKEN, Status.WARNING]
    assert found[1].value == "Checkpoint model failed on 2 members: a, b"
    assert found[1].cause == "disk full"


def test_texts_of_others_are_cut() -> None:
    finding = only(failed_checkpoints=[FailedCheckpoint("n", "m", "\u202e<b>" + "x" * 9999)])
    document = problem_document(finding)
    assert len(document["cause"]) <= MAX_TEXT_LETTERS
    assert document["cause"].startswith("\\u202e<b>xxx")


def test_the_member_with_most_places_is_named() -> None:
    finding = only(places=places("data", 1024, 1024, 900, host="10.0.0.1"))
    assert finding.cause == "greedy has 900 of them; one host at 10.0.0.1 has 950"
