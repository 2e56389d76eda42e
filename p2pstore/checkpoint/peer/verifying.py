"""Hashing what is on the disks of this machine, for manifests and to verify it. Shell."""

from __future__ import annotations

from functools import partial
from typing import Final

import trio

from p2pstore.checkpoint.content.bulk_reading import BulkReader
from p2pstore.checkpoint.content.hashing import PieceHashes
from p2pstore.checkpoint.content.piece_map import pieces_in
from p2pstore.checkpoint.content.target_directory import TargetDirectory, in_steps
from p2pstore.checkpoint.peer.job import Job, JobPhase
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapped_memory import available_memory

SYNC_THREADS: Final = 16
"""Files that are waited for at once until they are on the disk."""


def reader_of(total_bytes: int) -> BulkReader:
    """To hash so many bytes. What fills more than half of the memory that is free is read past the page cache."""
    free_bytes, _ = available_memory()
    return BulkReader(past_cache=2 * total_bytes > free_bytes)


async def make_durable(target: TargetDirectory, job: Job) -> None:
    """Have the files that came be on the disk: one wait for it a file, some of them at a time, as a file system commits
    those that wait together at once. Raises `OSError`."""
    places = await trio.to_thread.run_sync(target.unsynced)
    layout = target.manifest.layout
    job.begin(JobPhase.FINISHING, layout.size_of(target.needed))
    limiter = trio.CapacityLimiter(SYNC_THREADS)
    steps = in_steps(places)
    failures: list[OSError] = []

    async def work() -> None:
        try:
            for step in steps:
                done = partial(target.make_durable, step)
                job.advance(await trio.to_thread.run_sync(done, limiter=limiter))
        except OSError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(SYNC_THREADS):
            nursery.start_soon(work)
    if failures:
        raise failures[0]


async def verify(target: TargetDirectory, job: Job) -> None:
    """Read again what is there. Raises `ConfigError` when it is not what it should be."""
    layout = target.manifest.layout
    pieces = pieces_in(target.have)
    job.begin(JobPhase.CHECKING, layout.size_of(target.have))
    hashes = PieceHashes(layout, target.opened, reader_of(layout.total_bytes))
    try:
        await hashes.find(pieces, progress=job.advance)
    except (EOFError, FileNotFoundError) as error:
        raise ConfigError(f"{target.directory}: was changed: {error}") from error
    await trio.to_thread.run_sync(_compare, target, pieces, hashes)


def _compare(target: TargetDirectory, pieces: list[int], hashes: PieceHashes) -> None:
    """30 ms for 65,536 pieces. Raises `ConfigError` for one that is not what it should be."""
    manifest = target.manifest
    for piece in pieces:
        if hashes.of(range(piece, piece + 1)) != manifest.piece_hash(piece):
            file = manifest.files[manifest.layout.extents(piece)[0].file].path
            raise ConfigError(f"{target.directory}: {file} was changed; remove it to fetch it")
