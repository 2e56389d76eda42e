"""Threads that do blocking I/O: what they take first, what a cancellation takes back, and how they end."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore.errors import StoreClosed
from p2pstore.ssd_tier import io_threads
from p2pstore.ssd_tier.io_threads import IoThreads

PATIENCE_SECONDS = 20.0


@contextmanager
def pool(read_threads: int = 1, write_threads: int = 1) -> Iterator[IoThreads]:
    threads = IoThreads("test", read_threads, write_threads, lambda: None)
    try:
        yield threads
    finally:
        threads.close()


class Gate:
    """Work that begins, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_SECONDS)

    async def wait_begun(self) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            while not self.begun.is_set():
                await trio.sleep(0.001)


def nothing() -> None:
    pass


async def test_pieces_of_one_request_run_side_by_side() -> None:
    meet = threading.Barrier(4)
    with pool(read_threads=4) as threads:
        await threads.read([lambda: meet.wait(PATIENCE_SECONDS)] * 4)


async def test_the_last_work_comes_after_all_pieces() -> None:
    gate, done = Gate(), list[str]()
    with pool(read_threads=2) as threads:
        async with trio.open_nursery() as nursery:
            pieces: list[Callable[[], object]] = [gate, lambda: done.append("piece")]
            nursery.start_soon(threads.read, pieces, partial(done.append, "last"))
            await gate.wait_begun()
            await threads.read([nothing])
            assert done == ["piece"]
            gate.may_end.set()
    assert done == ["piece", "last"]


async def test_the_last_work_is_left_out_when_a_piece_failed() -> None:
    done = list[str]()

    def fail() -> None:
        raise OSError(5, "broken")

    with pool() as threads:
        with pytest.raises(OSError, match="broken"):
            await threads.read([fail], lambda: done.append("last"))
        with pytest.raises(OSError, match="broken"):
            await threads.read([nothing], fail)
    assert not done


async def test_the_last_work_is_left_out_when_the_request_was_cancelled() -> None:
    gate, done = Gate(), list[str]()
    with pool() as threads:
        async with trio.open_nursery() as nursery:
            pieces: list[Callable[[], object]] = [gate, nothing]
            nursery.start_soon(threads.read, pieces, partial(done.append, "last"))
            await gate.wait_begun()
            nursery.cancel_scope.cancel()
            gate.may_end.set()
        await threads.read([nothing])
    assert not done


async def test_a_request_ends_when_its_last_piece_has() -> None:
    gate, done = Gate(), []
    with pool(read_threads=2) as threads:

        async def read() -> None:
            await threads.read([gate, lambda: done.append("quick")])
            done.append("all")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await gate.wait_begun()
            await threads.read([nothing])
            assert done == ["quick"]
            gate.may_end.set()
    assert done == ["quick", "all"]


async def test_the_first_error_is_raised_and_the_rest_left_out() -> None:
    done = []

    def fail() -> None:
        raise OSError("broken")

    with pool() as threads:
        with pytest.raises(OSError, match="broken"):
            await threads.read([lambda: done.append(1), fail, lambda: done.append(2)])
        assert done == [1]
        await threads.read([lambda: done.append(3)])
    assert done == [1, 3]


async def test_a_thread_survives_everything() -> None:
    def leave() -> None:
        raise SystemExit

    with pool() as threads:
        for _ in range(3):
            with pytest.raises(SystemExit):
                await threads.read([leave])
        await threads.read([nothing])


@pytest.mark.parametrize(
    ("requests", "pieces", "before"), [(3, 1, 3), (1, 100, io_threads.READS_BEFORE_WRITE)]
)
async def test_reads_go_before_writes_but_not_all_of_them(
    requests: int, pieces: int, before: int
) -> None:
    order: list[str] = []
    reading, writing = Gate(), Gate()
    with pool() as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.read, [reading])
            await reading.wait_begun()
            nursery.start_soon(threads.write, [writing])
            await writing.wait_begun()
            nursery.start_soon(threads.write, [lambda: order.append("write")])
            await wait_all_tasks_blocked()
            for _ in range(requests):
                nursery.start_soon(threads.read, [lambda: order.append("read")] * pieces)
            await wait_all_tasks_blocked()
            writing.may_end.set()
            with trio.fail_after(PATIENCE_SECONDS):
                while "write" not in order:
                    await trio.sleep(0.001)
            reading.may_end.set()
    assert order.index("write") == before


async def test_cancelling_takes_back_what_no_thread_has_begun() -> None:
    gate, done = Gate(), []
    with pool() as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.read, [gate])
            await gate.wait_begun()
            with trio.fail_after(PATIENCE_SECONDS), trio.move_on_after(0.01) as scope:
                await threads.read([lambda: done.append(1)] * 5)
            assert scope.cancelled_caught
            gate.may_end.set()
        await threads.read([nothing])
    assert done == []


async def test_cancelling_waits_for_what_a_thread_does() -> None:
    gate, ended = Gate(), []
    with pool() as threads:

        async def read() -> None:
            try:
                await threads.read([gate, lambda: ended.append("second piece")])
            finally:
                ended.append("read")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await gate.wait_begun()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
                assert ended == []
                gate.may_end.set()
    assert nursery.cancel_scope.cancelled_caught
    assert ended == ["read"]


async def test_a_cancelled_request_raises_that_and_not_its_error() -> None:
    gate = Gate()

    def fail() -> None:
        gate()
        raise OSError("broken")

    with pool() as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.read, [fail])
            await gate.wait_begun()
            nursery.cancel_scope.cancel()
            gate.may_end.set()
    assert nursery.cancel_scope.cancelled_caught


async def test_closing_refuses_what_waits_and_lets_end_what_runs() -> None:
    gate, outcomes, ended = Gate(), [], threading.Event()
    threads = IoThreads("test", 1, 1, ended.set)

    async def read(*pieces: Callable[[], object]) -> None:
        try:
            await threads.read(pieces)
            outcomes.append("done")
        except StoreClosed:
            outcomes.append("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, gate)
        await gate.wait_begun()
        nursery.start_soon(read, nothing, nothing)
        await wait_all_tasks_blocked()
        await trio.to_thread.run_sync(threads.close)
        await wait_all_tasks_blocked()
        assert outcomes == ["closed"]
        assert not ended.is_set()
        gate.may_end.set()
    assert outcomes == ["closed", "done"]
    assert ended.wait(PATIENCE_SECONDS)
    await read(nothing)
    assert outcomes[-1] == "closed"


async def test_all_threads_end_when_it_is_closed() -> None:
    ended = []
    before = threading.active_count()
    threads = IoThreads("test", 8, 4, lambda: ended.append(1))
    await threads.read([nothing])
    assert threading.active_count() == before + 13
    threads.close()
    threads.close()
    assert ended == [1]
    assert threading.active_count() == before


async def test_ctrl_c_does_not_come_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between handing over work and waiting for it."""
    protected: list[bool] = []

    class Request(io_threads._Request):
        def __init__(
            self,
            pieces: Iterable[Callable[[], object]],
            last: Callable[[], object] | None,
            task: trio.lowlevel.Task,
        ) -> None:
            protected.append(trio.lowlevel.currently_ki_protected())
            super().__init__(pieces, last, task)

    monkeypatch.setattr(io_threads, "_Request", Request)
    with pool() as threads:
        await threads.read([nothing])
    assert protected == [True]


def test_it_serves_one_trio_run_after_the_other() -> None:
    with pool() as threads:
        for _ in range(3):
            trio.run(threads.read, [nothing])


def test_too_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    allowed = 3

    def start_some(thread: threading.Thread) -> None:
        nonlocal allowed
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed -= 1
        start(thread)

    ended = threading.Event()
    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        with pytest.raises(RuntimeError, match="new thread"):
            IoThreads("test", 4, 4, ended.set)
    assert ended.wait(PATIENCE_SECONDS)
    assert threading.active_count() == before


async def test_threads_keep_nothing_of_what_they_did() -> None:
    class Memory:
        def use(self) -> None:
            if self.fails:
                raise OSError("broken")

        fails = False

    gc.disable()
    try:
        for fails in (False, True):
            memory = Memory()
            memory.fails = fails
            with pool() as threads:
                try:
                    await threads.read([memory.use])
                except OSError as error:
                    assert fails
                    del error
                kept = weakref.ref(memory)
                del memory
                assert kept() is None
    finally:
        gc.enable()


# --- a disk that hangs ---------------------------------------------------------------------------


async def test_how_long_a_piece_has_been_done_is_known() -> None:
    gate = Gate()
    with pool() as threads:
        assert threads.oldest_begin == inf
        before = time.monotonic()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.read, [gate])
            await gate.wait_begun()
            assert before <= threads.oldest_begin <= time.monotonic()
            await threads.write([nothing])
            assert threads.last_end >= threads.oldest_begin
            gate.may_end.set()
        assert threads.oldest_begin == inf


async def test_what_hangs_is_waited_for_no_more_once_it_is_abandoned() -> None:
    gate, ends = Gate(), Gate()
    told: list[StoreClosed] = []

    async def read(gate: Gate, scope: trio.CancelScope) -> None:
        with scope:
            try:
                await threads.read([gate])
            except StoreClosed as error:
                told.append(error)

    ended: list[bool] = []
    threads = IoThreads("test", 2, 1, lambda: ended.append(True))
    scope = trio.CancelScope()
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, gate, trio.CancelScope())
            nursery.start_soon(read, ends, scope)
            await gate.wait_begun()
            await ends.wait_begun()
            nursery.start_soon(read, gate, trio.CancelScope())  # waits its turn
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not told
            threads.abandon()
        assert len(told) == 2
        assert scope.cancelled_caught
        with pytest.raises(StoreClosed):
            await threads.read([nothing])
        gate.may_end.set()
        ends.may_end.set()
        threads.close()
        await wait_all_tasks_blocked()
    assert ended == [True]
