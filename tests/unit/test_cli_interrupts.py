"""Signals end a command only where that leaves nothing behind. Real signals, to this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mooncake_p2p.output import ENDING_SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in ENDING_SIGNALS] == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)]
)
def test_interrupts_where_allowed(number: int, status: int | None) -> None:
    expected = KeyboardInterrupt if status is None else SystemExit
    with Interrupts() as interrupts, pytest.raises(expected) as raised, interrupts.allowed():
        send(number)
    assert status is None or raised.value.code == status  # type: ignore[attr-defined]


def test_waits_where_not_allowed() -> None:
    reached = []

    def work() -> None:
        with Interrupts() as interrupts:
            send(signal.SIGTERM)
            reached.append("before")
            with interrupts.allowed():
                reached.append("never")

    with pytest.raises(SystemExit):
        work()
    assert reached == ["before"]


def test_a_signal_that_came_last_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        send(signal.SIGINT)


def test_held_inside_allowed() -> None:
    reached = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.allowed():
            with interrupts.held():
                send(signal.SIGTERM)
                reached.append("held")
            reached.append("never")

    with pytest.raises(SystemExit):
        work()
    assert reached == ["held"]


def test_cleaning_up_is_not_interrupted_again() -> None:
    cleaned = []

    def work() -> None:
        with Interrupts() as interrupts:
            try:
                with interrupts.allowed():
                    send(signal.SIGINT)
            finally:
                send(signal.SIGINT)
                send(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]
