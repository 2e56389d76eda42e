"""Problems of a peer, and of its cluster as it sees it: found once, for the status page, `stats` and `doctor`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple, Protocol

import trio

from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.status.doctor.finding import Finding, shown
from p2pstore.status.doctor.network_rules import ssd_reading
from p2pstore.status.operation_watch import PeerWatch
from p2pstore.status.problems import MAX_PROBLEMS, Facts, TakenPlaces, problem_document, problems
from p2pstore.status.survey import Progress, Survey, failures, name_of, progress, survey, versions_of

MAX_NAMES_LOOKED_AT: Final = 1000
"""Living members compared by name with the dead ones, which they may replace."""

SHOWN_COUNTERS: Final = (
    *("client_puts", "client_put_bytes", "client_puts_failed", "client_reads", "client_leases"),
    *("client_reads_elsewhere", "client_reads_from_ssd", "client_misses", "last_copies_dropped"),
    *("copies_offered", "offers_taken", "offers_refused", "offered_bytes"),
    *("transport_fallbacks", "objects_spoilt", "repairs", "repaired_bytes"),
)
_ADDED_UP: Final = (
    *("gets", "misses", "puts", "in_bytes", "in_objects", "in_failures", "out_bytes"),
    *("stalls", "looks", "refused_by_members", "slow"),
    *("control_refused", "data_refused", "hoarders_ended"),
)
_SAME_IN_BOTH: Final = (
    *("joined", "load_permille", "clock_ahead_seconds", "clock_problem", "stamps_ahead_seconds"),
    *("wrong_clocks", "members_refused", "floors_permille", "floors_wait_for"),
    *("floors_disbelieved", "state_problem", "state_damage"),
)
"""Fields of the statistics document that `Facts` has under the same name."""
INTERVAL_SECONDS: Final = 10.0
INTERVALS: Final = 120
"""Twenty minutes of them."""


class _Sample(NamedTuple):
    at: float
    totals: tuple[int, ...]


class RecentCounts:
    """Counters that only grow, looked at every `INTERVAL_SECONDS`. Times are monotonic seconds."""

    def __init__(self, names: Sequence[str], intervals: int = INTERVALS) -> None:
        self._names = tuple(names)
        self._samples: deque[_Sample] = deque(maxlen=intervals + 1)

    def sample(self, totals: Mapping[str, int], now: float) -> None:
        """The counters stand so; one that is missing stands at 0."""
        self._samples.append(_Sample(now, self._values(totals)))

    def since(self, totals: Mapping[str, int], now: float) -> tuple[float, dict[str, int]]:
        """Over how many seconds up to now it is known what was counted, and how much each counter has grown."""
        first = self._samples[0] if self._samples else _Sample(now, self._values(totals))
        grown = map(int.__sub__, self._values(totals), first.totals)
        return now - first.at, dict(zip(self._names, grown, strict=True))

    def document(self, names: Sequence[str]) -> dict[str, Any]:
        """How much these grew in each interval, the oldest first, and how many seconds each interval took."""
        steps = list(pairwise(self._samples))
        places = [self._names.index(name) for name in names]
        return {
            "seconds": [round(later.at - sooner.at, 1) for sooner, later in steps],
            "grown": {
                name: [later.totals[place] - sooner.totals[place] for sooner, later in steps]
                for name, place in zip(names, places, strict=True)
            },
        }

    def _values(self, totals: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(totals.get(name, 0) for name in self._names)


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
        self.recent = RecentCounts((*_ADDED_UP, *SHOWN_COUNTERS))
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
        facts = _facts(peer, members, dead, checkpoints, (seconds, lately))
        return Look(members, checkpoints, seconds, lately, problems(facts))

    def _look_at_checkpoints(self) -> list[Progress]:
        """Progress of all checkpoints, renewed when it changed: there may be thousands."""
        if self._checkpoints_version != self._known.version:
            self._checkpoints_version = self._known.version
            self._checkpoints = progress(self._known.heads(), self._gossip.membership.live())
        return self._checkpoints


def _facts(
    peer: Mapping[str, Any],
    members: Survey,
    dead: Sequence[MemberState],
    checkpoints: Sequence[Progress],
    lately: tuple[float, Mapping[str, int]],
) -> Facts:
    replaced = len(members.by_state["dead"]) - len(dead)
    (seconds, grown), counters = lately, peer["counters"]
    suspect = members.by_state["suspect"]
    told = peer["joined"] or peer["bootstrap_silent"]
    return Facts(
        **{name: peer[name] for name in _SAME_IN_BOTH},
        seconds=seconds,
        lately=grown,
        leaving=peer["state"] == "leaving",
        bootstrap_count=peer["bootstrap_addresses"] if told else 0,
        bootstrap=peer.get("bootstrap", ()),
        unreached=peer.get("unreached", ()),
        live=members.live,
        dead=[name_of(member) for member in dead],
        dead_count=members.counts["dead"] - replaced,
        suspect=[name_of(member) for member in suspect],
        suspect_count=members.counts["suspect"],
        versions=versions_of([member for _, member in members.shown if member.alive]),
        local_health=peer["gossip"]["local_health"],
        memory_share=_share(peer["memory_used_bytes"], peer["memory_capacity_bytes"]),
        leased_share=_share(peer["leased_bytes"], peer["memory_capacity_bytes"]),
        lost_rdma_devices=peer.get("rdma", {}).get("lost_devices", 0),
        lacking=peer["repair"]["lacking"],
        distrusted=counters.get("horizons_missed", 0),
        kept_damaged=counters.get("kept_objects_damaged", 0),
        spoilt=counters.get("objects_spoilt", 0),
        memory_restored=counters.get("memory_restored", 0),
        puts=grown.get("client_puts", 0),
        ssd=ssd_reading(peer["ssd"]) if "ssd" in peer else None,
        failed_checkpoints=failures(checkpoints, name_of),
        places=[
            _taken_places(what, peer["places"][what], grown.get(f"{what}_refused", 0))
            for what in ("control", "data")
        ],
    )


def _without_replaced(members: Survey, live: Sequence[MemberState]) -> list[MemberState]:
    """The dead, but for those whose name another member has by now: a peer without a state directory comes back as
    a new identity."""
    dead = members.by_state["dead"]
    if not dead:
        return []
    names = {name_of(member) for member in islice(live, MAX_NAMES_LOOKED_AT)}
    return [member for member in dead if name_of(member) not in names]


def _taken_places(what: str, document: Mapping[str, Any], refused: int) -> TakenPlaces:
    largest = document["largest"]
    return TakenPlaces(
        what,
        document["taken"],
        document["limit"],
        refused,
        shown(largest["name"]),
        largest["places"],
        largest.get("host", ""),
        host_places=largest["host_places"],
    )


def _share(used: int, capacity: int) -> float:
    return used / capacity if capacity else 0.0
