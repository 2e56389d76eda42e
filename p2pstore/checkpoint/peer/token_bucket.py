"""A limit on bytes a second. Pure."""

from __future__ import annotations

from typing import Final

BURST_SECONDS: Final = 0.25
"""So much of what was not used may be used later at once."""


class TokenBucket:
    """How long to wait before so many more bytes may move. What is larger than the bucket waits for it to be full, and
    those who come next wait for what it owes."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self._rate = bytes_per_second
        self._free_at = now
        """When all that was taken so far has been paid for."""

    def take(self, length_bytes: int, now: float) -> float:
        """Take so many bytes; seconds to wait before they may move."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + length_bytes / self._rate
        return max(0.0, begin - now)

    def give_back(self, length_bytes: int) -> None:
        """So many bytes did not move after all."""
        self._free_at -= length_bytes / self._rate
