"""The places for data connections, and who has them. Shell-free: `DataServer` opens and closes the connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2pstore.access.crowding import Holder, yielding
from p2pstore.runtime.byte_budget import Owner


class Session(Protocol):
    """One connection after its hello."""

    @property
    def idle_since(self) -> float | None:
        """When it was last used (monotonic), None while it is in use."""
        ...


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
        self._places: dict[Session, _Place] = {}

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._places)

    def holders(self) -> list[Holder]:
        """Who has them."""
        now = time.monotonic()
        holders = []
        for session, place in self._places.items():
            idle_since = session.idle_since
            used_at = now if idle_since is None else idle_since
            holders.append(
                Holder(place.owner.host, place.owner.member, idle_since is None, used_at)
            )
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

    def take(self, session: Session, owner: Owner, end: Callable[[], None]) -> None:
        """A connection for which there is room has a place until `leave`; `end` ends it."""
        self._places[session] = _Place(owner, end)

    def leave(self, session: Session) -> None:
        """It has ended; may be called twice."""
        self._places.pop(session, None)
