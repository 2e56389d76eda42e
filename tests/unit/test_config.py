"""Settings of a peer: what is accepted, and that a mistake is told by the name its author used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.config import (
    PeerConfig,
    is_loopback,
    is_wildcard,
    join_address,
    load_config,
    split_address,
    usable_memory_bytes,
)
from p2pstore.errors import ConfigError
from p2pstore.objects import GIB, MIB


def test_defaults_serve_this_machine_alone() -> None:
    config = PeerConfig().checked()
    assert config.name
    assert config.listen is None
    assert config.memory == min(4 * GIB, max(64 * MIB, usable_memory_bytes() // 8))
    assert config.checked() == config


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "a/b"}, "name: 'a/b'"),
        ({"name": "."}, "name: '.'"),
        ({"name": ".."}, "name: '..'"),
        ({"name": "tab\t"}, "name: "),
        ({"name": "\udc80"}, "name: "),
        ({"name": "ä" * 33}, "1 to 64 bytes"),
        ({"name": 5}, "name: 5: expected `str`"),
        ({"cluster": ""}, "cluster: "),
        ({"listen": "127.0.0.1"}, "listen: '127.0.0.1' is not HOST:PORT"),
        ({"listen": 7001}, "listen: 7001: expected `str"),
        ({"listen": "0.0.0.0:1"}, "keygen"),
        ({"data_listen": ["127.0.0.1:1", "10.0.0.1:1"]}, "data_listen: 10.0.0.1:1"),
        ({"bootstrap": "127.0.0.1:7001"}, "bootstrap: '127.0.0.1:7001': expected `array`"),
        ({"bootstrap": ["::1:5"]}, r"brackets, such as \[::1\]"),
        ({"bootstrap": ["node:0"]}, "bootstrap: node:0 has port 0"),
        ({"data_advertise": ["10.0.0.1"]}, "data_advertise: '10.0.0.1' is not HOST:PORT"),
        ({"advertise": ""}, "advertise: ''"),
        ({"memory": "1023KiB"}, "at least 1MiB"),
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ({"memory": 1.5}, "memory: 1.5: expected `int"),
        ({"max_objects": 0}, "max_objects: 0 must be at least 1"),
        ({"max_leased": "0"}, "max_leased: '0' must be above 0"),
        ({"max_leased": "x%"}, "max_leased: 'x%' is not a percentage"),
        ({"max_leased": "101%"}, "max_leased: '101%'"),
        ({"max_leased": "nan%"}, "max_leased: 'nan%'"),
        ({"transport": "rdma"}, "transport: this version has no rdma"),
        ({"transport": "ipx"}, "transport: 'ipx': not one of auto, shm, rdma, tcp"),
        ({"join_timeout": "5s"}, "join_timeout: '5s': expected `float`"),
        ({"drain_timeout": -1.0}, "drain_timeout: -1.0 must be 0 to 86400"),
        ({"drain_timeout": float("nan")}, "drain_timeout: nan must be"),
        ({"socket_mode": "999"}, "socket_mode: '999' is not an octal mode"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PeerConfig(**settings).checked()


def test_others_may_be_served_with_a_key_or_by_decision() -> None:
    for settings in ({"cluster_key_file": "key"}, {"insecure": True}):
        PeerConfig(listen="0.0.0.0:1", data_listen=["10.0.0.1:2"], **settings).checked()


def test_shares_and_modes() -> None:
    assert PeerConfig(max_leased="25%").max_leased_bytes(1000) == 250
    assert PeerConfig(max_leased="1MiB").max_leased_bytes(1000) == MIB
    assert PeerConfig(socket_mode="0660").socket_mode_bits() == 0o660


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1:17946", "10.0.0.1", 17946), ("[::1]:0", "::1", 0), ("node1:65535", "node1", 65535)],
)
def test_addresses_are_split_and_joined(address: str, host: str, port: int) -> None:
    assert split_address(address, "listen") == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", ":1", "a:", "a:-1", "a:65536", "a:²", "a:1_0", "[::1]", "a"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="listen: "):
        split_address(address, "listen")


@pytest.mark.parametrize(
    ("address", "host"), [("a", "a"), ("[::1]", "::1"), ("10.0.0.1", "10.0.0.1")]
)
def test_a_port_may_be_left_out_where_there_is_a_default(address: str, host: str) -> None:
    assert split_address(address, "advertise", default_port=7) == (host, 7)


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    complaint = None
    try:
        host, port = split_address(text, "listen", default_port=1)
    except ConfigError as error:
        complaint = str(error)
    assert complaint.startswith("listen: ") if complaint else host and 0 <= port <= 65535


def test_kinds_of_hosts() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "node")] == [False] * 3
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "node")] == [
        *(True, True, False, False)
    ]


def test_flag_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('name = "file"\ncluster = "file"\nmemory = 1048576\njoin_timeout = "250ms"\n')
    environment = {"MOONCAKE_P2P_NAME": "environment", "MOONCAKE_P2P_CLUSTER": "environment"}
    config = load_config(str(file), environment, {"name": "flag", "memory": None})
    assert (config.name, config.cluster, config.memory) == ("flag", "environment", MIB)
    assert config.join_timeout == 0.25


def test_text_of_the_environment_becomes_what_the_setting_is() -> None:
    environment = {
        "MOONCAKE_P2P_BOOTSTRAP": "a:1, b:2,",
        "MOONCAKE_P2P_INSECURE": "yes",
        "MOONCAKE_P2P_MAX_OBJECTS": "17",
        "MOONCAKE_P2P_DRAIN_TIMEOUT": "2m",
        "MOONCAKE_P2P_JOIN_TIMEOUT": "3",
    }
    config = load_config(None, environment, {})
    assert (config.bootstrap, config.insecure, config.max_objects) == (["a:1", "b:2"], True, 17)
    assert (config.drain_timeout, config.join_timeout) == (120.0, 3.0)


@pytest.mark.parametrize(
    ("file", "environment", "flags", "complaint"),
    [
        ('join_timeout = "soon"', {}, {}, "peer.toml: join_timeout: 'soon' is not a duration"),
        ("bootstrap = 3", {}, {}, "peer.toml: bootstrap: 3: expected `array`"),
        ("bootstrap = [3]", {}, {}, r"peer.toml: bootstrap: \[3\]: expected `str`"),
        ("colour = 3", {}, {}, "peer.toml: unknown key 'colour'; known are"),
        ("", {"MAX_OBJECTS": "x"}, {}, "MOONCAKE_P2P_MAX_OBJECTS: 'x': expected `int"),
        ("", {"LOG_LEVEL": "loud"}, {}, "MOONCAKE_P2P_LOG_LEVEL: 'loud': not one of debug, info"),
        ("", {"INSECURE": "maybe"}, {}, "MOONCAKE_P2P_INSECURE: 'maybe' is not 1 or 0"),
        ("", {}, {"join_timeout": "x"}, "--join-timeout: 'x' is not a duration"),
    ],
)
def test_a_mistake_is_named_where_it_was_made(
    file: str, environment: dict[str, str], flags: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(file)
    variables = {f"MOONCAKE_P2P_{name}": text for name, text in environment.items()}
    with pytest.raises(ConfigError, match=complaint):
        load_config(str(path), variables, flags)
