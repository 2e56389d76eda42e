"""`keygen` writes a key once, for its owner only."""

import errno
import json
import os
from pathlib import Path

import pytest

from mooncake_p2p.main import run
from p2pstore.access.keyring import KEY_BYTES, KeyRing, parse_cluster_keys
from tests.command_line import Cli


def test_a_key_is_random_private_and_accepted_by_join(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    umask = os.umask(0)
    try:
        assert [run(["keygen", str(path)]) for path in paths] == [0, 0]
    finally:
        os.umask(umask)
    rings = [parse_cluster_keys(path.read_text(), str(path)) for path in paths]
    assert rings[0].keys != rings[1].keys
    assert len(rings[0].keys[0]) == KEY_BYTES
    assert paths[0].stat().st_mode & 0o777 == 0o600


def test_a_key_is_never_replaced(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "key"
    cli("keygen", path)
    key = path.read_text()
    printed = cli("keygen", path, status=1)
    assert path.read_text() == key
    captured = printed
    assert "exists" in captured.err
    assert key.strip() not in captured.err


def test_a_place_that_cannot_be_written(tmp_path: Path, cli: Cli) -> None:
    assert cli("keygen", tmp_path / "none" / "key", status=1).err.startswith("error: cannot write ")


def test_a_key_is_replaced_in_three_steps(tmp_path: Path, cli: Cli) -> None:
    path, link = tmp_path / "key", tmp_path / "link"
    cli("keygen", path)
    link.symlink_to(path)
    [old] = ring(path).keys
    assert "--promote" in cli("keygen", "--add", link).err
    first, new = ring(path).keys
    assert first == old
    assert "--retire" in cli("keygen", "--promote", link).err
    assert ring(path).keys == (new, old)
    printed = cli("keygen", "--retire", "--json", link)
    assert ring(path).keys == (new,)
    captured = printed
    assert json.loads(captured.out) == {"file": str(link), "keys": [ring(path).ids[0].hex()]}
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert new.hex() not in captured.out + captured.err


def ring(path: Path) -> KeyRing:
    return parse_cluster_keys(path.read_text(), str(path))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--promote"], 2, "one key only"),
        (["--retire"], 2, "none to retire"),
        (["--add", "--promote"], 2, "one at a time"),
    ],
)
def test_a_step_that_cannot_be_taken_leaves_the_file(
    tmp_path: Path, cli: Cli, arguments: list[str], status: int, words: str
) -> None:
    path = tmp_path / "key"
    cli("keygen", path)
    before = path.read_text()
    assert words in cli("keygen", *arguments, path, status=status).err
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_that_is_under_way_is_not_run_into(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "key"
    cli("keygen", path)
    (tmp_path / "key.new").touch()
    assert "key.new is left" in cli("keygen", "--add", path, status=1).err
    printed = cli("keygen", "--add", tmp_path / "none", status=1)
    assert "none does not exist; `mooncake-p2p keygen" in printed.err


def test_a_full_disk_leaves_no_file_that_the_next_try_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    path = tmp_path / "key"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert "No space left" in cli("keygen", path, status=1).err
        assert list(tmp_path.iterdir()) == []
    cli("keygen", path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        cli("keygen", "--add", path, status=1)
    assert len(ring(path).keys) == 1
    cli("keygen", "--add", path)
