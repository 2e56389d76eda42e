"""The owner's side of a segment, against a dictionary: exact bytes or a miss, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from p2pstore.client.lease_book import LeaseBook
from p2pstore.errors import CapacityExceeded, ObjectTooLarge, StoreClosed
from p2pstore.memory.entries import (
    MAX_RESERVATIONS_PER_SESSION,
    ObjectEntry,
    Reservation,
    SmallObjectsLent,
    Written,
)
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES, HazardPage
from p2pstore.memory.key_listing import KeyListing
from p2pstore.memory.policies import DEFAULT_POLICY, PolicyName, make_policy
from p2pstore.memory.references import Loan
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    GRANULE_BYTES,
    SegmentState,
    SlotState,
    TrailerBody,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    encode_trailer,
    extent_bytes,
    plan_geometry,
    trailer_offset,
)
from p2pstore.memory.segment_layout import Pin as PinKind
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS
from p2pstore.memory.victims import AHEAD_SHARE
from p2pstore.objects import GIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.transfer.reading.segment_reader import SegmentReader
from simulation.segment_checks import check_segment
from tests.mapped_copies import copy_one
from tests.present import present
from tests.stored import stored
from tests.unit.segment_churn import LOADS, churn, segment_for

NONE, SOFT, HARD = PinKind.NONE, PinKind.SOFT, PinKind.HARD
NAMESPACE = "tests"
ME = "the peer itself"


def new_segment(
    granules: int,
    slots: int | None = None,
    policy: PolicyName = DEFAULT_POLICY,
    barrier: Callable[[], None] = lambda: None,
) -> tuple[Segment, bytearray]:
    geometry = plan_geometry(granules * GRANULE_BYTES, slots)
    buffer = bytearray(b"\xa5" * geometry.total_bytes)  # earlier contents must not matter
    segment = Segment(
        memoryview(buffer),
        segment_id=b"s" * 16,
        incarnation=3,
        geometry=geometry,
        policy=make_policy(policy),
        barrier=barrier,
    )
    return segment, buffer


def value_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def trailer_for(value: bytes, key: str, pin: int = 0, expires_unix_ms: int = 0) -> TrailerBody:
    return TrailerBody(NAMESPACE, key, chunk_sums(value), expires_unix_ms, 1, pin)


def fill(segment: Segment, value: bytes, key: str, session: object, now: float) -> Reservation:
    room = len(encode_trailer(trailer_for(value, key)))
    reservation = segment.reserve(len(value), room, session=session, now=now)
    segment.reservation_view(reservation.number, session)[: len(value)] = value
    return reservation


def put(
    segment: Segment,
    key: str,
    value: bytes,
    *,
    clock: int = 1,
    soft: bool = False,
    pin: int = 0,
    expires_unix_ms: int = 0,
    now: float = 100.0,
    follows: str = "",
) -> ObjectEntry:
    reservation = fill(segment, value, key, ME, now)
    trailer = trailer_for(value, key, pin, expires_unix_ms)
    return segment.commit(
        Written(
            reservation.number,
            key_digest(key, NAMESPACE),
            Version(clock, 1, root_checksum(len(value), trailer.sums)),
            trailer,
            len(value),
            key_digest(follows, NAMESPACE) if follows else b"",
        ),
        session=ME,
        soft=soft,
        now=now,
    )


@dataclass
class Expected:
    """The model's knowledge of a live object."""

    value: bytes
    entry: ObjectEntry
    soft: bool
    pin: PinKind
    pin_until: float
    expires_unix_ms: int


KEYS = [f"key/{number}" for number in range(12)]
HOLDERS = ["first", "second"]


class SegmentAgainstDictionary(RuleBasedStateMachine):
    """The model holds what can be found. What the segment reports as withdrawn leaves it, if it was
    allowed to go; afterwards both must agree to the byte."""

    @initialize(
        granules=st.integers(4, 24),
        slots=st.integers(2, 24),
        policy=st.sampled_from(get_args(PolicyName)),
    )
    def create(self, granules: int, slots: int, policy: PolicyName) -> None:
        self.segment, self.buffer = new_segment(granules, slots, policy)
        self.reader = SegmentReader(memoryview(self.buffer))
        self.model: dict[str, Expected] = {}
        self.reservations: dict[int, tuple[str, str, bytes]] = {}
        self.leases: dict[int, tuple[str, ObjectEntry, bytes]] = {}
        self.sending: list[tuple[ObjectEntry, bytes]] = []
        self.loans: list[tuple[Loan, ObjectEntry, bytes]] = []
        self.small_loans: list[tuple[SmallObjectsLent, list[ObjectEntry], list[bytes]]] = []
        self.books: dict[str, LeaseBook] = {}
        self.views: list[tuple[str, ObjectEntry, memoryview, bytes]] = []
        self.now = 1000.0
        self.clocks = itertools.count(10)
        self.seeds = itertools.count()
        for session in HOLDERS:
            self.connect(session)

    def connect(self, session: str) -> None:
        """A client that may lease without asking, unless the memory outlives its owner."""
        if self.segment.references.marks is not None:
            return
        page = memoryview(bytearray(HAZARD_PAGE_BYTES))
        self.segment.leases.watch_hazards(session, page.toreadonly())
        self.books[session] = LeaseBook(HazardPage(page), 1 << 40)

    # --- what the model derives

    def referenced(self) -> list[ObjectEntry]:
        return (
            [entry for _, entry, _ in self.leases.values()]
            + [entry for entry, _ in self.sending]
            + [entry for _, entry, _, _ in self.views]
        )

    def collect(self, replaced: ObjectEntry | None = None) -> None:
        """Take in what the segment withdrew by itself."""
        for entry in self.segment.objects.take_withdrawn():
            if entry is replaced:
                continue
            expected = self.model.pop(entry.key)
            assert expected.entry is entry
            if not 0 < expected.expires_unix_ms <= self.now * 1000:
                pinned = expected.pin is HARD and not expected.soft
                assert not pinned or 0 < expected.pin_until <= self.now
                assert all(entry is not other for other in self.referenced())
        for expected in self.model.values():
            if 0 < expected.pin_until <= self.now and expected.entry.pin is NONE:
                expected.pin, expected.pin_until = NONE, 0.0

    def could_fit(self, size: int) -> bool:
        """Whether evicting all that may go leaves `size` bytes in one piece."""
        stays = [
            (entry.offset, entry.extent_bytes)
            for entry in [*self.referenced(), *(e.entry for e in self.model.values())]
            if entry.references or (entry.pin is HARD and not entry.soft)
        ]
        stays += [(kept.offset, kept.capacity) for kept in self.kept_reservations()]
        position, widest = self.segment.geometry.data_offset, 0
        for start, length in [*sorted(set(stays)), (self.segment.geometry.total_bytes, 0)]:
            widest = max(widest, start - position)
            position = start + length
        return widest >= size

    def kept_reservations(self) -> list[Reservation]:
        return list(self.segment.reservations)

    # --- rules

    @rule(
        key=st.sampled_from(KEYS),
        session=st.sampled_from(HOLDERS),
        length=st.one_of(st.integers(0, 20), st.integers(0, 9 * GRANULE_BYTES)),
    )
    def reserve(self, key: str, session: str, length: int) -> None:
        value = value_of(next(self.seeds), length)
        room = len(encode_trailer(trailer_for(value, key)))
        size = extent_bytes(length, room)
        if size > self.segment.data_bytes:
            with pytest.raises(ObjectTooLarge):
                self.segment.reserve(length, room, session=session, now=self.now)
            return
        slots_left = self.segment.geometry.slots - len(self.segment.objects.held)
        try:
            reservation = fill(self.segment, value, key, session, self.now)
        except CapacityExceeded:
            self.collect()
            evictable = [e for e in self.model.values() if e.entry in self.segment.objects.order]
            assert not self.could_fit(size) or (slots_left == 0 and not evictable)
            return
        self.collect()
        assert reservation.capacity == size
        self.reservations[reservation.number] = (session, key, value)

    @rule(length=st.one_of(st.integers(0, 20), st.integers(0, 9 * GRANULE_BYTES)))
    def make_room_ahead(self, length: int) -> None:
        can_spare = self.segment.room.can_spare(length, 100)
        self.segment.room.make_ahead(length, 100, now=self.now)
        self.collect()
        with contextlib.suppress(CapacityExceeded, ObjectTooLarge):
            made = self.segment.reserve(length, 100, session="next", now=self.now)
            assert not can_spare or self.segment.objects.take_withdrawn() == []
            self.collect()
            self.segment.abort(made.number, session="next")

    @precondition(lambda self: self.reservations)
    @rule(
        data=st.data(),
        old=st.booleans(),
        soft=st.booleans(),
        pin=st.sampled_from(PinKind),
        ttl=st.none() | st.integers(1, 50),
        shorter=st.floats(0, 1) | st.just(0.0),
        follows=st.none() | st.sampled_from(KEYS),
    )
    def commit(
        self,
        data: st.DataObject,
        old: bool,
        soft: bool,
        pin: PinKind,
        ttl: int | None,
        shorter: float,
        follows: str | None,
    ) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        session, key, value = self.reservations.pop(number)
        value = value[: len(value) - int(shorter * len(value))]
        expires = int((self.now + ttl) * 1000) if ttl else 0
        trailer = trailer_for(value, key, pin, expires)
        version = Version(1 if old else next(self.clocks), 1, root_checksum(len(value), trailer.sums))
        before = self.model.get(key)
        try:
            entry = self.segment.commit(
                Written(
                    number,
                    key_digest(key, NAMESPACE),
                    version,
                    trailer,
                    len(value),
                    key_digest(follows, NAMESPACE) if follows else b"",
                ),
                session=session,
                soft=soft,
                now=self.now,
            )
        except ValueError:  # the expiry made the trailer longer than what was reserved
            assert expires
            self.segment.abort(number, session=session)
            return
        expired = before is not None and 0 < before.expires_unix_ms <= self.now * 1000
        if before is not None and before.entry.version >= version and not expired:
            assert entry is before.entry
            before.soft = before.soft and soft
            assert self.segment.objects.take_withdrawn() == []
        else:
            until = self.now + SOFT_PIN_SECONDS if pin is SOFT else 0.0
            self.collect(replaced=before.entry if before else None)
            self.model[key] = Expected(value, entry, soft, pin, until, expires)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        session, _, _ = self.reservations.pop(number)
        with pytest.raises(ValueError, match="another session"):
            self.segment.abort(number, session="a stranger")
        self.segment.abort(number, session=session)
        with pytest.raises(ValueError, match="has ended"):
            self.segment.abort(number, session=session)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), session=st.sampled_from(HOLDERS))
    def lease(self, data: st.DataObject, session: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        expected = self.model[key]
        number = self.segment.leases.lease(expected.entry, session=session, now=self.now)
        self.leases[number] = (session, expected.entry, expected.value)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        session, _, _ = self.leases.pop(number)
        self.segment.leases.release(number, session=session)
        with pytest.raises(ValueError, match="has ended"):
            self.segment.leases.release(number, session=session)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def begin_sending(self, data: st.DataObject) -> None:
        expected = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        self.segment.references.acquire(expected.entry)
        self.sending.append((expected.entry, expected.value))

    @precondition(lambda self: self.sending)
    @rule()
    def end_sending(self) -> None:
        entry, _ = self.sending.pop()
        self.segment.references.let_go(entry)

    @rule(key=st.sampled_from(KEYS))
    def borrow(self, key: str) -> None:
        """As another thread does, in between."""
        lent = self.segment.leases.lend(key_digest(key, NAMESPACE), self.now)
        found = self.segment.find(key_digest(key, NAMESPACE), self.now)
        assert (lent[1] if lent else None) is found
        if lent is not None:
            self.loans.append((*lent, self.model[key].value))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1), room=st.integers(1, 3 * GRANULE_BYTES))
    def borrow_small(self, keys: list[str], room: int) -> None:
        """Many at once."""
        digests = [key_digest(key, NAMESPACE) for key in keys]
        lent = present(self.segment.leases.lend_small(b"".join(digests), room, 4 * room, self.now))
        expected, slots, total = [], [], 0
        for digest in digests:
            found = self.segment.find(digest, self.now)
            total += found.length if found is not None and found.length <= room else 0
            if found is None or not 0 < found.length <= room or total > 4 * room:
                slots.append(bytes(64))
                continue
            expected.append(found)
            slots.append(self.segment.table.slot_bytes(found))
        assert lent.slots == b"".join(slots)
        assert lent.digests == [each.digest for each in expected]
        values = [self.model[each.key].value for each in expected]
        assert [bytes(each) for each in lent.payloads] == values
        assert lent.length_bytes == sum(map(len, values))
        if lent.handle is not None:
            self.small_loans.append((lent, expected, values))

    @precondition(lambda self: self.small_loans)
    @rule(data=st.data())
    def end_borrowing_small(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.small_loans) - 1))
        lent, _, values = self.small_loans.pop(number)
        assert [bytes(each) for each in lent.payloads] == values
        self.segment.leases.end_loan(lent.handle)

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def end_borrowing(self, data: st.DataObject) -> None:
        loan, _, _ = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
        self.segment.leases.end_loan(loan)

    @precondition(lambda self: self.model and self.books)
    @rule(data=st.data(), session=st.sampled_from(HOLDERS))
    def view(self, data: st.DataObject, session: str) -> None:
        """A client that maps the memory leases without asking (more of that in test_hazards)."""
        expected = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        sighting = present(self.reader.sight(expected.entry.digest))
        memory = memoryview(self.buffer)
        view = self.books[session].take(expected.entry.digest, sighting, memory)
        assert (view is None) == sighting.expired
        if view is not None:
            self.views.append((session, expected.entry, view, expected.value))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def let_go_of_a_view(self, data: st.DataObject) -> None:
        session = self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))[0]
        assert self.books[session].take_ended([], everything=True) == []

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        removed = self.segment.remove(key_digest(key, NAMESPACE))
        expected = self.model.pop(key, None)
        assert removed is (expected.entry if expected else None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), pin=st.sampled_from(PinKind), seconds=st.none() | st.integers(1, 40))
    def set_pin(self, data: st.DataObject, pin: PinKind, seconds: int | None) -> None:
        expected = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        until = self.now + seconds if seconds else 0.0
        self.segment.objects.set_pin(expected.entry, pin, until)
        expected.pin, expected.pin_until = pin, until if pin is not NONE else 0.0

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def touch(self, key: str, count: int) -> None:
        expected = self.model.get(key)
        hits = expected.entry.hits if expected else 0
        self.segment.objects.touch(key_digest(key, NAMESPACE), count, self.now)
        if expected:
            assert (expected.entry.hits, expected.entry.last_access) == (hits + count, self.now)

    @rule(seconds=st.floats(0, 30) | st.just(2000.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        gone = self.segment.objects.expire(self.now)
        due = {key for key, e in self.model.items() if 0 < e.expires_unix_ms / 1000 <= self.now}
        assert {entry.key for entry in gone} == due
        self.collect()
        for expected in self.model.values():
            assert not 0 < expected.entry.pin_until <= self.now

    @rule(session=st.sampled_from(HOLDERS))
    def drop_session(self, session: str) -> None:
        self.segment.drop_session(session)
        self.views = [each for each in self.views if each[0] != session]
        self.connect(session)
        self.leases = {n: lease for n, lease in self.leases.items() if lease[0] != session}
        self.reservations = {n: r for n, r in self.reservations.items() if r[0] != session}

    @rule(prefix=st.sampled_from(["", "key/", "key/1", "no"]), after=st.sampled_from(["", *KEYS]))
    def list_keys(self, prefix: str, after: str) -> None:
        wanted = [key for key in sorted(self.model) if key.startswith(prefix) and key > after]
        page, more = self.segment.listing.page(NAMESPACE, prefix, after, 3)
        assert ([entry.key for entry in page], more) == (wanted[:3], len(wanted) > 3)

    # --- after every step

    @invariant()
    def agrees(self) -> None:
        segment = self.segment
        check_segment(segment)
        assert segment.objects.take_withdrawn() == []
        assert segment.object_count == len(self.model)
        target = memoryview(bytearray(10 * GRANULE_BYTES))
        for key in KEYS:
            digest = key_digest(key, NAMESPACE)
            expected = self.model.get(key)
            copied = copy_one(self.reader, digest, target)
            assert self.reader.contains(digest) == (expected is not None)
            if expected is None:
                assert segment.find(digest, self.now) is None
                assert copied is None
                assert self.reader.find(digest) is None
                continue
            entry = expected.entry
            expired = 0 < expected.expires_unix_ms / 1000 <= self.now
            assert segment.find(digest, self.now) is (None if expired else entry)
            assert segment.payload(entry) == expected.value
            assert (entry.pin, entry.pin_until) == (expected.pin, expected.pin_until)
            assert entry.soft == expected.soft
            if copied is not None:  # by the clock of the reader it has expired, otherwise
                assert target[:copied] == expected.value
            assert copied is not None or expected.expires_unix_ms
            found = present(self.reader.find(digest))
            assert found[1].pin == expected.pin

    @invariant()
    def what_is_held_stays(self) -> None:
        for _, entry, value in self.leases.values():
            assert self.segment.payload(entry) == value
        for entry, value in self.sending:
            assert self.segment.payload(entry) == value
        small = [
            (entry, value)
            for _, entries, values in self.small_loans
            for entry, value in zip(entries, values, strict=True)
        ]
        for entry, value in [*((entry, value) for _, entry, value in self.loans), *small]:
            assert self.segment.payload(entry) == value
        for _, _, view, value in self.views:
            assert view == value
        for number, (session, _, value) in self.reservations.items():
            assert self.segment.reservation_view(number, session) == value
        for session in HOLDERS:
            leased = [entry.length for owner, entry, _ in self.leases.values() if owner == session]
            viewed = {id(entry): entry for owner, entry, *_ in self.views if owner == session}
            leased += [entry.length for entry in viewed.values()]
            assert self.segment.leases.leased_bytes_of(session) == sum(leased)
        held = {id(entry): entry.extent_bytes for entry in self.referenced()}
        if not self.segment.references.loans.any_known:
            assert self.segment.leased_bytes == sum(held.values())


TestSegmentAgainstDictionary = SegmentAgainstDictionary.TestCase
TestSegmentAgainstDictionary.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

# --- what other threads send ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "replaced", "evicted", "expired"])
def test_what_is_lent_stays_until_its_end(how: str) -> None:
    segment, _ = new_segment(4)
    value = one_granule(1)
    expires_unix_ms = 150_000 if how == "expired" else 0
    entry = put(segment, "lent", value, expires_unix_ms=expires_unix_ms, now=100.0)
    lent = present(segment.leases.lend(entry.digest, 101.0))
    assert lent[1] is entry
    if how == "removed":
        segment.remove(entry.digest)
    elif how == "replaced":
        put(segment, "lent", one_granule(2), clock=2, now=102.0)
    elif how == "expired":
        assert segment.objects.expire(200.0) == [entry]
    for number in range(8):
        put(segment, f"other {number}", one_granule(10 + number), now=200.0 + number)
        assert segment.payload(entry) == value
        check_segment(segment)
    segment.leases.end_loan(lent[0])
    for number in range(3):  # and now its room is used again
        put(segment, f"kept {number}", one_granule(20 + number), pin=HARD, now=300.0)
    put(segment, "last", one_granule(30), pin=HARD, now=301.0)
    assert segment.find(entry.digest, 302.0) is None
    assert not segment.references.loans.any_known
    check_segment(segment)


def test_what_is_given_up_is_not_lent() -> None:
    segment, _ = new_segment(4)
    entry = put(segment, "gone", one_granule(1), expires_unix_ms=150_000, now=100.0)
    assert segment.leases.lend(entry.digest, 200.0) is None
    segment.remove(entry.digest)
    assert segment.leases.lend(entry.digest, 101.0) is None
    assert segment.leases.lend(b"?" * 16, 101.0) is None
    assert not segment.references.loans.any_known


# --- what is evicted first -------------------------------------------------------------------


def one_granule(number: int) -> bytes:
    return value_of(number, 3900)


def test_soft_replicas_go_first_then_the_least_recently_used_and_soft_pins_last() -> None:
    segment, _ = new_segment(5)
    put(segment, "pinned", one_granule(0), pin=HARD, now=100)
    put(segment, "soft pin", one_granule(1), pin=SOFT, now=101)
    put(segment, "old", one_granule(2), now=102)
    put(segment, "touched", one_granule(3), now=103)
    put(segment, "replica", one_granule(4), soft=True, now=199)
    segment.objects.touch(key_digest("touched", NAMESPACE), 1, 198)
    order = []
    for number in range(4):
        put(segment, f"new {number}", one_granule(5 + number), pin=HARD, now=200)
        order += [entry.key for entry in segment.objects.take_withdrawn()]
    assert order == ["replica", "old", "touched", "soft pin"]
    with pytest.raises(CapacityExceeded, match="hard-pinned"):
        put(segment, "one more", one_granule(9), now=201)
    check_segment(segment)


def test_a_soft_replica_of_what_is_pinned_goes_as_others_do() -> None:
    """The pin is for the copies that are kept for good; who read it once does not keep it for ever."""
    segment, _ = new_segment(4)
    put(segment, "kept", one_granule(1), pin=HARD, now=1.0)
    put(segment, "read", one_granule(2), pin=HARD, soft=True, now=2.0)
    for number in range(4):
        put(segment, f"new {number}", one_granule(number), now=10.0 + number)
    assert segment.find(key_digest("kept", NAMESPACE), 20.0) is not None
    assert segment.find(key_digest("read", NAMESPACE), 20.0) is None


def test_a_lease_keeps_bytes_that_nobody_can_find_any_more() -> None:
    segment, _ = new_segment(4)
    value = one_granule(1)
    entry = put(segment, "k", value)
    lease = segment.leases.lease(entry, session="reader", now=100)
    view = segment.payload(entry)
    put(segment, "k", one_granule(2), clock=2)
    assert segment.objects.take_withdrawn() == [entry]
    assert entry.state is SlotState.DOOMED
    doomed = present(decode_slot(segment.table.slot_bytes(entry)))
    assert doomed.state is SlotState.DOOMED
    for number in range(20):
        put(segment, f"other {number}", one_granule(number))
    assert view == value
    assert view.readonly
    used = segment.used_bytes
    segment.leases.release(lease, session="reader")
    assert segment.used_bytes == used - GRANULE_BYTES
    with pytest.raises(ValueError, match="freed"):
        segment.references.acquire(entry)
    check_segment(segment)


def test_capacity_errors_say_what_keeps_the_memory() -> None:
    segment, _ = new_segment(4)
    segment.leases.lease(put(segment, "leased", one_granule(0)), session="h", now=100)
    put(segment, "pinned", one_granule(1), pin=HARD)
    segment.reserve(5000, 100, session="h", now=100)
    with pytest.raises(CapacityExceeded) as caught:
        put(segment, "k", one_granule(2))
    for figure in ("4.0 KiB are leased", "4.0 KiB hard-pinned", "8.0 KiB being written"):
        assert figure in str(caught.value)
    with pytest.raises(
        ObjectTooLarge, match=r"16,384 bytes, takes 20,480 with its trailer.* 16,384: .*--memory"
    ):
        segment.reserve(4 * GRANULE_BYTES, 100, session="h", now=100)
    check_segment(segment)


def test_room_is_found_where_no_candidate_is() -> None:
    """The oldest objects lie one by one between pinned ones; the only wide stretch is the newest."""
    segment, _ = new_segment(29)  # a slot per granule: one is left for the wide object
    for number in range(10):
        put(segment, f"hemmed in {number}", one_granule(number), now=100)
        put(segment, f"pinned {number}", one_granule(number), pin=HARD, now=100)
    for number in range(8):
        put(segment, f"recent {number}", one_granule(number), now=500)
    put(segment, "wide", value_of(1, 3 * GRANULE_BYTES - 200), now=501)
    gone = [entry.key for entry in segment.objects.take_withdrawn()]
    assert len(gone) == 2  # and the free granule behind them
    assert all(key.startswith("recent") for key in gone)
    with pytest.raises(CapacityExceeded):
        put(segment, "too wide", value_of(1, 10 * GRANULE_BYTES - 200), now=502)
    check_segment(segment)


def test_small_values_are_evicted_some_at_a_time_the_least_used_first() -> None:
    """In a segment of which two granules are next to nothing, three objects go for one: they are next anyway."""
    segment, _ = new_segment(2 * AHEAD_SHARE)
    put(segment, "large", value_of(1, (2 * AHEAD_SHARE - 11) * GRANULE_BYTES), pin=HARD, now=100)
    for number in range(9):
        put(segment, f"{number}", one_granule(number), now=100 + number)
    put(segment, "soft pin", one_granule(9), pin=SOFT, now=100)
    segment.objects.take_withdrawn()
    assert segment.used_bytes == segment.data_bytes
    for first in (0, 3, 6):
        for number in range(3):
            put(segment, f"new {first + number}", one_granule(number), pin=HARD, now=200)
        gone = sorted(entry.key for entry in segment.objects.take_withdrawn())
        assert gone == [f"{first + number}" for number in range(3)]
    put(segment, "last", one_granule(1), now=201)
    assert [entry.key for entry in segment.objects.take_withdrawn()] == ["soft pin"]
    check_segment(segment)


def test_a_chain_goes_from_its_tail_also_when_several_windows_go_at_once() -> None:
    segment, _ = new_segment(2 * AHEAD_SHARE)
    put(segment, "large", value_of(1, (2 * AHEAD_SHARE - 13) * GRANULE_BYTES), pin=HARD, now=100)
    for number in range(12):
        put(segment, f"{number}", one_granule(number), follows=f"{number - 1}", now=100)
    assert segment.used_bytes == segment.data_bytes
    segment.objects.take_withdrawn()
    for left in (9, 6, 3, 0):
        put(segment, f"new {left}", one_granule(1), pin=HARD, now=200)
        gone = [entry.key for entry in segment.objects.take_withdrawn()]
        assert gone == [f"{left + number}" for number in (2, 1, 0)]
        for number in (1, 2):
            put(segment, f"new {left + number}", one_granule(1), pin=HARD, now=200)
        assert segment.objects.take_withdrawn() == []
    check_segment(segment)


def test_a_chain_that_fills_all_slots_goes_from_its_tail() -> None:
    segment, _ = new_segment(64, slots=6)
    for number in (0, 1, 2, 3, 4, 5):
        put(segment, f"{number}", b"x", follows=f"{number - 1}", now=100)
    for number in range(3):
        put(segment, f"new {number}", b"y", pin=HARD, now=110)
        assert [entry.key for entry in segment.objects.take_withdrawn()] == [f"{5 - number}"]
    check_segment(segment)


def test_full_slots_evict_one_object() -> None:
    segment, _ = new_segment(64, slots=3)
    for number in range(3):
        put(segment, str(number), b"x", now=100 + number)
    put(segment, "new", b"y", now=110)
    assert [entry.key for entry in segment.objects.take_withdrawn()] == ["0"]
    for key in ("1", "2", "new"):
        entry = present(segment.find(key_digest(key, NAMESPACE), 111))
        segment.references.acquire(entry)
    with pytest.raises(CapacityExceeded, match="3 object slots"):
        put(segment, "too many", b"z", now=112)


@pytest.mark.parametrize("slots", [20, 64], ids=["no slot is left", "no room is left"])
def test_room_made_ahead_is_one_values_and_anybodys(slots: int) -> None:
    segment, _ = new_segment(20 if slots == 64 else 64, slots=slots)
    for number in range(20):
        put(segment, str(number), one_granule(number), now=100 + number)
    for _ in range(2):  # the second time there is room
        segment.room.make_ahead(10, 100, now=130)
    assert [entry.key for entry in segment.objects.take_withdrawn()] == ["0"]
    put(segment, "of somebody else", one_granule(1), now=130)
    assert segment.objects.take_withdrawn() == []
    check_segment(segment)


def test_nothing_is_evicted_ahead_where_little_may_go() -> None:
    segment, _ = new_segment(20)
    for number in range(20):
        put(segment, str(number), one_granule(number), pin=HARD if number < 5 else NONE)
    segment.room.make_ahead(10, 100, now=130)
    assert segment.objects.take_withdrawn() == []
    assert not segment.room.can_spare(10, 100)
    segment.remove(key_digest("7", NAMESPACE))
    assert segment.room.can_spare(10, 100)
    assert not segment.room.can_spare(GRANULE_BYTES, 100)
    check_segment(segment)


def test_reservations_of_one_holder_are_limited() -> None:
    segment, _ = new_segment(MAX_RESERVATIONS_PER_SESSION + 8, MAX_RESERVATIONS_PER_SESSION + 8)
    for _ in range(MAX_RESERVATIONS_PER_SESSION):
        segment.reserve(1, 100, session="greedy", now=100)
    with pytest.raises(CapacityExceeded, match="let some"):
        segment.reserve(1, 100, session="greedy", now=100)
    segment.reserve(1, 100, session="modest", now=100)
    segment.drop_session("greedy")
    check_segment(segment)
    assert segment.used_bytes == GRANULE_BYTES


# --- listing ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["put", "remove", "list"])), min_size=15))
def test_listings_follow_every_change(steps: list[tuple[int, str]]) -> None:
    listing = KeyListing()
    segment, _ = new_segment(4)
    entries = [replace(put(segment, "k", b"", clock=1), key=f"k{number}") for number in range(3)]
    there: set[int] = set()
    for number, step in [*steps, (0, "list")]:
        if step == "put" and number not in there:
            entries[number] = replace(entries[number], state=SlotState.LIVE)
            listing.add(entries[number])
            there.add(number)
        elif step == "remove" and number in there:
            listing.remove(entries[number])
            entries[number].state = SlotState.DOOMED
            there.discard(number)
        elif step == "list":
            page, more = listing.page(NAMESPACE, "k", "", 10)
            assert (page, more) == ([entries[number] for number in sorted(there)], False)


def test_a_wrong_key_text_from_elsewhere_does_not_confuse_the_listing() -> None:
    """Two digests under one key text: only one is listed, and both can be removed."""
    segment, _ = new_segment(16)
    for number in range(2):
        value = one_granule(number)
        trailer = trailer_for(value, "same")
        stored(segment, trailer, value, now=100, digest=bytes([number]) * 16)
    page, _ = segment.listing.page(NAMESPACE, "", "", 10)
    assert [entry.digest for entry in page] == [bytes([1]) * 16]
    for number in range(2):
        assert segment.remove(bytes([number]) * 16) is not None
    assert segment.listing.page(NAMESPACE, "", "", 10) == ([], False)
    check_segment(segment)


# --- versions, pins, expiry ------------------------------------------------------------------


def test_a_newer_version_under_another_key_text_replaces_the_listing() -> None:
    segment, _ = new_segment(8)
    old = put(segment, "k", b"value")
    trailer = trailer_for(b"other", "renamed")
    new = stored(segment, trailer, b"other", clock=2, now=100, digest=old.digest)
    assert segment.listing.page(NAMESPACE, "", "", 10) == ([new], False)
    check_segment(segment)


def test_an_expired_version_does_not_stop_a_lower_one() -> None:
    segment, _ = new_segment(8)
    put(segment, "k", b"expired", clock=9, expires_unix_ms=150_000)
    entry = put(segment, "k", b"lower", clock=3, now=150.0)
    assert segment.find(entry.digest, 150.0) is entry
    assert entry.version.clock == 3
    check_segment(segment)


def test_a_soft_replica_becomes_an_ordinary_copy_when_it_is_put_again() -> None:
    segment, _ = new_segment(8)
    entry = put(segment, "k", b"value", soft=True)
    assert put(segment, "k", b"value") is entry
    assert not entry.soft
    assert put(segment, "k", b"value", soft=True) is entry
    assert not entry.soft
    check_segment(segment)


def test_the_pin_is_in_the_trailer_that_others_copy() -> None:
    segment, _ = new_segment(8)
    entry = put(segment, "k", b"value")
    segment.objects.set_pin(entry, HARD, 0.0)
    trailer = decode_trailer(segment.table.trailer_bytes(entry))
    assert trailer == TrailerBody(NAMESPACE, "k", chunk_sums(b"value"), 0, 1, int(HARD))
    segment.remove(entry.digest)
    with pytest.raises(ValueError, match="withdrawn"):
        segment.objects.set_pin(entry, NONE, 0.0)


def test_timers_of_overwritten_objects_do_not_pile_up() -> None:
    segment, _ = new_segment(8)
    for clock in range(1, 100):
        put(segment, "k", b"value", clock=clock, expires_unix_ms=10**9)
        segment.objects.take_withdrawn()
    assert len(segment.objects.timers) == 1
    assert [entry.key for entry in segment.objects.expire(10**6)] == ["k"]


# --- what is refused -------------------------------------------------------------------------


def test_sums_that_do_not_match_the_root_are_refused_and_nothing_is_published() -> None:
    segment, _ = new_segment(8)
    reservation = fill(segment, b"value", "k", ME, 100)
    digest = key_digest("k", NAMESPACE)
    trailer = trailer_for(b"value", "k")

    def commit(root: int, length: int, trailer: TrailerBody = trailer) -> ObjectEntry:
        return segment.commit(
            Written(reservation.number, digest, Version(1, 1, root), trailer, length),
            session=ME,
            soft=False,
            now=100,
        )

    with pytest.raises(ValueError, match="root checksum"):
        commit(1, 5)
    with pytest.raises(ValueError, match="exceed reservation"):
        commit(root_checksum(6, trailer.sums), 6)
    long_key = trailer_for(b"value", "k" * 5000)
    with pytest.raises(ValueError, match="exceed reservation"):
        commit(root_checksum(5, trailer.sums), 5, long_key)
    assert segment.find(digest, 100) is None
    assert commit(root_checksum(5, trailer.sums), 5).length == 5
    check_segment(segment)


def test_a_closed_segment_says_so_and_lets_go() -> None:
    segment, buffer = new_segment(8)
    entry = put(segment, "k", b"value")
    lease = segment.leases.lease(entry, session=ME, now=100)
    segment.close()
    segment.close()
    assert decode_segment_header(bytes(buffer[:200])).state is SegmentState.CLOSED
    with pytest.raises(StoreClosed):
        segment.reserve(1, 1, session=ME, now=100)
    segment.leases.release(lease, session=ME)
    check_segment(segment)


def test_the_checker_notices_damage() -> None:
    segment, buffer = new_segment(8)
    entry = put(segment, "k", b"value")
    check_segment(segment)
    buffer[segment.geometry.slots_offset + entry.slot * 64 + 20] ^= 1
    with pytest.raises(AssertionError):
        check_segment(segment)


def test_leases_and_reads_that_others_tell_of_are_counted() -> None:
    segment, _ = new_segment(16)
    leased = put(segment, "leased", b"x" * 100)
    put(segment, "told", b"y" * 100)
    put(segment, "never", b"z" * 100)
    segment.leases.lease(leased, session=ME, now=101)
    segment.objects.touch(key_digest("told", NAMESPACE), 5, 101)
    segment.objects.touch(key_digest("never", NAMESPACE), 0, 101)
    found = [digest for digest, _ in segment.objects.most_read.most(9, 101)]
    assert found == [key_digest("told", NAMESPACE), key_digest("leased", NAMESPACE)]


# --- strays ----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_clients_write_where_only_the_owner_may_is_restored(data: st.DataObject) -> None:
    """They map all of it. Payloads are theirs to spoil; readers find out by the sums."""
    segment, buffer = new_segment(granules=64, slots=16)
    values = {f"k{number}": value_of(number, 3000) for number in range(8)}
    entries = [put(segment, key, value) for key, value in values.items()]
    segment.remove(entries[3].digest)
    leased = segment.leases.lease(entries[4], session="h", now=0.0)
    segment.remove(entries[4].digest)
    owned = [range(segment.geometry.data_offset)]
    for entry in entries:
        if entry.state is SlotState.LIVE:
            begin = entry.offset + trailer_offset(entry.length)
            owned.append(range(begin, begin + entry.trailer_length))
    for _ in range(data.draw(st.integers(min_value=1, max_value=8))):
        place = data.draw(st.sampled_from(owned))
        at = data.draw(st.sampled_from(place))
        length = data.draw(st.integers(min_value=1, max_value=min(200, place.stop - at)))
        buffer[at : at + length] = bytes([data.draw(st.integers(min_value=0, max_value=255))]) * length
    segment.restoring.header()
    SegmentReader(memoryview(buffer))
    for _ in range(8):
        _, damaged = segment.restoring.some(16)
        for entry in damaged:
            assert segment.restoring.object(entry, chunk_sums(segment.payload(entry)))
    assert segment.restoring.some(64) == (0, [])
    segment.leases.release(leased, session="h")
    check_segment(segment)
    reader = SegmentReader(memoryview(buffer))
    for key, value in values.items():
        copied = bytearray(len(value))
        found = copy_one(reader, key_digest(key, NAMESPACE), memoryview(copied))
        assert (found is not None and copied == value) == (key not in ("k3", "k4"))


def test_a_closed_segment_stays_closed() -> None:
    segment, buffer = new_segment(granules=8, slots=4)
    segment.close()
    assert not segment.restoring.header()
    assert segment.restoring.some(8) == (0, [])
    assert not SegmentReader(memoryview(buffer)).is_open()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_mixed_load_leaves_little_unused(load: str, seed: int) -> None:
    segment = segment_for(1 * GIB, Segment)
    churned = churn(segment, LOADS[load], 1500, seed)
    assert churned.evicted > 1000, "the load did not churn"
    assert mean(churned.used) >= 0.95
    assert mean(churned.payload) >= 0.95
    check_segment(segment)
