"""A cap counts what a namespace has in memory and on the SSD of a real peer."""

import os
from pathlib import Path

import trio

from p2pstore import connect
from p2pstore.objects import KIB, MIB
from p2pstore.peer.api import open_peer
from tests.cluster.peers import config
from tests.waiting import until

CAP_BYTES = 10 * MIB


async def test_memory_and_ssd_together_stay_within_the_cap(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    settings = {
        "memory": "8MiB",
        "quota": ["mine=2MiB"],
        "cap": ["mine=10MiB"],
        "ssd": str(tmp_path / "ssd"),
        "ssd_capacity": "300MiB",
    }
    async with (
        open_peer(config(tmp_path, "p", **settings)) as peer,
        connect(peer.socket, namespace="mine") as mine,
    ):
        node = peer.node
        assert node.ssd is not None
        use = node.core.segment.quotas["mine"]
        for number in range(80):
            # durable: else what the SSD was too slow for is lost, and may be more than what the cap costs
            await mine.put(f"k{number}", os.urandom(256 * KIB), durable=True)
            await peer.put(f"other{number}", os.urandom(256 * KIB))
            assert use.used_bytes <= CAP_BYTES
        tier = node.ssd.tier
        await until(lambda: 0 < tier.bytes_of("mine") <= CAP_BYTES - use.used_bytes)
        document = (await peer.statistics())["peer"]["quotas"]["mine"]
        assert document["cap_bytes"] == CAP_BYTES
        assert document["used_bytes"] + document["ssd_bytes"] <= CAP_BYTES
        assert document["kept_bytes"] > 2 * MIB - 512 * KIB, "the quota is had"
        assert len((await mine.list_keys()).keys) * 256 * KIB <= CAP_BYTES
        assert len(await mine.get("k79", wait=1)) == 256 * KIB
        with trio.fail_after(20):
            while await mine.contains("k0"):
                await trio.sleep(0.01)
