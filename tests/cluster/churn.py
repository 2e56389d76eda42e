"""Work that a peer does over and over, after which it should have no more memory than before."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import trio

from p2pstore import PeerConfig
from p2pstore.blocking import BlockingClient
from p2pstore.peer import open_peer
from tests.waiting import until

BATCH: Final = 250
JOINING_AT_ONCE: Final = 4
MEET_SECONDS: Final = 30.0


def put_and_evict(client: BlockingClient, keys: Iterator[int], puts: int) -> None:
    """Put `puts` objects. In a full peer each put evicts another object: two operations of its log."""
    for _ in range(0, puts, BATCH):
        for result in client.put_many([(f"churn-{next(keys)}", b"value") for _ in range(BATCH)]):
            result.unwrap()


def join_and_leave(folder: Path, settings: PeerConfig, count: int) -> None:
    """`count` new peers, a few at a time, join with these settings, each with an identity of its own, and leave
    when they have met another peer."""
    trio.run(partial(_join_and_leave, folder, settings, count))


async def _join_and_leave(folder: Path, settings: PeerConfig, count: int) -> None:
    numbers = iter(range(count))

    async def some(place: int) -> None:
        for number in numbers:
            config = PeerConfig(
                name=f"guest-{number}",
                socket=str(folder / f"guest-{place}.sock"),
                memory="1MiB",
                listen="127.0.0.1:0",
                cluster=settings.cluster,
                cluster_key_file=settings.cluster_key_file,
                bootstrap=settings.bootstrap,
                max_objects=16,
            )
            async with open_peer(config) as peer:
                await until(peer.node.core.live_peers, MEET_SECONDS)

    async with trio.open_nursery() as nursery:
        for place in range(JOINING_AT_ONCE):
            nursery.start_soon(some, place)
