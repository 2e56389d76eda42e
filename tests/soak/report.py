"""The report of a soak, for people (Markdown and a picture) and for programs (JSON)."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from mooncake_p2p.commands.bench import machine
from p2pstore.objects import format_bytes
from tests.soak.flatness import SETTLED_SECONDS
from tests.soak.ledger import SPREAD_SECONDS
from tests.soak.peers import HOSTS, MEMORY, ROLES
from tests.soak.run import END_SECONDS, GROWTH_LIMITS, INVARIANTS, READY_SECONDS, SETTLE_SECONDS, Outcome

SHOWN: Final = 10
"""Of the complaints about one promise."""
PICTURE: Final = "soak.png"
_BUCKET_SECONDS: Final = 10.0


def verdict(outcome: Outcome) -> str:
    """One line."""
    seconds = outcome.ended - outcome.began
    what = (
        f"{len(ROLES)} peers, {seconds / 60:.1f} min, {sum(outcome.traffic.operations.values()):,} operations, "
        f"{len(outcome.done)} faults, seed {outcome.setting.seed}"
    )
    if not outcome.complaints:
        return f"passed: {what}; every promise was kept"
    broken = Counter(each.invariant for each in outcome.complaints)
    text = ", ".join(f"{name} ({count:,})" for name, count in broken.most_common())
    return f"FAILED: {what}; broken: {text}"


def document(outcome: Outcome) -> dict[str, Any]:
    """All of it, for programs. Times are seconds since the load began."""
    began, traffic = outcome.began, outcome.traffic
    return {
        "passed": not outcome.complaints,
        "verdict": verdict(outcome),
        "seed": outcome.setting.seed,
        "patience": outcome.setting.patience,
        "seconds": outcome.ended - began,
        "invariants": {
            name: {
                "checked": outcome.checked.get(name, 0),
                "broken": sum(each.invariant == name for each in outcome.complaints),
            }
            for name in INVARIANTS
        },
        "complaints": [
            {"at": each.at - began, "invariant": each.invariant, "text": each.text}
            for each in outcome.complaints
        ],
        "operations": dict(traffic.operations.most_common()),
        "outcomes": dict(traffic.outcomes.most_common()),
        "errors": dict(traffic.errors.most_common()),
        "latency_seconds": {what: _quantiles(values) for what, values in traffic.latencies.items()},
        "longest_seconds": outcome.longest_seconds,
        "faults": [
            {"from": begin - began, "to": end - began, "kind": fault.kind, "targets": fault.targets}
            for begin, end, fault in outcome.done
        ],
        "settled_seconds": outcome.settled,
        "standstills": [(begin - began, end - began) for begin, end in outcome.standstills],
        "growth": [
            {
                "peer": each.peer,
                "what": each.what,
                "median": each.growth.median,
                "rise": each.growth.rise,
                "seconds": each.growth.seconds,
                "allowed": each.allowed,
            }
            for each in outcome.grown
        ],
        "known_errors": dict(outcome.known_lines),
        "figures": outcome.figures,
        "machine": machine(),
    }


def markdown(outcome: Outcome, picture: str | None) -> str:
    """The report for people."""
    return "\n".join(_lines(outcome, picture)) + "\n"


def _lines(outcome: Outcome, picture: str | None) -> Iterator[str]:
    setting, traffic = outcome.setting, outcome.traffic
    yield "# Soak"
    yield ""
    yield f"**{verdict(outcome)}.**"
    yield ""
    yield (
        f"`scripts/soak --minutes {setting.seconds / 60:g} --seed {setting.seed}`: {len(ROLES)} real peers with "
        f"{MEMORY} of memory each, on {HOSTS} hosts that are network namespaces; a client each, which knows every "
        f"byte that may be read. The plan of faults and of load is a function of the seed."
    )
    yield ""
    if picture is not None:
        yield f"![operations, latencies, memory and descriptors over time; faults are marked]({picture})"
        yield ""
    yield "## Promises"
    yield ""
    yield "| promise | put to the test | broken |"
    yield "|---|---:|---:|"
    broken = Counter(each.invariant for each in outcome.complaints)
    for name in INVARIANTS:
        yield f"| {name} | {outcome.checked.get(name, 0):,} | {broken[name]:,} |"
    yield ""
    for name, count in broken.items():
        yield f"### Broken: {name} ({count:,})"
        yield ""
        of_it = [each for each in outcome.complaints if each.invariant == name]
        for each in of_it[:SHOWN]:
            yield f"- {each.at - outcome.began:.1f} s: {each.text}"
        yield ""
    yield "## Faults"
    yield ""
    kinds = Counter(fault.kind for _, _, fault in outcome.done)
    yield ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) + "."
    if outcome.settled:
        yield (
            f"After the last fault before each of {len(outcome.settled)} quiet times all saw all within "
            f"{max(outcome.settled):.0f} s (median {float(np.median(outcome.settled)):.0f} s)."
        )
    if outcome.standstills:
        total = sum(end - begin for begin, end in outcome.standstills)
        yield f"The machine itself stood still {len(outcome.standstills)} times, {total:.0f} s in all."
    yield ""
    yield "## Operations"
    yield ""
    yield "| operation | count | median ms | p99 ms | longest s |"
    yield "|---|---:|---:|---:|---:|"
    for what, count in traffic.operations.most_common():
        times = _quantiles(traffic.latencies[what])
        yield f"| {what} | {count:,} | {1e3 * times['p50']:.1f} | {1e3 * times['p99']:.0f} | {times['max']:.1f} |"
    yield ""
    yield (
        "Outcomes: "
        + ", ".join(f"{what} {count:,}" for what, count in traffic.outcomes.most_common())
        + "."
    )
    yield (
        "Errors: "
        + (", ".join(f"{what} {count:,}" for what, count in traffic.errors.most_common()) or "none")
        + "."
    )
    yield ""
    yield "## Growth"
    yield ""
    yield (
        "The second half of each life of at least two minutes: what is usual there, and a line through it, by the "
        f"median of all slopes. The line is judged in lives of at least {SETTLED_SECONDS:.0f} s, since connections, "
        "caches and the heap fill for some minutes. At most, and risen by the larger of an amount and a share: "
        + "; ".join(
            f"{what} {limit.most:,.0f}, {limit.absolute:,.0f} or {limit.share:.0%}"
            for what, limit in GROWTH_LIMITS.items()
        )
        + "."
    )
    yield ""
    yield "| peer | what | usual | rises by | in s | |"
    yield "|---|---|---:|---:|---:|---|"
    for grown in outcome.grown:
        form = format_bytes if grown.what.endswith("bytes") else lambda value: f"{value:,}"
        rise = f"{'-' if grown.growth.rise < 0 else ''}{form(int(abs(grown.growth.rise)))}"
        yield (
            f"| {grown.peer} | {grown.what.replace('_', ' ')} | {form(int(grown.growth.median))} | {rise} "
            f"| {grown.growth.seconds:.0f}{'' if grown.growth.settled else ', not settled'} "
            f"| {'' if grown.allowed else 'too much'} |"
        )
    yield ""
    yield "## Limits"
    yield ""
    patience = setting.patience
    yield (
        f"Scaled by how busy the machine is (`scripts/soak --patience {patience:g}`): an operation "
        f"{20 * patience:g} s; a holder "
        f"counts as in reach after {10 * patience:g} s; all see all after {SETTLE_SECONDS * patience:g} s; a peer "
        f"serves {READY_SECONDS * patience:g} s after its start and ends {END_SECONDS * patience:g} s after it was "
        f"asked to. Not scaled: what was removed or overwritten {SPREAD_SECONDS:g} s ago is read nowhere in touch."
    )
    for why, count in outcome.known_lines.items():
        yield f"Errors logged with a known cause: {count} times {why}."


def write(outcome: Outcome) -> Path:
    """Report, JSON and picture, in the output directory; where the report is."""
    output = outcome.setting.output
    (output / "soak.json").write_text(json.dumps(document(outcome), indent=1, default=list) + "\n")
    draw(outcome, output / PICTURE)
    path = output / "soak.md"
    path.write_text(markdown(outcome, PICTURE))
    return path


def _quantiles(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    seconds = np.array([each for _, each in values])
    return {
        "p50": float(np.quantile(seconds, 0.5)),
        "p99": float(np.quantile(seconds, 0.99)),
        "max": float(seconds.max()),
    }


def draw(outcome: Outcome, path: Path) -> None:
    """Operations, latencies, memory and descriptors over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, figsize=(11, 10), sharex=True, layout="constrained")
    began = outcome.began
    times = np.array(
        [(at - began, seconds) for each in outcome.traffic.latencies.values() for at, seconds in each]
    )
    edges = np.arange(0, outcome.ended - began + _BUCKET_SECONDS, _BUCKET_SECONDS)
    if len(times) and len(edges) > 1:
        counts, _ = np.histogram(times[:, 0], edges)
        axes[0].step(edges[:-1] / 60, counts / _BUCKET_SECONDS, where="post", linewidth=0.9)
        which = np.digitize(times[:, 0], edges)
        for share, name in ((0.5, "median"), (0.99, "99 %")):
            values = [
                np.quantile(times[which == bucket, 1], share) if (which == bucket).any() else np.nan
                for bucket in range(1, len(edges))
            ]
            axes[1].plot(edges[:-1] / 60, values, label=name, linewidth=0.9)
        axes[1].set_yscale("log")
        axes[1].legend(loc="upper right")
    for (peer, _), samples in outcome.samples.items():
        minutes = [(each.at - began) / 60 for each in samples]
        for axis, what, scale in ((axes[2], "resident_bytes", 1e6), (axes[3], "descriptors", 1)):
            axis.plot(
                minutes,
                [each.resources[what] / scale for each in samples],
                color=f"C{peer}",
                linewidth=0.9,
            )
    for axis, label in zip(
        axes, ("operations/s", "latency, s", "RSS without segment, MB", "descriptors"), strict=True
    ):
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        _mark_faults(axis, outcome)
    axes[3].set_xlabel("minutes; a colour for each peer, a line for each of its lives")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _mark_faults(axis: Any, outcome: Outcome) -> None:
    colours = {"kill": "red", "restart": "orange", "leave": "orange", "stall": "purple"}
    for begin, end, fault in outcome.done:
        axis.axvspan(
            (begin - outcome.began) / 60,
            (end - outcome.began) / 60,
            color=colours.get(fault.kind, "grey"),
            alpha=0.12,
            linewidth=0,
        )
