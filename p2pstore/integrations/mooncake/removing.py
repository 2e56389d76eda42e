"""Removing objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from p2pstore.integrations.mooncake.codes import ErrorCode
from p2pstore.integrations.mooncake.objects import FAILURES, ObjectCalls

PAGE_KEYS = 10_000


class RemovingCalls(ObjectCalls):
    """Calls that remove. What is removed is gone everywhere, and does not come back with a peer that was away.

    Mooncake grants a lease of seconds with every read and every `is_exist`, and refuses to remove the object meanwhile
    (-706) unless `force` is given. Here reads leave nothing behind: they check what they copied, and who has a
    `BufferHandle` keeps its bytes even when the object is removed. So nothing is ever refused, and `force` makes no
    difference.
    """

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object: 0, or -704 when nobody has it."""
        try:
            return 0 if self._live.remove(key) else int(ErrorCode.OBJECT_NOT_FOUND)
        except FAILURES as error:
            return self._read_code(error)

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """`remove` for many; a code for each."""
        try:
            results = self._live.remove_many(keys)
        except FAILURES as error:
            return [self._read_code(error)] * len(keys)
        codes = []
        for each in results:
            if each.error is not None:
                codes.append(self._read_code(each.error))
            else:
                codes.append(0 if each.value else int(ErrorCode.OBJECT_NOT_FOUND))
        return codes

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects in whose keys the pattern (Python's) is found, in this store's namespace. Returns how many
        they were, -600 for what is no pattern, or the code of the failure that left some of them there."""
        try:
            pattern = re.compile(regex_pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return self._code(ValueError(f"{regex_pattern!r} is no pattern: {error}"))
        removed = 0
        try:
            for keys in self._pages():
                codes = self.batch_remove([key for key in keys if pattern.search(key)])
                removed += codes.count(0)
                failures = set(codes) - {0, int(ErrorCode.OBJECT_NOT_FOUND)}
                if failures:  # the log says why
                    return min(failures)
        except FAILURES as error:
            return self._code(error)
        return removed

    def remove_all(self, force: bool = False) -> int:
        """Remove everything in this store's namespace (the tenant), and nothing else. Returns how many objects there
        were."""
        try:
            count = sum(len(keys) for keys in self._pages())
            self._live.flush()
        except FAILURES as error:
            return self._code(error)
        return count

    def _pages(self) -> Iterator[list[str]]:
        """The keys of the namespace, of all peers that answer."""
        after, more = "", True
        while more:
            page = self._live.list_keys(after=after, limit=PAGE_KEYS)
            if page.silent_peers:
                silent = ", ".join(page.silent_peers)
                self._say(f"keys of peers that did not answer may be left: {silent}")
            keys = [each.key for each in page.keys]
            yield keys
            more = page.more and bool(keys)
            after = keys[-1] if keys else ""
