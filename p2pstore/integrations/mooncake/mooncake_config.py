"""Mooncake's configuration file and environment variables, as `mooncake.mooncake_config` reads them."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from p2pstore.errors import ConfigError
from p2pstore.integrations.mooncake.setup_settings import (
    DEFAULT_HTTP_PORT,
    SSD_VARIABLE,
    port_number,
    size_in_bytes,
    yes_or_no,
)
from p2pstore.objects import DEFAULT_NAMESPACE

LOG: Final = logging.getLogger("p2pstore.mooncake")
DEFAULT_GLOBAL_SEGMENT_SIZE: Final = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE: Final = 1024 * 1024 * 1024
MAX_FILE_BYTES: Final = 1024 * 1024
_REQUIRED: Final = ("local_hostname", "metadata_server", "master_server_address")
_CONFIG_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
_VARIABLES: Final = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": SSD_VARIABLE,
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}
_FROM_ENVIRONMENT: Final = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
"""Defaults of settings that a file must have and the environment need not."""


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}: {value!r} must be text")
    return value


def _required(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text.strip():
        raise ConfigError(f"{name} is empty: give a value")
    return text


def _protocol(value: Any, name: str) -> str:
    return _required(value, name).strip().lower()


_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    **dict.fromkeys(_REQUIRED, _required),
    **dict.fromkeys(("global_segment_size", "local_buffer_size"), size_in_bytes),
    **dict.fromkeys(("enable_ssd_offload", "enable_client_http_server"), yes_or_no),
    **dict.fromkeys(("device_name", "ssd_offload_path", "tenant_id"), _text),
    **{"protocol": _protocol, "client_http_port": port_number},
}


@dataclass
class MooncakeConfig:
    """The settings of a store, by the names of Mooncake's file; `setup(dataclasses.asdict(config))` takes them. Sizes
    may be text such as "16MB". Raises `ValueError` naming the setting that is wrong; of addresses and devices `setup`
    says what is wrong with them."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int = DEFAULT_GLOBAL_SEGMENT_SIZE
    local_buffer_size: int = DEFAULT_LOCAL_BUFFER_SIZE
    protocol: str = "tcp"
    device_name: str | None = ""
    master_server_address: str = ""
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = DEFAULT_NAMESPACE
    enable_client_http_server: bool = False
    client_http_port: int = DEFAULT_HTTP_PORT

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name not in _REQUIRED:  # not said
                value = field.default
            try:
                setattr(self, field.name, _READERS[field.name](value, field.name))
            except ConfigError as error:
                raise ValueError(str(error)) from None

    @staticmethod
    def from_file(file_path: str | os.PathLike[str]) -> MooncakeConfig:
        """The settings in a JSON file; the log names unknown keys. Raises `OSError`, `ValueError` for what is wrong."""
        with open(file_path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"{file_path} has more than {MAX_FILE_BYTES:,} bytes")
        try:
            said = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file_path} is not JSON: {error}") from None
        if not isinstance(said, dict):
            raise ValueError(f"{file_path} is no JSON object, such as {{...}}")
        for name in _REQUIRED:
            if name not in said:
                raise ValueError(f"Missing required config field: {name}")
        known = [field.name for field in fields(MooncakeConfig)]
        for name in sorted(said.keys() - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f": did you mean {near[0]!r}?" if near else ""
            LOG.warning("%s: %r is no setting, and changes nothing%s", file_path, name, meant)
        return MooncakeConfig(**{name: value for name, value in said.items() if name in known})

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """The settings in the file that `MOONCAKE_CONFIG_PATH` names, else those of the variables `MOONCAKE_MASTER`,
        `MOONCAKE_PROTOCOL` and so on. Raises `ValueError` when neither is set, and as `from_file`."""
        if path := os.environ.get(_CONFIG_VARIABLE):
            return MooncakeConfig.from_file(path)
        if not os.environ.get(_VARIABLES["master_server_address"]):
            raise ValueError(
                f"Neither the environment variable {_CONFIG_VARIABLE!r} nor 'MOONCAKE_MASTER' is set."
            )
        said: dict[str, Any] = dict(_FROM_ENVIRONMENT)
        for name, variable in _VARIABLES.items():
            if text := os.environ.get(variable):
                try:
                    said[name] = _READERS[name](text, variable)
                except ConfigError as error:
                    raise ValueError(str(error)) from None
        return MooncakeConfig(**said)
