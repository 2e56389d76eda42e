"""One peer of a swarm: what it does with one version of a checkpoint. Pure.

`handle(event, now)` takes an event and returns effects; `wake_at` says when a `Tick` is due. How pieces move:

- **Neighbours** tell each other what they have: first the whole map, then news in batches. A
  neighbour hears all news before it gets a grant.
- A peer with a free upload slot **grants** it to a neighbour that lacks something (`sending`). The neighbour fetches
  the rarest piece that it misses (`receiving`), or refuses, and later **invites** some of those that it refused. A
  publisher names the piece, until it has sent each once (`SuperSeeding`).
- A failed piece is asked for elsewhere at once, without a grant. A sender without a free slot answers BUSY, and grants
  the next one.
- Near the end, when all missing pieces are on their way, a late piece is asked for a second time elsewhere.
- A peer that needs some pieces only says which (`Needs`), is offered no others, and passes on what it has.
- Peers of one host share the pieces among them (`HostShare`), so that each piece crosses the network once.

Invariants: only verified pieces are passed on; a piece is on its way from one neighbour, or near the end from two at
most; no more slots are in use than there are; a banned member gets no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, full_map, pack_map
from p2pstore.checkpoint.swarm.receiving import Receiving
from p2pstore.checkpoint.swarm.selection import Neighbour, PieceNews, SwarmConfig, SwarmState
from p2pstore.checkpoint.swarm.sending import Sending
from p2pstore.checkpoint.swarm.swarm_messages import (
    Asked,
    Connect,
    Disconnect,
    Effect,
    Event,
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
    Served,
    Tick,
    Unlinked,
    map_in,
)
from p2pstore.errors import ProtocolError

FIRST_DIALS: Final = 10
"""At first; others dial as well, so that there will be twice that number of links."""
MIN_NEIGHBOURS: Final = 16
MAX_NEIGHBOURS: Final = 24
SETTLE_SECONDS: Final = 1.0
"""Until then only the first links are made."""
REFRESH_SECONDS: Final = 5.0
REFRESHED: Final = 2
REDIAL_SECONDS: Final = 5.0
"""A member that could not be reached, or was let go, is not dialed for this time."""
DIAL_SECONDS: Final = 30.0
"""A dial without a result by then is forgotten."""


class Swarm:
    """See the module's docstring. Members are short names."""

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
        """`have`: verified pieces that are here. `publishes`: this peer brings the checkpoint into the swarm, and sends
        each piece once before receivers choose. `needed`: pieces to bring here; None: all. `copies`: pieces that
        receivers make of others."""
        state = self.state = SwarmState(own, piece_sizes, have, rng, config or SwarmConfig(), needed)
        self._selection = state.selection
        self.news = PieceNews(state)
        self.sending = Sending(state, self.news, publishes=publishes, copies=copies)
        self.slots = self.sending.slots
        self.receiving = Receiving(state, self.news, self.slots, self, now)
        self._links = Links(own, rng, now)
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            Participants: self._participants,
            Linked: self._linked,
            Unlinked: self._unlinked,
            Received: self._received,
            Asked: self.sending.asked,
            Served: self.sending.served,
            PieceArrived: self.receiving.arrived,
            PieceFailed: self.receiving.failed,
            Needed: self._needed,
            Found: self._found,
            Tick: self._tick,
        }

    # --- what the shell sees ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._handlers[type(event)](event, now)
        state = self.state
        if self.news.pending and now >= self.news.tell_at:
            self.news.tell_all(now)
        if state.order and self.slots.free > 0:
            self.sending.grant(now)
        effects, state.effects = state.effects, []
        return effects

    @property
    def have(self) -> PieceMap:
        return self._selection.have

    @property
    def complete(self) -> bool:
        return self._selection.complete

    @property
    def needed(self) -> PieceMap:
        return self._selection.needed

    @property
    def dispensable(self) -> bool:
        """Whether the neighbours have all pieces among them, so that a publisher may leave."""
        return not self.state.count or self._selection.availability.fewest() > 0

    @property
    def elsewhere(self) -> PieceMap:
        """The pieces that the neighbours have among them."""
        found = NO_PIECES
        for each in self.state.neighbours.values():
            found |= each.pieces
        return found

    @property
    def has_source(self) -> bool:
        """Whether a neighbour has any missing piece."""
        missing = self._selection.missing
        return any(each.pieces & missing for each in self.state.neighbours.values())

    @property
    def wake_at(self) -> float:
        """Latest time of the next `Tick`."""
        return min(self.judges_at, self.news.tell_at) if self.news.pending else self.judges_at

    @property
    def judges_at(self) -> float:
        """When something may be too late: handle what has arrived by then before a `Tick`."""
        receiving = self.receiving
        soonest = min(
            self._links.next_tick(), self.sending.check_at, receiving.check_at, receiving.endgame_at
        )
        if self._selection.missing:
            soonest = min(soonest, receiving.retry_at)
        return soonest

    # --- links -----------------------------------------------------------------------------------

    def _participants(self, event: Participants, now: float) -> None:
        self._links.participants(event.members, event.here)
        self._change_links(now)

    def _linked(self, event: Linked, now: float) -> None:
        state, member = self.state, event.member
        if state.senders.is_banned(member):
            state.effects.append(Disconnect(member, banned=True))
            return
        if member in state.neighbours:
            return
        neighbour = Neighbour(member, event.same_host, now, full_map(state.count))
        state.neighbours[member] = neighbour
        if event.same_host:
            self.share_host(now)
        else:
            state.order.append(neighbour)
        if self.needed != full_map(state.count):
            state.tell((member,), Needs(pack_map(self.needed, state.count)))
        state.tell((member,), PieceMapMessage(pack_map(self.have, state.count)))
        evicted = self._links.linked(member, event.same_host, now, self._worth)
        if evicted is not None:
            self.drop(evicted, now)

    def _unlinked(self, event: Unlinked, now: float) -> None:
        self._links.unlinked(event.member, now)
        self._forget(event.member, now)
        self._change_links(now)

    def drop(self, member: int, now: float, *, banned: bool = False) -> None:
        """End the link to a neighbour."""
        self.state.effects.append(Disconnect(member, banned))
        if banned:
            self.state.senders.ban(member)
        self._links.unlinked(member, now, for_good=banned)
        self._forget(member, now)

    def _forget(self, member: int, now: float) -> None:
        state = self.state
        neighbour = state.neighbours.pop(member, None)
        if neighbour is None:
            return
        state.downloads.forget(member)
        self._selection.availability.remove(neighbour.pieces)
        self.sending.forget(member)
        if neighbour.same_host:
            self.share_host(now)
        else:
            state.order.remove(neighbour)
        self.receiving.forget(member, now)

    def _change_links(self, now: float) -> None:
        """Connect and disconnect as `Links` decides."""
        dials = not self.complete or self.sending.seeds
        connect, disconnect = self._links.tick(now, self._worth, dials)
        for member in disconnect:
            self.state.effects.append(Disconnect(member))
            self._forget(member, now)
        self.state.effects += [Connect(member) for member in connect]

    def _worth(self, member: int) -> int:
        """-1 for a link over which no piece will ever move, 1 for one with a piece on its way, else 0."""
        neighbour = self.state.neighbours.get(member)
        if neighbour is None:
            return 0
        missing, lacked = self._selection.missing, neighbour.lacks(self.have | self.needed)
        if not lacked and not (neighbour.pieces | neighbour.needs) & missing:
            return -1
        busy = self.receiving.flights.pieces_from(member) or self.slots.used_by(member)
        return int(bool(busy))

    def share_host(self, now: float) -> None:
        """Divide the pieces anew among the peers of this host that are at work."""
        state, needed = self.state, self.needed
        patience = state.config.sibling_patience_seconds
        active = {
            each.member
            for each in state.neighbours.values()
            if each.same_host
            and not needed & ~(each.needs | each.pieces)
            and (now < each.heard_at + patience or not needed & ~each.pieces)
            and not state.senders.is_ignored(each.member, now)
        }
        state.host.siblings(active)
        state.sharing = 1 + len(active)
        self.sending.set_slots()

    # --- messages of neighbours, and news of the own pieces --------------------------------------

    def _received(self, event: Received, now: float) -> None:
        neighbour = self.state.neighbours.get(event.member)
        if neighbour is None:
            return
        message = event.message
        try:
            match message:
                case Grant():
                    self.receiving.granted(neighbour, message, now)
                case Refuse(reason):
                    self.sending.refused(neighbour, reason, now)
                case PieceMapMessage() | NewPieces():
                    self._has(neighbour, map_in(message, self.state.count), now)
                    if neighbour.refused is Refusal.FULL:
                        neighbour.refused = None
                case Invite():
                    neighbour.refused = None
                case Needs():
                    neighbour.needs = map_in(message, self.state.count)
                    if neighbour.refused is Refusal.NOTHING:
                        neighbour.refused = None
                    if neighbour.same_host:
                        self.share_host(now)
        except ProtocolError:
            self.drop(neighbour.member, now, banned=True)

    def _has(self, neighbour: Neighbour, pieces: PieceMap, now: float) -> None:
        new = pieces & ~neighbour.pieces
        neighbour.heard_at = now
        if not new:
            return
        neighbour.pieces |= new
        self._selection.availability.add(new)
        if neighbour.same_host:
            self.share_host(now)
            self.receiving.fetch_here(neighbour, now)

    def _needed(self, event: Needed, now: float) -> None:
        state = self.state
        if not self._selection.need(event.pieces):
            return
        state.tell(tuple(state.neighbours), Needs(pack_map(self.needed, state.count)))
        self.receiving.said_complete = self.complete
        self.receiving.retry_at = now
        self.share_host(now)
        self._change_links(now)

    def _found(self, event: Found, now: float) -> None:
        state = self.state
        new = self._selection.found(event.pieces)
        if new:
            state.may_want(new)
            state.tell(tuple(state.neighbours), PieceMapMessage(pack_map(self.have, state.count)))

    # --- time ------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        sending, receiving = self.sending, self.receiving
        if sending.check_at <= now or receiving.check_at <= now:
            sending.expire(now)
            receiving.end_overdue(now)
            self.slots.mark_held_up(now)
            receiving.mark_held_up(now)
            sending.check_at = self.slots.next_change()
            receiving.check_at = receiving.flights.next_change()
        if self._links.next_tick() <= now:
            self._change_links(now)
        if receiving.endgame_at <= now:
            receiving.endgame(now)
        if receiving.retry_at <= now:
            receiving.retry(now)


@dataclass(slots=True)
class _Link:
    since: float
    same_host: bool


class Links:
    """Which links to make, and which to end.

    A peer has some 20 links to random participants: with 8 a broadcast to 256 takes 1.2 times as long as with 20, with
    40 it is no faster. A small swarm is linked completely. A newcomer is always let in: where all places are taken, the
    oldest link makes room, first a useless one (both sides have everything, or need nothing that the other will have).
    From time to time an old link is replaced, and all useless ones, so that no group stays among itself. Links to peers
    of the same host are always made, and do not count.
    """

    def __init__(self, own: int, rng: Random, now: float) -> None:
        self._own = own
        self._rng = rng
        self._links: dict[int, _Link] = {}
        self._dialing: dict[int, float] = {}
        self._avoided: dict[int, float] = {}
        """Until when a member is not dialed."""
        self._participants: list[int] = []
        self._here: list[int] = []
        self._begin = now
        self._settled = False
        self._next_refresh = now + REFRESH_SECONDS

    @property
    def count(self) -> int:
        """Links to other hosts."""
        return sum(not link.same_host for link in self._links.values())

    def participants(self, members: Iterable[int], here: Iterable[int]) -> None:
        """Set all participants, and those on this host; perhaps with this peer."""
        siblings = set(here) - {self._own}
        self._here = sorted(siblings)
        self._participants = sorted(set(members) - siblings - {self._own})

    def linked(
        self, member: int, same_host: bool, now: float, worth: Callable[[int], int]
    ) -> int | None:
        """A link is there, dialed by either side. Returns the link that makes room for it: the one of least `worth`,
        among these the oldest."""
        self._dialing.pop(member, None)
        if member in self._links:
            return None
        self._links[member] = _Link(now, same_host)
        if same_host or self.count <= MAX_NEIGHBOURS:
            return None
        return self._least(worth, but=member)

    def unlinked(self, member: int, now: float, for_good: bool = False) -> None:
        """A link ended, or could not be made. `for_good`: it is not made again."""
        self._dialing.pop(member, None)
        self._links.pop(member, None)
        until = math.inf if for_good else now + REDIAL_SECONDS
        self._avoided[member] = max(until, self._avoided.get(member, 0.0))

    def tick(
        self, now: float, worth: Callable[[int], int], dials: bool = True
    ) -> tuple[list[int], list[int]]:
        """Members to dial, and links to end. Without `dials` (nothing is needed here), none of both."""
        self._settled = self._settled or now >= self._begin + SETTLE_SECONDS
        refresh = now >= self._next_refresh
        if refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._avoided = {each: until for each, until in self._avoided.items() if until > now}
            self._dialing = {each: until for each, until in self._dialing.items() if until > now}
        if not dials:
            return [], []
        ended: list[int] = []
        if refresh and self.count >= MIN_NEIGHBOURS and len(self._participants) > MAX_NEIGHBOURS:
            useless = sum(worth(each) < 0 for each, link in self._links.items() if not link.same_host)
            for _ in range(max(REFRESHED, useless)):
                ended.append(self._least(worth))
                self.unlinked(ended[-1], now)
        return self._dials(now), ended

    def next_tick(self) -> float:
        return self._next_refresh if self._settled else self._begin + SETTLE_SECONDS

    def _dials(self, now: float) -> list[int]:
        wanted = FIRST_DIALS if not self._settled else MIN_NEIGHBOURS
        if len(self._participants) <= MAX_NEIGHBOURS:
            wanted = len(self._participants)
        missing = wanted - self.count - len(self._dialing)
        chosen = self._not_linked(self._here, now)
        if missing > 0:
            candidates = self._not_linked(self._participants, now)
            chosen += self._rng.sample(candidates, min(missing, len(candidates)))
        self._dialing |= dict.fromkeys(chosen, now + DIAL_SECONDS)
        return chosen

    def _not_linked(self, members: Iterable[int], now: float) -> list[int]:
        return [
            member
            for member in members
            if member not in self._links
            and member not in self._dialing
            and self._avoided.get(member, 0.0) <= now
        ]

    def _least(self, worth: Callable[[int], int], but: int | None = None) -> int:
        return min(
            (member for member, link in self._links.items() if not link.same_host and member != but),
            key=lambda member: (worth(member), self._links[member].since),
        )
