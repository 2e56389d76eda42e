"""The operations under way at a peer: started, woken, told of answers and news, retired. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.copy_destination import CopyDestination
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.reads import UNSEEN_TRANSPORTS
from p2pstore.core.operation import Operation, PullOutcome, Reply, Then
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.records import PeerId

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

WOKEN_PER_TICK: Final = 64
"""Operations woken by one tick: those of a large batch end together."""


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

    def start(self, operation: Operation, now: float, then: Then | None = None) -> Operation:
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
        """Undo `await_keys`."""
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

    def abandon(self, operation: int, now: float) -> None:
        """The shell could not carry out an effect of this operation, by an error of its own."""
        machine = self._running.get(operation)
        if machine is not None:
            machine.cancel(now)

    def expect_late(self, operation: Operation, tag: int, peer_id: PeerId) -> None:
        """The operation ends before this question was answered. Whether it ever is says something of that peer."""
        self._late[operation.number, tag] = peer_id

    def pulled(self, operation: int, outcome: PullOutcome, now: float) -> None:
        """The outcome of a `PullObject`."""
        machine = self._running.get(operation)
        if isinstance(machine, FetchOperation) and outcome.transport in UNSEEN_TRANSPORTS:
            self._core.read_reports.note(outcome.source, machine.digest, 1, now)
        if machine is not None:
            machine.pulled(outcome, now)

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
        return float("inf")

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
        """How many objects are on their way to this peer's memory."""
        return len(self._fetches)

    def is_fetching(self, digest: bytes) -> bool:
        """Whether the object is on its way to this peer's memory."""
        return digest in self._fetches

    def copy_destination(self, operation: int, now: float) -> CopyDestination:
        """Where the bytes of a `PullObject` go. The shell calls `commit` or `abort` at its end."""
        machine = self._running.get(operation)
        if not isinstance(machine, FetchOperation):
            raise NoSuchKey("the fetch of this object has ended")
        return CopyDestination(self._core, machine, now)

    def answered(self, operation: int, tag: int, reply: Reply, now: float) -> None:
        """The outcome of an operation's `AskPeer`. A late question without an answer counts against its peer."""
        machine = self._running.get(operation)
        late = self._late.pop((operation, tag), None)
        if machine is not None:
            machine.answered(machine.asked.pop(tag), reply, now)
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
