"""The core's results as the local socket's messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from p2pstore.core.gets.key_pages import (
    ListedPage,
    ListOperation,
    holdings_here,
    holdings_of,
    is_known,
    known_keys,
)
from p2pstore.core.gets.lookup import LookupOperation, split_digests
from p2pstore.core.operation import KnownCopy
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.partition_homes import kept_name
from p2pstore.gossip.locations.location_lookups import HeldKeys
from p2pstore.gossip.records import Member, PeerRecord, member_of
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import LocalClient
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import DIGEST_BYTES, SIZE_UNIT_BYTES, namespace_digest
from p2pstore.peer.node import Node
from p2pstore.peer.statistics import MEMBERS_PER_STEP, cluster_document, json_in_steps
from p2pstore.results import SOURCE_KINDS
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.status.measures import Traffic
from p2pstore.transfer.peer_messages import ListKeys
from p2pstore.wire import Code, Message, code_of

MAX_WAIT_SECONDS: Final = 24 * 3600.0
"""Upper bound of a client's wait."""

Answer = Message | None | Awaitable[Message | None]
"""At once, or something to await."""


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


def known_copy(core: PeerCore, copy: KnownCopy) -> local.Copy:
    """A copy as clients see it."""
    record = copy.record
    return local.Copy(
        copy.peer_id,
        core.name_of(copy.peer_id),
        int(record.tier),
        record.size_units * SIZE_UNIT_BYTES,
        record.version.clock,
        record.version.writer,
        record.soft,
        record.pin,
        copy.local,
        copy.reachable,
    )


def peer_entry(
    record: PeerRecord,
    status: str,
    *,
    me: bool,
    leaving: bool,
    heard_seconds_ago: float,
    traffic: Traffic,
) -> local.PeerEntry:
    """A member as clients see it."""
    round_trip_seconds = traffic.round_trip_seconds(record.peer_id)
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
        -1.0 if round_trip_seconds is None else round(round_trip_seconds, 6),
        [
            local.TransportUse(
                name,
                use.objects,
                use.bytes,
                use.failures,
                median_microseconds=use.durations.quantile(0.5),
                p99_microseconds=use.durations.quantile(0.99),
            )
            for name, use in sorted(traffic.used(member_of(record.peer_id)).items())
        ],
        kept_name(record.directory),
        record.load_permille,
        record.leaving or leaving,
    )


_KNOWN: Final = local.ContainsReply(b"\1")
_UNKNOWN: Final = local.ContainsReply(b"\0")


class LocalQueries:
    """Answers to clients' questions: presence, locations, keys, members, statistics."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core

    @property
    def _now(self) -> float:
        return self._node.now

    def contains(self, client: LocalClient, message: local.Contains) -> Answer:
        """A byte per digest: 1 when a live peer is known to hold it."""
        packed, knows_all = message.digests, self._core.gossip.partitions.mode.knows_all
        if knows_all and len(packed) == DIGEST_BYTES:  # its round trip should cost nothing else
            space = namespace_digest(client.namespace)
            return _KNOWN if is_known(self._core, packed, self._now, space) else _UNKNOWN
        return self._presence(client, packed, local.ContainsReply)

    def match_prefix(self, client: LocalClient, message: local.MatchPrefix) -> Answer:
        """How many keys from the first on are held."""
        return self._presence(client, message.digests, _matched)

    def estimate(self, client: LocalClient, message: local.Locate) -> Answer:
        """How long it takes to bring objects here."""
        digests = check_batch(split_digests(message.digests))
        space = namespace_digest(client.namespace)
        found = holdings_here(self._core, digests, self._now, space)
        if found is not None:
            return estimated(self._node, digests, found)
        return self._ask_estimate(digests, space)

    async def _ask_estimate(self, digests: Sequence[bytes], space: bytes) -> local.Estimated:
        operation = LookupOperation(self._core, digests, namespace=space)
        copies = await self._node.complete(operation)
        return estimated(self._node, digests, holdings_of(copies))

    def _presence(self, client: LocalClient, packed: bytes, reply: Callable[[bytes], Message]) -> Answer:
        """The reply to a byte per digest: 1 when some live peer is known to hold it. A peer that need not know all asks
        homes of keys that are not known here."""
        digests, namespace = check_batch(split_digests(packed)), namespace_digest(client.namespace)
        known = known_keys(self._core, digests, self._now, namespace)
        if not self._core.gossip.partitions.mode.knows_all:
            return self._ask_presence(digests, namespace, known, reply)
        return reply(bytes([digest in known for digest in digests]))

    async def _ask_presence(
        self,
        digests: Sequence[bytes],
        namespace: bytes,
        known: set[bytes],
        reply: Callable[[bytes], Message],
    ) -> Message:
        missing = [digest for digest in digests if digest not in known]
        operation = LookupOperation(self._core, missing, namespace=namespace)
        found = await self._node.complete(operation)
        for digest, copies in zip(missing, found, strict=True):
            if any(copy.reachable for copy in copies) or digest in operation.claimed:
                known.add(digest)  # as `_presence` counts what is claimed
        return reply(bytes([digest in known for digest in digests]))

    async def locate(self, client: LocalClient, message: local.Locate) -> local.Located:
        """The known copies of each digest."""
        digests = check_batch(split_digests(message.digests))
        operation = LookupOperation(self._core, digests)
        found = await self._node.complete(operation)
        return await take_turns(self._located(found))

    def _located(self, found: Sequence[Sequence[KnownCopy]]) -> Steps[local.Located]:
        items: list[list[local.Copy]] = []
        for copies in found:
            items.append([known_copy(self._core, copy) for copy in copies])
            yield
        return local.Located(items)

    async def list_keys(self, client: LocalClient, message: local.ListKeys) -> local.Keys:
        """A page of keys."""
        request = ListKeys(
            message.namespace, message.prefix, message.after, message.limit, message.pinned
        )
        operation = ListOperation(self._core, request, local=message.local)
        page: ListedPage = await self._node.complete(operation)
        silent = [self._core.name_of(peer_id) for peer_id in page.silent]
        return local.Keys(page.items, page.more, silent)

    def peers(self, client: LocalClient, message: local.Peers) -> Steps[local.PeersReply]:
        """The members of the cluster."""
        entries = []
        for number, state in enumerate([*self._core.gossip.membership.states()]):
            if number % MEMBERS_PER_STEP == 0:
                yield
            me = state.peer_id == self._core.peer_id
            if state.record is not None and (message.everyone or state.alive or me):
                entries.append(
                    peer_entry(
                        state.record,
                        Status(state.status).name.lower(),
                        me=me,
                        leaving=me and self._core.closing,
                        heard_seconds_ago=0.0 if me else max(0.0, self._now - state.heard_at),
                        traffic=self._node.watch.traffic,
                    )
                )
        return local.PeersReply(entries)

    def statistics(self, client: LocalClient, message: local.Statistics) -> Steps[local.StatisticsReply]:
        """The statistics document as JSON."""
        peer = self._node.statistics.document()
        yield
        look = self._node.statistics.checkup.look(peer)
        peer["problems"] = look.documents()
        yield
        document: dict[str, Any] = {"peer": peer}
        if message.cluster:
            document["cluster"] = yield from cluster_document(self._core, self._now)
        return local.StatisticsReply((yield from json_in_steps(document)))


def estimated(node: Node, digests: Sequence[bytes], found: Mapping[Member, HeldKeys]) -> local.Estimated:
    """The time to bring here the objects that these members hold."""
    sources: list[local.ExpectedFetch] = []
    by_key = [-1] * len(digests)
    for source in node.estimator.estimate(digests, found, node.now):
        for place in source.places.tolist():
            by_key[place] = len(sources)
        sources.append(
            local.ExpectedFetch(
                source.peer_id,
                node.core.name_of(source.peer_id),
                SOURCE_KINDS.index(source.kind),
                len(source.places),
                source.length_bytes,
                source.expected.seconds,
                source.expected.spread,
            )
        )
    return local.Estimated(sources, by_key)


def _matched(present: bytes) -> local.MatchedPrefix:
    first_absent = present.find(0)
    return local.MatchedPrefix(len(present) if first_absent < 0 else first_absent)
