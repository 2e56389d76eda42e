"""One peer of a swarm: what it does with one version of a checkpoint. Pure.

`handle(event, now)` takes what happened and returns what to do; `wake_at` says when a `Tick` is due. How pieces move:

- **Neighbours** (`neighbours`) tell each other what they have: the whole map first, then what is new, gathered for
  some piece times; who is granted a slot is told before.
- A peer with a free upload slot (`upload_slots`) **grants** it to a neighbour that lacks something. The neighbour
  chooses the rarest piece that it misses (`selection`) and fetches it, or refuses; of those whom it refused it
  **invites** some when there is room. The publisher names the piece, until it has sent each once (`super_seeding`).
- What fails is asked for at once elsewhere, without a grant; who has no free slot then says BUSY, and grants the next.
- In the end, when all that is missing is on its way, a piece that is late is asked for a second time elsewhere.
- Who needs some pieces only says which (`Needs`), is offered no others, and passes on what it has.
- Peers of one host share the pieces among them (`HostShare`), so that each crosses the network once.

Invariants: a piece is passed on only after it arrived, verified; a piece is on its way from one neighbour at most, or
from two in the end; slots in use are at most as many as there are; whoever is banned gets no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, full_map, pack_map
from p2pstore.checkpoint.swarm.selection import Flight, Flights, HostShare, Selection
from p2pstore.checkpoint.swarm.swarm_messages import (
    ANY_PIECE,
    MAX_NEW_PIECES,
    Abandon,
    Asked,
    Complete,
    Connect,
    Decline,
    Disconnect,
    Effect,
    Event,
    Failure,
    Fetch,
    Found,
    Grant,
    Invite,
    Linked,
    Needed,
    Needs,
    NewPieces,
    Participants,
    PieceArrived,
    PieceFailed,
    PieceMapMessage,
    Received,
    Refusal,
    Refuse,
    Serve,
    Served,
    SwarmMessage,
    Tell,
    Tick,
    Unlinked,
    map_in,
)
from p2pstore.checkpoint.swarm.swarm_neighbours import Neighbours
from p2pstore.checkpoint.swarm.upload_slots import (
    MOST_SLOTS,
    QUEUED_SLOTS,
    USUAL_SLOTS,
    Pace,
    Senders,
    SuperSeeding,
    UploadSlots,
    places_for,
    slots_for,
)
from p2pstore.errors import ProtocolError

FEW_NEIGHBOURS: Final = 4
NEIGHBOURS_A_PIECE: Final = 1.75
MOST_PIECES_UNTOLD: Final = 6.0
"""What is new is told to few neighbours at once, and to each one beyond `FEW_NEIGHBOURS` later, by a piece time for
each `NEIGHBOURS_A_PIECE`, up to `MOST_PIECES_UNTOLD`: a message costs both sides more than the hash of a small piece.
(By simulation of 15, 64 and 128 receivers nobody is later for it than with half of that, of 8 by 0.6 %.)"""
LONGEST_NEWS_SECONDS: Final = 0.5
INVITED: Final = 3
"""Who has room again says so to so many of those whom it refused. If all of them heard, most would be refused again; if
too few do, none of them may have a slot free by then (64 receivers take 1.05 of the shortest time with three, 1.07 with
two, 1.12 with one)."""
SHARE_OF_NEWEST_GRANT: Final = 1 / 8
"""How much it counts in how many slots others have."""
LATE: Final = 1.5
"""In the end, a piece is late after so many times what is usual for its sender."""


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """Bounds and times of a peer of a swarm; seconds."""

    upload_slots: int | None = None
    """Pieces sent at once, and as many fetched at once over the network; None: as many as `slots_for` says."""
    host_window: int = 8
    """Pieces fetched at once from peers of this host."""
    most_lent: int = 16
    """Pieces sent at once to one peer that says that it is of this host: twice what an honest one asks for."""
    news_seconds: float = 0.005
    """New pieces are told together, so often at most."""
    grant_seconds: float = 2.0
    """A grant that is not answered by then is void."""
    first_deadline_seconds: float = 30.0
    """For the first piece from a sender."""
    shortest_deadline_seconds: float = 1.0
    retry_seconds: float = 0.5
    """Who misses pieces and is offered none asks for one, so often."""
    sibling_patience_seconds: float = 5.0
    """A peer of this host that brought nothing for so long has its share taken over."""


@dataclass(slots=True, eq=False)
class _Neighbour:
    member: int
    same_host: bool
    heard_at: float
    needs: PieceMap
    """What it is to have in the end."""
    pieces: PieceMap = NO_PIECES
    refused: Refusal | None = Refusal.FULL
    """Why no grant is offered to it until something changes. In the beginning: its map has not come yet."""
    untold: list[int] = field(default_factory=list)
    """Pieces that came here and that it has not heard of."""

    def lacks(self, offered: PieceMap) -> PieceMap:
        """What it needs of these pieces."""
        return offered & self.needs & ~self.pieces


class Swarm:
    """See the module's docstring. Members are short names; sizes are bytes."""

    def __init__(
        self,
        own: int,
        piece_sizes: Sequence[int],
        have: PieceMap,
        rng: Random,
        now: float,
        *,
        publishes: bool = False,
        config: SwarmConfig | None = None,
        needed: PieceMap | None = None,
        copies: PieceMap = NO_PIECES,
    ) -> None:
        """`have`: verified pieces that are here already. `publishes`: this peer brings the checkpoint into the
        swarm, and sends each piece once before others choose. `needed`: the pieces to bring here; None: all. `copies`:
        pieces that receivers make of others."""
        self.config = config or SwarmConfig()
        self._first_slots = QUEUED_SLOTS if publishes else USUAL_SLOTS
        """Before anything is known of the network. A publisher's link is what all wait for: it must not be idle."""
        self.slots = UploadSlots(
            self.config.upload_slots or self._first_slots, self.config.grant_seconds
        )
        self._others_slots = float(USUAL_SLOTS)
        """What grants said lately."""
        self.senders = Senders(
            self.config.first_deadline_seconds, self.config.shortest_deadline_seconds
        )
        self._uploads = Pace()
        self._downloads = Pace()
        self._serving_since: dict[tuple[int, int], float] = {}
        self._lent: dict[int, int] = {}
        """How many pieces are being sent to whom, of those of this host: they need no slots."""
        self._sharing = 1
        """Peers of this host that use its link for this."""
        self._sizes = piece_sizes
        self._count = len(piece_sizes)
        self._usual_size = max(piece_sizes, default=1)
        self._rng = rng
        self._selection = Selection(self._count, have, rng, needed)
        self._host = HostShare(self._count, own)
        self._seeding = SuperSeeding(self._count, rng, copies) if publishes else None
        self._links = Neighbours(own, rng, now)
        self._neighbours: dict[int, _Neighbour] = {}
        self._order: list[_Neighbour] = []
        """Those of other hosts, to whom slots are granted."""
        self._flights = Flights()
        self._has_news = False
        """Whether anybody has not heard of everything."""
        self._tell_at = -math.inf
        """When news are told next."""
        self._offers: dict[int, None] = {}
        """Who was refused a grant, and has not been told that there is room; the longest ago first."""
        self._retry_at = now + self.config.retry_seconds
        self._check_at = math.inf
        """No deadline of a piece or a grant is earlier."""
        self._hurry_at = math.inf
        self._effects: list[Effect] = []
        self._said_complete = self._selection.complete
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            Participants: self._participants,
            Linked: self._linked,
            Unlinked: self._unlinked,
            Received: self._received,
            Asked: self._asked,
            Served: self._served,
            PieceArrived: self._arrived,
            PieceFailed: self._failed,
            Needed: self._needed,
            Found: self._found,
            Tick: self._tick,
        }

    # --- what the shell sees -----------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened; what to do."""
        self._handlers[type(event)](event, now)
        if self._has_news and now >= self._tell_at:
            self._tell_news(now)
        if self._order and self.slots.free > 0:
            self._grant(now)
        effects, self._effects = self._effects, []
        return effects

    @property
    def have(self) -> PieceMap:
        """The pieces that are here."""
        return self._selection.have

    @property
    def complete(self) -> bool:
        """Whether all are that are needed."""
        return self._selection.complete

    @property
    def needed(self) -> PieceMap:
        """The pieces that are to be here."""
        return self._selection.needed

    @property
    def dispensable(self) -> bool:
        """Whether the neighbours have all pieces among them, so that a publisher may leave."""
        return not self._count or self._selection.availability.fewest() > 0

    @property
    def elsewhere(self) -> PieceMap:
        """The pieces that the neighbours have among them."""
        found = NO_PIECES
        for each in self._neighbours.values():
            found |= each.pieces
        return found

    @property
    def has_source(self) -> bool:
        """Whether a neighbour has anything that is missing here."""
        missing = self._selection.missing
        return any(each.pieces & missing for each in self._neighbours.values())

    @property
    def wake_at(self) -> float:
        """When a `Tick` is due, at the latest."""
        return min(self.judges_at, self._tell_at) if self._has_news else self.judges_at

    @property
    def judges_at(self) -> float:
        """When something may be too late: what has arrived by then should be known before a `Tick`."""
        soonest = min(self._links.next_tick(), self._check_at, self._hurry_at)
        if self._selection.missing:
            soonest = min(soonest, self._retry_at)
        return soonest

    # --- neighbours --------------------------------------------------------------------------

    def _participants(self, event: Participants, now: float) -> None:
        self._links.participants(event.members, event.here)
        self._change_links(now)

    def _linked(self, event: Linked, now: float) -> None:
        member = event.member
        if self.senders.is_banned(member):
            self._effects.append(Disconnect(member, banned=True))
            return
        if member in self._neighbours:
            return
        neighbour = _Neighbour(member, event.same_host, now, full_map(self._count))
        self._neighbours[member] = neighbour
        if event.same_host:
            self._share_host(now)
        else:
            self._order.append(neighbour)
        if self.needed != full_map(self._count):
            self._tell((member,), Needs(pack_map(self.needed, self._count)))
        self._tell((member,), PieceMapMessage(pack_map(self.have, self._count)))
        evicted = self._links.linked(member, event.same_host, now, self._worth)
        if evicted is not None:
            self._drop(evicted, now)

    def _unlinked(self, event: Unlinked, now: float) -> None:
        self._links.unlinked(event.member, now)
        self._forget(event.member, now)
        self._change_links(now)

    def _drop(self, member: int, now: float, banned: bool = False) -> None:
        self._effects.append(Disconnect(member, banned))
        if banned:
            self.senders.ban(member)
        self._links.unlinked(member, now, for_good=banned)
        self._forget(member, now)

    def _forget(self, member: int, now: float) -> None:
        neighbour = self._neighbours.pop(member, None)
        if neighbour is None:
            return
        self._offers.pop(member, None)
        self._uploads.forget(member)
        self._downloads.forget(member)
        self._selection.availability.remove(neighbour.pieces)
        for piece in self.slots.forget(member):
            self._serving_since.pop((member, piece), None)
            self._not_sent(piece)
        if neighbour.same_host:
            self._share_host(now)
        else:
            self._order.remove(neighbour)
        for piece in self._flights.pieces_from(member):
            self._end_flight(member, piece)
            self._ask_elsewhere(piece, now)

    def _change_links(self, now: float) -> None:
        """Connect and disconnect as `neighbours` wants it."""
        dials = not self.complete or (self._seeding is not None and not self._seeding.over)
        connect, disconnect = self._links.tick(now, self._worth, dials)
        for member in disconnect:
            self._effects.append(Disconnect(member))
            self._forget(member, now)
        self._effects += [Connect(member) for member in connect]

    def _worth(self, member: int) -> int:
        """-1 for a connection over which nothing will ever move, 1 for one over which something does."""
        neighbour = self._neighbours.get(member)
        if neighbour is None:
            return 0
        missing, lacked = self._selection.missing, neighbour.lacks(self.have | self.needed)
        if not lacked and not (neighbour.pieces | neighbour.needs) & missing:
            return -1
        return int(bool(self._flights.pieces_from(member) or self.slots.used_by(member)))

    def _share_host(self, now: float) -> None:
        """Divide the pieces anew among the peers of this host that are at work."""
        patience = self.config.sibling_patience_seconds
        active = {
            each.member
            for each in self._neighbours.values()
            if each.same_host
            and not self.needed & ~(each.needs | each.pieces)
            and (now < each.heard_at + patience or not self.needed & ~each.pieces)
            and not self.senders.is_ignored(each.member, now)
        }
        self._host.siblings(active)
        self._sharing = 1 + len(active)
        self._set_slots()

    # --- what neighbours say -----------------------------------------------------------------

    def _received(self, event: Received, now: float) -> None:
        neighbour = self._neighbours.get(event.member)
        if neighbour is None:
            return
        message = event.message
        if isinstance(message, Grant):
            slots = min(max(message.slots, 1), MOST_SLOTS)
            self._others_slots += SHARE_OF_NEWEST_GRANT * (slots - self._others_slots)
            self._granted(neighbour, message.piece, now)
        elif isinstance(message, Refuse):
            self._refused(neighbour, message.reason, now)
        elif isinstance(message, PieceMapMessage | NewPieces):
            try:
                pieces = map_in(message, self._count)
            except ProtocolError:
                self._drop(neighbour.member, now, banned=True)
                return
            self._has(neighbour, pieces, now)
            if neighbour.refused is Refusal.FULL:
                neighbour.refused = None
        elif isinstance(message, Invite):
            neighbour.refused = None
        elif isinstance(message, Needs):
            try:
                neighbour.needs = map_in(message, self._count)
            except ProtocolError:
                self._drop(neighbour.member, now, banned=True)
                return
            if neighbour.refused is Refusal.NOTHING:
                neighbour.refused = None
            if neighbour.same_host:
                self._share_host(now)

    def _needed(self, event: Needed, now: float) -> None:
        """More is to be brought here than was said before."""
        if not self._selection.need(event.pieces):
            return
        self._tell(tuple(self._neighbours), Needs(pack_map(self.needed, self._count)))
        self._said_complete = self.complete
        self._retry_at = now
        self._share_host(now)
        self._change_links(now)

    def _found(self, event: Found, now: float) -> None:
        """Pieces came here by themselves: all hear of them at once."""
        new = self._selection.found(event.pieces)
        if not new:
            return
        for each in self._order:
            if each.refused is Refusal.NOTHING and each.lacks(new):
                each.refused = None
        self._tell(tuple(self._neighbours), PieceMapMessage(pack_map(self.have, self._count)))

    def _has(self, neighbour: _Neighbour, pieces: PieceMap, now: float) -> None:
        new = pieces & ~neighbour.pieces
        neighbour.heard_at = now
        if not new:
            return
        neighbour.pieces |= new
        self._selection.availability.add(new)
        if neighbour.same_host:
            self._share_host(now)
            self._fetch_here(neighbour, now)

    def _refused(self, neighbour: _Neighbour, reason: int, now: float) -> None:
        granted, piece = self.slots.take_grant(neighbour.member, now)
        if not granted:
            return
        lasting = reason in (Refusal.NOTHING, Refusal.LATER)
        neighbour.refused = Refusal(reason) if lasting else Refusal.FULL
        if piece is not None:
            self._not_sent(piece)

    def _granted(self, neighbour: _Neighbour, named: int, now: float) -> None:
        """Use the grant, or say why not."""
        if self.senders.is_ignored(neighbour.member, now):
            self._tell((neighbour.member,), Refuse(Refusal.NOTHING))
            return
        refusal = Refusal.NOTHING
        if not self._room:
            refusal = Refusal.LATER if named == ANY_PIECE else Refusal.FULL
        elif (piece := self._choose(neighbour, named, now)) is not None:
            self._fetch(neighbour, piece, now)
            return
        if named != ANY_PIECE:  # its link is what all wait for
            self._offers = {neighbour.member: None} | self._offers
        else:
            self._offers[neighbour.member] = None
        self._tell((neighbour.member,), Refuse(refusal))

    def _invite(self) -> None:
        """If there is room, tell some of those who would have sent something, and still have what is wanted."""
        wanted = self._selection.wanted & self._host.mask
        if not self._offers or not wanted or not self._room:
            return
        invited = 0
        for member in list(self._offers):
            neighbour = self._neighbours[member]
            if neighbour.pieces & wanted:
                del self._offers[member]
                self._tell_untold(neighbour)
                self._tell((member,), Invite())
                invited += 1
                if invited == INVITED:
                    return

    @property
    def _room(self) -> bool:
        """Whether another piece may be fetched over the network."""
        return self._flights.has_room(places_for(self._senders_slots))

    @property
    def _senders_slots(self) -> int:
        """Among how many those who send here divide their links, each: to fill this one takes as many of them. Who has
        just come knows it by their grants."""
        return max(self.slots.slots, -(-round(self._others_slots) // self._sharing))

    # --- fetching ----------------------------------------------------------------------------

    def _choose(self, neighbour: _Neighbour, named: int, now: float) -> int | None:
        if named != ANY_PIECE and 0 <= named < self._count:
            bit = 1 << named
            if self._selection.wanted & bit & self._host.mask:
                return named
        piece = self._selection.choose(neighbour.pieces & self._host.mask)
        if piece is None and not self._selection.wanted & self._host.mask:
            piece = self._late_piece(neighbour, now)
        return piece

    def _fetch(self, neighbour: _Neighbour, piece: int, now: float) -> None:
        seconds = self.senders.deadline_seconds(neighbour.member, self._sizes[piece])
        held_up_at = self._held_up_at(
            self._downloads, neighbour.member, piece, self._senders_slots, now
        )
        flight = Flight(neighbour.member, neighbour.same_host, now, now + seconds, held_up_at)
        self._flights.begin(piece, flight)
        self._selection.on_its_way(piece)
        self._check_at = min(self._check_at, flight.deadline)
        if held_up_at > -math.inf:
            self._check_at = min(self._check_at, held_up_at)
        self._retry_at = now + self.config.retry_seconds
        if not self._selection.wanted and self._hurry_at > now + self.config.retry_seconds:
            self._hurry_at = now
        self._effects.append(Fetch(neighbour.member, piece, neighbour.same_host))

    def _held_up_at(self, pace: Pace, member: int, piece: int, slots: int, now: float) -> float:
        """When a transfer that begins now counts no more; -infinity for at once."""
        seconds = pace.held_up_after(member, self._sizes[piece], slots)
        return now + seconds if seconds else -math.inf

    def _fetch_here(self, neighbour: _Neighbour, now: float) -> None:
        """Take from a peer of this host what it has: that costs no network, so no slot is needed."""
        while self._flights.within_host < self.config.host_window:
            piece = self._selection.choose(neighbour.pieces)
            if piece is None or self.senders.is_ignored(neighbour.member, now):
                return
            self._fetch(neighbour, piece, now)

    def _end_flight(self, member: int, piece: int) -> Flight | None:
        """The piece does not come from this neighbour any more."""
        ended = self._flights.end(member, piece)
        if ended is not None and not self._flights.of(piece):
            self._selection.not_coming(piece)
        return ended

    def _arrived(self, event: PieceArrived, now: float) -> None:
        member, piece = event.member, event.piece
        neighbour = self._neighbours.get(member)
        flight = self._end_flight(member, piece)
        if flight is not None:
            self.senders.brought(member, self._sizes[piece], now - flight.since)
            if not flight.same_host:
                self._downloads.took(member, self._sizes[piece], now - flight.since)
        for other in list(self._flights.of(piece)):
            self._end_flight(other.member, piece)
            self._effects.append(Abandon(other.member, piece))
        if not self._selection.arrived(piece):
            return
        self._add_news(piece, now)
        bit = 1 << piece
        for each in self._order:
            if each.refused is Refusal.NOTHING and each.lacks(bit):
                each.refused = None
        if neighbour is not None and neighbour.same_host:
            self._fetch_here(neighbour, now)
        self._invite()
        if self.complete and not self._said_complete:
            self._said_complete = True
            self._hurry_at = math.inf
            self._effects.append(Complete())

    def _failed(self, event: PieceFailed, now: float) -> None:
        neighbour = self._neighbours.get(event.member)
        if neighbour is None or self._end_flight(event.member, event.piece) is None:
            return
        if event.why is Failure.BUSY:
            return  # its grant will come
        if event.why is Failure.LACKS:
            bit = 1 << event.piece
            if neighbour.pieces & bit:
                neighbour.pieces ^= bit
                self._selection.availability.remove(bit)
        elif event.why is Failure.BAD:
            if self.senders.sent_bad_piece(neighbour.member, now):
                self._drop(neighbour.member, now, banned=True)
        else:
            self.senders.failed(neighbour.member, now)
        if neighbour.same_host:
            self._share_host(now)
        self._ask_elsewhere(event.piece, now)

    def _ask_elsewhere(self, piece: int, now: float) -> None:
        """Ask somebody else for a piece that did not come, without waiting for a grant."""
        if not self._selection.wanted >> piece & 1 or not self._room:
            return
        holder = self._holder(piece, now)
        if holder is not None:
            self._fetch(holder, piece, now)

    def _holder(self, piece: int, now: float) -> _Neighbour | None:
        """Any neighbour that has the piece and may be asked for it; one of this host first."""
        bit = 1 << piece
        holders = [
            each
            for each in self._neighbours.values()
            if each.pieces & bit and not self.senders.is_ignored(each.member, now)
        ]
        here = [each for each in holders if each.same_host]
        if here or holders:
            return self._rng.choice(here or holders)
        return None

    # --- the end -----------------------------------------------------------------------------

    def _late_piece(self, neighbour: _Neighbour, now: float) -> int | None:
        """A piece on its way from somebody else that this neighbour would bring sooner."""
        for piece, flight in self._flights.alone():
            if (
                neighbour.pieces >> piece & 1
                and flight.member != neighbour.member
                and self._would_be_sooner(neighbour, piece, flight, now)
            ):
                return piece
        return None

    def _would_be_sooner(
        self, neighbour: _Neighbour, piece: int, flight: Flight, now: float
    ) -> bool:
        size = self._sizes[piece]
        usual = self.senders.expected_seconds(flight.member, size)
        instead = self.senders.expected_seconds(neighbour.member, size)
        waited = now - flight.since
        if usual is None:
            return instead is not None and waited > LATE * instead
        if waited > LATE * usual:
            return True
        return instead is not None and LATE * instead < usual - waited

    def _hurry(self, now: float) -> None:
        """All that is missing is on its way: ask a second time for what is late."""
        self._hurry_at = math.inf
        if self.complete or self._selection.wanted or not self._flights:
            return
        soonest = math.inf
        for piece, flight in self._flights.alone():
            usual = self.senders.expected_seconds(flight.member, self._sizes[piece])
            soonest = min(soonest, self.config.retry_seconds if usual is None else usual / 2)
            if self._flights.over_network > 2 * self.slots.slots:
                continue
            holder = self._best_holder(piece, flight, now)
            if holder is not None:
                self._fetch(holder, piece, now)
        self._hurry_at = now + soonest

    def _best_holder(self, piece: int, flight: Flight, now: float) -> _Neighbour | None:
        """Who would bring the piece soonest, if that is sooner than it comes."""
        size = self._sizes[piece]
        better = [
            each
            for each in self._neighbours.values()
            if each.pieces >> piece & 1
            and each.member != flight.member
            and not self.senders.is_ignored(each.member, now)
            and self._would_be_sooner(each, piece, flight, now)
        ]
        if not better:
            return None
        self._rng.shuffle(better)
        return min(
            better, key=lambda each: self.senders.expected_seconds(each.member, size) or math.inf
        )

    # --- sending -----------------------------------------------------------------------------

    def _grant(self, now: float) -> None:
        """Give free slots to neighbours that lack something."""
        if not self.have:
            return
        while self.slots.free > 0:
            receiver = self._next_receiver()
            if receiver is None:
                return
            piece = None
            if self._seeding is not None and not self._seeding.over:
                piece = self._seeding.choose(
                    receiver.lacks(self.have), self._selection.availability
                )
                self._seeding.sending(piece)
            self.slots.grant(receiver.member, piece, now)
            self._check_at = min(self._check_at, now + self.config.grant_seconds)
            self._tell_untold(receiver)
            self._tell(
                (receiver.member,), Grant(ANY_PIECE if piece is None else piece, self.slots.slots)
            )

    def _next_receiver(self) -> _Neighbour | None:
        """Who waited for a slot, else any neighbour that lacks something, first those that have no slot yet."""
        while (member := self.slots.next_waiting()) is not None:
            waiting = self._neighbours.get(member)
            if waiting is not None and waiting.lacks(self.have):
                return waiting
        order = self._order
        start = int(self._rng.random() * len(order))
        second: _Neighbour | None = None
        for at in range(start - len(order), start):
            each = order[at]
            if each.refused is not None or not each.lacks(self.have):
                continue
            used = self.slots.used_by(each.member)
            if not used:
                return each
            if second is None and used < USUAL_SLOTS:
                second = each
        return second

    def _asked(self, event: Asked, now: float) -> None:
        neighbour = self._neighbours.get(event.member)
        if neighbour is None:
            return
        member, piece = event.member, event.piece
        granted, named = self.slots.take_grant(member, now)
        declined = self._why_not(neighbour, piece, granted)
        if declined is None:
            if not neighbour.same_host:
                held_up_at = self._held_up_at(self._uploads, member, piece, self.slots.slots, now)
                self.slots.sending(member, piece, held_up_at)
                if held_up_at > -math.inf:
                    self._check_at = min(self._check_at, held_up_at)
                self._serving_since[member, piece] = now
                neighbour.refused = None
                if self._seeding is not None and named != piece:
                    self._seeding.sending(piece)
            else:
                self._lent[member] = self._lent.get(member, 0) + 1
            self._effects.append(Serve(member, piece))
        else:
            waiting = self.slots.wait(member) if declined is Refusal.BUSY else 0
            self._effects.append(Decline(member, piece, declined, waiting))
        if named is not None and (declined is not None or named != piece):
            self._not_sent(named)

    def _why_not(self, neighbour: _Neighbour, piece: int, granted: bool) -> Refusal | None:
        if not 0 <= piece < self._count or not self.have >> piece & 1:
            return Refusal.LACKS
        if neighbour.same_host:
            lent = self._lent.get(neighbour.member, 0)
            return Refusal.BUSY if lent >= self.config.most_lent else None
        if self.slots.is_sending(neighbour.member, piece) or (self.slots.free <= 0 and not granted):
            return Refusal.BUSY
        return None

    def _set_slots(self) -> None:
        """As many as keep the link busy; peers of one host have them together."""
        slots = self.config.upload_slots
        if slots is None:
            slots = self._slots_by_round_trip()
        self.slots.slots = max(1, -(-slots // self._sharing))

    def _slots_by_round_trip(self) -> int:
        piece_seconds = self._uploads.quickest_seconds(self._usual_size)
        if piece_seconds == math.inf:
            return self._first_slots
        return slots_for(
            piece_seconds, self.slots.round_trip_seconds, self.slots.usual_round_trip_seconds
        )

    def _served(self, event: Served, now: float) -> None:
        if not self.slots.sent(event.member, event.piece):
            lent = self._lent.pop(event.member, 0)
            if lent > 1:
                self._lent[event.member] = lent - 1
            return
        since = self._serving_since.pop((event.member, event.piece))
        if event.whole:
            self._uploads.took(event.member, self._sizes[event.piece], now - since)
            self._set_slots()
        else:
            self._not_sent(event.piece)

    def _not_sent(self, piece: int) -> None:
        if self._seeding is not None:
            self._seeding.not_sent(piece)

    def _add_news(self, piece: int, now: float) -> None:
        """A piece came: peers of this host, which need no grant, hear of it at once, the others soon."""
        self._tell_at = now if self.complete else max(self._tell_at, now)
        self._has_news = True
        for each in self._neighbours.values():
            each.untold.append(piece)
            if each.same_host:
                self._tell_untold(each)

    def _tell_news(self, now: float) -> None:
        """Tell all neighbours what they have not heard of."""
        told: dict[tuple[int, ...], list[int]] = {}
        for each in self._neighbours.values():
            if each.untold:
                told.setdefault(tuple(each.untold), []).append(each.member)
                each.untold = []
        for pieces, members in told.items():
            self._tell(tuple(members), self._news_of(pieces))
        self._has_news = False
        self._tell_at = now + self._news_seconds()

    def _news_seconds(self) -> float:
        """Until news are told again."""
        piece_seconds = self._downloads.quickest_seconds(self._usual_size)
        if piece_seconds == math.inf:
            return self.config.news_seconds
        pieces = (len(self._neighbours) - FEW_NEIGHBOURS) / NEIGHBOURS_A_PIECE
        seconds = min(pieces, MOST_PIECES_UNTOLD) * piece_seconds
        return min(max(self.config.news_seconds, seconds), LONGEST_NEWS_SECONDS)

    def _tell_untold(self, neighbour: _Neighbour) -> None:
        if neighbour.untold:
            self._tell((neighbour.member,), self._news_of(neighbour.untold))
            neighbour.untold = []

    def _news_of(self, pieces: Sequence[int]) -> SwarmMessage:
        if len(pieces) > MAX_NEW_PIECES:
            return PieceMapMessage(pack_map(self.have, self._count))
        return NewPieces(list(pieces))

    def _tell(self, members: tuple[int, ...], message: SwarmMessage) -> None:
        if members:
            self._effects.append(Tell(members, message))

    # --- time --------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        if self._check_at <= now:
            self._void_grants(now)
            self._end_overdue(now)
            self._mark_held_up(now)
            self._check_at = min(self._flights.next_change(), self.slots.next_change())
        if self._links.next_tick() <= now:
            self._change_links(now)
        if self._hurry_at <= now:
            self._hurry(now)
        if self._retry_at <= now:
            self._retry(now)

    def _void_grants(self, now: float) -> None:
        for member, piece in self.slots.expire(now):
            neighbour = self._neighbours.get(member)
            if neighbour is not None:
                neighbour.refused = Refusal.FULL
            if piece is not None:
                self._not_sent(piece)

    def _mark_held_up(self, now: float) -> None:
        """What is held up takes no place of what would not be: say that there is room again."""
        self.slots.mark_held_up(now)
        before = self._room
        self._flights.mark_held_up(now)
        if not before:
            self._invite()

    def _end_overdue(self, now: float) -> None:
        overdue = self._flights.overdue(now)
        for piece, flight in overdue:
            self._end_flight(flight.member, piece)
            self.senders.failed(flight.member, now)
            self._effects.append(Abandon(flight.member, piece))
        for piece, _ in overdue:
            self._ask_elsewhere(piece, now)

    def _retry(self, now: float) -> None:
        """Nobody offers anything: ask. The share of a peer of this host that brought nothing for long is taken over."""
        self._retry_at = now + self.config.retry_seconds
        self._share_host(now)
        for each in list(self._neighbours.values()):
            if each.same_host:
                self._fetch_here(each, now)
        wanted = self._selection.wanted & self._host.mask
        if not wanted or self._flights.over_network:
            return
        reachable = NO_PIECES
        for each in self._order:
            if not self.senders.is_ignored(each.member, now):
                reachable |= each.pieces
        piece = self._selection.choose(reachable & self._host.mask)
        if piece is not None:
            self._ask_elsewhere(piece, now)
