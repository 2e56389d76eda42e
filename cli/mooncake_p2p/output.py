"""Output of commands: results as JSON or tables on stdout, remarks and progress on stderr; and how a command ends: exit
statuses, errors as one line of plain words, and signals.

The statuses are part of the command line's interface; scripts rely on them. A broken pipe (the reader of stdout went
away) ends a command quietly with status 1. Ctrl-C ends it with 130 and SIGTERM with 143, as shells expect; `join`
leaves the cluster on either and ends with 0.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from p2pstore import errors
from p2pstore.errors import NoSuchKey
from p2pstore.objects import MIB, counted, format_bytes
from p2pstore.objects import printable as printable

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import PutResult

PROGRESS_AFTER_SECONDS: Final = 1.0
RATE_AFTER_SECONDS: Final = 0.2
FOLDED_COLUMNS: Final = 8
"""A column that is folded gets no narrower."""
PIPE_COLUMNS: Final = 10_000  # nothing is folded for a program that reads
T = TypeVar("T")
STANDARD_OUTPUT: Final = "standard output"
"""The name of stdout in errors."""
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JsonOutput:
    """The output of `--json` on stdout: one document when the command ends, with `error` in it when it failed. A
    command that looks again and again prints a line each time, too."""

    def __init__(self) -> None:
        self._document: Any = None
        self._has_lines = False

    def begin(self) -> None:
        self._document, self._has_lines = None, False

    def end(self, error: dict[str, Any] | None = None, *, stopped: bool = False) -> None:
        """Print the document, if there is one, or an error. `stopped`: by the user, so printed lines need no error."""
        document = self._document
        if error is not None:
            if stopped and self._has_lines:
                return
            document = {**(document if isinstance(document, dict) else {}), "error": error}
        if document is not None:
            print(json.dumps(document, indent=2 if sys.stdout.isatty() else None))

    def line(self, document: Any) -> None:
        """Print this now, in one line."""
        self._has_lines = True
        print(json.dumps(document), flush=True)

    def keep(self, document: Any) -> None:
        """Print this when the command ends."""
        self._document = document


json_output: Final = JsonOutput()
print_json: Final = json_output.keep
print_json_line: Final = json_output.line


def remark(text: str) -> None:
    print(text, file=sys.stderr)


def end_with(failures: Mapping[str, Exception]) -> None:
    """Say on stderr what went wrong with each key. Raises `AlreadyTold` of the first failure, where a key that is
    missing counts only beside no other; returns when there is none."""
    for key, error in failures.items():
        missing = isinstance(error, NoSuchKey)
        remark(f"error: {describe(error)}" if missing else f"error: {printable(key)}: {describe(error)}")
    serious = [each for each in failures.values() if not isinstance(each, NoSuchKey)]
    for each in (serious or list(failures.values()))[:1]:
        raise AlreadyTold(each)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only with --yes, or when the user at the terminal agrees. Raises `CommandFailed`."""
    if yes:
        return
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandFailed(f"{question} No terminal to ask at: add --yes", ExitCode.USAGE)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("nothing was removed")


def format_rate(length_bytes: int, seconds: float) -> str:
    """Bytes per second in the unit that suits, such as `6.02 GB/s`."""
    rate = length_bytes / max(seconds, 1e-9)
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def format_seconds(seconds: float) -> str:
    """A short time, precisely: `12.3 ms` or `1.23 s`."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_duration(seconds: float) -> str:
    """A length of time in the unit that suits: `5.2 s`, `70 s`, `12 min`, `3 h` or `4 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def format_transfer(length_bytes: int, seconds: float) -> str:
    """How much was moved, how long it took and, where the size tells that, how fast."""
    rate = f" ({format_rate(length_bytes, seconds)})" if length_bytes >= MIB else ""
    return f"{format_bytes(length_bytes)} in {format_seconds(seconds)}{rate}"


def short_id(peer_id: str) -> str:
    """The end of a peer id: all of them begin alike."""
    return f"..{peer_id[-8:]}"


Columns = Mapping[str, Callable[[T], str]]
"""Header -> the cell of an item. A header that begins with > aligns right, one that begins with ~ may be folded."""


def cells(items: Iterable[T], columns: Columns[T]) -> list[list[str]]:
    """The headers, and the cells of each item."""
    return [[header.lstrip(">~") for header in columns]] + [
        [printable(cell(each)) for cell in columns.values()] for each in items
    ]


def print_table(items: Iterable[T], columns: Columns[T]) -> None:
    """A line for each item under headers.

    On a terminal that is too narrow the first column and those marked by ~ take several lines. On one in which that
    is not enough, and into a pipe, no text is cut or folded.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(
        markup=False,
        highlight=False,
        soft_wrap=False,
        width=None if sys.stdout.isatty() else PIPE_COLUMNS,
    )
    rows = cells(items, columns)
    foldable = [number == 0 or header.startswith("~") for number, header in enumerate(columns)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = sum(
        min(width, FOLDED_COLUMNS) if folds else width
        for width, folds in zip(widths, foldable, strict=True)
    )
    if least + 2 * len(columns) > console.width:
        console.width = PIPE_COLUMNS
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header, mark, folds in zip(rows[0], columns, foldable, strict=True):
        align: Any = "right" if mark.startswith(">") else "left"
        table.add_column(header, justify=align, overflow="fold", no_wrap=not folds)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def progress(
    label: str, total_bytes: int | None = None, *, after_seconds: float = PROGRESS_AFTER_SECONDS
) -> Iterator[ProgressBar]:
    """A progress bar on stderr for what takes over `after_seconds`; nothing when stderr is no terminal.

    Without a total, and as long as nothing advances, it only shows that work goes on, since when.
    """
    bar = ProgressBar(label, total_bytes, shown=sys.stderr.isatty())
    if not bar.shown:
        yield bar
        return
    timer = threading.Timer(after_seconds, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        bar.hide()


class ProgressBar:
    """The progress of some work. `shown`: stderr is a terminal."""

    def __init__(self, label: str, total_bytes: int | None, *, shown: bool) -> None:
        self.shown = shown
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._began = self._since = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Any = None

    def advance(self, count: int) -> None:
        self.at(self._done + count, self._total)

    def at(self, done_bytes: int, total_bytes: int | None) -> None:
        """`done_bytes` of `total_bytes` are done; a lower value than before means that the work starts over."""
        if not self.shown:
            return
        with self._lock:
            if not self._done or done_bytes < self._done:
                self._since = time.monotonic()
            self._done, self._total = done_bytes, total_bytes
            if self._bar is not None:
                self._update()

    def relabel(self, label: str) -> None:
        """The work goes on with something else."""
        with self._lock:
            self._label = label
            if self._bar is not None:
                self._update()

    def _update(self) -> None:
        facts = format_progress(self._done, self._total, time.monotonic() - self._since)
        self._bar.update(
            self._task,
            description=printable(self._label),
            total=self._total,
            completed=self._done,
            facts=facts,
        )

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        with self._lock:
            self._task = bar.add_task("", total=self._total, facts="")
            bar.tasks[0].start_time = bar.get_time() - (time.monotonic() - self._began)
            self._bar = bar
            self._update()
        bar.start()

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def format_progress(done_bytes: int, total_bytes: int | None, seconds: float) -> str:
    """How far, how fast and how much longer: `1.2 GiB of 4.0 GiB, 812.00 MB/s, 4 s left`."""
    if not done_bytes:
        return ""
    if total_bytes is None:
        return f"{format_bytes(done_bytes)}, {format_rate(done_bytes, seconds)}"
    text = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    if done_bytes >= total_bytes or seconds < RATE_AFTER_SECONDS:
        return text
    left_seconds = (total_bytes - done_bytes) * seconds / done_bytes
    return f"{text}, {format_rate(done_bytes, seconds)}, {left_seconds:.0f} s left"


def shortfall(client: BlockingClient, result: PutResult) -> str:
    """How many of the wanted copies there are, and why no more; empty where there are all."""
    if result.copies >= result.wanted:
        return ""
    members = client.peers()
    holding = [member for member in members if member.memory_capacity > 0]
    peers = counted(len(members), "peer")
    if result.copies < len(holding):
        why = "no other peer has room for it; more are made when one has"
    elif len(holding) < len(members):
        why = f"{len(holding):,} of the cluster's {peers} offer memory"
    else:
        why = f"the cluster has {peers}"
    return f"{result.copies:,} of {result.wanted:,} copies: {why}"


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
