"""Completion with Tab: bash itself with the script that the command prints."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mooncake_p2p.commands import completion
from mooncake_p2p.commands.completion import candidates
from mooncake_p2p.main import LazyCommands
from mooncake_p2p.manual import COMMANDS
from p2pstore import blocking
from p2pstore.results import KeyPage, ListedKey
from tests.command_line import Cli
from tests.commands import ran

ROOT = Path(__file__).parents[2]
PRESS_TAB = """
eval "$(mooncake-p2p completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_mooncake_p2p_completion mooncake-p2p
printf '%s\\n' "${COMPREPLY[@]}"
"""


def press_tab(tmp_path: Path, *words: str) -> list[str]:
    """The words that bash offers for the last of these."""
    program = tmp_path / "mooncake-p2p"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_p2p "$@"\n')
    program.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = ran(
        ["bash", "-c", PRESS_TAB, "bash", "mooncake-p2p", *words],
        30,
        check=True,
        cwd=ROOT,
        env={**environment, "MOONCAKE_P2P_SOCKET": str(tmp_path / "none")},
    )
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pe"], ["peers"]),
        (["get", "--wa"], ["--wait"]),
        (["put", "k", "f", "--pin", ""], ["none", "soft", "hard"]),
        (["completion", "z"], ["zsh"]),
        (["get", ""], []),
        (["che"], ["checkpoint"]),
        (["checkpoint", "s"], ["status"]),
        (["help", "che"], ["checkpoint"]),
        (["get", "--socket", "xyz"], []),
        (["get", '"--wa'], ["--wait"]),
    ],
)
def test_bash_offers(words: list[str], offered: list[str], tmp_path: Path) -> None:
    assert press_tab(tmp_path, *words) == offered


def test_commands_are_offered_without_loading_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake_p2p import main

    monkeypatch.setenv("COMP_WORDS", "mooncake-p2p ")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setattr(main, "import_module", None)
    assert main.complete("complete_bash") == 0
    offered = capsys.readouterr().out.split()
    assert offered == list(dict.fromkeys(name.split()[0] for name in COMMANDS))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, cli: Cli) -> None:
    script = cli("completion", shell).out
    assert "_MOONCAKE_P2P_COMPLETE=complete_" + shell in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=30)


def test_no_shell_of_that_name(cli: Cli) -> None:
    assert "bash" in cli("completion", "csh", status=2).err


class Lister:
    """A client that knows some keys here, and more elsewhere after a while."""

    def __init__(self, here: list[str], elsewhere: list[str], seconds: float) -> None:
        self.here, self.elsewhere, self.seconds = here, elsewhere, seconds

    def __enter__(self) -> Lister:
        return self

    def __exit__(self, *error: object) -> None: ...

    def list_keys(self, prefix: str, *, limit: int, local: bool) -> KeyPage:
        if not local:
            time.sleep(self.seconds)
        keys = self.here if local else self.here + self.elsewhere
        return KeyPage(
            [ListedKey(key, 1, 1, [], "none", False, None) for key in keys if key.startswith(prefix)],
            False,
        )


@pytest.mark.parametrize(("seconds", "offered"), [(0.0, ["a1", "a2"]), (30.0, ["a1"])])
def test_keys_come_from_those_who_answer_in_time(
    seconds: float, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lister = Lister(["a1", "a b", "a$c"], ["a2", "b"], seconds)
    asked: list[Any] = []

    def connect(socket: Path, **options: Any) -> Lister:
        asked.append((socket, options["namespace"]))
        return lister

    monkeypatch.setattr(blocking, "connect", connect)
    monkeypatch.setattr("p2pstore.local.socket_paths.answers", lambda path: True)
    begin = time.monotonic()
    words = ["get", "--socket", "/s", "--namespace=n", "-o", "file"]
    assert list(candidates(words, "a").values) == offered
    assert time.monotonic() - begin < 5.0
    assert asked == [(Path("/s"), "n")]


def test_names_of_peers_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [Path("/run/a1.sock"), Path("/run/b.sock")]
    monkeypatch.setattr("p2pstore.local.socket_paths.live_sockets", lambda: live)
    assert list(candidates(["get", "-p"], "").values) == ["a1", "b"]
    assert list(candidates(["get"], "--peer-name=a").values) == ["--peer-name=a1"]


def test_a_peer_that_hangs_does_not_hold_up_the_shell(tmp_path: Path) -> None:
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        begin = time.monotonic()
        for command in (["get"], ["checkpoint", "fetch"], ["doctor", "--peer"]):
            assert not candidates([command[0], "--socket", path, *command[1:]], "").values
        assert time.monotonic() - begin < 6.0


def places_of(name: str) -> list[list[str]]:
    """Words behind which something is to be completed: arguments and the value of each option."""
    command: Any = LazyCommands()[name]
    options = [each for each in command.params if each.param_type_name == "option"]
    behind = [[option] for each in options if not each.is_flag for option in each.opts]
    return [[*name.split(), *each] for each in ([], ["x"], ["x", "y"], ["--json"], *behind)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_place_of_every_command_without_a_peer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", str(tmp_path / "none"))
    for variable in ("CONFIG", "TIMEOUT", "NAMESPACE"):  # whatever is wrong with it
        monkeypatch.setenv(f"MOONCAKE_P2P_{variable}", "/none\x1f")
    for shell in ("bash", "zsh", "fish"):
        for words in places_of(name) if shell == "bash" else [name.split()]:
            for word in ("", "-", "--s", "'", "\\", "a@b:c=d"):
                line = " ".join(["mooncake-p2p", *words, word])
                assert completion.answer(f"complete_{shell}", {"COMP_WORDS": line}) == 0, line
                answer = capsys.readouterr()
                assert "Traceback" not in answer.out
                assert answer.err == ""


@pytest.mark.parametrize(
    ("words", "word", "offered"),
    [
        ([], "", sorted({name.split()[0] for name in COMMANDS})),
        (["--debug"], "che", ["checkpoint"]),
        (["checkpoint"], "f", ["fetch", "follow"]),
        (["checkpoint"], "-", []),
        (["bench"], "--si", ["--size"]),
        (["help", "checkpoint"], "pu", ["publish"]),
        (["help", "get"], "", []),
        (["join", "--transport"], "r", ["rdma"]),
        (["join"], "--transport=r", ["--transport=rdma"]),
        (["join", "--directory"], "p", ["partitioned"]),
        (["get", "--", "-k"], "--", []),
        (["put", "k", "f", "too-much"], "", []),
        (["nonsense"], "", []),
        (["nonsense", "-"], "-", []),
        (["get", "-o", "f"], "--js", ["--json"]),
    ],
)
def test_what_a_word_may_become(words: list[str], word: str, offered: list[str]) -> None:
    assert sorted(candidates(words, word).values) == offered


def test_files_are_offered_where_a_path_goes() -> None:
    assert candidates(["put", "k"], "").files
    assert candidates(["get", "-o"], "x").files
    assert candidates(["join"], "--ssd=x").files
    assert candidates(["checkpoint", "publish", "n"], "").files
    assert not candidates(["put", "k", "--replicas"], "").files
    assert not candidates(["stats"], "").files


def test_sockets_of_live_peers_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "mooncake-p2p"
    folder.mkdir(mode=0o755)
    path = str(folder / "a.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        assert list(candidates(["get", "--socket"], str(tmp_path)).values) == [path]


def test_bash_replaces_a_word_from_its_last_break_character_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = {"COMP_WORDS": "mooncake-p2p join --transport=r"}
    assert completion.answer("complete_bash", line | {"COMP_WORDBREAKS": " =:"}) == 0
    assert capsys.readouterr().out == "rdma\n"
    assert completion.answer("complete_fish", line | {"COMP_WORDBREAKS": " =:"}) == 0
    assert capsys.readouterr().out == "--transport=rdma\n"


def test_the_script_of_an_earlier_version_gets_nothing_that_it_could_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = {"_TYPER_COMPLETE_ARGS": "mooncake-p2p g", "COMP_WORDS": "mooncake-p2p g"}
    assert completion.answer("complete_zsh", old) == 1
    assert capsys.readouterr().out == ""


def test_without_a_peer_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    script = (
        "import sys; from mooncake_p2p.commands.completion import candidates;"
        "candidates(['get'], ''); candidates(['checkpoint', 'fetch'], '');"
        "assert not {'numpy', 'trio', 'rich', 'p2pstore.peer', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        timeout=30,
        env={**os.environ, "MOONCAKE_P2P_SOCKET": str(tmp_path / "none")},
    )
