"""The cluster key ring: what peers of one cluster share and strangers lack. Pure but for `new_cluster_key`."""

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
    """The cluster's keys: the first one proves, all are accepted. Without keys the keyless one stands in."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.keys: tuple[bytes, ...] = tuple(keys) or (KEYLESS,)
        self._by_id: Mapping[bytes, bytes] = {key_id_of(key): key for key in self.keys}

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
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
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


def new_cluster_key() -> str:
    """A fresh key from the system's random source, as a key file's line."""
    import secrets  # here, because pure modules load this one

    return secrets.token_hex(KEY_BYTES)
