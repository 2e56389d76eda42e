"""The table of puts (`decide`): one verdict for each copy of a key that exists; and the questions to holders. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from p2pstore.core.operation import KnownCopy, Operation, Reply
from p2pstore.gossip.records import PeerId
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import Slot, TrailerBody, decode_slot, decode_trailer
from p2pstore.objects import Version
from p2pstore.put_facts import PutFacts
from p2pstore.transfer.data_messages import DataKind, Get, GetItem, Objects, ObjectStatus
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import CheckCopy, CopyChecked
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.core.puts.put_operation import PutOperation
    from p2pstore.ssd_tier.index import ColdEntry

COMPARE_TIMEOUT_SECONDS: Final = 1.5
"""Three holders may be asked in turn within the five seconds that clients wait for progress."""
CHECK_TIMEOUT_SECONDS: Final = 3.0
"""A holder that has not compared its copy by then is believed."""
SLOT_ONLY: Final = 0xFFFF_FFFF
"""A first chunk beyond every object: the answer is slot and trailer without payload."""
MAX_COMPARED: Final = 256
"""Objects of one question."""
GO_ON_PER_STEP: Final = 32
"""Puts that go on with an answer at a time: some milliseconds, as many publish an object then."""

Then = Callable[[Reply, float], None]
"""Called with the holder's answer about that object alone: `Objects` of one item, or what came instead of any."""


class Likeness(Enum):
    """How a copy compares with the value that is put. A tensor has its dtype and shape, too."""

    SAME = auto()
    BYTES = auto()
    """The bytes are the same; the copy has to come here for its dtype, shape or end."""
    OTHER = auto()


class Verdict(Enum):
    """Consequence of a copy for the put."""

    CREATE = auto()
    """Go on, to a version above it."""
    KEEP = auto()
    """The copy stays, the put is `unchanged`."""
    JOIN = auto()
    """The value becomes one more copy of that version; the put is `unchanged`."""
    BRING = auto()
    """Bring that copy here, and decide anew."""
    REFUSE = auto()
    """The copy stays, the put is `kept_existing`."""
    NEED_BYTES = auto()
    """The put came without its bytes, which have to come."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A copy under the put's key: `entry` in this peer's memory, `copy` at another peer, or neither: on this peer's
    SSD. `soft`, `expires_unix_ms`: of a copy that joins it."""

    version: Version
    likeness: Likeness
    expires_unix_ms: int = 0
    soft: bool = False
    entry: ObjectEntry | None = None
    copy: KnownCopy | None = None


def decide(facts: PutFacts, standing: Standing | None) -> Verdict:
    """The table: without a copy, by its likeness, by its place, and by whether the bytes have come."""
    options = facts.options
    if standing is None:
        return Verdict.CREATE
    if standing.likeness is Likeness.OTHER:
        return Verdict.CREATE if options.overwrite else Verdict.REFUSE
    if standing.likeness is Likeness.BYTES:
        return Verdict.BRING
    if standing.entry is not None:
        return Verdict.KEEP
    if facts.reservation:
        return Verdict.JOIN
    wants_memory = options.pin or options.ttl_ms or options.replicas > 1
    return Verdict.NEED_BYTES if wants_memory else Verdict.KEEP


def in_memory(entry: ObjectEntry, facts: PutFacts) -> Standing:
    """The object of this key in this peer's memory."""
    same = _has_bytes(entry.version, entry.length, facts) and _is_described(entry, facts)
    likeness = Likeness.SAME if same else Likeness.OTHER
    return Standing(entry.version, likeness, entry=entry)


def on_ssd(cold: ColdEntry, facts: PutFacts) -> Standing:
    """The object of this key on this peer's SSD alone, whose index knows neither dtype nor shape."""
    likeness = Likeness.OTHER
    if _has_bytes(cold.version, cold.length, facts):
        is_asked = bool(facts.options.dtype or (cold.described and facts.reservation))
        likeness = Likeness.BYTES if is_asked else Likeness.SAME
    return Standing(cold.version, likeness, cold.expires_unix_ms, cold.soft)


def elsewhere(copy: KnownCopy, slot: Slot, trailer: TrailerBody | None, facts: PutFacts) -> Standing:
    """A copy at another peer. One that joins it is kept for speed alone, unless it is pinned here."""
    if not _has_bytes(slot.version, slot.length, facts):
        likeness = Likeness.OTHER
    elif trailer is None or (trailer.dtype and not facts.options.dtype):
        likeness = Likeness.BYTES
    else:
        likeness = Likeness.SAME if _is_described(trailer, facts) else Likeness.OTHER
    expires_unix_ms = trailer.expires_unix_ms if trailer is not None else 0
    return Standing(slot.version, likeness, expires_unix_ms, soft=True, copy=copy)


def _has_bytes(version: Version, length: int, facts: PutFacts) -> bool:
    return version.root == facts.root and length == facts.length


def _is_described(known: ObjectEntry | TrailerBody, facts: PutFacts) -> bool:
    """Whether an object has the dtype and shape of the put's tensor, if it is one."""
    options = facts.options
    described = (known.dtype, tuple(known.shape)) == (options.dtype, tuple(options.shape))
    return described or not options.dtype


class CompareOperation(Operation):
    """Ask one holder for slots and trailers. Requests until the first tick go in one question."""

    def __init__(self, core: PeerCore, peer_id: PeerId) -> None:
        super().__init__(core)
        self._peer_id = peer_id
        self._items: list[GetItem] = []
        self._waiting: deque[Then] = deque()
        self._replies: deque[Reply] = deque()
        self._asked = False
        self._answered = False

    def start(self, now: float) -> None:
        self.set_alarm(now)

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
        self.ask(None, self._peer_id, DataKind.GET, Get(self._items), COMPARE_TIMEOUT_SECONDS)

    def answered(self, about: None, reply: Reply, now: float) -> None:
        self._answered = True
        if isinstance(reply, Objects):
            self._replies.extend(Objects([each]) for each in reply.items)
        else:
            self._replies.extend([reply] * len(self._items))
        self._go_on(GO_ON_PER_STEP, now)

    def cancel(self, now: float) -> None:
        """Fail the questions that are still open."""
        self._go_on(len(self._waiting), now)

    def _go_on(self, count: int, now: float) -> None:
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()(self._replies.popleft() if self._replies else None, now)
        if not self._waiting:
            self.finish(None, now)
        elif not self.done:
            self.set_alarm(now)


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


class CompareCopies(Operation):
    """Ask holders in turn what they have under a put's key. The result is a `Standing`, None without one."""

    def __init__(self, put: PutOperation, namespace: bytes, copies: list[KnownCopy]) -> None:
        super().__init__(put.core)
        self._put = put
        self._digest = put.digest
        self._namespace = namespace
        self._left = copies
        self._rival: Standing | None = None
        """A copy of another value, while its holder compares it with its checksums."""

    def start(self, now: float) -> None:
        if self._left:
            self.core.comparisons.ask(self._left[0], now, self._compared)
        else:
            self.finish(None, now)

    def _compared(self, reply: Reply, now: float) -> None:
        if self.done:
            return
        copy = self._left.pop(0)
        item = reply.items[0] if isinstance(reply, Objects) and len(reply.items) == 1 else None
        slot = None
        if item is not None and item.status == ObjectStatus.OK:
            slot = decode_slot(item.slot)
        if (
            item is None
            or slot is None
            or slot.digest != self._digest
            or not self.core.clock.observe(slot.version.clock, self.core.believed_unix(now))
        ):
            self.core.holders.silent(self._digest, copy, reply, now)
            self.start(now)
        elif self._is_void(slot.version):
            self.start(now)
        else:
            found = elsewhere(copy, slot, decode_trailer(item.trailer), self._put.facts)
            if decide(self._put.facts, found) is not Verdict.REFUSE:
                self.finish(found, now)
            else:
                self._rival = found
                request = CheckCopy(self._digest)
                self.ask(None, copy.peer_id, DataKind.CHECK_COPY, request, CHECK_TIMEOUT_SECONDS)

    def _is_void(self, version: Version) -> bool:
        """Whether the version that a holder has was removed, or may have been: it does not stand in a put's way."""
        floors = self.core.gossip.cluster_records.floors
        return floors.forbids(
            self._digest, self._namespace, version
        ) or self.core.earlier_life.distrusts(self._put, version)

    def answered(self, about: None, reply: Reply, now: float) -> None:
        """Another value stands in the put's way, unless its holder finds that it is spoilt. (A holder of a version
        that does not know the question refuses to answer.)"""
        rival, self._rival = self._rival, None
        assert rival is not None
        assert rival.copy is not None
        if isinstance(reply, CopyChecked) and not reply.good:
            code = int(Code.NO_SUCH_KEY)
            gone = HolderReport(rival.copy.member, code, "", "", reply.incarnation, reply.sequence)
            self.core.holders.failed(self._digest, gone, now)
            self.start(now)
        else:
            self.finish(rival, now)
