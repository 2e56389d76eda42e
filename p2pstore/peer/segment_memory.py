"""Where a peer's memory is, as its settings say: in a file, on huge pages, on one NUMA node. Shell."""

from __future__ import annotations

from pathlib import Path

from p2pstore.config import PeerConfig
from p2pstore.transfer.layout import plan_geometry
from p2pstore.transfer.memory import SharedMemory, create_memory
from p2pstore.transfer.memory_file import create_file_memory


def create_segment_memory(config: PeerConfig) -> SharedMemory:
    """Memory for the segment of a peer with these settings. Raises `ConfigError` when it cannot be as they say, or
    there is not enough of it."""
    total_bytes = plan_geometry(config.memory_bytes, config.max_objects).total_bytes
    if config.memory_path is not None:
        return create_file_memory(Path(config.memory_path), total_bytes)
    return create_memory(
        total_bytes, "p2pstore", huge_pages=config.huge_pages, numa_node=config.numa_node
    )
