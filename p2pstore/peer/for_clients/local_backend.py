"""Requests of local clients, dispatched to their handlers. Requests of one step are answered at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import Any, Final

import p2pstore
from p2pstore.access.keyring import KeyRing, Role
from p2pstore.checkpoint import checkpoint_messages
from p2pstore.checkpoint.peer.client_requests import ClientRequests
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.gets.lookup import split_digests
from p2pstore.core.puts.lifetimes import PinEnd, PinOperation
from p2pstore.core.remove import FlushEnd, FlushOperation, RemoveOperation
from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local.local_protocol import LocalClient, LocalKind
from p2pstore.local.server import WRITING
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES
from p2pstore.memory.mapped.mapped_memory import SharedMemory, create_page
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import DIGEST_BYTES
from p2pstore.peer.for_clients.local_gets import LocalGets
from p2pstore.peer.for_clients.local_puts import LocalPuts
from p2pstore.peer.for_clients.local_queries import (
    MAX_WAIT_SECONDS,
    Answer,
    LocalQueries,
    check_batch,
    no_such_key,
)
from p2pstore.peer.node import Node
from p2pstore.peer.segment_memory import SegmentMemory
from p2pstore.put_facts import MAX_REPLICAS, PutStatus
from p2pstore.runtime import linux
from p2pstore.runtime.trio_tasks import in_turns
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_REMOVED_KEYS, Flush, Flushed, Remove, Removed
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.wire import Empty, Message

logger = logging.getLogger("p2pstore.peer")

_ANSWERED_FIRST: Final = frozenset({LocalKind.RESERVE, LocalKind.COMMIT})
"""Requests whose answers do not wait for the books."""
_WITH_EFFECTS: Final = frozenset(
    {
        LocalKind.RESERVE,
        LocalKind.COMMIT,
        LocalKind.STORED,
        LocalKind.PLAN,
        LocalKind.REPORT,
        LocalKind.PIN,
    }
)
"""Requests that leave effects for the shell."""

_WHILE_LEAVING: Final = frozenset(
    {LocalKind.STATISTICS, LocalKind.PEERS, LocalKind.RELEASE, LocalKind.ABORT}
)
"""Requests that are answered to the end."""
_FOR_MEMBERS: Final = WRITING - {LocalKind.ABORT, LocalKind.LEAVE}
"""Requests that a peer with a key of another role refuses, all or some: the members would."""
_FOR_WRITERS: Final = frozenset(
    {LocalKind.RESERVE, LocalKind.PLACE, LocalKind.STORED, LocalKind.REMOVE, LocalKind.FLUSH}
)
"""Those that one with a writer's key does not refuse in its namespaces."""


class PeerLocalBackend:
    """Satisfies `p2pstore.local.local_protocol.LocalBackend`."""

    def __init__(
        self,
        node: Node,
        memory: SegmentMemory,
        location_table: SharedMemory | None,
        issuer: TicketIssuer,
        checkpoints: ClientRequests,
        erasing: Erasing,
    ) -> None:
        config = node.config
        max_leased_bytes = config.max_leased_bytes(config.memory_bytes)
        self._erasing = erasing
        self._node = node
        self._core = node.core
        self._segment = node.core.segment
        self._memory = memory
        self._read_only = memory.read_only_descriptors()
        self._location_table = location_table
        self._table_descriptor = -1 if location_table is None else location_table.read_only_descriptor()
        self._puts = LocalPuts(node, issuer)
        self._gets = LocalGets(node, issuer, max_leased_bytes)
        self._checkpoints = checkpoints
        self.request_types = {**local_protocol.REQUESTS, **checkpoint_messages.REQUESTS}
        self._max_leased_bytes = max_leased_bytes
        self._has_effects = False
        self._has_barriers = linux.has_barriers()
        self._hazard_pages: dict[int, SharedMemory] = {}
        queries = LocalQueries(node)
        self._handlers: dict[LocalKind, Any] = {
            LocalKind.RESERVE: self._puts.reserve,
            LocalKind.COMMIT: self._puts.commit,
            LocalKind.ABORT: self._puts.abort,
            LocalKind.PLACE: self._puts.place,
            LocalKind.STORED: self._puts.stored,
            LocalKind.LEASE: self._gets.lease,
            LocalKind.RELEASE: self._gets.release,
            LocalKind.PLAN: self._gets.plan,
            LocalKind.REPORT: self._gets.report,
            LocalKind.CONTAINS: queries.contains,
            LocalKind.LOCATE: queries.locate,
            LocalKind.MATCH_PREFIX: queries.match_prefix,
            LocalKind.ESTIMATE: queries.estimate,
            LocalKind.REMOVE: self._remove,
            LocalKind.LIST: queries.list_keys,
            LocalKind.PEERS: queries.peers,
            LocalKind.STATISTICS: queries.statistics,
            LocalKind.LEAVE: self._leave,
            LocalKind.REPLICATE: self._replicate,
            LocalKind.PIN: self._pin,
            LocalKind.FLUSH: self._flush,
            LocalKind.PREFETCH: self._prefetch,
            **checkpoints.handlers,
        }

    def close(self) -> None:
        """Close the descriptors that readers are given."""
        for descriptor in {*self._read_only, self._table_descriptor} - {-1}:
            os.close(descriptor)
        self._read_only, self._table_descriptor = [], -1

    def welcome(self, client: LocalClient, version: int) -> tuple[local_protocol.HelloReply, list[int]]:
        self._node.check_open()
        self._node.guard.restore_header()
        memory = self._memory
        writes = client.access is local_protocol.Access.WRITE
        descriptors = memory.descriptors if writes else self._read_only
        segment = local_protocol.SegmentInfo(
            self._segment.segment_id, self._segment.geometry.total_bytes, memory.pieces
        )
        passed, besides = list(descriptors), dict[str, Any]()
        if self._location_table is not None and client.reads_locations:
            besides["location_table_bytes"] = self._location_table.length
            passed.append(self._table_descriptor)
        target = self._checkpoints.use_memory(client) if client.checkpoint else None
        page = self._give_hazards(client)
        if page is not None:
            besides["hazards"] = True
            passed.append(page.descriptor)
        if target is not None:
            besides["checkpoint_bytes"] = target.layout.total_bytes
            besides["checkpoint_manifest"] = target.layout.manifest
            passed.append(target.descriptor)
        reply = local_protocol.HelloReply(
            version,
            self._core.peer_id,
            self._node.config.name,
            self._core.incarnation,
            [segment],
            self._max_leased_bytes,
            p2pstore.__version__,
            access=int(client.access),
            **besides,
        )
        self._node.local_clients += 1
        return reply, passed

    def _give_hazards(self, client: LocalClient) -> SharedMemory | None:
        """A page for the client to lease by, if it wants one. Not for memory that outlives this peer: the leases would
        be unknown in its next life."""
        if not client.hazards or not self._has_barriers or self._node.kept_memory is not None:
            return None
        try:
            page = create_page(HAZARD_PAGE_BYTES, "p2pstore-hazards")
        except OSError as error:  # it can ask, as long as there are no descriptors or memory
            logger.warning("a client gets no page to lease by: %s", error.strerror)
            return None
        self._hazard_pages[client.session] = page
        self._segment.leases.watch_hazards(client.session, page.view)
        return page

    def welcomed(self, client: LocalClient) -> None:
        page = self._hazard_pages.get(client.session)
        if page is not None:
            page.close_descriptor()

    def handle(self, client: LocalClient, kind: LocalKind, message: Message) -> Answer:
        books = self._core.books
        books.settle()
        if kind not in _WHILE_LEAVING:
            self._node.check_open()
        if kind in _FOR_MEMBERS:
            check_rights(self._node.credentials.ring, kind, message)
        has_effects = kind in _WITH_EFFECTS  # not LEASE: its round trip should cost nothing else
        self._has_effects |= has_effects
        books.late = kind in _ANSWERED_FIRST
        made = self._handlers[kind](client, message)
        answer: Answer = in_turns(made) if type(made) is GeneratorType else made
        if has_effects and isinstance(answer, Awaitable):
            return self._carry_out(answer)
        return answer

    async def _carry_out(self, answer: Awaitable[Message | None]) -> Message | None:
        """Have the shell do what the rest of an answer gave to do."""
        try:
            return await answer
        finally:
            self._node.process_request()

    def make_ready(self) -> None:
        """Keep the books of what was answered, and make room for the next put."""
        if self._has_effects:
            books = self._core.books
            books.late = False
            books.settle()
            self._puts.make_ready()

    def handled(self) -> None:
        """Carry out what the requests had the core decide."""
        if self._has_effects:
            self._has_effects = False
            self._node.process_request()

    def client_gone(self, client: LocalClient) -> None:
        self._node.local_clients -= 1
        self._puts.client_gone(client)
        self._checkpoints.client_gone(client)
        self._node.carry_out(self._segment.drop_session_in_steps(client.session))
        page = self._hazard_pages.pop(client.session, None)
        if page is not None:
            page.close()

    async def _remove(self, client: LocalClient, message: local.Remove) -> local.Removed:
        return local.Removed(await self._erasing.remove(message.namespace, message.keys))

    def _leave(self, client: LocalClient, message: local.Leave) -> Empty:
        self._node.drain_seconds = max(0.0, min(message.drain_seconds, MAX_WAIT_SECONDS))
        self._node.leave_requested.set()
        return Empty()

    async def _replicate(self, client: LocalClient, message: local.Replicate) -> local.PutOutcome:
        if not 1 <= message.copies <= MAX_REPLICAS:
            raise ValueError(f"copies must be 1 to {MAX_REPLICAS}, not {message.copies}")
        if len(message.digest) != DIGEST_BYTES:
            raise ValueError(f"{len(message.digest)} bytes are no digest")
        now = self._node.now
        self._core.timekeeping.check(now)
        entry = self._segment.find(message.digest, self._core.unix(now))
        if entry is None:
            fetch = self._core.operations.fetch(message.digest, now, soft=False)
            entry = await self._node.complete(fetch)
        self._core.objects.strengthen(entry, entry.pin, message.copies, self._node.now)
        operation = ReplicateOperation(self._core, entry, message.copies)
        copies = await self._node.complete(operation)
        if copies < message.copies:
            self._core.repair.fell_short(copies, self._node.now)
        version = entry.version
        return local.PutOutcome(
            int(PutStatus.UNCHANGED), copies, message.copies, version.clock, version.writer
        )

    async def _pin(self, client: LocalClient, message: local.SetPin) -> local.Pinned:
        if message.pin not in (0, 1, 2):
            raise ValueError(f"pin {message.pin} is not none, soft or hard")
        pin = Pin(message.pin)
        digests = check_batch(split_digests(message.digests))
        operation = PinOperation(self._core, digests, pin, message.ttl_ms / 1000)
        ends: list[PinEnd] = await self._node.complete(operation)
        # An object to pin has to be here; one to unpin may be anywhere.
        done = [end.here or (pin is Pin.NONE and end.found) for end in ends]
        return local.Pinned(
            [local.OK if each else no_such_key() for each in done],
            [end.copies for end in ends],
            [end.known for end in ends],
        )

    async def _flush(self, client: LocalClient, message: local.Flush) -> local.Flushed:
        flushed = await self._erasing.flush(message.namespace, message.deadline_ms / 1000)
        return local.Flushed(flushed.told, flushed.not_told)

    def _prefetch(self, client: LocalClient, message: local.Prefetch) -> Empty:
        self._core.prefetching.add(check_batch(split_digests(message.digests)), self._node.now)
        self._node.process()  # the fetches begin at once
        return Empty()


def check_rights(ring: KeyRing, kind: LocalKind, message: Message) -> None:
    """Raise `AuthenticationFailed` where the peer's key does not allow a request that changes something."""
    if ring.role is Role.MEMBER:
        return
    if ring.role is Role.READER:
        raise AuthenticationFailed(
            "this peer's key file holds a reader's key: it may read, and change nothing. Ask a peer with the "
            "cluster's key"
        )
    if kind not in _FOR_WRITERS or (isinstance(message, local.Place) and message.pin):
        what = "pin" if kind is LocalKind.PLACE else kind.name.lower().replace("_", " ")
        raise AuthenticationFailed(
            f"this peer's key file holds a writer's key: it may read, put, remove and flush, but not {what}. Ask a "
            "peer with the cluster's key"
        )
    namespace = getattr(message, "namespace", None)
    if namespace is not None and namespace not in ring.writers:
        raise AuthenticationFailed(
            f"this peer's key file may write in {', '.join(map(repr, ring.writers))} only, not in namespace "
            f"{namespace!r}"
        )


MAX_MEMBERS_ASKED: Final = 3
"""Members that may fail or refuse before an order of a writer gives up."""
ANSWER_SECONDS: Final = 10.0
"""Deadline for 512 keys: four seconds where removals are slowed down, and two to tell other members."""
_NEXT_MEMBER: Final = (
    AuthenticationFailed,
    DeadlineExceeded,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
    OSError,
)
"""Errors of one member, after which the next one is asked."""


class Erasing:
    """REMOVE and FLUSH of local clients and of writers' peers. A writer's peer, whose word does not count with members,
    asks one with a ticket for the namespace. Both can be carried out twice, so an unanswered order goes to another."""

    def __init__(self, node: Node, issuer: TicketIssuer) -> None:
        self._node = node
        self._issuer = issuer

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
        existed: list[bool] = await self._node.complete(operation)
        await self._node.forget_for_good()
        return existed

    async def _flush_here(self, namespace: str, seconds: float) -> Flushed:
        core = self._node.core
        operation = FlushOperation(core, namespace, min(max(0.0, seconds), MAX_WAIT_SECONDS))
        end: FlushEnd = await self._node.complete(operation)
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
        ticket = self._issuer.for_writers(peer_id, namespace)
        connection = await self._node.pool.dial(replace(way, ticket=ticket))
        try:
            connection.stream.progress_seconds = seconds
            return await connection.request(kind, request)
        finally:
            connection.close()
