"""A peer's floors: writing them, taking them in, and what follows for the objects it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from p2pstore.core.core_effects import AskPeer, SaveClusterRecord
from p2pstore.core.removals.flush import Sweep
from p2pstore.errors import ProtocolError
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
    from p2pstore.core.peer_core import PeerCore

MAX_NOTES: Final = 100
MAX_NAMES: Final = 5
"""Of members, in one note."""


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
        self._distrusting: _Distrusting | None = None
        self._told: set[Member] = set()
        """Members of which the log says that they are passed over, or not believed."""
        self._notes: list[str] = []

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
        if (
            self._distrusting is not None
            and not self.sweep.pending
            and not self._core.earlier_life.returning
        ):
            self._notes.append(self._distrusted_text(self._distrusting, now))
            self._distrusting = None
        budget = self._core.floor_budget
        notes, self._notes, budget.notes = [*budget.notes, *self._notes][:MAX_NOTES], [], []
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

    def tick(self, now: float) -> None:
        """Make a step of what takes long."""
        if self.sweep.pending:
            self.sweep.step(now)

    def next_tick(self, now: float) -> float:
        """When `tick` has something to do."""
        return now if self.sweep.pending else math.inf

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
