"""Plans that a client makes by itself of what it was told before."""

import sys
import threading
import time
from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from p2pstore.client.known_holders import (
    DISTRUST_SECONDS,
    HOLDERS_PER_PLAN,
    MAX_HOLDERS,
    TRUSTED_SECONDS,
    KnownHolders,
    KnownRecord,
    MappedLocations,
)
from p2pstore.client.read_plan import remote_copy
from p2pstore.local.local_messages import Holder, PlanItem
from p2pstore.location_table import LOCATION
from p2pstore.objects import Version
from tests.present import present

DIGEST = bytes(16)


class Table(MappedLocations):
    """Knows what it is told."""

    def __init__(self, *records: KnownRecord) -> None:
        self.records: list[KnownRecord] | None = list(records)

    def holders(self, digest: bytes) -> list[KnownRecord] | None:
        return self.records

    def only_record(self, digest: bytes) -> tuple[int, bytes] | None:
        if not self.records or len(self.records) > 1:
            return None
        (only,) = self.records
        size = only.size_units.to_bytes(3, "little")
        return only.member, LOCATION.pack(digest, *only.version, only.slot, size, only.tier)

    def only_members(self, digests: bytes) -> list[int]:
        alone = self.records[0].member if self.records and len(self.records) == 1 else 0
        return [alone] * (len(digests) // len(DIGEST))


def record(member: int, clock: int = 5, slot: int = 3) -> KnownRecord:
    return KnownRecord(member, Version(clock, member, 77), slot, 7, 0)


def copy(member: int) -> KnownRecord:
    """Records of one version."""
    return KnownRecord(member, Version(5, 1, 77), member, 7, 0)


def holder(member: int, *, same_host: bool = False) -> Holder:
    return Holder(member, b"id", "name", ["127.0.0.1:1"], "", same_host, 9, 9, 9, 9, 1, b"c", b"s", b"k")


def known(*records: KnownRecord, named: int = 20) -> KnownHolders:
    found = KnownHolders(Table(*records), Random(1))
    found.note([PlanItem([holder(member) for member in range(1, named + 1)])])
    return found


def planned(holders: KnownHolders) -> list[int] | None:
    plan = holders.plan(DIGEST)
    return None if plan is None else [each.member for each in plan.holders]


def test_the_record_says_where_the_plan_how() -> None:
    plan = present(known(record(1)).plan(DIGEST))
    (found,) = plan.holders
    assert (found.slot, found.size_units, found.clock, found.writer, found.tier) == (3, 7, 5, 1, 0)
    assert (found.data, found.ticket_claims) == (["127.0.0.1:1"], b"c")


def test_what_the_peer_reads_faster_it_is_asked_about() -> None:
    found = KnownHolders(Table(record(1)), Random(1))  # 7 units of 4 KiB
    for from_bytes, direct in ((0, True), (7 * 4096 + 1, True), (7 * 4096, False), (1, False)):
        found.note([PlanItem([replace(holder(1), through_peer_bytes=from_bytes)])])
        assert (found.plan(DIGEST) is not None) == direct
        assert (found.only_holder(DIGEST) is not None) == direct
        assert (found.only_holder(DIGEST, 1) is not None) == direct
        assert (found.only_holder(DIGEST, 8 * 4096) is not None) == (from_bytes == 0)
        assert (found.only_many([DIGEST]) != [None]) == (from_bytes == 0)  # no sizes are known
        assert (found.only_many([DIGEST], 7 * 4096) != [None]) == direct


def test_only_the_newest_version_counts() -> None:
    assert planned(known(record(1, 5), record(2, 6), record(3, 4))) == [2]


def test_nobody_known_or_nobody_named_is_asked() -> None:
    table = Table()
    assert planned(KnownHolders(table, Random(1))) is None
    table.records = None
    assert planned(KnownHolders(table, Random(1))) is None
    assert planned(KnownHolders(None, Random(1))) is None
    assert planned(known(copy(1), copy(30))) is None  # it may be the better one


def test_readers_spread_and_this_host_comes_first() -> None:
    holders = known(*[copy(member) for member in range(1, 13)])
    firsts = Counter((planned(holders) or [0])[0] for _ in range(400))
    assert set(firsts) == set(range(1, 13))
    assert len(planned(holders) or []) == HOLDERS_PER_PLAN
    holders = known(copy(1), copy(2))
    holders.note([PlanItem([holder(2, same_host=True)])])
    assert all(planned(holders) == [2, 1] for _ in range(20))


def test_the_only_holder_on_another_host_is_known_with_the_way_to_it() -> None:
    holders = known(record(1))
    only = present(holders.only_holder(DIGEST))
    assert (only.copy.member, only.copy.data) == (1, ("127.0.0.1:1",))
    assert (only.slot_hint, only.expected_bytes) == (3, 7 * 4096)
    assert only.is_far
    assert holders.only_many([DIGEST, DIGEST]) == [only.copy, only.copy]


@pytest.mark.parametrize(
    "holders",
    [
        pytest.param(known(copy(1), copy(2)), id="there are two"),
        pytest.param(known(), id="there is none"),
        pytest.param(known(record(30)), id="nobody said how to get there"),
        pytest.param(KnownHolders(None, Random(1)), id="there is no table"),
    ],
)
def test_otherwise_there_is_no_only_holder(holders: KnownHolders) -> None:
    assert holders.only_holder(DIGEST) is None
    assert holders.only_many([DIGEST]) == [None]


def test_on_this_host_the_only_holder_is_known() -> None:
    holders = KnownHolders(Table(record(1)), Random(1))
    holders.note([PlanItem([holder(1, same_host=True)])])
    only = present(holders.only_holder(DIGEST))
    assert not only.is_far
    assert holders.only_many([DIGEST]) == [only.copy]
    assert planned(holders) == [1]


def test_a_holder_named_for_what_is_on_its_ssd_is_read_in_its_memory_otherwise() -> None:
    holders = KnownHolders(Table(record(1)), Random(1))
    named = holder(1, same_host=True)  # tier 1, on the SSD alone
    holders.note([PlanItem([named])])
    plan = present(holders.plan(DIGEST))
    assert not remote_copy(plan.holders[0]).on_ssd
    assert remote_copy(named).on_ssd, "nobody finds it in that memory"


def test_an_only_holder_that_did_not_deliver_is_asked_about() -> None:
    holders = known(record(1))
    holders.forget([1])
    assert holders.only_holder(DIGEST) is None
    assert holders.only_many([DIGEST]) == [None]


def test_what_was_said_is_trusted_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    holders, now = known(record(1)), time.monotonic()
    monkeypatch.setattr(
        "p2pstore.client.known_holders.time.monotonic", lambda: now + TRUSTED_SECONDS - 1
    )
    assert planned(holders) == [1]
    monkeypatch.setattr(
        "p2pstore.client.known_holders.time.monotonic", lambda: now + TRUSTED_SECONDS + 1
    )
    assert planned(holders) is None


def test_who_did_not_deliver_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    holders, now = known(record(1)), time.monotonic()
    holders.forget([1])
    holders.note([PlanItem([holder(1)])])
    assert planned(holders) is None
    monkeypatch.setattr(
        "p2pstore.client.known_holders.time.monotonic", lambda: now + DISTRUST_SECONDS + 1
    )
    assert planned(holders) == [1]
    holders.forget([2])
    assert list(holders._distrusted_until) == [2]


def test_threads_may_note_and_forget_at_once() -> None:
    holders, failures = known(record(1)), []

    def change(seed: int) -> None:
        rng = Random(seed)
        try:
            for _ in range(2_000):
                holders.forget([rng.randrange(50)])
                holders.note([PlanItem([holder(rng.randrange(3_000))])])
                holders.plan(DIGEST)
        except RuntimeError as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=change, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_as_many_are_remembered_as_there_is_room_for() -> None:
    holders = known(record(1), named=MAX_HOLDERS + 5)
    assert len(holders._routes) == MAX_HOLDERS
    assert planned(holders) is None
