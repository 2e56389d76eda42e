"""The choice of the next piece (`Selection.choose`), and the state of a swarm member. Pure.

The next piece is the rarest among the neighbours that is missing and not on its way; of equally rare ones a random one,
so that neighbours take different pieces. (Rarest first keeps the numbers of copies alike: Legout, Urvoy-Keller and
Michiardi 2006.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from p2pstore.checkpoint.content.pieces import (
    NO_PIECES,
    Availability,
    PieceMap,
    any_piece,
    full_map,
    pack_map,
)
from p2pstore.checkpoint.swarm.swarm_messages import (
    MAX_NEW_PIECES,
    Effect,
    NewPieces,
    PieceMapMessage,
    Refusal,
    SwarmMessage,
    Tell,
)
from p2pstore.checkpoint.swarm.upload_slots import Pace, Senders

FEW_NEIGHBOURS: Final = 4
NEIGHBOURS_A_PIECE: Final = 1.75
MAX_PIECES_UNTOLD: Final = 6.0
"""News wait one piece time for each `NEIGHBOURS_A_PIECE` neighbours beyond `FEW_NEIGHBOURS`, at most
`MAX_PIECES_UNTOLD`: a message costs both sides more than the hash of a small piece. (By simulation, half of that gains
nothing with 15, 64 and 128 receivers, and 0.6 % with 8.)"""
MAX_NEWS_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """Bounds and times of a peer of a swarm; seconds."""

    upload_slots: int | None = None
    """Pieces sent at once, and fetched at once over the network; None: by `slots_for`."""
    host_window: int = 8
    """Pieces fetched at once from peers of this host."""
    most_lent: int = 16
    """Pieces sent at once to one peer that claims this host: twice the window of an honest one."""
    news_seconds: float = 0.005
    """Minimum time between two batches of news."""
    grant_seconds: float = 2.0
    """Validity of a grant without an answer."""
    first_deadline_seconds: float = 30.0
    """For the first piece from a sender."""
    shortest_deadline_seconds: float = 1.0
    retry_seconds: float = 0.5
    """A peer that misses pieces and gets no grant asks for one after this time, again and again."""
    sibling_patience_seconds: float = 5.0
    """The share of a peer of this host that brought nothing for this long is taken over."""


@dataclass(slots=True, eq=False)
class Neighbour:
    """A linked member."""

    member: int
    same_host: bool
    heard_at: float
    needs: PieceMap
    """All that it is to have in the end."""
    pieces: PieceMap = NO_PIECES
    refused: Refusal | None = Refusal.FULL
    """Why it gets no grant for now; at first because its map has not come yet."""
    untold: list[int] = field(default_factory=list)
    """Pieces here that it has not heard of."""

    def lacks(self, offered: PieceMap) -> PieceMap:
        """The needed pieces among `offered` that it lacks."""
        return offered & self.needs & ~self.pieces


class SwarmState:
    """See the module's docstring. Sizes are bytes."""

    def __init__(
        self,
        own: int,
        piece_sizes: Sequence[int],
        have: PieceMap,
        rng: Random,
        config: SwarmConfig,
        needed: PieceMap | None,
    ) -> None:
        self.config = config
        self.sizes = piece_sizes
        self.count = len(piece_sizes)
        self.usual_size = max(piece_sizes, default=1)
        self.rng = rng
        self.selection = Selection(self.count, have, rng, needed)
        self.host = HostShare(self.count, own)
        self.senders = Senders(config.first_deadline_seconds, config.shortest_deadline_seconds)
        self.uploads = Pace()
        self.downloads = Pace()
        self.neighbours: dict[int, Neighbour] = {}
        self.order: list[Neighbour] = []
        """Neighbours on other hosts, which get grants."""
        self.sharing = 1
        """Peers of this host that use its link for this version."""
        self.effects: list[Effect] = []

    def tell(self, members: tuple[int, ...], message: SwarmMessage) -> None:
        if members:
            self.effects.append(Tell(members, message))

    def held_up_at(self, pace: Pace, member: int, piece: int, slots: int, now: float) -> float:
        """When a transfer that begins now stops counting as a slot or place; -infinity for at once."""
        seconds = pace.held_up_after(member, self.sizes[piece], slots)
        return now + seconds if seconds else -math.inf

    def may_want(self, pieces: PieceMap) -> None:
        """Pieces came here: neighbours that lack them and refused for want of any may get grants again."""
        for each in self.order:
            if each.refused is Refusal.NOTHING and each.lacks(pieces):
                each.refused = None


class PieceNews:
    """Pieces that came here, told to neighbours in batches."""

    def __init__(self, state: SwarmState) -> None:
        self._state = state
        self.pending = False
        """Whether some neighbour has not heard of some piece."""
        self.tell_at = -math.inf
        """When the next batch is due."""

    def add(self, piece: int, now: float) -> None:
        """Announce a piece: at once to peers of this host, which need no grant; to others with the next batch."""
        self.tell_at = now if self._state.selection.complete else max(self.tell_at, now)
        self.pending = True
        for each in self._state.neighbours.values():
            each.untold.append(piece)
            if each.same_host:
                self.tell(each)

    def tell(self, neighbour: Neighbour) -> None:
        if neighbour.untold:
            self._state.tell((neighbour.member,), self._message(neighbour.untold))
            neighbour.untold = []

    def tell_all(self, now: float) -> None:
        """Send the batch; neighbours with the same news share one message."""
        told: dict[tuple[int, ...], list[int]] = {}
        for each in self._state.neighbours.values():
            if each.untold:
                told.setdefault(tuple(each.untold), []).append(each.member)
                each.untold = []
        for pieces, members in told.items():
            self._state.tell(tuple(members), self._message(pieces))
        self.pending = False
        self.tell_at = now + self._seconds()

    def _seconds(self) -> float:
        state = self._state
        piece_seconds = state.downloads.quickest_seconds(state.usual_size)
        if piece_seconds == math.inf:
            return state.config.news_seconds
        pieces = (len(state.neighbours) - FEW_NEIGHBOURS) / NEIGHBOURS_A_PIECE
        seconds = min(pieces, MAX_PIECES_UNTOLD) * piece_seconds
        return min(max(state.config.news_seconds, seconds), MAX_NEWS_SECONDS)

    def _message(self, pieces: Sequence[int]) -> SwarmMessage:
        if len(pieces) > MAX_NEW_PIECES:
            return PieceMapMessage(pack_map(self._state.selection.have, self._state.count))
        return NewPieces(list(pieces))


class Selection:
    """Pieces that are here, on their way, missing."""

    def __init__(self, count: int, have: PieceMap, rng: Random, needed: PieceMap | None = None) -> None:
        """`have`: verified pieces of `count` that are here. `needed`: pieces to have in the end; None: all."""
        self.count = count
        self.have = have
        self.needed = full_map(count) if needed is None else needed
        self.missing = self.needed & ~have
        self.wanted = self.missing
        """Missing, and not on its way."""
        self.availability = Availability(count)
        """Of the neighbours' pieces."""
        self._rng = rng

    @property
    def complete(self) -> bool:
        return not self.missing

    def choose(self, offered: PieceMap) -> int | None:
        """The piece of `offered` to take; None when none is wanted."""
        candidates = self.wanted & offered
        if not candidates:
            return None
        return any_piece(self.availability.with_fewest(candidates), self.count, self._rng)

    def need(self, pieces: PieceMap) -> bool:
        """Add needed pieces. Whether any is new."""
        new = pieces & full_map(self.count) & ~self.needed
        self.needed |= new
        self.missing |= new & ~self.have
        self.wanted |= new & ~self.have
        return bool(new)

    def found(self, pieces: PieceMap) -> PieceMap:
        """Add pieces that are here, needed or not. Returns the new ones."""
        new = pieces & full_map(self.count) & ~self.have
        self.have |= new
        self.needed |= new
        self.missing &= ~new
        self.wanted &= ~new
        return new

    def on_its_way(self, piece: int) -> None:
        self.wanted &= ~(1 << piece)

    def not_coming(self, piece: int) -> None:
        self.wanted |= (1 << piece) & self.missing

    def arrived(self, piece: int) -> bool:
        """The verified piece is here. Whether it was missing."""
        bit = 1 << piece
        if not self.missing & bit:
            return False
        self.have |= bit
        self.missing ^= bit
        self.wanted &= ~bit
        return True


class HostShare:
    """The pieces that this peer fetches over the network when several peers of its host want the same checkpoint.

    Peer i of n, by name, takes the pieces k with k mod n = i, and gets the others from its siblings through memory:
    each piece crosses the network once for the host.
    """

    def __init__(self, count: int, own: int) -> None:
        self._count = count
        self._own = own
        self._siblings: set[int] = set()
        self.mask = full_map(count)
        """This peer's pieces."""

    def siblings(self, members: set[int]) -> None:
        """Set the other peers of this host that are at work."""
        if members == self._siblings:
            return
        self._siblings = set(members)
        order = sorted({self._own, *members})
        self.mask = stripe(self._count, order.index(self._own), len(order))


def stripe(count: int, first: int, step: int) -> PieceMap:
    """Each `step`th of `count` pieces, from `first` on."""
    if first >= count:
        return NO_PIECES
    repeats = -(-count // step)
    every = ((1 << step * repeats) - 1) // ((1 << step) - 1)
    return every << first & full_map(count)
