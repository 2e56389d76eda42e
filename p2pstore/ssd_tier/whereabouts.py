"""Whether an open file or block device is still what its path names, whole, and may be written.

A file that was deleted, moved or replaced can be read and written as before by who has it open: no call fails. But
the next start will not find what is written to it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from p2pstore.objects import format_bytes

_GONE = (FileNotFoundError, NotADirectoryError)


def why_misplaced(path: Path, descriptor: int, size_bytes: int) -> str:
    """Why what is written there now would be lost, for people; empty when nothing speaks against it. `size_bytes` are
    what it must have. Some microseconds, unless the disk hangs. Raises `OSError` when the descriptor is closed."""
    opened = os.fstat(descriptor)
    is_file = stat.S_ISREG(opened.st_mode)
    if is_file and opened.st_nlink == 0:
        return f"{path} was deleted"
    if is_file and opened.st_size < size_bytes:
        return f"{path} was cut to {format_bytes(opened.st_size)} of {format_bytes(size_bytes)}"
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY and is_file:
        return f"the file system of {path} is mounted read-only now"
    try:
        named = os.stat(path)
    except _GONE:
        return f"{path} is not there any more: it, or a directory above it, was moved, removed or unmounted"
    except (
        OSError
    ):  # it may well be there: only who may look has changed, or the path does not answer
        return ""
    if is_file and (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
        return f"another file is at {path} now, or something was mounted over it"
    if not is_file and named.st_rdev != opened.st_rdev:
        return f"another device is at {path} now"
    return ""
