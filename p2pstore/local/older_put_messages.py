"""RESERVE and COMMIT as version 1 of the local protocol has them, a record for each value; and their columns. Pure.

A peer serves clients of that version, and a client uses peers of that version, for one release.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

from p2pstore.local.local_messages import (
    MANY,
    OK,
    Commit,
    Committed,
    ItemError,
    PutOutcome,
    Reserve,
    Reserved,
    Span,
)
from p2pstore.local.put_columns import columns_of, one_if_alike, rooms_in, runs_of, sizes_of
from p2pstore.objects import are_sums_of, batch_key_hasher
from p2pstore.put_facts import PutFacts, PutOptions
from p2pstore.wire import Message


class ReserveItem(Message, frozen=True):
    length: int
    trailer_length: int


class ReserveRows(Message, frozen=True):
    items: Annotated[list[ReserveItem], MANY]
    namespace: str = ""


class Reservation(Message, frozen=True):
    reservation: int
    segment: int
    offset: int
    length: int
    error: ItemError = OK


class ReservedRows(Message, frozen=True):
    items: list[Reservation]


class CommitRows(Message, frozen=True):
    namespace: str
    items: Annotated[list[PutFacts], MANY]
    deadline_ms: int = 5000
    again: Annotated[list[ReserveItem], MANY] = []
    at_hand: bool = False


class CommittedRows(Message, frozen=True):
    items: list[PutOutcome]
    again: list[Reservation] = []


def newer(message: Message) -> Message:
    """A request or an answer in columns. Raises `ValueError` where sums are not those of a value."""
    if isinstance(message, ReserveRows):
        return Reserve(_runs(message.items), message.namespace)
    if isinstance(message, ReservedRows):
        return Reserved(_spans(message.items))
    if isinstance(message, CommittedRows):
        return Committed([(1, outcome) for outcome in message.items], _spans(message.again))
    if not isinstance(message, CommitRows):
        return message
    items = message.items
    if not all(are_sums_of(item.sums, item.length, item.root) for item in items):
        raise ValueError("the sums are not those of all chunks, or do not give the root")
    options = [
        PutOptions(*[getattr(item, name) for name in PutOptions.__struct_fields__]) for item in items
    ]
    return Commit(
        message.namespace,
        [item.key for item in items],
        runs_of(item.reservation for item in items),
        one_if_alike([item.length for item in items]),
        b"".join(item.sums for item in items),
        options[:1] if options == options[:1] * len(options) else options,
        items[0].follows if items else b"",
        _runs(message.again),
        message.at_hand,
    )


def older(message: Message) -> Message:
    """A request or an answer with a record for each value."""
    if isinstance(message, Reserve):
        return ReserveRows(_items(message.rooms), message.namespace)
    if isinstance(message, Reserved):
        return ReservedRows(_reservations(message.spans))
    if isinstance(message, Committed):
        outcomes = [outcome for count, outcome in message.outcomes for _ in range(count)]
        return CommittedRows(outcomes, _reservations(message.again))
    if not isinstance(message, Commit):
        return message
    columns = columns_of(message, batch_key_hasher(message.namespace))
    rows = [columns.facts(row) for row in range(len(columns.keys))]
    return CommitRows(message.namespace, rows, again=_items(message.again), at_hand=message.at_hand)


def _items(rooms: list[tuple[int, int, int]]) -> list[ReserveItem]:
    return [ReserveItem(*size) for size in sizes_of(rooms)]


def _runs(items: Iterable[ReserveItem]) -> list[tuple[int, int, int]]:
    return [(item.length, item.trailer_length, sum(1 for _ in alike)) for item, alike in groupby(items)]


def _spans(reservations: Iterable[Reservation]) -> list[Span]:
    return [
        Span(1, each.reservation, each.length, each.offset.to_bytes(8, "little"), each.error)
        for each in reservations
    ]


def _reservations(spans: Iterable[Span]) -> list[Reservation]:
    return [
        Reservation(0, 0, 0, 0, room)
        if isinstance(room, ItemError)
        else Reservation(room[0], 0, room[1], span.length)
        for span in spans
        for room in rooms_in([span], span.count)
    ]
