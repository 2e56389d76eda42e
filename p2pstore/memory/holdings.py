"""What each holder (a connection, the peer itself) has reserved and leased. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import count

import msgspec

from p2pstore.memory.entries import ObjectEntry, Reservation


class Reservations:
    """Reservations by number, and the numbers of each holder."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._by_number: dict[int, Reservation] = {}
        self._of: dict[Hashable, set[int]] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_number.values())

    def add(
        self,
        holder: Hashable,
        offsets: Sequence[int],
        length: int,
        capacity: int,
        slots: Sequence[int],
    ) -> list[Reservation]:
        """New ones of one size, with numbers that no others have had."""
        made = [
            Reservation(number, offset, length, capacity, slot, holder)
            for offset, slot, number in zip(offsets, slots, self._numbers, strict=False)
        ]
        by_number = {reservation.number: reservation for reservation in made}
        self._by_number.update(by_number)
        if made:
            self._of.setdefault(holder, set()).update(by_number)
        self.reserved_bytes += capacity * len(made)
        return made

    def get(self, number: int, holder: Hashable) -> Reservation:
        """Raises `ValueError` when the holder has no such reservation (any more)."""
        reservation = self._by_number.get(number)
        if reservation is None or reservation.holder != holder:
            raise ValueError(f"reservation {number} has ended, or was made by somebody else")
        return reservation

    def end(self, reservations: Iterable[Reservation]) -> None:
        """These are over."""
        for number, _, _, capacity, _, holder in map(msgspec.structs.astuple, reservations):
            del self._by_number[number]
            numbers = self._of[holder]
            numbers.remove(number)
            if not numbers:
                del self._of[holder]
            self.reserved_bytes -= capacity

    def of(self, holder: Hashable) -> tuple[int, ...]:
        """The holder's reservation numbers."""
        return tuple(self._of.get(holder, ()))

    def count_of(self, holder: Hashable) -> int:
        return len(self._of.get(holder, ()))


class Leases:
    """Leases by number, the numbers of each holder, and how many bytes they keep."""

    def __init__(self) -> None:
        self._by_number: dict[int, tuple[ObjectEntry, Hashable]] = {}
        self._of: dict[Hashable, set[int]] = {}
        self._bytes_of: dict[Hashable, int] = {}
        self._numbers = count(1)

    def entries(self) -> Iterator[ObjectEntry]:
        """The leased entry of each lease."""
        return (entry for entry, _ in self._by_number.values())

    def add(self, entry: ObjectEntry, holder: Hashable) -> int:
        number = next(self._numbers)
        self._by_number[number] = (entry, holder)
        self._of.setdefault(holder, set()).add(number)
        self._bytes_of[holder] = self.bytes_of(holder) + entry.length
        return number

    def end(self, number: int, holder: Hashable) -> ObjectEntry:
        """The entry that was leased. Raises `ValueError` when the holder has no such lease."""
        entry, owner = self._by_number.get(number, (None, None))
        if entry is None or owner != holder:
            raise ValueError(f"lease {number} has ended, or was taken by somebody else")
        del self._by_number[number]
        self._bytes_of[holder] -= entry.length
        numbers = self._of[holder]
        numbers.remove(number)
        if not numbers:
            del self._of[holder], self._bytes_of[holder]
        return entry

    def of(self, holder: Hashable) -> tuple[int, ...]:
        """The holder's lease numbers."""
        return tuple(self._of.get(holder, ()))

    def bytes_of(self, holder: Hashable) -> int:
        """Payload bytes of the holder's leases, each lease counted."""
        return self._bytes_of.get(holder, 0)
