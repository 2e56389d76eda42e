"""Whole peers whose wall clock is wrong for a while: what they may do, and how they come back."""

from random import Random

import pytest

from p2pstore.core.operation import PutEnd
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import P2PStoreError, Unavailable
from p2pstore.gossip.checkpoint_records import HeadBody
from p2pstore.objects import clock_from_unix_seconds, key_digest
from p2pstore.put_facts import PutStatus
from simulation.cluster import NAMESPACE, SimulatedCluster
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from simulation.peer import UNIX_START, SimulatedPeer

HOUR = 3600.0
YEAR = 365 * 86_400.0


def make_cluster(peers: int, seed: int = 1, faults: Faults | None = None) -> SimulatedCluster:
    kernel = Kernel(seed)
    return SimulatedCluster(kernel, FaultyNetwork(kernel, faults or Faults()), peers)


def run(cluster: SimulatedCluster, seconds: float) -> None:
    cluster.kernel.run_until(cluster.kernel.now + seconds)


def core_of(peer: SimulatedPeer) -> PeerCore:
    assert peer.core is not None
    return peer.core


def put(
    cluster: SimulatedCluster, peer: SimulatedPeer, key: str, value: bytes, **options: bool | int
) -> PutEnd | P2PStoreError:
    operation = peer.put(key, value, **options)  # type: ignore[arg-type]
    assert operation is not None
    cluster.kernel.run_until(cluster.kernel.now + 30.0, lambda: operation.done)
    result = operation.result
    assert isinstance(result, PutEnd | P2PStoreError)
    return result


def get(cluster: SimulatedCluster, peer: SimulatedPeer, key: str) -> bytes | None:
    found: list[bytes | Exception] = []
    peer.get(key_digest(key, NAMESPACE), found.append)
    cluster.kernel.run_until(cluster.kernel.now + 30.0, lambda: bool(found))
    return found[0] if isinstance(found[0], bytes) else None


def removed(cluster: SimulatedCluster, peer: SimulatedPeer, key: str) -> list[bool] | Exception:
    operation = peer.remove(key)
    cluster.kernel.run_until(cluster.kernel.now + 30.0, lambda: operation.done)
    assert isinstance(operation.result, list | Exception)
    return operation.result


def test_a_peer_whose_clock_was_fast_comes_back_when_it_is_right() -> None:
    cluster = make_cluster(3)
    cluster.boot_all()
    run(cluster, 5.0)
    right, other, wrong = cluster.peers
    assert isinstance(put(cluster, right, "theirs", b"1"), PutEnd)
    wrong.set_clock(HOUR)
    run(cluster, 1.0)
    for refused in (put(cluster, wrong, "new", b"x"), removed(cluster, wrong, "theirs")):
        assert isinstance(refused, Unavailable)
        assert "60 min ahead of the other peers'" in str(refused)
    assert get(cluster, wrong, "theirs") == b"1", "reads go on"
    assert isinstance(put(cluster, right, "fine", b"2"), PutEnd), "one wrong clock stops nobody else"
    assert core_of(right).timekeeping.wrong_peers(cluster.kernel.now)
    wrong.set_clock(0.0)
    run(cluster, 10.0)
    end = put(cluster, wrong, "new", b"x", replicas=2)
    assert isinstance(end, PutEnd)
    assert (end.status, end.copies) == (PutStatus.CREATED, 2)
    assert get(cluster, other, "new") == b"x"
    assert removed(cluster, wrong, "theirs") == [True]
    run(cluster, 2.0)
    assert get(cluster, right, "theirs") is None
    assert not cluster.protocol_errors


@pytest.mark.parametrize("restart", [False, True])
def test_what_a_peer_stamped_while_it_was_alone_with_a_fast_clock(restart: bool) -> None:
    cluster = make_cluster(2)
    alone, other = cluster.peers
    alone.keeps_memory = True
    alone.set_clock(HOUR)
    alone.boot([])
    run(cluster, 5.0)
    for key in ("a", "b", "gone"):
        assert isinstance(put(cluster, alone, key, key.encode()), PutEnd)
    assert removed(cluster, alone, "gone") == [True]
    run(cluster, 1.0)
    other.boot([alone.address])
    run(cluster, 5.0)
    assert isinstance(put(cluster, alone, "c", b"c"), Unavailable)
    assert isinstance(put(cluster, other, "d", b"d"), PutEnd), "nobody has anything of this key"
    unsure = put(cluster, other, "a", b"another")
    assert isinstance(unsure, Unavailable)
    assert "too few to tell whose is wrong" in str(unsure)
    assert isinstance(put(cluster, other, "gone", b"again"), Unavailable)
    if restart:
        alone.stop()
        run(cluster, 2.0)
        alone.set_clock(0.0)
        alone.boot([other.address])
        run(cluster, 120.0)
    else:
        alone.set_clock(0.0)
        run(cluster, 20.0)
    assert not core_of(alone).timekeeping.problem(cluster.kernel.now)
    assert [get(cluster, other, key) for key in ("a", "b", "gone")] == [b"a", b"b", None]
    assert isinstance(put(cluster, alone, "c", b"c", replicas=2), PutEnd)
    assert isinstance(put(cluster, other, "gone", b"again"), PutEnd)
    assert isinstance(put(cluster, other, "a", b"2", overwrite=True), PutEnd)
    run(cluster, 2.0)
    assert [get(cluster, alone, key) for key in ("a", "c", "gone")] == [b"2", b"c", b"again"]
    run(cluster, 5.0)
    assert not cluster.disagreements()


def stored(cluster: SimulatedCluster, peer: SimulatedPeer, key: str) -> None:
    assert isinstance(put(cluster, peer, key, key.encode(), replicas=2, overwrite=True), PutEnd)


def notes_of(peer: SimulatedPeer) -> list[str]:
    return [note.text for note in core_of(peer).notes.take() if note.event == "clock"]


def test_a_saved_clock_that_is_far_ahead_of_everything_stamped_is_dropped() -> None:
    cluster = make_cluster(2)
    cluster.boot_all()
    run(cluster, 5.0)
    first, edited = cluster.peers
    edited.stop()
    for clock in ((1 << 63) - 1, clock_from_unix_seconds(UNIX_START + YEAR), 0):
        edited.disk.state.clock = clock
        edited.boot([first.address])
        notes = notes_of(edited)
        assert [("is dropped" in note) for note in notes] == [True] * (clock > 0)
        run(cluster, 5.0)
        stored(cluster, edited, "key")
        assert get(cluster, first, "key") == b"key"
        edited.stop()
        run(cluster, 2.0)


def test_a_saved_clock_below_what_is_stamped_here_is_raised() -> None:
    cluster = make_cluster(1)
    (peer,) = cluster.peers
    peer.keeps_memory = True
    peer.boot([])
    run(cluster, 1.0)
    peer.set_clock(HOUR)
    run(cluster, 1.0)
    assert isinstance(put(cluster, peer, "key", b"1"), PutEnd)
    peer.stop()
    peer.disk.state.clock = 0
    peer.set_clock(0.0)
    peer.boot([])
    run(cluster, 5.0)
    assert isinstance(put(cluster, peer, "key", b"2", overwrite=True), PutEnd)
    assert get(cluster, peer, "key") == b"2"
    assert core_of(peer).timekeeping.stamps_ahead_seconds(cluster.kernel.now) > HOUR - 60.0


@pytest.mark.parametrize("wrong_by", [HOUR, -HOUR, YEAR])
def test_a_whole_cluster_whose_clocks_are_set_one_after_the_other_loses_nothing(wrong_by: float) -> None:
    cluster = make_cluster(4)
    for peer in cluster.peers:
        peer.set_clock(wrong_by)
    cluster.boot_all()
    run(cluster, 5.0)
    for number in range(6):
        stored(cluster, cluster.peers[number % 4], f"key {number}")
    assert removed(cluster, cluster.peers[0], "key 5") == [True]
    run(cluster, 1.0)
    held = [len(core_of(peer).segment.entries()) for peer in cluster.peers]
    for peer in cluster.peers:
        peer.set_clock(0.0)
        run(cluster, 1.3)
    run(cluster, 20.0)
    assert [len(core_of(peer).segment.entries()) for peer in cluster.peers] == held
    for peer in cluster.peers:
        assert get(cluster, peer, "key 5") is None
        assert all(get(cluster, peer, f"key {number}") for number in range(5))
        stored(cluster, peer, f"after {peer.number}")
    run(cluster, 5.0)
    assert not cluster.disagreements()


def test_a_checkpoint_that_was_published_by_a_fast_clock_gets_a_new_stamp() -> None:
    cluster = make_cluster(2)
    publisher, other = cluster.peers
    publisher.set_clock(HOUR)
    publisher.boot([])
    run(cluster, 5.0)

    def publish(version: bytes) -> None:
        core_of(publisher).checkpoints.publish(
            HeadBody("space", "name", version, 1, 1, 1, 1), cluster.kernel.now
        )

    publish(b"1" * 16)
    core_of(publisher).checkpoints.switch("space", "name", b"1" * 16, cluster.kernel.now)
    other.boot([publisher.address])
    run(cluster, 5.0)
    with pytest.raises(Unavailable, match="ahead of the other peers'"):
        publish(b"2" * 16)
    with pytest.raises(Unavailable):
        core_of(publisher).checkpoints.remove("space", "name", cluster.kernel.now)
    assert not core_of(other).checkpoints.heads()
    publisher.set_clock(0.0)
    run(cluster, 10.0)
    (head,) = core_of(other).checkpoints.heads()
    assert head.version == b"1" * 16
    assert core_of(other).checkpoints.switched(head.digest) is not None
    publish(b"2" * 16)
    run(cluster, 5.0)
    assert [each.version for each in core_of(other).checkpoints.heads()] == [b"2" * 16]


def test_it_is_said_once_that_a_clock_is_wrong_and_once_that_it_is_right() -> None:
    cluster = make_cluster(3)
    cluster.boot_all()
    run(cluster, 5.0)
    right, _, wrong = cluster.peers
    assert not [note for peer in cluster.peers for note in notes_of(peer)]
    wrong.set_clock(HOUR)
    run(cluster, 60.0)
    notes = notes_of(wrong)
    assert len(notes) == 1
    assert "nothing can be written through this peer" in notes[0]
    notes = notes_of(right)
    assert len(notes) == 1
    assert "the clock of sim:2 is 60 min ahead of this machine's" in notes[0]
    wrong.set_clock(0.0)
    run(cluster, 20.0)
    assert "it writes" in notes_of(wrong)[-1]
    assert not notes_of(right)


def test_a_flush_below_what_others_have_is_refused_where_nobody_can_tell_whose_clock_is_wrong() -> None:
    cluster = make_cluster(2)
    ahead, behind = cluster.peers
    ahead.set_clock(HOUR)
    ahead.boot([])
    run(cluster, 2.0)
    assert isinstance(put(cluster, ahead, "key", b"1"), PutEnd)
    behind.boot([ahead.address])
    run(cluster, 5.0)
    flush = behind.flush(NAMESPACE)
    run(cluster, 20.0)
    assert isinstance(flush.result, Unavailable)
    assert get(cluster, ahead, "key") == b"1"
    ahead.set_clock(0.0)
    run(cluster, 10.0)
    flush = behind.flush(NAMESPACE)
    run(cluster, 20.0)
    assert flush.result.told == 1
    assert get(cluster, ahead, "key") is None


class WrongClocks:
    """Peers of which one at a time has a wrong clock, and clients that put, remove and restart."""

    def __init__(self, seed: int, peers: int) -> None:
        self.rng = Random(seed)
        self.cluster = make_cluster(peers, seed)
        self.expected: dict[str, bytes | None] = {}
        self.refused = 0
        for peer in self.cluster.peers:
            peer.keeps_memory = True
        self.cluster.boot_all()
        run(self.cluster, 5.0)

    def go_wrong(self) -> None:
        """One clock is wrong for a while: from a restart on or not, with another restart or not."""
        rng, cluster = self.rng, self.cluster
        wrong = rng.choice(cluster.peers)
        self._set(wrong, rng.choice([12.0, 25.0, -25.0, HOUR, -HOUR, YEAR, -YEAR]))
        self._write(rng.randrange(4))
        self._set(wrong, 0.0)
        self._write(rng.randrange(3))
        run(cluster, rng.uniform(0.5, 20.0))

    def _set(self, peer: SimulatedPeer, skew: float) -> None:
        cluster, restart = self.cluster, self.rng.random() < 0.4
        if restart:
            (peer.stop if self.rng.random() < 0.5 else peer.crash)()
            run(cluster, self.rng.uniform(0.5, 3.0))
        peer.set_clock(skew)
        if restart:
            peer.boot([each.address for each in cluster.peers if each is not peer])
            others = len(cluster.peers) - 1
            cluster.kernel.run_until(
                cluster.kernel.now + 30.0, lambda: len(core_of(peer).live_peers()) == others
            )

    def _write(self, count: int) -> None:
        for _ in range(count):
            peer, key = self.rng.choice(self.cluster.peers), f"key {self.rng.randrange(6)}"
            if self.rng.random() < 0.7:
                value = self.rng.randbytes(20)
                copies = self.rng.choice([1, 1, 2])
                end = put(self.cluster, peer, key, value, overwrite=True, replicas=copies)
                done = isinstance(end, PutEnd)
                if done:
                    self.expected[key] = value
            else:
                gone = removed(self.cluster, peer, key)
                done = isinstance(gone, list)
                if gone == [True]:
                    self.expected[key] = None
            self.refused += not done
            run(self.cluster, self.rng.uniform(0.3, 2.0))

    def check(self) -> None:
        """Writes that were reported as done are done, everywhere, and all can write again."""
        cluster = self.cluster
        run(cluster, 150.0)
        assert not cluster.disagreements()
        for peer in cluster.peers:
            assert not core_of(peer).timekeeping.problem(cluster.kernel.now)
            for key, value in self.expected.items():
                assert get(cluster, peer, key) == value
            stored(cluster, peer, f"after {peer.number}")


@pytest.mark.parametrize(("seed", "peers"), [(0, 3), (2, 2), (3, 4)])
def test_no_write_that_was_reported_as_done_is_lost_by_wrong_clocks(seed: int, peers: int) -> None:
    clocks = WrongClocks(seed, peers)
    for _ in range(6):
        clocks.go_wrong()
    clocks.check()
    assert clocks.refused, "the test has lost its power"
