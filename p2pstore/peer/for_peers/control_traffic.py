"""Control traffic: gossip's requests to other peers, theirs to this one, and finding the first peer. Shell."""

from __future__ import annotations

import logging
from random import Random
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.errors import (
    AuthenticationFailed,
    DuplicateIdentity,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
)
from p2pstore.gossip.gossip_messages import Ack, Answer, Ask, Contact, ControlKind, Later
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.peer.lifetime.joining import MAX_REPORTED, Joining
from p2pstore.wire import Code, Failure, Message, error_of

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

ADMISSION_CODES: Final = (Code.AUTHENTICATION_FAILED, Code.WRONG_CLUSTER, Code.PROTOCOL_MISMATCH)
GRACE_SECONDS: Final = 1.0
"""The answer itself is due within the named time; this much more may pass until this process comes to it."""


class LaterReplies:
    """Brings `Later` and `Answer` of the gossip machine together."""

    def __init__(self) -> None:
        self._waiting: dict[int, trio.Event] = {}
        self._replies: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, later: Later) -> Message:
        """The reply that `give` brings, a `Failure` when it does not come in time."""
        event = self._waiting[later.token] = trio.Event()
        try:
            with trio.move_on_after(later.timeout_seconds + GRACE_SECONDS):
                await event.wait()
        finally:
            del self._waiting[later.token]
            reply = self._replies.pop(later.token, None)
        if reply is None:
            return Failure(int(Code.DEADLINE_EXCEEDED), "the other peer was not asked in time")
        return reply

    def give(self, answer: Answer) -> None:
        """Deliver the reply; dropped when its waiter has gone."""
        event = self._waiting.get(answer.token)
        if event is not None:
            self._replies[answer.token] = answer.reply
            event.set()


class ControlTraffic:
    """Control traffic of one peer, over `node.host`."""

    def __init__(self, node: Node, rng: Random) -> None:
        self._node = node
        self._core = node.core
        self.contacted = trio.Event()
        """Another peer has answered."""
        self.settled = trio.Event()
        """Joined, or no peer is there to join."""
        self.joining = Joining(
            node.core.gossip,
            node.config.bootstrap,
            process=node.process,
            now=lambda: node.now,
            rng=rng,
            settled=self.settled,
            on_twin=self._met_twin,
            on_refused=self._join_refused,
        )
        self.later_replies = LaterReplies()
        self._refused_by: set[PeerId] = set()
        self._kept_version = -1

    def keep_neighbours(self) -> None:
        """Have the host keep the connections of gossip's active view, and close others."""
        view = self._core.gossip.view
        if view.version != self._kept_version:
            self._kept_version = view.version
            self._node.host.keeper.keep(view.neighbours())

    async def ask(self, effect: Ask) -> None:
        reply: Message | None = None
        addresses = self._core.gossip.addresses.of(effect.peer_id)
        begin, is_first = self._node.now, False
        self._node.watch.measures.messages[_kind_name(effect.kind), "sent"] += 1
        try:
            reply = await self._node.host.ask(
                effect.peer_id, addresses, effect.kind, effect.request, effect.timeout_seconds
            )
        except LinkError as error:
            self._node.watch.measures.message_failures[_kind_name(effect.kind)] += 1
            if error.code in ADMISSION_CODES:
                self._refused(effect.peer_id, error)
            elif error.refused and error.code is not None and effect.kind == ControlKind.PING_REQUEST:
                reply = Failure(int(error.code), str(error))  # the helper is well
            logger.debug("control request to %s failed: %s", format_peer_id(effect.peer_id), error)
        else:
            is_first = not self.contacted.is_set()
            self.contacted.set()
            self.settled.set()
            if effect.kind == ControlKind.PING and isinstance(reply, Ack):
                self._node.watch.pinged(effect.peer_id, self._node.now - begin)
        try:
            for follow_up in self._core.gossip.answered(effect.token, reply, self._node.now):
                self._core.emit(follow_up)
        except ProtocolError as error:
            logger.warning("dropped what a peer sent: %s", error)
        self._node.process()
        if is_first:  # only now its name is known
            logger.info(
                "joined through %s",
                self._core.name_of(effect.peer_id),
                extra={"event": "joined", "peer_id": format_peer_id(effect.peer_id)},
            )

    async def serve(self, sender: PeerId, kind: int, request: Message) -> Message:
        """The control host's handler. Raises `StoreClosed` when this peer does not run any more."""
        self._received(kind)
        reply, effects = self._core.gossip.serve(sender, ControlKind(kind), request, self._node.now)
        for effect in effects:
            self._core.emit(effect)
        self._node.process()
        if isinstance(reply, Later):
            reply = await self.later_replies.wait(reply)
        return _checked(reply)

    async def serve_reader(self, sender: PeerId, kind: int, request: Message) -> Message:
        """The control host's handler for peers that may only read."""
        self._received(kind)
        reply = self._core.gossip.serve_reader(sender, ControlKind(kind), request, self._node.now)
        self._node.process()
        return _checked(reply)

    def _received(self, kind: int) -> None:
        if self._node.ended:
            raise StoreClosed("this peer has left")
        self._node.watch.measures.messages[_kind_name(kind), "received"] += 1

    def lost(self, peer_id: PeerId) -> None:
        """The control connection to a peer broke: readers turn to others at once; gossip finds out why."""
        self._core.holders.peer_failed(peer_id, self._node.now)
        self._node.process()

    async def contact(self, effect: Contact) -> None:
        await self.joining.contact(self._node.host, effect.addresses)

    def _refused(self, peer_id: PeerId, error: LinkError) -> None:
        """A peer does not admit this one. When that is all that the addresses which the user named lead to, this peer
        ends rather than serve a cluster of its own unnoticed (`_join_refused`)."""
        named = self.joining.refused(peer_id, error)
        if named or self._core.gossip.membership.get(peer_id) is not None:
            self._node.watch.measures.refused_by_members += 1
        if self._node.failure is None and peer_id not in self._refused_by:
            if len(self._refused_by) >= MAX_REPORTED:
                self._refused_by.clear()
            self._refused_by.add(peer_id)
            logger.warning(
                "refused by the peer at %s%s: %s; going on without it",
                ", ".join(self._core.gossip.addresses.of(peer_id)),
                "" if named else ", which was remembered from earlier",
                error,
                extra={"event": "refused", "peer_id": format_peer_id(peer_id)},
            )

    def _join_refused(self, address: str, error: LinkError) -> None:
        if not self.contacted.is_set():
            refused = error.code is not Code.PROTOCOL_MISMATCH
            kind = AuthenticationFailed if refused else ProtocolMismatch
            self._node.fail(kind(f"{address} refuses this peer: {error}"))

    def stranger_refused(self, address: str, reason: str) -> None:
        self._node.watch.measures.strangers_refused += 1

    def _met_twin(self, address: str) -> None:
        """Of two processes with one identity the newer one, which has not joined yet, ends."""
        error = duplicate_identity(f" at {address}")
        if self.settled.is_set():
            logger.error("%s: a newer process does", error, extra={"event": "twin"})
        else:
            self._node.fail(error)


_KIND_NAMES: Final = {int(kind): kind.name.lower() for kind in ControlKind}


def _checked(reply: Message) -> Message:
    if isinstance(reply, Failure):
        raise error_of(reply.code, reply.text, reply.detail)
    return reply


def _kind_name(kind: int) -> str:
    return _KIND_NAMES.get(kind, "unknown")


def duplicate_identity(where: str) -> DuplicateIdentity:
    """The error of the newer of two live peers with one identity."""
    return DuplicateIdentity(
        f"another live peer{where} uses this peer's identity: its state directory was copied. Give this "
        "peer a --state-dir (state_dir) of its own"
    )
