"""Who uses or owns a file or a block device, as far as the system tells."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def lock_owner(status: os.stat_result) -> str | None:
    """The process that holds a lock (`flock`) on a file, for people; None when it cannot be known, as when it
    belongs to another container."""
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == file and int(fields[4]) > 0:
            return _process(int(fields[4]))
    return None


def _process(number: int) -> str:
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return f"process {number}"
    return f"process {number} ({command.decode(errors='backslashreplace')[:80]})"


def mount_point(device: int) -> str | None:
    """Where a block device (`st_rdev`) is mounted; None when it is not, or not that one can see from here."""
    fields = _mounted(device)
    return fields[4] if fields else None


def file_system(device: int) -> str | None:
    """The kind of the file system with that number (`st_dev`), such as "ext4"; None when it cannot be seen."""
    fields = _mounted(device)
    return fields[fields.index("-") + 1] if fields else None


def _mounted(device: int) -> list[str] | None:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # 36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        fields = line.split()
        if fields[2] == wanted:
            return fields
    return None


def user_name(number: int) -> str:
    """What people call a user; the number where the system has no name for it, as in containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
