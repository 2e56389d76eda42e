"""Having copies made of objects that were published together, from the side of the writer."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.core.copies import replicate as replicate_together
from p2pstore.core.copies.proofs import signed_proofs
from p2pstore.core.copies.replicate import PutAmongMany
from p2pstore.core.operation import AskPeer, PutEnd
from p2pstore.core.puts.publishing import publish_new
from p2pstore.errors import DeadlineExceeded
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.gossip.records import PeerId, SignedRecord, open_peer_record
from p2pstore.memory.segment_layout import Pin, SlotState, decode_slot, digests_in_slots
from p2pstore.objects import KIB
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Replicate, Replicated, ReplicatedMany, ReplicateMany
from p2pstore.wire import Code, Failure
from simulation.signer import SimulatedVerifier
from tests.unit.core_harness import HOLDER, NAMESPACE, Harness, digest_of

FULL = int(Code.CAPACITY_EXCEEDED)
KEYS = [f"k{number}" for number in range(12)]


def world_of(others: int, memory_bytes: int = 1024 * KIB) -> Harness:
    """A peer among others that understand REPLICATE_MANY."""
    world = Harness(others, memory_bytes)
    for other in world.others:
        world.offer(other)
    return world


def put(
    world: Harness, keys: Sequence[str] = KEYS, replicas: int = 2, size: int = 5, **options: Any
) -> list[PutAmongMany]:
    """Publish new values together."""
    items = [world.facts(key, bytes(size), replicas=replicas, **options) for key in keys]
    ends = publish_new(world.core, items, session=HOLDER, namespace=NAMESPACE, now=world.now)
    assert all(isinstance(end, PutAmongMany) for end in ends)
    return [end for end in ends if isinstance(end, PutAmongMany)]


def asks_of(world: Harness) -> list[AskPeer]:
    return world.asks(DataKind.REPLICATE_MANY)


def digests_asked(ask: AskPeer) -> list[bytes]:
    assert isinstance(ask.request, ReplicateMany)
    return digests_in_slots(ask.request.slots)


def held(ask: AskPeer, *codes: int) -> ReplicatedMany:
    """The answer to a question; without codes, that all is held."""
    return ReplicatedMany(bytes(codes) or bytes(len(digests_asked(ask))))


def copies(ends: Sequence[PutAmongMany]) -> list[int]:
    results = [end.result for end in ends]
    assert all(isinstance(result, PutEnd) and result.status is PutStatus.CREATED for result in results)
    return [result.copies for result in results if isinstance(result, PutEnd)]


def targets(world: Harness, key: str, count: int) -> set[PeerId]:
    return set(world.core.gossip.rank(digest_of(key))[:count])


def test_values_with_and_without_replicas_are_published_together() -> None:
    world = world_of(1)
    items = [
        world.facts(f"k{row}", b"v", replicas=replicas) for row, replicas in enumerate([1, 2, 1, 2, 2])
    ]
    ends = publish_new(world.core, items, session=HOLDER, namespace=NAMESPACE, now=world.now)
    (ask,) = asks_of(world)
    world.answer(ask, held(ask, 0, FULL, 0))
    results = [end.result if isinstance(end, PutAmongMany) else end for end in ends]
    assert [(end.copies, end.wanted) for end in results if isinstance(end, PutEnd)] == [
        *[(1, 1), (2, 2)],
        *[(1, 1), (1, 2), (2, 2)],
    ]
    world.check_idle()


@pytest.mark.parametrize("replicas", [2, 3])
def test_each_target_gets_one_message_for_all_that_it_is_to_pull(replicas: int) -> None:
    world = world_of(4)
    ends = put(world, replicas=replicas)
    asks = asks_of(world)
    assert len({ask.peer_id for ask in asks}) == len(asks) <= 4
    asked = {(ask.peer_id, digest) for ask in asks for digest in digests_asked(ask)}
    assert asked == {
        (peer_id, digest_of(key)) for key in KEYS for peer_id in targets(world, key, replicas - 1)
    }
    for ask in asks:
        assert not any(end.done for end in ends)
        world.answer(ask, held(ask))
    assert copies(ends) == [replicas] * len(KEYS)
    assert all(isinstance(end.result, PutEnd) and end.result.wanted == replicas for end in ends)
    world.check_idle()


def test_a_message_has_all_that_the_target_needs() -> None:
    world = world_of(1)
    put(world, pin=int(Pin.SOFT))
    (ask,) = asks_of(world)
    request = ask.request
    assert isinstance(request, ReplicateMany)
    me = SignedRecord(request.record_body, request.record_signature)
    assert open_peer_record(me, SimulatedVerifier()).peer_id == world.core.peer_id
    slots = [decode_slot(request.slots[at : at + 64]) for at in range(0, len(request.slots), 64)]
    assert all(slot is not None and slot.state is SlotState.LIVE for slot in slots)
    versions = [(slot.digest, slot.version) for slot in slots if slot is not None]
    proofs = signed_proofs(versions, world.core.peer_id, request.signatures)
    for (digest, version), proof, key in zip(versions, proofs, KEYS, strict=True):
        assert world.core.proofs.accept(digest, version, proof)
        entry = world.find(key)
        assert entry is not None
    assert world.core.counters["version_signatures"] == 1


def test_what_is_to_be_copied_is_not_evicted_before() -> None:
    world = world_of(1)
    ends = put(world)
    entries = [world.find(key) for key in KEYS]
    assert all(entry is not None and entry.references for entry in entries)
    (ask,) = asks_of(world)
    world.answer(ask, held(ask))
    assert all(entry is not None and not entry.references for entry in entries)
    assert copies(ends) == [2] * len(KEYS)


def test_one_that_is_refused_goes_to_the_next_candidate_alone() -> None:
    world = world_of(3)
    ends = put(world, ["k"])
    ranked = world.core.gossip.rank(digest_of("k"))
    (ask,) = asks_of(world)
    world.answer(ask, held(ask, FULL))
    for expected, reply in ((ranked[1], Failure(FULL, "no room")), (ranked[2], Replicated(1, 1))):
        (alone,) = world.asks(DataKind.REPLICATE)
        assert alone.peer_id == expected
        world.answer(alone, reply)
    assert copies(ends) == [2]
    world.check_idle()


@pytest.mark.parametrize("reply", [None, Failure(int(Code.UNAVAILABLE), "leaving"), Replicated(1, 1)])
def test_a_target_that_fails_is_passed_over(reply: Any) -> None:
    world = world_of(2)
    ends = put(world, ["k"])
    first, second = world.core.gossip.rank(digest_of("k"))
    (ask,) = asks_of(world)
    assert ask.peer_id == first
    world.answer(ask, reply)
    assert bool(world.effects(Ask)) is (reply is None), "only silence makes a peer suspicious"
    (alone,) = world.asks(DataKind.REPLICATE)
    assert alone.peer_id == second
    world.answer(alone, Replicated(1, 1))
    assert copies(ends) == [2]
    world.check_idle()


@pytest.mark.parametrize("code", [Code.UNSUPPORTED, Code.PROTOCOL_MISMATCH])
def test_older_targets_are_asked_for_each_object(code: Code) -> None:
    world = world_of(1)
    ends = put(world)
    (ask,) = asks_of(world)
    world.answer(ask, Failure(int(code), "no such kind"))
    alone = world.asks(DataKind.REPLICATE)
    assert len(alone) == len(KEYS)
    for ask in alone:
        world.answer(ask, Replicated(1, 1))
    assert copies(ends) == [2] * len(KEYS)
    world.check_idle()


@pytest.mark.parametrize(
    ("limit", "most"), [("WINDOW_BYTES", 100), ("WINDOW_TRAILER_BYTES", 150), ("MAX_REPLICATED", 5)]
)
def test_much_goes_in_windows_one_after_the_other(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate_together, limit, most)
    world = world_of(1)
    ends = put(world, size=25)
    asked = []
    while asks := asks_of(world):
        (ask,) = asks
        asked.append(len(digests_asked(ask)))
        world.answer(ask, held(ask))
    assert len(asked) == len(KEYS) // max(asked) + (len(KEYS) % max(asked) > 0) > 1
    assert sum(asked) == len(KEYS)
    assert copies(ends) == [2] * len(KEYS)
    world.check_idle()


def test_a_value_beyond_the_limit_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate_together, "WINDOW_BYTES", 10)
    world = world_of(1)
    put(world, size=25)
    (ask,) = asks_of(world)
    assert len(digests_asked(ask)) == 1


def test_windows_that_wait_fail_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate_together, "MAX_REPLICATED", 5)
    world = world_of(1)
    ends = put(world)
    (ask,) = asks_of(world)
    world.answer(ask, None)
    assert copies(ends) == [1] * len(KEYS)
    assert not asks_of(world)
    world.check_idle()


@pytest.mark.parametrize("when", ["together", "alone"])
def test_cancelled_it_holds_nothing_and_the_objects_stay(when: str) -> None:
    world = world_of(2)
    ends = put(world, ["a", "b"])
    asks = asks_of(world)
    if when == "alone":
        for ask in asks:
            world.answer(ask, held(ask, *[FULL] * len(digests_asked(ask))))
    world.core.operations.cancel(ends[0].operation, world.now)
    assert all(isinstance(end.result, DeadlineExceeded) for end in ends)
    for ask in asks:
        world.answer(ask, held(ask))
    assert world.value("a") == world.value("b") == bytes(5)
    world.forget_effects()
    world.check_idle()


@given(
    replicas=st.integers(2, 5),
    others=st.integers(0, 4),
    fate=st.lists(st.sampled_from(["held", "full", "silent"]), min_size=4, max_size=4),
    rows=st.data(),
)
def test_copies_are_those_that_were_made(
    replicas: int, others: int, fate: list[str], rows: st.DataObject
) -> None:
    """Whatever the targets answer, each object has as many copies as targets said that they hold it."""
    world = world_of(others)
    fates = {other.peer_id: how for other, how in zip(world.others, fate, strict=False)}
    keys = KEYS[:5]
    ends = put(world, keys, replicas=replicas)
    made: dict[bytes, set[PeerId]] = {digest_of(key): {world.core.peer_id} for key in keys}
    while not ends[0].done:
        asks = asks_of(world)
        for ask in asks:
            codes = []
            for digest in digests_asked(ask):
                holds = fates[ask.peer_id] == "held" and rows.draw(st.booleans())
                codes.append(0 if holds else FULL)
                if holds and fates[ask.peer_id] != "silent":
                    made[digest].add(ask.peer_id)
            world.answer(ask, None if fates[ask.peer_id] == "silent" else held(ask, *codes))
        alone = world.asks(DataKind.REPLICATE)
        assert asks or alone, "nothing is waited for"
        for ask in alone:
            holds = fates[ask.peer_id] in ("held", "older")
            assert isinstance(ask.request, Replicate)
            if holds:
                assert ask.peer_id not in made[ask.request.digest], "it had said so"
                made[ask.request.digest].add(ask.peer_id)
            world.answer(ask, Replicated(1, 1) if holds else None)
    assert copies(ends) == [len(made[digest_of(key)]) for key in keys]
    assert all(count <= replicas for count in copies(ends))
    world.forget_effects()
    world.check_idle()
