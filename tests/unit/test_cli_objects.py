"""put, get, rm, ls and locate against a store in memory: options, files, JSON and exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_p2p.main import run
from p2pstore.errors import BufferTooSmall, NoSuchKey, Unavailable
from p2pstore.results import ItemResult, KeyPage, ListedKey, Location, PutResult


class MemoryStore:
    """As much of a blocking client as the command line uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.put_options: dict[str, Any] = {}
        self.waited: float | None = None
        self.broken: Exception | None = None
        self.grows: list[bytes] = []

    def put(self, key: str, value: memoryview, *, overwrite: bool, **options: Any) -> PutResult:
        self.put_options = {"overwrite": overwrite, **options}
        data = bytes(value)
        status = "created"
        if key in self.values and not overwrite:
            status = "unchanged" if self.values[key] == data else "kept_existing"
        if status == "created":
            self.values[key] = data
        return PutResult(key, status, 1, options["replicas"], "here", (1 << 16, 7))  # type: ignore[arg-type]

    def get_into(self, key: str, buffer: memoryview, *, wait: float) -> int:
        self.waited = wait
        if key not in self.values:
            raise NoSuchKey(f"no such key: {key}")
        value = self.values[key]
        if len(buffer) < len(value):
            raise BufferTooSmall("too small", len(value))
        if self.grows:
            self.values[key] = self.grows.pop()
            return self.get_into(key, buffer, wait=wait)
        if self.broken:
            buffer[: len(value) // 2] = value[: len(value) // 2]
            raise self.broken
        buffer[: len(value)] = value
        return len(value)

    def remove_many(self, keys: list[str]) -> list[ItemResult]:
        return [
            ItemResult(key, error=Unavailable("gone"))
            if key == "broken"
            else ItemResult(key, self.values.pop(key, None) is not None)
            for key in keys
        ]

    def list_keys(self, prefix: str, *, after: str, limit: int, local: bool) -> KeyPage:
        keys = sorted(key for key in self.values if key.startswith(prefix) and key > after)
        listed = [
            ListedKey(key, len(self.values[key]), 1, ["here"], "none", False, None) for key in keys
        ]
        return KeyPage(listed[:limit], len(keys) > limit, [] if local else ["mute"])

    def locate(self, key: str) -> list[Location]:
        if key not in self.values:
            return []
        here = Location("12D3KooWabc", "here", "dram", 4096, (0, 7), False, "soft", True, True)
        there = Location("12D3KooWdef", "there", "dram", 4096, (0, 7), True, "none", False, False)
        return [here, there]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()

    @contextlib.contextmanager
    def connected(*arguments: object) -> Iterator[MemoryStore]:
        yield store

    monkeypatch.setattr("mooncake_p2p.commands.objects.connected", connected)
    monkeypatch.setattr("mooncake_p2p.commands.listing.connected", connected)
    return store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.write_bytes(b"value")
    return path


def test_put_says_what_became_of_it(
    store: MemoryStore, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["put", "k", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("created k: 5 B in ")
    assert captured.err.endswith(", copies 1/1\n")
    assert run(["put", "k", str(file)]) == 0
    assert capsys.readouterr().err.startswith("unchanged k")


def test_put_passes_its_options_on(store: MemoryStore, file: Path) -> None:
    options = ["--replicas", "3", "--pin", "hard", "--ttl", "10m", "--overwrite"]
    assert run(["put", "k", str(file), *options]) == 0
    expected = {"replicas": 3, "pin": "hard", "ttl": 600.0, "overwrite": True}
    assert store.put_options == expected
    assert type(store.put_options["pin"]) is str


def test_put_does_not_replace_by_itself(
    store: MemoryStore, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.values["k"] = b"other"
    assert run(["put", "k", str(file), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "kept_existing"
    assert "--overwrite" in captured.err
    assert store.values["k"] == b"other"
    assert run(["put", "k", str(file), "--overwrite"]) == 0
    assert store.values["k"] == b"value"


def test_put_json(store: MemoryStore, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["put", "k", str(file), "--replicas", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    seconds = printed.pop("seconds")
    assert seconds >= 0
    assert printed == {
        "key": "k",
        "status": "created",
        "bytes": 5,
        "copies": 1,
        "wanted": 2,
        "location": "here",
        "version": [65536, 7],
    }


def test_get_into_a_file(
    store: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for value in (os.urandom(100_000), b""):
        store.values["k"] = value
        assert run(["get", "k", "-o", str(out), "--wait", "1.5"]) == 0
        assert out.read_bytes() == value
    assert store.waited == 1.5
    assert run(["get", "k", "-o", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["key"], printed["bytes"], printed["output"]) == ("k", 0, str(out))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("error", [Unavailable("holders are gone"), KeyboardInterrupt()])
def test_a_get_that_fails_leaves_everything_as_it_was(
    error: Exception, store: MemoryStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    store.values["k"] = b"value"
    store.broken = error
    for _ in range(2):
        before = list(tmp_path.iterdir())
        assert run(["get", "k", "-o", str(out)]) in (6, 130)
        assert list(tmp_path.iterdir()) == before
        out.write_bytes(b"precious")
    assert run(["get", "none", "-o", str(out)]) == 3
    assert out.read_bytes() == b"precious"


def test_get_follows_a_value_that_grows(store: MemoryStore, tmp_path: Path) -> None:
    store.values["k"] = b"v"
    store.grows = [b"v" * 300, b"v" * 20]
    assert run(["get", "k", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_bytes() == b"v" * 300


def test_a_destination_is_checked_before_anything_moves(
    store: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.values["k"] = b"value"
    assert run(["get", "k", "-o", str(tmp_path / "none" / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write ")
    assert store.waited is None


def test_get_writes_to_devices_and_pipes(store: MemoryStore, tmp_path: Path) -> None:
    store.values["k"] = b"value"
    assert run(["get", "k", "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_get_to_standard_output(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store.values["k"] = b"value\0\n"
    with capfd.disabled():
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as pipe:
            with os.fdopen(writing, "w") as out:
                monkeypatch.setattr(sys, "stdout", out)
                status = run(["get", "k"])
                monkeypatch.undo()
            assert pipe.read() == b"value\0\n"
    assert status == 0


def test_rm_counts_what_existed(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.values.update(a=b"", b=b"")
    assert run(["rm", "a", "none"]) == 0
    assert capsys.readouterr().err == "removed 1 of 2 keys\nerror: no such key: none\n"
    assert run(["rm", "none", "neither"]) == 3
    capsys.readouterr()
    assert run(["rm", "b", "none", "broken", "--json"]) == 6
    assert json.loads(capsys.readouterr().out) == {
        "removed": ["b"],
        "missing": ["none"],
        "failed": {"broken": "gone"},
    }


def test_ls_pages_and_says_who_was_silent(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.values.update({"a 1": b"xx", "a 2": b"", "b": b""})
    assert run(["ls", "a", "--limit", "1"]) == 0
    captured = capsys.readouterr()
    header, row = captured.out.splitlines()
    assert header.split() == ["KEY", "SIZE", "COPIES", "PEERS", "NOTES"]
    assert row.split() == ["a", "1", "2", "B", "1", "here"]
    assert captured.err == "more keys follow: add --after 'a 1'\nincomplete: mute did not answer\n"
    assert run(["ls", "a", "--after", "a 1", "--local", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [entry["key"] for entry in document["keys"]] == ["a 2"]
    assert document["keys"][0]["length"] == 0
    assert (document["more"], document["silent_peers"], captured.err) == (False, [], "")


def test_ls_of_nothing(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "none", "--local"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no keys\n")


def test_locate(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.values["k"] = b"value"
    assert run(["locate", "k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "local, soft pin" in lines[1]
    assert "soft copy, unreachable" in lines[2]
    assert run(["locate", "k", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["key"] == "k"
    assert [copy["peer"] for copy in document["copies"]] == ["here", "there"]
    assert run(["locate", "none"]) == 3
