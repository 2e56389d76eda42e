"""Tasks waiting for reads over RDMA, and the one that hands out completions: on a device driven by the test."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from p2pstore.errors import DeadlineExceeded, Unavailable
from p2pstore.memory.segment_layout import SLOT_BYTES, plan_geometry
from p2pstore.transfer.rdma import rdma_reads
from p2pstore.transfer.rdma.rdma_reads import (
    MAX_KEPT,
    SLOTS_TOGETHER,
    Line,
    Piece,
    Read,
    ReadEngine,
    ReadFailed,
    SeenSlots,
)
from p2pstore.transfer.rdma.rdma_rules import RemoteMemory, WorkStatus
from p2pstore.transfer.rdma.rdma_verbs import Completion

SECONDS = 10.0
"""For what is to happen at once."""


class Card:
    """A device, its completion queue and its queue pairs, as `ReadEngine` uses them. Like a real one, it tells of a
    completion once after `arm`, and only of one that came after it."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(max_completions=64, max_message_bytes=1 << 20)
        self.descriptor, self._tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.posted: list[int] = []
        self.broken = False
        self.flushes = True
        self._ended: deque[Completion] = deque()
        self._armed = False
        self.closed = False

    def completion_queue(self, entries: int) -> Card:
        return self

    def arm(self) -> None:
        self._armed = True

    def acknowledge(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.descriptor, 1)

    def poll(self, count: int) -> list[Completion]:
        if self.broken:
            raise Unavailable("the card fell out")
        return [self._ended.popleft() for _ in range(min(count, len(self._ended)))]

    def complete(self, work_id: int, status: int = 0) -> None:
        """This work request has ended."""
        self.posted.remove(work_id)
        self._ended.append(Completion(work_id, status))
        self.tell()

    def tell(self) -> None:
        """Make the descriptor readable, if it is armed."""
        if self._armed:
            self._armed = False
            os.write(self._tell, b"!")

    # As a queue pair.

    def read(self, works: list[Any], region: Any, key: int) -> None:
        self.posted += [work.work_id for work in works]

    def fail(self) -> None:
        if self.flushes:
            for work_id in list(self.posted):
                self.complete(work_id, int(WorkStatus.FLUSHED))

    def close(self) -> None:
        self.closed = True

    def close_all(self) -> None:
        os.close(self.descriptor)
        os.close(self._tell)


class World:
    """An engine, and a line by which it reads."""

    def __init__(self) -> None:
        self.card = Card()
        self.engine = ReadEngine(cast(Any, self.card))
        self.line = Line(self.engine, cast(Any, self.card), 64)
        self.line.memory = RemoteMemory(0, 1 << 30, 7)
        region = SimpleNamespace(holds=lambda address, length_bytes: True)
        self.memory: Any = SimpleNamespace(regions=[region])

    async def begin(self, length_bytes: int = 100) -> Read:
        return await self.engine.read(self.line, Piece(0, length_bytes, 0), self.memory)


@asynccontextmanager
async def world(*, runs: bool = True) -> AsyncIterator[World]:
    """With `runs`, `ReadEngine.run` is there. At the end nothing may be under way."""
    with trio.fail_after(SECONDS):
        made = World()
        try:
            async with trio.open_nursery() as nursery:
                if runs:
                    nursery.start_soon(made.engine.run)
                yield made
                nursery.cancel_scope.cancel()
            assert made.engine.under_way == made.line.room.taken == 0
        finally:
            made.card.close_all()


async def asleep() -> None:
    """Until all other tasks wait for something."""
    await trio.testing.wait_all_tasks_blocked()


async def test_who_waits_alone_needs_nobody_else() -> None:
    """No task wakes it, then: there is none."""
    async with world(runs=False) as it, trio.open_nursery() as nursery:
        for length_bytes in (100, 3 << 20):
            read = await it.begin(length_bytes)
            nursery.start_soon(read.wait, SECONDS)
            for work_id in list(it.card.posted):
                await asleep()
                assert not read.ended
                it.card.complete(work_id)
            await asleep()
            assert read.ended


async def test_an_end_that_was_seen_on_the_way_is_not_waited_for() -> None:
    async with world(runs=False) as it:
        first, second = await it.begin(), await it.begin()
        for work_id in list(it.card.posted):
            it.card.complete(work_id)
        await first.wait(SECONDS)
        assert second.ended
        await second.wait(SECONDS)
        third = await it.begin()  # that an event is left from before changes nothing
        async with trio.open_nursery() as nursery:
            nursery.start_soon(third.wait, SECONDS)
            await asleep()
            it.card.complete(it.card.posted[0])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_several_are_waited_for_at_once(order: tuple[int, ...]) -> None:
    async with world() as it:
        reads = [await it.begin() for _ in range(3)]
        works = list(it.card.posted)
        async with trio.open_nursery() as nursery:
            for read in reads:
                nursery.start_soon(read.wait, SECONDS)
                await asleep()
            for number in order:
                it.card.complete(works[number])
                await asleep()
                assert reads[number].ended
            assert sum(read.ended for read in reads) == 3
        alone = await it.begin()
        it.card.complete(it.card.posted[0])
        await alone.wait(SECONDS)


async def test_who_looks_for_all_and_is_cancelled_leaves_that_to_another() -> None:
    async with world() as it:
        first, second = await it.begin(), await it.begin()
        works = list(it.card.posted)
        given_back: list[int] = []
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def look() -> None:
                with scope:
                    await first.wait(SECONDS)

            nursery.start_soon(look)
            await asleep()
            nursery.start_soon(second.wait, SECONDS)
            await asleep()
            scope.cancel()
            await asleep()
            first.when_ended(lambda: given_back.append(1))
            it.card.complete(works[1])
            await asleep()
            assert second.ended
        assert not given_back
        it.card.complete(works[0])
        await asleep()
        assert given_back


async def test_a_line_that_ends_without_a_completion_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdma_reads, "DRAIN_SECONDS", 0.0)
    for others in (0, 1):
        async with world() as it:
            it.card.flushes = False
            failures: list[str] = []

            async def wait(read: Read, failures: list[str] = failures) -> None:
                with pytest.raises(ReadFailed) as caught:
                    await read.wait(SECONDS)
                failures.append(caught.value.text)

            async with trio.open_nursery() as nursery:
                for _ in range(1 + others):
                    nursery.start_soon(wait, await it.begin())
                    await asleep()
                await it.engine.retire(it.line)
            assert failures == ["the RDMA connection was closed"] * (1 + others)
            assert it.card.closed


async def test_reads_that_are_flushed_fail() -> None:
    async with world() as it, trio.open_nursery() as nursery:
        read = await it.begin()

        async def wait() -> None:
            with pytest.raises(ReadFailed):
                await read.wait(SECONDS)

        nursery.start_soon(wait)
        await asleep()
        await it.engine.retire(it.line)


async def test_one_that_does_not_end_in_time() -> None:
    async with world() as it:
        read = await it.begin()
        with pytest.raises(DeadlineExceeded, match="did not end"):
            await read.wait(0.01)
        assert it.line.failure is not None
        await it.engine.settle(it.line, [read])


async def test_a_device_that_is_lost_keeps_nobody_waiting() -> None:
    told: list[str] = []
    async with world() as it:
        it.engine.when_lost = lambda: told.append(it.engine.lost)

        async def wait(read: Read) -> None:
            with pytest.raises(ReadFailed, match="fell out"):
                await read.wait(SECONDS)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(wait, await it.begin())
                await asleep()
            it.card.broken = True
            it.card.tell()
    assert told == ["the card fell out"]


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_waits_or_is_cancelled_when_every_end_is_seen(seed: int) -> None:
    rng = random.Random(seed)
    seen: list[str] = []

    async def reader(it: World) -> None:
        read = await it.begin(rng.choice((100, 3 << 20)))
        with trio.move_on_after(rng.choice((0.0, 0.001, SECONDS))):
            try:
                await read.wait(SECONDS)
            finally:
                read.when_ended(lambda: seen.append("end"))

    async def answer(it: World, over: Callable[[], bool]) -> None:
        while not over():
            if it.card.posted and rng.random() < 0.5:
                it.card.complete(rng.choice(it.card.posted))
            await trio.sleep(0 if rng.random() < 0.8 else 0.0005)

    async with world() as it, trio.open_nursery() as nursery:
        nursery.start_soon(answer, it, lambda: len(seen) == 60)
        for _ in range(60):
            nursery.start_soon(reader, it)
            await trio.sleep(rng.choice((0, 0, 0, 0.001)))


GEOMETRY = plan_geometry(1 << 20, 40)


def row(first: int, count: int = SLOTS_TOGETHER) -> bytes:
    """Slots that are told apart by what they begin with."""
    return b"".join((first + each).to_bytes(SLOT_BYTES, "little") for each in range(count))


def test_a_slot_is_read_with_its_neighbours() -> None:
    seen = SeenSlots(GEOMETRY)
    row_bytes = SLOTS_TOGETHER * SLOT_BYTES
    assert seen.extent(0) == seen.extent(15) == (GEOMETRY.slots_offset, row_bytes)
    assert seen.extent(16) == (GEOMETRY.slots_offset + row_bytes, row_bytes)
    assert seen.extent(39) == (GEOMETRY.slots_offset + 2 * row_bytes, 8 * SLOT_BYTES), "the last"


def test_what_was_seen_is_found() -> None:
    seen = SeenSlots(GEOMETRY)
    assert seen.find(5) == b""
    seen.take_in(7, row(0))
    seen.take_in(38, row(32, 8))
    for number in (0, 5, 15, 32, 39):
        assert seen.find(number) == number.to_bytes(SLOT_BYTES, "little")
    assert seen.find(16) == b""
    assert seen.find(40) == b"", "the segment ends before it"
    seen.take_in(0, row(100))
    assert seen.find(5) == (105).to_bytes(SLOT_BYTES, "little"), "the last look counts"


def test_the_oldest_are_forgotten() -> None:
    seen = SeenSlots(plan_geometry(1 << 30))
    for number in range(0, MAX_KEPT * SLOTS_TOGETHER, SLOTS_TOGETHER):
        seen.take_in(number, row(number))
    seen.take_in(0, row(0))  # again
    seen.take_in(MAX_KEPT * SLOTS_TOGETHER, row(0))
    assert seen.find(0) != b""
    assert seen.find(SLOTS_TOGETHER) == b""
    assert seen.find(2 * SLOTS_TOGETHER) != b""
