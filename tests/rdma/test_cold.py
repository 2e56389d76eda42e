"""A peer that may use nothing but RDMA reads what is on another peer's SSD alone."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

import pytest

from p2pstore.peer import ssd_opening as ssd
from p2pstore.ssd_tier.disk import open_disk
from tests.cluster.processes import PeerProcess, ProcessCluster
from tests.rdma.forked import load
from tests.rdma.test_cluster import SECONDS, START_SECONDS, lease, objects_by, start
from tests.waiting import eventually

COLD = Random(6).randbytes(300_000)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    """p0 with an SSD, p1 with RDMA alone. The machine's files are in memory, where there is no direct I/O."""
    load()
    monkeypatch.setattr(ssd, "open_disk", partial(open_disk, direct=False))
    cluster = ProcessCluster(tmp_path, 2, None, "64MiB")
    (tmp_path / "ssd").mkdir()
    with closing(cluster):
        for peer, transport in zip(cluster.peers, ("auto", "rdma"), strict=True):
            cold = ["--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "256MiB"]
            start(cluster, peer, transport, *([] if transport == "rdma" else cold))
        for peer in cluster.peers:
            peer.wait_until_ready(START_SECONDS)
        cluster.wait_until_whole()
        yield cluster


def tiers(peer: PeerProcess) -> list[str]:
    return [each.tier for each in peer.client.locate("cold")]


def test_what_is_on_an_ssd_alone_is_brought_to_memory_and_read_there(cluster: ProcessCluster) -> None:
    owner, reader = cluster.peers
    owner.client.put("cold", COLD, durable=True)
    for number in range(600):  # of its size, so that it makes room for one of them
        owner.client.put(f"filler-{number}", COLD)
        if number % 20 == 0 and tiers(owner) == ["ssd"]:
            break
    assert tiers(owner) == ["ssd"]
    eventually(lambda: tiers(reader) == ["ssd"], SECONDS)
    before = objects_by(reader, "rdma")
    assert lease(reader, "cold") == COLD
    assert objects_by(reader, "rdma") == before + 1
