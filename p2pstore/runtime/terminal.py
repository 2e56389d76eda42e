"""The terminal that a process was started from, and what its end means to one that is starting. Shell."""

from __future__ import annotations

import os
import signal
from types import FrameType


def has_terminal() -> bool:
    """Whether this process can still talk to the terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def survive_hangups() -> None:
    """From now on, until somebody takes it, SIGHUP ends this process only when its terminal is gone.

    To a peer the signal means "read your files again", and whoever sends it cannot know that the peer is still
    starting, and reads them anyway. A process that ignores the signal (`nohup`) goes on ignoring it.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return
    bound_to_terminal = has_terminal()

    def handle(number: int, frame: FrameType | None) -> None:
        if bound_to_terminal and not has_terminal():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, handle)
