"""Real peers under attack: broken clients, lying peers, and processes that die at the worst moment."""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore import errors
from p2pstore.client.trio_client import Client
from p2pstore.gossip.identity import Identity
from p2pstore.gossip.records import LocationRecord, PeerId, member_of
from p2pstore.keyring import KeyRing
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.objects import Version, chunk_sums, key_digest, root_checksum
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from p2pstore.peer.tickets import TicketOffice
from p2pstore.transfer.data_pool import DataPool
from p2pstore.transfer.messages import (
    ClusterRecords,
    DataKind,
    Holding,
    ListKeys,
    Locations,
    Lookup,
    ObjectReply,
    Objects,
    Ping,
    Push,
    Replicate,
    Snapshot,
)
from p2pstore.transfer.tickets import Scope
from p2pstore.transfer.transport import RemotePeer
from p2pstore.trio_streams import TrioDriver
from p2pstore.wire import Empty, Message
from tests.cluster.test_open_peer import MIB, cluster, config, until

HUGE = 2**64 - 1


async def still_well(*peers: Peer) -> None:
    """Each peer stores, serves, answers within a second, and holds nothing that nobody wants."""
    for number, peer in enumerate(peers):
        key = f"well/{number}/{os.urandom(4).hex()}"
        with trio.fail_after(5):
            assert (await peer.put(key, b"value")).status == "created"
            assert await peer.get(key) == b"value"
        with trio.fail_after(1):
            await peer.statistics()
        core = peer.node.core
        await until(lambda core=core: core.operations_under_way == 0)  # type: ignore[misc]  # bound now
        core.segment.check()


def request(client: Client, kind: LocalKind, message: Message, reply: type[Any]) -> Any:
    """Any request over a client's own connection."""
    return client._link.request(kind, message, reply)


async def reserve(client: Client, length: int, count: int = 1) -> list[local.Reservation]:
    items = [local.ReserveItem(length, 4096)] * count
    return (await request(client, LocalKind.RESERVE, local.Reserve(items), local.Reserved)).items


def commit_item(reservation: int, key: str, value: bytes, **fields: Any) -> local.CommitItem:
    sums = chunk_sums(value)
    return local.CommitItem(
        reservation, key, len(value), sums, root_checksum(len(value), sums), **fields
    )


# --- broken clients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"reservation": 2**40},
        {"reservation": -1},
        {"length": -1},
        {"length": HUGE},
        {"root": 0},
        {"root": -1},
        {"sums": b"x"},
        {"sums": bytes(8 * 1000)},
        {"ttl_ms": HUGE},
        {"ttl_ms": -1},
        {"replicas": HUGE},
        {"pin": 3},
        {"shape": (HUGE, -(2**63))},
        {"dtype": "x" * 70_000},
        {"key": ""},
        {"key": "x" * 1025},
    ],
)
async def test_a_commit_of_nonsense_leaves_no_operation(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    async with open_peer(config(tmp_path, "a")) as peer:
        [room] = await reserve(peer, 5)
        fields = {
            name: getattr(commit_item(room.reservation, "k", b"value"), name)
            for name in local.CommitItem.__struct_fields__
        }
        item = local.CommitItem(**{**fields, **change})
        commit = local.Commit("default", [item, item])
        try:
            reply = await request(peer, LocalKind.COMMIT, commit, local.Committed)
        except (errors.P2PStoreError, ValueError):
            pass
        else:
            assert len(reply.items) == 2
        assert peer.node.core.operations_under_way == 0
        await still_well(peer)


@asynccontextmanager
async def open_second_client(peer: Peer) -> AsyncIterator[Client]:
    import p2pstore

    async with p2pstore.connect(peer.socket) as client:
        yield client


async def test_a_client_goes_while_its_puts_are_compared_elsewhere(tmp_path: Path) -> None:
    """The peer asks another for the slot of a key; meanwhile the reservations end."""
    async with cluster(tmp_path, 2) as (a, b):
        for number in range(8):
            await a.put(f"k{number}", b"value")
        await until(lambda: all(b.contains_nowait(f"k{n}") for n in range(8)))
        request_of = b.node.pool.request

        async def slow_request(*arguments: Any) -> Message:
            await trio.sleep(0.2)
            return await request_of(*arguments)

        b.node.pool.request = slow_request  # type: ignore[method-assign, assignment]
        for way in ("close", "abort"):
            async with open_second_client(b) as client:
                rooms = await reserve(client, 5, 8)
                items = [
                    commit_item(room.reservation, f"k{n}", b"value") for n, room in enumerate(rooms)
                ]
                async with trio.open_nursery() as nursery:

                    async def put() -> None:
                        try:
                            await request(
                                client,
                                LocalKind.COMMIT,
                                local.Commit("default", items),
                                local.Committed,
                            )
                        except (errors.P2PStoreError, ValueError):
                            pass

                    nursery.start_soon(put)
                    await until(lambda: b.node.core.operations_under_way > 0, 2)
                    if way == "abort":
                        await request(
                            client,
                            LocalKind.ABORT,
                            local.Abort([room.reservation for room in rooms]),
                            Empty,
                        )
                    else:
                        nursery.cancel_scope.cancel()
        await still_well(a, b)


# --- lying peers -----------------------------------------------------------------------------


@asynccontextmanager
async def stranger(scope: Scope = Scope.READ | Scope.PEER) -> AsyncIterator[Callable[..., Any]]:
    """Requests from somebody with a valid ticket who is no member."""
    identity = Identity(os.urandom(32))
    office = TicketOffice(identity, KeyRing())
    pool = DataPool(TrioDriver(), lambda peer: office.ticket(peer.peer_id, scope))

    async def ask(peer: Peer, kind: DataKind, message: Message) -> Message:
        remote = RemotePeer(peer.node.core.peer_id, tuple(peer.data))
        return await pool.request(remote, kind, message)

    try:
        yield ask
    finally:
        pool.close()


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


async def test_nonsense_with_a_valid_ticket(tmp_path: Path) -> None:
    async with open_peer(config(tmp_path, "a")) as peer, stranger() as ask:
        for kind, message in NONSENSE:
            try:
                await ask(peer, kind, message)
            except (errors.P2PStoreError, ValueError):
                continue
        await peer.remove("k")
        await still_well(peer)


async def test_a_read_ticket_does_not_open_what_is_for_peers(tmp_path: Path) -> None:
    async with open_peer(config(tmp_path, "a")) as peer, stranger(Scope.READ) as ask:
        await ask(peer, DataKind.PING, Ping())
        for kind, message in NONSENSE:
            if kind not in (DataKind.LOOKUP, DataKind.LIST):
                with pytest.raises(errors.AuthenticationFailed):
                    await ask(peer, kind, message)
        await still_well(peer)


async def test_a_clock_from_the_far_future_is_not_taken_over(tmp_path: Path) -> None:
    """Not from a location that was pushed here: the peer could write nothing any more."""
    async with cluster(tmp_path, 2) as (a, b):
        member = member_of(b.node.core.peer_id)
        far = location(DIGEST, HUGE, 1)
        incarnation = b.node.core.incarnation

        async with stranger() as ask:
            try:
                await ask(a, DataKind.PUSH, Push(incarnation, [10_000], far))
            except errors.P2PStoreError:
                pass
        b.node.core.serve = lambda sender, kind, request, now: (  # type: ignore[method-assign]
            Locations([[Holding(member, incarnation, 10_000, far)]])
            if isinstance(request, Lookup)
            else Empty()
        )
        with trio.fail_after(10):
            await a.locate("k")
            await a.remove("k")
        assert a.node.core.clock.latest < HUGE // 2
        await still_well(a)


@pytest.mark.parametrize(
    "lie",
    [
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
    ],
)
async def test_a_peer_that_answers_nonsense(tmp_path: Path, lie: Message | Exception) -> None:
    async with cluster(tmp_path, 3) as (a, b, c):
        await c.put("k", b"value")
        await until(lambda: a.contains_nowait("k"))

        def serve(*_: object) -> Message:
            if isinstance(lie, Exception):
                raise lie
            return lie

        c.node.core.serve = b.node.core.serve = serve  # type: ignore[method-assign]
        with trio.fail_after(20):
            await a.put("other", b"value", replicas=3)
            for key in ("none", "k"):
                try:
                    await a.get(key)
                except (errors.NoSuchKey, errors.Unavailable):
                    continue
            await a.locate("nothing")
            await a.list_keys("")
            await a.remove("k")
        b.node.core.serve = type(b.node.core).serve.__get__(b.node.core)  # type: ignore[method-assign]
        await still_well(a)


@pytest.mark.parametrize(
    "address", ["", "x", "host:99999", "a..b:1", "\0:1", "x" * 300 + ":1", "1.2.3.4:²", "[::1:5", ":"]
)
async def test_addresses_that_are_none(tmp_path: Path, address: str) -> None:
    """They come with another peer's record; a copy elsewhere is still read."""
    async with cluster(tmp_path, 3, transport="tcp") as (a, b, c):
        describe = b.node.core.gossip._describe

        def lie() -> Any:
            import msgspec

            return msgspec.structs.replace(
                describe(), data=[address], control=[address], socket="\0" + address
            )

        await c.put("k", os.urandom(5000), replicas=2)
        b.node.core.gossip._describe = lie
        b.node.core.gossip.offer_changed()
        record = a.node._record_of
        await until(lambda: [address] == record(b.node.core.peer_id).data)  # type: ignore[union-attr]
        with trio.fail_after(20):
            await b.put("there", b"value")
            await a.put("new", b"value", replicas=3)
            assert len(await a.get("k", wait=5)) == 5000
            await a.list_keys("")
            await a.locate("nothing")
            with pytest.raises(errors.Unavailable):
                await until(lambda: a.contains_nowait("there"))
                await a.get("there")
            await a.remove("there")
        await still_well(a, c)
