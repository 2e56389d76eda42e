"""Memory of an earlier life: its objects are held back, sorted by floors, checked, and published again."""

from collections.abc import Sequence

from p2pstore.core.copies.earlier_life import BATCHES_UNDER_WAY, OBJECTS_PER_BATCH
from p2pstore.core.operation import CheckReturned
from p2pstore.core.remove import RemoveOperation
from p2pstore.gossip.records import SCOPE_NAMESPACE
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.kept_memory import Kept, KeptObject
from p2pstore.memory.segment_layout import SlotState, decode_slot, decode_trailer
from p2pstore.objects import KIB, namespace_digest
from simulation.segment_checks import check_segment
from tests.unit.core_harness import NAMESPACE, Harness, digest_of

VALUE = b"v" * 3_000


def next_life(before: Harness, others: int = 0) -> Harness:
    """The peer is killed; its memory is there, and nothing else."""
    objects = []
    for entry in before.segment.entries():
        slot = decode_slot(before.segment.table.slot_bytes(entry))
        trailer = decode_trailer(before.segment.table.trailer_bytes(entry))
        assert slot is not None
        assert trailer is not None
        objects.append(KeptObject(entry.slot, slot, trailer, is_viewed=False))
    world = Harness(
        others,
        memory_bytes=before.segment.data_bytes,
        new_memory=lambda _: before.memory,
        kept=Kept(1, objects),
    )
    world.core.earlier_life.return_with_memory(world.now)
    return world


def first_life(*keys: str, memory_bytes: int = 256 * KIB) -> Harness:
    world = Harness(memory_bytes=memory_bytes)
    for key in keys:
        world.stored(key, VALUE)
    return world


def checked(world: Harness, damaged: Sequence[str] = ()) -> list[str]:
    """Answer what was asked to be checked; the keys, in their order."""
    keys = []
    for effect in world.effects(CheckReturned):
        keys += [entry.key for entry in effect.entries]
        whole = [entry.key not in damaged for entry in effect.entries]
        world.core.earlier_life.returned_checked(effect.entries, whole, world.now)
    return keys


def test_objects_are_shown_and_announced_when_they_were_checked() -> None:
    world = next_life(first_life("a", "b", "c"))
    assert world.value("a") is None
    world.pass_time(0.0)
    assert world.value("a") is None
    assert world.announced("a") is None
    assert checked(world, damaged=["b"]) == ["a", "b", "c"], "the oldest first"
    assert world.value("a") == VALUE
    assert world.announced("a") is not None
    assert world.value("b") is None
    assert world.announced("b") is None
    assert world.core.counters["kept_objects_returned"] == 2
    assert world.core.counters["kept_objects_damaged"] == 1
    assert world.core.counters["kept_bytes_returned"] == 2 * len(VALUE)
    assert world.core.counters["kept_bytes_damaged"] == len(VALUE)
    assert len(world.segment.returned) == 0
    check_segment(world.segment)
    world.check_idle()


def test_they_come_back_some_at_a_time() -> None:
    keys = [f"k{number:03}" for number in range(3 * OBJECTS_PER_BATCH + 1)]
    world = next_life(first_life(*keys, memory_bytes=2048 * KIB))
    seen: list[str] = []
    while len(world.segment.returned):
        world.pass_time(0.0)
        effects = world.effects(CheckReturned)
        assert 1 <= len(effects) <= BATCHES_UNDER_WAY
        for effect in effects:
            assert len(effect.entries) <= OBJECTS_PER_BATCH
            seen += [entry.key for entry in effect.entries]
            world.core.earlier_life.returned_checked(
                effect.entries, [True] * len(effect.entries), world.now
            )
    assert seen == keys
    assert all(world.value(key) == VALUE for key in keys)


def test_nothing_is_looked_at_before_floors_were_compared() -> None:
    world = next_life(first_life("a"), others=1)
    world.pass_time(0.2)
    assert not world.core.gossip.floors.synchronised
    assert world.effects(CheckReturned) == []
    world.core.gossip.floors.synchronised = True
    world.pass_time(0.2)
    assert checked(world) == ["a"]


def test_a_floor_that_comes_while_an_object_is_checked_counts() -> None:
    world = next_life(first_life("removed", "flushed", "kept"))
    world.pass_time(0.0)
    (effect,) = world.effects(CheckReturned)
    above = world.core.version_above(effect.entries[0].version, world.now)
    world.core.floors.write(digest_of("removed"), above, world.now)
    assert effect.entries[0].state is SlotState.FREE, "at once: its floor may be dropped again"
    world.core.earlier_life.returned_checked(effect.entries, [True] * 3, world.now)
    assert [world.value(key) for key in ("removed", "kept")] == [None, VALUE]

    world = next_life(first_life("flushed"))
    world.pass_time(0.0)
    (effect,) = world.effects(CheckReturned)
    namespace = namespace_digest(NAMESPACE)
    above = world.core.version_above(effect.entries[0].version, world.now)
    world.core.floors.write(namespace, above, world.now, scope=SCOPE_NAMESPACE)
    world.core.earlier_life.returned_checked(effect.entries, [True], world.now)
    assert world.value("flushed") is None
    assert world.core.counters["kept_objects_discarded"] == 1
    check_segment(world.segment)


def test_what_is_removed_before_it_is_shown_does_not_come_back() -> None:
    world = next_life(first_life("k"))
    operation = RemoveOperation(world.core, NAMESPACE, ["k", "never there"])
    world.start(operation)
    world.pass_time(0.1)
    assert operation.result == [True, False]
    checked(world)
    assert world.value("k") is None
    assert len(world.segment.returned) == 0


def test_what_gave_way_to_others_meanwhile_is_passed_over() -> None:
    world = next_life(first_life("a", "b"))
    world.pass_time(0.0)
    (effect,) = world.effects(CheckReturned)
    gone: ObjectEntry = effect.entries[0]
    world.segment.returned.drop(gone)
    world.core.earlier_life.returned_checked(effect.entries, [True, True], world.now)
    assert [world.value(key) for key in "ab"] == [None, VALUE]
    check_segment(world.segment)


def test_floors_are_not_taken_for_seen_while_anything_is_held_back() -> None:
    world = next_life(first_life("a"))
    before = dict(world.core.earlier_life.seen_to_save)
    world.pass_time(0.0)
    world.core.gossip.floors.seen[7] = 99
    assert world.core.earlier_life.seen_to_save == before
    checked(world)
    assert world.core.earlier_life.seen_to_save[7] == 99
