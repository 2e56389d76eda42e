"""`put`, `get` and `rm`: values in, out and away."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p import transfers
from mooncake_p2p.errors import CommandFailed, ExitCode, describe, exit_code
from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Key,
    Namespace,
    Socket,
    Timeout,
    connected,
    parse_timeout,
)
from mooncake_p2p.output import format_transfer, print_json, printable, progress, remark
from p2pstore.errors import BufferTooSmall, ConfigError, NoSuchKey
from p2pstore.objects import encode_key, format_bytes, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from p2pstore.blocking import BlockingClient

LENGTH_CHANGES: Final = 8
"""How often in a row a value may be replaced by a longer one while it is being fetched."""


class Pin(StrEnum):
    none = "none"
    soft = "soft"
    hard = "hard"


def put(
    key: Key,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|-",
            help="The value; standard input when it is - or left out.",
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many peers shall hold it.")
    ] = 1,
    pin: Annotated[Pin, typer.Option(help="soft: evicted last; hard: never evicted.")] = Pin.none,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="SECONDS|10m", help="Forget it after so long.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a value that has other bytes.")
    ] = False,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Store a file, or standard input, under a key.

    Putting the same bytes again changes nothing; other bytes are refused (exit status 1) without
    --overwrite. A pipe is first spooled to a temporary file (in TMPDIR, at most 4 GiB).
    """
    encode_key(key)
    ttl_seconds = None if ttl is None else parse_timeout(ttl, "--ttl")
    with (
        transfers.open_source(file) as source,
        connected(socket, namespace, timeout) as client,
        transfers.value_of(source) as value,
        progress(f"putting {format_bytes(len(value))}"),
    ):
        length_bytes = len(value)
        begin = time.perf_counter()
        result = client.put(
            key,
            value,
            replicas=replicas,
            pin=pin.value,
            ttl=ttl_seconds,
            overwrite=overwrite,
        )
        seconds = time.perf_counter() - begin
    if json:
        print_json(
            {
                "key": key,
                "status": result.status,
                "bytes": length_bytes,
                "copies": result.copies,
                "wanted": result.wanted,
                "location": result.location,
                "version": list(result.version),
                "seconds": round(seconds, 6),
            }
        )
    if result.status == "kept_existing":
        raise CommandFailed(
            f"{printable(key)} already exists with other bytes and was kept; "
            "use --overwrite to replace it"
        )
    if not json:
        later = "" if result.copies >= result.wanted else ", more when there are peers with room"
        remark(
            f"{result.status} {printable(key)}: {format_transfer(length_bytes, seconds)}, "
            f"copies {result.copies}/{result.wanted}{later}"
        )


def get(
    key: Key,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|-",
            help="Where to write the value; - is stdout, even a terminal.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option(metavar="SECONDS", help="Wait so long for a key that is not there yet.")
    ] = "0",
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Fetch the value of a key.

    To stdout, unless that is a terminal. A file is written beside its place and renamed when it is
    complete: a get that fails leaves an existing file as it was.
    """
    encode_key(key)
    wait_seconds = parse_duration(wait, "--wait")
    to_stdout = output is None or output == "-"
    if to_stdout and json:
        raise ConfigError("--json needs -o FILE, because stdout carries the value")
    destination: AbstractContextManager[_Sink]
    if output is None or output == "-":
        destination = _stream(transfers.standard_output(binary_to_terminal=output == "-"))
    elif transfers.is_stream(output):
        destination = _special_file(output)
    else:
        destination = _file(output)
    with destination as sink, connected(socket, namespace, timeout) as client:
        begin = time.perf_counter()
        length_bytes = sink(lambda: _fetch(client, key, wait_seconds))
        seconds = time.perf_counter() - begin
    if json:
        print_json(
            {"key": key, "bytes": length_bytes, "output": output, "seconds": round(seconds, 6)}
        )
    elif not to_stdout:
        remark(f"got {printable(key)}: {format_transfer(length_bytes, seconds)}")


Fetch = Callable[[], memoryview]
_Sink = Callable[[Fetch], int]
"""Somewhere for a value: fetches it, whole and verified, and then writes it. Returns the length."""


@contextmanager
def _file(path: str) -> Iterator[_Sink]:
    """A file that appears when it is complete. It is written, not mapped: the faults of a mapped new
    file take five times as long as the copy."""
    with closing(transfers.Destination(path)) as destination:

        def sink(fetch: Fetch) -> int:
            value = fetch()
            destination.resize(len(value))
            with progress("writing", len(value)) as advance:
                transfers.write_all(destination.descriptor, value, advance)
            destination.commit()
            return len(value)

        yield sink


@contextmanager
def _stream(descriptor: int) -> Iterator[_Sink]:
    def sink(fetch: Fetch) -> int:
        value = fetch()
        with progress("writing", len(value)) as advance:
            transfers.write_all(descriptor, value, advance)
        return len(value)

    yield sink


@contextmanager
def _special_file(path: str) -> Iterator[_Sink]:
    with open(path, "wb", buffering=0) as file, _stream(file.fileno()) as sink:
        yield sink


def _fetch(client: BlockingClient, key: str, wait_seconds: float) -> memoryview:
    """Get the value into memory of the right size."""
    length = 0  # the first answer says how long it is
    for _ in range(LENGTH_CHANGES):
        value = transfers.memory_for(length)
        with progress(f"getting {format_bytes(length)}" if length else "looking"):
            try:
                return value[: client.get_into(key, value, wait=wait_seconds)]
            except BufferTooSmall as error:
                length = error.needed
    raise CommandFailed(f"{printable(key)} keeps being replaced by longer values; try again")


def rm(
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Names of the objects.", show_default=False)
    ],
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> int:
    """Remove keys everywhere.

    A key that does not exist is reported; the exit status is 3 only when none of them existed.
    """
    for key in keys:
        encode_key(key)
    removed: list[str] = []
    missing: list[str] = []
    failed: dict[str, Exception] = {}
    with connected(socket, namespace, timeout) as client:
        for item in client.remove_many(keys):
            if item.error is not None and not isinstance(item.error, NoSuchKey):
                failed[item.key] = item.error
            elif item.value:
                removed.append(item.key)
            else:
                missing.append(item.key)
    if json:
        reasons = {key: describe(error) for key, error in failed.items()}
        print_json({"removed": removed, "missing": missing, "failed": reasons})
    elif removed:
        remark(f"removed {len(removed)} of {len(keys)} keys" if len(keys) > 1 else "removed")
    for key in missing:
        remark(f"error: no such key: {printable(key)}")
    for key, error in failed.items():
        remark(f"error: {printable(key)}: {describe(error)}")
    if failed:
        return exit_code(next(iter(failed.values())))
    return ExitCode.DONE if removed else ExitCode.NO_SUCH_KEY
