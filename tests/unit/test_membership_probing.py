"""Probes: their waits, those who help, what a failure says of whom, and who is probed when."""

import math
from random import Random

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.open_requests import OpenRequests
from p2pstore.gossip.gossip_config import GossipConfig, preset
from p2pstore.gossip.gossip_messages import (
    Ack,
    Answer,
    Ask,
    Claim,
    ControlKind,
    Later,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.members.member_table import MemberChange, MembershipConfig
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.members.probing import LOOKED_AT_FOR_HELP, MAX_RELAYED, Probing
from p2pstore.gossip.members.suspicion import (
    LocalHealth,
    expected_confirmations,
    shortest_suspicion_seconds,
)
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.wire import Code, Failure, Message
from simulation.signer import peer_id_of
from tests.present import present
from tests.unit.gossip_network import bury, peer_record

NACK = Failure(int(Code.UNAVAILABLE), "not reached")
ACK = Ack(1, [])


class Prober:
    """Peer 0 and its probes; nothing is sent, the test says what comes back."""

    def __init__(self, count: int = 6, seed: int = 1) -> None:
        self.membership = Membership(peer_id_of(0), 1, MembershipConfig())
        for number in range(count):
            self.membership.observe_record(peer_record(number), SignedRecord(b"", b""), 0.0)
        self.membership.take_changes()
        self.questions = OpenRequests(GossipConfig())
        self.probing = Probing(self.membership, self.questions, Random(seed))
        self.now = 0.0

    @property
    def neighbours(self) -> list[PeerId]:
        return [state.peer_id for state in self.membership.others()]

    def quiet(self) -> None:
        """From here on no member is probed only because it is its turn."""
        self.probing._probe_at = self.probing._recontact_at = math.inf

    def tick(self, now: float) -> list[Ask]:
        self.now = now
        self.membership.tick(now)
        return self.probing.tick(now, self.neighbours)

    def answer(self, ask: Ask, reply: Message | None) -> list[Answer]:
        asked = present(self.questions.take(ask.token))
        return self.probing.answered(ask.token, asked, reply)

    def status(self, number: int) -> Status:
        state = present(self.membership.get(peer_id_of(number)))
        return state.status


def probing_one(count: int = 6) -> tuple[Prober, Ask]:
    """A probe of peer 1 that was begun at 0.0, and its ping."""
    prober = Prober(count)
    prober.quiet()
    prober.tick(0.0)
    (ping,) = prober.probing.probe(peer_id_of(1), 0.0)
    return prober, ping


def others_asked(prober: Prober, now: float = 0.5) -> list[Ask]:
    prober.tick(now / 2)
    asks = prober.tick(now)
    assert {ask.kind for ask in asks} <= {ControlKind.PING_REQUEST, ControlKind.PING}
    return [ask for ask in asks if ask.kind == ControlKind.PING_REQUEST]


def test_an_answer_ends_the_probe() -> None:
    prober, ping = probing_one()
    assert (ping.kind, ping.peer_id, ping.timeout_seconds) == (ControlKind.PING, peer_id_of(1), 1.0)
    prober.answer(ping, ACK)
    assert len(prober.probing) == 0
    assert others_asked(prober) == []


def test_who_is_silent_is_pinged_by_three_others_who_have_less_time_than_is_left() -> None:
    prober, _ = probing_one()
    assert prober.probing.due() == 0.5
    asks = others_asked(prober)
    assert len({ask.peer_id for ask in asks}) == 3
    assert peer_id_of(1) not in {ask.peer_id for ask in asks}
    assert {ask.request for ask in asks} == {PingRequest(peer_id_of(1), 400)}
    assert {ask.timeout_seconds for ask in asks} == {0.5}
    assert prober.probing.due() == 1.0


@pytest.mark.parametrize("sign", ["by a helper", "late", "of itself"])
def test_a_sign_of_life_counts_until_the_probe_ends(sign: str) -> None:
    prober, ping = probing_one()
    asks = others_asked(prober)
    if sign == "of itself":
        prober.membership.heard(peer_id_of(1), 0.6)
    else:
        prober.answer(ping if sign == "late" else asks[1], ACK)
    prober.tick(0.75)
    prober.tick(1.0)
    assert prober.status(1) is Status.ALIVE
    assert prober.membership.health.score == 0
    assert len(prober.probing) == 0


def test_the_silent_is_suspected_at_the_end_and_only_in_tick() -> None:
    prober, ping = probing_one()
    asks = others_asked(prober)
    prober.tick(0.9)
    for ask in [ping, *asks]:
        prober.answer(ask, None)
    assert prober.status(1) is Status.ALIVE
    prober.tick(1.0)
    assert prober.status(1) is Status.SUSPECT


def test_when_there_is_no_connection_and_every_helper_says_so_nobody_waits() -> None:
    prober, ping = probing_one()
    prober.answer(ping, None)
    assert prober.probing.due() == -math.inf
    asks = prober.tick(0.01)
    again = [ask for ask in asks if ask.kind == ControlKind.PING]
    assert [ask.peer_id for ask in again] == [peer_id_of(1)]  # over a new connection
    prober.answer(again[0], None)
    helpers = [ask for ask in asks if ask.kind == ControlKind.PING_REQUEST]
    for ask in helpers[:2]:
        prober.answer(ask, NACK)
    prober.tick(0.02)
    assert prober.status(1) is Status.ALIVE
    prober.answer(helpers[2], NACK)
    prober.tick(0.03)
    assert prober.status(1) is Status.SUSPECT


def test_of_many_members_some_are_looked_at_for_help() -> None:
    prober, _ = probing_one(count=LOOKED_AT_FOR_HELP + 200)
    looked_at: list[PeerId] = []
    may_help = prober.probing._may_help

    def counting(peer_id: PeerId) -> bool:
        looked_at.append(peer_id)
        return may_help(peer_id)

    prober.probing._may_help = counting  # type: ignore[method-assign]
    prober.probing.tick(0.25, [])
    asks = prober.probing.tick(0.5, [])
    assert sum(ask.kind == ControlKind.PING_REQUEST for ask in asks) == 3
    assert len(looked_at) <= LOOKED_AT_FOR_HELP


def test_helpers_that_are_silent_too_make_this_peer_doubt_itself() -> None:
    prober, _ = probing_one()
    asks = others_asked(prober)
    prober.answer(asks[0], NACK)
    prober.answer(asks[1], None)
    prober.tick(0.75)
    prober.tick(1.0)
    assert prober.membership.health.score == 1 + 2
    (ping,) = prober.probing.probe(peer_id_of(2), 1.0)
    assert ping.timeout_seconds == 4.0
    prober.tick(1.25)
    assert prober.probing.due() == 1.0 + 4 * 0.5
    prober.answer(ping, ACK)
    assert prober.membership.health.score == 2


def test_the_next_turn_waits_longer_when_this_peer_is_not_well() -> None:
    prober = Prober()
    prober.membership.health.worse(2)
    prober.probing._recontact_at = math.inf
    (ping,) = prober.tick(0.0)
    prober.answer(ping, ACK)
    assert prober.probing.due() == 3.0


def test_local_health_stays_within_its_bounds() -> None:
    health = LocalHealth()
    health.better()
    assert (health.score, health.multiplier) == (0, 1)
    health.worse(20)
    assert (health.score, health.multiplier) == (8, 9)
    health.better()
    assert health.score == 7


def test_a_probe_that_was_under_way_while_this_process_stood_still_proves_nothing() -> None:
    prober, ping = probing_one()
    asks = others_asked(prober)
    for ask in [ping, *asks]:
        prober.answer(ask, None)  # they ran out, in a process that could not hear
    prober.tick(2.0)
    assert prober.status(1) is Status.ALIVE
    assert len(prober.probing) == 0
    assert prober.membership.health.score == 0


def test_the_accused_hears_the_accusation_with_the_ping() -> None:
    prober, _ = probing_one()
    prober.membership.suspect(peer_id_of(2), 0.0)
    prober.membership.claims()  # whatever else is said goes after it
    (ping,) = prober.probing.probe(peer_id_of(2), 0.1)
    assert isinstance(ping.request, Ping)
    accusation = Claim(peer_id_of(2), 1, int(Status.SUSPECT), prober.membership.own.member)
    assert ping.request.claims[0] == accusation


# --- helping -----------------------------------------------------------------------------------


def relayed(prober: Prober, timeout_ms: int = 400) -> Ask:
    later, (ping,) = prober.probing.relay(peer_id_of(2), PingRequest(peer_id_of(1), timeout_ms), 0.0)
    assert later == Later(ping.token, timeout_ms / 1000)
    assert (ping.kind, ping.peer_id) == (ControlKind.PING, peer_id_of(1))
    assert ping.timeout_seconds == timeout_ms / 1000
    return ping


def test_a_helper_passes_the_answer_on_and_refuses_when_there_is_none() -> None:
    prober = Prober()
    prober.quiet()
    ping = relayed(prober)
    assert prober.answer(ping, Ack(5, [])) == [Answer(ping.token, Ack(5, []))]
    ping = relayed(prober)
    (answer,) = prober.answer(ping, None)
    assert answer.token == ping.token
    assert isinstance(answer.reply, Failure)
    assert answer.reply.code == Code.UNAVAILABLE


def test_what_a_helper_finds_is_no_verdict_of_its_own() -> None:
    prober = Prober()
    prober.quiet()
    prober.answer(relayed(prober), None)
    for quarter in range(1, 20):
        prober.tick(quarter / 4)
    assert prober.status(1) is Status.ALIVE
    assert prober.membership.health.score == 0


def test_a_helper_pings_a_bounded_number_of_peers_and_none_that_it_does_not_know() -> None:
    prober = Prober()
    for target, code in [(peer_id_of(99), Code.UNAVAILABLE), (peer_id_of(2), Code.UNAVAILABLE)]:
        reply, asks = prober.probing.relay(peer_id_of(2), PingRequest(target, 400), 0.0)
        assert isinstance(reply, Failure)
        assert (reply.code, asks) == (code, [])
    for _ in range(MAX_RELAYED):
        ping = relayed(prober)
    reply, asks = prober.probing.relay(peer_id_of(2), PingRequest(peer_id_of(1), 400), 0.0)
    assert isinstance(reply, Failure)
    assert (reply.code, asks) == (Code.BUSY, [])
    prober.answer(ping, None)
    relayed(prober)


@pytest.mark.parametrize(("asked_ms", "seconds"), [(10**9, 25.0), (1, 0.001)])
def test_a_helper_waits_only_so_long(asked_ms: int, seconds: float) -> None:
    prober = Prober()
    reply, _ = prober.probing.relay(peer_id_of(2), PingRequest(peer_id_of(1), asked_ms), 0.0)
    assert isinstance(reply, Later)
    assert reply.timeout_seconds == seconds


def test_no_time_at_all_is_nonsense() -> None:
    with pytest.raises(ProtocolError):
        Prober().probing.relay(peer_id_of(2), PingRequest(peer_id_of(1), 0), 0.0)


# --- whom and when -------------------------------------------------------------------------------


def test_every_neighbour_is_probed_once_a_round() -> None:
    prober = Prober(10)
    rounds = [[prober.probing.next_target(prober.neighbours) for _ in range(9)] for _ in range(3)]
    for order in rounds[1:]:
        assert sorted(each for each in order if each) == sorted(prober.neighbours)
    assert rounds[1] != rounds[2]


def test_now_and_then_somebody_else_is_probed() -> None:
    prober = Prober(40)
    few = prober.neighbours[:4]
    targets = [prober.probing.next_target(few) for _ in range(400)]
    strangers = [each for each in targets if each not in few]
    assert 70 < len(strangers) <= 100
    assert len(set(strangers)) > 25


def test_who_joins_has_its_turn_within_the_round() -> None:
    prober = Prober(10)
    prober.probing.next_target(prober.neighbours)
    prober.membership.observe_record(peer_record(10), SignedRecord(b"", b""), 0.0)
    for change in prober.membership.take_changes():
        prober.probing.follow(change)
    assert peer_id_of(10) in [prober.probing.next_target(prober.neighbours) for _ in range(9)]


def test_alone_there_is_nobody_to_probe() -> None:
    assert Prober(1).probing.next_target([]) is None


@pytest.mark.parametrize("count", [5, 101])
def test_whom_others_suspect_this_peer_looks_at(count: int) -> None:
    prober = Prober(count)
    prober.quiet()
    prober.probing.follow(MemberChange(peer_id_of(1), 1, Status.ALIVE, Status.SUSPECT, by=7))
    assert [ask.peer_id for ask in prober.tick(0.0)] == [peer_id_of(1)]


def test_late_answers_begin_few_probes_and_each_question_only_one() -> None:
    prober = Prober(10)
    prober.quiet()
    for number in range(1, 8):
        prober.questions.ask(peer_id_of(number), ControlKind.EXCHANGE, ACK, number / 10)
    assert prober.questions.overdue(-math.inf, 0.1) == []
    late = prober.questions.overdue(-math.inf, 0.65)
    assert late == [peer_id_of(number) for number in range(1, 7)]
    assert prober.questions.overdue(-math.inf, 0.65) == []
    assert prober.questions.overdue(0.75, 0.9) == []  # asked before a stall
    assert len(prober.probing.doubt(late, 1.0)) == 3


@pytest.mark.parametrize(("dead", "expected"), [(1, 1 / 9), (5, 1.0)])
def test_the_dead_are_tried_again(dead: int, expected: float) -> None:
    prober = Prober(10)
    for number in range(1, dead + 1):
        bury(prober.membership, [number], 0.0)
    tries = sum(prober.probing.next_dead() is not None for _ in range(3000)) / 3000
    assert tries == pytest.approx(expected, abs=0.03)


# --- figures of memberlist -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "seconds"), [(1, 4.0), (10, 4.0), (100, 8.0), (1000, 12.0), (5000, 14.8)]
)
def test_the_shortest_suspicion_grows_with_the_cluster(members: int, seconds: float) -> None:
    assert shortest_suspicion_seconds(4.0, members, 1.0) == pytest.approx(seconds, abs=0.01)


@pytest.mark.parametrize(
    ("multiplier", "members", "expected"), [(4, 3, 0), (4, 4, 2), (6, 100, 4), (3, 3, 1), (2, 9, 0)]
)
def test_as_many_confirmations_are_expected_as_there_may_be(
    multiplier: float, members: int, expected: int
) -> None:
    assert expected_confirmations(multiplier, members) == expected


def test_the_presets_are_those_of_memberlist() -> None:
    wanted = {"lan": (1.0, 0.5, 3, 4.0, 4), "wan": (5.0, 3.0, 3, 6.0, 4), "local": (1.0, 0.2, 1, 3.0, 2)}
    for network, values in wanted.items():
        members = preset(network).membership  # type: ignore[arg-type]  # one of three
        assert values == (
            members.probe_interval_seconds,
            members.probe_timeout_seconds,
            members.indirect_probes,
            members.suspicion_multiplier,
            members.retransmit_multiplier,
        )
