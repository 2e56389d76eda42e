"""SWIM's rules: precedence, refutation, probing, timeouts, forgetting."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.membership import MAX_INCARNATION, Membership, MembershipConfig, check_claim
from p2pstore.gossip.messages import Claim, Status
from p2pstore.gossip.records import SignedRecord
from tests.unit.gossip_network import peer_id_of, peer_record

SIGNED = SignedRecord(b"", b"")


def membership(count: int = 4, **config: float) -> Membership:
    """Peer 0's view of `count` peers."""
    made = Membership(peer_id_of(0), 1, MembershipConfig(**config), Random(1))  # type: ignore[arg-type]
    for number in range(count):
        made.observe_record(peer_record(number), SIGNED, 0.0)
    made.take_changes()
    return made


def claim(number: int, status: Status, incarnation: int = 1) -> Claim:
    return Claim(peer_id_of(number), incarnation, int(status), 7)


def status_of(made: Membership, number: int) -> tuple[Status, int]:
    state = made.get(peer_id_of(number))
    assert state is not None
    return state.status, state.incarnation


claims = st.builds(
    claim,
    st.integers(1, 2),
    st.sampled_from(list(Status)),
    st.integers(0, 4),
)


@given(st.lists(claims, max_size=12), st.randoms(use_true_random=False))
def test_claims_commute_and_the_incarnation_never_falls(evidence: list[Claim], rng: Random) -> None:
    shuffled = list(evidence)
    rng.shuffle(shuffled)
    one, other = membership(), membership()
    for item in evidence:
        before = one.get(item.peer_id)
        assert before is not None
        incarnation = before.incarnation
        one.observe_claims([item], 1.0)
        after = one.get(item.peer_id)
        assert after is not None
        assert after.incarnation == max(incarnation, item.incarnation)
    other.observe_claims(shuffled + shuffled, 1.0)
    for number in (1, 2):
        assert status_of(one, number) == status_of(other, number)


def test_a_late_claim_of_life_does_not_resurrect() -> None:
    made = membership()
    made.observe_claims([claim(1, Status.DEAD, 10), claim(1, Status.ALIVE, 2)], 1.0)
    assert status_of(made, 1) == (Status.DEAD, 10)
    made.observe_record(peer_record(1, incarnation=9, sequence=5), SIGNED, 2.0)
    assert status_of(made, 1) == (Status.DEAD, 10)
    made.observe_record(peer_record(1, incarnation=11), SIGNED, 2.0)
    assert status_of(made, 1) == (Status.ALIVE, 11)


def test_the_death_of_a_stranger_is_remembered() -> None:
    made = membership(1)
    made.observe_claims([claim(3, Status.DEAD, 10)], 1.0)
    made.observe_record(peer_record(3, incarnation=10), SIGNED, 2.0)
    assert [state.peer_id for state in made.live()] == [peer_id_of(0)]


def test_the_accused_refutes_with_a_higher_incarnation_and_the_same_record() -> None:
    made = membership()
    made.observe_claims([claim(0, Status.SUSPECT, 1)], 1.0)
    assert made.own.incarnation == 2
    assert made.own.status == Status.ALIVE
    assert made.own.record == peer_record(0)
    assert Claim(peer_id_of(0), 2, int(Status.ALIVE), made.own.member) in made.claims()
    made.observe_claims([claim(0, Status.DEAD, 1)], 2.0)
    assert made.own.incarnation == 2
    made.observe_claims([claim(0, Status.DEAD, 900)], 2.0)
    assert made.own.incarnation == 901


def test_leaving_is_final_until_a_later_start() -> None:
    made = membership()
    made.observe_record(peer_record(1, sequence=2, leaving=True), SIGNED, 1.0)
    made.observe_claims([claim(1, Status.ALIVE, 5)], 2.0)
    assert status_of(made, 1)[0] == Status.LEFT
    made.observe_record(peer_record(1, incarnation=9), SIGNED, 3.0)
    assert status_of(made, 1) == (Status.ALIVE, 9)


def test_a_suspect_that_stays_silent_dies_after_the_suspicion_time() -> None:
    made = membership()
    made.tick(0.9)
    made.on_probe_failed(peer_id_of(1), 0.5)
    assert made.next_tick() == -math.inf
    assert status_of(made, 1)[0] == Status.ALIVE  # not judged outside of tick
    made.tick(1.0)
    assert status_of(made, 1)[0] == Status.SUSPECT
    assert made.next_tick() == 1.0 + made.suspicion_seconds() == 5.0
    for time in (2.0, 3.0, 4.0, 4.9):
        made.tick(time)
    assert status_of(made, 1)[0] == Status.SUSPECT
    made.tick(5.0)
    assert status_of(made, 1)[0] == Status.DEAD
    changes = [(change.old, change.new) for change in made.take_changes()]
    assert changes == [(Status.ALIVE, Status.SUSPECT), (Status.SUSPECT, Status.DEAD)]


def test_what_arrived_before_the_tick_counts() -> None:
    made = membership()
    made.on_probe_failed(peer_id_of(1), 0.5)
    made.on_ack(peer_id_of(1), 1.0)
    made.on_probe_failed(peer_id_of(2), 0.5)
    made.heard(peer_id_of(2), 0.6)
    made.tick(1.0)
    assert status_of(made, 1)[0] == status_of(made, 2)[0] == Status.ALIVE


def test_a_stalled_process_gives_suspects_the_time_it_stood_still() -> None:
    made = membership()
    made.tick(0.0)
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    made.tick(60.0)  # this process slept for a minute
    assert status_of(made, 1)[0] == Status.SUSPECT
    for time in range(61, 70):
        made.tick(float(time))
    assert status_of(made, 1)[0] == Status.DEAD


def test_nobody_is_killed_by_one_who_hears_it() -> None:
    made = membership()
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    for tenth in range(100):
        made.heard(peer_id_of(1), tenth / 10)
        made.tick(tenth / 10)
    assert status_of(made, 1)[0] == Status.SUSPECT


def test_a_second_suspicion_has_its_own_time() -> None:
    made = membership()
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    made.observe_claims([claim(1, Status.SUSPECT, 2)], 3.0)
    assert made.next_tick() == 3.0 + made.suspicion_seconds()


def test_every_other_member_is_probed_once_a_round() -> None:
    made = membership(10)
    rounds = [[made.next_probe() for _ in range(9)] for _ in range(3)]
    orders = [[state.peer_id for state in states if state] for states in rounds]
    for order in orders[1:]:
        assert sorted(order) == sorted(peer_id_of(number) for number in range(1, 10))
    assert orders[1] != orders[2]


def test_alone_there_is_nobody_to_probe() -> None:
    assert membership(1).next_probe() is None


@pytest.mark.parametrize(("dead", "expected"), [(1, 1 / 9), (5, 1.0)])
def test_the_dead_are_tried_again(dead: int, expected: float) -> None:
    made = membership(10)
    made.observe_claims([claim(n, Status.DEAD) for n in range(1, dead + 1)], 0.0)
    tries = sum(made.recontact() is not None for _ in range(3000)) / 3000
    assert tries == pytest.approx(expected, abs=0.03)


def test_claims_ride_a_bounded_number_of_times_and_the_receivers_own_goes_first() -> None:
    made = membership(10)
    made.observe_claims([claim(n, Status.SUSPECT) for n in range(1, 6)], 0.0)
    sent = [made.claims() for _ in range(made.retransmit_limit() + 1)]
    assert made.retransmit_limit() == 8
    assert [len(batch) for batch in sent] == [5] * 8 + [0]
    assert not made.has_rumors
    about = made.claims((peer_id_of(3), peer_id_of(9)))
    assert about == [Claim(peer_id_of(3), 1, int(Status.SUSPECT), made.own.member)]


def test_a_message_carries_a_bounded_number_of_claims() -> None:
    made = membership(100)
    made.observe_claims([claim(n, Status.SUSPECT) for n in range(1, 100)], 0.0)
    assert len(made.claims()) == 32


def test_a_death_is_told_to_others_as_a_suspicion() -> None:
    made = membership()
    made.observe_claims([claim(1, Status.DEAD, 3)], 0.0)
    told = made.accusation(peer_id_of(1))
    assert told is not None
    assert (told.status, told.incarnation) == (Status.SUSPECT, 3)


def test_the_dead_are_forgotten_after_a_day_and_the_oldest_when_room_is_short() -> None:
    made = membership(6, max_members=6)
    made.observe_claims([claim(1, Status.DEAD)], 10.0)
    made.observe_claims([claim(2, Status.DEAD)], 5.0)
    made.observe_record(peer_record(6), SIGNED, 20.0)
    assert made.get(peer_id_of(2)) is None
    assert made.get(peer_id_of(1)) is not None
    assert [s.peer_id for s in made.expire(10.0 + 24 * 3600 + 1)] == [peer_id_of(1)]
    made.observe_record(peer_record(7), SIGNED, 20.0)
    with pytest.raises(ProtocolError, match="members"):
        made.observe_record(peer_record(8), SIGNED, 20.0)


@pytest.mark.parametrize(
    "wrong",
    [
        Claim(b"short", 1, 0, 1),
        Claim(peer_id_of(1), 1, -1, 1),
        Claim(peer_id_of(1), -1, 0, 1),
        Claim(peer_id_of(1), MAX_INCARNATION, 0, 1),
    ],
)
def test_nonsense_is_refused(wrong: Claim) -> None:
    with pytest.raises(ProtocolError):
        check_claim(wrong)


@settings(max_examples=50)
@given(st.lists(st.tuples(claims, st.floats(0, 20)), max_size=20))
def test_whatever_happens_tables_agree(steps: list[tuple[Claim, float]]) -> None:
    made = membership()
    now = 0.0
    for item, seconds in steps:
        now += seconds
        made.observe_claims([item], now)
        made.tick(now)
        alive = {s.peer_id for s in made.states() if s.status <= Status.SUSPECT}
        assert {s.peer_id for s in made.live()} == alive
        suspects = {s.peer_id for s in made.states() if s.status == Status.SUSPECT}
        assert (made.next_tick() < math.inf) == bool(suspects)
