"""`checkpoint follow`, `update`, `status`, `list` and `rm`: names of checkpoints, their followers, and `--exec`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from mooncake_p2p.commands.checkpoint import Keep, Name, Publisher, Target
from mooncake_p2p.options import (
    AtPeer,
    Exclude,
    Include,
    Json,
    Namespace,
    Socket,
    Yes,
    connected,
    flag,
    option,
    parse_timeout,
    with_records,
)
from mooncake_p2p.output import (
    Columns,
    confirm,
    describe,
    format_duration,
    print_json,
    print_json_line,
    print_table,
    printable,
    progress,
    remark,
)
from p2pstore.errors import ConfigError, DeadlineExceeded, NoLocalPeer, StoreClosed
from p2pstore.objects import counted, format_bytes

if TYPE_CHECKING:
    from p2pstore.results import (
        CheckpointFollower,
        CheckpointInfo,
        CheckpointMember,
        CheckpointUpdate,
        FollowedCheckpoint,
    )

SHORT_DIGITS: Final = 12
"""Digits of a version in tables."""
LOOK_SECONDS: Final = 1.0
NAMED: Final = 4
"""Followers named in one line."""
DEFAULT_UPDATE_TIMEOUT: Final = "10m"

SwitchCommand = Annotated[
    str | None,
    option("CMD", "Run this by the shell each time that another version is in use.", "--exec"),
]
RECORD: Final = ".p2pstore/exec"
"""In the directory: the version for which the command was run last, with success."""


# --- following ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How `checkpoint follow` follows."""

    command: SwitchCommand = None
    publisher: Publisher = None
    keep: Keep = 2
    include: Include = None
    exclude: Exclude = None


@with_records
def checkpoint_follow(name: Name, directory: Target, *, how: FollowOptions, peer: AtPeer) -> None:
    """Follow a checkpoint.

    Each published version is fetched to DIR/VERSION and verified. DIR/current names it when the publisher says so:
    `checkpoint update` there waits for all followers first. Runs until Ctrl-C; the same command goes on where it was.
    With --include or --exclude only those files of each version are fetched.

    CMD finds CHECKPOINT_NAME, CHECKPOINT_VERSION and CHECKPOINT_DIRECTORY in its environment. It is run for every
    version that comes into use while this command runs; at the start also for the version in use, unless it has
    succeeded for that one before.
    """
    on_switch = None if how.command is None else OnSwitch(how.command, name, directory)
    told: str | None = None

    def changed(now: FollowedCheckpoint) -> None:
        nonlocal told
        if peer.json:
            print_json_line(asdict(now))
        line = _follow_line(name, now)
        if line != told and not peer.json:
            remark(line)
        told = line
        if on_switch is not None and now.current:
            on_switch.used(now.current)

    while True:
        try:
            with peer.connected() as client:
                client.checkpoints.follow(
                    name,
                    directory,
                    changed,
                    publisher=how.publisher,
                    keep=how.keep,
                    include=how.include or [],
                    exclude=how.exclude or [],
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
        return f"waiting until a peer publishes {printable(name)}{in_use}{why}"
    by = printable(now.publisher_name)
    match now.stage:
        case "fetching":
            return f"fetching {called}, published by {by}"
        case "verified":
            return f"{called} is verified; waiting for {by} to switch to it"
        case "current":
            return f"{called} is in use"
        case "failed":
            return f"error: {called}: {printable(now.why)}; will retry"
    return f"waiting for a version of {printable(name)} from {by}"


# --- updating ----------------------------------------------------------------------------------


def checkpoint_update(
    name: Name,
    quorum: Annotated[int | None, option("N", "Wait for N followers instead of all.", min=0)] = None,
    timeout: Annotated[
        str, option("SECONDS|10m", "Switch no follower when they need longer.")
    ] = DEFAULT_UPDATE_TIMEOUT,
    socket: Socket = None,
    namespace: Namespace = "default",
    json: Json = False,
) -> None:
    """Have all followers switch to a checkpoint's newest version.

    Run it at the peer that published the version. It waits until all followers (or --quorum of them) have it verified,
    then switches all at once; late followers switch when they have it. When they do not have it within --timeout, no
    follower switches: exit status 5, and the output names those that are behind. Without any follower it ends within
    seconds. A follower that dies meanwhile is waited for; one that was dead before is not.
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
            bar.relabel(f"{now.followers} followers, {what}{f'; behind: {behind}' if behind else ''}")

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


def _say_whom_it_waits_for(name: str, now: CheckpointUpdate, quorum: int | None, seconds: float) -> None:
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
        print_json({"name": name, "switched": False, "laggards": [asdict(each) for each in laggards]})


def _laggard(each: CheckpointFollower) -> str:
    from p2pstore.checkpoint.client.group_calls import laggard_state

    return f"{each.name} ({laggard_state(each)})"


# --- status, list and rm -----------------------------------------------------------------------------


@with_records
def checkpoint_status(
    name: Name,
    watch: Annotated[bool, flag("--watch", "Show it every second, until Ctrl-C.")] = False,
    *,
    peer: AtPeer,
) -> None:
    """Show which peers have a checkpoint, and how far the others are.

    The slowest come first. RATE is a peer's mean rate so far, LEFT its remaining time at that rate. DONE is reported by
    the percent, in a large cluster less often; "40% of 25%" means 40% of the files that the peer fetches, which are a
    quarter of all. USES is the version that a follower uses.

    --watch repeats this every second; into a pipe it prints one block each time (with --json one line).
    """
    with peer.connected() as client:
        infos = client.checkpoints.status(name)
        if not watch:
            _print_status(infos, peer.json)
            return
        while True:
            _print_status(infos, peer.json, again=True)
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
            print_table(sorted(info.members, key=_slowest_first), _member_columns(info))
    sys.stdout.flush()


def status_lines(info: CheckpointInfo) -> list[str]:
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
        trusted += ", not alive"
    lines = [
        f"{printable(info.name)}@{info.version}: {format_bytes(info.total_bytes)}, "
        f"{counted(info.files, 'file')}, "
        f"published {_ago(info.published)} by {printable(info.publisher_name)} ({info.publisher}){trusted}"
    ]
    figures = [f"{have} {'has' if have == 1 else 'have'} it"]
    if fetching:
        figures.append(f"{len(fetching)} {'fetches' if len(fetching) == 1 else 'fetch'} it")
        seconds = [left for each in fetching if (left := _seconds_left(info, each)) is not None]
        if len(seconds) == len(fetching):
            figures[-1] += f", {format_duration(max(seconds))} left"
    if have < len(done):
        figures.append(f"{len(done) - have} {'has' if len(done) - have == 1 else 'have'} a part")
    if failed:
        figures.append(f"{failed} failed")
    if followers:
        figures.append(counted(len(followers), "follower"))
        if info.switched:
            figures.append(f"{using} of them use {info.switched[:SHORT_DIGITS]}")
    return [*lines, "; ".join(figures)]


def _slowest_first(member: CheckpointMember) -> tuple[bool, float, str]:
    return member.state != "failed", member.done, member.name


def _member_columns(info: CheckpointInfo) -> Columns[CheckpointMember]:
    def rate(member: CheckpointMember) -> str:
        known = member.state == "fetching" and member.bytes_per_second
        return f"{format_bytes(member.bytes_per_second)}/s" if known else ""

    def left(member: CheckpointMember) -> str:
        seconds = _seconds_left(info, member)
        return "" if seconds is None else format_duration(seconds)

    return {
        "PEER": lambda each: f"{each.name}{' (here)' if each.me else ''}",
        "VERSION": lambda each: each.version[:SHORT_DIGITS],
        "STATE": lambda each: each.state,
        ">DONE": lambda each: "" if each.state in ("following", "publishing") else _done(each),
        ">RATE": rate,
        ">LEFT": left,
        "USES": lambda each: (each.current[:SHORT_DIGITS] or "none") if each.follows else "",
        "~WHY": lambda each: each.why,
    }


def _seconds_left(info: CheckpointInfo, member: CheckpointMember) -> float | None:
    """Remaining time of a fetch; None when unknown."""
    if member.state != "fetching" or not member.bytes_per_second:
        return None
    return (1 - member.done) * member.needs * info.total_bytes / member.bytes_per_second


def _done(member: CheckpointMember) -> str:
    return f"{member.done:.0%}" + (f" of {member.needs:.0%}" if member.needs < 1 else "")


def _ago(unix_seconds: float) -> str:
    return f"{format_duration(max(0.0, time.time() - unix_seconds))} ago"


def _document(info: CheckpointInfo) -> dict[str, Any]:
    document = asdict(info)
    for member, shown in zip(info.members, document["members"], strict=True):
        shown["seconds_left"] = _seconds_left(info, member)
    return document


@with_records
def checkpoint_list(
    everywhere: Annotated[bool, flag("--all", "Of all namespaces.")] = False, *, peer: AtPeer
) -> None:
    """List the checkpoints that are published."""
    with peer.connected() as client:
        infos = client.checkpoints.names(everywhere=everywhere)
    if peer.json:
        documents = [asdict(info) for info in infos]
        for document in documents:
            del document["members"]
        print_json(documents)
        return
    spaces: Columns[CheckpointInfo] = {"NAMESPACE": lambda info: info.namespace} if everywhere else {}
    print_table(
        infos,
        {
            **spaces,
            "NAME": lambda info: info.name,
            "VERSION": lambda info: info.version,
            ">SIZE": lambda info: format_bytes(info.total_bytes),
            ">FILES": lambda info: f"{info.files:,}",
            "PUBLISHED": lambda info: _ago(info.published),
            "BY": lambda info: f"{info.publisher_name}{'' if info.alive else ' (not alive)'}",
            "IN USE": lambda info: info.switched[:SHORT_DIGITS],
        },
    )


@with_records
def checkpoint_rm(
    name: Name,
    forget: Annotated[
        str | None, option("PEER", "Forget that peer's checkpoint of the name, on this peer alone.")
    ] = None,
    yes: Yes = False,
    *,
    peer: AtPeer,
) -> None:
    """Remove a checkpoint that the local peer published.

    It is not listed any more, this peer stops serving it, and followers wait. Copies on other peers' disks stay.

    --forget is for a publisher that is gone for good: the local peer hides and distrusts its checkpoint, until that
    peer publishes a newer version. `checkpoint status` shows peer ids; each other peer has to forget it itself.
    """
    done = "removed" if forget is None else "forgot"
    confirm(f"{'Remove' if forget is None else 'Forget'} checkpoint {printable(name)!r}?", yes=yes)
    with peer.connected() as client:
        known = client.checkpoints
        version = known.remove(name) if forget is None else known.forget(name, forget)
    if peer.json:
        print_json({"name": name, "version": version})
    else:
        remark(f"{done} {printable(name)}@{version}")


class OnSwitch:
    """Runs the command once for each version that is in use; again after a start, when it did not end well."""

    def __init__(self, command: str, name: str, directory: str) -> None:
        self._command = command
        self._name = name
        self._directory = Path(directory).absolute()
        self._record = self._directory / RECORD
        self._ran_for = ""

    def used(self, version: str) -> None:
        """This version is in use. Returns when the command has ended."""
        if not self._ran_for:
            self._ran_for = self._recorded()
        if version == self._ran_for:
            return
        self._ran_for = version
        environment = {
            **os.environ,
            "CHECKPOINT_NAME": self._name,
            "CHECKPOINT_VERSION": version,
            "CHECKPOINT_DIRECTORY": str(self._directory / version),
        }
        # Its output goes to stderr: stdout is for what this command says.
        done = subprocess.run(["/bin/sh", "-c", self._command], env=environment, stdout=2, check=False)
        if done.returncode:
            remark(
                f"error: {printable(self._command)}: exit status {done.returncode}, for {version}; it is run again "
                "for the next version, or when this command is started again"
            )
            return
        self._save(version)

    def _recorded(self) -> str:
        from p2pstore.state.folder import read_regular_file

        try:
            return read_regular_file(self._record).decode("ascii").strip()
        except (OSError, UnicodeDecodeError, ConfigError):
            return ""

    def _save(self, version: str) -> None:
        from p2pstore.state.folder import replace_file

        try:
            replace_file(self._record, f"{version}\n".encode("ascii"))
        except OSError as error:
            remark(f"error: {self._record}: {error.strerror}; the next start runs the command again")
