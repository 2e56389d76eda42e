"""When a peer keeps the whole directory and when a part of it: never both at once for long, never in haste."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.partition_homes import (
    ClusterLoad,
    DirectoryMode,
    DirectorySetting,
    KeptDirectory,
    ModeLimits,
    Phase,
    kept_name,
)
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import LogHead, SignedRecord, member_of
from tests.unit.gossip_network import peer_id_of, peer_record

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
