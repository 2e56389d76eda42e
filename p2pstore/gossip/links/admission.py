"""Admission: both ends of a control stream prove that they hold a cluster key. Pure, sans-IO.

Noise has authenticated both peer ids before; what is left is whether they belong to the cluster. The
handshake is drawn at the top of `p2pstore.gossip.messages`. Each end consumes and produces messages;
whatever is wrong raises `AdmissionRefused`, whose code and text go to the other side as an ERROR frame, so
that both logs say why.

The listener proves first. A stranger who opens a stream and learns a proof learns nothing: it holds for
this pair of peer ids and these nonces only. Ring and allow list may be replaced at any time, so each side
remembers the key with which the other one proved itself.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

from p2pstore import wire
from p2pstore.allowlist import AllowList
from p2pstore.errors import P2PStoreError, ProtocolMismatch
from p2pstore.gossip.messages import Hello, HelloReply, Proof, Welcome
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.keyring import KEYLESS, MAX_KEYS, KeyRing, key_id_of
from p2pstore.wire import Code, negotiate_version

NONCE_BYTES: Final = 32
MAX_SOFTWARE_LETTERS: Final = 64

_CONTEXT: Final = b"p2pstore admission 1\0"
_OPENER: Final = b"opener"
_LISTENER: Final = b"listener"

_CHECK_KEYS: Final = "check --cluster-key-file on both sides"


class AdmissionRefused(P2PStoreError):
    """One side does not admit the other; `code` says why to a program, the text to a person."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def admission_proof(
    key: bytes,
    role: bytes,
    *,
    opener: PeerId,
    listener: PeerId,
    opener_nonce: bytes,
    listener_nonce: bytes,
    cluster: str,
) -> bytes:
    """HMAC-SHA256 over role, both peer ids, both nonces and the cluster's name, each with its length."""
    fields = (role, opener, listener, opener_nonce, listener_nonce, cluster.encode())
    message = b"".join(struct.pack("<H", len(field)) + field for field in fields)
    return hmac.digest(key, _CONTEXT + message, "sha256")


class _Side:
    """What both ends have in common."""

    def __init__(
        self,
        *,
        ring: KeyRing,
        cluster: str,
        own_id: PeerId,
        peer_id: PeerId,
        nonce: bytes,
        software: str,
        allowed: AllowList | None = None,
    ) -> None:
        """`peer_id`: the other end as authenticated by Noise. `nonce`: 32 fresh random bytes. `allowed`:
        who may come in; None for everybody."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce is {NONCE_BYTES} bytes, not {len(nonce)}")
        self.ring = ring
        self.allowed = allowed if allowed is not None else AllowList()
        self.cluster = cluster
        self.own_id = own_id
        self.peer_id = peer_id
        self.nonce = nonce
        self.software = software
        self.version = 0
        """The negotiated protocol version, once known."""
        self.their_software = ""
        self.admitted = False
        self.key_id = b""
        """The key with which the other side proved that it belongs here, once it has."""
        self._their_nonce = b""

    def _take_nonce(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise AdmissionRefused(Code.MALFORMED, f"a nonce of {len(nonce)} bytes")
        if nonce == self.nonce:
            raise AdmissionRefused(Code.MALFORMED, "a nonce that repeats this side's own")
        self._their_nonce = nonce

    def _negotiate(self, minimum: int, maximum: int) -> int:
        try:
            own = wire.MIN_CONTROL_VERSION, wire.MAX_CONTROL_VERSION
            return negotiate_version(minimum, maximum, own)
        except ProtocolMismatch as error:
            raise AdmissionRefused(Code.PROTOCOL_MISMATCH, str(error)) from None

    def _key(self, key_id: bytes) -> bytes:
        key = self.ring.find(key_id)
        if key is None:
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED,
                f"wrong cluster key: it proves with one that this side does not hold; {_CHECK_KEYS}",
            )
        return key

    def _proof(self, key: bytes, role: bytes, *, opening: bool) -> bytes:
        own, theirs = (self.own_id, self.nonce), (self.peer_id, self._their_nonce)
        (opener, opener_nonce), (listener, listener_nonce) = (
            (own, theirs) if opening else (theirs, own)
        )
        return admission_proof(
            key,
            role,
            opener=opener,
            listener=listener,
            opener_nonce=opener_nonce,
            listener_nonce=listener_nonce,
            cluster=self.cluster,
        )

    def _check(self, key: bytes, role: bytes, proof: bytes, *, opening: bool) -> None:
        """The other side holds the key, and is one of those that may come in."""
        if not hmac.compare_digest(self._proof(key, role, opening=opening), proof):
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED,
                f"wrong cluster key: the proof does not match; {_CHECK_KEYS}",
            )
        if not self.allowed.allows(self.peer_id):
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED,
                f"{format_peer_id(self.peer_id)} is not on the allow list of {format_peer_id(self.own_id)}: "
                "add it to the file of --allow-file there and send that peer SIGHUP",
            )
        self.key_id = key_id_of(key)


class Opener(_Side):
    """The side that opened the stream: `hello`, `receive_reply`, `receive_welcome`."""

    def hello(self) -> Hello:
        """The first message."""
        return Hello(
            wire.MIN_CONTROL_VERSION,
            wire.MAX_CONTROL_VERSION,
            self.cluster,
            self.nonce,
            self.ring.ids,
            self.software[:MAX_SOFTWARE_LETTERS],
        )

    def receive_reply(self, reply: HelloReply) -> Proof:
        """Check the listener's proof and answer with this side's. Raises `AdmissionRefused`."""
        self.version = self._negotiate(reply.version, reply.version)
        self._take_nonce(reply.nonce)
        key = self._key(reply.key_id)
        self._check(key, _LISTENER, reply.proof, opening=True)
        self.their_software = reply.software[:MAX_SOFTWARE_LETTERS]
        return Proof(reply.key_id, self._proof(key, _OPENER, opening=True))

    def receive_welcome(self, welcome: Welcome) -> None:
        """The listener is content: requests may follow."""
        if not self._their_nonce:
            raise AdmissionRefused(Code.MALFORMED, "a welcome before the handshake")
        self.admitted = True


class Listener(_Side):
    """The side that was called: `receive_hello`, `receive_proof`."""

    def receive_hello(self, hello: Hello) -> HelloReply:
        """Check what the opener claims and prove this side. Raises `AdmissionRefused`."""
        self.version = self._negotiate(hello.min_version, hello.max_version)
        if hello.cluster != self.cluster:
            raise AdmissionRefused(
                Code.WRONG_CLUSTER,
                f"cluster {hello.cluster[:64]!r} calls cluster {self.cluster!r}: "
                "check --cluster on both sides",
            )
        self._take_nonce(hello.nonce)
        key = self._common_key(hello.key_ids[:MAX_KEYS])
        self.their_software = hello.software[:MAX_SOFTWARE_LETTERS]
        return HelloReply(
            self.version,
            self.nonce,
            key_id_of(key),
            self._proof(key, _LISTENER, opening=False),
            self.software[:MAX_SOFTWARE_LETTERS],
        )

    def receive_proof(self, proof: Proof) -> Welcome:
        """Admit the opener. Raises `AdmissionRefused`."""
        if not self._their_nonce:
            raise AdmissionRefused(Code.MALFORMED, "a proof before the hello")
        key = self._key(proof.key_id)
        self._check(key, _OPENER, proof.proof, opening=False)
        self.admitted = True
        return Welcome()

    def _common_key(self, their_ids: list[bytes]) -> bytes:
        """The first of this side's keys that the opener holds too."""
        for key in self.ring.keys:
            if key_id_of(key) in their_ids:
                return key
        if self.ring.keyless:
            reason = "the opener has a cluster key, the listener has none"
        elif key_id_of(KEYLESS) in their_ids:
            reason = "the listener has a cluster key, the opener has none"
        else:
            reason = "the two sides hold different keys"
        raise AdmissionRefused(
            Code.AUTHENTICATION_FAILED, f"wrong cluster key: {reason}; {_CHECK_KEYS}"
        )
