"""Entries whose bytes other threads use: what their owner sees of that."""

from __future__ import annotations

import gc

import pytest

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.references import Loans
from p2pstore.memory.segment_layout import Pin, SlotState
from p2pstore.objects import Version


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
