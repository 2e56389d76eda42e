"""The parts of one peer's gossip, and its own log and record. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

import msgspec

from p2pstore.gossip.exchange.anti_entropy import FreshNews, Knowledge, OperationRate
from p2pstore.gossip.exchange.delta_checks import DeltaChecks, FutureRecords
from p2pstore.gossip.exchange.digests import DigestTable
from p2pstore.gossip.exchange.exchanges import Exchanges
from p2pstore.gossip.exchange.open_requests import OpenRequests
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_set import FloorSet
from p2pstore.gossip.floors.floor_sync import FloorSync
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.home_updates import CheckedUpdate, PushIntake
from p2pstore.gossip.homes.partition_homes import rank
from p2pstore.gossip.homes.partitioned_directory import PartitionedDirectory
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_slots import PublishedLocations
from p2pstore.gossip.locations.log import MAX_STAMP, OwnLog, SigningPace, newest_clock
from p2pstore.gossip.locations.snapshots import Packed
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.members.contacts import AddressBook, Contacts
from p2pstore.gossip.members.member_table import MAX_INCARNATION, MemberChange
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.members.peer_clocks import ClusterTime
from p2pstore.gossip.members.probing import Probing
from p2pstore.gossip.records import (
    LocationRecord,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    Tier,
    sign_peer_record,
)
from p2pstore.home_messages import Push
from p2pstore.location_table import LocationTable
from p2pstore.objects import DIGEST_BYTES, Version, unix_seconds_from_clock
from p2pstore.wire import Signer, Verifier


class GossipState:
    """The parts of one peer's gossip, put together.

    `describe` returns what this peer offers now; gossip fills in incarnation, sequence, head, horizon and leaving, and
    signs. `incarnation`: of this start, in wall-clock ms, above that of the last start. `wall_clock(now)` is the hybrid
    clock's reading of the wall clock at the monotonic time `now`. `location_table`: an empty table that clients may
    map, with `config.directory.max_rows` rows.
    """

    def __init__(
        self,
        signer: Signer,
        verifier: Verifier,
        incarnation: int,
        describe: Callable[[], PeerRecord],
        config: GossipConfig,
        rng: Random,
        *,
        wall_clock: Callable[[float], int],
        accepts_clock: Callable[[int, float], bool] = lambda clock, now: True,
        accepts_peer: Callable[[PeerId], bool] = lambda peer_id: True,
        location_table: LocationTable | None = None,
    ) -> None:
        self.peer_id: PeerId = signer.peer_id
        self.config = config
        self.membership = Membership(
            signer.peer_id,
            incarnation,
            config.membership,
            lambda now: 1000 * unix_seconds_from_clock(wall_clock(now)),
        )
        self.member: Member = self.membership.own.member
        self.time = ClusterTime(wall_clock, self.membership)
        self.log = OwnLog(incarnation, config.ring_limit)
        self.published = None if location_table is None else PublishedLocations(location_table)
        self.directory = Directory(config.directory, rng.getrandbits(128), self.published)
        floors = FloorSet(
            config.cluster_record_limit, kept_seconds=config.floor_kept_seconds, published=self.published
        )
        self.cluster_records = ClusterRecords(floors)
        self.floors = FloorSync(self.member, self.cluster_records, accepts_clock, wall_clock)
        self.future_stamps = FutureRecords()
        """Stamps left out because they are too far ahead of this peer's clock."""
        table = DigestTable(self.membership, self.directory, self.log)
        self.checks = DeltaChecks(
            config.cluster,
            table,
            self.directory,
            self.cluster_records,
            verifier,
            accepts_clock,
            accepts_peer,
            self.time.newest_accepted,
            self.future_stamps,
        )
        self.knowledge = Knowledge(
            self.membership, self.directory, self.log, self.cluster_records, table, rng
        )
        self._connect_parts(signer, rng)
        self._offer = describe
        self._signer = signer
        self._recorded: SignedRecord | None = None
        self.losses = 0
        """Grows whenever a member that may have held something died, left, began anew or was expelled."""
        self._changes: list[MemberChange] = []
        self._ranked: tuple[int, list[Member]] = (-1, [])

    def _connect_parts(self, signer: Signer, rng: Random) -> None:
        config = self.config
        self.contacts = Contacts(rng)
        self.addresses = AddressBook(self.contacts, self.membership, self.membership.newcomers)
        self.questions = OpenRequests(config)
        self.view = ActiveView(self.membership, rng, config.active_view, config.view_rotation_seconds)
        self.partitions = PartitionedDirectory(config, self.membership, self.directory, self.log, rng)
        rate = OperationRate(config.eager_operations_per_second)
        self.exchanges = Exchanges(
            config, self.knowledge, self.floors, self.questions, self.view, rng, rate
        )
        self.exchanges.unix_ms = self.time.unix_ms
        self.eager_news = FreshNews(config, self.knowledge, self.view, self.questions, rate)
        self.probing = Probing(self.membership, self.questions, rng)
        self.own_record = OwnRecord(
            signer, self._describe, config, self.membership, self.log, self.floors
        )
        self._pace = SigningPace(lambda: rate.is_high, lambda: 1 + len(self.directory.unsettled))

    @property
    def incarnation(self) -> int:
        """Of this peer's log and record. Normally that of the start; see `defence_margin`."""
        return self.log.incarnation

    @property
    def leaving(self) -> bool:
        return self.own_record.leaving

    def hold(self, record: LocationRecord, now: float) -> None:
        """This peer holds a version of a key from now on."""
        operation = self.log.add(record)
        if operation is None:
            return
        self._note_operations([operation], now)
        if record.tier is Tier.SSD:  # clients do not see it in memory
            self.directory.show_own(self.member, operation)
        else:
            self.directory.hide_own([record.digest])

    def hold_new(self, operations: Sequence[bytes], now: float) -> None:
        """`hold` of many packed records of keys of which this peer held nothing."""
        self.log.add_many(operations)
        self._note_operations(operations, now)

    def release(self, digest: bytes, version: Version, now: float) -> None:
        """This peer no longer holds that version, if it did."""
        if self.log.holds(digest, version):
            self.release_many([(digest, version)], now)

    def release_many(self, gone: Sequence[tuple[bytes, Version]], now: float) -> None:
        """`release` of many versions that are held, each of another key."""
        operations = self.log.remove_many(gone)
        self._note_operations(operations, now)
        self.directory.hide_own(operation[:DIGEST_BYTES] for operation in operations)

    def record(self, now: float) -> SignedRecord:
        """This peer's own record, signed anew when something changed; its head's operations are signed with it."""
        signed = self.own_record.signed(now)
        wanted = self.log.signed < self.log.sequence and self.partitions.current.logs_are_read
        if wanted and (signed is not self._recorded or self._pace.may_sign(now)):
            self.log.sign(self._signer)
            self._pace.signed(now)
        self._recorded = signed
        return signed

    def offer_changed(self) -> None:
        """This peer offers something else now that others should hear of soon."""
        self.own_record.changed()
        self.exchanges.hurry()

    def intake(self, sender: Member, update: Push) -> PushIntake:
        """Take in an owner's push, in steps of a few milliseconds. Raises `ProtocolError`, as its first steps do."""
        return PushIntake(sender, update, self._take_pushed)

    def _take_pushed(
        self, owner: Member, part: CheckedUpdate, max_rivals: int, now: float
    ) -> tuple[list[int], list[Location]]:
        self.heard_of(part.packed_operations, now)
        for whole in part.sets:
            self.heard_of(whole.records, now)
        return self.partitions.take(owner, part, max_rivals, now)

    def heard_of(self, operations: Packed, now: float, newest: int | None = None) -> None:
        """Locations were heard of, in packed records; `newest` is their highest clock where that is known already."""
        if newest is None:
            newest = newest_clock(operations, MAX_STAMP)
        self.floors.heard_of(operations, newest, now)
        if newest > self.time.newest_accepted(now):
            self.future_stamps.note(newest)

    def doubts(self, member: Member, version: Version, now: float) -> bool:
        """Whether the member's copy of this version may have been removed while it was away."""
        return version.clock <= self.doubted_up_to(member, now)

    def doubted_up_to(self, member: Member, now: float) -> int:
        """The clock up to which a member's versions are doubted; -1 when none are."""
        state = self.membership.resolve(member)
        shown = None if state is None or state.signed is None else state.floors_horizon
        return self.floors.doubts.up_to(member, shown, now)

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, best first; this one may be among them."""
        return self.peer_ids(self.partitions.current.of(digest))

    def rank(self, digest: bytes) -> list[PeerId]:
        """The other live members in rendezvous order for a key."""
        if self._ranked[0] != self.membership.version:
            members = [state.member for state in self.membership.homes()]
            self._ranked = self.membership.version, members
        ranked = rank(digest, self._ranked[1])
        return [peer_id for peer_id in self.peer_ids(ranked) if peer_id != self.peer_id]

    def _describe(self) -> PeerRecord:
        return msgspec.structs.replace(self._offer(), directory=int(self.partitions.mode.shown))

    def _note_operations(self, operations: Sequence[bytes], now: float) -> None:
        """The last ones of this peer's log."""
        self.partitions.note(operations, now)
        if self.partitions.current.logs_are_read and operations:
            first = self.log.sequence + 1 - len(operations)
            self.eager_news.add_own(first, len(operations))
            self.exchanges.hurry()

    def peer_ids(self, members: Iterable[Member]) -> list[PeerId]:
        """The ids of these members, without unknown ones."""
        states = (self.membership.resolve(member) for member in members)
        return [state.peer_id for state in states if state is not None]


FLOORS_SECONDS: Final = 1.0
"""Shortest time between two signatures made only to announce which floors this peer has."""


class OwnRecord:
    """`describe` returns what this peer offers now; the rest is filled in here."""

    def __init__(
        self,
        signer: Signer,
        describe: Callable[[], PeerRecord],
        config: GossipConfig,
        membership: Membership,
        log: OwnLog,
        floors: FloorSync,
    ) -> None:
        self.leaving = False
        self.duplicate: PeerRecord | None = None
        """A record by which another process uses this peer's identity, for good."""
        self.describe = describe
        self._signer = signer
        self._config = config
        self._membership = membership
        self._log = log
        self._floors = floors
        self._changed = True
        self._signed_at = -math.inf

    def changed(self) -> None:
        """`describe` would say something else now."""
        self._changed = True

    def leave(self) -> None:
        """The record says from now on that this peer leaves."""
        self.leaving = self._changed = True

    def signed(self, now: float) -> SignedRecord:
        """The record, signed anew when something changed."""
        own = self._membership.own
        interval = self._config.head_interval_seconds(len(self._membership.live()))
        horizon = self._floors.records.floors.horizon_hash
        moved = own.signed is not None and (
            own.log_sequence != self._log.sequence
            or own.floors_horizon != horizon
            or not self._floors.shows_apart(own.floors_seen)
        )
        if (
            self._changed
            or (moved and now >= self._signed_at + interval)
            or (self._floors.crowded and now >= self._signed_at + max(interval, FLOORS_SECONDS))
        ):
            end, floors_hash, seen = self._floors.announcement(now, interval)
            record = msgspec.structs.replace(
                self.describe(),
                peer_id=own.peer_id,
                cluster=self._config.cluster,
                incarnation=self._log.incarnation,
                sequence=own.record_sequence + 1,
                head=self._log.head,
                leaving=self.leaving,
                floors_horizon=horizon,
                floors_end=end,
                floors_hash=floors_hash,
                floors_seen=seen,
            )
            self._membership.observe_record(record, sign_peer_record(record, self._signer), now)
            self._changed, self._signed_at = False, now
        assert own.signed is not None
        return own.signed

    def seen(self, record: PeerRecord) -> bool:
        """A record that this peer's key signed but this process did not: its identity is used
        twice. Whether the log was begun anew for it.

        Records of a past life are lower and never get here. The newer process is to go, but at
        first it sees lower records only. So the older one makes itself just higher: then the newer
        one sees that a live peer signs with its key, by so little above its own that it is a defence,
        and goes. The older one defends itself against each newcomer.
        """
        if record.incarnation < self._log.incarnation:
            return False  # another member told of it as well, before the log that was begun for it was announced
        # Of a life that ended, while this machine's clock was ahead of what it is now.
        past = record.leaving
        if not past and record.incarnation < self._log.incarnation + self._config.defence_margin:
            self.duplicate = record
            return False
        if record.incarnation + 1 >= MAX_INCARNATION:
            return False
        # Just above the other record, and not above what refutations have raised the claims to: by that
        # little the other one tells a defence from a third process.
        self._changed = True
        self._log.restart(record.incarnation + 1)
        return True
