"""The directory of locations, whichever part of it this peer keeps. Pure.

Puts together the views (`directory`), those of them that this peer keeps as a home (`home_views`), and its own pushes
to homes (`home_pushes`); follows the live members, of which the table of homes is made; and moves from one way of
keeping the directory to the other (`DirectoryMode`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Final

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import HomePush
from p2pstore.gossip.homes.home_pushes import HomePushes
from p2pstore.gossip.homes.home_updates import CheckedUpdate
from p2pstore.gossip.homes.home_views import HomeViews
from p2pstore.gossip.homes.partition_homes import (
    NO_HOMES,
    ClusterLoad,
    DirectoryMode,
    HomeTable,
    KeptDirectory,
    Phase,
)
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.snapshots import FollowedLogs
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.member_table import MemberTable
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    Member,
    PeerId,
    PeerRecord,
    decode_location,
    member_of,
    partition_of,
)
from p2pstore.home_messages import PartitionSet
from p2pstore.objects import DIGEST_BYTES

MODE_SECONDS: Final = 1.0
ACQUAINTANCE_SECONDS: Final = 1.0
FORGOTTEN_AT_ONCE: Final = 16
"""Views of logs that are let go of in one step."""
NEAR_LIMIT: Final = 0.8
"""From this share of the limits on it may soon matter whether all logs are followed."""
FOLLOW_SECONDS: Final = 50e-6
"""For each member: shortest time between two looks at the homes of now, which cost more the more there are."""
STEP_SECONDS: Final = 1e-3
"""An event within this time of another may be handled in one step with it."""
_REMOVED: Final = 0x80
_FLAGS: Final = LOCATION_BYTES - 1


class PartitionedDirectory:
    """See the module's docstring."""

    def __init__(
        self,
        config: GossipConfig,
        membership: Membership,
        directory: Directory,
        log: OwnLog,
        rng: Random,
    ) -> None:
        self.mode = DirectoryMode(config.directory_setting, config.mode_limits)
        self.load = ClusterLoad(config.mode_limits)
        self._membership = membership
        self._directory = directory
        self._log = log
        self._own = membership.own.member
        self.current = CurrentHomes(membership)
        self.pushes = HomePushes(
            self._own, log, config.partitions, rng, self._peer_of, self.current.keeps_partitions
        )
        self.views = HomeViews(config.partitions, directory)
        directory.follows_logs = self.mode.follows_logs
        self._followed = FollowedLogs(membership, directory)
        self._follow_at = -math.inf
        self._agreed_at = math.inf
        """When another peer knew the same members, for the first time."""
        self._mode_at = -math.inf
        self._deferred_until = -math.inf
        self._load = 0.0
        self._to_forget: list[Member] = []

    def document(self) -> dict[str, object]:
        """For the statistics."""
        return {
            "setting": self.mode.setting,
            "mode": self.mode.phase.value,
            "changes_per_second": round(self.load.changes_per_second, 1),
            "home_partitions": len(self.current.table.by_home.get(self._own, ())),
            "home_locations": self.views.record_count,
            "cached_locations": self._directory.word_count,
            "not_confirmed_by_homes": self.pushes.lacking(),
            "partitions_sent_whole": self.pushes.whole_partitions_sent,
        }

    def note(self, operations: Sequence[bytes], now: float) -> None:
        """This peer's log has new operations, its last ones."""
        self._follow_members(now)
        self.pushes.note(operations)

    def take_pushes(self, now: float) -> list[HomePush]:
        self._follow_members(now)
        return self.pushes.take(now)

    def pushed(
        self, token: int, behind: list[int] | None, rivals: Iterable[Location], now: float
    ) -> None:
        """The outcome of a `Push`: partitions that the home wants whole (None when it did not answer), and other
        versions, at others, of keys that were pushed.

        Their holders are told of this peer's own version: a holder of an older one gives it up, and a holder of a newer
        one answers with that. Only its own word gives up a copy here.
        """
        home = self.pushes.tokens.get(token)
        self.pushes.answered(token, behind, now)
        for rival in rivals:
            held = self._log.held(rival.record.digest)
            if held is None or rival.member == self._own:
                continue
            if rival.member == home:
                place, packed = (rival.incarnation, [rival.sequence]), rival.record.encode()
                self._directory.heard(rival.member, *place, packed, now)
            else:
                self.pushes.tell(rival.member, held)

    def take(
        self, owner: Member, checked: CheckedUpdate, max_rivals: int, now: float
    ) -> tuple[list[int], list[Location]]:
        """Take in a push, or a part of one: the partitions that its sender should send whole, and at most so
        many other versions of what it pushed."""
        behind: list[int] = []
        if self.mode.shown is KeptDirectory.PARTITIONED:
            with self._directory.changing_rows():
                behind = self.views.take(owner, checked, now)
        words = [each for each in checked.operations if self.mode.follows_logs or not each[0]]
        sequences = [sequence for _, sequence, _ in words]
        packed = b"".join(operation for _, _, operation in words)
        self._directory.heard(owner, checked.incarnation, sequences, packed, now)
        return behind, self._rivals(owner, checked.operations, checked.sets, max_rivals)

    def _rivals(
        self,
        owner: Member,
        operations: list[tuple[int, int, bytes]],
        sets: Iterable[PartitionSet],
        limit: int,
    ) -> list[Location]:
        """Other versions of the same keys at others, where one of the two holders is in partitioned mode: it may not
        hear of the other one otherwise."""
        keeps = self.current.keeps_partitions
        owner_keeps = keeps(owner)
        if not limit or not (owner_keeps or self.current.any_keeps_partitions):
            return []
        digests = [
            operation[:DIGEST_BYTES]
            for _, _, operation in operations
            if not operation[_FLAGS] & _REMOVED
        ]
        found: list[Location] = []
        for digest in dict.fromkeys([*digests, *self.views.contested(sets)]):
            others = self._other_versions(owner, digest)
            found += [each for each in others if owner_keeps or keeps(each.member)]
            if len(found) >= limit:
                break
        return found[:limit]

    def _other_versions(self, owner: Member, digest: bytes) -> list[Location]:
        known = [each for each in self._directory.holders(digest) if not each.hearsay]
        if (held := self._log.held(digest)) is not None:
            place = self._log.incarnation, self._log.sequence
            known.append(Location(self._own, *place, decode_location(held)))
        mine = {location.record.version for location in known if location.member == owner}
        return [
            location
            for location in known
            if location.member != owner
            and not location.hidden
            and any(
                (location.record.version.clock, location.record.version.writer)
                != (version.clock, version.writer)
                for version in mine
            )
        ]

    def vouches(self, digest: bytes, now: float) -> bool:
        """Whether a key that is not known here was nowhere a second ago. Homes say so with their answers. A peer
        that has just started does not know yet of which members it should have heard."""
        if now < self._agreed_at + ACQUAINTANCE_SECONDS:
            return False
        if self.mode.follows_logs and self._followed.complete(now):
            return True
        if self.mode.shown is not KeptDirectory.PARTITIONED:
            return False
        partition = partition_of(digest)
        return self._own in self.current.table.homes[partition] and self.views.complete(
            partition, self._membership.version, self._live_owners(), now
        )

    def observe_record(self, known: PeerRecord | None, record: PeerRecord, now: float) -> None:
        """A member's record came in place of the one known before."""
        if known is None:
            return
        before = known.incarnation, known.head.sequence
        self._followed.moved(member_of(record.peer_id), before, now)
        if (known.incarnation, known.directory) != (record.incarnation, record.directory):
            self.current.modes_changed()
            self.pushes.renewed(member_of(record.peer_id), now)

    def defer(self, now: float) -> None:
        """Choose no homes in this step, which has done long work already: choosing takes 3 ms."""
        self._deferred_until = now + STEP_SECONDS

    def hide(self, member: Member) -> None:
        self._directory.hide(member)
        with self._directory.changing_rows():
            self.views.hide(member)

    def show(self, member: Member) -> None:
        """The member is back. Where it was dropped meanwhile, what its record says of its log counts again."""
        state = self._membership.resolve(member)
        record = None if state is None or self._directory.has_view(member) else state.record
        if record is not None:
            self._directory.observe_head(member, record.incarnation, record.head)
        self._directory.show(member)
        with self._directory.changing_rows():
            self.views.show(member)

    def drop(self, member: Member) -> None:
        """Forget that the member ever had a log, and what it held."""
        self._directory.drop(member)
        with self._directory.changing_rows():
            self.views.drop(member)

    def housekeep(self, now: float, *, agreed: bool) -> bool:
        """Call it a few times a second. Whether the own record changes. `agreed`: another knows the same members."""
        if agreed and self._agreed_at == math.inf:
            self._agreed_at = now
        self._follow_members(now)
        others_ask = self.current.partitioned_members > 0 or self._load > NEAR_LIMIT
        if self.mode.follows_logs and others_ask:
            self._followed.mark(now)
        self._let_go()
        if now < max(self._mode_at + MODE_SECONDS, self._deferred_until):
            return False
        self._mode_at = now
        self.pushes.keepers(self.current.partitioned_members, now)
        if self.mode.phase is not Phase.FULL:
            self._tidy_views(now)
        return self._decide(now)

    def _tidy_views(self, now: float) -> None:
        with self._directory.changing_rows():
            self.views.housekeep(self.current.table.by_home.get(self._own, ()), now)
            for member in self.views.owners():
                if self._membership.resolve(member) is None:
                    self.views.drop(member)

    def _decide(self, now: float) -> bool:
        """Go to another mode if it is time. Whether the record says something else then."""
        before = self.mode.shown
        if self.mode.setting == "auto":
            self._load = self.load.of(self._membership.live(), now)
        asks = self._load > NEAR_LIMIT or self.mode.phase is Phase.WIDENING
        if self.mode.tick(
            self._load,
            views_complete=asks and self.mode.follows_logs and self._followed.complete(now),
            homes_complete=self.mode.phase is Phase.NARROWING and self._homes_complete(now),
            now=now,
        ):
            self._change_phase()
        return self.mode.shown is not before

    def _change_phase(self) -> None:
        self._directory.follows_logs = self.mode.follows_logs
        if self.mode.phase is Phase.PARTITIONED:
            self._to_forget = [state.member for state in self._membership.states()]
        elif self.mode.phase is Phase.WIDENING:
            self._to_forget = []
            self._followed.begin_anew()
        elif self.mode.phase is Phase.FULL:
            with self._directory.changing_rows():
                self.views.clear()

    def _let_go(self) -> None:
        """Free the views of logs that are not followed any more, a few at a time."""
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._to_forget))):
            self._directory.forget(self._to_forget.pop())

    def _follow_members(self, now: float) -> None:
        due = max(self._follow_at, self._deferred_until)
        if self.pushes.table is not self.current.table and now >= due:
            self.pushes.homes_changed(self.current.table, now)
            self._follow_at = now + FOLLOW_SECONDS * len(self.current.table.members)

    def _live_owners(self) -> Iterator[tuple[Member, int]]:
        for state in self._membership.others():
            yield state.member, state.record_incarnation

    def _homes_complete(self, now: float) -> bool:
        return all(
            self.views.complete(partition, self._membership.version, self._live_owners(), now)
            for partition in self.current.table.by_home.get(self._own, ())
        )

    def _peer_of(self, member: Member) -> PeerId | None:
        state = self._membership.resolve(member)
        return None if state is None else state.peer_id


FOLLOWED_AT_ONCE: Final = 128
"""Members that may have come since the table of homes was made: 500 take 4 ms, and choosing homes from it 3."""


class CurrentHomes:
    """The homes among the members that are alive now, and how those keep the directory."""

    def __init__(self, members: MemberTable) -> None:
        self._members = members
        self._seen_version = -1
        self._newest = NO_HOMES
        self.full_members = self.partitioned_members = 0
        """Other members in either mode, when `table` was last asked for."""

    @property
    def table(self) -> HomeTable:
        """The table for the members that are alive now."""
        if self._seen_version != self._members.version:
            self._seen_version = self._members.version
            live = self._members.homes()
            self._newest = self._newest.changed(frozenset(state.member for state in live))
            others = self._members.others()
            partitioned = KeptDirectory.PARTITIONED
            self.partitioned_members = sum(state.directory == partitioned for state in others)
            self.full_members = len(others) - self.partitioned_members
        return self._newest

    @property
    def logs_are_read(self) -> bool:
        """Whether any other member follows whole logs: only then are operations worth gossiping."""
        return self.table is not NO_HOMES and self.full_members > 0

    @property
    def any_keeps_partitions(self) -> bool:
        return self.table is not NO_HOMES and self.partitioned_members > 0

    def of(self, digest: bytes) -> tuple[Member, ...]:
        """The key's home members, best first."""
        return self.table.homes[partition_of(digest)]

    def keep_up(self) -> None:
        """Follow the members before more have come than a step can take in."""
        if len(self._members.live()) - len(self._newest.members) >= FOLLOWED_AT_ONCE:
            _ = self.table

    def modes_changed(self) -> None:
        """A member began anew, or keeps the directory in another way."""
        self._seen_version = -1

    def keeps_partitions(self, member: Member) -> bool:
        state = self._members.resolve(member)
        return (
            state is not None
            and state.signed is not None
            and state.directory == KeptDirectory.PARTITIONED
        )
