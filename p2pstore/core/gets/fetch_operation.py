"""Bringing an object into this peer's memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from p2pstore.core.gets.lookup import PATIENCE_SHARE, LookupOperation
from p2pstore.core.operation import KnownCopy, LoadObject, Operation, PullObject, PullOutcome
from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.gossip.records import Member, Tier
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_HOPS: Final = 8
"""From keeper to keeper of a hot object: enough for hundreds of readers at the same moment."""


class FetchOperation(Operation):
    """Bring one object into this peer's memory: from its SSD, else from other peers. The result is its `ObjectEntry`.

    Callers that want one absent object share one fetch (`Operations.fetch`). With `source`, only that peer is asked,
    and `minimum` is the version it promised. With `only_here`, no peer is asked.
    """

    def __init__(
        self,
        core: PeerCore,
        digest: bytes,
        *,
        soft: bool = True,
        progress_seconds: float = 5.0,
        source: KnownCopy | None = None,
        minimum: Version = ZERO_VERSION,
        only_here: bool = False,
    ) -> None:
        super().__init__(core)
        self.digest = digest
        self.soft = soft
        self.minimum = minimum
        self.only_here = only_here
        self.shared_by = 1
        self.proof = b""
        """The writer's proof, passed on by the peer that asked to have the object kept here."""
        self.brought: tuple[int, str] = (0, "")
        """From which member the object came, and how; nothing when it was here already."""
        self._progress_seconds = progress_seconds
        self._source = source
        self._failed: set[int] = set()
        self._lookup: LookupOperation | None = None
        self._rounds = 0
        self._loads = False
        self._all_said_gone = True
        self._asked: dict[Member, KnownCopy] = {}
        self._sent_on_by: dict[Member, KnownCopy] = {}
        """Holders that had others serve a hot object."""
        self._hops = 0
        self._why = ""

    def start(self, now: float) -> None:
        if self._source is not None:
            self._pull([self._source])
            return
        self._look(now)

    def _look(self, now: float) -> None:
        self._rounds += 1
        exclude = frozenset(self._failed)
        self._lookup = LookupOperation(
            self.core,
            [self.digest],
            exclude=exclude,
            ask_homes=not self.only_here,
            patience_seconds=PATIENCE_SHARE * self._progress_seconds,
        )
        self.run(self._lookup, self._found, now)

    def _found(self, result: Any, now: float) -> None:
        if isinstance(result, Exception):
            self.finish(result, now)
            return
        entry = self.core.objects.find(self.digest, now)
        if entry is not None:
            self.finish(entry, now)
            return
        cold = None if self._loads else self.core.cold.find(self.digest, now)
        if cold is not None:
            self._loads = True
            self.soft = cold.soft
            self._rounds -= 1  # when that fails, as many are left as without an SSD
            self.core.emit(LoadObject(self.number, self.digest))
            return
        copies = [copy for copy in result[0] if not copy.local and not self.only_here]
        usable = [copy for copy in copies if copy.reachable]
        if usable:
            self._pull(usable)
        elif copies or not self._all_said_gone:
            self.finish(unavailable(len(copies) + len(self._failed), self._why), now)
        else:
            assert self._lookup is not None
            self.finish(self._lookup.absence(self.digest), now)

    def _pull(self, copies: Sequence[KnownCopy], *, insist: bool = False) -> None:
        self._asked.update((copy.member, copy) for copy in copies)
        self.core.emit(
            PullObject(self.number, self.digest, tuple(copies), self._progress_seconds, insist)
        )

    def _is_sent_on(self, outcome: PullOutcome) -> bool:
        """Whether another peer is asked now: a keeper of the hot object, or the holder that named these."""
        for failure in outcome.failures:
            source = self._asked.get(failure.member)
            if not failure.keep or source is None:
                continue
            self._sent_on_by[failure.member] = source
            keepers = [each for each in failure.others if each not in self._failed]
            self.core.rng.shuffle(keepers)
            for keeper in keepers if self._hops < MAX_HOPS else ():
                state = self.core.gossip.membership.resolve(keeper)
                if state is not None and keeper != self.core.member:
                    record = replace(source.record, slot=0, tier=Tier.DRAM)
                    self._hops += 1
                    self._pull([KnownCopy(keeper, state.peer_id, record, reachable=True)])
                    return True
        if self._sent_on_by:
            sources, self._sent_on_by = list(self._sent_on_by.values()), {}
            self._pull(sources, insist=True)
            return True
        return False

    def pulled(self, outcome: PullOutcome, now: float) -> None:
        for failure in outcome.failures:
            if failure.keep:
                continue
            self._failed.add(failure.member)
            self._all_said_gone &= failure.code == Code.NO_SUCH_KEY
            own_ssd = failure.member == self.core.member  # says nothing of its memory
            if own_ssd or failure.code == Code.BUSY:
                self._why = failure.text
            if not own_ssd:
                self.core.holders.failed(self.digest, failure, now)
        entry = self.core.objects.find(self.digest, now)
        if outcome.delivered and entry is not None:
            self.brought = outcome.source, outcome.transport
            self.finish(entry, now)
        elif outcome.error is not None:
            self.finish(outcome.error, now)
        elif outcome.delivered:
            self.finish(NoSuchKey("the object was removed while it was being fetched"), now)
        elif self._is_sent_on(outcome):
            return
        elif self._source is None and self._rounds < 2:
            self._look(now)
        elif self._all_said_gone:
            self.finish(NoSuchKey("no live peer holds this key any more"), now)
        else:
            self.finish(unavailable(len(self._failed), self._why), now)


def unavailable(copies: int, why: str = "") -> Unavailable:
    """The error for copies that cannot be reached; `why`: the reason known for one of them."""
    noun = "copy is" if copies == 1 else "copies are"
    if why:
        return Unavailable(
            f"{copies} {noun} known, but none can be read: {why}. See `mooncake-p2p stats` and `mooncake-p2p doctor`"
        )
    return Unavailable(
        f"{copies} {noun} known, but no holder can be reached: try again when its peer is back "
        "(`mooncake-p2p locate` names it)"
    )


MAX_QUEUED: Final = 16_384
"""Keys in the queue at most, as many as one request has. Keys beyond that are not prefetched; they can be read."""
AT_ONCE: Final = 16
UNDER_WAY_SHARE: Final = 8
"""At most this part of memory is for fetches in flight, as far as lengths are known."""
BEGUN_PER_STEP: Final = 64
"""Fetches begun per step that end at once: the object is here already, or no peer has it."""


class Prefetching:
    """Fetches without a waiting caller."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._queue: deque[bytes] = deque()
        self._under_way: dict[bytes, int] = {}
        """Bytes of each; 0 where the length is not known."""
        self._beginning = False
        self.due_at = math.inf

    def __len__(self) -> int:
        """How many are queued or on their way."""
        return len(self._queue) + len(self._under_way)

    def add(self, digests: Iterable[bytes], now: float) -> None:
        for digest in digests:
            if len(self._queue) == MAX_QUEUED:
                break
            self._queue.append(digest)
        self._go_on(now)

    def tick(self, now: float) -> None:
        if now >= self.due_at:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        if self._beginning:  # one of those that begin ended at once
            return
        self._beginning = True
        try:
            self._begin(now)
        finally:
            self._beginning = False

    def _begin(self, now: float) -> None:
        core = self._core
        self.due_at = math.inf
        begun = 0
        while self._queue and len(self._under_way) < AT_ONCE and not self._is_full:
            if begun == BEGUN_PER_STEP:
                self.due_at = now
                return
            begun += 1
            digest = self._queue.popleft()
            if digest in self._under_way or core.objects.find(digest, now) is not None:
                continue
            cold = core.cold.find(digest, now)
            self._under_way[digest] = 0 if cold is None else cold.length
            operation = core.operations.fetch(digest, now, partial(self._ended, digest))
            if operation.shared_by > 1:  # another caller's fetch: its end is not reported here
                operation.shared_by -= 1
                del self._under_way[digest]

    @property
    def _is_full(self) -> bool:
        most = self._core.segment.data_bytes // UNDER_WAY_SHARE
        return bool(self._under_way) and sum(self._under_way.values()) >= most

    def _ended(self, digest: bytes, result: Any, now: float) -> None:
        if self._under_way.pop(digest, None) is not None:
            self._go_on(now)
