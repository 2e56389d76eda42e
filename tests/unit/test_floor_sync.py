"""Up to where a peer has seen floors, writer by writer; what it must distrust; whom it doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_comparison import FloorAnswer, ShownFloors
from p2pstore.gossip.floors.floor_stamps import (
    MAX_WRITERS,
    Stamps,
    hash_stamps,
    newest_unseen,
    pack_stamps,
    raise_stamps,
    stamps_as_text,
    stamps_from_text,
    unpack_stamps,
    without_older,
)
from p2pstore.gossip.floors.floor_sync import FloorSync
from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.records import (
    ClusterRecord,
    ClusterRecordKind,
    LocationRecord,
    member_of,
    sign_cluster_record,
)
from p2pstore.objects import HybridClock, Version, clock_from_unix_seconds
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.core_harness import Harness
from tests.unit.gossip_network import digest_of, peer_record

START = 1_800_000_000.0
WRITER = member_of(peer_id_of(9))


def clock(seconds: float) -> int:
    return clock_from_unix_seconds(START + seconds)


@dataclass
class Shown:
    """The facts in a peer's record."""

    member: int
    floors_horizon: int = 0
    floors_end: int = 1
    floors_hash: int = 0
    floors_seen: int = 0


class Side:
    """One peer's part."""

    def __init__(self, number: int, skew: float = 0.0) -> None:
        self.member = member_of(peer_id_of(number))
        self.clock = HybridClock()
        self.skew = skew
        self.records = ClusterRecords()
        self.sync = FloorSync(
            self.member,
            self.records,
            lambda stamp, now: self.clock.observe(stamp, START + now + self.skew),
            lambda now: clock_from_unix_seconds(START + now + self.skew),
        )

    def tick(self, now: float, alone: bool = False, members: Sequence[ShownFloors] = ()) -> None:
        self.sync.housekeep(now, alone=alone, members=members)

    def announce(self, now: float) -> Shown:
        end, floors_hash, seen = self.sync.announcement(now, 0.2)
        return Shown(self.member, self.records.floors.horizon_hash, end, floors_hash, seen)

    def hear(self, key: int, at: float, writer: int = 9) -> None:
        signer = SimulatedSigner(peer_id_of(writer))
        record = ClusterRecord(
            1, int(ClusterRecordKind.FLOOR), digest_of(key), clock(at), 1, signer.peer_id
        )
        assert self.records.offer(record, sign_cluster_record(record, signer))

    def ask(self, other: Side, now: float) -> FloorAnswer:
        end, epoch_hash = self.sync.question(other.member, now, at_once=True)
        answer = other.sync.answer(end, epoch_hash, now, self.member)
        same = self.records.hash == other.records.hash
        self.sync.learn(answer, end, now, sender=other.member, same_now=same)
        return answer


def away(side: Side, *others: Side, now: float) -> None:
    """The peer was out of touch for long; these members are back, and show their horizons."""
    quorum = side.sync.quorum
    quorum.apart, quorum.fresh, quorum._first_came, quorum._apart_at = True, False, 0.0, now
    meet(side, *others, now=now)


def meet(side: Side, *others: Side, now: float) -> None:
    """The peer sees what the others' records say."""
    side.tick(now, members=[Shown(other.member, other.records.floors.horizon_hash) for other in others])


def pair(now: float) -> tuple[Side, Side]:
    one, other = Side(1), Side(2)
    for side in (one, other):
        side.tick(now)
    return one, other


# --- tables ----------------------------------------------------------------------------------

tables = st.dictionaries(st.integers(0, 5), st.integers(1, 9), max_size=5)


@given(tables, tables, tables)
def test_tables_meet_by_the_higher_stamp(first: Stamps, second: Stamps, third: Stamps) -> None:
    left, right = dict(first), dict(third)
    for one in (second, third):
        raise_stamps(left, one)
    for one in (first, second):
        raise_stamps(right, one)
    assert left == right
    assert not raise_stamps(left, second)
    assert newest_unseen(second, left) == 0


def test_of_too_many_writers_all_peers_keep_the_same_newest_ones() -> None:
    """Else their tables would never be equal, or be too long to send."""
    common = dict.fromkeys(range(MAX_WRITERS), 50)
    one, other = dict(common), dict(reversed(common.items()))
    more: Stamps = {MAX_WRITERS + number: 50 + number % 2 for number in range(100)}
    for member, stamp in more.items():
        raise_stamps(one, {member: stamp})
    assert raise_stamps(other, dict(reversed(more.items())))
    assert one == other
    assert len(one) == MAX_WRITERS
    assert all(one[member] == 51 for member, stamp in more.items() if stamp == 51)
    unpack_stamps(pack_stamps(one))
    assert not raise_stamps(one, {0: 1, 1: 49}), "too old to be kept"


def test_what_may_have_been_missed_is_the_highest_stamp_above_what_was_seen() -> None:
    horizon = {1: 10, 2: 20, 3: 30}
    assert newest_unseen(horizon, {1: 10, 2: 20, 3: 30}) == 0
    assert newest_unseen(horizon, {1: 9, 2: 20, 3: 30}) == 10
    assert newest_unseen(horizon, {1: 99, 2: 19, 3: 99}) == 20
    assert newest_unseen(horizon, {}) == 30
    assert newest_unseen({}, {}) == 0


def test_tables_as_they_travel_and_are_kept() -> None:
    stamps = {0xFFFF_0000_0000_0001: 1 << 63, 7: 1}
    assert pack_stamps(stamps) == pack_stamps(dict(reversed(stamps.items())))
    assert unpack_stamps(pack_stamps(stamps)) == stamps
    assert stamps_from_text(stamps_as_text(stamps)) == stamps
    assert hash_stamps({}) == 0
    for nonsense in (bytes(15), bytes(16 * (MAX_WRITERS + 1))):
        with pytest.raises(ProtocolError):
            unpack_stamps(nonsense)
    for text in ({"x": 1}, {"1": -1}, {"1" * 17: 1}):
        with pytest.raises(ValueError, match=r"invalid literal|out of range"):
            stamps_from_text(text)


def test_old_stamps_and_too_many_go() -> None:
    assert without_older({1: 5, 2: 6}, 5) == {2: 6}
    many = {member: member + 1 for member in range(MAX_WRITERS + 10)}
    assert min(without_older(many, 0)) == 10


# --- seeing ----------------------------------------------------------------------------------


def test_who_agrees_about_an_epoch_has_seen_what_the_other_has_seen() -> None:
    one, other = pair(100.0)
    other.sync.load({WRITER: clock(20.0), 77: clock(90.0), 78: clock(90.0)})
    for member in (77, other.member):
        one.sync.came(member, 100.0)
    other.sync.came(one.member, 100.0)
    one.sync.load({WRITER: clock(10.0)})
    end = one.sync.settled_epoch(clock(100.0))[0]
    one.ask(other, 100.0)
    assert one.sync.synchronised
    assert one.sync.seen == {WRITER: clock(20.0), 77: end, one.member: end}, "78 nobody knows here"
    assert other.member not in one.sync.seen, "it does not know yet whether it lacks any of its own"
    other.ask(one, 100.0)
    one.ask(other, 100.0)
    assert one.sync.seen[other.member] == other.sync.seen[one.member] == end


def test_who_does_not_agree_has_seen_nothing() -> None:
    one, other = pair(100.0)
    other.hear(1, at=10.0)
    answer = one.ask(other, 100.0)
    assert answer == FloorAnswer()
    assert not one.sync.synchronised
    assert one.sync.seen == {}


def test_having_the_same_floors_now_is_enough_to_know_of_those_made_meanwhile() -> None:
    one, other = pair(100.0)
    for side in (one, other):
        side.hear(1, at=99.0)
    one.ask(other, 100.0)
    assert one.sync.synchronised


def test_having_the_same_floors_without_having_asked_says_nothing() -> None:
    """The horizon comes with the answer to a question only."""
    side = Side(1)
    side.sync.learn(FloorAnswer(), 0, 100.0, sender=5, same_now=True)
    assert not side.sync.synchronised


def test_an_epoch_from_before_the_start_says_nothing_of_what_was_made_since() -> None:
    one, other = pair(100.0)
    other.hear(1, at=99.0)
    one.ask(other, 100.0)
    assert not one.sync.synchronised
    for now in (130.0, 180.0):
        one.tick(now)
        other.tick(now)
        one.ask(other, now)
    assert not one.sync.synchronised, "it has not had that floor yet"
    one.hear(1, at=99.0)
    one.ask(other, 180.0)
    assert one.sync.synchronised


def test_who_promises_an_epoch_makes_no_floor_below_its_end() -> None:
    one, other = Side(1), Side(2, skew=-30.0)
    for side in (one, other):
        side.tick(100.0)
    end, epoch_hash = one.sync.question(9, 100.0, at_once=True)
    assert one.clock.tick(START) > end, "though its own clock went back"
    if other.sync.answer(end, epoch_hash, 100.0, one.member).epoch_end:
        assert other.clock.tick(START) > end


def test_a_question_is_asked_now_and_then() -> None:
    side = Side(1)

    def asked(begin: int, end: int, *, soon: bool = False) -> list[float]:
        times = []
        for now in range(begin * 10, end * 10):
            side.tick(now / 10)
            if side.sync.question(9, now / 10, soon=soon)[0]:
                times.append(now / 10)
        return times

    assert len(asked(0, 30)) > 40, "often, before it is synchronised"
    side.sync.synchronised = True
    assert len(asked(30, 60)) == 6
    assert side.sync.question(9, 60.0, at_once=True)[0]
    assert side.sync.question(9, 60.0)[0]
    assert not side.sync.question(9, 60.1)[0], "one that is asked at once takes no turn of others"
    assert len(asked(61, 91, soon=True)) > 40, "another horizon is followed quickly"
    assert len(asked(91, 121)) == 6


def test_alone_it_has_seen_all_there_is() -> None:
    side = Side(1)
    side.tick(100.0, alone=True)
    assert side.sync.synchronised
    assert side.sync.seen == {side.member: side.sync.settled_epoch(clock(100.0))[0]}


# --- which floors all living members have ----------------------------------------------------


class Cluster:
    """Peers that see each other's announcements, but nothing else of each other."""

    def __init__(self, count: int, skews: Sequence[float] = ()) -> None:
        self.sides = [Side(number + 1, skews[number] if skews else 0.0) for number in range(count)]
        self.shown: dict[Side, Shown] = {}
        for side in self.sides:
            side.records.floors.limit = 20
            side.tick(0.0, alone=True)

    def hear(self, key: int, at: float, *sides: Side) -> None:
        for side in sides or self.sides:
            side.hear(key, at, writer=1)

    def run(self, begin: int, end: int, living: Sequence[Side] = ()) -> None:
        """Seconds in which all announce and compare; a peer sees the others of `living`."""
        living = living or self.sides
        for now in range(begin, end):
            for side in living:
                self.shown[side] = side.announce(now)
            for side in living:
                side.tick(now, members=[self.shown[other] for other in living if other is not side])

    def horizons(self) -> list[int]:
        return [side.records.floors.compacted_before for side in self.sides]


def test_floors_go_when_all_living_members_say_that_they_have_them() -> None:
    cluster = Cluster(3, skews=(0.0, 7.0, 3.0))
    for key in range(16):
        cluster.hear(key, at=10.0 + key)
    cluster.run(62, 79)
    first = min(cluster.sides, key=lambda side: side.member)
    assert first.records.floors.compacted_before > clock(16.0), "it lets eight of them stay"
    assert sorted(cluster.horizons())[:2] == [0, 0], "the others take its horizon over"
    assert len(first.records) == 8
    for side in cluster.sides:
        if side is not first:
            side.ask(first, 80.0)
            assert side.sync.take_distrusted() == 0
            assert side.records.floors.horizon == first.records.floors.horizon


def test_floors_stay_as_long_as_one_living_member_lacks_one() -> None:
    cluster = Cluster(3)
    for key in range(16):
        cluster.hear(key, 10.0 + key)
    one, other, third = cluster.sides
    cluster.hear(99, 10.5, one, other)
    cluster.run(62, 95)
    assert cluster.horizons() == [0, 0, 0]
    assert one.sync.waits_for == [third.member]
    cluster.hear(99, 10.5, third)
    cluster.run(95, 100)
    assert any(cluster.horizons())
    assert one.sync.waits_for == []


def test_a_member_that_confirms_nothing_is_passed_over_in_the_end() -> None:
    cluster = Cluster(3)
    one, other, third = cluster.sides
    for key in range(16):
        cluster.hear(key, 10.0 + key, one, other)
    cluster.run(62, 650)
    assert not any(cluster.horizons())
    cluster.run(650, 700)
    assert any(cluster.horizons())
    assert one.sync.passed_over == other.sync.passed_over == [third.member]


def test_a_member_that_never_agrees_is_not_waited_for_anew_each_time_it_rejoins() -> None:
    cluster = Cluster(3)
    one, other, third = cluster.sides
    for side in cluster.sides:
        side.records.floors.kept_seconds = 0.0  # patience is five minutes
    for side in (one, other):
        side.sync.came(third.member, 0.0)
        side.sync.went(third.member, 61.0)
    for key in range(16):
        cluster.hear(key, 10.0 + key, one, other)
    now = 62
    while not any(cluster.horizons()):
        assert now < 62 + 450, "each time it was waited for as if it had never been before"
        for side in (one, other):
            side.sync.came(third.member, now)
        cluster.run(now, now + 30)
        for side in (one, other):
            side.sync.went(third.member, now + 30)
        cluster.run(now + 30, now + 50, [one, other])
        now += 50
    assert now > 62 + 250
    before = max(cluster.horizons())
    for key in range(100, 116):
        cluster.hear(key, float(now) + (key - 100) / 4, one, other)
    for side in (one, other):
        side.sync.came(third.member, now)
    cluster.run(now, now + 60)
    assert one.sync.passed_over == [third.member]
    assert max(cluster.horizons()) > before


def test_a_member_that_died_is_waited_for_until_all_know() -> None:
    cluster = Cluster(3)
    one, other, third = cluster.sides
    cluster.run(62, 70)
    for key in range(16):
        cluster.hear(key, 71.0 + key / 4, one, other)
    for side in (one, other):
        side.sync.went(third.member, 72.0)
    cluster.run(72, 131, [one, other])
    assert not any(cluster.horizons())
    cluster.run(131, 140, [one, other])
    assert any(cluster.horizons())


def test_older_floors_do_not_wait_for_a_newcomer_that_died() -> None:
    """One that joins and dies all the time, each time under another identity, must not stop compaction."""
    cluster = Cluster(3)
    one, other, third = cluster.sides
    for key in range(16):
        cluster.hear(key, 10.0 + key / 4, one, other)
    for side in (one, other):
        side.sync.came(third.member, 61.0)
        side.sync.went(third.member, 62.0)
    cluster.run(62, 100, [one, other])
    assert any(cluster.horizons())


def test_a_member_that_dies_twice_is_waited_for_as_if_it_had_died_once() -> None:
    cluster = Cluster(3)
    one, other, third = cluster.sides
    cluster.run(62, 70)
    for key in range(16):
        cluster.hear(key, 71.0 + key / 4, one, other)
    for side in (one, other):
        side.sync.went(third.member, 72.0)
        side.sync.came(third.member, 80.0)
        side.sync.went(third.member, 81.0)
    cluster.run(81, 140, [one, other])
    assert not any(cluster.horizons())


def test_floors_that_a_member_wrote_before_it_went_stay_three_minutes_longer() -> None:
    cluster = Cluster(3)
    one, other, third = cluster.sides
    for key in range(16):
        for side in cluster.sides:
            side.hear(key, 62.0 + key / 8, writer=3)
    for side in cluster.sides:
        side.records.floors.limit = 50
    cluster.run(60, 70)  # others know up to where it promised to write none
    for side in cluster.sides:
        side.records.floors.limit = 20
    for side in (one, other):
        side.sync.went(third.member, 70.0)
    cluster.run(70, 240, [one, other])
    assert cluster.horizons() == [0, 0, 0]
    cluster.run(240, 260, [one, other])
    assert any(cluster.horizons())


def test_nothing_is_announced_before_all_floors_were_heard_of() -> None:
    side = Side(1)
    side.tick(100.0)
    assert side.sync.announcement(100.0, 0.2) == (1, 0, 1), "0 would be an older peer's"
    side.sync.synchronised = True
    end, _, _ = side.sync.announcement(100.0, 0.2)
    assert clock(95.9) < end <= clock(97.0)
    assert side.clock.tick(START) > end, "the promise to write no floor below that"
    assert side.sync.announcement(100.0, 80.0)[0] < clock(81.0), "large clusters take longer"


# --- distrust --------------------------------------------------------------------------------


def test_a_horizon_above_what_was_seen_makes_a_peer_that_was_away_distrust_its_copies() -> None:
    one, other = pair(100.0)
    one.sync.load({WRITER: clock(10.0)})
    other.records.floors.raise_horizon({WRITER: clock(20.0)})
    other.sync.load({WRITER: clock(90.0)})
    away(one, other, now=100.0)
    one.ask(other, 100.0)
    assert not one.sync.synchronised, "nothing of it counts before the horizon does"
    meet(one, other, now=100.0)
    assert one.sync.take_distrusted() == clock(20.0)
    assert one.sync.distrusted_by == [other.member]
    assert one.sync.take_distrusted() == 0
    assert one.records.floors.horizon == other.records.floors.horizon
    one.ask(other, 100.0)
    assert one.sync.take_distrusted() == 0
    assert one.sync.seen[WRITER] > clock(20.0)


def test_a_horizon_that_was_seen_costs_nothing() -> None:
    one, other = pair(100.0)
    one.sync.load({WRITER: clock(20.0)})
    other.records.floors.raise_horizon({WRITER: clock(20.0)})
    one.ask(other, 100.0)
    meet(one, other, now=100.0)
    assert one.sync.take_distrusted() == 0
    assert one.records.floors.horizon == other.records.floors.horizon


def test_a_horizon_counts_only_as_it_stands_in_signed_records() -> None:
    one, other = pair(100.0)
    away(one, other, now=100.0)
    for horizon in ({WRITER: clock(20.0)}, {WRITER: clock(30.0), 5: 1}):
        other.records.floors.raise_horizon(horizon)
        shown = Shown(other.member, other.records.floors.horizon_hash)
        answer = FloorAnswer(horizon={**horizon, 77: clock(90.0)})
        one.sync.learn(answer, 0, 100.0, sender=other.member, same_now=False)
        one.tick(100.0, members=[shown])
    assert one.sync.take_distrusted() == 0
    assert one.records.floors.horizon == {}


@pytest.mark.parametrize(("showing", "believed"), [(1, False), (2, True), (3, True)])
def test_after_an_absence_half_of_all_members_must_show_it(showing: int, believed: bool) -> None:
    """Of four, this peer among them."""
    one, *others = [Side(number) for number in range(1, 5)]
    for other in others[:showing]:
        other.records.floors.raise_horizon({WRITER: clock(20.0)})
    away(one, *others, now=100.0)
    one.ask(others[0], 100.0)
    meet(one, *others, now=101.0)
    assert bool(one.sync.take_distrusted()) is believed
    assert bool(one.records.floors.horizon) is believed


@pytest.mark.parametrize(("showing", "believed"), [(1, False), (2, True)])
def test_where_most_were_away_more_than_half_of_the_others_must_show_it(
    showing: int, believed: bool
) -> None:
    """Five, of which three were away: as many as the horizon must not wait for."""
    one, *others = [Side(number) for number in range(1, 6)]
    shown = [Shown(other.member, floors_seen=1) for other in others]
    for other, says in zip(others[:showing], shown[:showing], strict=True):
        other.records.floors.raise_horizon({WRITER: clock(20.0)})
        says.floors_horizon, says.floors_seen = other.records.floors.horizon_hash, 0
    away(one, *others, now=100.0)
    one.ask(others[0], 100.0)
    one.tick(101.0, members=shown)
    assert bool(one.sync.take_distrusted()) is believed


@pytest.mark.parametrize(("showing", "believed"), [(1, False), (2, False), (3, True)])
def test_a_peer_that_was_here_all_the_time_follows_only_more_than_half(
    showing: int, believed: bool
) -> None:
    """They must have passed it over."""
    one, *others = [Side(number) for number in range(1, 5)]
    one.sync.load({}, clock(0.0))
    for other in others:
        one.sync.came(other.member, 0.5)
    for second in range(1, 100):
        meet(one, *others, now=float(second))
    assert not one.sync.quorum.apart
    for other in others[:showing]:
        other.records.floors.raise_horizon({WRITER: clock(20.0)})
    one.ask(others[0], 100.0)
    for second in range(100, 130):
        meet(one, *others, now=float(second))
    assert bool(one.sync.take_distrusted()) is believed
    assert bool(one.records.floors.horizon) is believed
    assert (others[0].member in one.sync.disbelieved(130.0)) is not believed


def test_members_that_have_not_come_yet_count_for_a_minute() -> None:
    """The first one that a peer meets again must not speak for all."""
    one, *others = [Side(number) for number in range(1, 5)]
    one.sync.load({other.member: clock(-400.0) for other in others}, clock(-400.0))
    others[0].records.floors.raise_horizon({WRITER: clock(20.0)})
    one.tick(0.0)
    one.sync.came(others[0].member, 0.5)
    one.ask(others[0], 1.0)
    for second in range(1, 60):
        meet(one, others[0], now=float(second))
    assert one.sync.quorum.apart
    assert one.sync.take_distrusted() == 0
    one.ask(others[0], 61.0)
    meet(one, others[0], now=61.0)
    assert one.sync.take_distrusted() == clock(20.0), "nobody else came"


def test_a_horizon_from_the_future_is_not_believed() -> None:
    one, other = pair(100.0)
    other.records.floors.raise_horizon({WRITER: clock(111.0)})
    one.ask(other, 100.0)
    assert one.sync.take_distrusted() == 0
    assert one.records.floors.horizon == {}
    assert not one.sync.synchronised


def test_what_was_loaded_is_compared_at_once() -> None:
    """A crash came between the horizon and what followed from it."""
    side = Side(1)
    side.records.load([], {WRITER: clock(20.0)})
    side.sync.load({WRITER: clock(10.0)})
    assert side.sync.take_distrusted() == clock(20.0)


def test_stamps_of_a_month_ago_are_forgotten_together() -> None:
    one, other = pair(0.0)
    month = 31 * 86_400.0
    other.records.floors.raise_horizon({WRITER: clock(0.0), 5: clock(month - 10)})
    one.sync.load({WRITER: clock(0.0), 5: clock(month)})
    one.records.floors.raise_horizon({WRITER: clock(0.0)})
    one.tick(month)
    assert one.sync.seen == {5: clock(month)}
    assert one.records.floors.horizon == {}
    one.ask(other, month)
    meet(one, other, now=month)
    assert one.sync.take_distrusted() == 0
    assert one.records.floors.horizon == {5: clock(month - 10)}
    assert one.sync.was_away_too_long(clock(0.0), month)
    assert not one.sync.was_away_too_long(clock(month - 86_400.0), month)


def test_a_horizon_that_this_peer_could_drop_itself_is_followed_at_once() -> None:
    cluster = Cluster(3)
    for key in range(16):
        cluster.hear(key, 10.0 + key)
    cluster.run(62, 79)
    first = max(cluster.sides, key=lambda side: side.records.floors.compacted_before)
    other = next(side for side in cluster.sides if side is not first)
    honest = dict(first.records.floors.horizon)
    forged = {**honest, 77: clock(50.0), other.member: clock(70.0)}
    answer = FloorAnswer(horizon=forged)
    other.sync.learn(answer, 0, 79.0, sender=first.member, same_now=False)
    assert other.records.floors.horizon == honest, "what is made up beside it is not"
    assert other.sync.take_distrusted() == 0


def test_a_horizon_that_was_seen_is_followed_after_a_minute_while_floors_are_crowded() -> None:
    """Of three, each has another horizon after all were killed: none is shown by half of them."""
    one, *others = [Side(number) for number in range(1, 4)]
    one.records.floors.limit = 20
    for key in range(8):
        one.hear(key, 10.0 + key)
    for number, other in enumerate(others):
        other.records.floors.raise_horizon({WRITER: clock(11.0 + number)})
    one.sync.load({WRITER: clock(90.0)}, clock(95.0))
    for second in range(100, 170):
        one.ask(others[1], float(second))
        meet(one, *others, now=float(second))
        followed = bool(one.records.floors.horizon)
        assert followed is (second > 161), second
    assert one.sync.take_distrusted() == 0


# --- doubts ----------------------------------------------------------------------------------


def test_what_was_discarded_for_a_horizon_is_not_discarded_for_it_again() -> None:
    """Its writer may never be heard of again: no peer will ever say that its floors were seen."""
    one, other = pair(100.0)
    other.records.floors.raise_horizon({WRITER: clock(50.0)})
    away(one, other, now=100.0)
    one.ask(other, 100.0)
    meet(one, other, now=100.0)
    assert one.sync.take_distrusted() == clock(50.0)
    for now in (105.0, 200.0, 300.0):
        other.tick(now)
        meet(one, other, now=now)
        one.ask(other, now)
        assert one.sync.take_distrusted() == 0
    other.records.floors.raise_horizon({WRITER: clock(60.0)})
    away(one, other, now=305.0)
    one.ask(other, 305.0)
    meet(one, other, now=305.0)
    assert one.sync.take_distrusted() == clock(60.0)


def test_no_floor_that_is_yet_to_be_written_is_below_the_horizon() -> None:
    side = Side(1)
    side.records.floors.limit = 10
    side.tick(0.0, alone=True)
    for key in range(15):
        side.hear(key, 105.0, writer=1)  # by a clock that is ahead
    for now in range(90, 104):
        side.announce(now)
        side.tick(now)
    assert max(side.records.floors.horizon.values(), default=0) < clock(103.0)


def test_a_member_that_came_is_doubted_until_it_shows_the_same_horizon() -> None:
    side = Side(1)
    side.records.floors.raise_horizon({WRITER: clock(50.0)})
    side.tick(100.0)
    without, same = peer_record(2), peer_record(2, floors_horizon=side.records.floors.horizon_hash)
    assert side.sync.doubts.up_to(5, without.floors_horizon, 100.0) == -1, (
        "it may take its time: it was here before"
    )
    side.sync.came(5, 100.0)
    assert side.sync.doubts.up_to(5, without.floors_horizon, 100.0) == clock(50.0)
    assert side.sync.doubts.up_to(5, same.floors_horizon, 100.0) == -1
    side.tick(101.0, members=[Shown(5, side.records.floors.horizon_hash)])
    assert side.sync.doubts.up_to(5, without.floors_horizon, 101.0) == -1, "it has shown it once"


def test_nor_is_one_doubted_that_has_seen_all_that_the_horizon_forbids() -> None:
    """Their horizons may differ for good: floors that are not crowded are not compacted."""
    one, other = pair(100.0)
    one.records.floors.raise_horizon({WRITER: clock(50.0), 5: clock(40.0)})
    other.records.floors.raise_horizon({WRITER: clock(30.0)})
    other.hear(1, at=45.0)  # the epochs do not agree
    one.sync.came(other.member, 100.0)
    shown = other.records.floors.horizon_hash

    def doubted(seen: Stamps, now: float) -> bool:
        other.sync.load(seen)
        one.ask(other, now)
        meet(one, other, now=now)
        return one.sync.doubts.up_to(other.member, shown, now) >= 0

    assert doubted({WRITER: clock(50.0)}, 100.0)
    assert doubted({WRITER: clock(49.0), 5: clock(90.0)}, 101.0)
    assert not doubted({WRITER: clock(50.0), 5: clock(90.0)}, 102.0)
    assert not doubted({}, 200.0), "it has said so once"
    one.sync.went(other.member, 201.0)
    one.sync.came(other.member, 202.0)
    assert doubted({}, 203.0), "it is another process"
    one.records.floors.raise_horizon({WRITER: clock(60.0)})
    assert doubted({WRITER: clock(50.0), 5: clock(90.0)}, 204.0)
    assert not doubted({WRITER: clock(60.0), 5: clock(90.0)}, 205.0)


def test_a_member_that_never_follows_is_doubted_in_the_end_and_one_that_is_ahead_is_not() -> None:
    """Else, each time that floors are compacted, nothing of who does it first could be read for seconds."""
    side = Side(1)
    side.records.floors.raise_horizon({WRITER: clock(50.0)})
    mine = side.records.floors.horizon_hash
    side.tick(100.0, members=[Shown(5, mine), Shown(6, 111)])
    for now in range(101, 161):
        side.tick(now, members=[Shown(5, mine), Shown(6, 111)])
        assert side.sync.doubts.up_to(6, 111, now) == -1
    side.tick(161.0, members=[Shown(5, 222), Shown(6, 111)])
    assert side.sync.doubts.up_to(6, 111, 161.0) == clock(50.0)
    assert side.sync.doubts.up_to(5, 222, 161.0) == -1, "it shows another one only now"
    assert side.sync.doubts.up_to(5, 333, 161.0) == -1, "or in a record that came just now"
    side.records.floors.raise_horizon({WRITER: clock(60.0)})
    side.tick(162.0, members=[Shown(5, side.records.floors.horizon_hash), Shown(6, 444)])
    assert side.sync.doubts.up_to(6, 444, 162.0) == -1, "it has moved"


def test_without_a_horizon_nobody_is_doubted() -> None:
    side = Side(1)
    side.sync.came(5, 100.0)
    assert side.sync.doubts.up_to(5, peer_record(2).floors_horizon, 1000.0) == -1


def test_versions_that_were_heard_of_count_unless_their_clock_is_wrong() -> None:
    side = Side(1)
    packed = b"".join(
        LocationRecord(digest_of(number), Version(clock(at), 1), 0, 1).encode()
        for number, at in enumerate((9.0, 5.0, 3600.0))
    )
    side.sync.heard_of(packed, clock(3600.0), 0.0)
    assert side.sync.newest_heard == clock(9.0)
    side.sync.heard_of(b"", 0, 0.0)
    assert side.sync.newest_heard == clock(9.0)


# --- whom gossip says is gone ----------------------------------------------------------------


def test_a_peer_that_was_dead_before_it_was_heard_of_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claims of dead peers go round for long, and newcomers hear of all: each would stop compaction for a minute."""
    world = Harness(others=1)
    gone: list[int] = []
    monkeypatch.setattr(world.gossip.floors, "went", lambda member, now, left: gone.append(member))
    claims = [Claim(peer_id_of(77), 1, int(Status.DEAD), 1)]
    world.gossip.membership.observe_claims(claims, world.now)
    world.die(world.others[0])
    world.pass_time(0.1)
    assert world.gossip.membership.get(peer_id_of(77)) is not None
    assert gone == [member_of(world.others[0].peer_id)]
