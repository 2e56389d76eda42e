"""Keys in order, for listings. Pure. Adding and removing cost a dictionary operation; sorting waits
until somebody asks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from p2pstore.transfer.entries import ObjectEntry


class _Namespace:
    """The keys of one namespace: `ordered` without `gone`, and `added`."""

    def __init__(self) -> None:
        self.entries: dict[str, ObjectEntry] = {}
        self.ordered: list[str] = []
        self.gone: set[str] = set()
        self.added: set[str] = set()

    def add(self, entry: ObjectEntry) -> None:
        key = entry.key
        if key in self.gone:
            self.gone.remove(key)
        elif key not in self.entries:
            self.added.add(key)
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        del self.entries[key]
        if key in self.added:
            self.added.remove(key)
        else:
            self.gone.add(key)

    def sort(self) -> list[str]:
        if self.gone:
            self.ordered = [key for key in self.ordered if key not in self.gone]
            self.gone = set()
        if self.added:
            self.ordered.extend(sorted(self.added))
            self.ordered.sort()  # two sorted runs: one merge
            self.added = set()
        return self.ordered


class KeyListing:
    """All keys of a segment, by namespace."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Namespace] = {}

    def add(self, entry: ObjectEntry) -> None:
        """List the entry under its key."""
        namespace = self._namespaces.get(entry.namespace)
        if namespace is None:
            namespace = self._namespaces[entry.namespace] = _Namespace()
        namespace.add(entry)

    def remove(self, entry: ObjectEntry) -> None:
        """Take the entry's key out, unless another entry is listed under it."""
        namespace = self._namespaces.get(entry.namespace)
        if namespace is None or namespace.entries.get(entry.key) is not entry:
            return
        namespace.remove(entry.key)
        if not namespace.entries:
            del self._namespaces[entry.namespace]

    def page(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[list[ObjectEntry], bool]:
        """Up to `limit` entries whose keys begin with `prefix`, in key order, above `after`; and
        whether there are more."""
        keys = self._namespaces.get(namespace)
        if keys is None:
            return [], False
        ordered = keys.sort()
        position = bisect_left(ordered, prefix)
        if after:
            position = max(position, bisect_right(ordered, after))
        found: list[ObjectEntry] = []
        while position < len(ordered) and ordered[position].startswith(prefix):
            if len(found) >= limit:
                return found, True
            found.append(keys.entries[ordered[position]])
            position += 1
        return found, False
