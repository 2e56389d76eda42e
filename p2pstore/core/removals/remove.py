"""Removing keys everywhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from p2pstore.core.core_effects import KnownCopy, Reply
from p2pstore.core.gets.lookup import AfterLookup
from p2pstore.core.removals.floor_budget import WAIT_SECONDS, WAIT_STEP_SECONDS
from p2pstore.errors import Unavailable
from p2pstore.gossip.records import MAX_KEYS_OF_FLOOR, PeerId, SignedRecord
from p2pstore.objects import ZERO_VERSION, Version, key_digest, namespace_digest

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

REMOVE_TIMEOUT_SECONDS: Final = 2.0
DIGESTS_PER_STEP: Final = 512
"""Keys that are hashed, or looked at, at a time."""
KEYS_PER_PUSH: Final = 1_024
RECORDS_PER_PUSH: Final = 40
"""What the receiver of a push checks and forbids at a time: about 5 ms."""


class RemoveOperation(AfterLookup):
    """Remove keys everywhere: write floors, tell holders and home peers at once, gossip tells the rest.

    A key of which no copy is known gets no floor where it is certain that there is none (`_is_nowhere`). A peer that
    has just begun would forget the removal of what only peers hold that it does not know yet.

    The result is a list of whether any copy was known, or `Unavailable` when this peer's clock is wrong. Many keys are
    removed some at a time, one step a tick. Where floors are crowded, steps are put off; `CapacityExceeded` when the
    last is not made in four seconds, and then the first of the keys may be removed already.
    """

    def __init__(self, core: PeerCore, namespace: str, keys: Sequence[str]) -> None:
        super().__init__(core)
        self._keys = deque(keys)
        self._name = namespace
        self._namespace = namespace_digest(namespace)
        self._existed: list[bool] = []
        self._to_remove: deque[tuple[bytes, Version, list[KnownCopy]]] = deque()
        self._to_tell: dict[PeerId, list[tuple[SignedRecord, int]]] = {}
        """Records, each with how many keys it forbids."""
        self._pending: set[int] = set()
        self._next_tag = 0
        self._give_up_at = math.inf

    def _begin_on(self, now: float) -> None:
        """Make some digests; look for copies when there are all."""
        try:
            for _ in range(min(DIGESTS_PER_STEP, len(self._keys))):
                self._digests.append(key_digest(self._keys.popleft(), self._name))
        except ValueError as error:  # a key that is none: nothing was removed yet
            self.finish(error, now)
            return
        if self._keys:
            self._wake_at(now)
            return
        self._look_up(now)

    def _go_on(self, now: float) -> None:
        """Make a step: judge some keys, and write one floor for those of which there are copies."""
        self._give_up_at = min(self._give_up_at, now + WAIT_SECONDS)
        try:
            for _ in range(min(DIGESTS_PER_STEP, len(self._found))):
                if len(self._to_remove) >= MAX_KEYS_OF_FLOOR:
                    break
                self._judge(*self._found[0], now)
                self._found.popleft()
            wanted = min(MAX_KEYS_OF_FLOOR, len(self._to_remove))
            allowed = self.core.floor_budget.may_write(wanted, now) if wanted else 0
            if allowed:
                self._remove(list(islice(self._to_remove, allowed)), now)
        except Unavailable as error:
            self.finish(error, now)
            return
        for _ in range(allowed):
            self._to_remove.popleft()
        waits = wanted > 0 and not allowed
        if waits and now >= self._give_up_at:
            self._push_what_is_due(last=True)
            self.finish(self.core.floor_budget.no_room(), now)
            return
        more = bool(self._to_remove or self._found)
        self._push_what_is_due(last=not more)
        self.wake_at = math.inf
        if more:
            self._wake_at(now + WAIT_STEP_SECONDS if waits else now)
        self._settle(now)

    def _judge(self, digest: bytes, copies: list[KnownCopy], now: float) -> None:
        lookup = self._lookup
        assert lookup is not None
        self.core.timekeeping.check_key(digest, self._namespace, now)
        versions = [copy.record.version for copy in copies]
        if not versions:  # a version in doubt now may be believed later
            others = lookup.at_strangers.get(digest, ())
            versions = self.core.copies.versions_heard_of(digest, self._namespace, now, others)
        held_back = self.core.copies.held_back(digest)
        if held_back is not None:
            versions.append(held_back)
        self._existed.append(bool(versions))
        if versions or not self._is_nowhere(digest, now):
            self._to_remove.append((digest, max(versions, default=ZERO_VERSION), copies))

    def _is_nowhere(self, digest: bytes, now: float) -> bool:
        """Whether there can be no copy of a key of which none is known, by a home's word or this peer's own. A peer
        that has just begun, or has lost all others, cannot tell."""
        core, lookup = self.core, self._lookup
        assert lookup is not None
        if digest in lookup.vouched:
            return True
        if not core.live_peers():
            return core.gossip.contacts.is_empty
        return core.gossip.partitions.vouches(digest, now)

    def _remove(self, keys: list[tuple[bytes, Version, list[KnownCopy]]], now: float) -> None:
        version = self.core.version_above(max(newest for _, newest, _ in keys), now)
        copies = {digest: known for digest, _, known in keys}
        for signed, digests in self.core.floors.write_keys(list(copies), self._namespace, version, now):
            concerned = {self.core.peer_id}
            for digest in digests:
                concerned.update(copy.peer_id for copy in copies[digest] if copy.reachable)
                concerned.update(self.core.homes(digest))
            for peer_id in sorted(concerned - {self.core.peer_id}):
                self._to_tell.setdefault(peer_id, []).append((signed, len(digests)))

    def _push_what_is_due(self, *, last: bool) -> None:
        """Tell every peer of its floors, many at a time; of fewer when they are the `last`."""
        for peer_id, floors in self._to_tell.items():
            while floors:
                keys = count = 0
                while count < min(len(floors), RECORDS_PER_PUSH) and keys < KEYS_PER_PUSH:
                    keys += floors[count][1]
                    count += 1
                if not last and count < RECORDS_PER_PUSH and keys < KEYS_PER_PUSH:
                    break
                self._push(peer_id, [signed for signed, _ in floors[:count]])
                del floors[:count]

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
