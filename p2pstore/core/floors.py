"""A peer's floors: writing them as fast as compaction allows, taking them in, and what goes here because of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from p2pstore.core.operation import SaveClusterRecord
from p2pstore.errors import CapacityExceeded, ProtocolError
from p2pstore.gossip.floors.floor_set import COMPACT_ABOVE
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    MAX_KEYS_OF_FLOOR,
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    Member,
    SignedRecord,
    floor_of_keys,
    keys_of_floor,
    open_cluster_record,
    sign_cluster_record,
)
from p2pstore.objects import Version, listed, unix_seconds_from_clock
from p2pstore.runtime.stepping import Steps
from p2pstore.wire import encode_body

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry

MAX_NAMES: Final = 5
"""Of members, in one note."""


@dataclass(slots=True)
class _Distrusting:
    """Copies up to this clock are discarded, by the word of those members; `before`: the count of earlier discards."""

    clock: int
    before: int
    by: list[str] = field(default_factory=list)


class Floors:
    """The core's part in floors; `p2pstore.gossip` keeps and spreads them."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._sync = core.gossip.floors
        self.sweep = Sweep(core)
        self._distrusting: _Distrusting | None = None
        self._told: set[Member] = set()
        """Members of which the log says that they are passed over, or not believed."""

    def write(
        self,
        name: bytes,
        version: Version,
        now: float,
        *,
        scope: int = SCOPE_KEY,
        namespace: bytes = b"",
    ) -> SignedRecord:
        """Forbid all copies up to `version`: of a key (of the namespace), or of all keys (`SCOPE_NAMESPACE`)."""
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

    def waits_for(self) -> list[str]:
        """Names of members that keep floors from being dropped."""
        return self._names(self._sync.waits_for)

    def disbelieved(self, now: float) -> list[str]:
        """Names of members that say that floors are gone of which this peer has not heard."""
        return self._names(self._sync.disbelieved(now))

    def _names(self, members: Iterable[Member]) -> list[str]:
        return list(map(self._core.gossip.membership.name_of_member, members))

    def note(self, text: str) -> None:
        self._core.notes.add("floors", text)

    def _note_members(self, now: float) -> None:
        """Name each member once that is passed over, or not believed, for as long as it is."""
        sync = self._sync
        disbelieved = sync.disbelieved(now)
        for member in sync.passed_over:
            if member not in self._told:
                why = (
                    "says that other keys were removed than this peer knows of, though each has told the other all"
                    if member in sync.disputed
                    else "did not confirm for a long time which keys were removed"
                )
                self.note(
                    f"{self._names([member])[0]} {why}, and is not waited for any longer: what it holds of removed "
                    "keys is not believed"
                )
        for member, clock in disbelieved.items():
            if member not in self._told:
                self.note(
                    f"{self._names([member])[0]} says that removals up to {self._ago(clock, now)} are forgotten, of "
                    "which this peer has not heard. Too few members say so as well: it is not believed, and nothing is "
                    "discarded"
                )
        self._told = {*sync.passed_over, *disbelieved}

    def _distrusted_text(self, event: _Distrusting, now: float) -> str:
        count = self._core.counters["objects_distrusted"] - event.before
        by = listed(event.by, MAX_NAMES)
        return (
            "this peer was out of touch for so long that others have forgotten which keys were removed meanwhile: "
            f"it discarded {count:,} copies of objects that were put up to {self._ago(event.clock, now)}, by the "
            f"signed records of {by or 'an earlier life of its own'}"
        )

    def _ago(self, clock: int, now: float) -> str:
        seconds = self._core.unix(now) - unix_seconds_from_clock(clock)
        return f"{max(0.0, seconds):,.0f} s ago"

    def keep(self, record: ClusterRecord, now: float) -> SignedRecord:
        """Sign a cluster record of this peer's, of whatever kind; keep and spread it."""
        signed = sign_cluster_record(record, self._core.signer)
        self._accept(record, signed, now)
        return signed

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
                core.gossip.future_stamps.note_record(record)
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
        for record, signed in self._core.gossip.incoming.take_cluster_records():
            self._apply(record, signed, now)

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
        """Note a flush by another peer, for the operator."""
        core = self._core
        if record.signer == core.peer_id:
            return
        named = next((text for text, name in core.namespaces() if name == record.name), None)
        what = f"the namespace {named!r}" if named is not None else "a namespace"
        self.note(f"{core.name_of(record.signer)} has flushed {what}: its objects go")

    def tick(self, now: float) -> None:
        self._note_members(now)
        if self.sweep.pending:
            self.sweep.step(now)
        elif self._distrusting is not None and not self._core.earlier_life.returning:
            self.note(self._distrusted_text(self._distrusting, now))
            self._distrusting = None

    @property
    def due_at(self) -> float:
        return -math.inf if self.sweep.pending else math.inf

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
        core.earlier_life.distrust(clock)
        core.counters["horizons_missed"] += 1
        event = self._distrusting
        if event is None:
            event = self._distrusting = _Distrusting(clock, core.counters["objects_distrusted"])
        event.clock = max(event.clock, clock)
        event.by += [each for each in self._names(self._sync.distrusted_by) if each not in event.by]
        core.cold.sweep(None, Version(clock, 0xFFFF))
        self.sweep.begin(now, distrusted=clock)


SLOTS_PER_STEP: Final = 2_000
WITHDRAWN_PER_STEP: Final = 32
"""Each step takes less than 5 ms: withdrawing an object costs some 40 us, passing a slot half of one."""


class Sweep:
    """Goes over the segment's slots once after every `begin`, a step per tick, and withdraws forbidden
    objects. Objects put meanwhile were checked when they came."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._at = 0
        self._left = 0
        self._distrusted = 0

    @property
    def pending(self) -> bool:
        """Whether there is a step to make."""
        return self._left > 0 or self._core.cold.sweeping

    def forbids(self, entry: ObjectEntry) -> bool:
        """Whether the object is to go, though it is still here."""
        return self._left > 0 and (
            entry.version.clock <= self._distrusted or self._core.objects.forbids(entry)
        )

    def begin(self, now: float, distrusted: int = 0) -> None:
        """Go round from here, as a namespace has a floor or versions up to `distrusted` are; one step at once."""
        self._distrusted = max(self._distrusted, distrusted)
        self._left = self._core.segment.geometry.slots
        self.step(now)

    def step(self, now: float) -> None:
        """Pass some slots; when all were passed, discard some objects on the SSD."""
        if self._left:
            self._pass_slots(now)
        else:
            self._core.cold.sweep_step(now)

    def _pass_slots(self, now: float) -> None:
        core, withdrawn = self._core, 0
        count = min(SLOTS_PER_STEP, self._left)
        for entry in core.segment.objects.in_slots(self._at, count):
            if self.forbids(entry):
                if withdrawn == WITHDRAWN_PER_STEP:
                    count = entry.slot - self._at
                    break
                core.counters["objects_distrusted"] += entry.version.clock <= self._distrusted
                core.objects.withdraw(entry, now)
                withdrawn += 1
        self._left -= count
        self._at += count
        if self._at >= core.segment.geometry.slots:
            self._at = 0
        if not self._left:
            self._distrusted = 0


def swept(core: PeerCore) -> Steps[None]:
    """Wait until what floors forbid has been withdrawn here; each tick makes a step of that."""
    while core.floors.sweep.pending:
        yield


WAIT_SECONDS: Final = 4.0
"""An operation's wait for room among the floors; clients wait 10 s for its answer."""
WAIT_STEP_SECONDS: Final = 0.05
PACE_ABOVE: Final = 0.8
"""Share of the limit of floors above which removals are slowed down."""
BURST_SECONDS: Final = 2.0
PACE_SECONDS: Final = 10.0
"""Longer than compaction takes in a small cluster whose members are all well: some seven seconds."""


class FloorBudget:
    """How many keys this peer may forbid now, and the error when it may forbid none."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records.floors
        self._allowance = 0.0
        self._allowed_at = 0.0
        self._slowed = False

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
                self._core.floors.note(f"removals are slowed down: {self._room_text()}")
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
        waits_for = self._core.floors.waits_for()
        names = f"; {', '.join(waits_for[:3])} did not confirm that yet" if waits_for else ""
        return (
            f"{self._records.count:,} removed keys are remembered until all living peers have heard of them, which is "
            f"{100 * self._records.crowding:.0f} % of what there is room for{names}"
        )
