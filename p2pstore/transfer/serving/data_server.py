"""The accepting side of data connections, under trio: listeners, limits, the hello.

Bytes of a stranger end at most its connection, and cost one line in the log. Connections after a
good hello are served by `p2pstore.transfer.serving.data_session`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final

import trio

from p2pstore.access.crowding import Strangers, host_group
from p2pstore.access.keyring import AllowList, KeyRing
from p2pstore.addresses import split_address
from p2pstore.errors import (
    AuthenticationFailed,
    ConfigError,
    DeadlineExceeded,
    P2PStoreError,
    ProtocolError,
)
from p2pstore.runtime.byte_budget import Account, ByteBudget, Owner
from p2pstore.runtime.streams import AcceptedStream, tune_tcp
from p2pstore.runtime.trio_streams import Accepting, TrioStream
from p2pstore.transfer.data_frames import next_frame, receive_some
from p2pstore.transfer.data_messages import (
    MAX_DATA_VERSION,
    MIN_DATA_VERSION,
    DataKind,
    Hello,
    HelloReply,
    Proof,
    Refused,
)
from p2pstore.transfer.rdma.rdma_serving import RdmaServer
from p2pstore.transfer.read_tickets import NONCE_BYTES, TicketClaims, check_proof, open_ticket, prove
from p2pstore.transfer.serving.data_session import RECEIVE_BYTES, DataSession
from p2pstore.transfer.serving.read_answers import Traffic
from p2pstore.transfer.serving.serving_backends import Backends, DataBackend, StoreBackend, SwarmBackend
from p2pstore.transfer.serving.serving_limits import DataPlaces, ServerLimits, Uploads
from p2pstore.transfer.tls_streams import AcceptedTlsStream, TlsServing
from p2pstore.wire import (
    DATA_REQUEST_LIMITS,
    HELLO_LIMITS,
    PREFACE_BYTES,
    PREFACE_DATA,
    REPLY,
    Code,
    FrameBuffer,
    Signer,
    Verifier,
    code_of,
    decode_body,
    encode_frame,
    negotiate_version,
)

logger = logging.getLogger("p2pstore.transfer")

LISTEN_BACKLOG: Final = 512
MAX_SUBJECTS: Final = 1024
"""Most entries of `QuietLog`: strangers may come from any number of hosts."""
RETIRE_SECONDS: Final = 5.0
"""How long a connection whose key was removed may still answer what is under way."""


class QuietLog:
    """Warnings about strangers: at most one line per second and subject, with how many were left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, subject: str, text: str) -> None:
        """One line, unless `subject` had one within the last second."""
        now = self._clock()
        if now - self._last.get(subject, -1e9) < 1.0:
            self._left_out[subject] += 1
            return
        if len(self._last) >= MAX_SUBJECTS:
            self._last.clear()
            self._left_out.clear()
        self._last[subject] = now
        left_out = self._left_out.pop(subject, 0)
        logger.warning("%s%s", text, f" ({left_out} more like it)" if left_out else "")


async def open_data_listeners(addresses: Sequence[str]) -> list[socket.socket]:
    """Listening sockets for `HOST:PORT` and `[v6]:PORT` (port 0: any free one).

    Raises `ConfigError` naming the address that is in use, not of this host, or malformed.
    """
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            host, port = split_address(address, "--data-listen")
            try:
                found = await trio.socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                both = not any(each.startswith("0.0.0.0:") for each in addresses)
                listeners.append(_listen(found[0][0], found[0][4], both_families=both))
            except OSError as error:
                reason = "is already in use" if error.errno == errno.EADDRINUSE else str(error)
                raise ConfigError(
                    f"cannot listen on the data address {address}: {reason}. "
                    "Choose another with --data-listen HOST:PORT (port 0 for any free one)"
                ) from error
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen(family: int, address: Any, *, both_families: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # [::] takes IPv4 as well, unless 0.0.0.0 wants the same port
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class DataServer:
    """Serves data connections. `connections` and `traffic` are for the peer's statistics."""

    def __init__(
        self,
        backend: DataBackend,
        *,
        ring: KeyRing,
        signer: Signer,
        verifier: Verifier,
        incarnation: int,
        limits: ServerLimits | None = None,
        unix_clock: Callable[[], float] = time.time,
        allowed: AllowList | None = None,
        stores: StoreBackend | None = None,
        rdma: RdmaServer | None = None,
        tls: bool = False,
        swarms: SwarmBackend | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        """`stores` takes in values, `rdma` lets others read
        by RDMA, `swarms` serves swarms of checkpoints; None turns it off. `tls`: TLS alone is spoken.
        `budget` bounds the bytes held for others.

        `allowed`: issuers whose tickets are taken; None for all. After a change of it or of `ring`, call
        `recheck`."""
        self._backends = Backends(backend, stores, rdma, swarms)
        self._tls = TlsServing(signer, unix_clock) if tls else None
        self._limits = limits or ServerLimits()
        self.places = DataPlaces(self._limits.connections)
        self._budget = budget if budget is not None else ByteBudget()
        self.connections = 0
        self.traffic = Traffic(Uploads(self._limits.uploads))
        self._ring = ring
        self._allowed = allowed if allowed is not None else AllowList()
        self._sessions: dict[DataSession, tuple[TicketClaims, trio.CancelScope]] = {}
        self._signer = signer
        self._verifier = verifier
        self._incarnation = incarnation
        self._unix_clock = unix_clock
        self._strangers: Strangers[trio.CancelScope] = Strangers(
            self._limits.unproved, self._limits.unproved_per_address
        )
        self._log = QuietLog(time.monotonic)

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept until cancelled; then every connection is closed, and the listeners too."""
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
        finally:
            for listener in listeners:
                trio.lowlevel.notify_closing(listener.fileno())
                listener.close()

    def recheck(self) -> None:
        """Ring or allow list were replaced: end the connections whose tickets would not be taken any more.

        At once where the issuer is not allowed now. Where it is only the key that went, its holder will have
        the new one: that connection ends when it is idle, and after 5 s in any case.
        """
        for session, (claims, scope) in list(self._sessions.items()):
            if not self._allowed.allows(claims.issuer):
                scope.cancel()
            elif not self._accepts(claims):
                scope.deadline = min(scope.deadline, trio.current_time() + RETIRE_SECONDS)
                session.retire()

    def _accepts(self, claims: TicketClaims) -> bool:
        known = self._ring.find(claims.key_id, claims.namespace) is not None
        return known and self._allowed.allows(claims.issuer)

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        with closing(Accepting(logger, "others, for objects,")) as accepting:
            while True:
                sock, address = await accepting.accept(listener)
                host = str(address[0])
                self._let_in(sock, host, nursery)
                await trio.lowlevel.checkpoint()

    def _let_in(self, sock: socket.socket, host: str, nursery: trio.Nursery) -> None:
        """Wait for a stranger's hello, unless too many do already; another stranger may have to go for it."""
        hello = trio.CancelScope()
        dropped = self._strangers.arrive(host, hello)
        if dropped is hello:
            self._log.warning("unproved", f"{host} opens many connections without a valid hello")
            sock.close()
            return
        if dropped is not None:
            dropped.cancel()
        self.connections += 1
        nursery.start_soon(self._run_connection, sock, host, hello)

    async def _run_connection(self, sock: socket.socket, host: str, hello: trio.CancelScope) -> None:
        """One connection from hello to end. Only cancellation leaves this function as an exception.

        `hello` is around the hello: cancelled to make room for another stranger.
        """
        stream: AcceptedStream = TrioStream(sock, self._limits.progress_seconds)
        try:
            tune_tcp(sock)
            frames = FrameBuffer(HELLO_LIMITS)
            met = None
            with hello, trio.move_on_after(self._limits.hello_seconds):
                if self._tls is not None:
                    stream = await self._tls.accept(stream)
                met = await self._shake_hands(stream, frames, host)
            self._strangers.leave(hello)
            if met is None:
                raise ProtocolError(
                    "it made room for a stranger from another host"
                    if hello.cancelled_caught
                    else f"no hello within {self._limits.hello_seconds:g} s"
                )
            claims, owner = met
            frames.limits = DATA_REQUEST_LIMITS
            account = self._budget.open(owner, stream_ender(stream, self._log))
            session = DataSession(
                stream,
                frames,
                claims,
                account=account,
                backends=self._backends,
                limits=self._limits,
                traffic=self.traffic,
                role=self._ring.role_of(claims.key_id, claims.namespace),
            )
            await self._serve_session(session, claims, account)
        except Refused as refusal:
            self._log.warning(f"refused {host}", f"data connection from {host}: {refusal}")
            with trio.move_on_after(1.0):
                await self._send_last(stream, refusal.frame)
        except ProtocolError as error:
            self._log.warning(f"garbage {host}", f"data connection from {host} closed: {error}")
        except DeadlineExceeded as error:
            self._log.warning(f"slow {host}", f"data connection from {host} cut: {error}")
        except OSError as error:
            logger.debug("data connection from %s ended: %s", host, error)
        except Exception:
            logger.exception("data connection from %s closed by an internal error", host)
        finally:
            self._strangers.leave(hello)
            self.connections -= 1
            stream.close()

    async def _serve_session(self, session: DataSession, claims: TicketClaims, account: Account) -> None:
        with trio.CancelScope() as scope:
            self._sessions[session] = claims, scope
            self.places.take(session, account.owner, scope.cancel)
            try:
                await session.run()
            finally:
                del self._sessions[session]
                self.places.leave(session)
                account.close()

    async def _send_last(self, stream: AcceptedStream, frame: bytes) -> None:
        try:
            await stream.send(frame)
        except OSError as error:
            logger.debug("could not say why the connection ends: %s", error)

    async def _shake_hands(
        self, stream: AcceptedStream, frames: FrameBuffer, host: str
    ) -> tuple[TicketClaims, Owner]:
        """Preface, hello and proof; the claims of its ticket, and its name. Raises `Refused` when
        the ticket or the proof is not good, and when there is no place."""
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        preface = bytearray()
        while len(preface) < PREFACE_BYTES:
            count = await receive_some(stream, buffer[: PREFACE_BYTES - len(preface)])
            preface += buffer[:count]
            if not PREFACE_DATA.startswith(preface):
                raise ProtocolError("this is not a p2pstore data connection")
        header, body = await next_frame(stream, frames, buffer)
        if header.kind != DataKind.HELLO:
            raise ProtocolError("the first frame is not a hello")
        hello = decode_body(Hello, body)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("the hello's nonce has the wrong length")
        try:
            version = negotiate_version(
                hello.min_version, hello.max_version, (MIN_DATA_VERSION, MAX_DATA_VERSION)
            )
            claims, secret = open_ticket(
                hello.ticket,
                audience=self._signer.peer_id,
                ring=self._ring,
                verifier=self._verifier,
                now_unix=self._unix_clock(),
            )
            if not self._allowed.allows(claims.issuer):
                raise AuthenticationFailed("the ticket's issuer is not on this peer's allow list")
        except P2PStoreError as error:
            raise Refused(header.kind, header.request_id, code_of(error), str(error)) from error
        if isinstance(stream, AcceptedTlsStream):
            secret = stream.bound(secret)
        nonce = os.urandom(NONCE_BYTES)
        proof = prove(secret, b"server", hello.nonce, nonce)
        reply = HelloReply(version, nonce, proof, self._incarnation)
        await stream.send(encode_frame(DataKind.HELLO, header.request_id, reply, flags=REPLY))
        header, body = await next_frame(stream, frames, buffer)
        if header.kind != DataKind.PROOF:
            raise ProtocolError("the second frame is not a proof")
        if not check_proof(secret, b"client", hello.nonce, nonce, decode_body(Proof, body).proof):
            text = "the proof is wrong: the ticket was shown without its secret"
            raise Refused(header.kind, header.request_id, Code.AUTHENTICATION_FAILED, text)
        if not self._accepts(claims):
            raise ProtocolError("the key of its ticket was removed during the hello")
        owner = Owner(host_group(host), claims.issuer)
        if not self.places.make_room(owner):
            text = (
                f"all {self.places.limit:,} data connections of this peer are in use; its status page says by "
                "whom"
            )
            raise Refused(header.kind, header.request_id, Code.BUSY, text)
        return claims, owner


def stream_ender(stream: AcceptedStream, log: QuietLog) -> Callable[[str], None]:
    """The function that ends a connection whose other side has too many bytes held here."""

    def end(why: str) -> None:
        log.warning("budget", f"data connection cut: {why}")
        stream.abort()

    return end
