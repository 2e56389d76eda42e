"""Copies by several threads, on whatever machine the tests run."""

from __future__ import annotations

import pytest

from p2pstore.runtime import side_by_side


def with_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Have this number of threads do work of more than one piece."""
    monkeypatch.setattr(side_by_side, "FROM_BYTES", side_by_side.PIECE_BYTES)
    monkeypatch.setattr(side_by_side, "MOST_THREADS", threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4 * threads))
    monkeypatch.setattr(side_by_side, "_processor_limit", lambda: 4.0 * threads)
