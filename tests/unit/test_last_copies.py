"""Objects that other peers keep are evicted before last copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.eviction import KNOWN_SECONDS
from tests.unit.core_harness import Harness, Other, digest_of

VALUE = bytes(20_000)


def announced_by(world: Harness, other: Other, entry: ObjectEntry, *, soft: bool = False) -> None:
    """The other has a copy of the same version, too."""
    thing = world.hold(other, entry.key, VALUE, entry.version.clock, entry.version.writer)
    if soft:
        world.push(other, thing, soft=True)


def fill(world: Harness) -> list[ObjectEntry]:
    """As many objects as there is room for; the first one is the coldest."""
    entries: list[ObjectEntry] = []
    while world.segment.free_bytes > 2 * len(VALUE):
        entries.append(world.stored(f"k{len(entries)}", VALUE))
        world.pass_time(0.01)
    return entries


def evicted(world: Harness, entries: list[ObjectEntry]) -> set[str]:
    """Which of them go when room is needed for a few more."""
    for number in range(3):
        world.stored(f"new{number}", VALUE)
    return {entry.key for entry in entries if world.find(entry.key) is None}


def first_in_order(world: Harness, key: str) -> Other:
    """Another peer that comes before this one in rendezvous order."""
    digest = digest_of(key)
    mine = weight(world.core.member, digest)
    able = [each for each in world.others[:-1] if weight(each.member, digest) > mine]
    return able[0]  # the last of the others may be needed to tell of a death


def test_the_coldest_goes_first_where_all_are_alone() -> None:
    world = Harness(others=8)
    entries = fill(world)
    assert "k0" in evicted(world, entries)


def test_what_another_peer_keeps_goes_before_colder_last_copies() -> None:
    world = Harness(others=8)
    entries = fill(world)
    kept = {"k2", "k4", "k5"}
    for entry in entries:
        if entry.key in kept:
            announced_by(world, first_in_order(world, entry.key), entry)
    gone = evicted(world, entries)
    assert gone
    assert gone <= kept
    assert world.core.counters["gone_copy_elsewhere"] == len(gone)
    assert world.core.counters["gone_last_copy"] == 0


def test_one_of_two_holders_keeps_its_copy() -> None:
    """Each sees the other's copy: if both relied on it, there would be none."""
    world = Harness(others=8)
    entries = fill(world)
    for entry in entries[1:4]:
        digest = digest_of(entry.key)
        mine = weight(world.core.member, digest)
        for other in world.others:
            if weight(other.member, digest) < mine:
                announced_by(world, other, entry)
    assert "k0" in evicted(world, entries)


@pytest.mark.parametrize("how", ["dead", "soft"])
def test_copies_that_may_be_gone_do_not_count(how: str) -> None:
    world = Harness(others=8)
    entries = fill(world)
    for entry in entries[1:4]:
        other = first_in_order(world, entry.key)
        announced_by(world, other, entry, soft=how == "soft")
        if how == "dead":
            world.die(other)
    assert "k0" in evicted(world, entries)


def test_who_keeps_an_object_is_not_asked_each_time() -> None:
    world = Harness(others=1)
    entry = world.stored("k", VALUE)
    asked: list[str] = []

    def ask(weighed: Sequence[ObjectEntry], now: float) -> list[bool]:
        asked.extend(entry.key for entry in weighed)
        return [False] * len(weighed)

    world.segment.room.ask_who_keeps(ask)
    order = world.segment.objects.order
    unix = world.core.unix(world.now)
    order.cost_at(entry.offset, unix)
    order.cost_at(entry.offset, unix + 1)
    assert asked == ["k"]
    order.cost_at(entry.offset, unix + KNOWN_SECONDS)
    assert asked == ["k", "k"]
