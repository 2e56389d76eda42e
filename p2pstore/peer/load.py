"""How busy a peer is, as it tells others. Pure."""

from __future__ import annotations

from typing import Final

INTERVAL_SECONDS: Final = 2.0
WORTH_TELLING_PERMILLE: Final = 250
"""Each time it is told costs a signature, and everybody else a check of it."""


class LoadMeter:
    """Measures the share of a core that the process takes, over some seconds each. Readers take the less loaded of two
    holders."""

    def __init__(self, now: float, cpu_seconds: float) -> None:
        self.told_permille = 0
        self._since = now
        self._cpu_seconds = cpu_seconds

    def sample(self, now: float, cpu_seconds: float) -> bool:
        """The process has taken so much processor time since it began. Whether `told_permille` is another now."""
        elapsed = now - self._since
        if elapsed < INTERVAL_SECONDS:
            return False
        permille = round(1000 * max(0.0, cpu_seconds - self._cpu_seconds) / elapsed)
        self._since, self._cpu_seconds = now, cpu_seconds
        if abs(permille - self.told_permille) < WORTH_TELLING_PERMILLE:
            return False
        self.told_permille = permille
        return True
