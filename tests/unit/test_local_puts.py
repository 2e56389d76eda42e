"""A peer's work for local clients that put and get, without sockets."""

from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pstore.core.operation import LateBooks, Operation
from p2pstore.gossip.records import LocationRecord
from p2pstore.home_messages import Push
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import Access, LocalClient
from p2pstore.objects import Version, chunk_sums, key_digest
from p2pstore.peer.for_clients.local_gets import LocalGets
from p2pstore.peer.for_clients.local_puts import LocalPuts
from p2pstore.put_facts import PutOptions
from p2pstore.runtime.stepping import run_through
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Locations
from p2pstore.wire import Code
from simulation.segment_checks import check_segment
from tests.unit.core_harness import (
    HOLDER,
    NAMESPACE,
    OTHER_INCARNATION,
    Harness,
    clock_at,
    digests_asked,
)
from tests.unit.test_core_partitioned import foreign_key, partitioned

VALUE = b"v" * 5000
ROOM = (len(VALUE), 128, 1)
CLIENT = LocalClient(7, NAMESPACE, Access.WRITE, 1, "")


class Loop:
    """A client that puts value after value, each into room that came with the answer to the one before."""

    def __init__(self, world: Harness) -> None:
        node: Any = SimpleNamespace(core=world.core, now=world.now, ssd=None)
        self.puts = LocalPuts(node, issuer=None)  # type: ignore[arg-type]  # no ticket is asked for
        reserved = run_through(self.puts.reserve(CLIENT, local.Reserve([ROOM], NAMESPACE)))
        assert isinstance(reserved, local.Reserved)
        self.room = reserved.spans[0]

    def put(self, key: str, again: tuple[int, int, int] | None = ROOM) -> local.Committed:
        number = self.room.first
        segment = self.puts._segment
        segment.reservation_view(number, session=CLIENT.session)[: len(VALUE)] = VALUE
        columns = [key], [(number, 1)], [len(VALUE)], chunk_sums(VALUE), [PutOptions()]
        commit = local.Commit(NAMESPACE, *columns, again=[again] if again else [])
        answer = self.puts.commit(CLIENT, commit)
        assert isinstance(answer, local.Committed)
        assert not answer.outcomes[0][1].error.code
        if again:
            self.room = answer.again[0]
        return answer


def fill(world: Harness) -> None:
    """Put until something has to go."""
    number = 0
    while world.segment.free_bytes:
        world.stored(f"before {number}", b"x")
        number += 1


def test_what_the_next_put_needs_is_evicted_after_the_answer() -> None:
    world = Harness(memory_bytes=256 * 1024)
    loop = Loop(world)
    fill(world)
    loop.put("first")
    for number in range(20):
        loop.puts.make_ready()
        there = world.segment.object_count
        loop.put(f"k{number}")
        assert world.segment.object_count == there + 1
    assert world.announced("before 0") is None
    world.segment.drop_session(CLIENT.session)
    check_segment(world.segment)


def test_room_is_made_ahead_for_nobody_who_asks_for_none() -> None:
    world = Harness(memory_bytes=256 * 1024)
    loop = Loop(world)
    loop.put("first")
    loop.puts.make_ready()
    loop.put("last", again=None)
    fill(world)
    there = world.segment.object_count
    loop.puts.make_ready()
    assert world.segment.object_count == there


def test_room_is_held_ready_for_the_next_put_and_no_longer() -> None:
    world = Harness(memory_bytes=256 * 1024)
    reservations = world.segment.reservations

    def held_by(loop: Loop) -> set[int]:
        loop.put(f"k{world.segment.object_count}")
        assert set(reservations.of(CLIENT.session)) == {loop.room.first}
        loop.puts.make_ready()
        loop.puts.make_ready()  # a request of another kind came between
        return set(reservations.of(CLIENT.session)) - {loop.room.first}

    loop = Loop(world)
    for _ in range(3):
        ready = held_by(loop)
        assert len(ready) == 1
        loop.put("again" + str(ready))
        assert {loop.room.first} == ready
        loop.puts.make_ready()
        run_through(loop.puts.abort(CLIENT, local.Abort([loop.room.first])))
        assert not reservations.of(CLIENT.session)
        loop = Loop(world)
    held_by(loop)
    loop.put("larger", again=(2 * len(VALUE), 128, 1))
    assert set(reservations.of(CLIENT.session)) == {loop.room.first}
    loop.puts.client_gone(CLIENT)
    world.segment.drop_session(CLIENT.session)
    loop.puts.make_ready()
    assert not reservations.of(CLIENT.session)
    check_segment(world.segment)


def test_what_was_just_put_does_not_go_for_what_may_come() -> None:
    world = Harness(memory_bytes=64 * 1024)
    loop = Loop(world)
    while world.segment.free_bytes:
        entry = world.stored(f"k{world.segment.object_count}", b"x")
        world.segment.leases.lease(entry, session=HOLDER, now=world.core.unix(world.now))
    assert loop.put("the last one that fits").again[0].error.code == Code.CAPACITY_EXCEEDED
    loop.puts.make_ready()
    assert world.find("the last one that fits") is not None


def test_an_answer_goes_before_its_books() -> None:
    world = Harness(memory_bytes=256 * 1024)
    loop, books = Loop(world), world.core.books
    fill(world)
    books.late = True
    loop.put("k", again=None)
    assert world.find("k") is not None
    assert world.announced("k") is None
    assert not world.core.proofs._unsigned.keys() & {key_digest("k", NAMESPACE)}
    # Evicting settles the books first.
    run_through(loop.puts.reserve(CLIENT, local.Reserve([ROOM], NAMESPACE)))
    assert world.announced("k") is not None
    assert world.find("before 0") is None
    assert world.announced("before 0") is not None
    books.settle()
    assert world.announced("before 0") is None
    [entry], _ = world.segment.listing.page(NAMESPACE, "k", "", 1)
    assert entry in world.segment.objects.order
    world.segment.drop_session(CLIENT.session)
    check_segment(world.segment)


def test_books_are_kept_in_order_and_none_is_lost() -> None:
    books, kept = LateBooks(), list[int]()
    books.keep(lambda: kept.append(0))
    books.late = True

    def fail() -> None:
        raise ZeroDivisionError

    books.keep(lambda: kept.append(1))
    books.keep(fail)
    books.keep(lambda: books.keep(lambda: kept.append(2)))  # kept at once
    books.keep(lambda: kept.append(3))
    assert kept == [0]
    with pytest.raises(ZeroDivisionError):
        books.settle()
    assert kept == [0, 1]
    assert books.late
    books.settle()
    assert kept == [0, 1, 2, 3]


@pytest.mark.parametrize("item", [(-5, 1, 1), (1, 1 << 40, 1), (1 << 40, 1, 1)])
def test_nonsense_that_is_asked_for_ahead_fails_no_put(item: tuple[int, int, int]) -> None:
    world = Harness(memory_bytes=64 * 1024)
    loop = Loop(world)
    assert loop.put("k", again=item).again[0].error.code
    loop.puts.make_ready()
    assert world.find("k") is not None


def test_an_abort_passes_over_what_has_ended() -> None:
    world = Harness()
    loop = Loop(world)
    first = loop.room.first
    loop.put("k")
    second = loop.room.first
    used = world.segment.used_bytes
    run_through(loop.puts.abort(CLIENT, local.Abort([first, 1 << 40, second])))
    assert world.segment.used_bytes < used


def gets_of(world: Harness) -> LocalGets:
    async def complete(operation: Operation) -> Any:
        assert operation.done
        return operation.result

    node: Any = SimpleNamespace(
        core=world.core, now=world.now, complete=complete, routes=SimpleNamespace(reading_order=list)
    )
    return LocalGets(node, issuer=None, max_leased_bytes=0)  # type: ignore[arg-type]  # no ticket is asked for


@pytest.mark.parametrize(("homes_answer", "code"), [(False, Code.UNAVAILABLE), (True, Code.NO_SUCH_KEY)])
async def test_a_plan_for_a_key_of_which_nobody_can_tell_says_so(homes_answer: bool, code: Code) -> None:
    world = partitioned()
    digest = key_digest(foreign_key(world), NAMESPACE)
    planning = gets_of(world).plan(CLIENT, local.Plan(digest))
    assert isinstance(planning, Awaitable)
    for _ in range(200):
        for ask in world.asks(DataKind.LOOKUP):
            reply = Locations([[] for _ in digests_asked(ask)], [0]) if homes_answer else None
            world.answer(ask, reply)
        world.pass_time(0.02)
    planned = await planning
    assert isinstance(planned, local.Planned)
    (item,) = planned.items
    assert item.error.code == code
    assert not item.holders


@pytest.mark.parametrize(("silent", "code"), [(True, Code.UNAVAILABLE), (False, Code.NO_SUCH_KEY)])
async def test_a_plan_for_a_key_that_is_claimed_says_whether_the_claim_was_answered(
    silent: bool, code: Code
) -> None:
    world = partitioned()
    digest, holder = key_digest(foreign_key(world), NAMESPACE), world.others[0]
    world.silent = {holder.peer_id} if silent else set()
    claimed = LocationRecord(digest, Version(clock_at(-1.0), 9, 5), 5, 1).encode()
    world.serve(holder, DataKind.PUSH, Push(OTHER_INCARNATION, [1], claimed))
    planning = gets_of(world).plan(CLIENT, local.Plan(digest, deadline_ms=2_000))
    assert isinstance(planning, Awaitable)
    for _ in range(200):
        for ask in world.asks(DataKind.LOOKUP):
            world.answer(ask, Locations([[] for _ in digests_asked(ask)]))
        world.pass_time(0.02)
    planned = await planning
    assert isinstance(planned, local.Planned)
    assert [item.error.code for item in planned.items] == [code]
