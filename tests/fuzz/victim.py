"""A real peer under fuzz, its honest neighbour, and what has to hold of it whatever strangers send."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import trio

from p2pstore import PeerConfig
from p2pstore.access.keyring import KeyRing
from p2pstore.gossip.exchange.exchanges import MAX_IN_FLIGHT_EXCHANGES
from p2pstore.gossip.exchange.message_budget import SharedBudget
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import PeerId
from p2pstore.peer import Peer, open_peer
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.wire import Message, encode_frame
from simulation.segment_checks import check_segment

OBJECTS: Final = 8
MAX_ASKED: Final = 4096
"""Requests of gossip that may be under way at once; far above what an honest cluster has."""
SECONDS: Final = 20.0
"""Within which everything that an honest peer asks must be answered, on a machine that is busy."""

SPOILT_BY_CLIENT: Final = "the bytes of %r are spoilt"
"""A client that may put writes the segment itself. What it commits without having written is found out."""


class Problem(Exception):
    """A failure that the fuzzer looks for; the text describes it."""


class _Listener(logging.Handler):
    """Whatever this project logs as an error is a bug: strangers' mistakes are warnings."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(SPOILT_BY_CLIENT):
            return
        if record.levelno >= logging.ERROR or record.exc_info:
            self.seen.append(logging.Formatter().format(record))


class Victim:
    """`peer` is attacked; `friend` is its neighbour; `mallory` is who attacks: a member of the cluster, with
    an identity and tickets, but no peer behind it."""

    def __init__(self, peer: Peer, friend: Peer, listener: _Listener) -> None:
        self.peer = peer
        self.friend = friend
        self.mallory = Identity(b"mallory!" * 4)
        self.ring = KeyRing()
        self.issuer = TicketIssuer(self.mallory, self.ring)
        self.values: dict[str, bytes] = {}
        self.requests: list[tuple[int, Message]] = []
        """Control requests as honest peers sent them."""
        self.replies: list[tuple[int, Message]] = []
        self._listener = listener
        self._recording = True
        self._checks = 0
        self._step = ""

    async def record(self) -> None:
        """Let the two work together and keep what they say on control streams."""
        for each, other in ((self.peer, self.friend), (self.friend, self.peer)):
            self._record_answers(each)
            await each.node.host.disconnect(other.node.core.peer_id)
        for number in range(OBJECTS):
            key, value = f"k{number}", Random(number).randbytes(5000 * number)
            self.values[key] = value
            holder = (self.peer, self.friend)[number % 2]
            await holder.put(key, value, pin="hard")  # a client may fill the memory
        with trio.fail_after(SECONDS):
            while len({kind for kind, _ in self.requests}) < 3 or len(self.requests) < 40:
                for each in (self.peer, self.friend):
                    await each.put("gone", os.urandom(100))
                    await each.remove("gone")
                await trio.sleep(0.02)
        self._recording = False

    def _record_answers(self, peer: Peer) -> None:
        host = peer.node.host
        serve = host.settings.handler

        async def answer(sender: PeerId, kind: int, request: Message) -> Message:
            reply = await serve(sender, kind, request)
            if self._recording:
                self.requests.append((kind, request))
                self.replies.append((kind, reply))
            return reply

        host.settings.handler = answer

    def frames(self, recorded: list[tuple[int, Message]], flags: int = 0) -> list[bytes]:
        """Recorded messages as frames."""
        return [
            encode_frame(kind, number + 1, message, flags=flags)
            for number, (kind, message) in enumerate(recorded)
        ]

    async def check(self) -> None:
        """The peer serves its clients and its neighbour, and ends all leases and operations. Raises
        `Problem`."""
        if self._listener.seen:
            raise Problem(f"an error in the log:\n{self._listener.seen[0]}")
        self._checks += 1
        core = self.peer.node.core
        self._step = ""
        try:
            with trio.fail_after(SECONDS):
                await self._serves()
                while core.operations_under_way or core.segment.leased_bytes:
                    under_way = [vars(each) for each in core.operations._running.values()]
                    self._step = f"leased {core.segment.leased_bytes}, under way {under_way}"
                    await trio.sleep(0.01)
        except trio.TooSlowError:
            raise Problem(f"the peer did not do its work within {SECONDS:g} s: {self._step}") from None
        if self.peer.node.failure is not None:
            raise Problem(f"the peer gave up: {self.peer.node.failure}")
        self._invariants()
        if self._listener.seen:
            raise Problem(f"an error in the log:\n{self._listener.seen[0]}")

    async def _serves(self) -> None:
        key = f"check/{self._checks}"
        value = os.urandom(100)
        self._step = "put"
        await self.peer.put(key, value)
        self._step = "get by the neighbour"
        if await self.friend.get(key, wait=SECONDS) != value:
            raise Problem("the neighbour read other bytes than were put")
        self._step = "remove"
        await self.friend.remove(key)
        for known, expected in self.values.items():
            self._step = f"get of {known}"
            if await self.friend.get(known, wait=SECONDS) != expected:
                raise Problem(f"the bytes of {known} have changed")

    def _invariants(self) -> None:
        core = self.peer.node.core
        gossip = core.gossip
        check_segment(core.segment)
        membership = gossip.membership
        if not membership.own.alive or gossip.leaving:
            raise Problem("somebody made the peer believe that it left")
        if len(list(membership.states())) > membership.config.max_members:
            raise Problem("more members than a cluster may have")
        if len(gossip.cluster_records) > gossip.cluster_records.floors.limit:
            raise Problem("more cluster records than are allowed")
        if len(gossip.questions) > MAX_ASKED + MAX_IN_FLIGHT_EXCHANGES:
            raise Problem(f"{len(gossip.questions)} requests of gossip are under way")
        checks = gossip.checks
        for state in membership.states():
            if state.signed is None or state is membership.own:
                continue
            record = state.record
            assert record is not None
            body = b"p2pstore peer record 1\0" + state.signed.body
            if not checks.verifier.verify(state.peer_id, body, state.signed.signature):
                raise Problem(f"a forged record of {record.name} was taken for true")


@asynccontextmanager
async def open_victim(folder: Path) -> AsyncIterator[Victim]:
    """A peer with a neighbour, both in this process, and the frames that they exchanged."""
    listener = _Listener()
    logger = logging.getLogger("p2pstore")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False

    def settings(name: str, *bootstrap: str) -> PeerConfig:
        return PeerConfig(
            name=name,
            memory="16MiB",
            listen="127.0.0.1:0",
            socket=str(folder / f"{name}.sock"),
            bootstrap=list(bootstrap),
            transport="tcp",
            state_dir=str(folder / name),
            insecure=True,
        )

    try:
        async with (
            open_peer(settings("victim")) as peer,
            open_peer(settings("friend", peer.control)) as friend,
        ):
            for each in (peer, friend):  # else most of what mallory sends would be refused unread
                each.node.core.gossip.questions.budget = SharedBudget(1e9, 1e9)
            victim = Victim(peer, friend, listener)
            with trio.fail_after(SECONDS):
                while not peer.node.core.live_peers():
                    await trio.sleep(0.01)
            await victim.record()
            yield victim
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate
