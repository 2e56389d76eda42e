"""Who is a member and who is alive: what SWIM's members claim of each other, as a state machine. Pure.

Whom to probe, and when a probe has failed, `probing` decides; how long a suspect has to refute, `suspicion`.

Two incarnations, kept apart on purpose. A *peer record* carries the incarnation of the process's
start (wall-clock milliseconds, and above the one saved last time); a peer's location log belongs to
it. A *claim* carries a status incarnation that starts at the same number and is raised by one
whenever the peer refutes an accusation. So a refutation is cheap: nothing is signed again and no
log is voided. A restarted process is always above all that was claimed of its predecessor, because
fewer than one accusation a millisecond is refuted. Should it not be (a forged number), the peer is
told of the accusation the first time it talks to anybody who believes it, and refutes.

Rules of precedence. Higher incarnation wins; within one, ALIVE < SUSPECT < DEAD < LEFT. The stored
incarnation is the maximum over all evidence, whatever status came with it. A record makes its peer
alive only when its incarnation is above the stored one. A record marked leaving is final: only a
record of a later incarnation brings that peer back.

What others claim is weighed. That one lives, in a higher incarnation, is believed. That one is suspected, or dead,
is a reason for an own probe at once, within bounds (`accusers`): until that has failed the accused counts, and is
read from. A verdict of others and a failed probe of this peer's own make a death. That one left, its own record
says (`leaving`), which is passed on like every other, and nobody else.

What is passed on: each refutation, and of accusations those that an own probe bears out, in this peer's own
name. So a suspicion travels by probes, one after the other, and all have looked for themselves when the first
declares the death: that rumour then needs no probes. The peer from whose channel an accusation came is its
accuser, whatever name stands in it. Who is told later what it missed (`accusation`) hears of a death as a
suspicion, and judges itself.

Who counts. A peer that something came from, on a channel of its own, has been met, and always has a place. One that
a member tells of is pinged first (`newcomers`), so that nobody counts who does not exist. In a large cluster nobody
meets all: a peer that has met `met_before_trust` members believes each member as many others as `UNMET_FOR_EACH_MET`
of these, and pings the rest. When there is no room the dead yield, then the oldest of those that
have not been met, of the member that told of most.

A timeout is judged in `tick` and nowhere else. The shell calls `tick` after it has fed in
everything that had arrived: after a stall of this process its timers have all run out while the
acknowledgements wait in the sockets, and a verdict passed before reading them would be wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.message_budget import MessageBudget
from p2pstore.gossip.exchange.rumors import ClaimRumors
from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.members.contacts import Newcomers
from p2pstore.gossip.members.suspicion import (
    LONGEST_MULTIPLIER,
    Accusers,
    LocalHealth,
    Suspicion,
    expected_confirmations,
    shortest_suspicion_seconds,
)
from p2pstore.gossip.records import (
    MAX_PARTICIPATIONS,
    Member,
    Participation,
    PeerId,
    PeerRecord,
    SignedRecord,
    member_of,
    public_key_from_peer_id,
    read_peer_record,
)

MAX_INCARNATION: Final = 1 << 62
"""Higher ones are nonsense."""
MAX_AHEAD_MS: Final = 24 * 3600 * 1000
"""Incarnations begin at a wall clock's milliseconds. Accusations that are further ahead, of this peer's clock and of
what the accused has signed itself, are passed over, so that there is always room to refute. What it has signed counts
because its clock, or this peer's, may have been wrong when it started."""
REFUTATION_ROOM: Final = 3600 * 1000
PARSED_RECORDS: Final = 256
"""Records that are at hand as objects. One takes four times the memory of its signed bytes, which all members' are
kept as, and a microsecond to parse."""
MAX_HEARSAY: Final = 1024
"""Peers that are remembered only because somebody claims that they are dead."""

UNMET_FOR_EACH_MET: Final = 8
REFUTATIONS_AT_ONCE: Final = 4
REFUTATIONS_A_SECOND: Final = 0.2
"""Each is a rumour that all members pass on. Those accused more often refute a few seconds later, for all at once."""

JUDGED_AT_ONCE: Final = 128
"""Suspects: where thousands die together, the table of homes follows some at a time."""
STALL_SECONDS: Final = 0.5
"""Between two ticks of a process that runs lie at most 0.25 s (see `machine`): more is a stall."""


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Timing and bounds; the defaults are memberlist's for a local network (see `presets` for others)."""

    probe_interval_seconds: float = 1.0
    probe_timeout_seconds: float = 0.5
    """How long a direct ping may take before others are asked."""
    indirect_probes: int = 3
    """How many others are asked to ping who did not answer."""
    suspicion_multiplier: float = 4.0
    retransmit_multiplier: int = 4
    claims_per_message: int = 32
    recontact_interval_seconds: float = 1.0
    observes: bool = False
    """Whether this peer is a reader: members do not know it, so it is no home, and nobody refutes what it holds of
    others (`answered`)."""
    dead_kept_seconds: float = 24 * 3600.0
    max_members: int = 10_000
    met_before_trust: int = 64
    """With fewer members that this peer has met, peers that others only tell of do not count."""


parsed = lru_cache(maxsize=PARSED_RECORDS)(read_peer_record)
"""What a verified record says."""


@dataclass(slots=True)
class MemberState:
    """What is known of one member. `incarnation` is the highest that any evidence named."""

    peer_id: PeerId
    member: Member
    status: Status
    incarnation: int
    status_since: float
    heard_at: float = -math.inf
    """When something last came from the peer itself; minus infinity before the first time."""
    introduced_by: Member = 0
    """Who told of it; 0 once it has been met."""
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
    """Who claims it; None when this peer found it out."""


class Membership:
    """See the module's docstring. `me` is a member too, always alive until `leave`."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: MembershipConfig,
        wall_clock_ms: Callable[[float], float] = lambda now: math.inf,
    ) -> None:
        self.me = me
        self.config = config
        self._wall_clock_ms = wall_clock_ms
        self.health = LocalHealth()
        self.version = 0
        """Grows whenever the set of live members changes."""
        self.checkpoints_version = 0
        """Grows whenever a record says something new of checkpoints."""
        self.refused_count = 0
        """Records that were left out since the start because there were as many members as there may be."""
        self.resumed_at = -math.inf
        """When this process last found that it had stood still: nothing that ran out before proves anything."""
        self._states: dict[PeerId, MemberState] = {}
        self._by_member: dict[Member, MemberState] = {}
        self._changes: list[MemberChange] = []
        self._gone: dict[PeerId, None] = {}
        """The dead that have a record, those first that have been dead longest."""
        self._hearsay: dict[PeerId, None] = {}
        """The dead of whom nothing is known but claims, the oldest first."""
        self._rumors = ClaimRumors()
        self._suspects: dict[PeerId, Suspicion] = {}
        self._unproved: list[PeerId] = []
        self._accusers = Accusers()
        self.newcomers = Newcomers()
        self._met = 0
        self._introduced: Counter[Member] = Counter()
        """How many members that have not been met each member told of."""
        self._accused_in = -1
        """The highest incarnation of this peer that it was accused in."""
        self._refutations = MessageBudget(REFUTATIONS_A_SECOND, REFUTATIONS_AT_ONCE)
        self._live: list[MemberState] | None = None
        self._others: list[MemberState] | None = None
        self._due_at: float | None = None
        """What `next_tick` found: asked for after every event, and a split makes many suspects. None once anything
        about the suspects has changed."""
        self._due_multiplier = 0
        self._ticked_at = -math.inf
        self._own = self._add(me, Status.ALIVE, incarnation, -math.inf)
        self._changes.clear()

    # --- what is known -----------------------------------------------------------------------

    @property
    def own(self) -> MemberState:
        """This peer's own state; its incarnation is above every accusation."""
        return self._own

    def __len__(self) -> int:
        """How many are known, this peer and the dead included."""
        return len(self._states)

    def get(self, peer_id: PeerId) -> MemberState | None:
        """What is known of a peer."""
        return self._states.get(peer_id)

    def resolve(self, member: Member) -> MemberState | None:
        """What is known of the peer with this short name."""
        return self._by_member.get(member)

    def states(self) -> Iterable[MemberState]:
        """All of them, this peer and the dead included."""
        return self._states.values()

    def live(self) -> list[MemberState]:
        """Members with a record, alive or only suspected; this peer too once it has one."""
        if self._live is None:
            self._live = [state for state in self._states.values() if state.live]
        return self._live

    def others(self) -> list[MemberState]:
        """`live()` without this peer."""
        if self._others is None:
            self._others = [state for state in self.live() if state is not self._own]
        return self._others

    def homes(self) -> list[MemberState]:
        """`live()`, as every member knows it: without this peer when it only observes."""
        return self.others() if self.config.observes else self.live()

    @property
    def dead_count(self) -> int:
        """How many are known that were alive once: dead, or gone on purpose, with a record."""
        return len(self._gone)

    def dead(self, place: int) -> MemberState:
        """One of them."""
        return self._states[next(islice(self._gone, place, None))]

    def take_changes(self) -> list[MemberChange]:
        """Changes of other members' status since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # --- evidence ----------------------------------------------------------------------------

    def observe_record(
        self, record: PeerRecord, signed: SignedRecord, now: float, sender: PeerId | None = None
    ) -> bool:
        """Take in a verified record that `sender` passed on. Whether it is newer than the one known; that of a peer
        that does not count yet is left out, and that of one more member than there may be, which is counted."""
        state = self._states.get(record.peer_id)
        introducer = None if sender == record.peer_id else sender
        if introducer is not None and (state is None or state.signed is None):
            known = self._believes(introducer)
            if not known and not record.leaving:
                self.newcomers.told_of(record.peer_id, record.control, introducer, now)
            if not known:
                return False
        if state is None:
            if not self._has_room(introducer):
                self.refused_count += 1
                return False
            state = self._add(record.peer_id, Status.ALIVE, record.incarnation, now)
            if introducer is not None:
                state.introduced_by = self._by_name(introducer)
                self._introduced[state.introduced_by] += 1
        elif state.signed is not None and (record.incarnation, record.sequence) <= (
            state.record_incarnation,
            state.record_sequence,
        ):
            return False
        fresh, took_part = state.signed is None, state.checkpoints
        state.note(record, signed)
        self.checkpoints_version += state.checkpoints != took_part
        if fresh:
            self._note_gone(state)
        if state is self._own:
            # A restarted log (see `machine`) raises both incarnations together.
            state.incarnation = max(state.incarnation, record.incarnation)
        elif record.leaving:
            self._set(state, Status.LEFT, max(state.incarnation, record.incarnation), now)
        elif record.incarnation > state.incarnation:
            self._set(state, Status.ALIVE, record.incarnation, now)
        if fresh:
            self._live_changed()
        return True

    def observe_claims(
        self, claims: Iterable[Claim], now: float, sender: PeerId | None = None
    ) -> None:
        """Take in what others claim (see `check_claim`); refute what they claim of this peer. `sender` is whose
        channel they came from; without one they are believed to come from those that they name."""
        newest = self._wall_clock_ms(now) + MAX_AHEAD_MS
        for claim in claims:
            if claim.status > Status.LEFT:
                continue  # a newer version's
            state = self._states.get(claim.peer_id)
            signed = 0 if state is None else state.record_incarnation
            if claim.incarnation > max(newest, signed + MAX_AHEAD_MS) + (
                REFUTATION_ROOM if claim.status == Status.ALIVE else 0
            ):
                continue  # made up, so high that nobody could refute it
            if claim.peer_id == self.me:
                self._note_accusation(claim, now)
                continue
            if state is not None:
                self._observe(state, claim, now, sender)
                agree = (claim.incarnation, claim.status) == (state.incarnation, state.status)
                if agree and sender is not None:
                    self._rumors.known_to(claim.peer_id, sender)
            elif claim.status > Status.SUSPECT and self._may_be_remembered(sender, now):
                # So that an old record of this peer does not bring it back.
                self._add(claim.peer_id, Status.DEAD, claim.incarnation, now)

    def _may_be_remembered(self, sender: PeerId | None, now: float) -> bool:
        """Whether there is room for what `sender` claims of a peer that is not known here."""
        if sender is not None and not self._accusers.may_claim(member_of(sender), now):
            return False
        return self._has_room_for_hearsay()

    def _observe(self, state: MemberState, claim: Claim, now: float, sender: PeerId | None) -> None:
        risen = claim.incarnation > state.incarnation
        if state.leaving or claim.incarnation < state.incarnation:
            return
        if claim.status == Status.ALIVE:
            if risen:
                self._set(state, Status.ALIVE, claim.incarnation, now, by=claim.by)
        elif state.alive or (risen and claim.status == Status.SUSPECT):
            self._observe_accusation(state, claim, now, sender)
        elif risen:
            state.incarnation = claim.incarnation

    def _observe_accusation(
        self, state: MemberState, claim: Claim, now: float, sender: PeerId | None
    ) -> None:
        """A member accuses another one that may be alive: look, unless a look is under way."""
        accuser = claim.by if sender is None else member_of(sender)
        suspicion = self._suspects.get(state.peer_id)
        if suspicion is None or claim.incarnation > state.incarnation:
            if sender is not None and not self._accusers.may_accuse(accuser, state.member, now):
                return
            self._set(state, Status.SUSPECT, claim.incarnation, now, by=accuser)
            suspicion = self._suspects[state.peer_id]
        suspicion.confirm(accuser)
        suspicion.judged_by_another |= claim.status > Status.SUSPECT
        self._due_at = None

    def heard(self, peer_id: PeerId, now: float) -> None:
        """Something came from the peer itself (the connection proves who it is)."""
        state = self._states.get(peer_id)
        if state is not None:
            self._met += state.heard_at == -math.inf
            state.heard_at = now
            self._forget_introducer(state)
            self._accusers.heard(state.member, now)

    def answered(self, peer_id: PeerId, now: float) -> None:
        """The member itself answered a probe of this peer. That is all that a reader has to go by: where it held the
        member suspect or dead, the member would not refute it, as nothing that a reader says is taken in."""
        state = self._states.get(peer_id)
        if (
            self.config.observes
            and state is not None
            and state.status in (Status.SUSPECT, Status.DEAD)
        ):
            self._set(state, Status.ALIVE, state.incarnation, now)

    def suspect(self, peer_id: PeerId, now: float) -> None:
        """A probe of this peer's own has failed: accuse the member, or confirm what others say of it."""
        state = self._states.get(peer_id)
        if state is None or state is self._own:
            return
        if state.status == Status.ALIVE:
            self._set(state, Status.SUSPECT, state.incarnation, now)
        suspicion = self._suspects.get(peer_id)
        if suspicion is not None:
            if suspicion.failed_at == -math.inf:
                self._spread(state)
            suspicion.failed_at = now
            suspicion.confirm(self._own.member)
            self._due_at = None

    def leave(self, now: float) -> None:
        """This peer leaves: LEFT, finally, for its incarnation."""
        self._own.status, self._own.status_since = Status.LEFT, now
        self._live_changed()
        self._spread(self._own)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Judge what ran out. Call it every 0.25 s or more often, after everything that arrived until now was
        fed in."""
        stalled = now - self._ticked_at
        if STALL_SECONDS <= stalled < math.inf:
            # Nobody could refute to this process while it stood still, and what came meanwhile may be
            # more than the shell has read by now.
            self.resumed_at = now
            for suspicion in self._suspects.values():
                suspicion.postpone(stalled, now + self.config.probe_interval_seconds)
            self._due_at = None
        self._ticked_at = now
        self._refute(now)
        if self.next_tick() > now:
            return
        self._due_at = None
        due = [each for each in self._suspects.items() if self._due(each[1]) <= now]
        for peer_id, suspicion in due[:JUDGED_AT_ONCE]:  # the others with the next tick, at once
            self._judge(self._states[peer_id], suspicion, now)

    def _judge(self, state: MemberState, suspicion: Suspicion, now: float) -> None:
        if not suspicion.is_proved:
            suspicion.asked_at = now
            self._unproved.append(state.peer_id)
        elif state.heard_at > state.status_since:
            # It talks to us: others may hold it dead, this peer does not say so on its own.
            state.status_since = now
            self._suspects[state.peer_id] = self._suspicion(now)
        else:
            self._set(state, Status.DEAD, state.incarnation, now)

    def _due(self, suspicion: Suspicion) -> float:
        probe_seconds = self.config.probe_interval_seconds * self.health.multiplier
        # Who looked itself, in vain, has its verdict with the accusers', also when so many were before it that it
        # does not count as one: a rumour of the death may miss it.
        accused = suspicion.failed_at > -math.inf or self._own.member in suspicion.accusers
        return suspicion.due(accused, probe_seconds)

    def take_unproved(self) -> list[PeerId]:
        """Suspects, since the last call, that this peer has to probe before it may declare them dead."""
        unproved, self._unproved = self._unproved, []
        return unproved

    def next_tick(self) -> float:
        """When `tick` has something to judge."""
        multiplier = self.health.multiplier
        if self._due_at is None or self._due_multiplier != multiplier:
            self._due_at = min(map(self._due, self._suspects.values()), default=math.inf)
            self._due_multiplier = multiplier
        if self._accused_in >= self._own.incarnation:
            return min(self._due_at, self._refutations.ready_at(1))
        return self._due_at

    def suspicion_seconds(self) -> float:
        """How long a suspect has to refute at least."""
        return shortest_suspicion_seconds(
            self.config.suspicion_multiplier, len(self.live()), self.config.probe_interval_seconds
        )

    def expire(self, now: float) -> list[MemberState]:
        """Forget those that have been dead too long. They are returned."""
        limit = now - self.config.dead_kept_seconds
        expired = [
            state
            for dead in (self._gone, self._hearsay)
            for state in takewhile(
                lambda state: state.status_since < limit, map(self._states.__getitem__, dead)
            )
        ]
        for state in expired:
            self._drop(state)
        return expired

    def expel(self, peer_id: PeerId) -> None:
        """Forget a member that may not come in any more."""
        state = self._states.get(peer_id)
        if state is not None and state is not self._own:
            self._drop(state)

    # --- claims to pass on -------------------------------------------------------------------

    def claims(self, about: Iterable[PeerId] = (), to: PeerId | None = None) -> list[Claim]:
        """Claims to ride on the next message: those about `about`, then the least sent ones, except what was
        last heard from, or told, the receiver `to`.

        The receiver of a message hears first what is said of it, so that it can refute at once.
        """
        chosen = self.accusations(about)
        room = max(0, self.config.claims_per_message - len(chosen))
        chosen += self._rumors.take(to, room, self.retransmit_limit())
        return chosen

    def accusations(self, about: Iterable[PeerId]) -> list[Claim]:
        """What to tell a reader of these members. Rumours are for members: each rides on a few messages only."""
        return [claim for peer_id in about if (claim := self.accusation(peer_id)) is not None]

    def accusation(self, peer_id: PeerId) -> Claim | None:
        """What to tell somebody who believes this member alive; None when so does this peer.

        A death is passed on as a suspicion: where it was wrong, its victim lives near those who are
        told, and has time to refute before they hide what it holds.
        """
        state = self._states.get(peer_id)
        if state is None or state.status == Status.ALIVE:
            return None
        status = Status.LEFT if state.status == Status.LEFT else Status.SUSPECT
        return Claim(peer_id, state.incarnation, int(status), self._own.member)

    def refuted(self, members: Iterable[Member], limit: int) -> list[Claim]:
        """What to tell somebody who does not name these live members, and may hold them dead: which of them have
        refuted something in this life. A rumour misses somebody now and then; this is what mends it."""
        found: list[Claim] = []
        for member in members:
            state = self._by_member.get(member)
            if state is None or state.signed is None or state.status != Status.ALIVE:
                continue
            if state.incarnation > state.record_incarnation:
                found.append(
                    Claim(state.peer_id, state.incarnation, int(Status.ALIVE), self._own.member)
                )
                if len(found) == limit:
                    break
        return found

    @property
    def has_rumors(self) -> bool:
        """Whether claims wait to be passed on."""
        return len(self._rumors) > 0

    def retransmit_limit(self) -> int:
        """How many messages each rumour rides on: it grows with the logarithm of the cluster."""
        return self.config.retransmit_multiplier * math.ceil(math.log10(len(self.live()) + 1) or 1)

    # --- inside ------------------------------------------------------------------------------

    def _note_accusation(self, claim: Claim, now: float) -> None:
        """Somebody claims something of this peer."""
        if claim.status != Status.ALIVE and claim.incarnation + 1 < MAX_INCARNATION:
            self._accused_in = max(self._accused_in, claim.incarnation)
            self._refute(now)

    def _refute(self, now: float) -> None:
        """Refute what this peer is accused of, unless it has refuted too often just now."""
        own = self._own
        if self._accused_in < own.incarnation or own.status == Status.LEFT:
            return
        if self._refutations.has(1, now):
            self._refutations.take(1, now)
            own.incarnation = self._accused_in + 1
            self.health.worse()  # others could not reach this peer
            self._spread(own)

    def _suspicion(self, now: float, by: Member | None = None) -> Suspicion:
        multiplier, members = self.config.suspicion_multiplier, len(self.live())
        shortest = self.suspicion_seconds()
        return Suspicion(
            began_at=now,
            shortest_seconds=shortest,
            longest_seconds=LONGEST_MULTIPLIER * shortest,
            expected=expected_confirmations(multiplier, members),
            accusers={self._own.member if by is None else by},
        )

    def _spread(self, state: MemberState) -> None:
        """Pass on what this peer holds of a member, in its own name."""
        self._rumors.spread(
            Claim(state.peer_id, state.incarnation, int(state.status), self._own.member)
        )

    def _set(
        self,
        state: MemberState,
        status: Status,
        incarnation: int,
        now: float,
        by: Member | None = None,
    ) -> None:
        old, was_alive = state.status, state.alive
        risen = incarnation > state.incarnation
        state.incarnation = max(state.incarnation, incarnation)
        state.status = status
        if status != old:
            state.status_since = now
            self._changes.append(MemberChange(state.peer_id, state.member, old, status, by))
        if status == Status.SUSPECT:
            if risen or status != old:
                self._suspects[state.peer_id] = self._suspicion(now, by)
                self._due_at = None
        elif self._suspects.pop(state.peer_id, None) is not None:
            self._due_at = None
        if status != old:
            self._note_gone(state)
        if state.alive != was_alive:
            self._live_changed()
        self._pass_on(state)

    def _pass_on(self, state: MemberState) -> None:
        """A member's status is another one. A suspicion is passed on when an own probe bears it out (`suspect`), a
        farewell by the record that says so."""
        if state.status in (Status.ALIVE, Status.DEAD):
            self._spread(state)
        else:
            self._rumors.discard(state.peer_id)
        if not state.alive:
            self._accusers.died(state.member)

    def _add(self, peer_id: PeerId, status: Status, incarnation: int, now: float) -> MemberState:
        state = MemberState(peer_id, member_of(peer_id), status, incarnation, now)
        self._states[peer_id] = state
        self._by_member[state.member] = state
        self._changes.append(MemberChange(peer_id, state.member, None, status))
        self._note_gone(state)
        return state

    def _believes(self, introducer: PeerId) -> bool:
        """Whether a peer counts because this member tells of it."""
        if self._met < self.config.met_before_trust:
            return False
        return self._introduced[member_of(introducer)] < UNMET_FOR_EACH_MET * self._met

    def _by_name(self, peer_id: PeerId) -> Member:
        """Its short name: the very number that its state has, where there is one, which takes no memory."""
        state = self._states.get(peer_id)
        return member_of(peer_id) if state is None else state.member

    def _forget_introducer(self, state: MemberState) -> None:
        """It has been met, or is forgotten."""
        if state.introduced_by:
            self._introduced[state.introduced_by] -= 1
            if not self._introduced[state.introduced_by]:
                del self._introduced[state.introduced_by]
            state.introduced_by = 0

    def _has_room(self, introducer: PeerId | None) -> bool:
        """Whether there may be one more, of whom `introducer` tells (None: that comes itself). Another one may have to
        be forgotten for it."""
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
        self._drop(self._states[oldest])
        return True

    def _has_room_for_hearsay(self) -> bool:
        """The same for one of whom there are only claims: it takes the place of another such, and of nobody else."""
        full = len(self._states) >= self.config.max_members
        if full or len(self._hearsay) >= MAX_HEARSAY:
            if not self._hearsay:
                return False
            self._drop(self._states[next(iter(self._hearsay))])
        return True

    def _note_gone(self, state: MemberState) -> None:
        """Keep the dead in the order in which they are forgotten. Call it when a member's status changed, or its
        first record came."""
        if state.peer_id == self.me:
            return
        self._gone.pop(state.peer_id, None)
        self._hearsay.pop(state.peer_id, None)
        if not state.alive:
            (self._hearsay if state.signed is None else self._gone)[state.peer_id] = None

    def _drop(self, state: MemberState) -> None:
        del self._states[state.peer_id]
        if self._by_member.get(state.member) is state:
            del self._by_member[state.member]
        self._met -= state.heard_at > -math.inf
        self._forget_introducer(state)
        self._rumors.discard(state.peer_id)
        self._gone.pop(state.peer_id, None)
        self._hearsay.pop(state.peer_id, None)
        if self._suspects.pop(state.peer_id, None) is not None:
            self._due_at = None
        if state.live:
            self._live_changed()

    def _live_changed(self) -> None:
        self._live = self._others = None
        self.version += 1


def check_claim(claim: Claim) -> None:
    """Raise `ProtocolError` for a claim that makes no sense."""
    public_key_from_peer_id(claim.peer_id)
    if claim.status < 0:
        raise ProtocolError(f"a claim of status {claim.status}")
    if not 0 <= claim.incarnation < MAX_INCARNATION:
        raise ProtocolError(f"a claim about incarnation {claim.incarnation}")
