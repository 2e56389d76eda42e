"""Small reads of many tasks from one holder: which task reads for which, and the rest after a cancellation."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pstore.client.holder_reads import MANY, MAX_ALONE, MAX_TOGETHER, ReadingTogether
from p2pstore.runtime.asyncio_streams import AsyncioDriver
from p2pstore.runtime.streams import Driver
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import Code

ROOM = 100
Answer = tuple[int, PullFailed | None]
"""How many objects of a request come, and how it fails then."""
WELL: Answer = (MAX_TOGETHER, None)


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value_of(digest: bytes) -> bytes:
    return digest[:8] * (1 + digest[0] % 12)


class Holder:
    """A holder, and those who read there. `requests` are the numbers that each asked for; of one that was asked by
    itself, nothing."""

    def __init__(self, driver: Driver, answer: Callable[[], Awaitable[Answer]]) -> None:
        self.together = ReadingTogether(driver, self._pull_small)
        self.requests: list[list[int]] = []
        self._answer = answer

    async def read(self, number: int, room_bytes: int = ROOM) -> int:
        """Read an object and compare it: its length."""
        digest, view = digest_of(number), memoryview(bytearray(room_bytes))
        copy = RemoteCopy(b"", (), None, member=1)
        try:
            length, failure = await self.together.read(copy, digest, view)
        finally:
            before = bytes(view)
            view.release()  # no more writes there
        if failure is not None:
            raise failure
        if length >= 0:
            assert before[:length] == value_of(digest)
        return length

    async def _pull_small(
        self, copy: RemoteCopy, digests: Sequence[bytes], views: Sequence[memoryview]
    ) -> tuple[list[int], PullFailed | None]:
        numbers = [int.from_bytes(each, "little") for each in digests]
        self.requests.append(numbers if len(numbers) > 1 else [])
        told, failure = await self._answer()
        if not told and failure is None:
            return [-1] * len(digests), None
        lengths: list[int] = []
        for view, value in zip(views, map(value_of, digests[:told]), strict=False):
            fits = len(value) <= len(view)
            if fits:
                view[: len(value)] = value
            lengths.append(len(value) if fits else -1)
        return lengths, failure

    def check_idle(self) -> None:
        """No task reads there or waits."""
        for each in self.together._holders.values():
            assert (each.alone, each.leads, each.queue) == (0, False, [])


class Readers:
    """Reads of a holder, each in a task of its own; a request is answered when the test says so. `ends` is how each
    ended: a length, a code, or "cancelled"."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.holder = Holder(TrioDriver(), self._wait)
        self.ends: dict[int, Any] = {}
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}
        self._waiting: list[tuple[trio.Event, list[Answer]]] = []

    async def _wait(self) -> Answer:
        waiting = trio.Event(), [WELL]
        self._waiting.append(waiting)
        try:
            await waiting[0].wait()
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return waiting[1][0]

    async def begin(self, *numbers: int, room_bytes: int = ROOM) -> None:
        for number in numbers:
            self._scopes[number] = trio.CancelScope()
            self._nursery.start_soon(self._read, number, room_bytes)
            await wait_all_tasks_blocked()

    async def _read(self, number: int, room_bytes: int) -> None:
        with self._scopes[number]:
            try:
                self.ends[number] = await self.holder.read(number, room_bytes)
            except PullFailed as failure:
                self.ends[number] = failure.code
        if self._scopes[number].cancelled_caught:
            self.ends[number] = "cancelled"

    async def cancel(self, *numbers: int) -> None:
        for number in numbers:
            self._scopes[number].cancel()
        await wait_all_tasks_blocked()

    async def answer(self, count: int = 1, answer: Answer = WELL) -> None:
        """Answer the requests that have waited longest."""
        for _ in range(count):
            event, answers = self._waiting.pop(0)
            answers[0] = answer
            event.set()
        await wait_all_tasks_blocked()

    def ended(self, *numbers: int) -> bool:
        """Whether these have come, all that have ended."""
        assert self.ends == {each: len(value_of(digest_of(each))) for each in numbers}
        return True


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    async with trio.open_nursery() as nursery:
        some = Readers(nursery)
        yield some
        nursery.cancel_scope.cancel()
    some.holder.check_idle()


async def test_few_reads_go_by_themselves(readers: Readers) -> None:
    await readers.begin(*range(MAX_ALONE + 1))
    assert readers.holder.requests == [[]] * MAX_ALONE
    await readers.answer()
    assert readers.holder.requests == [[]] * (MAX_ALONE + 1)  # a batch of one is none
    await readers.answer(MAX_ALONE)
    assert readers.ended(*range(MAX_ALONE + 1))


async def test_many_reads_go_together(readers: Readers) -> None:
    await readers.begin(*range(30))
    await readers.answer()
    assert readers.holder.requests == [*[[]] * MAX_ALONE, list(range(MAX_ALONE, 30))]
    await readers.begin(*range(30, 40))  # wait behind the batch
    await readers.answer(MAX_ALONE)
    assert readers.ended(*range(30))
    assert readers.holder.requests[-1] == list(range(30, 40))
    await readers.answer()
    await readers.begin(40, 41, 42)  # few again
    assert readers.holder.requests[-3:] == [[], [], []]
    await readers.answer(3)
    assert readers.ended(*range(43))


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_answers_that_are_there_at_once_are_asked_for_together(loop: str) -> None:
    """Otherwise no task would ever wait: the first would read all it wants, then the next one."""

    async def at_once() -> Answer:
        return WELL

    async def read_some(holder: Holder, first: int) -> None:
        for number in range(first, first + 20):
            assert await holder.read(number) > 0

    async def by_trio() -> Holder:
        holder = Holder(TrioDriver(), at_once)
        async with trio.open_nursery() as nursery:
            for task in range(TASKS):
                nursery.start_soon(read_some, holder, 20 * task)
        return holder

    async def by_asyncio() -> Holder:
        holder = Holder(AsyncioDriver(), at_once)
        await asyncio.gather(*[read_some(holder, 20 * task) for task in range(TASKS)])
        return holder

    holder = trio.run(by_trio) if loop == "trio" else asyncio.run(by_asyncio())
    holder.check_idle()
    assert len(holder.requests) < 3 * 20, "a few more than there would be if all went in step"


async def test_who_gathers_is_cancelled_or_told_of_a_silent_holder(readers: Readers) -> None:
    silence = PullFailed(Code.DEADLINE_EXCEEDED, "it did not answer")
    await readers.begin(*range(30))
    await readers.answer(MAX_ALONE)
    await readers.answer()
    scope = trio.CancelScope()
    scope.cancel()
    with scope:
        await readers.holder.read(30)
    assert scope.cancelled_caught
    await readers.begin(31)
    await readers.answer(1, (0, silence))
    assert readers.ends.pop(31) == Code.DEADLINE_EXCEEDED
    assert readers.ended(*range(30))


async def test_what_does_not_fit_takes_another_way(readers: Readers) -> None:
    await readers.begin(*range(MAX_ALONE))
    long = 11  # twelve times eight bytes
    await readers.begin(long, 12, room_bytes=90)
    await readers.answer(MAX_ALONE)
    await readers.answer()
    assert readers.ends.pop(long) == -1
    assert readers.ended(*range(MAX_ALONE), 12)


async def test_one_request_is_no_longer_than_its_most(readers: Readers) -> None:
    count = MAX_ALONE + MAX_TOGETHER + MANY
    await readers.begin(*range(count))
    await readers.answer(MAX_ALONE)
    await readers.answer()
    assert [len(each) for each in readers.holder.requests[MAX_ALONE:]] == [MAX_TOGETHER, MANY]
    await readers.answer()
    assert readers.ended(*range(count))


async def test_who_is_cancelled_leaves_the_others_alone(readers: Readers) -> None:
    await readers.begin(*range(20))
    await readers.cancel(0, 15)  # one that reads by itself, and one that waits
    others = [each for each in range(MAX_ALONE, 20) if each != 15]
    assert readers.holder.requests[-1] == others
    await readers.cancel(7)  # it is being read
    await readers.cancel(4)  # which reads for all
    others.remove(7)
    assert readers.holder.requests[-1] == others[1:]
    await readers.begin(20)
    await readers.cancel(20)
    await readers.answer(MAX_ALONE)
    assert {each: readers.ends.pop(each) for each in (0, 4, 7, 15, 20)} == dict.fromkeys(
        (0, 4, 7, 15, 20), "cancelled"
    )
    assert readers.ended(1, 2, 3, *others[1:])


async def test_a_holder_that_is_silent_is_waited_for_once(readers: Readers) -> None:
    silence = PullFailed(Code.DEADLINE_EXCEEDED, "it did not answer")
    await readers.begin(*range(MAX_ALONE + MANY))
    await readers.answer(1, (0, silence))  # one by itself
    assert readers.ends == dict.fromkeys((0, *range(MAX_ALONE, 12)), Code.DEADLINE_EXCEEDED)
    await readers.answer(MAX_ALONE - 1)
    readers.ends.clear()
    await readers.begin(*range(20))
    await readers.answer(MAX_ALONE)
    await readers.begin(20, 21)
    await readers.answer(1, (5, silence))  # a batch, after five of its objects
    for number in range(MAX_ALONE + 5):
        del readers.ends[number]
    late = range(MAX_ALONE + 5, 22)
    assert readers.ends == dict.fromkeys(late, Code.DEADLINE_EXCEEDED)


async def test_silence_of_one_ends_the_turn_of_another(readers: Readers) -> None:
    """A request comes and another one fails in the same moment: the task that the first calls hears of the second."""
    silence = PullFailed(Code.DEADLINE_EXCEEDED, "it did not answer")
    for _ in range(10):  # in any order
        readers.ends.clear()
        readers.holder.requests.clear()
        await readers.begin(*range(MAX_ALONE + MANY))
        (first, _), (second, answers) = readers._waiting[:2]
        answers[0] = 0, silence
        first.set()
        second.set()
        await wait_all_tasks_blocked()
        assert len(readers.holder.requests) == MAX_ALONE
        assert readers.ends.pop(0) > 0
        assert set(readers.ends.values()) == {Code.DEADLINE_EXCEEDED}
        await readers.begin(12)
        await readers.answer(MAX_ALONE - 1)
        assert readers.ends[12] > 0


async def test_a_connection_that_breaks_fails_only_who_was_read_there(readers: Readers) -> None:
    broken = PullFailed(Code.UNAVAILABLE, "it broke", retriable=True)
    await readers.begin(*range(20))
    await readers.answer(MAX_ALONE)
    await readers.begin(20, 21)
    await readers.answer(1, (5, broken))
    failed = range(MAX_ALONE + 5, 20)
    assert {each: readers.ends.pop(each) for each in failed} == dict.fromkeys(failed, Code.UNAVAILABLE)
    await readers.answer()
    assert readers.ended(*range(MAX_ALONE + 5), 20, 21)


# --- all of it at once ---------------------------------------------------------------------------

TASKS = 40
ROUNDS = 30


async def read_and_be_cancelled(
    holder: Holder, rng: Random, cancel_soon: Callable[[Callable[[], Awaitable[None]]], Any]
) -> int:
    """Reads by one task, some of which are cancelled or fail: how many came."""
    came = 0

    async def read() -> None:
        nonlocal came
        with suppress(PullFailed):
            came += await holder.read(rng.randrange(10_000)) > 0

    for _ in range(ROUNDS):
        if rng.random() < 0.3:
            await cancel_soon(read)
        else:
            await read()
    return came


def answering(rng: Random, checkpoint: Callable[[], Awaitable[Any]]) -> Callable[[], Any]:
    async def answer() -> Answer:
        for _ in range(rng.randrange(6)):
            await checkpoint()
        kind = rng.random()
        if kind < 0.1:
            return rng.randrange(20), PullFailed(Code.DEADLINE_EXCEEDED, "silent")
        if kind < 0.2:
            return rng.randrange(20), PullFailed(Code.UNAVAILABLE, "broken", retriable=True)
        return (0, None) if kind < 0.3 else WELL

    return answer


@pytest.mark.parametrize("seed", range(5))
async def test_nobody_is_left_waiting_whoever_is_cancelled(seed: int) -> None:
    rng = Random(seed)
    holder = Holder(TrioDriver(), answering(rng, trio.lowlevel.checkpoint))
    came: list[int] = []

    async def cancel_soon(read: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:

            async def read_then_end() -> None:
                await read()
                nursery.cancel_scope.cancel()

            nursery.start_soon(read_then_end)
            for _ in range(rng.randrange(8)):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def work() -> None:
        came.append(await read_and_be_cancelled(holder, rng, cancel_soon))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(work)
    assert sum(came) > TASKS * ROUNDS / 4
    assert max(map(len, holder.requests)) >= MANY
    holder.check_idle()


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_left_waiting_under_asyncio(seed: int) -> None:
    rng = Random(seed)

    async def cancel_soon(read: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.ensure_future(read())
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async def main() -> None:
        holder = Holder(AsyncioDriver(), answering(rng, lambda: asyncio.sleep(0)))
        async with asyncio.timeout(10):
            came = await asyncio.gather(
                *[read_and_be_cancelled(holder, rng, cancel_soon) for _ in range(TASKS)]
            )
        assert sum(came) > TASKS * ROUNDS / 4
        assert max(map(len, holder.requests)) >= MANY
        holder.check_idle()

    asyncio.run(main())
