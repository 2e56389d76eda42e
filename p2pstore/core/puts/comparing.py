"""Asking holders what they have under keys that are put: about many keys of one holder together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from p2pstore.core.core_effects import KnownCopy, Reply
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId
from p2pstore.transfer.data_messages import DataKind, Get, GetItem, Objects

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

COMPARE_TIMEOUT_SECONDS: Final = 1.5
"""Three holders may be asked in turn within the five seconds that clients wait for progress."""
SLOT_ONLY: Final = 0xFFFF_FFFF
"""A first chunk beyond every object: the answer is slot and trailer without payload."""
MAX_COMPARED: Final = 256
"""Objects of one question."""
GO_ON_PER_STEP: Final = 32
"""Puts that go on with an answer at a time: some milliseconds, as many publish an object then."""

Then = Callable[[Reply, float], None]
"""Called with the holder's answer about that object alone: `Objects` of one item, or what came instead of any."""


class CompareOperation(Operation):
    """Ask one holder for slots and trailers. What is asked for until the first tick goes in one question."""

    def __init__(self, core: PeerCore, peer_id: PeerId) -> None:
        super().__init__(core)
        self._peer_id = peer_id
        self._items: list[GetItem] = []
        self._waiting: deque[Then] = deque()
        self._replies: deque[Reply] = deque()
        self._asked = False
        self._answered = False

    def start(self, now: float) -> None:
        self.wake_at = now
        self.core.operations.set_alarm(self)

    @property
    def takes_more(self) -> bool:
        return not self._asked and not self.done and len(self._items) < MAX_COMPARED

    def add(self, item: GetItem, then: Then) -> None:
        """One more object, while it `takes_more`."""
        self._items.append(item)
        self._waiting.append(then)

    def wake(self, now: float) -> None:
        if self._answered:
            self._go_on(GO_ON_PER_STEP, now)
            return
        self.wake_at, self._asked = math.inf, True
        self.ask(0, self._peer_id, DataKind.GET, Get(self._items), COMPARE_TIMEOUT_SECONDS)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._answered = True
        if isinstance(reply, Objects):
            self._replies.extend(Objects([each]) for each in reply.items)
        else:
            self._replies.extend([reply] * len(self._items))
        self._go_on(GO_ON_PER_STEP, now)

    def cancel(self, now: float) -> None:
        """What is not answered will not be."""
        self._go_on(len(self._waiting), now)

    def _go_on(self, count: int, now: float) -> None:
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()(self._replies.popleft() if self._replies else None, now)
        if not self._waiting:
            self.finish(None, now)
        elif not self.done:
            self.wake_at = now
            self.core.operations.set_alarm(self)


class Comparisons:
    """Questions to holders about single objects, which go to each holder together."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._open: dict[PeerId, CompareOperation] = {}
        """The last one for each holder."""

    def ask(self, copy: KnownCopy, now: float, then: Then) -> None:
        """Ask a holder for its slot and trailer of one object."""
        operation = self._open.get(copy.peer_id)
        if operation is None or not operation.takes_more:
            operation = self._open[copy.peer_id] = CompareOperation(self._core, copy.peer_id)
            self._core.operations.start(operation, now)
        record = copy.record
        operation.add(GetItem(record.digest, first_chunk=SLOT_ONLY, slot=record.slot), then)
