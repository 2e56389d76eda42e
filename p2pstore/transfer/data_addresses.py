"""Data addresses, as peers advertise them and plans carry them. Pure.

`HOST:PORT` (`[v6]:PORT`) is a peer that takes plain connections, `tls://HOST:PORT` one that takes TLS alone.
A version that does not know a form takes it for an address that cannot be reached, and tries the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2pstore.addresses import split_address

TLS_SCHEME: Final = "tls://"


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where to connect to, and whether TLS is spoken there."""

    host: str
    port: int
    tls: bool = False


def over_tls(address: str) -> str:
    """The data address of a `HOST:PORT` where TLS is spoken."""
    return TLS_SCHEME + address


def split_data_address(address: str) -> DataAddress:
    """Raises `ConfigError` for a form that this version does not know."""
    tls = address.startswith(TLS_SCHEME)
    host, port = split_address(address.removeprefix(TLS_SCHEME), "data address")
    return DataAddress(host, port, tls)
