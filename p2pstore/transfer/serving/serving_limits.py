"""Limits of a data server: places for connections, large answers in flight, times. `DataServer` applies them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pstore.access.crowding import PlaceOwner, yielding
from p2pstore.objects import GIB, PART_BYTES
from p2pstore.runtime.byte_budget import Owner

if TYPE_CHECKING:
    from p2pstore.transfer.serving.data_session import DataSession


@dataclass(frozen=True, slots=True)
class _Place:
    owner: Owner
    end: Callable[[], None]


class DataPlaces:
    """At most `limit` connections. Where all places are taken, one without use goes for one that is wanted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.yielded = 0
        """Connections that went for another one."""
        self.refused = 0
        """Those that were turned away, as all places were in use."""
        self._places: dict[DataSession, _Place] = {}

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._places)

    def holders(self) -> list[PlaceOwner]:
        """Their holders."""
        now = time.monotonic()
        holders = []
        for session, place in self._places.items():
            idle_since = session.idle_since
            used_at = now if idle_since is None else idle_since
            holders.append(PlaceOwner(place.owner.host, place.owner.member, idle_since is None, used_at))
        return holders

    def make_room(self, owner: Owner) -> bool:
        """Whether one more connection of this owner may come; another one may be ended for it."""
        if len(self._places) < self.limit:
            return True
        index = yielding(self.holders(), owner.host, owner.member, self.limit)
        if index is None:
            self.refused += 1
            return False
        self.yielded += 1
        session = list(self._places)[index]
        self._places.pop(session).end()
        return True

    def take(self, session: DataSession, owner: Owner, end: Callable[[], None]) -> None:
        """A connection for which there is room has a place until `leave`; `end` ends it."""
        self._places[session] = _Place(owner, end)

    def leave(self, session: DataSession) -> None:
        """It has ended; may be called twice."""
        self._places.pop(session, None)


class Uploads:
    """`places` is how many there may be before readers that know other holders are refused: more would share the same
    network, and all be done later. Times are monotonic seconds."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._changing = threading.Lock()
        self._ended_seconds = 0.0
        self._began_sum = 0.0
        """Of when those on their way began."""
        self.taken = 0
        """How many are on their way."""

    def begin(self, now: float, *, may_refuse: bool = False) -> bool:
        """A large answer is to be sent from now on; whether it may. Where it is not to be refused, it always may."""
        with self._changing:
            if may_refuse and self.taken >= self._places:
                return False
            self.taken += 1
            self._began_sum += now
            return True

    def end(self, began: float, now: float) -> None:
        """One that began then is there, or has failed."""
        with self._changing:
            self.taken -= 1
            self._began_sum -= began
            self._ended_seconds += now - began

    def seconds(self, now: float) -> float:
        """How long answers were on their way until now, all of them together."""
        with self._changing:
            return self._ended_seconds + self.taken * now - self._began_sum


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Upper bounds of the cost of strangers and slow readers. Times in seconds."""

    connections: int = 1024
    uploads: int = 16
    """Large answers on their way at once, before readers that know other holders are told BUSY. More would share the
    same network, and all be done later."""
    unproved: int = 256
    unproved_per_address: int = 32
    hello_seconds: float = 5.0
    idle_seconds: float = 600.0
    progress_seconds: float = 5.0
    frame_seconds: float = 30.0
    """By when a request that has begun is whole: 1 MiB at 35 KB/s."""
    store_seconds: float = 10.0
    store_bytes_per_second: float = 1e6
    """A value that is stored arrives in that time, plus its length at that rate: its room is taken."""
    measured_bytes: int = 64 * GIB
    """Most bytes that one connection moves only to measure; `doctor` stops after seconds."""
    handlers_per_connection: int = 64
    reply_bulk_bytes: int = PART_BYTES
