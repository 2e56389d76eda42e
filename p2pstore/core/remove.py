"""Removing keys everywhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import KnownCopy, Reply
from p2pstore.core.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.objects import Version, key_digest, namespace_digest

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

REMOVE_TIMEOUT_SECONDS: Final = 2.0
FLOORS_PER_PUSH: Final = 64
"""Signature checks that the receiver makes at a time: about 5 ms."""
DIGESTS_PER_STEP: Final = 512
"""Keys that are hashed, or looked at, at a time."""
KEYS_PER_STEP: Final = 24
"""Floors written and signed at a time, 0.1 to 0.2 ms each."""


class RemoveOperation(Operation):
    """Remove keys everywhere: write floors, tell holders and home peers at once, gossip tells the rest.

    The result is a list of whether any copy was known. Many keys are removed some at a time, one step a
    tick.
    """

    def __init__(self, core: PeerCore, namespace: str, keys: Sequence[str]) -> None:
        super().__init__(core)
        self._keys = deque(keys)
        self._name = namespace
        self._digests: list[bytes] = []
        self._found: deque[tuple[bytes, list[KnownCopy]]] = deque()
        self._namespace = namespace_digest(namespace)
        self._lookup: LookupOperation | None = None
        self._existed: list[bool] = []
        self._to_remove: deque[tuple[bytes, Version, list[KnownCopy]]] = deque()
        self._to_tell: dict[PeerId, list[SignedRecord]] = {}
        self._pending: set[int] = set()
        self._next_tag = 0

    def start(self, now: float) -> None:
        self._look_on(now)

    def _look_on(self, now: float) -> None:
        """Make some digests; look for copies when there are all."""
        for _ in range(min(DIGESTS_PER_STEP, len(self._keys))):
            self._digests.append(key_digest(self._keys.popleft(), self._name))
        if self._keys:
            self._wake_soon(now)
            return
        self._lookup = LookupOperation(self.core, self._digests, on_finish=self._looked)
        self.core.start(self._lookup, now)

    def _wake_soon(self, now: float) -> None:
        self.wake_at = now
        self.core.set_alarm(self)

    def cancel(self, now: float) -> None:
        """What was removed by now stays removed."""
        super().cancel(now)
        if self._lookup is not None:
            self._lookup.cancel(now)

    def _looked(self, result: Any, now: float) -> None:
        if self.done:
            return
        if isinstance(result, Exception):
            self.finish(result, now)
            return
        self._found.extend(zip(self._digests, result, strict=True))
        self._remove_on(now)

    def wake(self, now: float) -> None:
        if self._lookup is None:
            self._look_on(now)
        else:
            self._remove_on(now)

    def _remove_on(self, now: float) -> None:
        for _ in range(min(DIGESTS_PER_STEP, len(self._found))):
            if len(self._to_remove) >= KEYS_PER_STEP:
                break
            self._judge(*self._found.popleft())
        for _ in range(min(KEYS_PER_STEP, len(self._to_remove))):
            self._remove(*self._to_remove.popleft(), now)
        more = bool(self._to_remove or self._found)
        for peer_id, records in list(self._to_tell.items()):
            while len(records) >= FLOORS_PER_PUSH or (records and not more):
                self._push(peer_id, records[:FLOORS_PER_PUSH])
                del records[:FLOORS_PER_PUSH]
        self.wake_at = math.inf
        if more:
            self._wake_soon(now)
        self._settle(now)

    def _judge(self, digest: bytes, copies: list[KnownCopy]) -> None:
        versions = [copy.record.version for copy in copies]
        held_back = self.core.held_back(digest)
        if held_back is not None:
            versions.append(held_back)
        self._existed.append(bool(versions))
        if versions:
            self._to_remove.append((digest, max(versions), copies))

    def _remove(self, digest: bytes, newest: Version, copies: list[KnownCopy], now: float) -> None:
        version = self.core.version_above(newest, now)
        signed = self.core.floors.write(digest, version, now, namespace=self._namespace)
        concerned = {copy.peer_id for copy in copies if copy.reachable}
        for peer_id in sorted(concerned.union(self.core.homes(digest)) - {self.core.peer_id}):
            self._to_tell.setdefault(peer_id, []).append(signed)

    def _push(self, peer_id: PeerId, records: list[SignedRecord]) -> None:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._pending.add(tag)
        self.core.floors.push(self.number, tag, peer_id, records, REMOVE_TIMEOUT_SECONDS)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._pending.discard(tag)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending and not self._to_remove and not self._found:
            self.finish(self._existed, now)
