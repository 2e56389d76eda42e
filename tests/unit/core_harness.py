"""A `PeerCore` driven by hand: effects come out, answers are fed in, and nothing else exists. For tests."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

import msgspec

from p2pstore.core.gets.lookup import split_digests
from p2pstore.core.operation import AskPeer, Operation, OperationFinished, PullObject, PullOutcome
from p2pstore.core.peer_core import PeerCore
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.gossip.floors.floor_comparison import FloorAnswer
from p2pstore.gossip.floors.floor_stamps import hash_stamps
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import ControlKind, Delta, Ping
from p2pstore.gossip.homes.partition_homes import DirectorySetting
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    PEER_RECORD_FORMAT,
    ClusterRecord,
    ClusterRecordKind,
    LocationRecord,
    LogHead,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    member_of,
    sign_cluster_record,
    sign_peer_record,
    writer_of,
)
from p2pstore.home_messages import Push
from p2pstore.memory.areas import NO_QUOTAS
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.kept_memory import Kept
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    Slot,
    SlotState,
    TrailerBody,
    encode_slot,
    encode_trailer,
    plan_geometry,
)
from p2pstore.objects import (
    DIGEST_BYTES,
    HybridClock,
    Version,
    chunk_sums,
    clock_from_unix_seconds,
    key_digest,
    root_checksum,
)
from p2pstore.put_facts import PutFacts, PutOptions
from p2pstore.transfer.data_messages import REQUESTS, DataKind, ObjectReply, Objects, ObjectStatus
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import ClusterRecords, Lookup, Proofs
from p2pstore.wire import Code, Message, decode_body, encode_body
from simulation.segment_checks import check_segment
from simulation.signer import SimulatedSigner, SimulatedVerifier, peer_id_of
from tests.unit.gossip_network import inform_of_death
from tests.unit.location_set import iterate_locations

NAMESPACE = "unit"
UNIX = 1_800_000_000.0
OTHER_INCARNATION = 7
HOLDER = "client"

EffectType = TypeVar("EffectType")


def digest_of(key: str) -> bytes:
    return key_digest(key, NAMESPACE)


def clock_at(seconds: float) -> int:
    """A version's clock for a time in seconds since the test began."""
    return clock_from_unix_seconds(UNIX + seconds)


@dataclass
class Other:
    """Another member, of which there is only what the core hears of it."""

    signer: SimulatedSigner
    sequence: int = 0

    @property
    def peer_id(self) -> PeerId:
        return self.signer.peer_id

    @property
    def member(self) -> Member:
        return member_of(self.signer.peer_id)


@dataclass(frozen=True)
class RemoteObject:
    """An object as another peer would serve it."""

    value: bytes
    slot: Slot
    trailer: TrailerBody

    @property
    def version(self) -> Version:
        return self.slot.version

    @property
    def reply(self) -> Objects:
        """The answer to a GET of slot and trailer."""
        return Objects(
            [ObjectReply(ObjectStatus.OK, encode_slot(self.slot), encode_trailer(self.trailer))]
        )


def remote_object(
    key: str, value: bytes, clock: int | None = None, writer: int = 9, **trailer: Any
) -> RemoteObject:
    sums = chunk_sums(value)
    body = TrailerBody(NAMESPACE, key, sums, **trailer)
    version = Version(
        clock_at(-60.0) if clock is None else clock, writer, root_checksum(len(value), sums)
    )
    slot = Slot(SlotState.LIVE, digest_of(key), version, 4096, len(value), len(encode_trailer(body)))
    return RemoteObject(value, slot, body)


NOT_FOUND = Objects([ObjectReply(ObjectStatus.NOT_FOUND, incarnation=OTHER_INCARNATION, sequence=99)])


class Harness:
    """One core over a bytearray, `others` members that are alive, and the time in `now`."""

    def __init__(
        self,
        others: int = 0,
        memory_bytes: int = 256 * 1024,
        directory: DirectorySetting = "auto",
        new_memory: Callable[[int], memoryview] = lambda length: memoryview(bytearray(length)),
        quotas: Mapping[str, int] = NO_QUOTAS,
        kept: Kept | None = None,
    ) -> None:
        self.now = 100.0
        self.signer = SimulatedSigner(peer_id_of(0))
        geometry = plan_geometry(memory_bytes)
        self.memory = new_memory(geometry.total_bytes)
        self.segment = Segment(
            self.memory,
            segment_id=bytes(16),
            incarnation=1,
            geometry=geometry,
            quotas=quotas,
            kept=kept,
            now=UNIX,
        )
        verifier, clock = SimulatedVerifier(), HybridClock()
        self.unix_offset = UNIX - self.now
        self.gossip = Gossip(
            self.signer,
            verifier,
            1,
            self._describe,
            GossipConfig(cluster="unit", directory_setting=directory),
            Random(1),
            wall_clock=lambda at: clock_from_unix_seconds(at + self.unix_offset),
            accepts_clock=lambda stamp, at: clock.observe(stamp, at + self.unix_offset),
        )
        self.core = PeerCore(
            signer=self.signer,
            verifier=verifier,
            gossip=self.gossip,
            segment=self.segment,
            clock=clock,
            rng=Random(2),
            unix_offset_seconds=self.unix_offset,
        )
        self.silent: set[PeerId] = set()
        """Members that do not answer questions for proofs; the others prove nothing of what they hold."""
        self._effects: list[object] = []
        self._offers = 0
        self.gossip.record(self.now)
        self.others = [self.join(number) for number in range(1, others + 1)]

    def notes(self, event: str) -> list[str]:
        """The texts about an event that are for the log."""
        return [note.text for note in self.core.notes.take() if note.event == event]

    def _describe(self) -> PeerRecord:
        checkpoints = self.core.participations.told if hasattr(self, "core") else []
        return msgspec.structs.replace(describe(self.signer, 0), checkpoints=checkpoints)

    # --- others ------------------------------------------------------------------------------

    def join(self, number: int) -> Other:
        """Make a member known, alive."""
        other = Other(SimulatedSigner(peer_id_of(number)))
        self.gossip.serve(
            other.peer_id, ControlKind.DELTA, Delta([peer_record(other.signer)], [], [], []), self.now
        )
        return other

    def offer(self, other: Other, **facts: Any) -> None:
        """Its record says this of it from now on."""
        self._offers += 1
        record = msgspec.structs.replace(
            describe(other.signer, OTHER_INCARNATION, 1 + self._offers), **facts
        )
        news = Delta([sign_peer_record(record, other.signer)], [], [], [])
        self.gossip.serve(other.peer_id, ControlKind.DELTA, news, self.now)

    def die(self, other: Other) -> None:
        """The others say that it is dead, and it does not answer."""
        inform_of_death(self.gossip.membership, other.peer_id, self.now)
        self.gossip.serve(self.others[-1].peer_id, ControlKind.PING, Ping(1, []), self.now)

    def other(self, peer_id: PeerId) -> Other:
        """The member with this id."""
        return next(other for other in self.others if other.peer_id == peer_id)

    def location(self, thing: RemoteObject, **facts: Any) -> bytes:
        """The packed location record of a remote object."""
        self.core.proofs.believe(thing.slot.digest, thing.version)  # asked for before
        return LocationRecord(thing.slot.digest, thing.version, 5, 1, **facts).encode()

    def push(self, other: Other, thing: RemoteObject, **flags: Any) -> None:
        """The other announces (or with `removed` withdraws) a copy."""
        other.sequence += 1
        self.serve(
            other,
            DataKind.PUSH,
            Push(OTHER_INCARNATION, [other.sequence], self.location(thing, **flags)),
        )

    def hold(self, other: Other, key: str, value: bytes, *version: int, **options: Any) -> RemoteObject:
        """The other holds and announces an object; `version` may be its clock and writer."""
        thing = remote_object(key, value, *version, **options)
        self.push(other, thing)
        return thing

    def serve(self, sender: Other, kind: int, request: Message) -> Any:
        """Another peer's request, through the codec."""
        decoded = decode_body(REQUESTS[kind], encode_body(request))
        return self.core.serve(sender.peer_id, kind, decoded, self.now)

    def floor_from(self, other: Other, name: bytes, version: Version, scope: int = 0) -> SignedRecord:
        """A floor that the other wrote."""
        record = ClusterRecord(
            CLUSTER_RECORD_FORMAT,
            int(ClusterRecordKind.FLOOR),
            name,
            version.clock,
            version.writer,
            other.peer_id,
            scope,
        )
        return sign_cluster_record(record, other.signer)

    def learn_floor(self, other: Other, name: bytes, version: Version, scope: int = 0) -> None:
        """The other pushes a floor of its own to this peer."""
        signed = self.floor_from(other, name, version, scope)
        self.serve(other, DataKind.CLUSTER_RECORDS, ClusterRecords([signed.body], [signed.signature]))

    def miss_a_horizon(self, clock: int) -> None:
        """This peer was away for long; all others have dropped floors up to there, and show that."""
        horizon = {1: clock}
        sync = self.gossip.floors
        sync.quorum.apart, sync.quorum.fresh = True, False
        sync.quorum._first_came, sync.quorum._apart_at = -math.inf, self.now
        for other in self.others:
            self.offer(other, floors_horizon=hash_stamps(horizon))
        answer = FloorAnswer(horizon=horizon)
        sync.learn(answer, 0, self.now, sender=self.others[0].member, same_now=False)
        sync.housekeep(self.now, alone=False, members=self.gossip.membership.others())
        self.core.gossip_arrived(self.now)

    # --- this peer ---------------------------------------------------------------------------

    def reserve(self, key: str, value: bytes) -> int:
        """A filled reservation's number."""
        trailer = len(encode_trailer(TrailerBody(NAMESPACE, key, chunk_sums(value)))) + 32
        reservation = self.segment.reserve(
            len(value), trailer, session=HOLDER, now=self.core.unix(self.now)
        )
        self.core.objects.announce_withdrawn(self.now)
        self.segment.reservation_view(reservation.number, session=HOLDER)[:] = value
        return reservation.number

    def facts(
        self, key: str, value: bytes, namespace: str = NAMESPACE, follows: bytes = b"", **options: Any
    ) -> PutFacts:
        """Of a value that was written into a reservation."""
        sums = chunk_sums(value)
        root = root_checksum(len(value), sums)
        options["ttl_ms"] = round(1000 * options.pop("ttl_seconds", 0.0))
        reservation, digest = self.reserve(key, value), key_digest(key, namespace)
        wanted = PutOptions(**options)
        return PutFacts(reservation, key, digest, len(value), sums, root, wanted, follows)

    def operation(self, facts: PutFacts, namespace: str = NAMESPACE) -> PutOperation:
        """A put that has not begun."""
        return PutOperation(self.core, facts, session=HOLDER, namespace=namespace)

    def put(self, key: str, value: bytes, namespace: str = NAMESPACE, **options: Any) -> PutOperation:
        """Start a put."""
        operation = self.operation(self.facts(key, value, namespace, **options), namespace)
        self.start(operation)
        return operation

    def stored(self, key: str, value: bytes, **options: Any) -> ObjectEntry:
        """Put a value whose key no other peer holds or announces."""
        operation = self.put(key, value, **options)
        for ask in [] if operation.done else self.asks(DataKind.GET):
            self.answer(ask, None)
        assert operation.done, operation
        entry = self.find(key)
        assert entry is not None, operation.result
        self.forget_effects()
        return entry

    def find(self, key: str) -> ObjectEntry | None:
        return self.segment.find(digest_of(key), self.core.unix(self.now))

    def value(self, key: str) -> bytes | None:
        entry = self.find(key)
        return None if entry is None else bytes(self.segment.payload(entry))

    def announced(self, key: str) -> LocationRecord | None:
        """The record of a key in this peer's log now."""
        for record in iterate_locations(self.gossip.log.snapshot()):
            if record.digest == digest_of(key):
                return record
        return None

    @property
    def writer(self) -> int:
        return writer_of(self.signer.peer_id)

    # --- driving -----------------------------------------------------------------------------

    def start(self, operation: Operation) -> Operation:
        return self.core.operations.start(operation, self.now)

    def pass_time(self, seconds: float) -> None:
        """Advance in the steps that the core asks for."""
        until = self.now + seconds
        while True:
            due = self.core.next_tick(self.now)
            if due > until:
                break
            self.now = max(due, self.now + 1e-6)
            self.core.tick(self.now)
            self.core.gossip_arrived(self.now)
        self.now = until

    def effects(self, kind: type[EffectType]) -> list[EffectType]:
        """Take the effects of one type; the others stay for later."""
        self._take_effects()
        taken = [effect for effect in self._effects if isinstance(effect, kind)]
        self._effects = [effect for effect in self._effects if not isinstance(effect, kind)]
        return taken

    def _take_effects(self) -> None:
        """Others do not prove what they hold: see `silent`."""
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, AskPeer) and effect.kind == DataKind.PROVE:
                    nothing = Proofs([b""] * (len(effect.request.digests) // DIGEST_BYTES))  # type: ignore[attr-defined]
                    reply = None if effect.peer_id in self.silent else nothing
                    self.core.answered(effect.operation, effect.tag, reply, self.now)
                else:
                    self._effects.append(effect)

    def forget_effects(self) -> None:
        self.core.take_effects()
        self._effects.clear()

    def asks(self, kind: int) -> list[AskPeer]:
        """Take the requests of one kind, having gone through the codec. Questions to holders about what is put are
        asked in the next step."""
        if kind == DataKind.GET:
            self.core.tick(self.now)
        asks = self.effects(AskPeer)
        self._effects += [ask for ask in asks if ask.kind != kind]
        return [
            replace(ask, request=decode_body(REQUESTS[kind], encode_body(ask.request)))
            for ask in asks
            if ask.kind == kind
        ]

    def answer(self, ask: AskPeer, reply: Any) -> None:
        self.core.answered(ask.operation, ask.tag, reply, self.now)

    def pull_wanted(self) -> PullObject:
        """The one pull that is wanted now."""
        (pull,) = self.effects(PullObject)
        return pull

    def deliver(
        self, pull: PullObject, thing: RemoteObject, *failures: HolderReport
    ) -> ObjectEntry | None:
        """Carry out a pull: the object arrives, after these failures of others."""
        destination = self.core.operations.copy_destination(pull.operation, self.now)
        destination.prepare(thing.slot, thing.trailer)[:] = thing.value
        entry = destination.commit(self.now)
        self.core.operations.pulled(
            pull.operation, PullOutcome(entry is not None, tuple(failures)), self.now
        )
        return entry

    def fail(self, pull: PullObject, *codes: Code, error: Exception | None = None) -> None:
        """Every copy of a pull failed, with these codes in turn."""
        failures = tuple(
            HolderReport(copy.member, int(code), "", "", OTHER_INCARNATION, 1000)
            for copy, code in zip(pull.copies, codes, strict=True)
        )
        self.core.operations.pulled(pull.operation, PullOutcome(False, failures, error), self.now)

    def finished(self) -> set[int]:
        """Numbers of the operations that were reported as finished since the last call."""
        return {effect.operation for effect in self.effects(OperationFinished)}

    def check_idle(self) -> None:
        """Nothing is under way, reserved or held."""
        self._take_effects()
        assert self.core.operations_under_way == 0
        assert self.segment.leased_bytes == 0
        live = sum(entry.extent_bytes for entry in self.segment.entries())
        assert self.segment.used_bytes == live, "a reservation was left behind"
        check_segment(self.segment)


def digests_asked(ask: AskPeer) -> list[bytes]:
    """The digests of a lookup."""
    assert isinstance(ask.request, Lookup)
    return split_digests(ask.request.digests)


def describe(signer: SimulatedSigner, incarnation: int, sequence: int = 1) -> PeerRecord:
    return PeerRecord(
        format=PEER_RECORD_FORMAT,
        peer_id=signer.peer_id,
        cluster="unit",
        name=f"peer-{signer.peer_id[-32]}",
        incarnation=incarnation,
        sequence=sequence,
        host_id=bytes(16),
        control=["sim:1"],
        data=["sim:1"],
        socket="",
        transports=[],
        segments=[],
        memory_capacity=1,
        memory_used=0,
        ssd_capacity=0,
        ssd_used=0,
        load_permille=0,
        head=LogHead(),
    )


def peer_record(signer: SimulatedSigner, incarnation: int = OTHER_INCARNATION) -> SignedRecord:
    return sign_peer_record(describe(signer, incarnation), signer)
