"""What each holder (a connection, the peer itself) has reserved and leased. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count

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
        self, holder: Hashable, offset: int, length: int, capacity: int, slot: int
    ) -> Reservation:
        """A new one, with a number that no other has had."""
        reservation = Reservation(next(self._numbers), offset, length, capacity, slot, holder)
        self._by_number[reservation.number] = reservation
        self._of.setdefault(holder, set()).add(reservation.number)
        self.reserved_bytes += capacity
        return reservation

    def get(self, number: int, holder: Hashable) -> Reservation:
        """Raises `ValueError` when the holder has no such reservation (any more)."""
        reservation = self._by_number.get(number)
        if reservation is None or reservation.holder != holder:
            raise ValueError(f"reservation {number} has ended, or was made by somebody else")
        return reservation

    def end(self, reservation: Reservation) -> None:
        number, holder = reservation.number, reservation.holder
        del self._by_number[number]
        numbers = self._of[holder]
        numbers.remove(number)
        if not numbers:
            del self._of[holder]
        self.reserved_bytes -= reservation.capacity

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
