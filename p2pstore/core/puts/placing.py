"""Where a value goes that this peer has no room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from p2pstore.core.operation import PutEnd
from p2pstore.core.own_objects import location_of
from p2pstore.core.puts.publishing import trailer_of
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.errors import CapacityExceeded, DeadlineExceeded, ProtocolError, Unavailable
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.records import PeerId
from p2pstore.memory.segment_layout import EXPIRY_BYTES, MAX_TRAILER_BYTES, encode_trailer
from p2pstore.objects import check_object_length, format_bytes, key_digest, root_checksum
from p2pstore.put_facts import PutFacts, PutOptions
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.data_messages import Store, Stored

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_TARGETS: Final = 8
MAX_HOLDERS: Final = 3


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """Memory that a live peer offers, by gossip. `doubtful`: suspected, or a connection failed just now."""

    peer_id: PeerId
    capacity_bytes: int
    free_bytes: int
    same_host: bool = False
    doubtful: bool = False


def choose_rooms(
    rooms: Sequence[OfferedMemory], length: int, count: int, rng: Random
) -> list[OfferedMemory]:
    """Up to `count` rooms that could hold a value of `length` bytes, in the order to ask them: doubtful ones last,
    before them those that must evict, this host first. Of equals the emptier of two at random: gossip's figures are a
    little old, and not all writers shall choose the same peer."""
    fitting = [room for room in rooms if room.capacity_bytes >= length]
    chosen: list[OfferedMemory] = []
    for group in _grouped(fitting, length):
        while group and len(chosen) < count:
            pair = rng.sample(range(len(group)), min(2, len(group)))
            chosen.append(group.pop(max(pair, key=lambda index: group[index].free_bytes)))
    return chosen


def _grouped(rooms: Sequence[OfferedMemory], length: int) -> list[list[OfferedMemory]]:
    groups: dict[tuple[bool, bool, bool], list[OfferedMemory]] = {}
    for room in rooms:
        rank = room.doubtful, room.free_bytes < length, not room.same_host
        groups.setdefault(rank, []).append(room)
    return [groups[rank] for rank in sorted(groups)]


def place(core: PeerCore, digest: bytes, length: int, host_id: bytes, now: float) -> list[PeerId]:
    """Peers to put a value on that this one has no room for, best first. Holders of the key, also this peer, come
    first: they know best whether it is new. Raises `CapacityExceeded`, naming the largest room, when no peer could hold
    it."""
    rooms = _rooms(core, host_id, now)
    able = {core.peer_id, *(room.peer_id for room in rooms)}
    holders = [
        copy.peer_id
        for copy in core.copies.known(digest, now)
        if copy.reachable and copy.peer_id in able
    ]
    others = [room.peer_id for room in choose_rooms(rooms, length, MAX_TARGETS, core.rng)]
    targets = list(dict.fromkeys(holders[:MAX_HOLDERS] + others))
    if not targets:
        raise CapacityExceeded(_no_room(core, rooms, length))
    return targets[:MAX_TARGETS]


def _rooms(core: PeerCore, host_id: bytes, now: float) -> list[OfferedMemory]:
    return [
        OfferedMemory(
            state.peer_id,
            record.memory_capacity,
            record.memory_capacity - record.memory_used,
            same_host=record.host_id == host_id,
            doubtful=state.status != Status.ALIVE or core.holders.is_avoided(state.member, now),
        )
        for state in core.gossip.membership.others()
        if (record := state.record) is not None
    ]


def _no_room(core: PeerCore, rooms: Sequence[OfferedMemory], length: int) -> str:
    taking = [room for room in rooms if room.capacity_bytes]
    if not taking:
        return "no other live peer takes values: start one with more --memory"
    largest = max(taking, key=lambda room: room.capacity_bytes)
    size, name = format_bytes(largest.capacity_bytes), core.name_of(largest.peer_id)
    return (
        f"no live peer can hold {format_bytes(length)}: the largest memory that another offers is "
        f"{size}, on {name}. Split the value over several keys, or give a peer more --memory"
    )


MAX_INCOMING: Final = 256
INCOMING_SHARE: Final = 0.5
"""Of this peer's memory that values on their way may take together; a single one may be larger."""
MEMBER_PART: Final = 2
"""One member and its clients may have this part of either: others find room beside values that are never finished."""


@dataclass(frozen=True, slots=True, eq=False)
class IncomingStore:
    """A value on its way here. It is what holds its reservation."""

    facts: PutFacts
    namespace: str
    session: object


class IncomingStores:
    """Decides on values from elsewhere. `open` reserves; every `IncomingStore` ends with `close`, after the
    `PutOperation` of `put` or without one."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._open: dict[object, tuple[bytes, int]] = {}
        """The member that each value on its way is of, and its bytes, by what holds its reservation."""

    @property
    def count(self) -> int:
        """How many values are on their way."""
        return len(self._open)

    def examine(self, request: Store, now: float) -> PutOperation:
        """Start what can be done without the value's bytes; its result is None when they are needed. Raises
        `ProtocolError` or `ValueError` for nonsense, `Unavailable` when this clock is too far behind to write above
        what the other saw."""
        facts = _facts(request)
        facts.options.check()
        check_object_length(request.length)
        if root_checksum(request.length, request.sums) != request.root:
            raise ProtocolError("the chunk sums of a value do not give its root checksum")
        core = self._core
        if not core.clock.observe(request.clock, core.believed_unix(now)):
            raise Unavailable(
                "this peer's clock is over 10 s behind the putting peer's: check the hosts' clocks"
            )
        operation = PutOperation(core, facts, session=None, namespace=request.namespace)
        return core.operations.start(operation, now)

    def open(self, request: Store, member: bytes, now: float) -> Steps[IncomingStore]:
        """Reserve room for a value of this member's, in steps. Raises `CapacityExceeded` and `ObjectTooLarge`."""
        core = self._core
        share = int(core.segment.data_bytes * INCOMING_SHARE)
        own = [length for owner, length in self._open.values() if owner == member]
        everybodys = [length for _, length in self._open.values()]
        _check_room(everybodys, request.length, MAX_INCOMING, share, "to this peer")
        _check_room(
            own,
            request.length,
            MAX_INCOMING // MEMBER_PART,
            share // MEMBER_PART,
            "from one member to this peer",
        )
        session = object()
        facts = _facts(request)
        trailer = trailer_of(facts, request.namespace, core.unix(now))
        room = len(encode_trailer(trailer)) + EXPIRY_BYTES
        self._open[session] = member, request.length
        try:
            reservation = yield from core.objects.reserve(
                request.length,
                min(room, MAX_TRAILER_BYTES),
                session=session,
                namespace=request.namespace,
                now=now,
            )
        except BaseException:
            del self._open[session]
            raise
        facts = msgspec.structs.replace(facts, reservation=reservation.number)
        return IncomingStore(facts, request.namespace, session)

    def payload(self, incoming: IncomingStore) -> memoryview:
        """Where the value goes. Nothing may write there after `put` or `close`."""
        return self._core.segment.reservation_view(incoming.facts.reservation, session=incoming.session)

    def put(self, incoming: IncomingStore, now: float) -> PutOperation:
        """The value has arrived, verified: decide as for a put of this peer's own clients."""
        operation = PutOperation(
            self._core,
            incoming.facts,
            session=incoming.session,
            namespace=incoming.namespace,
            verified=True,
        )
        return self._core.operations.start(operation, now)

    def close(self, incoming: IncomingStore) -> None:
        """The end of `open`: a value that was not put is dropped."""
        self._open.pop(incoming.session, None)
        self._core.segment.drop_session(incoming.session)


def _check_room(
    under_way: Sequence[int], length: int, most_values: int, most_bytes: int, where: str
) -> None:
    if len(under_way) >= most_values or (under_way and sum(under_way) + length > most_bytes):
        raise CapacityExceeded(
            f"{len(under_way)} values are on their way {where} already; there is room for "
            f"{format_bytes(most_bytes)} of them at a time"
        )


def _facts(request: Store) -> PutFacts:
    """Those of a value whose bytes have not come. Raises `ValueError` for a bad key or namespace."""
    options = PutOptions(
        request.replicas,
        request.pin,
        request.ttl_ms,
        request.overwrite,
        dtype=request.dtype,
        shape=request.shape,
    )
    digest = key_digest(request.key, request.namespace)
    return PutFacts(0, request.key, digest, request.length, request.sums, request.root, options)


def stored_reply(core: PeerCore, operation: PutOperation, now: float) -> Stored:
    """A put's end as it travels, with the location for the putting peer to know at once. Raises the put's error."""
    end = operation.result
    if isinstance(end, Exception):
        raise end
    if not isinstance(end, PutEnd):
        raise DeadlineExceeded("the put was cancelled")
    entry = core.segment.find(operation.digest, core.unix(now))
    return Stored(
        int(end.status),
        end.copies,
        end.wanted,
        end.version.clock,
        end.version.writer,
        core.incarnation,
        core.gossip.log.sequence,
        location_of(entry).encode() if entry is not None else b"",
    )
