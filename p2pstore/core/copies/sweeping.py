"""Withdrawing many objects in steps: what a namespace's floor forbids, and what is distrusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.operation import Operation

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry
    from p2pstore.wire import Message

SLOTS_PER_STEP: Final = 2_000
WITHDRAWN_PER_STEP: Final = 32
"""Each step takes less than 5 ms: withdrawing an object costs some 40 us, passing a slot half of one."""


class Sweep:
    """Goes over the segment's slots once after every `begin`, a step per tick, and withdraws what may not
    be there. What is put meanwhile was checked when it came."""

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
    """Waits until what floors forbid has been withdrawn here. The result is `answer`."""

    def __init__(
        self,
        core: PeerCore,
        on_finish: Callable[[Any, float], None] | None = None,
        answer: Message | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self._answer = answer

    def finish(self, result: Any, now: float) -> None:
        super().finish(self._answer if result is None else result, now)

    def start(self, now: float) -> None:
        self.core.floors.sweep.wait(self, now)

    def cancel(self, now: float) -> None:
        self.core.floors.sweep.leave(self)
        super().cancel(now)
