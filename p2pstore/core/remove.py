"""Removing keys, and whole namespaces, everywhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from p2pstore.core.floors import WAIT_SECONDS, WAIT_STEP_SECONDS, swept
from p2pstore.core.gets.lookup import AfterLookup
from p2pstore.core.operation import InSteps, KnownCopy, Operation, Reply
from p2pstore.errors import Unavailable
from p2pstore.gossip.records import MAX_KEYS_OF_FLOOR, SCOPE_NAMESPACE, PeerId, SignedRecord
from p2pstore.objects import ZERO_VERSION, Version, key_digest, namespace_digest
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ClusterRecords, RecordsTaken
from p2pstore.wire import Failure

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

REMOVE_TIMEOUT_SECONDS: Final = 2.0
DIGESTS_PER_STEP: Final = 512
"""Keys that are hashed, or looked at, at a time."""
KEYS_PER_PUSH: Final = 1_024
RECORDS_PER_PUSH: Final = 40
"""Records that the receiver of a push checks and applies at a time, in about 5 ms."""


def pushed(records: Sequence[SignedRecord]) -> ClusterRecords:
    """Cluster records for one peer, which is told of them ahead of gossip."""
    return ClusterRecords([each.body for each in records], [each.signature for each in records])


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
            self.set_alarm(now)
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
            self.set_alarm(now + WAIT_STEP_SECONDS if waits else now)
        self._settle(now)

    def _judge(self, digest: bytes, copies: list[KnownCopy], now: float) -> None:
        lookup = self._lookup
        assert lookup is not None
        self.core.timekeeping.check_key(digest, self._namespace, now)
        versions = [copy.record.version for copy in copies]
        if not versions:  # a version in doubt now may be believed later
            others = lookup.at_unknown_members.get(digest, ())
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
                request = pushed([signed for signed, _ in floors[:count]])
                self.ask(None, peer_id, DataKind.CLUSTER_RECORDS, request, REMOVE_TIMEOUT_SECONDS)
                del floors[:count]

    def answered(self, about: None, reply: Reply, now: float) -> None:
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self.asked and not self._to_remove and not self._found:
            self.finish(self._existed, now)


PUSHES_AT_ONCE: Final = 32
MAX_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class FlushEnd:
    """The outcome of a flush. `told` other peers have dropped the namespace's objects; those of `not_told`,
    which did not answer in time, will when they hear of it by gossip."""

    told: int
    not_told: tuple[PeerId, ...]


class FlushOperation(Operation):
    """Remove all objects of a namespace, wherever they are: one floor above everything that this peer has
    heard of, pushed to all live peers at once, 32 at a time. Each answers how far its clock was: where
    that was ahead of the floor, a second floor follows that covers what was put there.

    The result is a `FlushEnd`; `Unavailable` when this peer's clock is wrong; `CapacityExceeded` when there is no room
    for a floor, which other peers would not take in either. It comes when every live peer has withdrawn what it held,
    or the time is over. Later puts, the same bytes under the same keys too, are above the floor.
    """

    def __init__(self, core: PeerCore, namespace: str, timeout_seconds: float = 10.0) -> None:
        super().__init__(core)
        self._name = namespace_digest(namespace)
        self._deadline = timeout_seconds
        self._floor: SignedRecord
        self._version = ZERO_VERSION
        self._newest_clock = 0
        self._rounds = 0
        self._to_tell: list[PeerId] = []
        self._silent: list[PeerId] = []
        self._told = 0

    def start(self, now: float) -> None:
        self._deadline += now
        try:
            self.core.timekeeping.check_all(now)
        except Unavailable as error:
            self.finish(error, now)
            return
        if self.core.floor_budget.full:
            self.finish(self.core.floor_budget.no_room(), now)
            return
        self._begin_round(self.core.gossip.floors.newest_heard, now)
        if not self.done:
            self.set_alarm(self._deadline)

    def _begin_round(self, newest_clock: int, now: float) -> None:
        self._rounds += 1
        try:
            self._version = self.core.version_above(Version(newest_clock, 0), now)
        except Unavailable as error:
            self.finish(error, now)
            return
        self._floor = self.core.floors.write(self._name, self._version, now, scope=SCOPE_NAMESPACE)
        self._to_tell = self.core.live_peers()
        self._silent, self._told = [], 0
        self.run(InSteps(self.core, swept(self.core)), lambda _, at: self._proceed(at), now)
        self._proceed(now)

    def answered(self, peer_id: PeerId, reply: Reply, now: float) -> None:
        if reply is None or isinstance(reply, Failure):
            self._silent.append(peer_id)
        else:
            self._told += 1
            if isinstance(reply, RecordsTaken) and self.core.clock.accepts(
                reply.newest_clock, self.core.believed_unix(now)
            ):
                self._newest_clock = max(self._newest_clock, reply.newest_clock)
        self._proceed(now)

    def wake(self, now: float) -> None:
        if now >= self._deadline:
            self._end(now)

    def _proceed(self, now: float) -> None:
        request = pushed([self._floor])
        while self._to_tell and len(self.asked) < PUSHES_AT_ONCE:
            peer_id, seconds = self._to_tell.pop(), max(0.0, self._deadline - now)
            self.ask(peer_id, peer_id, DataKind.CLUSTER_RECORDS, request, seconds)
        if not self.asked and not self.parts:
            self._end_round(now)

    def _end_round(self, now: float) -> None:
        if self.done:
            return
        if self._rounds < MAX_ROUNDS and self._newest_clock >= self._version.clock:
            self._begin_round(self._newest_clock, now)
        else:
            self._end(now)

    def _end(self, now: float) -> None:
        not_told = (*self._silent, *self.asked.values(), *self._to_tell)
        self.finish(FlushEnd(self._told, not_told), now)
