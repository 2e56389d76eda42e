"""What commands print: results as JSON or tables on stdout, remarks and progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from p2pstore.objects import MIB, format_bytes

PROGRESS_AFTER_SECONDS: Final = 1.0
PIPE_COLUMNS: Final = 10_000  # nothing is folded for a program that reads


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2 if sys.stdout.isatty() else None))


def remark(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)


def printable(text: str) -> str:
    """Text of strangers (keys, names) with control characters made visible, for a terminal."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def format_rate(length_bytes: int, seconds: float) -> str:
    """Bytes per second in the unit that suits, such as `6.02 GB/s`."""
    rate = length_bytes / max(seconds, 1e-9)
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def format_transfer(length_bytes: int, seconds: float) -> str:
    """How much was moved, how long it took and, where the size tells that, how fast."""
    duration = f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
    rate = f" ({format_rate(length_bytes, seconds)})" if length_bytes >= MIB else ""
    return f"{format_bytes(length_bytes)} in {duration}{rate}"


def short_id(peer_id: str) -> str:
    """The end of a peer id: all of them begin alike."""
    return f"..{peer_id[-8:]}"


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
) -> None:
    """Columns under headers; those named in `right` align right.

    On a terminal that is too narrow the first column and those named in `fold` take several lines.
    Into a pipe, every row is one line.
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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(
            header,
            justify="right" if header in right else "left",
            overflow="fold",
            no_wrap=number > 0 and header not in fold,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


class Advance(Protocol):
    """Says that so many more bytes are done."""

    def __call__(self, count: int, /) -> None: ...


@contextmanager
def progress(label: str, total_bytes: int | None = None) -> Iterator[Advance]:
    """A progress bar on stderr for what takes over a second; nothing when stderr is no terminal.

    Without a total, and as long as nothing advances, it only shows that work goes on, since when.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    bar = _Bar(label, total_bytes)
    timer = threading.Timer(PROGRESS_AFTER_SECONDS, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar.advance
    finally:
        timer.cancel()
        timer.join()
        bar.hide()


class _Bar:
    def __init__(self, label: str, total_bytes: int | None) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._bar: Any = None

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            FileSizeColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )

        columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(None)]
        if self._total is not None:
            columns += [DownloadColumn(), TransferSpeedColumn()]
        elif self._done:
            columns += [FileSizeColumn(), TransferSpeedColumn()]
        bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._task = bar.add_task(printable(self._label), total=self._total, completed=self._done)
        bar.start()
        self._bar = bar

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
