"""Holders that failed: avoided for a while, hidden where stale, asked to check where their bytes were wrong. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.core_effects import AskPeer, KnownCopy, PullFailure, Reply
from p2pstore.gossip.records import Member, PeerId, member_of
from p2pstore.transfer.data_messages import DataKind, Objects, ObjectStatus
from p2pstore.transfer.peer_messages import CheckCopy
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

DOUBT_SECONDS: Final = 10.0
"""A holder is told at most once in this time that its copy of an object seems spoilt; also the time it has to check."""
MAX_DOUBTED: Final = 1024
AVOID_SECONDS: Final = 3.0
"""A peer whose connection failed is asked last for this long."""
LONGEST_AVOID_SECONDS: Final = 60.0
"""Upper bound for a holder that is too slow repeatedly, each time avoided twice as long."""


class Holders:
    """A memory of the peers that did not deliver."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._gossip = core.gossip
        self._avoid_until: dict[Member, float] = {}
        self._slow: dict[Member, tuple[float, float]] = {}
        """Holders that were too slow: until when each is avoided, and for how long that is."""
        self._doubted: dict[tuple[Member, bytes], float] = {}
        """Copies of others that a reader found spoilt: when their holders may be told again."""

    def forget_old(self, now: float) -> None:
        """Forget holders that are not avoided any more."""
        self._avoid_until = {m: until for m, until in self._avoid_until.items() if until > now}
        forgotten = now - LONGEST_AVOID_SECONDS
        self._slow = {m: slow for m, slow in self._slow.items() if slow[0] > forgotten}

    def is_avoided(self, member: Member, now: float) -> bool:
        """Whether a connection to the member failed a moment ago."""
        return self._avoid_until.get(member, 0.0) > now

    def peer_failed(self, peer_id: PeerId, now: float) -> None:
        """A connection to the peer failed or it did not answer: avoid it for a while, and probe it."""
        self._avoid_until[member_of(peer_id)] = now + AVOID_SECONDS
        for effect in self._gossip.connection_lost(peer_id, now):
            self._core.emit(effect)

    def failed(self, digest: bytes, failure: PullFailure, now: float) -> None:
        """A holder did not deliver. The position of its log in the failure hides the stale location until this peer has
        caught up with it."""
        self._core.counters["holder_failures"] += 1
        self._core.counters["holders_too_slow"] += failure.code == Code.DEADLINE_EXCEEDED
        state = self._gossip.membership.resolve(failure.member)
        if failure.code == Code.NO_SUCH_KEY:
            self._gossip.locations.mark_stale(
                failure.member, digest, failure.incarnation, failure.sequence
            )
        elif failure.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) and state is not None:
            self.peer_failed(state.peer_id, now)
            if failure.code == Code.DEADLINE_EXCEEDED:
                self._avoid_slow(failure.member, now)
        elif failure.code in (Code.STALE, Code.MALFORMED):
            self._doubt(digest, failure.member, now)

    def _avoid_slow(self, member: Member, now: float) -> None:
        """A holder was too slow. Reads that were made side by side count once."""
        until, seconds = self._slow.get(member, (0.0, 0.0))
        if until <= now:
            seconds = min(max(AVOID_SECONDS, 2 * seconds), LONGEST_AVOID_SECONDS)
            until = now + seconds
            self._slow[member] = until, seconds
        self._avoid_until[member] = max(self._avoid_until[member], until)

    def _doubt(self, digest: bytes, member: Member, now: float) -> None:
        """Bytes from a holder did not match their checksums: have the holder compare its own."""
        state = self._gossip.membership.resolve(member)
        if member == self._core.member:
            self._core.operations.start(CheckOperation(self._core, digest, again=True), now)
            return
        if state is None or self._doubted.get((member, digest), 0.0) > now:
            return
        if len(self._doubted) >= MAX_DOUBTED:
            self._doubted = {each: at for each, at in self._doubted.items() if at > now}
        if len(self._doubted) < MAX_DOUBTED:
            self._doubted[member, digest] = now + DOUBT_SECONDS
            request = CheckCopy(digest, again=True)
            kind, seconds = DataKind.CHECK_COPY, DOUBT_SECONDS
            self._core.emit(AskPeer(0, 0, state.peer_id, kind, request, seconds))

    def silent(self, digest: bytes, copy: KnownCopy, reply: Reply, now: float) -> None:
        """A holder that was asked for a slot did not give it."""
        code, incarnation, sequence = int(Code.UNAVAILABLE), 0, 0
        if (
            isinstance(reply, Objects)
            and reply.items
            and reply.items[0].status == ObjectStatus.NOT_FOUND
        ):
            code, incarnation, sequence = (
                int(Code.NO_SUCH_KEY),
                reply.items[0].incarnation,
                reply.items[0].sequence,
            )
        self.failed(digest, PullFailure(copy.member, code, "", incarnation, sequence), now)
