"""A stream of events about keys over ZeroMQ, with replay. Shell; the one module that imports pyzmq.

Publisher: three frames, an empty topic, the batch's number (u64, big-endian), its payload. Replay, in vLLM's protocol:
a consumer's DEALER sends `"" | number`; it gets `"" | topic | number | payload` of each batch from that one on, and at
the end the number of 64 ones with an empty payload. Number 0 stands for all that is held.

One task does everything, and never waits for a consumer: at the publisher a slow one loses batches, which it sees by
their numbers; its replay goes on when it reads, and ends when it does not. Sockets are polled: their descriptors are
edge-triggered, and the logs have to be looked at as often anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import trio
import zmq

from p2pstore.config import PeerConfig
from p2pstore.core.key_events import (
    REPLAY_END,
    SEQUENCE,
    BatchRing,
    EventFormat,
    KeyChanges,
    first_sequence,
    replayed,
)
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import format_peer_id
from p2pstore.objects import encode_namespace
from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

TICK_SECONDS: Final = 0.05
BUSY_TICK_SECONDS: Final = 0.005
"""While there is more to look at, or a replay is under way."""
REPLAY_SECONDS: Final = 0.004
"""Spent on replays in one tick."""
SILENT_SECONDS: Final = 1.0
"""An empty batch goes out after such a pause: by its number consumers see that they missed the last ones."""
QUEUED_BATCHES: Final = 1_000
"""For each consumer, until it loses batches. Consumers share their memory."""
QUEUED_REPLIES: Final = 4
MAX_REPLAYS: Final = 256
MAX_REQUEST_BYTES: Final = 1024
REQUESTS_AT_ONCE: Final = 64
REPLAYED_AT_ONCE: Final = 4
STUCK_SECONDS: Final = 10.0
"""A replay ends when its consumer reads nothing for so long."""


@dataclass(slots=True)
class Replay:
    """A replay under way. `unsent` waits for its consumer to read, until `due`."""

    batches: Iterator[tuple[int, bytes]]
    due: float
    unsent: tuple[bytes, bytes] | None = None


class EventStream:
    """The stream of one peer: see the module's docstring. Raises `ConfigError` when an endpoint cannot be had."""

    def __init__(self, node: Node) -> None:
        config, self._node = node.config, node
        self._fleet = config.kv_events_of == "fleet"
        _check(config)
        self._changes = KeyChanges(node.core, config.kv_events_namespace, fleet=self._fleet)
        # That of the fleet stays the same when its consumer goes to another peer.
        self._form = EventFormat(config.cluster if self._fleet else format_peer_id(node.core.peer_id))
        self._ring = BatchRing(first_sequence(node.core))
        self._replays: dict[bytes, Replay] = {}
        self._context = zmq.Context()
        try:
            self._publisher = self._bind(zmq.PUB, config.kv_events, "kv_events", QUEUED_BATCHES)
            self._router = self._bind(
                zmq.ROUTER, config.kv_events_replay, "kv_events_replay", QUEUED_REPLIES
            )
        except ConfigError:
            self.close()
            raise
        self._send(self._form.cleared(self._unix_ms))

    def _bind(self, kind: int, endpoint: str | None, setting: str, queued: int) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.SNDHWM, queued)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        bound.setsockopt(zmq.IPV6, 1)
        if kind == zmq.ROUTER:
            bound.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is told, and nothing dropped
        if endpoint is None:
            return bound
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{setting}: cannot bind {endpoint}: {error.strerror}") from None
        where = bound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        logger.info("%s at %s", setting, where, extra={"event": setting, "endpoint": where})
        return bound

    def close(self) -> None:
        """Close the sockets, without waiting for consumers."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Publish and answer until cancelled."""
        try:
            while True:
                busy = self._changes.behind or self._replays
                await trio.sleep(BUSY_TICK_SECONDS if busy else TICK_SECONDS)
                self._publish()
                self._take_requests()
                self._replay_on()
        except Exception:  # the peer goes on without
            logger.exception("kv_events ended by an internal error")
            self.close()

    @property
    def _unix_ms(self) -> int:
        return int(time.time() * 1000)

    def _send(self, payload: bytes) -> None:
        number, self._sent_at = self._ring.append(payload), self._node.now
        self._publisher.send_multipart([b"", SEQUENCE.pack(number), payload], zmq.NOBLOCK)

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

    # --- replay ------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        """Begin replays. What is no request is dropped, and what is above the limit: its consumer asks again."""
        for _ in range(REQUESTS_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE.size:
                continue
            if frames[0] in self._replays or len(self._replays) < MAX_REPLAYS:
                (start,) = SEQUENCE.unpack(frames[2])
                batches = replayed(self._changes, self._ring, self._form, start, self._unix_ms)
                self._replays[frames[0]] = Replay(batches, self._node.now + STUCK_SECONDS)

    def _replay_on(self) -> None:
        """Go on with some replays; those that had a turn go behind the others."""
        end = self._node.now + REPLAY_SECONDS
        for identity in list(self._replays):
            replay = self._replays.pop(identity)
            if self._replay_some(identity, replay):
                self._replays[identity] = replay
            if self._node.now > end:
                return

    def _replay_some(self, identity: bytes, replay: Replay) -> bool:
        """Send some batches. Whether there is more."""
        for _ in range(REPLAYED_AT_ONCE):
            if replay.unsent is None:
                number, payload = next(replay.batches, (None, b""))
                replay.unsent = REPLAY_END if number is None else SEQUENCE.pack(number), payload
            try:
                self._router.send_multipart([identity, b"", b"", *replay.unsent], zmq.NOBLOCK)
            except zmq.Again:
                return self._node.now < replay.due
            except zmq.ZMQError:  # the consumer has gone
                return False
            if replay.unsent[0] == REPLAY_END:
                return False
            replay.unsent, replay.due = None, self._node.now + STUCK_SECONDS
        return True


def _check(config: PeerConfig) -> None:
    if config.kv_events is None:
        raise ConfigError("kv_events_replay: there is no stream of events; say where with kv_events")
    if config.kv_events_of == "fleet" and config.directory == "partitioned":
        raise ConfigError(
            "kv_events_of: a peer with a partitioned directory does not know the fleet; let one with a full directory "
            "publish it"
        )
    try:
        encode_namespace(config.kv_events_namespace)
    except ValueError as error:
        raise ConfigError(f"kv_events_namespace: {error}") from None
