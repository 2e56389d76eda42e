"""The command's surface: its list of commands, its speed, its exit statuses."""

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from mooncake_p2p import output
from mooncake_p2p.commands.join import SETTINGS
from mooncake_p2p.main import MEANT, LazyCommands, function_name, run
from mooncake_p2p.manual import COMMANDS
from mooncake_p2p.output import EXIT_CODES, AlreadyTold, CommandFailed, ExitCode, describe, exit_code
from p2pstore import errors
from p2pstore.config import PeerConfig
from tests.command_line import Cli

HEAVY = ("pydantic", "numpy", "trio", "libp2p", "rich", "msgspec", "prometheus_client", "p2pstore.peer")


def function_of(name: str) -> Any:
    return getattr(import_module(f"mooncake_p2p.commands.{COMMANDS[name][0]}"), function_name(name))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], ["--nonsense"]])
def test_answers_without_importing_what_is_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; from mooncake_p2p.main import run; run(sys.argv[1:]);"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, check=True, timeout=30
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    assert [module for module in HEAVY if module in modules] == []
    assert [module for module in modules if module.startswith("mooncake_p2p.commands")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    script = (
        f"import sys; from mooncake_p2p.main import run; assert run([*{name!r}.split(), '--help']) == 0;"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert [module for module in HEAVY if module in modules] == []


def test_help_lists_every_command(cli: Cli) -> None:
    shown = cli("--help").out
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in shown
        assert summary in " ".join(shown.split())
    assert "Exit status: 0 done" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_how_the_command_describes_itself(name: str) -> None:
    first_line = (inspect.getdoc(function_of(name)) or "").partition("\n")[0]
    assert first_line.startswith(COMMANDS[name][1].rstrip("."))


def test_join_has_an_option_for_every_setting() -> None:
    options = set(inspect.signature(function_of("join")).parameters)
    options -= {"config", "detach", "invite", "json"}
    assert options == set(PeerConfig.__struct_fields__)


@pytest.mark.parametrize("name", PeerConfig.__struct_fields__)
def test_option_of_join_is_as_its_setting(name: str) -> None:
    setting, hint = SETTINGS[name], get_type_hints(PeerConfig)[name]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    assert (setting.form.split("|") if setting.form.islower() else []) == [*choices]
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(each) or each for each in members}
    assert (setting.kind is list) == (list in kinds)
    assert (setting.kind is bool) == (hint is bool)
    assert (setting.kind is int) == (int in kinds and str not in kinds)
    default = getattr(PeerConfig(), name)
    if isinstance(default, str | float) and default and not isinstance(default, bool):
        assert setting.default == (default if isinstance(default, str) else f"{default:g}")


def test_no_arguments_show_the_help_and_are_a_mistake(cli: Cli) -> None:
    captured = cli(status=ExitCode.USAGE)
    assert captured.out == ""
    assert "Commands:" in captured.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["putt"], "did you mean 'put'?"),
        (["set", "k", "v"], "no such command 'set', did you mean 'put'? (see `mooncake-p2p --help`)"),
        (["del", "k"], "did you mean 'rm'?"),
        (["exists", "k"], "did you mean 'locate'?"),
        (["info"], "did you mean 'stats'?"),
        (["version"], "did you mean '--version'?"),
        (["help", "set"], "did you mean 'put'?"),
        (["--wrong"], "no such option"),
        (["--socket", "x", "ls"], "no such option: --socket; options of a command stand behind"),
        (
            ["put", "k", "f", "--replcas", "2"],
            "no such option: --replcas, did you mean --replicas? (see `mooncake-p2p put --help`)",
        ),
        (["ls", "--limit", "x"], "'--limit': must be a number"),
        (["put"], "missing argument 'KEY'"),
        (["put", "k", "f", "extra"], "unexpected extra argument"),
        (["put", "k", "--pin", "medium"], "'--pin': 'medium' is not one of 'none', 'soft', 'hard'"),
        (["put", "k", "--replicas", "0"], "'--replicas': must be at least 1"),
        (["put", "k", "--ttl", "soon"], "--ttl: 'soon' is not a duration"),
        (["put", "", "f"], "the key is empty"),
        (["get", "k" * 1025], "1,025 bytes"),
        (["get", "k", "--json"], "--json needs -o"),
        (["ls", "--limit", "100001"], "'--limit': must be at most 100000"),
        (["stats", "--timeout", "0"], "--timeout"),
        (["stats", "--interval", "5"], "--interval is for --watch"),
        (["checkpoint", "publish", "name", ""], "DIR is empty"),
        (["checkpoint", "fetch", "name@", "here"], "name@: the version is empty"),
        (["put", "k", ""], "FILE|- is empty"),
        (["get", "k", "-o", ""], "--output is empty"),
        (["checkpoint", "follow", "name", "here", "--exec", ""], "--exec is empty"),
        (["keygen", ""], "FILE is empty"),
        (["doctor", "--directory", ""], "--directory is empty"),
        (["stats", "--timeout", "nan"], "--timeout"),
        (["leave", "--drain", "-1"], "--drain"),
        (["demo", "--blocks", "100"], "--blocks: 100 blocks"),
        (["demo", "--memory", "lots"], "--memory"),
        (["join", "--transport", "pigeon"], "--transport"),
        *(
            (["join", option, ""], f"{option} is empty: give a value or leave it out")
            for option in (
                *("--invite", "--config", "--cluster-key-file", "--name", "--log-file"),
                *("--allow-file", "--bootstrap", "--max-objects", "--transport", "--memory"),
            )
        ),
        (["join", "--log-level="], "--log-level is empty"),
        (["bench", "--size", "0"], "--size: must be at least 1 byte"),
        (["bench", "--seconds", "61"], "--seconds"),
        (["bench", "tracks"], "unexpected extra argument"),
        (["ls", "--socket", ""], "--socket is empty"),
        (["ls", "--namespace", ""], "--namespace: a namespace is"),
        (["join", "--join-timeout", "x"], "--join-timeout"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(arguments: list[str], complaint: str, cli: Cli) -> None:
    captured = cli(*arguments, status=ExitCode.USAGE)
    assert bool(captured.out) == ("--json" in arguments)
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert complaint.lower() in captured.err.lower()


def test_names_of_other_stores_lead_to_commands_that_exist() -> None:
    assert set(MEANT.values()) <= {*COMMANDS, "--version"}
    assert not MEANT.keys() & {name.split()[0] for name in COMMANDS}


def test_a_peer_is_named_wherever_a_socket_is() -> None:
    for name in COMMANDS:
        options = {option for each in LazyCommands()[name].params for option in each.opts}
        of_client = "--socket" in options and name not in ("join", "config")
        assert options.isdisjoint({"-p", "--peer-name"}) != of_client, name


def test_the_name_of_a_peer_stands_for_its_socket(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    asked: list[str | None] = []

    def connect(socket: str | None, *arguments: object, **options: object) -> None:
        asked.append(socket)
        raise errors.StoreClosed("closed")

    monkeypatch.setattr("mooncake_p2p.commands.stats.connected", connect)
    monkeypatch.setattr("p2pstore.local.socket_paths.live_sockets", lambda: [Path("/run/a.sock")])
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", "/run/b.sock")
    for words in (["-p", "a"], ["--peer-name", "a"], []):
        cli("stats", *words, status=ExitCode.NO_PEER)
    assert asked == ["/run/a.sock", "/run/a.sock", "/run/b.sock"]
    complaint = cli("stats", "-p", "c", status=ExitCode.NO_PEER).err
    assert "no peer called 'c' runs on this machine: these do: a" in complaint
    complaint = cli("stats", "-p", "a", "--socket", "x", status=ExitCode.USAGE).err
    assert "-p and --socket both name a peer" in complaint


def test_every_error_has_its_status() -> None:
    statuses = {
        kind.__name__: exit_code(kind("m", 1) if kind is errors.BufferTooSmall else kind("m"))
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.P2PStoreError)
    }
    special = {
        "NoSuchKey": 3,
        "NoLocalPeer": 4,
        "AmbiguousLocalPeer": 4,
        "StoreClosed": 4,
        "DeadlineExceeded": 5,
        "FollowersLag": 5,
        "Unavailable": 6,
        "ConfigError": 2,
    }
    assert {name: code for name, code in statuses.items() if code != 1} == special
    assert exit_code(ValueError("bad")) == 2
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(OSError(5, "no")) == 1
    assert exit_code(RuntimeError("bug")) == 1
    assert exit_code(CommandFailed("m", ExitCode.USAGE)) == 2


def test_no_row_of_the_table_is_hidden_by_an_earlier_one() -> None:
    for position, (kind, code) in enumerate(EXIT_CODES):
        assert not any(issubclass(kind, earlier) for earlier, _ in EXIT_CODES[:position]), code


def test_descriptions_are_one_line_and_say_what_to_do() -> None:
    assert describe(errors.NoSuchKey("no such key: k")) == "no such key: k"
    red = "names \x1b[31mred\ud800 漢, and\nno more"
    assert describe(errors.CheckpointRefused(red)) == r"names \x1b[31mred\ud800 漢, and no more"
    assert describe(OSError(13, "Permission denied", "/x")) == "/x: Permission denied"
    assert "free some space" in describe(OSError(28, "No space left on device"))
    assert describe(OSError(28, "x is full; free some space there")).count("free some space") == 1
    assert describe(errors.Unavailable("a\nb\n")) == "a b"
    assert "--debug" in describe(RuntimeError("bug"))
    assert describe(errors.StoreClosed()) == "StoreClosed"


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (errors.Unavailable("both holders are gone"), 6, "error: both holders are gone\n"),
        (RuntimeError("oops"), 1, "error: unexpected RuntimeError: oops; "),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_status_and_a_line(
    error: BaseException, status: int, shown: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("mooncake_p2p.commands.stats.connected", fail)
    captured = cli("stats", status=status)
    assert captured.err.startswith(shown)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_where(how: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("mooncake_p2p.commands.stats.connected", fail)
    if how == "environment":
        monkeypatch.setenv("MOONCAKE_P2P_DEBUG", "1")
    captured = cli(*(["--debug"] if how == "option" else []), "stats", status=1)
    assert "Traceback" in captured.err
    assert captured.err.splitlines()[-1].startswith("error: unexpected RuntimeError")


def test_a_mistake_in_the_environment_is_named_so(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("MOONCAKE_P2P_TIMEOUT", "zz")
    usage = ExitCode.USAGE
    assert cli("stats", status=usage).err.startswith("error: MOONCAKE_P2P_TIMEOUT: 'zz' is not a")
    assert cli("stats", "--timeout", "yy", status=usage).err.startswith(
        "error: --timeout: 'yy' is not a"
    )
    monkeypatch.delenv("MOONCAKE_P2P_TIMEOUT")
    for variable in ("MOONCAKE_P2P_INVITE", "MOONCAKE_P2P_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "")
            assert cli("join", status=usage).err.startswith(f"error: {variable} is empty")


def test_a_full_standard_output_is_named() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_p2p", "help"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
        )
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith(b"error: standard output: No space left on device")


@pytest.mark.parametrize("arguments", [["-h"], ["get", "-h"]])
def test_help_has_a_short_option(arguments: list[str], cli: Cli) -> None:
    assert "Usage: mooncake-p2p" in cli(*arguments).out


def test_a_deadline_says_which_option_is_about_it() -> None:
    assert "--timeout" in describe(errors.DeadlineExceeded("no answer"))
    assert describe(errors.DeadlineExceeded("give --timeout")) == "give --timeout"


def test_a_get_into_a_full_device_names_it() -> None:
    from mooncake_p2p.commands.put_get import _destination

    with pytest.raises(OSError, match="/dev/full"), _destination("/dev/full") as sink:
        sink(lambda: memoryview(b"value"))


FAILING = {
    "join": ["--config", "/none/file"],
    "put": ["k", "/dev/null"],
    "get": ["k", "-o", "/dev/null"],
    "ls": [],
    "rm": ["k"],
    "flush": ["n", "--yes"],
    "locate": ["k"],
    "pin": ["k"],
    "unpin": ["k"],
    "replicate": ["k", "-n", "2"],
    "stats": [],
    "peers": [],
    "doctor": ["--seconds", "soon"],
    "support-bundle": ["-o", "/none/file"],
    "leave": [],
    "invite": [],
    "config": ["show", "--config", "/none/file"],
    "keygen": ["/none/file"],
    "bench": [],
    "bench trace": ["/none/file", "--simulate"],
    "checkpoint publish": ["n", "/none"],
    "checkpoint fetch": ["n", "d"],
    "checkpoint follow": ["n", "d"],
    "checkpoint update": ["n"],
    "checkpoint status": ["n"],
    "checkpoint list": [],
    "checkpoint rm": ["n", "--yes"],
    "demo": ["--memory", "lots"],
}
"""Arguments with which each command that has --json fails where no peer runs."""


def test_failing_arguments_are_known_for_each_command_with_json() -> None:
    with_json = {name for name in COMMANDS if "json" in inspect.signature(function_of(name)).parameters}
    assert set(FAILING) == with_json


@pytest.mark.parametrize("arguments", [None, ["--nonsense"], ["a", "b", "c"]])
@pytest.mark.parametrize("name", FAILING)
def test_with_json_an_error_is_one_object_on_stdout(
    name: str,
    arguments: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", str(tmp_path / "none"))
    words = [*name.split(), *(FAILING[name] if arguments is None else arguments)]
    status = run([*words, "--json"])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    error = document["error"]
    assert error["status"] == status != 0
    assert error["type"].isidentifier()
    assert captured.err == f"error: {error['message']}\n"
    assert run(words) == status
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (errors.NoSuchKey("no such key: k"), "NoSuchKey", 3),
        (errors.ConfigError("c"), "ConfigError", 2),
        (ValueError("v"), "UsageError", 2),
        (PermissionError(13, "Permission denied", "/f"), "PermissionError", 1),
        (CommandFailed("f"), "CommandFailed", 1),
        (AlreadyTold(errors.Unavailable("gone")), "Unavailable", 6),
        (KeyboardInterrupt(), "Interrupted", 130),
        (SystemExit(143), "Terminated", 143),
        (RuntimeError("bug"), "RuntimeError", 1),
    ],
)
def test_what_json_says_of_an_error(
    error: BaseException, kind: str, status: int, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("mooncake_p2p.commands.stats.connected", fail)
    said = cli("stats", "--json", status=status).json["error"]
    assert (said["type"], said["status"]) == (kind, status)
    assert said["message"]


def test_the_error_stands_beside_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    output.json_output.begin()
    output.print_json({"removed": ["a"]})
    output.json_output.end({"type": "NoSuchKey"})
    assert json.loads(capsys.readouterr().out) == {"removed": ["a"], "error": {"type": "NoSuchKey"}}
    output.json_output.begin()
    output.print_json_line([1])
    output.json_output.end({"type": "Interrupted"}, stopped=True)
    assert capsys.readouterr().out == "[1]\n"
