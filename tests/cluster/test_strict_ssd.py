"""Peers that may use one transport only read what is on another peer's SSD alone."""

from pathlib import Path

import pytest
import trio

from p2pstore import NoSuchKey, Unavailable
from p2pstore.gossip.records import Tier
from p2pstore.objects import key_digest
from p2pstore.peer import Peer
from p2pstore.transfer.reading.shm_transport import ON_SSD
from p2pstore.transfer.transfer_trace import FetchTrace
from tests.cluster.test_hung_ssd import COLD, cool, hang, in_memory, peer, peer_with_ssd, push_out
from tests.unit.hanging_disk import Hang
from tests.waiting import until

__all__ = ["hang"]

WARM = bytes(range(256)) * 400


def tiers(reader: Peer) -> list[str]:
    return [each.tier for each in reader.locate_nowait("k")]


async def test_by_shared_memory_alone(tmp_path: Path) -> None:
    async with (
        peer_with_ssd(tmp_path) as owner,
        peer(tmp_path, "reader", owner, transport="shm") as reader,
    ):
        await cool(owner, "k")
        await until(lambda: tiers(reader) == ["ssd"])
        trace, buffer = FetchTrace(), bytearray(len(COLD))
        with trio.fail_after(60):
            assert await reader.get_into("k", buffer, trace=trace) == len(COLD)
        assert buffer == COLD
        assert (trace.source, trace.transport) == ("owner", "shm")
        assert in_memory(owner, "k"), "there it was read"
        await until(lambda: owner.node.core.segment.leased_bytes == 0)

        await push_out(owner, "k")  # the reader may not have been told yet
        async with reader.lease("k", here=True) as view:
            assert view == COLD
        await owner.remove("k")
        with pytest.raises(NoSuchKey):
            await reader.get("k")


async def test_a_get_explained_says_why_shared_memory_is_not_tried(tmp_path: Path) -> None:
    async with peer_with_ssd(tmp_path) as owner, peer(tmp_path, "reader", owner) as reader:
        await cool(owner, "k")
        await until(lambda: tiers(reader) == ["ssd"])
        trace = FetchTrace()
        assert await reader.get_into("k", bytearray(len(COLD)), trace=trace) == len(COLD)
        assert [(each.transport, each.outcome) for each in trace.tries] == [
            ("shm", ON_SSD),
            ("tcp", "delivered"),
        ]
        assert trace.tier == "ssd"


async def test_by_rdma_alone_the_copy_is_offered(tmp_path: Path) -> None:
    async with peer_with_ssd(tmp_path) as owner, peer(tmp_path, "reader", owner) as reader:
        await cool(owner, "k")
        await until(lambda: tiers(reader) == ["ssd"])
        [copy] = reader.node.core.copies.known(key_digest("k"), reader.node.now)
        assert copy.record.tier is Tier.SSD
        record = reader.node.routes.record_of(copy.peer_id)
        assert record is not None
        record.transports.append(type(record.transports[0])("rdma"))
        assert not reader.node.routes.remote_copy(copy).rdma
        reader.node.config.transport = "rdma"
        way = reader.node.routes.remote_copy(copy)
        assert way.rdma
        assert way.on_ssd
        slot, trailer = await reader.node.pool.look(way, key_digest("k"))  # as that transport does
        assert slot.length == len(COLD)
        assert trailer.key == "k"
        assert in_memory(owner, "k")


async def test_a_view_of_what_a_neighbour_has_on_its_ssd_is_a_view_of_its_memory(tmp_path: Path) -> None:
    async with peer_with_ssd(tmp_path) as owner, peer(tmp_path, "reader", owner) as reader:
        await cool(owner, "k")
        await until(lambda: tiers(reader) == ["ssd"])
        async with reader.lease("k") as view:
            assert view == COLD
            assert in_memory(owner, "k")
            assert not in_memory(reader, "k")
            assert owner.node.core.segment.leased_bytes >= len(COLD)
        del view
        await until(lambda: owner.node.core.segment.leased_bytes == 0)


async def test_a_neighbour_whose_ssd_hangs_is_not_waited_for_twice(tmp_path: Path, hang: Hang) -> None:
    async with peer_with_ssd(tmp_path) as owner, peer(tmp_path, "reader", owner) as reader:
        await cool(owner, "k")
        await owner.put("warm again", WARM)
        await until(lambda: tiers(reader) == ["ssd"] and reader.contains_nowait("warm again"))
        hang.on = True
        with trio.fail_after(60):
            with pytest.raises(Unavailable):
                async with reader.lease("k"):
                    pass
            async with reader.lease("warm again") as view:
                assert view == WARM
        assert not in_memory(reader, "warm again"), "it was viewed where it is"
