"""What is wrong with a peer, and with its cluster as it sees it: asked once, told alike by the status page, `stats` and
`doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.gossip.members.member_table import MemberState
from p2pstore.status.checkpoint_status import Progress, failures, progress
from p2pstore.status.doctor.finding import Finding
from p2pstore.status.doctor.network_rules import SsdReading
from p2pstore.status.member_list import Survey, name_of, survey, versions_of
from p2pstore.status.problems import (
    MAX_PROBLEMS,
    Facts,
    TakenPlaces,
    problem_document,
    problems,
)
from p2pstore.status.recent import INTERVAL_SECONDS, RecentCounts
from p2pstore.status.text import shown

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

MAX_NAMES_LOOKED_AT: Final = 1000
"""Of living members, for whether one that is dead was replaced by another of its name."""
MAX_REASONS: Final = 3
"""Of bootstrap addresses, why each was not reached."""

SHOWN_COUNTERS: Final = (
    *("client_puts", "client_put_bytes", "client_puts_failed", "client_reads", "client_leases"),
    *("client_reads_elsewhere", "client_reads_from_ssd", "client_misses", "last_copies_dropped"),
    *("transport_fallbacks", "objects_spoilt", "repairs", "repaired_bytes"),
)
_ADDED_UP: Final = (
    *("gets", "misses", "puts", "in_bytes", "in_objects", "in_failures", "out_bytes"),
    *("stalls", "looks", "refused_by_members", "slow"),
    *("control_refused", "data_refused", "hoarders_ended"),
)
_STALL_BUCKET: Final = 18
"""From here on the event loop was late by more than 131 ms (`histograms`)."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the peer. `lately`: what was counted over the last `seconds`."""

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


class Checkup:
    """Of one peer, while it runs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.recent = RecentCounts((*_ADDED_UP, *SHOWN_COUNTERS))
        self._checkpoints_version: tuple[int, int, int] | None = None
        self._checkpoints: list[Progress] = []

    async def watch(self) -> None:
        """Note what is counted, also while nobody looks; until cancelled."""
        while True:
            self.recent.sample(self.totals(), self._node.now)
            await trio.sleep(INTERVAL_SECONDS)

    def look(self, peer: Mapping[str, Any], *, private: bool) -> Look:
        """`peer` is its statistics document. `private`: with addresses, for this machine's users; anybody may have the
        rest."""
        core = self._node.core
        membership = core.gossip.membership
        members = survey(membership.states(), core.peer_id)
        dead = _without_replaced(members, membership.live())
        checkpoints = self._look_at_checkpoints()
        seconds, lately = self.recent.since(self.totals(), self._node.now)
        facts = self._facts(peer, members, dead, checkpoints, seconds, lately, private=private)
        return Look(members, checkpoints, seconds, lately, problems(facts))

    def state(self) -> str:
        """`leaving`, `joining`, or `ready`."""
        node = self._node
        if node.leave_requested.is_set() or node.core.closing:
            return "leaving"
        if node.config.bootstrap and not node.settled.is_set():
            return "joining"
        return "ready"

    def totals(self) -> dict[str, int]:
        """Counters since the peer's start, as they are shown."""
        node = self._node
        counters: Mapping[str, int] = node.core.counters
        totals = {name: counters.get(name, 0) for name in SHOWN_COUNTERS}
        gets = ("client_reads", "client_leases", "client_reads_elsewhere")
        came = node.watch.traffic.totals.values()
        measures = node.watch.measures
        return {
            "gets": sum(totals[name] for name in gets),
            "misses": totals["client_misses"],
            "puts": totals["client_puts"],
            "in_bytes": sum(use.bytes for use in came),
            "in_objects": sum(use.objects for use in came),
            "in_failures": sum(use.failures for use in came),
            "out_bytes": node.served.bytes,
            "stalls": sum(measures.loop_lag.counts[_STALL_BUCKET:]),
            "looks": measures.loop_lag.count,
            "refused_by_members": measures.refused_by_members,
            "slow": node.watch.slow.total,
            "control_refused": node.host.keeper.counts.refused_full,
            "data_refused": node.data_places.refused,
            "hoarders_ended": node.budget.ended,
            **totals,
        }

    def _may_wait(self) -> bool:
        """Whether it is too soon to say that nobody answers, or nobody is to answer."""
        node = self._node
        joining = not node.contacted.is_set() and node.uptime_seconds < node.config.join_timeout
        return joining or (node.settled.is_set() and not node.contacted.is_set())

    def _facts(
        self,
        peer: Mapping[str, Any],
        members: Survey,
        dead: Sequence[MemberState],
        checkpoints: Sequence[Progress],
        seconds: float,
        lately: Mapping[str, int],
        *,
        private: bool,
    ) -> Facts:
        node = self._node
        suspect = members.by_state["suspect"]
        replaced = len(members.by_state["dead"]) - len(dead)
        return Facts(
            seconds=seconds,
            leaving=self.state() == "leaving",
            bootstrap_count=0 if self._may_wait() else len(node.config.bootstrap),
            joined=node.contacted.is_set(),
            live=members.live,
            dead=[name_of(member) for member in dead],
            dead_count=members.counts["dead"] - replaced,
            suspect=[name_of(member) for member in suspect],
            suspect_count=members.counts["suspect"],
            versions=versions_of([member for _, member in members.shown if member.alive]),
            load_permille=node.load.told_permille,
            local_health=peer["gossip"]["local_health"],
            clock_ahead_seconds=peer["clock_ahead_seconds"],
            clock_problem=peer["clock_problem"],
            stamps_ahead_seconds=peer["stamps_ahead_seconds"],
            wrong_clocks=[
                f"{shown(node.core.name_of(peer_id))} ({-ahead:+,.0f} s)"
                for peer_id, ahead in node.core.timekeeping.wrong_peers(node.now)
            ],
            members_refused=peer["members_refused"],
            memory_share=_share(peer["memory_used_bytes"], peer["memory_capacity_bytes"]),
            leased_share=_share(peer["leased_bytes"], peer["memory_capacity_bytes"]),
            lost_rdma_devices=peer.get("rdma", {}).get("lost_devices", 0),
            lacking=peer["repair"]["lacking"],
            floors_permille=peer["floors_permille"],
            floors_wait_for=node.core.floors.waits_for(),
            floors_disbelieved=node.core.floors.disbelieved(node.now),
            distrusted=node.core.counters["horizons_missed"],
            ssd=_ssd_reading(peer.get("ssd")),
            lately=lately,
            state_problem=node.saver.problem if node.saver is not None else "",
            state_damage=node.saver.state.damage if node.saver is not None else (),
            kept_damaged=node.core.counters["kept_objects_damaged"],
            spoilt=node.core.counters["objects_spoilt"],
            memory_restored=node.core.counters["memory_restored"],
            puts=lately.get("client_puts", 0),
            bootstrap=node.config.bootstrap if private else (),
            unreached=list(islice(node.joining.unreached.values(), MAX_REASONS)) if private else (),
            failed_checkpoints=failures(checkpoints, name_of),
            places=[
                _taken_places(what, peer["places"][what], lately.get(f"{what}_refused", 0))
                for what in ("control", "data")
            ],
        )

    def _look_at_checkpoints(self) -> list[Progress]:
        """Anew when there is news of them: there may be thousands."""
        core = self._node.core
        if self._checkpoints_version != core.checkpoints.version:
            self._checkpoints_version = core.checkpoints.version
            self._checkpoints = progress(core.checkpoints.heads(), core.gossip.membership.live())
        return self._checkpoints


def _without_replaced(members: Survey, live: Sequence[MemberState]) -> list[MemberState]:
    """The dead, but for those whose name another member has by now: a peer without a state directory comes back as
    somebody else."""
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


def _ssd_reading(ssd: Mapping[str, Any] | None) -> SsdReading | None:
    if ssd is None:
        return None
    return SsdReading(
        state=ssd["state"],
        why=ssd["why"],
        capacity_bytes=ssd["capacity_bytes"],
        live_bytes=ssd["live_bytes"],
        objects=ssd["objects"],
        damaged=ssd["damaged"],
        read_p99_ms=ssd["read_latency"].get("p99_ms") or 0.0,
        cure=ssd["cure"],
    )
