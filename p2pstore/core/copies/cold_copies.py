"""The core's view of its peer's SSD: copies that are only there, found, announced and given up.

The SSD tier keeps its own index; this asks it, and applies the rules of all copies to its answers: floors, times to
live, and objects that stay hidden until the peer knows the removals made while it was away.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from p2pstore.core.own_objects import location_of
from p2pstore.gossip.records import decode_location
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import Version

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry
    from p2pstore.ssd_tier.index import ColdEntry

MAX_VERSION: Final = Version((1 << 64) - 1, 0xFFFF)
FORGOTTEN_PER_STEP: Final = 64
"""Withdrawing a location costs some 25 us."""


class Gone(StrEnum):
    """Why a peer gave an object up, and what that costs."""

    EXPIRED = "expired"
    """Its time to live was over."""
    REPLACED = "replaced"
    """By a newer version here."""
    SOFT_COPY = "soft_copy"
    """A copy kept for speed alone; another peer has one."""
    COPY_ELSEWHERE = "copy_elsewhere"
    LAST_COPY = "last_copy"
    """No other copy is known."""


class ColdStore(Protocol):
    """The core's requests to an SSD tier. Nothing here waits, or reads the SSD."""

    def find(self, digest: bytes) -> ColdEntry | None:
        """The whole object that lies there."""

    def discard(self, digest: bytes, up_to: Version) -> bool:
        """Versions up to this one are never to be seen again. Whether there was one."""

    def set_care(
        self,
        digest: bytes,
        version: Version,
        *,
        pin: int,
        replicas: int,
        soft: bool,
        expires_unix_ms: int | None = None,
    ) -> bool:
        """Change how firmly a version is kept, or (unless None) when it ends. Whether it lies there."""

    def digests(self, namespace: bytes | None) -> Iterator[Sequence[bytes]]:
        """Those of all objects, or of a namespace by its digest, that are there now: at most 64 a step, or none. Others
        may come and go while they are gone through."""

    def prepare_entries(self, namespace: str) -> bool:
        """A step towards `entries`, of a few milliseconds. Whether that takes no more than it gives by now."""

    def entries(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[Sequence[ColdEntry], bool]:
        """Objects in the order of their keys, above `after`, and whether there are more."""


class Page(NamedTuple):
    """Objects in the order of their keys, and up to which key that is all; None when there are no more."""

    entries: Sequence[ObjectEntry | ColdEntry]
    complete_to: str | None


class _Sweep(NamedTuple):
    """A pass that discards objects of one namespace, or of all, up to a version; with the objects not yet looked at."""

    namespace: bytes | None
    up_to: Version
    left: Iterator[Sequence[bytes]]


class ColdCopies:
    """A peer's copies on its SSD. Without a `store` there are none."""

    def __init__(self, core: PeerCore) -> None:
        self.store: ColdStore | None = None
        self._core = core
        self._to_sweep: deque[_Sweep] = deque()
        self._timed: set[tuple[int, bytes, Version]] = set()
        """Members of the heap `_expiring`: an object that moves between memory and SSD is queued once."""
        self._expiring: list[tuple[int, bytes, Version]] = []
        """A heap of objects on the SSD alone, by their expiry (Unix milliseconds)."""

    def stored(self, digest: bytes) -> ColdEntry | None:
        """The object that lies on the SSD, whether it may be served or not."""
        return None if self.store is None else self.store.find(digest)

    def find(self, digest: bytes, now: float) -> ColdEntry | None:
        """The object on the SSD, if it may be served."""
        entry = self.stored(digest)
        if entry is None or 0 < entry.expires_unix_ms <= self._core.unix(now) * 1000:
            return None
        namespace = self._core.namespace_digest(entry.namespace)
        forbidden = self._core.gossip.cluster_records.floors.forbids(digest, namespace, entry.version)
        if forbidden or self._core.earlier_life.holds_back(digest, namespace, entry.version):
            return None
        for sweep in self._to_sweep:  # of all namespaces; a namespace's own comes with a floor
            if sweep.namespace is None and sweep.up_to.covers(entry.version):
                return None
        return entry

    def find_only_here(self, digest: bytes, now: float) -> ColdEntry | None:
        """`find`, when there are no bytes of it in memory."""
        return None if digest in self._core.segment.digests() else self.find(digest, now)

    def held_only_here(self, digests: set[bytes], now: float) -> set[bytes]:
        """Those of many keys, not in memory, that the SSD has."""
        if self.store is None:
            return set()
        return {digest for digest in digests if self.find(digest, now) is not None}

    def prepare_page(self, namespace: str) -> bool:
        """A step towards `merged_page`: the keys of many objects are put in order first. Whether it was the last."""
        if not self._core.segment.listing.prepare(namespace):
            return False
        return self.store is None or self.store.prepare_entries(namespace)

    def merged_page(self, namespace: str, prefix: str, after: str, limit: int, now: float) -> Page:
        """Keys in order, in memory and on the SSD."""
        held, more = self._core.segment.listing.page(namespace, prefix, after, limit)
        if self.store is None:
            return Page(held, held[-1].key if more else None)
        cold_held, more_cold = self.store.entries(namespace, prefix, after, limit)
        # Behind the end of a page that is not the last one there may be keys that it does not show.
        ends = [held[-1].key] if more else []
        ends += [cold_held[-1].key] if more_cold else []
        end = min(ends, default=None)
        merged: dict[str, ObjectEntry | ColdEntry] = {
            cold.key: cold for cold in cold_held if self.find_only_here(cold.digest, now) is not None
        }
        merged.update((entry.key, entry) for entry in held)
        keys = sorted(key for key in merged if end is None or key <= end)
        if len(keys) > limit:
            keys, end = keys[:limit], keys[limit - 1]
        return Page([merged[key] for key in keys], end)

    def left_memory(self, entries: Iterable[ObjectEntry], now: float) -> None:
        """Memory gave objects up: they were evicted, expired or replaced. Say where they are now, if anywhere."""
        gone: dict[bytes, ObjectEntry] = {}
        withdrawn = 0
        for entry in entries:
            cold = self.find_only_here(entry.digest, now) if entry.on_ssd else None
            if cold is not None and cold.version == entry.version:
                self._set_care(cold, entry.pin, entry.replicas, entry.soft, now)
                self._core.counters["objects_left_to_ssd"] += 1
                continue
            if entry.digest in gone:  # an older version of the same key
                self._gone(list(gone.values()), now)
                gone.clear()
            gone[entry.digest] = entry
            withdrawn += 1
        if withdrawn:
            self._core.counters["objects_withdrawn"] += withdrawn
            self._gone(list(gone.values()), now)

    def _gone(self, entries: Sequence[ObjectEntry | ColdEntry], now: float) -> None:
        """This peer has these no longer. Count them by what that costs."""
        core = self._core
        gone = {entry.digest for entry in entries}
        replaced = gone & core.segment.digests()
        last = [(each.digest, each.version) for each in entries if each.digest not in replaced]
        core.gossip.release_many(last, now)
        # After the newer version others must hear nothing of the older one: the last word about a key counts.
        for entry in [each for each in entries if each.digest in replaced]:
            core.gossip.release(entry.digest, entry.version, now)
        mentioned = core.gossip.directory.mentioned(gone)
        known = mentioned | replaced
        doubtful = [each for each in entries if each.expires_unix_ms or each.digest in known]
        reasons = Counter([self._why_gone(each, each.digest in mentioned, now) for each in doubtful])
        reasons[Gone.LAST_COPY] += len(entries) - len(doubtful)
        for why, count in reasons.items():
            core.counters[f"gone_{why}"] += count
        core.counters["last_copies_dropped"] += reasons[Gone.LAST_COPY]

    def _why_gone(self, gone: ObjectEntry | ColdEntry, mentioned: bool, now: float) -> Gone:
        core = self._core
        if 0 < gone.expires_unix_ms <= core.unix(now) * 1000:
            return Gone.EXPIRED
        if gone.digest in core.segment.digests():
            return Gone.REPLACED
        if not mentioned or all(
            each.hidden or each.hearsay for each in core.gossip.directory.holders(gone.digest)
        ):
            return Gone.LAST_COPY
        return Gone.SOFT_COPY if gone.soft else Gone.COPY_ELSEWHERE

    def set_pin(self, cold: ColdEntry, pin: int, now: float) -> None:
        """Pin or unpin an object that is on the SSD alone: for when it comes back to memory."""
        self._set_care(cold, pin, cold.replicas, cold.soft, now)

    def set_expiry(self, digest: bytes, version: Version, expires_unix_ms: int, now: float) -> bool:
        """Change when the version on the SSD ends, whether it is in memory as well or not. Whether it is there."""
        cold = self.stored(digest)
        if self.store is None or cold is None or cold.version != version:
            return False
        self.store.set_care(
            digest,
            version,
            pin=cold.pin,
            replicas=cold.replicas,
            soft=cold.soft,
            expires_unix_ms=expires_unix_ms,
        )
        if digest not in self._core.segment.digests():
            self._hold(self.stored(digest) or cold, now)
        return True

    def _set_care(self, cold: ColdEntry, pin: int, replicas: int, soft: bool, now: float) -> None:
        """Announce what is on the SSD alone, as it is kept from now on."""
        assert self.store is not None
        self.store.set_care(cold.digest, cold.version, pin=pin, replicas=replicas, soft=soft)
        self._hold(self.stored(cold.digest) or cold, now)

    def came_to_memory(self, entry: ObjectEntry) -> None:
        """An object was published in memory: older versions are of no use any more."""
        cold = self.stored(entry.digest)
        if self.store is None or cold is None:
            return
        if cold.version == entry.version:
            self._core.segment.objects.set_on_ssd(entry, True)
        elif cold.version < entry.version:
            self.store.discard(entry.digest, cold.version)

    def written(self, entry: ObjectEntry, now: float) -> None:
        """The tier has taken the object. A removal or expiry meanwhile counts for that copy, too."""
        if self.store is None:
            return
        segment = self._core.segment
        if entry.state is SlotState.LIVE and not entry.expired(self._core.unix(now)):
            segment.objects.set_on_ssd(entry, True)
        else:
            self.store.discard(entry.digest, entry.version)

    def discard(self, digest: bytes, up_to: Version, now: float) -> bool:
        """Versions up to this one were removed or replaced. Whether one was there."""
        if self.store is None:
            return False
        cold = self.store.find(digest)
        covered = cold is not None and up_to.covers(cold.version)
        if cold is not None and covered and digest not in self._core.segment.digests():
            self._core.gossip.release(digest, cold.version, now)
        self.store.discard(digest, up_to)  # also what is only on its way there
        return covered

    def lost(self, entries: Iterable[ColdEntry], now: float) -> None:
        """The tier no longer has these: it made room, or found them damaged."""
        core = self._core
        for cold in entries:
            entry = core.segment.find(cold.digest, core.unix(now))
            if entry is None:
                self._gone([cold], now)
            elif entry.version == cold.version:
                core.segment.objects.set_on_ssd(entry, False)

    def announce(self, digest: bytes, now: float) -> None:
        """Tell the others of an object of an earlier life, now that it may be served."""
        cold = self.find_only_here(digest, now)
        if cold is not None:
            self._hold(cold, now)

    def _hold(self, cold: ColdEntry, now: float) -> None:
        self._core.gossip.hold(location_of(cold), now)
        timer = cold.expires_unix_ms, cold.digest, cold.version
        if cold.expires_unix_ms and timer not in self._timed:
            self._timed.add(timer)
            heapq.heappush(self._expiring, timer)

    def expire(self, now: float) -> None:
        """Withdraw what is past its time to live."""
        unix_ms = self._core.unix(now) * 1000
        for _ in range(FORGOTTEN_PER_STEP):
            if not self._expiring or self._expiring[0][0] > unix_ms:
                return
            timer = heapq.heappop(self._expiring)
            self._timed.remove(timer)
            _, digest, version = timer
            cold = self.stored(digest)
            if cold is None or 0 < cold.expires_unix_ms <= unix_ms:  # else it has another end now
                self.discard(digest, version, now)

    def lose_store(self) -> None:
        """There is no SSD any more: from now on, nothing is found there, and by and by it is withdrawn."""
        if self.store is not None:
            left, self.store = self.store.digests(None), None
            self._to_sweep.clear()
            self._to_sweep.append(_Sweep(None, MAX_VERSION, left))

    @property
    def sweeping(self) -> bool:
        return bool(self._to_sweep)

    def sweep(self, namespace: bytes | None, up_to: Version) -> None:
        """Discard versions up to one, of a namespace (by its digest) or all. `find` shows none from now on."""
        if self.store is not None:
            self._to_sweep.append(_Sweep(namespace, up_to, self.store.digests(namespace)))

    def sweep_step(self, now: float) -> None:
        if not self._to_sweep:
            return
        sweep = self._to_sweep[0]
        some = next(sweep.left, None)
        if some is None:
            self._to_sweep.popleft()
            return
        for digest in some:
            if self.store is None:
                self._withdraw(digest, now)
            else:
                discarded = self.discard(digest, sweep.up_to, now)
                self._core.counters["objects_distrusted"] += discarded and sweep.namespace is None

    def _withdraw(self, digest: bytes, now: float) -> None:
        """The SSD has it no more."""
        core = self._core
        entry = core.segment.find(digest, core.unix(now))
        if entry is not None:
            core.segment.objects.set_on_ssd(entry, False)
        elif (held := core.gossip.log.held(digest)) is not None:
            core.gossip.release(digest, decode_location(held).version, now)
