"""Which RDMA devices a peer tries, and what it says where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.peer.rdma import device_names


def names(folder: Path, **settings: Any) -> list[str]:
    return list(device_names(PeerConfig(**settings), folder))


@pytest.fixture
def two_devices(tmp_path: Path) -> Path:
    for name in ("mlx5_1", "mlx5_0"):
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


def test_a_machine_with_devices(two_devices: Path) -> None:
    assert names(two_devices) == names(two_devices, transport="rdma") == ["mlx5_0", "mlx5_1"]
    assert names(two_devices, transport="shm") == names(two_devices, transport="tcp") == []
    assert names(two_devices, rdma_device=["mlx5_1"]) == ["mlx5_1"]
    with pytest.raises(ConfigError, match="it has mlx5_0, mlx5_1"):
        names(two_devices, rdma_device=["mlx5_1", "mlx5_2"])


STARTING = """
import sys
from pathlib import Path
import trio
import p2pstore
import p2pstore.peer.rdma as rdma
rdma.device_names.__defaults__ = (Path("/nowhere"),)
async def main():
    async with p2pstore.open_peer(p2pstore.PeerConfig(memory="1MiB", name="a")) as peer:
        assert peer.node.transports[-1].name == "tcp"
trio.run(main)
print("pyverbs" in sys.modules)
"""


def test_pyverbs_is_not_imported_without_a_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTING],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr
