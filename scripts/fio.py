"""Running fio, the standard tool for measuring disks, on a file that is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Load:
    """Random requests of one size, so many at a time."""

    operation: str
    """"read" or "write"."""
    block_bytes: int
    depth: int


@dataclass(frozen=True)
class Measured:
    """What a load came to."""

    bytes_per_second: float
    cpu_seconds_per_request: float
    p99_seconds: float


class Fio:
    """fio with the best engine that works here: io_uring, which containers often forbid, or libaio."""

    def __init__(self, file: Path, size_bytes: int, *, direct: bool = True) -> None:
        """`direct`: past the page cache."""
        found = shutil.which("fio")
        if found is None:
            sys.exit("this compares with fio, which is not installed: `apt-get install fio`")
        self._fio = found
        self._file = file
        self._size_bytes = size_bytes
        self._direct = direct
        self.engine = next(engine for engine in ("io_uring", "libaio") if self._works(engine))

    def run(self, load: Load, seconds: float) -> Measured:
        done = subprocess.run(self._command(self.engine, load, seconds), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"fio failed: {done.stderr or done.stdout}")
        return _measured(json.loads(done.stdout), load)

    @contextmanager
    def running(self, load: Load, seconds: float) -> Iterator[None]:
        """The load goes on beside what is done in the block, for at most so long."""
        command = self._command(self.engine, load, seconds)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def _works(self, engine: str) -> bool:
        command = self._command(engine, Load("read", 4096, 1), 0.01)
        return subprocess.run(command, capture_output=True).returncode == 0

    def _command(self, engine: str, load: Load, seconds: float) -> list[str]:
        return [
            self._fio,
            "--name=load",
            f"--filename={self._file}",
            f"--size={self._size_bytes}",
            f"--rw=rand{load.operation}",
            f"--bs={load.block_bytes}",
            f"--iodepth={load.depth}",
            f"--ioengine={engine}",
            f"--direct={int(self._direct)}",
            *("--invalidate=0", "--norandommap", "--randrepeat=0", "--allow_file_create=0"),
            *("--fallocate=none", "--time_based", f"--runtime={round(seconds * 1e3)}ms"),
            "--output-format=json",
        ]


def _measured(document: dict[str, Any], load: Load) -> Measured:
    job = document["jobs"][0]
    side = job[load.operation]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Measured(
        side["bw_bytes"],
        cpu_seconds / max(1, side["total_ios"]),
        side["clat_ns"]["percentile"]["99.000000"] / 1e9,
    )
