"""A consumer of a stream of events about keys, by the rules of the format alone. For tests."""

import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from tests.waiting import SECONDS, eventually

END = b"\xff" * 8


class EventSet:
    """The sum of a stream: keys by medium. `next` is the number of the next batch; 0: nothing is known."""

    def __init__(self) -> None:
        self.held: set[tuple[str, str]] = set()
        self.next = 0
        self.backends: set[str] = set()

    def live(self, number: int, payload: bytes) -> bool:
        """Take a published batch. False when one is missing before it: ask for a replay from `next` on."""
        if number > self.next or not self.next:
            return False
        if number == self.next:
            self._apply(number, payload)
        return True

    def replayed(self, batches: Iterable[tuple[int, bytes]]) -> None:
        """Take a replay that was asked for from `next` on. One that begins elsewhere tells all anew."""
        for number, payload in batches:
            if number != self.next:
                self.held.clear()
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self.backends.add(event["backend_id"])
            place = (event.get("object_key"), event["medium"])
            match event["event_type"]:
                case "stored":
                    self.held.add(place)
                case "removed":
                    self.held.discard(place)
                case "cleared":
                    self.held.clear()
                case other:
                    raise AssertionError(other)

    @property
    def keys(self) -> set[str]:
        return {key for key, _ in self.held}


class Subscriber:
    """An `EventSet` on real sockets."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str) -> None:
        self.state = EventSet()
        self.replays = 0
        self._replay = replay
        self._context = context
        self._subscriber = context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.LINGER, 0)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber.connect(endpoint)

    def close(self) -> None:
        self._subscriber.close()

    def wait(self, condition: Callable[[EventSet], object], seconds: float = SECONDS) -> None:
        """Follow the stream until the condition holds of its state."""
        if not self.state.next:
            self.ask()

        def holds() -> bool:
            self.take()
            return bool(condition(self.state))

        try:
            eventually(holds, seconds)
        except AssertionError:
            raise AssertionError(f"{len(self.state.held)} held, {self.state.next}") from None

    def take(self) -> None:
        """Take all that was published by now."""
        while self._subscriber.poll(0):
            topic, number, payload = self._subscriber.recv_multipart()
            assert topic == b""
            if not self.state.live(int.from_bytes(number), payload):
                self.ask()

    def ask(self) -> None:
        """Take a replay of what is missing."""
        self.replays += 1
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", struct.pack(">Q", self.state.next)])
            self.state.replayed(replies(dealer))


def replies(dealer: zmq.Socket[bytes]) -> Iterable[tuple[int, bytes]]:
    """The batches of a replay, until its end."""
    while True:
        assert dealer.poll(int(1000 * SECONDS)), "the replay came to no end"
        empty, topic, number, payload = dealer.recv_multipart()
        assert (empty, topic) == (b"", b"")
        if number == END:
            assert payload == b""
            return
        yield int.from_bytes(number), payload


class Consumers:
    """Subscribers that are closed together."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self._opened: list[Subscriber] = []

    def follow(self, endpoint: str, replay: str) -> Subscriber:
        self._opened.append(Subscriber(self.context, endpoint, replay))
        return self._opened[-1]

    def close(self) -> None:
        for each in self._opened:
            each.close()
