"""The plan of a soak: a function of the seed, within bounds."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.soak.peers import ROLES
from tests.soak.plan import (
    BATCH,
    CALM_SECONDS,
    KEYS,
    MOST_PEERS_AT_ONCE,
    Fault,
    FaultPlan,
    plan_faults,
    plan_load,
)

HOSTS = [role.host for role in ROLES]
STEADY = [number for number, role in enumerate(ROLES) if role.steady]
ENDING = ("kill", "restart", "leave", "full disk", "kill client")
ON_NETWORK = ("split", "link down", "bad link", "new key")


def plan(seed: int, seconds: float = 3600.0) -> FaultPlan:
    return plan_faults(seed, seconds, HOSTS, STEADY)


def overlapping(one: Fault, other: Fault) -> bool:
    return one.at < other.until and other.at < one.until


def test_a_seed_says_all_and_another_one_something_else() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert plan(1).faults[:5] != plan(1, 60).faults[:5] or len(plan(1, 60).faults) < 20


def test_an_hour_has_every_kind_of_fault() -> None:
    for seed in range(3):
        kinds = {fault.kind for fault in plan(seed).faults}
        assert kinds >= {"kill", "stall", "restart", "leave", "full disk", "kill client"}
        assert kinds >= {"split", "link down", "bad link", "new key"}


def test_faults_lie_within_the_run_and_outside_of_calms() -> None:
    for seed in range(20):
        made = plan(seed)
        assert len(made.faults) > 100
        assert len(made.calms) >= 13
        for fault in made.faults:
            assert 0 < fault.at < fault.until < made.seconds
            for begin, end in made.calms:
                assert end - begin == CALM_SECONDS
                assert fault.until <= begin or fault.at >= end, fault


def test_not_all_is_disturbed_at_once() -> None:
    for seed in range(20):
        faults = plan(seed).faults
        for number, fault in enumerate(faults):
            others = [each for each in faults[:number] if overlapping(each, fault)]
            peers = [each for each in others if each.kind not in ON_NETWORK]
            if fault.kind in ON_NETWORK:
                assert not [each for each in others if each.kind in ON_NETWORK]
            else:
                assert len(peers) < MOST_PEERS_AT_ONCE
                assert not [each for each in peers if set(each.targets) & set(fault.targets)]
            if fault.kind in ("leave", "new key"):
                assert not others, "they find the cluster whole"


def test_steady_peers_are_never_ended() -> None:
    for seed in range(20):
        ended = {n for each in plan(seed).faults if each.kind in ENDING for n in each.targets}
        assert ended == set(range(len(ROLES))) - set(STEADY)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="two hosts"):
        plan_faults(1, 60, [0, 0], [])
    with pytest.raises(ValueError, match="may end"):
        plan_faults(1, 60, [0, 1], [0, 1])


def test_a_client_writes_its_own_keys_only() -> None:
    writing = ("put", "overwrite", "put_many", "remove", "remove_many", "flush")
    kinds = set()
    for operation in islice(plan_load(1, 3, 0, len(ROLES), 5.0), 5000):
        kinds.add(operation.kind)
        writers = {writer for writer, _, _ in operation.keys}
        if operation.kind in (*writing, "new kept", "new durable"):
            assert writers == {3}
        assert writers <= set(range(len(ROLES)))
        assert 1 <= len(operation.keys) <= BATCH
        for _, family, number in operation.keys:
            assert 0 <= number < KEYS.get(family, 10)
    assert len(kinds) == 20


def test_the_load_is_a_function_of_seed_client_and_life() -> None:
    def first(seed: int, actor: int, epoch: int) -> list[object]:
        return list(islice(plan_load(seed, actor, epoch, 8, 5.0), 50))

    assert first(1, 2, 0) == first(1, 2, 0)
    assert first(1, 2, 0) != first(2, 2, 0)
    assert first(1, 2, 0) != first(1, 3, 0)
    assert first(1, 2, 0) != first(1, 2, 1)


def test_the_load_has_its_rate() -> None:
    pauses = [each.pause_seconds for each in islice(plan_load(1, 0, 0, 8, 5.0), 5000)]
    assert sum(pauses) / len(pauses) == pytest.approx(0.2, rel=0.1)
