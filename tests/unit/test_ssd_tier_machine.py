"""The SSD tier against a dict: random stores, loads, discards and waits, with crashes and failures in between.

Exact bytes or a miss; never an older version than the newest; discarded objects stay away once that is durable; what
was stored durably survives; and what a start would find on the disk is what the tier says it has.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from p2pstore.errors import ConfigError
from p2pstore.objects import key_digest
from p2pstore.ssd_tier.health import ColdMiss, Miss, TierOff, TierState
from simulation.faulty_disk import DiskFaults
from tests.unit.cold_harness import (
    NAMESPACE,
    Harness,
    Lockstep,
    UntilCrash,
    running,
    simulated_disk,
    value_of,
)

NAMES = [f"key {number}" for number in range(24)]
KEYS = st.sampled_from(NAMES)
LENGTHS = st.sampled_from([0, 1, 4096, 20_000, 100_000, 300_000])
TASKS = 6


@dataclass
class Known:
    """The promises for one key."""

    newest: int | None = None
    """The version that is found, if any is."""
    withdrawn: bool = True
    """Whether it may be missing."""
    discarded: int = 0
    discarded_durably: int = 0
    durable: int | None = None
    """A version that survives a crash, unless it is withdrawn or discarded."""


@dataclass(frozen=True)
class Store:
    key: str
    length: int
    durable: bool
    compressible: bool


@dataclass(frozen=True)
class Discard:
    key: str
    durably: bool


OPERATIONS = st.lists(
    st.one_of(
        st.builds(Store, KEYS, LENGTHS, st.booleans(), st.booleans()),
        st.builds(Discard, KEYS, st.booleans()),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: (type(each), each.key),
)


class TierAgainstDict(RuleBasedStateMachine):
    faulty = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = Lockstep()
        self.known: dict[str, Known] = {}
        self.values: dict[tuple[str, int], bytes] = {}
        self.clock = 0
        self.harness: Harness | None = None

    @initialize(seed=st.integers(0, 2**32), segments=st.integers(4, 8))
    def create(self, seed: int, segments: int) -> None:
        self.disk = simulated_disk(seed, segments)
        self.open()

    def teardown(self) -> None:
        self.disk.faults = DiskFaults()
        self.close()
        self.loop.end()

    # Running it.

    def open(self) -> None:
        self.until = UntilCrash(self.disk)
        self.ending = trio.Event()
        self.ended = trio.Event()
        self.disk.faults.latency_seconds = 0.001

        async def serve(task_status: trio.TaskStatus[Harness | None]) -> None:
            try:
                async with running(self.until) as harness:
                    task_status.started(harness)
                    await self.ending.wait()
            except (OSError, ConfigError):
                if not self.faulty:
                    raise
                task_status.started(None)
            finally:
                self.ended.set()

        self.harness = self.loop.start(serve)

    def close(self) -> None:
        async def end() -> None:
            self.ending.set()
            await self.ended.wait()

        self.loop.call(end)
        self.take_withdrawn()

    def take_withdrawn(self) -> None:
        if self.harness is None:
            return
        for entry in self.harness.withdrawn:
            known = self.of(entry.key)
            if known.newest is None or entry.version.clock >= known.newest:
                known.withdrawn = True
            if known.durable is not None and entry.version.clock >= known.durable:
                known.durable = None
        self.harness.withdrawn.clear()

    def of(self, key: str) -> Known:
        return self.known.setdefault(key, Known())

    # The steps.

    async def carry_out(self, operations: list[Store | Discard]) -> None:
        async with trio.open_nursery() as nursery:
            for each in operations:
                if isinstance(each, Store):
                    self.clock += 1
                    nursery.start_soon(self.store, each, self.clock)
            await trio.sleep(0.0005)
            for each in operations:
                if isinstance(each, Discard):
                    clock = self.discard(each.key)
                    if each.durably:
                        nursery.start_soon(self.wait_until_durable, {each.key: clock})

    async def store(self, store: Store, clock: int) -> None:
        value = value_of(store.key, clock, store.length, compressible=store.compressible)
        self.values[store.key, clock] = value
        assert self.harness is not None
        stored = await self.harness.store(store.key, clock, value, store.durable)
        self.take_withdrawn()
        known = self.of(store.key)
        if stored and clock > known.discarded:
            if known.newest is None or clock > known.newest:
                known.newest = clock
                known.withdrawn = False
            if store.durable and not self.until.gone:
                known.durable = max(clock, known.durable or 0)

    def discard(self, key: str) -> int:
        assert self.harness is not None
        self.harness.discard(key, self.clock)
        known = self.of(key)
        known.discarded = self.clock
        known.newest, known.durable, known.withdrawn = None, None, True
        return self.clock

    async def wait_until_durable(self, discarded: dict[str, int]) -> None:
        assert self.harness is not None
        try:
            await self.harness.tier.discards_durable()
        except TierOff:
            return
        for key, clock in discarded.items():
            known = self.of(key)
            known.discarded_durably = max(known.discarded_durably, clock)

    def discarded(self) -> dict[str, int]:
        return {key: known.discarded for key, known in self.known.items()}

    @rule(operations=OPERATIONS)
    def several(self, operations: list[Store | Discard]) -> None:
        if self.harness is not None:
            self.loop.call(lambda: self.carry_out(operations))

    @rule(seed=st.integers(0, 2**32), count=st.integers(20, 80))
    def many(self, seed: int, count: int) -> None:
        if self.harness is not None:
            self.loop.call(partial(self.carry_out_many, Random(seed), count))

    async def carry_out_many(self, random: Random, count: int) -> None:
        """Several tasks, each doing one thing after the other: enough to fill the disk."""
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                if self.until.gone:
                    return
                key, choice = random.choice(NAMES), random.random()
                if choice < 0.6:
                    self.clock += 1
                    length = random.choice([0, 5000, 60_000, 200_000, 200_000, 300_000])
                    durable, compressible = random.random() < 0.2, random.random() < 0.2
                    await self.store(Store(key, length, durable, compressible), self.clock)
                elif choice < 0.9:
                    await self.load_amid(key)
                else:
                    clock = self.discard(key)
                    if choice < 0.95:
                        await self.wait_until_durable({key: clock})

        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(work)

    async def load_amid(self, key: str) -> None:
        """While it may change."""
        assert self.harness is not None
        discarded, newest = self.of(key).discarded, self.of(key).newest
        try:
            facts, value = await self.harness.load(key)
        except ColdMiss:
            return
        clock = facts.version.clock
        assert value == self.values[key, clock]
        assert clock > discarded
        assert clock >= (newest or 0)

    @rule()
    def make_discards_durable(self) -> None:
        if self.harness is None:
            return
        self.loop.call(partial(self.wait_until_durable, self.discarded()))

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.1]))
    def wait(self, seconds: float) -> None:
        discarded = self.discarded()
        self.loop.call(partial(trio.sleep, seconds))
        if seconds >= 1 and self.harness is not None:
            segments = self.harness.tier._log.table.segments
            assert not any(segment.writes or segment.reads for segment in segments)
        if seconds >= 1 and not self.faulty:
            for key, clock in discarded.items():
                self.of(key).discarded_durably = clock

    @rule()
    def load(self) -> None:
        for key in NAMES:
            self.check(key)

    @rule()
    def restart(self) -> None:
        """Everything is as it was."""
        self.close()
        if not self.faulty:
            for known in self.known.values():
                known.discarded_durably = known.discarded
        self.reopen(lost=self.faulty)

    @rule(operations=OPERATIONS, seconds=st.floats(0, 0.01))
    def crash(self, operations: list[Store | Discard], seconds: float) -> None:
        self.crash_amid(lambda: self.carry_out(operations), seconds)

    @rule(seed=st.integers(0, 2**32), seconds=st.floats(0, 0.1))
    def crash_amid_many(self, seed: int, seconds: float) -> None:
        self.crash_amid(lambda: self.carry_out_many(Random(seed), 1000), seconds)

    def crash_amid(self, doing: Callable[[], Awaitable[None]], seconds: float) -> None:
        """The machine loses its power in the middle of something."""

        async def begin_and_crash() -> None:
            async with trio.open_nursery() as nursery:
                if self.harness is not None:
                    nursery.start_soon(doing)
                await trio.sleep(seconds)
                self.until.gone = True
                self.disk.crash()

        self.loop.call(begin_and_crash)
        self.close()
        self.reopen(lost=True)

    def reopen(self, lost: bool) -> None:
        faults, self.disk.faults = self.disk.faults, DiskFaults()
        self.open()
        self.disk.faults = faults
        if self.harness is None:  # its first page is damaged for good
            self.disk = simulated_disk(self.clock, 6)
            self.known = {}
            self.open()
        for key in NAMES:
            self.look_after_start(key, lost)

    def look_after_start(self, key: str, lost: bool) -> None:
        assert self.harness is not None
        self.take_withdrawn()  # by its background, while others were looked at
        known = self.of(key)
        entry = self.harness.tier.find(key_digest(key, NAMESPACE))
        found = None if entry is None else entry.version.clock
        if not lost:
            assert found == known.newest or (found is None and known.withdrawn)
        if found is not None:
            assert (key, found) in self.values
            assert found > known.discarded_durably, "it was discarded"
            assert found >= (known.durable or 0), "a newer one was durable"
        elif not self.faulty:
            assert known.durable is None, "it was stored durably"
        known.newest, known.withdrawn = found, found is None
        known.discarded = known.discarded_durably
        if self.faulty:
            known.durable = None
        else:
            self.check(key)

    def check(self, key: str) -> None:
        if self.harness is None:
            return
        known = self.of(key)
        try:
            facts, value = self.loop.call(lambda: self.harness.load(key))  # type: ignore[union-attr]
        except ColdMiss as miss:
            reason = miss.reason
            self.take_withdrawn()
            off = self.harness.tier.state is TierState.OFF
            silent = reason is Miss.SILENT
            assert known.newest is None or known.withdrawn or off or silent
            assert self.faulty or reason is Miss.ABSENT
            return
        assert facts.version.clock == known.newest
        assert value == self.values[key, facts.version.clock]

    # Invariants.

    @invariant()
    def nothing_is_left_over(self) -> None:
        if self.harness is None:
            return
        self.take_withdrawn()
        log = self.harness.tier._log
        entries = [
            entry
            for key in NAMES
            if (entry := self.harness.tier.find(key_digest(key, NAMESPACE))) is not None
        ]
        for entry in entries:
            assert entry.version.clock == self.of(entry.key).newest
        if log.health.state is not TierState.OFF:
            assert log.index.rows.live_bytes == sum(entry.disk_bytes for entry in entries)
        assert self.harness.tier.statistics()["queued_bytes"] == 0
        for segment in log.table.segments:
            assert log.index.segment_live_bytes(segment.number) <= log.table.usable_bytes

    @rule()
    def a_start_would_find_the_same(self) -> None:
        if self.faulty or self.harness is None:
            return
        self.wait(1.1)
        self.take_withdrawn()
        expected = self.harness.keys()
        copy = simulated_disk(0, (self.disk.size_bytes >> 20) - 1)
        copy.poke(0, self.disk.peek(0, self.disk.size_bytes))
        found: dict[str, int] = {}

        async def look() -> None:
            async with running(copy) as harness:
                found.update(harness.keys())

        self.loop.call(look)
        assert found == expected


class FaultyTierAgainstDict(TierAgainstDict):
    faulty = True

    @rule(
        chances=st.dictionaries(
            st.sampled_from(
                [
                    *("read_error", "short_read", "rot", "misdirected_read"),
                    *("write_error", "sync_error", "hang"),
                ]
            ),
            st.sampled_from([0.02, 0.3]),
            max_size=2,
        )
    )
    def fail(self, chances: dict[str, float]) -> None:
        self.disk.faults = DiskFaults(latency_seconds=0.001, hang_seconds=12.0, **chances)


class LyingDiskAgainstDict(FaultyTierAgainstDict):
    """Writes that are lost or misdirected without an error: then only the bytes can be relied on."""

    @rule(lost=st.sampled_from([0.0, 0.1]), misdirected=st.sampled_from([0.0, 0.1]))
    def lie(self, lost: float, misdirected: float) -> None:
        self.disk.faults.lost_write, self.disk.faults.misdirected_write = lost, misdirected

    def look_after_start(self, key: str, lost: bool) -> None:
        assert self.harness is not None
        entry = self.harness.tier.find(key_digest(key, NAMESPACE))
        known = self.known[key] = Known()
        known.newest = None if entry is None else entry.version.clock
        known.withdrawn = entry is None


def _settings(examples: int) -> Any:
    """Ten times as many in long runs: P2PSTORE_LONG_TESTS=1."""
    return settings(
        max_examples=examples * (10 if os.environ.get("P2PSTORE_LONG_TESTS") else 1),
        stateful_step_count=25,
        deadline=None,
        phases=[phase for phase in Phase if phase is not Phase.shrink],  # that takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


TestTierAgainstDict = TierAgainstDict.TestCase
TestTierAgainstDict.settings = _settings(20)
TestFaultyTierAgainstDict = FaultyTierAgainstDict.TestCase
TestFaultyTierAgainstDict.settings = _settings(20)
TestLyingDiskAgainstDict = LyingDiskAgainstDict.TestCase
TestLyingDiskAgainstDict.settings = _settings(10)
