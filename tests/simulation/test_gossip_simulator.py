"""The gossip simulator itself: costs, clocks, stalls, cuts, connections, and alarms that do go off."""

from collections.abc import Callable
from typing import Any

from p2pstore.gossip.gossip_messages import Status
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_invariants import Watch
from simulation.gossip_peer import GossipPeer
from simulation.gossip_run import key_of
from simulation.gossip_truth import LogTruth
from simulation.measures.figures import record_of
from simulation.network import Faults


def small_cluster(peers: int = 3, seed: int = 1) -> GossipCluster:
    cluster = GossipCluster(seed, peers)
    cluster.boot_all()
    assert cluster.run_until(cluster.agreed, 30.0) is not None
    return cluster


# --- hosts -----------------------------------------------------------------------------------


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


# --- alarms ----------------------------------------------------------------------------------


def test_what_a_log_held_at_each_place() -> None:
    truth = LogTruth()
    truth.note(b"a", b"one")
    truth.note(b"b", b"two")
    truth.note(b"a", b"three")
    truth.note(b"a", None)
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
