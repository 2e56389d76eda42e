"""Tickets: they let a connection read from a peer, or store there. Pure.

A ticket's claims name the peer that issued it (signed with that peer's ed25519 key), the peer whose
data it opens, when it ends, and what it allows. Two secrets follow from the claims and a cluster key:

    secret = HMAC-SHA256(cluster key, "p2pstore ticket 1" || claims)
    proof  = HMAC-SHA256(secret, role || both nonces)

A peer makes a ticket for itself with the key it has. A client without keys gets ticket and secret from
its local peer over the local socket. An eavesdropper has no secret, so a ticket cannot be replayed;
a client of one host cannot widen its ticket to another peer, to other rights or to another namespace. The key of a
writer follows from its namespace, so a ticket that names another one has another secret.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from p2pstore.access.keyring import KeyRing, Role, key_id_of
from p2pstore.errors import AuthenticationFailed, ProtocolError
from p2pstore.transfer.data_messages import (
    READ_KINDS,
    READER_KINDS,
    WRITE_KINDS,
    DataKind,
    Store,
    Ticket,
)
from p2pstore.transfer.peer_messages import Flush, Remove
from p2pstore.wire import Message, Signer, Verifier, decode_body, encode_body

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
    """STORE, STORE_PART, REMOVE and FLUSH: for local clients of the issuer that may write, and for writers' peers."""


class TicketClaims(Message, frozen=True):
    format: int
    key_id: bytes
    issuer: bytes
    audience: bytes
    expires_unix_ms: int
    ticket_id: bytes
    scope: int
    namespace: str = ""
    """The only one that WRITE is for; empty for all, which a writer's key cannot prove."""


@dataclass(frozen=True, slots=True)
class GrantedTicket:
    """A ticket with the secret that makes it usable."""

    ticket: Ticket
    secret: bytes


def issue_ticket(
    *,
    signer: Signer,
    ring: KeyRing,
    audience: bytes,
    now_unix: float,
    ticket_id: bytes,
    scope: Scope,
    namespace: str = "",
) -> GrantedTicket:
    """A ticket for `audience`, good for 120 s (a connection made in that time lives on). With a `namespace` it is for
    writing in that one alone."""
    key = ring.proving_key(namespace)
    claims = encode_body(
        TicketClaims(
            TICKET_FORMAT,
            key_id_of(key),
            signer.peer_id,
            audience,
            int((now_unix + TICKET_SECONDS) * 1000),
            ticket_id,
            int(scope),
            namespace,
        )
    )
    return GrantedTicket(
        Ticket(claims, signer.sign(_SIGNATURE_CONTEXT + claims)), ticket_secret(key, claims)
    )


def ticket_secret(key: bytes, claims: bytes) -> bytes:
    """A secret that only holders of the cluster key can make, and pass on."""
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
    ticket: Ticket, *, audience: bytes, ring: KeyRing, verifier: Verifier, now_unix: float
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
    key = ring.find(claims.key_id, claims.namespace)
    if key is None:
        raise AuthenticationFailed("the ticket was made with a cluster key that this peer does not hold")
    if not verifier.verify(claims.issuer, _SIGNATURE_CONTEXT + ticket.claims, ticket.signature):
        raise AuthenticationFailed("the ticket was not signed by its issuer")
    return claims, ticket_secret(key, ticket.claims)


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of a connection: the claims of its ticket, within the role of the holder of the key
    that proved them."""

    claims: TicketClaims
    role: Role

    def allow(self, kind: int) -> bool:
        """Whether requests of this kind may come."""
        of_role = (
            self.role is Role.MEMBER
            or kind in READER_KINDS
            or (self.role is Role.WRITER and kind in WRITE_KINDS)
        )
        return of_role and bool(self.claims.scope & _scope_for(kind))

    def why_not(self, kind: int) -> str:
        """The error text for a request of another kind."""
        if self.role is Role.MEMBER:
            issued_for = "other peers" if self.claims.scope & Scope.PEER else "reading"
        else:
            doing = "writing" if self.claims.scope & Scope.WRITE else "reading"
            issued_for = f"{doing}, with a {self.role.name.lower()}'s key,"
        return f"the ticket does not allow {DataKind(kind).name}: it was issued for {issued_for} only"

    def refusal(self, message: Message) -> str:
        """Why a request of an allowed kind is refused all the same; empty when it is not."""
        if not isinstance(message, Store | Remove | Flush):
            return ""
        if self.claims.namespace and message.namespace != self.claims.namespace:
            return (
                f"the ticket is for writing in namespace {self.claims.namespace!r}, not in "
                f"{message.namespace!r}"
            )
        if self.role is Role.WRITER and isinstance(message, Store) and message.pin:
            return "a writer's key allows no pins, which keep memory from others: put without one"
        return ""


def _scope_for(kind: int) -> Scope:
    """The scope that requests of this kind need."""
    if kind in READ_KINDS:
        return Scope.READ
    return Scope.WRITE if kind in WRITE_KINDS else Scope.PEER
