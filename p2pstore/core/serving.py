"""Answering other peers' requests on data connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.copy_destination import TakeCopiesOperation, read_copies
from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.floors import swept
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import holding_record, split_digests
from p2pstore.core.key_events import serve_names
from p2pstore.core.operation import InSteps, KnownCopy, Operation
from p2pstore.core.own_objects import key_info
from p2pstore.core.puts.lifetimes import serve_expiry, serve_pins
from p2pstore.errors import CapacityExceeded, ProtocolError, Unavailable
from p2pstore.gossip.gossip_messages import ControlKind, Delta
from p2pstore.gossip.homes.home_updates import PushIntake
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.records import LocationRecord, Member, PeerId, SignedRecord, member_of, writer_of
from p2pstore.home_messages import Holding, Push, Pushed
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import DIGEST_BYTES, Version, size_units
from p2pstore.put_facts import MAX_REPLICAS
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.data_messages import Ping, Pong
from p2pstore.transfer.peer_messages import (
    MAX_LOOKUP_DIGESTS,
    MAX_PROVED,
    CheckCopy,
    ClusterRecords,
    CopyChecked,
    Keys,
    ListKeys,
    Locations,
    Lookup,
    Names,
    Proofs,
    Prove,
    Reads,
    ReadsTaken,
    RecordsTaken,
    Replicate,
    Replicated,
    ReplicatedMany,
    ReplicateMany,
    SetExpiry,
    SetPins,
)
from p2pstore.wire import Code, Failure, Message, code_of

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.ssd_tier.index import ColdEntry

MAX_HOLDINGS: Final = 8
"""Holders named per key: a reply of 4,096 keys stays under 3 MiB."""
RECORDS_PER_STEP: Final = 32
"""Signatures that are checked, at 60 us each, and objects that are withdrawn."""
LOOKED_UP_PER_STEP: Final = 512
"""Keys of a lookup: some 5 us each."""
KEYS_PER_STEP: Final = 256
"""Keys looked at in one step: some 5 us each in memory, 20 on the SSD."""
MAX_LIST_LIMIT: Final = 2_000
"""Keys in one page: of 1 KiB each they stay under 3 MiB."""


def serve(
    core: PeerCore, sender: PeerId, kind: int, request: Message, now: float
) -> Message | Operation:
    """Answer another peer's request: a reply, or an operation for `reply_of`. Raises `ProtocolError` for nonsense."""
    match request:
        case Lookup():
            digests = split_digests(request.digests)
            if len(digests) > MAX_LOOKUP_DIGESTS:
                raise ProtocolError(f"a lookup of {len(digests):,} keys; at most {MAX_LOOKUP_DIGESTS:,}")
            return _at_once(core, _looked_up(core, digests, now), now)
        case Push():
            return _serve_push(core, sender, request, now)
        case Replicate():
            return _serve_replicate(core, sender, request, now)
        case ReplicateMany():
            return _serve_replicate_many(core, sender, request, now)
        case SetPins():
            return serve_pins(core, request, now)
        case SetExpiry():
            return serve_expiry(core, sender, request, now)
        case CheckCopy():
            if len(request.digest) != DIGEST_BYTES:
                raise ProtocolError("a request to check a copy that names no object")
            return core.operations.start(CheckOperation(core, request.digest, again=request.again), now)
        case ClusterRecords():
            if len(request.bodies) != len(request.signatures):
                raise ProtocolError("cluster records have not one signature each")
            records = list(map(SignedRecord, request.bodies, request.signatures))
            return _at_once(core, _taken(core, records, now), now)
        case ListKeys():
            return core.operations.start(InSteps(core, listed_here(core, request, now)), now)
        case Names():
            return serve_names(core, request, now)
        case Reads():
            core.read_reports.heard(request.items, now)
            return ReadsTaken()
        case Prove():
            digests = split_digests(request.digests)
            return core.operations.start(ProofsHereOperation(core, digests), now)
        case Ping():
            return Pong(core.incarnation, core.gossip.log.sequence)
        case _:
            text = f"this peer does not answer requests of kind {kind}"
            return Failure(int(Code.UNSUPPORTED), text)


def _at_once(core: PeerCore, steps: Steps[Message], now: float) -> Message | Operation:
    """The result, where the first step has it already. Raises the error of the first step."""
    operation = core.operations.start(InSteps(core, steps), now)
    if not operation.done:
        return operation
    if isinstance(operation.result, Exception):
        raise operation.result
    result: Message = operation.result
    return result


def _serve_push(core: PeerCore, sender: PeerId, request: Push, now: float) -> Pushed | Operation:
    member = member_of(sender)
    intake = core.gossip.intake(member, request)
    if intake.step(now):  # as nearly always
        return pushed_reply(intake.behind, intake.rivals)
    return core.operations.start(TakePushOperation(core, member, intake), now)


def _taken(core: PeerCore, records: Sequence[SignedRecord], now: float) -> Steps[RecordsTaken]:
    """Take in cluster records that were pushed, and wait until what they forbid is gone. Raises `ProtocolError` for one
    that is not right."""
    taken = RecordsTaken(core.clock.latest)
    for start in range(0, len(records), RECORDS_PER_STEP):
        if start:
            yield
        core.floors.learn(records[start : start + RECORDS_PER_STEP], now)
    yield from swept(core)
    return taken


def _looked_up(core: PeerCore, digests: Sequence[bytes], now: float) -> Steps[Locations]:
    """The locations that this peer knows of some keys."""
    items: list[list[Holding]] = []
    unsure: list[int] = []
    for place, digest in enumerate(digests):
        if place and place % LOOKED_UP_PER_STEP == 0:
            yield
        if not core.gossip.partitions.vouches(digest, now):
            unsure.append(place)
        items.append(_holdings(core, digest, now))
    return Locations(items, unsure)


def _holdings(core: PeerCore, digest: bytes, now: float) -> list[Holding]:
    """Copies of a key; those of members believed dead only when there are no others. The asking peer knows the members
    as well, and so tells a key whose holders cannot be reached from one that never existed."""
    alive: list[Holding] = []
    dead: list[Holding] = []
    mine = core.copies.own_location(digest, now)
    if mine is not None:
        alive.append(Holding(core.member, core.incarnation, core.gossip.log.sequence, mine.encode()))
    for known in core.gossip.directory.holders(digest):
        version = known.record.version
        if known.hearsay:  # of others: let each speak for itself
            continue
        if not (
            core.gossip.cluster_records.floors.forbids(digest, None, version)
            or core.gossip.doubts(known.member, version, now)
        ):
            (dead if known.hidden else alive).append(holding_of(known))
    return (alive or dead)[:MAX_HOLDINGS]


def _serve_replicate(
    core: PeerCore, sender: PeerId, request: Replicate, now: float
) -> Message | Operation:
    if len(request.digest) != DIGEST_BYTES or request.length < 0:
        raise ProtocolError("a request to replicate that names no object")
    if core.closing:
        return Failure(int(Code.UNAVAILABLE), "this peer is leaving")
    minimum = Version(request.clock, request.writer, request.root)
    _introduce(core, sender, request, now)
    if core.gossip.doubts(member_of(sender), minimum, now):
        return Failure(int(Code.UNAVAILABLE), "the sender has yet to hear of floors that are gone")
    entry = core.objects.find(request.digest, now)
    if entry is not None and minimum.covers(entry.version) and entry.version.covers(minimum):
        if not request.soft:
            wanted = max(entry.replicas, min(request.replicas, MAX_REPLICAS))
            core.objects.strengthen(entry, entry.pin, wanted, now)
        return Replicated(entry.version.clock, entry.version.writer)
    if entry is not None and entry.version.covers(minimum):
        return Replicated(entry.version.clock, entry.version.writer)
    cold = core.cold.find(request.digest, now) if entry is None else None
    if cold is not None and cold.version.covers(minimum) and (request.soft or not cold.soft):
        return Replicated(cold.version.clock, cold.version.writer)
    if request.length > core.segment.data_bytes or not core.segment.data_bytes:
        return Failure(int(Code.CAPACITY_EXCEEDED), "the object is larger than this peer's memory")
    if not _is_proved(core, sender, request, minimum):
        return Failure(int(Code.UNAVAILABLE), "the sender does not prove who wrote the version")
    record = LocationRecord(request.digest, minimum, 0, size_units(request.length))
    source = KnownCopy(member_of(sender), sender, record, reachable=True)
    operation = FetchOperation(core, request.digest, soft=request.soft, source=source, minimum=minimum)
    operation.proof = request.proof
    return core.operations.start(operation, now)


def _introduce(core: PeerCore, sender: PeerId, request: Replicate | ReplicateMany, now: float) -> None:
    """Take in the record that came along, where it is news: its signatures take 0.1 ms to check."""
    me = SignedRecord(request.record_body, request.record_signature)
    known = core.gossip.membership.get(sender)
    if me.body and (known is None or known.signed != me):
        _, effects = core.gossip.serve(sender, ControlKind.DELTA, Delta([me], [], [], []), now)
        for effect in effects:
            core.emit(effect)


def _serve_replicate_many(
    core: PeerCore, sender: PeerId, request: ReplicateMany, now: float
) -> Message | Operation:
    if core.closing:
        return Failure(int(Code.UNAVAILABLE), "this peer is leaving")
    wanted_copies = read_copies(core, sender, request)
    _introduce(core, sender, request, now)
    return core.operations.start(TakeCopiesOperation(core, sender, wanted_copies), now)


def _is_proved(core: PeerCore, sender: PeerId, request: Replicate, version: Version) -> bool:
    """Whether the object to copy was written by the member it names: the sender itself, or a proof says so. A writer's
    signature is not checked here (100 us a put): a wrong one harms only that writer's versions."""
    if writer_of(sender) == version.writer or core.proofs.knows(request.digest, version):
        return True
    return core.proofs.accept(request.digest, version, request.proof)


def reply_of(operation: Operation) -> Message:
    """The answer to REPLICATE once its fetch has finished, to REPLICATE_MANY once all were pulled, to CLUSTER_RECORDS
    once what they forbid is gone, to PUSH once it was taken in, to LIST, to LOOKUP and to CHECK_COPY."""
    result = operation.result
    if isinstance(
        result, RecordsTaken | Pushed | Keys | Locations | CopyChecked | Proofs | ReplicatedMany
    ):
        return result
    if isinstance(result, ObjectEntry):
        return Replicated(result.version.clock, result.version.writer)
    fetched = isinstance(operation, FetchOperation)
    return Failure(int(Code.CAPACITY_EXCEEDED if fetched else code_of(result)), str(result))


class ProofsHereOperation(Operation):
    """Prove the objects that this peer holds. The result is `Proofs`. An object on the SSD alone is brought to memory,
    as the asking peer is about to read it; one that does not come is not denied."""

    def __init__(self, core: PeerCore, digests: Sequence[bytes]) -> None:
        super().__init__(core)
        self._digests = digests

    def start(self, now: float) -> None:
        if len(self._digests) > MAX_PROVED or any(len(d) != DIGEST_BYTES for d in self._digests):
            self.finish(ProtocolError("a question for proofs of too much, or of nothing"), now)
            return
        for digest in dict.fromkeys(self._digests):
            if (
                self.core.objects.find(digest, now) is None
                and self.core.cold.find(digest, now) is not None
            ):
                fetch = FetchOperation(self.core, digest, only_here=True)
                self.run(fetch, lambda _, at: self._settle(at), now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self.parts or self.done:
            return
        items, stays_cold = [], False
        for digest in self._digests:
            entry = self.core.objects.find(digest, now)
            proof = b"" if entry is None else self.core.proofs.of(entry, now)
            if entry is not None and not proof:
                self.core.proofs.lacks(digest, now)
            stays_cold |= entry is None and self.core.cold.find(digest, now) is not None
            items.append(proof)
        if stays_cold and not any(items):
            self.finish(Unavailable("what is on the SSD did not come to memory"), now)
        self.finish(Proofs(items), now)


def listed_here(core: PeerCore, request: ListKeys, now: float) -> Steps[Keys]:
    """One page of the keys held here."""
    limit, unix_ms = max(1, min(request.limit, MAX_LIST_LIMIT)), 1000 * core.unix(now)
    found: list[ObjectEntry | ColdEntry] = []
    after = request.after
    while True:
        if core.cold.prepare_page(request.namespace):
            count = min(limit - len(found), KEYS_PER_STEP)
            page = core.cold.merged_page(request.namespace, request.prefix, after, count, now)
            found += [
                entry
                for entry in page.entries
                if (entry.pin or not request.pinned) and not 0 < entry.expires_unix_ms <= unix_ms
            ]
            if page.complete_to is None or len(found) >= limit:
                return Keys([key_info(entry) for entry in found], page.complete_to is not None)
            after = page.complete_to
        yield


MAX_COMING_OF_ONE: Final = 8
"""Large pushes of one sender that may wait."""


class PushesComing:
    """The pushes that are being taken in: one step a tick, of one sender after the other, and of each the one that
    came first. So a sender of many pushes delays only itself."""

    def __init__(self) -> None:
        self._of: dict[Member, deque[TakePushOperation]] = {}
        """In the order of their turns; the first one's first push has its step next."""

    @property
    def next(self) -> TakePushOperation | None:
        """The push that goes on next."""
        return next((pushes[0] for pushes in self._of.values()), None)

    def add(self, push: TakePushOperation) -> None:
        """Raises `CapacityExceeded` for a sender of which too many wait."""
        pushes = self._of.setdefault(push.sender, deque())
        if len(pushes) >= MAX_COMING_OF_ONE:
            raise CapacityExceeded(f"{len(pushes)} pushes of yours are being taken in already")
        pushes.append(push)

    def turn(self, sender: Member) -> None:
        """A sender had its step: the others come before it does again."""
        self._of[sender] = self._of.pop(sender)

    def remove(self, push: TakePushOperation) -> None:
        """A push has ended."""
        pushes = self._of[push.sender]
        pushes.remove(push)
        if not pushes:
            del self._of[push.sender]


class TakePushOperation(Operation):
    """Takes a push in. The result is what to answer, or the error that says why not."""

    def __init__(self, core: PeerCore, sender: Member, intake: PushIntake) -> None:
        super().__init__(core)
        self.sender = sender
        self._intake = intake
        self._waits = False

    def start(self, now: float) -> None:
        coming = self.core.pushes_coming
        idle = coming.next is None
        try:
            coming.add(self)
        except CapacityExceeded as error:
            self.finish(error, now)
            return
        self._waits = True
        if idle:
            self.set_alarm(now)

    def wake(self, now: float) -> None:
        try:
            done = self._intake.step(now)
        except ProtocolError as error:
            self.finish(error, now)
            return
        if done:
            self.finish(pushed_reply(self._intake.behind, self._intake.rivals), now)
            return
        coming = self.core.pushes_coming
        coming.turn(self.sender)
        following = coming.next
        assert following is not None
        following.set_alarm(now)

    def finish(self, result: Any, now: float) -> None:
        if self.done:
            return
        super().finish(result, now)
        if not self._waits:
            return
        coming = self.core.pushes_coming
        first = coming.next is self
        coming.remove(self)
        if first and (following := coming.next) is not None:
            following.set_alarm(now)


def holding_of(location: Location) -> Holding:
    return Holding(location.member, location.incarnation, location.sequence, location.record.encode())


def pushed_reply(behind: list[int], rivals: Iterable[Location]) -> Pushed:
    return Pushed(behind, [holding_of(rival) for rival in rivals])


def rivals_of(reply: Pushed) -> list[Location]:
    """The other versions that a home named."""
    return [
        Location(rival.member, rival.incarnation, rival.sequence, record, hearsay=True)
        for rival in reply.rivals
        if (record := holding_record(rival.record)) is not None
    ]
