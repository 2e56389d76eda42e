"""Who has to go when too many connections wait to prove themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.access.crowding import Strangers, host_group


def test_up_to_the_limits_everybody_may_wait() -> None:
    strangers: Strangers[int] = Strangers(10, 4)
    assert [strangers.arrive("10.0.0.1", number) for number in range(4)] == [None] * 4
    assert strangers.arrive("10.0.0.1", 4) == 4  # one too many of this host
    assert [strangers.arrive("10.0.0.2", 10 + number) for number in range(4)] == [None] * 4
    assert len(strangers) == 8


def test_the_host_that_has_most_makes_room_for_another() -> None:
    strangers: Strangers[str] = Strangers(6, 6)
    for number in range(5):
        strangers.arrive("10.0.0.1", f"crowd {number}")
    strangers.arrive("10.0.0.2", "alone")
    assert strangers.arrive("10.0.0.3", "new") == "crowd 0"
    assert strangers.arrive("10.0.0.2", "second") == "crowd 1"
    assert strangers.arrive("10.0.0.1", "crowd again") == "crowd again"
    assert len(strangers) == 6


def test_who_proved_himself_or_left_waits_no_more() -> None:
    strangers: Strangers[int] = Strangers(2, 2)
    strangers.arrive("a", 1)
    strangers.arrive("a", 2)
    strangers.leave(1)
    strangers.leave(1)
    assert strangers.arrive("a", 3) is None
    strangers.leave(2)
    strangers.leave(3)
    assert len(strangers) == 0
    assert not strangers._by_host


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("a name", "a name"),
    ],
)
def test_a_network_of_addresses_is_one_host(host: str, group: str) -> None:
    assert host_group(host) == group


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_the_limits_hold_whatever_comes(events: list[tuple[int, bool]]) -> None:
    strangers: Strangers[int] = Strangers(12, 5)
    waiting: set[int] = set()
    for number, (host, leaves) in enumerate(events):
        if leaves and waiting:
            gone = min(waiting)
            strangers.leave(gone)
            waiting.discard(gone)
            continue
        dropped = strangers.arrive(f"10.0.0.{host}", number)
        waiting.add(number)
        waiting.discard(-1 if dropped is None else dropped)
        assert set(strangers._host_of) == waiting
        assert len(waiting) <= 12
        assert all(len(own) <= 5 for own in strangers._by_host.values())
