"""Followers of a checkpoint and their publisher: preparing and switching. Whole groups with events in random order."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from p2pstore.checkpoint.swarm.group import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    Abandon,
    Effect,
    Event,
    Follower,
    FollowerState,
    GroupUpdate,
    Heard,
    NotPrepared,
    NotSwitched,
    Prepare,
    Prepared,
    Stage,
    Switched,
    SwitchTo,
    Tick,
    Verdict,
)

V1, V2, V3 = b"version1", b"version2", b"version3"


# --- one follower --------------------------------------------------------------------------------


def test_a_follower_prepares_says_so_waits_and_switches() -> None:
    follower = Follower(b"", ())
    assert follower.state == FollowerState(b"", Stage.WAITING, b"")
    assert follower.handle(Heard(V1, b""), 0.0) == [Prepare(V1)]
    assert follower.state == FollowerState(V1, Stage.FETCHING, b"")
    assert follower.handle(Prepared(V1), 1.0) == []
    assert follower.state == FollowerState(V1, Stage.VERIFIED, b"")
    assert follower.handle(Heard(V1, V1), 2.0) == [SwitchTo(V1)]
    assert follower.handle(Heard(V1, V1), 2.0) == [], "one switch at a time"
    assert follower.handle(Switched(V1), 3.0) == []
    assert follower.state == FollowerState(V1, Stage.CURRENT, V1)
    assert follower.wake_at == math.inf


def test_who_is_late_fetches_first_what_the_others_use() -> None:
    follower = Follower(b"", ())
    assert follower.handle(Heard(V2, V1), 0.0) == [Prepare(V1)]
    assert follower.state == FollowerState(V1, Stage.FETCHING, b"")
    assert follower.handle(Prepared(V1), 1.0) == [SwitchTo(V1), Prepare(V2)]
    follower.handle(Switched(V1), 1.0)
    assert follower.state == FollowerState(V2, Stage.FETCHING, V1)


def test_an_old_switch_after_a_new_head() -> None:
    """A switch to a verified version happens beside the fetch of a newer one; another switch interrupts that fetch."""
    follower = Follower(b"", ())
    follower.handle(Heard(V1, b""), 0.0)
    follower.handle(Prepared(V1), 0.0)
    assert follower.handle(Heard(V2, b""), 0.0) == [Prepare(V2)]
    assert follower.handle(Heard(V2, V1), 0.0) == [SwitchTo(V1)]

    other = Follower(V1, (V1,))
    assert other.handle(Heard(V3, V1), 0.0) == [Prepare(V3)]
    assert other.handle(Heard(V3, V2), 0.0) == [Abandon(V3)]
    assert other.handle(Heard(V3, V2), 0.0) == [], "until that has ended"
    assert other.handle(NotPrepared(V3), 1.0) == [Prepare(V2)]
    assert other.handle(Prepared(V2), 2.0) == [SwitchTo(V2), Prepare(V3)]


def test_what_was_abandoned_too_late_is_there_all_the_same() -> None:
    follower = Follower(b"", ())
    follower.handle(Heard(V1, b""), 0.0)
    assert follower.handle(Heard(V2, b""), 0.0) == [Abandon(V1)]
    assert follower.handle(Prepared(V1), 0.0) == [Prepare(V2)]
    assert follower.handle(Heard(V2, V1), 0.0) == [SwitchTo(V1)]


def test_a_follower_that_starts_again_knows_what_it_had() -> None:
    follower = Follower(V1, (V1, V2))
    assert follower.state == FollowerState(V1, Stage.CURRENT, V1)
    assert follower.handle(Heard(V2, V2), 0.0) == [SwitchTo(V2)]


def test_going_back_to_an_older_version() -> None:
    follower = Follower(V2, (V1, V2))
    assert follower.handle(Heard(V1, V2), 0.0) == []
    assert follower.state == FollowerState(V1, Stage.VERIFIED, V2)
    assert follower.handle(Heard(V1, V1), 0.0) == [SwitchTo(V1)]


def test_a_name_that_is_gone_stops_what_was_begun() -> None:
    follower = Follower(V1, (V1,))
    follower.handle(Heard(V2, V1), 0.0)
    assert follower.handle(Heard(b"", V1), 0.0) == [Abandon(V2)]
    assert follower.handle(NotPrepared(V2), 0.0) == []
    assert follower.state == FollowerState(V1, Stage.CURRENT, V1)


def test_what_fails_is_tried_again_ever_less_often_and_says_why() -> None:
    follower, now, waits = Follower(b"", ()), 0.0, []
    assert follower.handle(Heard(V1, b""), now) == [Prepare(V1)]
    for _ in range(9):
        assert follower.handle(NotPrepared(V1, "disk full"), now) == []
        assert follower.state == FollowerState(V1, Stage.FAILED, b"", why="disk full")
        assert follower.handle(Tick(), follower.wake_at - 0.1) == []
        waits.append(follower.wake_at - now)
        now = follower.wake_at
        assert follower.handle(Tick(), now) == [Prepare(V1)]
    assert waits[:3] == [FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS]
    assert waits[-1] == LAST_RETRY_SECONDS
    follower.handle(Prepared(V1), now)
    assert follower.state == FollowerState(V1, Stage.VERIFIED, b"")
    assert follower.wake_at == math.inf


def test_a_failure_does_not_hold_up_another_version() -> None:
    follower = Follower(b"", ())
    follower.handle(Heard(V2, V1), 0.0)
    assert follower.handle(NotPrepared(V1, "no peer has it"), 0.0) == [Prepare(V2)]
    assert follower.state == FollowerState(V2, Stage.FETCHING, b""), "an update to it is not held up"
    assert follower.handle(NotPrepared(V2, "disk full"), 0.0) == []
    assert follower.state == FollowerState(V1, Stage.FAILED, b"", why="no peer has it")
    assert follower.handle(Tick(), follower.wake_at) == [Prepare(V1)]
    assert follower.handle(NotPrepared(V1, "no peer has it"), 6.0) == [Prepare(V2)]
    assert follower.handle(Heard(V3, V3), 1.0) == [Abandon(V2)]
    assert follower.handle(NotPrepared(V2), 1.0) == [Prepare(V3)]
    assert follower.wake_at == math.inf, "an unwanted version is not retried"


def test_a_switch_that_fails_is_tried_again_and_what_is_missing_is_fetched_again() -> None:
    follower = Follower(b"", (V1,))
    assert follower.handle(Heard(V1, V1), 0.0) == [SwitchTo(V1)]
    assert follower.handle(NotSwitched(V1, "read-only"), 0.0) == []
    assert follower.state == FollowerState(V1, Stage.FAILED, b"", why="read-only")
    assert follower.handle(Tick(), follower.wake_at) == [SwitchTo(V1)]
    follower.handle(NotSwitched(V1, "it is not there", missing=True), 10.0)
    assert follower.handle(Tick(), follower.wake_at) == [Prepare(V1)]


# --- the publisher -------------------------------------------------------------------------------


def state(version: bytes, stage: Stage, current: bytes = b"", done: int = 0) -> FollowerState:
    return FollowerState(version, stage, current, done)


READY = state(V2, Stage.VERIFIED, V1, 1000)
BEHIND = state(V2, Stage.FETCHING, V1, 400)


def test_all_followers_must_have_it() -> None:
    update = GroupUpdate(V2, deadline=10.0)
    assert update.judge(V2, {}, (), 0.0) is Verdict.WAIT, "no followers are not all followers"
    assert update.judge(V2, {1: READY, 2: BEHIND}, (), 1.0) is Verdict.WAIT
    assert (update.ready_count, update.follower_count) == (1, 2)
    assert update.judge(V2, {1: READY, 2: READY}, (), 2.0) is Verdict.SWITCH
    assert update.laggards == []


def test_too_late_names_the_laggards_the_furthest_behind_first() -> None:
    update = GroupUpdate(V2, deadline=10.0)
    failed = FollowerState(V2, Stage.FAILED, V1, 100, "disk full")
    elsewhere = state(V3, Stage.FETCHING, V1, 900)
    living = {1: READY, 2: BEHIND, 3: failed, 4: elsewhere}
    assert update.judge(V2, living, (), 9.9) is Verdict.WAIT
    assert update.judge(V2, living, (), 10.0) is Verdict.TOO_LATE
    assert [(each.member, each.stage, each.why) for each in update.laggards] == [
        (4, Stage.WAITING, ""),
        (3, Stage.FAILED, "disk full"),
        (2, Stage.FETCHING, ""),
    ]


def test_as_many_as_were_asked_for() -> None:
    update = GroupUpdate(V2, 10.0, quorum=2)
    assert update.judge(V2, {1: READY, 2: BEHIND, 3: BEHIND}, (), 0.0) is Verdict.WAIT
    assert update.judge(V2, {1: READY, 2: BEHIND, 3: READY}, (), 0.0) is Verdict.SWITCH
    assert GroupUpdate(V2, 10.0, quorum=0).judge(V2, {}, (), 0.0) is Verdict.SWITCH


def test_who_dies_during_the_update_is_waited_for_and_who_goes_is_not() -> None:
    update = GroupUpdate(V2, deadline=10.0)
    assert update.judge(V2, {1: READY, 2: BEHIND}, (), 0.0) is Verdict.WAIT
    assert update.judge(V2, {1: READY}, (), 1.0) is Verdict.WAIT
    (laggard,) = update.laggards
    assert (laggard.member, laggard.dead) == (2, True)
    assert update.judge(V2, {1: READY}, (2,), 2.0) is Verdict.SWITCH


def test_who_comes_during_the_update_is_waited_for() -> None:
    update = GroupUpdate(V2, deadline=10.0)
    update.judge(V2, {1: BEHIND}, (), 0.0)
    assert update.judge(V2, {1: READY, 2: BEHIND}, (), 1.0) is Verdict.WAIT


def test_a_newer_version_ends_the_update_of_an_older_one() -> None:
    update = GroupUpdate(V2, deadline=10.0)
    assert update.judge(V3, {1: READY}, (), 0.0) is Verdict.SUPERSEDED
    assert update.judge(b"", {1: READY}, (), 0.0) is Verdict.SUPERSEDED


def test_who_uses_it_already_has_it_whatever_it_does_now() -> None:
    using = state(V3, Stage.FETCHING, current=V2)
    assert GroupUpdate(V2, 10.0).judge(V2, {1: using}, (), 0.0) is Verdict.SWITCH


# --- whole groups --------------------------------------------------------------------------------


class Group:
    """A publisher and followers over records that arrive late, or never while a peer is dead. Every step one thing
    happens, in random order: so whatever can come in between does."""

    def __init__(self, seed: int, followers: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.head = self.switch = (0, b"")
        self.switches: list[bytes] = []
        self.peers = [Peer(self, number) for number in range(followers)]
        self.updates: list[GroupUpdate] = []
        self.verdicts: list[tuple[Verdict, GroupUpdate]] = []
        self.publisher_alive = True
        self.published = 0

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.alive]

    def step(self) -> None:
        self.now += self.rng.random()
        actions: list[Callable[[], None]] = [peer.step for peer in self.living for _ in range(6)]
        actions += [self.die_or_come_back]
        if self.publisher_alive:
            actions += [self.publish, self.begin_update, *[self.judge] * 6]
            actions += [self.publisher_dies]
        self.rng.choice(actions)()

    def publish(self) -> None:
        if self.published < 6:
            self.published += 1
            self.head = (self.published, b"version%d" % self.published)

    def begin_update(self) -> None:
        if self.head[1] and len(self.updates) < 2:  # two at once
            quorum = self.rng.choice([None, None, len(self.peers) - 1])
            self.updates.append(
                GroupUpdate(self.head[1], self.now + self.rng.choice([5.0, 500.0]), quorum)
            )

    def judge(self) -> None:
        for update in list(self.updates):
            living = {peer.number: peer.shown for peer in self.living if peer.shown is not None}
            verdict = update.judge(self.head[1], living, (), self.now)
            if verdict is Verdict.WAIT:
                continue
            self.updates.remove(update)
            self.verdicts.append((verdict, update))
            if verdict is Verdict.SWITCH:
                ready = [peer for peer in self.peers if update.version in peer.ever_verified]
                enough = update.follower_count if update.quorum is None else update.quorum
                assert len(ready) >= enough, "a switch before they were ready"
                if self.switch[1] != update.version:
                    self.switches.append(update.version)
                    self.switch = (self.switch[0] + 1, update.version)

    def publisher_dies(self) -> None:
        if self.rng.random() < 0.05:
            self.publisher_alive = False
            self.updates.clear()

    def die_or_come_back(self) -> None:
        peer = self.rng.choice(self.peers)
        if peer.alive and self.rng.random() < 0.3:
            peer.die()
        elif not peer.alive:
            peer.come_back()

    def settle(self) -> None:
        """Nothing new happens, and all that was said arrives."""
        for peer in self.peers:
            if not peer.alive:
                peer.come_back()
            peer.fails = False
        for _ in range(2000):
            self.now += 20.0
            for peer in self.living:
                peer.step()


class Peer:
    """A follower over a disk that survives it."""

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.number = group, number
        self.alive, self.fails = True, True
        self.on_disk: dict[bytes, None] = {}
        self.current = b""
        self.used: list[bytes] = []
        self.ever_verified: set[bytes] = set()
        self.shown: FollowerState | None = None
        self.restart()

    def restart(self) -> None:
        self.follower = Follower(self.current, self.on_disk)
        self.heard_head = self.heard_switch = (0, b"")
        self.pending: list[Effect] = []
        self.aborted: set[bytes] = set()

    def die(self) -> None:
        """At any moment: also between the link on the disk and what comes after it."""
        self.alive, self.shown = False, None
        for effect in self.pending:
            if isinstance(effect, SwitchTo) and self.group.rng.random() < 0.5:
                self.use(effect.version)

    def come_back(self) -> None:
        self.alive = True
        self.restart()

    def step(self) -> None:
        rng, group = self.group.rng, self.group
        what = rng.randrange(4)
        if what == 0:
            # Records come one by one, in any order, and never an older one after a newer one.
            if rng.random() < 0.5:
                self.heard_head = max(self.heard_head, group.head)
            if rng.random() < 0.5:
                self.heard_switch = max(self.heard_switch, group.switch)
            self.feed(Heard(self.heard_head[1], self.heard_switch[1]))
        elif what == 1 and self.pending:
            self.carry_out(self.pending.pop(rng.randrange(len(self.pending))))
        elif what == 2 and group.now >= self.follower.wake_at:
            self.feed(Tick())
        else:
            said = self.follower.state
            self.shown = FollowerState(said.version, said.stage, said.current)

    def feed(self, event: Event) -> None:
        self.pending += self.follower.handle(event, self.group.now)
        preparing = [each for each in self.pending if isinstance(each, Prepare)]
        switching = [each for each in self.pending if isinstance(each, SwitchTo)]
        assert len(preparing) <= 1
        assert len(switching) <= 1
        if self.follower.state.stage is Stage.VERIFIED:
            assert self.follower.state.version in self.on_disk
            self.ever_verified.add(self.follower.state.version)

    def carry_out(self, effect: Effect) -> None:
        rng = self.group.rng
        match effect:
            case Abandon(version):
                self.aborted.add(version)
            case Prepare(version) if version in self.aborted:
                self.aborted.discard(version)
                self.feed(NotPrepared(version))
            case Prepare(version) if self.fails and rng.random() < 0.2:
                self.feed(NotPrepared(version, "failed"))
            case Prepare(version):
                self.on_disk[version] = None
                self.ever_verified.add(version)
                self.feed(Prepared(version))
            case SwitchTo(version) if self.fails and rng.random() < 0.2:
                self.feed(NotSwitched(version, "failed"))
            case SwitchTo(version) if self.fails and rng.random() < 0.1:
                self.on_disk.pop(version, None)
                self.feed(NotSwitched(version, "gone", missing=True))
            case SwitchTo(version):
                self.use(version)
                self.feed(Switched(version))

    def use(self, version: bytes) -> None:
        assert version in self.on_disk, "a switch to what is not there"
        assert version in self.group.switches, "a switch without an order"
        self.current = version
        self.used.append(version)


@pytest.mark.parametrize("seed", range(60))
def test_groups_in_any_order(seed: int) -> None:
    group = Group(seed, followers=1 + seed % 5)
    for _ in range(600):
        group.step()
    group.settle()
    for peer in group.peers:
        assert peer.current == group.switch[1], "all use the last ordered version in the end"
        for version in (group.head[1], group.switch[1]):
            assert not version or version in peer.on_disk
        order = [group.switches.index(version) for version in peer.used]
        assert order == sorted(order), "no follower goes back"


def test_the_groups_above_have_seen_all_of_it() -> None:
    verdicts: set[Verdict] = set()
    died_between = late = 0
    for seed in range(30):
        group = Group(seed, followers=1 + seed % 5)
        for _ in range(600):
            group.step()
        verdicts |= {verdict for verdict, _ in group.verdicts}
        died_between += not group.publisher_alive and group.head[1] != group.switch[1]
        group.settle()
        late += any(len(set(peer.used)) < len(set(group.switches)) for peer in group.peers)
    assert verdicts == {Verdict.SWITCH, Verdict.TOO_LATE, Verdict.SUPERSEDED}
    assert died_between > 2
    assert late > 0


def test_without_a_quorum_a_first_follower_must_come_soon() -> None:
    update = GroupUpdate(V2, deadline=10.0, first_by=3.0)
    assert update.wake_at == 3.0
    assert update.judge(V2, {}, (), 2.9) is Verdict.WAIT
    assert update.judge(V2, {}, (), 3.0) is Verdict.NO_FOLLOWERS
    assert update.judge(V2, {1: BEHIND}, (), 3.1) is Verdict.WAIT
    assert update.wake_at == 10.0
    assert GroupUpdate(V2, 10.0, 1, 3.0).judge(V2, {}, (), 5.0) is Verdict.WAIT
