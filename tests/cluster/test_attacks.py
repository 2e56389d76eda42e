"""Real peers under attack: broken clients, lying peers, and processes that die at the worst moment."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.access.keyring import KeyRing
from p2pstore.client.trio_client import Client
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import LocationRecord, SignedRecord
from p2pstore.home_messages import Holding, Push
from p2pstore.local import local_messages as local
from p2pstore.local import older_put_messages as older
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.state.state_directory import StateDirectory
from p2pstore.state.state_files import FloorsFile
from p2pstore.transfer.data_messages import DataKind, ObjectReply, Objects, Ping
from p2pstore.transfer.peer_messages import (
    ClusterRecords,
    ListKeys,
    Locations,
    Lookup,
    PinItem,
    Replicate,
    SetPins,
    Snapshot,
)
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Empty, Message
from simulation.segment_checks import check_segment
from tests.cluster.machines import Peer as Process
from tests.cluster.machines import new_machine
from tests.cluster.peers import cluster, config
from tests.long_runs import only_in_long_runs
from tests.waiting import eventually, until

HUGE = 2**64 - 1
PATIENCE_SECONDS = 120.0
"""Upper bound of every wait, however busy the machine is: only a peer that hangs reaches it."""


async def still_well(*peers: Peer) -> None:
    """Each peer stores, serves and answers, has no operation left, and its segment is consistent."""
    for number, peer in enumerate(peers):
        key = f"well/{number}/{os.urandom(4).hex()}"
        with trio.fail_after(PATIENCE_SECONDS):
            assert (await peer.put(key, b"value")).status == "created"
            assert await peer.get(key) == b"value"
            await peer.statistics()
        core = peer.node.core
        await until(lambda core=core: core.operations_under_way == 0)  # type: ignore[misc]  # bound now
        check_segment(core.segment)


def request(
    client: Client, kind: LocalKind, message: Message, reply: type[Any], extra_seconds: float = 0.0
) -> Any:
    """Any request over a client's own connection."""
    return client._link.request(kind, message, reply, extra_seconds=extra_seconds)


async def reserve(client: Client, length: int, count: int = 1) -> list[older.Reservation]:
    items = [(length, 4096)] * count
    reply: older.ReservedRows = await request(
        client, LocalKind.RESERVE_ROWS, older.ReserveRows(items), older.ReservedRows
    )
    return reply.items


def commit_item(reservation: int, key: str, value: bytes, **fields: Any) -> older.CommitRow:
    sums = chunk_sums(value)
    return older.CommitRow(reservation, key, len(value), sums, root_checksum(len(value), sums), **fields)


# --- broken clients --------------------------------------------------------------------------


@asynccontextmanager
async def open_second_client(peer: Peer) -> AsyncIterator[Client]:
    async with p2pstore.connect(peer.socket) as client:
        yield client


async def test_a_client_goes_while_its_puts_are_compared_elsewhere(tmp_path: Path) -> None:
    """The peer asks another for the slot of a key; meanwhile the reservations end."""
    async with cluster(tmp_path, 2) as (a, b):
        for number in range(8):
            await a.put(f"k{number}", b"value")
        await until(lambda: all(b.contains_nowait(f"k{n}") for n in range(8)))
        request_of, gone = b.node.pool.request, trio.Event()

        async def slow_request(*arguments: Any) -> Message:
            await gone.wait()
            return await request_of(*arguments)

        b.node.pool.request = slow_request  # type: ignore[method-assign, assignment]

        async def put(client: Client, commit: older.CommitRows) -> None:
            with suppress(errors.P2PStoreError, ValueError):
                await request(client, LocalKind.COMMIT_ROWS, commit, older.CommittedRows)

        for way in ("close", "abort"):
            gone = trio.Event()
            async with open_second_client(b) as client:
                rooms = await reserve(client, 5, 8)
                items = [commit_item(room[0], f"k{n}", b"value") for n, room in enumerate(rooms)]
                async with trio.open_nursery() as nursery:
                    commit = older.CommitRows("default", items)
                    nursery.start_soon(put, client, commit)
                    await until(lambda: b.node.core.operations_under_way > 0, 2)
                    if way == "abort":
                        await request(
                            client, LocalKind.ABORT, local.Abort([room[0] for room in rooms]), Empty
                        )
                        gone.set()
                    else:
                        nursery.cancel_scope.cancel()
            gone.set()
            await until(lambda: b.node.core.operations_under_way == 0)
        await still_well(a, b)


# --- lying peers -----------------------------------------------------------------------------


@asynccontextmanager
async def stranger(scope: Scope = Scope.READ | Scope.PEER) -> AsyncIterator[Callable[..., Any]]:
    """Requests with a valid ticket from a process that is no member."""
    identity = Identity(os.urandom(32))
    issuer = TicketIssuer(identity, KeyRing())
    pool = ConnectionPool(TrioDriver(), lambda peer: issuer.ticket(peer.peer_id, scope))

    async def ask(peer: Peer, kind: DataKind, message: Message) -> Message:
        remote = RemotePeer(peer.node.core.peer_id, tuple(peer.data))
        return await pool.request(remote, kind, message)

    with closing(pool):
        yield ask


def location(digest: bytes, clock: int = 1, writer: int = 0) -> bytes:
    return LocationRecord(digest, Version(clock, writer), 0, 1).encode()


DIGEST = key_digest("k")
NONSENSE: list[tuple[DataKind, Message]] = [
    (DataKind.PUSH, Push(HUGE, [HUGE] * 3, location(DIGEST, HUGE) * 3)),
    (DataKind.PUSH, Push(-1, [-1], location(DIGEST))),
    (DataKind.PUSH, Push(1, [1, 2], location(DIGEST))),
    (DataKind.PUSH, Push(1, [1], b"x")),
    (DataKind.REPLICATE, Replicate(DIGEST, HUGE, HUGE, HUGE)),
    (DataKind.REPLICATE, Replicate(DIGEST, -1, -1, -1)),
    (DataKind.REPLICATE, Replicate(b"", 1, 1, 1, record_body=b"x", record_signature=b"y")),
    (DataKind.REPLICATE, Replicate(DIGEST * 1000, 1, 1, 1)),
    (DataKind.SET_PINS, SetPins([PinItem(DIGEST, HUGE, HUGE)] * 10_000, 2)),
    (DataKind.SET_PINS, SetPins([PinItem(b"x", 1, 1)], -1, -1)),
    (DataKind.LOOKUP, Lookup(b"x")),
    (DataKind.LOOKUP, Lookup(bytes(16 * 20_000))),
    (DataKind.LOOKUP, Lookup(bytes(16 * 16_384))),
    (DataKind.SNAPSHOT, Snapshot(-1)),
    (DataKind.SNAPSHOT, Snapshot(HUGE)),
    (DataKind.CLUSTER_RECORDS, ClusterRecords([b"x"], [b"y"])),
    (DataKind.CLUSTER_RECORDS, ClusterRecords([b""] * 1000, [])),
    (DataKind.LIST, ListKeys("", "", "", -1)),
    (DataKind.LIST, ListKeys("x" * 10_000, "\0", "\uffff", HUGE)),
]


async def test_a_read_ticket_does_not_open_what_is_for_peers(tmp_path: Path) -> None:
    async with open_peer(config(tmp_path, "a")) as peer, stranger(Scope.READ) as ask:
        await ask(peer, DataKind.PING, Ping())
        for kind, message in NONSENSE:
            if kind not in (DataKind.LOOKUP, DataKind.LIST):
                with pytest.raises(errors.AuthenticationFailed):
                    await ask(peer, kind, message)
        await still_well(peer)


LIES: list[Message | Exception] = [
    Empty(),
    Locations([]),
    Locations([[]] * 1000),
    Locations([[Holding(0, HUGE, HUGE, b"short")]]),
    Locations([[Holding(-1, -1, -1, location(DIGEST))] * 100]),
    Locations([[Holding(HUGE, 0, 0, location(DIGEST, HUGE, 65_535))]]),
    Objects([]),
    Objects([ObjectReply(0, b"x", b"y", 0)]),
    Objects([ObjectReply(HUGE, bytes(64), b"", 0)]),
    Objects([ObjectReply(1, incarnation=-1, sequence=-1)]),
    ValueError("nonsense"),
    errors.BufferTooSmall("nonsense", 5),
    errors.ObjectTooLarge("nonsense"),
    RuntimeError("nonsense"),
]


async def test_a_peer_that_answers_nonsense(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as (a, b, c):
        honest = c.node.core.serve, b.node.core.serve
        for lie in LIES:

            def serve(*_: object, lie: Message | Exception = lie) -> Message:
                if isinstance(lie, Exception):
                    raise lie
                return lie

            await c.put("k", b"value")
            await until(lambda: a.contains_nowait("k"))
            c.node.core.serve = b.node.core.serve = serve  # type: ignore[method-assign, assignment]
            with trio.fail_after(PATIENCE_SECONDS):
                await a.put("other", b"value", replicas=3)
                for key in ("none", "k"):
                    with suppress(errors.NoSuchKey, errors.Unavailable):
                        await a.get(key)
                await a.locate("nothing")
                await a.list_keys("")
                await a.remove("k")
            c.node.core.serve, b.node.core.serve = honest  # type: ignore[method-assign]
            await still_well(a)
            await a.remove("other")
            await until(lambda: not any(peer.contains_nowait("k") for peer in (a, b, c)))


NO_ADDRESSES = ["", "x", "host:99999", "a..b:1", "\0:1", "x" * 300 + ":1", "1.2.3.4:²", "[::1:5", ":"]


async def test_addresses_that_are_none(tmp_path: Path) -> None:
    """They come with another peer's record; a copy elsewhere is still read."""
    async with cluster(tmp_path, 3, transport="tcp") as (a, b, c):
        own_record = b.node.core.gossip.own_record
        describe, told = own_record.describe, [""]

        def lie() -> Any:
            return msgspec.structs.replace(describe(), data=told, control=told, socket="\0" + told[0])

        await c.put("k", os.urandom(5000), replicas=2)
        own_record.describe = lie
        record = a.node.routes.record_of
        for number, address in enumerate(NO_ADDRESSES):
            told = [address]
            own_record.changed()
            await until(lambda: told == record(b.node.core.peer_id).data)  # type: ignore[union-attr]  # noqa: B023
            with trio.fail_after(20):
                await b.put(f"there {number}", b"value")
                await a.put(f"new {number}", b"value", replicas=3)
                assert len(await a.get("k", wait=5)) == 5000
                await a.list_keys("")
                await a.locate("nothing")
                with pytest.raises(errors.Unavailable):
                    await until(lambda: a.contains_nowait(f"there {number}"))  # noqa: B023
                    await a.get(f"there {number}")
                await a.remove(f"there {number}")
            await still_well(a, c)


# --- batches, cancellation, disks ------------------------------------------------------------


async def test_a_huge_batch_of_absent_keys_does_not_stop_the_peer(tmp_path: Path) -> None:
    """Others are answered meanwhile; between two of these answers the loop does not work for long. The measure is its
    thread's processor time: waiting for a processor does not count."""
    async with cluster(tmp_path, 2) as (a, b):
        longest, answered = 0.0, 0

        async def others() -> None:
            nonlocal longest, answered
            while True:
                begin = time.thread_time()
                await a.statistics()
                longest = max(longest, time.thread_time() - begin)
                answered += 1
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            lease = local.Lease(os.urandom(16 * 8192))
            with trio.fail_after(PATIENCE_SECONDS):
                leased = await request(a, LocalKind.LEASE, lease, local.Leased, PATIENCE_SECONDS)
            nursery.cancel_scope.cancel()
        assert all(grant.error.code for grant in leased.items)
        assert answered
        assert longest < 4
        await still_well(a, b)


async def test_cancelled_anywhere(tmp_path: Path) -> None:
    """Every operation, ended at a random moment: nothing stays reserved, leased or under way."""
    rng = Random(7)
    sizes = (0, 10, 5000, MIB + 1, 3 * MIB)
    values = {f"k{number}": rng.randbytes(size) for number, size in enumerate(sizes)}

    async def once(peer: Peer, key: str, number: int) -> None:
        match rng.randrange(7):
            case 0:
                await peer.put(f"new{number}", values[key], replicas=rng.randint(1, 3))
            case 1:
                await peer.put(key, values[key])
            case 2:
                assert await peer.get(key, wait=1) == values[key]
            case 3:
                into = bytearray(4 * MIB)
                count = await peer.get_into(key, into, wait=1)
                assert into[:count] == values[key]
            case 4:
                async with peer.lease(key, wait=1) as view:
                    assert view == values[key]
                    await trio.sleep(rng.random() * 0.002)
            case 5:
                await peer.remove(f"new{rng.randrange(number + 1)}")
            case 6:
                await peer.put_many([(f"many{number}/{each}", b"x" * 999) for each in range(20)])

    async with cluster(tmp_path, 3, memory="256MiB") as peers:
        for key, value in values.items():
            await rng.choice(peers).put(key, value, pin="hard")

        async def some(first: int) -> None:
            for number in range(first, first + 125):
                longest = rng.choice((0, 0.0005, 0.002, 0.01, 0.05)) * rng.random()
                with trio.move_on_after(longest), suppress(errors.NoSuchKey, errors.Unavailable):
                    await once(rng.choice(peers), rng.choice(list(values)), number)

        async with trio.open_nursery() as nursery:
            for task in range(4):
                nursery.start_soon(some, 125 * task)
        await still_well(*peers)
        for peer in peers:
            segment = peer.node.core.segment
            await until(lambda segment=segment: not segment.leased_bytes)  # type: ignore[misc]  # bound now
            for key, value in values.items():
                assert await peer.get(key, wait=2) == value


async def test_a_full_disk_loses_no_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = str(tmp_path / "state")
    append = FloorsFile.append
    full = True

    def append_floors(self: FloorsFile, records: Sequence[SignedRecord]) -> None:
        if full and records:
            raise OSError(errno.ENOSPC, "the disk is full")
        append(self, records)

    monkeypatch.setattr(FloorsFile, "append", append_floors)
    async with open_peer(config(tmp_path, "a", state_dir=state)) as peer:
        for number in range(3):
            await peer.put(f"k{number}", b"value")
            await peer.remove(f"k{number}")
            await until(lambda number=number: caplog.text.count("disk is full") > number)  # type: ignore[misc]  # bound now
        full = False
    with StateDirectory.open(state) as directory:
        assert len(directory.floors.load()) == 3


async def test_an_error_of_the_program_ends_an_operation_and_not_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, 2) as (a, b):
        await b.put("k", b"value")
        await until(lambda: a.contains_nowait("k"))

        async def broken(*_: object) -> None:
            raise RuntimeError("a mistake")

        with monkeypatch.context() as patch:
            patch.setattr(a.node.pool, "request", broken)
            with trio.fail_after(5):
                with pytest.raises(errors.P2PStoreError):
                    await a.locate("nothing")
                # As when the holder is dead: that one other peer cannot be asked refuses no put. The newest
                # version wins everywhere when it can.
                assert (await a.put("k", b"newer")).status == "created"
        assert "a mistake" in caplog.text
        await until(lambda: {each.peer for each in b.locate_nowait("k")} == {"p0"})
        assert await b.get("k") == b"newer"
        await still_well(a, b)


async def test_leaving_while_others_talk_is_quiet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, 4) as peers:
        for number, peer in enumerate(peers):
            await peer.put(f"k{number}", b"value", replicas=3)
    loud = [
        record.getMessage()
        for record in caplog.records
        # Words of libp2p reach an operator at DEBUG only; the fixture listens before that.
        if record.levelno >= logging.ERROR and record.name.startswith("p2pstore.")
    ]
    assert loud == []


async def test_long_keys_are_listed_in_pages_that_a_frame_holds(tmp_path: Path) -> None:
    keys = ["L" * 1000 + f"{number:05}" for number in range(5000)]
    async with cluster(tmp_path, 2, memory="128MiB") as (a, b):
        await a.put_many([(key, b"") for key in keys])
        for peer in (a, b):
            found: list[str] = []
            more = True
            while more:
                page = await peer.list_keys("L", after=found[-1] if found else "", limit=10_000)
                assert not page.silent_peers
                found += [entry.key for entry in page.keys]
                more = page.more
            assert found == keys


async def test_an_answer_that_no_frame_holds_is_refused(tmp_path: Path) -> None:
    """The connection, with its leases, goes on."""
    async with cluster(tmp_path, 2, memory="64MiB") as (a, b):
        await a.put("k", b"value")
        await until(lambda: b.contains_nowait("k"))
        plan = local.Plan(key_digest("k") * 16_384)
        with pytest.raises(ValueError, match="ask for less"):
            await request(b, LocalKind.PLAN, plan, local.Planned, 5)
        await still_well(a, b)


# --- processes that die or stop --------------------------------------------------------------

PUT_AND_HOLD = """
import random, sys
from p2pstore import blocking
client = blocking.connect(sys.argv[1])
for number in range(10**9):
    key = f"{sys.argv[2]}/{number}"
    client.put(key, random.randbytes(random.choice((10, 70_000, 2_000_000))), replicas=3)
    client.lease(key).__enter__()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, pytest.param(24, marks=only_in_long_runs)])
def test_peers_and_clients_killed_at_any_moment(rounds: int) -> None:
    """While joining, in puts, leases and replication: the survivors serve, and keep nothing of the dead."""
    rng = Random(3)
    with new_machine() as machine:
        first = machine.join("first")
        bootstrap = ["--bootstrap", first.ready["control"]]
        second = machine.join("second", *bootstrap)
        value = rng.randbytes(2 * MIB)
        for number in range(rounds):
            victim = Process(machine, "victim", *bootstrap)
            if number % 3 == 0:
                time.sleep(rng.random())
            else:
                victim.wait_until_ready()
                client = subprocess.Popen(
                    [sys.executable, "-c", PUT_AND_HOLD, victim.ready["socket"], str(number)],
                    stderr=subprocess.DEVNULL,
                )
                time.sleep(0.3 + 0.5 * rng.random())
                if number % 3 == 2:
                    client.kill()
                    client.wait()
            victim.stop(signal.SIGKILL)
            if number % 3 == 1:
                client.kill()
                client.wait()
            for peer, other in ((first, second), (second, first)):
                begin = time.monotonic()
                peer.client.statistics()
                assert time.monotonic() - begin < 1
                peer.client.put(f"round/{number}/{peer.name}", value, replicas=2)
                assert other.client.get(f"round/{number}/{peer.name}", wait=5) == value
        for peer in (first, second):
            eventually(lambda peer=peer: peer.client.statistics()["peer"]["leased_bytes"] == 0)  # type: ignore[misc]  # bound now
            assert "Traceback" not in peer.log.read_text()


@pytest.mark.slow
def test_a_stopped_peer_holds_nobody_up_and_comes_back() -> None:
    """Once before it is declared dead, and once after that."""
    with new_machine() as machine:
        local_network = ("--network", "local")  # which finds a peer dead sooner
        first = machine.join("first", *local_network)
        bootstrap = ["--bootstrap", first.ready["control"], *local_network]
        second, third = (machine.join(name, *bootstrap) for name in ("second", "third"))
        peers = (first, second, third)
        eventually(lambda: all(peer.alive() == 3 for peer in peers))
        second.client.put("alone", b"alone")
        third.client.put("both", b"both", replicas=3)
        eventually(lambda: first.client.contains("alone"))
        for until_dead in (False, True):
            second.process.send_signal(signal.SIGSTOP)
            try:
                end = time.monotonic() + PATIENCE_SECONDS
                over = False
                while not over:
                    begin = time.monotonic()
                    assert begin < end
                    over = not until_dead or first.alive() == third.alive() == 2
                    with suppress(errors.NoSuchKey, errors.Unavailable, errors.DeadlineExceeded):
                        first.client.get("alone")
                    assert first.client.get("both") == b"both"
                    first.client.put(f"new/{begin}", b"value", replicas=2)
                    assert time.monotonic() - begin < 15
            finally:
                second.process.send_signal(signal.SIGCONT)
            eventually(lambda: all(peer.alive() == 3 for peer in peers))
            assert first.client.get("alone", wait=5) == b"alone"
            second.client.put(f"after {until_dead}", b"after")
            assert third.client.get(f"after {until_dead}", wait=5) == b"after"
        for peer in peers:
            assert "Traceback" not in peer.log.read_text()
