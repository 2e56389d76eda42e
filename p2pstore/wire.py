"""Frames: what control streams, data connections and the local socket have in common. Sans-IO.

A frame is a 16-byte header, a msgpack body and, on data connections, raw bulk bytes:

    u16 kind | u16 flags | u32 request id | u32 body length | u32 bulk length      (little-endian)

A body is a msgpack array whose elements are the fields of one message in order. A newer version
appends fields; an older reader ignores what it does not know, and an absent field has its default.
A reply carries its request's kind and id and the REPLY flag; ERROR in its place makes the body a
`Failure`. A frame with ONE_WAY is not answered. A kind that is not known is answered `UNSUPPORTED`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from p2pstore import errors
from p2pstore.errors import P2PStoreError, ProtocolError, ProtocolMismatch

HEADER: Final = struct.Struct("<HHIII")
HEADER_BYTES: Final = HEADER.size

REPLY: Final = 1
ERROR: Final = 2
ONE_WAY: Final = 4

PREFACE_DATA: Final = b"P2PSTORD"
PREFACE_LOCAL: Final = b"P2PSTORL"
PREFACE_BYTES: Final = 8
"""First bytes from the connecting side of a data connection or of the local socket."""

CONTROL_PROTOCOL: Final = "/p2pstore/control/1"
"""Protocol id of the libp2p streams; a stream needs no preface."""

MIN_CONTROL_VERSION: Final = 2
MAX_CONTROL_VERSION: Final = 2
"""Of control streams. 2: location records carry the root."""

LOCAL_MIN_VERSION: Final = 1
LOCAL_MAX_VERSION: Final = 2
"""Of the local socket. 2: puts in columns. Data connections have versions of their own (`data_messages`)."""

_KEPT_BYTES: Final = 64 * 1024
"""Most bytes that a `FrameBuffer` keeps of a frame that was taken."""
HELLO_BODY_LIMIT: Final = 4 * 1024
"""Cap on a body before the other side has proved itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one protocol's frames."""

    body_bytes: int
    bulk_bytes: int


HELLO_LIMITS: Final = Limits(HELLO_BODY_LIMIT, 0)
CONTROL_LIMITS: Final = Limits(4 * 1024 * 1024, 0)
LOCAL_LIMITS: Final = Limits(4 * 1024 * 1024, 0)
DATA_REQUEST_LIMITS: Final = Limits(1024 * 1024, 16 * 1024 * 1024)
DATA_REPLY_LIMITS: Final = Limits(4 * 1024 * 1024, 1024 * 1024 * 1024)


class Code(IntEnum):
    """Why a request failed, as sent. Numbers never change meaning."""

    INTERNAL = 1
    UNSUPPORTED = 2
    MALFORMED = 3
    AUTHENTICATION_FAILED = 4
    PROTOCOL_MISMATCH = 5
    NO_SUCH_KEY = 6
    UNAVAILABLE = 7
    DEADLINE_EXCEEDED = 8
    BUFFER_TOO_SMALL = 9
    OBJECT_TOO_LARGE = 10
    CAPACITY_EXCEEDED = 11
    LEASE_LIMIT_EXCEEDED = 12
    CLOSED = 13
    BUSY = 14
    STALE = 15
    DUPLICATE_IDENTITY = 16
    WRONG_CLUSTER = 17
    INVALID_ARGUMENT = 18
    CHECKPOINT_REFUSED = 19
    CHECKPOINT_CHANGED = 20
    BAD_SETTING = 21
    ANSWER_TOO_LARGE = 22


_ERROR_OF: Final[dict[Code, type[P2PStoreError] | type[ValueError]]] = {
    Code.UNSUPPORTED: errors.ProtocolMismatch,  # before the code that this error is sent as
    Code.MALFORMED: errors.ProtocolError,
    Code.AUTHENTICATION_FAILED: errors.AuthenticationFailed,
    Code.PROTOCOL_MISMATCH: errors.ProtocolMismatch,
    Code.NO_SUCH_KEY: errors.NoSuchKey,
    Code.UNAVAILABLE: errors.Unavailable,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Code.OBJECT_TOO_LARGE: errors.ObjectTooLarge,
    Code.CAPACITY_EXCEEDED: errors.CapacityExceeded,
    Code.LEASE_LIMIT_EXCEEDED: errors.LeaseLimitExceeded,
    Code.CLOSED: errors.StoreClosed,
    Code.DUPLICATE_IDENTITY: errors.DuplicateIdentity,
    Code.INVALID_ARGUMENT: ValueError,
    Code.BAD_SETTING: errors.ConfigError,
    Code.CHECKPOINT_REFUSED: errors.CheckpointRefused,
    Code.CHECKPOINT_CHANGED: errors.CheckpointChanged,
    Code.ANSWER_TOO_LARGE: errors.AnswerTooLarge,
}
_CODE_OF: Final[dict[type, Code]] = {error: code for code, error in _ERROR_OF.items()} | {
    errors.BufferTooSmall: Code.BUFFER_TOO_SMALL
}


def code_of(error: BaseException) -> Code:
    """The code that says what this error says; INTERNAL for what was not raised on purpose."""
    for kind in type(error).__mro__:
        if code := _CODE_OF.get(kind):
            return code
    return Code.INTERNAL


def error_of(code: int, text: str, detail: int = 0) -> P2PStoreError | ValueError:
    """The error that the other side described by `code`."""
    if code == Code.BUFFER_TOO_SMALL:
        return errors.BufferTooSmall(text, detail)
    if code in (Code.BUSY, Code.STALE):
        return errors.Unavailable(text)
    return _ERROR_OF.get(cast(Code, code), P2PStoreError)(text)


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all message bodies: msgpack arrays, fields in order, new fields at the end. Plain data: no cycle goes
    through one, and the collector of garbage need not look at it."""


class Failure(Message, frozen=True):
    """Body of a frame with the ERROR flag. `detail` is a number that some codes explain."""

    code: int
    text: str
    detail: int = 0


class Empty(Message, frozen=True):
    """A body without fields."""


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """The head before a body. (A dataclass would take five times as long to make.)"""

    kind: int
    flags: int
    request_id: int
    body_length: int
    bulk_length: int


M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, Any] = {}


def encode_body(message: Message) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_body(message_type: type[M], body: bytes | bytearray | memoryview) -> M:
    """The message in `body`. Raises `ProtocolError` when it is not one."""
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.msgpack.Decoder(message_type)
    try:
        decoded: M = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed {message_type.__name__}: {error}") from error
    return decoded


def encode_frame(
    kind: int, request_id: int, message: Message, *, flags: int = 0, bulk_length: int = 0
) -> bytes:
    """Header and body; the caller sends `bulk_length` raw bytes after it."""
    body = _encoder.encode(message)
    return HEADER.pack(kind, flags, request_id, len(body), bulk_length) + body


def encode_failure(kind: int, request_id: int, code: Code, text: str, detail: int = 0) -> bytes:
    """The frame that answers a request with an error."""
    return encode_frame(kind, request_id, Failure(code, text[:1000], detail), flags=REPLY | ERROR)


def decode_header(
    data: bytes | bytearray | memoryview, limits: Limits, position: int = 0
) -> FrameHeader:
    """Parse 16 header bytes. Raises `ProtocolError` when a length is above its cap."""
    kind, flags, request_id, body_length, bulk_length = HEADER.unpack_from(data, position)
    if body_length > limits.body_bytes or bulk_length > limits.bulk_bytes:
        raise ProtocolError(
            f"a frame of kind {kind} announces {body_length:,} + {bulk_length:,} bytes; "
            f"at most {limits.body_bytes:,} + {limits.bulk_bytes:,} are allowed"
        )
    return FrameHeader(kind, flags, request_id, body_length, bulk_length)


class FrameBuffer:
    """Collects received bytes and cuts them into frames.

    Every whole frame that has arrived can be taken before more is read, so that a server answers
    all pipelined requests with one gathered send. Bulk bytes are not collected: after a frame whose
    header announces some, they are taken with `take_into` and received past this buffer.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._data = bytearray()
        self._position = 0

    def sole_frame(self, data: bytes | memoryview) -> tuple[FrameHeader, bytes] | None:
        """The frame that `data` is, when nothing was fed before and it is one, whole: what a lone caller
        receives nearly always. Otherwise None, and `data` is to be fed."""
        if self._position < len(self._data) or len(data) < HEADER_BYTES:
            return None
        header = decode_header(data, self.limits)
        if header.bulk_length or HEADER_BYTES + header.body_length != len(data):
            return None
        return header, bytes(data[HEADER_BYTES:])

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append what a receive returned."""
        if self._position:
            del self._data[: self._position]
            self._position = 0
        self._data += data

    def next_frame(self) -> tuple[FrameHeader, bytes] | None:
        """The next frame with its whole body, or None when more bytes are needed. Raises
        `ProtocolError`."""
        available = len(self._data) - self._position
        if available < HEADER_BYTES:
            return None
        header = decode_header(self._data, self.limits, self._position)
        end = HEADER_BYTES + header.body_length
        if available < end:
            return None
        start = self._position
        body = bytes(self._data[start + HEADER_BYTES : start + end])
        self._position += end
        if end > _KEPT_BYTES:  # it would stay until more comes
            del self._data[: self._position]
            self._position = 0
        return header, body

    @property
    def has_frame(self) -> bool:
        """Whether `next_frame` would return one, or raise."""
        if self.pending_bytes < HEADER_BYTES:
            return False
        *_, body_length, bulk_length = HEADER.unpack_from(self._data, self._position)
        whole: bool = self.pending_bytes >= HEADER_BYTES + body_length
        return whole or body_length > self.limits.body_bytes or bulk_length > self.limits.bulk_bytes

    def drop(self) -> None:
        """Forget what has arrived: something, such as the traceback of an error, may refer to this buffer for long."""
        self._data, self._position = bytearray(), 0

    def take_into(self, view: memoryview) -> int:
        """Move bulk bytes that came along with frames to the beginning of `view`; how many they were."""
        count = min(len(view), self.pending_bytes)
        view[:count] = self._data[self._position : self._position + count]
        self._position += count
        return count

    @property
    def pending_bytes(self) -> int:
        """Bytes that arrived and were not taken yet."""
        return len(self._data) - self._position


def negotiate_version(their_minimum: int, their_maximum: int, own: tuple[int, int] | None = None) -> int:
    """The highest version both sides speak; `own` are the lowest and highest of this side. Raises
    `ProtocolMismatch` when there is none."""
    own_minimum, own_maximum = own or (LOCAL_MIN_VERSION, LOCAL_MAX_VERSION)
    version = min(own_maximum, their_maximum)
    if version < max(own_minimum, their_minimum):
        raise ProtocolMismatch(
            f"this side speaks protocol versions {own_minimum} to {own_maximum}, "
            f"the other side {their_minimum} to {their_maximum}: upgrade the older one"
        )
    return version


class Signer(Protocol):
    """Signs with this peer's identity."""

    @property
    def peer_id(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes:
        """A 64-byte signature."""


class Verifier(Protocol):
    """Checks signatures of other peers."""

    def verify(self, peer_id: bytes, message: bytes, signature: bytes) -> bool: ...
