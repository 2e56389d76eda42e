"""New weights for a group of engines: all of them switch together, or none.

A trainer publishes a directory again and again. Each engine follows the name: it has every new version fetched from its
neighbours and verified, and uses it when the trainer says so, which it does when all have it. Three peers in this
process stand for three machines; on real ones each runs `mooncake-p2p join`, and programs use `p2pstore.connect()`.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from p2pstore import PeerConfig, open_peer
from p2pstore.peer import Peer
from p2pstore.results import FollowedCheckpoint

WEIGHT_BYTES = 4_000_000


def train(directory: Path, step: int) -> None:
    """Writes a checkpoint of which most stays as it was."""
    directory.mkdir(exist_ok=True)
    (directory / "embedding.bin").write_bytes(b"frozen" * (WEIGHT_BYTES // 6))
    (directory / "layers.bin").write_bytes(os.urandom(WEIGHT_BYTES // 4))
    (directory / "step.txt").write_text(f"{step}\n")


class Engine:
    """Loads what `current` names, whenever that changes."""

    def __init__(self, name: str, peer: Peer, directory: Path) -> None:
        self.name, self._peer, self._directory = name, peer, directory
        self.loaded = ""

    async def run(self) -> None:
        """Follow the weights until cancelled."""
        await self._peer.checkpoints.follow("weights", self._directory, self._changed)

    def _changed(self, now: FollowedCheckpoint) -> None:
        if now.current and now.current != self.loaded:
            step = (self._directory / "current/step.txt").read_text().strip()
            print(f"{self.name} uses step {step}")
            self.loaded = now.current


async def train_and_use(folder: Path, peers: list[Peer]) -> None:
    """Two steps of training, each of which ends up in all engines."""
    trainer = peers[0].checkpoints
    engines = [Engine(peer.name, peer, folder / peer.name) for peer in peers[1:]]
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(engine.run)
        for step in (100, 200):
            train(folder / f"step-{step}", step)
            published = await trainer.publish("weights", folder / f"step-{step}")
            await trainer.wait_followers("weights", published.version, 2)
            done = await trainer.update("weights")
            print(f"step {step}: {done.using} of {done.followers} engines switched")
            while any(engine.loaded != published.version for engine in engines):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


async def main() -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pstore-")))
        peers: list[Peer] = []
        for name in ("trainer", "engine-1", "engine-2"):
            config = PeerConfig(
                name=name,
                memory="16MiB",
                listen="127.0.0.1:0",
                socket=str(folder / f"{name}.sock"),
                bootstrap=[peer.control for peer in peers[:1]],
            )
            peers.append(await stack.enter_async_context(open_peer(config)))
        await train_and_use(folder, peers)


if __name__ == "__main__":
    trio.run(main)
