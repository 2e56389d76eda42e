"""Batches of transfers: in every world, over a store that does what the test says, and over a real cluster."""

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any, cast

import pytest
import trio

from p2pstore import errors
from p2pstore.blocking import BlockingTransfers
from p2pstore.client.transfers import MAX_TRANSFERS, TransferBatch
from p2pstore.errors import NoSuchKey, TransferCancelled
from p2pstore.objects import MIB
from p2pstore.results import ItemResult, OnConflict, PutResult, TransferRequest, TransferStatus
from p2pstore.runtime.blocking_streams import run_blocking
from p2pstore.runtime.streams import Event
from p2pstore.transfer.transfer_trace import Progress
from tests.contract.sides import DRIVERS, Side
from tests.contract.worlds import Cluster, Store
from tests.waiting import eventually

DEADLINE_SECONDS = 20.0


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name == "p2pstore-helper"]


class SlowStore:
    """Each get waits for its gate, and tells its progress when it is through."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._lock = threading.Lock()
        self.gates: dict[str, Event] = {}
        self.running: set[str] = set()
        self.most_running = 0
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def gate(self, *keys: str) -> None:
        """Have gets of these wait until `open`."""
        for key in keys:
            self.gates[key] = self._side.driver.event()

    def open(self, key: str) -> None:
        self.gates[key].set()

    async def get_into(
        self, key: str, buffer: Any, *, wait: float = 0.0, progress: Progress | None = None
    ) -> int:
        with self._lock:
            self.calls.append((key, {"wait": wait}))
            self.running.add(key)
            self.most_running = max(self.most_running, len(self.running))
        try:
            if key in self.gates:
                assert await self.gates[key].wait(DEADLINE_SECONDS)
            else:
                await self._side.driver.sleep(0.001)
            if key.startswith("absent"):
                raise NoSuchKey("nobody has it")
            if key.startswith("bug"):
                raise RuntimeError("a bug")
            for done in range(MIB, len(buffer) + 1, MIB):
                if progress is not None:
                    progress(done, len(buffer))
            buffer[:1] = b"x"
            return len(buffer)
        finally:
            with self._lock:
                self.running.discard(key)

    async def put(
        self,
        key: str,
        value: Any,
        *,
        replicas: int = 1,
        overwrite: bool = False,
        on_conflict: OnConflict | None = None,
        progress: Progress | None = None,
    ) -> PutResult:
        self.calls.append(
            (key, {"replicas": replicas, "overwrite": overwrite, "on_conflict": on_conflict})
        )
        return PutResult(key, "created", replicas, replicas, "here", (1, 1))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            await self._side.driver.sleep(0.001)


@asynccontextmanager
async def batch(store: SlowStore, side: Side, limit: int = 8) -> AsyncIterator[TransferBatch]:
    """The same as `ClientSession.transfers`."""
    async with side.driver.helpers() as start:
        with closing(
            TransferBatch(
                cast(Any, store), side.driver, start, limit, in_threads=side.name == "blocking"
            )
        ) as made:
            yield made
            await made.finish()


def gets(*keys: str, size: int = 10) -> list[TransferRequest]:
    return [TransferRequest(key, bytearray(size)) for key in keys]


def states(made: TransferBatch) -> list[str]:
    return [each.state for each in made.statuses()]


async def test_transfers_run_side_by_side_up_to_the_limit(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        keys = [f"k{number}" for number in range(9)]
        store.gate(*keys)
        async with batch(store, side, limit=3) as made:
            assert made.submit(gets(*keys)) == list(range(9))
            await store.until(lambda: len(store.running) == 3)
            assert states(made) == ["running"] * 3 + ["waiting"] * 6
            store.open("k1")
            result = await made.wait(1)
            assert (result.key, result.value, result.error) == ("k1", 10, None)
            await store.until(lambda: "k3" in store.running)
            for key in ("k0", *keys[2:]):
                store.open(key)
        assert store.most_running == 3
        assert states(made) == ["done"] * 9

    await side.run(scenario)


async def test_gets_and_puts_with_their_options(side: Side) -> None:
    async def scenario() -> list[ItemResult[int | PutResult]]:
        store = SlowStore(side)
        async with batch(store, side) as made:
            made.submit(
                [
                    TransferRequest("put", b"value", "put", replicas=2, on_conflict="error"),
                    TransferRequest("absent", bytearray(3)),
                    TransferRequest("get", bytearray(7), wait=1.5),
                ]
            )
            results = await made.results()
            assert await made.results() == results
        assert sorted(store.calls, key=lambda call: call[0]) == [
            ("absent", {"wait": 0.0}),
            ("get", {"wait": 1.5}),
            ("put", {"replicas": 2, "overwrite": False, "on_conflict": "error"}),
        ]
        assert states(made) == ["done", "failed", "done"]
        assert made.status(1).error is results[1].error
        assert made.status(0).moved_bytes == 5
        return results

    put, absent, got = await side.run(scenario)
    assert isinstance(put.value, PutResult)
    assert put.value.copies == 2
    assert isinstance(absent.error, NoSuchKey)
    assert got.unwrap() == 7


async def test_what_waits_is_cancelled_at_once_and_others_are_not(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        store.gate("first")
        async with batch(store, side, limit=1) as made:
            made.submit(gets("first", "second", "third"))
            await store.until(lambda: "first" in store.running)
            made.cancel(1)
            assert states(made) == ["running", "cancelled", "waiting"]
            result = await made.wait(1)
            assert isinstance(result.error, TransferCancelled)
            store.open("first")
            assert [each.ok for each in await made.results()] == [True, False, True]
            made.cancel()  # of what has ended nothing changes
        assert states(made) == ["done", "cancelled", "done"]
        assert [key for key, _ in store.calls] == ["first", "third"]

    await side.run(scenario)


async def test_one_that_runs_is_cancelled_and_the_next_one_follows(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        store.gate("first")
        requests = gets("first", "second", size=4 * MIB)
        async with batch(store, side, limit=1) as made:
            made.submit(requests)
            await store.until(lambda: "first" in store.running)
            made.cancel(0)
            if side.name == "blocking":  # it hears of it with its next MiB
                assert made.status(0).state == "running"
                store.open("first")
            assert isinstance((await made.wait(0)).error, TransferCancelled)
            assert (await made.wait(1)).unwrap() == 4 * MIB
            assert requests[0].buffer == bytes(4 * MIB)
        assert states(made) == ["cancelled", "done"]

    await side.run(scenario)


async def test_a_cancellation_that_comes_too_late_strikes_no_other(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        store.gate("first")
        async with batch(store, side, limit=1) as made:
            made.submit(gets("first", "second", "third"))
            await store.until(lambda: "first" in store.running)
            store.open("first")
            made.cancel(0)  # its last wait is over, but it has not noticed yet
        assert states(made)[0] in ("done", "cancelled")
        assert states(made)[1:] == ["done", "done"]

    await side.run(scenario)


async def test_what_the_block_raises_cancels_the_rest(side: Side) -> None:
    class Stop(Exception):
        pass

    made: list[TransferBatch] = []

    async def scenario() -> None:
        store = SlowStore(side)
        store.gate("first")
        async with batch(store, side, limit=1) as one:
            made.append(one)
            one.submit(gets("first", "second", "third", size=4 * MIB))
            await store.until(lambda: "first" in store.running)
            store.open("first") if side.name == "blocking" else None
            raise Stop

    with pytest.raises(Stop):
        await side.run(scenario)
    assert states(made[0])[1:] == ["cancelled"] * 2
    assert states(made[0])[0] in ("cancelled", "done")
    with pytest.raises(RuntimeError, match="has ended"):
        made[0].submit(gets("fourth"))


async def test_what_is_no_error_of_the_store_is_not_hidden(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        async with batch(store, side) as made:
            made.submit(gets("bug"))

    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        await side.run(scenario)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert str(error) == "a bug"


@pytest.mark.parametrize("name", ["trio", "asyncio"])
async def test_a_batch_that_is_cancelled_from_outside_leaves_nothing(name: str) -> None:
    side = Side(name, DRIVERS[name]())
    made: list[TransferBatch] = []
    store = SlowStore(side)

    async def scenario() -> None:
        store.gate("first", "second")
        async with batch(store, side, limit=2) as one:
            made.append(one)
            one.submit(gets("first", "second", "third"))

    if name == "trio":
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scenario)
            await store.until(lambda: len(store.running) == 2)
            nursery.cancel_scope.cancel()
    else:

        async def main() -> None:
            task = asyncio.ensure_future(scenario())
            await store.until(lambda: len(store.running) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1

        await side.run(main)
    assert states(made[0]) == ["cancelled"] * 3
    assert not store.running


async def test_who_cannot_be_submitted_is_refused_with_all_others(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        async with batch(store, side) as made:
            good = TransferRequest("k", bytearray(1))
            for bad, kind in (
                (TransferRequest("", bytearray(1)), ValueError),
                (TransferRequest("k", b"read-only"), ValueError),
                (TransferRequest("k", 5), TypeError),
                (TransferRequest("k", bytearray(1), wait=-1.0), ValueError),
                (TransferRequest("k", bytearray(1), wait="1"), TypeError),  # type: ignore[arg-type]  # on purpose
                (TransferRequest("k", bytearray(1), replicas=2), ValueError),
                (TransferRequest("k", bytearray(1), overwrite=True), ValueError),
                (TransferRequest("k", b"v", "put", wait=1.0), ValueError),
                (TransferRequest("k", b"v", "put", replicas="2"), TypeError),  # type: ignore[arg-type]  # on purpose
                (TransferRequest("k", bytearray(1), "move"), ValueError),  # type: ignore[arg-type]  # on purpose
                (("k", bytearray(1)), TypeError),
            ):
                with pytest.raises(kind):
                    made.submit([good, bad])  # type: ignore[list-item]  # on purpose
            with pytest.raises(ValueError, match="may wait"):
                made.submit([good] * (MAX_TRANSFERS + 1))
            assert len(made) == 0
            for number in (0, -1):
                with pytest.raises(IndexError):
                    made.status(number)
                with pytest.raises(IndexError):
                    await made.wait(number)
            for limit in (0, 257, "3"):
                with pytest.raises((ValueError, TypeError)):
                    async with batch(store, side, limit=limit):  # type: ignore[arg-type]  # on purpose
                        pass
        assert store.calls == []

    await side.run(scenario)


async def test_many_waiters_and_late_submissions(side: Side) -> None:
    async def scenario() -> None:
        store = SlowStore(side)
        store.gate("slow")
        ended: list[int | PutResult] = []
        async with batch(store, side, limit=2) as made:
            made.submit(gets("slow"))

            async def wait(_: Any) -> None:
                ended.append((await made.wait(0)).unwrap())

            async with side.driver.helpers() as start:
                for _ in range(3):
                    start(wait)
                made.submit(gets(*(f"k{number}" for number in range(200))))
                await made.wait(200)
                store.open("slow")
                await store.until(lambda: len(ended) == 3)
            assert made.submit(gets("late")) == [201]
        assert set(states(made)) == {"done"}
        assert store.most_running == 2

    await side.run(scenario)


# --- a real cluster --------------------------------------------------------------------------


class PlainFace:
    """A blocking client's batch as coroutines, for scenarios that are written once."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @asynccontextmanager
    async def transfers(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        with self._client.transfers(*args, **options) as plain:
            self._plain = plain
            yield self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._plain, name)
        if name not in ("wait", "results"):
            return method

        async def call(*args: Any) -> Any:
            return method(*args)

        return call


def play(store: Store, scenario: Callable[[Any], Awaitable[None]]) -> None:
    """Run a scenario over a store in its world."""
    if store._loop is None:
        run_blocking(scenario(PlainFace(store.real)))  # type: ignore[arg-type]  # it is a coroutine
    else:
        store._loop.run(scenario, store.real)


def test_values_come_and_go(cluster: Cluster, store: Store) -> None:
    """From here, from the other peer, and to here; small and large."""
    here = {f"{store.world}/here{size}": bytes([size % 251]) * size for size in (0, 1, 70_000)}
    there = {f"{store.world}/there{size}": bytes([size % 241]) * size for size in (5, 3 * MIB)}
    for key, value in here.items():
        store.put(key, value)
    for key, value in there.items():
        cluster.distant.put(key, value)
        eventually(lambda key=key: store.contains(key))  # type: ignore[misc]  # mypy: defaults of a lambda
    wanted = here | there
    buffers = {key: bytearray(len(value)) for key, value in wanted.items()}
    new = f"{store.world}/new"

    async def scenario(client: Any) -> None:
        first = [TransferRequest(key, buffer) for key, buffer in buffers.items()]
        async with client.transfers(first, limit=2) as made:
            (number,) = made.submit([TransferRequest(new, b"fresh", "put")])
            assert (await made.wait(number)).unwrap().status == "created"
            results = await made.results()
            assert [each.key for each in results] == [*wanted, new]
            assert [each.value for each in results[:-1]] == [len(v) for v in wanted.values()]
            assert isinstance(made.status(0), TransferStatus)

    play(store, scenario)
    assert buffers == wanted
    assert store.get(new) == b"fresh"


def test_failures_are_results(store: Store) -> None:
    store.put(f"{store.world}/k", bytes(100))

    async def scenario(client: Any) -> None:
        async with client.transfers() as made:
            made.submit(
                [
                    TransferRequest(f"{store.world}/absent", bytearray(1)),
                    TransferRequest(f"{store.world}/k", bytearray(99)),
                ]
            )
            absent, small = await made.results()
        assert isinstance(absent.error, errors.NoSuchKey)
        assert isinstance(small.error, errors.BufferTooSmall)

    play(store, scenario)


def test_a_get_that_waits_for_its_key_is_polled_and_ends(cluster: Cluster, store: Store) -> None:
    key = f"{store.world}/later"
    buffer = bytearray(4)

    async def scenario(client: Any) -> None:
        async with client.transfers(limit=1) as made:
            made.submit([TransferRequest(key, buffer, wait=20.0)])
            made.submit([TransferRequest(key, bytearray(4))])
            thread = threading.Thread(target=cluster.distant.put, args=(key, b"late"))
            assert made.status(1).state == "waiting"
            thread.start()
            assert (await made.wait(0)).unwrap() == 4
            thread.join()
        assert [each.state for each in made.statuses()] == ["done", "done"]

    play(store, scenario)
    assert buffer == b"late"


def test_a_batch_has_the_same_methods_in_all_worlds() -> None:
    def methods(kind: type) -> dict[str, str]:
        named = {name for name in vars(kind) if not name.startswith("_")} - {"finish", "close"}
        return {name: str(inspect.signature(getattr(kind, name))) for name in named}

    assert methods(BlockingTransfers) == methods(TransferBatch)
    for kind in (BlockingTransfers, TransferBatch):
        assert all(inspect.getdoc(getattr(kind, name)) for name in methods(kind))


def test_a_client_that_is_closed_fails_what_is_left(cluster: Cluster) -> None:
    client = cluster.store("blocking").real
    with client.transfers() as made:
        client.close()
        made.submit([TransferRequest("k", bytearray(1))])
        (result,) = made.results()
        assert isinstance(result.error, errors.StoreClosed)
    with pytest.raises(errors.StoreClosed), client.transfers():
        pass
