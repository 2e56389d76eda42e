"""Durations, and what `join` makes of flags, environment and file."""

import gc
import io
import json
import os
import shlex
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_p2p.join_settings import ready_for_people, spelled_as_given
from mooncake_p2p.main import LazyCommands, run
from mooncake_p2p.options import BLAS_THREADS, importing, parse_timeout
from p2pstore.access.invite import Invite, format_invite
from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, parse_duration
from p2pstore.settings import Settings
from tests.command_line import Cli


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        ("1.5", 1.5),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("10m", 600.0),
        (" 2 H ", 7200.0),
        ("1d", 86400.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--ttl") == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1w", "1 2", "nan", "inf", "1e3", "٣"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ttl: .* is not a duration"):
        parse_duration(text, "--ttl")


@given(st.text(max_size=12) | st.from_regex(r"\d{1,5}(\.\d{0,3})?[smhdx]{0,2}", fullmatch=True))
def test_any_text_is_a_duration_or_a_clear_error(text: str) -> None:
    try:
        seconds = parse_duration(text, "--ttl")
    except ValueError as error:
        message = str(error)
        seconds = 0.0
    else:
        message = "--ttl: fine"
    assert seconds >= 0
    assert message.startswith("--ttl: ")


@pytest.mark.parametrize("text", ["0", "0ms", "9" * 400])
def test_a_timeout_is_positive_and_finite(text: str) -> None:
    with pytest.raises(ValueError, match="--timeout"):
        parse_timeout(text)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configurations that `run_peer` was called with; nothing is started."""
    configs: list[Any] = []

    def run_peer(config: Any, invite: Any, *, detached: bool, ready_text: Any = None) -> None:
        assert not detached
        configs.append(config)

    peer = types.ModuleType("p2pstore.peer")
    peer.run_peer = run_peer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "p2pstore.peer", peer)
    for name in [name for name in os.environ if name.startswith("MOONCAKE_P2P_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return configs


def test_join_without_options_uses_the_defaults(started: list[Any]) -> None:
    assert run(["join"]) == 0
    assert started[0].listen is None
    assert started[0].insecure is False
    assert started[0].checked().name


def test_join_passes_every_option_on(started: list[Any]) -> None:
    arguments = {
        "name": "n",
        "cluster": "c",
        "listen": "127.0.0.1:0",
        "interface": "eth0",
        "advertise": "10.0.0.1",
        "join-timeout": "2s",
        "network": "wan",
        "memory": "64MiB",
        "memory-path": "/dev/shm/n",
        "huge-pages": "never",
        "eviction-policy": "s3-fifo",
        "max-objects": "100",
        "max-leased": "25%",
        "transport": "tcp",
        "directory": "partitioned",
        "index-memory": "64MiB",
        "cluster-key-file": "key",
        "state-dir": "state",
        "socket": "s.sock",
        "socket-mode": "0660",
        "socket-group": "g",
        "drain-timeout": "1m",
        "log-level": "debug",
        "log-format": "json",
        "log-file": "log",
    }
    repeated = {
        "data-listen": ["127.0.0.1:1", "127.0.0.1:2"],
        "data-advertise": ["10.0.0.1:1", "10.0.0.1:2"],
        "bootstrap": ["10.0.0.2:3", "[::1]:4"],
        "quota": ["a=1MiB", "job/b=2MiB"],
    }
    line = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    line += [part for name, values in repeated.items() for v in values for part in (f"--{name}", v)]
    assert run(["join", *line, "--insecure", "--keep-memory"]) == 0
    (config,) = started
    for name, value in {**arguments, **repeated}.items():
        if name not in ("join-timeout", "drain-timeout", "max-objects", "memory", "state-dir"):
            assert getattr(config, name.replace("-", "_")) == value
    assert (config.join_timeout, config.drain_timeout, config.max_objects) == (2.0, 60.0, 100)
    assert config.insecure is True
    assert config.keep_memory is True
    assert config.memory == 64 * MIB
    assert config.state_dir == os.path.abspath("state")


@pytest.mark.parametrize("option", ["--http", "--metrics"])
def test_the_status_page_is_on_loopback_unless_a_host_is_given(option: str, started: list[Any]) -> None:
    for address in ("9946", "0.0.0.0:9946"):
        assert run(["join", option, address]) == 0
    assert [each.metrics for each in started] == ["127.0.0.1:9946", "0.0.0.0:9946"]


READY = {
    "peer_id": "12D3",
    "name": "a",
    "control": "127.0.0.1:17946",
    "data": ["127.0.0.1:4001", "127.0.0.1:4002"],
    "socket": "/tmp/a.sock",
    "metrics": "0.0.0.0:9946",
    "joined": False,
    "peers": 1,
}


@pytest.mark.parametrize(
    ("live", "choice"),
    [(["/tmp/a.sock"], ""), (["/tmp/a.sock", "/tmp/b.sock"], " -p a"), ([], " --socket /tmp/a.sock")],
)
def test_a_terminal_is_told_where_the_peer_is_and_what_to_try(
    live: list[str], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET", raising=False)
    monkeypatch.setattr("p2pstore.local.socket_paths.live_sockets", lambda: [*map(Path, live)])
    text = ready_for_people(READY)
    assert text.startswith("peer a serves, with no other peer yet\n")
    assert f"mooncake-p2p get greeting -o -{choice}\n" in text
    for shown in ("/tmp/a.sock", "17946", "4001, 127.0.0.1:4002", "http://127.0.0.1:9946/"):
        assert shown in text
    assert "ready {" not in text
    for line in text.partition("try in")[2].splitlines()[1:]:
        words = shlex.split(line.rpartition("| ")[2])[1:]
        LazyCommands()[words[0]].make_context(words[0], words[1:]).close()
    assert "with 2 others" in ready_for_people({**READY, "peers": 3})
    assert "join --http 9946" in ready_for_people({**READY, "metrics": None})


def test_only_a_terminal_without_json_is_told_in_words(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_in_words(*options: str, terminal: bool) -> bool:
        told = []
        peer: Any = sys.modules["p2pstore.peer"]
        peer.run_peer = lambda config, invite, **given: told.append(given.get("ready_text"))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        assert run(["join", *options]) == 0
        return told == [ready_for_people]

    assert told_in_words(terminal=True)
    assert not told_in_words("--json", terminal=True)
    assert not told_in_words(terminal=False)


def test_flag_over_environment_over_file(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('name = "file"\ncluster = "file"\nmemory = "1MiB"\nbootstrap = ["a:1"]\n')
    monkeypatch.setenv("MOONCAKE_P2P_NAME", "environment")
    monkeypatch.setenv("MOONCAKE_P2P_CLUSTER", "environment")
    monkeypatch.setenv("MOONCAKE_P2P_BOOTSTRAP", "b:1, b:2")
    assert run(["join", "--config", str(file), "--name", "flag"]) == 0
    monkeypatch.setenv("MOONCAKE_P2P_CONFIG", str(file))
    assert run(["join", "--name", "flag"]) == 0
    assert started[0] == started[1]
    assert (started[0].name, started[0].cluster, started[0].memory) == ("flag", "environment", MIB)
    assert started[0].bootstrap == ["b:1", "b:2"]


def test_the_socket_of_another_peer_in_the_environment_is_explained(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    path = tmp_path / "other.sock"
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "MOONCAKE_P2P_SOCKET" in cli("join", status=2).err
        cli("join", "--socket", tmp_path / "own.sock")
    cli("join")  # no peer listens there any more
    assert [config.socket for config in started] == [str(tmp_path / "own.sock"), str(path)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("colour = 1", "peer.toml:1: unknown key 'colour'"),
        ("name = 3", "name"),
        ("name = ", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_a_usage_error_that_names_it(
    content: str | None, complaint: str, started: list[Any], tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "peer.toml"
    if content is not None:
        file.write_text(content)
    assert complaint in cli("join", "--config", file, status=2).err
    assert started == []


def test_an_invite_on_the_command_line_in_the_environment_and_on_stdin(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = format_invite(Invite("blue", ("10.0.0.1:17946",), (b"k" * 32,)))
    assert run(["join", "--name", "n", "--listen", "0.0.0.0:1", "--invite", line]) == 0
    monkeypatch.setenv("MOONCAKE_P2P_INVITE", line)
    assert run(["join", "--name", "n", "--listen", "0.0.0.0:1"]) == 0
    monkeypatch.setenv("MOONCAKE_P2P_INVITE", "nonsense")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
    assert run(["join", "--name", "n", "--listen", "0.0.0.0:1", "--invite", "-"]) == 0
    assert started[0] == started[1] == started[2]
    assert (started[0].cluster, started[0].bootstrap) == ("blue", ["10.0.0.1:17946"])
    assert started[0].cluster_key_file == str(tmp_path / "mooncake-p2p" / "n" / "cluster.key")


def test_a_torn_invite_is_a_usage_error(started: list[Any], cli: Cli) -> None:
    line = format_invite(Invite("blue", ("10.0.0.1:17946",)))
    assert "torn or mistyped: ask for it again" in cli("join", "--invite", line[:-3], status=2).err
    assert started == []


def test_config_show_takes_what_join_takes(started: list[Any], tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('\nmemory = "2MiB"\n')
    key = b"k" * 32
    line = format_invite(Invite("blue", ("10.0.0.1:17946",), (key,)))
    options = ["--config", str(file), "--name", "n", "--invite", line, "--data-listen", "10.0.0.2:1"]
    text = cli("config", "show", "--json", *options).out
    shown = {each["name"]: each for each in json.loads(text)}
    assert shown["memory"] == {"name": "memory", "value": "2MiB", "origin": f"{file}:2: memory"}
    assert shown["cluster"] == {"name": "cluster", "value": "blue", "origin": "the invite"}
    assert shown["data_listen"]["value"] == ["10.0.0.2:1"]
    assert shown["data_listen"]["origin"] == "--data-listen"
    assert key.hex() not in text
    assert line not in text
    rows = {row.split()[0]: row for row in cli("config", "show", *options).out.splitlines()}
    assert rows.keys() - {"SETTING"} == shown.keys()
    assert rows["memory"].split() == ["memory", "2MiB", f"{file}:2:", "memory"]
    assert "--memory: 'lots' is not a size" in cli("config", "show", "--memory", "lots", status=2).err
    assert started == []
    assert list(tmp_path.iterdir()) == [file]  # nothing is made by looking


def test_config_show_tells_of_variables_that_nobody_reads(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("MOONCAKE_P2P_MEMROY", "1GiB")
    printed = cli("config", "show")
    assert "MOONCAKE_P2P_MEMROY is no setting; did you mean MOONCAKE_P2P_MEMORY?" in (printed.err)


def test_what_the_peer_finds_wrong_is_told_as_it_was_spelled() -> None:
    settings = Settings(
        {"interface": "none0", "memory": 1}, {"interface": "MOONCAKE_P2P_INTERFACE", "name": "default"}
    )
    for said, shown in (
        ("interface: there is none", "MOONCAKE_P2P_INTERFACE: there is none"),
        ("data_listen: taken", "--data-listen: taken"),
        ("name: taken", "--name: taken"),
        ("the allow file x: gone", "the allow file x: gone"),
        ("in the wrong place", "in the wrong place"),
    ):
        with pytest.raises(ConfigError) as caught, spelled_as_given(settings):
            raise ConfigError(said)
        assert str(caught.value) == shown


@pytest.mark.parametrize("before", [None, "4"])
def test_modules_are_loaded_without_threads_of_numpy_and_the_environment_stays(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BLAS_THREADS, raising=False)
    if before is not None:
        monkeypatch.setenv(BLAS_THREADS, before)
    with pytest.raises(ImportError), importing():
        assert os.environ[BLAS_THREADS] == (before or "1")
        assert not gc.isenabled()
        raise ImportError
    assert os.environ.get(BLAS_THREADS) == before
    assert gc.isenabled()
