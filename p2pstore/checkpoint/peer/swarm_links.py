"""The links of one swarm: long-lived connections to its neighbours, with messages both ways. Shell.

SWARM_LINK turns a data connection, authenticated and encrypted like all others, into a link. Of two members that dial
each other at once, the link of the lower short name counts: it refuses the other's.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import trio

from p2pstore.checkpoint.content.pieces import PieceLayout
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_flow import InlineOrThread, PieceBuffers, TokenBucket
from p2pstore.checkpoint.peer.piece_stores import PieceStore
from p2pstore.checkpoint.swarm.swarm_messages import (
    Event,
    Linked,
    Members,
    PieceFailure,
    Received,
    SwarmMessage,
    Unlinked,
    decode_message,
    kind_of,
)
from p2pstore.errors import CheckpointChanged, P2PStoreError, ProtocolError, Unavailable
from p2pstore.gossip.records import Member
from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_frames import LINK_LIMITS, FrameLink
from p2pstore.transfer.data_messages import GetPiece, PieceStatus, SwarmLink
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import ONE_WAY, FrameBuffer, encode_frame

logger = logging.getLogger("p2pstore.peer")

SEND_SECONDS: Final = 15.0
"""A link is closed when the other side takes nothing for this long."""
SETTLED_SECONDS: Final = 5.0
"""A dial by a neighbour with an older link than this shows that the neighbour has lost that link."""
MAX_LINKS: Final = 256
T = TypeVar("T")

PIECE_SECONDS: Final = 15.0
"""A request for a piece fails after this time without progress; the machine abandons it earlier."""
FAILURE_OF: Final = {
    int(PieceStatus.BUSY): PieceFailure.BUSY,
    int(PieceStatus.LACKS): PieceFailure.LACKS,
}


@dataclass(slots=True, eq=False)
class _Link:
    frames: FrameLink
    dialed: bool
    since: float
    has_more: trio.Event = field(default_factory=trio.Event)
    queued: list[bytes] = field(default_factory=list)
    """Frames that go out together, with `send_queued`."""


class SwarmLinks:
    """All links of one swarm; `happens` gets their events in order."""

    def __init__(
        self,
        version: bytes,
        peer: CheckpointPeer,
        happens: Callable[[Event], None],
        introduced: Callable[[list[Member]], None],
    ) -> None:
        """`introduced` gets members that neighbours tell of."""
        self._version = version
        self._peer = peer
        self._happens = happens
        self._introduced = introduced
        self._links: dict[Member, _Link] = {}
        self._talking: list[tuple[Member, _Link]] = []
        """Links with something `queued`."""
        self._dialing: set[Member] = set()
        self._banned: set[Member] = set()
        self._closed = False

    @property
    def members(self) -> list[Member]:
        return list(self._links)

    def enqueue(self, members: Iterable[Member], message: SwarmMessage) -> None:
        """Queue a message for those of these members that have links, until `send_queued`."""
        frame = encode_frame(kind_of(message), 0, message, flags=ONE_WAY)
        for member in members:
            link = self._links.get(member)
            if link is not None:
                if not link.queued:
                    self._talking.append((member, link))
                link.queued.append(frame)

    def send_queued(self) -> None:
        """Send what was queued, in one write a member."""
        talking, self._talking = self._talking, []
        for member, link in talking:
            frames, link.queued = link.queued, []
            if self._links.get(member) is not link:
                continue
            if link.frames.enqueue(b"".join(frames)) and link.frames.has_unsent:
                link.has_more.set()

    def drop(self, member: Member, *, banned: bool = False) -> None:
        """End the link without an event. A banned member gets no other link."""
        if banned:
            self._banned.add(member)
        link = self._links.pop(member, None)
        if link is not None:
            link.frames.end()

    def end(self, member: Member) -> None:
        """End the link of a member that is gone, with `Unlinked`."""
        if member in self._links:
            self.drop(member)
            self._happens(Unlinked(member))

    def close(self) -> None:
        """End all links; no other is taken."""
        self._closed = True
        for member in list(self._links):
            self.drop(member)

    def begin_dialing(self, member: Member) -> None:
        """Announce a `dial`, so that a link asked for meanwhile may be refused."""
        self._dialing.add(member)

    async def dial(self, member: Member) -> None:
        """Make a link and use it until it ends; `Linked` or `Unlinked` follows."""
        try:
            frames = await self._connect(member)
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("no link to member %016x: %s", member, error)
            if member not in self._links:
                self._happens(Unlinked(member))
            return
        finally:
            self._dialing.discard(member)
        if self._closed or member in self._links:
            frames.close()
            return
        await self._use(member, frames, dialed=True)

    async def _connect(self, member: Member) -> FrameLink:
        way = self._peer.way_to(member)
        if way is None:
            raise Unavailable("the member is gone")
        connection = await self._peer.pool.dial(way)
        try:
            stream, rest = await connection.become_link(SwarmLink(self._version))
        except BaseException:
            connection.close()
            raise
        received = FrameBuffer(LINK_LIMITS)
        received.feed(rest)
        return FrameLink(stream, received)

    def take(self, member: Member) -> OfferedSwarmLink:
        """Answer to a member that asks for a link. Raises `Unavailable` when it is refused."""
        link = self._links.get(member)
        settled = link is not None and trio.current_time() - link.since > SETTLED_SECONDS
        own_one = member in self._dialing or (link is not None and link.dialed)
        if self._closed or member in self._banned or member == self._peer.own:
            raise Unavailable("no link is taken from this member")
        if own_one and self._peer.own < member and not settled:
            raise Unavailable("this side dials as well, and its link counts")
        if len(self._links) >= MAX_LINKS:
            raise Unavailable(f"there are {MAX_LINKS} links already")
        return OfferedSwarmLink(self, member)

    async def take_over(self, member: Member, frames: FrameLink) -> None:
        """Use a link of `take` until it ends."""
        if self._closed or member in self._banned:
            frames.close()
            return
        if member in self._links:
            self.drop(member)
            self._happens(Unlinked(member))
        await self._use(member, frames, dialed=False)

    async def _use(self, member: Member, frames: FrameLink, *, dialed: bool) -> None:
        link = _Link(frames, dialed, trio.current_time())
        frames.patience_seconds = SEND_SECONDS
        self._links[member] = link
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, link)
                self._happens(Linked(member, self._peer.is_here(member)))
                try:
                    await self._receive(member, link)
                except (OSError, ProtocolError) as error:
                    logger.debug("the link to member %016x ended: %s", member, error)
                nursery.cancel_scope.cancel()
        finally:
            frames.close()
            if self._links.get(member) is link:
                del self._links[member]
                self._happens(Unlinked(member))

    async def _receive(self, member: Member, link: _Link) -> None:
        while received := await link.frames.receive():
            for kind, body in received:
                message = decode_message(kind, body)
                if self._links.get(member) is not link:
                    continue
                if isinstance(message, Members):
                    self._introduced(message.members)
                elif message is not None:
                    self._happens(Received(member, message))

    async def _send(self, link: _Link) -> None:
        with suppress(OSError):  # the receiving task notices it as well
            while True:
                await link.has_more.wait()
                link.has_more = trio.Event()
                await link.frames.send_all()
        link.frames.end()


@dataclass(frozen=True, slots=True)
class OfferedSwarmLink:
    """`p2pstore.transfer.serving.serving_backends.OfferedLink` of one member."""

    links: SwarmLinks
    member: Member

    async def run(self, link: FrameLink) -> None:
        await self.links.take_over(self.member, link)


class PieceTransfers:
    """The pieces of one version on their way in and out: received in place, then verified and written in one step."""

    def __init__(
        self,
        peer: CheckpointPeer,
        version: bytes,
        layout: PieceLayout,
        store: PieceStore,
        rate: int,
        fail: Callable[[Exception], None],
    ) -> None:
        """`rate` limits fetching, in bytes a second; 0 for no limit. `fail` ends the swarm when its store fails."""
        self._peer = peer
        self._version = version
        self._layout = layout
        self._store = store
        self._fail = fail
        self._bucket = TokenBucket(rate, trio.current_time()) if rate else None
        self._at_once = InlineOrThread(store.is_local)
        self._buffers = PieceBuffers(max(layout.sizes, default=0))
        self._writing = 0
        self._written = trio.Event()

    async def bring(self, member: Member, piece: int) -> PieceFailure | None:
        """Fetch a piece from a member, verify and store it. Returns the reason of a failure."""
        buffer = self._buffers.take()
        try:
            view = memoryview(buffer)[: self._layout.sizes[piece]]
            failure = await self._receive(member, piece, view)
            return await self._keep(piece, view) if failure is None else failure
        finally:
            self._buffers.give_back(buffer)

    async def _receive(self, member: Member, piece: int, view: memoryview) -> PieceFailure | None:
        way = self._peer.way_to(member)
        if way is None:
            return PieceFailure.LOST
        if self._bucket is None:
            return await self._request(member, way, piece, view)
        failure: PieceFailure | None = PieceFailure.LOST
        wait_seconds = self._bucket.take(len(view), trio.current_time())
        try:
            await trio.sleep(wait_seconds)
            failure = await self._request(member, way, piece, view)
        finally:
            if failure is not None:
                self._bucket.give_back(len(view))
        return failure

    async def _request(
        self, member: Member, way: RemotePeer, piece: int, view: memoryview
    ) -> PieceFailure | None:
        try:
            reply = await self._peer.pool.get_piece(
                way, GetPiece(self._version, piece), view, PIECE_SECONDS
            )
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("piece %d from member %016x: %s", piece, member, error)
            return PieceFailure.LOST
        if reply.status == PieceStatus.OK:
            return None
        return FAILURE_OF.get(reply.status, PieceFailure.LOST)

    async def _keep(self, piece: int, view: memoryview) -> PieceFailure | None:
        self._writing += 1
        try:
            good = await self._step(partial(self._store.write, piece, view), piece)
        except OSError as error:
            self._fail(error)
            return PieceFailure.LOST
        finally:
            self._writing -= 1
            if not self._writing:
                self._written.set()
        return None if good else PieceFailure.BAD

    async def _step(self, step: Callable[[], T], piece: int) -> T:
        """Read or write a piece, in the event loop or in a worker thread (`InlineOrThread`)."""
        files = len(self._layout.extents(piece))
        if not self._at_once.may(self._layout.sizes[piece], files):
            in_thread: T = await trio.to_thread.run_sync(step, limiter=self._peer.threads)
            return in_thread
        began, waits = time.perf_counter(), _waits()
        try:
            return step()
        finally:
            self._at_once.took(time.perf_counter() - began, _waits() > waits)

    async def written(self) -> None:
        """Wait until no thread writes a piece."""
        while self._writing:
            self._written = trio.Event()
            await self._written.wait()

    async def read(self, piece: int) -> tuple[BytesLike, bytearray]:
        """A piece's bytes, and the buffer to `give_back` when they were sent. Raises `Unavailable` when the store
        cannot be read, which ends the swarm."""
        buffer = self._buffers.take()
        try:
            read = partial(self._store.read, piece, memoryview(buffer))
            return await self._step(read, piece), buffer
        except (OSError, EOFError, CheckpointChanged) as error:
            self._buffers.give_back(buffer)
            self._fail(error)
            raise Unavailable(f"the piece cannot be read any more: {error}") from error
        except BaseException:
            self._buffers.give_back(buffer)
            raise

    def give_back(self, buffer: bytearray) -> None:
        self._buffers.give_back(buffer)


def _waits() -> int:
    """Voluntary context switches of this thread so far: it waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
