"""RESERVE and COMMIT as version 1 of the local protocol has them, a record for each value; and their columns. Pure.

A peer serves clients of that version, and a client uses peers of that version, for one release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec.structs import asdict

from p2pstore.local.local_messages import (
    MANY,
    Commit,
    Committed,
    ItemError,
    PutOutcome,
    Reserve,
    Reserved,
    Span,
)
from p2pstore.local.put_columns import rooms_in, runs_of, sizes_of, values_of
from p2pstore.objects import are_sums_of, batch_key_hasher
from p2pstore.put_facts import PutOptions
from p2pstore.wire import Message

Reservation = tuple[int, int, int, int, ItemError]
"""Number, segment, offset, length, or why there is none."""


class ReserveRows(Message, frozen=True):
    """Rooms by length and trailer length."""

    items: Annotated[list[tuple[int, int]], MANY]
    namespace: str = ""


class ReservedRows(Message, frozen=True):
    items: list[Reservation]


class CommitRow(Message, frozen=True):
    """`PutFacts`, with the fields of its `PutOptions`."""

    reservation: int
    key: str
    length: int
    sums: bytes
    root: int
    replicas: int = 1
    pin: int = 0
    ttl_ms: int = 0
    overwrite: bool = False
    durable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    follows: bytes = b""


class CommitRows(Message, frozen=True):
    namespace: str
    items: Annotated[list[CommitRow], MANY]
    deadline_ms: int = 5000
    again: Annotated[list[tuple[int, int]], MANY] = []
    at_hand: bool = False


class CommittedRows(Message, frozen=True):
    items: list[PutOutcome]
    again: list[Reservation] = []


def newer(message: Message) -> Message:
    """A request or an answer in columns. Raises `ValueError` where sums are not those of a value."""
    if isinstance(message, ReserveRows):
        return Reserve([(*size, 1) for size in message.items], message.namespace)
    if isinstance(message, ReservedRows):
        return Reserved(_spans(message.items))
    if isinstance(message, CommittedRows):
        return Committed([(1, outcome) for outcome in message.items], _spans(message.again))
    if not isinstance(message, CommitRows):
        return message
    items = message.items
    if not all(each.length >= 0 and are_sums_of(each.sums, each.length, each.root) for each in items):
        raise ValueError("the sums are not those of all chunks, or do not give the root")
    names = PutOptions.__struct_fields__
    return Commit(
        message.namespace,
        [item.key for item in items],
        runs_of([item.reservation for item in items]),
        [item.length for item in items],
        b"".join(item.sums for item in items),
        [PutOptions(*[getattr(item, name) for name in names]) for item in items],
        items[0].follows if items else b"",
        [(*size, 1) for size in message.again],
        message.at_hand,
    )


def older(message: Message) -> Message:
    """A request or an answer with a record for each value."""
    if isinstance(message, Reserve):
        return ReserveRows(sizes_of(message.rooms), message.namespace)
    if isinstance(message, Reserved):
        return ReservedRows(_reservations(message.spans))
    if isinstance(message, Committed):
        outcomes = [outcome for count, outcome in message.outcomes for _ in range(count)]
        return CommittedRows(outcomes, _reservations(message.again))
    if not isinstance(message, Commit):
        return message
    rows = [
        CommitRow(
            facts.reservation,
            facts.key,
            facts.length,
            facts.sums,
            facts.root,
            **asdict(facts.options),
            follows=facts.follows,
        )
        for facts in values_of(message, batch_key_hasher(message.namespace))
    ]
    again = sizes_of(message.again)
    return CommitRows(message.namespace, rows, again=again, at_hand=message.at_hand)


def _spans(reservations: Iterable[Reservation]) -> list[Span]:
    return [
        Span(1, number, length, offset.to_bytes(8, "little"), error)
        for number, _, offset, length, error in reservations
    ]


def _reservations(spans: Iterable[Span]) -> list[Reservation]:
    return [
        (0, 0, 0, 0, room)
        if isinstance(room, ItemError)
        else (room[0], 0, room[1], span.length, span.error)
        for span in spans
        for room in rooms_in([span], span.count)
    ]
