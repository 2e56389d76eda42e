"""The addresses to try: bootstrap addresses always, those of the bounded address book only while alone."""

import math
from random import Random

from p2pstore.gossip.members.contacts import MAX_IN_FLIGHT, Contacts
from simulation.gossip_peer import address_of
from simulation.signer import peer_id_of
from tests.unit.gossip_network import Network


def test_an_address_of_the_book_that_is_named_as_bootstrap_is_tried_by_those_not_alone() -> None:
    """After a restart both lists name the same peers: two halves that found each other must still look for
    the rest."""
    contacts = Contacts(Random(1))
    contacts.add(("book",), bootstrap=False)
    contacts.add(("both",), bootstrap=False)
    contacts.add(("both",))
    contacts.add(("both",), bootstrap=False)
    assert contacts.due(0.0, lambda peer_id: False, alone=False) == [("both",)]
    assert not contacts.is_empty
    assert Contacts(Random(1)).is_empty


class CountedDict(dict[tuple[str, ...], object]):
    """Counts the iterations over all of it."""

    rounds = 0

    def items(self):  # type: ignore[no-untyped-def]  # as of every dictionary
        self.rounds += 1
        return super().items()

    def values(self):  # type: ignore[no-untyped-def]
        self.rounds += 1
        return super().values()


def test_a_large_address_book_is_gone_through_only_when_an_entry_is_due() -> None:
    contacts = Contacts(Random(1))
    contacts._contacts = counted = CountedDict()  # type: ignore[assignment]
    for number in range(2_000):
        contacts.add((f"10.0.0.{number}:1",), bootstrap=False)
    for step in range(1_000):  # ten seconds of events
        contacts.due(step / 100, lambda peer_id: False, alone=False)
        assert contacts.next_due() > step / 100
    assert counted.rounds <= 2 * 21
    # A lone peer tries them, a few at a time; each answer or failure starts the next.
    tried: set[tuple[str, ...]] = set()
    now, waiting = 20.0, contacts.due(20.0, lambda peer_id: False, alone=True)
    while waiting and len(tried) < 100:
        tried.update(waiting)
        assert contacts.next_due() == math.inf
        contacts.failed(waiting[0], now)
        assert contacts.next_due() <= now
        waiting = waiting[1:] + contacts.due(now, lambda peer_id: False, alone=True)
    assert len(tried) == 100


def test_a_book_that_does_not_answer_does_not_hold_up_an_address_that_was_named() -> None:
    contacts = Contacts(Random(1))
    for number in range(100):
        contacts.add((f"10.0.0.{number}:1",), bootstrap=False, loaded=True)
    contacts.add(("named",))
    first = contacts.due(0.0, lambda peer_id: False, alone=True)
    assert first[0] == ("named",)
    assert len(first) == 1 + MAX_IN_FLIGHT
    contacts.failed(("named",), 0.0)
    assert contacts.next_due() < 1.0  # though all that were remembered are still in flight
    assert contacts.due(1.0, lambda peer_id: False, alone=True) == [("named",)]


def test_only_addresses_at_which_a_peer_admitted_this_one_are_remembered() -> None:
    contacts = Contacts(Random(1))
    contacts.add(("ours",))
    contacts.add(("theirs",))
    contacts.succeeded(("ours",), b"a", 0.0)
    contacts.succeeded(("theirs",), b"b", 0.0)
    assert not list(contacts.book())
    assert not contacts.admitted_once
    contacts.admitted(b"a")
    assert list(contacts.book()) == [(b"a", ("ours",))]
    contacts.succeeded(("ours",), b"c", 1.0)  # another peer is there now: nothing is known of it
    contacts.admitted(b"a")
    assert contacts.known_at() == {b"c": ("ours",), b"b": ("theirs",)}


def test_the_living_come_before_those_that_are_gone() -> None:
    network = Network(seed=1)
    first, gone = network.start_all(2)
    assert network.run(20, network.converged)
    gone.carry_out(gone.gossip.leave(network.now))
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
