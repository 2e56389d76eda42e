"""Answers on data connections."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.checkpoint.peer.running_swarms import RunningSwarms
from p2pstore.core.copies.copy_destination import TakeCopiesOperation
from p2pstore.core.gets.hot_objects import HOT_BYTES
from p2pstore.core.operation import Operation
from p2pstore.core.puts.deciding import SLOT_ONLY
from p2pstore.core.puts.placing import IncomingStores, stored_reply
from p2pstore.core.serving import reply_of
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import Member, member_of
from p2pstore.memory.entries import ObjectEntry, SmallObjectsLent
from p2pstore.memory.references import Loan
from p2pstore.memory.segment_layout import Slot, SlotState, TrailerBody, encode_slot, encode_trailer
from p2pstore.peer.for_clients.local_backend import Erasing
from p2pstore.peer.node import Node
from p2pstore.runtime.streams import BytesLike
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.transfer.data_messages import (
    DataKind,
    GetItem,
    GetManifest,
    GetSmall,
    ObjectReply,
    ObjectStatus,
    Store,
    Stored,
    keeps_of,
)
from p2pstore.transfer.peer_messages import (
    Flush,
    Remove,
    Snapshot,
    SnapshotReply,
    Statistics,
    StatisticsReply,
)
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.serving.read_answers import LentObject
from p2pstore.transfer.serving.serving_backends import OpenedStore
from p2pstore.wire import Failure, Message, error_of

if TYPE_CHECKING:
    from p2pstore.ssd_tier.index import ColdEntry

BRING_SECONDS: Final = 4.0
"""For objects that are asked for before they are in memory. The asking peer gives up after 5 s without progress."""


class PeerDataBackend:
    """Satisfies `serving_backends.DataBackend`."""

    def __init__(self, node: Node, swarms: RunningSwarms, erasing: Erasing) -> None:
        self._node = node
        self._erasing = erasing
        self.swarms = swarms
        self._core = node.core
        self._segment = node.core.segment
        self._hot = threading.Lock()
        """Guards the readers of hot objects, which sending threads note as well."""
        self._has_effects = False
        """Whether an answer that is about to be sent left something to do."""

    def must_bring(self, items: Sequence[GetItem]) -> bool:
        if self._core.cold.store is None and not self._core.operations.fetching:
            return False
        now = self._node.now
        return any(item.first_chunk != SLOT_ONLY and self._comes(item, now) for item in items)

    def _comes(self, item: GetItem, now: float) -> bool:
        is_on_its_way = item.first_chunk == 0 and self._core.operations.is_fetching(item.digest)
        return is_on_its_way or self._core.cold.find_only_here(item.digest, now) is not None

    async def bring(self, items: Sequence[GetItem]) -> None:
        now = self._node.now
        operations = [
            self._core.operations.fetch(item.digest, now, only_here=True)
            for item in items
            if self._comes(item, now)
        ]
        with trio.move_on_after(BRING_SECONDS):
            for operation in operations:
                await self._node.settle(operation)

    def _sent_to(self, entry: ObjectEntry, reader: bytes, keeps: int, now: float) -> list[Member] | None:
        """The keepers to which the reader of a hot object is sent; None: it is served here."""
        if entry.length < HOT_BYTES:
            return None
        member = member_of(reader)
        state = self._core.gossip.membership.resolve(member)
        memory_bytes = state.memory_capacity if state is not None else 0
        with self._hot:
            return self._core.hot_objects.read(
                entry.digest, entry.length, member, memory_bytes, keeps_of(keeps), now
            )

    def lend(
        self, item: GetItem, reader: bytes, keeps: int, *, decides: bool
    ) -> LentObject | ObjectReply | None:
        now, segment = self._node.now, self._segment
        lent = self._core.objects.lend(item.digest, now, decides=decides)
        if lent is None:
            return self._why_not(item, now) if decides else None
        loan, entry = lent
        kept = False
        try:
            if not item.first_chunk:
                keepers = self._sent_to(entry, reader, keeps, now)
                if keepers is not None and decides:
                    self._core.counters["reads_sent_on"] += 1
                    return ObjectReply(int(ObjectStatus.BUSY), others=keepers, keep=True)
                if keepers is not None:
                    return None
            elif decides:  # a read that goes on; those that begin are noted when they are sent
                segment.objects.used(entry, 0, self._core.unix(now))
            slot, trailer = segment.table.slot_bytes(entry), segment.table.trailer_bytes(entry)
            kept = True
            return LentObject(slot, trailer, segment.payload(entry), loan)
        finally:
            if not kept:
                segment.leases.end_loan(loan)

    def _why_not(self, item: GetItem, now: float) -> LentObject | ObjectReply:
        """About an object that is not in memory, or not to be read there."""
        cold = self._core.cold.find(item.digest, now)
        if cold is not None and item.first_chunk == SLOT_ONLY:
            slot = encode_slot(Slot(SlotState.LIVE, cold.digest, cold.version, 0, cold.length, 0))
            return LentObject(slot, _trailer_on_ssd(cold), memoryview(b""), None)
        if cold is not None:  # not brought: the disk hangs, or memory is full of what must stay
            self._core.counters["reads_not_brought"] += 1
            return ObjectReply(int(ObjectStatus.BUSY))
        self._core.counters["reads_not_found"] += 1
        return ObjectReply(
            int(ObjectStatus.NOT_FOUND),
            incarnation=self._core.incarnation,
            sequence=self._core.gossip.log.sequence,
        )

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        now = self._node.now
        if asked.most_bytes < HOT_BYTES:
            return self._core.objects.lend_small(asked.digests, asked.most_bytes, now)

        def is_sent_on(entry: ObjectEntry) -> bool:
            return self._sent_to(entry, reader, asked.keeps, now) is not None

        return self._core.objects.lend_small(asked.digests, asked.most_bytes, now, is_sent_on)

    def end_loan(self, handle: Loan) -> None:
        self._segment.leases.end_loan(handle)

    def note_reads(self, counts: Mapping[bytes, int]) -> None:
        unix = self._core.unix(self._node.now)
        for digest, count in counts.items():
            self._segment.objects.touch(digest, count, unix)
        self._core.counters["reads_served"] += sum(counts.values())

    async def handle(
        self, kind: DataKind, message: Message, claims: TicketClaims
    ) -> tuple[Message, Sequence[BytesLike]]:
        if isinstance(message, Statistics):
            document = self._node.statistics.document(private=False)
            return StatisticsReply(json.dumps(document).encode()), ()
        if isinstance(message, Remove | Flush):
            return await self._erasing.serve(message, claims.issuer), ()
        if isinstance(message, GetManifest):
            return self.swarms.manifest(message)
        if isinstance(message, Snapshot):
            if message.member != self._core.member:
                raise P2PStoreError("a peer gives a snapshot of its own log only")
            return await self._own_snapshot()
        # Also while this peer leaves: it is the home of keys as long as the others believe so.
        answer = self._core.serve(claims.issuer, kind, message, self._node.now)
        if isinstance(answer, TakeCopiesOperation):
            try:
                await self._node.requests.copies.take(answer)
            finally:
                self._has_effects = True
        else:
            self._node.process()
        if isinstance(answer, Operation):
            if not answer.done:
                with contextlib.suppress(P2PStoreError):  # the reply says why
                    await self._node.complete(answer)
            answer = reply_of(answer)
        if isinstance(answer, Failure):
            raise error_of(answer.code, answer.text, answer.detail)
        return answer, ()

    def answered(self) -> None:
        if self._has_effects:
            self._has_effects = False
            self._core.books.settle()
            self._node.process()

    async def _own_snapshot(self) -> tuple[SnapshotReply, Sequence[BytesLike]]:
        """Of a million records it would hold the loop for 20 ms at once."""
        copy = await take_turns(self._core.gossip.log.copy_in_steps())
        head = copy.head
        reply = SnapshotReply(self._core.member, copy.incarnation, head.sequence, head.set_hash)
        return reply, copy.parts


def _trailer_on_ssd(cold: ColdEntry) -> bytes:
    """The trailer of what is on the SSD alone, without its sums; nothing where only its record tells all."""
    if cold.described:
        return b""
    return encode_trailer(
        TrailerBody(
            cold.namespace,
            cold.key,
            b"",
            expires_unix_ms=cold.expires_unix_ms,
            replicas=cold.replicas,
            pin=cold.pin,
        )
    )


class PeerStoreBackend:
    """Satisfies `p2pstore.transfer.serving.serving_backends.StoreBackend`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self._incoming = IncomingStores(node.core)

    async def begin_store(self, request: Store, claims: TicketClaims) -> OpenedStore | Stored:
        self._node.check_open()
        operation = self._incoming.examine(request, self._node.now)
        if await self._node.complete(operation) is not None:
            return stored_reply(self._core, operation, self._node.now)
        try:
            incoming = await take_turns(self._incoming.open(request, claims.issuer, self._node.now))
        finally:
            self._node.process()  # withdraws evicted objects
        return OpenedStore(self._incoming.payload(incoming), request.sums, incoming)

    async def finish_store(self, opened: OpenedStore) -> Stored:
        operation = self._incoming.put(opened.handle, self._node.now)
        await self._node.complete(operation)
        self._core.counters["values_taken_in"] += 1
        return stored_reply(self._core, operation, self._node.now)

    def abandon_store(self, opened: OpenedStore) -> None:
        self._incoming.close(opened.handle)
