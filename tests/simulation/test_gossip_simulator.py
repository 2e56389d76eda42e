"""The gossip simulator itself: costs, clocks, stalls, cuts, connections, and alarms that do go off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.links.connection_limits import ConnectionLimits
from p2pstore.gossip.machine import Gossip
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_faults import FaultPlan, plan_of
from simulation.gossip_invariants import Watch
from simulation.gossip_network import CONNECTION_SECONDS, MESSAGE_SECONDS, GossipNetwork
from simulation.gossip_peer import GossipPeer
from simulation.gossip_run import key_of
from simulation.gossip_truth import LogTruth
from simulation.kernel import Faults, Kernel
from simulation.measures.figures import (
    Case,
    Figure,
    percentile,
    record_of,
    settled_cluster,
)


def small_cluster(peers: int = 3, seed: int = 1) -> GossipCluster:
    cluster = GossipCluster(seed, peers)
    cluster.boot_all()
    assert cluster.run_until(cluster.agreed, 30.0) is not None
    return cluster


# --- the network -----------------------------------------------------------------------------


def test_a_one_way_cut_lets_the_other_way_through() -> None:
    network = GossipNetwork(Kernel(1), Faults())
    network.blocked.add((0, 1))
    arrived: list[str] = []
    network.send(0, 1, 10, 1, 0.0, lambda: arrived.append("there"))
    network.send(1, 0, 10, 1, 0.0, lambda: arrived.append("back"))
    network.kernel.run_until(1.0)
    assert arrived == ["back"]
    network.heal()
    assert network.reaches(0, 1)


def test_hosts_in_no_group_are_cut_off_as_well() -> None:
    network = GossipNetwork(Kernel(1), Faults())
    network.partition({0, 1}, {2})
    assert network.reaches(0, 1)
    assert not network.reaches(1, 2)
    assert not network.reaches(3, 0)
    assert network.reaches(3, 4)


def test_connections_are_opened_once_and_closed_by_their_opener_when_idle() -> None:
    network = GossipNetwork(Kernel(1), Faults())
    network.limits = ConnectionLimits(idle_seconds=10.0, max_open=3)
    assert network.use_connection(0, 1)
    assert not network.use_connection(1, 0)
    network.use_connection(0, 2)
    network.kernel.run_until(20.0)
    network.close_spare(1, set())  # it did not open any
    network.close_spare(0, {2})
    assert (network.connected(0), network.connected(1), network.opened) == ([2], [], 2)


def test_over_the_limit_the_longest_unused_connections_go() -> None:
    network = GossipNetwork(Kernel(1), Faults())
    network.limits = ConnectionLimits(max_open=2)
    for other in (1, 2, 3, 4):
        network.use_connection(0, other)
        network.kernel.run_until(network.kernel.now + 2.0)
    network.close_spare(0, {1})
    assert network.connected(0) == [1, 4]


# --- hosts -----------------------------------------------------------------------------------


def test_messages_and_connections_take_the_hosts_time() -> None:
    cluster = GossipCluster(1, 2)
    cluster.network.faults = Faults(minimum_latency=0.0, maximum_latency=0.0)
    for peer in cluster.peers:
        peer.boot([])
    first, second = cluster.peers
    turns: list[tuple[int, float]] = []
    cluster.after_turn = lambda peer: turns.append((peer.number, cluster.kernel.now))
    leaves_at = first.control._dial(second)
    assert leaves_at == pytest.approx(MESSAGE_SECONDS + CONNECTION_SECONDS)
    assert first.control._dial(second) == pytest.approx(leaves_at + MESSAGE_SECONDS)
    handled: list[float] = []
    second.arrive(second.life, lambda: handled.append(cluster.kernel.now))
    cluster.run(1.0)
    assert handled == [pytest.approx(CONNECTION_SECONDS)]  # it was busy with the connection


def test_a_stalled_host_handles_all_that_arrived_before_it_judges() -> None:
    cluster = small_cluster()
    peer = cluster.peers[1]
    order: list[str] = []
    gossip = peer.gossip

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            order.append(name)
            return call(*arguments)

        return wrapper

    for name in ("serve", "answered", "tick"):
        setattr(gossip, name, noted(name, getattr(gossip, name)))
    peer.stall(5.0)
    cluster.run(4.9)
    assert order == []
    cluster.run(0.2)
    first_tick = order.index("tick")
    assert order[:first_tick].count("serve") >= 4  # two others, a message a second each
    assert all(state.status == Status.ALIVE for state in gossip.membership.states())


def test_clocks_drift_and_are_skewed() -> None:
    cluster = GossipCluster(1, 2)
    fast, skewed = cluster.peers
    fast.clock_rate, skewed.clock_skew_seconds = 1.5, 60.0
    begin = fast.now, skewed.unix(skewed.now)
    cluster.run(10.0)
    assert fast.now - begin[0] == pytest.approx(15.0)
    assert skewed.unix(skewed.now) - begin[1] == pytest.approx(10.0)
    assert skewed.unix(0.0) - fast.unix(0.0) == pytest.approx(60.0)


def test_a_reset_is_told_and_a_silent_end_is_not() -> None:
    for silent in (True, False):
        cluster = small_cluster()
        lost: list[int] = []

        def note(cluster: GossipCluster = cluster, lost: list[int] = lost) -> None:
            for peer in cluster.peers[:2]:
                told = peer.connection_lost

                def wrapper(peer_id: bytes, peer: GossipPeer = peer, told: Any = told) -> None:
                    lost.append(peer.number)
                    told(peer_id)

                peer.connection_lost = wrapper  # type: ignore[method-assign]

        note()
        cluster.peers[2].crash(silent=silent)
        cluster.run(0.1)
        assert sorted(lost) == ([] if silent else [0, 1])


def test_bytes_and_course_are_the_same_without_decoding() -> None:
    """The short cuts above 499 peers must not change anything but the time it takes."""

    def run(decodes: bool) -> tuple[str, object]:
        cluster = GossipCluster(3, 6)
        cluster.decodes = decodes
        cluster.network.faults = Faults(loss=0.1, duplication=0.1)
        cluster.boot_all()
        for number in range(40):
            cluster.run(0.2)
            cluster.peers[number % 6].hold(record_of(number % 30, writer=number))
        cluster.run(5.0)
        return str(cluster.network.trace), cluster.totals()

    assert run(True) == run(False)


def test_peers_that_were_made_acquainted_agree_at_once_and_stay_calm() -> None:
    cluster = settled_cluster(Case(20), settle_seconds=5.0)
    assert cluster.agreed()
    assert cluster.disagreements() == []
    changes: list[object] = []
    cluster.on_change = lambda peer, change: changes.append(change)
    cluster.run(30.0)
    assert changes == []


# --- alarms ----------------------------------------------------------------------------------


def test_what_a_log_held_at_each_place() -> None:
    truth = LogTruth()
    truth.note(b"a", b"one")
    truth.note(b"b", b"two")
    truth.note(b"a", b"three")
    truth.note(b"a", None)
    assert truth.counts == [0, 1, 2, 2, 1]
    assert truth.hashes[4] ^ truth.hashes[2] == truth.hashes[1]
    assert [truth.at(b"a", place) for place in range(5)] == [None, b"one", b"one", b"three", None]


def watched() -> tuple[GossipCluster, Watch, GossipPeer, GossipPeer]:
    cluster = small_cluster()
    reader, owner = cluster.peers[:2]
    owner.hold(record_of(1))
    assert cluster.run_until(cluster.agreed, 10.0) is not None
    watch = Watch(cluster, judges_stalls=True)
    watch.check_all([key_of(1), key_of(2)])
    assert cluster.problems == []
    return cluster, watch, reader, owner


def test_the_alarm_for_ghost_keys_goes_off() -> None:
    cluster, watch, reader, owner = watched()
    owner.truth[owner.gossip.incarnation].hashes[-1] ^= 1
    watch.check(reader, [])
    assert "ghost keys" in cluster.problems[0]


def test_the_alarm_for_ghosts_in_lookups_goes_off() -> None:
    cluster, watch, reader, owner = watched()
    owner.truth[owner.gossip.incarnation] = LogTruth()
    owner.truth[owner.gossip.incarnation].note(key_of(1), record_of(1, writer=2).encode())
    watch.check(reader, [key_of(1)])
    assert any("shows a ghost key" in problem for problem in cluster.problems)


def test_the_alarm_for_made_up_incarnations_goes_off() -> None:
    cluster, watch, reader, owner = watched()
    state = reader.gossip.membership.get(owner.peer_id)
    assert state is not None
    state.incarnation += 1
    watch.check(reader, [])
    assert "made-up incarnation" in cluster.problems[0]
    state.incarnation -= 1
    watch.check(reader, [])
    assert "lowered the incarnation" in cluster.problems[1]


def test_disagreement_is_seen() -> None:
    cluster, _, _, owner = watched()
    owner.held[key_of(2)] = record_of(2)  # and its log does not say so
    assert any("lacks 1 records" in text for text in cluster.disagreements())
    cluster.peers[2].crash(silent=True)
    assert not cluster.agreed()
    assert any("ghost members ['2']" in text for text in cluster.disagreements())


# --- plans and figures -----------------------------------------------------------------------


def test_plans() -> None:
    rng = Kernel(1).rng
    assert plan_of("none", rng) == FaultPlan()
    assert plan_of("stalls", rng).stalls_only
    assert not plan_of("hard", rng).stalls_only
    plans = [plan_of("random", rng) for _ in range(50)]
    assert any(plan.stalls_only for plan in plans)
    assert any(plan.splits and not plan.crashes for plan in plans)
    with pytest.raises(ValueError, match="not 'worse'"):
        plan_of("worse", rng)


def test_figures_and_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(100)], 0.99) == 98.0
    assert percentile([], 0.5) == float("inf")
    figure = Figure("f", 2.0, "s", 1.5)
    assert (figure.holds, figure.wanted) == (False, "<= 1.5")
    assert replace(figure, at_least=True).holds
    assert Figure("f", 2.0, "s").holds


def test_an_unknown_effect_is_an_error() -> None:
    class Strange(Gossip):
        def tick(self, now: float) -> list[Any]:
            return ["jump"]

    cluster = GossipCluster(1, 1, make_gossip=Strange)
    with pytest.raises(TypeError, match="jump"):
        cluster.boot_all()
        cluster.run(1.0)
