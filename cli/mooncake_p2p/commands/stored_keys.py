"""`ls`, `locate`, `pin`, `unpin`, `replicate`, `rm` and `flush`: stored keys, their holders, how objects are kept."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    AtPeer,
    Json,
    Key,
    Keys,
    Socket,
    Timeout,
    Yes,
    argument,
    connected,
    flag,
    option,
    parse_timeout,
    with_records,
)
from mooncake_p2p.output import (
    AlreadyTold,
    CommandFailed,
    ExitCode,
    Interrupts,
    confirm,
    describe,
    end_with,
    print_json,
    print_table,
    printable,
    progress,
    remark,
    short_id,
    shortfall,
)
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.objects import encode_key, encode_namespace, format_bytes, unix_seconds_from_clock

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import ItemResult, Location, PeerInfo, PinName, PinResult

NOTHING: Final[Mapping[str, list[str]]] = MappingProxyType({})
PAGE_KEYS: Final = 1000
"""Keys listed and removed at a time."""


class Firmness(StrEnum):
    soft = "soft"
    hard = "hard"


@with_records
def pin(
    keys: Keys,
    pin: Annotated[
        Firmness | None,
        typer.Option(
            help="soft: evicted last; hard: never evicted  [default: soft, and hard stays hard].",
            show_default=False,
        ),
    ] = None,
    ttl: Annotated[
        str | None, option("SECONDS|10m", "How long a soft pin lasts  [default: 30m].")
    ] = None,
    *,
    peer: AtPeer,
) -> None:
    """Keep objects in this peer's memory, and in that of all who have a copy.

    An object that only other peers hold is brought here first. A hard pin stays until it is
    unpinned or removed, and takes up memory that nothing else can use. Without --pin a hard pin stays
    as it is, and the command says so; `--pin soft` makes it a soft one. Holders that cannot be reached
    now keep their copies as before; the command says how many.
    """
    if ttl is not None and pin is Firmness.hard:
        raise CommandFailed("--ttl is for soft pins; a hard pin stays until unpin", ExitCode.USAGE)
    ttl_seconds = None if ttl is None else parse_timeout(ttl, "--ttl")
    firmness: PinName = "hard" if pin is Firmness.hard else "soft"
    kept_hard: list[str] = []

    def keep(client: BlockingClient, key: str) -> None:
        if pin is None and any(copy.local and copy.pin == "hard" for copy in client.locate(key)):
            kept_hard.append(key)
            if not peer.json:
                remark(f"{printable(key)} stays pinned hard (--pin soft makes it a soft pin)")
            return
        pinned[key] = client.pin(key, firmness, ttl=ttl_seconds)

    pinned: dict[str, PinResult] = {}
    with peer.connected() as client:
        _for_each(client, keys, keep, "pinned", peer.json, pinned, {"kept_hard": kept_hard})


@with_records
def unpin(keys: Keys, *, peer: AtPeer) -> None:
    """Let objects be evicted again, here and on all other peers that have them."""
    unpinned: dict[str, PinResult] = {}

    def let_go(client: BlockingClient, key: str) -> None:
        unpinned[key] = client.unpin(key)

    with peer.connected() as client:
        _for_each(client, keys, let_go, "unpinned", peer.json, unpinned)


def _for_each(
    client: BlockingClient,
    keys: list[str],
    action: Callable[[BlockingClient, str], None],
    word: str,
    json: bool,
    results: Mapping[str, PinResult],
    also: Mapping[str, list[str]] = NOTHING,
) -> None:
    """Do one thing with every key, and tell what became of each. Raises `AlreadyTold`. `results` says which
    copies were reached; `also` goes into the JSON."""
    for key in keys:
        encode_key(key)
    done: list[str] = []
    failed: dict[str, Exception] = {}
    with progress(f"{len(keys)} keys" if len(keys) > 1 else printable(keys[0])):
        for key in keys:
            try:
                action(client, key)
            except (P2PStoreError, CommandFailed) as failure:
                failed[key] = failure
            else:
                done.append(key)
    if json:
        reasons = {key: describe(error) for key, error in failed.items()}
        copies = {key: [result.copies, result.known] for key, result in results.items()}
        print_json({word: done, "failed": reasons, "copies": copies, **also})
    elif done:
        remark(f"{word} {len(done)} of {len(keys)} keys" if len(keys) > 1 else word)
    for key, result in () if json else results.items():
        if result.copies < result.known:
            some = f"{result.copies} of {result.known} copies"
            remark(f"{printable(key)}: {some}; the other holders could not be told, try again")
    end_with(failed)


@with_records
def replicate(
    key: Key,
    copies: Annotated[int, option("N", "Copies in all.", "--replicas", "-n", min=1)],
    *,
    peer: AtPeer,
) -> None:
    """Have N copies of an object, on as many peers.

    Copies that exist count. The number travels with the object.
    """
    encode_key(key)
    with peer.connected() as client, progress(f"copying {printable(key)}"):
        result = client.replicate(key, copies)
        too_few = shortfall(client, result)
    if peer.json:
        print_json({"key": key, "copies": result.copies, "wanted": result.wanted})
    if too_few:
        raise CommandFailed(f"{printable(key)}: {too_few}")
    if not peer.json:
        remark(f"copies {result.copies}/{result.wanted}")


@with_records
def rm(
    keys: Annotated[list[str] | None, argument("KEY", "Names of the objects.")] = None,
    prefix: Annotated[str | None, option("TEXT", "Instead: all keys that begin with this.")] = None,
    yes: Yes = False,
    *,
    peer: AtPeer,
) -> None:
    """Remove keys everywhere.

    A key that does not exist is reported, and the others are removed. With --prefix, keys that appear
    meanwhile may stay, and so do those of peers that did not answer; then it says so. Ctrl-C stops
    between two batches of 1,000.
    """
    if keys and prefix is not None:
        raise CommandFailed("name keys to remove, or give --prefix TEXT: not both", ExitCode.USAGE)
    if not keys and prefix is None:
        raise CommandFailed("name keys to remove, or give --prefix TEXT", ExitCode.USAGE)
    if prefix is None:
        assert keys
        _remove_named(keys, peer)
        return
    if not prefix:
        raise CommandFailed(
            "--prefix is empty; `mooncake-p2p flush NAMESPACE` removes everything", ExitCode.USAGE
        )
    confirm(
        f"Remove all keys that begin with {printable(prefix)!r} in namespace "
        f"{printable(peer.namespace)!r}, on all peers?",
        yes=yes,
    )
    with peer.connected() as client:
        _remove_prefix(client, prefix, peer.json)


def _remove_named(keys: list[str], peer: AtPeer) -> None:
    for key in keys:
        encode_key(key)
    removed: list[str] = []
    missing: list[str] = []
    failed: dict[str, Exception] = {}
    with peer.connected() as client, progress("removing"):
        for item in client.remove_many(keys):
            if item.error is not None and not isinstance(item.error, NoSuchKey):
                failed[item.key] = item.error
            elif item.value:
                removed.append(item.key)
            else:
                missing.append(item.key)
    if peer.json:
        reasons = {key: describe(error) for key, error in failed.items()}
        print_json({"removed": removed, "missing": missing, "failed": reasons})
    elif removed:
        remark(f"removed {len(removed)} of {len(keys)} keys" if len(keys) > 1 else "removed")
    absent = {key: NoSuchKey(f"no such key: {printable(key)}") for key in missing}
    end_with({**absent, **failed})


@dataclass
class _Removal:
    """How far removing by prefix is."""

    removed: int = 0
    failed: dict[str, Exception] = field(default_factory=dict)
    silent_peers: set[str] = field(default_factory=set)

    def take(self, items: list[ItemResult]) -> None:
        for item in items:
            if item.error is None:
                self.removed += bool(item.value)
            elif not isinstance(item.error, NoSuchKey):  # else another client removed it first
                self.failed[item.key] = item.error

    def problem(self) -> Exception:
        if self.failed:
            return next(iter(self.failed.values()))
        return CommandFailed(incomplete(self.silent_peers))


def _remove_prefix(client: BlockingClient, prefix: str, json: bool) -> None:
    removal = _Removal()
    try:
        with Interrupts() as interrupts, progress("removing") as bar:
            after, more = "", True
            while more:
                with (
                    interrupts.allowed()
                ):  # signals wait elsewhere, so that all removed keys are counted
                    page = client.list_keys(prefix, after=after, limit=PAGE_KEYS)
                removal.silent_peers.update(page.silent_peers)
                if page.keys:
                    removal.take(client.remove_many([entry.key for entry in page.keys]))
                    after = page.keys[-1].key
                bar.relabel(f"removed {removal.removed:,} keys")
                more = page.more
    except BaseException:
        _tell(removal, json, stopped=True)
        raise
    _tell(removal, json, stopped=False)
    if removal.failed or removal.silent_peers:
        raise AlreadyTold(removal.problem())
    if not removal.removed:
        raise NoSuchKey(f"no key begins with {printable(prefix)!r}")


def _tell(removal: _Removal, json: bool, *, stopped: bool) -> None:
    silent_peers = sorted(removal.silent_peers)
    if json:
        reasons = {key: describe(error) for key, error in removal.failed.items()}
        complete = not (stopped or reasons or silent_peers)
        print_json(
            {
                "removed": removal.removed,
                "failed": reasons,
                "silent_peers": silent_peers,
                "complete": complete,
            }
        )
    else:
        remark(f"removed {removal.removed:,} keys{' before it was stopped' if stopped else ''}")
    for key, error in removal.failed.items():
        remark(f"error: {printable(key)}: {describe(error)}")
    if silent_peers:
        remark(f"error: {incomplete(silent_peers)}")


def incomplete(silent_peers: Iterable[str]) -> str:
    names = ", ".join(map(printable, sorted(silent_peers)))
    return f"incomplete: {names} did not answer, and may hold more such keys; run it again when they do"


def flush(
    namespace: Annotated[str, argument("NAMESPACE", "Namespace to remove.")],
    yes: Yes = False,
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Remove everything in a namespace, on all peers.

    Peers that do not answer now drop their copies as soon as they hear of it. Objects put afterwards
    are new and stay.
    """
    encode_namespace(namespace)
    confirm(f"Remove everything in namespace {printable(namespace)!r}, on all peers?", yes=yes)
    with connected(socket, namespace, timeout) as client, progress("flushing"):
        client.flush()
    if json:
        print_json({"flushed": namespace})
    else:
        remark(f"flushed {printable(namespace)}")


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Which keys `ls` lists."""

    limit: Annotated[int, option("N", "Most keys to list.", min=1, max=100_000)] = 1000
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
            page.keys,
            {
                "KEY": lambda entry: entry.key,
                ">SIZE": lambda entry: format_bytes(entry.length),
                ">PINNED" if which.pinned else ">COPIES": lambda entry: str(entry.copies),
                "~PEERS": lambda entry: ", ".join(entry.peers),
                "~NOTES": lambda entry: ", ".join(_notes(entry.pin, entry.soft, entry.expires_unix)),
            },
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

    def size(copy: Location) -> str:
        length = lengths.get(copy.version)
        return f"<= {format_bytes(copy.size_hint)}" if length is None else format_bytes(length)

    def notes(copy: Location) -> str:
        marks = {"local": copy.local, **dict.fromkeys(_notes(copy.pin, copy.soft, None), True)}
        marks["unreachable"] = not copy.reachable
        return ", ".join(mark for mark, is_set in marks.items() if is_set)

    print_table(
        copies,
        {
            "PEER": lambda copy: copy.peer,
            "TIER": lambda copy: copy.tier,
            ">SIZE": size,
            "WRITTEN": lambda copy: _local_time(unix_seconds_from_clock(copy.version[0])),
            "~NOTES": notes,
            "PEER ID": lambda copy: short_id(copy.peer_id),
        },
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


def _notes(pin: str, soft: bool, expires_unix: float | None) -> list[str]:
    notes = [f"pinned ({pin})"] if pin != "none" else []
    if soft:
        notes.append("spare copy")
    if expires_unix is not None:
        notes.append(f"expires in {max(0, expires_unix - time.time()):.0f} s")
    return notes


def _local_time(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
