"""ZeroMQ's protocol (ZMTP 3.0, no security) at the end of a publisher, or of a router that answers.

Of its own, because libzmq keeps whatever strangers send: 20 MB of subscriptions took a gigabyte and stopped the peer
for seconds, and a message of endless parts is kept whole. Here a connection has at most one small message at a time.
"""

from __future__ import annotations

import struct
from typing import Final

import trio

from p2pstore.errors import ProtocolError

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = SIGNATURE + b"\x03\x00" + MECHANISM + bytes(32)
"""Signature, version, mechanism, not a server of it, filler. Of version 3.0 subscriptions are messages."""
MORE, LONG, COMMAND = 1, 2, 4
"""Bits of a frame's first byte: parts follow; its length has eight bytes; it is no part of a message."""
READY, PING, PONG = b"\x05READY", b"\x04PING", b"\x04PONG"
PING_HEAD_BYTES: Final = len(PING) + 2
"""Name and time to live. A context follows, which goes back."""
MAX_MESSAGE_BYTES: Final = 1024
MAX_FRAMES: Final = 4
RECEIVE_BYTES: Final = 4096


class ZeroMQConnection:
    """A connection of a consumer. Raises `ProtocolError` when it says what it may not, and trio's errors of streams."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._sending = trio.Lock()
        self._received = bytearray()

    async def open(self, kind: str) -> None:
        """Shake hands, as a socket of this kind: PUB or ROUTER."""
        await self._stream.send_all(GREETING)
        greeting = await self._take(len(GREETING))
        signed = greeting[0] == SIGNATURE[0] and greeting[9] == SIGNATURE[9]
        if not signed or greeting[10] < 3 or greeting[12:32] != MECHANISM:
            raise ProtocolError("not ZMTP 3 without security")
        name, value = b"Socket-Type", kind.encode()
        properties = bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        await self._send(frame(COMMAND, READY + properties))
        flags, body = await self._frame()
        if not flags & COMMAND or not body.startswith(READY):
            raise ProtocolError("no READY")

    async def receive(self) -> list[bytes]:
        """The next message, of `MAX_FRAMES` and `MAX_MESSAGE_BYTES` a part at most."""
        parts: list[bytes] = []
        while True:
            flags, body = await self._frame()
            if flags & COMMAND:
                if body.startswith(PING):
                    await self._send(frame(COMMAND, PONG + body[PING_HEAD_BYTES:]))
                continue
            parts.append(body)
            if not flags & MORE:
                return parts
            if len(parts) == MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} parts")

    async def send(self, *parts: bytes) -> None:
        """Send a message, waiting for its receiver."""
        *before, last = parts
        await self._send(b"".join([*(frame(MORE, each) for each in before), frame(0, last)]))

    async def _send(self, packed: bytes) -> None:
        async with self._sending:
            await self._stream.send_all(packed)

    async def _frame(self) -> tuple[int, bytes]:
        (flags,) = await self._take(1)
        length = int.from_bytes(await self._take(8 if flags & LONG else 1))
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a part of {length} bytes")
        return flags, await self._take(length)

    async def _take(self, length: int) -> bytes:
        while len(self._received) < length:
            more = await self._stream.receive_some(RECEIVE_BYTES)
            if not more:
                raise ProtocolError("the connection ended")
            self._received += more
        taken = bytes(self._received[:length])
        del self._received[:length]
        return taken


def frame(flags: int, body: bytes) -> bytes:
    """One frame."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
