"""Keys that many look for: known to others before they ask, and never kept alive by rumours."""

from __future__ import annotations

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.known_locations import (
    HALVING_SECONDS,
    HOT_USES,
    MAX_COUNTED,
    MAX_HOT,
    HotKeys,
    pack_hot,
    unpack_hot,
)
from p2pstore.gossip.locations.views import Location
from tests.unit.gossip_network import Network, Node, digest_of, location


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
