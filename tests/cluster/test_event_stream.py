"""Streams of events about keys, of real peers to real ZeroMQ consumers."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from p2pstore import blocking
from p2pstore.objects import MIB
from p2pstore.peer.event_stream import COMMAND, GREETING, MORE, READY, frame
from tests.cluster.processes import ProcessCluster, new_cluster
from tests.cluster.test_roles import keys
from tests.event_consumer import Consumers
from tests.ports import free_port
from tests.waiting import eventually


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


def test_the_fleet_by_any_peer_and_by_another_when_that_one_dies(
    cluster: ProcessCluster, consumers: Consumers
) -> None:
    streams = [new_stream(), new_stream()]
    first, second, third = cluster.peers
    fast = ["--network", "local", "--kv-events-of", "fleet"]
    cluster.start([first], *streams[0].options(*fast))
    others = ["--bootstrap", first.control]
    cluster.start([second], *streams[1].options(*fast), *others)
    cluster.start([third], "--network", "local", *others)
    cluster.wait_until_whole()
    for peer in cluster.peers:
        peer.client.put_many([(f"{peer.name}/{number}", b"value") for number in range(300)])
        with blocking.connect(str(peer.socket), namespace="other") as client:
            client.put_many([(f"other {number}", b"1") for number in range(300)])
    second.client.put("both", b"value", replicas=2)
    wanted = {f"{peer.name}/{number}" for number in range(300) for peer in cluster.peers} | {"both"}
    consumer = consumers.follow(*streams[0])
    consumer.wait(lambda state: state.keys == wanted)
    assert consumer.state.backends == {cluster.folder.name}

    third.client.remove_many([f"p2/{number}" for number in range(290)])
    wanted -= {f"p2/{number}" for number in range(290)}
    consumer.wait(lambda state: state.keys == wanted)

    first.kill()
    third.client.put("afterwards", b"value")
    wanted = {each for each in wanted if not each.startswith("p0/")} | {"afterwards"}
    consumer = consumers.follow(*streams[1])
    consumer.wait(lambda state: state.keys == wanted)
    third.kill()  # it is missed by and by
    consumer.wait(
        lambda state: state.keys == {each for each in wanted if each.startswith("p1/")} | {"both"}
    )


def test_a_reader_without_memory_serves_the_fleet(
    cluster: ProcessCluster, consumers: Consumers, tmp_path: Path
) -> None:
    member, reader = keys(tmp_path)
    stream, (holder, server, _) = new_stream(), cluster.peers
    cluster.start([holder], "--cluster-key-file", member)
    options = ["--cluster-key-file", reader, "--memory", "0", "--bootstrap", holder.control]
    cluster.start([server], *stream.options("--kv-events-of", "fleet", *options))
    holder.client.put_many([(f"key {number}", b"value") for number in range(100)])
    consumers.follow(*stream).wait(lambda state: len(state.keys) == 100)


def test_slow_many_and_hostile_consumers_harm_nobody(
    cluster: ProcessCluster, consumers: Consumers
) -> None:
    stream, peer = new_stream(), cluster.peers[0]
    cluster.start([peer], *stream.options())
    peer.client.put_many([(f"old {number}", b"value") for number in range(2000)])
    followers = [consumers.follow(*stream) for _ in range(100)]
    with consumers.context.socket(zmq.SUB) as deaf, consumers.context.socket(zmq.DEALER) as dealer:
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.connect(stream.endpoint)  # and never reads
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(stream.replay)
        for _ in range(300):
            dealer.send_multipart([b"", bytes(8)])  # nor reads what it asks for
        for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b""] * 50, [b"", bytes(10_000)]):
            with consumers.context.socket(zmq.DEALER) as garbage:
                garbage.connect(stream.replay)
                garbage.send_multipart(frames)
        for endpoint in stream:
            with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as raw:
                raw.sendall(os.urandom(4096))
        removed = [f"old {number}" for number in range(1990)]
        peer.client.remove_many(removed)
        peer.client.put("new", b"value")
        wanted = {f"old {number}" for number in range(1990, 2000)} | {"new"}
        for follower in followers:
            follower.wait(lambda state: state.keys == wanted)
    assert peer.client.get("new") == b"value"


def flood(endpoint: str, part: bytes) -> None:
    """Send this again and again after a handshake by hand, until the peer has enough."""
    with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as raw:
        raw.sendall(GREETING + frame(COMMAND, READY))
        with suppress(ConnectionError):
            for _ in range(20_000):
                raw.sendall(part + os.urandom(1000))


def test_strangers_leave_nothing_in_a_peer_s_memory(
    cluster: ProcessCluster, consumers: Consumers
) -> None:
    stream, peer = new_stream(), cluster.peers[0]
    cluster.start([peer], *stream.options())
    follower = consumers.follow(*stream)
    follower.ask()
    before = peer.resident_bytes()
    head = frame(0, bytes(1000))[:-1000]
    flood(stream.endpoint, head[:-1] + bytes([head[-1] + 1]) + b"\x01")  # subscriptions to random topics
    flood(stream.replay, bytes([MORE | head[0]]) + head[1:])  # a message that comes to no end
    peer.client.put("key", b"value")
    follower.wait(lambda state: state.keys == {"key"})
    assert peer.resident_bytes() < before + 32 * MIB


def test_an_endpoint_that_is_none(cluster: ProcessCluster) -> None:
    peer = cluster.peers[0]
    peer.start("--kv-events", "nonsense")
    eventually(lambda: not peer.running, 60.0)
    assert "kv-events: 'nonsense' is no endpoint" in peer.log.read_text()
