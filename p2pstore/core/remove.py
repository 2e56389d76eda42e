"""Removing keys everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import (
    Reply,
)
from p2pstore.core.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId
from p2pstore.objects import key_digest, namespace_digest

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

REMOVE_TIMEOUT_SECONDS: Final = 2.0
FLOORS_PER_PUSH: Final = 64
"""Signature checks that the receiver makes at a time: about 5 ms."""


class RemoveOperation(Operation):
    """Remove keys everywhere: write floors, tell holders and home peers at once, gossip tells the rest.

    The result is a list of whether any copy was known.
    """

    def __init__(self, core: PeerCore, namespace: str, keys: Sequence[str]) -> None:
        super().__init__(core)
        self._digests = [key_digest(key, namespace) for key in keys]
        self._namespace = namespace_digest(namespace)
        self._existed: list[bool] = []
        self._pending: set[int] = set()

    def start(self, now: float) -> None:
        self.core.start(LookupOperation(self.core, self._digests, on_finish=self._found), now)

    def _found(self, result: Any, now: float) -> None:
        if self.done:
            return
        if isinstance(result, Exception):
            self.finish(result, now)
            return
        self._existed = [bool(copies) for copies in result]
        targets: dict[PeerId, list[Any]] = {}
        for digest, copies in zip(self._digests, result, strict=True):
            if not copies:
                continue
            newest = max(copy.record.version for copy in copies)
            version = self.core.version_above(newest, now)
            signed = self.core.floors.write(digest, version, now, namespace=self._namespace)
            concerned = {copy.peer_id for copy in copies if copy.reachable} | set(
                self.core.homes(digest)
            )
            for peer_id in concerned - {self.core.peer_id}:
                targets.setdefault(peer_id, []).append(signed)
        pieces = [
            (peer_id, records[start : start + FLOORS_PER_PUSH])
            for peer_id, records in targets.items()
            for start in range(0, len(records), FLOORS_PER_PUSH)
        ]
        for tag, (peer_id, records) in enumerate(pieces):
            self._pending.add(tag)
            self.core.floors.push(self.number, tag, peer_id, records, REMOVE_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._pending.discard(tag)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending:
            self.finish(self._existed, now)
