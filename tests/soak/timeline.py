"""Lives of peers and troubles between them, on which the promises to readers depend. Pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Life:
    """From the moment a peer could serve to that from which it may have been ended; infinity while it runs."""

    began: float
    ended: float = math.inf


@dataclass(slots=True, eq=False)
class Trouble:
    """From before it began to after it ended, `peers` could not be relied on: `apart` from all others (but not from
    each other), or not working at all."""

    peers: frozenset[int]
    apart: bool
    began: float
    ended: float = math.inf

    def concerns(self, one: int, other: int) -> bool:
        """Whether what passes between these two is affected; both may be the same peer."""
        if self.apart:
            return (one in self.peers) != (other in self.peers)
        return one in self.peers or other in self.peers


@dataclass
class Timeline:
    """All of a run so far. Times are seconds of one clock; they are noted in order."""

    peers: int
    troubles: list[Trouble] = field(default_factory=list)
    lives: dict[int, list[Life]] = field(default_factory=dict)

    def begin_life(self, peer: int, at: float) -> None:
        """It can serve."""
        self.lives.setdefault(peer, []).append(Life(at))

    def end_life(self, peer: int, at: float) -> None:
        """It is about to be ended, or was found dead. A peer that does not live stays as it is."""
        lives = self.lives.get(peer)
        if lives and lives[-1].ended == math.inf:
            lives[-1].ended = at

    def begin_trouble(self, peers: Iterable[int], at: float, *, apart: bool = False) -> Trouble:
        """Note it before it begins; the caller sets `ended` after its end."""
        trouble = Trouble(frozenset(peers), apart, at)
        self.troubles.append(trouble)
        return trouble

    def stood_still(self, began: float, ended: float) -> None:
        """The whole machine, and so every peer."""
        self.troubles.append(Trouble(frozenset(range(self.peers)), False, began, ended))

    def life_at(self, peer: int, at: float) -> Life | None:
        """The one that it lived then."""
        for life in reversed(self.lives.get(peer, [])):
            if life.began <= at < life.ended:
                return life
        return None

    def undisturbed(self, one: int, other: int, since: float, until: float) -> bool:
        """Whether both lived, and nothing stood between them, all of that time."""
        for peer in (one, other):
            life = self.life_at(peer, since)
            if life is None or life.ended <= until:
                return False
        return not any(True for _ in self._troubles(one, other, since, until))

    def together(self, knows: int, reads: int, since: float, until: float, seconds: float) -> bool:
        """Whether, between these times, gossip from `knows`, which has known since `since`, could reach `reads` for
        `seconds` without a break, and `reads` has not been ended from then on."""
        teller, reader = self.life_at(knows, since), self.life_at(reads, until)
        if teller is None or reader is None:
            return False
        begin, end = max(since, reader.began), min(until, teller.ended)
        for began, ended in sorted(
            (each.began, each.ended) for each in self._troubles(knows, reads, begin, end)
        ):
            if began - begin >= seconds:
                return True
            begin = max(begin, ended)
        return end - begin >= seconds

    def quiet(self, since: float, until: float, but: int) -> bool:
        """Whether no peer was troubled in that time, and none ended, but for that one."""
        troubled = any(each.began < until and each.ended > since for each in self.troubles)
        others = (life for peer, lives in self.lives.items() if peer != but for life in lives)
        return not troubled and not any(since <= life.ended < until for life in others)

    def standstill(self, since: float, until: float) -> float:
        """Seconds of that time in which the whole machine stood still."""
        return sum(
            max(0.0, min(until, each.ended) - max(since, each.began))
            for each in self.troubles
            if not each.apart and len(each.peers) == self.peers
        )

    def _troubles(self, one: int, other: int, since: float, until: float) -> Iterator[Trouble]:
        for each in self.troubles:
            if each.began < until and each.ended > since and each.concerns(one, other):
                yield each
