"""Whether files are on this machine: others may be slow at any moment, or not answer at all. Shell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LOCAL_FILE_SYSTEMS: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)


def is_local(file_systems: str, device: int) -> bool:
    """Whether files on `device` (`st_dev`) are on a disk or in memory of this machine. `file_systems` is what
    /proc/self/mountinfo says; what is not in it is not known to be."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in file_systems.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) > 2 and fields[2] == number and kinds:
            return kinds[0] in LOCAL_FILE_SYSTEMS
    return False


def is_local_directory(path: Path) -> bool:
    """`is_local` of a directory that there is. Raises `OSError`."""
    return is_local(Path("/proc/self/mountinfo").read_text(), path.stat().st_dev)
