"""Puts, row by row of the table in docs/design/data-path.md: existing versions decide, here or elsewhere."""

from typing import Any

import pytest
from msgspec.structs import replace

from p2pstore.core import floors as sweeping
from p2pstore.core.operation import AskPeer, CheckObject, PullOutcome, PutEnd
from p2pstore.core.puts.deciding import SLOT_ONLY
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.core.serving import reply_of
from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.gossip.records import SCOPE_NAMESPACE, writer_of
from p2pstore.home_messages import Holding
from p2pstore.memory.segment_layout import Pin, decode_trailer
from p2pstore.objects import Version, chunk_sums, namespace_digest
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind, Get, ObjectReply, Objects, ObjectStatus
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import (
    CheckCopy,
    CopyChecked,
    ExpiryItem,
    ExpirySet,
    Locations,
    Replicated,
    SetExpiry,
)
from p2pstore.wire import Code, Failure
from simulation.segment_checks import check_segment
from tests.present import present
from tests.unit.core_harness import (
    HOLDER,
    NAMESPACE,
    NOT_FOUND,
    OTHER_INCARNATION,
    Harness,
    Other,
    clock_at,
    digest_of,
    remote_object,
)


def end_of(operation: PutOperation) -> PutEnd:
    assert operation.done
    assert isinstance(operation.result, PutEnd), operation.result
    return operation.result


# --- unknown ---------------------------------------------------------------------------------


def test_an_unknown_key_is_created_and_announced() -> None:
    world = Harness(others=4)
    operation = world.put("k", b"value", dtype="float32", shape=(5,))
    version = Version(clock_at(0.0), world.writer, operation.facts.root)
    assert end_of(operation) == PutEnd(PutStatus.CREATED, 1, 1, version)
    entry = present(world.find("k"))
    assert (entry.version, entry.soft, entry.dtype, entry.shape) == (version, False, "float32", (5,))
    assert world.value("k") == b"value"
    record = present(world.announced("k"))
    assert record.version == version
    assert world.finished() == {operation.number}
    world.core.flush_pushes(world.now)
    assert {ask.peer_id for ask in world.asks(DataKind.PUSH)} == set(world.core.homes(digest_of("k")))
    world.check_idle()


def test_what_nobody_else_is_known_to_have_is_looked_up_once() -> None:
    world = Harness(others=4)
    world.put("k", b"value")
    assert not world.core.gossip.directory.watched.any_touched


def test_a_time_to_live_counts_from_the_put_in_wall_clock_time() -> None:
    world = Harness()
    entry = world.stored("k", b"value", ttl_seconds=30.0)
    assert entry.expires_unix_ms == int((world.core.unix(world.now) + 30.0) * 1000)
    world.pass_time(29.0)
    assert world.value("k") == b"value"
    world.pass_time(2.5)
    assert world.value("k") is None
    assert world.announced("k") is None, "an expired object is withdrawn"
    assert world.core.counters["objects_withdrawn"] == 1
    world.check_idle()


@pytest.mark.parametrize("change", [{"root": 1}, {"sums": b"12345678"}, {"length": 4}])
def test_sums_that_do_not_give_the_root_are_refused(change: dict[str, Any]) -> None:
    world = Harness()
    operation = world.operation(replace(world.facts("k", b"value"), **change))
    world.start(operation)
    assert isinstance(operation.result, ProtocolError)
    assert world.find("k") is None
    world.check_idle()


def test_a_trailer_that_outgrew_its_reservation_is_an_error_and_frees_it() -> None:
    world = Harness()
    operation = world.put("k", b"value", shape=tuple(range(4000)))
    assert isinstance(operation.result, ValueError)
    world.check_idle()


def test_a_reservation_that_is_not_there_is_an_error_and_leaves_nothing() -> None:
    world = Harness()
    facts = world.facts("k", b"value")
    operation = world.operation(replace(facts, reservation=facts.reservation + 1))
    world.start(operation)
    assert isinstance(operation.result, ValueError)
    world.segment.abort(facts.reservation, session=HOLDER)
    world.check_idle()


def test_each_version_is_above_all_seen() -> None:
    world = Harness(others=1)
    first = world.stored("a", b"1").version
    second = world.stored("b", b"2").version
    assert first.clock < second.clock
    world.learn_floor(world.others[0], digest_of("x"), Version(clock_at(9.0), 1))
    assert world.stored("c", b"3").version.clock == clock_at(9.0) + 1


# --- here ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_bytes_again_are_unchanged(overwrite: bool) -> None:
    world = Harness()
    entry = world.stored("k", b"value")
    sequence = world.gossip.log.sequence
    operation = world.put("k", b"value", overwrite=overwrite)
    assert end_of(operation) == PutEnd(PutStatus.UNCHANGED, 1, 1, entry.version)
    assert world.find("k") is entry
    assert world.gossip.log.sequence == sequence, "nothing changed, so nothing is announced"
    assert not len(world.gossip.cluster_records)
    world.check_idle()


def test_other_bytes_keep_what_exists() -> None:
    world = Harness(others=2)
    entry = world.stored("k", b"value", pin=1)
    operation = world.put("k", b"other", pin=2, replicas=2)
    assert end_of(operation) == PutEnd(PutStatus.KEPT_EXISTING, 1, 2, entry.version)
    assert world.value("k") == b"value"
    assert (entry.pin, entry.replicas) == (1, 1), "care for other bytes is not taken over"
    assert not world.asks(DataKind.REPLICATE)
    world.check_idle()


def test_overwriting_makes_a_new_version_and_a_floor_below_it() -> None:
    world = Harness(others=1)
    old = world.stored("k", b"value")
    operation = world.put("k", b"other", overwrite=True)
    end = end_of(operation)
    assert end.status == PutStatus.CREATED
    assert end.version > old.version
    assert world.value("k") == b"other"
    records = world.gossip.cluster_records
    floor = records.floors.floor_for(digest_of("k"))
    assert floor == Version(end.version.clock - 1, 0xFFFF)
    assert records.floors.forbids(digest_of("k"), None, old.version)
    assert not records.floors.forbids(digest_of("k"), None, end.version)
    announced = present(world.announced("k"))
    assert announced.version == end.version
    world.check_idle()


def test_others_hear_nothing_of_the_old_version_after_the_new_one() -> None:
    """The last word about a key counts."""
    world = Harness(others=1)
    world.stored("k", b"value")
    told = world.gossip.log.sequence
    world.core.books.late = True  # as in a peer: the books of what went are kept behind the answer
    world.put("k", b"other", overwrite=True)
    world.core.books.settle()
    assert world.gossip.log.sequence == told + 1


def test_overwriting_what_is_elsewhere_asks_one_that_has_the_newest_version() -> None:
    for overwrites_same in (False, True):
        world = Harness(others=2)
        world.hold(world.others[1], "k", b"older", clock=clock_at(-90.0))
        remote = remote_object("k", b"value", expires_unix_ms=1_800_000_060_000)
        world.push(world.others[0], remote)
        value = b"value" if overwrites_same else b"other"
        operation, ask = compare(world, "k", value, overwrite=True)
        assert ask.peer_id == world.others[0].peer_id
        world.answer(ask, remote.reply)
        end, entry = end_of(operation), world.find("k")
        assert entry is not None
        if overwrites_same:
            assert (end.status, end.version) == (PutStatus.UNCHANGED, remote.version)
            assert entry.expires_unix_ms == 1_800_000_060_000
        else:
            assert (end.status, end.version > remote.version) == (PutStatus.CREATED, True)
            assert entry.expires_unix_ms == 0


def test_overwriting_what_its_holder_does_not_tell_of_makes_a_new_version() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value", overwrite=True)
    world.answer(ask, None)
    end = end_of(operation)
    assert (end.status, end.version > remote.version) == (PutStatus.CREATED, True)
    assert [copy.local for copy in world.core.copies.known(digest_of("k"), world.now)] == [True]


def test_overwriting_goes_above_a_version_whose_clock_is_ahead() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"value", clock=clock_at(8.0))
    operation, ask = compare(world, "k", b"other", overwrite=True)
    world.answer(ask, remote.reply)
    end = end_of(operation)
    assert (end.status, end.version > remote.version) == (PutStatus.CREATED, True)
    world.core.gossip_arrived(world.now)
    assert world.value("k") == b"other"


def test_overwriting_what_is_not_known_asks_the_homes_first() -> None:
    world = Harness(others=2)
    operation = world.put("k", b"other", overwrite=True)
    remote = remote_object("k", b"value", clock=clock_at(8.0))
    holding = Holding(world.others[1].member, OTHER_INCARNATION, 1, world.location(remote))
    assert not operation.done
    world.answer(world.asks(DataKind.LOOKUP)[0], Locations([[holding]]))
    (ask,) = world.asks(DataKind.GET)
    world.answer(ask, remote.reply)
    assert end_of(operation).version > remote.version
    cancelled = world.put("l", b"other", overwrite=True)
    world.core.operations.cancel(cancelled, world.now)
    world.check_idle()


def test_a_firmer_pin_and_more_replicas_are_taken_over() -> None:
    world = Harness()
    entry = world.stored("k", b"value", pin=1, replicas=1)
    sequence = world.gossip.log.sequence
    world.put("k", b"value", pin=2)
    assert entry.pin is Pin.HARD
    world.put("k", b"value", replicas=3)
    assert (entry.pin, entry.replicas) == (Pin.HARD, 3)
    record = present(world.announced("k"))
    assert (record.pin, record.replicas) == (2, 3)
    assert world.gossip.log.sequence == sequence + 2
    world.check_idle()


def test_a_looser_pin_and_fewer_replicas_are_not() -> None:
    world = Harness()
    entry = world.stored("k", b"value", pin=2, replicas=3)
    world.put("k", b"value", pin=0, replicas=1)
    assert (entry.pin, entry.replicas) == (Pin.HARD, 3)


def test_putting_what_is_here_as_a_soft_copy_makes_it_firm() -> None:
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value")
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    world.deliver(world.pull_wanted(), remote)
    assert operation.result.soft
    assert end_of(world.put("k", b"value")).status == PutStatus.UNCHANGED
    assert not operation.result.soft
    record = present(world.announced("k"))
    assert not record.soft


def test_an_expired_object_counts_for_nothing() -> None:
    world = Harness()
    world.stored("k", b"value", ttl_seconds=5.0)
    world.now += 6.0  # expired, and not collected yet
    assert end_of(world.put("k", b"other")).status == PutStatus.CREATED
    assert world.value("k") == b"other"


# --- elsewhere -------------------------------------------------------------------------------


def compare(world: Harness, key: str, value: bytes, **options: Any) -> tuple[PutOperation, Any]:
    """Start a put that asks a holder for its slot; the put and the question."""
    operation = world.put(key, value, **options)
    assert not operation.done
    (ask,) = world.asks(DataKind.GET)
    return operation, ask


def test_a_holder_is_asked_for_its_slot_only() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value")
    _, ask = compare(world, "k", b"value")
    assert ask.peer_id == world.others[0].peer_id
    assert isinstance(ask.request, Get)
    (item,) = ask.request.items
    assert (item.digest, item.first_chunk, item.slot) == (digest_of("k"), SLOT_ONLY, 5)
    assert world.find("k") is None, "nothing is published before the answer"


def items_of(ask: AskPeer) -> list[Any]:
    """The items that a question to a holder is about."""
    assert isinstance(ask.request, Get | SetExpiry)
    return list(ask.request.items)


def answer_homes(world: Harness) -> None:
    """The homes know of no more copies than this peer does."""
    world.core.tick(world.now)
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[]]))


def vouch(world: Harness, *, good: bool = True) -> None:
    """The holder that was asked to check its copy of another value finds it good, or drops it."""
    (ask,) = world.asks(DataKind.CHECK_COPY)
    assert ask.request == CheckCopy(digest_of("k"))
    world.answer(ask, CopyChecked(good, OTHER_INCARNATION, 99))


def test_a_copy_of_what_is_elsewhere_ends_when_that_does_unless_the_put_says_when() -> None:
    for ends, ttl in ((1_800_000_060_000, 0.0), (1_800_000_060_000, 5.0), (0, 5.0)):
        world = Harness(others=2)
        remote = remote_object("k", b"value", expires_unix_ms=ends)
        world.push(world.others[0], remote)
        _, ask = compare(world, "k", b"value", ttl_seconds=ttl)
        world.answer(ask, remote.reply)
        entry = present(world.find("k"))
        assert entry.expires_unix_ms == (1_800_000_005_000 if ttl else ends)
        answer_homes(world)
        asks = world.asks(DataKind.SET_EXPIRY)
        told = [item for ask in asks for item in items_of(ask)]
        wanted = ExpiryItem(digest_of("k"), *remote.version[:2], entry.expires_unix_ms)
        assert told == ([wanted] if ttl else [])


# --- a time to live of a second put -----------------------------------------------------------


@pytest.mark.parametrize("before", [0.0, 100.0, 1.0])
def test_the_ttl_of_a_second_put_replaces_that_of_the_object(before: float) -> None:
    world = Harness(others=2)
    entry = world.stored("k", b"value", ttl_seconds=before)
    world.hold(world.others[0], "k", b"value", entry.version.clock, entry.version.writer)
    world.hold(world.others[1], "k", b"older", entry.version.clock - 1, 1)
    kept = entry.expires_unix_ms
    assert end_of(world.put("k", b"value")).status == PutStatus.UNCHANGED
    assert entry.expires_unix_ms == kept, "a put without a ttl leaves it"
    put = world.put("k", b"value", ttl_seconds=7.0)
    assert entry.expires_unix_ms == int((world.core.unix(world.now) + 7.0) * 1000)
    answer_homes(world)
    (ask,) = world.asks(DataKind.SET_EXPIRY)
    assert ask.peer_id == world.others[0].peer_id, "whoever holds that version is told"
    assert not put.done
    world.answer(ask, ExpirySet(b"\1"))
    assert end_of(put).status == PutStatus.UNCHANGED
    trailer = present(decode_trailer(world.segment.table.trailer_bytes(entry)))
    assert trailer.expires_unix_ms == entry.expires_unix_ms, "readers of the mapping see it, too"
    check_segment(world.segment)
    world.now += 6.9
    world.core.tick(world.now)
    assert world.find("k") is entry
    world.now += 1.1
    world.core.tick(world.now)
    assert world.find("k") is None


def test_a_holder_sets_the_end_of_that_version_only() -> None:
    world = Harness(others=2)
    author, stranger = world.others
    written = world.hold(author, "k", b"value", writer=writer_of(author.peer_id))
    world.core.operations.fetch(digest_of("k"), world.now)
    world.deliver(world.pull_wanted(), written)
    entry = present(world.find("k"))
    clock, writer, _ = entry.version
    ends = int(world.core.unix(world.now) * 1000) + 5000

    def serve(*facts: Any, by: Other = author) -> Any:
        request = SetExpiry([ExpiryItem(*each) for each in facts])
        return world.serve(by, DataKind.SET_EXPIRY, request)

    older = (digest_of("k"), clock - 1, writer, ends)
    absent = (digest_of("absent"), clock, writer, ends)
    assert serve(older, absent) == ExpirySet(b"\0\0")
    assert entry.expires_unix_ms == 0
    sooner = (digest_of("k"), clock, writer, ends)
    assert serve(sooner, by=stranger) == ExpirySet(b"\0"), "that would erase what another one wrote"
    assert serve(absent, sooner) == ExpirySet(b"\0\1")
    assert entry.expires_unix_ms == ends
    assert serve((digest_of("k"), clock, writer, ends - 1), by=stranger) == ExpirySet(b"\0")
    assert serve((digest_of("k"), clock, writer, ends + 1), by=stranger) == ExpirySet(b"\1")
    assert entry.expires_unix_ms == ends + 1
    for nonsense in ((b"short", 1, 1, 0), (bytes(16), 1, 1, -1), (bytes(16), 1, 1, 1 << 62)):
        with pytest.raises(ProtocolError):
            serve(nonsense)
    with pytest.raises(ProtocolError):
        serve(*[absent] * 65)


def test_who_shares_a_writers_short_name_ends_nothing() -> None:
    """A version names its writer by 16 bits, and identities cost nothing."""
    world = Harness(others=2)
    author, twin = world.others
    written = world.hold(author, "k", b"value", writer=writer_of(author.peer_id))
    world.core.operations.fetch(digest_of("k"), world.now)
    world.deliver(world.pull_wanted(), written)
    entry = present(world.find("k"))
    state = present(world.gossip.membership.resolve(twin.member))
    state.member = state.member & ~0xFFFF | entry.version.writer
    item = ExpiryItem(digest_of("k"), entry.version.clock, entry.version.writer, 1)
    for member in (author, twin):
        assert world.serve(member, DataKind.SET_EXPIRY, SetExpiry([item])) == ExpirySet(b"\0")
    assert entry.expires_unix_ms == 0


def test_a_batch_asks_homes_once_and_each_holder_for_64_objects_at_a_time() -> None:
    world = Harness(others=2, memory_bytes=1 << 20)
    keys = [f"k{number}" for number in range(100)]
    for key in keys:
        entry = world.stored(key, b"value")
        world.hold(world.others[0], key, b"value", entry.version.clock, entry.version.writer)
    puts = [world.put(key, b"value", ttl_seconds=7.0) for key in keys]
    puts.append(world.put(keys[0], b"value", ttl_seconds=9.0))
    assert not any(put.done for put in puts)
    world.core.tick(world.now)
    lookups = world.asks(DataKind.LOOKUP)
    assert len({ask.peer_id for ask in lookups}) == len(lookups)
    for ask in lookups:
        world.answer(ask, Locations([[]] * len(keys)))
    asks = world.asks(DataKind.SET_EXPIRY)
    assert [len(items_of(ask)) for ask in asks] == [64, 36]
    last = int((world.core.unix(world.now) + 9.0) * 1000)
    assert items_of(asks[0])[0].expires_unix_ms == last
    for ask in asks:
        world.answer(ask, None)
    assert {end_of(put).status for put in puts} == {PutStatus.UNCHANGED}
    world.check_idle()


def test_a_value_that_fills_its_extent_is_given_an_end() -> None:
    for length in range(3900, 4097):
        world = Harness()
        entry = world.stored("k", bytes(length))
        world.put("k", bytes(length), ttl_seconds=5.0)
        trailer = present(decode_trailer(world.segment.table.trailer_bytes(entry)))
        assert trailer.expires_unix_ms == entry.expires_unix_ms > 0
        check_segment(world.segment)


# --- tensors -----------------------------------------------------------------------------------


def test_a_tensor_of_another_shape_is_another_value() -> None:
    world = Harness()
    first = world.put("k", b"12345678", dtype="float32", shape=(2,))
    assert end_of(first).status == PutStatus.CREATED
    assert end_of(world.put("k", b"12345678")).status == PutStatus.UNCHANGED
    same = world.put("k", b"12345678", dtype="float32", shape=(2,))
    assert end_of(same).status == PutStatus.UNCHANGED
    other = world.put("k", b"12345678", dtype="float32", shape=(2, 1))
    assert end_of(other).status == PutStatus.KEPT_EXISTING
    new = world.put("k", b"12345678", dtype="int32", shape=(2,), overwrite=True)
    assert end_of(new).status == PutStatus.CREATED
    entry = present(world.find("k"))
    assert (entry.dtype, entry.shape) == ("int32", (2,))


def test_the_bytes_of_a_tensor_elsewhere_are_that_tensor_here_too() -> None:
    world = Harness(others=2)
    remote = remote_object("k", b"12345678", dtype="float32", shape=(2,))
    world.push(world.others[0], remote)
    operation, ask = compare(world, "k", b"12345678", ttl_seconds=0.0)
    world.answer(ask, remote.reply)
    world.deliver(world.pull_wanted(), remote)
    assert end_of(operation).status == PutStatus.UNCHANGED
    entry = present(world.find("k"))
    assert (entry.version, entry.dtype, entry.shape) == (remote.version, "float32", (2,))
    assert not entry.soft
    world.check_idle()


def test_what_its_holder_does_not_give_is_created_anew() -> None:
    world = Harness(others=2)
    remote = remote_object("k", b"12345678", dtype="float32", shape=(2,))
    world.push(world.others[0], remote)
    operation, ask = compare(world, "k", b"12345678")
    world.answer(ask, remote.reply)
    pull = world.pull_wanted()
    failure = HolderReport(world.others[0].member, int(Code.UNAVAILABLE), "")
    world.core.operations.pulled(pull.operation, PullOutcome(False, (failure,), None, 0, ""), world.now)
    assert end_of(operation).status == PutStatus.CREATED
    world.check_idle()


def test_a_put_that_is_cancelled_while_its_object_is_brought_leaves_nothing() -> None:
    world = Harness(others=2)
    remote = remote_object("k", b"12345678", dtype="float32", shape=(2,))
    world.push(world.others[0], remote)
    operation, ask = compare(world, "k", b"12345678")
    world.answer(ask, remote.reply)
    world.core.operations.cancel(operation, world.now)
    assert not world.core.operations.fetching
    world.check_idle()


# --- false checksums ----------------------------------------------------------------------------


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("length", [5, 100_000])
def test_an_object_that_was_put_with_false_sums_is_in_nobodys_way(length: int, same: bool) -> None:
    world = Harness(memory_bytes=1 << 20)
    false = b"x" * length
    entry = world.stored("k", false)
    world.segment._buffer[entry.offset : entry.offset + length] = b"y" * length
    put = world.put("k", false if same else b"z" * length)
    for effect in world.effects(CheckObject):
        assert effect.entry is entry
        assert entry.references, "it is held while it is looked at"
        payload = world.segment.payload(entry)
        world.core.checks.ended(entry, chunk_sums(payload), world.now)
    assert end_of(put).status == PutStatus.CREATED
    assert world.value("k") == (false if same else b"z" * length)
    (note,) = world.notes("spoilt")
    assert "the bytes of 'k'" in note
    world.check_idle()


def test_an_object_is_compared_once_however_many_wait() -> None:
    world = Harness(memory_bytes=1 << 20)
    entry = world.stored("k", bytes(100_000))
    puts = [world.put("k", bytes(99_000 + number)) for number in range(3)]
    gone = world.put("k", bytes(100_000))
    world.core.operations.cancel(gone, world.now)
    assert len(world.effects(CheckObject)) == 1
    world.core.checks.ended(entry, chunk_sums(bytes(100_000)), world.now)
    assert [end_of(put).status for put in puts] == [PutStatus.KEPT_EXISTING] * 3
    assert end_of(world.put("k", bytes(7))).status == PutStatus.KEPT_EXISTING
    assert not world.effects(CheckObject), "it is known to be good"
    world.check_idle()


def test_a_false_object_elsewhere_is_dropped_and_the_put_goes_on() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"false")
    operation, ask = compare(world, "k", b"true")
    world.answer(ask, remote.reply)
    vouch(world, good=False)
    end = end_of(operation)
    assert end.status == PutStatus.CREATED
    assert end.version > remote.version
    world.check_idle()


def test_a_holder_checks_its_copy_when_it_is_asked() -> None:
    world = Harness(others=1)

    def check(*, again: bool = False) -> Any:
        request = CheckCopy(digest_of("k"), again=again)
        return reply_of(world.serve(world.others[0], DataKind.CHECK_COPY, request))

    assert not check().good
    entry = world.stored("k", b"value")
    assert check().good
    world.segment._buffer[entry.offset] ^= 1
    assert check().good, "it was compared before"
    assert not check(again=True).good
    assert world.find("k") is None
    with pytest.raises(ProtocolError):
        world.serve(world.others[0], DataKind.CHECK_COPY, CheckCopy(b"short"))


def test_a_holder_whose_bytes_a_reader_found_spoilt_is_told_once_in_a_while() -> None:
    world = Harness(others=1)
    other = world.others[0]
    for _ in range(3):
        failure = HolderReport(other.member, int(Code.STALE))
        world.core.holders.failed(digest_of("k"), failure, world.now)
    (ask,) = world.asks(DataKind.CHECK_COPY)
    assert (ask.peer_id, ask.request) == (other.peer_id, CheckCopy(digest_of("k"), again=True))


def test_a_copy_of_what_is_elsewhere_is_a_firm_one_when_it_is_pinned() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"value")
    _, ask = compare(world, "k", b"value", pin=2)
    world.answer(ask, remote.reply)
    entry = present(world.find("k"))
    assert (entry.soft, entry.pin) == (False, 2)


def test_the_same_root_elsewhere_makes_a_soft_additional_copy_of_that_version() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value")
    world.answer(ask, remote.reply)
    assert end_of(operation) == PutEnd(PutStatus.UNCHANGED, 2, 1, remote.version)
    entry = present(world.find("k"))
    assert (entry.version, entry.soft) == (remote.version, True)
    record = present(world.announced("k"))
    assert record.soft
    world.check_idle()


def test_what_is_kept_says_how_many_copies_of_it_are_known() -> None:
    world = Harness(others=3)
    entry = world.stored("k", b"value")
    for other in world.others[:2]:
        world.hold(other, "k", b"value", entry.version.clock, entry.version.writer)
    world.hold(world.others[2], "k", b"older", entry.version.clock - 1, 1)
    assert end_of(world.put("k", b"other")).copies == 3
    assert end_of(world.put("k", b"value")).copies == 3
    world.die(world.others[0])
    assert end_of(world.put("k", b"other")).copies == 2
    elsewhere = Harness(others=2)
    remote = elsewhere.hold(elsewhere.others[0], "k", b"value")
    elsewhere.hold(elsewhere.others[1], "k", b"value")
    operation, ask = compare(elsewhere, "k", b"other")
    elsewhere.answer(ask, remote.reply)
    vouch(elsewhere)
    assert end_of(operation) == PutEnd(PutStatus.KEPT_EXISTING, 2, 1, remote.version)


def test_another_root_elsewhere_keeps_what_exists() -> None:
    world = Harness(others=2)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"other", replicas=2)
    world.answer(ask, remote.reply)
    assert not operation.done, "its holder is asked whether it is good"
    vouch(world)
    assert end_of(operation) == PutEnd(PutStatus.KEPT_EXISTING, 1, 2, remote.version)
    assert world.find("k") is None
    assert world.announced("k") is None
    world.check_idle()


@pytest.mark.parametrize(("key", "clock"), [("k", clock_at(60.0)), ("other key", clock_at(0.0))])
def test_a_slot_from_the_future_or_of_another_key_is_no_answer(key: str, clock: int) -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value")
    world.answer(ask, remote_object(key, b"value", clock=clock).reply)
    assert end_of(operation).status == PutStatus.CREATED
    assert world.core.clock.latest < clock_at(1.0)
    assert world.core.counters["holder_failures"] == 1


@pytest.mark.parametrize(
    "reply",
    [
        None,
        Failure(int(Code.BUSY), "later"),
        Objects([]),
        Objects([ObjectReply(ObjectStatus.OK, b"torn", b"")]),
        Objects([ObjectReply(ObjectStatus.BUSY)]),
    ],
    ids=["silent", "failure", "empty", "torn", "busy"],
)
def test_holders_that_do_not_tell_are_asked_in_turn_and_then_the_key_is_new(reply: Any) -> None:
    world = Harness(others=4)
    for other in world.others:
        world.hold(other, "k", b"value")
    operation, ask = compare(world, "k", b"other")
    asked = [ask.peer_id]
    for _ in range(2):
        world.answer(ask, reply)
        (ask,) = world.asks(DataKind.GET)
        asked.append(ask.peer_id)
    world.answer(ask, reply)
    assert end_of(operation).status == PutStatus.CREATED
    assert len(set(asked)) == 3, "three holders, each once"
    assert world.core.counters["holder_failures"] == 3
    world.check_idle()


def test_a_silent_holder_is_avoided_and_probed() -> None:
    world = Harness(others=2)
    first = world.hold(world.others[0], "k", b"value")
    world.push(world.others[1], first)
    _, ask = compare(world, "k", b"value")
    world.effects(Ask)
    world.answer(ask, None)
    copies = world.core.copies.known(digest_of("k"), world.now)
    assert copies[-1].peer_id == ask.peer_id, "its copy comes last now"
    assert world.core.copies.known(digest_of("k"), world.now + 3.1)[0].peer_id == ask.peer_id
    assert [probe.peer_id for probe in world.effects(Ask)] == [ask.peer_id]


def test_a_holder_without_the_key_is_believed_until_its_log_moves_on() -> None:
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"other")
    world.answer(ask, NOT_FOUND)
    assert end_of(operation).status == PutStatus.CREATED
    assert all(copy.local for copy in world.core.copies.known(digest_of("k"), world.now))
    world.others[0].sequence = 99
    world.push(world.others[0], remote)
    assert len(world.core.copies.known(digest_of("k"), world.now)) == 2


def test_only_unreachable_holders_make_the_key_new() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"value")
    world.die(world.others[0])
    operation = world.put("k", b"other")
    assert end_of(operation).status == PutStatus.CREATED
    assert not world.asks(DataKind.GET)


def test_a_batch_asks_each_holder_once_and_goes_on_in_steps() -> None:
    world = Harness(others=2, memory_bytes=4 << 20)
    keys = [f"k{number}" for number in range(300)]
    remotes = {digest_of(key): world.hold(world.others[0], key, b"value") for key in keys}
    puts = [world.put(key, b"value") for key in keys]
    asks = world.asks(DataKind.GET)
    assert [len(items_of(ask)) for ask in asks] == [256, 44]
    for ask in asks:
        found = [remotes[item.digest].reply.items[0] for item in items_of(ask)]
        world.answer(ask, Objects(found))
    assert [sum(put.done for put in puts[:256]), sum(put.done for put in puts[256:])] == [32, 32]
    while not all(put.done for put in puts):
        world.core.tick(world.now)
    assert {end_of(put).status for put in puts} == {PutStatus.UNCHANGED}
    world.check_idle()


@pytest.mark.parametrize("value", [b"mine", b"theirs"])
def test_of_two_puts_at_once_the_second_finds_what_the_first_made(value: bytes) -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"gone")
    first, second = world.put("k", b"mine"), world.put("k", value)
    (ask,) = world.asks(DataKind.GET)
    gone = NOT_FOUND.items[0]
    world.answer(ask, Objects([gone, gone]))
    assert end_of(first).status is PutStatus.CREATED
    same = value == b"mine"
    assert end_of(second).status is (PutStatus.UNCHANGED if same else PutStatus.KEPT_EXISTING)
    assert world.value("k") == b"mine"
    world.check_idle()


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_is_gone", [False, True])
def test_a_put_that_is_cancelled_while_it_compares_leaves_nothing(client_is_gone: bool) -> None:
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value")
    if client_is_gone:
        world.segment.drop_session(HOLDER)
    world.core.operations.cancel(operation, world.now)
    assert isinstance(operation.result, DeadlineExceeded)
    world.answer(ask, remote.reply)  # too late
    assert world.find("k") is None
    world.check_idle()


def test_a_put_whose_question_the_shell_could_not_carry_out_ends() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value")
    world.core.operations.abandon(ask.operation, world.now)
    assert end_of(operation).status is PutStatus.CREATED, "as if the holder were silent"
    world.core.operations.abandon(ask.operation, world.now)
    world.check_idle()


def test_a_put_that_is_cancelled_while_it_replicates_stays() -> None:
    world = Harness(others=2)
    operation = world.put("k", b"value", replicas=2)
    (ask,) = world.asks(DataKind.REPLICATE)
    world.core.operations.cancel(operation, world.now)
    assert world.value("k") == b"value"
    world.answer(ask, Replicated(operation.facts.root, 0))
    world.check_idle()


@pytest.mark.parametrize("reply", ["same", "other", "silent"])
def test_a_client_that_goes_while_a_holder_is_asked_harms_nobody(reply: str) -> None:
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value" if reply == "same" else b"other")
    operation, ask = compare(world, "k", b"value")
    world.segment.drop_session(HOLDER)
    world.answer(ask, None if reply == "silent" else remote.reply)
    if reply == "other":
        vouch(world)
    assert operation.done
    assert world.find("k") is None
    world.check_idle()


def test_what_was_removed_while_it_was_compared_does_not_stand_in_the_way() -> None:
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value")
    operation, ask = compare(world, "k", b"value")
    world.learn_floor(world.others[0], digest_of("k"), remote.version)
    world.answer(ask, remote.reply)
    end = end_of(operation)
    assert end.status == PutStatus.CREATED
    assert remote.version.covers(end.version) is False
    world.check_idle()


@pytest.mark.parametrize("value", [b"value", b"other"])
def test_a_put_after_a_flush_ignores_who_has_not_heard_of_it(value: bytes) -> None:
    """The other peer is silent, and still announces what was flushed."""
    world = Harness(others=1)
    remote = world.hold(world.others[0], "k", b"value")
    namespace = namespace_digest(NAMESPACE)
    world.core.floors.write(namespace, remote.version, world.now, scope=SCOPE_NAMESPACE)
    assert end_of(world.put("k", value)).status == PutStatus.CREATED
    assert world.value("k") == value


def test_a_put_during_a_sweep_does_not_rely_on_what_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Harness()
    monkeypatch.setattr(sweeping, "WITHDRAWN_PER_STEP", 1)
    for key in ("a", "b", "c"):
        world.stored(key, b"value")
    newest = Version(world.core.clock.latest, 0xFFFF)
    namespace = namespace_digest(NAMESPACE)
    world.core.floors.write(namespace, newest, world.now, scope=SCOPE_NAMESPACE)
    left = [key for key in ("a", "b", "c") if world.find(key) is not None]
    assert left, "the sweep is not over"
    assert end_of(world.put(left[0], b"value")).status == PutStatus.CREATED
    world.pass_time(0.1)
    assert world.value(left[0]) == b"value"
    world.check_idle()


# --- two at once -----------------------------------------------------------------------------


def concurrent_puts(world: Harness, other: Other, later: bool) -> bool:
    """Put `k` here, then hear of a first put of it elsewhere; whether this peer kept its own."""
    mine = world.stored("k", b"mine").version
    clock = mine.clock + (1 if later else -1)
    world.push(other, remote_object("k", b"theirs", clock=clock))
    world.core.gossip_arrived(world.now)
    return world.find("k") is not None


@pytest.mark.parametrize("later", [False, True])
def test_of_two_concurrent_first_puts_the_higher_version_stays(later: bool) -> None:
    world = Harness(others=2)
    assert concurrent_puts(world, world.others[0], later) is not later
    (record,) = [world.announced("k")]
    assert (record is None) is later, "what was dropped is withdrawn"
    newest = world.core.copies.known(digest_of("k"), world.now)[0]
    assert newest.local is not later
    world.check_idle()


def test_a_newer_version_that_cannot_be_reached_drops_nothing() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"theirs", clock=clock_at(5.0))
    world.die(world.others[0])
    assert end_of(world.put("k", b"mine")).status == PutStatus.CREATED
    world.core.gossip_arrived(world.now)
    assert world.value("k") == b"mine"


def test_a_newer_version_known_before_the_put_drops_the_older_at_once() -> None:
    """The holder did not answer the question, so the put went ahead; its location is known all the same."""
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"theirs", clock=clock_at(5.0))
    operation, ask = compare(world, "k", b"mine")
    world.answer(ask, Failure(int(Code.BUSY), "later"))
    assert end_of(operation).status == PutStatus.CREATED
    world.core.gossip_arrived(world.now)
    assert world.find("k") is None
