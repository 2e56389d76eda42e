"""Publishing what a client wrote."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.floors import WAIT_SECONDS, WAIT_STEP_SECONDS
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import KnownCopy, Operation, PutEnd
from p2pstore.core.puts.comparing import CHECK_TIMEOUT_SECONDS, CompareCopies, Likeness, is_described
from p2pstore.core.puts.lifetimes import MAX_TTL_MS
from p2pstore.errors import P2PStoreError, ProtocolError, Unavailable
from p2pstore.memory.entries import ObjectEntry, Written
from p2pstore.memory.segment_layout import SlotState, TrailerBody
from p2pstore.objects import Version, check_object_length, key_digest, root_checksum
from p2pstore.put_facts import PutFacts, PutStatus

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.ssd_tier.index import ColdEntry

MAX_REPLICAS: Final = 64


def trailer_of(facts: PutFacts, namespace: str, unix: float) -> TrailerBody:
    """The object's trailer when it is put at this wall-clock time."""
    return TrailerBody(
        namespace,
        facts.key,
        facts.sums,
        int((unix + facts.ttl_ms / 1000) * 1000) if facts.ttl_ms else 0,
        facts.replicas,
        facts.pin,
        facts.dtype,
        facts.shape,
    )


def check_put(*, length: int, replicas: int, pin: int, ttl_ms: int) -> None:
    """Raise `ValueError` or `ObjectTooLarge` for arguments that no put may have."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ValueError(f"replicas must be 1 to {MAX_REPLICAS}, not {replicas}")
    if pin not in (0, 1, 2) or not 0 <= ttl_ms <= MAX_TTL_MS:
        raise ValueError("pin or ttl out of range")
    if length < 0:
        raise ValueError(f"a value of {length:,} bytes")
    check_object_length(length)


class PutOperation(Operation):
    """Publish a reservation as an object, unless the key exists; then make the other copies. The result is a `PutEnd`;
    None when there is no reservation and the bytes are needed.

    A key held only elsewhere is compared by its holder's slot: with an equal root this copy is one more of the existing
    version; other bytes keep what exists."""

    def __init__(
        self,
        core: PeerCore,
        facts: PutFacts,
        *,
        session: Hashable,
        namespace: str,
        verified: bool = False,
    ) -> None:
        super().__init__(core)
        self.facts = facts
        self.digest = key_digest(facts.key, namespace)
        self._session = session
        """The reservation's."""
        self._named = namespace
        self._namespace = core.namespace_digest(namespace)
        self._verified = verified
        """Whether this peer itself has compared the bytes with the sums."""
        self._nobody_known = False
        """Whether no copy is known anywhere: true for the step in which that was looked up."""
        self._end: PutEnd | None = None
        self._has_room = not facts.overwrite
        """Whether a floor may be written, for which an overwrite waits as a removal does."""
        self._give_up_at = math.inf

    def start(self, now: float) -> None:
        facts = self.facts
        if root_checksum(facts.length, facts.sums) != facts.root:
            self._give_up(ProtocolError("the chunk sums of a put do not give its root checksum"), now)
            return
        self._give_up_at = now + WAIT_SECONDS
        self._decide(now)

    def wake(self, now: float) -> None:
        self._decide(now)

    def _decide(self, now: float) -> None:
        """Decide by the object that this key has here. Cases:

        1. An object in memory that was put on trust is compared with its checksums first, and gone if it is spoilt.
        2. An object in memory that is the same, or is not to be overwritten, is kept.
        3. So is one on the SSD.
        4. Without the value's bytes nothing else can be done: the result is None.
        5. To be above all there is, the put asks what there is elsewhere; or looks at what it knows.
        """
        facts = self.facts
        if not self._may_write(now) or self._waits_for_room(now):
            return
        existing = self.core.objects.find(self.digest, now)
        cold = self.core.cold.find(self.digest, now) if existing is None else None
        if existing is not None and (self._is_same(existing) or not facts.overwrite):
            if existing.verified:
                self._keep(existing, now)
            else:
                self.run(CheckOperation(self.core, self.digest), self._decide_anew, now)
        elif cold is not None and (self._is_same(cold) or not facts.overwrite):
            self._keep_cold(cold, now)
        elif not facts.reservation:
            self.finish(None, now)
        elif facts.overwrite or not self.core.gossip.partitions.knows_all:
            # Above what there is, also where clocks differ; and where this peer does not know what there is. A home
            # that denies it makes the put a newer version, which the holders hear of.
            lookup = LookupOperation(self.core, [self.digest], believed=1)
            self.run(lookup, lambda _, at: self._compare_known(at), now)
        else:
            self._compare_known(now)

    def _decide_anew(self, result: Any, now: float) -> None:
        self._decide(now)

    def _waits_for_room(self, now: float) -> bool:
        """Whether an overwrite has to wait for room among the floors, or is over as it waited for long enough."""
        self.wake_at = math.inf
        if self._has_room or self.core.floor_budget.may_write(1, now):
            self._has_room = True
        elif now >= self._give_up_at:
            self._give_up(self.core.floor_budget.no_room(), now)
        else:
            self.set_alarm(now + WAIT_STEP_SECONDS)
        return not self._has_room

    def _may_write(self, now: float) -> bool:
        """Whether others take what this peer writes now; if not, the put is over."""
        try:
            self.core.timekeeping.check_key(self.digest, self._namespace, now)
        except Unavailable as error:
            self._give_up(error, now)
            return False
        return True

    @property
    def kept(self) -> bool:
        """Whether the key has these bytes now."""
        end = self.result
        return isinstance(end, PutEnd) and end.status is not PutStatus.KEPT_EXISTING

    def _compare_known(self, now: float) -> None:
        """Ask up to three holders what they have; to overwrite, one that has the newest version."""
        known = self.core.copies.known(self.digest, now, self._namespace)
        asked = known[:1] if self.facts.overwrite else known
        copies = [copy for copy in asked if copy.reachable and not copy.local][:3]
        self._nobody_known = not known
        if not copies:
            self._create(now)
            return
        self.run(CompareCopies(self, self._namespace, copies), self._compared, now)

    def _compared(self, found: Any, now: float) -> None:
        """The end of the comparison: None when no copy stands in the way of the put."""
        if isinstance(found, Exception):
            self._give_up(found, now)
        elif found is None:
            self._create(now)
        elif found.likeness is Likeness.OTHER:
            self._give_room_back()
            self.finish(self._found(PutStatus.KEPT_EXISTING, found.version, now), now)
        elif found.likeness is Likeness.BYTES:
            self._bring(found.copy, now)
        else:
            soft = not self.facts.pin  # an object pinned here is kept here
            expires = found.expires_unix_ms  # the same object ends at the same time everywhere
            self._commit(found.version, PutStatus.UNCHANGED, soft=soft, now=now, expires_unix_ms=expires)

    def _bring(self, source: KnownCopy | None, now: float) -> None:
        """Another copy has the put's bytes, and its dtype, shape or end are to be those of this one: bring it here from
        that holder, or (None) from this peer's SSD, and decide anew."""
        fetch = FetchOperation(
            self.core,
            self.digest,
            soft=not self.facts.pin,
            progress_seconds=CHECK_TIMEOUT_SECONDS,
            source=source,
            only_here=source is None,
        )
        self.run(fetch, self._brought, now)

    def _brought(self, result: Any, now: float) -> None:
        """The object of this key is in memory, or cannot be read; the latter is no reason to refuse a put."""
        if not isinstance(result, Exception) and self.core.objects.find(self.digest, now) is not None:
            self._decide(now)
        elif not self.facts.reservation:
            self.finish(None, now)
        else:
            self._create(now)

    def _is_same(self, existing: ObjectEntry | ColdEntry) -> bool:
        """Whether it is the put's value. A tensor has its dtype and shape, too; the SSD's index does not know those."""
        facts = self.facts
        if isinstance(existing, ObjectEntry) and not is_described(existing, facts):
            return False
        return existing.version.root == facts.root and existing.length == facts.length

    def _keep_cold(self, cold: ColdEntry, now: float) -> None:
        """The object is on the SSD alone. The same bytes bring it back to memory."""
        same, facts = self._is_same(cold), self.facts
        if same and (facts.dtype or (cold.described and facts.reservation)):
            self._bring(None, now)
            return
        if same and not facts.reservation and (facts.pin or facts.ttl_ms or facts.replicas > 1):
            self.finish(None, now)  # that is for an object in memory: the bytes are needed
            return
        if same and facts.reservation:
            expires, soft = cold.expires_unix_ms, cold.soft and not facts.pin
            self._commit(cold.version, PutStatus.UNCHANGED, soft=soft, now=now, expires_unix_ms=expires)
            return
        self._give_room_back()
        status = PutStatus.UNCHANGED if same else PutStatus.KEPT_EXISTING
        self.finish(self._found(status, cold.version, now), now)

    def _keep(self, existing: ObjectEntry, now: float) -> None:
        self._give_room_back()
        same = self._is_same(existing)
        status = PutStatus.UNCHANGED if same else PutStatus.KEPT_EXISTING
        self._end = self._found(status, existing.version, now)
        if same:
            self.core.objects.strengthen(existing, self.facts.pin, self.facts.replicas, now)
            self._expire_anew(existing, now)
        else:
            self.finish(self._end, now)

    def _found(self, status: PutStatus, version: Version, now: float) -> PutEnd:
        """The end of a put of a key that exists, with the copies that are known of that version."""
        wanted = (version.clock, version.writer)
        copies = sum(
            copy.reachable and (copy.record.version.clock, copy.record.version.writer) == wanted
            for copy in self.core.copies.known(self.digest, now, self._namespace)
        )
        return PutEnd(status, max(1, copies), self.facts.replicas, version)

    def _create(self, now: float) -> None:
        if not self._may_write(now):  # by now more may be known of the key, and of the clock
            return
        if not self.facts.overwrite and self.core.objects.find(self.digest, now) is not None:
            self._decide(now)  # another put of the key was here first
            return
        if self.facts.overwrite:
            for copy in self.core.copies.known(self.digest, now, self._namespace):
                self.core.clock.observe(copy.record.version.clock, self.core.believed_unix(now))
        version = self.core.new_version(self.facts.root, now)
        self._commit(version, PutStatus.CREATED, soft=False, now=now)

    def _commit(
        self,
        version: Version,
        status: PutStatus,
        *,
        soft: bool,
        now: float,
        expires_unix_ms: int | None = None,
    ) -> None:
        """Publish what was written, as that version; it expires as the put said, or else as given."""
        facts = self.facts
        trailer = trailer_of(facts, self._named, self.core.unix(now))
        if expires_unix_ms is not None and not facts.ttl_ms:
            trailer = msgspec.structs.replace(trailer, expires_unix_ms=expires_unix_ms)
        try:
            entry = self.core.objects.publish(
                Written(facts.reservation, self.digest, version, trailer, facts.length, facts.follows),
                session=self._session,
                soft=soft,
                now=now,
            )
        except (P2PStoreError, ValueError) as error:
            self._give_up(error, now)
            return
        if facts.overwrite:
            below = Version(version.clock - 1, 0xFFFF)
            self.core.floors.write(self.digest, below, now, namespace=self._namespace)
        if not self._nobody_known:  # a newer version may be known by now
            self.core.gossip.directory.watched.touch(self.digest)
        entry.verified |= self._verified and entry.version == version
        if status is PutStatus.UNCHANGED:
            self._end = self._found(status, version, now)
            self._expire_anew(entry, now)
        else:
            self._end = PutEnd(status, 1, facts.replicas, version)
            self._replicate(entry, now)

    def _expire_anew(self, entry: ObjectEntry, now: float) -> None:
        """The object was there before: the put's time to live, where it has one, replaces that of all its copies."""
        facts = self.facts
        if not facts.ttl_ms:
            self._replicate(entry, now)
            return
        expires_unix_ms = trailer_of(facts, self._named, self.core.unix(now)).expires_unix_ms
        self.core.expiries.change(
            self.digest, entry.version, expires_unix_ms, now, lambda later: self._replicate(entry, later)
        )

    def _replicate(self, entry: ObjectEntry, now: float) -> None:
        if self.done:
            return
        if self.facts.replicas <= 1 or entry.state is not SlotState.LIVE:
            self.finish(self._end, now)
            return
        replicate = ReplicateOperation(self.core, entry, self.facts.replicas)
        self.core.operations.start(
            replicate, now, self._replicated
        )  # it goes on when the put is cancelled

    def _replicated(self, copies: Any, now: float) -> None:
        assert self._end is not None
        count = copies if isinstance(copies, int) else 1
        if count < self.facts.replicas:
            self.core.repair.fell_short(count, now)
        self.finish(PutEnd(self._end.status, count, self._end.wanted, self._end.version), now)

    def _give_room_back(self) -> None:
        if not self.facts.reservation:
            return
        with suppress(ValueError):  # its session may have ended meanwhile, and taken it along
            self.core.segment.abort(self.facts.reservation, session=self._session)

    def _give_up(self, error: Exception, now: float) -> None:
        self._give_room_back()
        self.finish(error, now)

    def cancel(self, now: float) -> None:
        """A put that was published stays; one that was not leaves nothing."""
        if not self.done and self._end is None:
            self._give_room_back()
        super().cancel(now)
