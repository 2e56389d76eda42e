"""Namespaces that are being emptied: at once for who asks, step by step in the memory of the index. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from p2pstore.objects import Version
from p2pstore.ssd_tier.record_rows import DIGEST, RecordRows


class NamespaceSweeps:
    """Of some namespaces, up to which version their objects go, and which row is to be looked at next."""

    def __init__(self, rows: RecordRows) -> None:
        self._rows = rows
        self._sweeps: dict[int, tuple[Version, int]] = {}

    def begin(self, namespace: int, up_to: Version) -> None:
        """Empty a namespace of the versions that `up_to` covers."""
        before, _ = self._sweeps.get(namespace, (up_to, 0))
        self._sweeps[namespace] = (max(before, up_to), 0)

    def forget(self, namespace: int) -> None:
        """Nothing is in the namespace any more."""
        self._sweeps.pop(namespace, None)

    def covers(self, namespace: int, version: Version) -> bool:
        """Whether an object counts as gone."""
        sweep = self._sweeps.get(namespace)
        return sweep is not None and sweep[0].covers(version)

    def __bool__(self) -> bool:
        """Whether anything is left to look at."""
        return bool(self._sweeps)

    def step(self, limit: int) -> Iterator[bytes]:
        """Look at up to `limit` rows: digests to be dropped, each before the next one is asked for."""
        if not self._sweeps:
            return
        namespace, (up_to, first) = next(iter(self._sweeps.items()))
        end = min(first + limit, self._rows.end)
        for row in self._rows.of_namespace(namespace, first, end):
            # A row of a part goes with the others of its object.
            if self._rows.is_used(row) and up_to.covers(self._rows.version(row)):
                yield self._rows.fields(row)[DIGEST]
        if namespace in self._sweeps:
            self._sweeps[namespace] = (up_to, end)
            if end == self._rows.end:
                del self._sweeps[namespace]
