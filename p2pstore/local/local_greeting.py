"""The client's side of a hello on the local socket: connect, ask, map the memories that the peer passes."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Final

from p2pstore.errors import DeadlineExceeded, NoLocalPeer, ProtocolError
from p2pstore.local.local_protocol import Access, Hello, HelloReply, LocalKind, SegmentInfo
from p2pstore.local.local_requests import reply_in
from p2pstore.local.socket_paths import CHOICES, not_a_socket
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES, HazardPage
from p2pstore.memory.mapped.mapped_memory import map_joined, map_read_only, map_table, map_writable
from p2pstore.runtime import linux
from p2pstore.runtime.linux import connected_user, is_shortage, shortage
from p2pstore.runtime.streams import MAX_PASSED_DESCRIPTORS, Driver, UnixStream
from p2pstore.wire import (
    LOCAL_LIMITS,
    LOCAL_MAX_VERSION,
    LOCAL_MIN_VERSION,
    PREFACE_LOCAL,
    FrameBuffer,
    encode_frame,
    negotiate_version,
)

RECEIVE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Opening:
    """A client's wishes to its peer. `location_table`, `hazards`: to map the peer's table of locations, and a page to
    lease by. `directory`: the descriptor of a directory to pass, for requests of this connection; -1 for none.
    `checkpoint`: the version of one in the peer's memory to map. `trusted_users`: the only users whose socket it may
    be; None for any."""

    namespace: str
    access: Access
    location_table: bool = False
    hazards: bool = False
    directory: int = -1
    checkpoint: bytes = b""
    trusted_users: Collection[int] | None = None

    def hello(self) -> Hello:
        """The first message."""
        return Hello(
            LOCAL_MIN_VERSION,
            LOCAL_MAX_VERSION,
            self.namespace,
            self.access,
            os.getpid(),
            location_table=self.location_table,
            directory=self.directory >= 0,
            checkpoint=self.checkpoint,
            hazards=self.hazards and linux.join_barriers(),
        )


@dataclass(slots=True)
class Greeting:
    """The peer's answer, and the memories that came with it: segments in the order of the answer, writable for WRITE
    access; None for what was not wanted, or cannot be had."""

    hello: HelloReply
    segments: list[memoryview]
    location_table: mmap.mmap | None = None
    hazards: HazardPage | None = None
    checkpoint: memoryview | None = None


async def connect_to_peer(driver: Driver, path: str, timeout_seconds: float) -> UnixStream:
    """A connection to `path`. Raises `NoLocalPeer` where no peer listens, `DeadlineExceeded` for one that hangs."""
    try:
        return await driver.connect_unix(path, timeout_seconds)
    except DeadlineExceeded as error:
        raise hangs(path) from error
    except PermissionError as error:
        raise NoLocalPeer(
            f"no permission to use the local socket {path}: run as the peer's user, or start "
            "the peer with --socket-mode and --socket-group"
        ) from error
    except OSError as error:
        if is_shortage(error):
            raise NoLocalPeer(
                f"this process cannot connect to the peer at {path}: {shortage(error)}"
            ) from error
        if what := not_a_socket(path):
            raise NoLocalPeer(f"{path} is {what}, not a peer's socket: {CHOICES} names one") from error
        raise NoLocalPeer(
            f"no peer listens at {path} ({error.strerror}): start one with `mooncake-p2p join`"
        ) from error


def hangs(path: str) -> DeadlineExceeded:
    """The error of a peer that does not answer."""
    return DeadlineExceeded(
        f"the peer at {path} does not answer: its process hangs or was stopped; look at its log, or end "
        "it and start it again"
    )


def user_at(stream: UnixStream) -> int:
    """The user whose process is at the other end, as the kernel has it."""
    with socket.socket(fileno=os.dup(stream.fileno())) as sock:
        return connected_user(sock)


async def greet(stream: UnixStream, path: str, opening: Opening) -> Greeting:
    """Say hello on a fresh connection and map what the peer passes. Raises `NoLocalPeer` for a socket of another user
    than the trusted ones, the peer's error, `ProtocolError`, and as `stream`."""
    user = user_at(stream)
    if opening.trusted_users is not None and user not in opening.trusted_users:
        raise NoLocalPeer(f"the socket {path} belongs to another user's process")
    begin = PREFACE_LOCAL + encode_frame(LocalKind.HELLO, 0, opening.hello())
    with contextlib.suppress(BrokenPipeError):  # refused: the reason can still be received
        if opening.directory < 0:
            await stream.send(begin)
        else:  # nothing was sent before: it fits
            with socket.socket(fileno=os.dup(stream.fileno())) as sock:
                socket.send_fds(sock, [begin], [opening.directory])
    descriptors: list[int] = []
    try:
        hello = await _receive_hello(stream, descriptors)
        return _map_all(hello, descriptors, user, writable=opening.access == Access.WRITE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _receive_hello(stream: UnixStream, descriptors: list[int]) -> HelloReply:
    """The peer's hello; the descriptors with it are added to `descriptors`."""
    frames, buffer = FrameBuffer(LOCAL_LIMITS), memoryview(bytearray(RECEIVE_BYTES))
    while (frame := frames.next_frame()) is None:
        count, passed = await stream.receive_descriptors(buffer)
        descriptors += passed
        if count == 0:
            raise ConnectionResetError
        if len(descriptors) > MAX_PASSED_DESCRIPTORS:
            raise ProtocolError("the peer passed more descriptors than it has segments")
        frames.feed(buffer[:count])
    hello = reply_in(frame, LocalKind.HELLO, HelloReply)
    negotiate_version(hello.version, hello.version)
    return hello


def _map_all(hello: HelloReply, descriptors: list[int], user: int, *, writable: bool) -> Greeting:
    """Map the memories of the hello. `user` could show anything anyway: a file of its memory is taken from it."""
    counts = [max(1, len(segment.pieces)) for segment in hello.segments]
    optional = bool(hello.location_table_bytes) + hello.hazards + bool(hello.checkpoint_bytes)
    if len(descriptors) != sum(counts) + optional:
        raise ProtocolError("the peer did not pass a descriptor for each of its memories")
    writable = writable and hello.access == Access.WRITE
    left = iter(descriptors)
    mapped = Greeting(
        hello,
        [
            _map_segment(segment, list(islice(left, count)), user, writable=writable)
            for segment, count in zip(hello.segments, counts, strict=True)
        ],
    )
    if hello.location_table_bytes:
        descriptor = next(left)
        with contextlib.suppress(OSError):  # no room to map it: the peer can be asked
            mapped.location_table = map_table(descriptor, hello.location_table_bytes)
    if hello.hazards:
        descriptor = next(left)
        with contextlib.suppress(OSError):
            mapped.hazards = HazardPage(map_writable(descriptor, HAZARD_PAGE_BYTES))
    if hello.checkpoint_bytes:
        mapped.checkpoint = map_read_only(next(left), hello.checkpoint_bytes)
    return mapped


def _map_segment(
    segment: SegmentInfo, descriptors: list[int], user: int, *, writable: bool
) -> memoryview:
    length = segment.total_bytes
    if segment.pieces:
        return map_joined(descriptors, segment.pieces, length, writable=writable, trusted_user=user)
    return (map_writable if writable else map_read_only)(descriptors[0], length, trusted_user=user)
