"""Problems of a peer, and of its cluster as it sees it: found once, for the status page, `stats` and `doctor`. And
figures of all members, and the choice of those that are shown: members with problems first.

A cluster may have thousands of members. Figures come from each `MemberState`; records are read of shown members only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple, Protocol

import trio

from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.core.participations import HAS_ALL
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.checkpoint_records import Head, short_version
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Participation, PeerId, TakesPart, format_peer_id
from p2pstore.objects import unix_seconds_from_clock
from p2pstore.status.doctor.finding import Finding, shown
from p2pstore.status.operation_watch import PeerWatch
from p2pstore.status.problems import MAX_PROBLEMS, Facts, FailedCheckpoint, problem_document, problems

MAX_NAMES_LOOKED_AT: Final = 1000
"""Living members compared by name with the dead ones, which they may replace."""

INTERVAL_SECONDS: Final = 10.0
INTERVALS: Final = 120
"""Twenty minutes of them."""


class _Sample(NamedTuple):
    at: float
    totals: Mapping[str, int]


class RecentCounts:
    """Always the same counters, which only grow, looked at every `INTERVAL_SECONDS`. Times are monotonic seconds."""

    def __init__(self, intervals: int = INTERVALS) -> None:
        self._samples: deque[_Sample] = deque(maxlen=intervals + 1)

    def sample(self, totals: Mapping[str, int], now: float) -> None:
        self._samples.append(_Sample(now, totals))

    def since(self, totals: Mapping[str, int], now: float) -> tuple[float, dict[str, int]]:
        """Over how many seconds up to now it is known what was counted, and how much each counter has grown."""
        first = self._samples[0] if self._samples else _Sample(now, totals)
        return now - first.at, {name: count - first.totals[name] for name, count in totals.items()}

    def document(self, names: Sequence[str]) -> dict[str, Any]:
        """How much these grew in each interval, the oldest first, and how many seconds each interval took."""
        steps = list(pairwise(self._samples))
        return {
            "seconds": [round(later.at - sooner.at, 1) for sooner, later in steps],
            "grown": {
                name: [later.totals[name] - sooner.totals[name] for sooner, later in steps]
                for name in names
            },
        }


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the peer. `lately`: growth of its counters over the last `seconds`."""

    members: Survey
    checkpoints: Sequence[Progress]
    seconds: float
    lately: Mapping[str, int]
    problems: Sequence[Finding]

    def documents(self) -> list[dict[str, str]]:
        """The problems as JSON, what is broken first; `MAX_PROBLEMS` at most."""
        return [problem_document(finding) for finding in self.problems[:MAX_PROBLEMS]]

    @property
    def left_out(self) -> int:
        """How many problems there are beside those."""
        return max(0, len(self.problems) - MAX_PROBLEMS)


class ObservedPeer(Protocol):
    """A running peer as `p2pstore.status` reads it."""

    core: PeerCore
    watch: PeerWatch
    checkup: Checkup

    def state(self) -> str:
        """`leaving`, `joining`, or `ready`."""

    def totals(self) -> Mapping[str, int]:
        """Counters since the peer's start."""

    def document(self, *, private: bool = True) -> dict[str, Any]:
        """The statistics document; `private` adds keys and addresses."""

    def hottest(self, *, with_keys: bool) -> list[dict[str, Any]]:
        """The objects in memory that are read most."""


class Checkup:
    """Problems and recent counts of one running peer."""

    def __init__(self, peer: ObservedPeer) -> None:
        self._peer = peer
        self._gossip = peer.core.gossip
        self._known = peer.core.checkpoints
        self.recent = RecentCounts()
        self._checkpoints_version: tuple[int, int, int] | None = None
        self._checkpoints: list[Progress] = []

    async def watch(self) -> None:
        """Sample the counters until cancelled."""
        while True:
            self.recent.sample(self._peer.totals(), time.monotonic())
            await trio.sleep(INTERVAL_SECONDS)

    def look(self, peer: Mapping[str, Any]) -> Look:
        """The problems of a peer by its statistics document: with addresses where that is a private one."""
        membership = self._gossip.membership
        members = survey(membership.states(), self._peer.core.peer_id)
        dead = _without_replaced(members, membership.live())
        checkpoints = self._look_at_checkpoints()
        seconds, lately = self.recent.since(self._peer.totals(), time.monotonic())
        facts = Facts(
            peer,
            seconds,
            lately,
            live=members.live,
            dead=[name_of(member) for member in dead],
            dead_count=members.counts["dead"] - len(members.by_state["dead"]) + len(dead),
            suspect=[name_of(member) for member in members.by_state["suspect"]],
            suspect_count=members.counts["suspect"],
            versions=versions_of([member for _, member in members.shown if member.alive]),
            failed_checkpoints=failures(checkpoints),
        )
        return Look(members, checkpoints, seconds, lately, problems(facts))

    def _look_at_checkpoints(self) -> list[Progress]:
        """Progress of all checkpoints, renewed when it changed: there may be thousands."""
        if self._checkpoints_version != self._known.version:
            self._checkpoints_version = self._known.version
            self._checkpoints = progress(self._known.heads(), self._gossip.membership.live())
        return self._checkpoints


def _without_replaced(members: Survey, live: Sequence[MemberState]) -> list[MemberState]:
    """The dead whose name no other member has by now: without a state directory a peer comes back as a new identity."""
    dead = members.by_state["dead"]
    if not dead:
        return []
    names = {name_of(member) for member in islice(live, MAX_NAMES_LOOKED_AT)}
    return [member for member in dead if name_of(member) not in names]


MAX_SHOWN: Final = 100
MAX_WRONG: Final = 60
"""Of each state."""
STATES: Final = ("dead", "suspect", "leaving", "alive")
"""In this order; members that left on purpose are counted alone."""


@dataclass(slots=True)
class Survey:
    """Of all members. `by_state` has those to be shown, the latest in their state first. Bytes, over the living."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*STATES, "left"), 0))
    by_state: dict[str, list[MemberState]] = field(default_factory=dict)
    memory_capacity: int = 0
    memory_used: int = 0
    ssd_capacity: int = 0
    ssd_used: int = 0
    copies: int = 0

    @property
    def live(self) -> int:
        """How many are members now."""
        return self.counts["alive"] + self.counts["suspect"] + self.counts["leaving"]

    @property
    def shown(self) -> list[tuple[str, MemberState]]:
        """With their states, in the order to show them; at most `MAX_SHOWN`."""
        chosen = [(state, each) for state in STATES for each in self.by_state.get(state, ())]
        return chosen[:MAX_SHOWN]


def state_of(member: MemberState) -> str:
    """The word for how it is."""
    if member.status is Status.DEAD:
        return "dead"
    if member.status is Status.LEFT:
        return "left"
    if member.leaving:
        return "leaving"
    return "suspect" if member.status is Status.SUSPECT else "alive"


def survey(members: Iterable[MemberState], me: PeerId) -> Survey:
    """Look at all members, this one included. A member of which only claims of others are known does not count."""
    found = Survey()
    by_state: dict[str, list[MemberState]] = {state: [] for state in STATES}
    for member in members:
        if member.signed is None:
            continue
        state = state_of(member)
        found.counts[state] += 1
        if state in by_state:
            by_state[state].append(member)
        if member.alive:
            found.memory_capacity += member.memory_capacity
            found.memory_used += member.memory_used
            found.ssd_capacity += member.ssd_capacity
            found.ssd_used += member.ssd_used
            found.copies += member.location_count
    for state in ("dead", "suspect", "leaving"):
        found.by_state[state] = nlargest(
            MAX_WRONG, by_state[state], key=lambda member: (member.status_since, member.peer_id)
        )
    own = [member for member in by_state["alive"] if member.peer_id == me]
    others = [member for member in by_state["alive"][: MAX_SHOWN + 1] if member.peer_id != me]
    found.by_state["alive"] = [*own, *sorted(others[: MAX_SHOWN - len(own)], key=name_of)]
    return found


def name_of(member: MemberState) -> str:
    """As it calls itself, fit to be shown."""
    record = member.record
    return shown(record.name) if record is not None else f"{member.member:016x}"


def member_document(
    member: MemberState, state: str, now: float, round_trip_seconds: float | None
) -> dict[str, Any]:
    """One member as the page shows it. Addresses are private. `now` is monotonic."""
    record = member.record
    assert record is not None, "a member without a record is not shown"
    return {
        "name": shown(record.name),
        "id": format_peer_id(member.peer_id)[-8:],
        "state": state,
        "state_seconds": _ago(member.status_since, now),
        "memory_capacity_bytes": record.memory_capacity,
        "memory_used_bytes": record.memory_used,
        "ssd_capacity_bytes": record.ssd_capacity,
        "ssd_used_bytes": record.ssd_used,
        "objects": record.head.count,
        "load_permille": record.load_permille,
        "round_trip_seconds": round_trip_seconds and round(round_trip_seconds, 6),
        "software": shown(record.software, 40),
    }


def versions_of(members: Sequence[MemberState]) -> list[str]:
    """Their software versions."""
    records = [record for member in members if (record := member.record) is not None]
    return sorted({shown(record.software, 40) for record in records if record.software})


def _ago(then: float, now: float) -> float | None:
    """None for minus infinity: as long as this peer knows."""
    return None if then == -math.inf else round(max(0.0, now - then), 1)


MAX_CHECKPOINTS: Final = 20
MAX_HEADS: Final = 1000
"""Of more, those of the first names are looked at."""
MAX_FAILED: Final = 100


@dataclass(slots=True)
class Progress:
    """Of a publisher's newest version of a name. `fetching_permille` has one figure for each member that fetches it.
    `followers` follow the name; `switched` of them use the newest version."""

    head: Head
    complete: int = 0
    fetching_permille: list[int] = field(default_factory=list)
    failed: list[tuple[MemberState, str]] = field(default_factory=list)
    followers: int = 0
    switched: int = 0

    @property
    def under_way(self) -> bool:
        """Whether a member fetches it, or failed to."""
        return bool(self.fetching_permille or self.failed)

    def count(self, member: MemberState, part: Participation) -> None:
        """A member's part in the name."""
        newest = short_version(self.head.version)
        if part.follows:
            self.followers += 1
            self.switched += part.current == newest
        if part.version != newest:
            return
        if part.state in HAS_ALL:
            self.complete += 1
        elif part.state == TakesPart.FETCHING:
            self.fetching_permille.append(min(max(part.done_permille, 0), 1000))
        elif part.state == TakesPart.FAILED and len(self.failed) < MAX_FAILED:
            self.failed.append((member, part.why))


def progress(heads: Sequence[Head], members: Iterable[MemberState]) -> list[Progress]:
    """Of all names; those under way first, and among equals the newest."""
    by_digest = {head.digest: Progress(head) for head in heads[:MAX_HEADS]}
    for member in members:
        for part in member.checkpoints:
            found = by_digest.get(part.name)
            if found is not None:
                found.count(member, part)
    return sorted(by_digest.values(), key=lambda each: (not each.under_way, -each.head.clock))


def progress_document(each: Progress, publisher: str, *, is_switched_to: bool) -> dict[str, Any]:
    """One name as the page shows it."""
    fetching = each.fetching_permille
    return {
        "namespace": shown(each.head.namespace),
        "name": shown(each.head.name),
        "version": format_version(each.head.version)[:12],
        "publisher": publisher,
        "published_unix": round(unix_seconds_from_clock(each.head.clock)),
        "total_bytes": each.head.body.total_bytes,
        "complete": each.complete,
        "fetching": len(fetching),
        "done_permille": sum(fetching) // len(fetching) if fetching else None,
        "slowest_permille": min(fetching, default=None),
        "failed": len(each.failed),
        "followers": each.followers,
        "switched": each.switched,
        "is_switched_to": is_switched_to,
    }


def failures(all_of_them: Sequence[Progress]) -> list[FailedCheckpoint]:
    """Members that could not fetch a checkpoint, and why."""
    return [
        FailedCheckpoint(shown(each.head.name), name_of(member), shown(why, 120))
        for each in all_of_them
        for member, why in each.failed
    ][:MAX_FAILED]
