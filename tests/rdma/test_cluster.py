"""Three real peers, as if on three machines: reading by RDMA, and what takes over when that or a peer fails."""

import itertools
import json
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from random import Random
from typing import TypeVar

import pytest

from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.objects import MIB
from p2pstore.status.doctor import readings
from p2pstore.status.doctor.finding import Status
from p2pstore.status.doctor.machine_rules import judge_memlock
from p2pstore.status.doctor.network_rules import judge_rdma, judge_topology
from p2pstore.transfer.rdma.rdma_hardware import read_machine, read_matrix
from p2pstore.transfer.transfer_trace import FetchTrace
from tests.cluster.processes import PeerProcess, ProcessCluster
from tests.rdma.forked import ForkedPeer, load
from tests.rdma.harness import cables
from tests.waiting import eventually

T = TypeVar("T")

VALUE = Random(5).randbytes(3 * MIB + 5)
MEMORY = "64MiB"
SECONDS = 60.0
NUMBERS = itertools.count()
START_SECONDS = 200.0

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """p0 at one end of both cables, p1 at the other end; p2 at that of p0, with the first cable alone. p1 may use
    nothing but RDMA. The memory of p0 is in two pieces."""
    load()
    with closing(ProcessCluster(tmp_path_factory.mktemp("cluster"), 3, None, MEMORY)) as cluster:
        for peer, transport in zip(cluster.peers, ("auto", "rdma", "auto"), strict=True):
            start(cluster, peer, transport)
        for peer in cluster.peers:
            peer.wait_until_ready(START_SECONDS)
        cluster.wait_until_whole()
        yield cluster


def start(cluster: ProcessCluster, peer: PeerProcess, transport: str, *more: str) -> None:
    number = cluster.peers.index(peer)
    machine = cluster.folder / f"machine{number}"
    machine.write_text(f"{uuid.uuid4()}\n")
    options = ["--bootstrap", cluster.peers[0].control] if number else []
    if not number:
        options = ["--memory", "32MiB", "--more-memory", "32MiB@node:0"]
    if number == 2:
        devices = ["--rdma-topology", json.dumps({"cpu:0": [[cables()[0][0]], []]})]
    else:
        names = [ends[number] for ends in cables()[:2]]
        devices = [option for name in names for option in ("--rdma-device", name)]
    peer.start(
        *options, *("--transport", transport, *devices, *more), by=partial(ForkedPeer, machine=machine)
    )


def retried(action: Callable[[], T]) -> T:
    """`action`'s result once no transient failure is in its way: on a busy machine a connection may take longer
    than peers wait for it, and is not tried again for a while."""
    outcome: list[T] = []

    def tried() -> bool:
        try:
            outcome.append(action())
        except Unavailable as error:
            problems.append(str(error))
        return bool(outcome)

    problems: list[str] = []
    eventually(tried, SECONDS, lambda: problems[-1])
    return outcome[0]


def objects_by(peer: PeerProcess, transport: str) -> int:
    """Objects that a peer got from others by this transport."""
    members = peer.client.peers(everyone=True)
    return sum(each.transports.get(transport, {}).get("objects", 0) for each in members)


def lease(peer: PeerProcess, key: str) -> bytes:
    """Read an object by having the peer bring it to its memory."""

    def read() -> bytes:
        with peer.client.lease(key, wait=SECONDS) as view:
            return bytes(view)

    return retried(read)


def put_copies(peer: PeerProcess, key: str, copies: int) -> None:
    """Put an object again until `copies` peers have it: a put does not wait for a slow peer."""
    eventually(lambda: peer.client.put(key, VALUE, replicas=copies).copies == copies, SECONDS)


def lease_by_rdma(reader: PeerProcess, holder: PeerProcess) -> None:
    """Have a line between two peers: the reader brings objects of the holder until one came by RDMA."""
    before = objects_by(reader, "rdma")

    def read() -> bool:
        key = f"line {next(NUMBERS)}"
        holder.client.put(key, b"value")
        assert lease(reader, key) == b"value"
        return objects_by(reader, "rdma") > before

    eventually(read, SECONDS)


def test_clients_of_a_peer_that_uses_rdma_alone(cluster: ProcessCluster) -> None:
    first, second, _ = cluster.peers
    values = {"large": VALUE, "small": b"abc", "empty": b""}
    for key, value in values.items():
        first.client.put(key, value)
    for key, value in values.items():
        assert retried(partial(second.client.get, key, wait=SECONDS)) == value
    first.client.put("another", VALUE[1:])
    first.client.put("last", b"x")
    buffers = [bytearray(len(VALUE)), bytearray(3), bytearray(1)]
    eventually(lambda: second.client.contains_many(["another", "last"]) == [True, True], SECONDS)
    items = list(zip(("another", "nothing", "last"), buffers, strict=True))
    done = second.client.get_many_into(items)
    assert [each.value for each in done] == [len(VALUE) - 1, None, 1]
    assert isinstance(done[1].error, NoSuchKey)
    assert buffers[0][:-1] == VALUE[1:]
    assert objects_by(second, "rdma") == 5
    assert objects_by(second, "tcp") == objects_by(second, "shm") == 0
    put_copies(second, "back", 2)


def test_clients_of_auto_peers_have_large_objects_brought_by_rdma(cluster: ProcessCluster) -> None:
    first, second, _ = cluster.peers
    lease_by_rdma(first, second)
    by_rdma, by_tcp = objects_by(first, "rdma"), objects_by(first, "tcp")
    second.client.put("auto large", VALUE)
    second.client.put("auto small", VALUE[:1000])
    assert retried(partial(first.client.get, "auto large", wait=SECONDS)) == VALUE
    assert first.client.get("auto small", wait=SECONDS) == VALUE[:1000]
    eventually(lambda: objects_by(first, "tcp") == by_tcp + 1, SECONDS)  # reports go ten times a second
    assert objects_by(first, "rdma") == by_rdma + 1


def test_people_are_told(cluster: ProcessCluster) -> None:
    """By `get --explain` which way a value came, by `doctor` of the devices, by the log which are used."""
    first, second, third = cluster.peers
    first.client.put("told", VALUE)
    eventually(lambda: second.client.contains("told"), SECONDS)
    trace = FetchTrace()
    second.client.get_into("told", bytearray(len(VALUE)), trace=trace)
    assert (trace.local, trace.source, trace.transport) == (False, "p0", "rdma")
    assert [(each.peer, each.outcome) for each in trace.tries] == [("p0", "delivered")]
    problem = readings.read_pyverbs_problem()
    port = readings.read_rdma_port(cables()[0][0], 1)  # all rows of all four take a minute
    findings = judge_rdma([port], pyverbs_problem=problem)
    assert {each.status for each in findings} == {Status.OK}
    (found,) = judge_topology(read_machine(), read_matrix(), told=False)
    assert (found.name, found.value) == ("rdma for cpu:0", "rxe0, rxe1, rxe2, rxe3")
    assert second.logged("rdma through rxe1 (veth1), rxe3 (veth3)")
    assert third.logged("rdma through rxe0 (veth0) ")
    assert "RoCE v2 as 10.77.0.1" in findings[0].value
    assert "does not count" in judge_memlock(1, unlimited=True, rdma=True).value
    assert readings.may_lock_all_memory()


def test_a_cable_is_cut(cluster: ProcessCluster) -> None:
    """A peer that may use all transports falls back to TCP, says so, and comes back to RDMA."""
    first, second, third = cluster.peers
    lease_by_rdma(third, first)
    first.client.put("cable 0", VALUE)
    by_rdma, by_tcp = objects_by(third, "rdma"), objects_by(third, "tcp")
    assert lease(third, "cable 0") == VALUE
    assert (objects_by(third, "rdma"), objects_by(third, "tcp")) == (by_rdma + 1, by_tcp)
    interface = "veth1"
    second.client.put("cable 1", VALUE[1:])
    second.client.put("cable 2", VALUE[2:])
    subprocess.run(["ip", "link", "set", interface, "down"], check=True)
    try:
        assert lease(third, "cable 1") == VALUE[1:]
    finally:
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)
    assert objects_by(third, "tcp") == by_tcp + 1
    assert third.logged("rdma to p1 did not work")

    lease_by_rdma(third, second)


def test_a_holder_is_killed(cluster: ProcessCluster) -> None:
    first, second, third = cluster.peers
    put_copies(first, "kept", 3)
    first.client.put("twice", VALUE[3:])
    assert retried(lambda: second.client.get("twice", wait=SECONDS)) == VALUE[3:]
    eventually(lambda: len(third.client.locate("twice")) == 2, SECONDS)
    lease_by_rdma(third, second)
    before = objects_by(third, "rdma")
    first.kill()
    assert lease(third, "twice") == VALUE[3:]
    assert lease(third, "kept") == VALUE
    assert retried(lambda: second.client.get("kept")) == VALUE
    assert objects_by(third, "rdma") == before + 1


def test_a_peer_leaves(cluster: ProcessCluster) -> None:
    """With lines to others open, and theirs to it: all of it is closed in order."""
    _, second, third = cluster.peers
    second.client.put("farewell", VALUE)
    third.client.put("adieu", VALUE[1:])
    assert lease(third, "farewell") == VALUE
    assert lease(second, "adieu") == VALUE[1:]
    since = third.log_size()
    third.signal(signal.SIGTERM)
    eventually(lambda: not third.running, SECONDS)
    assert not third.logged("Traceback", since)
    assert not third.logged("did not close", since)
    assert third.exit_status == 0
    second.client.put("after", b"x")
    assert second.client.get("after") == b"x"
