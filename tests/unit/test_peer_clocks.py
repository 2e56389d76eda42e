"""How a peer's wall clock stands among those of the others."""

import math

import pytest

from p2pstore.gossip.members.peer_clocks import (
    KEPT_SECONDS,
    MAX_READINGS,
    TRANSIT_SECONDS,
    ClockView,
    PeerClocks,
    judge,
)

UNIX = 1_800_000_000.0
OFFSET = UNIX - 100.0
"""Of a wall clock that is right, at the monotonic time 100."""


def told(clocks: PeerClocks, name: bytes, ahead: float, now: float = 100.0) -> None:
    """A member's clock is so far ahead of a right one, as it says within 1 ms."""
    clocks.answered(name, round((OFFSET + now + ahead) * 1000), now - 0.0005, now + 0.0005)


def view(clocks: PeerClocks, offset: float = OFFSET, now: float = 100.0) -> ClockView:
    return clocks.view(clocks.known(lambda peer_id: True, now), offset, alone=False)


@pytest.mark.parametrize(
    ("aheads", "lead", "is_behind", "may_be_behind"),
    [
        ([], 10.0, False, False),
        ([0.0], 10.0, False, False),
        ([3600.0], -3590.0, False, False),  # two clocks: the peer ahead may not write
        ([-3600.0], 10.0, False, True),
        ([3600.0, 0.0], 10.0, False, False),  # one wrong clock of three accuses itself only
        ([-3600.0, 0.0], 10.0, False, False),
        ([3600.0, 3600.0], -3590.0, False, False),
        ([-3600.0, -3600.0], 10.0, True, False),
        ([3600.0, 3600.0, 0.0], -3590.0, False, False),  # two and two
        ([-3600.0, -3600.0, 0.0], 10.0, False, True),
        ([3.0, 9.0, 4.0, 0.0], 7.0, False, False),  # of five, two would refuse more
        ([-9.0, -11.0, -9.0], 10.0, False, False),
    ],
)
def test_who_may_write(aheads: list[float], lead: float, is_behind: bool, may_be_behind: bool) -> None:
    found = judge(aheads, None, alone=False)
    assert (found.lead, found.is_behind, found.may_be_behind) == (lead, is_behind, may_be_behind)


def test_who_is_alone_is_refused_by_nobody() -> None:
    assert judge([], None, alone=True).lead == math.inf


def test_a_clock_that_is_set_here_shows_at_once() -> None:
    clocks = PeerClocks()
    for name in (b"a", b"b", b"c"):
        told(clocks, name, 0.0)
    assert view(clocks).lead == 10.0
    fast = view(clocks, OFFSET + 3600.0)
    assert fast.lead == pytest.approx(-3590.0, abs=0.01)
    assert fast.middle == pytest.approx(3600.0, abs=0.01)
    assert view(clocks, OFFSET - 3600.0).is_behind
    assert view(clocks).lead == 10.0


def test_a_long_way_accuses_nobody() -> None:
    """An answer that lay in a socket while this process stood still: any time in between is possible."""
    clocks = PeerClocks()
    clocks.answered(b"a", round((OFFSET + 100.0) * 1000), 70.0, 130.0)
    assert clocks.ahead_of(b"a", OFFSET) == 0.0
    assert clocks.ahead_of(b"a", OFFSET + 29.0) == 0.0
    assert clocks.ahead_of(b"a", OFFSET + 3600.0) == pytest.approx(3570.0)
    assert clocks.ahead_of(b"b", OFFSET) is None


def test_a_request_counts_until_there_is_an_answer() -> None:
    clocks = PeerClocks()
    clocks.asked(b"a", round((UNIX - 60.0) * 1000), 100.0)
    assert clocks.ahead_of(b"a", OFFSET) == pytest.approx(60.0 - TRANSIT_SECONDS)
    told(clocks, b"a", -50.0)
    clocks.asked(b"a", round(UNIX * 1000), 100.0)
    assert clocks.ahead_of(b"a", OFFSET) == pytest.approx(50.0, abs=0.01)
    clocks.asked(b"a", round((UNIX + 200.0) * 1000), 300.0)  # the answer is old by now
    assert clocks.ahead_of(b"a", OFFSET) == 0.0


def test_only_the_latest_readings_of_the_living_count() -> None:
    clocks = PeerClocks()
    told(clocks, b"old", 3600.0, 100.0 - KEPT_SECONDS - 1.0)
    told(clocks, b"dead", 3600.0)
    told(clocks, b"older version", 0.0)
    clocks.answered(b"silent", 0, 99.0, 100.0)
    known = clocks.known(lambda peer_id: peer_id != b"dead", 100.0)
    assert known == [b"older version"]
    for number in range(MAX_READINGS):
        told(clocks, bytes([number]), 0.0)
    assert len(clocks.known(lambda peer_id: True, 100.0)) == MAX_READINGS
    assert clocks.ahead_of(b"dead", OFFSET) is None
