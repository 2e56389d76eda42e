"""Puts of local clients: room for the bytes, then publishing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2pstore.core.operation import Operation
from p2pstore.core.put import PutOperation, PutSpec
from p2pstore.errors import (
    P2PStoreError,
)
from p2pstore.local import messages as local
from p2pstore.local.server import LocalClient
from p2pstore.objects import check_object_length
from p2pstore.peer.local_answers import (
    Answer,
    check_batch,
    failed_put,
    item_error,
    put_outcome,
    require_write,
)
from p2pstore.peer.node import Node
from p2pstore.wire import Empty

MAX_REPLICAS: Final = 64
MAX_TTL_MS: Final = 100 * 365 * 86_400_000


class LocalPuts:
    """RESERVE, COMMIT and ABORT."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self._segment = node.core.segment

    def reserve(self, client: LocalClient, message: local.Reserve) -> local.Reserved:
        """Room for each value, or why there is none."""
        require_write(client)
        check_batch(message.items)
        return local.Reserved([self._reserve_one(client, item) for item in message.items])

    def _reserve_one(self, client: LocalClient, item: local.ReserveItem) -> local.Reservation:
        try:
            check_object_length(item.length)
            reservation = self._segment.reserve(
                item.length,
                item.trailer_length,
                holder=client.holder,
                now=self._core.unix(self._node.now),
            )
        except (P2PStoreError, ValueError) as error:
            return local.Reservation(0, 0, 0, 0, item_error(error))
        finally:
            self._core.announce_withdrawn(self._node.now)
        return local.Reservation(reservation.number, 0, reservation.offset, reservation.length)

    def commit(self, client: LocalClient, message: local.Commit) -> Answer:
        """Publish what was written; with more replicas than one, once they exist."""
        require_write(client)
        check_batch(message.items)
        operations = [self._start_put(client, message, item) for item in message.items]
        if all(isinstance(each, local.PutOutcome) or each.done for each in operations):
            return self._committed(client, message, operations)
        return self._commit_later(client, message, operations)

    def _start_put(
        self, client: LocalClient, message: local.Commit, item: local.CommitItem
    ) -> Operation | local.PutOutcome:
        try:
            if not 1 <= item.replicas <= MAX_REPLICAS:
                raise ValueError(f"replicas must be 1 to {MAX_REPLICAS}, not {item.replicas}")
            if item.pin not in (0, 1, 2) or not 0 <= item.ttl_ms <= MAX_TTL_MS:
                raise ValueError("pin or ttl out of range")
            if item.durable:
                raise ValueError("durable: this peer has no SSD tier to keep the object on")
            if item.length < 0:
                raise ValueError(f"a value of {item.length:,} bytes")
            check_object_length(item.length)
            operation = PutOperation(
                self._core,
                PutSpec(
                    holder=client.holder,
                    reservation=item.reservation,
                    namespace=message.namespace,
                    key=item.key,
                    length=item.length,
                    sums=item.sums,
                    root=item.root,
                    replicas=item.replicas,
                    pin=item.pin,
                    ttl_seconds=item.ttl_ms / 1000,
                    overwrite=item.overwrite,
                    dtype=item.dtype,
                    shape=item.shape,
                ),
            )
            return self._core.start(operation, self._node.now)
        except (P2PStoreError, ValueError) as error:
            return failed_put(error)

    async def _commit_later(
        self,
        client: LocalClient,
        message: local.Commit,
        operations: Sequence[Operation | local.PutOutcome],
    ) -> local.Committed:
        for operation in operations:
            if isinstance(operation, Operation):
                await self._node.settle(operation)
        return self._committed(client, message, operations)

    def _committed(
        self,
        client: LocalClient,
        message: local.Commit,
        operations: Sequence[Operation | local.PutOutcome],
    ) -> local.Committed:
        check_batch(message.again)
        return local.Committed(
            [
                put_outcome(each.result) if isinstance(each, Operation) else each
                for each in operations
            ],
            [self._reserve_one(client, item) for item in message.again],
        )

    def abort(self, client: LocalClient, message: local.Abort) -> Empty:
        """Give reservations back; one that has ended already is passed over."""
        for number in message.reservations:
            self._segment.abort(number, holder=client.holder)
        return Empty()
