"""Waiting for a descriptor. Shell.

Never with `select`: it fails in a process that has more than 1,023 descriptors, as API servers do.
"""

from __future__ import annotations

import os
import select
import time
from typing import IO


def is_ready(descriptor: int, seconds: float | None, *, to_write: bool = False) -> bool:
    """Whether a read, or a write, would not wait, within so long; None: however long it takes. The other side's end
    counts as ready."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def read_line(pipe: IO[bytes], deadline: float) -> bytes:
    """The next line, or what came of it until the deadline (`time.monotonic`) or the end."""
    line = b""
    while not line.endswith(b"\n"):
        ready = is_ready(pipe.fileno(), deadline - time.monotonic())
        piece = os.read(pipe.fileno(), 1) if ready else b""
        if not piece:
            break
        line += piece
    return line
