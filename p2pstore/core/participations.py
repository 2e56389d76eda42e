"""Participations in checkpoints' versions: this peer's own ones, and those of other members. Pure.

A *participation* is what one peer has of a version, in its own gossiped record. Heads and switches of the names:
`p2pstore.core.checkpoints`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from p2pstore.gossip.checkpoint_records import Head, short_version
from p2pstore.gossip.records import (
    MAX_PARTICIPATIONS,
    MAX_WHY_BYTES,
    Member,
    Participation,
    PeerId,
    TakesPart,
)
from p2pstore.objects import unix_seconds_from_clock

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

TELL_SECONDS: Final = 1.0
"""Between two records of this peer that differ in its checkpoints. Each costs all others a signature."""
FAILED_SECONDS: Final = 600.0
"""Time for which this peer's record tells of a failure."""
PROGRESS_SECONDS: Final = 10.0
"""Between two that differ in how far it is alone, or twice that, and so on, in a large cluster. (A moment in which 16
peers tell theirs costs each of them as much as ten pieces of a broadcast do.)"""
PERCENT: Final = 10
"""Permille by which a fetch must have gone on to be told."""
MOVES_PIECES: Final = frozenset({TakesPart.FETCHING, TakesPart.SEEDING, TakesPart.PUBLISHING})
HAS_ALL: Final = frozenset({TakesPart.VERIFIED, TakesPart.SEEDING, TakesPart.PUBLISHING})


@dataclass(frozen=True, slots=True)
class Followed:
    """A followed name: whether its newest version is verified here, and the version in use is the one to use."""

    head: Head
    ready: bool
    current: bool
    behind_since: float | None
    """Since when (unix) followers are to use another version than this one does; None when there is none."""


class Participations:
    """The core's part in participations: `own` is what this peer has or wants, the rest is of the live members."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._parts: dict[tuple[bytes, bytes], Participation] = {}
        self._follows: dict[bytes, Participation] = {}
        self._forget_at: dict[tuple[bytes, bytes], float] = {}
        """Monotonic time at which a failure is no longer told."""
        self.told: list[Participation] = []
        """Participations in this peer's record."""
        self._told_at = -math.inf
        self._tell_at = math.inf

    def participants(self, version: bytes) -> dict[Member, Participation]:
        """The living members that have pieces of a version or want them; this peer may be among them."""
        short = short_version(version)
        return {
            state.member: part
            for state in self._core.gossip.membership.live()
            for part in state.checkpoints
            if part.version == short and part.state in MOVES_PIECES
        }

    def why_not_offered(self, version: bytes, publisher: PeerId) -> str:
        """Why a version's publisher does not pass it on, in a sentence; empty when it does."""
        who = f"{self._core.name_of(publisher)}, which published it,"
        state = self._core.gossip.membership.get(publisher)
        if state is None or not state.live:
            return f"{who} is not there"
        short = short_version(version)
        part = next((part for part in state.checkpoints if part.version == short), None)
        if part is None:
            return f"{who} does not offer it any more: publish it there again"
        return f"{who} gave it up: {part.why}" if part.state == TakesPart.FAILED else ""

    def parts_of(self, digest: bytes) -> dict[Member, list[Participation]]:
        """Participations of the living members in versions of a publisher's name."""
        return {
            state.member: parts
            for state in self._core.gossip.membership.live()
            if (parts := [part for part in state.checkpoints if part.name == digest])
        }

    @property
    def own(self) -> list[Participation]:
        """Participations of this peer, for its record."""
        parts = dict(self._parts)
        for follows in self._follows.values():
            key = (follows.name, follows.version)
            moves = parts.pop(key, None)
            parts[key] = follows if moves is None else _both(follows, moves)
        return list(parts.values())[-MAX_PARTICIPATIONS:]

    def take_part(self, part: Participation, now: float) -> None:
        """Tell the others what this peer has of a version: a new state within a second, progress by percents."""
        part = _shortened(part)
        key = (part.name, part.version)
        if self._parts.get(key) != part:
            self._parts.pop(key, None)
            self._parts[key] = part
            self._forget_at.pop(key, None)
            if part.state == TakesPart.FAILED:
                self._forget_at[key] = now + FAILED_SECONDS
            self._set_alarm(now)

    def take_no_part(self, name: bytes, version: bytes, now: float) -> None:
        if self._parts.pop((name, short_version(version)), None) is not None:
            self._set_alarm(now)

    def follow(
        self, digest: bytes, version: bytes, state: TakesPart, current: bytes, now: float, why: str = ""
    ) -> None:
        """Have the others know that this peer follows a publisher's name: the version that it is to use next, or uses,
        how far it is with it, and the one that it uses."""
        part = _shortened(
            Participation(digest, version, int(state), 1000 * (state in HAS_ALL), True, current, why)
        )
        if self._follows.get(digest) != part:
            self._follows[digest] = part
            self._set_alarm(now)

    def follow_no_more(self, digest: bytes, now: float) -> None:
        if self._follows.pop(digest, None) is not None:
            self._set_alarm(now)

    @property
    def followed(self) -> list[Followed]:
        return [
            self._followed(head, part)
            for digest, part in self._follows.items()
            if (head := self._core.checkpoints.head(digest)) is not None and not head.gone
        ]

    def _followed(self, head: Head, part: Participation) -> Followed:
        ready = part.version == short_version(head.version) and part.state in HAS_ALL
        switch = self._core.checkpoints.switched(head.digest)
        if switch is None or part.current == short_version(switch.version):
            return Followed(head, ready, current=True, behind_since=None)
        return Followed(head, ready, False, unix_seconds_from_clock(switch.clock))

    def followers(self, digest: bytes) -> dict[Member, Participation]:
        """The living members that follow a publisher's name."""
        return {
            member: part
            for member, parts in self.parts_of(digest).items()
            for part in parts
            if part.follows
        }

    def gone_from(self, digest: bytes, members: Iterable[Member]) -> list[Member]:
        """Those of them that follow the name no more: they say so, or have left. Not the dead."""
        following = self.followers(digest)
        gone = []
        for member in members:
            state = self._core.gossip.membership.resolve(member)
            if member not in following and (state is None or state.live or state.leaving):
                gone.append(member)
        return gone

    def tick(self, now: float) -> None:
        for name, version in [key for key, due in self._forget_at.items() if due <= now]:
            del self._forget_at[name, version]
            self.take_no_part(name, version, now)
        if now >= self._tell_at:
            self.told, self._told_at, self._tell_at = self.own, now, math.inf
            self._core.gossip.offer_changed()

    @property
    def due_at(self) -> float:
        return min(self._tell_at, *self._forget_at.values(), math.inf)

    def _set_alarm(self, now: float) -> None:
        """Progress is told less often the more members there are, as a record of each is a signature for each; and by
        all at the same moments of the wall clock: as long as any two differ in anything, all compare all they know."""
        difference = _difference(self.told, self.own)
        if difference is None:
            self._tell_at = math.inf
            return
        if difference:
            self._tell_at = max(now, self._told_at + TELL_SECONDS)
            return
        gossip = self._core.gossip
        wait = PROGRESS_SECONDS
        while wait < gossip.config.head_interval_seconds(len(gossip.membership.live())):
            wait *= 2
        if self._tell_at == math.inf:
            self._tell_at = now + wait - self._core.unix(now) % wait


def _both(follows: Participation, moves: Participation) -> Participation:
    """The participation of a peer that follows a name, and moves pieces of the version that it is to use next. These
    may go to another directory than the follower's: they do not make that one complete."""
    if follows.state == TakesPart.FAILED:
        return follows
    if follows.state in HAS_ALL:
        state = moves.state if moves.state in HAS_ALL else int(TakesPart.SEEDING)
        return msgspec.structs.replace(follows, state=state)
    done = 0 if moves.state in HAS_ALL else moves.done_permille
    return msgspec.structs.replace(follows, state=int(TakesPart.FETCHING), done_permille=done)


def _shortened(part: Participation) -> Participation:
    """As records have it."""
    return msgspec.structs.replace(
        part,
        version=short_version(part.version),
        current=short_version(part.current),
        why=part.why.encode(errors="replace")[:MAX_WHY_BYTES].decode(errors="ignore"),
    )


def _difference(told: list[Participation], now: list[Participation]) -> bool | None:
    """Whether something but progress differs; None when nothing does that is worth telling."""

    def without_progress(parts: list[Participation]) -> dict[tuple[bytes, bytes], Participation]:
        return {
            (part.name, part.version): msgspec.structs.replace(part, done_permille=0) for part in parts
        }

    if without_progress(told) != without_progress(now):
        return True
    done = {(part.name, part.version): part.done_permille for part in told}
    moved = (abs(part.done_permille - done[part.name, part.version]) for part in now)
    return False if any(step >= PERCENT for step in moved) else None
