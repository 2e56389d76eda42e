"""Several real peers in one trio loop. For tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from p2pstore import PeerConfig
from p2pstore.peer import Peer, open_peer
from tests.waiting import until


def config(folder: Path, name: str, *bootstrap: Peer | str, **settings: object) -> PeerConfig:
    addresses = [each if isinstance(each, str) else each.control for each in bootstrap]
    defaults: dict[str, object] = {
        "name": name,
        "memory": "32MiB",
        "listen": "127.0.0.1:0",
        "socket": str(folder / f"{name}.sock"),
        "bootstrap": addresses,
        "insecure": True,  # tests that attack as a member need no key then
    }
    return PeerConfig(**{**defaults, **settings})  # type: ignore[arg-type]  # settings of every type


def write_private(path: Path, text: str) -> str:
    """A file that its owner alone may read, as keys are kept."""
    path.touch(0o600)
    path.write_text(text)
    return str(path)


@asynccontextmanager
async def cluster(folder: Path, count: int = 3, **settings: object) -> AsyncIterator[list[Peer]]:
    """`count` peers that know each other."""
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []
        done = trio.Event()

        async def run(number: int) -> None:
            bootstrap = peers[:1] if number else []
            async with open_peer(config(folder, f"p{number}", *bootstrap, **settings)) as peer:
                peers.append(peer)
                await done.wait()

        for number in range(count):
            nursery.start_soon(run, number)
            await until(lambda number=number: len(peers) > number)  # type: ignore[misc]  # bound now
        await until(lambda: all(len(p.node.core.live_peers()) == count - 1 for p in peers))
        try:
            yield peers
        finally:
            done.set()
