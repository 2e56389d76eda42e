"""Giving objects another time to live, wherever they are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import KnownCopy, Reply
from p2pstore.core.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.errors import ProtocolError
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.transfer.messages import DataKind, ExpirySet, SetExpiry

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_TTL_MS: Final = 100 * 365 * 86_400_000
EXPIRY_TIMEOUT_SECONDS: Final = 2.0
"""A holder that has not answered by then keeps the end that its copy has."""


class ExpiryOperation(Operation):
    """Have one version of an object end at another time: here at once, then where others hold it, as far as they can be
    reached. The last writer decides, whether its end is sooner or later. The result is how many other peers did so."""

    def __init__(
        self,
        core: PeerCore,
        digest: bytes,
        version: Version,
        expires_unix_ms: int,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self._digest = digest
        self._version = version
        self._expires_unix_ms = expires_unix_ms
        self._pending: set[int] = set()
        self._done = 0
        self._lookup: LookupOperation | None = None

    def start(self, now: float) -> None:
        core = self.core
        core.set_expiry(self._digest, self._version, self._expires_unix_ms, now)
        # The homes are asked even by a peer that follows all logs: a copy may be as young as this operation.
        self._lookup = LookupOperation(
            core, [self._digest], ask_always=True, on_finish=self._looked
        )
        core.start(self._lookup, now)

    def cancel(self, now: float) -> None:
        super().cancel(now)
        if self._lookup is not None:
            self._lookup.cancel(now)

    def _looked(self, result: Any, now: float) -> None:
        if not self.done:
            self._tell([] if isinstance(result, Exception) else result[0], now)

    def _tell(self, copies: Sequence[KnownCopy], now: float) -> None:
        version = self._version
        request = SetExpiry(self._digest, version.clock, version.writer, self._expires_unix_ms)
        for tag, copy in enumerate(copies):
            if copy.local or not copy.reachable or copy.record.version[:2] != version[:2]:
                continue
            self._pending.add(tag)
            self.ask(tag, copy.peer_id, DataKind.SET_EXPIRY, request, EXPIRY_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._pending.discard(tag)
        self._done += isinstance(reply, ExpirySet) and reply.done
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending:
            self.finish(self._done, now)


def serve_expiry(core: PeerCore, request: SetExpiry, now: float) -> ExpirySet:
    """Change the end of what this peer has in just that version. Raises `ProtocolError` for nonsense."""
    most = int(core.unix(now) * 1000) + 2 * MAX_TTL_MS
    if len(request.digest) != DIGEST_BYTES or not 0 <= request.expires_unix_ms <= most:
        raise ProtocolError("a request for another time to live that makes no sense")
    version = Version(request.clock, request.writer)
    return ExpirySet(core.set_expiry(request.digest, version, request.expires_unix_ms, now))
