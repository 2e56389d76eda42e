"""Claims of members about each other: precedence, refutation, suspicion and its end, forgetting, rumours."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Status
from p2pstore.gossip.members.member_table import (
    MAX_HEARSAY,
    MAX_INCARNATION,
    MembershipConfig,
    check_claim,
)
from p2pstore.gossip.members.membership import (
    MAX_AHEAD_MS,
    REFUTATIONS_A_SECOND,
    REFUTATIONS_AT_ONCE,
    Membership,
)
from p2pstore.gossip.members.suspicion import (
    ACCUSATIONS_A_SECOND,
    ACCUSATIONS_AT_ONCE,
    DISBELIEVED_SECONDS,
    MAX_ACCUSERS,
    MAX_PAIRS,
    REFUTATIONS,
    Accusers,
)
from p2pstore.gossip.records import PeerId, SignedRecord, member_of, sign_peer_record
from simulation.signer import SimulatedSigner, peer_id_of
from tests.present import present
from tests.unit.gossip_network import Network, bury, peer_record

SIGNED = SignedRecord(b"", b"")


def membership(count: int = 4, **config: float) -> Membership:
    """Peer 0's view of `count` peers."""
    made = Membership(peer_id_of(0), 1, MembershipConfig(**config))  # type: ignore[arg-type]
    for number in range(count):
        record = peer_record(number)
        made.observe_record(record, sign_peer_record(record, SimulatedSigner(record.peer_id)), 0.0)
    made.take_changes()
    return made


def claim(number: int, status: Status, incarnation: int = 1, by: int = 7) -> Claim:
    return Claim(peer_id_of(number), incarnation, int(status), by)


def status_of(made: Membership, number: int) -> tuple[Status, int]:
    state = present(made.get(peer_id_of(number)))
    return state.status, state.incarnation


claims = st.builds(claim, st.integers(1, 2), st.sampled_from(list(Status)), st.integers(0, 4))


@given(st.lists(claims, max_size=12), st.randoms(use_true_random=False))
def test_claims_commute_and_the_incarnation_never_falls(evidence: list[Claim], rng: Random) -> None:
    shuffled = list(evidence)
    rng.shuffle(shuffled)
    one, other = membership(), membership()
    for item in evidence:
        before = present(one.get(item.peer_id))
        incarnation = before.incarnation
        one.observe_claims([item], 1.0)
        after = present(one.get(item.peer_id))
        assert after.incarnation == max(incarnation, item.incarnation)
    other.observe_claims(shuffled + shuffled, 1.0)
    for number in (1, 2):
        assert status_of(one, number) == status_of(other, number)


def test_a_late_claim_of_life_does_not_resurrect() -> None:
    made = membership()
    bury(made, [1], 1.0, 10)
    made.observe_claims([claim(1, Status.ALIVE, 2)], 1.0)
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


def ticks(made: Membership, begin: float, end: float) -> None:
    """A process that runs: it ticks every quarter of a second."""
    for quarter in range(round(4 * begin), round(4 * end) + 1):
        made.tick(quarter / 4)


def look_in_vain(made: Membership, begin: float, end: float) -> list[float]:
    """As `ticks`; each probe that is wanted fails a second later. When they were wanted."""
    wanted: list[float] = []
    failing: list[tuple[float, PeerId]] = []
    for quarter in range(round(4 * begin), round(4 * end) + 1):
        now = quarter / 4
        while failing and failing[0][0] <= now:
            made.suspect(failing.pop(0)[1], now)
        made.tick(now)
        for peer_id in made.suspects.take_unproved():
            wanted.append(now)
            failing.append((now + 1, peer_id))
    return wanted


def test_a_confirmed_suspect_that_stays_silent_dies_after_the_suspicion_time() -> None:
    made = membership(8)
    ticks(made, 0, 1)
    made.suspect(peer_id_of(1), 1.0)
    assert status_of(made, 1)[0] == Status.SUSPECT
    made.observe_claims([claim(1, Status.SUSPECT, by=2), claim(1, Status.SUSPECT, by=3)], 1.5)
    assert look_in_vain(made, 1.25, 4.75) == [4.0]  # once more, just before the end
    made.suspect(peer_id_of(1), 4.9)
    assert status_of(made, 1)[0] == Status.SUSPECT
    assert made.next_tick() == 1.0 + made.suspects.shortest_seconds(len(made.live())) == 5.0
    made.tick(5.0)
    assert status_of(made, 1)[0] == Status.DEAD
    changes = [(change.old, change.new) for change in made.take_changes()]
    assert changes == [(Status.ALIVE, Status.SUSPECT), (Status.SUSPECT, Status.DEAD)]


def test_time_alone_makes_nobody_dead() -> None:
    made = membership()
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    ticks(made, 0, 200)
    assert status_of(made, 1)[0] == Status.SUSPECT
    assert set(made.suspects.take_unproved()) == {peer_id_of(1)}


def test_who_only_heard_of_a_suspicion_gives_its_accusers_time_to_judge() -> None:
    accuser, other = membership(3), membership(3)
    accuser.suspect(peer_id_of(1), 0.0)
    other.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    assert look_in_vain(accuser, 0, 10)[0] == 3.0
    assert look_in_vain(other, 0, 10)[0] == 5.0


def test_who_looked_in_vain_itself_judges_with_the_accusers_though_it_is_not_counted() -> None:
    made = membership(8)
    accusations = [claim(1, Status.SUSPECT, by=each) for each in (2, 3, 4)]
    made.observe_claims(accusations, 0.0)
    made.suspect(peer_id_of(1), 1.0)
    assert look_in_vain(made, 1.0, 4.0) == [3.0]
    assert status_of(made, 1)[0] == Status.DEAD


def test_an_unconfirmed_suspicion_lasts_six_times_as_long() -> None:
    made = membership(8)
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    look_in_vain(made, 0, 24.75)
    assert status_of(made, 1)[0] == Status.SUSPECT
    look_in_vain(made, 25, 27)
    assert status_of(made, 1)[0] == Status.DEAD


def test_an_accusation_is_passed_on_by_those_whose_own_probes_bear_it_out() -> None:
    made = membership(8)
    made.observe_claims([claim(1, Status.SUSPECT, by=2), claim(3, Status.DEAD, by=2)], 0.0)
    assert not made.has_rumors
    made.suspect(peer_id_of(1), 1.0)
    mine = Claim(peer_id_of(1), 1, int(Status.SUSPECT), made.own.member)
    assert made.claims() == [mine]
    for _ in range(made.retransmit_limit()):
        made.claims()
    made.suspect(peer_id_of(1), 2.0)
    assert not made.has_rumors  # each does so once


def test_the_same_accuser_counts_once() -> None:
    made = membership(8)
    made.observe_claims([claim(1, Status.SUSPECT, by=2)], 0.0)
    unconfirmed = made.next_tick()
    for _ in range(3):
        made.observe_claims([claim(1, Status.SUSPECT, by=2)], 0.5)
    assert made.next_tick() == unconfirmed
    made.observe_claims([claim(1, Status.SUSPECT, by=3)], 0.5)
    assert made.next_tick() < unconfirmed


def test_the_accuser_is_the_sender_whatever_name_the_claim_bears() -> None:
    made = membership(8)
    for by in (2, 3, 4):
        made.observe_claims([claim(1, Status.SUSPECT, by=by)], 0.0, sender=peer_id_of(5))
    assert made.suspects._suspicions[peer_id_of(1)].accusers == {member_of(peer_id_of(5))}


def test_a_verdict_of_others_and_an_own_probe_that_failed_make_a_death_at_once() -> None:
    made = membership(8)
    ticks(made, 0, 1)
    made.observe_claims([claim(1, Status.DEAD), claim(2, Status.DEAD)], 1.0)
    assert {status_of(made, n)[0] for n in (1, 2)} == {Status.SUSPECT}
    made.tick(1.0)
    assert set(made.suspects.take_unproved()) == {peer_id_of(1), peer_id_of(2)}
    made.suspect(peer_id_of(1), 1.25)
    made.tick(1.25)
    assert status_of(made, 1)[0] is Status.DEAD
    assert made.next_tick() > 1.25  # the other one's probe is under way
    made.suspect(peer_id_of(3), 1.25)  # and of this one it failed before the verdict came
    made.observe_claims([claim(3, Status.DEAD)], 1.5)
    made.tick(1.5)
    assert status_of(made, 3)[0] is Status.DEAD


def test_a_verdict_is_not_proved_by_a_probe_from_before_a_stall() -> None:
    made = membership(8)
    ticks(made, 0, 1)
    made.suspect(peer_id_of(1), 1.0)
    made.observe_claims([claim(1, Status.DEAD)], 1.0)
    made.tick(60.0)
    assert status_of(made, 1)[0] is Status.SUSPECT
    ticks(made, 60.25, 61)
    assert made.suspects.take_unproved() == [peer_id_of(1)]


def test_what_was_refuted_twice_is_not_believed_from_there_for_a_while() -> None:
    made = membership(8)
    liar, other, accused = peer_id_of(5), peer_id_of(6), peer_id_of(1)

    def accuse(sender: PeerId, incarnation: int, now: float) -> Status:
        made.observe_claims([claim(1, Status.DEAD, incarnation, by=9)], now, sender)
        return status_of(made, 1)[0]

    for turn in range(REFUTATIONS):
        assert accuse(liar, 1 + turn, float(turn)) is Status.SUSPECT
        made.heard(accused, turn + 0.5)
        made.observe_claims([claim(1, Status.ALIVE, 2 + turn)], turn + 0.5, accused)
    assert accuse(liar, 3, 10.0) is Status.ALIVE
    assert accuse(liar, 300, 10.0) is Status.ALIVE
    assert accuse(other, 3, 10.0) is Status.SUSPECT  # any other accuser is heard
    made.observe_claims([claim(1, Status.ALIVE, 4)], 11.0, accused)
    made.suspect(accused, 12.0)
    assert accuse(liar, 4, 12.0) is Status.SUSPECT
    made.tick(12.0)
    assert status_of(made, 1)[0] is Status.DEAD  # this peer's own probe had failed
    made.observe_claims([claim(1, Status.ALIVE, 9)], 13.0, accused)
    assert accuse(liar, 9, 11.0 + DISBELIEVED_SECONDS) is Status.SUSPECT


def test_a_sender_has_a_bounded_number_of_accusations() -> None:
    made = membership(300)
    many = [claim(number, Status.DEAD) for number in range(1, 300)]
    made.observe_claims(many, 0.0, peer_id_of(5))
    assert len(made.suspects) == ACCUSATIONS_AT_ONCE
    made.observe_claims(many, 0.0, peer_id_of(6))
    assert len(made.suspects) == 2 * ACCUSATIONS_AT_ONCE
    strangers = [claim(number, Status.DEAD) for number in range(1000, 2000)]
    made.observe_claims(strangers, 0.0, peer_id_of(7))
    assert len(made) == 300 + ACCUSATIONS_AT_ONCE
    made.observe_claims(many, 10.0, peer_id_of(7))
    assert len(made.suspects) == 2 * ACCUSATIONS_AT_ONCE + 10 * ACCUSATIONS_A_SECOND


def test_tables_of_accusers_are_bounded() -> None:
    accusers = Accusers()
    for number in range(3 * MAX_PAIRS):
        assert accusers.may_accuse(number, number, 0.0)
        accusers.heard(number, 0.0)
        assert accusers.may_accuse(number, number, 0.0)
    assert len(accusers) == MAX_ACCUSERS + 2 * MAX_PAIRS


def test_refutations_are_rationed_and_none_is_forgotten() -> None:
    made = membership()
    for turn in range(250):
        now = turn / 25
        made.observe_claims([claim(0, Status.DEAD, made.own.incarnation)], now)
        made.tick(now)
    most = REFUTATIONS_AT_ONCE + 10 * REFUTATIONS_A_SECOND
    assert made.own.incarnation <= 1 + most
    accused_in = made.own.incarnation
    assert 10.0 <= made.next_tick() <= 10.0 + 1 / REFUTATIONS_A_SECOND
    made.tick(made.next_tick())
    assert made.own.incarnation == accused_in + 1
    assert made.next_tick() == math.inf


def test_a_process_that_stood_still_gives_its_suspects_that_time_and_looks_again() -> None:
    made = membership(3)
    made.tick(0.0)
    made.suspect(peer_id_of(1), 0.0)
    look_in_vain(made, 0.25, 3.75)
    made.suspect(peer_id_of(1), 3.75)
    made.tick(60.0)  # it was about to judge, and slept for a minute
    assert made.resumed_at == 60.0
    assert made.next_tick() > 60.0
    assert len(look_in_vain(made, 60, 65)) == 1
    assert status_of(made, 1)[0] == Status.DEAD


def test_the_time_that_a_process_stood_still_does_not_count() -> None:
    made = membership(3)
    made.tick(0.0)
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    due = made.next_tick()
    made.tick(60.0)
    assert made.next_tick() == due + 60.0


def test_a_process_that_runs_never_thinks_it_stood_still() -> None:
    made = membership()
    ticks(made, 0, 10)
    assert made.resumed_at == -math.inf
    made.tick(10.6)
    assert made.resumed_at == 10.6


def test_nobody_is_killed_by_one_who_hears_it() -> None:
    made = membership()
    made.suspect(peer_id_of(1), 0.0)
    for tenth in range(400):
        made.heard(peer_id_of(1), tenth / 10)
        made.suspect(peer_id_of(1), tenth / 10)
        made.tick(tenth / 10)
    assert status_of(made, 1)[0] == Status.SUSPECT


def test_a_second_suspicion_has_its_own_time() -> None:
    made = membership(3)
    made.observe_claims([claim(1, Status.SUSPECT)], 0.0)
    made.observe_claims([claim(1, Status.SUSPECT, 2)], 3.0)
    assert look_in_vain(made, 3, 10)[0] == 3.0 + 4.0 + 1.0


def test_having_to_refute_tells_a_peer_that_it_is_not_well() -> None:
    made = membership()
    made.observe_claims([claim(0, Status.ALIVE, 1), claim(0, Status.SUSPECT, 0)], 0.0)
    assert made.health.score == 0  # nothing to refute
    made.observe_claims([claim(0, Status.SUSPECT, 1)], 0.0)
    assert made.health.score == 1


def test_claims_ride_a_bounded_number_of_times_and_the_receivers_own_goes_first() -> None:
    made = membership(10)
    for number in range(1, 6):
        made.suspect(peer_id_of(number), 0.0)
    sent = [made.claims() for _ in range(made.retransmit_limit() + 1)]
    assert made.retransmit_limit() == 8
    assert [len(batch) for batch in sent] == [5] * 8 + [0]
    assert not made.has_rumors
    about = made.claims((peer_id_of(3), peer_id_of(9)))
    assert about == [Claim(peer_id_of(3), 1, int(Status.SUSPECT), made.own.member)]


def test_a_rumour_does_not_go_back_to_where_it_came_from_nor_twice_to_one_peer() -> None:
    made = membership(4)
    made.observe_claims([claim(1, Status.ALIVE, 2)], 0.0, sender=peer_id_of(2))
    assert made.claims(to=peer_id_of(2)) == []
    assert len(made.claims(to=peer_id_of(3))) == 1
    assert made.claims(to=peer_id_of(3)) == []
    assert len(made.claims(to=peer_id_of(2))) == 1


def test_who_may_have_missed_a_refutation_is_told_of_it() -> None:
    made = membership(5)
    made.observe_claims([claim(1, Status.ALIVE, 4), claim(2, Status.ALIVE, 4)], 0.0)
    made.observe_claims([claim(2, Status.SUSPECT, 4), claim(3, Status.DEAD, 9)], 0.0)
    everybody = [state.member for state in made.states()]
    told = Claim(peer_id_of(1), 4, int(Status.ALIVE), made.own.member)
    assert made.refuted([*everybody, 12345], 9) == [told]
    made.observe_claims([claim(4, Status.ALIVE, 4)], 0.0)
    assert len(made.refuted(everybody, 9)) == 2
    assert len(made.refuted(everybody, 1)) == 1


def test_a_message_carries_a_bounded_number_of_claims() -> None:
    made = membership(100)
    for number in range(1, 100):
        made.suspect(peer_id_of(number), 0.0)
    assert len(made.claims()) == 32


def test_a_death_is_told_to_others_as_a_suspicion() -> None:
    made = membership()
    bury(made, [1], 0.0, 3)
    told = present(made.accusation(peer_id_of(1)))
    assert (told.status, told.incarnation) == (Status.SUSPECT, 3)


def test_the_dead_are_forgotten_after_a_day_and_the_oldest_when_room_is_short() -> None:
    made = membership(6, max_members=6)
    bury(made, [2], 5.0)
    bury(made, [1], 10.0)
    made.observe_record(peer_record(6), SIGNED, 20.0)
    assert made.get(peer_id_of(2)) is None
    assert made.get(peer_id_of(1)) is not None
    assert [s.peer_id for s in made.expire(10.0 + 24 * 3600 + 1)] == [peer_id_of(1)]
    assert made.observe_record(peer_record(7), SIGNED, 20.0)
    assert not made.observe_record(peer_record(8), SIGNED, 20.0)
    assert (len(made), made.refused_count) == (6, 1)


def test_claims_about_strangers_take_nobodys_place_and_the_others_count_all_the_same() -> None:
    made = membership(4, max_members=4)
    stranger, news = claim(50, Status.DEAD), claim(2, Status.SUSPECT)
    made.observe_claims([stranger, claim(1, Status.DEAD), stranger, news], 5.0)
    assert status_of(made, 1) == (Status.SUSPECT, 1)
    assert status_of(made, 2) == (Status.SUSPECT, 1)
    assert made.get(peer_id_of(50)) is None
    assert len(made) == 4
    # Of two peers of whom there are only claims the later one stays.
    made = membership(4, max_members=5)
    made.observe_claims([claim(50, Status.DEAD), claim(51, Status.LEFT), news], 5.0)
    assert [state.peer_id for state in made.states()][4:] == [peer_id_of(51)]
    assert status_of(made, 2) == (Status.SUSPECT, 1)


def test_a_delta_with_one_member_too_many_is_taken_in_but_for_that() -> None:
    config = GossipConfig(membership=MembershipConfig(max_members=3))
    gossip = Network(1, config).start(0, None).gossip
    gossip.membership._met = 100
    gossip.tick(0.0)
    signed = [
        sign_peer_record(record, SimulatedSigner(record.peer_id))
        for record in map(peer_record, (1, 2, 3))
    ]
    delta = Delta([*signed[:1], signed[2], signed[1]], [], [], [claim(1, Status.SUSPECT)])
    gossip.serve(peer_id_of(1), ControlKind.DELTA, delta, 1.0)
    assert {state.peer_id for state in gossip.membership.live()} == {
        peer_id_of(number) for number in (0, 1, 3)
    }
    state = present(gossip.membership.get(peer_id_of(1)))
    assert state.status == Status.SUSPECT
    assert gossip.directory.position(state.member) == (1, 0)
    assert gossip.membership.refused_count == 1
    assert gossip.directory.position(member_of(peer_id_of(2))) == (0, 0)


def test_peers_of_whom_there_are_only_claims_do_not_crowd_out_those_that_were_met() -> None:
    made = membership(6)
    made.observe_claims([claim(5, Status.DEAD)], 1.0)
    for number in range(100, 100 + 2 * MAX_HEARSAY):
        made.observe_claims([claim(number, Status.DEAD)], 2.0)
    assert len(made) == 6 + MAX_HEARSAY
    assert made.get(peer_id_of(5)) is not None
    assert made.get(peer_id_of(100)) is None
    assert made.get(peer_id_of(99 + 2 * MAX_HEARSAY)) is not None
    version = made.version
    made.observe_record(peer_record(99 + 2 * MAX_HEARSAY, incarnation=2), SIGNED, 3.0)
    assert made.version > version
    made.observe_claims([claim(7_000 + number, Status.DEAD) for number in range(MAX_HEARSAY)], 4.0)
    assert made.get(peer_id_of(99 + 2 * MAX_HEARSAY)) in made.live()


def test_an_accusation_so_high_that_it_leaves_no_room_to_refute_is_passed_over() -> None:
    year_ms = 1_800_000_000_000
    made = Membership(peer_id_of(0), year_ms, MembershipConfig(), lambda now: year_ms + 1000 * now)
    made.observe_record(peer_record(1, incarnation=year_ms), SIGNED, 0.0)
    highest = year_ms + MAX_AHEAD_MS
    made.observe_claims([claim(1, Status.DEAD, highest + 1), claim(0, Status.DEAD, highest + 1)], 0.0)
    assert made.own.incarnation == year_ms
    other = present(made.get(peer_id_of(1)))
    assert (other.status, other.incarnation) == (Status.ALIVE, year_ms)
    made.observe_claims([claim(1, Status.DEAD, highest), claim(0, Status.DEAD, highest)], 0.0)
    assert made.own.incarnation == highest + 1
    made.observe_claims([claim(1, Status.ALIVE, highest + 1)], 0.0)  # as peer 1 refutes
    assert (other.status, other.incarnation) == (Status.ALIVE, highest + 1)


@pytest.mark.parametrize("wrong_by_days", [365, -365])
def test_whoever_started_with_a_wrong_clock_can_be_accused_and_can_refute(wrong_by_days: int) -> None:
    """Their own records count as well: incarnations never fall, and a clock may be set right, or wrong,
    later on."""
    day_ms = 86_400_000
    now_ms = 1_800_000_000_000
    began = now_ms + max(0, wrong_by_days) * day_ms
    wall = now_ms + min(0, wrong_by_days) * day_ms
    made = Membership(peer_id_of(0), began, MembershipConfig(), lambda now: wall)
    for number in (0, 1):
        made.observe_record(peer_record(number, incarnation=began), SIGNED, 0.0)
    made.observe_claims([claim(1, Status.SUSPECT, began), claim(0, Status.SUSPECT, began)], 0.0)
    assert made.own.incarnation == began + 1, "it has refuted"
    assert status_of(made, 1) == (Status.SUSPECT, began)
    made.observe_claims([claim(1, Status.ALIVE, began + 1)], 0.0)
    assert status_of(made, 1) == (Status.ALIVE, began + 1)
    made.observe_claims([claim(1, Status.DEAD, began + 2 * day_ms)], 0.0)
    assert status_of(made, 1) == (Status.ALIVE, began + 1), "made up"


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
