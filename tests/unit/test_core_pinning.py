"""Pins belong to objects: the pinning peer tells all holders, and returns how many took the pin."""

from typing import Any

import pytest

from p2pstore.core.operation import AskPeer
from p2pstore.core.puts.lifetimes import MAX_PINS, PIN_TIMEOUT_SECONDS, PinEnd, PinOperation
from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.gossip.records import Tier, decode_location
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import Pin
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Locations, PinItem, PinsSet, SetPins
from p2pstore.wire import Code, Failure
from tests.present import present
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import Harness, RemoteObject, clock_at, digest_of, remote_object


def pin(world: Harness, *keys: str, pin: Pin = Pin.HARD, seconds: float = 0.0) -> PinOperation:
    operation = PinOperation(world.core, [digest_of(key) for key in keys], pin, seconds)
    world.start(operation)
    return operation


def same_as(entry: ObjectEntry, key: str, value: bytes) -> RemoteObject:
    return remote_object(key, value, clock=entry.version.clock, writer=entry.version.writer)


def asks(world: Harness) -> list[AskPeer]:
    return sorted(world.asks(DataKind.SET_PINS), key=lambda ask: ask.tag)


def item_of(entry: ObjectEntry) -> PinItem:
    return PinItem(entry.digest, entry.version.clock, entry.version.writer)


def serve(world: Harness, request: SetPins) -> Any:
    return world.serve(world.others[0], DataKind.SET_PINS, request)


def test_all_holders_are_told_and_the_answer_says_how_many_took_it() -> None:
    world = Harness(others=4)
    entry = world.stored("k", b"value")
    for other in world.others[:3]:
        world.push(other, same_as(entry, "k", b"value"))
    operation = pin(world, "k")
    assert entry.pin is Pin.HARD
    asked = asks(world)
    assert {ask.peer_id for ask in asked} == {other.peer_id for other in world.others[:3]}
    assert all(ask.timeout_seconds == PIN_TIMEOUT_SECONDS for ask in asked)
    assert asked[0].request == SetPins([item_of(entry)], Pin.HARD)
    world.answer(asked[0], PinsSet(b"\1"))
    world.answer(asked[1], PinsSet(b"\0"))
    assert not operation.done
    world.answer(asked[2], None)
    assert operation.result == [PinEnd(here=True, found=True, copies=2, known=4)]
    record = present(world.announced("k"))
    assert record.pin == Pin.HARD


def test_who_is_alone_asks_nobody() -> None:
    world = Harness(others=2)
    entry = world.stored("k", b"value")
    operation = pin(world, "k", pin=Pin.SOFT, seconds=60.0)
    assert operation.result == [PinEnd(here=True, found=True, copies=1, known=1)]
    assert entry.pin_until == world.core.unix(world.now) + 60
    assert not asks(world)
    pin(world, "k", pin=Pin.SOFT)
    assert entry.pin_until == world.core.unix(world.now) + SOFT_PIN_SECONDS
    world.check_idle()


def test_only_the_same_version_is_pinned_in_memory_or_on_an_ssd() -> None:
    world = Harness(others=3)
    entry = world.stored("k", b"value")
    world.hold(world.others[0], "k", b"older", clock_at(-500.0), 9)
    world.push(world.others[1], same_as(entry, "k", b"value"))
    world.push(world.others[2], same_as(entry, "k", b"value"), tier=Tier.SSD)
    operation = pin(world, "k")
    asked = asks(world)
    assert {ask.peer_id for ask in asked} == {other.peer_id for other in world.others[1:]}
    for ask in asked:
        world.answer(ask, PinsSet(b"\1"))
    assert operation.result == [PinEnd(here=True, found=True, copies=3, known=3)]


def test_an_older_peer_that_does_not_know_of_it_is_no_failure() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    world.push(world.others[0], same_as(entry, "k", b"value"))
    operation = pin(world, "k")
    (ask,) = asks(world)
    world.answer(ask, Failure(int(Code.UNSUPPORTED), "what?"))
    assert operation.result == [PinEnd(here=True, found=True, copies=1, known=2)]


def test_what_is_elsewhere_alone_is_looked_up_and_pinned_there() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "far", b"value", pin=2)
    operation = pin(world, "far", "none", pin=Pin.NONE)
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[]]))
    (ask,) = asks(world)
    version = thing.version
    assert ask.request == SetPins([PinItem(digest_of("far"), version.clock, version.writer)], Pin.NONE)
    world.answer(ask, PinsSet(b"\1"))
    assert operation.result == [
        PinEnd(here=False, found=True, copies=1, known=1),
        PinEnd(here=False, found=False, copies=0, known=0),
    ]


def test_each_holder_is_asked_once_for_many_objects() -> None:
    world = Harness(others=1)
    entries = [world.stored(key, key.encode()) for key in ("a", "b", "c")]
    for entry in entries[:2]:
        world.push(world.others[0], same_as(entry, entry.key, entry.key.encode()))
    operation = pin(world, "a", "b", "c", "a")
    (ask,) = asks(world)
    assert ask.request == SetPins([item_of(entry) for entry in entries[:2]], Pin.HARD)
    world.answer(ask, PinsSet(b"\1\0"))
    assert [(end.copies, end.known) for end in operation.result] == [(2, 2), (1, 2), (1, 1), (2, 2)]


def test_more_than_a_holder_does_at_a_time_are_several_messages() -> None:
    world = Harness(others=1, memory_bytes=MAX_PINS * 3 * 4096)
    keys = [f"key {number}" for number in range(2 * MAX_PINS + 1)]
    for key in keys:
        world.push(world.others[0], same_as(world.stored(key, b"v"), key, b"v"))
    operation = pin(world, *keys)
    world.pass_time(0.01)
    asked = asks(world)
    assert len(asked) == 3
    for ask in asked:
        world.answer(ask, world.serve(world.others[0], DataKind.SET_PINS, ask.request))
    assert [(end.copies, end.known) for end in operation.result] == [(2, 2)] * len(keys)


def test_a_pin_that_is_cancelled_is_in_force_here() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    world.push(world.others[0], same_as(entry, "k", b"value"))
    operation = pin(world, "k")
    asks(world)
    world.core.operations.cancel(operation, world.now)
    assert isinstance(operation.result, DeadlineExceeded)
    assert entry.pin is Pin.HARD
    world.check_idle()


def test_a_soft_copy_that_is_pinned_here_is_a_firm_one_and_one_elsewhere_is_not() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    world.core.operations.fetch(digest_of("k"), world.now)
    entry = present(world.deliver(world.pull_wanted(), thing))
    world.forget_effects()
    assert serve(world, SetPins([item_of(entry)], Pin.SOFT, 60_000)) == PinsSet(b"\1")
    assert (entry.soft, entry.pin) == (True, Pin.SOFT)
    assert entry.pin_until == world.core.unix(world.now) + 60
    pin(world, "k")
    assert (entry.soft, entry.pin, entry.pin_until) == (False, Pin.HARD, 0.0)
    record = present(world.announced("k"))
    assert (record.soft, record.pin) == (False, 2)


def test_others_may_pin_only_what_is_here_in_that_version() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    older = PinItem(entry.digest, entry.version.clock - 1, entry.version.writer)
    absent = PinItem(digest_of("absent"), 1, 1)
    assert serve(world, SetPins([older, item_of(entry), absent], Pin.HARD)) == PinsSet(b"\0\1\0")
    assert entry.pin.name == "HARD"
    assert serve(world, SetPins([item_of(entry)], Pin.NONE)) == PinsSet(b"\1")
    assert entry.pin.name == "NONE"


def announced(world: Harness, key: str) -> tuple[Tier, int, int]:
    held = present(world.gossip.log.held(digest_of(key)))
    record = decode_location(held)
    return record.tier, record.pin, record.replicas


def test_what_is_on_the_ssd_alone_is_pinned_for_when_it_comes_back() -> None:
    world = ColdWorld(others=1)
    world.cool("k", b"v" * 9000)
    cold = world.store.objects[digest_of("k")].entry
    item = PinItem(cold.digest, cold.version.clock, cold.version.writer)
    assert serve(world, SetPins([PinItem(cold.digest, 1, 1)], 2)) == PinsSet(b"\0")
    assert serve(world, SetPins([item], 2)) == PinsSet(b"\1")
    assert announced(world, "k") == (Tier.SSD, 2, 1)
    world.core.operations.fetch(digest_of("k"), world.now)
    world.load()
    entry = present(world.find("k"))
    assert entry.pin is Pin.HARD
    operation = pin(world, "k", pin=Pin.NONE)
    assert operation.result == [PinEnd(here=True, found=True, copies=1, known=1)]


@pytest.mark.slow
def test_unpinning_needs_no_copy_in_memory() -> None:
    world = ColdWorld()
    world.cool("k", b"v" * 9000, pin=1)
    operation = pin(world, "k", pin=Pin.NONE)
    assert operation.result == [PinEnd(here=False, found=True, copies=1, known=1)]
    assert announced(world, "k") == (Tier.SSD, 0, 1)


@pytest.mark.parametrize(
    "request_",
    [
        SetPins([PinItem(b"short", 1, 1)], 1),
        SetPins([], 3),
        SetPins([], -1),
        SetPins([], 1, -1),
        SetPins([], 1, 1 << 60),
        SetPins([PinItem(bytes(16), 1, 1)] * (MAX_PINS + 1), 1),
    ],
)
def test_nonsense_is_refused(request_: SetPins) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        serve(Harness(others=1), request_)
