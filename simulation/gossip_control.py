"""Control messages of a simulated peer: questions, answers and contacts, with what they cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import REPLIES, REQUESTS, Answer, Ask, Contact, ControlKind, Later
from p2pstore.wire import HEADER_BYTES, Failure, Message, decode_body, encode_body
from simulation.gossip_data import first_outcome
from simulation.gossip_network import CONNECTION_ROUND_TRIPS, CONNECTION_SECONDS, MESSAGE_SECONDS

if TYPE_CHECKING:
    from simulation.gossip_peer import GossipPeer

CONTACT_TIMEOUT_SECONDS: Final = 5.0


class ControlTalk:
    """What one process asks and answers. It ends with its process."""

    def __init__(self, peer: GossipPeer) -> None:
        self._peer = peer
        self._cluster = peer.cluster
        self._life = peer.life
        self._open: set[int] = set()
        self._expired: deque[int] = deque()
        self._later: dict[int, tuple[ControlTalk, Ask]] = {}

    # --- asking ------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Send a question. A silent target is as one that does not exist."""
        peer, kernel = self._peer, self._cluster.kernel
        self._open.add(ask.token)
        kernel.after(ask.timeout_seconds / peer.clock_rate, partial(self._run_out, ask.token))
        target = self._cluster.by_peer_id.get(ask.peer_id)
        if target is None:
            return  # an invented peer: no answer
        request = self._cluster.tamper(peer, target, ask.request)
        if request is None:
            return
        body = encode_body(request)
        leaves_at = self._dial(target)
        peer.traffic.count_out(ask.kind, len(body))
        arrives = partial(self._request_arrives, target, ask, body)
        self._send(peer, target, ask.kind, len(body), leaves_at, arrives)

    def _run_out(self, token: int) -> None:
        if self._life == self._peer.life and token in self._open:
            self._expired.append(token)
            self._peer.wake()

    @property
    def any_expired(self) -> bool:
        return bool(self._expired)

    def fail_expired(self) -> None:
        for _ in range(len(self._expired)):
            self._finish(self._expired.popleft(), None)

    def _finish(self, token: int, reply: Message | None) -> None:
        if token not in self._open:
            return
        self._open.discard(token)
        peer = self._peer
        try:
            effects = peer.gossip.answered(token, reply, peer.now)
        except ProtocolError as error:
            self._cluster.problem(f"peer {peer.number} refuses a reply: {error}")
            return
        peer.carry_out(effects)

    def _dial(self, target: GossipPeer) -> float:
        """Use the connection to a host, or open one. When a message may leave."""
        network = self._cluster.network
        leaves_at = self._peer.charge(MESSAGE_SECONDS)
        if network.use_connection(self._peer.number, target.number):
            leaves_at = self._peer.charge(CONNECTION_SECONDS)
            target.charge(CONNECTION_SECONDS)
            leaves_at += 2 * CONNECTION_ROUND_TRIPS * network.latency()
        return leaves_at

    # --- answering ---------------------------------------------------------------------------

    def _request_arrives(self, target: GossipPeer, ask: Ask, body: bytes) -> None:
        if target.running:
            target.arrive(target.life, partial(target.control.serve, self, ask, body))
        elif not target.silent:
            # Its kernel refuses: the asker knows at once.
            self._cluster.network.disconnect(self._peer.number, target.number)
            arrives = partial(self._reply_arrives, ask.token, 0, None)
            self._send(target, self._peer, ask.kind, 0, self._cluster.kernel.now, arrives)

    def serve(self, asker: ControlTalk, ask: Ask, body: bytes) -> None:
        peer = self._peer
        peer.charge(MESSAGE_SECONDS)
        peer.traffic.count_in(len(body))
        request = ask.request
        if self._cluster.decodes:
            request = decode_body(REQUESTS[ask.kind], body)
        try:
            reply, effects = peer.gossip.serve(asker._peer.peer_id, ask.kind, request, peer.now)
        except ProtocolError as error:
            self._cluster.problem(f"peer {peer.number} refuses a request: {error}")
            return
        if isinstance(reply, Later):
            self._later[reply.token] = (asker, ask)
        else:
            self._send_reply(asker, ask, reply)
        peer.carry_out(effects)

    def answer_later(self, answer: Answer) -> None:
        """The reply to a request that could not be answered at once."""
        asker, ask = self._later.pop(answer.token)
        self._send_reply(asker, ask, answer.reply)

    def _send_reply(self, asker: ControlTalk, ask: Ask, reply: Message) -> None:
        sent = self._cluster.tamper(self._peer, asker._peer, reply)
        if sent is None:
            return
        encoded = encode_body(sent)
        leaves_at = self._peer.charge(MESSAGE_SECONDS)
        self._peer.traffic.count_out(ask.kind, len(encoded))
        if self._cluster.decodes:
            kind = Failure if isinstance(reply, Failure) else REPLIES[ask.kind]
            sent = decode_body(kind, encoded)
        arrives = partial(asker._reply_arrives, ask.token, len(encoded), sent)
        self._send(self._peer, asker._peer, ask.kind, len(encoded), leaves_at, arrives)

    def _reply_arrives(self, token: int, body_bytes: int, reply: Message | None) -> None:
        self._peer.arrive(self._life, partial(self._take_reply, token, body_bytes, reply))

    def _take_reply(self, token: int, body_bytes: int, reply: Message | None) -> None:
        if token in self._open:  # else too late, or the second of its kind
            self._peer.charge(MESSAGE_SECONDS)
            self._peer.traffic.count_in(body_bytes)
            self._finish(token, reply)

    def _send(
        self,
        source: GossipPeer,
        target: GossipPeer,
        kind: int,
        body_bytes: int,
        leaves_at: float,
        arrives: partial[None],
    ) -> None:
        size_bytes = HEADER_BYTES + body_bytes
        network = self._cluster.network
        network.send(source.number, target.number, size_bytes, kind, leaves_at, arrives)

    # --- contacts ----------------------------------------------------------------------------

    def contact(self, contact: Contact) -> None:
        """Connect to who listens at one of these addresses."""
        by_address = self._cluster.by_address
        known = (by_address[each] for each in contact.addresses if each in by_address)
        target = next(known, None)
        comes = first_outcome(self._peer, partial(self._contacted, contact))
        if target is not None:
            leaves_at = self._dial(target)
            arrives = partial(self._contact_arrives, target, comes)
            self._send(self._peer, target, ControlKind.HELLO, 0, leaves_at, arrives)
        self._cluster.kernel.after(CONTACT_TIMEOUT_SECONDS, partial(comes, None))

    def _contact_arrives(self, target: GossipPeer, comes: Callable[[GossipPeer | None], None]) -> None:
        if target.running or not target.silent:
            arrives = partial(comes, target if target.running else None)
            now = self._cluster.kernel.now
            self._send(target, self._peer, ControlKind.HELLO, 0, now, arrives)

    def _contacted(self, contact: Contact, found: GossipPeer | None) -> None:
        gossip, now = self._peer.gossip, self._peer.now
        if found is None:
            gossip.contact_failed(contact.addresses, now)
        else:
            gossip.contacted(found.peer_id, contact.addresses, now)
