"""How clients ask whether keys are anywhere: many questions under way at once, and what ends them early."""

import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.errors import DeadlineExceeded
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local.local_connection import LocalConnection, Request
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.local.local_requests import MAX_ITEMS, Waiter
from p2pstore.local.server import MAX_IN_FLIGHT, TURN_SECONDS
from p2pstore.objects import DIGEST_BYTES
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.wire import PREFACE_LOCAL, Message, encode_frame
from tests.contract.small_peer import SmallPeer

CONTAINS_KEYS = MAX_ITEMS[LocalKind.CONTAINS]
KEYS = [f"k{number}" for number in range(3 * CONTAINS_KEYS + 100)]
HELD = range(0, len(KEYS), 1000)


@pytest.fixture
def client(peer: SmallPeer) -> Iterator[blocking.BlockingClient]:
    with blocking.connect(str(peer.path), timeout=60) as opened:
        opened.put_many([(KEYS[number], b"value") for number in HELD])
        peer.backend.requests.clear()
        yield opened


def elsewhere(peer: SmallPeer, monkeypatch: pytest.MonkeyPatch, hold_up: Any = None) -> None:
    """Have the peer say of every second key it is asked about that it is known elsewhere."""

    def contains(client: object, message: local.Contains) -> Message:
        if hold_up is not None:
            hold_up()
        count = len(message.digests) // DIGEST_BYTES
        return local.ContainsReply(bytes(number % 2 for number in range(count)))

    monkeypatch.setattr(peer.backend, "_contains", contains, raising=False)


def waiting(client: Any) -> int:
    """How many requests of a client's connection are not settled."""
    return len(client._link.connection._waiters)


def test_answers_of_many_questions_come_to_their_keys(
    peer: SmallPeer, client: blocking.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(peer, monkeypatch)
    expected: list[bool] = []
    for start in range(0, len(KEYS), CONTAINS_KEYS):
        asked = 0
        for number in range(start, min(start + CONTAINS_KEYS, len(KEYS))):
            if number in HELD:
                expected.append(True)
                continue
            expected.append(asked % 2 == 1)
            asked += 1
    assert client.contains_many(KEYS) == expected
    assert peer.backend.requests == [LocalKind.CONTAINS] * 4
    assert waiting(client._session) == 0


def test_a_key_that_is_no_text_among_the_last_leaves_nothing_under_way(
    peer: SmallPeer, client: blocking.BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(peer, monkeypatch)
    with pytest.raises(TypeError, match="str"):
        client.contains_many([*KEYS[: 2 * CONTAINS_KEYS], 3])  # type: ignore[list-item]
    assert waiting(client._session) == 0
    assert client.contains_many(["x", "y"]) == [False, True]
    assert [each.name for each in client.peers()] == ["small"]


def test_what_no_object_can_have_as_its_key_is_nowhere_and_ends_no_batch(
    client: blocking.BlockingClient,
) -> None:
    client.put("y", b"value", overwrite=True)
    for bad in ("", "k" * 1025, "\ud800"):
        assert client.contains_many([bad, "y", bad, "y"]) == [False, True, False, True]
        assert client.match_prefix(["y", "y", bad, "y"]) == 2
        assert client.match_prefix([bad, "y"]) == 0
        assert sum(each.blocks for each in client.match_prefix_by_peer(["y", bad])) == 1
        many = ["y", bad] * CONTAINS_KEYS
        assert client.contains_many(many) == [True, False] * CONTAINS_KEYS
        with pytest.raises(ValueError, match="key"):
            client.contains(bad)
    for question in (client.contains_many, client.match_prefix, client.prefetch):
        with pytest.raises(TypeError):
            question(["y", 3])  # type: ignore[list-item]


async def test_cancelled_in_the_middle_nothing_is_left_under_way(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(60)

    async with p2pstore.connect(str(peer.path)) as store:
        elsewhere(peer, monkeypatch, stand)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.contains_many, KEYS)
            await trio.to_thread.run_sync(stands.wait, 5)
            nursery.cancel_scope.cancel()
        go_on.set()
        assert waiting(store) == 0
        assert await store.contains_many(["x", "y"]) == [False, True]


def open_connection(peer: SmallPeer) -> LocalConnection:
    return run_blocking(
        LocalConnection.open(BlockingDriver(), str(peer.path), Opening("n", Access.READ))
    )


def test_a_reply_that_came_with_another_is_not_waited_for(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another receiver took this reply as well before this one looked: to receive again would wait for nothing."""
    connection = open_connection(peer)
    whole = LocalConnection._send

    async def send_and_have_another_receive(self: LocalConnection, *request: Any) -> None:
        await whole(self, *request)
        await self._receive_or_wait(Waiter(-1), time.monotonic() + 5)

    monkeypatch.setattr(LocalConnection, "_send", send_and_have_another_receive)
    begin = time.monotonic()
    asked = connection.request(LocalKind.PEERS, local.Peers(), local.PeersReply, progress_seconds=3)
    assert len(run_blocking(asked).items) == 1
    assert time.monotonic() - begin < 2
    connection.close()


def sent(connection: LocalConnection, *request: Any) -> Request[Any]:
    """A request whose reply is received later."""
    ahead: Request[Any] = Request(connection, *request)
    run_blocking(ahead.send())
    return ahead


def test_requests_ahead_are_answered_in_any_order(peer: SmallPeer) -> None:
    connection = open_connection(peer)
    first, second, third = (
        sent(connection, LocalKind.PEERS, local.Peers(), local.PeersReply) for _ in range(3)
    )
    assert len(run_blocking(second.receive()).items) == 1
    third.abandon()
    assert len(run_blocking(first.receive()).items) == 1
    for each in (first, second, third):
        each.abandon()  # once more, for nothing
    assert not connection._waiters
    connection.close()


def test_a_request_ahead_that_is_refused_as_too_many_is_made_again(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = peer.backend.gate = peer.call(trio.Event)
    asked = 0

    def contains(client: object, message: local.Contains) -> Awaitable[Message]:
        nonlocal asked
        asked += 1
        if asked > 1:
            gate.set()
        return answer()

    async def answer() -> Message:
        return local.ContainsReply(b"\1")

    monkeypatch.setattr(peer.backend, "_contains", contains, raising=False)
    connection = open_connection(peer)
    locate = (LocalKind.LOCATE, local.Locate(bytes(16)), local.Located)
    in_flight = [sent(connection, *locate) for _ in range(MAX_IN_FLIGHT)]
    peer.wait_until(lambda: peer.backend.requests.count(LocalKind.LOCATE) == MAX_IN_FLIGHT)
    question = (LocalKind.CONTAINS, local.Contains(bytes(16)), local.ContainsReply)
    ahead = sent(connection, *question)
    assert run_blocking(ahead.receive()).present == b"\1"
    assert asked > 1
    for each in in_flight:
        run_blocking(each.receive())
    connection.close()


def test_a_request_ahead_has_its_deadline(peer: SmallPeer) -> None:
    connection = open_connection(peer)
    peer.backend.gate = peer.call(trio.Event)
    ahead = sent(connection, LocalKind.LOCATE, local.Locate(bytes(16)), local.Located, 0.1)
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        run_blocking(ahead.receive())
    ahead.abandon()
    assert not connection._waiters
    connection.close()


def test_who_asks_without_a_pause_leaves_others_their_turn(
    peer: SmallPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered without a turn of the peer's event loop only for a moment."""
    turns, turn_of_run, run, longest_run = [0], 0, 0, 0

    def answered() -> None:
        nonlocal turn_of_run, run, longest_run
        run = run + 1 if turn_of_run == turns[0] else 1
        turn_of_run = turns[0]
        longest_run = max(longest_run, run)
        time.sleep(TURN_SECONDS / 4)  # the next request comes meanwhile

    async def count_turns() -> None:
        while True:
            turns[0] += 1
            await trio.lowlevel.checkpoint()

    elsewhere(peer, monkeypatch, answered)
    peer.call(lambda: trio.lowlevel.spawn_system_task(count_turns))
    question = encode_frame(LocalKind.CONTAINS, 1, local.Contains(bytes(60 * 1024)))
    hello = encode_frame(LocalKind.HELLO, 0, local_protocol.Hello(1, 1, "n", Access.READ, 1))
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(10)
        asking.connect(str(peer.path))
        asking.sendall(PREFACE_LOCAL + hello)
        sender = threading.Thread(target=asking.sendall, args=(question * 200,))
        sender.start()
        while len(peer.backend.requests) < 200:
            assert asking.recv(1 << 20)
        sender.join()
    assert longest_run < 25
