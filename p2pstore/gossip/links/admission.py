"""Admission: both ends of a control stream prove that they hold a cluster key. Pure, sans-IO.

Noise has authenticated both peer ids before; admission shows whether they belong to the cluster. The
handshake is drawn at the top of `p2pstore.gossip.gossip_messages`. Each end consumes and produces messages;
whatever is wrong raises `AdmissionRefused`, whose code and text go to the other side as an ERROR frame, so
that both logs say why.

The listener proves first. A stranger who opens a stream and learns a proof learns nothing: it holds for
this pair of peer ids and these nonces only. A refusal tells a stranger neither names nor versions of software: the
opener adds what it asked for itself (`Opener.explained`). Ring and allow list may be replaced at any time, so each side
remembers the key with which the other one proved itself.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

from p2pstore import wire
from p2pstore.access.keyring import (
    KEYLESS,
    MAX_KEYS,
    AllowList,
    KeyRing,
    Role,
    key_id_of,
    signer_seed_of,
)
from p2pstore.errors import P2PStoreError, ProtocolMismatch
from p2pstore.gossip.gossip_messages import Hello, HelloReply, Proof, Welcome
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.wire import Code, negotiate_version

NONCE_BYTES: Final = 32
MAX_SOFTWARE_LETTERS: Final = 64

_CONTEXT: Final = b"p2pstore admission 1\0"
_OPENER: Final = b"opener"
_LISTENER: Final = b"listener"
_MEMBER: Final = b"member"

_CHECK_KEYS: Final = "check --cluster-key-file on both sides"


class AdmissionRefused(P2PStoreError):
    """One side does not admit the other; `code` says why to a program, the text to a person. `told` is the part of the
    text that the other side may know."""

    def __init__(self, code: Code, text: str, told: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.told = told or text


class _Side:
    """The common part of both ends."""

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
        """`peer_id`: the other end, by Noise. `nonce`: 32 fresh random bytes. `allowed`: None for all peers."""
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

    @property
    def their_role(self) -> Role:
        return self.ring.role_of(self.key_id)

    def _text(self, role: bytes, *, opening: bool) -> bytes:
        """The proved or signed text: role, both peer ids, both nonces and the cluster's name, each with its length."""
        own, theirs = (self.own_id, self.nonce), (self.peer_id, self._their_nonce)
        (opener, opener_nonce), (listener, listener_nonce) = (own, theirs) if opening else (theirs, own)
        fields = (role, opener, listener, opener_nonce, listener_nonce, self.cluster.encode())
        return _CONTEXT + b"".join(struct.pack("<H", len(field)) + field for field in fields)

    def _proof(self, key: bytes, role: bytes, *, opening: bool) -> bytes:
        return hmac.digest(key, self._text(role, opening=opening), "sha256")

    def _check(self, key: bytes, role: bytes, proof: bytes, *, opening: bool) -> None:
        """The other side holds the key, and is one of those that may come in."""
        if not hmac.compare_digest(self._proof(key, role, opening=opening), proof):
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED, f"wrong cluster key: the proof does not match; {_CHECK_KEYS}"
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
        return Hello(
            wire.MIN_CONTROL_VERSION, wire.MAX_CONTROL_VERSION, self.cluster, self.nonce, self.ring.ids
        )

    def receive_reply(self, reply: HelloReply) -> Proof:
        """Check the listener's proof and answer with this side's. Raises `AdmissionRefused`."""
        self.version = self._negotiate(reply.version, reply.version)
        self._take_nonce(reply.nonce)
        key = self._key(reply.key_id)
        if reply.key_id not in self.ring.ids:  # a reader's, which a member accepts of openers only
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED, "a reader answers where a member was called"
            )
        self._check(key, _LISTENER, reply.proof, opening=True)
        proof = self._proof(key, _OPENER, opening=True)
        return Proof(reply.key_id, proof, self.software[:MAX_SOFTWARE_LETTERS])

    def receive_welcome(self, welcome: Welcome) -> None:
        """The listener is content: requests may follow."""
        if not self._their_nonce:
            raise AdmissionRefused(Code.MALFORMED, "a welcome before the handshake")
        if self.ring.role is not Role.MEMBER and not self._is_member(welcome.signature):
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED,
                f"{format_peer_id(self.peer_id)} does not prove that it is a member: readers talk to members only, and "
                "a reader's file goes with the members' keys it was made from",
            )
        self.admitted = True

    def explained(self, refusal: AdmissionRefused) -> AdmissionRefused:
        """A refusal by the listener, with what only this side knows: what it asked for, and with what."""
        hint = ""
        if refusal.code is Code.WRONG_CLUSTER:
            hint = f"; this peer is of cluster {self.cluster!r}: check --cluster on both sides"
        elif refusal.code is Code.AUTHENTICATION_FAILED and self.ring.of_user:
            hint = (
                "; this peer has no cluster key, so it meets keyless peers of its own user on this machine only: that "
                "one is of another user, or has a key. Give both a --cluster-key-file (`mooncake-p2p keygen FILE` "
                "makes one), or give both --insecure"
            )
        return AdmissionRefused(refusal.code, f"{refusal}{hint}")

    def _is_member(self, signature: bytes) -> bool:
        message = self._text(_MEMBER, opening=True)
        verifier = Ed25519Verifier()
        return any(verifier.verify(signer, message, signature) for signer in self.ring.signers)


class Listener(_Side):
    """The side that was called: `receive_hello`, `receive_proof`."""

    def receive_hello(self, hello: Hello) -> HelloReply:
        """Check what the opener claims and prove this side. Raises `AdmissionRefused`."""
        self.version = self._negotiate(hello.min_version, hello.max_version)
        if self.ring.role is not Role.MEMBER:
            raise AdmissionRefused(
                Code.AUTHENTICATION_FAILED, "this peer is a reader, which admits nobody"
            )
        key = self._common_key(hello.key_ids[:MAX_KEYS])
        if hello.cluster != self.cluster:
            raise AdmissionRefused(
                Code.WRONG_CLUSTER,
                f"cluster {hello.cluster[:64]!r} calls cluster {self.cluster!r}: "
                "check --cluster on both sides",
                "it belongs to a cluster of another name",
            )
        self._take_nonce(hello.nonce)
        return HelloReply(
            self.version, self.nonce, key_id_of(key), self._proof(key, _LISTENER, opening=False)
        )

    def receive_proof(self, proof: Proof) -> Welcome:
        """Admit the opener. Raises `AdmissionRefused`."""
        if not self._their_nonce:
            raise AdmissionRefused(Code.MALFORMED, "a proof before the hello")
        key = self._key(proof.key_id)
        self._check(key, _OPENER, proof.proof, opening=False)
        self.admitted = True
        return Welcome(self.software[:MAX_SOFTWARE_LETTERS], self._signature(proof.key_id))

    def _signature(self, key_id: bytes) -> bytes:
        """The proof for a reader that this side is a member; empty for a member."""
        member_key = self.ring.member_key_for(key_id)
        if member_key is None:
            return b""
        return Identity(signer_seed_of(member_key)).sign(self._text(_MEMBER, opening=False))

    def _common_key(self, their_ids: list[bytes]) -> bytes:
        """The first of this side's keys that the opener holds too."""
        key = self.ring.common(their_ids)
        if key is not None:
            return key
        if self.ring.keyless:
            reason = "the opener has a cluster key, the listener has none"
        elif key_id_of(KEYLESS) in their_ids:
            reason = "the listener has a cluster key, the opener has none"
        else:
            reason = "the two sides hold different keys"
        raise AdmissionRefused(Code.AUTHENTICATION_FAILED, f"wrong cluster key: {reason}; {_CHECK_KEYS}")
