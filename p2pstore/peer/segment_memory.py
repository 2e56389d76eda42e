"""Where a peer's memory is, as its settings say: in files, on huge pages, on NUMA nodes. Shell."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from p2pstore.config import MemoryPiece, PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.memory.kept_memory import Expected, checksum_of, checksum_of_quotas
from p2pstore.memory.mapped.joined_memory import PIECE_BYTES, JoinedMemory
from p2pstore.memory.mapped.kept_file import boot_id, create_file_memory, open_kept_memory
from p2pstore.memory.mapped.mapped_memory import SharedMemory, advise_huge_pages, create_memory
from p2pstore.memory.segment_layout import plan_geometry, round_up

SegmentMemory = SharedMemory | JoinedMemory


def create_segment_memory(config: PeerConfig, last_segment_id: bytes = b"") -> SegmentMemory:
    """Memory for the segment of a peer with these settings, whose last life had the segment of that id. Raises
    `ConfigError` when it cannot be as they say, or there is not enough of it."""
    geometry = plan_geometry(config.memory_bytes, config.max_objects)
    if config.keep_memory:
        assert config.memory_path is not None, "checked with the settings"
        expected = Expected(
            geometry,
            last_segment_id,
            boot_id(),
            checksum_of(config.cluster),
            checksum_of_quotas(config.quotas),
        )
        return open_kept_memory(Path(config.memory_path), expected)
    total_bytes = geometry.total_bytes
    pieces = config.memory_pieces
    if not pieces:
        return _first(config, total_bytes)
    first_bytes = round_up(total_bytes - sum(each.size for each in pieces), PIECE_BYTES)
    with ExitStack() as stack:
        memories = [_first(config, first_bytes)]
        stack.callback(memories[0].close)
        besides_bytes = 0 if config.memory_path is not None else first_bytes
        for each in pieces:
            memories.append(_further(config, each, besides_bytes))
            stack.callback(memories[-1].close)
            besides_bytes += 0 if each.path is not None else each.size
        joined = JoinedMemory(memories, total_bytes)
        stack.pop_all()
    if config.huge_pages != "never":
        advise_huge_pages(joined.view)  # what was advised of the memories is of their own mappings
    return joined


def _first(config: PeerConfig, size: int) -> SharedMemory:
    if config.memory_path is not None:
        return create_file_memory(Path(config.memory_path), size)
    return create_memory(size, "p2pstore", huge_pages=config.huge_pages, numa_node=config.numa_node)


def _further(config: PeerConfig, piece: MemoryPiece, besides_bytes: int) -> SharedMemory:
    try:
        return _piece(config, piece, besides_bytes)
    except ConfigError as error:
        setting, _, problem = str(error).partition(": ")
        if setting in ("memory_path", "numa_node"):
            raise ConfigError(f"more_memory: {problem}") from error
        raise


def _piece(config: PeerConfig, piece: MemoryPiece, besides_bytes: int) -> SharedMemory:
    if piece.path is not None:
        return create_file_memory(Path(piece.path), piece.size, marked_after=True)
    return create_memory(
        piece.size,
        "p2pstore",
        huge_pages=config.huge_pages,
        numa_node=piece.node,
        besides_bytes=besides_bytes,
    )
