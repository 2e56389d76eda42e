"""The promises of a store, in every world: a peer in this process, and clients for trio, threads and
asyncio, against one real cluster of two peers."""

import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import p2pstore
from p2pstore import aio, blocking, errors
from p2pstore.aio import AioClient
from p2pstore.blocking import BlockingClient
from p2pstore.checkpoint.client.checkpoint_calls import BlockingCheckpoints, Checkpoints
from p2pstore.client import writing
from p2pstore.client.fetcher import Fetcher
from p2pstore.client.object_store import ObjectStore
from p2pstore.client.trio_client import Client
from p2pstore.local import server
from p2pstore.local.local_connection import LocalConnection
from p2pstore.objects import KIB, MIB, chunk_sums
from p2pstore.wire import Limits
from simulation.segment_checks import check_segment
from tests.contract.worlds import ASYNC_WORLDS, WORLDS, Cluster, Store, peer_process
from tests.odd_tensors import odd_arrays, odd_tensors
from tests.optional import require_torch
from tests.waiting import eventually

_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """A key that no other test uses; so are all that begin with it."""
    return f"{next(_numbers):04}/"


@pytest.fixture
def tidy(cluster: Cluster, key: str) -> Iterator[None]:
    """For tests with large values: afterwards their keys are removed, and no memory is missing."""
    segment = cluster.near.node.core.segment
    eventually(lambda: leased_bytes(cluster) == 0)
    before = cluster.on_near(lambda: segment.used_bytes)
    yield
    page = cluster.distant.list_keys(key)
    cluster.distant.remove_many([each.key for each in page.keys])
    eventually(lambda: cluster.on_near(lambda: segment.used_bytes) <= before)
    eventually(lambda: leased_bytes(cluster) == 0)
    cluster.on_near(lambda: check_segment(segment))


def pattern(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed + length).integers(0, 256, length, np.uint8).tobytes()


# --- one protocol -------------------------------------------------------------------------------


def public_methods(kind: type) -> set[str]:
    return {
        name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name, None))
    }


def parameters(kind: type, name: str) -> list[tuple[str, Any, Any, Any]]:
    signature = inspect.signature(getattr(kind, name))
    return [
        (each.name, each.kind, each.default, each.annotation) for each in signature.parameters.values()
    ]


@pytest.mark.parametrize("kind", [p2pstore.Peer, Client, AioClient, BlockingClient])
def test_all_worlds_have_the_same_methods(kind: type) -> None:
    assert public_methods(ObjectStore) <= public_methods(kind)
    beyond = public_methods(kind) - public_methods(Client)
    assert beyond <= {
        *("contains_nowait", "locate_nowait", "match_prefix_nowait", "reload", "aclose"),
        *("contains_many_nowait", "touch", "fail_fast", "hear"),
    }
    for name in public_methods(Client) - {"open", "close"}:
        reference = ObjectStore if hasattr(ObjectStore, name) else Client
        assert parameters(kind, name) == parameters(reference, name), name
        assert inspect.getdoc(getattr(kind, name)), name
        returns = inspect.signature(getattr(kind, name)).return_annotation
        wanted = inspect.signature(getattr(reference, name)).return_annotation
        if name == "lease":
            assert {returns, wanted} <= {
                "Iterator[memoryview]",
                "AsyncIterator[memoryview]",
                "AbstractAsyncContextManager[memoryview]",
            }
        elif name == "transfers":
            assert {returns, wanted} <= {
                "Iterator[BlockingTransfers]",
                "AsyncIterator[TransferBatch]",
                "AbstractAsyncContextManager[TransferBatch]",
            }
        else:
            assert returns == wanted, name


def test_checkpoints_are_the_same_in_all_worlds() -> None:
    assert public_methods(BlockingCheckpoints) == public_methods(Checkpoints)
    for name in public_methods(Checkpoints):
        assert parameters(BlockingCheckpoints, name) == parameters(Checkpoints, name), name


def test_the_protocol_is_what_stores_are(cluster: Cluster) -> None:
    for store in cluster.stores.values():
        assert isinstance(store.real, ObjectStore)


# --- put and get --------------------------------------------------------------------------------


def test_put_and_get(store: Store, key: str, cluster: Cluster) -> None:
    first = store.put(key, b"value")
    assert (first.key, first.status, first.copies, first.wanted) == (key, "created", 1, 1)
    assert first.location == "near"
    assert store.get(key) == b"value"
    assert store.put(key, bytearray(b"value")).status == "unchanged"
    assert store.put(key, b"other").status == "kept_existing"
    assert store.get(key) == b"value"
    again = store.put(key, b"other", overwrite=True)
    assert again.status == "created"
    assert again.version > first.version
    assert store.get(key) == b"other"
    assert cluster.distant.get(key) == b"other"
    assert store.remove(key) is True
    assert store.remove(key) is False
    with pytest.raises(errors.NoSuchKey, match=re.escape(repr(key))) as caught:
        store.get(key)
    assert isinstance(caught.value, KeyError)


def test_a_conflict_is_kept_overwritten_or_an_error(store: Store, key: str) -> None:
    first = store.put(key, b"value", on_conflict="error")
    assert first.status == "created"
    assert store.put(key, b"value", on_conflict="error").status == "unchanged"
    assert store.put(key, b"other", on_conflict="keep").status == "kept_existing"
    with pytest.raises(errors.KeyExists, match="on_conflict") as caught:
        store.put(key, b"other", on_conflict="error")
    assert (caught.value.key, store.get(key)) == (key, b"value")
    batch = [(key, b"other"), (key + "2", b"new"), (key, b"value")]
    kept, created, same = store.put_many(batch, on_conflict="error")
    assert isinstance(kept.error, errors.KeyExists)
    assert kept.value is None
    assert [created.value.status, same.value.status] == ["created", "unchanged"]
    assert store.put_many(batch)[0].value.status == "kept_existing"
    assert store.put(key, b"other", on_conflict="overwrite").status == "created"
    assert store.put(key, b"third", on_conflict="overwrite", overwrite=True).status == "created"
    tensor = np.arange(4, dtype="<i4")
    assert store.put_tensor(key + "t", tensor).status == "created"
    assert store.put(key + "t", tensor).status == "unchanged"
    assert store.put_tensor(key + "t", tensor.reshape(2, 2)).status == "kept_existing"
    with pytest.raises(errors.KeyExists):
        store.put_tensor(key + "t", tensor.view("<f4"), on_conflict="error")
    calls = {"put": (key, b""), "put_many": ([(key, b"")],), "put_tensor": (key, tensor)}
    for name, args in calls.items():
        for policy in ("keep", "error"):
            with pytest.raises(ValueError, match="contradicts"):
                getattr(store, name)(*args, overwrite=True, on_conflict=policy)


def test_the_ttl_of_a_second_put_is_that_of_all_copies(store: Store, key: str, cluster: Cluster) -> None:
    def ends(peer: Any) -> list[float | None]:
        page = peer.list_keys(key, local=True)
        return [each.expires_unix for each in page.keys]

    assert store.put(key, b"value", replicas=2).copies == 2
    assert ends(store) == ends(cluster.distant) == [None]
    before = time.time()
    assert store.put(key, b"value", ttl=1000).status == "unchanged"
    (near,), (far,) = ends(store), ends(cluster.distant)
    assert near == far
    assert near is not None
    assert before + 999 <= near <= time.time() + 1001
    assert store.put(key, b"value").status == "unchanged"
    assert ends(store) == ends(cluster.distant) == [near], "without a ttl it stays"
    assert store.put(key, b"value", ttl=0.05).status == "unchanged"
    eventually(lambda: not store.contains(key) and not cluster.distant.contains(key))


async def fill_falsely(driver: Any, target: memoryview, source: Any, *_: Any) -> bytes:
    """Put other bytes than announced, as a broken client does."""
    target[:] = bytes(len(source))
    return chunk_sums(source)


def test_an_object_with_false_checksums_is_in_nobodys_way(
    store: Store, key: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length, number in ((100, 0), (5 * MIB, 1)):
        where, honest = f"{key}{number}", b"h" * length
        for attacker in (cluster.stores["blocking"].real, cluster.distant):
            for value, status in ((b"f" * length, "created"), (honest, "created")):
                with monkeypatch.context() as patch:
                    patch.setattr(writing, "fill", fill_falsely)
                    assert attacker.put(where, value).status == "created"
                eventually(lambda where=where: store.contains(where))  # type: ignore[misc]
                assert store.put(where, honest).status in (status, "unchanged")
                assert store.get(where) == honest
                assert store.put(where, b"o" * length).status == "kept_existing"
                assert store.remove(where)
                eventually(lambda where=where: not cluster.distant.contains(where))  # type: ignore[misc]


@pytest.mark.parametrize("length", [100, 5 * MIB])
def test_a_holder_drops_what_a_reader_found_spoilt(
    store: Store, key: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writing, "fill", fill_falsely)
        cluster.distant.put(key, b"f" * length)
        cluster.stores["blocking"].put(key + "near", b"f" * length)
    eventually(lambda: store.contains(key))
    for name in (key, key + "near"):
        with pytest.raises((errors.Unavailable, errors.NoSuchKey)):
            store.get(name)
        eventually(lambda name=name: not cluster.distant.contains(name))  # type: ignore[misc]
        eventually(lambda name=name: not store.contains(name))  # type: ignore[misc]


def test_batches_whose_answers_fit_no_frame_are_asked_for_in_parts(
    store: Store, key: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{key}{number:03}".ljust(200, "k") for number in range(300)]
    assert all(each.ok for each in cluster.distant.put_many([(each, b"v") for each in keys]))
    eventually(lambda: all(store.contains_many(keys)))
    monkeypatch.setattr(server, "LOCAL_LIMITS", Limits(20_000, 0))
    (run,) = store.match_prefix_by_peer(keys)
    assert (run.peer, run.blocks) == ("far", 300)
    assert [each.key for each in store.list_keys(key, limit=301).keys] == keys
    assert [bytes(each.value) for each in store.take_leases(keys)] == [b"v"] * 300
    assert [each.value for each in store.get_many(keys)] == [b"v"] * 300
    assert [each.value for each in store.remove_many(keys)] == [True] * 300


@pytest.mark.parametrize("length", [0, 1, 4095, 65_537, MIB + 1, 5 * MIB + 3])
def test_values_of_all_sizes(store: Store, key: str, cluster: Cluster, length: int) -> None:
    value = pattern(length)
    store.put(key, value)
    cluster.distant.put(key + "far", value)
    for name in (key, key + "far"):
        assert store.get(name) == value
        buffer = bytearray(length + 8)
        assert store.get_into(name, buffer) == length
        assert buffer[:length] == value
        assert buffer[length:] == bytes(8)
        with store.lease(name) as view:
            assert view.readonly
            assert view == value


@pytest.mark.usefixtures("tidy")
def test_values_of_several_parts(store: Store, key: str, cluster: Cluster) -> None:
    value = np.arange((66 * MIB + 8) // 8, dtype="<u8")
    assert cluster.distant.put(key, value).status == "created"
    buffer = np.empty_like(value)
    assert store.get_into(key, buffer) == value.nbytes
    assert np.array_equal(buffer, value)
    assert store.put(key + "near", value).status == "created"
    with store.lease(key + "near") as view:
        assert np.array_equal(np.frombuffer(view, "<u8"), value)
    del view


def test_a_buffer_of_no_bytes(store: Store, key: str) -> None:
    store.put(key, b"")
    assert store.get(key) == b""
    assert store.get_into(key, bytearray()) == 0
    store.put(key + "1", b"1")
    with pytest.raises(errors.BufferTooSmall) as caught:
        store.get_into(key + "1", bytearray())
    assert caught.value.needed == 1


def test_a_buffer_that_is_too_small_is_left_alone(store: Store, key: str, cluster: Cluster) -> None:
    store.put(key, bytes(range(100)))
    cluster.distant.put(key + "far", bytes(range(100)))
    for name in (key, key + "far"):
        buffer = bytearray(b"\xff" * 99)
        with pytest.raises(errors.BufferTooSmall, match=r"100 bytes.* 99") as caught:
            store.get_into(name, buffer)
        assert caught.value.needed == 100
        assert buffer == b"\xff" * 99


def test_replicas(store: Store, key: str, cluster: Cluster) -> None:
    result = store.put(key, b"value", replicas=2)
    assert (result.copies, result.wanted) == (2, 2)
    eventually(lambda: {place.peer for place in store.locate(key)} == {"near", "far"})
    few = store.put(key + "few", b"value", replicas=5)
    assert (few.copies, few.wanted) == (2, 5)
    store.put(key + "later", b"value")
    assert store.replicate(key + "later", 2).copies == 2
    with pytest.raises(errors.NoSuchKey, match="no/such"):
        store.replicate("no/such", 2)


def test_a_time_to_live(store: Store, key: str) -> None:
    store.put(key, b"value", ttl=0.05)
    time.sleep(0.06)
    for read in (store.get, store.take_lease, store.get_tensor):
        with pytest.raises(errors.NoSuchKey):
            read(key)


def test_waiting_for_a_key(store: Store, key: str, cluster: Cluster) -> None:
    timer = threading.Timer(0.1, cluster.distant.put, (key, b"value"))
    timer.start()
    assert store.get(key, wait=10) == b"value"
    timer.join()
    started = time.monotonic()
    for read in (store.get, store.take_lease, store.get_tensor):
        with pytest.raises(errors.NoSuchKey):
            read(key + "never", wait=0.1)
    with pytest.raises(errors.NoSuchKey):
        store.get_into(key + "never", bytearray(1), wait=0.1)
    assert 0.4 <= time.monotonic() - started < 5


def test_each_waits_only_as_long_as_it_wants_to(store: Store, key: str, cluster: Cluster) -> None:
    """Those who want the same absent object in place share its fetch, but not their patience."""
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(cluster.stores["blocking"].take_lease, key, wait=20)
        eventually(lambda: cluster.near.node.core.operations_under_way > 0)
        started = time.monotonic()
        with pytest.raises(errors.NoSuchKey):
            store.take_lease(key)
        assert time.monotonic() - started < 10
        assert not patient.done()
        cluster.distant.put(key, b"value")
        assert patient.result(10) == b"value"


# --- batches ------------------------------------------------------------------------------------


def test_batches(store: Store, key: str, cluster: Cluster) -> None:
    items = [(f"{key}{number}", bytes([number % 256]) * number) for number in range(300)]
    bad: list[Any] = [("", b"x"), (f"{key}s", "text"), (7, b"x"), (f"{key}h", np.zeros(999 * MIB))]
    put = store.put_many([*items[:150], *bad])
    assert [each.unwrap().status for each in put[:150]] == ["created"] * 150
    assert [type(each.error) for each in put[150:153]] == [ValueError] * 3
    assert isinstance(put[153].error, errors.CapacityExceeded | errors.ObjectTooLarge)
    with pytest.raises(ValueError, match="empty"):
        put[150].unwrap()
    assert [each.ok for each in cluster.distant.put_many(items[150:])] == [True] * 150
    buffers = [(name, bytearray(len(value))) for name, value in items]
    extra: list[Any] = [
        (key + "nope", bytearray(9)),
        (f"{key}9", bytearray(1)),
        (f"{key}200", bytearray(1)),
        (f"{key}9", b"123456789"),
        ("", bytearray(1)),
    ]
    got = store.get_many_into([*buffers, *extra])
    assert [each.value for each in got[:300]] == list(range(300))
    assert [bytes(buffer) for _, buffer in buffers] == [value for _, value in items]
    assert [type(each.error) for each in got[300:]] == [
        *(errors.NoSuchKey, errors.BufferTooSmall, errors.BufferTooSmall),
        *(ValueError, ValueError),
    ]
    wanted = [*(name for name, _ in items), key + "nope", "", f"{key}9"]
    for got in (store.get_many(wanted), store.take_leases(wanted)):
        assert [each.key for each in got] == wanted
        assert [bytes(each.unwrap()) for each in got[:300]] == [value for _, value in items]
        assert [type(each.error) for each in got[300:302]] == [errors.NoSuchKey, ValueError]
        assert repr(key + "nope") in str(got[300].error)
        assert bytes(got[302].unwrap()) == items[9][1]
    del got
    names = [f"{key}1", key + "nope", f"{key}299"]
    eventually(lambda: store.contains_many(names) == [True, False, True])
    assert store.match_prefix([f"{key}1", f"{key}200", key + "nope", f"{key}3"]) == 2
    assert store.contains_many(["", f"{key}1", "k" * 1025]) == [False, True, False]
    assert store.match_prefix([f"{key}1", "", f"{key}3"]) == 1
    store.prefetch(["", f"{key}1"])
    chain = [f"{key}1", f"{key}2", f"{key}200"]  # the last one is on the distant peer
    [holder] = store.match_prefix_by_peer(chain)
    assert (holder.blocks, holder.memory_blocks) == (2, 2)
    [distant] = store.match_prefix_by_peer(chain[2:])
    assert (distant.blocks, distant.peer != holder.peer) == (1, True)
    assert store.match_prefix_by_peer([key + "nope", f"{key}3"]) == []
    estimate = store.estimate([*chain, key + "nope", ""])
    sources = {each.peer: (each.kind, each.blocks) for each in estimate.sources}
    assert sources == {holder.peer: ("memory", 2), distant.peer: ("neighbour", 1)}
    assert (estimate.by_key[0] != estimate.by_key[2], estimate.by_key[3:]) == (True, [-1, -1])
    assert 0 < estimate.seconds < estimate.p90_seconds
    removed = store.remove_many([f"{key}1", f"{key}299", key + "nope", ""])
    assert [each.value for each in removed] == [True, True, False, None]
    assert isinstance(removed[3].error, ValueError)


def test_odd_values_and_buffers_fail_alone_and_stay_as_they_are(store: Store, key: str) -> None:
    """Each with good ones before and behind it, which are put and got."""
    torch = require_torch()
    store.put(f"{key}value", bytes(range(64)))
    for name, value in {**odd_arrays(), **odd_tensors()}.items():
        items = [(f"{key}{name} 1", b"1"), (f"{key}{name}", value), (f"{key}{name} 2", b"2")]
        put = store.put_many(items)
        assert [each.ok for each in put] == [True, False, True], name
        assert not store.contains(f"{key}{name}"), name
        for call in (store.put, store.put_tensor):
            with pytest.raises((ValueError, TypeError)):
                call(f"{key}{name}", value)
        for call in (store.register, partial(store.get_into, f"{key}value")):
            with pytest.raises((ValueError, TypeError)):
                call(value)
        rooms = [bytearray(64), value, bytearray(64)]
        got = store.get_many_into([(f"{key}value", each) for each in rooms])
        assert [each.ok for each in got] == [True, False, True], name
        assert rooms[0] == rooms[2] == bytes(range(64)), name
        assert str(got[1].error), name
    parameter = torch.nn.Parameter(torch.zeros(16))
    (got_it,) = store.get_many_into([(f"{key}value", parameter)])
    assert got_it.value == store.get_into(f"{key}value", parameter) == 64
    assert parameter.detach().numpy().tobytes() == bytes(range(64))
    expanded = odd_tensors()["expanded"]
    assert not store.get_many_into([(f"{key}value", expanded)])[0].ok
    assert expanded.sum() == 0


@pytest.mark.parametrize("first", [10, 100_000])
def test_batches_of_values_of_all_sizes(store: Store, key: str, cluster: Cluster, first: int) -> None:
    lengths = [first, 10, 0, 100_000, 16 * KIB, 16 * KIB + 1, 64 * KIB + 1, 2 * MIB, 5, 5 * MIB + 3]
    items = [(f"{key}{n}", random.Random(n).randbytes(length)) for n, length in enumerate(lengths)]
    assert all(each.ok for each in cluster.distant.put_many(items))
    store.put(f"{key}here", b"here")
    keys = [name for name, _ in items]
    eventually(lambda: all(store.contains_many(keys)))
    for _ in range(2):  # the second time it is known how to get there
        got = store.get_many([*keys, f"{key}here", f"{key}nowhere"])
        assert [each.value for each in got] == [*(value for _, value in items), b"here", None]
        assert isinstance(got[-1].error, errors.NoSuchKey)
        views = store.get_new_views([*keys, f"{key}nowhere"], lambda n: memoryview(bytearray(n)))
        assert [bytes(each) for each in views[:-1]] == [value for _, value in items]
        assert isinstance(views[-1], errors.NoSuchKey)
        assert not any(each.readonly for each in views[:-1])


def test_a_batch_of_one_gives_what_it_gives_among_others(
    store: Store, key: str, cluster: Cluster
) -> None:
    store.put(f"{key}here", b"here")
    for name, value in (("there", b"there"), ("empty", b""), ("large", bytes(2 * MIB))):
        cluster.distant.put(f"{key}{name}", value)
    names = [f"{key}{name}" for name in ("here", "there", "empty", "large")]
    eventually(lambda: all(store.contains_many(names)))
    keys: list[Any] = [*names, f"{key}there", f"{key}nope", "", "\ud800", 7]
    places: list[Any] = [*map(bytearray, (9, 5, 0, 2 * MIB, 1, 5, 5, 5, 5))]
    keys += [f"{key}here", f"{key}here", f"{key}there"]
    places += [bytearray(1), b"read-only", "no buffer"]

    def told(result: Any) -> tuple[type, Any]:
        error = result.error
        return type(error), result.value if error is None else str(error)

    for _ in range(2):  # the second time it is known how to get there
        many = store.get_many_into(list(zip(keys, places, strict=True)))
        for item, among_others in zip(zip(keys, places, strict=True), many, strict=True):
            (alone,) = store.get_many_into([item])
            assert (alone.key, told(alone)) == (item[0], told(among_others))
        for name, among_others in zip(keys, store.get_many(keys), strict=True):
            (alone,) = store.get_many([name])
            assert (alone.key, told(alone)) == (name, told(among_others))
    assert [bytes(place[:5]) for place in places[:2]] == [b"here\0", b"there"]
    values: list[Any] = [b"other", b"v", b"v", "text", b"v", bytearray(999 * MIB), b""]
    keys = [f"{key}here", "", "\ud800", f"{key}s", 7, f"{key}huge", f"{key}nothing"]
    many = store.put_many(list(zip(keys, values, strict=True)), overwrite=False)
    for item, among_others in zip(zip(keys, values, strict=True), many, strict=True):
        store.remove(f"{key}nothing")
        (alone,) = store.put_many([item], overwrite=False)
        assert (alone.key, type(alone.error)) == (item[0], type(among_others.error))
        assert alone.ok == among_others.ok
        if alone.ok:
            assert (alone.value.status, alone.value.location) == (
                among_others.value.status,
                among_others.value.location,
            )


@pytest.mark.parametrize("count", [2, 15, 16, 17, 31, 32, 33, 70])
def test_batches_of_few_and_of_many_say_the_same(
    store: Store, key: str, cluster: Cluster, count: int
) -> None:
    """Up to some number keys are looked up one after the other, above it side by side."""
    for number in range(count):
        if number % 4 == 0:
            store.put(f"{key}{number}", bytes([number]) * 3)
        elif number % 4 < 3:
            cluster.distant.put(f"{key}{number}", bytes([number]) * 3)
    keys = [f"{key}{number}" for number in range(count)]
    there = [number % 4 < 3 for number in range(count)]
    present = list(itertools.compress(keys, there))
    eventually(lambda: all(store.contains(name) for name in present))
    for _ in range(2):  # the second time it is known how to get there
        assert store.contains_many(keys) == there
        assert store.match_prefix(keys) == min(3, count)
        assert store.match_prefix(keys[4:]) == min(3, len(keys[4:]))
        expected = [bytes([n]) * 3 if is_there else None for n, is_there in enumerate(there)]
        assert [each.value for each in store.get_many(keys)] == expected
        buffers = [bytearray(3) for _ in keys]
        got = store.get_many_into(list(zip(keys, buffers, strict=True)))
        assert [each.ok for each in got] == there
        assert [bytes(b) if ok else None for b, ok in zip(buffers, there, strict=True)] == expected


def test_new_views_of_one(store: Store, key: str, cluster: Cluster) -> None:
    store.put(f"{key}here", b"here")
    cluster.distant.put(f"{key}there", b"there")
    eventually(lambda: store.contains(f"{key}there"))

    def refuse(length: int) -> memoryview:
        raise ValueError(f"no memory for {length} bytes")

    for name in ("here", "there", "here", "there"):
        (view,) = store.get_new_views([key + name], lambda n: memoryview(bytearray(n)))
        assert isinstance(view, memoryview)
        assert (bytes(view), view.readonly) == (name.encode(), False)
        (refused,) = store.get_new_views([key + name], refuse)
        assert isinstance(refused, ValueError)
        assert str(refused) == f"no memory for {len(name)} bytes"
    (missing,) = store.get_new_views([f"{key}nope"], refuse)
    assert isinstance(missing, errors.NoSuchKey)


def test_results_that_are_errors_keep_no_buffers_and_no_views(
    store: Store, key: str, cluster: Cluster
) -> None:
    store.put(f"{key}here", b"value")
    cluster.distant.put(f"{key}there", b"value")
    eventually(lambda: store.contains(f"{key}there"))
    gc.disable()
    try:
        buffers = [bytearray(5) for _ in range(6)]
        keys = [f"{key}here", f"{key}there", f"{key}here", f"{key}there", f"{key}nope", "\ud800"]
        buffers[2:4] = [bytearray(1), bytearray(1)]
        got = store.get_many_into(list(zip(keys, buffers, strict=True)))
        got += [store.get_many_into([each])[0] for each in zip(keys, buffers, strict=True)]
        put = store.put_many([(key, bytearray(200 * MIB)), ("", buffers[0])])
        put += store.put_many([(f"{key}durable", buffers[1])], durable=True)  # there is no SSD
        assert [each.ok for each in [*got, *put]] == [*(True, True, *[False] * 4) * 2, *[False] * 3]
        for buffer in buffers:
            buffer.append(0)  # BufferError while there is a view of it
        views = store.take_leases([f"{key}here", f"{key}there", f"{key}nope", "", "\ud800"])
        errors_told = [each.error for each in views if not each.ok]
        assert len(errors_told) == 3
        assert leased_bytes(cluster)
        del views
        eventually(lambda: leased_bytes(cluster) == 0)
    finally:
        gc.enable()


def test_batches_of_nothing(store: Store) -> None:
    assert store.put_many([]) == store.get_many_into([]) == []
    assert store.get_many([]) == store.take_leases([]) == []
    assert store.contains_many([]) == store.remove_many([]) == []
    assert store.match_prefix([]) == 0
    assert store.match_prefix_by_peer([]) == []
    assert store.prefetch([]) is None


def test_many_calls_at_once(store: Store, key: str) -> None:
    puts = store.together([("put", f"{key}{n}", pattern(4096, n)) for n in range(64)])
    assert [each.status for each in puts] == ["created"] * 64
    gets = store.together([("get", f"{key}{n}") for n in range(64)] + [("get", key + "nope")])
    assert gets[:64] == [pattern(4096, n) for n in range(64)]
    assert isinstance(gets[64], errors.NoSuchKey)
    same = store.together([("put", key + "same", b"value")] * 16)
    assert {each.status for each in same} <= {"created", "unchanged"}
    views = store.together([("take_lease", f"{key}{n}") for n in range(64)])
    assert all(view == value for view, value in zip(views, gets, strict=False))


# --- asking and changing ------------------------------------------------------------------------


def test_contains_and_locate(store: Store, key: str, cluster: Cluster) -> None:
    assert store.contains(key) is False
    assert store.locate(key) == []
    cluster.distant.put(key, b"value")
    eventually(lambda: store.contains(key))
    (place,) = store.locate(key)
    assert (place.peer, place.tier, place.local, place.reachable) == ("far", "dram", False, True)
    assert place.peer_id.startswith("12D3Koo")
    assert place.size_hint == 4096


def test_listing(store: Store, key: str, cluster: Cluster) -> None:
    store.put(key + "a", b"1", pin="soft", ttl=60)
    cluster.distant.put(key + "b", b"22")
    first = store.list_keys(key, limit=1)
    assert [each.key for each in first.keys] == [key + "a"]
    assert first.more
    assert first.silent_peers == []
    assert first.keys[0].expires_unix == pytest.approx(time.time() + 60, abs=10)
    rest = store.list_keys(key, after=key + "a")
    assert [(each.key, each.length, each.peers) for each in rest.keys] == [(key + "b", 2, ["far"])]
    assert not rest.more
    assert [each.key for each in store.list_keys(key, local=True).keys] == [key + "a"]
    assert [each.key for each in store.list_keys(key, pinned=True).keys] == [key + "a"]


def test_pins(store: Store, key: str) -> None:
    store.put(key, b"value")
    for pin in ("hard", "soft"):
        store.pin(key, pin)
        assert store.locate(key)[0].pin == pin
    store.unpin(key)
    assert store.locate(key)[0].pin == "none"
    for change in (store.pin, store.unpin):
        with pytest.raises(errors.NoSuchKey, match="no/such"):
            change("no/such")


def test_a_pin_of_what_only_another_peer_holds(store: Store, key: str, cluster: Cluster) -> None:
    cluster.distant.put(key, b"value")
    eventually(lambda: store.contains(key))
    there = store.pin(key, "hard", fetch=False)
    assert (there.copies, there.known) == (1, 1)
    assert [each.peer for each in store.locate(key)] == ["far"]
    both = store.pin(key, "hard")
    assert (both.copies, both.known) == (2, 2)
    eventually(
        lambda: (
            {(each.peer, each.pin) for each in store.locate(key)} == {("near", "hard"), ("far", "hard")}
        )
    )
    store.remove(key)
    for fetch in (True, False):
        with pytest.raises(errors.NoSuchKey):
            store.pin(key, fetch=fetch)


def test_prefetch(store: Store, key: str, cluster: Cluster) -> None:
    cluster.distant.put(key, b"value")
    store.prefetch([key, key + "nope"])
    eventually(lambda: {each.peer for each in store.locate(key)} == {"near", "far"})


def test_peers_and_statistics(store: Store) -> None:
    assert {(each.name, each.status) for each in store.peers()} == {("near", "alive"), ("far", "alive")}
    assert {each.name for each in store.peers(everyone=True)} >= {"near", "far"}
    assert {"peer", "cluster"} <= set(store.statistics())
    assert "peer" in store.statistics(cluster=False)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_flush_ends_a_namespace_and_no_other(world: str, cluster: Cluster, key: str) -> None:
    space = f"flushed by {world}"
    store = cluster.store(world, namespace=space)
    with blocking.connect(cluster.far.socket, namespace=space) as distant:
        distant.put("k", b"far")
        store.put("l", b"near")
        cluster.distant.put(key, b"other namespace")
        store.flush()
        eventually(lambda: not store.contains("k"))
        for name in ("k", "l"):
            with pytest.raises(errors.NoSuchKey):
                store.get(name)
        assert cluster.distant.get(key) == b"other namespace"
        assert store.put("k", b"far").status == "created"
        assert store.get("k") == b"far"
    close(store)


def close(store: Store) -> None:
    """End a store that a test made; peers and trio clients end with their loop."""
    if store.world == "asyncio":
        store.aclose()
    elif store.world == "blocking":
        store.close()


# --- leases -------------------------------------------------------------------------------------


def leased_bytes(cluster: Cluster) -> int:
    leased: int = cluster.on_near(lambda: cluster.near.node.core.segment.leased_bytes)
    return leased


def test_a_view_outlives_its_block_but_not_for_ever(store: Store, key: str, cluster: Cluster) -> None:
    eventually(lambda: leased_bytes(cluster) == 0)
    store.put(key, b"0123456789" * 1000)
    with store.lease(key) as view:
        assert bytes(view[:3]) == b"012"
    part = np.frombuffer(view[10:20], np.uint8)
    store.put(f"{key} too", b"another")
    another = store.take_lease(f"{key} too")
    of_both = leased_bytes(cluster)
    del view
    store.remove(key)
    del another
    gc.collect()
    eventually(
        lambda: leased_bytes(cluster) < of_both
    )  # a release that came later than the view's would
    assert leased_bytes(cluster) > 0
    store.put_many([(f"{key}{number}", bytes([number]) * 8192) for number in range(30)])
    assert bytes(part) == b"0123456789"
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    del part
    gc.collect()
    eventually(lambda: leased_bytes(cluster) == 0)


@pytest.mark.usefixtures("tidy")
def test_leases_are_limited(store: Store, key: str) -> None:
    views = []
    for number in range(3):
        store.put(f"{key}{number}", np.full(40 * MIB, number, np.uint8))
    views = [store.take_lease(f"{key}{number}") for number in range(2)]
    with pytest.raises(errors.LeaseLimitExceeded, match="let go"):
        store.take_lease(f"{key}2")
    views.pop()
    assert store.take_lease(f"{key}2")[0] == 2
    del views
    gc.collect()


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.array(7, ">i4"),
        np.array(1.5),
        np.zeros((0, 3), np.int8),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["2024-01-01"], "M8[D]"),
        np.array(["text"]),
        np.array([[1], [2]], np.float16),
    ],
    ids=lambda tensor: f"{tensor.dtype.str}{tensor.shape}",
)
def test_numpy_tensors(store: Store, key: str, tensor: Any, cluster: Cluster) -> None:
    assert store.put_tensor(key, tensor, pin="soft", ttl=60).status == "created"
    for reader in (store, cluster.distant):
        got = reader.get_tensor(key)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert np.array_equal(got, tensor)
        assert got.flags.writeable
    assert store.locate(key)[0].pin == "soft"


def test_what_is_no_tensor(store: Store, key: str) -> None:
    store.put(key, b"1234")
    with pytest.raises(errors.P2PStoreError, match=r"is not a tensor.*use get"):
        store.get_tensor(key)
    with pytest.raises(TypeError, match="numpy array or a torch tensor"):
        store.put_tensor(key, b"1234")
    for bad in (np.zeros(2, "i4,f4"), np.array([object()])):
        with pytest.raises(ValueError, match="plain numbers"):
            store.put_tensor(key, bad)
    for bad in (np.zeros((4, 4)).T[1:], np.zeros(8)[::2]):
        with pytest.raises(ValueError, match="ascontiguousarray"):
            store.put_tensor(key, bad)


def test_torch_tensors(store: Store, key: str, cluster: Cluster) -> None:
    torch = require_torch()
    names = ("float32", "bfloat16", "bool", "int64", "complex64", "float8_e4m3fn", "float8_e5m2")
    for name in names:
        for shape in ((2, 3), (), (0, 4)):
            tensor = torch.ones(shape).to(getattr(torch, name))
            assert store.put_tensor(key, tensor, overwrite=True).copies == 1
            got = store.get_tensor(key)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    weights = torch.nn.Parameter(torch.rand(4, 5))
    store.put_tensor(key + "w", weights)
    assert torch.equal(cluster.distant.get_tensor(key + "w"), weights.detach())
    assert np.array_equal(store.get_tensor(key + "w", framework="numpy"), weights.detach().numpy())
    into = torch.zeros(4, 5, requires_grad=True)
    assert store.get_into(key + "w", into) == 80
    assert torch.equal(into.detach(), weights.detach())
    batch = [(f"{key}{number}", torch.full((3,), number, dtype=torch.bfloat16)) for number in (1, 2)]
    assert all(each.ok for each in store.put_many(batch))
    read = [(name, torch.zeros(3, dtype=torch.bfloat16)) for name, _ in batch]
    assert [each.value for each in store.get_many_into(read)] == [6, 6]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(batch, read, strict=True))
    for bad, advice in (
        (torch.zeros(2, 3).T, "contiguous"),
        (torch.zeros(2, device="meta"), "cpu"),
        (torch.zeros(2).to_sparse(), "dense"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
    ):
        with pytest.raises(ValueError, match=advice):
            store.put_tensor(key + "bad", bad)
    store.put_tensor(key + "b", torch.zeros(2, dtype=torch.bfloat16))
    if "ml_dtypes" not in sys.modules:
        with pytest.raises(errors.P2PStoreError, match="install ml_dtypes"):
            store.get_tensor(key + "b", framework="numpy")


# --- registered memory --------------------------------------------------------------------------


def test_registered_memory(store: Store, key: str, cluster: Cluster) -> None:
    memory = bytearray(8192)
    with store.register(memory) as registered:
        registered.view[:5] = b"value"
        store.put(key, registered[:5])
        cluster.distant.put(key + "far", b"other")
        assert store.get_into(key, registered[4096:]) == 5
        assert store.get_into(key + "far", registered) == 5
        assert store.get_many_into([(key, registered)])[0].value == 5
        assert store.put_many([(key + "all", registered)])[0].ok
        assert memory[:5] == memory[4096:4101] == b"value"
        with pytest.raises(BufferError):
            memory.append(0)
    memory.append(0)
    with pytest.raises(ValueError, match="register it again"):
        store.put(key, registered)
    for bad, text in ((b"read-only", "read-only"), (memoryview(memory)[::2], "contiguous")):
        with pytest.raises(ValueError, match=text):
            store.register(bad)


@pytest.mark.parametrize("world", ["blocking", "asyncio"])
def test_what_is_registered_ends_with_the_store(world: str, cluster: Cluster) -> None:
    store = cluster.store(world)
    memory = bytearray(100)
    registered = store.register(memory)
    close(store)
    memory.append(0)
    with pytest.raises(ValueError, match="closed"):
        len(registered)
    with pytest.raises(errors.StoreClosed):
        store.register(memory)


# --- arguments ----------------------------------------------------------------------------------

BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    *(
        (name, (bad, *rest), {}, error, "key")
        for name, *rest in (
            *(("put", b""), ("put_tensor", np.zeros(1)), ("get",), ("get_tensor",)),
            *(("get_into", bytearray(1)), ("take_lease",), ("contains",), ("locate",)),
            *(("remove",), ("pin",), ("unpin",), ("replicate", 2)),
        )
        for bad, error in (
            *((b"bytes", TypeError), (7, TypeError), (None, TypeError)),
            *(("", ValueError), ("k" * 1025, ValueError), ("\udc80", ValueError)),
        )
    ),
    *(
        (name, args, {option: bad}, error, option)
        for name, args in (
            ("put", ("k", b"")),
            ("put_many", ([("k", b"")],)),
            ("put_tensor", ("k", np.zeros(1))),
        )
        for option, bad, error in (
            *(("replicas", "2", TypeError), ("replicas", 0, ValueError)),
            *(("replicas", 1.5, TypeError), ("replicas", True, TypeError)),
            *(("ttl", -1, ValueError), ("ttl", 0, ValueError), ("ttl", "1s", TypeError)),
            *(("ttl", float("nan"), ValueError), ("pin", "x", ValueError), ("pin", 1, TypeError)),
            *(("overwrite", "no", TypeError), ("durable", "yes", TypeError)),
            *(("on_conflict", "fail", ValueError), ("on_conflict", True, TypeError)),
        )
    ),
    *(
        (name, args, {"wait": bad}, error, "wait")
        for name, args in (
            *(("get", ("k",)), ("get_into", ("k", bytearray(1)))),
            *(("get_tensor", ("k",)), ("take_lease", ("k",))),
        )
        for bad, error in ((-1, ValueError), ("1", TypeError), (float("inf"), ValueError))
    ),
    ("get_tensor", ("k",), {"framework": "jax"}, ValueError, "framework"),
    ("take_leases", (["k"],), {"here": 1}, TypeError, "here"),
    *(
        (name, (bad,), {}, TypeError, "keys")
        for name in (
            *("contains_many", "match_prefix", "match_prefix_by_peer", "estimate"),
            *("remove_many", "prefetch", "get_many", "take_leases"),
        )
        for bad in ("key", b"key", 7)
    ),
    *(
        (name, (bad,), {}, TypeError, "items")
        for name in ("put_many", "get_many_into")
        for bad in ("key", 7, ["key"], [("key", b"", 1)])
    ),
    *(
        ("list_keys", (), {option: bad}, error, option)
        for option, bad, error in (
            *(("limit", 0, ValueError), ("limit", "1", TypeError), ("prefix", b"p", TypeError)),
            *(("after", 1, TypeError), ("local", 1, TypeError), ("pinned", "", TypeError)),
        )
    ),
    ("peers", (), {"everyone": 1}, TypeError, "everyone"),
    ("statistics", (), {"cluster": 1}, TypeError, "cluster"),
    ("pin", ("k", "firm"), {}, ValueError, "pin"),
    ("pin", ("k",), {"fetch": 1}, TypeError, "fetch"),
    ("pin", ("k", "soft"), {"ttl": 0}, ValueError, "ttl"),
    ("replicate", ("k", "2"), {}, TypeError, "copies"),
    ("replicate", ("k", 0), {}, ValueError, "copies"),
    ("leave", (), {"drain": -1}, ValueError, "drain"),
    ("put", ("k", "text"), {}, TypeError, "value"),
    ("put", ("k", memoryview(b"abcd")[::2]), {}, ValueError, "value"),
    ("get_into", ("k", b"1"), {}, ValueError, "destination"),
    ("get_into", ("k", "1"), {}, TypeError, "value"),
]


def test_arguments_that_cannot_be_are_refused_before_anything_is_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: object) -> None:
        raise AssertionError("something was sent")

    for name, args, options, error, text in BAD_CALLS:
        with monkeypatch.context() as patch, pytest.raises(error) as caught:
            patch.setattr(LocalConnection, "_frame", sent)
            getattr(store, name)(*args, **options)
        assert type(caught.value) in (TypeError, ValueError), (name, args, options)
        assert text in str(caught.value), (name, args, options, str(caught.value))
    assert store.contains_many(["no/such"]) == [False]


@pytest.mark.parametrize("connect", [p2pstore.connect, blocking.connect, aio.connect])
def test_arguments_of_connect(connect: Callable[..., Any], cluster: Cluster) -> None:
    path = cluster.near.socket
    for settings, error, text in (
        ({"namespace": b"n"}, TypeError, "namespace"),
        ({"namespace": ""}, ValueError, "namespace"),
        ({"namespace": "n" * 256}, ValueError, "namespace"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "5"}, TypeError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
    ):
        with pytest.raises(error, match=text):
            connect(path, **settings)
    with pytest.raises(TypeError):
        connect(7)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tidy")
def test_what_fits_nowhere_is_refused_at_once(store: Store, key: str) -> None:
    started = time.monotonic()
    with pytest.raises((errors.CapacityExceeded, errors.ObjectTooLarge), match=r"bytes|B"):
        store.put(key, np.zeros(400 * MIB, np.uint8))
    with pytest.raises(errors.ObjectTooLarge, match="4 GiB"):
        store.put(key, np.zeros(4096 * MIB + 1, np.uint8))
    assert time.monotonic() - started < 1


@pytest.mark.usefixtures("tidy")
def test_what_does_not_fit_here_goes_to_another_peer(store: Store, key: str, cluster: Cluster) -> None:
    for number in range(3):
        store.put(f"{key}pinned{number}", np.full(50 * MIB, number, np.uint8), pin="hard")
    value = pattern(50 * MIB)
    result = store.put(key + "elsewhere", value)
    assert (result.status, result.location, result.copies) == ("created", "far", 1)
    assert [place.peer for place in store.locate(key + "elsewhere")] == ["far"]
    buffer = bytearray(50 * MIB)
    assert store.get_into(key + "elsewhere", buffer) == 50 * MIB
    assert buffer == value


@pytest.mark.parametrize("world", WORLDS[1:])
def test_connecting_to_nobody(world: str, cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(errors.NoLocalPeer, match="mooncake-p2p join"):
        cluster.store(world, str(tmp_path / "nobody"))
    with pytest.raises(errors.ConfigError, match=r"107.*--socket"):
        cluster.store(world, "/" + "x" * 107)


def test_a_peer_that_hangs_and_dies(cluster: Cluster, tmp_path: Path, key: str) -> None:
    with peer_process(tmp_path, "victim", "--bootstrap", cluster.near.control) as victim:
        clients = [cluster.store(world, victim.socket, timeout=0.4) for world in WORLDS[1:]]
        clients[0].put(key, b"value")
        eventually(lambda: cluster.near.contains_nowait(key))
        views = [client.take_lease(key) for client in clients]
        victim.process.send_signal(signal.SIGSTOP)
        for client in clients:
            with pytest.raises(errors.DeadlineExceeded, match="did not answer within") as caught:
                client.locate(key)
            assert isinstance(caught.value, TimeoutError)
        victim.process.kill()
        victim.process.wait()
        for client, view in zip(clients, views, strict=True):
            for name, args in (("put", (key, b"v")), ("get", (key,)), ("contains", (key,))):
                with pytest.raises(errors.StoreClosed, match=r"stopped|ended|closed"):
                    getattr(client, name)(*args)
            assert bytes(view) == b"value"
            close(client)
        for store in cluster.stores.values():
            with pytest.raises(errors.Unavailable, match=r"known|reach"):
                store.get(key)
            with pytest.raises(errors.Unavailable):
                store.take_lease(key)


@pytest.mark.parametrize("world", ["blocking", "asyncio"])
def test_a_store_that_was_closed(world: str, cluster: Cluster, key: str) -> None:
    store = cluster.store(world)
    store.put(key, b"value")
    view = store.take_lease(key)
    close(store)
    close(store)
    for name, args in EVERY_METHOD:
        with pytest.raises(errors.StoreClosed, match="closed"):
            getattr(store, name)(*args)
    assert view == b"value"


EVERY_METHOD: list[tuple[str, tuple[Any, ...]]] = [
    *(("put", ("k", b"")), ("put_tensor", ("k", np.zeros(1))), ("put_many", ([],))),
    *(("get", ("k",)), ("get_into", ("k", bytearray(1))), ("get_tensor", ("k",))),
    *(("get_many", ([],)), ("take_leases", ([],))),
    *(("get_many_into", ([],)), ("take_lease", ("k",)), ("register", (bytearray(1),))),
    ("register_gpu", ()),
    *(("contains", ("k",)), ("contains_many", ([],)), ("locate", ("k",))),
    *(("match_prefix_by_peer", ([],)), ("estimate", ([],))),
    *(("match_prefix", ([],)), ("list_keys", ()), ("peers", ()), ("statistics", ())),
    *(("remove", ("k",)), ("remove_many", ([],)), ("pin", ("k",)), ("unpin", ("k",))),
    *(("prefetch", ([],)), ("replicate", ("k", 2)), ("flush", ())),
]


def test_the_list_of_methods_is_whole() -> None:
    named = {name for name, _ in EVERY_METHOD} - {"take_lease"} | {"lease", "transfers"}
    assert named == public_methods(ObjectStore)


# --- cancellation -------------------------------------------------------------------------------


def fetcher_of(store: Store) -> Fetcher:
    session = store.real._session if store.world == "blocking" else store.real
    fetcher: Fetcher = session._live.fetcher
    return fetcher


def read_by(fetcher: Fetcher, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from other peers by this transport alone."""
    only = [each for each in fetcher.holders._transports if each.name == transport]
    assert len(only) == 1
    monkeypatch.setattr(fetcher.holders, "_transports", only)
    if transport != "shm":  # mapped memory is read without a look at these
        monkeypatch.setattr(fetcher.holders._shm, "mapped", lambda _: ())


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the stores read from the far peer, which is on the same host."""
    for store in cluster.stores.values():
        read_by(fetcher_of(store), request.param, monkeypatch)
    name: str = request.param
    return name


@pytest.mark.usefixtures("tidy", "transport")
@pytest.mark.parametrize("world", ASYNC_WORLDS)
def test_cancelled_at_any_point_nothing_leaks(world: str, cluster: Cluster, key: str) -> None:
    store = cluster.stores[world]
    value, longer = np.zeros(9 * MIB, np.uint8), np.zeros(32 * MIB, np.uint8)
    cluster.distant.put(key + "far", longer + 1)
    cluster.distant.put(key + "small", b"value")
    rng = random.Random(3)
    buffer = np.zeros_like(longer)
    wanted = {"put", "put_many", "get_into"}
    cancelled: set[str] = set()
    for number in range(400):
        if number >= 32 and wanted <= cancelled:
            break  # on a machine that is quick just then, some cancellations come too late
        calls: list[tuple[Any, ...]] = [
            ("put", f"{key}{number}", value),
            ("get_into", key + "far", buffer),
            ("take_lease", key + "small"),
            ("put_many", [(f"{key}{number}", value), (f"{key}{number}b", b"small")]),
        ]
        name, *args = calls[number % len(calls)]
        longest = 0.012 if name.startswith("put") else 0.003
        if store.cancelled_after(rng.uniform(0, longest), name, *args):
            cancelled.add(name)
        after = buffer.copy()
        store.remove_many([f"{key}{number}", f"{key}{number}b"])
        assert np.array_equal(buffer, after), "something wrote to the buffer after cancellation"
    assert wanted <= cancelled
    assert store.get(key + "small") == b"value"
    eventually(lambda: leased_bytes(cluster) == 0)


@pytest.mark.parametrize("world", ASYNC_WORLDS)
def test_cancelling_one_call_leaves_the_others_alone(world: str, cluster: Cluster, key: str) -> None:
    store = cluster.stores[world]
    results: list[Any] = []

    def work(number: int) -> None:
        for turn in range(30):
            store.put(f"{key}{number}-{turn}", pattern(1000, turn))
            results.append(store.get(f"{key}{number}-{turn}") == pattern(1000, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        store.cancelled_after(0.0005 * (turn % 5), "locate", f"{key}{turn % 3}-0")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert results == [True] * 90


# --- other processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_a_store_pickles_as_its_socket(world: str, cluster: Cluster, key: str) -> None:
    settings: dict[str, Any] = {} if world == "peer" else {"namespace": "pickled", "timeout": 7.0}
    store = cluster.store(world, **settings)
    copy = pickle.loads(pickle.dumps(store.real))
    assert copy.namespace == store.real.namespace
    store.put(key, b"value")
    if world == "blocking":
        assert type(copy) is BlockingClient
        assert copy.socket_path == cluster.near.socket
        assert copy.get(key) == b"value"
        copy.close()
    elif world == "asyncio":
        assert type(copy) is AioClient

        async def use() -> Any:
            async with copy:
                return await copy.get(key)

        assert cluster.asyncio.run(use) == b"value"
        assert copy.timeout == 7.0
    else:
        assert type(copy) is Client  # of a peer too
        opened = cluster.trio.enter(copy)
        assert cluster.trio.run(opened.get, key) == b"value"
    close(store)


def get_elsewhere(client: Any, key: str) -> bytes:
    value: bytes = client.get(key)
    client.close()
    return value


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_client_travels_to_another_process(method: str, cluster: Cluster, key: str) -> None:
    cluster.distant.put(key, b"value")
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply_async(get_elsewhere, (cluster.distant, key)).get(60) == b"value"
        pool.close()
        pool.join()


def step(result: Any) -> Any:
    """The result of a call; of an asynchronous one, as far as it gets without waiting."""
    if not inspect.iscoroutine(result):
        return result
    try:
        result.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        result.close()
    raise AssertionError("it waits for something")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("world", WORLDS)
def test_a_forked_child_can_do_nothing_and_does_no_harm(
    world: str, cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cluster.store(world)
    fetcher = fetcher_of(store)
    read_by(fetcher, "tcp", monkeypatch)
    cluster.distant.put(key + "far", b"far")
    store.put(key, b"value")
    assert store.get(key + "far") == b"far"  # so that there are connections to other peers
    ((place,),) = fetcher.holders._pool._peers.values()
    connection = place.connection
    view = store.take_lease(key)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            in_the_child(store.real)
            del view
            gc.collect()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get(key) == b"value"
    assert store.get(key + "far") == b"far"
    assert place.connection is connection is not None  # still the same, and open
    assert not connection.closed
    assert store.locate(key)
    assert leased_bytes(cluster) > 0
    assert bytes(view) == b"value"
    close(store)


def in_the_child(real: Any) -> None:
    for name, args in EVERY_METHOD:
        with pytest.raises(errors.ClientForked, match="connect again"):
            step(getattr(real, name)(*args))
    if not isinstance(real, p2pstore.Peer):
        real.close()
