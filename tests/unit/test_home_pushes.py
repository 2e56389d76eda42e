"""New locations to home peers: in batches, of bounded work; and what was asked and never answered."""

from __future__ import annotations

import math
from random import Random

import pytest

from p2pstore.gossip import home_pushes
from p2pstore.gossip.asking import LOST_ANSWER_SECONDS, Questions
from p2pstore.gossip.config import GossipConfig
from p2pstore.gossip.home_pushes import HomePushes
from p2pstore.gossip.membership import Membership, MembershipConfig
from p2pstore.gossip.messages import ControlKind, Ping
from p2pstore.gossip.records import sign_peer_record
from tests.unit.gossip_network import FakeSigner, digest_of, location, peer_id_of, peer_record


def with_one_other() -> Membership:
    membership = Membership(peer_id_of(0), 1, MembershipConfig(), Random(1))
    for number in (0, 1):
        record = peer_record(number)
        membership.observe_record(
            record, sign_peer_record(record, FakeSigner(peer_id_of(number))), 0.0
        )
    return membership


def test_a_batch_is_due_at_once_then_after_a_pause_and_much_takes_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(home_pushes, "PUSH_WORK", 4 * (8 + 2))
    membership = with_one_other()
    members = [state.member for state in membership.live()]
    pushes = HomePushes(membership, 0.02)
    assert pushes.due() == math.inf
    assert pushes.take(5, members, 10.0) == []
    for number in range(1, 7):
        pushes.add(number, location(number).encode())
    (first,) = pushes.take(5, members, 10.0)
    assert (first.peer_id, first.incarnation) == (peer_id_of(1), 5)
    assert first.sequences == [1, 2, 3, 4]
    assert pushes.due() == pytest.approx(10.02)
    assert pushes.take(5, members, 10.01) == []
    (second,) = pushes.take(5, members, 10.03)
    assert second.sequences == [5, 6]
    assert second.operations == location(5).encode() + location(6).encode()
    assert digest_of(5) in second.operations
    assert pushes.due() == math.inf


def test_what_waits_is_bounded_and_the_newest_stays() -> None:
    membership = with_one_other()
    pushes = HomePushes(membership, 0.02)
    operation = location(1).encode()
    for number in range(home_pushes.MAX_TO_PUSH + 10):
        pushes.add(number, operation)
    (first,) = pushes.take(5, [state.member for state in membership.live()], 10.0)
    assert first.sequences[0] == 10
    pushes.clear()
    assert pushes.due() == math.inf


def test_a_question_is_answered_once_or_given_up() -> None:
    questions = Questions(GossipConfig())
    ping = questions.ask(peer_id_of(1), ControlKind.PING, Ping(1, []), 0.0)
    fetch = questions.fetch_snapshot(peer_id_of(2), 7, 50.0)
    assert questions.asked(ControlKind.PING) == [peer_id_of(1)]
    assert questions.fetching() == {7}
    questions.give_up_lost(LOST_ANSWER_SECONDS + 1.0)
    assert questions.take(ping.token) is None
    asked = questions.take(fetch.token)
    assert asked is not None
    assert asked.member == 7
    assert questions.take(fetch.token) is None
    assert (len(questions), questions.count) == (0, 2)
