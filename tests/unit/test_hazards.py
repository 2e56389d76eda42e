"""Leases that clients take without asking: nothing is used anew under a view, in whatever order both sides act, and
however late what one of them wrote shows to the other."""

import contextlib
import gc
import itertools
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pstore.client.lease_book import LeaseBook
from p2pstore.errors import CapacityExceeded
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES, MAX_HAZARDS, HazardPage
from p2pstore.memory.kept_memory import Kept
from p2pstore.memory.references import Loans
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, SlotState, decode_slot, plan_geometry
from p2pstore.objects import Version, key_digest
from p2pstore.runtime import linux
from p2pstore.transfer.reading.segment_reader import SegmentReader, Sighting
from simulation.segment_checks import check_segment
from tests.present import present
from tests.unit.test_segment import HARD, NAMESPACE, new_segment, one_granule, put

KEYS = ["a", "b", "c"]
CLIENTS = ["first", "second"]
NO_LIMIT = 1 << 40
NOTHING = memoryview(b"")


@dataclass
class Seen:
    """A client's sight of an object, and the view that it took, if any."""

    client: str
    sighting: Sighting
    entry: ObjectEntry
    value: bytes
    when: str
    """At which moment of the owner the client goes on."""
    view: memoryview = NOTHING


class OwnerAndClients(RuleBasedStateMachine):
    """An owner and two clients, on processors that show each other's stores late: those of a client only at barriers,
    or now and then. Clients act whenever the owner does not expect it."""

    @initialize(slots=st.integers(2, 6))
    def create(self, slots: int) -> None:
        self.segment, self.buffer = new_segment(4, slots, barrier=self.barrier)
        self.reader = SegmentReader(memoryview(self.buffer))
        self.clocks = itertools.count(1)
        self.values: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.views: list[Seen] = []
        self.books: dict[str, LeaseBook] = {}
        self.pages: dict[str, tuple[bytearray, bytearray]] = {}
        """Each client's stores, and how many of them are visible."""
        for client in CLIENTS:
            self.connect(client)
        looks = self.segment.references.hazards.settle

        def look_and_then(held: Mapping[int, object], holder: object = None) -> object:
            found = looks(held, holder)
            self.meanwhile("after it looked")
            return found

        self.segment.references.hazards.settle = look_and_then  # type: ignore[assignment, method-assign]  # clients in between

    def connect(self, client: str) -> None:
        stored, shown = bytearray(HAZARD_PAGE_BYTES), bytearray(HAZARD_PAGE_BYTES)
        self.pages[client] = stored, shown
        self.segment.leases.watch_hazards(client, memoryview(shown).toreadonly())
        self.books[client] = LeaseBook(HazardPage(memoryview(stored)), NO_LIMIT)

    def barrier(self) -> None:
        self.meanwhile("before it looks")
        self.show_all()

    def meanwhile(self, when: str) -> None:
        """Clients take what they saw before."""
        for seen in self.seen:
            if seen.when == when:
                self.take(seen)

    def take(self, seen: Seen) -> None:
        memory = memoryview(self.buffer)
        view = self.books[seen.client].take(seen.entry.digest, seen.sighting, memory)
        assert (view is not None) == seen.sighting.still_stands(memory)
        if view is not None:
            self.views.append(replace(seen, view=view))

    @rule()
    def show_all(self) -> None:
        for stored, shown in self.pages.values():
            shown[:] = stored

    @rule(key=st.sampled_from(KEYS), pinned=st.booleans())
    def put(self, key: str, pinned: bool) -> None:
        clock = next(self.clocks)
        value = one_granule(clock)
        with contextlib.suppress(CapacityExceeded):
            put(self.segment, key, value, clock=clock, pin=HARD * pinned, now=100.0 + clock)
            self.values[key] = value

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        self.segment.remove(key_digest(key, NAMESPACE))

    @rule(
        key=st.sampled_from(KEYS),
        client=st.sampled_from(CLIENTS),
        when=st.sampled_from(["at once", "before it looks", "after it looked"]),
    )
    def see(self, key: str, client: str, when: str) -> None:
        digest = key_digest(key, NAMESPACE)
        sighting, entry = self.reader.sight(digest), self.segment.find(digest, 100.0)
        assert (sighting is None) == (entry is None)
        if sighting is not None and entry is not None:
            seen = Seen(client, sighting, entry, self.values[key], when)
            (self.take if when == "at once" else self.seen.append)(seen)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def take_what_was_seen(self, data: st.DataObject) -> None:
        self.take(self.seen.pop(data.draw(st.integers(0, len(self.seen) - 1))))

    @precondition(lambda self: self.views)
    @rule(data=st.data(), tidies=st.booleans())
    def let_go(self, data: st.DataObject, tidies: bool) -> None:
        client = self.views.pop(data.draw(st.integers(0, len(self.views) - 1))).client
        if tidies:
            assert self.books[client].take_ended([], everything=True) == []

    @rule(client=st.sampled_from(CLIENTS))
    def kill(self, client: str) -> None:
        self.segment.drop_session(client)
        self.seen = [each for each in self.seen if each.client != client]
        self.views = [each for each in self.views if each.client != client]
        self.connect(client)

    @invariant()
    def what_is_viewed_stays(self) -> None:
        check_segment(self.segment)
        for seen in self.views:
            assert seen.view == seen.value
            assert seen.entry.state is not SlotState.FREE

    def teardown(self) -> None:
        """Nothing is kept for clients that are gone."""
        if self.segment_is_made:
            for client in CLIENTS:
                self.segment.drop_session(client)
            assert self.segment.leased_bytes == 0
            check_segment(self.segment)

    @property
    def segment_is_made(self) -> bool:
        return hasattr(self, "pages")


TestOwnerAndClients = OwnerAndClients.TestCase
TestOwnerAndClients.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def client_of(segment: Segment, name: str = "client", max_bytes: int = NO_LIMIT) -> LeaseBook:
    page = memoryview(bytearray(HAZARD_PAGE_BYTES))
    segment.leases.watch_hazards(name, page)
    return LeaseBook(HazardPage(page), max_bytes)


def view_of(book: LeaseBook, buffer: bytearray, key: str) -> memoryview | None:
    seen = SegmentReader(memoryview(buffer)).sight(key_digest(key, NAMESPACE))
    return None if seen is None else book.take(key_digest(key, NAMESPACE), seen, memoryview(buffer))


def slot_state(segment: Segment, entry: ObjectEntry) -> SlotState | None:
    slot = decode_slot(segment.table.slot_bytes(entry))
    return None if slot is None else SlotState(slot.state)


@pytest.mark.parametrize("how", ["removed", "replaced", "evicted", "expired"])
def test_what_is_viewed_stays_until_its_end(how: str) -> None:
    segment, buffer = new_segment(4)
    book, value = client_of(segment), one_granule(1)
    expires_unix_ms = 32_503_680_000_000 if how == "expired" else 0
    entry = put(segment, "k", value, expires_unix_ms=expires_unix_ms, now=100.0)
    view = present(view_of(book, buffer, "k"))
    assert segment.leased_bytes == entry.extent_bytes
    assert segment.leases.leased_bytes_of("client") == len(value)
    if how == "removed":
        segment.remove(entry.digest)
    elif how == "replaced":
        put(segment, "k", one_granule(2), clock=2, now=102.0)
    elif how == "expired":
        assert segment.objects.expire(1e12) == [entry]
    for number in range(8):
        put(segment, f"other {number}", one_granule(10 + number), now=200.0 + number)
        assert view == value
        check_segment(segment)
    del view
    assert book.take_ended([], everything=True) == []
    for number in range(4):  # and now its room is used again
        put(segment, f"kept {number}", one_granule(20 + number), pin=HARD, now=300.0)
    assert segment.find(entry.digest, 302.0) is None
    assert segment.leased_bytes == 0


def test_who_holds_too_much_or_too_many_asks_the_owner() -> None:
    segment, buffer = new_segment(MAX_HAZARDS + 9, MAX_HAZARDS + 9)
    little = client_of(segment, "little", max_bytes=2 * len(one_granule(0)) + 1)
    many = client_of(segment, "many")
    keys = [f"k{number}" for number in range(MAX_HAZARDS + 2)]
    for number, key in enumerate(keys):
        put(segment, key, one_granule(number))
    views = [view_of(little, buffer, key) for key in keys[:3]]
    assert [view is not None for view in views] == [True, True, False]
    del views[0]
    assert view_of(little, buffer, keys[2]) is not None
    views = [view_of(many, buffer, key) for key in keys]
    assert [view is not None for view in views] == [True] * MAX_HAZARDS + [False] * 2
    del views[7]
    assert view_of(many, buffer, keys[-1]) is not None
    assert view_of(LeaseBook(), buffer, keys[0]) is None


@pytest.mark.parametrize("slots", [None, 3])
def test_room_that_a_view_kept_is_used_before_anything_is_evicted(slots: int | None) -> None:
    """Whether bytes are short, or slots."""
    segment, buffer = new_segment(4 if slots is None else 8, slots)
    book = client_of(segment)
    put(segment, "pinned", one_granule(1), pin=HARD)
    others = ["old", "older"] if slots is None else ["old"]
    for name in others:
        put(segment, name, one_granule(2))
    entry = put(segment, "gone", one_granule(3))
    view = present(view_of(book, buffer, "gone"))
    segment.remove(entry.digest)
    del view
    book.take_ended([], everything=True)
    assert segment.room.can_spare(len(one_granule(0)), 100)
    segment.room.make_ahead(len(one_granule(0)), 100, now=200.0)
    put(segment, "new", one_granule(4))
    assert segment.objects.take_withdrawn() == []
    check_segment(segment)


def test_all_that_is_left_was_viewed_a_moment_ago() -> None:
    segment, buffer = new_segment(4)
    book = client_of(segment)
    for number in range(3):
        put(segment, f"pinned {number}", one_granule(number), pin=HARD)
    entry = put(segment, "gone", one_granule(3))
    view = view_of(book, buffer, "gone")
    segment.remove(entry.digest)
    with pytest.raises(CapacityExceeded, match="leased"):
        put(segment, "new", one_granule(4))
    del view
    book.take_ended([], everything=True)
    put(segment, "new", one_granule(4))


def test_figures_may_be_asked_after_the_end() -> None:
    segment, buffer = new_segment(4)
    book = client_of(segment)
    entry = put(segment, "k", one_granule(3))
    present(view_of(book, buffer, "k"))
    segment.remove(entry.digest)
    assert segment.leased_bytes == entry.extent_bytes
    segment.close()
    segment.detach()
    assert segment.leased_bytes == entry.extent_bytes


def test_two_views_of_one_object_are_two_leases() -> None:
    segment, buffer = new_segment(4)
    book = client_of(segment)
    entry = put(segment, "k", one_granule(1))
    first, second = view_of(book, buffer, "k"), view_of(book, buffer, "k")
    del first
    book.take_ended([], everything=True)
    segment.remove(entry.digest)
    assert slot_state(segment, entry) is SlotState.DOOMED
    assert second is not None
    assert bytes(second) == one_granule(1)
    del second
    book.take_ended([], everything=True)
    assert segment.leased_bytes == 0
    assert slot_state(segment, entry) is None


@given(words=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 9), max_size=MAX_HAZARDS + 1))
@settings(deadline=None)
def test_whatever_a_client_writes_to_its_page_it_only_keeps_objects_in_place(words: list[int]) -> None:
    segment, _ = new_segment(6)
    page = bytearray(HAZARD_PAGE_BYTES)
    segment.leases.watch_hazards("stranger", memoryview(page))
    for number in range(4):
        put(segment, f"k{number}", one_granule(number), now=1.0 + number)
    struct.pack_into(f"{len(words)}I", page, 0, *words)
    with contextlib.suppress(CapacityExceeded):
        for number in range(9):
            put(segment, f"more {number}", one_granule(9 + number), now=10.0 + number)
    check_segment(segment)
    segment.drop_session("stranger")
    assert segment.leased_bytes == 0
    check_segment(segment)


def test_a_lease_ended_twice_does_not_end_who_has_its_cell_by_then() -> None:
    """As an interrupted client may do."""
    segment, buffer = new_segment(4)
    book = client_of(segment)
    entry = put(segment, "k", one_granule(1))
    view = view_of(book, buffer, "k")
    (number,) = book._leases
    del view
    book.take_ended([], everything=True)
    view = view_of(book, buffer, "k")
    book.give_back(number)
    book.take_ended([], everything=True)
    segment.remove(entry.digest)
    assert slot_state(segment, entry) is SlotState.DOOMED
    assert view is not None
    assert bytes(view) == one_granule(1)


def test_memory_that_outlives_its_owner_has_no_such_leases() -> None:
    geometry = plan_geometry(4 * GRANULE_BYTES)
    segment = Segment(
        memoryview(bytearray(geometry.total_bytes)),
        segment_id=b"s" * 16,
        incarnation=1,
        geometry=geometry,
        marks=memoryview(bytearray(geometry.slots)),
        kept=Kept(),
    )
    with pytest.raises(ValueError, match="outlive"):
        client_of(segment)


def test_barriers_pass_through_threads_that_run() -> None:
    if not linux.has_barriers():
        pytest.skip("this kernel, or its sandbox, has no membarrier: clients ask for their leases")
    assert linux.join_barriers()
    over = threading.Event()
    runs = threading.Thread(target=lambda: over.wait(60))
    runs.start()
    for _ in range(100):
        linux.memory_barrier()
    over.set()
    runs.join()


def test_a_machine_without_barriers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "unheard of")
    assert not linux.has_barriers()
    assert not linux.join_barriers()
    with pytest.raises(OSError, match="membarrier"):
        linux.memory_barrier()


def entry_in(state: SlotState) -> ObjectEntry:
    fields = 0, 0, 1, 1, 4096, "", "", 0, 1, Pin.NONE, 0.0, False, "", (), 0.0
    entry = ObjectEntry(bytes(16), Version(1, 1), *fields)
    entry.state = state
    return entry


def test_one_loan_of_many_entries_keeps_each_until_it_ends() -> None:
    loans, entries = Loans(), [entry_in(SlotState.LIVE) for _ in range(3)]
    other = entry_in(SlotState.LIVE)
    loan = loans.begin(*entries)
    assert loan is not None
    assert [loans.has(each) for each in [*entries, other]] == [True, True, True, False]
    assert set(loans.begun()) == set(entries)
    assert list(loans.begun()) == list(loans.ended()) == []
    loans.end(loan)
    assert not loans.has(entries[0])
    assert loans.any_known
    assert set(loans.ended()) == set(entries)
    assert not loans.any_known


def test_none_of_many_is_lent_when_one_is_given_up() -> None:
    loans, entries = Loans(), [entry_in(SlotState.LIVE), entry_in(SlotState.DOOMED)]
    assert loans.begin(*entries) is None
    assert not loans.any_known
    assert not loans.has(entries[0])


@pytest.mark.parametrize("others", [0, 2])
def test_what_was_freed_before_its_loan_began_is_not_counted(others: int) -> None:
    """The owner looks at the loans just before the thread sees that it came too late."""
    counted: list[ObjectEntry] = []

    class Late:
        """An entry whose owner comes in between."""

        @property
        def state(self) -> SlotState:
            if not looked:
                looked.append(True)
                counted.extend(loans.begun())
            return SlotState.FREE

    looked: list[bool] = []
    loans, live = Loans(), [entry_in(SlotState.LIVE) for _ in range(others)]
    assert loans.begin(*live, Late()) is None  # type: ignore[arg-type]
    assert looked
    assert set(counted) == set(live)
    assert set(loans.ended()) == set(live)
    assert not loans.any_known


def test_loans_may_begin_while_the_owner_looks_at_them() -> None:
    """As they do when the collector of garbage runs just then, and what it ends lets other threads run."""
    loans = Loans()
    entries = [entry_in(SlotState.LIVE) for _ in range(1000)]
    known = [loans.begin(entry) for entry in entries]

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            known.append(loans.begin(entry_in(SlotState.LIVE)))

    usual = gc.get_threshold()
    gc.collect()
    try:
        Garbage()
        gc.set_threshold(gc.get_count()[0] + len(entries) // 2)
        seen = list(loans.begun())
    finally:
        gc.set_threshold(*usual)
        gc.collect()
    assert len(known) == 1001
    assert set(entries) <= set(seen)
