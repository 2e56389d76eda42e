"""The states of a data connection at its holder, and which requests it takes."""

from __future__ import annotations

import pytest

from p2pstore.transfer.serving.session_rules import TRANSITIONS, Event, Lifecycle, State


def test_every_state_but_the_last_can_end_and_none_goes_on_after_it() -> None:
    for state, transitions in TRANSITIONS.items():
        assert (Event.END in transitions) is (state is not State.ENDED)
    assert TRANSITIONS[State.ENDED] == {}


def test_every_state_and_every_event_is_reached() -> None:
    reached = {state for transitions in TRANSITIONS.values() for state in transitions.values()}
    assert reached == set(State)
    assert {event for transitions in TRANSITIONS.values() for event in transitions} == set(Event)


def test_only_a_quiet_connection_is_idle() -> None:
    life = Lifecycle()
    assert life.quiet_since is None, "it answers what came along with the hello"
    life.happened(Event.ANSWERED, 3.0)
    assert life.quiet_since == 3.0
    life.happened(Event.RECEIVED)
    assert life.quiet_since is None
    life.happened(Event.CUT)
    assert life.quiet_since is None, "half a request is there"


def test_a_connection_that_retires_has_its_pause_from_then_on() -> None:
    life = Lifecycle()
    life.happened(Event.ANSWERED, 3.0)
    life.retire(8.0)
    assert (life.retiring, life.quiet_since) == (True, 8.0)
    life.happened(Event.RECEIVED)
    life.retire(9.0)
    assert life.quiet_since is None


@pytest.mark.parametrize(
    ("state", "event"),
    [(State.LENT, Event.RECEIVED), (State.TAKING_IN, Event.LENT), (State.LINKED, Event.RECEIVED)],
)
def test_while_another_has_the_connection_the_event_loop_takes_nothing(
    state: State, event: Event
) -> None:
    life = Lifecycle()
    life.state = state
    with pytest.raises(KeyError):
        life.happened(event)
