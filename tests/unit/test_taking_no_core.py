"""Large objects are sent by a thread that leaves the cores to others."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pstore.runtime.streams import taking_no_core


def in_a_thread(action: Callable[[], list[int]]) -> list[int]:
    """The policy is a thread's own: the one that runs the tests keeps its."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(action).result(30)


def policies() -> list[int]:
    """Before, within and after."""
    before = os.sched_getscheduler(0)
    with taking_no_core():
        within = os.sched_getscheduler(0)
    return [before, within, os.sched_getscheduler(0)]


def test_it_ends_with_what_it_is_for() -> None:
    assert in_a_thread(policies) == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


def test_it_ends_with_a_failure_as_well() -> None:
    def fails() -> list[int]:
        with pytest.raises(BrokenPipeError), taking_no_core():
            raise BrokenPipeError
        return [os.sched_getscheduler(0)]

    assert in_a_thread(fails) == [os.SCHED_OTHER]


def test_what_somebody_chose_stays() -> None:
    def chosen() -> list[int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return policies()

    assert in_a_thread(chosen) == [os.SCHED_IDLE] * 3


def test_where_it_is_forbidden_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert in_a_thread(policies) == [os.SCHED_OTHER] * 3
