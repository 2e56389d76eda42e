"""An object that many peers read at the same moment leaves its first holder a few times, and readers pass it on."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.objects import MIB
from tests.cluster.processes import PeerProcess, new_cluster
from tests.waiting import eventually

SECONDS = 30.0
PEERS = 16
FAR = ("--network", "local", "--transport", "tcp", "--memory", "64MiB")
MAX_TRANSFERS = 3


@pytest.fixture(scope="module")
def peers() -> Iterator[list[PeerProcess]]:
    """As if each had a host of its own."""
    with new_cluster(PEERS, halves=False) as cluster:
        cluster.start_first(*FAR)
        yield cluster.peers


def served(peer: PeerProcess) -> int:
    """Objects that others and their clients read there."""
    count: int = peer.client.statistics()["peer"]["served"]["tcp"]["objects"]
    return count


def at_once(peers: list[PeerProcess], read: Callable[[BlockingClient], bytes]) -> list[bytes]:
    """The result of a fresh client of each peer, all in the same moment."""
    together, values = threading.Barrier(len(peers)), [b""] * len(peers)
    with ExitStack() as stack:
        clients = [stack.enter_context(blocking.connect(socket=each.socket)) for each in peers]

        def one(number: int) -> None:
            together.wait(SECONDS)
            values[number] = read(clients[number])

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    return values


@pytest.mark.parametrize("how", ["get", "get_into", "batch", "batch of one chunk", "lease"])
def test_the_first_holder_sends_it_a_few_times(peers: list[PeerProcess], how: str) -> None:
    holder, *readers = peers
    value = random.Random(how).randbytes(MIB if how == "batch of one chunk" else 4 * MIB)
    key = f"hot by {how}"
    holder.client.put(key, value)
    eventually(lambda: all(each.client.contains(key) for each in readers), SECONDS)
    before = served(holder)

    def read(client: BlockingClient) -> bytes:
        room = bytearray(len(value))
        match how:
            case "get":
                return bytes(client.get(key))
            case "get_into":
                client.get_into(key, room)
            case "batch" | "batch of one chunk":
                results = client.get_many_into([(key, room)])
                assert results[0].value == len(value), results
            case _:
                with client.lease(key) as view:
                    room[:] = view
        return bytes(room)

    assert at_once(readers, read) == [value] * len(readers)
    assert served(holder) - before <= MAX_TRANSFERS


def test_a_peer_too_small_for_all_that_is_hot_reads_it_where_it_is() -> None:
    """It would evict each object before it is read once more, and bring it anew each time."""
    with new_cluster(2, halves=False) as cluster:
        holder, reader = cluster.peers
        cluster.start([holder], *FAR)
        cluster.start([reader], *FAR[:-1], "16MiB", "--bootstrap", holder.control)
        cluster.wait_until_whole()
        keys = [f"one of many {number}" for number in range(50)]
        for key in keys:
            holder.client.put(key, random.Random(key).randbytes(MIB))
        eventually(lambda: all(reader.client.contains_many(keys)), SECONDS)
        room = bytearray(MIB)

        def sent_on_in_a_round() -> int:
            before = sent_on(holder)
            for key in keys:
                assert reader.client.get_into(key, room) == MIB
                assert room == random.Random(key).randbytes(MIB)
            return sent_on(holder) - before

        eventually(lambda: sent_on_in_a_round() > len(keys) // 2, SECONDS)
        eventually(lambda: sent_on_in_a_round() == 0, SECONDS)


def sent_on(peer: PeerProcess) -> int:
    """How often a read was answered with: keep it."""
    counters = peer.client.statistics()["peer"]["counters"]
    count: int = counters.get("reads_sent_on", 0)
    return count
