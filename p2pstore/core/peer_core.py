"""The peer's core: its memory, its knowledge of the cluster, and the operations under way.

Pure. A shell feeds it requests and events with the time, then carries out `take_effects()`. Local
operations that need one step are plain methods; longer ones are `Operation`s, started with `start` and
ended by an `OperationFinished` effect. Time is monotonic seconds; `unix(now)` is wall-clock time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from p2pstore.core.checkpoints import CheckpointNames, TrustedPublishers
from p2pstore.core.copies.cold_copies import ColdCopies
from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.copies.earlier_life import EarlierLife
from p2pstore.core.copies.hand_over import Offers
from p2pstore.core.copies.own_copies import Checks
from p2pstore.core.copies.proofs import VersionProofs
from p2pstore.core.copies.repair import Repair, RepairTiming
from p2pstore.core.copies.write_back import WriteBack
from p2pstore.core.floors import FloorBudget, Floors
from p2pstore.core.gets.fetch_operation import FetchOperation, Prefetching
from p2pstore.core.gets.hot_objects import UNSEEN_TRANSPORTS, HotObjects, ReadReports
from p2pstore.core.known_copies import Holders, KnownCopies
from p2pstore.core.operation import (
    AskPeer,
    Effect,
    LateBooks,
    Notes,
    Operation,
    PullOutcome,
    Reply,
    Then,
    Timed,
)
from p2pstore.core.own_objects import OwnObjects
from p2pstore.core.participations import Participations
from p2pstore.core.puts.deciding import Comparisons
from p2pstore.core.puts.lifetimes import Expiries
from p2pstore.core.serving import PushesComing, rivals_of, serve
from p2pstore.core.timekeeping import Timekeeping
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.gossip_messages import Effect as GossipEffect
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import Member, PeerId, member_of, writer_of
from p2pstore.home_messages import Pushed
from p2pstore.memory.segment import Segment
from p2pstore.objects import HybridClock, Version, keys_hasher, namespace_digest
from p2pstore.transfer.data_messages import DataKind
from p2pstore.wire import Message, Signer, Verifier

EXPIRE_INTERVAL_SECONDS: Final = 1.0
TO_HOMES: Final = -1
"""In place of an operation's number: pushes to homes, which gossip asks for."""
MAX_HASHERS: Final = 1_000
WORK_PER_STEP: Final = 12_000
"""Keys times members: a hash and a look into a table each, of 0.25 us."""
LOOKED_UP_PER_STEP: Final = 400
"""Keys, whatever the number of members: 5 us each."""

_TIMED: Final = (
    *("timekeeping", "proofs", "floors", "earlier_life", "write_back"),
    *("repair", "offers", "read_reports", "prefetching", "participations"),
)
"""Parts that act by themselves, in the order of their ticks."""


class PeerCore:
    """All decisions of one peer. The module's docstring tells how it is driven."""

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
        self.writer = writer_of(signer.peer_id)
        self.gossip = gossip
        self.segment = segment
        self.clock = clock
        self.rng = rng
        self.unix_offset_seconds = unix_offset_seconds
        self.counters: Counter[str] = Counter()
        self.notes = Notes()
        self.books = LateBooks()
        self.closing = False
        self._effects: list[Effect | GossipEffect] = []
        self.operations = Operations(self)
        self.holders = Holders(self)
        self.copies = KnownCopies(self)
        self.objects = OwnObjects(self)
        self._next_expire = 0.0
        self._namespaces: dict[str, bytes] = {}
        self._hashers: dict[str, Callable[[Sequence[str]], list[bytes]]] = {}
        self.pushes_coming = PushesComing()
        """Large ones, which are taken in one after the other."""
        self.proofs = VersionProofs(self)
        self.timekeeping = Timekeeping(self)
        self.floors = Floors(self)
        self.floor_budget = FloorBudget(self)
        self.earlier_life = EarlierLife(self)
        self.cold = ColdCopies(self)
        self.checks = Checks(self)
        self.expiries = Expiries(self)
        self.comparisons = Comparisons(self)
        self.write_back = WriteBack(self)
        self.prefetching = Prefetching(self)
        self.hot_objects = HotObjects()
        self.repair = Repair(self, repair)
        self.offers = Offers(self, repair.bytes_per_second)
        self.read_reports = ReadReports(self)
        self.publishers = TrustedPublishers(self.notes)
        self.participations = Participations(self)
        self.checkpoints = CheckpointNames(self)
        self._timed: list[Timed] = [getattr(self, name) for name in _TIMED]
        gossip.directory.watched.watch(segment.digests(), self.operations.awaited.keys())

    def unix(self, now: float) -> float:
        """Wall-clock time at the monotonic time `now`."""
        return now + self.unix_offset_seconds

    def believed_unix(self, now: float) -> float:
        """Wall-clock time by which stamps of others are judged: see `ClusterTime.believed_unix`."""
        return self.gossip.time.believed_unix(now)

    def is_in_time(self, clock: int, now: float) -> bool:
        """Whether another peer's stamp is at most 10 s in the future."""
        accepts = self.clock.accepts
        return accepts(clock, self.unix(now)) or accepts(clock, self.believed_unix(now))

    def emit(self, effect: Effect | GossipEffect) -> None:
        """Queue an effect for the shell."""
        self._effects.append(effect)

    def take_effects(self) -> list[Effect | GossipEffect]:
        effects, self._effects = self._effects, []
        return effects

    def answered(self, number: int, tag: int, reply: Reply, now: float) -> None:
        """The outcome of an `AskPeer`: its reply, a `Failure`, or None when nothing came in time."""
        if number != TO_HOMES:
            self.operations.answered(number, tag, reply, now)
        elif isinstance(reply, Pushed):
            self.gossip.partitions.pushed(tag, reply.behind, rivals_of(reply), now)
        else:
            home = self.gossip.partitions.pushes.home_of(tag)
            self.gossip.partitions.pushed(tag, None, (), now)
            if reply is None and home is not None:
                self.holders.peer_failed(home, now)

    def tick(self, now: float) -> None:
        """Do what is due. The shell calls it after everything that has arrived was fed in."""
        for effect in self.gossip.tick(now):
            self._effects.append(effect)
        self.flush_pushes(now)
        for part in self._timed:
            part.tick(now)
        if now >= self._next_expire:
            self.segment.objects.expire(self.unix(now))
            more = self.segment.objects.expires_on(self.unix(now))
            self._next_expire = now if more else now + EXPIRE_INTERVAL_SECONDS
            self.objects.announce_withdrawn(now)
            self.cold.expire(now)
            self.holders.forget_old(now)
        self.operations.wake_due(now)

    def next_tick(self, now: float) -> float:
        """When `tick`, or `gossip_arrived`, has something to do next."""
        if self.gossip.directory.watched.any_touched:
            return now
        due_at = min([part.due_at for part in self._timed])
        due_at = min(due_at, self.gossip.next_tick(now), self._next_expire, self.operations.next_alarm())
        return max(now, due_at)

    def flush_pushes(self, now: float) -> None:
        """Send this peer's fresh locations to the home peers of their keys, when a batch is due."""
        for push in self.gossip.partitions.take_pushes(now):
            to, seconds = push.peer_id, push.timeout_seconds
            self.emit(AskPeer(TO_HOMES, push.token, to, DataKind.PUSH, push.message, seconds))

    @property
    def incarnation(self) -> int:
        """Of this peer's log. It may rise while running: see `Gossip.incarnation`."""
        return self.gossip.incarnation

    @property
    def operations_under_way(self) -> int:
        return len(self.operations)

    def serve(self, sender: PeerId, kind: int, request: Message, now: float) -> Message | Operation:
        """Answer another peer's data request: see `p2pstore.core.serving`."""
        return serve(self, sender, kind, request, now)

    @property
    def keys_per_step(self) -> int:
        """Keys to look up, with their home peers, at a time: 2 to 4 ms of work."""
        return max(1, min(LOOKED_UP_PER_STEP, WORK_PER_STEP // (8 + len(self.gossip.membership.live()))))

    def live_peers(self) -> list[PeerId]:
        return [state.peer_id for state in self.gossip.membership.others()]

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, this one left out."""
        return [peer_id for peer_id in self.gossip.homes(digest) if peer_id != self.peer_id]

    def name_of(self, peer_id: PeerId) -> str:
        """A peer's name, or the end of its id where the name is not known."""
        return self.gossip.membership.name_of(peer_id)

    def is_own(self, version: Version) -> bool:
        """Whether this peer wrote a version of what it holds, unless a proof beside it says otherwise."""
        return version.writer == self.writer

    def new_version(self, root: int, now: float) -> Version:
        """A version above everything this peer has seen. Raises `Unavailable` when others would refuse it."""
        self.timekeeping.check(now)
        return Version(self.clock.tick(self.unix(now)), self.writer, root)

    def version_above(self, other: Version, now: float) -> Version:
        """A version of this peer's that covers `other`. Raises `Unavailable` when others would refuse it."""
        self.clock.latest = max(self.clock.latest, other.clock)
        return self.new_version(0, now)

    def gossip_arrived(self, now: float) -> None:
        """Act on what gossip brought since the last call: floors, and newer versions of what is held. Of
        many keys some are left for the next call, which `next_tick` asks for.

        Two concurrent first puts both succeed; the lower version goes when the higher one is heard of from its
        holder. Other peers' statements of a holder give up nothing.
        """
        touched = self.gossip.directory.watched.take(self.keys_per_step)
        self.operations.tell_waiting(touched, now)
        for digest in sorted(self.copies.of_other_versions(touched, now)):
            entry = self.segment.find(digest, self.unix(now))
            copies, doubtful = self.copies.sorted(digest, now)
            if entry is not None or self.cold.find(digest, now) is not None:
                self.copies.prove_newer(copies, doubtful, now)
            newest = next((copy for copy in copies if copy.proved and not copy.hearsay), None)
            if newest is None or not newest.reachable or newest.local:
                continue
            if entry is not None:
                self.objects.withdraw(entry, now)
            else:  # as new, or newer, than what the SSD may have
                self.cold.discard(digest, before(newest.record.version), now)
        self.floors.arrived(now)

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
            hasher = self._hashers[namespace] = keys_hasher(namespace)
        return hasher(keys)

    def namespaces(self) -> Iterable[tuple[str, bytes]]:
        """Namespaces that were met here lately, with their digests."""
        return self._namespaces.items()


def before(version: Version) -> Version:
    """The highest version that is older."""
    if version.writer:
        return Version(version.clock, version.writer - 1, 0xFFFF_FFFF_FFFF_FFFF)
    return Version(max(0, version.clock - 1), 0xFFFF, 0xFFFF_FFFF_FFFF_FFFF)


WOKEN_PER_TICK: Final = 64
"""Operations woken by one tick: those of a large batch end together."""


_Op = TypeVar("_Op", bound=Operation)


class Operations:
    """All operations by number, their alarms, the keys they await, and fetches that several callers share."""

    def __init__(self, core: PeerCore) -> None:
        self.next_number = 1
        self._core = core
        self._running: dict[int, Operation] = {}
        self._alarms: list[tuple[float, int]] = []
        self._fetches: dict[bytes, FetchOperation] = {}
        self.awaited: dict[bytes, set[int]] = {}
        """Digests that operations await news of, and which ones do."""
        self._late: dict[tuple[int, int], PeerId] = {}
        """Questions of operations that have ended. Each has an outcome, so none stays."""

    def __len__(self) -> int:
        return len(self._running)

    def start(self, operation: _Op, now: float, then: Then | None = None) -> _Op:
        """Begin an operation; it may be done when this returns. `then` is called at its end."""
        operation.on_finish = then
        operation.number = self.next_number
        self.next_number += 1
        self._running[operation.number] = operation
        operation.start(now)
        return operation

    def retire(self, operation: Operation) -> None:
        """Forget a finished operation (called by the operation itself)."""
        self._running.pop(operation.number, None)
        if isinstance(operation, FetchOperation) and self._fetches.get(operation.digest) is operation:
            del self._fetches[operation.digest]

    def await_keys(self, operation: Operation, digests: Sequence[bytes]) -> None:
        """Call the operation's `heard_of` whenever there is news of one of these keys."""
        for digest in digests:
            self.awaited.setdefault(digest, set()).add(operation.number)

    def await_no_more(self, operation: Operation, digests: Sequence[bytes]) -> None:
        for digest in digests:
            numbers = self.awaited.get(digest, set())
            numbers.discard(operation.number)
            if not numbers:
                self.awaited.pop(digest, None)

    def tell_waiting(self, digests: Sequence[bytes], now: float) -> None:
        """There is news of these keys."""
        if not self.awaited:
            return
        for digest in digests:
            for number in sorted(self.awaited.get(digest, ())):
                operation = self._running.get(number)
                if operation is not None:
                    operation.heard_of(digest, now)

    def cancel(self, operation: Operation, now: float) -> None:
        """The caller no longer waits for the operation. A shared fetch goes on for its other callers."""
        if isinstance(operation, FetchOperation):
            operation.shared_by -= 1
            if operation.shared_by > 0:
                return
        operation.cancel(now)

    def abandon(self, number: int, now: float) -> None:
        """The shell could not carry out an effect of this operation, by an error of its own."""
        operation = self._running.get(number)
        if operation is not None:
            operation.cancel(now)

    def expect_late(self, operation: Operation, tag: int, peer_id: PeerId) -> None:
        """The operation ends before this question was answered. Whether it ever is says something of that peer."""
        self._late[operation.number, tag] = peer_id

    def pulled(self, number: int, outcome: PullOutcome, now: float) -> None:
        """The outcome of a `PullObject`."""
        operation = self._running.get(number)
        if isinstance(operation, FetchOperation) and outcome.transport in UNSEEN_TRANSPORTS:
            self._core.read_reports.note(outcome.source, operation.digest, 1, now)
        if operation is not None:
            operation.pulled(outcome, now)

    def set_alarm(self, operation: Operation) -> None:
        """Wake the operation at its `wake_at` (called by the operation itself)."""
        heapq.heappush(self._alarms, (operation.wake_at, operation.number))

    def next_alarm(self) -> float:
        """When the next operation wants to be woken. Alarms that no longer hold are dropped."""
        while self._alarms:
            wake_at, number = self._alarms[0]
            operation = self._running.get(number)
            if operation is not None and operation.wake_at == wake_at:
                return wake_at
            heapq.heappop(self._alarms)
        return math.inf

    def fetch(
        self, digest: bytes, now: float, then: Then | None = None, **options: Any
    ) -> FetchOperation:
        """Bring an absent object here; callers that want the same one share one fetch. The copy is a firm one as soon
        as one of them wants it so. `then` is called at the end of a new fetch."""
        running = self._fetches.get(digest)
        if running is not None:
            running.shared_by += 1
            running.soft &= options.get("soft", True)
            running.only_here &= options.get("only_here", False)
            return running
        operation = FetchOperation(self._core, digest, **options)
        self._fetches[digest] = operation
        self.start(operation, now, then)
        return operation

    @property
    def fetching(self) -> int:
        return len(self._fetches)

    def is_fetching(self, digest: bytes) -> bool:
        """Whether the object is on its way to this peer's memory."""
        return digest in self._fetches

    def copy_destination(self, number: int, now: float) -> CopyDestination:
        """Where the bytes of a `PullObject` go. The shell calls `commit` or `abort` at its end."""
        operation = self._running.get(number)
        if not isinstance(operation, FetchOperation):
            raise NoSuchKey("the fetch of this object has ended")
        return CopyDestination(self._core, operation, now)

    def answered(self, number: int, tag: int, reply: Reply, now: float) -> None:
        """The outcome of an operation's `AskPeer`. A late question without an answer counts against its peer."""
        operation = self._running.get(number)
        late = self._late.pop((number, tag), None)
        if operation is not None:
            operation.answered(operation.asked.pop(tag), reply, now)
        elif late is not None and reply is None:
            self._core.holders.peer_failed(late, now)

    def wake_due(self, now: float) -> None:
        """Wake up to 64 operations whose time has come, each at most once."""
        due: dict[int, None] = {}
        while self.next_alarm() <= now and len(due) < WOKEN_PER_TICK:
            due[heapq.heappop(self._alarms)[1]] = None
        for number in due:
            operation = self._running.get(number)
            if operation is not None:
                operation.wake(now)
