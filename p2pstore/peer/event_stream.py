"""A stream of events about keys over ZeroMQ, with replay. Shell.

Publisher: three frames, an empty topic, the batch's number (u64, big-endian), its payload. Replay, in vLLM's protocol:
a consumer's DEALER sends `"" | number`; it gets `"" | topic | number | payload` of each batch from that one on, and at
the end the number of 64 ones with an empty payload. Number 0 stands for all that is held.

Each consumer has a task that goes through the ring of batches at its own pace. A slow one loses batches, which it sees
by their numbers; one that reads nothing is disconnected.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from p2pstore.access.crowding import Strangers
from p2pstore.core.key_events import (
    REPLAY_END,
    SEQUENCE,
    BatchRing,
    EventFormat,
    KeyChanges,
    first_sequence,
    replayed,
)
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.records import format_peer_id
from p2pstore.peer.node import Node
from p2pstore.status.http_server import address_of, open_http_listeners, serve_strangers

logger = logging.getLogger("p2pstore.peer")

TICK_SECONDS: Final = 0.05
BUSY_TICK_SECONDS: Final = 0.005
"""While there is more to look at."""
SILENT_SECONDS: Final = 1.0
"""An empty batch goes out after such a pause: by its number consumers see that they missed the last ones."""
MAX_CONSUMERS: Final = 256
"""Connections of each endpoint."""
MAX_SUBSCRIPTIONS: Final = 1000
"""Messages of a subscriber, of which all but the first are of no use."""
MAX_REPLAYS: Final = 16
"""At once: each may have a list of all digests. The others wait."""
REPLAY_SECONDS: Final = 60.0
OPEN_SECONDS: Final = 5.0
STUCK_SECONDS: Final = 10.0
"""A consumer that reads nothing for this time is disconnected."""
ENDS: Final = (ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)
"""A connection ends by them, and nothing else."""


@dataclass(slots=True)
class Follower:
    """A subscriber. `subscriptions`: to all topics, which is to the empty one."""

    connection: ZeroMQConnection
    subscriptions: int = 0


class EventStream:
    """The stream of one peer: see the module's docstring."""

    def __init__(self, node: Node) -> None:
        config, self._node = node.config, node
        self._fleet = config.kv_events_of == "fleet"
        self._changes = KeyChanges(node.core, config.kv_events_namespace, fleet=self._fleet)
        # That of the fleet stays the same when its consumer goes to another peer.
        self._form = EventFormat(config.cluster if self._fleet else format_peer_id(node.core.peer_id))
        self._ring = BatchRing(first_sequence(node.core))
        self._news = trio.lowlevel.ParkingLot()
        self._replays = trio.CapacityLimiter(MAX_REPLAYS)
        self._publishers: list[trio.SocketListener] = []
        self._routers: list[trio.SocketListener] = []
        self._send(self._form.cleared(self._unix_ms))

    async def open(self) -> None:
        """Listen. Raises `ConfigError` when an endpoint cannot be had."""
        config = self._node.config
        self._publishers = await _listen("kv_events", config.kv_events)
        self._routers = await _listen("kv_events_replay", config.kv_events_replay)

    async def run(self) -> None:
        """Publish and answer until cancelled."""
        try:
            await self._run()
        except Exception:  # the peer goes on without
            logger.exception("kv_events ended by an internal error")

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            for listeners, kind, serve in (
                (self._publishers, "PUB", self._serve_follower),
                (self._routers, "ROUTER", self._serve_replays),
            ):
                guests: Strangers[trio.CancelScope] = Strangers(MAX_CONSUMERS, MAX_CONSUMERS)
                greet = partial(_greet, kind, serve)
                nursery.start_soon(serve_strangers, listeners, guests, greet, "consumers of events")
            while True:
                await trio.sleep(BUSY_TICK_SECONDS if self._changes.behind else TICK_SECONDS)
                self._publish()

    @property
    def _unix_ms(self) -> int:
        return int(time.time() * 1000)

    def _send(self, payload: bytes) -> None:
        self._ring.append(payload)
        self._sent_at = self._node.now
        self._news.unpark_all()

    def _publish(self) -> None:
        if not self._changes.knows_all:
            if self._changes.told:
                self._changes.forget()
                self._send(self._form.cleared(self._unix_ms))
                logger.warning(
                    "kv_events: this peer does not know the fleet any more, only its part of the directory"
                )
            return
        events = self._changes.take(self._node.now)
        if events or self._node.now > self._sent_at + SILENT_SECONDS:
            self._send(self._form.batch(events, self._unix_ms))
        if self._fleet:
            self._node.process()  # holders are asked for keys

    async def _serve_follower(self, connection: ZeroMQConnection) -> None:
        follower = Follower(connection)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, follower, nursery.cancel_scope)
            with suppress(*ENDS):
                for _ in range(MAX_SUBSCRIPTIONS):
                    message = await connection.receive()
                    if message in ([b"\x01"], [b"\x00"]):
                        follower.subscriptions += 1 if message == [b"\x01"] else -1
            nursery.cancel_scope.cancel()

    async def _follow(self, follower: Follower, scope: trio.CancelScope) -> None:
        """Send each batch from now on, or what the ring has of them."""
        with suppress(*ENDS):
            number = self._ring.last + 1
            while True:
                number = max(
                    number, self._ring.first if follower.subscriptions > 0 else self._ring.last + 1
                )
                payload = self._ring.get(number)
                if payload is None:
                    await self._news.park()
                    continue
                with trio.fail_after(STUCK_SECONDS):
                    await follower.connection.send(b"", SEQUENCE.pack(number), payload)
                number += 1
        scope.cancel()

    async def _serve_replays(self, connection: ZeroMQConnection) -> None:
        """Replay the requested events. An invalid request ends the connection."""
        while True:
            empty, *rest = await connection.receive()
            if empty or len(rest) != 1 or len(rest[0]) != SEQUENCE.size:
                raise ProtocolError("no number of a batch")
            (start,) = SEQUENCE.unpack(rest[0])
            async with self._replays:
                with trio.fail_after(REPLAY_SECONDS):
                    batches = replayed(self._changes, self._ring, self._form, start, self._unix_ms)
                    for number, payload in batches:
                        with trio.fail_after(STUCK_SECONDS):
                            await connection.send(b"", b"", SEQUENCE.pack(number), payload)
                    await connection.send(b"", b"", REPLAY_END, b"")


async def _greet(
    kind: str, serve: Callable[[ZeroMQConnection], Awaitable[None]], stream: trio.SocketStream
) -> None:
    connection = ZeroMQConnection(stream)
    with suppress(*ENDS):
        with trio.fail_after(OPEN_SECONDS):
            await connection.open(kind)
        await serve(connection)


async def _listen(setting: str, endpoint: str | None) -> list[trio.SocketListener]:
    if endpoint is None:
        return []
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        raise ConfigError(f"{setting}: {endpoint!r} is no endpoint such as tcp://127.0.0.1:5557")
    listeners = await open_http_listeners(address.replace("*:", "0.0.0.0:"), setting)
    where = f"tcp://{address_of(listeners)}"
    logger.info("%s at %s", setting, where, extra={"event": setting, "endpoint": where})
    return listeners


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
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
