"""Addresses to try when no member is known there: bootstrap addresses and the saved address book.
Pure.

A bootstrap address is tried again, ever less often, whenever the peer it led to is not a live
member. So peers may start in any order, and a peer that lost all others finds its way back. Entries
of the address book are tried only while this peer is alone.

An address goes into the book only after the peer there has admitted this one (or was a member). Who
answers there first proves its identity, and that much a peer of another cluster does as well.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, TypeVar

from p2pstore.gossip.exchange.message_budget import MemberBudgets
from p2pstore.gossip.members.member_table import MemberTable
from p2pstore.gossip.records import PeerId
from p2pstore.objects import put_newest

FIRST_DELAY_SECONDS: Final = 0.5
LAST_DELAY_SECONDS: Final = 30.0
MAX_IN_FLIGHT: Final = 8
"""Attempts at one time, of bootstrap addresses and of others each: a book full of addresses that do not answer must
not hold up an address that the user named."""
MAX_CONTACTS: Final = 10_000

Addresses = tuple[str, ...]


@dataclass(slots=True)
class _Contact:
    bootstrap: bool
    loaded: bool
    in_book: bool
    peer_id: PeerId | None
    due_at: float
    delay_seconds: float = FIRST_DELAY_SECONDS
    in_flight: bool = False


class Contacts:
    """The schedule of attempts. Contacts are told apart by their addresses."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._contacts: dict[Addresses, _Contact] = {}
        self._look_at = math.inf
        """When one that may be tried may be due. Contacts are not gone through before."""
        self._unproven: dict[PeerId, set[Addresses]] = {}
        """Where peers answered that have not admitted this one yet."""
        self.admitted_once = False
        """Whether any peer has admitted this one since the start."""

    def add(
        self,
        addresses: Sequence[str],
        peer_id: PeerId | None = None,
        *,
        bootstrap: bool = True,
        loaded: bool = False,
        in_book: bool = False,
    ) -> None:
        """Try these addresses of one peer, of at most 10,000 contacts. `loaded`: an earlier run remembered them;
        `in_book`: a member was there in this one. Named as a bootstrap address, one of the address book becomes one."""
        key = tuple(addresses)
        known = self._contacts.get(key)
        if known is not None:
            known.bootstrap |= bootstrap
            known.loaded |= loaded
            known.in_book |= in_book
            self._look_at = -math.inf
        elif key and len(self._contacts) < MAX_CONTACTS:
            self._contacts[key] = _Contact(bootstrap, loaded, in_book, peer_id, -math.inf)
            self._look_at = -math.inf

    def remove(self, addresses: Sequence[str]) -> None:
        """Never try these addresses again: they are this peer's own."""
        self._contacts.pop(tuple(addresses), None)
        self._look_at = -math.inf  # another one may have its place

    @property
    def is_empty(self) -> bool:
        """Whether there is no address to try at all."""
        return not self._contacts

    def due(self, now: float, is_live: Callable[[PeerId], bool], alone: bool) -> list[Addresses]:
        """Contacts to try now, bootstrap addresses first; each is answered by `succeeded` or `failed`."""
        chosen: list[Addresses] = []
        if now < self.next_due():
            return chosen
        look_at = {True: math.inf, False: math.inf}
        in_flight = Counter(each.bootstrap for each in self._contacts.values() if each.in_flight)
        for addresses, contact in self._contacts.items():
            if contact.in_flight or in_flight[contact.bootstrap] >= MAX_IN_FLIGHT:
                continue
            if contact.due_at <= now:
                met = contact.peer_id is not None and is_live(contact.peer_id)
                if not met and (contact.bootstrap or alone):
                    contact.in_flight = True
                    in_flight[contact.bootstrap] += 1
                    chosen.append(addresses)
                    continue
                contact.due_at = now + FIRST_DELAY_SECONDS
                contact.delay_seconds = FIRST_DELAY_SECONDS
            look_at[contact.bootstrap] = min(look_at[contact.bootstrap], contact.due_at)
        # Where all places are taken, `_tried` says when to look.
        self._look_at = min(
            math.inf if in_flight[kind] >= MAX_IN_FLIGHT else at for kind, at in look_at.items()
        )
        return sorted(chosen, key=lambda addresses: not self._contacts[addresses].bootstrap)

    def succeeded(self, addresses: Sequence[str], peer_id: PeerId, now: float) -> None:
        """The peer `peer_id` answered there; whether it admits this one is yet to be seen (`admitted`)."""
        key = tuple(addresses)
        contact = self._contacts.get(key)
        if contact is not None:
            contact.peer_id = peer_id
            if not contact.in_book:
                self._unproven.setdefault(peer_id, set()).add(key)
            # Time for its record to arrive; from then on it is a live member and not due.
            self._tried(contact, now)

    def admitted(self, peer_id: PeerId) -> None:
        """The peer has admitted this one: the addresses that led to it are worth remembering."""
        self.admitted_once = True
        for addresses in self._unproven.pop(peer_id, ()):
            contact = self._contacts.get(addresses)
            if contact is not None and contact.peer_id == peer_id:
                contact.in_book = True

    def failed(self, addresses: Sequence[str], now: float) -> None:
        """No peer of this cluster answered there."""
        contact = self._contacts.get(tuple(addresses))
        if contact is not None:
            self._tried(contact, now)

    def next_due(self) -> float:
        """When `due` may have something; infinity when there is nothing to wait for."""
        return self._look_at

    def known_at(self) -> dict[PeerId, Addresses]:
        """Where each peer that answered since the start, or was in the address book with its id, was found."""
        return {c.peer_id: a for a, c in self._contacts.items() if c.peer_id is not None}

    def book(self) -> Iterator[tuple[PeerId | None, Addresses]]:
        """Entries for the address book: addresses of members that were met, and until a peer has admitted this one
        those of an earlier run, which alone lead to the others. The id of a peer that did not answer yet is None."""
        for addresses, contact in self._contacts.items():
            if contact.in_book or (contact.loaded and not self.admitted_once):
                yield contact.peer_id, addresses

    def _tried(self, contact: _Contact, now: float) -> None:
        contact.in_flight = False
        contact.due_at = now + contact.delay_seconds * self._rng.uniform(0.75, 1.25)
        contact.delay_seconds = min(2 * contact.delay_seconds, LAST_DELAY_SECONDS)
        self._look_at = -math.inf  # others may have waited for its place


class AddressBook:
    """Where peers are, and where they were last: from records of members, and from contacts."""

    def __init__(self, contacts: Contacts, members: MemberTable, newcomers: Newcomers) -> None:
        self._contacts = contacts
        self._members = members
        self._newcomers = newcomers

    def of(self, peer_id: PeerId) -> list[str]:
        """Control addresses of a peer, from its record or the book."""
        state = self._members.get(peer_id)
        if state is not None and (record := state.record) is not None:
            return list(record.control)
        known = self._contacts.known_at().get(peer_id, ())
        return [*known, *self._newcomers.addresses_of(peer_id)]

    def entries(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Where each member was last, the living before the dead; for the state directory."""
        book: dict[PeerId, tuple[str, ...]] = {}
        for state in sorted(self._members.states(), key=lambda state: state.status):
            if state.control:
                book[state.peer_id] = state.control
        for peer_id, addresses in self._contacts.book():
            if peer_id is not None:
                book.setdefault(peer_id, addresses)
        book.pop(self._members.me, None)
        return list(book.items())

    def addresses(self) -> list[str]:
        """The addresses of `entries`, and those of peers whose ids are not known yet."""
        kept = [each for _, addresses in self.entries() for each in addresses]
        kept += [a for peer_id, those in self._contacts.book() if peer_id is None for a in those]
        return kept

    def load(self, book: Iterable[tuple[PeerId | None, Sequence[str]]]) -> None:
        """Peers of an earlier run, tried while this peer is alone."""
        for peer_id, addresses in book:
            self._contacts.add(addresses, peer_id, bootstrap=False, loaded=True)

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Addresses to join through, each of another peer."""
        for address in addresses:
            self._contacts.add((address,))


PINGS_A_SECOND: Final = 8.0
PINGS_AT_ONCE: Final = 64
"""For one member's word. A peer that joins a cluster is told of all members by the first that it meets."""
MAX_PINGED: Final = 64
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
    """Peers that a member told of. Each is pinged before it counts as a member, so that invented peers never do."""

    def __init__(self) -> None:
        self._pings = MemberBudgets[PeerId](PINGS_A_SECOND, PINGS_AT_ONCE, MAX_REMEMBERED)
        self._pinged_at: OrderedDict[PeerId, float] = OrderedDict()
        self._in_flight: dict[PeerId, _Ping] = {}
        self._to_ping: list[PeerId] = []

    def told_of(self, peer_id: PeerId, control: Sequence[str], by: PeerId, now: float) -> None:
        """Member `by` tells of a peer at these addresses: ping it, unless that was just done or too many are."""
        if peer_id in self._in_flight or len(self._in_flight) >= MAX_PINGED or not control:
            return
        if now < self._pinged_at.get(peer_id, -AGAIN_SECONDS) + AGAIN_SECONDS:
            return
        under_way = Counter(ping.by for ping in self._in_flight.values())
        if under_way[by] >= MAX_IN_FLIGHT_A_MEMBER or not self._pings.affords(by, now):
            return
        self._in_flight[peer_id] = _Ping(by, tuple(control))
        put_newest(self._pinged_at, peer_id, now, MAX_REMEMBERED)
        self._to_ping.append(peer_id)

    def addresses_of(self, peer_id: PeerId) -> list[str]:
        """Where a peer is that is being pinged."""
        ping = self._in_flight.get(peer_id)
        return [] if ping is None else list(ping.addresses)

    def answered(self, peer_id: PeerId) -> None:
        """A ping of this peer has ended, with an answer or without."""
        self._in_flight.pop(peer_id, None)

    def take(self) -> list[PeerId]:
        taken, self._to_ping = self._to_ping, []
        return taken

    @property
    def is_due(self) -> bool:
        return bool(self._to_ping)
