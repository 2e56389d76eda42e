"""`stats`, `peers` and `leave`: this peer and the cluster around it.

`stats --watch`: reads the statistics again and again, and shows what changed.

On a terminal it draws on the alternate screen, which the terminal puts away at the end whatever happened
on it meanwhile: resizing, scrolling, Ctrl-C. The last picture is then printed once more, to stay."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Socket,
    Timeout,
    connected,
    flag,
    option,
    parse_timeout,
    was_given,
)
from mooncake_p2p.output import (
    Columns,
    ProgressBar,
    describe,
    format_seconds,
    print_json,
    print_json_line,
    print_table,
    progress,
    remark,
    short_id,
)
from mooncake_p2p.statistics_view import Activity, Reading, clip, draws_blocks, overview, rates
from p2pstore.errors import DeadlineExceeded, NoLocalPeer, StoreClosed
from p2pstore.objects import counted, format_bytes, parse_duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from p2pstore.blocking import BlockingClient
    from p2pstore.results import PeerInfo

DEFAULT_INTERVAL: Final = "1"
KNOWN_PART: Final = {"full": "all", "partitioned": "a part"}
MIN_INTERVAL_SECONDS: Final = 0.1
FAREWELL_SECONDS: Final = 5.0
"""Time that a peer may need beside draining: to tell the others, and to save its state."""
LOOK_SECONDS: Final = 0.05
GONE = (NoLocalPeer, StoreClosed, DeadlineExceeded)
"""Errors of a peer that ended, was stopped or is being restarted."""


def stats(
    watch: Annotated[bool, flag("--watch", "Show rates, again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        str, option("SECONDS", "Time between two readings of --watch.")
    ] = DEFAULT_INTERVAL,
    slow: Annotated[bool, flag("--slow", "Recent slow operations, and where their time went.")] = False,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Show this peer and the cluster.

    Memory, objects, puts and gets, the share of gets that found their key, bytes by transport, and
    the members of the cluster with what they hold. "in" is what this peer and the clients on this
    machine read from other peers, "out" what other peers and their clients read from this one over
    the network; reads through shared memory cost this peer nothing, and it does not see them.

    --watch adds rates and looks again every --interval. On a terminal it keeps trying when the peer
    is gone; into a pipe it prints one block per interval (with --json one line of JSON, with rates),
    and ends with status 4 when the peer is gone.

    --slow lists up to 128 requests of clients that took long (see --slow-operation of join) with
    the time spent waiting, asking other peers and pulling bytes, and from whom by which transport.
    A key is shown by its digest where the peer does not know its text.
    """
    if watch and slow:
        raise ValueError("--watch and --slow: choose one")
    interval_seconds = parse_timeout(interval, "--interval")
    if interval_seconds < MIN_INTERVAL_SECONDS:
        raise ValueError(f"--interval: {interval!r} is below {MIN_INTERVAL_SECONDS:g} seconds")
    if was_given("interval") and not watch:
        raise ValueError("--interval is for --watch: add it, or leave --interval out")
    if watch:
        watch_statistics(socket, timeout, interval_seconds, as_json=json)
        return
    from mooncake_p2p.statistics_view import draws_blocks, overview, slow_lines

    with connected(socket, timeout=timeout) as client:
        document = client.statistics()
    shown = document["peer"]["slow"] if slow else document
    if json:
        print_json(shown)
        return
    lines = slow_lines(shown) if slow else overview(shown, None, blocks=draws_blocks(sys.stdout))
    print("\n".join(lines))


def peers(
    everyone: Annotated[
        bool, flag("--all", "Also those that died or left within the last 24 hours.")
    ] = False,
    reads: Annotated[bool, flag("--reads", "Reads from them: objects, bytes and latencies.")] = False,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """List the members of the cluster, as the local peer sees them.

    With --all, STATUS is dead for members that ended without notice or cannot be reached, and left for
    those that left on purpose; both are forgotten after 24 hours.

    RTT is the shortest of the last pings, HEARD how long ago something came from the member itself.
    LOAD is what its process takes of a core, or its large answers of its upload slots, as it said last.
    KNOWS is shown when some know only a part of where objects are (join --directory).
    READ BY names the transports by which this peer and its clients read from it, with the reads
    that failed.

    --reads shows these reads, by member and transport: objects, bytes, and the time of a read at the
    50th and 99th percentile (to within a factor of two; reads in batches are not timed).
    """
    with connected(socket, timeout=timeout) as client:
        members = client.peers(everyone=everyone)
    if json:
        # JSON has no infinity: null where nothing was heard from the member itself
        print_json(
            [asdict(each) | {"heard_seconds_ago": _finite(each.heard_seconds_ago)} for each in members]
        )
        return
    if reads:
        _print_reads(members)
        return
    from mooncake_p2p.statistics_view import ago, share

    def round_trip(member: PeerInfo) -> str:
        seconds = member.round_trip_seconds
        if seconds is None:
            return "-"
        return f"{1000 * seconds:.0f} ms" if 0.01 <= seconds < 1 else format_seconds(seconds)

    columns: Columns[PeerInfo] = {
        "NAME": lambda member: member.name,
        "STATUS": lambda member: "leaving" if member.leaving else member.status,
        ">RTT": round_trip,
        ">HEARD": lambda member: "me" if member.me else ago(_finite(member.heard_seconds_ago)),
        ">USED": lambda member: share(member.memory_used, member.memory_capacity).partition(" of")[0],
        ">LOAD": lambda member: f"{100 * member.load:.0f} %",
        "KNOWS": lambda member: KNOWN_PART.get(member.directory, "-"),
        "~CONTROL": lambda member: ", ".join(member.control),
        "~READ BY": _read_by,
        "PEER ID": lambda member: short_id(member.peer_id),
    }
    if all(member.directory != "partitioned" for member in members):
        columns = {header: cell for header, cell in columns.items() if header != "KNOWS"}
    print_table(members, columns)


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _read_by(member: PeerInfo) -> str:
    return (
        ", ".join(
            f"{name} ({use['failures']:,} failed)" if use["failures"] else name
            for name, use in member.transports.items()
        )
        or "-"
    )


def _print_reads(members: Sequence[PeerInfo]) -> None:
    def took(microseconds: int) -> str:
        return format_seconds(microseconds / 1e6) if microseconds else "-"

    print_table(
        [(member, name, use) for member in members for name, use in member.transports.items()],
        {
            "NAME": lambda each: each[0].name,
            "TRANSPORT": lambda each: each[1],
            ">OBJECTS": lambda each: f"{each[2]['objects']:,}",
            ">BYTES": lambda each: format_bytes(each[2]["bytes"]),
            ">P50": lambda each: took(each[2]["median_microseconds"]),
            ">P99": lambda each: took(each[2]["p99_microseconds"]),
            ">FAILED": lambda each: f"{each[2]['failures']:,}",
            "PEER ID": lambda each: short_id(each[0].peer_id),
        },
    )


def leave(
    drain: Annotated[str, option("SECONDS|60s", "How long it may take to leave.")] = "60s",
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Make the local peer leave the cluster and end. Returns when it has left.

    Objects that only this peer holds are handed over to others first, in at most --drain: pinned objects,
    then those that are asked for most; to peers that have memory free, else to others, which make
    room for it. With an SSD, memory is written to it meanwhile. --drain 0 hands over nothing.
    """
    drain_seconds = parse_duration(drain, "--drain")
    with connected(socket, timeout=timeout) as client, progress("leaving") as bar:
        client.leave(drain=drain_seconds)
        seconds = drain_seconds + FAREWELL_SECONDS + parse_timeout(timeout)
        handed = _wait_until_gone(client, seconds, bar)
    if json:
        print_json(
            {
                "left": True,
                "handed_over": {"objects": handed["objects"], "bytes": handed["bytes"]},
                "left_behind": {"objects": handed["left_objects"], "bytes": handed["left_bytes"]},
            }
        )
    else:
        remark(f"the peer left the cluster{_left_behind(handed)}")


def _left_behind(handed: dict[str, Any]) -> str:
    """Objects that only this peer held: handed over and left behind."""
    parts = [
        f"{counted(count, 'object')} ({format_bytes(size)}) {what}"
        for count, size, what in (
            (handed["objects"], handed["bytes"], "handed over"),
            (handed["left_objects"], handed["left_bytes"], "left behind"),
        )
        if count
    ]
    return f": {', '.join(parts)}" if parts else ""


def _wait_until_gone(client: BlockingClient, seconds: float, bar: ProgressBar) -> dict[str, Any]:
    """Wait until the peer lets go of its clients, which is the last thing it does. Returns its report of the hand-over:
    the peer waits until it was asked for the end of that."""
    deadline = time.monotonic() + seconds
    handed: dict[str, Any] = {"objects": 0, "bytes": 0, "left_objects": 0, "left_bytes": 0}
    while time.monotonic() < deadline:
        try:
            document = client.statistics(cluster=False)
        except StoreClosed:
            return handed
        handed = document["peer"].get("leaving", handed)
        bar.at(handed["bytes"], handed["bytes"] + handed["left_bytes"] or None)
        time.sleep(LOOK_SECONDS)
    raise DeadlineExceeded(
        f"the peer was asked to leave {seconds:.0f} s ago and is still there: see its log"
    )


Readings = Generator[tuple[Reading | None, Reading], None, None]
"""The previous reading and this one, again and again."""


def watch_statistics(
    socket: str | None, timeout: str, interval_seconds: float, *, as_json: bool
) -> None:
    """Show the statistics until Ctrl-C. Raises `NoLocalPeer` when no peer runs at the beginning and, unless
    a terminal shows the live view, also when it has gone."""
    if not as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        _live(socket, timeout, interval_seconds)
        return
    for before, reading in readings(socket, timeout, interval_seconds):
        rate = rates(before, reading)
        if as_json:
            _print_json_line(reading, rate)
        else:
            print("\n".join(overview(reading.document, rate)), end="\n\n")
        sys.stdout.flush()


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


def _print_json_line(reading: Reading, rate: Activity | None) -> None:
    document: dict[str, Any] = {
        **reading.document,
        "rates": rate.document() if rate is not None else None,
    }
    print_json_line(document)


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
    picture.before, picture.reading = next(stream)  # without a peer: an error, not a live view of it
    console = Console(markup=False, highlight=False)
    try:
        with Live(picture, console=console, screen=True, auto_refresh=True, refresh_per_second=4):
            _keep_looking(picture, stream, lambda: readings(socket, timeout, interval_seconds))
    finally:
        stream.close()
        print("\n".join(picture.lines(console.width)))
        if picture.problem:
            print(f"STALE, as of {picture.read_at}: {picture.problem}", file=sys.stderr)


def _keep_looking(picture: _Picture, stream: Readings, again: Callable[[], Readings]) -> None:
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
