"""Which RDMA devices a peer tries, and what it says where there is none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError, Unavailable
from p2pstore.memory.mapped.mapped_memory import create_memory
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.rdma import rdma_serving as peer_rdma
from p2pstore.transfer.rdma.rdma_serving import device_names, near_memory
from p2pstore.transfer.rdma.rdma_topology import Choice
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from tests.commands import ran


def names(folder: Path, **settings: Any) -> list[str]:
    return list(device_names(PeerConfig(**settings), folder))


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("mlx5_10", "mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_machine_without_devices(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert names(folder) == []
        assert names(folder, transport="tcp") == []
        with pytest.raises(ConfigError, match="transport: rdma needs an RDMA device"):
            names(folder, transport="rdma")
        with pytest.raises(ConfigError, match=r"rdma_device: .* no RDMA device x; it has none"):
            names(folder, rdma_device=["x"])


def test_a_machine_with_devices(devices: Path) -> None:
    assert names(devices) == names(devices, transport="rdma") == ["mlx5_0", "mlx5_1", "mlx5_10"]
    assert names(devices, transport="shm") == names(devices, transport="tcp") == []
    assert names(devices, rdma_device=["mlx5_1"]) == ["mlx5_1"]
    assert names(devices, rdma_device=["mlx5_1", "mlx5_0", "mlx5_1"]) == ["mlx5_1", "mlx5_0"]
    with pytest.raises(ConfigError, match="it has mlx5_0, mlx5_1, mlx5_10"):
        names(devices, rdma_device=["mlx5_1", "mlx5_2"])


def test_devices_near_the_memory() -> None:
    matrix = {"cpu:0": Choice(("a", "b"), ("c",)), "cpu:1": Choice((), ("c",))}
    assert near_memory(matrix, "cpu:0", ["c", "b", "a"]) == Choice(("a", "b"), ("c",))
    assert near_memory(matrix, "cpu:0", ["c"]) == Choice(("c",))
    assert near_memory(matrix, "cpu:2", ["b", "a"]) == Choice(("b", "a"))
    with pytest.raises(Unavailable, match=r"for cpu:1, .* none of .* may be used: a, b"):
        near_memory(matrix, "cpu:1", ["a", "b"])


async def test_a_topology_for_a_machine_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rdma, "device_names", lambda config: [])
    config = PeerConfig(rdma_topology='{"cpu:0": [["nope0"], []]}')
    memory = create_memory(4096, "test")
    with pytest.raises(ConfigError, match="rdma_topology: cpu:0 names nope0"):
        async with peer_rdma.open_rdma(
            config, memory.view, ConnectionPool(TrioDriver()), trio.lowlevel.checkpoint
        ):
            raise AssertionError
    memory.close()


STARTING = """
import sys
from pathlib import Path
import trio
import p2pstore
import p2pstore.transfer.rdma.rdma_serving as rdma
rdma.device_names.__defaults__ = (Path("/nowhere"),)
async def main():
    async with p2pstore.open_peer(p2pstore.PeerConfig(memory="1MiB", name="a")) as peer:
        assert peer.node.routes.transports[-1].name == "tcp"
trio.run(main)
print("pyverbs" in sys.modules)
"""


def test_pyverbs_is_not_imported_without_a_device(tmp_path: Path) -> None:
    done = ran(
        [sys.executable, "-c", STARTING],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "False\n", done.stderr
