"""Small reads answered in a thread: what it answers, what it leaves to the event loop, and when it ends."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import KIB, MIB
from p2pstore.transfer import read_thread
from p2pstore.transfer.entries import QuickCopy, SmallObjectsLent
from p2pstore.transfer.messages import (
    DataKind,
    Get,
    GetItem,
    GetSmall,
    Objects,
    Ping,
    SmallObjects,
)
from p2pstore.transfer.read_thread import (
    BRISK_READS,
    BRISK_SECONDS,
    MAX_TALLY,
    QUICK_BYTES,
    Briskness,
    LentObject,
    ReadTally,
    ReadThread,
)
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    HEADER_BYTES,
    ONE_WAY,
    REPLY,
    decode_body,
    decode_header,
    encode_frame,
)

SMALL, LARGE, HUGE, ALSO_HUGE, LONG = (name * 16 for name in (b"s", b"l", b"h", b"a", b"L"))
READER = b"reader"
NOT_NOW = b"n" * 16
VALUES = {SMALL: b"small value", LARGE: bytes(range(256)) * 4 * KIB}
HUGE_VALUE = memoryview(bytearray(64 * MIB))
LONG_VALUE = memoryview(bytearray(66 * MIB))


class Source:
    """Objects by digest; what is lent is noted."""

    def __init__(self) -> None:
        self.lent: list[tuple[bytes, int]] = []
        self.ended = 0
        self.is_current = True

    def copy_quickly(self, digest: bytes, into: memoryview) -> QuickCopy | None:
        value = VALUES.get(digest, b"")
        if not value or len(value) > len(into):
            return None
        into[: len(value)] = value
        return QuickCopy(b"slot of " + digest, b"trailer", len(value))

    def lend(self, item: GetItem, reader: bytes, keeps: int) -> LentObject | None:
        longer = {HUGE: HUGE_VALUE, ALSO_HUGE: HUGE_VALUE, LONG: LONG_VALUE}
        value = longer.get(item.digest) or memoryview(VALUES.get(item.digest, b""))
        if not value:
            return None
        self.lent.append((reader, keeps))
        slot = b"slot of " + item.digest
        return LentObject(item.digest, slot, b"trailer", value, lambda: self.is_current, None)

    def end_loan(self, lent: LentObject) -> None:
        self.ended += 1

    def lend_small(self, digests: bytes) -> SmallObjectsLent | None:
        wanted = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        if NOT_NOW in wanted:
            return None
        there = [digest for digest in wanted if digest in VALUES]
        slots = b"".join((digest * 4 if digest in there else bytes(64)) for digest in wanted)
        values = [memoryview(VALUES[digest]) for digest in there]
        self.lent.append((READER, len(there)))
        return SmallObjectsLent(slots, there, values, None)

    def end_small_loan(self, lent: SmallObjectsLent) -> None:
        self.ended += 1


class Served:
    """A thread that serves one end of a connection; `far` is the other one."""

    def __init__(self, far: socket.socket, progress_seconds: float, *, to_the_end: bool) -> None:
        self.far = far
        self.source = Source()
        self.tally = ReadTally()
        self.wanted = True
        self.thread = ReadThread(
            self.source,
            READER,
            self.tally,
            lambda: self.wanted,
            progress_seconds,
            to_the_end=to_the_end,
        )
        self.left: bytes | None = None
        self.error: Exception | None = None
        self.ended = threading.Event()

    def receive(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            more = self.far.recv(length - len(received))
            assert more, "closed"
            received += more
        return received

    def reply(self) -> tuple[int, Objects, bytes]:
        header = decode_header(self.receive(HEADER_BYTES), DATA_REPLY_LIMITS)
        assert (header.kind, header.flags) == (DataKind.GET, REPLY)
        objects = decode_body(Objects, self.receive(header.body_length))
        return header.request_id, objects, self.receive(header.bulk_length)


@pytest.fixture(autouse=True)
def _no_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the tests' next request is not a pause."""
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", 30.0)
    monkeypatch.setattr(read_thread, "PART_PAUSE_SECONDS", 30.0)


@contextmanager
def served(progress_seconds: float = 30.0, *, to_the_end: bool = False) -> Iterator[Served]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(30.0)
    serving = Served(far, progress_seconds, to_the_end=to_the_end)

    def serve() -> None:
        try:
            serving.left = serving.thread.serve(near)
        except Exception as error:
            serving.error = error
        finally:
            serving.ended.set()

    thread = threading.Thread(target=serve)
    with near, far:
        thread.start()
        try:
            yield serving
        finally:
            far.shutdown(socket.SHUT_RDWR)
            thread.join()
            assert near.getblocking() is False
            assert serving.source.ended == len(serving.source.lent)


def get(number: int, *items: GetItem, flags: int = 0) -> bytes:
    return encode_frame(DataKind.GET, number, Get(list(items), keeps=1), flags=flags)


def ended(serving: Served) -> bytes:
    """What the thread left, once it has ended."""
    serving.ended.wait(30)
    assert serving.left is not None, serving.error
    return serving.left


def test_small_values_are_copied_and_larger_ones_sent_from_their_place() -> None:
    with served() as serving:
        for number, digest in enumerate([SMALL, LARGE, SMALL]):
            serving.far.sendall(get(number, GetItem(digest)))
            answered, objects, value = serving.reply()
            (item,) = objects.items
            assert (answered, item.status, item.bulk_bytes) == (number, 0, len(VALUES[digest]))
            assert (item.slot, item.trailer) == (b"slot of " + digest, b"trailer")
            assert value == VALUES[digest]
        assert serving.source.lent == [(READER, 1)]
        serving.far.shutdown(socket.SHUT_WR)
        assert ended(serving) == b""  # answers are counted after they are sent
        digests, length_bytes = serving.tally.take(10)
        assert digests == [SMALL, LARGE, SMALL]
        assert length_bytes > len(VALUES[LARGE]) + 2 * len(VALUES[SMALL])
        assert serving.tally.take_upload_seconds() > 0
        assert serving.tally.take(10) == ([], 0)


def test_pipelined_requests_and_batches_are_answered_in_order() -> None:
    with served() as serving:
        serving.far.sendall(b"".join(get(n, *[GetItem(SMALL)] * n) for n in range(1, 20)))
        for number in range(1, 20):
            answered, objects, values = serving.reply()
            assert (answered, len(objects.items)) == (number, number)
            assert values == VALUES[SMALL] * number


def get_small(number: int, *digests: bytes) -> bytes:
    return encode_frame(DataKind.GET_SMALL, number, GetSmall(b"".join(digests)))


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
        digests, length_bytes = serving.tally.take(10)
        assert digests == [SMALL, LARGE, SMALL]
        assert length_bytes == HEADER_BYTES + header.body_length + header.bulk_length


@pytest.mark.parametrize(
    "request_bytes",
    [
        encode_frame(DataKind.PING, 2, Ping()),
        get(2, GetItem(b"absent".ljust(16))),
        get(2, GetItem(SMALL), GetItem(b"absent".ljust(16))),
        get(2, GetItem(LARGE), GetItem(LARGE)),
        get(2, GetItem(SMALL, 1)),
        get(2, GetItem(LARGE, 1)),
        get(2, GetItem(SMALL), flags=ONE_WAY),
        get(2),
        get(2, GetItem(SMALL))[:-1],
        get_small(2, SMALL, NOT_NOW),
        get_small(2, SMALL[:-1]),
        get_small(2),
        get_small(2, *[SMALL] * 513),
        b"\x00",
        get(2, GetItem(SMALL))[:HEADER_BYTES] + b"\xc1" * 60,
        b"\xff" * 100,
    ],
    ids=[
        *("another kind", "absent", "one of two is absent", "two large ones", "another chunk"),
        *("another chunk of a large one", "one-way", "no items", "half a request"),
        *("not now", "half a digest", "no digests", "too many digests", "a byte"),
        *("no body", "garbage"),
    ],
)
def test_what_it_cannot_answer_is_left_to_the_event_loop(request_bytes: bytes) -> None:
    with served() as serving:
        serving.far.sendall(get(1, GetItem(SMALL)) + request_bytes)
        assert serving.reply()[2] == VALUES[SMALL]
        assert ended(serving) == request_bytes
        assert serving.tally.take(10)[0] == [SMALL]


def test_more_than_an_answer_holds_is_left_to_the_event_loop() -> None:
    VALUES[b"q" * 16] = bytes(QUICK_BYTES)
    with served() as serving:
        request = get(1, *[GetItem(b"q" * 16)] * (2 * MIB // QUICK_BYTES + 1))
        serving.far.sendall(request)
        assert ended(serving) == request
    del VALUES[b"q" * 16]


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
        serving.far.sendall(get(1, GetItem(HUGE)))
        serving.ended.wait(30)
        assert isinstance(serving.error, DeadlineExceeded)
        assert serving.source.ended == 1


def test_a_value_that_the_socket_takes_in_parts_arrives_whole() -> None:
    with served() as serving:
        serving.far.sendall(get(1, GetItem(HUGE)))
        HUGE_VALUE[-1] = 7
        assert serving.reply()[2] == HUGE_VALUE


def test_the_later_parts_of_a_large_object_are_sent_up_to_its_end() -> None:
    with served(to_the_end=True) as serving:
        another = encode_frame(DataKind.PING, 4, Ping())
        parts = get(1, GetItem(HUGE, 16, 16)) + get(2, GetItem(HUGE, 32, 16))
        serving.far.sendall(parts + get(3, GetItem(HUGE, 48, 16)) + another)
        for number in (1, 2, 3):
            answered, objects, value = serving.reply()
            assert (answered, objects.items[0].bulk_bytes) == (number, 16 * MIB)
            assert value == HUGE_VALUE[number * 16 * MIB : (number + 1) * 16 * MIB]
        assert ended(serving) == another
        digests, length_bytes = serving.tally.take(10)
        assert not digests  # nobody began to read
        assert length_bytes > 48 * MIB
        assert serving.tally.added_at == -math.inf  # no small read
        assert (len(serving.source.lent), serving.source.ended) == (1, 1), (
            "lent once, for all parts"
        )


def test_parts_of_several_objects_are_lent_one_after_the_other() -> None:
    with served(to_the_end=True) as serving:
        for number, digest in enumerate((HUGE, ALSO_HUGE, HUGE), 1):
            serving.far.sendall(get(number, GetItem(digest, 16, 16)))
            assert serving.reply()[2] == HUGE_VALUE[16 * MIB : 32 * MIB]
            assert (len(serving.source.lent), serving.source.ended) == (number, number - 1)
        nothing = get(4, GetItem(HUGE, 64, 16))
        serving.far.sendall(nothing)
        assert ended(serving) == nothing
        assert (len(serving.source.lent), serving.source.ended) == (3, 3)


def test_what_was_replaced_since_is_lent_anew() -> None:
    with served(to_the_end=True) as serving:
        for number in (1, 2):
            serving.far.sendall(get(number, GetItem(HUGE, 16, 16)))
            assert len(serving.reply()[2]) == 16 * MIB
            assert (len(serving.source.lent), serving.source.ended) == (number, number - 1)
            serving.source.is_current = False


def test_a_part_is_64_mib_at_most() -> None:
    request = get(1, GetItem(LONG, 1))
    with served(to_the_end=True) as serving:
        serving.far.sendall(request)
        assert ended(serving) == request
        assert (len(serving.source.lent), serving.source.ended) == (1, 1)


def test_after_the_end_it_does_not_wait() -> None:
    with served(to_the_end=True) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 63, 16)))
        assert len(serving.reply()[2]) == MIB
        assert ended(serving) == b""


@pytest.mark.parametrize("small", [get(2, GetItem(SMALL)), get_small(2, SMALL)])
def test_who_sends_parts_does_nothing_else(small: bytes) -> None:
    with served(to_the_end=True) as serving:
        serving.far.sendall(get(1, GetItem(HUGE, 16, 16)) + small)
        assert len(serving.reply()[2]) == 16 * MIB
        assert ended(serving) == small


def test_parts_that_may_be_refused_are_left_to_the_event_loop() -> None:
    request = encode_frame(DataKind.GET, 1, Get([GetItem(HUGE, 16, 16)], may_refuse=True))
    with served(to_the_end=True) as serving:
        serving.far.sendall(request)
        assert ended(serving) == request


def test_a_tally_forgets_the_oldest() -> None:
    tally = ReadTally()
    for _ in range(3):
        tally.add([SMALL] * (MAX_TALLY // 2), 1)
    tally.add([LARGE], 1)
    digests, length_bytes = tally.take(2 * MAX_TALLY)
    assert (len(digests), digests[-1], length_bytes) == (MAX_TALLY, LARGE, 4)


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
