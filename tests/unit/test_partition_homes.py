"""The homes of partitions, the same for all who know the same members; and when a peer keeps the whole directory."""

from random import Random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.partition_homes import (
    CANDIDATES,
    HOME_COUNT,
    NO_HOMES,
    ROOM,
    ClusterLoad,
    DirectoryMode,
    DirectorySetting,
    HomeTable,
    KeptDirectory,
    ModeLimits,
    Phase,
    kept_name,
    places_of,
    table_of,
)
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import PARTITION_COUNT, LogHead, SignedRecord, member_of, partition_of
from simulation.signer import peer_id_of
from tests.unit.gossip_network import digest_of, peer_record

WORD = (1 << 64) - 1


def weight(member: int, partition: int) -> int:
    """SplitMix64's finalizer, in plain integers."""
    mixed = member ^ ((partition + 1) * 0x9E3779B97F4A7C15 & WORD)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & WORD
    return mixed ^ mixed >> 31


def members(count: int, seed: int = 1) -> list[int]:
    rng = Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def by_hand(live: list[int], partition: int) -> tuple[int, ...]:
    return tuple(sorted(live, key=lambda m: weight(m, partition), reverse=True)[:HOME_COUNT])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 50])
def test_the_homes_are_the_members_with_the_highest_weights(count: int) -> None:
    live = members(count)
    table = table_of(live)
    assert len(table.homes) == PARTITION_COUNT
    for partition in (0, 1, 500, 1023):
        assert table.homes[partition] == by_hand(live, partition)


def test_these_homes_never_change() -> None:
    """Peers of different versions must agree on them."""
    assert weight(1, 0) == 0xE4D971771B652C20
    table = table_of([1, 2, 3, 4, 5])
    assert [table.homes[partition] for partition in (0, 1, 1023)] == [(1, 4, 2), (3, 4, 5), (2, 1, 3)]
    assert [partition_of(bytes.fromhex(text) + bytes(14)) for text in ("0000", "0040", "ffff")] == [
        0,
        1,
        1023,
    ]


@given(st.lists(st.sets(st.integers(0, 11), max_size=12), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_table_is_the_same_whatever_it_was_made_from(history: list[set[int]]) -> None:
    names = members(12)
    table = NO_HOMES
    for live in history:
        table = table.changed(frozenset(names[number] for number in live))
    # Made anew, not taken from among those in use.
    fresh = NO_HOMES._made_for(table.members)
    assert table.homes == fresh.homes
    assert table.differing(fresh) == []


def test_members_that_leave_one_by_one_are_followed_by_those_that_come_next() -> None:
    """Until no spare candidate is left and all members have to be compared, again and again; others join meanwhile."""
    rng = Random(7)
    live, coming = set(members(150)), members(60, seed=2)
    table = table_of(live)
    while len(live) > 3:
        live -= set(rng.sample(sorted(live), 7 if len(live) > 40 else 1))
        live |= {coming.pop() for _ in range(min(len(coming), rng.choice((0, 0, 3))))}
        table = table.changed(frozenset(live))
        fresh = NO_HOMES._made_for(table.members)
        assert table.homes == fresh.homes


def test_who_joins_or_leaves_changes_only_its_own_partitions() -> None:
    live = members(20)
    before = table_of(live[:-1])
    after = table_of(live)
    changed = before.differing(after)
    assert changed == after.by_home[live[-1]]
    assert 90 < len(changed) < 220, "about three twentieths"
    for partition in changed:
        kept = [home for home in after.homes[partition] if home != live[-1]]
        assert kept == [home for home in before.homes[partition] if home in kept]
    shares = [len(partitions) for partitions in after.by_home.values()]
    assert sum(shares) == HOME_COUNT * PARTITION_COUNT
    assert min(shares) > 100


@pytest.mark.parametrize("count", [40, 100, 1000, 3000, 5000])
def test_nobody_is_home_to_much_more_than_its_share(count: int) -> None:
    table = table_of(members(count))
    assert all(len(set(homes)) == HOME_COUNT for homes in table.homes)
    share = HOME_COUNT * PARTITION_COUNT / count
    assert max(map(len, table.by_home.values())) <= ROOM * share + 1
    by_weight = [
        sorted(homes, key=lambda m: weight(m, partition), reverse=True)
        for partition, homes in enumerate(table.homes)
    ]
    assert table.homes == [tuple(homes) for homes in by_weight]


@pytest.mark.parametrize("count", [100, 600])
def test_who_is_not_home_in_spite_of_a_higher_weight_has_better_partitions(count: int) -> None:
    live = members(count)
    table = table_of(live)
    needed = HOME_COUNT * PARTITION_COUNT
    places = dict(zip(live, places_of(numpy.array(live, numpy.uint64), count, needed), strict=True))
    passed_over = 0
    for partition, homes in enumerate(table.homes):
        least = weight(homes[-1], partition)
        candidates = sorted(live, key=lambda m: weight(m, partition), reverse=True)[:CANDIDATES]
        for member in candidates:
            if member not in homes and weight(member, partition) > least:
                passed_over += 1
                held = table.by_home[member]
                assert len(held) == places[member]
                assert all(weight(member, p) > weight(member, partition) for p in held)
    assert passed_over > 10


@pytest.mark.parametrize("count", [1000, 5000])
def test_one_more_or_less_moves_few_homes(count: int) -> None:
    live = members(count)
    table = table_of(live)
    moved = [len(table.differing(table_of(live[:n] + live[n + 1 :]))) for n in range(10)]
    assert sum(moved) / len(moved) < 3 * HOME_COUNT * PARTITION_COUNT / count + 1


def test_those_who_know_the_same_members_share_a_table() -> None:
    live = members(9)
    table = table_of(live)
    assert table_of(reversed(live)) is table
    assert table_of(live[:-1]).changed(frozenset(live)) is table
    assert isinstance(table, HomeTable)


def test_partitions_are_alike_in_size() -> None:
    counts = [0] * PARTITION_COUNT
    for number in range(20_480):
        counts[partition_of(digest_of(number))] += 1
    assert min(counts) > 4
    assert max(counts) < 50


LIMITS = ModeLimits()


def tick(
    mode: DirectoryMode, now: float, load: float, *, views: bool = True, homes: bool = True
) -> Phase:
    mode.tick(load, views_complete=views, homes_complete=homes, now=now)
    return mode.phase


def test_auto_narrows_above_the_limit_and_widens_below_four_fifths_of_it() -> None:
    mode = DirectoryMode("auto", LIMITS)
    assert tick(mode, 0.0, 0.99) is Phase.FULL
    assert (mode.shown, mode.follows_logs, mode.knows_all) == (KeptDirectory.FULL, True, True)
    assert tick(mode, 1.0, 1.01, homes=False) is Phase.NARROWING
    assert (mode.shown, mode.follows_logs) == (KeptDirectory.PARTITIONED, True)
    assert mode.knows_all
    assert tick(mode, 2.0, 1.01, homes=False) is Phase.NARROWING
    assert tick(mode, 3.0, 1.01) is Phase.PARTITIONED
    assert (mode.follows_logs, mode.knows_all) == (False, False)
    assert tick(mode, 60.0, 0.1) is Phase.PARTITIONED, "not so soon after the last change"
    assert tick(mode, 61.0, 0.81) is Phase.PARTITIONED
    assert tick(mode, 62.0, 0.79, views=False) is Phase.WIDENING
    assert (mode.shown, mode.follows_logs) == (KeptDirectory.PARTITIONED, True)
    assert not mode.knows_all
    assert tick(mode, 63.0, 0.79) is Phase.FULL
    assert tick(mode, 64.0, 5.0) is Phase.FULL, "not so soon after the last change"
    assert tick(mode, 123.0, 5.0) is Phase.NARROWING


def test_who_has_not_followed_the_logs_yet_does_not_begin_with_it() -> None:
    mode = DirectoryMode("auto", LIMITS)
    assert tick(mode, 0.0, 3.0, views=False) is Phase.PARTITIONED


def test_narrowing_ends_though_some_owner_never_told() -> None:
    mode = DirectoryMode("auto", LIMITS)
    tick(mode, 0.0, 2.0)
    assert tick(mode, 119.0, 2.0, homes=False) is Phase.NARROWING
    assert tick(mode, 120.0, 2.0, homes=False) is Phase.PARTITIONED


def test_widening_is_given_up_when_the_cluster_grows_again() -> None:
    mode = DirectoryMode("auto", LIMITS)
    tick(mode, 0.0, 2.0, views=False)
    assert tick(mode, 60.0, 0.1, views=False) is Phase.WIDENING
    assert tick(mode, 61.0, 1.1, views=False) is Phase.PARTITIONED


@pytest.mark.parametrize(
    ("setting", "phase"), [("full", Phase.FULL), ("partitioned", Phase.PARTITIONED)]
)
def test_a_fixed_mode_stays(setting: DirectorySetting, phase: Phase) -> None:
    mode = DirectoryMode(setting, LIMITS)
    for now, load in ((0.0, 9.0), (100.0, 0.0), (200.0, 9.0)):
        assert tick(mode, now, load) is phase


def states(count: int, objects: int, sequence: int = 0) -> list[MemberState]:
    made = []
    for number in range(count):
        record = replace(peer_record(number), head=LogHead(sequence, objects, 0))
        peer_id = peer_id_of(number)
        state = MemberState(peer_id, member_of(peer_id), Status.ALIVE, 1, 0.0)
        state.note(record, SignedRecord(b"", b""))
        made.append(state)
    return made


def test_the_load_is_the_worst_of_locations_changes_and_members() -> None:
    limits = ModeLimits(index_bytes=40 * 1000, changes_per_second=100.0, members=20)
    assert ClusterLoad(limits).of(states(2, 250), 0.0) == pytest.approx(0.5)
    assert ClusterLoad(limits).of(states(20, 1), 0.0) == pytest.approx(1.0)
    load = ClusterLoad(limits)
    for second in range(0, 100, 10):
        share = load.of(states(2, 0, sequence=second * 100), float(second))
    assert load.changes_per_second == pytest.approx(200.0, rel=0.1)
    assert share == pytest.approx(2.0, rel=0.1)
    restarted = [replace_incarnation(state) for state in states(2, 0, sequence=0)]
    assert load.of(restarted, 100.0) < share, "a log that begins anew is no change"


def replace_incarnation(state: MemberState) -> MemberState:
    state.record_incarnation = 2
    return state


def test_names_of_modes() -> None:
    assert [kept_name(number) for number in (0, 1, 2)] == ["full", "partitioned", ""]
