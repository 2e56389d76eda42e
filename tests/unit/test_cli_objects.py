"""The object commands against a store in memory: options, files, JSON and exit statuses."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_p2p.commands.put_get import explanation
from mooncake_p2p.commands.stored_keys import how_cut_off
from mooncake_p2p.main import run
from p2pstore.errors import BufferTooSmall, NoSuchKey, Unavailable
from p2pstore.objects import PART_BYTES
from p2pstore.results import (
    ItemResult,
    KeyPage,
    ListedKey,
    Location,
    PeerInfo,
    PinName,
    PinResult,
    PutResult,
)
from p2pstore.transfer.transfer_trace import FetchTrace, TransportTry
from tests.command_line import Cli


def member(name: str, memory_capacity: int = 1 << 30) -> PeerInfo:
    return PeerInfo(
        *("12D3KooW", name, "alive", 1, [], [], memory_capacity, 0, 0),
        me=name == "here",
        software="",
        heard_seconds_ago=0.0,
    )


class MemoryStore:
    """As much of a blocking client as the command line uses."""

    peer_name = "here"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.location = "here"
        self.members = [member("here"), member("there")]
        self.namespace = ""
        self.put_options: dict[str, Any] = {}
        self.waited: float | None = None
        self.broken: Exception | None = None
        self.grows: list[bytes] = []
        self.silent_peers = ["mute"]
        self.pins: dict[str, tuple[str, float | None]] = {}
        self.holders = 1
        self.elsewhere: dict[str, bytes] = {}
        self.page_keys = 1000
        self.lists_left: int | None = None

    def put(
        self, key: str, value: memoryview, *, overwrite: bool, progress: None, **options: Any
    ) -> PutResult:
        self.put_options = {"overwrite": overwrite, **options}
        data = bytes(value)
        status = "created"
        if key in self.values and not overwrite:
            status = "unchanged" if self.values[key] == data else "kept_existing"
        if status == "created":
            self.values[key] = data
        return PutResult(key, status, 1, options["replicas"], self.location, (1 << 16, 7))  # type: ignore[arg-type]

    def get_into(
        self, key: str, buffer: memoryview, *, wait: float, progress: None, trace: FetchTrace | None
    ) -> int:
        self.waited = wait
        if trace is not None:
            trace.source, trace.tier, trace.transport = "there", "dram", "tcp"
            trace.tries = [TransportTry("there", "shm", False, "on another host")]
        if key not in self.values:
            raise NoSuchKey(f"no such key: {key}")
        value = self.values[key]
        if len(buffer) < len(value):
            raise BufferTooSmall("too small", len(value))
        if self.grows:
            self.values[key] = self.grows.pop()
            return self.get_into(key, buffer, wait=wait, progress=progress, trace=trace)
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

    def pin(self, key: str, pin: PinName = "soft", *, ttl: float | None = None) -> PinResult:
        if key in self.elsewhere and pin != "none":
            self.values[key] = self.elsewhere.pop(key)
        if key not in self.values and key not in self.elsewhere:
            raise NoSuchKey(f"no such key: {key}")
        self.pins[key] = (pin, ttl)
        return PinResult(key, pin, 1, self.holders)

    def unpin(self, key: str) -> PinResult:
        return self.pin(key, "none")

    def replicate(self, key: str, copies: int) -> PutResult:
        return PutResult(key, "unchanged", min(copies, 2), copies, "here", (1, 7))

    def flush(self) -> None:
        self.values.clear()

    def list_keys(
        self, prefix: str, *, after: str = "", limit: int, local: bool = False, pinned: bool = False
    ) -> KeyPage:
        if self.lists_left is not None:
            self.lists_left -= 1
            if self.lists_left < 0:
                os.kill(os.getpid(), signal.SIGINT)
        limit = min(limit, self.page_keys)
        keys = sorted(key for key in self.values if key.startswith(prefix) and key > after)
        listed = [
            ListedKey(key, len(self.values[key]), 1, ["here"], "none", False, None)
            for key in keys
            if not pinned or key in self.pins
        ]
        return KeyPage(listed[:limit], len(keys) > limit, [] if local else self.silent_peers)

    def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        return [] if everyone else self.members

    def locate(self, key: str) -> list[Location]:
        if key in self.elsewhere:
            return [Location("12D3KooWdef", "there", "dram", 1, (0, 7), *(False, "hard", False, True))]
        if key not in self.values:
            return []
        pin: Any = self.pins.get(key, ("soft",))[0]
        here = Location("12D3KooWabc", "here", "dram", 4096, (0, 7), False, pin, True, True)
        there = Location("12D3KooWdef", "there", "dram", 4096, (0, 7), True, "none", False, False)
        older = Location("12D3KooWghi", "other", "dram", 4096, (0, 6), False, "none", False, True)
        return [here, there, older]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()

    @contextlib.contextmanager
    def connected(
        socket: str | None, namespace: str = "default", timeout: str = "5"
    ) -> Iterator[MemoryStore]:
        store.namespace = namespace
        yield store

    for module in ("commands.stored_keys", "options"):
        monkeypatch.setattr(f"mooncake_p2p.{module}.connected", connected)
    return store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.write_bytes(b"value")
    return path


def test_put_says_what_became_of_it(store: MemoryStore, file: Path, cli: Cli) -> None:
    captured = cli("put", "k", file)
    assert captured.out == ""
    assert captured.err.startswith("created k: 5 B in ")
    assert captured.err.endswith(", copies 1/1\n")
    assert cli("put", "k", file).err.startswith("unchanged k")


def test_put_with_key_and_file_swapped_says_so(store: MemoryStore, file: Path, cli: Cli) -> None:
    assert f"the key comes first: `put k {file}`" in cli("put", file, "k", status=1).err
    assert not store.values


def test_put_passes_its_options_on(store: MemoryStore, file: Path) -> None:
    options = ["--replicas", "3", "--pin", "hard", "--ttl", "10m", "--overwrite", "--durable"]
    assert run(["put", "k", str(file), *options]) == 0
    expected = {**{"replicas": 3, "pin": "hard", "ttl": 600.0}, **{"overwrite": True, "durable": True}}
    assert store.put_options == expected
    assert run(["put", "k", str(file), "--on-conflict", "error"]) == 0
    assert not store.put_options["overwrite"]
    assert run(["put", "k", str(file), "--on-conflict", "overwrite"]) == 0
    assert store.put_options["overwrite"]
    assert run(["put", "k", str(file), "--on-conflict", "overwrite", "--overwrite"]) == 0
    assert run(["put", "k", str(file), "--on-conflict", "keep", "--overwrite"]) == 2
    assert run(["put", "k", str(file), "--on-conflict", "other"]) == 2
    assert type(store.put_options["pin"]) is str


@pytest.mark.parametrize("options", [[], ["--on-conflict", "keep"], ["--on-conflict", "error"]])
def test_put_does_not_replace_by_itself(
    store: MemoryStore, file: Path, cli: Cli, options: list[str]
) -> None:
    store.values["k"] = b"other"
    captured = cli("put", "k", file, "--json", *options, status=1)
    document = json.loads(captured.out)
    assert (document["status"], document["error"]["status"]) == ("kept_existing", 1)
    assert document["error"]["type"] == "KeyExists"
    assert "--overwrite" in captured.err
    assert store.values["k"] == b"other"
    cli("put", "k", file, "--overwrite")
    assert store.values["k"] == b"value"


def test_put_json(store: MemoryStore, file: Path, cli: Cli) -> None:
    printed = cli("put", "k", file, "--replicas", "2", "--json").json
    seconds = printed.pop("seconds")
    assert seconds >= 0
    assert printed == {
        "key": "k",
        "status": "created",
        "bytes": 5,
        "copies": 1,
        "wanted": 2,
        "location": "here",
        "elsewhere": False,
        "shortfall": "1 of 2 copies: no other peer has room for it; more are made when one has",
        "version": [65536, 7],
    }


def test_get_into_a_file(store: MemoryStore, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    for value in (os.urandom(100_000), b""):
        store.values["k"] = value
        cli("get", "k", "-o", out, "--wait", "1.5")
        assert out.read_bytes() == value
    assert store.waited is not None
    assert 1.0 < store.waited <= 1.5  # connecting comes out of it
    printed = cli("get", "k", "-o", out, "--json").json
    assert (printed["key"], printed["bytes"], printed["output"]) == ("k", 0, str(out))
    assert list(tmp_path.iterdir()) == [out]


def test_get_explained(store: MemoryStore, tmp_path: Path, cli: Cli) -> None:
    store.values["k"] = b"value"
    out = str(tmp_path / "out")
    captured = cli("get", "k", "-o", out, "--explain")
    assert captured.out == ""
    for part in ("got k: 5 B", "there over shm: not tried, on another host", "rdma: not tried"):
        assert part in captured.err
    captured = cli("get", "k", "-o", out, "--explain", "--json")
    assert captured.err == ""
    explained = json.loads(captured.out)["explain"]
    assert explained["source"] == "there"
    assert explained["tries"][0]["outcome"] == "on another host"
    assert "rdma" in explained["not_tried"]
    assert "lookup" in cli("get", "none", "-o", out, "--explain", status=3).err


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
    store.values["k"] = bytes(PART_BYTES + 1)
    store.grows = [b"", bytes(PART_BYTES + 300)]
    assert run(["get", "k", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").stat().st_size == 0


def test_a_destination_is_checked_before_anything_moves(
    store: MemoryStore, tmp_path: Path, cli: Cli
) -> None:
    store.values["k"] = b"value"
    printed = cli("get", "k", "-o", tmp_path / "none" / "out", status=1)
    assert printed.err.startswith("error: cannot write ")
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


def test_rm_counts_what_existed(store: MemoryStore, cli: Cli) -> None:
    store.values.update(a=b"", b=b"")
    assert cli("rm", "a", "none", status=3).err == "removed 1 of 2 keys\nerror: no such key: none\n"
    cli("rm", "none", "neither", status=3)
    printed = cli("rm", "b", "none", "broken", "--json", status=6)
    assert printed.json == {
        "removed": ["b"],
        "missing": ["none"],
        "failed": {"broken": "gone"},
        "error": {"type": "Unavailable", "message": "gone", "status": 6},
    }


def test_ls_pages_and_says_who_was_silent(store: MemoryStore, cli: Cli) -> None:
    store.values.update({"a 1": b"xx", "a 2": b"", "b": b""})
    captured = cli("ls", "a", "--limit", "1")
    header, row = captured.out.splitlines()
    assert header.split() == ["KEY", "SIZE", "COPIES", "PEERS", "NOTES"]
    assert row.split() == ["a", "1", "2", "B", "1", "here"]
    assert captured.err == "more keys follow: add --after 'a 1'\nincomplete: mute did not answer\n"
    captured = cli("ls", "a", "--after", "a 1", "--local", "--json")
    document = json.loads(captured.out)
    assert [entry["key"] for entry in document["keys"]] == ["a 2"]
    assert document["keys"][0]["length"] == 0
    assert (document["more"], document["silent_peers"], captured.err) == (False, [], "")


def test_ls_of_nothing(store: MemoryStore, cli: Cli) -> None:
    captured = cli("ls", "none", "--local")
    assert (captured.out, captured.err) == ("", "no keys\n")


def test_locate(store: MemoryStore, cli: Cli) -> None:
    store.values["k"] = b"value"
    lines = cli("locate", "k").out.splitlines()
    assert len(lines) == 4
    assert "local, pinned (soft)" in lines[1]
    assert "spare copy, unreachable" in lines[2]
    assert [" 5 B " in line for line in lines[1:]] == [True, True, False]
    assert "<= 4.0 KiB" in lines[3]
    document = cli("locate", "k", "--json").json
    assert document["key"] == "k"
    assert [copy["peer"] for copy in document["copies"]] == ["here", "there", "other"]
    assert [copy["length"] for copy in document["copies"]] == [5, 5, None]
    cli("locate", "none", status=3)


@pytest.fixture
def many(store: MemoryStore) -> MemoryStore:
    """Keys for three batches, and others, with all peers answering."""
    store.values = {f"a/{number:04}": b"" for number in range(25)} | {"b": b""}
    store.page_keys = 10
    store.silent_peers = []
    return store


def test_rm_by_prefix_takes_page_after_page(many: MemoryStore, cli: Cli) -> None:
    captured = cli("rm", "--prefix", "a/", "--yes")
    assert (captured.out, captured.err) == ("", "removed 25 keys\n")
    assert list(many.values) == ["b"]
    printed = cli("rm", "--prefix", "a/", "--yes", "--json", status=3)
    assert printed.json == {
        "removed": 0,
        "failed": {},
        "silent_peers": [],
        "complete": True,
        "error": {"type": "NoSuchKey", "message": "no key begins with 'a/'", "status": 3},
    }


def test_rm_by_prefix_says_who_did_not_answer(many: MemoryStore, cli: Cli) -> None:
    many.silent_peers = ["mute\x1b"]
    assert "incomplete: mute\\x1b did not answer" in cli("rm", "--prefix", "a/", "--yes", status=1).err
    many.values |= {"broken": b"", "brown": b""}
    many.silent_peers = []
    many.page_keys, many.lists_left = 1, 5  # remaining keys must not be listed again and again
    document = cli("rm", "--prefix", "br", "--yes", "--json", status=6).json
    assert (document["failed"], document["complete"]) == ({"broken": "gone"}, False)
    assert document["removed"] == 1


def test_rm_by_prefix_stops_between_batches(many: MemoryStore, cli: Cli) -> None:
    many.lists_left = 2
    printed = cli("rm", "--prefix", "a/", "--yes", status=130)
    assert printed.err == "removed 20 keys before it was stopped\n"
    assert len(many.values) == 6
    many.lists_left = 0
    document = cli("rm", "--prefix", "a/", "--yes", "--json", status=130).json
    assert (document["removed"], document["complete"]) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rm"], "name keys"),
        (["rm", "k", "--prefix", "k", "--yes"], "not both"),
        (["rm", "--prefix", "", "--yes"], "flush"),
        (["rm", "--prefix", "a/"], "add --yes"),
        (["flush", "n"], "add --yes"),
        (["flush", ""], "namespace"),
        (["pin", "a/0000", "--pin", "hard", "--ttl", "5"], "--ttl"),
        (["pin", ""], "the key is empty"),
        (["replicate", "k"], "--replicas"),
        (["get", "k", "--wait", "9" * 400], "--wait"),
    ],
)
def test_what_is_refused_does_nothing(
    arguments: list[str], complaint: str, many: MemoryStore, cli: Cli
) -> None:
    message = cli(*arguments, status=2).err
    assert message.startswith("error: ")
    assert complaint in message
    assert len(many.values) == 26
    assert not many.pins


def test_flush_is_of_the_namespace_that_was_named(many: MemoryStore, cli: Cli) -> None:
    printed = cli("flush", "job 17", "--yes")
    assert many.namespace == "job 17"
    assert not many.values
    assert printed.err == "flushed job 17\n"
    assert cli("flush", "n", "--yes", "--json").json == {"flushed": "n"}


def test_pin_and_unpin(many: MemoryStore, cli: Cli) -> None:
    many.elsewhere["far"] = b"v"
    printed = cli("pin", "b", "far", "--ttl", "2h")
    assert many.pins == {"b": ("soft", 7200.0), "far": ("soft", 7200.0)}
    assert printed.err == "pinned 2 of 2 keys\n"
    printed = cli("pin", "b", "none", "--pin", "hard", status=3)
    assert many.pins["b"] == ("hard", None)
    assert "pinned 1 of 2 keys\nerror: no such key: none\n" in printed.err
    cli("pin", "none", status=3)
    document = cli("unpin", "b", "none", "--json", status=3).json
    assert document == {
        "unpinned": ["b"],
        "failed": {"none": "no such key: none"},
        "copies": {"b": [1, 1]},
        "error": {"type": "NoSuchKey", "message": "no such key: none", "status": 3},
    }
    assert many.pins["b"] == ("none", None)
    many.elsewhere["far"] = b"v"
    many.holders = 3
    printed = cli("unpin", "far")
    assert printed.err == (
        "unpinned\nfar: 1 of 3 copies; the other holders could not be told, try again\n"
    )


def test_pin_keeps_a_hard_pin_unless_told_otherwise(many: MemoryStore, cli: Cli) -> None:
    cli("pin", "b", "--pin", "hard")
    printed = cli("pin", "b", "a/0000")
    assert many.pins == {"b": ("hard", None), "a/0000": ("soft", None)}
    assert "b stays pinned hard (--pin soft makes it a soft pin)\n" in printed.err
    captured = cli("pin", "b", "--json")
    assert json.loads(captured.out) == {"pinned": ["b"], "failed": {}, "copies": {}, "kept_hard": ["b"]}
    assert captured.err == ""
    cli("pin", "b", "--pin", "soft")
    assert many.pins["b"] == ("soft", None)


def test_ls_of_what_is_pinned(many: MemoryStore, cli: Cli) -> None:
    many.pins["a/0007"] = ("hard", None)
    document = cli("ls", "--pinned", "--json").json
    assert [entry["key"] for entry in document["keys"]] == ["a/0007"]
    assert cli("ls", "--pinned").out.split()[:3] == ["KEY", "SIZE", "PINNED"]


def test_get_that_waited_says_how_long(store: MemoryStore, cli: Cli) -> None:
    printed = cli("get", "none", "-o", "/dev/null", "--wait", "2", status=3)
    assert "none came in the 2 s of --wait" in printed.err
    assert "--wait" not in cli("get", "none", "-o", "/dev/null", status=3).err


def test_a_try_that_failed_is_told_in_short(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no route; add one with a very long command"
    trace = FetchTrace(tries=[TransportTry("p", "tcp", True, reason, 0.5)])
    assert "tried     p over tcp: no route after 500.0 ms" in explanation(trace)
    trace.tries[0].outcome = "x " * 500
    assert max(map(len, explanation(trace))) < 140


def test_replicate_says_how_many_there_are(store: MemoryStore, cli: Cli) -> None:
    assert cli("replicate", "k", "-n", "2").err == "copies 2/2\n"
    captured = cli("replicate", "k", "-n", "3", "--json", status=1)
    document = json.loads(captured.out)
    message = document.pop("error")["message"]
    assert document == {"key": "k", "copies": 2, "wanted": 3}
    assert message == "k: 2 of 3 copies: the cluster has 2 peers"
    assert captured.err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("capacities", "said"),
    [
        ([1], "the cluster has 1 peer"),
        ([1, 0], "1 of the cluster's 2 peers offer memory"),
        ([1, 1], "no other peer has room for it; more are made when one has"),
    ],
)
def test_put_says_once_why_there_are_too_few_copies(
    capacities: list[int], said: str, store: MemoryStore, file: Path, cli: Cli
) -> None:
    store.members = [member(str(number), each) for number, each in enumerate(capacities)]
    shown = cli("put", "k", file, "--replicas", "9").err
    assert shown.endswith(f", 1 of 9 copies: {said}\n")
    assert shown.count("\n") == 1


def test_put_says_when_another_peer_took_it(store: MemoryStore, file: Path, cli: Cli) -> None:
    store.location = "there"
    assert cli("put", "k", file).err.endswith(", on there: this peer has no room for it\n")
    document = cli("put", "k2", file, "--json").json
    assert (document["location"], document["elsewhere"]) == ("there", True)


def members(*others: str) -> list[PeerInfo]:
    """This peer, and others that are given as name:status."""
    return [
        PeerInfo(name, name, status, 1, [], [], 0, 0, 0, name == "me", "1", 0.0)
        for name, _, status in (each.partition(":") for each in ("me:alive", *others))
    ]


@pytest.mark.parametrize(
    "others",
    [
        (),
        ("a:alive", "b:dead"),
        ("a:left", "b:left"),
        ("a:dead", "a:alive"),  # it came back as another member
    ],
)
def test_a_peer_that_reaches_half_of_the_others_says_nothing(others: tuple[str, ...]) -> None:
    assert how_cut_off(members(*others)) == ""


@pytest.mark.parametrize(
    ("others", "reached"),
    [
        (("a:dead",), "0 of 1"),
        (("a:suspect", "b:dead", "c:left"), "0 of 2"),
        (("a:alive", "b:dead", "c:dead"), "1 of 3"),
    ],
)
def test_a_peer_that_is_cut_off_says_so(others: tuple[str, ...], reached: str) -> None:
    assert f"this peer reaches {reached} other members" in how_cut_off(members(*others))


def test_who_was_named_as_silent_is_not_told_of_again() -> None:
    others = members("a:suspect", "b:alive", "c:dead")
    assert "reaches 1 of 3" in how_cut_off(others)
    assert how_cut_off(others, ["a"]) == ""
