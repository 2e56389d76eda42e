"""An SSD tier over a simulated disk, values to store, and a loop that runs only while it is told to."""

import errno
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio
import trio.testing

from p2pstore.objects import MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.disk_protocol import Check, Disk, Waits
from p2pstore.ssd_tier.health import TierState
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES, ColdFacts, round_up_to_page
from p2pstore.ssd_tier.tier import SsdTier, open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy
from simulation.faulty_disk import FaultyDisk

SEGMENT_BYTES = MIB
NAMESPACE = "tests"


def value_of(key: str, clock: int, length: int, *, compressible: bool = False) -> bytes:
    """The value stored under the key with this clock: different for each."""
    rng = Random(f"{key} {clock} {length}")
    if compressible:
        return (rng.randbytes(64) * (length // 64 + 1))[:length]
    return rng.randbytes(length)


def facts_of(
    key: str, clock: int, value: bytes | bytearray, namespace: str = NAMESPACE, **more: Any
) -> ColdFacts:
    sums = chunk_sums(value)
    version = Version(clock, 7, root_checksum(len(value), sums))
    digest = key_digest(key, namespace)
    return ColdFacts(digest, version, len(value), namespace, key, sums, **more)


def aligned(value: bytes) -> memoryview:
    """The value in memory as the tier wants it."""
    memory = aligned_buffer(max(1, round_up_to_page(len(value))))
    memory[: len(value)] = value
    return memory[: len(value)]


def simulated_disk(seed: int = 0, segments: int = 8, *, pause: bool = True) -> FaultyDisk:
    size = LOG_START_BYTES + segments * SEGMENT_BYTES
    return FaultyDisk(seed, size, pause=trio.sleep if pause else None, now=trio.current_time)


class UntilCrash:
    """A disk that can be taken away: what the tier does after that reaches it no more."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.gone = False

    @property
    def size_bytes(self) -> int:
        return self.disk.size_bytes

    async def read_into(
        self, position: int, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        await self._here()
        await self.disk.read_into(position, buffers, check)

    async def write_from(self, position: int, buffers: Sequence[memoryview | bytes]) -> None:
        await self._here()
        await self.disk.write_from(position, buffers)

    async def sync(self) -> None:
        await self._here()
        await self.disk.sync()

    @property
    def waits(self) -> Waits:
        return self.disk.waits

    @property
    def misplaced(self) -> str:
        return self.disk.misplaced

    async def inspect(self) -> None:
        await self.disk.inspect()

    def close(self) -> None:
        raise AssertionError("the tier does not close its disk")

    async def _here(self) -> None:
        if self.gone:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EIO, "the machine has crashed")


@dataclass
class Harness:
    """A tier, and what it told the peer."""

    tier: SsdTier
    withdrawn: list[ColdEntry] = field(default_factory=list)
    states: list[TierState] = field(default_factory=list)
    last_copies: set[bytes] = field(default_factory=set)

    async def store(
        self, key: str, clock: int, value: bytes, durable: bool = False, **more: Any
    ) -> bool:
        return await self.tier.store(facts_of(key, clock, value, **more), aligned(value), durable)

    async def load(self, key: str) -> tuple[ColdFacts, bytes]:
        memory: list[memoryview] = []

        def prepare(facts: ColdFacts) -> memoryview:
            memory.append(aligned_buffer(max(1, round_up_to_page(facts.length))))
            return memory[0][: round_up_to_page(facts.length)]

        facts = await self.tier.load(key_digest(key, NAMESPACE), prepare)
        return facts, bytes(memory[0][: facts.length])

    def discard(self, key: str, clock: int) -> bool:
        return self.tier.discard(key_digest(key, NAMESPACE), Version(clock, 0xFFFF))

    def holds(self, key: str) -> bool:
        return self.tier.find(key_digest(key, NAMESPACE)) is not None

    def keys(self) -> dict[str, int]:
        """Clocks by key."""
        entries, more = self.tier.entries(NAMESPACE, limit=100_000)
        assert not more
        return {entry.key: entry.version.clock for entry in entries}


@asynccontextmanager
async def running(
    disk: Disk, policy: AdmissionPolicy | None = None, **settings: Any
) -> AsyncIterator[Harness]:
    harness: list[Harness] = []
    settings.setdefault("segment_bytes", SEGMENT_BYTES)
    settings.setdefault("max_records", 4096)
    told = {"unix": settings.pop("now")} if "now" in settings else {}
    if "shares" in settings:
        told["shares"] = settings.pop("shares")
    async with open_tier(
        disk,
        policy or AdmissionPolicy(),
        TierHooks(
            withdraw=lambda entries: harness[0].withdrawn.extend(entries) if harness else None,
            state_changed=lambda health: harness[0].states.append(health.state) if harness else None,
            is_last_copy=lambda digest: bool(harness) and digest in harness[0].last_copies,
            **told,
        ),
        **settings,
    ) as tier:
        harness.append(Harness(tier))
        yield harness[0]


class Lockstep:
    """A trio loop in a thread of its own that stands still between two calls: what a test does is the only time
    that passes. Its clock jumps ahead when everything waits for it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Awaitable[Any]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """The result or error of the function, run in the loop."""
        self._calls.put(function)
        answer, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        return answer

    def start(self, function: Callable[..., Awaitable[Any]]) -> Any:
        """Start a task that outlives the call; what it hands to `task_status.started`."""

        async def begin() -> Any:
            return await self._nursery.start(function)

        return self.call(begin)

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        trio.run(self._main, clock=trio.testing.MockClock(autojump_threshold=0))

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            while (function := self._calls.get(timeout=60)) is not None:
                try:
                    self._answers.put((await function(), None))
                except Exception as error:
                    self._answers.put((None, error))
            self._nursery.cancel_scope.cancel()
