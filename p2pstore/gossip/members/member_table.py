"""The members that are known: their states, their places, and who is forgotten when there are too many. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.records import (
    MAX_PARTICIPATIONS,
    Member,
    Participation,
    PeerId,
    PeerRecord,
    SignedRecord,
    format_peer_id,
    member_of,
    public_key_from_peer_id,
    read_peer_record,
)

MAX_INCARNATION: Final = 1 << 62
"""Claims and records of higher incarnations are refused."""
PARSED_RECORDS: Final = 256
"""Records that are kept parsed. A parsed record takes four times the memory of its signed bytes, which are kept of all
members; parsing takes a microsecond."""
MAX_HEARSAY: Final = 1024
"""Peers that are remembered only because a member claims that they are dead."""
UNMET_FOR_EACH_MET: Final = 8


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Timing and bounds; the defaults are memberlist's for a local network."""

    probe_interval_seconds: float = 1.0
    probe_timeout_seconds: float = 0.5
    """How long a direct ping may take before others are asked."""
    indirect_probes: int = 3
    """Number of other members that are asked to ping one that did not answer."""
    suspicion_multiplier: float = 4.0
    retransmit_multiplier: int = 4
    claims_per_message: int = 32
    recontact_interval_seconds: float = 1.0
    observes: bool = False
    """Whether this peer is a reader: it is no home, and no member refutes what it holds of others (`answered`)."""
    dead_kept_seconds: float = 24 * 3600.0
    max_members: int = 10_000
    met_before_trust: int = 64
    """With fewer members that this peer has met, peers that others only tell of do not count."""


parsed = lru_cache(maxsize=PARSED_RECORDS)(read_peer_record)
"""The content of a verified record."""


@dataclass(slots=True)
class MemberState:
    """The state of one member. `incarnation` is the highest that any evidence named."""

    peer_id: PeerId
    member: Member
    status: Status
    incarnation: int
    status_since: float
    heard_at: float = -math.inf
    """When something last came from the peer itself; minus infinity before the first time."""
    introduced_by: Member = 0
    """The member that told of it; 0 once it has been met."""
    signed: SignedRecord | None = None
    """The member's latest record. What it says that is wanted of all members at once stands here, too:"""
    record_incarnation: int = 0
    record_sequence: int = 0
    log_sequence: int = 0
    """Where its log stood."""
    location_count: int = 0
    """How many it held there."""
    memory_capacity: int = 0
    memory_used: int = 0
    memory_coldest: int = 0
    ssd_capacity: int = 0
    ssd_used: int = 0
    packed_control: str = ""
    directory: int = 0
    floors_horizon: int = 0
    floors_end: int = 0
    floors_hash: int = 0
    floors_seen: int = 0
    leaving: bool = False
    """Whether it says there that it left on purpose."""
    checkpoints: tuple[Participation, ...] = ()

    @property
    def control(self) -> tuple[str, ...]:
        """Its control addresses. As one string they take half the memory."""
        return tuple(self.packed_control.split("\n")) if self.packed_control else ()

    @property
    def alive(self) -> bool:
        """Whether it counts as a member: alive, or suspected but not yet given up."""
        return self.status <= Status.SUSPECT

    @property
    def live(self) -> bool:
        """Whether it is `alive`, and its record is known."""
        return self.status <= Status.SUSPECT and self.signed is not None

    @property
    def record(self) -> PeerRecord | None:
        """All that its record says. Costs a microsecond: ask for `signed` to know whether there is one."""
        return None if self.signed is None else parsed(self.signed)

    def note(self, record: PeerRecord, signed: SignedRecord) -> None:
        """Its record is this one from now on."""
        self.signed = signed
        self.record_incarnation, self.record_sequence = record.incarnation, record.sequence
        self.log_sequence, self.location_count = record.head.sequence, record.head.count
        self.memory_capacity, self.memory_used = record.memory_capacity, record.memory_used
        self.memory_coldest = record.memory_coldest
        self.ssd_capacity, self.ssd_used = record.ssd_capacity, record.ssd_used
        self.packed_control = "\n".join(record.control)
        self.directory, self.floors_horizon = record.directory, record.floors_horizon
        self.floors_end, self.floors_hash = record.floors_end, record.floors_hash
        self.floors_seen = record.floors_seen
        self.leaving = record.leaving
        self.checkpoints = tuple(record.checkpoints[:MAX_PARTICIPATIONS])


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A member's status changed; `old` is None for one that was not known."""

    peer_id: PeerId
    member: Member
    old: Status | None
    new: Status
    by: Member | None = None
    """The member that claims it; None when this peer found it out."""


class MemberTable:
    """All known members, living and dead, and how many more there may be. This peer is one of them.

    A peer is *met* when something came from it on a channel of its own; others are members on their introducer's word.
    A full table forgets the dead that only claims name, the longest dead, then unmet ones of the busiest introducer.
    """

    def __init__(self, me: PeerId, incarnation: int, config: MembershipConfig) -> None:
        self.me = me
        self.config = config
        self.version = 0
        """Grows whenever the set of live members changes."""
        self._states: dict[PeerId, MemberState] = {}
        self._by_member: dict[Member, MemberState] = {}
        self._changes: list[MemberChange] = []
        self._gone: dict[PeerId, None] = {}
        """The dead that have a record, the longest dead first."""
        self._hearsay: dict[PeerId, None] = {}
        """The dead that only claims name, the oldest first."""
        self._met = 0
        self._introduced: Counter[Member] = Counter()
        """Unmet members of each introducer."""
        self._live: list[MemberState] | None = None
        self._others: list[MemberState] | None = None
        self.own = self.add(me, Status.ALIVE, incarnation, -math.inf)
        """This peer's own state; its incarnation is above every accusation."""
        self._changes.clear()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, peer_id: PeerId) -> MemberState | None:
        return self._states.get(peer_id)

    def resolve(self, member: Member) -> MemberState | None:
        """The state of the peer with this short name; None for an unknown one."""
        return self._by_member.get(member)

    def states(self) -> Iterable[MemberState]:
        return self._states.values()

    def live(self) -> list[MemberState]:
        """Members with a record, alive or suspected; this peer too once it has a record."""
        if self._live is None:
            self._live = [state for state in self._states.values() if state.live]
        return self._live

    def others(self) -> list[MemberState]:
        """`live()` without this peer."""
        if self._others is None:
            self._others = [state for state in self.live() if state is not self.own]
        return self._others

    def homes(self) -> list[MemberState]:
        """`live()` as every member knows it: without this peer when it only observes."""
        return self.others() if self.config.observes else self.live()

    def is_live(self, peer_id: PeerId) -> bool:
        """Whether a peer counts as alive and its record is known; this peer always does."""
        state = self._states.get(peer_id)
        return peer_id == self.me or (state is not None and state.live)

    @property
    def dead_count(self) -> int:
        return len(self._gone)

    def dead(self, place: int) -> MemberState:
        """The dead member at this place, below `dead_count`."""
        return self._states[next(islice(self._gone, place, None))]

    def name_of(self, peer_id: PeerId) -> str:
        """The peer's name, or the end of its id where the name is not known."""
        state = self._states.get(peer_id)
        if state is not None and (record := state.record) is not None and record.name:
            return record.name
        return format_peer_id(peer_id)[-8:]

    def name_of_member(self, member: Member) -> str:
        """The same by a member's short name, which stands in hexadecimal for an unknown one."""
        state = self.resolve(member)
        return f"{member:016x}" if state is None else self.name_of(state.peer_id)

    def take_changes(self) -> list[MemberChange]:
        """Changes of other members' status since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def add(
        self,
        peer_id: PeerId,
        status: Status,
        incarnation: int,
        now: float,
        introducer: PeerId | None = None,
    ) -> MemberState:
        """Add a member; `introducer` told of it (None: it was met, or only claims name it)."""
        state = MemberState(peer_id, member_of(peer_id), status, incarnation, now)
        self._states[peer_id] = state
        self._by_member[state.member] = state
        self._changes.append(MemberChange(peer_id, state.member, None, status))
        self.note_gone(state)
        if introducer is not None:
            by = self._states.get(introducer)
            # The number that the introducer's state has, where there is one, takes no memory.
            state.introduced_by = member_of(introducer) if by is None else by.member
            self._introduced[state.introduced_by] += 1
        return state

    def set_status(
        self, state: MemberState, status: Status, now: float, by: Member | None = None
    ) -> None:
        """Change a member's status; `by` claims it (None: this peer found it out)."""
        old, was_alive = state.status, state.alive
        if status == old:
            return
        state.status, state.status_since = status, now
        self._changes.append(MemberChange(state.peer_id, state.member, old, status, by))
        self.note_gone(state)
        if state.alive != was_alive:
            self.live_changed()

    def meet(self, state: MemberState, now: float) -> None:
        """Something came from the member itself."""
        self._met += state.heard_at == -math.inf
        state.heard_at = now
        self._forget_introducer(state)

    def believes(self, introducer: PeerId) -> bool:
        """Whether a peer counts as a member on the word of this one."""
        if self._met < self.config.met_before_trust:
            return False
        return self._introduced[member_of(introducer)] < UNMET_FOR_EACH_MET * self._met

    def make_room(self, introducer: PeerId | None) -> bool:
        """Make room for one more member (`introducer` None: it was met). False when all places are taken."""
        if len(self._states) < self.config.max_members:
            return True
        oldest = next(chain(self._hearsay, self._gone), None)
        if oldest is None and self._introduced:
            most, count = self._introduced.most_common(1)[0]
            if introducer is None or self._introduced[member_of(introducer)] + 1 < count:
                unmet = (s.peer_id for s in self._states.values() if s.introduced_by == most)
                oldest = next(unmet, None)
        if oldest is None:
            return False
        self.forget(self._states[oldest])
        return True

    def make_room_for_hearsay(self) -> bool:
        """Make room for a peer that only claims name: it takes the place of another such, never a member's."""
        full = len(self._states) >= self.config.max_members
        if full or len(self._hearsay) >= MAX_HEARSAY:
            if not self._hearsay:
                return False
            self.forget(self._states[next(iter(self._hearsay))])
        return True

    def note_gone(self, state: MemberState) -> None:
        """Keep the dead in the order in which they are forgotten. Call it when a member's first record came."""
        if state.peer_id == self.me:
            return
        self._gone.pop(state.peer_id, None)
        self._hearsay.pop(state.peer_id, None)
        if not state.alive:
            (self._hearsay if state.signed is None else self._gone)[state.peer_id] = None

    def forget(self, state: MemberState) -> None:
        del self._states[state.peer_id]
        if self._by_member.get(state.member) is state:
            del self._by_member[state.member]
        self._met -= state.heard_at > -math.inf
        self._forget_introducer(state)
        self._gone.pop(state.peer_id, None)
        self._hearsay.pop(state.peer_id, None)
        if state.live:
            self.live_changed()

    def expire(self, now: float) -> list[MemberState]:
        """Forget the members that have been dead for `dead_kept_seconds`. They are returned."""
        limit = now - self.config.dead_kept_seconds
        expired = [
            state
            for dead in (self._gone, self._hearsay)
            for state in takewhile(
                lambda state: state.status_since < limit, map(self._states.__getitem__, dead)
            )
        ]
        for state in expired:
            self.forget(state)
        return expired

    def live_changed(self) -> None:
        self._live = self._others = None
        self.version += 1

    def _forget_introducer(self, state: MemberState) -> None:
        if state.introduced_by:
            self._introduced[state.introduced_by] -= 1
            if not self._introduced[state.introduced_by]:
                del self._introduced[state.introduced_by]
            state.introduced_by = 0


def check_claim(claim: Claim) -> None:
    """Raise `ProtocolError` for a claim that makes no sense."""
    public_key_from_peer_id(claim.peer_id)
    if claim.status < 0:
        raise ProtocolError(f"a claim of status {claim.status}")
    if not 0 <= claim.incarnation < MAX_INCARNATION:
        raise ProtocolError(f"a claim about incarnation {claim.incarnation}")
