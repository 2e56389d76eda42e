"""When a view of a log is given up for the owner's snapshot."""

from __future__ import annotations

from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.snapshots import CatchUp, check_snapshot
from p2pstore.gossip.locations.views import STEP_RECORDS, DirectoryConfig
from p2pstore.gossip.members.member_table import MembershipConfig, MemberState
from p2pstore.gossip.members.membership import Membership
from tests.unit.gossip_network import location, operations_after, peer_id_of, run_at


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
