"""Having the kernel find the Ethernet address of another machine before a queue pair needs it.

Connecting a queue pair waits for that inside the kernel, a second at the first time, and pyverbs holds the
interpreter lock meanwhile: the whole peer would stand still.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import ifaddr

DEVICES: Final = Path("/sys/class/infiniband")
DISCARD_PORT: Final = 9
_ACTIVE: Final = "4:"
GIGABIT_BYTES: Final = 1e9 / 8
_MAPPED_BITS: Final = 96
"""Before the IPv4 address in the GID that maps it."""
ANSWER_SECONDS: Final = 0.005
"""A neighbour answers within a millisecond."""


def interface_of(device: str, port: int, gid_index: int) -> str:
    """The network interface under an address of an RDMA device; nothing where there is none (InfiniBand)."""
    path = DEVICES / f"{device}/ports/{port}/gid_attrs/ndevs/{gid_index}"
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def port_is_active(device: str, port: int) -> bool:
    """Whether a port's link is up; not for a device that is gone."""
    try:
        state = (DEVICES / f"{device}/ports/{port}/state").read_text()
    except OSError:
        return False
    return state.startswith(_ACTIVE)


def port_bytes_per_second(device: str, port: int) -> float:
    """The rate of a port's link by its own account; 0 where the system does not say."""
    try:
        rate = (DEVICES / f"{device}/ports/{port}/rate").read_text()
        return float(rate.split()[0]) * GIGABIT_BYTES  # such as "100 Gb/sec (4X EDR)"
    except (OSError, ValueError, IndexError):
        return 0.0


def network_bits(interface: str, gid: bytes) -> int | None:
    """How many leading bits of a RoCE address name its network; None where no interface has that address."""
    address = ipaddress.IPv6Address(gid)
    wanted = str(address.ipv4_mapped or address)
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips if adapter.name == interface else []:
            if (each.ip if each.is_IPv4 else each.ip[0]) == wanted:
                return int(each.network_prefix) + (_MAPPED_BITS if each.is_IPv4 else 0)
    return None


async def wake_neighbour(interface: str, gid: bytes, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Send one datagram, to the discard port, to a RoCE address through that interface, and wait a moment.
    Does nothing for addresses of other kinds."""
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    if address is None or not interface:
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock, contextlib.suppress(OSError):  # no way there: connecting will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.sendto(b"\0", (str(address), DISCARD_PORT))
    await sleep(ANSWER_SECONDS)
