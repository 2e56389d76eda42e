"""Where settings come from: the order of the sources, and that every value knows its origin."""

from pathlib import Path
from typing import Any

import pytest

from p2pstore.config import MAX_MEMORY_BYTES, PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.objects import GIB, MIB
from p2pstore.settings import Settings, load_settings, misspelled_variables, option_of, shown_settings


def test_flag_over_environment_over_file_over_invite(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('name = "file"\ncluster = "file"\n\nmemory = 1048576\njoin_timeout = "250ms"\n')
    environment = {"MOONCAKE_P2P_NAME": "environment", "MOONCAKE_P2P_CLUSTER": "environment"}
    settings = load_settings(str(file), environment, {"name": "flag", "memory": None})
    settings = settings.over({"cluster": "invite", "bootstrap": ["a:1"]}, "the invite")
    config = settings.config()
    assert (config.name, config.cluster, config.memory) == ("flag", "environment", MIB)
    assert (config.join_timeout, config.bootstrap) == (0.25, ["a:1"])
    assert settings.origins == {
        "name": "--name",
        "cluster": "MOONCAKE_P2P_CLUSTER",
        "memory": f"{file}:4: memory",
        "join_timeout": f"{file}:5: join_timeout",
        "bootstrap": "the invite",
    }


def test_text_of_the_environment_becomes_what_the_setting_is() -> None:
    environment = {
        "MOONCAKE_P2P_BOOTSTRAP": "a:1, b:2,",
        "MOONCAKE_P2P_INSECURE": "yes",
        "MOONCAKE_P2P_MAX_OBJECTS": "17",
        "MOONCAKE_P2P_DRAIN_TIMEOUT": "2m",
        "MOONCAKE_P2P_JOIN_TIMEOUT": "3",
    }
    settings = load_settings(None, environment, {})
    config = settings.config()
    assert (config.bootstrap, config.insecure, config.max_objects) == (["a:1", "b:2"], True, 17)
    assert (config.drain_timeout, config.join_timeout) == (120.0, 3.0)
    assert "listen" not in settings.origins


def test_the_status_page_has_two_names_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    for text, origin in (
        ('metrics = "9946"', "metrics"),
        ('http = "9946"', "http"),
        ('http = "9946"\nmetrics = "1"', "http"),
    ):
        file.write_text(text)
        settings = load_settings(str(file), {}, {})
        assert settings.checked().metrics == "127.0.0.1:9946"
        assert settings.origins == {"metrics": f"{file}:1: {origin}"}
    for environment in (
        {"MOONCAKE_P2P_METRICS": ":9946"},
        {"MOONCAKE_P2P_METRICS": "1", "MOONCAKE_P2P_HTTP": ":9946"},
    ):
        settings = load_settings(None, environment, {})
        assert settings.checked().metrics == "127.0.0.1:9946"
        assert misspelled_variables(environment, ()) == {}
    shown = {each.name: each for each in shown_settings(settings)}
    assert (shown["http"].value, shown["http"].origin) == (":9946", "MOONCAKE_P2P_HTTP")
    with pytest.raises(ConfigError, match=r"--http: '127\.0\.0\.1:70000' is not"):
        load_settings(None, {}, {"metrics": "70000"}).checked()


@pytest.mark.parametrize("name", sorted(PeerConfig.__struct_fields__))
def test_nothing_may_be_empty(name: str, tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    several = isinstance(getattr(PeerConfig(), name), list)
    path.write_text(f"{name} = {['']}" if several else f'{name} = " "')
    sources: list[tuple[str | None, dict[str, str], dict[str, Any], str]] = [
        (str(path), {}, {}, rf"peer.toml:1: {name}"),
        (None, {f"MOONCAKE_P2P_{name.upper()}": ""}, {}, f"MOONCAKE_P2P_{name.upper()}"),
    ]
    if name == "metrics":  # an option is named as people name the setting
        sources.append((None, {}, {name: ""}, "--http"))
    elif name not in ("insecure", "max_objects", "metrics_keys"):
        flag = [""] if several else ""
        sources.append((None, {}, {name: flag}, "--" + name.replace("_", "-")))
    for toml, environment, flags, origin in sources:
        with pytest.raises(ConfigError, match=f"{origin} is empty: give a value or leave it out"):
            load_settings(toml, environment, flags)


@pytest.mark.parametrize(
    ("file", "environment", "flags", "complaint"),
    [
        ('a = ""\njoin_timeout = "soon"', {}, {}, "peer.toml:1: unknown key 'a'; known are"),
        ('\njoin_timeout = "soon"', {}, {}, "peer.toml:2: join_timeout: 'soon' is not a duration"),
        ("join_timeout = true", {}, {}, "peer.toml:1: join_timeout: True must be a number"),
        ("bootstrap = 3", {}, {}, "peer.toml:1: bootstrap: 3 must be a list"),
        ('bootstrap = ["a:1",\n3]', {}, {}, r"peer.toml:1: bootstrap\[1\]: 3 must be text"),
        ("memroy = 3", {}, {}, "peer.toml:1: unknown key 'memroy'; did you mean 'memory'"),
        ("data-listen = 3", {}, {}, "unknown key 'data-listen'; did you mean 'data_listen'"),
        ("\n[listen]\nport = 3", {}, {}, r"peer.toml:2: listen: \{'port': 3\} must be text"),
        ("name = \nlisten = 1", {}, {}, r"is not TOML: .*line 1, column 8"),
        ("name = '\udce9'", {}, {}, "is not TOML: .*decode"),
        ("", {"MAX_OBJECTS": "x"}, {}, "MOONCAKE_P2P_MAX_OBJECTS: 'x' must be a whole number"),
        ("", {"LOG_LEVEL": "loud"}, {}, "MOONCAKE_P2P_LOG_LEVEL: 'loud' is not one of debug, info"),
        ("", {"INSECURE": "maybe"}, {}, "MOONCAKE_P2P_INSECURE: 'maybe' is not 1 or 0"),
        ("", {}, {"join_timeout": "x"}, "--join-timeout: 'x' is not a duration"),
        ("", {}, {"data_listen": ["a"]}, "--data-listen: 'a' is not HOST:PORT"),
        ("", {"LISTEN": "0.0.0.0:1"}, {}, "MOONCAKE_P2P_LISTEN: 0.0.0.0:1 is reachable by others"),
    ],
)
def test_a_mistake_is_named_where_it_was_made(
    file: str, environment: dict[str, str], flags: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(file, errors="surrogateescape")
    variables = {f"MOONCAKE_P2P_{name}": text for name, text in environment.items()}
    with pytest.raises(ConfigError, match=complaint):
        load_settings(str(path), variables, flags).checked()


@pytest.mark.parametrize(
    ("given", "needed"),
    [("kv_events_replay", "--kv-events"), ("ssd_capacity", "--ssd"), ("http_token_file", "--http")],
)
def test_what_else_to_give_is_named_as_an_option(given: str, needed: str) -> None:
    settings = load_settings(None, {}, {given: "tcp://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=f"^{option_of(given)}: .*; say where with {needed}$"):
        settings.checked()


def test_quotas_from_every_source(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text('memory = "8MiB"\n[quota]\na = "1MiB"\nb = 4096\n')
    sources: list[tuple[str | None, dict[str, str], dict[str, Any], str]] = [
        (str(path), {}, {}, f"{path}:2: quota"),
        (None, {"MOONCAKE_P2P_QUOTA": "a=1MiB, b=4KiB"}, {}, "MOONCAKE_P2P_QUOTA"),
        (None, {}, {"quota": ["a=1MiB", "b=4KiB"]}, "--quota"),
    ]
    for toml, environment, flags, origin in sources:
        settings = load_settings(toml, environment, {"memory": "8MiB", **flags})
        assert settings.checked().quotas == {"a": MIB, "b": 4096}
        shown = {each.name: each for each in shown_settings(settings)}
        assert shown["quota"].origin == origin


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        load_settings(str(tmp_path / "none.toml"), {}, {})
    path = tmp_path / "big.toml"
    path.write_text("#" * (MIB + 1))
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        load_settings(str(path), {}, {})


def test_every_setting_is_shown_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, memory, why in (
        (24 * GIB, 3 * GIB, "default: an eighth of the 24.0 GiB this process may use"),
        (80 * GIB, MAX_MEMORY_BYTES, "default: at most 4.0 GiB"),
        (256 * MIB, 64 * MIB, "default: at least 64.0 MiB"),
    ):
        for module in ("config", "settings"):
            monkeypatch.setattr(f"p2pstore.{module}.usable_memory_bytes", lambda usable=usable: usable)
        shown = {each.name: each for each in shown_settings(Settings())}
        fields = {*PeerConfig.__struct_fields__} - {"metrics"} | {"http"}
        assert list(shown) == sorted(fields)
        assert shown["memory"].value == memory
        assert shown["memory"].origin.startswith(why)
    assert (shown["transport"].value, shown["transport"].origin) == ("auto", "default")
    key = {"cluster_key_file": "key", "bootstrap": ["b:2"]}
    shown = {each.name: each for each in shown_settings(load_settings(None, {}, key))}
    assert (shown["cluster_key_file"].value, shown["cluster_key_file"].origin) == (
        "key",
        "--cluster-key-file",
    )
    assert "the address that leads to b:2" in shown["listen"].origin


def test_a_variable_that_is_nearly_one_of_ours() -> None:
    environment = {
        "MOONCAKE_P2P_MEMROY": "1GiB",
        "MOONCAKE_P2P_TIMEOUT": "3",
        "MOONCAKE_P2P_PORT_17946_TCP": "tcp://10.0.0.1:17946",  # Kubernetes makes such ones
    }
    assert misspelled_variables(environment, ["MOONCAKE_P2P_TIMEOUT"]) == {
        "MOONCAKE_P2P_MEMROY": "MOONCAKE_P2P_MEMORY"
    }
