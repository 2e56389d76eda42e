"""Members with the same floors as this peer, those to ask, and those in dispute that compaction does not wait for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from p2pstore.gossip.floors.floor_comparison import (
    DISPUTE_REFUSALS,
    DISPUTE_SECONDS,
    RECORDS_PER_SECOND,
    REFUSAL_SECONDS,
    WAITED_SECONDS,
    Agreements,
    FloorAnswer,
)
from tests.unit.test_floor_sync import Cluster, Shown, Side, clock

ONE, OTHER = 1, 2


def refused(*times: float, end: int = 100) -> Agreements:
    agreements = Agreements()
    for now in times:
        agreements.refuses(ONE, end, now)
    return agreements


# --- disputes --------------------------------------------------------------------------------


def test_a_member_that_refuses_again_and_again_is_in_dispute() -> None:
    agreements = refused(0.0, 5.0)
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 100, 10.0)
    assert agreements.in_dispute(ONE, 0, 0.0)
    assert not agreements.in_dispute(OTHER, 0, 0.0)


def test_refusals_in_quick_succession_are_one() -> None:
    """Else a difference of a moment would do, where exchanges follow each other quickly."""
    agreements = refused(*(number / 100 for number in range(400)))
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 100, 30.0)
    assert not agreements.in_dispute(ONE, 0, 0.0), "two, however far apart"


def test_a_dispute_takes_some_time() -> None:
    assert REFUSAL_SECONDS * (DISPUTE_REFUSALS - 1) == DISPUTE_SECONDS
    early = refused(0.0, 5.0, 9.9)
    assert not early.in_dispute(ONE, 0, 0.0)
    early.refuses(ONE, 100, 10.1)
    assert early.in_dispute(ONE, 0, 0.0)


@pytest.mark.parametrize(("records", "slack"), [(20 * RECORDS_PER_SECOND, 0.0), (0, 20.0)])
def test_it_takes_longer_where_much_has_to_travel(records: int, slack: float) -> None:
    """A member that comes out of a split has thousands of floors yet to hear of."""
    agreements = refused(*range(0, 30, 5))
    assert not agreements.in_dispute(ONE, records, slack)
    agreements.refuses(ONE, 100, 30.0)
    assert not agreements.in_dispute(ONE, records + RECORDS_PER_SECOND, slack)
    assert not agreements.in_dispute(ONE, records, slack + 1.0)
    assert agreements.in_dispute(ONE, records, slack)
    assert agreements.in_dispute(ONE, 10 * records, 10 * slack), "what was found once stays"


def test_time_without_answers_does_not_count() -> None:
    """A member that cannot be reached is waited for as long as any."""
    agreements = refused(0.0, 5.0, 10.0)
    assert not agreements.in_dispute(ONE, 10 * RECORDS_PER_SECOND, 0.0), "however late it is now"


def test_an_answer_that_agrees_ends_the_dispute() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 99)
    assert agreements.in_dispute(ONE, 0, 0.0), "about less"
    agreements.agrees(ONE, 100)
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 200, 15.0)
    assert not agreements.in_dispute(ONE, 0, 0.0), "it begins anew"


def test_a_record_that_agrees_ends_the_dispute_if_it_agrees_with_all() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.announced[ONE] = 150
    assert agreements.with_all(ONE, 99) == 99
    assert agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.with_all(ONE, 100) == 100
    assert not agreements.in_dispute(ONE, 0, 0.0)


def test_the_same_end_is_asked_about_again() -> None:
    """Else a member that is always a little late would be taken for one that lies."""
    agreements = refused(0.0, end=100)
    agreements.refuses(ONE, 200, 5.0)
    assert agreements.disputed_end(ONE, 50) == 100
    assert agreements.disputed_end(ONE, 100) == 0, "nobody answers about so old ones"
    assert agreements.disputed_end(OTHER, 50) == 0


# --- agreements ------------------------------------------------------------------------------


def test_what_a_member_said_directly_counts_as_its_record_does() -> None:
    agreements = Agreements()
    agreements.announced[ONE] = 50
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 40)) == (50, 40)
    agreements.agrees(ONE, 50)
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 40)) == (50, 40), "its record is right"
    agreements.agrees(ONE, 60)
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 1)) == (60, 60)
    agreements.agrees(ONE, 30)
    assert agreements.with_me(ONE) == 60, "what was told once stays"
    assert (agreements.with_me(OTHER), agreements.with_all(OTHER, 40)) == (0, 0)


def test_a_wait_is_over_when_all_is_confirmed_of_its_beginning() -> None:
    """A member that confirms a little now and then would be waited for without end."""
    agreements = Agreements()
    waited = [agreements.waited(ONE, 10 + now // 10, 100 + now, float(now)) for now in range(50)]
    assert waited == [float(now) for now in range(50)]
    assert agreements.waited(ONE, 99, 150, 50.0) == 50.0
    assert agreements.waited(ONE, 100, 150, 51.0) == 0.0
    assert agreements.waited(ONE, 149, 200, 52.0) == 1.0, "now it is to agree about 150"


def test_time_in_which_nobody_looked_does_not_count() -> None:
    agreements = Agreements()
    agreements.waited(ONE, 0, 100, 0.0)
    assert agreements.waited(ONE, 0, 100, 500.0) == 1.0
    agreements.forget_old(500.0 + WAITED_SECONDS)
    assert agreements.waited(ONE, 0, 100, 5_000.0) == 2.0
    agreements.forget_old(5_001.0 + WAITED_SECONDS)
    assert agreements.waited(ONE, 0, 100, 9_999.0) == 0.0


def test_that_it_was_waited_for_stays_when_a_member_goes() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 50)
    for now in range(10):
        agreements.waited(ONE, 50, 100, float(now))
    agreements.forget(ONE)
    assert agreements.with_me(ONE) == 0
    assert not agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.waited(ONE, 0, 100, 10.0) == 10.0
    agreements.expelled(ONE)
    assert agreements.waited(ONE, 0, 100, 11.0) == 0.0


def test_ends_that_are_not_crowded_any_more_are_not_waited_for() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 50)
    agreements.waited(ONE, 0, 100, 0.0)
    agreements.end_waiting()
    assert not agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.waited(ONE, 0, 100, 1.0) == 0.0
    assert agreements.with_me(ONE) == 50
    agreements.clear()
    assert agreements.with_me(ONE) == 0


# --- asking ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("living", "interval"), [(5, 5.0), (25, 5.0), (100, 20.0)])
def test_all_together_do_not_ask_a_member_too_often(living: int, interval: float) -> None:
    agreements = Agreements()
    asked = [now / 4 for now in range(400) if agreements.take_to_ask([ONE], living, now / 4) == [ONE]]
    assert asked[0] == 0.0
    assert {later - sooner for sooner, later in pairwise(asked)} == {interval}
    assert agreements.take_to_ask([ONE, OTHER], living, asked[-1]) == [OTHER]


Lie = Callable[[Shown], Shown]

JUNK_HASH: Lie = lambda shown: replace(shown, floors_hash=shown.floors_hash ^ shown.floors_end)  # noqa: E731
AGREES_WITH_NOBODY: Lie = lambda shown: replace(shown, floors_seen=0)  # noqa: E731
NEVER_READY: Lie = lambda shown: replace(shown, floors_end=1, floors_hash=0)  # noqa: E731
OTHER_HORIZON: Lie = lambda shown: replace(shown, floors_horizon=shown.floors_end)  # noqa: E731
LIES = [JUNK_HASH, AGREES_WITH_NOBODY, NEVER_READY, OTHER_HORIZON]


class Talking(Cluster):
    """Peers that ask each other besides: those that `take_to_ask` names. One of them may lie in its record, and refuse
    to agree with any."""

    def __init__(self, lie: Lie, *, refuses: bool, liar: int = -1) -> None:
        super().__init__(4)
        ordered = sorted(self.sides, key=lambda side: side.member)
        self.liar = ordered[liar]
        self.honest = [side for side in self.sides if side is not self.liar]
        self.lie, self.refuses = lie, refuses
        self.asked = 0
        for side in self.sides:
            for other in self.sides:
                side.sync.came(other.member, 0.0)
            for key in range(16):
                side.hear(key, 10.0 + key, writer=1 + self.sides.index(self.honest[0]))

    def run(self, begin: int, end: int, living: Sequence[Side] = ()) -> None:
        sides = {side.member: side for side in self.sides}
        for now in range(begin, end):
            for side in self.sides:
                self.shown[side] = side.announce(now)
            self.shown[self.liar] = self.lie(self.shown[self.liar])
            for side in self.honest:
                side.tick(now, members=[self.shown[other] for other in self.sides if other is not side])
                for member in side.sync.take_to_ask(now):
                    self.answered(side, sides[member], now)

    def answered(self, side: Side, other: Side, now: float) -> None:
        self.asked += other is self.liar
        if other is self.liar and self.refuses:
            asked, _ = side.sync.question(other.member, now, at_once=True)
            side.sync.learn(FloorAnswer(), asked, now, sender=other.member, same_now=False)
        else:
            side.ask(other, now)

    def run_until_some_are_dropped(self) -> list[Side]:
        """By whom, within the patience that a member has which cannot be reached."""
        for now in range(300):
            self.run(now, now + 1)
            by = [side for side in self.honest if side.records.floors.compacted_before]
            if by:
                return by
        return []


@pytest.mark.parametrize("lie", [JUNK_HASH, NEVER_READY, OTHER_HORIZON])
def test_a_member_that_agrees_when_it_is_asked_is_not_waited_for(lie: Lie) -> None:
    cluster = Talking(lie, refuses=False)
    assert cluster.run_until_some_are_dropped()
    assert not any(side.sync.passed_over for side in cluster.honest)
    assert cluster.asked


@pytest.mark.parametrize("lie", LIES)
def test_a_member_that_refuses_whenever_it_is_asked_is_passed_over(lie: Lie) -> None:
    cluster = Talking(lie, refuses=True)
    assert cluster.run_until_some_are_dropped()
    for side in cluster.honest:
        assert side.sync.passed_over == side.sync.disputed == [cluster.liar.member]
        assert cluster.liar.member not in side.sync.waits_for


def test_one_that_shows_another_horizon_has_some_time_to_follow() -> None:
    passed = []
    for lie in (JUNK_HASH, OTHER_HORIZON):
        cluster = Talking(lie, refuses=True)
        now = 0
        while not cluster.honest[0].sync.passed_over:
            cluster.run(now, now + 1)
            now += 1
            assert now < 150
        passed.append(now)
    assert passed[1] >= passed[0] + 15


def test_a_peer_that_was_away_passes_over_nobody_for_that() -> None:
    """It may be this peer that lacks what the others have."""
    cluster = Talking(JUNK_HASH, refuses=True)
    for now in range(150):
        for side in cluster.honest:
            side.sync.quorum.apart, side.sync.quorum._apart_at = True, now
        cluster.run(now, now + 1)
        assert not any(side.sync.passed_over for side in cluster.honest)


def test_nor_does_one_whose_horizon_is_not_that_of_most() -> None:
    """As after a restart of all: they agree on one in the end, which takes longer than any dispute."""
    cluster = Talking(OTHER_HORIZON, refuses=True)
    for number, side in enumerate(cluster.honest):
        side.records.floors.raise_horizon({77: clock(number)})
    for now in range(150):
        cluster.run(now, now + 1)
        assert not any(side.sync.passed_over for side in cluster.honest)


def test_what_a_member_with_a_right_record_waits_for_stays() -> None:
    """It may know a member that no other peer knows, and could not follow."""
    cluster = Talking(AGREES_WITH_NOBODY, refuses=False)
    assert not cluster.run_until_some_are_dropped()


def test_one_that_is_first_of_all_does_not_keep_the_others_from_compacting() -> None:
    cluster = Talking(JUNK_HASH, refuses=True, liar=0)
    first = min(cluster.honest, key=lambda side: side.member)
    assert cluster.run_until_some_are_dropped() == [first]


def test_a_member_that_is_always_late_is_waited_for() -> None:
    """It lacks some floor whenever it is asked, but each time another one."""
    cluster = Talking(JUNK_HASH, refuses=False)
    for side in cluster.sides:
        side.records.floors.limit = 200
    for now in range(120):
        new, old = 1_000 + now, 1_000 + now - 20
        for side in cluster.honest:
            side.hear(new, now - 2.0)
        if old >= 1_000:
            cluster.liar.hear(old, now - 22.0)
        cluster.run(now, now + 1)
        assert not any(side.sync.passed_over for side in cluster.honest)
    agreements = cluster.honest[0].sync.agreements
    assert agreements.with_me(cluster.liar.member) > clock(60.0)
    assert cluster.asked > 5


def test_nothing_is_kept_of_strangers() -> None:
    side, stranger = Side(1), Side(7)
    side.tick(100.0)
    stranger.tick(100.0)
    stranger.ask(side, 100.0)
    side.ask(stranger, 100.0)
    assert side.sync.agreements.with_me(stranger.member) == 0
    side.sync.came(stranger.member, 100.0)
    side.ask(stranger, 100.0)
    assert side.sync.agreements.with_me(stranger.member) > clock(80.0)


def test_who_asks_and_agrees_confirms_as_well() -> None:
    side, other = Side(1), Side(2)
    for each in (side, other):
        each.tick(100.0)
    side.sync.came(other.member, 100.0)
    other.ask(side, 100.0)
    assert side.sync.agreements.with_me(other.member) > clock(80.0)


def test_a_difference_while_floors_are_being_dropped_is_no_refusal() -> None:
    side, other = Side(1), Side(2)
    for each in (side, other):
        each.tick(100.0)
    side.sync.came(other.member, 100.0)
    side.hear(1, 10.0)
    side.records.floors.raise_horizon({99: clock(20.0)})
    assert side.records.floors.purging
    for now in range(100, 160, 5):
        side.ask(other, now)
    assert not side.sync.agreements.in_dispute(other.member, 0, 0.0)
    side.records.purge()
    for now in range(160, 180, 5):
        side.ask(other, now)
    assert side.sync.agreements.in_dispute(other.member, 0, 0.0)
