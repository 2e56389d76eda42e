"""Whole peers and their clients read large objects from several holders at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from p2pstore import Peer, blocking
from p2pstore.objects import MIB, key_digest
from p2pstore.transfer.transfer_trace import FetchTrace
from tests.cluster.peers import cluster
from tests.waiting import until

VALUE = np.random.default_rng(5).integers(0, 256, 66 * MIB + 5, np.uint8).tobytes()


def hits(*holders: Peer) -> int:
    """How often the value was read there, as eviction sees it."""
    entries = [each.node.core.objects.find(key_digest("k"), each.node.now) for each in holders]
    return sum(entry.hits for entry in entries if entry is not None)


async def test_clients_and_peers_read_a_large_object_from_all_its_holders(tmp_path: Path) -> None:
    async with cluster(tmp_path, memory="160MiB", transport="tcp") as (first, second, third):
        result = await first.put("k", VALUE, replicas=2)
        assert result.copies == 2
        (has,) = [
            each
            for each in (second, third)
            if each.node.core.segment.find(key_digest("k"), 0.0) is not None
        ]
        (lacks,) = {second, third} - {has}
        directory = lacks.node.core.gossip.directory
        await until(lambda: len(directory.holders(key_digest("k"))) == 2)
        names = sorted([first.node.config.name, has.node.config.name])

        def read() -> tuple[bytearray, FetchTrace]:
            trace, buffer = FetchTrace(), bytearray(len(VALUE))
            with blocking.connect(str(lacks.socket_path)) as client:
                client.get_into("k", buffer, wait=5, trace=trace)
                assert client.get("k") == VALUE
            return buffer, trace

        before = hits(first, has)
        buffer, trace = await trio.to_thread.run_sync(read)
        assert buffer == VALUE
        assert hits(first, has) == before + 2  # two reads, in however many requests
        assert sorted(trace.source.split(", ")) == names
        assert [each.outcome for each in trace.tries if each.tried] == ["delivered"] * 2
        assert sum(each.length_bytes for each in trace.tries) == len(VALUE)

        small = bytearray(10)
        await first.put("small", b"small")
        await until(lambda: lacks.contains_nowait("small"))
        traffic = lacks.node.watch.traffic
        read_before = [traffic.used(each.node.core.member)["tcp"].bytes for each in (first, has)]

        def read_batch() -> bytearray:
            buffer = bytearray(len(VALUE))
            with blocking.connect(str(lacks.socket_path)) as client:
                results = client.get_many_into([("small", small), ("k", buffer)])
            assert [each.value for each in results] == [5, len(VALUE)]
            return buffer

        assert await trio.to_thread.run_sync(read_batch) == VALUE
        await until(
            lambda: all(
                traffic.used(each.node.core.member)["tcp"].bytes > bytes_before + 5
                for each, bytes_before in zip((first, has), read_before, strict=True)
            )
        )

        async with lacks.lease("k", here=True) as view:  # the peer itself brings it here
            assert view == VALUE
        assert lacks.node.core.objects.find(key_digest("k"), lacks.node.now) is not None
        for holder in (first, has):  # the clients' reads count as well
            use = lacks.node.watch.traffic.used(holder.node.core.member)["tcp"]
            assert use.bytes > 0
            assert use.failures == 0
