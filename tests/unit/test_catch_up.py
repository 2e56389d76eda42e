"""Views that are given up for their owners' snapshots, and whether all logs are followed."""

from collections import Counter
from random import Random

import pytest

from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog, Position
from p2pstore.gossip.locations.snapshots import (
    KEPT_SECONDS,
    MARK_SECONDS,
    CatchUp,
    FollowedLogs,
    check_snapshot,
)
from p2pstore.gossip.locations.views import STEP_RECORDS, DirectoryConfig
from p2pstore.gossip.members.member_table import MembershipConfig, MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import LOCATION_BYTES, Member, SignedRecord, member_of
from simulation.signer import peer_id_of
from tests.unit.gossip_network import bury, location, operations_after, peer_record, run_at


def setting() -> tuple[OwnLog, Directory, MemberState, CatchUp]:
    """An owner's log, another member's directory of it, and the `CatchUp` that watches that."""
    membership = Membership(peer_id_of(1), 1, MembershipConfig())
    log, directory = OwnLog(1), Directory(DirectoryConfig())
    directory.observe_head(membership.own.member, 1, log.head)
    return log, directory, membership.own, CatchUp(directory, 1000, 1.0)


def relay(log: OwnLog, directory: Directory, owner: MemberState) -> None:
    """The operations since the view's place arrive."""
    known = directory.position(owner.member)[1]
    directory.apply(owner.member, 1, run_at(known + 1, operations_after(log, known)))


def test_operations_may_run_ahead_of_their_signed_head() -> None:
    log, directory, owner, catch_up = setting()
    for second in range(60):  # written all the time; each head is one second late
        head = log.head
        log.add(location(second))
        relay(log, directory, owner)
        directory.observe_head(owner.member, 1, head)
        assert catch_up.due([owner], set(), float(second)) == []
    assert not directory.diverged(owner.member)
    assert directory.position(owner.member) == (1, 60)


def test_a_large_snapshot_is_fetched_once_while_it_is_put_in() -> None:
    log, directory, owner, catch_up = setting()
    for number in range(STEP_RECORDS + 1):  # over its ring as well
        log.add(location(number))
    head = log.head
    directory.observe_head(owner.member, 1, head)
    assert catch_up.due([owner], set(), 0.0) == [owner]
    snapshot = check_snapshot(log.snapshot())
    assert directory.install_snapshot(owner.member, 1, head.sequence, head.set_hash, snapshot)
    assert directory.lag(owner.member) == head.sequence
    assert catch_up.due([owner], set(), 100.0) == []
    while directory.work_pending:
        directory.work()
    assert directory.lag(owner.member) == 0
    assert catch_up.due([owner], set(), 200.0) == []


PEERS = range(1, 6)


class World:
    """Some owners' logs and records, and one peer that follows them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 10.0
        self.membership = Membership(peer_id_of(0), 1, MembershipConfig())
        self.directory = Directory()
        self.followed = FollowedLogs(self.membership, self.directory)
        self.logs = {number: OwnLog(1) for number in PEERS}
        self.sequences = dict.fromkeys(PEERS, 0)
        self.marked: dict[Member, Position] = {}
        """Where the heads were at the last mark, or first, whichever was later."""
        self.keys = iter(range(1_000_000))

    def tell(self, number: int) -> None:
        """The owner's record arrives."""
        self.sequences[number] += 1
        log, peer_id = self.logs[number], peer_id_of(number)
        record = peer_record(
            number, incarnation=log.incarnation, sequence=self.sequences[number], head=log.head
        )
        known = self.membership.get(peer_id)
        before = None
        if known is not None and known.signed is not None:
            before = known.record_incarnation, known.log_sequence
        if self.membership.observe_record(record, SignedRecord(b"", b""), self.now):
            member = member_of(peer_id)
            self.directory.observe_head(member, log.incarnation, log.head)
            if before is not None:
                self.followed.moved(member, before, self.now)
            self.marked.setdefault(member, (log.incarnation, log.head.sequence))

    def relay(self, number: int, limit: int) -> None:
        """Some of the owner's operations arrive."""
        log, member = self.logs[number], member_of(peer_id_of(number))
        incarnation, sequence = self.directory.position(member)
        if incarnation == log.incarnation:
            operations = operations_after(log, sequence, LOCATION_BYTES * limit)
            if operations:
                self.directory.apply(member, incarnation, run_at(sequence + 1, operations))

    def claim(self, number: int, status: Status) -> None:
        state = self.membership.get(peer_id_of(number))
        if state is not None and status is Status.ALIVE:
            claim = Claim(state.peer_id, state.incarnation + 1, int(status), 9)
            self.membership.observe_claims([claim], self.now)
        elif state is not None and state.alive:
            bury(self.membership, [number], self.now)

    def step(self) -> None:
        number = self.rng.choice(PEERS)
        match self.rng.choice("oooottttrrrrrrrrrrdalf"):
            case "o":
                self.logs[number].add(location(next(self.keys)))
            case "t":
                self.tell(number)
            case "r":
                self.relay(number, self.rng.choice([1, 100]))
            case "d":
                self.claim(number, Status.DEAD)
            case "a":
                self.claim(number, Status.ALIVE)
            case "l":
                self.logs[number] = OwnLog(self.logs[number].incarnation + 10)
            case "f":
                self.directory.forget(member_of(peer_id_of(number)))

    def mark(self) -> None:
        self.followed.mark(self.now)
        self.marked = {
            state.member: (state.record_incarnation, state.log_sequence)
            for state in self.membership.states()
            if state.signed is not None
        }

    def is_complete(self) -> bool:
        """The answer by looking at all."""
        return all(
            self.directory.position(state.member) >= self.marked[state.member]
            for state in self.membership.others()
        )


@pytest.mark.parametrize("seed", range(10))
def test_it_is_as_if_all_were_looked_at(seed: int) -> None:
    world = World(seed)
    world.mark()
    seen: Counter[bool] = Counter()
    for _ in range(300):
        for _ in range(world.rng.randrange(8)):
            world.step()
        world.now += KEPT_SECONDS
        expected = world.is_complete()
        assert world.followed.complete(world.now) == expected
        seen[expected] += 1
        if world.now % MARK_SECONDS < KEPT_SECONDS:
            world.mark()
    assert min(seen[True], seen[False]) > 20


def test_logs_that_were_not_followed_are_complete_when_they_are_where_their_heads_are() -> None:
    world = World(1)
    world.tell(1)
    world.mark()
    world.logs[1].add(location(1))
    world.tell(1)
    world.now += KEPT_SECONDS
    assert world.followed.complete(world.now), "that is less than half a second old"
    world.followed.begin_anew()
    assert not world.followed.complete(world.now)
    world.relay(1, 9)
    world.now += KEPT_SECONDS
    assert world.followed.complete(world.now)
