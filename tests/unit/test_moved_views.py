"""A walk over only the views that moved, and the unsettled ones, misses none."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.locations import directory as directory_module
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OwnLog
from p2pstore.gossip.locations.snapshots import CatchUp, check_snapshot
from p2pstore.gossip.locations.views import Applied, DirectoryConfig, Outcome, Position
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import LOCATION_BYTES, LogHead, Member
from tests.unit.gossip_network import location, operations_after, peer_id_of, run_at

MEMBERS = range(1, 5)

Standing = tuple[Position, LogHead, bool]


def standings(directory: Directory) -> dict[Member, Standing]:
    return {
        member: (directory.position(member), directory.head(member), directory.diverged(member))
        for member in MEMBERS
    }


class Story:
    """Random things happen to a small directory of four logs, one a call of `step`."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.directory = Directory(DirectoryConfig(max_records=40))
        self.logs = {member: OwnLog(1) for member in MEMBERS}
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        member = self.rng.choice(MEMBERS)
        log = self.logs[member]
        what = self.rng.choices(
            (
                *("write", "head", "relay", "lie", "snapshot"),
                *("work", "restart", "forget", "drop", "boast"),
            ),
            (6, 6, 8, 2, 3, 4, 1, 1, 1, 1),
        )[0]
        match what:
            case "write":
                for _ in range(self.rng.randrange(1, 12)):
                    log.add(location(self.rng.randrange(25), log.sequence + 1))
            case "head":
                self.directory.observe_head(member, log.incarnation, log.head)
            case "relay":
                self._relay(member, lies=False)
            case "lie":
                self._relay(member, lies=True)
            case "snapshot":
                self._snapshot(member)
            case "work":
                self.seen["replaced"] += self.directory.work(3)
            case "restart":
                self.logs[member] = OwnLog(log.incarnation + 1)
            case "forget":
                self.directory.forget(member)
            case "drop":
                self.directory.drop(member)
            case "boast":
                boast = LogHead(log.sequence + 1, MAX_OWN_RECORDS + 1, 1)
                self.directory.observe_head(member, log.incarnation, boast)
                self.seen["boast"] += member in self.directory.shares.refused

    def _relay(self, member: Member, *, lies: bool) -> None:
        incarnation, known = self.directory.position(member)
        operations = bytes(LOCATION_BYTES * 3)
        if not lies:
            count = self.rng.randrange(1, 9)
            operations = operations_after(self.logs[member], known, count * LOCATION_BYTES)
            incarnation = self.logs[member].incarnation
        applied: Applied = self.directory.apply(member, incarnation, run_at(known + 1, operations))
        self.seen[applied.outcome.value] += 1

    def _snapshot(self, member: Member) -> None:
        log = self.logs[member]
        head, snapshot = log.head, check_snapshot(log.snapshot())
        self.seen["staged"] += self.directory.install_snapshot(
            member, log.incarnation, head.sequence, head.set_hash, snapshot
        )


def test_every_change_is_noted_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "STEP_RECORDS", 4)
    seen: Counter[str] = Counter()
    for seed in range(20):
        story = Story(seed)
        directory, before = story.directory, standings(story.directory)
        for _ in range(200):
            story.step()
            after = standings(directory)
            changed = {member for member in MEMBERS if after[member] != before[member]}
            assert changed <= directory.take_moved()
            assert directory.take_moved() == set()
            assert directory.unsettled == {
                member
                for member, (position, head, diverged) in after.items()
                if diverged or position[1] != head.sequence
            }
            before = after
        seen += story.seen
    for outcome in Outcome:
        assert seen[outcome.value] > 5, f"the story has hardly any {outcome}"
    assert min(seen["staged"], seen["replaced"], seen["boast"]) > 5


class CountingDirectory(Directory):
    """Counts how often it is asked where a view stands."""

    looks = 0

    def position(self, member: Member) -> Position:
        self.looks += 1
        return super().position(member)


def test_views_that_are_where_their_heads_are_cost_nothing_to_watch() -> None:
    log, directory = OwnLog(1), CountingDirectory()
    log.add(location(1))
    operations = operations_after(log, 0, LOCATION_BYTES)
    owners = [MemberState(peer_id_of(number), number, Status.ALIVE, 1, 0.0) for number in range(1, 301)]
    for owner in owners:
        directory.observe_head(owner.member, 1, log.head)
        directory.apply(owner.member, 1, run_at(1, operations))
    log.add(location(2))
    directory.observe_head(7, 1, log.head)
    catch_up = CatchUp(directory, 1000, 1.0)
    directory.looks = 0
    assert catch_up.due(owners, set(), 0.0) == []
    assert 0 < directory.looks < 5
    assert catch_up.due(owners, set(), 1.0) == [owners[6]]
