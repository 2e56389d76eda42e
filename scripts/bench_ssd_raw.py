"""The disk below the SSD tier, beside fio: the same requests on the same file, in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import trio
from benchmark import Report
from fio import Fio, Load, Measured

from p2pstore.objects import GIB, KIB, MIB, format_bytes
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk import FileDisk, open_disk

LOADS = (
    (Load("read", 64 * KIB, 32), ">= 0.7"),
    (Load("read", 1 * MIB, 8), ">= 0.85"),
    (Load("read", 8 * MIB, 4), ">= 0.85"),
    (Load("read", 64 * MIB, 2), ">= 0.85"),
    (Load("write", 1 * MIB, 8), ">= 0.85"),
    (Load("write", 8 * MIB, 4), ">= 0.85"),
)
READ_BESIDE_WRITES = Load("read", 64 * KIB, 4)
WRITE_BACK = Load("write", 8 * MIB, 2)
CACHED_DEPTH = 32
REST_SECONDS = 0.3
"""Many virtual disks are faster after a pause, and starting fio is one. So each has one, and goes first in turns."""


def measure_raw(report: Report, folder: Path, quick: bool) -> None:
    """Bandwidth and CPU time against fio; reads beside write-back; what Python costs in a request."""
    measure_python(report, folder, 20_000 if quick else 100_000)
    disk = open_disk(folder, GIB if quick else 4 * GIB)
    try:
        trio.run(fill, disk)
        fio = Fio(disk.path, disk.size_bytes)
        repeats, seconds = (3, 0.4) if quick else (8, 3.0)
        for load, wanted in LOADS:
            _compare(report, disk, fio, load, wanted, repeats, seconds)
        _beside_writes(report, disk, fio, repeats, seconds)
    finally:
        disk.close()


# --- bandwidth -----------------------------------------------------------------------------------


def _compare(
    report: Report, disk: FileDisk, fio: Fio, load: Load, wanted: str, repeats: int, seconds: float
) -> None:
    ours: list[Measured] = []
    theirs: list[Measured] = []
    for number in range(repeats):
        for is_ours in (number % 2 == 1, number % 2 == 0):
            time.sleep(REST_SECONDS)
            if is_ours:
                ours.append(trio.run(_load, disk, load, seconds, number))
            else:
                theirs.append(fio.run(load, seconds))
    add_comparison(report, load, load_name(load), ours, theirs, fio.engine, wanted)


def load_name(load: Load) -> str:
    return f"{load.operation} {format_bytes(load.block_bytes)}, {load.depth} at a time"


def add_comparison(
    report: Report,
    load: Load,
    name: str,
    ours: list[Measured],
    theirs: list[Measured],
    engine: str,
    wanted: str,
) -> None:
    """Medians of bandwidth, CPU time and, where there are enough requests to have one, 99th percentile."""

    def middle(figure: Callable[[Measured], float], of: list[Measured]) -> float:
        return statistics.median(map(figure, of))

    rows: list[tuple[str, str, Callable[[Measured], float], str]] = [
        (name, "MB/s", lambda each: each.bytes_per_second / 1e6, wanted),
        (f"{name}: CPU", "us a request", lambda each: each.cpu_seconds_per_request * 1e6, ""),
    ]
    if load.block_bytes <= MIB:
        rows.append((f"{name}: p99", "ms", lambda each: each.p99_seconds * 1e3, ""))
    for what, unit, figure, limit in rows:
        value, baseline = middle(figure, ours), middle(figure, theirs)
        report.add(what, value, unit, f"fio, {engine}", baseline, limit)


async def keep_up(
    load: Load, seconds: float, seed: int, request: Callable[[memoryview, Random], Awaitable[None]]
) -> Measured:
    """Have `request` done again and again for so long, as many at a time as the load says, each with memory of its
    own, full of what does not compress."""
    rng, taken = Random(seed), list[float]()
    some = rng.randbytes(min(MIB, load.block_bytes))
    buffers = [aligned_buffer(load.block_bytes) for _ in range(load.depth)]
    for buffer in buffers:  # the kernel provides its memory now, and not while time is measured
        for start in range(0, load.block_bytes, len(some)):
            buffer[start : start + len(some)] = some
    begin, cpu_begin = time.perf_counter(), time.process_time()

    async def requests(buffer: memoryview) -> None:
        while (start := time.perf_counter()) < begin + seconds:
            await request(buffer, rng)
            taken.append(time.perf_counter() - start)

    async with trio.open_nursery() as nursery:
        for buffer in buffers:
            nursery.start_soon(requests, buffer)
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    taken.sort()
    return Measured(
        len(taken) * load.block_bytes / elapsed, cpu / len(taken), taken[len(taken) * 99 // 100]
    )


async def _load(disk: FileDisk, load: Load, seconds: float, seed: int) -> Measured:
    async def request(buffer: memoryview, rng: Random) -> None:
        position = rng.randrange(disk.size_bytes // load.block_bytes) * load.block_bytes
        if load.operation == "read":
            await disk.read_into(position, [buffer])
        else:
            await disk.write_from(position, [buffer])

    return await keep_up(load, seconds, seed, request)


async def fill(disk: FileDisk) -> None:
    """Reading what was never written costs nothing, so all of it is written once."""
    block_bytes = 16 * MIB
    buffer = aligned_buffer(block_bytes)
    buffer[:] = Random(1).randbytes(block_bytes)
    for position in range(0, disk.size_bytes, block_bytes):
        await disk.write_from(position, [buffer])
    await disk.sync()


# --- reads beside write-back ---------------------------------------------------------------------


def _beside_writes(report: Report, disk: FileDisk, fio: Fio, repeats: int, seconds: float) -> None:
    """How much longer the slowest reads take while there is as much writing as the disk takes."""
    idle: list[float] = []
    busy: list[float] = []
    fio_ratios: list[float] = []
    for number in range(repeats):
        idle.append(trio.run(_load, disk, READ_BESIDE_WRITES, seconds, number).p99_seconds)
        busy.append(trio.run(_read_beside_writes, disk, seconds, number))
        alone = fio.run(READ_BESIDE_WRITES, seconds).p99_seconds
        with fio.running(WRITE_BACK, seconds + 5):
            fio_ratios.append(fio.run(READ_BESIDE_WRITES, seconds).p99_seconds / alone)
    name = f"read {format_bytes(READ_BESIDE_WRITES.block_bytes)}: p99 beside write-back"
    report.add(name, statistics.median(busy) * 1e3, "ms", "idle", statistics.median(idle) * 1e3, "<= 3")
    ratios = [one / other for one, other in zip(busy, idle, strict=True)]
    report.add(
        f"{name}, as a multiple of idle",
        statistics.median(ratios),
        "times",
        "fio doing both",
        statistics.median(fio_ratios),
    )


async def _read_beside_writes(disk: FileDisk, seconds: float, seed: int) -> float:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_load, disk, WRITE_BACK, seconds + 60, seed + 1000)
        measured = await _load(disk, READ_BESIDE_WRITES, seconds, seed)
        nursery.cancel_scope.cancel()
    return measured.p99_seconds


# --- Python --------------------------------------------------------------------------------------


def measure_python(report: Report, folder: Path, requests: int) -> None:
    """CPU time of a request that the page cache answers, in user mode, beside that of the bare system call."""
    disk = open_disk(folder, 4 * MIB, direct=False)
    try:
        ours, bare = list[float](), list[float]()
        for _ in range(5):
            bare.append(_bare_reads(disk.path, requests) / requests)
            ours.append(trio.run(_cached_reads, disk, requests) / requests)
    finally:
        disk.close()
        disk.path.unlink()
    call, each = statistics.median(bare) * 1e6, statistics.median(ours) * 1e6
    name = f"read 4 KiB of the page cache, {CACHED_DEPTH} at a time: user CPU"
    report.add(name, each, "us", "preadv in a loop", call)
    report.add("Python of a request: user CPU beyond preadv", each - call, "us", wanted="<= 10")


def _bare_reads(path: Path, requests: int) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buffers = [aligned_buffer(4 * KIB)]
        begin = os.times().user
        for number in range(requests):
            os.preadv(descriptor, buffers, number % 1024 * 4 * KIB)
        return os.times().user - begin
    finally:
        os.close(descriptor)


async def _cached_reads(disk: FileDisk, requests: int) -> float:
    async def reads() -> None:
        buffer = aligned_buffer(4 * KIB)
        for number in range(requests // CACHED_DEPTH):
            await disk.read_into(number % 1024 * 4 * KIB, [buffer])

    begin = os.times().user
    async with trio.open_nursery() as nursery:
        for _ in range(CACHED_DEPTH):
            nursery.start_soon(reads)
    return os.times().user - begin
