"""Formats of checkpoints that peers exchange and keep: these bytes never change. A new format gets a new number."""

from pathlib import Path

import msgspec
import pytest

from p2pstore.checkpoint.content.directory_versions import PieceRecord
from p2pstore.checkpoint.content.manifest import (
    FileEntry,
    FileHashes,
    hash_of,
    make_manifest,
    read_manifest,
    sign_manifest,
    version_of,
)
from p2pstore.checkpoint.content.pieces import MIN_PIECE_BYTES as PIECE
from p2pstore.checkpoint.swarm.swarm_messages import (
    Grant,
    Invite,
    Members,
    Needs,
    NewPieces,
    PieceMapMessage,
    Refusal,
    Refuse,
    SwarmMessage,
    decode_message,
    kind_of,
)
from p2pstore.gossip.links.identity import Identity
from p2pstore.wire import encode_body

PUBLISHER = Identity(bytes(32))


def test_the_bytes_of_a_manifest_never_change() -> None:
    manifest = make_manifest(
        "model",
        [
            FileEntry("a", 2, 0o644, bytes([0x18]) * 32),
            FileEntry("b", 0, 0o600, bytes(32), "float32", [0, 4]),
        ],
        PIECE,
        bytes([7]) * 32,
        FileHashes.OF_PIECES,
    )
    body = bytes.fromhex(
        "9601a56d6f64656ccd400092"
        f"96a16102cd01a4c420{'18' * 32}a090"
        f"96a16200cd0180c420{'00' * 32}a7666c6f61743332920004"
        f"c420{'07' * 32}01"
    )
    assert encode_body(manifest) == body
    assert version_of(body).hex() == "6536265cf6336afc3605fea9e10d82df"
    assert read_manifest(body) == manifest
    # As it was before it said what the hashes of files are.
    older = bytes([0x95]) + body[1:-1]
    assert version_of(older).hex() == "5e9a9b32574f74baa203e77963608af1"
    before = read_manifest(older)
    assert before == msgspec.structs.replace(manifest, file_hashes=FileHashes.OF_BYTES)
    signature = PUBLISHER.sign(b"p2pstore checkpoint manifest 1\0" + hash_of(body))
    assert sign_manifest(manifest, PUBLISHER).signature == signature


MESSAGES: list[tuple[SwarmMessage, int, str]] = [
    (PieceMapMessage(b"\x05"), 1, "91c40105"),
    (NewPieces([0, 300]), 2, "919200cd012c"),
    (Grant(), 3, "92ff02"),
    (Grant(7, slots=8), 3, "920708"),
    (Refuse(2), 4, "9102"),
    (Members([7, 1 << 63]), 5, "919207cf8000000000000000"),
    (Needs(b"\x05"), 6, "91c40105"),
    (Invite(), 7, "90"),
    (Refuse(Refusal.LATER), 4, "9105"),
]


@pytest.mark.parametrize(("message", "kind", "body"), MESSAGES)
def test_the_bytes_of_messages_never_change(message: SwarmMessage, kind: int, body: str) -> None:
    assert kind_of(message) == kind
    assert encode_body(message).hex() == body
    assert decode_message(kind, bytes.fromhex(body)) == message


def test_grants_of_older_members_say_no_slots() -> None:
    assert decode_message(3, bytes.fromhex("9107")) == Grant(7, slots=2)


def test_the_record_of_pieces_on_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "pieces"
    boot = b"01234567-89ab-cdef-0123-456789abcdef"
    record = PieceRecord(path, bytes(range(16)), 12, boot)
    for piece in (0, 9, 11):
        record.add(piece)
    record.close()
    golden = b"P2PSPCS\0" + bytes.fromhex("010000000c000000") + bytes(range(16)) + boot + b"\x01\x0a"
    assert path.read_bytes() == golden
    again = PieceRecord(path, bytes(range(16)), 12, boot)
    assert again.have == 0b1010_0000_0001
    assert again.is_certain
    again.close()
