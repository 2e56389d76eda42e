"""`checkpoint` commands without a peer: their arguments, dry runs, what --exec runs, and the output of `status`."""

import time
from pathlib import Path

import pytest

from mooncake_p2p.commands.checkpoint_groups import OnSwitch, status_lines
from p2pstore.checkpoint.peer.piece_flow import Paces
from p2pstore.results import CheckpointInfo, CheckpointMember
from tests.command_line import Cli


def test_a_dry_run_says_what_would_be_published(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000_000))
    (tmp_path / "notes.txt").write_bytes(b"x")
    arguments = ["checkpoint", "publish", "m", str(tmp_path), "--dry-run"]
    said = cli(*arguments)
    assert [line.split() for line in said.out.splitlines()] == [
        ["1,000,000", "model.safetensors"],
        ["1", "notes.txt"],
    ]
    assert said.err.splitlines()[-1].startswith("would publish 2 files, 976.6 KiB, in pieces of ")
    assert "note: model.safetensors is not what it is called" in said.err
    document = cli(*arguments, "--include", "*.safetensors", "--json").json
    assert document["files"] == [{"path": "model.safetensors", "bytes": 1_000_000}]
    assert "there is no file to publish that matches" in cli(*arguments, "--exclude", "*", status=1).err
    (tmp_path / ".p2pstore").mkdir()
    (tmp_path / ".p2pstore" / "lock").touch()
    assert "publish its `current`, or --exclude '.p2pstore*'" in cli(*arguments, status=1).err
    (tmp_path / ".p2pstore" / "lock").rename(tmp_path / "new\nline")
    assert "'new\\nline'; rename or --exclude it" in cli(*arguments, status=1).err


@pytest.mark.parametrize("arguments", [["checkpoint", "--help"], ["help", "checkpoint"]])
def test_help_of_a_word_that_is_no_command_lists_what_may_follow(arguments: list[str], cli: Cli) -> None:
    printed = cli(*arguments).out
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
def test_wrong_arguments(arguments: list[str], said: str, cli: Cli) -> None:
    assert said in cli("checkpoint", *arguments, status=2).err


V1, V2 = "1" * 32, "2" * 32


def test_the_command_is_run_for_each_version_once(tmp_path: Path) -> None:
    (tmp_path / ".p2pstore").mkdir()
    ran = tmp_path / "ran"
    command = f'echo "$CHECKPOINT_NAME $CHECKPOINT_VERSION $CHECKPOINT_DIRECTORY" >> {ran}'
    on_switch = OnSwitch(command, "model", str(tmp_path))
    for version in (V1, V1, V2, V2):
        on_switch.used(version)
    expected = [f"model {version} {tmp_path}/{version}" for version in (V1, V2)]
    assert ran.read_text().splitlines() == expected
    OnSwitch(command, "model", str(tmp_path)).used(V2)
    assert ran.read_text().splitlines() == expected, "it was done before the start"
    OnSwitch(command, "model", str(tmp_path)).used(V1)
    assert len(ran.read_text().splitlines()) == 3


def test_what_did_not_end_well_is_run_again_after_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".p2pstore").mkdir()
    ran = tmp_path / "ran"
    on_switch = OnSwitch(f"echo x >> {ran}; exit 3", "model", str(tmp_path))
    on_switch.used(V1)
    on_switch.used(V1)
    assert "exit status 3" in capsys.readouterr().err
    OnSwitch(f"echo x >> {ran}", "model", str(tmp_path)).used(V1)
    OnSwitch(f"echo x >> {ran}", "model", str(tmp_path)).used(V1)
    assert ran.read_text() == "x\nx\n"


def test_where_it_cannot_be_noted_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OnSwitch("true", "model", str(tmp_path)).used(V1)
    assert "No such file" in capsys.readouterr().err


def member(name: str, state: str, done: float = 1.0, **more: object) -> CheckpointMember:
    fields: dict[str, object] = {
        "peer_id": name,
        "name": name,
        "state": state,
        "version": V1[:16],
        "done": done,
        "follows": False,
        "current": "",
        "why": "",
        "bytes_per_second": 0,
        "me": False,
    }
    return CheckpointMember(**{**fields, **more})  # type: ignore[arg-type]  # by name


def test_status_counts_who_has_it_and_says_how_long_the_slowest_needs() -> None:
    info = CheckpointInfo(
        *("default", "model", "12D3", "node-1", V1, time.time() - 30, 1000 << 20, 3, 4),
        *("", V1, True, False, True),
        (
            member("a", "publishing"),
            member("b", "verified", follows=True, current=V1[:16]),
            member("c", "fetching", 0.5, bytes_per_second=100 << 20, follows=True),
            member("d", "fetching", 0.9, bytes_per_second=1 << 20),
            member("e", "failed", why="disk full"),
            member("f", "seeding", version=V2[:16]),
        ),
    )
    first, second = status_lines(info)
    assert first.startswith(f"model@{V1}: 1000.0 MiB, 3 files, published 30 s ago by node-1 (12D3)")
    assert second == (
        "2 have it; 2 fetch it, 100 s left; 1 failed; 2 followers; 1 of them use 111111111111"
    )


def test_paces_are_known_after_the_first_progress_and_forgotten_at_the_end() -> None:
    paces, part = Paces(), (7, b"v")
    paces.look({part: 100}, 0.0)
    assert paces.permille_per_second(part) == 0.0
    paces.look({part: 300}, 10.0)
    paces.look({part: 300}, 15.0)
    assert paces.permille_per_second(part) == 20.0
    paces.look({part: 0}, 20.0)
    assert paces.permille_per_second(part) == 0.0, "begun anew"
    paces.look({part: 500}, 30.0)
    paces.look({}, 31.0)
    assert paces.permille_per_second(part) == 0.0
