"""Removing a whole namespace everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.core_effects import Reply
from p2pstore.core.operation import Operation
from p2pstore.errors import Unavailable
from p2pstore.gossip.records import SCOPE_NAMESPACE, PeerId, SignedRecord
from p2pstore.objects import ZERO_VERSION, Version, namespace_digest
from p2pstore.transfer.peer_messages import RecordsTaken
from p2pstore.wire import Failure

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry

PUSHES_AT_ONCE: Final = 32
FLUSH_TIMEOUT_SECONDS: Final = 10.0
MAX_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class FlushEnd:
    """What a flush did. `told` other peers have dropped the namespace's objects; those of `not_told`,
    which did not answer in time, will when they hear of it by gossip."""

    told: int
    not_told: tuple[PeerId, ...]


class FlushOperation(Operation):
    """Remove all objects of a namespace, wherever they are: one floor above everything that this peer has
    heard of, pushed to all live peers at once, 32 at a time. Each answers how far its clock was: where
    that was ahead of the floor, a second floor follows that covers what was put there.

    The result is a `FlushEnd`; `Unavailable` when this peer's clock is wrong; `CapacityExceeded` when there is no room
    for a floor, which other peers would not take in either. It comes when every live peer has withdrawn what it held,
    or the time is over. Later puts, the same bytes under the same keys too, are above the floor.
    """

    def __init__(
        self, core: PeerCore, namespace: str, timeout_seconds: float = FLUSH_TIMEOUT_SECONDS
    ) -> None:
        super().__init__(core)
        self._name = namespace_digest(namespace)
        self._deadline = timeout_seconds
        self._floor: SignedRecord
        self._version = ZERO_VERSION
        self._newest_clock = 0
        self._rounds = 0
        self._to_tell: list[PeerId] = []
        self._asked: dict[int, PeerId] = {}
        self._silent: list[PeerId] = []
        self._told = 0
        self._own_sweep: Operation | None = None

    def start(self, now: float) -> None:
        self._deadline += now
        try:
            self.core.timekeeping.check_all(now)
        except Unavailable as error:
            self.finish(error, now)
            return
        if self.core.floor_budget.full:
            self.finish(self.core.floor_budget.no_room(), now)
            return
        self._begin_round(self.core.gossip.floors.newest_heard, now)
        if not self.done:
            self.wake_at = self._deadline
            self.core.operations.set_alarm(self)

    def _begin_round(self, newest_clock: int, now: float) -> None:
        self._rounds += 1
        try:
            self._version = self.core.version_above(Version(newest_clock, 0), now)
        except Unavailable as error:
            self.finish(error, now)
            return
        self._floor = self.core.floors.write(self._name, self._version, now, scope=SCOPE_NAMESPACE)
        self._to_tell = self.core.live_peers()
        self._silent, self._told = [], 0
        self._own_sweep = SweepOperation(self.core, on_finish=self._swept)
        self.core.operations.start(self._own_sweep, now)
        self._proceed(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        peer_id = self._asked.pop(tag)
        if reply is None or isinstance(reply, Failure):
            self._silent.append(peer_id)
        else:
            self._told += 1
            if isinstance(reply, RecordsTaken) and self.core.clock.accepts(
                reply.newest_clock, self.core.believed_unix(now)
            ):
                self._newest_clock = max(self._newest_clock, reply.newest_clock)
        self._proceed(now)

    def wake(self, now: float) -> None:
        if now >= self._deadline:
            self._end(now)

    def cancel(self, now: float) -> None:
        """The floor stays: it has been told to some."""
        own_sweep, self._own_sweep = self._own_sweep, None
        if own_sweep is not None:
            own_sweep.cancel(now)
        super().cancel(now)

    def _swept(self, result: Any, now: float) -> None:
        self._own_sweep = None
        if self._asked or self._to_tell or self.done:
            return
        self._end_round(now)

    def _proceed(self, now: float) -> None:
        while self._to_tell and len(self._asked) < PUSHES_AT_ONCE:
            peer_id = self._to_tell.pop()
            tag = self._told + len(self._silent) + len(self._asked)
            self._asked[tag] = peer_id
            self.core.floors.push(
                self.number, tag, peer_id, [self._floor], max(0.0, self._deadline - now)
            )
        if not self._asked and self._own_sweep is None:
            self._end_round(now)

    def _end_round(self, now: float) -> None:
        if self.done:
            return
        if self._rounds < MAX_ROUNDS and self._newest_clock >= self._version.clock:
            self._begin_round(self._newest_clock, now)
        else:
            self._end(now)

    def _end(self, now: float) -> None:
        own_sweep, self._own_sweep = self._own_sweep, None
        if own_sweep is not None:
            own_sweep.cancel(now)
        not_told = (*self._silent, *self._asked.values(), *self._to_tell)
        self.finish(FlushEnd(self._told, not_told), now)


SLOTS_PER_STEP: Final = 2_000
WITHDRAWN_PER_STEP: Final = 32
"""Each step takes less than 5 ms: withdrawing an object costs some 40 us, passing a slot half of one."""


class Sweep:
    """Goes over the segment's slots once after every `begin`, a step per tick, and withdraws forbidden
    objects. Objects put meanwhile were checked when they came."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._at = 0
        self._left = 0
        self._distrusted = 0
        self._waiting: list[SweepOperation] = []

    @property
    def pending(self) -> bool:
        """Whether there is a step to make."""
        return self._left > 0 or self._core.cold.sweeping

    def forbids(self, entry: ObjectEntry) -> bool:
        """Whether the object is to go, though it is still here."""
        return self._left > 0 and (
            entry.version.clock <= self._distrusted or self._core.objects.forbids(entry)
        )

    def begin(self, now: float, distrusted: int = 0) -> None:
        """Go round from here, for a floor of a namespace, or because versions up to the clock `distrusted`
        are; the first step is made at once."""
        self._distrusted = max(self._distrusted, distrusted)
        self._left = self._core.segment.geometry.slots
        self.step(now)

    def step(self, now: float) -> None:
        """Pass some slots; when all were passed, discard some objects on the SSD."""
        if self._left:
            self._pass_slots(now)
        else:
            self._core.cold.sweep_step(now)
        if not self.pending:
            waiting, self._waiting = self._waiting, []
            for operation in waiting:
                operation.finish(None, now)

    def _pass_slots(self, now: float) -> None:
        core, withdrawn = self._core, 0
        count = min(SLOTS_PER_STEP, self._left)
        for entry in core.segment.objects.in_slots(self._at, count):
            if self.forbids(entry):
                if withdrawn == WITHDRAWN_PER_STEP:
                    count = entry.slot - self._at
                    break
                core.counters["objects_distrusted"] += entry.version.clock <= self._distrusted
                core.objects.withdraw(entry, now)
                withdrawn += 1
        self._left -= count
        self._at += count
        if self._at >= core.segment.geometry.slots:
            self._at = 0
        if not self._left:
            self._distrusted = 0

    def wait(self, operation: SweepOperation, now: float) -> None:
        """Finish the operation when nothing is left to sweep."""
        if self.pending:
            self._waiting.append(operation)
        else:
            operation.finish(None, now)

    def leave(self, operation: SweepOperation) -> None:
        """The operation does not wait any more."""
        if operation in self._waiting:
            self._waiting.remove(operation)


class SweepOperation(Operation):
    """Waits until what floors forbid has been withdrawn here."""

    def start(self, now: float) -> None:
        self.core.floors.sweep.wait(self, now)

    def cancel(self, now: float) -> None:
        self.core.floors.sweep.leave(self)
        super().cancel(now)
