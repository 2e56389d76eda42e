"""Batches of the most and the longest keys: every call cuts them into requests that fit, here and between peers. And a
batch of puts in windows, of which the peer publishes one while the client writes the next."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.client.puts import FIRST_ITEMS, WINDOW_BYTES, WINDOW_ITEMS
from p2pstore.errors import AnswerTooLarge, CapacityExceeded, NoSuchKey, StoreClosed
from p2pstore.integrations import engine_client
from p2pstore.integrations.mooncake.store import MooncakeDistributedStore
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import (
    MAX_ITEMS,
    MAX_REPORTED_FAILURES,
    REQUEST_BYTES,
    Cuts,
    text_bytes,
)
from p2pstore.objects import MIB
from p2pstore.put_facts import PutOptions
from p2pstore.wire import LOCAL_LIMITS, encode_body
from simulation.segment_checks import check_segment
from tests.contract.small_peer import SmallPeer, small_peer
from tests.contract.worlds import peer_process
from tests.waiting import SECONDS, eventually

COUNT = 10_100
KEYS = [f"{number:06}/".ljust(1024, "k") for number in range(COUNT)]
MANY = 4200
"""More items than a frame takes."""
VALUE = b"v"
PUTTING = (LocalKind.RESERVE, LocalKind.COMMIT)

patient = partial(blocking.connect, timeout=SECONDS)
"""These requests are large, and a busy machine is slow."""


@pytest.fixture(scope="module")
def near_and_far(module_path: Path) -> Iterator[tuple[str, str]]:
    with peer_process(module_path, "near", "--memory", "256MiB") as near:
        more = ("--memory", "256MiB", "--bootstrap", near.control)
        with peer_process(module_path, "far", *more) as far:
            yield near.socket, far.socket


@pytest.fixture
def near(near_and_far: tuple[str, str]) -> Iterator[BlockingClient]:
    with patient(near_and_far[0]) as client:
        yield client


@pytest.fixture
def far(near_and_far: tuple[str, str]) -> Iterator[BlockingClient]:
    with patient(near_and_far[1]) as client:
        yield client


def test_every_call_takes_ten_thousand_of_the_longest_keys(
    near: BlockingClient, far: BlockingClient
) -> None:
    assert all(each.ok for each in far.put_many([(key, VALUE) for key in KEYS]))
    eventually(lambda: near.contains(KEYS[-1]))  # which costs less to ask again and again
    eventually(lambda: all(near.contains_many(KEYS)))
    assert near.match_prefix(KEYS) == COUNT
    (run,) = near.match_prefix_by_peer(KEYS)
    assert (run.peer, run.blocks) == ("far", COUNT)
    rooms = [bytearray(1) for _ in KEYS]
    results = near.get_many_into(list(zip(KEYS, rooms, strict=True)))
    assert all(each.ok for each in results)
    assert rooms == [VALUE] * COUNT
    assert all(each.ok for each in near.take_leases(KEYS[:1000]))
    near.prefetch(KEYS)
    page = near.list_keys(limit=COUNT + 1)
    assert [each.key for each in page.keys] == KEYS
    assert [each.value for each in near.remove_many(KEYS[:MANY])] == [True] * MANY
    eventually(lambda: not far.contains(KEYS[MANY - 1]))
    eventually(lambda: far.contains_many(KEYS) == [False] * MANY + [True] * (COUNT - MANY))


def test_the_mooncake_api_removes_what_a_pattern_finds_to_the_end(
    near_and_far: tuple[str, str], near: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", near_and_far[0])
    monkeypatch.setattr(blocking, "connect", patient)
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "", 0, 0, "tcp", "", "") == 0
    with closing(store):
        keys, kept = [f"m/{key}"[:1024] for key in KEYS[: MANY + 1000]], "x" * 1024
        assert store.put_batch([*keys, kept], [VALUE] * (len(keys) + 1)) == 0
        assert store.batch_is_exist([*keys, "", kept]) == [1] * len(keys) + [0, 1]
        assert store.batch_remove(["", "k" * 1025, "absent"]) == [-704] * 3
        assert store.batch_remove(keys[:MANY]) == [0] * MANY
        assert store.batch_remove(keys[:2]) == [-704] * 2
        monkeypatch.setattr(engine_client, "PAGE_KEYS", 300)
        assert store.remove_by_regex("^m/") == 1000
        assert store.batch_is_exist([keys[0], keys[-1], kept]) == [0, 0, 1]


# --- the one place that cuts -------------------------------------------------------------------

DIGEST = b"d" * 16
BIG = (1 << 64) - 1
OPTIONS = [PutOptions(BIG, BIG, BIG, True, True, "float32", (BIG, BIG))]
LARGEST: dict[LocalKind, tuple[int, Any]] = {
    LocalKind.RESERVE: (0, lambda n: local.Reserve([(BIG, BIG, BIG)] * n, "n" * 255)),
    LocalKind.COMMIT: (
        0,
        lambda n: local.Commit(
            "n" * 255, ["k" * 1024] * n, [(BIG, BIG)] * n, [BIG] * n, bytes(512 * n), OPTIONS * n, DIGEST
        ),
    ),
    LocalKind.ABORT: (0, lambda n: local.Abort([BIG] * n)),
    LocalKind.LEASE: (0, lambda n: local.Lease(DIGEST * n, key="k" * 1024)),
    LocalKind.RELEASE: (0, lambda n: local.Release([BIG] * n)),
    LocalKind.PLAN: (0, lambda n: local.Plan(DIGEST * n, exclude=[BIG] * 64, key="k" * 1024)),
    LocalKind.CONTAINS: (0, lambda n: local.Contains(DIGEST * n)),
    LocalKind.MATCH_PREFIX: (0, lambda n: local.MatchPrefix(DIGEST * n)),
    LocalKind.ESTIMATE: (0, lambda n: local.Locate(DIGEST * n)),
    LocalKind.LOCATE: (0, lambda n: local.Locate(DIGEST * n)),
    LocalKind.REMOVE: (text_bytes("k" * 1024), lambda n: local.Remove("n" * 255, ["k" * 1024] * n)),
    LocalKind.PREFETCH: (0, lambda n: local.Prefetch(DIGEST * n)),
    LocalKind.LIST: (0, lambda n: local.ListKeys("n" * 255, "k" * 1024, "k" * 1024, n)),
}


@pytest.mark.parametrize("kind", MAX_ITEMS)
def test_the_largest_request_of_each_kind_fits_a_frame(kind: LocalKind) -> None:
    assert MAX_ITEMS[kind] <= MAX_BATCH
    size, message = LARGEST[kind]
    (some,) = islice(Cuts(kind, 100_000, [size] * 100_000 if size else None), 1)
    assert len(encode_body(message(len(some)))) <= LOCAL_LIMITS.body_bytes


def test_the_largest_report_fits_a_frame() -> None:
    counts = [BIG] * 64
    pulls = [local.PullCount(BIG, "transport", BIG, BIG, BIG, counts, BIG, counts)] * 1024
    report = local.Report(
        [local.AccessCount(DIGEST, BIG, BIG, BIG)] * MAX_BATCH,
        [local.HolderFailure(DIGEST, BIG, BIG, BIG, BIG)] * MAX_REPORTED_FAILURES,
        pulls,
        [local.SlowRead(DIGEST, BIG, "transport", 1.0, BIG, "k" * 1024)] * 16,
        [local.TransportFallback(BIG, "transport", BIG, "\N{SNOWMAN}" * 200)] * 64,
        BIG,
        [local.UnseenRead(DIGEST, BIG, BIG)] * 4096,
        [local.ReadTiming(BIG, True, BIG, BIG, BIG)] * 1024,
    )
    assert len(encode_body(report)) <= LOCAL_LIMITS.body_bytes


def test_requests_are_cut_by_bytes_and_by_items_and_again_where_the_answer_is_too_large() -> None:
    most = MAX_ITEMS[LocalKind.REMOVE]
    assert list(Cuts(LocalKind.REMOVE, 0)) == []
    assert list(Cuts(LocalKind.REMOVE, most + 1)) == [range(most), range(most, most + 1)]
    half = REQUEST_BYTES // 2
    cut = Cuts(LocalKind.REMOVE, 5, [half, half, 1, 2 * REQUEST_BYTES, 1])
    assert list(cut) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    error = AnswerTooLarge("ask for less")
    cuts, seen = Cuts(LocalKind.LOCATE, 10), []
    for some in cuts:
        if len(some) > 3:
            cuts.ask_again(some, error)
        else:
            seen += list(some)
    assert seen == list(range(10))
    with pytest.raises(AnswerTooLarge):
        cuts.ask_again(range(9, 10), error)
    assert [text_bytes(text) for text in ("", "ab", "\N{SNOWMAN}")] == [5, 7, 9]


SIZES = [0, 1, 4096, 70_000]


def values(count: int, name: str = "k") -> list[tuple[str, bytes]]:
    return [(f"{name}{number}", bytes([number % 251]) * SIZES[number % 4]) for number in range(count)]


def alike(count: int, name: str) -> list[tuple[str, bytes]]:
    return [(f"{name}{number:04}", bytes([number % 251]) * 500) for number in range(count)]


def reserved_bytes(peer: SmallPeer) -> int:
    """Bytes in rooms that are no objects (yet)."""
    return peer.call(lambda: reserved_now(peer))


def reserved_now(peer: SmallPeer) -> int:
    """`reserved_bytes`, for the peer's own thread."""
    segment = peer.backend.segment
    return segment.used_bytes - sum(entry.extent_bytes for entry in segment.entries())


@pytest.mark.parametrize("count", [1, 2, FIRST_ITEMS, FIRST_ITEMS + 1, FIRST_ITEMS + WINDOW_ITEMS + 7])
def test_every_value_is_stored_under_its_key(peer: SmallPeer, count: int) -> None:
    items = values(count)
    with blocking.connect(str(peer.path)) as client:
        results = client.put_many(items)
        assert [each.key for each in results] == [key for key, _ in items]
        assert all(each.unwrap().status == "created" for each in results)
        assert [each.unwrap() for each in client.get_many([key for key, _ in items])] == [
            value for _, value in items
        ]
        assert all(each.unwrap().status == "unchanged" for each in client.put_many(items))
    peer.wait_until(lambda: reserved_now(peer) == 0)  # room may be reserved ahead for a single put


def test_a_window_is_reserved_with_the_commit_of_an_earlier_one(peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:
        client.put_many([(f"k{number}", b"v") for number in range(FIRST_ITEMS + 5 * WINDOW_ITEMS)])
    requests = [each for each in peer.backend.requests if each in PUTTING]
    assert requests == [LocalKind.RESERVE] + [LocalKind.COMMIT] * 6


@pytest.mark.parametrize(("count", "windows"), [(16, 1), (FIRST_ITEMS + WINDOW_ITEMS, 2)])
def test_a_batch_like_those_before_finds_room(peer: SmallPeer, count: int, windows: int) -> None:
    with blocking.connect(str(peer.path)) as client:
        for turn in range(4):
            peer.backend.requests.clear()
            items = alike(count, f"{turn}-")
            assert all(each.ok for each in client.put_many(items))
            requests = [each for each in peer.backend.requests if each in PUTTING]
            # One to reserve is left where there are more windows, and none waits for its answer.
            asked = 1 if turn < 2 or windows > 1 else 0
            assert requests == [LocalKind.RESERVE] * asked + [LocalKind.COMMIT] * windows
            assert client.get(items[-1][0]) == items[-1][1]
    peer.wait_until(lambda: reserved_now(peer) == 0)


def test_a_batch_larger_than_the_memory_keeps_what_came_last(tmp_path: Path) -> None:
    with (
        small_peer(tmp_path / "small.sock", memory_bytes=4 * WINDOW_BYTES) as peer,
        blocking.connect(str(peer.path)) as client,
    ):
        value = bytes(WINDOW_BYTES // 4)
        results = client.put_many([(f"k{number}", value) for number in range(40)])
        assert all(each.ok for each in results)
        assert client.contains("k39")
        assert reserved_bytes(peer) == 0
        huge = bytes(5 * WINDOW_BYTES)
        results = client.put_many([("a", b"a"), ("huge", huge), ("b", b"b"), ("c", b"c")])
        assert [each.ok for each in results] == [True, False, True, True]
        assert isinstance(results[1].error, CapacityExceeded)
        assert reserved_bytes(peer) == 0


@pytest.mark.parametrize("before", [0, 2])
async def test_a_batch_that_is_cancelled_anywhere_leaves_no_room_behind(
    peer: SmallPeer, before: int
) -> None:
    """With batches `before` it, room is reserved for it."""
    made = alike if before else values
    async with p2pstore.connect(str(peer.path)) as reader:
        for turns in range(40):
            items = made(FIRST_ITEMS + WINDOW_ITEMS, f"{turns}-")
            async with p2pstore.connect(str(peer.path)) as client, trio.open_nursery() as nursery:
                for number in range(before):
                    await client.put_many(made(FIRST_ITEMS + WINDOW_ITEMS, f"{turns}-{number}-"))
                nursery.start_soon(client.put_many, items)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            # Until then the peer may publish a window of it, and evict for the next one.
            await trio.to_thread.run_sync(peer.wait_until, lambda: reserved_now(peer) == 0, 20.0)
            found = await reader.contains_many([key for key, _ in items])
            held = dict(zip([key for key, _ in items], found, strict=True))
            for key, value in items:
                try:
                    assert not held[key] or await reader.get(key) == value
                except NoSuchKey:  # evicted for a window that was on its way to the peer
                    assert not await reader.contains(key)


KILLED_AT_EACH_STEP = """
import json, os, signal, sys
from collections import Counter
from p2pstore import blocking

MODULES = ("client/writing.py", "local/local_connection.py")

def put(name, struck, told):
    steps = Counter()
    def step(frame, event, _):
        if event in ("call", "return") and frame.f_code.co_filename.endswith(MODULES):
            place = f"{frame.f_code.co_name} {event}"
            steps[place] += 1
            if (place, steps[place]) == struck:
                os.kill(os.getpid(), signal.SIGKILL)
    with blocking.connect(sys.argv[1]) as client:
        for turn in ("first", "second", "with room reserved"):
            sys.setprofile(step if turn != "second" else None)
            client.put_many([(f"{name}-{turn}-{number:03}", b"v" * 5000) for number in range(100)])
        sys.setprofile(None)
    os.write(told, json.dumps(steps).encode())

def run(*arguments):
    reading, told = os.pipe()
    child = os.fork()
    if not child:
        put(*arguments, told)
        os._exit(0)
    os.close(told)
    with open(reading) as answer:
        return answer.read(), os.waitpid(child, 0)[1]

steps = json.loads(run("whole", None)[0])
strikes = [(place, at) for place, count in steps.items() for at in {1, (count + 1) // 2, count}]
ends = [run(number, struck)[1] for number, struck in enumerate(strikes)]
assert set(ends) <= {0, signal.SIGKILL}  # with several answers in one, there are fewer steps
print(ends.count(signal.SIGKILL))
"""


def test_a_client_killed_at_any_step_of_a_batch_leaves_whole_values_alone(peer: SmallPeer) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED_AT_EACH_STEP, str(peer.path)]
    run = subprocess.run(command, stdout=subprocess.PIPE, timeout=120.0, check=True)
    assert int(run.stdout) > 50
    peer.wait_until(lambda: reserved_now(peer) == 0, 20.0)

    def look() -> None:
        segment = peer.backend.segment
        check_segment(segment)
        for entry in segment.entries():
            assert bytes(segment.payload(entry)) == b"v" * 5000

    peer.call(look)


KILLED_IN_THE_COPY = """
import os, signal, sys
from p2pstore import blocking

def die(done_bytes, total_bytes):
    print(done_bytes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

with blocking.connect(sys.argv[1]) as client:
    client.put("k", b"v" * int(sys.argv[2]), progress=die)
"""


def test_a_client_killed_in_the_middle_of_a_copy_leaves_no_value(peer: SmallPeer) -> None:
    length, memory = 7 * MIB, peer.backend.memory.view
    command = [sys.executable, "-W", "ignore", "-c", KILLED_IN_THE_COPY, str(peer.path), str(length)]
    run = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS)
    assert run.returncode == -signal.SIGKILL
    assert 0 < int(run.stdout) < length
    assert bytes(memory).count(b"v") >= int(run.stdout)  # it lies there
    peer.wait_until(lambda: reserved_now(peer) == 0)
    assert peer.used_bytes() == 0
    with blocking.connect(str(peer.path)) as client:
        assert not client.contains("k")
        client.put("k", b"w" * length)
        assert client.get("k") == b"w" * length


def test_a_peer_that_goes_in_the_middle_is_said(peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:
        client.put_many(values(3))
        peer.stop()
        with pytest.raises(StoreClosed):
            client.put_many(values(FIRST_ITEMS + WINDOW_ITEMS, "late"))
