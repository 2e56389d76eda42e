"""TLS 1.3 over any `ByteStream`: the same under trio, under asyncio and with blocking sockets.

OpenSSL works on memory here and the stream below moves what it makes and takes, so deadlines and cancellation are
that stream's. Decrypted bytes go straight into the caller's buffer; what TLS costs besides the cipher is one copy of
received bytes, and one of sent ones, in pieces that stay in the cache.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from typing import Final, TypeVar, cast

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

from p2pstore.errors import AuthenticationFailed, DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB
from p2pstore.runtime.streams import AcceptedStream, BytesLike, ByteStream, flatten_parts, stalled
from p2pstore.transfer.data_frames import receive_some
from p2pstore.transfer.data_messages import DataKind, Refused
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.wire import PREFACE_DATA, Code, Signer

T = TypeVar("T")

RECORD_BYTES: Final = 16 * KIB
"""The most that TLS puts into one record. Smaller parts that are sent together share one."""
SEND_PIECE_BYTES: Final = 64 * KIB
"""Encrypted before any of it is sent: more gained nothing, and each connection keeps the room."""
MIN_RECEIVE_BYTES: Final = 32 * KIB
MAX_RECEIVE_BYTES: Final = 128 * KIB
"""Room to receive into, for readers of little and of much at once."""
MAX_HANDSHAKE_BYTES: Final = 64 * KIB
"""Most bytes from the other side in it; usual are one or two KiB."""


class TlsStream:
    """A `ByteStream` over TLS. One task may send while another receives.

    A send that is cancelled or takes too long closes the stream: encrypted records cannot be sent later. After one
    that failed because the connection broke, nothing more can be sent, but what came before can be received: it may
    say why. The other side's end without TLS's own farewell is an end like any other: all that is said on data
    connections has its length.
    """

    def __init__(self, inner: ByteStream, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._inner = inner
        self._incoming = ssl.MemoryBIO()
        self._ended = False
        self._broken = False
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._room = memoryview(bytearray(MIN_RECEIVE_BYTES))

    @property
    def progress_seconds(self) -> float:
        return self._inner.progress_seconds

    @progress_seconds.setter
    def progress_seconds(self, seconds: float) -> None:
        self._inner.progress_seconds = seconds

    @property
    def receive_seconds(self) -> float | None:
        return self._inner.receive_seconds

    @receive_seconds.setter
    def receive_seconds(self, seconds: float | None) -> None:
        self._inner.receive_seconds = seconds

    async def shake_hands(self, received: bytes | memoryview = b"") -> None:
        """Agree on keys, within `progress_seconds` in all. `received` has come already.

        Raises `ProtocolError` when the other side does not speak TLS 1.3, and what sending and receiving raise.
        After an error the stream is of no use.
        """
        limit_seconds = self.progress_seconds
        deadline = time.monotonic() + limit_seconds
        late = DeadlineExceeded(f"the TLS handshake was not over within {limit_seconds:g} s")
        self._incoming.write(received)
        left_bytes = MAX_HANDSHAKE_BYTES - len(received)
        while not await self._step():
            self.receive_seconds = left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise late
            try:
                count = await self._receive_some(MIN_RECEIVE_BYTES)
            except DeadlineExceeded:
                raise late from None
            except ConnectionResetError:
                count = 0
            left_bytes -= count
            if not count:
                raise ConnectionResetError(
                    "the other side ended the TLS handshake: it may speak no TLS there"
                )
            if left_bytes < 0:
                raise ProtocolError("the TLS handshake is longer than any of p2pstore's")
        self.receive_seconds = None

    async def _step(self) -> bool:
        """Whether the handshake is complete, as far as what was received goes; what it says is sent."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            complete = False
        except ssl.SSLError as error:
            with contextlib.suppress(OSError, DeadlineExceeded):  # the other side may hear why
                await self._inner.send(self._outgoing.read())
            raise ProtocolError(f"the TLS handshake failed: {_reason(error)}") from error
        else:
            complete = True
        if self._outgoing.pending:
            await self._inner.send(self._outgoing.read())
        return complete

    async def send(self, *parts: BytesLike) -> None:
        self._check_whole()
        try:
            for piece in self._encrypt(parts):
                await self._inner.send(piece)
        except BaseException as error:
            if isinstance(error, OSError) and not isinstance(error, DeadlineExceeded):
                self._broken = True
            else:
                self.close()
            raise

    def _check_whole(self) -> None:
        """Raises `ConnectionResetError` when a send broke off: the other side cannot decrypt what follows."""
        if self._broken:
            raise ConnectionResetError("the TLS connection broke in an earlier send")

    async def send_whole(self, *parts: BytesLike) -> None:
        self._check_whole()
        await self._inner.send_whole(*self._encrypt(parts))

    def _encrypt(self, parts: Sequence[BytesLike]) -> Iterator[bytes]:
        """The records to send, some 64 KiB at a time."""
        for view in _records(parts):
            position = 0
            while position < len(view):  # a call makes one record
                position += self._tls.write(view[position : position + RECORD_BYTES])
                if self._outgoing.pending >= SEND_PIECE_BYTES:
                    yield self._outgoing.read()
        if self._outgoing.pending:
            yield self._outgoing.read()

    async def receive_into(self, view: memoryview) -> int:
        began = 0.0
        while not (count := self._decrypt_into(view)):
            if self._ended:
                return 0
            limit_seconds = self.progress_seconds
            if self.receive_seconds is not None:
                limit_seconds = self.receive_seconds
            began = began or time.monotonic()
            if time.monotonic() - began > limit_seconds:  # a record that never becomes whole
                raise stalled(limit_seconds)
            if not await self._receive_some(len(view)):
                return 0
        return count

    receive_soon = receive_into

    def _decrypt_into(self, view: memoryview) -> int:
        """As much as has arrived whole."""
        position = 0
        try:
            while position < len(view) and self._holds_input:
                count = cast("int", self._tls.read(len(view) - position, view[position:]))
                if not count:  # the other side's farewell: what it sends after that is not read
                    self._ended = True
                    break
                position += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ConnectionAbortedError(f"the TLS connection broke: {_reason(error)}") from error
        return position

    async def _receive_some(self, wanted_bytes: int) -> int:
        """Take encrypted bytes off the stream below; 0 at its end."""
        size = max(MIN_RECEIVE_BYTES, min(wanted_bytes, MAX_RECEIVE_BYTES))
        if len(self._room) < size:
            self._room = memoryview(bytearray(size))
        count = await self._inner.receive_into(self._room)
        self._incoming.write(self._room[:count])
        return count

    @property
    def _holds_input(self) -> bool:
        """Whether received bytes were not read yet: perhaps a part of a record."""
        return bool(self._incoming.pending or self._tls.pending())

    def other_certificate(self) -> bytes:
        """The certificate that the other side showed, DER; nothing when it showed none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def fileno(self) -> int:
        return self._inner.fileno()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class AcceptedTlsStream(TlsStream):
    """The server's end, which shows `certificate` (DER)."""

    def __init__(self, inner: AcceptedStream, context: ssl.SSLContext, certificate: bytes) -> None:
        super().__init__(inner, context, server_side=True)
        self._accepted = inner
        self._certificate = certificate

    def bound(self, secret: bytes) -> bytes:
        """A ticket's secret as it counts on this stream."""
        return bound_secret(secret, self._certificate)

    async def wait_readable_forever(self) -> None:
        if not self._holds_input:  # the rest of a record has a deadline
            await self._accepted.wait_readable_forever()

    @property
    def can_lend(self) -> bool:
        return False

    async def lend(self, work: Callable[[socket.socket], T]) -> T:
        raise TypeError("what a TLS stream carries is not on its socket")

    def stop_receiving(self) -> None:
        self._accepted.stop_receiving()


async def dial_tls(
    stream: ByteStream, peer_id: bytes, granted: GrantedTicket
) -> tuple[TlsStream, GrantedTicket]:
    """Speak TLS on a fresh stream to that peer: the stream to use, and the ticket as it counts there.

    Raises `AuthenticationFailed` when another one answers, and `ProtocolError` when it is not TLS; then, as
    after any error, the stream is closed.
    """
    try:
        secured = TlsStream(stream, dialling_context(), server_side=False)
        await secured.shake_hands()
        certificate = secured.other_certificate()
        check_certificate(certificate, peer_id, time.time())
    except BaseException:
        stream.close()
        raise
    return secured, replace(granted, secret=bound_secret(granted.secret, certificate))


@cache
def dialling_context() -> ssl.SSLContext:
    """For a caller that checks the certificate itself afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no authority signs these: see `check_certificate`
    return context


def _records(parts: Sequence[BytesLike]) -> Iterator[memoryview]:
    """Small parts joined, as far as they fit into one record; long ones as they are."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in flatten_parts(parts):
        if small and small_bytes + len(view) > RECORD_BYTES:
            yield memoryview(b"".join(small))
            small, small_bytes = [], 0
        if len(view) < RECORD_BYTES:
            small.append(view)
            small_bytes += len(view)
        else:
            yield view
    if small:
        yield memoryview(b"".join(small))


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason in plain letters."""
    return (error.reason or str(error)).replace("_", " ").lower()


RENEW_SECONDS: Final = 86_400
_HANDSHAKE_RECORD: Final = 22
"""The first byte of a TLS client."""


class TlsServing:
    """Accepts TLS with certificates of one peer."""

    def __init__(self, signer: Signer, unix_clock: Callable[[], float]) -> None:
        self._signer = signer
        self._unix_clock = unix_clock
        self._renew()

    async def accept(self, stream: AcceptedStream) -> AcceptedTlsStream:
        """Shake hands on a fresh stream. Raises `Refused` for a peer that speaks plainly, and
        `ProtocolError` for what is no TLS 1.3; the stream is the caller's to close."""
        buffer = memoryview(bytearray(MIN_RECEIVE_BYTES))
        received = buffer[: await receive_some(stream, buffer)]
        if bytes(received[: len(PREFACE_DATA)]) == PREFACE_DATA:
            text = (
                "this peer takes data connections over TLS only (data_tls is on): the other side knows "
                "another address of it, or its version is too old for TLS"
            )
            raise Refused(DataKind.HELLO, 0, Code.PROTOCOL_MISMATCH, text)
        if received[0] != _HANDSHAKE_RECORD:
            raise ProtocolError("this is not a TLS connection")
        if not 0 <= self._unix_clock() - self._made_at < RENEW_SECONDS:
            self._renew()
        secured = AcceptedTlsStream(stream, self._context, self._certificate)
        await secured.shake_hands(received)
        return secured

    def _renew(self) -> None:
        self._made_at = self._unix_clock()
        certificate = make_certificate(self._signer, self._made_at)
        self._certificate = certificate.der
        self._context = serving_context(certificate.pem)


def serving_context(pem: bytes) -> ssl.SSLContext:
    """For servers that show this certificate: TLS 1.3, and no resumption."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves the answering peer anew
    descriptor = os.memfd_create("p2pstore-tls")  # OpenSSL wants a file: one that no disk has
    with open(descriptor, "wb", buffering=0) as file:
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context


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
    """A data server's certificate: which peer speaks at the other end of a TLS connection.

    A peer makes a key for TLS alone and a certificate that this key signs, as libp2p does it. An extension holds the
    signature of the peer's ed25519 identity over that key and the time that the certificate is good for; so no
    authority is needed, the dialing side knows the peer id that it wants, and a stolen TLS key is of no use
    for longer than a few days. `der` is the certificate, `pem` it and its private key: to be kept in memory only."""

    der: bytes
    pem: bytes

    def __repr__(self) -> str:  # the key must not reach a log
        return f"Certificate({sha256(self.der).hexdigest()[:16]})"


def make_certificate(
    signer: Signer, now_unix: float, key: ec.EllipticCurvePrivateKey | None = None
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
    an attacker in between, which shows another certificate or none."""
    return hmac.digest(secret, _BINDING_CONTEXT + sha256(certificate_der).digest(), "sha256")


def _signed_text(key: object, begins_unix: int, ends_unix: int) -> bytes:
    """The text that a peer signs. Raises `ValueError` for a key of another kind than peers make."""
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
