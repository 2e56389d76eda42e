"""Handlers of gossip requests and replies, by kind. Pure."""

from __future__ import annotations

from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.anti_entropy import News
from p2pstore.gossip.exchange.delta_checks import check_claims
from p2pstore.gossip.exchange.exchanges import read_reply, read_request
from p2pstore.gossip.exchange.open_requests import OpenRequest
from p2pstore.gossip.gossip_messages import (
    Ack,
    Ask,
    Claim,
    ControlKind,
    Delta,
    Effect,
    Exchange,
    ExchangeReply,
    Later,
    Leave,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.gossip_state import GossipState
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.records import ClusterRecord, PeerId, SignedRecord
from p2pstore.wire import Code, Empty, Failure, Message

MANY_ROWS: Final = 1_000
"""Digest rows made anew in one step, from which on it chooses no homes as well: that would take 7 ms in all."""


class Incoming:
    """Takes in others' requests and answers. Methods raise `ProtocolError`, and change nothing, for nonsense."""

    def __init__(self, state: GossipState) -> None:
        self._state = state
        self._membership = state.membership
        self._arrived: list[tuple[ClusterRecord, SignedRecord]] = []

    def take_cluster_records(self) -> list[tuple[ClusterRecord, SignedRecord]]:
        """New cluster records since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def serve(
        self, sender: PeerId, kind: int, request: Message, now: float
    ) -> tuple[Message | Later, list[Effect]]:
        """Answer a member's request."""
        match request:
            case Ping():
                return self._serve_ping(sender, request, now), []
            case PingRequest():
                return self._serve_ping_request(sender, request, now)
            case Exchange():
                return self._serve_exchange(sender, request, now), []
            case Delta():
                self._state.exchanges.delta_came(sender)
                self._take_delta(sender, request, now)
                self._heard(sender, now)
                return Empty(), []
            case Leave():
                pair = self._state.checks.check_record(request.record)
                if pair is not None and (pair[0].peer_id != sender or not pair[0].leaving):
                    raise ProtocolError("a farewell that is not the sender's own")
                self._take_delta(sender, Delta([request.record], [], [], []), now)
                return Empty(), []
            case _:
                text = f"requests of kind {kind} are not answered"
                return Failure(int(Code.UNSUPPORTED), text), []

    def serve_reader(self, sender: PeerId, kind: int, request: Message, now: float) -> Message:
        """Answer a peer that was admitted as a reader: it is told what members are told. Nothing that it says is taken
        in or passed on, members do not know it, and what it says unasked is acknowledged."""
        state = self._state
        match request:
            case Ping():
                return Ack(self._membership.own.incarnation, [], state.time.unix_ms(now))
            case Exchange():
                theirs = read_request(request, state.knowledge.table)
                state.record(now)
                answer = state.exchanges.answer_reader(sender, request, theirs, now)
                self.defer_homes_if_slow(now)
                return answer
            case Delta() | Leave():
                return Empty()
            case _:
                return Failure(int(Code.UNAVAILABLE), f"readers are not answered kind {kind}")

    def probe_answered(
        self, token: int, asked: OpenRequest, reply: Message | None, now: float
    ) -> list[Effect]:
        if isinstance(reply, Ack):
            pinged = asked.about or asked.peer_id
            try:
                check_claims(reply.claims)
            except ProtocolError:
                answers = self._state.probing.answered(token, asked, None)
                if answers:  # the waiting task is told that there is no answer
                    return [*answers]
                raise
            self._state.time.clocks.answered(pinged, reply.unix_ms, asked.sent_at, now)
            self._heard(asked.peer_id, now)
            # Claims on an answer that a helper passed on count for nothing: the helper has taken them in.
            claims = [] if asked.about else reply.claims
            alive = self._self_claim(pinged, reply.incarnation)
            self._membership.observe_claims([*claims, alive], now, asked.peer_id)
        elif reply is not None:
            self._membership.heard(asked.peer_id, now)
        if isinstance(reply, Ack) and asked.kind == ControlKind.PING:
            self._membership.answered(asked.peer_id, now)
        answers = self._state.probing.answered(token, asked, reply)
        return list(answers)

    def exchanged(self, asked: OpenRequest, reply: ExchangeReply, now: float) -> list[Ask]:
        theirs = read_reply(reply, self._state.knowledge.table)
        self._state.time.clocks.answered(asked.peer_id, reply.unix_ms, asked.sent_at, now)
        news = self._take_delta(asked.peer_id, reply.delta, now)
        self._state.exchanges.learn(asked, reply, theirs, now, new_records=len(news.cluster_records))
        self._state.record(now)
        return self._state.exchanges.follow_up(asked.peer_id, theirs, now, news=news.anything)

    def _serve_ping(self, sender: PeerId, ping: Ping, now: float) -> Message:
        check_claims(ping.claims)
        if not 0 <= ping.incarnation < MAX_INCARNATION:
            raise ProtocolError(f"a ping for incarnation {ping.incarnation}")
        claims = list(ping.claims)
        if ping.incarnation > self._membership.own.incarnation:
            # It was made up, or this peer's clock went back: be above it, or no member listens.
            claims.append(
                Claim(self._state.peer_id, ping.incarnation, int(Status.SUSPECT), self._state.member)
            )
        self._heard(sender, now)
        self._membership.observe_claims(claims, now, sender)
        return self._ack(sender, now)

    def _ack(self, sender: PeerId, now: float) -> Ack:
        claims = self._membership.claims((sender,), sender)
        return Ack(self._membership.own.incarnation, claims, self._state.time.unix_ms(now))

    def _serve_ping_request(
        self, sender: PeerId, request: PingRequest, now: float
    ) -> tuple[Message | Later, list[Effect]]:
        self._heard(sender, now)
        if request.peer_id == self._state.peer_id:
            return self._ack(sender, now), []
        reply, asks = self._state.probing.relay(sender, request, now)
        return reply, [*asks]

    def _serve_exchange(self, sender: PeerId, request: Exchange, now: float) -> Message:
        theirs = read_request(request, self._state.knowledge.table)
        check_claims(request.claims)
        self._state.time.clocks.asked(sender, request.unix_ms, now)
        self._heard(sender, now)
        self._membership.observe_claims(request.claims, now, sender)
        self._state.record(now)
        answer = self._state.exchanges.answer(sender, request, theirs, now)
        self.defer_homes_if_slow(now)
        return answer

    def _take_delta(self, sender: PeerId, delta: Delta, now: float) -> News:
        checked = self._state.checks.check(delta, now, sender)
        known = [self._membership.get(record.peer_id) for record, _ in checked.records]
        records = [state.record if state is not None else None for state in known]
        news = self._state.knowledge.apply(checked, now, sender)
        for before, (record, _) in zip(records, checked.records, strict=True):
            self._state.partitions.observe_record(before, record, now)
            self._state.losses += before is not None and record.incarnation > before.incarnation
        self._state.partitions.current.keep_up()
        self._membership.heard(sender, now)
        for chunk in checked.logs:
            self._state.heard_of(chunk.operations, now)
        for record in news.own:
            if self._state.own_record.seen(record):
                self._state.partitions.pushes.voided(now)
        self._state.eager_news.add(news, sender)
        self._arrived += news.cluster_records
        if news.anything:
            self._state.exchanges.hurry()
        return news

    def _heard(self, peer_id: PeerId, now: float) -> None:
        """Something came unasked, or a probe was answered: never the reply to an exchange."""
        self._membership.heard(peer_id, now)
        state = self._membership.get(peer_id)
        if not self._membership.is_live(peer_id) and not (state is not None and state.leaving):
            # It lives: its record is missing here, or it should hear that it is held dead.
            self._state.exchanges.want(peer_id)

    def defer_homes_if_slow(self, now: float) -> None:
        """Defer the choice of homes to a later step where this step has made `MANY_ROWS` digest rows anew."""
        if self._state.knowledge.table.take_rows_made() >= MANY_ROWS:
            self._state.partitions.defer(now)

    def _self_claim(self, peer_id: PeerId, incarnation: int) -> Claim:
        """The claim in a peer's own acknowledgement: it is alive, at this incarnation."""
        state = self._membership.get(peer_id)
        bounded = incarnation if 0 <= incarnation < MAX_INCARNATION else 0
        return Claim(
            peer_id,
            bounded,
            int(Status.ALIVE),
            state.member if state is not None else self._state.member,
        )
