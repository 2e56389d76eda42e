"""The arguments of `setup` as settings of a peer."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from p2pstore.addresses import (
    is_ip_address,
    is_loopback,
    join_address,
    split_address,
    split_peer_address,
)
from p2pstore.config import MAX_NAME_BYTES
from p2pstore.errors import ConfigError
from p2pstore.objects import DEFAULT_NAMESPACE, encode_namespace

DEFAULT_SEGMENT_BYTES: Final = 16 * 1024 * 1024
MIN_SEGMENT_BYTES: Final = 1024 * 1024
MAX_BYTES: Final = 2**60
DEFAULT_HTTP_PORT: Final = 9300
HTTP_PORTS: Final = 256
"""How many ports after the one that was named are tried."""
NAMESPACE_VARIABLE: Final = "MOONCAKE_P2P_NAMESPACE"
BOOTSTRAP_VARIABLE: Final = "MOONCAKE_P2P_BOOTSTRAP"
SSD_VARIABLE: Final = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"

_SIZE: Final = re.compile(
    r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+]?[0-9]{1,3})?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE
)
_FACTORS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TRUE: Final = ("1", "true", "yes", "on", "enable")
_FALSE: Final = ("0", "false", "no", "off", "disable", "")
_DEVICE: Final = re.compile(r"[\w.-]{1,64}")
_METADATA_SCHEMES: Final = ("etcd", "http", "https", "redis", "k8s")
"""Of metadata servers, which are not needed here."""
_PROTOCOLS: Final = ("tcp", "rdma")
_OTHER_PROTOCOLS: Final = (
    *("efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl", "ascend"),
    *("ub", "ubshmem", "maca", "sunrise_link", "rpc_only", "mpcomm", "tpu"),
)
"""Mooncake's, which this project does not have."""
_NEVER_USED: Final = {
    "engine": "no transfer engine is needed",
    "ipc_socket_path": "clients find their peer by its socket: name it as 'socket'",
}
_FOR_OWN_PEER: Final = (
    *("global_segment_size", "metadata_server", "master_server_addr", "master_server_address"),
    *("rdma_devices", "device_name", "enable_ssd_offload", "enable_client_http_server"),
)


@dataclass(frozen=True)
class SetupSettings:
    """The checked arguments of `setup`. `bootstrap` are addresses of peers; `ignored` those of metadata servers that
    cannot be peers. `for_own_peer` names the settings that only a peer that is started follows,
    `unused` says which have no effect at all."""

    hostname: str
    """As it was given, with a port if it has one."""
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
    for_own_peer: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


# --- what one value says: each raises `ConfigError` naming it -------------------------------------


def size_in_bytes(value: Any, name: str) -> int:
    """A number of bytes, or text such as `16MB`, `4gb`, `1024`, `1e6` (1024 bytes to a KB, as Mooncake has it)."""
    size: Any = math.nan
    if isinstance(value, numbers.Integral | float) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        size = float(match[1]) * _FACTORS[match[2].lower()]
        size = size if not match[2] else size // 1
    if not (0 <= size <= MAX_BYTES and size == int(size)):
        raise ConfigError(f"{name}: {value!r} is no size; give bytes, or text such as '512MB'")
    return int(size)


def yes_or_no(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{name}: {value!r} is neither true nor false")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or (value and not value.strip()):
        raise ConfigError(f"{name}: {value!r} must be text, or left out")
    return value.strip()


def _path(value: Any, name: str) -> str:
    path = _text(str(value) if isinstance(value, os.PathLike) else value, name)
    if "\0" in path:
        raise ConfigError(f"{name}: {value!r} is no path")
    return path


def _namespace(value: Any, name: str) -> str:
    text = _text(value, name)
    try:
        encode_namespace(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    return text


def port_number(value: Any, name: str) -> int:
    try:
        port = int(value) if isinstance(value, str) or value == int(value) else 0
    except (TypeError, ValueError, OverflowError):
        port = 0
    if isinstance(value, bool) or not 0 < port < 2**16:
        raise ConfigError(f"{name}: {value!r} is no port; give a number from 1 to 65535")
    return port


def _peer(value: Any, name: str) -> str:
    address = _text(value, name)
    split_peer_address(address, name)
    return address


def _metadata_server(value: Any, name: str) -> str:
    server = _text(value, name)
    return server if _is_metadata_server(server) else _peer(server, name)


def _is_metadata_server(server: str) -> bool:
    scheme, colon, _ = server.partition("://")
    return server.upper() == "P2PHANDSHAKE" or bool(colon and scheme.lower() in _METADATA_SCHEMES)


def _local_hostname(value: Any, name: str) -> str:
    hostname = _text(value, name)
    _host_of(hostname, name)
    return hostname


def _host_of(hostname: str, name: str = "local_hostname") -> str:
    """The host, without port and brackets."""
    if is_ip_address(hostname):
        return hostname
    try:
        return split_address(hostname, name, default_port=0)[0]
    except ConfigError:
        raise ConfigError(
            f"{name}: {hostname!r} is no host; write a name or address of this machine, such as node7, 10.0.0.5 or "
            "[fd00::5], with or without :PORT"
        ) from None


def _protocol(value: Any, name: str) -> str:
    protocol = _text(value, name).lower()
    if protocol not in ("", *_PROTOCOLS, *_OTHER_PROTOCOLS):
        near = difflib.get_close_matches(protocol, _PROTOCOLS, n=1)
        meant = f"did you mean {near[0]!r}?" if near else "write 'tcp' or 'rdma'"
        raise ConfigError(f"{name}: there is no protocol {value!r}; {meant}")
    return protocol


def _devices(value: Any, name: str) -> tuple[str, ...]:
    text = _text(value, name)
    names = tuple(each.strip() for each in text.split(",")) if text else ()
    if not all(_DEVICE.fullmatch(each) for each in names):
        raise ConfigError(
            f"{name}: {value!r} are no devices; write their names with commas, such as 'mlx5_0,mlx5_1', or nothing for "
            "all of them"
        )
    return () if names == ("auto-discovery",) else names


# --- all of them together -------------------------------------------------------------------------

_SETTINGS: Final[Mapping[str, tuple[Callable[[Any, str], Any], Any]]] = {
    "local_hostname": (_local_hostname, "localhost"),
    "metadata_server": (_metadata_server, ""),
    "master_server_addr": (_peer, ""),
    "master_server_address": (_peer, ""),
    "global_segment_size": (size_in_bytes, DEFAULT_SEGMENT_BYTES),
    "local_buffer_size": (size_in_bytes, DEFAULT_SEGMENT_BYTES),
    "protocol": (_protocol, "tcp"),
    "rdma_devices": (_devices, ()),
    "device_name": (_devices, ()),
    "enable_ssd_offload": (yes_or_no, False),
    "ssd_offload_path": (_path, ""),
    "tenant_id": (_namespace, DEFAULT_NAMESPACE),
    "namespace": (_namespace, ""),
    "enable_client_http_server": (yes_or_no, False),
    "client_http_port": (port_number, DEFAULT_HTTP_PORT),
    "socket": (_path, ""),
    "server_address": (_peer, ""),
    "mem_pool_size": (size_in_bytes, 0),
}
"""The reader of a setting, and its default, which None and "" stand for except for sizes."""


def from_arguments(values: Mapping[str, Any], environment: Mapping[str, str]) -> SetupSettings:
    """The settings of a call, by its parameters' names. Raises `ConfigError` naming what is wrong."""
    said = {name: default for name, (_, default) in _SETTINGS.items()}
    for name, (read, _) in _SETTINGS.items():
        value = values.get(name)
        if name in values and (not _is_blank(value) or read is size_in_bytes):
            said[name] = read(value, name)
    ssd_path = said["ssd_offload_path"] or environment.get(SSD_VARIABLE, "")
    if said["enable_ssd_offload"] and not ssd_path:
        raise ConfigError("enable_ssd_offload: say where with ssd_offload_path")
    namespace = said["namespace"]
    if not namespace and (named := environment.get(NAMESPACE_VARIABLE)):
        namespace = _namespace(named, NAMESPACE_VARIABLE)
    namespace = namespace or said["tenant_id"]
    servers_said = [
        said[each] for each in ("metadata_server", "master_server_addr", "master_server_address")
    ]
    servers = list(dict.fromkeys(each for each in servers_said if each))
    devices = (*said["rdma_devices"], *said["device_name"]) if said["protocol"] == "rdma" else ()
    segment = said["global_segment_size"]
    return SetupSettings(
        hostname=said["local_hostname"],
        host=_host_of(said["local_hostname"]),
        segment_bytes=max(segment, MIN_SEGMENT_BYTES) if segment else 0,
        local_buffer_bytes=said["local_buffer_size"],
        namespace=namespace,
        bootstrap=tuple(each for each in servers if not _is_metadata_server(each)),
        ignored=tuple(each for each in servers if _is_metadata_server(each)),
        socket=said["socket"] or None,
        rdma_devices=devices,
        ssd_path=ssd_path if said["enable_ssd_offload"] else "",
        http_port=said["client_http_port"] if said["enable_client_http_server"] else None,
        for_own_peer=tuple(_kept_from(said)),
        unused=(*_overruled(said, namespace, servers, environment), *_unused(said, values)),
    )


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _kept_from(said: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in _FOR_OWN_PEER
        if said[name] != _SETTINGS[name][1]
        and not (name == "metadata_server" and _is_metadata_server(said[name]))
    ]


def _overruled(
    said: Mapping[str, Any], namespace: str, servers: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Messages about settings that others overrule."""
    texts = []
    if said["tenant_id"] not in (DEFAULT_NAMESPACE, namespace):
        texts.append(f"setup: tenant_id changes nothing: the namespace is said to be {namespace!r}")
    peers = [each for each in servers if not _is_metadata_server(each)]
    if peers and environment.get(BOOTSTRAP_VARIABLE):
        texts.append(f"setup: {', '.join(peers)}: not used, as {BOOTSTRAP_VARIABLE} names others")
    return texts


def _unused(said: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Messages about settings without effect."""
    texts = [
        f"setup: {name} changes nothing: {why}"
        for name, why in _NEVER_USED.items()
        if not _is_blank(values.get(name))
    ]
    if said["server_address"]:
        texts.append(
            "setup_dummy: the server's address is not needed: this machine's peer is found by its socket"
        )
    if said["protocol"] in _OTHER_PROTOCOLS:
        texts.append(
            f"setup: protocol {said['protocol']!r} is not used: peers read by shared memory, TCP or RDMA"
        )
    if said["protocol"] != "rdma" and (said["rdma_devices"] or said["device_name"]):
        texts.append("setup: RDMA devices are used with protocol 'rdma' alone")
    for name in sorted(values.keys() - _SETTINGS.keys() - _NEVER_USED.keys(), key=str):
        near = difflib.get_close_matches(str(name), list(_SETTINGS), n=1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        texts.append(f"setup: there is no setting {name!r}, so it changes nothing{meant}")
    return texts


def takes_over(settings: SetupSettings, environment: Mapping[str, str]) -> str | None:
    """The address of those named that this machine has and no process listens at: a peer there is found by all
    programs that name it. Without a cluster key only loopback counts."""
    if any(environment.get(f"MOONCAKE_P2P_{name}") for name in ("LISTEN", "INTERFACE", "BOOTSTRAP")):
        return None
    for address in settings.bootstrap:
        host, port = split_address(address, "master_server_addr")
        if (is_loopback(host) or _has_key(environment)) and _can_be_taken(host, port):
            return address
    return None


def free_port(wanted: int) -> int:
    """This port of loopback, or the next free one; the same where all are taken."""
    ports = range(wanted, min(wanted + HTTP_PORTS, 2**16))
    return next((port for port in ports if _can_be_taken("127.0.0.1", port)), wanted)


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
    settings: SetupSettings,
    environment: Mapping[str, str],
    *,
    listen: str | None = None,
    ssd_path: str = "",
    http_port: int | None = None,
) -> list[str]:
    """Options of `mooncake-p2p join` for a peer of the store's own; what the environment says of a peer comes first,
    but for how much memory it offers. `listen`: one of the named addresses, which it takes itself; `ssd_path` and
    `http_port`: those of this peer."""
    options = ["--memory", str(settings.segment_bytes), "--drain-timeout", "5"]
    options += name_options(settings, environment)
    if listen is not None:
        options += ["--listen", listen]
    elif not environment.get("MOONCAKE_P2P_LISTEN") and not environment.get("MOONCAKE_P2P_INTERFACE"):
        host = settings.host
        if not _has_key(environment) or is_loopback(host):
            options += ["--listen", "127.0.0.1:0"]
        elif is_ip_address(host):
            options += ["--listen", join_address(host, 0)]
    others = [address for address in settings.bootstrap if address != listen]
    if not environment.get(BOOTSTRAP_VARIABLE):
        for address in others:
            options += ["--bootstrap", address]
    if others and not environment.get("MOONCAKE_P2P_JOIN_TIMEOUT"):
        options += ["--join-timeout", "2"]
    for device in settings.rdma_devices:
        options += ["--rdma-device", device]
    if ssd_path:
        options += ["--ssd", ssd_path]
    if http_port is not None:
        options += ["--metrics", f"127.0.0.1:{http_port}"]
    return options


def name_options(settings: SetupSettings, environment: Mapping[str, str]) -> list[str]:
    """How the peers of a store are called: as its `local_hostname`, so that others know their segments by that."""
    fits = len(settings.hostname.encode()) <= MAX_NAME_BYTES
    return ["--name", settings.hostname] if fits and not environment.get("MOONCAKE_P2P_NAME") else []


def _has_key(environment: Mapping[str, str]) -> bool:
    """Whether a peer that is started may serve a network."""
    return any(
        environment.get(f"MOONCAKE_P2P_{name}")
        for name in ("CLUSTER_KEY_FILE", "INSECURE", "INVITE", "CONFIG")
    )
