"""Disks of all kinds, to be tested alike."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import trio

from p2pstore.errors import ConfigError
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.disk_protocol import Disk
from simulation.faulty_disk import FaultyDisk

KIB, MIB = 1024, 1024 * 1024
SIZE = 24 * MIB


class OpenedDisk(Protocol):
    """Opens a disk of `SIZE` zeros, or again what was closed."""

    def __call__(self) -> Disk: ...


def opened(path: Path, capacity_bytes: int | None) -> FileDisk:
    """Open it, or skip the test where direct I/O does not work at all."""
    try:
        return open_disk(path, capacity_bytes)
    except ConfigError as error:
        if "direct I/O" in str(error):
            pytest.skip(str(error))
        raise


@contextmanager
def loop_device(folder: Path, size_bytes: int = SIZE) -> Iterator[Path]:
    """A block device over a file; skips the test where there are none."""
    if os.geteuid() != 0:
        pytest.skip("only root can make loop devices")
    backing = folder / "device"
    with backing.open("wb") as file:
        file.truncate(size_bytes)
    made = subprocess.run(["losetup", "--find", "--show", str(backing)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"there are no loop devices here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


@contextmanager
def disk_of_kind(kind: str, folder: Path) -> Iterator[OpenedDisk]:
    """A function that opens the same disk each time."""
    disks: list[Disk] = []

    def keep(disk: Disk) -> Disk:
        disks.append(disk)
        return disk

    try:
        match kind:
            case "file":
                yield lambda: keep(opened(folder, SIZE))
            case "device":
                with loop_device(folder) as device:
                    try:
                        yield lambda: keep(opened(device, None))
                    finally:
                        for disk in disks:
                            disk.close()
            case _:
                simulated = FaultyDisk(1, SIZE)
                if kind == "simulated, slow":
                    simulated.pause, simulated.faults.latency_seconds = trio.sleep, 0.002

                def reopen() -> Disk:
                    simulated.reopen()
                    return simulated

                yield reopen
    finally:
        for disk in disks:
            disk.close()
