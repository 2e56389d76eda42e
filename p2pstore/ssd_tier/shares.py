"""What some namespaces have on the disk, what of it gives way to no other, and how much it may be. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Share:
    """What one namespace may count on, and may take."""

    reserved_bytes: int = 0
    most_bytes: int | None = None
    """None: as much as there is."""


Shares = Callable[[], Mapping[str, Share]]
"""The shares of this moment."""


def no_shares() -> Mapping[str, Share]:
    """Of a disk that all namespaces share alike."""
    return {}


class NamespaceBytes:
    """What these namespaces have in each segment. Others are not counted."""

    def __init__(self, namespaces: Iterable[str], segments: int) -> None:
        self._in_segments = {name: np.zeros(segments, np.int64) for name in namespaces}

    def count(self, namespace: str, segment: int, size_bytes: int) -> None:
        """So many bytes more (or fewer)."""
        counted = self._in_segments.get(namespace)
        if counted is not None:
            counted[segment] += size_bytes

    def load(
        self,
        names: Iterable[str],
        namespaces: npt.NDArray[np.uint32],
        segments: npt.NDArray[np.uint32],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        """Count many records: for each which of `names` it is in, its segment and its size."""
        for number, name in enumerate(names):
            counted = self._in_segments.get(name)
            if counted is not None:
                its = namespaces == number
                counted += np.bincount(segments[its], sizes[its], len(counted)).astype(np.int64)

    def bytes_of(self, namespace: str) -> int:
        """What a counted namespace has in all; 0 for others."""
        counted = self._in_segments.get(namespace)
        return 0 if counted is None else int(counted.sum())

    def above_reserve(self, shares: Mapping[str, Share]) -> dict[str, int]:
        """How much of what each namespace with a reserve has may go for others."""
        return {
            name: max(0, self.bytes_of(name) - share.reserved_bytes)
            for name, share in shares.items()
            if share.reserved_bytes and name in self._in_segments
        }

    def reserved_in(self, segment: int, above_reserve: Mapping[str, int]) -> int:
        """What of a segment gives way to no other namespace."""
        return sum(
            max(0, int(self._in_segments[name][segment]) - above)
            for name, above in above_reserve.items()
        )
