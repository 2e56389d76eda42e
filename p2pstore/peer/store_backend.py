"""Values that clients of other peers store here."""

from __future__ import annotations

from p2pstore.core.puts.placing import Incoming, IncomingStores, digest_of, stored_reply
from p2pstore.peer.node import Node
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.transfer.data_messages import Store, Stored
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.serving.serving_backends import OpenedStore


class PeerStoreBackend:
    """Satisfies `p2pstore.transfer.serving.serving_backends.StoreBackend`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self._incoming = IncomingStores(node.core)

    async def begin_store(self, request: Store, claims: TicketClaims) -> OpenedStore | Stored:
        """Room for a value, or the end of its put where that needs no bytes."""
        self._node.check_open()
        digest = digest_of(request)
        operation = self._incoming.examine(request, self._node.now)
        if await self._node.complete(operation) is not None:
            return stored_reply(self._core, digest, operation, self._node.now)
        try:
            incoming = await take_turns(self._incoming.open(request, claims.issuer, self._node.now))
        finally:
            self._node.process()  # what was evicted is withdrawn
        return OpenedStore(self._incoming.payload(incoming), request.sums, (incoming, digest))

    async def finish_store(self, opened: OpenedStore) -> Stored:
        """Decide on a value that has arrived."""
        incoming, digest = _handle(opened)
        operation = self._incoming.put(incoming, self._node.now)
        await self._node.complete(operation)
        self._core.counters["values_taken_in"] += 1
        return stored_reply(self._core, digest, operation, self._node.now)

    def abandon_store(self, opened: OpenedStore) -> None:
        """Give the room back where it was not put to use."""
        self._incoming.close(_handle(opened)[0])


def _handle(opened: OpenedStore) -> tuple[Incoming, bytes]:
    handle: tuple[Incoming, bytes] = opened.handle
    return handle
