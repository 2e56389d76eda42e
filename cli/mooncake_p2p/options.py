"""Options that commands share, durations as people write them, and the connection to the peer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

DEFAULT_TIMEOUT: Final = "5"

Key = Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.", show_default=False)]

Socket = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        envvar="MOONCAKE_P2P_SOCKET",
        help="The local peer's socket; needed only when several peers run here.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(metavar="NAME", envvar="MOONCAKE_P2P_NAMESPACE", help="Namespace of the keys."),
]
Timeout = Annotated[
    str,
    typer.Option(
        metavar="SECONDS",
        envvar="MOONCAKE_P2P_TIMEOUT",
        help="Give up after so long without progress.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]

_UNIT_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII)


def parse_duration(text: str, option: str) -> float:
    """Seconds from `90`, `250ms`, `10m`, `2h` or `1d`. Raises `ValueError` naming the option."""
    match = _DURATION.fullmatch(text.strip().lower())
    unit = match and _UNIT_SECONDS.get(match[2])
    if not match or unit is None:
        raise ValueError(
            f"{option}: {text!r} is not a duration; write seconds, or 250ms, 10m, 2h, 1d"
        )
    return float(match[1]) * unit


def parse_timeout(text: str, option: str = "--timeout") -> float:
    """A duration above zero. Raises `ValueError` naming the option."""
    seconds = parse_duration(text, option)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{option}: {text!r} must be more than 0 seconds")
    return seconds


@contextmanager
def connected(
    socket: str | None, namespace: str = "default", timeout: str = DEFAULT_TIMEOUT
) -> Iterator[BlockingClient]:
    """A client of the local peer, closed at the end.

    Raises `NoLocalPeer` when none listens and `AmbiguousLocalPeer` when several do.
    """
    timeout_seconds = parse_timeout(timeout)
    from p2pstore import blocking

    with blocking.connect(socket, namespace=namespace, timeout=timeout_seconds) as client:
        yield client
