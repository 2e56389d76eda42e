"""The peer's shell: carries out what the core decides, and feeds back what happens."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.config import PeerConfig
from p2pstore.core.gets.fetch_estimates import Estimator
from p2pstore.core.operation import (
    AskPeer,
    CheckObject,
    CheckReturned,
    ColdSorted,
    Effect,
    LoadObject,
    Operation,
    OperationFinished,
    PullObject,
    SaveClusterRecord,
    WriteObject,
)
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import P2PStoreError, StoreClosed
from p2pstore.gossip.gossip_messages import Answer, Ask, Contact, Duplicate, FetchSnapshot, Status
from p2pstore.gossip.gossip_messages import Effect as GossipEffect
from p2pstore.gossip.links.host import ControlHost
from p2pstore.gossip.members.member_table import MemberChange
from p2pstore.gossip.members.membership import STALL_SECONDS
from p2pstore.gossip.records import Member, PeerId, format_peer_id
from p2pstore.peer.for_peers.control_traffic import ControlTraffic, duplicate_identity
from p2pstore.peer.for_peers.data_requests import DataRequests
from p2pstore.peer.for_peers.routes import Routes
from p2pstore.peer.lifetime.credentials import Credentials
from p2pstore.peer.lifetime.leaving import Leaving, StateSaver
from p2pstore.peer.segment_memory import CopyChecks, MemoryGuard
from p2pstore.peer.statistics import Statistics
from p2pstore.runtime.byte_budget import ByteBudget
from p2pstore.runtime.stepping import Steps, run_through
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.state.state_directory import StateDirectory
from p2pstore.status.measures import LoadMeter
from p2pstore.status.operation_watch import PeerWatch
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.shm_transport import ShmTransport
from p2pstore.transfer.serving.read_answers import Traffic
from p2pstore.transfer.serving.serving_limits import DataPlaces, ServerLimits, Uploads

if TYPE_CHECKING:
    from p2pstore.memory.mapped.kept_file import KeptMemory
    from p2pstore.peer.peer_ssd import PeerSsd
    from p2pstore.transfer.rdma.rdma_serving import PeerRdma

logger = logging.getLogger("p2pstore.peer")

DRAIN_CHECKPOINTS: Final = 3
"""Scheduler turns between a timer and its verdict: after a stall of the process, messages that have arrived are
handled before a peer is declared silent."""
LOOK_SECONDS: Final = 0.005
"""Upper bound of the time between a client's request and what it makes due at once, such as the eager relay."""
FORGET_SECONDS: Final = 2.0
LOOP_LAG_SECONDS: Final = 0.2
"""Interval of measurements of the event loop's lag. They take less than a thousandth of a core."""


class Node:
    """One running peer. `run` keeps it going; everything else may be called from trio tasks beside it."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        core: PeerCore,
        host_id: bytes,
        state: StateDirectory | None,
        rng: Random,
    ) -> None:
        self.config = config
        self.core = core
        gossip = core.gossip
        gossip.directory.share(threading.Lock())  # see `Peer.locate_nowait`
        self.rng = rng
        self.routes = Routes(core, config, host_id, rng)
        self.saver = StateSaver(core, state) if state is not None else None
        self.watch = PeerWatch(core, config.slow_operation)
        self.estimator = Estimator(core, host_id, self.watch.traffic.round_trip_seconds)
        self.statistics = Statistics(self, self.watch)
        self.served = Traffic(Uploads(ServerLimits().uploads))
        self.budget = ByteBudget()
        self.data_places = DataPlaces(ServerLimits().connections)
        self.started_at = trio.current_time()
        self.load = LoadMeter(self.now, time.process_time(), ServerLimits().uploads)
        self.leave_requested = trio.Event()
        self.drain_seconds = config.drain_timeout
        self.failure: P2PStoreError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.host: ControlHost
        self.pool: ConnectionPool
        self.credentials: Credentials
        self.ssd: PeerSsd | None = None
        self.rdma: PeerRdma | None = None
        self.shm: ShmTransport | None = None
        self.local_clients = 0
        """Connected clients, this process's own included."""
        self.kept_memory: KeptMemory | None = None
        """Memory that stays for the next life of this peer."""
        self.running = self.ended = False
        self.control = ControlTraffic(self, rng)
        self.requests = DataRequests(self)
        self.copy_checks = CopyChecks(self)
        self.guard = MemoryGuard(self)
        self.leaving = Leaving(self)
        self._tasks = self._by_task()
        self._nursery: trio.Nursery
        self._waiting: dict[int, trio.Event] = {}
        self._nap = trio.CancelScope()
        """Sleeps until the next tick."""
        self._tick_due = math.inf
        self._checkpoints_version: tuple[int, int, int] | None = None
        self._checkpoint_news = trio.Event()
        self._pins_version = 0

    @property
    def now(self) -> float:
        """Monotonic seconds, the core's time."""
        return time.monotonic()

    @property
    def uptime_seconds(self) -> float:
        return trio.current_time() - self.started_at

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drive the core until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.running = True
            if self.saver is not None:
                nursery.start_soon(self.saver.run)
            nursery.start_soon(self.control.joining.watch_names, self.host)
            nursery.start_soon(self._watch_event_loop)
            nursery.start_soon(self.guard.watch)
            task_status.started()
            self.process()
            try:
                await self._tick_forever()
            finally:
                # Other peers ask on until the host has closed their connections, and a nursery that is
                # about to end takes no more tasks.
                self.running, self.ended = False, True

    async def _tick_forever(self) -> None:
        while True:
            self._nap = trio.CancelScope()
            self._tick_at(self.core.next_tick(self.now))
            with self._nap:
                await trio.sleep_forever()
            now = self.now
            if now < self.core.next_tick(now):
                continue  # woken early: something made an earlier tick due
            for _ in range(DRAIN_CHECKPOINTS):
                await trio.lowlevel.checkpoint()
            self.core.unix_offset_seconds = time.time() - self.now
            self.core.tick(self.now)
            self.process()
            self.control.keep_neighbours()
            if self.load.sample(self.now, time.process_time(), self.served.uploads.seconds(self.now)):
                self.core.gossip.own_record.changed()

    async def _watch_event_loop(self) -> None:
        """Measure how late a task wakes up. A stalled event loop delays all requests, and failure detection."""
        while True:
            due = trio.current_time() + LOOP_LAG_SECONDS
            await trio.sleep_until(due)
            late = trio.current_time() - due
            self.watch.measures.loop_lag.add_seconds(late)
            if late >= STALL_SECONDS:
                logger.info(
                    "event loop stalled for %.1f s: the process was stopped, got no CPU, or a step took too long",
                    late,
                    extra={"event": "stalled", "seconds": round(late, 3)},
                )

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run in the background until this peer ends."""
        self._nursery.start_soon(function)

    def carry_out(self, steps: Steps[None]) -> None:
        """Carry out these steps: in turns while this peer runs, in one go when it has ended."""
        if self.running:
            self._nursery.start_soon(_to_the_end, steps)
        else:
            run_through(steps)

    def process(self) -> None:
        """Act on what gossip brought, and carry out the core's effects. Call it after each access that may change the
        core, but for requests of clients (`process_request`)."""
        if not self.running:
            return
        self.core.gossip_arrived(self.now)
        for change in self.core.gossip.take_changes():
            self._member_changed(change)
        for member, count in self.core.gossip.directory.shares.take_news().items():
            log_refused_locations(self.core, member, count)
        for sender, owner in self.core.gossip.checks.wrong_runs.take_news().items():
            _log_wrong_operations(self.core, sender, owner)
        self._follow_checkpoints()
        self._carry_out_effects()
        tick_due = self.core.next_tick(self.now)
        if tick_due < self._tick_due:
            self._tick_at(tick_due)

    def process_request(self) -> None:
        """Carry out the effects of a client's request. When the next tick is due is found out a moment later, once for
        all requests until then: that question goes to every part of the core."""
        if self.running:
            # A client may have put a newer version at another peer.
            self.core.gossip_arrived(self.now)
            self._carry_out_effects()
            look_at = self.now + LOOK_SECONDS
            if look_at < self._tick_due:
                self._tick_at(look_at)

    def _carry_out_effects(self) -> None:
        self.core.flush_pushes(self.now)
        for effect in self.core.take_effects():
            self._execute(effect)
        for note in self.core.notes.take():
            level = logging.ERROR if note.is_error else logging.WARNING
            logger.log(level, "%s", note.text, extra={"event": note.event})

    def _tick_at(self, due: float) -> None:
        """Move the next tick. Moving a deadline wakes no task."""
        self._tick_due = due
        self._nap.deadline = trio.current_time() + (due - self.now)
        if self.core.closing and not self.core.operations_under_way:
            self.leaving.drained.set()

    def _follow_checkpoints(self) -> None:
        """Wake waiters for checkpoint news, and save pinned publishers."""
        checkpoints, publishers = self.core.checkpoints, self.core.publishers
        if checkpoints.version != self._checkpoints_version:
            self._checkpoints_version = checkpoints.version
            self._checkpoint_news.set()
            self._checkpoint_news = trio.Event()
        if publishers.version != self._pins_version:
            self._pins_version = publishers.version
            if self.saver is not None:
                self.saver.save_soon(at_once=True)

    async def checkpoint_news(self, seen: object) -> object:
        """Wait until heads, switches or what members have of versions differ from `seen` (what the last call returned;
        None at first); returns what to give the next time. Wakes without a difference now and then."""
        if self._checkpoints_version == seen:
            await self._checkpoint_news.wait()
        return self._checkpoints_version

    def tick_soon(self) -> None:
        """Tick soon. For callbacks that the core may call in the middle of a step."""
        self._nap.deadline = -math.inf

    def _member_changed(self, change: MemberChange) -> None:
        self.watch.measures.member_changes[change.new.name.lower()] += 1
        logger.info(
            "peer %s %s",
            self.core.name_of(change.peer_id),
            _said(change),
            extra={"event": _event(change), "peer_id": format_peer_id(change.peer_id)},
        )
        if change.new > Status.SUSPECT:
            self._nursery.start_soon(self.host.disconnect, change.peer_id)
        elif change.new is Status.ALIVE and self.saver is not None:
            self.saver.save_soon()

    def _by_task(self) -> dict[type, Callable[[Any], Awaitable[None]]]:
        """The effects that a task carries out each."""
        return {
            AskPeer: self.requests.ask,
            PullObject: self.requests.pull,
            FetchSnapshot: self.requests.fetch_snapshot,
            Ask: self.control.ask,
            Contact: self.control.contact,
        }

    def _execute(self, effect: Effect | GossipEffect) -> None:
        run = self._tasks.get(type(effect))
        if run is not None:
            self._nursery.start_soon(self._carry_out, run, effect)
            return
        match effect:
            case OperationFinished():
                if (event := self._waiting.pop(effect.operation, None)) is not None:
                    event.set()
            case Answer():
                self.control.later_replies.give(effect)
            case LoadObject() | WriteObject() | ColdSorted():
                assert self.ssd is not None, "the core knows of no SSD, so it asks for nothing there"
                self._nursery.start_soon(self._carry_out, self.ssd.carry_out, effect)
            case CheckObject():
                self.copy_checks.add(effect.entry)
            case CheckReturned():
                self._nursery.start_soon(self.guard.check_returned, effect)
            case SaveClusterRecord():
                if self.saver is not None:
                    self.saver.add(effect.signed)
            case Duplicate():
                self.fail(duplicate_identity(""))
            case _:
                raise TypeError(f"unknown effect {effect!r}")

    async def _carry_out(self, run: Callable[[Any], Awaitable[None]], effect: Any) -> None:
        """An error of this program in one effect ends its operation, not the peer with all it holds."""
        try:
            await run(effect)
        except Exception:
            logger.exception("%s failed by an internal error", type(effect).__name__)
            self.core.operations.abandon(getattr(effect, "operation", 0), self.now)
            self.process()

    def fail(self, error: P2PStoreError) -> None:
        """This peer cannot go on: `open_peer` ends its block and raises the error."""
        if self.failure is None:
            self.failure = error
            self.on_failure()

    async def complete(self, operation: Operation) -> Any:
        """Start an operation, unless that was done, wait for it, and return its result, or raise it. Cancellation
        cancels the operation."""
        if not operation.number:
            self.core.operations.start(operation, self.now)
        self.process()
        if not operation.done:
            event = self._waiting.setdefault(operation.number, trio.Event())
            try:
                await event.wait()
            except trio.Cancelled:
                self.core.operations.cancel(operation, self.now)
                self.process()
                raise
        if isinstance(operation.result, Exception):
            raise operation.result
        return operation.result

    async def settle(self, operation: Operation) -> None:
        """Wait for an operation whose result or error is looked at later."""
        with contextlib.suppress(P2PStoreError, ValueError):
            await self.complete(operation)

    async def forget_for_good(self) -> None:
        """Wait until what was removed cannot come back from this peer's SSD, even if it crashes now. Not for long: what
        the SSD does not write down, floors forbid."""
        if self.ssd is not None:
            with trio.move_on_after(FORGET_SECONDS), contextlib.suppress(P2PStoreError):
                await self.ssd.tier.discards_durable()

    async def make_room(self, length: int, namespace: str = "") -> None:
        """Evict in turns for a value that is about to come; its reservation then takes one step."""
        await take_turns(self.core.objects.make_room(length, namespace, self.now))

    def check_open(self) -> None:
        """Raise `StoreClosed` when this peer is leaving."""
        if self.core.closing:
            raise StoreClosed("this peer is leaving")


async def _to_the_end(steps: Steps[None]) -> None:
    with trio.CancelScope(shield=True):
        await take_turns(steps)


def log_refused_locations(core: PeerCore, member: Member, count: int) -> None:
    logger.error(
        "peer %s says that it holds %s objects, more than a peer can: its objects are ignored. Restart it "
        "with the version that the others run; if that does not help, take it out of the cluster",
        core.gossip.membership.name_of_member(member),
        f"{count:,}",
        extra={"event": "locations_refused"},
    )


def _log_wrong_operations(core: PeerCore, sender: PeerId, owner: PeerId) -> None:
    logger.error(
        "peer %s passed on changes to what %s holds that %s did not make: no changes are taken from it before it "
        "starts again. If its version is that of the others, take it out of the cluster",
        core.name_of(sender),
        core.name_of(owner),
        core.name_of(owner),
        extra={"event": "wrong_operations", "peer_id": format_peer_id(sender)},
    )


def _said(change: MemberChange) -> str:
    if change.new is Status.ALIVE:
        return "joined" if change.old is None else "is back"
    return {Status.SUSPECT: "is suspected", Status.DEAD: "is dead"}.get(change.new, "left")


def _event(change: MemberChange) -> str:
    """The name of the event of a member's change."""
    if change.new is Status.ALIVE:
        return "peer_joined" if change.old is None else "peer_back"
    return f"peer_{change.new.name.lower()}"
