"""`pin`, `unpin` and `replicate`: how firmly objects are kept, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncake_p2p.copies import shortfall
from mooncake_p2p.exit_errors import CommandFailed, ExitCode, describe
from mooncake_p2p.options import (
    DEFAULT_TIMEOUT,
    Json,
    Key,
    Keys,
    Namespace,
    Socket,
    Timeout,
    connected,
    parse_timeout,
)
from mooncake_p2p.output import end_with, print_json, printable, progress, remark
from p2pstore.errors import P2PStoreError
from p2pstore.objects import encode_key

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import PinName, PinResult


NOTHING: Final[Mapping[str, list[str]]] = MappingProxyType({})


class Firmness(StrEnum):
    soft = "soft"
    hard = "hard"


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
        str | None,
        typer.Option(
            metavar="SECONDS|10m",
            help="How long a soft pin lasts  [default: 30m].",
            show_default=False,
        ),
    ] = None,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Keep objects in this peer's memory, and in that of all who have a copy.

    An object that only other peers hold is brought here first. What is pinned hard stays until it is
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
            if not json:
                remark(f"{printable(key)} stays pinned hard (--pin soft makes it a soft pin)")
            return
        pinned[key] = client.pin(key, firmness, ttl=ttl_seconds)

    pinned: dict[str, PinResult] = {}
    with connected(socket, namespace, timeout) as client:
        _for_each(client, keys, keep, "pinned", json, pinned, {"kept_hard": kept_hard})


def unpin(
    keys: Keys,
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Let objects be evicted again, here and on all other peers that have them."""
    unpinned: dict[str, PinResult] = {}

    def let_go(client: BlockingClient, key: str) -> None:
        unpinned[key] = client.unpin(key)

    with connected(socket, namespace, timeout) as client:
        _for_each(client, keys, let_go, "unpinned", json, unpinned)


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


def replicate(
    key: Key,
    copies: Annotated[
        int,
        typer.Option(
            "--replicas", "-n", min=1, metavar="N", help="Copies in all.", show_default=False
        ),
    ],
    socket: Socket = None,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Have N copies of an object, on as many peers.

    Copies that exist count. The number travels with the object.
    """
    encode_key(key)
    with (
        connected(socket, namespace, timeout) as client,
        progress(f"copying {printable(key)}"),
    ):
        result = client.replicate(key, copies)
        too_few = shortfall(client, result)
    if json:
        print_json({"key": key, "copies": result.copies, "wanted": result.wanted})
    if too_few:
        raise CommandFailed(f"{printable(key)}: {too_few}")
    if not json:
        remark(f"copies {result.copies}/{result.wanted}")
