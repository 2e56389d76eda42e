"""The cluster key ring: what peers of one cluster share and strangers lack. Pure but for `new_cluster_key`.

A key is replaced in three rounds, each brought to every peer (copy the file, then SIGHUP) before the next:
`add_key` (all accept the new one, none uses it yet), `promote_key` (it proves), `retire_keys` (the old one is
out). At every moment any two peers have a key in common, and a ticket's key is held by whoever is shown it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from p2pstore.errors import ConfigError

KEY_BYTES: Final = 32
KEYLESS: Final = bytes(KEY_BYTES)
"""The key of a cluster without one."""
MAX_KEYS: Final = 16
"""Keys in one ring: a rotation needs two."""


def key_id_of(key: bytes) -> bytes:
    """The 4-byte name of a cluster key."""
    return hashlib.blake2b(key, digest_size=4, person=b"p2pstore.key.id").digest()


class KeyRing:
    """The cluster's keys: the first one proves, all are accepted. Without keys the keyless one stands in.

    Whoever admits somebody holds the peer's one ring, so that `replace` changes it for all at once.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.keys: tuple[bytes, ...] = ()
        self._by_id: Mapping[bytes, bytes] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[bytes]) -> None:
        """These keys instead, from now on."""
        self.keys = tuple(keys) or (KEYLESS,)
        self._by_id = {key_id_of(key): key for key in self.keys}

    @property
    def keyless(self) -> bool:
        return self.keys == (KEYLESS,)

    @property
    def first_id(self) -> bytes:
        return key_id_of(self.keys[0])

    @property
    def ids(self) -> list[bytes]:
        return list(self._by_id)

    def find(self, key_id: bytes) -> bytes | None:
        return self._by_id.get(key_id)


def parse_cluster_keys(text: str, source: str) -> KeyRing:
    """The ring in a key file's text: 64 hexadecimal digits a line, the first key proves, `#` comments.

    Raises `ConfigError` naming `source` and the line; a key itself is never part of the message.
    """
    keys: list[bytes] = []
    for number, word in _words(text):
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"{source}, line {number}: not a cluster key (64 hexadecimal digits); "
                "`mooncake-p2p keygen FILE` makes one"
            )
        if key == KEYLESS:
            raise ConfigError(
                f"{source}, line {number}: 64 zeros are no secret: every keyless peer uses them; "
                "`mooncake-p2p keygen FILE` makes a key"
            )
        if key in keys:
            raise ConfigError(f"{source}, line {number}: this key stands in the file twice")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} holds no key; `mooncake-p2p keygen FILE` makes one")
    if len(keys) > MAX_KEYS:
        raise ConfigError(
            f"{source} holds {len(keys)} keys; at most {MAX_KEYS}: remove retired ones"
        )
    return KeyRing(keys)


def _words(text: str) -> list[tuple[int, str]]:
    """(line number, what stands in it) for every line that is more than a comment."""
    found = ((number, _word(line)) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, word) for number, word in found if word]


def _word(line: str) -> str:
    return line.partition("#")[0].strip()


# --- replacing a key ---------------------------------------------------------------------------


def add_key(text: str, source: str, key: str) -> str:
    """The first round: a key file with one more key (a line of hexadecimal), accepted but not yet used.

    Like the other two it keeps comments, and raises `ConfigError` when the file or the result is no ring.
    """
    parse_cluster_keys(text, source)
    result = text + ("" if text.endswith("\n") else "\n") + key + "\n"
    parse_cluster_keys(result, source)
    return result


def promote_key(text: str, source: str) -> str:
    """The second round: the last key stands first, so that it proves."""
    if len(parse_cluster_keys(text, source).keys) < 2:
        raise ConfigError(
            f"{source} holds one key only: begin with `mooncake-p2p keygen --add {source}`"
        )
    lines = text.splitlines()
    places = [index for index, line in enumerate(lines) if _word(line)]
    lines.insert(places[0], lines.pop(places[-1]))
    return "\n".join(lines) + "\n"


def retire_keys(text: str, source: str) -> str:
    """The third round: only the first key is left."""
    if len(parse_cluster_keys(text, source).keys) < 2:
        raise ConfigError(f"{source} holds one key only: there is none to retire")
    lines = text.splitlines()
    retired = {index for index, line in enumerate(lines) if _word(line)}
    retired.remove(min(retired))
    return "".join(line + "\n" for index, line in enumerate(lines) if index not in retired)


def new_cluster_key() -> str:
    """A fresh key from the system's random source, as a key file's line."""
    import secrets  # here, because pure modules load this one

    return secrets.token_hex(KEY_BYTES)
