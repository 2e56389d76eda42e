"""The places of a read: each tried once, in order, until one delivers or nothing is left."""

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.client.read_plan import (
    FIRST_PLACES,
    PLANS,
    SSD,
    OwnPlan,
    ReadPlace,
    ReadPlan,
    blamed,
    groups_by_holder,
    has_ways,
    is_far,
    places_of,
    remote_copy,
    version_of,
    way_to,
)
from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.local.local_messages import OWN_COPY, Holder, ItemError, PlanItem
from p2pstore.objects import SIZE_UNIT_BYTES, Announced
from p2pstore.transfer.data_messages import Keeps
from p2pstore.transfer.failover import HolderReport, SilentHolders
from p2pstore.transfer.transport import SLICED_BYTES, PullReport
from p2pstore.wire import Code

OF_A_PLAN: Final = {ReadPlace.UNDER_LEASE, ReadPlace.THROUGH_PEER, ReadPlace.HOLDERS}
CODES: Final = (Code.NO_SUCH_KEY, Code.STALE, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.BUSY)


def holder(member: int, **facts: object) -> Holder:
    plain: dict[str, object] = {
        "peer_id": bytes([member]),
        "member": member,
        "name": f"p{member}",
        "data": [f"10.0.0.{member}:1"],
        "socket": "",
        "same_host": False,
        "slot": 0,
        "size_units": 1,
        "clock": 1,
        "writer": member,
        "tier": 0,
        "ticket_claims": b"",
        "ticket_signature": b"",
        "ticket_secret": b"",
    }
    return Holder(**(plain | facts))  # type: ignore[arg-type]


def report(*members: int, code: Code = Code.UNAVAILABLE, keep: bool = False) -> PullReport:
    reports = tuple(HolderReport(each, code, "no", "tcp", keep=keep) for each in members)
    error = NoSuchKey("gone") if code is Code.NO_SUCH_KEY else Unavailable("not reached")
    return PullReport(None, None, reports, error)


holders = st.lists(
    st.builds(
        holder,
        st.integers(1, 5),
        same_host=st.booleans(),
        data=st.sampled_from([[], ["10.0.0.1:1"]]),
        tier=st.sampled_from([0, SSD]),
        size_units=st.sampled_from([1, SLICED_BYTES // SIZE_UNIT_BYTES]),
    ),
    max_size=3,
    unique_by=lambda each: each.member,
)
items = st.builds(
    PlanItem,
    holders,
    local=st.booleans(),
    through_peer=st.booleans(),
    error=st.sampled_from([ItemError(), ItemError(), ItemError(int(Code.NO_SUCH_KEY), "unknown")]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.booleans())
def test_a_read_ends_and_tries_each_place_once(data: st.DataObject, hot: bool) -> None:
    silent = SilentHolders()
    plan = ReadPlan("k", FIRST_PLACES, silent, hot=hot)
    tried: list[ReadPlace] = []
    plans = 0
    failed: set[int] = set()
    while (place := plan.next()) is not None:
        if place is ReadPlace.PLAN:
            plans += 1
            assert set(plan.failed_members) >= failed
            plan.planned(data.draw(items))
            tried = [each for each in tried if each not in OF_A_PLAN]
            continue
        assert place not in tried
        tried.append(place)
        match place:
            case ReadPlace.OWN_PLAN if data.draw(st.booleans()):
                plan.planned(OwnPlan(data.draw(holders.filter(bool))))
            case ReadPlace.HOLDERS:
                asked = [each.member for each in plan.holders]
                assert asked
                own = plan.is_own
                told = report(
                    *asked, code=data.draw(st.sampled_from(CODES)), keep=data.draw(st.booleans())
                )
                plan.failed(told)
                failed |= {each.member for each in blamed(told, own=own)}
            case ReadPlace.UNDER_LEASE if data.draw(st.booleans()):
                plan.spoilt()
                failed.add(OWN_COPY)
    assert plans <= PLANS
    assert tried.count(ReadPlace.KEPT) <= 1
    assert plan.next() is None


@given(items)
def test_the_places_of_an_answer(item: PlanItem) -> None:
    places = places_of(item)
    assert places
    if item.local:
        assert places == (ReadPlace.UNDER_LEASE,)
    else:
        assert (ReadPlace.THROUGH_PEER in places) == item.through_peer
        assert (ReadPlace.HOLDERS in places) == (not item.through_peer or has_ways(item))


def test_a_hot_object_is_kept_by_the_local_peer_and_asked_for_again_when_that_fails() -> None:
    plan = ReadPlan("k")
    assert plan.next() is ReadPlace.PLAN
    plan.planned(PlanItem([holder(1), holder(2)]))
    assert plan.next() is ReadPlace.HOLDERS
    assert plan.keeps is None
    plan.failed(report(1, 2, code=Code.BUSY, keep=True))
    assert plan.next() is ReadPlace.KEPT
    assert plan.next() is ReadPlace.PLAN
    assert plan.failed_members == []  # they are well
    plan.planned(PlanItem([holder(1)]))
    assert plan.next() is ReadPlace.HOLDERS
    assert plan.keeps is Keeps.NO


def test_what_a_batch_found_hot_is_brought_by_the_local_peer_before_holders_are_asked() -> None:
    plan = ReadPlan("k", hot=True)
    plan.planned(PlanItem([holder(1)]))
    assert plan.next() is ReadPlace.KEPT
    assert plan.next() is ReadPlace.HOLDERS
    assert plan.keeps is Keeps.NO


def test_an_own_plan_counts_for_none_of_the_local_peer() -> None:
    plan = ReadPlan("k", (ReadPlace.OWN_PLAN,))
    assert plan.is_own
    assert plan.next() is ReadPlace.OWN_PLAN
    plan.planned(OwnPlan([holder(1)]))
    assert plan.is_own
    assert plan.next() is ReadPlace.HOLDERS
    for _ in range(PLANS):
        plan.failed(report(1))
        assert plan.next() is ReadPlace.PLAN
        plan.planned(PlanItem([holder(1)]))
        assert not plan.is_own
        assert plan.next() is ReadPlace.HOLDERS
    assert plan.next() is None


def test_a_copy_here_is_read_whatever_else_went_wrong() -> None:
    plan = ReadPlan("k")
    assert plan.next() is ReadPlace.PLAN
    plan.planned(PlanItem([], local=True, error=ItemError(int(Code.NO_SUCH_KEY), "unknown")))
    assert plan.next() is ReadPlace.UNDER_LEASE


def test_only_where_no_other_way_is_left_the_local_peer_s_failure_ends_the_read() -> None:
    plan = ReadPlan("k")
    assert plan.has_other_ways
    plan.planned(PlanItem([holder(1)], through_peer=True))
    assert plan.has_other_ways
    plan.planned(PlanItem([holder(1, data=[])], through_peer=True))
    assert not plan.has_other_ways


def test_a_holder_that_did_not_answer_is_passed_over_and_the_first_error_stays() -> None:
    plan = ReadPlan("k")
    plan.failed(report(1, code=Code.DEADLINE_EXCEEDED))
    error = plan.error
    assert plan.next() is ReadPlace.PLAN
    plan.planned(PlanItem([holder(1)]))
    assert plan.next() is None
    assert plan.error is error


@pytest.mark.parametrize("code", CODES)
def test_of_holders_that_it_chose_itself_the_client_reports_only_what_is_theirs(code: Code) -> None:
    failed = report(1, code=code)
    assert blamed(failed, own=False) == list(failed.failures)
    of_the_holder = code in (Code.NO_SUCH_KEY, Code.STALE, Code.DEADLINE_EXCEEDED)
    assert blamed(failed, own=True) == list(failed.failures) * of_the_holder
    assert blamed(report(1, code=code, keep=True), own=False) == []


def test_a_way_to_a_holder_is_an_address_or_a_socket() -> None:
    assert has_ways(PlanItem([holder(1, data=[]), holder(2)]))
    assert has_ways(PlanItem([holder(1, data=[], socket="/s")]))
    assert not has_ways(PlanItem([holder(1, data=[])]))
    far = remote_copy(holder(1, clock=7, tier=SSD))
    assert is_far(far)
    assert (far.on_ssd, far.length_bytes) == (True, SIZE_UNIT_BYTES)
    named = replace(holder(1, clock=7, size_units=3), member=0x3_0007)
    assert remote_copy(named).announced == Announced(7, version_of(PlanItem([named])))
    assert way_to(named).announced == Announced(7)
    assert remote_copy(named).length_bytes == 3 * SIZE_UNIT_BYTES
    assert not is_far(remote_copy(holder(1, data=[])))
    assert not is_far(remote_copy(holder(1, same_host=True)))
    way = way_to(holder(1, clock=7, tier=SSD))
    assert not way.on_ssd, "to whatever is in memory there"
    assert version_of(PlanItem([holder(1, clock=7), holder(2, clock=9)])).clock == 7


def test_an_unknown_key_ends_the_read() -> None:
    plan = ReadPlan("k")
    assert plan.next() is ReadPlace.PLAN
    plan.planned(PlanItem([], error=ItemError(int(Code.NO_SUCH_KEY), "unknown")))
    assert plan.next() is None
    assert isinstance(plan.error, NoSuchKey)
    assert "'k'" in str(plan.error)


def test_holders_that_could_not_be_reached_outweigh_an_unknown_key() -> None:
    plan = ReadPlan("k")
    plan.failed(report(1))
    assert plan.next() is ReadPlace.PLAN
    plan.planned(PlanItem([], error=ItemError(int(Code.NO_SUCH_KEY), "unknown")))
    assert plan.next() is None
    assert isinstance(plan.error, Unavailable)


@pytest.mark.parametrize("own", [False, True])
def test_silent_holders_are_not_asked_again(own: bool) -> None:
    silent = SilentHolders()
    silent.add(1, has_alternatives=False)
    plan = ReadPlan("k", silent=silent)
    plan.planned((OwnPlan if own else PlanItem)([holder(1)]))
    if own:
        assert plan.next() is ReadPlace.PLAN
        plan.planned(PlanItem([holder(1)]))
    assert plan.next() is None
    assert isinstance(plan.error, Unavailable)


def test_a_plan_that_was_asked_for_with_others_counts() -> None:
    plan = ReadPlan("k")
    plan.planned(PlanItem([holder(1)]))
    assert plan.next() is ReadPlace.HOLDERS
    plan.failed(report(1))
    assert plan.next() is ReadPlace.PLAN
    assert plan.failed_members == [1]
    plan.planned(PlanItem([holder(2)]))
    assert plan.next() is ReadPlace.HOLDERS
    plan.failed(report(2))
    assert plan.next() is None
    assert isinstance(plan.error, Unavailable)


@given(st.lists(items))
def test_groups_are_of_one_holder_each(plans: list[PlanItem]) -> None:
    by_number = dict(enumerate(plans))
    groups = groups_by_holder(by_number)
    numbers = [number for group in groups for number in group.numbers]
    assert sorted(numbers) == [
        number
        for number, item in by_number.items()
        if item.holders
        and not item.through_peer
        and (
            item.holders[0].tier != SSD
            if item.holders[0].same_host
            else item.holders[0].size_units * SIZE_UNIT_BYTES < SLICED_BYTES
        )
    ]
    for group in groups:
        for number in group.numbers:
            first, *others = by_number[number].holders
            assert first.member == group.holder.member
            assert bool(others) == bool(group.others)
