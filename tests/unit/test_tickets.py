"""Tickets: what opens a connection, and everything that must not."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.errors import AuthenticationFailed
from p2pstore.keyring import KeyRing
from p2pstore.transfer.messages import Ticket
from p2pstore.transfer.tickets import (
    TICKET_SECONDS,
    GrantedTicket,
    Scope,
    TicketClaims,
    check_proof,
    issue_ticket,
    open_ticket,
    prove,
    ticket_secret,
)
from p2pstore.wire import decode_body, encode_body

NOW = 1_800_000_000.0
OLD_KEY, NEW_KEY = b"o" * 32, b"n" * 32


class FakeIdentity:
    """Signs by hashing with its peer id: enough to tell who signed what."""

    def __init__(self, peer_id: bytes) -> None:
        self.peer_id = peer_id

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha256(self.peer_id + message).digest()

    def verify(self, peer_id: bytes, message: bytes, signature: bytes) -> bool:
        return signature == hashlib.sha256(peer_id + message).digest()


ISSUER = FakeIdentity(b"issuer")


def grant(ring: KeyRing, scope: Scope = Scope.READ, now: float = NOW) -> GrantedTicket:
    return issue_ticket(
        signer=ISSUER,
        ring=ring,
        audience=b"audience",
        now_unix=now,
        ticket_id=bytes(16),
        scope=scope,
    )


def opened(
    ticket: Ticket, ring: KeyRing, now: float = NOW, audience: bytes = b"audience"
) -> tuple[TicketClaims, bytes]:
    return open_ticket(ticket, audience=audience, ring=ring, verifier=ISSUER, now_unix=now)


def test_a_good_ticket_opens_with_the_same_secret() -> None:
    granted = grant(KeyRing([NEW_KEY, OLD_KEY]), Scope.READ | Scope.PEER)
    claims, secret = opened(granted.ticket, KeyRing([OLD_KEY, NEW_KEY]))
    assert secret == granted.secret
    assert (claims.issuer, claims.audience) == (b"issuer", b"audience")
    assert claims.scope == Scope.READ | Scope.PEER


def test_keyless_clusters_open_their_own_tickets_only() -> None:
    granted = grant(KeyRing())
    assert opened(granted.ticket, KeyRing())[1] == granted.secret
    with pytest.raises(AuthenticationFailed, match="does not hold"):
        opened(granted.ticket, KeyRing([NEW_KEY]))


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (NOW + TICKET_SECONDS + 1, "expired"),
        (NOW - 3 * TICKET_SECONDS, "too long"),
    ],
)
def test_time(now: float, reason: str) -> None:
    granted = grant(KeyRing([NEW_KEY]))
    opened(granted.ticket, KeyRing([NEW_KEY]), NOW + TICKET_SECONDS - 1)
    with pytest.raises(AuthenticationFailed, match=reason):
        opened(granted.ticket, KeyRing([NEW_KEY]), now)


def test_another_audience_is_refused() -> None:
    with pytest.raises(AuthenticationFailed, match="another peer"):
        opened(grant(KeyRing()).ticket, KeyRing(), audience=b"somebody else")


def test_a_widened_ticket_is_refused() -> None:
    ring = KeyRing([NEW_KEY])
    ticket = grant(ring).ticket
    claims = decode_body(TicketClaims, ticket.claims)
    for changed in (
        replace(claims, scope=int(Scope.READ | Scope.PEER)),
        replace(claims, issuer=b"another issuer"),
        replace(claims, ticket_id=b"x" * 16),
    ):
        with pytest.raises(AuthenticationFailed, match="not signed"):
            opened(Ticket(encode_body(changed), ticket.signature), ring)


@given(st.binary(max_size=600), st.binary(max_size=80))
def test_anything_else_is_refused_and_raises_nothing_else(claims: bytes, signature: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        opened(Ticket(claims, signature), KeyRing([NEW_KEY]))


@given(st.integers(0, 8 * 120 - 1))
def test_no_bit_of_the_claims_can_change(bit: int) -> None:
    ring = KeyRing([NEW_KEY])
    ticket = grant(ring).ticket
    damaged = bytearray(ticket.claims)
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    with pytest.raises(AuthenticationFailed):
        opened(Ticket(bytes(damaged), ticket.signature), ring)


def test_proofs_belong_to_secret_role_and_both_nonces() -> None:
    secret = ticket_secret(NEW_KEY, b"claims")
    proof = prove(secret, b"client", b"c" * 32, b"s" * 32)
    assert check_proof(secret, b"client", b"c" * 32, b"s" * 32, proof)
    assert not check_proof(secret, b"server", b"c" * 32, b"s" * 32, proof)
    assert not check_proof(secret, b"client", b"s" * 32, b"c" * 32, proof)
    assert not check_proof(
        ticket_secret(OLD_KEY, b"claims"), b"client", b"c" * 32, b"s" * 32, proof
    )
    assert not check_proof(
        ticket_secret(NEW_KEY, b"claimS"), b"client", b"c" * 32, b"s" * 32, proof
    )
    assert not check_proof(secret, b"client", b"c" * 32, b"s" * 32, proof[:-1])
