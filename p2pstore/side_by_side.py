"""Copying and summing much, by several threads of this process where the machine has cores for that.

A core copies and sums 4 to 10 GB/s of what is in no cache, and memory carries several times that. Both are done without
the interpreter's lock. Where there are few cores nothing is gained: what one thread leaves, others compute with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from p2pstore.objects import MIB

T = TypeVar("T")
R = TypeVar("R")

PIECE_BYTES: Final = 4 * MIB
"""That one thread does at a time, and alone before it looks whether it is to stop."""
PIECES_A_THREAD: Final = 4
"""So many are done before anybody looks, where there are several threads: to start them takes 0.1 ms."""
FROM_BYTES: Final = 16 * MIB
MOST_THREADS: Final = 4
CORES_A_THREAD: Final = 4
"""The others are for whoever else is on this machine."""


def threads_for(length_bytes: int) -> int:
    """How many threads are to share so many bytes."""
    if length_bytes < FROM_BYTES:
        return 1
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // CORES_A_THREAD))


def step_bytes(threads: int) -> int:
    """What is done before anybody looks whether it is to stop; a multiple of a piece."""
    return PIECE_BYTES if threads == 1 else PIECE_BYTES * PIECES_A_THREAD * threads


def side_by_side(threads: int, function: Callable[[T], R], pieces: Iterable[T]) -> list[R]:
    """The results for all pieces, in their order. All threads have ended when it returns; raises what `function`
    raises."""
    if threads == 1:
        return list(map(function, pieces))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, pieces))
