"""Invites: one line to paste on the next machine, with all it needs to join. Pure.

`p2pstore1:` and, in base64url without padding, `body | u64 xxh3-64 of body`. The body is a msgpack array,
which grows by appended fields. An invite with keys is a secret: its holder can join.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final, TypeVar

import xxhash

from p2pstore.access.keyring import KEY_BYTES, KEYLESS, MAX_KEYS
from p2pstore.addresses import split_peer_address
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.objects import encode_namespace
from p2pstore.wire import Message, decode_body, encode_body

PREFIX: Final = "p2pstore1:"
MAX_TEXT_LENGTH: Final = 8192
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_LENGTH: Final = 300
_CHECKSUM_BYTES: Final = 8
_ASK_AGAIN: Final = "ask for it again: `mooncake-p2p invite` on a machine of the cluster prints one"


class Invite(Message, frozen=True):
    """The cluster's name, addresses of its peers (`HOST:PORT`), and its keys (the first one proves); no keys when the
    cluster has none, or they come another way."""

    cluster: str
    bootstrap: tuple[str, ...]
    keys: tuple[bytes, ...] = ()

    def __repr__(self) -> str:  # a key must not get into a log
        return f"Invite(cluster={self.cluster!r}, bootstrap={self.bootstrap!r}, {len(self.keys)} keys)"

    def key_file(self) -> str:
        """The keys as the text of a key file."""
        return "".join(f"{key.hex()}\n" for key in self.keys)


class KeptInvite(Invite, frozen=True):
    """An invite as a state directory keeps it: whether it came with keys, which are in a file of their own."""

    came_with_keys: bool = False


AnyInvite = TypeVar("AnyInvite", bound=Invite)


def format_invite(invite: Invite) -> str:
    """The invite's line. Raises `ConfigError` when `parse_invite` would not take it."""
    _check(invite)
    body = encode_body(invite)
    data = body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")
    return PREFIX + base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def parse_invite(text: str) -> Invite:
    """The invite in a line; white space, as from a wrapped line, is overlooked. Raises `ConfigError` saying what is
    wrong and what to do; its text is never part of the message."""
    return _parse(text, Invite)


def parse_kept_invite(text: str) -> KeptInvite:
    """The line that a state directory keeps; raises as `parse_invite`."""
    return _parse(text, KeptInvite)


def _parse(text: str, kind: type[AnyInvite]) -> AnyInvite:
    if len(text) > 2 * MAX_TEXT_LENGTH:
        raise ConfigError(f"the invite has {len(text):,} characters, which is too long: {_ASK_AGAIN}")
    packed = "".join(text.split())
    prefix, colon, encoded = packed.partition(":")
    if not colon or not re.fullmatch(r"p2pstore[0-9]{1,6}", prefix):
        raise ConfigError(f"that is no invite: one begins with {PREFIX}; {_ASK_AGAIN}")
    if prefix + colon != PREFIX:
        raise ConfigError(
            f"the invite has format {prefix}, this program knows {PREFIX.rstrip(':')}: upgrade this machine"
        )
    if len(packed) > MAX_TEXT_LENGTH:
        raise ConfigError(f"the invite has {len(packed):,} characters, which is too long: {_ASK_AGAIN}")
    try:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", encoded):
            raise ValueError
        data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        raise ConfigError(f"the invite is torn or mistyped: {_ASK_AGAIN}") from None
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise ConfigError(f"the invite is torn or mistyped: {_ASK_AGAIN}")
    try:
        invite = decode_body(kind, body)
    except ProtocolError:
        raise ConfigError(f"the invite holds something else: {_ASK_AGAIN}") from None
    _check(invite)
    return invite


def _check(invite: Invite) -> None:
    try:
        encode_namespace(invite.cluster)
    except ValueError as error:
        raise ConfigError(f"the invite's cluster name: {error}") from None
    if not 1 <= len(invite.bootstrap) <= MAX_ADDRESSES:
        raise ConfigError(
            f"the invite names {len(invite.bootstrap)} addresses instead of 1 to {MAX_ADDRESSES}"
        )
    for address in invite.bootstrap:
        if len(address) > MAX_ADDRESS_LENGTH:
            raise ConfigError(f"the invite names an address of {len(address):,} characters")
        split_peer_address(address, "the invite's address")
    if len(invite.keys) > MAX_KEYS:
        raise ConfigError(f"the invite holds {len(invite.keys)} keys; at most {MAX_KEYS}")
    unique = set(invite.keys)
    if len(unique) != len(invite.keys) or any(len(k) != KEY_BYTES or k == KEYLESS for k in unique):
        raise ConfigError("the invite holds something that is no cluster key")
