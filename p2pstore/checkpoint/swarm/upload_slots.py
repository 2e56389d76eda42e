"""Who may take a piece from this peer, and when. Pure.

A peer sends two pieces at once: one keeps the link busy while the other is being agreed on. More would only share the
link among more receivers, and each piece would be there, and be passed on, later (a broadcast to 64 takes 1.04 of the
shortest time with two slots, 1.10 with eight). Only where agreeing takes long beside sending, there are more
(`slots_for`). A receiver takes as many pieces at once as it has slots: with more, receivers' links
are what several senders wait for while others have nothing to receive (1.14 with three places for two slots). It takes
one more only where there are more slots: then it would wait for the next piece each time (`places_for`).

The sender takes the initiative: it **grants** a slot to a neighbour that lacks something, and the neighbour answers by
asking for a piece, or refuses. So no slot stands empty until somebody happens to ask. Who asks without a grant when no
slot is free hears BUSY, and is granted the next one.
"""

from __future__ import annotations

import math
from typing import Final

USUAL_SLOTS: Final = 2
MOST_SLOTS: Final = 8
SLOTS_PER_ROUND_TRIP: Final = 24
"""For each piece time that the shortest round trip takes: most take longer. (By simulation, pieces of half a
millisecond and messages of 0.3 take 1.06 of the shortest time, with 16 slots 1.07.)"""
QUEUED_SLOTS: Final = 8
"""Where a round trip usually takes `QUEUED_SHARE` of the quickest piece's time: messages wait behind pieces in the
queues of links, and TCP takes some round trips to fill a link after a pause. (16 real peers at 100 Mbit/s with queues
of 20 ms: 1.29 of the shortest time with four slots, 1.24 with five, 1.22 with six, 1.18 with eight, 1.2 with ten.)"""
QUEUED_SHARE: Final = 0.08
SHARE_OF_NEWEST: Final = 1 / 16
"""How much the newest round trip counts in what is usual: of the first ones, all count the same."""
MAX_WAITING: Final = 64
FORGETTING: Final = 1.001
"""So the shortest round trip is forgotten, by each answer."""


class UploadSlots:
    """Slots in use: granted (no answer yet), or with a piece being sent."""

    def __init__(self, slots: int, grant_seconds: float) -> None:
        """A grant that is not answered for `grant_seconds` is void."""
        self.slots = slots
        self.round_trip_seconds = math.inf
        """From a grant to its answer, when nothing stands in the way: what waits behind pieces would wait longer with
        more of them under way. Infinity before the first answer."""
        self.usual_round_trip_seconds = 0.0
        """With all that stands in the way; 0 before the first answer."""
        self._answers = 0
        self._grant_seconds = grant_seconds
        self._granted: dict[int, list[tuple[float, int | None]]] = {}
        """Until when, and for which piece, if for a certain one; those of a member oldest first."""
        self._grants = 0
        self._sending: dict[tuple[int, int], float] = {}
        """Pieces being sent, and when each is held up."""
        self._used: dict[int, int] = {}
        """Grants and pieces of each neighbour that has any."""
        self._held_up = 0
        self._waiting: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        counted = len(self._sending) - min(self._held_up, self.slots)
        return self.slots - self._grants - counted

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def used_by(self, member: int) -> int:
        """How many slots one neighbour has."""
        return self._used.get(member, 0)

    def grant(self, member: int, piece: int | None, now: float) -> None:
        """Keep a slot for this neighbour, who is told."""
        self._granted.setdefault(member, []).append((now + self._grant_seconds, piece))
        self._grants += 1
        self._use(member, 1)
        self._waiting.pop(member, None)

    def take_grant(self, member: int, now: float) -> tuple[bool, int | None]:
        """The neighbour answers its oldest grant: whether there is one, and the piece it was for."""
        grants = self._granted.get(member)
        if not grants:
            return False, None
        void_at, piece = grants.pop(0)
        self._grants -= 1
        self._use(member, -1)
        if not grants:
            del self._granted[member]
        took = now - (void_at - self._grant_seconds)
        self.round_trip_seconds = min(FORGETTING * self.round_trip_seconds, took)
        self._answers += 1
        share = max(SHARE_OF_NEWEST, 1 / self._answers)
        self.usual_round_trip_seconds += share * (took - self.usual_round_trip_seconds)
        return True, piece

    def is_sending(self, member: int, piece: int) -> bool:
        """Whether the neighbour is being sent this piece."""
        return (member, piece) in self._sending

    def sending(self, member: int, piece: int, held_up_at: float) -> None:
        """The piece is being sent; there was a free slot, or a grant was taken. From `held_up_at` on the receiver holds
        it up, so another may be sent: at most twice as many as there are slots."""
        self._sending[member, piece] = held_up_at
        self._use(member, 1)
        self._held_up += held_up_at == -math.inf

    def sent(self, member: int, piece: int) -> bool:
        """It was sent, or will not be. Whether it was being sent."""
        held_up_at = self._sending.pop((member, piece), None)
        if held_up_at is None:
            return False
        self._held_up -= held_up_at == -math.inf
        self._use(member, -1)
        return True

    def wait(self, member: int) -> int:
        """The neighbour wants a slot; how many wait with it."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting[member] = None
        return len(self._waiting)

    def next_waiting(self) -> int | None:
        """Who waited longest; it waits no more."""
        if not self._waiting:
            return None
        member = next(iter(self._waiting))
        del self._waiting[member]
        return member

    def expire(self, now: float) -> list[tuple[int, int | None]]:
        """Take back grants that nobody answered: whose they were, and for which piece."""
        void = []
        for member, grants in list(self._granted.items()):
            while grants and grants[0][0] <= now:
                void.append((member, grants.pop(0)[1]))
                self._grants -= 1
                self._use(member, -1)
            if not grants:
                del self._granted[member]
        return void

    def mark_held_up(self, now: float) -> None:
        """Count no more what is held up by now."""
        for each, held_up_at in self._sending.items():
            if -math.inf < held_up_at <= now:
                self._sending[each] = -math.inf
                self._held_up += 1

    def next_change(self) -> float:
        """When the next grant expires, or the next piece is held up; infinity when there is none."""
        soonest = min((grants[0][0] for grants in self._granted.values()), default=math.inf)
        for held_up_at in self._sending.values():
            if -math.inf < held_up_at < soonest:
                soonest = held_up_at
        return soonest

    def forget(self, member: int) -> list[int]:
        """A neighbour went: its slots are free. The pieces that it did not get."""
        self._waiting.pop(member, None)
        grants = self._granted.pop(member, [])
        self._grants -= len(grants)
        self._use(member, -len(grants))
        lost = [piece for receiver, piece in self._sending if receiver == member]
        for piece in lost:
            self.sent(member, piece)
        return lost + [piece for _, piece in grants if piece is not None]

    def _use(self, member: int, more: int) -> None:
        used = self._used.get(member, 0) + more
        if used:
            self._used[member] = used
        else:
            self._used.pop(member, None)


def slots_for(
    piece_seconds: float, round_trip_seconds: float, usual_round_trip_seconds: float
) -> int:
    """How many slots keep a link busy on which a piece takes `piece_seconds`: two, and more where agreeing on the next
    piece takes a share of that. (By simulation: at a seventh, two slots cost 9 % of the time, three 3, four 2.)"""
    if round_trip_seconds == math.inf:
        return USUAL_SLOTS
    piece_seconds = max(piece_seconds, 1e-9)
    share = round_trip_seconds / piece_seconds
    slots = USUAL_SLOTS + int(min(share * SLOTS_PER_ROUND_TRIP, MOST_SLOTS - USUAL_SLOTS))
    queued = usual_round_trip_seconds >= QUEUED_SHARE * piece_seconds
    return max(slots, QUEUED_SLOTS) if queued else slots


def places_for(slots: int) -> int:
    """How many pieces to take at once over the network."""
    return slots + (slots > USUAL_SLOTS)
