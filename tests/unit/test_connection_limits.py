"""Connections that go when there are too many, or no use for them, and when to look for these again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.access.crowding import (
    ConnectionLimits,
    PlaceOwner,
    Strangers,
    Use,
    crowd,
    host_group,
    idle,
    next_due,
    surplus,
    yielding,
)

LIMITS = ConnectionLimits(idle_seconds=100.0, max_open=4)


def use(used_at: float, *, kept: bool = False, opened_here: bool = True, busy: bool = False) -> Use:
    return Use(kept, opened_here, busy, used_at)


def test_only_who_opened_an_idle_connection_closes_it() -> None:
    uses = [use(0.0), use(0.1), use(0.0, kept=True), use(0.0, opened_here=False), use(0.0, busy=True)]
    assert idle(uses, 99.9, LIMITS) == []
    assert idle(uses, 100.0, LIMITS) == [0]
    assert idle(uses, 1e9, LIMITS) == [0, 1]


def test_over_the_limit_the_longest_unused_are_closed_whoever_opened_them() -> None:
    uses = [
        use(50.0),
        use(10.0, opened_here=False),
        use(30.0, opened_here=False),
        use(5.0, kept=True),
        use(1.0, busy=True),
    ]
    assert surplus(uses[:4], 60.0, LIMITS) == []
    assert surplus(uses, 60.0, LIMITS) == [1]
    assert surplus([*uses, use(20.0)], 60.0, LIMITS) == [1, 5]


def test_what_was_used_just_now_and_neighbours_are_not_closed_even_over_the_limit() -> None:
    fresh = [use(10.0, opened_here=False)] * 6
    assert surplus(fresh, 10.9, LIMITS) == []
    assert len(surplus(fresh, 11.0, LIMITS)) == 2
    assert surplus([use(0.0, kept=True)] * 6, 1e9, LIMITS) == []
    assert surplus([use(0.0, busy=True)] * 6, 1e9, LIMITS) == []


def test_nothing_wakes_while_all_connections_are_kept() -> None:
    assert next_due([], 5.0, LIMITS) == math.inf
    kept = [use(0.0, kept=True), use(0.0, opened_here=False)]
    assert next_due(kept, 5.0, LIMITS) == math.inf
    assert next_due([*kept, use(3.0), use(2.0)], 5.0, LIMITS) == 102.0
    assert next_due([use(0.0, busy=True)], 500.0, LIMITS) == 600.0
    assert next_due([use(0.0, opened_here=False)] * 5, 5.0, LIMITS) == 6.0


def test_over_the_limit_they_are_closed_of_who_has_most() -> None:
    """Not of the one that was there first."""

    def of(host: str, member: bytes, used_at: float) -> Use:
        return Use(False, True, False, used_at, host, member)

    uses = [
        of("a", b"1", 1.0),
        of("b", b"2", 50.0),
        of("b", b"3", 40.0),
        of("b", b"3", 45.0),
        of("c", b"4", 0.0),
    ]
    assert surplus(uses, 60.0, LIMITS) == [2]
    assert surplus([*uses, of("a", b"5", 30.0)], 60.0, LIMITS) == [2, 0]


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


def test_a_proved_or_ended_connection_waits_no_more() -> None:
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


def holder(host: str, member: bytes, used_at: float, *, busy: bool = False) -> PlaceOwner:
    return PlaceOwner(host, member, busy, used_at)


def test_the_longest_unused_one_of_the_largest_member_at_the_largest_host_goes() -> None:
    holders = [
        holder("a", b"1", 1.0),
        holder("a", b"2", 5.0),
        holder("a", b"2", 4.0),
        holder("b", b"3", 0.0),
        holder("b", b"4", 0.0),
    ]
    assert yielding(holders, "c", b"9", 5) == 2
    assert yielding(holders, "a", b"1", 5) == 2
    assert yielding(holders, "b", b"3", 5) == 2


def test_among_equals_the_longest_unused_goes() -> None:
    holders = [holder("a", bytes([number]), 10.0 - number) for number in range(8)]
    assert yielding(holders, "a", b"new", 8) == 7
    assert yielding(holders, "a", bytes([0]), 8) == 7


def test_one_without_use_goes_before_any_in_use() -> None:
    holders = [holder("a", b"1", 0.0, busy=True)] * 7 + [holder("b", b"2", 9.0)]
    assert yielding(holders, "b", b"2", 8) == 7


def test_of_those_in_use_only_a_crowds_go_and_not_for_itself() -> None:
    member = [holder("a", b"1", float(number), busy=True) for number in range(8)]
    assert yielding(member, "a", b"1", 8) is None
    assert yielding(member, "a", b"2", 8) == 0
    hosts = [holder("a", bytes([number]), float(number), busy=True) for number in range(8)]
    assert yielding(hosts, "a", b"new", 8) is None  # no host has a quarter
    assert yielding(hosts, "b", b"new", 8) == 0
    fair = [holder(f"h{number}", bytes([number]), 0.0, busy=True) for number in range(8)]
    assert yielding(fair, "new", b"new", 8) is None


def test_the_crowd_is_named() -> None:
    assert crowd([]) == (b"", 0, "", 0)
    assert crowd(
        [holder("a", b"1", 0), holder("a", b"2", 0), holder("b", b"2", 0), holder("a", b"3", 0)]
    ) == (b"2", 2, "a", 3)
