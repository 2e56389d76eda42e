"""Which side of a split may compact, and when a peer may have missed a compaction."""

import pytest

from p2pstore.gossip.floors.quorum import GONE_SECONDS, MARGIN_SECONDS, TIE_SECONDS, Quorum, Showing

WALL = 1_800_000_000.0


class World:
    """One peer, and the members that it is in touch with."""

    def __init__(self, members: int) -> None:
        self.quorum = Quorum()
        self.now = 0.0
        self.living: set[int] = set()
        self.quorum.start((), WALL, 0.0)
        self.come(*range(members))
        self.run(100.0)
        assert not self.quorum.apart

    def come(self, *members: int) -> None:
        for member in members:
            self.quorum.member_joined(member, self.now)
            self.living.add(member)

    def go(self, *members: int, left: bool = False) -> None:
        for member in members:
            self.quorum.member_gone(member, self.now, left=left)
            self.living.remove(member)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            living = len(self.living)
            self.quorum.track(self.now, WALL + self.now, living, living)
            self.quorum.forget(self.now)

    @property
    def may_compact(self) -> bool:
        return self.quorum.may_compact(self.quorum.live_count)


@pytest.mark.parametrize(
    ("members", "gone", "may"), [(4, 2, True), (4, 3, False), (3, 2, True), (1, 1, True), (2, 2, False)]
)
def test_a_side_compacts_when_it_has_half_of_all(members: int, gone: int, may: bool) -> None:
    """`members` besides this one."""
    world = World(members)
    world.go(*range(gone))
    world.run(2.0)
    assert world.may_compact is may
    assert (world.quorum.missing(world.now) != []) is True
    world.run(399.0)
    assert world.may_compact, "they count for four times as long as they had lived here"


def test_those_that_left_do_not_count() -> None:
    world = World(4)
    world.go(0, 1, 2, left=True)
    world.run(2.0)
    assert world.may_compact
    assert world.quorum.missing(world.now) == []
    assert sorted(world.quorum.waited_for(world.now)) == [0, 1, 2], "others may not know yet"


def test_processes_that_come_and_die_all_the_time_do_not_add_up() -> None:
    world = World(3)
    for member in range(100, 150):
        world.come(member)
        world.run(20.0)
        world.go(member)
        world.run(10.0)
        assert world.may_compact
        assert not world.quorum.apart


@pytest.mark.parametrize(
    ("members", "gone", "seconds"),
    [(1, 1, TIE_SECONDS), (3, 2, TIE_SECONDS), (2, 2, GONE_SECONDS), (4, 3, GONE_SECONDS)],
)
def test_a_peer_without_more_than_half_may_have_missed_something(
    members: int, gone: int, seconds: float
) -> None:
    """As soon as the other side waits for it no longer."""
    world = World(members)
    world.go(*range(gone))
    world.run(seconds - MARGIN_SECONDS - 3.0)
    assert not world.quorum.apart
    assert set(world.quorum.waited_for(world.now)) == set(range(gone))
    world.run(6.0)
    assert world.quorum.apart
    world.come(*range(gone))
    world.run(55.0)
    assert world.quorum.apart, "until it had time to hear what they have"
    world.run(10.0)
    assert not world.quorum.apart


def test_a_split_may_last_longer_than_the_others_count() -> None:
    world = World(3)
    world.go(0, 1)
    world.run(3000.0)
    assert world.may_compact
    assert world.quorum.missing(world.now) == []
    assert world.quorum.apart, "the others may have compacted as well"
    world.come(0, 1)
    world.run(50.0)
    assert world.quorum.apart
    world.run(20.0)
    assert not world.quorum.apart


def test_a_peer_with_more_than_half_never_misses_anything() -> None:
    world = World(4)
    world.go(0, 1)
    world.run(1000.0)
    assert not world.quorum.apart


def test_a_process_that_stood_still_was_alone() -> None:
    world = World(3)
    world.now += 60.0
    world.run(1.0)
    assert world.quorum.apart


def test_a_short_restart_misses_nothing_and_a_long_one_may() -> None:
    for away, apart in ((20.0, False), (100.0, True)):
        quorum = Quorum()
        quorum.start((1, 2, 3), WALL, 0.0)
        quorum.member_joined(1, 1.0)
        quorum.track(1.0, WALL + away, 1, 0)
        assert quorum.apart is apart


@pytest.mark.parametrize("says_apart", [False, True])
@pytest.mark.parametrize("others", [2, 3, 4])
def test_one_member_is_not_followed_where_all_have_just_started(others: int, says_apart: bool) -> None:
    quorum = Quorum()
    quorum.start((), 0.0, 0.0)
    for member in range(others):
        quorum.member_joined(member, 0.5)
    quorum.track(8.0, WALL, others, 0)
    assert quorum.fresh
    for showing in range(1, others + 1):
        steady = 0 if says_apart else 1
        shown = Showing(showing, steady, others - steady)
        assert quorum.believes(shown, 8.0, costs=False) is (showing >= (others + 1) / 2)
