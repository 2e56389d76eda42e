"""Fixtures of several modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.runtime import flow
from tests.contract.sides import DRIVERS, Side
from tests.contract.small_peer import SmallPeer, small_peer
from tests.contract.worlds import WORLDS, Cluster, Store, open_cluster


@pytest.fixture(params=DRIVERS)
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param, DRIVERS[request.param]())


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """Holders on a busy machine may take their time to begin with an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "MIN_SOON_SECONDS", 60.0)
        yield


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[SmallPeer]:
    with small_peer(tmp_path / "peer.sock") as running:
        yield running


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[SwarmRun]:
    """All runs of swarms that the test begins."""
    found: list[SwarmRun] = []
    init = SwarmRun.__init__

    def noted(self: SwarmRun, *arguments: object, **more: object) -> None:
        found.append(self)
        init(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SwarmRun, "__init__", noted)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster() as running:
        yield running


@pytest.fixture(params=WORLDS)
def store(request: pytest.FixtureRequest, cluster: Cluster) -> Store:
    return cluster.stores[request.param]
