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

DISCARD_PORT: Final = 9
_ACTIVE: Final = "4:"
_MAPPED_BITS: Final = 96
"""Before the IPv4 address in the GID that maps it."""
ANSWER_SECONDS: Final = 0.005
"""A neighbour answers within a millisecond."""


def interface_of(device: str, port: int, gid_index: int) -> str:
    """The network interface under an address of an RDMA device; nothing where there is none (InfiniBand)."""
    path = Path(f"/sys/class/infiniband/{device}/ports/{port}/gid_attrs/ndevs/{gid_index}")
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def port_is_active(device: str, port: int) -> bool:
    """Whether a port's link is up; not for a device that is gone."""
    try:
        state = Path(f"/sys/class/infiniband/{device}/ports/{port}/state").read_text()
    except OSError:
        return False
    return state.startswith(_ACTIVE)


def network_bits(interface: str, gid: bytes) -> int | None:
    """How many leading bits of a RoCE address name its network; None where no interface has that address."""
    address = ipaddress.IPv6Address(gid)
    wanted = str(address.ipv4_mapped or address)
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips if adapter.name == interface else []:
            if (each.ip if each.is_IPv4 else each.ip[0]) == wanted:
                return int(each.network_prefix) + (_MAPPED_BITS if each.is_IPv4 else 0)
    return None


async def wake_neighbour(
    interface: str, gid: bytes, sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Send one datagram, which nobody reads, to a RoCE address through that interface, and wait a moment.
    Does nothing for addresses of other kinds."""
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    if address is None or not interface:
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock, contextlib.suppress(OSError):  # no way there: connecting will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.sendto(b"\0", (str(address), DISCARD_PORT))
    await sleep(ANSWER_SECONDS)
