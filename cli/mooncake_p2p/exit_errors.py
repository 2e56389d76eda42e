"""How the command ends: exit statuses, errors as one line of plain words, and signals.

The statuses are part of the command line's interface; scripts rely on them. A broken pipe (the
reader of stdout went away) ends a command quietly with status 1. Ctrl-C ends it with 130 and
SIGTERM with 143, as shells expect; `join` leaves the cluster on either and ends with 0.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Final

from p2pstore import errors
from p2pstore.objects import printable

STANDARD_OUTPUT: Final = "standard output"
"""The name of stdout in errors."""


class ExitCode(IntEnum):
    """Exit statuses of `mooncake-p2p`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_SUCH_KEY = 3
    NO_PEER = 4
    DEADLINE = 5
    UNREACHABLE = 6
    INTERRUPTED = 130
    TERMINATED = 143


class CommandFailed(Exception):
    """Ends a command with one line on stderr and an exit status."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


class AlreadyTold(Exception):
    """Ends a command that has said on stderr what went wrong, as `cause` does: with its exit status."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


EXIT_CODES: Final[tuple[tuple[type[BaseException], ExitCode], ...]] = (
    (errors.NoSuchKey, ExitCode.NO_SUCH_KEY),
    (errors.NoLocalPeer, ExitCode.NO_PEER),
    (errors.StoreClosed, ExitCode.NO_PEER),
    (errors.DeadlineExceeded, ExitCode.DEADLINE),
    (errors.Unavailable, ExitCode.UNREACHABLE),
    (errors.ConfigError, ExitCode.USAGE),
    (errors.P2PStoreError, ExitCode.FAILED),
    (ValueError, ExitCode.USAGE),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)
"""The first class that an error is an instance of decides; everything else is FAILED."""


def exit_code(error: BaseException) -> int:
    """The exit status for an error."""
    if isinstance(error, CommandFailed):
        return error.code
    if isinstance(error, AlreadyTold):
        return exit_code(error.cause)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.FAILED
    if hasattr(error, "format_message"):  # what typer found wrong with the arguments
        return ExitCode.USAGE
    for kind, code in EXIT_CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED


def describe(error: BaseException) -> str:
    """One line for people: what happened and what to do. It may name what strangers named, such as files: without
    control characters, which would steer the terminal."""
    if isinstance(error, AlreadyTold):
        return describe(error.cause)
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, SystemExit):
        return "stopped by a signal"
    if isinstance(error, CommandFailed | errors.P2PStoreError | ValueError):
        text = str(error) or type(error).__name__
        if isinstance(error, errors.DeadlineExceeded) and "--timeout" not in text:
            text += " (a longer --timeout waits longer)"
    elif isinstance(error, OSError):
        text = _describe_os_error(error)
    elif isinstance(error, MemoryError):
        text = "out of memory"
    else:
        text = (
            f"unexpected {type(error).__name__}: {error}; "
            "`mooncake-p2p --debug COMMAND ...` shows where, please report it"
        )
    return printable(" ".join(text.split()))


def error_document(error: BaseException, message: str) -> dict[str, Any]:
    """The error of any command under `error` of `--json`: `type`, which is a class of
    `p2pstore.errors`, of Python's `OSError` or one of the words below, `message` as on stderr, and the exit
    status."""
    if isinstance(error, AlreadyTold):
        error = error.cause
    status = exit_code(error)
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        kind = "Interrupted"
    elif isinstance(error, SystemExit):
        kind = "Terminated"
    elif status == ExitCode.USAGE and not isinstance(error, errors.P2PStoreError):
        kind = "UsageError"
    return {"type": kind, "message": message, "status": int(status)}


def _describe_os_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    text = f"{error.filename}: {reason}" if error.filename else reason
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and "free some space" not in reason:
        text += "; free some space or choose another place"
    return text


ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, Ctrl-C, SIGTERM and SIGHUP end what runs inside `allowed`, and only that.

    Elsewhere (starting a process, cleaning up) a signal is remembered, and raised at the next place
    that allows it: `KeyboardInterrupt` for Ctrl-C, `SystemExit` with status 128 + n for others.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        self._previous = {each: signal.signal(each, self._handle) for each in ENDING_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is None:
            self._raise_pending()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
        if self._allowed:
            self._raise_pending()

    def _raise_pending(self) -> None:
        number, self._pending = self._pending, None
        if number is None:
            return
        self._allowed = False  # cleaning up is not interrupted again
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Signals may interrupt the body."""
        self._allowed = True
        try:
            self._raise_pending()
            yield
        finally:
            self._allowed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside `allowed`: signals wait until the end of the body."""
        self._allowed = False
        yield
        self._allowed = True
        self._raise_pending()
