"""What the peer answers to the clients of its host. Requests of one step are answered at once."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import trio

import p2pstore
from p2pstore.core.effects import KnownCopy
from p2pstore.core.listing import ListedPage, ListOperation
from p2pstore.core.lookup import LookupOperation, split_digests
from p2pstore.core.operation import Operation
from p2pstore.core.peer_core import SCOPE_NAMESPACE
from p2pstore.core.put import PutEnd, PutOperation, PutSpec
from p2pstore.core.remove import RemoveOperation
from p2pstore.core.replicate import ReplicateOperation
from p2pstore.errors import (
    DeadlineExceeded,
    LeaseLimitExceeded,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
)
from p2pstore.gossip.messages import Status
from p2pstore.gossip.records import PeerRecord
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.local.server import LocalClient
from p2pstore.objects import Version, check_object_length, format_bytes, namespace_digest
from p2pstore.peer.node import Node
from p2pstore.peer.statistics import cluster_document, peer_document
from p2pstore.peer.tickets import TicketOffice
from p2pstore.transfer.layout import Pin
from p2pstore.transfer.memory import SharedMemory
from p2pstore.transfer.messages import ListKeys
from p2pstore.transfer.segment import SOFT_PIN_SECONDS, ObjectEntry
from p2pstore.wire import Code, Empty, Message, code_of

MAX_BATCH: Final = 16_384
MAX_WAIT_SECONDS: Final = 24 * 3600.0
MAX_REPLICAS: Final = 64
MAX_TTL_MS: Final = 100 * 365 * 86_400_000
FETCH_ROUNDS: Final = 3
HOLDERS_PER_PLAN: Final = 8

_WITH_EFFECTS: Final = frozenset(
    {
        LocalKind.RESERVE,
        LocalKind.COMMIT,
        LocalKind.PLAN,
        LocalKind.REPORT,
        LocalKind.PIN,
        LocalKind.FLUSH,
        LocalKind.PREFETCH,
    }
)
"""Requests answered at once that give the shell something to do; what is awaited sees to it itself."""

Answer = Message | None | Awaitable[Message | None]


class PeerLocalBackend:
    """Satisfies `p2pstore.local.server.LocalBackend`."""

    def __init__(
        self, node: Node, memory: SharedMemory, office: TicketOffice, max_leased_bytes: int
    ) -> None:
        self._node = node
        self._core = node.core
        self._segment = node.core.segment
        self._memory = memory
        self._read_only = memory.read_only_descriptor()
        self._office = office
        self._max_leased_bytes = max_leased_bytes
        self._handlers: dict[LocalKind, Any] = {
            LocalKind.RESERVE: self._reserve,
            LocalKind.COMMIT: self._commit,
            LocalKind.ABORT: self._abort,
            LocalKind.LEASE: self._lease,
            LocalKind.RELEASE: self._release,
            LocalKind.PLAN: self._plan,
            LocalKind.REPORT: self._report,
            LocalKind.CONTAINS: self._contains,
            LocalKind.LOCATE: self._locate,
            LocalKind.MATCH_PREFIX: self._match_prefix,
            LocalKind.REMOVE: self._remove,
            LocalKind.LIST: self._list,
            LocalKind.PEERS: self._peers,
            LocalKind.STATISTICS: self._statistics,
            LocalKind.LEAVE: self._leave,
            LocalKind.REPLICATE: self._replicate,
            LocalKind.PIN: self._pin,
            LocalKind.FLUSH: self._flush,
            LocalKind.PREFETCH: self._prefetch,
        }

    def close(self) -> None:
        """Close the descriptor that readers are given."""
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1

    def welcome(self, client: LocalClient, version: int) -> tuple[local.HelloReply, list[int]]:
        """Who this peer is, and the segment's descriptor."""
        self._node.check_open()
        descriptor = (
            self._memory.descriptor if client.access is local.Access.WRITE else self._read_only
        )
        segment = local.SegmentInfo(self._segment.segment_id, self._segment.geometry.total_bytes)
        reply = local.HelloReply(
            version,
            self._core.peer_id,
            self._node.config.name,
            self._core.incarnation,
            [segment],
            self._max_leased_bytes,
            p2pstore.__version__,
        )
        return reply, [descriptor]

    def handle(self, client: LocalClient, kind: LocalKind, message: Message) -> Answer:
        """The answer, or something to await that gives it."""
        if kind not in (LocalKind.STATISTICS, LocalKind.PEERS, LocalKind.RELEASE, LocalKind.ABORT):
            self._node.check_open()
        answer: Answer = self._handlers[kind](client, message)
        if (
            kind in _WITH_EFFECTS
        ):  # a leased view costs a round trip; the rest of it should be small
            self._node.process()
        return answer

    def client_gone(self, client: LocalClient) -> None:
        """End what the client held."""
        self._segment.drop_holder(client.holder)

    @property
    def _now(self) -> float:
        return self._node.now

    @property
    def _unix(self) -> float:
        return self._core.unix(self._node.now)

    # --- put ---------------------------------------------------------------------------------

    def _require_write(self, client: LocalClient) -> None:
        if client.access is not local.Access.WRITE:
            raise ProtocolError("this client connected for reading only")

    def _reserve(self, client: LocalClient, message: local.Reserve) -> local.Reserved:
        self._require_write(client)
        check_batch(message.items)
        return local.Reserved([self._reserve_one(client, item) for item in message.items])

    def _reserve_one(self, client: LocalClient, item: local.ReserveItem) -> local.Reservation:
        try:
            check_object_length(item.length)
            reservation = self._segment.reserve(
                item.length, item.trailer_length, holder=client.holder, now=self._unix
            )
        except (P2PStoreError, ValueError) as error:
            return local.Reservation(0, 0, 0, 0, item_error(error))
        finally:
            self._core.announce_withdrawn(self._now)
        return local.Reservation(reservation.number, 0, reservation.offset, reservation.length)

    def _commit(self, client: LocalClient, message: local.Commit) -> Answer:
        self._require_write(client)
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
                    deadline_seconds=message.deadline_ms / 1000,
                ),
            )
            return self._core.start(operation, self._now)
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
                await self._settle(operation)
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

    async def _settle(self, operation: Operation) -> None:
        """Wait for an operation whose result or error is looked at later."""
        try:
            await self._node.complete(operation)
        except (P2PStoreError, ValueError):
            return

    def _abort(self, client: LocalClient, message: local.Abort) -> Empty:
        for number in message.reservations:
            self._segment.abort(number, holder=client.holder)
        return Empty()

    # --- get ---------------------------------------------------------------------------------

    def _lease(self, client: LocalClient, message: local.Lease) -> Answer:
        digests = check_batch(split_digests(message.digests))
        grants = [self._lease_here(client, digest) for digest in digests]
        if all(grant is not None for grant in grants):
            return local.Leased([grant for grant in grants if grant is not None])
        if not message.fetch and not message.wait_ms:
            missing = local.LeaseGrant(0, 0, 0, 0, 0, error=no_such_key())
            return local.Leased([grant or missing for grant in grants])
        return self._lease_later(client, message, digests, grants)

    def _lease_here(self, client: LocalClient, digest: bytes) -> local.LeaseGrant | None:
        entry = self._segment.find(digest, self._unix)
        if entry is None:
            return None
        held = self._segment.leased_bytes_of(client.holder)
        if held + entry.length > self._max_leased_bytes:
            error = LeaseLimitExceeded(
                f"this client holds {format_bytes(held)} leased and may hold "
                f"{format_bytes(self._max_leased_bytes)}: let go of views, or raise the peer's max_leased"
            )
            return local.LeaseGrant(0, 0, 0, entry.length, 0, error=item_error(error))
        number = self._segment.lease(entry, holder=client.holder, now=self._unix)
        return lease_grant(number, entry)

    async def _lease_later(
        self,
        client: LocalClient,
        message: local.Lease,
        digests: Sequence[bytes],
        grants: list[local.LeaseGrant | None],
    ) -> local.Leased:
        async def bring(position: int) -> None:
            grants[position] = await self._fetch_and_lease(client, digests[position], message)

        async with trio.open_nursery() as nursery:
            for position, grant in enumerate(grants):
                if grant is None:
                    nursery.start_soon(bring, position)
        return local.Leased([grant for grant in grants if grant is not None])

    async def _fetch_and_lease(
        self, client: LocalClient, digest: bytes, message: local.Lease
    ) -> local.LeaseGrant:
        error: Exception = NoSuchKey("no live peer holds this key")
        wait_seconds = min(message.wait_ms / 1000, MAX_WAIT_SECONDS)
        for _ in range(FETCH_ROUNDS):  # what was just fetched may be evicted before it is leased
            operation = self._core.fetch(
                digest,
                self._now,
                wait_seconds=wait_seconds,
                progress_seconds=message.deadline_ms / 1000,
            )
            await self._settle(operation)
            grant = self._lease_here(client, digest)
            if grant is not None:
                return grant
            if isinstance(operation.result, Exception):
                error = operation.result
                break
        return local.LeaseGrant(0, 0, 0, 0, 0, error=item_error(error))

    def _release(self, client: LocalClient, message: local.Release) -> None:
        for lease in message.leases:
            self._segment.release(lease, holder=client.holder)

    def _plan(self, client: LocalClient, message: local.Plan) -> Answer:
        digests = check_batch(split_digests(message.digests))
        operation = LookupOperation(
            self._core,
            digests,
            wait_seconds=min(message.wait_ms / 1000, MAX_WAIT_SECONDS),
            exclude=frozenset(message.exclude),
        )
        self._core.start(operation, self._now)
        if operation.done:
            return self._planned(operation)
        return self._plan_later(operation)

    async def _plan_later(self, operation: LookupOperation) -> local.Planned:
        await self._node.complete(operation)
        return self._planned(operation)

    def _planned(self, operation: LookupOperation) -> local.Planned:
        return local.Planned([self._plan_item(copies) for copies in operation.result])

    def _plan_item(self, copies: Sequence[KnownCopy]) -> local.PlanItem:
        reachable = [copy for copy in copies if copy.reachable]
        unreachable = len(copies) - len(reachable)
        if any(copy.local for copy in reachable):
            return local.PlanItem([], local=True, known_unreachable=unreachable)
        holders = [self._holder(copy) for copy in reachable[:HOLDERS_PER_PLAN]]
        error = local.OK
        if not holders:
            error = (
                local.ItemError(
                    int(Code.UNAVAILABLE),
                    f"{unreachable} known copies, but no holder can be reached now",
                    unreachable,
                )
                if unreachable
                else no_such_key()
            )
        return local.PlanItem(holders, known_unreachable=unreachable, error=error)

    def _holder(self, copy: KnownCopy) -> local.Holder:
        remote = self._node.remote_copy(copy)
        granted = self._office.for_clients(copy.peer_id)
        return local.Holder(
            copy.member,
            copy.peer_id,
            self._core.name_of(copy.peer_id),
            list(remote.data),
            remote.socket,
            remote.same_host,
            copy.record.slot,
            copy.record.size_units,
            copy.record.version.clock,
            copy.record.version.writer,
            int(copy.record.tier),
            granted.ticket.claims,
            granted.ticket.signature,
            granted.secret,
        )

    def _report(self, client: LocalClient, message: local.Report) -> None:
        for access in message.accesses[:MAX_BATCH]:
            self._segment.touch(access.digest, max(0, access.count), self._unix)
            self._core.counters["client_reads"] += max(0, access.count)
            self._core.counters["client_read_bytes"] += max(0, access.bytes_read)
        for failure in message.failures[:MAX_BATCH]:
            self._core.client_reported(failure, self._now)

    # --- asking ------------------------------------------------------------------------------

    def _known(self, digest: bytes) -> bool:
        return any(copy.reachable for copy in self._core.known_copies(digest, self._now))

    def _contains(self, client: LocalClient, message: local.Contains) -> local.ContainsReply:
        digests = split_digests(message.digests)
        return local.ContainsReply(bytes(self._known(digest) for digest in digests))

    def _match_prefix(self, client: LocalClient, message: local.MatchPrefix) -> local.MatchedPrefix:
        length = 0
        for digest in split_digests(message.digests):
            if not self._known(digest):
                break
            length += 1
        return local.MatchedPrefix(length)

    async def _locate(self, client: LocalClient, message: local.Locate) -> local.Located:
        digests = check_batch(split_digests(message.digests))
        operation = LookupOperation(self._core, digests)
        found = await self._node.complete(self._core.start(operation, self._now))
        return local.Located([[self._copy(copy) for copy in copies] for copies in found])

    def _copy(self, copy: KnownCopy) -> local.Copy:
        return local.Copy(
            copy.peer_id,
            self._core.name_of(copy.peer_id),
            int(copy.record.tier),
            copy.record.size_units * 4096,
            copy.record.version.clock,
            copy.record.version.writer,
            copy.record.soft,
            copy.record.pin,
            copy.local,
            copy.reachable,
        )

    async def _list(self, client: LocalClient, message: local.ListKeys) -> local.Keys:
        request = ListKeys(
            message.namespace, message.prefix, message.after, message.limit, message.pinned
        )
        operation = self._core.start(
            ListOperation(self._core, request, local=message.local), self._now
        )
        page: ListedPage = await self._node.complete(operation)
        silent = [self._core.name_of(peer_id) for peer_id in page.silent]
        return local.Keys(page.items, page.more, silent)

    def _peers(self, client: LocalClient, message: local.Peers) -> local.PeersReply:
        entries = []
        for state in self._core.gossip.membership.states():
            me = state.peer_id == self._core.peer_id
            if state.record is not None and (message.everyone or state.alive or me):
                entries.append(
                    peer_entry(
                        state.record,
                        Status(state.status).name.lower(),
                        me=me,
                        heard_seconds_ago=0.0 if me else max(0.0, self._now - state.heard_at),
                    )
                )
        return local.PeersReply(entries)

    def _statistics(self, client: LocalClient, message: local.Statistics) -> local.StatisticsReply:
        document: dict[str, Any] = {
            "peer": peer_document(
                self._core, self._node.config.name, self._now, self._node.uptime_seconds
            )
        }
        if message.cluster:
            document["cluster"] = cluster_document(self._core)
        return local.StatisticsReply(json.dumps(document).encode())

    # --- changing ----------------------------------------------------------------------------

    async def _remove(self, client: LocalClient, message: local.Remove) -> local.Removed:
        self._require_write(client)
        check_batch(message.keys)
        operation = RemoveOperation(self._core, message.namespace, message.keys)
        existed = await self._node.complete(self._core.start(operation, self._now))
        return local.Removed(existed)

    def _leave(self, client: LocalClient, message: local.Leave) -> Empty:
        self._require_write(client)
        self._node.drain_seconds = max(0.0, min(message.drain_seconds, MAX_WAIT_SECONDS))
        self._node.leave_requested.set()
        return Empty()

    async def _replicate(self, client: LocalClient, message: local.Replicate) -> local.PutOutcome:
        self._require_write(client)
        if not 1 <= message.copies <= MAX_REPLICAS:
            raise ValueError(f"copies must be 1 to {MAX_REPLICAS}, not {message.copies}")
        entry = self._segment.find(message.digest, self._unix)
        if entry is None:
            entry = await self._node.complete(
                self._core.fetch(message.digest, self._now, soft=False)
            )
        self._core.strengthen(entry, entry.pin, message.copies, self._now)
        operation = ReplicateOperation(self._core, entry, message.copies)
        copies = await self._node.complete(self._core.start(operation, self._now))
        version = entry.version
        return local.PutOutcome(
            int(local.PutStatus.UNCHANGED), copies, message.copies, version.clock, version.writer
        )

    def _pin(self, client: LocalClient, message: local.SetPin) -> local.Done:
        self._require_write(client)
        if message.pin not in (0, 1, 2):
            raise ValueError(f"pin {message.pin} is not none, soft or hard")
        items = []
        for digest in check_batch(split_digests(message.digests)):
            entry = self._segment.find(digest, self._unix)
            if entry is None:
                items.append(no_such_key())
                continue
            soft_seconds = message.ttl_ms / 1000 or SOFT_PIN_SECONDS
            until = self._unix + soft_seconds if message.pin == Pin.SOFT else 0.0
            self._segment.set_pin(entry, Pin(message.pin), until)
            self._core.announce(entry, self._now)
            items.append(local.OK)
        return local.Done(items)

    def _flush(self, client: LocalClient, message: local.Flush) -> Empty:
        self._require_write(client)
        name = namespace_digest(message.namespace)
        version = self._core.version_above(Version(0, 0), self._now)
        self._core.write_floor(name, version, self._now, SCOPE_NAMESPACE)
        return Empty()

    def _prefetch(self, client: LocalClient, message: local.Prefetch) -> Empty:
        for digest in check_batch(split_digests(message.digests)):
            if self._segment.find(digest, self._unix) is None:
                self._core.fetch(digest, self._now)
        return Empty()


def check_batch(items: Sequence[Any]) -> Sequence[Any]:
    """Raise `ProtocolError` for a batch that is too long; else return it."""
    if len(items) > MAX_BATCH:
        raise ProtocolError(f"a batch of {len(items):,} items; at most {MAX_BATCH:,} are allowed")
    return items


def item_error(error: Exception) -> local.ItemError:
    """An error as one item of a batch carries it."""
    return local.ItemError(int(code_of(error)), str(error), getattr(error, "needed", 0))


def no_such_key() -> local.ItemError:
    return local.ItemError(int(Code.NO_SUCH_KEY), "no live peer holds this key")


def failed_put(error: Exception) -> local.PutOutcome:
    return local.PutOutcome(0, 0, 0, 0, 0, item_error(error))


def put_outcome(result: Any) -> local.PutOutcome:
    """A put's end as it travels."""
    if isinstance(result, PutEnd):
        return local.PutOutcome(
            int(result.status),
            result.copies,
            result.wanted,
            result.version.clock,
            result.version.writer,
        )
    return failed_put(result if isinstance(result, Exception) else DeadlineExceeded("cancelled"))


def lease_grant(number: int, entry: ObjectEntry) -> local.LeaseGrant:
    """Where the client finds the object."""
    return local.LeaseGrant(
        number,
        0,
        entry.offset,
        entry.length,
        entry.trailer_length,
        entry.version.clock,
        entry.version.writer,
        entry.version.root,
    )


def peer_entry(
    record: PeerRecord, status: str, *, me: bool, heard_seconds_ago: float
) -> local.PeerEntry:
    """A member as clients see it."""
    return local.PeerEntry(
        record.peer_id,
        record.name,
        status,
        record.incarnation,
        list(record.control),
        list(record.data),
        record.memory_capacity,
        record.memory_used,
        record.head.count,
        me,
        record.software,
        round(heard_seconds_ago, 3),
    )
