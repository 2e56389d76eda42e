"""The parts of a swarm's machine: maps, choices, slots, deadlines, neighbours, messages."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.checkpoint.content.pieces import (
    Availability,
    any_piece,
    full_map,
    map_of,
    pack_map,
    pieces_in,
    sum_of,
    unpack_map,
)
from p2pstore.checkpoint.swarm.selection import stripe
from p2pstore.checkpoint.swarm.swarm import (
    FIRST_DIALS,
    MAX_NEIGHBOURS,
    MIN_NEIGHBOURS,
    SETTLE_SECONDS,
    Links,
)
from p2pstore.checkpoint.swarm.swarm_messages import (
    ANY_PIECE,
    MAX_NEW_PIECES,
    Grant,
    Needs,
    NewPieces,
    PieceMapMessage,
    decode_message,
    map_in,
)
from p2pstore.checkpoint.swarm.upload_slots import (
    FIRST_BACK_OFF_SECONDS,
    FIRST_HELD_UP_SECONDS,
    MAX_BACKOFF_SECONDS,
    MAX_WAITING,
    Pace,
    Senders,
    SuperSeeding,
    UploadSlots,
    places_for,
    slots_for,
)
from p2pstore.errors import ProtocolError
from p2pstore.wire import encode_body

MAPS = st.integers(0, full_map(70))

# --- maps ------------------------------------------------------------------------------------


@given(MAPS)
def test_a_map_travels(pieces: int) -> None:
    assert map_of(pieces_in(pieces)) == pieces
    packed = pack_map(pieces, 70)
    assert len(packed) == 9
    assert unpack_map(packed, 70) == pieces


@given(st.sets(st.sampled_from([0, 1, 1022, 1023, 1024, 1025, 2048, 5000, 65_534, 65_535])))
def test_pieces_are_found_and_their_sizes_added_up_whatever_word_they_are_in(numbers: set[int]) -> None:
    sizes = tuple(range(65_536))
    assert pieces_in(map_of(numbers)) == sorted(numbers)
    assert sum_of(map_of(numbers), sizes) == sum(numbers)


@pytest.mark.parametrize("packed", [b"", bytes(8), bytes(10), bytes(8) + b"\x40"])
def test_a_map_of_another_number_of_pieces_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_map(packed, 70)


@given(st.lists(MAPS, max_size=12), st.data())
def test_copies_are_counted(maps: list[int], data: st.DataObject) -> None:
    """Against counters."""
    availability = Availability(70)
    expected: Counter[int] = Counter()
    for pieces in maps:
        availability.add(pieces)
        expected.update(pieces_in(pieces))
    gone = data.draw(st.lists(st.sampled_from(maps), unique=True)) if maps else []
    for pieces in gone:
        availability.remove(pieces)
        expected.subtract(pieces_in(pieces))
    assert [availability.copies(piece) for piece in range(70)] == [expected[p] for p in range(70)]
    assert availability.fewest() == min(expected[piece] for piece in range(70))
    of = data.draw(MAPS)
    rarest = min((expected[piece] for piece in pieces_in(of)), default=0)
    assert pieces_in(availability.with_fewest(of)) == [
        piece for piece in pieces_in(of) if expected[piece] == rarest
    ]


def test_copies_that_were_never_there_cannot_go() -> None:
    availability = Availability(4)
    availability.add(0b0011)
    with pytest.raises(ValueError, match="not added"):
        availability.remove(0b0100)


@given(st.integers(1, full_map(70)), st.integers(0, 2**32))
def test_any_piece_is_one_of_them(pieces: int, seed: int) -> None:
    assert pieces >> any_piece(pieces, 70, Random(seed)) & 1


def test_any_piece_is_every_one_now_and_then() -> None:
    rng = Random(1)
    assert {any_piece(map_of([0, 3, 69]), 70, rng) for _ in range(300)} == {0, 3, 69}


# --- choosing --------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 9))
def test_stripes_are_all_pieces_each_once(count: int, step: int) -> None:
    found = sorted(piece for first in range(step) for piece in pieces_in(stripe(count, first, step)))
    assert found == list(range(count))


def test_what_did_not_get_there_is_sent_again_and_what_others_sent_comes_last() -> None:
    seeding = SuperSeeding(3, Random(1))
    availability = Availability(3)
    availability.add(map_of([0, 1]))
    assert seeding.choose(full_map(3), availability) == 2
    for piece in range(3):
        seeding.sending(piece)
    assert seeding.over
    seeding.not_sent(1)
    assert not seeding.over
    assert seeding.choose(full_map(3), availability) == 1
    assert seeding.choose(map_of([0, 2]), availability) == 2
    assert SuperSeeding(0, Random(1)).over


# --- slots -----------------------------------------------------------------------------------


def test_how_long_answers_to_grants_take_is_known() -> None:
    slots = UploadSlots(2, grant_seconds=1.0)
    for turn in range(50):
        slots.grant(5, None, now=float(turn))
        slots.take_grant(5, turn + 0.25)
    assert slots.round_trip_seconds == pytest.approx(0.25, rel=0.01)
    for _ in range(5):  # what waited behind pieces: with more slots it would wait longer still
        slots.grant(1, None, 100.0)
        slots.take_grant(1, 101.5)
    assert slots.round_trip_seconds == pytest.approx(0.25, rel=0.02)


def test_a_leaving_neighbour_frees_its_slots_and_its_unsent_pieces() -> None:
    slots = UploadSlots(3, grant_seconds=1.0)
    slots.grant(5, 1, now=0.0)
    slots.grant(5, None, now=0.0)
    slots.sending(5, 2, -math.inf)
    slots.wait(5)
    assert sorted(slots.forget(5)) == [1, 2]
    assert slots.free == 3
    assert slots.waiting == 0


def test_who_waits_is_served_in_turn_and_not_too_many_wait() -> None:
    slots = UploadSlots(1, grant_seconds=1.0)
    assert [slots.wait(member) for member in (7, 8, 7)] == [1, 2, 2]
    slots.grant(8, None, now=0.0)
    assert slots.next_waiting() == 7
    assert slots.next_waiting() is None
    for member in range(2 * MAX_WAITING):
        slots.wait(member)
    assert slots.waiting == MAX_WAITING


def test_what_a_slow_receiver_holds_up_makes_room_for_others_but_not_without_end() -> None:
    slots = UploadSlots(2, grant_seconds=1.0)
    for piece in range(2):
        slots.sending(5, piece, held_up_at=3.0)
    assert slots.free == 0
    assert slots.next_change() == 3.0
    slots.mark_held_up(2.9)
    assert slots.free == 0
    slots.mark_held_up(3.0)
    assert slots.free == 2
    slots.sending(6, 7, held_up_at=-math.inf)
    slots.sending(6, 8, held_up_at=-math.inf)
    assert slots.free == 0
    slots.sent(5, 0)
    assert slots.free == 1


@pytest.mark.parametrize(
    ("piece_seconds", "round_trip_seconds", "wanted"),
    [(0.067, 0.002, 2), (0.0045, 0.0006, 5), (0.0006, 0.0002, 8), (1.0, 5.0, 8), (math.inf, 1, 2)],
)
def test_more_slots_where_agreeing_takes_long(
    piece_seconds: float, round_trip_seconds: float, wanted: int
) -> None:
    assert slots_for(piece_seconds, round_trip_seconds, 0.0) == wanted


def test_eight_slots_where_messages_usually_wait_behind_pieces() -> None:
    assert slots_for(0.1, 0.001, 0.007) == 2
    assert slots_for(0.1, 0.001, 0.008) == 8
    assert slots_for(0.0045, 0.0006, 0.0003) == 5  # the shortest one is a share of a piece
    slots = UploadSlots(2, grant_seconds=10.0)
    for round_trip in (0.016, 0.016, 0.032):
        slots.grant(7, None, 1.0)
        slots.take_grant(7, 1.0 + round_trip)
    assert slots.round_trip_seconds == pytest.approx(0.016, rel=0.01)
    assert slots.usual_round_trip_seconds == pytest.approx(0.064 / 3)  # the first ones count alike
    for _ in range(13):
        slots.grant(7, None, 1.0)
        slots.take_grant(7, 1.016)
    assert slots.usual_round_trip_seconds == pytest.approx(0.017)
    slots.grant(7, None, 1.0)
    slots.take_grant(7, 1.033)
    assert slots.usual_round_trip_seconds == pytest.approx(0.018)


def test_one_place_more_than_slots_where_there_are_more_than_two() -> None:
    assert [places_for(slots) for slots in (1, 2, 3, 8)] == [1, 2, 4, 9]


# --- trust -----------------------------------------------------------------------------------


def test_deadlines_are_four_times_what_is_usual() -> None:
    senders = Senders(first_deadline_seconds=30.0, shortest_deadline_seconds=1.0)
    assert senders.expected_seconds(5, 100) is None
    assert senders.deadline_seconds(5, 100) == 30.0
    senders.brought(5, 100, 2.0)
    assert senders.expected_seconds(5, 50) == pytest.approx(1.0)
    assert senders.deadline_seconds(5, 100) == pytest.approx(8.0)
    assert senders.deadline_seconds(5, 1) == 1.0
    senders.brought(5, 100, 6.0)
    assert senders.expected_seconds(5, 100) == pytest.approx(3.0)


def test_the_first_piece_of_a_sender_may_take_long_but_not_for_ever() -> None:
    senders = Senders(first_deadline_seconds=30.0, shortest_deadline_seconds=1.0)
    senders.brought(5, 100, 0.5)
    assert senders.deadline_seconds(6, 100) == pytest.approx(8.0)
    assert senders.deadline_seconds(6, 1) == 1.0
    assert senders.deadline_seconds(6, 1000) == 30.0


def test_a_sender_that_fails_is_left_alone_longer_each_time_until_it_brings_something() -> None:
    senders = Senders(30.0, 1.0)
    now = 0.0
    for seconds in (FIRST_BACK_OFF_SECONDS, 2 * FIRST_BACK_OFF_SECONDS, 4 * FIRST_BACK_OFF_SECONDS):
        senders.failed(5, now)
        assert senders.is_ignored(5, now + 0.99 * seconds)
        assert not senders.is_ignored(5, now + seconds)
        now += seconds
    for _ in range(20):
        senders.failed(5, now)
    assert not senders.is_ignored(5, now + MAX_BACKOFF_SECONDS)
    senders.brought(5, 1, 1.0)
    senders.failed(5, now)
    assert not senders.is_ignored(5, now + FIRST_BACK_OFF_SECONDS)
    assert not senders.is_banned(5)


def test_a_bad_piece_is_forgiven_once() -> None:
    senders = Senders(30.0, 1.0)
    assert not senders.sent_bad_piece(5, 0.0)
    assert senders.is_ignored(5, MAX_BACKOFF_SECONDS / 2)
    assert not senders.is_ignored(5, MAX_BACKOFF_SECONDS)
    assert senders.sent_bad_piece(5, MAX_BACKOFF_SECONDS)
    assert senders.is_banned(5)
    assert senders.is_ignored(5, math.inf)
    senders.failed(5, 0.0)
    assert senders.is_banned(5)


def test_what_takes_three_times_the_quickest_is_held_up() -> None:
    pace = Pace()
    assert pace.held_up_after(5, 100) == FIRST_HELD_UP_SECONDS
    pace.took(5, 100, 1.0)
    assert pace.held_up_after(5, 100) == pytest.approx(3.0)
    assert pace.held_up_after(6, 50) == pytest.approx(1.5)
    assert pace.held_up_after(5, 100, slots=1) == pytest.approx(3.0)
    assert pace.held_up_after(5, 100, slots=4) == pytest.approx(6.0), "twice as many share the link"
    pace.took(6, 100, 4.0)
    assert pace.held_up_after(6, 100) == 0.0
    assert pace.held_up_after(6, 100, slots=4) == pytest.approx(6.0, rel=0.01)
    pace.forget(6)
    assert pace.held_up_after(6, 100) == pytest.approx(3.0, rel=0.01)


# --- neighbours ------------------------------------------------------------------------------


def worth_nothing(member: int) -> int:
    return 0


def test_few_are_dialled_first_then_as_many_as_are_missing() -> None:
    links = Links(0, Random(1), now=0.0)
    links.participants(range(100), ())
    first, ended = links.tick(0.0, worth_nothing)
    assert len(set(first)) == FIRST_DIALS
    assert 0 not in first
    assert ended == []
    assert links.next_tick() == SETTLE_SECONDS
    for member in first[:4]:
        assert links.linked(member, False, 0.1, worth_nothing) is None
    links.unlinked(first[4], 0.1)
    later, _ = links.tick(SETTLE_SECONDS, worth_nothing)
    assert len(later) == MIN_NEIGHBOURS - (FIRST_DIALS - 1)
    assert first[4] not in later
    assert not set(first) & set(later)


def test_a_small_swarm_is_connected_completely_and_siblings_always_are() -> None:
    links = Links(0, Random(1), now=0.0)
    links.participants(range(MAX_NEIGHBOURS + 1), ())
    assert sorted(links.tick(0.0, worth_nothing)[0]) == list(range(1, MAX_NEIGHBOURS + 1))
    links = Links(0, Random(1), now=0.0)
    links.participants(range(1000), range(500, 540))
    dialled, _ = links.tick(0.0, worth_nothing)
    assert set(range(500, 540)) <= set(dialled)
    assert len(dialled) == 40 + FIRST_DIALS


def full_house(now: float) -> Links:
    links = Links(0, Random(1), now=now)
    links.participants(range(1000), ())
    for member in range(1, MAX_NEIGHBOURS + 1):
        assert links.linked(member, False, now + member, worth_nothing) is None
    return links


def test_a_late_joiner_is_always_let_in_for_what_is_of_least_use() -> None:
    links = full_house(0.0)
    assert links.linked(999, False, 100.0, lambda member: -1 if member == 9 else 0) == 9
    links.unlinked(9, 100.0)
    assert links.linked(998, False, 101.0, lambda member: int(member < 4)) == 4
    links.unlinked(4, 101.0)
    assert links.linked(997, True, 102.0, worth_nothing) is None
    assert links.linked(997, True, 102.0, worth_nothing) is None
    assert links.count == MAX_NEIGHBOURS


# --- messages --------------------------------------------------------------------------------


def test_a_kind_that_is_not_known_is_no_error_and_defaults_stand_for_what_is_missing() -> None:
    assert decode_message(99, b"whatever") is None
    assert decode_message(3, b"\x90") == Grant(ANY_PIECE)
    assert decode_message(3, b"\x91\x07") == Grant(7, slots=2)
    assert decode_message(3, b"\x93\x07\x08\x09") == Grant(7, slots=8)


@pytest.mark.parametrize(
    "message",
    [
        NewPieces([70]),
        NewPieces([-1]),
        PieceMapMessage(bytes(8)),
        PieceMapMessage(b"\xff" * 9),
        Needs(bytes(8)),
    ],
)
def test_pieces_that_do_not_exist_are_refused(message: PieceMapMessage | NewPieces | Needs) -> None:
    with pytest.raises(ProtocolError):
        map_in(message, 70)


def test_lists_that_are_too_long_are_refused() -> None:
    body = encode_body(NewPieces([0] * (MAX_NEW_PIECES + 1)))
    with pytest.raises(ProtocolError, match="length"):
        decode_message(2, body)
    with pytest.raises(ProtocolError, match="length"):
        decode_message(1, encode_body(PieceMapMessage(bytes(8193))))


@given(st.integers(0, 6), st.binary(max_size=40))
def test_whatever_comes_is_a_message_or_refused(kind: int, body: bytes) -> None:
    try:
        message = decode_message(kind, body)
        if isinstance(message, PieceMapMessage | NewPieces | Needs):
            assert 0 <= map_in(message, 70) <= full_map(70)
    except ProtocolError:
        pass
