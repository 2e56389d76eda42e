"""Repair: keeping as many copies of an object as its put asked for, after the loss of a holder.

Some time after a member died, left or came back empty, every peer goes through the firm copies that it holds with more
than one copy wanted. Of the holders that are left, the first in rendezvous order has the missing copies made, at once;
each of the others looks again later, by its place in that order, and acts if copies are still missing. So exactly one
holder acts, without messages to agree on it, and one that fails is replaced. Every departure starts a pass, also one
after a hand-over: objects that were handed over lack no copy.

A copy that its holder evicts is no loss: in a full cache, whatever is copied again pushes out something else. A put
that found too few peers has lost nothing. It is looked at again as well: after a while, or, where all that offer memory
have a copy already, when there are more of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.own_copies import OwnCopies, held_here, other_firm_copies
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import KnownCopy
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.gossip.records import Member, Tier
from p2pstore.memory.entries import ObjectEntry

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

LOOK_INTERVAL_SECONDS: Final = 0.02
"""Between two steps of a few milliseconds."""
MAX_FAILURES: Final = 8
"""Failures in a row that end a pass: no peer takes copies now."""
DEFAULT_BYTES_PER_SECOND: Final = 125e6


@dataclass(frozen=True, slots=True)
class RepairTiming:
    """When and how fast. A member that is back within `delay_seconds` is not replaced. `jitter_seconds`: upper bound of
    a peer's random extra delay. `turn_seconds`: how long each holder waits for the one before it. After a pass in which
    copies could not be made, the next one begins `delay_seconds` later, then twice that, and so on."""

    delay_seconds: float = 30.0
    jitter_seconds: float = 5.0
    turn_seconds: float = 15.0
    longest_pause_seconds: float = 600.0
    bytes_per_second: float = DEFAULT_BYTES_PER_SECOND


TIMING: Final[Mapping[str, RepairTiming]] = MappingProxyType(
    {
        "lan": RepairTiming(),
        "wan": RepairTiming(delay_seconds=60.0, jitter_seconds=10.0, turn_seconds=30.0),
        "local": RepairTiming(delay_seconds=3.0, jitter_seconds=0.5, turn_seconds=2.0),
    }
)
"""By the setting `network`."""


@dataclass(frozen=True, slots=True)
class _Lack:
    """An object with too few copies, `there` of `wanted`. `turn`: how many holders come before this peer."""

    held: Any
    wanted: int
    there: int
    turn: int


@dataclass(slots=True)
class _Pass:
    """Going through all objects, in rounds: in round n those act that have n holders before them."""

    walk: OwnCopies
    dead_holders: int
    """Members that offered memory, and died."""
    started_at: float
    began_at: float
    """Its round."""
    next_at: float
    round: int = 0
    queue: deque[bytes] = field(default_factory=deque)
    busy: bool = False
    lacking: int = 0
    """Of this round: how many objects have too few copies."""
    limited: int = 0
    """Of this round: how many objects have as many copies as there ever were peers, and want more."""
    others_turn: bool = False
    """Of this round: whether some are left to other holders."""
    failed: bool = False
    failures_in_a_row: int = 0


class Repair:
    """Decides for one peer. Driven by `tick`."""

    def __init__(self, core: PeerCore, timing: RepairTiming) -> None:
        self.lacking = 0
        """Objects here that lack copies which the cluster had or could have, as far as was found at the last look."""
        self.limited = 0
        """Objects here of which more copies are wanted than there are peers: nothing of them was lost."""
        self._core = core
        self._timing = timing
        self._losses = core.gossip.losses
        self._due_at = self._then_at = math.inf
        self._not_before = -math.inf
        self._pause_seconds = timing.delay_seconds
        self._pass: _Pass | None = None
        self._offering_then: int | None = None
        """How many others offered memory when that were too few; None when there were enough."""
        self._seen_version = -1
        self._offering = 0

    def fell_short(self, copies: int, now: float) -> None:
        """Of an object that is here fewer copies could be made than were wanted."""
        if self._are_too_few(copies):
            return
        self._due_at = min(self._due_at, max(self._some_time_after(now), self._not_before))

    def look_later(self, now: float) -> None:
        """Copies may have been lost just now."""
        self._pause_seconds, self._not_before = self._timing.delay_seconds, -math.inf
        then = self._some_time_after(now)
        if then < self._due_at:
            self._due_at = then
        else:
            self._then_at = then

    @property
    def due_at(self) -> float:
        """Changes of members are found with any tick."""
        if self._core.closing:
            return math.inf
        if self._pass is None:
            return self._due_at
        return math.inf if self._pass.busy else self._pass.next_at

    def tick(self, now: float) -> None:
        if self._core.closing:
            return
        self._notice(now)
        if self._pass is None and now >= self._due_at:
            self._due_at, self._then_at = self._then_at, math.inf
            walk = OwnCopies(self._core, replicated_only=True)
            self._pass = _Pass(walk, self._dead_holders(), now, now, now)
        if self._pass is not None:
            self._go_on(self._pass, now)

    def _notice(self, now: float) -> None:
        losses = self._core.gossip.losses
        if losses != self._losses:
            self._losses = losses
            self.look_later(now)
        if self._offering_then is not None and self._others_offering > self._offering_then:
            self._offering_then = None
            self.look_later(now)

    def _some_time_after(self, now: float) -> float:
        timing = self._timing
        return now + timing.delay_seconds + self._core.rng.uniform(0.0, timing.jitter_seconds)

    @property
    def _others_offering(self) -> int:
        membership = self._core.gossip.membership
        if self._seen_version != membership.version:
            self._seen_version = membership.version
            self._offering = sum(state.memory_capacity > 0 for state in membership.others())
        return self._offering

    def _dead_holders(self) -> int:
        """How many members that offered memory died. Those that left on purpose are not among them."""
        return sum(
            state.memory_capacity > 0 and state.status is Status.DEAD and not state.leaving
            for state in self._core.gossip.membership.states()
        )

    def _are_too_few(self, copies: int) -> bool:
        """Whether no peer is left that could take one more copy. Then repair waits until a peer joins."""
        if copies <= self._others_offering:
            return False
        self._offering_then = self._others_offering
        return True

    def _go_on(self, current: _Pass, now: float) -> None:
        while not current.busy and now >= current.next_at and current is self._pass:
            if current.queue:
                self._act(current, current.queue.popleft(), now)
            elif current.walk.done:
                self._end_round(current, now)
            else:
                self._look_on(current, now)

    def _look_on(self, current: _Pass, now: float) -> None:
        core = self._core
        digests = current.walk.step()
        current.next_at = now + LOOK_INTERVAL_SECONDS
        if core.gossip.partitions.mode.knows_all or not digests:
            self._judge(current, digests, now)
            return
        current.busy = True

        def looked(result: Any, at: float) -> None:
            current.busy = False
            self._judge(current, digests, at)

        core.operations.start(LookupOperation(core, digests, ask_always=True), now, looked)

    def _judge(self, current: _Pass, digests: list[bytes], now: float) -> None:
        for digest in digests:
            lack = self._lack(current, digest, now)
            if lack is None:
                continue
            self._count(current, lack.there, lack.wanted)
            if self._are_too_few(lack.there):
                continue
            if lack.turn <= current.round:
                current.queue.append(digest)
            else:
                current.others_turn = True

    def _count(self, current: _Pass, copies: int, wanted: int) -> None:
        """Count an object with too few copies: whether there were, or could be, more, as far as members are known."""
        if copies < min(wanted, 1 + self._others_offering + current.dead_holders):
            current.lacking += 1
        else:
            current.limited += 1

    def _lack(self, current: _Pass, digest: bytes, now: float) -> _Lack | None:
        """The missing copies of an object, or None when there are enough."""
        core = self._core
        held = held_here(core, digest, now)
        others = None if held is None or held.soft else other_firm_copies(core, held, now)
        if held is None or others is None:
            return None
        there = [copy for copy in others if copy.reachable]
        wanted = max(held.replicas, *(copy.record.replicas for copy in others), 1)
        may_return = sum(not copy.reachable and self._may_return(current, copy) for copy in others)
        if 1 + len(there) + may_return >= wanted:
            return None
        mine = _order(digest, core.member, not isinstance(held, ObjectEntry))
        turn = sum(_order(digest, copy.member, copy.record.tier is Tier.SSD) < mine for copy in there)
        return _Lack(held, wanted, 1 + len(there), turn)

    def _may_return(self, current: _Pass, copy: KnownCopy) -> bool:
        """Whether a holder was missing for less than `delay_seconds` when the pass began, so that it may come back with
        its objects. If it does not, the next pass repairs that; every holder has a turn again there."""
        state = self._core.gossip.membership.resolve(copy.member)
        return (
            state is not None
            and state.status is Status.DEAD
            and current.started_at - state.status_since < self._timing.delay_seconds
        )

    def _end_round(self, current: _Pass, now: float) -> None:
        self.lacking, self.limited = current.lacking, current.limited
        gave_up = current.failures_in_a_row >= MAX_FAILURES
        if current.others_turn and not gave_up:
            current.next_at = max(now, current.began_at + self._timing.turn_seconds)
            current.began_at = current.next_at
            current.round += 1
            current.lacking, current.limited, current.others_turn = 0, 0, False
            current.walk = OwnCopies(self._core, replicated_only=True)
            return
        self._pass = None
        if current.failed:
            self._not_before = now + self._pause_seconds
            self._due_at = min(self._due_at, self._not_before)
            self._pause_seconds = min(2 * self._pause_seconds, self._timing.longest_pause_seconds)
            return
        self._pause_seconds = self._timing.delay_seconds
        if self.limited or self.lacking:  # they may be removed meanwhile
            self._due_at = min(self._due_at, now + self._timing.longest_pause_seconds)

    def _act(self, current: _Pass, digest: bytes, now: float) -> None:
        """Have the missing copies of an object made, if they are still missing."""
        lack = self._lack(current, digest, now)
        if lack is None or lack.turn > current.round:
            current.lacking -= lack is None
            current.others_turn |= lack is not None
            return
        current.busy = True
        if isinstance(lack.held, ObjectEntry):
            self._replicate(current, lack.held, lack.wanted, now)
            return
        loaded = partial(self._loaded, current, lack.wanted)
        core = self._core
        core.operations.start(FetchOperation(core, digest, only_here=True), now, loaded)

    def _loaded(self, current: _Pass, wanted: int, result: Any, now: float) -> None:
        if isinstance(result, ObjectEntry):
            self._replicate(current, result, wanted, now)
        else:
            self._ended(current, now, now, repaired=False)

    def _replicate(self, current: _Pass, entry: ObjectEntry, wanted: int, now: float) -> None:
        core, began_at = self._core, now

        def replicated(result: Any, at: float) -> None:
            moved_bytes = operation.made * entry.length
            if operation.made:
                core.counters["repairs"] += operation.made
                core.counters["repaired_bytes"] += moved_bytes
            rested_at = began_at + moved_bytes / self._timing.bytes_per_second
            repaired = isinstance(result, int) and result >= wanted
            if isinstance(result, int) and not repaired and self._are_too_few(result):
                repaired = True  # as far as can be
                self._count(current, result, wanted)
            self._ended(current, rested_at, at, repaired=repaired)

        operation = ReplicateOperation(core, entry, wanted)
        core.operations.start(operation, now, replicated)

    def _ended(self, current: _Pass, rested_at: float, now: float, *, repaired: bool) -> None:
        current.busy = False
        current.next_at = max(now, rested_at)
        if repaired:
            current.failures_in_a_row = 0
            current.lacking -= 1
            return
        current.failed = True
        current.failures_in_a_row += 1
        if current.failures_in_a_row >= MAX_FAILURES:
            current.queue.clear()
            current.walk.end()


def _order(digest: bytes, member: Member, only_on_ssd: bool) -> tuple[bool, int]:
    """Sort key of holders by the order in which they act: holders with the object in memory, then by rendezvous
    order."""
    return only_on_ssd, -weight(member, digest)
