"""Bringing one version to one target: by its swarm, or by copying from another directory of this peer; and the progress
of a publish, fetch, follow or update. Shell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Final

import trio

from p2pstore.checkpoint.checkpoint_messages import Fetch, Fetched
from p2pstore.checkpoint.content.hashing import BulkReader, PieceHashes, at_once
from p2pstore.checkpoint.content.manifest import SignedManifest
from p2pstore.checkpoint.content.pieces import NO_PIECES, Extent, PieceMap, pieces_in
from p2pstore.checkpoint.content.target_directory import TargetDirectory, in_steps
from p2pstore.checkpoint.peer.checkpoint_peer import THREADS, CheckpointPeer
from p2pstore.checkpoint.peer.piece_stores import PieceStore, Target
from p2pstore.checkpoint.peer.running_swarms import SwarmPart, SwarmParts
from p2pstore.errors import CheckpointChanged, ConfigError, StoreClosed, Unavailable
from p2pstore.gossip.records import TakesPart, member_of
from p2pstore.memory.mapped.mapped_memory import available_memory
from p2pstore.runtime.trio_tasks import open_background_nursery

HOPE_SECONDS: Final = 10.0
"""A fetch fails when its publisher has withdrawn the version and no neighbour has had a missing piece for this long."""
LOOK_SECONDS: Final = 0.05
REPORT_SECONDS: Final = 0.25
"""Minimum time between two reports of progress."""
MAX_WAIT_SECONDS: Final = 30.0
SYNC_THREADS: Final = 16
"""Files synced at once; a file system commits those that wait together in one transaction."""


class VersionFetch:
    """One order, on its way to its target."""

    def __init__(
        self,
        peer: CheckpointPeer,
        parts: SwarmParts,
        order: Fetch,
        signed: SignedManifest,
        target: Target,
        job: Job,
        *,
        store: PieceStore | None = None,
        finish: Callable[[], Iterator[None]] = lambda: iter(()),
    ) -> None:
        """`store` is the target with what it needs to stay open; None: the target itself. `finish` puts the complete
        version in its place, in steps for worker threads."""
        self.target = target
        self.job = job
        self._peer = peer
        self._parts = parts
        self._order = order
        self._signed = signed
        self._store = target if store is None else store
        self._finish = finish

    async def run(self) -> Fetched:
        """Bring all pieces. Closes the store when that fails.

        Cases, in this order, until one of them ends the fetch:
        1. This peer's swarm of the version brings fewer pieces than are needed: take its place.
        2. It brings enough: copy from its directory.
        3. There is none: begin one.
        """
        target, version = self.target, self._signed.version
        try:
            while (part := self._parts.get(version)) is not None:
                if target.needed & ~(part.run.machine.needed | part.run.store.needed):
                    await self._take_over(part)
                elif await self._copy(part):
                    return Fetched(version, "", self._needed_bytes, 0)
            part = await self._parts.begin(
                self._order.namespace, self._signed, self._store, rate=self._order.limit_bytes_per_second
            )
        except BaseException:
            self._store.close()
            raise
        try:
            with part.wanted():
                await self._fetch(part)
        except BaseException:
            await self._parts.stop(version)
            raise
        part.announce(TakesPart.SEEDING)
        return Fetched(version, "", part.run.progress.total_bytes, part.run.progress.fetched_bytes)

    @property
    def _needed_bytes(self) -> int:
        return self.target.manifest.layout.size_of(self.target.needed)

    # --- from this peer --------------------------------------------------------------------------

    async def _take_over(self, part: SwarmPart) -> None:
        """Copy what the other swarm has, wait until no job waits for it, and end it: a version has one swarm, which
        writes to one place."""
        run, job = part.run, self.job
        while True:
            await self._copy_from(part)
            if run.progress.ended.is_set():
                return
            if not part.jobs:
                break
            job.at(run.progress.done_bytes, len(run.links.members))
            await trio.sleep(LOOK_SECONDS)
        await self._parts.stop(run.version)

    async def _copy(self, part: SwarmPart) -> bool:
        """Copy the version from another directory while its swarm fills that one. False when the swarm ends early."""
        run, target = part.run, self.target
        self.job.begin(JobPhase.FETCHING, self._needed_bytes)
        with part.wanted():
            while target.needed & ~target.have:
                if not await self._copy_from(part):
                    return False
                if not target.needed & ~target.have:
                    break
                if run.progress.ended.is_set():
                    return False
                if not target.needed & ~target.have & run.machine.have:
                    await run.progress.changed()
        await self._put_in_place()
        return True

    async def _copy_from(self, part: SwarmPart) -> bool:
        """Copy the pieces that the swarm has now. False when its directory cannot be read, which ends the swarm."""
        run, target = part.run, self.target
        for piece in pieces_in(target.needed & ~target.have & run.machine.have):
            copy = partial(_copy_piece, run.store, target, piece)
            error = await trio.to_thread.run_sync(copy, limiter=self._peer.threads)
            if error is not None:
                if not part.scope.cancel_called:  # otherwise the swarm is ending, without a fault
                    run.fail(error)
                await run.progress.ended.wait()
                return False
            self.job.advance(run.manifest.layout.sizes[piece])
        return True

    # --- from the swarm --------------------------------------------------------------------------

    async def _fetch(self, part: SwarmPart) -> None:
        run = part.run
        await self._until(part, run.progress.until_complete)
        await run.transfers.written()
        failed = await self._copy_within(part)
        if failed:  # the publisher's hashes of equal files are wrong: fetch the copies as well
            run.need(failed)
            await self._until(part, run.progress.until_complete)
            await run.transfers.written()
        await self._put_in_place()

    async def fetch_more(self, part: SwarmPart, pieces: PieceMap) -> None:
        run = part.run
        with part.wanted():
            run.need(pieces)
            await self._until(part, partial(run.progress.until, lambda: not pieces & ~run.machine.have))
        if run.machine.complete:
            part.announce(TakesPart.SEEDING)

    async def _copy_within(self, part: SwarmPart) -> PieceMap:
        """Make pieces of equal pieces that are here. Returns those for which that failed."""
        failed = NO_PIECES
        run, target = part.run, self.target
        copies = iter(target.copies.items())

        async def work() -> None:
            nonlocal failed
            for piece, extents in copies:
                copy = partial(_copy_extents, target, piece, extents)
                if run.progress.ended.is_set():
                    return
                if await trio.to_thread.run_sync(copy, limiter=self._peer.threads):
                    run.found(1 << piece)
                    self.job.at(run.progress.done_bytes, len(run.links.members))
                else:
                    failed |= 1 << piece

        async with trio.open_nursery() as nursery:
            for _ in range(THREADS):
                nursery.start_soon(work)
        run.progress.check_running()
        return failed

    async def _until(self, part: SwarmPart, until: Callable[[], Awaitable[None]]) -> None:
        """Wait for the swarm, while others hear of the progress."""
        run = part.run
        self.job.begin(JobPhase.FETCHING, run.progress.total_bytes, run.progress.done_bytes)
        part.announce_progress()
        async with open_background_nursery() as nursery:
            nursery.start_soon(self._tell_progress, part)
            nursery.start_soon(self._give_up_without_publisher, part)
            await until()

    async def _tell_progress(self, part: SwarmPart) -> None:
        run = part.run
        while True:
            await run.progress.changed()
            part.announce_progress()
            self.job.at(run.progress.done_bytes, len(run.links.members))
            await trio.sleep(REPORT_SECONDS)

    async def _give_up_without_publisher(self, part: SwarmPart) -> None:
        """Fail when the live publisher has withdrawn the version and no neighbour has a missing piece."""
        run, publisher = part.run, self._signed.signer
        since = trio.current_time()
        while True:
            await trio.sleep(HOPE_SECONDS / 10)
            why = self._peer.parts.why_not_offered(run.version, publisher)
            if not why or self._peer.is_gone(member_of(publisher)) or run.machine.has_source:
                since = trio.current_time()
            elif trio.current_time() - since > HOPE_SECONDS:
                run.fail(Unavailable(f"no peer has the missing pieces: {why}"))

    async def _put_in_place(self) -> None:
        if isinstance(self.target, TargetDirectory):
            await make_durable(self.target, self.job)
        await in_threads(self._finish(), self.job)


async def in_threads(steps: Iterator[None], job: Job) -> None:
    """Run each step in a worker thread; each counts as progress, and a cancellation takes effect between two."""
    while await trio.to_thread.run_sync(next, steps, job) is not job:
        job.changed()


def _copy_piece(source: PieceStore, target: Target, piece: int) -> Exception | None:
    """Copy a piece between stores; returns what is wrong with the source."""
    try:
        data = source.read(piece)
    except (CheckpointChanged, StoreClosed, OSError, EOFError) as error:
        return error
    return None if target.write(piece, data) else CheckpointChanged("a file was changed")


def _copy_extents(target: Target, piece: int, extents: Sequence[Extent]) -> bool:
    """Whether the piece is there, or could be made of these ranges."""
    try:
        return bool(target.have >> piece & 1) or target.write(piece, target.read_extents(extents))
    except (OSError, EOFError):
        return False


class ChangeSignal:
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
        self.ended = True
        self.changed()

    async def wait(self, seen: int, seconds: float) -> None:
        """Wait until `number` differs from `seen`, at most `seconds`."""
        with trio.move_on_after(min(seconds, MAX_WAIT_SECONDS)):
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


class Job(ChangeSignal):
    """Progress of one publish or fetch that a client waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = JobPhase.WAITING
        self.done_bytes = 0
        self.total_bytes = 0
        self.members = 0
        self.version = b""

    def begin(self, phase: JobPhase, total_bytes: int = 0, done_bytes: int = 0) -> None:
        self.phase, self.total_bytes, self.done_bytes = phase, total_bytes, done_bytes
        self.changed()

    def advance(self, count: int) -> None:
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
    job.begin(JobPhase.FINISHING, target.manifest.layout.size_of(target.needed))
    steps = (partial(target.make_durable, some) for some in in_steps(places))
    await at_once(steps, SYNC_THREADS, job.advance)


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
