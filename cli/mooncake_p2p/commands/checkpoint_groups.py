"""`checkpoint follow`, `update`, `status`, `list` and `rm`: names of checkpoints, and those who follow them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooncake_p2p.exit_errors import describe
from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Exclude,
    Include,
    Json,
    Namespace,
    Socket,
    Timeout,
    Yes,
    connected,
    parse_timeout,
)
from mooncake_p2p.output import (
    confirm,
    print_json,
    print_json_line,
    print_table,
    printable,
    progress,
    remark,
)
from p2pstore.errors import DeadlineExceeded, NoLocalPeer, StoreClosed
from p2pstore.objects import format_bytes

if TYPE_CHECKING:
    from p2pstore.results import (
        CheckpointFollower,
        CheckpointInfo,
        CheckpointMember,
        CheckpointUpdate,
        FollowedCheckpoint,
    )

SHORT_DIGITS: Final = 12
"""Of a version, where people read it beside others."""
LOOK_SECONDS: Final = 1.0
NAMED: Final = 4
"""Followers that one line names."""
DEFAULT_UPDATE_TIMEOUT: Final = "10m"

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="What the checkpoint is called.", show_default=False),
]
Publisher = Annotated[
    str | None,
    typer.Option(
        metavar="PEER",
        help="The peer id that must have published it; by default the first that did.",
        show_default=False,
    ),
]


# --- following ---------------------------------------------------------------------------------


def checkpoint_follow(
    name: Name,
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Where versions of it are kept.", show_default=False),
    ],
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run this by the shell each time that another version is in use.",
            show_default=False,
        ),
    ] = None,
    publisher: Publisher = None,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many versions stay, the newest.")
    ] = 2,
    include: Include = None,
    exclude: Exclude = None,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Follow a checkpoint.

    Each version that is published is fetched to DIR/VERSION and verified. DIR/current names it when the publisher
    says so: `checkpoint update` there waits for all followers first. Runs until Ctrl-C; the same command goes on where
    it was. With --include or --exclude only those files of each version are brought.

    CMD finds CHECKPOINT_NAME, CHECKPOINT_VERSION and CHECKPOINT_DIRECTORY in its environment. It is run for every
    version that comes into use while this command runs, and at its start when it has not been run with success for the
    one that is in use.
    """
    from mooncake_p2p.on_switch import OnSwitch

    on_switch = None if command is None else OnSwitch(command, name, directory)
    told: str | None = None

    def changed(now: FollowedCheckpoint) -> None:
        nonlocal told
        if json:
            print_json_line(asdict(now))
        line = _follow_line(name, now)
        if line != told and not json:
            remark(line)
        told = line
        if on_switch is not None and now.current:
            on_switch.used(now.current)

    while True:
        try:
            with connected(socket, namespace, timeout) as client:
                client.checkpoints.follow(
                    name,
                    directory,
                    changed,
                    publisher=publisher,
                    keep=keep,
                    include=include or [],
                    exclude=exclude or [],
                )
        except (NoLocalPeer, StoreClosed, DeadlineExceeded) as error:
            if told is None:  # it never began
                raise
            if told:
                remark(f"error: {describe(error)}; trying again until the peer is back")
            told = ""
            time.sleep(LOOK_SECONDS)


def _follow_line(name: str, now: FollowedCheckpoint) -> str:
    called = f"{printable(name)}@{now.version}"
    if not now.publisher:
        in_use = f"; {now.current} is in use" if now.current else ""
        why = f": {printable(now.why)}" if now.why else ""
        return f"waiting until somebody publishes {printable(name)}{in_use}{why}"
    by = printable(now.publisher_name)
    match now.stage:
        case "fetching":
            return f"fetching {called}, published by {by}"
        case "verified":
            return f"{called} is here and verified; it will be used when {by} says so"
        case "current":
            return f"{called} is in use"
        case "failed":
            return f"error: {called}: {printable(now.why)}; it is tried again"
    return f"waiting for a version of {printable(name)} from {by}"


# --- updating ----------------------------------------------------------------------------------


def checkpoint_update(
    name: Name,
    quorum: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="So many followers are enough, not all.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(metavar="SECONDS|10m", help="Nobody switches when they need longer."),
    ] = DEFAULT_UPDATE_TIMEOUT,
    socket: Socket = None,
    namespace: Namespace = "default",
    json: Json = False,
) -> None:
    """Have all followers switch to a checkpoint's newest version.

    To be run at the peer that published it. Waits until all followers (or --quorum of them) have it verified, then has
    all switch at once; who is late switches when it has it. When they do not have it within --timeout, nobody
    switches: exit status 5, and it says who is behind. So it ends within seconds when nobody follows. A follower that
    dies meanwhile is waited for; one that was dead before is not.
    """
    seconds = parse_timeout(timeout)
    with connected(socket, namespace) as client, progress("waiting for followers") as bar:
        said = False

        def watch(now: CheckpointUpdate) -> None:
            nonlocal said
            if not bar.shown:
                if now.version and not said and not now.switched:
                    _say_whom_it_waits_for(name, now, quorum, seconds)
                    said = True
                return
            what = f"{now.using} use it" if now.switched else f"{now.ready} have it"
            behind = ", ".join(printable(_laggard(each)) for each in now.laggards[:2])
            bar.relabel(
                f"{now.followers} followers, {what}{f'; behind: {behind}' if behind else ''}"
            )

        begin = time.perf_counter()
        try:
            done = client.checkpoints.update(name, quorum=quorum, timeout=seconds, progress=watch)
        except Exception as error:
            _print_failed_update(name, error, json)
            raise
    elapsed = time.perf_counter() - begin
    if json:
        print_json({"name": name, **asdict(done), "seconds": round(elapsed, 6)})
        return
    print(f"{name}@{done.version}")
    remark(
        f"{printable(name)}@{done.version[:SHORT_DIGITS]}: {done.using} of {done.followers} followers "
        "use it"
    )
    for each in done.laggards:
        remark(f"not yet: {printable(_laggard(each))}")


def _say_whom_it_waits_for(
    name: str, now: CheckpointUpdate, quorum: int | None, seconds: float
) -> None:
    """One line, where no progress is shown."""
    lacking = quorum is not None and now.followers < quorum
    behind = ", ".join(printable(_laggard(each)) for each in now.laggards[:NAMED])
    if not now.followers and quorum is None:
        remark(f"looking for followers of {printable(name)}")
    elif lacking or behind:
        remark(
            f"waiting for followers of {printable(name)}, for {seconds:g} s at most: {now.ready} of "
            f"{now.followers if quorum is None else quorum} have it"
            + (f"; behind: {behind}" if behind else "")
        )


def _print_failed_update(name: str, error: Exception, json: bool) -> None:
    from p2pstore.errors import FollowersLag

    if json and isinstance(error, FollowersLag):
        laggards: Any = error.laggards
        print_json(
            {"name": name, "switched": False, "laggards": [asdict(each) for each in laggards]}
        )


def _laggard(each: CheckpointFollower) -> str:
    from p2pstore.checkpoint.client.group_calls import laggard_state

    return f"{each.name} ({laggard_state(each)})"


# --- what is known -----------------------------------------------------------------------------


def checkpoint_status(
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Show which peers have a checkpoint, and how far the others are.

    The slowest come first. RATE is what a peer fetched at so far, LEFT how much longer it needs at that rate; DONE
    is told by the percent, and in a large cluster now and then ("40% of 25%": of the files that it fetches, which are a
    quarter of all). USES is the version that a follower uses.

    --watch looks again every second; into a pipe it prints one block each time (with --json one line).
    """
    with connected(socket, namespace, timeout) as client:
        infos = client.checkpoints.status(name)
        if not watch:
            _print_status(infos, json)
            return
        while True:
            _print_status(infos, json, again=True)
            time.sleep(LOOK_SECONDS)
            infos = client.checkpoints.status(name)


def _print_status(infos: Sequence[CheckpointInfo], json: bool, *, again: bool = False) -> None:
    if json:
        show = print_json_line if again else print_json
        show([_document(info) for info in infos])
        return
    if again and sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")
    for info in infos:
        for line in status_lines(info):
            print(line)
        if info.members:
            print_table(
                ("PEER", "VERSION", "STATE", "DONE", "RATE", "LEFT", "USES", "WHY"),
                [_member_row(info, each) for each in sorted(info.members, key=_slowest_first)],
                right=("DONE", "RATE", "LEFT"),
                fold=("WHY",),
            )
    sys.stdout.flush()


def status_lines(info: CheckpointInfo) -> list[str]:
    """What is to be known of a name before its members."""
    newest = info.version[:16]
    parts = [each for each in info.members if each.version == newest]
    done = [each for each in parts if each.state in ("verified", "seeding", "publishing")]
    have = sum(each.needs == 1 for each in done)
    fetching = [each for each in parts if each.state == "fetching"]
    failed = sum(each.state == "failed" for each in parts)
    followers = [each for each in info.members if each.follows]
    using = sum(each.current == info.switched[:16] for each in followers) if info.switched else 0
    trusted = "" if info.trusted else ", not trusted here"
    if not info.alive:
        trusted += ", not there now"
    lines = [
        f"{printable(info.name)}@{info.version}: {format_bytes(info.total_bytes)}, "
        f"{info.files:,} {'file' if info.files == 1 else 'files'}, "
        f"published {_ago(info.published)} by {printable(info.publisher_name)} ({info.publisher}){trusted}"
    ]
    figures = [f"{have} {'has' if have == 1 else 'have'} it"]
    if fetching:
        figures.append(f"{len(fetching)} {'fetches' if len(fetching) == 1 else 'fetch'} it")
        seconds = [left for each in fetching if (left := _seconds_left(info, each)) is not None]
        if len(seconds) == len(fetching):
            figures[-1] += f", {_duration(max(seconds))} left"
    if have < len(done):
        figures.append(f"{len(done) - have} {'has' if len(done) - have == 1 else 'have'} a part")
    if failed:
        figures.append(f"{failed} failed")
    if followers:
        figures.append(f"{len(followers)} follower{'' if len(followers) == 1 else 's'}")
        if info.switched:
            figures.append(f"{using} of them use {info.switched[:SHORT_DIGITS]}")
    return [*lines, "; ".join(figures)]


def _slowest_first(member: CheckpointMember) -> tuple[bool, float, str]:
    return member.state != "failed", member.done, member.name


def _member_row(info: CheckpointInfo, member: CheckpointMember) -> tuple[str, ...]:
    left = _seconds_left(info, member)
    rate = f"{format_bytes(member.bytes_per_second)}/s" if member.bytes_per_second else ""
    return (
        f"{member.name}{' (here)' if member.me else ''}",
        member.version[:SHORT_DIGITS],
        member.state,
        "" if member.state in ("following", "publishing") else _done(member),
        rate if member.state == "fetching" else "",
        "" if left is None else _duration(left),
        (member.current[:SHORT_DIGITS] or "nothing yet") if member.follows else "",
        member.why,
    )


def _seconds_left(info: CheckpointInfo, member: CheckpointMember) -> float | None:
    """How much longer it fetches; None when that is not known."""
    if member.state != "fetching" or not member.bytes_per_second:
        return None
    return (1 - member.done) * member.needs * info.total_bytes / member.bytes_per_second


def _done(member: CheckpointMember) -> str:
    return f"{member.done:.0%}" + (f" of {member.needs:.0%}" if member.needs < 1 else "")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ago(unix_seconds: float) -> str:
    return f"{_duration(max(0.0, time.time() - unix_seconds))} ago"


def _document(info: CheckpointInfo) -> dict[str, Any]:
    document = asdict(info)
    for member, shown in zip(info.members, document["members"], strict=True):
        shown["seconds_left"] = _seconds_left(info, member)
    return document


def checkpoint_list(
    everywhere: Annotated[bool, typer.Option("--all", help="Of all namespaces.")] = False,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """List the checkpoints that are published."""
    with connected(socket, namespace, timeout) as client:
        infos = client.checkpoints.names(everywhere=everywhere)
    if json:
        documents = [asdict(info) for info in infos]
        for document in documents:
            del document["members"]
        print_json(documents)
        return
    spaces = ("NAMESPACE",) if everywhere else ()
    print_table(
        (*spaces, "NAME", "VERSION", "SIZE", "FILES", "PUBLISHED", "BY", "IN USE"),
        [
            (
                *((info.namespace,) if everywhere else ()),
                info.name,
                info.version,
                format_bytes(info.total_bytes),
                f"{info.files:,}",
                _ago(info.published),
                f"{info.publisher_name}{'' if info.alive else ' (not there now)'}",
                info.switched[:SHORT_DIGITS],
            )
            for info in infos
        ],
        right=("SIZE", "FILES"),
    )


def checkpoint_rm(
    name: Name,
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="PEER",
            help="Forget that peer's checkpoint of the name, here alone.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Remove a checkpoint that the local peer published.

    It is not listed any more, nobody fetches it from here, and followers wait. What others have on their disks stays
    there.

    --forget is for a publisher that is gone for good: the local peer lists and trusts its checkpoint no more, until
    that peer publishes a newer version. `checkpoint status` shows peer ids; others have to forget it themselves.
    """
    done = "removed" if forget is None else "forgot"
    confirm(f"{'Remove' if forget is None else 'Forget'} checkpoint {printable(name)!r}?", yes=yes)
    with connected(socket, namespace, timeout) as client:
        known = client.checkpoints
        version = known.remove(name) if forget is None else known.forget(name, forget)
    if json:
        print_json({"name": name, "version": version})
    else:
        remark(f"{done} {printable(name)}@{version}")
