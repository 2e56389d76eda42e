"""Puts of local clients: room for the bytes, then publishing them."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, groupby, islice
from typing import Final, TypeAlias

import trio

from p2pstore.core.copies.replicate import PutAmongMany
from p2pstore.core.operation import Operation, PutEnd
from p2pstore.core.puts.placing import place
from p2pstore.core.puts.publishing import PUBLISHED_PER_STEP, Reserved, publish_new, reserve_many
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.errors import CapacityExceeded, DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, decode_location, member_of
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalClient
from p2pstore.local.put_columns import checked, values_of
from p2pstore.memory.entries import Reservation
from p2pstore.objects import DIGEST_BYTES, check_object_length
from p2pstore.peer.for_clients.local_queries import Answer, item_error
from p2pstore.peer.node import Node
from p2pstore.put_facts import PutFacts
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import in_turns, take_turns
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.wire import Empty

_NO_ROOM_AHEAD: Final = CapacityExceeded("no room can be spared for puts to come")
ABORTED_PER_STEP: Final = 64

RoomAhead: TypeAlias = tuple[int, int, int, str]
"""Length, trailer length, count, namespace."""
Started: TypeAlias = Operation | PutAmongMany | PutEnd | Exception
"""A put that was begun, or that ended at once."""


class LocalPuts:
    """RESERVE, COMMIT and ABORT; PLACE and STORED for what goes to other peers."""

    def __init__(self, node: Node, issuer: TicketIssuer) -> None:
        self._node = node
        self._issuer = issuer
        self._core = node.core
        self._segment = node.core.segment
        self._next_put: tuple[int, RoomAhead] | None = None
        """Session of a client that puts in a loop, and the room that it asked for last."""
        self._ready: dict[int, tuple[RoomAhead, Reservation]] = {}
        """Room that is held ready, by session."""

    def reserve(self, client: LocalClient, message: local.Reserve) -> Steps[local.Reserved]:
        """Room for each value, or why there is none."""
        made = yield from self._rooms_for(client, checked(message.rooms), message.namespace)
        return local.Reserved(_spans(made))

    def _rooms_for(
        self, client: LocalClient, rooms: Sequence[tuple[int, int, int]], namespace: str
    ) -> Steps[list[Reserved]]:
        return reserve_many(
            self._core, rooms, session=client.session, namespace=namespace, now=self._node.now
        )

    def commit(self, client: LocalClient, message: local.Commit) -> Answer:
        """Publish what was written; with more replicas than one, once they exist."""
        checked(message.again)
        started = in_turns(self._start_puts(client, message))
        if isinstance(started, list):
            durable = any(options.durable for options in message.options)
            if not durable and not any(_goes_on(each) for each, _ in groupby(started)):
                return in_turns(self._committed(client, message, started))
        return self._commit_later(client, message, started)

    def _start_puts(self, client: LocalClient, message: local.Commit) -> Steps[list[Started]]:
        started: list[Started] = []
        namespace = message.namespace
        values = values_of(message, partial(self._core.digests_of, namespace))
        for begin in range(0, len(values), PUBLISHED_PER_STEP):
            if begin:
                yield
            some = values[begin : begin + PUBLISHED_PER_STEP]
            ends = publish_new(
                self._core, some, session=client.session, namespace=namespace, now=self._node.now
            )
            if all(ends):  # nearly always
                started += filter(None, ends)
                continue
            for facts, end in zip(some, ends, strict=True):
                if end is not None:
                    started.append(end)
                    continue
                if started:
                    yield
                started.append(self._start_put(client, namespace, facts))
        return started

    def _start_put(self, client: LocalClient, namespace: str, item: PutFacts) -> Started:
        try:
            item.options.check()
            if item.options.durable and self._node.ssd is None:
                raise ValueError(
                    "durable: this peer has no SSD tier to keep the object on: give it --ssd"
                )
            self._core.books.settle()
            operation = PutOperation(self._core, item, session=client.session, namespace=namespace)
            return self._core.operations.start(operation, self._node.now)
        except (P2PStoreError, ValueError) as error:
            return error

    async def _commit_later(
        self,
        client: LocalClient,
        message: local.Commit,
        started: list[Started] | Awaitable[list[Started]],
    ) -> local.Committed:
        operations = await started if isinstance(started, Awaitable) else started
        for each in operations:
            operation = each.operation if isinstance(each, PutAmongMany) else each
            if isinstance(operation, Operation) and not operation.done:
                await self._node.settle(operation)
        if any(options.durable for options in message.options):
            await self._make_durable(message, operations)
        return await take_turns(self._committed(client, message, operations))

    async def _make_durable(self, message: local.Commit, operations: list[Started]) -> None:
        """Write a batch's durable values to the SSD at once: they share syncs. A value that fails stays in memory."""

        async def keep(number: int, digest: bytes) -> None:
            assert self._node.ssd is not None
            try:
                await self._node.ssd.make_durable(digest)
            except P2PStoreError as error:
                operations[number] = error

        async with trio.open_nursery() as nursery:
            for number, (options, operation) in enumerate(
                zip(cycle(message.options), operations, strict=False)
            ):
                if options.durable and isinstance(operation, PutOperation) and operation.kept:
                    nursery.start_soon(keep, number, operation.digest)

    def _committed(
        self, client: LocalClient, message: local.Commit, operations: list[Started]
    ) -> Steps[local.Committed]:
        """The answer. `operations` is empty after it: letting go of thousands at once would be a long step."""
        outcomes: list[tuple[int, local.PutOutcome]] = []
        operations.reverse()
        while operations:
            last, count = operations.pop(), 1
            alike = _result_of(last)
            # Those that are published together end alike.
            while operations and (operations[-1] is last or _result_of(operations[-1]) is alike):
                last = operations.pop()
                count += 1
            if outcomes:
                yield
            outcomes.append((count, _outcome_of(alike)))
        wanted = (
            (*message.again[0], message.namespace) if message.again and not message.at_hand else None
        )
        ahead = self._take_ready(client, wanted)
        if message.at_hand:
            rooms = yield from self._rooms_for(client, message.again, message.namespace)
            return local.Committed(outcomes, _spans(rooms))
        try:
            for room in message.again[len(ahead) :]:
                if ahead:
                    yield
                ahead += yield from self._reserve_ahead(client, room, message.namespace)
        except BaseException:  # the client will not release them
            self._abort_all(client, [each.number for each in ahead if isinstance(each, Reservation)])
            raise
        return local.Committed(outcomes, _spans(ahead))

    def _take_ready(self, client: LocalClient, wanted: RoomAhead | None) -> list[Reserved]:
        """The room that is held ready for this client, if it is as wanted; it is given back otherwise."""
        held = self._ready.pop(client.session, None)
        if held is None:
            return []
        size, reservation = held
        if size != wanted:
            self._abort_all(client, [reservation.number])
            return []
        self._next_put = client.session, size
        return [reservation]

    def _reserve_ahead(
        self, client: LocalClient, room: tuple[int, int, int], namespace: str
    ) -> Steps[list[Reserved]]:
        """Room for puts that may never come, where some can be spared."""
        if not self._segment.room.can_spare(*room, namespace=namespace):
            return [_NO_ROOM_AHEAD] * room[2]
        made = yield from self._rooms_for(client, [room], namespace)
        if made and isinstance(made[-1], Reservation):
            self._next_put = client.session, (*room, namespace)
        return made

    def make_ready(self) -> None:
        """Evict for the next put or batch of a client while none waits for room. That of a single put is held ready."""
        if self._next_put is None:
            return
        session, wanted = self._next_put
        self._next_put = None
        length, trailer_length, count, namespace = wanted
        now = self._node.now
        self._segment.room.make_ahead(
            length, trailer_length, count, now=self._core.unix(now), namespace=namespace
        )
        self._core.objects.announce_withdrawn(now)
        if count == 1:
            size = length, trailer_length
            for each in self._segment.reserve_free(*size, session=session, namespace=namespace):
                self._ready[session] = wanted, each

    def client_gone(self, client: LocalClient) -> None:
        """Forget the room of a client whose reservations end."""
        self._ready.pop(client.session, None)
        if self._next_put is not None and self._next_put[0] == client.session:
            self._next_put = None

    def abort(self, client: LocalClient, message: local.Abort) -> Steps[Empty]:
        """Give reservations back; one that has ended already is passed over."""
        numbers = message.reservations
        self._take_ready(client, None)
        for begin in range(0, len(numbers), ABORTED_PER_STEP):
            if begin:
                yield
            self._abort_all(client, numbers[begin : begin + ABORTED_PER_STEP])
        return Empty()

    def _abort_all(self, client: LocalClient, numbers: Iterable[int]) -> None:
        for number in numbers:
            with suppress(ValueError):
                self._segment.abort(number, session=client.session)

    def place(self, client: LocalClient, message: local.Place) -> local.Placed:
        """Where a value can go that this peer has no room for."""
        if len(message.digest) != DIGEST_BYTES or message.length < 0:
            raise ProtocolError("a request for a place that names no value")
        check_object_length(message.length)
        self._core.timekeeping.check(self._node.now)
        try:
            strict = self._node.config.transport
            if strict not in ("auto", "tcp"):
                raise CapacityExceeded(
                    f"values go to other peers over tcp, and this peer may use {strict} only (transport)"
                )
            peer_ids = place(
                self._core, message.digest, message.length, self._node.routes.host_id, self._node.now
            )
        except CapacityExceeded as error:
            return local.Placed([], error=item_error(error))
        return local.Placed(
            [self._target(peer_id, message.namespace) for peer_id in peer_ids], self._core.clock.latest
        )

    def _target(self, peer_id: PeerId, namespace: str) -> local.Target:
        granted = self._issuer.for_writers(peer_id, namespace)
        return local.Target(
            peer_id,
            self._core.name_of(peer_id),
            list(self._node.routes.remote_peer(peer_id).data),
            granted.ticket.claims,
            granted.ticket.signature,
            granted.secret,
        )

    def stored(self, client: LocalClient, message: local.StoredElsewhere) -> Empty:
        """Take in what a client stored at another peer, as if that peer had told of it."""
        if len(message.record) != LOCATION_BYTES:
            raise ProtocolError("not a location record")
        if message.peer_id != self._core.peer_id:
            now = self._node.now
            place = message.incarnation, [message.sequence]
            self._core.gossip.directory.heard(member_of(message.peer_id), *place, message.record, now)
            stamp = decode_location(message.record).version.clock
            self._core.clock.observe(stamp, self._core.believed_unix(now))  # later puts are above it
        self._core.counters["puts_elsewhere"] += 1
        return Empty()


def _goes_on(started: Started) -> bool:
    if type(started) is PutEnd:  # nearly always
        return False
    return isinstance(started, Operation | PutAmongMany) and not started.done


def _result_of(started: Started) -> object:
    return started.result if isinstance(started, Operation | PutAmongMany) else started


def _outcome_of(end: object) -> local.PutOutcome:
    """A put's end as it travels."""
    if isinstance(end, PutEnd):
        clock, writer, _ = end.version
        return local.PutOutcome(int(end.status), end.copies, end.wanted, clock, writer)
    error = end if isinstance(end, Exception) else DeadlineExceeded("cancelled")
    return local.PutOutcome(0, 0, 0, 0, 0, item_error(error))


def _spans(made: Sequence[Reserved]) -> list[local.Span]:
    """Reservations that follow each other, and the reasons why there are none."""
    spans: list[local.Span] = []
    start = 0
    while start < len(made):
        first, stop = made[start], start + 1
        if not isinstance(first, Reservation):
            spans.append(local.Span(1, error=item_error(first)))
        else:
            number, length, offsets = first.number, first.length, [first.offset]
            for each in islice(made, stop, None):
                if not isinstance(each, Reservation) or each.length != length:
                    break
                if each.number != number + len(offsets):
                    break
                offsets.append(each.offset)
            stop = start + len(offsets)
            packed = struct.pack(f"<{len(offsets)}Q", *offsets)
            spans.append(local.Span(len(offsets), number, length, packed))
        start = stop
    return spans
