"""Real peers, of which one serves a byte now and then: what it holds beside a good peer is read there, by clients of
every kind and by their peer, and it is asked less and less."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from p2pstore.objects import KIB
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from p2pstore.transfer import transport
from tests.cluster.peers import config
from tests.cluster.test_put_elsewhere import client_of
from tests.contract.test_slow_holders import NEVER, SPARE_SECONDS, Trickle
from tests.ports import free_port
from tests.waiting import until

HASTE_SECONDS = 0.3
KEYS = 12
LENGTH = 300 * KIB


class World(NamedTuple):
    reader: Peer
    good: Peer
    slow: Peer
    way: Trickle
    """To the slow one; its attack begins with `way.attack`."""

    def values(self) -> dict[str, bytes]:
        return {f"k{number}": bytes([number]) * LENGTH for number in range(KEYS)}

    async def place(self) -> None:
        """Have all objects at the good peer and at the slow one, and known there to the reader."""
        for key, value in self.values().items():
            await self.good.put(key, value)
            async with self.slow.lease(key, wait=10.0):
                pass
        reader = self.reader
        await until(lambda: all(len(reader.locate_nowait(key)) == 2 for key in self.values()))


@asynccontextmanager
async def world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(transport, "HOLDER_ANSWER_SECONDS", HASTE_SECONDS)
    tcp: dict[str, object] = {"transport": "tcp"}
    target = f"127.0.0.1:{free_port('127.0.0.1')}"
    way = Trickle(first_bytes=1 << 60, every_seconds=0.1)
    async with (
        way.open(target),
        open_peer(config(folder, "reader", **tcp)) as reader,
        open_peer(config(folder, "good", reader, **tcp)) as good,
        open_peer(
            config(folder, "slow", reader, data_listen=[target], data_advertise=[way.address], **tcp)
        ) as slow,
    ):
        peers = reader, good, slow
        await until(lambda: all(len(peer.node.core.live_peers()) == 2 for peer in peers))
        yield World(*peers, way)


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    with trio.fail_after(60):
        await action()
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["trio", "blocking"])
async def test_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with world(tmp_path, monkeypatch) as there:
        await there.place()
        values = there.values()

        async def one_by_one(client: Any) -> None:
            for key, value in values.items():
                assert bytes(await client.get(key)) == value

        async def in_a_batch(client: Any) -> None:
            results = await client.get_many(list(values))
            assert [bytes(each.unwrap()) for each in results] == list(values.values())

        async def into_small_rooms(client: Any) -> None:
            rooms = [bytearray(LENGTH) for _ in values]
            results = await client.get_many_into(list(zip(values, rooms, strict=True)))
            assert all(each.ok for each in results)
            assert rooms == list(values.values())

        async def side_by_side(client: Any) -> None:
            async with trio.open_nursery() as nursery:
                for key in values:
                    nursery.start_soon(client.get, key)

        reads = [one_by_one, in_a_batch, into_small_rooms]
        there.way.attack(400)
        for read in [*reads, side_by_side] if kind == "trio" else reads:
            async with client_of(there.reader, kind) as client:
                # A few of the first reads meet the slow one; then it is avoided.
                assert await timed(lambda: read(client)) < 4 * HASTE_SECONDS + SPARE_SECONDS  # noqa: B023
        counters = there.reader.node.core.counters
        await until(lambda: counters["holders_too_slow"] > 0)


@pytest.mark.parametrize(("first_bytes", "every_seconds"), [(400, 0.1), (100_000, NEVER)])
async def test_a_peer_that_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_bytes: int, every_seconds: float
) -> None:
    async with world(tmp_path, monkeypatch) as there:
        await there.place()
        there.way.every_seconds = every_seconds
        there.way.attack(first_bytes)

        async def fetch(key: str) -> None:
            async with there.reader.lease(key) as view:
                assert bytes(view) == there.values()[key]

        async def fetch_all() -> None:
            async with trio.open_nursery() as nursery:
                for key in there.values():
                    nursery.start_soon(fetch, key)

        assert await timed(fetch_all) < 4 * HASTE_SECONDS + SPARE_SECONDS
        counters = there.reader.node.core.counters
        assert counters["holders_too_slow"] > 0
        assert counters["pulls_failed"] == 0
        told = json.dumps(there.reader.node.watch.slow.document()["operations"])
        assert "progress" in told
