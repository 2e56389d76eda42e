"""Members and whether they are alive: SWIM's claims, as a state machine. Pure.

Whom to probe, and when a probe has failed, `probing` decides; how long a suspect has to refute, `suspicion`.

Two incarnations, kept apart on purpose. A *peer record* carries the incarnation of the process's
start (wall-clock milliseconds, and above the one saved last time); a peer's location log belongs to
it. A *claim* carries a status incarnation that starts at the same number and is raised by one
whenever the peer refutes an accusation. So a refutation is cheap: nothing is signed again and no
log is voided. A restarted process is always above all that was claimed of its predecessor, because
fewer than one accusation a millisecond is refuted. Should it not be (a forged number), the peer is
told of the accusation the first time it talks to a member that believes it, and refutes.

Rules of precedence. Higher incarnation wins; within one, ALIVE < SUSPECT < DEAD < LEFT. The stored
incarnation is the maximum over all evidence, whatever status came with it. A record makes its peer
alive only when its incarnation is above the stored one. A record marked leaving is final: only a
record of a later incarnation brings that peer back.

How claims of others are weighed:

1. ALIVE, in a higher incarnation: believed.
2. SUSPECT or DEAD: a reason for an own probe at once, within bounds (`suspicion.Accusers`). Until that probe has failed
   the accused counts, and is read from. A death takes the verdict of another member and a failed probe of this peer.
3. LEFT: only the member's own record says so (`leaving`), which is passed on like every other.

Each refutation is passed on, and those accusations that an own probe bears out, in this peer's own name. So a suspicion
travels by probes, and all members have probed when the first one declares the death: that rumour then needs no probes.
The peer from whose channel an accusation came is its accuser, whatever name stands in it. A member that is told later
what it missed (`accusation`) hears of a death as a suspicion, and judges itself.

A peer that something came from, on a channel of its own, has been met, and always has a place. A peer that a member
tells of is pinged first (`contacts.Newcomers`), so that invented peers do not count. In a large cluster no peer meets
all: one that has met `met_before_trust` members believes each member `UNMET_FOR_EACH_MET` others for each of these, and
pings the rest.

A timeout is judged in `tick` and nowhere else. The shell calls `tick` after it has fed in
everything that had arrived: after a stall of this process its timers have all run out while the
acknowledgements wait in the sockets, and a verdict passed before reading them would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from p2pstore.gossip.exchange.message_budget import MessageBudget
from p2pstore.gossip.exchange.rumors import ClaimRumors
from p2pstore.gossip.gossip_messages import Claim, Status
from p2pstore.gossip.members.contacts import Newcomers
from p2pstore.gossip.members.member_table import (
    MAX_INCARNATION,
    MembershipConfig,
    MemberState,
    MemberTable,
)
from p2pstore.gossip.members.suspicion import Accusers, LocalHealth, Suspects, Suspicion
from p2pstore.gossip.records import Member, PeerId, PeerRecord, SignedRecord, member_of

MAX_AHEAD_MS: Final = 24 * 3600 * 1000
"""Incarnations begin at a wall clock's milliseconds. Accusations further ahead, of this clock and of what the accused
has signed (with a clock that may have been wrong), are passed over: there is always room to refute."""
REFUTATION_ROOM: Final = 3600 * 1000
REFUTATIONS_AT_ONCE: Final = 4
REFUTATIONS_A_SECOND: Final = 0.2
"""Each is a rumour that all members pass on. Those accused more often refute a few seconds later, for all at once."""

STALL_SECONDS: Final = 0.5
"""Between two ticks of a process that runs lie at most 0.25 s (see `machine`): more is a stall."""


class Membership(MemberTable):
    """The table of members, and the rules by which evidence changes it: see the module's docstring."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: MembershipConfig,
        wall_clock_ms: Callable[[float], float] = lambda now: math.inf,
    ) -> None:
        super().__init__(me, incarnation, config)
        self._wall_clock_ms = wall_clock_ms
        self.health = LocalHealth()
        self.suspects = Suspects(self.own.member, config, self.health)
        self.newcomers = Newcomers()
        self.checkpoints_version = 0
        """Grows whenever a record says something new of checkpoints."""
        self.refused_count = 0
        """Records left out since the start because all places for members were taken."""
        self.resumed_at = -math.inf
        """When this process last resumed after a stall: a timeout from before proves nothing."""
        self._rumors = ClaimRumors()
        self._accusers = Accusers()
        self._accused_in = -1
        """The highest incarnation of this peer that it was accused in."""
        self._refutations = MessageBudget(REFUTATIONS_A_SECOND, REFUTATIONS_AT_ONCE)
        self._ticked_at = -math.inf

    def observe_record(
        self, record: PeerRecord, signed: SignedRecord, now: float, sender: PeerId | None = None
    ) -> bool:
        """Take in a verified record that `sender` passed on. Whether it is newer than the one known; that of a peer
        that does not count yet is left out, and that of one more member than there may be, which is counted."""
        state = self.get(record.peer_id)
        introducer = None if sender == record.peer_id else sender
        if introducer is not None and (state is None or state.signed is None):
            known = self.believes(introducer)
            if not known and not record.leaving:
                self.newcomers.told_of(record.peer_id, record.control, introducer, now)
            if not known:
                return False
        if state is None:
            if not self.make_room(introducer):
                self.refused_count += 1
                return False
            state = self.add(record.peer_id, Status.ALIVE, record.incarnation, now, introducer)
        elif state.signed is not None and (record.incarnation, record.sequence) <= (
            state.record_incarnation,
            state.record_sequence,
        ):
            return False
        fresh, took_part = state.signed is None, state.checkpoints
        state.note(record, signed)
        self.checkpoints_version += state.checkpoints != took_part
        if fresh:
            self.note_gone(state)
        if state is self.own:
            # A restarted log (see `machine`) raises both incarnations together.
            state.incarnation = max(state.incarnation, record.incarnation)
        elif record.leaving:
            self._set(state, Status.LEFT, max(state.incarnation, record.incarnation), now)
        elif record.incarnation > state.incarnation:
            self._set(state, Status.ALIVE, record.incarnation, now)
        if fresh:
            self.live_changed()
        return True

    def observe_claims(self, claims: Iterable[Claim], now: float, sender: PeerId | None = None) -> None:
        """Take in what others claim (see `check_claim`); refute what they claim of this peer. `sender` is whose
        channel they came from; without one they are believed to come from those that they name."""
        newest = self._wall_clock_ms(now) + MAX_AHEAD_MS
        for claim in claims:
            if claim.status > Status.LEFT:
                continue  # a newer version's
            state = self.get(claim.peer_id)
            signed = 0 if state is None else state.record_incarnation
            if claim.incarnation > max(newest, signed + MAX_AHEAD_MS) + (
                REFUTATION_ROOM if claim.status == Status.ALIVE else 0
            ):
                continue  # made up, too high to be refuted
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
                self.add(claim.peer_id, Status.DEAD, claim.incarnation, now)

    def _may_be_remembered(self, sender: PeerId | None, now: float) -> bool:
        """Whether there is room for what `sender` claims of a peer that is not known here."""
        if sender is not None and not self._accusers.claims.affords(member_of(sender), now):
            return False
        return self.make_room_for_hearsay()

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
        suspicion = self.suspects.get(state.peer_id)
        if suspicion is None or claim.incarnation > state.incarnation:
            if sender is not None and not self._accusers.may_accuse(accuser, state.member, now):
                return
            self._set(state, Status.SUSPECT, claim.incarnation, now, by=accuser)
            suspicion = self.suspects.get(state.peer_id)
            assert suspicion is not None
        suspicion.confirm(accuser)
        suspicion.judged_by_another |= claim.status > Status.SUSPECT
        self.suspects.changed()

    def heard(self, peer_id: PeerId, now: float) -> None:
        """Something came from the peer itself (the connection proves who it is)."""
        state = self.get(peer_id)
        if state is not None:
            self.meet(state, now)
            self._accusers.heard(state.member, now)

    def answered(self, peer_id: PeerId, now: float) -> None:
        """The member itself answered a probe of this peer. That is all that a reader has to go by: where it held the
        member suspect or dead, the member would not refute it, as nothing that a reader says is taken in."""
        state = self.get(peer_id)
        if self.config.observes and state is not None and state.status in (Status.SUSPECT, Status.DEAD):
            self._set(state, Status.ALIVE, state.incarnation, now)

    def suspect(self, peer_id: PeerId, now: float) -> None:
        """A probe of this peer's own has failed: accuse the member, or confirm what others say of it."""
        state = self.get(peer_id)
        if state is None or state is self.own:
            return
        if state.status == Status.ALIVE:
            self._set(state, Status.SUSPECT, state.incarnation, now)
        suspicion = self.suspects.get(peer_id)
        if suspicion is not None:
            if suspicion.failed_at == -math.inf:
                self._spread(state)
            suspicion.failed_at = now
            suspicion.confirm(self.own.member)
            self.suspects.changed()

    def leave(self, now: float) -> None:
        """This peer leaves: LEFT, finally, for its incarnation."""
        self.own.status, self.own.status_since = Status.LEFT, now
        self.live_changed()
        self._spread(self.own)

    def tick(self, now: float) -> None:
        """Judge what ran out. Call it at least every 0.25 s, after everything that arrived until now was fed in."""
        stalled = now - self._ticked_at
        if STALL_SECONDS <= stalled < math.inf:
            # No refutation reached this process while it stalled, and what came meanwhile may be
            # more than the shell has read by now.
            self.resumed_at = now
            self.suspects.postpone(stalled, now + self.config.probe_interval_seconds)
        self._ticked_at = now
        self._refute(now)
        for peer_id, suspicion in self.suspects.take_due(now):
            if (state := self.get(peer_id)) is not None:
                self._judge(state, suspicion, now)

    def _judge(self, state: MemberState, suspicion: Suspicion, now: float) -> None:
        if not suspicion.is_proved:
            self.suspects.want_proof(state.peer_id, suspicion, now)
        elif state.heard_at > state.status_since:
            # It talks to us: others may hold it dead, this peer does not say so on its own.
            state.status_since = now
            self.suspects.begin(state.peer_id, now, len(self.live()))
        else:
            self._set(state, Status.DEAD, state.incarnation, now)

    def next_tick(self) -> float:
        """When `tick` has something to judge."""
        due_at = self.suspects.due_at()
        if self._accused_in >= self.own.incarnation:
            return min(due_at, self._refutations.ready_at(1))
        return due_at

    def claims(self, about: Iterable[PeerId] = (), to: PeerId | None = None) -> list[Claim]:
        """Claims to ride on the next message: those about `about`, which its receiver `to` may refute at once, then the
        least sent ones, except what the receiver said or was told last."""
        chosen = self.accusations(about)
        room = max(0, self.config.claims_per_message - len(chosen))
        chosen += self._rumors.take(to, room, self.retransmit_limit())
        return chosen

    def accusations(self, about: Iterable[PeerId]) -> list[Claim]:
        """Claims about these members, for a reader. Rumours are for members: each rides on a few messages only."""
        return [claim for peer_id in about if (claim := self.accusation(peer_id)) is not None]

    def accusation(self, peer_id: PeerId) -> Claim | None:
        """The claim for a peer that believes this member alive; None when this peer does, too. A death is passed on as
        a suspicion: a living victim has time to refute before the peers that are told hide what it holds."""
        state = self.get(peer_id)
        if state is None or state.status == Status.ALIVE:
            return None
        status = Status.LEFT if state.status == Status.LEFT else Status.SUSPECT
        return Claim(peer_id, state.incarnation, int(status), self.own.member)

    def refuted(self, members: Iterable[Member], limit: int) -> list[Claim]:
        """Claims for a peer that does not name these live members, and may hold them dead: those that have refuted an
        accusation in this life. They repair what rumours missed."""
        found: list[Claim] = []
        for member in members:
            state = self.resolve(member)
            if state is None or state.signed is None or state.status != Status.ALIVE:
                continue
            if state.incarnation > state.record_incarnation:
                found.append(Claim(state.peer_id, state.incarnation, int(Status.ALIVE), self.own.member))
                if len(found) == limit:
                    break
        return found

    @property
    def has_rumors(self) -> bool:
        return len(self._rumors) > 0

    def retransmit_limit(self) -> int:
        """How many messages each rumour rides on: it grows with the logarithm of the cluster."""
        return self.config.retransmit_multiplier * math.ceil(math.log10(len(self.live()) + 1) or 1)

    def _note_accusation(self, claim: Claim, now: float) -> None:
        """A member claims something of this peer."""
        if claim.status != Status.ALIVE and claim.incarnation + 1 < MAX_INCARNATION:
            self._accused_in = max(self._accused_in, claim.incarnation)
            self._refute(now)

    def _refute(self, now: float) -> None:
        """Refute what this peer is accused of, unless it has refuted too often just now."""
        own = self.own
        if self._accused_in < own.incarnation or own.status == Status.LEFT:
            return
        if self._refutations.affords(1, now):
            own.incarnation = self._accused_in + 1
            self.health.worse()  # others could not reach this peer
            self._spread(own)

    def _spread(self, state: MemberState) -> None:
        self._rumors.spread(Claim(state.peer_id, state.incarnation, int(state.status), self.own.member))

    def _set(
        self, state: MemberState, status: Status, incarnation: int, now: float, by: Member | None = None
    ) -> None:
        risen, turned = incarnation > state.incarnation, status != state.status
        state.incarnation = max(state.incarnation, incarnation)
        if status != Status.SUSPECT:
            self.suspects.end(state.peer_id)
        elif risen or turned:
            self.suspects.begin(state.peer_id, now, len(self.live()), by)
        self.set_status(state, status, now, by)
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

    def forget(self, state: MemberState) -> None:
        """Remove a member, and all that was claimed of it."""
        self._rumors.discard(state.peer_id)
        self.suspects.end(state.peer_id)
        super().forget(state)
