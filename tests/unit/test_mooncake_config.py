"""Mooncake's configuration: the file and the variables mean what Mooncake makes of them, and nothing is dropped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from p2pstore.integrations.mooncake import MooncakeConfig
from p2pstore.integrations.mooncake.mooncake_config import _VARIABLES
from p2pstore.integrations.mooncake.setup_settings import from_arguments

NEEDED = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "h:1"}


def in_file(folder: Path, values: Any) -> MooncakeConfig:
    path = folder / "mooncake.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return MooncakeConfig.from_file(path)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [*_VARIABLES.values(), "MOONCAKE_CONFIG_PATH"]:
        monkeypatch.delenv(variable, raising=False)


def test_a_file_gives_what_setup_takes(tmp_path: Path) -> None:
    values = NEEDED | {"global_segment_size": "1e6", "local_buffer_size": 1e9, "protocol": "RDMA"}
    values |= {"enable_ssd_offload": "enable", "ssd_offload_path": "/x", "device_name": "mlx5_0"}
    config = in_file(tmp_path, values | {"tenant_id": None, "client_http_port": "9301"})
    assert (config.global_segment_size, config.local_buffer_size) == (10**6, 10**9)
    assert (config.protocol, config.tenant_id, config.client_http_port) == ("rdma", "default", 9301)
    settings = from_arguments(asdict(config), {})
    assert (settings.bootstrap, settings.rdma_devices) == (("h:1",), ("mlx5_0",))
    assert (settings.ssd_path, settings.unused) == ("/x", ())
    assert in_file(tmp_path, NEEDED).global_segment_size == 3_355_443_200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("global_segment_size", each) for each in ("16 apples", -1, "", True, [1])],
        *[("local_buffer_size", "50%"), ("enable_ssd_offload", "maybe"), ("client_http_port", "x")],
        *[("protocol", ""), ("protocol", 5), ("device_name", 5), ("tenant_id", 5)],
        *[("local_hostname", ""), ("metadata_server", None), ("master_server_address", 5)],
    ],
)
def test_what_is_wrong_is_a_value_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        in_file(tmp_path, NEEDED | {name: value})
    if isinstance(value, str) and value:
        monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
        monkeypatch.setenv(_VARIABLES[name], value)
        with pytest.raises(ValueError, match=_VARIABLES[name]):
            MooncakeConfig.load_from_env()


@pytest.mark.parametrize("text", ["", "[1]", "{", "5", "[" * 100_000])
def test_what_is_no_configuration_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"mooncake\.json"):
        in_file(tmp_path, text)


def test_keys_that_mean_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_file(tmp_path, NEEDED | {"globl_segment_size": 5})
    assert "did you mean 'global_segment_size'" in caplog.text
    for name in NEEDED:
        with pytest.raises(ValueError, match=f"Missing required config field: {name}"):
            in_file(tmp_path, {each: value for each, value in NEEDED.items() if each != name})


def test_the_environment_names_a_file_or_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="MOONCAKE_CONFIG_PATH"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    assert (config.master_server_address, config.global_segment_size) == ("10.0.0.1:50051", 2**31)
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(NEEDED))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert MooncakeConfig.load_from_env().master_server_address == "h:1"
