"""Threads that do blocking I/O for trio tasks, at some microseconds of Python a request.

`trio.to_thread` takes ten times as long: it looks for a thread and wakes the loop each time. Here threads wait at a
queue, and one wake-up of the loop settles all requests that have ended by then. A request is one or more pieces of
work, which several threads do side by side; it ends when its last piece has. Cancelling takes back the pieces that
no thread has begun, and waits for the others: a thread in a system call cannot be called off, and it must let go of
its memory before the task does. A task has one request, so the queues need no limit of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, NoReturn, TypeAlias

import trio

from p2pstore.errors import StoreClosed
from p2pstore.ssd_tier.disk_protocol import refuse_closed

Work: TypeAlias = Callable[[], object]

READS_BEFORE_WRITE: Final = 8
"""Waiting reads that a writing thread does before its next write. The limit keeps reads from starving writes."""

CLOSING_SECONDS: Final = 1.0
"""How long `close` waits for work under way."""


class _Request:
    """Pieces of work of one task, and how far they are. Threads and the loop take from both lists; what one of them
    takes is its own, without a lock."""

    __slots__ = ("cancelled", "error", "last", "outstanding", "pieces", "raise_cancel", "task", "woken")

    def __init__(self, pieces: Iterable[Work], last: Work | None, task: trio.lowlevel.Task) -> None:
        self.pieces = deque(pieces)
        self.last = last
        """The work after all pieces."""
        self.outstanding = [True]
        if len(self.pieces) > 1:
            self.outstanding += [False] * (len(self.pieces) - 1)
        """One for each piece that has not ended; the thread that takes the last one gets True."""
        self.task = task
        self.error: BaseException | None = None
        self.cancelled = False
        self.raise_cancel: Callable[[], NoReturn] | None = None
        self.woken = False
        """Its task does not wait any more; when it was abandoned, a thread may still be at it."""

    def wake(self) -> None:
        if not self.woken:
            self.woken = True
            trio.lowlevel.reschedule(self.task)

    def take_back(self) -> bool:
        """Whether nothing remains to be waited for, now that no further piece begins."""
        self.cancelled = True
        last = False
        with suppress(IndexError):
            while True:
                self.pieces.popleft()
                last = self.outstanding.pop()
        return last

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        if self.take_back():
            self.woken = True
            return trio.lowlevel.Abort.SUCCEEDED
        self.raise_cancel = raise_cancel
        return trio.lowlevel.Abort.FAILED


class _Lane:
    """Requests of one kind, which wait for threads of their own: as often in the queue as they have pieces."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self.queue: SimpleQueue[_Request | None] = SimpleQueue()


class IoThreads:
    """Threads that read, threads that write, and one that syncs. For one trio run at a time.

    `on_end` is called in the last of the threads, after `close`, when none of them does anything any more.
    Raises `RuntimeError` when this process may have no more threads.
    """

    def __init__(
        self, name: str, read_threads: int, write_threads: int, on_end: Callable[[], None]
    ) -> None:
        self._reads = _Lane("read", read_threads)
        self._writes = _Lane("write", write_threads)
        self._syncs = _Lane("sync", 1)
        self._lanes = (self._reads, self._writes, self._syncs)
        self._on_end = on_end
        self._closed = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended: deque[_Request] = deque()
        """Requests whose tasks are to be woken."""
        self._waking = False
        """Whether the loop has yet to begin with `_settle`."""
        self._alive: list[bool] = []
        """One for each thread; the last one to end takes True."""
        self._threads: list[threading.Thread] = []
        self._begun: list[float] = []
        """For each thread, when the piece began that it does now (`time.monotonic`); infinite when it has none."""
        self.last_end = 0.0
        """When a piece ended, at last."""
        self._waiting: set[_Request] = set()
        for lane in self._lanes:
            for number in range(lane.threads):
                self._start(lane, f"{name} {lane.name} {number}")

    async def read(self, pieces: Iterable[Work], last: Work | None = None) -> None:
        """Have all pieces done (at least one), in any order, before writes that wait, and then `last`. Raises the first
        exception that one of them raised, after the others have ended or were left out; `StoreClosed` after `close`.
        """
        await self._do(self._reads, pieces, last)

    async def write(self, pieces: Iterable[Work]) -> None:
        """As `read`, with fewer threads: more concurrent writes would only delay reads in the disk."""
        await self._do(self._writes, pieces)

    async def sync(self, piece: Work) -> None:
        """As `read`, one after the other, beside reads and writes."""
        await self._do(self._syncs, (piece,))

    @property
    def oldest_begin(self) -> float:
        """When the piece began that has been done for longest (`time.monotonic`); infinite when there is none."""
        return min(self._begun)

    def abandon(self) -> None:
        """`close`, and do not wait any more for what threads have begun: tasks that wait for it raise `StoreClosed`, or
        `Cancelled`, at once. Their memory may still be read and written: it must not be reused."""
        self._end()
        for request in self._waiting:
            if not request.woken:
                request.error = StoreClosed("the disk was closed while it did not answer")
                request.wake()

    def close(self) -> None:
        """End: requests in the queues raise `StoreClosed`; waits at most a second for work under way, which goes
        on to its end in any case."""
        self._end()
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            with suppress(Empty):
                while (request := lane.queue.get_nowait()) is not None:
                    self._refuse(request)
        for lane in self._lanes:
            for _ in range(lane.threads):
                lane.queue.put(None)

    # --- in the loop ---

    @trio.lowlevel.enable_ki_protection
    async def _do(self, lane: _Lane, pieces: Iterable[Work], last: Work | None = None) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        refuse_closed(self._closed)
        token = trio.lowlevel.current_trio_token()
        if token is not self._token:
            self._token, self._waking = token, False
        request = _Request(pieces, last, trio.lowlevel.current_task())
        for _ in range(len(request.outstanding)):
            lane.queue.put(request)
        self._waiting.add(request)
        try:
            await trio.lowlevel.wait_task_rescheduled(request.abort)
        finally:
            self._waiting.discard(request)
        if request.raise_cancel is not None:
            request.error = None
            request.raise_cancel()
        if request.error is not None:
            try:
                raise request.error
            finally:
                request.error = None  # its traceback refers to this frame, and to the request

    def _settle(self) -> None:
        """Wake the tasks whose requests have ended."""
        # Before looking: a thread that adds one later sees that it must call for this again.
        self._waking = False
        while self._ended:
            self._ended.popleft().wake()

    # --- in any thread ---

    def _tell_loop(self, request: _Request) -> None:
        self._ended.append(request)
        if not self._waking and self._token is not None:
            self._waking = True
            # A loop that has ended has no tasks that wait.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._settle)

    def _refuse(self, request: _Request) -> None:
        """Do no further piece of it: the threads are about to end."""
        try:
            refuse_closed(True)
        except Exception as error:
            request.error = request.error or error
        if request.take_back():
            self._tell_loop(request)

    # --- in the threads ---

    def _start(self, lane: _Lane, name: str) -> None:
        number = len(self._begun)
        thread = threading.Thread(target=self._run, args=(lane, number), name=name, daemon=True)
        self._begun.append(inf)
        self._alive.append(not self._alive)
        try:
            thread.start()
        except RuntimeError:
            if self._alive.pop():
                self._on_end()
            self.close()
            raise
        self._threads.append(thread)

    def _run(self, lane: _Lane, number: int) -> None:
        ahead = self._reads.queue if lane is self._writes else None
        while self._next(number, lane.queue, ahead):
            pass
        if self._alive.pop():
            self._on_end()

    def _next(
        self,
        number: int,
        queue: SimpleQueue[_Request | None],
        ahead: SimpleQueue[_Request | None] | None,
    ) -> bool:
        """Do one piece of what waits; before that, some of what waits ahead. False: it was the end."""
        request = queue.get()
        if request is None:
            return False
        if ahead is not None:
            self._let_pass(number, ahead)
        self._perform(number, request)
        return True

    def _let_pass(self, number: int, ahead: SimpleQueue[_Request | None]) -> None:
        with suppress(Empty):
            for _ in range(READS_BEFORE_WRITE):
                if ahead.empty():
                    return
                request = ahead.get_nowait()
                if request is None:  # meant for another thread: the end
                    ahead.put(None)
                    return
                self._perform(number, request)

    def _perform(self, number: int, request: _Request) -> None:
        """One piece of it. Never raises."""
        try:
            piece = request.pieces.popleft()
        except IndexError:  # taken back
            return
        self._begun[number] = time.monotonic()
        _attempt(request, piece)
        self.last_end, self._begun[number] = time.monotonic(), inf
        # The task may go on as soon as it is told: this thread has let go of its memory by then.
        del piece
        if request.outstanding.pop():
            if request.last is not None and not request.cancelled:
                _attempt(request, request.last)
            request.last = None
            self._tell_loop(request)


def _attempt(request: _Request, work: Work) -> None:
    """Unless something of the request failed already."""
    if request.error is None:
        try:
            work()
        except BaseException as error:
            request.error = error
