"""Holders whose process was stopped: a read waits for one once, and not for long while another has the object."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pstore import blocking
from p2pstore.errors import Unavailable
from p2pstore.objects import MIB
from p2pstore.results import ItemResult
from p2pstore.transfer import transport as transports
from tests.cluster.machines import Machine, Peer
from tests.waiting import eventually

HURRIED_SECONDS = 60.0
SPARE_SECONDS = 2.0
"""For a busy machine; a second wait for the same holder would take longer."""


def cluster(machine: Machine, *names: str, transport: str = "auto") -> list[Peer]:
    options = "--transport", transport
    peers = [machine.join(names[0], *options)]
    bootstrap = "--bootstrap", peers[0].ready["control"]
    peers += [machine.join(name, *bootstrap, *options) for name in names[1:]]
    eventually(lambda: all(peer.alive() == len(names) for peer in peers))
    return peers


@contextlib.contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    peer.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        peer.process.send_signal(signal.SIGCONT)


def seconds_of(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("transport", "why"), [("auto", "hangs or was stopped"), ("tcp", "no progress for 3 s")]
)
def test_the_only_holder_hangs(machine: Machine, transport: str, why: str) -> None:
    reader, holder = cluster(machine, "reader", "holder", transport=transport)
    keys = [f"k{number}" for number in range(5)]
    for key in keys:
        holder.client.put(key, b"value")
    eventually(lambda: all(reader.client.contains_many(keys)))
    results: list[ItemResult[int]] = []

    def get() -> None:
        with pytest.raises(Unavailable, match=why):
            client.get(keys[0])

    def get_all() -> None:
        # Two ways of asking: for what goes into buffers of small objects, and for what does not.
        items = [(key, bytearray(5 + MIB * (key < "k2"))) for key in keys]
        results.extend(other.get_many_into(items))

    with (
        blocking.connect(reader.ready["socket"], timeout=3) as client,
        blocking.connect(reader.ready["socket"], timeout=3) as other,
        stopped(holder),
        ThreadPoolExecutor(2) as threads,  # at once: their peer would tell the second one
    ):
        for seconds in threads.map(seconds_of, (get, get_all)):
            assert 2.9 < seconds < 3 + SPARE_SECONDS  # not that for each key, or each way of asking
        assert not any(each.ok for each in results)


@pytest.mark.parametrize("length", [5, 300_000, 5_000_000])
def test_another_holder_is_asked_soon(
    machine: Machine, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When none begins to answer within a few times what is usual, long before the wait for an answer would end."""
    monkeypatch.setattr(transports, "HOLDER_ANSWER_SECONDS", HURRIED_SECONDS)
    reader, first, second = cluster(machine, "reader", "first", "second", transport="tcp")
    keys = [f"k{number}" for number in range(8)]  # each read begins at one of the two, by chance
    for key in keys:
        first.client.put(key, bytes(length))
        second.client.take_lease(key, wait=5, here=True)  # brings a copy there

    def on_both() -> bool:
        places = [{place.peer for place in reader.client.locate(key)} for key in keys]
        return all(each == {"first", "second"} for each in places)

    eventually(on_both)
    clients = [blocking.connect(reader.ready["socket"], timeout=2 * HURRIED_SECONDS) for _ in range(2)]
    with clients[0] as one_by_one, clients[1] as together:
        rooms = [bytearray(b"\xee" * length) for _ in 2 * keys]
        for client in clients:
            assert [client.get(key) for key in keys] == [bytes(length)] * len(keys)

        def read() -> None:
            for key, room in zip(keys, rooms, strict=False):
                one_by_one.get_into(key, room)
            items = list(zip(keys, rooms[len(keys) :], strict=True))
            assert all(each.ok for each in together.get_many_into(items))

        with stopped(first):
            assert seconds_of(read) < HURRIED_SECONDS
            assert rooms == [bytes(length)] * len(rooms)
            for room in rooms:
                room[:] = b"\xee" * length
        # Now it answers, to no reader any more.
        eventually(lambda: first.client.get(keys[0]) and reader.alive() == 3)
        assert rooms == [b"\xee" * length] * len(rooms)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_hung_holder_delays_no_others_keys(machine: Machine, mixed: bool) -> None:
    reader, hung, good = cluster(machine, "reader", "hung", "good", transport="tcp")
    keys = [f"{name}{number}" for name in ("hung", "good") for number in range(40)]
    for holder in (hung, good):
        holder.client.put_many([(key, key.encode()) for key in keys if key[:4] == holder.name])
    eventually(lambda: all(reader.client.contains_many(keys)))
    if mixed:
        keys.sort(key=lambda key: int(key[4:]))
    with blocking.connect(reader.ready["socket"], timeout=60) as client, ThreadPoolExecutor(1) as thread:
        assert all(each.ok for each in client.get_many(keys))  # from here on it knows the way
        items = [(key, bytearray(len(key))) for key in keys]
        with stopped(hung):
            reading = thread.submit(client.get_many_into, items)
            eventually(lambda: all(buffer == key.encode() for key, buffer in items if key < "h"))
            assert not reading.done()
        assert all(each.ok for each in reading.result())
