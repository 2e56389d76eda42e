"""The cluster key ring: the secrets that peers of one cluster share. Pure but for `new_cluster_key`.

A key is replaced in three rounds, each brought to every peer (copy the file, then SIGHUP) before the next:
`add_key` (all accept the new one, none uses it yet), `promote_key` (it proves), `retire_keys` (the old one is
out). At every moment any two peers have a key in common, and each member that is shown a ticket holds its key.

A *reader's key* is derived from a member's key, so every member accepts it without being told; its holder cannot derive
the member's key. A reader's file also names the *signer* of each member key: a member proves to a reader that it is one
by that signature, since all readers hold the reader's key and could pose as members.

A *writer's key* is derived from a member's key and a namespace. A writer's file is a reader's file with a writer's key
for each of its namespaces: the peer reads and gossips as a reader, and where it writes it shows members a ticket made
with the writer's key. The ticket names the namespace, so a member derives the same key without being told.

Which peers may come in, beyond holding a cluster key: a list of their ids.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

from p2pstore.errors import ConfigError
from p2pstore.objects import encode_namespace, format_peer_id

KEY_BYTES: Final = 32
KEYLESS: Final = bytes(KEY_BYTES)
"""The key of a cluster without one."""
MAX_KEYS: Final = 16
"""Keys in one ring: a rotation needs two."""


_READER_CONTEXT: Final = b"p2pstore reader key 1"
_SIGNER_CONTEXT: Final = b"p2pstore member signer 1"
_READER_LINE: Final = re.compile(r"reader\s+(\S+)\s+(\S+)")
_WRITER_CONTEXT: Final = b"p2pstore writer key 1\0"
_WRITER_LINE: Final = re.compile(r"writer\s+(\S+)\s+(\S+)")
MAX_WRITTEN_NAMESPACES: Final = 64
"""Namespaces of one writer's file."""


class Role(IntEnum):
    """The rights of a key's holder."""

    MEMBER = 0
    """All rights."""
    READER = 1
    """Read objects and follow gossip; members ignore its news."""
    WRITER = 2
    """A reader that may also put, remove and flush in some namespaces, through members."""


def reader_key_of(key: bytes) -> bytes:
    return hmac.digest(key, _READER_CONTEXT, "sha256")


def writer_key_of(key: bytes, namespace: str) -> bytes:
    return hmac.digest(key, _WRITER_CONTEXT + namespace.encode(), "sha256")


def signer_seed_of(key: bytes) -> bytes:
    """The ed25519 seed with which holders of a member's key sign that they are members."""
    return hmac.digest(key, _SIGNER_CONTEXT, "sha256")


def key_id_of(key: bytes) -> bytes:
    """The 4-byte name of a cluster key."""
    return hashlib.blake2b(key, digest_size=4, person=b"p2pstore.key.id").digest()


NO_WRITERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class KeyRing:
    """The cluster's keys: the first one proves, all are accepted; without any the keyless one stands in. All admission
    shares the peer's one ring, so that `replace` changes it for all at once."""

    def __init__(
        self,
        keys: Sequence[bytes] = (),
        *,
        of_user: bool = False,
        signers: Sequence[bytes] = (),
        writers: Mapping[str, bytes] = NO_WRITERS,
    ) -> None:
        self.keys: tuple[bytes, ...] = ()
        self.of_user = False
        """Whether it is the key of a user's keyless peers (`p2pstore.state.places`)."""
        self.signers: tuple[bytes, ...] = ()
        """Of a reader: the peer ids by which members prove that they are members. Of a member: empty."""
        self.writers: Mapping[str, bytes] = NO_WRITERS
        """Of a writer: the key that it writes with, by namespace."""
        self.role = Role.MEMBER
        """The rights of this ring's holder."""
        self._by_id: Mapping[bytes, bytes] = {}
        self._readers: Mapping[bytes, bytes] = {}
        """Ids of the readers' keys that a member accepts, and the member's key that each goes with."""
        self._all: Mapping[bytes, bytes] = {}
        self.replace(keys, of_user=of_user, signers=signers, writers=writers)

    def replace(
        self,
        keys: Sequence[bytes],
        of_user: bool = False,
        signers: Sequence[bytes] = (),
        writers: Mapping[str, bytes] = NO_WRITERS,
    ) -> None:
        """Use these keys only, from now on."""
        self.writers = writers
        self.keys, self.of_user, self.signers = tuple(keys) or (KEYLESS,), of_user, tuple(signers)
        self.role = Role.READER if signers else Role.MEMBER
        if writers:
            self.role = Role.WRITER
        self._by_id = {key_id_of(key): key for key in self.keys}
        readers = {reader_key_of(key): key for key in self.keys} if self._grants else {}
        self._readers = {key_id_of(reader): key for reader, key in readers.items()}
        self._all = self._by_id | {key_id_of(reader): reader for reader in readers}

    @property
    def content(self) -> tuple[tuple[bytes, ...], bool, tuple[bytes, ...], Mapping[str, bytes]]:
        """Keys, whether they are a user's, signers and writers' keys: equal for rings that hold the same."""
        return self.keys, self.of_user, self.signers, self.writers

    @property
    def _grants(self) -> bool:
        return self.role is Role.MEMBER and not self.keyless and not self.of_user

    @property
    def keyless(self) -> bool:
        return self.keys == (KEYLESS,)

    @property
    def ids(self) -> list[bytes]:
        return list(self._by_id)

    def find(self, key_id: bytes, namespace: str = "") -> bytes | None:
        """The key of that name: the ring's, a reader's, or a writer's of this namespace, made of one of those."""
        key = self._all.get(key_id)
        return self._writer_key(key_id, namespace) if key is None else key

    def _writer_key(self, key_id: bytes, namespace: str) -> bytes | None:
        if not namespace or not self._grants:
            return None
        derived = (writer_key_of(key, namespace) for key in self.keys)
        return next((key for key in derived if key_id_of(key) == key_id), None)

    def proving_key(self, namespace: str) -> bytes:
        """The key that a ticket for this namespace is made with; for none, with an empty one."""
        return self.writers.get(namespace, self.keys[0])

    def common(self, their_ids: Sequence[bytes]) -> bytes | None:
        """The first of this ring's keys that is among `their_ids`; members' keys come before readers'."""
        return next((key for key_id, key in self._all.items() if key_id in their_ids), None)

    def role_of(self, key_id: bytes, namespace: str = "") -> Role:
        """The rights, in this namespace, of a peer that proved itself with this key."""
        if self.role is Role.MEMBER and key_id in self._by_id:
            return Role.MEMBER
        is_writer = key_id not in self._all and self._writer_key(key_id, namespace) is not None
        return Role.WRITER if is_writer else Role.READER

    def member_key_for(self, key_id: bytes) -> bytes | None:
        """The member's key that a reader's key goes with; None when it is no reader's."""
        return self._readers.get(key_id)


def parse_cluster_keys(text: str, source: str) -> KeyRing:
    """The ring in a key file's text: 64 hexadecimal digits a line, the first key proves, `#` comments. A reader's file
    has lines of `reader`, its key, and the peer id of the members' signer. A writer's file has lines of `writer`, its
    key, and a namespace (percent-encoded) besides; the first key of a namespace proves.

    Raises `ConfigError` naming `source` and the line; a key itself is never part of the message.
    """
    keys: list[bytes] = []
    signers: list[bytes] = []
    writers: dict[str, bytes] = {}
    for number, line in _words(text):
        where = f"{source}, line {number}"
        if (writer := _WRITER_LINE.fullmatch(line)) is not None:
            writers.setdefault(_written_namespace(writer[2], where), _parse_key(writer[1], where))
            continue
        reader = _READER_LINE.fullmatch(line)
        if reader is not None:
            signers.append(parse_peer_id(reader[2], where))
        key = _parse_key(line if reader is None else reader[1], where)
        if key in keys:
            raise ConfigError(f"{where}: this key stands in the file twice")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} holds no key; `mooncake-p2p keygen FILE` makes one")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source} holds {len(keys)} keys; at most {MAX_KEYS}: remove retired ones")
    if (signers or writers) and len(signers) != len(keys):
        raise ConfigError(f"{source} holds keys of members and of readers: keep them in two files")
    _check_written(writers, source)
    return KeyRing(keys, signers=signers, writers=writers)


def _parse_key(word: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(word)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{where}: not a cluster key (64 hexadecimal digits); `mooncake-p2p keygen FILE` makes one"
        )
    if key == KEYLESS:
        raise ConfigError(
            f"{where}: 64 zeros are no secret: every keyless peer uses them; "
            "`mooncake-p2p keygen FILE` makes a key"
        )
    return key


def _written_namespace(word: str, where: str) -> str:
    try:
        namespace = unquote(word, errors="strict")
        encode_namespace(namespace)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return namespace


def _check_written(namespaces: Collection[str], source: str) -> None:
    if len(namespaces) > MAX_WRITTEN_NAMESPACES:
        raise ConfigError(
            f"{source}: a writer's key is for up to {MAX_WRITTEN_NAMESPACES} namespaces, not {len(namespaces)}"
        )


def _words(text: str) -> list[tuple[int, str]]:
    """(line number, what stands in it) for every line that is more than a comment."""
    found = ((number, _word(line)) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, word) for number, word in found if word]


def _word(line: str) -> str:
    return line.partition("#")[0].strip()


# --- replacing a key ---------------------------------------------------------------------------


def _members_ring(text: str, source: str) -> KeyRing:
    ring = parse_cluster_keys(text, source)
    if ring.role is not Role.MEMBER:
        raise ConfigError(
            f"{source} holds no key of members: change the cluster's key file, and make this one anew from it"
        )
    return ring


def add_key(text: str, source: str, key: str) -> str:
    """The first round: a key file with one more key (a line of hexadecimal), accepted but not yet used. Comments are
    kept. Raises `ConfigError` when the file or the result is no ring."""
    _members_ring(text, source)
    result = text + ("" if text.endswith("\n") else "\n") + key + "\n"
    parse_cluster_keys(result, source)
    return result


def promote_key(text: str, source: str) -> str:
    """The second round: the last key stands first, so that it proves."""
    if len(_members_ring(text, source).keys) < 2:
        raise ConfigError(
            f"{source} holds one key only: begin with `mooncake-p2p keygen --add {source}`"
        )
    lines = text.splitlines()
    places = [index for index, line in enumerate(lines) if _word(line)]
    lines.insert(places[0], lines.pop(places[-1]))
    return "\n".join(lines) + "\n"


def retire_keys(text: str, source: str) -> str:
    """The third round: only the first key is left."""
    if len(_members_ring(text, source).keys) < 2:
        raise ConfigError(f"{source} holds one key only: there is none to retire")
    lines = text.splitlines()
    retired = {index for index, line in enumerate(lines) if _word(line)}
    retired.remove(min(retired))
    return "".join(line + "\n" for index, line in enumerate(lines) if index not in retired)


def reader_keys(
    ring: KeyRing, signer_id_of: Callable[[bytes], str], namespaces: Sequence[str] = ()
) -> str:
    """The text of the readers' key file that goes with a member's ring; with `namespaces`, of the file of those who may
    write in them. `signer_id_of(seed)`: the peer id of that ed25519 seed, as text. Raises `ConfigError` for a ring that
    is not a member's, and `ValueError` for what cannot be a namespace."""
    if ring.role is not Role.MEMBER:
        raise ConfigError(
            "a reader's or writer's key file makes no other keys: name the cluster's key file"
        )
    lines = [
        f"reader {reader_key_of(key).hex()} {signer_id_of(signer_seed_of(key))}\n" for key in ring.keys
    ]
    _check_written(namespaces, "--namespace")
    for namespace in dict.fromkeys(namespaces):
        word = quote(encode_namespace(namespace), safe="")
        lines += [f"writer {writer_key_of(key, namespace).hex()} {word}\n" for key in ring.keys]
    return "".join(lines)


def new_cluster_key() -> str:
    """A fresh key from the system's random source, as a key file's line."""
    import secrets  # here, because pure modules load this one

    return secrets.token_hex(KEY_BYTES)


def rights_of(ring: KeyRing) -> str:
    """The rights of the ring's holder, in words."""
    role = ring.role.name.lower()
    return f"{role} of {', '.join(map(repr, ring.writers))}" if ring.writers else role


MAX_ALLOWED: Final = 10_000
"""Peers on one list: as many as a cluster may have members."""

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_ID_BYTES: Final = 38
_PREFIX: Final = "12D3KooW"
"""How the base58 of every ed25519 peer id begins."""


class AllowList:
    """The peers that may come in; without a list, each holder of a key. All admission shares the peer's one list, so
    that `replace` changes it for all at once."""

    def __init__(self, peer_ids: Iterable[bytes] | None = None) -> None:
        self.peer_ids: frozenset[bytes] | None = None
        self.replace(peer_ids)

    def replace(self, peer_ids: Iterable[bytes] | None) -> None:
        """Admit these peers only, from now on; None for all."""
        self.peer_ids = None if peer_ids is None else frozenset(peer_ids)

    def allows(self, peer_id: bytes) -> bool:
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
    """The peer ids in an allow file's text: one a line, `#` comments. Raises `ConfigError` naming `source` and the
    line, and for a file without any id, which would shut out all peers."""
    peer_ids = [parse_peer_id(word, f"{source}, line {number}") for number, word in _words(text)]
    if not peer_ids:
        raise ConfigError(f"{source} names no peer, which would shut out all: write one peer id a line")
    if len(peer_ids) > MAX_ALLOWED:
        raise ConfigError(f"{source} names {len(peer_ids):,} peers; at most {MAX_ALLOWED:,}")
    return peer_ids
