"""Keys in order, for listings. Pure.

New keys wait for the first listing. Then keys are sorted in runs of a thousand or two, one a step (`prepare`),
and a page merges the runs. Removed keys stay in their run, and are passed over, until they are an eighth of all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import Final

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import SlotState

RUN_KEYS: Final = 2_048
"""A run has at most that many keys, and all but the last about half or more. Sorting a thousand takes 0.5 ms."""
GONE_BESIDE: Final = 1_000
GONE_SHARE: Final = 8
_LIVE: Final = SlotState.LIVE
LOOKED_AT: Final = 3
"""Waiting entries that are looked at for each one that goes: about a third of them are gone ones."""


class _Namespace:
    """The keys of one namespace: those of all `runs` but for `gone`, and `added`."""

    def __init__(self) -> None:
        self.entries: dict[str, ObjectEntry] = {}
        self._runs: list[list[str]] = []
        self._gone: set[str] = set()
        self._added: dict[str, None] = {}
        self._to_clear = 0
        """Runs still to be cleared of removed keys, the last ones first."""

    def add(self, entry: ObjectEntry) -> None:
        key = entry.key
        if key in self._gone:
            self._gone.remove(key)
        elif key not in self.entries:
            self._added[key] = None
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        del self.entries[key]
        if key in self._added:
            del self._added[key]
        else:
            self._gone.add(key)

    def prepare(self) -> bool:
        """Sort some keys, or clear a run; whether there is nothing left to do."""
        if len(self._gone) > GONE_BESIDE + len(self.entries) // GONE_SHARE and not self._to_clear:
            self._to_clear = len(self._runs)
        if self._to_clear:
            self._to_clear -= 1
            self._clear(self._to_clear)
        elif self._added:
            some = [self._added.popitem()[0] for _ in range(min(RUN_KEYS // 2, len(self._added)))]
            self._put(sorted(some), len(self._runs))
        return not self._added and not self._to_clear

    def _clear(self, place: int) -> None:
        run = self._runs.pop(place)
        left = [key for key in run if key not in self._gone]
        self._gone.difference_update(run)
        if left:
            self._put(left, place)

    def _put(self, run: list[str], place: int) -> None:
        """Add a run there, as a part of the one before if both are short."""
        if place and len(self._runs[place - 1]) + len(run) <= RUN_KEYS:
            self._runs[place - 1] += run
            self._runs[place - 1].sort()  # two sorted runs: one merge
        else:
            self._runs.insert(place, run)

    def keys_from(self, prefix: str, after: str) -> Iterator[str]:
        """All keys from `prefix` on that are above `after`, in order. They were prepared."""
        for key in merge(*(_from(run, prefix, after) for run in self._runs)):
            if key not in self._gone:
                yield key


def _from(run: list[str], prefix: str, after: str) -> Iterator[str]:
    at = bisect_right(run, after) if after >= prefix and after else bisect_left(run, prefix)
    for place in range(at, len(run)):
        yield run[place]


class KeyListing:
    """All keys of a segment, by namespace. New keys wait in windows until a listing is asked for; not with
    `at_once`."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._namespaces: dict[str, _Namespace] = {}
        self._added: deque[Sequence[ObjectEntry]] = deque()
        self._waiting = self._count = 0
        """Entries in `_added`, gone ones too; and entries that are not gone."""

    def add(self, *entries: ObjectEntry) -> None:
        """List the entries under their keys."""
        self._count += len(entries)
        if self._at_once:
            self._list(entries)
            return
        self._added.append(entries)
        self._waiting += len(entries)

    def _forget_gone(self, looks: int) -> None:
        """Where many entries that wait are gone, look for some: usually among those that were added first."""
        while looks > 0 and self._waiting > self._count + RUN_KEYS:
            looks -= len(self._added[0])
            if left := self._take():
                self._added.append(left)
                self._waiting += len(left)

    def _take(self) -> Sequence[ObjectEntry]:
        """The first window that waits, without what went meanwhile."""
        window = self._added.popleft()
        self._waiting -= len(window)
        return [entry for entry in window if entry.state is _LIVE]

    def _list(self, entries: Iterable[ObjectEntry]) -> None:
        for entry in entries:
            namespace = self._namespaces.get(entry.namespace)
            if namespace is None:
                namespace = self._namespaces[entry.namespace] = _Namespace()
            namespace.add(entry)

    def entries_of(self, namespace: str) -> Iterable[ObjectEntry]:
        """All that is listed in a namespace, those that were put first before others. Nothing may change meanwhile."""
        listed = self._namespaces.get(namespace)
        return () if listed is None else listed.entries.values()

    def remove(self, *entries: ObjectEntry) -> None:
        """Take the keys of entries that are about to go out, but for those under which another entry is listed."""
        self._count -= len(entries)
        self._forget_gone(LOOKED_AT * len(entries))
        if not self._namespaces:
            return
        for entry in entries:
            namespace = self._namespaces.get(entry.namespace)
            if namespace is None or namespace.entries.get(entry.key) is not entry:
                continue
            namespace.remove(entry.key)
            if not namespace.entries:
                del self._namespaces[entry.namespace]

    def prepare(self, namespace: str) -> bool:
        """A step towards `page`, of a millisecond. Whether that takes no more than it gives by now."""
        listed = 0
        while self._added and listed < RUN_KEYS:
            some = self._take()
            self._list(some)
            listed += len(some)
        if self._added:
            return False
        keys = self._namespaces.get(namespace)
        return keys is None or keys.prepare()

    def page(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[list[ObjectEntry], bool]:
        """Up to `limit` entries whose keys begin with `prefix`, in key order, above `after`; and
        whether there are more."""
        while not self.prepare(namespace):
            pass
        keys = self._namespaces.get(namespace)
        if keys is None:
            return [], False
        found: list[ObjectEntry] = []
        for key in keys.keys_from(prefix, after):
            if not key.startswith(prefix):
                break
            if len(found) >= limit:
                return found, True
            found.append(keys.entries[key])
        return found, False
