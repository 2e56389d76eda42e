"""Where a peer's settings come from. Shell.

Flags over environment (`MOONCAKE_P2P_*`) over a TOML file over an invite over defaults. Every value keeps
its origin, so that a mistake is told as its author wrote it, and `config show` can say why a value is what
it is.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from p2pstore.addresses import DEFAULT_CONTROL_PORT, is_loopback, split_address
from p2pstore.config import (
    ENVIRONMENT_PREFIX,
    MAX_MEMORY_BYTES,
    MIN_MEMORY_BYTES,
    PeerConfig,
    check_types,
    usable_memory_bytes,
)
from p2pstore.errors import ConfigError
from p2pstore.local.socket_paths import socket_directories
from p2pstore.objects import format_bytes, parse_duration

MAX_FILE_BYTES: Final = 1024 * 1024

_FIELDS: Final = {each.name: each for each in msgspec.structs.fields(PeerConfig)}
_LIST_SETTINGS: Final = frozenset(
    name for name, each in _FIELDS.items() if isinstance(each.default_factory, type(list))
)
_DURATION_SETTINGS: Final = frozenset(name for name, each in _FIELDS.items() if each.type is float)
PEOPLES_NAMES: Final = {"metrics": "http"}
"""Setting -> its name in options, environment and file, where the field's own name is an alias."""
_FIELD_OF: Final = {**{name: name for name in _FIELDS}, **{v: k for k, v in PEOPLES_NAMES.items()}}
"""Name in environment and file -> field. A people's name stands behind its alias, and wins over it."""
_TRUE: Final = ("1", "true", "yes")
_FALSE: Final = ("0", "false", "no")


@dataclass(frozen=True)
class ShownSetting:
    """One line of `config show`. `value` is None where the running peer will choose; `origin` says how."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """Given settings and their origins. `origins` spells each setting as its author did."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> PeerConfig:
        """The settings as a `PeerConfig`, defaults not yet filled in."""
        return msgspec.structs.replace(PeerConfig(), **self.values)

    def checked(self) -> PeerConfig:
        """The settings with defaults filled in. Raises `ConfigError` naming origin, value and what is allowed."""
        return self.config().checked({**{name: option_of(name) for name in _FIELDS}, **self.origins})

    def over(self, values: Mapping[str, Any], origin: str) -> Settings:
        """These settings, and below them what `origin` says of all others."""
        fresh = {name: value for name, value in values.items() if name not in self.values}
        return Settings({**fresh, **self.values}, {**dict.fromkeys(fresh, origin), **self.origins})


def load_settings(
    toml_path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Settings:
    """Flags over environment over the TOML file. `flags` are those given (None counts as not given).

    Durations may be text such as `500ms`. Raises `ConfigError` naming the source (flag, variable, file and
    line), the value and what is allowed. Nothing may be empty: a script's unset variable must not start a
    peer without its key.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if toml_path:
        for name, value, origin in _read_toml(toml_path):
            values[name], origins[name] = value, origin
    for spelled, name in _FIELD_OF.items():
        variable = ENVIRONMENT_PREFIX + spelled.upper()
        if (text := environment.get(variable)) is not None:
            refuse_empty(text, variable)
            values[name], origins[name] = _from_text(name, text, variable), variable
    for name, value in flags.items():
        if value is not None:
            values[name], origins[name] = value, option_of(name)
    for name, value in values.items():
        refuse_empty(value, origins[name])
    for name in _DURATION_SETTINGS & values.keys():
        if isinstance(values[name], str):
            try:
                values[name] = parse_duration(values[name], origins[name])
            except ValueError as error:
                raise ConfigError(str(error)) from None
    converted = check_types(values, origins, strict=False)
    return Settings({name: getattr(converted, name) for name in values}, origins)


def option_of(name: str) -> str:
    """The option of `join` for a setting."""
    return "--" + PEOPLES_NAMES.get(name, name).replace("_", "-")


def refuse_empty(value: Any, origin: str) -> None:
    """Raise `ConfigError` naming the origin when text, or one of several, has nothing in it."""
    if any(isinstance(one, str) and not one.strip() for one in _each(value)):
        raise ConfigError(f"{origin} is empty: give a value or leave it out")


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def misspelled_variables(environment: Mapping[str, str], others: Iterable[str]) -> dict[str, str]:
    """Variables that are nearly those of a setting (or one of `others`) -> what was probably meant."""
    known = [ENVIRONMENT_PREFIX + name.upper() for name in _FIELD_OF] + list(others)
    found = {}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.9)
            found.update({variable: near[0]} if near else {})
    return found


# --- sources ---------------------------------------------------------------------------------


def _read_toml(path: str) -> list[tuple[str, Any, str]]:
    """(setting, value, origin) of each key in the file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the configuration file {path} has more than {MAX_FILE_BYTES:,} bytes")
    try:
        text = data.decode()
        loaded = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    found = []
    for key, value in sorted(loaded.items(), key=lambda item: item[0] in PEOPLES_NAMES.values()):
        where = _line_of(key, text, path)
        if key not in _FIELD_OF:
            raise ConfigError(f"{where}: unknown key {key!r}{_nearest(key)}")
        found.append((_FIELD_OF[key], value, f"{where}: {key}"))
    return found


def _line_of(key: str, text: str, path: str) -> str:
    """`FILE:LINE` of a key; the file alone where the text is too unusual to tell."""
    start = re.compile(
        rf"\s*\[?\s*(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')\s*[=.\]]"
    )
    lines = [number for number, line in enumerate(text.splitlines(), 1) if start.match(line)]
    return f"{path}:{lines[0]}" if len(lines) == 1 else path


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), list(_FIELD_OF), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(sorted(_FIELD_OF.keys() - PEOPLES_NAMES.keys()))}"


def _from_text(name: str, text: str, variable: str) -> Any:
    if name in _LIST_SETTINGS:
        parts = [part.strip() for part in text.split(",")]
        return parts[:-1] if parts[-1] == "" else parts  # a comma at the end is no mistake
    if _FIELDS[name].type is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{variable}: {text!r} is not 1 or 0")
        return text.lower() in _TRUE
    return text


# --- what is in force --------------------------------------------------------------------------


def shown_settings(settings: Settings) -> list[ShownSetting]:
    """Every setting with its value and origin, sorted by name. Raises `ConfigError` like `Settings.checked`.

    A default that is computed says how. No secret is among the values: of the cluster key only the path.
    """
    checked = settings.checked()
    shown = []
    for name in _FIELDS:
        value, origin = getattr(settings.config(), name), settings.origins.get(name, "default")
        if name not in settings.origins and name in _COMPUTED:
            value, origin = _COMPUTED[name](checked)
        shown.append(ShownSetting(PEOPLES_NAMES.get(name, name), value, origin))
    return sorted(shown, key=lambda setting: setting.name)


def _memory(config: PeerConfig) -> tuple[Any, str]:
    usable = usable_memory_bytes()
    share = f"an eighth of the {format_bytes(usable)} this process may use"
    if usable // 8 > MAX_MEMORY_BYTES:
        share = f"at most {format_bytes(MAX_MEMORY_BYTES)} ({share} is more)"
    elif usable // 8 < MIN_MEMORY_BYTES:
        share = f"at least {format_bytes(MIN_MEMORY_BYTES)} ({share} is less)"
    return config.memory, f"default: {share}"


def _listen(config: PeerConfig) -> tuple[Any, str]:
    port = f"port {DEFAULT_CONTROL_PORT}, or a free one when it is taken"
    if config.interface:
        return None, f"default: the address of --interface, {port}"
    distant = [a for a in config.bootstrap if not is_loopback(split_address(a, "bootstrap")[0])]
    if distant and (config.cluster_key_file or config.insecure):
        return None, f"default: the address that leads to {distant[0]}, {port}"
    return None, f"default: 127.0.0.1, {port}"


def _socket(config: PeerConfig) -> tuple[Any, str]:
    shared = bool(config.socket_mode_bits() & 0o077)
    first, *others = socket_directories(shared=shared)
    elsewhere = " or ".join(map(str, others))
    return str(first / f"{config.name}.sock"), f"default: there if possible, else in {elsewhere}"


def _advertised(config: PeerConfig) -> tuple[Any, str]:
    return (
        None,
        "default: where it listens; for a wildcard, the address that leads to a bootstrap peer",
    )


_COMPUTED: Final[Mapping[str, Callable[[PeerConfig], tuple[Any, str]]]] = {
    "name": lambda config: (config.name, "default: this host's name"),
    "memory": _memory,
    "memory_path": lambda config: (None, "default: in no file"),
    "more_memory": lambda config: ([], "default: none"),
    "quota": lambda config: ([], "default: none"),
    "cap": lambda config: ([], "default: none"),
    "ssd": lambda config: (None, "default: none"),
    "ssd_capacity": lambda config: (None, "default: half of what is free there, or a whole device"),
    "ssd_writes_per_day": lambda config: (None, "default: no limit"),
    "numa_node": lambda config: (None, "default: wherever the kernel takes it"),
    "checkpoint_memory": lambda config: (None, "default: half of what is available at the time"),
    "max_objects": lambda config: (None, "default: one per 16 KiB of memory, at least 1,024"),
    "listen": _listen,
    "data_listen": lambda config: (None, "default: any free port where control listens"),
    "advertise": _advertised,
    "data_advertise": _advertised,
    "socket": _socket,
    "socket_mode": lambda config: (f"{config.socket_mode_bits():04o}", "default"),
    "state_dir": lambda config: (None, "default: none, a new identity each time"),
}
