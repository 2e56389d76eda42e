"""When a view of a log is given up for the owner's snapshot."""

from __future__ import annotations

from p2pstore.gossip.locations.catch_up import UNSIGNED_SECONDS, CatchUp
from p2pstore.gossip.locations.directory import Directory, DirectoryConfig
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.locations.watched_keys import STEP_RECORDS
from p2pstore.gossip.members.membership import Membership, MembershipConfig, MemberState
from p2pstore.gossip.records import LOCATION_BYTES
from tests.unit.gossip_network import location, peer_id_of


def setting() -> tuple[OwnLog, Directory, MemberState, CatchUp]:
    """An owner's log, somebody else's directory of it, and what watches that."""
    membership = Membership(peer_id_of(1), 1, MembershipConfig())
    log, directory = OwnLog(1), Directory(DirectoryConfig())
    directory.observe_head(membership.own.member, 1, log.head)
    return log, directory, membership.own, CatchUp(directory, 1000, 1.0)


def relay(log: OwnLog, directory: Directory, owner: MemberState) -> None:
    """What the owner wrote since the view's place arrives."""
    known = directory.position(owner.member)[1]
    operations = log.since(known, 10_000)
    assert operations is not None
    directory.apply(owner.member, 1, known + 1, operations)


def test_operations_may_run_ahead_of_their_signed_head_for_a_while() -> None:
    log, directory, owner, catch_up = setting()
    for second in range(60):  # written all the time; each head is one second late
        head = log.head
        log.add(location(second))
        relay(log, directory, owner)
        directory.observe_head(owner.member, 1, head)
        assert catch_up.due([owner], set(), float(second)) == []
    assert not directory.diverged(owner.member)
    assert directory.position(owner.member) == (1, 60)


def test_operations_that_no_head_ever_covers_were_made_up() -> None:
    log, directory, owner, catch_up = setting()
    log.add(location(1))
    relay(log, directory, owner)
    directory.observe_head(owner.member, 1, log.head)
    directory.apply(owner.member, 1, 2, bytes(LOCATION_BYTES * 50))
    assert catch_up.due([owner], set(), 0.0) == []
    log.add(location(2))  # the view believes to have that
    directory.observe_head(owner.member, 1, log.head)
    assert catch_up.due([owner], set(), UNSIGNED_SECONDS - 0.1) == []
    assert catch_up.due([owner], set(), UNSIGNED_SECONDS) == [owner]
    assert directory.diverged(owner.member)
    head = log.head
    snapshot = check_snapshot(log.snapshot())
    assert directory.install_snapshot(owner.member, 1, head.sequence, head.set_hash, snapshot)
    assert catch_up.due([owner], set(), UNSIGNED_SECONDS + 1) == []


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
