"""Reads of local clients: leases of what is here, plans for what is elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec
import trio

from p2pstore.core.gets.fetch_operation import unavailable
from p2pstore.core.gets.lookup import PATIENCE_SHARE, LookupOperation, split_digests
from p2pstore.core.operation import KnownCopy
from p2pstore.errors import LeaseLimitExceeded, NoSuchKey
from p2pstore.gossip.records import Tier
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import LocalClient
from p2pstore.local.local_requests import MAX_REPORTED_FAILURES
from p2pstore.memory.segment_layout import GRANULE_BYTES
from p2pstore.objects import MIB, format_bytes
from p2pstore.peer.for_clients.local_queries import (
    MAX_WAIT_SECONDS,
    Answer,
    check_batch,
    item_error,
    lease_grant,
    no_such_key,
)
from p2pstore.peer.node import Node
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import in_turns, take_turns
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.wire import Code

FETCH_ROUNDS: Final = 3
BROUGHT_AT_ONCE: Final = 32
"""Objects that begin to be fetched between two looks at what has come."""
THROUGH_PEER_BYTES: Final = MIB
"""Clients have the peer read from here on by RDMA: less is done sooner than the peer is asked."""
THROUGH_PEER_SHARE: Final = 16
"""More than this part of the peer's memory would cost the others their place in it."""
HOLDERS_PER_PLAN: Final = 8


class LocalGets:
    """LEASE, RELEASE, PLAN and REPORT."""

    def __init__(self, node: Node, issuer: TicketIssuer, max_leased_bytes: int) -> None:
        self._node = node
        self._core = node.core
        self._segment = node.core.segment
        self._issuer = issuer
        self._max_leased_bytes = max_leased_bytes

    def lease(self, client: LocalClient, message: local.Lease) -> Answer:
        """Lease objects; objects elsewhere are fetched first."""
        digests = check_batch(split_digests(message.digests))
        granted = in_turns(self._lease_all_here(client, digests))
        if isinstance(granted, list):
            leased = self._leased(message, granted)
            if leased is not None:
                return leased
        return self._lease_later(client, message, digests, granted)

    def _lease_all_here(
        self, client: LocalClient, digests: Sequence[bytes]
    ) -> Steps[list[local.LeaseGrant | None]]:
        grants: list[local.LeaseGrant | None] = []
        try:
            for digest in digests:
                if grants:
                    yield
                grants.append(self._lease_here(client, digest))
        except BaseException:  # the client will not release them
            for grant in grants:
                if grant is not None and grant.lease:
                    self._segment.leases.release(grant.lease, session=client.session)
            raise
        return grants

    def _leased(
        self, message: local.Lease, grants: Sequence[local.LeaseGrant | None]
    ) -> local.Leased | None:
        """The answer, unless something is to be fetched first."""
        if all(grant is not None for grant in grants):
            return local.Leased([grant for grant in grants if grant is not None])
        if message.fetch or message.wait_ms:
            return None
        missing = local.LeaseGrant(0, 0, 0, 0, 0, error=no_such_key())
        return local.Leased([grant or missing for grant in grants])

    def _lease_here(self, client: LocalClient, digest: bytes) -> local.LeaseGrant | None:
        entry = self._segment.find(digest, self._core.unix(self._node.now))
        if entry is None:
            return None
        held = self._segment.leases.leased_bytes_of(client.session)
        if held + entry.length > self._max_leased_bytes:
            error = LeaseLimitExceeded(
                f"this client holds {format_bytes(held)} leased and may hold "
                f"{format_bytes(self._max_leased_bytes)}: let go of views, or raise the peer's max_leased"
            )
            return local.LeaseGrant(0, 0, 0, entry.length, 0, error=item_error(error))
        number = self._segment.leases.lease(
            entry, session=client.session, now=self._core.unix(self._node.now)
        )
        return lease_grant(number, entry)

    async def _lease_later(
        self,
        client: LocalClient,
        message: local.Lease,
        digests: Sequence[bytes],
        granted: list[local.LeaseGrant | None] | Awaitable[list[local.LeaseGrant | None]],
    ) -> local.Leased:
        grants = await granted if isinstance(granted, Awaitable) else granted
        leased = self._leased(message, grants)
        if leased is not None:
            return leased

        async def bring(position: int) -> None:
            grants[position] = await self._fetch_and_lease(client, digests[position], message)

        missing = [position for position, grant in enumerate(grants) if grant is None]
        async with trio.open_nursery() as nursery:
            for begun, position in enumerate(missing, 1):
                nursery.start_soon(bring, position)
                if begun % BROUGHT_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
        return local.Leased([grant for grant in grants if grant is not None])

    async def _fetch_and_lease(
        self, client: LocalClient, digest: bytes, message: local.Lease
    ) -> local.LeaseGrant:
        error: Exception = NoSuchKey("no live peer holds this key")
        if message.wait_ms:  # not a part of the fetch, which others share who wait less, or longer
            wait_seconds = min(message.wait_ms / 1000, MAX_WAIT_SECONDS)
            lookup = LookupOperation(self._core, [digest], wait_seconds=wait_seconds)
            await self._node.settle(lookup)
        for _ in range(FETCH_ROUNDS):  # a fetched object may be evicted before it is leased
            operation = self._core.operations.fetch(
                digest, self._node.now, progress_seconds=message.deadline_ms / 1000
            )
            await self._node.settle(operation)
            grant = self._lease_here(client, digest)
            if grant is not None:
                source, transport = operation.brought
                return msgspec.structs.replace(grant, source=source, transport=transport)
            if isinstance(operation.result, Exception):
                error = operation.result
                break
        return local.LeaseGrant(0, 0, 0, 0, 0, error=item_error(error))

    def release(self, client: LocalClient, message: local.Release) -> Steps[None]:
        """End leases; one that has ended already is passed over."""
        for place, lease in enumerate(message.leases):
            if place:
                yield
            with suppress(ValueError):
                self._segment.leases.release(lease, session=client.session)

    def plan(
        self, client: LocalClient, message: local.Plan
    ) -> Steps[local.Planned] | Awaitable[local.Planned]:
        """Where objects can be read, asking the keys' home peers where this one does not know."""
        digests = check_batch(split_digests(message.digests))
        operation = LookupOperation(
            self._core,
            digests,
            wait_seconds=min(message.wait_ms / 1000, MAX_WAIT_SECONDS),
            exclude=frozenset(
                self._core.member if member == local.OWN_COPY else member for member in message.exclude
            ),
            namespace=message.namespace or None,
            patience_seconds=PATIENCE_SHARE * message.deadline_ms / 1000,
        )
        self._core.operations.start(operation, self._node.now)
        if operation.done:
            return self._planned(operation)
        return self._plan_later(operation)

    async def _plan_later(self, operation: LookupOperation) -> local.Planned:
        await self._node.complete(operation)
        return await take_turns(self._planned(operation))

    def _planned(self, operation: LookupOperation) -> Steps[local.Planned]:
        items: list[local.PlanItem] = []
        for digest, copies in zip(operation.digests, operation.result, strict=True):
            if items:
                yield
            absence = local.OK if copies else item_error(operation.absence(digest))
            items.append(self._plan_item(copies, absence))
        return local.Planned(items, operation.homes_asked)

    def _plan_item(self, copies: Sequence[KnownCopy], absence: local.ItemError) -> local.PlanItem:
        reachable = [copy for copy in copies if copy.reachable]
        unreachable = len(copies) - len(reachable)
        mine = next((copy for copy in reachable if copy.local), None)
        if mine is not None and mine.record.tier is Tier.SSD:
            holder = self._holder(mine)
            return local.PlanItem(
                [msgspec.structs.replace(holder, data=[], socket="")],
                known_unreachable=unreachable,
                through_peer=True,
                on_ssd=True,
            )
        if mine is not None:
            return local.PlanItem([], local=True, known_unreachable=unreachable)
        ordered = self._node.routes.reading_order(reachable)[:HOLDERS_PER_PLAN]
        holders = [self._holder(copy) for copy in ordered]
        error = local.OK
        if not holders and unreachable:
            text = str(unavailable(unreachable))
            error = local.ItemError(int(Code.UNAVAILABLE), text, unreachable)
        elif not holders:
            error = absence
        return local.PlanItem(
            holders,
            known_unreachable=unreachable,
            error=error,
            through_peer=bool(holders) and self._goes_through_peer(holders[0]),
        )

    def _goes_through_peer(self, best: local.Holder) -> bool:
        if self._node.config.transport == "rdma":
            return True
        if best.tier == Tier.SSD:
            return False
        length = best.size_units * GRANULE_BYTES
        most = self._segment.data_bytes // THROUGH_PEER_SHARE
        return 0 < best.through_peer_bytes <= length <= most

    def _holder(self, copy: KnownCopy) -> local.Holder:
        remote = self._node.routes.way_to(copy)
        if self._node.config.transport == "rdma":  # clients have no part in that
            remote = replace(remote, data=())
        by_rdma = not remote.same_host and self._node.routes.reads_by_rdma(remote)
        granted = self._issuer.for_clients(copy.peer_id)
        return local.Holder(
            copy.member,
            copy.peer_id,
            self._core.name_of(copy.peer_id),
            list(remote.data),
            remote.socket,
            remote.same_host,
            copy.record.slot,
            copy.record.size_units,
            copy.announced.clock,
            copy.announced.writer,
            int(copy.record.tier),
            granted.ticket.claims,
            granted.ticket.signature,
            granted.secret,
            THROUGH_PEER_BYTES if by_rdma else 0,
            copy.announced.root,
        )

    def report(self, client: LocalClient, message: local.Report) -> Steps[None]:
        """Take in reads that this peer did not see, and holders that failed."""
        for access in message.accesses[:MAX_BATCH]:
            count = max(0, access.count)
            views = max(0, min(access.views, count))
            self._segment.objects.touch(access.digest, count, self._core.unix(self._node.now))
            self._core.counters["client_reads"] += count - views
            self._core.counters["client_leases"] += views
            self._core.counters["client_read_bytes"] += max(0, access.bytes_read)
            yield
        for read in message.unseen[:MAX_BATCH]:
            self._core.read_reports.note(read.member, read.digest, read.count, self._node.now)
            yield
        for failure in message.failures[:MAX_REPORTED_FAILURES]:
            if failure.member == local.OWN_COPY:
                self._node.guard.doubt_own_copy(failure.digest)
            else:
                position = failure.incarnation, failure.sequence
                report = HolderReport(failure.member, failure.code, "", "", *position)
                self._core.holders.failed(failure.digest, report, self._node.now)
            yield
        for timing in message.timings[:MAX_BATCH]:
            self._node.estimator.observe(
                self._core.member if timing.member == local.OWN_COPY else timing.member,
                on_ssd=timing.on_ssd,
                requests=timing.requests,
                length_bytes=timing.bytes,
                seconds=timing.microseconds / 1e6,
                now=self._node.now,
            )
            yield
