"""`checkpoint publish` and `checkpoint fetch`: directories that one publishes and many fetch from each other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Exclude,
    Include,
    Json,
    Namespace,
    Socket,
    Timeout,
    connected,
    parse_timeout,
    was_given,
)
from mooncake_p2p.output import format_transfer, print_json, printable, progress, remark
from p2pstore.objects import format_bytes, parse_bytes

if TYPE_CHECKING:
    from p2pstore.results import CheckpointProgress

Watch = Callable[["CheckpointProgress"], None]

FOLLOWERS_SECONDS: Final = 600.0
DOING: Final = {
    "waiting": "waiting for {}",
    "hashing": "hashing {}",
    "seeding": "seeding {}",
    "checking": "checking what is there of {}",
    "fetching": "fetching {}",
    "finishing": "writing {} to the disk",
}
"""What is done in each phase, in words."""

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="What the checkpoint is called.", show_default=False),
]


def checkpoint_publish(
    name: Name,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The files to publish.", show_default=False)
    ],
    include: Include = None,
    exclude: Exclude = None,
    piece_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Length of the pieces that peers exchange, a power of two.",
            show_default=False,
        ),
    ] = None,
    wait_seeded: Annotated[
        bool,
        typer.Option(
            "--wait-seeded", help="End when the others have all of it: then DIR may change."
        ),
    ] = False,
    wait_followers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="End when so many followers have it verified; status 5 after --timeout, or 10 minutes.",
            show_default=False,
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be published.")
    ] = False,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Publish a directory as a checkpoint's newest version.

    The local peer reads the files from where they are, as long as it runs: leave them as they are, or wait until
    others have all of them (--wait-seeded). A file that changes meanwhile is an error, never a bad copy. What belongs
    to a download (.git, .cache/huggingface, *.incomplete, *.lock) is left out unless --include names it.
    """
    piece_bytes = 0 if piece_size is None else parse_bytes(piece_size, "--piece-size")
    if dry_run:
        _say_what_would_be(directory, include or [], exclude or [], json)
        return
    begin = time.perf_counter()
    with connected(socket, namespace, timeout) as client, _shown(name) as watch:
        done = client.checkpoints.publish(
            name,
            directory,
            include=include or [],
            exclude=exclude or [],
            piece_bytes=piece_bytes,
            wait_seeded=wait_seeded,
            progress=watch,
        )
        if wait_followers:
            if not sys.stderr.isatty():
                remark(
                    f"published {printable(name)}@{done.version}; waiting for {wait_followers} "
                    f"follower{'' if wait_followers == 1 else 's'}, for {_followers_timeout(timeout):g} s at most"
                )
            with progress(f"waiting for followers of {printable(name)}"):
                client.checkpoints.wait_followers(
                    name, done.version, wait_followers, timeout=_followers_timeout(timeout)
                )
    seconds = time.perf_counter() - begin
    if json:
        print_json(
            {
                "name": name,
                "version": done.version,
                "files": done.files,
                "bytes": done.total_bytes,
                "pieces": done.pieces,
                "piece_bytes": done.piece_bytes,
                "notes": done.notes,
                "seconds": round(seconds, 6),
            }
        )
    _say_notes(done.notes)
    if json:
        return
    print(f"{name}@{done.version}")
    remark(
        f"published {printable(name)}: {_files(done.files)}, {format_transfer(done.total_bytes, seconds)}, "
        f"{done.pieces:,} piece{'' if done.pieces == 1 else 's'} of {format_bytes(done.piece_bytes)}"
    )


def checkpoint_fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            help="Which checkpoint; its newest version, unless the beginning of another is given.",
            show_default=False,
        ),
    ],
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Where versions of it are kept.", show_default=False),
    ],
    flat: Annotated[
        bool, typer.Option("--flat", help="Put the files into DIR itself, without versions.")
    ] = False,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many versions stay, the newest.")
    ] = 2,
    include: Include = None,
    exclude: Exclude = None,
    limit_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Fetch no more than this a second.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read again what is in DIR already.")
    ] = False,
    publisher: Annotated[
        str | None,
        typer.Option(
            metavar="PEER",
            help="The peer id that must have published it; by default the first that did.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option(metavar="SECONDS|10m", help="Wait so long for it to be published.")
    ] = "0",
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Fetch a checkpoint to a directory.

    To DIR/VERSION; DIR/current names it then. What is there already is not fetched: an interrupted fetch goes on where
    it was, and of a slightly changed version only changed pieces come. The local peer passes on what it has.

    With --include or --exclude DIR/VERSION has only those files, and those that were fetched before; without them the
    rest is fetched later.
    """
    bare, at, version = name.partition("@")
    if at and not version:
        raise ValueError(f"{printable(name)}: the version is empty: give one, or leave out the @")
    rate = 0 if limit_rate is None else parse_bytes(limit_rate, "--limit-rate")
    wait_seconds = 0.0 if wait == "0" else parse_timeout(wait, "--wait")
    begin = time.perf_counter()
    with connected(socket, namespace, timeout) as client, _shown(bare) as watch:
        try:
            done = client.checkpoints.fetch(
                bare,
                directory,
                version=version,
                publisher=publisher,
                flat=flat,
                keep=keep,
                include=include or [],
                exclude=exclude or [],
                limit_rate=rate,
                verify=verify,
                wait=wait_seconds,
                progress=watch,
            )
        except KeyboardInterrupt:
            remark("stopped; the same command goes on with what is there")
            raise
    seconds = time.perf_counter() - begin
    if json:
        print_json(
            {
                "name": bare,
                "version": done.version,
                "directory": os.path.abspath(done.directory),
                "bytes": done.total_bytes,
                "fetched_bytes": done.fetched_bytes,
                "whole": done.whole,
                "unmatched": done.unmatched,
                "seconds": round(seconds, 6),
            }
        )
    _say_notes([f"no file matches {pattern!r}" for pattern in done.unmatched])
    if json:
        return
    print(done.directory)
    there = done.total_bytes - done.fetched_bytes
    some = "" if done.whole else "some files of "
    reused = f", {format_bytes(there)} were there or in equal files" if there else ""
    remark(
        f"fetched {some}{printable(bare)}@{done.version}: {format_transfer(done.fetched_bytes, seconds)}{reused}"
    )


@contextmanager
def _shown(name: str) -> Iterator[Watch | None]:
    """A progress bar for what `Checkpoints` reports; None when nobody looks."""
    with progress(DOING["waiting"].format(printable(name))) as bar:

        def watch(report: CheckpointProgress) -> None:
            bar.relabel(DOING.get(report.phase, "{}").format(printable(name)))
            bar.at(report.done_bytes, report.total_bytes or None)

        yield watch if bar.shown else None


def _followers_timeout(timeout: str) -> float:
    """How long followers may take: --timeout where it was given for that, which else is about silence."""
    return parse_timeout(timeout) if was_given("timeout") else FOLLOWERS_SECONDS


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        remark(f"note: {printable(note)}")


def _say_what_would_be(directory: str, include: list[str], exclude: list[str], json: bool) -> None:
    from pathlib import Path

    from p2pstore.checkpoint.content.pieces import choose_piece_bytes
    from p2pstore.checkpoint.content.sources import SourceDirectory, inspect

    source = SourceDirectory(Path(directory), include, exclude)
    notes = inspect(source, include, exclude)
    piece_bytes = choose_piece_bytes([file.size for file in source.files])
    if json:
        print_json(
            {
                "files": [{"path": file.path, "bytes": file.size} for file in source.files],
                "bytes": source.total_bytes,
                "piece_bytes": piece_bytes,
                "notes": notes,
            }
        )
    _say_notes(notes)
    if json:
        return
    for file in source.files:
        print(f"{file.size:>16,}  {printable(file.path)}")
    remark(
        f"would publish {_files(len(source.files))}, {format_bytes(source.total_bytes)}, in pieces of "
        f"{format_bytes(piece_bytes)}"
    )
