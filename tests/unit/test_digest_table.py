"""A peer's own digest keeps up with what it knows, and what it costs."""

from __future__ import annotations

from random import Random

from p2pstore.gossip.exchange.digests import REMEMBERED_SETS, pack_digest
from p2pstore.gossip.machine import GossipConfig
from tests.unit.digest_rows import digest_from
from tests.unit.gossip_network import Network, Node, location


def truth(node: Node) -> bytes:
    """The digest made from nothing but what the machine knows."""
    gossip, rows = node.gossip, []
    for state in gossip.membership.live():
        record = state.record
        assert record is not None
        incarnation, sequence = gossip.directory.position(state.member)
        if state is gossip.membership.own:
            incarnation, sequence = record.incarnation, gossip.log.sequence
        if incarnation != record.incarnation:
            sequence = 0
        rows.append((state.member, record.incarnation, record.sequence, sequence))
    return pack_digest(digest_from(rows))


def test_it_keeps_up_with_operations_joins_deaths_and_restarts() -> None:
    net, rng = Network(5, GossipConfig()), Random(5)
    net.start_all(5)
    for step in range(60):
        what, number = rng.choice(("hold", "hold", "hold", "restart", "stop")), rng.randrange(5)
        node = net.nodes.get(number)
        if what == "hold" and node is not None:
            node.hold(location(step, step + 1), net.now)
        elif what == "stop" and len(net.nodes) > 2 and node is not None:
            net.stop(number)
        elif what == "restart":
            if node is not None:
                net.stop(number)
            net.start(number, bootstrap=min(set(net.nodes) - {number}))
        if node is not None and number in net.nodes:
            net.rest(net.nodes[number])
        net.run(rng.choice((0.05, 0.5, 3.0)))
        for each in net.nodes.values():
            assert pack_digest(each.gossip.knowledge.table.current()) == truth(each)


def test_a_view_that_was_taken_back_is_found_within_a_quarter_of_a_second() -> None:
    net = Network(1, GossipConfig())
    one, other = net.start_all(2)
    other.hold(location(1), net.now)
    assert net.run(10, net.converged)
    one.gossip.directory.forget(other.gossip.member)
    assert pack_digest(one.gossip.knowledge.table.current()) != truth(one)
    one.gossip.knowledge.table.read_anew()
    assert pack_digest(one.gossip.knowledge.table.current()) == truth(one)


def test_sets_of_members_are_understood_for_a_while() -> None:
    net = Network(1, GossipConfig())
    (node,) = net.start_all(1)
    net.run(1)
    table = node.gossip.knowledge.table
    first = table.current().of
    assert table.known_set(first.hash) is first
    assert table.known_set(first.hash + 1) is None
    for number in range(1, REMEMBERED_SETS + 1):
        assert table.known_set(first.hash) is first
        net.start(number)
        assert net.run(20, net.converged)
        table.current()
    assert table.known_set(first.hash) is None
