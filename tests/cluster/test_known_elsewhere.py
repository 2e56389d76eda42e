"""Clients that read in their peer's table what other peers hold, while those put, remove, flush and die."""

import asyncio
import errno
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore import aio, blocking, connect, open_peer
from p2pstore.blocking import BlockingClient
from p2pstore.client import holder_reads
from p2pstore.client.known_holders import KnownHolders
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.session import ClientSession
from p2pstore.errors import (
    BufferTooSmall,
    ConfigError,
    DeadlineExceeded,
    NoSuchKey,
    StoreClosed,
    Unavailable,
)
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import key_digest
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.transport import RemotePeer
from tests.cluster.peers import config
from tests.cluster.processes import PeerProcess, new_cluster
from tests.waiting import eventually

SECONDS = 30.0
COUNT = 200
FAR = ("--network", "local", "--transport", "tcp")
Read = Callable[[], Awaitable[None]]
Gather = Callable[[Sequence[Read], Callable[[], None]], Awaitable[None]]
ASKING = (LocalKind.CONTAINS, LocalKind.MATCH_PREFIX, LocalKind.PLAN)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[PeerProcess]]:
    with new_cluster(2, halves=False) as cluster:
        cluster.start_first("--network", "local")
        yield cluster.peers


@pytest.fixture(scope="module")
def far_pair() -> Iterator[list[PeerProcess]]:
    """As if on two hosts."""
    with new_cluster(2, halves=False) as cluster:
        cluster.start_first(*FAR)
        yield cluster.peers


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what clients of this process ask their peers."""
    asked: list[str] = []
    for name in ("ask_ahead", "request"):
        original = getattr(PeerLink, name)

        def counted(
            self: PeerLink, kind: int, *args: Any, original: Any = original, **options: Any
        ) -> Any:
            if kind in ASKING:
                asked.append(LocalKind(kind).name)
            return original(self, kind, *args, **options)

        monkeypatch.setattr(PeerLink, name, counted)
    return asked


def keys_of(word: str) -> list[str]:
    return [f"{word}-{number}" for number in range(COUNT)]


def put_all(holder: BlockingClient, keys: list[str]) -> None:
    assert all(result.ok for result in holder.put_many([(key, b"value") for key in keys]))


def until_unasked(asked: list[str], reads: Callable[[], None]) -> None:
    """Have `reads` pass without a question; not at once, perhaps: in the moment in which the peer changes its table,
    a client asks."""

    def unasked() -> bool:
        asked.clear()
        reads()
        return not asked

    eventually(unasked, SECONDS)


def answers_alone(client: BlockingClient, keys: list[str], asked: list[str]) -> bool:
    """Whether all of them are found without a question."""
    asked.clear()
    return all(client.contains_many(keys)) and not asked


def test_keys_elsewhere_need_no_question(pair: list[PeerProcess], questions: list[str]) -> None:
    holder, reader = pair[0].client, pair[1].client
    keys, absent = keys_of("held"), keys_of("absent")
    put_all(holder, keys)
    eventually(lambda: answers_alone(reader, keys, questions), SECONDS)

    def reads() -> None:
        assert all(reader.contains(key) for key in keys)
        assert not any(reader.contains(key) for key in absent)
        assert reader.contains_many(keys + absent) == [True] * COUNT + [False] * COUNT
        assert reader.match_prefix([*keys, *absent]) == COUNT
        assert reader.match_prefix(absent) == 0

    until_unasked(questions, reads)
    reader.remove(keys[0])  # here and now it is gone, though the holder may not have heard of it
    assert not reader.contains(keys[0])
    assert reader.contains_many(keys)[:2] == [False, True]
    holder.put(keys[0], b"again", overwrite=True)
    eventually(lambda: answers_alone(reader, keys, questions), SECONDS)
    reader.put("mine", b"value")

    def reads_own() -> None:
        assert reader.contains("mine")

    until_unasked(questions, reads_own)


def test_holders_that_were_named_are_found_again(pair: list[PeerProcess], questions: list[str]) -> None:
    holder, keys = pair[0].client, keys_of("planned")
    for key in keys:
        holder.put(key, key.encode())
    eventually(lambda: answers_alone(pair[1].client, keys, questions), SECONDS)
    with blocking.connect(pair[1].ready["socket"]) as reader:
        assert reader.get(keys[0]) == keys[0].encode()
        assert questions == ["PLAN"]

        def reads() -> None:
            for key in keys:
                assert reader.get(key) == key.encode()
            into = [(key, bytearray(len(key))) for key in keys]
            assert all(result.ok for result in reader.get_many_into(into))
            assert all(bytes(buffer) == key.encode() for key, buffer in into)

        until_unasked(questions, reads)
        with pytest.raises(NoSuchKey):
            reader.get("nowhere")
        assert questions == ["PLAN"]
        holder.remove(keys[1])
        with pytest.raises(NoSuchKey):
            reader.get(keys[1])
        holder.put(keys[2], b"newer", overwrite=True)
        eventually(lambda: reader.get(keys[2]) == b"newer", SECONDS)


def test_a_holder_that_came_back_elsewhere_is_found(pair: list[PeerProcess]) -> None:
    holder, keys = pair[0], keys_of("moved")
    with blocking.connect(pair[1].ready["socket"]) as reader:
        holder.client.put(keys[0], b"before")
        eventually(lambda: reader.contains(keys[0]), SECONDS)
        assert reader.get(keys[0]) == b"before"
        holder.kill()
        holder.start("--network", "local", "--bootstrap", pair[1].control)
        holder.wait_until_ready()  # its data address is another one
        holder.client.put(keys[1], b"after")
        eventually(lambda: reader.contains(keys[1]), SECONDS)
        assert reader.get(keys[1]) == b"after"


def test_the_only_holder_on_another_host_is_read_without_a_plan(
    far_pair: list[PeerProcess], questions: list[str]
) -> None:
    holder, keys = far_pair[0].client, keys_of("far")
    values = {key: key.encode() * (number + 1) for number, key in enumerate(keys)}
    values[keys[1]], values[keys[2]] = b"", bytes(range(256)) * 8192  # two chunks
    assert all(result.ok for result in holder.put_many(list(values.items())))
    with blocking.connect(far_pair[1].ready["socket"]) as reader:
        eventually(lambda: answers_alone(reader, keys, questions), SECONDS)
        assert reader.get(keys[0]) == values[keys[0]]
        assert questions == ["PLAN"]

        def reads() -> None:
            assert [reader.get(key) for key in keys] == list(values.values())
            into = [(key, bytearray(len(value))) for key, value in values.items()]
            results = reader.get_many_into([*into, (keys[0], bytearray(1))])
            assert [result.value for result in results] == [*map(len, values.values()), None]
            assert isinstance(results[-1].error, BufferTooSmall)
            assert [bytes(buffer) for _, buffer in into] == list(values.values())

        until_unasked(questions, reads)
        holder.remove(keys[3])
        with pytest.raises(NoSuchKey):
            reader.get(keys[3])
        holder.remove(keys[4])
        gone, there = reader.get_many_into([(keys[4], bytearray(99)), (keys[5], bytearray(99))])
        assert isinstance(gone.error, NoSuchKey)
        assert there.value == len(values[keys[5]])


async def test_small_objects_on_another_host_are_read_together_by_many_tasks(
    far_pair: list[PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {key: key.encode() * 20 for key in keys_of("far together")}
    assert all(each.ok for each in far_pair[0].client.put_many(list(values.items())))
    asked: list[int] = []
    unsettled: list[bytes] = []
    pull_small, only = ConnectionPool.pull_small, KnownHolders.only_holder

    def counted_small(
        pool: ConnectionPool, copy: RemotePeer, digests: Sequence[bytes], *rest: Any
    ) -> Any:
        asked.append(len(digests))
        return pull_small(pool, copy, digests, *rest)

    def noted_only(known: KnownHolders, digest: bytes, *rest: Any) -> Any:
        copy = only(known, digest, *rest)
        unsettled.extend([digest] * (copy is None))
        return copy

    # The first one lets the others ask before it reads, however lately it did so.
    monkeypatch.setattr(holder_reads, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(KnownHolders, "only_holder", noted_only)
    monkeypatch.setattr(ConnectionPool, "pull_small", counted_small)

    keys, holder = list(values), far_pair[0]

    async def read_at_once(client: ClientSession, start: int, gather: Gather) -> None:
        """So that all have asked before the first one is answered."""

        async def get(key: str) -> None:
            assert await client.get(key) == values[key]

        async def get_into(key: str) -> None:
            buffer = bytearray(1000)
            length = await client.get_into(key, buffer)
            assert buffer[:length] == values[key]

        await get(keys[start])  # from here on it knows how to get there
        expected = client._live.fetcher.holders.known.expected_bytes
        eventually(lambda: all(expected(key_digest(key)) for key in keys[start:][:20]), SECONDS)
        some, others = keys[start : start + 10], keys[start + 10 : start + 20]
        reads = [*(partial(get, key) for key in some), *(partial(get_into, key) for key in others)]
        for _ in range(3):
            asked.clear()
            unsettled.clear()
            with holder.stopped():
                await gather(reads, lambda: holder.signal(signal.SIGCONT))
            if not unsettled:  # a look while the peer changes its table leads to another way of reading
                break
        assert asked == [20]

    async def gather_in_trio(reads: Sequence[Read], asked_all: Callable[[], None]) -> None:
        async with trio.open_nursery() as nursery:
            for read in reads:
                nursery.start_soon(read)
            await wait_all_tasks_blocked()
            asked_all()

    async def gather_in_asyncio(reads: Sequence[Read], asked_all: Callable[[], None]) -> None:
        tasks = [asyncio.ensure_future(read()) for read in reads]
        await asyncio.sleep(0)
        asked_all()
        await asyncio.gather(*tasks)

    async def in_asyncio() -> None:
        async with await aio.connect(far_pair[1].ready["socket"]) as client:
            await read_at_once(client, 20, gather_in_asyncio)

    async with connect(far_pair[1].ready["socket"]) as client:
        with trio.fail_after(SECONDS):
            while not all(await client.contains_many(keys)):
                await trio.sleep(0.01)
        await read_at_once(client, 0, gather_in_trio)
    await trio.to_thread.run_sync(lambda: asyncio.run(in_asyncio()))


def test_the_only_holder_on_another_host_may_move(far_pair: list[PeerProcess]) -> None:
    holder, keys = far_pair[0], keys_of("far moved")
    with blocking.connect(far_pair[1].ready["socket"]) as reader:
        holder.client.put(keys[0], b"before")
        eventually(lambda: reader.contains(keys[0]), SECONDS)
        assert reader.get(keys[0]) == b"before"
        holder.kill()
        with pytest.raises((NoSuchKey, Unavailable)):
            reader.get(keys[0])
        (lost,) = reader.get_many_into([(keys[0], bytearray(9))])
        assert isinstance(lost.error, NoSuchKey | Unavailable)
        holder.start(*FAR, "--bootstrap", far_pair[1].control)
        holder.wait_until_ready()  # its data address is another one
        put_all(holder.client, keys[1:4])
        eventually(lambda: all(reader.contains_many(keys[1:4])), SECONDS)
        # The new locations may come before the new address.
        assert reader.get(keys[1], wait=SECONDS) == b"value"
        rooms = [(key, bytearray(5)) for key in keys[1:4]]
        assert [result.value for result in reader.get_many_into(rooms)] == [5, 5, 5]


def test_a_flush_is_seen_at_once(pair: list[PeerProcess], questions: list[str]) -> None:
    with (
        blocking.connect(pair[0].ready["socket"], namespace="flushed") as holder,
        blocking.connect(pair[1].ready["socket"], namespace="flushed") as reader,
    ):
        keys = keys_of("flushed")
        put_all(holder, keys)
        eventually(lambda: answers_alone(reader, keys, questions), SECONDS)
        reader.flush()
        assert not any(reader.contains_many(keys))
        assert not any(reader.contains(key) for key in keys)
        put_all(holder, keys)
        eventually(lambda: all(reader.contains_many(keys)), SECONDS)
    assert pair[1].client.contains("mine")  # another namespace


def test_a_peer_that_is_stopped_is_asked(pair: list[PeerProcess], questions: list[str]) -> None:
    holder = pair[0].client
    keys = keys_of("stopped")
    put_all(holder, keys)
    eventually(lambda: answers_alone(pair[1].client, keys, questions), SECONDS)
    with blocking.connect(pair[1].ready["socket"], timeout=0.5) as reader:
        with pair[1].stopped(), pytest.raises(DeadlineExceeded):
            eventually(lambda: not reader.contains(keys[0]), SECONDS)
        eventually(lambda: answers_alone(reader, keys, questions), SECONDS)


def test_what_a_dead_peer_held_is_not_there(pair: list[PeerProcess], questions: list[str]) -> None:
    keys = keys_of("dies")
    put_all(pair[0].client, keys)
    reader = pair[1].client
    eventually(lambda: answers_alone(reader, keys, questions), SECONDS)
    pair[0].signal(signal.SIGKILL)
    pair[0].kill()
    eventually(lambda: not any(reader.contains_many(keys)), SECONDS)

    def reads() -> None:
        assert not reader.contains(keys[0])

    until_unasked(questions, reads)
    pair[0].start("--network", "local", "--bootstrap", pair[1].control)
    pair[0].wait_until_ready()
    put_all(pair[0].client, keys)
    eventually(lambda: answers_alone(reader, keys, questions), SECONDS)


def open_tables() -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("p2pstore-locations" in link for link in links)


async def test_a_table_goes_with_its_peer_and_its_clients(tmp_path: Path) -> None:
    gc.collect()
    before = open_tables()
    with trio.fail_after(SECONDS):
        gc.disable()
        try:
            async with open_peer(config(tmp_path, "peer")) as peer:
                assert not await peer.contains("nowhere")
                assert open_tables() > before
            assert open_tables() == before
            with pytest.raises(StoreClosed):
                peer.contains_nowait("nowhere")
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("p2pstore.local.local_greeting.map_table", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("p2pstore.peer.assembly.create_table_memory", ConfigError("this kernel cannot")),
    ],
    ids=["no room to map it", "no memory that can be mapped"],
)
async def test_without_a_table_the_peer_is_asked(
    tmp_path: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    with trio.fail_after(SECONDS):
        async with open_peer(config(tmp_path, "peer")) as peer:
            assert not await peer.contains("nowhere")
            assert questions == ["CONTAINS"]
