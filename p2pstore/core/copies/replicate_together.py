"""Having copies made of objects that were published together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from p2pstore.core.copies.replicate import (
    REPLICATE_BYTES_PER_SECOND,
    ReplicateOperation,
    offers_memory,
    take_target,
)
from p2pstore.core.core_effects import Reply
from p2pstore.core.operation import Operation
from p2pstore.core.puts.put_operation import PutEnd
from p2pstore.gossip.records import PeerId
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import MIB, Version
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import REPLICATE_MANY_VERSION, DataKind
from p2pstore.transfer.peer_messages import MAX_REPLICATED, ReplicatedMany, ReplicateMany
from p2pstore.wire import Code, Failure

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

WINDOW_BYTES: Final = 16 * MIB
"""Values of one message; a larger one goes alone."""
WINDOW_TRAILER_BYTES: Final = 512 * 1024
"""Trailers of one message: half of what a request may have."""
ANSWER_SECONDS: Final = 5.0
_OLDER: Final = (Code.UNSUPPORTED, Code.PROTOCOL_MISMATCH)


@dataclass(slots=True, eq=False)
class _Row:
    """An object, how many copies of it are wanted in all, and who was asked. `waiting` for so many answers."""

    place: int
    entry: ObjectEntry
    wanted: int
    waiting: int = 0
    made: list[PeerId] = field(default_factory=list)
    failed: list[PeerId] = field(default_factory=list)
    alone: ReplicateOperation | None = None


class ReplicateTogether(Operation):
    """Have as many copies made of new own objects as each wants; the result is how many there are of each.

    Nobody else holds any of them, so nothing is looked up. Targets are chosen as `ReplicateOperation` does, and get one
    message for all that they are to pull, a window at a time. What a target refuses, or fails to do, goes on as a
    `ReplicateOperation` by itself; so does what is for a target of an older version.
    """

    def __init__(self, core: PeerCore, entries: Sequence[ObjectEntry]) -> None:
        super().__init__(core)
        self._rows = [_Row(place, entry, entry.replicas) for place, entry in enumerate(entries)]
        self._copies = [0] * len(entries)
        self._left = len(entries)
        self._queued: dict[PeerId, deque[list[_Row]]] = {}
        self._asked: dict[int, tuple[PeerId, list[_Row]]] = {}
        self._next_tag = 0

    def start(self, now: float) -> None:
        core, by_target = self.core, dict[PeerId, list[_Row]]()
        able = [peer_id for peer_id in core.live_peers() if offers_memory(core, peer_id)]
        understanding = set(filter(self._understands, able))
        for row in self._rows:
            self.core.segment.references.acquire(
                row.entry
            )  # not evicted before its copies are made
            for target in filter(understanding.__contains__, self._targets_of(row, able)):
                row.waiting += 1
                by_target.setdefault(target, []).append(row)
        for target, rows in by_target.items():
            self._queued[target] = deque(_windows(rows))
            self._ask_next(target, now)
        for row in self._rows:
            if not row.waiting:
                self._go_on(row, now)

    def _targets_of(self, row: _Row, able: Sequence[PeerId]) -> Sequence[PeerId]:
        """The peers to ask for a copy, of those that can hold any."""
        if row.wanted > len(able):
            return able
        ranked, chosen = self.core.ranked_peers(row.entry.digest), list[PeerId]()
        candidates = [peer_id for peer_id in ranked if peer_id in able]
        while len(chosen) < row.wanted - 1 and candidates:
            chosen.append(take_target(self.core, candidates, chosen))
        return chosen

    def _understands(self, peer_id: PeerId) -> bool:
        state = self.core.gossip.membership.get(peer_id)
        record = None if state is None else state.record
        return record is not None and record.max_protocol >= REPLICATE_MANY_VERSION

    def _ask_next(self, target: PeerId, now: float) -> None:
        """Ask for the next window of what a target is to pull."""
        windows = self._queued[target]
        if not windows:
            return
        rows = windows.popleft()
        segment, me = self.core.segment, self.core.gossip.record(now)
        entries = [row.entry for row in rows]
        request = ReplicateMany(
            b"".join(map(segment.table.slot_bytes, entries)),
            list(map(segment.table.trailer_bytes, entries)),
            self.core.proofs.sign(entries),
            me.body,
            me.signature,
        )
        self._next_tag += 1
        self._asked[self._next_tag] = target, rows
        in_all = sum(entry.length for entry in entries)
        timeout = ANSWER_SECONDS + in_all / REPLICATE_BYTES_PER_SECOND
        self.ask(self._next_tag, target, DataKind.REPLICATE_MANY, request, timeout)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        target, rows = self._asked.pop(tag)
        if isinstance(reply, ReplicatedMany) and len(reply.codes) == len(rows):
            for row, code in zip(rows, reply.codes, strict=True):
                (row.failed if code else row.made).append(target)
            self._ask_next(target, now)
        else:
            if reply is None:
                self.core.holders.peer_failed(target, now)
            while self._queued[target]:
                rows += self._queued[target].popleft()
            is_older = isinstance(reply, Failure) and reply.code in _OLDER
            for row in [] if is_older else rows:
                row.failed.append(target)
        for row in rows:
            row.waiting -= 1
            if not row.waiting:
                self._go_on(row, now)

    def _go_on(self, row: _Row, now: float) -> None:
        """All answers for an object are there: see to the copies that are missing, alone."""
        entry, made = row.entry, row.made
        if len(made) >= row.wanted - 1:
            self._ended(row, 1 + len(made), now)
            return
        row.alone = ReplicateOperation(
            self.core,
            entry,
            row.wanted,
            lambda copies, at: self._ended(row, copies, at),
            made=made,
            tried=row.failed,
        )
        self.core.operations.start(row.alone, now)

    def _ended(self, row: _Row, copies: Any, now: float) -> None:
        if self.done:
            return
        self.core.segment.references.let_go(row.entry)
        count = self._copies[row.place] = copies if isinstance(copies, int) else 1 + len(row.made)
        if count < row.wanted:
            self.core.repair.fell_short(count, now)
        self._left -= 1
        if not self._left:
            self.finish(self._copies, now)

    def cancel(self, now: float) -> None:
        """The objects stay, with the copies that were made by then."""
        if self.done:
            return
        super().cancel(now)
        for row in self._rows:
            if not self._copies[row.place]:
                self.core.segment.references.let_go(row.entry)
                if row.alone is not None:
                    row.alone.cancel(now)


class PutAmongMany(NamedTuple):
    """A put that was published with others, and whose copies are made with theirs."""

    operation: ReplicateTogether
    place: int
    wanted: int
    version: Version

    @property
    def done(self) -> bool:
        """Whether it has its result."""
        return self.operation.done

    @property
    def result(self) -> PutEnd | Exception:
        """How the put ended."""
        copies = self.operation.result
        if isinstance(copies, Exception):
            return copies
        return PutEnd(PutStatus.CREATED, copies[self.place], self.wanted, self.version)


def _windows(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows in turn, as many as one message may have."""
    window: list[_Row] = []
    value_bytes = trailer_bytes = 0
    for row in rows:
        value_bytes += row.entry.length
        trailer_bytes += row.entry.trailer_length
        if window and (
            len(window) == MAX_REPLICATED
            or value_bytes > WINDOW_BYTES
            or trailer_bytes > WINDOW_TRAILER_BYTES
        ):
            yield window
            window = []
            value_bytes, trailer_bytes = row.entry.length, row.entry.trailer_length
        window.append(row)
    yield window
