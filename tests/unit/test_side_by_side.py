"""How many threads share what, and that none of them is left."""

from __future__ import annotations

import threading

import pytest

from p2pstore import side_by_side
from p2pstore.objects import MIB
from p2pstore.side_by_side import FROM_BYTES, PIECE_BYTES, step_bytes, threads_for


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4), (256, 4)]
)
def test_a_few_threads_where_there_are_many_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    assert threads_for(FROM_BYTES - 1) == 1
    assert threads_for(FROM_BYTES) == threads
    assert step_bytes(threads) % PIECE_BYTES == 0
    assert step_bytes(threads) <= 64 * MIB


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_errors_at_once(threads: int) -> None:
    before = threading.active_count()
    assert side_by_side.side_by_side(threads, lambda piece: 2 * piece, range(50)) == list(
        range(0, 100, 2)
    )

    def fail_at_seven(piece: int) -> int:
        if piece == 7:
            raise ValueError("seven")
        return piece

    with pytest.raises(ValueError, match="seven"):
        side_by_side.side_by_side(threads, fail_at_seven, range(50))
    assert threading.active_count() == before
