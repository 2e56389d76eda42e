"""Clients of a peer that reads by RDMA alone: it brings what they want to its memory. RDMA itself is in tests/rdma;
here the peer may use TCP instead, and its clients must not notice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2pstore import errors
from p2pstore.local.messages import PlanItem
from p2pstore.objects import MIB, key_digest
from p2pstore.peer.api import Peer
from p2pstore.transfer.trace import FetchTrace
from tests.cluster.test_open_peer import cluster, until

VALUE = bytes(range(256)) * 8192  # 2 MiB


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Peer, Peer]]:
    """The second one as if it used RDMA alone."""
    async with cluster(folder, 2) as (first, second):
        second.node.config.transport = "rdma"
        second.node.transports = [each for each in second.node.transports if each.name == "tcp"]
        yield first, second


async def test_a_get_leaves_a_copy_and_says_whence_it_came(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, second):
        await first.put("k", VALUE)
        trace, buffer = FetchTrace(), bytearray(len(VALUE))
        assert await second.get("k", wait=5) == VALUE
        assert second.node.core.segment.find(key_digest("k"), 0.0) is not None
        counters = second.node.core.counters
        assert counters["pulls_delivered"] == 1
        await first.put("traced", VALUE)
        await until(lambda: second.contains_nowait("traced"))
        assert await second.get_into("traced", buffer, trace=trace) == len(VALUE)
        assert buffer == VALUE
        assert (trace.local, trace.source, trace.transport) == (False, "p0", "tcp")
        assert [(each.peer, each.outcome) for each in trace.tries] == [("p0", "delivered")]
        await until(lambda: second.node.core.segment.leased_bytes == 0)


async def test_holders_are_not_told_to_clients_with_a_way_to_them(tmp_path: Path) -> None:
    """Older clients would read from them over TCP."""
    async with pair(tmp_path) as (first, second):
        await first.put("k", VALUE)
        await until(lambda: second.contains_nowait("k"))
        fetcher = second._live.fetcher
        elsewhere = fetcher._link.elsewhere
        assert elsewhere is not None
        await until(lambda: bool(elsewhere.holders(key_digest("k"))))
        for _ in range(2):  # the client makes no plan of its own out of the first one
            (plan,) = await fetcher.plan("k", [key_digest("k")])
            assert type(plan) is PlanItem
            assert plan.through_peer
            (holder,) = plan.holders
            assert (holder.name, holder.data, holder.socket) == ("p0", [], "")


async def test_a_batch(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, second):
        for number in range(4):
            await first.put(f"k{number}", VALUE[number:])
        await until(lambda: second.contains_nowait("k3"))
        items = [(f"k{number}", bytearray(len(VALUE))) for number in range(5)]
        done = await second.get_many_into(items)
        assert [each.value for each in done[:4]] == [len(VALUE) - number for number in range(4)]
        assert isinstance(done[4].error, errors.NoSuchKey)
        for number, (_, buffer) in enumerate(items[:4]):
            assert buffer[: len(VALUE) - number] == VALUE[number:]


async def test_reads_that_follow_one_another_may_take_more_than_one_may_hold(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (first, second):  # one client may hold half of 32 MiB
        for number in range(3):
            await first.put(f"k{number}", bytes([number]) * (9 * MIB))
        await until(lambda: second.contains_nowait("k2"))
        done = await second.get_many_into([(f"k{n}", bytearray(9 * MIB)) for n in range(3)])
        assert [each.value for each in done] == [9 * MIB] * 3


async def test_what_cannot_be_brought(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, second):
        with pytest.raises(errors.NoSuchKey):
            await second.get("nothing")
        await first.put("k", VALUE)
        await until(lambda: second.contains_nowait("k"))
        with pytest.raises(errors.BufferTooSmall):
            await second.get_into("k", bytearray(5))
        await first.put("other", VALUE)
        await until(lambda: second.contains_nowait("other"))
        second.node.transports = []
        trace = FetchTrace()
        with pytest.raises(errors.Unavailable):
            await second.get_into("other", bytearray(len(VALUE)), trace=trace)
        assert trace.tries[0].outcome
        await first.put("large", bytes(20 * MIB))  # one client may hold half of 32 MiB
        await until(lambda: second.contains_nowait("large"))
        second.node.transports = first.node.transports
        with pytest.raises(errors.LeaseLimitExceeded):
            await second.get("large")
