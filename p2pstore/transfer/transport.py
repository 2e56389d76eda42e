"""The common part of all transports: a remote copy, the `Transport` interface, and the loop over holders. See
`p2pstore.transfer.reading.arriving` for destinations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, runtime_checkable

from p2pstore.errors import BufferTooSmall, P2PStoreError
from p2pstore.memory.segment_layout import (
    Slot,
    SlotState,
    TrailerBody,
    decode_slot,
    decode_trailer,
    trailer_matches,
)
from p2pstore.objects import MIB, ZERO_VERSION, Announced, Version, format_bytes
from p2pstore.transfer.data_messages import Keeps
from p2pstore.transfer.failover import Attempt, HolderReport, PullAttempts, PullFailed
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.arriving import ONLY_READER, Destination, ResumableDestination, resumable
from p2pstore.transfer.transfer_trace import ReadWatch, TransportTry
from p2pstore.wire import Code

SLICED_BYTES: Final = 64 * MIB
"""Least length of an object that is read from several holders at once. Below, joining costs too much."""
HOLDER_ANSWER_SECONDS: Final = 1.5
"""Longest wait for a holder while others could be asked. One lost packet of a connection's first two is repeated within
1 s."""


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A peer to connect to: `data` are its data addresses (`DataAddress`), best first.

    Without `ticket` the connection pool asks its ticket source.
    """

    peer_id: bytes
    data: tuple[str, ...] = ()
    ticket: GrantedTicket | None = field(default=None, repr=False)
    answer_seconds: float = field(default=math.inf, kw_only=True)
    """How long to wait for each sign of life; not longer than for any other progress. Finite where others
    have the object as well: then it may also be told to ask them (BUSY)."""
    soon: bool = field(default=False, kw_only=True)
    """Whether another holder is asked when this one does not begin to answer within a few times what is usual."""
    others: tuple[bytes, ...] = field(default=(), kw_only=True)
    """Peer ids of those: this one is left when it brings less than half of what the best of them is expected to."""
    keeps: Keeps = field(default=Keeps.NO, kw_only=True)
    """Whether the object is kept by the peer that reads it."""
    announced: Announced | None = field(default=None, kw_only=True)
    """The versions that it may send; None for any version, to look at whatever a peer has."""


@dataclass(frozen=True, slots=True)
class RemoteCopy(RemotePeer):
    """One copy of an object and the ways to it. `member` is the holder's short name, `socket` the path
    of its local socket (of use when `same_host`), `slot` a hint that is not trusted, `rdma` whether the holder says
    that others may read it by RDMA."""

    member: int = 0
    socket: str = ""
    same_host: bool = False
    slot: int = 0
    version: Version = ZERO_VERSION
    load_permille: int = 0
    rdma: bool = False
    length_bytes: int = 0
    """About its length, where that is known."""
    on_ssd: bool = False
    """It is on its holder's SSD alone; the holder brings it to memory when asked: over TCP in passing, over other
    transports first. These leave it to TCP where that is used."""


class Pulled(NamedTuple):
    """A delivered and verified object: `length` bytes lie in the destination."""

    slot: Slot
    trailer: TrailerBody
    length: int
    transport: str


class Transport(Protocol):
    """A way to read objects of other peers."""

    @property
    def name(self) -> str: ...

    def why_not(self, copy: RemoteCopy) -> str:
        """For people: the reason when it makes no sense to try this transport for that copy, else nothing."""

    def cost(self, copy: RemoteCopy) -> float:
        """Cheaper transports are tried first. 1.0 is a TCP connection."""

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        """Read one object, verified. Raises `PullFailed`, or what `destination.prepare` raises.

        After return, error or cancellation nothing writes to the destination.
        """


@runtime_checkable
class TeamTransport(Transport, Protocol):
    """A transport that can read one object from several holders at once."""

    async def pull_together(
        self, copy: RemoteCopy, digest: bytes, destination: ResumableDestination, helpers: Helpers
    ) -> Pulled:
        """`pull`, helped by others as far as that is worth it. Nothing of it runs any more after return, error or
        cancellation."""


def check_object(slot_bytes: bytes, trailer_bytes: bytes, digest: bytes) -> tuple[Slot, TrailerBody]:
    """Slot and trailer out of private copies, verified. Raises `PullFailed` (STALE) when they are not those of
    a live object under `digest`."""
    slot = decode_slot(slot_bytes)
    if slot is None or slot.state is not SlotState.LIVE or slot.digest != digest:
        raise PullFailed(Code.STALE, "the holder's slot is damaged or belongs to another object")
    trailer = decode_trailer(trailer_bytes)
    if (
        trailer is None
        or len(trailer_bytes) != slot.trailer_length
        or not trailer_matches(trailer, slot)
    ):
        raise PullFailed(Code.STALE, "the holder's checksums do not belong to the object")
    return slot, trailer


class HolderShare(NamedTuple):
    """The part of an object that one holder brought."""

    member: int
    transport: str
    length_bytes: int


class PullReport(NamedTuple):
    """The end of a read over several holders: `pulled` from `copy` (or most of it, where there are `shares`), or
    `error`. `failures` on the way are worth telling the peer that named the holders."""

    pulled: Pulled | None
    copy: RemoteCopy | None
    failures: tuple[HolderReport, ...]
    error: P2PStoreError | None = None
    fallbacks: tuple[HolderReport, ...] = ()
    """Transports that gave way to another one to the same holder."""
    shares: tuple[HolderShare, ...] = ()
    """The shares, where several holders were read at once; the first is that of `copy`."""

    def brought(self) -> Sequence[HolderShare]:
        """The shares of any read that delivered."""
        if self.shares or self.pulled is None or self.copy is None:
            return self.shares
        return [HolderShare(self.copy.member, self.pulled.transport, self.pulled.length)]

    def unwrap(self) -> Pulled:
        """The pulled object. Raises the error."""
        if self.pulled is None:
            assert self.error is not None
            raise self.error
        return self.pulled


def failed_report(copy: RemoteCopy, transports: Sequence[Transport], failure: PullFailed) -> PullReport:
    """The report of a read that was tried once, from this copy by the first transport that offers itself."""
    attempts = PullAttempts([copy], transports)
    attempts.next()
    attempts.failed(failure)
    return PullReport(None, None, tuple(attempts.reports), attempts.error())


def with_alternatives(copy: RemoteCopy, others: Iterable[bytes], *, soon: bool = False) -> RemoteCopy:
    """A copy whose holder gets little time, because others (by their peer ids) have the object, too. `soon`: as for a
    `RemotePeer`, unless an SSD is read for it."""
    seconds, soon = HOLDER_ANSWER_SECONDS, soon and not copy.on_ssd
    return replace(copy, answer_seconds=seconds, soon=soon, others=tuple(others))


async def pull_with_failover(
    copies: Sequence[RemoteCopy],
    transports: Sequence[Transport],
    digest: bytes,
    destination: Destination,
) -> PullReport:
    """Pull an object from the first of `copies` (best first) that delivers it. What a holder that fails has
    delivered by then is not read again from the next one, where that has the same version.

    The report's error is `NoSuchKey` when every holder said that it has no such object, else
    `Unavailable`. Raises what `destination.prepare` raises: `BufferTooSmall`, `CapacityExceeded`.
    """
    attempts = PullAttempts(copies, transports)
    destination = resumable(destination)
    watch = destination.watch
    if watch is not None:
        for copy in copies:
            refusals = ((transport.name, transport.why_not(copy)) for transport in transports)
            watch.passed_over(copy.member, [each for each in refusals if each[1]])
    while attempt := attempts.next():
        transport = transports[attempt.transport]
        if watch is not None:
            watch.attempt(attempt.copy.member, transport.name)
        helpers = None
        if attempt.copy.length_bytes >= SLICED_BYTES and len(copies) > 1:
            # Several bring it together: none of them sends the reader on to others.
            attempt = replace(attempt, copy=replace(attempt.copy, keeps=Keeps.NO))
        if attempt.copy.length_bytes >= SLICED_BYTES:
            helpers = Helpers(attempts, attempt, transport.name, watch)
        destination.announced = attempt.copy.announced
        try:
            pulled = await _pull(attempt, transport, helpers, digest, destination)
        except PullFailed as failure:
            attempts.failed(failure)
            if watch is not None:
                watch.failed(failure.text)
            continue
        finally:
            destination.announced = None
        shares = () if helpers is None else helpers.shares()
        if watch is not None:
            brought = _brought_first(destination)
            sources = [each.member for each in shares]
            watch.delivered(attempt.copy.member, pulled.length, brought, sources)
        return PullReport(
            pulled,
            helpers.copy_of(shares[0]) if helpers is not None and shares else attempt.copy,
            tuple(attempts.reports),
            fallbacks=tuple(attempts.fallbacks),
            shares=shares,
        )
    return PullReport(None, None, tuple(attempts.reports), attempts.error(), tuple(attempts.fallbacks))


async def _pull(
    attempt: Attempt,
    transport: Transport,
    helpers: Helpers | None,
    digest: bytes,
    destination: ResumableDestination,
) -> Pulled:
    """One attempt; a large object with the help of others, where the transport can do that."""
    copy, others = attempt.copy, tuple(each.peer_id for each in attempt.others)
    if attempt.has_alternatives:
        copy = with_alternatives(copy, others, soon=attempt.soon)
    elif others:
        copy = replace(copy, others=others)
    if helpers is not None and isinstance(transport, TeamTransport):
        return await transport.pull_together(copy, digest, destination, helpers)
    return await transport.pull(copy, digest, destination)


def _brought_first(destination: ResumableDestination) -> int | None:
    """Bytes of the attempt's own holder, where they were counted."""
    arriving = destination.arriving
    return None if arriving is None else arriving.brought_bytes[ONLY_READER]


class Helpers:
    """Other holders that may bring parts of the large object of one attempt. Not for several threads at once."""

    def __init__(
        self, attempts: PullAttempts, attempt: Attempt, name: str, watch: ReadWatch | None
    ) -> None:
        self._attempts = attempts
        self._attempt = attempt
        self._name = name
        self._watch = watch
        self._tries: dict[int, TransportTry] = {}
        self._copies = {attempt.copy.member: attempt.copy}
        self._brought: Counter[int] = Counter()

    @property
    def left(self) -> bool:
        """Whether `next` returns one."""
        return self._attempts.has_helper

    def next(self) -> RemoteCopy | None:
        """One that begins to help now."""
        copy = self._attempts.next_helper()
        if copy is not None:
            self._copies[copy.member] = copy
            if self._watch is not None:
                self._tries[copy.member] = self._watch.joined(copy.member, self._name)
        return copy

    def ended(self, copy: RemoteCopy, failure: PullFailed | None, brought_bytes: int) -> None:
        """A holder brought this many verified bytes, and failed, or did not. Also for the holder that was to be helped,
        unless the read failed with it."""
        member = copy.member
        self._brought[member] += brought_bytes
        if failure is not None:
            self._attempts.helper_failed(self._copies[member], self._attempt.transport, failure)
        if self._watch is None:
            return
        reason = failure.text if failure is not None else ""
        if member in self._tries:
            self._watch.left(self._tries[member], reason, self._brought[member])
        elif reason:
            self._watch.failed(reason)

    def shares(self) -> tuple[HolderShare, ...]:
        """The share of each holder, the largest first; empty for one holder alone."""
        shares = [
            HolderShare(each, self._name, size) for each, size in self._brought.most_common() if size
        ]
        return tuple(shares) if len(shares) > 1 or self._only_others(shares) else ()

    def _only_others(self, shares: Sequence[HolderShare]) -> bool:
        return any(each.member != self._attempt.copy.member for each in shares)

    def copy_of(self, share: HolderShare) -> RemoteCopy:
        """The copy that it comes from."""
        return self._copies[share.member]


class BufferDestination:
    """A caller's writable buffer: the value goes to its beginning.

    `watch` is told how the read goes. Raises `ValueError` for a buffer that is read-only or not
    contiguous.
    """

    def __init__(self, buffer: bytearray | memoryview, watch: ReadWatch | None = None) -> None:
        self.watch = watch
        self.announced: Announced | None = None
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise ValueError("the buffer must be writable and contiguous")
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B") if view.nbytes else memoryview(bytearray())
        self._view = view

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        if slot.length > len(self._view):
            raise too_small(slot.length, self._view)
        return self._view[: slot.length]


def too_small(length: int, room: memoryview) -> BufferTooSmall:
    """The error of a read into a buffer that has less room than the object needs."""
    return BufferTooSmall(
        f"the object has {length:,} bytes ({format_bytes(length)}); the buffer has room for "
        f"{len(room):,}: give one of that length, or use get()",
        length,
    )


def announcing(destination: Destination, announced: Announced | None) -> Destination:
    """The destination, for one read from a holder that may send this. One that can be given nothing is wrapped."""
    if not isinstance(destination, BufferDestination):
        destination = resumable(destination)
    destination.announced = announced
    return destination
