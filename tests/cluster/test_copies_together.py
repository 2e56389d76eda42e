"""Batches of puts whose copies other peers pull together, with real peers."""

import itertools
import random
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore.client.puts import WINDOW_SHARE, windows
from p2pstore.core.copies.copy_destination import ReservedCopy, TakeCopiesOperation
from p2pstore.core.copies.proofs import MAX_LEAVES
from p2pstore.errors import ProtocolMismatch, StoreClosed
from p2pstore.gossip.records import PeerId
from p2pstore.objects import KIB, MIB
from p2pstore.peer import Peer
from p2pstore.peer.for_peers import data_requests
from p2pstore.runtime import trio_tasks
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.reading.segment_reader import SegmentReader, Spots
from p2pstore.transfer.reading.shm_transport import copy_spots
from simulation.segment_checks import check_segment
from tests.cluster.machines import new_machine
from tests.cluster.test_hung_ssd import peer
from tests.waiting import SECONDS, eventually, until

MEMORY_BYTES = 64 * MIB
LENGTHS = {
    "small": [1, 100, 4 * KIB, 5_000, 0, 16 * KIB] * 30,
    "medium": [64 * KIB, 64 * KIB + 1, 300 * KIB, 0, 7] * 5,
    "large": [MIB, MIB + 1, 3 * MIB, 5, 2 * MIB],
}


@asynccontextmanager
async def cluster(folder: Path, count: int, **settings: object) -> AsyncIterator[list[Peer]]:
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for number in range(count):
            opened = peer(folder, f"p{number}", *peers[:1], **{"memory": MEMORY_BYTES, **settings})
            peers.append(await stack.enter_async_context(opened))
        await until(lambda: all(len(each.node.core.live_peers()) == count - 1 for each in peers))
        yield peers


def values(lengths: Sequence[int]) -> list[tuple[str, bytes]]:
    return [(f"k{n}", random.Random(n).randbytes(length)) for n, length in enumerate(lengths)]


def held(peer: Peer) -> dict[str, bytes]:
    segment = peer.node.core.segment
    return {entry.key: bytes(segment.payload(entry)) for entry in segment.entries()}


def reserved_bytes(peer: Peer) -> int:
    segment = peer.node.core.segment
    return segment.used_bytes - sum(entry.extent_bytes for entry in segment.entries())


def is_idle(peer: Peer) -> bool:
    """Whether nothing is held, reserved or under way."""
    held = any(entry.references for entry in peer.node.core.segment.entries())
    return not (peer.node.core.operations_under_way or reserved_bytes(peer) or held)


async def check_idle(peers: Sequence[Peer]) -> None:
    """The end of a put, or of a read, is told to the peer behind its answer, and to the others after that."""
    await until(lambda: all(is_idle(each) for each in peers))
    for each in peers:
        check_segment(each.node.core.segment)


def signatures(peer: Peer) -> int:
    return peer.node.core.counters["version_signatures"]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("sizes", LENGTHS)
@pytest.mark.parametrize("replicas", [2, 3])
async def test_all_copies_are_made(sizes: str, replicas: int, transport: str, tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, transport=transport) as peers:
        items = values(LENGTHS[sizes])
        results = await peers[0].put_many(items, replicas=replicas)
        assert [result.unwrap().copies for result in results] == [replicas] * len(items)
        found = [held(each) for each in peers]
        assert found[0] == dict(items)
        for key, value in items:
            copies = [each[key] for each in found if key in each]
            assert copies == [value] * replicas
        lengths = [len(value) for _, value in items]
        cuts = windows(lengths, MEMORY_BYTES // WINDOW_SHARE, is_copied=True)
        trees = sum(-(-len(cut) // MAX_LEAVES) for cut in cuts)
        assert 0 < signatures(peers[0]) <= 2 * trees * (replicas - 1)
        await until(
            lambda: all(len(each.locate_nowait(key)) == replicas for each in peers for key, _ in items)
        )
        await check_idle(peers)
        for each in peers:  # also once the writer has gone over to others
            got = await each.get_many([key for key, _ in items])
            assert [result.unwrap() for result in got] == [value for _, value in items]


@pytest.mark.parametrize("lengths", [[33 * MIB], [MIB + 1, 20 * MIB, 4 * KIB]])
async def test_threads_copy_what_is_large_and_where_there_are_many_cores(
    lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def counted(driver: Driver, reader: SegmentReader, spots: Spots, rooms: Sequence[memoryview]) -> Any:
        used.extend(spots.lengths)
        return copy_spots(driver, reader, spots, rooms)

    monkeypatch.setattr(data_requests, "copy_spots", counted)
    monkeypatch.setattr(data_requests, "threads_for", lambda length: 4 if len(lengths) > 1 else 1)
    async with cluster(tmp_path, 2, memory="256MiB") as peers:
        turns = itertools.count()
        with trio.fail_after(SECONDS):
            for length in lengths:
                while length not in used:  # one by one where a peer is busy, as a batch of one
                    turn = next(turns)
                    items = [(f"{turn}", random.Random(turn).randbytes(length)), (f"{turn} small", b"1")]
                    results = await peers[0].put_many(items, replicas=2)
                    assert [result.unwrap().copies for result in results] == [2, 2]
                    there = held(peers[1])
                    assert all(there[key] == value for key, value in items)
        await check_idle(peers)


async def test_full_memory_makes_room_for_copies(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2, memory="8MiB") as peers:
        for turn in range(6):
            items = [(f"{turn}-{key}", value) for key, value in values([100 * KIB] * 40)]
            results = await peers[0].put_many(items, replicas=2)
            assert [result.unwrap().copies for result in results] == [2] * len(items)
            there = held(peers[1])
            assert all(there[key] == value for key, value in items)
        await check_idle(peers)


async def test_peers_of_the_version_before_copy_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's record says that it understands, and its connections that it does not."""
    refused = 0

    async with cluster(tmp_path, 2) as peers:
        serve = peers[1].node.core.serve

        def older(sender: bytes, kind: int, request: object, now: float) -> object:
            nonlocal refused
            if kind == DataKind.REPLICATE_MANY:
                refused += 1
                raise ProtocolMismatch("no such kind")
            return serve(sender, kind, request, now)  # type: ignore[arg-type]  # passed on

        monkeypatch.setattr(peers[1].node.core, "serve", older)
        items = values(LENGTHS["small"][:12])  # each is asked for alone, and all at the same time
        results = await peers[0].put_many(items, replicas=2)
        assert [result.unwrap().copies for result in results] == [2] * len(items)
        assert refused
        assert held(peers[1]) == dict(items)
        await check_idle(peers)


async def test_a_client_that_gives_up_leaves_nothing_held(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2) as peers:
        items = values(LENGTHS["medium"])
        with trio.move_on_after(0.01):
            await peers[0].put_many(items, replicas=2)
        await check_idle(peers)


class CutOff:
    """Ends each task of a peer that takes copies at one step, as the end of its connection would."""

    def __init__(self, taker: Peer, step: str) -> None:
        self.operations: list[TakeCopiesOperation] = []
        self._step = step
        self._taking = taker.node.requests.copies
        self._take, self._pull = self._taking.take, self._taking._pull
        self._scope = trio.CancelScope()
        if step == "waiting":
            self._taking._limiter = trio.CapacityLimiter(1)
            self._taking._limiter.acquire_on_behalf_of_nowait(self)

    async def take(self, operation: TakeCopiesOperation) -> None:
        self.operations.append(operation)
        copies, self._scope = operation.copies, trio.CancelScope()
        reserve, publish = copies.reserve, copies.publish

        def reserve_less(now: float) -> Steps[None]:
            steps = reserve(now)
            next(steps)
            self._scope.cancel()
            yield
            yield from steps

        def publish_last(brought: Collection[int], now: float) -> None:
            publish(brought, now)
            self._scope.cancel()

        with self._scope:
            if self._step == "waiting":
                self._scope.cancel()
            if self._step == "reserving":
                copies.reserve = reserve_less  # type: ignore[method-assign]
            if self._step == "published":
                copies.publish = publish_last  # type: ignore[method-assign]
            await self._take(operation)
        assert self._scope.cancelled_caught is (self._step != "published")

    async def pull(self, holder: PeerId, rooms: Sequence[ReservedCopy]) -> dict[int, str]:
        if self._step == "copying":
            self._scope.cancel()
        return await self._pull(holder, rooms)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("step", ["waiting", "reserving", "copying", "published"])
async def test_a_request_that_ends_at_any_step_leaves_nothing(
    step: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 2, memory="128MiB") as peers:
        if transport == "tcp":
            peers[1].node.shm = None
        cut = CutOff(peers[1], step)
        monkeypatch.setattr(peers[1].node.requests.copies, "take", cut.take)
        monkeypatch.setattr(peers[1].node.requests.copies, "_pull", cut.pull)
        for name in ("FIRST_TURN_SECONDS", "TURN_SECONDS"):  # each step is a turn
            monkeypatch.setattr(trio_tasks, name, -1.0)
        items = values(LENGTHS["large"])
        results = await peers[0].put_many(items, replicas=2)
        is_whole = step == "published"
        assert [result.unwrap().copies for result in results] == [1 + is_whole] * len(items)
        assert cut.operations
        assert held(peers[1]) == (dict(items) if is_whole else {})
        await check_idle(peers)


def test_a_writer_killed_in_the_middle_leaves_no_room_taken() -> None:
    """The target is stopped first: it finds the request, and the end of its connection."""
    with new_machine() as machine, ThreadPoolExecutor(1) as thread:
        memory = ("--network", "local", "--memory", "128MiB")
        target = machine.join("first", *memory)
        dying = machine.join("second", *memory, "--bootstrap", target.ready["control"])
        eventually(lambda: target.alive() == dying.alive() == 2)
        items = values([MIB] * 40)
        target.process.send_signal(signal.SIGSTOP)
        putting = thread.submit(dying.client.put_many, items, replicas=2)
        eventually(lambda: dying.client.contains("k0"))
        dying.stop(signal.SIGKILL)
        target.process.send_signal(signal.SIGCONT)
        with pytest.raises(StoreClosed):
            putting.result(60.0)
        found = target.client.get_many([key for key, _ in items])
        came = [(result.key, result.unwrap()) for result in found if result.error is None]
        assert set(came) <= set(items)
        whole = bytes(100 * MIB)
        target.client.put("whole", whole)
        assert target.client.get("whole") == whole


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_target_killed_in_the_middle_costs_no_put(replicas: int) -> None:
    """It is stopped first, so that all copies that it is asked for are under way when it is killed."""
    with new_machine() as machine, ThreadPoolExecutor(1) as thread:
        memory = ("--network", "local", "--memory", "128MiB")
        first = machine.join("first", *memory)
        contact = ("--bootstrap", first.ready["control"])
        dying, left = (machine.join(name, *memory, *contact) for name in ("second", "third"))
        eventually(lambda: all(each.alive() == 3 for each in (first, dying, left)))

        def batch(turn: int) -> list[tuple[str, bytes]]:
            return [(f"{turn}-{key}", value) for key, value in values([100 * KIB] * 48)]

        def copies(turn: int) -> list[int]:
            results = first.client.put_many(batch(turn), replicas=replicas)
            return [result.unwrap().copies for result in results]

        assert copies(0) == [replicas] * 48
        dying.process.send_signal(signal.SIGSTOP)
        putting = thread.submit(copies, 1)
        eventually(lambda: left.client.contains("1-k47"))
        assert not putting.done()
        dying.stop(signal.SIGKILL)
        assert putting.result(60.0) == [2] * 48
        assert copies(2) == [2] * 48
        for turn in range(3):
            for key, value in batch(turn):
                assert left.client.get(key) == value
                assert {found.peer for found in left.client.locate(key)} >= {"first"}
        eventually(lambda: first.client.statistics()["peer"]["leased_bytes"] == 0)
