"""Clients of a peer that reads by RDMA alone: it brings what they want to its memory. RDMA itself is in tests/rdma;
here the peer may use TCP instead, and its clients must not notice."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2pstore import errors
from p2pstore.local.local_messages import PlanItem
from p2pstore.objects import MIB, key_digest
from p2pstore.peer.api import Peer
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma.rdma_rules import NAME as RDMA
from p2pstore.transfer.reading.arriving import Destination
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.transfer_trace import FetchTrace
from p2pstore.transfer.transport import Pulled, RemoteCopy
from p2pstore.wire import Code
from tests.cluster.peers import cluster
from tests.waiting import until

VALUE = bytes(range(256)) * 8192  # 2 MiB


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Peer, Peer]]:
    """The second one as if it used RDMA alone."""
    async with cluster(folder, 2) as (first, second):
        second.node.config.transport = "rdma"
        second.node.routes.transports = [
            each for each in second.node.routes.transports if each.name == "tcp"
        ]
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


async def test_reads_that_follow_one_another_may_take_more_than_one_may_hold(tmp_path: Path) -> None:
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
        second.node.routes.transports = []
        trace = FetchTrace()
        with pytest.raises(errors.Unavailable):
            await second.get_into("other", bytearray(len(VALUE)), trace=trace)
        assert trace.tries[0].outcome
        await first.put("large", bytes(20 * MIB))  # one client may hold half of 32 MiB
        await until(lambda: second.contains_nowait("large"))
        second.node.routes.transports = first.node.routes.transports
        with pytest.raises(errors.LeaseLimitExceeded):
            await second.get("large")


# --- transport auto: clients read small values by TCP, and have the peer read large ones by RDMA --


class AsIfRdma(TcpTransport):
    """The peer's preferred way; counts requests."""

    name = RDMA

    def __init__(self, peer: Peer, *, works: bool = True) -> None:
        super().__init__(peer.node.pool)
        self.works = works
        self.asked = 0

    def cost(self, copy: RemoteCopy) -> float:
        return 0.3

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        self.asked += 1
        if not self.works:
            raise PullFailed(Code.UNAVAILABLE, "no line", retriable=True)
        return await super().pull(copy, digest, destination)


@asynccontextmanager
async def auto_pair(folder: Path, *, works: bool = True) -> AsyncIterator[tuple[Peer, Peer, AsIfRdma]]:
    """The second one as if on another host, with RDMA as its best way."""
    async with cluster(folder, 2) as (first, second):
        rdma = AsIfRdma(second, works=works)
        second.node.routes.host_id = b"another"
        second.node.routes.transports = [rdma] if not works else [rdma, TcpTransport(second.node.pool)]
        yield first, second, rdma


def holds(peer: Peer, key: str) -> bool:
    return peer.node.core.segment.find(key_digest(key), 0.0) is not None


async def test_large_values_come_by_the_faster_way_of_the_peer(tmp_path: Path) -> None:
    async with auto_pair(tmp_path) as (first, second, rdma):
        sizes = {"large": MIB, "small": MIB - 8192, "too large": 3 * MIB}  # of 32 MiB
        for again in ("", " again"):  # by then the client knows the holder
            for key, size in sizes.items():
                await first.put(key + again, bytes(size))
            for key, size in sizes.items():
                assert len(await second.get(key + again, wait=5)) == size
                assert holds(second, key + again) == (key == "large")
        assert rdma.asked == 2


async def test_a_batch_takes_both_ways(tmp_path: Path) -> None:
    async with auto_pair(tmp_path) as (first, second, rdma):
        sizes = {"a": MIB, "b": 4096, "c": MIB + 1}
        for key, size in sizes.items():
            await first.put(key, VALUE[:size])
        await until(lambda: second.contains_nowait("c"))
        for _ in range(2):
            items = [(key, bytearray(size)) for key, size in sizes.items()]
            done = await second.get_many_into(items)
            assert [each.value for each in done] == list(sizes.values())
            assert all(buffer == VALUE[: len(buffer)] for _, buffer in items)
        assert rdma.asked == 2
        assert [holds(second, key) for key in sizes] == [True, False, True]


async def test_the_client_reads_itself_when_the_peer_cannot(tmp_path: Path) -> None:
    async with auto_pair(tmp_path, works=False) as (first, second, rdma):
        await first.put("k", VALUE[:MIB])
        await until(lambda: second.contains_nowait("k"))
        trace, buffer = FetchTrace(), bytearray(MIB)
        assert await second.get_into("k", buffer, trace=trace) == MIB
        assert buffer == VALUE[:MIB]
        assert rdma.asked == 1
        ways = [(each.transport, each.outcome == "delivered") for each in trace.tries]
        assert (ways[0], ways[-1]) == (("rdma", False), ("tcp", True))
        assert not holds(second, "k")
