"""The index of the SSD tier: its memory, what a call costs, and how long a start takes."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from benchmark import Report

from p2pstore.objects import MIB, Version
from p2pstore.ssd_tier.footer import ROW, Footer, Rows, encode_footer
from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    PAGE_BYTES,
    SEGMENT_BYTES,
    ColdFacts,
    RecordPlace,
    Superblock,
    encode_segment_start,
    record_bytes,
    segment_position,
)
from p2pstore.ssd_tier.recovery import FoundSegment, read_segment, refill

OBJECT_BYTES = 5 * MIB
SEGMENTS = 4_096
"""1 TiB."""
PER_SEGMENT = (SEGMENT_BYTES - 4 * PAGE_BYTES) // record_bytes(OBJECT_BYTES)
NAMESPACE = "job/llama-3-70b@v7"
STORE_ID = bytes(range(16))
PAGE_OF_KEYS = 1_000


def measure_index(report: Report, folder: Path, quick: bool) -> None:
    """Memory in a process of its own; calls; the start of a log of 1 TiB."""
    _measure_memory(report)
    _measure_calls(report, 100_000 if quick else 1_000_000)
    _measure_start(report, folder)


def _key(number: int) -> str:
    """64 characters, as of a block that is named by its hash."""
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4


# --- memory and calls ----------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _filled(count: int, keep: bool = True) -> tuple[ColdIndex, list[bytes], float]:
    """An index of so many objects of one part, their digests where they are kept, and the CPU time of an `add`."""
    rng = Random(1)
    index = ColdIndex(count // PER_SEGMENT + 1, count, rng.getrandbits(64))
    digests, seconds = [], 0.0
    pages = record_bytes(OBJECT_BYTES) // PAGE_BYTES
    for number in range(count):
        segment, at = divmod(number, PER_SEGMENT)
        facts = ColdFacts(
            rng.randbytes(16), Version(number, 1, 2), OBJECT_BYTES, NAMESPACE, _key(number), b""
        )
        place = RecordPlace(segment, 1, FIRST_RECORD_PAGE + at * pages, at, number)
        started = time.process_time()
        index.add(place, facts, 0, OBJECT_BYTES)
        seconds += time.process_time() - started
        if keep:
            digests.append(facts.digest)
    return index, digests, seconds / count


def memory_of(count: int) -> None:
    """Run in a process of its own: prints what an index of that many objects has in memory."""
    warm, _, _ = _filled(1_000, keep=False)  # what numpy and malloc keep for themselves
    before = _resident_bytes()
    index, _, _ = _filled(count, keep=False)
    gc.collect()
    grown = _resident_bytes() - before
    index.page(NAMESPACE, "", "", PAGE_OF_KEYS)
    gc.collect()
    print(json.dumps([grown, _resident_bytes() - before, warm.objects + index.objects]))


def _measure_memory(report: Report) -> None:
    count = 1_000_000
    command = [sys.executable, "-c", f"import bench_ssd_index as b; b.memory_of({count})"]
    folder = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=300, env=environment
    )
    grown, listed, _ = json.loads(done.stdout)
    report.add(f"index: memory of {count:,} objects", grown / 1e6, "MB", wanted="<= 250")
    report.add("index: memory of an object and its key of 64 B", grown / count, "B")
    report.add("index: memory once its keys were listed", listed / 1e6, "MB")


def _measure_calls(report: Report, count: int) -> None:
    index, digests, added = _filled(count)
    report.add("index: add", added * 1e6, "us")
    rng = Random(2)
    known = [rng.choice(digests) for _ in range(50_000)]
    unknown = [rng.randbytes(16) for _ in range(50_000)]

    def each(call: Callable[[bytes], object], of: list[bytes]) -> float:
        started = time.process_time()
        for digest in of:
            call(digest)
        return (time.process_time() - started) / len(of) * 1e6

    report.add("index: find", min(each(index.find, known) for _ in range(3)), "us", wanted="<= 5")
    absent = min(each(index.find, unknown) for _ in range(3))
    report.add("index: find what is not there", absent, "us", wanted="<= 5")
    report.add("index: touch", each(index.touch, known), "us")
    steps = [0.0]
    ready = False
    while not ready:
        started = time.process_time()
        ready = index.prepare_page(NAMESPACE)
        steps.append(time.process_time() - started)
    report.add(f"index: {count:,} keys sorted for the first page", sum(steps), "s")
    report.add("index: longest step of that", max(steps) * 1e3, "ms")
    report.add("index: median step", statistics.median(steps) * 1e3, "ms", wanted="<= 5")
    started = time.process_time()
    _, more = index.page(NAMESPACE, "", _key(count // 2), PAGE_OF_KEYS)
    report.add("index: a page of 1,000", (time.process_time() - started) * 1e3, "ms")
    assert more
    started = time.process_time()
    footer = index.rows.footer(3)
    encode_footer(STORE_ID, 3, 1, footer)
    report.add("index: the footer of a segment", (time.process_time() - started) * 1e3, "ms")
    report.add("index: drop", each(index.drop, list(dict.fromkeys(known))), "us")


# --- a start -------------------------------------------------------------------------------------


def _rows(segment: int, rng: np.random.Generator) -> Rows:
    rows = np.zeros(PER_SEGMENT, ROW)
    numbers = np.arange(PER_SEGMENT)
    rows["digest"] = rng.integers(0, 2**64, (PER_SEGMENT, 2), dtype=np.uint64)
    rows["clock"] = rows["sequence"] = 1 + segment * PER_SEGMENT + numbers
    rows["length"] = rows["stored_bytes"] = OBJECT_BYTES
    rows["page"] = FIRST_RECORD_PAGE + numbers * (record_bytes(OBJECT_BYTES) // PAGE_BYTES)
    rows["number"] = numbers
    rows["key_offset"], rows["key_bytes"] = 64 * numbers, 64
    return rows


def _write_log(file: int, superblock: Superblock) -> None:
    """A log of 1 TiB of sealed segments, of which only starts and footers are written."""
    rng = np.random.default_rng(3)
    os.truncate(file, superblock.total_bytes)
    for segment in range(superblock.segments):
        rows = _rows(segment, rng)
        keys = "".join(_key(int(each)) for each in rows["sequence"]).encode()
        footer = encode_footer(STORE_ID, segment, 5, Footer(rows, [NAMESPACE], keys))
        start = encode_segment_start(STORE_ID, segment, 5, opened=True)
        os.pwrite(file, start, segment_position(segment, SEGMENT_BYTES))
        os.pwrite(file, footer, segment_position(segment + 1, SEGMENT_BYTES) - len(footer))
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: int, superblock: Superblock, segment: int) -> FoundSegment:
    reading = read_segment(superblock, segment)
    try:
        wanted = next(reading)
        while True:
            wanted = reading.send(os.pread(file, wanted.length, wanted.position))
    except StopIteration as done:
        found: FoundSegment = done.value
        return found


def _measure_start(report: Report, folder: Path) -> None:
    superblock = Superblock(STORE_ID, SEGMENTS)
    file = os.open(folder / "cold.log", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _write_log(file, superblock)
        wall, cpu = time.perf_counter(), time.process_time()
        found = [_read(file, superblock, segment) for segment in range(SEGMENTS)]
        read_wall, read_cpu = time.perf_counter() - wall, time.process_time() - cpu
        index = ColdIndex(SEGMENTS, 4_000_000, salt=Random(4).getrandbits(64))
        refill(index, found)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        os.close(file)
    assert index.objects == SEGMENTS * PER_SEGMENT
    report.add("start: 1 TiB, one read after the other", wall, "s", wanted="< 10")
    report.add("start: CPU time of that", cpu, "s", wanted="< 5")
    report.add("start: of which reading", read_wall, "s")
    report.add("start: CPU time of reading", read_cpu, "s")
