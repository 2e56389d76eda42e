"""The SSD tier as a whole beside fio: objects written and read, while old ones make room, in turns with fio's requests
of the same size on another file of the same disk."""

from __future__ import annotations

import statistics
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import trio
from bench_ssd_raw import REST_SECONDS, add_comparison, fill, keep_up
from benchmark import Report
from fio import Fio, Load, Measured

from p2pstore.objects import GIB, KIB, MIB, Version, chunk_sums, format_bytes, root_checksum
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.disk import open_disk
from p2pstore.ssd_tier.health import ColdMiss
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES, ColdFacts
from p2pstore.ssd_tier.tier import SsdTier, open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy

SIZES = (
    (64 * KIB, 32, "", ">= 0.7"),
    (1 * MIB, 8, ">= 0.85", ">= 0.85"),
    (8 * MIB, 4, ">= 0.85", ">= 0.85"),
    (64 * MIB, 2, ">= 0.85", ">= 0.85"),
)
"""Length of objects, how many at a time, what is wanted of write-back, and of reads."""
READ_BESIDE_WRITES = Load("read", 64 * KIB, 4)
WRITE_BACK = Load("write", 8 * MIB, 2)
NO_ROOM_SECONDS = 0.001
MAX_MISSES = 1000


def measure_tier(report: Report, folder: Path, quick: bool) -> None:
    """Write-back and reads against fio; reads beside write-back; write amplification."""
    trio.run(_measure, report, folder, quick)


async def _measure(report: Report, folder: Path, quick: bool) -> None:
    size_bytes = 3 * GIB if quick else 16 * GIB
    repeats, seconds = (3, 0.4) if quick else (8, 3.0)
    places = folder / "tier", folder / "fio"
    for place in places:
        place.mkdir()
    disk, other = (open_disk(place, size_bytes) for place in places)
    try:
        for each in (disk, other):
            await fill(each)
        # A file system takes long for what it writes the first time in a file; and where zeros are is no other log.
        await disk.write_from(0, [bytes(LOG_START_BYTES)])
        fio = Fio(other.path, size_bytes)
        policy = AdmissionPolicy(min_bytes=0, min_hits=0, max_queued_bytes=GIB)
        tier_of_disk = open_tier(
            disk, policy, TierHooks(withdraw=lambda entries: None, is_last_copy=lambda digest: False)
        )
        async with tier_of_disk as tier:
            for length, depth, wanted_of_writes, wanted_of_reads in SIZES:
                objects = Objects(tier, length)
                await objects.replace_all(size_bytes, depth)
                write, read = Load("write", length, depth), Load("read", length, depth)
                for load, wanted in ((write, wanted_of_writes), (read, wanted_of_reads)):
                    await _compare(report, fio, objects, load, wanted, repeats, seconds)
            await _beside_writes(report, tier, repeats, seconds)
            amplification = tier.statistics()["write_amplification"]
        report.add("tier: write amplification", amplification, "", wanted="<= 1.25")
    finally:
        disk.close()
        other.close()


class Objects:
    """Objects of one length in a tier, each of them new when it is written."""

    def __init__(self, tier: SsdTier, length: int) -> None:
        self.refused = 0
        self._tier = tier
        self._length = length
        self._written: list[bytes] = []
        self._checksums_of = b""
        self._kept_checksums: tuple[Version, bytes] = (Version(0, 0), b"")

    async def write(self, buffer: memoryview, rng: Random) -> None:
        """One more; as soon as there is room."""
        digest = rng.randbytes(16)
        version, sums = self._checksums(buffer)
        facts = ColdFacts(digest, version, self._length, "default", digest.hex(), sums)
        while not await self._tier.store(facts, buffer):
            self.refused += 1
            await trio.sleep(NO_ROOM_SECONDS)
        self._written.append(digest)

    async def replace_all(self, size_bytes: int, depth: int) -> None:
        """Write so much: what makes room from then on are objects of this length."""
        rng, buffers = Random(1), [aligned_buffer(self._length) for _ in range(depth)]
        some = rng.randbytes(min(MIB, self._length))
        remaining = size_bytes // self._length

        async def write(buffer: memoryview) -> None:
            nonlocal remaining
            for start in range(0, self._length, len(some)):
                buffer[start : start + len(some)] = some
            while remaining > 0:
                remaining -= 1
                await self.write(buffer, rng)

        async with trio.open_nursery() as nursery:
            for buffer in buffers:
                nursery.start_soon(write, buffer)

    async def read(self, buffer: memoryview, rng: Random) -> None:
        """Any of those that are there: old ones have gone."""
        for _ in range(MAX_MISSES):
            with suppress(ColdMiss):
                await self._tier.load(rng.choice(self._written), lambda facts: buffer)
                return
        raise RuntimeError("what was written cannot be read")

    def forget_old(self) -> None:
        """Choose from those that are there, from now on."""
        self._written = [each for each in self._written if self._tier.find(each) is not None]

    def _checksums(self, buffer: memoryview) -> tuple[Version, bytes]:
        """Those that memory has of each of its objects: nobody computes them for the SSD."""
        head = bytes(buffer[:64])
        if self._checksums_of != head:
            sums = chunk_sums(buffer)
            version = Version(1, 1, root_checksum(len(buffer), sums))
            self._checksums_of, self._kept_checksums = head, (version, sums)
        return self._kept_checksums


async def _compare(
    report: Report, fio: Fio, objects: Objects, load: Load, wanted: str, repeats: int, seconds: float
) -> None:
    ours: list[Measured] = []
    theirs: list[Measured] = []
    request = objects.write if load.operation == "write" else objects.read
    for number in range(repeats):
        for is_ours in (number % 2 == 1, number % 2 == 0):
            await trio.sleep(REST_SECONDS)
            if is_ours:
                objects.forget_old()
                ours.append(await keep_up(load, seconds, 1000 * load.depth + number, request))
            else:
                theirs.append(await trio.to_thread.run_sync(partial(fio.run, load, seconds)))
    name = f"tier: {load.operation} {format_bytes(load.block_bytes)}, {load.depth} at a time"
    add_comparison(report, load, name, ours, theirs, fio.engine, wanted)
    if objects.refused:
        report.add(f"{name}: waits for room", objects.refused, "")


async def _beside_writes(report: Report, tier: SsdTier, repeats: int, seconds: float) -> None:
    """How much longer the slowest reads take while as much is written as the tier takes."""
    small, large = (Objects(tier, READ_BESIDE_WRITES.block_bytes), Objects(tier, WRITE_BACK.block_bytes))
    idle: list[float] = []
    busy: list[float] = []

    async def p99(seed: int) -> float:
        return (await keep_up(READ_BESIDE_WRITES, seconds, seed, small.read)).p99_seconds

    for number in range(repeats):
        await keep_up(READ_BESIDE_WRITES, 0.2, 100 + number, small.write)
        idle.append(await p99(200 + number))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_up, WRITE_BACK, seconds + 60, 300 + number, large.write)
            busy.append(await p99(400 + number))
            nursery.cancel_scope.cancel()
    name = f"tier: read {format_bytes(READ_BESIDE_WRITES.block_bytes)}: p99 beside write-back"
    report.add(name, statistics.median(busy) * 1e3, "ms", "idle", statistics.median(idle) * 1e3, "<= 3")
