"""The places for connections to other peers: limits, queues, and which connection is used next."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2pstore.errors import DeadlineExceeded, StoreClosed, Unavailable
from p2pstore.runtime.streams import Driver, Event
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.wire import Code

IDLE_SECONDS: Final = 300.0
"""Older idle connections are not trusted: the other side closes them after 600 s, firewalls earlier."""
SPARE_SECONDS: Final = 60.0
"""Age from which on the least used idle connection is closed, while others are idle. The one used last is taken first,
so those that wait are of a burst that has passed."""
QUEUE_SECONDS: Final = 600.0
"""Upper bound of the wait for a connection, while each of its users makes progress."""
MAX_PLACES: Final = 32
MAX_IDLE: Final = 256


@dataclass(slots=True, eq=False)
class ConnectionPlace:
    """Room for one connection. `users` have it or queue for it, all of them `briefly` or not; `turns` are the events of
    the queue."""

    users: int = 0
    briefly: bool = False
    connection: DataConnection | None = None
    connected_at: float = 0.0
    idle_since: float = 0.0
    failure: DeadlineExceeded | Unavailable | None = None
    """The error of the last brief use, at `failed_at`."""
    failed_at: float = -math.inf
    turns: deque[Event] = field(default_factory=deque)


class ConnectionPlaces:
    """At most `max_places` connections to one peer, of which `idle_per_peer` are kept when idle; `max_idle` over all
    peers. Spare ones are closed. For any number of tasks or threads."""

    def __init__(self, driver: Driver, *, max_places: int, idle_per_peer: int, max_idle: int) -> None:
        self.driver = driver
        self._max_places = max_places
        self._idle_per_peer = idle_per_peer
        self._max_idle = max_idle
        self._peers: dict[bytes, list[ConnectionPlace]] = {}
        self._state = threading.Lock()  # guards the places; held for microseconds, never awaited in
        self._closed = False
        self._renewed_at = 0.0

    def close(self) -> None:
        """Close every connection; those in use fail at their next step."""
        with self._state:
            self._closed = True
            places = [place for some in self._peers.values() for place in some]
            self._peers.clear()
        for place in places:
            if place.connection is not None:
                place.connection.close()

    def renew(self) -> None:
        """Connect anew for what is asked from now on: the keys that tickets are made with have changed."""
        with self._state:
            self._renewed_at = time.monotonic()
            places = [place for some in self._peers.values() for place in some]
            _close_oldest(places, 0)

    @property
    def open_connections(self) -> int:
        """Connections that are open now, idle or in use."""
        with self._state:
            return sum(_is_open(place) for places in self._peers.values() for place in places)

    def check_worth(self, place: ConnectionPlace, came_at: float) -> None:
        """Raise the error of a brief use of this place that ended while the caller queued behind it; otherwise many
        readers of a hung peer would wait for it one after the other. And `StoreClosed`, when it was closed
        meanwhile."""
        if self._closed:
            raise StoreClosed("the data connections were closed")
        if place.failure is not None and place.failed_at > came_at:
            raise type(place.failure)(str(place.failure))

    def choose(
        self, peer_id: bytes, briefly: bool, *, may_queue: bool
    ) -> tuple[ConnectionPlace, Event | None]:
        """A place, and the event to wait for when it is taken."""
        with self._state:
            if self._closed:
                raise StoreClosed("the data connections were closed")
            places = self._peers.setdefault(peer_id, [])
            for place in reversed(places):  # the one used last is the most likely to be alive
                if not place.users:
                    place.users, place.briefly = 1, briefly
                    return place, None
            shared = [place for place in places if place.briefly] if briefly else []
            if len(places) < self._max_places and len(shared) < self._idle_per_peer:
                place = ConnectionPlace(1, briefly)
                places.append(place)
                return place, None
            if not may_queue:
                raise PullFailed(Code.BUSY, "all connections to the holder are in use")
            place = min(shared or places, key=lambda each: each.users)
            place.users += 1
            place.briefly = place.briefly and briefly
            turn = self.driver.event()
            place.turns.append(turn)
            return place, turn

    async def wait_for(
        self, turn: Event, peer_id: bytes, answer_seconds: float, place: ConnectionPlace
    ) -> None:
        """Queue for a place. Raises `DeadlineExceeded` after `QUEUE_SECONDS`, `PullFailed` (BUSY) when another holder
        is to be asked before that."""
        try:
            if not await turn.wait(min(QUEUE_SECONDS, answer_seconds)):
                if answer_seconds < QUEUE_SECONDS:
                    raise PullFailed(Code.BUSY, "all connections to the holder are in use")
                raise DeadlineExceeded(
                    f"all {self._max_places} connections to the peer were busy for {QUEUE_SECONDS:g} s"
                )
        except BaseException:
            with self._state:
                queued = turn in place.turns
                if queued:
                    place.turns.remove(turn)
                    place.users -= 1
            if not queued:  # it came in the same moment, and is the next one's
                self.give_back(peer_id, place)
            raise

    def take_kept(self, place: ConnectionPlace) -> DataConnection | None:
        connection = place.connection
        if connection is None or connection.closed:
            return None
        stale = time.monotonic() - place.idle_since > IDLE_SECONDS
        if stale or connection.abandoned or place.connected_at < self._renewed_at:
            connection.close()
            return None
        return connection

    def keep(self, place: ConnectionPlace, connection: DataConnection, connected_at: float) -> None:
        with self._state:
            if self._closed:
                connection.close()
                raise StoreClosed("the data connections were closed")
            place.connection = connection
            place.connected_at = connected_at
            place.failure = None

    def give_back(self, peer_id: bytes, place: ConnectionPlace) -> None:
        """Leave a place; close what would be too many idle connections."""
        with self._state:
            place.users -= 1
            if place.turns:
                place.turns.popleft().set()
                return
            place.idle_since = time.monotonic()
            places = self._peers.get(peer_id)
            if places is None:
                return
            if places[-1] is not place:
                places.remove(place)
                places.append(place)
            is_open = _is_open(place)
            if not is_open:  # others first
                places.insert(0, places.pop())
            elif len(places) > 1 and _is_spare(places[0], place.idle_since):
                _close_oldest(places[:1], 0)
                del places[0]
            if len(places) <= self._idle_per_peer and is_open and self._few_peers():
                return
            _close_oldest(places, self._idle_per_peer)
            self._drop_empty(peer_id)
            if not self._few_peers():
                _close_oldest([each for some in self._peers.values() for each in some], self._max_idle)
                for other in list(self._peers):
                    self._drop_empty(other)

    def _few_peers(self) -> bool:
        """Whether the limit over all peers cannot be reached."""
        return len(self._peers) * self._idle_per_peer <= self._max_idle

    def _drop_empty(self, peer_id: bytes) -> None:
        places = [each for each in self._peers[peer_id] if each.users or _is_open(each)]
        if places:
            self._peers[peer_id] = places
        else:
            del self._peers[peer_id]


def _close_oldest(places: Sequence[ConnectionPlace], keep: int) -> None:
    """Close idle connections, those unused for longest first, until `keep` are left."""
    idle = sorted(
        (each for each in places if not each.users and _is_open(each)), key=lambda each: each.idle_since
    )
    for place in idle[: max(0, len(idle) - keep)]:
        assert place.connection is not None
        place.connection.close()


def _is_spare(place: ConnectionPlace, now: float) -> bool:
    return not place.users and now - place.idle_since > SPARE_SECONDS


def _is_open(place: ConnectionPlace) -> bool:
    return place.connection is not None and not place.connection.closed
