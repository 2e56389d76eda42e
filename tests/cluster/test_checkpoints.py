"""Checkpoints between real peers of one process, as programs publish and fetch them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.peer import Peer
from p2pstore.results import CheckpointProgress
from tests.cluster.test_open_peer import cluster
from tests.contract.swarm_world import make_files, same_files

FILES = {"model.safetensors": 3_000_017, "config.json": 900, "deep/tokenizer.json": 70_000}
PIECE = 64 * 1024


def in_plain_code(peer: Peer, directory: Path) -> p2pstore.results.FetchedCheckpoint:
    with p2pstore.blocking.connect(peer.socket) as client:
        return client.checkpoints.fetch("model", directory, wait=20)


def under_asyncio(peer: Peer, directory: Path) -> p2pstore.results.FetchedCheckpoint:
    async def fetch() -> p2pstore.results.FetchedCheckpoint:
        async with p2pstore.aio.connect(peer.socket) as client:
            return await client.checkpoints.fetch("model", directory, wait=20)

    return asyncio.run(fetch())


async def test_what_one_publishes_the_others_fetch_in_every_world(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    seen: list[CheckpointProgress] = []
    async with cluster(tmp_path, 4) as (a, b, c, d):
        published = await a.checkpoints.publish(
            "model", source, piece_bytes=PIECE, exclude=["*.tmp"]
        )
        assert (published.files, published.piece_bytes) == (3, PIECE)
        assert published.total_bytes == sum(FILES.values())

        async def with_trio() -> None:
            got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20, progress=seen.append)
            assert got.version == published.version
            assert got.directory == str(tmp_path / "b" / published.version)
            assert got.fetched_bytes == got.total_bytes == published.total_bytes

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_trio)
            nursery.start_soon(trio.to_thread.run_sync, in_plain_code, c, tmp_path / "c")
            nursery.start_soon(trio.to_thread.run_sync, under_asyncio, d, tmp_path / "d")
        for name in "bcd":
            assert same_files(source, tmp_path / name / "current")
        assert {each.phase for each in seen} & {"fetching", "checking"}
        with pytest.raises(errors.NoSuchKey, match="no checkpoint 'other'"):
            await b.checkpoints.fetch("other", tmp_path / "other")
