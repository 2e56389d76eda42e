"""Changes to the protocol that are known to be wrong: the simulator must catch each, within 100 seeds.

The mutations are made here, around the real machine. None is a switch in it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import FetchSnapshot, SnapshotHead
from p2pstore.gossip.locations.log import SignedRun
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.locations.views import Applied
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members import membership as membership_module
from p2pstore.gossip.records import LOCATION_BYTES, Member, PeerId
from simulation.gossip_cluster import GossipCluster, packed_hash
from simulation.gossip_peer import GossipPeer
from simulation.gossip_run import GossipOutcome, GossipScenario, run_gossip_seed

SCENARIO = GossipScenario(most_peers=10, seconds=5.0, operations_per_second=20.0)
HARD = replace(SCENARIO, most_peers=6, faults="hard")
STALLS = replace(SCENARIO, faults="stalls")
SEEDS = range(100)
REMOVED = 0x80
NO_OPERATION = bytes(LOCATION_BYTES - 1) + bytes((REMOVED,))
"""Withdraws keys that no peer holds."""


def first_caught(
    scenario: GossipScenario = SCENARIO,
    make_gossip: Callable[..., Gossip] = Gossip,
    make_peer: Callable[[GossipCluster, int], GossipPeer] = GossipPeer,
) -> GossipOutcome:
    """The first seed that shows a problem. The real protocol passes all those before it, and that one."""
    for seed in SEEDS:
        outcome = run_gossip_seed(seed, scenario, make_gossip=make_gossip, make_peer=make_peer)
        if outcome.problems:
            return outcome
    pytest.fail(f"not caught in {len(SEEDS)} seeds")


def check_caught(outcome: GossipOutcome, *complaints: str, scenario: GossipScenario = SCENARIO) -> None:
    """Caught by the right alarm; and the protocol as it is raises none with that seed."""
    assert any(complaint in text for text in outcome.problems for complaint in complaints), (
        outcome.problems
    )
    assert run_gossip_seed(outcome.seed, scenario).problems == []


# --- snapshots in pieces ---------------------------------------------------------------------


class PiecewisePeer(GossipPeer):
    """Half of a snapshot can be seen before the other half is there (chitchat #110)."""

    def install_snapshot(self, fetch: FetchSnapshot, head: SnapshotHead | None, packed: bytes) -> None:
        if head is not None and len(packed) >= 2 * LOCATION_BYTES:
            half = packed[: len(packed) // LOCATION_BYTES // 2 * LOCATION_BYTES]
            with suppress(ProtocolError):  # the head that is known is just that of the place before
                self.gossip.directory.install_snapshot(
                    fetch.member,
                    head.incarnation,
                    head.sequence - 1,
                    packed_hash(half),
                    check_snapshot(half),
                )
            rest = partial(super().install_snapshot, fetch, head, packed)
            life = self.life
            self.cluster.kernel.after(0.05, lambda: self.arrive(life, rest))
        else:
            super().install_snapshot(fetch, head, packed)


def test_snapshots_in_pieces_are_caught() -> None:
    check_caught(first_caught(make_peer=PiecewisePeer), "ghost keys", "ghost key of")


# --- tombstones ------------------------------------------------------------------------------


class Credulous:
    """Whatever is signed is right."""

    def verify(self, peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        return True


class TombstoneGossip(Gossip):
    """Withdrawals are passed on for a second and then forgotten; a peer that was away never hears of them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.checks.verifier = Credulous()
        self._passed_on = self.knowledge.operations_since
        self._heard_at: dict[tuple[Member, bytes], float] = {}
        self._at = 0.0
        self.knowledge.operations_since = self._without_old_tombstones  # type: ignore[method-assign]

    def tick(self, now: float) -> list[Any]:
        self._at = now
        return super().tick(now)

    def _without_old_tombstones(
        self, member: Member, sequence: int, limit_bytes: int
    ) -> list[SignedRun]:
        runs = self._passed_on(member, sequence, limit_bytes)
        return [replace(run, operations=self._forgetful(member, run.operations)) for run in runs]

    def _forgetful(self, member: Member, operations: bytes) -> bytes:
        kept = bytearray()
        for start in range(0, len(operations), LOCATION_BYTES):
            operation = operations[start : start + LOCATION_BYTES]
            heard_at = self._heard_at.setdefault((member, operation), self._at)
            forgotten = operation[-1] & REMOVED and self._at > heard_at + 1.0
            kept += NO_OPERATION if forgotten else operation
        return bytes(kept)


def test_tombstones_with_a_timeout_are_caught() -> None:
    check_caught(first_caught(make_gossip=TombstoneGossip), "ghost keys", "ghost key of", "ghosts")


# --- incarnations ----------------------------------------------------------------------------


class SameIncarnationPeer(GossipPeer):
    """A restarted process numbers its log from 1 under the incarnation that it had before."""

    def choose_incarnation(self) -> int:
        return self.saved.incarnation or super().choose_incarnation()


def test_a_reused_incarnation_is_caught() -> None:
    check_caught(
        first_caught(make_peer=SameIncarnationPeer), "of a log of", "ghost", "twin", "agreement"
    )


# --- verdicts --------------------------------------------------------------------------------


class HastyPeer(GossipPeer):
    """All timeouts that are due are judged before anything is handled that had arrived."""

    def turn(self) -> None:
        for _ in range(3):
            self.tick_if_due()
        super().turn()


def test_verdicts_before_draining_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "STALL_SECONDS", float("inf"))
    outcome = first_caught(STALLS, make_peer=HastyPeer)
    monkeypatch.undo()
    check_caught(outcome, "stood still, and accused", scenario=STALLS)


# --- the directory ---------------------------------------------------------------------------


class GaplessGossip(Gossip):
    """Operations are applied wherever they come, though some before them are missing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.checks._check_runs = lambda chunks, *_: chunks  # type: ignore[method-assign]
        self._apply = self.directory.apply
        self.directory.apply = self._apply_anywhere  # type: ignore[method-assign]

    def _apply_anywhere(self, member: Member, incarnation: int, run: SignedRun) -> Applied:
        known, sequence = self.directory.position(member)
        missing = run.first_sequence - sequence - 1
        if known == incarnation and 0 < missing < 10_000:
            operations = missing * NO_OPERATION + run.operations
            run = replace(run, first_sequence=sequence + 1, operations=operations)
        return self._apply(member, incarnation, run)


def test_operations_across_a_gap_are_caught() -> None:
    check_caught(first_caught(make_gossip=GaplessGossip), "ghost keys", "ghost key of")


class StubbornGossip(Gossip):
    """A location that its owner denied is shown again and again."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.directory.mark_stale = self._ignore  # type: ignore[method-assign]

    def _ignore(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The directory is always right."""


def test_denials_that_are_ignored_are_caught() -> None:
    check_caught(first_caught(make_gossip=StubbornGossip), "told is not there")
