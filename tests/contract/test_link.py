"""Requests and replies between two control hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
import trio.testing

from p2pstore.access.keyring import KeyRing
from p2pstore.errors import CapacityExceeded
from p2pstore.gossip.gossip_messages import (
    Ack,
    Claim,
    ControlKind,
    Delta,
    Exchange,
    ExchangeReply,
    Leave,
    Ping,
    PingRequest,
)
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost, HostSettings, open_control_host
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.wire import Code, Empty, Message
from tests.waiting import until

SECONDS = 10.0
"""Longer than anything here takes."""


@dataclass
class Answerer:
    """The other side's handler: each kind of request shows one behaviour."""

    gate: trio.Event = field(default_factory=trio.Event)
    held: int = 0
    pings: int = 0
    callers: set[PeerId] = field(default_factory=set)

    async def __call__(self, peer_id: PeerId, kind: int, request: Message) -> Message:
        self.callers.add(peer_id)
        match request:
            case Ping():
                self.pings += 1
                return Ack(request.incarnation + 1, request.claims)
            case PingRequest():  # answered when the gate opens
                self.held += 1
                await self.gate.wait()
                return Ack(request.timeout_ms, [])
            case Exchange():  # as large as was sent
                nothing = Delta([], [], [], [])
                return ExchangeReply(nothing, request.digest[::-1], request.cluster_hash, b"")
            case Leave():  # refuses on purpose
                raise CapacityExceeded("no room")
            case Delta() if request.claims:  # more than a frame takes
                return Exchange(bytes(4 * 1024 * 1024), 0, b"", [])
        raise RuntimeError("secret detail")


@dataclass
class Pair:
    """One side asks, the other answers."""

    link: ControlHost
    own_id: PeerId
    peer_id: PeerId
    addresses: list[str]
    answerer: Answerer
    lost: list[PeerId]
    way: Proxy
    """To the other side."""
    peer: ControlHost
    """The other side's link; `close` has it go away without a word."""

    async def ask(self, kind: int, request: Message, timeout: float = SECONDS) -> Message:
        return await self.link.ask(self.peer_id, self.addresses, kind, request, timeout)

    async def ping(self, number: int) -> None:
        assert await self.ask(ControlKind.PING, Ping(number, [])) == Ack(number + 1, [])


class Proxy:
    """A TCP connection's way through this test, each direction of which can be held up. It may take its time."""

    def __init__(self, nursery: trio.Nursery, target: tuple[str, int]) -> None:
        self._nursery = nursery
        self._target = target
        self._gates = {"there": trio.Event(), "back": trio.Event()}
        self.delay_seconds = 0.0
        self.connections = 0
        self.heal()

    async def listen(self) -> int:
        """The port that leads to the target."""
        serve = partial(trio.serve_tcp, self._connected, 0, host="127.0.0.1")
        [listener] = await self._nursery.start(serve)
        port: int = listener.socket.getsockname()[1]
        return port

    def cut(self, direction: str) -> None:
        self._gates[direction] = trio.Event()

    def heal(self) -> None:
        for gate in self._gates.values():
            gate.set()

    async def _connected(self, client: trio.SocketStream) -> None:
        self.connections += 1
        try:
            server = await trio.open_tcp_stream(*self._target)
        except OSError:
            return  # it is gone: the client's connection ends with this task
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, "there", client, server, nursery.cancel_scope)
            nursery.start_soon(self._pump, "back", server, client, nursery.cancel_scope)

    async def _pump(
        self,
        direction: str,
        source: trio.SocketStream,
        target: trio.SocketStream,
        scope: trio.CancelScope,
    ) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some(65536):
                await self._gates[direction].wait()
                await trio.sleep(self.delay_seconds)
                await target.send_all(data)
        scope.cancel()


@asynccontextmanager
async def control_hosts(answerer: Answerer) -> AsyncIterator[Pair]:
    """Two control hosts in this process, over loopback."""
    lost: list[PeerId] = []

    def opened(
        number: int, on_lost: Callable[[PeerId], None]
    ) -> AbstractAsyncContextManager[ControlHost]:
        settings = HostSettings(
            identity=Identity(bytes([number]) * 32),
            ring=KeyRing([b"k" * 32]),
            cluster="contract",
            handler=answerer,
            on_lost=on_lost,
            software="test",
        )
        return open_control_host(("127.0.0.1", 0), settings)

    async with (
        opened(1, lost.append) as link,
        opened(2, lambda _: None) as other,
        open_background_nursery() as nursery,
    ):
        way = Proxy(nursery, other.listening)
        addresses = [f"127.0.0.1:{await way.listen()}"]
        own_id, peer_id = (each.settings.identity.peer_id for each in (link, other))
        yield Pair(link, own_id, peer_id, addresses, answerer, lost, way, other)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    with trio.fail_after(60):
        async with control_hosts(Answerer()) as pair:
            yield pair


async def test_an_answer_comes_back_and_the_asker_is_known(pair: Pair) -> None:
    assert pair.link.connected() == []
    await pair.ping(1)
    await pair.ping(2)
    assert pair.answerer.callers == {pair.own_id}
    assert pair.link.connected() == [pair.peer_id]


async def test_a_request_of_an_unknown_kind_is_unsupported(pair: Pair) -> None:
    for kind in (999, ControlKind.HELLO, ControlKind.PROOF):
        with pytest.raises(LinkError) as error:
            await pair.ask(kind, Empty())
        assert error.value.refused
        assert error.value.code == Code.UNSUPPORTED
    await pair.ping(1)


async def test_a_handlers_own_errors_keep_their_code_and_others_are_hidden(pair: Pair) -> None:
    with pytest.raises(LinkError, match="no room") as error:
        await pair.ask(ControlKind.LEAVE, Leave(SignedRecord(b"", b"")))
    assert error.value.code == Code.CAPACITY_EXCEEDED
    with pytest.raises(LinkError) as error:
        await pair.ask(ControlKind.DELTA, Delta([], [], [], []))
    assert error.value.refused
    assert error.value.code == Code.INTERNAL
    assert "secret" not in str(error.value)
    await pair.ping(1)


async def test_concurrent_requests_get_their_own_answers(pair: Pair) -> None:
    """Over twice what may be in flight on one stream; the first wave is held, and overtaken."""
    answers: dict[int, Message] = {}

    async def hold(number: int) -> None:
        answers[number] = await pair.ask(ControlKind.PING_REQUEST, PingRequest(b"", number))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(hold, number)
        await until(lambda: pair.answerer.held == 50)
        async with trio.open_nursery() as pings:
            for number in range(100):
                pings.start_soon(pair.ping, number)
        assert not answers
        pair.answerer.gate.set()
    assert answers == {number: Ack(number, []) for number in range(50)}


async def test_more_requests_than_may_be_in_flight_wait_their_turn(pair: Pair) -> None:
    answers: list[Message] = []

    async def hold(number: int) -> None:
        answers.append(await pair.ask(ControlKind.PING_REQUEST, PingRequest(b"", number)))

    async with trio.open_nursery() as nursery:
        for number in range(150):
            nursery.start_soon(hold, number)
        await until(lambda: pair.answerer.held == 64)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert pair.answerer.held == 64
        pair.answerer.gate.set()
    assert len(answers) == 150


@pytest.mark.parametrize("length_bytes", [0, 60 * 1024, 300_000, 4_000_000])
async def test_large_bodies_arrive_whole(pair: Pair, length_bytes: int) -> None:
    digest = bytes(range(250)) * (length_bytes // 250)
    reply = await pair.ask(ControlKind.EXCHANGE, Exchange(digest, 7, b"", []))
    assert isinstance(reply, ExchangeReply)
    assert reply.digest == digest[::-1]
    assert reply.cluster_hash == 7


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(pair: Pair) -> None:
    with pytest.raises(ValueError, match="4 MiB"):
        await pair.ask(ControlKind.EXCHANGE, Exchange(bytes(4 * 1024 * 1024), 0, b"", []))
    await pair.ping(1)


async def test_a_reply_over_the_limit_is_a_failure_of_that_request_alone(pair: Pair) -> None:
    claims = [Claim(pair.own_id, 1, 0, 1)]
    with pytest.raises(LinkError) as error:
        await pair.ask(ControlKind.DELTA, Delta([], [], [], claims))
    assert (error.value.refused, error.value.code) == (True, Code.INTERNAL)
    await pair.ping(1)


async def test_large_bodies_both_ways_at_once_do_not_lock_up(pair: Pair) -> None:
    async def exchange(number: int) -> None:
        digest = bytes([number]) * 1_000_000
        reply = await pair.ask(ControlKind.EXCHANGE, Exchange(digest, number, b"", []))
        assert isinstance(reply, ExchangeReply)
        assert (reply.digest, reply.cluster_hash) == (digest, number)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(exchange, number)


async def test_a_timeout_is_an_error_and_the_late_answer_harms_nothing(pair: Pair) -> None:
    await pair.ping(0)
    start = trio.current_time()
    with pytest.raises(LinkError, match=r"0.1 s") as error:
        await pair.ask(ControlKind.PING_REQUEST, PingRequest(b"", 1), timeout=0.1)
    assert trio.current_time() - start < 2
    assert not error.value.refused
    assert error.value.code is None
    pair.answerer.gate.set()
    for number in range(5):
        await pair.ping(number)


async def test_a_cancelled_request_leaves_the_link_usable(pair: Pair) -> None:
    """Cancelled at every stage: before the connection, during a large send, while waiting."""
    large = Exchange(bytes(3_000_000), 1, b"", [])
    for step in range(40):
        with trio.move_on_after(0.0005 * step):
            await pair.ask(ControlKind.EXCHANGE, large)
    for number in range(3):
        await pair.ping(number)


async def test_those_who_gave_up_leave_their_places_to_others(pair: Pair) -> None:
    """All that may be in flight are cancelled while they wait for their answers."""
    async with trio.open_nursery() as nursery:
        for number in range(64):
            request = PingRequest(b"", number)
            nursery.start_soon(pair.ask, ControlKind.PING_REQUEST, request)
        await until(lambda: pair.answerer.held == 64)
        nursery.cancel_scope.cancel()
    pair.answerer.gate.set()
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(pair.ping, number)


async def test_both_sides_may_ask_at_once(pair: Pair) -> None:
    await pair.ping(0)

    async def ask_back(number: int) -> None:
        reply = await pair.peer.ask(pair.own_id, [], ControlKind.PING, Ping(number, []), SECONDS)
        assert reply == Ack(number + 1, [])

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(pair.ping, number)
            nursery.start_soon(ask_back, number)
    assert pair.answerer.callers == {pair.own_id, pair.peer_id}
    assert pair.peer.connected() == [pair.own_id]


@pytest.mark.parametrize("direction", ["there", "back"])
async def test_a_partition_in_one_direction_is_a_timeout_and_heals(pair: Pair, direction: str) -> None:
    """With a connection that was open before, and with one that is to be opened."""
    await pair.ping(0)
    calls = pair.answerer.pings
    pair.way.cut(direction)
    for number in range(3):
        with pytest.raises(LinkError, match=r"within 0.1 s") as error:
            await pair.ask(ControlKind.PING, Ping(number, []), timeout=0.1)
        assert not error.value.refused
    if direction == "back":  # it was heard, and answered into the void
        assert pair.answerer.pings == calls + 3
    else:
        assert pair.answerer.pings == calls
    pair.way.heal()
    for number in range(5):
        await pair.ping(number)
    await until(lambda: pair.answerer.pings == calls + 8)

    await pair.link.disconnect(pair.peer_id)
    pair.way.cut(direction)
    with pytest.raises(LinkError, match=r"within 0.1 s"):
        await pair.ask(ControlKind.PING, Ping(1, []), timeout=0.1)
    pair.way.heal()
    await pair.ping(1)


async def test_a_peer_that_dies_while_a_large_body_is_on_its_way(pair: Pair) -> None:
    await pair.ping(0)
    pair.way.cut("there")
    async with trio.open_nursery() as nursery:

        async def exchange() -> None:
            with pytest.raises(LinkError) as error:
                await pair.ask(ControlKind.EXCHANGE, Exchange(bytes(4_000_000), 0, b"", []))
            assert not error.value.refused

        nursery.start_soon(exchange)
        await trio.testing.wait_all_tasks_blocked(0.01)
        pair.peer.close()
    await until(lambda: pair.lost == [pair.peer_id])


async def test_a_peer_that_goes_away_fails_what_waits_and_is_reported(pair: Pair) -> None:
    errors: list[LinkError] = []

    async def hold() -> None:
        try:
            await pair.ask(ControlKind.PING_REQUEST, PingRequest(b"", 1))
        except LinkError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(hold)
        await until(lambda: pair.answerer.held == 3)
        pair.peer.close()
    assert len(errors) == 3
    assert not any(error.refused for error in errors)
    await until(lambda: pair.lost == [pair.peer_id])
    assert pair.link.connected() == []
    with pytest.raises(LinkError):
        await pair.ask(ControlKind.PING, Ping(1, []), timeout=2)


async def test_disconnect_is_quiet_and_the_next_request_connects_again(pair: Pair) -> None:
    await pair.ping(1)
    await pair.link.disconnect(pair.peer_id)
    await pair.link.disconnect(pair.peer_id)
    assert pair.link.connected() == []
    await pair.ping(2)
    assert pair.lost == []


async def test_a_peer_that_cannot_be_reached(pair: Pair) -> None:
    stranger = Identity(b"\x07" * 32).peer_id
    for addresses in ([], ["127.0.0.1:1"], pair.addresses, ["no-such-host.invalid:1"], ["nonsense"]):
        with pytest.raises(LinkError) as error:
            await pair.link.ask(stranger, addresses, ControlKind.PING, Ping(1, []), 5)
        assert not error.value.refused
    await pair.ping(1)
