"""The report of a soak: a verdict in one line, and every promise by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.soak.flatness import Growth
from tests.soak.heartbeat import Heartbeat
from tests.soak.ledger import RIGHT_BYTES, Complaint
from tests.soak.plan import Fault, FaultPlan
from tests.soak.report import verdict, write
from tests.soak.run import INVARIANTS, Grown, Outcome, Setting
from tests.soak.stage import PREFIX, remove_left_overs, wait_for


def outcome_in(folder: Path) -> Outcome:
    fault = Fault(10.0, "kill", (3,), 5.0)
    outcome = Outcome(
        Setting(seed=7, seconds=600.0, rate=5.0, patience=3.0, output=folder),
        FaultPlan(600.0, (fault,), ()),
        began=100.0,
        ended=700.0,
        settled=[2.0, 7.0],
        standstills=[(130.0, 150.0)],
        done=[(110.0, 115.0, fault)],
    )
    outcome.checked[RIGHT_BYTES] = 4321
    outcome.traffic.operations["get"] = 3
    outcome.traffic.latencies["get"] += [(101.0, 0.1), (102.0, 0.2), (650.0, 0.3)]
    outcome.grown.append(
        Grown(3, "resident_bytes", Growth(1e8, 2e6, 300.0, settled=True), allowed=True)
    )
    return outcome


def test_a_run_in_which_all_was_well(tmp_path: Path) -> None:
    outcome = outcome_in(tmp_path)
    path = write(outcome)
    text = path.read_text()
    assert verdict(outcome).startswith("passed: 8 peers, 10.0 min, 3 operations, 1 faults, seed 7")
    assert verdict(outcome) in text
    for name in INVARIANTS:
        assert f"| {name} | " in text
    assert "| right bytes | 4,321 | 0 |" in text
    assert "kill 1." in text
    assert "within 7 s" in text
    assert "stood still 1 times, 20 s in all" in text
    assert "Broken" not in text
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["passed"] is True
    assert document["faults"] == [{"from": 10.0, "to": 15.0, "kind": "kill", "targets": [3]}]
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def test_a_broken_promise_is_named_with_what_was_seen(tmp_path: Path) -> None:
    outcome = outcome_in(tmp_path)
    for number in range(30):
        outcome.complaints.append(Complaint(RIGHT_BYTES, 200.0 + number, f"seen {number}"))
    text = write(outcome).read_text()
    assert verdict(outcome).startswith("FAILED: ")
    assert verdict(outcome).endswith("broken: right bytes (30)")
    assert "| right bytes | 4,321 | 30 |" in text
    assert "- 100.0 s: seen 0\n" in text
    assert text.count(" s: seen ") == 10, "the others are in the JSON"
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["passed"] is False
    assert len(document["complaints"]) == 30
    assert document["invariants"][RIGHT_BYTES] == {"checked": 4321, "broken": 30}


def test_empty_directories_of_earlier_runs_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    empty, full, other = (tmp_path / name for name in (f"{PREFIX}1", f"{PREFIX}2", "other"))
    for each in (empty, full, other):
        each.mkdir()
    (full / "file").touch()
    remove_left_overs()
    assert sorted(tmp_path.iterdir()) == [other, full]


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((False, False, True))
    assert wait_for(lambda: next(looks), 5.0, pause=0.001)
    assert not wait_for(lambda: False, 0.02, pause=0.001)


def test_a_standstill_while_waiting_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 100.0, 100.1, 100.2))
    monkeypatch.setattr("tests.soak.stage.time.monotonic", lambda: next(now))
    looks = iter((False, False, True))
    assert wait_for(lambda: next(looks), 15.0, pause=0.0)


def test_a_heart_that_beats_sees_no_standstill_and_one_that_stopped_does() -> None:
    heart = Heartbeat()
    try:
        assert heart.gaps() == []
        with heart._lock:
            heart._last -= 30.0  # as if it had been stopped
        deadline = time.monotonic() + 20.0
        gaps: list[tuple[float, float]] = []
        while not gaps and time.monotonic() < deadline:
            gaps = heart.gaps()
        ((began, ended),) = gaps
        assert 30.0 <= ended - began < 50.0
        assert heart.gaps() == []
    finally:
        heart.end()
