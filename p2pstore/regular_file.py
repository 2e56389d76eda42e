"""Opening files that somebody else may have put there, without waiting for anybody. Shell."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from p2pstore.errors import ConfigError


def open_regular_file(path: Path) -> BinaryIO:
    """The file, open for reading. Raises `OSError`, and `ConfigError` for what is not a regular file: opening a
    named pipe waits for a writer, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "directory" if stat.S_ISDIR(mode) else "pipe or a device"
            raise ConfigError(f"{path} is not a regular file but a {what}: put a file in its place")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
