"""`stats --watch`: reads the statistics again and again, and shows what changed.

On a terminal it draws on the alternate screen, which the terminal puts away at the end whatever happened
on it meanwhile: resizing, scrolling, Ctrl-C. The last picture is then printed once more, to stay.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from mooncake_p2p.exit_errors import describe
from mooncake_p2p.options import connected
from mooncake_p2p.output import print_json_line
from mooncake_p2p.statistics_view import Reading, clip, draws_blocks, overview, rates
from p2pstore.errors import DeadlineExceeded, NoLocalPeer, StoreClosed

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Readings = Generator[tuple[Reading | None, Reading], None, None]
"""The previous reading and this one, again and again."""
GONE = (NoLocalPeer, StoreClosed, DeadlineExceeded)
"""Errors of a peer that ended, was stopped or is being restarted."""


def watch(socket: str | None, timeout: str, interval_seconds: float, *, as_json: bool) -> None:
    """Show the statistics until Ctrl-C. Raises `NoLocalPeer` when no peer runs at the beginning and, unless
    a terminal shows the live view, also when it has gone."""
    if as_json:
        _each_interval(socket, timeout, interval_seconds, _print_json_line)
    elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        _live(socket, timeout, interval_seconds)
    else:
        _each_interval(socket, timeout, interval_seconds, _print_block)


def readings(socket: str | None, timeout: str, interval_seconds: float) -> Readings:
    """The previous reading and this one, every interval. Raises what asking the peer raises."""
    with connected(socket, timeout=timeout) as client:
        before = None
        due = time.monotonic()
        while True:
            reading = Reading(client.statistics(), time.monotonic())
            yield before, reading
            before = reading
            due = max(due + interval_seconds, time.monotonic())  # none is made up for
            time.sleep(due - time.monotonic() if due > time.monotonic() else 0.0)


def _each_interval(
    socket: str | None,
    timeout: str,
    interval_seconds: float,
    show: Callable[[Reading | None, Reading], None],
) -> None:
    for before, reading in readings(socket, timeout, interval_seconds):
        show(before, reading)
        sys.stdout.flush()


def _print_json_line(before: Reading | None, reading: Reading) -> None:
    rate = rates(before, reading)
    document: dict[str, Any] = {
        **reading.document,
        "rates": rate.document() if rate is not None else None,
    }
    print_json_line(document)


def _print_block(before: Reading | None, reading: Reading) -> None:
    print("\n".join(overview(reading.document, rates(before, reading))), end="\n\n")


class _Picture:
    """The picture of the live view; drawn anew for the terminal's size of the moment."""

    def __init__(self, interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self.blocks = draws_blocks(sys.stdout)  # asked before rich puts a stream of its own there
        self.before: Reading | None = None
        self.reading: Reading | None = None
        self.read_at = time.strftime("%H:%M:%S")
        self.problem = ""

    def lines(self, columns: int) -> list[str]:
        """As the whole picture would be, however many lines that is."""
        if self.reading is None:
            return []
        rate = rates(self.before, self.reading)
        return overview(self.reading.document, rate, columns=columns, blocks=self.blocks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = self.fitted(options.max_width, options.size.height)
        yield Text("\n".join(lines), no_wrap=True, overflow="crop", end="")

    def fitted(self, columns: int, height: int) -> list[str]:
        """The picture in `height` lines. Problems are never cut; lines left out are counted."""
        lines = self.lines(columns)
        footer = self._footer(columns, any(line.endswith("~") for line in lines))
        room = max(1, height - len(footer))
        if len(lines) > room:
            members = self._member_count()
            hidden = len(lines) - (room - 1)
            what = f"{hidden} more lines"
            if members > 0 and hidden <= members:
                what = f"{hidden} of {members} members"
            elif members:
                what += f", all {members} members among them"
            lines = [*lines[: room - 1], clip(f"({what}: enlarge the terminal)", columns)]
        return [*lines, *[""] * (room - len(lines)), *footer]

    def _footer(self, columns: int, is_cut: bool) -> list[str]:
        if self.problem:
            return textwrap.wrap(f"STALE, as of {self.read_at}: {self.problem}", max(10, columns))
        cut = "; ~: cut, widen the terminal" if is_cut else ""
        return [clip(f"every {self.interval_seconds:g} s; Ctrl-C ends{cut}", columns)]

    def _member_count(self) -> int:
        cluster = self.reading.document.get("cluster") if self.reading is not None else None
        return len(cluster["members"]) if cluster else 0


def _live(socket: str | None, timeout: str, interval_seconds: float) -> None:
    from rich.console import Console
    from rich.live import Live

    picture = _Picture(interval_seconds)
    stream = readings(socket, timeout, interval_seconds)
    picture.before, picture.reading = next(
        stream
    )  # without a peer: an error, not a live view of it
    console = Console(markup=False, highlight=False)
    try:
        with Live(picture, console=console, screen=True, auto_refresh=True, refresh_per_second=4):
            _keep_looking(picture, stream, lambda: readings(socket, timeout, interval_seconds))
    finally:
        stream.close()
        print("\n".join(picture.lines(console.width)))
        if picture.problem:
            print(f"STALE, as of {picture.read_at}: {picture.problem}", file=sys.stderr)


def _keep_looking(
    picture: _Picture,
    stream: Readings,
    again: Callable[[], Readings],
) -> None:
    """Until Ctrl-C: a peer that has gone may come back, so it is tried again every interval."""
    while True:
        try:
            for picture.before, picture.reading in stream:
                picture.read_at, picture.problem = time.strftime("%H:%M:%S"), ""
        except GONE as error:
            picture.before = picture.reading  # no rates without an answer
            picture.problem = f"no answer, trying again: {describe(error)}"
        time.sleep(picture.interval_seconds)
        stream = again()
