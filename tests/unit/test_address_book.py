"""Which addresses a peer keeps for its next start, and in which order: only the first 1,024 are written."""

from __future__ import annotations

from tests.unit.gossip_network import Network, address_of, peer_id_of


def test_the_living_come_before_those_that_are_gone() -> None:
    network = Network(seed=1)
    first, gone = network.start_all(2)
    assert network.run(20, network.converged)
    network.do(gone, gone.gossip.leave(network.now))
    network.run(1)
    network.stop(1)
    network.start(2)
    assert network.run(20, network.converged)
    book = first.gossip.addresses.entries()
    assert book == [(peer_id_of(number), (address_of(number),)) for number in (2, 1)]


def test_an_address_is_kept_once_the_peer_there_has_admitted_this_one() -> None:
    """The peer that answers there may be of another cluster: its admission shows that."""
    network = Network(seed=1)
    node = network.start(0)
    addresses = ("10.0.0.9:17946",)
    node.gossip.addresses.add_bootstrap(addresses)
    node.gossip.contacted(peer_id_of(9), addresses, network.now)
    assert node.gossip.addresses.addresses() == []
    assert node.gossip.addresses.of(peer_id_of(9)) == list(addresses)
    node.gossip.contacts.admitted(peer_id_of(9))
    assert node.gossip.addresses.entries() == [(peer_id_of(9), addresses)]


def test_what_an_earlier_run_left_stays_until_this_peer_was_admitted_somewhere() -> None:
    """Else a peer that starts first, and is stopped before the others come, would never find them again."""
    network = Network(seed=1)
    first, second = network.start_all(2)
    node = network.start(2)
    node.gossip.addresses.load([(None, ("10.0.0.9:17946",))])
    assert node.gossip.addresses.addresses() == ["10.0.0.9:17946"]
    node.gossip.addresses.add_bootstrap([address_of(0)])
    assert network.run(20, network.converged)
    assert set(node.gossip.addresses.addresses()) == {address_of(0), address_of(1)}
    assert first.gossip.contacts.admitted_once
    assert second.gossip.contacts.admitted_once
