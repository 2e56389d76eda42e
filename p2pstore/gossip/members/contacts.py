"""Addresses to try when no member is known there: bootstrap addresses and the saved address book.
Pure.

A bootstrap address is tried again, ever less often, whenever the peer it led to is not a live
member. So peers may start in any order, and a peer that lost everybody finds its way back. Entries
of the address book are tried only while this peer is alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from p2pstore.gossip.records import PeerId

FIRST_DELAY_SECONDS: Final = 0.5
LAST_DELAY_SECONDS: Final = 30.0
MAX_IN_FLIGHT: Final = 8
MAX_CONTACTS: Final = 10_000

Addresses = tuple[str, ...]


@dataclass(slots=True)
class _Contact:
    bootstrap: bool
    peer_id: PeerId | None
    due_at: float
    delay_seconds: float = FIRST_DELAY_SECONDS
    in_flight: bool = False


class Contacts:
    """The schedule of attempts. Contacts are told apart by their addresses."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._contacts: dict[Addresses, _Contact] = {}
        self._in_flight = 0
        self._look_at = math.inf
        """When one that is not being tried may be due. Between two such moments nobody goes through all."""
        self.succeeded_once = False
        """Whether any contact has answered since the start."""

    def add(
        self, addresses: Sequence[str], peer_id: PeerId | None = None, *, bootstrap: bool = True
    ) -> None:
        """Try these addresses of one peer from now on. Above 10,000 contacts more are ignored.

        What was in the address book and is named again as a bootstrap address is one from then on.
        """
        key = tuple(addresses)
        known = self._contacts.get(key)
        if known is not None:
            known.bootstrap |= bootstrap
        elif key and len(self._contacts) < MAX_CONTACTS:
            self._contacts[key] = _Contact(bootstrap, peer_id, -math.inf)
            self._look_at = -math.inf

    def remove(self, addresses: Sequence[str]) -> None:
        """Never try these addresses again: they are this peer's own."""
        contact = self._contacts.pop(tuple(addresses), None)
        if contact is not None and contact.in_flight:
            self._in_flight -= 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no address to try at all."""
        return not self._contacts

    def due(self, now: float, is_live: Callable[[PeerId], bool], alone: bool) -> list[Addresses]:
        """Whom to contact now; each is answered by `succeeded` or `failed`."""
        chosen: list[Addresses] = []
        if now < self.next_due():
            return chosen
        for addresses, contact in self._contacts.items():
            if self._in_flight >= MAX_IN_FLIGHT:
                break
            if contact.in_flight or contact.due_at > now:
                continue
            met = contact.peer_id is not None and is_live(contact.peer_id)
            if met or not (contact.bootstrap or alone):
                contact.due_at = now + FIRST_DELAY_SECONDS
                contact.delay_seconds = FIRST_DELAY_SECONDS
                continue
            contact.in_flight = True
            self._in_flight += 1
            chosen.append(addresses)
        waiting = (each.due_at for each in self._contacts.values() if not each.in_flight)
        self._look_at = min(waiting, default=math.inf)
        return chosen

    def succeeded(self, addresses: Sequence[str], peer_id: PeerId, now: float) -> None:
        """The peer `peer_id` answered there."""
        self.succeeded_once = True
        contact = self._contacts.get(tuple(addresses))
        if contact is not None:
            contact.peer_id = peer_id
            # Time for its record to arrive; from then on it is a live member and not due.
            self._tried(contact, now)

    def failed(self, addresses: Sequence[str], now: float) -> None:
        """Nobody answered there, or not one of ours."""
        contact = self._contacts.get(tuple(addresses))
        if contact is not None:
            self._tried(contact, now)

    def next_due(self) -> float:
        """When `due` may have something; infinity when there is nothing to wait for."""
        return math.inf if self._in_flight >= MAX_IN_FLIGHT else self._look_at

    def book(self) -> dict[PeerId, Addresses]:
        """Addresses of peers that were once met there."""
        return {c.peer_id: a for a, c in self._contacts.items() if c.peer_id is not None}

    def _tried(self, contact: _Contact, now: float) -> None:
        if contact.in_flight:
            self._in_flight -= 1
        contact.in_flight = False
        contact.due_at = now + contact.delay_seconds * self._rng.uniform(0.75, 1.25)
        contact.delay_seconds = min(2 * contact.delay_seconds, LAST_DELAY_SECONDS)
        self._look_at = min(self._look_at, contact.due_at)
