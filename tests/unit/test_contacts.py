"""The addresses to try: bootstrap addresses always, the address book only while alone."""

import math
from random import Random

from p2pstore.gossip.members.contacts import MAX_IN_FLIGHT, Contacts


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
