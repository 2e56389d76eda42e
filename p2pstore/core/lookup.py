"""Finding copies of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import (
    KnownCopy,
    Reply,
)
from p2pstore.core.operation import Operation
from p2pstore.errors import (
    ProtocolError,
)
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, decode_location, member_of
from p2pstore.objects import DIGEST_BYTES
from p2pstore.transfer.messages import (
    DataKind,
    Locations,
    Lookup,
)

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

LOOKUP_TIMEOUT_SECONDS: Final = 1.0
WAIT_FIRST_RETRY_SECONDS: Final = 0.05
WAIT_LAST_RETRY_SECONDS: Final = 2.0
"""Who waits hears by gossip as well: homes are asked again for what gossip has not brought."""
DIGESTS_PER_LOOKUP: Final = 4_096


class LookupOperation(Operation):
    """Find copies of keys: in what this peer knows, else by asking the keys' home peers once.

    The result is a list, per digest, of `KnownCopy` (best first). With `wait_seconds` it goes on until every
    key was found or the time is over: it looks again at any news of a missing key, and now and then
    asks the homes again. `exclude` are members that just failed for the caller. `namespace` is the digest
    of the namespace of all keys, where it is known: what a flush has removed is left out.
    """

    def __init__(
        self,
        core: PeerCore,
        digests: Sequence[bytes],
        *,
        wait_seconds: float = 0.0,
        exclude: frozenset[int] = frozenset(),
        namespace: bytes | None = None,
        ask_homes: bool = True,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self.digests = list(digests)
        self._wait_seconds = wait_seconds
        self._exclude = exclude
        self._namespace = namespace
        self._ask_homes = ask_homes
        self._pending: set[int] = set()
        self._asked: dict[int, tuple[PeerId, list[bytes]]] = {}
        self._retry_seconds = WAIT_FIRST_RETRY_SECONDS
        self._ask_again_at = float("inf")
        self._wait_until = 0.0
        self._missed: dict[bytes, None] = {}
        """Keys not found yet, in order."""

    def start(self, now: float) -> None:
        self._wait_until = now + self._wait_seconds
        self._missed = dict.fromkeys(
            digest for digest in self.digests if not self._usable(digest, now)
        )
        if self._missed and self._wait_seconds > 0:
            self.core.await_keys(self, list(self._missed))
        self._ask(now)

    def finish(self, result: Any, now: float) -> None:
        self.core.await_no_more(self, self.digests)
        super().finish(result, now)

    def heard_of(self, digest: bytes, now: float) -> None:
        if digest in self._missed and self._usable(digest, now):
            del self._missed[digest]
            if not self._missed:
                self._settle(now)

    @property
    def homes_asked(self) -> int:
        """How many peers were asked for holders."""
        return len({home for home, _ in self._asked.values()})

    def _usable(self, digest: bytes, now: float) -> list[KnownCopy]:
        return [
            copy
            for copy in self.core.known_copies(digest, now, self._namespace)
            if copy.reachable and copy.member not in self._exclude
        ]

    def _ask(self, now: float) -> None:
        self._look_again(now)
        by_home: dict[PeerId, list[bytes]] = {}
        if self._ask_homes:
            for digest in self._missed:
                for home in self.core.homes(digest):
                    if member_of(home) not in self._exclude:
                        by_home.setdefault(home, []).append(digest)
        self._ask_again_at = now + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, WAIT_LAST_RETRY_SECONDS)
        for home, digests in by_home.items():
            for start in range(0, len(digests), DIGESTS_PER_LOOKUP):
                some = digests[start : start + DIGESTS_PER_LOOKUP]
                tag = len(self._asked)
                self._asked[tag] = (home, some)
                self._pending.add(tag)
                self.ask(tag, home, DataKind.LOOKUP, Lookup(b"".join(some)), LOOKUP_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        home, digests = self._asked[tag]
        self._pending.discard(tag)
        if isinstance(reply, Locations):
            self.core.learn_locations(digests, reply, now)
        elif reply is None:
            self.core.peer_failed(home, now)
        self._settle(now)

    def wake(self, now: float) -> None:
        if not self._pending and now >= self._ask_again_at:
            self._ask(now)
        else:
            self._settle(now)

    def _settle(self, now: float) -> None:
        if self.done:
            return
        self._look_again(now)
        if not self._missed or (not self._pending and now >= self._wait_until):
            self.finish([self._best(digest, now) for digest in self.digests], now)
        elif now < self._wait_until:
            next_ask = float("inf") if self._pending else self._ask_again_at
            self.wake_at = min(next_ask, self._wait_until)
            self.core.set_alarm(self)
        else:
            self.wake_at = float("inf")

    def _look_again(self, now: float) -> None:
        for digest in [digest for digest in self._missed if self._usable(digest, now)]:
            del self._missed[digest]

    def _best(self, digest: bytes, now: float) -> list[KnownCopy]:
        return [
            copy
            for copy in self.core.known_copies(digest, now, self._namespace)
            if copy.member not in self._exclude
        ]


def split_digests(packed: bytes) -> list[bytes]:
    """Packed digests, one by one. Raises `ProtocolError` when they are not whole."""
    if len(packed) % DIGEST_BYTES:
        raise ProtocolError(f"packed digests of {len(packed)} bytes")
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]


def check_holding_record(packed: bytes, digest: bytes) -> bool:
    """Whether a location record in an answer is one of the key that was asked for."""
    return (
        len(packed) == LOCATION_BYTES
        and decode_location(packed).digest == digest
        and not decode_location(packed).removed
    )
