"""Readers' and writers' keys: a reader changes nothing, a writer its namespaces alone, whatever they say."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from p2pstore import connect, errors
from p2pstore.access.keyring import KeyRing, new_cluster_key, parse_cluster_keys, reader_keys
from p2pstore.gossip.gossip_messages import (
    Claim,
    ControlKind,
    Delta,
    Exchange,
    Leave,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import (
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    SignedRecord,
    format_peer_id,
    sign_cluster_record,
    sign_peer_record,
    writer_of,
)
from p2pstore.objects import clock_from_unix_seconds, namespace_digest
from p2pstore.peer.api import Peer, open_peer
from p2pstore.state.folder import readers_key_file
from p2pstore.transfer.data_messages import READER_KINDS, REQUESTS, DataKind, Ticket
from p2pstore.transfer.peer_messages import ClusterRecords, Flush, Remove, Removed
from p2pstore.transfer.read_tickets import GrantedTicket, Scope, TicketClaims, ticket_secret
from p2pstore.wire import Code, Empty, Message, decode_body, encode_body
from tests.cluster.machines import Machine, done, failed
from tests.cluster.peers import cluster, config, write_private
from tests.cluster.test_control_host import stranger_host
from tests.cluster.test_put_elsewhere import store_request
from tests.cluster.test_strangers import open_data, ticket
from tests.present import present
from tests.waiting import until

SECONDS = 20.0
VALUE = memoryview(b"value")
ANYTHING = Scope.READ | Scope.PEER | Scope.WRITE


def keys(folder: Path) -> tuple[str, str]:
    """Key files of the members and of the readers."""
    member = new_cluster_key()
    ring = parse_cluster_keys(member, "member")
    text = reader_keys(ring, lambda seed: format_peer_id(Identity(seed).peer_id))
    return write_private(folder / "cluster.key", member + "\n"), write_private(
        folder / "reader.key", text
    )


def writer_file(folder: Path, member_file: str, *namespaces: str) -> str:
    """The key file of a writer of these namespaces."""
    return write_private(folder / "writer.key", readers_key_file(member_file, namespaces))


def ring_in(path: str) -> KeyRing:
    return parse_cluster_keys(Path(path).read_text(), path)


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
        stranger_host(8, ring_in(reader)) as one,
        stranger_host(9, ring_in(reader)) as other,
    ):
        membership = a.node.core.gossip.membership
        membership._spread(membership.own)
        for number in range(30):
            hostile = (one, other)[number % 2]  # a rumour is not told twice in a row to the same peer
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


def forged_record(identity: Identity, victim: Peer) -> SignedRecord:
    """A record with which a reader would be a member."""
    own = present(victim.node.core.gossip.membership.own.record)
    return sign_peer_record(replace(own, peer_id=identity.peer_id, name="hostile"), identity)


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
        stranger_host(9, ring_in(reader)) as hostile,
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
        record = forged_record(identity, a)

        async def say(kind: ControlKind, message: Message) -> Message:
            return await hostile.ask(me, [a.control], kind, message, SECONDS)

        await say(ControlKind.PING, Ping(incarnations[0] + 1000, dead))
        floors = forged_flush(identity, a)
        exchange = Exchange(b"", 0, b"", dead, unix_ms=1)
        await say(ControlKind.EXCHANGE, exchange)
        for delta in (Delta([record], [], [], dead), floors):
            assert isinstance(await say(ControlKind.DELTA, delta), Empty)
        assert isinstance(await say(ControlKind.LEAVE, Leave(record)), Empty)
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
        granted = ticket(a, identity, ring_in(reader), ANYTHING)
        with (
            closing(await open_data(a, granted)) as connection,
            pytest.raises(errors.AuthenticationFailed, match="with a reader's key"),
        ):
            await connection.request(DataKind.CLUSTER_RECORDS, ClusterRecords([], []))
        changing = {
            *(DataKind.PUSH, DataKind.REPLICATE, DataKind.CLUSTER_RECORDS, DataKind.STORE),
            *(DataKind.STORE_PART, DataKind.READS, DataKind.SET_PINS, DataKind.SET_EXPIRY),
            *(DataKind.CHECK_COPY, DataKind.SWARM_LINK, DataKind.PIECE_TAKEN),
        }
        assert not changing & READER_KINDS
        assert set(REQUESTS) >= READER_KINDS


async def test_a_reader_believes_members_only_and_admits_nobody(tmp_path: Path) -> None:
    """All readers hold the readers' key: one of them must not be able to pose as a member to another."""
    member, reader = keys(tmp_path)
    async with (  # the liar reads its own file as a member's
        stranger_host(9, KeyRing(ring_in(reader).keys)) as liar,
        stranger_host(8, ring_in(reader)) as honest,
        stranger_host(7, ring_in(member)) as of_member,
    ):
        address = [f"127.0.0.1:{liar.listening[1]}"]
        liars_id = Identity(bytes([9]) * 32).peer_id
        with pytest.raises(LinkError, match="does not prove that it is a member"):
            await honest.ask(liars_id, address, ControlKind.PING, Ping(1, []), SECONDS)
        with pytest.raises(LinkError, match="wrong cluster key"):
            await of_member.ask(liars_id, address, ControlKind.PING, Ping(1, []), SECONDS)
        address = [f"127.0.0.1:{honest.listening[1]}"]
        with pytest.raises(LinkError, match="is a reader, which admits nobody"):
            readers_id = honest.settings.identity.peer_id
            await of_member.ask(readers_id, address, ControlKind.PING, Ping(1, []), SECONDS)


async def test_a_writer_puts_removes_and_flushes_in_its_namespaces(tmp_path: Path) -> None:
    member, _ = keys(tmp_path)
    writer = writer_file(tmp_path, member, "mine", "also mine")
    async with cluster(tmp_path, 2, cluster_key_file=member) as (a, b):
        await a.put("theirs", b"value")
        async with (
            open_peer(config(tmp_path, "w", a, cluster_key_file=writer), namespace="mine") as w,
            connect(a.socket, namespace="mine") as mine,
        ):
            await until(lambda: len(w.node.core.live_peers()) == 2)
            big = os.urandom(3_000_000)
            put = await w.put("k", big, replicas=2, ttl=60)
            assert (put.status, put.copies) == ("created", 2)
            assert {each.peer for each in await w.locate("k")} <= {"p0", "p1"}
            assert await w.get("k") == await mine.get("k", wait=5) == big
            assert (await w.put("k", b"other")).status == "kept_existing"
            assert (await w.put("k", b"other", on_conflict="overwrite")).status == "created"
            results = await w.put_many([(f"many{number}", b"%d" % number) for number in range(9)])
            assert all(each.error is None for each in results)
            removed = await w.remove_many(["k", "many0", "absent"])
            assert [each.value for each in removed] == [True, True, False]
            assert not await mine.contains("k")
            await w.flush()
            assert not (await mine.list_keys()).keys
            for peer in (a, b):
                assert len(peer.node.core.live_peers()) == 1, "members do not list writers"
        assert await a.get("theirs") == b"value"


async def test_what_a_writer_may_not_its_peer_says(tmp_path: Path) -> None:
    member, _ = keys(tmp_path)
    writer = writer_file(tmp_path, member, "mine")
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=member)) as a,
        open_peer(config(tmp_path, "w", a, cluster_key_file=writer), namespace="mine") as w,
        connect(w.socket) as default,
    ):
        await a.put("k", b"value")
        assert await default.get("k", wait=5) == b"value", "it reads everything"
        for change in (
            lambda: default.put("new", b"x"),
            lambda: default.remove("k"),
            lambda: default.flush(),
        ):
            with pytest.raises(errors.AuthenticationFailed, match="'mine' only, not in namespace"):
                await change()
        result = (await default.put_many([("new", b"x")]))[0]
        assert isinstance(result.error, errors.AuthenticationFailed)
        for refused in (lambda: w.put("k", b"x", pin="hard"), lambda: w.pin("k")):
            with pytest.raises(errors.AuthenticationFailed, match=r"writer's key: .* but not pin"):
                await refused()
        peer = (await w.statistics())["peer"]
        assert peer["role"] == "writer of 'mine'"
        assert await a.get("k") == b"value"
        assert len((await a.list_keys()).keys) == 1


async def test_a_writer_whose_namespaces_change_needs_no_restart(tmp_path: Path) -> None:
    member, _ = keys(tmp_path)
    writer = writer_file(tmp_path, member, "one")
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=member)) as a,
        open_peer(config(tmp_path, "w", a, cluster_key_file=writer), namespace="two") as w,
    ):
        await until(lambda: len(w.node.core.live_peers()) == 1)
        with pytest.raises(errors.AuthenticationFailed):
            await w.put("k", b"value")
        write_private(Path(writer), readers_key_file(member, ["two"]))
        assert await w.node.credentials.reload()
        assert (await w.put("k", b"value")).status == "created"
        write_private(Path(writer), new_cluster_key())
        with pytest.raises(errors.ConfigError, match="another role"):
            await w.node.credentials.reload()


async def test_a_writers_order_goes_to_another_member_when_one_fails(tmp_path: Path) -> None:
    member, _ = keys(tmp_path)
    writer = writer_file(tmp_path, member, "mine")
    async with (
        cluster(tmp_path, 2, cluster_key_file=member) as (a, b),
        open_peer(config(tmp_path, "w", a, cluster_key_file=writer), namespace="mine") as w,
    ):
        await until(lambda: len(w.node.core.live_peers()) == 2)
        await w.put("k", b"value", replicas=2)
        b.node.core.closing = True  # it answers that it is leaving
        try:
            for _ in range(5):
                await w.remove("k")
                assert not a.node.core.segment.object_count
            a.node.core.closing = True
            with pytest.raises(errors.Unavailable, match=r"no member did it .*leaving.*leaving"):
                await w.remove("k")
        finally:
            a.node.core.closing = b.node.core.closing = False


async def test_a_writers_ticket_changes_its_namespace_alone(tmp_path: Path) -> None:
    """Hand-made requests, of all kinds, by a holder of a writer's key, with any scope that it claims."""
    member, _ = keys(tmp_path)
    ring = ring_in(writer_file(tmp_path, member, "mine"))
    identity = Identity(bytes([9]) * 32)
    async with open_peer(config(tmp_path, "a", cluster_key_file=member)) as a:
        await a.put("k", b"value")

        def issued(namespace: str) -> GrantedTicket:
            return ticket(a, identity, ring, ANYTHING, namespace=namespace)

        with closing(await open_data(a, issued("mine"))) as connection:
            stored = await connection.store(store_request(b"value", namespace="mine"), VALUE)
            assert stored.copies == 1
            for kind, request in (
                (DataKind.STORE, store_request(b"other", overwrite=True)),
                (DataKind.REMOVE, Remove("default", ["k"])),
                (DataKind.FLUSH, Flush("default")),
            ):
                with pytest.raises(errors.AuthenticationFailed, match="in namespace 'mine'"):
                    await connection.request(kind, request)
            with pytest.raises(errors.AuthenticationFailed, match="no pins"):
                pinned = store_request(b"x", namespace="mine", pin=1)
                await connection.request(DataKind.STORE, pinned)
            with pytest.raises(errors.AuthenticationFailed, match="with a writer's key"):
                await connection.request(DataKind.CLUSTER_RECORDS, ClusterRecords([], []))
            with pytest.raises(ValueError, match="a key"):
                await connection.request(DataKind.REMOVE, Remove("mine", [""]))
            removed = await connection.request(DataKind.REMOVE, Remove("mine", ["k"]))
            assert removed == Removed([True])
        for namespace in ("default", ""):  # no key for it: the ticket is a reader's
            with (
                closing(await open_data(a, issued(namespace))) as connection,
                pytest.raises(errors.AuthenticationFailed, match="with a reader's key"),
            ):
                await connection.request(DataKind.FLUSH, Flush("default"))
        forged = decode_body(TicketClaims, issued("mine").ticket.claims)
        claims = encode_body(replace(forged, namespace="default"))
        signature = identity.sign(b"p2pstore ticket claims 1\0" + claims)
        for secret in (issued("mine").secret, ticket_secret(ring.writers["mine"], claims)):
            with pytest.raises(errors.AuthenticationFailed, match="does not hold"):
                await open_data(a, GrantedTicket(Ticket(claims, signature), secret))
        assert await a.get("k") == b"value"


async def test_a_writer_is_a_reader_to_gossip(tmp_path: Path) -> None:
    """Its file has the readers' key: what it says by gossip is not taken in, and it proves no membership."""
    member, _ = keys(tmp_path)
    writer = writer_file(tmp_path, member, "mine")
    identity = Identity(bytes([9]) * 32)
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=member)) as a,
        stranger_host(9, ring_in(writer)) as hostile,
    ):
        await a.put("k", b"value")
        me = a.node.core.gossip.peer_id
        await hostile.ask(me, [a.control], ControlKind.DELTA, forged_flush(identity, a), SECONDS)
        assert await a.get("k") == b"value"
        assert not a.node.core.gossip.membership.get(identity.peer_id)


def test_keygen_makes_a_writers_file(machine: Machine) -> None:
    member, writer = machine.folder / "cluster.key", machine.folder / "writer.key"
    done(machine.run("keygen", str(member)))
    order = ("keygen", "--role", "writer", "--from", str(member))
    said = done(machine.run(*order, "--namespace", "a b", "--namespace", "#c", str(writer))).stderr
    assert b"the writers' machines" in said
    first = machine.join("first", "--cluster-key-file", str(member))
    second = machine.join(
        "second", "--cluster-key-file", str(writer), "--bootstrap", first.ready["control"]
    )
    value = machine.folder / "value"
    value.write_bytes(b"value")
    for namespace in ("a b", "#c"):
        done(second.run("put", "--namespace", namespace, "k", str(value)))
        got = done(first.run("get", "--namespace", namespace, "k", "--wait", "5"))
        assert got.stdout == b"value"
    assert "not in namespace 'default'" in failed(second.run("put", "k", str(value)), 1)
    assert b"writer of 'a b', '#c'" in done(second.run("stats")).stdout
    done(second.run("rm", "--namespace", "a b", "k"))
    done(second.run("flush", "#c", "--yes"))
    assert not done(first.run("ls", "--namespace", "#c")).stdout
    spare = str(machine.folder / "f")
    assert "belong together" in failed(machine.run(*order, spare), 2)
    assert "1 to 255 bytes" in failed(machine.run(*order, "--namespace", "", spare), 2)
    assert "no key of members" in failed(machine.run("keygen", "--add", str(writer)), 2)


def test_keygen_makes_a_readers_file(machine: Machine) -> None:
    member, reader = machine.folder / "cluster.key", machine.folder / "reader.key"
    done(machine.run("keygen", str(member)))
    assert (
        b"readers' machines"
        in done(machine.run("keygen", "--role", "reader", "--from", str(member), str(reader))).stderr
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
    assert "an invite cannot carry it" in failed(second.run("invite"), 1)
    assert "belong together" in machine.run("keygen", "--role", "reader", "f").stderr.decode()
    said = machine.run("keygen", "--role", "reader", "--from", str(reader), str(machine.folder / "f"))
    assert "makes no other keys" in failed(said, 2)
