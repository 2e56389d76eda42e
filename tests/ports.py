"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_PORTS: Final = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port(host: str) -> int:
    """A port that nobody has, and nobody else of this process was given. It is not of the range from which the kernel
    takes ports for connections: one of these would be taken before the server listens, now and then."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no port of {host} is free")
