"""Small reads answered in a thread: what it answers, what it leaves to the event loop, and when it ends."""

import math
import os
import socket
from collections import Counter
from collections.abc import Sequence

import pytest

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import MIB
from p2pstore.runtime import streams
from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_messages import DataKind, Get, GetItem, Ping, SmallObjects
from p2pstore.transfer.serving import read_thread
from p2pstore.transfer.serving.read_answers import COUNTED_READS, MAX_TALLY, ReadTally
from p2pstore.transfer.serving.read_thread import BRISK_READS, BRISK_SECONDS, Briskness
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    HEADER_BYTES,
    ONE_WAY,
    REPLY,
    decode_body,
    decode_header,
    encode_frame,
)
from tests.unit.read_threads import (
    ALSO_HUGE,
    HUGE,
    HUGE_VALUE,
    LARGE,
    LONG,
    NOT_NOW,
    READER,
    SMALL,
    VALUES,
    ended,
    get,
    get_small,
    served,
)


@pytest.fixture(autouse=True)
def _no_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the tests' next request is not a pause."""
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", 30.0)


def test_objects_are_sent_from_their_places() -> None:
    with served() as serving:
        for number, digest in enumerate([SMALL, LARGE, SMALL]):
            serving.far.sendall(get(number, GetItem(digest)))
            answered, objects, value = serving.reply()
            (item,) = objects.items
            assert (answered, item.status, item.bulk_bytes) == (number, 0, len(VALUES[digest]))
            assert (item.slot, item.trailer) == (b"slot of " + digest, b"trailer")
            assert value == VALUES[digest]
        assert serving.source.lent == [(READER, 1)] * 3
        serving.far.shutdown(socket.SHUT_WR)
        assert ended(serving) == b""  # answers are counted after they are sent
        counts, length_bytes = serving.tally.take(10)
        assert counts == {SMALL: 2, LARGE: 1}
        assert length_bytes > len(VALUES[LARGE]) + 2 * len(VALUES[SMALL])
        assert serving.uploads.seconds(0.0) > 0
        assert serving.tally.take(10) == ({}, 0)


def test_when_all_places_are_taken_the_event_loop_refuses_larger_ones() -> None:
    with served() as serving:
        serving.uploads.begin(0.0)
        serving.far.sendall(get(1, GetItem(LARGE)))  # its reader knows no other holder
        assert serving.reply()[2] == VALUES[LARGE]
        small, large = (
            encode_frame(DataKind.GET, 2, Get([GetItem(digest)], may_refuse=True))
            for digest in (SMALL, LARGE)
        )
        serving.far.sendall(small + large)
        assert serving.reply()[2] == VALUES[SMALL]
        assert ended(serving) == large
        serving.uploads.end(0.0, 0.0)


@pytest.mark.parametrize(("item", "is_small"), [(GetItem(SMALL), True), (GetItem(LARGE), False)])
def test_larger_reads_do_not_count_as_small_ones(item: GetItem, is_small: bool) -> None:
    with served() as serving:
        serving.far.sendall(get(1, item))
        serving.reply()
        serving.far.sendall(get(2))
        ended(serving)
        assert serving.tally.small_reads_go_on is is_small


def test_pipelined_requests_and_batches_are_answered_in_order() -> None:
    with served() as serving:
        serving.far.sendall(b"".join(get(n, *[GetItem(SMALL)] * n) for n in range(1, 20)))
        for number in range(1, 20):
            answered, objects, values = serving.reply()
            assert (answered, len(objects.items)) == (number, number)
            assert values == VALUES[SMALL] * number


def test_many_small_objects_are_sent_from_their_places() -> None:
    absent = b"absent".ljust(16)
    with served() as serving:
        serving.far.sendall(get_small(7, SMALL, absent, LARGE, SMALL))
        header = decode_header(serving.receive(HEADER_BYTES), DATA_REPLY_LIMITS)
        assert (header.kind, header.flags, header.request_id) == (DataKind.GET_SMALL, REPLY, 7)
        slots = decode_body(SmallObjects, serving.receive(header.body_length)).slots
        assert slots == SMALL * 4 + bytes(64) + LARGE * 4 + SMALL * 4
        values = serving.receive(header.bulk_length)
        assert values == VALUES[SMALL] + VALUES[LARGE] + VALUES[SMALL]
        serving.far.sendall(get(8))  # after that, what was read is noted
        assert ended(serving) == get(8)
        counts, length_bytes = serving.tally.take(10)
        assert counts == {SMALL: 2, LARGE: 1}
        assert length_bytes == HEADER_BYTES + header.body_length + header.bulk_length


@pytest.mark.parametrize("digest", [SMALL, LARGE])
def test_large_objects_sent_together_are_an_upload_and_no_small_read(digest: bytes) -> None:
    with served() as serving:
        serving.far.sendall(get_small(1, digest, digest) + get_small(2, digest))
        for count in (2, 1):
            assert serving.small_reply() == ([True] * count, VALUES[digest] * count)
        serving.far.sendall(get(3))
        ended(serving)
        assert serving.tally.small_reads_go_on is (digest is SMALL)
        assert (serving.uploads.seconds(0.0) > 0.0) is (digest is LARGE)


def test_when_all_places_are_taken_only_small_objects_are_sent_together() -> None:
    """GET is to say what becomes of the others."""
    with served() as serving:
        serving.uploads.begin(0.0)
        serving.far.sendall(get_small(1, SMALL, LARGE, LARGE))
        assert serving.small_reply() == ([True, False, False], VALUES[SMALL])
        serving.far.sendall(get_small(2, LARGE))
        assert serving.small_reply() == ([False], b"")
        # Asked once, for small ones alone: loans count as reads of hot objects.
        assert serving.source.lent == [(READER, 1), (READER, 0)]
        serving.far.sendall(get(3))
        ended(serving)
        serving.uploads.end(0.0, 0.0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        encode_frame(DataKind.PING, 2, Ping()),
        get(2, GetItem(b"absent".ljust(16))),
        get(2, GetItem(SMALL), GetItem(b"absent".ljust(16))),
        get(2, GetItem(LONG)),
        get(2, GetItem(HUGE), GetItem(HUGE, 1)),
        get(2, GetItem(SMALL), flags=ONE_WAY),
        get(2),
        get_small(2, SMALL, NOT_NOW),
        get_small(2, SMALL[:-1]),
        get_small(2),
        get_small(2, *[SMALL] * 513),
        encode_frame(DataKind.PING, 2, Ping())[:-1],
        get(2, GetItem(SMALL), flags=ONE_WAY)[:-1],
        get(2, GetItem(SMALL))[:HEADER_BYTES] + b"\xc1" * 60,
        b"\xff" * 100,
    ],
    ids=[
        *("another kind", "absent", "one of two is absent", "too long", "too much"),
        *("one-way", "no items"),
        *("not now", "half a digest", "no digests", "too many digests"),
        *("half a request of another kind", "half of one that is one-way", "no body", "garbage"),
    ],
)
def test_what_it_cannot_answer_is_left_to_the_event_loop(request_bytes: bytes) -> None:
    with served() as serving:
        serving.far.sendall(get(1, GetItem(SMALL)) + request_bytes)
        assert serving.reply()[2] == VALUES[SMALL]
        assert ended(serving) == request_bytes
        assert serving.tally.take(10)[0] == {SMALL: 1}


@pytest.mark.parametrize("length", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -1])
def test_a_request_that_comes_in_pieces_is_answered(length: int) -> None:
    request = get_small(2, *[SMALL] * 300)
    with served() as serving:
        serving.far.sendall(get(1, GetItem(SMALL)) + request[:length])
        assert serving.reply()[0] == 1  # the bytes behind it were received as well
        serving.far.sendall(request[length:] + get(3, GetItem(LARGE)))
        header = decode_header(serving.receive(HEADER_BYTES), DATA_REPLY_LIMITS)
        assert (header.kind, header.request_id) == (DataKind.GET_SMALL, 2)
        serving.receive(header.body_length + header.bulk_length)
        assert serving.reply()[::2] == (3, VALUES[LARGE])
        assert not serving.ended.is_set()


@pytest.mark.parametrize("closes", [False, True])
def test_the_half_of_a_request_of_which_no_more_comes_is_left_to_the_event_loop(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", 30.0 if closes else 0.2)
    half = get(2, GetItem(SMALL))[:-1]
    with served() as serving:
        serving.far.sendall(get(1, GetItem(SMALL)) + half)
        assert serving.reply()[0] == 1
        if closes:
            serving.far.shutdown(socket.SHUT_WR)
        assert ended(serving) == half


def test_a_request_that_drips_in_is_left_to_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within a pause, and all of them would have the thread for minutes."""
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", 0.2)
    request = get_small(2, *[SMALL] * 400)
    with served() as serving:
        serving.far.sendall(get(1, GetItem(SMALL)))
        assert serving.reply()[0] == 1
        sent = 0
        while not serving.ended.wait(0.02):
            serving.far.sendall(request[sent : sent + 1])
            sent += 1
        assert serving.left == request[: len(serving.left or b"")]
        assert 0 < len(serving.left) <= sent < 100


def test_it_ends_with_a_pause_the_connection_or_when_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served() as serving:
        serving.far.shutdown(socket.SHUT_WR)
        assert ended(serving) == b""
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", 0.05)
    with served() as serving:
        assert ended(serving) == b""
    with served() as serving:
        serving.wanted = False
        serving.far.sendall(get(1, GetItem(SMALL)))
        assert ended(serving) == b"" or serving.left == get(1, GetItem(SMALL))


def test_who_does_not_read_is_cut() -> None:
    with served(progress_seconds=0.1) as serving:
        serving.far.sendall(get(1, GetItem(HUGE)) + get(2, GetItem(HUGE)))
        serving.ended.wait(30)
        assert isinstance(serving.error, DeadlineExceeded)
        assert serving.source.ended == 2


# --- large objects -------------------------------------------------------------------------------


def part(number: int, first_chunk: int, chunks: int = 16, digest: bytes = HUGE) -> bytes:
    return get(number, GetItem(digest, first_chunk, chunks))


def test_a_large_object_is_sent_from_the_request_that_was_there_to_its_end() -> None:
    with served(first=part(0, 0)) as serving:
        serving.far.sendall(part(1, 16) + part(2, 32) + part(3, 48))
        for number in range(4):
            answered, objects, value = serving.reply()
            assert (answered, objects.items[0].bulk_bytes) == (number, 16 * MIB)
            assert value == HUGE_VALUE[number * 16 * MIB : (number + 1) * 16 * MIB]
        serving.far.sendall(part(4, 0, digest=ALSO_HUGE))  # and the next one
        assert serving.reply()[2] == HUGE_VALUE[: 16 * MIB]
        other = encode_frame(DataKind.PING, 5, Ping())
        serving.far.sendall(other)
        assert ended(serving) == other
        counts, length_bytes = serving.tally.take(10)
        assert counts == {HUGE: 1, ALSO_HUGE: 1}
        assert length_bytes > 80 * MIB
        assert serving.tally.small_read_at == -math.inf


def test_what_was_there_and_is_not_for_a_thread_comes_back() -> None:
    request = get(1, GetItem(b"absent".ljust(16)))
    with served(first=request) as serving:
        assert ended(serving) == request


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many answers left with each call, and the kernel's policy for the thread."""
    seen: list[tuple[int, int]] = []

    def send_all(sock: socket.socket, parts: Sequence[BytesLike], seconds: float) -> None:
        seen.append((len(parts) // 2, os.sched_getscheduler(0)))
        streams.send_all(sock, parts, seconds)

    monkeypatch.setattr(read_thread, "send_all", send_all)
    return seen


def test_what_was_asked_for_by_then_is_sent_with_one_call(sends: list[tuple[int, int]]) -> None:
    """And takes no core from others."""
    requests = [part(number, 1 + number, 1) for number in range(11)]
    with served(first=b"".join(requests)) as serving:
        for number in range(11):
            assert serving.reply()[2] == HUGE_VALUE[(1 + number) * MIB : (2 + number) * MIB]
    assert sends == [(8, os.SCHED_BATCH), (3, os.SCHED_BATCH)]


def test_many_parts_that_the_socket_takes_in_pieces_arrive_whole() -> None:
    with served() as serving:
        serving.far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        serving.far.sendall(b"".join(part(n, n, 15) for n in (1, 16, 31, 46)))
        for first in (1, 16, 31, 46):
            assert serving.reply()[2] == HUGE_VALUE[first * MIB : (first + 15) * MIB]


def test_a_tally_forgets_the_oldest() -> None:
    tally = ReadTally()
    for _ in range(3):
        tally.add([SMALL] * (MAX_TALLY // 2), 1)
    tally.add([LARGE], 1)
    counts, length_bytes = all_of(tally)
    assert counts == {SMALL: MAX_TALLY - 1, LARGE: 1}
    assert length_bytes == 4


def test_a_tally_is_counted_in_steps_and_given_in_steps() -> None:
    tally = ReadTally()
    digests = [bytes([number]) * 16 for number in range(25)]
    for _ in range(100):
        tally.add(digests, 3)
    steps = []
    while tally.has_more:
        steps.append(tally.take(10))
    given = [counts for counts, _ in steps if counts]
    assert len(steps) - len(given) == 25 * 100 // COUNTED_READS
    assert [len(counts) for counts in given] == [10, 10, 5]
    assert all(set(counts.values()) == {100} for counts in given), "each at once"
    assert sum(length_bytes for _, length_bytes in steps) == 300


def all_of(tally: ReadTally) -> tuple[Counter[bytes], int]:
    counts, length_bytes = Counter[bytes](), 0
    while tally.has_more:
        some, some_bytes = tally.take(10)
        counts.update(some)
        length_bytes += some_bytes
    return counts, length_bytes


def test_reads_are_brisk_that_follow_one_another() -> None:
    brisk = Briskness()
    for number in range(BRISK_READS):
        assert not brisk.is_brisk
        brisk.answered(number * BRISK_SECONDS / 2, quick=True)
    assert brisk.is_brisk
    brisk.answered(BRISK_READS * BRISK_SECONDS, quick=False)
    assert not brisk.is_brisk
    for number in range(3 * BRISK_READS):
        brisk.answered(100 + number * BRISK_SECONDS * 2, quick=True)
        assert not brisk.is_brisk
