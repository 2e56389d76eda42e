"""Everything that is parsed outside of a session: segments, slots, trailers, records, tickets, key and allow
files, invites, addresses, the state directory's files. Each may raise what its docstring says, and no more."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import xxhash

from p2pstore.access.invite import Invite, format_invite, parse_invite
from p2pstore.access.keyring import (
    KeyRing,
    add_key,
    parse_cluster_keys,
    parse_peer_ids,
    promote_key,
    retire_keys,
)
from p2pstore.addresses import split_address
from p2pstore.checkpoint.content.manifest import (
    HASH_BYTES,
    FileEntry,
    hash_of,
    make_manifest,
    read_manifest,
)
from p2pstore.checkpoint.content.pieces import PieceLayout
from p2pstore.checkpoint.content.safetensors import BrokenFile, read_header
from p2pstore.errors import AuthenticationFailed, CheckpointRefused, ConfigError, ProtocolError
from p2pstore.gossip.checkpoint_records import HeadBody, SwitchBody, checkpoint_digest
from p2pstore.gossip.exchange.digests import check_runs, read_runs, unpack_digest, unpack_positions
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.locations.log import SIGNATURE_BYTES
from p2pstore.gossip.records import (
    ClusterRecord,
    LogHead,
    PeerRecord,
    SignedRecord,
    format_peer_id,
    open_cluster_record,
    open_peer_record,
    sign_cluster_record,
    sign_peer_record,
)
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    Pin,
    TrailerBody,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    plan_geometry,
)
from p2pstore.objects import chunk_sums, key_digest, parse_bytes
from p2pstore.state.state_directory import StateDirectory
from p2pstore.transfer.data_messages import Ticket
from p2pstore.transfer.read_tickets import Scope, issue_ticket, open_ticket
from p2pstore.transfer.reading.segment_reader import SegmentReader
from p2pstore.wire import encode_body
from tests.fuzz.mutation import HEADER, Mutator
from tests.fuzz.victim import Problem
from tests.mapped_copies import copy_one
from tests.stored import stored
from tests.unit.digest_rows import digest_from
from tests.unit.location_set import iterate_locations

UNIX: Final = 1_800_000_000.0
IDENTITY: Final = Identity(bytes(range(32)))
RING: Final = KeyRing([b"k" * 32])
VALUE: Final = bytes(range(250)) * 20
_VERIFIER: Final = Ed25519Verifier()


def fuzz_formats(rng: Random, sent: list[bytes]) -> None:
    """One mutated input to one parser; it is put into `sent`. Raises `Problem`."""
    parsers, weights = zip(*PARSERS, strict=True)
    [parse] = rng.choices(parsers, weights)
    try:
        parse(rng, sent)
    except Problem:
        raise
    except Exception as error:
        raise Problem(f"{parse.__name__}: {type(error).__name__}: {error}") from error


def _mutated(rng: Random, sent: list[bytes], data: bytes) -> bytes:
    mutator = Mutator(rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice((mutator.flip, mutator.flip, mutator.cut, mutator.insert))(data)
    sent.append(data)
    return data


def _mutated_body(rng: Random, sent: list[bytes], body: bytes) -> bytes:
    """Like `_mutated`, with an eye to msgpack."""
    frame = HEADER.pack(1, 0, 1, len(body), 0) + body
    mutator = Mutator(rng)
    changed = rng.choice((mutator.value, mutator.value, mutator.raw_value, mutator.grow_body))(frame)
    sent.append(changed[HEADER.size :])
    return changed[HEADER.size :]


def _mutated_text(rng: Random, sent: list[bytes], text: str) -> str:
    return _mutated(rng, sent, text.encode()).decode("utf-8", "replace")


# --- memory ----------------------------------------------------------------------------------


@cache
def _memory() -> tuple[bytes, dict[str, bytes]]:
    """A segment with objects in it, as bytes."""
    geometry = plan_geometry(256 * 1024)
    memory = memoryview(bytearray(geometry.total_bytes))
    segment = Segment(memory, segment_id=bytes(16), incarnation=1, geometry=geometry)
    parts = {}
    for number in range(6):
        value = VALUE[: 700 * number]
        sums = chunk_sums(value)
        trailer = TrailerBody("default", f"k{number}", sums, pin=Pin.SOFT)
        entry = stored(segment, trailer, value, clock=1 << 20, now=UNIX)
        parts = {"slot": segment.table.slot_bytes(entry), "trailer": segment.table.trailer_bytes(entry)}
    segment.detach()
    return bytes(memory), parts


def segment_memory(rng: Random, sent: list[bytes]) -> None:
    """A mapped segment whose owner writes nonsense: a reader finds the value, or nothing."""
    memory = bytearray(_memory()[0])
    for _ in range(rng.choice((1, 3, 30))):
        where = rng.choice((rng.randrange(4096), rng.randrange(len(memory))))
        length = min(rng.choice((1, 2, 8, 64)), len(memory) - where)
        memory[where : where + length] = rng.randbytes(length)
        sent.append(where.to_bytes(4, "big") + memory[where : where + length])
    if rng.random() < 0.5:  # the header stays whole, so that the rest is looked at
        memory[:4096] = _memory()[0][:4096]
    try:
        reader = SegmentReader(memoryview(memory))
    except ProtocolError:
        return
    for number in range(6):
        digest, value = key_digest(f"k{number}"), VALUE[: 700 * number]
        destination = bytearray(len(VALUE))
        reader.contains(digest)
        with suppress(ProtocolError):
            reader.find(digest)
            copied = copy_one(reader, digest, memoryview(destination))
            if copied is not None and bytes(destination[: len(value)]) != value:
                raise Problem("a reader delivered wrong bytes")


def slots_and_trailers(rng: Random, sent: list[bytes]) -> None:
    _, parts = _memory()
    decode_slot(_mutated(rng, sent, parts["slot"]).ljust(64, b"\0")[:64])
    decode_trailer(_mutated(rng, sent, parts["trailer"]))
    body = _mutated_body(rng, sent, parts["trailer"][16:])
    whole = (1).to_bytes(2, "little") + bytes(2) + len(body).to_bytes(4, "little")
    decode_trailer(whole + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body)


def segment_header(rng: Random, sent: list[bytes]) -> None:
    with suppress(ProtocolError):
        decode_segment_header(_mutated(rng, sent, _memory()[0][:256]))


# --- records and tickets ---------------------------------------------------------------------


@cache
def _records() -> tuple[SignedRecord, SignedRecord, Ticket]:
    peer = PeerRecord(
        *(1, IDENTITY.peer_id, "default", "name", 5, 6, bytes(16), ["h:1"], ["h:2"], "/socket"),
        *([], [], 1, 2, 3, 4, 5, LogHead()),
    )
    cluster = ClusterRecord(1, 1, bytes(16), 7, 8, IDENTITY.peer_id)
    granted = issue_ticket(
        signer=IDENTITY, ring=RING, audience=b"me", now_unix=UNIX, ticket_id=bytes(16), scope=Scope.READ
    )
    return (sign_peer_record(peer, IDENTITY), sign_cluster_record(cluster, IDENTITY), granted.ticket)


def peer_records(rng: Random, sent: list[bytes]) -> None:
    signed = _records()[0]
    with suppress(ProtocolError):
        body = _mutated_body(rng, sent, signed.body)
        open_peer_record(SignedRecord(body, signed.signature), _VERIFIER)
        if body != signed.body:
            raise Problem("a changed peer record was taken for true")


def cluster_records(rng: Random, sent: list[bytes]) -> None:
    signed = _records()[1]
    with suppress(ProtocolError):
        body = _mutated_body(rng, sent, signed.body)
        signature = signed.signature if rng.random() < 0.5 else rng.randbytes(rng.randrange(70))
        open_cluster_record(SignedRecord(body, signature), _VERIFIER)
        if body != signed.body:
            raise Problem("a changed cluster record was taken for true")


def checkpoint_records(rng: Random, sent: list[bytes]) -> None:
    """Heads and switches whose signatures are right, whatever they say: taken or left, and nothing worse."""
    digest = checkpoint_digest("space", "name", IDENTITY.peer_id)
    head = encode_body(HeadBody("space", "name", bytes(16), 1, 2, 3, 4))
    switch = encode_body(SwitchBody("space", "name", bytes(16)))
    kind, body = rng.choice(((2, head), (3, switch)))
    body = _mutated_body(rng, sent, body)
    record = ClusterRecord(1, kind, digest, 7, 8, IDENTITY.peer_id, rng.randrange(2), body)
    records = ClusterRecords()
    taken = records.offer(record, SignedRecord(encode_body(record), b""))
    if not taken:
        return
    if record.scope or (kind == 2) != bool(records.heads_of("space", "name")):
        raise Problem("a record was taken for another name's")


@cache
def _manifest() -> bytes:
    files = [
        FileEntry(f"{number:03}/a.bin", 20_000, 0o644, hash_of(bytes([number]))) for number in range(8)
    ]
    layout = PieceLayout([file.size for file in files], 16 * 1024)
    return encode_body(make_manifest("m", files, 16 * 1024, bytes(HASH_BYTES * layout.count)))


def manifests(rng: Random, sent: list[bytes]) -> None:
    """Whatever is read as a manifest describes pieces that exist."""
    mutate = rng.choice((_mutated, _mutated_body))
    try:
        manifest = read_manifest(mutate(rng, sent, _manifest()))
    except CheckpointRefused:
        return
    if sum(manifest.layout.sizes) != manifest.layout.total_bytes:
        raise Problem("pieces that are not those of the files")
    for extents in manifest.copies.values():
        if any(offset + length > manifest.files[file].size for file, offset, length in extents):
            raise Problem("a copy of what is not there")


_TENSORS: Final = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F4", "shape": [8], "data_offsets": [16, 20]},
        "c": {"dtype": "NEW", "shape": [3], "data_offsets": [20, 29]},
    }
).encode()


def safetensors_files(rng: Random, sent: list[bytes]) -> None:
    """Whatever is read as a tensor lies within its file."""
    header = rng.choice((_TENSORS, _mutated(rng, sent, _TENSORS)))
    content = _mutated(rng, sent, len(header).to_bytes(8, "little") + header + bytes(29))
    try:
        found = read_header(content, len(content))
    except BrokenFile:
        return
    for name, each in found.entries.items():
        if not 0 <= each.begin <= each.end <= len(content) or name in found.bad:
            raise Problem(f"{name!r} lies outside of its file, or is bad")


def tickets(rng: Random, sent: list[bytes]) -> None:
    ticket = _records()[2]
    with suppress(AuthenticationFailed):
        claims = _mutated_body(rng, sent, ticket.claims)
        signature = _mutated(rng, sent, ticket.signature)
        changed = Ticket(claims, rng.choice((signature, ticket.signature)))
        open_ticket(changed, audience=b"me", ring=RING, verifier=_VERIFIER, now_unix=UNIX)
        if changed != ticket:
            raise Problem("a changed ticket was taken for good")


def packed_lists(rng: Random, sent: list[bytes]) -> None:
    with suppress(ProtocolError):
        for record in iterate_locations(_mutated(rng, sent, rng.randbytes(42 * 3))):
            record.encode()
    with suppress(ProtocolError):
        unpack_digest(_mutated(rng, sent, rng.randbytes(28 * 3)))
    members = digest_from([(member, 1, 1, 1) for member in range(3)]).of
    with suppress(ProtocolError):
        unpack_positions(_mutated(rng, sent, rng.randbytes(9 * 3)), members)
    operations = rng.randbytes(42 * rng.randrange(4))
    with suppress(ProtocolError):
        packed = _mutated(rng, sent, b"\0\0\1\0\1\0\0\0\0" * 3)
        signatures = bytes(SIGNATURE_BYTES * (len(packed) // 9))
        rows, plain = check_runs(packed, operations, signatures)
        list(read_runs(rows, plain, signatures, members))


# --- text ------------------------------------------------------------------------------------


def texts(rng: Random, sent: list[bytes]) -> None:
    """Text that people write."""
    key = (b"k" * 32).hex() + " # a key\n"
    peer = format_peer_id(IDENTITY.peer_id) + "\n"
    address = rng.choice(("127.0.0.1:1", "[::1]:2", "host:3"))
    invite = format_invite(Invite("default", ("host:1",), (b"k" * 32,)))
    attempts: list[tuple[Callable[[str], Any], str]] = [
        (lambda text: parse_cluster_keys(text, "file"), key),
        (lambda text: add_key(text, "file", (b"n" * 32).hex()), key),
        (lambda text: promote_key(text, "file"), key + (b"n" * 32).hex()),
        (lambda text: retire_keys(text, "file"), key + (b"n" * 32).hex()),
        (lambda text: parse_peer_ids(text, "file"), peer * 2),
        (lambda text: split_address(text, "listen"), address),
        (lambda text: parse_bytes(text), rng.choice(("4GiB", "1.5 MB", "100"))),
        (parse_invite, invite),
    ]
    parse, text = rng.choice(attempts)
    with suppress(ConfigError, ValueError):
        parse(_mutated_text(rng, sent, text))


def state_directory(rng: Random, sent: list[bytes]) -> None:
    """A state directory with one damaged file."""
    with tempfile.TemporaryDirectory(prefix="p2p-fuzz-") as folder:
        with StateDirectory.open(folder) as state:
            state.identity()
            state.record.next_incarnation(5)
            state.save_clock(6)
            state.save_addresses(["host:1"])
            state.floors.append([_records()[1]] * 3)
        names = ("identity.key", "state.json", "addresses.json", "floors.bin", "lock")
        damaged = Path(folder, rng.choice(names))
        sent.append(damaged.name.encode())
        damaged.write_bytes(_mutated(rng, sent, damaged.read_bytes()))
        with suppress(ConfigError), StateDirectory.open(folder) as state:
            state.identity()
            state.load_addresses()
            for floor in state.floors.load():
                if floor != _records()[1]:
                    raise Problem("a damaged floor was taken for good")


PARSERS: Final[tuple[tuple[Callable[[Random, list[bytes]], None], int], ...]] = (
    (segment_memory, 10),
    (slots_and_trailers, 20),
    (segment_header, 10),
    (peer_records, 10),
    (cluster_records, 10),
    (checkpoint_records, 10),
    (manifests, 10),
    (safetensors_files, 10),
    (tickets, 10),
    (packed_lists, 10),
    (texts, 20),
    (state_directory, 1),
)
