"""The SSD tier over a simulated disk: stored, loaded, discarded, reopened."""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import pytest
import trio

from p2pstore.errors import ConfigError
from p2pstore.objects import KIB, MIB, Version, key_digest, namespace_digest
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.health import ColdMiss, Miss, TierOff, TierState
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES, PAGE_BYTES, ColdFacts, record_position
from p2pstore.ssd_tier.log_segments import SegmentState
from p2pstore.ssd_tier.upkeep import Keeper
from p2pstore.ssd_tier.write_admission import AdmissionPolicy, WriteRefusal
from simulation.faulty_disk import FaultyDisk
from tests.present import present
from tests.unit.cold_harness import (
    NAMESPACE,
    SEGMENT_BYTES,
    Harness,
    UntilCrash,
    aligned,
    facts_of,
    running,
    simulated_disk,
    value_of,
)

VALUE = value_of("a", 1, 100_000)


async def missing(harness: Harness, key: str) -> Miss:
    with pytest.raises(ColdMiss) as caught:
        await harness.load(key)
    return caught.value.reason


@pytest.mark.parametrize("length", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 300_000, 900 * KIB])
async def test_what_was_stored_is_loaded(length: int, autojump_clock: object) -> None:
    value = value_of("a", 5, length)
    async with running(simulated_disk()) as harness:
        more: dict[str, Any] = {
            "expires_unix_ms": 2**45,
            "replicas": 3,
            "pin": 1,
            "dtype": "bfloat16",
            "shape": (2, 3),
        }
        assert await harness.store("a", 5, value, **more)
        facts, loaded = await harness.load("a")
        assert loaded == value
        assert facts == facts_of("a", 5, value, **more)
        assert await missing(harness, "b") is Miss.ABSENT


@pytest.mark.parametrize("length", [3000, 5000, 200_000, 900_000])
async def test_what_compresses_is_compressed(length: int, autojump_clock: object) -> None:
    value = value_of("a", 5, length, compressible=True)
    async with running(simulated_disk()) as harness:
        assert await harness.store("a", 5, value)
        facts, loaded = await harness.load("a")
        assert loaded == value
        assert facts == facts_of("a", 5, value)
        statistics = harness.tier.statistics()
        assert statistics["compressed_parts"] == (length > PAGE_BYTES)
        assert statistics["live_bytes"] < PAGE_BYTES * 3 + length // 10
    async with running(simulated_disk(), AdmissionPolicy(compress=False)) as harness:
        assert await harness.store("a", 5, value[:200_000])
        assert harness.tier.statistics()["compressed_parts"] == 0


@pytest.mark.parametrize("compressible", [False, True])
async def test_long_values_are_worked_on_in_threads(compressible: bool, autojump_clock: object) -> None:
    value = value_of("a", 5, 3 * MIB + 5, compressible=compressible)
    disk = FaultyDisk(0, 33 * MIB, pause=trio.sleep)
    async with running(disk, segment_bytes=4 * MIB) as harness:
        assert await harness.store("a", 5, value)
        assert (await harness.load("a"))[1] == value
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        disk.damage(record_position(entry.places[0], 4 * MIB) + 2 * PAGE_BYTES)
        assert await missing(harness, "a") is Miss.DAMAGED


async def test_damaged_compressed_bytes_are_a_miss(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, value_of("a", 1, 200_000, compressible=True))
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        disk.damage(record_position(entry.places[0], SEGMENT_BYTES) + PAGE_BYTES + 20)
        assert await missing(harness, "a") is Miss.DAMAGED


async def test_it_is_there_after_a_crash(autojump_clock: object) -> None:
    disk = simulated_disk()
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert (await harness.load("a"))[1] == VALUE
        assert harness.keys() == {"a": 1}


async def test_what_was_discarded_stays_away_after_a_crash(autojump_clock: object) -> None:
    disk = simulated_disk()
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        assert await harness.store("b", 1, VALUE, durable=True)
        assert harness.discard("a", 1)
        assert await missing(harness, "a") is Miss.ABSENT
        assert not harness.discard("b", 0), "it is newer"
        await harness.tier.discards_durable()
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert harness.keys() == {"b": 1}


async def test_discards_are_durable_within_a_second_unasked(autojump_clock: object) -> None:
    disk = simulated_disk()
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        assert harness.discard("a", 1)
        await trio.sleep(1.0)
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert harness.keys() == {}


async def test_the_newer_version_wins_and_the_older_never_returns(autojump_clock: object) -> None:
    disk = simulated_disk()
    newer = value_of("a", 2, 50_000)
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE)
        assert await harness.store("a", 2, newer, durable=True)
        assert not await harness.store("a", 1, VALUE)
        assert harness.tier.statistics()["refused"] == {"outdated": 1}
        assert (await harness.load("a"))[1] == newer
        assert harness.discard("a", 2)
        await harness.tier.discards_durable()
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert harness.keys() == {}


async def test_an_older_store_never_follows_a_newer_one(autojump_clock: object) -> None:
    """Not even when the newer one went again before the older one was written."""
    disk = simulated_disk()
    original, go_on = disk.write_from, trio.Event()

    async def slow_write(position: int, buffers: Any) -> None:
        await original(position, buffers)
        if sum(map(len, buffers)) > 200_000:
            await go_on.wait()

    async with running(disk) as harness:
        disk.write_from = slow_write  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.store, "a", 1, value_of("a", 1, 200_000))
            await trio.sleep(1)
            assert await harness.store("a", 2, VALUE)
            entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
            disk.damage(record_position(entry.places[0], SEGMENT_BYTES))
            assert await missing(harness, "a") is Miss.DAMAGED
            go_on.set()
        assert harness.keys() == {}


async def test_what_supersedes_is_durable_before_what_it_superseded_is_dead(
    autojump_clock: object,
) -> None:
    """A crash in between must leave one of them."""
    for seed in range(20):
        disk = simulated_disk(seed)
        until = UntilCrash(disk)
        original = disk.write_from
        async with running(until) as harness:
            assert await harness.store("a", 1, VALUE, durable=True)
            await trio.sleep(3)

            async def write_and_crash(
                position: int,
                buffers: Any,
                original: Any = original,
                until: UntilCrash = until,
                disk: FaultyDisk = disk,
            ) -> None:
                await original(position, buffers)
                if len(buffers) == 1:  # dead marks
                    until.gone = True
                    disk.crash()

            assert await harness.store("a", 2, value_of("a", 2, 5000))
            disk.write_from = write_and_crash  # type: ignore[method-assign]
            await trio.sleep(3)
            assert until.gone
        disk.write_from = original  # type: ignore[method-assign]
        async with running(disk) as harness:
            assert harness.keys().keys() == {"a"}


async def test_the_same_version_is_written_once(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        assert await harness.store("a", 1, VALUE)
        assert harness.tier.statistics()["stored_objects"] == 1


async def test_digests_of_all_and_of_a_namespace(autojump_clock: object) -> None:
    async with running(simulated_disk()) as harness:
        for key in "123":
            assert await harness.store(key, 1, VALUE)
        everything = {key_digest(key, NAMESPACE) for key in "123"}
        going = harness.tier.digests(namespace_digest(NAMESPACE))
        assert harness.discard("2", 1)
        assert set(chain.from_iterable(going)) == everything, "as it was when it was asked for"
        left = chain.from_iterable(harness.tier.digests(None))
        assert set(left) == everything - {key_digest("2", NAMESPACE)}
        assert not any(harness.tier.digests(namespace_digest("other")))


async def test_what_is_discarded_while_it_is_stored_never_comes_back(autojump_clock: object) -> None:
    """Its record reaches the disk, whole, after the discard was durable; then the machine crashes."""
    disk = simulated_disk()
    until = UntilCrash(disk)
    writing, written = trio.Event(), trio.Event()
    original = disk.write_from

    async def slow_write(position: int, buffers: Any) -> None:
        await original(position, buffers)
        if len(buffers) > 1:  # a record
            writing.set()
            await written.wait()

    async with running(until) as harness:
        disk.write_from = slow_write  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.store, "a", 1, VALUE)
            await writing.wait()
            assert not harness.discard("a", 1)
            await harness.tier.discards_durable()
            until.gone = True
            disk.crash()
            written.set()
    disk.write_from = original  # type: ignore[method-assign]
    async with running(disk) as harness:
        assert harness.keys() == {}


async def test_an_object_past_its_time_is_a_miss(autojump_clock: object) -> None:
    now = [1000.0]
    async with running(simulated_disk(), now=lambda: now[0]) as harness:
        assert await harness.store("a", 1, VALUE, expires_unix_ms=2_000_000)
        assert (await harness.load("a"))[1] == VALUE
        now[0] = 2000.0
        assert await missing(harness, "a") is Miss.EXPIRED
        assert [entry.key for entry in harness.withdrawn] == ["a"]


async def test_what_is_discarded_while_it_waits_for_room_is_not_written(autojump_clock: object) -> None:
    disk = simulated_disk()
    disk.faults.latency_seconds = 0.1
    until = UntilCrash(disk)
    original = disk.write_from

    async def write_and_crash(position: int, buffers: Any) -> None:
        await original(position, buffers)
        if len(buffers) > 1:  # a record
            await disk.sync()
            until.gone = True
            disk.crash()

    async with running(until) as harness, trio.open_nursery() as nursery:
        nursery.start_soon(harness.store, "a", 1, VALUE)
        await trio.testing.wait_all_tasks_blocked()
        assert harness.tier.statistics()["segments"]["open"] == 0, "it waits"
        disk.write_from = write_and_crash  # type: ignore[method-assign]
        harness.discard("a", 1)
        await harness.tier.discards_durable()
    disk.write_from = original  # type: ignore[method-assign]
    async with running(disk) as harness:
        assert harness.keys() == {}


async def test_how_firmly_an_object_is_kept_may_change(autojump_clock: object) -> None:
    """As it is loaded, and in what reclaim writes again, which a restart shows as well."""
    disk = simulated_disk()
    facts = facts_of("a", 1, VALUE)
    version = facts.version
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE, pin=2)
        tier = harness.tier
        older = Version(version.clock - 1, version.writer, version.root)
        assert not tier.set_care(facts.digest, older, pin=0, replicas=3, soft=True)
        assert not tier.set_care(bytes(16), version, pin=0, replicas=3, soft=True)
        assert tier.set_care(facts.digest, version, pin=0, replicas=3, soft=True)
        entry = present(tier.find(facts.digest))
        assert (entry.pin, entry.replicas, entry.soft) == (0, 3, True)
        loaded, value = await harness.load("a")
        assert value == VALUE
        assert (loaded.pin, loaded.replicas, loaded.soft) == (0, 3, True)
        log = tier._log
        [record] = log.index.records_of(entry.places[0].segment)
        assert await Keeper(log)._copy(record)
        again = present(tier.find(facts.digest))
        assert again.places != entry.places
    async with running(disk) as harness:
        again = present(harness.tier.find(facts.digest))
        assert (again.pin, again.replicas, again.soft) == (0, 3, True)


async def test_full_segments_are_sealed_and_the_oldest_reclaimed(autojump_clock: object) -> None:
    disk = simulated_disk(segments=6)
    async with running(disk) as harness:
        for number in range(60):
            assert await harness.store(f"{number:02}", 1, value_of(str(number), 1, 200_000))
        statistics = harness.tier.statistics()
        assert statistics["reclaimed_segments"] >= 6
        assert statistics["evicted_objects"] == len(harness.withdrawn)
        kept = harness.keys()
        assert len(kept) == 60 - len(harness.withdrawn)
        assert sorted(kept) == [f"{number:02}" for number in range(60 - len(kept), 60)]
        for key in kept:
            assert (await harness.load(key))[1] == value_of(str(int(key)), 1, 200_000)
        await trio.sleep(5)
        kept = harness.keys()
    async with running(disk) as harness:
        assert harness.keys() == kept


async def test_what_is_hot_or_the_last_copy_is_kept(autojump_clock: object) -> None:
    async with running(simulated_disk(segments=6)) as harness:
        harness.last_copies.add(key_digest("last", NAMESPACE))
        for number in range(60):
            key = {1: "hot", 2: "last"}.get(number, f"{number:02}")
            assert await harness.store(key, 1, value_of(key, 1, 90_000))
            if number > 0 and number % 4 == 1:
                assert (await harness.load("hot"))[1] == value_of("hot", 1, 90_000)
        assert {"hot", "last"} <= harness.keys().keys()
        assert (await harness.load("last"))[1] == value_of("last", 1, 90_000)
        assert harness.tier.statistics()["kept_records"] >= 2
        assert harness.tier.statistics()["write_amplification"] < 1.25


async def test_what_expired_is_not_kept(autojump_clock: object) -> None:
    now = [1000.0]
    async with running(simulated_disk(segments=6), now=lambda: now[0]) as harness:
        harness.last_copies.add(key_digest("old", NAMESPACE))
        assert await harness.store("old", 1, VALUE, expires_unix_ms=1_500_000)
        now[0] = 2000.0
        for number in range(60):
            assert await harness.store(f"{number:02}", 1, value_of("n", 1, 90_000))
        assert harness.tier.statistics()["kept_records"] == 0
        assert "old" in [entry.key for entry in harness.withdrawn]


async def test_a_segment_is_drained_before_it_is_reused(autojump_clock: object) -> None:
    disk = simulated_disk(segments=6)
    async with running(disk) as harness:
        assert await harness.store("first", 1, VALUE)
        reading, go_on = trio.Event(), trio.Event()
        results: list[bytes] = []
        original = disk.read_into

        async def slow_read(position: int, buffers: Any, check: Any = None) -> None:
            if not reading.is_set():
                reading.set()
                await go_on.wait()
            await original(position, buffers, check)

        async def read() -> None:
            results.append((await harness.load("first"))[1])

        async with trio.open_nursery() as nursery:
            disk.read_into = slow_read  # type: ignore[method-assign]
            nursery.start_soon(read)
            await reading.wait()
            for number in range(40):
                value = value_of(str(number), 1, 200_000)
                assert await harness.store(str(number), 1, value), "others are reclaimed meanwhile"
            states = harness.tier.statistics()["segments"]
            assert states["draining"] == 1
            assert "first" in [entry.key for entry in harness.withdrawn]
            go_on.set()
        assert results == [VALUE], "what was found is read whole"
        for number in range(10):
            assert await harness.store(f"again {number}", 1, VALUE)


async def test_a_damaged_payload_is_a_miss_and_dropped(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        disk.damage(record_position(entry.places[0], SEGMENT_BYTES) + PAGE_BYTES + 777)
        assert await missing(harness, "a") is Miss.DAMAGED
        assert await missing(harness, "a") is Miss.ABSENT
        assert [entry.key for entry in harness.withdrawn] == ["a"]
        assert harness.tier.statistics()["damaged"] == 1
        assert await harness.store("a", 1, VALUE), "it may be stored again"
        assert (await harness.load("a"))[1] == VALUE


async def test_a_read_error_is_tried_again_once(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        original, failures = disk.read_into, [1]

        async def failing(position: int, buffers: Any, check: Any = None) -> None:
            if failures:
                failures.pop()
                raise OSError(5, "once")
            await original(position, buffers, check)

        disk.read_into = failing  # type: ignore[method-assign]
        assert (await harness.load("a"))[1] == VALUE
        failures[:] = [1, 1]
        assert await missing(harness, "a") is Miss.READ_ERROR
        assert harness.tier.statistics()["read_errors"] == 1


async def test_a_failed_write_is_refused_and_the_rest_goes_on(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("before", 1, VALUE)
        disk.faults.write_error = 1.0
        assert not await harness.store("a", 1, VALUE)
        disk.faults.write_error = 0.0
        assert await missing(harness, "a") is Miss.ABSENT
        assert await harness.store("a", 2, VALUE)
        assert (await harness.load("before"))[1] == VALUE
        assert harness.tier.state is TierState.OK
        assert harness.tier.statistics()["refused"] == {"failed": 1}


async def test_a_full_disk_makes_it_read_only(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        disk.faults.no_space = 1.0
        assert not await harness.store("b", 1, VALUE)
        assert harness.tier.state is TierState.READ_ONLY
        assert "writing failed" in harness.tier.why
        assert harness.states == [TierState.READ_ONLY]
        assert "the SSD tier is read_only: writing failed" in caplog.text
        assert (await harness.load("a"))[1] == VALUE
        assert harness.tier.admit(key_digest("c", NAMESPACE), MIB, 5) is WriteRefusal.READ_ONLY


async def test_a_failed_sync_drops_what_it_leaves_in_doubt(autojump_clock: object) -> None:
    disk = simulated_disk()
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("sound", 1, VALUE, durable=True)
        await trio.sleep(1)  # its background has nothing to sync then
        disk.faults.sync_error = 1.0
        assert not await harness.store("a", 1, VALUE, durable=True)
        disk.faults.sync_error = 0.0
        assert await missing(harness, "a") is Miss.ABSENT
        assert harness.tier.statistics()["retired_segments"] >= 1
        assert await harness.store("b", 1, VALUE, durable=True)
        await harness.tier.discards_durable()
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert harness.keys() == {"b": 1}, "a segment in doubt is dropped as a whole, for good"


@pytest.mark.parametrize("seed", range(8))
async def test_a_sync_that_fails_between_a_dead_mark_and_its_own_sync(
    seed: int, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = simulated_disk(seed)
    until = UntilCrash(disk)
    async with running(until) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        await trio.sleep(1)  # its background has nothing to sync then
        write_from = disk.write_from

        async def write_and_lose(position: int, buffers: Sequence[memoryview | bytes]) -> None:
            monkeypatch.setattr(disk, "write_from", write_from)
            await write_from(position, buffers)
            disk.faults.sync_error = 1.0
            with pytest.raises(OSError, match="sync_error"):
                await harness.tier._log.commit.sync()
            disk.faults.sync_error = 0.0

        monkeypatch.setattr(disk, "write_from", write_and_lose)
        assert harness.discard("a", 1)
        await harness.tier.discards_durable()
        until.gone = True
        disk.crash()
    async with running(disk) as harness:
        assert not harness.keys()


async def test_discards_that_cannot_be_written_turn_it_off(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        disk.faults.write_error = 1.0
        assert harness.discard("a", 1)
        with pytest.raises(TierOff):
            await harness.tier.discards_durable()
        assert harness.tier.state is TierState.OFF
        assert await missing(harness, "a") is Miss.OFF


async def test_reads_that_always_fail_turn_it_off(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        for number in range(20):
            assert await harness.store(str(number), 1, VALUE)
        disk.faults.read_error = 1.0
        reasons = [await missing(harness, str(number)) for number in range(20)]
        assert reasons == [Miss.READ_ERROR] * 16 + [Miss.OFF] * 4
        assert harness.states == [TierState.OFF]


async def test_a_group_of_durable_stores_shares_a_sync(autojump_clock: object) -> None:
    disk = simulated_disk()
    disk.faults.latency_seconds = 0.001
    async with running(disk) as harness:
        before = disk.happened["syncs"]
        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(harness.store, str(number), 1, VALUE[:20_000], True)
        assert len(harness.keys()) == 30
        assert disk.happened["syncs"] - before <= 25


async def test_a_store_waits_for_room_but_not_for_ever(autojump_clock: object) -> None:
    disk = simulated_disk(segments=4)
    async with running(disk) as harness:
        disk.faults.latency_seconds = 100.0
        stored = []

        async def store(number: int) -> None:
            stored.append(await harness.store(str(number), 1, value_of(str(number), 1, 900_000)))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(store, number)
        assert stored.count(False) >= 1
        assert harness.tier.statistics()["refused"]["no_room"] == stored.count(False)


async def test_what_is_too_large_is_refused(autojump_clock: object) -> None:
    async with running(simulated_disk()) as harness:
        assert not await harness.store("a", 1, value_of("a", 1, SEGMENT_BYTES))
        assert harness.tier.statistics()["refused"] == {"too_large": 1}


async def test_admission_asks_who_else_has_it(autojump_clock: object) -> None:
    async with running(simulated_disk(), AdmissionPolicy(min_bytes=100)) as harness:
        digest = key_digest("a", NAMESPACE)
        assert harness.tier.admit(digest, 1000, 0) is WriteRefusal.SEEN_ONCE
        harness.last_copies.add(digest)
        assert harness.tier.admit(digest, 1000, 0) is None
        assert harness.tier.statistics()["refused"] == {"seen_once": 1}
        assert harness.tier.statistics()["admitted"] == 1


async def test_an_index_that_is_full_refuses(autojump_clock: object) -> None:
    async with running(simulated_disk(), max_records=2) as harness:
        assert await harness.store("a", 1, VALUE)
        assert await harness.store("b", 1, VALUE)
        assert not await harness.store("c", 1, VALUE)
        assert harness.keys() == {"a": 1, "b": 1}


async def test_a_prepare_that_raises_is_passed_on(autojump_clock: object) -> None:
    def refuse(facts: ColdFacts) -> memoryview:
        raise MemoryError

    async with running(simulated_disk(segments=6)) as harness:
        assert await harness.store("a", 1, VALUE)
        with pytest.raises(MemoryError):
            await harness.tier.load(key_digest("a", NAMESPACE), refuse)
        with pytest.raises(ValueError, match="whole pages"):
            await harness.tier.load(key_digest("a", NAMESPACE), lambda facts: aligned(b"short"))
        for number in range(60):  # no read is left over that would hold up a segment
            assert await harness.store(str(number), 1, value_of(str(number), 1, 200_000))


async def test_a_disk_with_something_else_is_refused(autojump_clock: object) -> None:
    disk = simulated_disk()
    disk.poke(100, b"a file system")
    with pytest.raises(ConfigError, match="no log of p2pstore"):
        async with running(disk):
            pass


async def test_a_disk_that_is_too_small_is_refused(autojump_clock: object) -> None:
    with pytest.raises(ConfigError, match=r"at least 5\.0 MiB"):
        async with running(simulated_disk(segments=3)):
            pass


async def test_a_longer_disk_makes_a_longer_log(autojump_clock: object) -> None:
    disk = simulated_disk(segments=4)
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
    longer = simulated_disk(segments=9)
    longer.poke(0, disk.peek(0, disk.size_bytes))
    async with running(longer) as harness:
        assert harness.tier.statistics()["capacity_bytes"] == 9 * SEGMENT_BYTES
        assert harness.keys() == {"a": 1}
    with pytest.raises(ConfigError, match="cannot shrink"):
        disk.poke(0, longer.peek(0, disk.size_bytes))
        async with running(disk):
            pass


CANCELLED: list[tuple[str, Callable[[Harness], Any]]] = [
    ("store", lambda harness: harness.store("a", 2, value_of("a", 2, 300_000))),
    ("durable store", lambda harness: harness.store("a", 2, value_of("a", 2, 300_000), True)),
    ("load", lambda harness: harness.load("a")),
    ("discards", lambda harness: harness.tier.discards_durable()),
]


@pytest.mark.parametrize(("name", "operation"), CANCELLED, ids=[name for name, _ in CANCELLED])
async def test_cancelled_at_every_checkpoint(
    name: str, operation: Callable[[Harness], Any], autojump_clock: object
) -> None:
    """After each of them the tier works as before, and what comes back after a start is what it says it has."""
    disk = simulated_disk(segments=6)
    disk.faults.latency_seconds = 0.01
    for milliseconds in range(0, 60, 3):
        disk.faults.latency_seconds = 0.01
        async with running(disk) as harness:
            await harness.store("a", 1, VALUE)
            await harness.store("b", 1, VALUE)
            harness.discard("b", 1)
            with trio.move_on_after(milliseconds / 1000):
                await operation(harness)
            statistics = harness.tier.statistics()
            assert statistics["queued_bytes"] == 0
            facts, value = await harness.load("a")
            assert value == value_of("a", facts.version.clock, len(value))
            before = harness.keys()
        given_up = {entry.key for entry in harness.withdrawn}
        async with running(disk) as harness:
            assert harness.keys().items() <= before.items()
            assert before.keys() - harness.keys().keys() <= given_up
            for number in range(12):  # nothing is left that holds up a segment
                assert await harness.store(f"{number}", milliseconds, value_of("n", number, 300_000))
            await trio.sleep(5)
            assert harness.tier.statistics()["segments"][SegmentState.DRAINING.value] == 0
            harness.discard("a", 9)


async def test_a_disk_that_nobody_will_find_again_is_only_read(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        disk.misplaced = "it was deleted"
        await trio.sleep(3.0)
        assert harness.states == [TierState.READ_ONLY]
        statistics = harness.tier.statistics()
        assert statistics["why"] == "it was deleted"
        assert "start this peer again" in statistics["cure"]
        assert not await harness.store("b", 1, VALUE)
        assert (await harness.load("a"))[1] == VALUE
        disk.misplaced = ""
        await trio.sleep(10.0)
        assert harness.tier.state is TierState.READ_ONLY, "what was not written meanwhile is not there"


async def test_nothing_is_called_durable_that_nobody_will_find_again(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        await trio.sleep(0.5)
        disk.misplaced = "it was deleted"  # the last look was a moment ago
        assert not await harness.store("a", 1, VALUE, durable=True)
        assert harness.states == [TierState.READ_ONLY]
        assert (await harness.load("a"))[1] == VALUE, "it is there as long as this peer is"


# --- a disk that hangs ---------------------------------------------------------------------------


def hanging_disk(seed: int = 0) -> FaultyDisk:
    """Nothing calls off what it has begun."""

    async def pause(seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    size = LOG_START_BYTES + 8 * SEGMENT_BYTES
    return FaultyDisk(seed, size, pause=pause, now=trio.current_time)


async def load_overdue(harness: Harness, key: str, patience_seconds: float) -> tuple[float, str]:
    """After how long a load was said to be overdue, and why; it goes on in the background until it ends."""
    began, said = trio.current_time(), trio.Event()
    reasons: list[str] = []
    memory = aligned_buffer(MIB)

    def overdue(why: str) -> None:
        reasons.append(why)
        said.set()

    async def load() -> None:
        with suppress(ColdMiss):
            await harness.tier.load(
                key_digest(key, NAMESPACE), lambda facts: memory, overdue, patience_seconds
            )

    trio.lowlevel.spawn_system_task(load)
    await said.wait()
    return trio.current_time() - began, reasons[0]


async def test_who_waits_for_a_disk_that_hangs_is_told_and_later_ones_do_not_wait(
    autojump_clock: object,
) -> None:
    disk = hanging_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        assert await harness.store("b", 1, VALUE, durable=True)
        await trio.sleep(1.0)
        disk.faults.hang, disk.faults.hang_seconds = 1.0, 20.0
        seconds, why = await load_overdue(harness, "a", 1.0)
        assert 1.0 <= seconds <= 1.5
        assert why == "the SSD did not answer within 1 s"
        assert not harness.tier.is_silent
        await trio.sleep(4.0)
        assert harness.tier.is_silent
        began = trio.current_time()
        assert await missing(harness, "b") is Miss.SILENT
        assert trio.current_time() == began
        assert harness.tier.statistics()["unanswered"] == 1
        assert harness.holds("a")
        assert harness.holds("b")

        disk.faults.hang = 0.0
        await trio.sleep(18.0)
        assert not harness.tier.is_silent, "it answers again"
        assert (await harness.load("a"))[1] == (await harness.load("b"))[1] == VALUE
        assert harness.states == []


async def test_a_slow_disk_is_waited_for(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        disk.faults.latency_seconds = 0.5
        told: list[str] = []
        memory = aligned_buffer(MIB)
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                load = partial(harness.tier.load, key_digest("a", NAMESPACE), lambda facts: memory)
                nursery.start_soon(load, told.append, 6.0)
        assert told == []


async def test_a_disk_that_keeps_hanging_is_off_and_discards_say_so(autojump_clock: object) -> None:
    disk = hanging_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        await trio.sleep(1.0)
        disk.faults.hang, disk.faults.hang_seconds = 1.0, 300.0
        harness.discard("a", 1)
        began = trio.current_time()
        with pytest.raises(TierOff, match="does not answer"):
            await harness.tier.discards_durable()
        assert 30.0 <= trio.current_time() - began <= 32.0
        assert harness.states == [TierState.OFF]
        disk.faults.hang = 0.0


async def test_one_write_that_hangs_while_the_disk_answers_makes_it_read_only(
    autojump_clock: object,
) -> None:
    disk = hanging_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE, durable=True)
        await trio.sleep(1.0)
        disk.faults.hang, disk.faults.hang_seconds = 1.0, 300.0

        async def store() -> None:
            await harness.store("b", 1, VALUE)

        trio.lowlevel.spawn_system_task(store)
        await trio.sleep(0.1)
        disk.faults.hang = 0.0
        for _ in range(40):
            assert (await harness.load("a"))[1] == VALUE
            await trio.sleep(1.0)
        assert harness.states == [TierState.READ_ONLY]
        assert "has not answered a request" in harness.tier.why
        assert (await harness.load("a"))[1] == VALUE


# --- whose log it is -----------------------------------------------------------------------------


async def test_a_log_belongs_to_the_first_cluster_that_opens_it(autojump_clock: object) -> None:
    disk = simulated_disk()
    for _ in range(2):
        async with running(disk, cluster="a") as harness:
            assert await harness.store("k", 1, VALUE, durable=True)
    before = disk.peek(0, disk.size_bytes)
    with pytest.raises(ConfigError, match="belongs to another cluster than 'b': name another"):
        async with running(disk, cluster="b"):
            pass
    assert disk.peek(0, disk.size_bytes) == before
    async with running(disk) as harness:  # a tool, which has no cluster
        assert harness.keys() == {"k": 1}
    async with running(disk, cluster="a") as harness:
        assert harness.keys() == {"k": 1}


async def test_a_log_of_a_version_that_knew_no_clusters_is_taken_over(autojump_clock: object) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("k", 1, VALUE, durable=True)
    async with running(disk, cluster="a") as harness:
        assert (await harness.load("k"))[1] == VALUE
    disk.crash()
    with pytest.raises(ConfigError, match="another cluster"):
        async with running(disk, cluster="b"):
            pass
    longer = FaultyDisk(0, disk.size_bytes + 4 * SEGMENT_BYTES)
    longer.poke(0, disk.peek(0, disk.size_bytes))
    async with running(longer, cluster="a") as harness:
        assert harness.keys() == {"k": 1}
    with pytest.raises(ConfigError, match="another cluster"):
        async with running(longer, cluster="b"):
            pass


async def test_what_reclaim_moved_while_it_could_not_be_read_is_read_where_it_is_now(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = simulated_disk()
    async with running(disk) as harness:
        assert await harness.store("a", 1, VALUE)
        log = harness.tier._log
        entry = present(harness.tier.find(key_digest("a", NAMESPACE)))
        [record] = log.index.records_of(entry.places[0].segment)
        real, old, copied = disk.read_into, log.position(entry.places[0]), False

        async def read_into(position: int, buffers: Sequence[memoryview], check: Any = None) -> None:
            nonlocal copied
            if position == old and copied:
                raise OSError(errno.EIO, "it rots there")
            if position == old and not memory_of_copy:
                memory_of_copy.append(buffers)
                assert await Keeper(log)._copy(record)
                copied = True
                raise OSError(errno.EIO, "it rots there")
            await real(position, buffers, check)

        memory_of_copy: list[Sequence[memoryview]] = []
        monkeypatch.setattr(disk, "read_into", read_into)
        assert (await harness.load("a"))[1] == VALUE
        assert copied
        assert harness.withdrawn == []
