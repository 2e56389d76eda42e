"""`stats`, `peers` and `leave`: this peer and the cluster around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Socket,
    Timeout,
    connected,
)
from mooncake_p2p.output import print_json, print_table, printable, progress, remark, short_id
from p2pstore.objects import format_bytes, parse_duration

LABEL_COLUMNS: Final = 12


def stats(socket: Socket = None, timeout: Timeout = DEFAULT_TIMEOUT, json: Json = False) -> None:
    """Show this peer and the cluster. --json prints the whole document."""
    with connected(socket, timeout=timeout) as client:
        document = client.statistics()
    if json:
        print_json(document)
        return
    peer, cluster = document["peer"], document["cluster"]
    leased = peer["leased_bytes"]
    _print_facts(
        f"peer {printable(peer['name'])}",
        [
            ("id", peer["peer_id"]),
            ("memory", _share(peer["memory_used_bytes"], peer["memory_capacity_bytes"])),
            ("objects", f"{peer['objects']:,}"),
            ("leased", format_bytes(leased) if leased else "nothing"),
            ("knows", f"{peer['known_locations']:,} copies elsewhere"),
            ("up", _duration(peer["uptime_seconds"])),
            ("software", peer["software"]),
        ],
    )
    counters = [(name, value) for name, value in peer["counters"].items() if value]
    if counters:
        print()
        print_table(
            ("SINCE ITS START", "COUNT"),
            [(name.replace("_", " "), _count(name, value)) for name, value in counters],
            right=("COUNT",),
        )
    print()
    _print_facts(
        f"cluster {printable(cluster['name'])}",
        [
            ("peers", f"{cluster['peers']:,}"),
            ("memory", _share(cluster["memory_used_bytes"], cluster["memory_capacity_bytes"])),
            ("copies", f"{cluster['copies']:,}"),
        ],
    )
    print()
    print_table(
        ("NAME", "MEMORY USED", "OBJECTS", "PEER ID"),
        [
            (
                member["name"],
                _share(member["memory_used_bytes"], member["memory_capacity_bytes"]),
                f"{member['objects']:,}",
                short_id(member["peer_id"]),
            )
            for member in cluster["members"]
        ],
        right=("MEMORY USED", "OBJECTS"),
    )


def peers(
    everyone: Annotated[
        bool, typer.Option("--all", help="Also those that are dead or have left.")
    ] = False,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """List the members of the cluster, as the local peer sees them."""
    with connected(socket, timeout=timeout) as client:
        members = client.peers(everyone=everyone)
    if json:
        print_json([asdict(member) for member in members])
        return
    print_table(
        ("NAME", "STATUS", "CONTROL", "MEMORY USED", "OBJECTS", "HEARD", "PEER ID"),
        [
            (
                member.name,
                member.status,
                ", ".join(member.control),
                _share(member.memory_used, member.memory_capacity),
                f"{member.objects:,}",
                "me" if member.me else _duration(member.heard_seconds_ago),
                short_id(member.peer_id),
            )
            for member in members
        ],
        right=("MEMORY USED", "OBJECTS", "HEARD"),
        fold=("CONTROL",),
    )


def leave(
    drain: Annotated[
        str, typer.Option(metavar="SECONDS|60s", help="How long it may take to leave.")
    ] = "60s",
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Make the local peer leave the cluster and end."""
    drain_seconds = parse_duration(drain, "--drain")
    with connected(socket, timeout=timeout) as client, progress("leaving"):
        client.leave(drain=drain_seconds)
    if json:
        print_json({"left": True})
    else:
        remark("the peer left the cluster")


def _print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    print(title)
    for label, value in facts:
        print(f"  {label:<{LABEL_COLUMNS}}{value}")


def _share(used: int, capacity: int) -> str:
    if not capacity:
        return "none"
    return f"{100 * used / capacity:.1f} % of {format_bytes(capacity)}"


def _count(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"
