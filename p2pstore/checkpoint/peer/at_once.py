"""Whether the event loop reads or writes a piece itself, or has a thread do it. Pure.

A small piece is hashed and copied to or from the page cache in a fraction of a millisecond, and handing that to a
thread and back costs as much of the interpreter. But a disk that is behind, or a network behind a file system, would
hold up everything: only what lies on a disk or in memory of this machine is done at once, and after a step that took
long, many are left to threads.
"""

from __future__ import annotations

from typing import Final

from p2pstore.objects import MIB

MOST_BYTES: Final = MIB
MOST_FILES: Final = 8
"""To open and close a file takes 20 us; a piece may have ten thousand of them."""
SLOW_SECONDS: Final = 0.005
FIRST_IN_THREADS: Final = 64
"""Steps that are left to threads after a slow one; twice as many after the next."""
MOST_IN_THREADS: Final = 16_384


class AtOnce:
    """Ask `may` before each step, and say how long it `took`."""

    def __init__(self, is_local: bool) -> None:
        """`is_local`: the pieces are in memory, or on a disk of this machine."""
        self._is_local = is_local
        self._in_threads = 0
        self._after_slow = FIRST_IN_THREADS

    def may(self, length_bytes: int, files: int = 1) -> bool:
        """Whether the next step, with so many bytes of so many files, is to be done at once."""
        if not self._is_local or length_bytes > MOST_BYTES or files > MOST_FILES:
            return False
        if self._in_threads:
            self._in_threads -= 1
            return False
        return True

    def took(self, seconds: float, waited: bool) -> None:
        """A step was done at once, in so many seconds; `waited`: for something, not only for a core that others had."""
        if waited and seconds > SLOW_SECONDS:
            self._in_threads = self._after_slow
            self._after_slow = min(2 * self._after_slow, MOST_IN_THREADS)
