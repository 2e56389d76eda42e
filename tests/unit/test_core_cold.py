"""A core and its SSD: objects are written before memory needs their room, announced, and brought back."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from p2pstore.core.copies.write_back import LOOKED_AT
from p2pstore.core.gets.fetch_operation import AT_ONCE, BEGUN_PER_STEP, MAX_QUEUED
from p2pstore.core.gets.key_pages import ListOperation, is_known, known_keys
from p2pstore.core.operation import (
    ColdObject,
    ColdSorted,
    InSteps,
    LoadObject,
    PullObject,
    PullOutcome,
    WriteObject,
)
from p2pstore.core.serving import listed_here, reply_of
from p2pstore.errors import CapacityExceeded, NoSuchKey, Unavailable
from p2pstore.gossip.records import SCOPE_NAMESPACE, Tier, decode_location
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import KIB, Version, namespace_digest
from p2pstore.put_facts import PutOptions, PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import (
    ExpiryItem,
    ExpirySet,
    Keys,
    ListKeys,
    Lookup,
    Proofs,
    Prove,
    Replicate,
    Replicated,
    SetExpiry,
)
from p2pstore.wire import Code, Failure
from simulation.segment_checks import check_segment
from tests.present import present
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import NAMESPACE, Harness, digest_of

VALUE = b"v" * 9_000

# --- to the SSD ------------------------------------------------------------------------------


def test_nothing_is_written_while_memory_has_room() -> None:
    world = ColdWorld()
    world.stored("k", VALUE)
    world.pass_time(1.0)
    assert not world.effects(WriteObject)


def test_the_coldest_is_written_first_and_used_objects_last() -> None:
    world = ColdWorld(memory_bytes=256 * 1024)
    for number in range(12):
        world.stored(f"k{number}", VALUE + bytes([number]))
    used = present(world.find("k0"))
    world.segment.objects.used(used, 1, world.core.unix(world.now))
    for number in range(12, 20):
        world.stored(f"k{number}", VALUE + bytes([number]))
    world.pass_time(0.1)
    written = world.write()
    assert written[0] == "k1"
    assert "k0" not in written
    assert world.announced("k1") is not None
    assert world.announced("k1").tier is Tier.DRAM  # type: ignore[union-attr]  # it is not None


def test_the_coldest_quarter_is_written_however_many_objects_that_are() -> None:
    count = 6 * LOOKED_AT
    world = ColdWorld(memory_bytes=count * 16 * KIB)
    for number in range(count):
        world.stored(f"k{number}", bytes(12 * KIB))
    for _ in range(100):
        world.pass_time(0.05)
        world.write()
    assert len(world.store.objects) == pytest.approx(count / 4, rel=0.1)
    check_segment(world.segment)


def test_what_is_being_written_is_not_evicted_and_little_is_at_a_time() -> None:
    world = ColdWorld(memory_bytes=256 * 1024)
    for number in range(20):
        world.stored(f"k{number}", VALUE)
    world.pass_time(0.1)
    effects = world.effects(WriteObject)
    assert 0 < sum(effect.entry.extent_bytes for effect in effects) <= 256 * 1024 // 8 + 12 * 1024
    for number in range(40):
        world.stored(f"n{number}", VALUE)
    assert all(world.find(effect.entry.key) is effect.entry for effect in effects)
    for effect in effects:
        world.core.write_back.ended(effect.entry, False, 60.0, world.now)
    world.check_idle()


def test_an_evicted_object_is_announced_as_on_the_ssd() -> None:
    world = ColdWorld()
    record = world.cool("k", VALUE, replicas=2)
    assert (record.tier, record.replicas) == (Tier.SSD, 2)
    (copy,) = world.core.copies.known(digest_of("k"), world.now)
    assert copy.local
    assert copy.record == record
    assert is_known(world.core, digest_of("k"), world.now)
    assert known_keys(world.core, [digest_of("k"), digest_of("x")], world.now) == {digest_of("k")}


def test_what_the_ssd_does_not_take_is_lost_when_it_is_evicted() -> None:
    world = ColdWorld()
    world.stored("k", VALUE)
    for number in range(30):
        world.stored(f"n{number}", VALUE)
        world.pass_time(0.05)
        world.write(accept=False)
    assert world.find("k") is None
    assert world.announced("k") is None
    assert world.core.counters["last_copies_dropped"] == world.core.counters["objects_withdrawn"] > 0


def test_what_others_have_and_what_the_ssd_took_are_no_last_copies() -> None:
    world = ColdWorld(others=1)
    world.cool("k", VALUE)
    before = world.core.counters["last_copies_dropped"]
    version = world.stored("both", VALUE).version
    world.hold(world.others[0], "both", VALUE, version.clock, version.writer)
    for number in range(30):
        world.stored(f"m{number}", VALUE)
        world.pass_time(0.05)
        world.write(accept=True)
    assert world.find("both") is None
    assert world.core.counters["last_copies_dropped"] == before


def test_a_refused_object_is_offered_again_later() -> None:
    world = ColdWorld()
    for number in range(20):
        world.stored(f"k{number}", VALUE)
    world.pass_time(0.1)
    refused = world.write(accept=False, retry_seconds=5.0)
    world.core.write_back.memory_taken(world.now)
    world.pass_time(1.0)
    assert not set(refused) & set(world.write(accept=False))
    world.pass_time(5.0)
    world.core.write_back.memory_taken(world.now)
    world.pass_time(0.1)
    assert set(refused) & set(world.write())


def test_soft_copies_are_not_written() -> None:
    world = ColdWorld(others=1)
    thing = world.hold(world.others[0], "soft", VALUE)
    world.core.operations.fetch(digest_of("soft"), world.now)
    world.deliver(world.pull_wanted(), thing)
    for number in range(30):
        world.stored(f"k{number}", VALUE)
        world.pass_time(0.05)
        assert "soft" not in world.write()


def test_what_is_removed_while_it_is_written_does_not_stay_on_the_ssd() -> None:
    world = ColdWorld(others=1)
    for number in range(20):
        world.stored(f"k{number}", VALUE)
    world.pass_time(0.1)
    world._effects += world.core.take_effects()
    world.learn_floor(world.others[0], digest_of("k0"), world.soon)
    assert digest_of("k0") in world.store.discarded, (
        "what reached the disk by now must not come back after a crash"
    )
    assert "k0" in world.write()
    assert digest_of("k0") not in world.store.objects
    world.check_idle()


# --- and back --------------------------------------------------------------------------------


def test_a_fetch_loads_from_the_ssd_and_asks_nobody() -> None:
    world = ColdWorld(others=2)
    world.cool("k", VALUE)
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    again = world.core.operations.fetch(digest_of("k"), world.now)
    assert again is operation
    assert world.load() == ["k"]
    entry = world.find("k")
    assert operation.result is entry
    assert entry is not None
    assert (entry.soft, entry.on_ssd) == (False, True)
    assert world.value("k") == VALUE
    assert not world.effects(PullObject)
    record = present(world.announced("k"))
    assert record.tier is Tier.BOTH


def test_a_load_that_fails_goes_on_at_another_holder() -> None:
    world = ColdWorld(others=2)
    world.cool("k", VALUE)
    cold = world.store.objects[digest_of("k")]
    thing = world.hold(world.others[0], "k", VALUE, cold.entry.version.clock, cold.entry.version.writer)
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    world.load(fail=True)
    entry = world.deliver(world.pull_wanted(), thing)
    assert operation.result is entry is world.find("k")


def test_a_load_without_room_says_so() -> None:
    world = ColdWorld()
    world.cool("k", VALUE)
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    error = CapacityExceeded("no room")
    world.load(error=error)
    assert operation.result is error


def test_a_load_for_another_peer_asks_nobody_when_it_fails() -> None:
    world = ColdWorld(others=2)
    world.cool("k", VALUE)
    cold = world.store.objects[digest_of("k")].entry.version
    world.hold(world.others[0], "k", VALUE, cold.clock, cold.writer)
    operation = world.core.operations.fetch(digest_of("k"), world.now, only_here=True)
    world.load(fail=True)
    assert isinstance(operation.result, NoSuchKey)
    assert not world.effects(PullObject)


def test_an_ssd_that_hangs_is_said_and_its_peer_is_not_doubted() -> None:
    world = ColdWorld()
    world.cool("k", VALUE)
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    (effect,) = world.effects(LoadObject)
    own = HolderReport(world.core.member, int(Code.DEADLINE_EXCEEDED), "the SSD did not answer")
    world.core.operations.pulled(effect.operation, PullOutcome(False, (own,)), world.now)
    assert isinstance(operation.result, Unavailable)
    assert "the SSD did not answer" in str(operation.result)
    assert world.core.counters["holder_failures"] == 0
    assert is_known(world.core, digest_of("k"), world.now)


def test_who_wants_it_from_anywhere_may_join_a_load_for_another_peer() -> None:
    world = ColdWorld(others=2)
    world.cool("k", VALUE)
    cold = world.store.objects[digest_of("k")].entry.version
    thing = world.hold(world.others[0], "k", VALUE, cold.clock, cold.writer)
    operation = world.core.operations.fetch(digest_of("k"), world.now, only_here=True)
    assert world.core.operations.fetch(digest_of("k"), world.now) is operation
    world.load(fail=True)
    assert world.deliver(world.pull_wanted(), thing) is operation.result


def test_a_pass_over_cold_objects_does_not_push_out_what_is_used() -> None:
    world = ColdWorld(memory_bytes=512 * 1024)
    names = [f"cold{number}" for number in range(30)]
    for name in names:
        world.cool(name, VALUE + name.encode())
    for number in range(10):
        entry = world.stored(f"hot{number}", VALUE)
        world.segment.objects.used(entry, 3, world.core.unix(world.now))
    for name in names:
        world.core.operations.fetch(digest_of(name), world.now)
        assert world.load() == [name]
        entry_of_it = present(world.find(name))
        world.segment.objects.used(entry_of_it, 1, world.core.unix(world.now))
        world.pass_time(0.01)
        world.write()
    assert all(world.find(f"hot{number}") for number in range(10))


# --- other peers -----------------------------------------------------------------------------


def test_others_hear_of_it_and_may_count_on_it() -> None:
    world = ColdWorld(others=1)
    record = world.cool("k", VALUE)
    found = world.serve(world.others[0], DataKind.LOOKUP, Lookup(digest_of("k")))
    assert found.items[0][0].record == record.encode()
    version = record.version
    request = Replicate(digest_of("k"), version.clock, version.writer, len(VALUE))
    assert world.serve(world.others[0], DataKind.REPLICATE, request) == Replicated(
        version.clock, version.writer
    )
    assert not world.effects(LoadObject)


@pytest.mark.parametrize("comes", [True, False])
def test_what_does_not_come_from_the_ssd_is_not_denied(comes: bool) -> None:
    world = ColdWorld(others=1)
    world.cool("k", VALUE)
    answer = world.serve(world.others[0], DataKind.PROVE, Prove(digest_of("k")))
    world.load(**({} if comes else {"fail": True}))
    reply = reply_of(answer)
    assert isinstance(reply, Proofs if comes else Failure)
    denied = world.serve(world.others[0], DataKind.PROVE, Prove(digest_of("absent")))
    assert reply_of(denied) == Proofs([b""])


def test_a_newer_version_elsewhere_ends_an_older_one_on_the_ssd() -> None:
    world = ColdWorld(others=1)
    world.cool("k", VALUE)
    world.core.gossip.directory.watched.watch(frozenset([digest_of("k")]), frozenset())
    world.hold(world.others[0], "k", b"newer", world.soon.clock)
    world.core.gossip_arrived(world.now)
    assert digest_of("k") not in world.store.objects
    assert world.announced("k") is None


# --- the end of objects ----------------------------------------------------------------------


def test_a_floor_ends_it() -> None:
    world = ColdWorld(others=1)
    record = world.cool("k", VALUE)
    older = Version(record.version.clock - 1, 0)
    world.learn_floor(world.others[0], digest_of("k"), older)
    assert world.core.cold.find(digest_of("k"), world.now) is not None
    world.learn_floor(world.others[0], digest_of("k"), world.soon)
    assert world.core.cold.find(digest_of("k"), world.now) is None
    assert digest_of("k") not in world.store.objects
    assert world.announced("k") is None


@pytest.mark.slow
def test_the_floor_of_a_namespace_ends_all_in_steps_and_hides_them_at_once() -> None:
    world = ColdWorld(others=1)
    names = [f"k{number}" for number in range(80)]
    world.cool_all({name: name.encode() * 1000 for name in names})
    world.learn_floor(world.others[0], namespace_digest(NAMESPACE), world.soon, SCOPE_NAMESPACE)
    assert not any(world.core.cold.find(digest_of(name), world.now) for name in names)
    assert world.store.objects, "all at once would hold the loop"
    world.pass_time(0.5)
    assert not world.store.objects
    assert not any(world.announced(name) for name in names)
    world.check_idle()


def test_it_expires() -> None:
    world = ColdWorld()
    world.cool("k", VALUE, ttl_seconds=30.0)
    world.pass_time(40.0)
    assert world.core.cold.find(digest_of("k"), world.now) is None
    assert world.announced("k") is None
    assert digest_of("k") not in world.store.objects


def test_an_object_that_comes_and_goes_is_timed_once() -> None:
    world = ColdWorld()
    world.cool("k", VALUE, ttl_seconds=1000.0)
    for number in range(3):
        world.core.operations.fetch(digest_of("k"), world.now)
        world.load()
        for filler in range(100):
            world.fill(5_000 + 100 * number + filler, 1, len(VALUE))
        assert world.find("k") is None
    assert len(world.core.cold._expiring) == 1
    world.pass_time(1100.0)
    assert world.announced("k") is None
    assert not world.core.cold._expiring


def test_what_the_tier_loses_is_withdrawn_unless_memory_has_it() -> None:
    world = ColdWorld()
    world.cool("gone", VALUE)
    world.cool("here", VALUE + b"x")
    world.core.operations.fetch(digest_of("here"), world.now)
    world.load()
    lost = [world.store.objects.pop(digest_of(name)).entry for name in ("gone", "here")]
    world.core.cold.lost(lost, world.now)
    assert world.announced("gone") is None
    entry = present(world.find("here"))
    assert not entry.on_ssd
    assert world.announced("here") is not None


def test_spoilt_memory_leaves_the_copy_on_the_ssd() -> None:
    world = ColdWorld()
    world.cool("k", VALUE)
    world.core.operations.fetch(digest_of("k"), world.now)
    world.load()
    entry = present(world.find("k"))
    world.core.objects.drop_spoilt(entry, world.now)
    record = present(world.announced("k"))
    assert record.tier is Tier.SSD


# --- puts ------------------------------------------------------------------------------------


def test_what_leaves_memory_is_kept_on_the_ssd_as_firmly_as_it_was_last() -> None:
    """It was written while it was pinned, and before three copies were asked for."""
    world = ColdWorld()
    world.cool("k", VALUE)
    world.store.set_care(
        digest_of("k"), world.store.objects[digest_of("k")].entry.version, pin=1, replicas=1, soft=False
    )
    world.core.operations.fetch(digest_of("k"), world.now)
    world.load()
    entry = present(world.find("k"))
    assert (entry.on_ssd, entry.pin, entry.replicas) == (True, Pin.SOFT, 1)
    world.core.objects.set_pin(entry, Pin.NONE, 0.0, world.now)
    world.core.objects.strengthen(entry, 0, 3, world.now)
    world.cool_again("k")
    held = present(world.gossip.log.held(digest_of("k")))
    record = decode_location(held)
    assert (record.tier, record.pin, record.replicas) == (Tier.SSD, 0, 3)
    world.core.operations.fetch(digest_of("k"), world.now)
    world.load()
    back = present(world.find("k"))
    assert (back.pin, back.replicas) == (Pin.NONE, 3)


def test_the_same_bytes_come_back_to_memory_until_the_object_ends() -> None:
    world = ColdWorld()
    ends = int((world.core.unix(world.now) + 60) * 1000)
    world.cool("k", VALUE, ttl_seconds=60.0)
    put = world.put("k", VALUE, pin=1)
    assert put.result.status is PutStatus.UNCHANGED
    entry = present(world.find("k"))
    assert (entry.expires_unix_ms, entry.pin, entry.soft) == (ends, 1, False)


@pytest.mark.parametrize(("before", "after"), [(0.0, 500.0), (60.0, 500.0), (1000.0, 60.0)])
def test_the_ttl_of_a_second_put_is_that_of_the_copy_on_the_ssd_too(before: float, after: float) -> None:
    world = ColdWorld()
    world.cool("k", VALUE, ttl_seconds=before)
    put = world.put("k", VALUE, ttl_seconds=after)
    world.core.tick(world.now)
    assert put.result.status is PutStatus.UNCHANGED
    ends = int((world.core.unix(world.now) + after) * 1000)
    entry = present(world.find("k"))
    assert (entry.on_ssd, entry.expires_unix_ms) == (True, ends)
    world.cool_again("k")
    cold = present(world.core.cold.find(digest_of("k"), world.now))
    assert cold.expires_unix_ms == ends
    world.pass_time(after - 20.0)
    assert world.announced("k") is not None, "the end that it had before counts no more"
    world.pass_time(30.0)
    assert world.announced("k") is None
    assert digest_of("k") not in world.store.objects


def test_a_holder_sets_the_end_of_what_is_on_its_ssd_alone() -> None:
    world = ColdWorld(others=1)
    record = world.cool("k", VALUE, ttl_seconds=60.0)
    ends = int(world.core.unix(world.now) * 1000) + 500_000
    item = ExpiryItem(digest_of("k"), record.version.clock, record.version.writer, ends)
    request = SetExpiry([item])
    assert world.serve(world.others[0], DataKind.SET_EXPIRY, request) == ExpirySet(b"\1")
    cold = present(world.core.cold.find(digest_of("k"), world.now))
    assert cold.expires_unix_ms == ends
    world.pass_time(100.0)
    assert world.announced("k") is not None


def test_without_its_bytes_the_same_value_takes_over_no_pin() -> None:
    """Asked for more than it is, what is on the SSD alone needs its bytes in memory."""
    world = ColdWorld()
    world.cool("k", VALUE)
    same = world.put("k", VALUE).facts
    for options in (PutOptions(pin=1), PutOptions(ttl_ms=5000), PutOptions(replicas=2)):
        world.cool_again("k")
        put = world.operation(replace(same, reservation=0, options=options))
        world.start(put)
        assert put.done
        assert put.result is None


def test_the_same_bytes_come_back_to_memory() -> None:
    world = ColdWorld()
    record = world.cool("k", VALUE)
    put = world.put("k", VALUE)
    assert put.result.status is PutStatus.UNCHANGED
    entry = present(world.find("k"))
    assert entry.on_ssd
    assert (entry.version.clock, entry.version.writer) == record.version[:2]


TENSOR: dict[str, Any] = {"dtype": "uint8", "shape": (len(VALUE),)}


@pytest.mark.parametrize("ttl", [0.0, 60.0])
@pytest.mark.parametrize("given", [{}, TENSOR])
def test_the_bytes_of_a_tensor_come_back_as_that_tensor(given: dict[str, Any], ttl: float) -> None:
    world = ColdWorld()
    record = world.cool("k", VALUE, **TENSOR)
    put = world.put("k", VALUE, ttl_seconds=ttl, **given)
    assert world.load() == ["k"]
    world.core.tick(world.now)
    assert put.result.status is PutStatus.UNCHANGED
    entry = present(world.find("k"))
    assert (entry.dtype, entry.shape, entry.version[:2]) == (
        *("uint8", (len(VALUE),)),
        record.version[:2],
    )
    assert (entry.expires_unix_ms > 0) == (ttl > 0)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("had", [{}, TENSOR])
def test_the_same_bytes_in_another_shape_are_another_value(had: dict[str, Any], overwrite: bool) -> None:
    world = ColdWorld()
    world.cool("k", VALUE, **had)
    put = world.put("k", VALUE, dtype="uint8", shape=(1, len(VALUE)), overwrite=overwrite)
    assert world.load() == ["k"]
    wanted = PutStatus.CREATED if overwrite else PutStatus.KEPT_EXISTING
    assert put.result.status is wanted
    entry = present(world.find("k"))
    assert entry.shape == ((1, len(VALUE)) if overwrite else had.get("shape", ()))


def test_a_tensor_that_the_ssd_does_not_give_is_created_anew() -> None:
    world = ColdWorld()
    record = world.cool("k", VALUE, **TENSOR)
    put = world.put("k", VALUE, **TENSOR)
    world.load(fail=True)
    assert put.result.status is PutStatus.CREATED
    assert put.result.version[:2] > record.version[:2]


def test_other_bytes_keep_what_exists() -> None:
    world = ColdWorld()
    world.cool("k", VALUE)
    put = world.put("k", b"other")
    assert put.result.status is PutStatus.KEPT_EXISTING
    assert world.find("k") is None
    assert world.core.cold.find(digest_of("k"), world.now) is not None
    world.check_idle()


def test_overwriting_ends_the_copy_on_the_ssd() -> None:
    world = ColdWorld()
    record = world.cool("k", VALUE)
    put = world.put("k", b"other", overwrite=True)
    assert put.result.status is PutStatus.CREATED
    assert put.result.version > record.version
    assert digest_of("k") not in world.store.objects
    entry = present(world.find("k"))
    assert not entry.on_ssd


# --- listing ---------------------------------------------------------------------------------


def page_here(world: ColdWorld, request: ListKeys) -> Keys:
    operation = world.start(InSteps(world.core, listed_here(world.core, request, world.now)))
    while not operation.done:
        world.pass_time(0.0001)
    assert isinstance(operation.result, Keys)
    return operation.result


def test_keys_in_memory_and_on_the_ssd_are_listed_together_page_by_page() -> None:
    world = ColdWorld()
    names = [f"a{number:02}" for number in range(12)]
    for name in names[::2]:
        world.cool(name, VALUE + name.encode())
    for name in names[1::2]:
        world.stored(name, b"small")
    world.stored("pinned", VALUE, pin=int(Pin.SOFT))
    for limit in (1, 2, 5, 100):
        listed, after = [], ""
        while True:
            page = page_here(world, ListKeys(NAMESPACE, "a", after, limit, False))
            listed += page.items
            if not page.more:
                break
            assert page.items
            after = page.items[-1].key
        assert [item.key for item in listed] == names
        assert all(earlier.key < later.key for earlier, later in pairwise(listed))
        assert [item.tier for item in listed[::2]] == [int(Tier.SSD)] * 6
    page = page_here(world, ListKeys(NAMESPACE, "", "", 100, True))
    assert [item.key for item in page.items] == ["pinned"]


def test_many_keys_are_put_in_order_step_by_step_before_they_are_listed() -> None:
    world = ColdWorld(others=1)
    world.cool("a", VALUE)
    world.store.steps_to_prepare = 5
    request = ListKeys(NAMESPACE, "", "a", 100, False)
    operation = world.start(ListOperation(world.core, request, local=True))
    asked = world.serve(world.others[0], DataKind.LIST, ListKeys(NAMESPACE, "", "", 1, False))
    assert not operation.done
    world.pass_time(0.001)
    assert operation.done
    assert "a" not in [item.key for item in operation.result.items]
    assert [item.key for item in reply_of(asked).items] == ["a"]
    cancelled = ListOperation(world.core, request, local=True)
    world.store.steps_to_prepare = 5
    world.start(cancelled)
    world.core.operations.cancel(cancelled, world.now)
    world.check_idle()


def test_a_page_goes_past_keys_that_may_not_be_shown() -> None:
    world = ColdWorld(others=1)
    for number in range(6):
        world.cool(f"a{number}", VALUE + bytes([number]))
    world.stored("b", b"small")
    kept = dict(world.store.objects)
    for number in range(6):
        world.learn_floor(world.others[0], digest_of(f"a{number}"), world.soon)
    world.store.objects.update(kept)  # as if the sweep had not come by
    page = page_here(world, ListKeys(NAMESPACE, "", "", 2, False))
    assert "b" in [item.key for item in page.items] or page.more
    assert not any(item.key.startswith("a") for item in page.items)


# --- a new life ------------------------------------------------------------------------------


def returned(world: Harness) -> ColdSorted:
    (effect,) = world.effects(ColdSorted)
    return effect


def test_objects_of_an_earlier_life_are_hidden_until_they_are_known_to_be_good() -> None:
    before = ColdWorld()
    before.cool("k", VALUE)
    world = ColdWorld(others=1)
    world.store.objects = before.store.objects
    entry = world.store.objects[digest_of("k")].entry
    cold = ColdObject(entry.digest, namespace_digest(NAMESPACE), entry.version)
    world.core.earlier_life.return_with([cold], entry.version.clock, world.now)
    assert world.core.cold.find(digest_of("k"), world.now) is None
    assert not world.core.copies.known(digest_of("k"), world.now)


def test_alone_they_are_back_at_once() -> None:
    before = ColdWorld()
    before.cool("k", VALUE)
    world = ColdWorld()
    world.store.objects = before.store.objects
    entry = world.store.objects[digest_of("k")].entry
    cold = ColdObject(entry.digest, namespace_digest(NAMESPACE), entry.version)
    world.core.earlier_life.return_with([cold], entry.version.clock, world.now)
    world.pass_time(1.0)
    effect = returned(world)
    assert effect.good == (cold,)
    world.core.cold.announce(entry.digest, world.now)
    record = present(world.announced("k"))
    assert record.tier is Tier.SSD
    assert world.core.cold.find(digest_of("k"), world.now) is not None


@pytest.mark.parametrize("many", [1, 5])
def test_without_a_tier_nothing_changes(many: int) -> None:
    world = Harness()
    for number in range(40 * many):
        world.stored(f"k{number}", VALUE)
        world.pass_time(0.05)
    assert not world.effects(WriteObject)
    assert world.core.cold.find(digest_of("k0"), world.now) is None


# --- ahead of need ---------------------------------------------------------------------------


def test_prefetching_goes_some_at_a_time() -> None:
    world = ColdWorld(memory_bytes=1024 * 1024)
    names = [f"cold{number:02}" for number in range(40)]
    world.cool_all({name: VALUE + name.encode() for name in names})
    world.core.prefetching.add([digest_of(name) for name in names], world.now)
    brought: list[str] = []
    while len(world.core.prefetching):
        some = world.load()
        assert 0 < len(some) <= AT_ONCE
        assert len(some) * len(VALUE) <= 1024 * 1024 // 8 + len(VALUE)
        brought += some
    assert brought == names
    world.check_idle()


def test_prefetching_passes_over_what_is_here_nowhere_or_on_its_way() -> None:
    world = ColdWorld()
    world.stored("here", b"x")
    world.cool("cold", VALUE)
    wanted = world.core.operations.fetch(digest_of("cold"), world.now)
    world.core.prefetching.add([digest_of(name) for name in ("here", "nowhere", "cold")], world.now)
    assert not len(world.core.prefetching)
    assert wanted.shared_by == 1
    assert world.load() == ["cold"]
    world.check_idle()


def test_prefetching_ends_somewhere() -> None:
    world = ColdWorld(others=1)
    world.core.prefetching.add((number.to_bytes(16, "big") for number in range(40_000)), world.now)
    assert len(world.core.prefetching) <= MAX_QUEUED + AT_ONCE


def test_prefetching_many_that_are_nowhere() -> None:
    world = ColdWorld()
    world.core.prefetching.add((number.to_bytes(16, "big") for number in range(5_000)), world.now)
    assert len(world.core.prefetching) == 5_000 - BEGUN_PER_STEP
    world.pass_time(0.1)
    assert not len(world.core.prefetching)
    world.check_idle()


# --- a failing SSD ---------------------------------------------------------------------------


def test_without_its_ssd_a_peer_withdraws_what_was_there_and_goes_on() -> None:
    world = ColdWorld()
    for number in range(50):
        world.cool(f"cold{number}", VALUE + bytes([number]))
    world.core.operations.fetch(digest_of("cold5"), world.now)
    world.load()
    world.core.cold.lose_store()
    assert world.core.cold.find(digest_of("cold1"), world.now) is None
    world.pass_time(0.5)
    records = [world.announced(f"cold{number}") for number in range(50)]
    assert [number for number, record in enumerate(records) if record is not None] == [5]
    entry = present(world.find("cold5"))
    assert not entry.on_ssd
    for number in range(40):
        world.stored(f"new{number}", VALUE)
        world.pass_time(0.05)
    assert not world.effects(WriteObject)
    world.check_idle()


def test_what_a_fast_clock_left_on_the_ssd_alone_is_given_up_and_counted() -> None:
    """An object that memory has as well gets a new stamp there."""
    world = ColdWorld(others=1)
    world.core.unix_offset_seconds += 3600.0
    world.unix_offset += 3600.0
    world.core.clock.restart(world.core.unix(world.now))
    world.cool("ssd", VALUE)
    world.stored("memory", VALUE)
    world.core.unix_offset_seconds -= 3600.0
    world.unix_offset -= 3600.0
    unix_ms = round(1000 * world.core.unix(world.now))
    world.gossip.time.clocks.answered(world.others[0].peer_id, unix_ms, world.now, world.now)
    world.pass_time(1.0)
    for _ in range(40):
        world.pass_time(0.05)
    assert not world.core.timekeeping.problem(world.now)
    assert world.core.counters["stamps_dropped"] > 0
    assert world.store.find(digest_of("ssd")) is None
    kept = present(world.find("memory"))
    assert world.core.is_in_time(kept.version.clock, world.now)
