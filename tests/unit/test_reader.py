"""Readers that only map: exact bytes or nothing, while the owner moves everything under them."""

import json
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from p2pstore.errors import ProtocolError
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.mapped.mapped_memory import create_memory, map_read_only
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    SLOT_BYTES,
    Slot,
    TrailerBody,
    decode_slot,
    encode_trailer,
    plan_geometry,
    trailer_offset,
)
from p2pstore.objects import CHUNK_BYTES, MIB, chunk_sums, key_digest
from p2pstore.runtime.side_by_side import PIECE_BYTES
from p2pstore.transfer.reading import segment_reader as reader_module
from p2pstore.transfer.reading.segment_reader import SegmentReader
from simulation.segment_checks import check_segment
from tests.mapped_copies import copy_many, copy_one
from tests.present import present
from tests.stored import stored
from tests.threads import with_threads

KEYS = [f"key {number}" for number in range(40)]
DIGESTS = {key: key_digest(key) for key in KEYS}


def pattern(key: str, clock: int, length: int) -> bytes:
    """The value that the owner stores under a key and version; a reader can compute it."""
    block = DIGESTS[key] + clock.to_bytes(8, "little")
    return (block * (length // len(block) + 1))[:length]


def put(segment: Segment, key: str, clock: int, value: bytes) -> ObjectEntry:
    trailer = TrailerBody("default", key, chunk_sums(value))
    return stored(segment, trailer, value, clock=clock, now=float(clock))


def new_segment(data_bytes: int, buffer: memoryview | None = None) -> tuple[Segment, memoryview]:
    geometry = plan_geometry(data_bytes)
    view = memoryview(bytearray(geometry.total_bytes)) if buffer is None else buffer
    return Segment(view, segment_id=b"s" * 16, incarnation=1, geometry=geometry), view


def empty(length: int) -> memoryview:
    return memoryview(bytearray(length))


# --- one reader, nothing else happening ------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4096, 65536, 65537, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * MIB + 3])
def test_a_copy_is_what_was_put(length: int) -> None:
    segment, view = new_segment(16 * MIB)
    value = random.Random(length).randbytes(length)
    entry = put(segment, "k", 5, value)
    reader = SegmentReader(view.toreadonly())
    target = empty(length + 10)
    assert copy_one(reader, key_digest("k"), target) == length
    assert bytes(target) == value + bytes(10)
    found = present(reader.find(key_digest("k")))
    slot, trailer = found
    assert slot.version == entry.version
    assert trailer.key == "k"
    assert reader.view_of(slot) == value
    assert reader.view_of(slot).readonly
    assert reader.contains(key_digest("k"))


def test_a_miss() -> None:
    segment, view = new_segment(MIB)
    reader = SegmentReader(view)
    for key in ("never put", "removed"):
        put(segment, "removed", 1, b"value")
        segment.remove(key_digest("removed"))
        assert not reader.contains(key_digest(key))
        assert reader.find(key_digest(key)) is None
        assert copy_one(reader, key_digest(key), empty(10)) is None


@pytest.mark.parametrize("length", [1, 5000, 3 * MIB])
def test_a_room_that_is_too_small_gets_nothing(length: int) -> None:
    segment, view = new_segment(8 * MIB)
    put(segment, "k", 1, b"x" * length)
    room = empty(length - 1)
    assert copy_one(SegmentReader(view), key_digest("k"), room) is None
    assert room == bytes(length - 1)
    assert SegmentReader(view).spots([key_digest("k")]).lengths == [length]


def test_colliding_digests_are_all_found_while_others_go() -> None:
    """A run of keys with one home: removals from its middle must not hide the rest."""
    segment, view = new_segment(MIB)
    reader = SegmentReader(view)
    digests = [b"\xff" * 8 + bytes([number]) * 8 for number in range(30)]
    rng = random.Random(2)
    sums = chunk_sums(b"v")

    def add(digest: bytes) -> None:
        stored(segment, TrailerBody("default", digest.hex(), sums), b"v", now=1.0, digest=digest)

    there: set[bytes] = set()
    for _ in range(400):
        digest = rng.choice(digests)
        if digest in there:
            segment.remove(digest)
            there.remove(digest)
        else:
            add(digest)
            there.add(digest)
        assert [reader.contains(d) for d in digests] == [d in there for d in digests]
        assert reader.contains_many(b"".join(digests)).tolist() == [d in there for d in digests]
        assert [reader.find(d) is not None for d in digests] == [d in there for d in digests]
    check_segment(segment)


def test_closing_is_seen() -> None:
    segment, view = new_segment(MIB)
    reader = SegmentReader(view)
    assert reader.is_open()
    segment.close()
    assert not reader.is_open()


def test_a_header_that_does_not_fit_the_mapping_is_refused() -> None:
    _, view = new_segment(MIB)
    with pytest.raises(ProtocolError, match="do not fit"):
        SegmentReader(view[:-1])
    with pytest.raises(ProtocolError):
        SegmentReader(empty(100_000))


# --- damage, at every place and moment --------------------------------------------------------


@pytest.mark.parametrize("length", [100, 3 * MIB + 100])
def test_damage_anywhere_is_a_miss(length: int) -> None:
    segment, view = new_segment(8 * MIB)
    entry = put(segment, "k", 1, pattern(KEYS[0], 1, length))
    reader = SegmentReader(view)
    slot = segment.geometry.slots_offset + entry.slot * SLOT_BYTES
    trailer = entry.offset + trailer_offset(length)
    places = [slot + at for at in range(SLOT_BYTES)]
    places += [trailer + at for at in range(entry.trailer_length) if at not in (2, 3)]  # reserved
    places += [entry.offset, entry.offset + length // 2, entry.offset + length - 1]
    target = empty(length)
    for place in places:
        view[place] ^= 0x10
        # The slot has the sum of a single chunk: the trailer has nothing to add.
        needless = length <= CHUNK_BYTES and trailer <= place < trailer + entry.trailer_length
        copied = copy_one(reader, key_digest("k"), target)
        assert copied == (length if needless else None), place
        assert not needless or target == pattern(KEYS[0], 1, length)
        view[place] ^= 0x10
        assert reader.find(key_digest("k")) is not None
    assert copy_one(reader, key_digest("k"), target) is not None


def test_a_trailer_of_another_value_is_a_miss() -> None:
    """Whole and undamaged, and it fits the bytes; but the slot is still that of the value before."""
    segment, view = new_segment(MIB)
    entry = put(segment, "k", 1, b"first value.")
    trailer = encode_trailer(TrailerBody("default", "k", chunk_sums(b"second value")))
    view[entry.offset : entry.offset + 12] = b"second value"
    start = entry.offset + trailer_offset(12)
    view[start : start + len(trailer)] = trailer
    reader = SegmentReader(view)
    assert reader.find(key_digest("k")) is None
    assert copy_one(reader, key_digest("k"), empty(12)) is None


def test_a_freed_slot_holds_nothing() -> None:
    """Others remember slot numbers: what they read there must not look like an object."""
    segment, _ = new_segment(MIB)
    entry = put(segment, "k", 1, b"value")
    segment.remove(entry.digest)
    assert segment.table.slot_bytes(entry) == bytes(SLOT_BYTES)


def test_index_entries_that_lead_nowhere_are_misses() -> None:
    segment, view = new_segment(MIB)
    put(segment, "a", 1, b"a")
    put(segment, "b", 1, b"b")
    reader = SegmentReader(view)
    index = view[segment.geometry.index_offset : segment.geometry.slots_offset]
    for position in range(0, len(index), 32):
        if index[position : position + 16] == key_digest("a"):
            for number in (1, 2, segment.geometry.slots, 2**32 - 1):  # b's slot, a free one, none
                index[position + 16 : position + 20] = number.to_bytes(4, "little")
                assert reader.contains(key_digest("a"))
                assert reader.find(key_digest("a")) is None


def test_a_search_in_an_index_full_of_garbage_ends() -> None:
    segment, view = new_segment(64 * MIB)
    index = view[segment.geometry.index_offset : segment.geometry.slots_offset]
    np.frombuffer(index, np.uint8).reshape(-1, 32)[:, :] = [7] * 20 + [1, 0, 0, 0] + [0] * 8
    assert not SegmentReader(view).contains(key_digest("a"))


def test_what_changes_between_pieces_counts_only_while_it_is_not_copied() -> None:
    length = 2 * PIECE_BYTES + 5
    segment, view = new_segment(16 * MIB)
    value = random.Random(1).randbytes(length)
    entry = put(segment, "k", 1, value)
    reader = SegmentReader(view)
    for place, survives in ((10, True), (PIECE_BYTES - 1, True), (PIECE_BYTES, False)):
        target = empty(length)
        pieces = reader.copy_steps(reader.spots([key_digest("k")]), [target])
        assert next(pieces) == PIECE_BYTES
        view[entry.offset + place] ^= 1
        if survives:
            assert next(pieces) == 2 * PIECE_BYTES
        with pytest.raises(StopIteration) as stop:
            next(pieces)
        view[entry.offset + place] ^= 1
        assert stop.value.value == bytes([survives])
        assert not survives or target == value


@pytest.mark.parametrize("threads", [1, 3])
def test_each_piece_is_verified_whoever_copies_it(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    with_threads(monkeypatch, threads)
    length = 13 * PIECE_BYTES + 5
    segment, view = new_segment(64 * MIB)
    value = random.Random(2).randbytes(length)
    entry = put(segment, "k", 1, value)
    reader = SegmentReader(view)
    target = empty(length)
    assert copy_one(reader, key_digest("k"), target) == length
    assert target == value
    for place in (*range(17, length, PIECE_BYTES), length - 1):
        view[entry.offset + place] ^= 1
        assert copy_one(reader, key_digest("k"), target) is None
        view[entry.offset + place] ^= 1
    assert copy_one(reader, key_digest("k"), target) is not None


def test_a_copy_from_an_extent_that_is_reused_meanwhile_fails() -> None:
    length = PIECE_BYTES + 5
    segment, view = new_segment(8 * MIB)
    offset = put(segment, KEYS[0], 1, pattern(KEYS[0], 1, length)).offset
    reader = SegmentReader(view)
    pieces = reader.copy_steps(reader.spots([DIGESTS[KEYS[0]]]), [empty(length)])
    next(pieces)
    segment.remove(DIGESTS[KEYS[0]])
    assert put(segment, KEYS[1], 2, pattern(KEYS[1], 2, length)).offset == offset
    with pytest.raises(StopIteration) as stop:
        next(pieces)
    assert stop.value.value == b"\0"


@pytest.mark.parametrize("value", [b"", b"the same bytes"])
def test_the_trailer_of_another_object_of_the_same_bytes_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    """That came to lie there between the looks at slot and trailer: only their keys differ."""
    segment, view = new_segment(MIB)
    offset = put(segment, KEYS[0], 1, value).offset
    before = [decode_slot]

    def meanwhile(packed: bytes) -> Slot | None:
        if len(before) == 1:
            before.append(decode_slot)
            segment.remove(DIGESTS[KEYS[0]])
            assert put(segment, KEYS[1], 2, value).offset == offset
        return decode_slot(packed)

    monkeypatch.setattr(reader_module, "decode_slot", meanwhile)
    assert SegmentReader(view).find(DIGESTS[KEYS[0]]) is None
    found = present(SegmentReader(view).find(DIGESTS[KEYS[1]]))
    assert found[1].key == KEYS[1]


# --- while the owner churns ------------------------------------------------------------------


def churn(segment: Segment, rng: random.Random, clock: int) -> None:
    """One step of the owner: overwrite, put with eviction, or remove."""
    key = rng.choice(KEYS)
    if rng.random() < 0.15:
        segment.remove(DIGESTS[key])
    else:
        lengths = [0, 100, 4096, 20_000, 70_000, 200_000, CHUNK_BYTES + 4096]
        length = rng.choices(lengths, [5, 10, 30, 20, 10, 10, 2])[0]
        put(segment, key, clock, pattern(key, clock, length))
    segment.objects.take_withdrawn()


def read_many(reader: SegmentReader, attempts: int, seed: int) -> dict[str, int]:
    """Counts of copies that were right, misses, and wrong copies."""
    rng = random.Random(seed)
    target = empty(2 * MIB)
    rooms = [empty(2 * MIB) for _ in KEYS]
    counts = {"right": 0, "missing": 0, "refused": 0, "wrong": 0}
    for number in range(attempts):
        key = rng.choice(KEYS)
        listed = reader.contains(DIGESTS[key])
        count(counts, key, copy_many(reader, [DIGESTS[key]], [target])[0], target, listed)
        if number % len(KEYS) == 0:
            lengths = copy_many(reader, list(DIGESTS.values()), rooms)
            for each, length, room in zip(KEYS, lengths, rooms, strict=True):
                count(counts, each, length, room, listed=False)
    return counts


def count(counts: dict[str, int], key: str, length: int, room: memoryview, listed: bool) -> None:
    """The outcome of one copy. Every value says by itself which version it is."""
    if length < 0:
        counts["refused" if listed else "missing"] += 1
    else:
        value = bytes(room[:length])
        clock = int.from_bytes(value[16:24], "little")
        counts["right" if value == pattern(key, clock, length) else "wrong"] += 1


class Unverified(SegmentReader):
    """Copies without looking at the sums: what the churn does to a reader that trusts."""

    def copy_without_checks(self, digest: bytes, target: memoryview) -> tuple[Slot, bytes] | None:
        found = self.find(digest)
        if found is None:
            return None
        slot = found[0]
        source = self._bytes[slot.offset : slot.offset + slot.length]
        np.copyto(np.frombuffer(target, np.uint8, slot.length), source)
        return slot, bytes(target[: slot.length])


def test_another_process_never_reads_a_wrong_byte() -> None:
    geometry = plan_geometry(2 * MIB)
    memory = create_memory(geometry.total_bytes, "p2pstore-test")
    segment, _ = new_segment(2 * MIB, memory.view)
    descriptor = memory.read_only_descriptor()
    arguments = [sys.executable, __file__, str(descriptor), str(geometry.total_bytes), "80000"]
    with subprocess.Popen(
        arguments, pass_fds=[descriptor], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as child:
        rng = random.Random(7)
        deadline = time.monotonic() + 120
        clock = 0
        while child.poll() is None:
            clock += 1
            churn(segment, rng, clock)
            if time.monotonic() > deadline:
                child.kill()
        assert child.stdout is not None
        output = child.stdout.read()
    assert child.returncode == 0
    counts = json.loads(output)
    assert counts["wrong"] == 0
    assert counts["trusting reader saw torn bytes"] > 0, "the churn did not disturb anybody"
    assert counts["right"] > 8000
    check_segment(segment)
    del segment
    memory.close()


def test_a_thread_never_reads_a_wrong_byte() -> None:
    segment, view = new_segment(2 * MIB)
    stop = threading.Event()

    def own() -> None:
        rng = random.Random(9)
        clock = 0
        while not stop.is_set():
            clock += 1
            churn(segment, rng, clock)

    owner = threading.Thread(target=own)
    owner.start()
    try:
        counts = read_many(SegmentReader(view), 9000, seed=3)
    finally:
        stop.set()
        owner.join(30)
    assert not owner.is_alive()
    assert counts["wrong"] == 0
    assert counts["right"] > 300
    check_segment(segment)


def read_in_child(descriptor: int, length: int, attempts: int) -> None:
    """The other process: it waits for the first object, then reads."""
    view = map_read_only(descriptor, length)
    reader = Unverified(view)
    deadline = time.monotonic() + 20
    while not any(reader.contains(digest) for digest in DIGESTS.values()):
        if time.monotonic() > deadline:
            sys.exit("nothing was put")
    counts = read_many(reader, attempts, seed=1)
    torn = 0
    target = empty(2 * MIB)
    rng = random.Random(4)
    while not torn and time.monotonic() < deadline + 20:
        key = rng.choice(KEYS)
        found = reader.copy_without_checks(DIGESTS[key], target)
        if found is not None:
            slot, value = found
            torn += value != pattern(key, slot.version.clock, slot.length)
    print(json.dumps({**counts, "trusting reader saw torn bytes": torn}))


if __name__ == "__main__":
    read_in_child(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
