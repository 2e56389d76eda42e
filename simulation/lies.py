"""What a hostile member may do: the behaviours of `liar`, by name. Each is one idea, varied by the seed.

A lie knows what a member may know: it looks at what other peers hold as LIST and LOOKUP would tell it. It signs with
its own identity only. What it may do by right, a put or a removal of its own, it does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from p2pstore.errors import P2PStoreError
from p2pstore.gossip.floors.floor_stamps import Stamps, hash_stamps, pack_stamps
from p2pstore.gossip.gossip_messages import (
    Ack,
    Claim,
    ControlKind,
    Delta,
    Exchange,
    ExchangeReply,
    LogChunk,
    Ping,
    SnapshotHead,
    Status,
)
from p2pstore.gossip.homes.home_updates import AUDIT_ENTRY
from p2pstore.gossip.locations.log import REMOVED
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    PARTITION_COUNT,
    LocationRecord,
    LogHead,
    Member,
    PeerId,
    PeerRecord,
    decode_location,
    location_hash,
    member_of,
    partition_of,
    sign_peer_record,
)
from p2pstore.home_messages import Holding, PartitionSet, Push, Pushed
from p2pstore.memory.entries import ObjectEntry, Written
from p2pstore.memory.segment_layout import (
    TrailerBody,
    decode_slot,
    decode_trailer,
    encode_slot,
    encode_trailer,
)
from p2pstore.objects import DIGEST_BYTES, Version, chunk_sums, clock_from_unix_seconds, root_checksum
from p2pstore.transfer import peer_messages
from p2pstore.transfer.data_messages import DataKind, ObjectReply, ObjectStatus
from p2pstore.wire import Code, Failure, Message
from simulation.peer import NAMESPACE, SimulatedPeer
from simulation.signer import SimulatedSigner, peer_id_of
from simulation.transport import SMALL_BYTES

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from simulation.liar import LyingPeer

FAR: Final = 1 << 40
"""A place in a log that it never reaches."""
INVENTED: Final = 1_000
INVENTED_A_STEP: Final = 20
LARGE_SNAPSHOT: Final = 20_000
FORGED_PROOF_BYTES: Final = 98
CLAIMS_A_STEP: Final = 3
"""Messages full of claims to each peer: 30 a second."""


class Behaviour:
    """One way to lie. Each method is given the truth, and returns what is told in its place; here, the truth."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        self.liar = liar
        self.rng = rng
        self.variant = ""

    def _variant(self, name: str) -> str:
        """Which way of it this one is, for people."""
        self.variant += f" ({name})"
        return name

    def step(self) -> None:
        """Called several times a second: send messages that were not asked for."""

    def told(self, message: Message, to: PeerId) -> Message | None:
        """A request or a reply that goes to `to`. None keeps it back for good."""
        return message

    def record(self, record: PeerRecord) -> PeerRecord:
        return record

    def shown(self, digest: bytes, truth: ObjectReply | None) -> ObjectReply | None:
        """Slot and trailer of an object that is about to be read."""
        return truth

    def sending_seconds(self, size_bytes: int) -> float:
        """How long it takes to answer a reader of an object."""
        return 0.0

    def snapshot(self, truth: tuple[SnapshotHead, bytes]) -> tuple[SnapshotHead, bytes]:
        """The liar's own log as a whole."""
        return truth

    def heard(self, sender: PeerId, kind: int, request: Message) -> None:
        """A request of another peer."""

    def end(self) -> None:
        """The behaviour is over."""

    # --- what lies are made of ---------------------------------------------------------------

    @property
    def core(self) -> PeerCore:
        assert self.liar.core is not None
        return self.liar.core

    @property
    def now(self) -> float:
        return self.liar.cluster.kernel.now

    def clock(self, ahead_seconds: float = 0.0) -> int:
        """A stamp of now, or of later."""
        return clock_from_unix_seconds(self.core.unix(self.now) + ahead_seconds)

    def held(self, peer: SimulatedPeer) -> list[ObjectEntry]:
        """What a peer holds, in an order that does not depend on the process."""
        assert peer.core is not None
        return sorted(peer.core.segment.entries(), key=lambda entry: entry.digest)

    def some_held(self, count: int) -> Iterator[tuple[SimulatedPeer, ObjectEntry]]:
        for _ in range(count):
            victims = self.liar.victims
            holder = self.rng.choice(victims) if victims else None
            entries = [] if holder is None else self.held(holder)
            if holder is not None and entries:
                yield holder, self.rng.choice(entries)

    def place_of(self, peer: SimulatedPeer) -> tuple[Member, int, int]:
        """(member, incarnation, sequence): where a peer's log is."""
        assert peer.core is not None
        return peer.core.member, peer.core.incarnation, peer.core.gossip.log.sequence


def location_of(entry: ObjectEntry, version: Version | None = None) -> LocationRecord:
    """What a holder of this object, in this version or another one, would announce."""
    return LocationRecord(entry.digest, version or entry.version, 0, 1, replicas=1)


class Horizons(Behaviour):
    """Tells that floors of others were dropped up to now, and that it had seen them all."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._ahead_seconds = rng.choice((0.0, 9.0))
        self._whose = self._variant(rng.choice(("members", "strangers", "both")))
        self._asked: dict[PeerId, int] = {}

    def heard(self, sender: PeerId, kind: int, request: Message) -> None:
        if isinstance(request, Exchange):
            self._asked[sender] = request.floors_epoch

    def _horizon(self) -> Stamps:
        stamp = self.clock(self._ahead_seconds)
        members = [member_of(peer.signer.peer_id) for peer in self.liar.cluster.peers]
        strangers = list(range(1, 200))
        whose = {"members": members, "strangers": strangers, "both": members + strangers}
        return dict.fromkeys(whose[self._whose], stamp)

    def told(self, message: Message, to: PeerId) -> Message:
        if not isinstance(message, ExchangeReply):
            return message
        epoch, horizon = self._asked.get(to, 0), self._horizon()
        return msgspec.structs.replace(
            message,
            floors_epoch=epoch,
            floors_seen=pack_stamps(dict.fromkeys(horizon, epoch)) if epoch else b"",
            floors_horizon=pack_stamps(horizon),
        )

    def record(self, record: PeerRecord) -> PeerRecord:
        return msgspec.structs.replace(record, floors_horizon=hash_stamps(self._horizon()))

    def step(self) -> None:
        self.core.gossip.offer_changed()


class Poison(Behaviour):
    """Announces versions of others, and serves other bytes under them."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._how = self._variant(rng.choice(("same version", "newer version", "torn")))
        self._torn: dict[bytes, ObjectReply] = {}

    def step(self) -> None:
        for holder, entry in self.some_held(1):
            assert holder.core is not None
            trailer = decode_trailer(holder.core.segment.table.trailer_bytes(entry))
            mine = self.core.segment.find(entry.digest, self.core.unix(self.now))
            if trailer is None or (mine is not None and mine.version.covers(entry.version)):
                continue
            version = entry.version
            if self._how == "newer version":
                version = Version(max(version.clock + 1, self.clock()), version.writer)
            forged = self._publish(entry.digest, trailer.key, entry.length, version)
            if forged is not None:
                if self._how == "torn":
                    self._tear(holder, entry)
                self._press(forged)

    def _publish(self, digest: bytes, key: str, length: int, version: Version) -> ObjectEntry | None:
        """Hold other bytes, with a proof that is none: without one, its own honest core would become the writer of
        them after a while, which is an overwrite like any other."""
        core, value = self.core, self.rng.randbytes(max(length, 1))
        sums = chunk_sums(value)
        trailer = TrailerBody(NAMESPACE, key, sums, proof=self.rng.randbytes(FORGED_PROOF_BYTES))
        version = version._replace(root=root_checksum(len(value), sums))
        try:
            room = core.segment.reserve(
                len(value),
                len(encode_trailer(trailer)) + 32,
                session="liar",
                now=core.unix(self.now),
                namespace=NAMESPACE,
            )
        except P2PStoreError:
            return None
        core.segment.reservation_view(room.number, session="liar")[: len(value)] = value
        try:
            entry = core.objects.publish(
                Written(room.number, digest, version, trailer, len(value)),
                session="liar",
                soft=False,
                now=self.now,
            )
        except P2PStoreError:
            core.segment.abort(room.number, session="liar")
            return None
        self.liar.lies_told += 1
        return entry

    def _tear(self, holder: SimulatedPeer, entry: ObjectEntry) -> None:
        """Show the holder's slot and sums over bytes of the liar's own."""
        truth, mine = holder.look(entry.digest), self.core.objects.find(entry.digest, self.now)
        slot = None if truth is None else decode_slot(truth.slot)
        if truth is not None and slot is not None and mine is not None:
            moved = encode_slot(msgspec.structs.replace(slot, offset=mine.offset))
            self._torn[entry.digest] = ObjectReply(ObjectStatus.OK, moved, truth.trailer)

    def _press(self, forged: ObjectEntry) -> None:
        """Have another peer keep a copy of what was forged."""
        peer = self.rng.choice(self.liar.victims)
        clock, writer, root = forged.version
        request = peer_messages.Replicate(
            forged.digest,
            clock,
            writer,
            forged.length,
            root=root,
            proof=self.rng.randbytes(FORGED_PROOF_BYTES),
        )
        self.liar.tell_data(peer, DataKind.REPLICATE, request)

    def shown(self, digest: bytes, truth: ObjectReply | None) -> ObjectReply | None:
        return self._torn.get(digest, truth)

    def told(self, message: Message, to: PeerId) -> Message:
        if isinstance(message, peer_messages.Locations):  # no other peer has anything
            place = (self.core.member, self.core.incarnation, self.core.gossip.log.sequence)
            items = [
                [each for each in holdings if each.member == place[0]] for holdings in message.items
            ]
            return peer_messages.Locations(items)
        return message


class Tails(Behaviour):
    """Speaks for the logs of others, beyond what they signed."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._how = self._variant(rng.choice(("removals", "additions", "other versions")))

    def _operations(self, owner: SimulatedPeer, count: int) -> list[bytes]:
        """Forged operations of a peer's log."""
        held = self.held(owner)
        if self._how == "additions":
            return [
                LocationRecord(self.rng.randbytes(DIGEST_BYTES), Version(self.clock(), 1), 0, 1).encode()
                for _ in range(count)
            ] + [location_of(entry).encode() for _, entry in self.some_held(count)]
        some = self.rng.sample(held, min(count, len(held)))
        if self._how == "removals":
            return [
                (packed := location_of(entry).encode())[:-1] + bytes((packed[-1] | REMOVED,))
                for entry in some
            ]
        return [
            location_of(entry, Version(self.clock(), entry.version.writer)).encode() for entry in some
        ]

    def step(self) -> None:
        for owner in self.liar.victims:
            operations = b"".join(self._operations(owner, 8))
            if not operations:
                continue
            member, incarnation, sequence = self.place_of(owner)
            chunk = LogChunk(member, incarnation, sequence + 1, operations)
            for peer in self.liar.victims:
                if peer is not owner:
                    self.liar.tell(peer, ControlKind.DELTA, Delta([], [chunk], [], []))

    def told(self, message: Message, to: PeerId) -> Message:
        if isinstance(message, peer_messages.Locations):
            return peer_messages.Locations(
                [self._holdings(each) for each in message.items], message.unsure
            )
        return message

    def _holdings(self, holdings: list[Holding]) -> list[Holding]:
        """The same holders, at places that their logs never reach, with versions that were never written."""
        forged = []
        for each in holdings:
            record = decode_location(each.record)
            version = Version(self.clock(), record.version.writer)
            packed = msgspec.structs.replace(record, version=version).encode()
            forged.append(Holding(each.member, each.incarnation, FAR, packed))
        return forged


class Snapshots(Behaviour):
    """Signs heads that its own log does not have, and answers with logs that are larger, or others."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._how = self._variant(rng.choice(("large", "another", "beyond all bounds")))
        count = LARGE_SNAPSHOT if self._how == "large" else 50
        self._packed = b"".join(
            LocationRecord(rng.randbytes(DIGEST_BYTES), Version(1 + place, 1), 0, 1).encode()
            for place in range(count)
        )
        self._hash = 0
        for start in range(0, len(self._packed), LOCATION_BYTES):
            self._hash ^= location_hash(self._packed[start : start + LOCATION_BYTES])

    def step(self) -> None:
        self.core.gossip.offer_changed()

    def record(self, record: PeerRecord) -> PeerRecord:
        count = 1 << 40 if self._how == "beyond all bounds" else 50
        head = LogHead(record.head.sequence + 5_000, count, self._hash)
        return msgspec.structs.replace(record, head=head)

    def snapshot(self, truth: tuple[SnapshotHead, bytes]) -> tuple[SnapshotHead, bytes]:
        head = truth[0]
        claimed = self._hash if self._how == "large" else self._hash ^ 1
        return SnapshotHead(head.incarnation, head.sequence + 5_000, claimed), self._packed


class Claims(Behaviour):
    """Says by the dozen per second that the living are dead, have left, or are suspects."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._status = rng.choice((Status.DEAD, Status.LEFT, Status.SUSPECT))
        self._variant(self._status.name)
        self._accusers = rng.random() < 0.5
        """Whether it says that others accuse, too."""

    def step(self) -> None:
        for peer in self.liar.victims:
            for _ in range(CLAIMS_A_STEP):
                self.liar.tell(peer, ControlKind.PING, Ping(0, self._claims(peer)))

    def _claims(self, peer: SimulatedPeer) -> list[Claim]:
        members = [member_of(other.signer.peer_id) for other in self.liar.victims]
        claims = []
        for other in self.liar.victims:
            state = self.core.gossip.membership.get(other.signer.peer_id)
            if other is not peer and state is not None:
                by = self.rng.choice(members) if self._accusers else self.core.member
                claims.append(Claim(state.peer_id, state.incarnation, int(self._status), by))
        return claims


class Invented(Behaviour):
    """Brings in members by the thousand that do not exist, with memory for all, and objects of others."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._made = 0
        self._holds = rng.random() < 0.5

    def step(self) -> None:
        state = self.core.gossip.membership.own
        if state.record is None or self._made >= INVENTED:
            return
        records, logs = [], []
        for _ in range(INVENTED_A_STEP):
            signer = SimulatedSigner(peer_id_of(100_000 + self._made))
            self._made += 1
            operations = [location_of(entry).encode() for _, entry in self.some_held(4)]
            head = LogHead()
            if self._holds and operations:
                packed = list(dict.fromkeys(operations))
                head = LogHead(len(packed), len(packed), _hash_of(packed))
                logs.append(
                    LogChunk(member_of(signer.peer_id), state.record_incarnation, 1, b"".join(packed))
                )
            record = msgspec.structs.replace(
                state.record,
                peer_id=signer.peer_id,
                name=f"invented {self._made}",
                host_id=self.rng.randbytes(16),
                sequence=1,
                control=[f"sim:{100_000 + self._made}"],
                data=[f"sim:{100_000 + self._made}"],
                memory_capacity=1 << 40,
                head=head,
            )
            records.append(sign_peer_record(record, signer))
        for peer in self.liar.victims:
            self.liar.tell(peer, ControlKind.DELTA, Delta(records, logs, [], []))


def _hash_of(records: list[bytes]) -> int:
    found = 0
    for packed in records:
        found ^= location_hash(packed)
    return found


class Withholding(Behaviour):
    """Announces what others hold, and does not give it: denies it, is silent, slow, or says that it cannot."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._how = self._variant(rng.choice(("denies", "gone", "silent", "slow", "errors")))
        self._announced: dict[bytes, LocationRecord] = {}
        self._truth: dict[bytes, ObjectReply] = {}

    def end(self) -> None:
        for record in self._announced.values():
            self.core.gossip.release(record.digest, record.version, self.now)

    def step(self) -> None:
        for holder, entry in self.some_held(2):
            known = self._announced.get(entry.digest)
            if self.core.segment.find(entry.digest, 0.0) is not None or (
                known is not None and known.version.covers(entry.version)
            ):
                continue
            record = self._announced[entry.digest] = location_of(entry)
            self.core.gossip.hold(record, self.now)
            truth = holder.look(entry.digest)
            if truth is not None:
                self._truth[entry.digest] = truth
            self.liar.lies_told += 1
        self.liar.settle()

    def shown(self, digest: bytes, truth: ObjectReply | None) -> ObjectReply | None:
        if self._how == "denies":
            return ObjectReply(ObjectStatus.NOT_FOUND, incarnation=1, sequence=1)
        if self._how in ("gone", "errors"):
            return None
        self.liar.lies_told += 1
        return self._truth.get(digest, truth)

    def sending_seconds(self, size_bytes: int) -> float:
        if self._how == "silent":
            return float("inf")
        return 4.0 if self._how == "slow" and size_bytes != SMALL_BYTES else 0.0

    def told(self, message: Message, to: PeerId) -> Message | None:
        asked = isinstance(
            message,
            peer_messages.Locations
            | peer_messages.Replicated
            | peer_messages.CopyChecked
            | Pushed
            | peer_messages.RecordsTaken,
        )
        if not asked:
            return message
        if self._how in ("silent", "slow"):
            return None
        if self._how == "errors":
            return Failure(int(Code.BUSY), "busy")
        return message


class Clocks(Behaviour):
    """Says that it is another time."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._skew_seconds = rng.choice((3600.0, -3600.0, 86400.0 * 365, 9.0))
        self._random = rng.random() < 0.5
        self._variant(f"{self._skew_seconds:+.0f} s")
        liar.set_clock(self._skew_seconds)
        liar.lies_told += 1

    def end(self) -> None:
        self.liar.set_clock(0.0)

    def told(self, message: Message, to: PeerId) -> Message:
        if isinstance(message, Ack | Exchange | ExchangeReply) and self._random:
            skew_ms = int(self.rng.uniform(-1e9, 1e9))
            return msgspec.structs.replace(message, unix_ms=max(1, message.unix_ms + skew_ms))
        return message


class Replays(Behaviour):
    """Says again what it or others said long ago."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._kept: list[tuple[bool, int, Message]] = []

    def heard(self, sender: PeerId, kind: int, request: Message) -> None:
        replayed = isinstance(
            request,
            Delta | Exchange | Ping | Push | peer_messages.ClusterRecords | peer_messages.Replicate,
        )
        if not replayed:
            return
        kept = (kind in ControlKind.__members__.values(), kind, request)
        if len(self._kept) < 200:
            self._kept.append(kept)
        elif self.rng.random() < 0.2:
            self._kept[self.rng.randrange(200)] = kept

    def step(self) -> None:
        for peer in self.liar.victims:
            if self._kept:
                _, kind, request = self.rng.choice(self._kept)
                if isinstance(request, Delta | Exchange | Ping):
                    self.liar.tell(peer, ControlKind(kind), request)
                else:
                    self.liar.tell_data(peer, DataKind(kind), request)


class Homes(Behaviour):
    """As the home of keys, denies what others told it; as an owner, tells homes that it holds everything."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._how = self._variant(rng.choice(("denies", "holds all", "wants all", "rivals")))

    def told(self, message: Message, to: PeerId) -> Message:
        if isinstance(message, peer_messages.Locations):
            if self._how == "denies":
                return peer_messages.Locations([[] for _ in message.items])
            return peer_messages.Locations(message.items, list(range(len(message.items))))
        if isinstance(message, Pushed) and self._how == "wants all":
            return Pushed(list(range(PARTITION_COUNT)), message.rivals)
        if isinstance(message, Pushed) and self._how == "rivals":
            return Pushed(message.behind, self._rivals())
        return message

    def _rivals(self) -> list[Holding]:
        place = (self.core.member, self.core.incarnation, FAR)
        return [
            Holding(*place, location_of(entry, Version(self.clock(), entry.version.writer)).encode())
            for _, entry in self.some_held(16)
        ]

    def step(self) -> None:
        if self._how != "holds all":
            return
        records = {entry.digest: location_of(entry).encode() for _, entry in self.some_held(16)}
        sets = [
            PartitionSet(partition_of(digest), 1 << 20, location_hash(packed), packed)
            for digest, packed in records.items()
        ]
        audit = b"".join(AUDIT_ENTRY.pack(each.partition, each.number, 7) for each in sets[:4])
        push = Push(
            self.core.incarnation, [], b"", b"", self.core.gossip.log.sequence, sets, audit, 3600
        )
        for peer in self.liar.victims:
            self.liar.tell_data(peer, DataKind.PUSH, push)


class Floors(Behaviour):
    """Announces floors that no other peer has, so that none can be dropped."""

    def __init__(self, liar: LyingPeer, rng: Random) -> None:
        super().__init__(liar, rng)
        self._at_times = self._variant(rng.choice(("always", "mostly"))) == "mostly"
        """Whether it agrees now and then, so that it is waited for again."""
        self._refuses = self._variant(rng.choice(("answers", "refuses"))) == "refuses"
        """Whether it also says so to who asks it."""

    def told(self, message: Message, to: PeerId) -> Message:
        if self._refuses and isinstance(message, ExchangeReply):
            return msgspec.structs.replace(message, floors_epoch=0)
        if self._refuses and isinstance(message, Exchange):
            return msgspec.structs.replace(message, floors_epoch=0, floors_hash=0)
        return message

    def record(self, record: PeerRecord) -> PeerRecord:
        if self._at_times and self.rng.random() < 0.2:
            return record
        return msgspec.structs.replace(record, floors_hash=self.rng.getrandbits(63), floors_seen=1)

    def step(self) -> None:
        self.core.gossip.offer_changed()


class Orders(Behaviour):
    """Has the copies of others end, or be pinned no longer, by messages without a valid signature."""

    def step(self) -> None:
        unix_ms = int(1000 * self.core.unix(self.now))
        for holder, entry in self.some_held(4):
            clock, writer = entry.version.clock, entry.version.writer
            ends = peer_messages.ExpiryItem(entry.digest, clock, writer, unix_ms + 1)
            self.liar.tell_data(holder, DataKind.SET_EXPIRY, peer_messages.SetExpiry([ends]))
            pin = peer_messages.PinItem(entry.digest, clock, writer)
            self.liar.tell_data(holder, DataKind.SET_PINS, peer_messages.SetPins([pin], 0))


BEHAVIOURS: Final[Mapping[str, Callable[[LyingPeer, Random], Behaviour]]] = MappingProxyType(
    {
        "horizons": Horizons,
        "poison": Poison,
        "tails": Tails,
        "snapshots": Snapshots,
        "claims": Claims,
        "invented": Invented,
        "withholding": Withholding,
        "clocks": Clocks,
        "replays": Replays,
        "homes": Homes,
        "floors": Floors,
        "orders": Orders,
    }
)
