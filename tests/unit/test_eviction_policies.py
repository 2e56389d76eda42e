"""The order of eviction of each policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import get_args

import pytest

from p2pstore.memory.entries import EntryList, ObjectEntry, unlink
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.policies import PolicyName, make_policy
from p2pstore.memory.policies.interface import MAX_FORGOTTEN, MIN_GHOSTS, Ghosts
from p2pstore.memory.policies.prefix import MAX_CREDITS, PrefixAware
from p2pstore.memory.policies.s3_fifo import MAX_PROMOTED
from p2pstore.memory.segment_layout import Pin, SlotState
from p2pstore.trace.one_cache import BlockCache
from tests.unit.eviction_entries import entry

POLICIES: Sequence[PolicyName] = get_args(PolicyName)


def numbers(order: EvictionOrder) -> list[int]:
    return [each.slot for each in order.coldest()]


def admit(
    order: EvictionOrder, number: int, now: float, follows: ObjectEntry | None = None, bytes_: int = 4096
) -> ObjectEntry:
    made = entry(number, now=now, bytes_=bytes_)
    order.follow(made, follows)
    order.admit([made], now)
    return made


def chain(order: EvictionOrder, first: int, count: int, now: float) -> list[ObjectEntry]:
    made: list[ObjectEntry] = []
    for number in range(first, first + count):
        made.append(admit(order, number, now, made[-1] if made else None))
    return made


def evict(order: EvictionOrder) -> int:
    coldest = next(order.coldest())
    order.gone(coldest, evicted=True)
    return coldest.slot


# --- all of them -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_go_before_policies(policy: PolicyName) -> None:
    order = EvictionOrder(make_policy(policy))
    pinned = entry(1)
    pinned.pin = Pin.SOFT
    order.admit([pinned], 0)
    admit(order, 2, now=1)
    order.admit([entry(3, now=2, soft=True)], 2)
    assert numbers(order) == [3, 2, 1]
    costs = [order.cost_at(number << 32, 10.0) for number in (3, 2, 1)]
    assert all(cost is not None and cost > 0 for cost in costs)
    assert costs == sorted(costs, key=lambda cost: cost or 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_keeps_its_place_and_what_is_leased_comes_back_last(policy: PolicyName) -> None:
    order = EvictionOrder(make_policy(policy))
    held, leased, _ = (admit(order, number, now=number) for number in range(3))
    order.hold(held)
    assert order.cost_at(held.offset, 5.0) is None
    leased.references = 1
    order.discard(leased)
    assert numbers(order) == [0, 2]
    order.read(leased, 1, 5.0)
    leased.references = 0
    order.update(leased)
    order.put_back(held)
    assert numbers(order) == [0, 2, 1]
    assert order.evictable_bytes() == 3 * 4096


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_withdrawn_is_not_remembered_as_evicted(policy: PolicyName) -> None:
    order = EvictionOrder(make_policy(policy))
    order.gone(admit(order, 1, now=0), evicted=False)
    assert admit(order, 1, now=100).standing == 0


# --- S3-FIFO -----------------------------------------------------------------------------------


def test_s3_lets_new_objects_go_first_unless_they_were_read_twice() -> None:
    order = EvictionOrder(make_policy("s3-fifo"))
    for number in range(20):
        made = admit(order, number, now=number)
        if number < 15:
            order.read(made, 2, number)
    assert evict(order) == 15, "those before it were read"
    assert numbers(order)[:4] == [16, 17, 18, 19]
    for _ in range(3):  # until a tenth of it is new
        evict(order)
    assert evict(order) == 0, "the oldest of the main queue"


def test_s3_takes_what_comes_back_soon_into_the_main_queue() -> None:
    order = EvictionOrder(make_policy("s3-fifo"))
    for number in range(10):
        admit(order, number, now=number)
    assert evict(order) == 0
    admit(order, 0, now=10)
    assert [evict(order) for _ in range(10)][-1] == 0


def test_s3_reads_give_another_round_in_the_main_queue_each() -> None:
    order = EvictionOrder(make_policy("s3-fifo"))
    entries = [admit(order, number, now=number) for number in range(4)]
    for each in entries:
        order.read(each, 2, 5.0)
    next(order.coldest())  # all are promoted
    order.read(entries[0], 2, 6.0)
    order.read(entries[1], 1, 6.0)
    assert [evict(order) for _ in range(4)] == [2, 3, 1, 0]


def test_s3_takes_bounded_steps_where_everything_was_read() -> None:
    order = EvictionOrder(make_policy("s3-fifo"))
    for number in range(2 * MAX_PROMOTED):
        order.read(admit(order, number, now=number), 2, number)
    assert evict(order) == MAX_PROMOTED, "those before it moved, this one would have been next"
    order.gone(*order.at(5 << 32), evicted=False)
    assert len(numbers(order)) == 2 * MAX_PROMOTED - 2


def test_s3_measures_its_queues_in_bytes() -> None:
    order = EvictionOrder(make_policy("s3-fifo"))
    large = admit(order, 0, now=0, bytes_=1 << 20)
    order.read(large, 2, 0)
    for number in range(1, 20):
        admit(order, number, now=number)
    next(order.coldest())  # the large one joins the main queue
    assert numbers(order)[0] == 0, "nineteen small ones are less than a tenth of it"


# --- chains ------------------------------------------------------------------------------------


def test_chains_go_from_their_tails() -> None:
    order = EvictionOrder(make_policy("prefix"))
    chain(order, 0, 4, now=0)
    chain(order, 10, 3, now=5)
    assert numbers(order) == [3, 2, 1, 0, 12, 11, 10]


def test_a_chain_that_is_read_again_goes_from_its_tail_too() -> None:
    order = EvictionOrder(make_policy("prefix"))
    first, second = chain(order, 0, 4, now=0), chain(order, 10, 3, now=5)
    for each in (*first, *second[:1]):
        order.read(each, 1, 100.0)
    assert numbers(order) == [12, 11, 3, 2, 1, 0, 10]


def test_who_reads_a_tail_keeps_the_head() -> None:
    """An engine that has the head in its own memory asks for the rest only."""
    order = EvictionOrder(make_policy("prefix"))
    blocks = chain(order, 0, 5, now=0)
    chain(order, 10, 2, now=5)
    for each in blocks[3:]:
        order.read(each, 1, 100.0)
    assert numbers(order) == [11, 10, 4, 3, 2, 1, 0]


def test_a_head_that_is_leased_is_raised_with_its_tail() -> None:
    order = EvictionOrder(make_policy("prefix"))
    head, tail = chain(order, 0, 2, now=0)
    head.references = 1
    order.discard(head)
    chain(order, 10, 2, now=5)
    order.read(tail, 1, 100.0)
    head.references = 0
    order.update(head)
    assert numbers(order) == [11, 10, 1, 0]


def test_a_block_whose_head_is_gone_stands_alone() -> None:
    order = EvictionOrder(make_policy("prefix"))
    head, tail = chain(order, 0, 2, now=0)
    order.gone(head, evicted=False)
    head.state = SlotState.FREE
    order.read(tail, 1, 100.0)
    assert tail.follows is None
    order.gone(tail, evicted=True)
    assert numbers(order) == []


def test_a_block_that_others_build_on_costs_more() -> None:
    order = EvictionOrder(make_policy("prefix"))
    head, tail = chain(order, 0, 2, now=0)
    first, last = order.cost_at(head.offset, 9.0), order.cost_at(tail.offset, 9.0)
    assert first is not None
    assert last is not None
    assert first > last
    order.gone(tail, evicted=True)
    assert order.cost_at(head.offset, 9.0) == last


# --- what is read again ----------------------------------------------------------------------


def test_what_is_read_again_stays_for_one_typical_gap_longer() -> None:
    policy = PrefixAware()
    order = EvictionOrder(policy)
    first = admit(order, 0, now=0)
    order.read(first, 1, 100.0)
    assert policy.gap_seconds == pytest.approx(100.0)
    for number in range(1, 31):
        admit(order, number, now=100.0 + 10 * number)
    assert numbers(order).index(0) in (9, 10), "as if it was used at 200"


def test_reads_at_once_are_one_read() -> None:
    order = EvictionOrder(make_policy("prefix"))
    block = admit(order, 0, now=0)
    for _ in range(8):
        order.read(block, 3, 0.5)
    assert block.standing == 0
    order.read(block, 5, 50.0)
    assert block.standing == 1
    for now in (100.0, 150.0, 200.0, 250.0):
        order.read(block, 1, now)
    assert block.standing == MAX_CREDITS


def test_what_comes_back_after_it_was_evicted_has_more_credit() -> None:
    policy = PrefixAware()
    order = EvictionOrder(policy)
    admit(order, 0, now=0)
    assert evict(order) == 0
    assert admit(order, 0, now=60.0).standing == 1
    assert policy.gap_seconds == pytest.approx(60.0)


def test_a_clock_that_steps_back_does_no_harm() -> None:
    policy = PrefixAware()
    order = EvictionOrder(policy)
    block = admit(order, 0, now=1000.0)
    order.read(block, 1, 900.0)
    assert policy.gap_seconds == 0
    cost = order.cost_at(0, 800.0)
    assert cost is not None
    assert cost > 0


def test_ghosts_are_bounded() -> None:
    ghosts = Ghosts(least=10)
    for number in range(100):
        ghosts.add([entry(number)], live=20)
    assert len(ghosts) == 20
    assert ghosts.take([entry(79)]) == []
    assert [row[1:] for row in ghosts.take([entry(80)])] == [(0, 0.0)]
    assert len(ghosts) == 19
    for number in range(200, 210):
        ghosts.add([entry(number)], live=0)
    assert len(ghosts) == 10
    for number in range(1000):
        ghosts.add([entry(number)], live=1000)
    ghosts.add([entry(1000)], live=0)
    assert len(ghosts) == 1001 - MAX_FORGOTTEN, "not all at once"
    assert MIN_GHOSTS == 65_536


def test_a_few_very_long_gaps_do_not_make_the_typical_gap() -> None:
    policy = PrefixAware()
    order = EvictionOrder(policy)
    now = 0.0
    for number in range(1000):
        gap = 100_000.0 if number % 10 == 9 else 10.0
        block = admit(order, 0, now)
        order.read(block, 1, now + gap)
        order.gone(block, evicted=False)
        now += gap
    assert 10 < policy.gap_seconds < 50, "their mean is 10,009"


def test_what_is_new_has_some_room_for_itself() -> None:
    order = EvictionOrder(make_policy("prefix"))
    for number in range(95):
        order.read(admit(order, number, now=0), 1, 1000.0)
    for number in range(100, 104):
        admit(order, number, now=number)
    assert numbers(order)[0] == 0, "four of 99 are less than a tenth"
    for number in range(104, 112):
        admit(order, number, now=number)
    assert numbers(order)[0] == 100


def test_what_is_new_does_not_take_the_room_of_what_it_builds_on() -> None:
    """A conversation goes on: its new blocks follow those that were read again. With it go others, all older."""
    order = EvictionOrder(make_policy("prefix"))
    head = admit(order, 0, now=0)
    order.read(head, 1, 1000.0)
    admit(order, 1, 1000.0, follows=head)
    for number in range(2, 50):
        order.read(admit(order, number, now=500.0), 1, 1500.0)
    assert numbers(order)[:2] == [1, 0]


def requests_for_popular_objects(objects: int, count: int, bursts: bool) -> list[tuple[float, int]]:
    """Zipf's law; every other request is for a new object that is read eight times within a second and never again."""
    rng = Random(1)
    weights = list(accumulate(1 / (rank + 1) for rank in range(objects)))
    popular = rng.choices(range(objects), cum_weights=weights, k=count)
    if not bursts:
        return [(number / 20, block) for number, block in enumerate(popular)]
    return [
        (number / 20, block if number % 2 else objects + number // 16)
        for number, block in enumerate(popular)
    ]


@pytest.mark.parametrize("bursts", [False, True])
def test_popular_objects_stay(bursts: bool) -> None:
    hits: dict[str, int] = {}
    for policy in POLICIES:
        cache = BlockCache(make_policy(policy), 400)
        hits[policy] = 0
        for now, block in requests_for_popular_objects(4000, 40_000, bursts):
            if block in cache:
                hits[policy] += 1
                cache.read(block, now)
            else:
                cache.put(block, now)
    assert hits["prefix"] > hits["lru"]
    assert hits["prefix"] > 0.95 * hits["s3-fifo"]


def test_it_holds_the_order_and_the_bytes_that_a_list_would() -> None:
    rng = Random(1)
    entries = [entry(number, bytes_=1 + number % 7) for number in range(40)]
    linked, model = EntryList(), list[int]()
    for _ in range(5000):
        number = rng.randrange(len(entries))
        if number in model:
            model.remove(number)
            unlink(entries[number])
            assert entries[number].within is None
        elif model and rng.random() < 0.5:
            place = rng.randrange(len(model))
            linked.insert_before(entries[number], entries[model[place]])
            model.insert(place, number)
        else:
            linked.append(entries[number])
            model.append(number)
        assert [each.slot for each in linked] == model
        assert linked.bytes == sum(entries[each].extent_bytes for each in model)
        assert all(entries[each].within is linked for each in model)


def test_an_entry_among_others_is_told_by_itself() -> None:
    linked = EntryList()
    entries = [entry(number) for number in range(3)]
    for each in entries:
        linked.append(each)
    assert "slot=1" in repr(entries[1])
    assert "slot=2" not in repr(entries[1])


def test_a_long_chain_is_freed_without_deep_recursion() -> None:
    order = EvictionOrder(make_policy("prefix"))
    made = [entry(number) for number in range(100_000)]
    for before, block in pairwise(made):
        order.follow(block, before)
    order.admit(made, 1.0)
    del made, before, block
    del order  # an interpreter without a stack left does not come back
