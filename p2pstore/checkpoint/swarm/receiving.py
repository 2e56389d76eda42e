"""Fetching pieces: which from which neighbour, grants, pieces on their way, failures, the endgame. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from p2pstore.checkpoint.content.pieces import NO_PIECES
from p2pstore.checkpoint.swarm.selection import Neighbour, PieceNews, SwarmState
from p2pstore.checkpoint.swarm.swarm_messages import (
    ANY_PIECE,
    Abandon,
    Complete,
    FetchPiece,
    Grant,
    Invite,
    PieceArrived,
    PieceFailed,
    PieceFailure,
    Refusal,
    Refuse,
)
from p2pstore.checkpoint.swarm.upload_slots import MAX_SLOTS, USUAL_SLOTS, UploadSlots, places_for

if TYPE_CHECKING:
    from p2pstore.checkpoint.swarm.swarm import Swarm

INVITED: Final = 3
"""Refused neighbours that are told when there is room again. If all were, most would be refused again; with too few,
none may have a free slot by then (64 receivers take 1.05 of the shortest time with three, 1.07 with two, 1.12 with
one)."""
SHARE_OF_NEWEST_GRANT: Final = 1 / 8
"""Weight of the newest grant in the mean number of slots of senders."""
LATE: Final = 1.5
"""Near the end, a piece is late after this many times its sender's usual time."""


@dataclass(slots=True, eq=False)
class Flight:
    """A piece on its way from one member."""

    member: int
    same_host: bool
    since: float
    deadline: float
    held_up_at: float
    """When its sender turns out to be slow; -infinity when that is known."""


class Flights:
    """Pieces on their way, and places for more. A piece comes from one member, near the end from two at most. Pieces
    held up by slow senders take no places of others, up to the number of places."""

    def __init__(self) -> None:
        self.over_network = 0
        self.within_host = 0
        self.held_up = 0
        """Of those over the network."""
        self._flights: dict[int, list[Flight]] = {}

    def __bool__(self) -> bool:
        return bool(self._flights)

    def __iter__(self) -> Iterator[tuple[int, Flight]]:
        for piece, flights in self._flights.items():
            for flight in flights:
                yield piece, flight

    def of(self, piece: int) -> Sequence[Flight]:
        """The flights of one piece, oldest first."""
        return self._flights.get(piece, ())

    def alone(self) -> list[tuple[int, Flight]]:
        """Pieces that come from one member only."""
        return [(piece, flights[0]) for piece, flights in self._flights.items() if len(flights) == 1]

    def pieces_from(self, member: int) -> list[int]:
        return [piece for piece, flight in self if flight.member == member]

    def has_room(self, places: int) -> bool:
        """Whether another piece may come over the network with this number of places."""
        return self.over_network - min(self.held_up, places) < places

    def begin(self, piece: int, flight: Flight) -> None:
        self._flights.setdefault(piece, []).append(flight)
        if flight.same_host:
            self.within_host += 1
        else:
            self.over_network += 1
            self.held_up += flight.held_up_at == -math.inf

    def end(self, member: int, piece: int) -> Flight | None:
        flights = self._flights.get(piece, [])
        found = next((flight for flight in flights if flight.member == member), None)
        if found is None:
            return None
        flights.remove(found)
        if not flights:
            del self._flights[piece]
        if found.same_host:
            self.within_host -= 1
        else:
            self.over_network -= 1
            self.held_up -= found.held_up_at == -math.inf
        return found

    def overdue(self, now: float) -> list[tuple[int, Flight]]:
        return [(piece, flight) for piece, flight in self if flight.deadline <= now]

    def mark_held_up(self, now: float) -> None:
        for _, flight in self:
            if -math.inf < flight.held_up_at <= now:
                flight.held_up_at = -math.inf
                self.held_up += not flight.same_host

    def next_change(self) -> float:
        """When the next flight is overdue or held up; infinity for never."""
        soonest = math.inf
        for _, flight in self:
            soonest = min(soonest, flight.deadline)
            if flight.held_up_at > -math.inf:
                soonest = min(soonest, flight.held_up_at)
        return soonest


class Receiving:
    """The receiver's side of one swarm member."""

    def __init__(
        self, state: SwarmState, news: PieceNews, slots: UploadSlots, links: Swarm, now: float
    ) -> None:
        """`slots`: the own upload slots, as many as pieces fetched at once at least."""
        self.flights = Flights()
        self.check_at = math.inf
        """No piece is overdue or held up before."""
        self.endgame_at = math.inf
        self.retry_at = now + state.config.retry_seconds
        self.said_complete = state.selection.complete
        self._state = state
        self._news = news
        self._slots = slots
        self._links = links
        self._senders_slots = float(USUAL_SLOTS)
        """Mean of the slots that recent grants named."""
        self._offers: dict[int, None] = {}
        """Neighbours whose grants were refused, and that were not told of room since; oldest first."""

    # --- grants ----------------------------------------------------------------------------------

    def granted(self, neighbour: Neighbour, grant: Grant, now: float) -> None:
        state, named = self._state, grant.piece
        slots = min(max(grant.slots, 1), MAX_SLOTS)
        self._senders_slots += SHARE_OF_NEWEST_GRANT * (slots - self._senders_slots)
        if state.senders.is_ignored(neighbour.member, now):
            state.tell((neighbour.member,), Refuse(Refusal.NOTHING))
            return
        refusal = Refusal.NOTHING
        if not self._room:
            refusal = Refusal.LATER if named == ANY_PIECE else Refusal.FULL
        elif (piece := self._choose(neighbour, named)) is not None:
            self._fetch(neighbour, piece, now)
            return
        if named != ANY_PIECE:  # a publisher comes first: all wait for its link
            self._offers = {neighbour.member: None} | self._offers
        else:
            self._offers[neighbour.member] = None
        state.tell((neighbour.member,), Refuse(refusal))

    def _invite(self) -> None:
        """Tell some refused neighbours with wanted pieces that there is room."""
        state = self._state
        wanted = state.selection.wanted & state.host.mask
        if not self._offers or not wanted or not self._room:
            return
        invited = 0
        for member in list(self._offers):
            neighbour = state.neighbours[member]
            if neighbour.pieces & wanted:
                del self._offers[member]
                self._news.tell(neighbour)
                state.tell((member,), Invite())
                invited += 1
                if invited == INVITED:
                    return

    @property
    def _room(self) -> bool:
        """Whether another piece may be fetched over the network."""
        return self.flights.has_room(places_for(self._slots_of_senders))

    @property
    def _slots_of_senders(self) -> int:
        """Slots among which each sender divides its link: as many senders fill this one. Grants tell a newcomer."""
        return max(self._slots.slots, -(-round(self._senders_slots) // self._state.sharing))

    # --- fetching --------------------------------------------------------------------------------

    def _choose(self, neighbour: Neighbour, named: int) -> int | None:
        state = self._state
        wanted = state.selection.wanted & state.host.mask
        if named != ANY_PIECE and 0 <= named < state.count and wanted >> named & 1:
            return named
        return state.selection.choose(neighbour.pieces & state.host.mask)

    def _fetch(self, neighbour: Neighbour, piece: int, now: float) -> None:
        state, member = self._state, neighbour.member
        seconds = state.senders.deadline_seconds(member, state.sizes[piece])
        held_up_at = state.held_up_at(state.downloads, member, piece, self._slots_of_senders, now)
        flight = Flight(member, neighbour.same_host, now, now + seconds, held_up_at)
        self.flights.begin(piece, flight)
        state.selection.on_its_way(piece)
        self.check_at = min(self.check_at, flight.deadline)
        if held_up_at > -math.inf:
            self.check_at = min(self.check_at, held_up_at)
        self.retry_at = now + state.config.retry_seconds
        if not state.selection.wanted and self.endgame_at > now + state.config.retry_seconds:
            self.endgame_at = now
        state.effects.append(FetchPiece(member, piece, neighbour.same_host))

    def fetch_here(self, neighbour: Neighbour, now: float) -> None:
        """Fetch from a peer of this host what it has: that needs no network, so no slot."""
        state = self._state
        while self.flights.within_host < state.config.host_window:
            piece = state.selection.choose(neighbour.pieces)
            if piece is None or state.senders.is_ignored(neighbour.member, now):
                return
            self._fetch(neighbour, piece, now)

    def _end_flight(self, member: int, piece: int) -> Flight | None:
        ended = self.flights.end(member, piece)
        if ended is not None and not self.flights.of(piece):
            self._state.selection.not_coming(piece)
        return ended

    def arrived(self, event: PieceArrived, now: float) -> None:
        state, member, piece = self._state, event.member, event.piece
        neighbour = state.neighbours.get(member)
        flight = self._end_flight(member, piece)
        if flight is not None:
            state.senders.brought(member, state.sizes[piece], now - flight.since)
            if not flight.same_host:
                state.downloads.took(member, state.sizes[piece], now - flight.since)
        for other in list(self.flights.of(piece)):
            self._end_flight(other.member, piece)
            state.effects.append(Abandon(other.member, piece))
        if not state.selection.arrived(piece):
            return
        self._news.add(piece, now)
        state.may_want(1 << piece)
        if neighbour is not None and neighbour.same_host:
            self.fetch_here(neighbour, now)
        self._invite()
        if state.selection.complete and not self.said_complete:
            self.said_complete = True
            self.endgame_at = math.inf
            state.effects.append(Complete())

    def failed(self, event: PieceFailed, now: float) -> None:
        state = self._state
        neighbour = state.neighbours.get(event.member)
        if neighbour is None or self._end_flight(event.member, event.piece) is None:
            return
        if event.why is PieceFailure.BUSY:
            return  # its grant will come
        if event.why is PieceFailure.LACKS:
            bit = 1 << event.piece
            if neighbour.pieces & bit:
                neighbour.pieces ^= bit
                state.selection.availability.remove(bit)
        elif event.why is PieceFailure.BAD:
            if state.senders.sent_bad_piece(neighbour.member, now):
                self._links.drop(neighbour.member, now, banned=True)
        else:
            state.senders.failed(neighbour.member, now)
        if neighbour.same_host:
            self._links.share_host(now)
        self._ask_elsewhere(event.piece, now)

    def forget(self, member: int, now: float) -> None:
        """A neighbour has gone: ask others for its pieces."""
        self._offers.pop(member, None)
        for piece in self.flights.pieces_from(member):
            self._end_flight(member, piece)
            self._ask_elsewhere(piece, now)

    def _ask_elsewhere(self, piece: int, now: float) -> None:
        """Ask another neighbour for a piece that did not come, without waiting for a grant."""
        if not self._state.selection.wanted >> piece & 1 or not self._room:
            return
        holder = self._holder(piece, now)
        if holder is not None:
            self._fetch(holder, piece, now)

    def _holder(self, piece: int, now: float) -> Neighbour | None:
        """A random neighbour with the piece that may be asked; one of this host first."""
        state = self._state
        holders = [
            each
            for each in state.neighbours.values()
            if each.pieces >> piece & 1 and not state.senders.is_ignored(each.member, now)
        ]
        here = [each for each in holders if each.same_host]
        if here or holders:
            return state.rng.choice(here or holders)
        return None

    def retry(self, now: float) -> None:
        """No neighbour offers anything: ask one. Takes over the share of an idle peer of this host."""
        state = self._state
        self.retry_at = now + state.config.retry_seconds
        self._links.share_host(now)
        for each in list(state.neighbours.values()):
            if each.same_host:
                self.fetch_here(each, now)
        wanted = state.selection.wanted & state.host.mask
        if not wanted or self.flights.over_network:
            return
        reachable = NO_PIECES
        for each in state.order:
            if not state.senders.is_ignored(each.member, now):
                reachable |= each.pieces
        piece = state.selection.choose(reachable & state.host.mask)
        if piece is not None:
            self._ask_elsewhere(piece, now)

    # --- late pieces -----------------------------------------------------------------------------

    def end_overdue(self, now: float) -> None:
        """Abandon pieces past their deadlines, and ask for them elsewhere."""
        overdue = self.flights.overdue(now)
        for piece, flight in overdue:
            self._end_flight(flight.member, piece)
            self._state.senders.failed(flight.member, now)
            self._state.effects.append(Abandon(flight.member, piece))
        for piece, _ in overdue:
            self._ask_elsewhere(piece, now)

    def mark_held_up(self, now: float) -> None:
        """Pieces that slow senders hold up free their places: invite others if there was no room before."""
        before = self._room
        self.flights.mark_held_up(now)
        if not before:
            self._invite()

    def endgame(self, now: float) -> None:
        """When all missing pieces are on their way, ask a second neighbour for those that are late."""
        state = self._state
        self.endgame_at = math.inf
        if state.selection.complete or state.selection.wanted or not self.flights:
            return
        soonest = math.inf
        for piece, flight in self.flights.alone():
            usual = state.senders.expected_seconds(flight.member, state.sizes[piece])
            soonest = min(soonest, state.config.retry_seconds if usual is None else usual / 2)
            if self.flights.over_network > 2 * self._slots.slots:
                continue
            holder = self._best_holder(piece, flight, now)
            if holder is not None:
                self._fetch(holder, piece, now)
        self.endgame_at = now + soonest

    def _would_be_sooner(self, neighbour: Neighbour, piece: int, flight: Flight, now: float) -> bool:
        senders, size = self._state.senders, self._state.sizes[piece]
        usual = senders.expected_seconds(flight.member, size)
        instead = senders.expected_seconds(neighbour.member, size)
        waited = now - flight.since
        if usual is None:
            return instead is not None and waited > LATE * instead
        if waited > LATE * usual:
            return True
        return instead is not None and LATE * instead < usual - waited

    def _best_holder(self, piece: int, flight: Flight, now: float) -> Neighbour | None:
        """The neighbour that would bring the piece soonest, if sooner than it comes."""
        state = self._state
        size = state.sizes[piece]
        better = [
            each
            for each in state.neighbours.values()
            if each.pieces >> piece & 1
            and each.member != flight.member
            and not state.senders.is_ignored(each.member, now)
            and self._would_be_sooner(each, piece, flight, now)
        ]
        if not better:
            return None
        state.rng.shuffle(better)
        return min(
            better, key=lambda each: state.senders.expected_seconds(each.member, size) or math.inf
        )
