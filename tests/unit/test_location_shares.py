"""No member's locations crowd out those of the others."""

import msgspec
import pytest

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.home_views import HomeViews
from p2pstore.gossip.homes.partition_homes import ClusterLoad, ModeLimits, PartitionConfig
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_index import hash_of
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OwnLog
from p2pstore.gossip.locations.snapshots import CatchUp, FollowedLogs, check_snapshot
from p2pstore.gossip.locations.views import DirectoryConfig, LocationShares, Outcome, who_makes_room
from p2pstore.gossip.members.member_table import MembershipConfig
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import LOCATION_BYTES, PARTITION_COUNT, LogHead, partition_of
from p2pstore.home_messages import PartitionSet, Push
from p2pstore.peer.node import log_refused_locations
from tests.unit.core_harness import OTHER_INCARNATION, Harness
from tests.unit.gossip_network import digest_of, location
from tests.unit.location_set import check_update
from tests.unit.test_directory import A, B, feed, held, install, log_of, reading

C = 333
TOO_MANY = LogHead(sequence=5_000_000, count=MAX_OWN_RECORDS + 1, set_hash=1)

# --- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "wanted", "missing", "dropped"),
    [
        ({B: 90}, 5, 0, []),
        ({B: 90}, 5, 5, [B]),
        ({A: 200, B: 90}, 5, 5, [B]),
        ({B: 90, C: 80}, 5, 5, [B]),
        ({B: 60, C: 90}, 5, 100, [C, B]),
        ({B: 4, C: 5}, 5, 5, []),
        ({B: 90, C: 80}, 5, 500, []),
    ],
    ids=[
        "there is room",
        "who has more goes",
        "not oneself",
        "who has most goes",
        "and then the next",
        "nobody goes for somebody who has as much",
        "nobody goes in vain",
    ],
)
def test_who_makes_room(counts: dict[int, int], wanted: int, missing: int, dropped: list[int]) -> None:
    assert who_makes_room(counts, A, wanted, missing) == dropped


def test_a_refusal_is_told_once_and_ends_with_the_reason_for_it() -> None:
    shares = LocationShares()
    assert shares.allows(A, MAX_OWN_RECORDS)
    for _ in range(3):
        assert not shares.allows(A, MAX_OWN_RECORDS + 1)
    assert shares.refused == {A}
    assert shares.take_news() == {A: MAX_OWN_RECORDS + 1}
    assert shares.allows(A, 7)
    assert not shares.refused
    assert not shares.allows(A, MAX_OWN_RECORDS + 2)
    assert shares.take_news() == {}, "it is no news"
    shares.forget(A)
    shares.allows(A, MAX_OWN_RECORDS + 3)
    assert shares.take_news() == {A: MAX_OWN_RECORDS + 3}


# --- views of whole logs ---------------------------------------------------------------------


def test_who_announces_more_than_a_peer_can_hold_is_ignored() -> None:
    log = log_of(3)
    directory = reading(log)
    directory.heard(A, 1, [9], location(8).encode(), 0.0)
    directory.observe_head(A, 1, TOO_MANY)
    assert directory.record_count == 0
    assert directory.lag(A) == 0
    assert A not in directory.unsettled, "no snapshot is fetched"
    assert feed(directory, log).outcome is Outcome.STALE
    assert directory.heard(A, 1, [10], location(9).encode(), 0.0) == 0
    assert not install(directory, log)
    assert held(directory, 1) == held(directory, 9) == []
    log.add(location(4))
    directory.observe_head(A, 1, log.head)
    assert feed(directory, log).outcome is Outcome.APPLIED
    assert held(directory, 1) == [A]


def test_the_largest_view_makes_room_for_the_small_ones() -> None:
    directory = reading(log_of(90), max_records=100)
    for place in range(8):
        member, log = 1000 + place, OwnLog(1)
        for number in range(10):
            log.add(location(200 + 10 * place + number))
        directory.observe_head(member, 1, log.head)
        assert feed(directory, log, member=member).outcome is Outcome.APPLIED
    assert directory.record_count == 80
    assert held(directory, 1) == []
    assert [held(directory, 200 + 10 * place) for place in range(8)] == [
        [1000 + place] for place in range(8)
    ]


def test_who_was_dropped_does_not_come_back_while_there_is_no_room() -> None:
    membership = Membership(bytes(38), 1, MembershipConfig())
    owner, log = membership.own, log_of(90)
    directory = reading(log, member=owner.member, max_records=100)
    catch_up = CatchUp(directory, 1000, 0.0)
    small = log_of(20)
    directory.observe_head(B, 1, small.head)
    assert feed(directory, small, member=B).outcome is Outcome.APPLIED
    assert directory.position(owner.member) == (1, 0)
    assert catch_up.due([owner], set(), 1.0) == []
    directory.forget(B)
    assert catch_up.due([owner], set(), 2.0) == [owner]
    assert install(directory, log, owner.member)


def test_a_snapshot_is_fetched_when_a_larger_view_would_make_room() -> None:
    membership = Membership(bytes(38), 1, MembershipConfig())
    owner, log = membership.own, log_of(20)
    directory = reading(log_of(90), max_records=100)
    directory.observe_head(owner.member, 1, log.head)
    assert CatchUp(directory, 1000, 0.0).due([owner], set(), 1.0) == [owner]
    head = log.head
    assert directory.install_snapshot(
        owner.member, 1, head.sequence, head.set_hash, check_snapshot(log.snapshot())
    )
    assert directory.record_count == 20


def test_room_that_snapshots_will_take_is_theirs() -> None:
    directory = Directory(DirectoryConfig(max_records=5_000))
    large = log_of(4_000)
    directory.observe_head(A, 1, large.head)
    assert install(directory, large)
    small = log_of(2_000)
    directory.observe_head(B, 1, small.head)
    assert feed(directory, small, member=B).outcome is Outcome.APPLIED
    assert not directory.staging(A)


# --- the whole peer --------------------------------------------------------------------------


def test_a_refused_member_stays_a_member_and_nobody_waits_for_its_log() -> None:
    world = Harness(others=2)
    liar = world.others[0]
    followed = FollowedLogs(world.gossip.membership, world.gossip.directory)
    world.offer(liar, head=TOO_MANY)
    state = world.gossip.membership.get(liar.peer_id)
    assert state is not None
    assert state.status is Status.ALIVE
    assert world.gossip.directory.shares.refused == {liar.member}
    assert followed.complete(world.now)
    world.offer(world.others[1], head=LogHead(5, 5, 1))
    assert not followed.complete(world.now + 1.0), "of others it counts"


def test_a_refusal_is_said_loudly_and_with_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    world = Harness(others=1)
    liar = world.others[0]
    world.offer(liar, head=TOO_MANY)
    ((member, count),) = world.gossip.directory.shares.take_news().items()
    log_refused_locations(world.core, member, count)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert world.core.name_of(liar.peer_id) in record.message
    assert "4,194,305 objects" in record.message
    assert "take it out of the cluster" in record.message


def test_made_up_numbers_of_locations_change_nobodys_mode() -> None:
    world = Harness(others=2)
    limits = ModeLimits()
    before = ClusterLoad(limits).of(world.gossip.membership.live(), world.now)
    world.offer(world.others[0], head=msgspec.structs.replace(TOO_MANY, count=1 << 60))
    assert ClusterLoad(limits).of(world.gossip.membership.live(), world.now) == before
    world.offer(world.others[1], head=LogHead(MAX_OWN_RECORDS, MAX_OWN_RECORDS, 1))
    assert ClusterLoad(limits).of(world.gossip.membership.live(), world.now) > before


# --- homes -----------------------------------------------------------------------------------


def sets_of(first: int, count: int) -> Push:
    by_partition: dict[int, list[bytes]] = {}
    for number in range(first, first + count):
        packed = location(number).encode()
        by_partition.setdefault(partition_of(packed), []).append(packed)
    return Push(
        OTHER_INCARNATION,
        [],
        b"",
        sets=[
            PartitionSet(partition, 1, hash_of(records), b"".join(records))
            for partition, records in by_partition.items()
        ],
    )


def test_the_owner_with_most_makes_room_at_a_home() -> None:
    home = HomeViews(PartitionConfig(), Directory(DirectoryConfig(max_records=4_000)))
    greedy = sets_of(0, 9_000)
    assert len(greedy.sets) == PARTITION_COUNT
    assert home.take(A, check_update(greedy), 0.0), "not all of it fits"
    mine = sets_of(20_000, 300)
    for _ in range(50):  # it is sent again, as long as the home says so
        behind = home.take(B, check_update(mine), 1.0)
        if not behind:
            break
    assert not behind
    for number in range(20_000, 20_300):
        assert [found.member for found in home.directory.holders(digest_of(number))] == [B]


def test_an_owner_cannot_have_more_at_a_home_than_a_peer_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2pstore.gossip.homes.home_views.MAX_OWN_RECORDS", 1_000)
    home = HomeViews(PartitionConfig(), Directory())
    assert home.take(A, check_update(sets_of(0, 900)), 0.0) == []
    assert home.take(A, check_update(sets_of(5_000, 1_500)), 0.0)
    assert home.record_count <= 1_000
    operations = [location(number).encode() for number in range(9_000, 11_000)]
    push = Push(
        OTHER_INCARNATION,
        list(range(len(operations))),
        b"".join(operations),
        (1).to_bytes(4, "little") * len(operations),
    )
    home.take(B, check_update(push), 0.0)
    assert 900 < home.record_count <= 2_000
    assert LOCATION_BYTES * home.record_count > 0


def test_who_makes_room_is_gone_from_the_partition_that_it_makes_room_in() -> None:
    """Both have keys of one partition only; the one that takes the other's place is found and counted."""
    home = HomeViews(PartitionConfig(), Directory(DirectoryConfig(max_records=300)))

    def keys(first: int, count: int) -> list[bytes]:
        return [bytes(2) + location(first + each).encode()[2:] for each in range(count)]

    def run(number: int) -> Push:
        (packed,) = keys(number, 1)
        return Push(OTHER_INCARNATION, [number], packed, number.to_bytes(4, "little"))

    greedy = 1
    while not home.take(A, check_update(run(greedy)), 0.0):
        greedy += 1
    assert greedy > 50
    mine = keys(9_000, 50)
    whole = Push(OTHER_INCARNATION, [], b"", sets=[PartitionSet(0, 1, hash_of(mine), b"".join(mine))])
    for _ in range(50):
        behind = home.take(B, check_update(whole), 0.0)
        if not behind:
            break
    assert not behind
    assert home.record_count == 50
    digest = bytes(2) + digest_of(9_000)[2:]
    assert [found.member for found in home.directory.holders(digest)] == [B]
    home.drop(B)
    assert home.record_count == 0
