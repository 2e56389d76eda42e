"""A thread that does nothing but look at the clock: when it could not for a while, the whole machine stood still."""

import threading
import time
from typing import Final

BEAT_SECONDS: Final = 0.1
STANDSTILL_SECONDS: Final = 1.5
FRESH_SECONDS: Final = 0.7


class Heartbeat:
    """Beats until `end`."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._gaps: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def gaps(self) -> list[tuple[float, float]]:
        """Standstills (from, to) since the last call. Waits for a beat: a caller that was stopped as well hears of that
        before anything else."""
        while time.monotonic() - self._last > FRESH_SECONDS:
            time.sleep(BEAT_SECONDS / 2)
        with self._lock:
            gaps, self._gaps = self._gaps, []
        return gaps

    def end(self) -> None:
        """Stop it."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            now = time.monotonic()
            with self._lock:
                if now - self._last > STANDSTILL_SECONDS:
                    self._gaps.append((self._last, now))
                self._last = now
