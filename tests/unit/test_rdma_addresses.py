"""Addresses and ports of RDMA devices, as the system reports them."""

import ipaddress
from pathlib import Path

import pytest

from p2pstore.transfer.rdma import rdma_addresses
from p2pstore.transfer.rdma.rdma_addresses import (
    interface_of,
    network_bits,
    port_bytes_per_second,
    port_is_active,
)

LOOPBACK = ipaddress.IPv6Address("::ffff:127.0.0.1").packed


def test_the_network_of_an_address() -> None:
    assert network_bits("lo", LOOPBACK) == 96 + 8
    assert network_bits("nope", LOOPBACK) is None
    assert network_bits("lo", ipaddress.IPv6Address("2001:db8::1").packed) is None


def test_a_device_that_is_not_there() -> None:
    assert interface_of("nope", 1, 0) == ""
    assert not port_is_active("nope", 1)
    assert port_bytes_per_second("nope", 1) == 0.0


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("100 Gb/sec (4X EDR)\n", 12.5e9), ("2.5 Gb/sec (1X SDR)\n", 0.3125e9), ("", 0.0), ("fast\n", 0.0)],
)
def test_what_a_link_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, bytes_per_second: float
) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text(text)
    monkeypatch.setattr(rdma_addresses, "DEVICES", tmp_path)
    assert port_bytes_per_second("mlx5_0", 1) == bytes_per_second
