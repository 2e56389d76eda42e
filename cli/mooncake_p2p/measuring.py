"""Measuring: medians of an action and of a baseline in turns, and what they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

LEAST_SAMPLES: Final = 3
MOST_SAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `against` names what it was compared with in the same run; `ratio` is value / baseline."""

    name: str
    value: float
    unit: str
    against: str = ""
    baseline: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians of one operation in seconds; `length_bytes` is 0 for what moves nothing."""

    name: str
    length_bytes: int
    seconds: float
    against: str = ""
    baseline_seconds: float | None = None

    def results(self) -> Iterator[Result]:
        """The median in us and, for what moves bytes, GB/s."""
        base = self.baseline_seconds
        ratio = self.seconds / base if base else None
        scaled = None if base is None else base * 1e6
        yield Result(f"{self.name}, median", self.seconds * 1e6, "us", self.against, scaled, ratio)
        if self.length_bytes:
            rate = None if base is None else self.length_bytes / base / 1e9
            value = self.length_bytes / self.seconds / 1e9
            faster = value / rate if rate else None
            yield Result(f"{self.name}, rate", value, "GB/s", self.against, rate, faster)


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action took."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def medians_in_turns(
    action: Callable[[], float], baseline: Callable[[], float], seconds: float
) -> tuple[float, float]:
    """Medians of what both return, called in turns for `seconds`, at least three times each. The first
    turn, in which memory is touched for the first time, does not count."""
    action(), baseline()
    end = time.monotonic() + seconds
    own: list[float] = []
    plain: list[float] = []
    while len(own) < LEAST_SAMPLES or (time.monotonic() < end and len(own) < MOST_SAMPLES):
        own.append(action())
        plain.append(baseline())
    return statistics.median(own), statistics.median(plain)


def document(figures: list[Figure]) -> dict[str, Any]:
    """What `--json` prints: the shape of the scripts' files."""
    results = [asdict(result) for figure in figures for result in figure.results()]
    return {"results": results, "machine": machine()}


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }
