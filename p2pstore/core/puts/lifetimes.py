"""Pins and times to live of objects: changed here and at every peer with the same version. Each copy has them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from p2pstore.core.gets.lookup import AfterLookup, LookupOperation
from p2pstore.core.operation import KnownCopy, Operation, Reply
from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import PeerId, writer_of
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.put_facts import MAX_TTL_MS
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ExpiryItem, ExpirySet, PinItem, PinsSet, SetExpiry, SetPins

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PIN_TIMEOUT_SECONDS: Final = 2.0
"""A holder that has not answered by then keeps the pin that its copy has."""
MAX_PINS: Final = 64
"""Objects per message: a holder's step of some milliseconds, as each pin is written to a trailer and announced."""
TOLD_PER_STEP: Final = 1_024


class PinEnd(NamedTuple):
    """The end for one object: whether this peer's memory has it, whether any peer has it, how many copies have the pin
    now, and how many are known."""

    here: bool
    found: bool
    copies: int
    known: int


class PinOperation(AfterLookup):
    """Pin some objects, or unpin them: here at once, then wherever the same version can be reached; one on an SSD alone
    when it comes back to memory. `soft_seconds`: how long a soft pin lasts; 0 for as long as usual.

    The result is a list of `PinEnd`, or `Unavailable` when this peer's clock is wrong. A cancelled pin is in force
    here.
    """

    def __init__(
        self, core: PeerCore, digests: Sequence[bytes], pin: Pin, soft_seconds: float = 0.0
    ) -> None:
        super().__init__(core)
        self._digests = list(dict.fromkeys(digests))
        self._asked_for = list(digests)
        self._pin = pin
        self._soft_seconds = soft_seconds
        self._here: dict[bytes, Version] = {}
        self._cold: dict[bytes, Version] = {}
        self._known_anywhere: set[bytes] = set()
        self._copies: Counter[bytes] = Counter()
        self._known: Counter[bytes] = Counter()
        self._items: dict[PeerId, list[PinItem]] = {}
        self._to_pin = deque(self._digests)

    def _begin_on(self, now: float) -> None:
        """Pin some more that are here; when all are, look for those that are elsewhere."""
        core = self.core
        for _ in range(min(MAX_PINS, len(self._to_pin))):
            digest = self._to_pin.popleft()
            entry = core.objects.find(digest, now)
            if entry is not None:
                core.objects.set_pin(entry, self._pin, self._soft_seconds, now, firm=True)
                self._here[digest] = entry.version
                self._copies[digest] = self._known[digest] = 1
            elif (cold := core.cold.find_only_here(digest, now)) is not None:
                core.cold.set_pin(cold, int(self._pin), now)
                self._cold[digest] = cold.version
                self._copies[digest] = self._known[digest] = 1
        if self._to_pin:
            self.set_alarm(now)
            return
        self._look_up(now, ask_always=not core.gossip.partitions.mode.knows_all)

    def _go_on(self, now: float) -> None:
        """Take in where some more objects are; then ask all that hold the version that is here, or else the newest."""
        for _ in range(min(TOLD_PER_STEP, len(self._found))):
            self._take_in(*self._found.popleft())
        if self._found:
            self.set_alarm(now)
            return
        self.wake_at = math.inf
        soft_ms = int(self._soft_seconds * 1000)
        for peer_id, of_peer in sorted(self._items.items()):
            for start in range(0, len(of_peer), MAX_PINS):
                some = of_peer[start : start + MAX_PINS]
                request = SetPins(some, int(self._pin), soft_ms)
                self.ask(some, peer_id, DataKind.SET_PINS, request, PIN_TIMEOUT_SECONDS)
        self._settle(now)

    def _take_in(self, digest: bytes, copies: Sequence[KnownCopy]) -> None:
        if copies:
            self._known_anywhere.add(digest)
        newest = self._here.get(digest) or self._cold.get(digest)
        if newest is None and copies:
            newest = copies[0].record.version
        for copy in copies:
            version = copy.record.version
            same = newest is not None and _same(version, newest)
            if copy.local or not same:
                continue
            self._known[digest] += 1
            if copy.reachable:
                item = PinItem(digest, version.clock, version.writer)
                self._items.setdefault(copy.peer_id, []).append(item)

    def answered(self, items: list[PinItem], reply: Reply, now: float) -> None:
        if isinstance(reply, PinsSet):
            for item, done in zip(items, reply.done, strict=False):
                self._copies[item.digest] += bool(done)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self.asked and not self._found:
            here, found = self._here, self._known_anywhere
            copies, known = self._copies, self._known
            ends = [
                PinEnd(digest in here, digest in here or digest in found, copies[digest], known[digest])
                for digest in self._asked_for
            ]
            self.finish(ends, now)


def serve_pins(core: PeerCore, request: SetPins, now: float) -> PinsSet:
    """Pin, or unpin, the objects that this peer has in just that version. Raises `ProtocolError` for nonsense."""
    if (
        len(request.items) > MAX_PINS
        or request.pin not in (Pin.NONE, Pin.SOFT, Pin.HARD)
        or not 0 <= request.soft_ms <= MAX_TTL_MS
        or any(len(item.digest) != DIGEST_BYTES for item in request.items)
    ):
        raise ProtocolError("a request to pin that makes no sense")
    done = bytearray()
    for item in request.items:
        entry = core.objects.find(item.digest, now)
        version = Version(item.clock, item.writer)
        if entry is None:
            cold = core.cold.find_only_here(item.digest, now)
            if cold is not None and _same(cold.version, version):
                core.cold.set_pin(cold, request.pin, now)
            done.append(cold is not None and _same(cold.version, version))
            continue
        if _same(entry.version, version):
            core.objects.set_pin(entry, Pin(request.pin), request.soft_ms / 1000, now)
        done.append(_same(entry.version, version))
    return PinsSet(bytes(done))


def _same(one: Version, other: Version) -> bool:
    return (one.clock, one.writer) == (other.clock, other.writer)


EXPIRY_TIMEOUT_SECONDS: Final = 2.0
"""A holder that has not answered by then keeps the end that its copy has."""
MAX_EXPIRIES: Final = 64
"""Items of one message: the holder writes each to a trailer, some milliseconds in all."""
MAX_TOGETHER: Final = 512
"""Objects of one operation, whose holders are gone through in one step."""

Then = Callable[[float], None]
"""Called with the time when the holders have answered, or will not."""


class ExpiryOperation(Operation):
    """Have objects end at other times, where others hold that version, as far as they can be reached. The last put
    decides; to have an object end sooner, it must be one of the peer that wrote the version (another one overwrites).
    Requests until its first tick go together. The result is how many copies other peers changed."""

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core)
        self._items: dict[bytes, ExpiryItem] = {}
        self._waiting: list[Then] = []
        self._changed = 0
        self._asks = False

    def start(self, now: float) -> None:
        self.set_alarm(now)

    @property
    def takes_more(self) -> bool:
        return not self.done and not self._asks and len(self._items) < MAX_TOGETHER

    def add(self, item: ExpiryItem, then: Then) -> None:
        """One more object, while it `takes_more`."""
        self._items[item.digest] = item
        self._waiting.append(then)

    def wake(self, now: float) -> None:
        self.wake_at, self._asks = math.inf, True
        # The homes are asked even by a peer that follows all logs: a copy may be as young as this operation.
        self.run(LookupOperation(self.core, list(self._items), ask_always=True), self._looked, now)

    def finish(self, result: Any, now: float) -> None:
        super().finish(result, now)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(now)

    def _looked(self, result: Any, now: float) -> None:
        found = [] if isinstance(result, Exception) else result
        by_holder: dict[PeerId, list[ExpiryItem]] = {}
        for item, copies in zip(self._items.values(), found, strict=False):
            for copy in copies:
                version = copy.record.version
                same = (version.clock, version.writer) == (item.clock, item.writer)
                if same and copy.reachable and not copy.local:
                    by_holder.setdefault(copy.peer_id, []).append(item)
        for peer_id, items in by_holder.items():
            for start in range(0, len(items), MAX_EXPIRIES):
                request = SetExpiry(items[start : start + MAX_EXPIRIES])
                self.ask(None, peer_id, DataKind.SET_EXPIRY, request, EXPIRY_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, about: None, reply: Reply, now: float) -> None:
        if isinstance(reply, ExpirySet):
            self._changed += sum(map(bool, reply.done))
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self.asked:
            self.finish(self._changed, now)


class Expiries:
    """Changes of times to live: those of one step go to their holders together."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._open: ExpiryOperation | None = None

    def change(
        self, digest: bytes, version: Version, expires_unix_ms: int, now: float, then: Then
    ) -> None:
        """Have a version end at that time: here at once, and soon where others hold it."""
        self._core.objects.set_expiry(digest, version, expires_unix_ms, now)
        if self._open is None or not self._open.takes_more:
            self._open = ExpiryOperation(self._core)
            self._core.operations.start(self._open, now)
        self._open.add(ExpiryItem(digest, version.clock, version.writer, expires_unix_ms), then)


def serve_expiry(core: PeerCore, sender: PeerId, request: SetExpiry, now: float) -> ExpirySet:
    """Change the ends of what this peer has in just these versions: to a sooner one for the peer that wrote the version
    only, as that erases the object. Raises `ProtocolError` for nonsense."""
    most = int(core.unix(now) * 1000) + 2 * MAX_TTL_MS
    if len(request.items) > MAX_EXPIRIES or any(
        len(item.digest) != DIGEST_BYTES or not 0 <= item.expires_unix_ms <= most
        for item in request.items
    ):
        raise ProtocolError("a request for other times to live that makes no sense")
    writes_as = _written_by(core, sender)
    done = bytearray()
    for item in request.items:
        version = Version(item.clock, item.writer)
        refused = item.writer != writes_as and _ends_sooner(core, item, now)
        done.append(
            not refused and core.objects.set_expiry(item.digest, version, item.expires_unix_ms, now)
        )
    return ExpirySet(bytes(done))


def _written_by(core: PeerCore, sender: PeerId) -> int:
    """The writer that versions of this peer's have; -1 when another living member could be meant by that as well."""
    writer = writer_of(sender)
    named = (state for state in core.gossip.membership.live() if state.member & 0xFFFF == writer)
    return writer if len(list(islice(named, 2))) < 2 else -1


def _ends_sooner(core: PeerCore, item: ExpiryItem, now: float) -> bool:
    """Whether an object would end before the time that its copy here has."""
    here = core.objects.find(item.digest, now) or core.cold.find(item.digest, now)
    if here is None or not item.expires_unix_ms:
        return False
    return not here.expires_unix_ms or item.expires_unix_ms < here.expires_unix_ms
