"""Membership among whole gossip machines in virtual time: cuts, stalls, restarts, long absences."""

from collections.abc import Callable

import pytest

from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.members.member_table import MemberChange
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.network import Faults
from tests.present import present
from tests.unit.gossip_network import inform_of_death

Changes = list[tuple[GossipPeer, MemberChange]]


def settled(count: int, seed: int = 1, faults: Faults | None = None) -> GossipCluster:
    """Peers that know each other, and no other address."""
    cluster = GossipCluster(seed, count, faults=faults)
    cluster.boot_acquainted()
    cluster.run(2.0)
    return cluster


def watch(cluster: GossipCluster) -> Changes:
    """Every accusation and verdict from now on, with the peer that came to believe it."""
    seen: Changes = []
    cluster.on_change = lambda peer, change: (
        seen.append((peer, change)) if change.new in (Status.SUSPECT, Status.DEAD) else None
    )
    return seen


def believes(peer: GossipPeer, other: GossipPeer) -> Status:
    state = present(peer.gossip.membership.get(other.peer_id))
    return state.status


def all_see(cluster: GossipCluster) -> Callable[[], bool]:
    ids = {peer.peer_id for peer in cluster.running}
    return lambda: all(
        {state.peer_id for state in peer.gossip.membership.live()} == ids for peer in cluster.running
    )


def test_two_that_do_not_reach_each_other_are_held_alive_through_the_others() -> None:
    cluster = settled(5)
    seen = watch(cluster)
    cluster.network.blocked |= {(0, 1), (1, 0)}
    cluster.run(60.0)
    assert seen == []


def test_nobody_helps_a_peer_that_nobody_reaches() -> None:
    cluster = settled(5)
    seen = watch(cluster)
    cluster.network.partition({0}, {1, 2, 3, 4})
    assert cluster.run_until(
        lambda: all(believes(peer, cluster.peers[0]) is Status.DEAD for peer in cluster.peers[1:]), 12.0
    )
    # The one that is alone cannot tell whether it is the others: it takes its time.
    assert all(peer is not cluster.peers[0] or change.new is Status.SUSPECT for peer, change in seen)
    assert cluster.peers[0].gossip.membership.health.score >= 6


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_stands_still_again_and_again_accuses_nobody(seed: int) -> None:
    cluster = settled(5, seed)
    seen = watch(cluster)
    sleeper, rng = cluster.peers[0], cluster.kernel.rng
    for seconds in (0.5, 0.7, 1.0, 2.0, 5.0, 20.0, 0.5, 0.9, 8.0, 1.5, 0.6, 3.0):
        sleeper.stall(seconds)
        cluster.run(seconds + rng.uniform(0.01, 2.0))
    assert [change for peer, change in seen if peer is sleeper and change.by is None] == []
    assert {change.peer_id for _, change in seen} <= {sleeper.peer_id}
    assert cluster.run_until(all_see(cluster), 10.0) is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_stall_of_everybody_at_once_is_nobodys_death(seed: int) -> None:
    cluster = settled(5, seed)
    cluster.run(cluster.kernel.rng.uniform(0.0, 1.0))
    seen = watch(cluster)
    for peer in cluster.peers:
        peer.stall(cluster.kernel.rng.uniform(9.8, 10.0))
    cluster.run(30.0)
    assert [change for _, change in seen if change.by is None] == []


def test_a_crash_without_a_word_is_known_in_time() -> None:
    cluster = settled(10, faults=Faults(loss=0.05))
    for victim in cluster.peers[:4]:
        victim.crash(silent=True)
        took = present(
            cluster.run_until(
                lambda v=victim: all(believes(p, v) is Status.DEAD for p in cluster.running),  # type: ignore[misc]
                20.0,
            )
        )
        assert took <= 9.0


def test_a_crash_that_resets_connections_is_suspected_at_once() -> None:
    cluster = settled(10)
    victim = cluster.peers[3]
    victim.crash()
    took = present(
        cluster.run_until(
            lambda: all(believes(p, victim) is not Status.ALIVE for p in cluster.running), 2.0, 0.05
        )
    )
    assert took <= 0.5


def test_without_loss_and_stalls_nobody_is_ever_suspected() -> None:
    cluster = settled(8)
    seen = watch(cluster)
    cluster.run(60.0)
    assert seen == []


def test_after_loss_the_wrongly_suspected_refute_before_they_are_given_up() -> None:
    cluster = settled(6, faults=Faults(loss=0.3))
    seen = watch(cluster)
    cluster.run(60.0)
    assert {change.new for _, change in seen} == {Status.SUSPECT}  # there were some
    assert any(
        peer.gossip.membership.own.incarnation > peer.gossip.incarnation for peer in cluster.peers
    )


def test_a_whole_cluster_that_starts_anew_with_clocks_that_went_back() -> None:
    """memberlist #311: claims about the former life outlive it, at a higher incarnation."""
    cluster = settled(6)
    old = cluster.peers[0]
    for peer in cluster.peers[1:]:
        peer.crash(silent=True)
    # No member confirms the suspicion, so it takes the longest time.
    assert cluster.run_until(lambda: len(old.gossip.membership.live()) == 1, 120.0)
    for peer in cluster.peers[1:]:
        peer.clock_skew_seconds = -86_400.0
        peer.boot([old.address], keep_state=False)
    assert cluster.run_until(all_see(cluster), 30.0) is not None


def test_the_whole_cluster_restarts_from_its_address_books() -> None:
    cluster = settled(6)
    for peer in cluster.peers:
        peer.crash(silent=True)
    cluster.run(5.0)
    for peer in cluster.peers:
        peer.boot([])
    assert cluster.run_until(all_see(cluster), 10.0) is not None


def test_who_was_alone_for_longer_than_the_dead_are_remembered_finds_back() -> None:
    """memberlist #222: the isolated node thinks that it is alone until it is restarted."""
    cluster = settled(3)
    cluster.network.partition({0}, {1, 2})
    cluster.run(60.0)
    alone = cluster.peers[0]
    for peer in cluster.peers:
        for state in peer.gossip.membership.states():
            if not state.alive:
                state.status_since -= 25 * 3600.0
    cluster.run(2.0)
    assert [state.peer_id for state in alone.gossip.membership.states()] == [alone.peer_id]
    cluster.run(100.0)
    cluster.network.heal()
    assert cluster.run_until(all_see(cluster), 60.0) is not None


@pytest.mark.parametrize(("count", "some"), [(8, {0, 1, 2, 3}), (8, {0})])
def test_a_split_heals_without_any_seed(count: int, some: set[int]) -> None:
    cluster = settled(count)
    cluster.network.partition(some, set(range(count)) - some)
    cluster.run(75.0)
    assert len(cluster.peers[0].gossip.membership.live()) == len(some)
    cluster.network.heal()
    took = present(cluster.run_until(all_see(cluster), 30.0, 0.1))
    assert took <= 5.0


def test_who_missed_a_refutation_hears_of_it_in_the_next_exchange() -> None:
    cluster = settled(24)
    for holder, victim in ((0, 1), (5, 9), (20, 3)):
        view = cluster.peers[holder].gossip.membership
        state = present(view.get(cluster.peers[victim].peer_id))
        before = state.incarnation
        accused = Claim(state.peer_id, before, int(Status.SUSPECT), 7)
        cluster.peers[victim].gossip.membership.observe_claims([accused], 0.0)
        cluster.run(3.0)
        state.incarnation = accused.incarnation  # as if the refutation had not come
        inform_of_death(view, state.peer_id, cluster.peers[holder].now)
        assert state.incarnation == before
        assert cluster.run_until(lambda s=state: s.alive, 3.5) is not None  # type: ignore[misc]
