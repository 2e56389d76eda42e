"""Gossip's memory does not grow with past events: only with present members and objects.

`scripts/bench_gossip` does the same with real peers, many times as long.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.machine import GossipConfig
from p2pstore.gossip.members.member_table import MembershipConfig
from tests.unit.gossip_network import Network, digest_of, location

KEYS = 50
DEAD_KEPT_SECONDS = 10.0
KEPT_SECONDS = 5.0
"""Memory that may be needed again for a while."""
MOST_LEFT_BYTES_AN_OPERATION = 20
MOST_LEFT_BYTES_A_MEMBER = 4000
"""An observer keeps a few numbers of who wrote; its member's record alone takes 3,000 bytes."""


@pytest.fixture
def network() -> Iterator[Network]:
    config = GossipConfig(
        ring_limit=KEYS,
        forget_seconds=KEPT_SECONDS,
        membership=MembershipConfig(dead_kept_seconds=DEAD_KEPT_SECONDS),
        directory=DirectoryConfig(relay_limit=KEYS, relay_least=KEYS, early_seconds=KEPT_SECONDS),
    )
    gc.collect()  # what another test left, and what is shared with it, would not be traced
    tracemalloc.start()
    yield Network(seed=1, config=config)
    tracemalloc.stop()


def settled_bytes(network: Network) -> int:
    """Bytes allocated by gossip's own lines when nothing is under way any more."""
    assert network.run(30, network.converged)
    for node in network.nodes.values():
        node.gossip.take_changes()
    network.run(DEAD_KEPT_SECONDS + KEPT_SECONDS + 1)
    gc.collect()
    ours = tracemalloc.Filter(True, "*/p2pstore/gossip/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)


@pytest.mark.slow
def test_operations_leave_nothing_behind(network: Network) -> None:
    first, second = network.start_all(2)
    assert network.run(20, network.converged)
    for number in range(KEYS):
        first.hold(location(number, clock=number + 1), network.now)

    def hold_and_release(numbers: range) -> None:
        for number in numbers:
            first.hold(location(number, clock=number + 1), network.now)
            first.release(digest_of(number - KEYS), network.now)
            if number % KEYS == 0:
                network.run(0.3)

    hold_and_release(range(KEYS, 1250))  # tables are as large as they get
    before = settled_bytes(network)
    hold_and_release(range(1250, 2500))
    growth = settled_bytes(network) - before
    assert second.knows(first)
    assert growth < 2 * 1250 * MOST_LEFT_BYTES_AN_OPERATION


@pytest.mark.slow
def test_members_that_joined_and_left_are_forgotten(network: Network) -> None:
    network.start_all(2)
    assert network.run(20, network.converged)

    def come_and_go(numbers: range) -> None:
        for number in numbers:
            guest = network.start(number)
            assert network.run(20, network.converged)
            guest.hold(location(number), network.now)
            assert network.run(20, network.converged)
            network.do(guest, guest.gossip.leave(network.now))
            network.run(0.1)
            network.stop(number)

    come_and_go(range(10, 18))
    before = settled_bytes(network)
    come_and_go(range(20, 28))
    growth = settled_bytes(network) - before
    assert [len(node.gossip.membership) for node in network.nodes.values()] == [2, 2]
    assert growth < 2 * 8 * MOST_LEFT_BYTES_A_MEMBER
