"""Views of what another peer of the same host holds, in place, in every world; and neighbours that hang, lie, or belong
to another process."""

import gc
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pstore import blocking, errors
from p2pstore.client import host_neighbours as neighbours
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.local import local_connection, local_greeting
from p2pstore.local import local_messages as local
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.objects import MIB, key_digest
from p2pstore.runtime.blocking_streams import BlockingDriver, BlockingStream, run_blocking
from p2pstore.runtime.streams import UnixStream
from tests.contract.small_peer import PEER_ID, small_peer
from tests.contract.worlds import ASYNC_WORLDS, WORLDS, Cluster, Store
from tests.threads import in_threads
from tests.waiting import eventually

_numbers = itertools.count()


@pytest.fixture
def key(cluster: Cluster) -> Iterator[str]:
    """The beginning of keys that no other test uses. At the end nothing is leased, and they are removed."""
    prefix = f"{next(_numbers):04}/"
    yield prefix
    eventually(lambda: nothing_is_leased(cluster))
    page = cluster.distant.list_keys(prefix)
    cluster.distant.remove_many([each.key for each in page.keys])
    eventually(lambda: not cluster.stores["blocking"].list_keys(prefix).keys)


def nothing_is_leased(cluster: Cluster) -> bool:
    """A test that expected an error leaves its views as garbage. That is collected each time: while another thread is
    collecting, the first call does nothing."""
    gc.collect()
    return leased_bytes(cluster, "far") == leased_bytes(cluster, "near") == 0


def leased_bytes(cluster: Cluster, name: str) -> int:
    leased: int = cluster.on_near(lambda: getattr(cluster, name).node.core.segment.leased_bytes)
    return leased


def is_near(cluster: Cluster, key: str) -> bool:
    """Whether the store's own peer holds a copy."""
    digest = key_digest(key)
    segment = cluster.near.node.core.segment
    return cluster.on_near(lambda: segment.find(digest, time.time()) is not None)


def put_far(cluster: Cluster, key: str, value: Any, **options: Any) -> None:
    """Put at the far peer, and wait until the near one knows."""
    cluster.distant.put(key, value, **options)
    version = cluster.distant.locate(key)[0].version
    store = cluster.stores["blocking"]
    eventually(lambda: [each.version for each in store.locate(key)] == [version])


def spoil(cluster: Cluster, key: str) -> None:
    """One bit of the far peer's copy changes."""
    segment = cluster.far.node.core.segment

    def flip() -> None:
        entry = segment.find(key_digest(key), time.time())
        assert entry is not None
        segment._buffer[entry.offset + 100] ^= 1

    cluster.on_near(flip)


def live(store: Store) -> Any:
    """The files and mappings that a store's client has open."""
    session = store.real._session if store.world == "blocking" else store.real
    return session._live


def neighbours_of(store: Store) -> Neighbours:
    found: Neighbours = live(store).neighbours
    return found


def until_known(store: Store, key: str) -> None:
    """The far peer is known to have it, and how to get there: the near one has nothing to say."""
    eventually(lambda: live(store).fetcher.holders.known.only_holder(key_digest(key)) is not None)


# --- in every world -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4096, MIB + 1, 40 * MIB])
def test_a_view_of_a_neighbours_memory(store: Store, key: str, cluster: Cluster, length: int) -> None:
    value = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    put_far(cluster, key, value)
    with store.lease(key) as view:
        assert view.readonly
        assert np.array_equal(np.frombuffer(view, np.uint8), value)
        assert length == 0 or leased_bytes(cluster, "far") > 0
        again = store.take_lease(key)
        assert again == view
    assert not is_near(cluster, key)
    del view, again


@pytest.mark.parametrize("length", [1, 4096, MIB, 5 * MIB + 1])
def test_copies_out_of_a_neighbours_memory_after_the_first_need_no_plan(
    store: Store, key: str, cluster: Cluster, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("there was a plan")

    value = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    put_far(cluster, key, value)
    into = np.zeros(length + 10, np.uint8)
    assert store.get_into(key, into) == length
    until_known(store, key)
    monkeypatch.setattr("p2pstore.client.holder_reads.pull_with_failover", refuse)
    into[:] = 0
    assert store.get_into(key, into) == length
    assert np.array_equal(into[:length], value)
    assert not into[length:].any()
    assert not is_near(cluster, key)
    with pytest.raises(errors.BufferTooSmall) as too_small:
        store.get_into(key, into[: length - 1])
    assert too_small.value.needed == length


def test_a_neighbours_copy_that_was_replaced_or_spoilt_or_is_too_old_is_not_delivered(
    store: Store, key: str, cluster: Cluster
) -> None:
    into = bytearray(6000)
    for name, ttl in (("replaced", None), ("spoilt", None), ("old", 3.0)):
        put_far(cluster, key + name, b"first" * 1000, ttl=ttl)
        assert store.get_into(key + name, into) == 5000
        until_known(store, key + name)
    put_at = time.time()
    put_far(cluster, key + "replaced", b"other" * 1000, overwrite=True)
    assert store.get_into(key + "replaced", into) == 5000
    assert into[:5000] == b"other" * 1000
    spoil(cluster, key + "spoilt")
    with pytest.raises((errors.NoSuchKey, errors.Unavailable)):
        store.get_into(key + "spoilt", into)
    eventually(lambda: time.time() > put_at + 3)
    with pytest.raises(errors.NoSuchKey):
        store.get_into(key + "old", into)


def test_on_request_the_local_peer_holds_it(store: Store, key: str, cluster: Cluster) -> None:
    put_far(cluster, key, b"value")
    assert store.take_lease(key) == b"value"
    assert not is_near(cluster, key)
    assert store.take_lease(key, here=True) == b"value"
    assert is_near(cluster, key)
    store.pin(key)
    with pytest.raises(TypeError, match="here"):
        store.take_lease(key, here=1)


def test_a_key_that_is_on_its_way(store: Store, key: str, cluster: Cluster) -> None:
    timer = threading.Timer(0.1, cluster.distant.put, (key, b"value"))
    timer.start()
    assert store.take_lease(key, wait=20) == b"value"
    timer.join()
    assert not is_near(cluster, key)
    began = time.monotonic()
    with pytest.raises(errors.NoSuchKey, match="never"):
        store.take_lease(key + "never", wait=0.1)
    assert time.monotonic() - began >= 0.1


def test_a_view_outlives_what_becomes_of_its_key(store: Store, key: str, cluster: Cluster) -> None:
    put_far(cluster, key, b"first" * 1000)
    first = store.take_lease(key)
    put_far(cluster, key, b"second" * 1000, overwrite=True)
    second = store.take_lease(key)
    assert (first, second) == (b"first" * 1000, b"second" * 1000)
    cluster.distant.remove(key)
    eventually(lambda: not store.contains(key))
    with pytest.raises(errors.NoSuchKey):
        store.take_lease(key)
    put_far(cluster, key, b"third" * 1000)
    assert store.take_lease(key) == b"third" * 1000
    for number in range(6):  # over and over the memory that was freed
        cluster.distant.put(f"{key}{number}", np.full(40 * MIB, number, np.uint8))
    assert (first, second) == (b"first" * 1000, b"second" * 1000)


def test_what_was_removed_here_is_not_found_there(store: Store, key: str, cluster: Cluster) -> None:
    put_far(cluster, key, b"value")
    view = store.take_lease(key)
    store.remove(key)
    with pytest.raises(errors.NoSuchKey):  # whether the neighbour has heard of it or not
        store.take_lease(key)
    assert view == b"value"


def test_an_object_expires_under_its_view(key: str, cluster: Cluster) -> None:
    store = cluster.stores["blocking"]
    cluster.distant.put(key, b"value", ttl=1.0)
    view = store.take_lease(key, wait=5)
    eventually(lambda: not store.contains(key))
    with pytest.raises(errors.NoSuchKey):
        store.take_lease(key)
    assert view == b"value"


@pytest.mark.parametrize("together", [False, True])
def test_who_holds_too_much_at_a_neighbour_has_the_rest_brought_here(
    store: Store, key: str, cluster: Cluster, together: bool
) -> None:
    names = [f"{key}{number}" for number in range(3)]
    for number, name in enumerate(names):  # a client may hold half of 192 MiB
        put_far(cluster, name, np.full(40 * MIB, number, np.uint8))
    if together:
        views = [each.unwrap() for each in store.take_leases(names)]
    else:
        views = [store.take_lease(name) for name in names]
    assert [view[-1] for view in views] == [0, 1, 2]
    assert sum(is_near(cluster, name) for name in names) == 1
    assert together or is_near(cluster, names[2])
    del views


def test_many_at_once(store: Store, key: str, cluster: Cluster) -> None:
    names = [f"{key}{number}" for number in range(40)]
    for number, name in enumerate(names):
        cluster.distant.put(name, bytes([number]) * 5000)
    eventually(lambda: all(cluster.stores["blocking"].contains_many(names)))
    views = store.together([("take_lease", name) for name in [*names, *names]])
    assert [bytes(view[:1]) for view in views] == [bytes([number]) for number in range(40)] * 2
    assert not any(is_near(cluster, name) for name in names)
    del views


def test_what_does_not_fit_together_is_brought_one_by_one(
    store: Store, key: str, cluster: Cluster
) -> None:
    names = [f"{key}{number}" for number in range(5)]
    for number, name in enumerate(names):  # 192 MiB each, of which a client may hold half
        put_far(cluster, name, np.full(30 * MIB, number, np.uint8))
    views = store.take_leases(names, here=True)
    assert [each.unwrap()[-1] for each in views if each.ok] == [
        number for number, each in enumerate(views) if each.ok
    ]
    assert sum(each.ok for each in views) == 3
    assert {type(each.error) for each in views if not each.ok} == {errors.LeaseLimitExceeded}
    del views


def test_a_batch_of_copies(
    store: Store, key: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was not in the mapping")

    values = [bytes([number]) * (number * 1000) for number in range(100)]
    names = [f"{key}{number}" for number in range(100)]
    for name, value in zip(names, values, strict=True):
        cluster.distant.put(name, value)
    eventually(lambda: all(store.contains_many(names)))
    for _ in range(2):  # the second time its memory is mapped
        buffers = [bytearray(len(value)) for value in values]
        got = store.get_many_into(list(zip(names, buffers, strict=True)))
        assert [each.value for each in got] == [len(value) for value in values]
        assert buffers == values
        assert [each.value for each in store.get_many(names)] == values
        for name in names:
            until_known(store, name)
        monkeypatch.setattr("p2pstore.client.holder_reads.pull_with_failover", refuse)
    monkeypatch.undo()
    assert not any(is_near(cluster, name) for name in names)
    spoil(cluster, names[1])
    put_far(cluster, names[2], b"other", overwrite=True)
    store.remove(names[3])
    buffers[4] = bytearray(1)
    for _ in range(2):
        got = store.get_many_into(list(zip(names, buffers, strict=True)))
        assert [type(each.error) for each in got[3:5]] == [errors.NoSuchKey, errors.BufferTooSmall]
        assert isinstance(got[1].error, (errors.NoSuchKey, errors.Unavailable))
        assert (got[2].value, bytes(buffers[2][:5])) == (5, b"other")
        assert all(each.ok for each in got[5:])
        assert buffers[5:] == values[5:]


def test_a_batch_of_views(store: Store, key: str, cluster: Cluster) -> None:
    names = [f"{key}{number}" for number in range(300)]
    for number, name in enumerate(names):
        where = cluster.distant if number % 3 else store
        where.put(name, bytes([number % 251]) * (number * 50))
    eventually(lambda: all(store.contains_many(names)))
    first = store.take_lease(names[4])
    views = store.take_leases([*names, key + "never"])
    for number, each in enumerate(views[:-1]):
        assert bytes(each.unwrap()) == bytes([number % 251]) * (number * 50)
    assert isinstance(views[-1].error, errors.NoSuchKey)
    assert not any(is_near(cluster, name) for name in names[1::3])
    assert all(each.ok for each in store.take_leases(names[1::3], here=True))
    assert all(is_near(cluster, name) for name in names[1::3])
    del views, first


def test_a_batch_shows_nothing_that_was_replaced_or_removed(
    store: Store, key: str, cluster: Cluster
) -> None:
    names = [f"{key}{number}" for number in range(3)]
    for name in names:
        put_far(cluster, name, b"first" * 1000)
    views = store.take_leases(names)
    put_far(cluster, names[0], b"other" * 1000, overwrite=True)
    store.remove(names[1])  # whether the neighbour has heard of it or not
    again = store.take_leases(names)
    assert bytes(again[0].unwrap()) == b"other" * 1000
    assert isinstance(again[1].error, errors.NoSuchKey)
    assert bytes(again[2].unwrap()) == b"first" * 1000
    assert all(bytes(each.unwrap()) == b"first" * 1000 for each in views)
    del views, again


@pytest.mark.parametrize("world", ASYNC_WORLDS)
def test_batches_cancelled_at_any_point_leak_nothing(world: str, cluster: Cluster, key: str) -> None:
    store, rng = cluster.stores[world], random.Random(2)
    names = [f"{key}{number}" for number in range(200)]
    for number, name in enumerate(names):
        (cluster.distant if number % 2 else store).put(name, bytes([number]) * 5000)
    eventually(lambda: all(store.contains_many(names)))
    cut = rounds = 0
    until_seconds = time.monotonic() + 30
    while rounds < 40 or not cut:  # on a busy machine all answers may be there before a reader waits
        assert time.monotonic() < until_seconds
        new = (
            f"{key}new {rounds}"  # an object that was leased once, and is still there, needs no request
        )
        cluster.distant.put(new, b"new" * 1000)
        eventually(partial(store.contains, new))
        for call in ("take_leases", "get_many"):
            seconds = max(0.0, rng.uniform(-0.001, 0.004))
            cut += store.cancelled_after(seconds, call, [*rng.sample(names, 100), new])
        rounds += 1
    views = store.take_leases(names)
    assert [bytes(each.unwrap()) for each in views] == [bytes([n]) * 5000 for n in range(200)]
    del views


@pytest.mark.parametrize("world", ASYNC_WORLDS)
def test_cancelled_at_any_point_nothing_leaks(world: str, cluster: Cluster, key: str) -> None:
    store, rng = cluster.stores[world], random.Random(1)
    kept, cut = [], 0
    for number in range(60):
        cluster.distant.put(f"{key}{number}", bytes([number]) * 5000)
        if number % 10 == 0:  # so that other views live on while calls are cancelled
            kept.append(store.take_lease(f"{key}{number}", wait=10))
        seconds = max(0.0, rng.uniform(-0.0002, 0.001))
        cut += store.cancelled_after(seconds, "take_lease", f"{key}{number}")
    assert cut
    assert [view[0] for view in kept] == list(range(0, 60, 10))
    assert leased_bytes(cluster, "far") > 0
    del kept


@pytest.mark.parametrize("world", ["blocking", "asyncio"])
def test_leases_end_with_the_store(world: str, cluster: Cluster, key: str) -> None:
    store = cluster.store(world)
    put_far(cluster, key, b"value" * 1000)
    view = store.take_lease(key)
    assert leased_bytes(cluster, "far") > 0
    store.aclose() if world == "asyncio" else store.close()
    eventually(lambda: leased_bytes(cluster, "far") == 0)
    assert view == b"value" * 1000


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("world", WORLDS)
def test_a_forked_child_leaves_the_links_alone(world: str, cluster: Cluster, key: str) -> None:
    store = cluster.stores[world]
    put_far(cluster, key, b"value")
    view = store.take_lease(key)
    links = neighbours_of(store)
    before = list(links._open.values())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(errors.ClientForked):
                before[0].link.check()
            links.close()
            del view
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert leased_bytes(cluster, "far") > 0
    assert store.take_lease(key) == view == b"value"
    assert list(links._open.values()) == before


# --- neighbours that do what they should not ----------------------------------------------------


class Street:
    """A client of a peer that names others, `houses`, as holders of what they have."""

    def __init__(self, folder: Path, stack: ExitStack, count: int, **settings: Any) -> None:
        self.own = stack.enter_context(small_peer(folder / "own.sock"))
        self.houses = [
            stack.enter_context(small_peer(folder / f"{number}.sock", **settings))
            for number in range(count)
        ]
        self.client = stack.enter_context(blocking.connect(str(self.own.path), timeout=0.5))
        for number, house in enumerate(self.houses):
            with blocking.connect(str(house.path)) as client:
                client.put_many([(f"{number}/{each}", self.value(each)) for each in range(4)])

    @staticmethod
    def value(number: int) -> bytes:
        return bytes([number + 1]) * 100_000

    def name(self, house: int, number: int = 0, **changes: Any) -> str:
        """A key that the own peer says, once, is held there. Its plans hold for one lease."""
        key = f"{house}/{number}"
        holder = {
            **{"member": 7, "peer_id": PEER_ID, "name": "small", "data": [], "slot": 0},
            **{"socket": str(self.houses[house].path), "same_host": True, "size_units": 1},
            **{"clock": 1, "writer": 7, "tier": 0, "ticket_claims": b"", "ticket_signature": b""},
            **{"ticket_secret": b"", **changes},
        }
        self.own.backend.planned[key_digest(key)] = [local.PlanItem([local.Holder(**holder)])]
        return key

    def view(self, house: int, number: int = 0, **changes: Any) -> memoryview:
        return self.client.take_lease(self.name(house, number, **changes))

    def leased(self, house: int = 0) -> int:
        return self.houses[house].call(lambda: self.houses[house].backend.segment.leased_bytes)

    @property
    def links(self) -> Neighbours:
        return self.client._session._live.neighbours


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Callable[..., Street]]:
    with ExitStack() as stack:
        yield lambda count=1, **settings: Street(tmp_path, stack, count, **settings)


def test_a_neighbour_that_hangs_is_given_up_and_left_alone(
    street: Callable[..., Street], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = street()
    held = scene.view(0)
    with scene.houses[0].standing_still():
        with pytest.raises(errors.NoSuchKey):  # the own peer, which was asked then, has it neither
            scene.view(0, 1)
        before = len(scene.houses[0].backend.requests)
        with pytest.raises(errors.NoSuchKey):
            scene.view(0, 2)
        assert held == scene.value(0)
    scene.houses[0].wait_until(lambda: len(scene.houses[0].backend.requests) > before)
    eventually(lambda: 0 < scene.leased() < 200_000)  # unawaited leases were given back
    monkeypatch.setattr(neighbours, "RETRY_SECONDS", 0.0)
    scene.links._retry_at.clear()
    assert scene.view(0, 2) == scene.value(2)
    del held
    gc.collect()
    eventually(lambda: not scene.links._retired)
    eventually(lambda: scene.leased() == 0)
    assert scene.view(0, 3) == scene.value(3)


def test_after_one_that_hangs_the_next_is_asked(street: Callable[..., Street]) -> None:
    scene = street(2)
    with blocking.connect(str(scene.houses[1].path)) as client:
        client.put("0/1", scene.value(1))
    digest = key_digest(scene.name(0, 1))
    (first,) = scene.own.backend.planned[digest][0].holders
    scene.name(0, 1, member=2 << 16 | 7, socket=str(scene.houses[1].path))
    (second,) = scene.own.backend.planned[digest][0].holders
    scene.own.backend.planned[digest] = [local.PlanItem([first, second])]
    with scene.houses[0].standing_still():
        assert scene.client.take_lease("0/1") == scene.value(1)
    assert scene.leased(1) > 0


def test_a_neighbour_that_has_gone(street: Callable[..., Street]) -> None:
    scene = street()
    view = scene.view(0)
    scene.houses[0].stop()
    with pytest.raises(errors.NoSuchKey):
        scene.view(0, 1)
    assert view == scene.value(0)
    eventually(lambda: not scene.links._retired and not scene.links._open)


def test_what_is_older_than_was_said_is_not_shown(street: Callable[..., Street]) -> None:
    scene = street()
    with pytest.raises(errors.NoSuchKey):
        scene.view(0, clock=1_000_000)
    eventually(lambda: scene.leased() == 0)
    view = scene.view(0)
    with pytest.raises(errors.NoSuchKey):  # not even under a lease that is there
        scene.view(0, clock=1_000_000)
    assert view == scene.value(0)


@pytest.mark.parametrize("wrong", [{"peer_id": b"another"}, {"socket": "/nowhere/x.sock"}])
def test_another_peer_or_none_at_that_path(street: Callable[..., Street], wrong: dict[str, Any]) -> None:
    scene = street()
    with pytest.raises(errors.NoSuchKey):
        scene.view(0, **wrong)
    assert not scene.links._open
    assert scene.view(0) == scene.value(0)


@pytest.mark.parametrize("elsewhere", [{"same_host": False}, {"socket": ""}])
def test_holders_that_clients_are_not_to_use_so(
    street: Callable[..., Street], elsewhere: dict[str, Any]
) -> None:
    """Of peers that use TCP or RDMA alone."""
    scene = street()
    with pytest.raises(errors.NoSuchKey):
        scene.view(0, **elsewhere)
    assert len(scene.houses[0].backend.clients) == 1  # who put the values
    assert LocalKind.LEASE in scene.own.backend.requests


def test_an_older_copy_nearby_is_passed_over(street: Callable[..., Street]) -> None:
    scene = street()
    key = scene.name(0)
    (plan,) = scene.own.backend.planned[key_digest(key)]
    newer = local.Holder(
        **{
            **{name: getattr(plan.holders[0], name) for name in local.Holder.__struct_fields__},
            **{"clock": 2, "same_host": False, "socket": ""},
        }
    )
    scene.own.backend.planned[key_digest(key)] = [local.PlanItem([newer, *plan.holders])]
    with pytest.raises(errors.NoSuchKey):
        scene.client.take_lease(key)
    assert not scene.links._open


@pytest.mark.parametrize("gives_pages", [False, True])
def test_links_are_limited(
    street: Callable[..., Street], monkeypatch: pytest.MonkeyPatch, gives_pages: bool
) -> None:
    monkeypatch.setattr(neighbours, "MAX_NEIGHBOURS", 2)
    scene = street(4, gives_pages=gives_pages)
    paths = [str(house.path) for house in scene.houses]

    def connected() -> list[str]:
        return [path for path, _ in scene.links._open]

    first = scene.view(0)
    assert scene.view(1) == scene.value(0)
    with pytest.raises(errors.NoSuchKey):  # the local peer, which lacks it here, is asked
        scene.view(2)
    assert bytes(first) == scene.value(0)
    assert connected() == paths[:2]


def test_an_interrupt_costs_no_link_and_no_view(
    street: Callable[..., Street], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the answer has come, before it was read."""
    scene = street()
    view = scene.view(0)
    once = view.nbytes
    receive = BlockingStream.receive_piece

    async def interrupted(self: BlockingStream) -> None:
        await receive(self)
        with socket.socket(fileno=os.dup(self.fileno())) as sock:
            if sock.getpeername() == str(scene.houses[0].path):
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockingStream, "receive_piece", interrupted)
        scene.view(0, 1)
    eventually(lambda: scene.leased() < 2 * once)
    assert scene.view(0, 2) == scene.value(2)
    assert view == scene.value(0)
    assert len(scene.links._open) == 1
    assert not scene.links._retired
    del view
    gc.collect()
    eventually(lambda: scene.leased() == 0)


def test_threads_share_links(street: Callable[..., Street]) -> None:
    """The first calls, which open the link, and later ones; while others close what is left over."""
    scene = street(2)
    for house, number in itertools.product(range(2), range(4)):
        digest = key_digest(scene.name(house, number))
        scene.own.backend.planned[digest] *= 800

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            house, number = rng.randrange(2), rng.randrange(4)
            view = scene.client.take_lease(f"{house}/{number}")
            assert view[-1] == number + 1

    in_threads(8, work)
    assert [len(house.backend.clients) for house in scene.houses] == [2, 2]
    eventually(lambda: scene.leased(0) == scene.leased(1) == 0)


def test_leases_end_as_the_program_does(street: Callable[..., Street]) -> None:
    """Though the client was not closed: the peers need not find out."""
    scene = street()
    scene.name(0)
    program = """
import sys
from p2pstore import blocking
client = blocking.connect(sys.argv[1])
view = client.take_lease("0/0")
print(len(view))
"""
    command = [sys.executable, "-c", program, str(scene.own.path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"100000\n", b"")
    eventually(lambda: scene.leased() == 0)


NOBODY = 65_534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_socket_of_another_user_is_not_used() -> None:
    """The process that listens there could show anything."""
    with tempfile.TemporaryDirectory() as folder:  # which others can get to
        Path(folder).chmod(0o777)
        refuse_another_user(Path(folder) / "other.sock")


def refuse_another_user(path: Path) -> None:
    command = [sys.executable, "-c", LISTENER, str(path), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(errors.NoLocalPeer, match="another user"):
                connect(path, {os.geteuid()})
            assert process.stdout.readline() == "0 bytes\n"
            with pytest.raises(errors.DeadlineExceeded):
                connect(path, {os.geteuid(), NOBODY})
            assert process.stdout.readline() != "0 bytes\n"
        finally:
            process.kill()


LISTENER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    print(len(connection.recv(100)), "bytes", flush=True)
    kept = connection
"""


def connect(path: Path, users: set[int]) -> None:
    run_blocking(
        LocalConnection.open(
            BlockingDriver(), str(path), Opening("n", Access.READ, trusted_users=users), 0.2
        )
    )


def test_whom_a_client_trusts(street: Callable[..., Street], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own user, and the user of its own peer."""
    scene = street()
    me = os.geteuid()
    users: dict[str, int] = {}
    real = local_greeting.user_at

    def claimed(stream: UnixStream) -> int:
        with socket.socket(fileno=os.dup(stream.fileno())) as sock:
            path = sock.getpeername()
        return users[path] if path in users else real(stream)

    monkeypatch.setattr(local_greeting, "user_at", claimed)
    monkeypatch.setattr(local_connection, "user_at", claimed)
    own, house = str(scene.own.path), str(scene.houses[0].path)
    for claims, trusted in (
        ({own: me, house: me + 1}, False),
        ({own: me + 1, house: me + 2}, False),
        ({own: me + 1, house: me + 1}, True),
        ({own: me + 1, house: me}, True),
    ):
        users.update(claims)
        scene.links._retry_at.clear()
        if trusted:
            assert scene.view(0) == scene.value(0)
            scene.links.close()
            scene.links._closed = False
        else:
            with pytest.raises(errors.NoSuchKey):
                scene.view(0)
