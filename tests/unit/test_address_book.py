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
    book = first.gossip.address_book()
    assert book == [(peer_id_of(number), (address_of(number),)) for number in (2, 1)]


def test_an_address_that_led_to_a_peer_is_kept_until_its_record_is_known() -> None:
    network = Network(seed=1)
    node = network.start(0)
    addresses = ("10.0.0.9:17946",)
    node.gossip.add_bootstrap(addresses)
    node.gossip.contacted(peer_id_of(9), addresses, network.now)
    assert node.gossip.address_book() == [(peer_id_of(9), addresses)]
