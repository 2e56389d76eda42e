"""`put` and `get`: values in and out.

`get --explain`: the course of one get, for people and as JSON.
"""

from __future__ import annotations

import math
import os
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooncake_p2p import files_and_pipes as files
from mooncake_p2p.files_and_pipes import NewFile
from mooncake_p2p.options import AtPeer, Key, argument, flag, option, parse_timeout, with_records
from mooncake_p2p.output import (
    STANDARD_OUTPUT,
    CommandFailed,
    format_rate,
    format_seconds,
    format_transfer,
    print_json,
    printable,
    progress,
    remark,
    shortfall,
)
from p2pstore.errors import BufferTooSmall, ConfigError, KeyExists, NoSuchKey
from p2pstore.objects import PART_BYTES, encode_key, format_bytes, parse_duration

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.transfer.transfer_trace import FetchTrace, TransportTry

FIRST_GUESS_BYTES: Final = PART_BYTES
"""Room that is offered before the length is known: a value that fits needs no second request."""
LENGTH_CHANGES: Final = 8
"""How often in a row a value may be replaced by a longer one while it is being fetched."""
REASON_COLUMNS: Final = 80
RDMA: Final = "rdma"
NOT_FOR_CLIENTS: Final = "not tried, only peers read by it, for large gets, leases and copies"


class Pin(StrEnum):
    none = "none"
    soft = "soft"
    hard = "hard"


class OnConflict(StrEnum):
    keep = "keep"
    overwrite = "overwrite"
    error = "error"


@dataclass(frozen=True, slots=True)
class PutOptions:
    """How `put` stores an object."""

    replicas: Annotated[int, option("N", "How many peers shall hold it.", min=1)] = 1
    pin: Annotated[Pin, typer.Option(help="soft: evicted last; hard: never evicted.")] = Pin.none
    ttl: Annotated[str | None, option("SECONDS|10m", "Forget it after this time.")] = None
    overwrite: Annotated[bool, flag("--overwrite", "Replace a value that has other bytes.")] = False
    on_conflict: Annotated[
        OnConflict | None,
        typer.Option(
            "--on-conflict",
            help="When the key has other bytes: keep them (the default), overwrite them, or fail. "
            "The exit status is 1 unless they are overwritten.",
            show_default=False,
        ),
    ] = None
    durable: Annotated[bool, flag("--durable", "Have it on the peer's SSD before this ends.")] = False

    def arguments(self) -> dict[str, Any]:
        """As `BlockingClient.put` takes them. Raises `ValueError` naming an option."""
        if self.overwrite and self.on_conflict not in (None, OnConflict.overwrite):
            raise ValueError("--overwrite contradicts --on-conflict: give one of the two")
        return {
            "replicas": self.replicas,
            "pin": self.pin.value,
            "ttl": None if self.ttl is None else parse_timeout(self.ttl, "--ttl"),
            "overwrite": self.overwrite or self.on_conflict is OnConflict.overwrite,
            "durable": self.durable,
        }


@with_records
def put(
    key: Key,
    file: Annotated[
        str | None, argument("FILE|-", "The value; standard input when it is - or left out.")
    ] = None,
    *,
    how: PutOptions,
    peer: AtPeer,
) -> None:
    """Store a file, or standard input, under a key.

    A key that has other bytes is kept, and the exit status is 1, without --overwrite (short for
    --on-conflict overwrite). Putting the same bytes again stores nothing, but a --ttl replaces the
    object's, and --pin and --replicas are raised. A pipe is first spooled to a temporary file (in
    TMPDIR, at most 4 GiB).
    """
    encode_key(key)
    arguments = how.arguments()
    if file is not None and file != "-" and os.path.exists(key) and not os.path.exists(file):
        swapped = f"`put {shlex.quote(file)} {shlex.quote(key)}`"
        raise CommandFailed(f"{printable(file)}: no such file; the key comes first: {swapped}")
    with (
        files.open_source(file) as source,
        peer.connected() as client,
        files.value_of(source) as value,
        progress(f"putting {printable(key)}", len(value)) as bar,
    ):
        length_bytes = len(value)
        begin = time.perf_counter()
        result = client.put(key, value, **arguments, progress=bar.at if bar.shown else None)
        seconds = time.perf_counter() - begin
        too_few = shortfall(client, result)
        elsewhere = result.location if result.location != client.peer_name else ""
    if peer.json:
        document = {**asdict(result), "version": list(result.version), "bytes": length_bytes}
        more = {"elsewhere": bool(elsewhere), "shortfall": too_few or None}
        print_json({**document, **more, "seconds": round(seconds, 6)})
    if result.status == "kept_existing":
        raise KeyExists(
            f"{printable(key)} already exists with other bytes and was kept; "
            "use --overwrite to replace it",
            key,
        )
    if not peer.json:
        where = f", on {printable(elsewhere)}: this peer has no room for it" if elsewhere else ""
        copies = too_few or f"copies {result.copies}/{result.wanted}"
        remark(
            f"{result.status} {printable(key)}: {format_transfer(length_bytes, seconds)}, "
            f"{copies}{where}"
        )


@with_records
def get(
    key: Key,
    output: Annotated[
        str | None,
        option("FILE|-", "Where to write the value; - is stdout, even a terminal.", "--output", "-o"),
    ] = None,
    wait: Annotated[str, option("SECONDS|10m", "Time to wait for a key that is not there yet.")] = "0",
    explain: Annotated[
        bool, flag("--explain", "Show on stderr its source, and the time of each stage.")
    ] = False,
    *,
    peer: AtPeer,
) -> None:
    """Fetch the value of a key.

    To stdout, unless that is a terminal. A file gets its name when it is complete: a get that fails
    leaves an existing file as it was, and no other.
    """
    encode_key(key)
    wait_seconds = parse_duration(wait, "--wait")
    if not wait_seconds < math.inf:
        raise ValueError(f"--wait: {wait!r} is too long")
    to_stdout = output is None or output == "-"
    if to_stdout and peer.json:
        raise ConfigError("--json needs -o FILE, because stdout carries the value")
    reading = _Reading(key, wait_seconds, explain)
    with _destination(output) as sink, peer.connected() as client:
        begin = time.perf_counter()
        try:
            length_bytes = sink(lambda: reading.fetch(client))
        except NoSuchKey as error:
            reading.tell()
            if not wait_seconds:
                raise
            raise NoSuchKey(f"{error}, and none came in the {wait_seconds:g} s of --wait") from None
        except BaseException:
            reading.tell()
            raise
        seconds = time.perf_counter() - begin
    if peer.json:
        document = {"key": key, "bytes": length_bytes, "output": output}
        document["seconds"] = round(seconds, 6)
        print_json(document | reading.document())
        return
    if not to_stdout:
        remark(f"got {printable(key)}: {format_transfer(length_bytes, seconds)}")
    reading.tell()


class _Reading:
    """One value on its way into memory, and, when that is asked for, how it got there."""

    def __init__(self, key: str, wait_seconds: float, explain: bool) -> None:
        self._key = key
        self._wait_until = time.monotonic() + wait_seconds
        self._explain = explain
        self._trace: FetchTrace | None = None

    def fetch(self, client: BlockingClient) -> memoryview:
        length = FIRST_GUESS_BYTES
        with progress(f"looking for {printable(self._key)}") as bar:

            def show(done_bytes: int, total_bytes: int) -> None:
                bar.relabel(f"getting {printable(self._key)}")
                bar.at(done_bytes, total_bytes)

            for _ in range(LENGTH_CHANGES):
                if self._explain:
                    from p2pstore.transfer.transfer_trace import FetchTrace

                    self._trace = FetchTrace()
                value = files.memory_for(length)
                try:
                    length = client.get_into(
                        self._key,
                        value,
                        wait=max(0.0, self._wait_until - time.monotonic()),
                        progress=show if bar.shown else None,
                        trace=self._trace,
                    )
                    return value[:length]
                except BufferTooSmall as error:
                    length = error.needed
        raise CommandFailed(f"{printable(self._key)} keeps being replaced by longer values; try again")

    def tell(self) -> None:
        if self._trace is not None:
            for line in explanation(self._trace):
                remark(line)

    def document(self) -> dict[str, Any]:
        if self._trace is None:
            return {}
        return {"explain": document(self._trace)}


Fetch = Callable[[], memoryview]
_Sink = Callable[[Fetch], int]
"""Somewhere for a value: fetches it, whole and verified, and then writes it. Returns the length."""


def _destination(output: str | None) -> AbstractContextManager[_Sink]:
    if output is None or output == "-":
        return _stream(files.standard_output(binary_to_terminal=output == "-"), STANDARD_OUTPUT)
    return _special_file(output) if files.is_stream(output) else _file(output)


@contextmanager
def _file(path: str) -> Iterator[_Sink]:
    """A file that appears when it is complete. It is written, not mapped: the faults of a mapped new
    file take five times as long as the copy."""
    with closing(NewFile(path)) as file:

        def sink(fetch: Fetch) -> int:
            value = fetch()
            file.resize(len(value))
            with progress("writing", len(value)) as bar:
                files.write_all(file.descriptor, value, bar.advance)
            file.commit()
            return len(value)

        yield sink


@contextmanager
def _stream(descriptor: int, name: str) -> Iterator[_Sink]:
    def sink(fetch: Fetch) -> int:
        value = fetch()
        with progress("writing", len(value)) as bar:
            try:
                files.write_all(descriptor, value, bar.advance)
            except OSError as error:
                error.filename = name
                raise
        return len(value)

    yield sink


@contextmanager
def _special_file(path: str) -> Iterator[_Sink]:
    with open(path, "wb", buffering=0) as file, _stream(file.fileno(), path) as sink:
        yield sink


def explanation(trace: FetchTrace) -> list[str]:
    """One line per stage, for stderr."""
    lines = [f"lookup    {_lookup(trace)}"]
    if not trace.local:
        lines += [f"tried     {printable(each)}" for each in _tries(trace)]
    if trace.source:
        lines.append(f"source    {printable(trace.source)}, {trace.tier}, over {trace.transport}")
        if not trace.local:
            lines.append(f"queue     {format_seconds(trace.queue_seconds)} until connected")
        rate = format_rate(trace.length_bytes, trace.transfer_seconds)
        lines.append(
            f"transfer  {format_seconds(trace.transfer_seconds)} for "
            f"{format_bytes(trace.length_bytes)} ({rate})"
        )
        verify = "in the same pass as the copy"
        if trace.verify_seconds is not None:
            verify = f"{format_seconds(trace.verify_seconds)} for the checksums"
        lines.append(f"verify    {verify}")
    return lines


def document(trace: FetchTrace) -> dict[str, Any]:
    return {**asdict(trace), "not_tried": {} if _by_rdma(trace) else {RDMA: NOT_FOR_CLIENTS}}


def _by_rdma(trace: FetchTrace) -> bool:
    return any(each.transport == RDMA for each in trace.tries)


def _lookup(trace: FetchTrace) -> str:
    if trace.local and not trace.lookup_seconds:
        return "in the local peer's memory; no peer was asked"
    copies = "1 copy" if trace.copies_known == 1 else f"{trace.copies_known} copies"
    if trace.copies_unreachable:
        copies += f" and {trace.copies_unreachable} that cannot be reached"
    homes = "no other peer was asked"
    if trace.homes_asked:
        homes = f"home peers asked: {trace.homes_asked}"
    return f"{format_seconds(trace.lookup_seconds)}, {copies}; {homes}"


def _tries(trace: FetchTrace) -> Iterator[str]:
    several = sum(each.length_bytes > 0 for each in trace.tries) > 1
    for each in trace.tries:
        brought = f", {format_bytes(each.length_bytes)}" if several and each.length_bytes else ""
        yield f"{each.peer or 'a peer'} over {each.transport}: {_outcome(each)}{brought}"
    if trace.tries and not _by_rdma(trace):
        yield f"{RDMA}: {NOT_FOR_CLIENTS}"


def _outcome(each: TransportTry) -> str:
    if not each.tried:
        return f"not tried, {_short(each.outcome)}"
    return f"{_short(each.outcome) or 'interrupted'} after {format_seconds(each.seconds)}"


def _short(reason: str) -> str:
    """The cause, without the cure, which the error names."""
    return textwrap.shorten(reason.partition("; ")[0], REASON_COLUMNS, placeholder=" ..")
