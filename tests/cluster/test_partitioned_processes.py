"""Ten real processes that keep a part of the directory each: all of them, then half. The tests share them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from p2pstore.errors import NoSuchKey
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster, sees
from tests.waiting import eventually

PEERS = 10
KEYS_EACH = 4
SECONDS = 60.0


def directory_of(peer: PeerProcess) -> dict[str, Any]:
    document: dict[str, Any] = peer.client.statistics(cluster=False)["peer"]["directory"]
    return document


def wait_for_homes(peers: list[PeerProcess]) -> None:
    eventually(lambda: not any(directory_of(peer)["not_confirmed_by_homes"] for peer in peers), SECONDS)


def put_on_each(peers: list[PeerProcess], word: str) -> list[str]:
    keys = []
    for peer in peers:
        for number in range(KEYS_EACH):
            keys.append(f"{word}-{peer.name}-{number}")
            peer.client.put(keys[-1], value_of(keys[-1]))
    return keys


def value_of(key: str) -> bytes:
    return key.encode() * 50


def finds_all(reader: PeerProcess, keys: list[str]) -> bool:
    return all(reader.client.contains_many(keys))


def check_everywhere(peers: list[PeerProcess], keys: list[str]) -> None:
    """All of them find all keys, and read one put by each of them."""
    for reader in peers:
        eventually(partial(finds_all, reader, keys), SECONDS, lambda: "it misses some")
        for key in keys[::KEYS_EACH]:
            assert reader.client.get(key) == value_of(key)
            assert reader.client.locate(key)
        with pytest.raises(NoSuchKey):
            reader.client.get("never put")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with new_cluster(PEERS, halves=False) as cluster:
        cluster.start_first("--directory", "partitioned")
        yield cluster


def test_ten_partitioned_peers_find_what_each_holds(cluster: ProcessCluster) -> None:
    wait_for_homes(cluster.peers)
    for peer in cluster.peers:
        assert directory_of(peer)["mode"] == "partitioned"
        assert 250 < directory_of(peer)["home_partitions"] < 370
    keys = put_on_each(cluster.peers, "a")
    check_everywhere(cluster.peers, keys)
    held = sum(directory_of(peer)["home_locations"] for peer in cluster.peers)
    assert 2 * len(keys) < held, "each at three homes, of which one may be its owner"
    listed = cluster.peers[3].client.list_keys().keys
    assert {each.key for each in listed} == set(keys)
    members = cluster.peers[3].client.peers()
    assert {member.directory for member in members} == {"partitioned"}


def test_they_outlive_one_that_is_killed_and_comes_back(cluster: ProcessCluster) -> None:
    *others, victim = cluster.peers
    keys = put_on_each(cluster.peers, "b")
    mine = [key for key in keys if f"-{victim.name}-" in key]
    kept = [key for key in keys if key not in mine]
    victim.kill()
    check_everywhere(others, kept)
    eventually(lambda: sees(others, {victim.name: "dead"}), SECONDS)
    wait_for_homes(others)
    eventually(lambda: not any(any(p.client.contains_many(mine)) for p in others), SECONDS)
    cluster.start([victim], "--directory", "partitioned", "--bootstrap", others[0].control)
    cluster.wait_until_whole()
    check_everywhere(cluster.peers, kept + put_on_each([victim], "c"))


def test_full_and_partitioned_peers_work_together(cluster: ProcessCluster) -> None:
    first, *rest = cluster.peers
    full = rest[1::2]
    for peer in full:
        peer.kill()
    cluster.start(full, "--directory", "full", "--bootstrap", first.control)
    cluster.wait_until_whole()
    wait_for_homes(cluster.peers)
    assert {peer.name for peer in cluster.peers if directory_of(peer)["mode"] == "full"} == {
        peer.name for peer in full
    }
    keys = put_on_each(cluster.peers, "d")
    check_everywhere(cluster.peers, keys)
    assert first.client.remove(keys[0])
    eventually(lambda: not any(p.client.contains(keys[0]) for p in cluster.peers), SECONDS)
