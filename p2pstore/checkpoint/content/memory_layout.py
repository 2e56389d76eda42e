"""How a version lies in memory: its files one behind the other, then the manifest that says what they are. Pure.

Each file begins at a multiple of 64 bytes, so that tensors in it are as well aligned as in a file of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

ALIGNMENT: Final = 64


class MemoryLayout(NamedTuple):
    """Where everything is; bytes from the beginning."""

    files: tuple[int, ...]
    """The beginning of each file."""
    manifest: int
    total_bytes: int


def plan_memory(file_sizes: Sequence[int], manifest_bytes: int) -> MemoryLayout:
    """The layout of files of these sizes, in the manifest's order."""
    files, at = [], 0
    for size in file_sizes:
        files.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return MemoryLayout(tuple(files), at, at + manifest_bytes)
