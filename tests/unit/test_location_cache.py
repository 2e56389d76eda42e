"""Locations heard of: bounded, aged, dropped when a holder denies them; hot keys are told before others ask."""

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.hot_keys import (
    HALVING_SECONDS,
    HOT_USES,
    MAX_COUNTED,
    MAX_HOT,
    HotKeys,
    pack_hot,
    unpack_hot,
)
from p2pstore.gossip.homes.known_locations import HOLDERS_PER_KEY, LocationCache
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.records import LocationRecord
from p2pstore.objects import Version
from tests.unit.gossip_network import Network, Node, digest_of, location

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


def test_a_key_is_hot_while_it_is_used_often() -> None:
    keys = HotKeys()
    for _ in range(HOT_USES - 1):
        keys.note(digest_of(1), 0.0)
    assert keys.hottest() == []
    keys.note(digest_of(1), 0.0)
    for _ in range(HOT_USES + 1):
        keys.note(digest_of(2), 0.0)
    assert keys.hottest() == [digest_of(2), digest_of(1)]
    keys.note(digest_of(3), HALVING_SECONDS)
    assert keys.hottest() == []


def test_what_is_counted_and_told_is_bounded() -> None:
    keys = HotKeys()
    for number in range(MAX_COUNTED + 10):
        keys.note(digest_of(number), 0.0)
    for _ in range(HOT_USES):
        for number in (*range(100), MAX_COUNTED + 5):
            keys.note(digest_of(number), 0.0)
    hottest = keys.hottest()
    assert len(hottest) == MAX_HOT
    assert digest_of(MAX_COUNTED + 5) not in hottest


def test_the_bytes_of_hot_locations() -> None:
    packed = pack_hot([Location(1, 2, 3, location(4))])
    assert packed.hex() == (
        "010000000000000002000000000000000300000000000000" + location(4).encode().hex()
    )
    assert list(unpack_hot(packed)) == [(1, (2, 3), location(4).encode())]


@pytest.mark.parametrize(
    "nonsense", [b"x", bytes(66 * (MAX_HOT + 1)), b"\xff" * 66], ids=["short", "many", "far"]
)
def test_nonsense_is_refused(nonsense: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_hot(nonsense)


def partitioned_network() -> tuple[Network, list[Node]]:
    net = Network(1, GossipConfig(directory_setting="partitioned"))
    nodes = net.start_all(6)
    net.run(5.0)
    return net, nodes


def test_where_a_hot_key_is_spreads_to_all_and_ages_when_nobody_says_it_any_more() -> None:
    net, nodes = partitioned_network()
    owner = nodes[0]
    owner.hold(location(1), net.now)
    net.run(1.0)
    homes = owner.gossip.homes(digest_of(1))
    home = next(node for node in nodes if node.peer_id == homes[0] and node is not owner)
    others = [node for node in nodes if node.peer_id not in homes and node is not owner]
    assert others

    def known(node: Node) -> bool:
        return bool(node.gossip.holders(digest_of(1), net.now))

    assert not any(map(known, others))
    for _ in range(HOT_USES):
        home.gossip.partitions.hot.used(digest_of(1), net.now)
    for node in others:  # they use it, too: what they heard is not to be passed on by them
        for _ in range(2 * HOT_USES):
            node.gossip.partitions.hot.used(digest_of(1), net.now)
    assert net.run(30.0, lambda: all(map(known, others)))
    home.gossip.partitions.hot.keys = HotKeys()
    owner.gossip.partitions.hot.keys = HotKeys()

    def use() -> None:
        for node in others:
            node.gossip.partitions.hot.used(digest_of(1), net.now)
        net.later(0.2, use)

    use()
    assert net.run(60.0, lambda: not any(map(known, others))), "a rumour kept itself alive"
