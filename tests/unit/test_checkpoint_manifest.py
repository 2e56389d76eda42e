"""Manifests: pieces, versions, signatures, and what is refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.checkpoint.content.manifest import (
    HASH_BYTES,
    MANIFEST_FORMAT,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    SignedManifest,
    check_path,
    check_paths,
    format_version,
    hash_of,
    make_manifest,
    open_manifest,
    read_manifest,
    sign_manifest,
    unchanged_pieces,
    version_of,
)
from p2pstore.checkpoint.content.pieces import (
    CHEAP,
    MAX_FILE_BYTES,
    MAX_PIECES,
    MAX_USUAL_BYTES,
    MIN_PIECE_BYTES,
    SMALLEST_USUAL,
    Extent,
    PieceLayout,
    choose_piece_bytes,
)
from p2pstore.errors import CheckpointRefused
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.objects import check_checkpoint_name
from p2pstore.wire import encode_body

PIECE = MIN_PIECE_BYTES
PUBLISHER = Identity(bytes(32))
VERIFIER = Ed25519Verifier()


def entry(path: str, content: bytes = b"", mode: int = 0o644) -> FileEntry:
    return FileEntry(path, len(content), mode, hash_of(content))


def manifest_of(files: dict[str, bytes], name: str = "model") -> Manifest:
    paths = sorted(files)
    layout = PieceLayout([len(files[path]) for path in paths], PIECE)
    hashes = b"".join(
        hash_of(b"".join(files[paths[file]][at : at + size] for file, at, size in layout.extents(piece)))
        for piece in range(layout.count)
    )
    return make_manifest(name, [entry(path, files[path]) for path in paths], PIECE, hashes)


SMALL = manifest_of({"config.json": b"{}", "model.safetensors": bytes(3 * PIECE + 5)})


# --- pieces ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.integers(0, 3 * PIECE), st.sampled_from([0, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
        ),
        max_size=40,
    )
)
def test_every_byte_is_in_one_piece(sizes: list[int]) -> None:
    layout = PieceLayout(sizes, PIECE)
    reached = [0] * len(sizes)
    for piece in range(layout.count):
        assert 1 <= layout.sizes[piece] <= PIECE
        for extent in layout.extents(piece):
            assert extent.offset == reached[extent.file]
            reached[extent.file] += extent.length
            assert piece in layout.pieces_of(extent.file, extent.offset, extent.offset + 1)
    assert reached == sizes
    for file, size in enumerate(sizes):
        pieces = layout.pieces_of(file)
        held = [each for piece in pieces for each in layout.extents(piece) if each.file == file]
        assert sum(each.length for each in held) == size
    # Two shared pieces that follow each other have more than one piece's bytes: so there are few.
    assert layout.count <= 2 * sum(sizes) // PIECE + 1 + sum(size >= PIECE for size in sizes)


def test_a_range_of_a_file_is_in_the_pieces_that_have_it_and_in_no_others() -> None:
    layout = PieceLayout([7, 3 * PIECE + 1, 9, 2 * PIECE], PIECE)
    assert layout.count == 4 + 2 + 1
    assert layout.extents(3) == [Extent(1, 3 * PIECE, 1)]
    assert layout.extents(6) == [Extent(0, 0, 7), Extent(2, 0, 9)]
    assert layout.pieces_of(1) == range(0, 4)
    assert layout.pieces_of(1, PIECE, 2 * PIECE) == range(1, 2)
    assert layout.pieces_of(1, PIECE - 1, 2 * PIECE + 1) == range(0, 3)
    assert layout.pieces_of(3, 5, 10**12) == range(4, 6)
    assert layout.pieces_of(2) == range(6, 7)
    assert list(layout.pieces_of(2, 4, 4)) == []
    with pytest.raises(IndexError):
        layout.extents(7)


@pytest.mark.parametrize(
    ("total", "wanted"),
    [
        (0, SMALLEST_USUAL),
        (512 * SMALLEST_USUAL, SMALLEST_USUAL),
        (512 * SMALLEST_USUAL + 4096, 2 * SMALLEST_USUAL),
        (10**9, CHEAP // 2),
        (2048 * CHEAP, CHEAP),
        (2048 * CHEAP + 4096, 2 * CHEAP),
        (140 * 10**9, MAX_USUAL_BYTES),
        (10**12, MAX_USUAL_BYTES),
        (8 * 10**12, 2 * MAX_USUAL_BYTES),
    ],
)
def test_the_usual_length_of_pieces(total: int, wanted: int) -> None:
    assert choose_piece_bytes([total]) == wanted


def test_the_length_of_pieces_of_the_version_before_is_kept_within_reason() -> None:
    size = 40 * 10**9
    usual = choose_piece_bytes([size])
    assert choose_piece_bytes([size], usual // 4) == usual // 4
    assert choose_piece_bytes([size], 4 * usual) == 4 * usual
    assert choose_piece_bytes([size], usual // 8) == usual
    assert choose_piece_bytes([size], 8 * usual) == usual


def test_a_tebibyte_in_a_hundred_files_has_a_manifest_under_8_mib() -> None:
    sizes = [2**40 // 100] * 100
    piece_bytes = choose_piece_bytes(sizes)
    layout = PieceLayout(sizes, piece_bytes)
    files = [
        FileEntry(f"model-{number:05}-of-00100.safetensors", size, 0o644, bytes(HASH_BYTES))
        for number, size in enumerate(sizes)
    ]
    manifest = make_manifest("model", files, piece_bytes, bytes(HASH_BYTES * layout.count))
    assert 16_384 <= layout.count < 17_000
    assert len(sign_manifest(manifest, PUBLISHER).body) < 8 * 2**20


def test_as_many_tensors_as_models_have_fit_in_a_manifest() -> None:
    names = sorted(f"model.layers.{number % 61}.mlp.experts.{number}.weight" for number in range(92_000))
    sizes = [7 * 2**20] * len(names)
    piece_bytes = choose_piece_bytes(sizes)
    files = [
        FileEntry(name, size, 0o644, bytes(HASH_BYTES), "bfloat16", [2048, 1792])
        for name, size in zip(names, sizes, strict=True)
    ]
    hashes = bytes(HASH_BYTES * PieceLayout(sizes, piece_bytes).count)
    body = sign_manifest(make_manifest("model", files, piece_bytes, hashes), PUBLISHER).body
    assert read_manifest(body).files[-1] == files[-1]


def test_a_slightly_changed_checkpoint_has_the_same_pieces() -> None:
    def shard(seed: int) -> bytes:
        return b"".join(hash_of(b"%d %d" % (seed, block)) for block in range(10 * PIECE // 32))

    before = {"a.safetensors": shard(1), "b.safetensors": shard(2), "config.json": b"{}"}
    changed = bytearray(before["b.safetensors"])
    changed[5 * PIECE + 7] ^= 1
    # The first file grows, one byte of the second changes, one comes, small ones change.
    after = {
        "a.safetensors": before["a.safetensors"] + b"more",
        "b.safetensors": bytes(changed),
        "c.safetensors": shard(3),
        "config.json": b"{'x': 1}",
    }
    old, new = manifest_of(before), manifest_of(after)
    same = unchanged_pieces(old, new)
    moved = set(range(new.layout.count)) - set(same)
    # The end of `a`, one piece of `b`, all ten of `c`, and the small file.
    assert len(moved) == 1 + 1 + 10 + 1
    assert all(old.piece_hash(mine) == new.piece_hash(piece) for piece, mine in same.items())


# --- versions and signatures -----------------------------------------------------------------


def test_a_manifest_travels() -> None:
    signed = sign_manifest(SMALL, PUBLISHER)
    version = version_of(signed.body)
    opened = open_manifest(signed, version=version, publisher=PUBLISHER.peer_id, verifier=VERIFIER)
    assert opened == SMALL
    assert opened.layout.count == 5
    assert opened.is_piece(0, bytes(PIECE))
    assert not opened.is_piece(0, bytes(PIECE - 1) + b"\1")
    assert not opened.is_piece(0, bytes(PIECE - 1))
    assert len(format_version(version)) == 32


def test_the_same_files_are_the_same_version_from_any_publisher() -> None:
    other = Identity(bytes([1]) * 32)
    assert sign_manifest(SMALL, PUBLISHER).body == sign_manifest(replace(SMALL), other).body
    renamed = sign_manifest(replace(SMALL, name="other"), PUBLISHER)
    assert version_of(renamed.body) != version_of(sign_manifest(SMALL, PUBLISHER).body)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("signature", "did not sign"),
        ("no signature", "did not sign"),
        ("body", "another version"),
        ("signer", "another publisher"),
        ("stranger", "did not sign"),
        ("long", "bytes"),
    ],
)
def test_what_the_trusted_publisher_did_not_sign_is_refused(change: str, complaint: str) -> None:
    stranger = Identity(bytes([1]) * 32)
    signed = sign_manifest(SMALL, PUBLISHER)
    version = version_of(signed.body)
    changed = {
        "signature": replace(signed, signature=bytes(64)),
        "no signature": replace(signed, signature=b""),
        "body": replace(signed, body=signed.body + b"\0"),
        "signer": sign_manifest(SMALL, stranger),
        "stranger": replace(sign_manifest(SMALL, stranger), signer=PUBLISHER.peer_id),
        "long": replace(signed, body=bytes(MAX_MANIFEST_BYTES + 1)),
    }[change]
    with pytest.raises(CheckpointRefused, match=complaint):
        open_manifest(changed, version=version, publisher=PUBLISHER.peer_id, verifier=VERIFIER)


def test_a_signature_of_another_kind_of_thing_is_no_signature() -> None:
    body = encode_body(SMALL)
    signed = SignedManifest(body, PUBLISHER.peer_id, PUBLISHER.sign(hash_of(body)))
    with pytest.raises(CheckpointRefused, match="did not sign"):
        open_manifest(signed, version=version_of(body), publisher=PUBLISHER.peer_id, verifier=VERIFIER)


def test_fields_that_a_newer_version_appends_are_passed_over() -> None:
    fields = msgspec.msgpack.decode(encode_body(SMALL))
    fields[3][0].append("new")
    fields.append("newer")
    assert read_manifest(msgspec.msgpack.encode(fields)) == SMALL


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "//x",
        "../x",
        "a/../../x",
        "a/..",
        "..",
        ".",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\\b",
        "..\\..\\x",
        "\ud800",
        "x" * 256,
        "ä" * 128,
        "/".join(["x" * 100] * 11),
        "/".join(["x"] * 33),
        ".p2pstore-state",
        ".p2pstore/x",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(CheckpointRefused):
        check_path(path)


@pytest.mark.parametrize(
    "path", ["a", "a/b.c", "...", "..a", "x" * 255, "ä/ö", "a b", "-rf", "a/.p2pstore"]
)
def test_plain_paths_are_allowed(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "paths", [["a", "a"], ["b", "a"], ["a", "a/b"], ["a/b", "a/b/c/d"], ["a", "a-b", "a/b"]]
)
def test_a_path_comes_once_in_order_and_not_below_a_file(paths: list[str]) -> None:
    with pytest.raises(CheckpointRefused):
        check_paths(paths)


@pytest.mark.parametrize("name", ["", "a@b", "a b", "a\n", "x" * 256, "\udcff"])
def test_names_that_a_command_line_would_misread_are_refused(name: str) -> None:
    with pytest.raises(CheckpointRefused):
        check_checkpoint_name(name)


LINK = 0o120777
SETUID = 0o4755


@pytest.mark.parametrize(
    "wrong",
    [
        replace(SMALL, format=2),
        replace(SMALL, name="a@b"),
        replace(SMALL, files=[]),
        replace(SMALL, files=[entry("a", b"", LINK)], piece_hashes=b""),
        replace(SMALL, files=[entry("a", b"", SETUID)], piece_hashes=b""),
        replace(SMALL, files=[entry("a", b"", -1)], piece_hashes=b""),
        replace(SMALL, files=[entry("../a")], piece_hashes=b""),
        replace(SMALL, files=[entry("b"), entry("a")], piece_hashes=b""),
        replace(SMALL, files=[FileEntry("a", 0, 0, b"short")], piece_hashes=b""),
        replace(SMALL, files=[FileEntry("a", 0, 0, bytes(32), "x" * 33)], piece_hashes=b""),
        replace(SMALL, files=[FileEntry("a", 0, 0, bytes(32), "x", [-1])], piece_hashes=b""),
        replace(SMALL, files=[FileEntry("a", -1, 0, bytes(32))], piece_hashes=b""),
        replace(SMALL, files=[FileEntry("a", MAX_FILE_BYTES + 1, 0, bytes(32))]),
        replace(SMALL, files=[FileEntry(c, 9 * 10**12, 0, bytes(32)) for c in "ab"]),
        replace(SMALL, files=[FileEntry("a", (MAX_PIECES + 1) * PIECE, 0, bytes(32))]),
        replace(SMALL, piece_bytes=0),
        replace(SMALL, piece_bytes=-PIECE),
        replace(SMALL, piece_bytes=3 * PIECE),
        replace(SMALL, piece_bytes=PIECE // 2),
        replace(SMALL, piece_bytes=2**40),
        replace(SMALL, piece_hashes=SMALL.piece_hashes[:-1]),
        replace(SMALL, piece_hashes=SMALL.piece_hashes + bytes(32)),
        replace(SMALL, piece_hashes=b""),
    ],
)
def test_manifests_that_make_no_sense_are_refused(wrong: Manifest) -> None:
    with pytest.raises(CheckpointRefused):
        read_manifest(encode_body(wrong))


def test_a_list_that_is_too_long_is_refused() -> None:
    files = [[str(number), 0, 0, bytes(32)] for number in range(MAX_FILES + 1)]
    body = msgspec.msgpack.encode([MANIFEST_FORMAT, "model", PIECE, files, b""])
    with pytest.raises(CheckpointRefused, match="length"):
        read_manifest(body)


@given(st.binary(max_size=400))
def test_whatever_bytes_come_they_are_a_manifest_or_refused(data: bytes) -> None:
    with pytest.raises(CheckpointRefused):
        read_manifest(data)


@settings(max_examples=500)
@given(st.data())
def test_a_spoilt_manifest_is_refused_or_still_safe(data: st.DataObject) -> None:
    body = bytearray(encode_body(SMALL))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body) - 1))
        if data.draw(st.booleans()):
            body[position] = data.draw(st.integers(0, 255))
        else:
            body[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        manifest = read_manifest(bytes(body))
    except CheckpointRefused:
        return
    for file in manifest.files:
        check_path(file.path)
        assert file.mode in range(0o1000)
    assert len(manifest.piece_hashes) == HASH_BYTES * manifest.layout.count
    assert sum(manifest.layout.sizes[piece] for piece in range(manifest.layout.count)) == sum(
        file.size for file in manifest.files
    )
