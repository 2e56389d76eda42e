"""Puts of local clients: room for the bytes, then publishing them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import trio

from p2pstore.core.copies.replicate import PutAmongMany
from p2pstore.core.operation import Operation, PutEnd
from p2pstore.core.puts.placing import place
from p2pstore.core.puts.publishing import PUBLISHED_PER_STEP, Reserved, publish_new, reserve_many
from p2pstore.core.puts.put_operation import PutOperation, check_put
from p2pstore.errors import CapacityExceeded, P2PStoreError, ProtocolError
from p2pstore.gossip.homes.known_locations import Word
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, decode_location, member_of
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalClient
from p2pstore.objects import DIGEST_BYTES, check_object_length
from p2pstore.peer.for_clients.local_queries import Answer, failed_put, item_error, put_outcome
from p2pstore.peer.node import Node
from p2pstore.put_facts import PutFacts
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import in_turns, take_turns
from p2pstore.transfer.ticket_desk import TicketOffice
from p2pstore.wire import Code, Empty

_NO_ROOM_AHEAD: Final = local.Reservation(
    0, 0, 0, 0, local.ItemError(int(Code.CAPACITY_EXCEEDED), "no room can be spared for puts to come")
)
ABORTED_PER_STEP: Final = 64

Started: TypeAlias = Operation | PutAmongMany | local.PutOutcome
"""A put that was begun, or that failed at once."""


class LocalPuts:
    """RESERVE, COMMIT and ABORT; PLACE and STORED for what goes to other peers."""

    def __init__(self, node: Node, office: TicketOffice) -> None:
        self._node = node
        self._office = office
        self._core = node.core
        self._segment = node.core.segment
        self._next_put: tuple[local.ReserveItem, str] | None = None
        """The likely next reservation of a client that puts in a loop."""

    def reserve(self, client: LocalClient, message: local.Reserve) -> Answer:
        """Room for each value, or why there is none."""
        return in_turns(self._reserve_all(client, message))

    def _reserve_all(self, client: LocalClient, message: local.Reserve) -> Steps[local.Reserved]:
        rooms = yield from self._rooms_for(client, message.items, message.namespace)
        return local.Reserved(rooms)

    def _rooms_for(
        self, client: LocalClient, items: Sequence[local.ReserveItem], namespace: str
    ) -> Steps[list[local.Reservation]]:
        sizes = [(item.length, item.trailer_length) for item in items]
        made = yield from reserve_many(
            self._core, sizes, holder=client.holder, namespace=namespace, now=self._node.now
        )
        return list(map(_room, made))

    def commit(self, client: LocalClient, message: local.Commit) -> Answer:
        """Publish what was written; with more replicas than one, once they exist."""
        started = in_turns(self._start_puts(client, message))
        if isinstance(started, list):
            durable = any(item.durable for item in message.items)
            if not durable and all(isinstance(each, local.PutOutcome) or each.done for each in started):
                return in_turns(self._committed(client, message, started))
        return self._commit_later(client, message, started)

    def _start_puts(self, client: LocalClient, message: local.Commit) -> Steps[list[Started]]:
        started: list[Started] = []
        items = message.items
        for begin in range(0, len(items), PUBLISHED_PER_STEP):
            if begin:
                yield
            some = items[begin : begin + PUBLISHED_PER_STEP]
            ends = publish_new(
                self._core, some, holder=client.holder, namespace=message.namespace, now=self._node.now
            )
            told: PutEnd | None = None
            for item, end in zip(some, ends, strict=True):
                if isinstance(end, PutEnd):
                    if end is not told:  # those that are published together end alike
                        told, outcome = end, put_outcome(end)
                    started.append(outcome)
                    continue
                if end is not None:
                    started.append(end)
                    continue
                if started:
                    yield
                started.append(self._start_put(client, message, item))
        return started

    def _start_put(self, client: LocalClient, message: local.Commit, item: PutFacts) -> Started:
        try:
            check_put(length=item.length, replicas=item.replicas, pin=item.pin, ttl_ms=item.ttl_ms)
            if item.durable and self._node.ssd is None:
                raise ValueError(
                    "durable: this peer has no SSD tier to keep the object on: give it --ssd"
                )
            operation = PutOperation(self._core, item, holder=client.holder, namespace=message.namespace)
            return self._core.operations.start(operation, self._node.now)
        except (P2PStoreError, ValueError) as error:
            return failed_put(error)

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
        await self._make_durable(message, operations)
        return await take_turns(self._committed(client, message, operations))

    async def _make_durable(self, message: local.Commit, operations: list[Started]) -> None:
        """Write a batch's durable values to the SSD at once: they share syncs. A value that fails stays in memory."""

        async def keep(number: int, digest: bytes) -> None:
            assert self._node.ssd is not None
            try:
                await self._node.ssd.make_durable(digest)
            except P2PStoreError as error:
                operations[number] = failed_put(error)

        async with trio.open_nursery() as nursery:
            for number, (item, operation) in enumerate(zip(message.items, operations, strict=True)):
                if item.durable and isinstance(operation, PutOperation) and operation.kept:
                    nursery.start_soon(keep, number, operation.digest)

    def _committed(
        self, client: LocalClient, message: local.Commit, operations: list[Started]
    ) -> Steps[local.Committed]:
        """The answer. `operations` is empty after it: letting go of thousands at once would be a long step."""
        outcomes: list[local.PutOutcome] = []
        operations.reverse()
        while operations:
            each = operations.pop()
            if isinstance(each, local.PutOutcome):
                outcomes.append(each)
                continue
            if outcomes:
                yield
            outcomes.append(put_outcome(each.result))
        if message.at_hand:
            rooms = yield from self._rooms_for(client, message.again, message.namespace)
            return local.Committed(outcomes, rooms)
        again: list[local.Reservation] = []
        try:
            for item in message.again:
                if again:
                    yield
                again.append((yield from self._reserve_ahead(client, item, message.namespace)))
        except BaseException:  # the client will not release them
            self._abort_all(client, [each.reservation for each in again])
            raise
        return local.Committed(outcomes, again)

    def _reserve_ahead(
        self, client: LocalClient, item: local.ReserveItem, namespace: str
    ) -> Steps[local.Reservation]:
        """Room for a put that may never come, where some can be spared."""
        if not self._segment.room.can_spare(item.length, item.trailer_length, namespace=namespace):
            return _NO_ROOM_AHEAD
        [reservation] = yield from self._rooms_for(client, [item], namespace)
        if not reservation.error.code:
            self._next_put = item, namespace
        return reservation

    def make_room_ahead(self) -> None:
        """Evict for the next put while no put waits for room: one value's room, however many clients put."""
        if self._next_put is None:
            return
        item, namespace = self._next_put
        self._next_put = None
        now = self._node.now
        self._segment.room.make_ahead(
            item.length, item.trailer_length, now=self._core.unix(now), namespace=namespace
        )
        self._core.objects.announce_withdrawn(now)

    def abort(self, client: LocalClient, message: local.Abort) -> Answer:
        """Give reservations back; one that has ended already is passed over."""
        return in_turns(self._abort_in_steps(client, message.reservations))

    def _abort_in_steps(self, client: LocalClient, numbers: Sequence[int]) -> Steps[Empty]:
        for begin in range(0, len(numbers), ABORTED_PER_STEP):
            if begin:
                yield
            self._abort_all(client, numbers[begin : begin + ABORTED_PER_STEP])
        return Empty()

    def _abort_all(self, client: LocalClient, numbers: Iterable[int]) -> None:
        for number in numbers:
            with suppress(ValueError):
                self._segment.abort(number, holder=client.holder)

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
        granted = self._office.for_writers(peer_id, namespace)
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
            position = (message.incarnation, message.sequence)
            self._core.gossip.locations.heard(
                member_of(message.peer_id), position, message.record, now, word=Word.OWN
            )
            stamp = decode_location(message.record).version.clock
            self._core.clock.observe(stamp, self._core.believed_unix(now))  # later puts are above it
        self._core.counters["puts_elsewhere"] += 1
        return Empty()


def _room(reserved: Reserved) -> local.Reservation:
    if isinstance(reserved, Exception):
        return local.Reservation(0, 0, 0, 0, item_error(reserved))
    return local.Reservation(reserved.number, 0, reserved.offset, reserved.length)
