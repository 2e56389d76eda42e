"""How long a suspect has to refute: Lifeguard's dynamic suspicion, as in memberlist. Pure.

One accuser may be the one that is ill, so a suspicion starts with a long time. Every further member that
accuses the same suspect from its own probes shortens it, down to the shortest time when as many confirm as
are expected: `minimum + (maximum - minimum) * (1 - log(c + 1) / log(k + 1))` for `c` of `k` confirmations.

Time alone does not make a verdict here: a refutation is a rumour, and a rumour misses a member now and then.
So a peer that is about to declare a suspect dead probes it once more, accusers just before the time is over. The
others wait a little for the accusers' verdict, so that not all members probe the dead. With another's verdict
the time is over for those whose own probe failed, and the others probe the suspect at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from p2pstore.gossip.exchange.message_budget import MemberBudgets
from p2pstore.gossip.members.member_table import MembershipConfig
from p2pstore.gossip.records import Member, PeerId
from p2pstore.objects import put_newest

PROOF_PROBES: Final = 3
"""A probe of a suspect is wanted again when it has not ended within this number of probe intervals."""
MAX_MULTIPLIER: Final = 6.0
"""The longest time, in shortest times."""
JUDGED_AT_ONCE: Final = 128
"""Suspects judged in one step: where thousands die together, the table of homes follows them in steps."""


def shortest_suspicion_seconds(multiplier: float, members: int, probe_interval_seconds: float) -> float:
    """How long a confirmed suspect has to refute: it grows with the logarithm of the cluster, as the time
    does that the accusation and the refutation take to spread."""
    return multiplier * max(1.0, math.log10(max(1, members))) * probe_interval_seconds


def expected_confirmations(multiplier: float, members: int) -> int:
    """How many confirmations make a suspicion as short as it gets. None are expected in a cluster without
    that many members besides this one and the suspect."""
    expected = int(multiplier) - 2
    return expected if 0 < expected <= members - 2 else 0


@dataclass(slots=True)
class Suspicion:
    """One suspect's time. `accusers`: all that accused it. `asked_at`: when this peer last began to look for itself,
    `failed_at`: when a probe of its own last failed."""

    began_at: float
    shortest_seconds: float
    longest_seconds: float
    expected: int
    accusers: set[Member] = field(default_factory=set)
    postponed_seconds: float = 0.0
    earliest_at: float = -math.inf
    asked_at: float = -math.inf
    failed_at: float = -math.inf
    judged_by_another: bool = False
    """Whether another member holds the suspect dead."""
    deadline: float = field(init=False)
    """When the suspect counts as dead. Kept, because all suspects are looked at after every event."""

    def __post_init__(self) -> None:
        self._set_deadline()

    def confirm(self, by: Member) -> bool:
        """Another member accuses the suspect. Whether that was news."""
        if by in self.accusers or len(self.accusers) > self.expected:
            return False
        self.accusers.add(by)
        self._set_deadline()
        return True

    def _set_deadline(self) -> None:
        seconds = self.shortest_seconds
        if self.expected:
            confirmed = math.log(max(1, len(self.accusers))) / math.log(self.expected + 1)
            longer = self.longest_seconds - self.shortest_seconds
            seconds += longer * max(0.0, 1.0 - confirmed)
        self.deadline = max(self.began_at + seconds + self.postponed_seconds, self.earliest_at)

    def postpone(self, seconds: float, earliest_at: float) -> None:
        """This process stalled for `seconds`, and heard no refutation meanwhile: judge that much later, not
        before `earliest_at`, and by a probe that is yet to be made."""
        self.postponed_seconds += seconds
        self.earliest_at = earliest_at
        self._set_deadline()
        self.asked_at = self.failed_at = -math.inf

    def due(self, accused: bool, probe_seconds: float) -> float:
        """When there is something to do: to probe the suspect (again), or to declare it dead. `accused`: by this
        peer, whose probes take `probe_seconds`."""
        if self.judged_by_another and self.asked_at == -math.inf:
            return self.earliest_at
        if self.asked_at == -math.inf:
            return self.deadline + (-probe_seconds if accused else probe_seconds)
        if self.is_proved:
            return self.earliest_at if self.judged_by_another else self.deadline
        return self.asked_at + PROOF_PROBES * probe_seconds

    @property
    def is_proved(self) -> bool:
        """Whether this peer's own last look has failed; with another's verdict, any look since the suspicion began."""
        if self.judged_by_another:
            return self.failed_at > -math.inf
        return self.failed_at >= self.asked_at > -math.inf


MAX_HEALTH_SCORE: Final = 8
"""The worst score: everything takes nine times as long."""


class LocalHealth:
    """A score from 0 (well) to `MAX_HEALTH_SCORE`; every wait is multiplied by one more than it."""

    def __init__(self) -> None:
        self.score = 0

    @property
    def multiplier(self) -> int:
        """By what probe intervals and timeouts are multiplied: 1 when all goes well."""
        return self.score + 1

    def better(self) -> None:
        self.score = max(0, self.score - 1)

    def worse(self, by: int = 1) -> None:
        """A probe failed, a helper did not even refuse, or an accusation of this peer had to be refuted."""
        self.score = min(MAX_HEALTH_SCORE, self.score + by)


ACCUSATIONS_A_SECOND: Final = 2.0
ACCUSATIONS_AT_ONCE: Final = 64
"""Many die at once when a rack loses power, and each survivor tells of all of them."""
REFUTATIONS: Final = 2
DISBELIEVED_SECONDS: Final = 180.0
MAX_ACCUSERS: Final = 512
MAX_PAIRS: Final = 4096
"""Those that were heard of last are kept."""


class Accusers:
    """Limits on probes that accusations cause: 2 a second for one accuser, in bursts of 64; and none about a member
    that refuted this accuser twice within 180 s. Members are named by their short names."""

    def __init__(self) -> None:
        self.claims = MemberBudgets[Member](ACCUSATIONS_A_SECOND, ACCUSATIONS_AT_ONCE, MAX_ACCUSERS)
        """Each member's budget of claims."""
        self._unrefuted: OrderedDict[Member, set[Member]] = OrderedDict()
        """Accused -> its accusers since this peer heard from it last."""
        self._refuted: OrderedDict[tuple[Member, Member], tuple[int, float]] = OrderedDict()
        """(accuser, accused) -> how often that was refuted, and when last."""

    def __len__(self) -> int:
        return len(self.claims) + len(self._unrefuted) + len(self._refuted)

    def may_accuse(self, accuser: Member, accused: Member, now: float) -> bool:
        """Whether to look at the accused for what `accuser` says. Counts it, if so."""
        times, at = self._refuted.get((accuser, accused), (0, 0.0))
        if times >= REFUTATIONS and now < at + DISBELIEVED_SECONDS:
            return False
        if not self.claims.affords(accuser, now):
            return False
        put_newest(self._unrefuted, accused, self._unrefuted.get(accused, set()) | {accuser}, MAX_PAIRS)
        return True

    def heard(self, accused: Member, now: float) -> None:
        """Something came from the accused itself: earlier accusations are refuted."""
        for accuser in self._unrefuted.pop(accused, ()):
            times, at = self._refuted.get((accuser, accused), (0, 0.0))
            times = times + 1 if now < at + DISBELIEVED_SECONDS else 1
            put_newest(self._refuted, (accuser, accused), (times, now), MAX_PAIRS)

    def died(self, accused: Member) -> None:
        """This peer believes it, too."""
        self._unrefuted.pop(accused, None)


class Suspects:
    """The suspects of one peer, `me`, and when each is to be probed or judged."""

    def __init__(self, me: Member, config: MembershipConfig, health: LocalHealth) -> None:
        self._me = me
        self._config = config
        self._health = health
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._unproved: list[PeerId] = []
        self._due_at: float | None = None
        """The result of `due_at`, which is asked for after every event; None once anything about a suspect changed."""
        self._due_multiplier = 0

    def __len__(self) -> int:
        return len(self._suspicions)

    def get(self, peer_id: PeerId) -> Suspicion | None:
        """The suspicion of a peer. Call `changed` after changing it."""
        return self._suspicions.get(peer_id)

    def begin(self, peer_id: PeerId, now: float, members: int, by: Member | None = None) -> None:
        """Suspect a peer, among `members` live ones, from now on; `by` accuses it (None: this peer)."""
        shortest = self.shortest_seconds(members)
        self._suspicions[peer_id] = Suspicion(
            began_at=now,
            shortest_seconds=shortest,
            longest_seconds=MAX_MULTIPLIER * shortest,
            expected=expected_confirmations(self._config.suspicion_multiplier, members),
            accusers={self._me if by is None else by},
        )
        self._due_at = None

    def end(self, peer_id: PeerId) -> None:
        """Suspect a peer no longer, if it was."""
        if self._suspicions.pop(peer_id, None) is not None:
            self._due_at = None

    def changed(self) -> None:
        self._due_at = None

    def postpone(self, seconds: float, earliest_at: float) -> None:
        """This process stalled for `seconds`: see `Suspicion.postpone`."""
        for suspicion in self._suspicions.values():
            suspicion.postpone(seconds, earliest_at)
        self._due_at = None

    def take_due(self, now: float) -> list[tuple[PeerId, Suspicion]]:
        """Suspicions that are due, at most `JUDGED_AT_ONCE`; the others are due at the next call."""
        if self.due_at() > now:
            return []
        self._due_at = None
        due = [each for each in self._suspicions.items() if self._due(each[1]) <= now]
        return due[:JUDGED_AT_ONCE]

    def due_at(self) -> float:
        """When `take_due` has a suspicion; infinity without suspects."""
        multiplier = self._health.multiplier
        if self._due_at is None or self._due_multiplier != multiplier:
            self._due_at = min(map(self._due, self._suspicions.values()), default=math.inf)
            self._due_multiplier = multiplier
        return self._due_at

    def want_proof(self, peer_id: PeerId, suspicion: Suspicion, now: float) -> None:
        """This peer has to probe the suspect before it may declare it dead."""
        suspicion.asked_at = now
        self._unproved.append(peer_id)

    def take_unproved(self) -> list[PeerId]:
        """Suspects to probe: those of `want_proof` since the last call."""
        unproved, self._unproved = self._unproved, []
        return unproved

    def shortest_seconds(self, members: int) -> float:
        """The shortest time that a suspect has to refute, among `members` live ones."""
        config = self._config
        return shortest_suspicion_seconds(
            config.suspicion_multiplier, members, config.probe_interval_seconds
        )

    def _due(self, suspicion: Suspicion) -> float:
        probe_seconds = self._config.probe_interval_seconds * self._health.multiplier
        # A peer whose own probe failed has its verdict together with the accusers, also when its confirmation did not
        # count any more: a rumour of the death may miss it.
        accused = suspicion.failed_at > -math.inf or self._me in suspicion.accusers
        return suspicion.due(accused, probe_seconds)
