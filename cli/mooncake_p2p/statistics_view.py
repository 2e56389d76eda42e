"""The statistics document as lines for people: totals, and rates between two readings of it. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TextIO

from mooncake_p2p.output import Columns, cells, format_duration, format_seconds, printable, short_id
from p2pstore.objects import counted, format_bytes

LABEL_COLUMNS: Final = 11
BAR_COLUMNS: Final = 30
MAX_KEY_COLUMNS: Final = 44

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A statistics document and when it was read (monotonic seconds)."""

    document: Document
    at: float


@dataclass(frozen=True, slots=True)
class Activity:
    """Requests of clients and bytes moved: since the peer's start, or per second."""

    puts: float
    put_bytes: float
    failed_puts: float
    gets: float
    gets_elsewhere: float
    misses: float
    received_bytes: dict[str, float]
    served_bytes: dict[str, float]

    @property
    def hit_rate(self) -> float | None:
        """Share of gets that found the key; None without gets."""
        asked = self.gets + self.misses
        return self.gets / asked if asked else None

    @property
    def local_share(self) -> float | None:
        """Share of gets that found the value in this machine's own peer."""
        return 1 - self.gets_elsewhere / self.gets if self.gets else None

    def document(self) -> Document:
        return {
            "puts_per_second": round(self.puts, 3),
            "put_bytes_per_second": round(self.put_bytes),
            "failed_puts_per_second": round(self.failed_puts, 3),
            "gets_per_second": round(self.gets, 3),
            "misses_per_second": round(self.misses, 3),
            "hit_rate": None if self.hit_rate is None else round(self.hit_rate, 4),
            "local_share": None if self.local_share is None else round(self.local_share, 4),
            "received_bytes_per_second": {
                name: round(rate) for name, rate in self.received_bytes.items()
            },
            "served_bytes_per_second": {name: round(rate) for name, rate in self.served_bytes.items()},
        }


def totals(peer: Document) -> Activity:
    """Since the peer's start."""
    counters = peer["counters"]
    elsewhere = counters.get("client_reads_elsewhere", 0)
    return Activity(
        puts=counters.get("client_puts", 0),
        put_bytes=counters.get("client_put_bytes", 0),
        failed_puts=counters.get("client_puts_failed", 0),
        gets=counters.get("client_reads", 0) + counters.get("client_leases", 0) + elsewhere,
        gets_elsewhere=elsewhere,
        misses=counters.get("client_misses", 0),
        received_bytes=_bytes_of(peer.get("received", {})),
        served_bytes=_bytes_of(peer.get("served", {})),
    )


def _bytes_of(uses: dict[str, Document]) -> dict[str, float]:
    return {name: float(use["bytes"]) for name, use in uses.items()}


def rates(before: Reading | None, after: Reading) -> Activity | None:
    """Per second between two readings; None where they do not follow each other, as after a restart."""
    if before is None or after.at <= before.at:
        return None
    old, new = before.document["peer"], after.document["peer"]
    if (old["peer_id"], old["incarnation"]) != (new["peer_id"], new["incarnation"]):
        return None
    seconds = after.at - before.at
    first, last = totals(old), totals(new)

    def per_second(older: float, newer: float) -> float:
        return max(0.0, newer - older) / seconds

    found: dict[str, Any] = {}
    for each in fields(Activity):
        was, now = getattr(first, each.name), getattr(last, each.name)
        found[each.name] = (
            {name: per_second(was.get(name, 0.0), value) for name, value in now.items()}
            if isinstance(now, dict)
            else per_second(was, now)
        )
    return Activity(**found)


# --- lines -----------------------------------------------------------------------------------


def overview(
    document: Document, rate: Activity | None, *, columns: int = 80, blocks: bool = False
) -> list[str]:
    """This peer and the cluster. With `rate`, what happens per second beside what happened in all.
    `blocks`: draw bars with block characters, which not every output can show."""
    peer, cluster = document["peer"], document.get("cluster")
    lines = _peer_lines(peer, blocks)
    for problem in peer.get("problems", []):
        lines += ["", *_problem_lines(problem, columns)]
    lines += ["", *_activity_lines(totals(peer), rate)]
    if cluster is not None:
        lines += ["", *_cluster_lines(cluster, blocks), "", *_member_lines(cluster["members"])]
    return [clip(line, columns) for line in lines]


def draws_blocks(out: TextIO) -> bool:
    """Whether bars are drawn with block characters: on terminals that can."""
    return out.isatty() and (out.encoding or "").lower().replace("-", "") == "utf8"


def clip(line: str, columns: int) -> str:
    """A line that fits, with its end marked where it was cut."""
    return line if len(line) <= columns else line[: columns - 1] + "~"


def _peer_lines(peer: Document, blocks: bool) -> list[str]:
    leased = peer["leased_bytes"]
    role = peer.get("role", "member")
    lonely = peer.get("bootstrap") and not peer.get("joined", True)
    return [
        f"peer {printable(peer['name'])}",
        _fact("id", peer["peer_id"]),
        _fact(
            "up",
            f"{format_duration(peer['uptime_seconds'])}, p2pstore {printable(peer['software'])}"
            f"{', no bootstrap peer has answered yet' if lonely else ''}",
        ),
        *([] if role == "member" else [_fact("role", printable(role))]),
        _fact("memory", memory_bar(peer["memory_used_bytes"], peer["memory_capacity_bytes"], blocks)),
        _fact(
            "objects",
            f"{peer['objects']:,} here ({format_bytes(leased) if leased else 'nothing'} leased), "
            f"{counted(peer['known_locations'], 'copy', 'copies')} known elsewhere",
        ),
        *_returning_lines(peer.get("objects_returning", 0)),
        *_quota_lines(peer, blocks),
        *_ssd_lines(peer.get("ssd"), blocks),
        *_directory_lines(peer.get("directory", {})),
        *_repair_lines(peer.get("repair", {})),
    ]


def _problem_lines(problem: Document, columns: int) -> list[str]:
    """A problem, its cause and its cure, in the words of the status page and `doctor`."""
    texts = {str(problem["status"]): problem["what"], "why": problem["cause"]}
    texts["cure"] = problem["cure"]
    return [
        _fact(label if number == 0 else "", line)
        for label, text in texts.items()
        for number, line in enumerate(
            textwrap.wrap(printable(text), max(20, columns - LABEL_COLUMNS - 2))
        )
    ]


def _returning_lines(count: int) -> list[str]:
    """Objects of kept memory that are not announced yet."""
    return [_fact("", f"{count:,} more from before the start, not checked yet")] if count else []


def _quota_lines(peer: Document, blocks: bool) -> list[str]:
    quotas = peer.get("quotas", {})
    lines = []
    for name, use in quotas.items():
        bar = memory_bar(use["kept_bytes"], use["quota_bytes"], blocks)
        above = use["used_bytes"] - use["kept_bytes"]
        more = f" and {_bytes(above)} more" if above else ""
        lines += [_fact("quota", printable(name)), _fact("", bar + more)]
        on_ssd, cap = use.get("ssd_bytes", 0), use.get("cap_bytes")
        if on_ssd or cap is not None:
            whole = (
                "" if cap is None else f", in all {_bytes(use['used_bytes'] + on_ssd)} of {_bytes(cap)}"
            )
            lines.append(_fact("", f"{_bytes(on_ssd)} on the SSD{whole}"))
    if quotas:
        others = peer["memory_used_bytes"] - sum(use["used_bytes"] for use in quotas.values())
        lines.append(_fact("", f"{_bytes(others)} of all others, and being written"))
    return lines


def _ssd_lines(ssd: Document | None, blocks: bool) -> list[str]:
    if ssd is None:
        return []
    bar = memory_bar(ssd["live_bytes"], ssd["capacity_bytes"], blocks)
    read = ssd.get("read_latency", {})
    facts = [counted(ssd["objects"], "object"), f"hit rate {_percent(ssd.get('hit_rate'))}"]
    if ssd.get("write_amplification"):
        facts.append(f"write amplification {ssd['write_amplification']:.2f}")
    if read.get("p50_ms"):
        facts.append(f"reads P50 {read['p50_ms']:.1f} ms, P99 {read['p99_ms']:.1f} ms")
    moving = [ssd.get("read_bytes_per_second", 0), ssd.get("written_bytes_per_second", 0)]
    lines = [_fact("ssd", bar), _fact("", ", ".join(facts))]
    if any(moving):
        lines.append(_fact("", f"{_bytes(moving[0])}/s read, {_bytes(moving[1])}/s written"))
    if ssd["state"] != "ok":
        lines.append(_fact("", f"{ssd['state'].replace('_', ' ')}: {printable(ssd['why'])}"))
    return lines


def _directory_lines(directory: Document) -> list[str]:
    """How much the peer knows of where objects are, when that is not all."""
    mode = directory.get("mode", "full")
    if mode == "full":
        return []
    return [
        _fact(
            "directory",
            f"{printable(mode)}: home of {directory['home_partitions']:,} of 1,024 partitions, "
            f"{counted(directory['home_locations'], 'copy', 'copies')} there",
        )
    ]


def _repair_lines(repair: Document) -> list[str]:
    """Copies made again after the loss of holders, and objects that lack copies."""
    facts = []
    if repair.get("copies"):
        facts.append(
            f"{counted(repair['copies'], 'copy', 'copies')} made again ({_bytes(repair['bytes'])})"
        )
    if repair.get("lacking"):
        facts.append(f"{counted(repair['lacking'], 'object')} with fewer copies than wanted")
    if repair.get("limited"):
        facts.append(f"{counted(repair['limited'], 'object')} limited by the number of peers")
    return [_fact("repair", ", ".join(facts))] if facts else []


def _activity_lines(total: Activity, rate: Activity | None) -> list[str]:
    header = f"  {'':<{LABEL_COLUMNS}}{'SINCE ITS START':>18}"
    lines = [header + (f"{'PER SECOND':>18}" if rate is not None else "")]

    def row(label: str, whole: str, per_second: str) -> None:
        line = f"  {label:<{LABEL_COLUMNS}}{whole:>18}"
        lines.append(line + (f"{per_second:>18}" if rate is not None else ""))

    row("puts", _number(total.puts), _number(rate.puts) if rate else "")
    if total.failed_puts:
        row("failed", _number(total.failed_puts), _number(rate.failed_puts) if rate else "")
    row("bytes put", _bytes(total.put_bytes), _bytes(rate.put_bytes) if rate else "")
    row("gets", _number(total.gets), _number(rate.gets) if rate else "")
    row("hit rate", _percent(total.hit_rate), _percent(rate.hit_rate) if rate else "")
    row("found here", _percent(total.local_share), _percent(rate.local_share) if rate else "")
    for label, moved, moving in (
        ("in, ", total.received_bytes, rate.received_bytes if rate else {}),
        ("out, ", total.served_bytes, rate.served_bytes if rate else {}),
    ):
        for name in sorted(moved):
            row(label + printable(name), _bytes(moved[name]), _bytes(moving.get(name, 0.0)))
    return lines


def _cluster_lines(cluster: Document, blocks: bool) -> list[str]:
    return [
        f"cluster {printable(cluster['name'])}: {counted(cluster['peers'], 'peer')}, "
        f"{counted(cluster['copies'], 'copy', 'copies')}",
        _fact(
            "memory", memory_bar(cluster["memory_used_bytes"], cluster["memory_capacity_bytes"], blocks)
        ),
        *(
            [_fact("ssd", memory_bar(cluster["ssd_used_bytes"], cluster["ssd_capacity_bytes"], blocks))]
            if cluster.get("ssd_capacity_bytes")
            else []
        ),
    ]


def _member_lines(members: Sequence[Document]) -> list[str]:
    columns: Columns[Document] = {
        "NAME": lambda each: each["name"],
        "STATE": lambda each: each.get("status", "alive"),
        ">MEMORY USED": lambda each: share(each["memory_used_bytes"], each["memory_capacity_bytes"]),
        ">OBJECTS": lambda each: f"{each['objects']:,}",
        ">HEARD": lambda each: ago(each.get("heard_seconds_ago")),
        "PEER ID": lambda each: short_id(each["peer_id"]),
    }
    rows = cells(members, columns)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        f"{'>' if mark.startswith('>') else '<'}{width}"
        for mark, width in zip(columns, widths, strict=True)
    ]
    return ["  ".join(map(format, row, aligned)).rstrip() for row in rows]


def slow_lines(slow: Document, *, columns: int = 80) -> list[str]:
    """Slow operations, the latest first: two lines each, what it was and where its time went."""
    threshold = slow["threshold_seconds"]
    if not threshold:
        return ["this peer keeps no slow operations: start it with --slow-operation SECONDS"]
    shown = slow["operations"]
    if not shown:
        return [f"no operation took {threshold:g} s or more since this peer started"]
    of = f" of {slow['total']:,}" if slow["total"] > len(shown) else ""
    noun = "operation" if slow["total"] == 1 else "operations"
    lines = [f"{len(shown):,}{of} {noun} of {threshold:g} s or more, the latest first", ""]
    for each in shown:
        lines += _slow_operation_lines(each, columns)
    return [clip(line, columns) for line in lines]


def _slow_operation_lines(operation: Document, columns: int) -> list[str]:
    when = time.strftime("%H:%M:%S", time.localtime(operation["unix"]))
    key = printable(operation["key"]) or "-"
    if operation["keys"] > 1:
        key = f"{clip(key, MAX_KEY_COLUMNS - 12)} +{operation['keys'] - 1:,}"
    parts = [_stage(stage) for stage in operation["stages"]]
    if operation["waiting_seconds"] >= 0.0005:
        parts.insert(0, f"waiting {format_seconds(operation['waiting_seconds'])}")
    lines = [
        f"{when}  {operation['what']:<9} {clip(key, MAX_KEY_COLUMNS):<{MAX_KEY_COLUMNS}} "
        f"{format_seconds(operation['seconds']):>10}"
    ]
    indent = " " * 10
    lines += textwrap.wrap(", ".join(parts), columns, initial_indent=indent, subsequent_indent=indent)
    if operation["outcome"] != "ok":
        lines.append(f"          {printable(operation['outcome'])}")
    return lines


def _stage(stage: Document) -> str:
    parts = ", ".join(f"{name} {format_seconds(took)}" for name, took in stage.get("parts", {}).items())
    return (
        f"{stage['what']} {format_seconds(stage['seconds'])}"
        f"{f' ({parts})' if parts else ''}"
        f"{' from ' + printable(stage['peer']) if stage.get('peer') else ''}"
        f"{' by ' + printable(stage['transport']) if stage.get('transport') else ''}"
    )


# --- small things ----------------------------------------------------------------------------


def _fact(label: str, value: str) -> str:
    return f"  {label:<{LABEL_COLUMNS}}{value}"


def memory_bar(used: int, capacity: int, blocks: bool) -> str:
    if not capacity:
        return "none"
    filled = min(BAR_COLUMNS, round(BAR_COLUMNS * used / capacity))
    full, empty = ("\u2588", "\u2591") if blocks else ("#", ".")
    return f"[{full * filled}{empty * (BAR_COLUMNS - filled)}] {share(used, capacity)}"


def share(used: int, capacity: int) -> str:
    """`31.2 % of 64.0 MiB`."""
    if not capacity:
        return "none"
    return f"{100 * used / capacity:.1f} % of {format_bytes(capacity)}"


def ago(heard_seconds_ago: float | None) -> str:
    """How long ago something was heard; `-` for never, or not known."""
    return "-" if heard_seconds_ago is None else format_duration(heard_seconds_ago)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
