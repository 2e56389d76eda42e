"""`checkpoint`: what the command says before it needs a peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_p2p.main import run


def test_a_dry_run_says_what_would_be_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000_000))
    (tmp_path / "notes.txt").write_bytes(b"x")
    arguments = ["checkpoint", "publish", "m", str(tmp_path), "--dry-run"]
    assert run(arguments) == 0
    said = capsys.readouterr()
    assert [line.split() for line in said.out.splitlines()] == [
        ["1,000,000", "model.safetensors"],
        ["1", "notes.txt"],
    ]
    assert said.err.splitlines()[-1].startswith("would publish 2 files, 976.6 KiB, in pieces of ")
    assert "note: model.safetensors is not what it is called" in said.err
    assert run([*arguments, "--include", "*.safetensors", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == [{"path": "model.safetensors", "bytes": 1_000_000}]
    assert run([*arguments, "--exclude", "*"]) == 1
    assert "there is no file to publish that matches" in capsys.readouterr().err
    (tmp_path / ".p2pstore").mkdir()
    (tmp_path / ".p2pstore" / "lock").touch()
    assert run(arguments) == 1
    assert "publish its `current`, or --exclude '.p2pstore*'" in capsys.readouterr().err
    (tmp_path / ".p2pstore" / "lock").rename(tmp_path / "new\nline")
    assert run(arguments) == 1
    assert "'new\\nline'; rename or --exclude it" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["checkpoint", "--help"], ["help", "checkpoint"]])
def test_help_of_a_word_that_is_no_command_lists_what_may_follow(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Usage: mooncake-p2p checkpoint COMMAND")
    assert "checkpoint follow   Follow a checkpoint." in printed
    assert "leave" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "checkpoint is followed by one of: publish, fetch"),
        (["nonsense"], "checkpoint is followed by one of: publish, fetch"),
        (["fetch", "m"], "missing argument 'DIR'"),
        (["fetch", "m", ".", "--keep", "0"], "--keep"),
        (["fetch", "m", ".", "--limit-rate", "fast"], "--limit-rate"),
        (["publish", "m", ".", "--piece-size", "x"], "--piece-size"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", *arguments]) == 2
    assert said in capsys.readouterr().err
