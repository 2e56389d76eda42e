"""Giving objects another time to live, wherever they are held."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.core_effects import Reply
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import PeerId, writer_of
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ExpiryItem, ExpirySet, SetExpiry

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_TTL_MS: Final = 100 * 365 * 86_400_000
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
    What is asked for until its first tick is done together. The result is how many copies other peers changed."""

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core)
        self._items: dict[bytes, ExpiryItem] = {}
        self._waiting: list[Then] = []
        self._pending: set[int] = set()
        self._changed = 0
        self._lookup: LookupOperation | None = None

    def start(self, now: float) -> None:
        self.wake_at = now
        self.core.operations.set_alarm(self)

    @property
    def takes_more(self) -> bool:
        return not self.done and self._lookup is None and len(self._items) < MAX_TOGETHER

    def add(self, item: ExpiryItem, then: Then) -> None:
        """One more object, while it `takes_more`."""
        self._items[item.digest] = item
        self._waiting.append(then)

    def wake(self, now: float) -> None:
        self.wake_at = float("inf")
        # The homes are asked even by a peer that follows all logs: a copy may be as young as this operation.
        self._lookup = LookupOperation(
            self.core, list(self._items), ask_always=True, on_finish=self._looked
        )
        self.core.operations.start(self._lookup, now)

    def cancel(self, now: float) -> None:
        super().cancel(now)
        if self._lookup is not None:
            self._lookup.cancel(now)

    def finish(self, result: Any, now: float) -> None:
        super().finish(result, now)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(now)

    def _looked(self, result: Any, now: float) -> None:
        if self.done:
            return
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
                tag, request = len(self._pending), SetExpiry(items[start : start + MAX_EXPIRIES])
                self._pending.add(tag)
                self.ask(tag, peer_id, DataKind.SET_EXPIRY, request, EXPIRY_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._pending.discard(tag)
        if isinstance(reply, ExpirySet):
            self._changed += sum(map(bool, reply.done))
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending:
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
