"""Namespaces with a quota: objects in their own part of memory are evicted for no other namespace."""

import itertools
from collections.abc import Mapping
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pstore.errors import CapacityExceeded, ObjectTooLarge
from p2pstore.memory.areas import MAX_QUOTAS, NO_QUOTAS, Areas, SearchArea
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.policies import DEFAULT_POLICY, PolicyName, make_policy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, TrailerBody, plan_geometry
from p2pstore.objects import chunk_sums
from simulation.segment_checks import check_segment
from tests.stored import stored

ME = "the peer itself"
ONE = GRANULE_BYTES - 200
"""A value that takes one granule with its trailer."""


def new_segment(
    granules: int,
    quotas: Mapping[str, int],
    policy: PolicyName = DEFAULT_POLICY,
    slots: int | None = None,
    caps: Mapping[str, int] = NO_QUOTAS,
) -> Segment:
    """`quotas` in granules."""
    geometry = plan_geometry(granules * GRANULE_BYTES, slots)
    return Segment(
        memoryview(bytearray(geometry.total_bytes)),
        segment_id=b"s" * 16,
        incarnation=3,
        geometry=geometry,
        policy=make_policy(policy),
        quotas={name: size * GRANULE_BYTES for name, size in quotas.items()},
        caps={name: size * GRANULE_BYTES for name, size in caps.items()},
    )


def put(
    segment: Segment,
    namespace: str,
    number: int,
    *,
    granules: int = 1,
    now: float = 100.0,
    soft: bool = False,
    pin: int = 0,
) -> ObjectEntry:
    length = granules * GRANULE_BYTES - 200
    key = f"key {number}"
    value = bytes([number % 256]) * length
    trailer = TrailerBody(namespace, key, chunk_sums(value), pin=pin)
    return stored(segment, trailer, value, clock=number + 1, now=now, soft=soft)


def kept(segment: Segment, namespace: str) -> int:
    """Granules that the namespace has in its own part."""
    return segment.quotas[namespace].kept_bytes // GRANULE_BYTES


def used(segment: Segment, namespace: str) -> int:
    return segment.quotas[namespace].used_bytes // GRANULE_BYTES


def count(segment: Segment, namespace: str) -> int:
    return sum(entry.namespace == namespace for entry in segment.entries())


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_who_floods_evicts_nothing_that_is_kept_for_another(policy: PolicyName) -> None:
    segment = new_segment(20, {"mine": 8}, policy)
    mine = [put(segment, "mine", number, now=1.0) for number in range(8)]
    for number in range(200):
        put(segment, "flood", number, granules=1 + number % 3, now=100.0 + number)
    assert [segment.find(entry.digest, 400.0) for entry in mine] == mine
    assert {entry.namespace for entry in segment.objects.take_withdrawn()} == {"flood"}
    assert (kept(segment, "mine"), used(segment, "mine")) == (8, 8)
    check_segment(segment)


def test_a_quota_is_had_although_another_floods_all_the_time() -> None:
    """It is not enough that no other namespace takes it: a namespace below its quota gets it back."""
    segment = new_segment(20, {"mine": 8})
    for number in range(200):
        put(segment, "flood", number, now=float(number))
    assert segment.free_bytes == 0  # unused quota is lent
    for number in range(200, 400):
        put(segment, "flood", number, now=float(number))
        if number % 20 == 0:
            put(segment, "mine", number, now=float(number))
    assert kept(segment, "mine") == 8
    check_segment(segment)


def test_what_is_above_its_quota_goes_as_everything_else() -> None:
    segment = new_segment(20, {"mine": 4})
    for number in range(12):
        put(segment, "mine", number, now=float(number))
    assert (used(segment, "mine"), kept(segment, "mine")) == (12, 4)
    for number in range(16):
        put(segment, "other", number, now=100.0 + number)
    assert (used(segment, "mine"), count(segment, "other")) == (4, 16)
    for number in range(20, 40):  # at its quota it evicts what is coldest of all it may
        put(segment, "mine", number, now=200.0 + number)
    assert (used(segment, "mine"), kept(segment, "mine")) == (20, 4)
    check_segment(segment)


def test_large_values_have_room_beside_small_ones_that_are_kept() -> None:
    """Were the small ones anywhere in memory, no eight granules in one piece would be free of them."""
    segment = new_segment(32, {"small": 16})
    for number in range(300):
        put(segment, "small", number, now=float(number))
        if number % 5 == 0:
            put(segment, "large", number, granules=8, now=float(number))
    assert count(segment, "large") == 2
    assert kept(segment, "small") == 16


def test_no_room_says_that_a_quota_is_why() -> None:
    segment = new_segment(16, {"mine": 12})
    for number in range(12):
        put(segment, "mine", number)
    put(segment, "other", 0, granules=4, pin=Pin.HARD)
    with pytest.raises(CapacityExceeded, match=r"48\.0 KiB kept for other namespaces \(--quota\)"):
        put(segment, "other", 1)
    with pytest.raises(ObjectTooLarge, match=r"in parts \(--quota\) of 49,152 at most"):
        put(segment, "other", 2, granules=13)
    put(segment, "mine", 12)


def test_what_others_hold_in_a_part_that_is_lent_stays() -> None:
    segment = new_segment(8, {"mine": 8})
    held = put(segment, "other", 0)
    segment.references.acquire(held)
    pinned = put(segment, "other", 1, pin=Pin.HARD)
    for number in range(8):
        put(segment, "mine", number)
    assert segment.find(held.digest, 100.0) is held
    assert segment.find(pinned.digest, 100.0) is pinned
    assert kept(segment, "mine") == 6
    segment.references.let_go(held)
    put(segment, "mine", 8)
    assert kept(segment, "mine") == 7


def test_what_is_lent_is_not_looked_through_for_who_has_no_room_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes long, and a refused put is tried again and again."""
    segment = new_segment(64, {"mine": 64})
    for number in range(32):
        put(segment, "other", number)
        put(segment, "mine", number)
    looked: list[SearchArea] = []
    monkeypatch.setattr(segment.room.victims, "_search_of", looked.append)
    for number in range(20):
        with pytest.raises(CapacityExceeded):
            put(segment, "other", 100 + number, granules=2)
    assert not looked
    put(segment, "other", 200)
    put(segment, "mine", 200, granules=3)


def test_full_slots_are_taken_from_no_quota() -> None:
    segment = new_segment(64, {"mine": 16}, slots=8)
    mine = [put(segment, "mine", number, now=1.0) for number in range(4)]
    for number in range(40):
        put(segment, "flood", number, now=10.0 + number)
    assert [segment.find(entry.digest, 100.0) for entry in mine] == mine


def test_full_slots_do_not_keep_anybody_from_its_quota() -> None:
    segment = new_segment(64, {"mine": 16}, slots=8)
    for number in range(4):
        put(segment, "mine", number, now=1.0)
    for number in range(4, 8):
        put(segment, "other", number, now=10.0 + number)
    for number in range(8, 12):
        put(segment, "mine", number, now=100.0 + number)
    assert (kept(segment, "mine"), count(segment, "other")) == (8, 0)
    put(segment, "mine", 12, now=200.0)  # no other namespace has one
    assert kept(segment, "mine") == 8


def test_a_whole_memory_of_quotas_has_nothing_for_others_in_the_end() -> None:
    segment = new_segment(8, {"mine": 4, "yours": 4})
    put(segment, "other", 0)
    for number in range(4):
        put(segment, "mine", number)
        put(segment, "yours", number)
    assert count(segment, "other") == 0
    with pytest.raises(CapacityExceeded, match="kept for other namespaces"):
        put(segment, "other", 1)


def test_quotas_are_no_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="2 quotas"):
        Areas(8 * GRANULE_BYTES, GRANULE_BYTES, {"a": 4 * GRANULE_BYTES, "b": 4 * GRANULE_BYTES + 1})
    with pytest.raises(ValueError, match="quotas"):
        many = {str(number): 1 for number in range(MAX_QUOTAS + 1)}
        Areas(1024 * GRANULE_BYTES, GRANULE_BYTES, many)


def test_the_coldest_are_the_same_share_of_each_part() -> None:
    """They are written to an SSD before their room is needed: whatever the sizes, as much of each namespace's."""
    segment = new_segment(32, {"mine": 16})
    for number in range(4):
        put(segment, "mine", number, granules=4, now=float(number))
    for number in range(16):
        put(segment, "other", number, now=float(number))
    named = [(entry.namespace, entry.key) for entry in segment.room.coldest()]
    for part in range(4):
        quarter = named[5 * part : 5 * part + 5]
        keys = [f"key {number}" for number in range(4 * part, 4 * part + 4)]
        wanted = [("mine", f"key {part}"), *(("other", key) for key in keys)]
        assert sorted(quarter) == sorted(wanted)
    soft = put(segment, "mine", 9, soft=True, now=50.0)
    assert next(segment.room.coldest()) is soft


NAMESPACES = ("first", "second", "none", "nobody")


class QuotasAgainstModel(RuleBasedStateMachine):
    """The model knows only which namespace asked, and what was there before it did."""

    @initialize(
        quotas=st.dictionaries(st.sampled_from(["first", "second"]), st.integers(1, 10), min_size=1),
        shared=st.integers(0, 12),
        slots=st.integers(6, 40),
        policy=st.sampled_from(get_args(PolicyName)),
    )
    def create(self, quotas: dict[str, int], shared: int, slots: int, policy: PolicyName) -> None:
        granules = max(4, sum(quotas.values()) + shared)
        self.segment = new_segment(granules, quotas, policy, slots)
        self.shared_bytes = (granules - sum(quotas.values())) * GRANULE_BYTES
        self.quotas = quotas
        self.begins = dict(
            zip(
                quotas,
                itertools.accumulate(
                    (n * GRANULE_BYTES for n in quotas.values()), initial=self.shared_bytes
                ),
                strict=False,
            )
        )
        self.now = 1000.0
        self.numbers = itertools.count()
        self.held: list[ObjectEntry] = []

    def is_kept(self, entry: ObjectEntry) -> bool:
        """Whether it lies in its namespace's own part: known from where parts begin, and nothing else."""
        begin = self.begins.get(entry.namespace)
        if begin is None:
            return False
        offset = entry.offset - self.segment.geometry.data_offset
        return begin <= offset < begin + self.quotas[entry.namespace] * GRANULE_BYTES

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        granules=st.sampled_from([1, 1, 1, 2, 3, 7]),
        soft=st.booleans(),
        pin=st.sampled_from([0, 0, 0, 0, 1, 2]),
    )
    def put(self, namespace: str, granules: int, soft: bool, pin: int) -> None:
        self.now += 1.0
        before = self.segment.entries()
        can_be_kept = self.has_own_room(namespace, before)
        try:
            entry = put(
                self.segment,
                namespace,
                next(self.numbers),
                granules=granules,
                now=self.now,
                soft=soft,
                pin=pin,
            )
        except (CapacityExceeded, ObjectTooLarge):
            entry = None
        gone = self.segment.objects.take_withdrawn()
        assert not [each for each in gone if self.is_kept(each) and each.namespace != namespace]
        if can_be_kept and granules == 1:
            assert entry is not None
            assert self.is_kept(entry)
            assert not [each for each in gone if each.namespace == namespace and self.is_kept(each)]

    @rule(namespace=st.sampled_from(NAMESPACES), granules=st.sampled_from([1, 2, 7]))
    def make_room_ahead(self, namespace: str, granules: int) -> None:
        length = granules * GRANULE_BYTES - 200
        self.segment.room.make_ahead(length, 100, now=self.now, namespace=namespace)
        gone = self.segment.objects.take_withdrawn()
        assert not [each for each in gone if self.is_kept(each) and each.namespace != namespace]

    def has_own_room(self, namespace: str, before: list[ObjectEntry]) -> bool:
        """Whether the namespace's own part has a granule that is free, or that another namespace can give up."""
        begin = self.begins.get(namespace)
        slots_left = self.segment.geometry.slots - len(self.segment.objects.held)
        if begin is None or not slots_left:
            return False
        end = begin + self.quotas[namespace] * GRANULE_BYTES
        stays = 0
        for entry in {id(each): each for each in before + self.held}.values():
            offset = entry.offset - self.segment.geometry.data_offset
            movable = entry.namespace != namespace and not entry.references and entry.pin != Pin.HARD
            if begin <= offset < end and not movable:
                stays += entry.extent_bytes
        return stays < end - begin

    @precondition(lambda self: self.segment.object_count)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entries = sorted(self.segment.entries(), key=lambda entry: entry.slot)
        self.segment.remove(data.draw(st.sampled_from(entries)).digest)

    @precondition(lambda self: self.segment.object_count)
    @rule(data=st.data(), what=st.sampled_from(["read", "hold", "unpin", "written"]))
    def use(self, data: st.DataObject, what: str) -> None:
        entries = sorted(self.segment.entries(), key=lambda entry: entry.slot)
        entry = data.draw(st.sampled_from(entries))
        if what == "read":
            self.segment.objects.used(entry, 1, self.now)
        elif what == "hold":
            self.segment.references.acquire(entry)
            self.held.append(entry)
        elif what == "unpin":
            self.segment.objects.set_pin(entry, Pin.NONE, 0.0)
        else:
            self.segment.objects.set_on_ssd(entry, True)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.segment.references.let_go(self.held.pop(0))

    @invariant()
    def agrees(self) -> None:
        check_segment(self.segment)
        for namespace, quota in self.quotas.items():
            mine = [each for each in self.segment.entries() if each.namespace == namespace]
            use = self.segment.quotas[namespace]
            assert use.quota_bytes == quota * GRANULE_BYTES
            assert use.used_bytes == sum(each.extent_bytes for each in mine)
            assert use.kept_bytes == sum(each.extent_bytes for each in mine if self.is_kept(each))


TestQuotasAgainstModel = QuotasAgainstModel.TestCase
TestQuotasAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    sizes=st.lists(st.integers(1, 5), max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=30),
)
def test_parts_cover_everything_and_sums_are_right(
    sizes: list[int], asked: list[tuple[int, int]]
) -> None:
    quotas = {str(number): size * GRANULE_BYTES for number, size in enumerate(sizes)}
    areas = Areas(24 * GRANULE_BYTES, GRANULE_BYTES, quotas)
    taken = []
    for namespace, granules in asked:
        extent = areas.take(granules * GRANULE_BYTES, areas.searches(str(namespace))[-1])
        if extent is not None:
            assert areas.at(extent).allocator.size_of(extent) == granules * GRANULE_BYTES
            areas.shrink(extent, GRANULE_BYTES)
            taken.append(extent)
    assert areas.used_bytes == len(taken) * GRANULE_BYTES
    for extent in taken:
        areas.free(extent)
    assert (areas.used_bytes, areas.free_bytes) == (0, 24 * GRANULE_BYTES)


def test_a_capped_namespace_takes_no_more_than_its_quota() -> None:
    """It makes room among its own, and what is free elsewhere is not for it."""
    segment = new_segment(16, {"a": 3, "b": 2}, caps={"a": 3})
    of_b = [put(segment, "b", number) for number in range(2)]
    for number in range(10, 20):
        put(segment, "a", number)
        assert segment.quotas["a"].used_bytes <= 3 * GRANULE_BYTES
    assert segment.quotas["a"].used_bytes == 3 * GRANULE_BYTES
    assert segment.quotas["b"].used_bytes == 2 * GRANULE_BYTES
    assert [segment.find(entry.digest, 100.0) for entry in of_b] == of_b
    with pytest.raises(CapacityExceeded):
        put(segment, "a", 30, granules=4)


def test_others_use_what_a_capped_namespace_leaves_free_and_give_way() -> None:
    segment = new_segment(4, {"a": 2}, caps={"a": 2})
    for number in range(4):
        put(segment, "others", number)
    assert segment.used_bytes == 4 * GRANULE_BYTES
    put(segment, "a", 10)
    put(segment, "a", 11)
    assert segment.quotas["a"].kept_bytes == 2 * GRANULE_BYTES


def test_a_cap_above_the_quota_is_the_most_wherever_it_lies() -> None:
    segment = new_segment(16, {"a": 3, "b": 2}, caps={"a": 5})
    for number in range(5):
        put(segment, "a", number)
    use = segment.quotas["a"]
    assert (use.kept_bytes, use.used_bytes) == (3 * GRANULE_BYTES, 5 * GRANULE_BYTES)
    for number in range(5, 40):
        put(segment, "a", number, granules=1 + number % 3)
        assert segment.quotas["a"].used_bytes <= 5 * GRANULE_BYTES
    for number in range(100, 116):
        put(segment, "others", number)
    assert segment.quotas["a"].kept_bytes == segment.quotas["a"].used_bytes
    check_segment(segment)


def test_a_value_larger_than_the_quota_makes_room_outside_of_it() -> None:
    segment = new_segment(16, {"a": 2}, caps={"a": 8})
    for number in range(8):
        put(segment, "a", number)
    put(segment, "a", 20, granules=6)
    assert segment.quotas["a"].used_bytes <= 8 * GRANULE_BYTES
    check_segment(segment)


def test_no_room_within_the_cap_says_so() -> None:
    segment = new_segment(16, {"a": 2}, caps={"a": 3})
    kept = [put(segment, "a", number) for number in range(3)]
    for entry in kept:
        segment.leases.lease(entry, session="view", now=100.0)
    with pytest.raises(CapacityExceeded, match=r"12\.0 KiB of the 12\.0 KiB .* \(--cap\)"):
        put(segment, "a", 4)
    with pytest.raises(CapacityExceeded, match=r"--cap"):
        put(segment, "a", 5, granules=4)
    put(segment, "others", 6)
