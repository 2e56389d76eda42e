"""The peer's shell: carries out what the core decides, and feeds back what happens."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.config import PeerConfig
from p2pstore.core.copies.checking import CheckOperation
from p2pstore.core.copies.cold_return import ColdSorted
from p2pstore.core.copies.hand_over import HandedOver, HandOverOperation
from p2pstore.core.core_effects import (
    AskPeer,
    CheckObject,
    CheckReturned,
    KnownCopy,
    LoadObject,
    OperationFinished,
    PullFailure,
    PullObject,
    PullOutcome,
    PullTogether,
    Reply,
    SaveClusterRecord,
    WriteObject,
)
from p2pstore.core.operation import Operation
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    DuplicateIdentity,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
from p2pstore.gossip.gossip_messages import Ack, ControlKind, Status
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost
from p2pstore.gossip.locations.snapshots import CheckedSnapshot, check_snapshot
from p2pstore.gossip.machine import (
    Answer,
    Ask,
    Contact,
    Duplicate,
    FetchSnapshot,
    Later,
    SnapshotHead,
)
from p2pstore.gossip.machine import Effect as GossipEffect
from p2pstore.gossip.members.member_table import MemberChange
from p2pstore.gossip.members.membership import STALL_SECONDS
from p2pstore.gossip.records import Member, PeerId, PeerRecord, Tier, format_peer_id, writer_of
from p2pstore.objects import SIZE_UNIT_BYTES, chunk_sums, format_bytes, root_checksum
from p2pstore.peer.copy_checks import CopyChecks
from p2pstore.peer.credentials import Credentials
from p2pstore.peer.joining import MAX_REPORTED, Joining
from p2pstore.peer.later_replies import LaterReplies
from p2pstore.peer.load import LoadMeter
from p2pstore.peer.saving import StateSaver
from p2pstore.peer.taken_copies import TakenCopies
from p2pstore.runtime.byte_budget import ByteBudget
from p2pstore.runtime.stepping import Steps, run_through
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.state.state_directory import StateDirectory
from p2pstore.status.checkup import Checkup
from p2pstore.status.operation_watch import PeerWatch
from p2pstore.transfer.data_messages import DataKind, Keeps
from p2pstore.transfer.failover import HolderReport, order_copies
from p2pstore.transfer.peer_messages import Snapshot, SnapshotReply
from p2pstore.transfer.rdma.rdma_rules import NAME as RDMA
from p2pstore.transfer.reading.arriving import Announced
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.reading.shm import ShmTransport
from p2pstore.transfer.serving.read_answers import Traffic
from p2pstore.transfer.serving.serving_limits import DataPlaces, ServerLimits, Uploads
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import (
    PullReport,
    RemoteCopy,
    RemotePeer,
    Transport,
    pull_with_failover,
)
from p2pstore.wire import Code, Failure, Message, code_of, error_of

if TYPE_CHECKING:
    from p2pstore.memory.mapped.kept_file import KeptMemory
    from p2pstore.peer.peer_rdma import PeerRdma
    from p2pstore.peer.peer_ssd import PeerSsd

logger = logging.getLogger("p2pstore.peer")

MAX_EFFECTS_UNDER_WAY: Final = 512
ADMISSION_CODES: Final = (
    Code.AUTHENTICATION_FAILED,
    Code.WRONG_CLUSTER,
    Code.PROTOCOL_MISMATCH,
)
DRAIN_CHECKPOINTS: Final = 3
"""Scheduler turns between a timer and its verdict: after a stall of the process, what has arrived
meanwhile is handled before anybody is declared silent."""
FAREWELL_SECONDS: Final = 1.0
TELL_SECONDS: Final = 0.5
"""How long a peer that was asked to leave waits for somebody to ask how that went."""
FORGET_SECONDS: Final = 2.0
LOOP_LAG_SECONDS: Final = 0.2
"""How often it is looked how late the event loop is. Often enough to see what holds it up for long, by far too seldom
to take a thousandth of a core."""
RESTORE_SECONDS: Final = 1.0
RESTORE_COUNT: Final = 256
"""Index entries and slots that are looked at in one step, which takes up to 1 ms."""


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
        core.gossip.directory.share(threading.Lock())  # see `Peer.locate_nowait`
        core.gossip.locations.share(threading.Lock())
        self.host_id = host_id
        self.saver = StateSaver(core, state) if state is not None else None
        self.rng = rng
        self.watch = PeerWatch(core, config.slow_operation)
        self.checkup = Checkup(self)
        self.served = Traffic(Uploads(ServerLimits().uploads))
        self.budget = ByteBudget()
        self.data_places = DataPlaces(ServerLimits().connections)
        self.started_at = trio.current_time()
        self.load = LoadMeter(self.now, time.process_time(), ServerLimits().uploads)
        self.leave_requested = trio.Event()
        self.drain_seconds = config.drain_timeout
        self.contacted = trio.Event()
        self.settled = trio.Event()  # joined, or there is nobody to join
        self.joining = Joining(
            core.gossip,
            config.bootstrap,
            take=self._take,
            now=lambda: self.now,
            rng=rng,
            settled=self.settled,
            on_twin=self._met_twin,
            on_refused=self._join_refused,
        )
        self.failure: P2PStoreError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.host: ControlHost
        self.pool: DataPool
        self.credentials: Credentials
        self.transports: Sequence[Transport] = ()
        self.ssd: PeerSsd | None = None
        self.rdma: PeerRdma | None = None
        self.shm: ShmTransport | None = None
        self.local_clients = 0
        """Those that are connected, this process's own included."""
        self.kept_memory: KeptMemory | None = None
        """Memory that is there for the next life of this peer."""
        self._nursery: trio.Nursery
        self._later_replies = LaterReplies()
        self._limiter = trio.CapacityLimiter(MAX_EFFECTS_UNDER_WAY)
        self._waiting: dict[int, trio.Event] = {}
        self._nap = trio.CancelScope()
        """Until the next tick."""
        self._tick_due = float("inf")
        self._refused_by: set[PeerId] = set()
        self.copy_checks = CopyChecks(self)
        self._copies = TakenCopies(self)
        self._drained = trio.Event()
        self._hand_over: HandOverOperation | None = None
        self._all_handed_over = False
        self._told = trio.Event()
        self._kept_version = -1
        self._checkpoints_version: tuple[int, int, int] | None = None
        self._checkpoint_news = trio.Event()
        self._pins_version = 0
        self._running = self._ended = False

    @property
    def now(self) -> float:
        """Monotonic seconds, the core's time."""
        return time.monotonic()

    @property
    def uptime_seconds(self) -> float:
        return trio.current_time() - self.started_at

    # --- driving the core --------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drive the core until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._running = True
            if self.saver is not None:
                nursery.start_soon(self.saver.run)
            nursery.start_soon(self.joining.watch_names, self.host)
            nursery.start_soon(self._watch_event_loop)
            nursery.start_soon(self._restore_memory)
            task_status.started()
            self.process()
            try:
                await self._tick_forever()
            finally:
                # Other peers ask on until the host has closed their connections, and a nursery that is
                # about to end takes no more tasks.
                self._running, self._ended = False, True

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
            self._keep_neighbours()
            if self.load.sample(
                self.now, time.process_time(), self.served.uploads.seconds(self.now)
            ):
                self.core.gossip.own_record.changed()

    async def _watch_event_loop(self) -> None:
        """Measure how late a task wakes up. What holds the event loop up delays everybody, failure detection too."""
        while True:
            due = trio.current_time() + LOOP_LAG_SECONDS
            await trio.sleep_until(due)
            late = trio.current_time() - due
            self.watch.measures.loop_lag.add_seconds(late)
            if late >= STALL_SECONDS:
                logger.info(
                    "this process stood still for %.1f s: it was stopped, got no CPU, or did something for too long",
                    late,
                    extra={"event": "stalled", "seconds": round(late, 3)},
                )

    def _keep_neighbours(self) -> None:
        """Let the host keep the connections that gossip uses all the time, and close others."""
        view = self.core.gossip.view
        if view.version != self._kept_version:
            self._kept_version = view.version
            self.host.keeper.keep(view.neighbours())

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        """In the background, as long as this peer runs."""
        self._nursery.start_soon(function)

    def carry_out(self, steps: Steps[None]) -> None:
        """Have this done soon: in turns as long as this peer runs, in one go when it has ended."""
        if self._running:
            self._nursery.start_soon(self._to_the_end, steps)
        else:
            run_through(steps)

    async def _to_the_end(self, steps: Steps[None]) -> None:
        with trio.CancelScope(shield=True):
            await take_turns(steps)

    def process(self) -> None:
        """Carry out what the core has decided. Call it after everything that touches the core."""
        if not self._running:
            return
        self.core.gossip_arrived(self.now)
        for change in self.core.gossip.take_changes():
            self._member_changed(change)
        for member, count in self.core.gossip.location_shares.take_news().items():
            self._locations_refused(member, count)
        for sender, owner in self.core.gossip.wrong_runs.take_news().items():
            self._wrong_operations(sender, owner)
        self.core.flush_pushes(self.now)
        self._follow_checkpoints()
        for note in self.core.timekeeping.take_notes():
            logger.warning("%s", note, extra={"event": "clock"})
        for effect in self.core.take_effects():
            self._execute(effect)
        for key in self.core.checks.take_spoilt():
            logger.error(
                "the bytes of %r are spoilt in this peer's memory, or were put with false checksums: this copy is "
                "given up",
                key,
                extra={"event": "spoilt"},
            )
        tick_due = self.core.next_tick(self.now)
        if tick_due < self._tick_due:
            self._tick_at(tick_due)

    def _tick_at(self, due: float) -> None:
        """Have the next tick then; to move a deadline wakes nobody."""
        self._tick_due = due
        self._nap.deadline = trio.current_time() + (due - self.now)
        if self.core.closing and not self.core.operations_under_way:
            self._drained.set()

    def _follow_checkpoints(self) -> None:
        """Wake who waits for news of checkpoints, and keep whom this peer trusts."""
        checkpoints = self.core.checkpoints
        if checkpoints.version != self._checkpoints_version:
            self._checkpoints_version = checkpoints.version
            self._checkpoint_news.set()
            self._checkpoint_news = trio.Event()
        for note in checkpoints.take_notes():
            logger.warning("%s", note, extra={"event": "publisher"})
        for note in self.core.floors.take_notes(self.now):
            logger.warning("%s", note, extra={"event": "floors"})
        if checkpoints.pins_version != self._pins_version:
            self._pins_version = checkpoints.pins_version
            if self.saver is not None:
                self.saver.publisher_pinned()

    async def checkpoint_news(self, seen: object) -> object:
        """Wait until heads, switches or what members have of versions differ from `seen` (what the last call returned;
        None at first); returns what to give the next time. Wakes without a difference now and then."""
        if self._checkpoints_version == seen:
            await self._checkpoint_news.wait()
        return self._checkpoints_version

    def stir(self) -> None:
        """Have it looked at soon what the core has to do: for who may be called in the middle of one of its steps."""
        self._nap.deadline = -math.inf

    def _member_changed(self, change: MemberChange) -> None:
        self.watch.measures.member_changes[change.new.name.lower()] += 1
        logger.info(
            "peer %s is %s",
            self.core.name_of(change.peer_id),
            change.new.name.lower(),
            extra={"event": _event(change), "peer_id": format_peer_id(change.peer_id)},
        )
        if change.new > Status.SUSPECT:
            self._nursery.start_soon(self.host.disconnect, change.peer_id)
        elif change.new is Status.ALIVE and self.saver is not None:
            self.saver.member_came()

    def _locations_refused(self, member: Member, count: int) -> None:
        state = self.core.gossip.membership.resolve(member)
        name = self.core.name_of(state.peer_id) if state is not None else f"{member:016x}"
        logger.error(
            "peer %s says that it holds %s objects, more than a peer can: its objects are ignored. Restart it "
            "with the version that the others run; if that does not help, take it out of the cluster",
            name,
            f"{count:,}",
            extra={"event": "locations_refused"},
        )

    def _wrong_operations(self, sender: PeerId, owner: PeerId) -> None:
        logger.error(
            "peer %s passed on changes to what %s holds that %s did not make: no changes are taken from it before it "
            "starts again. If its version is that of the others, take it out of the cluster",
            self.core.name_of(sender),
            self.core.name_of(owner),
            self.core.name_of(owner),
            extra={"event": "wrong_operations", "peer_id": format_peer_id(sender)},
        )

    def _execute(self, effect: object) -> None:
        if isinstance(effect, OperationFinished):
            event = self._waiting.pop(effect.operation, None)
            if event is not None:
                event.set()
        elif isinstance(effect, AskPeer):
            self._nursery.start_soon(self._carry_out, self._ask_peer, effect)
        elif isinstance(effect, Ask):
            self._nursery.start_soon(self._carry_out, self._ask_control, effect)
        elif isinstance(effect, Answer):
            self._later_replies.give(effect)
        elif isinstance(effect, PullObject):
            self._nursery.start_soon(self._carry_out, self._pull, effect)
        elif isinstance(effect, PullTogether):
            self._nursery.start_soon(self._carry_out, self._copies.take, effect)
        elif isinstance(effect, FetchSnapshot):
            self._nursery.start_soon(self._carry_out, self._fetch_snapshot, effect)
        elif isinstance(effect, Contact):
            self._nursery.start_soon(self._carry_out, self._contact, effect)
        elif isinstance(effect, LoadObject | WriteObject | ColdSorted):
            assert self.ssd is not None, "the core knows of no SSD, so it asks for nothing there"
            self._nursery.start_soon(self._carry_out, self.ssd.carry_out, effect)
        elif isinstance(effect, CheckObject):
            self.copy_checks.add(effect.entry)
        elif isinstance(effect, CheckReturned):
            self._nursery.start_soon(self._check_returned, effect)
        elif isinstance(effect, SaveClusterRecord):
            if self.saver is not None:
                self.saver.add(effect.signed)
        elif isinstance(effect, Duplicate):
            self.fail(duplicate_identity(""))
        else:
            raise TypeError(f"unknown effect {effect!r}")

    async def _carry_out(self, run: Callable[[Any], Awaitable[None]], effect: Any) -> None:
        """An error of this program in one effect ends its operation, not the peer with all it holds."""
        try:
            await run(effect)
        except Exception:
            logger.exception("%s failed by an internal error", type(effect).__name__)
            self.core.operations.abandon(getattr(effect, "operation", 0), self.now)
            self.process()

    def stranger_refused(self, address: str, reason: str) -> None:
        """Somebody was not let in."""
        self.watch.measures.strangers_refused += 1

    def _met_twin(self, address: str) -> None:
        """Whoever is only about to join is the newer of two processes with one identity, and goes."""
        error = duplicate_identity(f" at {address}")
        if self.settled.is_set():
            logger.error("%s: a newer process does", error, extra={"event": "twin"})
        else:
            self.fail(error)

    def fail(self, error: P2PStoreError) -> None:
        """This peer cannot go on: `open_peer` ends its block and raises the error."""
        if self.failure is None:
            self.failure = error
            self.on_failure()

    async def complete(self, operation: Operation) -> Any:
        """Wait for an operation and return its result, or raise it. Cancellation cancels the operation."""
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

    def doubt_own_copy(self, digest: bytes) -> None:
        """A client found this peer's own copy spoilt: check it, and withdraw it if so. `process` is to follow."""
        self.core.operations.start(CheckOperation(self.core, digest, again=True), self.now)

    def restore_header(self) -> None:
        """Before a client maps this peer's memory: no client must keep others out."""
        if self.core.segment.restoring.header():
            self._say_restored(1)

    async def _restore_memory(self) -> None:
        """Go over what only this peer may write in its memory, in small steps, as clients may write anywhere."""
        while True:
            await trio.sleep(RESTORE_SECONDS)
            restored, damaged = self.core.segment.restoring.some(RESTORE_COUNT)
            for entry in damaged:
                self.doubt_own_copy(entry.digest)
            if restored or damaged:
                self._say_restored(restored + len(damaged))

    def _say_restored(self, count: int) -> None:
        counters = self.core.counters
        if not counters["memory_restored"]:
            logger.error(
                "a client wrote into the part of this peer's memory that only the peer may write: it was restored, and "
                "will be again, without a word. A program that has this memory mapped writes where it should not",
                extra={"event": "memory_restored"},
            )
        counters["memory_restored"] += count

    async def _check_returned(self, effect: CheckReturned) -> None:
        payloads = [self.core.segment.payload(entry) for entry in effect.entries]
        roots = await trio.to_thread.run_sync(_roots_of, payloads)
        del payloads
        whole = [
            root == entry.version.root for root, entry in zip(roots, effect.entries, strict=True)
        ]
        self.core.floors.returned_checked(effect.entries, whole, self.now)
        self.process()

    # --- other peers -------------------------------------------------------------------------

    def remote_peer(self, peer_id: PeerId) -> RemotePeer:
        """How to reach a peer's data server."""
        record = self.record_of(peer_id)
        return RemotePeer(peer_id, tuple(record.data) if record is not None else ())

    def remote_copy(self, copy: KnownCopy) -> RemoteCopy:
        """How to read one copy, on its holder's SSD or in its memory."""
        way = self.way_to(copy)
        if copy.record.tier is Tier.SSD:  # one request over TCP does it; RDMA takes several
            return replace(way, on_ssd=True, rdma=way.rdma and self.config.transport == RDMA)
        return way

    def way_to(self, copy: KnownCopy) -> RemoteCopy:
        """How to read what the holder of a copy has in memory; a strict transport leaves the other ways out, for
        clients as well."""
        record = self.record_of(copy.peer_id)
        strict = self.config.transport
        by_socket = (
            record is not None and record.host_id == self.host_id and strict in ("auto", "shm")
        )
        return RemoteCopy(
            peer_id=copy.peer_id,
            data=tuple(record.data) if record is not None and strict != "shm" else (),
            member=copy.member,
            socket=record.socket if record is not None and by_socket else "",
            same_host=by_socket,
            slot=copy.record.slot,
            version=copy.record.version,
            announced=Announced(writer_of(copy.peer_id), copy.announced),
            load_permille=record.load_permille if record is not None else 0,
            rdma=record is not None and any(offer.name == RDMA for offer in record.transports),
            length_bytes=copy.record.size_units * SIZE_UNIT_BYTES,
        )

    def reads_by_rdma(self, copy: RemoteCopy) -> bool:
        """Whether this peer would try RDMA first."""
        offered = [each for each in self.transports if each.offers(copy)]
        return bool(offered) and min(offered, key=lambda each: each.cost(copy)).name == RDMA

    def reading_order(self, copies: Sequence[KnownCopy]) -> list[KnownCopy]:
        """Copies in the order to try them: as the core has them by version and by what failed just now;
        among equals this host first, then at random, so that readers do not all go to one holder."""
        now, ordered = self.now, []
        for _, group in groupby(
            copies,
            lambda copy: (copy.record.version, self.core.holders.is_avoided(copy.member, now)),
        ):
            equals = {copy.member: copy for copy in group}
            remote = [self.remote_copy(copy) for copy in equals.values()]
            ordered += [equals[copy.member] for copy in order_copies(remote, self.rng)]
        return ordered

    def record_of(self, peer_id: PeerId) -> PeerRecord | None:
        """What a member says of itself."""
        state = self.core.gossip.membership.get(peer_id)
        return state.record if state is not None else None

    async def _ask_peer(self, effect: AskPeer) -> None:
        reply: Reply = None
        begin = self.now
        async with self._limiter:
            with trio.move_on_after(effect.timeout_seconds):
                try:
                    reply = await self.pool.request(
                        self.remote_peer(effect.peer_id), DataKind(effect.kind), effect.request
                    )
                except (P2PStoreError, OSError, ValueError) as error:
                    reply = refusal(error)
                    logger.debug("request %s to a peer failed: %s", effect.kind, error)
        self.watch.asked(effect, reply, self.now - begin)
        if effect.operation:
            self.core.answered(effect.operation, effect.tag, reply, self.now)
        elif reply is None:
            self.core.holders.peer_failed(effect.peer_id, self.now)
        self.process()

    async def _pull(self, effect: PullObject) -> None:
        try:
            destination = self.core.operations.copy_destination(effect.operation, self.now)
        except NoSuchKey:
            return  # whoever wanted it has gone
        destination.watch = ReadWatch(time.monotonic)
        failures: tuple[HolderReport, ...] = ()
        report: PullReport | None = None
        error: Exception | None = None
        delivered = False
        begin = self.now
        try:
            if not self.core.segment.quotas and effect.copies:
                await self.make_room(effect.copies[0].record.size_units * SIZE_UNIT_BYTES)
            keeps = Keeps.NO if effect.insist else Keeps.YES
            copies = [
                replace(self.remote_copy(copy), keeps=keeps)
                for copy in self.reading_order(effect.copies)
            ]
            report = await pull_with_failover(copies, self.transports, effect.digest, destination)
            failures = report.failures
            if report.pulled is not None:
                delivered = True
                destination.commit(self.now)
        except (P2PStoreError, ValueError) as problem:
            error = problem
        finally:
            destination.abort()
        trace = destination.watch.trace
        self.watch.pulled(effect, report, error, self.now - begin, trace)
        self.core.counters[f"pulls_{'delivered' if delivered else 'failed'}"] += 1
        delivered_by = (0, "")
        if (
            delivered
            and report is not None
            and report.pulled is not None
            and report.copy is not None
        ):
            delivered_by = report.copy.member, report.pulled.transport
        outcome = PullOutcome(
            delivered, tuple(pull_failure(failure) for failure in failures), error, *delivered_by
        )
        self.core.operations.pulled(effect.operation, outcome, self.now)
        self.process()

    async def make_room(self, length: int, namespace: str = "") -> None:
        """Evict in turns what has to go for a value that is about to come: its reservation is made in one step."""
        await take_turns(self.core.objects.make_room(length, namespace, self.now))

    async def _ask_control(self, effect: Ask) -> None:
        reply: Message | None = None
        addresses = self.core.gossip.addresses.of(effect.peer_id)
        begin = self.now
        self.watch.measures.messages[_kind_name(effect.kind), "sent"] += 1
        try:
            reply = await self.host.ask(
                effect.peer_id, addresses, effect.kind, effect.request, effect.timeout_seconds
            )
        except LinkError as error:
            self.watch.measures.message_failures[_kind_name(effect.kind)] += 1
            if error.code in ADMISSION_CODES:
                self._refused(effect.peer_id, error)
            elif (
                error.refused and error.code is not None and effect.kind == ControlKind.PING_REQUEST
            ):
                reply = Failure(int(error.code), str(error))  # the helper is well
            logger.debug("control request to %s failed: %s", format_peer_id(effect.peer_id), error)
        else:
            if not self.contacted.is_set():
                logger.info(
                    "joined through %s",
                    self.core.name_of(effect.peer_id),
                    extra={"event": "joined", "peer_id": format_peer_id(effect.peer_id)},
                )
                self.contacted.set()
                self.settled.set()
            if effect.kind == ControlKind.PING and isinstance(reply, Ack):
                self.watch.pinged(effect.peer_id, self.now - begin)
        self._take(lambda: self.core.gossip.answered(effect.token, reply, self.now))

    def _take(self, step: Callable[[], Sequence[GossipEffect]]) -> None:
        """Feed the gossip machine what another peer sent. Nonsense is dropped with a log line."""
        try:
            for effect in step():
                self.core.emit(effect)
        except ProtocolError as error:
            logger.warning("dropped what a peer sent: %s", error)
        self.process()

    async def serve_control(self, sender: PeerId, kind: int, request: Message) -> Message:
        """The control host's handler. Raises `StoreClosed` when this peer does not run any more."""
        if self._ended:
            raise StoreClosed("this peer has left")
        self.watch.measures.messages[_kind_name(kind), "received"] += 1
        reply, effects = self.core.gossip.serve(sender, ControlKind(kind), request, self.now)
        for effect in effects:
            self.core.emit(effect)
        self.process()
        if isinstance(reply, Later):
            reply = await self._later_replies.wait(reply)
        if isinstance(reply, Failure):
            raise error_of(reply.code, reply.text, reply.detail)
        return reply

    async def serve_reader(self, sender: PeerId, kind: int, request: Message) -> Message:
        """The control host's handler for peers that may only read."""
        if self._ended:
            raise StoreClosed("this peer has left")
        self.watch.measures.messages[_kind_name(kind), "received"] += 1
        reply = self.core.gossip.serve_reader(sender, ControlKind(kind), request, self.now)
        self.process()
        if isinstance(reply, Failure):
            raise error_of(reply.code, reply.text, reply.detail)
        return reply

    def control_lost(self, peer_id: PeerId) -> None:
        """The control connection to a peer broke: readers turn to others at once; whether the peer is gone,
        gossip finds out."""
        self.core.holders.peer_failed(peer_id, self.now)
        self.process()

    async def _fetch_snapshot(self, effect: FetchSnapshot) -> None:
        head: SnapshotHead | None = None
        checked: bytes | CheckedSnapshot = b""
        with trio.move_on_after(effect.timeout_seconds):
            try:
                reply, bulk = await self.pool.request_bulk(
                    self.remote_peer(effect.peer_id),
                    DataKind.SNAPSHOT,
                    Snapshot(effect.member),
                    effect.most_bytes,
                )
                if isinstance(reply, SnapshotReply):
                    checked = await trio.to_thread.run_sync(
                        check_snapshot, bulk, abandon_on_cancel=True
                    )
                    head = SnapshotHead(reply.incarnation, reply.sequence, reply.set_hash)
            except ProtocolError as error:
                logger.warning("dropped what a peer sent: %s", error)
            except (P2PStoreError, OSError, ValueError) as error:
                logger.debug("snapshot failed: %s", error)
        self._take(lambda: self.core.gossip.snapshot_fetched(effect.token, head, checked, self.now))

    async def _contact(self, effect: Contact) -> None:
        await self.joining.contact(self.host, effect.addresses)

    def _refused(self, peer_id: PeerId, error: LinkError) -> None:
        """A peer does not admit this one. When that is all that the addresses which the user named lead to, this peer
        ends rather than serve a cluster of its own unnoticed (`_join_refused`)."""
        named = self.joining.refused(peer_id, error)
        if named or self.core.gossip.membership.get(peer_id) is not None:
            self.watch.measures.refused_by_members += 1
        if self.failure is None and peer_id not in self._refused_by:
            if len(self._refused_by) >= MAX_REPORTED:
                self._refused_by.clear()
            self._refused_by.add(peer_id)
            logger.warning(
                "refused by the peer at %s%s: %s; going on without it",
                ", ".join(self.core.gossip.addresses.of(peer_id)),
                "" if named else ", which was remembered from earlier",
                error,
                extra={"event": "refused", "peer_id": format_peer_id(peer_id)},
            )

    def _join_refused(self, address: str, error: LinkError) -> None:
        if not self.contacted.is_set():
            refused = error.code is not Code.PROTOCOL_MISMATCH
            kind = AuthenticationFailed if refused else ProtocolMismatch
            self.fail(kind(f"{address} refuses this peer: {error}"))

    # --- leaving -----------------------------------------------------------------------------

    @property
    def handed_over(self) -> HandedOver | None:
        """What this peer, as it leaves, has handed over by now; None before that begins."""
        return None if self._hand_over is None else self._hand_over.handed_over

    def tell_how_it_left(self) -> dict[str, Any] | None:
        """For the statistics; once it is known how that ended, and was asked for, this peer ends."""
        handed = self.handed_over
        if handed is None:
            return None
        if self._all_handed_over:
            self._told.set()
        return {**asdict(handed), "done": self._all_handed_over}

    async def leave(self) -> None:
        """Take no new work, finish what is under way, hand over to others what this peer alone holds and write to the
        SSD what memory has (at most `drain_seconds` for all of it), tell the others, keep what must survive.

        A peer whose memory is kept comes back with all of it: it hands nothing over and writes nothing to the SSD,
        unless it was asked to leave, which is for good. Then nothing is kept."""
        stays = self.kept_memory is not None and not self.leave_requested.is_set()
        if self.kept_memory is not None and not stays:
            self.kept_memory.is_kept = False
        self.core.closing = True
        self._hand_over = HandOverOperation(self.core)
        self.process()
        with trio.move_on_after(self.drain_seconds):
            async with trio.open_nursery() as nursery:
                if self._running and self.failure is None and self.drain_seconds > 0 and not stays:
                    nursery.start_soon(
                        self.settle, self.core.operations.start(self._hand_over, self.now)
                    )
                if self.ssd is not None and not stays:
                    nursery.start_soon(self.ssd.keep_memory)
                if self.core.operations_under_way:
                    await self._drained.wait()
            if self.ssd is not None and not stays:  # what operations put that were under way
                await self.ssd.keep_memory()
        self._log_handed_over()
        if stays and self.kept_memory is not None:
            logger.info(
                "%s objects (%s) stay in %s for the next start",
                f"{self.core.segment.object_count:,}",
                format_bytes(self.core.segment.used_bytes),
                self.kept_memory.path,
                extra={"event": "memory_kept", "path": str(self.kept_memory.path)},
            )
        await self._say_goodbye()

    def _log_handed_over(self) -> None:
        self._all_handed_over = True
        handed = self.handed_over
        if handed is not None and (handed.objects or handed.left_objects):
            logger.info(
                "%s objects (%s) that only this peer held were handed over, %s (%s) were not",
                f"{handed.objects:,}",
                format_bytes(handed.bytes),
                f"{handed.left_objects:,}",
                format_bytes(handed.left_bytes),
                extra={"event": "handed_over", **asdict(handed)},
            )

    async def _say_goodbye(self) -> None:
        if self.leave_requested.is_set():
            with trio.move_on_after(TELL_SECONDS):
                await self._told.wait()
        asks = [effect for effect in self.core.gossip.leave(self.now) if isinstance(effect, Ask)]
        with trio.move_on_after(FAREWELL_SECONDS):
            async with trio.open_nursery() as nursery:
                for ask in asks:
                    nursery.start_soon(self._ask_control, ask)
        if self.saver is not None:
            await self.saver.save()

    def check_open(self) -> None:
        """Raise `StoreClosed` when this peer is leaving."""
        if self.core.closing:
            raise StoreClosed("this peer is leaving")


_KIND_NAMES: Final = {int(kind): kind.name.lower() for kind in ControlKind}


def _kind_name(kind: int) -> str:
    return _KIND_NAMES.get(kind, "unknown")


def _event(change: MemberChange) -> str:
    """What happened to a member, as log lines call it."""
    if change.new is Status.ALIVE:
        return "peer_joined" if change.old is None else "peer_back"
    return f"peer_{change.new.name.lower()}"


def duplicate_identity(where: str) -> DuplicateIdentity:
    """The error of the newer of two live peers with one identity."""
    return DuplicateIdentity(
        f"another live peer{where} uses this peer's identity: its state directory was copied. Give this "
        "peer a --state-dir (state_dir) of its own"
    )


def _roots_of(payloads: Sequence[memoryview]) -> list[int]:
    return [root_checksum(len(each), chunk_sums(each)) for each in payloads]


_LINK_ERRORS: Final = (OSError, DeadlineExceeded, ProtocolError, AuthenticationFailed, Unavailable)


def refusal(error: Exception) -> Failure | None:
    """The failure that the other side answered with; None when it was the way there that failed."""
    if isinstance(error, _LINK_ERRORS):
        return None
    return Failure(int(code_of(error)), str(error))


def pull_failure(report: HolderReport) -> PullFailure:
    """A transport's report as the core takes it."""
    return PullFailure(
        report.member,
        int(report.code),
        report.text,
        report.incarnation,
        report.sequence,
        report.keep,
        report.others,
    )
