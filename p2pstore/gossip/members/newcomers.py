"""Peers that others tell of and this one has not met: whom to ping, so that invented ones do not count. Pure.

A peer is a member here once something came from it on a channel of its own (see `membership`). One that is only told
of is pinged. When it answers it is exchanged with, which brings its record from itself. When it does not, nothing is
kept of it: the members that know it tell of it again. Each member that tells of peers has pings of its own, so
one that invents them holds up no newcomers that others tell of.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from p2pstore.gossip.exchange.message_budget import MessageBudget
from p2pstore.gossip.records import PeerId

PINGS_A_SECOND: Final = 8.0
PINGS_AT_ONCE: Final = 64
"""For one member's word. A peer that joins a cluster is told of everybody by the first that it meets."""
MAX_IN_FLIGHT: Final = 64
MAX_IN_FLIGHT_A_MEMBER: Final = 16
AGAIN_SECONDS: Final = 1.0
"""Shortest time between two pings of the same peer."""
MAX_REMEMBERED: Final = 1024
"""Peers that were pinged, and members that told of some; those that were heard of last are kept."""


Value = TypeVar("Value")


class _Ping(NamedTuple):
    by: PeerId
    addresses: tuple[str, ...]


class Newcomers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[PeerId, MessageBudget] = OrderedDict()
        self._pinged_at: OrderedDict[PeerId, float] = OrderedDict()
        self._in_flight: dict[PeerId, _Ping] = {}
        self._to_ping: list[PeerId] = []

    def told_of(self, peer_id: PeerId, control: Sequence[str], by: PeerId, now: float) -> None:
        """The member `by` tells of a peer at these addresses. Ping it, unless that was done just now, or too many are
        under way."""
        if peer_id in self._in_flight or len(self._in_flight) >= MAX_IN_FLIGHT or not control:
            return
        if now < self._pinged_at.get(peer_id, -AGAIN_SECONDS) + AGAIN_SECONDS:
            return
        under_way = Counter(ping.by for ping in self._in_flight.values())
        if under_way[by] >= MAX_IN_FLIGHT_A_MEMBER or not self._affords(by, now):
            return
        self._in_flight[peer_id] = _Ping(by, tuple(control))
        _remember(self._pinged_at, peer_id, now)
        self._to_ping.append(peer_id)

    def addresses_of(self, peer_id: PeerId) -> list[str]:
        """Where a peer is that is being pinged."""
        ping = self._in_flight.get(peer_id)
        return [] if ping is None else list(ping.addresses)

    def answered(self, peer_id: PeerId) -> None:
        """A ping of this peer has ended, with an answer or without."""
        self._in_flight.pop(peer_id, None)

    def take(self) -> list[PeerId]:
        """Whom to ping now."""
        taken, self._to_ping = self._to_ping, []
        return taken

    @property
    def is_due(self) -> bool:
        """Whether there is anybody to ping."""
        return bool(self._to_ping)

    def _affords(self, by: PeerId, now: float) -> bool:
        budget = self._budgets.get(by) or MessageBudget(PINGS_A_SECOND, PINGS_AT_ONCE)
        if not budget.has(1, now):
            return False
        budget.take(1, now)
        _remember(self._budgets, by, budget)
        return True


def _remember(table: OrderedDict[PeerId, Value], peer_id: PeerId, value: Value) -> None:
    table[peer_id] = value
    table.move_to_end(peer_id)
    if len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
