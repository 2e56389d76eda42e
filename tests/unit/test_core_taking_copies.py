"""Keeping copies of objects that another peer has published together."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.core.copies.copy_destination import CopiesDestination, RoomDestination, TakeCopiesOperation
from p2pstore.core.copies.proofs import sign_trees
from p2pstore.core.operation import PullOutcome
from p2pstore.core.serving import reply_of
from p2pstore.errors import NoSuchKey, ProtocolError
from p2pstore.gossip.records import Tier, writer_of
from p2pstore.memory.segment_layout import TrailerBody, decode_trailer, encode_slot, encode_trailer
from p2pstore.objects import KIB, Version, root_checksum
from p2pstore.runtime.stepping import run_through
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ReplicatedMany, ReplicateMany
from p2pstore.wire import Code, Failure
from simulation.signer import SimulatedSigner, peer_id_of
from tests.present import present
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import (
    NAMESPACE,
    Harness,
    Other,
    RemoteObject,
    clock_at,
    digest_of,
    peer_record,
    remote_object,
)

HELD = 0
FULL, GONE, AWAY = Code.CAPACITY_EXCEEDED, Code.NO_SUCH_KEY, Code.UNAVAILABLE


def written(
    other: Other, key: str, value: bytes, clock: int | None = None, **trailer: Any
) -> RemoteObject:
    """An object that the other wrote."""
    return remote_object(key, value, clock, writer_of(other.peer_id), replicas=2, **trailer)


def message(other: Other, things: Sequence[RemoteObject]) -> ReplicateMany:
    versions = [(thing.slot.digest, thing.version) for thing in things]
    return ReplicateMany(
        b"".join(encode_slot(thing.slot) for thing in things),
        [encode_trailer(thing.trailer) for thing in things],
        sign_trees(versions, other.signer),
    )


def ask(world: Harness, things: Sequence[RemoteObject], other: Other | None = None) -> Any:
    other = other or world.others[0]
    return world.serve(other, DataKind.REPLICATE_MANY, message(other, things))


def rooms_for(world: Harness, operation: TakeCopiesOperation) -> CopiesDestination:
    run_through(operation.copies.reserve(world.now))
    return operation.copies


def bring(
    world: Harness,
    operation: TakeCopiesOperation,
    things: Sequence[RemoteObject],
    lost: Collection[int] = (),
) -> set[int]:
    """Fill all rooms but those."""
    brought = set()
    for room in rooms_for(world, operation).rooms:
        thing = things[room.place]
        assert (room.slot, len(room.view)) == (thing.slot, len(thing.value))
        if room.place not in lost:
            room.view[:] = thing.value
            brought.add(room.place)
    return brought


def end(world: Harness, operation: TakeCopiesOperation, brought: Collection[int]) -> None:
    operation.copies.publish(brought, world.now)
    operation.copies.abort()
    world.core.operations.pulled(operation.number, PullOutcome(delivered=True), world.now)


def take(world: Harness, things: Sequence[RemoteObject], lost: Collection[int] = ()) -> list[int]:
    """The codes that are answered when all comes but for what is lost."""
    operation = ask(world, things)
    end(world, operation, bring(world, operation, things, lost))
    reply = reply_of(operation)
    assert isinstance(reply, ReplicatedMany)
    return list(reply.codes)


def test_copies_come_together_are_firm_and_keep_their_proofs() -> None:
    world = Harness(others=2)
    other = world.others[0]
    things = [
        written(other, f"k{number}", bytes([number]) * number * 100, pin=number % 3)
        for number in range(12)
    ]
    assert take(world, things) == [HELD] * 12
    for number, thing in enumerate(things):
        entry = present(world.find(f"k{number}"))
        assert (entry.version, entry.soft, entry.verified) == (thing.version, False, True)
        assert (entry.replicas, entry.pin) == (2, number % 3)
        assert world.value(f"k{number}") == thing.value
        record = present(world.announced(f"k{number}"))
        assert (record.version, record.replicas) == (thing.version, 2)
        trailer = present(decode_trailer(world.segment.table.trailer_bytes(entry)))
        assert world.core.proofs.accept(entry.digest, entry.version, trailer.proof)
        assert msgspec.structs.replace(trailer, proof=b"") == thing.trailer
    assert world.core.counters["objects_published"] == 12
    world.check_idle()


def test_some_that_do_not_come_are_answered_so() -> None:
    world = Harness(others=1)
    things = [written(world.others[0], f"k{number}", b"value") for number in range(4)]
    assert take(world, things, lost={1, 3}) == [HELD, AWAY, HELD, AWAY]
    assert [world.value(f"k{number}") for number in range(4)] == [b"value", None, b"value", None]
    world.check_idle()


def prepared(world: Harness, what: str, thing: RemoteObject) -> int:
    """Make a difference to what is asked for; the code that answers it."""
    version, digest = thing.version, thing.slot.digest
    if what == "held":
        assert take(world, [thing]) == [HELD]
    elif what == "newer here":
        world.stored("odd", b"newer")
        return HELD
    elif what == "removed":
        world.learn_floor(world.others[1], digest, Version(version.clock + 1, 1))
        return int(GONE)
    elif what == "flushed":
        name = world.core.namespace_digest(NAMESPACE)
        world.learn_floor(world.others[1], name, Version(version.clock + 1, 1), scope=1)
        return int(GONE)
    elif what == "doubted":
        world.core.gossip.doubted_up_to = lambda *_: version.clock  # type: ignore[method-assign]
        return int(AWAY)
    return HELD


@pytest.mark.parametrize("what", ["held", "newer here", "removed", "flushed"])
def test_what_is_decided_here_is_not_pulled(what: str) -> None:
    world = Harness(others=2)
    other = world.others[0]
    odd = written(other, "odd", b"value")
    code = prepared(world, what, odd)
    late = clock_at(5.0)  # above what was flushed
    things = [written(other, "a", b"1", late), odd, written(other, "c", b"3", late)]
    before = world.value("odd")
    operation = ask(world, things)
    brought = bring(world, operation, things)
    assert brought == {0, 2}
    end(world, operation, brought)
    assert list(reply_of(operation).codes) == [HELD, code, HELD]  # type: ignore[attr-defined]
    assert world.value("odd") == before
    world.check_idle()


def test_what_the_sender_may_have_missed_the_removal_of_is_refused() -> None:
    world = Harness(others=2)
    thing = written(world.others[0], "odd", b"value")
    code = prepared(world, "doubted", thing)
    assert take(world, [thing]) == [code]
    world.check_idle()


def test_a_version_of_the_future_is_refused() -> None:
    world = Harness(others=1)
    assert take(world, [written(world.others[0], "k", b"value", clock_at(60.0))]) == [AWAY]
    assert world.value("k") is None
    world.check_idle()


def test_an_older_version_here_is_replaced() -> None:
    world = Harness(others=1)
    world.stored("k", b"older")
    things = [written(world.others[0], key, b"newer", clock_at(5.0)) for key in ("a", "k")]
    assert take(world, things) == [HELD, HELD]
    assert world.value("k") == b"newer"
    world.check_idle()


def test_what_is_on_the_ssd_is_not_pulled_and_an_older_version_there_goes() -> None:
    world = ColdWorld(others=1)
    for key in ("newer", "older"):
        world.cool(key, b"mine")
    other = world.others[0]
    things = [
        written(other, "newer", b"theirs"),
        written(other, "older", b"theirs", clock_at(5.0)),
        written(other, "k", b"theirs"),
    ]
    assert take(world, things) == [HELD] * 3
    assert [world.value(key) for key in ("newer", "older", "k")] == [None, b"theirs", b"theirs"]
    cold = world.core.cold.find(digest_of("older"), world.now)
    assert cold is None or cold.version == things[1].version
    record = present(world.announced("older"))
    assert (record.version, record.tier) == (things[1].version, Tier.DRAM)
    world.check_idle()


@pytest.mark.parametrize("what", ["newer", "removed"])
def test_what_happens_while_they_come_counts(what: str) -> None:
    world = Harness(others=2)
    things = [written(world.others[0], key, b"value") for key in "abc"]
    operation = ask(world, things)
    brought = bring(world, operation, things)
    if what == "newer":
        world.stored("b", b"newer")
    else:
        floor = Version(things[1].version.clock + 1, 1)
        world.learn_floor(world.others[1], digest_of("b"), floor)
    end(world, operation, brought)
    code = HELD if what == "newer" else int(AWAY)
    assert list(reply_of(operation).codes) == [HELD, code, HELD]  # type: ignore[attr-defined]
    assert world.value("b") == (b"newer" if what == "newer" else None)
    world.check_idle()


def test_a_newer_version_that_was_heard_of_meanwhile_is_seen() -> None:
    world = Harness(others=2)
    thing = written(world.others[0], "k", b"value")
    operation = ask(world, [thing])
    brought = bring(world, operation, [thing])
    world.hold(world.others[1], "k", b"newer", clock_at(5.0), writer_of(world.others[1].peer_id))
    end(world, operation, brought)
    world.core.gossip_arrived(world.now)
    assert world.value("k") is None, "it is given up for what another one has"
    world.check_idle()


def test_the_writer_s_own_word_of_the_same_version_changes_nothing() -> None:
    world = Harness(others=2)
    thing = written(world.others[0], "k", b"value")
    world.push(world.others[0], thing)
    assert take(world, [thing]) == [HELD]
    world.core.gossip_arrived(world.now)
    assert world.value("k") == b"value"


def test_full_memory_is_made_room_in_and_what_finds_none_is_refused() -> None:
    world = Harness(others=1, memory_bytes=128 * KIB)
    for number in range(24):
        world.stored(f"old {number}", bytes(3 * KIB))
    for number in range(12):
        world.stored(f"pinned {number}", bytes(3 * KIB), pin=2)
    things = [written(world.others[0], f"k{number}", bytes(3 * KIB)) for number in range(24)]
    codes = take(world, things)
    assert set(codes) == {HELD, int(FULL)}
    assert [world.find(f"k{number}") is not None for number in range(24)] == [
        code == HELD for code in codes
    ]
    assert all(world.find(f"pinned {number}") is not None for number in range(12))
    world.check_idle()


def test_what_could_never_fit_is_refused_before_any_byte_moves() -> None:
    world = Harness(others=1, memory_bytes=64 * KIB)
    things = [written(world.others[0], "large", bytes(70_000)), written(world.others[0], "k", b"1")]
    assert take(world, things) == [int(FULL), HELD]
    world.check_idle()


def test_a_peer_that_leaves_takes_none() -> None:
    world = Harness(others=1)
    world.core.closing = True
    reply = ask(world, [written(world.others[0], "k", b"1")])
    assert isinstance(reply, Failure)
    assert reply.code == AWAY


def test_a_pull_that_ends_early_leaves_nothing() -> None:
    world = Harness(others=1)
    operation = ask(world, [written(world.others[0], "k", b"1")])
    rooms_for(world, operation).abort()
    world.core.operations.cancel(operation, world.now)
    assert world.value("k") is None
    world.check_idle()


def test_a_stranger_introduces_itself() -> None:
    world = Harness(others=1)
    stranger = Other(SimulatedSigner(peer_id_of(55)))
    signed = peer_record(stranger.signer)
    request = msgspec.structs.replace(
        message(stranger, [written(stranger, "k", b"1")]),
        record_body=signed.body,
        record_signature=signed.signature,
    )
    world.serve(stranger, DataKind.REPLICATE_MANY, request)
    assert stranger.peer_id in world.core.live_peers()


def spoilt(other: Other, what: str) -> ReplicateMany:
    """A message that no writer sends."""
    things = [written(other, key, b"value") for key in "ab"]
    if what == "another's":
        things[1] = remote_object("b", b"value", writer=writer_of(other.peer_id) ^ 1)
    elif what == "twice":
        things[1] = things[0]
    elif what == "two namespaces":
        trailer = TrailerBody("other", "b", things[1].trailer.sums)
        slot = msgspec.structs.replace(things[1].slot, trailer_length=len(encode_trailer(trailer)))
        things[1] = RemoteObject(b"value", slot, trailer)
    elif what == "another key":
        slot = msgspec.structs.replace(things[1].slot, digest=digest_of("c"))
        things[1] = RemoteObject(b"value", slot, things[1].trailer)
    elif what == "another root":
        root = root_checksum(5, bytes(8))
        version = Version(things[1].version.clock, things[1].version.writer, root)
        slot = msgspec.structs.replace(things[1].slot, version=version)
        things[1] = RemoteObject(b"value", slot, things[1].trailer)
    elif what == "no key":
        trailer = TrailerBody(NAMESPACE, "", things[1].trailer.sums)
        slot = msgspec.structs.replace(things[1].slot, trailer_length=len(encode_trailer(trailer)))
        things[1] = RemoteObject(b"value", slot, trailer)
    request = message(other, things)
    changes: dict[str, dict[str, Any]] = {
        "nothing": {"slots": b"", "trailers": []},
        "short slots": {"slots": request.slots[:-1]},
        "more trailers": {"trailers": [*request.trailers, b""]},
        "torn slot": {"slots": request.slots[:-1] + b"x"},
        "torn trailer": {"trailers": [request.trailers[0], request.trailers[1][:-1] + b"x"]},
        "no signature": {"signatures": b""},
    }
    return msgspec.structs.replace(request, **changes.get(what, {}))


@pytest.mark.parametrize(
    "what",
    [
        *("another's", "twice", "two namespaces", "another key", "another root", "no key"),
        *("nothing", "short slots", "more trailers", "torn slot", "torn trailer", "no signature"),
    ],
)
def test_nonsense_is_a_protocol_error(what: str) -> None:
    world = Harness(others=1)
    request = spoilt(world.others[0], what)
    with pytest.raises(ProtocolError):
        world.serve(world.others[0], DataKind.REPLICATE_MANY, request)
    world.check_idle()


def test_a_room_takes_the_one_version_only() -> None:
    world = Harness(others=1)
    other = world.others[0]
    thing = written(other, "k", b"value")
    copies = rooms_for(world, ask(world, [thing]))
    destination = RoomDestination(copies.rooms[0])
    assert len(destination.prepare(thing.slot, thing.trailer)) == 5
    newer = written(other, "k", b"newer", clock_at(1.0))
    with pytest.raises(NoSuchKey):
        destination.prepare(newer.slot, newer.trailer)
    copies.abort()


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["new", "older", "newer", "removed"]), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_a_code_says_what_is_here(rows: list[tuple[str, bool]]) -> None:
    """Objects present before, copied, or not delivered: those answered as held are here, and none is held back."""
    world = Harness(others=2, memory_bytes=512 * KIB)
    things = []
    for number, (before, _) in enumerate(rows):
        key = f"k{number}"
        if before in ("older", "newer"):
            world.stored(key, b"mine")
        clock = clock_at(5.0 if before == "older" else -60.0)
        things.append(written(world.others[0], key, b"theirs", clock))
        if before == "removed":
            world.learn_floor(world.others[1], digest_of(key), Version(clock + 1, 1))
    codes = take(world, things, [n for n, (_, comes) in enumerate(rows) if not comes])
    for number, ((before, comes), code, thing) in enumerate(zip(rows, codes, things, strict=True)):
        entry = world.find(f"k{number}")
        held = entry is not None and entry.version.covers(thing.version)
        assert held == (code == HELD) == (before == "newer" or (comes and before != "removed"))
    world.check_idle()
