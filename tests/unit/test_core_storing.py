"""Values that arrive from elsewhere: decisions without their bytes, reservations, and puts."""

from typing import Any

import pytest
from msgspec.structs import replace

from p2pstore.core.puts.placing import MAX_INCOMING, IncomingStore, IncomingStores, stored_reply
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    ObjectTooLarge,
    ProtocolError,
    Unavailable,
)
from p2pstore.gossip.records import decode_location
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import chunk_sums, root_checksum
from p2pstore.put_facts import PutStatus
from p2pstore.runtime.stepping import run_through
from p2pstore.transfer.data_messages import DataKind, Store, Stored
from p2pstore.transfer.peer_messages import CopyChecked
from tests.unit.core_harness import NAMESPACE, Harness, clock_at, remote_object

MEMBER = b"a member"


def request(key: str, value: bytes, **facts: Any) -> Store:
    sums = chunk_sums(value)
    fields: dict[str, Any] = {"root": root_checksum(len(value), sums), "clock": 0}
    fields |= {"length": len(value), "sums": sums} | facts
    return Store(NAMESPACE, key, **fields)


def arrive(
    world: Harness, stores: IncomingStores, wanted: Store, value: bytes
) -> tuple[IncomingStore, PutOperation]:
    """The whole way of a value whose bytes are needed."""
    assert stores.examine(wanted, world.now).result is None
    incoming = run_through(stores.open(wanted, MEMBER, world.now))
    stores.payload(incoming)[:] = value
    return incoming, stores.put(incoming, world.now)


def reply_to(world: Harness, wanted: Store, operation: PutOperation) -> Stored:
    assert operation.done
    return stored_reply(world.core, operation, world.now)


def test_a_new_value_is_created_and_its_location_told() -> None:
    world = Harness(others=4)
    stores = IncomingStores(world.core)
    wanted = request("k", b"value", pin=2, ttl_ms=60_000, dtype="uint8", shape=(5,))
    incoming, operation = arrive(world, stores, wanted, b"value")
    stored = reply_to(world, wanted, operation)
    stores.close(incoming)
    assert (stored.status, stored.copies, stored.wanted) == (PutStatus.CREATED, 1, 1)
    entry = world.find("k")
    assert entry is not None
    assert (world.value("k"), entry.pin, entry.dtype, entry.shape, entry.soft) == (
        b"value",
        Pin.HARD,
        "uint8",
        (5,),
        False,
    )
    assert entry.expires_unix_ms == int((world.core.unix(world.now) + 60) * 1000)
    record = decode_location(stored.record)
    assert (record.digest, record.version.clock) == (entry.digest, stored.clock)
    assert (stored.incarnation, stored.sequence) == (world.core.incarnation, world.gossip.log.sequence)
    assert stores.count == 0
    world.check_idle()


def test_a_value_from_elsewhere_is_within_its_namespaces_quota() -> None:
    world = Harness(quotas={NAMESPACE: 64 * 1024})
    stores = IncomingStores(world.core)
    incoming, _ = arrive(world, stores, request("k", b"value"), b"value")
    stores.close(incoming)
    assert world.segment.quotas[NAMESPACE].kept_bytes == 4096


def test_its_version_is_above_what_the_putting_peer_has_seen() -> None:
    world = Harness()
    stores = IncomingStores(world.core)
    wanted = request("k", b"value", clock=clock_at(9.0))
    incoming, operation = arrive(world, stores, wanted, b"value")
    assert reply_to(world, wanted, operation).clock > clock_at(9.0)
    stores.close(incoming)


def test_a_clock_from_the_far_future_is_refused_and_not_taken_over() -> None:
    world = Harness()
    with pytest.raises(Unavailable, match="clock"):
        IncomingStores(world.core).examine(request("k", b"v", clock=clock_at(11.0)), world.now)
    assert world.stored("other", b"v").version.clock < clock_at(1.0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_bytes_need_not_come_again(overwrite: bool) -> None:
    world = Harness()
    stores = IncomingStores(world.core)
    entry = world.stored("k", b"value")
    wanted = request("k", b"value", overwrite=overwrite, pin=1)
    stored = reply_to(world, wanted, stores.examine(wanted, world.now))
    assert (stored.status, stored.clock) == (PutStatus.UNCHANGED, entry.version.clock)
    assert entry.pin is Pin.SOFT, "a firmer pin is taken over"
    world.check_idle()


def test_other_bytes_are_refused_before_they_come_unless_they_overwrite() -> None:
    world = Harness()
    stores = IncomingStores(world.core)
    world.stored("k", b"value")
    wanted = request("k", b"other")
    stored = reply_to(world, wanted, stores.examine(wanted, world.now))
    assert stored.status == PutStatus.KEPT_EXISTING
    incoming, operation = arrive(world, stores, request("k", b"other", overwrite=True), b"other")
    assert operation.result.status is PutStatus.CREATED
    stores.close(incoming)
    assert world.value("k") == b"other"
    world.check_idle()


def test_a_value_that_is_elsewhere_is_compared_as_for_an_own_client() -> None:
    world = Harness(others=2)
    stores = IncomingStores(world.core)
    thing = remote_object("k", b"theirs")
    world.push(world.others[0], thing)
    wanted = request("k", b"mine")
    incoming, operation = arrive(world, stores, wanted, b"mine")
    (ask,) = world.asks(DataKind.GET)
    world.answer(ask, thing.reply)
    (doubt,) = world.asks(DataKind.CHECK_COPY)
    world.answer(doubt, CopyChecked(True))
    stored = reply_to(world, wanted, operation)
    assert (stored.status, stored.record) == (PutStatus.KEPT_EXISTING, b"")
    stores.close(incoming)
    assert world.find("k") is None
    world.check_idle()


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"root": 1}, ProtocolError),
        ({"sums": b"12345678"}, ProtocolError),
        ({"length": 4}, ProtocolError),
        ({"length": -1}, ValueError),
        ({"length": 1 << 33}, ObjectTooLarge),
        ({"replicas": 0}, ValueError),
        ({"replicas": 65}, ValueError),
        ({"pin": 3}, ValueError),
        ({"ttl_ms": -1}, ValueError),
        ({"ttl_ms": 1 << 60}, ValueError),
        ({"key": ""}, ValueError),
        ({"key": "k" * 1025}, ValueError),
        ({"namespace": "n" * 256}, ValueError),
        ({"sums": b""}, ProtocolError),
    ],
)
def test_nonsense_is_refused(facts: dict[str, Any], error: type[Exception]) -> None:
    world = Harness()
    with pytest.raises(error):
        IncomingStores(world.core).examine(replace(request("k", b"value"), **facts), world.now)
    world.check_idle()


def test_metadata_that_no_trailer_holds_is_refused_and_leaves_nothing() -> None:
    world = Harness()
    stores = IncomingStores(world.core)
    with pytest.raises(ValueError, match="metadata"):
        run_through(stores.open(request("k", b"value", shape=(2**60,) * 8000), MEMBER, world.now))
    assert stores.count == 0
    world.check_idle()


def test_what_does_not_come_gives_its_room_back() -> None:
    world = Harness()
    stores = IncomingStores(world.core)
    incoming = run_through(stores.open(request("k", b"value"), MEMBER, world.now))
    assert world.segment.used_bytes == 4096
    stores.close(incoming)
    stores.close(incoming)  # the end of a connection and of its peer may both say so
    assert stores.count == 0
    world.check_idle()


def test_a_cancelled_put_is_told_as_such() -> None:
    world = Harness(others=1)
    stores = IncomingStores(world.core)
    world.push(world.others[0], remote_object("k", b"theirs"))
    wanted = request("k", b"mine")
    incoming, operation = arrive(world, stores, wanted, b"mine")
    world.core.operations.cancel(operation, world.now)
    with pytest.raises(DeadlineExceeded):
        reply_to(world, wanted, operation)
    stores.close(incoming)
    for ask in world.asks(DataKind.GET):
        world.answer(ask, None)
    world.check_idle()


def test_values_on_their_way_take_at_most_half_of_the_memory_together() -> None:
    world = Harness(memory_bytes=256 * 1024)
    stores = IncomingStores(world.core)
    third = bytes(80 * 1024)
    first = run_through(stores.open(request("a", third), MEMBER, world.now))
    with pytest.raises(CapacityExceeded, match="on their way to this peer"):
        run_through(stores.open(request("b", third), b"another", world.now))
    with pytest.raises(CapacityExceeded, match="on their way from one member"):
        run_through(stores.open(request("c", b"x"), MEMBER, world.now))
    small = run_through(stores.open(request("c", bytes(40 * 1024)), b"another", world.now))
    stores.close(first)
    stores.close(small)
    large = run_through(
        stores.open(request("d", bytes(200 * 1024)), MEMBER, world.now)
    )  # alone, it may be larger
    with pytest.raises(CapacityExceeded):
        run_through(stores.open(request("e", b"x"), b"another", world.now))
    stores.close(large)
    world.check_idle()


def test_so_many_values_at_a_time() -> None:
    world = Harness(memory_bytes=4 * 1024 * 1024)
    stores = IncomingStores(world.core)
    opened = [
        run_through(stores.open(request(f"{n}", b""), b"%d" % (n % 2), world.now))
        for n in range(MAX_INCOMING)
    ]
    with pytest.raises(CapacityExceeded, match="256 values"):
        run_through(stores.open(request("more", b""), MEMBER, world.now))
    for incoming in opened[::2]:
        stores.close(incoming)
    with pytest.raises(CapacityExceeded, match="128 values are on their way from one member"):
        run_through(stores.open(request("more", b""), b"1", world.now))
    opened.append(run_through(stores.open(request("more", b""), MEMBER, world.now)))
    for incoming in opened:
        stores.close(incoming)
    world.check_idle()


def test_a_value_larger_than_the_memory_is_refused_at_once() -> None:
    world = Harness(memory_bytes=256 * 1024)
    with pytest.raises(ObjectTooLarge):
        run_through(IncomingStores(world.core).open(request("k", bytes(300 * 1024)), MEMBER, world.now))
    world.check_idle()


def test_room_that_is_made_withdraws_what_it_evicts() -> None:
    world = Harness(memory_bytes=256 * 1024)
    world.stored("old", bytes(200 * 1024))
    stores = IncomingStores(world.core)
    incoming = run_through(stores.open(request("k", bytes(200 * 1024)), MEMBER, world.now))
    assert world.announced("old") is None
    stores.close(incoming)
    world.check_idle()
