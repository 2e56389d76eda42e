"""Which addresses a peer listens on and tells others. Shell: reads interfaces, routes and names."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import ifaddr

from p2pstore.addresses import is_loopback, is_wildcard, join_address, split_address
from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError

logger = logging.getLogger("p2pstore.peer")

LOOPBACK: Final = "127.0.0.1"


# --- listening -------------------------------------------------------------------------------


def control_listen_address(config: PeerConfig) -> tuple[str, int | None]:
    """(host, port) for the control listener: as configured; else on the chosen interface; else, with a
    cluster key, on the address that leads to a bootstrap peer; else on loopback. Port None: the
    default one, else any.

    Raises `ConfigError` with the candidates when the address is not clear, or would be open to strangers.
    """
    if config.listen is not None:
        host, port = split_address(config.listen, "listen")
        _check_own(host)
        if config.interface is not None:
            _addresses_on(config.interface)
        return host, port
    if config.interface is not None:
        host = interface_address(config.interface)
        if not is_loopback(host):
            config.refuse_without_key(f"interface: {host}")
    else:
        host = _host_towards_bootstrap(config)
    return host, None


def _check_own(host: str) -> None:
    """Raise `ConfigError` for an address that no interface of this machine has; a name is not looked up."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"listen: {host}: {error.strerror}; there is {_what_there_is(interface_addresses())}"
            ) from None


def _host_towards_bootstrap(config: PeerConfig) -> str:
    """Where the bootstrap peers can call back; loopback when they are here, or nothing keeps strangers out."""
    distant = [each for each in config.bootstrap if not _is_here(each)]
    if not distant:
        return LOOPBACK
    if not config.cluster_key_file and not config.insecure:
        logger.warning(
            "without a cluster key this peer listens on loopback only, where other machines such as %s cannot "
            "reach it: give --cluster-key-file, or --insecure if the network keeps strangers out",
            distant[0],
        )
        return LOOPBACK
    return route_source(distant, "listen")


def _is_here(bootstrap: str) -> bool:
    """Whether a bootstrap address is this machine's: loopback, or one of its own."""
    host, _ = split_address(bootstrap, "bootstrap")
    if is_loopback(host) or host == socket.gethostname():
        return True
    return host in own_addresses()


def data_listen_addresses(config: PeerConfig, control_host: str) -> list[str]:
    """Where data connections are accepted: as configured, else any port where control listens."""
    return config.data_listen or [join_address(control_host, 0)]


# --- advertising -----------------------------------------------------------------------------


def advertised(
    listening: Sequence[tuple[str, int]], configured: Sequence[str], config: PeerConfig, setting: str
) -> list[str]:
    """The addresses to tell others: `configured` (a missing port is the listener's), else the listeners'
    own, where `0.0.0.0` and `::` stand for the chosen interface, else the host of `advertise`, else the source
    address of the route to a bootstrap peer, or without any for the only address of this machine.

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
        if is_wildcard(host) and config.interface is not None:
            host = interface_address(config.interface)
        elif is_wildcard(host) and config.advertise is not None:  # data, beside a control address
            host, _ = split_address(config.advertise, "advertise", default_port=0)
        elif is_wildcard(host):
            host = route_source(config.bootstrap, setting, host)
        result.append(join_address(host, port))
    return result


def route_source(bootstrap: Sequence[str], setting: str, wildcard: str = "0.0.0.0") -> str:
    """The address this machine uses towards the bootstrap peers, or its only one. A bootstrap peer on this machine
    tells only when given as a loopback address. Raises `ConfigError` with the candidates."""
    ipv4_only = ipaddress.ip_address(wildcard).version == 4 and setting != "listen"
    own = own_addresses()
    sources = set()
    for address in bootstrap:
        host, port = split_address(address, "bootstrap")
        for source in _sources_towards(host, port):
            tells = is_loopback(host) or not is_loopback(source)
            if tells and not (ipv4_only and ":" in source):
                sources.add(source)
    if len(sources) > 1:  # a name with records of both families: IPv4 is what works more often
        sources = {each for each in sources if ":" not in each} or sources
    candidates = sources or {each for each in own if not (ipv4_only and ":" in each)}
    if len(candidates) == 1:
        return candidates.pop()
    option = "--listen HOST:PORT" if setting == "listen" else "--advertise HOST"
    raise ConfigError(
        f"{setting}: it is not clear at which address others should reach this peer; say it with {option} or "
        f"--interface NAME|CIDR (candidates: {', '.join(sorted(candidates)) or 'none found'})"
    )


def _sources_towards(host: str, port: int) -> Iterator[str]:
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


# --- this machine's interfaces ---------------------------------------------------------------


def interface_addresses() -> dict[str, list[str]]:
    """Name -> the interface's addresses, IPv4 before IPv6, link-local IPv6 left out."""
    found: dict[str, list[str]] = {}
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            text = entry.ip if isinstance(entry.ip, str) else entry.ip[0]
            address = ipaddress.ip_address(text)
            if not (address.version == 6 and address.is_link_local):
                found.setdefault(adapter.name, []).append(text)
    return {name: sorted(texts, key=lambda text: ":" in text) for name, texts in found.items()}


def link_bytes_per_second(address: str, root: Path = Path("/sys/class/net")) -> float | None:
    """Speed of the interface with this address; None where the driver does not tell, as for loopback."""
    for name, addresses in interface_addresses().items():
        if address in addresses:
            with contextlib.suppress(OSError, ValueError):  # one that is down has no speed
                megabits = int((root / name / "speed").read_text())
                return megabits * 125_000 if megabits > 0 else None
    return None


def own_addresses() -> set[str]:
    """This machine's addresses; loopback and link-local IPv6 left out."""
    every = (address for addresses in interface_addresses().values() for address in addresses)
    return {address for address in every if not is_loopback(address)}


def interface_address(wanted: str) -> str:
    """The one address of this machine on the interface, or inside the network, called `wanted`; IPv4 before IPv6.
    Raises `ConfigError` listing what there is when there is none, or more than one."""
    candidates = _addresses_on(wanted)
    if len(candidates) == 1:
        return candidates[0]
    raise ConfigError(
        f"interface: {wanted!r} has several addresses ({', '.join(candidates)}): narrow it down to one with "
        f"--interface {candidates[0]}/{128 if ':' in candidates[0] else 32}, or say it with --listen"
    )


def _addresses_on(wanted: str) -> list[str]:
    """This machine's addresses on an interface or in a network: IPv4, else IPv6. Raises `ConfigError`."""
    interfaces = interface_addresses()
    if "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            raise ConfigError(
                f"interface: {wanted!r} is not a network such as 10.0.0.0/16, nor an interface's name"
            ) from None
        every = [address for addresses in interfaces.values() for address in addresses]
        matching = [address for address in every if ipaddress.ip_address(address) in network]
    else:
        matching = interfaces.get(wanted, [])
    if not matching:
        what = "no address of this machine is in" if "/" in wanted else "there is no address on"
        raise ConfigError(f"interface: {what} {wanted!r}; there is {_what_there_is(interfaces)}")
    return [each for each in matching if ":" not in each] or matching


def _what_there_is(interfaces: dict[str, list[str]]) -> str:
    found = [f"{name}: {', '.join(texts)}" for name, texts in sorted(interfaces.items())]
    return "; ".join(found) or "none at all"
