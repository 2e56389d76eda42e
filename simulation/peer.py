"""A whole peer in one thread and in virtual time: the shell of `PeerCore` for the simulator.

Each simulated peer is the real core, the real gossip machine and a real memory segment (over a
bytearray). Messages make a round trip through the codecs. Pulls go through the real engine, over the
transport of `simulation.transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.copy_destination import TakeCopiesOperation
from p2pstore.core.copies.hand_over import HandOverOperation, coldest_use
from p2pstore.core.copies.replicate import PutAmongMany
from p2pstore.core.operation import (
    AskPeer,
    CheckObject,
    CheckReturned,
    ColdSorted,
    Operation,
    OperationFinished,
    PullObject,
    PullOutcome,
    Reply,
    SaveClusterRecord,
)
from p2pstore.core.peer_core import PeerCore
from p2pstore.core.puts.publishing import publish_new
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.core.remove import FlushOperation, RemoveOperation
from p2pstore.core.serving import reply_of
from p2pstore.errors import NoSuchKey, P2PStoreError, ProtocolError
from p2pstore.gossip import gossip_messages as control
from p2pstore.gossip.gossip_messages import Answer, Ask, Contact, FetchSnapshot, Later, SnapshotHead
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import (
    PEER_RECORD_FORMAT,
    LogHead,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    TransportOffer,
    open_cluster_record,
)
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.kept_memory import (
    Expected,
    Kept,
    Note,
    encode_note,
    read_kept,
    tail_bytes,
    tail_offset,
)
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import GRANULE_BYTES, TrailerBody, encode_trailer, plan_geometry
from p2pstore.objects import (
    MIB,
    HybridClock,
    chunk_sums,
    clock_from_unix_seconds,
    key_digest,
    root_checksum,
)
from p2pstore.put_facts import PutFacts, PutOptions
from p2pstore.transfer import data_messages as data
from p2pstore.wire import Code, Failure, Message, decode_body, encode_body
from simulation.gossip_data import log_snapshot
from simulation.peer_disk import Disk
from simulation.pull import pull_object, take_copies
from simulation.signer import SimulatedSigner, SimulatedVerifier, peer_id_of
from simulation.tasks import Task

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster

UNIX_START: Final = 1_800_000_000.0
NAMESPACE: Final = "sim"
MEMORY_BYTES: Final = 4 * MIB
FLOORS_WRITTEN_SECONDS: Final = 0.05
CHECK_SECONDS: Final = 0.02
SAVE_SECONDS: Final = 10.0


class SimulatedPeer:
    """One host: a running peer, or a stopped one with only its disk."""

    def __init__(self, cluster: SimulatedCluster, number: int, memory_bytes: int) -> None:
        self.cluster = cluster
        self.number = number
        self.address = f"sim:{number}"
        self.host_id = number.to_bytes(16, "little")
        self.signer = SimulatedSigner(peer_id_of(number))
        self.memory_bytes = memory_bytes
        self.disk = Disk()
        self.keeps_cold = False
        """Whether there is an SSD: objects in memory come back after a restart."""
        self.keeps_memory = False
        """Whether the memory itself outlives the process, however that ends."""
        self._segment_id = b""
        self.on_floor: Callable[[SignedRecord], None] = lambda signed: None
        """Told of every floor when this peer takes it in."""
        self.on_cold_sorted: Callable[[], None] = lambda: None
        """Told before what the core decided on cold objects is carried out."""
        self.running_since = 0.0
        self.clock_skew_seconds = 0.0
        self.life = 0
        self.core: PeerCore | None = None
        self.memory = memoryview(b"")
        self.answered_later: dict[int, Callable[[Any], None]] = {}
        """What to do with the reply to a control request that was answered by `Later`."""
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._pulls: list[Task[PullOutcome | None]] = []
        self._tick_at = float("inf")

    # --- life --------------------------------------------------------------------------------

    def boot(self, bootstrap: list[str]) -> None:
        """Start a fresh process on this host."""
        cluster, now = self.cluster, self.cluster.kernel.now
        self.life += 1
        self.running_since = now
        unix_offset = UNIX_START + self.clock_skew_seconds
        state = self.disk.state
        state.incarnation = max(state.incarnation + 1, int((unix_offset + now) * 1000))
        segment = self._make_segment(state.incarnation, now + unix_offset)
        rng = Random(cluster.kernel.rng.getrandbits(64))
        verifier, clock = SimulatedVerifier(), HybridClock(state.clock)
        gossip = Gossip(
            self.signer,
            verifier,
            state.incarnation,
            lambda: self._describe(segment),
            cluster.gossip_config,
            rng,
            wall_clock=lambda at: clock_from_unix_seconds(core.unix(at)),
            accepts_clock=lambda stamp, at: clock.observe(stamp, core.believed_unix(at)),
        )
        gossip.addresses.load(state.addresses)
        gossip.addresses.add_bootstrap(bootstrap)
        gossip.cluster_records.load(
            ((open_cluster_record(signed, verifier), signed) for signed in state.cluster_records),
            state.floors_horizon,
        )
        gossip.floors.load(state.floors_seen, state.clock)
        core = self.core = PeerCore(
            signer=self.signer,
            verifier=verifier,
            gossip=gossip,
            segment=segment,
            clock=clock,
            rng=rng,
            unix_offset_seconds=unix_offset,
        )
        stamps = [open_cluster_record(each, verifier).clock for each in state.cluster_records]
        known = (*state.floors_horizon.values(), *state.floors_seen.values())
        core.timekeeping.found(max((*stamps, *known), default=0))
        if self.keeps_cold:
            cold = self.disk.cold_objects()
            newest = max((each.version.clock for each in cold), default=0)
            self.core.earlier_life.return_with(cold, newest, now)
        if len(segment.returned):
            self.core.earlier_life.return_with_memory(now)
        self.core.timekeeping.started(now)
        self._waiting.clear()
        self.answered_later.clear()
        self._tick_at = float("inf")
        self._save_later(self.life)
        self.settle()

    def set_clock(self, skew_seconds: float) -> None:
        """Set this host's wall clock so far ahead of the true time. A running peer sees it with its next tick."""
        self.clock_skew_seconds = skew_seconds
        if self.core is not None:
            self.core.unix_offset_seconds = UNIX_START + skew_seconds

    def _make_segment(self, incarnation: int, unix: float) -> Segment:
        geometry = plan_geometry(self.memory_bytes)
        expected = Expected(geometry, self._segment_id, bytes(16), 0, 0)
        kept = Kept()
        if self.keeps_memory and self._segment_id:
            found = read_kept(self.memory, expected, has_users=False)
            assert isinstance(found, Kept), found
            kept = found
        else:
            self.memory = memoryview(bytearray(tail_offset(geometry) + tail_bytes(geometry)))
        note = encode_note(Note(geometry.slots, expected.boot, 0, 0, kept.lives + 1))
        begin = tail_offset(geometry)
        self.memory[begin : begin + len(note)] = note
        self._segment_id = self.number.to_bytes(8, "little") + incarnation.to_bytes(8, "little")
        marks_begin = begin + GRANULE_BYTES
        return Segment(
            self.memory,
            segment_id=self._segment_id,
            incarnation=incarnation,
            geometry=geometry,
            marks=self.memory[marks_begin : marks_begin + geometry.slots],
            kept=kept,
            now=unix,
        )

    def _save_later(self, life: int) -> None:
        def save() -> None:
            if life == self.life and self.core is not None:
                self.disk.write_all(self.core)
                self._save_later(life)

        self.cluster.kernel.after(SAVE_SECONDS, save)

    def _describe(self, segment: Segment) -> PeerRecord:
        return PeerRecord(
            format=PEER_RECORD_FORMAT,
            peer_id=self.signer.peer_id,
            cluster="sim",
            name=self.address,
            incarnation=0,
            sequence=0,
            host_id=self.host_id,
            control=[self.address],
            data=[self.address],
            socket="",
            transports=[TransportOffer("tcp")],
            segments=[],
            memory_capacity=segment.data_bytes,
            memory_used=segment.used_bytes,
            memory_coldest=coldest_use(segment),
            ssd_capacity=0,
            ssd_used=0,
            load_permille=0,
            head=LogHead(),
            checkpoints=self.core.participations.told if self.core is not None else [],
            max_protocol=data.MAX_DATA_VERSION,
        )

    def crash(self) -> None:
        """Lose everything but what is on the disk."""
        if self.core is not None and self.keeps_cold:
            self.disk.write_memory(self.core)
        self.disk.unwritten = []
        for task in self._pulls:
            task.cancel()
        self._pulls.clear()
        self.life += 1
        self.core = None

    def stop(self) -> None:
        """End as a peer does that is asked to: having written everything, and told the others."""
        if self.core is not None:
            for effect in self.core.gossip.leave(self.cluster.kernel.now):
                self._execute(effect)
            self.disk.write_all(self.core)
        self.crash()

    def hand_over(self) -> HandOverOperation:
        """Take no new work, and begin to hand over what this peer alone holds."""
        assert self.core is not None
        self.core.closing = True
        operation = HandOverOperation(self.core)
        self.core.operations.start(operation, self.cluster.kernel.now)
        self.settle()
        return operation

    def settle(self) -> None:
        """Carry out effects and set the next tick."""
        core = self.core
        if core is None:
            return
        core.gossip_arrived(self.cluster.kernel.now)
        core.flush_pushes(self.cluster.kernel.now)
        for effect in core.take_effects():
            self._execute(effect)
        due = max(core.next_tick(self.cluster.kernel.now), self.cluster.kernel.now + 0.001)
        if due < self._tick_at:
            self._tick_at = due
            life = self.life
            self.cluster.kernel.at(due, lambda: self._tick(life, due))

    def _tick(self, life: int, due: float) -> None:
        if life != self.life or self.core is None or due != self._tick_at:
            return
        self._tick_at = float("inf")
        self.core.tick(self.cluster.kernel.now)
        self.settle()

    def _execute(self, effect: object) -> None:
        if isinstance(effect, Ask):
            self._ask_control(effect)
        elif isinstance(effect, Answer):
            self.answered_later.pop(effect.token)(effect.reply)
        elif isinstance(effect, AskPeer):
            self._ask_data(effect)
        elif isinstance(effect, PullObject):
            self._pull(effect.operation, lambda: pull_object(self, effect))
        elif isinstance(effect, FetchSnapshot):
            self._fetch_snapshot(effect)
        elif isinstance(effect, Contact):
            self._contact(effect)
        elif isinstance(effect, SaveClusterRecord):
            self.on_floor(effect.signed)
            if not self.disk.unwritten:
                life = self.life
                self.cluster.kernel.after(FLOORS_WRITTEN_SECONDS, lambda: self._write_floors(life))
            self.disk.unwritten.append(effect.signed)
        elif isinstance(effect, ColdSorted):
            self.on_cold_sorted()
            if self.core is None:
                return
            self.disk.bring_back(self.core, effect, self.cluster.kernel.now)
            self.settle()
        elif isinstance(effect, CheckObject):
            life = self.life
            self.cluster.kernel.after(CHECK_SECONDS, lambda: self._check_object(life, effect))
        elif isinstance(effect, CheckReturned):
            life = self.life
            self.cluster.kernel.after(CHECK_SECONDS, lambda: self._check_returned(life, effect))
        elif isinstance(effect, OperationFinished):
            done = self._waiting.pop(effect.operation, None)
            if done is not None:
                done(None)
        else:
            raise TypeError(f"the simulator does not know the effect {effect!r}")

    def _pull(self, operation: int, pull: Callable[[], Coroutine[Any, Any, PullOutcome | None]]) -> None:
        def end() -> None:
            assert self.core is not None
            self._pulls.remove(task)
            outcome = task.result()
            if outcome is not None:
                self.core.operations.pulled(operation, outcome, self.cluster.kernel.now)
                self.settle()

        task = Task(self.cluster.kernel, pull, end)
        self._pulls.append(task)

    def _check_object(self, life: int, effect: CheckObject) -> None:
        if life == self.life and self.core is not None:
            entry = effect.entry
            sums = chunk_sums(self.core.segment.payload(entry))
            self.core.checks.ended(entry, sums, self.cluster.kernel.now)
            self.settle()

    def _check_returned(self, life: int, effect: CheckReturned) -> None:
        if life == self.life and self.core is not None:
            payload = self.core.segment.payload
            whole = [
                root_checksum(entry.length, chunk_sums(payload(entry))) == entry.version.root
                for entry in effect.entries
            ]
            self.core.earlier_life.returned_checked(effect.entries, whole, self.cluster.kernel.now)
            self.settle()

    def _write_floors(self, life: int) -> None:
        if life == self.life:
            self.disk.write_floors()

    # --- messages ----------------------------------------------------------------------------

    def _round_trip(
        self,
        target: PeerId,
        size_bytes: int,
        timeout_seconds: float,
        serve: Callable[[SimulatedPeer, Callable[[Any], None]], None],
        finish: Callable[[Any], None],
    ) -> None:
        """Deliver a request, then its reply; `finish(None)` when nothing came in time."""
        cluster, life = self.cluster, self.life
        open_request = [True]

        def end(reply: Any) -> None:
            if open_request[0] and life == self.life and self.core is not None:
                open_request[0] = False
                finish(reply)
                self.settle()

        def arrive() -> None:
            peer = cluster.by_peer_id.get(target)
            if peer is None or peer.core is None:
                return

            def reply(message: Any) -> None:
                cluster.network.send(peer.number, self.number, 64, lambda: end(message))

            serve(peer, reply)
            peer.settle()

        peer = cluster.by_peer_id.get(target)
        if peer is not None:
            cluster.network.send(self.number, peer.number, size_bytes, arrive)
        cluster.kernel.after(timeout_seconds, lambda: end(None))

    def _ask_control(self, ask: Ask) -> None:
        def finish(answer: Any) -> None:
            assert self.core is not None
            try:
                effects = self.core.gossip.answered(ask.token, answer, self.cluster.kernel.now)
            except ProtocolError:
                self.cluster.protocol_errors += 1
                return
            for effect in effects:
                self.core.emit(effect)

        self.send_control(ask.peer_id, ask.kind, ask.request, ask.timeout_seconds, finish)

    def send_control(
        self,
        target: PeerId,
        kind: int,
        request: Message,
        timeout_seconds: float,
        finish: Callable[[Any], None],
    ) -> None:
        """Ask on a control stream. A malformed message ends the connection, and gets no reply."""
        body = encode_body(request)

        def serve(peer: SimulatedPeer, reply: Callable[[Any], None]) -> None:
            def send(message: Message) -> None:
                answer = Failure if isinstance(message, Failure) else control.REPLIES[kind]
                if (decoded := self._decoded(answer, encode_body(message))) is not None:
                    reply(decoded)

            received = self._decoded(control.REQUESTS[kind], body)
            if received is not None:
                peer.serve_control(self.signer.peer_id, kind, received, send)

        self._round_trip(target, len(body), timeout_seconds, serve, finish)

    def _decoded(self, message: type[Message], body: bytes) -> Message | None:
        try:
            return decode_body(message, body)
        except ProtocolError:
            self.cluster.protocol_errors += 1
            return None

    def serve_control(
        self, sender: PeerId, kind: int, request: Message, reply: Callable[[Message], None]
    ) -> None:
        assert self.core is not None
        try:
            answer, effects = self.core.gossip.serve(sender, kind, request, self.cluster.kernel.now)
        except ProtocolError:
            self.cluster.protocol_errors += 1
            return
        for effect in effects:
            self.core.emit(effect)
        if isinstance(answer, Later):
            self.answered_later[answer.token] = reply
        else:
            reply(answer)

    def _ask_data(self, ask: AskPeer) -> None:
        def finish(answer: Reply) -> None:
            assert self.core is not None
            self.core.answered(ask.operation, ask.tag, answer, self.cluster.kernel.now)

        self.send_data(ask.peer_id, ask.kind, ask.request, ask.timeout_seconds, finish)

    def send_data(
        self,
        target: PeerId,
        kind: int,
        request: Message,
        timeout_seconds: float,
        finish: Callable[[Any], None],
    ) -> None:
        body = encode_body(request)

        def serve(peer: SimulatedPeer, reply: Callable[[Any], None]) -> None:
            received = self._decoded(data.REQUESTS[kind], body)
            if received is not None:
                peer.serve_data(self.signer.peer_id, kind, received, reply)

        self._round_trip(target, len(body), timeout_seconds, serve, finish)

    def serve_data(
        self, sender: PeerId, kind: int, request: Message, reply: Callable[[Any], None]
    ) -> None:
        assert self.core is not None
        now = self.cluster.kernel.now
        if isinstance(request, data.Get):
            reply(data.Objects([self._object_reply(self.core, item.digest) for item in request.items]))
            return
        try:
            answer = self.core.serve(sender, kind, request, now)
        except ProtocolError as error:
            self.cluster.protocol_errors += 1
            reply(Failure(int(Code.MALFORMED), str(error)))
            return
        if isinstance(answer, TakeCopiesOperation):
            copying = answer
            self._pull(copying.number, lambda: take_copies(self, copying))
        if isinstance(answer, Operation):
            operation = answer
            self.when_done(operation, lambda: reply(reply_of(operation)))
        else:
            reply(answer)

    def sending_seconds(self, size_bytes: int) -> float:
        """Seconds that this host takes to send this much, beyond the network's time."""
        return 0.0

    def look(self, digest: bytes) -> data.ObjectReply | None:
        """This peer's facts of an object, without its bytes. None when no process runs here."""
        return None if self.core is None else self._object_reply(self.core, digest)

    def _object_reply(self, core: PeerCore, digest: bytes) -> data.ObjectReply:
        entry = core.objects.find(digest, self.cluster.kernel.now)
        if entry is None:
            return data.ObjectReply(
                data.ObjectStatus.NOT_FOUND,
                incarnation=core.incarnation,
                sequence=core.gossip.log.sequence,
            )
        return data.ObjectReply(
            data.ObjectStatus.OK,
            core.segment.table.slot_bytes(entry),
            core.segment.table.trailer_bytes(entry),
        )

    def when_done(self, operation: Operation | PutAmongMany, action: Callable[[], None]) -> None:
        if isinstance(operation, PutAmongMany):
            operation = operation.operation
        if operation.done:
            action()
            return
        earlier = self._waiting.get(operation.number)

        def both(_: Any) -> None:
            if earlier is not None:
                earlier(None)
            action()

        self._waiting[operation.number] = both

    def _fetch_snapshot(self, effect: FetchSnapshot) -> None:
        def serve(peer: SimulatedPeer, reply: Callable[[Any], None]) -> None:
            reply(peer.snapshot_of(effect.member))

        def finish(snapshot: tuple[SnapshotHead, bytes] | None) -> None:
            assert self.core is not None
            head, packed = snapshot or (None, b"")
            now = self.cluster.kernel.now
            try:
                self.core.gossip.snapshot_fetched(effect.token, head, packed, now)
            except ProtocolError:
                self.cluster.protocol_errors += 1

        self._round_trip(effect.peer_id, 64, 2.0, serve, finish)

    def snapshot_of(self, member: Member) -> tuple[SnapshotHead, bytes] | None:
        """This peer's answer to a fetch of a member's whole log."""
        assert self.core is not None
        return log_snapshot(self.core.gossip, member)

    def _contact(self, effect: Contact) -> None:
        target = self.cluster.by_address.get(effect.addresses[0])

        def serve(peer: SimulatedPeer, reply: Callable[[Any], None]) -> None:
            reply(peer.signer.peer_id)

        def finish(peer_id: PeerId | None) -> None:
            assert self.core is not None
            now = self.cluster.kernel.now
            if peer_id is None:
                self.core.gossip.contact_failed(effect.addresses, now)
            else:
                self.core.gossip.contacted(peer_id, effect.addresses, now)

        peer_id = target.signer.peer_id if target is not None else b""
        self._round_trip(peer_id, 64, 1.0, serve, finish)

    # --- what a client would do --------------------------------------------------------------

    def put(
        self,
        key: str,
        value: bytes,
        *,
        namespace: str = NAMESPACE,
        replicas: int = 1,
        overwrite: bool = False,
    ) -> PutOperation | PutAmongMany | None:
        """Put through the core; None when there is no room."""
        assert self.core is not None
        core, now = self.core, self.cluster.kernel.now
        sums = chunk_sums(value)
        trailer_bytes = len(encode_trailer(TrailerBody(namespace, key, sums)))
        try:
            reservation = core.segment.reserve(
                len(value), trailer_bytes + 32, session="client", now=core.unix(now), namespace=namespace
            )
        except P2PStoreError:
            return None
        core.objects.announce_withdrawn(now)
        core.segment.reservation_view(reservation.number, session="client")[: len(value)] = value
        facts = PutFacts(
            reservation.number,
            key,
            key_digest(key, namespace),
            len(value),
            sums,
            root_checksum(len(value), sums),
            PutOptions(replicas, overwrite=overwrite),
        )
        operation = PutOperation(core, facts, session="client", namespace=namespace)
        [end] = publish_new(core, [facts], session="client", namespace=namespace, now=now)
        if end is None:
            core.operations.start(operation, now)
        elif not isinstance(end, PutAmongMany):
            operation.finish(end, now)
        self.settle()
        return end if isinstance(end, PutAmongMany) else operation

    def get(self, digest: bytes, done: Callable[[bytes | Exception], None]) -> None:
        """Fetch (or find) the object and hand over its bytes or the error."""
        assert self.core is not None
        core, now = self.core, self.cluster.kernel.now
        entry = core.segment.find(digest, core.unix(now))
        if entry is not None:
            done(bytes(core.segment.payload(entry)))
            return
        operation = core.operations.fetch(digest, now)

        def finished() -> None:
            result = operation.result
            if isinstance(result, ObjectEntry):
                current = core.segment.find(digest, core.unix(self.cluster.kernel.now))
                if current is None:
                    done(NoSuchKey("evicted again at once"))
                else:
                    done(bytes(core.segment.payload(current)))
            else:
                done(result)

        self.when_done(operation, finished)
        self.settle()

    def remove(self, key: str, namespace: str = NAMESPACE) -> RemoveOperation:
        assert self.core is not None
        operation = RemoveOperation(self.core, namespace, [key])
        self.core.operations.start(operation, self.cluster.kernel.now)
        self.settle()
        return operation

    def flush(self, namespace: str) -> FlushOperation:
        """Remove a whole namespace everywhere."""
        assert self.core is not None
        operation = FlushOperation(self.core, namespace)
        self.core.operations.start(operation, self.cluster.kernel.now)
        self.settle()
        return operation
