"""`keygen` writes a key once, for its owner only."""

import errno
import json
import os
from pathlib import Path

import pytest

from mooncake_p2p.main import run
from p2pstore.access.keyring import KEY_BYTES, KeyRing, parse_cluster_keys


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


def test_a_key_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert run(["keygen", str(path)]) == 0
    key = path.read_text()
    capsys.readouterr()
    assert run(["keygen", str(path)]) == 1
    assert path.read_text() == key
    captured = capsys.readouterr()
    assert "exists" in captured.err
    assert key.strip() not in captured.err


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keygen", str(tmp_path / "none" / "key")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write ")


def test_a_key_is_replaced_in_three_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, link = tmp_path / "key", tmp_path / "link"
    assert run(["keygen", str(path)]) == 0
    link.symlink_to(path)
    [old] = ring(path).keys
    assert run(["keygen", "--add", str(link)]) == 0
    assert "--promote" in capsys.readouterr().err
    first, new = ring(path).keys
    assert first == old
    assert run(["keygen", "--promote", str(link)]) == 0
    assert "--retire" in capsys.readouterr().err
    assert ring(path).keys == (new, old)
    assert run(["keygen", "--retire", "--json", str(link)]) == 0
    assert ring(path).keys == (new,)
    captured = capsys.readouterr()
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    path = tmp_path / "key"
    assert run(["keygen", str(path)]) == 0
    before = path.read_text()
    assert run(["keygen", *arguments, str(path)]) == status
    assert words in capsys.readouterr().err
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_that_is_under_way_is_not_run_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    assert run(["keygen", str(path)]) == 0
    (tmp_path / "key.new").touch()
    assert run(["keygen", "--add", str(path)]) == 1
    assert "key.new is left" in capsys.readouterr().err
    assert run(["keygen", "--add", str(tmp_path / "none")]) == 1
    assert "none does not exist; `mooncake-p2p keygen" in capsys.readouterr().err


def test_a_full_disk_leaves_no_file_that_the_next_try_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert run(["keygen", str(path)]) == 1
        assert "No space left" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
    assert run(["keygen", str(path)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert run(["keygen", "--add", str(path)]) == 1
    assert len(ring(path).keys) == 1
    assert run(["keygen", "--add", str(path)]) == 0
