"""Which members are homes now: the table of homes follows the live members. Pure."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.homes.directory_mode import KeptDirectory
from p2pstore.gossip.homes.partition_homes import NO_HOMES, HomeTable, partition_of
from p2pstore.gossip.members.member_table import MemberTable
from p2pstore.gossip.records import Member

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
        """Whether any other member is in partitioned mode."""
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
        """Whether a member is in partitioned mode."""
        state = self._members.resolve(member)
        return (
            state is not None
            and state.signed is not None
            and state.directory == KeptDirectory.PARTITIONED
        )
