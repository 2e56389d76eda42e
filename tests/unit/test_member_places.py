"""The member that makes room when all places are taken."""

from __future__ import annotations

from p2pstore.access.crowding import Holder, crowd, yielding


def holder(host: str, member: bytes, used_at: float, *, busy: bool = False) -> Holder:
    return Holder(host, member, busy, used_at)


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
