"""A segment that outlives its peer: the next life begins with every object that was there and with nothing else, and
memory that clients of earlier lives read, or may write to, is not reused."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, get_args

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from p2pstore.errors import CapacityExceeded
from p2pstore.memory.entries import ObjectEntry, Written
from p2pstore.memory.kept_memory import (
    EARLIER_CLIENTS,
    Expected,
    Kept,
    KeptElsewhere,
    Note,
    checksum_of,
    checksum_of_quotas,
    decode_note,
    encode_note,
    read_kept,
    tail_bytes,
    tail_offset,
)
from p2pstore.memory.policies import PolicyName, make_policy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    GRANULE_BYTES,
    SLOT_BYTES,
    Pin,
    SegmentState,
    SlotState,
    plan_geometry,
)
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS
from p2pstore.objects import Version, chunk_sums, key_digest, root_checksum
from p2pstore.transfer.reading.segment_reader import SegmentReader
from simulation.segment_checks import check_segment
from tests.mapped_copies import copy_one
from tests.unit.test_segment import (
    KEYS,
    ME,
    NAMESPACE,
    SegmentAgainstDictionary,
    fill,
    put,
    trailer_for,
    value_of,
)

BOOT = bytes(range(16))
CLUSTER = checksum_of("cluster")


class Lives:
    """One memory, and the segments that follow one another in it."""

    def __init__(
        self, granules: int, slots: int | None = None, policy: PolicyName = "lru", **quotas: int
    ) -> None:
        self.geometry = plan_geometry(granules * GRANULE_BYTES, slots)
        self.buffer = bytearray(tail_offset(self.geometry) + tail_bytes(self.geometry))
        self.policy = policy
        self.quotas = quotas
        self.life = 0
        self.segment = self._segment(Kept())

    @property
    def view(self) -> memoryview:
        return memoryview(self.buffer)

    @property
    def marks(self) -> memoryview:
        begin = tail_offset(self.geometry) + GRANULE_BYTES
        return self.view[begin : begin + self.geometry.slots]

    @property
    def expected(self) -> Expected:
        segment_id = self.life.to_bytes(16, "little")
        return Expected(self.geometry, segment_id, BOOT, CLUSTER, checksum_of_quotas(self.quotas))

    def read(self, *, has_users: bool = False, **changes: object) -> Kept | str:
        return read_kept(self.view, replace(self.expected, **changes), has_users=has_users)  # type: ignore[arg-type]  # by name

    def _segment(self, kept: Kept, now: float = 100.0) -> Segment:
        self.life += 1
        note = encode_note(
            Note(self.geometry.slots, BOOT, CLUSTER, checksum_of_quotas(self.quotas), self.life)
        )
        begin = tail_offset(self.geometry)
        self.buffer[begin : begin + len(note)] = note
        return Segment(
            self.view,
            segment_id=self.life.to_bytes(16, "little"),
            incarnation=self.life,
            geometry=self.geometry,
            policy=make_policy(self.policy),
            quotas=self.quotas,
            marks=self.marks,
            kept=kept,
            now=now,
        )

    def restart(self, *, has_users: bool = False, now: float = 100.0) -> Segment:
        """The peer is killed and started again."""
        kept = self.read(has_users=has_users)
        assert isinstance(kept, Kept), kept
        assert kept.lives == self.life
        self.segment = self._segment(kept, now)
        check_segment(self.segment)
        return self.segment


def publish_all(segment: Segment, now: float = 100.0) -> list[str]:
    """The keys of what came back."""
    return [entry.key for entry in segment.returned.entries() if segment.returned.publish(entry, now)]


def is_whole(segment: Segment, entry: ObjectEntry) -> bool:
    payload = segment.payload(entry)
    return root_checksum(len(payload), chunk_sums(payload)) == entry.version.root


class KeptSegmentAgainstDictionary(SegmentAgainstDictionary):
    """The peer is killed at any moment; a life later everything is there that was, to the byte."""

    @initialize(
        granules=st.integers(4, 24),
        slots=st.integers(2, 24),
        policy=st.sampled_from(get_args(PolicyName)),
    )
    def create(self, granules: int, slots: int, policy: PolicyName) -> None:
        super().create(granules, slots, policy)
        self.lives = Lives(granules, slots, policy)
        self.segment, self.buffer = self.lives.segment, self.lives.buffer
        self.reader = SegmentReader(self.lives.view)
        self.books.clear()  # no leases without asking here
        self.earlier_views: list[tuple[int, bytes]] = []
        self.earlier_rooms: list[tuple[int, int]] = []

    def referenced(self) -> list[ObjectEntry]:
        leases = self.segment.leases.leases
        earlier = [leases._by_number[number][0] for number in leases.of(EARLIER_CLIENTS)]
        return super().referenced() + earlier

    @rule(clients_stay=st.booleans())
    def restart(self, clients_stay: bool) -> None:
        if clients_stay:
            self.earlier_views += [(entry.offset, value) for _, entry, value in self.leases.values()]
            self.earlier_views += [(entry.offset, value) for entry, value in self.sending]
            own = [each for each in self.kept_reservations() if each.session != EARLIER_CLIENTS]
            self.earlier_rooms += [(each.offset, each.capacity) for each in own]
        else:
            self.earlier_views, self.earlier_rooms = [], []
        self.segment = self.lives.restart(has_users=clients_stay, now=self.now)
        assert self.segment.object_count == 0
        assert not any(self.reader.contains(key_digest(key, NAMESPACE)) for key in KEYS)
        returned = {entry.key: entry for entry in self.segment.returned.entries()}
        assert returned.keys() == self.model.keys()
        publish_all(self.segment, self.now)
        self.leases, self.reservations, self.sending = {}, {}, []
        self.loans, self.small_loans = [], []
        for key, expected in list(self.model.items()):
            if 0 < expected.expires_unix_ms <= self.now * 1000:
                del self.model[key]
                continue
            expected.entry = returned[key]
            expected.pin_until = self.now + SOFT_PIN_SECONDS if expected.pin is Pin.SOFT else 0.0

    @rule()
    def earlier_clients_leave(self) -> None:
        self.segment.returned.end_earlier_clients()
        assert not self.segment.returned.has_earlier_clients
        self.earlier_views, self.earlier_rooms = [], []

    @invariant()
    def what_earlier_clients_have_stays(self) -> None:
        for offset, value in self.earlier_views:
            assert self.buffer[offset : offset + len(value)] == value
        for begin, size in self.earlier_rooms:
            for held in self.segment.objects.held.values():
                if isinstance(held, ObjectEntry):
                    assert held.offset >= begin + size or held.offset + held.extent_bytes <= begin
                elif held.session != EARLIER_CLIENTS:
                    assert held.offset >= begin + size or held.offset + held.capacity <= begin


TestKeptSegmentAgainstDictionary = KeptSegmentAgainstDictionary.TestCase
TestKeptSegmentAgainstDictionary.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)


# --- killed, torn and damaged ----------------------------------------------------------------


def images_during(lives: Lives, action: Callable[[], object]) -> list[bytes]:
    """Copies of the memory at every line of the peer's own code on memory: a `kill -9` there leaves them."""
    images = [bytes(lives.buffer)]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "p2pstore/memory" not in frame.f_code.co_filename:
            return None
        if event == "line" and lives.buffer != images[-1]:
            images.append(bytes(lives.buffer))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return [*images, bytes(lives.buffer)]


def test_a_peer_killed_at_any_step_of_a_batch_has_each_value_whole_or_not_at_all() -> None:
    lives = Lives(12, 12)
    values = {f"k{number}": value_of(number, 3000 + number) for number in range(4)}
    put(lives.segment, "evicted", value_of(9, 7 * GRANULE_BYTES))
    put(lives.segment, "before", b"kept", pin=Pin.HARD)

    def put_batch() -> None:
        rows = []
        for key, value in values.items():
            room = fill(lives.segment, value, key, ME, 100.0)
            trailer = trailer_for(value, key)
            version = Version(2, 1, root_checksum(len(value), trailer.sums))
            digest = key_digest(key, NAMESPACE)
            rows.append(Written(room.number, digest, version, trailer, len(value)))
        assert all(lives.segment.commit_new(rows, session=ME, now=100.0))

    images = images_during(lives, put_batch)
    found = set()
    for image in images:
        lives.buffer[:], lives.life = image, 1
        segment = lives.restart()
        keys = set(publish_all(segment))
        found.add(frozenset(keys & values.keys()))
        for entry in segment.entries():
            assert is_whole(segment, entry)
            if entry.key in values:
                assert segment.payload(entry) == values[entry.key]
        assert "before" in keys
        check_segment(segment)
    assert {frozenset(), frozenset(values)} < found, "some are struck in the middle"


@given(seed=st.integers(0, 2**32), has_users=st.booleans(), where=st.sampled_from(["all", "slots"]))
@settings(max_examples=150, deadline=None)
def test_damage_costs_objects_and_never_shows_other_bytes(
    seed: int, has_users: bool, where: str
) -> None:
    rng = random.Random(seed)
    lives = Lives(24, 24)
    segment = lives.segment
    put_ever: set[bytes] = set()
    for number in range(rng.randrange(1, 30)):
        value = value_of(number, rng.choice((0, 20, 5_000, 20_000)))
        put(segment, rng.choice(KEYS), value, clock=10 + number)
        put_ever.add(value)
        if rng.random() < 0.3:
            segment.remove(key_digest(rng.choice(KEYS), NAMESPACE))
    viewed = [entry for entry in segment.entries() if rng.random() < 0.4]
    for entry in viewed:
        segment.leases.lease(entry, session="client", now=100.0)
    before = {entry.offset: entry.extent_bytes for entry in viewed}
    begin, end = 0, len(lives.buffer)
    if where == "slots":
        begin = lives.geometry.slots_offset
        end = begin + lives.geometry.slots * SLOT_BYTES
    for _ in range(rng.choice((1, 3, 40))):
        at = rng.randrange(begin, end)
        length = rng.choice((1, 8, 64))
        lives.buffer[at : at + length] = rng.randbytes(min(length, len(lives.buffer) - at))
    try:
        kept = lives.read(has_users=has_users)
    except KeptElsewhere:
        return
    if isinstance(kept, str):
        return
    segment = lives._segment(kept)
    check_segment(segment)
    if has_users and where == "slots":
        taken = {held.offset for held in segment.objects.held.values()}
        assert before.keys() <= taken, "what a client looks at would be used for something else"
    for entry in segment.returned.entries():
        if is_whole(segment, entry):
            segment.returned.publish(entry, 100.0)
        else:
            segment.returned.drop(entry)
    check_segment(segment)
    reader = SegmentReader(lives.view)
    target = memoryview(bytearray(32_768))
    for key in KEYS:
        copied = copy_one(reader, key_digest(key, NAMESPACE), target)
        assert copied is None or bytes(target[:copied]) in put_ever


def test_a_slot_torn_while_a_client_looks_at_its_bytes_ends_the_memory() -> None:
    lives = Lives(8)
    entry = put(lives.segment, "k", b"value")
    lives.segment.leases.lease(entry, session="client", now=100.0)
    lives.buffer[lives.geometry.slots_offset + entry.slot * SLOT_BYTES + 40] ^= 1
    assert "earlier lives cannot be told from the rest" in str(lives.read(has_users=True))
    assert lives.read(has_users=False) == Kept(1, [], [])


def test_of_two_versions_the_newer_comes_back_and_the_viewed_one_keeps_its_bytes() -> None:
    """Killed between publishing one and withdrawing the other."""
    lives = Lives(8)
    old = put(lives.segment, "k", b"old", clock=1)
    lives.segment.leases.lease(old, session="client", now=100.0)
    begin = lives.geometry.slots_offset + old.slot * SLOT_BYTES
    slot = bytes(lives.buffer[begin : begin + SLOT_BYTES])
    put(lives.segment, "k", b"new", clock=2)
    lives.buffer[begin : begin + SLOT_BYTES] = slot
    segment = lives.restart(has_users=True)
    (entry,) = segment.returned.entries()
    assert bytes(segment.payload(entry)) == b"new"
    assert publish_all(segment) == ["k"]
    for number in range(8):
        put(segment, f"other {number}", value_of(number, 3900))
    assert lives.buffer[old.offset : old.offset + 3] == b"old"
    segment.returned.end_earlier_clients()
    check_segment(segment)


# --- in the new life -------------------------------------------------------------------------


def test_what_has_returned_gives_way_like_everything_else() -> None:
    lives = Lives(4)
    put(lives.segment, "old", value_of(1, 3900), clock=1)
    put(lives.segment, "new", value_of(2, 3900), clock=2)
    put(lives.segment, "pinned", value_of(3, 3900), clock=3, pin=Pin.HARD)
    segment = lives.restart()
    assert [entry.key for entry in segment.returned.entries()] == ["old", "new", "pinned"]
    assert list(segment.room.coldest()) == [], "nobody may write these to an SSD yet"
    put(segment, "a", value_of(4, 3900))  # where nothing was
    put(segment, "b", value_of(4, 3900), pin=Pin.HARD)
    assert [entry.key for entry in segment.returned.entries()] == ["new", "pinned"]
    put(segment, "c", value_of(5, 3900), pin=Pin.HARD)
    assert [entry.key for entry in segment.returned.entries()] == ["pinned"]
    assert segment.objects.take_withdrawn() == [], "nobody was told of these"
    with pytest.raises(CapacityExceeded):
        segment.reserve(4 * 3900, 200, session="x", now=100.0)
    check_segment(segment)


def test_what_was_put_again_wins_unless_it_is_older() -> None:
    lives = Lives(8)
    for key in ("put again", "older here", "over"):
        put(lives.segment, key, b"of earlier", clock=10, expires_unix_ms=150_000)
    segment = lives.restart()
    mine = put(segment, "put again", b"new", clock=11)
    other = put(segment, "older here", b"of another peer", clock=9)
    by_key = {entry.key: entry for entry in segment.returned.entries()}
    assert not segment.returned.publish(by_key["put again"], 100.0)
    assert segment.returned.publish(by_key["older here"], 100.0)
    assert not segment.returned.publish(by_key["over"], 151.0)
    assert segment.objects.take_withdrawn() == [other]
    assert segment.find(mine.digest, 100.0) is mine
    found = segment.find(other.digest, 100.0)
    assert found is by_key["older here"]
    assert bytes(segment.payload(found)) == b"of earlier"
    assert len(segment.returned) == 0
    check_segment(segment)


def test_readers_take_it_for_absent_until_it_is_published() -> None:
    lives = Lives(8)
    entry = put(lives.segment, "k", b"value")
    lives.segment.close()
    segment = lives.restart()
    reader = SegmentReader(lives.view)
    assert reader.header.state is SegmentState.OPEN
    assert reader.find(entry.digest) is None
    (returned,) = segment.returned.entries()
    slot = segment.table.slot_bytes(returned)
    assert slot[1] == SlotState.RETURNED, "who comes by a number of a slot must not take it either"
    segment.returned.publish(returned, 100.0)
    assert reader.find(entry.digest) is not None
    segment.remove(entry.digest)
    segment = lives.restart()
    assert segment.returned.entries() == []


def test_objects_that_lie_across_new_quotas_are_given_up() -> None:
    lives = Lives(8)
    for number in range(4):
        put(lives.segment, f"k{number}", value_of(number, 7000), clock=number + 1)
    lives.quotas = {"jobs": 3 * GRANULE_BYTES}
    assert "quotas have changed" in str(lives.read(has_users=True, quotas=0))
    kept = lives.read(quotas=0)
    assert isinstance(kept, Kept)
    segment = lives._segment(kept)
    check_segment(segment)
    assert publish_all(segment) == ["k0", "k1", "k3"]
    assert segment.quotas["jobs"].used_bytes == 0
    check_segment(segment)


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"segment_id": b"another".ljust(16)}, "not what this peer's last life had"),
        ({"segment_id": b""}, "not what this peer's last life had"),
        ({"boot": bytes(16)}, "before this machine was started"),
        ({"geometry": plan_geometry(16 * GRANULE_BYTES)}, "another size"),
    ],
)
def test_memory_that_cannot_be_used_says_why(changes: dict[str, object], why_not: str) -> None:
    lives = Lives(8)
    put(lives.segment, "k", b"value")
    assert why_not in str(lives.read(**changes))  # type: ignore[arg-type]  # by name


def test_memory_of_others_is_left_alone() -> None:
    lives = Lives(8)
    with pytest.raises(KeptElsewhere, match="another cluster"):
        lives.read(cluster=1)
    lives.buffer[8] = 2
    with pytest.raises(KeptElsewhere, match="format 2"):
        lives.read()
    lives.buffer[0] = 0
    assert lives.read() == "its header is damaged"
    lives = Lives(8)
    lives.buffer[tail_offset(lives.geometry) + 20] ^= 1
    assert "damaged" in str(lives.read())


def test_the_note_has_golden_bytes_and_grows_by_a_new_format_only() -> None:
    note = Note(slots=1024, boot=BOOT, cluster=2, quotas=3, lives=4)
    packed = encode_note(note)
    assert packed.hex() == (
        "503250534b5054000100000000040000000102030405060708090a0b0c0d0e0f"
        "020000000000000003000000000000000400000000000000f8374aee249df31b"
    )
    assert decode_note(packed) == note
    assert decode_note(packed[:-1]) is None
    assert decode_note(b"\0" * 64) is None
    with pytest.raises(Exception, match="format 2"):
        newer = packed[:8] + b"\2" + packed[9:-8]
        decode_note(newer + xxhash.xxh3_64_intdigest(newer).to_bytes(8, "little"))
