"""What the system says of the addresses and ports of RDMA devices."""

from __future__ import annotations

import ipaddress

from p2pstore.transfer.rdma_addresses import interface_of, network_bits, port_is_active

LOOPBACK = ipaddress.IPv6Address("::ffff:127.0.0.1").packed


def test_the_network_of_an_address() -> None:
    assert network_bits("lo", LOOPBACK) == 96 + 8
    assert network_bits("nope", LOOPBACK) is None
    assert network_bits("lo", ipaddress.IPv6Address("2001:db8::1").packed) is None


def test_a_device_that_is_not_there() -> None:
    assert interface_of("nope", 1, 0) == ""
    assert not port_is_active("nope", 1)
