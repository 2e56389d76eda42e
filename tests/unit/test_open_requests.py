"""Unanswered requests by kind; how many messages gossip may send, and when a cluster is under load."""

import math
from random import Random

import pytest

from p2pstore.gossip.exchange.anti_entropy import OperationRate
from p2pstore.gossip.exchange.message_budget import MessageBudget, SharedBudget
from p2pstore.gossip.exchange.open_requests import LOST_ANSWER_SECONDS, OpenRequests
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.wire import Empty
from simulation.signer import peer_id_of

KINDS = (ControlKind.EXCHANGE, ControlKind.DELTA, ControlKind.PING)


def test_questions_are_counted_by_kind_until_they_are_answered_or_lost() -> None:
    rng, questions, now = Random(3), OpenRequests(GossipConfig()), 0.0
    model: dict[int, tuple[ControlKind | None, int, float]] = {}
    for step in range(2000):
        now += rng.choice((0.0, 0.1, 20.0))
        if rng.random() < 0.5:
            kind = rng.choice((*KINDS, None))
            if kind is None:
                token = questions.fetch_snapshot(peer_id_of(step), step, 0, now).token
            else:
                token = questions.ask(peer_id_of(step), kind, Empty(), now).token
            model[token] = (kind, step, now)
        elif rng.random() < 0.8 and model:
            token = rng.choice(list(model))
            del model[token]
            assert questions.take(token) is not None
            assert questions.take(token) is None
        else:
            questions.give_up_lost(now)
            model = {t: q for t, q in model.items() if q[2] + LOST_ANSWER_SECONDS >= now}
        assert len(questions) == len(model)
        snapshots = {number for kind, number, _ in model.values() if kind is None}
        assert questions.fetching() == snapshots
        for kind in KINDS:
            of_kind = [question for question in model.values() if question[0] == kind]
            assert questions.open_count(kind) == len(of_kind)
            assert questions.asked(kind) == [peer_id_of(number) for _, number, _ in of_kind]
            newest = [sent_at for _, _, sent_at in reversed(of_kind)]
            for place in (1, 2, 3):
                expected = newest[place - 1] if len(newest) >= place else -math.inf
                assert questions.newest_sent_at(kind, place) == expected


def test_a_budget_lets_a_burst_pass_and_then_its_rate() -> None:
    budget = MessageBudget(100.0, 40.0)
    times = [50.0]
    for _ in range(260):
        budget.take(4, times[-1])
        times.append(max(times[-1], budget.ready_at(4)))
    assert times[9] == 50.0
    assert times[10] > 50.0
    assert times[260] == pytest.approx(50.0 + (260 * 4 - 40 + 4) / 100, abs=0.1)


def test_what_others_send_is_missing_but_not_for_ever() -> None:
    budget = MessageBudget(100.0, 40.0)
    budget.take(100_000, 5.0)
    assert budget.ready_at(4) == pytest.approx(5.0 + 44 / 100)
    budget.take(2, 5.2)  # a probe, which does not wait
    assert budget.ready_at(4) == pytest.approx(5.2 + 26 / 100)


def test_more_than_the_burst_waits_for_a_full_bucket() -> None:
    budget = MessageBudget(100.0, 40.0)
    assert budget.ready_at(1000) < 0
    budget.take(10, 1.0)
    assert budget.ready_at(1000) == pytest.approx(1.1)


def test_a_clock_that_stands_still_gives_nothing() -> None:
    budget = MessageBudget(100.0, 4.0)
    budget.take(4, 7.0)
    assert budget.ready_at(4) == pytest.approx(7.04)
    budget.take(0, 6.0)
    assert budget.ready_at(4) == pytest.approx(7.04)


def test_what_others_send_takes_two_thirds_at_most() -> None:
    budget = SharedBudget(90.0, 30.0)
    begun, now = 0, 10.0
    for step in range(10_000):  # a hundred others, each of which asks within its bounds
        now = 10.0 + step / 1000
        assert budget.serve(b"%d" % (step % 100), now)
        if budget.ready_at(2) <= now:
            budget.ask(now)
            begun += 2
    assert begun == pytest.approx(10 * 90.0 / 3, rel=0.1)
    # Those who ask half of it leave the other half.
    quiet = SharedBudget(90.0, 30.0)
    begun = 0
    for step in range(10_000):
        now = 10.0 + step / 1000
        if step % 44 == 0:
            assert quiet.serve(b"%d" % (step % 100), now)
        if quiet.ready_at(2) <= now:
            quiet.ask(now)
            begun += 2
    assert begun == pytest.approx(10 * 90.0 / 2, rel=0.1)


def test_one_sender_is_answered_as_often_as_it_may_ask_and_others_are_answered_all_the_same() -> None:
    budget = SharedBudget(100.0, 40.0)
    for second in range(3):
        now = 5.0 + second
        assert sum(budget.serve(b"flooder", now + step / 1000) for step in range(999)) == 100
        assert budget.serve(b"other", now + 0.999)
    assert len(budget._served) == 2
    budget.serve(b"third", 20.0)
    assert len(budget._served) == 1  # nothing is kept of those who asked long ago


def judged(rate: OperationRate, per_second: float, begin: float, seconds: float) -> float:
    for step in range(int(seconds * 10)):
        rate.add(int(per_second / 10))
        rate.judge(begin + step / 10)
    return begin + seconds


def test_load_begins_above_the_limit_and_ends_below_half_of_it() -> None:
    rate = OperationRate(1000.0)
    now = judged(rate, 900.0, 0.0, 10.0)
    assert not rate.is_high
    now = judged(rate, 1200.0, now, 10.0)
    assert rate.is_high
    now = judged(rate, 600.0, now, 10.0)
    assert rate.is_high
    judged(rate, 400.0, now, 10.0)
    assert not rate.is_high


def test_one_batch_of_many_is_soon_forgotten() -> None:
    rate = OperationRate(1000.0)
    now = judged(rate, 0.0, 0.0, 5.0)
    rate.add(4096)
    now = judged(rate, 0.0, now, 0.5)
    assert rate.is_high
    judged(rate, 0.0, now, 5.0)
    assert not rate.is_high
