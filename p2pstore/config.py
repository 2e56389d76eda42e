"""The peer's settings: typed, checked, from flags, environment and a TOML file."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from p2pstore.errors import ConfigError
from p2pstore.objects import GIB, MIB, encode_namespace, parse_bytes, parse_duration

DEFAULT_CONTROL_PORT: Final = 17946
ENVIRONMENT_PREFIX: Final = "MOONCAKE_P2P_"
MINIMUM_MEMORY_BYTES: Final = 1 * MIB
MAX_NAME_BYTES: Final = 64

_PORT: Final = re.compile(r"[0-9]{1,5}")

TransportName = Literal["auto", "shm", "rdma", "tcp"]


class PeerConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of one peer. Field names are the command line's option names with underscores.

    Sizes are bytes or text such as `4GiB`; addresses are `HOST:PORT` (`[v6]:PORT`), port 0 means any
    free one. `listen` unset: port 17946 on loopback, or any free one when that is taken. `state_dir`
    unset: a new identity that is forgotten at the end. `memory` unset: an eighth of what this process
    may use, at most 4 GiB.
    """

    name: str = ""
    cluster: str = "default"
    listen: str | None = None
    data_listen: list[str] = []
    advertise: str | None = None
    data_advertise: list[str] = []
    bootstrap: list[str] = []
    join_timeout: float = 5.0
    memory: str | int | None = None
    max_objects: int | None = None
    transport: TransportName = "auto"
    cluster_key_file: str | None = None
    insecure: bool = False
    state_dir: str | None = None
    socket: str | None = None
    socket_mode: str = "0600"
    socket_group: str | None = None
    max_leased: str | int = "50%"
    drain_timeout: float = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_file: str | None = None

    def checked(self) -> PeerConfig:
        """A copy with defaults filled in. Raises `ConfigError` naming the setting that is wrong."""
        _convert(msgspec.structs.asdict(self), {}, strict=True)
        name = self.name or socket.gethostname() or "peer"
        if not _is_file_name(name):
            raise ConfigError(
                f"name: {name!r} must be 1 to 64 bytes without '/' and control characters, and not . or .."
            )
        try:
            encode_namespace(self.cluster)
        except ValueError as error:
            raise ConfigError(f"cluster: {error}") from None
        for setting, addresses in (
            ("listen", [self.listen] if self.listen else []),
            ("data_listen", self.data_listen),
            ("bootstrap", self.bootstrap),
            ("data_advertise", self.data_advertise),
        ):
            for address in addresses:
                split_address(address, setting)
        for address in self.bootstrap:
            if split_address(address, "bootstrap")[1] == 0:
                raise ConfigError(
                    f"bootstrap: {address} has port 0; write the port of a running peer"
                )
        if self.advertise is not None:
            split_address(self.advertise, "advertise", default_port=0)
        memory = self.memory_bytes
        if memory < MINIMUM_MEMORY_BYTES:
            raise ConfigError(f"memory: {self.memory!r} is too little; give at least 1MiB")
        if self.max_objects is not None and self.max_objects < 1:
            raise ConfigError(f"max_objects: {self.max_objects} must be at least 1")
        if self.transport == "rdma":
            raise ConfigError("transport: this version has no rdma yet; use auto, shm or tcp")
        for setting in ("join_timeout", "drain_timeout"):
            value = getattr(self, setting)
            if not 0 <= value <= 86_400:
                raise ConfigError(f"{setting}: {value!r} must be 0 to 86400 seconds")
        self.socket_mode_bits()
        self.max_leased_bytes(memory)
        if not self.cluster_key_file and not self.insecure:
            wide = [("listen", self.listen)] if self.listen else []
            wide += [("data_listen", address) for address in self.data_listen]
            for setting, address in wide:
                if not is_loopback(split_address(address, setting)[0]):
                    raise ConfigError(
                        f"{setting}: {address} is reachable by others, but there is no cluster key. Make one "
                        "with `mooncake-p2p keygen FILE` and pass --cluster-key-file on every peer, or say "
                        "--insecure if the network keeps strangers out"
                    )
        return msgspec.structs.replace(self, name=name, memory=memory)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory to offer."""
        if self.memory is None:
            return min(4 * GIB, max(64 * MIB, usable_memory_bytes() // 8))
        return parse_bytes(self.memory, "memory")

    def max_leased_bytes(self, memory: int) -> int:
        """Bytes that one client may hold leased at once."""
        if isinstance(self.max_leased, str) and self.max_leased.endswith("%"):
            try:
                percent = float(self.max_leased[:-1])
            except ValueError:
                raise ConfigError(f"max_leased: {self.max_leased!r} is not a percentage") from None
            if not 0 < percent <= 100:
                raise ConfigError(
                    f"max_leased: {self.max_leased!r} must be above 0% and at most 100%"
                )
            return int(memory * percent / 100)
        size = parse_bytes(self.max_leased, "max_leased")
        if not size:
            raise ConfigError(f"max_leased: {self.max_leased!r} must be above 0 bytes")
        return size

    def socket_mode_bits(self) -> int:
        """The local socket's permission bits."""
        try:
            mode = int(self.socket_mode, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777:
            raise ConfigError(
                f"socket_mode: {self.socket_mode!r} is not an octal mode such as 0600"
            )
        return mode


def _is_file_name(name: str) -> bool:
    """Whether a name can be shown, and be part of the names of the state directory and the socket."""
    return (
        name.isprintable()  # False also for what cannot be encoded
        and len(name.encode()) <= MAX_NAME_BYTES
        and "/" not in name
        and name not in (".", "..")
    )


def usable_memory_bytes() -> int:
    """What this process may use: the smaller of the host's memory and its cgroup's limit."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            text = Path(limit_file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(host, int(text))
    return host


def split_address(address: str, setting: str, default_port: int | None = None) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `[v6]:PORT`. Raises `ConfigError` naming the setting."""
    host, colon, port_text = address.rpartition(":")
    if (not colon and default_port is not None) or (
        address.endswith("]") and default_port is not None
    ):
        host, port_text = address, str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            f"{setting}: write an IPv6 address in brackets, such as [::1]:17946, not {address!r}"
        )
    if not host or not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        raise ConfigError(f"{setting}: {address!r} is not HOST:PORT, such as 10.0.0.1:17946")
    return host, int(port_text)


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


_LIST_SETTINGS: Final = frozenset({"data_listen", "data_advertise", "bootstrap"})
_DURATION_SETTINGS: Final = frozenset({"join_timeout", "drain_timeout"})


def load_config(
    toml_path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> PeerConfig:
    """Flags over environment (`MOONCAKE_P2P_*`) over the TOML file over defaults.

    `flags` holds only what was given. Durations may be text such as `500ms`. Raises `ConfigError`
    naming the source and the key.
    """
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if toml_path:
        settings.update(_read_toml(toml_path))
        origins.update({name: f"{toml_path}: {name}" for name in settings})
    for field in msgspec.structs.fields(PeerConfig):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        text = environment.get(variable)
        if text is not None:
            settings[field.name] = _from_text(field.name, text)
            origins[field.name] = variable
    for name, value in flags.items():
        if value is not None:
            settings[name] = value
            origins[name] = "--" + name.replace("_", "-")
    for name in _DURATION_SETTINGS & settings.keys():
        if isinstance(settings[name], str):
            try:
                settings[name] = parse_duration(settings[name], origins[name])
            except ValueError as error:
                raise ConfigError(str(error)) from None
    return _convert(settings, origins, strict=False)


_VALIDATION_ERROR: Final = re.compile(r"(?P<problem>.*) - at `\$\.(?P<name>\w+).*`")


def _convert(settings: dict[str, Any], origins: Mapping[str, str], *, strict: bool) -> PeerConfig:
    """Settings of the right types. Raises `ConfigError` naming the setting as its origin spells it."""
    try:
        return msgspec.convert(settings, PeerConfig, strict=strict)
    except msgspec.ValidationError as error:
        parts = _VALIDATION_ERROR.fullmatch(str(error))
        if parts is None:
            raise ConfigError(str(error)) from None
        name, problem = parts["name"], parts["problem"]
    kinds = {field.name: field.type for field in msgspec.structs.fields(PeerConfig)}
    if get_origin(kinds[name]) is Literal:
        problem = f"not one of {', '.join(get_args(kinds[name]))}"
    raise ConfigError(f"{origins.get(name, name)}: {settings[name]!r}: {problem.lower()}")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            loaded = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error.strerror}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    known = {field.name for field in msgspec.structs.fields(PeerConfig)}
    unknown = sorted(set(loaded) - known)
    if unknown:
        raise ConfigError(
            f"{path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    return loaded


def _from_text(name: str, text: str) -> Any:
    if name in _LIST_SETTINGS:
        return [part.strip() for part in text.split(",") if part.strip()]
    if name == "insecure":
        if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
            raise ConfigError(f"{ENVIRONMENT_PREFIX}INSECURE: {text!r} is not 1 or 0")
        return text.lower() in ("1", "true", "yes")
    return text
