"""What the benchmarks share: rows with their baseline, a table for people, JSON for programs; peers and
plain servers in processes of their own."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import trio

from mooncake_p2p.commands.bench import Result
from mooncake_p2p.commands.bench import machine as machine
from p2pstore.local.peer_processes import PeerProcess
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.streams import tune_tcp

STOP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Row(Result):
    """One figure; `wanted` says what it should be, for the reader."""

    wanted: str = ""


class Report:
    """Collects rows; prints the table and writes the JSON."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        against: str = "",
        baseline: float | None = None,
        wanted: str = "",
    ) -> Row:
        ratio = value / baseline if baseline else None
        row = Row(name, value, unit, against, baseline, ratio, wanted)
        self.rows.append(row)
        print(f"  {name}: {_number(value)} {unit}", file=sys.stderr, flush=True)
        return row

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        for heading, justify in (
            ("what", "left"),
            ("value", "right"),
            ("against", "left"),
            ("baseline", "right"),
            ("ratio", "right"),
            ("wanted", "left"),
        ):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # literals
        for row in self.rows:
            table.add_row(
                row.name,
                f"{_number(row.value)} {row.unit}",
                row.against,
                "" if row.baseline is None else f"{_number(row.baseline)} {row.unit}",
                "" if row.ratio is None else f"{row.ratio:.2f}",
                row.wanted,
            )
        Console(width=max(100, Console().width)).print(table)

    def markdown(self) -> str:
        """A table for docs/measurements.md: one row a figure, one column for each system that was compared."""
        named: dict[str, list[Row]] = {}
        for row in self.rows:
            named.setdefault(row.name, []).append(row)
        others = list(dict.fromkeys(row.against for row in self.rows if row.baseline is not None))
        lines = [
            f"| operation | {' | '.join(['p2pstore', *others])} |",
            "|---" * (2 + len(others)) + "|",
        ]
        for name, rows in named.items():
            beside = {row.against: row.baseline for row in rows if row.baseline is not None}
            values = [rows[0].value, *map(beside.get, others)]
            cells = ["" if each is None else f"{_number(each)} {rows[0].unit}" for each in values]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def draw(self, path: str) -> None:
        """A picture: a bar for each row that has a baseline, value / baseline, with what is wanted beside."""
        try:
            import matplotlib
        except ImportError:
            sys.exit("--plot needs matplotlib, which scripts/setup installs")
        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = [row for row in reversed(self.rows) if row.ratio is not None]
        figure, axis = pyplot.subplots(figsize=(12, 1 + 0.35 * len(rows)), layout="constrained")
        bars = axis.barh(
            [f"{row.name} ({row.unit}) / {row.against}" for row in rows],
            [row.ratio or 0.0 for row in rows],
        )
        wanted = [f"   wanted {row.wanted}" if row.wanted else "" for row in rows]
        labels = [f"{row.ratio:.2f}{each}" for row, each in zip(rows, wanted, strict=True)]
        axis.bar_label(bars, labels, padding=3)
        axis.axvline(1.0, color="grey", linewidth=0.8)
        axis.set(title=self.title, xlabel="value / baseline", xscale="log")
        axis.margins(x=0.6)
        figure.savefig(path, dpi=100)
        pyplot.close(figure)

    def write(self, path: str) -> None:
        document = {"results": [asdict(row) for row in self.rows], "machine": machine()}
        Path(path).write_text(json.dumps(document, indent=2) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size_text(size: int) -> str:
    """`4 KiB` and the like, for round sizes."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def arguments(description: str, parts: Sequence[str] = ()) -> argparse.Namespace:
    """`--quick` and `--json FILE`, as every benchmark takes them; `--only` for one that has such parts."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    if parts:
        parser.add_argument("--only", choices=parts, help="measure only this part")
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repeats; under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")


def add_cores_apart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores-apart",
        action="store_true",
        help="holders on one half of the cores and readers on the other, as if on machines of their own, "
        "for all that is compared",
    )


class Cores:
    """Which cores the two ends of a read may use. `apart`: this process, and what it starts, one half of them; what
    is started within `holder`, the other."""

    def __init__(self, *, apart: bool) -> None:
        every = sorted(os.sched_getaffinity(0))
        if apart and len(every) < 2:
            sys.exit("--cores-apart needs two cores")
        half = len(every) // 2
        self._holders = every[:half] if apart else every
        self._readers = every[half:] if apart else every
        os.sched_setaffinity(0, self._readers)

    @contextmanager
    def holder(self) -> Iterator[None]:
        """What this thread starts meanwhile is on a holder's side."""
        os.sched_setaffinity(0, self._holders)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._readers)


def cpu_seconds(process: int) -> float:
    """CPU time that a process of this machine used so far, all of its threads together."""
    return time.clock_gettime(~process << 3 | 2)  # the id that the kernel gives the clock of a process


def times(action: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each run of `action`, after `warm_up` uncounted ones."""
    for _ in range(warm_up):
        action()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken


def paired_times(
    first: Callable[[], object], second: Callable[[], object], repeats: int, warm_up: int = 2
) -> tuple[float, float]:
    """Medians of two actions run in turn, so that a machine whose speed drifts treats both alike."""
    one: list[float] = []
    other: list[float] = []
    for number in range(repeats + warm_up):
        for action, taken in ((first, one), (second, other)):
            start = time.perf_counter()
            action()
            if number >= warm_up:
                taken.append(time.perf_counter() - start)
    return statistics.median(one), statistics.median(other)


async def paired_times_async(
    first: Callable[[], Awaitable[object]],
    second: Callable[[], Awaitable[object]],
    repeats: int,
    warm_up: int = 2,
) -> tuple[float, float]:
    one: list[float] = []
    other: list[float] = []
    for number in range(repeats + warm_up):
        for action, taken in ((first, one), (second, other)):
            start = time.perf_counter()
            await action()
            if number >= warm_up:
                taken.append(time.perf_counter() - start)
    return statistics.median(one), statistics.median(other)


@contextmanager
def peer(folder: Path, name: str, *options: str) -> Iterator[dict[str, object]]:
    """A peer process; yields its `ready` document with its `pid`."""
    process = PeerProcess(folder, name)
    listen = [] if "--listen" in options else ["--listen", "127.0.0.1:0"]
    process.start(["--name", name, *listen, "--log-level", "warning", *options])
    try:
        process.wait_until_ready()
        yield {**process.ready, "pid": process.process_id}
    finally:
        process.end()
        process.reap(time.monotonic() + STOP_SECONDS)


@contextmanager
def child(serve: Callable[[], None]) -> Iterator[int]:
    """`serve` in a forked process; yields its number."""
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def plain_sockets(size: int, count: int, cores: Cores) -> Iterator[Callable[[memoryview], None]]:
    """Ask another process for `size` bytes over a kept TCP connection with blocking sockets: for one after the other of
    `count` values, since what was sent just now is in the processor's cache."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        payload = np.ones(size * count, np.uint8).data
        connection, _ = listener.accept()
        tune_tcp(connection)
        values = itertools.cycle(range(0, size * count, size))
        while connection.recv(1):
            first = next(values)
            for start in range(first, first + size, MIB):
                connection.sendall(payload[start : start + MIB])

    with ExitStack() as stack:
        with cores.holder():
            stack.enter_context(child(serve))
        listener.close()
        client = socket.create_connection(("127.0.0.1", port))
        tune_tcp(client)

        def fetch(into: memoryview) -> None:
            client.sendall(b"x")
            position = 0
            while position < size:
                position += client.recv_into(into[position : position + MIB])

        yield fetch
        client.close()


QUESTION = bytes(35)
ANSWER = bytes(20)
"""What goes to and fro for one `contains`: the bytes of both frames."""


def echo_blocking(listener: socket.socket) -> None:
    """Answer one client, with blocking sockets."""
    connection, _ = listener.accept()
    while connection.recv(64):
        connection.sendall(ANSWER)


def echo_trio(listener: socket.socket) -> None:
    """Answer one client in a trio loop, with trio's own sockets."""

    async def serve() -> None:
        connection, _ = await trio.socket.from_stdlib_socket(listener).accept()
        while await connection.recv(64):
            await connection.send(ANSWER)

    trio.run(serve)


def echo_bare_trio(listener: socket.socket) -> None:
    """Answer one client with the least that a trio loop can do: wait, receive, send."""

    async def serve() -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        while True:
            await trio.lowlevel.wait_readable(connection.fileno())
            if not connection.recv(64):
                return
            connection.send(ANSWER)

    trio.run(serve)


@contextmanager
def unix_socket_to(folder: Path, echo: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """A connection over AF_UNIX to another process that answers as `echo` does."""
    path = str(folder / f"{echo.__name__}.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    with child(lambda: echo(listener)):
        listener.close()
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        os.unlink(path)
        with client:
            yield client


@contextmanager
def unix_ping_pong(
    folder: Path, echo: Callable[[socket.socket], None]
) -> Iterator[Callable[[], object]]:
    """A round trip of a blocking client to another process over AF_UNIX, with as many bytes as a `contains`."""
    with unix_socket_to(folder, echo) as client:

        def ping() -> None:
            client.sendall(QUESTION)
            client.recv(64)

        yield ping
