"""Operations that take more than one step: look up, fetch, put, replicate, remove, list.

Each is a small state machine owned by `PeerCore`: `start`, then `answered`, `pulled` and `wake` until it
finishes. They know nothing of sockets and time; a simulator and the real peer run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import (
    AskPeer,
    KnownCopy,
    OperationFinished,
    PullObject,
    PullOutcome,
    Reply,
)
from p2pstore.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
    Unavailable,
)
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, decode_location, member_of
from p2pstore.local.messages import KeyEntry, PutStatus
from p2pstore.objects import DIGEST_BYTES, ZERO_VERSION, Version, key_digest, root_checksum
from p2pstore.transfer.layout import TrailerBody, decode_slot
from p2pstore.transfer.messages import (
    DataKind,
    Get,
    GetItem,
    Keys,
    ListKeys,
    Locations,
    Lookup,
    Objects,
    ObjectStatus,
    Replicate,
    Replicated,
)
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.transfer.segment import ObjectEntry

LOOKUP_TIMEOUT_SECONDS: Final = 1.0
WAIT_FIRST_RETRY_SECONDS: Final = 0.05
WAIT_LAST_RETRY_SECONDS: Final = 0.5
LOCAL_CHECK_SECONDS: Final = 0.05
REMOVE_TIMEOUT_SECONDS: Final = 2.0
FLOORS_PER_PUSH: Final = 64
"""Signature checks that the receiver makes at a time: about 5 ms."""
LIST_TIMEOUT_SECONDS: Final = 2.0
REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A target that copies slower than this is given up for the next candidate."""
SLOT_ONLY: Final = 0xFFFF_FFFF
"""A first chunk beyond every object: the answer is slot and trailer without payload."""


class Operation:
    """Base of all operations. `result` is set when `done`; an exception as result means it failed."""

    def __init__(
        self, core: PeerCore, on_finish: Callable[[Any, float], None] | None = None
    ) -> None:
        self.core = core
        self.number = 0
        self.done = False
        self.result: Any = None
        self.wake_at = float("inf")
        self._on_finish = on_finish

    def start(self, now: float) -> None:
        """Begin; may finish at once."""
        raise NotImplementedError  # every operation defines it

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        """The answer to the `AskPeer` with this tag."""

    def pulled(self, outcome: PullOutcome, now: float) -> None:
        """The end of this operation's `PullObject`."""

    def wake(self, now: float) -> None:
        """`wake_at` has come."""

    def cancel(self, now: float) -> None:
        """Nobody waits any more; give back what is held."""
        if not self.done:
            self.finish(DeadlineExceeded("the operation was cancelled"), now)

    def finish(self, result: Any, now: float) -> None:
        """Set the result, once."""
        if self.done:
            return
        self.done = True
        self.result = result
        self.wake_at = float("inf")
        self.core.retire(self)
        if self._on_finish is not None:
            self._on_finish(result, now)
        self.core.emit(OperationFinished(self.number))

    def ask(
        self, tag: int, peer_id: PeerId, kind: int, request: Any, timeout_seconds: float
    ) -> None:
        self.core.emit(AskPeer(self.number, tag, peer_id, kind, request, timeout_seconds))


class LookupOperation(Operation):
    """Find copies of keys: in what this peer knows, else by asking the keys' home peers once.

    The result is a list, per digest, of `KnownCopy` (best first). `wait_seconds` repeats until every key
    was found or the time is over. `exclude` are members that just failed for the caller.
    """

    def __init__(
        self,
        core: PeerCore,
        digests: Sequence[bytes],
        *,
        wait_seconds: float = 0.0,
        exclude: frozenset[int] = frozenset(),
        ask_homes: bool = True,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self.digests = list(digests)
        self._wait_seconds = wait_seconds
        self._exclude = exclude
        self._ask_homes = ask_homes
        self._pending: set[int] = set()
        self._asked: dict[int, tuple[PeerId, list[bytes]]] = {}
        self._retry_seconds = WAIT_FIRST_RETRY_SECONDS
        self._ask_again_at = float("inf")
        self._wait_until = 0.0

    def start(self, now: float) -> None:
        self._wait_until = now + self._wait_seconds
        self._ask(now)

    def _missing(self, now: float) -> list[bytes]:
        return [digest for digest in self.digests if not self._usable(digest, now)]

    def _usable(self, digest: bytes, now: float) -> list[KnownCopy]:
        return [
            copy
            for copy in self.core.known_copies(digest, now)
            if copy.reachable and copy.member not in self._exclude
        ]

    def _ask(self, now: float) -> None:
        missing = self._missing(now)
        by_home: dict[PeerId, list[bytes]] = {}
        if self._ask_homes:
            for digest in missing:
                for home in self.core.homes(digest):
                    if member_of(home) not in self._exclude:
                        by_home.setdefault(home, []).append(digest)
        self._ask_again_at = now + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, WAIT_LAST_RETRY_SECONDS)
        for home, digests in by_home.items():
            tag = len(self._asked)
            self._asked[tag] = (home, digests)
            self._pending.add(tag)
            self.ask(tag, home, DataKind.LOOKUP, Lookup(b"".join(digests)), LOOKUP_TIMEOUT_SECONDS)
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
        missing = self._missing(now)
        if not missing or (not self._pending and now >= self._wait_until):
            self.finish([self._best(digest, now) for digest in self.digests], now)
        elif now < self._wait_until:
            self.wake_at = min(now + LOCAL_CHECK_SECONDS, self._wait_until)
            self.core.set_alarm(self)
        else:
            self.wake_at = float("inf")

    def _best(self, digest: bytes, now: float) -> list[KnownCopy]:
        return [
            copy for copy in self.core.known_copies(digest, now) if copy.member not in self._exclude
        ]


class FetchOperation(Operation):
    """Bring one object into this peer's memory. The result is its `ObjectEntry`.

    Many callers that want one absent object share one fetch (`PeerCore.fetch`). With `source`, only that
    peer is asked, and `minimum` is the version it promised.
    """

    def __init__(
        self,
        core: PeerCore,
        digest: bytes,
        *,
        soft: bool = True,
        wait_seconds: float = 0.0,
        progress_seconds: float = 5.0,
        source: KnownCopy | None = None,
        minimum: Version = ZERO_VERSION,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self.digest = digest
        self.soft = soft
        self.minimum = minimum
        self.shared_by = 1
        self._wait_seconds = wait_seconds
        self._progress_seconds = progress_seconds
        self._source = source
        self._failed: set[int] = set()
        self._rounds = 0
        self._all_said_gone = True

    def start(self, now: float) -> None:
        if self._source is not None:
            self._pull([self._source])
            return
        self._look(now)

    def _look(self, now: float) -> None:
        self._rounds += 1
        self.core.start(
            LookupOperation(
                self.core,
                [self.digest],
                wait_seconds=self._wait_seconds if self._rounds == 1 else 0.0,
                exclude=frozenset(self._failed),
                on_finish=self._found,
            ),
            now,
        )

    def _found(self, result: Any, now: float) -> None:
        if self.done:
            return
        if isinstance(result, Exception):
            self.finish(result, now)
            return
        entry = self.core.segment.find(self.digest, self.core.unix(now))
        if entry is not None:
            self.finish(entry, now)
            return
        copies = [copy for copy in result[0] if not copy.local]
        usable = [copy for copy in copies if copy.reachable]
        if usable:
            self._pull(usable)
        elif copies or not self._all_said_gone:
            self.finish(unavailable(len(copies) + len(self._failed)), now)
        else:
            self.finish(NoSuchKey("no live peer holds this key"), now)

    def _pull(self, copies: Sequence[KnownCopy]) -> None:
        self.core.emit(PullObject(self.number, self.digest, tuple(copies), self._progress_seconds))

    def pulled(self, outcome: PullOutcome, now: float) -> None:
        for failure in outcome.failures:
            self._failed.add(failure.member)
            self._all_said_gone &= failure.code == Code.NO_SUCH_KEY
            self.core.holder_failed(self.digest, failure, now)
        entry = self.core.segment.find(self.digest, self.core.unix(now))
        if outcome.delivered and entry is not None:
            self.finish(entry, now)
        elif outcome.error is not None:
            self.finish(outcome.error, now)
        elif outcome.delivered:
            self.finish(NoSuchKey("the object was removed while it was being fetched"), now)
        elif self._source is None and self._rounds < 2:
            self._look(now)
        elif self._all_said_gone:
            self.finish(NoSuchKey("no live peer holds this key any more"), now)
        else:
            self.finish(unavailable(len(self._failed)), now)


def unavailable(copies: int) -> Unavailable:
    """The error for copies that nobody can reach."""
    noun = "copy is" if copies == 1 else "copies are"
    return Unavailable(
        f"{copies} {noun} known, but no holder can be reached: try again when its peer is back "
        "(`mooncake-p2p locate` names it)"
    )


@dataclass(frozen=True, slots=True)
class PutSpec:
    """A put whose bytes are in a reservation."""

    holder: Any
    reservation: int
    namespace: str
    key: str
    length: int
    sums: bytes
    root: int
    replicas: int = 1
    pin: int = 0
    ttl_seconds: float = 0.0
    overwrite: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    deadline_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class PutEnd:
    """What a put did. `copies` count this peer's own."""

    status: PutStatus
    copies: int
    wanted: int
    version: Version


class PutOperation(Operation):
    """Publish a reservation as an object, unless the key exists; then make the other copies.

    A key held only elsewhere is compared by asking a holder for its slot: equal roots make this copy an
    additional one of the existing version, other bytes keep what exists.
    """

    def __init__(self, core: PeerCore, spec: PutSpec) -> None:
        super().__init__(core)
        self.spec = spec
        self.digest = key_digest(spec.key, spec.namespace)
        self._comparing: list[KnownCopy] = []
        self._end: PutEnd | None = None

    def start(self, now: float) -> None:
        spec = self.spec
        if root_checksum(spec.length, spec.sums) != spec.root:
            self._give_up(
                ProtocolError("the chunk sums of a put do not give its root checksum"), now
            )
            return
        existing = self.core.segment.find(self.digest, self.core.unix(now))
        if existing is not None and (existing.version.root == spec.root or not spec.overwrite):
            self._keep(existing, now)
        elif spec.overwrite:
            self._create(now)
        else:
            self._comparing = [
                copy
                for copy in self.core.known_copies(self.digest, now)
                if copy.reachable and not copy.local
            ][:3]
            self._compare(now)

    def _compare(self, now: float) -> None:
        if not self._comparing:
            self._create(now)
            return
        get = Get(
            [GetItem(self.digest, first_chunk=SLOT_ONLY, slot=self._comparing[0].record.slot)]
        )
        self.ask(0, self._comparing[0].peer_id, DataKind.GET, get, LOOKUP_TIMEOUT_SECONDS)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        copy = self._comparing.pop(0)
        slot = None
        if (
            isinstance(reply, Objects)
            and len(reply.items) == 1
            and reply.items[0].status == ObjectStatus.OK
        ):
            slot = decode_slot(reply.items[0].slot)
        if (
            slot is None
            or slot.digest != self.digest
            or not self.core.clock.observe(slot.version.clock, self.core.unix(now))
        ):
            self.core.holder_silent(self.digest, copy, reply, now)
            self._compare(now)
        elif slot.version.root == self.spec.root and slot.length == self.spec.length:
            self._commit(slot.version, PutStatus.UNCHANGED, soft=True, now=now)
        else:
            self._give_room_back()
            self.finish(PutEnd(PutStatus.KEPT_EXISTING, 1, self.spec.replicas, slot.version), now)

    def _keep(self, existing: ObjectEntry, now: float) -> None:
        self._give_room_back()
        same = existing.version.root == self.spec.root and existing.length == self.spec.length
        status = PutStatus.UNCHANGED if same else PutStatus.KEPT_EXISTING
        self._end = PutEnd(status, 1, self.spec.replicas, existing.version)
        if same:
            self.core.strengthen(existing, self.spec.pin, self.spec.replicas, now)
            self._replicate(existing, now)
        else:
            self.finish(self._end, now)

    def _create(self, now: float) -> None:
        version = self.core.new_version(self.spec.root, now)
        self._commit(version, PutStatus.CREATED, soft=False, now=now)

    def _commit(self, version: Version, status: PutStatus, *, soft: bool, now: float) -> None:
        spec = self.spec
        unix = self.core.unix(now)
        trailer = TrailerBody(
            spec.namespace,
            spec.key,
            spec.sums,
            expires_unix_ms=int((unix + spec.ttl_seconds) * 1000) if spec.ttl_seconds else 0,
            replicas=spec.replicas,
            pin=spec.pin,
            dtype=spec.dtype,
            shape=spec.shape,
        )
        try:
            entry = self.core.publish(
                spec.reservation, spec.holder, self.digest, version, trailer, spec.length, soft, now
            )
        except (P2PStoreError, ValueError) as error:
            self._give_up(error, now)
            return
        if spec.overwrite:
            self.core.write_floor(self.digest, Version(version.clock - 1, 0xFFFF), now)
        self.core.gossip.directory.touch(self.digest)  # a newer version may be known by now
        self._end = PutEnd(status, 1, spec.replicas, version)
        self._replicate(entry, now)

    def _replicate(self, entry: ObjectEntry, now: float) -> None:
        if self.spec.replicas <= 1:
            self.finish(self._end, now)
            return
        self.core.start(
            ReplicateOperation(self.core, entry, self.spec.replicas, on_finish=self._replicated),
            now,
        )

    def _replicated(self, copies: Any, now: float) -> None:
        assert self._end is not None
        count = copies if isinstance(copies, int) else 1
        self.finish(PutEnd(self._end.status, count, self._end.wanted, self._end.version), now)

    def _give_room_back(self) -> None:
        with suppress(ValueError):  # its holder may have gone meanwhile, and taken it along
            self.core.segment.abort(self.spec.reservation, holder=self.spec.holder)

    def _give_up(self, error: Exception, now: float) -> None:
        self._give_room_back()
        self.finish(error, now)

    def cancel(self, now: float) -> None:
        """A put that was published stays; one that was not leaves nothing."""
        if not self.done and self._end is None:
            self._give_room_back()
        super().cancel(now)


class ReplicateOperation(Operation):
    """Have `wanted` copies of a local object made; the result is how many there are.

    Targets pull. They are asked in rendezvous order; one that fails is replaced by the next.
    """

    def __init__(
        self,
        core: PeerCore,
        entry: ObjectEntry,
        wanted: int,
        on_finish: Callable[[Any, float], None] | None = None,
    ) -> None:
        super().__init__(core, on_finish)
        self._entry = entry
        self._wanted = wanted
        self._copies = 1
        self._pending: dict[int, PeerId] = {}
        self._candidates: list[PeerId] = []
        self._next_tag = 0

    def start(self, now: float) -> None:
        entry = self._entry
        holding = {
            copy.member
            for copy in self.core.known_copies(entry.digest, now)
            if copy.reachable
            and not copy.local
            and not copy.record.soft
            and copy.record.version == Version(entry.version.clock, entry.version.writer)
        }
        self._copies += len(holding)
        self._candidates = [
            peer_id
            for peer_id in self.core.ranked_peers(entry.digest)
            if member_of(peer_id) not in holding
        ]
        self.core.segment.acquire(entry)  # the source of copies is not evicted before they are made
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        entry = self._entry
        timeout = 5.0 + entry.length / REPLICATE_BYTES_PER_SECOND
        me = self.core.gossip.record(now)
        request = Replicate(
            entry.digest,
            entry.version.clock,
            entry.version.writer,
            entry.length,
            record_body=me.body,
            record_signature=me.signature,
        )
        while self._copies + len(self._pending) < self._wanted and self._candidates:
            target = self._candidates.pop(0)
            self._next_tag += 1
            self._pending[self._next_tag] = target
            self.ask(self._next_tag, target, DataKind.REPLICATE, request, timeout)
        if not self._pending:
            self.core.segment.let_go(entry)
            self.finish(self._copies, now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        target = self._pending.pop(tag)
        if isinstance(reply, Replicated):
            self._copies += 1
        elif reply is None:
            self.core.peer_failed(target, now)
        self._proceed(now)

    def cancel(self, now: float) -> None:
        if not self.done:
            self.core.segment.let_go(self._entry)
        super().cancel(now)


class RemoveOperation(Operation):
    """Remove keys everywhere: write floors, tell holders and home peers at once, gossip tells the rest.

    The result is a list of whether any copy was known.
    """

    def __init__(self, core: PeerCore, namespace: str, keys: Sequence[str]) -> None:
        super().__init__(core)
        self._digests = [key_digest(key, namespace) for key in keys]
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
            signed = self.core.write_floor(digest, self.core.version_above(newest, now), now)
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
            self.core.push_cluster_records(
                self.number, tag, peer_id, records, REMOVE_TIMEOUT_SECONDS
            )
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        self._pending.discard(tag)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending:
            self.finish(self._existed, now)


@dataclass(slots=True)
class ListedPage:
    """A page of keys, in order. `silent` peers did not answer in time."""

    items: list[KeyEntry]
    more: bool
    silent: list[PeerId] = field(default_factory=list)


class ListOperation(Operation):
    """One page of keys over all live peers."""

    def __init__(self, core: PeerCore, request: ListKeys, *, local: bool) -> None:
        super().__init__(core)
        self._request = request
        self._local = local
        self._pending: dict[int, PeerId] = {}
        self._answers: list[tuple[PeerId, Keys]] = []
        self._silent: list[PeerId] = []

    def start(self, now: float) -> None:
        self._answers.append((self.core.peer_id, self.core.list_local(self._request, now)))
        if not self._local:
            for tag, peer_id in enumerate(self.core.live_peers()):
                self._pending[tag] = peer_id
                self.ask(tag, peer_id, DataKind.LIST, self._request, LIST_TIMEOUT_SECONDS)
        self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        peer_id = self._pending.pop(tag)
        if isinstance(reply, Keys) and is_page_of(reply, self._request):
            self._answers.append((peer_id, reply))
        else:
            self._silent.append(peer_id)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending:
            self.finish(
                merge_pages(self._request.limit, self._answers, self._silent, self.core.name_of),
                now,
            )


def is_page_of(page: Keys, request: ListKeys) -> bool:
    """Whether a page is what was asked for: keys in order, each once, after `after`, with the prefix.

    Anything else could send a client that pages through the keys in circles.
    """
    keys = [item.key for item in page.items]
    return (
        all(earlier < later for earlier, later in pairwise([request.after, *keys]))
        and all(key.startswith(request.prefix) for key in keys)
        and (bool(keys) or not page.more)
    )


def merge_pages(
    limit: int,
    answers: Sequence[tuple[PeerId, Keys]],
    silent: list[PeerId],
    name_of: Callable[[PeerId], str],
) -> ListedPage:
    """Merge sorted pages: the newest version of each key speaks for it.

    A page that says `more` ends the merged page at its last key: behind it that peer may hold keys
    that it did not list.
    """
    horizon = min(
        (page.items[-1].key for _, page in answers if page.more and page.items), default=None
    )
    merged: dict[str, KeyEntry] = {}
    for peer_id, page in answers:
        for item in page.items:
            if horizon is not None and item.key > horizon:
                break
            known = merged.get(item.key)
            if known is not None and (known.clock, known.writer) > (item.clock, item.writer):
                continue
            same = known is not None and (known.clock, known.writer) == (item.clock, item.writer)
            merged[item.key] = KeyEntry(
                item.key,
                item.length,
                known.copies + 1 if known is not None and same else 1,
                [*(known.peers if known is not None and same else []), name_of(peer_id)],
                item.pin,
                item.soft,
                item.expires_unix_ms,
                item.clock,
                item.writer,
            )
    keys = sorted(merged)
    return ListedPage(
        [merged[key] for key in keys[:limit]], horizon is not None or len(keys) > limit, silent
    )


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


__all__ = [
    "CapacityExceeded",
    "FetchOperation",
    "ListOperation",
    "LookupOperation",
    "Operation",
    "PutEnd",
    "PutOperation",
    "PutSpec",
    "RemoveOperation",
    "ReplicateOperation",
]
