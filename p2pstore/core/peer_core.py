"""The peer's core: its memory, its knowledge of the cluster, and the operations under way.

Pure. A shell feeds it requests and events with the time, then carries out `take_effects()`. Local
operations that need one step are plain methods; longer ones are `Operation`s, started with `start` and
ended by an `OperationFinished` effect. Time is monotonic seconds; `unix(now)` is wall-clock time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from p2pstore.core.checkpoints import Checkpoints, TrustedPublishers
from p2pstore.core.copies.cold_copies import ColdCopies
from p2pstore.core.copies.coldest import Offers, WriteBack
from p2pstore.core.copies.memory_return import EarlierLife
from p2pstore.core.copies.own_copies import Checks
from p2pstore.core.copies.proofs import VersionProofs
from p2pstore.core.copies.repair import Repair, RepairTiming
from p2pstore.core.floors import FloorBudget, Floors
from p2pstore.core.gets.fetch_operation import Prefetching
from p2pstore.core.gets.reads import HotObjects, ReadReports
from p2pstore.core.gets.serving import PushesComing, rivals_of, serve
from p2pstore.core.known_copies import Holders, KnownCopies
from p2pstore.core.operation import AskPeer, Effect, Operation, Reply, Timed
from p2pstore.core.operations import Operations
from p2pstore.core.own_objects import OwnObjects
from p2pstore.core.participations import Participations
from p2pstore.core.puts.comparing import Comparisons
from p2pstore.core.puts.lifetimes import Expiries
from p2pstore.core.timekeeping import Timekeeping
from p2pstore.gossip.machine import Effect as GossipEffect
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import Member, PeerId, member_of, writer_of
from p2pstore.home_messages import Pushed
from p2pstore.memory.segment import Segment
from p2pstore.objects import HybridClock, Signer, Verifier, Version, keys_hasher, namespace_digest
from p2pstore.transfer.data_messages import DataKind
from p2pstore.wire import Message

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
        self.gossip = gossip
        self.segment = segment
        self.clock = clock
        self.rng = rng
        self.unix_offset_seconds = unix_offset_seconds
        self.counters: Counter[str] = Counter()
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
        self.publishers = TrustedPublishers()
        self.participations = Participations(self)
        self.checkpoints = Checkpoints(self)
        self._timed: list[Timed] = [getattr(self, name) for name in _TIMED]
        gossip.locations.watch(segment.digests(), self.operations.awaited.keys())

    # --- driving -----------------------------------------------------------------------------

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
        """Everything the shell has to do since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def answered(self, operation: int, tag: int, reply: Reply, now: float) -> None:
        """The outcome of an `AskPeer`: its reply, a `Failure`, or None when nothing came in time."""
        if operation != TO_HOMES:
            self.operations.answered(operation, tag, reply, now)
        elif isinstance(reply, Pushed):
            self.gossip.push_answered(tag, reply.behind, rivals_of(reply), now)
        else:
            home = self.gossip.partitions.pushes.home_of(tag)
            self.gossip.push_answered(tag, None, (), now)
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
        if self.gossip.directory.any_touched:
            return now
        due_at = min([part.due_at for part in self._timed])
        due_at = min(due_at, self.gossip.next_tick(now), self._next_expire, self.operations.next_alarm())
        return max(now, due_at)

    def flush_pushes(self, now: float) -> None:
        """Send this peer's fresh locations to the home peers of their keys, when a batch is due."""
        for push in self.gossip.pushes(now):
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
        """Answer another peer's data request: see `p2pstore.core.gets.serving`."""
        return serve(self, sender, kind, request, now)

    # --- what is known -----------------------------------------------------------------------

    @property
    def keys_per_step(self) -> int:
        """Keys to look up, with their home peers, at a time: 2 to 4 ms of work."""
        return max(1, min(LOOKED_UP_PER_STEP, WORK_PER_STEP // (8 + len(self.gossip.membership.live()))))

    def live_peers(self) -> list[PeerId]:
        """The other members that are not believed dead."""
        return [state.peer_id for state in self.gossip.membership.others()]

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, this one left out."""
        return [peer_id for peer_id in self.gossip.homes(digest) if peer_id != self.peer_id]

    def name_of(self, peer_id: PeerId) -> str:
        """A peer's name, or the end of its id where the name is not known."""
        return self.gossip.membership.name_of(peer_id)

    def is_own(self, version: Version) -> bool:
        """Whether this peer wrote a version of what it holds, unless a proof beside it says otherwise."""
        return version.writer == writer_of(self.peer_id)

    # --- versions and floors -----------------------------------------------------------------

    def new_version(self, root: int, now: float) -> Version:
        """A version above everything this peer has seen. Raises `Unavailable` when others would refuse it."""
        self.timekeeping.check(now)
        return Version(self.clock.tick(self.unix(now)), writer_of(self.peer_id), root)

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
        touched = self.gossip.directory.take_touched(self.keys_per_step)
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
