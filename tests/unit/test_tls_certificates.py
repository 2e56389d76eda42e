"""Certificates that a peer's identity vouches for, and those that none does."""

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import example, given
from hypothesis import strategies as st

from p2pstore.errors import AuthenticationFailed
from p2pstore.gossip.links.identity import Identity
from p2pstore.transfer.tls_streams import (
    BACKDATED_SECONDS,
    VALID_SECONDS,
    bound_secret,
    check_certificate,
    make_certificate,
)

NOW = 1_800_000_000.0
PEER, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
EXTENSION = x509.ObjectIdentifier("2.25.330051757334202964865493182548981595895")
KEY = ec.derive_private_key(12345, ec.SECP256R1())
CERTIFICATE = make_certificate(PEER, NOW, KEY)


def extension_of(der: bytes) -> bytes:
    found = x509.load_der_x509_certificate(der).extensions.get_extension_for_oid(EXTENSION).value
    assert isinstance(found, x509.UnrecognizedExtension)
    return found.value


SIGNATURE = extension_of(CERTIFICATE.der)


def forged(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | Ed25519PrivateKey = KEY,
    extension: bytes | None = SIGNATURE,
    begins: float = NOW - BACKDATED_SECONDS,
    ends: float = NOW + VALID_SECONDS,
) -> bytes:
    """A certificate made by an owner of `key`."""
    name = x509.Name([])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .serial_number(5)
        .public_key(key.public_key())
        .not_valid_before(datetime.fromtimestamp(begins, UTC))
        .not_valid_after(datetime.fromtimestamp(ends, UTC))
    )
    if extension is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(EXTENSION, extension), critical=False)
    algorithm = None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.DER)


@pytest.mark.parametrize("now", [NOW, NOW - BACKDATED_SECONDS, NOW + VALID_SECONDS])
def test_the_peer_that_made_it(now: float) -> None:
    check_certificate(CERTIFICATE.der, PEER.peer_id, now)
    check_certificate(forged(), PEER.peer_id, now)  # the same facts, though other bytes


@pytest.mark.parametrize(
    "peer_id", [OTHER.peer_id, PEER.peer_id[:-1], PEER.peer_id[6:], b"", b"\x00\x25" + PEER.peer_id[2:]]
)
def test_another_peer(peer_id: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="another peer's"):
        check_certificate(CERTIFICATE.der, peer_id, NOW)


@pytest.mark.parametrize("now", [NOW - BACKDATED_SECONDS - 1, NOW + VALID_SECONDS + 1, 0.0])
def test_another_time(now: float) -> None:
    with pytest.raises(AuthenticationFailed, match="expired or is not good yet"):
        check_certificate(CERTIFICATE.der, PEER.peer_id, now)


def test_who_has_the_key_cannot_make_it_last_longer() -> None:
    der = forged(ends=NOW + 10 * VALID_SECONDS)
    with pytest.raises(AuthenticationFailed, match="another peer's"):
        check_certificate(der, PEER.peer_id, NOW + 5 * VALID_SECONDS)


@pytest.mark.parametrize(
    ("der", "complaint"),
    [
        (forged(extension=None), "not one of a p2pstore peer"),
        (forged(extension=b""), "another peer's"),
        (forged(extension=bytes(64)), "another peer's"),
        (forged(extension=SIGNATURE + b"\0"), "another peer's"),
        (forged(ec.derive_private_key(777, ec.SECP256R1())), "another peer's"),
        (forged(ec.derive_private_key(12345, ec.SECP384R1())), "another peer's"),
        (forged(rsa.generate_private_key(65537, 2048)), "not of an elliptic curve"),
        (forged(Ed25519PrivateKey.from_private_bytes(bytes(32))), "not of an elliptic curve"),
        (forged(begins=-1e8), "malformed"),
        (b"", "malformed"),
        (b"\x30\x82", "malformed"),
        (CERTIFICATE.der[:-1], "malformed"),
        (CERTIFICATE.der + b"\0", "malformed"),
        (CERTIFICATE.pem, "malformed"),
    ],
)
def test_what_nobody_made(der: bytes, complaint: str) -> None:
    with pytest.raises(AuthenticationFailed, match=complaint):
        check_certificate(der, PEER.peer_id, NOW)


# Versions to come will refuse a serial number below zero; this one says so.
@pytest.mark.filterwarnings(
    "ignore:Parsed a serial number:cryptography.utils.CryptographyDeprecationWarning"
)
@given(st.integers(0, len(CERTIFICATE.der) - 1), st.integers(1, 255))
@example(15, 128)  # the sign of the serial number
def test_a_changed_byte_is_refused_or_changes_nothing(position: int, change: int) -> None:
    """TLS proves that the other end has the key; the certificate's own signature is not checked."""
    der = bytearray(CERTIFICATE.der)
    der[position] ^= change
    try:
        check_certificate(bytes(der), PEER.peer_id, NOW)
    except AuthenticationFailed:
        return
    assert x509.load_der_x509_certificate(bytes(der)).public_key() == KEY.public_key()
    assert extension_of(bytes(der)) == SIGNATURE


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        check_certificate(noise, PEER.peer_id, NOW)


def test_every_certificate_has_its_own_key() -> None:
    first, second = make_certificate(PEER, NOW), make_certificate(PEER, NOW)
    assert extension_of(first.der) != extension_of(second.der)


def test_the_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(CERTIFICATE)
    assert len(repr(CERTIFICATE)) < 50


def test_a_secret_counts_for_one_certificate() -> None:
    other = make_certificate(PEER, NOW)
    secrets = {bound_secret(b"s" * 32, each.der) for each in (CERTIFICATE, other)}
    assert len(secrets | {bound_secret(b"t" * 32, CERTIFICATE.der), b"s" * 32}) == 4
