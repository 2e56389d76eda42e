"""Ten real peers that are killed, stopped, split and restarted, and what the others make of it.

How soon things happen is measured by `scripts/bench_gossip`: the deadlines here are for busy machines. The
tests share one cluster, and each leaves it whole.
"""

import time
from collections import deque
from collections.abc import Iterator

import pytest

from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster, sees
from tests.waiting import eventually

PEERS = 10
BY_TCP = ("--transport", "tcp")
"""So that a read meets the connection of a peer that was killed, and not its memory, which outlives it."""
DETECTION_SECONDS = 60.0
VISIBLE_SECONDS = 20.0
WAKE_UPS_PER_SECOND = 30
"""Of an idle peer, for which 15 are enough: a timer of 50 ms more, or exchanges that never slow down, show."""
IDLE_SECONDS = 2.0
CPU_PERCENT = 3.0
"""Of a core, for one idle peer; 1 % is usual."""


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[ProcessCluster]:
    with new_cluster(PEERS) as cluster:
        cluster.start_first(*BY_TCP)
        yield cluster


@pytest.fixture
def cluster(whole_cluster: ProcessCluster) -> ProcessCluster:
    """The cluster, whole: also when a test that failed left it otherwise."""
    whole_cluster.start([peer for peer in whole_cluster.peers if not peer.running], *BY_TCP)
    whole_cluster.wait_until_whole()
    return whole_cluster


def all_but(cluster: ProcessCluster, *gone: PeerProcess) -> list[PeerProcess]:
    return [peer for peer in cluster.peers if peer not in gone]


def is_held(reader: PeerProcess, keys: list[str], *holders: PeerProcess) -> bool:
    """Whether these and no others have each of the keys, as a peer knows."""
    wanted = {holder.name for holder in holders}
    return all({place.peer for place in reader.client.locate(key)} == wanted for key in keys)


def test_a_location_is_visible_everywhere_and_so_is_its_removal(cluster: ProcessCluster) -> None:
    keys = [f"seen-{peer.name}" for peer in cluster.peers]
    for key, peer in zip(keys, cluster.peers, strict=True):
        peer.client.put(key, key.encode())
    eventually(lambda: all(all(p.client.contains_many(keys)) for p in cluster.peers), VISIBLE_SECONDS)
    assert cluster.peers[0].get(keys[-1]) == keys[-1].encode()
    cluster.peers[4].client.remove_many(keys)
    eventually(
        lambda: not any(any(p.client.contains_many(keys)) for p in cluster.peers), VISIBLE_SECONDS
    )


def test_idle_peers_sleep(cluster: ProcessCluster) -> None:
    """Over some seconds: the news of what was before is still on its way at first."""
    readings: deque[tuple[float, int, float]] = deque()

    def is_idle() -> bool:
        wake_ups = sum(peer.wake_ups() for peer in cluster.peers)
        readings.append((time.monotonic(), wake_ups, cpu_seconds(cluster)))
        (began, wake_ups_before, seconds_before), (now, wake_ups, seconds) = (readings[0], readings[-1])
        if now - began < IDLE_SECONDS:
            return False
        readings.popleft()
        of_all = PEERS * (now - began)
        return (wake_ups - wake_ups_before) / of_all < WAKE_UPS_PER_SECOND and (
            100 * (seconds - seconds_before) / of_all < CPU_PERCENT
        )

    eventually(is_idle, 45)


def cpu_seconds(cluster: ProcessCluster) -> float:
    return sum(peer.cpu_seconds() for peer in cluster.peers)


def test_readers_do_not_wait_for_the_verdict_on_a_killed_holder(cluster: ProcessCluster) -> None:
    reader, other, killed = cluster.peers[0], cluster.peers[1], cluster.peers[9]
    both = [f"both-{number}" for number in range(20)]
    killed.client.put_many([(key, b"value") for key in [*both, "lost"]])
    for key in both:
        other.client.take_lease(key, wait=VISIBLE_SECONDS, here=True)  # a copy stays there
    eventually(lambda: is_held(reader, both, other, killed), VISIBLE_SECONDS)
    eventually(lambda: is_held(reader, ["lost"], killed), VISIBLE_SECONDS)
    while not failures_and_objects(reader, killed)[1]:  # there is a connection to break
        reader.get(both[0])
    failed_before = failures_and_objects(reader, killed)[0]

    killed.kill()
    began = time.monotonic()
    assert [reader.get(key) for key in both] == [b"value"] * len(both)
    seconds = time.monotonic() - began
    assert reader.view()[killed.name] in ("alive", "suspect"), f"{seconds:.1f} s: too slow to tell"
    # Each read would try it first by a chance of one half; whom a connection failed to is asked last.
    assert failures_and_objects(reader, killed)[0] - failed_before <= 3

    others = all_but(cluster, killed)
    eventually(lambda: sees(others, {killed.name: "dead"}), DETECTION_SECONDS)
    assert not any(peer.client.contains("lost") for peer in others)
    killed.start(*BY_TCP)  # it finds the others by its address book
    killed.wait_until_ready()
    cluster.wait_until_whole()
    assert not any(peer.client.contains("lost") for peer in cluster.peers)


def failures_and_objects(reader: PeerProcess, holder: PeerProcess) -> tuple[int, int]:
    """Of reads by TCP from the holder."""
    [member] = [each for each in reader.client.peers(everyone=True) if each.name == holder.name]
    counts = member.transports.get("tcp", {})
    return counts.get("failures", 0), counts.get("objects", 0)


def test_a_stopped_peer_is_missed_and_accuses_nobody_when_it_goes_on(cluster: ProcessCluster) -> None:
    stopped = cluster.peers[8]
    others = all_but(cluster, stopped)
    stopped.client.put("held", b"value")
    eventually(lambda: all(peer.client.contains("held") for peer in others), VISIBLE_SECONDS)
    log_sizes = [peer.log_size() for peer in cluster.peers]
    with stopped.stopped():
        eventually(lambda: sees(others, {stopped.name: "dead"}), DETECTION_SECONDS)
        assert not any(peer.client.contains("held") for peer in others)
    cluster.wait_until_whole()
    eventually(lambda: all(peer.client.contains("held") for peer in others), VISIBLE_SECONDS)
    for peer, size in zip(cluster.peers, log_sizes, strict=True):
        verdicts = [line for line in peer.logged(" is dead", size) if stopped.name not in line]
        assert not verdicts, f"{peer.name} gave up somebody who was there"


def test_all_are_killed_and_started_again_at_once(cluster: ProcessCluster) -> None:
    """No peer is told where the others are: that is in their state directories."""
    cluster.peers[3].client.put("gone", b"value")
    eventually(lambda: all(peer.client.contains("gone") for peer in cluster.peers), VISIBLE_SECONDS)
    identities = [peer.ready["peer_id"] for peer in cluster.peers]
    for peer in cluster.peers:
        peer.kill()
    cluster.start(cluster.peers, *BY_TCP)
    cluster.wait_until_whole()
    assert [peer.ready["peer_id"] for peer in cluster.peers] == identities
    assert not any(peer.client.contains("gone") for peer in cluster.peers)
    cluster.peers[3].client.put("gone", b"again")
    eventually(lambda: all(peer.client.contains("gone") for peer in cluster.peers), VISIBLE_SECONDS)


def test_a_split_cluster_works_in_halves_and_heals(cluster: ProcessCluster) -> None:
    """No peer was given a bootstrap peer: since the test above all were started without."""
    if not cluster.can_split:
        pytest.skip("network namespaces cannot be made here")
    left, right = cluster.half(0), cluster.half(1)
    with cluster.split():
        eventually(
            lambda: (
                sees(left, dict.fromkeys((p.name for p in right), "dead"))
                and sees(right, dict.fromkeys((p.name for p in left), "dead"))
            ),
            DETECTION_SECONDS,
        )
        for half, key in ((left, "from-left"), (right, "from-right")):
            half[0].client.put(key, key.encode())
            eventually(lambda key=key, half=half: half[-1].client.contains(key), VISIBLE_SECONDS)  # type: ignore[misc]
        assert not left[0].client.contains("from-right")
    cluster.wait_until_whole()
    keys = ["from-left", "from-right"]
    eventually(lambda: all(all(p.client.contains_many(keys)) for p in cluster.peers), VISIBLE_SECONDS)
    assert left[-1].get("from-right") == b"from-right"
    assert right[-1].get("from-left") == b"from-left"
