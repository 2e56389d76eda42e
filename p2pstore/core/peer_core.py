"""The peer's core: its memory, its knowledge of the cluster, and the operations under way.

Pure. A shell feeds it requests and events with the time, then carries out `take_effects()`. Local
operations that need one step are plain methods; longer ones are `Operation`s, started with `start` and
ended by an `OperationFinished` effect. Time is monotonic seconds; `unix(now)` is wall-clock time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from random import Random
from typing import Any, Final

from p2pstore.core.checkpoints import Checkpoints
from p2pstore.core.copies.checking import CheckOperation, Checks
from p2pstore.core.copies.cold_copies import ColdCopies
from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.copies.own_copies import is_kept_elsewhere
from p2pstore.core.copies.proofs import ProveOperation, VersionProofs
from p2pstore.core.copies.repair import Repair, RepairTiming
from p2pstore.core.copies.write_back import WriteBack
from p2pstore.core.core_effects import AskPeer, Effect, KnownCopy, PullFailure, PullOutcome, Reply
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.hot_objects import HotObjects
from p2pstore.core.gets.lookup import check_holding_record
from p2pstore.core.gets.prefetching import Prefetching
from p2pstore.core.gets.read_reports import UNSEEN_TRANSPORTS, ReadReports
from p2pstore.core.gets.serving import serve
from p2pstore.core.home_messages import message_of, rivals_of
from p2pstore.core.operation import Operation
from p2pstore.core.puts.comparing import Comparisons
from p2pstore.core.puts.describe import location_of, location_on_ssd
from p2pstore.core.puts.times_to_live import Expiries
from p2pstore.core.removals.floors import Floors
from p2pstore.core.taking_pushes import PushesComing
from p2pstore.core.timekeeping import Timekeeping
from p2pstore.errors import CapacityExceeded, NoSuchKey, ObjectTooLarge
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.known_locations import Word
from p2pstore.gossip.machine import Effect as GossipEffect
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import (
    LocationRecord,
    Member,
    PeerId,
    Signer,
    Verifier,
    decode_location,
    member_of,
    writer_of,
    writer_of_member,
)
from p2pstore.local.local_messages import HolderFailure
from p2pstore.memory.entries import Reservation, SmallObjectsLent, Written
from p2pstore.memory.loans import Loan
from p2pstore.memory.segment import SOFT_PIN_SECONDS, ObjectEntry, Segment
from p2pstore.memory.segment_layout import MAX_TRAILER_BYTES, Pin
from p2pstore.objects import (
    CHUNK_BYTES,
    ZERO_VERSION,
    HybridClock,
    Version,
    chunk_count,
    key_hasher,
    namespace_digest,
)
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.data_messages import MAX_SMALL_BULK_BYTES, DataKind, Objects, ObjectStatus
from p2pstore.transfer.peer_messages import CheckCopy, Locations, Pushed
from p2pstore.wire import Code, Message

DOUBT_SECONDS: Final = 10.0
"""A holder is told at most once in this time that its copy of an object seems spoilt, and may take so long to look."""
MAX_DOUBTED: Final = 1024
AVOID_SECONDS: Final = 3.0
LONGEST_AVOID_SECONDS: Final = 60.0
"""For a holder that is too slow again and again: twice as long each time, up to this."""
"""How long a peer whose connection failed is asked last."""
EXPIRE_INTERVAL_SECONDS: Final = 1.0
TO_HOMES: Final = -1
"""In place of an operation's number: pushes to homes, which gossip asks for."""
SUM_BYTES: Final = 8
MAX_HASHERS: Final = 1_000
USUAL_TRAILER_BYTES: Final = 2_048
"""Of a trailer without its chunk sums."""
WORK_PER_STEP: Final = 12_000
"""Keys times members: a hash and a look into a table each, of 0.25 us."""
WOKEN_PER_TICK: Final = 64
"""Operations whose time has come: those of a large batch end together."""
LOOKED_UP_PER_STEP: Final = 400
"""Keys, whatever the number of members: 5 us each."""


class PeerCore:
    """What one peer decides. See the module's docstring for how it is driven."""

    def __init__(
        self,
        *,
        signer: Signer,
        verifier: Verifier,
        gossip: Gossip,
        segment: Segment,
        clock: HybridClock,
        rng: Random,
        unix_offset_seconds: float,
        repair: RepairTiming = RepairTiming(),  # noqa: B008 - it cannot change
    ) -> None:
        self.signer = signer
        self.verifier = verifier
        self.peer_id: PeerId = signer.peer_id
        self.member: Member = member_of(signer.peer_id)
        self.gossip = gossip
        self.segment = segment
        self.clock = clock
        self.rng = rng
        self.unix_offset_seconds = unix_offset_seconds
        self.counters: Counter[str] = Counter()
        self.closing = False
        self._effects: list[Effect | GossipEffect] = []
        self._operations: dict[int, Operation] = {}
        self._alarms: list[tuple[float, int]] = []
        self._fetches: dict[bytes, FetchOperation] = {}
        self._avoid_until: dict[Member, float] = {}
        self._slow: dict[Member, tuple[float, float]] = {}
        """Holders that were too slow: until when each is avoided, and for how long that is."""
        self.next_operation = 1
        self._next_expire = 0.0
        self._namespaces: dict[str, bytes] = {}
        self._hashers: dict[str, Callable[[str], bytes]] = {}
        self._awaited: dict[bytes, set[int]] = {}
        self._late: dict[tuple[int, int], PeerId] = {}
        """Questions of operations that have ended. Each has an outcome, so none stays."""
        self.pushes_coming = PushesComing()
        """Large ones, which are taken in one after the other."""
        self.proofs = VersionProofs(self)
        self.timekeeping = Timekeeping(self)
        self.floors = Floors(self)
        self.cold = ColdCopies(self)
        self.checks = Checks(self)
        self.expiries = Expiries(self)
        self.comparisons = Comparisons(self)
        self._doubted: dict[tuple[Member, bytes], float] = {}
        """Copies of others that a reader found spoilt: when they may be told so again."""
        self.write_back = WriteBack(self)
        self.prefetching = Prefetching(self)
        self.hot_objects = HotObjects()
        self.repair = Repair(self, repair)
        self.read_reports = ReadReports(self)
        self.checkpoints = Checkpoints(self)
        segment.ask_who_keeps(self._is_kept_elsewhere)
        gossip.locations.watch(segment.digests(), self._awaited.keys())

    # --- driving -----------------------------------------------------------------------------

    def unix(self, now: float) -> float:
        """Wall-clock time at the monotonic time `now`."""
        return now + self.unix_offset_seconds

    def believed_unix(self, now: float) -> float:
        """Wall-clock time by which stamps of others are judged: see `Gossip.believed_unix`."""
        return self.gossip.time.believed_unix(now)

    def is_in_time(self, clock: int, now: float) -> bool:
        """Whether a stamp of somebody else's is at most 10 s in the future."""
        accepts = self.clock.accepts
        return accepts(clock, self.unix(now)) or accepts(clock, self.believed_unix(now))

    def emit(self, effect: Effect | GossipEffect) -> None:
        """Queue an effect for the shell."""
        self._effects.append(effect)

    def take_effects(self) -> list[Effect | GossipEffect]:
        """Everything the shell has to do since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def start(self, operation: Operation, now: float) -> Operation:
        """Begin an operation; it may be done when this returns."""
        operation.number = self.next_operation
        self.next_operation += 1
        self._operations[operation.number] = operation
        operation.start(now)
        return operation

    def retire(self, operation: Operation) -> None:
        """Forget a finished operation (called by the operation itself)."""
        self._operations.pop(operation.number, None)
        if (
            isinstance(operation, FetchOperation)
            and self._fetches.get(operation.digest) is operation
        ):
            del self._fetches[operation.digest]

    def await_keys(self, operation: Operation, digests: Sequence[bytes]) -> None:
        """Call the operation's `heard_of` whenever there is news of one of these keys."""
        for digest in digests:
            self._awaited.setdefault(digest, set()).add(operation.number)

    def await_no_more(self, operation: Operation, digests: Sequence[bytes]) -> None:
        """Undo `await_keys`."""
        for digest in digests:
            numbers = self._awaited.get(digest, set())
            numbers.discard(operation.number)
            if not numbers:
                self._awaited.pop(digest, None)

    def tell_waiting(self, digests: Sequence[bytes], now: float) -> None:
        """There is news of these keys."""
        if not self._awaited:
            return
        for digest in digests:
            for number in sorted(self._awaited.get(digest, ())):
                operation = self._operations.get(number)
                if operation is not None:
                    operation.heard_of(digest, now)

    def cancel(self, operation: Operation, now: float) -> None:
        """Whoever waited for the operation does not any more. A shared fetch goes on for the others."""
        if isinstance(operation, FetchOperation):
            operation.shared_by -= 1
            if operation.shared_by > 0:
                return
        operation.cancel(now)

    def abandon(self, operation: int, now: float) -> None:
        """The shell could not carry out an effect of this operation, by an error of its own."""
        machine = self._operations.get(operation)
        if machine is not None:
            machine.cancel(now)

    def answered(self, operation: int, tag: int, reply: Reply, now: float) -> None:
        """The outcome of an `AskPeer`: its reply, a `Failure`, or None when nothing came in time."""
        if operation == TO_HOMES:
            self._push_answered(tag, reply, now)
            return
        machine = self._operations.get(operation)
        late = self._late.pop((operation, tag), None)
        if machine is not None:
            machine.answered(tag, reply, now)
        elif late is not None and reply is None:
            self.peer_failed(late, now)

    def expect_late(self, operation: Operation, tag: int, peer_id: PeerId) -> None:
        """The operation ends before this question of it was answered. Whether it ever is says something of that
        peer."""
        self._late[operation.number, tag] = peer_id

    def _push_answered(self, token: int, reply: Reply, now: float) -> None:
        if isinstance(reply, Pushed):
            self.gossip.push_answered(token, reply.behind, rivals_of(reply), now)
            return
        home = self.gossip.partitions.pushes.home_of(token)
        self.gossip.push_answered(token, None, (), now)
        if reply is None and home is not None:
            self.peer_failed(home, now)

    def pulled(self, operation: int, outcome: PullOutcome, now: float) -> None:
        """The outcome of a `PullObject`."""
        machine = self._operations.get(operation)
        if isinstance(machine, FetchOperation) and outcome.transport in UNSEEN_TRANSPORTS:
            self.read_reports.note(outcome.source, machine.digest, 1, now)
        if machine is not None:
            machine.pulled(outcome, now)

    def tick(self, now: float) -> None:
        """Do what is due. The shell calls it after everything that has arrived was fed in."""
        for effect in self.gossip.tick(now):
            self._effects.append(effect)
        self.timekeeping.tick(now)
        self.proofs.tick(now)
        self.flush_pushes(now)
        self.floors.tick(now)
        self.write_back.tick(now)
        self.repair.tick(now)
        self.read_reports.tick(now)
        self.prefetching.tick(now)
        self.checkpoints.tick(now)
        if now >= self._next_expire:
            self.segment.expire(self.unix(now))
            more = self.segment.expires_on(self.unix(now))
            self._next_expire = now if more else now + EXPIRE_INTERVAL_SECONDS
            self.announce_withdrawn(now)
            self.cold.expire(now)
            self._avoid_until = {m: until for m, until in self._avoid_until.items() if until > now}
            forgotten = now - LONGEST_AVOID_SECONDS
            self._slow = {m: slow for m, slow in self._slow.items() if slow[0] > forgotten}
        due: dict[int, None] = {}
        # An operation that wants to go on at once does so with the next tick, and so do those that are one too many.
        while self._next_alarm() <= now and len(due) < WOKEN_PER_TICK:
            due[heapq.heappop(self._alarms)[1]] = None
        for number in due:
            operation = self._operations.get(number)
            if operation is not None:
                operation.wake(now)

    def next_tick(self, now: float) -> float:
        """When `tick`, or `gossip_arrived`, has something to do next."""
        if self.gossip.directory.any_touched:
            return now
        return min(
            self.gossip.next_tick(now),
            self._next_expire,
            self._next_alarm(),
            self.floors.next_tick(now),
            self.write_back.next_tick(),
            self.repair.next_tick(),
            self.read_reports.next_tick(),
            self.prefetching.next_tick(),
            self.checkpoints.next_tick(),
            self.timekeeping.next_tick(),
            self.proofs.next_tick(),
        )

    def set_alarm(self, operation: Operation) -> None:
        """Wake the operation at its `wake_at` (called by the operation itself)."""
        heapq.heappush(self._alarms, (operation.wake_at, operation.number))

    def _next_alarm(self) -> float:
        """When the next operation wants to be woken. Alarms that no longer hold are dropped."""
        while self._alarms:
            wake_at, number = self._alarms[0]
            operation = self._operations.get(number)
            if operation is not None and operation.wake_at == wake_at:
                return wake_at
            heapq.heappop(self._alarms)
        return float("inf")

    def flush_pushes(self, now: float) -> None:
        """Send this peer's fresh locations to the home peers of their keys, when a batch is due."""
        for push in self.gossip.pushes(now):
            self.emit(
                AskPeer(
                    TO_HOMES,
                    push.token,
                    push.peer_id,
                    DataKind.PUSH,
                    message_of(push),
                    push.timeout_seconds,
                )
            )

    @property
    def incarnation(self) -> int:
        """Of this peer's log. It may rise while running: see `Gossip.incarnation`."""
        return self.gossip.incarnation

    @property
    def operations_under_way(self) -> int:
        return len(self._operations)

    def serve(self, sender: PeerId, kind: int, request: Message, now: float) -> Message | Operation:
        """Answer another peer's data request: see `p2pstore.core.gets.serving`."""
        return serve(self, sender, kind, request, now)

    # --- what is known -----------------------------------------------------------------------

    @property
    def keys_per_step(self) -> int:
        """How many keys to look up, with their home peers, at a time: what takes 2 to 4 ms."""
        return max(
            1, min(LOOKED_UP_PER_STEP, WORK_PER_STEP // (8 + len(self.gossip.membership.live())))
        )

    def live_peers(self) -> list[PeerId]:
        """The other members that are not believed dead."""
        return [state.peer_id for state in self.gossip.membership.others()]

    def ranked_peers(self, digest: bytes) -> list[PeerId]:
        """The other live members in rendezvous order for a key."""
        return self.gossip.rank(digest)

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, this one left out."""
        return [peer_id for peer_id in self.gossip.homes(digest) if peer_id != self.peer_id]

    def name_of(self, peer_id: PeerId) -> str:
        """A peer's name, or the end of its id where the name is not known."""
        return self.gossip.membership.name_of(peer_id)

    def known_copies(
        self,
        digest: bytes,
        now: float,
        namespace: bytes | None = None,
        *,
        hearsay: bool = False,
    ) -> list[KnownCopy]:
        """All copies this peer knows of, newest version first, then reachable ones first,
        and those whose connection just failed last. With `hearsay` also those of which only a home spoke: to look
        there, not to judge by them what is to be kept.

        Versions that a floor forbids (the floor of the namespace, too, when its digest is given) are left
        out, those whose holder may have missed a floor, and those from over 10 s in the future: this peer
        could write none above them that others would take. And those of which nothing says that they were written:
        see `proofs`.
        """
        return self.sorted_copies(digest, now, namespace, hearsay=hearsay)[0]

    def sorted_copies(
        self,
        digest: bytes,
        now: float,
        namespace: bytes | None = None,
        *,
        hearsay: bool = False,
    ) -> tuple[list[KnownCopy], list[KnownCopy]]:
        """`known_copies`, and those that their holders would have to prove. What contradicts a writer is in neither."""
        copies: list[KnownCopy] = []
        others: list[KnownCopy] = []
        vouched: set[Version] = set()
        """Versions whose writers say themselves that they have this root."""
        mine = self.own_location(digest, now)
        if mine is not None:
            copies.append(KnownCopy(self.member, self.peer_id, mine, reachable=True, local=True))
            vouched.add(mine.version)
        for holding in self.gossip.holders(digest, now, hearsay=hearsay):
            version, member = holding.record.version, holding.member
            if self.gossip.cluster_records.floors.forbids(digest, namespace, version):
                continue
            if self.gossip.doubts(member, version, now):
                continue
            if not self.is_in_time(version.clock, now):
                continue
            state = self.gossip.membership.resolve(member)
            if state is None:
                continue
            reachable = state.status in (Status.ALIVE, Status.SUSPECT) and not holding.hidden
            proved = not holding.hearsay or self.proofs.knows(digest, version)
            copy = KnownCopy(
                member,
                state.peer_id,
                holding.record,
                reachable,
                proved=proved,
                hearsay=holding.hearsay,
            )
            if version.writer != writer_of_member(member):
                others.append(copy)
                continue
            copies.append(copy)
            if proved:
                vouched.add(version)
        doubtful = self._proved_among(digest, others, vouched, copies) if others else []
        said = {copy.member for copy in copies if not copy.hearsay}
        copies = [copy for copy in copies if not copy.hearsay or copy.member not in said]
        copies.sort(
            key=lambda copy: (
                -copy.record.version.clock,
                -copy.record.version.writer,
                not copy.local,
                not copy.reachable,
                self.is_avoided(copy.member, now),
            )
        )
        return copies, doubtful

    def _proved_among(
        self,
        digest: bytes,
        others: Sequence[KnownCopy],
        vouched: set[Version],
        copies: list[KnownCopy],
    ) -> list[KnownCopy]:
        """Add those copies whose holders did not write them and that are proved; the rest is returned, but for what
        contradicts a writer."""
        doubtful = []
        stamps = {version[:2] for version in vouched}
        for copy in others:
            version = copy.record.version
            if version in vouched or self.proofs.knows(digest, version):
                copies.append(replace(copy, proved=True))
            elif version[:2] in stamps:
                self.proofs.contradicts(copy)
            else:
                doubtful.append(copy)
        return doubtful

    def is_own(self, version: Version) -> bool:
        """Whether this peer wrote a version of what it holds, unless a proof beside it says otherwise."""
        return version.writer == writer_of(self.peer_id)

    def learn_locations(
        self, home: PeerId, digests: Sequence[bytes], reply: Locations, now: float
    ) -> None:
        """Take in a home peer's answer to a LOOKUP of `digests`."""
        for digest, holdings in zip(digests, reply.items, strict=False):
            for holding in holdings[:64]:
                if holding.member != self.member and check_holding_record(holding.record, digest):
                    self.gossip.heard_of(holding.record, now)
                    position = (holding.incarnation, holding.sequence)
                    word = Word.OWN if holding.member == member_of(home) else Word.HOME
                    stamp = decode_location(holding.record).version.clock
                    if word is Word.OWN or self.is_in_time(stamp, now):
                        self.gossip.locations.heard(
                            holding.member, position, holding.record, now, word=word
                        )

    def is_avoided(self, member: Member, now: float) -> bool:
        """Whether a connection to the member failed a moment ago."""
        return self._avoid_until.get(member, 0.0) > now

    def peer_failed(self, peer_id: PeerId, now: float) -> None:
        """A connection to the peer failed or it did not answer: avoid it for a while, and probe it."""
        self._avoid_until[member_of(peer_id)] = now + AVOID_SECONDS
        for effect in self.gossip.connection_lost(peer_id, now):
            self._effects.append(effect)

    def holder_failed(self, digest: bytes, failure: PullFailure, now: float) -> None:
        """A holder did not deliver. What it said of its log hides the stale location until we caught up."""
        self.counters["holder_failures"] += 1
        self.counters["holders_too_slow"] += failure.code == Code.DEADLINE_EXCEEDED
        state = self.gossip.membership.resolve(failure.member)
        if failure.code == Code.NO_SUCH_KEY:
            self.gossip.locations.mark_stale(
                failure.member, digest, failure.incarnation, failure.sequence
            )
        elif failure.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) and state is not None:
            self.peer_failed(state.peer_id, now)
            if failure.code == Code.DEADLINE_EXCEEDED:
                self._avoid_slow(failure.member, now)
        elif failure.code in (Code.STALE, Code.MALFORMED):
            self._doubt(digest, failure.member, now)

    def _avoid_slow(self, member: Member, now: float) -> None:
        """A holder was too slow. Reads that were made side by side count once."""
        until, seconds = self._slow.get(member, (0.0, 0.0))
        if until <= now:
            seconds = min(max(AVOID_SECONDS, 2 * seconds), LONGEST_AVOID_SECONDS)
            until = now + seconds
            self._slow[member] = until, seconds
        self._avoid_until[member] = max(self._avoid_until[member], until)

    def _doubt(self, digest: bytes, member: Member, now: float) -> None:
        """What came from a holder did not give its checksums: have the holder compare its bytes."""
        state = self.gossip.membership.resolve(member)
        if member == self.member:
            self.start(CheckOperation(self, digest, again=True), now)
            return
        if state is None or self._doubted.get((member, digest), 0.0) > now:
            return
        if len(self._doubted) >= MAX_DOUBTED:
            self._doubted = {each: at for each, at in self._doubted.items() if at > now}
        if len(self._doubted) < MAX_DOUBTED:
            self._doubted[member, digest] = now + DOUBT_SECONDS
            request = CheckCopy(digest, again=True)
            kind, seconds = DataKind.CHECK_COPY, DOUBT_SECONDS
            self.emit(AskPeer(0, 0, state.peer_id, kind, request, seconds))

    def client_reported(self, failure: HolderFailure, now: float) -> None:
        """A local client could not read from a holder that this peer named."""
        self.holder_failed(
            failure.digest,
            PullFailure(failure.member, failure.code, "", failure.incarnation, failure.sequence),
            now,
        )

    def holder_silent(self, digest: bytes, copy: KnownCopy, reply: Reply, now: float) -> None:
        """A holder that was asked for a slot did not give it."""
        code, incarnation, sequence = int(Code.UNAVAILABLE), 0, 0
        if (
            isinstance(reply, Objects)
            and reply.items
            and reply.items[0].status == ObjectStatus.NOT_FOUND
        ):
            code, incarnation, sequence = (
                int(Code.NO_SUCH_KEY),
                reply.items[0].incarnation,
                reply.items[0].sequence,
            )
        self.holder_failed(digest, PullFailure(copy.member, code, "", incarnation, sequence), now)

    # --- versions and floors -----------------------------------------------------------------

    def new_version(self, root: int, now: float) -> Version:
        """A version above everything this peer has seen. Raises `Unavailable` when others would refuse it."""
        self.timekeeping.check(now)
        return Version(self.clock.tick(self.unix(now)), writer_of(self.peer_id), root)

    def version_above(self, other: Version, now: float) -> Version:
        """A version of this peer's that covers `other`. Raises `Unavailable` when others would refuse it."""
        self.clock.latest = max(self.clock.latest, other.clock)
        return self.new_version(0, now)

    def renew_version(self, entry: ObjectEntry, clock: int, now: float) -> None:
        """Stamp an object anew whose stamp nobody takes, and announce it so: see `Timekeeping`. It goes if that is
        forbidden, or if others have a newer version by now."""
        self._restamp(entry, Version(clock, entry.version.writer, entry.version.root), now)

    def adopt(self, entry: ObjectEntry, now: float) -> None:
        """Stand in as the writer of a copy that nobody proves any more: with its old stamp, so that what forbids it, or
        is newer, still is."""
        self.counters["copies_adopted"] += 1
        version = entry.version
        self._restamp(entry, Version(version.clock, writer_of(self.peer_id), version.root), now)
        self.proofs.wrote([entry.digest])

    def _restamp(self, entry: ObjectEntry, version: Version, now: float) -> None:
        old = entry.version
        self.gossip.release(entry.digest, old, now)
        self.segment.renew_version(entry, version)
        if self.cold.store is not None:
            self.cold.store.discard(entry.digest, old)
        if self.forbids(entry):
            self.withdraw(entry, now)
            return
        self.announce(entry, now)
        self.gossip.directory.touch(entry.digest)

    def gossip_arrived(self, now: float) -> None:
        """Act on what gossip brought since the last call: floors, and newer versions of what is held. Of
        many keys some are left for the next call, which `next_tick` asks for.

        Two concurrent first puts both succeed; the lower version goes when the higher one is heard of from its
        holder. What others say of a holder gives up nothing.
        """
        touched = self.gossip.directory.take_touched(self.keys_per_step)
        self.tell_waiting(touched, now)
        for digest in sorted(self._of_other_versions(touched, now)):
            entry = self.segment.find(digest, self.unix(now))
            copies, doubtful = self.sorted_copies(digest, now)
            if entry is not None or self.cold.find(digest, now) is not None:
                self._prove_newer(copies, doubtful, now)
            newest = next((copy for copy in copies if copy.proved and not copy.hearsay), None)
            if newest is None or not newest.reachable or newest.local:
                continue
            if entry is not None:
                self.withdraw(entry, now)
            else:  # as new, or newer, than what the SSD may have
                self.cold.discard(digest, before(newest.record.version), now)
        self.floors.arrived(now)

    def _of_other_versions(self, digests: Sequence[bytes], now: float) -> list[bytes]:
        """Those but for what is here, and known in the very version that this peer has: as nearly all are."""
        here: dict[bytes, Version] = {}
        for digest in digests:
            entry = self.find(digest, now)
            if entry is not None:
                here[digest] = entry.version
        if not here:
            return list(digests)
        same = here.keys() - self.gossip.locations.of_other_versions(here)
        return [digest for digest in digests if digest not in same]

    def _prove_newer(
        self, copies: Sequence[KnownCopy], doubtful: Sequence[KnownCopy], now: float
    ) -> None:
        """Ask for proofs of what is said to be newer than what is known for sure: what is here goes only then."""
        sure = max((copy.record.version for copy in copies if copy.proved), default=ZERO_VERSION)
        newer = [
            copy
            for copy in (*copies, *doubtful)
            if not (copy.proved and copy in copies)
            and copy.reachable
            and copy.record.version[:2] > sure[:2]
        ]
        may_be_asked = [copy for copy in newer if self.proofs.may_ask(copy, now)]
        if may_be_asked and self.proofs.begin_asking(newer[0].record.digest):
            self.start(ProveOperation(self, may_be_asked), now)
        elif newer and not may_be_asked:
            self.proofs.look_later(newer[0].record.digest, now)

    def withdraw(self, entry: ObjectEntry, now: float) -> None:
        """This peer no longer holds the object: it was removed, replaced, or is not to be trusted."""
        self.gossip.release(entry.digest, entry.version, now)  # the location first, then the bytes
        self.segment.remove(entry.digest)
        self.cold.discard(entry.digest, entry.version, now)
        self.counters["objects_removed"] += 1

    def forbids(self, entry: ObjectEntry) -> bool:
        """Whether a floor forbids an object that is here (and will be withdrawn in a moment)."""
        namespace = self.namespace_digest(entry.namespace)
        return self.gossip.cluster_records.floors.forbids(entry.digest, namespace, entry.version)

    def find(self, digest: bytes, now: float) -> ObjectEntry | None:
        """The object here that may be served: while a sweep is under way, some may not."""
        entry = self.segment.find(digest, self.unix(now))
        if entry is not None and self.floors.sweep.forbids(entry):
            return None
        return entry

    def lend(self, digest: bytes, now: float, *, decides: bool) -> tuple[Loan, ObjectEntry] | None:
        """`Segment.lend` of an object that may be served, for any thread. None when this takes more than a look, for
        a thread that is not the one that `decides`."""
        if self.floors.sweep.pending and not (decides and self.find(digest, now)):
            return None
        return self.segment.lend(digest, self.unix(now))

    def lend_small(
        self,
        digests: bytes,
        most_bytes: int,
        now: float,
        declines: Callable[[ObjectEntry], bool] | None = None,
    ) -> SmallObjectsLent | None:
        """`Segment.lend_small` of what GET_SMALL answers, for any thread. None when this takes more than a look."""
        if self.floors.sweep.pending:
            return None
        most_bytes = min(most_bytes, CHUNK_BYTES)
        return self.segment.lend_small(
            digests, most_bytes, MAX_SMALL_BULK_BYTES, self.unix(now), declines
        )

    def versions_heard_of(self, digest: bytes, namespace: bytes, now: float) -> list[Version]:
        """Versions that members say to hold, believed or not, and that no floor forbids."""
        forbids = self.gossip.cluster_records.floors.forbids
        versions = [each.record.version for each in self.gossip.holders(digest, now, hearsay=True)]
        return [
            version
            for version in versions
            if self.is_in_time(version.clock, now) and not forbids(digest, namespace, version)
        ]

    def held_back(self, digest: bytes) -> Version | None:
        """The version of an object of an earlier life that nobody is shown yet, as it is not known to be good."""
        entry = self.segment.find_returned(digest)
        cold = None if self.cold.store is None else self.cold.store.find(digest)
        versions = [each.version for each in (entry, cold) if each is not None]
        return max(versions, default=None)

    def own_location(self, digest: bytes, now: float) -> LocationRecord | None:
        """What this peer says of an object that it serves, from memory or from its SSD."""
        entry = self.find(digest, now)
        if entry is not None:
            return location_of(entry)
        cold = self.cold.find(digest, now)
        return None if cold is None else location_on_ssd(cold)

    def drop_spoilt(self, entry: ObjectEntry, now: float) -> None:
        """Give up an object in memory whose bytes no longer give its root. Other holders serve it, or the SSD."""
        self.counters["objects_spoilt"] += 1
        if self.segment.find(entry.digest, self.unix(now)) is entry:
            self.segment.remove(entry.digest)
            self.cold.left_memory([entry], now)

    def namespace_digest(self, namespace: str) -> bytes:
        digest = self._namespaces.get(namespace)
        if digest is None:
            if len(self._namespaces) > 10_000:
                self._namespaces.clear()
            digest = self._namespaces[namespace] = namespace_digest(namespace)
        return digest

    def digests_of(self, namespace: str, keys: Sequence[str]) -> list[bytes]:
        """The digests of keys. Raises `ValueError` for what is no key."""
        hasher = self._hashers.get(namespace)
        if hasher is None:
            if len(self._hashers) > MAX_HASHERS:
                self._hashers.clear()
            hasher = self._hashers[namespace] = key_hasher(namespace)
        return list(map(hasher, keys))

    def namespaces(self) -> Iterable[tuple[str, bytes]]:
        """Namespaces that were met here lately, with their digests."""
        return self._namespaces.items()

    def _is_kept_elsewhere(self, entry: ObjectEntry, unix: float) -> bool:
        return is_kept_elsewhere(self, entry, unix - self.unix_offset_seconds)

    # --- memory ------------------------------------------------------------------------------

    def reserve(
        self,
        length: int,
        trailer_length: int,
        *,
        holder: Hashable,
        namespace: str,
        now: float,
        alike: int = 1,
    ) -> Steps[Reservation]:
        """`Segment.reserve_in_steps`, which announces with each step what went for it."""
        steps = self.segment.reserve_in_steps(
            length,
            trailer_length,
            holder=holder,
            now=self.unix(now),
            namespace=namespace,
            alike=alike,
        )
        with closing(steps):
            try:
                while True:
                    next(steps)
                    self.announce_withdrawn(now)
                    yield
            except StopIteration as end:
                reservation: Reservation = end.value
                return reservation
            finally:
                self.announce_withdrawn(now)

    def make_room(self, length: int, namespace: str, now: float) -> Steps[None]:
        """Evict what has to go for a value of about that length, if so much may go, and there is no room for it yet.
        It is kept for nobody."""
        trailer_length = min(
            MAX_TRAILER_BYTES, SUM_BYTES * chunk_count(length) + USUAL_TRAILER_BYTES
        )
        if self.segment.has_room(length, trailer_length, namespace=namespace):
            return
        holder = object()
        with suppress(CapacityExceeded, ObjectTooLarge):
            room = yield from self.reserve(
                length, trailer_length, holder=holder, namespace=namespace, now=now
            )
            self.segment.abort(room.number, holder=holder)

    def publish(self, written: Written, *, holder: Hashable, soft: bool, now: float) -> ObjectEntry:
        """Make a filled reservation an object, and announce it.

        Raises `NoSuchKey` when a floor forbids the version (the key was removed meanwhile).
        """
        digest, version, trailer = written.digest, written.version, written.trailer
        namespace = self.namespace_digest(trailer.namespace)
        if self.gossip.cluster_records.floors.forbids(digest, namespace, version):
            raise NoSuchKey("the object was removed, or replaced by a newer version, meanwhile")
        entry = self.segment.commit(written, holder=holder, soft=soft, now=self.unix(now))
        self.cold.came_to_memory(entry)
        self.announce_withdrawn(now)
        self.announce(entry, now)
        if self.is_own(version):
            self.proofs.wrote([digest])
        elif not trailer.proof:
            self.proofs.lacks(digest, now)
        self.counters["objects_published"] += 1
        return entry

    def announce_withdrawn(self, now: float) -> None:
        """Say where that is now which the segment evicted, expired or replaced."""
        self.cold.left_memory(self.segment.take_withdrawn(), now)
        self.write_back.memory_taken(now)

    def announce(self, entry: ObjectEntry, now: float) -> None:
        """Tell the others what this peer now says of an object it holds."""
        self.gossip.hold(location_of(entry), now)
        self.tell_waiting([entry.digest], now)

    def strengthen(self, entry: ObjectEntry, pin: int, replicas: int, now: float) -> None:
        """A second put of the same bytes may pin more firmly and ask for more copies, never less."""
        if pin > entry.pin or replicas > entry.replicas or entry.soft:
            self.segment.strengthen(
                entry,
                pin=Pin(max(pin, entry.pin)),
                replicas=max(replicas, entry.replicas),
                now=self.unix(now),
            )
            self.announce(entry, now)

    def set_pin(
        self, entry: ObjectEntry, pin: Pin, soft_seconds: float, now: float, *, firm: bool = False
    ) -> None:
        """Pin or unpin a copy that is here. With `firm`, one that is pinned is no soft copy any more: those are kept
        for speed alone, pinned or not."""
        if firm and pin is not Pin.NONE and entry.soft:
            self.segment.strengthen(entry, pin=pin, replicas=entry.replicas, now=self.unix(now))
        ends = self.unix(now) + (soft_seconds or SOFT_PIN_SECONDS)
        self.segment.set_pin(entry, pin, ends if pin is Pin.SOFT else 0.0)
        self.announce(entry, now)

    def set_expiry(self, digest: bytes, version: Version, expires_unix_ms: int, now: float) -> bool:
        """Change when the copies of that version that are here end, in memory and on the SSD. Whether there is one."""
        entry = self.find(digest, now)
        here = entry is not None and entry.version[:2] == version[:2]
        if entry is not None and here:
            self.segment.set_expiry(entry, expires_unix_ms)
            version = entry.version
        elif (cold := self.cold.find(digest, now)) is not None and cold.version[:2] == version[:2]:
            version = cold.version
        return self.cold.set_expiry(digest, version, expires_unix_ms, now) or here

    def fetch(self, digest: bytes, now: float, **options: Any) -> FetchOperation:
        """Bring an absent object here; callers that want the same one share one fetch.

        The copy is a firm one as soon as one of them wants it so.
        """
        running = self._fetches.get(digest)
        if running is not None:
            running.shared_by += 1
            running.soft &= options.get("soft", True)
            running.only_here &= options.get("only_here", False)
            return running
        operation = FetchOperation(self, digest, **options)
        self._fetches[digest] = operation
        self.start(operation, now)
        return operation

    @property
    def fetching(self) -> int:
        """How many objects are on their way to this peer's memory."""
        return len(self._fetches)

    def is_fetching(self, digest: bytes) -> bool:
        """Whether the object is on its way to this peer's memory."""
        return digest in self._fetches

    def copy_destination(self, operation: int, now: float) -> CopyDestination:
        """Where the bytes of a `PullObject` go. The shell calls `commit` or `abort` at its end."""
        machine = self._operations.get(operation)
        if not isinstance(machine, FetchOperation):
            raise NoSuchKey("nobody waits for this object any more")
        return CopyDestination(self, machine, now)


def before(version: Version) -> Version:
    """The highest version that is older."""
    if version.writer:
        return Version(version.clock, version.writer - 1, 0xFFFF_FFFF_FFFF_FFFF)
    return Version(max(0, version.clock - 1), 0xFFFF, 0xFFFF_FFFF_FFFF_FFFF)
