"""Parts of large objects, sent in a thread: which, in how many steps, and when it ends."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence

import pytest

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import MIB
from p2pstore.streams import BytesLike
from p2pstore.transfer import part_thread, read_thread
from p2pstore.transfer.messages import DataKind, Get, GetItem, Ping
from p2pstore.transfer.part_thread import MAX_PARTS, PartThread
from p2pstore.wire import encode_frame
from tests.unit.read_threads import (
    ALSO_HUGE,
    HUGE,
    HUGE_VALUE,
    LONG,
    SMALL,
    ended,
    get,
    get_small,
    served,
)


@pytest.fixture(autouse=True)
def _no_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the tests' next request is not a pause."""
    monkeypatch.setattr(part_thread, "PAUSE_SECONDS", 30.0)


def test_the_later_parts_of_a_large_object_are_sent_up_to_its_end() -> None:
    with served(kind=PartThread) as serving:
        another = encode_frame(DataKind.PING, 4, Ping())
        parts = get(1, GetItem(HUGE, 16, 16)) + get(2, GetItem(HUGE, 32, 16))
        serving.far.sendall(parts + get(3, GetItem(HUGE, 48, 16)) + another)
        for number in (1, 2, 3):
            answered, objects, value = serving.reply()
            assert (answered, objects.items[0].bulk_bytes) == (number, 16 * MIB)
            assert value == HUGE_VALUE[number * 16 * MIB : (number + 1) * 16 * MIB]
        assert ended(serving) == another
        counts, length_bytes = serving.tally.take(10)
        assert not counts  # nobody began to read
        assert length_bytes > 48 * MIB
        assert serving.tally.small_read_at == -math.inf  # no small read
        assert (len(serving.source.lent), serving.source.ended) == (1, 1), (
            "lent once, for all parts"
        )


def test_parts_of_several_objects_are_lent_one_after_the_other() -> None:
    with served(kind=PartThread) as serving:
        for number, digest in enumerate((HUGE, ALSO_HUGE, HUGE), 1):
            serving.far.sendall(get(number, GetItem(digest, 16, 16)))
            assert serving.reply()[2] == HUGE_VALUE[16 * MIB : 32 * MIB]
            assert (len(serving.source.lent), serving.source.ended) == (number, number - 1)
        nothing = get(4, GetItem(HUGE, 64, 16))
        serving.far.sendall(nothing)
        assert ended(serving) == nothing
        assert (len(serving.source.lent), serving.source.ended) == (3, 3)


def test_what_was_replaced_since_is_lent_anew() -> None:
    with served(kind=PartThread) as serving:
        for number in (1, 2):
            serving.far.sendall(get(number, GetItem(HUGE, 16, 16)))
            assert len(serving.reply()[2]) == 16 * MIB
            assert (len(serving.source.lent), serving.source.ended) == (number, number - 1)
            serving.source.is_current = False


def test_a_part_is_64_mib_at_most() -> None:
    request = get(1, GetItem(LONG, 1))
    with served(kind=PartThread) as serving:
        serving.far.sendall(request)
        assert ended(serving) == request
        assert (len(serving.source.lent), serving.source.ended) == (1, 1)


def test_after_the_end_it_does_not_wait() -> None:
    with served(kind=PartThread) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 63, 16)))
        assert len(serving.reply()[2]) == MIB
        assert ended(serving) == b""


def test_while_small_ones_are_read_it_begins_with_the_next_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_thread, "NEXT_OBJECT_SECONDS", 30.0)
    with served(kind=PartThread) as serving:
        serving.tally.small_read_at = math.inf
        requests = [GetItem(HUGE, 48, 16), GetItem(ALSO_HUGE, 0, 16), GetItem(ALSO_HUGE, 16, 48)]
        serving.far.sendall(b"".join(get(n, item) for n, item in enumerate(requests)))
        for number, item in enumerate(requests):
            answered, _, value = serving.reply()
            assert answered == number
            assert value == item.of(HUGE_VALUE)
        serving.far.sendall(get(3, GetItem(HUGE, 0, 16)))
        assert serving.reply()[2] == HUGE_VALUE[: 16 * MIB]
        other = get(4, GetItem(SMALL))
        serving.far.sendall(other)
        assert ended(serving) == other
        assert serving.tally.take(10)[0] == {ALSO_HUGE: 1, HUGE: 1}
        assert len(serving.source.lent) == 3


def test_it_does_not_wait_for_long_for_the_next_object() -> None:
    with served(kind=PartThread) as serving:
        serving.tally.small_read_at = math.inf
        serving.far.sendall(get(1, GetItem(HUGE, 63, 16)))
        assert len(serving.reply()[2]) == MIB
        assert ended(serving) == b""


def test_each_reading_of_an_object_is_lent_anew() -> None:
    """Its source counts them, and may say who else has what is hot."""
    with served(kind=PartThread) as serving:
        serving.tally.small_read_at = math.inf
        requests = [GetItem(HUGE, first, 32) for first in (0, 32)] * 3
        serving.far.sendall(b"".join(get(n, item) for n, item in enumerate(requests)))
        for item in requests:
            assert serving.reply()[2] == item.of(HUGE_VALUE)
        serving.far.sendall(get_small(9, SMALL))
        ended(serving)
        assert len(serving.source.lent) == 3
        assert serving.tally.take(10)[0] == {HUGE: 3}


def test_when_nobody_reads_small_ones_it_begins_with_no_object() -> None:
    with served(kind=PartThread) as serving:
        first = get(2, GetItem(ALSO_HUGE, 0, 16))
        serving.far.sendall(get(1, GetItem(HUGE, 16, 16)) + first)
        assert len(serving.reply()[2]) == 16 * MIB
        assert ended(serving) == first


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts left with each call."""
    seen: list[int] = []

    def send_all(sock: socket.socket, parts: Sequence[BytesLike], seconds: float) -> None:
        seen.append(len(parts) // 2)
        read_thread.send_all(sock, parts, seconds)

    monkeypatch.setattr(part_thread, "send_all", send_all)
    return seen


def test_what_was_asked_for_by_then_is_sent_with_one_call(sends: list[int]) -> None:
    """Up to `MAX_PARTS`, of one object, as long as that may be lent."""
    with served(kind=PartThread) as serving:
        wanted = [*([HUGE] * (MAX_PARTS + 3)), ALSO_HUGE, ALSO_HUGE, HUGE]
        requests = [get(n, GetItem(digest, 1 + n, 1)) for n, digest in enumerate(wanted)]
        serving.far.sendall(b"".join(requests))
        for number in range(len(wanted)):
            answered, objects, value = serving.reply()
            assert (answered, len(objects.items)) == (number, 1)
            assert value == HUGE_VALUE[(1 + number) * MIB : (2 + number) * MIB]
        assert sends == [MAX_PARTS, 3, 2, 1]
        assert (len(serving.source.lent), serving.source.ended) == (3, 2)


def test_while_it_sends_it_takes_no_core_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[int] = []

    def send_all(sock: socket.socket, parts: Sequence[BytesLike], seconds: float) -> None:
        policies.append(os.sched_getscheduler(0))
        read_thread.send_all(sock, parts, seconds)

    monkeypatch.setattr(part_thread, "send_all", send_all)
    with served(kind=PartThread) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 48, 16)))
        serving.reply()
    assert policies == [os.SCHED_BATCH]


def test_what_waits_to_be_sent_stays_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is replaced while its parts are gathered."""
    with served(kind=PartThread) as serving:
        source, ended_before_sent = serving.source, []
        still = iter((True, False, False))
        source.is_current_now = lambda: next(still, True)

        def send_all(sock: socket.socket, parts: Sequence[BytesLike], seconds: float) -> None:
            ended_before_sent.append((len(parts) // 2, source.ended))
            read_thread.send_all(sock, parts, seconds)

        monkeypatch.setattr(part_thread, "send_all", send_all)
        serving.far.sendall(b"".join(get(n, GetItem(HUGE, 1 + n, 1)) for n in range(4)))
        for _ in range(4):
            assert len(serving.reply()[2]) == MIB
        assert ended_before_sent == [(2, 0), (2, 1)]
        assert len(source.lent) == 2


def test_what_follows_the_last_part_is_left_to_the_event_loop(sends: list[int]) -> None:
    with served(kind=PartThread) as serving:
        last, another = get(2, GetItem(HUGE, 63, 1)), get(3, GetItem(HUGE, 1, 1))
        serving.far.sendall(get(1, GetItem(HUGE, 62, 1)) + last + another)
        assert len(serving.reply()[2]) == len(serving.reply()[2]) == MIB
        assert ended(serving) == another
        assert sends == [2]


def test_many_parts_that_the_socket_takes_in_pieces_arrive_whole() -> None:
    with served(kind=PartThread) as serving:
        serving.far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        serving.far.sendall(b"".join(get(n, GetItem(HUGE, n, 15)) for n in (1, 16, 31, 46)))
        for first in (1, 16, 31, 46):
            assert serving.reply()[2] == HUGE_VALUE[first * MIB : (first + 15) * MIB]


def test_who_does_not_read_is_cut() -> None:
    with served(0.1, PartThread) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 1, 16)) + get(2, GetItem(HUGE, 17, 16)))
        serving.ended.wait(30)
        assert isinstance(serving.error, DeadlineExceeded)
        assert serving.source.ended == 1


@pytest.mark.parametrize("small", [get(2, GetItem(SMALL)), get_small(2, SMALL)])
def test_who_sends_parts_does_nothing_else(small: bytes) -> None:
    with served(kind=PartThread) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 16, 16)) + small)
        assert len(serving.reply()[2]) == 16 * MIB
        assert ended(serving) == small


def test_parts_that_may_be_refused_are_left_to_the_event_loop() -> None:
    request = encode_frame(DataKind.GET, 1, Get([GetItem(HUGE, 16, 16)], may_refuse=True))
    with served(kind=PartThread) as serving:
        serving.far.sendall(request)
        assert ended(serving) == request
