"""How many threads share what, and that none of them is left; the background nursery under cancellation."""

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trio

from p2pstore.objects import MIB
from p2pstore.runtime import side_by_side
from p2pstore.runtime.side_by_side import FROM_BYTES, PIECE_BYTES, step_bytes, threads_for
from p2pstore.runtime.trio_tasks import open_background_nursery
from tests.interrupts import interrupted_after_each_call, interrupted_at_each_line


@pytest.mark.parametrize(
    ("cores", "limit", "threads"),
    [
        (1, math.inf, 1),
        (2, math.inf, 2),
        (4, math.inf, 2),
        (7, math.inf, 2),
        (12, math.inf, 3),
        (8, math.inf, 2),
        (16, math.inf, 4),
        (256, math.inf, 4),
        (256, 0.5, 1),
        (256, 1.9, 1),
        (256, 7.9, 2),
        (256, 8, 2),
        (8, 256, 2),
    ],
)
def test_a_few_threads_where_there_are_many_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, limit: float, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(side_by_side, "_processor_limit", lambda: limit)
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


def test_where_there_may_be_no_more_threads_it_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a program, or at a limit."""

    def refused(function: object, arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(side_by_side, "start_new_thread", refused)
    for _ in range(3 * side_by_side.MAX_THREADS):
        assert side_by_side.side_by_side(3, str, range(4)) == ["0", "1", "2", "3"]


def test_all_values_together_take_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads of tests before that have yet to begin are not counted.
    fresh = threading.BoundedSemaphore(side_by_side.MAX_THREADS)
    monkeypatch.setattr(side_by_side, "_others", fresh)
    at_once: list[int] = []
    begun = threading.Barrier(8 + side_by_side.MAX_THREADS)

    def piece(number: int) -> int:
        begun.wait(20)  # all threads that may run at once are here
        at_once.append(threading.active_count())
        return number

    before = threading.active_count()  # which counts those at work once they call this
    callers = [
        threading.Thread(target=lambda: side_by_side.side_by_side(4, piece, [0]), daemon=True)
        for _ in range(7)
    ]
    for caller in callers:
        caller.start()
    wide = threading.Thread(
        target=lambda: side_by_side.side_by_side(100, piece, range(1 + side_by_side.MAX_THREADS)),
        daemon=True,
    )
    wide.start()
    for thread in (*callers, wide):
        thread.join(20)
        assert not thread.is_alive()
    assert max(at_once) <= before + 8 + side_by_side.MAX_THREADS


@pytest.mark.parametrize("strike", [interrupted_at_each_line, interrupted_after_each_call])
def test_an_interrupt_leaves_no_thread_at_work(
    strike: Callable[..., Iterator[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "_others", threading.BoundedSemaphore(1000))

    at_work: set[int] = set()

    def piece(number: int) -> None:  # so that this thread is the one that waits
        at_work.add(number)
        time.sleep(0.001 if threading.current_thread() is threading.main_thread() else 0.02)
        at_work.discard(number)

    def copy() -> None:
        side_by_side.side_by_side(3, piece, range(6))

    places = []
    for place in strike(copy, side_by_side):
        places.append(place)
        assert not at_work, f"one was left when it was interrupted at {place}"
    assert len(places) >= 10
    assert side_by_side.side_by_side(3, str, range(4)) == ["0", "1", "2", "3"]


async def test_entered_when_cancelled_already_it_ends_at_once() -> None:
    with trio.fail_after(5), trio.CancelScope() as scope:
        scope.cancel()
        async with open_background_nursery():
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_the_background_runs_until_the_block_has_said_its_last_words() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    with trio.fail_after(5), trio.CancelScope() as scope:
        async with open_background_nursery() as background:
            background.start_soon(count)
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                before = turns
                with trio.CancelScope(shield=True):
                    for _ in range(10):
                        await trio.lowlevel.checkpoint()
                assert turns > before
    assert scope.cancelled_caught
