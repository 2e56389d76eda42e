"""Rumors are passed on a bounded number of times, the least often sent first."""

from __future__ import annotations

from itertools import islice

from p2pstore.gossip.exchange.rumors import Rumors


def take(rumors: Rumors[str], count: int, times: int) -> list[str]:
    taken = list(islice(rumors.least_sent(), count))
    for name in taken:
        rumors.sent(name, times)
    return taken


def test_the_least_sent_go_first_and_each_so_many_times() -> None:
    rumors: Rumors[str] = Rumors()
    for name in "abc":
        rumors.add(name)
    assert take(rumors, 2, 2) == ["a", "b"]
    rumors.add("d")
    assert take(rumors, 3, 2) == ["c", "d", "a"]
    assert take(rumors, 9, 2) == ["b", "c", "d"]
    assert len(rumors) == 0
    assert take(rumors, 9, 2) == []


def test_a_rumour_that_is_told_anew_starts_from_the_beginning_and_one_may_end_early() -> None:
    rumors: Rumors[str] = Rumors()
    for name in "ab":
        rumors.add(name)
    take(rumors, 2, 3)
    take(rumors, 1, 3)
    rumors.add("a")
    rumors.discard("b")
    rumors.discard("never")
    assert [take(rumors, 5, 3) for _ in range(4)] == [["a"], ["a"], ["a"], []]
    rumors.add("c")
    rumors.clear()
    assert not list(rumors.least_sent())
