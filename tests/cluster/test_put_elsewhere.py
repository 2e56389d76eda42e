"""A put that its own peer has no room for goes to another one, by real peers and real clients."""

import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import blocking, errors
from p2pstore.client import put_elsewhere as elsewhere
from p2pstore.client.read_plan import remote_copy
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import MIB, chunk_sums, key_digest, root_checksum
from p2pstore.peer import Peer, open_peer
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, Store, Ticket
from p2pstore.transfer.peer_messages import Statistics
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.serving import data_server
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Empty
from simulation.segment_checks import check_segment
from tests.cluster.machines import new_machine
from tests.cluster.peers import config
from tests.waiting import eventually, until

NONE: Mapping[str, object] = {"memory": 0}


class InThread:
    """The blocking client, its methods run in a thread."""

    def __init__(self, client: blocking.BlockingClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **options: Any) -> Any:
            return await trio.to_thread.run_sync(
                partial(getattr(self._client, name), *arguments, **options)
            )

        return call


@asynccontextmanager
async def peers(folder: Path, *settings: Mapping[str, object]) -> AsyncIterator[list[Peer]]:
    """Peers `a`, `b`, ... with these settings, that know each other's newest records."""
    async with AsyncExitStack() as stack:
        opened: list[Peer] = []
        for name, some in zip("abcdef", settings, strict=False):
            settled = config(folder, name, *opened[:1], **some)
            opened.append(await stack.enter_async_context(open_peer(settled)))
        await until(lambda: all(len(p.node.core.live_peers()) == len(opened) - 1 for p in opened))
        yield opened


@pytest.fixture(params=["trio", "blocking"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def client_of(peer: Peer, kind: str) -> AsyncIterator[Any]:
    if kind == "trio":
        async with p2pstore.connect(peer.socket) as client:
            yield client
    else:
        with closing(await trio.to_thread.run_sync(blocking.connect, peer.socket)) as plain:
            yield InThread(plain)


def used(peer: Peer) -> int:
    return peer.node.core.segment.used_bytes


async def test_a_peer_without_memory_puts_on_another(tmp_path: Path, kind: str) -> None:
    async with peers(tmp_path, NONE, {}) as (a, b), client_of(a, kind) as client:
        result = await client.put("k", b"value", replicas=1, ttl=60.0, pin="soft")
        assert (result.status, result.copies, result.location) == ("created", 1, "b")
        # At once, and for every client of this peer, not only for the one that put.
        assert a.contains_nowait("k")
        assert await a.contains("k")
        (copy,) = await a.locate("k")
        assert (copy.peer, copy.version, copy.pin, copy.local) == ("b", result.version, "soft", False)
        assert await client.get("k") == b"value"
        assert (await client.put("k", b"value")).status == "unchanged"
        kept = await client.put("k", b"other")
        assert (kept.status, kept.version, kept.location) == ("kept_existing", result.version, "b")
        newer = await client.put("k", b"newer", overwrite=True)
        assert newer.status == "created"
        assert newer.version > result.version
        assert await client.get("k") == b"newer"
        assert await client.remove("k") is True
        assert (await client.put("k", b"again")).status == "created"
        assert await b.get("k") == b"again"
        assert used(a) == 0
        check_segment(b.node.core.segment)


async def test_what_is_larger_than_the_own_memory(tmp_path: Path, kind: str) -> None:
    small, large = {"memory": "8MiB"}, {"memory": "48MiB"}
    value = bytes(range(256)) * (4096 * 40)
    async with peers(tmp_path, small, large) as (a, b), client_of(a, kind) as client:
        assert (await client.put("small", b"value")).location == "a"
        assert (await client.put("large", value)).location == "b"
        buffer = bytearray(len(value))
        assert await client.get_into("large", buffer) == len(value)
        assert buffer == value
        before = used(b)
        told: list[int] = []
        with pytest.raises(errors.CapacityExceeded, match=r"can hold 50\.0 MiB.*48\.0 MiB, on b"):
            await client.put("huge", bytes(50 * MIB), progress=lambda done, total: told.append(done))
        assert told == []
        assert used(b) == before
        assert b.node.core.counters["values_taken_in"] == 1


async def test_a_peer_full_of_what_must_stay(tmp_path: Path, kind: str) -> None:
    small = {"memory": "8MiB", "max_leased": "100%"}
    async with peers(tmp_path, small, {}) as (a, _), client_of(a, kind) as client:
        await client.put("pinned", bytes(5 * MIB), pin="hard")
        assert (await client.put("other", bytes(5 * MIB))).location == "b"
        async with a.lease("pinned") as view:
            assert (await client.put("third", bytes(5 * MIB))).location == "b"
            assert len(view) == 5 * MIB
        assert (await client.put("fits", bytes(2 * MIB))).location == "a"
        results = await client.put_many(
            [("x", bytes(MIB)), ("y", bytes(5 * MIB)), ("", b""), ("z", bytes(40 * MIB)), ("w", b"")]
        )
        assert [each.ok and each.value.location for each in results] == ["a", "b", False, False, "a"]
        assert isinstance(results[2].error, ValueError)
        assert isinstance(results[3].error, errors.CapacityExceeded)


async def test_a_batch_larger_than_the_memory_evicts_before_it_goes_elsewhere(
    tmp_path: Path, kind: str
) -> None:
    async with peers(tmp_path, {"memory": "8MiB"}, {}) as (a, _), client_of(a, kind) as client:
        results = await client.put_many([(f"k{n}", bytes([n]) * (3 * MIB)) for n in range(5)])
        assert [each.value.location for each in results] == ["a"] * 5


async def test_a_peer_without_memory_takes_a_whole_batch(tmp_path: Path, kind: str) -> None:
    async with peers(tmp_path, NONE, {}) as (a, _), client_of(a, kind) as client:
        items = [(f"k{number}", b"%d" % number * 1000) for number in range(40)]
        results = await client.put_many(items)
        assert [each.value.location for each in results] == ["b"] * 40
        assert all(a.contains_nowait(key) for key, _ in items)
        buffers = [(key, bytearray(len(value))) for key, value in items]
        got = await client.get_many_into(buffers)
        assert [each.value for each in got] == [len(value) for _, value in items]
        assert [bytes(buffer) for _, buffer in buffers] == [value for _, value in items]


async def test_the_own_copy_decides_when_there_is_no_room_for_another(tmp_path: Path) -> None:
    async with peers(tmp_path, {"memory": "8MiB"}, {}) as (a, b):
        value = bytes(5 * MIB)
        first = await a.put("k", value, pin="hard")
        same = await a.put("k", value)
        assert (same.status, same.version, same.location) == ("unchanged", first.version, "a")
        kept = await a.put("k", bytes(6 * MIB))
        assert (kept.status, kept.version, kept.location) == ("kept_existing", first.version, "a")
        assert used(b) == 0
        newer = await a.put("k", b"n" * (6 * MIB), overwrite=True)
        assert (newer.status, newer.location) == ("created", "b")
        assert (await a.get("k")).count(b"n") == 6 * MIB, "the own copy is older, and gone"
        assert used(a) == 0


async def test_a_holder_elsewhere_decides_without_any_bytes(tmp_path: Path) -> None:
    async with peers(tmp_path, NONE, {}, {}) as (a, b, c):
        value = bytes(9 * MIB)
        first = await c.put("k", value)
        await until(lambda: a.contains_nowait("k"))
        same = await a.put("k", value, replicas=2)
        assert (same.status, same.version, same.location) == ("unchanged", first.version, "c")
        assert same.copies == 2, "a second put may ask for more copies"
        await until(lambda: len(a.locate_nowait("k")) == 2)
        kept = await a.put("k", b"other")
        assert kept.status == "kept_existing"
        assert kept.location in {"b", "c"}, "b has pulled a copy by now"
        assert b.node.core.counters["values_taken_in"] == 0


async def test_replicas_are_made_by_peers_that_have_memory(tmp_path: Path) -> None:
    async with peers(tmp_path, NONE, {}, {}) as (a, b, c):
        result = await a.put("k", bytes(3 * MIB), replicas=3)
        assert (result.copies, result.wanted) == (2, 3), "a has none to offer"
        assert used(b) == used(c) > used(a) == 0
        assert {copy.peer for copy in await b.locate("k")} == {"b", "c"}
        with pytest.raises(errors.CapacityExceeded, match="offers no memory"):
            async with a.lease("k", here=True):
                raise AssertionError("there is no memory to lease from")
        async with a.lease("k") as view:
            assert len(view) == 3 * MIB, "others of this host have some"
        offered = {each.name: each.memory_capacity for each in await b.peers()}
        assert offered == {"a": 0, "b": 32 * MIB, "c": 32 * MIB}


async def test_who_is_full_is_passed_over_for_the_next(tmp_path: Path) -> None:
    async with peers(tmp_path, NONE, {"memory": "24MiB"}, {"memory": "16MiB"}) as (a, b, c):
        await b.put("pinned", bytes(20 * MIB), pin="hard")
        assert (await a.put("k", bytes(10 * MIB))).location == "c"
        assert used(c) > 10 * MIB


@pytest.mark.parametrize("tries", [1, elsewhere.MAX_TRIES])
async def test_so_many_others_are_tried_and_each_reason_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(elsewhere, "MAX_TRIES", tries)
    async with peers(tmp_path, NONE, {}, {}) as (a, b, c):
        for peer in (b, c):
            await peer.put(f"pinned by {peer.name}", bytes(25 * MIB), pin="hard")
        with pytest.raises(errors.CapacityExceeded, match=r"took the 10\.0 MiB of 'k'") as caught:
            await a.put("k", bytes(10 * MIB))
        assert str(caught.value).count("25.0 MiB hard-pinned") == min(tries, 2)


async def test_a_peer_that_turns_out_to_be_too_old_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "MAX_TRIES", 1)
    async with peers(tmp_path, NONE, {}, {"memory": "16MiB"}) as (a, b, _):
        monkeypatch.setattr(data_server, "MAX_DATA_VERSION", 1)
        with pytest.raises(errors.CapacityExceeded, match="upgrade the older one") as caught:
            await a.put("k", b"value")
        assert "b: " in str(caught.value)
        assert "c: " in str(caught.value)
        assert used(b) == 0


async def test_a_strict_transport_is_kept_to(tmp_path: Path) -> None:
    async with peers(tmp_path, {"memory": 0, "transport": "shm"}, {}) as (a, _):
        with pytest.raises(errors.CapacityExceeded, match="shm only"):
            await a.put("k", b"value")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LocalKind.PLACE, local.Place(b"short", 5)),
        (LocalKind.PLACE, local.Place(bytes(16), -1)),
        (LocalKind.PLACE, local.Place(bytes(16), 1 << 33)),
        (LocalKind.STORED, local.StoredElsewhere(b"", 1, 1, b"")),
        (LocalKind.STORED, local.StoredElsewhere(b"", 1, 1, bytes(68))),
    ],
)
async def test_nonsense_of_a_client_is_refused(tmp_path: Path, kind: LocalKind, message: Any) -> None:
    async with peers(tmp_path, NONE) as (a,):
        with pytest.raises(errors.P2PStoreError):
            await a._link.request(kind, message, local.Placed)
        news = local.StoredElsewhere(b"nobody", 1, 1, bytes(42))
        await a._link.request(LocalKind.STORED, news, Empty)
        assert not a.contains_nowait("k")


def store_request(value: bytes, **facts: Any) -> Store:
    sums = chunk_sums(value)
    fields: dict[str, Any] = {"namespace": "default", "key": "k", "length": len(value), "clock": 0}
    fields |= {"sums": sums, "root": root_checksum(len(value), sums)} | facts
    return Store(**fields)


async def test_tickets_to_write_go_to_the_places_only(tmp_path: Path) -> None:
    """A ticket in a plan to read stores nothing; one in a place reads nothing."""
    async with peers(tmp_path, NONE, {}) as (a, b):
        await a.put("k", b"value")
        digest = key_digest("k")
        plan = await a._link.request(LocalKind.PLAN, local.Plan(digest), local.Planned)
        place = await a._link.request(LocalKind.PLACE, local.Place(digest, 5), local.Placed)
        (holder,), (target,) = plan.items[0].holders, place.targets
        pool = ConnectionPool(TrioDriver())
        with pytest.raises(errors.AuthenticationFailed, match="does not allow STORE"):
            await pool.store(remote_copy(holder), store_request(b"other"), memoryview(b"other"))
        ticket = GrantedTicket(
            Ticket(target.ticket_claims, target.ticket_signature), target.ticket_secret
        )
        pool.close()
        pool = ConnectionPool(TrioDriver())
        remote = RemotePeer(target.peer_id, tuple(target.data), ticket)
        with pytest.raises(errors.AuthenticationFailed, match="does not allow STATISTICS"):
            await pool.request(remote, DataKind.STATISTICS, Statistics())
        pool.close()
        assert b.node.core.counters["values_taken_in"] == 1


async def test_a_client_closed_in_the_middle_says_so(tmp_path: Path) -> None:
    async with peers(tmp_path, NONE, {"memory": "64MiB"}) as (a, b):
        client = await trio.to_thread.run_sync(blocking.connect, a.socket)

        def put() -> None:
            client.put("k", bytes(40 * MIB), progress=lambda done, total: client.close())

        with pytest.raises(errors.StoreClosed):
            await trio.to_thread.run_sync(put)
        await until(lambda: used(b) == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_a_target_that_fails_in_the_middle_is_replaced_by_the_next(how: signal.Signals) -> None:
    with new_machine() as machine:
        first = machine.join("first", "--memory", "0")
        bootstrap = ["--bootstrap", first.ready["control"]]
        roomy = machine.join("roomy", *bootstrap, "--memory", "96MiB")
        other = machine.join("other", *bootstrap, "--memory", "64MiB")
        eventually(lambda: first.alive() == roomy.alive() == other.alive() == 3)
        told: list[int] = []

        def fail(done: int, total: int) -> None:
            told.append(done)
            if len(told) == 1:
                roomy.process.send_signal(how)

        value = bytes(range(256)) * (4096 * 40)
        with blocking.connect(first.ready["socket"], timeout=1.0) as client:
            result = client.put("k", value, progress=fail)
            assert (result.status, result.location) == ("created", "other")
            # The one that is stopped may have taken all by then: only its last answer is missing.
            assert told.count(told[0]) == 2
            assert told[-1] == len(value)
            assert client.get("k") == value
        assert other.client.get("k") == value
