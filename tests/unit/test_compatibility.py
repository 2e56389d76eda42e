"""Versions that meet: what a newer one appends, what an older one lacks, and what neither may break.

"Newer" is made by appending fields to every message, nested ones too; "older" by cutting off the
fields that have defaults. Connections are real ones.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import trio
import xxhash

from p2pstore import wire
from p2pstore.access.keyring import KeyRing
from p2pstore.checkpoint import checkpoint_messages
from p2pstore.errors import ConfigError, P2PStoreError, ProtocolError, ProtocolMismatch
from p2pstore.gossip import gossip_messages as control
from p2pstore.gossip.floors.cluster_records import ClusterRecords, TheirRecords
from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Status
from p2pstore.gossip.links.admission import AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.members.member_table import MembershipConfig
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    MAX_RECORD_BYTES,
    ClusterRecord,
    NewerFormat,
    SignedRecord,
    Tier,
    decode_location,
    member_of,
    open_cluster_record,
    open_peer_record,
    read_cluster_record,
    read_peer_record,
)
from p2pstore.home_messages import Push
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    Pin,
    TrailerBody,
    decode_trailer,
    encode_trailer,
    plan_geometry,
)
from p2pstore.objects import chunk_sums
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.state.state_directory import StateDirectory
from p2pstore.transfer import data_messages as data
from p2pstore.transfer import peer_messages
from p2pstore.transfer.read_tickets import Scope, TicketClaims, issue_ticket, open_ticket, ticket_secret
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving import data_server as data_server_module
from p2pstore.wire import (
    ERROR,
    HEADER,
    HEADER_BYTES,
    ONE_WAY,
    PREFACE_DATA,
    PREFACE_LOCAL,
    REPLY,
    Code,
    Empty,
    Failure,
    Message,
    decode_body,
    encode_body,
    encode_frame,
)
from tests.contract.small_peer import small_peer
from tests.contract.test_link import Answerer, control_hosts
from tests.contract.test_transport import (
    TcpHarness,
    authenticated,
    connect,
    grant,
    read_frame,
    segment_of,
)
from tests.present import present
from tests.stored import stored
from tests.unit.core_harness import Harness, remote_object
from tests.unit.digest_rows import digest_from
from tests.unit.gossip_network import Network, peer_record

FROM_THE_FUTURE: list[Any] = ["new", {"and": [1, b"2"]}, None]
UNKNOWN_KIND = 999
UNKNOWN_FLAGS = 0x8000 | 0x10


def all_messages(base: type[Message] = Message) -> Iterator[type[Message]]:
    for each in base.__subclasses__():
        if each.__module__.startswith("p2pstore.") and not each.__name__.startswith("_"):
            yield each
        yield from all_messages(each)


MESSAGES = sorted(all_messages(), key=lambda each: (each.__module__, each.__name__))
every_message = pytest.mark.parametrize(
    "message_type", MESSAGES, ids=lambda each: f"{each.__module__.split('.', 1)[1]}.{each.__name__}"
)


def sample(hint: Any) -> Any:
    """A value of an annotated field that is not its default."""
    if get_origin(hint) is list:
        return [sample(get_args(hint)[0])] * 2
    if get_origin(hint) is tuple:
        return tuple(sample(each) for each in get_args(hint) if each is not ...)
    if isinstance(hint, type) and issubclass(hint, Message):
        fields = get_type_hints(hint)
        return hint(**{name: sample(fields[name]) for name in hint.__struct_fields__})
    if get_origin(hint) in (Union, UnionType):
        return sample(get_args(hint)[0])
    return {int: 5, float: 2.5, bool: True, str: "text", bytes: b"a digest's bytes"}[hint]


def newer(value: Any) -> Any:
    """The value as a newer version would encode it: every message, nested ones too, is longer."""
    if isinstance(value, Message):
        fields = [newer(getattr(value, name)) for name in value.__struct_fields__]
        return fields + FROM_THE_FUTURE
    return [newer(each) for each in value] if isinstance(value, list | tuple) else value


def older(value: Any) -> Any:
    """The value as an older version would encode it: nothing that has a default."""
    if isinstance(value, Message):
        required = len(value.__struct_fields__) - len(value.__struct_defaults__)
        return [older(getattr(value, name)) for name in value.__struct_fields__[:required]]
    return [older(each) for each in value] if isinstance(value, list | tuple) else value


def without_optional(value: Any) -> Any:
    """The message that `older` should be read as."""
    if isinstance(value, Message):
        required = len(value.__struct_fields__) - len(value.__struct_defaults__)
        fields = value.__struct_fields__[:required]
        return type(value)(*[without_optional(getattr(value, name)) for name in fields])
    return type(value)(map(without_optional, value)) if isinstance(value, list | tuple) else value


# --- messages and records ----------------------------------------------------------------------


def test_no_message_is_forgotten() -> None:
    for module in (control, data, local_protocol, checkpoint_messages):
        assert set(module.REQUESTS.values()) | set(module.REPLIES.values()) <= set(MESSAGES)
    assert {SignedRecord, ClusterRecord, TicketClaims, TrailerBody, Failure} <= set(MESSAGES)


@every_message
def test_what_a_newer_version_appends_is_ignored(message_type: type[Message]) -> None:
    message = sample(message_type)
    assert decode_body(message_type, msgspec.msgpack.encode(newer(message))) == message


@every_message
def test_what_an_older_version_lacks_has_its_default(message_type: type[Message]) -> None:
    message = sample(message_type)
    body = msgspec.msgpack.encode(older(message))
    assert decode_body(message_type, body) == without_optional(message)


def test_values_that_a_newer_version_made_up() -> None:
    packed = bytearray(LOCATION_BYTES)
    packed[-1] = 3
    assert decode_location(bytes(packed)).tier is Tier.DRAM
    assert type(wire.error_of(60_000, "text")) is P2PStoreError
    ids = [Identity(bytes([number]) * 32).peer_id for number in range(2)]
    members = Membership(ids[0], 1, MembershipConfig())
    members.observe_claims([Claim(ids[1], 1, Status.DEAD, 0), Claim(ids[1], 9, 17, 0)], 0.0)
    members.observe_claims([Claim(ids[0], 9, 17, 0)], 0.0)
    state = present(members.get(ids[1]))
    assert (state.status, state.incarnation, members.own.incarnation) == (Status.DEAD, 1, 1)


def test_an_object_with_a_newer_pin_and_newer_fields_can_be_kept() -> None:
    value, sums = b"value", chunk_sums(b"value")
    trailer = TrailerBody("default", "k", sums, pin=9)
    body = msgspec.msgpack.encode(newer(trailer))
    prefix = struct.pack("<HHIQ", 1, 0, len(body), xxhash.xxh3_64_intdigest(body))
    assert decode_trailer(prefix + body) == trailer
    geometry = plan_geometry(64 * 1024)
    segment = Segment(
        memoryview(bytearray(geometry.total_bytes)),
        segment_id=bytes(16),
        incarnation=1,
        geometry=geometry,
    )
    entry = stored(segment, trailer, value)
    assert entry.pin is Pin.HARD


def test_a_copy_from_an_older_holder_fits_though_its_trailer_grows() -> None:
    """The trailer is written anew, with the fields that the older version did not have."""
    world = Harness(others=1)
    for length, letters in product(range(4000, 4096, 8), range(1, 9)):  # to the end of a granule
        remote = remote_object("k" * letters, bytes(length))
        grows_by = len(encode_body(remote.trailer)) - len(msgspec.msgpack.encode(older(remote.trailer)))
        slot = msgspec.structs.replace(remote.slot, trailer_length=remote.slot.trailer_length - grows_by)
        operation = world.core.operations.fetch(slot.digest, world.now)
        destination = world.core.operations.copy_destination(operation.number, world.now)
        destination.prepare(slot, remote.trailer)[:] = bytes(length)
        entry = present(destination.commit(world.now))
        world.segment.remove(entry.digest)
        world.core.operations.cancel(operation, world.now)


# --- caps ----------------------------------------------------------------------------------------

NOTHING = Delta([], [], [], [])
SIGNED = SignedRecord(b"", b"")


@pytest.mark.parametrize(
    "message",
    [
        control.Ping(1, [Claim(b"", 1, 0, 1)] * 1025),
        control.Ack(1, [Claim(b"", 1, 0, 1)] * 1025),
        control.Exchange(b"", 0, b"", [Claim(b"", 1, 0, 1)] * 1025),
        msgspec.structs.replace(NOTHING, records=[SIGNED] * 1025),
        msgspec.structs.replace(NOTHING, cluster_records=[SIGNED] * 1025),
        msgspec.structs.replace(NOTHING, logs=[control.LogChunk(1, 1, 1, b"")] * 16_385),
        data.Get([data.GetItem(b"")] * 1025),
        Push(1, [1] * 32_769, b""),
        peer_messages.ClusterRecords([b""] * 257, []),
        peer_messages.ClusterRecords([], [b""] * 257),
    ],
    ids=lambda message: type(message).__name__,
)
def test_lists_have_caps(message: Message) -> None:
    with pytest.raises(ProtocolError, match="length"):
        decode_body(type(message), encode_body(message))


@pytest.mark.parametrize("read", [read_peer_record, read_cluster_record])
def test_long_records_are_refused_before_they_are_read(read: Any) -> None:
    with pytest.raises(ProtocolError, match="record of 16,385 bytes"):
        read(SignedRecord(bytes(MAX_RECORD_BYTES + 1), b""))


def test_frames_and_trailers_have_caps() -> None:
    for limits in (
        wire.HELLO_LIMITS,
        wire.CONTROL_LIMITS,
        wire.LOCAL_LIMITS,
        wire.DATA_REQUEST_LIMITS,
        wire.DATA_REPLY_LIMITS,
    ):
        wire.decode_header(HEADER.pack(1, 0, 1, limits.body_bytes, limits.bulk_bytes), limits)
        for body, bulk in ((limits.body_bytes + 1, 0), (0, limits.bulk_bytes + 1)):
            with pytest.raises(ProtocolError, match="are allowed"):
                wire.decode_header(HEADER.pack(1, 0, 1, body, bulk), limits)
    with pytest.raises(ValueError, match="at most 65,535"):
        encode_trailer(TrailerBody("n", "k", bytes(70_000)))


# --- signatures ----------------------------------------------------------------------------------


def signed_by_a_newer_version(identity: Identity, record: Message, context: bytes) -> SignedRecord:
    body = msgspec.msgpack.encode(newer(record))
    return SignedRecord(body, identity.sign(context + body))


PEER_CONTEXT, CLUSTER_CONTEXT = b"p2pstore peer record 1\0", b"p2pstore cluster record 1\0"


def test_an_older_peer_passes_newer_records_on_as_they_are() -> None:
    network = Network(1)
    nodes = network.start_all(3)
    assert network.run(20, network.converged)
    now, relay, third = network.now, nodes[1].gossip, nodes[2].gossip
    for node in (relay, third):
        node.checks.verifier = Ed25519Verifier()
        node.membership._met = 100  # in a large cluster, where a relay's word is enough
    identity = Identity(b"n" * 32)
    record = peer_record(9, peer_id=identity.peer_id, incarnation=5)
    peer = signed_by_a_newer_version(identity, record, PEER_CONTEXT)
    unknown = ClusterRecord(1, 77, b"name", 5, 6, identity.peer_id, 3, b"what it says")
    cluster = signed_by_a_newer_version(identity, unknown, CLUSTER_CONTEXT)
    relay.serve(nodes[0].peer_id, ControlKind.DELTA, Delta([peer], [], [cluster], []), now)
    passed_on = relay.knowledge.delta_for(
        digest_from([]), 1 << 20, TheirRecords([0] * control.CLUSTER_BUCKETS)
    )
    assert peer in passed_on.records
    assert passed_on.cluster_records == [cluster]
    own = Delta([peer], [], passed_on.cluster_records, [])
    third.serve(nodes[1].peer_id, ControlKind.DELTA, own, now)
    assert third.membership.get(identity.peer_id) is not None
    assert third.cluster_records.get(77, 3, b"name") == unknown
    assert third.cluster_records.hash == relay.cluster_records.hash


def test_records_of_a_newer_format_are_left_alone() -> None:
    network = Network(2)
    nodes = network.start_all(2)
    assert network.run(20, network.converged)
    identity = Identity(b"n" * 32)
    body = msgspec.msgpack.encode([2, {"nothing": "as before"}])
    peer = SignedRecord(body, identity.sign(PEER_CONTEXT + body))
    cluster = SignedRecord(body, identity.sign(CLUSTER_CONTEXT + body))
    with pytest.raises(NewerFormat, match="format 2; this version knows up to 1"):
        open_peer_record(peer, Ed25519Verifier())
    with pytest.raises(NewerFormat):
        open_cluster_record(cluster, Ed25519Verifier())
    delta = Delta([peer], [], [cluster], [])
    reply, _ = nodes[0].gossip.serve(nodes[1].peer_id, ControlKind.DELTA, delta, network.now)
    assert reply == Empty()
    assert len(nodes[0].gossip.cluster_records) == 0


def test_cluster_records_come_back_from_the_disk_as_they_were_signed(tmp_path: Path) -> None:
    identity = Identity(b"n" * 32)
    record = ClusterRecord(1, 1, b"name", 5, 6, identity.peer_id)
    signed = signed_by_a_newer_version(identity, record, CLUSTER_CONTEXT)
    with StateDirectory.open(tmp_path) as state:
        state.floors.append([signed])
        state.floors.replace(state.floors.load())
        (loaded,) = state.floors.load()
    assert open_cluster_record(loaded, Ed25519Verifier()) == record
    kept = ClusterRecords()
    kept.load([(record, loaded)])
    assert kept.dump() == [signed]


def test_a_ticket_with_newer_claims_is_good() -> None:
    signer, audience = Identity(b"i" * 32), Identity(b"a" * 32).peer_id
    ring = KeyRing([b"k" * 32])
    granted = issue_ticket(
        signer=signer,
        ring=ring,
        audience=audience,
        now_unix=1000.0,
        ticket_id=bytes(16),
        scope=Scope.READ,
    )
    claims = decode_body(TicketClaims, granted.ticket.claims)
    claims = msgspec.structs.replace(claims, scope=claims.scope | 64)
    packed = msgspec.msgpack.encode(newer(claims))
    ticket = data.Ticket(packed, signer.sign(b"p2pstore ticket claims 1\0" + packed))
    opened, secret = open_ticket(
        ticket, audience=audience, ring=ring, verifier=Ed25519Verifier(), now_unix=1001.0
    )
    assert opened == claims
    assert opened.scope & Scope.READ
    assert not opened.scope & Scope.PEER
    assert secret == ticket_secret(ring.keys[0], packed)


# --- unknown kinds and flags over real connections -----------------------------------------------


@contextlib.asynccontextmanager
async def data_server() -> AsyncIterator[TcpHarness]:
    with trio.fail_after(20):
        async with TcpHarness.open(segment_of(1 << 20)) as harness:
            yield harness


async def test_data_connections_answer_unknown_kinds() -> None:
    async with data_server() as harness:
        stream = await authenticated(harness.address)
        await stream.send(
            encode_frame(UNKNOWN_KIND, 1, Empty(), flags=ONE_WAY)
            + encode_frame(UNKNOWN_KIND, 2, Failure(1, "any body"))
            + encode_frame(data.DataKind.PING, 3, data.Ping(), flags=UNKNOWN_FLAGS)
        )
        kind, flags, number, body, _ = await read_frame(stream)
        assert (kind, flags, number) == (UNKNOWN_KIND, REPLY | ERROR, 2)
        assert decode_body(Failure, body).code == Code.UNSUPPORTED
        kind, flags, number, body, _ = await read_frame(stream)
        assert (kind, flags, number) == (data.DataKind.PING, REPLY, 3)
        assert decode_body(data.Pong, body) == data.Pong(7, 42)
        stream.close()


async def test_control_streams_answer_unknown_kinds() -> None:
    with trio.fail_after(20):
        async with control_hosts(Answerer()) as pair:
            with pytest.raises(LinkError) as error:
                await pair.ask(UNKNOWN_KIND, Empty())
            assert error.value.code == Code.UNSUPPORTED
            await pair.ping(1)


@contextlib.contextmanager
def local_stream(path: Path) -> Iterator[socket.socket]:
    with small_peer(path), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(os.fspath(path))
        yield sock


def receive_local(sock: socket.socket) -> tuple[int, int, int, bytes]:
    def exactly(length: int) -> bytes:
        received = b""
        while len(received) < length:
            piece, descriptors, _, _ = socket.recv_fds(sock, length - len(received), 4)
            for descriptor in descriptors:
                os.close(descriptor)
            assert piece, "the peer closed the connection"
            received += piece
        return received

    kind, flags, number, body, _ = HEADER.unpack(exactly(HEADER_BYTES))
    return kind, flags, number, exactly(body)


def local_hello(minimum: int = 1, maximum: int = 1) -> bytes:
    hello = local_protocol.Hello(minimum, maximum, "default", local_protocol.Access.READ, os.getpid())
    return PREFACE_LOCAL + encode_frame(local_protocol.LocalKind.HELLO, 0, hello)


def test_the_local_socket_answers_unknown_kinds(tmp_path: Path) -> None:
    with local_stream(tmp_path / "s") as sock:
        sock.sendall(local_hello())
        receive_local(sock)
        contains = local.Contains(bytes(16))
        sock.sendall(
            encode_frame(UNKNOWN_KIND, 1, Empty(), flags=ONE_WAY)
            + encode_frame(UNKNOWN_KIND, 2, Failure(1, "any body"))
            + encode_frame(local_protocol.LocalKind.CONTAINS, 3, contains, flags=UNKNOWN_FLAGS)
        )
        kind, flags, number, body = receive_local(sock)
        assert (kind, flags, number) == (UNKNOWN_KIND, REPLY | ERROR, 2)
        assert decode_body(Failure, body).code == Code.UNSUPPORTED
        kind, flags, number, body = receive_local(sock)
        assert (kind, number) == (local_protocol.LocalKind.CONTAINS, 3)


# --- versions ------------------------------------------------------------------------------------

MEETINGS = [
    # this side, the other side, what they speak
    ((1, 1), (1, 1), 1),
    ((1, 2), (1, 1), 1),
    ((1, 2), (1, 2), 2),
    ((1, 2), (2, 3), 2),
    ((2, 3), (1, 2), 2),
    ((2, 3), (1, 1), None),
    ((1, 1), (2, 3), None),
]
meetings = pytest.mark.parametrize(("own", "theirs", "spoken"), MEETINGS)


def speak(monkeypatch: pytest.MonkeyPatch, versions: tuple[int, int]) -> None:
    monkeypatch.setattr(wire, "LOCAL_MIN_VERSION", versions[0])
    monkeypatch.setattr(wire, "LOCAL_MAX_VERSION", versions[1])
    monkeypatch.setattr(wire, "MIN_CONTROL_VERSION", versions[0])
    monkeypatch.setattr(wire, "MAX_CONTROL_VERSION", versions[1])
    monkeypatch.setattr(data_server_module, "MIN_DATA_VERSION", versions[0])
    monkeypatch.setattr(data_server_module, "MAX_DATA_VERSION", versions[1])


@meetings
async def test_versions_meet_on_data_connections(
    monkeypatch: pytest.MonkeyPatch, own: Any, theirs: Any, spoken: int | None
) -> None:
    speak(monkeypatch, own)
    async with data_server() as harness:
        stream = await connect(harness.address)
        hello = data.Hello(theirs[0], theirs[1], grant().ticket, bytes(32))
        await stream.send(PREFACE_DATA + encode_frame(data.DataKind.HELLO, 0, hello))
        _, flags, _, body, _ = await read_frame(stream)
        assert_met(flags, body, data.HelloReply, spoken, own, theirs)
        stream.close()


@meetings
def test_versions_meet_on_the_local_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: Any, theirs: Any, spoken: int | None
) -> None:
    speak(monkeypatch, own)
    with local_stream(tmp_path / "s") as sock:
        sock.sendall(local_hello(*theirs))
        _, flags, _, body = receive_local(sock)
        assert_met(flags, body, local_protocol.HelloReply, spoken, own, theirs)


@meetings
def test_versions_meet_on_control_streams(
    monkeypatch: pytest.MonkeyPatch, own: Any, theirs: Any, spoken: int | None
) -> None:
    speak(monkeypatch, own)
    opener, listener = sides()
    hello = msgspec.structs.replace(opener.hello(), min_version=theirs[0], max_version=theirs[1])
    if spoken is None:
        with pytest.raises(AdmissionRefused, match=versions_in(own, theirs)) as refusal:
            listener.receive_hello(hello)
        assert refusal.value.code == Code.PROTOCOL_MISMATCH
        return
    reply = listener.receive_hello(hello)
    assert reply.version == listener.version == spoken
    speak(monkeypatch, theirs)
    listener.receive_proof(opener.receive_reply(reply))
    assert opener.version == spoken


def assert_met(
    flags: int, body: bytes, reply: type[Any], spoken: int | None, own: Any, theirs: Any
) -> None:
    if spoken is not None:
        assert decode_body(reply, body).version == spoken
        return
    assert flags & ERROR
    failure = decode_body(Failure, body)
    assert failure.code == Code.PROTOCOL_MISMATCH
    assert versions_in(own, theirs) in failure.text


def versions_in(own: tuple[int, int], theirs: tuple[int, int]) -> str:
    return f"versions {own[0]} to {own[1]}, the other side {theirs[0]} to {theirs[1]}"


def sides() -> tuple[Opener, Listener]:
    first, second = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
    common: dict[str, Any] = {"ring": KeyRing(), "cluster": "c", "software": ""}
    return (
        Opener(own_id=first, peer_id=second, nonce=bytes(32), **common),
        Listener(own_id=second, peer_id=first, nonce=b"n" * 32, **common),
    )


def test_a_version_that_was_not_offered_is_refused(tmp_path: Path) -> None:
    opener, listener = sides()
    reply = msgspec.structs.replace(listener.receive_hello(opener.hello()), version=9)
    with pytest.raises(AdmissionRefused, match="upgrade the older one"):
        opener.receive_reply(reply)
    with small_peer(tmp_path / "s") as peer:
        welcome = peer.backend.welcome
        peer.backend.welcome = lambda client, version: welcome(client, 3)  # type: ignore[method-assign]
        opening = LocalConnection.open(
            BlockingDriver(), str(tmp_path / "s"), Opening("default", local_protocol.Access.READ)
        )
        with pytest.raises(ProtocolMismatch, match="the other side 3 to 3"):
            run_blocking(opening)


async def test_a_data_server_that_picks_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with data_server() as harness:
        monkeypatch.setattr("p2pstore.transfer.serving.data_server.negotiate_version", lambda *_: 5)
        with pytest.raises(ProtocolMismatch, match="the other side 5 to 5"):
            await DataConnection.open(await connect(harness.address), grant())


# --- the state directory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("identity.key", b"p2pstore identity 2\nsomething else\n"),
        ("state.json", b'{"format":2,"incarnation":"no number any more"}'),
        ("floors.bin", b"P2PSFLR\0\x02\0\0\0what follows"),
    ],
)
def test_files_of_a_newer_format_are_refused_and_kept(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / name).chmod(0o600)

    def use() -> None:
        with StateDirectory.open(tmp_path) as state:
            state.identity()
            state.load_addresses()
            state.floors.load()

    with pytest.raises(ConfigError, match="has format 2, this program knows up to 1"):
        use()
    assert (tmp_path / name).read_bytes() == content


def test_fields_that_a_newer_version_added_to_state_files_do_no_harm(tmp_path: Path) -> None:
    state = {"format": 1, "incarnation": 7, "clock": 8, "new": {"and": 1}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    book = {"format": 1, "addresses": ["a:1"], "peers": []}
    (tmp_path / "addresses.json").write_text(json.dumps(book))
    with StateDirectory.open(tmp_path) as opened:
        assert opened.record.next_incarnation(0) == 8
        assert opened.record.clock == 8
        assert opened.load_addresses() == ["a:1"]
        assert member_of(opened.identity().peer_id) > 0
