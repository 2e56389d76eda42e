"""The figures that `scripts/simulate --measure` takes: which there are, taking one, table and picture."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from p2pstore.trace.one_cache import read_requests
from simulation.measures.figures import Case, Curve, Measured

FETCH_CHOICE = "fetch-choice"
NAMES = (
    "spread",
    "crash",
    "false-deaths",
    "heal",
    "bandwidth",
    "partitioned",
    "memory",
    "restart",
    FETCH_CHOICE,
)


@dataclass(slots=True)
class Taken:
    """One measure at one size."""

    name: str
    peers: int
    part: str
    seconds: float
    """Of this machine's time."""
    peak_bytes: int
    """The most memory that was resident in the process that took it, and others before."""
    measured: Measured


def cases(
    names: Sequence[str], peers: int | None, part: str | None, seed: int, quick: bool
) -> list[tuple[str, Case]]:
    """What to take: every size that a figure is about, or only `peers`, and every part, or only `part`; the largest
    first."""
    chosen = [
        (name, Case(size, seed, quick, each))
        for name in names
        for size in ((peers,) if peers else _sizes(name, quick))
        for each in parts(name)
        if part in (None, each)
    ]
    return sorted(chosen, key=lambda each: each[1].peers, reverse=True)


def parts(name: str) -> tuple[str, ...]:
    """What of a measure can be taken apart from the rest; one nameless part where nothing can."""
    return tuple(getattr(_module(name), "PARTS", ("",)))


def parts_of(measure: str) -> list[str]:
    return list(dict.fromkeys(part for name in names_of(measure) for part in parts(name)))


def names_of(measure: str) -> tuple[str, ...]:
    """One measure, or `all`: without the one that needs a trace, where P2PSTORE_TRACE names none."""
    if measure != "all":
        return (measure,)
    return NAMES if os.environ.get("P2PSTORE_TRACE") else NAMES[:-1]


def _sizes(name: str, quick: bool) -> tuple[int, ...]:
    module = _module(name)
    sizes: tuple[int, ...] = getattr(module, "QUICK_SIZES", module.SIZES) if quick else module.SIZES
    return sizes


def take(name: str, case: Case) -> Taken:
    begin = time.perf_counter()
    if name == FETCH_CHOICE:
        with Path(os.environ["P2PSTORE_TRACE"]).open("rb") as lines:
            case = replace(case, requests=list(read_requests(lines)))
    measured = _module(name).measure(replace(case, resident_bytes=resident_bytes))
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Taken(name, case.peers, case.part, time.perf_counter() - begin, peak_bytes, measured)


def resident_bytes() -> int:
    """Of this process, as Linux counts it, without what the allocator keeps though nobody uses it: simulated peers that
    come and go leave up to half as much of that behind, now more, now less."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _module(name: str) -> ModuleType:
    """They all have `SIZES` and `measure`, some fewer or smaller `QUICK_SIZES`, and some `PARTS`."""
    return import_module(f"simulation.measures.{name.replace('-', '_')}")


def print_table(taken: Sequence[Taken], seconds: float) -> None:
    """All figures; what has to hold and does not is marked FAIL."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"figures of gossip in virtual time ({seconds:.0f} s)")
    for heading, justify in (("figure", "left"), ("value", "right"), ("wanted", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # literals
    for each in taken:
        for figure in each.measured.figures:
            verdict = "" if figure.limit is None else "pass" if figure.holds else "FAIL"
            value = f"{figure.value:,.0f}" if abs(figure.value) >= 1000 else f"{figure.value:.3g}"
            table.add_row(figure.name, f"{value} {figure.unit}", figure.wanted, verdict)
    Console(width=max(120, Console().width)).print(table)


def plot(taken: Sequence[Taken], path: str) -> None:
    """A picture of the curves: one plot for each title, by size and loss. Ends the program without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("simulate: --plot needs matplotlib, which scripts/setup installs with the tests' tools")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles: dict[str, dict[str, Curve]] = {}
    for each in taken:
        for title, curves in each.measured.curves.items():
            titles.setdefault(title, {}).update(curves)
    if not titles:
        sys.exit("simulate: these figures have no course over time to show")
    figure, axes = pyplot.subplots(
        len(titles), 1, figsize=(9, 4.5 * len(titles)), squeeze=False, layout="constrained"
    )
    for (title, curves), axis in zip(titles.items(), axes[:, 0], strict=True):
        for label, points in curves.items():
            axis.step([x for x, _ in points], [y for _, y in points], where="post", label=label)
        axis.set(title=title, xlabel="virtual seconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
