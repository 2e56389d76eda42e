"""Views of what a neighbour holds, while its process is killed or stopped, or evicts, or the client dies."""

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.objects import MIB
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.waiting import eventually

SECONDS = 30.0
SPARE_SECONDS = 4.0
"""For a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with new_cluster(3, halves=False) as cluster:
        cluster.start_first("--network", "local")
        yield cluster


@pytest.fixture
def reader(cluster: ProcessCluster) -> Iterator[BlockingClient]:
    """A fresh client of the first peer."""
    cluster.wait_until_whole()
    with blocking.connect(cluster.peers[0].ready["socket"], timeout=3) as client:
        yield client


def statistics(peer: PeerProcess) -> dict[str, Any]:
    found: dict[str, Any] = peer.client.statistics(cluster=False)["peer"]
    return found


def is_held(reader: BlockingClient, key: str, *names: str) -> bool:
    return {copy.peer for copy in reader.locate(key) if copy.reachable} == set(names)


def put_on(peers: list[PeerProcess], reader: BlockingClient, key: str, value: bytes) -> None:
    """Put at the first of these, with copies at the others, which `reader` knows of."""
    first, *others = peers
    first.client.put(key, value)
    for other in others:
        other.client.take_lease(key, wait=SECONDS, here=True)
    eventually(lambda: is_held(reader, key, *(peer.name for peer in peers)), SECONDS)


def test_a_neighbour_that_is_stopped(cluster: ProcessCluster, reader: BlockingClient) -> None:
    _, second, third = cluster.peers
    put_on([second], reader, "stopped/held", b"held" * 1000)
    view = reader.take_lease("stopped/held")
    for number in range(8):
        put_on([second, third], reader, f"stopped/{number}", bytes([number]) * 5000)
    with second.stopped():
        began = time.monotonic()
        taken = [reader.take_lease(f"stopped/{number}") for number in range(8)]
        assert time.monotonic() - began < 1.5 + 3 + SPARE_SECONDS  # one deadline here, one there
        assert [one[-1] for one in taken] == list(range(8))
        assert view == b"held" * 1000
    del view, taken
    gc.collect()
    cluster.wait_until_whole()
    eventually(lambda: statistics(second)["leased_bytes"] == 0, SECONDS)


def test_what_happens_to_an_object_under_a_view(cluster: ProcessCluster, reader: BlockingClient) -> None:
    """Of 16 MiB, 6 are viewed; the rest is overwritten, removed and evicted over and over."""
    second = cluster.peers[1]
    rng = np.random.default_rng(1)
    values = {f"under/{name}": rng.bytes(2 * MIB) for name in ("old", "removed", "evicted")}
    views = {}
    for key, value in values.items():
        put_on([second], reader, key, value)
        views[key] = reader.take_lease(key)
    second.client.put("under/old", b"new", overwrite=True, pin="hard")
    second.client.remove("under/removed")
    for number in range(60):
        second.client.put(f"under/churn-{number}", rng.bytes(MIB))
    assert statistics(second)["objects"] < 40  # most of them were evicted
    for key, value in values.items():
        assert views[key] == value
    eventually(lambda: bytes(reader.take_lease("under/old")) == b"new", SECONDS)
    with pytest.raises(NoSuchKey):
        reader.take_lease("under/removed")
    views.clear()
    gc.collect()
    eventually(lambda: statistics(second)["leased_bytes"] == 0, SECONDS)


HOLDING = """
import sys
from p2pstore import blocking
client = blocking.connect(sys.argv[1])
view = client.take_lease(sys.argv[2], wait=30)
print(len(view), flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed(cluster: ProcessCluster, reader: BlockingClient) -> None:
    first, second, _ = cluster.peers
    put_on([second], reader, "client", bytes(MIB))
    command = [sys.executable, "-c", HOLDING, first.ready["socket"], "client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == MIB
            assert statistics(second)["leased_bytes"] >= MIB
        finally:
            process.kill()
    eventually(lambda: statistics(second)["leased_bytes"] == 0, SECONDS)


def test_a_neighbour_that_is_killed(cluster: ProcessCluster, reader: BlockingClient) -> None:
    _, second, third = cluster.peers
    put_on([second], reader, "killed/lost", b"lost" * 1000)
    views = [reader.take_lease("killed/lost")]
    for number in range(8):
        put_on([second, third], reader, f"killed/{number}", bytes([number]) * 5000)
        views.append(reader.take_lease(f"killed/{number}"))
    second.signal(signal.SIGKILL)
    for number in range(8):  # whichever peer held the first view
        assert reader.take_lease(f"killed/{number}") == bytes([number]) * 5000
    second.kill()
    eventually(lambda: is_held(reader, "killed/0", third.name), SECONDS)
    assert reader.take_lease("killed/0") == bytes(5000)
    with pytest.raises((NoSuchKey, Unavailable)):
        reader.take_lease("killed/lost")
    second.start("--network", "local", "--bootstrap", third.control)
    second.wait_until_ready()  # in new memory
    cluster.wait_until_whole()
    put_on([second], reader, "killed/after", b"after" * 1000)
    assert reader.take_lease("killed/after") == b"after" * 1000
    assert views[0] == b"lost" * 1000
    assert [bytes(view[-1:]) for view in views[1:]] == [bytes([number]) for number in range(8)]


def test_clients_of_peers_that_use_tcp_alone() -> None:
    with new_cluster(2, halves=False) as cluster:
        cluster.start_first("--network", "local", "--transport", "tcp")
        near, far = cluster.peers
        with blocking.connect(near.ready["socket"]) as client:
            put_on([far], client, "k", bytes(MIB))
            assert client.take_lease("k") == bytes(MIB)
            eventually(lambda: is_held(client, "k", near.name, far.name), SECONDS)
        assert statistics(far)["leased_bytes"] == 0
        received = near.client.statistics(cluster=False)["peer"]["received"]
        assert set(received) == {"tcp"}


def mapped(process_id: int | str, access: str = "") -> set[str]:
    """The memories of peers that a process has mapped, by inode; those with this access alone."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "/memfd:p2pstore" in line]
    return {inode for _, found, _, _, inode, *_ in fields if found.startswith(access)}


IDLE = """
# Reads, and then does nothing until its standard input ends.
import asyncio, sys, trio
import p2pstore
from p2pstore import aio, blocking

async def read(client):
    await client.get("dead/k")
    view = await client.take_lease("dead/viewed")
    print("read", bytes(view[:5]), flush=True)

async def under_trio():
    async with p2pstore.connect(sys.argv[2]) as client:
        await read(client)
        await trio.to_thread.run_sync(sys.stdin.read)

async def under_asyncio():
    async with aio.connect(sys.argv[2]) as client:
        await read(client)
        await asyncio.to_thread(sys.stdin.read)

def plain():
    client = blocking.connect(sys.argv[2])
    client.get("dead/k")
    view = client.take_lease("dead/viewed")
    print("read", bytes(view[:5]), flush=True)
    del view
    sys.stdin.read()

{"trio": lambda: trio.run(under_trio), "asyncio": lambda: asyncio.run(under_asyncio()), "plain": plain}[sys.argv[1]]()
"""


def test_nobody_keeps_the_memory_of_a_dead_neighbour(
    cluster: ProcessCluster, reader: BlockingClient
) -> None:
    first, _, third = cluster.peers
    for key in ("dead/k", "dead/viewed"):
        put_on([third], reader, key, b"value" * 1000)
    memory = mapped(third.process_id, "rw")  # its own; others' memory can only be read
    idle = [
        subprocess.Popen(
            [sys.executable, "-c", IDLE, kind, first.ready["socket"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for kind in ("trio", "asyncio", "plain")
    ]
    try:
        for each in idle:
            assert each.stdout is not None
            assert each.stdout.readline() == b"read b'value'\n"
        with reader.lease("dead/k", here=True) as view:  # the first peer reads it, too
            assert view == b"value" * 1000
        readers = [first.process_id, *(each.pid for each in idle)]
        assert all(memory & mapped(each) for each in readers)
        third.kill()
        eventually(
            lambda: not any(memory & mapped(each) for each in readers),
            SECONDS,
            lambda: [bool(memory & mapped(each)) for each in readers],
        )
    finally:
        for each in idle:
            each.kill()
            each.communicate()
    cluster.start([third], "--bootstrap", first.control, "--network", "local")
    cluster.wait_until_whole()
    put_on([third], reader, "dead/again", b"again" * 1000)
    assert reader.get("dead/again") == b"again" * 1000
    assert mapped(third.process_id, "rw") & mapped("self")
