"""What the simulator itself writes down of each log, to compare with what its readers believe."""

from __future__ import annotations

from p2pstore.gossip.records import location_hash


class LogTruth:
    """What one log held after each of its operations, kept by the simulator beside the log."""

    def __init__(self) -> None:
        self.hashes = [0]
        """By sequence: XOR of the hashes of the held records."""
        self._held: dict[bytes, bytes] = {}
        self._by_digest: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def note(self, digest: bytes, packed: bytes | None) -> None:
        """The next operation: a record, or None for its withdrawal."""
        change = 0
        before = self._held.pop(digest, None)
        if before is not None:
            change ^= location_hash(before)
        if packed is not None:
            self._held[digest] = packed
            change ^= location_hash(packed)
        self.hashes.append(self.hashes[-1] ^ change)
        self._by_digest.setdefault(digest, []).append((len(self.hashes) - 1, packed))

    def at(self, digest: bytes, sequence: int) -> bytes | None:
        found = None
        for number, packed in self._by_digest.get(digest, ()):
            if number > sequence:
                break
            found = packed
        return found
