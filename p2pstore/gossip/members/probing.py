"""Probes: which members are asked whether they live, how, and when that has failed. SWIM with Lifeguard's waits. Pure.

A probe is a ping to one member. A member that has not answered within the probe timeout is pinged by three others too,
on this peer's behalf (`relay` is their side), and has failed at the end of the probe interval; both are
longer while this peer is not well itself (`LocalHealth`). A helper that could not reach the member says so:
that the helper answered tells this peer that it is well. All is judged in `tick`, after what had arrived was
fed in, and a probe that was under way while this process stood still proves nothing.

Members are probed in rounds of random order, so that each has its turn. Besides, a member is probed at once
when a connection to it was lost, when it leaves another question unanswered, and when others accuse it: that
brings the accusation to the accused, and tells this peer whether to believe it (`membership`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.open_requests import OpenRequest, OpenRequests
from p2pstore.gossip.gossip_messages import (
    Ack,
    Answer,
    Ask,
    ControlKind,
    Later,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.members.member_table import MemberChange, MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import PeerId
from p2pstore.wire import Code, Failure, Message

STRANGER_EVERY: Final = 4
"""One of this number of probes goes to any member, the others to neighbours: a neighbour of few has its turn, too."""
MAX_PROBES: Final = 64
"""Under way at once; each asks `indirect_probes` others at worst."""
MAX_DOUBTED: Final = 3
"""Probes under way above which none is begun only because an answer is late: that may be this peer's own load."""
LOOKED_AT_FOR_HELP: Final = 128
"""Members, for one that does not answer: with `MAX_PROBES` of thousands it would take 45 ms to look at all."""
MAX_RELAYED: Final = 32
"""Pings on behalf of others under way at once."""
RELAYED_SHARE: Final = 0.8
"""Of the time that is left, a helper may take this much, so that its refusal is back in time."""
MAX_RELAY_SECONDS: Final = 25.0


@dataclass(slots=True)
class _Probe:
    peer_id: PeerId
    sent_at: float
    ask_others_at: float
    ends_at: float
    direct_lost: bool = False
    """The ping came to nothing before its time: there is no connection."""
    asked_others: bool = False
    helpers: int = 0
    refusals: int = 0

    @property
    def hopeless(self) -> bool:
        """Every way was tried, and every helper says that it cannot reach the member either."""
        return self.direct_lost and 0 < self.helpers == self.refusals

    @property
    def due(self) -> float:
        if self.asked_others:
            return -math.inf if self.hopeless else self.ends_at
        return -math.inf if self.direct_lost else self.ask_others_at


class Probing:
    """See the module's docstring. `questions` makes the effects."""

    def __init__(self, membership: Membership, questions: OpenRequests, rng: Random) -> None:
        self._membership = membership
        self._config = membership.config
        self._questions = questions
        self._rng = rng
        self._probe_at = -math.inf
        self._recontact_at = -math.inf
        self._round: list[PeerId] = []
        self._turns = 0
        self._probes: dict[PeerId, _Probe] = {}
        self._tokens: dict[int, _Probe] = {}
        """Open questions of probes under way."""
        self._relayed: set[int] = set()
        self._suspected: list[PeerId] = []

    def __len__(self) -> int:
        return len(self._probes)

    def due(self) -> float:
        """When `tick` has something to do; minus infinity for at once."""
        if self._suspected:
            return -math.inf
        probes = (probe.due for probe in self._probes.values())
        return min(self._probe_at, self._recontact_at, *probes)

    def follow(self, change: MemberChange) -> None:
        if change.old is None:
            # A new member is probed within the current round, at a random place.
            self._round.insert(self._rng.randint(0, len(self._round)), change.peer_id)
        if change.new == Status.SUSPECT and change.by is not None:
            self._suspected.append(change.peer_id)

    def probe(self, peer_id: PeerId, now: float) -> list[Ask]:
        """Probe a member now, unless that is under way."""
        state = self._membership.get(peer_id)
        if state is None or not state.alive or state is self._membership.own:
            return []
        if peer_id in self._probes or len(self._probes) >= MAX_PROBES:
            return []
        patience = self._membership.health.multiplier
        interval = self._config.probe_interval_seconds * patience
        probe = _Probe(
            peer_id,
            sent_at=now,
            ask_others_at=now + self._config.probe_timeout_seconds * patience,
            ends_at=now + interval,
        )
        self._probes[peer_id] = probe
        return [self._ping(state, probe, now)]

    def doubt(self, peer_ids: Sequence[PeerId], now: float) -> list[Ask]:
        """Probe members whose answers to other questions are late, a few at a time."""
        asks: list[Ask] = []
        for peer_id in peer_ids:
            if len(self._probes) >= MAX_DOUBTED:
                break
            asks += self.probe(peer_id, now)
        return asks

    def answered(self, token: int, asked: OpenRequest, reply: Message | None) -> list[Answer]:
        """The outcome of a PING or PING_REQUEST; what an `Ack` says has been taken in already."""
        if token in self._relayed:
            self._relayed.discard(token)
            if not isinstance(reply, Ack):
                reply = Failure(int(Code.UNAVAILABLE), "that peer did not answer here either")
            return [Answer(token, reply)]
        probe = self._tokens.pop(token, None)
        if probe is None:
            return []
        if isinstance(reply, Ack) or (reply is not None and asked.kind == ControlKind.PING):
            self._end(probe)
            self._membership.health.better()
        elif asked.kind == ControlKind.PING:
            probe.direct_lost = True
        elif reply is not None:
            probe.refusals += 1
        return []

    def relay(
        self, sender: PeerId, request: PingRequest, now: float
    ) -> tuple[Later | Failure, list[Ask]]:
        """Ping a member for another one: no verdict of this peer's own. Raises `ProtocolError` for nonsense."""
        if request.timeout_ms <= 0:
            raise ProtocolError(f"a ping wanted within {request.timeout_ms} ms")
        state = self._membership.get(request.peer_id)
        if state is None or state.signed is None or request.peer_id == sender:
            return Failure(int(Code.UNAVAILABLE), "that peer is not known here"), []
        if len(self._relayed) >= MAX_RELAYED:
            return Failure(int(Code.BUSY), "this peer pings as many for others as it may"), []
        seconds = min(request.timeout_ms / 1000, MAX_RELAY_SECONDS)
        ask = self._ask_ping(state, now, seconds)
        self._relayed.add(ask.token)
        return Later(ask.token, seconds), [ask]

    def tick(self, now: float, neighbours: Collection[PeerId]) -> list[Ask]:
        """Judge the probes under way and begin those that are due, mostly of `neighbours`."""
        asks: list[Ask] = []
        for probe in list(self._probes.values()):
            asks += self._judge(probe, neighbours, now)
        suspected, self._suspected = self._suspected, []
        for peer_id in suspected + self._membership.suspects.take_unproved():
            asks += self.probe(peer_id, now)
        if now >= self._probe_at:
            patience = self._membership.health.multiplier
            self._probe_at = now + self._config.probe_interval_seconds * patience
            target = self.next_target(neighbours)
            if target is not None:
                asks += self.probe(target, now)
        if now >= self._recontact_at:
            self._recontact_at = now + self._config.recontact_interval_seconds
            dead = self.next_dead()
            if dead is not None:
                asks.append(self._ask_ping(dead, now, self._config.probe_interval_seconds))
        return asks

    def _judge(self, probe: _Probe, neighbours: Collection[PeerId], now: float) -> list[Ask]:
        state = self._membership.get(probe.peer_id)
        if state is None or not state.alive or self._membership.resumed_at > probe.sent_at:
            self._end(probe)
        elif now >= probe.due:
            if not probe.asked_others:
                return self._ask_others(state, probe, self._helpers(neighbours), now)
            self._end(probe)
            if state.heard_at < probe.sent_at:
                # A helper that did not even refuse: perhaps nothing reaches this peer.
                self._membership.health.worse(1 + probe.helpers - probe.refusals)
                self._membership.suspect(probe.peer_id, now)
        return []

    def _ask_others(
        self, state: MemberState, probe: _Probe, helpers: list[PeerId], now: float
    ) -> list[Ask]:
        probe.asked_others = True
        left = probe.ends_at - now
        asks: list[Ask] = []
        if probe.direct_lost:
            # The connection ended, perhaps long ago: a new one may be had.
            probe.direct_lost = False
            asks.append(self._ping(state, probe, now))
        for helper in helpers:
            request = PingRequest(probe.peer_id, max(1, int(1000 * RELAYED_SHARE * left)))
            ask = self._questions.ask(
                helper,
                ControlKind.PING_REQUEST,
                request,
                now,
                timeout_seconds=max(left, 0.001),
                about=probe.peer_id,
            )
            probe.helpers += 1
            self._tokens[ask.token] = probe
            asks.append(ask)
        return asks

    def next_target(self, neighbours: Collection[PeerId]) -> PeerId | None:
        """The next member to probe: every neighbour once a round, in random order, and at times any member."""
        others = self._membership.others()
        if not others:
            return None
        self._turns += 1
        if len(neighbours) < len(others) and self._turns % STRANGER_EVERY == 0:
            return self._rng.choice(others).peer_id
        for _ in range(2):
            while self._round:
                peer_id = self._round.pop()
                if peer_id in neighbours:
                    return peer_id
            self._round = list(neighbours)
            self._rng.shuffle(self._round)
        return None

    def next_dead(self) -> MemberState | None:
        """A random dead member to try again, with probability dead / live; ask once a second. One contact anywhere in
        the cluster is enough, since its refutation spreads."""
        dead = self._membership.dead_count
        if not dead or self._rng.random() >= dead / max(1, len(self._membership.live())):
            return None
        return self._membership.dead(self._rng.randrange(dead))

    def _helpers(self, neighbours: Collection[PeerId]) -> list[PeerId]:
        """Members to ask for help: neighbours, as they have connections, if they suffice."""
        count = self._config.indirect_probes
        fit = [peer_id for peer_id in neighbours if self._may_help(peer_id)]
        if len(fit) < count:
            others = self._membership.others()
            if len(others) > LOOKED_AT_FOR_HELP:
                others = self._rng.sample(others, LOOKED_AT_FOR_HELP)
            fit = [s.peer_id for s in others if self._may_help(s.peer_id)]
        return self._rng.sample(fit, min(count, len(fit)))

    def _may_help(self, peer_id: PeerId) -> bool:
        state = self._membership.get(peer_id)
        return state is not None and state.status == Status.ALIVE and peer_id not in self._probes

    def _ping(self, state: MemberState, probe: _Probe, now: float) -> Ask:
        ask = self._ask_ping(state, now, probe.ends_at - now)
        self._tokens[ask.token] = probe
        return ask

    def _ask_ping(self, state: MemberState, now: float, timeout_seconds: float) -> Ask:
        request = Ping(state.incarnation, self._membership.claims((state.peer_id,), state.peer_id))
        return self._questions.ask(
            state.peer_id, ControlKind.PING, request, now, timeout_seconds=timeout_seconds
        )

    def _end(self, probe: _Probe) -> None:
        self._probes.pop(probe.peer_id, None)
        for token in [token for token, each in self._tokens.items() if each is probe]:
            del self._tokens[token]
