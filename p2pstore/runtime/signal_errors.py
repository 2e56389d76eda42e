"""What a signal handler raises in the middle of a blocking call. Pure.

Python runs handlers inside the call that the main thread waits in, and that call raises what they raise: the
`TimeoutError` of a program's alarm looks like the socket's own. It must neither be taken for an answer of the other
side, nor for a reason to try another one. So it goes up as `FromSignalHandler`, past everything that handles errors, as
Ctrl-C does, and comes out of the client as itself. The connection stays usable, or says that it was closed.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final

_OURS: Final = frozenset({"p2pstore", "trio", "outcome", *sys.stdlib_module_names})
"""Packages whose frames lie between a blocking call of this package and what it raised by itself."""


class FromSignalHandler(BaseException):
    """Carries `error` out of the client."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def as_raised(error: Exception) -> BaseException:
    """What to raise for an error that was caught in this frame: itself, or a `FromSignalHandler`."""
    return FromSignalHandler(error) if is_from_signal_handler(error) else error


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether the error comes from a frame that this package did not call."""
    at: TracebackType | None = error.__traceback__
    while at is not None and (at := at.tb_next) is not None:
        name = at.tb_frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _OURS or name == "__main__":
            return True
    return False
