"""One swarm on real connections: the shell around `p2pstore.checkpoint.swarm.swarm`.

Links bring its messages (`links`); pieces come by requests on pooled data connections, straight into a buffer, and are
verified and written in one step, by a worker thread unless that costs more (`at_once`). All tasks are in one nursery,
and end with it.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Final, Protocol, TypeVar

import trio

from p2pstore.checkpoint.content.manifest import Manifest, SignedManifest
from p2pstore.checkpoint.content.piece_map import PieceMap, map_of
from p2pstore.checkpoint.peer.at_once import AtOnce
from p2pstore.checkpoint.peer.introductions import GATHER_SECONDS, Introductions
from p2pstore.checkpoint.peer.piece_buffers import PieceBuffers
from p2pstore.checkpoint.peer.stores import PieceStore
from p2pstore.checkpoint.peer.swarm_links import Member, OfferedSwarmLink, SwarmLinks
from p2pstore.checkpoint.peer.token_bucket import TokenBucket
from p2pstore.checkpoint.swarm.swarm import Swarm, SwarmConfig
from p2pstore.checkpoint.swarm.swarm_effects import (
    Abandon,
    Asked,
    Complete,
    Connect,
    Decline,
    Disconnect,
    Effect,
    Event,
    Failure,
    Fetch,
    Found,
    Linked,
    Needed,
    Participants,
    PieceArrived,
    PieceFailed,
    Serve,
    Served,
    Tell,
    Tick,
    Unlinked,
)
from p2pstore.checkpoint.swarm.swarm_messages import Refusal
from p2pstore.errors import CheckpointChanged, P2PStoreError, StoreClosed, Unavailable
from p2pstore.transfer.data_messages import GetPiece, PieceReply, PieceStatus
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.serving.serving_backends import OpenedPiece
from p2pstore.transfer.transport import RemotePeer

logger = logging.getLogger("p2pstore.peer")

T = TypeVar("T")

PIECE_SECONDS: Final = 15.0
"""Without any progress, until a request for a piece fails; the machine gives it up earlier."""
LOOK_SECONDS: Final = 0.1
"""Between two looks at what the others have."""
DRAIN_CHECKPOINTS: Final = 2
"""Turns of the event loop between a timer and its verdict, for what has arrived meanwhile."""
STATUS_OF: Final = {Refusal.BUSY: PieceStatus.BUSY, Refusal.LACKS: PieceStatus.LACKS}
FAILURE_OF: Final = {
    int(PieceStatus.BUSY): Failure.BUSY,
    int(PieceStatus.LACKS): Failure.LACKS,
}


class Surroundings(Protocol):
    """What a swarm needs of its peer."""

    @property
    def own(self) -> Member: ...

    @property
    def pool(self) -> DataPool: ...

    @property
    def threads(self) -> trio.CapacityLimiter:
        """For reading and writing pieces."""
        ...

    def way_to(self, member: Member) -> RemotePeer | None:
        """How to reach a member; None when it is gone, or was not heard of yet."""
        ...

    def is_gone(self, member: Member) -> bool:
        """Whether it was there, and is not any more."""
        ...

    def is_here(self, member: Member) -> bool:
        """Whether it is on this host."""
        ...

    def participants(self, version: bytes) -> Iterable[Member]:
        """All who are known to have pieces of a version, or to want them."""
        ...


class SwarmRun:
    """This peer's part in the swarm of one version, while `run` runs."""

    def __init__(
        self,
        surroundings: Surroundings,
        signed: SignedManifest,
        store: PieceStore,
        rng: Random,
        *,
        publishes: bool = False,
        config: SwarmConfig | None = None,
        rate: int = 0,
    ) -> None:
        """`signed` must have been verified, and `store` be ready: the pieces that it has are offered. `rate`: bytes a
        second that are fetched at most; 0 for as many as can be."""
        self.signed = signed
        self.manifest: Manifest = signed.manifest
        self.version = signed.version
        self.store = store
        self.publishes = publishes
        self._sizes = self.manifest.layout.sizes
        copies = map_of(store.copies)
        self._surroundings = surroundings
        self._introductions = Introductions()
        self._met = trio.Event()
        self.machine = Swarm(
            surroundings.own,
            self._sizes,
            store.have,
            rng,
            trio.current_time(),
            publishes=publishes,
            config=config,
            needed=store.needed & ~(copies & ~store.have),
            copies=copies,
        )
        self.links = SwarmLinks(
            self.version,
            surroundings.own,
            surroundings.pool,
            surroundings.way_to,
            surroundings.is_here,
            self._link_changed,
            self._introduced,
        )
        self.total_bytes = self._bytes_of(store.needed)
        """Of all pieces that are needed."""
        self.done_bytes = self._bytes_of(store.have & store.needed)
        self.fetched_bytes = 0
        """Over the network, since this began."""
        self.failure: Exception | None = None
        """Why it ended by itself."""
        self.ended = trio.Event()
        self._completed = trio.Event()
        self._bucket = TokenBucket(rate, trio.current_time()) if rate else None
        self._news = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._events: deque[Event] = deque()
        self._handling = False
        self._nap = trio.CancelScope()
        """Until the next tick."""
        self._fetching: dict[tuple[Member, int], trio.CancelScope] = {}
        self._at_once = AtOnce(store.is_local)
        self._buffers = PieceBuffers(max(self._sizes, default=0))
        self._writing = 0
        self._written = trio.Event()

    @property
    def complete(self) -> bool:
        """Whether all pieces that are needed are here."""
        return self.machine.complete

    @property
    def needs_permille(self) -> int:
        """How much of the version is needed here."""
        whole = self.manifest.layout.total_bytes
        return 1000 * self.total_bytes // whole if whole else 1000

    def need(self, pieces: PieceMap) -> None:
        """Bring these as well."""
        new = pieces & ~(self.machine.needed | map_of(self.store.copies))
        self.total_bytes += self._bytes_of(new)
        self.done_bytes += self._bytes_of(new & self.machine.have)
        if self._nursery is None:  # nobody is linked yet, so there is nobody to tell
            self.machine.handle(Needed(pieces), trio.current_time())
        else:
            self._happens(Needed(pieces))

    def found(self, pieces: PieceMap) -> None:
        """These are here now: they were made of others."""
        self.done_bytes += self._bytes_of(pieces & ~self.machine.have & self.store.needed)
        self._happens(Found(pieces))
        self._tell_news()

    def _bytes_of(self, pieces: PieceMap) -> int:
        return self.manifest.layout.size_of(pieces)

    @property
    def done_pieces(self) -> int:
        """How many are here."""
        return self.machine.have.bit_count()

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self._sizes)

    def size_of(self, piece: int) -> int:
        """In bytes."""
        return self._sizes[piece]

    # --- driving the machine -----------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled, or something fails for good: `failure` says what. The store is closed then."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._introduce)
                self.look_around()
                await self._tick_forever()
        finally:
            self._nursery = None
            self.links.close()
            with trio.CancelScope(shield=True):
                await self.written()
                await trio.to_thread.run_sync(self.store.close)
            self.ended.set()
            self._completed.set()
            self._tell_news()

    async def changed(self) -> None:
        """Wait until another piece is here, or this ended."""
        if not self.ended.is_set():
            await self._news.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that comes with a piece. Raises what made the swarm end before that, or `StoreClosed`."""
        while not condition():
            self.check_running()
            await self.changed()

    async def until_complete(self) -> None:
        """`until` it is complete, without a look after each piece."""
        while not self.complete:
            self.check_running()
            if self._completed.is_set():
                self._completed = trio.Event()
            await self._completed.wait()

    async def until_dispensable(self, report: Callable[[int, int], None]) -> None:
        """Wait until the others have every piece among them; `report` is told bytes that they have, and how many they
        are. Raises like `until`."""
        while not self.machine.dispensable:
            self.check_running()
            report(self._bytes_of(self.machine.elsewhere), len(self.links.members))
            await trio.sleep(LOOK_SECONDS)

    def check_running(self) -> None:
        """Raises what made the swarm end, and `StoreClosed` when it was stopped."""
        if self.failure is not None:
            raise self.failure
        if self.ended.is_set():
            raise StoreClosed("this peer takes no part in this version any more")

    def _tell_news(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def look_around(self) -> None:
        """Other peers may take part now, or not be there any more."""
        around = self._surroundings
        for member in self.links.members:
            if around.is_gone(member):
                self.links.end(member)
        known = frozenset(around.participants(self.version)) | self._introductions.believed
        members = frozenset(each for each in known if around.way_to(each) is not None)
        members -= {around.own}
        here = frozenset(member for member in members if around.is_here(member))
        self._happens(Participants(members, here))

    def _introduced(self, members: Sequence[Member]) -> None:
        """A neighbour tells of other members."""
        if self._introductions.hear(members, trio.current_time()):
            self.look_around()

    async def _introduce(self) -> None:
        """Tell neighbours of each other."""
        while True:
            await self._met.wait()
            await trio.sleep(GATHER_SECONDS)
            self._met = trio.Event()
            if self._introductions.due:
                for members, message in self._introductions.take():
                    self.links.say(members, message)
                self.links.send_said()

    def _link_changed(self, event: Event) -> None:
        if isinstance(event, Linked):
            self._introductions.linked(event.member)
            self._met.set()
        elif isinstance(event, Unlinked):
            self._introductions.unlinked(event.member)
        self._happens(event)

    async def _tick_forever(self) -> None:
        while True:
            self._nap = trio.CancelScope(deadline=self.machine.wake_at)
            with self._nap:
                await trio.sleep_forever()
            now = trio.current_time()
            if now >= self.machine.judges_at:
                for _ in range(DRAIN_CHECKPOINTS):
                    await trio.lowlevel.checkpoint()
            if now >= self.machine.wake_at:
                self._happens(Tick())

    def _happens(self, event: Event) -> None:
        """Let the machine know, and do what it says; one event after the other."""
        if self._nursery is None:
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), trio.current_time()):
                    self._carry_out(effect)
        finally:
            self._handling = False
        self._handled()

    def _handled(self) -> None:
        self.links.send_said()
        wake_at = self.machine.wake_at
        if wake_at < self._nap.deadline:  # to move a deadline wakes nobody
            self._nap.deadline = wake_at

    def _carry_out(self, effect: Effect) -> None:
        assert self._nursery is not None
        match effect:
            case Tell(members, message):
                self.links.say(members, message)
            case Fetch(member, piece):
                scope = self._fetching[member, piece] = trio.CancelScope()
                self._nursery.start_soon(self._fetch, member, piece, scope)
            case Abandon(member, piece):
                abandoned = self._fetching.get((member, piece))
                if abandoned is not None:
                    abandoned.cancel()
            case Connect(member):
                self.links.begin_dialing(member)
                self._nursery.start_soon(self.links.dial, member)
            case Disconnect(member, banned):
                self._disconnect(member, banned)
            case Complete():
                self._completed.set()
                self._tell_news()
            case Serve() | Decline():
                raise AssertionError("pieces are answered where they are asked for")

    def _disconnect(self, member: Member, banned: bool) -> None:
        if banned:
            logger.warning(
                "member %016x is not listened to any more: it sent what was not true",
                member,
                extra={"event": "swarm_member_banned"},
            )
        self.links.drop(member, banned=banned)
        self._introductions.unlinked(member)
        for (sender, _), scope in self._fetching.items():
            if sender == member:
                scope.cancel()

    def fail(self, error: Exception) -> None:
        """End it: there is no way to go on."""
        if self.failure is None:
            self.failure = error
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # --- fetching ----------------------------------------------------------------------------

    async def _fetch(self, member: Member, piece: int, scope: trio.CancelScope) -> None:
        event: Event | None = None
        with scope:
            event = await self._bring(member, piece)
        if self._fetching.get((member, piece)) is scope:
            del self._fetching[member, piece]
        if event is not None:
            self._count(event)
            self._happens(event)
            if isinstance(event, PieceArrived):
                self._tell_news()

    def _count(self, event: Event) -> None:
        if isinstance(event, PieceArrived) and not self.machine.have >> event.piece & 1:
            self.fetched_bytes += self._sizes[event.piece]
            self.done_bytes += self._sizes[event.piece]

    async def _bring(self, member: Member, piece: int) -> PieceArrived | PieceFailed:
        buffer = self._buffers.take()
        try:
            view = memoryview(buffer)[: self._sizes[piece]]
            failure = await self._receive(member, piece, view)
            if failure is None:
                failure = await self._keep(piece, view)
        finally:
            self._buffers.give_back(buffer)
        if failure is None:
            return PieceArrived(member, piece)
        return PieceFailed(member, piece, failure)

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
                way, GetPiece(self.version, piece), view, PIECE_SECONDS
            )
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("piece %d from member %016x: %s", piece, member, error)
            return Failure.LOST
        if reply.status == PieceStatus.OK:
            return None
        return FAILURE_OF.get(reply.status, Failure.LOST)

    async def _keep(self, piece: int, view: memoryview) -> Failure | None:
        """Verify the piece and write it, in one step."""
        self._writing += 1
        try:
            good = await self._step(partial(self.store.write, piece, view), piece)
        except OSError as error:
            self.fail(error)
            return Failure.LOST
        finally:
            self._writing -= 1
            if not self._writing:
                self._written.set()
        return None if good else Failure.BAD

    async def _step(self, step: Callable[[], T], piece: int) -> T:
        """Read or write a piece: at once, or in a thread."""
        files = len(self.manifest.layout.extents(piece))
        if not self._at_once.may(self._sizes[piece], files):
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

    # --- sending -----------------------------------------------------------------------------

    def take_link(self, member: Member) -> OfferedSwarmLink:
        """A member asks for a link. Raises `Unavailable` when it is not to have one."""
        return self.links.take(member)

    async def open_piece(self, member: Member, piece: int) -> OpenedPiece | PieceReply:
        """A piece that a member asked for, or why not. `sent` must follow an `OpenedPiece`."""
        answer = self._ask(member, piece)
        if answer is None:
            return PieceReply(PieceStatus.NOT_LINKED)
        if isinstance(answer, Decline):
            return PieceReply(STATUS_OF[answer.why], answer.waiting)
        buffer = self._buffers.take()
        read = partial(self.store.read, piece, memoryview(buffer))
        try:
            data = await self._step(read, piece)
        except (OSError, EOFError, CheckpointChanged) as error:
            self._buffers.give_back(buffer)
            self.fail(error)
            raise Unavailable(f"the piece cannot be read any more: {error}") from error
        except BaseException:
            self.sent(member, piece, buffer, whole=False)
            raise
        return OpenedPiece(data, (self, member, piece, buffer))

    def sent(self, member: Member, piece: int, buffer: bytearray, whole: bool) -> None:
        """The end of `open_piece`."""
        self._buffers.give_back(buffer)
        self._happens(Served(member, piece, whole))

    def _ask(self, member: Member, piece: int) -> Serve | Decline | None:
        """What the machine answers to who asks for a piece; None where there is no link."""
        if self._nursery is None:
            raise StoreClosed("the swarm has ended here")
        answer: Serve | Decline | None = None
        for effect in self.machine.handle(Asked(member, piece), trio.current_time()):
            if isinstance(effect, Serve | Decline):
                answer = effect
            else:
                self._carry_out(effect)
        self._handled()
        return answer


def _waits() -> int:
    """How often this thread waited for something so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
