"""A batch of puts in windows, of which the peer publishes one while the client writes the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.client.puts import WINDOW_BYTES, WINDOW_ITEMS
from p2pstore.errors import CapacityExceeded, NoSuchKey, StoreClosed
from p2pstore.local.local_protocol import LocalKind
from simulation.segment_checks import check_segment
from tests.contract.small_peer import SmallPeer, small_peer

SIZES = [0, 1, 4096, 70_000]


def values(count: int, name: str = "k") -> list[tuple[str, bytes]]:
    return [(f"{name}{number}", bytes([number % 251]) * SIZES[number % 4]) for number in range(count)]


def reserved_bytes(peer: SmallPeer) -> int:
    """Bytes in rooms that are no objects (yet)."""
    return peer.call(lambda: reserved_now(peer))


def reserved_now(peer: SmallPeer) -> int:
    """`reserved_bytes`, for the peer's own thread."""
    segment = peer.backend.segment
    return segment.used_bytes - sum(entry.extent_bytes for entry in segment.entries())


@pytest.mark.parametrize(
    "count", [1, 2, WINDOW_ITEMS, WINDOW_ITEMS + 1, 3 * WINDOW_ITEMS, 5 * WINDOW_ITEMS + 7]
)
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
        client.put_many([(f"k{number}", b"v") for number in range(6 * WINDOW_ITEMS)])
    requests = [each for each in peer.backend.requests if each in (LocalKind.RESERVE, LocalKind.COMMIT)]
    assert requests == [LocalKind.RESERVE] + [LocalKind.COMMIT] * 6


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


async def test_a_batch_that_is_cancelled_anywhere_leaves_no_room_behind(peer: SmallPeer) -> None:
    async with p2pstore.connect(str(peer.path)) as client:
        for turns in range(40):
            items = values(3 * WINDOW_ITEMS, f"{turns}-")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.put_many, items)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            # Until then the peer may publish a window of it, and evict for the next one.
            await trio.to_thread.run_sync(peer.wait_until, lambda: reserved_now(peer) == 0, 20.0)
            found = await client.contains_many([key for key, _ in items])
            held = dict(zip([key for key, _ in items], found, strict=True))
            for key, value in items:
                try:
                    assert not held[key] or await client.get(key) == value
                except NoSuchKey:  # evicted for a window that was on its way to the peer
                    assert not await client.contains(key)


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
        sys.setprofile(step)
        client.put_many([(f"{name}-{number}", b"v" * 5000) for number in range(150)])
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


def test_a_peer_that_goes_in_the_middle_is_said(peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:
        client.put_many(values(3))
        peer.stop()
        with pytest.raises(StoreClosed):
            client.put_many(values(4 * WINDOW_ITEMS, "late"))
