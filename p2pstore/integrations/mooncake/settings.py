"""What `setup` is told, as settings of a peer."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from p2pstore.config import split_address
from p2pstore.errors import ConfigError
from p2pstore.objects import DEFAULT_NAMESPACE

DEFAULT_SEGMENT_BYTES: Final = 16 * 1024 * 1024
LEAST_SEGMENT_BYTES: Final = 1024 * 1024
NAMESPACE_VARIABLE: Final = "MOONCAKE_P2P_NAMESPACE"

_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class SetupSettings:
    """What a store is to be. `bootstrap` are addresses that may be peers'; `ignored` is what was said of a metadata
    server or master and cannot be the address of a peer."""

    host: str
    segment_bytes: int
    local_buffer_bytes: int = DEFAULT_SEGMENT_BYTES
    namespace: str = DEFAULT_NAMESPACE
    bootstrap: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    socket: str | None = None
    rdma_devices: tuple[str, ...] = ()
    ssd_path: str = ""
    http_port: int | None = None


def size_in_bytes(value: Any, name: str) -> int:
    """A number of bytes, or text such as `16MB`, `4gb`, `1024` (1024 bytes to a KB, as Mooncake has it). Raises
    `ConfigError`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return int(float(match[1]) * _FACTORS[match[2].lower()])
    raise ConfigError(f"{name}: {value!r} is no size; give bytes, or text such as '512MB'")


def yes_or_no(value: Any, name: str) -> bool:
    """A truth value, or text for one. Raises `ConfigError`."""
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{name}: {value!r} is neither true nor false")


def from_arguments(values: Mapping[str, Any], environment: Mapping[str, str]) -> SetupSettings:
    """The settings of a call, by its parameters' names. Raises `ConfigError` naming what is wrong."""
    tenant = str(values.get("tenant_id") or DEFAULT_NAMESPACE)
    bootstrap, ignored = _peers(
        [
            values.get("metadata_server"),
            values.get("master_server_addr"),
            values.get("master_server_address"),
        ]
    )
    segment = size_in_bytes(
        values.get("global_segment_size", DEFAULT_SEGMENT_BYTES), "global_segment_size"
    )
    buffers = size_in_bytes(
        values.get("local_buffer_size", DEFAULT_SEGMENT_BYTES), "local_buffer_size"
    )
    offload = yes_or_no(values.get("enable_ssd_offload", False), "enable_ssd_offload")
    ssd_path = str(
        values.get("ssd_offload_path") or environment.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "")
    )
    if offload and not ssd_path:
        raise ConfigError("enable_ssd_offload: say where with ssd_offload_path")
    serves_http = yes_or_no(
        values.get("enable_client_http_server", False), "enable_client_http_server"
    )
    with_rdma = str(values.get("protocol", "tcp")).lower() == "rdma"
    devices = [each.strip() for each in str(values.get("rdma_devices") or "").split(",")]
    return SetupSettings(
        host=str(values.get("local_hostname") or "localhost"),
        segment_bytes=max(segment, LEAST_SEGMENT_BYTES) if segment else 0,
        local_buffer_bytes=buffers,
        namespace=str(values.get("namespace") or environment.get(NAMESPACE_VARIABLE) or tenant),
        bootstrap=bootstrap,
        ignored=ignored,
        socket=str(values["socket"]) if values.get("socket") else None,
        rdma_devices=tuple(
            each for each in devices if each and with_rdma and each != "auto-discovery"
        ),
        ssd_path=ssd_path if offload else "",
        http_port=int(values.get("client_http_port", 9300)) if serves_http else None,
    )


def _peers(named: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of what was said of a metadata server and a master: what may be peers' addresses, and what cannot."""
    bootstrap, ignored = [], []
    for text in dict.fromkeys(str(each).strip() for each in named if each):
        try:
            if "://" in text or "," in text:
                raise ConfigError(text)
            split_address(text, "master_server_addr")
        except ConfigError:
            ignored.append(text)
        else:
            bootstrap.append(text)
    return tuple(bootstrap), tuple(ignored)


def takes_over(settings: SetupSettings, environment: Mapping[str, str]) -> str | None:
    """The address of those named that this machine has and nobody listens at: a peer that does so is found by all
    who are told of it. Without a cluster key only loopback counts."""
    if any(
        environment.get(f"MOONCAKE_P2P_{name}") for name in ("LISTEN", "INTERFACE", "BOOTSTRAP")
    ):
        return None
    for address in settings.bootstrap:
        host, port = split_address(address, "master_server_addr")
        if (_is_loopback(host) or _has_key(environment)) and _can_be_taken(host, port):
            return address
    return None


def _can_be_taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def peer_options(
    settings: SetupSettings, environment: Mapping[str, str], *, listen: str | None = None
) -> list[str]:
    """Options of `mooncake-p2p join` for a peer of the store's own; what the environment says of a peer comes first,
    but for how much memory it offers. `listen`: one of the named addresses, which it takes itself."""
    options = ["--memory", str(settings.segment_bytes), "--drain-timeout", "5"]
    if listen is not None:
        options += ["--listen", listen]
    elif not environment.get("MOONCAKE_P2P_LISTEN") and not environment.get(
        "MOONCAKE_P2P_INTERFACE"
    ):
        host = settings.host
        if not _is_address(host):
            host = host.rpartition(":")[0] or host
        host = host.strip("[]")
        if not _has_key(environment) or _is_loopback(host):
            options += ["--listen", "127.0.0.1:0"]
        elif _is_address(host):
            options += ["--listen", f"[{host}]:0" if ":" in host else f"{host}:0"]
    others = [address for address in settings.bootstrap if address != listen]
    if not environment.get("MOONCAKE_P2P_BOOTSTRAP"):
        for address in others:
            options += ["--bootstrap", address]
    if others and not environment.get("MOONCAKE_P2P_JOIN_TIMEOUT"):
        options += ["--join-timeout", "2"]
    for device in settings.rdma_devices:
        options += ["--rdma-device", device]
    if settings.ssd_path:
        options += ["--ssd", settings.ssd_path]
    if settings.http_port is not None:
        options += ["--metrics", f"127.0.0.1:{settings.http_port}"]
    return options


def _has_key(environment: Mapping[str, str]) -> bool:
    """Whether a peer that is started may serve a network."""
    return any(
        environment.get(f"MOONCAKE_P2P_{name}")
        for name in ("CLUSTER_KEY_FILE", "INSECURE", "INVITE", "CONFIG")
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host in ("", "localhost") or (
        _is_address(host) and ipaddress.ip_address(host).is_loopback
    )
