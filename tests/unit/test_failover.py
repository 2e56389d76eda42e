"""Which holder is tried next, and what the caller hears at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.objects import Version
from p2pstore.transfer.failover import (
    MAX_ATTEMPTS,
    AnotherVersion,
    HolderReport,
    PullAttempts,
    PullFailed,
    SilentHolders,
    TooSlow,
    is_silence,
    order_copies,
)
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import Code
from tests.present import present


class FakeTransport:
    def __init__(self, name: str, cost: float, *, same_host_only: bool = False) -> None:
        self.name = name
        self._cost = cost
        self._same_host_only = same_host_only

    def why_not(self, copy: RemoteCopy) -> str:
        return "on another host" if self._same_host_only and not copy.same_host else ""

    def cost(self, copy: RemoteCopy) -> float:
        return self._cost


TCP: Any = FakeTransport("tcp", 1.0)
SHM: Any = FakeTransport("shm", 0.1, same_host_only=True)


def copy(member: int, *, same_host: bool = False, load: int = 0) -> RemoteCopy:
    return RemoteCopy(
        bytes([member]), ("10.0.0.1:1",), member=member, same_host=same_host, load_permille=load
    )


def members(copies: list[RemoteCopy]) -> list[int]:
    return [each.member for each in copies]


def test_of_two_random_copies_the_less_loaded_goes_first() -> None:
    copies = [copy(member, load=member * 100) for member in range(1, 6)]
    first = Counter(order_copies(copies, Random(seed))[0].member for seed in range(3000))
    # Of the 10 pairs, member 1 wins 4, member 2 wins 3, member 3 wins 2, member 4 wins 1.
    for member, share in ((1, 0.4), (2, 0.3), (3, 0.2), (4, 0.1)):
        assert abs(first[member] / 3000 - share) < 0.04
    assert first[5] == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=12), st.integers())
def test_copies_on_this_host_come_first_and_none_is_lost(
    described: list[tuple[bool, int]], seed: int
) -> None:
    copies = [
        copy(member, same_host=same_host, load=load)
        for member, (same_host, load) in enumerate(described)
    ]
    ordered = order_copies(copies, Random(seed))
    assert sorted(members(ordered)) == list(range(len(copies)))
    assert [each.same_host for each in ordered] == sorted(
        (each.same_host for each in copies), reverse=True
    )


def test_the_next_transport_is_tried_when_the_way_failed() -> None:
    attempts = PullAttempts([copy(1, same_host=True), copy(2)], [TCP, SHM])
    first = present(attempts.next())
    assert (first.copy.member, first.transport) == (1, 1)
    attempts.failed(PullFailed(Code.UNAVAILABLE, "refused", retriable=True))
    second = present(attempts.next())
    assert (second.copy.member, second.transport) == (1, 0)
    assert attempts.reports == []  # the holder is not to blame yet
    attempts.failed(PullFailed(Code.UNAVAILABLE, "refused as well", retriable=True))
    third = present(attempts.next())
    assert (third.copy.member, third.transport) == (2, 0)
    assert [(report.member, report.transport) for report in attempts.reports] == [(1, "tcp")]


def test_a_holder_without_the_object_is_not_asked_twice() -> None:
    attempts = PullAttempts([copy(1, same_host=True), copy(2)], [TCP, SHM])
    attempts.next()
    attempts.failed(PullFailed(Code.NO_SUCH_KEY, "gone", incarnation=3, sequence=9))
    second = present(attempts.next())
    assert second.copy.member == 2
    (report,) = attempts.reports
    assert (report.member, report.code, report.incarnation, report.sequence) == (
        1,
        Code.NO_SUCH_KEY,
        3,
        9,
    )
    assert report.transport == "shm"


def test_holders_are_hurried_while_others_are_left() -> None:
    attempts = PullAttempts([copy(1, same_host=True), copy(2)], [TCP, SHM])
    first = present(attempts.next())
    assert first.has_alternatives
    attempts.failed(PullFailed(Code.DEADLINE_EXCEEDED, "hangs"))
    last = present(attempts.next())
    assert (last.copy.member, last.has_alternatives) == (2, False)
    attempts.failed(PullFailed(Code.DEADLINE_EXCEEDED, "hangs"))
    assert [(each.member, each.has_alternatives) for each in attempts.reports] == [(1, True), (2, False)]


def test_a_holder_is_to_begin_soon_while_another_was_not_asked_yet() -> None:
    attempts, course = PullAttempts([copy(1), copy(2)], [TCP]), []
    while attempt := attempts.next():
        course.append((attempt.copy.member, attempt.soon, attempt.has_alternatives))
        attempts.failed(
            TooSlow("silent") if attempt.soon else PullFailed(Code.DEADLINE_EXCEEDED, "hangs")
        )
    assert course == [(1, True, True), (2, False, True), (1, False, False)]


def test_busy_holders_are_asked_once_more_when_no_other_delivered() -> None:
    busy = PullFailed(Code.BUSY, "much to send")
    attempts = PullAttempts([copy(1), copy(2), copy(3)], [TCP])
    course = []
    for failure in (busy, PullFailed(Code.NO_SUCH_KEY, "gone"), busy, busy):
        attempt = present(attempts.next())
        course.append((attempt.copy.member, attempt.has_alternatives))
        attempts.failed(failure)
    last = present(attempts.next())
    course.append((last.copy.member, last.has_alternatives))
    assert course == [(1, True), (2, True), (3, True), (1, False), (3, False)]
    attempts.failed(PullFailed(Code.NO_SUCH_KEY, "gone"))
    assert attempts.next() is None
    # A holder that refused against the rules is reported as every failure.
    assert [(each.member, each.code) for each in attempts.reports] == [
        (2, Code.NO_SUCH_KEY),
        (1, Code.BUSY),
        (3, Code.NO_SUCH_KEY),
    ]
    assert isinstance(attempts.error(), Unavailable)


def test_those_that_were_too_slow_are_asked_once_more_when_no_other_delivered() -> None:
    """Then each of them is held against the others of them, the last one against none."""
    slow, gone = TooSlow("too slow"), PullFailed(Code.NO_SUCH_KEY, "gone")
    attempts = PullAttempts([copy(1), copy(2), copy(3)], [TCP])
    course = []
    for failure in (slow, gone, slow, slow, slow):
        attempt = present(attempts.next())
        others = [each.member for each in attempt.others]
        course.append((attempt.copy.member, attempt.has_alternatives, others))
        attempts.failed(failure)
    assert course == [
        (1, True, [2, 3]),
        (2, True, [3, 1]),
        (3, True, [1]),
        (1, False, [3]),
        (3, False, []),
    ]
    assert attempts.next() is None
    assert [(each.member, each.has_alternatives) for each in attempts.reports] == [
        (2, True),
        (1, False),
        (3, False),
    ]


def test_who_was_too_slow_is_told_even_if_another_delivers() -> None:
    attempts = PullAttempts([copy(1), copy(2)], [TCP])
    attempts.next()
    attempts.failed(TooSlow("too slow"))
    delivers = present(attempts.next())
    assert (delivers.copy.member, delivers.has_alternatives) == (2, True)
    assert [(each.member, each.code) for each in attempts.reports] == [(1, Code.DEADLINE_EXCEEDED)]
    assert is_silence(attempts.reports[0])


def test_the_only_holder_is_not_asked_twice() -> None:
    attempts = PullAttempts([copy(1)], [TCP])
    first = present(attempts.next())
    assert not first.has_alternatives
    attempts.failed(PullFailed(Code.BUSY, "much to send"))
    assert attempts.next() is None
    assert [each.code for each in attempts.reports] == [Code.BUSY]


def test_reads_of_a_batch_wait_for_a_silent_holder_once() -> None:
    silent = SilentHolders()
    holders = [copy(1), copy(2), copy(3)]
    assert members(silent.last(holders)) == [1, 2, 3]
    silent.learn(
        [
            HolderReport(1, Code.DEADLINE_EXCEEDED, "hangs", "tcp", has_alternatives=True),
            HolderReport(2, Code.DEADLINE_EXCEEDED, "hangs", "tcp"),
            HolderReport(3, Code.NO_SUCH_KEY, "gone", "tcp"),
        ]
    )
    assert members(silent.last(holders)) == [3, 1]
    silent.add(1, has_alternatives=False)
    silent.add(1, has_alternatives=True)
    assert members(silent.last(holders)) == [3]
    assert is_silence(PullFailed(Code.DEADLINE_EXCEEDED, "hangs"))
    assert not is_silence(PullFailed(Code.UNAVAILABLE, "refused"))
    assert not is_silence(TimeoutError())


def test_all_said_not_found() -> None:
    attempts = PullAttempts([copy(1), copy(2)], [TCP])
    while attempts.next():
        attempts.failed(PullFailed(Code.NO_SUCH_KEY, "gone"))
    assert isinstance(attempts.error(), NoSuchKey)


def test_one_that_could_not_be_asked_makes_it_unavailable() -> None:
    attempts = PullAttempts([copy(1), copy(2)], [TCP])
    attempts.next()
    attempts.failed(PullFailed(Code.NO_SUCH_KEY, "gone"))
    attempts.next()
    attempts.failed(PullFailed(Code.STALE, "chunk 3 arrived damaged"))
    assert attempts.next() is None
    error = attempts.error()
    assert isinstance(error, Unavailable)
    assert "chunk 3 arrived damaged (tcp)" in str(error)


def test_no_copies_at_all_is_no_such_key() -> None:
    attempts = PullAttempts([], [TCP])
    assert attempts.next() is None
    assert isinstance(attempts.error(), NoSuchKey)


def test_a_copy_that_no_transport_reaches_is_unavailable() -> None:
    attempts = PullAttempts([copy(1)], [SHM])
    assert attempts.next() is None
    assert isinstance(attempts.error(), Unavailable)
    assert attempts.reports[0].code is Code.UNAVAILABLE


@given(
    st.lists(st.booleans(), max_size=25),
    st.lists(st.tuples(st.sampled_from(list(Code)), st.booleans()), min_size=70, max_size=70),
)
def test_every_reachable_holder_is_asked_before_giving_up(
    hosts: list[bool], outcomes: list[tuple[Code, bool]]
) -> None:
    copies = [copy(member, same_host=same_host) for member, same_host in enumerate(hosts)]
    attempts = PullAttempts(copies, [TCP, SHM])
    asked: list[tuple[int, int]] = []
    busy: set[int] = set()
    for code, retriable in outcomes:
        attempt = attempts.next()
        if attempt is None:
            break
        asked.append((attempt.copy.member, attempt.transport))
        if code is Code.BUSY:
            busy.add(attempt.copy.member)
        attempts.failed(PullFailed(code, "no", retriable=retriable))
    assert attempts.next() is None
    assert all(asked.count(way) <= 1 + (way[0] in busy) for way in asked)
    assert sorted({member for member, _ in asked}) == list(range(min(len(hosts), MAX_ATTEMPTS)))
    assert sorted(report.member for report in attempts.reports) == list(
        range(min(len(hosts), MAX_ATTEMPTS))
    )


def test_helpers_are_of_the_same_version_and_reached_the_same_way() -> None:
    newer = Version(2, 1)
    copies = [
        replace(copy(1), version=newer),
        replace(copy(2, same_host=True), version=newer),  # cheaper by another transport
        copy(3),
        replace(copy(4), version=newer),
        replace(copy(5), version=newer),
    ]
    attempts = PullAttempts(copies, [TCP, SHM])
    assert attempts.next_helper() is None  # no attempt is under way yet
    present(attempts.next())
    assert attempts.has_helper
    helpers = [attempts.next_helper(), attempts.next_helper()]
    assert [each.member for each in helpers if each is not None] == [4, 5]
    assert not attempts.has_helper
    assert attempts.next_helper() is None
    attempts.helper_failed(copies[3], 0, PullFailed(Code.STALE, "damaged"))
    attempts.helper_failed(copies[4], 0, PullFailed(Code.BUSY, "busy"))
    attempts.failed(PullFailed(Code.UNAVAILABLE, "broken"))
    rest = []
    while attempt := attempts.next():
        rest.append(attempt.copy.member)
        assert attempts.next_helper() is None or attempt.copy.member == 3
        attempts.failed(PullFailed(Code.UNAVAILABLE, "broken"))
    assert rest == [2, 3, 5]  # who failed is not asked again, who was busy last
    assert [each.member for each in attempts.reports] == [4, 1, 2, 3, 5]


def test_who_replaced_the_object_is_asked_once_more() -> None:
    attempts = PullAttempts([copy(1), copy(2)], [TCP])
    asked = []
    while attempt := attempts.next():
        asked.append(attempt.copy.member)
        attempts.failed(AnotherVersion())
    assert asked == [1, 2, 1, 2]
    assert [each.code for each in attempts.reports] == [Code.STALE] * 2


def test_a_helper_with_another_version_is_asked_when_the_rest_failed() -> None:
    attempts = PullAttempts([copy(1), copy(2)], [TCP])
    attempts.next()
    helper = present(attempts.next_helper())
    attempts.helper_failed(helper, 0, AnotherVersion())
    attempts.failed(PullFailed(Code.UNAVAILABLE, "broken"))
    again = present(attempts.next())
    assert again.copy is helper
    assert [each.member for each in attempts.reports] == [1]


def copy_of(member: int) -> RemoteCopy:
    return RemoteCopy(b"peer", ("10.0.0.1:1",), member=member, same_host=True)


def test_the_next_transport_to_a_holder_is_a_fallback_and_the_next_holder_is_not() -> None:
    attempts = PullAttempts([copy_of(1), copy_of(2)], [TCP, SHM])
    for code, retriable in ((Code.UNAVAILABLE, True), (Code.UNAVAILABLE, True), (Code.STALE, False)):
        assert attempts.next() is not None
        attempts.failed(PullFailed(code, "refused", retriable=retriable))
    assert [(each.member, each.transport) for each in attempts.fallbacks] == [(1, "shm")]
    assert [(each.member, each.transport) for each in attempts.reports] == [(1, "tcp"), (2, "shm")]
