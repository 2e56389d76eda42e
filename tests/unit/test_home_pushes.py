"""Pushes of owners to homes, and what homes make of them: whatever is lost, late, repeated or restarted meanwhile."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.open_requests import LOST_ANSWER_SECONDS, OpenRequests
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import ControlKind, HomePush, Ping
from p2pstore.gossip.homes import home_pushes
from p2pstore.gossip.homes.home_pushes import HomePushes
from p2pstore.gossip.homes.home_updates import AUDIT_ENTRY
from p2pstore.gossip.homes.home_views import HomeViews
from p2pstore.gossip.homes.partition_homes import PartitionConfig, table_of
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    LocationRecord,
    decode_location,
    location_hash,
    partition_of,
)
from p2pstore.home_messages import PartitionSet, Push
from simulation.signer import peer_id_of
from tests.present import present
from tests.unit.gossip_network import digest_of, location
from tests.unit.location_set import check_update

CONFIG = PartitionConfig(audit_seconds=10.0)
OWNER, HOME, OTHER = 11, 22, 33


class Owner:
    """An owner with its log, as far as homes are concerned."""

    def __init__(self, members: list[int], keeps: bool = True, config: PartitionConfig = CONFIG) -> None:
        self.log = OwnLog(5)
        self.keeps = keeps
        self.pushes = HomePushes(
            OWNER, self.log, config, Random(1), lambda member: peer_id_of(member), lambda _: self.keeps
        )
        self.pushes.homes_changed(table_of(members), 0.0)
        self.pushes.keepers(len(members) - 1 if keeps else 0, 0.0)

    def hold(self, number: int, clock: int = 1) -> None:
        operation = present(self.log.add(location(number, clock)))
        self.pushes.note([operation])

    def release(self, number: int) -> None:
        held = self.log.held(digest_of(number))
        if held is not None:
            [operation] = self.log.remove_many([(digest_of(number), decode_location(held).version)])
            self.pushes.note([operation])

    def take(self, now: float) -> list[HomePush]:
        return self.pushes.take(now)

    def bring_up(self, now: float) -> list[HomePush]:
        """Answer everything until nothing is left to say."""
        said = []
        for _ in range(50):
            now += 0.05
            pushes = self.take(now)
            said += pushes
            for push in pushes:
                self.pushes.answered(push.token, [], now)
        return said


def views() -> HomeViews:
    return HomeViews(CONFIG, Directory())


def take(home: HomeViews, push: Push, now: float = 0.0) -> list[int]:
    return home.take(OWNER, check_update(push), now)


def packed_view(home: HomeViews, numbers: range) -> set[bytes]:
    """All that the home would say of these keys."""
    return {
        found.record.encode()
        for number in numbers
        for found in home.directory.holders(digest_of(number))
    }


# --- the owner -------------------------------------------------------------------------------


def test_a_new_home_is_sent_its_partitions_whole_then_operations_by_number() -> None:
    owner = Owner([OWNER, HOME])
    for number in range(20):
        owner.hold(number)
    first, *rest = owner.bring_up(1.0)
    assert not first.message.sequences, "all of it is in the whole partitions"
    assert (
        sum(len(each.records) for push in (first, *rest) for each in push.message.sets)
        == 20 * LOCATION_BYTES
    )
    assert len(first.message.sets) == 1024, "empty ones, too"
    assert owner.pushes.lacking() == 0
    owner.hold(3, clock=2)
    (push,) = owner.take(10.0)
    assert (push.peer_id, push.message.incarnation, push.message.sets) == (peer_id_of(HOME), 5, [])
    assert push.message.operations == location(3, 2).encode()
    assert int.from_bytes(push.message.numbers, "little") == owner.pushes.sets.number(
        partition_of(digest_of(3))
    )
    assert push.message.sequences == [21]


def test_one_message_at_a_time_and_a_pause_between_batches() -> None:
    owner = Owner([OWNER, HOME], keeps=False)
    assert owner.pushes.due() == pytest.approx(owner.pushes.due())
    owner.hold(1)
    (push,) = owner.take(10.0)
    owner.hold(2)
    assert owner.take(10.1) == [], "the first one is not answered yet"
    owner.pushes.answered(push.token, [], 10.1)
    (push,) = owner.take(10.1)
    assert push.message.operations == location(2).encode()
    owner.pushes.answered(push.token, [], 10.1)
    owner.hold(3)
    assert owner.take(10.11) == [], "a batch every 20 ms"
    assert owner.pushes.due() == pytest.approx(10.12)
    assert len(owner.take(10.12)) == 1


def test_full_homes_are_told_of_operations_only_and_never_again() -> None:
    owner = Owner([OWNER, HOME], keeps=False)
    owner.hold(1)
    (push,) = owner.take(10.0)
    assert (push.message.numbers, push.message.sets, push.message.audit) == (b"", [], b"")
    owner.pushes.answered(push.token, None, 10.5)
    assert owner.take(11.5) == []
    assert owner.pushes.lacking() == 0


def test_a_home_that_did_not_answer_is_sent_the_partition_whole() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    (push,) = owner.take(10.0)
    owner.hold(1, clock=2)  # waits behind it, and is void with it
    owner.pushes.answered(push.token, None, 10.5)
    (again,) = owner.take(11.0)
    assert again.message.operations == b""
    (whole,) = again.message.sets
    assert whole.partition == partition_of(digest_of(1))
    assert (whole.number, whole.records) == (2, location(1, 2).encode())
    owner.pushes.answered(again.token, [], 11.0)
    assert owner.pushes.lacking() == 0


def test_operations_that_are_not_answered_soon_are_sent_once_more() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    (first,) = owner.take(10.0)
    owner.hold(1, clock=2)
    assert owner.take(10.0 + 0.9 * CONFIG.push_resend_seconds) == []
    assert owner.pushes.due() == pytest.approx(10.0 + CONFIG.push_resend_seconds)
    (second,) = owner.take(10.0 + CONFIG.push_resend_seconds)
    assert second == replace(first, token=second.token)
    assert second.token != first.token
    assert owner.take(10.4) == [], "and not again"
    owner.pushes.answered(first.token, None, 10.5)
    assert owner.take(10.5) == [], "the second copy may yet be answered"
    owner.pushes.answered(second.token, [], 10.55)
    (after,) = owner.take(10.6)
    assert (after.message.operations, after.message.sets) == (location(1, 2).encode(), []), (
        "nothing was missed"
    )


@pytest.mark.parametrize("answered", [0, 1])
def test_the_answer_to_either_copy_counts(answered: int) -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    pushes = [*owner.take(10.0), *owner.take(10.2)]
    owner.pushes.answered(pushes[answered].token, [partition_of(digest_of(1))], 10.2)
    (whole,) = owner.take(10.3)
    assert [each.partition for each in whole.message.sets] == [partition_of(digest_of(1))]
    owner.pushes.answered(pushes[1 - answered].token, None, 10.7)
    owner.pushes.answered(whole.token, [], 10.7)
    assert owner.pushes.lacking() == 0, "the other copy's outcome is of no interest"


def test_a_home_that_answers_neither_copy_is_sent_the_partition_whole() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    for push in [*owner.take(10.0), *owner.take(10.2)]:
        owner.pushes.answered(push.token, None, 10.7)
    (again,) = owner.take(11.0)
    assert len(again.message.sets) == 1


def test_homes_that_are_slow_are_not_sent_more() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    now, copies = 10.0, []
    for number in range(30):
        owner.hold(number)
        pushes = owner.take(now)
        pushes += owner.take(now + 0.19)
        copies.append(len(pushes))
        owner.pushes.answered(pushes[0].token, [], now + 0.2)
        now += 0.3
    assert copies[0] == 2
    assert copies[-1] == 1, "it is what they take"


def test_whole_partitions_are_not_sent_twice_in_a_hurry() -> None:
    owner = Owner([OWNER, HOME])
    owner.hold(1)
    assert owner.take(1.0)[0].message.sets
    assert owner.take(1.4) == []


def test_a_whole_partition_that_changed_on_the_way_is_sent_again() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    (push,) = owner.take(10.0)
    partition = partition_of(digest_of(1))
    owner.pushes.answered(push.token, [partition], 10.0)
    (whole,) = owner.take(10.1)
    owner.hold(1, clock=2)
    owner.pushes.answered(whole.token, [], 10.1)
    (again,) = owner.take(10.2)
    assert [each.number for each in again.message.sets] == [2]
    owner.pushes.answered(again.token, [], 10.2)
    owner.hold(1, clock=3)
    (push,) = owner.take(10.3)
    assert (push.message.sequences, push.message.sets) == ([3], [])


def test_a_home_that_refuses_is_asked_less_and_less_often() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    partition = partition_of(digest_of(1))
    owner.hold(1)
    now, sent = 10.0, []
    while now < 20.0:
        for push in owner.take(now):
            sent.append(now)
            owner.pushes.answered(push.token, [partition], now)
        now += 0.01
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert max(pauses) > 0.9
    assert 7 < len(sent) < 25


def test_a_restarted_home_gets_everything_anew() -> None:
    owner = Owner([OWNER, HOME, OTHER])
    owner.hold(1)
    owner.bring_up(1.0)
    owner.pushes.renewed(HOME, 10.0)
    assert owner.pushes.lacking() == 1024
    pushes = [push for push in owner.bring_up(10.0) if push.message.sets]
    assert {push.peer_id for push in pushes} == {peer_id_of(HOME)}
    assert owner.pushes.lacking() == 0


def test_all_homes_get_everything_anew_when_the_log_begins_anew() -> None:
    owner = Owner([OWNER, HOME, OTHER])
    owner.bring_up(1.0)
    owner.log.restart(6)
    owner.pushes.voided(10.0)
    assert owner.pushes.lacking() == 2048
    assert {push.message.incarnation for push in owner.bring_up(10.0)} == {6}
    assert owner.pushes.lacking() == 0


def test_who_is_home_no_longer_is_told_for_a_while_yet() -> None:
    members = [OWNER, HOME, OTHER, 44]
    owner = Owner(members)
    owner.bring_up(1.0)
    table = table_of([*members, 55])
    number = next(
        n for n in range(10_000)
        if 55 in table.homes[partition_of(digest_of(n))]
        and OWNER not in owner.pushes.table.homes[partition_of(digest_of(n))]
    )  # fmt: skip
    partition = partition_of(digest_of(number))
    (former,) = set(owner.pushes.table.homes[partition]) - set(table.homes[partition])
    owner.pushes.homes_changed(table, 10.0)
    owner.bring_up(10.0)
    for now, told in ((15.0, True), (15.0 + CONFIG.former_home_seconds, False)):
        owner.hold(number, clock=int(now))
        pushes = [push for push in owner.take(now) if push.message.operations]
        assert (peer_id_of(former) in {push.peer_id for push in pushes}) is told
        for push in pushes:
            owner.pushes.answered(push.token, [], now)
        owner.bring_up(now)


def test_wholes_to_new_homes_go_at_a_bounded_rate() -> None:
    config = PartitionConfig(syncs_per_second=10.0, sync_spread_seconds=0.0, audit_seconds=1e6)
    owner = Owner([OWNER, *range(100, 140)], config=config)
    sent, now = 0, 1.0
    for _ in range(100):
        now += 0.02
        for push in owner.take(now):
            sent += 1
            owner.pushes.answered(push.token, [], now)
    assert 15 <= sent <= 25


def test_audits_go_round_and_name_what_a_home_should_have() -> None:
    owner = Owner([OWNER, HOME, OTHER])
    owner.hold(1)
    owner.bring_up(1.0)
    now, audited = 20.0, []
    while now < 40.0:
        now += 0.02
        for push in owner.take(now):
            if push.message.audit:
                audited.append(push.peer_id)
                entries = {p: (n, h) for p, n, h in AUDIT_ENTRY.iter_unpack(push.message.audit)}
                partition = partition_of(digest_of(1))
                assert len(entries) == 1024
                assert entries[partition] == (1, location_hash(location(1).encode()))
                assert push.message.audit_seconds == 10
            owner.pushes.answered(push.token, [], now)
    assert sorted(map(audited.count, {peer_id_of(HOME), peer_id_of(OTHER)})) in ([3, 3], [4, 4])


def test_what_waits_for_one_home_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_pushes, "MAX_RUNS", 10)
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    for number in range(30):
        owner.hold(number)
    (push,) = owner.take(10.0)
    partitions = {partition_of(digest_of(number)) for number in range(30)}
    told = {
        partition_of(push.message.operations[at : at + 2])
        for at in range(0, len(push.message.operations), 42)
    }
    assert told | {each.partition for each in push.message.sets} == partitions
    assert len(push.message.sequences) <= 10


def test_the_shell_that_loses_an_answer_does_not_end_it() -> None:
    owner = Owner([OWNER, HOME])
    owner.bring_up(1.0)
    owner.hold(1)
    assert len(owner.take(10.0)) == 1
    assert len(owner.take(11.0)) == 1, "once more"
    assert owner.take(11.1) == []
    assert owner.pushes.due() < math.inf
    owner.take(12.0)  # notes that nothing comes any more
    assert any(push.message.sets for push in owner.bring_up(12.0))


def test_the_sets_are_made_when_they_are_needed_and_are_right_whenever_that_is() -> None:
    owner = Owner([OWNER, HOME], keeps=False)
    for number in range(50):
        owner.hold(number)
    for number in range(0, 50, 3):
        owner.release(number)
    assert not owner.pushes.sets.any_made, "nobody keeps partitions"
    for turn in range(2):
        owner.hold(100 + turn)
        partition = partition_of(digest_of(1))
        assert owner.pushes.sets.number(partition) == 1
        assert owner.pushes.sets.pack(partition) == location(1).encode()
        owner.hold(60 + turn)
        owner.release(1 if turn else 2)
        packed = b"".join(owner.pushes.sets.pack(each) for each in range(1024))
        records = {packed[at : at + LOCATION_BYTES] for at in range(0, len(packed), LOCATION_BYTES)}
        whole = owner.log.snapshot()
        assert records == {
            whole[at : at + LOCATION_BYTES] for at in range(0, len(whole), LOCATION_BYTES)
        }
        assert owner.pushes.sets.set_hash(partition) == (
            0 if turn else location_hash(location(1).encode())
        )
        if not turn:
            owner.pushes.sets.forget()


# --- the home --------------------------------------------------------------------------------


def update(**fields: object) -> Push:
    values: dict[str, object] = {"incarnation": 5, "sequences": [], "operations": b""}
    return Push(**(values | fields))  # type: ignore[arg-type]  # by name


def run_of(*numbered: tuple[int, bytes]) -> Push:
    return update(
        sequences=[100 + number for number, _ in numbered],
        operations=b"".join(operation for _, operation in numbered),
        numbers=b"".join(number.to_bytes(4, "little") for number, _ in numbered),
    )


def whole_of(*records: LocationRecord, number: int = 7, sequence: int = 90) -> Push:
    packed = b"".join(record.encode() for record in records)
    total = 0
    for record in records:
        total ^= location_hash(record.encode())
    return update(sets=[PartitionSet(partition_of(packed), number, total, packed)], sequence=sequence)


def test_a_gap_is_seen_and_only_a_whole_partition_mends_it() -> None:
    home = views()
    record, partition = location(1), partition_of(digest_of(1))
    assert take(home, run_of((1, record.encode()))) == []
    assert take(home, run_of((3, location(1, 3).encode()))) == [partition]
    assert take(home, run_of((4, location(1, 4).encode()))) == [partition], "and stays a gap"
    assert [found.record.version.clock for found in home.directory.holders(digest_of(1))] == [1]
    assert take(home, whole_of(location(1, 4), number=4)) == []
    assert [found.record.version.clock for found in home.directory.holders(digest_of(1))] == [4]
    assert take(home, run_of((5, location(1, 5).encode()))) == []
    assert take(home, run_of((5, location(1, 5).encode()))) == [], "said twice"
    assert take(home, whole_of(location(1, 4), number=4)) == [], "comes late"
    assert [found.record.version.clock for found in home.directory.holders(digest_of(1))] == [5]


def test_an_unknown_partition_begins_with_its_first_operation_or_whole() -> None:
    home = views()
    assert take(home, run_of((2, location(1).encode()))) == [partition_of(digest_of(1))]
    assert home.record_count == 0


def test_an_audit_finds_what_is_missing_or_wrong() -> None:
    home, partition = views(), partition_of(digest_of(1))
    right = location_hash(location(1).encode())

    def audit(number: int, set_hash: int) -> list[int]:
        entry = AUDIT_ENTRY.pack(partition, number, set_hash)
        return take(home, update(audit=entry, audit_seconds=10, sequence=95))

    assert audit(7, right) == [partition]
    take(home, whole_of(location(1)))
    assert audit(7, right) == []
    assert audit(6, 0) == [], "it comes late"
    assert audit(8, right) == [partition]
    take(home, whole_of(location(1), number=8))
    assert audit(8, right ^ 1) == [partition]


def test_a_partition_is_vouched_for_when_all_owners_told_of_it_lately() -> None:
    home, partition = views(), partition_of(digest_of(1))
    owners = [(OWNER, 5), (OTHER, 6)]

    def vouches(now: float) -> bool:
        return home.complete(partition, 1, owners, now)

    assert not vouches(0.0)
    take(home, whole_of(location(1)))
    assert not vouches(1.0)
    home.take(OTHER, check_update(update(incarnation=6, sets=[PartitionSet(partition, 0, 0, b"")])), 1.0)
    assert vouches(1.0)
    assert not home.complete(partition, 2, [(OWNER, 6), (OTHER, 6)], 1.0), "it began anew"
    take(home, run_of((99, location(1).encode())))
    assert not vouches(2.0), "something was missed"
    take(home, whole_of(location(1), number=99))
    assert vouches(3.0)
    home.hide(OTHER)
    home.show(OTHER)
    assert not vouches(4.0), "what it said meanwhile may not have come"
    audit = AUDIT_ENTRY.pack(partition, 0, 0)
    home.take(OTHER, check_update(update(incarnation=6, audit=audit, audit_seconds=10)), 5.0)
    assert vouches(6.0)
    assert vouches(5.0 + 24.0)
    assert not vouches(5.0 + 26.0), "nothing was heard for long"


def test_a_restarted_owner_voids_what_it_said_before() -> None:
    home = views()
    take(home, whole_of(location(1)))
    assert home.record_count == 1
    home.take(OWNER, check_update(update(incarnation=6)), 0.0)
    assert home.record_count == 0
    assert take(home, whole_of(location(1))) == [], "from the earlier life"
    assert home.record_count == 0


def test_the_dead_are_hidden_and_then_forgotten() -> None:
    home = views()
    take(home, whole_of(location(1)))
    home.hide(OWNER)
    assert [found.hidden for found in home.directory.holders(digest_of(1))] == [True]
    home.drop(OWNER)
    assert home.directory.holders(digest_of(1)) == []
    assert (home.record_count, home.directory.parts) == (0, {})


def test_partitions_of_others_are_forgotten_after_a_while() -> None:
    home, partition = views(), partition_of(digest_of(1))
    take(home, whole_of(location(1)))
    home.housekeep([partition], 0.0)
    home.housekeep([], 100.0)
    home.housekeep([], 100.0 + 2.9 * CONFIG.former_home_seconds)
    assert home.record_count == 1
    home.housekeep([], 100.0 + 3.1 * CONFIG.former_home_seconds)
    assert (home.record_count, home.directory.parts) == (0, {})


def test_a_full_home_says_so_and_keeps_what_it_has() -> None:
    home = HomeViews(PartitionConfig(), Directory(DirectoryConfig(max_records=200)))
    records = [location(number) for number in range(10_000)]
    by_partition = {partition_of(record.digest): record for record in records}
    full = [p for p, record in by_partition.items() if take(home, run_of((1, record.encode())))]
    assert full
    assert home.record_count == len(by_partition) - len(full) > 0


@pytest.mark.parametrize(
    "nonsense",
    [
        update(sequences=[1], operations=b"short", numbers=bytes(4)),
        update(sequences=[1], operations=bytes(42), numbers=bytes(3)),
        update(sequences=[1, 2], operations=bytes(42), numbers=bytes(4)),
        update(sequences=[-1], operations=bytes(42), numbers=bytes(4)),
        update(incarnation=-1),
        update(incarnation=1 << 62),
        update(sequence=1 << 62),
        update(audit=bytes(13)),
        update(audit=AUDIT_ENTRY.pack(1024, 1, 1)),
        update(audit_seconds=-1),
        update(audit_seconds=100_000),
        update(sets=[PartitionSet(1024, 1, 0, b"")]),
        update(sets=[PartitionSet(-1, 1, 0, b"")]),
        update(sets=[PartitionSet(0, 1 << 32, 0, b"")]),
        update(sets=[PartitionSet(0, -1, 0, b"")]),
        update(sets=[PartitionSet(0, 1, 1, b"")]),
        update(sets=[PartitionSet(1023, 1, location_hash(bytes(42)), bytes(42))]),
    ],
)
def test_nonsense_changes_nothing(nonsense: Push) -> None:
    home = views()
    take(home, whole_of(location(1)))
    with pytest.raises(ProtocolError):
        take(home, nonsense)
    assert packed_view(home, range(3)) == {location(1).encode()}


# --- both ------------------------------------------------------------------------------------

KEYS = 12
events = st.one_of(
    st.tuples(st.sampled_from(["hold", "release"]), st.integers(0, KEYS - 1)),
    st.tuples(
        st.sampled_from(["deliver", "lose", "lose answer", "late", "pass", "restart"]), st.just(0)
    ),
)


@given(st.lists(events, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_home_never_vouches_for_less_than_the_owner_confirmed(history: list[tuple[str, int]]) -> None:
    """Whatever is lost or late, what a home vouches for is the owner's set after some operation, and once
    everything arrives it is what the owner holds."""
    owner, home = Owner([OWNER, HOME]), views()
    hashes: dict[int, list[int]] = {}
    """Each partition's set hash after each of its operations."""
    clock, now = 0, 1.0
    late: list[Push] = []

    def exchange(kind: str) -> None:
        nonlocal home
        for push in owner.take(now):
            if kind == "lose":
                owner.pushes.answered(push.token, None, now)
                late.append(push.message)
                continue
            behind = take(home, push.message, now)
            owner.pushes.answered(push.token, None if kind == "lose answer" else behind, now)

    for kind, number in history:
        now += 0.1
        if kind == "hold":
            clock += 1
            owner.hold(number, clock)
        elif kind == "release":
            owner.release(number)
        elif kind == "late" and late:
            take(home, late.pop(), now)
        elif kind == "restart":
            home = views()
            owner.pushes.renewed(HOME, now)
        elif kind != "pass":
            exchange(kind)
        partition = partition_of(digest_of(number))
        past = hashes.setdefault(partition, [0])
        if owner.pushes.sets.number(partition) == len(past):
            past.append(owner.pushes.sets.set_hash(partition))
        for partition, views_of in home.directory.parts.items():
            view = views_of.get(OWNER)
            if view is not None and not view.diverged:
                assert home.directory.index.hash(view.slot) == hashes.get(partition, [0])[view.number]
    for _ in range(60):
        now += 0.1
        exchange("deliver")
    assert owner.pushes.lacking() == 0
    held = (owner.log.held(digest_of(number)) for number in range(KEYS))
    assert packed_view(home, range(KEYS)) == {packed for packed in held if packed is not None}


def test_a_question_is_answered_once_or_given_up() -> None:
    questions = OpenRequests(GossipConfig())
    ping = questions.ask(peer_id_of(1), ControlKind.PING, Ping(1, []), 0.0)
    fetch = questions.fetch_snapshot(peer_id_of(2), 7, 0, 50.0)
    assert questions.asked(ControlKind.PING) == [peer_id_of(1)]
    assert questions.fetching() == {7}
    questions.give_up_lost(LOST_ANSWER_SECONDS + 1.0)
    assert questions.take(ping.token) is None
    asked = present(questions.take(fetch.token))
    assert asked.member == 7
    assert questions.take(fetch.token) is None
    assert (len(questions), questions.count) == (0, 2)
