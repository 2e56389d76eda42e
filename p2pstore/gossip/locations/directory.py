"""The directory: one view per owner, this peer's copy of that owner's log. Pure.

A view moves by contiguous runs of operations that its owner signed (`log`), or is replaced whole by a snapshot
from the owner itself. A snapshot is put into a slot of its own, in pieces, which `work` goes on with; nothing of it is
seen until the view takes that slot over. Until then the view stands where it stood, and moves on by operations.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import DEFAULT_SALT
from p2pstore.gossip.locations.location_lookups import LocationLookups
from p2pstore.gossip.locations.location_slots import PublishedLocations
from p2pstore.gossip.locations.log import REMOVED, OperationRing, SignedRun, check_run
from p2pstore.gossip.locations.snapshots import CheckedSnapshot, StagedSnapshot, Staging
from p2pstore.gossip.locations.views import (
    STEP_RECORDS,
    Applied,
    DirectoryConfig,
    Outcome,
    View,
    changing,
    who_makes_room,
)
from p2pstore.gossip.records import LOCATION_BYTES, LogHead, Member


class Directory(LocationLookups):
    """Moves views, and bounds them. A view exists once `observe_head` was told of its owner."""

    def __init__(
        self,
        config: DirectoryConfig | None = None,
        salt: int = DEFAULT_SALT,
        published: PublishedLocations | None = None,
    ) -> None:
        super().__init__(config, salt, published)
        self._staging = Staging(self.index)
        self._own_slot: int | None = None

    @property
    def record_count(self) -> int:
        own = 0 if self._own_slot is None else self.index.count(self._own_slot)
        return self.index.record_count - self._staging.done_count - own

    @changing
    def observe_head(self, member: Member, incarnation: int, head: LogHead) -> None:
        """Take in the head of a verified record: the view is dropped if its hash is wrong. A higher incarnation voids
        all that is known of the member; so does a head of more locations than a peer can hold (`shares`)."""
        view = self._views.get(member)
        if view is None:
            view = self.open_view(member, incarnation)
        elif incarnation > view.incarnation:
            self._staging.drop(member)
            self._reset(view)
            view.incarnation, view.head = incarnation, LogHead()
        if incarnation == view.incarnation and not self.shares.allows(member, head.count):
            self._refuse(view)
        elif incarnation == view.incarnation and head.sequence >= view.head.sequence:
            view.head = head
        self._agrees(view)
        self._note_moved(view)

    @changing
    def apply(self, member: Member, incarnation: int, run: SignedRun) -> Applied:
        """Carry out a run whose signature was checked: operations that the view has are skipped, nothing is applied
        across a gap. Raises `ProtocolError` when records are not whole."""
        count = check_run(run.operations)
        view = self._views.get(member)
        if view is None or incarnation > view.incarnation:
            return Applied(Outcome.GAP)
        known = view.sequence + 1 - run.first_sequence
        if incarnation < view.incarnation or known >= count or view.diverged:
            return Applied(Outcome.STALE)
        if member in self.shares.refused:
            return Applied(Outcome.STALE)
        if known < 0:
            return Applied(Outcome.GAP)
        if not self._make_room(view, count - known):
            self._staging.drop(member)
            self._reset(view)
            self._note_moved(view)
            return Applied(Outcome.FULL)
        if view.ring is None:
            view.ring = OperationRing(self._relay_limit)
        view.ring.append(run)
        agrees = self._apply_news(view, run.operations[known * LOCATION_BYTES :])
        self._note_moved(view)
        return Applied(Outcome.APPLIED, count - known) if agrees else Applied(Outcome.DIVERGED)

    def _apply_news(self, view: View, operations: bytes) -> bool:
        """Carry out operations that follow the view. Whether it then agrees with its head."""
        steps = [operations]
        to_head = (view.head.sequence - view.sequence) * LOCATION_BYTES
        if 0 < to_head < len(operations):
            steps = [operations[:to_head], operations[to_head:]]
        for step in steps:
            self._move_on(view, step)
            if not self._agrees(view):
                return False
        return True

    def has_room(self, count: int) -> bool:
        """Whether that many more records fit, besides snapshots that are being put in."""
        coming = self.record_count + self._staging.coming_count + count
        return coming <= self.config.max_records and self.index.has_room(count)

    def may_take(self, member: Member, count: int) -> bool:
        """Whether a set of that many records of a member would be taken: see `shares`."""
        more = count - self.count_of(member)
        return self.has_room(more) or bool(self._would_go(member, count, more))

    def _would_go(self, member: Member, wanted: int, more: int) -> list[Member]:
        """Members whose views are to be dropped so that this one has `wanted` records, `more` of them new."""
        coming = self.record_count + self._staging.coming_count + more
        counts = {other: self.index.count(view.slot) for other, view in self._views.items()}
        for staged in self._staging:
            counts[staged.member] = max(counts[staged.member], staged.snapshot.count)
        return who_makes_room(counts, member, wanted, coming - self.config.max_records)

    def _make_room(self, view: View, more: int) -> bool:
        """Whether a view has room for more records, now that larger ones may have gone."""
        count = self.index.count(view.slot)
        if not self.shares.allows(view.member, count):
            self._refuse(view)
            return False
        if self.has_room(more):
            return True
        for member in self._would_go(view.member, count + more, more):
            self._staging.drop(member)
            self._reset(self._views[member])
            self._note_moved(self._views[member])
        return self.has_room(more)

    def _refuse(self, view: View) -> None:
        """Nothing is known of what the member holds, and nothing is missing."""
        self._staging.drop(view.member)
        self._reset(view)
        view.head = LogHead()
        self._note_moved(view)

    def hide(self, member: Member) -> None:
        """The member is believed dead: its locations come last, and are marked."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = True
            self._publish(view)

    def show(self, member: Member) -> None:
        """The member is back: its locations count again, and touch what is watched."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = False
            self._publish(view)
            self.watched.heard_of_all(view.slot)

    @changing
    def forget(self, member: Member) -> None:
        """Free everything that is known of the member's locations; `hide` and incarnation stay."""
        view = self._views.get(member)
        if view is not None:
            self._staging.drop(member)
            self._reset(view)
            self._note_moved(view)

    @changing
    def drop(self, member: Member) -> None:
        """Forget that the member ever had a log."""
        view = self._views.pop(member, None)
        if view is not None:
            self._staging.drop(member)
            self._discard(view.slot)
            self.shares.forget(member)
            self.unsettled.discard(member)
            self._moved.add(member)
            self._share_relay()

    def open_part(self, partition: int, member: Member, incarnation: int, *, hidden: bool) -> View:
        """A view of a member's part of a partition, in place of the one that there was."""
        self.close_part(partition, member)
        view = View(member, incarnation, self.index.open(), hidden=hidden)
        self._of_slot[view.slot] = self.parts.setdefault(partition, {})[member] = view
        return view

    def close_part(self, partition: int, member: Member) -> None:
        """Forget such a view, if there is one."""
        views = self.parts.get(partition, {})
        if (view := views.pop(member, None)) is not None:
            self._discard(view.slot)
            if not views:
                del self.parts[partition]

    @changing
    def install_snapshot(
        self, member: Member, incarnation: int, sequence: int, set_hash: int, snapshot: CheckedSnapshot
    ) -> bool:
        """Have a view replaced whole, a large one by `work` later. False, and no effect, when it is not ahead or has no
        room. Raises `ProtocolError`, and changes nothing, when the hash is wrong or not what the owner signed."""
        view = self._views.get(member)
        if view is None or incarnation != view.incarnation or member in self.shares.refused:
            return False
        coming = self._staging.get(member)
        if not self._wants(view, sequence) or (coming and sequence <= coming.sequence):
            return False
        head, count = view.head, snapshot.count
        if snapshot.set_hash != set_hash or (
            sequence == head.sequence and (set_hash, count) != (head.set_hash, head.count)
        ):
            raise ProtocolError("a snapshot of locations does not have the hash that its owner signed")
        self._staging.drop(member)
        if not self._make_room(view, count - self.index.count(view.slot)):
            return False
        staged = self._staging.begin(member, sequence, snapshot)
        if count <= STEP_RECORDS:
            self._stage(view, staged, count)
        return True

    def staging(self, member: Member) -> bool:
        return self._staging.get(member) is not None

    @property
    def work_pending(self) -> bool:
        return bool(self._staging or self.watched.work_pending or self.index.any_discarded)

    @changing
    def work(self, limit_records: int | None = None) -> bool:
        """Go on with what takes long, a few milliseconds of it (`STEP_RECORDS`). Whether a view was replaced."""
        limit_records = STEP_RECORDS if limit_records is None else limit_records
        self.index.sweep(limit_records)
        self.watched.work(limit_records)
        staged = self._staging.first
        return staged is not None and self._stage(self._views[staged.member], staged, limit_records)

    def _stage(self, view: View, staged: StagedSnapshot, limit_records: int) -> bool:
        """Put in some records of a snapshot. Whether it is whole, and the view's."""
        if not self._wants(view, staged.sequence):
            self._staging.drop(view.member)  # operations brought the view there meanwhile
            return False
        self._staging.put(staged, limit_records)
        if not staged.whole:
            return False
        self._discard(view.slot)
        view.slot = self._staging.take(staged)
        self._claim_slot(view)
        view.ring = None
        view.sequence = staged.sequence
        view.diverged = False
        if self._agrees(view):  # the head may have come to stand there
            self.watched.heard_of_all(view.slot)
        self._note_moved(view)
        return True

    def _wants(self, view: View, sequence: int) -> bool:
        return sequence > view.sequence or view.diverged

    def show_own(self, member: Member, operation: bytes) -> None:
        """Let clients know of an object that this peer holds where they do not see it, on its SSD. For them alone:
        `holders` and `held` are about other members."""
        if self._published is None:
            return
        if self._own_slot is None:
            self._own_slot = self.index.open()
            self._published.count(self._own_slot, member, True)
        if self.index.has_room(1):
            self._change_own(self._own_slot, operation)

    def hide_own(self, digests: Iterable[bytes]) -> None:
        """The end of `show_own`, for those objects for which that was called."""
        if self._own_slot is None or self._published is None:
            return
        for digest in digests:
            shown = self.index.get(self._own_slot, digest)
            if shown is not None:
                self._change_own(self._own_slot, shown[:-1] + bytes((shown[-1] | REMOVED,)))

    @changing
    def _change_own(self, slot: int, operation: bytes) -> None:
        self.index.apply(slot, operation)
