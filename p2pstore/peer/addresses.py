"""Which addresses a peer listens on and tells others."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path

from p2pstore.config import (
    DEFAULT_CONTROL_PORT,
    PeerConfig,
    is_wildcard,
    join_address,
    split_address,
)
from p2pstore.errors import ConfigError


def host_identity() -> bytes:
    """16 bytes that processes of one running machine share: a hash of the kernel's boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(boot_id.encode(), digest_size=16, person=b"p2pstore.host.1").digest()


def control_listen_address(config: PeerConfig) -> tuple[str, int]:
    """(host, port) for the control listener: as configured, else the default port on loopback, else any."""
    if config.listen is not None:
        return split_address(config.listen, "listen")
    host = "127.0.0.1"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, DEFAULT_CONTROL_PORT))
        except OSError:
            return host, 0
    return host, DEFAULT_CONTROL_PORT


def data_listen_addresses(config: PeerConfig, control_host: str) -> list[str]:
    """Where data connections are accepted: as configured, else any port on the control host."""
    return config.data_listen or [join_address(control_host, 0)]


def advertised(
    listening: Sequence[tuple[str, int]],
    configured: Sequence[str],
    bootstrap: Sequence[str],
    setting: str,
) -> list[str]:
    """The addresses to tell others: `configured` (a missing port is the listener's), else the listeners'
    own, where `0.0.0.0` stands for the source address of the route to a bootstrap peer.

    Raises `ConfigError` with the candidates when that is ambiguous.
    """
    if configured:
        result = []
        for index, address in enumerate(configured):
            port = listening[min(index, len(listening) - 1)][1]
            host, given = split_address(address, setting, default_port=port)
            result.append(join_address(host, given or port))
        return result
    result = []
    for host, port in listening:
        if is_wildcard(host):
            host = route_source(bootstrap, setting)
        result.append(join_address(host, port))
    return result


def route_source(bootstrap: Sequence[str], setting: str) -> str:
    """The address this machine uses towards the bootstrap peers."""
    sources = set()
    for address in bootstrap:
        host, port = split_address(address, "bootstrap")
        try:
            resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, target in resolved:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(target)  # a datagram socket: chooses a route, sends nothing
                except OSError:
                    continue
                sources.add(probe.getsockname()[0])
    if len(sources) == 1:
        return str(sources.pop())
    candidates = ", ".join(sorted(sources or own_addresses())) or "none found"
    raise ConfigError(
        f"{setting}: this peer listens on every interface and it is not clear which address others should "
        f"use; say it with --{setting.replace('_', '-')} (candidates: {candidates})"
    )


def own_addresses() -> set[str]:
    """Addresses that this host's name resolves to, loopback left out."""
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in resolved if not str(entry[4][0]).startswith("127.")}
