"""The figures of docs/figures, drawn from the tables of docs/measurements.md: run it after their numbers change.

Scalable vector graphics written by hand: neither a plotting library nor its fonts are needed, and the same numbers
always give the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FIGURES: Final = ROOT / "docs" / "figures"
MEASUREMENTS: Final = ROOT / "docs" / "measurements.md"
WIDTH: Final = 720
HEIGHT: Final = 360
LEFT: Final = 60
RIGHT: Final = 130
TOP: Final = 40
BOTTOM: Final = 50
COLOURS: Final = ("#0b6e99", "#d9730d", "#448361", "#9065b0")
GRID_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over named places: `series` has as many values as there are `places`, by name."""

    title: str
    unit: str
    places: Sequence[str]
    series: Mapping[str, Sequence[float]]
    note: str = ""


def draw(figure: Figure) -> str:
    top = _round_up(max(max(values) for values in figure.series.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 22, figure.title, size=15),
    ]
    for line in range(GRID_LINES + 1):
        value = top * line / GRID_LINES
        y = _y(value, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}{figure.unit}", anchor="end"))
    for index, place in enumerate(figure.places):
        x = _x(index, len(figure.places))
        parts.append(_text(x, HEIGHT - BOTTOM + 20, place, anchor="middle"))
    for values, colour in zip(figure.series.values(), COLOURS, strict=False):
        points = [(_x(index, len(figure.places)), _y(value, top)) for index, value in enumerate(values)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    for row, (name, colour) in enumerate(zip(figure.series, COLOURS, strict=False)):
        y = TOP + 16 + 20 * row
        parts.append(f'<path d="M{WIDTH - RIGHT + 10} {y}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y + 4, name))
    parts.append(_text(LEFT, HEIGHT - 10, figure.note, colour="#666"))
    return "\n".join([*parts, "</svg>", ""])


def figures(page: str) -> dict[str, Figure]:
    """By file name, with the numbers of docs/measurements.md. Raises `ValueError` when a row is not there."""
    sizes = ("1 MiB", "16 MiB", "64 MiB", "256 MiB")
    ratios = [_numbers(_row(page, f"get_into {size} |")[3]) for size in sizes]
    tcp = {name: [both[number] for both in ratios] for number, name in enumerate(("blocking", "trio"))}
    beside = [_row(page, f"remote, get_into {size} ") for size in sizes]
    stores = ("p2pstore", "Mooncake", "Redis", "plain sockets")
    rooms = _row(page, "room for blocks")[1:]
    policies = {name: _row(page, f"`{name}`") for name in ("lru", "s3-fifo")}
    policies["prefix"] = _row(page, "`prefix` (default)")
    p99 = [_numbers(cell)[0] for cell in _row(page, "spread of one put to 99 %, p99")[1:4]]
    median = [_numbers(cell)[0] for cell in _row(page, "the same, median")[1:4]]
    return {
        "reads.svg": Figure(
            "Reads of another process over TCP (p2pstore verifies every byte)",
            " GB/s",
            sizes,
            {
                name: [_numbers(row[number])[0] for row in beside]
                for number, name in enumerate(stores, start=1)
            },
            "scripts/bench_vs_mooncake, two cores, loopback, 2026-11-23",
        ),
        "tcp.svg": Figure(
            "Verified reads over TCP, as a share of plain sockets' rate",
            "",
            sizes,
            {**tcp, "plain sockets": [1.0] * len(sizes)},
            "scripts/bench_transfer, two cores, loopback",
        ),
        "hits.svg": Figure(
            "Hit rate in one cache, by room for blocks of 512 tokens",
            "",
            rooms,
            {
                name: [float(cell) for cell in policies[name][1:]]
                for name in ("prefix", "lru", "s3-fifo")
            },
            "conversation trace of the Mooncake paper, 12,031 requests",
        ),
        "spread.svg": Figure(
            "Until 99 % of peers know of a put",
            " s",
            ("10 peers", "100 peers", "1000 peers"),
            {"p99": p99, "median": median},
            "simulated, no loss; scripts/simulate",
        ),
    }


def write(folder: Path = FIGURES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(MEASUREMENTS.read_text(encoding="utf-8")).items():
        (folder / name).write_text(draw(figure), encoding="utf-8")


def _row(page: str, start: str) -> list[str]:
    found = re.search(rf"^\| {re.escape(start)}.*$", page, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/measurements.md has no row that begins with {start!r}")
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d*\.\d+", cell)]


def _round_up(value: float) -> float:
    steps = (0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.0, 4.0, 6.0)
    return next(step for step in steps if step >= value)


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, colour: str = "#222"
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    write()
