"""Works side by side: copying and summing much, by several threads of this process where the machine has cores for
that; and coroutines, by helpers (`together`).

A core copies and sums 4 to 10 GB/s of what is in no cache, and memory carries several times that. Both are done without
the interpreter's lock. Where there are few cores nothing is gained: what one thread leaves, others compute with.
"""

from __future__ import annotations

import math
import os
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final, Generic, TypeVar

from p2pstore.objects import MIB
from p2pstore.runtime.linux import processor_limit
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver, Event, HelperTask

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[], Awaitable[None]]

PIECE_BYTES: Final = 4 * MIB
"""That one thread does at a time, and alone before it looks whether it is to stop."""
PIECES_A_THREAD: Final = 2
"""Done by each of several threads, on average, between two looks whether they are to stop. A start takes 0.02 ms."""
FROM_BYTES: Final = 16 * MIB
MAX_THREADS: Final = 4
CORES_A_THREAD: Final = 4
"""The other cores are for other programs. Two threads use two cores where there are no more: a peer does nothing
meanwhile, and a thread that finds no free core is not waited for."""


def threads_for(length_bytes: int) -> int:
    """The number of threads that share a work of this size."""
    if length_bytes < FROM_BYTES:
        return 1
    cores = min(len(os.sched_getaffinity(0)), _processor_limit())
    return int(max(min(2, cores), min(MAX_THREADS, cores // CORES_A_THREAD), 1))


@cache
def _processor_limit() -> float:
    """Read once: it hardly ever changes, and takes longer than to copy a megabyte."""
    limit = processor_limit()
    return math.inf if limit is None else limit


def step_bytes(threads: int) -> int:
    """Bytes between two looks whether to stop; a multiple of a piece."""
    return PIECE_BYTES if threads == 1 else PIECE_BYTES * PIECES_A_THREAD * threads


def side_by_side(threads: int, function: Callable[[T], R], pieces: Iterable[T]) -> list[R]:
    """The results for all pieces, in their order, by this thread and as many others as may be had, up to `threads` in
    all. No other one is at work any more when it ends, also by an interrupt; raises what `function` raises."""
    work = _Work(function, list(pieces))
    try:
        for _ in range(min(threads, len(work.pieces)) - 1):
            if not _begin_another(work):
                break
        work.do()
    finally:
        try:
            work.end()
        except BaseException:  # interrupted: others still write
            work.end()
            raise
    if work.errors:
        raise work.errors[0]
    return work.results


class _Work(Generic[T, R]):
    """Pieces, of which each thread takes the next one."""

    def __init__(self, function: Callable[[T], R], pieces: list[T]) -> None:
        self.pieces = pieces
        self.results: list[Any] = [None] * len(pieces)
        self.errors: list[BaseException] = []
        self.waiting = deque(range(len(pieces)))
        self._function = function
        self._helping: list[threading.Event] = []
        """One for each other thread that has begun, set when it has ended."""

    def do(self) -> None:
        """Do pieces until none is left, or one of them failed."""
        while self.waiting:
            try:
                number = self.waiting.popleft()
            except IndexError:  # another thread took it
                return
            try:
                self.results[number] = self._function(self.pieces[number])
            except BaseException as error:
                self.errors.append(error)
                self.waiting.clear()

    def help(self, others: threading.Semaphore) -> None:
        """`do` in a thread of those that may run, as counted by `others`. One that begins late finds nothing to do."""
        ended = threading.Event()
        try:
            self._helping.append(ended)  # before it takes a piece: `end` clears these first
            self.do()
        finally:
            others.release()
            ended.set()

    def end(self) -> None:
        """Have each thread end and wait for it, but not for those not begun, which may take long."""
        self.waiting.clear()
        for ended in list(self._helping):
            ended.wait()


_others: Final = threading.BoundedSemaphore(MAX_THREADS)
"""How many more threads may be at this, of all values together."""


def _begin_another(work: _Work[Any, Any]) -> bool:
    others = _others
    if not others.acquire(blocking=False):
        return False
    try:
        start_new_thread(work.help, (others,))  # `threading.Thread` waits until it has begun
    except RuntimeError:  # there may be no more, or the program is about to end: it goes without
        others.release()
        return False
    return True


async def together(driver: Driver, works: Sequence[Work], most: int) -> None:
    """Do all works, at most `most` at once: the last one by this task, the first ones by helpers. All have ended when
    this does, in whatever way. Raises the first error, after which none begins."""
    waiting = deque(works)
    errors: list[Exception] = []

    async def work_off(take: Callable[[], Work]) -> None:
        while waiting:
            try:
                work = take()
            except IndexError:  # another thread took it
                return
            await work()

    async def help(ended: Event, _: HelperTask) -> None:
        try:
            await work_off(waiting.popleft)
        except Exception as error:
            waiting.clear()
            errors.append(error)
        finally:
            ended.set()

    async with driver.helpers() as start:
        running = [driver.event() for _ in works[1:most]]
        try:
            for ended in running:
                start(partial(help, ended))
        except RuntimeError:  # no more threads: those that began do it
            running = []
        try:
            await work_off(waiting.pop)
        finally:
            waiting.clear()
        for ended in running:
            while not await ended.wait(DEFAULT_PROGRESS_SECONDS):
                pass
    if errors:
        raise errors[0]
