"""Publishing what a client wrote."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.floors import WAIT_SECONDS, WAIT_STEP_SECONDS
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import KnownCopy, Operation, PutEnd
from p2pstore.core.puts.deciding import (
    CHECK_TIMEOUT_SECONDS,
    CompareCopies,
    Standing,
    Verdict,
    decide,
    in_memory,
    on_ssd,
)
from p2pstore.core.puts.publishing import trailer_of
from p2pstore.errors import P2PStoreError, ProtocolError, Unavailable
from p2pstore.memory.entries import ObjectEntry, Written
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import Version, root_checksum
from p2pstore.put_facts import PutFacts, PutStatus

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


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
        self.digest = facts.digest
        self._options = facts.options
        self._session = session
        """The reservation's."""
        self._named = namespace
        self._namespace = core.namespace_digest(namespace)
        self._verified = verified
        """Whether this peer itself has compared the bytes with the sums."""
        self._nobody_known = False
        """Whether no copy is known anywhere: true for the step in which that was looked up."""
        self._end: PutEnd | None = None
        self._has_room = not facts.options.overwrite
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
        """Decide by the object that this key has here, in memory or on the SSD. One in memory that was put on trust is
        compared with its checksums first, and gone if it is spoilt."""
        if not self._may_write(now) or self._waits_for_room(now):
            return
        standing = self._here(now)
        verdict = decide(self.facts, standing)
        if standing is None or verdict is Verdict.CREATE:
            self._look_elsewhere(now)
        elif standing.entry is not None and not standing.entry.verified:
            self.run(CheckOperation(self.core, self.digest), lambda _, at: self._decide(at), now)
        else:
            self._carry_out(verdict, standing, now)

    def _here(self, now: float) -> Standing | None:
        entry = self.core.objects.find(self.digest, now)
        if entry is not None:
            return in_memory(entry, self.facts)
        cold = self.core.cold.find(self.digest, now)
        return None if cold is None else on_ssd(cold, self.facts)

    def _look_elsewhere(self, now: float) -> None:
        """To be above all there is, the put asks what there is elsewhere; or looks at what it knows."""
        if not self.facts.reservation:
            self.finish(None, now)
        elif self._options.overwrite or not self.core.gossip.partitions.mode.knows_all:
            # Above what there is, also where clocks differ; and where this peer does not know what there is. A home
            # that denies it makes the put a newer version, which the holders hear of.
            lookup = LookupOperation(self.core, [self.digest], believed=1)
            self.run(lookup, lambda _, at: self._compare_known(at), now)
        else:
            self._compare_known(now)

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
        asked = known[:1] if self._options.overwrite else known
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
            return
        verdict = decide(self.facts, found)
        if verdict is Verdict.CREATE:
            self._create(now)
        else:
            self._carry_out(verdict, found, now)

    def _carry_out(self, verdict: Verdict, standing: Standing, now: float) -> None:
        """Do what the copy under this key asks for."""
        options = self._options
        match verdict:
            case Verdict.NEED_BYTES:
                self.finish(None, now)
            case Verdict.BRING:
                self._bring(standing.copy, now)
            case Verdict.JOIN:
                soft = standing.soft and not options.pin  # an object pinned here is kept here
                expires = standing.expires_unix_ms  # the same object ends at the same time everywhere
                self._commit(
                    standing.version, PutStatus.UNCHANGED, soft=soft, now=now, expires_unix_ms=expires
                )
            case _:
                self._give_room_back()
                kept = verdict is Verdict.KEEP
                status = PutStatus.UNCHANGED if kept else PutStatus.KEPT_EXISTING
                self._end = self._found(status, standing.version, now)
                if kept and standing.entry is not None:
                    self.core.objects.strengthen(standing.entry, options.pin, options.replicas, now)
                    self._expire_anew(standing.entry, now)
                else:
                    self.finish(self._end, now)

    def _bring(self, source: KnownCopy | None, now: float) -> None:
        """Another copy has the put's bytes, and its dtype, shape or end are to be those of this one: bring it here from
        that holder, or (None) from this peer's SSD, and decide anew."""
        fetch = FetchOperation(
            self.core,
            self.digest,
            soft=not self._options.pin,
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

    def _found(self, status: PutStatus, version: Version, now: float) -> PutEnd:
        """The end of a put of a key that exists, with the copies that are known of that version."""
        wanted = (version.clock, version.writer)
        copies = sum(
            copy.reachable and (copy.record.version.clock, copy.record.version.writer) == wanted
            for copy in self.core.copies.known(self.digest, now, self._namespace)
        )
        return PutEnd(status, max(1, copies), self._options.replicas, version)

    def _create(self, now: float) -> None:
        if not self._may_write(now):  # by now more may be known of the key, and of the clock
            return
        if not self._options.overwrite and self.core.objects.find(self.digest, now) is not None:
            self._decide(now)  # another put of the key was here first
            return
        if self._options.overwrite:
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
        if expires_unix_ms is not None and not self._options.ttl_ms:
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
        if self._options.overwrite:
            below = Version(version.clock - 1, 0xFFFF)
            self.core.floors.write(self.digest, below, now, namespace=self._namespace)
        if not self._nobody_known:  # a newer version may be known by now
            self.core.gossip.directory.watched.touch(self.digest)
        entry.verified |= self._verified and entry.version == version
        if status is PutStatus.UNCHANGED:
            self._end = self._found(status, version, now)
            self._expire_anew(entry, now)
        else:
            self._end = PutEnd(status, 1, self._options.replicas, version)
            self._replicate(entry, now)

    def _expire_anew(self, entry: ObjectEntry, now: float) -> None:
        """The object was there before: the put's time to live, where it has one, replaces that of all its copies."""
        if not self._options.ttl_ms:
            self._replicate(entry, now)
            return
        expires_unix_ms = trailer_of(self.facts, self._named, self.core.unix(now)).expires_unix_ms
        self.core.expiries.change(
            self.digest, entry.version, expires_unix_ms, now, lambda later: self._replicate(entry, later)
        )

    def _replicate(self, entry: ObjectEntry, now: float) -> None:
        if self.done:
            return
        if self._options.replicas <= 1 or entry.state is not SlotState.LIVE:
            self.finish(self._end, now)
            return
        replicate = ReplicateOperation(self.core, entry, self._options.replicas)
        self.core.operations.start(
            replicate, now, self._replicated
        )  # it goes on when the put is cancelled

    def _replicated(self, copies: Any, now: float) -> None:
        assert self._end is not None
        count = copies if isinstance(copies, int) else 1
        if count < self._options.replicas:
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
