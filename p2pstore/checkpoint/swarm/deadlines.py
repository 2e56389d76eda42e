"""How long pieces take from each sender, when to give one up, and whom to trust. Pure.

A piece is given up after four times what is usual for its sender; the sender is left alone for a while then, longer
each time. Whoever sends a piece that is not what its hash says is left alone as well, and the second time for good: its
first one may have been a fault of memory or of a wire, and a swarm in which everybody is banned for that is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2pstore.checkpoint.swarm.upload_slots import USUAL_SLOTS

PATIENCE: Final = 4.0
"""A piece may take so many times what is usual for its sender."""
STRANGER_PATIENCE: Final = 16.0
"""The first piece of a sender may take so many times what is usual for all: else those who never bring any would take
the places of others for the longest."""
SHARE_OF_NEWEST: Final = 0.25
"""How much the newest piece counts in what is usual."""
FIRST_BACK_OFF_SECONDS: Final = 0.5
LONGEST_BACK_OFF_SECONDS: Final = 30.0
BAD_PIECES_ALLOWED: Final = 1
SLOW: Final = 3.0
"""A transfer that takes so many times as long as the quickest is held up at the other end, where `USUAL_SLOTS` share
the link; with twice as many, each takes twice as long."""
FIRST_HELD_UP_SECONDS: Final = 2.0
"""As long as no transfer has ended: the first ones may be with those who never send anything."""
FORGETTING: Final = 1.001
"""So the quickest is forgotten, by each transfer."""


@dataclass(slots=True)
class _Sender:
    seconds_per_byte: float = 0.0
    """0 before the first piece."""
    back_off_seconds: float = FIRST_BACK_OFF_SECONDS
    ignored_until: float = 0.0
    bad_pieces: int = 0


class Pace:
    """How long transfers over the own link take, and which are held up by somebody else's.

    A slow peer, or one whose link others fill, would keep a slot or a place in the window that is worth
    more elsewhere. So what takes three times as long as the quickest transfer does not count any more, and
    with whom that is usual, transfers do not count from their beginning. (One receiver in ten with a quarter of
    the others' speed delays the others by 1 % with this rule, and some by 100 % without it.)
    """

    def __init__(self) -> None:
        self._quickest = math.inf
        """Seconds a byte."""
        self._usual: dict[int, float] = {}

    def took(self, member: int, size: int, seconds: float) -> None:
        """A transfer of so many bytes from or to a member is over."""
        newest = seconds / size
        self._quickest = min(FORGETTING * self._quickest, newest)
        before = self._usual.get(member, newest)
        self._usual[member] = SHARE_OF_NEWEST * newest + (1 - SHARE_OF_NEWEST) * before

    def held_up_after(self, member: int, size: int, slots: int = USUAL_SLOTS) -> float:
        """Seconds after which a transfer of so many bytes is held up, where `slots` share the link; 0 for at once."""
        if self._quickest == math.inf:
            return FIRST_HELD_UP_SECONDS
        allowed = SLOW * max(1.0, slots / USUAL_SLOTS) * self._quickest
        return 0.0 if self._usual.get(member, 0.0) > allowed else allowed * size

    def quickest_seconds(self, size: int) -> float:
        """How long so many bytes take when nothing holds them up; infinity when that is not known."""
        return self._quickest * size

    def forget(self, member: int) -> None:
        """The member is gone."""
        self._usual.pop(member, None)


class Senders:
    """What is known of those who send pieces. Times in seconds of the caller's clock."""

    def __init__(self, first_deadline_seconds: float, shortest_deadline_seconds: float) -> None:
        """`first_deadline_seconds` is for senders that brought nothing yet, as long as nobody has; no deadline is below
        `shortest_deadline_seconds`: a pause of a process or a lost packet is no failure."""
        self._usual = 0.0
        """Seconds a byte, of all senders."""
        self._first_deadline = first_deadline_seconds
        self._shortest_deadline = shortest_deadline_seconds
        self._senders: dict[int, _Sender] = {}
        self._banned: set[int] = set()

    def expected_seconds(self, member: int, size: int) -> float | None:
        """How long so many bytes usually take from this sender; None when that is not known."""
        sender = self._senders.get(member)
        if sender is None or not sender.seconds_per_byte:
            return None
        return sender.seconds_per_byte * size

    def deadline_seconds(self, member: int, size: int) -> float:
        """How long to wait for so many bytes."""
        expected = self.expected_seconds(member, size)
        if expected is None:
            if not self._usual:
                return self._first_deadline
            strange = STRANGER_PATIENCE * self._usual * size
            return min(self._first_deadline, max(self._shortest_deadline, strange))
        return max(self._shortest_deadline, PATIENCE * expected)

    def brought(self, member: int, size: int, seconds: float) -> None:
        """A good piece of so many bytes came in so many seconds."""
        sender = self._of(member)
        newest = seconds / size
        self._usual += SHARE_OF_NEWEST * (newest - self._usual) if self._usual else newest
        if sender.seconds_per_byte:
            newest = SHARE_OF_NEWEST * newest + (1 - SHARE_OF_NEWEST) * sender.seconds_per_byte
        sender.seconds_per_byte = newest
        sender.back_off_seconds = FIRST_BACK_OFF_SECONDS

    def failed(self, member: int, now: float) -> None:
        """A piece did not come in time, or at all: nothing is taken from this sender for a while."""
        sender = self._of(member)
        sender.ignored_until = now + sender.back_off_seconds
        sender.back_off_seconds = min(2 * sender.back_off_seconds, LONGEST_BACK_OFF_SECONDS)

    def sent_bad_piece(self, member: int, now: float) -> bool:
        """A piece had the wrong hash. Whether its sender is banned now."""
        sender = self._of(member)
        sender.bad_pieces += 1
        if sender.bad_pieces > BAD_PIECES_ALLOWED:
            self.ban(member)
            return True
        sender.ignored_until = now + LONGEST_BACK_OFF_SECONDS
        return False

    def ban(self, member: int) -> None:
        """Never deal with it again."""
        self._banned.add(member)
        self._senders.pop(member, None)

    def is_ignored(self, member: int, now: float) -> bool:
        """Whether nothing is to be taken from it at present."""
        if member in self._banned:
            return True
        sender = self._senders.get(member)
        return sender is not None and now < sender.ignored_until

    def is_banned(self, member: int) -> bool:
        """Whether it is never to be dealt with again."""
        return member in self._banned

    def _of(self, member: int) -> _Sender:
        return self._senders.setdefault(member, _Sender())
