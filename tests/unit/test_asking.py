"""Unanswered requests are counted by kind."""

from __future__ import annotations

import math
from random import Random

from p2pstore.gossip.exchange.asking import LOST_ANSWER_SECONDS, Questions
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.wire import Empty
from tests.unit.gossip_network import peer_id_of

KINDS = (ControlKind.EXCHANGE, ControlKind.DELTA, ControlKind.PING)


def test_questions_are_counted_by_kind_until_they_are_answered_or_lost() -> None:
    rng, questions, now = Random(3), Questions(GossipConfig()), 0.0
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
