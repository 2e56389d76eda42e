"""Ports for servers that tests start."""

import contextlib
import random
import socket
from typing import Final

_PORTS: Final = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port(host: str) -> int:
    """A free port that was not returned before in this process. It is outside the kernel's range of ephemeral ports:
    now and then a connection would take one of those before the server listens."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no port of {host} is free")
