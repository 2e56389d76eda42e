"""`ls` and `locate`: stored keys, and the peers that hold them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_p2p.options import AtPeer, Key, argument, flag, option, with_records
from mooncake_p2p.output import print_json, print_table, printable, progress, remark, short_id
from p2pstore.errors import NoSuchKey
from p2pstore.objects import format_bytes, unix_seconds_from_clock

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import Location, PeerInfo


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Which keys `ls` lists."""

    limit: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Most keys to list.")] = (
        1000
    )
    local: Annotated[bool, flag("--local", "Only what this peer holds.")] = False
    pinned: Annotated[bool, flag("--pinned", "Only what is pinned.")] = False
    after: Annotated[str, option("KEY", "Only keys behind this one: the next page.")] = ""


@with_records
def ls(
    prefix: Annotated[str, argument("PREFIX", "Only keys that begin with this.")] = "",
    *,
    which: ListOptions,
    peer: AtPeer,
) -> None:
    """List keys of the whole cluster, in order.

    Says on stderr when there are more, and when peers did not answer; their keys are missing then.
    COPIES are those of the peers that answered. With --pinned the column is PINNED, and counts
    the pinned copies only; `locate` shows all.

    NOTES: "pinned (hard)" is never evicted, "pinned (soft)" last; a "spare copy" is one of several
    that a peer made for itself, and the first to go when its memory is full.
    """
    with peer.connected() as client, progress("asking all peers"):
        page = client.list_keys(prefix, **asdict(which))
        cut_off = "" if which.local else how_cut_off(client.peers(everyone=True), page.silent_peers)
    if peer.json:
        print_json(
            {
                "keys": [asdict(entry) for entry in page.keys],
                "more": page.more,
                "silent_peers": page.silent_peers,
            }
        )
    elif page.keys:
        print_table(
            ("KEY", "SIZE", "PINNED" if which.pinned else "COPIES", "PEERS", "NOTES"),
            [
                (
                    entry.key,
                    format_bytes(entry.length),
                    str(entry.copies),
                    ", ".join(entry.peers),
                    _notes(entry.pin, entry.soft, entry.expires_unix),
                )
                for entry in page.keys
            ],
            right=("SIZE", "COPIES", "PINNED"),
            fold=("PEERS", "NOTES"),
        )
    else:
        remark("no keys")
    if page.more:
        after_last = f": add --after {shlex.quote(page.keys[-1].key)}" if page.keys else ""
        remark(f"more keys follow{after_last}")
    if page.silent_peers:
        remark(f"incomplete: {', '.join(map(printable, page.silent_peers))} did not answer")
    if cut_off:
        remark(f"incomplete: {cut_off}")


@with_records
def locate(key: Key, *, peer: AtPeer) -> None:
    """Show which peers hold a key, as far as the local peer knows.

    Of copies elsewhere it knows the size rounded up to 4 KiB: SIZE then begins with <=. NOTES are those
    of `ls`; "local" is this peer's own copy, "unreachable" one whose peer does not answer.
    """
    with peer.connected() as client:
        copies = client.locate(key)
        lengths = _exact_lengths(client, key, copies)
        cut_off = how_cut_off(client.peers(everyone=True))
    if cut_off:
        remark(f"incomplete: {cut_off}")
    if not copies:
        raise NoSuchKey(f"no such key: {printable(key)}")
    if peer.json:
        documents = [{**asdict(copy), "length": lengths.get(copy.version)} for copy in copies]
        print_json({"key": key, "copies": documents})
        return
    print_table(
        ("PEER", "TIER", "SIZE", "WRITTEN", "NOTES", "PEER ID"),
        [
            (
                copy.peer,
                copy.tier,
                format_bytes(lengths[copy.version])
                if copy.version in lengths
                else f"<= {format_bytes(copy.size_hint)}",
                _local_time(unix_seconds_from_clock(copy.version[0])),
                ", ".join(
                    note
                    for note in (
                        "local" if copy.local else "",
                        _notes(copy.pin, copy.soft, None),
                        "" if copy.reachable else "unreachable",
                    )
                    if note
                ),
                short_id(copy.peer_id),
            )
            for copy in copies
        ],
        right=("SIZE",),
        fold=("NOTES",),
    )


def how_cut_off(members: Sequence[PeerInfo], named: Collection[str] = ()) -> str:
    """A warning when the local peer reaches less than half of the other members, as its answer may be incomplete; else
    "". Members that left do not count, nor those that were `named` already."""
    alive = [member for member in members if member.status == "alive" and not member.me]
    names = {
        member.name for member in alive
    }  # a peer that came back without a state directory is another member
    gone = [
        member
        for member in members
        if member.status in ("suspect", "dead") and member.name not in {*names, *named}
    ]
    if len(gone) <= len(alive):
        return ""
    return (
        f"this peer reaches {len(alive):,} of {len(alive) + len(gone):,} other members, and what the rest hold is not "
        "shown; `mooncake-p2p doctor` says more"
    )


def _exact_lengths(
    client: BlockingClient, key: str, copies: Sequence[Location]
) -> dict[tuple[int, int], int]:
    """Version -> its length, where the local peer holds a copy and so knows it to the byte."""
    own = next((copy for copy in copies if copy.local), None)
    if own is None:
        return {}
    listed = client.list_keys(key, limit=1, local=True).keys
    return {own.version: listed[0].length} if listed and listed[0].key == key else {}


def _notes(pin: str, soft: bool, expires_unix: float | None) -> str:
    notes = [f"pinned ({pin})"] if pin != "none" else []
    if soft:
        notes.append("spare copy")
    if expires_unix is not None:
        notes.append(f"expires in {max(0, expires_unix - time.time()):.0f} s")
    return ", ".join(notes)


def _local_time(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
