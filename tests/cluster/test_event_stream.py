"""Streams of events about keys, of real peers to real ZeroMQ consumers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import zmq

from p2pstore import blocking
from tests.cluster.processes import ProcessCluster, new_cluster
from tests.event_consumer import Consumers
from tests.ports import free_port


@pytest.fixture
def consumers() -> Iterator[Consumers]:
    with zmq.Context() as context:
        opened = Consumers(context)
        yield opened
        opened.close()


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with new_cluster(3, halves=False) as cluster:
        yield cluster


class Stream(NamedTuple):
    """Endpoints of a stream, and the options of a peer that publishes it."""

    endpoint: str
    replay: str

    def options(self, *more: str) -> list[str]:
        return ["--kv-events", self.endpoint, "--kv-events-replay", self.replay, *more]


def new_stream() -> Stream:
    return Stream(*(f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for _ in "ab"))


def test_a_consumer_of_one_peer_knows_what_it_holds(
    cluster: ProcessCluster, consumers: Consumers
) -> None:
    stream = new_stream()
    peer = cluster.peers[0]
    cluster.start([peer], *stream.options())
    early = consumers.follow(*stream)
    early.ask()
    peer.client.put_many([(f"key {number}", b"value") for number in range(1000)])
    peer.client.put("42", b"value")
    wanted = {f"key {number}" for number in range(1000)} | {"42"}
    early.wait(lambda state: state.keys == wanted)
    assert early.state.held == {(key, "cpu") for key in wanted}
    assert early.state.backends == {peer.ready["peer_id"]}
    late = consumers.follow(*stream)
    late.wait(lambda state: state.keys == wanted)

    peer.client.remove_many([f"key {number}" for number in range(990)])
    with blocking.connect(str(peer.socket), namespace="other") as client:
        client.put("other", b"1")
    wanted = {f"key {number}" for number in range(990, 1000)} | {"42"}
    for each in (early, late):
        each.wait(lambda state: state.keys == wanted)

    before = early.state.next
    peer.kill()
    cluster.start([peer], *stream.options())
    peer.client.put("new", b"value")
    early.wait(lambda state: state.keys == {"new"})
    assert early.state.next > before
