"""One swarm on real connections: the shell around `p2pstore.checkpoint.swarm.swarm`.

Links bring its messages (`swarm_links`); pieces come by requests on pooled data connections. All
tasks are in one nursery, and end with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import trio

from p2pstore.checkpoint.content.manifest import Manifest, SignedManifest
from p2pstore.checkpoint.content.pieces import PieceLayout, PieceMap, map_of
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_flow import GATHER_SECONDS, Introductions
from p2pstore.checkpoint.peer.piece_stores import PieceStore
from p2pstore.checkpoint.peer.swarm_links import PieceTransfers, SwarmLinks
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm import Swarm
from p2pstore.checkpoint.swarm.swarm_messages import (
    Abandon,
    Asked,
    Complete,
    Connect,
    Decline,
    Disconnect,
    Effect,
    Event,
    FetchPiece,
    Found,
    Linked,
    Needed,
    Participants,
    PieceArrived,
    PieceFailed,
    Refusal,
    Serve,
    Served,
    Tell,
    Tick,
    Unlinked,
)
from p2pstore.errors import StoreClosed, Unavailable
from p2pstore.gossip.records import Member
from p2pstore.transfer.data_messages import PieceReply, PieceStatus
from p2pstore.transfer.serving.serving_backends import OpenedPiece

logger = logging.getLogger("p2pstore.peer")

LOOK_SECONDS: Final = 0.1
"""Between two looks at what neighbours have."""
DRAIN_CHECKPOINTS: Final = 2
"""Turns of the event loop between a timer and its verdict, for events that have arrived meanwhile."""
STATUS_OF: Final = {Refusal.BUSY: PieceStatus.BUSY, Refusal.LACKS: PieceStatus.LACKS}


class SwarmProgress:
    """Bytes that have come to one store, and tasks that wait for more."""

    def __init__(self, machine: Swarm, layout: PieceLayout, store: PieceStore) -> None:
        self.total_bytes = layout.size_of(store.needed)
        """Of all needed pieces."""
        self.done_bytes = layout.size_of(store.have & store.needed)
        self.fetched_bytes = 0
        """Received over the network since this swarm began."""
        self.failure: Exception | None = None
        self.ended = trio.Event()
        self._machine = machine
        self._layout = layout
        self._completed = trio.Event()
        self._news = trio.Event()

    @property
    def needs_permille(self) -> int:
        """Share of the version that is needed here."""
        whole = self._layout.total_bytes
        return 1000 * self.total_bytes // whole if whole else 1000

    @property
    def done_permille(self) -> int:
        """Share of the needed bytes that is here."""
        return 1000 * self.done_bytes // self.total_bytes if self.total_bytes else 1000

    def need(self, pieces: PieceMap) -> None:
        self.total_bytes += self._layout.size_of(pieces)
        self.done_bytes += self._layout.size_of(pieces & self._machine.have)

    def arriving(self, piece: int) -> None:
        """Count a piece from the network, unless it is here already."""
        if not self._machine.have >> piece & 1:
            self.fetched_bytes += self._layout.sizes[piece]
            self.done_bytes += self._layout.sizes[piece]

    def tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def complete(self) -> None:
        self._completed.set()
        self.tell()

    def end(self) -> None:
        self.ended.set()
        self.complete()

    async def changed(self) -> None:
        """Wait for the next piece, or the end."""
        if not self.ended.is_set():
            await self._news.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that a piece makes true. Raises like `check_running`."""
        while not condition():
            self.check_running()
            await self.changed()

    async def until_complete(self) -> None:
        """Wait until all needed pieces are here, without a wake-up for each. Raises like `check_running`."""
        while not self._machine.complete:
            self.check_running()
            if self._completed.is_set():
                self._completed = trio.Event()
            await self._completed.wait()

    def check_running(self) -> None:
        """Raises the failure that ended the swarm, or `StoreClosed` when it was stopped."""
        if self.failure is not None:
            raise self.failure
        if self.ended.is_set():
            raise StoreClosed("this peer takes no part in this version any more")


class SwarmRun:
    """This peer's part in the swarm of one version, while `run` runs."""

    def __init__(
        self,
        peer: CheckpointPeer,
        signed: SignedManifest,
        store: PieceStore,
        rng: Random,
        *,
        publishes: bool = False,
        config: SwarmConfig | None = None,
        rate: int = 0,
    ) -> None:
        """`signed` was verified, `store` is ready. `rate` limits fetching, in bytes a second; 0 for no limit."""
        self.signed = signed
        self.manifest: Manifest = signed.manifest
        self.version = signed.version
        self.store = store
        self.publishes = publishes
        self._peer = peer
        self._introductions = Introductions()
        self._met = trio.Event()
        layout, copies = self.manifest.layout, map_of(store.copies)
        self.machine = Swarm(
            peer.own,
            layout.sizes,
            store.have,
            rng,
            trio.current_time(),
            publishes=publishes,
            config=config,
            needed=store.needed & ~(copies & ~store.have),
            copies=copies,
        )
        self.links = SwarmLinks(self.version, peer, self._link_changed, self._introduced)
        self.progress = SwarmProgress(self.machine, layout, store)
        self.transfers = PieceTransfers(peer, self.version, layout, store, rate, fail=self.fail)
        self._nursery: trio.Nursery | None = None
        self._events: deque[Event] = deque()
        self._handling = False
        self._nap = trio.CancelScope()
        """Until the next tick."""
        self._fetching: dict[tuple[Member, int], trio.CancelScope] = {}

    def need(self, pieces: PieceMap) -> None:
        self.progress.need(pieces & ~(self.machine.needed | map_of(self.store.copies)))
        if self._nursery is None:  # without links, no neighbour is to be told
            self.machine.handle(Needed(pieces), trio.current_time())
        else:
            self._happens(Needed(pieces))

    def found(self, pieces: PieceMap) -> None:
        """Pieces were made here of others."""
        new = pieces & ~self.machine.have & self.store.needed
        self.progress.done_bytes += self.manifest.layout.size_of(new)
        self._happens(Found(pieces))
        self.progress.tell()

    async def until_dispensable(self, report: Callable[[int, int], None]) -> None:
        """Wait until the neighbours have every piece among them; `report` gets the bytes that they have and their
        number. Raises like `SwarmProgress.check_running`."""
        while not self.machine.dispensable:
            self.progress.check_running()
            elsewhere = self.manifest.layout.size_of(self.machine.elsewhere)
            report(elsewhere, len(self.links.members))
            await trio.sleep(LOOK_SECONDS)

    # --- driving the machine ---------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled, or until `fail`. The store is closed on return."""
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
                await self.transfers.written()
                await trio.to_thread.run_sync(self.store.close)
            self.progress.end()

    def look_around(self) -> None:
        """Tell the machine which members take part now, and end the links of those that are gone."""
        around = self._peer
        for member in self.links.members:
            if around.is_gone(member):
                self.links.end(member)
        known = frozenset(around.participants(self.version)) | self._introductions.believed
        members = frozenset(each for each in known if around.way_to(each) is not None)
        members -= {around.own}
        here = frozenset(member for member in members if around.is_here(member))
        self._happens(Participants(members, here))

    def _introduced(self, members: Sequence[Member]) -> None:
        if self._introductions.hear(members, trio.current_time()):
            self.look_around()

    async def _introduce(self) -> None:
        while True:
            await self._met.wait()
            await trio.sleep(GATHER_SECONDS)
            self._met = trio.Event()
            if self._introductions.due:
                for members, message in self._introductions.take():
                    self.links.enqueue(members, message)
                self.links.send_queued()

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
        """Hand events to the machine one by one, and carry out its effects."""
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
        self.links.send_queued()
        wake_at = self.machine.wake_at
        if wake_at < self._nap.deadline:  # moving a deadline to later needs no wake-up
            self._nap.deadline = wake_at

    def _carry_out(self, effect: Effect) -> None:
        assert self._nursery is not None
        match effect:
            case Tell(members, message):
                self.links.enqueue(members, message)
            case FetchPiece(member, piece):
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
                self.progress.complete()
            case Serve() | Decline():
                raise AssertionError("pieces are answered where they are asked for")

    def _disconnect(self, member: Member, banned: bool) -> None:
        if banned:
            logger.warning(
                "member %016x is banned from this swarm: it sent false pieces or messages",
                member,
                extra={"event": "swarm_member_banned"},
            )
        self.links.drop(member, banned=banned)
        self._introductions.unlinked(member)
        for (sender, _), scope in self._fetching.items():
            if sender == member:
                scope.cancel()

    def fail(self, error: Exception) -> None:
        """End the swarm with an error, which waiters get."""
        if self.progress.failure is None:
            self.progress.failure = error
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # --- pieces ----------------------------------------------------------------------------------

    async def _fetch(self, member: Member, piece: int, scope: trio.CancelScope) -> None:
        event: Event | None = None
        with scope:
            failure = await self.transfers.bring(member, piece)
            event = (
                PieceArrived(member, piece) if failure is None else PieceFailed(member, piece, failure)
            )
        if self._fetching.get((member, piece)) is scope:
            del self._fetching[member, piece]
        if event is None:
            return
        if isinstance(event, PieceArrived):
            self.progress.arriving(piece)
            self._happens(event)
            self.progress.tell()
        else:
            self._happens(event)

    async def open_piece(self, member: Member, piece: int) -> OpenedPiece | PieceReply:
        """A piece for a member, or why not. `sent` must follow an `OpenedPiece`."""
        answer = self._ask(member, piece)
        if answer is None:
            return PieceReply(PieceStatus.NOT_LINKED)
        if isinstance(answer, Decline):
            return PieceReply(STATUS_OF[answer.why], answer.waiting)
        try:
            data, buffer = await self.transfers.read(piece)
        except Unavailable:  # the swarm is ending
            raise
        except BaseException:
            self._happens(Served(member, piece, whole=False))
            raise
        return OpenedPiece(data, (self, member, piece, buffer))

    def sent(self, member: Member, piece: int, buffer: bytearray, whole: bool) -> None:
        """End of `open_piece`; `whole` when all bytes were sent."""
        self.transfers.give_back(buffer)
        self._happens(Served(member, piece, whole))

    def _ask(self, member: Member, piece: int) -> Serve | Decline | None:
        """The machine's answer to a request for a piece; None without a link."""
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
