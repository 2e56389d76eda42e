"""When a thread polls before it sleeps, in a time of the test's own."""

import itertools
import socket

import pytest

from p2pstore.runtime import polling
from p2pstore.runtime.polling import (
    ALONE_SECONDS,
    CHEAP_SECONDS,
    LOCAL_SHORT_SECONDS,
    MAX_BUSY_SECONDS,
    MAX_SLEEPS,
    POLL_SECONDS,
    SHORT_SECONDS,
    Polling,
)

STEP_SECONDS = 2e-6
LONG_SECONDS = 2 * SHORT_SECONDS


class Line:
    """A socket and its clock. The answer comes after `delay_seconds`; `polls` and `sleeps` count how it was received,
    `tries` the polls in vain. `steal_seconds`: other processes have the core for that time once, during a poll."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.delay_seconds = 0.0
        self.due = 0.0
        self.thread = 1
        self.polls = self.sleeps = self.tries = 0
        self.steal_seconds = 0.0

    def recv_into(self, view: memoryview, length: int = 0, flags: int = 0) -> int:
        self.now += STEP_SECONDS
        if flags:
            assert flags == socket.MSG_DONTWAIT
            self.tries += 1
            self.now += self.steal_seconds
            self.steal_seconds = 0.0
            if self.now < self.due:
                raise BlockingIOError
            self.polls += 1
        else:
            self.now = max(self.now, self.due)
            self.sleeps += 1
        return len(view)

    def ask(self, some: Polling, delay_seconds: float) -> str:
        """Receive an answer that comes after `delay_seconds`: how, and after how many polls in vain."""
        before = self.polls, self.tries
        self.due = self.now + delay_seconds
        assert some.receive_into(self, memoryview(bytes(3))) == 3  # type: ignore[arg-type]  # as much of it as is used
        if self.polls > before[0]:
            return "polled"
        return "polled in vain" if self.tries > before[1] else "slept"


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line()
    monkeypatch.setattr("p2pstore.runtime.polling.time.monotonic", lambda: line.now)
    monkeypatch.setattr("p2pstore.runtime.polling.threading.get_ident", lambda: line.thread)
    monkeypatch.setattr(polling._Receiving, "last", line.thread)
    monkeypatch.setattr(polling._Receiving, "since", 0.0)
    return line


def test_it_polls_after_a_short_wait_and_sleeps_after_a_long_one(line: Line) -> None:
    some = Polling()
    short = POLL_SECONDS / 2
    assert [line.ask(some, each) for each in (LONG_SECONDS, LONG_SECONDS, short, short, short)] == [
        *("slept", "slept", "slept", "polled", "polled")
    ]
    assert line.ask(some, LONG_SECONDS) == "polled in vain"
    assert line.ask(some, short) == "slept"
    assert line.ask(some, short) == "polled"
    assert line.ask(some, 0) == "polled"


def test_a_wait_that_only_sleep_made_long_is_short(line: Line) -> None:
    some = Polling()
    assert line.ask(some, SHORT_SECONDS * 0.9) == "slept"
    assert line.ask(some, POLL_SECONDS / 2) == "polled"


def test_it_sleeps_where_that_costs_little(line: Line) -> None:
    """One that polls could keep the other side from the core that both take turns on."""
    some = Polling()
    asked = [line.ask(some, each) for each in (*[CHEAP_SECONDS / 2] * 9, 2 * CHEAP_SECONDS, 0)]
    assert asked == [*["slept"] * 10, "polled"]
    assert line.ask(some, CHEAP_SECONDS / 2) == "polled"
    assert line.ask(some, LONG_SECONDS) == "polled in vain"
    asked = [line.ask(some, each) for each in (*[CHEAP_SECONDS / 2] * 9, 2 * CHEAP_SECONDS, 0)]
    assert asked == [*["slept"] * 10, "polled"]


def test_it_polls_longer_while_the_other_side_takes_in_what_was_sent(line: Line) -> None:
    some = Polling()
    line.ask(some, POLL_SECONDS / 2)
    long = POLL_SECONDS + MAX_BUSY_SECONDS / 2
    some.sent(MAX_BUSY_SECONDS * 0.6)
    assert line.ask(some, long) == "polled"
    some.sent(1.0)
    assert line.ask(some, long) == "polled"
    assert line.ask(some, POLL_SECONDS + 2 * MAX_BUSY_SECONDS) == "polled in vain", "not for a second"
    line.ask(some, POLL_SECONDS / 2)
    some.sent(0.0)
    assert line.ask(some, long) == "polled in vain"


def test_polling_in_vain_becomes_seldom_and_often_again(line: Line) -> None:
    some = Polling()
    delay = (POLL_SECONDS + SHORT_SECONDS) / 2
    asked = [line.ask(some, delay) for _ in range(4 * MAX_SLEEPS)]
    vain = [number for number, each in enumerate(asked) if each == "polled in vain"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(vain)]
    assert gaps == [2**power + 1 for power in range(8)] + [MAX_SLEEPS + 1]
    while line.ask(some, POLL_SECONDS / 2) == "slept":
        pass
    assert line.ask(some, delay) == "polled in vain"
    assert line.ask(some, POLL_SECONDS / 2) == "slept"
    assert line.ask(some, POLL_SECONDS / 2) == "polled"


def test_polling_is_in_vain_where_others_have_the_core_meanwhile(line: Line) -> None:
    """An answer that comes meanwhile does not wake a polling task: a sleeping one would have got it sooner."""
    some = Polling()
    line.ask(some, POLL_SECONDS / 2)
    asked = []
    for _ in range(16):
        line.steal_seconds = 3e-3
        asked.append(line.ask(some, POLL_SECONDS / 2))
    assert [number for number, each in enumerate(asked) if each == "polled"] == [0, 2, 5, 10]


def test_nobody_polls_where_several_threads_receive_in_turns(line: Line) -> None:
    some, other = Polling(), Polling()

    def asked_in(*threads: int) -> list[str]:
        said = []
        for line.thread in threads:
            said.append(line.ask(some if line.thread == 1 else other, POLL_SECONDS / 2))
        return said

    assert asked_in(1, 1, 2, 2, 1, 1) == ["slept", "polled", *["slept"] * 4]
    line.now += ALONE_SECONDS
    assert asked_in(1, 1, 2) == ["polled", "polled", "slept"]
    line.now += ALONE_SECONDS
    assert line.ask(other, 0) == "polled"
    assert line.ask(some, POLL_SECONDS / 2) == "polled", "a thread may have many connections"


def test_of_connections_that_share_a_thread_only_one_in_use_polls(line: Line) -> None:
    some, other = Polling(shares_thread=True), Polling(shares_thread=True)
    short = POLL_SECONDS / 2
    assert [line.ask(each, short) for each in (some, other, some)] == ["slept"] * 3
    line.now += ALONE_SECONDS
    assert [line.ask(each, short) for each in (some, some, other, some)] == [
        *["polled"] * 2,
        *["slept"] * 2,
    ]


def test_an_event_loop_polls_for_what_sleep_would_bring_at_little_cost(line: Line) -> None:
    some = Polling(shares_thread=True)
    line.ask(some, 0)
    line.now += ALONE_SECONDS
    assert line.ask(some, CHEAP_SECONDS / 2) == "polled"


def test_the_bound_of_short_waits_is_given(line: Line) -> None:
    some = Polling(short_seconds=LOCAL_SHORT_SECONDS)
    line.ask(some, SHORT_SECONDS / 2)
    assert line.ask(some, LOCAL_SHORT_SECONDS / 2) == "slept"
    assert line.ask(some, POLL_SECONDS / 2) == "polled"


def test_nothing_is_left_of_who_was_interrupted(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    some = Polling()
    line.ask(some, POLL_SECONDS / 2)

    def interrupt(view: memoryview, length: int = 0, flags: int = 0) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(line, "recv_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            line.ask(some, POLL_SECONDS / 2)
    assert line.ask(some, POLL_SECONDS / 2) == "polled"
