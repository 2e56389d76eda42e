"""How fast members fetch, from what they say of themselves now and then. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Part = tuple[int, bytes]
"""(member, version)."""


@dataclass(slots=True)
class _Pace:
    began_at: float
    began_permille: int
    changed_at: float
    permille: int


class Paces:
    """Remembers those that fetch something now, and no others."""

    def __init__(self) -> None:
        self._paces: dict[Part, _Pace] = {}

    def look(self, fetching: Mapping[Part, int], now: float) -> None:
        """So much, in permille, has each of those who fetch."""
        for part in [each for each in self._paces if each not in fetching]:
            del self._paces[part]
        for part, permille in fetching.items():
            pace = self._paces.get(part)
            if pace is None or permille < pace.permille:
                self._paces[part] = _Pace(now, permille, now, permille)
            elif permille > pace.permille:
                pace.permille, pace.changed_at = permille, now

    def permille_per_second(self, part: Part) -> float:
        """Since it was seen first; 0 where that is not known yet."""
        pace = self._paces.get(part)
        if pace is None or pace.changed_at <= pace.began_at:
            return 0.0
        return (pace.permille - pace.began_permille) / (pace.changed_at - pace.began_at)
