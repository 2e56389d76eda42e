"""Seeded mutation of recorded frames: of bytes, of lengths, of msgpack values, of whole sequences. Pure.

Most mutations keep a frame's shape and change what it says, because a frame whose header or body does not
decode ends its connection, and what comes after it is never looked at.
"""

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

HEADER: Final = struct.Struct("<HHIII")

MAX_BODY_BYTES: Final = 1024 * 1024
MAX_ITEMS: Final = 20_000
"""In a list that was made longer: above every cap, and still quick to make."""

_INTEGERS: Final = (
    *(0, 1, 2, 3, 7, 16, 127, 128, 255, 256, 65_535, 65_536, 2**24 - 1, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31), -(2**63)),
)
_FLOATS: Final = (0.0, -0.0, 1.5, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = ("", "a", "\0", "k", "é" * 40, "\U0001f600", "x" * 1025, "../../x", "127.0.0.1:1")
_LENGTHS: Final = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 68, 255, 256, 4096)
_RAW: Final = (
    b"\xc1",  # no msgpack at all
    b"\xa3\xff\xfe\xfd",  # text that is not UTF-8
    b"\xdd\xff\xff\xff\xff",  # a list that announces 4 Gi elements
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 600,  # deep nesting, cut off
    b"\x91" * 100_000 + b"\xc0",  # deeper than any stack
    b"\x81\xa1a" * 500 + b"\xc0",
    b"\xc7\x08\x05" + bytes(8),  # an extension type
    b"\xd6\xff" + bytes(4),  # a timestamp
    b"\xcb\x7f\xf8" + bytes(6),  # not a number
)


class Mutator:
    """Mutations drawn from one random generator: the same seed gives the same ones."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._frame: tuple[tuple[Callable[[bytes], bytes], int], ...] = (
            (self.value, 12),
            (self.raw_value, 2),
            (self.flip, 2),
            (self.cut, 1),
            (self.insert, 1),
            (self.header, 3),
            (self.grow_body, 1),
        )

    def sequence(self, frames: Sequence[bytes], others: Sequence[bytes]) -> list[bytes]:
        """A session made of these frames, with frames of other sessions among them."""
        rng = self.rng
        result = list(frames)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            where = rng.randrange(len(result) + 1)
            match rng.randrange(4):
                case 0 if others:
                    result.insert(where, rng.choice(others))
                case 1 if result:
                    result.insert(where, rng.choice(result))
                case 2 if len(result) > 1:
                    one, two = rng.sample(range(len(result)), 2)
                    result[one], result[two] = result[two], result[one]
                case 3 if len(result) > 1:
                    result.pop(min(where, len(result) - 1))
        often = rng.choice((0.1, 0.2, 0.6))
        return [self.frame(each) if rng.random() < often else each for each in result]

    def frame(self, frame: bytes) -> bytes:
        """One frame, changed once or a few times."""
        mutations, weights = zip(*self._frame, strict=True)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            [mutation] = self.rng.choices(mutations, weights)
            frame = mutation(frame)
        return frame

    # --- bytes -------------------------------------------------------------------------------

    def flip(self, data: bytes) -> bytes:
        """A few bits."""
        changed = bytearray(data)
        for _ in range(self.rng.randint(1, 4) if data else 0):
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def cut(self, data: bytes) -> bytes:
        """The end is missing."""
        return data[: self.rng.randrange(len(data) + 1)]

    def insert(self, data: bytes) -> bytes:
        """Some bytes more, in the middle."""
        where = self.rng.randrange(len(data) + 1)
        return data[:where] + self.rng.randbytes(self.rng.choice((1, 2, 8, 100))) + data[where:]

    # --- frames ------------------------------------------------------------------------------

    def header(self, frame: bytes) -> bytes:
        """One field of the header."""
        if len(frame) < HEADER.size:
            return self.insert(frame)
        fields = list(HEADER.unpack_from(frame))
        where = self.rng.choice((0, 0, 0, 1, 1, 2, 3, 4))
        limit = 0xFFFF if where < 2 else 0xFFFF_FFFF
        small = self.rng.choice((0, 1, 2, 4, 16, 17, 40))
        near = fields[where] + self.rng.choice((-1, 1))
        fields[where] = self.rng.choice((small, near, self.rng.choice(_INTEGERS))) & limit
        return HEADER.pack(*fields) + frame[HEADER.size :]

    def with_body(self, frame: bytes, body: bytes) -> bytes:
        """The frame with another body, and the length that belongs to it."""
        kind, flags, request_id, _, bulk = HEADER.unpack_from(frame)
        return HEADER.pack(kind, flags, request_id, len(body), bulk) + body

    def grow_body(self, frame: bytes) -> bytes:
        """More in the body than the message has; the message may overlook it."""
        if len(frame) < HEADER.size:
            return frame
        return self.with_body(frame, frame[HEADER.size :] + self.rng.choice(_RAW))

    # --- msgpack -----------------------------------------------------------------------------

    def value(self, frame: bytes) -> bytes:
        """One value in the body, often by another of its type."""
        decoded = self._decoded(frame)
        if decoded is None:
            return self.flip(frame)
        try:
            body = msgspec.msgpack.encode(self._changed(decoded))
            if len(body) > MAX_BODY_BYTES:
                return self.flip(frame)
        except (OverflowError, UnicodeEncodeError, RecursionError):
            return self.flip(frame)
        return self.with_body(frame, body)

    def raw_value(self, frame: bytes) -> bytes:
        """One value of the body by what no encoder writes."""
        decoded = self._decoded(frame)
        if not isinstance(decoded, list) or not 0 < len(decoded) < 16:
            return self.grow_body(frame)
        parts = [msgspec.msgpack.encode(each) for each in decoded]
        parts[self.rng.randrange(len(parts))] = self.rng.choice(_RAW)
        return self.with_body(frame, bytes([0x90 | len(parts)]) + b"".join(parts))

    def _decoded(self, frame: bytes) -> Any:
        if len(frame) < HEADER.size:
            return None
        try:
            return msgspec.msgpack.decode(frame[HEADER.size :])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
            return None

    def _changed(self, value: Any) -> Any:
        """The value with one node of its tree replaced, chosen on a walk from the root."""
        if isinstance(value, list) and value and self.rng.random() < 0.9:
            match self.rng.randrange(12):
                case 0:
                    return [*value, self._any()]
                case 1:
                    return value[: self.rng.randrange(len(value))]
                case 2:
                    times = self.rng.choice((2, 3, 100, 1100))
                    return value * max(1, min(times, MAX_ITEMS // len(value)))
                case _:
                    where = self.rng.randrange(len(value))
                    return [*value[:where], self._changed(value[where]), *value[where + 1 :]]
        return self._other(value) if self.rng.random() < 0.85 else self._any()

    def _other(self, value: Any) -> Any:
        """Another value of the same type."""
        rng = self.rng
        match value:
            case bool():
                return not value
            case int():
                near = value + rng.choice((-1, 1, 2, 1 << rng.randrange(20)))
                other = rng.choice((near, rng.choice(_INTEGERS), value ^ 1 << rng.randrange(63)))
                return min(max(other, -(2**63)), 2**64 - 1)
            case float():
                return rng.choice(_FLOATS)
            case str():
                return rng.choice((*_TEXTS, value + "x", value[:-1], value[::-1]))
            case bytes():
                return rng.choice((self.flip, self.cut, self.insert, self._sized, self._twice))(value)
            case list():
                return [self._any() for _ in range(rng.choice((0, 1, 2, 5)))]
        return self._any()

    def _sized(self, _: bytes) -> bytes:
        return self.rng.randbytes(self.rng.choice(_LENGTHS))

    def _twice(self, value: bytes) -> bytes:
        return value * self.rng.choice((2, 3, 50)) if len(value) < 4096 else value

    def _any(self) -> Any:
        rng = self.rng
        deep: Any = None
        match rng.randrange(9):
            case 0 | 1:
                return rng.choice(_INTEGERS)
            case 2:
                return rng.choice(_TEXTS)
            case 3:
                return self._sized(b"")
            case 4:
                return None
            case 5:
                return rng.choice((True, False))
            case 6:
                return rng.choice(_FLOATS)
            case 7:
                return {"a": 1}
        for _ in range(rng.choice((1, 10, 200))):
            deep = [deep]
        return deep
