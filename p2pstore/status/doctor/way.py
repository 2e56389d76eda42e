"""The way to another peer, step by step, as a stranger with the cluster's key. Shell (trio).

Nothing is announced: no peer record is signed, so no peer takes this command for a member. Each step has a
deadline; the first that is broken ends the examination, because later steps could not work.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

import p2pstore
from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import split_address
from p2pstore.errors import P2PStoreError, ProtocolError, Unavailable
from p2pstore.gossip.gossip_messages import ControlKind, Exchange, ExchangeReply, Ping
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost, HostSettings, open_control_host
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.links.sockets import Endpoint, connect
from p2pstore.gossip.records import PeerId, PeerRecord, open_peer_record
from p2pstore.runtime.linux import host_identity
from p2pstore.runtime.trio_tasks import sole_cause
from p2pstore.state.folder import ephemeral
from p2pstore.status.doctor import way_rules
from p2pstore.status.doctor.finding import Finding, broken, fine, skipped
from p2pstore.status.doctor.way_transports import (
    examine_data_address,
    examine_rdma,
    examine_shared_memory,
)
from p2pstore.transfer.data_messages import MAX_DATA_VERSION, MIN_DATA_VERSION
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.wire import Message

MAX_ADDRESSES: Final = 8
PINGS: Final = 10
IP_MTU: Final = 14
IPV6_MTU: Final = 24

Report = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Way:
    """The target: the control address `HOST:PORT` of a peer, and with what."""

    address: str
    ring: KeyRing
    cluster: str
    measure_seconds: float
    """For all measurements together."""
    timeout_seconds: float
    """For each step."""


class _Ended(Exception):
    """A step is broken, and told."""


def examine_way(way: Way, report: Report) -> None:
    """Examine the way; each finding is reported as soon as it is there. Raises `ConfigError` for a bad address."""
    split_address(way.address, "--peer")
    # The findings say it all; without a handler, Python would print the host's warnings to stderr.
    logging.getLogger("p2pstore").addHandler(logging.NullHandler())
    try:
        trio.run(_Examination(way, report).run)
    except BaseExceptionGroup as group:
        raise sole_cause(group) from None


async def _refuse_requests(peer_id: PeerId, kind: int, request: Message) -> Message:
    """The peer may ask back over the connection; there is nothing here to give."""
    raise Unavailable("this is `mooncake-p2p doctor`, not a member")


class _Examination:
    def __init__(self, way: Way, report: Report) -> None:
        self.way = way
        self.report = report
        self.identity: Identity = ephemeral()
        self.timeout = way.timeout_seconds
        self.ring = way.ring
        """For data: with the key that the peer admitted."""

    async def run(self) -> None:
        """All steps, or those up to the first that is broken."""
        with suppress(_Ended):
            endpoint = await self._connect(await self._resolve())
            async with open_control_host(
                ("127.0.0.1", 0),  # it must listen; the address is not announced
                HostSettings(
                    identity=self.identity,
                    ring=self.way.ring,
                    cluster=self.way.cluster,
                    handler=_refuse_requests,
                    on_lost=lambda _: None,
                    software=p2pstore.__version__,
                ),
            ) as host:
                peer_id = await self._discover(host, str(endpoint))
                record = await self._be_admitted(host, peer_id, str(endpoint))
            await self._examine_data(record)

    def _end(self, finding: Finding) -> _Ended:
        self.report(finding)
        return _Ended()

    async def _resolve(self) -> list[Endpoint]:
        host, port = split_address(self.way.address, "--peer")
        endpoints: dict[Endpoint, None] = {}
        problem = ""
        with trio.move_on_after(self.timeout) as scope:
            try:
                for family, _, _, _, address in await trio.socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                ):
                    endpoints[Endpoint(family, address)] = None
            except OSError as error:
                problem = error.strerror or str(error)
            except UnicodeError:
                problem = "that is no host name"
        if scope.cancelled_caught:
            problem = f"no name server answered within {self.timeout:g} s"
        found = list(endpoints)[:MAX_ADDRESSES]
        names = [str(each.address[0]) for each in found]
        finding = way_rules.judge_resolution(host, names, problem)
        if not found:
            raise self._end(finding)
        self.report(finding)
        return found

    async def _connect(self, endpoints: list[Endpoint]) -> Endpoint:
        attempts: list[way_rules.ConnectAttempt] = []
        for endpoint in endpoints:
            begin, seconds = time.monotonic(), self.timeout
            problem, refused, mtu = f"no answer within {self.timeout:g} s", False, (0, 0)
            greeting = None
            with trio.move_on_after(self.timeout):
                try:
                    sock = await connect(endpoint)
                except OSError as error:
                    problem = error.strerror or str(error)
                    refused = error.errno == errno.ECONNREFUSED
                else:
                    seconds = time.monotonic() - begin
                    with sock:
                        problem, mtu, greeting = "", path_mtu(sock), await _greeting(sock)
            attempts.append(way_rules.ConnectAttempt(str(endpoint), seconds, problem, refused))
            if not problem:
                self.report(way_rules.judge_connect(attempts, self.timeout))
                self.report(way_rules.judge_path_mtu(*mtu))
                stranger = way_rules.judge_greeting(str(endpoint), greeting)
                if stranger is not None:
                    raise self._end(stranger)
                return endpoint
        raise self._end(way_rules.judge_connect(attempts, self.timeout))

    async def _discover(self, host: ControlHost, address: str) -> PeerId:
        begin = time.monotonic()
        try:
            peer_id = await host.discover(address, self.timeout)
        except LinkError as error:
            elapsed = time.monotonic() - begin
            raise self._end(
                way_rules.judge_no_noise(address, str(error), elapsed, self.timeout)
            ) from None
        seconds = way_rules.format_seconds(time.monotonic() - begin)
        self.report(fine("noise", f"encrypted and authenticated in {seconds}"))
        return peer_id

    async def _be_admitted(self, host: ControlHost, peer_id: PeerId, address: str) -> PeerRecord:
        begin = time.monotonic()
        try:
            await host.ask(peer_id, [address], ControlKind.PING, Ping(0, []), self.timeout)
            if self.way.ring.of_user:
                found = map(self.way.ring.find, host.connections.key_ids(peer_id))
                self.ring = KeyRing([key for key in found if key is not None][:1])
            key = "without a key" if self.way.ring.of_user else "with the cluster's key"
            self.report(fine("admission", f"{key}, cluster {self.way.cluster}"))
            round_trips = []
            for _ in range(PINGS):
                begin = time.monotonic()
                await host.ask(peer_id, [address], ControlKind.PING, Ping(0, []), self.timeout)
                round_trips.append(time.monotonic() - begin)
            begin = time.monotonic()
            request = Exchange(b"", 0, b"", [])
            reply = await host.ask(peer_id, [address], ControlKind.EXCHANGE, request, self.timeout)
        except LinkError as error:
            raise self._end(
                way_rules.judge_no_admission(
                    str(error),
                    error.code,
                    time.monotonic() - begin,
                    self.timeout,
                    keyless=self.way.ring.of_user,
                    cluster=self.way.cluster,
                )
            ) from None
        try:
            record, members = _own_record(peer_id, reply)
        except ProtocolError as error:
            raise self._end(
                broken("peer", "", str(error), "look at its log; its version may be too new")
            ) from None
        protocols = MIN_DATA_VERSION, MAX_DATA_VERSION
        self.report(way_rules.judge_who(record, members, p2pstore.__version__, protocols))
        self.report(way_rules.judge_round_trip("control round trip", round_trips))
        return record

    async def _examine_data(self, record: PeerRecord) -> None:
        same_host = record.host_id == host_identity()
        issuer = TicketIssuer(self.identity, self.ring)
        shares = 2 * len(record.data) + (1 if same_host else 0) + 1
        share_seconds = self.way.measure_seconds / max(1, shares)
        for address in record.data[:MAX_ADDRESSES]:
            await examine_data_address(
                address,
                record.peer_id,
                issuer.ticket(record.peer_id, Scope.READ | Scope.PEER),
                share_seconds,
                self.timeout,
                self.report,
                same_host=same_host,
            )
        if same_host:
            await examine_shared_memory(
                record.socket, record.peer_id, share_seconds, self.timeout, self.report
            )
        else:
            self.report(skipped("shm", "the peer is on another machine"))
        await examine_rdma(
            record, issuer.ticket(record.peer_id, Scope.READ | Scope.PEER), share_seconds, self.report
        )


def _own_record(peer_id: PeerId, reply: Message) -> tuple[PeerRecord, int]:
    """The peer's own record, its signature checked, and how many members it knows."""
    if not isinstance(reply, ExchangeReply):
        raise ProtocolError("the peer answered an exchange with something else")
    verifier = Ed25519Verifier()
    for signed in reply.delta.records:
        with suppress(P2PStoreError):  # of a newer format, perhaps
            record = open_peer_record(signed, verifier)
            if record.peer_id == peer_id:
                return record, len(reply.delta.records)
    raise ProtocolError("the peer did not send its own record")


async def _greeting(sock: socket.socket) -> bytes | None:
    """The other side's first bytes; None for silence of a quarter of a second."""
    with trio.move_on_after(way_rules.GREETING_SECONDS):
        await trio.lowlevel.wait_readable(sock)
        try:
            return sock.recv(len(way_rules.GREETING))
        except OSError:
            return b""
    return None


def path_mtu(sock: socket.socket) -> tuple[int, int]:
    """(largest packet of the route, TCP segment) of a connection, in bytes."""
    is_v6 = sock.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if is_v6 else (socket.IPPROTO_IP, IP_MTU)
    mtu = sock.getsockopt(level, option)
    return mtu, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
