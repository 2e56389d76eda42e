"""Where one object is read, decided in one place. Pure.

A read has a list of places, in the order of their cost, and tries each once:

1. HERE: the local peer's memory, which is mapped.
2. OWN_PLAN: all holders that the local peer's table of locations names.
3. PLAN: what the local peer answers. Its places, and then those of one more plan without the holders that failed:
   a. UNDER_LEASE: the local peer's memory, where the object cannot move meanwhile;
   b. THROUGH_PEER: the local peer brings it from its SSD, or by a way that the client lacks;
   c. KEPT: as b., because a holder said that the object is hot; the local peer keeps it;
   d. HOLDERS: other peers, by shm, rdma or tcp (`p2pstore.transfer.failover` orders copies and transports).

Where the table names one peer that holds the object, and wrote it, that is asked between 1. and 2., without a plan
(`OnlyHolder`). Batches take that and 1. in columns, and the far holders of 3. in groups (`groups_by_holder`); the rest
goes object by object through a `ReadPlan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as copy_replace
from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec.structs import replace

from p2pstore.client.answers import error_in, name_key
from p2pstore.errors import P2PStoreError, Unavailable
from p2pstore.local.local_messages import OWN_COPY, Holder, PlanItem
from p2pstore.objects import SIZE_UNIT_BYTES, Announced, Version
from p2pstore.transfer.data_messages import Keeps, Ticket
from p2pstore.transfer.failover import HolderReport, SilentHolders
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.transport import SLICED_BYTES, PullReport, RemoteCopy
from p2pstore.wire import Code

PLANS: Final = 2
"""How often the local peer is asked for holders: again after all that it named have failed."""
DRAM, SSD = 0, 1
"""Tiers; SSD is that of an object which is on its holder's SSD alone."""
_OF_THE_HOLDER: Final = (Code.NO_SUCH_KEY, Code.STALE, Code.DEADLINE_EXCEEDED)
"""Failures that mean the same wherever the holder is by now."""


class ReadPlace(Enum):
    """See the module's docstring."""

    HERE = auto()
    OWN_PLAN = auto()
    PLAN = auto()
    UNDER_LEASE = auto()
    THROUGH_PEER = auto()
    KEPT = auto()
    HOLDERS = auto()


FIRST_PLACES: Final = (ReadPlace.HERE, ReadPlace.OWN_PLAN)
AFTER_HERE: Final = FIRST_PLACES[1:]
WATCHED_PLACES: Final = (ReadPlace.HERE,)
"""Of a read that is traced: the local peer says where the object is known to be."""


class OwnPlan(PlanItem, frozen=True):
    """A plan made by the client itself. Its failure says little about the holders: they may have moved, or have new
    keys."""


class OnlyHolder(NamedTuple):
    """The one peer that is known to hold an object, and wrote it: the way to it, whether it is on another host, a hint
    at the slot, and about the object's length."""

    copy: RemoteCopy
    is_far: bool
    slot_hint: int
    expected_bytes: int


class ReadPlan:
    """The places of one object that are left to try. `next` gives the next one; `planned`, `failed` and `spoilt` say
    what became of it.

    `silent`: holders that did not answer in time, shared by the reads of a batch. `hot`: a holder wants the local peer
    to keep the object.
    """

    __slots__ = (
        *("_failed", "_insists", "_item", "_key", "_places", "_plans_left", "_silent"),
        *("error", "holders"),
    )

    def __init__(
        self,
        key: str,
        places: Iterable[ReadPlace] = (),
        silent: SilentHolders | None = None,
        *,
        hot: bool = False,
    ) -> None:
        self._key = key
        self._places = deque(places)
        if hot:
            self._places.append(ReadPlace.KEPT)
        self._silent = SilentHolders() if silent is None else silent
        self._plans_left = PLANS
        self._item: PlanItem | None = None
        self._failed: list[int] = []
        self._insists = False
        self.holders: list[Holder] = []
        """Of the place HOLDERS that `next` gave, in the order to try them."""
        self.error: P2PStoreError | ValueError | None = None
        """Of the place that failed last. When `next` gives None and there is no error, the object kept changing."""

    @property
    def item(self) -> PlanItem | None:
        """The plan that the places are of; None before the first one."""
        return self._item

    @property
    def failed_members(self) -> Sequence[int]:
        """Members that the next plan is to leave out, as they did not deliver."""
        return self._failed

    @property
    def is_own(self) -> bool:
        """Whether the holders were chosen by the client itself, not by the local peer."""
        return self._item is None or isinstance(self._item, OwnPlan)

    @property
    def keeps(self) -> Keeps | None:
        """Whether holders are told that the object will be kept; None: as each copy says. After KEPT failed it is not
        kept, so that holders send it."""
        return Keeps.NO if self._insists else None

    @property
    def has_other_ways(self) -> bool:
        """Whether THROUGH_PEER may fail without ending the read."""
        return self._item is None or has_ways(self._item)

    def next(self) -> ReadPlace | None:
        """The place to try now; None when nothing is left, see `error`."""
        while True:
            if not self._places:
                if not self._plans_left:
                    return None
                self._plans_left -= 1
                return ReadPlace.PLAN
            place = self._places.popleft()
            if place is ReadPlace.KEPT:
                self._insists = True  # if it fails; else nothing is asked after it
            elif place is ReadPlace.HOLDERS and not self._order_holders():
                continue
            return place

    def _order_holders(self) -> bool:
        """Whether a holder of the plan is left to ask. Without one, the plan ends the read, unless it is an own one."""
        assert self._item is not None
        self.holders = self._silent.last(self._item.holders)
        if not self.holders and not self.is_own:
            self._plans_left = 0
            self.error = self.error or Unavailable(
                f"{self._key!r}: the peers that hold it did not answer a moment ago. Retry, or see "
                "`mooncake-p2p peers`"
            )
        return bool(self.holders)

    def planned(self, item: PlanItem) -> None:
        """The answer to PLAN, OWN_PLAN, or the plan of a batch, whose places come next."""
        if self._plans_left == PLANS and not isinstance(item, OwnPlan):
            self._plans_left -= 1  # it was asked for together with others
        self._item = item
        if item.error.code and not item.local:
            self._plans_left = 0
            # An unknown key says nothing of known holders that could not be reached.
            if not isinstance(self.error, Unavailable):
                self.error = error_in(self._key, item.error)
            return
        self._places.extend(places_of(item))

    def failed(self, report: PullReport) -> None:
        """HOLDERS, or the only holder before them, did not deliver."""
        self._silent.learn(report.failures)
        self._failed += [each.member for each in blamed(report, own=self.is_own)]
        assert report.error is not None
        self.error = name_key(self._key, report.error)
        is_hot = any(each.keep for each in report.failures)
        if is_hot and not self._insists and ReadPlace.KEPT not in self._places:
            self._places.appendleft(ReadPlace.KEPT)

    def spoilt(self) -> None:
        """UNDER_LEASE gave wrong bytes, though nothing could change them: the local copy is damaged."""
        self._failed.append(OWN_COPY)


def places_of(item: PlanItem) -> tuple[ReadPlace, ...]:
    """The places of the local peer's answer, which is no error."""
    if item.local:
        return (ReadPlace.UNDER_LEASE,)
    if not item.through_peer:
        return (ReadPlace.HOLDERS,)
    return (ReadPlace.THROUGH_PEER, ReadPlace.HOLDERS) if has_ways(item) else (ReadPlace.THROUGH_PEER,)


def blamed(report: PullReport, *, own: bool) -> list[HolderReport]:
    """The holders whose failure the local peer is to hear of. `own`: the client chose them itself."""
    return [
        each for each in report.failures if not each.keep and (not own or each.code in _OF_THE_HOLDER)
    ]


def has_ways(item: PlanItem) -> bool:
    """Whether the client itself can reach a holder."""
    return any(holder.data or holder.socket for holder in item.holders)


def is_far(copy: RemoteCopy) -> bool:
    """Whether a copy is on another host, and can be asked for there."""
    return not copy.same_host and bool(copy.data)


def version_of(item: PlanItem) -> Version:
    """The version of the holder that is planned to be read first."""
    holder = item.holders[0]
    return Version(holder.clock, holder.writer, holder.root)


class HolderGroup(NamedTuple):
    """Objects of a batch, by number, that one holder is asked for together. `others`: peer ids of further holders; with
    any, the group's holder has little time."""

    holder: Holder
    numbers: list[int]
    others: set[bytes]


def groups_by_holder(items: Mapping[int, PlanItem]) -> list[HolderGroup]:
    """The objects of a batch that come best with others of their first holder: those in the memory of this host, and
    those of other hosts that are too small to be read from several holders at once."""
    groups: dict[tuple[int, bool], HolderGroup] = {}
    for number, item in items.items():
        if not item.holders or item.through_peer:
            continue
        first, *others = item.holders
        grouped = (
            first.tier == DRAM if first.same_host else first.size_units * SIZE_UNIT_BYTES < SLICED_BYTES
        )
        if grouped:
            name = first.member, bool(others)
            group = groups.setdefault(name, HolderGroup(first, [], set()))
            group.numbers.append(number)
            group.others.update(each.peer_id for each in others)
    return list(groups.values())


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


def way_to(holder: Holder) -> RemoteCopy:
    """The way to whatever a holder has in memory that it wrote itself."""
    copy = remote_copy(replace(holder, tier=DRAM))
    return copy_replace(copy, announced=Announced(holder.member & 0xFFFF))
