"""Tickets: those that open a connection, and all kinds that must not."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.access.keyring import (
    KeyRing,
    Role,
    key_id_of,
    parse_cluster_keys,
    reader_keys,
    writer_key_of,
)
from p2pstore.errors import AuthenticationFailed, ConfigError
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import format_peer_id
from p2pstore.transfer.data_messages import READER_KINDS, REQUESTS, WRITE_KINDS, DataKind, Store, Ticket
from p2pstore.transfer.peer_messages import Flush, Remove
from p2pstore.transfer.read_tickets import (
    TICKET_SECONDS,
    GrantedTicket,
    Rights,
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


def grant(
    ring: KeyRing, scope: Scope = Scope.READ, now: float = NOW, namespace: str = ""
) -> GrantedTicket:
    return issue_ticket(
        signer=ISSUER,
        ring=ring,
        audience=b"audience",
        now_unix=now,
        ticket_id=bytes(16),
        scope=scope,
        namespace=namespace,
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
    ("now", "reason"), [(NOW + TICKET_SECONDS + 1, "expired"), (NOW - 3 * TICKET_SECONDS, "too long")]
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
    assert not check_proof(ticket_secret(OLD_KEY, b"claims"), b"client", b"c" * 32, b"s" * 32, proof)
    assert not check_proof(ticket_secret(NEW_KEY, b"claimS"), b"client", b"c" * 32, b"s" * 32, proof)
    assert not check_proof(secret, b"client", b"c" * 32, b"s" * 32, proof[:-1])


def writers_ring(*namespaces: str, keys: Sequence[bytes] = (NEW_KEY,)) -> KeyRing:
    text = reader_keys(KeyRing(keys), lambda seed: format_peer_id(Identity(seed).peer_id), namespaces)
    return parse_cluster_keys(text, "writer.key")


def rights(granted: GrantedTicket, ring: KeyRing) -> Rights:
    """The rights of a ticket's holder at a peer with that ring, once it has proved the secret."""
    claims, secret = opened(granted.ticket, ring)
    assert secret == granted.secret
    return Rights(claims, ring.role_of(claims.key_id, claims.namespace))


def store(namespace: str, pin: int = 0) -> Store:
    return Store(namespace, "k", 0, b"", 0, 0, pin=pin)


def test_a_writers_ticket_is_for_its_namespace_alone() -> None:
    members = KeyRing([OLD_KEY, NEW_KEY])
    writer = writers_ring("a", "b")
    its = rights(grant(writer, ~Scope(0), namespace="a"), members)
    assert its.role is Role.WRITER
    allowed = {DataKind(kind) for kind in REQUESTS if its.allow(kind)}
    assert allowed == READER_KINDS | WRITE_KINDS
    assert not its.refusal(store("a"))
    for request in (store("b"), Remove("b", ["k"]), Flush("b"), store("c"), store("")):
        assert "for writing in namespace 'a'" in its.refusal(request)
    assert "no pins" in its.refusal(store("a", pin=1))
    assert "with a writer's key" in its.why_not(DataKind.PUSH)


def test_a_ticket_of_a_namespace_without_key_is_a_readers() -> None:
    its = rights(grant(writers_ring("a"), Scope.WRITE, namespace="c"), KeyRing([NEW_KEY]))
    assert its.role is Role.READER
    assert not any(its.allow(kind) for kind in WRITE_KINDS)
    assert "writing, with a reader's key, only" in its.why_not(DataKind.STORE)


def test_a_writers_ticket_that_names_another_namespace_opens_nothing() -> None:
    """The writer signs what it likes; the secret of its key is that of its namespace."""
    members = KeyRing([NEW_KEY])
    granted = grant(writers_ring("a"), Scope.WRITE, namespace="a")
    claims = decode_body(TicketClaims, granted.ticket.claims)
    for namespace in ("b", "", "a "):
        changed = encode_body(replace(claims, namespace=namespace))
        ticket = Ticket(changed, ISSUER.sign(b"p2pstore ticket claims 1\0" + changed))
        with pytest.raises(AuthenticationFailed, match="does not hold"):
            opened(ticket, members)
    posing = replace(claims, namespace="b", key_id=key_id_of(writer_key_of(NEW_KEY, "b")))
    changed = encode_body(posing)
    ticket = Ticket(changed, ISSUER.sign(b"p2pstore ticket claims 1\0" + changed))
    _, secret = opened(ticket, members)
    assert secret != ticket_secret(writer_key_of(NEW_KEY, "a"), changed), "it cannot prove it"


def test_a_writers_key_goes_with_the_members_key_it_was_made_from() -> None:
    writer = writers_ring("a", keys=[OLD_KEY, NEW_KEY])
    granted = grant(writer, Scope.WRITE, namespace="a")
    assert rights(granted, KeyRing([NEW_KEY, OLD_KEY])).role is Role.WRITER
    for ring in (KeyRing([NEW_KEY]), KeyRing(), KeyRing([OLD_KEY], of_user=True), writer):
        with pytest.raises(AuthenticationFailed, match="does not hold"):
            opened(granted.ticket, ring)


def test_a_members_ticket_may_name_a_namespace() -> None:
    members = KeyRing([NEW_KEY])
    its = rights(grant(members, Scope.WRITE, namespace="a"), members)
    assert its.role is Role.MEMBER
    assert not its.refusal(store("a", pin=2))
    assert its.refusal(store("b"))
    assert not rights(grant(members, Scope.WRITE), members).refusal(store("b"))


@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=5, unique=True))
def test_any_namespace_goes_through_a_key_file(namespaces: list[str]) -> None:
    ring = writers_ring(*namespaces, keys=[NEW_KEY, OLD_KEY])
    assert ring.writers == {each: writer_key_of(NEW_KEY, each) for each in namespaces}
    assert ring.role is Role.WRITER
    assert len(ring.keys) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"writer {NEW_KEY.hex()} %ff", "line 2: "),
        (f"writer {NEW_KEY.hex()} {'x' * 256}", "1 to 255 bytes"),
        ("writer 12 a", "line 2: not a cluster key"),
        (f"writer {NEW_KEY.hex()}", "line 2: not a cluster key"),
    ],
)
def test_lines_that_are_no_writers(line: str, reason: str) -> None:
    reader = reader_keys(KeyRing([NEW_KEY]), lambda seed: format_peer_id(Identity(seed).peer_id))
    with pytest.raises(ConfigError, match=reason):
        parse_cluster_keys(reader + line, "writer.key")
    with pytest.raises(ConfigError, match="of members and of readers"):
        parse_cluster_keys(f"{OLD_KEY.hex()}\nwriter {NEW_KEY.hex()} a", "writer.key")


def test_a_writer_of_too_many_namespaces() -> None:
    with pytest.raises(ConfigError, match="up to 64 namespaces"):
        writers_ring(*map(str, range(65)))
