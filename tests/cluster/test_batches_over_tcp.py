"""Batches of reads between peers that use nothing but TCP, as those of two hosts would."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore import NoSuchKey
from p2pstore.client.destinations import COPIED_BYTES, MAX_COPIED, BytesDestination
from p2pstore.errors import BufferTooSmall
from p2pstore.objects import KIB, MIB
from p2pstore.peer import Peer
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.transport import RemotePeer
from tests.cluster.test_hung_ssd import peer
from tests.cluster.test_put_elsewhere import client_of
from tests.contract.test_transport import cancelled_at_step
from tests.waiting import eventually, until


@pytest.mark.parametrize("first", [0, 10, COPIED_BYTES, 100_000])
async def test_new_values_of_all_sizes(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [first, 10, 0, 100_000, 16 * KIB, 16 * KIB + 1, 64 * KIB, 64 * KIB + 1, 5, 2 * MIB]
    items = [(f"k{n}", random.Random(n).randbytes(length)) for n, length in enumerate(lengths)]
    keys, values = [key for key, _ in items], [value for _, value in items]
    together = 0
    take = BytesDestination.take

    def taken(destination: BytesDestination, value: memoryview) -> None:
        nonlocal together
        together += 1
        take(destination, value)

    monkeypatch.setattr(BytesDestination, "take", taken)
    async with (
        peer(tmp_path, "owner", transport="tcp") as owner,
        peer(tmp_path, "reader", owner, transport="tcp") as reader,
    ):
        assert all(each.ok for each in await owner.put_many(items))
        await until(lambda: all(reader.contains_nowait(key) for key in keys))
        for turn in range(3):  # from the second one on it is known how to get there
            got = await reader.get_many([*keys, "nowhere", *keys[:3]])
            assert [each.value for each in got] == [*values, None, *values[:3]]
            assert isinstance(got[len(keys)].error, NoSuchKey)
            rooms = await reader.get_new_views(keys, lambda length: memoryview(bytearray(length)))
            assert [bytes(room) for room in rooms if isinstance(room, memoryview)] == values
            small = sum(0 < length <= COPIED_BYTES for length in [*lengths, *lengths[:3]])
            if turn and first in (0, 10, COPIED_BYTES):
                assert together >= (small if first else 0)
        await owner.put("k1", b"another", overwrite=True)
        await until(lambda: reader.locate_nowait("k1")[0].version > (0, 0))
        document: Any = (await reader.statistics())["peer"]
        assert set(document["received"]) == {"tcp"}


async def test_more_small_values_than_are_received_together(tmp_path: Path) -> None:
    items = [(f"k{number}", number.to_bytes(4, "little") * 3) for number in range(MAX_COPIED + 99)]
    async with (
        peer(tmp_path, "owner", transport="tcp") as owner,
        peer(tmp_path, "reader", owner, transport="tcp") as reader,
    ):
        assert all(each.ok for each in await owner.put_many(items))
        await until(lambda: all(reader.contains_nowait(key) for key, _ in items))
        for _ in range(2):
            got = await reader.get_many([key for key, _ in items])
            assert [(each.key, each.value) for each in got] == items
        room = memoryview(bytearray(12))
        with pytest.raises(ValueError, match="2 keys, but 1 places"):
            await reader.get_into_views(["k1", "k2"], [room])
        assert await reader.get_into_views(["k7"], [room]) == [12]


@asynccontextmanager
async def three_holders(folder: Path) -> AsyncIterator[tuple[Peer, list[str], dict[str, bytes]]]:
    """A reader, and the keys and values of three other peers, which it knows."""
    async with AsyncExitStack() as stack:
        reader = await stack.enter_async_context(peer(folder, "reader", transport="tcp"))
        values: dict[str, bytes] = {}
        for name in "abc":
            holder = await stack.enter_async_context(peer(folder, name, reader, transport="tcp"))
            some = {f"{name}{n}": random.Random(n).randbytes(20_000 + n) for n in range(20)}
            assert all(each.ok for each in await holder.put_many(list(some.items())))
            values |= some
        keys = sorted(values, key=lambda key: key[1:])
        await until(lambda: all(reader.contains_nowait(key) for key in keys))
        yield reader, keys, values


@pytest.mark.parametrize("kind", ["trio", "blocking"])
@pytest.mark.parametrize("known", [False, True], ids=["planned", "known"])
async def test_holders_are_read_side_by_side(
    tmp_path: Path, kind: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[bytes] = set()
    pull_small_parts = ConnectionPool.pull_small_parts

    async def pull(pool: ConnectionPool, copy: RemotePeer, *wanted: Any) -> Any:
        """Begins when all holders are being asked."""
        asked.add(copy.peer_id)
        if kind == "trio":
            await until(lambda: len(asked) == 3)
        else:
            eventually(lambda: len(asked) == 3)
        return await pull_small_parts(pool, copy, *wanted)

    async with three_holders(tmp_path) as (reader, keys, values), client_of(reader, kind) as client:
        if known:
            assert [each.value for each in await client.get_many(keys)] == [values[key] for key in keys]
        monkeypatch.setattr(ConnectionPool, "pull_small_parts", pull)
        buffers = [(key, bytearray(21_000)) for key in [*keys, "nowhere"]]
        *results, nowhere, short = await client.get_many_into([*buffers, (keys[0], bytearray(9))])
        assert [
            buffer[: each.unwrap()] for each, (_, buffer) in zip(results, buffers, strict=False)
        ] == [values[key] for key in keys]
        assert (type(nowhere.error), type(short.error)) == (NoSuchKey, BufferTooSmall)


@pytest.mark.parametrize("task", ["_TrioHelper", "test_"])
async def test_a_batch_of_several_holders_is_cancelled_at_each_step(tmp_path: Path, task: str) -> None:
    async with three_holders(tmp_path) as (reader, keys, values), client_of(reader, "trio") as client:
        pool = client._live.fetcher.holders._pool
        assert all(each.ok for each in await client.get_many(keys))
        for order in (keys, sorted(keys)):
            for at in count(1):
                buffers = [(key, bytearray(21_000)) for key in order]
                with trio.CancelScope() as scope, cancelled_at_step(task, at, scope) as counter:
                    results = await client.get_many_into(buffers)
                after = [bytes(buffer) for _, buffer in buffers]
                if counter.steps < at:
                    break
                assert pool.open_connections <= 12
                assert not any(each.users for some in pool._peers.values() for each in some)
                await trio.testing.wait_all_tasks_blocked()
                assert [bytes(buffer) for _, buffer in buffers] == after, "something still writes"
            assert at > 3
            assert [
                bytes(buffer[: each.unwrap()])
                for each, (_, buffer) in zip(results, buffers, strict=True)
            ] == [values[key] for key in order]
