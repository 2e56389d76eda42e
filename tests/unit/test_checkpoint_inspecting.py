"""Notes to a publisher about its directory: files that are left out, broken or missing."""

import json
from pathlib import Path

import pytest

from p2pstore.checkpoint.content.manifest import bookkeeping_in, nearest, unmatched
from p2pstore.checkpoint.content.sources import SourceDirectory, inspect
from p2pstore.errors import CheckpointRefused
from tests.unit.test_checkpoint_hashing import write
from tests.unit.test_safetensors import PAGE, POINTER, entry, file_with

GOOD = file_with({"w": entry()})
INDEX = json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}).encode()
DOWNLOAD = {
    ".git/HEAD": b"ref",
    ".gitattributes": b"*.bin lfs",
    ".cache/huggingface/.gitignore": b"*",
    ".cache/huggingface/download/a.safetensors.metadata": b"x",
    ".cache/other": b"kept",
    "deep/.git": b"gitdir: elsewhere",
    "b.safetensors.1a2b.incomplete": b"half",
    "config.json.lock": b"",
    "a.safetensors": GOOD,
}


def told(root: Path, include: list[str] | None = None, exclude: list[str] | None = None) -> str:
    source = SourceDirectory(root, include or [], exclude or [])
    return "\n".join(inspect(source, include or [], exclude or []))


def test_what_belongs_to_a_download_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path, DOWNLOAD)
    source = SourceDirectory(tmp_path)
    paths = [file.path for file in source.files]
    assert paths == [".cache/other", ".gitattributes", "a.safetensors"]
    said = told(tmp_path)
    (tmp_path / "void").mkdir()
    assert "empty folders are left out: void/" in told(tmp_path)
    assert said.startswith("left out, as it belongs to a download: ")
    assert "and 1 more" in said
    assert set(source.left_out) == {
        ".git/",
        ".cache/huggingface/",
        "deep/.git",
        "b.safetensors.1a2b.incomplete",
        "config.json.lock",
    }
    # A pattern that names it includes it.
    wanted = SourceDirectory(tmp_path, ["*.lock", ".git/*", "*.safetensors"])
    assert [file.path for file in wanted.files] == [".git/HEAD", "a.safetensors", "config.json.lock"]
    assert len(SourceDirectory(tmp_path, ["*"]).files) == 3
    (tmp_path / "only" / ".git").mkdir(parents=True)
    with pytest.raises(CheckpointRefused, match=r"no file to publish \(left out: .git/\)"):
        SourceDirectory(tmp_path / "only")


@pytest.mark.parametrize(
    ("path", "mark"),
    [
        ("a/.git/config", ".git"),
        (".gitignore", ""),
        ("x.git", ""),
        (".cache/huggingface", ".cache/huggingface"),
        (".cache/x", ""),
        ("model.lock.bin", ""),
        ("a.lock", ".lock"),
    ],
)
def test_bookkeeping(path: str, mark: str) -> None:
    assert bookkeeping_in(path) == mark


def test_an_index_that_names_an_absent_file_is_refused_with_its_likely_cause(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors.index.json": INDEX, "a.safetensors": GOOD})
    with pytest.raises(
        CheckpointRefused,
        match=r"index.json names b.safetensors, and there is no such file \(perhaps the download",
    ):
        told(tmp_path)
    write(tmp_path, {".cache/huggingface/download/x.1.incomplete": b""})
    with pytest.raises(CheckpointRefused, match=r"a download is not finished, by .cache/hugg"):
        told(tmp_path)
    write(tmp_path, {"b.safetensors.12ab.incomplete": b""})
    with pytest.raises(CheckpointRefused, match="its download is not finished"):
        told(tmp_path)
    assert "index.json" not in told(tmp_path, exclude=["*.index.json"])
    write(tmp_path, {"b.safetensors": GOOD})
    assert "index" not in told(tmp_path)
    said = told(tmp_path, ["*.json"])
    assert "names a.safetensors, b.safetensors, which --include and --exclude leave out" in said
    write(tmp_path / "sub", {"pytorch_model.bin.index.json": INDEX})
    with pytest.raises(CheckpointRefused, match=r"sub/pytorch_model.bin.index.json"):
        told(tmp_path)
    outside = json.dumps({"weight_map": {"w": "/etc/hostname", "v": "../a"}}).encode()
    write(tmp_path / "sub", {"pytorch_model.bin.index.json": outside})
    with pytest.raises(CheckpointRefused, match=r"names /etc/hostname, a, and there is"):
        told(tmp_path)


def test_what_is_not_what_it_is_called_is_said(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.safetensors": POINTER,
            "b.safetensors": GOOD[:-1],
            "config.json": PAGE,
            "c.bin": POINTER,
            "d.safetensors": GOOD,
            "e.safetensors": b"",
            "m.safetensors.index.json": b"{",
            "tokenizer.json": b"",
        },
    )
    said = told(tmp_path)
    for path, why in (
        ("a.safetensors", "a git-LFS pointer"),
        ("config.json", "an HTML page"),
        ("c.bin", "a git-LFS pointer"),
        ("e.safetensors", "it is empty"),
        ("m.safetensors.index.json", "no index of tensors"),
        ("tokenizer.json", "it is empty"),
    ):
        line = next(each for each in said.splitlines() if each.startswith(path))
        assert line.startswith(f"{path} is not what it is called, and is published as it is: ")
        assert why in line
    assert "b.safetensors: 1 tensors cannot be read from it: 'w' (its file has" in said
    assert "d.safetensors" not in said


def test_patterns_that_match_nothing_are_said_and_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": GOOD, "config.json": b"{}"})
    said = told(tmp_path, ["*.safetensors", "*.bin"], ["optimizer/"])
    assert said.splitlines() == [
        "no file matches --include '*.bin'",
        "no file matches --exclude 'optimizer/'",
    ]
    assert not told(tmp_path, ["*"], ["*.json"])
    write(tmp_path, {".git/HEAD": b"x", "faiss.index.json": b"[]"})
    assert "no file" not in told(tmp_path, exclude=[".git/*"])
    assert "faiss" not in told(tmp_path)
    with pytest.raises(CheckpointRefused, match=r"no file 'confg.json' .*nearest: 'config.json'"):
        told(tmp_path, ["a.safetensors", "confg.json"])


def test_of_many_broken_files_some_are_named(tmp_path: Path) -> None:
    write(tmp_path, {f"{number:03}.bin": POINTER for number in range(50)})
    said = told(tmp_path).splitlines()
    assert len(said) == 33
    assert said[-1] == "18 more files are not what they are called"


def test_names_that_are_near() -> None:
    assert unmatched({"a", "bc"}, ["a", "b*", "c*", "b"]) == ["c*", "b"]
    assert nearest("x", []) == "; there is none at all"
    many = [f"model.layers.{layer}.mlp.weight" for layer in range(20_000)]
    assert nearest("model.layers.7.mpl.weight", many).startswith("; nearest: 'model.layers.")
    assert nearest("*.layers.77.mlp*", many) == "; nearest: 'model.layers.77.mlp.weight'"
