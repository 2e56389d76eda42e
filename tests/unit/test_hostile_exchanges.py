"""Harm that a member cannot do to another one by its exchanges and deltas."""

from __future__ import annotations

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.delta_checks import MAX_READ_RUNS
from p2pstore.gossip.exchange.digests import Run, pack_runs
from p2pstore.gossip.gossip_messages import Ask, ControlKind, Delta, Exchange, LogChunk
from p2pstore.gossip.locations.log import SignedRun, sign_run
from p2pstore.gossip.records import sign_peer_record
from tests.unit.gossip_network import FakeSigner, Network, Node, bury, location, peer_id_of, peer_record


def formed(count: int) -> Network:
    net = Network(1)
    net.start_all(count)
    assert net.run(20, net.converged)
    return net


def exchanges_of(node: Node, seconds: float, now: float, question: Exchange | None) -> int:
    """How many exchanges a peer under load begins, while another member asks it this 17 times a second."""
    gossip, begun = node.gossip, 0
    for step in range(int(seconds * 50)):
        now += 0.02
        if step % 10 == 0:
            for _ in range(200):
                gossip.hold(location(step, 1 + gossip.log.sequence), now)
        if question is not None and step % 3 == 0:
            gossip.serve(peer_id_of(1), ControlKind.EXCHANGE, question, now)
        for effect in gossip.tick(now):
            if isinstance(effect, Ask):
                begun += effect.kind == ControlKind.EXCHANGE
                gossip.questions.take(effect.token)
    return begun


def test_who_never_sends_what_it_promises_does_not_keep_a_loaded_peer_from_asking_others() -> None:
    net = formed(4)
    node, hostile = net.nodes[0], net.nodes[1]
    for number in range(10):
        hostile.hold(location(number), net.now)
    (ask,) = (
        effect
        for effect in hostile.gossip.tick(net.now + 5)
        if isinstance(effect, Ask) and effect.kind == ControlKind.EXCHANGE
    )
    assert isinstance(ask.request, Exchange)
    undisturbed = exchanges_of(node, 10, net.now, None)
    assert undisturbed > 50
    assert exchanges_of(node, 10, net.now + 10, ask.request) > undisturbed / 3


def test_of_one_delta_a_bounded_number_of_runs_is_looked_at() -> None:
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    member, incarnation = other.gossip.member, other.gossip.incarnation
    operation = location(1).encode()
    signature = sign_run(other.signer, incarnation, 1, operation)
    good = LogChunk(member, incarnation, 1, operation, signature)
    known = LogChunk(member, incarnation - 1, 1, operation, signature)
    beyond = LogChunk(member, incarnation, -1, b"?")
    check = node.gossip.checks.check
    for at, expected in ((MAX_READ_RUNS - 1, [good]), (MAX_READ_RUNS, [])):
        chunks = [known] * at + [good] + [beyond] * 9_000
        if not expected:
            del chunks[at]
        assert check(Delta([], chunks, [], []), net.now).logs == expected
    runs = [Run(0, SignedRun(1, operation, signature))] * MAX_READ_RUNS
    runs += [Run(9_999, SignedRun(1, operation, signature))] * 9_000
    of = node.gossip.knowledge.table.current().of
    check(Delta([], [], [], [], of.hash, *pack_runs(runs)), net.now)


def test_runs_of_no_operations_are_nonsense() -> None:
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    empty = LogChunk(other.gossip.member, other.gossip.incarnation, 1, b"")
    with pytest.raises(ProtocolError, match="no operations"):
        node.gossip.checks.check(Delta([], [empty], [], []), net.now)


def test_nothing_is_kept_of_askers_that_are_no_members() -> None:
    net = formed(2)
    gossip = net.nodes[0].gossip
    question = Exchange(b"", 0, b"", [], members_hash=5)
    for number in range(100, 200):
        gossip.serve(peer_id_of(number), ControlKind.EXCHANGE, question, net.now)
    exchanges = gossip.exchanges
    kept = exchanges._readers | exchanges._invited.keys() | exchanges._unreliable
    assert kept <= {peer_id_of(1)}


def test_claims_wait_for_a_message_that_goes() -> None:
    """The bringer of news is not told it; so no claim rides on that message either."""
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    now = net.now + 1
    record = peer_record(9)
    node.gossip.membership.observe_record(
        record, sign_peer_record(record, FakeSigner(record.peer_id)), now
    )
    bury(node.gossip.membership, [9], now)
    of = node.gossip.knowledge.table.current().of
    operation = location(1).encode()
    signature = sign_run(other.signer, other.gossip.incarnation, 1, operation)
    runs = pack_runs(
        [Run(of.members.tolist().index(other.gossip.member), SignedRun(1, operation, signature))]
    )
    node.gossip.serve(other.peer_id, ControlKind.DELTA, Delta([], [], [], [], of.hash, *runs), now)
    assert node.gossip.fresh
    assert node.gossip.fresh.spread(now) == []
    claims = node.gossip.membership.claims(to=other.peer_id)
    assert [claim.peer_id for claim in claims] == [peer_id_of(9)]
