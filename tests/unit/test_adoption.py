"""Copies whose writer nobody knows any more become their holder's own, after a while and not before."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.records import writer_of
from p2pstore.objects import Version
from tests.unit.core_harness import Harness, digest_of

LONG_SECONDS: Final = 3_600


def with_unproved_copy() -> Harness:
    """A peer with a copy that another one wrote, without a proof."""
    world = Harness()
    entry = world.stored("k", b"value")
    world.gossip.release(entry.digest, entry.version, world.now)
    foreign = Version(entry.version.clock, world.writer ^ 1, entry.version.root)
    world.segment.renew_version(entry, foreign)
    world.core.proofs.lacks(entry.digest, world.now)
    return world


def tick_for(world: Harness, seconds: int) -> None:
    for _ in range(seconds):
        world.now += 1.0
        world.core.proofs.tick(world.now)


def test_a_copy_that_nobody_proves_is_adopted_with_its_old_stamp() -> None:
    world = with_unproved_copy()
    before = world.find("k")
    assert before is not None
    clock, root = before.version.clock, before.version.root
    tick_for(world, 1)
    assert world.core.counters["copies_adopted"] == 0, "not at once"
    tick_for(world, LONG_SECONDS)
    entry = world.find("k")
    assert entry is not None
    assert world.core.counters["copies_adopted"] == 1
    assert entry.version == Version(clock, writer_of(world.core.peer_id), root)
    assert world.value("k") == b"value"
    announced = world.announced("k")
    assert announced is not None
    assert announced.version == entry.version


def test_what_is_gone_meanwhile_is_not_adopted() -> None:
    world = with_unproved_copy()
    entry = world.find("k")
    assert entry is not None
    world.core.withdraw(entry, world.now)
    tick_for(world, LONG_SECONDS)
    assert world.core.counters["copies_adopted"] == 0
    assert world.gossip.holders(digest_of("k"), world.now) == []
