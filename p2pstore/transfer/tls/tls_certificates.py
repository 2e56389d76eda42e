"""Certificates of data servers: which peer speaks at the other end of a TLS connection. Pure.

A peer makes a key for TLS alone and a certificate that this key signs, as libp2p does it. An extension holds the
signature of the peer's ed25519 identity over that key and the time that the certificate is good for; so no
authority is needed, the dialing side knows the peer id that it wants, and a stolen TLS key is of no use
for longer than a few days.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from p2pstore.errors import AuthenticationFailed
from p2pstore.transfer.read_tickets import SignerLike

BACKDATED_SECONDS: Final = 3600
"""A certificate begins earlier than it is made: clocks differ."""
VALID_SECONDS: Final = 7 * 86_400

_EXTENSION: Final = x509.ObjectIdentifier("2.25.330051757334202964865493182548981595895")
"""Made from a random UUID (arc 2.25 is free for that)."""
_CONTEXT: Final = b"p2pstore data certificate 1\0"
_BINDING_CONTEXT: Final = b"p2pstore ticket over tls 1\0"
_VALIDITY: Final = struct.Struct("<QQ")
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")
"""Of the peer id of an ed25519 key: identity multihash of 36 bytes, key type ed25519, 32 bytes of key."""
_ED25519_KEY_BYTES: Final = 32
_MALFORMED: Final = (
    ValueError,
    OverflowError,
    struct.error,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate (DER) and its private key, both as `pem` as well. Keep it in memory only."""

    der: bytes
    pem: bytes

    def __repr__(self) -> str:  # the key must not reach a log
        return f"Certificate({sha256(self.der).hexdigest()[:16]})"


def make_certificate(
    signer: SignerLike, now_unix: float, key: ec.EllipticCurvePrivateKey | None = None
) -> Certificate:
    """A certificate of `signer`, good for seven days; for a fresh key, unless one is given."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    begins, ends = int(now_unix) - BACKDATED_SECONDS, int(now_unix) + VALID_SECONDS
    signature = signer.sign(_signed_text(key.public_key(), begins, ends))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "p2pstore")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .serial_number(x509.random_serial_number())
        .public_key(key.public_key())
        .not_valid_before(datetime.fromtimestamp(begins, UTC))
        .not_valid_after(datetime.fromtimestamp(ends, UTC))
        .add_extension(x509.UnrecognizedExtension(_EXTENSION, signature), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(
        certificate.public_bytes(Encoding.DER), secret + certificate.public_bytes(Encoding.PEM)
    )


def check_certificate(der: bytes, peer_id: bytes, now_unix: float) -> None:
    """Raise `AuthenticationFailed` unless `peer_id` vouches for this certificate's key now.

    That the other end has the private key is TLS's own proof.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        begins = int(certificate.not_valid_before_utc.timestamp())
        ends = int(certificate.not_valid_after_utc.timestamp())
        extension = certificate.extensions.get_extension_for_oid(_EXTENSION).value
        text = _signed_text(certificate.public_key(), begins, ends)
    except x509.ExtensionNotFound:
        raise AuthenticationFailed(
            "the TLS certificate is not one of a p2pstore peer: something else answers at its data address"
        ) from None
    except _MALFORMED as error:
        raise AuthenticationFailed(f"the TLS certificate is malformed: {error}") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    if not _signed_by(peer_id, extension.value, text):
        raise AuthenticationFailed(
            "the TLS certificate is another peer's: that one answers at this peer's data address"
        )
    if not begins <= now_unix <= ends:
        raise AuthenticationFailed(
            "the TLS certificate has expired or is not good yet: the clocks of the two hosts differ by "
            "hours, or the certificate is an old one"
        )


def bound_secret(secret: bytes, certificate_der: bytes) -> bytes:
    """A ticket's secret for use over TLS with that server certificate alone: proofs made with it are of no use to
    an attacker in between, who shows another certificate or none."""
    return hmac.digest(secret, _BINDING_CONTEXT + sha256(certificate_der).digest(), "sha256")


def _signed_text(key: object, begins_unix: int, ends_unix: int) -> bytes:
    """What a peer signs. Raises `ValueError` for a key of another kind than peers make."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("its key is not of an elliptic curve")
    public = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return _CONTEXT + _VALIDITY.pack(begins_unix, ends_unix) + public


def _signed_by(peer_id: bytes, signature: bytes, text: bytes) -> bool:
    key = peer_id.removeprefix(_PEER_ID_PREFIX)
    if len(key) != _ED25519_KEY_BYTES or len(peer_id) == len(key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
