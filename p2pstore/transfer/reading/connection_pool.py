"""Requests to other peers over pooled data connections.

Each peer has a few places for connections (`connection_places`); a request takes an idle place, or queues at the
least crowded one. A peer that restarted meanwhile costs one reconnect.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from p2pstore.errors import (
    AuthenticationFailed,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    ProtocolMismatch,
    Unavailable,
)
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import KIB
from p2pstore.runtime.flow import NO_LIMITS, HolderLimits, HolderRates, Outrun
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, ByteStream, Driver
from p2pstore.transfer.data_messages import (
    DataAddress,
    DataKind,
    GetPiece,
    PieceReply,
    Store,
    Stored,
    split_data_address,
)
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.arriving import Arriving, Destination, ResumableDestination, resumable
from p2pstore.transfer.reading.connection_places import MAX_IDLE, MAX_PLACES, ConnectionPlaces
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.reading.small_reads import Part, in_parts, pull_one, pull_small
from p2pstore.transfer.reading.span_reads import (
    ItemOutcome,
    Wanted,
    failure_of,
    look,
    read_many,
    read_one,
)
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.transfer.transport import Pulled, RemoteCopy, RemotePeer
from p2pstore.wire import Message

T = TypeVar("T")

MAX_READERS: Final = 4
"""Connections that read one object side by side."""
CONNECT_SECONDS: Final = 3.0
"""For each address of a peer: connect, then again for the hello."""
BRIEF_BYTES: Final = 64 * KIB
"""Reads of up to this length take less time than a new connection."""

TicketSource = Callable[[RemotePeer], GrantedTicket]
"""Issues a ticket for this peer. Raises `AuthenticationFailed` when it cannot."""


def carried_ticket(peer: RemotePeer) -> GrantedTicket:
    """The ticket source of a process that cannot issue tickets: the one that came with the copy."""
    if peer.ticket is None:
        raise AuthenticationFailed("there is no ticket for this peer: ask the local peer for a plan")
    return peer.ticket


class ConnectionPool(ConnectionPlaces):
    """Connections to any number of peers, for any number of tasks (or threads, with blocking sockets).

    At most `max_places` connections to one peer; of those `idle_per_peer` are kept when idle, and
    `max_idle` over all peers. They become fewer again when fewer are enough.
    """

    def __init__(
        self,
        driver: Driver,
        ticket_source: TicketSource = carried_ticket,
        *,
        max_places: int = MAX_PLACES,
        idle_per_peer: int = 4,
        max_idle: int = MAX_IDLE,
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__(driver, max_places=max_places, idle_per_peer=idle_per_peer, max_idle=max_idle)
        self._ticket_source = ticket_source
        self._progress_seconds = progress_seconds
        self._connect_seconds = connect_seconds
        self._rates = HolderRates()
        self._measuring = threading.Lock()  # held for microseconds, never awaited in

    async def request(
        self,
        peer: RemotePeer,
        kind: DataKind,
        message: Message,
        timeout_seconds: float = DEFAULT_PROGRESS_SECONDS,
    ) -> Message:
        """One request and its reply. `timeout_seconds` without progress raises `DeadlineExceeded`; a peer
        that cannot be reached `Unavailable`; what it answers may be any error."""
        reply, _ = await self.request_bulk(peer, kind, message, 0, timeout_seconds)
        return reply

    async def request_bulk(
        self,
        peer: RemotePeer,
        kind: DataKind,
        message: Message,
        max_bulk_bytes: int,
        timeout_seconds: float = DEFAULT_PROGRESS_SECONDS,
    ) -> tuple[Message, bytearray]:
        """Like `request`, with up to `max_bulk_bytes` of bulk."""
        return await self._ask(
            peer,
            timeout_seconds,
            lambda connection: connection.request_bulk(kind, message, max_bulk_bytes),
        )

    async def get_piece(
        self, peer: RemotePeer, request: GetPiece, into: memoryview, timeout_seconds: float
    ) -> PieceReply:
        """A piece of a checkpoint, into memory of its length: see `DataConnection.get_piece`. Raises as `request`."""
        return await self._ask(
            peer, timeout_seconds, lambda connection: connection.get_piece(request, into)
        )

    async def store(
        self,
        peer: RemotePeer,
        request: Store,
        source: memoryview,
        finish_seconds: float = 0.0,
        progress: Progress | None = None,
    ) -> Stored:
        """Store a value there: see `DataConnection.store`. Raises as `request`; the value may be stored all the same
        when the connection breaks."""
        return await self._ask(
            peer,
            self._progress_seconds,
            lambda connection: connection.store(request, source, finish_seconds, progress),
        )

    async def _ask(
        self, peer: RemotePeer, timeout_seconds: float, action: Callable[[DataConnection], Awaitable[T]]
    ) -> T:
        """`_use`. Raises `Unavailable` when the connection breaks."""
        try:
            return await self._use(peer, timeout_seconds, action)
        except DeadlineExceeded:
            raise
        except OSError as error:
            reason = str(error) or type(error).__name__
            where = ", ".join(peer.data) or "the peer"
            raise Unavailable(f"the connection to {where} broke: {reason}") from error

    async def pull(
        self,
        peer: RemotePeer,
        digest: bytes,
        destination: Destination,
        slot_hint: int = 0,
        expected_bytes: int = 0,
        using: Using | None = None,
    ) -> Pulled:
        """Read one object, of about `expected_bytes` where that is known. `using` hears of the connection. Raises
        `PullFailed`, or what `destination.prepare` raises."""
        known = resumable(destination)
        limits = self._limits(peer, 1 if using is None else MAX_READERS)

        def pull(connection: DataConnection) -> Awaitable[Pulled]:
            if known.watch is not None:
                known.watch.connected()
            wanted = Wanted(digest, known, slot_hint)
            pulling = read_one(
                connection, wanted, limits, keeps=peer.keeps, expected_bytes=expected_bytes
            )
            return pulling if using is None else _used(using, connection, pulling)

        briefly = 0 < expected_bytes <= BRIEF_BYTES
        return await self._read(peer, pull, destination=known, briefly=briefly)

    async def _read(
        self,
        peer: RemotePeer,
        action: Callable[[DataConnection], Awaitable[T]],
        *,
        destination: ResumableDestination | None = None,
        briefly: bool = False,
        may_queue: bool = True,
    ) -> T:
        """`_use` to read, which tells the holder's rate. Raises `PullFailed` for what ends a connection, but for
        errors of the `destination`."""

        def read(connection: DataConnection) -> Awaitable[T]:
            return self._measured(peer, connection, action(connection))

        try:
            return await self._use(
                peer, self._progress_seconds, read, briefly=briefly, may_queue=may_queue
            )
        except Exception as error:
            if isinstance(error, PullFailed) or not _is_connection_error(error):
                raise
            if destination is not None and error is destination.error:
                raise
            raise failure_of(error) from error

    async def pull_slices(
        self, copy: RemoteCopy, digest: bytes, arriving: Arriving, reader: int, using: Using
    ) -> None:
        """Bring chunks of a value that others read as well, until none are free. Does not queue: raises `PullFailed`
        (BUSY) when every place for a connection is taken."""
        limits = self._limits(copy, MAX_READERS)

        def pull(connection: DataConnection) -> Awaitable[Pulled]:
            wanted = Wanted(digest, None, copy.slot, arriving)
            return _used(using, connection, read_one(connection, wanted, limits, reader))

        await self._read(copy, pull, may_queue=False)

    async def look(self, copy: RemoteCopy, digest: bytes) -> tuple[Slot, TrailerBody]:
        """An object's slot and trailer, verified, as the holder tells them. Raises `PullFailed`."""
        limits = self._limits(copy)
        return await self._read(copy, lambda connection: look(connection, digest, copy.slot, limits))

    async def pull_many(
        self, peer: RemotePeer, items: Sequence[tuple[bytes, Destination]]
    ) -> list[ItemOutcome]:
        """Read many objects of one holder; per item what was pulled, or why not. Raises nothing but
        cancellation."""
        limits = self._limits(peer)
        try:
            return await self._read(
                peer, lambda connection: read_many(connection, items, limits, peer.keeps)
            )
        except PullFailed as failure:
            return [failure] * len(items)

    def pull_small(
        self, peer: RemotePeer, digests: Sequence[bytes], views: Sequence[memoryview]
    ) -> Coroutine[Any, Any, tuple[list[int], PullFailed | None]]:
        """`pull_small_parts` of all of these, which are few or many."""
        if len(digests) == 1:
            return self._pull_one(peer, digests[0], views[0])
        most_bytes = max(map(len, views), default=0)
        return self.pull_small_parts(peer, Part(digests, views, most_bytes))

    async def _pull_one(
        self, peer: RemotePeer, digest: bytes, view: memoryview
    ) -> tuple[list[int], PullFailed | None]:
        """`pull_small` of one object, which takes less time than a new connection when it is short."""
        limits = self._limits(peer)

        def pull(connection: DataConnection) -> Awaitable[int]:
            return pull_one(connection, digest, view, limits, peer.keeps, peer.announced)

        briefly = len(view) <= BRIEF_BYTES
        try:  # as `_read`, which would take 1 us more; so little tells no rate
            return [await self._use(peer, self._progress_seconds, pull, briefly=briefly)], None
        except Exception as error:
            if not _is_connection_error(error):
                raise
            return [], failure_of(error)

    async def pull_small_parts(
        self, peer: RemotePeer, wanted: Part, most_items: int = 0
    ) -> tuple[list[int], PullFailed | None]:
        """Read many objects of one chunk of one holder into their views, in as few steps as possible: see
        `small_reads.pull_small`. The lengths, and how the connection failed when they are not all."""
        lengths: list[int] = []
        limits, parts = self._limits(peer), in_parts(wanted, most_items)

        def pull(connection: DataConnection) -> Awaitable[None]:
            return pull_small(connection, parts, lengths, limits, peer.keeps, peer.announced)

        try:
            await self._read(peer, pull)
        except PullFailed as failure:
            return lengths, failure
        return lengths, None

    def _limits(self, peer: RemotePeer, readers: int = 1) -> HolderLimits:
        """Limits of this holder for one of this number of readers of an object."""
        if peer.answer_seconds == math.inf and not peer.others:
            return NO_LIMITS
        with self._measuring:
            least_rate = self._rates.least(peer.others, time.monotonic(), readers)
            begin_seconds = self._rates.begin_seconds(peer.peer_id) if peer.soon else math.inf
        return HolderLimits(peer.answer_seconds, least_rate, begin_seconds)

    async def _measured(self, peer: RemotePeer, connection: DataConnection, action: Awaitable[T]) -> T:
        """Remember what this holder brings by a second."""
        try:
            return await action
        finally:
            with self._measuring:
                self._rates.measured(peer.peer_id, connection.flow, time.monotonic())
                self._rates.answered(peer.peer_id, connection.flow)

    # --- connections -------------------------------------------------------------------------

    async def _use(
        self,
        peer: RemotePeer,
        progress_seconds: float,
        action: Callable[[DataConnection], Awaitable[T]],
        *,
        briefly: bool = False,
        may_queue: bool = True,
    ) -> T:
        """Run `action` on a connection; once more on a fresh one when a kept one turns out dead. A `briefly` use queues
        for a connection that is kept, rather than open one that is closed again."""
        came_at = time.monotonic()
        place, turn = self.choose(peer.peer_id, briefly, may_queue=may_queue)
        if turn is not None:
            await self.wait_for(turn, peer.peer_id, peer.answer_seconds, place)
        try:
            kept = self.take_kept(place)
            if kept is not None:
                kept.stream.progress_seconds = progress_seconds
                kept.inbox.received_any = False
                try:
                    return await action(kept)
                except OSError as error:
                    hung = isinstance(error, DeadlineExceeded)
                    if hung or kept.inbox.received_any or kept.abandoned:
                        raise
            self.check_worth(place, came_at)
            connected_at = time.monotonic()
            connection = await self.dial(peer)
            self.keep(place, connection, connected_at)
            with self._measuring:  # its hello
                self._rates.answered(peer.peer_id, connection.flow)
            connection.stream.progress_seconds = progress_seconds
            return await action(connection)
        except (DeadlineExceeded, Unavailable) as error:
            if briefly and not isinstance(error, Outrun):
                place.failed_at, place.failure = time.monotonic(), error
            raise
        finally:
            self.give_back(peer.peer_id, place)

    # --- connecting --------------------------------------------------------------------------

    async def dial(self, peer: RemotePeer) -> DataConnection:
        """A fresh connection for the caller alone, who closes it: not one of the pool's. Tries the peer's addresses in
        turn, for no longer than the pool waits for progress. Raises
        `Unavailable` when none can be reached, `DeadlineExceeded` when all there was is silence, and what
        the hello raised when one did answer and refused."""
        if not peer.data:
            raise Unavailable("the peer advertises no data address")
        reasons: list[str] = []
        refusal: Exception | None = None
        silent = True
        deadline = time.monotonic() + min(self._progress_seconds, peer.answer_seconds)
        for address in peer.data:
            left_seconds = deadline - time.monotonic()
            if reasons and left_seconds <= 0:
                break
            try:
                ticket = peer.ticket if peer.ticket is not None else self._ticket_source(peer)
                return await self._connect_to(
                    address, peer.peer_id, ticket, min(self._connect_seconds, left_seconds)
                )
            except (AuthenticationFailed, ProtocolMismatch, ProtocolError) as error:
                refusal = refusal or error
                reasons.append(f"{address}: {error}")
            except (OSError, DeadlineExceeded, ConfigError, ValueError) as error:  # also: no address
                silent = silent and isinstance(error, DeadlineExceeded)
                reasons.append(f"{address}: {str(error) or type(error).__name__}")
        if refusal is not None:
            raise refusal
        kind = DeadlineExceeded if silent else Unavailable
        raise kind(f"the peer cannot be reached over TCP ({'; '.join(reasons)})")

    async def _connect_to(
        self, address: str, peer_id: bytes, granted: GrantedTicket, connect_seconds: float
    ) -> DataConnection:
        at = split_data_address(address)
        stream = await self.driver.connect_tcp(at.host, at.port, connect_seconds)
        stream.progress_seconds = connect_seconds
        return await open_connection(stream, at, peer_id, granted)


async def open_connection(
    stream: ByteStream, at: DataAddress, peer_id: bytes, granted: GrantedTicket
) -> DataConnection:
    """Shake hands with a peer over a fresh stream to its data address: TLS where it is spoken there, then the
    hello, each within `stream.progress_seconds`. Raises like `dial_tls` and `DataConnection.open`; then, as after
    any error, the stream is closed."""
    if at.tls:
        # TLS is imported only where it is used.
        from p2pstore.transfer.tls_streams import dial_tls

        stream, granted = await dial_tls(stream, peer_id, granted)
    return await DataConnection.open(stream, granted)


class Using(Protocol):
    """Hears which connection a read uses, and when that ends."""

    def began(self, connection: DataConnection) -> None: ...

    def ended(self) -> None: ...


async def _used(using: Using, connection: DataConnection, action: Awaitable[T]) -> T:
    using.began(connection)
    try:
        return await action
    finally:
        using.ended()


def _is_connection_error(error: Exception) -> bool:
    return isinstance(
        error,
        OSError | ProtocolError | ProtocolMismatch | AuthenticationFailed | Unavailable | PullFailed,
    )
