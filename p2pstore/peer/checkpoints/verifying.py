"""Hashing what is on the disks of this machine, for manifests and to verify it. Shell."""

from __future__ import annotations

from p2pstore.checkpoint.bulk_reading import BulkReader
from p2pstore.checkpoint.hashing import PieceHashes
from p2pstore.checkpoint.piece_map import pieces_in
from p2pstore.checkpoint.target_directory import TargetDirectory
from p2pstore.errors import ConfigError
from p2pstore.peer.checkpoints.job import Job, JobPhase
from p2pstore.transfer.memory import available_memory


def reader_of(total_bytes: int) -> BulkReader:
    """To hash so many bytes. What fills more than half of the memory that is free is read past the page cache."""
    free_bytes, _ = available_memory()
    return BulkReader(past_cache=2 * total_bytes > free_bytes)


async def verify(target: TargetDirectory, job: Job) -> None:
    """Read again what is there. Raises `ConfigError` when it is not what it should be."""
    manifest = target.manifest
    layout = manifest.layout
    job.begin(JobPhase.CHECKING, layout.total_bytes)
    hashes = PieceHashes(layout, target.opened, reader_of(layout.total_bytes))
    try:
        await hashes.find(pieces_in(target.have), progress=job.advance)
    except (EOFError, FileNotFoundError) as error:
        raise ConfigError(f"{target.directory}: was changed: {error}") from error
    for piece in pieces_in(target.have):
        if hashes.of(range(piece, piece + 1)) != manifest.piece_hash(piece):
            file = manifest.files[layout.extents(piece)[0].file].path
            raise ConfigError(f"{target.directory}: {file} was changed; remove it to fetch it")
