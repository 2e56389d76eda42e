"""Granting upload slots to neighbours, and answering their requests for pieces. Pure."""

from __future__ import annotations

import math

from p2pstore.checkpoint.content.pieces import PieceMap
from p2pstore.checkpoint.swarm.selection import Neighbour, PieceNews, SwarmState
from p2pstore.checkpoint.swarm.swarm_messages import (
    ANY_PIECE,
    Asked,
    Decline,
    Grant,
    Refusal,
    Serve,
    Served,
)
from p2pstore.checkpoint.swarm.upload_slots import (
    QUEUED_SLOTS,
    USUAL_SLOTS,
    SuperSeeding,
    UploadSlots,
    slots_for,
)


class Sending:
    """The sender's side of one swarm member."""

    def __init__(self, state: SwarmState, news: PieceNews, *, publishes: bool, copies: PieceMap) -> None:
        """`publishes`: send each piece once before any a second time, but for `copies`."""
        config = state.config
        self._first_slots = QUEUED_SLOTS if publishes else USUAL_SLOTS
        """Before the network is measured. A publisher's link must not idle: all wait for it."""
        self.slots = UploadSlots(config.upload_slots or self._first_slots, config.grant_seconds)
        self.check_at = math.inf
        """No grant expires and no transfer is held up before."""
        self._state = state
        self._news = news
        self._seeding = SuperSeeding(state.count, state.rng, copies) if publishes else None
        self._serving_since: dict[tuple[int, int], float] = {}
        self._lent: dict[int, int] = {}
        """Pieces being sent to each peer of this host: they need no slots."""

    @property
    def seeds(self) -> bool:
        """Whether some piece of a publisher was never sent."""
        return self._seeding is not None and not self._seeding.over

    def grant(self, now: float) -> None:
        """Give free slots to neighbours that lack something."""
        state = self._state
        have = state.selection.have
        if not have:
            return
        while self.slots.free > 0:
            receiver = self._next_receiver(have)
            if receiver is None:
                return
            piece = None
            if self._seeding is not None and not self._seeding.over:
                piece = self._seeding.choose(receiver.lacks(have), state.selection.availability)
                self._seeding.sending(piece)
            self.slots.grant(receiver.member, piece, now)
            self.check_at = min(self.check_at, now + state.config.grant_seconds)
            self._news.tell(receiver)
            state.tell(
                (receiver.member,), Grant(ANY_PIECE if piece is None else piece, self.slots.slots)
            )

    def _next_receiver(self, have: PieceMap) -> Neighbour | None:
        """The receiver of the next slot:

        1. the neighbour that has waited longest for one;
        2. a random neighbour without a slot;
        3. a random neighbour with fewer than `USUAL_SLOTS`.
        """
        while (member := self.slots.next_waiting()) is not None:
            waiting = self._state.neighbours.get(member)
            if waiting is not None and waiting.lacks(have):
                return waiting
        order = self._state.order
        start = int(self._state.rng.random() * len(order))
        second: Neighbour | None = None
        for at in range(start - len(order), start):
            each = order[at]
            if each.refused is not None or not each.lacks(have):
                continue
            used = self.slots.used_by(each.member)
            if not used:
                return each
            if second is None and used < USUAL_SLOTS:
                second = each
        return second

    def refused(self, neighbour: Neighbour, reason: int, now: float) -> None:
        granted, piece = self.slots.take_grant(neighbour.member, now)
        if not granted:
            return
        lasting = reason in (Refusal.NOTHING, Refusal.LATER)
        neighbour.refused = Refusal(reason) if lasting else Refusal.FULL
        if piece is not None:
            self._not_sent(piece)

    def asked(self, event: Asked, now: float) -> None:
        """A member asks for a piece: `Serve` or `Decline`."""
        state = self._state
        neighbour = state.neighbours.get(event.member)
        if neighbour is None:
            return
        member, piece = event.member, event.piece
        granted, named = self.slots.take_grant(member, now)
        declined = self._why_not(neighbour, piece, granted)
        if declined is None:
            if not neighbour.same_host:
                held_up_at = state.held_up_at(state.uploads, member, piece, self.slots.slots, now)
                self.slots.sending(member, piece, held_up_at)
                if held_up_at > -math.inf:
                    self.check_at = min(self.check_at, held_up_at)
                self._serving_since[member, piece] = now
                neighbour.refused = None
                if self._seeding is not None and named != piece:
                    self._seeding.sending(piece)
            else:
                self._lent[member] = self._lent.get(member, 0) + 1
            state.effects.append(Serve(member, piece))
        else:
            waiting = self.slots.wait(member) if declined is Refusal.BUSY else 0
            state.effects.append(Decline(member, piece, declined, waiting))
        if named is not None and (declined is not None or named != piece):
            self._not_sent(named)

    def _why_not(self, neighbour: Neighbour, piece: int, granted: bool) -> Refusal | None:
        if not 0 <= piece < self._state.count or not self._state.selection.have >> piece & 1:
            return Refusal.LACKS
        if neighbour.same_host:
            lent = self._lent.get(neighbour.member, 0)
            return Refusal.BUSY if lent >= self._state.config.most_lent else None
        if self.slots.is_sending(neighbour.member, piece) or (self.slots.free <= 0 and not granted):
            return Refusal.BUSY
        return None

    def served(self, event: Served, now: float) -> None:
        """A piece was sent, or only in part."""
        if not self.slots.sent(event.member, event.piece):
            lent = self._lent.pop(event.member, 0)
            if lent > 1:
                self._lent[event.member] = lent - 1
            return
        since = self._serving_since.pop((event.member, event.piece))
        if event.whole:
            size = self._state.sizes[event.piece]
            self._state.uploads.took(event.member, size, now - since)
            self.set_slots()
        else:
            self._not_sent(event.piece)

    def set_slots(self) -> None:
        """Use as many slots as keep the link busy; the peers of one host share them."""
        slots = self._state.config.upload_slots
        if slots is None:
            slots = self._slots_by_round_trip()
        self.slots.slots = max(1, -(-slots // self._state.sharing))

    def _slots_by_round_trip(self) -> int:
        piece_seconds = self._state.uploads.quickest_seconds(self._state.usual_size)
        if piece_seconds == math.inf:
            return self._first_slots
        return slots_for(
            piece_seconds, self.slots.round_trip_seconds, self.slots.usual_round_trip_seconds
        )

    def expire(self, now: float) -> None:
        """Take back grants without an answer."""
        for member, piece in self.slots.expire(now):
            neighbour = self._state.neighbours.get(member)
            if neighbour is not None:
                neighbour.refused = Refusal.FULL
            if piece is not None:
                self._not_sent(piece)

    def forget(self, member: int) -> None:
        self._state.uploads.forget(member)
        for piece in self.slots.forget(member):
            self._serving_since.pop((member, piece), None)
            self._not_sent(piece)

    def _not_sent(self, piece: int) -> None:
        if self._seeding is not None:
            self._seeding.not_sent(piece)
