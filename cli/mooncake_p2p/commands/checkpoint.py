"""`checkpoint publish` and `checkpoint fetch`: directories that one peer publishes and many fetch from each other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from mooncake_p2p.options import (
    AtPeer,
    Exclude,
    Include,
    argument,
    flag,
    option,
    parse_timeout,
    was_given,
    with_records,
)
from mooncake_p2p.output import format_transfer, print_json, printable, progress, remark
from p2pstore.objects import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import CheckpointProgress, FetchedCheckpoint

Watch = Callable[["CheckpointProgress"], None]

FOLLOWERS_SECONDS: Final = 600.0
DOING: Final = {
    "waiting": "waiting for {}",
    "hashing": "hashing {}",
    "seeding": "seeding {}",
    "checking": "checking the directory of {}",
    "fetching": "fetching {}",
    "finishing": "writing {} to the disk",
}
"""Labels of the progress bar, by phase."""

Name = Annotated[str, argument("NAME", "Name of the checkpoint.")]
NameAndVersion = Annotated[
    str,
    argument(
        "NAME[@VERSION]",
        "Name of the checkpoint, and the first digits of a version; default: the newest.",
    ),
]
Source = Annotated[str, argument("DIR", "Directory to publish.")]
Target = Annotated[str, argument("DIR", "Directory for the versions.")]
Keep = Annotated[int, option("N", "How many versions stay, the newest.", min=1)]
Publisher = Annotated[
    str | None,
    option("PEER", "Peer id of the publisher to trust; default: the first that this peer saw."),
]


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How `checkpoint publish` publishes."""

    include: Include = None
    exclude: Exclude = None
    piece_size: Annotated[
        str | None, option("SIZE", "Length of the pieces that peers exchange, a power of two.")
    ] = None
    wait_seeded: Annotated[
        bool, flag("--wait-seeded", "End when the others have all of it: then DIR may change.")
    ] = False
    wait_followers: Annotated[
        int,
        option(
            "N",
            "End when N followers have it verified; status 5 after --timeout, or 10 minutes.",
            min=0,
            show_default=False,
        ),
    ] = 0
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be published.")] = False

    def arguments(self) -> dict[str, Any]:
        """As `Checkpoints.publish` takes them. Raises `ValueError` naming an option."""
        size = self.piece_size
        return {
            "include": self.include or [],
            "exclude": self.exclude or [],
            "piece_bytes": 0 if size is None else parse_bytes(size, "--piece-size"),
            "wait_seeded": self.wait_seeded,
        }


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How `checkpoint fetch` fetches."""

    flat: Annotated[bool, flag("--flat", "Put the files into DIR itself, without versions.")] = False
    keep: Keep = 2
    include: Include = None
    exclude: Exclude = None
    limit_rate: Annotated[str | None, option("SIZE", "Fetch no more than this a second.")] = None
    verify: Annotated[bool, flag("--verify", "Read and hash again what is in DIR already.")] = False
    publisher: Publisher = None
    wait: Annotated[str, option("SECONDS|10m", "How long to wait until it is published.")] = "0"

    def arguments(self) -> dict[str, Any]:
        """As `Checkpoints.fetch` takes them. Raises `ValueError` naming an option."""
        rate = self.limit_rate
        return {
            "publisher": self.publisher,
            "flat": self.flat,
            "keep": self.keep,
            "include": self.include or [],
            "exclude": self.exclude or [],
            "limit_rate": 0 if rate is None else parse_bytes(rate, "--limit-rate"),
            "verify": self.verify,
            "wait": 0.0 if self.wait == "0" else parse_timeout(self.wait, "--wait"),
        }


@with_records
def checkpoint_publish(name: Name, directory: Source, *, how: PublishOptions, peer: AtPeer) -> None:
    """Publish a directory as a checkpoint's newest version.

    The local peer reads the files in place, as long as it runs: leave them as they are, or wait until others have all
    of them (--wait-seeded). A file that changes meanwhile is an error, never a bad copy. Files of downloads
    (.git, .cache/huggingface, *.incomplete, *.lock) are left out unless --include names them.
    """
    arguments = how.arguments()
    if how.dry_run:
        _say_what_would_be(directory, arguments["include"], arguments["exclude"], peer.json)
        return
    begin = time.perf_counter()
    with peer.connected() as client, _shown(name) as watch:
        done = client.checkpoints.publish(name, directory, **arguments, progress=watch)
        if how.wait_followers:
            _wait_followers(client, name, done.version, how.wait_followers, peer.timeout)
    seconds = time.perf_counter() - begin
    document = {
        "name": name,
        "version": done.version,
        "files": done.files,
        "bytes": done.total_bytes,
        "pieces": done.pieces,
        "piece_bytes": done.piece_bytes,
        "notes": done.notes,
        "seconds": round(seconds, 6),
    }
    if _reported(peer.json, document, done.notes):
        return
    print(f"{name}@{done.version}")
    remark(
        f"published {printable(name)}: {counted(done.files, 'file')}, {format_transfer(done.total_bytes, seconds)}, "
        f"{counted(done.pieces, 'piece')} of {format_bytes(done.piece_bytes)}"
    )


@with_records
def checkpoint_fetch(
    name: NameAndVersion, directory: Target, *, how: FetchOptions, peer: AtPeer
) -> None:
    """Fetch a checkpoint to a directory.

    To DIR/VERSION; DIR/current names it then. Pieces that are there already are not fetched: an interrupted fetch goes
    on where it was, and of a slightly changed version only changed pieces come. The local peer passes on what it has.

    With --include or --exclude DIR/VERSION has only those files, and those that were fetched before; without them the
    rest is fetched later.
    """
    bare, at, version = name.partition("@")
    if at and not version:
        raise ValueError(f"{printable(name)}: the version is empty: give one, or leave out the @")
    arguments = how.arguments()
    begin = time.perf_counter()
    with peer.connected() as client, _shown(bare) as watch, _go_on_hint():
        done = client.checkpoints.fetch(bare, directory, version=version, progress=watch, **arguments)
    seconds = time.perf_counter() - begin
    document = {
        "name": bare,
        "version": done.version,
        "directory": os.path.abspath(done.directory),
        "bytes": done.total_bytes,
        "fetched_bytes": done.fetched_bytes,
        "whole": done.whole,
        "unmatched": done.unmatched,
        "seconds": round(seconds, 6),
    }
    if _reported(peer.json, document, [f"no file matches {each!r}" for each in done.unmatched]):
        return
    print(done.directory)
    remark(_fetched_line(bare, done, seconds))


def _fetched_line(name: str, done: FetchedCheckpoint, seconds: float) -> str:
    there = done.total_bytes - done.fetched_bytes
    some = "" if done.whole else "some files of "
    reused = f", {format_bytes(there)} were there or in equal files" if there else ""
    moved = format_transfer(done.fetched_bytes, seconds)
    return f"fetched {some}{printable(name)}@{done.version}: {moved}{reused}"


@contextmanager
def _shown(name: str) -> Iterator[Watch | None]:
    """A progress bar for `Checkpoints`; None where it is not shown."""
    with progress(DOING["waiting"].format(printable(name))) as bar:

        def watch(report: CheckpointProgress) -> None:
            bar.relabel(DOING.get(report.phase, "{}").format(printable(name)))
            bar.at(report.done_bytes, report.total_bytes or None)

        yield watch if bar.shown else None


@contextmanager
def _go_on_hint() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        remark("stopped; the same command goes on with what is there")
        raise


def _wait_followers(client: BlockingClient, name: str, version: str, count: int, timeout: str) -> None:
    """Wait for followers: --timeout if it was given, which otherwise limits silence; else `FOLLOWERS_SECONDS`."""
    seconds = parse_timeout(timeout) if was_given("timeout") else FOLLOWERS_SECONDS
    if not sys.stderr.isatty():
        remark(
            f"published {printable(name)}@{version}; waiting for {counted(count, 'follower')}, "
            f"for {seconds:g} s at most"
        )
    with progress(f"waiting for followers of {printable(name)}"):
        client.checkpoints.wait_followers(name, version, count, timeout=seconds)


def _reported(json: bool, document: dict[str, Any], notes: Sequence[str]) -> bool:
    if json:
        print_json(document)
    for note in notes:
        remark(f"note: {printable(note)}")
    return json


def _say_what_would_be(directory: str, include: list[str], exclude: list[str], json: bool) -> None:
    from pathlib import Path

    from p2pstore.checkpoint.content.pieces import choose_piece_bytes
    from p2pstore.checkpoint.content.sources import SourceDirectory, inspect

    source = SourceDirectory(Path(directory), include, exclude)
    notes = inspect(source, include, exclude)
    piece_bytes = choose_piece_bytes([file.size for file in source.files])
    document = {
        "files": [{"path": file.path, "bytes": file.size} for file in source.files],
        "bytes": source.total_bytes,
        "piece_bytes": piece_bytes,
        "notes": notes,
    }
    if _reported(json, document, notes):
        return
    for file in source.files:
        print(f"{file.size:>16,}  {printable(file.path)}")
    remark(
        f"would publish {counted(len(source.files), 'file')}, {format_bytes(source.total_bytes)}, in pieces of "
        f"{format_bytes(piece_bytes)}"
    )
