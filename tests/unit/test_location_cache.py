"""Locations heard of: bounded, aged, and dropped when a holder denies them."""

from __future__ import annotations

from p2pstore.gossip.homes.known_locations import HOLDERS_PER_KEY, LocationCache
from p2pstore.gossip.records import LocationRecord
from p2pstore.objects import Version
from tests.unit.gossip_network import digest_of, location

A, B = 1, 2


def members(cache: LocationCache, number: int, now: float = 0.0) -> list[int]:
    return [found.member for found in cache.holders(digest_of(number), now)]


def test_what_was_heard_is_known_until_it_is_old() -> None:
    cache = LocationCache(10, 30.0)
    assert cache.learn(A, (5, 7), location(1).encode(), 100.0)
    assert not cache.learn(A, (5, 8), location(1).encode(), 101.0), "no news, but younger"
    (found,) = cache.holders(digest_of(1), 130.5)
    assert (found.member, found.incarnation, found.sequence) == (A, 5, 8)
    assert members(cache, 1, 131.0) == []
    assert cache.count == 0


def test_older_words_of_a_member_change_nothing_and_newer_ones_do() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (5, 7), location(1, 2).encode(), 0.0, own_word=True)
    assert not cache.learn(A, (5, 6), location(1, 9).encode(), 0.0, own_word=True)
    assert not cache.learn(A, (4, 99), location(1, 9).encode(), 0.0, own_word=True)
    assert [found.record.version.clock for found in cache.holders(digest_of(1), 0.0)] == [2]
    gone = LocationRecord(digest_of(1), Version(2, 1), 1, 1, removed=True).encode()
    assert cache.learn(A, (5, 8), gone, 0.0, own_word=True)
    assert members(cache, 1) == []


def test_what_others_say_stands_beside_what_the_holder_says() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (5, 7), location(1, 2).encode(), 0.0, own_word=True)
    cache.learn(A, (1 << 61, 0), location(1, 9).encode(), 0.0)
    found = {each.hearsay: each.record.version.clock for each in cache.holders(digest_of(1), 0.0)}
    assert found == {False: 2, True: 9}
    assert cache.count == 2
    cache.deny(A, digest_of(1))
    assert members(cache, 1) == []
    assert cache.count == 0


def test_among_what_others_say_no_place_hides_a_newer_version() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (1 << 61, 0), location(1, 2).encode(), 0.0)
    assert cache.learn(A, (5, 7), location(1, 3).encode(), 0.0)
    assert not cache.learn(A, (1 << 61, 0), location(1, 2).encode(), 0.0)
    assert [found.record.version.clock for found in cache.holders(digest_of(1), 0.0)] == [3]


def test_a_holder_has_its_say_also_where_others_said_much() -> None:
    cache = LocationCache(1000, 30.0)
    for member in range(HOLDERS_PER_KEY):
        cache.learn(100 + member, (5, 1), location(1, 9).encode(), 0.0)
    assert cache.learn(A, (5, 1), location(1, 2).encode(), 0.0, own_word=True)
    assert A in members(cache, 1)
    assert cache.count == HOLDERS_PER_KEY


def test_what_is_old_hides_nothing() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (1 << 61, 0), location(1, 9).encode(), 0.0)
    assert cache.learn(A, (5, 7), location(1, 2).encode(), 31.0)
    assert members(cache, 1, 31.0) == [A]


def test_hearsay_of_whatever_place_never_goes_before_what_holders_and_homes_say() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (5, 7), location(1, 2).encode(), 0.0)
    assert not cache.learn(A, (1 << 61, 0), location(1, 9).encode(), 0.0, hearsay=True)
    cache.learn(B, (1 << 61, 0), location(1, 9).encode(), 0.0, hearsay=True)
    assert cache.learn(B, (5, 1), location(1, 2).encode(), 0.0)
    assert [found.record.version.clock for found in cache.holders(digest_of(1), 0.0)] == [2, 2]


def test_a_denial_drops_what_was_heard_of_that_member() -> None:
    cache = LocationCache(10, 30.0)
    cache.learn(A, (5, 7), location(1).encode(), 0.0)
    cache.learn(B, (5, 7), location(1).encode(), 0.0)
    cache.deny(A, digest_of(1))
    assert members(cache, 1) == [B]
    cache.deny(A, digest_of(9))


def test_what_was_used_least_recently_goes_first() -> None:
    cache = LocationCache(3, 30.0)
    for number in range(3):
        cache.learn(A, (5, number), location(number).encode(), 0.0)
    assert members(cache, 0) == [A]
    cache.learn(A, (5, 3), location(3).encode(), 0.0)
    assert [number for number in range(4) if members(cache, number)] == [0, 2, 3]
    assert cache.count == 3


def test_one_key_with_many_holders_takes_bounded_room() -> None:
    cache = LocationCache(1000, 30.0)
    for member in range(2 * HOLDERS_PER_KEY):
        cache.learn(member, (5, 1), location(1).encode(), 0.0)
    assert len(members(cache, 1)) == cache.count == HOLDERS_PER_KEY
    cache.clear()
    assert cache.count == 0
