"""A peer's floors: writing them, taking them in, and what follows for the objects it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.memory_return import ColdReturn, MemoryReturn
from p2pstore.core.core_effects import AskPeer, ColdObject, SaveClusterRecord
from p2pstore.core.removals.flush import Sweep
from p2pstore.errors import CapacityExceeded, ProtocolError
from p2pstore.gossip.floors.floor_set import COMPACT_ABOVE
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    MAX_KEYS_OF_FLOOR,
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    Member,
    PeerId,
    SignedRecord,
    floor_of_keys,
    keys_of_floor,
    open_cluster_record,
    sign_cluster_record,
)
from p2pstore.objects import Version, unix_seconds_from_clock
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ClusterRecords
from p2pstore.wire import encode_body

if TYPE_CHECKING:
    from p2pstore.core.operation import Operation
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry

COLD_PER_STEP: Final = 64
"""Looking at one costs some 10 us, and announcing it 20."""
WAIT_SECONDS: Final = 4.0
"""An operation waits for room among the floors for so long: clients wait for its answer for ten seconds."""
WAIT_STEP_SECONDS: Final = 0.05
PACE_ABOVE: Final = 0.8
"""Share of the limit of floors above which removals are slowed down."""
MAX_NOTES: Final = 100
MAX_NAMES: Final = 5
"""Of members, in one note."""
BURST_SECONDS: Final = 2.0
PACE_SECONDS: Final = 10.0
"""Longer than compaction takes in a small cluster whose members are all well: some seven seconds."""


@dataclass(slots=True)
class _Distrusting:
    """Copies up to this clock are being discarded. `by`: names of those whose word that is; `before`: how many had been
    discarded before."""

    clock: int
    before: int
    by: list[str] = field(default_factory=list)


class Floors:
    """The core's part in floors; `p2pstore.gossip` keeps and spreads them."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records.floors
        self._sync = core.gossip.floors
        self.sweep = Sweep(core)
        self._clock_at_start = core.clock.latest
        self._last_alive: int | None = None
        """When this peer was last there, until it is judged whether that is too long ago."""
        self._waits_for_clock = False
        self._distrusted_before = 0
        self._trusted_operation = 0
        """Operations with lower numbers began before the last time that older copies were distrusted."""
        self._cold: ColdReturn | None = None
        self._memory: MemoryReturn | None = None
        self._unsettled = 0
        self._seen_before_cold: Stamps | None = None
        self._seen_before_sweep: Stamps | None = None
        self._allowance = 0.0
        self._allowed_at = 0.0
        self._slowed = False
        self._distrusting: _Distrusting | None = None
        self._told: set[Member] = set()
        """Members of which the log says that they are passed over, or not believed."""
        self._notes: list[str] = []

    # --- floors ------------------------------------------------------------------------------

    def write(
        self,
        name: bytes,
        version: Version,
        now: float,
        *,
        scope: int = SCOPE_KEY,
        namespace: bytes = b"",
    ) -> SignedRecord:
        """Forbid all copies up to `version`: of a key (in the namespace of this digest), or with
        `SCOPE_NAMESPACE` of all keys of a namespace."""
        core = self._core
        record = ClusterRecord(
            CLUSTER_RECORD_FORMAT,
            int(ClusterRecordKind.FLOOR),
            name,
            version.clock,
            version.writer,
            core.peer_id,
            scope,
            encode_body(FloorBody(namespace)) if namespace else b"",
        )
        return self.keep(record, now)

    def write_keys(
        self, digests: Sequence[bytes], namespace: bytes, version: Version, now: float
    ) -> list[tuple[SignedRecord, Sequence[bytes]]]:
        """Forbid all copies of some keys of a namespace up to `version`, with one signature for 64 keys. Each record
        with its keys; one a key while there are older peers, which know no others."""
        others = self._core.gossip.membership.others()
        size = MAX_KEYS_OF_FLOOR if all(state.floors_end for state in others) else 1
        parts = [digests[at : at + size] for at in range(0, len(digests), size)]
        return [
            (self.keep(floor_of_keys(part, namespace, version, self._core.peer_id), now), part)
            for part in parts
        ]

    # --- room --------------------------------------------------------------------------------

    def may_write(self, wanted: int, now: float) -> int:
        """How many keys of `wanted` this peer may forbid now. Floors of others are heard of a second later: so all
        writers together fill at most half of what is free in a second, and a tenth of it when floors are crowded, so
        that compaction comes before the limit does."""
        floors = self._records
        crowding = floors.crowding
        free = float(floors.limit - floors.count)
        if crowding > 0.0:
            free = min(free, floors.count * (1.0 / crowding - 1.0))
        fill_seconds = PACE_SECONDS if crowding >= PACE_ABOVE else BURST_SECONDS
        rate = max(0.0, free) / (fill_seconds * (1 + len(floors.writers)))
        elapsed, self._allowed_at = now - self._allowed_at, now
        self._allowance = min(max(1.0, rate), self._allowance + elapsed * rate)
        allowed = min(wanted, int(self._allowance))
        self._allowance -= allowed
        self._note_pace(slowed=allowed < wanted and crowding >= PACE_ABOVE, crowding=crowding)
        return allowed

    def _note_pace(self, *, slowed: bool, crowding: float) -> None:
        if slowed:
            self._core.counters["removals_slowed"] += 1
            if not self._slowed:
                self._notes.append(f"removals are slowed down: {self._room_text()}")
        self._slowed = slowed or (self._slowed and crowding > COMPACT_ABOVE)

    @property
    def full(self) -> bool:
        """Whether no further key may be forbidden."""
        return self._records.crowding >= 1.0

    def no_room(self) -> CapacityExceeded:
        """The error of an operation that may not write a floor."""
        return CapacityExceeded(
            f"too many removals and overwrites: {self._room_text()}. Try again in some seconds; "
            "`mooncake-p2p doctor` tells more"
        )

    def _room_text(self) -> str:
        waits_for = self.waits_for()
        names = f"; {', '.join(waits_for[:3])} did not confirm that yet" if waits_for else ""
        return (
            f"{self._records.count:,} removed keys are remembered until all living peers have heard of them, which is "
            f"{100 * self._records.crowding:.0f} % of what there is room for{names}"
        )

    def waits_for(self) -> list[str]:
        """Names of members that keep floors from being dropped."""
        return self._names(self._sync.waits_for)

    def disbelieved(self, now: float) -> list[str]:
        """Names of members that say that floors are gone of which this peer has not heard."""
        return self._names(self._sync.disbelieved(now))

    def _names(self, members: Iterable[Member]) -> list[str]:
        return self._core.gossip.membership.names_of(members)

    def take_notes(self, now: float) -> list[str]:
        """What an operator ought to know of, since the last call."""
        self._note_members(now)
        if self._distrusting is not None and not self.sweep.pending and not self.returning:
            self._notes.append(self._distrusted_text(self._distrusting, now))
            self._distrusting = None
        notes, self._notes = self._notes[:MAX_NOTES], []
        return notes

    def _note_members(self, now: float) -> None:
        """Name each member once that is passed over, or not believed, for as long as it is."""
        sync = self._sync
        if not (sync.passed_over or sync.has_offers or self._told):
            return
        disbelieved = sync.disbelieved(now)
        for member in sync.passed_over:
            if member not in self._told:
                why = (
                    "says that other keys were removed than this peer knows of, though each has told the other all"
                    if member in sync.disputed
                    else "did not confirm for a long time which keys were removed"
                )
                self._notes.append(
                    f"{self._names([member])[0]} {why}, and is not waited for any longer: what it holds of removed "
                    "keys is not believed"
                )
        for member, clock in disbelieved.items():
            if member not in self._told:
                self._notes.append(
                    f"{self._names([member])[0]} says that removals up to {self._ago(clock, now)} are forgotten, of "
                    "which this peer has not heard. Too few members say so as well: it is not believed, and nothing is "
                    "discarded"
                )
        self._told = {*sync.passed_over, *disbelieved}

    def _distrusted_text(self, event: _Distrusting, now: float) -> str:
        count = self._core.counters["objects_distrusted"] - event.before
        by = ", ".join(event.by[:MAX_NAMES]) + (
            f" and {len(event.by) - MAX_NAMES:,} more" if len(event.by) > MAX_NAMES else ""
        )
        return (
            "this peer was out of touch for so long that others have forgotten which keys were removed meanwhile: "
            f"it discarded {count:,} copies of objects that were put up to {self._ago(event.clock, now)}, by the "
            f"signed records of {by or 'an earlier life of its own'}"
        )

    def _ago(self, clock: int, now: float) -> str:
        """How long ago a stamp was made."""
        seconds = self._core.unix(now) - unix_seconds_from_clock(clock)
        return f"{max(0.0, seconds):,.0f} s ago"

    def keep(self, record: ClusterRecord, now: float) -> SignedRecord:
        """Sign a cluster record of this peer's, of whatever kind; keep and spread it."""
        signed = sign_cluster_record(record, self._core.signer)
        self._accept(record, signed, now)
        return signed

    def push(
        self,
        operation: int,
        tag: int,
        peer_id: PeerId,
        records: Sequence[SignedRecord],
        timeout_seconds: float,
    ) -> None:
        """Tell one peer of cluster records now, ahead of gossip."""
        request = ClusterRecords(
            [record.body for record in records], [record.signature for record in records]
        )
        self._core.emit(
            AskPeer(operation, tag, peer_id, DataKind.CLUSTER_RECORDS, request, timeout_seconds)
        )

    def learn(self, records: Sequence[SignedRecord], now: float) -> None:
        """Take in signed records from elsewhere. Raises `ProtocolError` for one that is not right, and when some are
        from the future; those beside them are taken."""
        core = self._core
        refused = 0
        for signed in records:
            record = open_cluster_record(signed, core.verifier)
            if core.clock.observe(record.clock, core.believed_unix(now)):
                self._accept(record, signed, now)
            else:
                core.gossip.future.note_record(record)
                refused += 1
        if refused:
            raise ProtocolError(
                f"{refused:,} of {len(records):,} cluster records are from over 10 s in the future, by this peer's "
                "clock: check the hosts' clocks"
            )

    def arrived(self, now: float) -> None:
        """Act on what gossip brought since the last call."""
        distrusted = self._sync.take_distrusted()
        if distrusted:
            self._distrust(distrusted, now)
        for record, signed in self._core.gossip.take_cluster_records():
            self._apply(record, signed, now)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Make a step of what takes long."""
        if self.sweep.pending:
            self.sweep.step(now)
        self._judge_absence(now)
        if self._cold_may_be_sorted:
            self._sort_cold(now)
        if self._memory_may_be_looked_at:
            self._look_at_memory(now)

    def next_tick(self, now: float) -> float:
        """When `tick` has something to do."""
        judges = self._last_alive is not None and self._sync.synchronised
        busy = (
            self.sweep.pending
            or self._cold_may_be_sorted
            or self._memory_may_be_looked_at
            or (judges and not self._waits_for_clock)
        )
        return now if busy else math.inf

    @property
    def returning(self) -> bool:
        """Whether objects of an earlier life are still held back."""
        return self._cold is not None or self._memory is not None

    # --- a peer that was away ----------------------------------------------------------------

    def return_with(self, objects: Iterable[ColdObject], newest_clock: int, now: float) -> None:
        """This peer has objects of an earlier life, on its SSD; `newest_clock` is that of the newest. Call it before
        the first tick, once.

        They are not to be served or announced before `ColdSorted` says so, which it does when this peer
        has heard of every floor made while it was away. What a floor forbids by then is to be discarded,
        and what floors that are gone may have forbidden. Objects that a floor forbade in the earlier
        life must have been discarded then, durably: that floor may be gone as well.
        """
        self._cold = ColdReturn(objects, newest_clock)
        self._hold_back(newest_clock, now)

    def return_with_memory(self, now: float) -> None:
        """As `return_with`, for what the segment has of an earlier life. It is taken care of here: what turns out good
        is asked to be checked (`CheckReturned`), then published and announced."""
        returned = self._core.segment.returned.entries()
        self._memory = MemoryReturn(self._core, returned)
        newest_clock = max((entry.version.clock for entry in returned), default=0)
        self._hold_back(newest_clock, now)

    def _hold_back(self, newest_clock: int, now: float) -> None:
        self._unsettled += 1
        self._sync.has_older_copies |= newest_clock > 0
        core = self._core
        core.timekeeping.found(newest_clock)
        if self._seen_before_cold is None:
            self._seen_before_cold = dict(self._sync.seen)
        self._last_alive = core.timekeeping.newest_found
        if core.clock.accepts(self._clock_at_start, core.unix(now)):
            self._last_alive = max(self._last_alive, self._clock_at_start)

    def _judge_absence(self, now: float) -> None:
        """Whether this peer was away for so long that nothing is to be trusted which it kept. Where its clock is ahead
        of the others', it may have been away for a moment: that is judged when the clock is right."""
        core, last_alive = self._core, self._last_alive
        if last_alive is None or not self._sync.synchronised:
            return
        was_away = self._sync.was_away_too_long(last_alive, now)
        self._waits_for_clock = was_away and core.timekeeping.view(now).lead < 0
        if self._waits_for_clock:
            return
        if was_away:  # all that it kept; what was put since the start is above that
            self._distrusted_before = max(self._distrusted_before, last_alive)
        self._last_alive = None

    @property
    def seen_to_save(self) -> Stamps:
        """Up to where floors were seen, for the state directory. While objects are held back, or are still to be
        withdrawn, it stays as it was: a crash must not make those that come back look checked."""
        if self._seen_before_cold is not None:
            return dict(self._seen_before_cold)
        if not self.sweep.pending or self._seen_before_sweep is None:
            self._seen_before_sweep = dict(self._sync.seen)
        return dict(self._seen_before_sweep)

    def cold_settled(self) -> None:
        """What `ColdSorted` said was discarded is gone for good."""
        self._unsettled -= 1
        if not self._unsettled:
            self._seen_before_cold = None

    def holds_back(self, digest: bytes, namespace: bytes, version: Version) -> bool:
        """Whether an object on the SSD may not be shown yet, as it may be of an earlier life."""
        if self._cold is None and self._memory is None:
            return False
        return not (self._is_settled and self._is_good(ColdObject(digest, namespace, version)))

    def distrusts(self, operation: Operation, version: Version) -> bool:
        """Whether what this operation fetched may come from a holder that had missed a floor."""
        return (
            version.clock <= self._distrusted_before and operation.number < self._trusted_operation
        )

    # --- inside ------------------------------------------------------------------------------

    def _accept(self, record: ClusterRecord, signed: SignedRecord, now: float) -> None:
        if self._core.gossip.cluster_records.offer(record, signed):
            self._apply(record, signed, now)

    def _apply(self, record: ClusterRecord, signed: SignedRecord, now: float) -> None:
        core = self._core
        core.clock.observe(record.clock, core.believed_unix(now))
        core.emit(SaveClusterRecord(signed))
        if record.kind != ClusterRecordKind.FLOOR:
            core.checkpoints.heard(record)
            return
        if record.scope == SCOPE_NAMESPACE:
            core.cold.sweep(record.name, record.version)
            self.sweep.begin(now)
            self._tell_of_flush(record)
            return
        for digest in keys_of_floor(record):
            self._forbid(digest, record.version, now)

    def _tell_of_flush(self, record: ClusterRecord) -> None:
        """Whoever reads this peer's log can see by whose word objects went."""
        core = self._core
        if record.signer == core.peer_id or len(self._notes) >= MAX_NOTES:
            return
        named = next((text for text, name in core.namespaces() if name == record.name), None)
        what = f"the namespace {named!r}" if named is not None else "a namespace"
        self._notes.append(f"{core.name_of(record.signer)} has flushed {what}: its objects go")

    def _forbid(self, digest: bytes, version: Version, now: float) -> None:
        core = self._core
        entry = core.segment.find(digest, core.unix(now))
        if entry is not None and version.covers(entry.version):
            core.objects.withdraw(entry, now)
        returned = core.segment.returned.find(digest)
        if returned is not None and version.covers(returned.version):
            core.segment.returned.drop(returned)
        core.cold.discard(digest, version, now)

    def _distrust(self, clock: int, now: float) -> None:
        core = self._core
        self._distrusted_before = max(self._distrusted_before, clock)
        self._trusted_operation = core.operations.next_number
        core.counters["horizons_missed"] += 1
        event = self._distrusting
        if event is None:
            event = self._distrusting = _Distrusting(clock, core.counters["objects_distrusted"])
        event.clock = max(event.clock, clock)
        event.by += [each for each in self._names(self._sync.distrusted_by) if each not in event.by]
        core.cold.sweep(None, Version(clock, 0xFFFF))
        self.sweep.begin(now, distrusted=clock)

    @property
    def _is_settled(self) -> bool:
        """Whether this peer has heard of all floors of the time when it was away, and knows how long that was."""
        return self._sync.synchronised and self._last_alive is None

    @property
    def _cold_may_be_sorted(self) -> bool:
        return self._cold is not None and self._is_settled

    def _sort_cold(self, now: float) -> None:
        assert self._cold is not None
        sorted_ones = self._cold.sort(COLD_PER_STEP, self._is_good)
        self._core.counters["objects_distrusted"] += sum(
            each.version.clock <= self._distrusted_before for each in sorted_ones.discarded
        )
        self._core.emit(sorted_ones)
        if sorted_ones.last:
            self._cold = None
            self._core.repair.look_later(now)  # holders of other copies may be gone for good

    @property
    def _memory_may_be_looked_at(self) -> bool:
        memory = self._memory
        return memory is not None and memory.wants_a_step and self._is_settled

    def _look_at_memory(self, now: float) -> None:
        assert self._memory is not None
        self._memory.step(self._is_good_in_memory)
        self._memory_looked_at(now)

    def returned_checked(
        self, entries: Sequence[ObjectEntry], whole: Sequence[bool], now: float
    ) -> None:
        """The outcome of a `CheckReturned`: whether the bytes of each object are what they were put as."""
        assert self._memory is not None
        self._memory.checked(entries, whole, self._is_good_in_memory, now)
        self._memory_looked_at(now)

    def _memory_looked_at(self, now: float) -> None:
        if self._memory is not None and self._memory.is_over:
            self._memory = None
            self.cold_settled()
            self._core.repair.look_later(now)

    def _is_good_in_memory(self, entry: ObjectEntry) -> bool:
        distrusted = entry.version.clock <= self._distrusted_before
        self._core.counters["objects_distrusted"] += distrusted
        namespace = self._core.namespace_digest(entry.namespace)
        return self._is_good(ColdObject(entry.digest, namespace, entry.version))

    def _is_good(self, cold: ColdObject) -> bool:
        return cold.version.clock > self._distrusted_before and not self._records.forbids(
            cold.digest, cold.namespace, cold.version
        )
