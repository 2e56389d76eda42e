"""Threads that answer reads, each on one end of a pair of sockets, and the objects that they have to give."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from p2pstore.memory.entries import SmallObjectsLent
from p2pstore.objects import KIB, MIB, PART_BYTES
from p2pstore.transfer.data_messages import (
    DataKind,
    Get,
    GetItem,
    GetSmall,
    ObjectReply,
    Objects,
    ObjectStatus,
    SmallObjects,
)
from p2pstore.transfer.serving.read_answers import LentObject, ReadAnswers, Traffic
from p2pstore.transfer.serving.read_thread import ReadThread
from p2pstore.transfer.serving.serving_limits import Uploads
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    HEADER_BYTES,
    REPLY,
    decode_body,
    decode_header,
    encode_frame,
)

SMALL, LARGE, HUGE, ALSO_HUGE, LONG = (bytes([name]) * 16 for name in b"slhaL")
READER = b"reader"
NOT_NOW = b"n" * 16
VALUES = {SMALL: b"small value", LARGE: bytes(range(256)) * 4 * KIB}
HUGE_VALUE = memoryview(bytearray(64 * MIB))
LONG_VALUE = memoryview(bytearray(66 * MIB))


class Source:
    """Objects by digest; notes each loan."""

    def __init__(self) -> None:
        self.lent: list[tuple[bytes, int]] = []
        self.ended = 0

    def lend(
        self, item: GetItem, reader: bytes, keeps: int, *, decides: bool
    ) -> LentObject | ObjectReply | None:
        longer = {HUGE: HUGE_VALUE, ALSO_HUGE: HUGE_VALUE, LONG: LONG_VALUE}
        value = longer.get(item.digest) or memoryview(VALUES.get(item.digest, b""))
        if not value:
            return ObjectReply(ObjectStatus.NOT_FOUND) if decides else None
        self.lent.append((reader, keeps))
        return LentObject(b"slot of " + item.digest, b"trailer", value, item.digest)

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        digests = asked.digests
        wanted = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        if NOT_NOW in wanted:
            return None
        there = [digest for digest in wanted if 0 < len(VALUES.get(digest, b"")) <= asked.most_bytes]
        slots = b"".join((digest * 4 if digest in there else bytes(64)) for digest in wanted)
        values = [memoryview(VALUES[digest]) for digest in there]
        self.lent.append((READER, len(there)))
        return SmallObjectsLent(slots, there, values, sum(map(len, values)), digests)

    def end_loan(self, handle: bytes) -> None:
        self.ended += 1


class Served:
    """A thread that serves one end of a connection; `far` is the other one."""

    def __init__(self, far: socket.socket, progress_seconds: float, first: bytes) -> None:
        self.far = far
        self.source = Source()
        self.wanted = True
        self.uploads = Uploads(1)
        traffic = Traffic(self.uploads)
        self.tally = traffic.tally
        self.answers = ReadAnswers(self.source, READER, traffic, PART_BYTES)
        self.thread = ReadThread(
            self.answers, lambda: self.wanted, progress_seconds, first, in_bulk=bool(first)
        )
        self.left: bytes | None = None
        self.error: Exception | None = None
        self.policy = -1
        """The kernel's, of the thread, when it has ended."""
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

    def small_reply(self) -> tuple[list[bool], bytes]:
        """Which of those that were asked for came, and their values."""
        header = decode_header(self.receive(HEADER_BYTES), DATA_REPLY_LIMITS)
        assert (header.kind, header.flags) == (DataKind.GET_SMALL, REPLY)
        slots = decode_body(SmallObjects, self.receive(header.body_length)).slots
        came = [any(slots[at : at + 64]) for at in range(0, len(slots), 64)]
        return came, self.receive(header.bulk_length)


@contextmanager
def served(progress_seconds: float = 30.0, first: bytes = b"") -> Iterator[Served]:
    """A thread that serves a connection, and after that has ended every loan."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(30.0)
    serving = Served(far, progress_seconds, first)

    def serve() -> None:
        try:
            serving.left = serving.thread.serve(near)
        except Exception as error:
            serving.error = error
        finally:
            serving.policy = os.sched_getscheduler(0)
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
            assert serving.policy == os.SCHED_OTHER, "others use the thread again"
            assert serving.source.ended == len(serving.source.lent)
            assert serving.uploads.taken == 0


def get(number: int, *items: GetItem, flags: int = 0) -> bytes:
    return encode_frame(DataKind.GET, number, Get(list(items), keeps=1), flags=flags)


def ended(serving: Served) -> bytes:
    """The requests that the thread left, once it has ended."""
    serving.ended.wait(30)
    assert serving.left is not None, serving.error
    return serving.left


def get_small(number: int, *digests: bytes, most_bytes: int = MIB) -> bytes:
    return encode_frame(DataKind.GET_SMALL, number, GetSmall(b"".join(digests), most_bytes))
