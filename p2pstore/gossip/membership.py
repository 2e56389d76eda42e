"""Who is a member and who is alive: SWIM's failure detector as a state machine. Pure.

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

A timeout is judged in `tick` and nowhere else. The shell calls `tick` after it has fed in
everything that had arrived: after a stall of this process its timers have all run out while the
acknowledgements wait in the sockets, and a verdict passed before reading them would be wrong. A
failed probe is therefore only noted, and forgotten if the peer was heard of since it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.messages import Claim, Status
from p2pstore.gossip.records import (
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    member_of,
    public_key_from_peer_id,
)
from p2pstore.gossip.rumors import Rumors

MAX_INCARNATION: Final = 1 << 62
"""Higher ones are refused: they would leave no room to refute."""


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Timing and bounds; the defaults are memberlist's for a local network."""

    probe_interval_seconds: float = 1.0
    probe_timeout_seconds: float = 0.5
    suspicion_multiplier: float = 4.0
    retransmit_multiplier: int = 4
    claims_per_message: int = 32
    recontact_interval_seconds: float = 1.0
    dead_kept_seconds: float = 24 * 3600.0
    max_members: int = 10_000


@dataclass(slots=True)
class MemberState:
    """What is known of one member. `incarnation` is the highest that any evidence named."""

    peer_id: PeerId
    member: Member
    status: Status
    incarnation: int
    record: PeerRecord | None
    signed: SignedRecord | None
    status_since: float
    heard_at: float
    """When something last came from the peer itself; minus infinity before the first time."""

    @property
    def alive(self) -> bool:
        """Whether it counts as a member: alive, or suspected but not yet given up."""
        return self.status <= Status.SUSPECT

    @property
    def leaving(self) -> bool:
        """Whether its own record says that it left on purpose."""
        return self.record is not None and self.record.leaving


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A member's status changed; `old` is None for one that was not known."""

    peer_id: PeerId
    member: Member
    old: Status | None
    new: Status


class Membership:
    """See the module's docstring. `me` is a member too, always alive until `leave`."""

    def __init__(self, me: PeerId, incarnation: int, config: MembershipConfig, rng: Random) -> None:
        self.me = me
        self.config = config
        self.version = 0
        """Grows whenever the set of live members changes."""
        self._rng = rng
        self._states: dict[PeerId, MemberState] = {}
        self._by_member: dict[Member, MemberState] = {}
        self._changes: list[MemberChange] = []
        self._rumors: Rumors[PeerId] = Rumors()
        self._claims: dict[PeerId, Claim] = {}
        """What the rumours say."""
        self._round: list[PeerId] = []
        self._suspects: dict[PeerId, float] = {}
        self._failed: dict[PeerId, float] = {}
        self._live: list[MemberState] | None = None
        self._others: list[MemberState] | None = None
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
            self._live = [s for s in self._states.values() if s.alive and s.record is not None]
        return self._live

    def others(self) -> list[MemberState]:
        """`live()` without this peer."""
        if self._others is None:
            self._others = [state for state in self.live() if state is not self._own]
        return self._others

    def take_changes(self) -> list[MemberChange]:
        """Changes of other members' status since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # --- evidence ----------------------------------------------------------------------------

    def observe_record(self, record: PeerRecord, signed: SignedRecord, now: float) -> bool:
        """Take in a verified record. Whether it is newer than the one known."""
        state = self._states.get(record.peer_id)
        if state is None:
            state = self._add(record.peer_id, Status.ALIVE, record.incarnation, now)
        elif state.record is not None and (record.incarnation, record.sequence) <= (
            state.record.incarnation,
            state.record.sequence,
        ):
            return False
        fresh = state.record is None
        state.record, state.signed = record, signed
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

    def observe_claims(self, claims: Iterable[Claim], now: float) -> None:
        """Take in what others claim (see `check_claim`); refute what they claim of this peer."""
        for claim in claims:
            if claim.status > Status.LEFT:
                continue  # a newer version's
            if claim.peer_id == self.me:
                self._refute(claim)
                continue
            state = self._states.get(claim.peer_id)
            status = Status(claim.status)
            if state is None:
                # Remembered, so that an old record of this peer does not bring it back.
                if status > Status.SUSPECT:
                    self._add(claim.peer_id, status, claim.incarnation, now)
            elif not state.leaving and (claim.incarnation, status) > (
                state.incarnation,
                state.status,
            ):
                self._set(state, status, claim.incarnation, now, by=claim.by)

    def heard(self, peer_id: PeerId, now: float) -> None:
        """Something came from the peer itself (the connection proves who it is)."""
        state = self._states.get(peer_id)
        if state is not None:
            state.heard_at = now

    def on_ack(self, peer_id: PeerId, now: float) -> None:
        """The peer answered a probe. A suspect must still refute, with the claims in its answer."""
        self._failed.pop(peer_id, None)
        self.heard(peer_id, now)

    def on_probe_failed(self, peer_id: PeerId, sent_at: float) -> None:
        """No answer to a probe sent at `sent_at`. Judged by the next `tick`."""
        self._failed.setdefault(peer_id, sent_at)

    def leave(self, now: float) -> None:
        """This peer leaves: LEFT, finally, for its incarnation."""
        self._own.status, self._own.status_since = Status.LEFT, now
        self._live_changed()
        self._spread(self._own)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Judge what ran out. Call it only after everything that arrived until now was fed in."""
        stalled = now - self._ticked_at - 2 * self.config.probe_interval_seconds
        if 0 < stalled < math.inf:
            # Nobody could refute to this process while it stood still.
            for peer_id in self._suspects:
                self._suspects[peer_id] += stalled
        self._ticked_at = now
        failed, self._failed = self._failed, {}
        for peer_id, sent_at in failed.items():
            state = self._states.get(peer_id)
            if state is not None and state.status == Status.ALIVE and state.heard_at < sent_at:
                self._set(state, Status.SUSPECT, state.incarnation, now)
        for peer_id, deadline in list(self._suspects.items()):
            if deadline > now:
                continue
            state = self._states[peer_id]
            if state.heard_at > state.status_since:
                # It talks to us: others may hold it dead, this peer does not say so on its own.
                state.status_since = now
                self._suspects[peer_id] = now + self.suspicion_seconds()
            else:
                self._set(state, Status.DEAD, state.incarnation, now)

    def next_tick(self) -> float:
        """When `tick` has something to judge; minus infinity for at once."""
        if self._failed:
            return -math.inf
        return min(self._suspects.values(), default=math.inf)

    def suspicion_seconds(self) -> float:
        """How long a suspect has to refute: it grows with the logarithm of the cluster."""
        scale = max(1.0, math.log10(max(1, len(self.live()))))
        return self.config.suspicion_multiplier * scale * self.config.probe_interval_seconds

    def next_probe(self) -> MemberState | None:
        """Whom to probe now: every other live member once a round, in random order."""
        for _ in range(2):
            while self._round:
                state = self._states.get(self._round.pop())
                if state is not None and state.alive and state is not self._own:
                    return state
            self._round = [state.peer_id for state in self.others()]
            self._rng.shuffle(self._round)
        return None

    def recontact(self) -> MemberState | None:
        """A random dead member to try again, with probability dead / live; call it once a second.

        One contact anywhere in the cluster is enough, since its refutation spreads.
        """
        dead = [s for s in self._states.values() if not s.alive and s.record and s is not self._own]
        if not dead or self._rng.random() >= len(dead) / max(1, len(self.live())):
            return None
        return self._rng.choice(dead)

    def expire(self, now: float) -> list[MemberState]:
        """Forget those that have been dead too long. They are returned."""
        limit = now - self.config.dead_kept_seconds
        expired = [
            s
            for s in self._states.values()
            if not s.alive and s.status_since < limit and s is not self._own
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

    def claims(self, about: Iterable[PeerId] = ()) -> list[Claim]:
        """Claims to ride on the next message: those about `about`, then the least sent ones.

        The receiver of a message hears first what is said of it, so that it can refute at once.
        """
        chosen = [claim for peer_id in about if (claim := self.accusation(peer_id)) is not None]
        room = max(0, self.config.claims_per_message - len(chosen))
        limit = self.retransmit_limit()
        for peer_id in list(islice(self._rumors.least_sent(), room)):
            chosen.append(self._claims[peer_id])
            self._rumors.sent(peer_id, limit)
        return chosen

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

    @property
    def has_rumors(self) -> bool:
        """Whether claims wait to be passed on."""
        return len(self._rumors) > 0

    def retransmit_limit(self) -> int:
        """How many messages each rumour rides on: it grows with the logarithm of the cluster."""
        return self.config.retransmit_multiplier * math.ceil(math.log10(len(self.live()) + 1) or 1)

    # --- inside ------------------------------------------------------------------------------

    def _refute(self, claim: Claim) -> None:
        own = self._own
        if claim.status == Status.ALIVE or claim.incarnation < own.incarnation:
            return
        if own.status == Status.LEFT or claim.incarnation + 1 >= MAX_INCARNATION:
            return
        own.incarnation = claim.incarnation + 1
        self._spread(own)

    def _spread(self, state: MemberState, by: Member | None = None) -> None:
        self._claims[state.peer_id] = Claim(
            state.peer_id,
            state.incarnation,
            int(state.status),
            self._own.member if by is None else by,
        )
        self._rumors.add(state.peer_id)

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
            self._changes.append(MemberChange(state.peer_id, state.member, old, status))
        if status == Status.SUSPECT:
            if risen or status != old:
                self._suspects[state.peer_id] = now + self.suspicion_seconds()
        else:
            self._suspects.pop(state.peer_id, None)
        if state.alive != was_alive:
            self._live_changed()
        self._spread(state, by)

    def _add(self, peer_id: PeerId, status: Status, incarnation: int, now: float) -> MemberState:
        while len(self._states) >= self.config.max_members:
            self._make_room()
        state = MemberState(
            peer_id, member_of(peer_id), status, incarnation, None, None, now, -math.inf
        )
        self._states[peer_id] = state
        self._by_member[state.member] = state
        self._changes.append(MemberChange(peer_id, state.member, None, status))
        self._live_changed()
        # Joins are probed within the current round, at a random place.
        self._round.insert(self._rng.randint(0, len(self._round)), peer_id)
        return state

    def _make_room(self) -> None:
        dead = [s for s in self._states.values() if not s.alive and s is not self._own]
        if not dead:
            raise ProtocolError(
                f"the cluster has over {self.config.max_members:,} members; one more is refused"
            )
        self._drop(min(dead, key=lambda state: state.status_since))

    def _drop(self, state: MemberState) -> None:
        del self._states[state.peer_id]
        if self._by_member.get(state.member) is state:
            del self._by_member[state.member]
        self._rumors.discard(state.peer_id)
        for table in (self._claims, self._suspects, self._failed):
            table.pop(state.peer_id, None)
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
