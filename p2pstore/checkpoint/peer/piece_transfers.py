"""Moving pieces between a swarm's store and other members: received in place, then verified and written in one step.
Shell."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import trio

from p2pstore.checkpoint.content.pieces import PieceLayout
from p2pstore.checkpoint.peer.piece_flow import AtOnce, PieceBuffers, TokenBucket
from p2pstore.checkpoint.peer.stores import PieceStore
from p2pstore.checkpoint.peer.surroundings import Surroundings
from p2pstore.checkpoint.swarm.swarm_messages import Failure
from p2pstore.errors import CheckpointChanged, P2PStoreError, Unavailable
from p2pstore.gossip.records import Member
from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_messages import GetPiece, PieceStatus
from p2pstore.transfer.transport import RemotePeer

logger = logging.getLogger("p2pstore.peer")

T = TypeVar("T")

PIECE_SECONDS: Final = 15.0
"""A request for a piece fails after this time without progress; the machine abandons it earlier."""
FAILURE_OF: Final = {
    int(PieceStatus.BUSY): Failure.BUSY,
    int(PieceStatus.LACKS): Failure.LACKS,
}


class PieceTransfers:
    """The pieces of one version on their way in and out."""

    def __init__(
        self,
        surroundings: Surroundings,
        version: bytes,
        layout: PieceLayout,
        store: PieceStore,
        rate: int,
        fail: Callable[[Exception], None],
    ) -> None:
        """`rate` limits what is fetched, in bytes a second; 0 for no limit. `fail` ends the swarm when its store cannot
        be read or written."""
        self._surroundings = surroundings
        self._version = version
        self._layout = layout
        self._store = store
        self._fail = fail
        self._bucket = TokenBucket(rate, trio.current_time()) if rate else None
        self._at_once = AtOnce(store.is_local)
        self._buffers = PieceBuffers(max(layout.sizes, default=0))
        self._writing = 0
        self._written = trio.Event()

    async def bring(self, member: Member, piece: int) -> Failure | None:
        """Fetch a piece from a member, verify and store it. Returns the reason of a failure."""
        buffer = self._buffers.take()
        try:
            view = memoryview(buffer)[: self._layout.sizes[piece]]
            failure = await self._receive(member, piece, view)
            return await self._keep(piece, view) if failure is None else failure
        finally:
            self._buffers.give_back(buffer)

    async def _receive(self, member: Member, piece: int, view: memoryview) -> Failure | None:
        way = self._surroundings.way_to(member)
        if way is None:
            return Failure.LOST
        if self._bucket is None:
            return await self._request(member, way, piece, view)
        failure: Failure | None = Failure.LOST
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
    ) -> Failure | None:
        try:
            reply = await self._surroundings.pool.get_piece(
                way, GetPiece(self._version, piece), view, PIECE_SECONDS
            )
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("piece %d from member %016x: %s", piece, member, error)
            return Failure.LOST
        if reply.status == PieceStatus.OK:
            return None
        return FAILURE_OF.get(reply.status, Failure.LOST)

    async def _keep(self, piece: int, view: memoryview) -> Failure | None:
        self._writing += 1
        try:
            good = await self._step(partial(self._store.write, piece, view), piece)
        except OSError as error:
            self._fail(error)
            return Failure.LOST
        finally:
            self._writing -= 1
            if not self._writing:
                self._written.set()
        return None if good else Failure.BAD

    async def _step(self, step: Callable[[], T], piece: int) -> T:
        """Read or write a piece, in the event loop or in a worker thread (`AtOnce`)."""
        files = len(self._layout.extents(piece))
        if not self._at_once.may(self._layout.sizes[piece], files):
            in_thread: T = await trio.to_thread.run_sync(step, limiter=self._surroundings.threads)
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
        """Reuse a buffer of `read`."""
        self._buffers.give_back(buffer)


def _waits() -> int:
    """Voluntary context switches of this thread so far: it waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
