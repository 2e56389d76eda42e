"""How busy a peer is, as it tells others. Pure."""

from __future__ import annotations

from typing import Final

INTERVAL_SECONDS: Final = 2.0
WORTH_TELLING_PERMILLE: Final = 250
"""Each time it is told costs a signature, and everybody else a check of it."""


class LoadMeter:
    """Measures what the process takes of a core, and its large answers of the upload slots, over some seconds each. The
    larger share is its load: at 1000 permille of either, who asks for more is late. Readers take the less loaded of
    two holders, and schedulers look at it (`p2pstore.routing`)."""

    def __init__(self, now: float, cpu_seconds: float, upload_slots: int) -> None:
        self.told_permille = 0
        self._slots = upload_slots
        self._since = now
        self._cpu_seconds = cpu_seconds
        self._upload_seconds = 0.0

    def sample(self, now: float, cpu_seconds: float, upload_seconds: float) -> bool:
        """The process has taken so much processor time since it began, and large answers so much time of all slots
        together. Whether `told_permille` is another now."""
        elapsed = now - self._since
        if elapsed < INTERVAL_SECONDS:
            return False
        of_a_core = (cpu_seconds - self._cpu_seconds) / elapsed
        of_slots = (upload_seconds - self._upload_seconds) / elapsed / self._slots
        permille = round(1000 * max(0.0, of_a_core, of_slots))
        self._since, self._cpu_seconds, self._upload_seconds = now, cpu_seconds, upload_seconds
        if abs(permille - self.told_permille) < WORTH_TELLING_PERMILLE:
            return False
        self.told_permille = permille
        return True
