"""Upload slots, super-seeding, and the pace of transfers: what a member sends to whom, and which senders it trusts.
Pure.

A peer sends two pieces at once: one keeps the link busy while the next is agreed on. With more, more receivers share
the link, and each piece is there, and passed on, later (a broadcast to 64 takes 1.04 of the shortest time with two
slots, 1.10 with eight). There are more only where agreeing takes long beside sending (`slots_for`). A receiver takes as
many pieces at once as it has slots: with more, senders wait for receivers' links while others have nothing to receive
(1.14 with three places for two slots). It takes one more where there are more slots, so that it need not wait for the
next piece (`places_for`).

The sender takes the initiative: it **grants** a slot to a neighbour that lacks something, which answers by asking for a
piece, or refuses. So no slot stands empty until a request comes. A neighbour that asks without a grant when no slot is
free hears BUSY, and gets the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final

from p2pstore.checkpoint.content.pieces import NO_PIECES, Availability, PieceMap, any_piece

USUAL_SLOTS: Final = 2
MAX_SLOTS: Final = 8
SLOTS_PER_ROUND_TRIP: Final = 24
"""Further slots, for each piece time that the shortest round trip takes; most take longer. (By simulation, pieces of
0.5 ms with messages of 0.3 ms take 1.06 of the shortest time, with 16 slots 1.07.)"""
QUEUED_SLOTS: Final = 8
"""Slots where a round trip usually takes `QUEUED_SHARE` of the quickest piece's time: messages wait behind pieces in
the queues of links, and TCP takes some round trips to fill a link after a pause. (16 real peers at 100 Mbit/s with
queues of 20 ms: 1.29 of the shortest time with four slots, 1.24 with five, 1.22 with six, 1.18 with eight, 1.2 with
ten.)"""
QUEUED_SHARE: Final = 0.08
SHARE_OF_NEWEST_ANSWER: Final = 1 / 16
"""Least weight of the newest round trip in the mean; the first 16 weigh the same."""
MAX_WAITING: Final = 64
FORGETTING: Final = 1.001
"""Factor by which each measurement relaxes a minimum: the shortest round trip, the quickest transfer."""
PATIENCE: Final = 4.0
"""Deadline of a piece, in multiples of its sender's usual time."""
STRANGER_PATIENCE: Final = 16.0
"""Deadline of a sender's first piece, in multiples of the usual time of all: a sender that never brings any must not
hold a place for long."""
SHARE_OF_NEWEST_PIECE: Final = 0.25
"""Weight of the newest piece in the usual time."""
FIRST_BACK_OFF_SECONDS: Final = 0.5
MAX_BACKOFF_SECONDS: Final = 30.0
BAD_PIECES_ALLOWED: Final = 1
SLOW: Final = 3.0
"""A transfer that takes this many times the quickest is held up at the other end, where `USUAL_SLOTS` share the link;
with twice as many slots each takes twice as long."""
FIRST_HELD_UP_SECONDS: Final = 2.0
"""Before any transfer has ended: the first ones may go to members that never answer."""


class UploadSlots:
    """Slots in use: granted without an answer yet, or with a piece being sent."""

    def __init__(self, slots: int, grant_seconds: float) -> None:
        """A grant without an answer for `grant_seconds` is void."""
        self.slots = slots
        self.round_trip_seconds = math.inf
        """Shortest time from a grant to its answer, without the wait behind pieces; infinity before the first."""
        self.usual_round_trip_seconds = 0.0
        """Mean time from a grant to its answer; 0 before the first."""
        self._answers = 0
        self._grant_seconds = grant_seconds
        self._granted: dict[int, list[tuple[float, int | None]]] = {}
        """Expiry and named piece (if any) of each member's grants, oldest first."""
        self._grants = 0
        self._sending: dict[tuple[int, int], float] = {}
        """Pieces being sent, and when each is held up."""
        self._used: dict[int, int] = {}
        """Grants and pieces being sent, of each neighbour with any."""
        self._held_up = 0
        self._waiting: dict[int, None] = {}

    @property
    def free(self) -> int:
        counted = len(self._sending) - min(self._held_up, self.slots)
        return self.slots - self._grants - counted

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def used_by(self, member: int) -> int:
        return self._used.get(member, 0)

    def grant(self, member: int, piece: int | None, now: float) -> None:
        self._granted.setdefault(member, []).append((now + self._grant_seconds, piece))
        self._grants += 1
        self._use(member, 1)
        self._waiting.pop(member, None)

    def take_grant(self, member: int, now: float) -> tuple[bool, int | None]:
        """A neighbour answers its oldest grant: whether it had one, and the piece that it named."""
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
        share = max(SHARE_OF_NEWEST_ANSWER, 1 / self._answers)
        self.usual_round_trip_seconds += share * (took - self.usual_round_trip_seconds)
        return True, piece

    def is_sending(self, member: int, piece: int) -> bool:
        return (member, piece) in self._sending

    def sending(self, member: int, piece: int, held_up_at: float) -> None:
        """Begin sending, with a free slot or a taken grant. From `held_up_at` on the receiver holds the transfer up,
        and another may be sent: at most twice the number of slots."""
        self._sending[member, piece] = held_up_at
        self._use(member, 1)
        self._held_up += held_up_at == -math.inf

    def sent(self, member: int, piece: int) -> bool:
        """End sending. Whether the piece was being sent."""
        held_up_at = self._sending.pop((member, piece), None)
        if held_up_at is None:
            return False
        self._held_up -= held_up_at == -math.inf
        self._use(member, -1)
        return True

    def wait(self, member: int) -> int:
        """Queue a neighbour for a slot; returns the length of the queue."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting[member] = None
        return len(self._waiting)

    def next_waiting(self) -> int | None:
        """Take the longest waiting neighbour from the queue."""
        if not self._waiting:
            return None
        member = next(iter(self._waiting))
        del self._waiting[member]
        return member

    def expire(self, now: float) -> list[tuple[int, int | None]]:
        """Take back grants without an answer: members and named pieces."""
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
        """Stop counting transfers that are held up by now."""
        for each, held_up_at in self._sending.items():
            if -math.inf < held_up_at <= now:
                self._sending[each] = -math.inf
                self._held_up += 1

    def next_change(self) -> float:
        """When the next grant expires or the next piece is held up; infinity for never."""
        soonest = min((grants[0][0] for grants in self._granted.values()), default=math.inf)
        for held_up_at in self._sending.values():
            if -math.inf < held_up_at < soonest:
                soonest = held_up_at
        return soonest

    def forget(self, member: int) -> list[int]:
        """Free the slots of a neighbour that has gone; returns the pieces that it did not get."""
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


def slots_for(piece_seconds: float, round_trip_seconds: float, usual_round_trip_seconds: float) -> int:
    """Slots that keep a link busy on which a piece takes `piece_seconds`: two, and more where agreeing on the next
    piece takes a share of that. (By simulation, at a seventh two slots cost 9 % of the time, three 3, four 2.)"""
    if round_trip_seconds == math.inf:
        return USUAL_SLOTS
    piece_seconds = max(piece_seconds, 1e-9)
    share = round_trip_seconds / piece_seconds
    slots = USUAL_SLOTS + int(min(share * SLOTS_PER_ROUND_TRIP, MAX_SLOTS - USUAL_SLOTS))
    queued = usual_round_trip_seconds >= QUEUED_SHARE * piece_seconds
    return max(slots, QUEUED_SLOTS) if queued else slots


def places_for(slots: int) -> int:
    """Pieces to take at once over the network."""
    return slots + (slots > USUAL_SLOTS)


class SuperSeeding:
    """The choice of a publisher until each piece was sent once.

    Receivers may not choose meanwhile: the publisher names the piece that it sent least, among these the rarest of its
    neighbours. So each piece is in the swarm after the link has carried the checkpoint once (BitTorrent's BEP 16). When
    receivers choose the rarest piece, many choose the same, and a broadcast takes longer. Several publishers of one
    version see in their neighbours' maps what the others sent.
    """

    def __init__(self, count: int, rng: Random, copies: PieceMap = NO_PIECES) -> None:
        """`copies`: pieces that receivers make of others, which need not be sent."""
        self._sent = Availability(count)
        self._sent.add(copies)
        self._rng = rng

    @property
    def over(self) -> bool:
        """Whether each piece was sent, so that receivers may choose."""
        return not self._sent.count or self._sent.fewest() > 0

    def choose(self, lacked: PieceMap, availability: Availability) -> int:
        """The piece to send to a neighbour that lacks these (at least one)."""
        least_sent = self._sent.with_fewest(lacked)
        rarest = availability.with_fewest(least_sent)
        return any_piece(rarest, self._sent.count, self._rng)

    def sending(self, piece: int) -> None:
        self._sent.add(1 << piece)

    def not_sent(self, piece: int) -> None:
        """Take that back."""
        self._sent.remove(1 << piece)


@dataclass(slots=True)
class _Sender:
    seconds_per_byte: float = 0.0
    """0 before the first piece."""
    back_off_seconds: float = FIRST_BACK_OFF_SECONDS
    ignored_until: float = 0.0
    bad_pieces: int = 0


class Pace:
    """Which transfers over the own link are held up at the other end.

    A slow peer, or one whose link others fill, would keep a slot or a place that is worth more elsewhere. So a transfer
    stops counting after three times the quickest one's time, and with members of which that is usual, at once. (One
    receiver in ten with a quarter of the speed delays the others by 1 % with this rule, and some by 100 % without.)
    """

    def __init__(self) -> None:
        self._quickest = math.inf
        """Seconds a byte."""
        self._usual: dict[int, float] = {}

    def took(self, member: int, size: int, seconds: float) -> None:
        """A transfer of `size` bytes from or to a member is over."""
        newest = seconds / size
        self._quickest = min(FORGETTING * self._quickest, newest)
        before = self._usual.get(member, newest)
        self._usual[member] = SHARE_OF_NEWEST_PIECE * newest + (1 - SHARE_OF_NEWEST_PIECE) * before

    def held_up_after(self, member: int, size: int, slots: int = USUAL_SLOTS) -> float:
        """Seconds after which a transfer of `size` bytes is held up, where `slots` share the link; 0 for at once."""
        if self._quickest == math.inf:
            return FIRST_HELD_UP_SECONDS
        allowed = SLOW * max(1.0, slots / USUAL_SLOTS) * self._quickest
        return 0.0 if self._usual.get(member, 0.0) > allowed else allowed * size

    def quickest_seconds(self, size: int) -> float:
        """Time of `size` bytes when nothing holds them up; infinity when unknown."""
        return self._quickest * size

    def forget(self, member: int) -> None:
        self._usual.pop(member, None)


class Senders:
    """Deadlines, backoff and bans of senders. Times are seconds of the caller's clock.

    A piece is abandoned after `PATIENCE` times its sender's usual time; the sender is ignored for a while then, twice
    as long each time. A sender of a false piece is ignored as well, and banned the second time: the first may be a
    fault of memory or of a wire.
    """

    def __init__(self, first_deadline_seconds: float, shortest_deadline_seconds: float) -> None:
        """`first_deadline_seconds` is for new senders as long as no piece has come; no deadline is below
        `shortest_deadline_seconds`: a pause of a process or a lost packet is no failure."""
        self._usual = 0.0
        """Seconds a byte, of all senders."""
        self._first_deadline = first_deadline_seconds
        self._shortest_deadline = shortest_deadline_seconds
        self._senders: dict[int, _Sender] = {}
        self._banned: set[int] = set()

    def expected_seconds(self, member: int, size: int) -> float | None:
        """Usual time of `size` bytes from this sender; None when unknown."""
        sender = self._senders.get(member)
        if sender is None or not sender.seconds_per_byte:
            return None
        return sender.seconds_per_byte * size

    def deadline_seconds(self, member: int, size: int) -> float:
        """How long to wait for `size` bytes."""
        expected = self.expected_seconds(member, size)
        if expected is None:
            if not self._usual:
                return self._first_deadline
            strange = STRANGER_PATIENCE * self._usual * size
            return min(self._first_deadline, max(self._shortest_deadline, strange))
        return max(self._shortest_deadline, PATIENCE * expected)

    def brought(self, member: int, size: int, seconds: float) -> None:
        """A good piece of `size` bytes came."""
        sender = self._of(member)
        newest = seconds / size
        self._usual += SHARE_OF_NEWEST_PIECE * (newest - self._usual) if self._usual else newest
        if sender.seconds_per_byte:
            newest = (
                SHARE_OF_NEWEST_PIECE * newest + (1 - SHARE_OF_NEWEST_PIECE) * sender.seconds_per_byte
            )
        sender.seconds_per_byte = newest
        sender.back_off_seconds = FIRST_BACK_OFF_SECONDS

    def failed(self, member: int, now: float) -> None:
        """A piece did not come, or not in time: ignore its sender for a while."""
        sender = self._of(member)
        sender.ignored_until = now + sender.back_off_seconds
        sender.back_off_seconds = min(2 * sender.back_off_seconds, MAX_BACKOFF_SECONDS)

    def sent_bad_piece(self, member: int, now: float) -> bool:
        """A piece had the wrong hash. Whether its sender is banned now."""
        sender = self._of(member)
        sender.bad_pieces += 1
        if sender.bad_pieces > BAD_PIECES_ALLOWED:
            self.ban(member)
            return True
        sender.ignored_until = now + MAX_BACKOFF_SECONDS
        return False

    def ban(self, member: int) -> None:
        """Never deal with it again."""
        self._banned.add(member)
        self._senders.pop(member, None)

    def is_ignored(self, member: int, now: float) -> bool:
        """Whether to take nothing from it at present."""
        if member in self._banned:
            return True
        sender = self._senders.get(member)
        return sender is not None and now < sender.ignored_until

    def is_banned(self, member: int) -> bool:
        """Whether to never deal with it again."""
        return member in self._banned

    def _of(self, member: int) -> _Sender:
        return self._senders.setdefault(member, _Sender())
