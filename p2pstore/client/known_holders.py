"""Where to read what others hold, without asking the local peer for a plan.

Which members hold an object stands in the peer's table (`known_elsewhere`). How to get to them, and the tickets for
that, the peer says in its plans, and what it said of a member a moment ago still holds. So of objects whose
holders were all named lately, the client makes the plan itself. When that does not lead to the object, the peer is
asked as ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace as replace_copy
from itertools import takewhile
from random import Random
from typing import Final, NamedTuple

from msgspec.structs import replace

from p2pstore.client.known_elsewhere import KnownElsewhere, KnownRecord
from p2pstore.local.local_messages import Holder, PlanItem
from p2pstore.location_table import LOCATION
from p2pstore.objects import SIZE_UNIT_BYTES, ZERO_VERSION, Version
from p2pstore.transfer.data_messages import Keeps, Ticket
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.arriving import Announced
from p2pstore.transfer.transport import RemoteCopy

TRUSTED_SECONDS: Final = 50.0
"""A ticket is good for 60 s at least when the peer hands it out."""
ASKED_SECONDS: Final = 10.0
"""After a member did not deliver."""
MAX_HOLDERS: Final = 1024
DRAM, SSD = 0, 1
"""Tiers; the second one of what is on its holder's SSD alone."""
HOLDERS_PER_PLAN: Final = 8


class OnlyHolder(NamedTuple):
    """The one peer, of this host or another, that is known to hold an object, and wrote it: how to get there, a hint
    where it has the object, and about how long that is."""

    copy: RemoteCopy
    slot_hint: int
    expected_bytes: int


class _Named(NamedTuple):
    """What was said of a member, and until when that is trusted."""

    trusted_until: float
    holder: Holder
    copy: RemoteCopy


class OwnPlan(PlanItem, frozen=True):
    """Made by the client itself. When it fails, that says nothing of those whom it names: they may have moved, or
    changed their keys."""


class KnownHolders:
    """See the module's docstring. Any thread may use it."""

    def __init__(self, elsewhere: KnownElsewhere | None, rng: Random) -> None:
        self._elsewhere = elsewhere
        self._rng = rng
        self._named: dict[int, _Named] = {}
        self._asked_until: dict[int, float] = {}
        """Members that did not deliver: for a while the peer says which holder comes first."""
        self._changing = threading.Lock()

    def close(self) -> None:
        """Let go of the table."""
        self._elsewhere = None

    def note(self, plans: Iterable[PlanItem]) -> None:
        """The peer named these holders."""
        trusted_until = time.monotonic() + TRUSTED_SECONDS
        with self._changing:
            for plan in plans:
                for holder in () if plan.through_peer else plan.holders:
                    self._named.pop(holder.member, None)
                    way = _way_to(holder)
                    named = _Named(trusted_until, holder, way)
                    self._named[holder.member] = named
            while len(self._named) > MAX_HOLDERS:
                del self._named[next(iter(self._named))]

    def forget(self, members: Iterable[int]) -> None:
        """These did not deliver: the peer may know better where they are, or whether."""
        now = time.monotonic()
        with self._changing:
            for member in members:
                self._named.pop(member, None)
                self._asked_until.pop(member, None)
                self._asked_until[member] = now + ASKED_SECONDS
            for member in list(
                takewhile(lambda each: self._asked_until[each] <= now, self._asked_until)
            ):
                del self._asked_until[member]

    def only(self, digest: bytes, most_bytes: float = 0) -> OnlyHolder | None:
        """The holder, when just one is known, and objects of up to `most_bytes` are best asked for there as well; None
        when `plan` is to say more."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return None
        found = elsewhere.only_record(digest)
        if found is None:
            return None
        member, record = found
        *_, slot, size, _ = LOCATION.unpack(record)
        named = self._trusted(member, time.monotonic())
        expected_bytes = int.from_bytes(size, "little") * SIZE_UNIT_BYTES
        if named is None or _goes_through_peer(named.holder, max(expected_bytes, most_bytes)):
            return None
        return OnlyHolder(named.copy, slot, expected_bytes)

    def only_many(
        self, digests: Sequence[bytes], most_bytes: float = math.inf
    ) -> list[RemoteCopy | None]:
        """For many objects, of which nobody wants one that is longer than that, `only` without what is known of each:
        how to get to the holder."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return [None] * len(digests)
        members = elsewhere.only_members(b"".join(digests))
        now = time.monotonic()
        ways = {member: self._direct_way(member, most_bytes, now) for member in set(members)}
        if len(ways) == 1:  # nearly always
            return list(ways.values()) * len(members)
        return list(map(ways.__getitem__, members))

    def _direct_way(self, member: int, most_bytes: float, now: float) -> RemoteCopy | None:
        named = self._trusted(member, now)
        if named is None or _goes_through_peer(named.holder, most_bytes):
            return None
        return named.copy

    def plan(self, digest: bytes) -> OwnPlan | None:
        """Holders of the newest version that is known, best first; None when the peer must be asked."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return None
        records = elsewhere.holders(digest)
        if not records:
            return None
        records = self._newest(records)
        holders = self._holders(records)
        return None if holders is None else OwnPlan(holders)

    def _newest(self, records: Sequence[KnownRecord]) -> list[KnownRecord]:
        """Those of the newest version, when its writer vouches for it; else nothing: the local peer may know more."""
        vouched = max((each.version for each in records if each.is_by_member), default=ZERO_VERSION)
        if any(each.version[:2] > vouched[:2] for each in records):
            return []
        some = [record for record in records if record.version == vouched]
        if len(some) > 1:
            self._rng.shuffle(some)  # readers do not all go to the same one
        return some[:HOLDERS_PER_PLAN]

    def _holders(self, records: Sequence[KnownRecord]) -> list[Holder] | None:
        if not records:
            return None
        now, holders = time.monotonic(), []
        for record in records:
            named = self._trusted(record.member, now)
            if named is None or _goes_through_peer(
                named.holder, record.size_units * SIZE_UNIT_BYTES
            ):
                return None
            clock, writer, root = record.version
            holders.append(
                replace(
                    named.holder,
                    slot=record.slot,
                    size_units=record.size_units,
                    clock=clock,
                    writer=writer,
                    root=root,
                    tier=record.tier,
                )
            )
        if len(holders) > 1:
            holders.sort(key=lambda holder: not holder.same_host)
        return holders

    def _trusted(self, member: int, now: float) -> _Named | None:
        named = self._named.get(member)
        if named is None or named.trusted_until < now:
            return None
        asked = self._asked_until and self._asked_until.get(member, 0.0) > now
        return None if asked else named


def _goes_through_peer(holder: Holder, length_bytes: float) -> bool:
    """Whether the local peer has a faster way to an object of that length, and is to say whether it takes it."""
    return 0 < holder.through_peer_bytes <= length_bytes


def is_far(copy: RemoteCopy) -> bool:
    """Whether a copy is on another host, and can be asked for there."""
    return not copy.same_host and bool(copy.data)


def _way_to(holder: Holder) -> RemoteCopy:
    """To whatever a holder has in memory that it wrote itself."""
    return replace_copy(
        remote_copy(replace(holder, tier=DRAM)), announced=Announced(holder.member & 0xFFFF)
    )


def remote_copy(holder: Holder) -> RemoteCopy:
    """A planned holder as transports want it."""
    version = Version(holder.clock, holder.writer, holder.root)
    return RemoteCopy(
        peer_id=holder.peer_id,
        data=tuple(holder.data),
        ticket=GrantedTicket(
            Ticket(holder.ticket_claims, holder.ticket_signature), holder.ticket_secret
        ),
        member=holder.member,
        socket=holder.socket,
        same_host=holder.same_host,
        slot=holder.slot,
        version=version,
        announced=Announced(holder.member & 0xFFFF, version),
        length_bytes=holder.size_units * SIZE_UNIT_BYTES,
        keeps=Keeps.BY_PEER,
        on_ssd=holder.tier == SSD,
    )
