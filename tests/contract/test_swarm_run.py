"""Swarms on real connections: links, pieces, deaths, lies. Members of one process; directories on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2pstore.checkpoint.manifest import format_version, version_of
from tests.contract.swarm_world import (
    PIECE,
    make_files,
    open_world,
    same_files,
    signed_directory,
    until,
)

FILES = {"model.safetensors": 40 * PIECE + 17, "config.json": 900, "deep/tokenizer.json": 70_000}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_directory_reaches_everybody_and_the_source_sends_little_more_than_one_copy(
    tmp_path: Path, tls: bool
) -> None:
    make_files(tmp_path / "from", FILES)
    async with open_world(tls=tls) as world:
        source = await world.add()
        signed, files = await signed_directory(tmp_path / "from", source.identity)
        published = source.publish(signed, files)
        fetchers = [await world.add() for _ in range(4)]
        runs = [member.fetch(signed, tmp_path / f"to{member.number}") for member in fetchers]
        await until(lambda: all(run.complete for run in runs))
        for member, run in zip(fetchers, runs, strict=True):
            await run.written()
            await trio.to_thread.run_sync(run.store.commit)  # type: ignore[attr-defined]
            place = tmp_path / f"to{member.number}" / format_version(version_of(signed.body))
            assert same_files(tmp_path / "from", place)
            assert run.fetched_bytes == run.total_bytes
        assert published.failure is None
