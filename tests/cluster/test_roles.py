"""A reader's key: its holder reads everything, and changes nothing, whatever it says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from p2pstore import errors
from p2pstore.gossip.links.host import ControlHost, open_control_host
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.link import LinkError
from p2pstore.gossip.messages import (
    Claim,
    ControlKind,
    Delta,
    Exchange,
    Leave,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.records import (
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    LogHead,
    PeerRecord,
    format_peer_id,
    sign_cluster_record,
    sign_peer_record,
    writer_of,
)
from p2pstore.keyring import KeyRing, new_cluster_key, parse_cluster_keys, reader_keys
from p2pstore.objects import clock_from_unix_seconds, namespace_digest
from p2pstore.peer.api import Peer, open_peer
from p2pstore.transfer.messages import READER_KINDS, REQUESTS, ClusterRecords, DataKind
from p2pstore.transfer.tickets import Scope, issue_ticket
from p2pstore.wire import Code, Empty, Message
from tests.cluster.test_cli import Machine, done, failed, machine
from tests.cluster.test_open_peer import cluster, config, until
from tests.cluster.test_strangers import open_data

__all__ = ["machine"]

SECONDS = 20.0


def write_key(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def keys(folder: Path) -> tuple[str, str]:
    """Key files of the members and of the readers."""
    member = new_cluster_key()
    ring = parse_cluster_keys(member, "member")
    text = reader_keys(ring, lambda seed: format_peer_id(Identity(seed).peer_id))
    return write_key(folder / "cluster.key", member + "\n"), write_key(folder / "reader.key", text)


def ring_in(path: str) -> KeyRing:
    return parse_cluster_keys(Path(path).read_text(), path)


async def no_requests(*_: object) -> Message:
    raise errors.Unavailable("there is nothing here")


@asynccontextmanager
async def hostile_reader(key_file: str, identity: Identity) -> AsyncIterator[ControlHost]:
    """A host that speaks the control protocol with a reader's key, and says what it likes."""
    async with open_control_host(
        identity=identity,
        listen=("127.0.0.1", 0),
        ring=ring_in(key_file),
        cluster="default",
        handler=no_requests,
        on_lost=lambda _: None,
        software="hostile",
    ) as host:
        yield host


async def test_a_reader_finds_and_reads_what_members_put(tmp_path: Path) -> None:
    member, reader = keys(tmp_path)
    async with cluster(tmp_path, 2, cluster_key_file=member) as (a, b):
        await a.put("before", b"1" * 100_000)
        async with open_peer(config(tmp_path, "r", a, cluster_key_file=reader)) as r:
            await until(lambda: len(r.node.core.live_peers()) == 2)
            assert await r.get("before", wait=5) == b"1" * 100_000
            await b.put("after", b"2" * 3_000_000)
            begin = trio.current_time()
            assert await r.get("after", wait=5) == b"2" * 3_000_000
            assert trio.current_time() - begin < 3
            assert await a.remove("before")
            with trio.fail_after(SECONDS):
                while await r.contains("before"):
                    await trio.sleep(0.01)
            for peer in (a, b):
                assert len(peer.node.core.live_peers()) == 1, "members do not list readers"
        assert await b.get("after") == b"2" * 3_000_000


async def test_a_reader_that_held_a_member_dead_finds_out(tmp_path: Path) -> None:
    """No member hears what a reader holds of it, so none refutes it."""
    member, reader = keys(tmp_path)
    async with (
        cluster(tmp_path, 2, cluster_key_file=member) as (a, b),
        open_peer(config(tmp_path, "r", a, cluster_key_file=reader)) as r,
    ):
        await b.put("k", b"value")
        assert await r.get("k", wait=5) == b"value"
        membership = r.node.core.gossip.membership
        state = membership.get(b.node.core.peer_id)
        assert state is not None
        membership._set(state, Status.DEAD, state.incarnation, r.node.now)
        assert len(r.node.core.live_peers()) == 1
        await until(lambda: len(r.node.core.live_peers()) == 2)
        assert await r.get("k", wait=5) == b"value"
        assert b.node.core.gossip.incarnation == state.incarnation, "it need not refute"


async def test_a_reader_uses_up_no_rumours(tmp_path: Path) -> None:
    """A rumour rides on some messages only: were it told to readers, one who asks a lot would keep it from members."""
    member, reader = keys(tmp_path)
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=member)) as a,
        hostile_reader(reader, Identity(bytes([8]) * 32)) as one,
        hostile_reader(reader, Identity(bytes([9]) * 32)) as other,
    ):
        membership = a.node.core.gossip.membership
        membership._spread(membership.own)
        for number in range(30):
            hostile = (one, other)[
                number % 2
            ]  # a rumour is not told twice in a row to the same peer
            for kind, request in (
                (ControlKind.PING, Ping(0, [])),
                (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [])),
                (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [], members_hash=1)),
            ):
                await hostile.ask(membership.me, [a.control], kind, request, SECONDS)
        assert membership.has_rumors


async def test_a_reader_refuses_to_change_anything(tmp_path: Path) -> None:
    member, reader = keys(tmp_path)
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=member)) as a,
        open_peer(config(tmp_path, "r", a, cluster_key_file=reader)) as r,
    ):
        await a.put("k", b"value")
        assert await r.get("k", wait=5) == b"value"
        for change in (
            lambda: r.put("new", b"x"),
            lambda: r.remove("k"),
            lambda: r.flush(),
            lambda: r.pin("k"),
        ):
            with pytest.raises(errors.AuthenticationFailed, match="reader's key"):
                await change()
        assert await a.get("k") == b"value"


def forged_record(identity: Identity, incarnation: int) -> PeerRecord:
    """A record with which a reader would be a member that holds a thousand objects."""
    return PeerRecord(
        format=1,
        peer_id=identity.peer_id,
        cluster="default",
        name="hostile",
        incarnation=incarnation,
        sequence=1,
        host_id=os.urandom(16),
        control=["127.0.0.1:9"],
        data=["127.0.0.1:9"],
        socket="",
        transports=[],
        segments=[],
        memory_capacity=1 << 40,
        memory_used=0,
        ssd_capacity=0,
        ssd_used=0,
        load_permille=0,
        head=LogHead(1, 1, 1),
        software="x",
        min_protocol=1,
        max_protocol=3,
        checkpoints=[],
    )


def forged_flush(identity: Identity, victim: Peer) -> Delta:
    """A flush of the default namespace, well signed, by the reader."""
    clock = clock_from_unix_seconds(victim.node.core.unix(victim.node.now))
    record = ClusterRecord(
        format=1,
        kind=int(ClusterRecordKind.FLOOR),
        name=namespace_digest("default"),
        clock=clock,
        writer=writer_of(identity.peer_id),
        signer=identity.peer_id,
        scope=SCOPE_NAMESPACE,
    )
    return Delta([], [], [sign_cluster_record(record, identity)], [])


async def test_nothing_that_a_reader_says_by_gossip_is_taken_in(tmp_path: Path) -> None:
    member, reader = keys(tmp_path)
    identity = Identity(bytes([9]) * 32)
    async with (
        cluster(tmp_path, 2, cluster_key_file=member) as (a, b),
        hostile_reader(reader, identity) as hostile,
    ):
        await a.put("k", b"value")
        assert await b.get("k", wait=5) == b"value"
        gossip = a.node.core.gossip
        me, them = gossip.peer_id, b.node.core.peer_id
        incarnations = [gossip.incarnation, b.node.core.gossip.incarnation]
        dead = [
            Claim(each, incarnation, int(Status.DEAD), 1)
            for each, incarnation in zip((me, them), incarnations, strict=True)
        ]
        record = sign_peer_record(forged_record(identity, gossip.incarnation), identity)
        leaving = sign_peer_record(forged_record(identity, gossip.incarnation), identity)

        async def say(kind: ControlKind, message: Message) -> Message:
            return await hostile.ask(me, [a.control], kind, message, SECONDS)

        await say(ControlKind.PING, Ping(incarnations[0] + 1000, dead))
        floors = forged_flush(identity, a)
        exchange = Exchange(b"", 0, b"", dead, unix_ms=1)
        await say(ControlKind.EXCHANGE, exchange)
        for delta in (Delta([record], [], [], dead), floors):
            assert isinstance(await say(ControlKind.DELTA, delta), Empty)
        assert isinstance(await say(ControlKind.LEAVE, Leave(leaving)), Empty)
        with pytest.raises(LinkError) as refused:
            await say(ControlKind.PING_REQUEST, PingRequest(them, 100))
        assert refused.value.code is Code.UNAVAILABLE
        for peer, other, incarnation in zip((a, b), (b, a), incarnations, strict=True):
            assert peer.node.core.gossip.incarnation == incarnation, "nothing to refute came"
            assert peer.node.core.gossip.membership.get(identity.peer_id) is None
            assert peer.node.core.live_peers() == [other.node.core.peer_id]
            assert await peer.get("k") == b"value"
            assert peer.node.core.gossip.cluster_records.floors.horizon == {}


async def test_a_readers_ticket_changes_nothing(tmp_path: Path) -> None:
    """Whatever scope the ticket claims: the reader issues it itself."""
    member, reader = keys(tmp_path)
    identity = Identity(bytes([9]) * 32)
    async with open_peer(config(tmp_path, "a", cluster_key_file=member)) as a:
        await a.put("k", b"value")
        granted = issue_ticket(
            signer=identity,
            ring=ring_in(reader),
            audience=a.node.core.peer_id,
            now_unix=a.node.core.unix(a.node.now),
            ticket_id=os.urandom(16),
            scope=Scope.READ | Scope.PEER | Scope.WRITE,
        )
        connection = await open_data(a, granted)
        try:
            with pytest.raises(errors.AuthenticationFailed, match="with a reader's key"):
                await connection.request(DataKind.CLUSTER_RECORDS, ClusterRecords([], []))
        finally:
            connection.close()
        changing = {
            *(DataKind.PUSH, DataKind.REPLICATE, DataKind.CLUSTER_RECORDS, DataKind.STORE),
            *(DataKind.STORE_PART, DataKind.READS, DataKind.SET_PINS, DataKind.SET_EXPIRY),
            *(DataKind.CHECK_COPY, DataKind.SWARM_LINK, DataKind.PIECE_TAKEN),
        }
        assert not changing & READER_KINDS
        assert set(REQUESTS) >= READER_KINDS


async def test_a_reader_believes_members_only(tmp_path: Path) -> None:
    """All readers hold the readers' key: one of them must not be able to pose as a member to another."""
    member, reader = keys(tmp_path)
    ring = KeyRing(ring_in(reader).keys)  # as a liar would read its own file: as a member's
    async with (
        open_control_host(
            identity=Identity(bytes([9]) * 32),
            listen=("127.0.0.1", 0),
            ring=ring,
            cluster="default",
            handler=no_requests,
            on_lost=lambda _: None,
            software="liar",
        ) as liar,
        hostile_reader(reader, Identity(bytes([8]) * 32)) as honest,
        hostile_reader(member, Identity(bytes([7]) * 32)) as of_member,
    ):
        address = [f"127.0.0.1:{liar.listening[1]}"]
        liars_id = Identity(bytes([9]) * 32).peer_id
        with pytest.raises(LinkError, match="does not prove that it is a member"):
            await honest.ask(liars_id, address, ControlKind.PING, Ping(1, []), SECONDS)
        with pytest.raises(LinkError, match="wrong cluster key"):
            await of_member.ask(liars_id, address, ControlKind.PING, Ping(1, []), SECONDS)


async def test_a_reader_admits_nobody(tmp_path: Path) -> None:
    member, reader = keys(tmp_path)
    async with (
        hostile_reader(reader, Identity(bytes([8]) * 32)) as honest,
        hostile_reader(member, Identity(bytes([7]) * 32)) as of_member,
    ):
        address = [f"127.0.0.1:{honest.listening[1]}"]
        readers_id = Identity(bytes([8]) * 32).peer_id
        with pytest.raises(LinkError, match="is a reader, which admits nobody"):
            await of_member.ask(readers_id, address, ControlKind.PING, Ping(1, []), SECONDS)


def test_keygen_makes_a_readers_file(machine: Machine) -> None:
    member, reader = machine.folder / "cluster.key", machine.folder / "reader.key"
    done(machine.run("keygen", str(member)))
    assert (
        b"readers' machines"
        in done(
            machine.run("keygen", "--role", "reader", "--from", str(member), str(reader))
        ).stderr
    )
    assert member.read_text().strip() not in reader.read_text()
    first = machine.join("first", "--cluster-key-file", str(member))
    second = machine.join(
        "second", "--cluster-key-file", str(reader), "--bootstrap", first.ready["control"]
    )
    assert second.ready["joined"] is True
    value = machine.folder / "value"
    value.write_bytes(b"value")
    done(first.run("put", "k", str(value)))
    assert done(second.run("get", "k", "--wait", "5")).stdout == b"value"
    assert "reader's key" in failed(second.run("put", "x", str(value)), 1)
    assert "an invite cannot carry" in failed(second.run("invite"), 1)
    assert "belong together" in machine.run("keygen", "--role", "reader", "f").stderr.decode()
    said = machine.run(
        "keygen", "--role", "reader", "--from", str(reader), str(machine.folder / "f")
    )
    assert "makes no other keys" in failed(said, 2)
