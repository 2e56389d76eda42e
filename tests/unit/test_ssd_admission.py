"""Admission to the SSD, and the write budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.objects import KIB, MIB
from p2pstore.ssd_tier.write_admission import (
    SECONDS_A_DAY,
    Admission,
    AdmissionPolicy,
    Refusal,
    WriteBudget,
)


def decide(
    admission: Admission, length: int = MIB, *, now: float = 0.0, **changed: Any
) -> Refusal | None:
    arguments: dict[str, Any] = {"hits": 1, "last_copy": False, "queued_bytes": 0, "read_only": False}
    return admission.decide(length, now=now, **{**arguments, **changed})


def test_what_was_read_once_is_written() -> None:
    admission = Admission(AdmissionPolicy(), now=0)
    assert decide(admission) is None
    assert admission.admitted == 1
    assert not admission.refused


@pytest.mark.parametrize(
    ("length", "changed", "reason"),
    [
        (MIB, {"read_only": True}, Refusal.READ_ONLY),
        (16 * KIB - 1, {}, Refusal.TOO_SMALL),
        (8 * MIB + 1, {}, Refusal.TOO_LARGE),
        (MIB, {"hits": 0}, Refusal.SEEN_ONCE),
        (MIB, {"queued_bytes": 9 * MIB + 1}, Refusal.QUEUE_FULL),
    ],
)
def test_each_reason_is_given_and_counted(length: int, changed: dict[str, Any], reason: Refusal) -> None:
    policy = AdmissionPolicy(max_bytes=8 * MIB, max_queued_bytes=10 * MIB)
    admission = Admission(policy, now=0)
    assert decide(admission, length, **changed) is reason
    assert admission.refused == {reason: 1}
    assert admission.admitted == 0


def test_a_last_copy_needs_no_second_touch() -> None:
    assert decide(Admission(AdmissionPolicy(), now=0), hits=0, last_copy=True) is None


def test_what_is_longer_than_the_queue_goes_when_it_is_empty() -> None:
    admission = Admission(AdmissionPolicy(max_queued_bytes=MIB), now=0)
    assert decide(admission, 4 * MIB) is None
    assert decide(admission, 4 * MIB, queued_bytes=1) is Refusal.QUEUE_FULL


def test_the_budget_is_spent_and_comes_back() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=100.0)
    for _ in range(10):
        assert decide(admission, now=100.0) is None
    assert decide(admission, now=100.0) is Refusal.WRITE_BUDGET_SPENT
    assert decide(admission, now=101.1) is None
    assert decide(admission, now=101.1) is Refusal.WRITE_BUDGET_SPENT


def test_what_had_to_be_written_is_paid_for_later() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=0.0)
    admission.spend(20 * MIB, now=0.0)
    assert decide(admission, now=10.9) is Refusal.WRITE_BUDGET_SPENT
    assert decide(admission, now=11.1) is None


def test_an_object_above_the_burst_goes_when_all_is_saved_up() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=0.0)
    assert decide(admission, 30 * MIB, now=0.0) is None
    assert decide(admission, now=20.0) is Refusal.WRITE_BUDGET_SPENT


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_bytes": 2, "max_bytes": 1},
        {"write_bytes_per_day": 0},
        {"burst_seconds": 0},
        {"max_queued_bytes": 0},
        {"min_hits": -1},
    ],
)
def test_policies_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdmissionPolicy(**wrong)


@given(st.lists(st.tuples(st.floats(-50, 100), st.integers(0, 5000))))
def test_the_budget_never_gives_more_than_it_earned(steps: list[tuple[float, int]]) -> None:
    budget, now, latest, spent = WriteBudget(int(SECONDS_A_DAY) * 10, 100, 0.0), 0.0, 0.0, 0
    earned = 0.0
    for step, wanted in steps:
        earned += max(0.0, step)
        now += step
        latest = max(latest, now)
        assert budget.balance(now) <= budget.burst_bytes
        if wanted <= budget.balance(now):
            budget.spend(wanted, now)
            spent += wanted
    assert spent <= 1000 + 10 * earned + 1e-6
