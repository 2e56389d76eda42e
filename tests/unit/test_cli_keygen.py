"""`keygen` writes a key once, for its owner only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_p2p.main import run
from p2pstore.keyring import KEY_BYTES, parse_cluster_keys


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
