"""Several threads, on whatever machine the tests run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pstore.runtime import side_by_side
from tests.waiting import SECONDS


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Have this number of threads work at once. What one of them raises comes out."""
    with ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(work, number) for number in range(count)]:
            each.result(SECONDS)


def with_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Have this number of threads do work of more than one piece."""
    monkeypatch.setattr(side_by_side, "FROM_BYTES", side_by_side.PIECE_BYTES)
    monkeypatch.setattr(side_by_side, "MAX_THREADS", threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4 * threads))
    monkeypatch.setattr(side_by_side, "_processor_limit", lambda: 4.0 * threads)
