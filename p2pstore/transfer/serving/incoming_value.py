"""A value that arrives in parts, checked chunk by chunk as it does. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from p2pstore.errors import ProtocolError
from p2pstore.objects import CHUNK_BYTES, chunk_count, chunk_sum


class IncomingValue:
    """Fills `view` from front to end. `sums` are the chunk sums that were announced, packed u64.

    Raises `ProtocolError` when there is not one sum per chunk.
    """

    def __init__(self, view: memoryview, sums: bytes) -> None:
        if len(sums) != 8 * chunk_count(len(view)):
            raise ProtocolError(f"{len(sums)} bytes of chunk sums for {len(view):,} bytes")
        self._view = view
        self._sums = memoryview(sums).cast("Q")
        self._position = 0

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and is right."""
        return self._position == len(self._view)

    def part(self, offset: int, length_bytes: int) -> Iterator[memoryview]:
        """Where the bytes of the next part go, chunk by chunk: fill each before the next is asked for.

        Raises `ProtocolError`, before the first, for a part that does not begin where the one before
        ended, is empty, goes beyond the value or ends within a chunk; `ValueError` for a chunk that is
        not the one announced.
        """
        end = offset + length_bytes
        if offset != self._position or end > len(self._view):
            raise ProtocolError(
                f"a part from byte {offset:,} to {end:,} of a value of {len(self._view):,} bytes, of "
                f"which {self._position:,} have arrived"
            )
        if (end % CHUNK_BYTES or not length_bytes) and end != len(self._view):
            raise ProtocolError("a part that ends within a chunk")
        return self._fill(end)

    def _fill(self, end: int) -> Iterator[memoryview]:
        while self._position < end:
            number = self._position // CHUNK_BYTES
            chunk = self._view[self._position : self._position + CHUNK_BYTES]
            yield chunk
            if chunk_sum(chunk) != self._sums[number]:
                raise ValueError(
                    f"chunk {number} is not the one that was announced: the value was changed while "
                    "it was being stored, or spoilt on its way"
                )
            self._position += len(chunk)
