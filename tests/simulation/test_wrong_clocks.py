"""Whole peers whose wall clock is wrong for a while: what they may do, and how they come back."""

from __future__ import annotations

import pytest

from p2pstore.core.peer_core import PeerCore
from p2pstore.core.put import PutEnd, PutOperation
from p2pstore.errors import P2PStoreError, Unavailable
from p2pstore.local.messages import PutStatus
from p2pstore.objects import key_digest
from p2pstore.simulation.cluster import NAMESPACE, SimulatedCluster
from p2pstore.simulation.kernel import Faults, FaultyNetwork, Kernel
from p2pstore.simulation.peer import SimulatedPeer

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
    assert isinstance(operation, PutOperation)
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
    assert isinstance(put(cluster, right, "fine", b"2"), PutEnd), (
        "one wrong clock stops nobody else"
    )
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
