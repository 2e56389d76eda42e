"""Which peers may come in, beyond holding a cluster key: a list of their ids. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.objects import format_peer_id

MAX_ALLOWED: Final = 10_000
"""Peers on one list: as many as a cluster may have members."""

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_ID_BYTES: Final = 38
_PREFIX: Final = "12D3KooW"
"""How the base58 of every ed25519 peer id begins."""


class AllowList:
    """The peers that may come in. Without a list, each holder of a key may.

    All admission shares the peer's one list, so that `replace` changes it for all at once.
    """

    def __init__(self, peer_ids: Iterable[bytes] | None = None) -> None:
        self.peer_ids: frozenset[bytes] | None = None
        self.replace(peer_ids)

    def replace(self, peer_ids: Iterable[bytes] | None) -> None:
        """Admit these peers only, from now on; None for all."""
        self.peer_ids = None if peer_ids is None else frozenset(peer_ids)

    def allows(self, peer_id: bytes) -> bool:
        """Whether the peer with this id may come in."""
        return self.peer_ids is None or peer_id in self.peer_ids


def parse_peer_id(text: str, source: str) -> bytes:
    """The peer id whose base58 form (`12D3KooW...`) `text` is. Raises `ConfigError` naming `source`."""
    number = 0
    if text.startswith(_PREFIX) and len(text) < 2 * _PEER_ID_BYTES:
        for letter in text:
            number = 58 * number + max(0, _ALPHABET.find(letter))
        if number.bit_length() <= 8 * _PEER_ID_BYTES:
            peer_id = number.to_bytes(_PEER_ID_BYTES, "big")
            if format_peer_id(peer_id) == text:
                return peer_id
    raise ConfigError(
        f"{source}: {text[:64]!r} is not a peer id such as 12D3KooW..., which `ready` and `mooncake-p2p "
        "peers --json` show"
    )


def parse_peer_ids(text: str, source: str) -> list[bytes]:
    """The peer ids in an allow file's text: one a line, `#` comments.

    Raises `ConfigError` naming `source` and the line. A file without any id is refused: it would shut
    out all peers.
    """
    peer_ids: list[bytes] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word:
            peer_ids.append(parse_peer_id(word, f"{source}, line {number}"))
    if not peer_ids:
        raise ConfigError(
            f"{source} names no peer, which would shut out all: write one peer id a line"
        )
    if len(peer_ids) > MAX_ALLOWED:
        raise ConfigError(f"{source} names {len(peer_ids):,} peers; at most {MAX_ALLOWED:,}")
    return peer_ids
