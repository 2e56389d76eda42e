"""Removing keys and flushing namespaces: by this peer's own word, or for and by way of another peer.

The word of a writer's peer does not count with members. So it asks a member, with a ticket for the namespace, and the
member removes in its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from p2pstore.access.keyring import Role
from p2pstore.core.removals.flush import FlushEnd, FlushOperation
from p2pstore.core.removals.remove import RemoveOperation
from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.peer.for_clients.local_queries import MAX_WAIT_SECONDS
from p2pstore.peer.node import Node
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_REMOVED_KEYS, Flush, Flushed, Remove, Removed
from p2pstore.transfer.ticket_desk import TicketOffice
from p2pstore.wire import Message

logger = logging.getLogger("p2pstore.peer")

MAX_MEMBERS_ASKED: Final = 3
"""Members that may fail or refuse before an order of a writer gives up."""
ANSWER_SECONDS: Final = 10.0
"""Deadline for 512 keys: four seconds where removals are slowed down, and two to tell other members."""
_NEXT_MEMBER: Final = (
    *(AuthenticationFailed, DeadlineExceeded, ProtocolMismatch, StoreClosed, Unavailable),
    OSError,
)
"""Errors of one member, after which the next one is asked."""


class Erasing:
    """REMOVE and FLUSH of local clients and of writers' peers. Both can be carried out twice, so an order that was not
    answered goes to another member."""

    def __init__(self, node: Node, office: TicketOffice) -> None:
        self._node = node
        self._office = office

    async def remove(self, namespace: str, keys: Sequence[str]) -> list[bool]:
        """Remove keys everywhere, for a local client; per key whether any copy was known."""
        if self._node.credentials.ring.role is Role.MEMBER:
            return await self._remove_here(namespace, keys)
        existed: list[bool] = []
        for begin in range(0, len(keys), MAX_REMOVED_KEYS):
            request = Remove(namespace, [*keys[begin : begin + MAX_REMOVED_KEYS]])
            removed = await self._ask_members(DataKind.REMOVE, request, namespace, ANSWER_SECONDS)
            assert isinstance(removed, Removed)
            existed += removed.existed
        return existed

    async def flush(self, namespace: str, seconds: float) -> Flushed:
        """Remove a namespace everywhere, for a local client."""
        if self._node.credentials.ring.role is Role.MEMBER:
            return await self._flush_here(namespace, seconds)
        request = Flush(namespace, round(seconds * 1000))
        patience_seconds = seconds + ANSWER_SECONDS
        flushed = await self._ask_members(DataKind.FLUSH, request, namespace, patience_seconds)
        assert isinstance(flushed, Flushed)
        return flushed

    async def serve(self, request: Remove | Flush, sender: PeerId) -> Removed | Flushed:
        """Carry out what another peer, which may write in the namespace, asks for."""
        self._node.check_open()
        if isinstance(request, Remove):
            return Removed(await self._remove_here(request.namespace, request.keys))
        logger.info("%s has %r flushed", format_peer_id(sender), request.namespace)
        return await self._flush_here(request.namespace, request.deadline_ms / 1000)

    async def _remove_here(self, namespace: str, keys: Sequence[str]) -> list[bool]:
        operation = RemoveOperation(self._node.core, namespace, keys)
        existed: list[bool] = await self._node.complete(
            self._node.core.operations.start(operation, self._node.now)
        )
        await self._node.forget_for_good()
        return existed

    async def _flush_here(self, namespace: str, seconds: float) -> Flushed:
        core = self._node.core
        operation = FlushOperation(core, namespace, min(max(0.0, seconds), MAX_WAIT_SECONDS))
        end: FlushEnd = await self._node.complete(core.operations.start(operation, self._node.now))
        await self._node.forget_for_good()
        return Flushed(end.told, [core.name_of(peer_id) for peer_id in end.not_told])

    async def _ask_members(
        self, kind: DataKind, request: Message, namespace: str, seconds: float
    ) -> Message:
        """The answer of the first member that gives one. Raises `Unavailable` when none does."""
        members = self._node.core.live_peers()
        self._node.core.rng.shuffle(members)
        reasons: list[str] = []
        for peer_id in members[:MAX_MEMBERS_ASKED]:
            try:
                return await self._ask(peer_id, kind, request, namespace, seconds)
            except _NEXT_MEMBER as error:
                reasons.append(f"{self._node.core.name_of(peer_id)}: {error}")
        told = ". ".join(reasons) or "none is known to live"
        raise Unavailable(f"no member did it for this writer's peer: {told}")

    async def _ask(
        self, peer_id: PeerId, kind: DataKind, request: Message, namespace: str, seconds: float
    ) -> Message:
        """Over a connection of its own: the pool's are made with tickets to read."""
        way = self._node.routes.remote_peer(peer_id)
        ticket = self._office.for_writers(peer_id, namespace)
        connection = await self._node.pool.dial(replace(way, ticket=ticket))
        try:
            connection.stream.progress_seconds = seconds
            return await connection.request(kind, request)
        finally:
            connection.close()
