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

DISCARD_PORT: Final = 9
ANSWER_SECONDS: Final = 0.005
"""A neighbour answers within a millisecond."""


def interface_of(device: str, port: int, gid_index: int) -> str:
    """The network interface under an address of an RDMA device; nothing where there is none (InfiniBand)."""
    path = Path(f"/sys/class/infiniband/{device}/ports/{port}/gid_attrs/ndevs/{gid_index}")
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
