"""Whom to try: bootstrap addresses always, the address book only while alone."""

from random import Random

from p2pstore.gossip.contacts import Contacts


def test_an_address_of_the_book_that_is_named_as_bootstrap_is_tried_by_those_not_alone() -> None:
    """After a restart both lists name the same peers: two halves that found each other must still look for
    the rest."""
    contacts = Contacts(Random(1))
    contacts.add(("book",), bootstrap=False)
    contacts.add(("both",), bootstrap=False)
    contacts.add(("both",))
    contacts.add(("both",), bootstrap=False)
    assert contacts.due(0.0, lambda peer_id: False, alone=False) == [("both",)]
    assert contacts.has_bootstrap
    assert not contacts.is_empty
    assert Contacts(Random(1)).is_empty
