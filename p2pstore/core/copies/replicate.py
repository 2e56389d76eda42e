"""Having copies of an object made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from p2pstore.core.operation import Operation, PutEnd, Reply
from p2pstore.gossip.records import PeerId
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import MIB, Version
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import (
    MAX_REPLICATED,
    Replicate,
    Replicated,
    ReplicatedMany,
    ReplicateMany,
)
from p2pstore.wire import Code, Failure

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A target that copies slower than this is given up for the next candidate."""

MAX_ANNOUNCED: Final = 4
"""Location records count wanted copies up to here."""


class ReplicateOperation(Operation):
    """Have `wanted` copies of a local object made; the result is how many there are.

    Targets pull. They are asked in rendezvous order, those on hosts that have no copy yet before others, and those
    with a soft copy, which only has to be kept, before those without; one that fails is replaced by the next. Holders
    that have not heard how many copies are wanted are told. With `candidates`, these peers are asked instead of all
    others, in their order. `made` are peers that have just made a copy, `tried` are those that failed to.
    """

    def __init__(
        self,
        core: PeerCore,
        entry: ObjectEntry,
        wanted: int,
        *,
        candidates: Sequence[PeerId] | None = None,
        made: Sequence[PeerId] = (),
        tried: Sequence[PeerId] = (),
    ) -> None:
        super().__init__(core)
        self.made = 0
        """How many peers said that they hold a copy now."""
        self._made_before = made
        self._tried_before = tried
        self._entry = entry
        self._wanted = wanted
        self._holders: list[PeerId] = []
        """Of the other copies."""
        self._chosen = candidates
        self._candidates: list[PeerId] = []

    @property
    def _copies(self) -> int:
        return 1 + len(self._holders)

    def start(self, now: float) -> None:
        entry = self._entry
        copies = [
            copy
            for copy in self.core.copies.known(entry.digest, now)
            if copy.reachable and not copy.local and copy.record.version == entry.version
        ]
        holding = [copy for copy in copies if not copy.record.soft]
        soft = [copy.peer_id for copy in copies if copy.record.soft]
        told = min(entry.replicas, MAX_ANNOUNCED)
        holders = [copy.peer_id for copy in holding if copy.record.replicas >= told]
        self._holders = list(dict.fromkeys((*holders, *self._made_before)))
        to_tell = [copy.peer_id for copy in holding if copy.record.replicas < told]
        known = {copy.peer_id for copy in holding}.union(self._made_before, self._tried_before)
        ranked = self.core.gossip.rank(entry.digest) if self._chosen is None else self._chosen
        self._candidates = [
            peer_id
            for peer_id in dict.fromkeys((*soft, *ranked))
            if peer_id not in known and offers_memory(self.core, peer_id)
        ]
        # The source of copies is not evicted before they are made.
        self.core.segment.references.acquire(entry)
        for peer_id in to_tell:
            self._ask(peer_id, now)
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        while self._copies + len(self.asked) < self._wanted and self._candidates:
            self._ask(self._next_candidate(), now)
        if not self.asked:
            self.core.segment.references.let_go(self._entry)
            self.finish(self._copies, now)

    def _next_candidate(self) -> PeerId:
        if self._chosen is not None:
            return self._candidates.pop(0)
        return take_target(self.core, self._candidates, [*self._holders, *self.asked.values()])

    def _ask(self, target: PeerId, now: float) -> None:
        entry = self._entry
        me = self.core.gossip.record(now)
        request = Replicate(
            entry.digest,
            entry.version.clock,
            entry.version.writer,
            entry.length,
            record_body=me.body,
            record_signature=me.signature,
            replicas=entry.replicas,
            root=entry.version.root,
            proof=self.core.proofs.of(entry, now),
        )
        timeout = 5.0 + entry.length / REPLICATE_BYTES_PER_SECOND
        self.ask(target, target, DataKind.REPLICATE, request, timeout)

    def answered(self, target: PeerId, reply: Reply, now: float) -> None:
        if isinstance(reply, Replicated):
            self._holders.append(target)
            self.made += 1
        elif reply is None:
            self.core.holders.peer_failed(target, now)
        self._proceed(now)

    def cancel(self, now: float) -> None:
        if not self.done:
            self.core.segment.references.let_go(self._entry)
        super().cancel(now)


def offers_memory(core: PeerCore, peer_id: PeerId) -> bool:
    """Whether the member can hold copies at all."""
    state = core.gossip.membership.get(peer_id)
    return state is not None and state.memory_capacity > 0


def take_target(core: PeerCore, candidates: list[PeerId], taken: Sequence[PeerId]) -> PeerId:
    """Take out the first candidate on a host without a copy (`taken`: holders, and makers, of one), else the first."""
    own = core.gossip.membership.own.record
    hosts = {_host_of(core, peer_id) for peer_id in taken}
    hosts.add(own.host_id if own is not None else b"")
    elsewhere = (
        place for place, peer_id in enumerate(candidates) if _host_of(core, peer_id) not in hosts
    )
    return candidates.pop(next(elsewhere, 0))


def _host_of(core: PeerCore, peer_id: PeerId) -> bytes:
    state = core.gossip.membership.get(peer_id)
    record = None if state is None else state.record
    return peer_id if record is None else record.host_id


WINDOW_BYTES: Final = 32 * MIB
"""Values of one message; a larger one goes alone."""
WINDOW_TRAILER_BYTES: Final = 512 * 1024
"""Trailers of one message: half of what a request may have."""
ANSWER_SECONDS: Final = 5.0
_OLDER: Final = (Code.UNSUPPORTED, Code.PROTOCOL_MISMATCH)


@dataclass(slots=True, eq=False)
class _Row:
    """An object, how many copies of it are wanted in all, and the peers asked. `waiting`: answers outstanding."""

    place: int
    entry: ObjectEntry
    wanted: int
    waiting: int = 0
    made: tuple[PeerId, ...] = ()
    failed: tuple[PeerId, ...] = ()


class ReplicateTogether(Operation):
    """Have as many copies made of new own objects, put together, as each wants; the result are the ends of the puts.

    No other peer holds any of them, so nothing is looked up. Targets are chosen as `ReplicateOperation` does, and get
    one message for all that they are to pull, a window at a time. An object that a target refuses, or fails to pull,
    goes on as a `ReplicateOperation` of its own; so does one whose target runs an older version.
    """

    def __init__(self, core: PeerCore, entries: Sequence[ObjectEntry]) -> None:
        super().__init__(core)
        self._rows = [_Row(place, entry, entry.replicas) for place, entry in enumerate(entries)]
        self._copies = [0] * len(entries)
        self._left = len(entries)
        self._queued: dict[PeerId, deque[list[_Row]]] = {}

    def start(self, now: float) -> None:
        core, by_target = self.core, dict[PeerId, list[_Row]]()
        able = [peer_id for peer_id in core.live_peers() if offers_memory(core, peer_id)]
        # Not evicted before their copies are made.
        core.segment.references.acquire(*[row.entry for row in self._rows])
        for row in self._rows:
            for target in self._targets_of(row, able):
                row.waiting += 1
                by_target.setdefault(target, []).append(row)
        for target, rows in by_target.items():
            self._queued[target] = deque(_windows(rows))
            self._ask_next(target, now)
        self._go_on(self._rows, now)

    def _targets_of(self, row: _Row, able: Sequence[PeerId]) -> Sequence[PeerId]:
        """The peers to ask for a copy, of those that can hold any."""
        if row.wanted > len(able):
            return able
        ranked, chosen = self.core.gossip.rank(row.entry.digest), list[PeerId]()
        candidates = [peer_id for peer_id in ranked if peer_id in able]
        while len(chosen) < row.wanted - 1 and candidates:
            chosen.append(take_target(self.core, candidates, chosen))
        return chosen

    def _ask_next(self, target: PeerId, now: float) -> None:
        """Ask for the next window of what a target is to pull."""
        windows = self._queued[target]
        if not windows:
            return
        rows = windows.popleft()
        # Signed a moment ago is new enough: the target learns here how to reach a peer that it has not heard of.
        me = self.core.gossip.membership.own.signed or self.core.gossip.record(now)
        segment = self.core.segment
        entries = [row.entry for row in rows]
        request = ReplicateMany(
            b"".join(map(segment.table.slot_bytes, entries)),
            list(map(segment.table.trailer_bytes, entries)),
            self.core.proofs.sign([(entry.digest, entry.version) for entry in entries]),
            me.body,
            me.signature,
        )
        in_all = sum(entry.length for entry in entries)
        timeout = ANSWER_SECONDS + in_all / REPLICATE_BYTES_PER_SECOND
        self.ask((target, rows), target, DataKind.REPLICATE_MANY, request, timeout)

    def answered(self, about: tuple[PeerId, list[_Row]], reply: Reply, now: float) -> None:
        target, rows = about
        if isinstance(reply, ReplicatedMany) and len(reply.codes) == len(rows):
            for row, code in zip(rows, reply.codes, strict=True):
                if code:
                    row.failed += (target,)
                else:
                    row.made += (target,)
            self._ask_next(target, now)
        else:
            if reply is None:
                self.core.holders.peer_failed(target, now)
            while self._queued[target]:
                rows += self._queued[target].popleft()
            is_older = isinstance(reply, Failure) and reply.code in _OLDER
            for row in [] if is_older else rows:
                row.failed += (target,)
        for row in rows:
            row.waiting -= 1
        self._go_on(rows, now)

    def _go_on(self, rows: Sequence[_Row], now: float) -> None:
        """Where all answers for an object are there, see to the copies that are missing, alone."""
        answered = [row for row in rows if not row.waiting]
        done = [row for row in answered if len(row.made) >= row.wanted - 1]
        for row in answered if len(done) < len(answered) else ():
            if len(row.made) < row.wanted - 1:
                made, tried = row.made, row.failed
                alone = ReplicateOperation(self.core, row.entry, row.wanted, made=made, tried=tried)
                self.run(alone, partial(self._ended_alone, row), now)
        self._ended(done, now)

    def _ended_alone(self, row: _Row, copies: Any, now: float) -> None:
        count = copies if isinstance(copies, int) else 1 + len(row.made)
        if count < row.wanted:
            self.core.repair.fell_short(count, now)
        self._ended([row], now, count)

    def _ended(self, rows: Sequence[_Row], now: float, copies: int = 0) -> None:
        """These have this number of copies; 0: as were made together."""
        if not rows:
            return
        self.core.segment.references.let_go(*[row.entry for row in rows])
        for row in rows:
            self._copies[row.place] = copies or 1 + len(row.made)
        self._left -= len(rows)
        if not self._left:
            self.finish(self._ends(), now)

    def _ends(self) -> list[PutEnd]:
        """Puts that ended alike share their end: one row of the answer."""
        clock, writer, _ = self._rows[0].entry.version
        ends: dict[tuple[int, int], PutEnd] = {}
        for row, copies in zip(self._rows, self._copies, strict=True):
            if (copies, row.wanted) not in ends:
                version = Version(clock, writer)
                ends[copies, row.wanted] = PutEnd(PutStatus.CREATED, copies, row.wanted, version)
        return [ends[copies, row.wanted] for row, copies in zip(self._rows, self._copies, strict=True)]

    def cancel(self, now: float) -> None:
        """The objects stay, with the copies that were made by then."""
        if self.done:
            return
        super().cancel(now)
        left = [row.entry for row in self._rows if not self._copies[row.place]]
        self.core.segment.references.let_go(*left)


class PutAmongMany(NamedTuple):
    """A put that was published with others, and whose copies are made with theirs."""

    operation: ReplicateTogether
    place: int

    @property
    def done(self) -> bool:
        """Whether it has its result."""
        return self.operation.done

    @property
    def result(self) -> PutEnd | Exception:
        """How the put ended."""
        ends: list[PutEnd] | Exception = self.operation.result
        return ends if isinstance(ends, Exception) else ends[self.place]


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
