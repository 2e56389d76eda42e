"""A peer inside your own process, under trio: no daemon, the same methods and more.

Two peers in one program, to show that they find each other; normally each machine runs one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy
import trio

import p2pstore


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first_settings = settings(Path(folder), "first")
        async with p2pstore.open_peer(first_settings) as first:
            second_settings = settings(Path(folder), "second", bootstrap=[first.control])
            async with p2pstore.open_peer(second_settings) as second:
                await share(first, second)


def settings(folder: Path, name: str, bootstrap: list[str] | None = None) -> p2pstore.PeerConfig:
    return p2pstore.PeerConfig(
        name=name,
        memory="64MiB",
        listen="127.0.0.1:0",
        socket=str(folder / f"{name}.sock"),
        bootstrap=bootstrap or [],
    )


async def share(first: p2pstore.Peer, second: p2pstore.Peer) -> None:
    weights = numpy.arange(1_000_000, dtype=numpy.float32).reshape(1000, 1000)
    with trio.fail_after(10):
        while len(await first.peers()) < 2:  # they are getting to know each other
            await trio.sleep(0.01)
    result = await first.put_tensor("weights", weights, replicas=2)
    print(f"put: {result.status}, {result.copies} of {result.wanted} copies")

    same = await second.get_tensor("weights", wait=5)
    print(f"get: {same.dtype} {same.shape}, equal: {numpy.array_equal(same, weights)}")

    # Answered from what the peer knows, without any request, from any thread.
    with trio.fail_after(10):
        while len(first.locate_nowait("weights")) < 2:  # news of the second copy is on its way
            await trio.sleep(0.01)
    print("holders:", sorted(place.peer for place in first.locate_nowait("weights")))
    print("contains_nowait:", second.contains_nowait("weights"))

    async with trio.open_nursery() as nursery:  # many tasks may share one store
        for number in range(10):
            nursery.start_soon(first.put, f"small {number}", bytes([number]) * 100)
    page = await second.list_keys("small ")
    print(f"list_keys: {len(page.keys)} keys")


if __name__ == "__main__":
    trio.run(main)
