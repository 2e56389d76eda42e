"""TLS at a data server: its certificate, which is renewed, and the handshake with who connects. Under trio."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.runtime.streams import AcceptedStream
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.frame_reading import Refused, receive_some
from p2pstore.transfer.read_tickets import SignerLike
from p2pstore.transfer.tls.tls_certificates import make_certificate
from p2pstore.transfer.tls.tls_streams import LEAST_RECEIVE_BYTES, AcceptedTlsStream
from p2pstore.wire import PREFACE_DATA, Code

RENEW_SECONDS: Final = 86_400
_HANDSHAKE_RECORD: Final = 22
"""The first byte of whoever speaks TLS."""


class TlsServing:
    """Accepts TLS with certificates of one peer."""

    def __init__(self, signer: SignerLike, unix_clock: Callable[[], float]) -> None:
        self._signer = signer
        self._unix_clock = unix_clock
        self._renew()

    async def accept(self, stream: AcceptedStream) -> AcceptedTlsStream:
        """Shake hands on a fresh stream. Raises `Refused` for a peer that speaks plainly, and
        `ProtocolError` for what is no TLS 1.3; the stream is the caller's to close."""
        buffer = memoryview(bytearray(LEAST_RECEIVE_BYTES))
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
    context.num_tickets = 0  # every connection proves anew who answers
    descriptor = os.memfd_create("p2pstore-tls")  # OpenSSL wants a file: one that no disk has
    with open(descriptor, "wb", buffering=0) as file:
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context
