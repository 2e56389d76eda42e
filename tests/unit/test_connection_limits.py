"""Which connections are closed, and when to look again."""

from __future__ import annotations

import math

from p2pstore.gossip.links.connection_limits import ConnectionLimits, Use, idle, next_due, surplus

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
