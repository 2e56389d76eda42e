"""Progress of a publish, fetch, follow or update, and the steps of a job that read or sync whole directories. Shell."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Final

import trio

from p2pstore.checkpoint.content.hashing import BulkReader, PieceHashes
from p2pstore.checkpoint.content.pieces import pieces_in
from p2pstore.checkpoint.content.target_directory import TargetDirectory, in_steps
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapped_memory import available_memory

LONGEST_WAIT_SECONDS: Final = 30.0
SYNC_THREADS: Final = 16
"""Files synced at once; a file system commits those that wait together in one transaction."""


class News:
    """Something that changes: `number` grows with each change, and waiters compare it with the last one seen."""

    def __init__(self) -> None:
        self.number = 1
        self.ended = False
        self._changed = trio.Event()

    def changed(self) -> None:
        """Count a change and wake the waiters."""
        self.number += 1
        self._changed.set()
        self._changed = trio.Event()

    def end(self) -> None:
        """Announce the last change."""
        self.ended = True
        self.changed()

    async def wait(self, seen: int, seconds: float) -> None:
        """Wait until `number` differs from `seen`, at most `seconds`."""
        with trio.move_on_after(min(seconds, LONGEST_WAIT_SECONDS)):
            while self.number == seen:
                await self._changed.wait()


class JobPhase(StrEnum):
    """Current phase of a job."""

    WAITING = "waiting"
    """For the checkpoint to be published."""
    HASHING = "hashing"
    SEEDING = "seeding"
    """Until the other peers together have every piece."""
    CHECKING = "checking"
    """Pieces that are already in the directory."""
    FETCHING = "fetching"
    FINISHING = "finishing"
    """All pieces are here; files are being synced."""
    DONE = "done"


class Job(News):
    """Progress of one publish or fetch that a client waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = JobPhase.WAITING
        self.done_bytes = 0
        self.total_bytes = 0
        self.members = 0
        self.version = b""

    def begin(self, phase: JobPhase, total_bytes: int = 0, done_bytes: int = 0) -> None:
        """Enter a phase."""
        self.phase, self.total_bytes, self.done_bytes = phase, total_bytes, done_bytes
        self.changed()

    def advance(self, count: int) -> None:
        """Add `count` bytes to those done."""
        self.done_bytes += count
        self.changed()

    def at(self, done_bytes: int, members: int) -> None:
        """Set the bytes done, and the number of members that pieces are exchanged with."""
        if (done_bytes, members) != (self.done_bytes, self.members):
            self.done_bytes, self.members = done_bytes, members
            self.changed()


def reader_of(total_bytes: int) -> BulkReader:
    """A reader for hashing `total_bytes`; more than half of free memory is read past the page cache."""
    free_bytes, _ = available_memory()
    return BulkReader(past_cache=2 * total_bytes > free_bytes)


async def make_durable(target: TargetDirectory, job: Job) -> None:
    """Sync the files that were fetched, `SYNC_THREADS` at once. Raises `OSError`."""
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
    """Read and hash every piece of a directory. Raises `ConfigError` for a file that was changed."""
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
    """Compare hashes with the manifest's: 30 ms for 65,536 pieces. Raises `ConfigError` for a file that was changed."""
    manifest = target.manifest
    for piece in pieces:
        if hashes.of(range(piece, piece + 1)) != manifest.piece_hash(piece):
            file = manifest.files[manifest.layout.extents(piece)[0].file].path
            raise ConfigError(f"{target.directory}: {file} was changed; remove it to fetch it")
