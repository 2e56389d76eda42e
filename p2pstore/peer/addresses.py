"""Which addresses a peer listens on and tells others."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from p2pstore.config import (
    DEFAULT_CONTROL_PORT,
    PeerConfig,
    is_loopback,
    is_wildcard,
    join_address,
    split_address,
)
from p2pstore.errors import ConfigError

logger = logging.getLogger("p2pstore.peer")

SIOCGIFADDR: Final = 0x8915
_INTERFACE_REQUEST: Final = struct.Struct("16s H 2x 4s 16x")  # ifreq with a sockaddr_in


@cache
def host_identity() -> bytes:
    """16 bytes that processes of one running machine share: a hash of the kernel's boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(boot_id.encode(), digest_size=16, person=b"p2pstore.host.1").digest()


def control_listen_address(config: PeerConfig) -> tuple[str, int]:
    """(host, port) for the control listener: as configured, else the default port on loopback, else any."""
    host, port = _control_listen_address(config)
    if is_loopback(host) and not config.advertise:
        _warn_of_distant_peers(config)
    return host, port


def _warn_of_distant_peers(config: PeerConfig) -> None:
    """Tell who listens on loopback and joins another machine: that one can never call back."""
    for address in config.bootstrap:
        host, _ = split_address(address, "bootstrap")
        if not is_loopback(host) and host != socket.gethostname():
            key = "" if config.cluster_key_file else " and a cluster key"
            logger.warning(
                "this peer listens on loopback only, where other machines such as %s cannot reach it: give "
                "--listen 0.0.0.0:%d%s",
                address,
                DEFAULT_CONTROL_PORT,
                key,
            )
            return


def _control_listen_address(config: PeerConfig) -> tuple[str, int]:
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
    own, where `0.0.0.0` stands for the source address of the route to a bootstrap peer, or without any for
    the only address of this machine.

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
            host = route_source(bootstrap, setting, host)
        result.append(join_address(host, port))
    return result


def route_source(bootstrap: Sequence[str], setting: str, wildcard: str = "0.0.0.0") -> str:
    """The address this machine uses towards the bootstrap peers; its only one when they do not tell.

    A bootstrap peer on this machine (its own name, for the first peer of a cluster) does not tell how
    others reach it, unless it was given as a loopback address.
    """
    ipv4_only = ipaddress.ip_address(wildcard).version == 4
    sources = set()
    for address in bootstrap:
        host, port = split_address(address, "bootstrap")
        for source in _sources_towards(host, port):
            if (is_loopback(host) or not is_loopback(source)) and not (ipv4_only and ":" in source):
                sources.add(source)
    candidates = sources or {each for each in own_addresses() if not (ipv4_only and ":" in each)}
    if len(candidates) == 1:
        return candidates.pop()
    raise ConfigError(
        f"{setting}: this peer listens on every interface and it is not clear which address others should "
        f"use; say it with --{setting.replace('_', '-')} (candidates: "
        f"{', '.join(sorted(candidates)) or 'none found'})"
    )


def _sources_towards(host: str, port: int) -> Iterator[str]:
    """The source addresses of the routes to a host."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, target in resolved:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # a datagram socket: chooses a route, sends nothing
                yield str(probe.getsockname()[0])
        except OSError:
            continue


def own_addresses() -> set[str]:
    """IPv4 and global IPv6 addresses of this machine's interfaces, loopback left out."""
    found = {*_own_ipv4(), *_own_ipv6()}
    return {address for address in found if not is_loopback(address)}


def _own_ipv4() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _INTERFACE_REQUEST.pack(name.encode(), socket.AF_INET, bytes(4))
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            yield socket.inet_ntop(socket.AF_INET, _INTERFACE_REQUEST.unpack(answer)[2])


def _own_ipv6() -> Iterator[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6 here
        return
    for line in lines:
        address, _, _, scope = line.split()[:4]
        if scope == "00":  # global
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
