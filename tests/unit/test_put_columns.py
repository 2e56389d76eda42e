"""RESERVE and COMMIT in columns: they come out as they went in, in rows of the version before as well; nonsense is
refused."""

import struct
from collections.abc import Awaitable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.local import local_messages as local
from p2pstore.local import older_put_messages as older
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import Access, LocalClient
from p2pstore.local.put_columns import numbers_in, one_if_alike, rooms_in, runs_of, sizes_of, values_of
from p2pstore.objects import MIB, batch_key_hasher, chunk_count, root_checksum
from p2pstore.peer.for_clients.local_puts import LocalPuts
from p2pstore.put_facts import PutOptions
from p2pstore.runtime.trio_tasks import in_turns
from p2pstore.wire import decode_body, encode_body
from simulation.segment_checks import check_segment
from tests.unit.core_harness import NAMESPACE, Harness

CLIENT = LocalClient(7, NAMESPACE, Access.WRITE, 1, "")
HUGE = 1 << 62
digests_of = batch_key_hasher(NAMESPACE)

numbers = st.integers(0, 50) | st.integers(0, 2**63)
lengths = st.sampled_from([0, 5, MIB, MIB + 1, 3 * MIB])
wishes = st.builds(
    PutOptions,
    *(st.integers(1, 3), st.integers(0, 2), st.integers(0, 9), st.booleans(), st.booleans()),
    *(st.sampled_from(["", "float32"]), st.sampled_from([(), (3, 4)])),
)


@st.composite
def commits(draw: st.DrawFn) -> local.Commit:
    keys = draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=9))
    count = len(keys)
    alike = draw(st.booleans())
    column = draw(st.lists(lengths, min_size=count, max_size=count))
    column = column[:1] * count if alike else column
    options = draw(st.lists(wishes, min_size=count, max_size=count))
    chunks = sum(map(chunk_count, column))
    return local.Commit(
        NAMESPACE,
        keys,
        runs_of(draw(st.lists(numbers, min_size=count, max_size=count))),
        one_if_alike(column),
        draw(st.binary(min_size=8 * chunks, max_size=8 * chunks)),
        options[:1] if alike or options == options[:1] * count else options,
        draw(st.sampled_from([b"", b"d" * 16])) if count else b"",
        draw(
            st.lists(
                st.tuples(numbers, numbers, st.integers(1, 9)), max_size=3, unique_by=lambda x: x[:2]
            )
        ),
        draw(st.booleans()),
    )


@given(st.lists(numbers))
def test_runs_are_the_numbers(some: list[int]) -> None:
    runs = runs_of(some)
    assert [number for first, count in runs for number in range(first, first + count)] == some
    assert len(runs) == sum(
        1 for before, each in zip([None, *some], some, strict=False) if before != each - 1
    )


@given(commits())
def test_columns_are_their_rows(commit: local.Commit) -> None:
    commit = decode_body(local.Commit, encode_body(commit))
    rows = values_of(commit, digests_of)
    assert [facts.key for facts in rows] == commit.keys
    assert b"".join(facts.sums for facts in rows) == commit.sums
    assert all(facts.root == root_checksum(facts.length, facts.sums) for facts in rows)
    before = [commit.follows, *digests_of(commit.keys)][: len(rows)]
    assert [facts.follows for facts in rows] == (before if commit.follows else [b""] * len(rows))
    assert [facts.digest for facts in rows] == digests_of(commit.keys)
    options = commit.options * len(rows) if len(commit.options) == 1 else commit.options
    assert [facts.options for facts in rows] == options


@given(commits())
def test_columns_and_rows_of_the_version_before_say_the_same(commit: local.Commit) -> None:
    in_rows = older.older(commit)
    assert isinstance(in_rows, older.CommitRows)
    again = older.newer(decode_body(older.CommitRows, encode_body(in_rows)))
    assert isinstance(again, local.Commit)
    assert older.older(again) == in_rows
    assert (again.follows, again.at_hand) == (commit.follows, commit.at_hand)
    assert sizes_of(again.again) == sizes_of(commit.again)


@given(st.lists(st.tuples(st.integers(1, 4), numbers, numbers, st.booleans()), max_size=6))
def test_spans_and_rows_of_the_version_before_say_the_same(
    some: list[tuple[int, int, int, bool]],
) -> None:
    refused = local.ItemError(11, "full")
    spans = [
        local.Span(count, first, 7, struct.pack(f"<{count}Q", *[offset] * count))
        if granted
        else local.Span(count, error=refused)
        for count, first, offset, granted in some
    ]
    count = sum(span.count for span in spans)
    rooms = rooms_in(spans, count)
    assert numbers_in(spans) == [room[0] for room in rooms if isinstance(room, tuple)]
    in_rows = older.older(local.Reserved(spans))
    newer = older.newer(decode_body(older.ReservedRows, encode_body(in_rows)))
    assert isinstance(newer, local.Reserved)
    assert rooms_in(newer.spans, count) == rooms


GOOD = local.Commit(NAMESPACE, ["a", "b"], [(1, 2)], [5], bytes(16), [PutOptions()])
DISAGREEING: list[dict[str, Any]] = [
    {"keys": ["a"]},
    {"keys": ["a", ""]},
    {"keys": ["a", "x" * 1025]},
    {"keys": ["a", "\ud800"]},
    {"reservations": []},
    {"reservations": [(1, 3)]},
    {"reservations": [(1, -1), (1, 3)]},
    {"reservations": [(1, HUGE)]},
    {"reservations": [(1, HUGE), (1, 2 - HUGE)]},
    {"lengths": []},
    {"lengths": [5, 5, 5]},
    {"lengths": [-1]},
    {"lengths": [5, -5]},
    {"lengths": [HUGE]},
    {"sums": b""},
    {"sums": bytes(15)},
    {"sums": bytes(24)},
    {"options": []},
    {"options": [PutOptions()] * 3},
    {"again": [(1, 1, -1)]},
    {"again": [(1, 1, MAX_BATCH + 1)]},
    {"again": [(1, 1, 9000)] * 2},
]


@pytest.mark.parametrize(("count", "granted"), [(1, 1), (3, 3), (-1, 0), (HUGE, 0), (2, 1), (2, 3)])
def test_a_peer_that_grants_another_number_of_rooms_is_not_believed(count: int, granted: int) -> None:
    with pytest.raises(ProtocolError, match="another number"):
        rooms_in([local.Span(count, 5, 9, bytes(8 * granted))], 2)


# --- at a peer -----------------------------------------------------------------------------------


def puts_of(world: Harness) -> LocalPuts:
    node: Any = SimpleNamespace(core=world.core, now=world.now, ssd=None)
    return LocalPuts(node, issuer=None)  # type: ignore[arg-type]  # no ticket is asked for


async def answer_of(answer: Any) -> Any:
    answer = in_turns(answer) if isinstance(answer, Generator) else answer
    return await answer if isinstance(answer, Awaitable) else answer


@pytest.mark.parametrize("runs", [[(0, 1), (0, 1)], [(0, 2), (1, 1), (0, 1)], [(5, 2), (-9, 1)]])
async def test_a_reservation_that_is_named_twice_or_never_was_is_one_value_at_most(
    runs: list[tuple[int, int]],
) -> None:
    world = Harness()
    puts = puts_of(world)
    reserve = local.Reserve([(5, 128, 2)], NAMESPACE)
    [span] = (await answer_of(puts.reserve(CLIENT, reserve))).spans
    count = sum(some for _, some in runs)
    named = [(span.first + first, some) for first, some in runs]
    keys = [f"k{number}" for number in range(count)]
    commit = local.Commit(NAMESPACE, keys, named, [5], bytes(8 * count), [PutOptions()])
    outcomes = (await answer_of(puts.commit(CLIENT, commit))).outcomes
    assert sum(some for some, _ in outcomes) == count
    real = {first + n for first, some in runs for n in range(some)} & {0, 1}
    assert sum(some for some, outcome in outcomes if not outcome.error.code) == len(real)
    check_segment(world.segment)


@pytest.mark.parametrize("change", DISAGREEING)
async def test_a_refused_commit_changes_nothing(change: dict[str, Any]) -> None:
    world = Harness()
    puts = puts_of(world)
    await answer_of(puts.reserve(CLIENT, local.Reserve([(5, 128, 2)], NAMESPACE)))
    used = world.segment.used_bytes
    with pytest.raises(ValueError, match=r"."):
        await answer_of(puts.commit(CLIENT, replace(GOOD, **change)))
    assert world.segment.used_bytes == used
    assert not world.segment.object_count
    assert world.core.operations_under_way == 0


def test_rows_whose_sums_do_not_give_the_root_are_refused() -> None:
    row = older.CommitRow(1, "k", 5, bytes(8), root_checksum(5, bytes(8)))
    assert isinstance(older.newer(older.CommitRows("n", [row])), local.Commit)
    for change in ({"root": 1}, {"sums": bytes(16)}, {"length": 2 * MIB}, {"length": -1, "sums": b""}):
        with pytest.raises(ValueError, match="sums"):
            older.newer(older.CommitRows("n", [row, replace(row, **change)]))
