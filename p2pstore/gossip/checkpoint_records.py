"""Checkpoints in cluster records: which version a name has (head), and which one its followers use (switch). Pure.

A name belongs to its publisher, which is part of what the record is about. So no publisher takes another's
name away, and each reader chooses the publishers that it trusts. A publisher writes heads and switches of its own
names only: a record is taken when its name is what its body and its signer make it, and is ignored otherwise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, TypeVar

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import ClusterRecord, ClusterRecordKind, PeerId
from p2pstore.objects import encode_namespace
from p2pstore.wire import Message, decode_body

VERSION_BYTES: Final = 16
NO_VERSION: Final = bytes(VERSION_BYTES)
"""In a switch: followers go on with what they use, until the next one."""
SHORT_VERSION_BYTES: Final = 8
"""Of a version, in peer records."""
MAX_NAME_BYTES: Final = 255
_PERSON: Final = b"p2pstore.ckpt.1"


class HeadBody(Message, frozen=True):
    """The newest version of a name: the BLAKE3 of its manifest, cut to 16 bytes. The figures tell what to expect; the
    manifest is what counts. `previous` is the version before, empty for the first. `gone`: the name was removed."""

    namespace: str
    name: str
    version: bytes
    manifest_bytes: int
    total_bytes: int
    files: int
    pieces: int
    previous: bytes = b""
    gone: bool = False


class SwitchBody(Message, frozen=True):
    """The version that followers of a name are to use from now on; `NO_VERSION` after the name was removed."""

    namespace: str
    name: str
    version: bytes


Body = TypeVar("Body", HeadBody, SwitchBody)


@dataclass(frozen=True, slots=True)
class Head:
    """A publisher's statement of the newest version of a name."""

    digest: bytes
    """Of namespace, name and publisher."""
    publisher: PeerId
    clock: int
    body: HeadBody

    @property
    def namespace(self) -> str:
        return self.body.namespace

    @property
    def name(self) -> str:
        return self.body.name

    @property
    def version(self) -> bytes:
        return self.body.version

    @property
    def gone(self) -> bool:
        return self.body.gone


@dataclass(frozen=True, slots=True)
class Switch:
    """Which version a publisher has its followers use."""

    digest: bytes
    publisher: PeerId
    clock: int
    version: bytes


def checkpoint_digest(namespace: str, name: str, publisher: PeerId) -> bytes:
    """The 16 bytes by which records call a publisher's name. Raises `ValueError` for no namespace or no name."""
    space, encoded = encode_namespace(namespace), name.encode(errors="surrogatepass")
    if not 1 <= len(encoded) <= MAX_NAME_BYTES:
        raise ValueError(f"a checkpoint's name is 1 to {MAX_NAME_BYTES} bytes long")
    hasher = hashlib.blake2b(digest_size=16, person=_PERSON)
    for part in (space, encoded, publisher):
        hasher.update(bytes((len(part),)) + part)
    return hasher.digest()


def short_version(version: bytes) -> bytes:
    """How a version is called in peer records."""
    return version[:SHORT_VERSION_BYTES]


def read_head(record: ClusterRecord) -> Head | None:
    """The content of a record of kind CHECKPOINT_HEAD; None for nonsense."""
    body = _body(record, ClusterRecordKind.CHECKPOINT_HEAD, HeadBody)
    if body is None or len(body.version) != VERSION_BYTES:
        return None
    return Head(record.name, record.signer, record.clock, body)


def read_switch(record: ClusterRecord) -> Switch | None:
    """The content of a record of kind CHECKPOINT_SWITCH; None for nonsense."""
    body = _body(record, ClusterRecordKind.CHECKPOINT_SWITCH, SwitchBody)
    if body is None or len(body.version) != VERSION_BYTES:
        return None
    return Switch(record.name, record.signer, record.clock, body.version)


def names_itself(record: ClusterRecord) -> bool:
    """Whether a head or a switch is called what its body and its signer make it; other kinds always are."""
    if record.kind == ClusterRecordKind.CHECKPOINT_HEAD:
        return read_head(record) is not None
    if record.kind == ClusterRecordKind.CHECKPOINT_SWITCH:
        return read_switch(record) is not None
    return True


def _body(record: ClusterRecord, kind: int, body_type: type[Body]) -> Body | None:
    if record.kind != kind or record.scope != 0:
        return None
    try:
        body = decode_body(body_type, record.body)
        digest = checkpoint_digest(body.namespace, body.name, record.signer)
    except (ProtocolError, ValueError):
        return None
    return body if digest == record.name else None
