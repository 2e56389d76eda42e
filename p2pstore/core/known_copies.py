"""The copies of a key that this peer knows of, its own and those it heard of; and holders that fail. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.copies.proofs import ProveOperation
from p2pstore.core.gets.lookup import check_holding_record
from p2pstore.core.operation import AskPeer, KnownCopy, Reply
from p2pstore.core.own_objects import location_of
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import (
    LocationRecord,
    Member,
    PeerId,
    decode_location,
    member_of,
    writer_of_member,
)
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.transfer.data_messages import DataKind, Objects, ObjectStatus
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import CheckCopy, Locations
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


class KnownCopies:
    """Which copies there are, which of them are proved, and which other versions exist."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._gossip = core.gossip
        self._segment = core.segment

    def known(self, digest: bytes, now: float, namespace: bytes | None = None) -> list[KnownCopy]:
        """All copies this peer knows of, newest version first, then reachable ones first,
        and those whose connection just failed last.

        Versions that a floor forbids (the floor of the namespace, too, when its digest is given) are left
        out, those whose holder may have missed a floor, and those from over 10 s in the future: this peer
        could write none above them that others would take. And those of which nothing says that they were written:
        see `proofs`.
        """
        return self.sorted(digest, now, namespace)[0]

    def sorted(
        self, digest: bytes, now: float, namespace: bytes | None = None, *, hearsay: bool = False
    ) -> tuple[list[KnownCopy], list[KnownCopy]]:
        """`known`, and the copies that their holders have to prove. Records that contradict a writer are in neither.
        With `hearsay` also copies of which only a home spoke: to look there, not to judge what is kept."""
        copies: list[KnownCopy] = []
        others: list[KnownCopy] = []
        vouched: set[Version] = set()
        """Versions whose writers say themselves that they have this root."""
        mine = self.own_location(digest, now)
        if mine is not None:
            copies.append(
                KnownCopy(self._core.member, self._core.peer_id, mine, reachable=True, local=True)
            )
            vouched.add(mine.version)
        for holding, state in self.believed(digest, now, namespace, hearsay=hearsay):
            version, member = holding.record.version, holding.member
            reachable = state.alive and not holding.hidden
            proved = not holding.hearsay or self._core.proofs.knows(digest, version)
            copy = KnownCopy(
                member, state.peer_id, holding.record, reachable, proved=proved, hearsay=holding.hearsay
            )
            if version.writer != writer_of_member(member):
                others.append(copy)
                continue
            copies.append(copy)
            if proved:
                vouched.add(version)
        doubtful = self._proved_among(digest, others, vouched, copies) if others else []
        said = {copy.member for copy in copies if not copy.hearsay}
        copies = [copy for copy in copies if not copy.hearsay or copy.member not in said]
        copies.sort(
            key=lambda copy: (
                -copy.record.version.clock,
                -copy.record.version.writer,
                not copy.local,
                not copy.reachable,
                self._core.holders.is_avoided(copy.member, now),
            )
        )
        return copies, doubtful

    def believed(
        self, digest: bytes, now: float, namespace: bytes | None = None, *, hearsay: bool = False
    ) -> Iterator[tuple[Location, MemberState]]:
        """The locations at other members of versions that no floor forbids, whose holder has not missed a floor, and
        that are not from the future."""
        gossip, floors = self._gossip, self._gossip.cluster_records.floors
        for location in gossip.directory.holders(digest, hearsay=hearsay):
            version, state = location.record.version, gossip.membership.resolve(location.member)
            if (
                state is not None
                and not floors.forbids(digest, namespace, version)
                and not gossip.doubts(location.member, version, now)
                and self._core.is_in_time(version.clock, now)
            ):
                yield location, state

    def _proved_among(
        self, digest: bytes, others: Sequence[KnownCopy], vouched: set[Version], copies: list[KnownCopy]
    ) -> list[KnownCopy]:
        """Add proved copies that others than their holders wrote; return the rest that contradicts no writer."""
        doubtful = []
        stamps = {version[:2] for version in vouched}
        for copy in others:
            version = copy.record.version
            if version in vouched or self._core.proofs.knows(digest, version):
                copies.append(replace(copy, proved=True))
            elif version[:2] in stamps:
                self._core.proofs.contradicts(copy)
            else:
                doubtful.append(copy)
        return doubtful

    def learn_locations(
        self, home: PeerId, digests: Sequence[bytes], reply: Locations, now: float
    ) -> None:
        """Take in a home peer's answer to a LOOKUP of `digests`."""
        for digest, holdings in zip(digests, reply.items, strict=False):
            for holding in holdings[:64]:
                if holding.member != self._core.member and check_holding_record(holding.record, digest):
                    self._gossip.heard_of(holding.record, now)
                    hearsay = holding.member != member_of(home)
                    stamp = decode_location(holding.record).version.clock
                    if not hearsay or self._core.is_in_time(stamp, now):
                        place = holding.incarnation, [holding.sequence]
                        self._gossip.directory.heard(
                            holding.member, *place, holding.record, now, hearsay=hearsay
                        )

    def versions_heard_of(
        self, digest: bytes, namespace: bytes, now: float, others: Sequence[Version]
    ) -> list[Version]:
        """Versions that members say to hold, believed or not, and `others`, that no floor forbids."""
        forbids = self._gossip.cluster_records.floors.forbids
        versions = [each.record.version for each in self._gossip.directory.holders(digest, hearsay=True)]
        return [
            version
            for version in (*versions, *others)
            if self._core.is_in_time(version.clock, now) and not forbids(digest, namespace, version)
        ]

    def held_back(self, digest: bytes) -> Version | None:
        """The version of an object of an earlier life that is not published yet, as its bytes are unchecked."""
        entry = self._segment.returned.find(digest)
        cold = self._core.cold.stored(digest)
        versions = [each.version for each in (entry, cold) if each is not None]
        return max(versions, default=None)

    def own_location(self, digest: bytes, now: float) -> LocationRecord | None:
        """The location record of an object that this peer serves, from memory or from its SSD."""
        held = self._core.objects.find(digest, now) or self._core.cold.find(digest, now)
        return None if held is None else location_of(held)

    def of_other_versions(self, digests: Sequence[bytes], now: float) -> list[bytes]:
        """Those but for what is here, and known in the very version that this peer has: as nearly all are."""
        here: dict[bytes, Version] = {}
        for digest in digests:
            entry = self._core.objects.find(digest, now)
            if entry is not None:
                here[digest] = entry.version
        if not here:
            return list(digests)
        same = here.keys() - self._gossip.directory.of_other_versions(here)
        return [digest for digest in digests if digest not in same]

    def prove_newer(
        self, copies: Sequence[KnownCopy], doubtful: Sequence[KnownCopy], now: float
    ) -> None:
        """Ask for proofs of copies announced as newer than the proved ones: the own copy goes only after a proof."""
        sure = max((copy.record.version for copy in copies if copy.proved), default=ZERO_VERSION)
        newer = [
            copy
            for copy in (*copies, *doubtful)
            if not (copy.proved and copy in copies)
            and copy.reachable
            and copy.record.version[:2] > sure[:2]
        ]
        may_be_asked = [copy for copy in newer if self._core.proofs.may_ask(copy, now)]
        if may_be_asked and self._core.proofs.begin_asking(newer[0].record.digest):
            self._core.operations.start(ProveOperation(self._core, may_be_asked), now)
        elif newer and not may_be_asked:
            self._core.proofs.look_later(newer[0].record.digest, now)


DOUBT_SECONDS: Final = 10.0
"""A holder is told at most once in this time that its copy of an object seems spoilt; also the time it has to check."""
MAX_DOUBTED: Final = 1024
AVOID_SECONDS: Final = 3.0
"""A peer whose connection failed is asked last for this long."""
MAX_AVOID_SECONDS: Final = 60.0
"""Upper bound for a holder that is too slow repeatedly, each time avoided twice as long."""


class Holders:
    """Holders that did not deliver: avoided for a while, hidden where stale, asked to check where bytes were wrong."""

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
        forgotten = now - MAX_AVOID_SECONDS
        self._slow = {m: slow for m, slow in self._slow.items() if slow[0] > forgotten}

    def is_avoided(self, member: Member, now: float) -> bool:
        return self._avoid_until.get(member, 0.0) > now

    def peer_failed(self, peer_id: PeerId, now: float) -> None:
        """A connection to the peer failed or it did not answer: avoid it for a while, and probe it."""
        self._avoid_until[member_of(peer_id)] = now + AVOID_SECONDS
        for effect in self._gossip.connection_lost(peer_id, now):
            self._core.emit(effect)

    def failed(self, digest: bytes, failure: HolderReport, now: float) -> None:
        """A holder did not deliver. Its log's position hides the stale location until this peer caught up."""
        self._core.counters["holder_failures"] += 1
        self._core.counters["holders_too_slow"] += failure.code == Code.DEADLINE_EXCEEDED
        state = self._gossip.membership.resolve(failure.member)
        if failure.code == Code.NO_SUCH_KEY:
            self._gossip.directory.mark_stale(
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
            seconds = min(max(AVOID_SECONDS, 2 * seconds), MAX_AVOID_SECONDS)
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
            item, code = reply.items[0], int(Code.NO_SUCH_KEY)
            incarnation, sequence = item.incarnation, item.sequence
        self.failed(digest, HolderReport(copy.member, code, "", "", incarnation, sequence), now)
