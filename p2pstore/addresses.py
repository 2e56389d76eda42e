"""Addresses: `HOST:PORT`, read and checked. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from p2pstore.errors import ConfigError

DEFAULT_CONTROL_PORT: Final = 17946


_PORT: Final = re.compile(r"[0-9]{1,5}")
MAX_HOST_LENGTH: Final = 253
_LABEL: Final = re.compile(r"(?!-)[\w-]{1,63}(?<!-)")
"""One part of a host's name, between dots."""
_SCOPE: Final = re.compile(r"[\w.-]{1,32}")
"""The interface behind the `%` of an IPv6 address."""


def on_loopback(address: str) -> str:
    """`HOST:PORT`; a port alone is one of 127.0.0.1."""
    port = address.removeprefix(":")
    return f"127.0.0.1:{port}" if _PORT.fullmatch(port) else address


def split_address(address: str, setting: str, default_port: int | None = None) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `[v6]:PORT`; the port may be missing where there is a default. The host is an IP
    address or can be a name. Raises `ConfigError` naming the setting."""
    if "://" in address:
        raise ConfigError(
            f"{setting}: {address!r} is a URL; write HOST:PORT alone, such as 10.0.0.1:17946"
        )
    if "," in address or ";" in address:
        raise ConfigError(f"{setting}: {address!r} is more than one address; write one HOST:PORT")
    host, colon, port_text = address.rpartition(":")
    if (not colon and default_port is not None) or (address.endswith("]") and default_port is not None):
        host, port_text = address, str(default_port)
    in_brackets = host.startswith("[") and host.endswith("]")
    if in_brackets:
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            f"{setting}: write an IPv6 address in brackets, such as [::1]:17946, not {address!r}"
        )
    if not host or not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        raise ConfigError(f"{setting}: {address!r} is not HOST:PORT, such as 10.0.0.1:17946")
    if not (is_ip_address(host) or (not in_brackets and _is_host_name(host))):
        raise ConfigError(f"{setting}: {host!r} is neither an IP address nor the name of a host")
    return host, int(port_text)


def split_peer_address(address: str, setting: str) -> tuple[str, int]:
    """`split_address` of where a running peer is to be found: it can be connected to. Raises `ConfigError`."""
    host, port = split_address(address, setting)
    if port == 0:
        raise ConfigError(f"{setting}: {address} has port 0; write the port of a running peer")
    refuse_link_local(host, setting)
    refuse_wildcard(host, setting)
    return host, port


def is_ip_address(host: str) -> bool:
    """Whether it is an IPv4 or IPv6 address, without brackets and port."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    _, percent, scope = host.partition("%")
    return not percent or _SCOPE.fullmatch(scope) is not None


def _is_host_name(host: str) -> bool:
    """Whether a name server may know it. A text of digits and dots alone is meant as an IPv4 address."""
    if len(host) > MAX_HOST_LENGTH or re.fullmatch(r"[0-9.]+", host):
        return False
    return all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets where the host is IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether the address means every interface."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def refuse_link_local(host: str, setting: str) -> None:
    """A link-local IPv6 address means another interface on every machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if address.version == 6 and address.is_link_local:
        raise ConfigError(
            f"{setting}: {host} is a link-local address, which other machines cannot use as it is: give a "
            "global (or unique local, fd..) address of the interface"
        )


def refuse_wildcard(host: str, setting: str) -> None:
    if is_wildcard(host):
        raise ConfigError(f"{setting}: {host} is no address that one can connect to")
