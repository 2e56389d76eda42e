"""Admission to the SSD, the write budget, and shares of namespaces: a reserve gives way to no other, a cap is kept."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.objects import KIB, MIB
from p2pstore.ssd_tier.log_segments import Candidate, SegmentState, SegmentTable, choose_kept
from p2pstore.ssd_tier.write_admission import (
    SECONDS_A_DAY,
    Admission,
    AdmissionPolicy,
    NamespaceBytes,
    Share,
    WriteBudget,
    WriteRefusal,
)
from tests.unit.cold_harness import NAMESPACE, running, simulated_disk, value_of


def decide(
    admission: Admission, length: int = MIB, *, now: float = 0.0, **changed: Any
) -> WriteRefusal | None:
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
        (MIB, {"read_only": True}, WriteRefusal.READ_ONLY),
        (16 * KIB - 1, {}, WriteRefusal.TOO_SMALL),
        (8 * MIB + 1, {}, WriteRefusal.TOO_LARGE),
        (MIB, {"hits": 0}, WriteRefusal.SEEN_ONCE),
        (MIB, {"queued_bytes": 9 * MIB + 1}, WriteRefusal.QUEUE_FULL),
    ],
)
def test_each_reason_is_given_and_counted(
    length: int, changed: dict[str, Any], reason: WriteRefusal
) -> None:
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
    assert decide(admission, 4 * MIB, queued_bytes=1) is WriteRefusal.QUEUE_FULL


def test_the_budget_is_spent_and_comes_back() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=100.0)
    for _ in range(10):
        assert decide(admission, now=100.0) is None
    assert decide(admission, now=100.0) is WriteRefusal.WRITE_BUDGET_SPENT
    assert decide(admission, now=101.1) is None
    assert decide(admission, now=101.1) is WriteRefusal.WRITE_BUDGET_SPENT


def test_what_had_to_be_written_is_paid_for_later() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=0.0)
    admission.spend(20 * MIB, now=0.0)
    assert decide(admission, now=10.9) is WriteRefusal.WRITE_BUDGET_SPENT
    assert decide(admission, now=11.1) is None


def test_an_object_above_the_burst_goes_when_all_is_saved_up() -> None:
    policy = AdmissionPolicy(write_bytes_per_day=int(SECONDS_A_DAY) * MIB, burst_seconds=10)
    admission = Admission(policy, now=0.0)
    assert decide(admission, 30 * MIB, now=0.0) is None
    assert decide(admission, now=20.0) is WriteRefusal.WRITE_BUDGET_SPENT


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


VALUE_BYTES = 60 * KIB
RECORD_BYTES = 64 * KIB


def value(number: int) -> bytes:
    return value_of(str(number), 1, VALUE_BYTES)


def shares_of(**shares: Share) -> Mapping[str, Share]:
    return {NAMESPACE if name == "mine" else name: share for name, share in shares.items()}


async def test_a_namespace_at_its_cap_gives_up_what_it_wrote_first(autojump_clock: object) -> None:
    shares = shares_of(mine=Share(most_bytes=10 * RECORD_BYTES))
    async with running(simulated_disk(), shares=lambda: shares) as harness:
        for number in range(30):
            assert await harness.store(str(number), 1, value(number))
            assert harness.tier.bytes_of(NAMESPACE) <= 10 * RECORD_BYTES
        kept = {*map(int, harness.keys())}
        assert kept == {*range(20, 30)}
        assert {int(entry.key) for entry in harness.withdrawn} == {*range(20)}
        await harness.store("other", 1, value(99), namespace="other")
        assert {*map(int, harness.keys())} == kept, "what others write does not count"


async def test_what_is_larger_than_its_share_is_refused(autojump_clock: object) -> None:
    shares = shares_of(mine=Share(most_bytes=RECORD_BYTES))
    async with running(simulated_disk(), shares=lambda: shares) as harness:
        assert await harness.store("a", 1, value(0))
        assert not await harness.store("b", 1, value_of("b", 1, VALUE_BYTES * 2))
        assert harness.keys() == {"a": 1}
        assert harness.tier.admit(b"d" * 16, VALUE_BYTES * 2, 9, NAMESPACE) is WriteRefusal.OVER_CAP
        assert harness.tier.admit(b"d" * 16, VALUE_BYTES * 2, 9, "other") is None
        assert harness.tier.statistics()["refused"] == {"over_cap": 2}


async def test_stores_side_by_side_stay_within_the_share(autojump_clock: object) -> None:
    disk = simulated_disk()
    disk.faults.latency_seconds = 0.01
    shares = shares_of(mine=Share(most_bytes=5 * RECORD_BYTES))
    async with running(disk, shares=lambda: shares) as harness:
        stored: list[bool] = []

        async def store(number: int) -> None:
            stored.append(await harness.store(str(number), 1, value(number)))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(store, number)
        assert harness.tier.bytes_of(NAMESPACE) <= 5 * RECORD_BYTES
        assert stored.count(True) >= 1
        assert await harness.store("later", 1, value(50)), "nothing counts that is not there"


async def test_a_share_that_shrinks_is_kept_without_further_stores(autojump_clock: object) -> None:
    shares = {NAMESPACE: Share(most_bytes=10 * RECORD_BYTES)}
    async with running(simulated_disk(), shares=lambda: shares) as harness:
        for number in range(8):
            assert await harness.store(str(number), 1, value(number))
        shares[NAMESPACE] = Share(most_bytes=3 * RECORD_BYTES)
        await trio.sleep(2)
        assert {*map(int, harness.keys())} == {5, 6, 7}


async def test_what_is_reserved_stays_while_others_fill_the_disk(autojump_clock: object) -> None:
    """And is counted anew after a restart, from a disk that says nothing of shares."""
    disk = simulated_disk(segments=12)
    shares = shares_of(mine=Share(reserved_bytes=20 * RECORD_BYTES))
    async with running(disk) as harness:
        for number in range(20):
            assert await harness.store(str(number), 1, value(number))
    async with running(disk, shares=lambda: shares) as harness:
        assert harness.tier.bytes_of(NAMESPACE) == 20 * RECORD_BYTES
        for number in range(600):
            await harness.store(f"other {number}", 1, value(number), namespace="other")
        assert {*map(int, harness.keys())} == {*range(20)}
        assert (await harness.load("0"))[1] == value(0)
        assert harness.tier.statistics()["objects"] > 20


async def test_what_is_above_the_reserve_goes(autojump_clock: object) -> None:
    shares = shares_of(mine=Share(reserved_bytes=10 * RECORD_BYTES))
    async with running(simulated_disk(segments=12), shares=lambda: shares) as harness:
        for number in range(40):
            assert await harness.store(str(number), 1, value(number))
        for number in range(600):
            await harness.store(f"other {number}", 1, value(number), namespace="other")
        assert harness.tier.bytes_of(NAMESPACE) == 10 * RECORD_BYTES
        assert {*map(int, harness.keys())} == {*range(30, 40)}


def test_reserved_records_are_kept_first_up_to_half_a_segment() -> None:
    offered = [
        Candidate("hot", 100, 9, False),
        *(Candidate(f"reserved {number}", 100, 0, False, reserved=True) for number in range(7)),
    ]
    assert [each.record for each in choose_kept(offered, 1000)] == [
        f"reserved {number}" for number in range(5)
    ]
    assert [each.record for each in choose_kept(offered[:2], 1000)] == ["reserved 0", "hot"]


def test_a_segment_that_is_mostly_reserved_is_reclaimed_after_others() -> None:
    table = SegmentTable(3, MIB, lambda records, text: 1)
    for number in range(3):
        table.restore(number, 1, state=SegmentState.SEALED, first_sequence=1 + number)
    reserved = {0: MIB, 1: MIB // 4, 2: 0}
    victim = table.choose_reclaim(lambda number: MIB, (), reserved.__getitem__)
    assert victim is table[1]
    victim = table.choose_reclaim(lambda number: MIB, (), lambda number: MIB)
    assert victim is table[0], "there is no other"


def test_bytes_by_namespace_and_segment() -> None:
    counted = NamespaceBytes(["a", "b"], 3)
    numbers = np.array([0, 1, 0, 2], np.uint32)
    segments = np.array([0, 0, 2, 2], np.uint32)
    counted.load(["a", "c", "b"], numbers, segments, np.array([10, 20, 30, 40], np.int64))
    counted.count("b", 2, 5)
    counted.count("c", 1, 5)
    assert [counted.bytes_of(name) for name in "abc"] == [40, 45, 0]
    shares = {"a": Share(25), "b": Share(100), "c": Share(1)}
    above = counted.above_reserve(shares)
    assert above == {"a": 15, "b": 0}
    assert [counted.reserved_in(segment, above) for segment in range(3)] == [0, 0, 60]
