"""Two processes with one identity: the one that started later goes, whatever gossip says of them meanwhile."""

from __future__ import annotations

from random import Random

import pytest

from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Ping, Status
from p2pstore.gossip.machine import Duplicate, Effect, Gossip, GossipConfig
from tests.unit.gossip_network import FakeSigner, FakeVerifier, peer_id_of, peer_record

STARTED = 1_800_000_000_000
OTHER = peer_id_of(2)


def life(incarnation: int) -> Gossip:
    gossip = Gossip(
        FakeSigner(peer_id_of(1)),
        FakeVerifier(),
        incarnation,
        lambda: peer_record(1),
        GossipConfig(),
        Random(1),
        wall_clock=lambda now: 0,
    )
    gossip.record(0.0)
    return gossip


def accuse(gossip: Gossip, times: int) -> None:
    """A third peer reaches only the other one of the two, and suspects them again and again."""
    for _ in range(times):
        incarnation = gossip.membership.own.incarnation
        claim = Claim(gossip.peer_id, incarnation, int(Status.SUSPECT), 7)
        gossip.serve(OTHER, ControlKind.PING, Ping(incarnation, [claim]), 1.0)


def hears(gossip: Gossip, of: Gossip) -> list[Effect]:
    delta = Delta([of.record(2.0)], [], [], [])
    return gossip.serve(OTHER, ControlKind.DELTA, delta, 2.0)[1]


@pytest.mark.parametrize("older_accused", [0, 3, 100])
@pytest.mark.parametrize("newer_accused", [0, 3, 100])
def test_the_newer_one_goes(older_accused: int, newer_accused: int) -> None:
    older, newer = life(STARTED), life(STARTED + 500)
    accuse(older, older_accused)
    accuse(newer, newer_accused)
    claim = Claim(older.peer_id, newer.membership.own.incarnation, int(Status.SUSPECT), 7)
    older.serve(OTHER, ControlKind.PING, Ping(1, [claim]), 1.5)  # a third peer told it as well
    assert not any(isinstance(effect, Duplicate) for effect in hears(older, newer))
    assert any(isinstance(effect, Duplicate) for effect in hears(newer, older))


def test_the_older_one_stays_however_many_come() -> None:
    older = life(STARTED)
    for number in range(1, 6):
        newer = life(STARTED + 60_000 * number)
        assert not any(isinstance(effect, Duplicate) for effect in hears(older, newer))
        assert any(isinstance(effect, Duplicate) for effect in hears(newer, older))
