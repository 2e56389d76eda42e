"""The fuzzer's sessions with a real peer: one function per kind of session, each a few mutated frames.

A session either ends quietly, whatever was sent, or raises `Problem`. It returns the bytes that it sent.
"""

import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from random import Random
from typing import Any, Final

import trio

from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import split_address
from p2pstore.checkpoint import checkpoint_messages
from p2pstore.errors import P2PStoreError, ProtocolError
from p2pstore.gossip.gossip_messages import REPLIES as CONTROL_REPLIES
from p2pstore.gossip.gossip_messages import REQUESTS as CONTROL_REQUESTS
from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.gossip.gossip_messages import Hello as ControlHello
from p2pstore.gossip.gossip_messages import Proof as ControlProof
from p2pstore.gossip.links.admission import AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.control_link import LinkError, admit_stream, open_asking_stream
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import chunk_sums, key_digest, root_checksum
from p2pstore.runtime.trio_streams import TrioDriver, TrioStream
from p2pstore.transfer import data_messages as data
from p2pstore.transfer import peer_messages
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.read_tickets import Scope, issue_ticket, open_ticket, prove
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.transport import BufferDestination, RemoteCopy, RemotePeer
from p2pstore.wire import (
    ERROR,
    HEADER_BYTES,
    MAX_CONTROL_VERSION,
    MIN_CONTROL_VERSION,
    PREFACE_DATA,
    PREFACE_LOCAL,
    REPLY,
    Failure,
    Limits,
    Message,
    decode_body,
    decode_header,
    encode_frame,
)
from tests.fuzz.mutation import Mutator
from tests.fuzz.plausible import plausible
from tests.fuzz.victim import Problem, Victim

SESSION_SECONDS: Final = 15.0
"""A session that lasts longer hangs; the peer's own deadlines are 5 s and 10 s."""
REPLY_LIMITS: Final = Limits(4 * 1024 * 1024, 16 * 1024 * 1024)
WRONG_KEY: Final = b"w" * 32
SMALL_READS: Final = 3
"""In a batch that one request asks for."""

Sent = list[bytes]
Play = Callable[[Victim, Random, Sent], Awaitable[None]]


async def play(session: Play, victim: Victim, rng: Random, sent: Sent) -> None:
    """One session; `sent` is filled with what it sends, also when it fails. Raises `Problem`."""
    try:
        with trio.fail_after(SESSION_SECONDS):
            await session(victim, rng, sent)
    except trio.TooSlowError:
        raise Problem(f"the session did not end within {SESSION_SECONDS:g} s") from None
    except Problem:
        raise
    except Exception as error:
        raise Problem("".join(traceback.format_exception(error))) from error


def corpus(requests: dict[int, Any], rng: Random, hints: dict[str, Any], skip: int) -> list[bytes]:
    """A session's worth of plausible frames of every kind that a protocol has."""
    kinds = [kind for kind in requests if kind >= skip]
    return [
        encode_frame(kind, number + 1, plausible(requests[kind], rng, hints))
        for number, kind in enumerate(rng.choices(kinds, k=rng.randint(8, 48)))
    ]


# --- data ------------------------------------------------------------------------------------


def _data_hints(victim: Victim, rng: Random) -> dict[str, Any]:
    key = rng.choice(list(victim.values))
    value = victim.values[key][:1000]
    sums = chunk_sums(value)
    digest = key_digest(key)
    record = victim.peer.node.core.gossip.membership.own.signed
    assert record is not None
    return {
        "digest": digest,
        "digests": digest * rng.choice((1, 2, 5)),
        "key": lambda: rng.choice((key, f"fuzz{rng.randrange(50)}")),
        "namespace": lambda: rng.choice(("default", "fuzz")),
        "prefix": "k",
        "after": "",
        "limit": 10,
        "member": victim.friend.node.core.member,
        "operations": rng.randbytes(42) * rng.choice((0, 1, 3)),
        "length": len(value),
        "sums": sums,
        "root": root_checksum(len(value), sums),
        "record_body": record.body,
        "record_signature": record.signature,
        "bodies": [record.body],
        "signatures": [record.signature],
        "replicas": 1,
    }


REMOVING = (DataKind.REMOVE, DataKind.FLUSH)
"""Kinds that remove objects: they spare the objects that are checked."""


async def data_requests(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated requests on a connection that was let in."""
    scope = Scope(rng.choice((1, 1, 2, 3, 4, 5, 7)))
    granted = victim.issuer.ticket(victim.peer.node.core.peer_id, scope)
    hints = _data_hints(victim, rng)
    others = {kind: each for kind, each in data.REQUESTS.items() if kind not in REMOVING}
    frames = corpus(others, rng, hints, skip=16)
    own = hints | {"namespace": "fuzz", "keys": ["fuzz1", "fuzz2"]}
    frames += corpus({kind: data.REQUESTS[kind] for kind in REMOVING}, rng, own, skip=16)
    with closing(
        await TrioDriver().connect_tcp(*split_address(victim.peer.data[0], "data"), 5.0)
    ) as stream:
        await DataConnection.open(stream, granted)
        await _pour(stream, Mutator(rng).sequence(frames, frames), sent)


async def data_hellos(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated handshakes without the cluster's key: the only answer is a refusal."""
    granted = issue_ticket(
        signer=victim.mallory,
        ring=KeyRing([WRONG_KEY]) if rng.random() < 0.5 else KeyRing(),
        audience=victim.peer.node.core.peer_id,
        now_unix=1.8e9 if rng.random() < 0.2 else _unix(victim),
        ticket_id=rng.randbytes(16),
        scope=Scope.READ,
    )
    nonce = rng.randbytes(32)
    hello = encode_frame(
        DataKind.HELLO,
        1,
        data.Hello(data.MIN_DATA_VERSION, data.MAX_DATA_VERSION, granted.ticket, nonce),
    )
    proof = encode_frame(DataKind.PROOF, 2, data.Proof(rng.randbytes(32)))
    request = encode_frame(DataKind.STATISTICS, 3, peer_messages.Statistics())
    preface = PREFACE_DATA if rng.random() < 0.9 else Mutator(rng).flip(PREFACE_DATA)
    frames = [preface, *Mutator(rng).sequence([hello, proof, request], [hello, proof])]
    with closing(
        await TrioDriver().connect_tcp(*split_address(victim.peer.data[0], "data"), 5.0)
    ) as stream:
        answer = await _pour(stream, frames, sent)
    for kind, flags, _ in _frames_of(answer):
        if kind not in (DataKind.HELLO, DataKind.PROOF) or (kind == DataKind.PROOF and flags == 1):
            raise Problem(f"a stranger's request was answered (kind {kind})")


async def data_replies(victim: Victim, rng: Random, sent: Sent) -> None:
    """The victim asks mallory, who proves that it is a member and then answers with mutated replies."""
    digest = key_digest("k1")
    kind = rng.choice([kind for kind in data.REPLIES if kind >= 16])
    kind = rng.choice((kind, DataKind.GET, DataKind.GET, DataKind.GET_SMALL))
    mutator = Mutator(rng)
    bulk = rng.randbytes(rng.choice((0, 1, 500, 5000)))
    if kind == DataKind.GET_SMALL:
        length = int.from_bytes(_slot_of(victim, "k1")[0][40:48], "little")
        bulk = rng.randbytes(SMALL_READS * length)

    async def answer(stream: TrioStream) -> None:
        buffer = bytearray()
        await _welcome(victim, stream, buffer)
        while (ask := await _take_frame(stream, buffer)) is not None:
            hints: dict[str, Any]
            hints = {"bulk_bytes": len(bulk), "slot": _slot_of(victim, "k1")[0]}
            hints["trailer"] = _slot_of(victim, "k1")[1]
            hints["slots"] = hints["slot"] * SMALL_READS
            hints |= {"incarnation": 1, "status": rng.choice((0, 0, 0, 1, 2, 3))}
            message = plausible(data.REPLIES.get(ask[0], data.Objects), rng, hints)
            frame = encode_frame(ask[0], ask[1], message, flags=REPLY, bulk_length=len(bulk))
            if rng.random() < 0.1:
                refused = Failure(rng.randrange(30), "no")
                frame = encode_frame(ask[0], ask[1], refused, flags=REPLY | ERROR)
            frame = mutator.frame(frame) if rng.random() < 0.8 else frame
            sent.append(frame + bulk)
            await stream.send(frame + bulk)
            if rng.random() < 0.5:
                return

    async with _impostor(answer) as address:
        pool = ConnectionPool(TrioDriver(), victim.peer.node.pool._ticket_source, progress_seconds=0.1)
        mallory = RemotePeer(victim.mallory.peer_id, (address,))
        try:
            if kind == DataKind.GET:
                copy = RemoteCopy(peer_id=mallory.peer_id, data=mallory.data, member=1)
                await pool.pull(copy, digest, BufferDestination(bytearray(100_000)))
            elif kind == DataKind.GET_SMALL:
                await _read_small(pool, mallory, digest)
            elif kind not in (DataKind.STORE_PART,):
                hints = _data_hints(victim, rng)
                request = plausible(data.REQUESTS[kind], rng, hints)
                await pool.request_bulk(mallory, DataKind(kind), request, 10_000, 0.1)
        except (P2PStoreError, OSError, ValueError, PullFailed):
            pass  # as the pool's callers expect
        finally:
            pool.close()


async def _read_small(pool: ConnectionPool, mallory: RemotePeer, digest: bytes) -> None:
    """Read an object several times at once. Nothing that is answered is raised, or taken for the object."""
    views = [memoryview(bytearray(100_000)) for _ in range(SMALL_READS)]
    try:
        lengths, _ = await pool.pull_small(mallory, [digest] * SMALL_READS, views)
    except (P2PStoreError, OSError, ValueError) as error:
        raise Problem(f"a batch of small reads raised {error!r}") from error
    if any(length >= 0 for length in lengths):
        raise Problem("random bytes were taken for an object")


def _slot_of(victim: Victim, key: str) -> tuple[bytes, bytes]:
    for peer in (victim.peer, victim.friend):
        segment = peer.node.core.segment
        entry = segment.find(key_digest(key), 0.0)
        if entry is not None:
            return segment.table.slot_bytes(entry), segment.table.trailer_bytes(entry)
    return bytes(64), b""


def _unix(victim: Victim) -> float:
    return victim.peer.node.core.unix(victim.peer.node.now)


async def _welcome(victim: Victim, stream: TrioStream, buffer: bytearray) -> None:
    """The listening side of a data connection's handshake, in mallory's name. Bytes received after the handshake
    stay in `buffer`."""
    while len(buffer) < len(PREFACE_DATA):
        buffer += await _some(stream)
    del buffer[: len(PREFACE_DATA)]
    kind, request_id, body = await _next(stream, buffer)
    hello = decode_body(data.Hello, body)
    _, secret = open_ticket(
        hello.ticket,
        audience=victim.mallory.peer_id,
        ring=victim.ring,
        verifier=victim.peer.node.core.gossip.checks.verifier,
        now_unix=_unix(victim),
    )
    nonce = bytes(32)
    reply = data.HelloReply(
        data.MAX_DATA_VERSION, nonce, prove(secret, b"server", hello.nonce, nonce), 1
    )
    await stream.send(encode_frame(kind, request_id, reply, flags=REPLY))
    await _next(stream, buffer)  # the proof


@asynccontextmanager
async def _impostor(serve: Callable[[TrioStream], Awaitable[None]]) -> AsyncIterator[str]:
    """The address of a listener on loopback that serves one connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                await trio.lowlevel.wait_readable(listener)
                sock, _ = listener.accept()
                with (
                    closing(TrioStream(sock, 1.0)) as stream,
                    suppress(OSError, P2PStoreError, EOFError),
                ):
                    await serve(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            yield f"127.0.0.1:{listener.getsockname()[1]}"
            nursery.cancel_scope.cancel()


# --- control ---------------------------------------------------------------------------------


class _PairStream:
    """A `RawStream` over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.stream = TrioStream(sock, SESSION_SECONDS)

    async def read(self, max_bytes: int) -> bytes:
        buffer = bytearray(max_bytes)
        count = await self.stream.receive_into(memoryview(buffer))
        if not count:
            raise ConnectionResetError("the stream ended")
        return bytes(buffer[:count])

    async def write(self, data: bytes) -> None:
        await self.stream.send(data)


def _control_hints(victim: Victim, rng: Random) -> dict[str, Any]:
    friend = victim.friend.node.core
    record = friend.gossip.membership.own.signed
    return {
        "peer_id": lambda: rng.choice(
            (victim.mallory.peer_id, friend.peer_id, victim.peer.node.core.peer_id)
        ),
        "by": friend.member,
        "member": friend.member,
        "status": lambda: rng.randrange(5),
        "incarnation": lambda: rng.choice((friend.incarnation, 1, 2**40)),
        "record": record,
        "records": [record],
        "first_sequence": 1,
        "operations": rng.randbytes(42) * 2,
        "digest": rng.randbytes(32),
        "cluster_buckets": b"",
    }


def _control_frames(victim: Victim, rng: Random) -> list[bytes]:
    recorded = rng.choices(victim.requests, k=rng.randint(4, 24))
    made = corpus(CONTROL_REQUESTS, rng, _control_hints(victim, rng), skip=16)
    return victim.frames(recorded) + made[: rng.randint(0, 20)]


async def control_requests(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated requests on a stream that was admitted, in mallory's name or in the neighbour's."""
    node = victim.peer.node
    sender = victim.mallory.peer_id if rng.random() < 0.8 else victim.friend.node.core.peer_id
    ours, theirs = _pair()
    frames = Mutator(rng).sequence(_control_frames(victim, rng), victim.frames(victim.requests))

    async def answer() -> None:
        with closing(theirs.stream), suppress(ProtocolError, OSError):
            listener = _side(Listener, victim, node.core.peer_id, sender)
            answering = await admit_stream(theirs, listener, node.control.serve)
            await answering.run()

    with closing(ours.stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await open_asking_stream(ours, _side(Opener, victim, sender, node.core.peer_id))
            await _pour(ours.stream, frames, sent)


async def control_hellos(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated admissions without the cluster's key: never admitted."""
    me = victim.peer.node.core.peer_id
    ours, theirs = _pair()
    opener = _side(Opener, victim, victim.mallory.peer_id, me, KeyRing([WRONG_KEY]))
    hello = encode_frame(ControlKind.HELLO, 1, opener.hello())
    honest = ControlHello(
        MIN_CONTROL_VERSION, MAX_CONTROL_VERSION, "default", rng.randbytes(32), victim.ring.ids
    )
    hellos = [hello, encode_frame(ControlKind.HELLO, 1, honest)]
    proof = ControlProof(rng.choice(victim.ring.ids), rng.randbytes(32))
    frames = Mutator(rng).sequence(
        [rng.choice(hellos), encode_frame(ControlKind.PROOF, 2, proof)],
        [*hellos, *victim.frames(victim.requests[:20])],
    )

    async def answer() -> None:
        listener = _side(Listener, victim, me, victim.mallory.peer_id)
        with closing(theirs.stream), suppress(ProtocolError, AdmissionRefused, OSError):
            await admit_stream(theirs, listener, victim.peer.node.control.serve)
        if listener.admitted:
            raise Problem("somebody without the cluster's key was admitted")

    with closing(ours.stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await _pour(ours.stream, frames, sent)


async def control_replies(victim: Victim, rng: Random, sent: Sent) -> None:
    """The victim asks mallory over a stream that both were admitted on, and gets mutated replies."""
    node = victim.peer.node
    ours, theirs = _pair()
    mutator = Mutator(rng)
    recorded = victim.frames(victim.replies, REPLY)
    plans = [rng.choice(victim.requests) for _ in range(rng.randint(1, 6))]

    async def answer() -> None:
        """Mallory's end, byte by byte; its handshake is the real one."""
        buffer = bytearray()
        listener = _side(Listener, victim, victim.mallory.peer_id, node.core.peer_id)
        try:
            kind, number, body = await _next(ours.stream, buffer)
            reply: Message = listener.receive_hello(decode_body(ControlHello, body))
            await ours.write(encode_frame(kind, number, reply, flags=REPLY))
            kind, number, body = await _next(ours.stream, buffer)
            reply = listener.receive_proof(decode_body(ControlProof, body))
            await ours.write(encode_frame(kind, number, reply, flags=REPLY))
            while True:
                kind, number, _ = await _next(ours.stream, buffer)
                if rng.random() < 0.5:
                    candidates = [f for f in recorded if f[:2] == kind.to_bytes(2, "little")]
                    frame = rng.choice(candidates or recorded)
                else:
                    hints = _control_hints(victim, rng)
                    made = plausible(CONTROL_REPLIES[kind], rng, hints)
                    frame = encode_frame(kind, number, made, flags=REPLY)
                frame = mutator.frame(frame) if rng.random() < 0.7 else frame
                frame = frame[:4] + number.to_bytes(4, "little") + frame[8:]  # a reply to this
                sent.append(frame)
                await ours.write(frame)
                if rng.random() < 0.1:
                    return
        except (OSError, EOFError):
            return
        finally:
            ours.stream.close()

    async def ask() -> None:
        asking = await open_asking_stream(
            theirs, _side(Opener, victim, node.core.peer_id, victim.mallory.peer_id)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run_asking, asking)
            for kind, request in plans:
                asked = node.core.gossip.questions.ask(
                    victim.mallory.peer_id, ControlKind(kind), request, node.now
                )
                reply: Message | None = None
                with suppress(LinkError), trio.move_on_after(0.05):
                    reply = await asking.ask(kind, request)
                with suppress(ProtocolError):
                    for effect in node.core.gossip.answered(asked.token, reply, node.now):
                        node.core.emit(effect)
                node.process()
            nursery.cancel_scope.cancel()

    with closing(ours.stream), closing(theirs.stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await ask()
            nursery.cancel_scope.cancel()


async def _run_asking(asking: Any) -> None:
    with suppress(ProtocolError, OSError):
        await asking.run()


def _pair() -> tuple[_PairStream, _PairStream]:
    one, two = socket.socketpair()
    return _PairStream(one), _PairStream(two)


def _side(kind: Any, victim: Victim, own: bytes, other: bytes, ring: KeyRing | None = None) -> Any:
    return kind(
        ring=ring or victim.ring,
        cluster="default",
        own_id=own,
        peer_id=other,
        nonce=own[-16:] + other[-16:],
        software="fuzz",
    )


async def control_strangers(victim: Victim, rng: Random, sent: Sent) -> None:
    """Bytes on the control port from a client without Noise."""
    mutator = Mutator(rng)
    multistream, noise = b"\x13/multistream/1.0.0\n", b"\x07/noise\n"
    key = b"\0\x20" + rng.randbytes(32)
    pieces = [multistream, noise, key, b"\0\x60" + rng.randbytes(96), b"\x11/plaintext/2.0.0\n"]
    frames = [mutator.flip(p) if rng.random() < 0.3 else p for p in pieces]
    if rng.random() < 0.3:
        rng.shuffle(frames)
    if rng.random() < 0.3:
        frames.insert(rng.randrange(3), rng.randbytes(rng.choice((1, 100, 5000))))
    with closing(
        await TrioDriver().connect_tcp(*split_address(victim.peer.control, "control"), 5.0)
    ) as stream:
        await _pour(stream, frames, sent)


# --- local -----------------------------------------------------------------------------------


async def local_requests(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated requests of a client, which has reserved room and leased objects before."""
    access = rng.choice(
        (local_protocol.Access.READ, local_protocol.Access.WRITE, local_protocol.Access.WRITE)
    )
    with closing(await TrioDriver().connect_unix(victim.peer.socket, 5.0)) as stream:
        hello = local_protocol.Hello(1, 1, "fuzz", access, 1, "fuzz")
        await stream.send(PREFACE_LOCAL + encode_frame(LocalKind.HELLO, 1, hello))
        buffer = bytearray()
        await _receive_and_close_descriptors(stream, buffer)
        await _next(stream, buffer)
        hints = _local_hints(victim, rng)
        if access == local_protocol.Access.WRITE:
            rooms = [(rng.choice((0, 5, 5000)), 4096, 1) for _ in range(3)]
            reserved = await _ask(stream, buffer, LocalKind.RESERVE, local.Reserve(rooms))
            numbers = [each.first for each in decode_body(local.Reserved, reserved).spans]
            hints["reservation"] = lambda: rng.choice(numbers)
            hints["reservations"] = numbers[:1]
        digests = key_digest("k0") + key_digest("k2")
        leased = await _ask(stream, buffer, LocalKind.LEASE, local.Lease(digests))
        grants = decode_body(local.Leased, leased).items
        hints["leases"] = [each.lease for each in grants][:1]
        kinds = {**local_protocol.REQUESTS, **checkpoint_messages.REQUESTS}
        frames = corpus(kinds, rng, hints, skip=16)
        await _pour(stream, Mutator(rng).sequence(frames, frames), sent)


def _local_hints(victim: Victim, rng: Random) -> dict[str, Any]:
    """Nothing that a client may do to the objects that are checked: it works in its own namespace."""
    digest = key_digest(f"fuzz{rng.randrange(50)}", "fuzz")
    sums = chunk_sums(bytes(5))
    return {
        "namespace": "fuzz",
        "digest": digest,
        "digests": digest * rng.choice((1, 2)),
        "keys": [f"fuzz{rng.randrange(50)}"],
        "key": lambda: f"fuzz{rng.randrange(50)}",
        "length": lambda: rng.choice((0, 5, 5000)),
        "trailer_length": 4096,
        "sums": sums,
        "root": root_checksum(5, sums),
        "replicas": lambda: rng.choice((1, 1, 1, 2)),
        "copies": 1,
        "wait_ms": 0,
        "deadline_ms": 100,
        "drain_seconds": 0.0,
    }


async def local_hellos(victim: Victim, rng: Random, sent: Sent) -> None:
    """Mutated beginnings."""
    hello = encode_frame(
        LocalKind.HELLO, 1, local_protocol.Hello(1, 1, "fuzz", rng.randrange(2), 1, "fuzz")
    )
    request = encode_frame(LocalKind.STATISTICS, 2, local.Statistics())
    preface = PREFACE_LOCAL if rng.random() < 0.9 else Mutator(rng).flip(PREFACE_LOCAL)
    frames = [preface, *Mutator(rng).sequence([hello, request], [hello, request])]
    with closing(await TrioDriver().connect_unix(victim.peer.socket, 5.0)) as stream:
        await _pour(stream, frames, sent)


async def _ask(stream: TrioStream, buffer: bytearray, kind: LocalKind, message: Message) -> bytes:
    await stream.send(encode_frame(kind, 9, message))
    while True:
        answered, number, body = await _next(stream, buffer)
        if (answered, number) == (kind, 9):
            return body


async def _receive_and_close_descriptors(stream: TrioStream, buffer: bytearray) -> None:
    room = bytearray(65536)
    count, descriptors = await stream.receive_descriptors(memoryview(room))
    for descriptor in descriptors:
        socket.close(descriptor)
    if not count:
        raise ConnectionResetError("the peer closed")
    buffer += room[:count]


# --- bytes -----------------------------------------------------------------------------------


async def _pour(stream: TrioStream, frames: list[bytes], sent: Sent) -> bytes:
    """Send all frames, then end of stream; returns the bytes received until the other side closed."""
    answer = bytearray()

    async def drain() -> None:
        with suppress(OSError):
            while data := await _some(stream):
                if len(answer) < 1024 * 1024:
                    answer.extend(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        with suppress(OSError):
            for frame in frames:
                sent.append(frame)
                await stream.send(frame)
            stream._sock.shutdown(socket.SHUT_WR)
    return bytes(answer)


async def _some(stream: TrioStream) -> bytes:
    room = bytearray(65536)
    count = await stream.receive_into(memoryview(room))
    return bytes(room[:count])


async def _next(stream: TrioStream, buffer: bytearray) -> tuple[int, int, bytes]:
    """The next frame's kind, request id and body. Raises `EOFError` at the end."""
    found = await _take_frame(stream, buffer)
    if found is None:
        raise EOFError
    return found


async def _take_frame(stream: TrioStream, buffer: bytearray) -> tuple[int, int, bytes] | None:
    while True:
        if len(buffer) >= HEADER_BYTES:
            header = decode_header(buffer, REPLY_LIMITS)
            end = HEADER_BYTES + header.body_length
            if len(buffer) >= end:
                body = bytes(buffer[HEADER_BYTES:end])
                del buffer[:end]
                return header.kind, header.request_id, body
        data = await _some(stream)
        if not data:
            return None
        buffer += data


def _frames_of(data: bytes) -> list[tuple[int, int, bytes]]:
    """(kind, flags, body) of every whole frame."""
    found = []
    while len(data) >= HEADER_BYTES:
        header = decode_header(data, REPLY_LIMITS)
        end = HEADER_BYTES + header.body_length
        found.append((header.kind, header.flags, data[HEADER_BYTES:end]))
        data = data[end:]
    return found


SESSIONS: Final[dict[str, tuple[tuple[Play, int], ...]]] = {
    "control": (
        (control_requests, 70),
        (control_replies, 15),
        (control_hellos, 10),
        (control_strangers, 5),
    ),
    "data": ((data_requests, 70), (data_hellos, 15), (data_replies, 15)),
    "local": ((local_requests, 85), (local_hellos, 15)),
}
"""Protocol -> its kinds of session, with how often each is played."""
