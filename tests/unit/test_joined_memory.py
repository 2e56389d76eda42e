"""Several memories side by side: one view, in this process and in those that got descriptors."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.kept_file import create_file_memory
from p2pstore.memory.mapped.mapped_memory import (
    JoinedMemory,
    SharedMemory,
    create_memory,
    map_joined,
    prefault,
)
from p2pstore.memory.segment_layout import SEGMENT_MAGIC
from p2pstore.objects import MIB
from p2pstore.peer.segment_memory import create_segment_memory

SIZES = (4 * MIB, 2 * MIB, 6 * MIB)
LENGTH = sum(SIZES) - 5


def memories(folder: Path) -> list[SharedMemory]:
    """The second one in a file."""
    return [
        create_memory(SIZES[0], "p2pstore-joined"),
        create_file_memory(folder / "piece", SIZES[1], marked_after=True),
        create_memory(SIZES[2], "p2pstore-joined", huge_pages="never"),
    ]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def close_all(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def test_all_see_the_same_bytes_across_the_seams(tmp_path: Path) -> None:
    before = descriptors()
    joined = JoinedMemory(memories(tmp_path), LENGTH)
    assert len(joined.view) == joined.length == LENGTH
    assert not any(joined.view[:: 4096 + 1])
    read_only = joined.read_only_descriptors()
    reading = map_joined(read_only, joined.pieces, LENGTH, writable=False)
    writing = map_joined(joined.descriptors, joined.pieces, LENGTH, writable=True)
    pattern = np.random.default_rng(1).integers(0, 256, LENGTH, np.uint8)
    joined.view[:] = pattern.data
    assert (np.frombuffer(reading, np.uint8) == pattern).all()
    for seam in (SIZES[0], SIZES[0] + SIZES[1]):
        writing[seam - 3 : seam + 3] = b"abcdef"
        for view in (reading, joined.view):
            assert view[seam - 3 : seam + 3].tobytes() == b"abcdef"
    assert reading.readonly
    with pytest.raises(ConfigError, match="Permission denied"):
        map_joined(read_only, joined.pieces, LENGTH, writable=True)
    assert prefault(joined.view, lambda: False, lambda: None) == LENGTH
    close_all(read_only)
    joined.close()
    joined.close()
    assert not (tmp_path / "piece").exists()
    assert bytes(reading[:10]) == bytes(pattern[:10])  # a mapping keeps the memory
    del reading, writing
    gc.collect()
    assert descriptors() <= before
    assert mappings("p2pstore-joined") == mappings(str(tmp_path)) == 0


def test_a_view_in_use_keeps_the_mapping(tmp_path: Path) -> None:
    joined = JoinedMemory(memories(tmp_path), LENGTH)
    part = np.frombuffer(joined.view, np.uint8)[SIZES[0] - 1 : SIZES[0] + 1]
    joined.close()
    part[:] = 7
    assert mappings("p2pstore-joined") == 2
    del part
    gc.collect()
    assert mappings("p2pstore-joined") == 0


@pytest.mark.parametrize(
    ("pieces", "length"),
    [
        ((), 1),
        ((2 * MIB,) * 9, 17 * MIB),
        ((3 * MIB, 2 * MIB), 5 * MIB),
        ((2 * MIB, 2 * MIB), 2 * MIB),  # the last one would be of no use
        ((2 * MIB, 2 * MIB), 4 * MIB + 1),
        ((2 * MIB, -2 * MIB, 4 * MIB), 4 * MIB),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces: tuple[int, ...], length: int) -> None:
    with pytest.raises(ConfigError, match="cannot be a segment"):
        map_joined([0] * len(pieces), pieces, length, writable=False)


def test_memory_that_is_too_short_or_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    memory = create_memory(2 * MIB, "p2pstore-joined")
    path = tmp_path / "loose"
    path.write_bytes(bytes(2 * MIB))
    path.chmod(0o666)
    loose = os.open(path, os.O_RDONLY)
    for other in (memory.descriptor, loose):
        with pytest.raises(ConfigError, match="can be mapped safely"):
            map_joined([memory.descriptor, other], [2 * MIB, 4 * MIB], 5 * MIB, writable=False)
    os.close(loose)
    memory.close()
    assert mappings("p2pstore-joined") == 0


# --- as a peer's settings say -------------------------------------------------------------------


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "more"
    config = PeerConfig(memory="8MiB", more_memory=["3MiB@node:0", f"4MiB@{file}"])
    assert config.checked().memory_bytes == (8 + 4 + 4) * MIB
    memory = create_segment_memory(config)
    assert memory.pieces[1:] == [4 * MIB, 4 * MIB]
    assert memory.length > 16 * MIB  # the tables as well
    assert file.stat().st_size > 4 * MIB
    memory.close()
    assert not file.exists()


def test_what_a_dead_peer_left_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "more"
    settings = PeerConfig(memory="2MiB", more_memory=[f"2MiB@{file}"])
    memory = create_segment_memory(settings)
    memory.view[-2 * MIB :] = b"\xff" * (2 * MIB)  # objects lie where a first memory has its header
    left = file.read_bytes()
    assert left.count(SEGMENT_MAGIC) == 1
    with pytest.raises(ConfigError, match=r"more_memory: .* is the memory of another peer"):
        create_segment_memory(settings)
    memory.close()
    file.write_bytes(left)
    create_segment_memory(settings).close()
    file.write_bytes(left.replace(SEGMENT_MAGIC, b"somebody"))
    with pytest.raises(ConfigError, match=r"more_memory: .* holds something"):
        create_segment_memory(settings)
    assert file.exists()


def test_together_they_may_not_be_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "p2pstore.memory.mapped.mapped_memory.available_memory", lambda: (24 * MIB, "this host")
    )
    create_segment_memory(PeerConfig(memory="8MiB", more_memory=["8MiB@node:0"])).close()
    with pytest.raises(ConfigError, match=r"this host has .* left"):
        create_segment_memory(PeerConfig(memory="8MiB", more_memory=["16MiB@node:0"]))
