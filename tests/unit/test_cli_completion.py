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

from mooncake_p2p import completion
from mooncake_p2p.main import COMMANDS, run
from p2pstore import blocking
from p2pstore.results import KeyPage, ListedKey

ROOT = Path(__file__).parents[2]
PRESS_TAB = """
eval "$(mooncake-p2p completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_mooncake_p2p_completion mooncake-p2p
printf '%s\\n' "${COMPREPLY[@]}"
"""


def press_tab(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    program = tmp_path / "mooncake-p2p"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_p2p "$@"\n')
    program.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", "mooncake-p2p", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
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
    assert capsys.readouterr().out.split() == [name for name in COMMANDS if " " not in name]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_MOONCAKE_P2P_COMPLETE=complete_" + shell in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=30)


def test_no_shell_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err


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
            [
                ListedKey(key, 1, 1, [], "none", False, None)
                for key in keys
                if key.startswith(prefix)
            ],
            False,
        )


@pytest.mark.parametrize(("seconds", "offered"), [(0.0, ["a1", "a2"]), (30.0, ["a1"])])
def test_keys_come_from_those_who_answer_in_time(
    seconds: float, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lister = Lister(["a1", "a b", "a$c"], ["a2", "b"], seconds)
    asked: list[Any] = []

    def connect(socket: str | None, **options: Any) -> Lister:
        asked.append((socket, options["namespace"]))
        return lister

    monkeypatch.setattr(blocking, "connect", connect)
    begin = time.monotonic()
    assert completion.keys_beginning("a", "/s", "n") == offered
    assert time.monotonic() - begin < 5.0
    assert asked == [("/s", "n")]


def test_a_peer_that_hangs_does_not_hold_up_the_shell(tmp_path: Path) -> None:
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        begin = time.monotonic()
        assert completion.keys_beginning("", path, "default") == []
        assert time.monotonic() - begin < 3.0
