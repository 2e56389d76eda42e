"""Columns of RESERVE and COMMIT, made of rows and cut into rows again. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeVar

from p2pstore.errors import ProtocolError
from p2pstore.local.local_messages import MAX_BATCH, Commit, ItemError, Span
from p2pstore.objects import MAX_OBJECT_BYTES, chunk_count, root_checksums
from p2pstore.put_facts import PutFacts

Item = TypeVar("Item")


def runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    """Numbers as runs of consecutive ones: the first, how many."""
    if numbers and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:  # nearly always
        return [(numbers[0], len(numbers))]
    runs: list[tuple[int, int]] = []
    first = count = 0
    for number in numbers:
        if number == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = number, 1
    return [*runs, (first, count)] if count else runs


def one_if_alike(column: list[int]) -> list[int]:
    """The column, or its one value where all are alike."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def checked(rooms: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int, int]]:
    """The rooms. Raises `ValueError` for negative counts, or over 16,384 in all."""
    _check_counts([count for *_, count in rooms])
    return rooms


def sizes_of(rooms: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Length and trailer length of each room. Raises what `checked` raises."""
    rooms = checked(rooms)
    return [(length, trailer) for length, trailer, count in rooms for _ in range(count)]


def values_of(commit: Commit, digests_of: Callable[[Sequence[str]], list[bytes]]) -> list[PutFacts]:
    """The values of a COMMIT. Raises `ValueError` where its columns disagree, or one holds nonsense."""
    keys, count = commit.keys, len(commit.keys)
    if _check_counts([some for _, some in commit.reservations]) != count:
        raise ValueError(f"{count:,} keys come with another number of reservations")
    numbers = [number for first, some in commit.reservations for number in range(first, first + some)]
    lengths = _for_each(commit.lengths, count, "lengths")
    options = _for_each(commit.options, count, "options")
    if lengths and not 0 <= min(lengths) <= max(lengths) <= MAX_OBJECT_BYTES:
        raise ValueError("a length is no object's")
    sizes = _for_each([8 * chunk_count(length) for length in commit.lengths], count, "lengths")
    ends = list(accumulate(sizes, initial=0))
    if ends[-1] != len(commit.sums):
        raise ValueError("the sums are not those of all chunks")
    sums = [commit.sums[start:end] for start, end in pairwise(ends)]
    digests = digests_of(keys)
    follows = [commit.follows, *digests[:-1]] if commit.follows else [b""] * count
    roots = root_checksums(lengths, sums)
    return list(map(PutFacts, numbers, keys, digests, lengths, sums, roots, options, follows))


def _check_counts(counts: Sequence[int]) -> int:
    """The sum of counts of runs."""
    total = sum(counts)
    if counts and (min(counts) < 0 or total > MAX_BATCH):
        raise ValueError(f"runs of {total:,} items; at most {MAX_BATCH:,} are allowed")
    return total


def _for_each(column: list[Item], count: int, name: str) -> list[Item]:
    """A column with a value for each row. Raises `ValueError` where it has another number of them."""
    if len(column) == 1:
        return column * count
    if len(column) != count:
        raise ValueError(f"{count:,} keys come with {len(column):,} {name}")
    return column


def rooms_in(spans: Sequence[Span], count: int) -> list[tuple[int, int] | ItemError]:
    """Reservation and offset of each of `count` rooms, or why there is none. Raises `ProtocolError` where there are
    rooms for another number of values."""
    rooms: list[tuple[int, int] | ItemError] = []
    for span in spans:
        if not 0 <= span.count <= count:
            break
        if span.error.code:
            rooms += [span.error] * span.count
        elif len(span.offsets) == 8 * span.count:
            rooms += enumerate(struct.unpack(f"<{span.count}Q", span.offsets), span.first)
    if len(rooms) != count:
        raise ProtocolError("the local peer reserved room for another number of values")
    return rooms


def numbers_in(spans: Iterable[Span]) -> list[int]:
    """The reservations that were made."""
    made = (range(span.first, span.first + span.count) for span in spans if not span.error.code)
    return list(chain.from_iterable(made))
