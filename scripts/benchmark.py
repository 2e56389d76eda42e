"""What the benchmarks share: rows with their baseline, a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_p2p.measuring import machine as machine


@dataclass
class Row:
    """One figure. `against` names what it was compared with in the same run; `ratio` is value / baseline."""

    name: str
    value: float
    unit: str
    against: str = ""
    baseline: float | None = None
    ratio: float | None = None
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
        """Add a figure; `wanted` says what it should be, for the reader."""
        ratio = value / baseline if baseline else None
        row = Row(name, value, unit, against, baseline, ratio, wanted)
        self.rows.append(row)
        print(f"  {name}: {_number(value)} {unit}", file=sys.stderr, flush=True)
        return row

    def print(self) -> None:
        """The table."""
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

    def write(self, path: str) -> None:
        """The JSON document."""
        document = {"results": [asdict(row) for row in self.rows], "machine": machine()}
        Path(path).write_text(json.dumps(document, indent=2) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def arguments(description: str, parts: Sequence[str] = ()) -> argparse.Namespace:
    """`--quick` and `--json FILE`, as every benchmark takes them; `--only` for one that has such parts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    if parts:
        parser.add_argument("--only", choices=parts, help="measure only this part")
    return parser.parse_args()


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
    """`paired_times` for what is awaited."""
    one: list[float] = []
    other: list[float] = []
    for number in range(repeats + warm_up):
        for action, taken in ((first, one), (second, other)):
            start = time.perf_counter()
            await action()
            if number >= warm_up:
                taken.append(time.perf_counter() - start)
    return statistics.median(one), statistics.median(other)
