"""Directories in which others may have planted something: nothing outside is written, and nothing is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pstore.checkpoint.content.directory_versions import (
    PieceRecord,
    kept_manifest,
    part_of,
    write_part,
)
from p2pstore.errors import ConfigError
from p2pstore.integrations.mooncake.tensor_format import read_one, write_one
from p2pstore.state.folder import Folder, replace_file

VERSION = bytes(32)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def write_version(folder: Path) -> None:
    write_part(folder, VERSION, {1}, 3)
    assert part_of(folder, VERSION, 3) == frozenset({1})


def write_tensor(folder: Path) -> None:
    write_one(str(folder / "one.safetensors"), "x", "uint8", [3], memoryview(b"abc"))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_version, f".p2pstore/{VERSION.hex()}.part.new"),
        (write_version, f".p2pstore/{VERSION.hex()}.part"),
        (write_tensor, "one.safetensors.part"),
        (lambda folder: replace_file(folder / "file", b"new"), "file.new"),
        (lambda folder: replace_file(folder / "file", b"new"), "file"),
    ],
)
def test_planted_links_are_replaced(
    tmp_path: Path, victim: Path, write: Callable[[Path], None], name: str
) -> None:
    folder = tmp_path / "folder"
    (folder / ".p2pstore").mkdir(parents=True)
    (folder / name).symlink_to(victim)
    write(folder)
    assert victim.read_text() == "precious"
    assert not any(each.is_symlink() for each in folder.rglob("*"))


def test_only_regular_files_are_opened(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
            PieceRecord(tmp_path / name, VERSION, 8, bytes(36))
        with Folder(tmp_path) as folder:
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
                    folder.open(name, flags)
    state = tmp_path / ".p2pstore"
    state.mkdir()
    os.mkfifo(state / f"{VERSION.hex()}.manifest")
    assert kept_manifest(tmp_path, VERSION) is None
    assert victim.read_text() == "precious"


def test_a_tensor_file_is_written_where_it_should_be(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_tensor(tmp_path)
    assert read_one(str(tmp_path / "one.safetensors"), "x")[0].tolist() == [97, 98, 99]
