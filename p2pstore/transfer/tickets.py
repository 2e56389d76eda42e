"""Tickets: what lets a connection read from a peer, or store there. Pure.

A ticket's claims name the peer that issued it (signed with that peer's ed25519 key), the peer whose
data it opens, when it ends, and what it allows. Two secrets follow from the claims and a cluster key:

    secret = HMAC-SHA256(cluster key, "p2pstore ticket 1" || claims)
    proof  = HMAC-SHA256(secret, role || both nonces)

A peer makes a ticket for itself with the key it has. A client without keys gets ticket and secret from
its local peer over the local socket. Who overhears a ticket has no secret, so it cannot be replayed;
a client of one host cannot widen its ticket to another peer or to other rights.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, Protocol

from p2pstore.errors import AuthenticationFailed, ProtocolError
from p2pstore.keyring import KeyRing
from p2pstore.transfer.messages import Ticket
from p2pstore.wire import Message, decode_body, encode_body

TICKET_FORMAT: Final = 1
TICKET_SECONDS: Final = 120.0
MAX_CLAIMS_BYTES: Final = 512
NONCE_BYTES: Final = 32

_SECRET_CONTEXT: Final = b"p2pstore ticket 1\0"
_SIGNATURE_CONTEXT: Final = b"p2pstore ticket claims 1\0"


class Scope(IntFlag):
    READ = 1
    """GET, LOOKUP, LIST, STATISTICS, PING."""
    PEER = 2
    """Everything else; only for the issuer itself."""
    WRITE = 4
    """STORE and STORE_PART: for local clients of the issuer that may write."""


class TicketClaims(Message, frozen=True):
    format: int
    key_id: bytes
    issuer: bytes
    audience: bytes
    expires_unix_ms: int
    ticket_id: bytes
    scope: int


class SignerLike(Protocol):
    @property
    def peer_id(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes: ...


class VerifierLike(Protocol):
    def verify(self, peer_id: bytes, message: bytes, signature: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class GrantedTicket:
    """A ticket with the secret that makes it usable."""

    ticket: Ticket
    secret: bytes


def issue_ticket(
    *,
    signer: SignerLike,
    ring: KeyRing,
    audience: bytes,
    now_unix: float,
    ticket_id: bytes,
    scope: Scope,
) -> GrantedTicket:
    """A ticket for `audience`, good for 120 s (a connection made in that time lives on)."""
    claims = encode_body(
        TicketClaims(
            TICKET_FORMAT,
            ring.first_id,
            signer.peer_id,
            audience,
            int((now_unix + TICKET_SECONDS) * 1000),
            ticket_id,
            int(scope),
        )
    )
    return GrantedTicket(
        Ticket(claims, signer.sign(_SIGNATURE_CONTEXT + claims)),
        ticket_secret(ring.keys[0], claims),
    )


def ticket_secret(key: bytes, claims: bytes) -> bytes:
    """What only holders of the cluster key, and whom they tell, can know."""
    return hmac.digest(key, _SECRET_CONTEXT + claims, "sha256")


def prove(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """The proof of `role` (`b"client"` or `b"server"`) that it knows the secret."""
    return hmac.digest(secret, role + b"\0" + client_nonce + server_nonce, "sha256")


def check_proof(
    secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, proof: bytes
) -> bool:
    """Whether `proof` is right, in constant time."""
    return hmac.compare_digest(prove(secret, role, client_nonce, server_nonce), proof)


def open_ticket(
    ticket: Ticket, *, audience: bytes, ring: KeyRing, verifier: VerifierLike, now_unix: float
) -> tuple[TicketClaims, bytes]:
    """Claims and secret of a ticket shown to `audience`. Raises `AuthenticationFailed` saying why not."""
    if len(ticket.claims) > MAX_CLAIMS_BYTES:
        raise AuthenticationFailed("the ticket is too long")
    try:
        claims = decode_body(TicketClaims, ticket.claims)
    except ProtocolError as error:
        raise AuthenticationFailed(f"the ticket is malformed: {error}") from error
    if claims.format != TICKET_FORMAT:
        raise AuthenticationFailed(f"ticket format {claims.format} is not supported")
    if claims.audience != audience:
        raise AuthenticationFailed("the ticket is for another peer")
    if claims.expires_unix_ms < now_unix * 1000:
        raise AuthenticationFailed(
            "the ticket has expired (or the clocks of the two hosts differ by minutes)"
        )
    if claims.expires_unix_ms > (now_unix + 3 * TICKET_SECONDS) * 1000:
        raise AuthenticationFailed(
            "the ticket lasts too long (or the clocks of the two hosts differ by minutes)"
        )
    key = ring.find(claims.key_id)
    if key is None:
        raise AuthenticationFailed(
            "the ticket was made with a cluster key that this peer does not hold"
        )
    if not verifier.verify(claims.issuer, _SIGNATURE_CONTEXT + ticket.claims, ticket.signature):
        raise AuthenticationFailed("the ticket was not signed by its issuer")
    return claims, ticket_secret(key, ticket.claims)
